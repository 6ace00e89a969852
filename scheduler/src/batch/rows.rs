//! The number of prompt rows in a step: as many as its size allows, and beside decodes no more than their TBT
//! objectives allow. Without an objective, a step with prompts may take twice as long as one without: decodes
//! read the weights anyway, and up to there computing takes no longer than that.
//!
//! Where nothing decodes and all prompts are handed off, a prompt joins those that end in a step only if the
//! sum of TTFTs becomes smaller: it delays theirs by what it adds to the step, and saves the rest of a
//! separate step for itself and all that wait behind it. Beyond the ridge of the roofline it saves next to
//! nothing. Engines with a fixed number of rows beside decodes fill their steps.

use super::{BatchLimits, PartyId, Place, Sequence};
use crate::cost::{CostModel, Prefill, SizedCorrections};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Rows are added in tiles of this size, which matrix units compute at once. Beside decodes at least one tile
/// runs, so that prompts progress even if the objective cannot be met.
pub(super) const TILE: u32 = 16;

/// The share of the objective up to which a step is filled; the rest allows for prediction errors.
const FILLED: f64 = 0.9;

/// The time of a step with prompts beside decodes without an objective, in steps without prompts.
const SLOWER_BESIDE_PROMPTS: f64 = 2.0;

/// When a request is wanted, as far as it matters to an instance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Urgency {
    /// Its due time on the fleet's clock.
    pub due: Seconds,
    /// Whether it may be preempted by requests that are due earlier: flex requests, whose answers are not
    /// read as they stream.
    pub gives_way: bool,
    /// TBT objective, which steps in which it decodes must keep.
    pub tbt_slo: Option<Seconds>,
    /// The party whose share of the instance it uses.
    #[serde(default)]
    pub party: PartyId,
}

impl Urgency {
    /// The urgency of a request without objectives that may not be preempted.
    pub fn due_at(due: Seconds) -> Self {
        Urgency { due, gives_way: false, tbt_slo: None, party: PartyId::NONE }
    }
}

/// The decoding sequences of a step, as far as they limit it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Decodes {
    pub(super) sequences: u32,
    pub(super) kv_tokens: u64,
    /// The tightest TBT objective of all.
    tbt_slo: Option<Seconds>,
}

impl Decodes {
    pub(super) fn add<T>(&mut self, sequence: &Sequence<T>) {
        self.sequences += 1;
        self.kv_tokens += u64::from(sequence.length);
        let tighter = |slo: Seconds| self.tbt_slo.map_or(slo, |tightest| tightest.min(slo));
        self.tbt_slo = sequence.urgency.tbt_slo.map(tighter).or(self.tbt_slo);
    }
}

/// What the shares of several parties leave of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepShare {
    /// The time that it may take.
    pub(super) within: Seconds,
    /// Prompt rows that it has in any case.
    pub(super) rows_min: u32,
}

/// The remaining prompt rows of a step, while prompts are added in their order.
#[derive(Debug)]
pub(super) struct PromptRows {
    left: u32,
    pace: Option<Pace>,
    joint: Option<JointPrompts>,
}

/// Prompts of a step up to which the next one is compared: a step with more short ones is filled.
const COMPARED_MAX: usize = 32;

/// The prompts of a step in which nothing decodes.
#[derive(Debug)]
struct JointPrompts {
    cost: Arc<CostModel>,
    corrections: SizedCorrections,
    pieces: Vec<Prefill>,
    /// Number of them that end in the step.
    ending: u32,
    /// Number of all prompts that are here.
    prompts: u32,
}

impl JointPrompts {
    /// Whether the sum of TTFTs becomes smaller, or stays, if `piece` joins the others.
    fn pays(&mut self, piece: Prefill) -> bool {
        if self.ending == 0 || self.pieces.len() >= COMPARED_MAX {
            return true;
        }
        let (alone, before) = (self.time(&[piece]), self.time(&self.pieces));
        self.pieces.push(piece);
        let adds = self.time(&self.pieces) - before;
        self.pieces.pop();
        let waiting = self.prompts.saturating_sub(to_u32(self.pieces.len()));
        (alone - adds) * f64::from(waiting) >= adds * f64::from(self.ending)
    }

    fn time(&self, pieces: &[Prefill]) -> Seconds {
        self.corrections.step_s(&self.cost, pieces, (0, 0))
    }

    fn add(&mut self, piece: Prefill) {
        self.ending += u32::from(piece.last);
        self.pieces.push(piece);
    }
}

/// A time limit for a step.
#[derive(Debug)]
struct Pace {
    cost: Arc<CostModel>,
    corrections: SizedCorrections,
    within: Seconds,
    /// Rows that a step has in any case.
    rows_min: u32,
    decodes: Decodes,
    /// Prompt chunks that are in the step already.
    pieces: Vec<Prefill>,
}

impl PromptRows {
    /// The rows that `decodes` leave in a step. `handed_off` is the number of prompts here if all of them are
    /// handed off, and else 0: if some decode here afterwards, the next step is not one of prompts alone.
    pub(super) fn new(
        limits: &BatchLimits,
        cost: Option<(&Arc<CostModel>, SizedCorrections)>,
        decodes: Decodes,
        handed_off: u32,
        share: Option<StepShare>,
    ) -> Self {
        let mut left = limits.step_tokens_max.saturating_sub(decodes.sequences);
        let shared = share.map(|share| (share.within, share.rows_min));
        let limited = match (limits.prefill_tokens_beside_decode_max, cost) {
            _ if decodes.sequences == 0 => shared,
            (None, Some((cost, corrections))) => {
                let factor = corrections.step_of(decodes.sequences);
                let alone = cost.decode_step_s(decodes.sequences, decodes.kv_tokens) * factor;
                let own = limit(decodes.tbt_slo, alone);
                Some(shared.map_or(own, |share| (share.0.min(own.0), share.1.min(own.1))))
            }
            (fixed, _) => {
                left = left.min(fixed.unwrap_or(BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX));
                shared
            }
        };
        let pace = limited.zip(cost).map(|((within, rows_min), (cost, corrections))| {
            let (cost, pieces) = (cost.clone(), Vec::new());
            Pace { cost, corrections, within, rows_min, decodes, pieces }
        });
        let is_sized = limits.prefill_tokens_beside_decode_max.is_none();
        let joint = cost.filter(|_| is_sized && decodes.sequences == 0 && handed_off > 1).map(
            |(cost, corrections)| {
                let (cost, pieces) = (cost.clone(), Vec::new());
                JointPrompts { cost, corrections, pieces, ending: 0, prompts: handed_off }
            },
        );
        PromptRows { left, pace, joint }
    }

    /// Whether the step has room for more prompt rows.
    pub(super) fn are_left(&self) -> bool {
        self.left > 0
    }

    /// Takes rows for a prompt with `context` computed tokens, at most `wanted`; `ends` says that these are
    /// its last ones.
    pub(super) fn take(&mut self, context: u32, wanted: u32, ends: bool) -> u32 {
        let most = wanted.min(self.left);
        if most == 0 {
            return 0;
        }
        let last = ends && most == wanted;
        if !self.pays(context, wanted, ends) {
            self.left = 0;
            return 0;
        }
        let rows = self.pace.as_mut().map_or(most, |pace| pace.fit(context, most, last));
        if let Some(joint) = self.joint.as_mut().filter(|_| rows > 0) {
            joint.add(Prefill { context, tokens: rows, last: last && rows == most });
        }
        self.left = if rows < most { 0 } else { self.left - rows };
        rows
    }

    /// Whether it pays that a prompt with `context` computed tokens joins the prompts of the step.
    fn pays(&mut self, context: u32, wanted: u32, ends: bool) -> bool {
        let tokens = wanted.min(self.left);
        let piece = Prefill { context, tokens, last: ends && tokens == wanted };
        self.joint.as_mut().is_none_or(|joint| joint.pays(piece))
    }
}

impl Pace {
    fn fit(&mut self, context: u32, most: u32, ends: bool) -> u32 {
        let Pace { cost, corrections, within, rows_min, decodes, pieces } = self;
        let decodes = (decodes.sequences, decodes.kv_tokens);
        let mut fits = |tokens: u32| {
            pieces.push(Prefill { context, tokens, last: ends && tokens == most });
            let time = corrections.step_s(cost, pieces, decodes);
            pieces.pop();
            time <= *within
        };
        let mut rows = most;
        if !fits(most) {
            let (mut fit, mut too_many) = (0, most.div_ceil(TILE));
            while fit + 1 < too_many {
                let middle = fit + (too_many - fit) / 2;
                if fits(middle * TILE) { fit = middle } else { too_many = middle }
            }
            rows = fit * TILE;
        }
        let missing = rows_min.saturating_sub(pieces.iter().map(|piece| piece.tokens).sum());
        if rows < missing {
            rows = missing.min(most);
        }
        if rows > 0 {
            pieces.push(Prefill { context, tokens: rows, last: ends && rows == most });
        }
        rows
    }
}

/// The time of a step beside decodes that take `alone`, and the rows that it has in any case.
fn limit(tbt_slo: Option<Seconds>, alone: Seconds) -> (Seconds, u32) {
    match tbt_slo {
        Some(slo) => (slo * FILLED, TILE),
        None => (alone * SLOWER_BESIDE_PROMPTS, BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX),
    }
}

/// Estimate of the prompt rows beside `sequences` decodes with `kv_tokens` tokens of context in steps limited
/// by `tbt_slo`, if they have one. It is about what [`PromptRows`] gives, from two calls of the cost model.
/// `row_s` is the time of a row in a full step.
pub(crate) fn rows_beside(
    (cost, corrections): (&CostModel, SizedCorrections),
    (step_tokens_max, row_s): (u32, Seconds),
    (sequences, kv_tokens): (u32, u64),
    tbt_slo: Option<Seconds>,
) -> u32 {
    let most = step_tokens_max.saturating_sub(sequences).max(1);
    let alone = cost.decode_step_s(sequences, kv_tokens) * corrections.step_of(sequences);
    let (within, rows_min) = limit(tbt_slo, alone);
    if alone > within {
        return rows_min.min(most);
    }
    let full = Prefill { context: 0, tokens: most, last: false };
    let over_s = (corrections.step_s(cost, &[full], (sequences, kv_tokens)) - within).0;
    let row_s = row_s * corrections.prefill_of(most);
    // the cast turns negative numbers and NaN into 0
    let too_many = to_u32((over_s.max(0.0) / row_s.0.max(f64::MIN_POSITIVE)).ceil());
    if too_many == 0 { most } else { (most.saturating_sub(too_many) / TILE * TILE).max(rows_min.min(most)) }
}

/// The prompt rows left in the next step, while waiting prompts are considered in their order.
pub(super) struct StepRoom {
    rows: PromptRows,
    /// Running prompts that were not passed yet, the last first.
    prompts: Vec<(Place, (u32, u32))>,
}

impl StepRoom {
    pub(super) fn new(rows: PromptRows, prompts: Vec<(Place, (u32, u32))>) -> Self {
        StepRoom { rows, prompts }
    }

    /// Whether the prompts before `place` leave any rows. Places must be queried in their order.
    pub(super) fn is_left_for(&mut self, place: Place) -> bool {
        while let Some((_, (context, pending))) = self.prompts.pop_if(|(earlier, _)| *earlier < place) {
            self.take(context, pending);
        }
        self.rows.are_left()
    }

    /// Whether a prompt with `context` computed tokens joins the prompts of the step. If not, there are no
    /// rows for later ones either.
    pub(super) fn admits(&mut self, context: u32, pending: u32) -> bool {
        let pays = self.rows.pays(context, pending, true);
        self.rows.left *= u32::from(pays);
        pays
    }

    pub(super) fn take(&mut self, context: u32, pending: u32) {
        self.rows.take(context, pending, true);
    }
}
