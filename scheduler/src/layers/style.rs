//! Differences of some families' layers from Llama's: norms, ropes, activation and embedding.

use super::{Activation, LayerOps, OpSink, StepTable, Weight};
use mixfleet_hal::{DType, OpSig, Scalar};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Positions of norms relative to a block: attention or the MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NormPlacement {
    /// Before the block (Llama).
    #[default]
    Before,
    /// Before the block, and after it, before the sum with the residual stream (Gemma 3, GLM-4).
    Around,
    /// After the block, before the sum with the residual stream (OLMo 2).
    After,
}

/// How a layer rotates queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LayerRope {
    /// By the model's main rope.
    #[default]
    Main,
    /// By the model's second rope (layers with a window in Gemma 3 and OLMo 3).
    Second,
    /// Not at all (some layers of SmolLM3 and EXAONE 4).
    Absent,
}

/// The differences between layers of a family and those of Llama.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerStyle {
    /// Where norms are.
    pub norms: NormPlacement,
    /// Whether the norms of q and k are over all heads together instead of per head (OLMo 2).
    pub whole_qk_norm: bool,
    /// Whether embeddings are multiplied by a number (Granite, Gemma).
    pub scaled_embedding: bool,
    /// Whether the MLP's function is GELU instead of SiLU (Gemma).
    pub gelu: bool,
    /// Whether scores have a soft cap (Gemma 2).
    pub capped_scores: bool,
    /// Whether logits have a soft cap (Gemma 2).
    pub capped_logits: bool,
    /// The rope of each layer; an empty list means the main rope in all.
    pub ropes: Vec<LayerRope>,
}

impl LayerStyle {
    /// Returns the style of these layers, as a stage has them.
    #[must_use]
    pub fn of_layers(&self, layers: &Range<u32>) -> Self {
        let ropes = self.ropes.get(layers.start as usize..layers.end as usize).unwrap_or_default().to_vec();
        LayerStyle { ropes, ..self.clone() }
    }

    /// How a layer rotates queries and keys.
    pub fn rope_of(&self, layer: usize) -> LayerRope {
        self.ropes.get(layer).copied().unwrap_or_default()
    }

    /// Whether outputs of attention and of the MLP are normalised before the sum with the residual stream.
    pub fn has_post_norms(&self) -> bool {
        self.norms != NormPlacement::Before
    }

    /// Whether some layers use a second rope.
    pub fn has_second_rope(&self) -> bool {
        self.ropes.contains(&LayerRope::Second)
    }

    /// Number of layers that rotate nothing.
    pub(crate) fn bare_layers(&self) -> usize {
        self.ropes.iter().filter(|rope| **rope == LayerRope::Absent).count()
    }

    /// Returns why devices cannot divide the layers; none if they can.
    pub fn undivided(&self) -> Option<&'static str> {
        match (self.has_post_norms(), self.whole_qk_norm) {
            (true, _) => Some("norms over the whole output of attention and of the MLP"),
            (_, true) => Some("norms over all heads together"),
            _ => None,
        }
    }
}

impl LayerOps<'_> {
    /// Pushes the lookup of embeddings and their multiplication by a number.
    pub(super) fn scaled_embed(&self, tokens: u32, vocab: u32, ops: &mut impl OpSink) {
        let (hidden, table, out) = (self.shape.hidden, self.shape.weight, self.shape.activation);
        let args = [StepTable::Ids.into(), Weight::Embedding.into(), Activation::Normed.into()];
        ops.push(OpSig::Embed { tokens, vocab, hidden, table, out }, &args);
        self.fill_factors(tokens, self.constants.embedding_scale, ops);
        self.add_factored(tokens, false, ops);
    }

    /// Pushes the row factors of the sums after post-norms: ones.
    pub(super) fn unit_factors(&self, tokens: u32, ops: &mut impl OpSink) {
        if self.shape.style.has_post_norms() {
            self.fill_factors(tokens, Scalar(1.0), ops);
        }
    }

    fn fill_factors(&self, tokens: u32, factor: Scalar, ops: &mut impl OpSink) {
        let sig = OpSig::Fill { bytes: u64::from(tokens) * 4, word: factor.0.to_bits() };
        ops.push(sig, &[Activation::RowFactors.into()]);
    }

    /// Pushes the rows of `Normed` times their factors. They replace the residual stream, or with
    /// `accumulate` are added to it.
    fn add_factored(&self, tokens: u32, accumulate: bool, ops: &mut impl OpSink) {
        let (cols, x) = (self.shape.hidden, self.shape.activation);
        let args = [Activation::Normed.into(), Activation::RowFactors.into(), Activation::Residual.into()];
        ops.push(OpSig::Combine { tokens, active: 1, cols, x, accumulate }, &args);
    }

    /// Pushes the input of a block: the norm of the residual stream, or the stream itself.
    pub(super) fn block_input(&self, tokens: u32, weight: Weight, ops: &mut impl OpSink) {
        if self.shape.style.norms != NormPlacement::After {
            return self.norm(tokens, Activation::Residual, weight, ops);
        }
        let (hidden, out) = (self.shape.hidden, self.shape.activation);
        let args = [StepTable::Rows.into(), Activation::Residual.into(), Activation::Normed.into()];
        ops.push(OpSig::Embed { tokens, vocab: tokens, hidden, table: DType::F32, out }, &args);
    }

    /// Pushes the norm of a block's output, and its sum with the residual stream.
    pub(super) fn post_norm(&self, tokens: u32, weight: Weight, ops: &mut impl OpSink) {
        self.norm_of(tokens, Activation::Branch, self.constants.eps, weight, ops);
        self.add_factored(tokens, true, ops);
    }
}
