//! Host memory that both ends of a transport can access.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::{PoisonError, RwLock};

/// Zeroed, page-aligned memory; on Linux an anonymous file (memfd), so that another process can map it. Calls
/// are mutually exclusive: many readers or one writer at a time.
#[derive(Debug)]
pub struct HostRegion {
    map: memmap2::MmapRaw,
    bytes: usize,
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    file: Option<File>,
    lock: RwLock<()>,
}

impl HostRegion {
    /// Allocates `bytes` zero bytes.
    ///
    /// # Errors
    /// `OutOfMemory` if the operating system refuses.
    pub fn new(bytes: usize) -> Result<Self> {
        let refused = |error: std::io::Error| {
            Error::new(ErrorKind::OutOfMemory, format!("{bytes} bytes of shared memory: {error}"))
        };
        // an empty mapping is refused
        let length = bytes.max(1);
        let file = nameless_file(length as u64).map_err(refused)?;
        let options = || {
            let mut options = memmap2::MmapOptions::new();
            options.len(length);
            options
        };
        let map = match &file {
            Some(file) => options().map_raw(file).map_err(refused)?,
            None => options().map_anon().map_err(refused)?.into(),
        };
        prefer_huge_pages(&map);
        Ok(HostRegion { map, bytes, file, lock: RwLock::new(()) })
    }
}

/// Creates an anonymous file of `bytes` zero bytes with a sealed length: a process that receives it cannot
/// truncate it, which would kill every process that touches the lost pages.
#[cfg(target_os = "linux")]
pub(crate) fn nameless_file(bytes: u64) -> std::io::Result<Option<File>> {
    use std::os::fd::{AsRawFd, FromRawFd};
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string; the call touches nothing else of ours.
    let fd = unsafe { libc::memfd_create(c"mixfleet-kv".as_ptr(), flags) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: an open descriptor and a plain number.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(Some(file))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn nameless_file(_bytes: u64) -> std::io::Result<Option<File>> {
    Ok(None)
}

/// Requests huge pages, which halve the time of a copy that exceeds the caches. A refusal is harmless.
#[cfg(target_os = "linux")]
pub(crate) fn prefer_huge_pages(map: &memmap2::MmapRaw) {
    const HUGE_PAGE_BYTES: usize = 2 << 20;
    if map.len() >= HUGE_PAGE_BYTES {
        let _ = map.advise(memmap2::Advice::HugePage);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn prefer_huge_pages(_map: &memmap2::MmapRaw) {}

/// Returns the range of `length` bytes at `offset` in a region of `bytes` bytes.
///
/// # Errors
/// `Invalid` if it exceeds the region.
pub(crate) fn range(offset: u64, length: u64, bytes: u64) -> Result<std::ops::Range<usize>> {
    let end = offset.checked_add(length).filter(|&end| end <= bytes);
    match end {
        Some(end) => Ok(to_usize(offset)..to_usize(end)),
        None => {
            Err(Error::invalid(format!("{length} bytes at offset {offset} leave a region of {bytes} bytes")))
        }
    }
}

impl SharedMemory for HostRegion {
    fn size_bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        let range = range(offset, bytes, self.size_bytes())?;
        // plain bytes cannot be left half-updated, so a poisoned lock is harmless
        let _shared = self.lock.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is inside the mapping, which lives as long as `self`; in this process it is not
        // written under the shared lock. A peer that violates the protocol changes plain bytes, whose hash is
        // checked before they are used.
        look(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) });
        Ok(())
    }

    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let range = range(offset, bytes, self.size_bytes())?;
        let _alone = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as in `view`; the lock is exclusive.
        change(unsafe {
            std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(range.start), range.len())
        });
        Ok(())
    }

    fn mapping(&self) -> Option<Mapping> {
        #[cfg(target_os = "linux")]
        let fd = self.file.as_ref().map(std::os::fd::AsRawFd::as_raw_fd);
        #[cfg(not(target_os = "linux"))]
        let fd = None;
        Some(Mapping { address: self.map.as_ptr() as usize, bytes: self.size_bytes(), fd })
    }

    #[cfg(target_os = "linux")]
    fn renew(&self) -> Result<()> {
        let Some(file) = &self.file else {
            return Err(Error::unsupported("memory without a file cannot be renewed"));
        };
        let _alone = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        replace_pages(file, &self.map).map_err(|error| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("{} fresh bytes of shared memory: {error}", self.bytes),
            )
        })
    }
}

/// Copies the bytes of `map` to a new anonymous file and replaces `file` and its pages by it.
#[cfg(target_os = "linux")]
fn replace_pages(file: &File, map: &memmap2::MmapRaw) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let length = map.len();
    let fresh_file = nameless_file(length as u64)?.ok_or(std::io::ErrorKind::Unsupported)?;
    let fresh = memmap2::MmapOptions::new().len(length).map_raw(&fresh_file)?;
    prefer_huge_pages(&fresh);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both mappings have `length` bytes and do not overlap; the caller holds the region's lock, so
    // that no thread of this process writes. `mremap` replaces the old pages atomically: the address is never
    // unmapped.
    let moved = unsafe {
        std::ptr::copy_nonoverlapping(map.as_ptr(), fresh.as_mut_ptr(), length);
        libc::mremap(fresh.as_mut_ptr().cast(), length, length, flags, map.as_mut_ptr())
    };
    if moved == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    // its mapping has moved to the old address and is unmapped with that
    std::mem::forget(fresh);
    // SAFETY: two open descriptors; the old file closes, and its number names the fresh one from here on.
    if unsafe { libc::dup3(fresh_file.as_raw_fd(), file.as_raw_fd(), libc::O_CLOEXEC) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use twox_hash::XxHash3_64;

    #[test]
    fn what_was_stored_is_loaded_up_to_the_very_end() {
        let region = HostRegion::new(8).unwrap();
        region.store(5, &[1, 2, 3]).unwrap();
        let mut data = [9; 8];
        region.load(0, &mut data).unwrap();
        assert_eq!(data, [0, 0, 0, 0, 0, 1, 2, 3]);
        region.store(8, &[]).unwrap();
    }

    #[test]
    fn a_hashed_copy_is_a_copy_and_its_hash_that_of_all_of_it() {
        const BYTES: usize = 100_000;
        let data: Vec<u8> = (0..BYTES).map(|at| (at * 31 / 7 % 251) as u8).collect();
        let region = HostRegion::new(BYTES + 1).unwrap();
        for length in [0, 1, 240, 241, 8191, 8192, 8193, 65_536, BYTES] {
            let part = &data[..length];
            assert_eq!(region.store_hashed(1, part), Ok(XxHash3_64::oneshot(part)), "{length} bytes");
            let mut copy = vec![0; length];
            region.load(1, &mut copy).unwrap();
            assert!(copy == part, "{length} bytes");
        }
        // of the xxHash library: what peers and frames on disks have must not change
        assert_eq!(region.store_hashed(0, &[]), Ok(0x2d06_8005_38d3_94c2));
        assert_eq!(region.store_hashed(0, &data), Ok(0xaaef_5be9_02f7_e473));
        for at in [0, 8191, 8192, BYTES - 1] {
            let mut damaged = data.clone();
            damaged[at] ^= 1;
            assert_ne!(region.store_hashed(0, &damaged), Ok(0xaaef_5be9_02f7_e473), "byte {at}");
        }
        assert_eq!(region.store_hashed(2, &data).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn nothing_is_reached_beyond_the_end() {
        let region = HostRegion::new(8).unwrap();
        for (offset, length) in [(6, 3), (8, 1), (9, 0), (u64::MAX, 2)] {
            let mut data = vec![7; length];
            assert_eq!(region.store(offset, &data).unwrap_err().kind, ErrorKind::Invalid);
            assert_eq!(region.load(offset, &mut data).unwrap_err().kind, ErrorKind::Invalid);
        }
        let mut all = [1; 8];
        region.load(0, &mut all).unwrap();
        assert_eq!(all, [0; 8]);
        assert_eq!(HostRegion::new(0).unwrap().store(0, &[]), Ok(()));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn another_mapping_of_its_descriptor_sees_the_same_bytes() {
        let region = HostRegion::new(5000).unwrap();
        let mapping = region.mapping().unwrap();
        let path = format!("/proc/self/fd/{}", mapping.fd.unwrap());
        region.store(4998, &[7, 9]).unwrap();
        let bytes = std::fs::read(path).unwrap();
        assert_eq!((bytes.len(), &bytes[4998..]), (5000, &[7, 9][..]));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn renewed_memory_keeps_its_bytes_and_forgets_who_mapped_it() {
        use std::os::unix::fs::FileExt;
        let region = HostRegion::new(5 << 20).unwrap();
        let before = region.mapping().unwrap();
        let path = format!("/proc/self/fd/{}", before.fd.unwrap());
        let stranger = File::options().read(true).write(true).open(&path).unwrap();
        region.store(4999, &[7, 9]).unwrap();
        region.renew().unwrap();
        assert_eq!(region.mapping(), Some(before));
        stranger.write_all_at(&[1, 1], 4999).unwrap();
        region.store(0, &[3]).unwrap();
        let mut data = [0; 2];
        region.load(4999, &mut data).unwrap();
        assert_eq!(data, [7, 9]);
        let named = std::fs::read(path).unwrap();
        assert_eq!((named[0], &named[4999..5001]), (3, &[7, 9][..]));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn nobody_can_cut_it() {
        let region = HostRegion::new(5000).unwrap();
        let path = format!("/proc/self/fd/{}", region.mapping().unwrap().fd.unwrap());
        assert!(File::options().write(true).open(path).unwrap().set_len(0).is_err());
    }
}
