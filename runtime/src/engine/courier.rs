//! The sender's end of the ways to other instances: an outbox and a connection to each receiver, and the
//! receiver's slots, which are the sender's credits (`landings.rs` has the receiver's end).
//!
//! The outbox mirrors the region at the receiver: slot i of the outbox is sent to slot i of the region. A
//! sender without a free slot waits, which bounds the bytes in flight.

use super::messages::{Landing, Parcel};
use super::pinning::Pinner;
use crate::pool::MakeRegion;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::transport::{Endpoint, Piece, TransferId, Transport};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::cost::PIECE_BYTES;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use twox_hash::XxHash3_64;

/// Maximum sends of one piece, over all kinds of failure, before it is recomputed.
pub(super) const SENDS_MAX: u32 = 3;

/// Limits of KV in flight from one instance to another, and the timeout of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOffLimits {
    /// Bytes of a staging slot, which is the size of the largest piece.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slots: u32,
    /// Timeout of one piece, counted from when it is first in its queue.
    pub timeout: Duration,
}

impl Default for HandOffLimits {
    fn default() -> Self {
        HandOffLimits { slot_bytes: PIECE_BYTES, slots: 32, timeout: Duration::from_secs(5) }
    }
}

impl HandOffLimits {
    /// Bytes of all slots of a landing or an outbox.
    pub(crate) fn region_bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.slots.into())
    }
}

/// The transports of this process to other memories.
#[derive(Clone)]
pub struct Links {
    /// The transports, best first.
    pub transports: Vec<Arc<dyn Transport>>,
    /// Allocates memory that all transports can access.
    pub make_region: Arc<MakeRegion>,
}

/// An instance's connections to receivers.
pub(super) struct Courier {
    links: Links,
    limits: HandOffLimits,
    pinner: Arc<Pinner>,
    /// Outboxes and connections, by receiver.
    routes: BTreeMap<InstanceId, Route>,
    /// Pieces in flight to slots of an older landing, reported as failed.
    stranded: Vec<(InstanceId, Parcel)>,
}

/// The result of sending a piece.
pub(super) enum Sent {
    /// It is in the receiver's slot.
    Landed(Parcel),
    /// Every attempt failed.
    Failed(Parcel),
}

impl Courier {
    pub(super) fn new(links: Links, limits: HandOffLimits, pinner: Arc<Pinner>) -> Self {
        let (routes, stranded) = Default::default();
        Courier { links, limits, pinner, routes, stranded }
    }

    /// Forgets a lost peer.
    pub(super) fn forget(&mut self, peer: InstanceId) {
        self.routes.remove(&peer);
        self.stranded.retain(|(to, _)| *to != peer);
    }

    /// Forgets all peers.
    pub(super) fn forget_all(&mut self) {
        self.routes.clear();
        self.stranded.clear();
    }

    /// A free slot at `peer`, whose slots are `landing`.
    ///
    /// # Errors
    /// When there is no memory for the outbox, or no region to write to.
    pub(super) fn take_slot(&mut self, peer: InstanceId, landing: &Landing) -> Result<Option<u32>> {
        if landing.regions.is_empty() {
            return Err(Error::invalid(format!("{peer} names no memory to write to")));
        }
        if self.routes.get(&peer).is_none_or(|route| route.landing != *landing) {
            let outbox = (self.links.make_region)(landing.slot_bytes.saturating_mul(landing.slots.into()))?;
            let pinned = self.pinner.pin(&outbox);
            if let Some(old) = self.routes.insert(peer, Route::new(landing.clone(), outbox, pinned)) {
                self.stranded.extend(old.sends.into_iter().map(|send| (peer, send.parcel)));
            }
        }
        Ok(self.routes.get_mut(&peer).and_then(|route| route.free.pop()))
    }

    /// Whether `peer` has a free slot.
    pub(super) fn has_slot(&self, peer: InstanceId) -> bool {
        self.routes.get(&peer).is_some_and(|route| !route.free.is_empty())
    }

    /// Frees a slot that `peer` has read.
    pub(super) fn give_slot(&mut self, peer: InstanceId, slot: u32) {
        let Some(route) = self.routes.get_mut(&peer) else { return };
        // A piece that is still in transit was not read.
        if slot < route.landing.slots && !route.free.contains(&slot) && !route.sends_from(slot) {
            route.free.push(slot);
        }
    }

    /// Fills a slot of the outbox with a piece of `bytes` bytes by `read`; returns its hash.
    ///
    /// # Errors
    /// Those of `read`, and when the piece does not fit into a slot.
    pub(super) fn fill(
        &mut self,
        peer: InstanceId,
        slot: u32,
        bytes: u64,
        read: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<u64> {
        let route = self.routes.get(&peer).ok_or_else(|| Error::invalid("a slot was taken before"))?;
        let mut outcome = Ok(0);
        route.outbox.update(u64::from(slot) * route.landing.slot_bytes, bytes, &mut |place| {
            outcome = read(place).map(|()| XxHash3_64::oneshot(place));
        })?;
        outcome
    }

    /// Starts sending the slot that `fill` filled.
    pub(super) fn send(&mut self, peer: InstanceId, parcel: Parcel, now: Seconds) {
        if let Some(route) = self.routes.get_mut(&peer) {
            let slot = parcel.slot;
            debug_assert!(
                !route.free.contains(&slot) && !route.sends_from(slot),
                "slot {slot} is not the sender's"
            );
            route.sends.push_back(Sending { parcel, transfer: None, since: now });
            let (free, sends) = (route.free.len(), route.sends.len());
            debug_assert!(free + sends <= route.landing.slots as usize, "{free} slots free, {sends} sent");
            route.start(&self.links.transports, now);
        }
    }

    /// The longest time that a first send has taken so far; none if nothing is in transit.
    pub(super) fn longest_send(&self, now: Seconds) -> Option<Seconds> {
        let firsts = self.routes.values().filter_map(|route| route.sends.front());
        firsts.map(|send| now - send.since).max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// The sends that ended; waits for up to `patience` if none has.
    pub(super) fn settle(&mut self, now: Seconds, patience: Duration) -> Vec<(InstanceId, Sent)> {
        let stranded = self.stranded.drain(..);
        let mut settled: Vec<_> = stranded.map(|(peer, parcel)| (peer, Sent::Failed(parcel))).collect();
        for (&peer, route) in &mut self.routes {
            let mut left = patience;
            while let Some(sent) = route.settle_first(&self.links.transports, self.limits.timeout, now, left)
            {
                settled.push((peer, sent));
                left = Duration::ZERO;
            }
        }
        settled
    }
}

/// The outbox and connection to one receiver.
struct Route {
    landing: Landing,
    outbox: Arc<dyn SharedMemory>,
    _pinned: Option<Pinned>,
    /// Slots that are free at both ends.
    free: Vec<u32>,
    /// Index of the landing's region in use: each failure moves on to the next.
    region: usize,
    endpoint: Option<Box<dyn Endpoint>>,
    /// Sends in order of their start.
    sends: VecDeque<Sending>,
}

struct Sending {
    parcel: Parcel,
    /// The transfer; none if it must be started or restarted.
    transfer: Option<TransferId>,
    /// When it started or became the first: a slow full link must not look like a lost one.
    since: Seconds,
}

impl Route {
    fn new(landing: Landing, outbox: Arc<dyn SharedMemory>, pinned: Option<Pinned>) -> Self {
        let free = (0..landing.slots).rev().collect();
        let sends = VecDeque::new();
        Route { landing, outbox, _pinned: pinned, free, region: 0, endpoint: None, sends }
    }

    /// Whether a piece in this slot is in transit.
    fn sends_from(&self, slot: u32) -> bool {
        self.sends.iter().any(|send| send.parcel.slot == slot)
    }

    /// Starts the sends that were not started.
    fn start(&mut self, transports: &[Arc<dyn Transport>], now: Seconds) {
        let Some(first) = self.sends.iter().position(|send| send.transfer.is_none()) else { return };
        for at in first..self.sends.len() {
            let Parcel { slot, bytes, piece, .. } = self.sends[at].parcel;
            // It is reported once it is the first.
            if piece.retries >= SENDS_MAX {
                continue;
            }
            let offset = u64::from(slot) * self.landing.slot_bytes;
            let piece = Piece { local: offset, remote: offset, bytes };
            let endpoint = match self.connected(transports) {
                Ok(endpoint) => endpoint,
                Err(error) => {
                    // No transport works now, and each further attempt may take as long: a lost host must not
                    // delay sends to others once per piece.
                    let behind = self.sends.iter_mut().skip(at + 1).map(|send| &mut send.parcel.piece);
                    behind.for_each(|piece| piece.retries = (piece.retries + 1).min(SENDS_MAX));
                    return self.failed(at, &error);
                }
            };
            match endpoint.write(&[piece]) {
                Ok(transfer) => {
                    self.sends[at].transfer = Some(transfer);
                    self.sends[at].since = now;
                }
                Err(error) => return self.failed(at, &error),
            }
        }
    }

    /// The connection to the first usable region, from the current one on.
    fn connected(&mut self, transports: &[Arc<dyn Transport>]) -> Result<&mut Box<dyn Endpoint>> {
        let mut refused = Error::unsupported("the peer has no memory to write to");
        for _ in 0..self.landing.regions.len() {
            if self.endpoint.is_some() {
                break;
            }
            let region = &self.landing.regions[self.region];
            let transport = transports.iter().find(|t| t.name() == region.transport);
            let connected = transport.map(|transport| transport.connect(self.outbox.clone(), region));
            match connected {
                Some(Ok(endpoint)) => {
                    tracing::info!(
                        transport = region.transport,
                        details = endpoint.details(),
                        "KV goes this way"
                    );
                    self.endpoint = Some(endpoint);
                }
                Some(Err(error)) if error.kind != ErrorKind::Unsupported => return Err(error),
                other => {
                    let unknown = || Error::unsupported(format!("no transport '{}' here", region.transport));
                    refused = other.and_then(Result::err).unwrap_or_else(unknown);
                    self.region = (self.region + 1) % self.landing.regions.len();
                }
            }
        }
        self.endpoint.as_mut().ok_or(refused)
    }

    /// Handles a failed connection: all sends restart over the next region, and `at` has one attempt less.
    fn failed(&mut self, at: usize, error: &Error) {
        let transport = &self.landing.regions[self.region].transport;
        let Parcel { request, piece, .. } = &mut self.sends[at].parcel;
        tracing::warn!(request, layer = piece.layer, first = piece.first, transport, %error, "KV transfer failed");
        piece.retries += 1;
        self.endpoint = None;
        self.region = (self.region + 1) % self.landing.regions.len();
        self.sends.iter_mut().for_each(|send| send.transfer = None);
    }

    /// The result of the first send, if it has ended.
    fn settle_first(
        &mut self,
        transports: &[Arc<dyn Transport>],
        timeout: Duration,
        now: Seconds,
        patience: Duration,
    ) -> Option<Sent> {
        loop {
            let first = self.sends.front()?;
            if first.parcel.piece.retries >= SENDS_MAX {
                let parcel = self.sends.pop_front()?.parcel;
                self.free.push(parcel.slot);
                return Some(Sent::Failed(parcel));
            }
            let since = first.since;
            let Some(transfer) = first.transfer else {
                self.start(transports, now);
                continue;
            };
            let Some(endpoint) = &mut self.endpoint else {
                self.sends.iter_mut().for_each(|send| send.transfer = None);
                continue;
            };
            match endpoint.wait(transfer, patience) {
                Ok(()) => {
                    let landed = self.sends.pop_front()?.parcel;
                    if let Some(next) = self.sends.front_mut() {
                        next.since = now;
                    }
                    return Some(Sent::Landed(landed));
                }
                Err(error) if error.kind == ErrorKind::Timeout && (now - since).0 < timeout.as_secs_f64() => {
                    return None;
                }
                Err(error) => {
                    let _ = endpoint.cancel(transfer);
                    self.failed(0, &error);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "courier_tests.rs"]
mod tests;
