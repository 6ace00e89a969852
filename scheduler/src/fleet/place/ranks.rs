//! Ranking instances of a large fleet for a shortlist: each is ranked alone, by its row
//! ([`super::super::loads`]).
//!
//! Terms that instances of one kind share are computed once.

use super::super::load::{Load, binds};
use super::super::loads::{AnswerRow, Kind, PromptRow};
use super::super::{Fleet, Role};
use super::{Question, ScoreUnit};
use crate::cost::LinkCost;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Seconds, Usd};

/// Positions of the `count` instances where prefill costs least, without the terms of the decoder.
pub(super) fn best_prefills(fleet: &Fleet, question: &Question<'_>, count: usize) -> Vec<usize> {
    let mut best = Shortlist::new(count);
    let excluded = excluded(fleet, question);
    let may_use = |kind: &&Kind| question.arrival.may_use_role(kind.role, Role::prefills);
    for kind in fleet.loads.kinds().iter().filter(may_use) {
        let mut prefills = Prefills::new(fleet, question, kind);
        for row in fleet.loads.prompt_rows(kind) {
            if !excluded.contains(&row.at) {
                best.offer(row.at as usize, prefills.key(row));
            }
        }
    }
    best.positions()
}

/// Positions of the `count` instances where decoding costs least, by their accepted work.
pub(super) fn best_decoders(fleet: &Fleet, question: &Question<'_>, count: usize) -> Vec<usize> {
    let mut best = Shortlist::new(count);
    let excluded = excluded(fleet, question);
    let may_use = |kind: &&Kind| question.arrival.may_use_role(kind.role, Role::decodes);
    for kind in fleet.loads.kinds().iter().filter(may_use) {
        let prompt = u64::from(question.arrival.prompt_tokens);
        let held = [question.output_tokens, question.output_tokens / 2]
            .map(|output| kind.tokens_held(prompt + u64::from(output)));
        for row in fleet.loads.answer_rows(kind) {
            if excluded.contains(&row.at) {
                continue;
            }
            let (worst, kv_weight) = (best.worst.0, fleet.config.kv_weight);
            if let Some(key) = decode_key(row, (kind, held), question, worst, kv_weight) {
                best.offer(row.at as usize, key);
            }
        }
    }
    best.positions()
}

/// Positions of the instances that have no part in the request.
fn excluded(fleet: &Fleet, question: &Question<'_>) -> Vec<u32> {
    question.arrival.exclude.iter().filter_map(|id| fleet.position(*id)).map(to_u32).collect()
}

/// The lowest keys with their positions, in order of both.
struct Shortlist {
    best: Vec<(f64, usize)>,
    count: usize,
    /// The upper bound of keys that enter.
    worst: (f64, usize),
}

impl Shortlist {
    fn new(count: usize) -> Self {
        Shortlist { best: Vec::with_capacity(count + 1), count, worst: (f64::INFINITY, usize::MAX) }
    }

    #[inline]
    fn offer(&mut self, at: usize, key: f64) {
        let before = |other: (f64, usize), this: (f64, usize)| {
            other.0 < this.0 || (other.0 == this.0 && other.1 < this.1)
        };
        if before((key, at), self.worst) {
            let place = self.best.partition_point(|&other| before(other, (key, at)));
            self.best.insert(place, (key, at));
            self.best.truncate(self.count);
            if let Some(&worst) = self.best.get(self.count - 1) {
                self.worst = worst;
            }
        }
    }

    fn positions(self) -> Vec<usize> {
        self.best.into_iter().map(|(_, at)| at).collect()
    }
}

/// A request's ranking of the instances of one kind for prefill.
struct Prefills<'a> {
    fleet: &'a Fleet,
    question: &'a Question<'a>,
    kind: &'a Kind,
    /// Prefill of the whole prompt.
    whole: Costs,
    /// Prefill after the longest prefix that any instance holds, if it may be pulled.
    rest: Costs,
    longest: Option<(usize, u32)>,
    /// Time at which its holder's link out is free.
    egress_until: Seconds,
    /// Time of the pull over free links; infinite if it cannot be pulled.
    way: Seconds,
    /// Whether instances without cached tokens differ only in their rows.
    plain: bool,
    /// Prefill after the tokens that an instance holds itself, by their number: most holders hold the same.
    held: Vec<(u32, Costs)>,
}

/// Prefill of a part of the prompt.
#[derive(Clone, Copy)]
struct Costs {
    time: Seconds,
    paid: Usd,
}

impl Costs {
    fn of(kind: &Kind, question: &Question<'_>, known: u32) -> Self {
        let tokens = question.arrival.prompt_tokens - known;
        let time = kind.prefill_s(known, tokens);
        let price = kind.price.filter(|_| question.score_unit == ScoreUnit::Usd);
        Costs { time, paid: price.map_or(Usd::ZERO, |price| price * time * question.busy_share) }
    }
}

impl<'a> Prefills<'a> {
    fn new(fleet: &'a Fleet, question: &'a Question<'a>, kind: &'a Kind) -> Self {
        let longest = question.longest().filter(|_| fleet.config.pull);
        let whole = Costs::of(kind, question, 0);
        let mut prefills = Prefills {
            fleet,
            question,
            kind,
            whole,
            rest: whole,
            longest,
            egress_until: Seconds::ZERO,
            way: Seconds(f64::INFINITY),
            plain: question.loading.is_empty() && (longest.is_none() || fleet.links.is_empty()),
            held: Vec::new(),
        };
        if let Some((holder, tokens)) = longest {
            let source @ Load { spec, egress_until, .. } = &fleet.loads[holder];
            let pools = fleet.pool_links.get(&(spec.pool, kind.pool)).copied();
            if let Some(link) = LinkCost::between(spec.nic, kind.nic, pools) {
                prefills.way = source.corrected(link).time(fleet.kv_bytes(tokens));
            }
            prefills.rest = Costs::of(kind, question, tokens);
            prefills.egress_until =
                egress_until.max(question.now + fleet.loads[holder].lends_after(question.now));
        }
        prefills
    }

    #[inline]
    fn key(&mut self, row: &PromptRow) -> f64 {
        let question = self.question;
        let own = question.cached_on(row.at as usize);
        let pulls_part = own > 0 && self.longest.is_some_and(|(_, tokens)| own < tokens);
        if !self.plain || question.contended || row.queue.last_due > question.objectives.due || pulls_part {
            return self.key_by_load(row);
        }
        let begins = later(row.queue.left(question.now), Seconds::ZERO);
        if own > 0 {
            let prefill = self.after_own(own);
            return self.sum(prefill, begins + prefill.time, row.stalled);
        }
        let ends = begins + self.whole.time;
        let ways_free = later(later(self.egress_until, row.ingress_until) - question.now, Seconds::ZERO);
        let pulled = later(begins, ways_free + self.way) + self.rest.time;
        let (ends, prefill) = if pulled < ends { (pulled, self.rest) } else { (ends, self.whole) };
        self.sum(prefill, ends, row.stalled)
    }

    /// The key of an instance that may pull a part, has links of its own, or has prompts that the request
    /// precedes.
    #[inline(never)]
    fn key_by_load(&mut self, row: &PromptRow) -> f64 {
        let Prefills { fleet, question, .. } = *self;
        let (at, now) = (row.at as usize, question.now);
        let own = question.cached_on(at);
        let (backlog, behind) = fleet.ahead(&fleet.loads[at], question);
        let mut prefill = if own == 0 { self.whole } else { self.after_own(own) };
        let begins = backlog.time.max(question.loading_on(at));
        let mut ends = begins + prefill.time;
        if let Some((holder, tokens)) = self.longest.filter(|&(holder, tokens)| holder != at && tokens > own)
        {
            let arrives = fleet.pull_time(now, holder, at, tokens - own);
            let pulled = begins.max(arrives) + self.rest.time;
            if pulled < ends {
                (ends, prefill) = (pulled, self.rest);
            }
        }
        self.sum(prefill, ends, row.stalled + behind)
    }

    fn sum(&self, prefill: Costs, ends: Seconds, delayed: u32) -> f64 {
        let delay = prefill.time * f64::from(delayed);
        prefill.paid.0 + self.question.own_weight() * ends.0 + self.question.wait_weight * delay.0
    }

    /// Prefill after `own` tokens.
    fn after_own(&mut self, own: u32) -> Costs {
        let known = self.held.iter().find(|(tokens, _)| *tokens == own);
        known.map(|&(_, costs)| costs).unwrap_or_else(|| {
            let costs = Costs::of(self.kind, self.question, own);
            self.held.push((own, costs));
            costs
        })
    }
}

/// The greater one, without `f64::max`'s handling of NaN.
#[inline]
fn later(a: Seconds, b: Seconds) -> Seconds {
    if a > b { a } else { b }
}

/// The key of an instance for decode, of a kind where the sequence has this final size, and when half of its
/// answer is done; none if it is known to exceed `worst`.
#[inline]
fn decode_key(
    row: &AnswerRow,
    (kind, [held_last, held_midway]): (&Kind, [u64; 2]),
    question: &Question<'_>,
    worst: f64,
    kv_weight: f64,
) -> Option<f64> {
    let output = f64::from(question.output_tokens);
    let sequences = row.sequences + 1;
    let kv_tokens =
        row.kv_tokens + u64::from(question.arrival.prompt_tokens) + u64::from(question.output_tokens);
    let step = kind.step(sequences, kv_tokens);
    let slowdown = (step - row.step).max(Seconds::ZERO) * (output * f64::from(row.sequences));
    let delay = question.wait_weight * slowdown.0;
    // The remaining terms only add to it.
    if delay + question.own_weight() * step.0 > worst {
        return None;
    }
    // If it has accepted more than it can hold, the request waits for as large a share of all its answers.
    let promised = row.promised + held_last;
    let over = match promised.saturating_sub(row.capacity_tokens) {
        0 => 0.0,
        over => over as f64 / promised as f64,
    };
    let wait = step * (output * over);
    let share = step * (output / f64::from(sequences));
    let price = kind.price.filter(|_| question.score_unit == ScoreUnit::Usd);
    let paid = price.map_or(Usd::ZERO, |price| price * share * question.busy_share);
    let memory = if kv_weight == 0.0 {
        0.0
    } else {
        let share = held_midway as f64 / row.capacity_tokens.max(1) as f64;
        let share = share * binds(promised as f64, row.capacity_tokens);
        let time = step * (output * share * kv_weight);
        price.map_or(time.0, |price| (price * time).0)
    };
    // The step itself counts too, since it decides whether the objective is met.
    Some(memory + paid.0 + delay + question.own_weight() * (wait + step).0)
}
