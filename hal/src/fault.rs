//! Faults, described once and obeyed by every test double: the simulated device, the faulty
//! transport, the faulty device of the conformance suite.

use crate::random;
use serde::{Deserialize, Serialize};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// One bit of the payload changes.
    BitFlip,
    /// The operation reports success and does nothing.
    Drop,
    /// The operation reports an error.
    Fail,
    /// The operation never ends.
    Hang,
    /// The operation works on what one of its inputs held before it was last written.
    Stale,
    /// The operation takes this many times as long.
    Slow {
        /// The factor, from 1 on.
        times: u32,
    },
}

/// A fault with the operations that it strikes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// What goes wrong.
    pub fault: Fault,
    /// Chance per operation, 0 to 1.
    pub probability: f64,
    /// First operation that can be struck, counted from 0.
    #[serde(default)]
    pub from: u64,
    /// One past the last operation that can be struck; none = no end.
    #[serde(default)]
    pub until: Option<u64>,
}

/// A seeded, reproducible series of faults: what strikes operation `n` depends on the seed and on
/// `n` alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultPlan {
    /// The seed, printed on failure.
    pub seed: u64,
    /// Tried in order; the first that strikes wins.
    pub rules: Vec<Rule>,
}

impl FaultPlan {
    /// A plan in which exactly the operations `from..until` suffer `fault`.
    pub fn exactly(fault: Fault, from: u64, until: u64) -> Self {
        FaultPlan { seed: 0, rules: vec![Rule { fault, probability: 1.0, from, until: Some(until) }] }
    }

    /// What strikes operation `index`, if anything.
    pub fn at(&self, index: u64) -> Option<Fault> {
        self.rules.iter().enumerate().find_map(|(which, rule)| {
            let inside = index >= rule.from && rule.until.is_none_or(|until| index < until);
            let roll = random::unit(self.seed.wrapping_add(which as u64), index);
            (inside && roll < rule.probability).then_some(rule.fault)
        })
    }

    /// The bit that a `BitFlip` of operation `index` changes in a payload of `bytes` bytes.
    pub fn bit(&self, index: u64, bytes: u64) -> u64 {
        random::bits(!self.seed, index) % (bytes * 8).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_strikes_where_it_says_and_the_same_way_each_time() {
        let plan = FaultPlan::exactly(Fault::BitFlip, 3, 5);
        let struck: Vec<u64> = (0..10).filter(|&i| plan.at(i).is_some()).collect();
        assert_eq!(struck, [3, 4]);
        let random = FaultPlan {
            seed: 9,
            rules: vec![Rule { fault: Fault::Fail, probability: 0.1, from: 0, until: None }],
        };
        let count = (0..10_000).filter(|&i| random.at(i).is_some()).count();
        assert!((800..1200).contains(&count), "{count}");
        assert!((0..100).all(|i| plan.bit(i, 7) < 56));
    }
}
