//! Loads KV from lower tiers, block by block, while steps of other sequences run.
//!
//! A sequence that waits for its blocks is in no step, and has its pages alone, so that they may be written
//! at any time ([`step`](super::step)). On a device that copies beside a step, blocks are loaded one after
//! the other while a step runs. On other devices loads get a share of the steps' time, and all of it while
//! there is no step. While the disk reads a block, only the sequence waits for it. The sequence joins a step
//! once its last block is there.

use super::tiers::{EvictedBlock, block};
use super::worker::{Event, Worker};
use crate::pool::{Kept, Lease, NextBlock, Pool};
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::kv::BlockHash;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Time for loads after a step that they cannot run beside, as a share of the step's.
const SHARE: f64 = 0.1;

/// Time for loads in a turn without a step, after which messages are looked at.
const TURN: Duration = Duration::from_millis(2);

/// Most blocks in such a turn.
const TURN_BLOCKS: u32 = 64;

/// Blocks that a sequence waits for.
pub(super) struct BlockLoad {
    request: RequestId,
    /// Their pages, keys and tokens.
    pages: Vec<u32>,
    chain: Vec<BlockHash>,
    tokens: Vec<u32>,
    /// What the sequence's pages held, and is not copied to lower tiers yet.
    evicted: VecDeque<EvictedBlock>,
    /// A lease of the blocks from `leased_from` on; none before its turn, or if other blocks needed the room.
    pub(super) lease: Option<Lease>,
    leased_from: usize,
    /// Number of leading blocks that are in their pages.
    done: usize,
    /// Whether more blocks are to be loaded.
    is_loading: bool,
    /// Blocks that were read from the disk, and the time that it took.
    read: (u64, Seconds),
}

/// State of the next block that a sequence waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoadProgress {
    /// Something was copied, or is known not to be there.
    Moved,
    /// The disk is reading it.
    AwaitsDisk,
    /// No sequence waits for any.
    Done,
}

impl BlockLoad {
    /// Leases the next block, for which this waits for the disk no longer than `wait`. A prefix may be longer
    /// than host memory: once a lease has no more, the disk may have the rest.
    fn poll_next(&mut self, pool: &Pool, wait: Duration) -> NextBlock {
        let block_tokens = self.tokens.len() / self.chain.len();
        for is_renewed in [false, true] {
            let mut lease = self.lease.take().filter(|_| !is_renewed).unwrap_or_else(|| {
                self.leased_from = self.done;
                pool.begin_lease(&self.chain[self.done..], &self.tokens[self.done * block_tokens..])
            });
            let next = lease.poll_next(wait);
            let (blocks, time) = lease.take_read();
            self.read = (self.read.0 + blocks, self.read.1 + time);
            self.lease = Some(lease);
            if next != NextBlock::Missing || self.leased_from == self.done {
                return next;
            }
            self.lease = None;
        }
        NextBlock::Missing
    }

    fn is_over(&self) -> bool {
        !self.is_loading && self.evicted.is_empty()
    }
}

impl Worker {
    /// Begins to load blocks of a sequence, as far as `lease` or the tiers have them and that is better than
    /// to compute them. What its pages held before, `evicted`, is copied to lower tiers before it is
    /// overwritten.
    pub(super) fn begin_load(
        &mut self,
        request: RequestId,
        lease: Option<Lease>,
        blocks: &Range<u32>,
        chain: Vec<BlockHash>,
        evicted: VecDeque<EvictedBlock>,
    ) -> Result<()> {
        self.stop_load(request);
        let Some(text) = self.machine.text(request) else { return Ok(()) };
        let tokens = text.of_blocks(blocks.clone()).to_vec();
        let pages = self.machine.pages(request)[blocks.start as usize..blocks.end as usize].to_vec();
        let mut load = BlockLoad {
            request,
            pages,
            chain,
            tokens,
            evicted,
            lease,
            leased_from: 0,
            done: 0,
            is_loading: true,
            read: (0, Seconds::ZERO),
        };
        load.is_loading = self.is_worth_loading(&mut load, blocks.start * self.limits.block_tokens);
        // a load that waits for others must not keep host memory from them
        let is_next = load.is_loading && !self.has_loads();
        load.lease = load.lease.filter(|_| is_next);
        if !load.is_loading && (self.steps.copies.is_empty() || self.steps.others.is_some()) {
            // nothing is copied beside steps: it would hold up the prompt only
            self.keep_all(&mut load)?;
        }
        self.loads.push_back(load);
        Ok(())
    }

    /// Copies what the pages of a load held to lower tiers.
    fn keep_all(&mut self, load: &mut BlockLoad) -> Result<()> {
        let Worker { below: Some(below), kv, steps, .. } = self else { return Ok(()) };
        let mut queues = steps.copy_queues();
        for evicted in load.evicted.drain(..) {
            below.keep(&evicted, kv, &mut queues)?;
        }
        Ok(())
    }

    /// Whether lower tiers hold leading blocks of a load, and loading them is better than computing them
    /// behind `context` tokens.
    fn is_worth_loading(&self, load: &mut BlockLoad, context: u32) -> bool {
        let Some(below) = &self.below else { return false };
        let lease = load.lease.get_or_insert_with(|| below.pool.begin_lease(&load.chain, &load.tokens));
        let expected = lease.expected();
        let blocks = expected.iter().sum::<usize>();
        let tokens = to_u32(blocks) * self.limits.block_tokens;
        let time = Seconds(below.load_s(expected));
        blocks > 0 && self.machine.loads_rather(&self.cost, context, tokens, time)
    }

    /// Whether blocks are to be loaded.
    pub(super) fn has_loads(&self) -> bool {
        self.loads.iter().any(|load| !load.is_over())
    }

    /// Loads blocks after a step that took `step`, for a share of its time, but at least one.
    pub(super) fn load_after(&mut self, step: Seconds) -> Result<()> {
        let share = step * SHARE;
        self.load_for(share, Duration::from_secs_f64(share.0.max(0.0)))
    }

    /// Loads blocks while there is no step.
    pub(super) fn load_alone(&mut self) -> Result<()> {
        self.load_for(Seconds(TURN.as_secs_f64()), TURN)
    }

    /// Loads blocks for `time`. Each read of the disk is waited for no longer than `wait`.
    fn load_for(&mut self, time: Seconds, wait: Duration) -> Result<()> {
        let began = self.env.now();
        for _ in 0..TURN_BLOCKS {
            if self.load_block(wait)? != LoadProgress::Moved || (self.env.now() - began).0 >= time.0 {
                break;
            }
        }
        Ok(())
    }

    /// Copies the next block that a sequence waits for to its page, or what a page held to lower tiers. Waits
    /// for the disk no longer than `wait`.
    pub(super) fn load_block(&mut self, wait: Duration) -> Result<LoadProgress> {
        let Worker { below: Some(below), loads, kv, steps, .. } = self else {
            return Ok(LoadProgress::Done);
        };
        // a sequence without a load only waits for its own pages to be saved: it goes first
        let next = loads.iter().position(|load| !load.is_loading && !load.is_over());
        let next = next.or_else(|| loads.iter().position(|load| !load.is_over()));
        let Some(load) = next.and_then(|at| loads.get_mut(at)) else { return Ok(LoadProgress::Done) };
        let mut queues = steps.copy_queues();
        let page = load.pages.get(load.done).copied().filter(|_| load.is_loading);
        let held_before = match page {
            Some(page) => load.evicted.iter().position(|evicted| evicted.page == page),
            None => (!load.evicted.is_empty()).then_some(0),
        };
        if let Some(at) = held_before {
            // in their order: the last ones are the last to leave host memory
            let Some(evicted) = load.evicted.remove(at) else { return Ok(LoadProgress::Moved) };
            let kept = below.keep(&evicted, kv, &mut queues)?;
            if kept == Kept::Full && below.pool.has_disk() && load.lease.take().is_some() {
                below.keep(&evicted, kv, &mut queues)?;
            }
            return Ok(LoadProgress::Moved);
        }
        let next = load.poll_next(&below.pool, wait);
        if next == NextBlock::Awaited {
            return Ok(LoadProgress::AwaitsDisk);
        }
        load.is_loading = next == NextBlock::Leased;
        let Some(held) = load.lease.take().filter(|_| load.is_loading) else {
            return Ok(LoadProgress::Moved);
        };
        let span = block(kv, &load.pages[load.done]);
        let mut written = Ok(());
        let is_intact = held
            .view(load.done - load.leased_from, &mut |bytes| written = kv.write(&mut queues, &span, bytes))?;
        written?;
        load.done += usize::from(is_intact);
        load.is_loading = is_intact && load.done < load.chain.len();
        load.lease = Some(held).filter(|_| load.is_loading);
        Ok(LoadProgress::Moved)
    }

    /// Tells the machine of the loads that are over.
    pub(super) fn settle_loads(&mut self) -> Result<()> {
        while let Some(at) = self.loads.iter().position(BlockLoad::is_over) {
            let Some(BlockLoad { request, done, read, .. }) = self.loads.remove(at) else { break };
            if read.0 > 0 && self.below.as_mut().is_some_and(|below| below.learn(read.0, read.1.0)) {
                self.tell_costs();
            }
            self.report_tiers();
            self.machine_step(Event::Loaded { request, blocks: to_u32(done) })?;
        }
        Ok(())
    }

    /// Forgets the load of a request that is gone, and reports what it moved between the tiers.
    pub(super) fn stop_load(&mut self, request: RequestId) {
        let before = self.loads.len();
        self.loads.retain(|load| load.request != request);
        if self.loads.len() < before {
            self.report_tiers();
        }
    }
}
