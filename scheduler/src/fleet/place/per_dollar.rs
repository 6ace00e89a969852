//! The least cost of a request's use of instances and of waiting (design: `busy dollars + w * seconds`).
//!
//! An instance that decodes keeps the answers to its prompts, except from instances that decode for less and
//! have room ([`may_hand_off`]).
//!
//! Small fleets are compared pair by pair. In large ones every instance is first ranked alone
//! ([`super::ranks`]), and the best of each side is paired with the best few of the other: a decision's time
//! grows with the number of instances, not with its square.

use super::super::load::Load;
use super::super::{Fleet, Role};
use super::ranks::{best_decoders, best_prefills};
use super::{Part, Pick, PrefillSide, Question, ScoreUnit};
use mixfleet_hal::units::Seconds;

/// Maximum number of pairs that are compared without a shortlist.
pub(super) const PAIRS_MAX: usize = 64;
/// Number of candidates of each side in larger fleets.
const SHORTLIST: usize = 4;
/// Number of sequences of the batch by which the cost of decoding is compared.
const REFERENCE_BATCH: u32 = 8;
/// Maximum cost per token of an instance that takes over answers from one that could decode them itself, as a
/// share of that one's cost. A smaller saving would not pay for the room reserved in both, and for the gap
/// after the first token.
const HAND_OFF_BELOW: f64 = 0.95;
/// Halvings in the search for the part of a prefix that takes as long to pull as the rest to compute, within
/// 2 %.
const HALVINGS: u32 = 6;

pub(super) fn picks(fleet: &Fleet, question: &Question<'_>) -> Vec<Pick> {
    let able = |can| fleet.able_for(question.arrival, can).map(|(at, _)| at);
    // More instances make more pairs, however they are divided.
    let few = fleet.loads.len() <= PAIRS_MAX + 1
        && able(Role::prefills).count() * able(Role::decodes).count() <= PAIRS_MAX;
    let (prefills, decodes): (Vec<usize>, Vec<usize>);
    if few {
        (prefills, decodes) = (able(Role::prefills).collect(), able(Role::decodes).collect());
    } else {
        let mut best = best_prefills(fleet, question, SHORTLIST);
        let mut least = best_decoders(fleet, question, SHORTLIST);
        // Placements without a transfer must be able to win.
        let may = |at: usize, can| question.arrival.may_use(&fleet.loads[at].spec, can);
        let as_decoders: Vec<usize> = best.iter().copied().filter(|&at| may(at, Role::decodes)).collect();
        let as_prefills: Vec<usize> = least.iter().copied().filter(|&at| may(at, Role::prefills)).collect();
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
            let considered = few || p == 0 || d == 0;
            if prefill == decode || considered && may_hand_off(fleet, question, prefill, decode) {
                picks.push(Pick { prefill, decode, pull });
            }
        }
    }
    picks
}

/// Whether an answer to a prompt computed on one instance may decode on another. True if the first one does
/// not decode or can never hold it, or the other one has room for it and decodes it for clearly less, in
/// money or, without prices, in time.
fn may_hand_off(fleet: &Fleet, question: &Question<'_>, prefill: usize, decode: usize) -> bool {
    let (from, to) = (&fleet.loads[prefill], &fleet.loads[decode]);
    let prompt = u64::from(question.arrival.prompt_tokens);
    let decodes = question.arrival.may_use(&from.spec, Role::decodes);
    if !decodes || !from.fits(prompt + u64::from(question.arrival.max_tokens)) {
        return true;
    }
    let cost = |load: &Load| {
        let step = load.spec.cost.decode_step_s(REFERENCE_BATCH, u64::from(REFERENCE_BATCH) * prompt);
        let price = load.spec.price.filter(|_| question.score_unit == ScoreUnit::Usd);
        price.map_or(step.0, |price| (price * step).0)
    };
    to.has_room(prompt + u64::from(question.output_tokens)) && cost(to) < HAND_OFF_BELOW * cost(from)
}

/// The cheapest on instance `at` of recomputing, pulling the longest prefix that any instance holds, or
/// pulling a part of it.
fn best_pull(fleet: &Fleet, question: &Question<'_>, at: usize) -> Option<Part> {
    let own = question.cached_on(at);
    let (holder, tokens) = question.longest().filter(|_| fleet.config.pull)?;
    if holder == at || tokens <= own {
        return None;
    }
    // Among holders of the same prefix, the one whose link out is free first is chosen.
    let free = |at: usize| fleet.loads[at].egress_until.max(question.now).0;
    let equals = question.longest_holders.iter().filter(|&&other| other != at);
    let holder = equals.fold(holder, |best, &other| if free(other) < free(best) { other } else { best });

    let gap = tokens - own;
    let block = fleet.loads[at].spec.kv_block_tokens.max(1);
    let price = fleet.loads[at].spec.price.filter(|_| question.score_unit == ScoreUnit::Usd);
    let cost = |side: &PrefillSide| {
        let paid =
            price.map_or(0.0, |price| (price * side.prefill).0) * question.busy_share + side.pull_price.0;
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
    let arrives = fleet.pull_times(question.now, holder, at);
    // These are the largest part that arrives before the prefill can begin, and the one that arrives when it
    // ends.
    for waits_for_prefill in [false, true] {
        let (mut less, mut more) = (0, gap);
        for _ in 0..HALVINGS {
            let middle = less + (more - less) / 2;
            let known = own + middle;
            let rest = if waits_for_prefill {
                fleet.loads[at].prefill_s(known, question.arrival.prompt_tokens - known)
            } else {
                Seconds::ZERO
            };
            if arrives(middle) <= none.queue + rest { less = middle } else { more = middle }
        }
        consider(less);
    }
    best.1
}
