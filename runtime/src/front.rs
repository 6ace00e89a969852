//! The front of a fleet, which the coordinator and the gateway share: it turns a request's hints into an
//! arrival, and has the fleet machine place or reject it.
//!
//! Absent by design: how requests reach instances, and how answers return.

use crate::env::SharedEnv;
use crate::events::LoggedFleet;
use crate::request::{Deadline, Hints, ServiceTier};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{RequestId, Urgency};
use mixfleet_scheduler::fleet::{
    Action, Arrival, Event, Explanation, Fleet, InstanceId, Objective, PartyId, Pull, RejectReason,
};

/// The fleet machine with its log, and the state that new arrivals need.
pub(crate) struct Front {
    env: SharedEnv,
    fleet: LoggedFleet,
    /// Deadline of flex requests, from their arrival.
    flex_deadline: Seconds,
    /// The next request's id.
    next: RequestId,
}

/// Why a request is rejected, and the time after which a retry may succeed, if known.
pub(crate) type Rejected = (RejectReason, Option<Seconds>);

/// Where a request runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) prefill: InstanceId,
    pub(crate) decode: InstanceId,
    /// A prefix that the prefill instance pulls before it computes the prompt.
    pub(crate) pull: Option<Pull>,
    pub(crate) urgency: Urgency,
}

/// The answer to an arrival.
pub(crate) struct Decision {
    pub(crate) verdict: Result<Placed, Rejected>,
    pub(crate) explanation: Box<Explanation>,
    /// Further actions of the fleet machine, to be carried out before the verdict.
    pub(crate) before: Vec<Action>,
}

impl Front {
    /// Creates a front whose request ids count from `first_request`.
    pub(crate) fn new(
        env: SharedEnv,
        fleet: LoggedFleet,
        flex_deadline: Seconds,
        first_request: RequestId,
    ) -> Self {
        Front { env, fleet, flex_deadline, next: first_request }
    }

    /// Returns the fleet machine, for queries.
    pub(crate) fn machine(&self) -> &Fleet {
        self.fleet.machine()
    }

    /// Passes `event`, which happens now, to the fleet machine, and returns the actions.
    pub(crate) fn step(&mut self, event: Event) -> Vec<Action> {
        self.fleet.step(self.env.now(), event)
    }

    /// Returns the id of a new request.
    pub(crate) fn next_request(&mut self) -> RequestId {
        self.next += 1;
        self.next - 1
    }

    /// Returns the objective of a request that arrives now.
    pub(crate) fn objective(&self, hints: &Hints) -> Objective {
        let flex = || Deadline { at: self.env.now() + self.flex_deadline, requests_left: 1 };
        match hints.deadline.or_else(|| (hints.tier == ServiceTier::Flex).then(flex)) {
            Some(Deadline { at, requests_left }) => Objective::Deadline { at, requests_left },
            None => Objective::Fleet,
        }
    }

    /// Returns the arrival of a request that arrives now; the caller adds lengths and chains.
    pub(crate) fn arrival(&self, request: RequestId, hints: &Hints, party: PartyId) -> Arrival {
        Arrival {
            request,
            output_tokens_hint: hints.output_tokens,
            class: hints.tier as u32,
            objective: self.objective(hints),
            head_start: hints.whole_head_start(),
            party,
            ..Arrival::default()
        }
    }

    /// Has a request placed or rejected, now.
    pub(crate) fn decide(&mut self, arrival: Arrival) -> Decision {
        let mut before = self.step(Event::Arrived(arrival));
        match before.pop() {
            Some(Action::Place { prefill, decode, pull, urgency, explanation, .. }) => {
                Decision { verdict: Ok(Placed { prefill, decode, pull, urgency }), explanation, before }
            }
            Some(Action::Reject { reason, retry_after, explanation, .. }) => {
                Decision { verdict: Err((reason, retry_after)), explanation, before }
            }
            other => unreachable!("an arrival is placed or rejected, not {other:?}"),
        }
    }
}
