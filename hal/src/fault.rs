//! One description of faults for every test double: the simulated device, the faulty transport and the faulty
//! device of the conformance suite.

use crate::random;
use serde::{Deserialize, Serialize};

/// A kind of injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// One bit of the payload flips.
    BitFlip,
    /// The operation reports success and does nothing.
    Drop,
    /// The operation reports an error.
    Fail,
    /// The operation never ends.
    Hang,
    /// The operation reads an input as it was before its last write.
    Stale,
    /// The operation takes a multiple of its normal time.
    Slow {
        /// The slow-down factor, at least 1.
        times: u32,
    },
}

/// A fault and the range of operations it applies to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// The fault to inject.
    pub fault: Fault,
    /// Probability per operation, from 0 to 1.
    pub probability: f64,
    /// Index of the first operation that can be affected, counted from 0.
    #[serde(default)]
    pub from: u64,
    /// One past the last operation that can be affected; `None` means no end.
    #[serde(default)]
    pub until: Option<u64>,
}

/// A seeded, reproducible series of faults: whether operation `n` is affected depends only on the seed and
/// `n`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FaultPlan {
    /// The seed, which tests print on failure.
    pub seed: u64,
    /// Rules in order of precedence; the first one that applies wins.
    pub rules: Vec<Rule>,
}

impl FaultPlan {
    /// Creates a plan under which exactly the operations `from..until` suffer `fault`.
    pub fn exactly(fault: Fault, from: u64, until: u64) -> Self {
        FaultPlan { seed: 0, rules: vec![Rule { fault, probability: 1.0, from, until: Some(until) }] }
    }

    /// Creates a plan under which every operation suffers `fault` with the given probability, from 0 to 1.
    pub fn at_rate(fault: Fault, probability: f64, seed: u64) -> Self {
        FaultPlan { seed, rules: vec![Rule { fault, probability, from: 0, until: None }] }
    }

    /// Whether any rule injects `fault`, at any factor; test doubles keep old bytes only for plans that need
    /// them.
    pub fn mentions(&self, fault: Fault) -> bool {
        let kind = std::mem::discriminant(&fault);
        self.rules.iter().any(|rule| std::mem::discriminant(&rule.fault) == kind)
    }

    /// Returns the fault that affects operation `index`, if any.
    pub fn at(&self, index: u64) -> Option<Fault> {
        self.rules.iter().enumerate().find_map(|(which, rule)| {
            let inside = index >= rule.from && rule.until.is_none_or(|until| index < until);
            let roll = random::unit(self.seed.wrapping_add(which as u64), index);
            (inside && roll < rule.probability).then_some(rule.fault)
        })
    }

    /// Returns the bit that a `BitFlip` of operation `index` flips in a payload of `bytes` bytes.
    pub fn bit(&self, index: u64, bytes: u64) -> u64 {
        random::bits(!self.seed, index) % (bytes * 8).max(1)
    }

    /// Returns which of `count` targets operation `index` hits when there is a choice.
    pub fn pick(&self, index: u64, count: u64) -> u64 {
        random::bits(self.seed ^ 0x5EED, index) % count.max(1)
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
        let random = FaultPlan::at_rate(Fault::Fail, 0.1, 9);
        let count = (0..10_000).filter(|&i| random.at(i).is_some()).count();
        assert!((800..1200).contains(&count), "{count}");
        assert!((0..100).all(|i| plan.bit(i, 7) < 56 && plan.pick(i, 3) < 3));
        let rare = FaultPlan::at_rate(Fault::Drop, 1e-6, 4);
        let count = (0..4_000_000).filter(|&i| rare.at(i).is_some()).count();
        assert!((1..=12).contains(&count), "{count} of 4 million at one in a million");
    }

    #[test]
    fn a_plan_knows_which_kinds_it_has() {
        let plan = FaultPlan::exactly(Fault::Slow { times: 3 }, 0, 1);
        assert!(plan.mentions(Fault::Slow { times: 7 }) && !plan.mentions(Fault::Stale));
    }
}
