//! Blocks on a real disk are accessible only to their user.

use super::support::{ScratchDirectory, config, open, put, ssd};
use mixfleet_runtime::pool::PoolError;
use mixfleet_runtime::pool::disk::{Disk, RealDisk};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

const FILES: [&str; 4] = ["blocks", "journal", "lock", "meta"];

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("it is there").mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
}

/// A pool with blocks in `pool` below `directory`.
fn used(directory: &ScratchDirectory) -> std::path::PathBuf {
    let path = directory.0.join("pool");
    let disk = RealDisk::open(&path).expect("a new directory");
    let pool = open(config(1, Some(ssd(disk, 8)))).expect("a new pool");
    (0..6).for_each(|key| {
        put(&pool, key);
    });
    pool.sync().expect("a sound disk");
    path
}

fn refused(path: &Path) -> String {
    let error = RealDisk::open(path).expect_err("it must be refused");
    assert!(matches!(error, PoolError::Exposed { .. }), "{error}");
    assert!(error.to_string().contains("chmod 700"), "it does not say what to do: {error}");
    error.to_string()
}

/// Whether this process may change the owner of files.
fn is_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("NOT RUN: only root can make files of another user: {what}");
    }
    root
}

#[test]
fn a_new_directory_is_closed_to_others() {
    let directory = ScratchDirectory::new("mode-directory");
    assert_eq!(mode(&used(&directory)), 0o700);
}

#[test]
fn new_files_are_closed_to_others() {
    let directory = ScratchDirectory::new("mode-files");
    let path = used(&directory);
    for file in FILES {
        assert_eq!(mode(&path.join(file)), 0o600, "{file}");
    }
}

#[test]
fn a_directory_and_files_that_others_could_read_are_closed_to_them() {
    let directory = ScratchDirectory::new("mode-old");
    let path = used(&directory);
    set_mode(&path, 0o755);
    FILES.iter().for_each(|file| set_mode(&path.join(file), 0o644));
    let pool = open(config(1, Some(ssd(RealDisk::open(&path).expect("it is ours"), 8)))).expect("a pool's");
    assert!(pool.stats().ssd_blocks > 0);
    assert!((0..6).any(|key| super::support::served(&pool, key)));
    assert_eq!(mode(&path), 0o700);
    for file in FILES {
        assert_eq!(mode(&path.join(file)), 0o600, "{file}");
    }
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let directory = ScratchDirectory::new("writable");
    let path = used(&directory);
    for open_to in [0o770, 0o702, 0o1777] {
        set_mode(&path, open_to);
        assert!(refused(&path).contains("others may write to it"));
    }
    set_mode(&path, 0o700);
    RealDisk::open(&path).expect("it is ours alone again");
}

#[test]
fn a_file_that_others_may_write_to_is_refused() {
    let directory = ScratchDirectory::new("writable-file");
    let path = used(&directory);
    set_mode(&path.join("blocks"), 0o666);
    let error = RealDisk::open(&path).expect("the directory is").len("blocks").expect_err("refused");
    assert!(
        error.to_string().contains("`blocks`") && error.to_string().contains("others may write"),
        "{error}"
    );
}

#[test]
fn a_link_in_place_of_the_directory_is_refused() {
    let directory = ScratchDirectory::new("link-directory");
    let path = used(&directory);
    let link = directory.0.join("link");
    symlink(&path, &link).expect("a link");
    assert!(refused(&link).contains("symbolic link"));
    assert!(refused(&link.join("")).contains("symbolic link"), "with a slash at the end");
}

#[test]
fn a_link_in_place_of_a_file_is_refused_and_what_it_leads_to_is_not_touched() {
    for file in FILES {
        let directory = ScratchDirectory::new(&format!("link-{file}"));
        let path = used(&directory);
        let victim = directory.0.join("victim");
        fs::write(&victim, "precious").expect("a file");
        fs::remove_file(path.join(file)).expect("it is there");
        symlink(&victim, path.join(file)).expect("a link");
        let opened = RealDisk::open(&path).and_then(|disk| open(config(1, Some(ssd(disk, 8)))));
        if let Err(error) = &opened {
            assert!(error.to_string().contains("symbolic link"), "{file}: {error}");
        } else {
            // `blocks` is opened when it is used: nothing is read or written through the link.
            let pool = opened.expect("open");
            (20..30).for_each(|key| {
                put(&pool, key);
            });
            assert!((0..6).all(|key| !super::support::served(&pool, key)), "{file}");
        }
        assert_eq!(fs::read_to_string(&victim).expect("it is there"), "precious", "{file}");
    }
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_and_holds_nobody_up() {
    let directory = ScratchDirectory::new("pipe");
    let path = used(&directory);
    fs::remove_file(path.join("meta")).expect("it is there");
    let made = std::process::Command::new("mkfifo").arg(path.join("meta")).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("NOT RUN: no mkfifo");
        return;
    }
    let disk = RealDisk::open(&path).expect("the directory is ours");
    let error = open(config(1, Some(ssd(disk, 8)))).map(|pool| format!("{pool:?}")).expect_err("refused");
    assert!(error.to_string().contains("not a plain file"), "{error}");
}

#[test]
fn another_users_directory_is_refused() {
    if !is_root("a directory of another user") {
        return;
    }
    let directory = ScratchDirectory::new("foreign");
    let path = used(&directory);
    chown(&path, Some(12345), None).expect("root may");
    assert!(refused(&path).contains("belongs to user 12345"));
}

#[test]
fn another_users_file_is_refused() {
    if !is_root("a file of another user") {
        return;
    }
    for file in FILES {
        let directory = ScratchDirectory::new(&format!("foreign-{file}"));
        let path = used(&directory);
        chown(path.join(file), Some(12345), None).expect("root may");
        let error = match RealDisk::open(&path) {
            Err(error) => error.to_string(),
            Ok(disk) => disk.len(file).expect_err("it must be refused").to_string(),
        };
        assert!(error.contains("belongs to user 12345") && error.contains(file), "{file}: {error}");
    }
}
