//! Where parts on offer stand, and what KV pays to get from one region to another.
//!
//! Prompts may be computed in one region and answers decoded in another where a link joins them: all KV then
//! takes its share of the link's bandwidth, and pays for its bytes. Whole requests go anywhere.

use super::forms::{Candidate, FleetForm};
use super::market::{DUTIES, Market, PlannedPool};
use super::offered::MarketKind;
use super::program::Duty;
use mixfleet_hal::StoredAs;
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds, UsdPerHour};
use serde::Serialize;

/// A link between two regions, in one direction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RegionLink {
    /// The region of the source.
    pub from: String,
    /// The region of the destination.
    pub to: String,
    /// Bandwidth of all transfers together.
    pub bandwidth: BytesPerSecond,
    /// Latency of a message.
    pub latency: Seconds,
    /// Price of traffic in USD per 1e9 bytes.
    pub usd_per_gb: f64,
}

/// How KV gets from one offer's devices to another's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Crossing<'a> {
    /// By the instances' network: both are in one region.
    Within,
    /// Over a link.
    Over(&'a RegionLink),
    /// Not at all.
    Missing,
}

impl Market {
    /// The path of KV from devices of one offer to those of another.
    pub(super) fn crossing(&self, prefill: usize, decode: usize) -> Crossing<'_> {
        let [from, to] = [prefill, decode].map(|part| &self.ask.parts[part].region);
        if from == to {
            return Crossing::Within;
        }
        let link = self.ask.links.iter().find(|link| link.from == *from && link.to == *to);
        link.map_or(Crossing::Missing, Crossing::Over)
    }

    /// Whether the KV of a form gets to where it is wanted.
    pub(super) fn is_joined(&self, form: FleetForm) -> bool {
        match form {
            FleetForm::Split { prefill, decode } => self.crossing(prefill, decode) != Crossing::Missing,
            _ => true,
        }
    }

    /// The regions of the offers.
    pub fn regions(&self) -> Vec<&str> {
        let mut regions: Vec<&str> = self.ask.parts.iter().map(|offer| offer.region.as_str()).collect();
        regions.sort_unstable();
        regions.dedup();
        regions
    }

    /// The link that the KV of all requests takes: between the first prefill and the first decode instances,
    /// since no fleet has them in more than two regions.
    pub(super) fn link_taken(&self, parts: impl Iterator<Item = (usize, Duty)>) -> Option<&RegionLink> {
        let (mut prefill, mut decode) = (None, None);
        for (part, duty) in parts {
            match duty {
                Duty::Prefill => prefill = prefill.or(Some(part)),
                Duty::Decode => decode = decode.or(Some(part)),
                Duty::Whole => {}
            }
        }
        match self.crossing(prefill?, decode?) {
            Crossing::Over(link) => Some(link),
            Crossing::Within | Crossing::Missing => None,
        }
    }

    /// Candidates divided by region, so that KV stays within one; those for whole requests are in all.
    pub(super) fn by_region(&self, candidates: &[Candidate]) -> Vec<Vec<Candidate>> {
        let region = |kind: usize| self.ask.parts[self.kinds[kind].part].region.as_str();
        let of = |wanted: &str| {
            let own = candidates.iter().copied();
            own.filter(|&(kind, duty)| DUTIES[duty] == Duty::Whole || region(kind) == wanted).collect()
        };
        self.regions().into_iter().map(of).collect()
    }

    /// What the traffic between regions costs, of a fleet of some pools whose weights are stored so.
    pub(super) fn traffic_usd_per_hour(&self, pools: &[PlannedPool], stored: StoredAs) -> UsdPerHour {
        let used = || pools.iter().filter(|pool| pool.count > 0);
        let Some(link) = self.link_taken(used().map(|pool| (pool.part, pool.duty))) else {
            return UsdPerHour(0.0);
        };
        let prefill = used().find(|pool| pool.duty == Duty::Prefill).map_or(0, |pool| pool.part);
        let stored = self.ask.stored.iter().position(|known| *known == stored);
        let of_pool = |kind: &&MarketKind| kind.part == prefill && Some(kind.stored) == stored;
        let seconds = self.kinds.iter().find(of_pool).map_or(&[][..], |kind| &kind.links);
        let each = self.ask.classes.iter().zip(seconds);
        let bytes: f64 = each.map(|(class, network_s)| class.rate * network_s * self.ask.nic.0).sum();
        UsdPerHour(bytes / GB * 3600.0 * link.usd_per_gb)
    }
}
