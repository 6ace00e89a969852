//! Links between memories: whether they move bytes right, and how fast.
//!
//! [`measure`] times one link both ways over a [`Far`] end, a transport's or a device's, and looks whether what
//! comes back is what went out. [`check`] holds a transport to what every transport must do. The caller
//! brings the transports; [`Document`] is what `mixfleet profile --links` prints.

pub mod check;
mod document;
mod far;

pub use document::{Absence, LinkRate, LinksDocument, MeasuredLink};
pub use far::{Far, OnDevice, OverTransport};

use crate::profile::Tool;
use mixfleet_hal::random;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::time::Instant;

/// What a latency is measured with: a page, which every part of a KV hand-off is longer than.
pub const SMALL_BYTES: u64 = 4096;

/// How long and how often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEffort {
    /// Bytes of a long transfer.
    pub large_bytes: u64,
    /// Long transfers each way, at least.
    pub tries_min: usize,
    /// Goes on with tries for so many seconds each way, at each length, up to [`TRIES_MAX`].
    pub seconds: f64,
}

/// Tries of one length, one way.
pub const TRIES_MAX: usize = 1000;

impl Default for LinkEffort {
    /// 16 MiB, beyond most second-level caches, half a second each way and length.
    fn default() -> Self {
        LinkEffort { large_bytes: 16 << 20, tries_min: 5, seconds: 0.5 }
    }
}

/// Bytes of which every 8 tell their place and `seed`.
pub(crate) fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8)).flat_map(|at| random::bits(seed, at).to_le_bytes());
    words.take(bytes as usize).collect()
}

/// Whether what goes out comes back, byte by byte. The near memory is overwritten in between.
///
/// # Errors
/// The link's; `Other` with the first wrong byte.
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

/// Times the link to `far` both ways, after a round trip of the long length was right, and before another.
///
/// # Errors
/// The link's, and those of [`round_trip`].
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

/// Sorted times of transfers of `bytes`; the first, which warms up, is not among them.
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

/// What made a document.
pub(crate) fn tool(command: String) -> Tool {
    Tool { name: "mixfleet".into(), version: env!("CARGO_PKG_VERSION").into(), command }
}
