use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A report of an instance, and how it arrives.
#[derive(Clone, Debug)]
enum Report {
    Numbered {
        sequence: Sequence,
        change: Told,
    },
    /// A change without a number, which is never lost.
    Told(Told),
    Resync {
        sequence: Sequence,
        snapshot: Vec<(Tier, Vec<u64>)>,
    },
    Remove,
    Sweep,
}

/// A number relative to the expected one.
#[derive(Clone, Copy, Debug)]
enum Sequence {
    Next,
    Later(u64),
    Earlier(u64),
}

#[derive(Clone, Debug)]
enum Told {
    Store(Tier, Vec<u64>),
    Evict(Tier, Vec<u64>),
    Clear,
}

/// One instance as a set of pairs, and the numbers of its changes.
#[derive(Clone, Debug, Default)]
struct Naive {
    held: BTreeSet<(u64, Tier)>,
    next: u64,
    seen: u64,
}

impl Naive {
    fn tell(&mut self, told: &Told) {
        match told {
            Told::Store(tier, keys) => self.held.extend(keys.iter().map(|&key| (key, *tier))),
            Told::Evict(tier, keys) => self.held.retain(|(key, t)| t != tier || !keys.contains(key)),
            Told::Clear => self.held.clear(),
        }
    }

    fn number(&self, sequence: Sequence) -> u64 {
        match sequence {
            Sequence::Next => self.next,
            Sequence::Later(by) => self.next + by,
            Sequence::Earlier(by) => self.next.saturating_sub(by),
        }
    }

    fn verdict(&self) -> Applied {
        if self.next < self.seen { Applied::Gap { expected: self.next } } else { Applied::Done }
    }

    fn apply(&mut self, number: u64, told: &Told) -> Applied {
        if number < self.next {
            return Applied::Late;
        }
        self.seen = self.seen.max(number + 1);
        if number > self.next && !matches!(told, Told::Clear) {
            return Applied::Gap { expected: self.next };
        }
        self.next = number + 1;
        self.tell(told);
        if matches!(told, Told::Clear) { self.verdict() } else { Applied::Done }
    }

    fn resync(&mut self, number: u64, snapshot: &[(Tier, Vec<u64>)]) -> Applied {
        if number + 1 < self.next {
            return Applied::Late;
        }
        self.next = number + 1;
        self.seen = self.seen.max(self.next);
        self.held.clear();
        for (tier, keys) in snapshot {
            self.tell(&Told::Store(*tier, keys.clone()));
        }
        self.verdict()
    }

    fn prefix(&self, instance: u32, chain: &[u64]) -> Option<Prefix> {
        let fastest = |key: u64| Tier::ALL.into_iter().find(|&tier| self.held.contains(&(key, tier)));
        let mut blocks = [0; 3];
        for tier in chain.iter().map_while(|&key| fastest(key)) {
            blocks[tier as usize] += 1;
        }
        let counts = self.next >= self.seen && blocks != [0; 3];
        counts.then_some(Prefix { instance: InstanceId(instance), blocks })
    }
}

fn tier() -> impl Strategy<Value = Tier> {
    proptest::sample::select(Tier::ALL.to_vec())
}

fn blocks() -> impl Strategy<Value = Vec<u64>> {
    prop_oneof![
        // Usually a prefix of the one chain, so that long matches are common.
        3 => (0u64..13).prop_map(|end| (0..end).collect::<Vec<_>>()),
        2 => proptest::collection::vec(0u64..13, 0..8),
    ]
}

fn told() -> impl Strategy<Value = Told> {
    prop_oneof![
        6 => (tier(), blocks()).prop_map(|(tier, keys)| Told::Store(tier, keys)),
        3 => (tier(), blocks()).prop_map(|(tier, keys)| Told::Evict(tier, keys)),
        1 => Just(Told::Clear),
    ]
}

fn sequence() -> impl Strategy<Value = Sequence> {
    prop_oneof![
        12 => Just(Sequence::Next),
        1 => (1u64..4).prop_map(Sequence::Later),
        2 => (1u64..4).prop_map(Sequence::Earlier),
    ]
}

fn report() -> impl Strategy<Value = Report> {
    let snapshot = proptest::collection::vec((tier(), blocks()), 0..4);
    prop_oneof![
        20 => (sequence(), told()).prop_map(|(sequence, change)| Report::Numbered { sequence, change }),
        10 => told().prop_map(Report::Told),
        3 => (sequence(), snapshot).prop_map(|(sequence, snapshot)| Report::Resync { sequence, snapshot }),
        1 => Just(Report::Remove),
        1 => Just(Report::Sweep),
    ]
}

fn keys(hashes: &[u64]) -> Vec<BlockHash> {
    hashes.iter().map(|&hash| BlockHash(hash)).collect()
}

fn with_change<T>(told: &Told, then: impl FnOnce(Change) -> T) -> T {
    match told {
        Told::Store(tier, hashes) => then(Change::Store(*tier, &keys(hashes))),
        Told::Evict(tier, hashes) => then(Change::Evict(*tier, &keys(hashes))),
        Told::Clear => then(Change::Clear),
    }
}

fn report_to_both(index: &mut PrefixIndex, naive: &mut [Naive], from: u32, report: &Report) {
    let instance = InstanceId(from);
    let model = &mut naive[from as usize];
    match report {
        Report::Numbered { sequence, change } => {
            let number = model.number(*sequence);
            let applied = with_change(change, |change| index.apply(instance, number, change));
            assert_eq!(applied, model.apply(number, change));
        }
        Report::Told(change) => {
            with_change(change, |change| match change {
                Change::Store(tier, hashes) => index.store(instance, tier, hashes),
                Change::Evict(tier, hashes) => index.evict(instance, tier, hashes),
                Change::Clear => index.clear(instance),
            });
            model.tell(change);
        }
        Report::Resync { sequence, snapshot } => {
            let number = model.number(*sequence);
            let lists: Vec<(Tier, Vec<BlockHash>)> =
                snapshot.iter().map(|(tier, hashes)| (*tier, keys(hashes))).collect();
            let slices: Vec<(Tier, &[BlockHash])> =
                lists.iter().map(|(tier, list)| (*tier, &list[..])).collect();
            assert_eq!(index.resync(instance, number, &slices), model.resync(number, snapshot));
        }
        Report::Remove => {
            index.remove(instance);
            *model = Naive::default();
        }
        Report::Sweep => index.sweep(),
    }
    let missing = (model.next < model.seen).then_some(model.next);
    assert_eq!(index.missing(instance), missing);
}

proptest! {
    #[test]
    fn it_agrees_with_sets_of_pairs(
        // Nine instances: more than a set stores inline.
        reports in proptest::collection::vec((0u32..9, report()), 0..120),
        chains in proptest::collection::vec(blocks(), 1..4),
    ) {
        let mut index = PrefixIndex::default();
        let mut naive = vec![Naive::default(); 9];
        let mut answer = Prefixes::default();
        for (from, report) in reports {
            report_to_both(&mut index, &mut naive, from, &report);
            for chain in &chains {
                index.lookup(&keys(chain), &mut answer);
                let mut found = answer.as_slice().to_vec();
                found.sort_by_key(|prefix| prefix.instance);
                let expected: Vec<Prefix> =
                    (0..9).filter_map(|i| naive[i as usize].prefix(i, chain)).collect();
                prop_assert_eq!(found, expected);
            }
        }
        index.sweep();
        let distinct: BTreeSet<u64> = naive.iter().flat_map(|n| n.held.iter().map(|&(key, _)| key)).collect();
        prop_assert_eq!(index.blocks(), distinct.len());
        for (instance, naive) in (0..).map(InstanceId).zip(&naive) {
            let mut held: Vec<_> = naive.held.iter().map(|&(key, tier)| (tier, BlockHash(key))).collect();
            held.sort_unstable();
            prop_assert_eq!(index.held_by(instance), held);
        }
    }
}

#[test]
fn what_a_cleared_instance_left_is_swept_out_by_later_changes() {
    let mut index = PrefixIndex::default();
    let blocks: Vec<BlockHash> = (0..20_000).map(BlockHash).collect();
    index.store(InstanceId(0), Tier::Device, &blocks);
    index.store(InstanceId(1), Tier::Device, &blocks[..100]);
    index.clear(InstanceId(0));
    assert!(index.blocks() > 19_000, "clearing walks nothing");
    let mut answer = Prefixes::default();
    index.lookup(&blocks, &mut answer);
    assert_eq!(answer.as_slice(), [Prefix { instance: InstanceId(1), blocks: [100, 0, 0] }]);
    for _ in 0..=index.blocks.pieces() {
        index.store(InstanceId(1), Tier::Device, &[]);
    }
    assert_eq!(index.blocks(), 100);
    assert_eq!(index.sets.live(), 1);
}

#[test]
fn sets_are_given_back() {
    let mut index = PrefixIndex::default();
    let blocks: Vec<BlockHash> = (0..500).map(BlockHash).collect();
    for round in 0..20u32 {
        for instance in 0..12 {
            let from = (instance * 31 + round * 7) as usize % 400;
            index.store(InstanceId(instance), Tier::Dram, &blocks[from..from + 100]);
        }
        for instance in 0..12 {
            index.evict(InstanceId(instance), Tier::Dram, &blocks);
        }
        assert_eq!((index.blocks(), index.sets.live()), (0, 0));
    }
    assert!(index.sets.places() < 200, "places are used again");
}

#[test]
fn numbers_at_the_end_of_their_range_do_no_harm() {
    let mut index = PrefixIndex::default();
    let store = Change::Store(Tier::Device, &[BlockHash(1)]);
    assert_eq!(index.apply(InstanceId(0), u64::MAX, store), Applied::Gap { expected: 0 });
    assert_eq!(index.resync(InstanceId(0), u64::MAX, &[]), Applied::Done);
    assert_eq!(index.apply(InstanceId(0), u64::MAX, store), Applied::Done);
}
