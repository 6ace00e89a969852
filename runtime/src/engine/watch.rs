//! Time-driven checks of the coordinator: links for KV that are paused, and instances that are silent.
//!
//! A receiver that has no memory for staging slots refuses one reservation. The link to it is paused for a
//! moment, so that requests go elsewhere while others wait for memory to be freed, and is then tried again.

use super::coordinator::Coordinator;
use crate::metrics::{NOT_AS_DECLARED, ServingState, StateHolder};
use crate::request::Failure;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::cost::{LinkCost, MeasuredSteps, Prefill};
use mixfleet_scheduler::fleet::{Event, Instance, InstanceId, Link, OthersWork};
use std::collections::BTreeMap;

/// Time for which a link is paused after a receiver refused KV.
const LINK_PAUSE: Seconds = Seconds(1.0);

/// Refusals after which a request fails.
const REFUSALS_MAX: u32 = 3;

/// Maximum silence that an instance may claim for its steps, and maximum tokens per KV block.
const SILENCE_MAX: Seconds = Seconds(3600.0);
const BLOCK_TOKENS_MAX: u32 = 1 << 16;

/// Maximum prompt and batch that a reported step may have.
const TOKENS_MAX: u32 = 1 << 26;
const SEQUENCES_MAX: usize = 1 << 16;

/// Sender and receiver.
type Pair = (InstanceId, InstanceId);

/// The links for KV between instances.
#[derive(Default)]
pub(super) struct KvLinks {
    costs: BTreeMap<Pair, LinkCost>,
    /// Links that are paused, each with the end of its pause.
    paused: BTreeMap<Pair, Seconds>,
}

impl KvLinks {
    /// Removes all links from and to an instance that is gone.
    pub(super) fn forget(&mut self, instance: InstanceId) {
        let other = |(from, to): &Pair| *from != instance && *to != instance;
        self.costs.retain(|pair, _| other(pair));
        self.paused.retain(|pair, _| other(pair));
    }

    /// Time that a request without a place should wait for a paused link.
    pub(super) fn pause_left(&self, now: Seconds) -> Seconds {
        let last = self.paused.values().map(|until| (*until - now).0).fold(0.0, f64::max);
        if self.paused.is_empty() { Seconds::ZERO } else { Seconds(last) + LINK_PAUSE }
    }
}

impl Coordinator {
    pub(super) fn link_up(&mut self, from: InstanceId, to: InstanceId, cost: LinkCost) {
        self.links.costs.insert((from, to), cost);
        if !self.links.paused.contains_key(&(from, to)) {
            self.fleet_step(Event::LinkUp(Link { from, to, cost }));
        }
        self.count_instances();
    }

    /// Handles a receiver that has no memory for KV of a request: the link is paused for a moment, and
    /// requests whose KV was to be sent over it are placed again.
    pub(super) fn refused(&mut self, request: RequestId, (from, to): Pair, reason: String) {
        tracing::warn!(request, %from, %to, reason, "KV path suspended");
        let Some(tracked) = self.requests.get_mut(&request) else { return };
        tracked.refusals += 1;
        if tracked.refusals >= REFUSALS_MAX {
            self.fail(request, Failure::exhausted(format!("its KV has nowhere to go: {reason}")));
        }
        self.links.paused.insert((from, to), self.env.now() + LINK_PAUSE);
        self.unlink(from, to);
    }

    /// Handles a closed link: requests whose KV was to be sent over it are placed again.
    pub(super) fn link_down(&mut self, from: InstanceId, to: InstanceId) {
        self.links.costs.remove(&(from, to));
        self.links.paused.remove(&(from, to));
        self.unlink(from, to);
        self.count_instances();
    }

    /// Uses links again whose pause is over.
    pub(super) fn end_pauses(&mut self) {
        let now = self.env.now();
        let expired = self.links.paused.iter().filter(|(_, until)| until.0 <= now.0).map(|(&pair, _)| pair);
        for (from, to) in expired.collect::<Vec<Pair>>() {
            self.links.paused.remove(&(from, to));
            if let Some(&cost) = self.links.costs.get(&(from, to)) {
                self.fleet_step(Event::LinkUp(Link { from, to, cost }));
            }
        }
    }

    /// Fails the instances that have had work for too long without a report.
    pub(super) fn give_up_silent(&mut self) {
        let now = self.env.now();
        for (instance, since) in self.busy() {
            let Some(handle) = self.instances.get(&instance) else { continue };
            if handle.silent_after(since).0 > now.0 {
                continue;
            }
            let detail = format!("it has work and has reported nothing for {:.0} s", (now - since).0);
            self.metrics.instances_silent.inc();
            self.failed(instance, &Error::new(ErrorKind::Timeout, detail));
        }
    }

    /// Instances with work, and the latest time since which each has had it.
    fn busy(&self) -> BTreeMap<InstanceId, Seconds> {
        let mut busy = BTreeMap::new();
        for (&request, tracked) in &self.requests {
            let Some(place) = self.transfers.place(request) else { continue };
            for instance in [place.prefill, place.decode] {
                if self.instances.contains_key(&instance) {
                    let since = busy.entry(instance).or_insert(tracked.asked_at);
                    *since = since.min(tracked.asked_at);
                }
            }
        }
        busy
    }

    /// Handles a step's measured time: the predictions of later steps learn from it.
    pub(super) fn ran(&mut self, instance: InstanceId, steps: MeasuredSteps) {
        let Some(handle) = self.instances.get(&instance) else { return };
        if let Err(reason) = check_steps(&steps) {
            tracing::warn!(%instance, reason, "implausible step time ignored");
            return;
        }
        let device = handle.device.clone();
        self.fleet_step(Event::Measured { instance, steps });
        if self.metrics.learned(&device, self.front.machine(), instance) {
            let is_degraded = self.metrics.is_degraded(&device);
            let (state, reason) = match is_degraded {
                true => (ServingState::Degraded, NOT_AS_DECLARED),
                false => (ServingState::Healthy, ""),
            };
            self.metrics.enter_state(self.env.now(), (StateHolder::Instance, &device), state, reason);
        }
    }

    /// Handles a change of an instance's work for other routers.
    pub(super) fn others(&mut self, instance: InstanceId, mut works: Vec<OthersWork>) {
        works.retain(is_sensible);
        if self.instances.contains_key(&instance) && !works.is_empty() {
            self.fleet_step(Event::Others { instance, works });
        }
    }
}

/// Whether the lengths and times of such work are plausible.
fn is_sensible(work: &OthersWork) -> bool {
    match *work {
        OthersWork::Prompt { prompt_tokens, due_in, .. } => {
            prompt_tokens <= TOKENS_MAX && due_in.0.is_finite()
        }
        OthersWork::Answer { prompt_tokens, max_tokens, ready_in, generated, .. } => {
            prompt_tokens.max(max_tokens).max(generated) <= TOKENS_MAX && ready_in.0.is_finite()
        }
        OthersWork::AnswerGone { length, .. } => length.is_none_or(|length| length <= TOKENS_MAX),
        OthersWork::PromptGone { .. } => true,
    }
}

/// Checks that a reported step is plausible.
fn check_steps(steps: &MeasuredSteps) -> Result<(), &'static str> {
    let MeasuredSteps { parts, sequences, kv_tokens, time, .. } = steps;
    let is_long = |part: &Prefill| part.context.checked_add(part.tokens).is_none_or(|end| end > TOKENS_MAX);
    if parts.len() > SEQUENCES_MAX || *sequences as usize > SEQUENCES_MAX {
        return Err("it has more sequences than any device runs");
    }
    if parts.iter().any(|part| part.tokens == 0 || is_long(part)) {
        return Err("a piece of a prompt in it has no sensible length");
    }
    if *kv_tokens > u64::from(TOKENS_MAX) * SEQUENCES_MAX as u64 {
        return Err("it attends to more tokens than there are");
    }
    if !(time.0.is_finite() && time.0 <= SILENCE_MAX.0) {
        return Err("its time is none");
    }
    Ok(())
}

/// Checks that an instance's description is plausible.
pub(super) fn check_instance(instance: &Instance, silence_max: Seconds) -> Result<(), &'static str> {
    let Instance { kv_block_tokens, kv_capacity_tokens, price, cost, .. } = instance;
    if *kv_block_tokens == 0 || *kv_block_tokens > BLOCK_TOKENS_MAX || *kv_capacity_tokens == 0 {
        return Err("its KV blocks hold no sensible number of tokens");
    }
    if price.is_some_and(|price| !price.0.is_finite() || price.0 < 0.0) {
        return Err("its price is not a number");
    }
    let is_time = |time: Seconds| time.0.is_finite() && time.0 >= 0.0;
    let tokens = u32::try_from(*kv_capacity_tokens).unwrap_or(u32::MAX).min(512);
    if !is_time(cost.prefill_s(0, tokens)) || !is_time(cost.decode_step_s(1, tokens.into())) {
        return Err("its steps take no sensible time");
    }
    if !is_time(silence_max) || silence_max.0 > SILENCE_MAX.0 {
        return Err("its silence limit is too long");
    }
    Ok(())
}
