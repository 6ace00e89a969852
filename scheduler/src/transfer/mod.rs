//! The control side of KV transfers, one machine for all requests of a router: hand-off (prefill to decode),
//! pull (prefix from a peer), copy (of a prefix, ahead of demand), and replay after a loss.
//!
//! ```text
//!            orders                                 reports
//!  one place Add                                    Drawn ... Finished
//!  hand-off  Reserve at decode                      Reserved
//!            Add at prefill, with the room          Drawn (first token), Joined, Drawn ... Finished
//!  pull      (Add at prefill names the holder)      Reserved by prefill
//!            Lend at the holder, or NotLent         Admitted
//!  copy      Copy at the receiver                   Reserved
//!            Lend at the holder                     Kept
//!  loss      Cancel at prefill, decode and holder   Revoked, LinkDown, Lost: placed again
//! ```
//!
//! Each placement of a request has a number, its attempt: orders carry it, and reports repeat it. Reports of
//! an earlier attempt, and of instances outside the current placement, are ignored.
//!
//! Absent: clocks; bytes, slots, pieces and verdicts, which the sender and the receiver handle; the choice of
//! instances, which the fleet machine makes (`fleet`).

mod event;
#[cfg(test)]
mod tests;

pub use crate::ids::{InstanceId, RequestId};
pub use event::{Action, Event, PrefixSource, Reporter};

use crate::table::IdMap;
use mixfleet_hal::units::Seconds;
use std::collections::{BTreeMap, BTreeSet};

/// How far a placement has come.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TransferStage {
    /// The decode instance was asked to reserve room.
    Reserving,
    /// The prompt was given to its prefill instance.
    Computing,
    /// The prompt is computed, and its KV is still in flight to the decode instance.
    Computed { at: Seconds },
    /// All KV has reached the decode instance, and the first token has not been reported.
    Arrived,
    /// The decode instance has the KV and the first token, and decodes.
    Joined,
}

/// Where a request is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlacedAt {
    /// The instance that computes the prompt.
    pub prefill: InstanceId,
    /// The instance that generates the tokens; may be the same.
    pub decode: InstanceId,
    /// The prefix that another instance sends; none once the prefill instance no longer waits for it.
    pub pull: Option<PrefixSource>,
    stage: TransferStage,
}

impl PlacedAt {
    /// Whether two instances share the request.
    pub fn is_split(&self) -> bool {
        self.prefill != self.decode
    }
}

/// A request in progress.
#[derive(Clone, Debug)]
struct TransferState<T> {
    /// The number of its placement.
    attempt: u32,
    /// None while it waits to be placed.
    place: Option<PlacedAt>,
    /// Number of tokens of its answer that were passed to the client.
    tokens: u32,
    /// Tokens, by index, that the decode instance reported before the prefill instance's report of the first
    /// token arrived.
    early: BTreeMap<u32, T>,
}

/// A copy in progress.
#[derive(Clone, Copy, Debug)]
struct CopyState {
    source: PrefixSource,
    to: InstanceId,
}

/// The transfer machine. Equal events give equal actions.
#[derive(Clone, Debug)]
pub struct KvTransfers<T> {
    requests: IdMap<TransferState<T>>,
    copies: IdMap<CopyState>,
}

impl<T> Default for KvTransfers<T> {
    fn default() -> Self {
        KvTransfers { requests: IdMap::default(), copies: IdMap::default() }
    }
}

impl<T> KvTransfers<T> {
    /// Returns where a request is placed; none if it is unknown, or waits to be placed.
    pub fn place(&self, request: RequestId) -> Option<&PlacedAt> {
        self.requests.get(request)?.place.as_ref()
    }

    /// Returns the number of a request's placement; 0 for unknown requests and for copies.
    pub fn attempt(&self, request: RequestId) -> u32 {
        self.requests.get(request).map_or(0, |state| state.attempt)
    }

    /// Number of tokens of a request's answer that were passed on.
    pub fn tokens(&self, request: RequestId) -> u32 {
        self.requests.get(request).map_or(0, |state| state.tokens)
    }

    /// Whether a report belongs to the current placement of its request.
    pub fn is_current(&self, by: Reporter) -> bool {
        self.requests.get(by.request).is_some_and(|state| state.is_current(by))
    }

    /// Whether an instance waits for a prefix that another one sends, of a request or of a copy.
    pub fn awaits_prefix(&self, by: Reporter) -> bool {
        match self.copies.get(by.request) {
            Some(copy) => copy.to == by.instance,
            None => {
                let place = self.place(by.request).filter(|_| self.is_current(by));
                place.is_some_and(|place| place.prefill == by.instance && place.pull.is_some())
            }
        }
    }

    /// Handles `event`, and appends the actions to `actions`.
    pub fn step<R>(&mut self, event: Event<R, T>, actions: &mut Vec<Action<R, T>>) {
        match event {
            Event::Placed { request, prefill, decode, pull } => {
                let stage = TransferStage::Reserving;
                self.placed(request, PlacedAt { prefill, decode, pull, stage }, actions);
            }
            Event::Reserved { by, room } => self.reserved(by, room, actions),
            Event::Admitted { by } => {
                if let Some(place) = self.current(by).and_then(|state| state.place.as_mut()) {
                    place.pull = None;
                }
            }
            Event::Drawn { by, index, token, at } => {
                if let Some(state) = self.current(by) {
                    state.drawn(by, index, token, at, actions);
                }
            }
            Event::Joined { request, instance, at } => {
                if let Some(state) = self.requests.get_mut(request) {
                    state.joined(request, instance, at, actions);
                }
            }
            Event::Revoked { by } => {
                if !self.end_copy(by.request, false, actions) && self.is_current(by) {
                    self.place_again(by.request, actions);
                }
            }
            Event::Finished { request, instance, knows } => {
                let Some(state) = self.requests.remove(request) else { return };
                let decode = state.place.map(|place| place.decode);
                if let Some(decode) = decode.filter(|&decode| decode != instance || !knows) {
                    actions.push(Action::Cancel { instance: decode, request });
                }
            }
            Event::Cancelled { request } => {
                self.leave(request, actions);
                self.requests.remove(request);
            }
            Event::Lost { request } => self.leave(request, actions),
            Event::CopyWanted { request, source, to } => {
                self.copies.insert(request, CopyState { source, to });
                let to = Reporter { instance: to, request, attempt: 0 };
                actions.push(Action::Copy { to, source });
            }
            Event::Kept { request } => _ = self.end_copy(request, true, actions),
            Event::CopyFailed { request } => _ = self.end_copy(request, false, actions),
            Event::InstanceDown { instance } => {
                self.end_pulls(|holder, _| holder == instance, actions);
                self.end_copies(|holder, receiver| [holder, receiver].contains(&instance), actions);
            }
            Event::LinkDown { from, to } => self.link_down(from, to, actions),
        }
    }

    /// The request of a report that belongs to its current placement.
    fn current(&mut self, by: Reporter) -> Option<&mut TransferState<T>> {
        self.requests.get_mut(by.request).filter(|state| state.is_current(by))
    }

    fn placed<R>(&mut self, request: RequestId, place: PlacedAt, actions: &mut Vec<Action<R, T>>) {
        // Otherwise the instances of an earlier placement would keep their reservations.
        self.leave(request, actions);
        if !self.requests.contains(request) {
            let (attempt, place, tokens, early) = (0, None, 0, BTreeMap::new());
            self.requests.insert(request, TransferState { attempt, place, tokens, early });
        }
        let Some(state) = self.requests.get_mut(request) else { return };
        let place = state.place.insert(place);
        let to = Reporter { instance: place.decode, request, attempt: state.attempt };
        if place.is_split() {
            // The receiver reserves room before the prompt is computed.
            actions.push(Action::Reserve { to, sender: place.prefill });
        } else {
            place.stage = TransferStage::Computing;
            actions.push(Action::Add { to, hand_off: None, pull: place.pull });
        }
    }

    fn reserved<R>(&mut self, by: Reporter, room: R, actions: &mut Vec<Action<R, T>>) {
        let Reporter { instance, request, attempt } = by;
        if let Some(&CopyState { source, to }) = self.copies.get(request) {
            if instance == to {
                let to = Reporter { instance: source.holder, request, attempt };
                actions.push(Action::Lend { to, until: source.until, receiver: instance, room });
            }
            return;
        }
        let Some(place) = self.current(by).and_then(|state| state.place.as_mut()) else { return };
        let to = |instance| Reporter { instance, request, attempt };
        if place.stage == TransferStage::Reserving {
            if instance == place.decode {
                place.stage = TransferStage::Computing;
                let hand_off = Some((instance, room));
                actions.push(Action::Add { to: to(place.prefill), hand_off, pull: place.pull });
            }
        } else if instance == place.prefill {
            actions.push(match place.pull {
                Some(PrefixSource { holder, until }) => {
                    Action::Lend { to: to(holder), until, receiver: instance, room }
                }
                None => Action::NotLent { to: to(instance) },
            });
        }
    }

    /// Cancels a request on all instances of its placement, which ends.
    fn leave<R>(&mut self, request: RequestId, actions: &mut Vec<Action<R, T>>) {
        let Some(state) = self.requests.get_mut(request) else { return };
        let Some(PlacedAt { prefill, decode, pull, .. }) = state.place.take() else { return };
        state.attempt += 1;
        state.early.clear();
        let holder = pull.map(|source| source.holder);
        let all: BTreeSet<InstanceId> = [prefill, decode].into_iter().chain(holder).collect();
        actions.extend(all.into_iter().map(|instance| Action::Cancel { instance, request }));
    }

    fn place_again<R>(&mut self, request: RequestId, actions: &mut Vec<Action<R, T>>) {
        actions.push(Action::Unplace { request });
        self.leave(request, actions);
        actions.push(Action::PlaceAgain { request });
    }

    /// Ends a copy; false if `request` is not a copy.
    fn end_copy<R>(&mut self, request: RequestId, kept: bool, actions: &mut Vec<Action<R, T>>) -> bool {
        let Some(CopyState { source, .. }) = self.copies.remove(request) else { return false };
        if !kept {
            actions.push(Action::Cancel { instance: source.holder, request });
        }
        actions.push(Action::CopyEnded { request, kept });
        true
    }

    /// Ends the copies that `lost` selects by holder and receiver.
    fn end_copies<R>(
        &mut self,
        lost: impl Fn(InstanceId, InstanceId) -> bool,
        actions: &mut Vec<Action<R, T>>,
    ) {
        for request in self.copies.ids_where(|copy| lost(copy.source.holder, copy.to)) {
            let receiver = self.copies.get(request).map(|copy| copy.to);
            actions.extend(receiver.map(|instance| Action::Cancel { instance, request }));
            self.end_copy(request, false, actions);
        }
    }

    /// Ends the pulls that `lost` selects by holder and receiver, which would not end by themselves.
    fn end_pulls<R>(
        &mut self,
        lost: impl Fn(InstanceId, InstanceId) -> bool,
        actions: &mut Vec<Action<R, T>>,
    ) {
        let is_lost = |place: &PlacedAt| place.pull.is_some_and(|pull| lost(pull.holder, place.prefill));
        for request in self.requests.ids_where(|state| state.place.as_ref().is_some_and(is_lost)) {
            let Some(state) = self.requests.get_mut(request) else { continue };
            let attempt = state.attempt;
            let Some(place) = &mut state.place else { continue };
            place.pull = None;
            let to = Reporter { instance: place.prefill, request, attempt };
            actions.push(Action::NotLent { to });
        }
    }

    fn link_down<R>(&mut self, from: InstanceId, to: InstanceId, actions: &mut Vec<Action<R, T>>) {
        // A holder needs a link back as well, for credits.
        let is_pair = |a, b| (a, b) == (from, to) || (b, a) == (from, to);
        self.end_pulls(is_pair, actions);
        self.end_copies(is_pair, actions);
        let needs_link = |place: &PlacedAt| {
            let is_there = matches!(place.stage, TransferStage::Arrived | TransferStage::Joined);
            (place.prefill, place.decode) == (from, to) && !is_there
        };
        for request in self.requests.ids_where(|state| state.place.as_ref().is_some_and(needs_link)) {
            self.place_again(request, actions);
        }
    }
}

impl<T> TransferState<T> {
    /// Whether a report has the current attempt and is from one of its instances. Reports of earlier attempts
    /// may arrive late.
    fn is_current(&self, by: Reporter) -> bool {
        let is_part = |place: &PlacedAt| [place.prefill, place.decode].contains(&by.instance);
        self.attempt == by.attempt && self.place.as_ref().is_some_and(is_part)
    }

    /// Passes tokens to the client in order. Reports of one instance arrive in order. The first token of a
    /// split request comes from the prefill instance, so later tokens may arrive before it.
    fn drawn<R>(&mut self, by: Reporter, index: u32, token: T, at: Seconds, actions: &mut Vec<Action<R, T>>) {
        let Some(place) = &mut self.place else { return };
        let is_begun = place.stage != TransferStage::Reserving;
        if is_begun && index > self.tokens && place.is_split() && by.instance == place.decode {
            self.early.insert(index, token);
            return;
        }
        if !is_begun || index != self.tokens {
            return actions.push(Action::OutOfTurn { by, index, next: self.tokens });
        }
        actions.push(Action::Token { by, token });
        self.tokens += 1;
        let Reporter { instance: drew, request, .. } = by;
        let instance = place.decode;
        match place.stage {
            _ if drew == instance => {}
            TransferStage::Computing => place.stage = TransferStage::Computed { at },
            // The two reports came over different connections.
            TransferStage::Arrived => {
                place.stage = TransferStage::Joined;
                actions.push(Action::Exposed { time: Seconds::ZERO });
                actions.push(Action::TransferDone { request, instance });
            }
            _ => {}
        }
        let by = Reporter { instance, ..by };
        while let Some(token) = self.early.remove(&self.tokens) {
            actions.push(Action::Token { by, token });
            self.tokens += 1;
        }
    }

    /// Handles the report that all KV has reached the decode instance. The report has no attempt. One of an
    /// earlier placement is recognised by the stage, since the decode instance has not reported room since.
    fn joined<R>(
        &mut self,
        request: RequestId,
        instance: InstanceId,
        at: Seconds,
        actions: &mut Vec<Action<R, T>>,
    ) {
        let is_sent_there = |place: &&mut PlacedAt| place.decode == instance && place.is_split();
        let Some(place) = self.place.as_mut().filter(is_sent_there) else { return };
        match place.stage {
            TransferStage::Computing => place.stage = TransferStage::Arrived,
            TransferStage::Computed { at: since } => {
                place.stage = TransferStage::Joined;
                actions.push(Action::Exposed { time: at - since });
                actions.push(Action::TransferDone { request, instance });
            }
            TransferStage::Reserving | TransferStage::Arrived | TransferStage::Joined => {}
        }
    }
}
