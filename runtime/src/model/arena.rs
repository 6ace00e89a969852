//! The device memory for the activations and inputs of a step.

use super::ModelConfig;
use super::attention::{AttentionArena, distinct_windows};
use super::expanded::ExpandedTables;
use super::experts::Mixture;
use super::latent::LatentArena;
use super::step::StepShape;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::sample::PARAMETER_WORDS;
use mixfleet_hal::{BufferUsage, DType, Device, Result, Slice};

/// Activation buffers, allocated once for the largest step.
#[derive(Debug)]
pub(super) struct Arena {
    /// Token ids, slots, positions, ranges, block tables and parameters of draws, in one upload per step.
    pub(super) inputs: Slice,
    pub(super) residual: Slice, // [tokens, hidden] f32
    pub(super) normed: Slice,   // [tokens, hidden]
    pub(super) attention: AttentionArena,
    pub(super) k_raw: Slice, // [tokens, kv_heads, head_dim] before its norm
    pub(super) gate: Slice, // [tokens, intermediate], or [choices, an expert's] where that is longer; or with up
    pub(super) up: Slice,   // likewise, or nothing
    pub(super) inner: Slice, // likewise
    pub(super) experts: Option<ExpertArena>,
    pub(super) latent: Option<LatentArena>,
    pub(super) picked: Slice,  // [sequences, hidden] f32
    pub(super) logits: Slice,  // [sequences, vocab] f32
    pub(super) cos_sin: Slice, // [tokens, rotated] f32
}

/// What a step needs to go through experts.
#[derive(Debug)]
pub(super) struct ExpertArena {
    pub(super) logits: Slice,  // [tokens, experts] f32
    pub(super) chosen: Slice,  // [tokens, active] u32
    pub(super) weights: Slice, // [tokens, active] f32
    pub(super) order: Slice,   // [tokens * active] u32
    pub(super) starts: Slice,  // [experts + 1] u32
    pub(super) made: Slice,    // [tokens, active, hidden]
}

impl ExpertArena {
    fn new(
        experts: &Mixture,
        (tokens, hidden_bytes): (u64, u64),
        alloc: &dyn Fn(u64) -> Result<Slice>,
    ) -> Result<Self> {
        let (count, active) = (u64::from(experts.routing.experts), u64::from(experts.routing.active));
        Ok(ExpertArena {
            logits: alloc(tokens * count * 4)?,
            chosen: alloc(tokens * active * 4)?,
            weights: alloc(tokens * active * 4)?,
            order: alloc(tokens * active * 4)?,
            starts: alloc((count + 1) * 4)?,
            made: alloc(tokens * active * hidden_bytes)?,
        })
    }
}

impl Arena {
    pub(super) fn new(
        device: &dyn Device,
        c: &ModelConfig,
        shape: &StepShape,
        alignment: u64,
        attends: bool,
    ) -> Result<Self> {
        let (tokens, sequences) = (u64::from(shape.tokens_max), u64::from(shape.sequences_max));
        let x = shape.activations.size_bytes();
        let (hidden, vocab) = (u64::from(c.hidden), u64::from(c.vocab));
        let inner =
            c.experts.as_ref().map_or(c.intermediate.into(), |experts| experts.inner_length(c.intermediate));
        let joined = c.experts.as_ref().is_some_and(|experts| experts.clamped.is_some());
        let kv_cols = u64::from(c.kv_heads * c.head_dim);
        let draw_words = sequences * (u64::from(PARAMETER_WORDS) + 1) + 1;
        let inputs = (2 * tokens + sequences + draw_words) * 4
            + 6 * alignment
            + if attends { attention_input_bytes(c, shape, sequences, alignment) } else { 0 };
        let alloc = |bytes: u64| device.alloc(bytes.max(4), BufferUsage::Activations);
        let decodes = if attends { sequences } else { 0 };
        Ok(Arena {
            inputs: alloc(inputs)?,
            residual: alloc(tokens * hidden * 4)?,
            normed: alloc(tokens.max(sequences) * hidden * x)?,
            attention: AttentionArena::new(c, shape.activations, (tokens, decodes), &alloc)?,
            k_raw: alloc(if c.qk_norm { tokens * kv_cols * x } else { 0 })?,
            gate: alloc(tokens * inner * x * if joined { 2 } else { 1 })?,
            up: alloc(if joined { 0 } else { tokens * inner * x })?,
            inner: alloc(tokens * inner * x)?,
            experts: c
                .experts
                .as_ref()
                .map(|experts| ExpertArena::new(experts, (tokens, hidden * x), &alloc))
                .transpose()?,
            latent: c
                .latent
                .as_ref()
                .map(|latent| LatentArena::new(device, c, latent, shape, &alloc))
                .transpose()?,
            picked: alloc(sequences * hidden * 4)?,
            logits: alloc(sequences * vocab * 4)?,
            cos_sin: alloc(tokens * u64::from(c.rotated()) * 4)?,
        })
    }
}

/// Bytes that [`AttentionInputs`](super::attention::AttentionInputs) takes for the largest step, with up to
/// so many decodes.
pub(super) fn attention_input_bytes(c: &ModelConfig, shape: &StepShape, decodes: u64, alignment: u64) -> u64 {
    let (tokens, sequences) = (u64::from(shape.tokens_max), u64::from(shape.sequences_max));
    let (windows, row) = (distinct_windows(c).len() as u64, u64::from(table_row(c, shape)));
    let parts = u64::from(c.pages.parts.count());
    let words = tokens * parts + decodes * (2 * windows + row * parts) + sequences * (2 + row * parts) + 1;
    let expanded = c.latent.as_ref().map_or(0, |latent| {
        ExpandedTables::bytes(&latent.lengths, (shape.sequences_max, shape.block_tokens), alignment)
    });
    words * 4 + (2 + 3 * parts + windows) * alignment + expanded
}

/// Length of the longest row of a block table.
pub(super) fn table_row(config: &ModelConfig, shape: &StepShape) -> u32 {
    shape.blocks.min(config.context_max.div_ceil(shape.block_tokens) + 1)
}

/// The first `rows` rows of a buffer.
pub(super) fn rows_of(slice: &Slice, rows: u32, cols: u32, dtype: DType) -> Slice {
    slice.range(0, u64::from(rows) * u64::from(cols) * dtype.size_bytes())
}

/// Packs a step's inputs end to end into one upload.
pub(super) struct Packer<'a> {
    pub(super) bytes: Vec<u8>,
    pub(super) alignment: u64,
    pub(super) target: &'a Slice,
}

impl Packer<'_> {
    pub(super) fn put(&mut self, data: &[u8]) -> Slice {
        let offset = (self.bytes.len() as u64).next_multiple_of(self.alignment);
        self.bytes.resize(to_usize(offset), 0);
        self.bytes.extend_from_slice(data);
        self.target.range(offset, data.len() as u64)
    }

    pub(super) fn put_words(&mut self, words: impl IntoIterator<Item = u32>) -> Slice {
        let words: Vec<u32> = words.into_iter().collect();
        self.put(bytemuck::cast_slice(&words))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::MemoryDevice;
    use super::super::variants::tiny_variants;
    use super::*;

    #[test]
    fn activations_take_what_the_scheduler_counts_for_them() {
        for (name, checkpoint) in tiny_variants() {
            let config = checkpoint.load().unwrap().config;
            for (x, tokens_max, sequences_max) in [(DType::F32, 24, 4), (DType::Bf16, 512, 64)] {
                let (activations, kv) = (x, x);
                let shape =
                    StepShape { tokens_max, sequences_max, blocks: 16, block_tokens: 8, activations, kv };
                let device = MemoryDevice::new(false, 16);
                let arena = Arena::new(&device, &config, &shape, 16, true).unwrap();
                let all: u64 = device.allocations.lock().unwrap().iter().sum();
                let taken = all - arena.inputs.buffer.size_bytes();
                let counted = config.cost_shape(x, x, 8).activation_bytes(tokens_max, sequences_max);
                // nothing is allocated as 4 bytes, at most twice
                assert!((counted..=counted + 8).contains(&taken), "{name} in {x}: {taken} for {counted}");
            }
        }
    }
}
