//! The control page through which an owner revokes memory that it shared with another process.

use crate::region::nameless_file;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::atomic::{AtomicU32, Ordering};

const PAGE_BYTES: usize = 4096;

/// A page mapped by both processes that holds two flags, each written by one side and read by the other
/// (Dekker's algorithm). Either the user sees the revocation before it copies, or the owner sees that a copy
/// is in progress. Since the flags live in the page, this holds even for a process that is stopped at any
/// instruction and resumes later.
pub(super) struct CopyFlags {
    map: memmap2::MmapRaw,
}

impl CopyFlags {
    /// Creates a page in which nothing is revoked, with the file to pass on.
    pub(super) fn new() -> Result<(Self, File)> {
        let refused = |error| Error::new(ErrorKind::OutOfMemory, format!("a page for a peer: {error}"));
        let file = nameless_file(PAGE_BYTES as u64).map_err(refused)?;
        let file = file.ok_or_else(|| Error::unsupported("this system has no files without a name"))?;
        let control = CopyFlags::open(&file).map_err(refused)?;
        Ok((control, file))
    }

    /// Maps the page that the owner passed on, whose length was checked.
    pub(super) fn open(file: &File) -> std::io::Result<Self> {
        Ok(CopyFlags { map: memmap2::MmapOptions::new().len(PAGE_BYTES).map_raw(file)? })
    }

    /// Returns the required length of the file in bytes.
    pub(super) fn bytes() -> u64 {
        PAGE_BYTES as u64
    }

    fn flag(&self, index: usize) -> &AtomicU32 {
        // SAFETY: both flags lie in the page, aligned, and every process only reaches them as atomics.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().cast::<u32>().add(index)) }
    }

    fn over(&self) -> &AtomicU32 {
        self.flag(0)
    }

    fn copying(&self) -> &AtomicU32 {
        // on a cache line of its own
        self.flag(16)
    }

    /// Called by the owner: no copy begins from here on.
    pub(super) fn revoke(&self) {
        self.over().store(1, Ordering::SeqCst);
    }

    /// Called by the owner: whether a copy that began earlier may still be writing.
    pub(super) fn is_copying(&self) -> bool {
        self.copying().load(Ordering::SeqCst) != 0
    }

    /// Called by the user: whether the grant was revoked.
    pub(super) fn is_over(&self) -> bool {
        self.over().load(Ordering::SeqCst) != 0
    }

    /// Called by the user: runs `copy` unless the grant was revoked, and returns whether it ran.
    pub(super) fn copy(&self, copy: impl FnOnce()) -> bool {
        self.copying().store(1, Ordering::SeqCst);
        let granted = !self.is_over();
        if granted {
            copy();
        }
        self.copying().store(0, Ordering::SeqCst);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn nothing_is_copied_after_the_owner_saw_no_copy() {
        for round in 0..200 {
            let (owner, file) = CopyFlags::new().unwrap();
            let user = CopyFlags::open(&file).unwrap();
            let copies = AtomicU64::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| while user.copy(|| _ = copies.fetch_add(1, Ordering::Relaxed)) {});
                while round % 2 == 0 && copies.load(Ordering::Relaxed) < round {
                    std::hint::spin_loop();
                }
                owner.revoke();
                while owner.is_copying() {
                    std::hint::spin_loop();
                }
                let seen = copies.load(Ordering::Relaxed);
                for _ in 0..1000 {
                    assert_eq!(copies.load(Ordering::Relaxed), seen);
                }
            });
        }
    }

    #[test]
    fn a_copy_under_way_is_seen_from_the_other_side() {
        let (owner, file) = CopyFlags::new().unwrap();
        let user = CopyFlags::open(&file).unwrap();
        assert!(user.copy(|| assert!(owner.is_copying())) && !owner.is_copying());
        owner.revoke();
        assert!(user.is_over() && !user.copy(|| unreachable!()));
    }
}
