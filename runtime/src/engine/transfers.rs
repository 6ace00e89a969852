//! The coordinator's part in KV transfers.
//!
//! Hand-off: the decode instance has made room, and the prompt is started. Pull: the prefill instance has
//! made room, and the holder is asked for more of the prefix; on any failure the prefill instance is told not
//! to wait, and computes the rest.

use super::coordinator::{Coordinator, Stage, Tracked};
use super::handoff::wire_dtype;
use super::messages::{HandOff, Lacking, Landing, Order, Source};
use mixfleet_hal::DType;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Event, Explanation, InstanceId, Pull};

/// The source of a placement's pull.
pub(super) fn source(pull: Option<Pull>, explanation: &Explanation) -> Option<Source> {
    Some(Source { holder: pull?.from, until: explanation.pulled_until()? })
}

impl Coordinator {
    /// Continues once `instance` has room for what it lacks of a request.
    pub(super) fn reserved(
        &mut self,
        instance: InstanceId,
        request: RequestId,
        attempt: u32,
        lacking: Lacking,
        landing: Landing,
    ) {
        let Some(tracked) = self.requests.get(&request).filter(|t| t.attempt == attempt) else {
            return self.ask_for_copy(request, lacking, landing);
        };
        if instance == tracked.prefill {
            return self.ask_holder(request, lacking, landing);
        }
        let Some(wire) = self.wire(tracked.prefill, tracked.decode) else { return };
        let hand_off = HandOff { attempt, lacking, to: tracked.decode, landing, wire };
        let (job, pull) = (self.job(request, tracked.prefill), tracked.pull);
        self.send(tracked.prefill, Order::Add { job, hand_off: Some(hand_off), pull });
    }

    /// The dtype of KV from one instance to another; none if one of them is lost.
    pub(super) fn wire(&self, from: InstanceId, to: InstanceId) -> Option<DType> {
        let (from, to) = (self.instances.get(&from)?, self.instances.get(&to)?);
        Some(wire_dtype(from.kv, to.kv, from.codes && to.codes))
    }

    /// Handles a closed link: requests whose KV was to be sent over it are placed again.
    pub(super) fn unlink(&mut self, from: InstanceId, to: InstanceId) {
        self.fleet_step(Event::LinkDown { from, to });
        // A holder needs a link back as well, for credits.
        self.pulls_lost(|holder, prefill| (holder, prefill) == (from, to) || (prefill, holder) == (from, to));
        self.drop_copies(|holder, receiver| {
            (holder, receiver) == (from, to) || (receiver, holder) == (from, to)
        });
        let under_way = |t: &Tracked| t.prefill == from && t.decode == to && t.stage != Stage::Joined;
        let its = self.requests.iter().filter(|(_, t)| under_way(t)).map(|(&request, _)| request);
        for request in its.collect::<Vec<RequestId>>() {
            self.fleet_step(Event::Cancelled { request });
            self.replay(request);
        }
    }

    /// Asks the holder once the prefill instance has room for what it lacks.
    fn ask_holder(&self, request: RequestId, lacking: Lacking, landing: Landing) {
        let Tracked { pull, prefill, attempt, .. } = self.requests[&request];
        let Some(Source { holder, until }) = pull else { return self.end_pull(request) };
        let Some(wire) = self.wire(holder, prefill) else { return self.end_pull(request) };
        let to = HandOff { attempt, lacking, to: prefill, landing, wire };
        self.send(holder, Order::Lend { job: self.job(request, holder), until, to });
    }

    /// Tells the prefill instance not to wait for a prefix.
    fn end_pull(&self, request: RequestId) {
        let Tracked { prefill, attempt, .. } = self.requests[&request];
        self.send(prefill, Order::NotLent { request, attempt });
    }

    /// Ends the pulls that `lost` selects by holder and receiver, which would not end by themselves.
    pub(super) fn pulls_lost(&mut self, lost: impl Fn(InstanceId, InstanceId) -> bool) {
        let is_lost = |t: &Tracked| t.pull.is_some_and(|Source { holder, .. }| lost(holder, t.prefill));
        let its = self.requests.iter().filter(|(_, t)| is_lost(t)).map(|(&request, _)| request);
        for request in its.collect::<Vec<RequestId>>() {
            self.requests.get_mut(&request).expect("just found").pull = None;
            self.end_pull(request);
        }
    }
}
