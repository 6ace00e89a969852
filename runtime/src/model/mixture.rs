//! The commands of a layer after attention: an MLP, or experts.

use super::arena::{Arena, ExpertArena, rows_of};
use super::experts::Mixture;
use super::product::{Out, gemm};
use super::{ExpertWeights, MlpWeights, ModelConfig, Tensor};
use mixfleet_hal::{Cmd, DType, Error, ExpertRouting, GroupedRows, OpSig, Result, Scoring, Slice};

/// A matrix, and its bias if it has one.
type Biased<'a> = (&'a Tensor, Option<&'a Tensor>);

/// A step's rows on their way through an MLP or experts.
pub(super) struct MlpStep<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) arena: &'a Arena,
    pub(super) tokens: u32,
    /// Dtype of activations.
    pub(super) x: DType,
    /// The normed rows, `[tokens, hidden]`.
    pub(super) normed: &'a Slice,
}

impl MlpStep<'_> {
    /// Appends the commands of an MLP whose inner layer has this length.
    pub(super) fn mlp(&self, w: &MlpWeights, inner: u32, out: Out<'_>, list: &mut Vec<Cmd>) -> Result<()> {
        let MlpStep { arena, tokens, x, normed, .. } = *self;
        let [gate, up, result] = [&arena.gate, &arena.up, &arena.inner].map(|s| rows_of(s, tokens, inner, x));
        let (n, k) = (inner, self.config.hidden);
        list.push(gemm(tokens, normed, x, &w.gate, w.gate_bias.as_ref(), n, k, Out::Set(&gate, x))?);
        list.push(gemm(tokens, normed, x, &w.up, w.up_bias.as_ref(), n, k, Out::Set(&up, x))?);
        let elements = u64::from(tokens) * u64::from(inner);
        list.push(Cmd::new(OpSig::SiluMul { elements, x }, &[gate, up, result.clone()])?);
        list.push(gemm(tokens, &result, x, &w.down, w.down_bias.as_ref(), k, n, out)?);
        Ok(())
    }

    /// Appends the commands of layer `at` with experts: the shared one first, if there is one, then those
    /// that rows choose. What comes first is added to the residual or, on members that are not the first,
    /// replaces it.
    pub(super) fn experts(
        &self,
        at: usize,
        (shared, w): (Option<&MlpWeights>, &ExpertWeights),
        (residual, adds): (&Slice, bool),
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let none = || Error::invalid(format!("layer {at} has no experts"));
        let experts = self.config.experts_of(at).ok_or_else(none)?;
        let memory = self.arena.experts.as_ref().ok_or_else(none)?;
        let mut adds = adds;
        if let Some(shared) = shared {
            match &w.shared_gate {
                Some(gate) => self.gated(experts.shared, (shared, gate), memory, (residual, adds), list)?,
                None => {
                    let out = if adds { Out::Add(residual) } else { Out::Set(residual, DType::F32) };
                    self.mlp(shared, experts.shared, out, list)?;
                }
            }
            adds = true;
        }
        self.routed(experts, w, memory, (residual, adds), list)
    }

    /// The shared expert, scaled by its gate.
    fn gated(
        &self,
        inner: u32,
        (shared, gate): (&MlpWeights, &Tensor),
        memory: &ExpertArena,
        (residual, adds): (&Slice, bool),
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let routing = ExpertRouting { scoring: Scoring::Sigmoid, ..ExpertRouting::softmax(1, 1, false) };
        let made = rows_of(&memory.made, self.tokens, self.config.hidden, self.x);
        self.choose(&routing, (gate, None), None, memory, list)?;
        self.mlp(shared, inner, Out::Set(&made, self.x), list)?;
        list.push(self.combine(1, memory, (residual, adds))?);
        Ok(())
    }

    fn routed(
        &self,
        experts: &Mixture,
        w: &ExpertWeights,
        memory: &ExpertArena,
        (residual, adds): (&Slice, bool),
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let MlpStep { arena, tokens, x, .. } = *self;
        let (hidden, inner, active) = (self.config.hidden, experts.intermediate, experts.routing.active);
        let [router_bias, gate_bias, down_bias] = w.biases.each_ref().map(Option::as_ref);
        self.choose(&experts.routing, (&w.router, router_bias), w.correction.as_ref(), memory, list)?;
        let choices = tokens * active;
        let (cost, held) = (experts.cost(), &experts.held);
        let product = |of_tokens, (from, to): (&Slice, &Slice), (weight, bias): Biased<'_>, n, k| {
            let (grouped, has_bias): (GroupedRows, bool) = (cost.grouped(tokens, of_tokens), bias.is_some());
            let sig = OpSig::GroupedGemm { grouped, n, k, x, weight: weight.kind(), out: x, bias: has_bias };
            let mut args = vec![from.clone()];
            args.extend(weight.arrays().cloned());
            args.extend(bias.map(|bias| bias.slice.clone()));
            args.push(rows_of(&memory.order, choices, 1, DType::U32));
            let words = |count: usize| count as u64 * DType::U32.size_bytes();
            args.push(memory.starts.range(words(held.start as usize), words(held.len() + 1)));
            args.push(to.clone());
            Cmd::new(sig, &args)
        };
        let of = |slice: &Slice| rows_of(slice, choices, inner, x);
        let (result, made) = (of(&arena.inner), rows_of(&memory.made, choices, hidden, x));
        let elements = u64::from(choices) * u64::from(inner);
        match (&w.up, experts.clamped) {
            (None, Some([alpha, limit])) => {
                let both = rows_of(&arena.gate, choices, 2 * inner, x);
                let weight = (&w.gate, gate_bias);
                list.push(product(true, (self.normed, &both), weight, 2 * inner, hidden)?);
                let sig = OpSig::ClampedSwiglu { elements, alpha, limit, x };
                list.push(Cmd::new(sig, &[both, result.clone()])?);
            }
            (Some(up_weight), None) => {
                let (gate, up) = (of(&arena.gate), of(&arena.up));
                list.push(product(true, (self.normed, &gate), (&w.gate, None), inner, hidden)?);
                list.push(product(true, (self.normed, &up), (up_weight, None), inner, hidden)?);
                list.push(Cmd::new(OpSig::SiluMul { elements, x }, &[gate, up, result.clone()])?);
            }
            _ => return Err(Error::invalid("gate and up of experts are neither apart nor clamped")),
        }
        if experts.is_share() {
            // what experts of other members make of a row is theirs to add
            let (bytes, word) = (u64::from(choices) * u64::from(hidden) * x.size_bytes(), 0);
            list.push(Cmd::new(OpSig::Fill { bytes, word }, std::slice::from_ref(&made))?);
        }
        list.push(product(false, (&result, &made), (&w.down, down_bias), hidden, inner)?);
        list.push(self.combine(active, memory, (residual, adds))?);
        Ok(())
    }

    /// The router's product, and the choice.
    fn choose(
        &self,
        routing: &ExpertRouting,
        (router, bias): Biased<'_>,
        correction: Option<&Tensor>,
        memory: &ExpertArena,
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let (tokens, count) = (self.tokens, routing.experts);
        let logits = rows_of(&memory.logits, tokens, count, DType::F32);
        let out = Out::Set(&logits, DType::F32);
        list.push(gemm(tokens, self.normed, self.x, router, bias, count, self.config.hidden, out)?);
        let choices = |slice: &Slice, dtype| rows_of(slice, tokens, routing.active, dtype);
        let mut args = vec![logits.clone()];
        args.extend(correction.map(|bias| bias.slice.clone()));
        args.extend([
            choices(&memory.chosen, DType::U32),
            choices(&memory.weights, DType::F32),
            choices(&memory.order, DType::U32),
            rows_of(&memory.starts, count + 1, 1, DType::U32),
        ]);
        let bias = correction.is_some();
        list.push(Cmd::new(OpSig::Route { tokens, bias, routing: *routing }, &args)?);
        Ok(())
    }

    /// The sum of what a row's choices made of it.
    fn combine(
        &self,
        active: u32,
        memory: &ExpertArena,
        (residual, accumulate): (&Slice, bool),
    ) -> Result<Cmd> {
        let (tokens, cols, x) = (self.tokens, self.config.hidden, self.x);
        let made = rows_of(&memory.made, tokens * active, cols, x);
        let weights = rows_of(&memory.weights, tokens, active, DType::F32);
        let sig = OpSig::Combine { tokens, active, cols, x, accumulate };
        Cmd::new(sig, &[made, weights, residual.clone()])
    }
}
