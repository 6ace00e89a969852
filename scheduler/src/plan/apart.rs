//! Prices the attention of decode steps apart from the products with weights.
//!
//! On a part with rent p, arithmetic rate F and bandwidth B, a FLOP costs p / F and a byte p / B (Step-3,
//! arXiv 2507.19427, section 2). Of a token that is generated,
//!
//! ```text
//! attention     max(its FLOP / F, KV bytes / B)  its two products with KV, which overlap with reading it
//! projections   their FLOP / F                   with weights, in batches that make arithmetic the limit
//! feed forward  its FLOP / F                     likewise
//! ```
//!
//! in seconds of one device. Attention and projections may be rented on another part than feed forward, and
//! then each on the part where they cost least; the network counts as hidden.

use crate::classes::RentFor;
use mixfleet_hal::units::{Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds, Usd, UsdPerHour};
use serde::Serialize;

/// What a part does per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PartRates {
    /// Arithmetic.
    pub flop: FlopPerSecond,
    /// Reading its memory.
    pub bytes: BytesPerSecond,
}

/// What one generated token takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenWork {
    /// Arithmetic of attention.
    pub attention: Flop,
    /// KV that attention reads.
    pub kv: Bytes,
    /// Arithmetic of the projections before and after attention.
    pub projections: Flop,
    /// Arithmetic of the feed-forward network, of the experts that are active.
    pub feed_forward: Flop,
}

impl TokenWork {
    /// Time of attention on one device.
    pub fn attention_s(&self, rates: &PartRates) -> Seconds {
        (self.attention / rates.flop).max(self.kv / rates.bytes)
    }

    /// Time of attention and its projections on one device.
    pub fn attention_side_s(&self, rates: &PartRates) -> Seconds {
        self.attention_s(rates) + self.projections / rates.flop
    }

    /// Time of the feed-forward network on one device.
    pub fn feed_forward_s(&self, rates: &PartRates) -> Seconds {
        self.feed_forward / rates.flop
    }

    /// Whether arithmetic rather than bandwidth limits attention on a part: it does more FLOP per byte of KV
    /// than the part's roofline has at its ridge. A part that is rented for its bandwidth is wasted then, as
    /// most are on latent attention.
    pub fn is_bound_by_arithmetic(&self, rates: &PartRates) -> bool {
        self.attention / rates.flop > self.kv / rates.bytes
    }

    /// The rent up to which attention on `part` costs no more than on `rival` at its rent.
    pub fn attention_break_even(&self, part: &PartRates, rival: (UsdPerHour, &PartRates)) -> UsdPerHour {
        (rival.0 * self.attention_s(rival.1)).rent_for(self.attention_s(part))
    }

    /// The parts on which a token costs least; `None` if there are none.
    pub fn cheapest(&self, parts: &[(UsdPerHour, PartRates)]) -> Option<Apart> {
        let least = |seconds: &dyn Fn(&PartRates) -> Seconds| {
            let costs = parts.iter().map(|(rent, rates)| *rent * seconds(rates)).enumerate();
            costs.min_by(|a, b| a.1.0.total_cmp(&b.1.0))
        };
        let attention = least(&|rates| self.attention_side_s(rates))?;
        let feed_forward = least(&|rates| self.feed_forward_s(rates))?;
        let together = least(&|rates| self.attention_side_s(rates) + self.feed_forward_s(rates))?;
        Some(Apart { attention, feed_forward, together })
    }
}

/// Where a token costs least: indices of parts, and the costs there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Apart {
    /// The part for attention and its projections.
    pub attention: (usize, Usd),
    /// The part for the feed-forward network.
    pub feed_forward: (usize, Usd),
    /// The part for all of it, if it may have only one.
    pub together: (usize, Usd),
}

impl Apart {
    /// The cost of a token with each half on the part where it costs least.
    pub fn usd(&self) -> Usd {
        self.attention.1 + self.feed_forward.1
    }
}
