//! Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv 2405.04434): a token's keys and values are one
//! latent vector shared by all heads, and a rotated part of the key.
//!
//! KV is the latent and the rotated part. Decodes attend to latents directly: the matrix that would expand a
//! latent to a head's key is multiplied with the query instead (it *lifts* the query to the latent's length),
//! and the one that would expand a value with the attention output (it *lowers* that). Both are rows of a
//! head in `kv_b_proj`, which is split when it is placed. Short prompts do the same; for longer ones keys and
//! values are expanded, which is less arithmetic (`expanded.rs`).

use super::Tensor;
use super::error::Result as ModelResult;
use super::fields::Fields;
use super::rope;
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{BufferUsage, DType, Device, Result, Scalar};
use mixfleet_scheduler::cost::LatentAttention;
use mixfleet_scheduler::layers::Weight;

/// Bound well above any real model.
const LENGTH_MAX: u32 = 1 << 14;

/// The latent attention of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentHeads {
    /// Lengths of a head's parts and of latents.
    pub lengths: LatentAttention,
    /// Multiplier of scores.
    pub scale: Scalar,
}

impl LatentHeads {
    /// Reads it from the configuration of a family that has it.
    ///
    /// # Errors
    /// The error names the field.
    pub(super) fn parse(fields: &Fields, context_max: u32) -> ModelResult<Self> {
        let q_rank = fields.count("q_lora_rank", LENGTH_MAX)?.unwrap_or(0);
        let lengths = LatentAttention {
            q_rank,
            kv_rank: fields.count_required("kv_lora_rank", LENGTH_MAX)?,
            nope: fields.count_required("qk_nope_head_dim", LENGTH_MAX)?,
            rope: fields.count_required("qk_rope_head_dim", LENGTH_MAX)?,
            v: fields.count_required("v_head_dim", LENGTH_MAX)?,
            expanded_tokens: 0,
        };
        let lengths = lengths.expanding(context_max);
        if !lengths.rope.is_multiple_of(2) {
            let problem = format!("{}, expected an even number: rope turns pairs", lengths.rope);
            return Err(fields.error("qk_rope_head_dim", problem));
        }
        if fields.flag("attention_bias", false)? {
            return Err(
                fields.error("attention_bias", "true is not supported with latents; supported: false")
            );
        }
        if !fields.flag("rope_interleave", true)? {
            return Err(fields.error("rope_interleave", "false is not supported; supported: true"));
        }
        let scale = rope::score_scale(fields)? / f64::from(lengths.nope + lengths.rope).sqrt();
        Ok(LatentHeads { lengths, scale: Scalar(to_f32(scale)) })
    }

    /// Name and shape of the tensors of a layer's attention except its output.
    pub(super) fn shapes(&self, hidden: u64, heads: u64, add: &mut dyn FnMut(Weight, &str, &[u64])) {
        let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = self.lengths;
        let [q_rank, kv_rank, nope, rope, v] = [q_rank, kv_rank, nope, rope, v].map(u64::from);
        if q_rank > 0 {
            add(Weight::QDown, "self_attn.q_a_proj.weight", &[q_rank, hidden]);
            add(Weight::QDownNorm, "self_attn.q_a_layernorm.weight", &[q_rank]);
            add(Weight::Q, "self_attn.q_b_proj.weight", &[heads * (nope + rope), q_rank]);
        } else {
            add(Weight::Q, "self_attn.q_proj.weight", &[heads * (nope + rope), hidden]);
        }
        add(Weight::KvDown, "self_attn.kv_a_proj_with_mqa.weight", &[kv_rank + rope, hidden]);
        add(Weight::KvNorm, "self_attn.kv_a_layernorm.weight", &[kv_rank]);
        add(Weight::KvUp, "self_attn.kv_b_proj.weight", &[heads * (nope + v), kv_rank]);
    }

    /// Splits up-projections `[heads, nope + v, kv_rank]`: into `[heads, kv_rank, nope]`, which lifts
    /// queries, and `[heads, v, kv_rank]`, which lowers attention output.
    pub(super) fn apart(&self, up: &[f64]) -> [Vec<f64>; 2] {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let [rank, nope, v] = [kv_rank, nope, v].map(|length| length as usize);
        let (mut lift, mut lower) = (Vec::with_capacity(up.len()), Vec::with_capacity(up.len()));
        for head in up.chunks_exact((nope + v) * rank) {
            let (keys, values) = head.split_at(nope * rank);
            lift.extend((0..rank).flat_map(|column| (0..nope).map(move |row| keys[row * rank + column])));
            lower.extend_from_slice(values);
        }
        [lift, lower]
    }

    /// The matrix `[heads, nope + rope, kv_rank + rope]` of up-projections that expands stored vectors to
    /// keys: the rotated part is copied to every head's key.
    pub(super) fn keys(&self, up: &[f64]) -> Vec<f64> {
        let LatentAttention { kv_rank, nope, rope, v, .. } = self.lengths;
        let [rank, nope, rope, v] = [kv_rank, nope, rope, v].map(|length| length as usize);
        let mut all = Vec::new();
        for head in up.chunks_exact((nope + v) * rank) {
            for row in head[..nope * rank].chunks_exact(rank) {
                all.extend_from_slice(row);
                all.resize(all.len() + rope, 0.0);
            }
            for row in 0..rope {
                all.resize(all.len() + rank, 0.0);
                all.extend((0..rope).map(|column| if column == row { 1.0 } else { 0.0 }));
            }
        }
        all
    }

    /// The matrices that are derived from up-projections.
    pub(super) fn made(&self, up: &[f64]) -> Vec<(Weight, Vec<f64>)> {
        let [lift, lower] = self.apart(up);
        let keys = (self.lengths.expanded_tokens > 0).then(|| (Weight::Keys, self.keys(up)));
        [(Weight::Lift, lift), (Weight::Lower, lower)].into_iter().chain(keys).collect()
    }

    /// Number of elements of these for `heads` heads.
    pub(super) fn made_lengths(&self, heads: u32) -> Vec<(Weight, u64)> {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let of = |length: u32| u64::from(heads) * u64::from(length) * u64::from(kv_rank);
        let keys =
            (self.lengths.expanded_tokens > 0).then(|| (Weight::Keys, self.lengths.key_elements(heads)));
        [(Weight::Lift, of(nope)), (Weight::Lower, of(v))].into_iter().chain(keys).collect()
    }

    /// Number of elements of all derived matrices, from up-projections of `up` elements.
    pub(super) fn made_elements(&self, up: usize) -> u64 {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let of_head = (u64::from(nope) + u64::from(v)) * u64::from(kv_rank);
        let heads = to_u32(up as u64 / of_head.max(1));
        self.made_lengths(heads).iter().map(|(_, elements)| elements).sum()
    }
}

/// Uploads a derived matrix to a device.
pub(super) fn upload(device: &dyn Device, values: &[f64], dtype: DType) -> Result<Tensor> {
    let mut bytes = Vec::with_capacity(values.len() * mixfleet_hal::cast::to_usize(dtype.size_bytes()));
    values.iter().for_each(|value| dtype.encode(*value, &mut bytes));
    let slice = device.alloc(bytes.len() as u64, BufferUsage::Weights)?;
    device.write(&slice, &bytes)?;
    Ok(Tensor::plain(slice, dtype))
}
