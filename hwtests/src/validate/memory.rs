//! Level 2: the patterns of memory testers (Brady, memtest86) over the device's memory, expressed in writes,
//! reads, `Fill` and `Copy`, so that any backend can run them.
//!
//! Words are 64 bits. An address is the offset in the tested memory, block by block; only the driver knows
//! the physical address.

use super::case::{CaseResult, CaseStatus};
use super::protocol::{MemoryAsked, Settings, ValidationEffort};
use crate::bench::BenchError;
use mixfleet_hal::cast::{low_u32, to_u64, to_usize};
use mixfleet_hal::random;
use mixfleet_hal::{BufferUsage, Cmd, Device, ErrorKind, Health, OpSig, Queue, Slice, Support};
use serde::Serialize;
use std::time::Duration;

/// Bytes written, read or filled at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Maximum allocation size; smaller allocations find more of a fragmented memory.
const BLOCK_BYTES_MAX: u64 = 64 << 20;
/// Number of errors kept with their values; further ones are only counted.
const ERRORS_KEPT: usize = 16;

/// A pattern, which writes and verifies a region.
type Pattern = fn(&mut Region<'_>, &Settings) -> Result<(), BenchError>;
const PATTERNS: [(&str, Pattern); 8] = [
    ("own_address", own_address),
    ("walking", walking),
    ("inversions_solid", inversions_solid),
    ("inversions_byte", inversions_byte),
    ("inversions_random", inversions_random),
    ("random", random_words),
    ("modulo_20", modulo_20),
    ("block_move", block_move),
];

/// Returns the names of the patterns, one group each.
pub(crate) fn groups() -> impl Iterator<Item = &'static str> {
    PATTERNS.iter().map(|(name, _)| *name)
}

/// One wrong word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct WrongWord {
    address: String,
    expected: String,
    got: String,
    xor: String,
}

/// The errors found.
#[derive(Debug)]
struct Errors {
    words: u64,
    first: Vec<WrongWord>,
    /// Error count per bit of a word.
    bits: [u64; 64],
}

/// The memory under test.
struct Region<'a> {
    device: &'a dyn Device,
    queue: Box<dyn Queue>,
    blocks: Vec<Slice>,
    block_bytes: u64,
    timeout: Duration,
    words_checked: u64,
    errors: Errors,
    alive: &'a mut dyn FnMut(),
}

/// Runs the pattern `name`, calling `alive` along the way.
pub(crate) fn run(
    device: &dyn Device,
    settings: &Settings,
    name: &str,
    alive: &mut dyn FnMut(),
) -> CaseResult {
    let id = format!("l2.{name}");
    let Some((_, pattern)) = PATTERNS.iter().find(|(known, _)| *known == name) else {
        return CaseResult::new(id, CaseStatus::NotRun, "there is no such memory pattern");
    };
    let asked = bytes_asked(device, settings);
    let before = device.health();
    let mut region = match Region::new(device, asked, settings.batch_timeout(), alive) {
        Ok(region) => region,
        Err(trouble) => return troubled(id, trouble),
    };
    if let Err(trouble) = pattern(&mut region, settings) {
        let result = troubled(id, trouble);
        if result.status == CaseStatus::Timeout {
            // dropping a hanging queue might block
            std::mem::forget(region);
        }
        return result;
    }
    region.judged(id, asked, &before)
}

fn troubled(id: String, trouble: BenchError) -> CaseResult {
    match trouble {
        BenchError::Unsupported => CaseResult::new(id, CaseStatus::Unsupported, "needs Fill and Copy"),
        BenchError::NotRun(reason) => CaseResult::new(id, CaseStatus::NotRun, reason),
        BenchError::Failed(reason) | BenchError::OutOfBounds(reason, _) => {
            CaseResult::new(id, CaseStatus::Fail, reason)
        }
        BenchError::Hung(reason) => CaseResult::new(id, CaseStatus::Timeout, reason),
        BenchError::Lost(reason) => CaseResult::new(id, CaseStatus::DeviceLost, reason),
    }
}

fn bytes_asked(device: &dyn Device, settings: &Settings) -> u64 {
    let bytes = match settings.memory {
        MemoryAsked::Bytes(bytes) => bytes,
        MemoryAsked::Share(share) => to_u64(device.info().memory.0 * share.clamp(0.0, 1.0)),
    };
    bytes.next_multiple_of(CHUNK_BYTES).max(CHUNK_BYTES)
}

impl<'a> Region<'a> {
    /// Allocates blocks until `asked` bytes are reached or the device has no more.
    fn new(
        device: &'a dyn Device,
        asked: u64,
        timeout: Duration,
        alive: &'a mut dyn FnMut(),
    ) -> Result<Self, BenchError> {
        let largest = device.limits().allocation_bytes_max.min(BLOCK_BYTES_MAX) / CHUNK_BYTES * CHUNK_BYTES;
        let block_bytes = largest.min(asked);
        if block_bytes == 0 {
            return Err(BenchError::NotRun(format!("no allocation of {CHUNK_BYTES} bytes is allowed")));
        }
        let mut blocks = Vec::new();
        while (blocks.len() as u64 + 1) * block_bytes <= asked {
            match device.alloc(block_bytes, BufferUsage::Activations) {
                Ok(block) => blocks.push(block),
                Err(error) if error.kind == ErrorKind::OutOfMemory => break,
                Err(error) => return Err(error.into()),
            }
        }
        if blocks.is_empty() {
            return Err(BenchError::NotRun(format!(
                "out of memory: no block of {block_bytes} bytes is free"
            )));
        }
        let (queue, errors) = (device.queue()?, Errors::new());
        Ok(Region { device, queue, blocks, block_bytes, timeout, words_checked: 0, errors, alive })
    }

    /// Returns the chunks in ascending order, each with the address of its first word, counted in words.
    fn chunks(&self) -> Vec<(u64, Slice)> {
        let per_block = self.block_bytes / CHUNK_BYTES;
        let chunk = |(b, block): (usize, &Slice)| {
            let (block, b) = (block.clone(), b as u64);
            (0..per_block).map(move |c| {
                let address = (b * per_block + c) * CHUNK_BYTES / 8;
                (address, block.range(c * CHUNK_BYTES, CHUNK_BYTES))
            })
        };
        self.blocks.iter().enumerate().flat_map(chunk).collect()
    }

    /// Writes `word(address)` to every word.
    fn write(&mut self, word: impl Fn(u64) -> u64) -> Result<(), BenchError> {
        let mut bytes = vec![0; to_usize(CHUNK_BYTES)];
        for (address, chunk) in self.chunks() {
            for (i, place) in (address..).zip(bytes.chunks_exact_mut(8)) {
                place.copy_from_slice(&word(i).to_le_bytes());
            }
            self.device.write(&chunk, &bytes)?;
            (self.alive)();
        }
        Ok(())
    }

    /// Reads every 64-bit word and compares it with `word(address)`.
    fn verify(&mut self, word: impl Fn(u64) -> u64) -> Result<(), BenchError> {
        for (address, chunk) in self.chunks() {
            self.verify_chunk(address, &chunk, &word)?;
        }
        Ok(())
    }

    fn verify_chunk(
        &mut self,
        address: u64,
        chunk: &Slice,
        word: &impl Fn(u64) -> u64,
    ) -> Result<(), BenchError> {
        let mut bytes = vec![0; to_usize(chunk.bytes)];
        self.device.read(chunk, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        for (i, got) in (address..).zip(words) {
            let (got, want) = (u64::from_le_bytes(*got), word(i));
            if got != want {
                self.errors.note(i * 8, want, got);
            }
        }
        self.words_checked += words.len() as u64;
        (self.alive)();
        Ok(())
    }

    /// Reports the pattern as unsupported if the device lacks the operation.
    fn needs(&self, sig: OpSig) -> Result<(), BenchError> {
        if self.device.support(&sig) == Support::No { Err(BenchError::Unsupported) } else { Ok(()) }
    }

    fn run(&mut self, cmds: &[Cmd]) -> Result<(), BenchError> {
        let ticket = self.queue.submit(cmds)?;
        self.queue.wait(ticket, self.timeout)?;
        Ok(())
    }

    fn fill(chunk: &Slice, word: u32) -> Result<Cmd, BenchError> {
        Ok(Cmd::new(OpSig::Fill { bytes: chunk.bytes, word }, std::slice::from_ref(chunk))?)
    }

    /// Fills all of the memory with the device's own `Fill`.
    fn fill_all(&mut self, word: u32) -> Result<(), BenchError> {
        for block in self.blocks.clone() {
            self.run(&[Self::fill(&block, word)?])?;
            (self.alive)();
        }
        Ok(())
    }

    fn judged(self, id: String, asked: u64, before: &Health) -> CaseResult {
        let covered = self.blocks.len() as u64 * self.block_bytes;
        let after = self.device.health();
        let grown = |was: Option<u64>, is: Option<u64>| is.zip(was).map(|(is, was)| is.saturating_sub(was));
        let corrected = grown(before.errors_corrected, after.errors_corrected);
        let uncorrected = grown(before.errors_uncorrected, after.errors_uncorrected);
        let Errors { words, first, bits } = self.errors;
        let (status, reason) = if let Some(error) = first.first() {
            let WrongWord { address, expected, got, xor } = error;
            let reason = format!(
                "{words} of {} words differ; first at {address}: expected {expected}, got {got}, xor {xor}",
                self.words_checked
            );
            (CaseStatus::Fail, reason)
        } else if let Some(n) = uncorrected.filter(|n| *n > 0) {
            (CaseStatus::Fail, format!("the device counted {n} memory errors that it could not correct"))
        } else if let Some(n) = corrected.filter(|n| *n > 0) {
            (CaseStatus::QualityWarning, format!("the device corrected {n} memory errors"))
        } else if covered < asked {
            let reason = format!("only {covered} of the {asked} requested bytes could be allocated");
            (CaseStatus::QualityWarning, reason)
        } else {
            (CaseStatus::Pass, String::new())
        };
        let mut result = CaseResult::new(id, status, reason)
            .fact("bytes_covered", covered)
            .fact("words_checked", self.words_checked)
            .fact("errors_corrected", corrected)
            .fact("errors_uncorrected", uncorrected);
        if words > 0 {
            let histogram: Vec<(usize, u64)> =
                bits.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
            result = result.fact("words_wrong", words).fact("first_errors", first);
            result = result.fact("wrong_by_bit", histogram);
        }
        result
    }
}

impl Errors {
    fn new() -> Self {
        Errors { words: 0, first: Vec::new(), bits: [0; 64] }
    }

    fn note(&mut self, address: u64, expected: u64, got: u64) {
        self.words += 1;
        let xor = expected ^ got;
        for (bit, count) in self.bits.iter_mut().enumerate() {
            *count += xor >> bit & 1;
        }
        if self.first.len() < ERRORS_KEPT {
            let hex = |word: u64| format!("{word:#018x}");
            let address = format!("{address:#x}");
            self.first.push(WrongWord { address, expected: hex(expected), got: hex(got), xor: hex(xor) });
        }
    }
}

/// Writes each word's own address, then the complement, which detects aliased addresses.
fn own_address(region: &mut Region<'_>, _: &Settings) -> Result<(), BenchError> {
    for flip in [0, !0] {
        region.write(|address| (address * 8) ^ flip)?;
        region.verify(|address| (address * 8) ^ flip)?;
    }
    Ok(())
}

/// Walks one set bit with the address, then one clear bit; each pass begins at another bit.
fn walking(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let passes: &[u64] = match settings.effort {
        ValidationEffort::Quick => &[0, 37],
        ValidationEffort::Full => &[0, 5, 11, 17, 23, 29, 31, 32, 37, 43, 49, 53, 59, 61],
    };
    for &pass in passes {
        for flip in [0, !0] {
            region.write(|address| (1 << ((address + pass) % 64)) ^ flip)?;
            region.verify(|address| (1 << ((address + pass) % 64)) ^ flip)?;
        }
    }
    Ok(())
}

/// Moving inversions: fills with a word, then checks and inverts every chunk upwards, and then back
/// downwards. Couplings between neighbours show in one direction or the other.
fn inversions(region: &mut Region<'_>, word: u32) -> Result<(), BenchError> {
    region.needs(OpSig::Fill { bytes: CHUNK_BYTES, word })?;
    let twice = |word: u32| u64::from(word) << 32 | u64::from(word);
    region.fill_all(word)?;
    let mut chunks = region.chunks();
    for (now, next) in [(word, !word), (!word, word)] {
        for (address, chunk) in &chunks {
            region.verify_chunk(*address, chunk, &|_| twice(now))?;
            region.run(&[Region::fill(chunk, next)?])?;
        }
        chunks.reverse();
    }
    region.verify(|_| twice(word))
}

fn inversions_solid(region: &mut Region<'_>, _: &Settings) -> Result<(), BenchError> {
    inversions(region, 0)
}

fn inversions_byte(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let shifts: &[u32] = match settings.effort {
        ValidationEffort::Quick => &[7],
        ValidationEffort::Full => &[0, 1, 2, 3, 4, 5, 6, 7],
    };
    shifts.iter().try_for_each(|shift| inversions(region, 0x0101_0101 << shift))
}

fn inversions_random(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let rounds = if settings.effort == ValidationEffort::Quick { 1 } else { 6 };
    (0..rounds).try_for_each(|round| inversions(region, low_u32(random::bits(settings.seed, round))))
}

/// Writes random words by address, then their complement.
fn random_words(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let rounds = if settings.effort == ValidationEffort::Quick { 1 } else { 4 };
    for round in 0..rounds {
        let seed = settings.seed.wrapping_add(1 + round);
        for flip in [0, !0] {
            region.write(|address| random::bits(seed, address) ^ flip)?;
            region.verify(|address| random::bits(seed, address) ^ flip)?;
        }
    }
    Ok(())
}

/// Writes every twentieth word differently from all others, which are written afterwards, so that write
/// buffers and caches cannot mask faults.
fn modulo_20(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let offsets: &[u64] = match settings.effort {
        ValidationEffort::Quick => &[3, 14],
        ValidationEffort::Full => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
    };
    let odd = random::bits(settings.seed, 20);
    for &offset in offsets {
        region.write(|_| odd)?;
        region.write(|address| if address % 20 == offset { odd } else { !odd })?;
        region.verify(|address| if address % 20 == offset { odd } else { !odd })?;
    }
    Ok(())
}

/// Lets the device move random words: the lower half of each block to the upper, then back rotated by some
/// words, to load the memory as copies do.
fn block_move(region: &mut Region<'_>, settings: &Settings) -> Result<(), BenchError> {
    let half = region.block_bytes / 2;
    region.needs(OpSig::Copy { bytes: half })?;
    // a multiple of the alignment and of a word
    let turn = region.device.limits().alignment_bytes.max(32);
    if half <= turn {
        return Err(BenchError::NotRun(format!("blocks of {} bytes cannot be turned", region.block_bytes)));
    }
    let seed = settings.seed.wrapping_add(77);
    region.write(|address| random::bits(seed, address))?;
    for block in region.blocks.clone() {
        let copy = |from: u64, to: u64, bytes: u64| {
            Cmd::new(OpSig::Copy { bytes }, &[block.range(from, bytes), block.range(to, bytes)])
        };
        // upper = lower; lower = upper rotated by `turn`
        region.run(&[
            copy(0, half, half)?,
            copy(half + turn, 0, half - turn)?,
            copy(half, half - turn, turn)?,
        ])?;
        (region.alive)();
    }
    let (block_words, half_words, turn_words) = (region.block_bytes / 8, half / 8, turn / 8);
    region.verify(|address| {
        let (block, place) = (address / block_words, address % block_words);
        let from = if place < half_words { (place + turn_words) % half_words } else { place - half_words };
        random::bits(seed, block * block_words + from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::ReferenceDevice;

    fn small() -> Settings {
        Settings { memory: MemoryAsked::Bytes(2 << 20), ..Settings::quick() }
    }

    #[test]
    fn the_reference_device_passes_every_pattern_in_both_efforts() {
        let device = ReferenceDevice::default();
        for name in groups() {
            let result = run(&device, &small(), name, &mut || {});
            assert_eq!(result.status, CaseStatus::Pass, "{result:?}");
            assert_eq!(result.facts["bytes_covered"], 2 << 20);
            assert!(result.facts["words_checked"].as_u64() >= Some((2 << 20) / 8));
        }
        let full = Settings { effort: ValidationEffort::Full, memory: MemoryAsked::Bytes(1), ..small() };
        assert_eq!(run(&device, &full, "inversions_byte", &mut || {}).status, CaseStatus::Pass);
    }

    #[test]
    fn an_error_is_told_with_its_address_and_bits() {
        let mut errors = Errors::new();
        errors.note(0x48, 0xFF, 0xFE);
        errors.note(0x50, 0, 1 << 63);
        assert_eq!(errors.first[0].address, "0x48");
        assert_eq!(errors.first[0].xor, "0x0000000000000001");
        assert_eq!((errors.words, errors.bits[0], errors.bits[63]), (2, 1, 1));
    }
}
