//! A prompt's pins on its blocks.

use super::Shared;
use super::traffic::{Arrival, Wanted};
use mixfleet_hal::{Error, Result};
use mixfleet_scheduler::kv::BlockHash;
use std::collections::BTreeSet;
use std::sync::Arc;
use twox_hash::XxHash3_64;

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
    /// How the leading blocks were there, or none of those that may be on the disk.
    arrivals: Vec<Option<Arrival>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({} of {} blocks)", self.held.len(), self.chain.len())
    }
}

impl Lease {
    /// Pins the blocks that are in host memory, of which [`bring_next`](Self::bring_next) leases one after
    /// the other.
    pub(super) fn begin(shared: Arc<Shared>, chain: &[BlockHash], tokens: &[u32]) -> Self {
        // A block whose tokens are not known cannot be compared.
        let known = chain.len().min(tokens.len() / shared.layout.block_tokens);
        let tokens = tokens[..known * shared.layout.block_tokens].to_vec();
        let chain = chain[..known].to_vec();
        let (held, ahead, arrivals) = (Vec::new(), BTreeSet::new(), Vec::new());
        let mut lease = Lease { shared, chain, tokens, held, ahead, arrivals };
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

    /// Passes the bytes of a pinned block to `look` if they are what was stored; otherwise drops the block
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

    /// Drops a pinned block whose bytes were found not to be what was stored.
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
        let came = result.unwrap_or_else(|error| {
            tracing::warn!(%error, "a KV block could not be brought to host memory");
            Arrival::Missing
        });
        if !self.note(came) {
            self.arrivals.truncate(at);
            return false;
        }
        let mut state = self.shared.state();
        match arrival {
            Some(_) => state.counts.hits_dram += 1,
            None => state.counts.hits_ssd += 1,
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
