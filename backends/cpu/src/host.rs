//! Host memory for everyone: mapped files.

use mixfleet_hal::{FileMapper, HostMemory};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Maps files read-only.
///
/// A mapped file must not change while it is in use; another process that truncates it kills this one
/// with SIGBUS. That is the contract of [`HostMemory`], and the reason to replace checkpoints by rename.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mapper;

#[derive(Debug)]
struct MappedFile {
    map: Option<memmap2::Mmap>,
}

impl HostMemory for MappedFile {
    fn as_bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }
}

impl FileMapper for Mapper {
    fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Arc::new(MappedFile { map: None })); // mmap refuses a length of zero
        }
        // SAFETY: the mapping is read-only and private to this process; that nobody changes the file
        // meanwhile is the documented contract.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        #[cfg(target_os = "linux")]
        {
            // best effort: huge pages where the file system has them, and all pages mapped now, at
            // memory speed, instead of one fault at a time under the first prompt
            let _ = map.advise(memmap2::Advice::HugePage);
            let _ = map.advise(memmap2::Advice::PopulateRead);
        }
        Ok(Arc::new(MappedFile { map: Some(map) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_a_file_an_empty_one_and_reports_a_missing_one() {
        let directory = std::env::temp_dir().join(format!("mixfleet-cpu-host-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let (full, empty) = (directory.join("full"), directory.join("empty"));
        std::fs::write(&full, b"some bytes").unwrap();
        std::fs::write(&empty, b"").unwrap();
        assert_eq!(Mapper.map(&full).unwrap().as_bytes(), b"some bytes");
        assert_eq!(Mapper.map(&empty).unwrap().as_bytes(), b"");
        assert_eq!(Mapper.map(&directory.join("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
