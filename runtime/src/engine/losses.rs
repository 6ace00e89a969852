//! Instances that are lost and return, and their requests: each is placed again from its prompt and the
//! tokens that the client has, waits for a place where one may come, or fails.

use super::coordinator::{Coordinator, InstanceHandle};
use super::messages::KvMessage;
use super::suspects::ALONE_MAX;
use super::transfers::Transferred;
use super::watch::check_instance;
use crate::env::Task;
use crate::front::Decision;
use crate::metrics::{ServingState, StateHolder};
use crate::request::Failure;
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_i64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Arrival, Event, Instance, InstanceId};
use std::time::Duration;

/// Interval between checks of instances with work.
const WATCH_EVERY: Duration = Duration::from_secs(10);

/// Interval between attempts to place a request that lost its place.
const RETRY_WAIT: Duration = Duration::from_millis(50);

impl Coordinator {
    /// Handles an instance whose device failed, or that misbehaves.
    pub(super) fn failed(&mut self, instance: InstanceId, error: &mixfleet_hal::Error) {
        // Its process may continue, and so may others' links to it.
        for &other in self.instances.keys().filter(|&&other| other != instance) {
            self.directory.tell(other, instance, KvMessage::Down);
        }
        self.down(instance, error, true);
    }

    pub(super) fn up(&mut self, instance: Instance, (kv, codes): (DType, bool), silence_max: Seconds) {
        let (device, block_tokens) = (instance.device.to_string(), instance.kv_block_tokens);
        if let Err(reason) = check_instance(&instance, silence_max) {
            tracing::error!(instance = %instance.id, device, reason, "an instance is not used");
            return;
        }
        let (id, heard_at) = (instance.id, self.env.now());
        // If only the connection was lost, the request did not cause the loss.
        for tracked in self.requests.values_mut() {
            tracked.losses.retain(|(lost, certain)| *certain || *lost != id);
        }
        self.quarantine.returned(id);
        tracing::debug!(instance = %instance.id, %device, "instance up");
        let handle = InstanceHandle { device, kv, codes, block_tokens, silence_max, heard_at };
        self.instances.insert(instance.id, handle);
        self.metrics.loaded(&instance);
        let holder = (StateHolder::Instance, &*instance.device);
        self.metrics.enter_state(self.env.now(), holder, ServingState::Healthy, "");
        self.fleet_step(Event::InstanceUp(instance));
        self.count_instances();
    }

    /// Updates the metrics of instances, and whether they can serve.
    pub(super) fn count_instances(&self) {
        self.metrics.instances.set(to_i64(self.instances.len()));
        self.metrics.serves.set(self.front.machine().can_serve().into());
    }

    /// Handles a lost instance; `certain` if not merely the connection to it was lost.
    pub(super) fn down(&mut self, instance: InstanceId, error: &mixfleet_hal::Error, certain: bool) {
        let Some(InstanceHandle { device, .. }) = self.instances.remove(&instance) else { return };
        self.metrics.unload(&device);
        tracing::error!(%device, %error, "instance lost; its requests continue elsewhere");
        let holder = (StateHolder::Instance, &*device);
        self.metrics.enter_state(self.env.now(), holder, ServingState::Down, &error.to_string());
        self.transfer(Transferred::InstanceDown { instance });
        self.links.forget(instance);
        let lost = self.fleet_step(Event::InstanceDown { instance });
        self.count_instances();
        let lost: Vec<RequestId> = lost
            .iter()
            .filter_map(|action| match action {
                Action::Replay { request, .. } => Some(*request),
                _ => None,
            })
            .collect();
        self.believe_rumours(instance);
        self.note_ends(instance, &lost, certain);
        lost.into_iter().for_each(|request| self.replay(request));
    }

    /// Places a request again, from its prompt and the tokens that the client already has.
    pub(super) fn replay(&mut self, request: RequestId) {
        self.end_pauses();
        let now = self.env.now();
        if self.unplaced.get(&request).is_some_and(|until| now.0 < until.0) && self.waits_for_trial(request) {
            return;
        }
        if !self.requests.contains_key(&request) {
            return;
        }
        self.quarantine.left(request);
        self.transfer(Transferred::Lost { request });
        if let Some((failure, certain)) = self.quarantined(request) {
            return if certain { self.fail(request, failure) } else { self.wait_for_place(request, failure) };
        }
        if self.waits_for_trial(request) && self.unplaced.get(&request).is_none_or(|until| now.0 < until.0) {
            self.unplaced.entry(request).or_insert(now + ALONE_MAX);
            self.requests.get_mut(&request).expect("just found").waits_apart = true;
            return;
        }
        let tracked = self.requests.get_mut(&request).expect("just found");
        if std::mem::take(&mut tracked.waits_apart) {
            // its time to find a place begins now
            self.unplaced.remove(&request);
        }
        let (wanted, objective) = (tracked.wanted.clone(), tracked.objective);
        let replay = Some(tracked.urgency.due);
        let tokens = [&wanted.prompt_ids[..], &tracked.generated].concat();
        let arrival = Arrival { objective, replay, ..self.arrival(request, &wanted, &tokens) };
        let Decision { verdict, explanation, .. } = self.decide(arrival, &wanted, &tokens);
        match verdict {
            Ok(placed) => {
                self.unplaced.remove(&request);
                self.start(request, &placed, &explanation);
            }
            Err((reason, _)) => {
                let message = format!("its instance was lost, and it has no other place: {reason}");
                self.wait_for_place(request, Failure::exhausted(message));
            }
        }
    }

    /// Lets a request wait for a place; once it has waited long enough it fails for this reason.
    fn wait_for_place(&mut self, request: RequestId, failure: Failure) {
        let now = self.env.now();
        let until =
            *self.unplaced.entry(request).or_insert(now + self.patience.max(self.links.pause_left(now)));
        if now.0 >= until.0 {
            self.fail(request, failure);
        }
    }

    /// Completes when requests without a place are tried again; never if there are none.
    pub(super) fn retry_due(&self) -> Task {
        let is_idle = self.unplaced.is_empty() && self.held.is_empty();
        if is_idle { Box::pin(std::future::pending()) } else { self.env.sleep(RETRY_WAIT) }
    }

    /// Starts the watch, which runs while there is work.
    pub(super) fn begin_watch(&mut self) {
        if std::mem::replace(&mut self.watching, true) {
            return;
        }
        let (env, tick) = (self.env.clone(), self.tick.clone());
        self.env.spawn(Box::pin(async move {
            env.sleep(WATCH_EVERY).await;
            let _ = tick.send(()).await;
        }));
    }

    /// Checks for conditions that no message reports.
    pub(super) fn check_watch(&mut self) {
        self.watching = false;
        self.give_up_silent();
        if !self.requests.is_empty() {
            self.begin_watch();
        }
    }

    /// Tries again to place requests that lost their place, the oldest first.
    pub(super) fn place_again(&mut self) {
        let waiting: Vec<RequestId> = self.unplaced.keys().copied().collect();
        for request in waiting {
            if self.requests.contains_key(&request) {
                self.replay(request);
            } else {
                self.unplaced.remove(&request);
            }
        }
    }
}
