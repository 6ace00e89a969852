//! Tests and measures links between memories.
//!
//! [`measure`] times one link in both directions over a [`Far`] end, which is a transport's or a device's,
//! and verifies that data comes back intact. [`check`] tests a transport against the requirements for all
//! transports. The caller provides the transports; [`LinksDocument`] is what `mixfleet profile --links`
//! prints.

pub mod check;
mod document;
mod far;

pub use document::{Absence, LinkRate, LinksDocument, MeasuredLink};
pub use far::{Far, OnDevice, OverTransport};

use crate::profile::Tool;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::random;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::time::Instant;

/// Transfer size for latency measurements: one page, which is shorter than any part of a KV hand-off.
pub const SMALL_BYTES: u64 = 4096;

/// How long and how often to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEffort {
    /// Size of a long transfer in bytes.
    pub large_bytes: u64,
    /// Minimum number of long transfers per direction.
    pub tries_min: usize,
    /// Seconds of further transfers per direction and size, up to [`TRIES_MAX`] transfers.
    pub seconds: f64,
}

/// Maximum number of transfers per size and direction.
pub const TRIES_MAX: usize = 1000;

impl Default for LinkEffort {
    /// Uses 16 MiB, which exceeds most second-level caches, and half a second per direction and size.
    fn default() -> Self {
        LinkEffort { large_bytes: 16 << 20, tries_min: 5, seconds: 0.5 }
    }
}

/// Returns bytes in which every group of 8 encodes its position and `seed`.
pub(crate) fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8)).flat_map(|at| random::bits(seed, at).to_le_bytes());
    words.take(to_usize(bytes)).collect()
}

/// Checks that data sent to the far end comes back byte for byte, overwriting the near memory in between.
///
/// # Errors
/// Those of the link; `Other` with the first wrong byte.
pub fn round_trip(far: &mut dyn Far, bytes: u64, seed: u64) -> Result<()> {
    let sent = pattern(bytes, seed);
    far.load(&sent)?;
    far.put(bytes)?;
    far.load(&pattern(bytes, !seed))?;
    far.get(bytes)?;
    let mut wrong = None;
    far.show(bytes, &mut |came| wrong = (0..sent.len()).find(|&i| came.get(i) != Some(&sent[i])))?;
    match wrong {
        None => Ok(()),
        Some(at) => Err(Error::new(ErrorKind::Other, format!("byte {at} of {bytes} came back as another"))),
    }
}

/// Times the link to `far` in both directions, between two successful round trips of the long size.
///
/// # Errors
/// Those of the link and of [`round_trip`].
pub fn measure(far: &mut dyn Far, effort: &LinkEffort) -> Result<[LinkRate; 2]> {
    let bytes = effort.large_bytes.min(far.bytes());
    round_trip(far, bytes, 1)?;
    let there = rate(effort, bytes, &mut |bytes| far.put(bytes))?;
    let back = rate(effort, bytes, &mut |bytes| far.get(bytes))?;
    round_trip(far, bytes, 2)?;
    Ok([there, back])
}

fn rate(
    effort: &LinkEffort,
    large_bytes: u64,
    transfer: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<LinkRate> {
    let small = seconds(effort, SMALL_BYTES.min(large_bytes), transfer)?;
    let large = seconds(effort, large_bytes, transfer)?;
    let middle = large[large.len() / 2];
    Ok(LinkRate {
        latency_us_median: small[small.len() / 2] * 1e6,
        latency_us_min: small[0] * 1e6,
        latency_tries: small.len(),
        bytes_per_s_median: large_bytes as f64 / middle,
        bytes_per_s_max: large_bytes as f64 / large[0],
        bytes: large_bytes,
        tries: large.len(),
    })
}

/// Returns the sorted times of transfers of `bytes` bytes, excluding the first one as a warm-up.
fn seconds(effort: &LinkEffort, bytes: u64, transfer: &mut dyn FnMut(u64) -> Result<()>) -> Result<Vec<f64>> {
    transfer(bytes)?;
    let (begin, mut times) = (Instant::now(), Vec::new());
    while times.len() < effort.tries_min.max(1)
        || (times.len() < TRIES_MAX && begin.elapsed().as_secs_f64() < effort.seconds)
    {
        let start = Instant::now();
        transfer(bytes)?;
        // a clock may be too coarse for a transfer within a cache
        times.push(start.elapsed().as_secs_f64().max(1e-9));
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Returns the description of the program that made a document.
pub(crate) fn tool(command: String) -> Tool {
    Tool { name: "mixfleet".into(), version: env!("CARGO_PKG_VERSION").into(), command }
}
