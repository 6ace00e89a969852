//! The fleet's machine: which instances serve a request, or why none does.
//!
//! Placement is decided once, on arrival. From then on the instances' own machines (see `batch`) run
//! the request, and the fleet follows their events to know what each instance still has to do. It
//! predicts; it never waits: there is no event for "time has passed", because nothing here
//! depends on it but the predictions, and those are made when they are asked for.

mod event;
mod explain;
mod load;
mod place;

pub use crate::batch::RequestId;
pub use event::{Action, Arrival, Event, Instance, InstanceId, Link, PromptChain, RejectReason, Role};
pub use explain::{Candidate, Explanation, Outcome, ScoreUnit, Term, Terms};

use crate::cost::LinkCost;
use crate::kv::{PrefixIndex, Tier};
use load::{Load, Phase, Work, Works};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Parameters of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetConfig {
    /// KV bytes of a token on the wire, all layers.
    pub kv_bytes_per_token: u64,
    /// Layers: KV crosses a link layer by layer.
    pub layers: u32,
    /// Requests in work, beyond which a new one is turned away.
    pub requests_max: usize,
    /// Length of an answer, where no hint says better; `max_tokens` bounds it.
    pub output_tokens_expected: u32,
    /// A request predicted to get its first token later than this is turned away.
    pub ttft_slo: Option<Seconds>,
    /// A request predicted to get its tokens slower than this is turned away.
    pub tbt_slo: Option<Seconds>,
    /// Dollars that a second of waiting is worth; by default a second of the average instance. Means
    /// nothing while an instance has no price.
    pub wait_usd_per_s: Option<f64>,
}

/// The fleet as one state machine. Equal events at equal times give equal actions.
#[derive(Debug)]
pub struct Fleet {
    config: FleetConfig,
    loads: BTreeMap<InstanceId, Load>,
    links: BTreeMap<(InstanceId, InstanceId), LinkCost>,
    works: Works,
    index: PrefixIndex,
}

impl Fleet {
    /// A fleet without instances; they come as events.
    pub fn new(config: FleetConfig) -> Self {
        Fleet {
            config,
            loads: BTreeMap::new(),
            links: BTreeMap::new(),
            works: BTreeMap::new(),
            index: PrefixIndex::default(),
        }
    }

    /// Requests in work.
    pub fn requests(&self) -> usize {
        self.works.len()
    }

    /// Instances that are up.
    pub fn instances(&self) -> impl Iterator<Item = &Instance> {
        self.loads.values().map(|load| &load.spec)
    }

    /// Takes `event`, which happened at `now`, and appends what must be done to `actions`. `now` is on
    /// any clock that does not run backwards.
    pub fn step(&mut self, now: Seconds, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Arrived(arrival) => self.arrived(now, &arrival, actions),
            Event::PrefillProgress { request, instance, tokens } => {
                self.prefill_progress(now, request, instance, tokens);
            }
            Event::PrefillDone { request, instance } => self.prefill_done(now, request, instance),
            Event::TransferDone { request, instance } => {
                if let Some(work) = self.works.get_mut(&request)
                    && work.decode == instance
                    && matches!(work.phase, Phase::Transfer)
                {
                    work.phase = Phase::Decode { generated: 1 };
                }
            }
            Event::DecodeStep { instance, requests } => {
                for request in requests {
                    if let Some(work) = self.works.get_mut(&request)
                        && work.decode == instance
                        && let Phase::Decode { generated } = &mut work.phase
                    {
                        *generated += 1;
                    }
                }
            }
            Event::Finished { request } | Event::Cancelled { request } => {
                self.forget(now, request);
            }
            Event::KvStored { instance, hashes } => {
                if self.loads.contains_key(&instance) {
                    self.index.store(instance, Tier::Device, &hashes);
                }
            }
            Event::KvEvicted { instance, hashes } => self.index.evict(instance, Tier::Device, &hashes),
            Event::KvCleared { instance } => self.index.clear(instance),
            Event::InstanceUp(spec) => match self.loads.get_mut(&spec.id) {
                Some(load) => load.spec = spec,
                None => {
                    self.loads.insert(spec.id, Load::new(spec));
                }
            },
            Event::InstanceDown { instance } => self.instance_down(now, instance, actions),
            Event::LinkUp(link) => {
                self.links.insert((link.from, link.to), link.cost);
            }
        }
    }

    fn arrived(&mut self, now: Seconds, arrival: &Arrival, actions: &mut Vec<Action>) {
        let request = arrival.request;
        let (explanation, verdict) = self.decide(now, arrival);
        let explanation = Box::new(explanation);
        match verdict {
            Ok(chosen) => {
                let Candidate { prefill, decode, terms, .. } = &explanation.candidates[chosen];
                let (prefill, decode) = (*prefill, *decode);
                if let Some(terms) = terms {
                    self.place(now, arrival, prefill, decode, terms);
                }
                actions.push(Action::Place { request, prefill, decode, explanation });
            }
            Err(reason) => {
                let retry_after = self.retry_after(now, &reason);
                actions.push(Action::Reject { request, reason, retry_after, explanation });
            }
        }
    }

    fn place(
        &mut self,
        now: Seconds,
        arrival: &Arrival,
        prefill: InstanceId,
        decode: InstanceId,
        terms: &Terms,
    ) {
        let work = Work {
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            output_tokens: self.output_tokens(arrival),
            prefill,
            decode,
            ready_at: now + Seconds(terms.ttft_s),
            phase: Phase::Prefill { done: terms.cached_tokens, remaining: Seconds(terms.prefill_s) },
        };
        self.works.insert(arrival.request, work);
        if let Some(load) = self.loads.get_mut(&prefill) {
            if load.prefilling.is_empty() {
                load.moved_at = now;
            }
            load.prefilling.push_back(arrival.request);
        }
        if let Some(load) = self.loads.get_mut(&decode) {
            load.decoding.insert(arrival.request);
        }
    }

    fn prefill_progress(&mut self, now: Seconds, request: RequestId, instance: InstanceId, tokens: u32) {
        let (Some(work), Some(load)) = (self.works.get_mut(&request), self.loads.get_mut(&instance)) else {
            return;
        };
        if work.prefill == instance && matches!(work.phase, Phase::Prefill { .. }) {
            let done = tokens.min(work.prompt_tokens);
            let remaining = load.spec.cost.prefill_s(done, work.prompt_tokens - done);
            work.phase = Phase::Prefill { done, remaining };
            load.moved_at = now;
        }
    }

    fn prefill_done(&mut self, now: Seconds, request: RequestId, instance: InstanceId) {
        let Some(work) = self.works.get_mut(&request) else { return };
        if work.prefill == instance && matches!(work.phase, Phase::Prefill { .. }) {
            let together = work.prefill == work.decode;
            work.phase = if together { Phase::Decode { generated: 1 } } else { Phase::Transfer };
            self.leave_prefill(now, request, instance);
        }
    }

    fn leave_prefill(&mut self, now: Seconds, request: RequestId, instance: InstanceId) {
        if let Some(load) = self.loads.get_mut(&instance) {
            if load.prefilling.front() == Some(&request) {
                load.moved_at = now;
            }
            load.prefilling.retain(|&id| id != request);
        }
    }

    fn forget(&mut self, now: Seconds, request: RequestId) -> Option<Work> {
        let work = self.works.remove(&request)?;
        self.leave_prefill(now, request, work.prefill);
        if let Some(load) = self.loads.get_mut(&work.decode) {
            load.decoding.remove(&request);
        }
        Some(work)
    }

    fn instance_down(&mut self, now: Seconds, instance: InstanceId, actions: &mut Vec<Action>) {
        if self.loads.remove(&instance).is_none() {
            return;
        }
        self.index.remove(instance);
        let lost: Vec<RequestId> = self
            .works
            .iter()
            .filter(|(_, work)| {
                let decodes = matches!(work.phase, Phase::Decode { .. });
                work.decode == instance || (work.prefill == instance && !decodes)
            })
            .map(|(&request, _)| request)
            .collect();
        for request in lost {
            let Some(work) = self.forget(now, request) else { continue };
            let other = if work.prefill == instance { work.decode } else { work.prefill };
            let works_on_it = match work.phase {
                Phase::Decode { .. } => false,
                Phase::Prefill { .. } | Phase::Transfer => other != instance,
            };
            actions.push(Action::Replay { request, drop_on: works_on_it.then_some(other) });
        }
    }
}

#[cfg(test)]
mod tests;
