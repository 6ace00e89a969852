//! Copying hot prefixes to further instances before requests wait for them, within a budget of bytes per
//! second.
//!
//! ```text
//! prefix  = the longest prefix of an arrival that any instance holds: beyond it all earlier requests differ
//! gain    = miss_s * (1 - exp(-misses)) + waited_s / (holders + 1)
//! cost    = time until the copy is there: the two ends' earlier transfers, and its own
//! copy if   two requests or more used the prefix, gain > cost, and the budget has the bytes
//! ```
//!
//! A shared prefix ends where requests begin to differ. The turns of one conversation differ at a later block
//! each time, so that none of its prefixes is used twice; requests with a common system prompt, or document,
//! differ at the same block.
//!
//! `misses` counts the requests, decayed, that were placed on an instance without the prefix, and `miss_s` is
//! the loss of each: predicted prefill and exposed pull, less its prefill with the prefix there. The demand
//! of the next `memory` seconds is expected to equal that of the last. A miss leaves a copy by itself, so
//! that an earlier copy saves one of them. `waited_s` counts the seconds, decayed, that requests queued for a
//! holder while another instance could have started earlier with the prefix: one more holder takes its share
//! of them. The cost of evictions from a full cache is not counted.
//!
//! Everything is decided when a request arrives, for the prefix that it uses; there is no clock. One copy of
//! a prefix is in progress at a time, and each further copy needs later losses of its own.

mod demand;

use super::explain::{Candidate, ScoreUnit};
use super::place::Question;
use super::{Action, Event, Fleet, InstanceId, Policy};
use crate::kv::{BlockHash, Tier};
use demand::{Demand, Loss};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// When hot prefixes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replicate {
    /// Maximum bytes per second of copies, plus the unused budget of [`Replicate::BURST`].
    pub bytes_per_s: f64,
    /// Time in which demand fades to 1/e, and for which it is expected to last.
    pub memory: Seconds,
}

impl Replicate {
    /// Time for which the unused budget accumulates. A prefix that needs more bytes than that is never
    /// copied.
    pub const BURST: Seconds = Seconds(30.0);

    /// Limits copies to `bytes_per_s`, by the demand of the last five minutes.
    pub fn new(bytes_per_s: f64) -> Self {
        Replicate { bytes_per_s, memory: Seconds(300.0) }
    }
}

/// Minimum number of requests that share a hot prefix.
const USES_MIN: u32 = 2;
/// Number of instances considered as a better place or as the receiver of a copy; in larger fleets they take
/// turns.
const LOOKED_AT: usize = 16;
/// A copy is given up after this many times the predicted time, plus a second.
const LATE: f64 = 2.0;

/// A requested copy that has not arrived.
#[derive(Clone, Debug)]
struct Copy {
    /// The last block of the prefix.
    key: BlockHash,
    from: InstanceId,
    to: InstanceId,
    until: Seconds,
}

/// The state of replication.
#[derive(Clone, Debug)]
pub(super) struct Replicas {
    rule: Replicate,
    demand: Demand,
    /// Requested copies in order.
    under_way: Vec<Copy>,
    /// The remaining budget, as of the time beside it.
    bytes: f64,
    filled: Seconds,
    /// The first instance to be considered next.
    cursor: usize,
    /// A copy decided with the placement, to be output before it.
    wanted: Option<Action>,
}

/// A prefix of an arrival that an instance holds.
#[derive(Clone, Copy)]
struct Shared {
    /// Its last block.
    key: BlockHash,
    tokens: u32,
    /// The first instance that holds it: only instances with the same kind of blocks can take part.
    holder: usize,
    /// Tokens per block.
    block: u32,
    holders: usize,
}

impl Replicas {
    pub(super) fn new(rule: Replicate) -> Self {
        Replicas {
            rule,
            demand: Demand::new(rule.memory),
            under_way: Vec::new(),
            bytes: rule.bytes_per_s * Replicate::BURST.0,
            filled: Seconds::ZERO,
            cursor: 0,
            wanted: None,
        }
    }

    /// The budget at this time.
    fn budget(&mut self, now: Seconds) -> f64 {
        let gathered = self.rule.bytes_per_s * (now - self.filled).0.max(0.0);
        self.bytes = (self.bytes + gathered).min(self.rule.bytes_per_s * Replicate::BURST.0);
        self.filled = now;
        self.bytes
    }

    /// Positions to consider in a fleet of `instances`.
    fn look(&mut self, instances: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let first = if instances > LOOKED_AT { self.cursor % instances } else { 0 };
        self.cursor = first + LOOKED_AT;
        (first..first + instances.min(LOOKED_AT)).map(move |at| at % instances)
    }

    /// Handles an event about what an instance holds, or that it is gone.
    pub(super) fn heard(&mut self, event: &Event) {
        match event {
            Event::KvStored { instance, hashes, tier: Tier::Device } => {
                self.under_way.retain(|copy| copy.to != *instance || !hashes.contains(&copy.key));
            }
            Event::InstanceDown { instance } | Event::KvCleared { instance } => {
                self.under_way.retain(|copy| copy.to != *instance && copy.from != *instance);
            }
            _ => {}
        }
    }
}

impl Fleet {
    /// Counts the demand for the prefix that `question` shares with others, and decides on a copy of it.
    /// `chosen` is the request's placement.
    pub(super) fn weigh_copy(&mut self, question: &Question<'_>, chosen: &Candidate) {
        if question.arrival.replay.is_some() {
            return;
        }
        let Some(mut replicas) = self.replicas.take() else { return };
        replicas.wanted = self.copy(&mut replicas, question, chosen);
        self.replicas = Some(replicas);
    }

    /// Outputs the copy that was decided with the last placement, and reserves its links.
    pub(super) fn start_copy(&mut self, now: Seconds, actions: &mut Vec<Action>) {
        let Some(action) = self.replicas.as_mut().and_then(|replicas| replicas.wanted.take()) else { return };
        if let Action::Replicate { from, to, tokens, .. } = action
            && let (Some(from), Some(to)) = (self.position(from), self.position(to))
        {
            self.occupy(now, from, to, self.kv_bytes(tokens));
            actions.push(action);
        }
    }

    fn copy(&self, replicas: &mut Replicas, question: &Question<'_>, chosen: &Candidate) -> Option<Action> {
        let now = question.now;
        replicas.under_way.retain(|copy| copy.until >= now);
        let shared = self.shared(question)?;
        let looked_at = replicas.look(self.loads.len());
        let under_way = replicas.under_way.iter().any(|copy| copy.key == shared.key);
        let loss = if under_way { None } else { self.loss(question, chosen, shared, looked_at.clone()) };
        let need = replicas.demand.used(now, shared.key, loss);
        if need.uses < USES_MIN || need.misses + need.waited_s <= 0.0 {
            return None;
        }
        let gain_s = need.miss_s * (1.0 - (-need.misses).exp()) + need.waited_s / (shared.holders + 1) as f64;
        let to = self.receiver(question, chosen, shared, looked_at)?;
        let (from, until) = self.sender(question, shared, to)?;
        let tokens = shared.tokens - question.cached_on(to);
        let bytes = self.kv_bytes(tokens).0;
        let traffic =
            self.link(&self.loads[from], &self.loads[to]).map_or(0.0, |l| l.price(self.kv_bytes(tokens)).0);
        let price = if question.score_unit == ScoreUnit::Usd { traffic } else { 0.0 };
        if gain_s <= until.0 || gain_s * question.wait_weight <= price || bytes > replicas.budget(now) {
            return None;
        }
        replicas.bytes -= bytes;
        replicas.demand.answered(shared.key);
        let (from, to) = (self.loads[from].spec.id, self.loads[to].spec.id);
        let until = now + until * LATE + Seconds(1.0);
        replicas.under_way.push(Copy { key: shared.key, from, to, until });
        let holder = &self.loads[shared.holder].spec;
        let chain = question.arrival.chains.iter().find(|chain| holder.has_blocks_of(chain))?;
        let hashes = chain.hashes[..(shared.tokens / shared.block) as usize].to_vec();
        Some(Action::Replicate { from, to, hashes, tokens })
    }

    fn shared(&self, question: &Question<'_>) -> Option<Shared> {
        let (holder, tokens) = question.longest()?;
        let spec = &self.loads[holder].spec;
        let block = spec.kv_block_tokens.max(1);
        let chain = question.arrival.chains.iter().find(|chain| spec.has_blocks_of(chain))?;
        let key = *chain.hashes.get((tokens / block).checked_sub(1)? as usize)?;
        Some(Shared { key, tokens, holder, block, holders: question.longest_holders.len() })
    }

    /// The loss of the request at its placement because not every instance holds the prefix.
    fn loss(
        &self,
        question: &Question<'_>,
        chosen: &Candidate,
        shared: Shared,
        looked_at: impl Iterator<Item = usize>,
    ) -> Option<Loss> {
        let (terms, at) = (chosen.terms.as_ref()?, self.position(chosen.prefill)?);
        let rest = question.arrival.prompt_tokens - shared.tokens;
        let with_it = |at: usize| self.loads[at].prefill_s(shared.tokens, rest);
        if question.cached_on(at) < shared.tokens {
            let lost = Seconds(terms.pull_s + terms.prefill_s) - with_it(at);
            return (lost > Seconds::ZERO).then_some(Loss::Miss(lost));
        }
        // A policy that ignores prefixes would not have chosen another instance for one.
        if terms.queue_s <= 0.0 || !self.follows_prefixes() {
            return None;
        }
        // A more expensive instance may have been avoided for its price.
        let price = |at: usize| self.loads[at].spec.price.map_or(0.0, |price| price.0);
        let others = looked_at
            .filter(|&other| self.may_receive(question, shared, other) && price(other) <= price(at))
            .map(|other| self.ahead(&self.loads[other], question).0.time + with_it(other));
        let least = others.reduce(Seconds::min)?;
        let lost = Seconds(terms.queue_s + terms.prefill_s) - least;
        (lost > Seconds::ZERO).then_some(Loss::Wait(lost))
    }

    fn follows_prefixes(&self) -> bool {
        match self.config.policy {
            Policy::Random | Policy::RoundRobin | Policy::LeastLoaded => false,
            Policy::CacheAware | Policy::KvcacheCentric { .. } | Policy::PerDollar => true,
        }
    }

    fn may_receive(&self, question: &Question<'_>, shared: Shared, at: usize) -> bool {
        let spec = &self.loads[at].spec;
        spec.role.prefills()
            && spec.has_blocks_like(&self.loads[shared.holder].spec)
            && spec.kv_capacity_tokens >= u64::from(shared.tokens)
            && question.cached_on(at) < shared.tokens
            // A copy extends the prefix on devices, not the part that would have to be loaded first.
            && question.loading_on(at) <= Seconds::ZERO
    }

    /// Among the considered instances, the one with the least work. The request itself brings the prefix to
    /// its own instance.
    fn receiver(
        &self,
        question: &Question<'_>,
        chosen: &Candidate,
        shared: Shared,
        looked_at: impl Iterator<Item = usize>,
    ) -> Option<usize> {
        let everything = Seconds(f64::INFINITY);
        let backlog = |at: usize| self.loads[at].backlog(question.now, everything, &self.works).0.time;
        let may = looked_at
            .filter(|&at| self.may_receive(question, shared, at) && self.loads[at].spec.id != chosen.prefill);
        let least =
            |best: (usize, Seconds), next: (usize, Seconds)| if next.1 < best.1 { next } else { best };
        may.map(|at| (at, backlog(at))).reduce(least).map(|(at, _)| at)
    }

    /// The holder whose link out is free first, and the time of the copy from now on.
    fn sender(&self, question: &Question<'_>, shared: Shared, to: usize) -> Option<(usize, Seconds)> {
        let free = |at: usize| self.loads[at].egress_until.max(question.now);
        let holders = question.longest_holders.iter().copied().filter(|&at| {
            self.loads[at].spec.has_blocks_like(&self.loads[shared.holder].spec)
                && self.link(&self.loads[at], &self.loads[to]).is_some()
        });
        let least = |best: usize, next: usize| if free(next) < free(best) { next } else { best };
        let from = holders.reduce(least)?;
        Some((from, self.pull_time(question.now, from, to, shared.tokens - question.cached_on(to))))
    }
}

#[cfg(test)]
mod tests;
