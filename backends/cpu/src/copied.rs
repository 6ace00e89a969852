//! Copies of a mapped file's bytes in huge pages, where the file was mapped.
//!
//! How fast the pages of a file are read depends on how the page cache holds them: small pages cost a
//! page-table walk for every few lines, and a virtual machine does two. One background thread per process
//! copies the needed parts that are not in huge pages yet; a copy replaces its mapping atomically and at the
//! same address, so that others may read during the copy. The file's own pages stay in the page cache until
//! the memory is needed.

use crate::topology;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of a huge page, at whose multiples in memory a copy begins and ends.
const BLOCK_BYTES: usize = 2 << 20;
/// Blocks that are copied at once, for which the end of a mapping may have to wait.
const BLOCKS_AT_ONCE: usize = 8;

/// The copies of a mapping, which no longer change it once this is dropped.
#[derive(Debug)]
pub(crate) struct HugeCopies(Arc<CopiedMapping>);

/// Requests to the copying thread.
type RangeToCopy = (Arc<CopiedMapping>, Range<usize>);

#[derive(Debug)]
struct CopiedMapping {
    file: File,
    /// Where the mapping starts in memory.
    start: usize,
    /// Which multiples of the block that lie wholly inside the mapping are copies; none once the mapping is
    /// gone.
    copied: Mutex<Vec<bool>>,
}

impl HugeCopies {
    /// No copies yet of the mapping of a whole file.
    pub(crate) fn of(map: &[u8], file: File) -> HugeCopies {
        let start = map.as_ptr().addr();
        let first = start.next_multiple_of(BLOCK_BYTES);
        let blocks = (start + map.len()).saturating_sub(first) / BLOCK_BYTES;
        HugeCopies(Arc::new(CopiedMapping { file, start, copied: Mutex::new(vec![false; blocks]) }))
    }

    /// Has a range copied soon.
    pub(crate) fn copy_soon(&self, range: &Range<usize>) {
        static COPIER: OnceLock<Option<Mutex<Sender<RangeToCopy>>>> = OnceLock::new();
        let copier = COPIER.get_or_init(|| {
            let (sender, wanted) = mpsc::channel::<RangeToCopy>();
            let run = move || wanted.iter().for_each(|(mapping, range)| mapping.copy(&range));
            let started = std::thread::Builder::new().name("weights".into()).spawn(run);
            started.is_ok().then_some(Mutex::new(sender))
        });
        if let Some(copier) = copier {
            // without a copy, the file stays mapped
            let _ =
                copier.lock().unwrap_or_else(PoisonError::into_inner).send((self.0.clone(), range.clone()));
        }
    }

    /// Calls `each` with the parts of a range that are mapped from the file; no copies are made during the
    /// calls.
    pub(crate) fn mapped(&self, range: &Range<usize>, mut each: impl FnMut(Range<usize>)) {
        let copied = self.0.copied();
        let mut at = range.start;
        let blocks = self.0.blocks_of(range, copied.len());
        for run in runs(&copied[blocks.clone()], true) {
            let [from, to] = [run.start, run.end].map(|block| self.0.offset_of(blocks.start + block));
            if at < from {
                each(at..from);
            }
            at = to;
        }
        if at < range.end {
            each(at..range.end);
        }
    }
}

impl Drop for HugeCopies {
    fn drop(&mut self) {
        self.0.copied().clear();
    }
}

impl CopiedMapping {
    fn copied(&self) -> MutexGuard<'_, Vec<bool>> {
        self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The offset within the file at which a block begins.
    fn offset_of(&self, block: usize) -> usize {
        self.start.next_multiple_of(BLOCK_BYTES) - self.start + block * BLOCK_BYTES
    }

    /// The blocks that have bytes of the range.
    fn blocks_of(&self, range: &Range<usize>, blocks: usize) -> Range<usize> {
        let first = self.offset_of(0);
        let from = range.start.saturating_sub(first) / BLOCK_BYTES;
        let to = range.end.saturating_sub(first).div_ceil(BLOCK_BYTES).min(blocks);
        from.min(to)..to
    }

    /// Copies the blocks of a range that are neither copies nor huge pages yet, while there is room and the
    /// mapping exists.
    ///
    /// After a failure the file stays mapped.
    fn copy(&self, range: &Range<usize>) {
        let blocks = self.blocks_of(range, self.copied().len());
        for from in blocks.clone().step_by(BLOCKS_AT_ONCE) {
            let mut copied = self.copied();
            let to = (from + BLOCKS_AT_ONCE).min(blocks.end).min(copied.len());
            let is_small = |block: usize| !copied[block] && !is_huge(self.start + self.offset_of(block));
            let small: Vec<bool> = (from..to).map(is_small).collect();
            for run in runs(&small, true) {
                let run = from + run.start..from + run.end;
                let (offset, bytes) = (self.offset_of(run.start), run.len() * BLOCK_BYTES);
                if !has_room(bytes) || replace(self.start + offset, &self.file, offset, bytes).is_none() {
                    return;
                }
                copied[run].fill(true);
            }
        }
    }
}

/// Whether the block at this address of this process is one huge page; false where the kernel (before 6.7)
/// does not say.
fn is_huge(address: usize) -> bool {
    const HUGE: u64 = 1 << 6;
    /// `PAGEMAP_SCAN` of the kernel's `linux/fs.h`.
    const SCAN: u64 = 0xc060_6610;
    static PAGEMAP: OnceLock<Option<File>> = OnceLock::new();
    let Some(pagemap) = PAGEMAP.get_or_init(|| File::open("/proc/self/pagemap").ok()) else { return false };
    // the regions found: start, end and categories of each
    let mut found = [0_u64; 3];
    let (start, end) = (address as u64, (address + BLOCK_BYTES) as u64);
    // `struct pm_scan_arg`: its size, flags, start, end, the end of the walk, regions and their capacity, the
    // most pages, inverted categories, required categories, alternative categories, and reported categories
    let mut scan = [96, 0, start, end, 0, found.as_mut_ptr().addr() as u64, 1, 0, 0, HUGE, 0, HUGE];
    // SAFETY: the kernel reads and writes the argument, which is as long as it says, and one region.
    let regions = unsafe { libc::ioctl(pagemap.as_raw_fd(), SCAN as libc::Ioctl, scan.as_mut_ptr()) };
    regions == 1 && found[..2] == [start, end]
}

/// The runs of entries that are `wanted`.
fn runs(entries: &[bool], wanted: bool) -> Vec<Range<usize>> {
    let mut at = 0;
    let runs = entries.chunk_by(|a, b| a == b).filter_map(|chunk| {
        let run = at..at + chunk.len();
        at = run.end;
        (chunk[0] == wanted).then_some(run)
    });
    runs.collect()
}

/// Whether half of the host's memory stays free besides, and the kernel has huge pages.
fn has_room(bytes: usize) -> bool {
    static HUGE_PAGES: OnceLock<bool> = OnceLock::new();
    let huge = HUGE_PAGES.get_or_init(|| {
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
            .is_ok_and(|modes| !modes.contains("[never]"))
    });
    let free = topology::memory_free_bytes().unwrap_or(0);
    *huge && free.saturating_sub(bytes as u64) > topology::memory_bytes() / 2
}

/// Puts a copy of the bytes of the file in the place of their mapping at `address`; `None` if it could not,
/// in which case the mapping is as it was.
fn replace(address: usize, file: &File, offset: usize, bytes: usize) -> Option<()> {
    let copy = aligned(bytes)?;
    // SAFETY: the memory is ours, whole, zeroed and as long as that.
    let to = unsafe { std::slice::from_raw_parts_mut(copy.cast(), bytes) };
    let read = file.read_exact_at(to, offset as u64);
    // SAFETY: both ranges are whole pages, the first is ours alone, and the second lies inside a mapping that
    // its owner has and unmaps as a whole. A concurrent reader waits for the kernel, and gets the pages of
    // either range, which hold equal bytes.
    unsafe {
        if read.is_ok() && libc::mprotect(copy, bytes, libc::PROT_READ) == 0 {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            if libc::mremap(copy, bytes, bytes, flags, address as *mut libc::c_void) != libc::MAP_FAILED {
                return Some(());
            }
        }
        libc::munmap(copy, bytes);
    }
    None
}

/// Zeroed memory of whole blocks, in huge pages where the kernel has some.
fn aligned(bytes: usize) -> Option<*mut libc::c_void> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory; the parts before and behind the blocks are released.
    unsafe {
        let all = libc::mmap(std::ptr::null_mut(), bytes + BLOCK_BYTES, access, flags, -1, 0);
        if all == libc::MAP_FAILED {
            return None;
        }
        let before = all.addr().next_multiple_of(BLOCK_BYTES) - all.addr();
        let copy = all.wrapping_byte_add(before);
        if before > 0 {
            libc::munmap(all, before);
        }
        libc::munmap(copy.wrapping_byte_add(bytes), BLOCK_BYTES - before);
        libc::madvise(copy, bytes, libc::MADV_HUGEPAGE);
        Some(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    const BYTES: usize = 9 * BLOCK_BYTES + 777;

    /// A file that no block begins with, and its mapping.
    fn mapped(name: &str) -> (File, memmap2::Mmap, HugeCopies) {
        let path = std::env::temp_dir().join(format!("mixfleet-cpu-copied-{name}-{}", std::process::id()));
        let bytes: Vec<u8> = (0..BYTES).map(byte).collect();
        std::fs::write(&path, bytes).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // SAFETY: only the tests of this module have the file.
        let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
        let copies = HugeCopies::of(&map, file.try_clone().unwrap());
        (file, map, copies)
    }

    fn byte(at: usize) -> u8 {
        (at / 4093 + at) as u8
    }

    fn unlike(map: &[u8]) -> Option<usize> {
        (0..BYTES).find(|at| map[*at] != byte(*at))
    }

    #[test]
    fn copies_have_the_bytes_of_the_file_and_outlive_them() {
        let (file, map, copies) = mapped("outlive");
        copies.0.copy(&(3 * BLOCK_BYTES..5 * BLOCK_BYTES));
        copies.0.copy(&(0..BYTES));
        let count = copies.0.copied().iter().filter(|copied| **copied).count();
        if !has_room(BYTES) {
            eprintln!("SKIPPED: half of the memory is in use, or the kernel has no huge pages");
            assert_eq!(count, 0);
            return;
        }
        assert!(count >= 8, "{count} of the blocks of {BYTES} bytes");
        assert_eq!(unlike(&map), None);
        let mut left = Vec::new();
        copies.mapped(&(0..BYTES), |range| left.push(range));
        file.set_len(0).unwrap();
        let begin = copies.0.offset_of(0);
        let end = copies.0.offset_of(copies.0.copied().len());
        let edges: Vec<_> = [0..begin, end..BYTES].into_iter().filter(|edge| !edge.is_empty()).collect();
        assert_eq!(left, edges);
        assert!((begin..end).all(|at| map[at] == byte(at)));
    }

    #[test]
    fn who_reads_meanwhile_reads_the_same() {
        let (_file, map, copies) = mapped("meanwhile");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut wrong = None;
                while !done.load(Ordering::SeqCst) {
                    wrong = wrong.or(unlike(&map));
                }
                wrong.or(unlike(&map))
            });
            for block in 0..10 {
                copies.0.copy(&(block * BLOCK_BYTES..block * BLOCK_BYTES + 1));
            }
            done.store(true, Ordering::SeqCst);
            assert_eq!(reader.join().unwrap(), None);
        });
    }

    #[test]
    fn what_cannot_be_read_stays_mapped() {
        let (file, map, copies) = mapped("short");
        file.set_len(5 * BLOCK_BYTES as u64).unwrap();
        copies.0.copy(&(0..BYTES));
        assert!(copies.0.copied().iter().all(|copied| !copied));
        assert!((0..5 * BLOCK_BYTES).all(|at| map[at] == byte(at)));
    }

    #[test]
    fn what_is_wanted_soon_is_copied_beside_and_nothing_of_a_mapping_that_is_gone() {
        let (_file, map, copies) = mapped("soon");
        let mapping = copies.0.clone();
        copies.copy_soon(&(0..BYTES));
        // the thread releases the mapping after its attempt, which takes milliseconds
        let has_tried = (0..60_000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            Arc::strong_count(&mapping) == 2
        });
        assert!(has_tried, "no copy was attempted within ten minutes");
        let is_copy =
            |(block, copied): (usize, &bool)| *copied || is_huge(mapping.start + mapping.offset_of(block));
        let copies_all = mapping.copied().iter().enumerate().all(is_copy);
        assert!(copies_all || !has_room(BYTES), "not all is copied: {:?}", mapping.copied());
        assert_eq!(unlike(&map), None);
        let gone = mapped("gone").2;
        let mapping = gone.0.clone();
        drop(gone);
        mapping.copy(&(0..BYTES));
        assert!(mapping.copied().is_empty());
    }

    #[test]
    fn huge_pages_are_told_from_small_ones() {
        let [huge, small] = [libc::MADV_HUGEPAGE, libc::MADV_NOHUGEPAGE].map(|advice| {
            let memory = aligned(BLOCK_BYTES).unwrap();
            // SAFETY: the memory is ours and as long as that.
            unsafe {
                assert_eq!(libc::madvise(memory, BLOCK_BYTES, advice), 0);
                memory.cast::<u8>().write_bytes(1, BLOCK_BYTES);
                let told = is_huge(memory.addr());
                libc::munmap(memory, BLOCK_BYTES);
                told
            }
        });
        assert!(!small);
        if !huge {
            eprintln!("SKIPPED: the kernel has no huge page to give, or does not say where it has");
        }
    }

    #[test]
    fn runs_are_of_what_is_wanted() {
        assert_eq!(runs(&[], true), []);
        assert_eq!(runs(&[true, true, false, true], true), [0..2, 3..4]);
        assert_eq!(runs(&[false, true, false, true], false), [0..1, 2..3]);
    }
}
