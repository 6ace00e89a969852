//! Placement: which instances a request gets, by one of several policies.
//!
//! ```text
//! ttft  = queue + exposed pull + kv wait + interleaved decode steps + prefill
//! score = busy dollars * busy share + w * (ttft + hand-off + delay to others) + memory
//! ```
//!
//! The busy share is that of the instances that have work: the rent of idle ones is paid anyway, so using
//! little counts only as far as others may need it. Without prices busy dollars are 0 and w is 1: plain
//! seconds. The queue is first come, first served, so a new request delays no queued one; it delays the
//! sequences that already decode on its two instances. The first token is drawn where the prompt is computed,
//! so the hand-off to the decode instance delays the second one. The part of it that would be exposed behind
//! a prefill without any cache counts, and the wait for room counts even if the queue hides it: otherwise a
//! slow link or a full decoder would make slow prefills look free.
//!
//! A policy names candidate placements and picks one ([`Policy`]); their terms are predicted here, the same
//! for all policies, and admission ([`super::admit`]) judges the pick.

mod cache_aware;
mod kvcache_centric;
mod least_loaded;
mod memory;
mod per_dollar;
mod policy;
mod random;
mod ranks;
mod reusable;
mod round_robin;

pub use policy::Policy;

use super::admit::{Admission, Objectives};
use super::explain::{Candidate, Explanation, Outcome, ScoreUnit, Terms};
use super::forecast::Forecast;
use super::load::{Backlog, Batch, Load};
use super::{Arrival, Fleet, InstanceId, Pull, RejectReason, Role};
use crate::cost::{Corrections, LinkCost};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Bytes, Ordered, Seconds, Usd, UsdPerHour};
use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The weight of a second of waiting of a request with a deadline, relative to others: enough to spread such
/// requests over equal instances, too little to buy speed.
const PATIENT: f64 = 0.1;

/// A part of a prefix: the position of an instance, and tokens that it holds.
pub(super) type Part = (usize, u32);

/// A candidate placement, as positions of instances.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pick {
    pub(super) prefill: usize,
    pub(super) decode: usize,
    /// The pulled part of the prefix: the holder, and the tokens beyond those on the prefill instance.
    pub(super) pull: Option<Part>,
}

/// A request, with the values common to all of its candidates.
pub(super) struct Question<'a> {
    pub(super) now: Seconds,
    pub(super) arrival: &'a Arrival,
    pub(super) output_tokens: u32,
    pub(super) score_unit: ScoreUnit,
    pub(super) wait_weight: f64,
    /// Share of the instances that have work, with this request.
    pub(super) busy_share: f64,
    pub(super) objectives: Objectives,
    /// Number of leading prompt tokens that each instance can reuse, by position.
    pub(super) cached: Vec<u32>,
    /// The maximum of both.
    pub(super) longest_tokens: u32,
    /// Instances that hold as many, in order; empty if no instance holds any.
    pub(super) longest_holders: Vec<usize>,
    /// Whether other parties have requests in progress.
    pub(super) contended: bool,
    /// Time to load cached tokens from lower tiers, by position; empty if nothing must be loaded.
    pub(super) loading: Vec<Seconds>,
}

impl Question<'_> {
    /// Weight of a second of its own waiting, in units of the score.
    pub(super) fn own_weight(&self) -> f64 {
        self.wait_weight * if self.objectives.ends.is_some() { PATIENT } else { 1.0 }
    }

    /// Number of leading prompt tokens that instance `at` can reuse.
    pub(super) fn cached_on(&self, at: usize) -> u32 {
        self.cached[at]
    }

    /// Time that instance `at` takes to load those in lower tiers.
    pub(super) fn loading_on(&self, at: usize) -> Seconds {
        self.loading.get(at).copied().unwrap_or(Seconds::ZERO)
    }

    /// The longest reusable prefix anywhere, and its holder; the first of equals.
    pub(super) fn longest(&self) -> Option<Part> {
        self.longest_holders.first().map(|&at| (at, self.longest_tokens))
    }
}

/// The terms of a prefill instance, for any decode instance.
pub(super) struct PrefillSide {
    at: usize,
    cached_tokens: u32,
    pulled_tokens: u32,
    queue: Seconds,
    /// Time of loading from lower tiers, beside which others compute, and of the pull beyond the queue.
    pull: Seconds,
    pull_price: Usd,
    interleave: Seconds,
    pub(super) prefill: Seconds,
    /// Time of the whole prompt without cached tokens; computed on demand.
    whole: OnceCell<Seconds>,
    /// Number of sequences that it stalls, and of prompts that it precedes.
    delayed: u32,
    /// By how much it would make an answer there miss its TBT objective.
    overrun: OnceCell<Seconds>,
}

/// The terms of a decode instance, for any prefill instance.
struct DecodeSide<'a> {
    at: usize,
    /// The forecast of its requests, made when needed.
    forecast: OnceCell<Forecast<'a>>,
    /// Time until it has room.
    room: Seconds,
    /// Total delay of the requests at work here by a new one.
    delay: Seconds,
    /// The new request's share of the steps in which it takes part.
    share: Seconds,
    /// Time of a step with it in the current batch.
    tbt_now: Seconds,
}

impl Fleet {
    /// Picks a placement. The explanation has every candidate that was considered.
    pub(super) fn decide(
        &mut self,
        now: Seconds,
        arrival: &Arrival,
    ) -> (Explanation, Result<usize, RejectReason>) {
        let (score_unit, wait_weight) = self.weights();
        let busy_share = self.loads.busy_share();
        let request = arrival.request;
        let output_tokens = self.output_tokens(arrival);
        let objectives = self.objectives(now, arrival);
        let mut explanation = Explanation {
            request,
            decided_at: now,
            score_unit,
            wait_weight,
            busy_share,
            output_tokens,
            instances: to_u32(self.loads.len()),
            parties: to_u32(self.parties.with(arrival.party)),
            candidates: Vec::new(),
        };
        let (requests, requests_max) = (self.requests(), self.config.requests_max);
        if self.works.contains(request) {
            return (explanation, Err(RejectReason::Duplicate { request }));
        }
        if requests >= requests_max && arrival.replay.is_none() {
            return (explanation, Err(RejectReason::QueueFull { requests, requests_max }));
        }
        let party = arrival.party;
        if self.parties.leaves_the_rest(party, requests, requests_max) && arrival.replay.is_none() {
            let own = self.parties.requests(party);
            return (explanation, Err(RejectReason::Share { requests: own, requests_max }));
        }
        let (cached, loading) = self.reusable(arrival);
        let longest_tokens = cached.iter().copied().max().unwrap_or(0);
        let longest_holders = match longest_tokens {
            0 => Vec::new(),
            _ => (0..cached.len()).filter(|&at| cached[at] == longest_tokens).collect(),
        };
        let question = Question {
            now,
            arrival,
            output_tokens,
            score_unit,
            wait_weight,
            busy_share,
            objectives,
            cached,
            longest_tokens,
            longest_holders,
            contended: self.parties.with(arrival.party) > 1,
            loading,
        };
        let picks = match self.config.policy {
            Policy::Random => random::picks(self, arrival),
            Policy::RoundRobin => round_robin::picks(self, arrival),
            Policy::LeastLoaded => least_loaded::picks(self, &question),
            Policy::CacheAware => cache_aware::picks(self, &question),
            Policy::KvcacheCentric { threshold } => kvcache_centric::picks(self, &question, threshold),
            Policy::PerDollar => per_dollar::picks(self, &question),
        };
        explanation.candidates = self.candidates(&question, &picks);
        let mut verdict = self.admit(&mut explanation.candidates, &question);
        if let Ok(chosen) = verdict
            && let Some(tried) = self.tried_instead(&question, &mut explanation.candidates, chosen)
        {
            verdict = Ok(tried);
        }
        if self.replicas.is_some()
            && let Ok(chosen) = verdict
        {
            self.weigh_copy(&question, &explanation.candidates[chosen]);
        }
        self.cached = question.cached;
        (explanation, verdict)
    }

    /// Number of tokens that `arrival` is assumed to generate.
    pub(super) fn output_tokens(&self, arrival: &Arrival) -> u32 {
        let expected = arrival.output_tokens_hint.unwrap_or_else(|| self.lengths.mean(arrival.class));
        expected.min(arrival.max_tokens)
    }

    /// The unit of the score, and the weight of a second of waiting in it. By default a second of waiting is
    /// worth a second of the average instance's rent.
    pub(super) fn weights(&self) -> (ScoreUnit, f64) {
        match self.mean_price {
            Some(mean) => {
                let default = (mean * Seconds(1.0)).0;
                (ScoreUnit::Usd, self.config.wait_usd_per_s.unwrap_or(default))
            }
            None => (ScoreUnit::Seconds, 1.0),
        }
    }

    /// The average price of the instances that compute, if all have one.
    pub(super) fn average_price(&self) -> Option<UsdPerHour> {
        let prices: Option<Vec<UsdPerHour>> =
            self.able(Role::computes).map(|(_, load)| load.spec.price).collect();
        prices.filter(|prices| !prices.is_empty()).map(|prices| {
            let count = prices.len() as f64;
            prices.into_iter().sum::<UsdPerHour>() / count
        })
    }

    /// Position of an instance.
    pub(super) fn position(&self, id: InstanceId) -> Option<usize> {
        // Ids are mostly positions.
        let at = id.0 as usize;
        if self.ids.get(at) == Some(&id) { Some(at) } else { self.ids.binary_search(&id).ok() }
    }

    /// Prefill work on `load` ahead of the request, and the number of prompts that it precedes.
    pub(super) fn ahead(&self, load: &Load, question: &Question<'_>) -> (Backlog, u32) {
        self.backlog_in_turn(load, question)
    }

    pub(super) fn candidates(&self, question: &Question<'_>, picks: &[Pick]) -> Vec<Candidate> {
        // Picks are grouped by prefill; decoders repeat.
        let mut decoders: Vec<DecodeSide<'_>> = Vec::new();
        let mut side: Option<(Pick, PrefillSide)> = None;
        let mut candidates = Vec::with_capacity(picks.len());
        // Pairs of candidate and decoder.
        let mut possible: Vec<(usize, usize)> = Vec::with_capacity(picks.len());
        for &pick in picks {
            let (p, d) = (&self.loads[pick.prefill], &self.loads[pick.decode]);
            let obstacle = self.obstacle(question.arrival, p, d);
            let terms = obstacle.is_none().then(|| {
                let known = decoders.iter().position(|decoder| decoder.at == pick.decode);
                let decoder = known.unwrap_or_else(|| {
                    decoders.push(self.decode_side(question, pick.decode));
                    decoders.len() - 1
                });
                possible.push((candidates.len(), decoder));
                let same = |(of, _): &(Pick, PrefillSide)| of.prefill == pick.prefill && of.pull == pick.pull;
                let (_, side) = match side.take().filter(same) {
                    Some(known) => side.insert(known),
                    None => side.insert((pick, self.prefill_side(question, pick.prefill, pick.pull))),
                };
                self.terms(question, side, &decoders[decoder])
            });
            candidates.push(Candidate {
                prefill: p.spec.id,
                prefill_device: p.spec.device.clone(),
                decode: d.spec.id,
                decode_device: d.spec.device.clone(),
                pull: pick.pull.map(|(from, tokens)| Pull { from: self.loads[from].spec.id, tokens }),
                terms,
                // `admit` sets that of possible ones.
                outcome: obstacle.unwrap_or(Outcome::TieLostById),
            });
        }
        let terms = candidates.iter().filter_map(|candidate: &Candidate| candidate.terms.as_ref());
        let landed = terms.map(|t| t.ttft_s + t.transfer_s);
        let soonest = Seconds(landed.fold(f64::INFINITY, f64::min));
        // Steps after the prompt are only predicted for candidates that can win.
        let score = |i: usize| candidates[i].terms.as_ref().map_or(f64::INFINITY, |t| t.score);
        let by_score = possible.into_iter().map(|(i, decoder)| Reverse((Ordered(score(i)), i, decoder)));
        let mut possible: BinaryHeap<_> = by_score.collect();
        while let Some(Reverse((_, candidate, decoder))) = possible.pop() {
            if self.look_ahead(question, &mut candidates[candidate], &decoders[decoder], soonest) {
                break;
            }
        }
        candidates
    }

    fn forecast<'a>(&'a self, question: &Question<'_>, at: usize) -> Forecast<'a> {
        self.loads[at].forecast(&self.lengths, question.now)
    }

    /// Predicts steps after the prompt is computed; true if they meet the objectives. Where no request is
    /// rejected, the largest step counts from `soonest`, when the KV of the fastest candidate would land, so
    /// that a late candidate gains nothing; a request that may be rejected had better be late than rejected.
    fn look_ahead<'a>(
        &'a self,
        question: &Question<'_>,
        candidate: &mut Candidate,
        decoder: &DecodeSide<'a>,
        soonest: Seconds,
    ) -> bool {
        let Some(terms) = &mut candidate.terms else { return false };
        let d = &self.loads[decoder.at];
        let (prompt, output_tokens) = (u64::from(question.arrival.prompt_tokens), question.output_tokens);
        let decodes_after = Seconds(terms.ttft_s + terms.transfer_s);
        let forecast = decoder.forecast.get_or_init(|| self.forecast(question, decoder.at));
        let step = |batch: Batch| d.step(batch.with(prompt + 1));
        let then = forecast.likely(question.now + decodes_after);
        let alone = step(then.batch(0.0));
        let takes_all = self.config.admission == Admission::None;
        let peak = question.objectives.tbt_slo.map(|_| {
            let first = if takes_all { forecast.likely(question.now + soonest) } else { then };
            forecast.peak(first, output_tokens)
        });
        let gaps_counted = (self.config.tbt_share * f64::from(output_tokens)).max(1.0);
        // If no request is rejected, a late second token is better than a late first one on a slower prefill.
        let delays_first = self.config.first_token_at_decode;
        let transfer_s = if takes_all || delays_first { 0.0 } else { terms.transfer_s };
        let landing = forecast.landing(then, alone * f64::from(output_tokens));
        let tbt = landing.beside(alone, f64::from(output_tokens.max(1)));
        let largest = peak.map_or(alone, |peak| step(peak).max(alone));
        terms.tbt_s = tbt.0;
        terms.tbt_peak_s = landing.beside(largest, gaps_counted).0 + transfer_s / gaps_counted;
        terms.ends_s = decodes_after.0 + tbt.0 * f64::from(output_tokens);
        question.objectives.missed(terms).is_none()
    }

    /// Why the pair could not serve the request even if it were idle.
    fn obstacle(&self, arrival: &Arrival, p: &Load, d: &Load) -> Option<Outcome> {
        let prompt = u64::from(arrival.prompt_tokens);
        let too_small = |load: &Load, tokens: u64| {
            let (instance, capacity_tokens) = (load.spec.id, load.spec.kv_capacity_tokens);
            (!load.fits(tokens)).then_some(Outcome::TooSmall { instance, tokens, capacity_tokens })
        };
        let (from, to) = (p.spec.id, d.spec.id);
        let reachable = from == to || arrival.may_divide(from, to) && self.link(p, d).is_some();
        too_small(d, prompt + u64::from(arrival.max_tokens))
            .or_else(|| too_small(p, prompt))
            .or((!reachable).then_some(Outcome::NoLink))
    }

    /// The terms of prefill on instance `at`, with `pull` tokens of prefix from elsewhere.
    pub(super) fn prefill_side(&self, question: &Question<'_>, at: usize, pull: Option<Part>) -> PrefillSide {
        let load = &self.loads[at];
        let prompt_tokens = question.arrival.prompt_tokens;
        let cached_tokens = question.cached_on(at);
        let pulled_tokens = pull.map_or(0, |(_, tokens)| tokens);
        let known = cached_tokens + pulled_tokens;
        let uncached = prompt_tokens - known;
        let (backlog, behind) = self.ahead(load, question);
        let batch = load.batch();
        let prefill = load.prefill_s(known, uncached);
        let mut side = PrefillSide {
            at,
            cached_tokens,
            pulled_tokens,
            queue: backlog.time,
            pull: question.loading_on(at),
            pull_price: Usd::ZERO,
            interleave: load.step(batch) * load.steps(backlog.chunks + load.chunks(uncached)) as f64,
            prefill,
            whole: OnceCell::new(),
            delayed: load.stalled() + behind,
            overrun: OnceCell::new(),
        };
        if let Some((from, tokens)) = pull {
            let arrives = self.pull_time(question.now, from, at, tokens);
            side.pull += (arrives - side.queue).max(Seconds::ZERO);
            let link = self.link(&self.loads[from], load);
            side.pull_price = link.map_or(Usd::ZERO, |link| link.price(self.kv_bytes(tokens)));
        }
        side
    }

    pub(super) fn kv_bytes(&self, tokens: u32) -> Bytes {
        Bytes(f64::from(tokens) * self.config.kv_bytes_per_token as f64)
    }

    /// Bytes of a prompt that are sent to `decoder`, which lacks the last `lacking` tokens.
    pub(super) fn hand_off_bytes(&self, decoder: &Load, prompt_tokens: u32, lacking: u32) -> Bytes {
        let sent = decoder.spec.tokens_sent(&(prompt_tokens - lacking..prompt_tokens), prompt_tokens);
        Bytes(sent * self.config.kv_bytes_per_token as f64)
    }

    /// Time from `now` until `tokens` tokens of KV have been pulled: after earlier transfers of the two ends,
    /// and the source's step. Infinite without a link.
    pub(super) fn pull_time(&self, now: Seconds, from: usize, to: usize, tokens: u32) -> Seconds {
        self.pull_times(now, from, to)(tokens)
    }

    /// The same for any number of tokens.
    pub(super) fn pull_times(&self, now: Seconds, from: usize, to: usize) -> impl Fn(u32) -> Seconds {
        let (source, target) = (&self.loads[from], &self.loads[to]);
        let link = self.link(source, target);
        let begins = ways_free(now, source, target).max(source.lends_after(now));
        move |tokens| link.map_or(Seconds(f64::INFINITY), |link| begins + link.time(self.kv_bytes(tokens)))
    }

    /// The terms of decoding on instance `at`.
    fn decode_side<'a>(&'a self, question: &Question<'_>, at: usize) -> DecodeSide<'a> {
        let load = &self.loads[at];
        let prompt = u64::from(question.arrival.prompt_tokens);
        let whole = prompt + u64::from(question.output_tokens);
        let cell = OnceCell::new();
        let forecast = || cell.get_or_init(|| self.forecast(question, at));
        // In large fleets only the best decoder's requests are visited one by one, if possible.
        let quick = self.loads.len() > per_dollar::PAIRS_MAX;
        let room = if quick && load.has_room(whole) { Seconds::ZERO } else { forecast().kv_wait(whole) };
        // Requests that share steps with it wait longer for each step, and pay a part of it. This counts all
        // requests that the instance has accepted, not the batch at the prompt's end: otherwise a late start
        // would count as an advantage.
        let others = load.everyone();
        let slowdown = (load.step(others.with(prompt)) - load.step(others)).max(Seconds::ZERO);
        let output_tokens = question.output_tokens;
        let beside = load.tokens_beside(output_tokens).filter(|_| quick);
        let beside = beside.unwrap_or_else(|| load.tokens_left_beside(&self.lengths, output_tokens));
        let delay = slowdown * beside as f64;
        // The mean context of its steps is that half-way through the answer.
        let halfway = others.with(prompt + 1 + u64::from(question.output_tokens / 2));
        let share = load.step(halfway) * (f64::from(question.output_tokens) / f64::from(halfway.sequences));
        DecodeSide {
            at,
            forecast: cell,
            room,
            delay,
            share,
            tbt_now: load.step(load.batch().with(prompt + 1)),
        }
    }

    fn terms(&self, question: &Question<'_>, side: &PrefillSide, decoder: &DecodeSide<'_>) -> Terms {
        let arrival = question.arrival;
        let (p, d) = (&self.loads[side.at], &self.loads[decoder.at]);
        let room = decoder.room;
        let link = self.link(p, d);
        let kv_wait = (room - side.queue).max(Seconds::ZERO);
        let transfer_tokens = link.map_or(0, |_| arrival.prompt_tokens - question.cached_on(decoder.at));
        let bytes = self.hand_off_bytes(d, arrival.prompt_tokens, transfer_tokens);
        let shows = |prefill| link.map_or(Seconds::ZERO, |l| l.exposed(bytes, self.config.layers, prefill));
        let transfer = shows(side.prefill);
        let overhead = p.overhead.time();
        let ttft = side.queue + side.pull + kv_wait + side.interleave + side.prefill + overhead;
        // The transfer follows all earlier transfers over these links. This is not a part of the score: over
        // links that never keep up it would choose prefills by their links alone (mean TTFT seven times as
        // long on the conversation trace over 0.3 GB/s).
        let blocked = link.map_or(Seconds::ZERO, |l| {
            let arrives = ways_free(question.now, p, d) + l.time(bytes);
            (arrives - ttft - transfer).max(Seconds::ZERO)
        });
        let hand_off = if side.cached_tokens + side.pulled_tokens == 0 || transfer == Seconds::ZERO {
            transfer
        } else {
            shows(*side.whole.get_or_init(|| p.prefill_s(0, arrival.prompt_tokens)))
        };
        let hand_off = hand_off + (room - kv_wait);
        let transfer = transfer + blocked;
        let traffic = side.pull_price + link.map_or(Usd::ZERO, |l| l.price(bytes));

        // Its KV takes of the steps of all others there while it lands.
        let lands = self.lands((side.at, decoder.at), bytes, side.prefill).takes;
        let delay = side.prefill * f64::from(side.delayed) + decoder.delay;
        let delay = delay + lands * f64::from(d.everyone().sequences);

        let overrun = side.overrun.get_or_init(|| {
            let uncached = arrival.prompt_tokens - side.cached_tokens - side.pulled_tokens;
            let stalls = p.stalls_of(uncached, side.prefill);
            stalls.and_then(|stalls| p.overruns(stalls, self.config.tbt_share)).unwrap_or(Seconds::ZERO)
        });

        let busy = match (question.score_unit, p.spec.price, d.spec.price) {
            (ScoreUnit::Usd, Some(prefill), Some(decode)) => {
                (prefill * side.prefill + decode * decoder.share) * question.busy_share + traffic
            }
            _ => Usd::ZERO,
        };
        let memory = self.memory_cost(question, side, decoder, (ttft, transfer));
        let known = side.cached_tokens + side.pulled_tokens;
        Terms {
            cached_tokens: side.cached_tokens,
            pulled_tokens: side.pulled_tokens,
            transfer_tokens,
            queue_s: side.queue.0,
            pull_s: side.pull.0,
            kv_wait_s: kv_wait.0,
            interleave_s: side.interleave.0,
            prefill_s: side.prefill.0,
            overhead_s: overhead.0,
            transfer_s: transfer.0,
            hand_off_s: hand_off.0,
            ttft_s: ttft.0,
            ends_s: (ttft + transfer + decoder.tbt_now * f64::from(question.output_tokens)).0,
            tbt_s: decoder.tbt_now.0,
            tbt_peak_s: decoder.tbt_now.0,
            tbt_now_s: decoder.tbt_now.0,
            delay_s: delay.0,
            overrun_s: overrun.0,
            busy_usd: busy.0,
            memory,
            corrections: Corrections {
                prefill: p.learner.prefill_factor(p.spec.piece(arrival.prompt_tokens - known)),
                step: d.learner.step_factor(d.batch().sequences + 1),
                transfer: p.learner.transfer_factor(),
            },
            score: busy.0
                + question.own_weight() * (ttft + hand_off).0
                + question.wait_weight * delay.0
                + memory,
        }
    }

    /// The link from one instance to another; none within one. A measured link of the two, else the link of
    /// their pools, else that of their network interfaces.
    pub(super) fn link(&self, from: &Load, to: &Load) -> Option<LinkCost> {
        self.uncorrected_link(from, to).map(|link| from.corrected(link))
    }

    /// The same link without learned corrections.
    pub(super) fn uncorrected_link(&self, from: &Load, to: &Load) -> Option<LinkCost> {
        if from.spec.id == to.spec.id {
            return None;
        }
        let measured = self.links.get(&(from.spec.id, to.spec.id)).copied();
        measured.or_else(|| {
            let pools = self.pool_links.get(&(from.spec.pool, to.spec.pool)).copied();
            LinkCost::between(from.spec.nic, to.spec.nic, pools)
        })
    }

    /// Positions of instances that may prefill, or decode, for a request.
    pub(super) fn able_for<'a>(
        &'a self,
        arrival: &'a Arrival,
        can: fn(Role) -> bool,
    ) -> impl Iterator<Item = (usize, &'a Load)> {
        self.loads.iter().enumerate().filter(move |(_, load)| arrival.may_use(&load.spec, can))
    }

    /// Positions of instances that may prefill, or decode.
    pub(super) fn able(&self, can: fn(Role) -> bool) -> impl Iterator<Item = (usize, &Load)> {
        self.loads.iter().enumerate().filter(move |(_, load)| can(load.spec.role))
    }

    /// The decode instance for a policy that only chooses the prefill instance: that one itself if it may
    /// decode, else the one with the least work.
    pub(super) fn decoder_for(&self, arrival: &Arrival, prefill: usize) -> Option<usize> {
        if arrival.may_use(&self.loads[prefill].spec, Role::decodes) {
            return Some(prefill);
        }
        let busy = |load: &Load| {
            let fill = load.promised as f64 / load.spec.kv_capacity_tokens.max(1) as f64;
            (load.step(load.committed.with(0)).0, fill)
        };
        let mut best: Option<(usize, (f64, f64))> = None;
        for (at, load) in self.able_for(arrival, Role::decodes) {
            let key = busy(load);
            if best.is_none_or(|(_, least)| key < least) {
                best = Some((at, key));
            }
        }
        best.map(|(at, _)| at)
    }
}

/// Time until the links out of one instance and into another have completed the decided transfers.
pub(super) fn ways_free(now: Seconds, from: &Load, to: &Load) -> Seconds {
    (from.egress_until.max(to.ingress_until) - now).max(Seconds::ZERO)
}
