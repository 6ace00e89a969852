//! The fleet machine: which instances serve a request, or why none does.
//!
//! Placement is decided once, on arrival. From then on the instance machines (see `batch`) run the request,
//! and the fleet machine follows their events to know the remaining work of each instance. It predicts and
//! never waits: there is no event for the passing of time, since only predictions depend on it, and those are
//! made when needed.

mod admit;
mod event;
mod explain;
mod forecast;
mod landing;
mod learn;
mod lengths;
mod load;
mod loads;
mod offers;
mod others;
mod place;
mod replicate;
mod roles;
mod shares;
mod stalls;
mod trials;

pub use crate::ids::{InstanceId, PartyId, RequestId};
pub use admit::Admission;
pub use event::{
    Action, Arrival, Event, HEAD_START_MAX, Instance, Link, Objective, PromptChain, Pull, RejectReason,
    RequestDivision, Role,
};
pub use explain::{Candidate, Explanation, Outcome, ScoreUnit, Term, Terms};
pub use others::OthersWork;
pub use place::Policy;
pub use replicate::Replicate;
pub use roles::Rebalance;

use crate::cost::LinkCost;
use crate::kv::{BlockHash, PrefixIndex, Prefixes, Tier};
use crate::places::PartyCounts;
use admit::Objectives;
use forecast::Seat;
use lengths::Lengths;
use load::{Load, Phase, Work, Works};
use loads::Loads;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, Seconds, UsdPerHour};
use serde::{Deserialize, Serialize};
use stalls::Stalls;
use std::collections::BTreeMap;

/// The default is Mooncake's metric (v3, section 8.1): the longest tenth of a request's gaps.
fn longest_tenth() -> f64 {
    0.1
}

/// Configuration of the fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetConfig {
    /// KV bytes of a token in the wire layout, in all layers.
    pub kv_bytes_per_token: u64,
    /// Number of layers; KV is sent over a link one layer at a time.
    pub layers: u32,
    /// Maximum requests in progress; further ones are rejected.
    pub requests_max: usize,
    /// Assumed mean length of an answer, until answers of its class were observed; a hint replaces it, and
    /// `max_tokens` bounds it.
    pub output_tokens_expected: u32,
    /// Maximum predicted TTFT of a request; others are rejected.
    pub ttft_slo: Option<Seconds>,
    /// Maximum predicted TBT of a request; others are rejected.
    pub tbt_slo: Option<Seconds>,
    /// Share of a request's gaps, the longest ones, whose mean is its TBT: 1 for all gaps.
    #[serde(default = "longest_tenth")]
    pub tbt_share: f64,
    /// Value of a second of waiting in dollars; by default the price of a second of the average instance.
    /// Unused if an instance has no price.
    pub wait_usd_per_s: Option<f64>,
    /// Weight of KV memory in the score where memory is the bottleneck; 0 disables it. Holding a share of an
    /// instance's memory for a second costs this multiple of the same share of a second's rent, or of a
    /// second if prices are missing.
    #[serde(default)]
    pub kv_weight: f64,
    /// The rule that picks placements.
    #[serde(default)]
    pub policy: Policy,
    /// The rule that rejects requests on arrival.
    #[serde(default)]
    pub admission: Admission,
    /// Whether instances can pull prefixes from others.
    #[serde(default)]
    pub pull: bool,
    /// Whether the decode instance draws the first token, once the KV has landed; by default the prefill
    /// instance draws it.
    #[serde(default)]
    pub first_token_at_decode: bool,
    /// Whether a decode instance that has become too busy for the objective drops a request whose prompt is
    /// computed.
    #[serde(default)]
    pub drop_at_decode: bool,
    /// When instances change between prefill and decode; by default never.
    #[serde(default)]
    pub rebalance: Option<Rebalance>,
    /// When hot prefixes are copied to further instances; by default never.
    #[serde(default)]
    pub replicate: Option<Replicate>,
    /// Time that trials may cost, as a share of all requests' predicted time; 0 for no trials. A trial sends
    /// a request to an instance that gets no work because it is predicted to be slow.
    #[serde(default)]
    pub trial_share: f64,
    /// Seed of policies and trials.
    #[serde(default)]
    pub seed: u64,
}

impl FleetConfig {
    /// Creates the configuration for a model with `kv_bytes_per_token` of KV per token in `layers` layers,
    /// without objectives and pulls.
    pub fn new(kv_bytes_per_token: u64, layers: u32) -> Self {
        FleetConfig {
            kv_bytes_per_token,
            layers,
            requests_max: usize::MAX,
            // Answers of public chat traces are 200 to 350 tokens long; max_tokens bounds the assumption.
            output_tokens_expected: 256,
            ttft_slo: None,
            tbt_slo: None,
            tbt_share: longest_tenth(),
            wait_usd_per_s: None,
            kv_weight: 0.0,
            policy: Policy::default(),
            admission: Admission::default(),
            pull: false,
            first_token_at_decode: false,
            drop_at_decode: false,
            rebalance: None,
            replicate: None,
            trial_share: 0.0,
            seed: 0,
        }
    }
}

/// The weight of the latest prediction in the moving mean of predicted TBT (`Fleet::pace`).
const PACE_FOLLOWS: f64 = 0.1;

/// The fleet machine. Equal events at equal times give equal actions.
#[derive(Debug)]
pub struct Fleet {
    config: FleetConfig,
    loads: Loads,
    /// Ids of the instances by position, in order.
    ids: Vec<InstanceId>,
    /// Links of pairs of instances.
    links: BTreeMap<(InstanceId, InstanceId), LinkCost>,
    /// Links of pairs of pools.
    pool_links: BTreeMap<(u32, u32), LinkCost>,
    works: Works,
    /// Number of `works` that belong to other routers.
    others_prompts: usize,
    /// The parties with requests at this router.
    parties: PartyCounts,
    lengths: Lengths,
    window: roles::Window,
    /// Moving mean of the TBT predicted for the latest requests.
    pace: Seconds,
    index: PrefixIndex,
    /// The latest result of the index; kept to reuse its allocation.
    prefixes: Prefixes,
    /// The reusable tokens of the latest arrival; kept to reuse the allocation.
    cached: Vec<u32>,
    /// State of replication; none if prefixes are not copied.
    replicas: Option<replicate::Replicas>,
    /// Copies to KV nodes that have not arrived.
    offers: offers::Offers,
    random: Stream,
    trials: trials::TrialBudget,
    /// Time at which corrections are checked next.
    fade_at: Seconds,
    /// Number of requests that the round-robin policy has placed.
    turns: u64,
    /// Mean price of all instances, if each has one.
    mean_price: Option<UsdPerHour>,
}

impl Fleet {
    /// Creates a fleet without instances, which are added by events.
    pub fn new(config: FleetConfig) -> Self {
        Fleet {
            random: Stream::new(config.seed),
            lengths: Lengths::new(config.output_tokens_expected),
            pace: Seconds::ZERO,
            trials: trials::TrialBudget::new(config.seed),
            replicas: config.replicate.map(replicate::Replicas::new),
            offers: offers::Offers::default(),
            config,
            loads: Loads::default(),
            ids: Vec::new(),
            links: BTreeMap::new(),
            pool_links: BTreeMap::new(),
            works: Works::default(),
            others_prompts: 0,
            parties: PartyCounts::default(),
            window: roles::Window::default(),
            index: PrefixIndex::default(),
            prefixes: Prefixes::default(),
            cached: Vec::new(),
            turns: 0,
            fade_at: Seconds::ZERO,
            mean_price: None,
        }
    }

    /// Number of requests in progress, without those of other routers.
    pub fn requests(&self) -> usize {
        self.works.len() - self.others_prompts
    }

    /// Returns the number of generated tokens of a request's answer; 0 if the request is unknown.
    pub fn generated(&self, request: RequestId) -> u32 {
        let decodes_on = self.works.get(request).and_then(|work| self.position(work.decode));
        decodes_on.map_or(0, |at| self.loads[at].generated(request))
    }

    /// Returns the predicted time from `now` of the prompts queued on `instance`; 0 if it is not up.
    pub fn queued_prefill(&self, instance: InstanceId, now: Seconds) -> Seconds {
        self.position(instance).map_or(Seconds::ZERO, |at| {
            self.loads[at].backlog(now, Seconds(f64::INFINITY), &self.works).0.time
        })
    }

    /// Instances that are up.
    pub fn instances(&self) -> impl Iterator<Item = &Instance> {
        self.loads.iter().map(|load| &load.spec)
    }

    /// Whether some instance, or some pair with a link, can serve.
    pub fn can_serve(&self) -> bool {
        let pair = |(p, prefill): (usize, &Load)| {
            prefill.spec.role.decodes()
                || self.able(Role::decodes).any(|(d, decode)| d != p && self.link(prefill, decode).is_some())
        };
        self.able(Role::prefills).any(pair)
    }

    /// Handles `event`, which happened at `now`, and appends the actions to `actions`. `now` is from any
    /// monotonic clock.
    pub fn step(&mut self, now: Seconds, event: Event, actions: &mut Vec<Action>) {
        if let Some(replicas) = &mut self.replicas {
            replicas.heard(&event);
        }
        match event {
            Event::Arrived(arrival) => self.arrived(now, &arrival, actions),
            Event::PrefillProgress { request, instance, tokens } => {
                self.prefill_progress(now, request, instance, tokens);
            }
            Event::PrefillDone { request, instance } => self.prefill_done(now, request, instance, actions),
            Event::TransferDone { request, instance } => self.transfer_done(now, request, instance),
            Event::DecodeStep { instance, requests, tokens } => {
                if let Some(at) = self.position(instance) {
                    self.loads.grow(at, &requests, tokens);
                }
            }
            Event::Others { instance, works } => self.others(now, instance, &works),
            Event::Measured { instance, steps } => self.measured(now, instance, &steps),
            Event::Finished { request } => {
                if let Some((_, Some(seat))) = self.forget(now, request) {
                    // An answer that ended before its hand-off has the prefill instance's first token.
                    self.lengths.observe(seat.class, seat.generated.max(1));
                }
            }
            Event::Offered { instance, chains, .. } => self.offered(now, instance, &chains, actions),
            Event::Cancelled { request } => {
                self.forget(now, request);
            }
            Event::KvStored { instance, hashes, tier } => {
                if self.position(instance).is_some() {
                    self.index.store(instance, tier, &hashes);
                }
            }
            Event::KvEvicted { instance, hashes, tier } => self.index.evict(instance, tier, &hashes),
            Event::TierUp { instance, tier, cost } => {
                self.change(instance, |load| load.tiers[tier as usize] = cost);
            }
            Event::KvCleared { instance } => self.index.clear(instance),
            Event::InstanceUp(spec) => self.instance_up(spec),
            Event::InstanceDown { instance } => self.instance_down(now, instance, actions),
            Event::LinkUp(link) => {
                self.links.insert((link.from, link.to), link.cost);
            }
            Event::LinkDown { from, to } => {
                self.links.remove(&(from, to));
            }
            Event::PoolsJoined { from, to, cost } => {
                self.pool_links.insert((from, to), cost);
            }
        }
    }

    /// Returns the blocks that each instance reported to hold, in order. Visits every block, so only checks
    /// should call it.
    pub fn held(&self) -> BTreeMap<InstanceId, Vec<(Tier, BlockHash)>> {
        self.loads.iter().map(|load| (load.spec.id, self.index.held_by(load.spec.id))).collect()
    }

    /// Changes an instance's load; none if it is not up.
    fn change<T>(&mut self, id: InstanceId, change: impl FnOnce(&mut Load) -> T) -> Option<T> {
        let at = self.position(id)?;
        Some(self.loads.change(at, change))
    }

    fn arrived(&mut self, now: Seconds, arrival: &Arrival, actions: &mut Vec<Action>) {
        let request = arrival.request;
        self.rebalance(now, actions);
        self.fade_corrections(now);
        let (explanation, verdict) = self.decide(now, arrival);
        let explanation = Box::new(explanation);
        match verdict {
            Ok(chosen) => {
                let Candidate { prefill, decode, pull, terms, .. } = &explanation.candidates[chosen];
                let (prefill, decode, pull) = (*prefill, *decode, *pull);
                let objectives = self.objectives(now, arrival);
                let urgency = objectives.urgency();
                if let Some(terms) = terms {
                    self.place(now, arrival, objectives, (prefill, decode, pull), terms);
                }
                self.start_copy(now, actions);
                actions.push(Action::Place { request, prefill, decode, pull, urgency, explanation });
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
        objectives: Objectives,
        (prefill, decode, pull): (InstanceId, InstanceId, Option<Pull>),
        terms: &Terms,
    ) {
        let (Some(p), Some(d)) = (self.position(prefill), self.position(decode)) else { return };
        let done = terms.cached_tokens + terms.pulled_tokens;
        // A pull that outlasts the queue also delays the prompts behind it.
        let remaining = Seconds(terms.pull_s + terms.prefill_s);
        let is_one_step = arrival.prompt_tokens - done <= self.loads[p].spec.step_tokens_max;
        let waits_s = terms.queue_s + terms.pull_s + terms.kv_wait_s + terms.interleave_s;
        let is_alone = is_one_step && waits_s == 0.0 && !self.loads[p].is_busy() && arrival.replay.is_none();
        let alone_since = is_alone.then_some((now, done));
        let work = Work {
            due: objectives.due,
            party: objectives.party,
            tbt_slo: objectives.tbt_slo,
            prompt_tokens: arrival.prompt_tokens,
            prefill,
            decode,
            transfer_tokens: terms.transfer_tokens,
            prefill_time: Seconds(terms.prefill_s),
            alone_since,
            is_others: false,
            phase: Phase::Prefill { done, remaining },
        };
        let bytes = self.hand_off_bytes(&self.loads[d], arrival.prompt_tokens, terms.transfer_tokens);
        let seat = Seat {
            request: arrival.request,
            ready_at: now + Seconds(terms.ttft_s + terms.transfer_s),
            prompt_tokens: arrival.prompt_tokens,
            max_tokens: arrival.max_tokens,
            output_tokens: self.output_tokens(arrival),
            hinted: arrival.output_tokens_hint.is_some(),
            class: arrival.class,
            tbt_slo: objectives.tbt_slo,
            generated: 0,
            stalls: Stalls::default(),
            lands: self.lands((p, d), bytes, Seconds(terms.prefill_s)),
        };
        self.pace += (Seconds(terms.tbt_s) - self.pace) * PACE_FOLLOWS;
        self.loads.change(p, |load| load.queue(arrival.request, &work, &self.works, now));
        self.loads.change(d, |load| load.commit(seat));
        self.works.insert(arrival.request, work);
        self.parties.enter(arrival.party);
        if let Some(pull) = pull
            && let Some(source) = self.position(pull.from)
        {
            self.occupy(now, source, p, self.kv_bytes(pull.tokens));
        }
    }

    /// Reserves the links out of one instance and into another for this many bytes of KV.
    fn occupy(&mut self, now: Seconds, from: usize, to: usize, bytes: Bytes) {
        let Some(link) = self.link(&self.loads[from], &self.loads[to]) else { return };
        let time = link.time(bytes);
        let taken = |until: Seconds| until.max(now) + time;
        self.loads.change(from, |load| load.egress_until = taken(load.egress_until));
        self.loads.change(to, |load| load.ingress_until = taken(load.ingress_until));
    }

    fn prefill_progress(&mut self, now: Seconds, request: RequestId, instance: InstanceId, tokens: u32) {
        let Some(at) = self.position(instance) else { return };
        let Some(work) = self.works.get_mut(request) else { return };
        let before = work.phase;
        if work.prefill == instance && matches!(before, Phase::Prefill { .. }) {
            let done = tokens.min(work.prompt_tokens);
            let remaining = self.loads[at].prefill_s(done, work.prompt_tokens - done);
            work.phase = Phase::Prefill { done, remaining };
            self.loads.change(at, |load| load.progress(request, work.prompt_tokens, before, work.phase, now));
        }
    }

    fn prefill_done(
        &mut self,
        now: Seconds,
        request: RequestId,
        instance: InstanceId,
        actions: &mut Vec<Action>,
    ) {
        let Some(work) = self.works.get(request) else { return };
        if work.prefill != instance || !matches!(work.phase, Phase::Prefill { .. }) {
            return;
        }
        let work = work.clone();
        if let Some(at) = self.position(instance) {
            self.loads.change(at, |load| load.leave_queue(request, &work, &self.works, now));
            self.first_token(now, at, &work);
        }
        if let Some(reason) = self.too_busy(&work) {
            self.forget(now, request);
            actions.push(Action::Drop { request, reason });
            return;
        }
        let together = work.prefill == work.decode;
        let ends = self.position(instance).zip(self.position(work.decode));
        let way = ends.filter(|_| !together);
        let bytes = |to: usize, lacking| self.hand_off_bytes(&self.loads[to], work.prompt_tokens, lacking);
        let leaves =
            way.and_then(|way| self.leaves(now, way, bytes(way.1, work.transfer_tokens), work.prefill_time));
        let occupies = way.map_or(Bytes(0.0), |(_, to)| bytes(to, work.prompt_tokens));
        let phase = if together { Phase::Decode } else { Phase::Transfer(leaves) };
        if let Some(work) = self.works.get_mut(request) {
            work.phase = phase;
        }
        if !together {
            // Its layers are already being sent.
            if let Some((from, to)) = way {
                self.occupy(now, from, to, occupies);
            }
        } else {
            self.change(work.decode, |load| load.join(request));
        }
    }

    /// The decode instance's own check, once the prompt is computed (Mooncake v3, section 3, step 4).
    fn too_busy(&self, work: &Work) -> Option<RejectReason> {
        let slo = work.tbt_slo.filter(|_| self.config.drop_at_decode)?;
        let load = &self.loads[self.position(work.decode)?];
        let tbt = load.step(load.batch().with(u64::from(work.prompt_tokens) + 1));
        (tbt > slo).then_some(RejectReason::TbtSlo { tbt_s: tbt.0, slo_s: slo.0 })
    }

    fn transfer_done(&mut self, now: Seconds, request: RequestId, instance: InstanceId) {
        let Some(work) = self.works.get_mut(request) else { return };
        let Phase::Transfer(on_its_way) = work.phase else { return };
        if work.decode == instance {
            work.phase = Phase::Decode;
            let from = work.prefill;
            if let Some(kv) = on_its_way {
                self.arrived_at(now, from, instance, kv);
            }
            self.change(instance, |load| load.join(request));
        }
    }

    fn forget(&mut self, now: Seconds, request: RequestId) -> Option<(Work, Option<Seat>)> {
        let work = self.works.remove(request)?;
        self.parties.leave(work.party);
        if let Some(at) = self.position(work.prefill) {
            self.loads.change(at, |load| load.leave_queue(request, &work, &self.works, now));
        }
        let seat = self.change(work.decode, |load| load.release(request)).flatten();
        Some((work, seat))
    }

    fn instance_up(&mut self, spec: Instance) {
        self.loads.up(spec, &self.works);
        self.fleet_changed();
    }

    /// Updates what depends on the set of instances.
    fn fleet_changed(&mut self) {
        self.mean_price = self.average_price();
        self.ids = self.loads.iter().map(|load| load.spec.id).collect();
    }

    fn instance_down(&mut self, now: Seconds, instance: InstanceId, actions: &mut Vec<Action>) {
        let Some(at) = self.position(instance) else { return };
        self.loads.remove(at);
        self.fleet_changed();
        self.index.remove(instance);
        self.links.retain(|&(from, _), _| from != instance);
        self.others_down(instance);
        let lost = self.works.ids_where(|work| {
            let decodes = matches!(work.phase, Phase::Decode);
            !work.is_others && (work.decode == instance || (work.prefill == instance && !decodes))
        });
        for request in lost {
            let Some((work, _)) = self.forget(now, request) else { continue };
            let other = if work.prefill == instance { work.decode } else { work.prefill };
            let works_on_it = match work.phase {
                Phase::Decode => false,
                Phase::Prefill { .. } | Phase::Transfer(_) => other != instance,
            };
            actions.push(Action::Replay { request, drop_on: works_on_it.then_some(other) });
        }
    }
}

#[cfg(test)]
mod division_tests;
#[cfg(test)]
mod life_tests;
#[cfg(test)]
mod pair_tests;
#[cfg(test)]
mod room_tests;
#[cfg(test)]
mod tests;
