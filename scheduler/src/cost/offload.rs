//! Attention offload: a member with the weights computes everything but attention and keeps no KV; the other
//! members keep the KV, run attention on it, and have no weights (Lamina, arXiv 2405.01814).
//!
//! Per layer the queries, keys and values of a step's rows go from the first member to the others, and what
//! they attended to comes back.

use super::counted::StagePart;
use super::partition::heads;
use super::{MemberShare, ModelShape, OpCounts, Partition, Prefill};
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which operations of its share a member runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberWork {
    /// All operations.
    All,
    /// All operations but those that read or write KV; the member keeps none.
    Products,
    /// The operations that read or write KV; the member has no weights.
    Attention,
}

impl MemberWork {
    /// Whether this part includes the operations that neither read nor write KV, for which it needs weights.
    pub(super) fn computes(self) -> bool {
        self != MemberWork::Attention
    }

    /// Whether this part includes the operations that do.
    pub(super) fn attends(self) -> bool {
        self != MemberWork::Products
    }
}

/// How the members that attend divide the KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttnSplit {
    /// By heads: each has some heads of all tokens.
    #[default]
    Head,
    /// By requests: each has all heads of some requests, as long as it has room for them.
    Request,
    /// By ranges of tokens: each has all heads of some blocks of every request.
    Range,
}

impl AttnSplit {
    /// The way that divides a model's KV evenly and without copies over `workers` devices: by heads where
    /// these divide evenly, else by requests.
    pub fn even(shape: &ModelShape, workers: u32) -> Self {
        match shape.kv_heads.is_multiple_of(workers.max(1)) {
            true => AttnSplit::Head,
            false => AttnSplit::Request,
        }
    }

    /// Every way to divide it.
    pub const ALL: [AttnSplit; 3] = [AttnSplit::Head, AttnSplit::Request, AttnSplit::Range];

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            AttnSplit::Head => "head",
            AttnSplit::Request => "request",
            AttnSplit::Range => "range",
        }
    }
}

impl fmt::Display for AttnSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for AttnSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        AttnSplit::ALL.into_iter().find(|split| split.name() == text).ok_or_else(|| {
            let known = AttnSplit::ALL.map(AttnSplit::name).join(", ");
            format!("KV cannot be divided by '{text}'; known: {known}")
        })
    }
}

/// Bytes between the member with the weights and the attention members, per token and layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttnBytes {
    /// Queries, keys and values.
    pub out: u64,
    /// The attention output.
    pub back: u64,
}

impl Partition {
    /// A first member with the weights, and `workers` members that attend, which divide the KV by `split`.
    ///
    /// # Errors
    /// When a member would have nothing, or the model's attention cannot be apart.
    pub fn attention(shape: &ModelShape, workers: u32, split: AttnSplit) -> Result<Self, String> {
        if shape.latent.is_some() {
            return Err("latent attention cannot run on separate devices: all heads share one latent per token, so \
                        that it computes more per byte of KV than a device that is rich in bandwidth can; let one \
                        device run the whole model"
                .into());
        }
        if shape.linear.is_some() || shape.spread() > 1 {
            return Err("linear attention and whole experts are not divided over devices yet".into());
        }
        if workers == 0 {
            return Err("attention offload needs at least one device for attention".into());
        }
        let group = shape.heads / shape.kv_heads.max(1);
        let heads = match split {
            AttnSplit::Head => heads(shape, &vec![1.0; workers as usize])?,
            AttnSplit::Request | AttnSplit::Range => vec![0..shape.heads; workers as usize],
        };
        let attends = heads.into_iter().zip(1..);
        let attends = attends.map(|(heads, member)| MemberShare {
            member,
            rank: member,
            work: MemberWork::Attention,
            kv_heads: heads.start / group..heads.end.div_ceil(group),
            heads,
            inner: 0..0,
            vocab: 0..0,
            ..MemberShare::whole(shape)
        });
        let first = MemberShare { work: MemberWork::Products, ..MemberShare::whole(shape) };
        Ok(Partition { shares: std::iter::once(first).chain(attends).collect(), split: Some(split) })
    }

    /// How the KV is divided, under attention offload.
    pub fn split(&self) -> Option<AttnSplit> {
        self.split
    }

    /// Number of members among which pages of KV are divided: page `p` is page `p / n` of member `p % n`; 1
    /// if every member that keeps KV has its heads of all pages.
    pub fn page_holders(&self) -> u32 {
        match self.split {
            None | Some(AttnSplit::Head) => 1,
            Some(AttnSplit::Request | AttnSplit::Range) => to_u32(self.shares.len() - 1),
        }
    }

    /// Bytes of KV memory that the devices that attend need together for a byte of KV: more than one where
    /// several keep the same head, or one has more heads than another; 1 if all devices keep KV.
    pub fn kv_copies(&self, shape: &ModelShape) -> f64 {
        if self.split != Some(AttnSplit::Head) {
            return 1.0;
        }
        let most = self.shares.iter().map(|share| share.kv_bytes_per_token(shape)).max().unwrap_or(0);
        (self.shares.len() - 1) as f64 * most as f64 / shape.kv_bytes_per_token().max(1) as f64
    }

    /// The bytes exchanged per token and layer under attention offload, for a token whose keys are on
    /// `holders` of the members among which pages are divided. With activations of `e` bytes that is `(heads
    /// + 2 kv_heads) head_dim e` out and `heads head_dim e` back: KV heads once per copy kept, queries and
    /// outputs once per holder. With several holders, each also returns `8 heads` bytes for the merge.
    pub fn attention_bytes(&self, shape: &ModelShape, holders: u32) -> Option<AttnBytes> {
        let split = self.split?;
        let row = u64::from(shape.head_dim) * shape.activation.size_bytes();
        let (heads, kv_heads) = match split {
            AttnSplit::Head => self.shares[1..].iter().fold((0, 0), |(heads, kv_heads), share| {
                (heads + share.heads.len() as u64, kv_heads + share.kv_heads.len() as u64)
            }),
            AttnSplit::Request | AttnSplit::Range => {
                (u64::from(holders) * u64::from(shape.heads), u64::from(shape.kv_heads))
            }
        };
        let merged = if self.page_holders() > 1 && holders > 1 { 8 * heads } else { 0 };
        Some(AttnBytes { out: (heads + 2 * kv_heads) * row, back: heads * row + merged })
    }
}

impl MemberShare {
    /// Whether it has weights.
    pub fn has_weights(&self) -> bool {
        self.work.computes()
    }

    /// Whether it keeps KV.
    pub fn keeps_kv(&self) -> bool {
        self.work.attends()
    }

    /// Its operations of a mixed step of a model of this shape, as [`ModelShape::step_ops`] has them for the
    /// whole model. Only the first of the members that share layers adds to the residual, and only one member
    /// draws. If pages are divided, an attention member has the sequences that are whole on it.
    pub fn step_ops(&self, shape: &ModelShape, parts: &[Prefill], batch: u32, kv_tokens: u64) -> OpCounts {
        let part = StagePart {
            work: self.work,
            embeds: self.embeds(),
            has_head: self.has_head(),
            draws: self.draws().then_some(shape.vocab),
            adds: self.is_first(),
        };
        self.of(shape).stage_ops(&part, parts, batch, kv_tokens)
    }

    /// Bytes of KV of a token that it keeps if it keeps any, over all layers.
    pub fn kv_bytes_per_token(&self, shape: &ModelShape) -> u64 {
        if self.keeps_kv() { self.of(shape).kv_bytes_per_token() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models;
    use mixfleet_hal::{DType, OpSig};
    use std::collections::HashMap;

    fn shape(name: &str) -> ModelShape {
        models::find(name).unwrap().shape(DType::Bf16)
    }

    fn summed(ops: impl Iterator<Item = OpCounts>) -> [f64; 2] {
        let sum = |of: fn(&OpSig) -> f64, ops: &[OpCounts]| {
            ops.iter().flatten().map(|(sig, count)| of(sig) * *count as f64).sum::<f64>()
        };
        let all: Vec<OpCounts> = ops.collect();
        [sum(OpSig::flops, &all), all.iter().flatten().map(|(_, count)| *count as f64).sum()]
    }

    #[test]
    fn one_attention_member_and_the_first_run_together_what_one_device_runs() {
        let shape = shape("llama-3.1-8b");
        let parts = [Prefill { context: 100, tokens: 20, last: true }];
        let partition = Partition::attention(&shape, 1, AttnSplit::Head).unwrap();
        let mut all: HashMap<OpSig, u64> = HashMap::new();
        for share in partition.shares() {
            for (sig, count) in share.step_ops(&shape, &parts, 4, 400) {
                *all.entry(sig).or_default() += count;
            }
        }
        assert_eq!(all, shape.step_ops(&parts, 4, 400).into_iter().collect());
    }

    #[test]
    fn several_divide_its_arithmetic_and_its_kv_and_the_first_keeps_none() {
        let shape = shape("llama-3.1-8b");
        let whole = summed(std::iter::once(shape.step_ops(&[], 4, 400)))[0];
        for workers in [2, 3, 8] {
            let partition = Partition::attention(&shape, workers, AttnSplit::Head).unwrap();
            let ops = partition.shares().iter().map(|share| share.step_ops(&shape, &[], 4, 400));
            assert!((summed(ops)[0] / whole - 1.0).abs() < 1e-12);
            let kept: Vec<u64> = partition.shares().iter().map(|s| s.kv_bytes_per_token(&shape)).collect();
            assert_eq!((kept[0], kept.iter().sum()), (0, shape.kv_bytes_per_token()));
            let weights: Vec<bool> = partition.shares().iter().map(MemberShare::has_weights).collect();
            assert_eq!(weights.iter().position(|has| !has), Some(1), "only the first one has weights");
        }
    }

    #[test]
    fn what_crosses_is_what_was_published_for_8b_and_70b() {
        let by = |name, workers, split, holders| {
            let shape = shape(name);
            let partition = Partition::attention(&shape, workers, split).unwrap();
            let AttnBytes { out, back } = partition.attention_bytes(&shape, holders).unwrap();
            (out, back)
        };
        let of = |name, workers| by(name, workers, AttnSplit::Head, 1);
        assert_eq!(of("llama-3.1-8b", 4), (12_288, 8192));
        assert_eq!(of("llama-3.1-70b", 2), (20_480, 16_384));
        // two members keep each of 8 KV heads
        assert_eq!(of("llama-3.1-8b", 16), (12_288 + 4096, 8192));
        let divided = Partition::even(&shape("llama-3.1-8b"), 2).unwrap();
        assert_eq!(divided.attention_bytes(&shape("llama-3.1-8b"), 1), None);
        for split in [AttnSplit::Request, AttnSplit::Range] {
            assert_eq!(by("llama-3.1-8b", 4, split, 1), (12_288, 8192), "{split}");
            assert_eq!(by("llama-3.1-8b", 4, split, 3), (3 * 8192 + 4096, 3 * (8192 + 8 * 32)), "{split}");
        }
    }

    #[test]
    fn kv_takes_more_memory_where_heads_do_not_divide() {
        let of = |workers, split| {
            let shape = shape("llama-3.1-70b");
            Partition::attention(&shape, workers, split).unwrap().kv_copies(&shape)
        };
        let by_head = [1, 2, 3, 8, 16].map(|workers| of(workers, AttnSplit::Head));
        assert_eq!(by_head, [1.0, 1.0, 9.0 / 8.0, 1.0, 2.0]);
        assert_eq!([3, 16].map(|workers| of(workers, AttnSplit::Request)), [1.0, 1.0]);
        let shape = shape("llama-3.1-70b");
        let even = [1, 3, 8, 16].map(|workers| AttnSplit::even(&shape, workers));
        assert_eq!(even, [AttnSplit::Head, AttnSplit::Request, AttnSplit::Head, AttnSplit::Request]);
    }

    #[test]
    fn what_cannot_be_apart_is_refused_with_the_reason() {
        let refused =
            |name, workers| Partition::attention(&shape(name), workers, AttnSplit::Head).unwrap_err();
        assert!(refused("deepseek-v3", 2).contains("per byte of KV"));
        assert!(refused("qwen3-next-80b-a3b", 2).contains("linear attention"));
        assert!(refused("llama-3.1-8b", 0).contains("needs at least one device"));
        assert!(refused("llama-3.1-8b", 33).contains("32 heads"));
        assert!("layer".parse::<AttnSplit>().unwrap_err().contains("head"));
        assert_eq!("head".parse::<AttnSplit>(), Ok(AttnSplit::Head));
    }
}
