//! The shape of a decoder-only transformer of any family.

use super::experts::Mixture;
use super::latent::LatentHeads;
use super::stored::TensorLayout;
use super::style::ModelScales;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, KvShape, LatentKv, RotaryPart, Scalar, WeightFormat};
use mixfleet_scheduler::batch::LayerPages;
use mixfleet_scheduler::cost::{AttnSplit, ExpertsBy, MemberShare, ModelShape, Partition};
use mixfleet_scheduler::layers::{LayerConstants, LayerStyle};
use std::sync::Arc;

/// A decoder of the Llama family: blocks of grouped-query attention and SwiGLU, with the differences between
/// families as fields.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of the checkpoint, for display.
    pub family: String,
    /// Length of the residual stream.
    pub hidden: u32,
    /// Length of the MLP's inner layer.
    pub intermediate: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads; divides `heads`. 1 with latent attention.
    pub kv_heads: u32,
    /// Length of a head; need not be hidden / heads. With latent attention the length of a latent plus the
    /// rotated part of a key.
    pub head_dim: u32,
    /// Latent attention, if layers have it (DeepSeek).
    pub latent: Option<LatentHeads>,
    /// Rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Longest sequence, prompt and output together.
    pub context_max: u32,
    /// Epsilon of every RMS norm except those of the residual stream (`scales`).
    pub norm_eps: f32,
    /// Whether q, k, v have biases (Qwen2, GLM-4-MoE).
    pub qkv_bias: bool,
    /// Whether the attention output has a bias (Llama with `attention_bias`).
    pub o_bias: bool,
    /// Whether gate, up, down have biases (Llama with `mlp_bias`).
    pub mlp_bias: bool,
    /// Whether q and k are normalised before rope: per head (Qwen3, the larger GLM-4-MoE), or all heads
    /// together (`style`).
    pub qk_norm: bool,
    /// The sink of each head of each layer, if heads have sinks (gpt-oss): `[layers, heads]`, and none before
    /// tensors are read.
    pub sinks: Option<Arc<[f32]>>,
    /// Experts, if some layers have them instead of an MLP.
    pub experts: Option<Mixture>,
    /// Whether the LM head is the embedding.
    pub tied_embeddings: bool,
    /// Sliding window of each layer; `layers` entries.
    pub windows: Vec<Option<u32>>,
    /// The page group that holds the KV of each layer.
    pub pages: LayerPages,
    /// Rotary position embedding of whole heads, or of their first parts.
    pub rope: Rope,
    /// Rope of the layers that have another one (`style`).
    pub second_rope: Option<Rope>,
    /// Whether rotated pairs are adjacent.
    pub interleaved: bool,
    /// Differences of layers from Llama's.
    pub style: LayerStyle,
    /// Multipliers of the residual stream, scores and logits.
    pub scales: ModelScales,
    /// Layout of the stored tensors.
    pub layout: TensorLayout,
    /// Dtype of most stored weights that are not quantised.
    pub dtype: DType,
    /// The format of the layers' matrices, if they are quantised.
    pub format: Option<WeightFormat>,
    /// Ids that end an answer (`generation_config.json`, else `config.json`; and `eos_token`).
    pub eos_ids: Vec<u32>,
    /// Id that the tokenizer's own rules put before a prompt, if the checkpoint names one.
    pub bos_id: Option<u32>,
}

impl ModelConfig {
    /// The KV layout in pages of `page_tokens` tokens.
    pub fn kv_shape(&self, page_tokens: u32, dtype: DType) -> KvShape {
        let latent =
            self.latent.as_ref().map(|latent| LatentKv { rank: latent.lengths.kv_rank, scale: latent.scale });
        KvShape { kv_heads: self.kv_heads, head_dim: self.head_dim, page_tokens, dtype, latent }
    }

    /// Length of a row of cosines and sines.
    pub fn rotated(&self) -> u32 {
        to_u32(2 * self.rope.inv_freq.len())
    }

    /// The part of each head that is rotated, unless whole heads are, in halves.
    pub fn rotary(&self) -> Option<RotaryPart> {
        let length = self.rotated();
        let is_part = length < self.head_dim || self.interleaved;
        let part = RotaryPart { first: 0, length, interleaved: self.interleaved };
        (self.latent.is_none() && is_part).then_some(part)
    }

    /// The KV layout with windowed layers in pages of their own, so that they keep no more than the window.
    #[must_use]
    pub fn in_window_pages(self) -> Self {
        ModelConfig { pages: LayerPages::of(&self.windows, self.context_max), ..self }
    }

    /// The KV layout with all layers in the same pages.
    #[must_use]
    pub fn in_whole_pages(&self) -> Self {
        ModelConfig { pages: LayerPages::whole(self.layers), ..self.clone() }
    }

    /// KV bytes of one token over all layers.
    pub fn kv_bytes_per_token(&self, kv: DType) -> u64 {
        u64::from(self.layers) * self.kv_shape(1, kv).wire_token_bytes(kv)
    }

    /// Shares among `members` devices, as equal as possible.
    ///
    /// # Errors
    /// When a member would have nothing.
    pub fn divided(&self, members: usize) -> Result<Partition, String> {
        self.in_stages(&[vec![1.0; members]])
    }

    /// The shares of stages of layers, by the weights of their members.
    ///
    /// # Errors
    /// When a member would have nothing.
    pub fn in_stages(&self, stages: &[Vec<f64>]) -> Result<Partition, String> {
        Partition::in_stages(&self.cost_shape(self.dtype, self.dtype, 1), stages)
    }

    /// Shares of stages, by how the members of each stage divide experts.
    ///
    /// # Errors
    /// When a member would have nothing.
    pub fn in_stages_by(&self, stages: &[Vec<f64>], by: &[ExpertsBy]) -> Result<Partition, String> {
        Partition::in_stages_by(&self.cost_shape(self.dtype, self.dtype, 1), stages, by)
    }

    /// A member with the weights, and `workers` members that attend.
    ///
    /// # Errors
    /// When a member would have nothing.
    pub fn with_attention(&self, workers: usize, split: AttnSplit) -> Result<Partition, String> {
        Partition::attention(&self.cost_shape(self.dtype, self.dtype, 1), to_u32(workers), split)
    }

    /// The partition of a member's layers. Rows of the vocabulary are not divided here: every member embeds
    /// all tokens.
    pub fn of_member(&self, share: &MemberShare) -> ModelConfig {
        let layers = to_u32(share.layers.len());
        ModelConfig {
            layers,
            pages: if layers == self.layers { self.pages.clone() } else { LayerPages::whole(layers) },
            windows: self.windows[share.layers.start as usize..share.layers.end as usize].to_vec(),
            heads: to_u32(share.heads.len()),
            kv_heads: to_u32(share.kv_heads.len()),
            intermediate: to_u32(share.inner.len()),
            sinks: self.sinks.as_ref().map(|all| self.sinks_of(all, share)),
            experts: self.experts.as_ref().map(|experts| experts.of_member(share, self.intermediate)),
            style: self.style.of_layers(&share.layers),
            ..self.clone()
        }
    }

    /// The sinks of a layer's heads; empty without sinks.
    pub(super) fn sinks_in(&self, layer: usize) -> &[f32] {
        let all: &[f32] = self.sinks.as_deref().unwrap_or_default();
        all.chunks(self.heads as usize).nth(layer).unwrap_or_default()
    }

    fn sinks_of(&self, all: &[f32], share: &MemberShare) -> Arc<[f32]> {
        let heads = share.heads.start as usize..share.heads.end as usize;
        let of_layer = |layer: &[f32]| layer.get(heads.clone()).unwrap_or_default().to_vec();
        let layers = all.chunks(self.heads as usize).skip(share.layers.start as usize);
        layers.take(share.layers.len()).flat_map(of_layer).collect()
    }

    /// The experts of a layer; none for an MLP.
    pub fn experts_of(&self, layer: usize) -> Option<&Mixture> {
        self.experts.as_ref().filter(|experts| experts.layers.get(layer) == Some(&true))
    }

    /// Constants of the operations.
    pub fn constants(&self) -> LayerConstants {
        let counted = LayerConstants::default();
        LayerConstants {
            eps: Scalar(self.norm_eps),
            stream_eps: Scalar(self.scales.stream_eps),
            embedding_scale: Scalar(self.scales.embedding),
            score_cap: self.scales.score_cap.map_or(counted.score_cap, Scalar),
            logit_cap: self.scales.logit_cap.map_or(counted.logit_cap, Scalar),
            clamp: self.experts.as_ref().and_then(|experts| experts.clamped).unwrap_or(counted.clamp),
            score_scale: self.latent.as_ref().map_or(counted.score_scale, |latent| latent.scale),
            first_expert: self.experts.as_ref().map_or(0, |experts| experts.held.start),
        }
    }

    /// The model's shape, from which operations are listed and counted, with these dtypes and this page size.
    pub fn cost_shape(&self, activation: DType, kv: DType, page_tokens: u32) -> ModelShape {
        ModelShape {
            hidden: self.hidden,
            intermediate: self.intermediate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            windows: self.windows.clone(),
            weight: self.dtype,
            activation,
            kv,
            page_tokens,
            qkv_bias: self.qkv_bias,
            o_bias: self.o_bias,
            mlp_bias: self.mlp_bias,
            qk_norm: self.qk_norm,
            rotary: self.rotary(),
            sinks: self.sinks.is_some(),
            style: self.style.clone(),
            format: self.format,
            experts: self.experts.as_ref().map(Mixture::cost),
            latent: self.latent.as_ref().map(|latent| latent.lengths),
            linear: None,
        }
    }
}

/// Rotary position embedding, resolved to what the tables need.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Inverse frequencies, one for each pair, after the family's scaling.
    pub inv_freq: Vec<f32>,
    /// Multiplier of cosines and sines (YaRN's attention factor); otherwise 1.
    pub scale: f32,
}

impl Rope {
    /// The `cos_sin [positions, rotated]` table of the `Rope` operation.
    pub fn table(&self, positions: &[u32]) -> Vec<f32> {
        let mut table = Vec::with_capacity(positions.len() * self.inv_freq.len() * 2);
        for &position in positions {
            let angles = self.inv_freq.iter().map(|f| position as f32 * f);
            table.extend(angles.clone().map(|angle| angle.cos() * self.scale));
            table.extend(angles.map(|angle| angle.sin() * self.scale));
        }
        table
    }
}
