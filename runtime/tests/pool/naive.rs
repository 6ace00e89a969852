//! A naive model of two tiers, as lists that are searched.

#[derive(Clone, Debug)]
struct Block {
    key: u64,
    used_at: u64,
    pins: u32,
}

/// One tier.
#[derive(Clone, Debug)]
struct Naive {
    capacity: usize,
    blocks: Vec<Block>,
    clock: u64,
}

impl Naive {
    fn new(capacity: usize) -> Self {
        Naive { capacity, blocks: Vec::new(), clock: 0 }
    }

    fn find(&mut self, key: u64) -> Option<&mut Block> {
        self.blocks.iter_mut().find(|block| block.key == key)
    }

    fn has(&self, key: u64) -> bool {
        self.blocks.iter().any(|block| block.key == key)
    }

    fn stamp(&mut self, key: u64) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(block) = self.find(key) {
            block.used_at = clock;
        }
    }

    fn touch(&mut self, chain: &[u64]) {
        for &key in chain.iter().rev() {
            self.stamp(key);
        }
    }

    fn pin(&mut self, key: u64) {
        self.find(key).expect("the caller looked").pins += 1;
    }

    fn unpin(&mut self, key: u64) {
        let block = self.find(key).expect("a pinned block is never evicted");
        block.pins -= 1;
        if block.pins == 0 {
            self.stamp(key);
        }
    }

    /// Inserts and pins a key. None if all are pinned; otherwise the evicted block, if any.
    fn insert_pinned(&mut self, key: u64) -> Option<Option<Block>> {
        let mut victim = None;
        if self.blocks.len() == self.capacity {
            let idle = self.blocks.iter().filter(|block| block.pins == 0);
            let least = idle.min_by_key(|block| block.used_at).cloned()?;
            self.blocks.retain(|block| block.key != least.key);
            victim = Some(least);
        }
        self.blocks.push(Block { key, used_at: 0, pins: 1 });
        Some(victim)
    }

    fn keys(&self) -> Vec<u64> {
        let mut keys: Vec<u64> = self.blocks.iter().map(|block| block.key).collect();
        keys.sort_unstable();
        keys
    }
}

/// Host memory and a disk that never fail.
pub(crate) struct Tiers {
    dram: Naive,
    ssd: Naive,
}

impl Tiers {
    pub(crate) fn new(dram: usize, ssd: usize) -> Self {
        Tiers { dram: Naive::new(dram), ssd: Naive::new(ssd) }
    }

    /// Pins leading blocks in host memory as far as possible; returns their number, and the indices of later
    /// ones that are pinned too.
    pub(crate) fn lease(&mut self, chain: &[u64]) -> (usize, Vec<usize>) {
        let known = chain.iter().take_while(|&&key| self.dram.has(key) || self.ssd.has(key)).count();
        let present: Vec<usize> = (0..chain.len()).filter(|&at| self.dram.has(chain[at])).collect();
        present.iter().for_each(|&at| self.dram.pin(chain[at]));
        if (0..known).any(|at| !present.contains(&at)) {
            self.ssd.touch(chain);
        }
        // The disk's block may be evicted for one that is loaded before it.
        let comes = |at: &usize| present.contains(at) || self.ssd.has(chain[*at]) && self.store(chain[*at]);
        let held = (0..known).take_while(comes).count();
        (held, present.into_iter().filter(|&at| at >= held).collect())
    }

    /// Stores a block. False if there is no room.
    pub(crate) fn keep(&mut self, key: u64) -> bool {
        let fits = self.store(key);
        if fits {
            self.dram.unpin(key);
        }
        fits
    }

    /// Stores a block in host memory, and pins it. False if there is no room.
    fn store(&mut self, key: u64) -> bool {
        if self.dram.has(key) {
            self.dram.pin(key);
            return true;
        }
        let Some(victim) = self.dram.insert_pinned(key) else { return false };
        if let Some(victim) = victim.filter(|_| self.ssd.capacity > 0) {
            if self.ssd.has(victim.key) {
                self.ssd.touch(&[victim.key]);
            } else {
                self.ssd.insert_pinned(victim.key).expect("the disk pins nothing for long");
                self.ssd.unpin(victim.key);
            }
        }
        true
    }

    pub(crate) fn release(&mut self, chain: &[u64], held: usize, ahead: &[usize]) {
        let pinned = (0..chain.len()).rev().filter(|at| *at < held || ahead.contains(at));
        pinned.for_each(|at| self.dram.unpin(chain[at]));
    }

    /// Loses host memory; the disk keeps its order.
    pub(crate) fn reopen(&mut self) {
        self.dram.blocks.clear();
        let mut order = self.ssd.blocks.clone();
        order.sort_by_key(|block| block.used_at);
        for Block { key, .. } in order {
            self.ssd.stamp(key);
        }
    }

    pub(crate) fn keys(&self) -> (Vec<u64>, Vec<u64>) {
        (self.dram.keys(), self.ssd.keys())
    }
}
