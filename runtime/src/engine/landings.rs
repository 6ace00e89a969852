//! The receiver's end of the ways from other instances: staging memory that senders write to.
//!
//! Each sender has its own region, so that late writes of a lost peer can be fenced off without affecting
//! others.

use super::courier::{HandOffLimits, Links};
use super::messages::Landing;
use super::pinning::Pinner;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// An instance's staging memory.
pub(super) struct Landings {
    links: Links,
    limits: HandOffLimits,
    pinner: Arc<Pinner>,
    /// Staging memory by the peer that writes to it.
    by_sender: BTreeMap<InstanceId, Landed>,
    /// Memory in which a piece is verified.
    private: Option<(Arc<dyn SharedMemory>, Option<Pinned>)>,
}

/// Staging memory that a peer writes to.
struct Landed {
    landing: Landing,
    memory: Arc<dyn SharedMemory>,
    pinned: Option<Pinned>,
}

impl Landings {
    pub(super) fn new(links: Links, limits: HandOffLimits, pinner: Arc<Pinner>) -> Self {
        Landings { links, limits, pinner, by_sender: BTreeMap::new(), private: None }
    }

    /// The staging slots for pieces from `peer`.
    ///
    /// # Errors
    /// When no transport can reach memory of this process, or there is no memory left.
    pub(super) fn landing(&mut self, peer: InstanceId) -> Result<&Landing> {
        if !self.by_sender.contains_key(&peer) {
            let HandOffLimits { slot_bytes, slots, .. } = self.limits;
            let memory = (self.links.make_region)(self.limits.region_bytes())?;
            let mut refused = Error::unsupported("there is no transport");
            let mut regions = Vec::new();
            for transport in &self.links.transports {
                match transport.register(memory.clone(), RemoteAccess::Write) {
                    Ok(region) => regions.push(region),
                    Err(error) => {
                        tracing::warn!(%peer, transport = transport.name(), %error, "staging memory is not reachable");
                        refused = error.context(transport.name());
                    }
                }
            }
            if regions.is_empty() {
                return Err(refused);
            }
            let (landing, pinned) = (Landing { regions, slots, slot_bytes }, self.pinner.pin(&memory));
            self.by_sender.insert(peer, Landed { landing, memory, pinned });
        }
        Ok(&self.by_sender[&peer].landing)
    }

    /// Copies the first `bytes` bytes of a slot that `peer` wrote to memory that no peer can access. Returns
    /// that memory, and the hash of the copy.
    ///
    /// # Errors
    /// `Invalid` if there is no such slot, `OutOfMemory` if there is no memory left.
    pub(super) fn take_out(
        &mut self,
        peer: InstanceId,
        slot: u32,
        bytes: u64,
    ) -> Result<(Arc<dyn SharedMemory>, u64)> {
        let private = self.private();
        let none = || Error::new(ErrorKind::OutOfMemory, "there is no memory to check a piece in");
        let Landed { landing, memory, .. } =
            self.by_sender.get(&peer).ok_or_else(|| Error::invalid(format!("{peer} has no slots here")))?;
        if slot >= landing.slots || bytes > landing.slot_bytes {
            return Err(Error::invalid(format!("{bytes} bytes in slot {slot}: no such slot")));
        }
        let private = private.ok_or_else(none)?;
        let mut copied = Err(none());
        memory.view(u64::from(slot) * landing.slot_bytes, bytes, &mut |payload| {
            copied = private.store_hashed(0, payload);
        })?;
        copied.map(|hash| (private, hash))
    }

    /// Memory for one piece that no peer can access, in which it is verified before use; none if there is no
    /// memory left.
    fn private(&mut self) -> Option<Arc<dyn SharedMemory>> {
        if self.private.is_none() {
            let memory = (self.links.make_region)(self.limits.slot_bytes).ok()?;
            let pinned = self.pinner.pin(&memory);
            self.private = Some((memory, pinned));
        }
        self.private.as_ref().map(|(memory, _)| memory.clone())
    }

    /// Forgets a lost peer, and fences off its late writes.
    pub(super) fn forget(&mut self, peer: InstanceId) {
        let Some(Landed { landing, pinned, .. }) = self.by_sender.remove(&peer) else { return };
        // Fencing may replace the pages that are pinned.
        drop(pinned);
        for region in &landing.regions {
            for transport in self.links.transports.iter().filter(|t| t.name() == region.transport) {
                if let Err(error) = transport.deregister(region) {
                    tracing::warn!(%peer, %error, "staging memory could not be fenced");
                }
            }
        }
    }

    /// Forgets all peers.
    pub(super) fn forget_all(&mut self) {
        let peers: Vec<InstanceId> = self.by_sender.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.forget(peer));
    }
}
