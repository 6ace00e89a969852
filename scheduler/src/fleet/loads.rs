//! The instances with their work, and beside each the little that ranking reads of it.
//!
//! A decision in a large fleet looks at every instance. A [`Load`] lies on half a dozen lines of the processor's cache, of which
//! ranking would touch most; a row lies on one.

use super::load::{Load, PromptQueue, Works};
use super::{Instance, Role};
use crate::cost::{CostModel, LinkCost};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use std::ops::Deref;
use std::sync::Arc;

/// Instances, sorted by id. Read as a slice; what changes one goes through [`Loads::change`], which keeps its rows.
#[derive(Debug, Default)]
pub(super) struct Loads {
    all: Vec<Load>,
    prompts: Vec<PromptRow>,
    answers: Vec<AnswerRow>,
    kinds: Vec<Kind>,
}

/// What instances have in common.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) role: Role,
    pub(super) pool: u32,
    pub(super) cost: Arc<CostModel>,
    pub(super) price: Option<UsdPerHour>,
    pub(super) nic: Option<LinkCost>,
}

impl Kind {
    fn of(spec: &Instance) -> Self {
        let Instance { role, pool, ref cost, price, nic, .. } = *spec;
        Kind { role, pool, cost: cost.clone(), price, nic }
    }

    fn is_of(&self, spec: &Instance) -> bool {
        Arc::ptr_eq(&self.cost, &spec.cost)
            && (self.role, self.pool) == (spec.role, spec.pool)
            && (self.price, self.nic) == (spec.price, spec.nic)
    }
}

/// An instance as ranked by those who compute prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRow {
    /// Among the kinds.
    pub(super) kind: u32,
    /// Sequences that decode there.
    pub(super) sequences: u32,
    pub(super) queue: PromptQueue,
    pub(super) ingress_until: Seconds,
}

/// An instance as ranked by those who decode.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerRow {
    /// Among the kinds.
    pub(super) kind: u32,
    /// Sequences that it has taken on, with their tokens in the end, and a step of them all.
    pub(super) sequences: u32,
    pub(super) kv_tokens: u64,
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
    /// Every instance, by position.
    pub(super) fn prompt_rows(&self) -> &[PromptRow] {
        &self.prompts
    }

    /// Every instance, by position.
    pub(super) fn answer_rows(&self) -> &[AnswerRow] {
        &self.answers
    }

    /// What rows refer to.
    pub(super) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// Changes the work, or the ways, of the instance at `at`.
    pub(super) fn change<T>(&mut self, at: usize, change: impl FnOnce(&mut Load) -> T) -> T {
        let load = &mut self.all[at];
        let answer = change(load);
        let (prompts, answers) = (&mut self.prompts[at], &mut self.answers[at]);
        *prompts = PromptRow {
            kind: prompts.kind,
            sequences: load.batch().sequences,
            queue: load.prompt_queue(),
            ingress_until: load.ingress_until,
        };
        let committed = load.committed;
        if (committed.sequences, committed.kv_tokens) != (answers.sequences, answers.kv_tokens) {
            (answers.sequences, answers.kv_tokens) = (committed.sequences, committed.kv_tokens);
            answers.step = load.step(committed);
        }
        answer
    }

    /// An instance joins, or changes; its work stays.
    pub(super) fn up(&mut self, spec: Instance, works: &Works) {
        match self.all.binary_search_by_key(&spec.id, |load| load.spec.id) {
            Ok(at) => self.all[at].respec(spec, works),
            Err(at) => self.all.insert(at, Load::new(spec)),
        }
        self.make_rows();
    }

    /// An instance is gone.
    pub(super) fn remove(&mut self, at: usize) {
        self.all.remove(at);
        self.make_rows();
    }

    /// What it may do changes; its work stays.
    pub(super) fn set_role(&mut self, at: usize, role: Role) {
        self.all[at].spec.role = role;
        self.make_rows();
    }

    fn make_rows(&mut self) {
        self.kinds.clear();
        self.prompts.clear();
        self.answers.clear();
        for load in &self.all {
            let known = self.kinds.iter().position(|kind| kind.is_of(&load.spec));
            let kind = known.unwrap_or_else(|| {
                self.kinds.push(Kind::of(&load.spec));
                self.kinds.len() - 1
            }) as u32;
            self.prompts.push(PromptRow {
                kind,
                sequences: load.batch().sequences,
                queue: load.prompt_queue(),
                ingress_until: load.ingress_until,
            });
            self.answers.push(AnswerRow {
                kind,
                sequences: load.committed.sequences,
                kv_tokens: load.committed.kv_tokens,
                step: load.step(load.committed),
                capacity_tokens: load.spec.kv_capacity_tokens,
            });
        }
    }
}
