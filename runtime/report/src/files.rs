//! Files that others read: they are there whole, or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Replaces a file atomically, so that readers see all of the old or all of the new content, also after a
/// power failure: the content is written to a temporary file of this process first. An existing path that is
/// not a regular file, such as a pipe, is written to directly.
///
/// # Errors
/// Those of the file system; the old content is kept then.
pub fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return fs::write(path, content);
    }
    // the file that a link leads to is replaced, and not the link
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let partial = beside(path);
    let written = File::create_new(&partial).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&partial, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&partial);
    }
    renamed
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_or_as_it_was() {
        let folder = std::env::temp_dir().join(format!("mixfleet-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("a.html");
        write_whole(&file, b"old").unwrap();
        // the name that it is written under first is taken
        fs::create_dir(beside(&file)).unwrap();
        assert!(write_whole(&file, b"new").is_err());
        assert_eq!(fs::read(&file).unwrap(), b"old");
        fs::remove_dir(beside(&file)).unwrap();
        write_whole(&file, b"new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left");
        assert!(write_whole(&folder.join("none/a.html"), b"").is_err());
        write_whole(Path::new("/dev/null"), b"gone").unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}
