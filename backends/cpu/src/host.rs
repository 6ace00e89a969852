//! The host for everyone: mapped files, and where and when threads run.

#[cfg(target_os = "linux")]
use crate::copied::HugeCopies;
#[cfg(target_os = "linux")]
use crate::lost::MappedFileWatch;
use crate::topology;
use mixfleet_hal::memory::FileStamp;
use mixfleet_hal::{Error, ErrorKind, FileMapper, HostMemory, Result};
use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Maps regular files read-only.
///
/// A mapped file must not change while it is in use: replace a checkpoint by renaming another one over it,
/// which leaves the mapped file intact. If one is truncated or overwritten anyway, the process survives (on
/// Linux) and no wrong result is used, since [`HostMemory::check`] reports it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mapper;

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    file: File,
    /// Metadata from before anything was read.
    first: Metadata,
    /// Time of the last write before the bytes were verified to be unchanged.
    written: Mutex<Option<SystemTime>>,
    /// Dropped before the mapping.
    #[cfg(target_os = "linux")]
    watch: Option<MappedFileWatch>,
    /// Dropped before the mapping.
    #[cfg(target_os = "linux")]
    copies: Option<HugeCopies>,
    map: Option<memmap2::Mmap>,
}

impl MappedFile {
    fn written(&self) -> MutexGuard<'_, Option<SystemTime>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapping, if these bytes are some and inside it.
    #[cfg(unix)]
    fn map_of(&self, range: &std::ops::Range<usize>) -> Option<&memmap2::Mmap> {
        self.map.as_ref().filter(|map| range.start < range.end && range.end <= map.len())
    }

    /// Calls `each` with the parts of a range that are the file's own pages.
    #[cfg(unix)]
    fn still_mapped(&self, range: &std::ops::Range<usize>, mut each: impl FnMut(std::ops::Range<usize>)) {
        #[cfg(target_os = "linux")]
        if let Some(copies) = &self.copies {
            return copies.mapped(range, each);
        }
        each(range.clone());
    }

    fn damage(&self) -> Option<String> {
        #[cfg(target_os = "linux")]
        if self.watch.as_ref().is_some_and(MappedFileWatch::has_lost) {
            return Some("lost bytes in use: it was truncated, or its disk failed".into());
        }
        match self.file.metadata() {
            Err(error) => Some(format!("cannot be accessed any more: {error}")),
            Ok(now) if now.len() != self.first.len() => {
                Some(format!("has {} bytes now, and had {} when it was loaded", now.len(), self.first.len()))
            }
            Ok(now) if now.modified().ok() != *self.written() => {
                Some("was written to since it was loaded".into())
            }
            Ok(_) => None,
        }
    }
}

impl HostMemory for MappedFile {
    fn as_bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    fn check(&self) -> Result<()> {
        self.damage().map_or(Ok(()), |damage| {
            let detail = format!("the file {} {damage}; put it back and start again", self.path.display());
            Err(Error::new(ErrorKind::DeviceLost, detail))
        })
    }

    #[cfg(target_os = "linux")]
    fn needed(&self, range: std::ops::Range<usize>) {
        if let Some(map) = self.map_of(&range) {
            // best effort: huge pages if the file system supports them, and all pages mapped now at memory
            // speed, instead of one fault at a time during the first prompt
            self.still_mapped(&range, |range| {
                let _ = map.advise_range(memmap2::Advice::HugePage, range.start, range.len());
                let _ = map.advise_range(memmap2::Advice::PopulateRead, range.start, range.len());
            });
            if let Some(copies) = &self.copies {
                copies.copy_soon(&range);
            }
        }
    }

    #[cfg(unix)]
    fn unneeded(&self, range: std::ops::Range<usize>) {
        if let Some(map) = self.map_of(&range) {
            self.still_mapped(&range, |range| {
                // SAFETY: these bytes are mapped from a file and never written to, so that the same are read
                // again.
                let told = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
                };
                // else they stay until memory is short
                let _ = told;
            });
        }
    }

    #[cfg(unix)]
    fn stamp(&self) -> Option<FileStamp> {
        use std::os::unix::fs::MetadataExt;
        let now = self.file.metadata().ok()?;
        Some(FileStamp {
            device: now.dev(),
            inode: now.ino(),
            bytes: now.len(),
            modified: (now.mtime(), now.mtime_nsec()),
            changed: (now.ctime(), now.ctime_nsec()),
        })
    }

    #[cfg(unix)]
    fn accept(&self, stamp: &FileStamp) {
        let Ok(now) = self.file.metadata() else { return };
        if self.stamp().as_ref() == Some(stamp) {
            *self.written() = now.modified().ok();
        }
    }
}

impl FileMapper for Mapper {
    fn map(&self, path: &Path) -> io::Result<Arc<dyn HostMemory>> {
        let file = mixfleet_hal::files::open(path)?;
        let first = file.metadata()?;
        let mut mapped = MappedFile {
            path: path.to_owned(),
            file,
            written: Mutex::new(first.modified().ok()),
            first,
            #[cfg(target_os = "linux")]
            watch: None,
            #[cfg(target_os = "linux")]
            copies: None,
            map: None,
        };
        let bytes = mapped.first.len();
        if bytes == 0 {
            return Ok(Arc::new(mapped)); // mmap refuses a length of zero
        }
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        // SAFETY: the mapping is read-only and private to this process; the documented contract is that the
        // file does not change, and `check` detects a violation.
        let map = unsafe { memmap2::MmapOptions::new().len(length).map(&mapped.file)? };
        #[cfg(target_os = "linux")]
        {
            mapped.watch = Some(MappedFileWatch::over(&map));
            mapped.copies = Some(HugeCopies::of(&map, mapped.file.try_clone()?));
        }
        mapped.map = Some(map);
        Ok(Arc::new(mapped))
    }
}

/// Gives the calling thread idle priority.
pub fn yield_to_others() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: SCHED_IDLE takes zeroed parameters; 0 is the calling thread. A refusal changes nothing.
        unsafe {
            let parameters: libc::sched_param = std::mem::zeroed();
            libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters);
        }
    }
}

/// Returns the logical CPUs that the calling thread may run on, ascending: those allowed by its affinity mask
/// and control group.
pub fn allowed_cpus() -> Vec<usize> {
    topology::cores_allowed()
}

/// Binds the calling thread to `cpus`. Threads that it starts later are bound likewise.
///
/// # Errors
/// When the system refuses, binds no threads, or knows none of the CPUs; the thread runs where it did.
pub fn bind_to(cpus: &[usize]) -> io::Result<()> {
    topology::bind_thread(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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

    fn scratch(name: &str) -> PathBuf {
        let directory = std::env::temp_dir().join(format!("mixfleet-cpu-{name}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn what_is_no_regular_file_is_refused_and_does_not_hang() {
        let directory = scratch("irregular");
        let fifo = directory.join("model.safetensors");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo");
        for (path, said) in
            [(fifo, "a pipe"), (PathBuf::from("/dev/null"), "device"), (directory.clone(), "a directory")]
        {
            let error = Mapper.map(&path).unwrap_err().to_string();
            assert!(
                error.contains(said) && error.contains("expected a regular file"),
                "{}: {error}",
                path.display()
            );
        }
        fs::remove_dir_all(&directory).unwrap();
    }

    fn changed(name: &str, change: impl FnOnce(&Path)) -> Arc<dyn HostMemory> {
        let directory = scratch(name);
        let path = directory.join("file");
        fs::write(&path, vec![7; 3 << 20]).unwrap();
        let memory = Mapper.map(&path).unwrap();
        assert_eq!(memory.check(), Ok(()));
        let stamp = memory.stamp();
        change(&path);
        assert_ne!(memory.stamp(), stamp);
        fs::remove_dir_all(&directory).unwrap();
        memory
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_file_cut_under_its_mapping_reads_as_zeros_and_is_told() {
        let memory =
            changed("cut", |path| File::options().write(true).open(path).unwrap().set_len(5000).unwrap());
        // the remaining bytes of the file, the rest of its page, and an access that would have ended the
        // process
        assert_eq!((memory.as_bytes()[4999], memory.as_bytes()[5000], memory.as_bytes()[1 << 20]), (7, 0, 0));
        assert!(memory.as_bytes()[5000..].iter().all(|byte| *byte == 0));
        let error = memory.check().unwrap_err();
        assert_eq!(error.kind, ErrorKind::DeviceLost);
        assert!(error.detail.contains("lost bytes in use"), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn lost_bytes_are_told_after_the_file_is_put_back() {
        let directory = scratch("back");
        let path = directory.join("file");
        fs::write(&path, vec![7; 3 << 20]).unwrap();
        let (memory, before) = (Mapper.map(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(0).unwrap();
        assert_eq!(memory.as_bytes()[1 << 20], 0);
        file.set_len(3 << 20).unwrap();
        file.set_modified(before).unwrap();
        assert!(memory.check().unwrap_err().detail.contains("lost bytes in use"));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_file_that_is_written_to_is_told() {
        let memory = changed("written", |path| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            fs::write(path, vec![8; 3 << 20]).unwrap();
        });
        assert!(memory.check().unwrap_err().detail.contains("was written to"));
    }

    #[test]
    fn what_was_written_to_is_used_on_once_its_bytes_were_found_to_be_the_same_and_not_what_was_cut() {
        let wait = || std::thread::sleep(std::time::Duration::from_millis(20));
        let directory = scratch("accepted");
        let path = directory.join("file");
        fs::write(&path, vec![7; 3 << 20]).unwrap();
        let memory = Mapper.map(&path).unwrap();
        let touch = || {
            wait();
            File::options().write(true).open(&path).unwrap().set_modified(SystemTime::now()).unwrap();
        };
        touch();
        assert!(memory.check().is_err());
        let stamp = memory.stamp().unwrap();
        memory.accept(&stamp);
        assert_eq!(memory.check(), Ok(()));
        touch();
        assert!(memory.check().is_err(), "each time anew");
        memory.accept(&stamp);
        assert!(memory.check().is_err(), "it was written to since it had that stamp");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(4096).unwrap();
        let lost = memory.as_bytes()[1 << 20];
        file.set_len(3 << 20).unwrap();
        memory.accept(&memory.stamp().unwrap());
        assert!(lost == 7 || memory.check().is_err());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_file_that_is_replaced_by_rename_is_what_it_was() {
        let memory = changed("renamed", |path| {
            let other = path.with_extension("new");
            fs::write(&other, vec![8; 3 << 20]).unwrap();
            fs::rename(&other, path).unwrap();
        });
        assert_eq!((memory.check(), memory.as_bytes()[1 << 20]), (Ok(()), 7));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_bus_error_of_anything_else_still_ends_the_process() {
        const CHILD: &str = "MIXFLEET_TEST_UNWATCHED";
        if std::env::var_os(CHILD).is_some() {
            let path = std::env::temp_dir().join(format!("mixfleet-cpu-unwatched-{}", std::process::id()));
            fs::write(&path, [7; 9000]).unwrap();
            let _watched = Mapper.map(&path).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            // SAFETY: the file shrinks under the mapping, which is what this process is to die of.
            let unwatched = unsafe { memmap2::Mmap::map(&file).unwrap() };
            fs::remove_file(&path).unwrap();
            file.set_len(0).unwrap();
            std::process::exit(i32::from(unwatched[8999]));
        }
        let name = "host::tests::a_bus_error_of_anything_else_still_ends_the_process";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let status = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap().status;
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGBUS), "{status}");
    }
}
