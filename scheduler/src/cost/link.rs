//! The cost of moving KV between two instances.

use mixfleet_hal::units::{Bytes, Seconds, Usd};
use serde::{Deserialize, Serialize};

/// A linear cost of a link: `latency + bytes * seconds_per_byte` for each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkCost {
    /// Latency per message.
    pub latency: Seconds,
    /// Inverse of the bandwidth.
    pub seconds_per_byte: f64,
    /// Cost of traffic.
    #[serde(default)]
    pub usd_per_byte: f64,
}

impl LinkCost {
    /// Time of one message.
    pub fn time(&self, bytes: Bytes) -> Seconds {
        self.latency + Seconds(bytes.0 * self.seconds_per_byte)
    }

    /// Price of the traffic.
    pub fn price(&self, bytes: Bytes) -> Usd {
        Usd(bytes.0 * self.usd_per_byte)
    }

    /// The path out of one network interface, over a link and into another interface; unknown parts are left
    /// out.
    pub fn between(
        from: Option<LinkCost>,
        to: Option<LinkCost>,
        pools: Option<LinkCost>,
    ) -> Option<LinkCost> {
        let cards = from.zip(to).map(|(from, to)| from.joined(to));
        match (cards, pools) {
            (Some(cards), Some(pools)) => Some(cards.joined(pools)),
            (cards, pools) => cards.or(pools),
        }
    }

    /// This path followed by `next`, as one: the slower of the two limits the bandwidth; latencies and prices
    /// add up.
    fn joined(self, next: LinkCost) -> LinkCost {
        LinkCost {
            latency: self.latency + next.latency,
            seconds_per_byte: self.seconds_per_byte.max(next.seconds_per_byte),
            usd_per_byte: self.usd_per_byte + next.usd_per_byte,
        }
    }

    /// The part of a KV transfer that prefill does not hide, when each of `layers` layers is sent as soon as
    /// it is computed. With layer times c (computing) and x (sending), the two-stage pipeline ends at c +
    /// (layers - 1) max(c, x) + x: on a link faster than prefill only the last layer's share is exposed. No
    /// bytes take no time.
    pub fn exposed(&self, bytes: Bytes, layers: u32, prefill: Seconds) -> Seconds {
        if bytes.0 <= 0.0 {
            return Seconds::ZERO;
        }
        let layers = f64::from(layers.max(1));
        let compute = prefill / layers;
        let send = self.time(bytes / layers);
        compute.max(send) * (layers - 1.0) + send + compute - prefill
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABYTE_PER_SECOND: LinkCost =
        LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };

    #[test]
    fn a_fast_link_shows_one_layer_and_a_slow_one_all_but_the_overlap() {
        let close = |a: Seconds, b: f64| assert!((a.0 - b).abs() < 1e-9, "{a:?} {b}");
        // 10 layers of 0.1 s computing and 0.05 s sending each.
        close(GIGABYTE_PER_SECOND.exposed(Bytes(0.5e9), 10, Seconds(1.0)), 0.05);
        // 0.2 s sending each: sending starts after 0.1 s and ends at 2.1 s.
        close(GIGABYTE_PER_SECOND.exposed(Bytes(2e9), 10, Seconds(1.0)), 1.1);
        // A single layer overlaps nothing.
        close(GIGABYTE_PER_SECOND.exposed(Bytes(2e9), 1, Seconds(1.0)), 2.0);
        close(GIGABYTE_PER_SECOND.exposed(Bytes(0.0), 10, Seconds(1.0)), 0.0);
    }

    #[test]
    fn every_layer_pays_the_latency() {
        let link = LinkCost { latency: Seconds(0.3), ..GIGABYTE_PER_SECOND };
        // 0.1 s computing, 0.4 s sending: 0.1 + 10 * 0.4 - 1.0.
        assert!((link.exposed(Bytes(1e9), 10, Seconds(1.0)).0 - 3.1).abs() < 1e-9);
    }
}
