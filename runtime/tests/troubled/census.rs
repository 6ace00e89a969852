//! What happened in histories, counted by name.

use std::collections::BTreeMap;

/// What strikes a fleet in these worlds: each does in at least one seed of twenty, over a thousand seeds.
pub(crate) const FAULTS: [&str; 33] = [
    "KV nodes killed",
    "clocks off",
    "connections cut",
    "devices failed",
    "devices hung",
    "devices poisoned",
    "disks full",
    "disks hung",
    "disks out",
    "disks slow",
    "grammar trials killed",
    "ids unknown",
    "messages after the end",
    "parts that boast",
    "partitions",
    "partitions one way",
    "partitions that last",
    "regions refused",
    "registry emptied",
    "registry lost its data",
    "registry stopped",
    "requests too many",
    "results that are nonsense",
    "rotten in host memory",
    "rotten on disks",
    "routers killed",
    "strangers of another model",
    "strangers of another protocol",
    "threads refused",
    "transfers failed",
    "transfers flipped",
    "transfers lost",
    "workers killed",
];

/// Events that must have happened if as many seeds ran as in CI.
pub(crate) const EFFECTS: [&str; 6] = [
    "right",
    "right in parts of the layers",
    "right by a grammar",
    "blocks from host memory",
    "blocks from disks",
    "tokens pulled",
];

/// What befalls the members of instances over several devices.
pub(crate) const MEMBER_FAULTS: [&str; 6] = [
    "members cut off",
    "members that died",
    "members that failed",
    "members that hung",
    "members lost in the middle of a step",
    "members lost that are not the first",
];

/// Effects that must have happened where their faults struck.
pub(crate) const GROUP_EFFECTS: [&str; 11] = [
    "right",
    "right in parts of the layers",
    "KV between groups",
    "KV of groups to single devices",
    "KV of single devices to groups",
    "members that came back",
    "answers of tp",
    "answers of pp",
    "answers of attn by head",
    "answers of attn by request",
    "answers of attn by range",
];

/// What happened in one history.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census(BTreeMap<&'static str, u64>);

impl Census {
    pub(crate) fn count(&mut self, what: &'static str, times: u64) {
        *self.0.entry(what).or_default() += times;
    }

    pub(crate) fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// Requests that should have been answered, and were not.
    pub(crate) fn errors(&self) -> u64 {
        self.0.iter().filter(|(what, _)| what.starts_with("errors: ")).map(|(_, times)| times).sum()
    }
}

/// What happened in many.
#[derive(Default)]
pub(crate) struct Totals {
    histories: u64,
    /// Number of events, and of histories with them.
    counts: BTreeMap<&'static str, (u64, u64)>,
}

impl Totals {
    pub(crate) fn add(&mut self, census: &Census) {
        self.histories += 1;
        for (&what, &times) in census.0.iter().filter(|(_, times)| **times > 0) {
            let (all, histories) = self.counts.entry(what).or_default();
            *all += times;
            *histories += 1;
        }
    }

    /// Faults that struck in fewer than one in this many histories, and effects that never happened.
    pub(crate) fn rare(
        &self,
        faults: &[&'static str],
        effects: &[&'static str],
        histories_per_fault: u64,
    ) -> Vec<&'static str> {
        let histories = |what: &'static str| self.counts.get(what).map_or(0, |(_, histories)| *histories);
        let faults = faults.iter().filter(|what| histories(what) * histories_per_fault < self.histories);
        faults.chain(effects.iter().filter(|what| histories(what) == 0)).copied().collect()
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} histories", self.histories)?;
        for (what, (times, histories)) in &self.counts {
            let share = *histories as f64 * 100.0 / self.histories as f64;
            writeln!(f, "{times:>12}  {what}, in {share:.1} % of histories")?;
        }
        Ok(())
    }
}
