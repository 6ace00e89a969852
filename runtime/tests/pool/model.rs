//! Any use of the pool has the result of the naive model.

use super::naive::Tiers;
use super::support::{Follower, check, config, lease, open, put, ssd};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::pool::{Kept, Lease, Pool, Snapshot};
use mixfleet_scheduler::kv::BlockHash;
use proptest::prelude::*;

/// Prompts in a tree of fan-out 3: key = path, so that equal keys have equal prefixes.
fn chain() -> impl Strategy<Value = Vec<u64>> {
    proptest::collection::vec(0u64..3, 0..7).prop_map(|path| {
        path.iter()
            .scan(1, |key, step| {
                *key = *key * 4 + step;
                Some(*key)
            })
            .collect()
    })
}

#[derive(Clone, Debug)]
enum Operation {
    /// Takes a lease on a prompt.
    Use(Vec<u64>),
    /// Ends the lease at this index.
    Release(usize),
    /// Evicts the last block of this prompt from the device.
    Keep(Vec<u64>),
    /// Ends all leases, syncs, and opens the pool again.
    Reopen,
}

fn step() -> impl Strategy<Value = Operation> {
    prop_oneof![
        4 => chain().prop_map(Operation::Use),
        3 => any::<usize>().prop_map(Operation::Release),
        10 => chain().prop_map(Operation::Keep),
        1 => Just(Operation::Reopen),
    ]
}

/// A pool with its model.
struct Pair {
    pool: Pool,
    model: Tiers,
    follower: Follower,
    /// Leases with their chains, and the indices that the model pinned ahead.
    leases: Vec<(Lease, Vec<u64>, Vec<usize>)>,
}

impl Pair {
    fn keep(&mut self, key: u64) {
        let kept = put(&self.pool, key);
        assert_eq!(matches!(kept, Kept::Stored | Kept::Held), self.model.keep(key), "{kept:?}");
    }

    fn release(&mut self, at: usize) {
        let (lease, chain, ahead) = self.leases.swap_remove(at);
        check(&lease, &chain);
        self.model.release(&chain, lease.len(), &ahead);
    }

    fn assert_agrees(&mut self, dram: usize, ssd: usize) {
        self.follower.follow(&self.pool.take_events());
        let truth = self.pool.snapshot();
        self.follower.assert_agrees(&truth);
        let keys = |hashes: &[BlockHash]| hashes.iter().map(|hash| hash.0).collect::<Vec<u64>>();
        assert_eq!((keys(&truth.dram), keys(&truth.ssd)), self.model.keys());
        assert!(truth.dram.len() <= dram && truth.ssd.len() <= ssd);
        for (lease, chain, _) in &self.leases {
            check(lease, chain);
        }
    }
}

fn run(dram: usize, on_disk: usize, steps: Vec<Operation>) {
    let disk = SimDisk::default();
    let tier = || (on_disk > 0).then(|| ssd(disk.clone(), on_disk as u64));
    let start = || open(config(dram as u64, tier())).expect("a sound disk");
    let mut pair = Pair {
        pool: start(),
        model: Tiers::new(dram, on_disk),
        follower: Follower::new(&Snapshot::default()),
        leases: Vec::new(),
    };
    for step in steps {
        match step {
            Operation::Use(chain) => {
                let lease = lease(&pair.pool, &chain);
                let (held, ahead) = pair.model.lease(&chain);
                assert_eq!(lease.len(), held);
                pair.leases.push((lease, chain, ahead));
            }
            Operation::Release(at) if !pair.leases.is_empty() => pair.release(at % pair.leases.len()),
            Operation::Release(_) => {}
            Operation::Keep(chain) => chain.last().into_iter().for_each(|&key| pair.keep(key)),
            Operation::Reopen => {
                while !pair.leases.is_empty() {
                    pair.release(0);
                }
                pair.pool.sync().expect("a sound disk");
                pair.pool = start();
                pair.model.reopen();
                pair.follower = Follower::new(&pair.pool.snapshot());
            }
        }
        pair.assert_agrees(dram, on_disk);
        let room = 48 + on_disk as u64 * (88 + 128);
        assert!(disk.used_bytes() <= room, "{} of {room} bytes", disk.used_bytes());
    }
    assert_eq!(pair.pool.stats().bad, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn it_agrees_with_two_lists(
        dram in 1usize..8,
        on_disk in 0usize..12,
        steps in proptest::collection::vec(step(), 0..60),
    ) {
        run(dram, on_disk, steps);
    }
}
