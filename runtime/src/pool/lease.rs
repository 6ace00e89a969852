//! A prompt's pins on its blocks.

use super::Shared;
use super::traffic::{Arrival, Promotion, Wanted};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, Result};
use mixfleet_scheduler::kv::BlockHash;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use twox_hash::XxHash3_64;

/// Whether the next block of a lease is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextBlock {
    /// It is leased.
    Leased,
    /// It is being read from the disk.
    Awaited,
    /// It is not held, is bad, is another prompt's, or finds no room.
    Missing,
}

/// The leading blocks of a prompt, pinned in host memory until this is dropped. A lease counts as one use of
/// each.
pub struct Lease {
    shared: Arc<Shared>,
    chain: Vec<BlockHash>,
    tokens: Vec<u32>,
    /// Slots and payload digests of the leading blocks, all pinned once.
    held: Vec<(u32, u64)>,
    /// Later blocks that are in host memory already, pinned once so that they are not evicted for earlier
    /// ones.
    ahead: BTreeSet<usize>,
    /// Where the leading blocks were found; none for those that may be on the disk.
    arrivals: Vec<Option<Arrival>>,
    /// The position of a block that is being read from the disk. One at a time: writers to the disk wait for
    /// it.
    reading: Option<(usize, Promotion)>,
    /// Blocks that the disk read without being waited for, and the time that it took.
    read: (u64, Seconds),
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({} of {} blocks)", self.held.len(), self.chain.len())
    }
}

impl Lease {
    /// Pins the blocks that are in host memory; [`bring_next`](Self::bring_next) leases them one by one.
    pub(super) fn begin(shared: Arc<Shared>, chain: &[BlockHash], tokens: &[u32]) -> Self {
        // A block whose tokens are not known cannot be compared.
        let known = chain.len().min(tokens.len() / shared.layout.block_tokens);
        let tokens = tokens[..known * shared.layout.block_tokens].to_vec();
        let chain = chain[..known].to_vec();
        let (held, ahead, arrivals) = (Vec::new(), BTreeSet::new(), Vec::new());
        let (reading, read) = (None, (0, Seconds::ZERO));
        let mut lease = Lease { shared, chain, tokens, held, ahead, arrivals, reading, read };
        lease.arrivals = lease.pin_present();
        lease
    }

    /// Number of leading blocks that are in host memory, and that may be on the disk.
    pub fn expected(&self) -> [usize; 2] {
        let on_disk = self.arrivals.iter().filter(|arrival| arrival.is_none()).count();
        [self.arrivals.len() - on_disk, on_disk]
    }

    /// Number of leading blocks that are pinned.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether no block is pinned.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Passes the bytes of a pinned block to `look` if they match the stored ones; otherwise drops the block
    /// and returns false.
    ///
    /// # Errors
    /// `Invalid` if the block is not pinned.
    pub fn view(&self, block: usize, look: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let (slot, digest) = self.pinned(block)?;
        let mut intact = false;
        self.shared.slab.view(slot, &mut |payload| {
            intact = XxHash3_64::oneshot(payload) == digest;
            if intact {
                look(payload);
            }
        })?;
        if !intact {
            self.drop_corrupt(block)?;
        }
        Ok(intact)
    }

    /// Passes the bytes of a pinned block to `look` unchecked, for a caller that checks them.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn view_unchecked(&self, block: usize, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.shared.slab.view(self.pinned(block)?.0, look)
    }

    /// Drops a pinned block whose bytes were found to differ from the stored ones.
    ///
    /// # Errors
    /// As [`view`](Self::view).
    pub fn drop_corrupt(&self, block: usize) -> Result<()> {
        self.shared.drop_corrupt(self.chain[block], self.pinned(block)?.0);
        Ok(())
    }

    fn pinned(&self, block: usize) -> Result<(u32, u64)> {
        let held = self.held.get(block).copied();
        held.ok_or_else(|| Error::invalid(format!("block {block} of a lease on {} blocks", self.held.len())))
    }

    fn wanted(&self, at: usize) -> Wanted<'_> {
        let block_tokens = self.shared.layout.block_tokens;
        let tokens = &self.tokens[at * block_tokens..(at + 1) * block_tokens];
        Wanted { hash: self.chain[at], tokens }
    }

    /// Pins the blocks that are in host memory. Returns for each leading block how it is there, or none if it
    /// may be on the disk.
    fn pin_present(&mut self) -> Vec<Option<Arrival>> {
        let shared = self.shared.clone();
        let mut state = shared.state();
        let (mut arrivals, mut leading) = (Vec::new(), true);
        for at in 0..self.chain.len() {
            let wanted = self.wanted(at);
            let arrival = state.pin(wanted);
            if leading && (arrival.is_some() || state.tier(wanted.hash).is_some()) {
                arrivals.push(arrival);
            }
            if arrival == Some(Arrival::Held) {
                self.ahead.insert(at);
            }
            leading &= arrivals.len() == at + 1 && matches!(arrival, None | Some(Arrival::Held));
        }
        // The disk counts a use by prompts that read from it; host memory hides the other uses from it.
        if arrivals.contains(&None)
            && let Some(ssd) = &mut state.ssd
        {
            ssd.cache.touch(&self.chain);
        }
        arrivals
    }

    /// Leases the next block, which it may load from the disk. False if it is not held, is bad, is another
    /// prompt's, or finds no room.
    pub fn bring_next(&mut self) -> bool {
        let at = self.held.len();
        let Some(&arrival) = self.arrivals.get(at) else { return false };
        let result = match arrival {
            Some(arrival) => Ok(arrival),
            None => self.shared.promote(self.wanted(at)),
        };
        self.lease_next(arrival.is_none(), result)
    }

    /// Leases the next block as [`bring_next`](Self::bring_next) does, but waits for the disk no longer than
    /// `wait`.
    pub fn poll_next(&mut self, wait: Duration) -> NextBlock {
        let at = self.held.len();
        let Some(&arrival) = self.arrivals.get(at) else { return NextBlock::Missing };
        let result = match arrival {
            Some(arrival) => Some(Ok(arrival)),
            None => self.poll_read(at, wait),
        };
        match result.map(|result| self.lease_next(arrival.is_none(), result)) {
            None => NextBlock::Awaited,
            Some(true) => NextBlock::Leased,
            Some(false) => NextBlock::Missing,
        }
    }

    /// How a block came from the disk; none if it is not there within `wait`.
    fn poll_read(&mut self, at: usize, wait: Duration) -> Option<Result<Arrival>> {
        let begun =
            self.reading.take().filter(|(position, _)| *position == at).map(|(_, promotion)| promotion);
        let Some(mut promotion) = begun.or_else(|| self.shared.begin_promotion(self.chain[at])) else {
            return Some(Ok(Arrival::Missing));
        };
        let Some((arrival, time)) = self.shared.end_promotion(self.wanted(at), &mut promotion, wait) else {
            self.reading = Some((at, promotion));
            return None;
        };
        if matches!(arrival, Ok(Arrival::Stored)) && time.0 > 0.0 {
            self.read = (self.read.0 + 1, self.read.1 + time);
        }
        Some(arrival)
    }

    /// Blocks that the disk read for [`poll_next`](Self::poll_next) since the last call, and the time that it
    /// took.
    pub fn take_read(&mut self) -> (u64, Seconds) {
        std::mem::take(&mut self.read)
    }

    /// Leases the next block, if that is how it came.
    fn lease_next(&mut self, was_on_disk: bool, result: Result<Arrival>) -> bool {
        let at = self.held.len();
        let came = result.unwrap_or_else(|error| {
            tracing::warn!(%error, "a KV block could not be brought to host memory");
            Arrival::Missing
        });
        if !self.note(came) {
            self.arrivals.truncate(at);
            return false;
        }
        let mut state = self.shared.state();
        match was_on_disk {
            true => state.counts.hits_ssd += 1,
            false => state.counts.hits_dram += 1,
        }
        true
    }

    /// Adds the next block to the lease if it is pinned.
    fn note(&mut self, arrival: Arrival) -> bool {
        if !matches!(arrival, Arrival::Stored | Arrival::Held) {
            return false;
        }
        let at = self.held.len();
        self.ahead.remove(&at);
        let slot = self.shared.state().dram.get(self.chain[at]).map(|held| (held.slot, held.digest));
        self.held.extend(slot);
        slot.is_some()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let pinned = (0..self.chain.len()).filter(|at| *at < self.held.len() || self.ahead.contains(at));
        let pinned: Vec<BlockHash> = pinned.map(|at| self.chain[at]).collect();
        if !pinned.is_empty() {
            self.shared.state().dram.unpin(&pinned);
        }
    }
}
