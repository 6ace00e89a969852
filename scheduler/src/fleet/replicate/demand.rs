//! The demand for each shared prefix, and the losses because not every instance holds it.
//!
//! Counts fade: after `memory` without demand they are 1/e of what they were. The table is bounded
//! (Space-Saving; Metwally et al., 2005): a new prefix replaces the one with the least demand, and takes over
//! its rank. A prefix of more than 1 in [`ENTRIES`] requests is always in it.

use crate::kv::BlockHash;
use crate::table::IdMap;
use mixfleet_hal::units::Seconds;

const ENTRIES: usize = 512;
/// Faded counts are kept in growing units instead; at this exponent they are normalised, far from the largest
/// float (e^709).
const UNITS_EXPONENT_MAX: f64 = 64.0;

/// The demand for a prefix, faded as of now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Need {
    /// Number of requests that used it since it is in the table; not faded.
    pub(super) uses: u32,
    /// Number of requests that were placed where it was not held.
    pub(super) misses: f64,
    /// Seconds that each miss lost.
    pub(super) miss_s: f64,
    /// Total seconds that requests queued where it is held.
    pub(super) waited_s: f64,
}

/// The loss of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Loss {
    /// The prefix is computed or pulled again.
    Miss(Seconds),
    /// It queues for an instance that holds the prefix while another could start earlier.
    Wait(Seconds),
}

#[derive(Clone, Debug)]
struct Entry {
    key: BlockHash,
    uses: u32,
    misses: f64,
    missed_s: f64,
    waited_s: f64,
}

impl Entry {
    fn new(key: BlockHash) -> Self {
        Entry { key, uses: 0, misses: 0.0, missed_s: 0.0, waited_s: 0.0 }
    }
}

/// The table. Times passed to it must not run backwards.
#[derive(Clone, Debug)]
pub(super) struct Demand {
    memory: Seconds,
    /// The time at which the unit of faded counts was 1.
    began: Seconds,
    entries: Vec<Entry>,
    /// Faded uses of each entry, including the replaced entry's. They are separate, since the least one is
    /// searched for.
    ranks: Vec<f64>,
    places: IdMap<usize>,
}

impl Demand {
    pub(super) fn new(memory: Seconds) -> Self {
        Demand {
            memory,
            began: Seconds::ZERO,
            entries: Vec::new(),
            ranks: Vec::new(),
            places: IdMap::default(),
        }
    }

    /// Counts a request that used the prefix `key` at `now`, with its loss; returns the prefix's demand.
    pub(super) fn used(&mut self, now: Seconds, key: BlockHash, loss: Option<Loss>) -> Need {
        let unit = self.unit(now);
        let at = self.place(key);
        self.ranks[at] += unit;
        let entry = &mut self.entries[at];
        entry.uses += 1;
        match loss {
            Some(Loss::Miss(lost)) => {
                entry.misses += unit;
                entry.missed_s += lost.0 * unit;
            }
            Some(Loss::Wait(lost)) => entry.waited_s += lost.0 * unit,
            None => {}
        }
        let miss_s = if entry.misses > 0.0 { entry.missed_s / entry.misses } else { 0.0 };
        Need { uses: entry.uses, misses: entry.misses / unit, miss_s, waited_s: entry.waited_s / unit }
    }

    /// Resets the losses of a prefix for which a copy was requested.
    pub(super) fn answered(&mut self, key: BlockHash) {
        if let Some(&at) = self.places.get(key.0) {
            let entry = &mut self.entries[at];
            (entry.misses, entry.missed_s, entry.waited_s) = (0.0, 0.0, 0.0);
        }
    }

    /// The count of an event at `now`, in growing units.
    fn unit(&mut self, now: Seconds) -> f64 {
        let exponent = (now - self.began).0 / self.memory.0.max(f64::MIN_POSITIVE);
        if exponent <= UNITS_EXPONENT_MAX {
            return exponent.exp();
        }
        let fade = (-exponent).exp();
        self.began = now;
        self.ranks.iter_mut().for_each(|rank| *rank *= fade);
        for Entry { misses, missed_s, waited_s, .. } in &mut self.entries {
            (*misses, *missed_s, *waited_s) = (*misses * fade, *missed_s * fade, *waited_s * fade);
        }
        1.0
    }

    /// The index of `key`, which is added if missing.
    fn place(&mut self, key: BlockHash) -> usize {
        if let Some(&at) = self.places.get(key.0) {
            return at;
        }
        let at = if self.entries.len() < ENTRIES {
            self.entries.push(Entry::new(key));
            self.ranks.push(0.0);
            self.entries.len() - 1
        } else {
            let ranks = self.ranks.iter().enumerate();
            let least = ranks.fold(
                (0, f64::INFINITY),
                |least, (at, &rank)| {
                    if rank < least.1 { (at, rank) } else { least }
                },
            );
            self.places.remove(self.entries[least.0].key.0);
            least.0
        };
        self.entries[at] = Entry::new(key);
        self.places.insert(key.0, at);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::Stream;

    fn demand() -> Demand {
        Demand::new(Seconds(100.0))
    }

    #[test]
    fn counts_fade_and_means_do_not() {
        let (mut demand, key) = (demand(), BlockHash(7));
        demand.used(Seconds(0.0), key, Some(Loss::Miss(Seconds(3.0))));
        demand.used(Seconds(0.0), key, Some(Loss::Wait(Seconds(2.0))));
        for now in [100.0, 200.0] {
            let need = demand.clone().used(Seconds(now), key, None);
            let faded = (-now / 100.0f64).exp();
            assert_eq!(need.uses, 3);
            assert!((need.misses - faded).abs() < 1e-12 && (need.waited_s - 2.0 * faded).abs() < 1e-12);
            assert!((need.miss_s - 3.0).abs() < 1e-12, "{need:?}");
        }
        demand.answered(key);
        assert_eq!(demand.used(Seconds(1.0), key, None), Need { uses: 3, ..Need::default() });
    }

    #[test]
    fn units_are_brought_back_before_they_overflow() {
        let (mut demand, key) = (demand(), BlockHash(7));
        let mut need = Need::default();
        for step in 0..10_000 {
            need = demand.used(Seconds(f64::from(step) * 50.0), key, Some(Loss::Miss(Seconds(1.0))));
        }
        // Each is worth e^-0.5 of the next.
        assert!((need.misses - 1.0 / (1.0 - (-0.5f64).exp())).abs() < 1e-9, "{need:?}");
        let after_ages = demand.used(Seconds(1e9), key, None);
        assert_eq!(after_ages.misses, 0.0);
    }

    #[test]
    fn what_is_asked_for_often_stays_among_many_that_come_once() {
        let (mut demand, mut random) = (demand(), Stream::new(3));
        let mut hot = 0;
        let mut uses = 0;
        for step in 0..100_000u64 {
            let now = Seconds(step as f64 * 1e-3);
            // One in a hundred is more than one in this many entries.
            if random.next_unit() < 0.01 {
                hot += 1;
                uses = demand.used(now, BlockHash(1), None).uses;
            } else {
                demand.used(now, BlockHash(1000 + step), None);
            }
        }
        assert_eq!(demand.entries.len(), ENTRIES);
        assert_eq!(demand.places.len(), ENTRIES);
        assert!(uses > hot - 20, "{uses} of {hot}");
    }
}
