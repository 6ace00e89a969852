//! What KV that lands on a device, or leaves it, takes of the time of its steps.
//!
//! Received KV lands in a staging buffer and is scattered from there into pages; KV to send is gathered into
//! one. On a device that copies beside its steps, copies cost only memory bandwidth: a received byte is
//! written by the link, read by the scatter and written to its page, so that the steps beside it take `3
//! bytes / bandwidth` longer. A processor, whose copies and steps share its cores, copies between two steps,
//! which are delayed by the whole time of the copies and of the verification: received bytes are copied to
//! memory that no peer writes to, and hashed there.

use mixfleet_hal::profile::{CopyCost, DeviceProfile};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{DType, KvShape, OpSig};
use serde::{Deserialize, Serialize};

/// Bytes of the largest piece in which a layer's KV is sent.
pub const PIECE_BYTES: u64 = 1 << 20;

/// Tokens of the small and of the large copy that the line of a copy goes through.
const TOKENS: [u32; 2] = [16, 512];

/// A layer's KV in the shape of most models; copies differ by its bytes alone.
const KV: KvShape = KvShape { kv_heads: 8, head_dim: 128, page_tokens: 32, dtype: DType::Bf16, latent: None };

/// Bytes of the staging slots of a peer.
const SLOTS_BYTES: f64 = 32.0 * PIECE_BYTES as f64;

/// Share of a device's time beyond which copies count as done at once.
const SHARE_MAX: f64 = 0.9;

/// KV that comes to a device or goes from it while it runs steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KvCopy {
    /// What it takes of the steps' time.
    pub takes: Seconds,
    /// Time of the transfer; 0 if all of the KV is there.
    pub over: Seconds,
}

impl KvCopy {
    /// The share of the time in which it comes or goes that steps lose, at most 1.
    pub fn share(&self) -> f64 {
        if self.over > self.takes { self.takes / self.over } else { 1.0 }
    }

    /// Relative delay of a step while copies take `share` of the device's time: infinite if they are done
    /// together.
    pub fn slows(share: f64) -> f64 {
        if share < SHARE_MAX { share / (1.0 - share) } else { f64::INFINITY }
    }
}

/// The time that copies of KV take from a device's steps: for each piece, and for each byte of its.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvCopyCost {
    /// From the link to the staging buffer.
    pub arrive: PieceCost,
    /// From the staging buffer to pages.
    pub scatter: PieceCost,
    /// From pages to the staging buffer.
    pub gather: PieceCost,
    /// From the staging buffer to the link.
    pub depart: PieceCost,
}

/// The time of copying one piece: `fixed + bytes * seconds_per_byte`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PieceCost {
    /// Time of a piece beside that of its bytes.
    pub fixed: Seconds,
    /// Time of a byte.
    pub seconds_per_byte: f64,
}

impl PieceCost {
    /// The line through two copies of unlike sizes, neither of whose numbers is below 0.
    fn through([(few, short), (many, long)]: [(f64, Seconds); 2]) -> Self {
        let seconds_per_byte = ((long - short).0 / (many - few)).max(0.0);
        PieceCost { fixed: (short - Seconds(seconds_per_byte * few)).max(Seconds::ZERO), seconds_per_byte }
    }

    /// Copies between host and device; of no time where the profile has none.
    fn of_link(cost: &CopyCost) -> Self {
        let sizes = [PIECE_BYTES as f64 / 16.0, PIECE_BYTES as f64];
        PieceCost::through(sizes.map(|bytes| (bytes, cost.time(Bytes(bytes)).unwrap_or(Seconds::ZERO))))
    }
}

impl KvCopyCost {
    /// What copies take from the steps of a device that copies beside them: its memory, for as long as they
    /// use it, and nothing where the profile has no time for them.
    pub fn beside(profile: &DeviceProfile) -> Self {
        let memory = 1.0 / profile.bandwidth.0;
        let link = |cost: &CopyCost| PieceCost::of_link(cost).seconds_per_byte.min(memory);
        let copy = |sig: OpSig| profile.time(&sig).min(profile.roofline(&sig)).0 / wire_bytes(TOKENS[1]);
        let of = |seconds_per_byte| PieceCost { fixed: Seconds::ZERO, seconds_per_byte };
        KvCopyCost {
            arrive: of(link(&profile.host_to_device)),
            scatter: of(copy(scatter(TOKENS[1]))),
            gather: of(copy(gather(TOKENS[1]))),
            depart: of(link(&profile.device_to_host)),
        }
    }

    /// Time that copies take between the steps of a processor: all of it, by its profile. Received KV is
    /// copied out of slots in rotation, so that no cache holds them, hashed, and written to the staging
    /// buffer; sent KV is read and hashed. One host thread does each, at the rate of its copies to and from
    /// the device, and hashes at the same rate.
    pub fn between(profile: &DeviceProfile) -> Self {
        // Where copies were not measured, at the memory's bandwidth.
        let memory = 2.0 / profile.bandwidth.0;
        let host = |cost: &CopyCost| match cost.0.is_empty() {
            true => PieceCost { fixed: Seconds::ZERO, seconds_per_byte: memory },
            false => PieceCost::of_link(cost),
        };
        let (to, from) = (host(&profile.host_to_device), host(&profile.device_to_host));
        let slots = profile.host_to_device.time(Bytes(SLOTS_BYTES));
        let uncached = slots.map_or(memory, |slots| slots.0 / SLOTS_BYTES);
        // A launch, and the numbers of the pages' slots, which are written before.
        let launch = profile.launch + profile.launch_per_command + to.fixed;
        let copy = |sig: fn(u32) -> OpSig| {
            let line =
                PieceCost::through(TOKENS.map(|tokens| (wire_bytes(tokens), profile.time(&sig(tokens)))));
            PieceCost { fixed: line.fixed + launch, ..line }
        };
        KvCopyCost {
            arrive: PieceCost { seconds_per_byte: uncached + 2.0 * to.seconds_per_byte, ..to },
            scatter: copy(scatter),
            gather: copy(gather),
            depart: PieceCost { seconds_per_byte: 2.0 * from.seconds_per_byte, ..from },
        }
    }

    /// The cost on each of `devices` that share the KV's heads.
    #[must_use]
    pub fn shared_by(self, devices: u32) -> Self {
        let share = |cost: PieceCost| PieceCost {
            seconds_per_byte: cost.seconds_per_byte / f64::from(devices.max(1)),
            ..cost
        };
        let KvCopyCost { arrive, scatter, gather, depart } = self;
        let [arrive, scatter, gather, depart] = [arrive, scatter, gather, depart].map(share);
        KvCopyCost { arrive, scatter, gather, depart }
    }

    /// What `bytes` of KV in `layers` layers take that land.
    pub fn lands(&self, bytes: Bytes, layers: u32) -> Seconds {
        of(&[self.arrive, self.scatter], bytes, layers)
    }

    /// What `bytes` of KV in `layers` layers take that leave.
    pub fn leaves(&self, bytes: Bytes, layers: u32) -> Seconds {
        of(&[self.gather, self.depart], bytes, layers)
    }

    /// What `bytes` of KV in `layers` layers take beyond their way from a lower tier to the staging buffer.
    pub fn loads(&self, bytes: Bytes, layers: u32) -> Seconds {
        of(&[self.scatter], bytes, layers)
    }
}

fn of(copies: &[PieceCost], bytes: Bytes, layers: u32) -> Seconds {
    if bytes.0 <= 0.0 {
        return Seconds::ZERO;
    }
    let layers = f64::from(layers.max(1));
    let pieces = layers * (bytes.0 / layers / PIECE_BYTES as f64).ceil();
    copies.iter().map(|copy| copy.fixed * pieces + Seconds(bytes.0 * copy.seconds_per_byte)).sum()
}

fn scatter(tokens: u32) -> OpSig {
    OpSig::KvScatter { tokens, wire: KV.dtype, kv: KV }
}

fn gather(tokens: u32) -> OpSig {
    OpSig::KvGather { tokens, wire: KV.dtype, kv: KV }
}

fn wire_bytes(tokens: u32) -> f64 {
    f64::from(tokens) * KV.wire_token_bytes(KV.dtype) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::profile::{LinearSegment, Point};
    use mixfleet_hal::units::{BytesPerSecond, FlopPerSecond};

    const GB: Bytes = Bytes(1e9);

    /// A device with 100 GB/s of memory and 10 GB/s to the host.
    fn profile() -> DeviceProfile {
        let roof = DeviceProfile::roof(vec![(DType::Bf16, FlopPerSecond(1e12))], BytesPerSecond(100e9), GB);
        let line = LinearSegment { from: Bytes::ZERO, fixed: Seconds(10e-6), seconds_per_byte: 1e-10 };
        let link = CopyCost(vec![line]);
        DeviceProfile { host_to_device: link.clone(), device_to_host: link, launch: Seconds(5e-6), ..roof }
    }

    fn close(time: Seconds, want: f64) {
        assert!((time.0 / want - 1.0).abs() < 1e-3, "{time:?} {want}");
    }

    #[test]
    fn beside_steps_each_byte_passes_the_memory_three_times() {
        let cost = KvCopyCost::beside(&profile());
        close(cost.lands(GB, 80), 0.03);
        close(cost.leaves(GB, 80), 0.03);
        close(cost.loads(GB, 80), 0.02);
        close(cost.shared_by(4).lands(GB, 80), 0.0075);
        assert_eq!(cost.lands(Bytes::ZERO, 80), Seconds::ZERO);
    }

    #[test]
    fn copies_that_take_no_time_take_nothing() {
        let points = [scatter(64), gather(64)].map(|sig| Point { sig, time: Seconds(1e-15) }).to_vec();
        let free = DeviceProfile { points, host_to_device: CopyCost::default(), ..profile() };
        assert!(KvCopyCost::beside(&free).lands(GB, 1).0 < 1e-6);
    }

    #[test]
    fn between_steps_all_of_a_copy_counts_and_each_piece_pays() {
        let cost = KvCopyCost::between(&profile());
        // Copied, hashed and written at 10 GB/s each, into pages at 2/100, and 1000 pieces.
        let copies = 32.0 * PIECE_BYTES as f64;
        let uncached = 1e-10 + 10e-6 / copies;
        let bytes = 1000.0 * PIECE_BYTES as f64;
        close(cost.lands(Bytes(bytes), 1), bytes * (uncached + 0.22e-9) + 1000.0 * (10e-6 + 15e-6));
        // A layer's part is a piece, however small.
        close(cost.lands(Bytes(8000.0), 8), 8000.0 * (uncached + 0.22e-9) + 8.0 * 25e-6);
        close(cost.leaves(Bytes(bytes), 1), bytes * 0.22e-9 + 1000.0 * (10e-6 + 15e-6));
        let datasheet =
            DeviceProfile { host_to_device: CopyCost::default(), launch: Seconds::ZERO, ..profile() };
        close(KvCopyCost::between(&datasheet).lands(GB, 1), 4.0 * 2.0 / 100.0);
    }
}
