//! The secret by which the processes of one host authenticate each other without certificates.

use anyhow::{Context, Result, bail};
use mixfleet_runtime::fleet::rpc::Token;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// More than the length of a token with white space around it.
const BYTES_MAX: u64 = 1024;

/// The token in `file`, or in the one that all processes of this user share. A missing file is created.
pub(crate) fn load(file: Option<&Path>) -> Result<Token> {
    let file = match file {
        Some(file) => file.to_owned(),
        None => of_this_user().context("neither HOME nor XDG_CACHE_HOME is set: give --token-file")?,
    };
    let token = read(&file).or_else(|error| match error.downcast_ref::<std::io::Error>() {
        Some(cause) if cause.kind() == ErrorKind::NotFound => make(&file).and_then(|()| read(&file)),
        _ => Err(error),
    });
    token.with_context(|| format!("the fleet's token, {}", file.display()))
}

fn of_this_user() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("mixfleet").join("token"))
}

/// Reads a file that no other user can read or could have written. The checks apply to the open file.
fn read(file: &Path) -> Result<Token> {
    let named = fs::symlink_metadata(file)?;
    if !named.is_file() {
        bail!("it is not a regular file, or a symbolic link that others may control: name the file itself");
    }
    let opened = File::open(file)?;
    let found = opened.metadata()?;
    if (found.dev(), found.ino()) != (named.dev(), named.ino()) {
        bail!("it changes while it is opened");
    }
    if found.mode() & 0o077 != 0 {
        bail!("others may read or write it: chmod 600");
    }
    if found.uid() != own_uid()? {
        bail!("it belongs to another user");
    }
    let mut text = String::new();
    opened.take(BYTES_MAX).read_to_string(&mut text)?;
    Token::parse(&text)
        .context("expected 64 hexadecimal digits: remove it, and the next process makes another")
}

/// The user id of the files that this process creates.
fn own_uid() -> Result<u32> {
    Ok(fs::metadata("/proc/self").context("the owner of a process is unknown without /proc")?.uid())
}

/// Creates a token, unless another process does so first: the file is complete as soon as its name exists.
fn make(file: &Path) -> Result<()> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(directory) = directory {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    }
    let text = Token::random_text().context("the operating system has no randomness")?;
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    let mut to = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
    let written = to.write_all(text.as_bytes()).and_then(|()| to.sync_all());
    let linked = written.and_then(|()| fs::hard_link(&partial, file));
    let _ = fs::remove_file(&partial);
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("mixfleet-token-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn a_token_is_made_once_for_this_user_alone() {
        let directory = scratch("made");
        let file = directory.join("deep").join("token");
        load(Some(&file)).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        load(Some(&file)).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(file.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_token_that_others_can_read_or_have_laid_is_refused() {
        let directory = scratch("refused");
        let file = directory.join("token");
        load(Some(&file)).unwrap();
        let link = directory.join("link");
        symlink(&file, &link).unwrap();
        let refused = |file: &Path| format!("{:#}", load(Some(file)).unwrap_err());
        assert!(refused(&link).contains("symbolic link"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(refused(&file).contains("chmod 600"));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "secret").unwrap();
        assert!(refused(&file).contains("64 hexadecimal"));
        fs::remove_dir_all(directory).unwrap();
    }
}
