//! The least cost of what a request uses and of the waiting that it means (design: `busy dollars + w * seconds`).
//!
//! Small fleets are compared pair by pair. In large ones every instance is ranked alone first, from sums that it keeps; the best of
//! each side is paired with the best few of the other: a decision's time grows with the number of instances, not with its square.

use super::super::load::Load;
use super::super::{Fleet, Role};
use super::{Part, Pick, PrefillSide, Question};
use crate::cost::CostModel;
use mixfleet_hal::units::Seconds;
use std::sync::Arc;

/// As many pairs are compared without a shortlist.
pub(super) const PAIRS_MAX: usize = 64;
/// Otherwise so many of each side.
const SHORTLIST: usize = 4;
/// Halvings in the search for the part of a prefix that takes as long to pull as the rest to compute: within 2 % of it.
const HALVINGS: u32 = 6;

pub(super) fn picks(fleet: &Fleet, question: &Question<'_>) -> Vec<Pick> {
    let able = |can| fleet.able(can).map(|(at, _)| at);
    // more instances make more pairs, however they are divided
    let few = fleet.loads.len() <= PAIRS_MAX + 1
        && able(Role::prefills).count() * able(Role::decodes).count() <= PAIRS_MAX;
    let (prefills, decodes): (Vec<usize>, Vec<usize>);
    if few {
        (prefills, decodes) = (able(Role::prefills).collect(), able(Role::decodes).collect());
    } else {
        let mut best = shortlist(able(Role::prefills), prefill_keys(fleet, question));
        let mut least = shortlist(able(Role::decodes), |at| decode_key(&fleet.loads[at], question));
        // what needs no transfer must be able to win
        let role = |at: usize| fleet.loads[at].spec.role;
        let as_decoders: Vec<usize> = best.iter().copied().filter(|&at| role(at).decodes()).collect();
        let as_prefills: Vec<usize> = least.iter().copied().filter(|&at| role(at).prefills()).collect();
        for (list, others) in [(&mut best, as_prefills), (&mut least, as_decoders)] {
            let new: Vec<usize> = others.into_iter().filter(|at| !list.contains(at)).collect();
            list.extend(new);
        }
        (prefills, decodes) = (best, least);
    }
    let mut picks = Vec::with_capacity(prefills.len() * decodes.len());
    for (p, &prefill) in prefills.iter().enumerate() {
        let pull = best_pull(fleet, question, prefill);
        for (d, &decode) in decodes.iter().enumerate() {
            if few || p == 0 || d == 0 || prefill == decode {
                picks.push(Pick { prefill, decode, pull });
            }
        }
    }
    picks
}

/// The few of `from` with the lowest keys; the first of equals.
fn shortlist(from: impl Iterator<Item = usize>, mut key: impl FnMut(usize) -> f64) -> Vec<usize> {
    let mut best: Vec<(f64, usize)> = Vec::with_capacity(SHORTLIST + 1);
    for at in from {
        let key = key(at);
        if best.len() < SHORTLIST || best.last().is_some_and(|(worst, _)| key < *worst) {
            let place = best.partition_point(|(other, _)| *other <= key);
            best.insert(place, (key, at));
            best.truncate(SHORTLIST);
        }
    }
    best.into_iter().map(|(_, at)| at).collect()
}

/// What prefill on an instance costs, without what depends on the decoder. Instances of one kind that hold nothing take the same
/// time, so their cost model is asked once.
fn prefill_keys<'a>(fleet: &'a Fleet, question: &'a Question<'_>) -> impl FnMut(usize) -> f64 + 'a {
    let prompt = question.arrival.prompt_tokens;
    let longest = question.longest().filter(|_| fleet.config.pull);
    let mut known: Vec<(*const CostModel, u32, Seconds)> = Vec::new();
    let mut time = move |cost: &Arc<CostModel>, reused: u32| {
        let found = known.iter().find(|(of, tokens, _)| *of == Arc::as_ptr(cost) && *tokens == reused);
        found.map(|(.., time)| *time).unwrap_or_else(|| {
            let time = cost.prefill_s(reused, prompt - reused);
            known.push((Arc::as_ptr(cost), reused, time));
            time
        })
    };
    move |at| {
        let load = &fleet.loads[at];
        let own = question.cached_on(at);
        let ((backlog, behind), batch) = (fleet.ahead(load, question), load.batch());
        let mut prefill = time(&load.spec.cost, own);
        let begins = backlog.time.max(question.loading_on(at));
        let mut ends = begins + prefill;
        if let Some((holder, tokens)) = longest.filter(|&(holder, tokens)| holder != at && tokens > own) {
            let rest = time(&load.spec.cost, tokens);
            let arrives = fleet.pull_time(question.now, holder, at, tokens - own);
            let pulled = begins.max(arrives) + rest;
            if pulled < ends {
                (ends, prefill) = (pulled, rest);
            }
        }
        let delay = prefill * f64::from(batch.sequences + behind);
        let dollars = load.spec.price.map_or(0.0, |price| (price * prefill).0);
        let paid = if question.score_unit == super::ScoreUnit::Usd { dollars } else { 0.0 };
        paid + question.own_weight() * ends.0 + question.wait_weight * delay.0
    }
}

/// What decoding on an instance costs, by the work that it has taken on.
fn decode_key(load: &Load, question: &Question<'_>) -> f64 {
    let whole = u64::from(question.arrival.prompt_tokens) + u64::from(question.output_tokens);
    let (now, then) = (load.committed, load.committed.with(whole));
    let step = load.step(then);
    let output = f64::from(question.output_tokens);
    let slowdown = (step - load.step(now)).max(Seconds::ZERO) * (output * f64::from(now.sequences));
    // more than it holds: wait for as large a share of all its answers
    let over =
        then.kv_tokens.saturating_sub(load.spec.kv_capacity_tokens) as f64 / then.kv_tokens.max(1) as f64;
    let wait = step * (output * over);
    let share = step * (output / f64::from(then.sequences));
    let dollars = load.spec.price.map_or(0.0, |price| (price * share).0);
    let paid = if question.score_unit == super::ScoreUnit::Usd { dollars } else { 0.0 };
    // the step itself too: it decides whether the objective is met
    paid + question.wait_weight * slowdown.0 + question.own_weight() * (wait + step).0
}

/// Recompute, pull the longest prefix that anyone holds, or pull a part of it: what costs least on instance `at`.
fn best_pull(fleet: &Fleet, question: &Question<'_>, at: usize) -> Option<Part> {
    let own = question.cached_on(at);
    let (holder, tokens) = question.longest().filter(|_| fleet.config.pull)?;
    if holder == at || tokens <= own {
        return None;
    }
    // of several holders of the same prefix, the one whose way out is free first
    let free = |at: usize| fleet.loads[at].egress_until.max(question.now).0;
    let equals = question.holders.iter().filter(|&&(other, length)| other != at && length == tokens);
    let holder = equals.fold(holder, |best, &(other, _)| if free(other) < free(best) { other } else { best });

    let gap = tokens - own;
    let block = fleet.loads[at].spec.kv_block_tokens.max(1);
    let price = fleet.loads[at].spec.price.filter(|_| question.score_unit == super::ScoreUnit::Usd);
    let cost = |side: &PrefillSide| {
        let paid = price.map_or(0.0, |price| (price * side.prefill).0) + side.pull_price.0;
        paid + question.own_weight() * (side.pull + side.prefill).0
    };
    let side = |pull| fleet.prefill_side(question, at, pull);
    let none = side(None);
    let mut best = (cost(&none), None);
    let mut consider = |part: u32| {
        let part = part / block * block;
        let cost = cost(&side(Some((holder, part))));
        if part > 0 && cost < best.0 {
            best = (cost, Some((holder, part)));
        }
    };
    consider(gap);
    // the largest part that comes before the prefill can begin, and the one that ends with it
    for waits_for_prefill in [false, true] {
        let (mut less, mut more) = (0, gap);
        for _ in 0..HALVINGS {
            let middle = less + (more - less) / 2;
            let arrives = fleet.pull_time(question.now, holder, at, middle);
            let rest = if waits_for_prefill { side(Some((holder, middle))).prefill } else { Seconds::ZERO };
            if arrives <= none.queue + rest { less = middle } else { more = middle }
        }
        consider(less);
    }
    best.1
}
