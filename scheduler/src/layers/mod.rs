//! The operations of a model's layers, listed once: what each computes, and what it reads and writes.
//!
//! [`LayerOps`] pushes the operations of a part of a step to an [`OpSink`], in the order in which a device
//! runs them, with an [`OpArg`] for each operand that names a buffer, a weight or a table of the step. The
//! cost model counts what is pushed; the runtime binds the arguments to memory and makes commands. A member
//! of a partition has a [`ModelShape`] of its share of the model, and its list covers only that share.

mod attention;
mod buffers;
mod experts;
mod latent;
mod linear;
mod operand;
mod shape;
mod sizes;
mod style;

pub use buffers::BufferRoom;
pub use experts::Experts;
pub use latent::{EXPANDED_TOKENS, LatentAttention};
pub use linear::LinearAttention;
pub use operand::{Activation, OpArg, OpSink, StepTable, Weight};
pub use shape::ModelShape;
pub use sizes::{AttentionSizes, DrawSizes, KvSizes, Prefill, visible_keys};
pub use style::{LayerRope, LayerStyle, NormPlacement};

use mixfleet_hal::{DType, KvShape, LatentKv, OpSig, Scalar};

/// Constants of a model that its operations carry, and that do not affect their cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConstants {
    /// Epsilon of every RMS norm except those of the residual stream.
    pub eps: Scalar,
    /// Epsilon of the norms of the residual stream.
    pub stream_eps: Scalar,
    /// Factor of embeddings, if they have one.
    pub embedding_scale: Scalar,
    /// Soft cap of scores, if they have one.
    pub score_cap: Scalar,
    /// Soft cap of logits, if they have one.
    pub logit_cap: Scalar,
    /// Alpha and limit of clamped experts.
    pub clamp: [Scalar; 2],
    /// Factor of the scores of latent attention.
    pub score_scale: Scalar,
    /// Index of the first expert of a member that has whole experts.
    pub first_expert: u32,
}

impl Default for LayerConstants {
    /// Placeholder values, for counting; alpha and limit are gpt-oss's.
    fn default() -> Self {
        let clamp = [Scalar(1.702), Scalar(7.0)];
        let (eps, one) = (Scalar(1e-6), Scalar(1.0));
        LayerConstants {
            eps,
            stream_eps: eps,
            embedding_scale: one,
            score_cap: one,
            logit_cap: one,
            clamp,
            score_scale: one,
            first_expert: 0,
        }
    }
}

/// A model whose operations are listed, or a member's share of it.
#[derive(Clone, Copy, Debug)]
pub struct LayerOps<'a> {
    /// Its shape. `vocab` is the number of rows of the LM head on this member.
    pub shape: &'a ModelShape,
    /// Numbers that operations carry.
    pub constants: LayerConstants,
    /// Whether projections back to the residual stream add to it, with their biases. True on the only
    /// member, or on the first of those that share each layer; on the others projections overwrite the
    /// stream, so that the sum over all members is the residual.
    pub adds: bool,
    /// Whether projections of the same rows are fused into one product (QKV; gate and up), as in external
    /// engines.
    pub joins: bool,
    /// How queries and keys of the layer are rotated.
    pub rope: LayerRope,
}

/// A product with a weight matrix of a layer, and the activation buffer that it writes.
struct Projection {
    weight: Weight,
    bias: Option<Weight>,
    columns: u32,
    to: Activation,
}

impl<'a> LayerOps<'a> {
    /// Returns the operations of a whole model, for counting.
    pub fn counted(shape: &'a ModelShape) -> Self {
        LayerOps {
            shape,
            constants: LayerConstants::default(),
            adds: true,
            joins: false,
            rope: LayerRope::Main,
        }
    }

    /// Pushes the lookup of token embeddings in a table of `vocab` rows.
    pub fn embed(&self, tokens: u32, vocab: u32, ops: &mut impl OpSink) {
        if self.shape.style.scaled_embedding {
            return self.scaled_embed(tokens, vocab, ops);
        }
        let args = [StepTable::Ids.into(), Weight::Embedding.into(), Activation::Residual.into()];
        ops.push(self.pick(tokens, vocab, self.shape.weight), &args);
    }

    /// Pushes the lookup, for each rope, of the tokens' cosines and sines in a table of `positions` rows, and
    /// the other inputs that all layers of a step share.
    pub fn rotations(&self, tokens: u32, positions: u32, ops: &mut impl OpSink) {
        let rotated = self.shape.rotary.map_or(self.shape.head_dim, |part| part.length);
        let hidden = self.shape.latent.map_or(rotated, |latent| latent.rope);
        let (vocab, table, out) = (positions, DType::F32, DType::F32);
        let ropes = [
            (StepTable::Rotations, Activation::CosSin),
            (StepTable::SecondRotations, Activation::SecondCosSin),
        ];
        let count = if self.shape.style.has_second_rope() { 2 } else { 1 };
        for (rotations, rows) in ropes.into_iter().take(count) {
            let args = [StepTable::Positions.into(), rotations.into(), rows.into()];
            ops.push(OpSig::Embed { tokens, vocab, hidden, table, out }, &args);
        }
        self.unit_factors(tokens, ops);
    }

    /// Pushes the last norm and the LM head over `rows` rows, after selecting these from `tokens` rows if
    /// there are more; nothing if `rows` is 0.
    pub fn logits(&self, rows: u32, tokens: u32, ops: &mut impl OpSink) {
        if rows == 0 {
            return;
        }
        let mut last = Activation::Residual;
        if rows < tokens {
            let args = [StepTable::Picks.into(), last.into(), Activation::Picked.into()];
            ops.push(self.pick(rows, tokens, DType::F32), &args);
            last = Activation::Picked;
        }
        self.norm(rows, last, Weight::LastNorm, ops);
        let ModelShape { vocab: n, hidden: k, activation: x, weight, .. } = *self.shape;
        let sig = OpSig::Gemm { m: rows, n, k, x, weight, out: DType::F32, bias: false, accumulate: false };
        ops.push(sig, &[Activation::Normed.into(), Weight::LmHead.into(), Activation::Logits.into()]);
        if self.shape.style.capped_logits {
            let elements = u64::from(rows) * u64::from(n);
            let sig = OpSig::SoftCap { elements, cap: self.constants.logit_cap };
            ops.push(sig, &[Activation::Logits.into()]);
        }
    }

    /// Pushes the draw of a token from each of `rows` rows of `vocab` logits; nothing if `rows` is 0.
    pub fn draw(&self, rows: u32, vocab: u32, sizes: DrawSizes, ops: &mut impl OpSink) {
        if rows == 0 {
            return;
        }
        let DrawSizes { history, tops } = sizes;
        let of_history = |table| if history > 0 { OpArg::from(table) } else { OpArg::Absent };
        let args = [
            Activation::Logits.into(),
            StepTable::DrawParameters.into(),
            of_history(StepTable::HistoryStarts),
            of_history(StepTable::History),
            StepTable::Drawn.into(),
            if tops > 0 { StepTable::Tops.into() } else { OpArg::Absent },
        ];
        ops.push(OpSig::Sample { rows, cols: vocab, history, tops }, &args);
    }

    /// Returns the soft cap of scores, if they have one.
    fn score_cap(&self) -> Option<Scalar> {
        self.shape.style.capped_scores.then_some(self.constants.score_cap)
    }

    /// Returns the KV shape of its layers.
    pub fn kv(&self) -> KvShape {
        let kv = self.shape.kv_shape();
        let scaled = |latent| LatentKv { scale: self.constants.score_scale, ..latent };
        KvShape { latent: kv.latent.map(scaled), ..kv }
    }

    fn pick(&self, tokens: u32, vocab: u32, table: DType) -> OpSig {
        OpSig::Embed { tokens, vocab, hidden: self.shape.hidden, table, out: DType::F32 }
    }

    /// The norm of rows of the residual stream.
    fn norm(&self, rows: u32, from: Activation, weight: Weight, ops: &mut impl OpSink) {
        self.norm_of(rows, from, self.constants.stream_eps, weight, ops);
    }

    /// The norm of f32 rows as long as the residual stream.
    fn norm_of(&self, rows: u32, from: Activation, eps: Scalar, weight: Weight, ops: &mut impl OpSink) {
        let ModelShape { hidden: cols, weight: dtype, activation: out, .. } = *self.shape;
        let sig = OpSig::RmsNorm { rows, cols, eps, x: DType::F32, weight: dtype, out };
        ops.push(sig, &[from.into(), weight.into(), Activation::Normed.into()]);
    }

    /// A norm of activations inside a layer.
    fn inner_norm(&self, [rows, cols]: [u32; 2], args: [OpArg; 3], ops: &mut impl OpSink) {
        let (x, weight) = (self.shape.activation, self.shape.weight);
        ops.push(OpSig::RmsNorm { rows, cols, eps: self.constants.eps, x, weight, out: x }, &args);
    }

    /// Pushes products of the same `m` rows of `k` columns, fused into one of all their columns if `joins`.
    fn products(&self, [m, k]: [u32; 2], from: Activation, of: &[Projection], ops: &mut impl OpSink) {
        let (x, weight) = (self.shape.activation, self.shape.weight);
        let mut product = |n, Projection { weight: by, bias, to, .. }: &Projection| {
            let has_bias = bias.is_some();
            let sig = OpSig::Gemm { m, n, k, x, weight, out: x, bias: has_bias, accumulate: false };
            ops.push(sig, &[from.into(), (*by).into(), OpArg::from(*bias), (*to).into()]);
        };
        if let (true, [first, ..]) = (self.joins, of) {
            product(of.iter().map(|projection| projection.columns).sum(), first);
        } else {
            of.iter().for_each(|projection| product(projection.columns, projection));
        }
    }

    /// Pushes a product that goes back to the residual stream, to which it is added if `adds`.
    fn back(
        &self,
        [m, k]: [u32; 2],
        from: Activation,
        (by, bias): (Weight, Option<Weight>),
        adds: bool,
        ops: &mut impl OpSink,
    ) {
        // a product with a post-norm is normalised before it is added
        let has_post_norms = self.shape.style.has_post_norms();
        let (to, adds) = match has_post_norms {
            true => (Activation::Branch, false),
            false => (Activation::Residual, adds),
        };
        let ModelShape { hidden: n, activation: x, weight, .. } = *self.shape;
        // only one member adds the bias
        let bias = bias.filter(|_| self.adds);
        let has_bias = bias.is_some();
        let sig = OpSig::Gemm { m, n, k, x, weight, out: DType::F32, bias: has_bias, accumulate: adds };
        ops.push(sig, &[from.into(), by.into(), bias.into(), to.into()]);
        if has_post_norms {
            let after = if by == Weight::O { Weight::AttnPostNorm } else { Weight::MlpPostNorm };
            self.post_norm(m, after, ops);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::models;
    use mixfleet_hal::op::Extent;
    use std::collections::HashMap;

    /// Checks the arguments of operations against their operands and the buffers that these are in.
    struct Checked(HashMap<usize, u64>);

    impl OpSink for Checked {
        fn push(&mut self, sig: OpSig, args: &[OpArg]) {
            assert_eq!(sig.check(), Ok(()), "{sig:?}");
            let operands = sig.operands();
            let mut at = 0;
            for arg in args {
                at += match *arg {
                    OpArg::Absent => 0,
                    OpArg::Pools => sig.kv().map_or(0, |kv| kv.pools() as usize),
                    OpArg::From(buffer, first) => {
                        let bytes = self.0.get(&(buffer as usize));
                        let bytes = bytes.unwrap_or_else(|| panic!("no {buffer:?}: {sig:?}"));
                        if let Extent::Exactly(length) = operands[at].extent {
                            let end = (first + length) * operands[at].dtype.size_bytes();
                            assert!(end <= *bytes, "{end} of {bytes} bytes of {buffer:?}: {sig:?}");
                        }
                        1
                    }
                    OpArg::Weight(_) | OpArg::Table(_) => 1,
                };
            }
            assert_eq!(at, operands.len(), "{sig:?}: {args:?}");
        }
    }

    #[test]
    fn every_operand_is_named_and_has_room() {
        for model in models().filter(|model| model.linear.is_none()) {
            let plain = model.shape(DType::Bf16);
            let biased = ModelShape { o_bias: true, mlp_bias: true, qk_norm: true, ..plain.clone() };
            let sinks = ModelShape { sinks: plain.latent.is_none(), ..biased };
            let plain_mlp = plain.experts.is_none() && plain.latent.is_none();
            let styled = |norms| ModelShape {
                style: LayerStyle {
                    norms,
                    whole_qk_norm: true,
                    scaled_embedding: true,
                    gelu: true,
                    capped_scores: true,
                    capped_logits: true,
                    ropes: vec![LayerRope::Second],
                },
                ..sinks.clone()
            };
            let styles = [NormPlacement::Around, NormPlacement::After].map(styled);
            let styles = styles.into_iter().filter(|_| plain_mlp);
            for shape in [plain, sinks.clone()].into_iter().chain(styles) {
                let part = |context, tokens| Prefill { context, tokens, last: true };
                for (parts, batch) in [
                    (vec![], 3),
                    (vec![part(0, 5)], 2),
                    (vec![part(0, 600)], 3),
                    (vec![part(700, 600), part(0, 300)], 0),
                ] {
                    let windows = [None, Some(100)];
                    let sizes = AttentionSizes::counted(&shape, &parts, (batch, 900), windows.into_iter());
                    let (tokens, sequences) = (sizes.tokens, batch + sizes.prefills);
                    let room = BufferRoom {
                        tokens: tokens.into(),
                        sequences: sequences.into(),
                        decodes: batch.into(),
                    };
                    let buffers = shape.buffers(room).into_iter();
                    let mut ops = Checked(buffers.map(|(buffer, bytes)| (buffer as usize, bytes)).collect());
                    for adds in [true, false] {
                        let list =
                            LayerOps { adds, rope: shape.style.rope_of(0), ..LayerOps::counted(&shape) };
                        list.embed(tokens, shape.vocab, &mut ops);
                        list.rotations(tokens, 4096, &mut ops);
                        list.attention_inputs(&sizes, &mut ops);
                        windows.iter().enumerate().for_each(|(which, window)| {
                            list.attend((which, *window), &sizes, &mut ops);
                        });
                        list.attention_outputs(&sizes, &mut ops);
                        let has_plain_mlp = shape.mlp_layers()[0] > 0;
                        list.mlp(tokens, shape.experts.is_some(), &mut ops);
                        if has_plain_mlp {
                            list.mlp(tokens, false, &mut ops);
                        }
                        list.logits(sequences, tokens, &mut ops);
                        list.draw(sequences, shape.vocab, DrawSizes { history: 64, tops: 4 }, &mut ops);
                    }
                }
            }
        }
    }
}
