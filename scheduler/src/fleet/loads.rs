//! All instances with their work, and a compact row of each for ranking.
//!
//! A decision in a large fleet scans all instances. A [`Load`] spans half a dozen cache lines, most of which
//! ranking would touch; a row fits in one.

use super::event::piece;
use super::load::{Load, PromptQueue, Works};
use super::{Instance, RequestId, Role};
use crate::cost::{CostModel, LinkCost, SizedCorrections};
use crate::kv::parts::PageParts;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Seconds, UsdPerHour};
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Instances, sorted by id. Readable as a slice; changes go through [`Loads::change`], which updates the
/// rows.
#[derive(Debug, Default)]
pub(super) struct Loads {
    all: Vec<Load>,
    kinds: Vec<Kind>,
    /// Rows for prefill, by kind, then by position.
    prompts: Vec<PromptRow>,
    /// Rows for decode, in the same order.
    answers: Vec<AnswerRow>,
    /// Index of each instance's rows, by position.
    rows: Vec<usize>,
    /// Tokens per KV block, by position.
    block_tokens: Vec<u32>,
    /// Number of instances that have work.
    busy: usize,
    /// Number of instances that compute.
    computing: usize,
}

/// The properties that instances of one kind share.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) role: Role,
    pub(super) pool: u32,
    pub(super) cost: Arc<CostModel>,
    pub(super) price: Option<UsdPerHour>,
    pub(super) nic: Option<LinkCost>,
    /// The pages of its blocks, and tokens in one.
    kv: (PageParts, u32),
    pub(super) corrections: SizedCorrections,
    step_tokens_max: u32,
    rows: Range<usize>,
}

impl Kind {
    fn of(load: &Load) -> Self {
        let Instance { role, pool, ref cost, price, nic, ref kv_parts, kv_block_tokens, .. } = load.spec;
        let kv = (kv_parts.clone(), kv_block_tokens);
        let corrections = load.learner.corrections();
        let (cost, step_tokens_max) = (cost.clone(), load.spec.step_tokens_max);
        Kind { role, pool, cost, price, nic, kv, corrections, step_tokens_max, rows: 0..0 }
    }

    /// Time of a step of `sequences` sequences.
    pub(super) fn step(&self, sequences: u32, kv_tokens: u64) -> Seconds {
        self.cost.decode_step_s(sequences, kv_tokens) * self.corrections.step_of(sequences)
    }

    /// Corrected time to compute `new_tokens` of a prompt after `context_before` tokens.
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let factor = self.corrections.prefill_of(piece(new_tokens, self.step_tokens_max));
        self.cost.prefill_s(context_before, new_tokens) * factor
    }

    /// Tokens of memory that a sequence of `tokens` holds.
    pub(super) fn tokens_held(&self, tokens: u64) -> u64 {
        self.kv.0.tokens_held(tokens, self.kv.1)
    }

    fn is_of(&self, load: &Load) -> bool {
        let spec = &load.spec;
        Arc::ptr_eq(&self.cost, &spec.cost)
            && (self.role, self.pool) == (spec.role, spec.pool)
            && (self.price, self.nic) == (spec.price, spec.nic)
            && (&self.kv.0, self.kv.1) == (&spec.kv_parts, spec.kv_block_tokens)
            && (self.corrections, self.step_tokens_max) == (load.learner.corrections(), spec.step_tokens_max)
    }
}

/// An instance's row in the ranking for prefill.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRow {
    /// The instance's position.
    pub(super) at: u32,
    /// Number of sequences that a prompt there stalls.
    pub(super) stalled: u32,
    pub(super) queue: PromptQueue,
    pub(super) ingress_until: Seconds,
}

/// An instance's row in the ranking for decode.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerRow {
    /// The instance's position.
    pub(super) at: u32,
    /// Number of accepted sequences.
    pub(super) sequences: u32,
    /// Their total final tokens.
    pub(super) kv_tokens: u64,
    /// Tokens of memory that they will then hold.
    pub(super) promised: u64,
    /// Time of a step of all decoding requests.
    pub(super) step: Seconds,
    pub(super) capacity_tokens: u64,
}

impl Deref for Loads {
    type Target = [Load];

    fn deref(&self) -> &[Load] {
        &self.all
    }
}

impl Loads {
    /// The kinds of instances, in order of their first ones.
    pub(super) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// The instances of `kind`, by position.
    pub(super) fn prompt_rows(&self, kind: &Kind) -> &[PromptRow] {
        &self.prompts[kind.rows.clone()]
    }

    /// The instances of `kind`, by position.
    pub(super) fn answer_rows(&self, kind: &Kind) -> &[AnswerRow] {
        &self.answers[kind.rows.clone()]
    }

    /// Tokens in a KV block of the instance at `at`.
    pub(super) fn kv_block_tokens(&self, at: usize) -> u32 {
        self.block_tokens[at]
    }

    /// Share of the instances that compute which have work, with one more if one has none.
    pub(super) fn busy_share(&self) -> f64 {
        (self.busy + 1).min(self.computing) as f64 / self.computing.max(1) as f64
    }

    /// Changes the work, or the links, of the instance at `at`.
    pub(super) fn change<T>(&mut self, at: usize, change: impl FnOnce(&mut Load) -> T) -> T {
        let load = &mut self.all[at];
        let was_busy = load.is_busy();
        let answer = change(load);
        self.busy = self.busy + usize::from(load.is_busy()) - usize::from(was_busy);
        let (row, answers) = (self.rows[at], &mut self.answers[self.rows[at]]);
        self.prompts[row] = PromptRow::of(at, load);
        let committed = load.committed;
        if (committed.sequences, committed.kv_tokens) != (answers.sequences, answers.kv_tokens) {
            (answers.sequences, answers.kv_tokens) = (committed.sequences, committed.kv_tokens);
            answers.promised = load.promised;
            answers.step = load.step(committed);
        }
        answer
    }

    /// Adds `tokens` tokens to each of `requests` that decodes on the instance at `at`; rows do not change.
    pub(super) fn grow(&mut self, at: usize, requests: &[RequestId], tokens: u32) {
        self.all[at].grow(requests, tokens);
    }

    /// Adds an instance, or changes its properties; its work stays.
    pub(super) fn up(&mut self, spec: Instance, works: &Works) {
        match self.all.binary_search_by_key(&spec.id, |load| load.spec.id) {
            Ok(at) => self.all[at].respec(spec, works),
            Err(at) => self.all.insert(at, Load::new(spec)),
        }
        self.make_rows();
    }

    /// Changes an instance's corrections, and the predicted time of its prompts accordingly.
    pub(super) fn learn(&mut self, at: usize, learn: impl FnOnce(&mut Load), works: &mut Works) {
        let load = &mut self.all[at];
        let before = load.learner.corrections();
        learn(load);
        let after = load.learner.corrections();
        if after == before {
            return;
        }
        if after.prefill != before.prefill {
            load.correct_queue(&before, works);
        }
        self.make_rows();
    }

    /// Records that an instance is measured, or tried, after this many placements.
    pub(super) fn measured_after(&mut self, at: usize, placed: u64) {
        self.all[at].measured_after = placed;
    }

    /// Removes an instance.
    pub(super) fn remove(&mut self, at: usize) {
        self.all.remove(at);
        self.make_rows();
    }

    /// Changes an instance's role; its work stays.
    pub(super) fn set_role(&mut self, at: usize, role: Role) {
        self.all[at].spec.role = role;
        self.make_rows();
    }

    fn make_rows(&mut self) {
        self.busy = self.all.iter().filter(|load| load.is_busy()).count();
        self.computing = self.all.iter().filter(|load| load.spec.role.computes()).count();
        self.kinds.clear();
        let mut kind_of = |load: &Load| {
            let known = self.kinds.iter().position(|kind| kind.is_of(load));
            known.unwrap_or_else(|| {
                self.kinds.push(Kind::of(load));
                self.kinds.len() - 1
            })
        };
        let mut order: Vec<(usize, usize)> = self.all.iter().map(&mut kind_of).zip(0..).collect();
        order.sort_unstable();
        self.prompts.clear();
        self.answers.clear();
        self.rows.resize(self.all.len(), 0);
        self.block_tokens.clear();
        self.block_tokens.extend(self.all.iter().map(|load| load.spec.kv_block_tokens));
        for (row, (kind, at)) in order.into_iter().enumerate() {
            let rows = &mut self.kinds[kind].rows;
            *rows = if rows.end == 0 { row..row + 1 } else { rows.start..row + 1 };
            self.rows[at] = row;
            self.prompts.push(PromptRow::of(at, &self.all[at]));
            self.answers.push(AnswerRow::of(at, &self.all[at]));
        }
    }
}

impl PromptRow {
    fn of(at: usize, load: &Load) -> Self {
        PromptRow {
            at: to_u32(at),
            stalled: load.stalled(),
            queue: load.prompt_queue(),
            ingress_until: load.ingress_until,
        }
    }
}

impl AnswerRow {
    fn of(at: usize, load: &Load) -> Self {
        AnswerRow {
            at: to_u32(at),
            sequences: load.committed.sequences,
            kv_tokens: load.committed.kv_tokens,
            promised: load.promised,
            step: load.step(load.committed),
            capacity_tokens: load.spec.kv_capacity_tokens,
        }
    }
}
