//! Prompts over expanded latents: latents that the tokens see are gathered from KV pages and expanded to keys
//! and values of every head, which queries attend to as in ordinary attention.
//!
//! Expansion is used where it takes less arithmetic and there is memory for the keys
//! ([`LatentAttention::expands`]), for all prompts of a step or for none, and needs no operation of its own:
//!
//! - Keys are one product of the stored vectors, by a matrix `[heads, nope + rope, kv_rank + rope]` that
//!   copies the rotated part to each head.
//! - Operations multiply scores by `1/sqrt(nope + rope)`. Other multipliers of a family are applied to the
//!   input of the keys: a rotation by a zero angle, whose cosines are the multiplier.
//! - Values are padded to the length of keys: no operation reads the padding. It costs attention `4 (nope +
//!   rope)` operations a pair in place of `2 (nope + rope) + 2 v`: 768 in place of 640 in DeepSeek-V3, beside
//!   2176 over latents.

use super::arena::Packer;
use super::bind::NeededOps;
use super::latent::LatentHeads;
use super::step::{StepInput, StepShape};
use super::{ModelConfig, Weights};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{Device, Slice, Support};
use mixfleet_scheduler::cost::{LatentAttention, Prefill};
use mixfleet_scheduler::layers::{Activation, AttentionSizes, BufferRoom, KvSizes, LayerOps};
use std::sync::Arc;

/// The model on a device; prompts attend to latents where the memory for expansion is missing.
pub(super) fn on_device(
    device: &dyn Device,
    config: Arc<ModelConfig>,
    weights: Option<&Weights>,
    shape: &StepShape,
) -> Arc<ModelConfig> {
    let Some(latent) = config.latent.as_ref().filter(|latent| latent.lengths.expanded_tokens > 0) else {
        return config;
    };
    let cost = config.cost_shape(shape.activations, shape.kv, shape.block_tokens);
    let expands = weights.is_some_and(|weights| {
        let one = KvSizes { decode_tokens: 0, prefill_pairs: 1, prefill_tokens: 1 };
        let (tokens, written, prefills, pages_max) = (1, 1, 1, 1);
        let expanded_pages_max = Some(pages_max);
        let kv = vec![one];
        let sizes =
            AttentionSizes { tokens, written, prefills, expanded_pages_max, kv, ..AttentionSizes::default() };
        let mut needed = NeededOps::of(Some((weights, 0)));
        LayerOps { constants: config.constants(), ..LayerOps::counted(&cost) }.attend(
            (0, None),
            &sizes,
            &mut needed,
        );
        let room = BufferRoom { tokens: 0, sequences: 0, decodes: 0 };
        let pool = cost.buffers(room).into_iter().find(|(buffer, _)| *buffer == Activation::ExpandedKeyPool);
        let fits = pool.is_none_or(|(_, bytes)| bytes <= device.limits().allocation_bytes_max);
        !needed.lacks_weights && fits && needed.finish().iter().all(|sig| device.support(sig) != Support::No)
    });
    if expands {
        return config;
    }
    let lengths = LatentAttention { expanded_tokens: 0, ..latent.lengths };
    let latent = Some(LatentHeads { lengths, ..latent.clone() });
    Arc::new(ModelConfig { latent, ..(*config).clone() })
}

impl LatentHeads {
    /// Cosines, and sines of 0, for each token of a piece: they multiply the keys' input by the score
    /// multiplier beyond `1/sqrt(nope + rope)`.
    pub(super) fn factors(&self) -> Vec<f32> {
        let (query, stored) = (self.lengths.query(), self.lengths.stored());
        let factor = f64::from(self.scale.0) * f64::from(query).sqrt();
        let half = std::iter::repeat_n(to_f32(factor), stored as usize / 2);
        let row: Vec<f32> = half.chain(std::iter::repeat_n(0.0, stored as usize / 2)).collect();
        row.repeat(self.lengths.piece_tokens() as usize)
    }

    /// Whether a step's prompts are expanded.
    pub(super) fn expands(&self, prefill: &[StepInput<'_>], block_tokens: u32) -> bool {
        let parts: Vec<Prefill> = prefill.iter().map(StepInput::prefill).collect();
        self.lengths.expands(&parts, block_tokens)
    }
}

/// Slots of the latents that prompts see, and slots of the expanded keys and values.
pub(super) struct ExpandedTables {
    /// Slots of the latents.
    from: Vec<u32>,
    /// Slots of the expanded keys; each sequence has pages of its own.
    to: Vec<u32>,
    pages: Vec<u32>,
}

/// The tables on a device, the slots by pieces.
pub(super) struct ExpandedInputs {
    pieces: Vec<[Slice; 2]>,
    pub(super) pages: Slice,
}

impl ExpandedInputs {
    /// The slots of a piece.
    pub(super) fn piece(&self, piece: u32) -> Option<&[Slice; 2]> {
        self.pieces.get(piece as usize)
    }
}

/// The keys that a piece of a prompt sees.
fn keys_seen(part: &StepInput<'_>) -> u32 {
    part.start + to_u32(part.tokens.len())
}

impl ExpandedTables {
    /// Row length of the block table of these prompts.
    pub(super) fn pages_max(prefill: &[StepInput<'_>], block_tokens: u32) -> u32 {
        prefill.iter().map(|part| keys_seen(part).div_ceil(block_tokens)).max().unwrap_or(0)
    }

    pub(super) fn of(prefill: &[StepInput<'_>], block_tokens: u32) -> Self {
        let pages_max = ExpandedTables::pages_max(prefill, block_tokens);
        let (mut from, mut to, mut pages, mut first) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for part in prefill {
            let own = keys_seen(part).div_ceil(block_tokens);
            let slot = |i: u32| part.pages[(i / block_tokens) as usize] * block_tokens + i % block_tokens;
            from.extend((0..keys_seen(part)).map(slot));
            to.extend((0..keys_seen(part)).map(|i| first * block_tokens + i));
            pages.extend((0..pages_max).map(|page| if page < own { first + page } else { 0 }));
            first += own;
        }
        ExpandedTables { from, to, pages }
    }

    /// Maximum bytes for [`ExpandedTables::put`], of steps of up to `sequences` sequences.
    pub(super) fn bytes(
        lengths: &LatentAttention,
        (sequences, block_tokens): (u32, u32),
        alignment: u64,
    ) -> u64 {
        let tokens = u64::from(lengths.expanded_tokens);
        if tokens == 0 {
            return 0;
        }
        let pages = u64::from(sequences) * u64::from(lengths.expanded_pages(block_tokens));
        let pieces = tokens.div_ceil(lengths.piece_tokens().into());
        (2 * tokens + pages) * 4 + (2 * pieces + 1) * alignment
    }

    /// Packs the tables for the device.
    pub(super) fn put(&self, piece_tokens: u32, packer: &mut Packer<'_>) -> ExpandedInputs {
        let length = piece_tokens.max(1) as usize;
        let pieces = self
            .from
            .chunks(length)
            .zip(self.to.chunks(length))
            .map(|(from, to)| [from, to].map(|words| packer.put(bytemuck::cast_slice(words))));
        ExpandedInputs { pieces: pieces.collect(), pages: packer.put(bytemuck::cast_slice(&self.pages)) }
    }
}
