//! The few instances worth a closer look, in a large fleet: each is ranked alone, by its row ([`super::super::loads`]).
//!
//! What instances of one kind have in common is worked out once.

use super::super::Fleet;
use super::super::loads::{AnswerRow, Kind, PromptRow};
use super::{Question, ScoreUnit};
use crate::cost::LinkCost;
use mixfleet_hal::units::{Seconds, Usd};

/// Positions of the `count` instances where prefill costs least, without what depends on the decoder.
pub(super) fn best_prefills(fleet: &Fleet, question: &Question<'_>, count: usize) -> Vec<usize> {
    let mut prefills = Prefills::new(fleet, question);
    let mut best = Shortlist::new(count);
    for (at, row) in fleet.loads.prompt_rows().iter().enumerate() {
        if let Some(kind) = prefills.kinds[row.kind as usize] {
            best.offer(at, prefills.key(at, row, kind));
        }
    }
    best.positions()
}

/// Positions of the `count` instances where decoding costs least, by the work that they have taken on.
pub(super) fn best_decoders(fleet: &Fleet, question: &Question<'_>, count: usize) -> Vec<usize> {
    let kinds = fleet.loads.kinds();
    let mut best = Shortlist::new(count);
    for (at, row) in fleet.loads.answer_rows().iter().enumerate() {
        let kind = &kinds[row.kind as usize];
        if kind.role.decodes() {
            best.offer(at, decode_key(row, kind, question));
        }
    }
    best.positions()
}

/// The lowest keys; the first of equals.
struct Shortlist {
    /// In order.
    best: Vec<(f64, usize)>,
    count: usize,
    /// What is not lower has no place.
    below: f64,
}

impl Shortlist {
    fn new(count: usize) -> Self {
        Shortlist { best: Vec::with_capacity(count + 1), count, below: f64::INFINITY }
    }

    fn offer(&mut self, at: usize, key: f64) {
        if key < self.below || self.best.len() < self.count {
            let place = self.best.partition_point(|(other, _)| *other <= key);
            self.best.insert(place, (key, at));
            self.best.truncate(self.count);
            if let Some(&(worst, _)) = self.best.get(self.count - 1) {
                self.below = worst;
            }
        }
    }

    fn positions(self) -> Vec<usize> {
        self.best.into_iter().map(|(_, at)| at).collect()
    }
}

/// The question as instances that compute prompts rank by it.
struct Prefills<'a> {
    fleet: &'a Fleet,
    question: &'a Question<'a>,
    /// None: computes no prompts.
    kinds: Vec<Option<PrefillKind>>,
    /// The longest prefix that anyone holds, if it may be pulled.
    longest: Option<(usize, u32)>,
    /// When its holder's way out is free.
    egress_until: Seconds,
    /// Prefill on a kind after so many tokens that an instance holds itself: holders mostly hold the same.
    held: Vec<(u32, u32, Seconds)>,
}

/// The question to instances of one kind that hold nothing.
#[derive(Clone, Copy)]
struct PrefillKind {
    /// The whole prompt,
    whole: Seconds,
    /// and what follows the longest prefix.
    rest: Seconds,
    /// The longest prefix's way on free links.
    way: Option<Seconds>,
}

impl<'a> Prefills<'a> {
    fn new(fleet: &'a Fleet, question: &'a Question<'a>) -> Self {
        let longest = question.longest().filter(|_| fleet.config.pull);
        let holder = longest.map(|(holder, tokens)| (&fleet.loads[holder], tokens));
        let prompt = question.arrival.prompt_tokens;
        let of = |kind: &Kind| {
            let way = holder.and_then(|(holder, tokens)| {
                let pools = fleet.pool_links.get(&(holder.spec.pool, kind.pool)).copied();
                let link = LinkCost::between(holder.spec.nic, kind.nic, pools)?;
                Some(link.time(fleet.kv_bytes(tokens)))
            });
            let rest =
                longest.map_or(Seconds::ZERO, |(_, tokens)| kind.cost.prefill_s(tokens, prompt - tokens));
            PrefillKind { whole: kind.cost.prefill_s(0, prompt), rest, way }
        };
        let kinds = fleet.loads.kinds().iter().map(|kind| kind.role.prefills().then(|| of(kind))).collect();
        let egress_until = holder.map_or(Seconds::ZERO, |(holder, _)| holder.egress_until);
        Prefills { fleet, question, kinds, longest, egress_until, held: Vec::new() }
    }

    fn key(&mut self, at: usize, row: &PromptRow, kind: PrefillKind) -> f64 {
        let Prefills { fleet, question, .. } = *self;
        let (now, own) = (question.now, question.cached_on(at));
        let (queued, behind) = if row.queue.last_due <= question.objectives.due {
            (row.queue.left(now).max(Seconds::ZERO), 0)
        } else {
            let (backlog, behind) = fleet.ahead(&fleet.loads[at], question);
            (backlog.time, behind)
        };
        let mut prefill = if own == 0 { kind.whole } else { self.after_own(row.kind, own) };
        let begins = queued.max(question.loading_on(at));
        let mut ends = begins + prefill;
        if let Some((holder, tokens)) = self.longest.filter(|&(holder, tokens)| holder != at && tokens > own)
        {
            let arrives = match kind.way {
                Some(way) if own == 0 && fleet.links.is_empty() => {
                    (self.egress_until.max(row.ingress_until) - now).max(Seconds::ZERO) + way
                }
                _ => fleet.pull_time(now, holder, at, tokens - own),
            };
            let pulled = begins.max(arrives) + kind.rest;
            if pulled < ends {
                (ends, prefill) = (pulled, kind.rest);
            }
        }
        let delay = prefill * f64::from(row.sequences + behind);
        let price =
            fleet.loads.kinds()[row.kind as usize].price.filter(|_| question.score_unit == ScoreUnit::Usd);
        let paid = price.map_or(Usd::ZERO, |price| price * prefill);
        paid.0 + question.own_weight() * ends.0 + question.wait_weight * delay.0
    }

    /// Prefill on an instance of `kind` after `own` tokens.
    fn after_own(&mut self, kind: u32, own: u32) -> Seconds {
        let known = self.held.iter().find(|(of, tokens, _)| (*of, *tokens) == (kind, own));
        known.map(|&(.., time)| time).unwrap_or_else(|| {
            let prompt = self.question.arrival.prompt_tokens;
            let time = self.fleet.loads.kinds()[kind as usize].cost.prefill_s(own, prompt - own);
            self.held.push((kind, own, time));
            time
        })
    }
}

fn decode_key(row: &AnswerRow, kind: &Kind, question: &Question<'_>) -> f64 {
    let output = f64::from(question.output_tokens);
    let sequences = row.sequences + 1;
    let kv_tokens =
        row.kv_tokens + u64::from(question.arrival.prompt_tokens) + u64::from(question.output_tokens);
    let step = kind.cost.decode_step_s(sequences, kv_tokens);
    let slowdown = (step - row.step).max(Seconds::ZERO) * (output * f64::from(row.sequences));
    // more than it holds: wait for as large a share of all its answers
    let over = match kv_tokens.saturating_sub(row.capacity_tokens) {
        0 => 0.0,
        over => over as f64 / kv_tokens as f64,
    };
    let wait = step * (output * over);
    let share = step * (output / f64::from(sequences));
    let price = kind.price.filter(|_| question.score_unit == ScoreUnit::Usd);
    let paid = price.map_or(Usd::ZERO, |price| price * share);
    // the step itself too: it decides whether the objective is met
    paid.0 + question.wait_weight * slowdown.0 + question.own_weight() * (wait + step).0
}
