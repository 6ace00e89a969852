//! The operations of a step, counted from their list.

use super::{MemberWork, ModelShape};
use crate::layers::{AttentionSizes, DrawSizes, LayerOps, LayerRope, OpArg, OpSink, Prefill};
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::to_u32;

/// Operations of one step and how often each runs; equal ones are merged.
pub type OpCounts = Vec<(OpSig, u64)>;

/// Operations of the layers, apart by what their weights are stored in.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LayerWork {
    /// Operations whose weights, if any, are stored in their own dtype.
    pub(super) plain: OpCounts,
    /// Matrix products whose weights are stored in the model's format, if it has one.
    pub(super) stored: OpCounts,
}

impl LayerWork {
    /// All operations in one list.
    pub(super) fn merged(self) -> OpCounts {
        let mut ops = self.plain;
        self.stored.into_iter().for_each(|(sig, count)| push(&mut ops, sig, count));
        ops
    }

    /// A counter of the operations of `layers` layers of a model.
    fn of(&mut self, shape: &ModelShape, layers: u64) -> OpCounter<'_> {
        let experts_alone = shape.experts.is_some_and(|experts| experts.quantised_alone);
        OpCounter { work: self, layers, experts_alone }
    }
}

/// Counts the operations of `layers` layers.
struct OpCounter<'a> {
    work: &'a mut LayerWork,
    layers: u64,
    /// Whether formats apply to the routed experts alone.
    experts_alone: bool,
}

impl OpSink for OpCounter<'_> {
    fn push(&mut self, sig: OpSig, args: &[OpArg]) {
        let in_format = args.iter().any(|arg| match arg {
            OpArg::Weight(weight) => {
                weight.is_of_experts() || (weight.is_projection() && !self.experts_alone)
            }
            _ => false,
        });
        let ops = if in_format { &mut self.work.stored } else { &mut self.work.plain };
        if self.layers > 0 {
            push(ops, sig, self.layers);
        }
    }
}

/// What of its share of a model a member of an instance runs.
pub(super) struct StagePart {
    pub(super) work: MemberWork,
    pub(super) embeds: bool,
    pub(super) has_head: bool,
    /// Columns of the logits that it draws from, if it does.
    pub(super) draws: Option<u32>,
    /// Whether it is the first member that shares these layers ([`LayerOps::adds`]).
    pub(super) adds: bool,
}

impl ModelShape {
    /// Operations of one chunk of a prompt: `new_tokens` of one sequence after `context_before`. With `head`,
    /// the last row also goes through the LM head, which only a prompt's last chunk needs.
    pub fn prefill_ops(&self, context_before: u32, new_tokens: u32, head: bool) -> OpCounts {
        self.step_ops(&[Prefill { context: context_before, tokens: new_tokens, last: head }], 0, 0)
    }

    /// Operations of a decode step: one token for each of `batch` sequences with `kv_tokens` keys in total.
    pub fn decode_ops(&self, batch: u32, kv_tokens: u64) -> OpCounts {
        self.step_ops(&[], batch, kv_tokens)
    }

    /// Operations of a mixed step: chunks of prompts and one token for each of `batch` sequences with
    /// `kv_tokens` keys in total. All rows go through the dense operations together.
    pub fn step_ops(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> OpCounts {
        let (work, draws) = (MemberWork::All, Some(self.vocab));
        let part = StagePart { work, embeds: true, has_head: true, draws, adds: true };
        self.stage_ops(&part, parts, batch, kv_tokens)
    }

    /// The same of a member's share of a model.
    pub(super) fn stage_ops(
        &self,
        part: &StagePart,
        parts: &[Prefill],
        batch: u32,
        kv_tokens: u64,
    ) -> OpCounts {
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let drawn = to_u32(parts.iter().filter(|part| part.last).count()) + batch;
        let list = LayerOps { adds: part.adds, ..LayerOps::counted(self) };
        let mut work = LayerWork::default();
        let computes = part.work.computes();
        if part.embeds && computes {
            list.embed(rows, self.vocab, &mut work.of(self, 1));
        }
        self.count_rows(&list, rows, part.work, &mut work);
        if part.has_head && computes {
            list.logits(drawn, rows, &mut work.of(self, 1));
        }
        if let Some(vocab) = part.draws.filter(|_| computes) {
            list.draw(drawn, vocab, DrawSizes::default(), &mut work.of(self, 1));
        }
        if part.work.attends() {
            self.count_attention(&list, parts, (batch, kv_tokens), &mut work);
        }
        if computes {
            self.count_lifts(&list, parts, batch, &mut work);
        }
        work.merged()
    }

    /// All operations of a part of the work but attention, its lifts and head: `tokens` rows through the
    /// layers. The residual stream is f32. With `fused`, projections of the same rows are one product, as in
    /// other engines.
    pub(super) fn dense_ops(&self, tokens: u32, part: MemberWork, fused: bool) -> LayerWork {
        let list = LayerOps { joins: fused, ..LayerOps::counted(self) };
        let mut work = LayerWork::default();
        if part.computes() {
            list.embed(tokens, self.vocab, &mut work.of(self, 1));
        }
        self.count_rows(&list, tokens, part, &mut work);
        work
    }

    /// The attention operations of a mixed step but [`ModelShape::lift_ops`]; `fused` as of
    /// [`ModelShape::dense_ops`].
    pub(super) fn attention_ops(
        &self,
        parts: &[Prefill],
        batch: u32,
        kv_tokens: u64,
        fused: bool,
    ) -> LayerWork {
        let list = LayerOps { joins: fused, ..LayerOps::counted(self) };
        let mut work = LayerWork::default();
        self.count_attention(&list, parts, (batch, kv_tokens), &mut work);
        work
    }

    /// What latent attention does to the queries that attend to latents; nothing in other attention.
    pub(super) fn lift_ops(&self, parts: &[Prefill], batch: u32) -> OpCounts {
        let mut work = LayerWork::default();
        self.count_lifts(&LayerOps::counted(self), parts, batch, &mut work);
        work.merged()
    }

    /// The last norm, the LM head and the draw over `rows` rows, which are first selected from `tokens` if
    /// these are more.
    pub(super) fn head_ops(&self, rows: u32, tokens: u32) -> OpCounts {
        let (list, mut work) = (LayerOps::counted(self), LayerWork::default());
        list.logits(rows, tokens, &mut work.of(self, 1));
        list.draw(rows, self.vocab, DrawSizes::default(), &mut work.of(self, 1));
        work.merged()
    }

    /// What layers do row by row.
    fn count_rows(&self, list: &LayerOps<'_>, tokens: u32, part: MemberWork, work: &mut LayerWork) {
        let full = self.full_layers();
        if part.computes() {
            list.rotations(tokens, tokens, &mut work.of(self, 1));
            let bare = self.style.bare_layers() as u64;
            list.attention_rows(tokens, &mut work.of(self, u64::from(full).saturating_sub(bare)));
            if bare > 0 {
                let without = LayerOps { rope: LayerRope::Absent, ..*list };
                without.attention_rows(tokens, &mut work.of(self, bare));
            }
        }
        if part.attends() {
            list.write(tokens, &mut work.of(self, full.into()));
        }
        if !part.computes() {
            return;
        }
        list.attention_sum(tokens, &mut work.of(self, full.into()));
        if let Some(linear) = &self.linear {
            list.linear_rows(linear, tokens, &mut work.of(self, (self.layers() - full).into()));
        }
        for (layers, has_experts) in self.mlp_layers().into_iter().zip([false, true]) {
            list.mlp(tokens, has_experts, &mut work.of(self, layers.into()));
        }
    }

    fn count_attention(
        &self,
        list: &LayerOps<'_>,
        parts: &[Prefill],
        (batch, kv_tokens): (u32, u64),
        work: &mut LayerWork,
    ) {
        let groups = self.window_groups();
        let windows = groups.iter().map(|(window, _)| *window);
        let sizes = AttentionSizes::counted(self, parts, (batch, kv_tokens), windows);
        for (which, (window, layers)) in groups.into_iter().enumerate() {
            let ops = &mut work.of(self, layers);
            match (&self.latent, sizes.expanded_pages_max) {
                _ if parts.is_empty() => {}
                (Some(latent), _) if list.joins => list.attend_up(latent, parts, &sizes, ops),
                (Some(latent), Some(pages_max)) => {
                    list.move_queries(latent, &sizes, ops);
                    list.attend_expanded(latent, pages_max, &sizes, ops);
                    list.cut_values(latent, &sizes, ops);
                }
                _ => list.attend_prefills((which, window), &sizes, ops),
            }
            list.attend_decodes(which, &sizes, ops);
        }
        let Some(linear) = &self.linear else { return };
        let ops = &mut work.of(self, (self.layers() - self.full_layers()).into());
        if !parts.is_empty() {
            list.linear_prefill(linear, parts, ops);
        }
        if batch > 0 {
            list.linear_states(linear, batch, ops);
        }
    }

    fn count_lifts(&self, list: &LayerOps<'_>, parts: &[Prefill], batch: u32, work: &mut LayerWork) {
        let Some(latent) = &self.latent else { return };
        let lifted = AttentionSizes::counted(self, parts, (batch, 0), std::iter::empty()).lifted();
        let ops = &mut work.of(self, self.layers().into());
        list.lift(latent, lifted, ops);
        list.lower(latent, lifted, ops);
    }

    /// The windows of the layers that keep KV, and how many layers have each.
    fn window_groups(&self) -> Vec<(Option<u32>, u64)> {
        let mut groups: Vec<(Option<u32>, u64)> = Vec::new();
        for &window in self.windows.iter().take(self.full_layers() as usize) {
            match groups.iter_mut().find(|(w, _)| *w == window) {
                Some((_, layers)) => *layers += 1,
                None => groups.push((window, 1)),
            }
        }
        groups
    }
}

/// Adds `count` runs of `sig` to `ops`.
fn push(ops: &mut OpCounts, sig: OpSig, count: u64) {
    match ops.iter_mut().find(|(known, _)| *known == sig) {
        Some((_, runs)) => *runs += count,
        None => ops.push((sig, count)),
    }
}

#[cfg(test)]
#[path = "counted_tests.rs"]
pub(crate) mod tests;
