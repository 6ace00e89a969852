//! The device memory for the activations and inputs of a step.

use super::ModelConfig;
use super::attention::distinct_windows;
use super::expanded::ExpandedTables;
use super::step::StepShape;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::sample::PARAMETER_WORDS;
use mixfleet_hal::{BufferUsage, DType, Device, Result, Slice};
use mixfleet_scheduler::layers::{Activation, BufferRoom};
use std::sync::atomic::{AtomicU32, Ordering};

/// The device memory of steps, allocated once for the largest one.
#[derive(Debug)]
pub(super) struct Arena {
    /// Token ids, slots, positions, ranges, block tables and parameters of draws, in one upload per step.
    pub(super) inputs: Slice,
    pub(super) activations: Activations,
    /// The number of rows for which the order of rows by head is valid.
    ordered: AtomicU32,
}

/// Buffers of activations.
#[derive(Debug)]
pub(super) struct Activations([Option<Slice>; Activation::COUNT]);

impl Activations {
    /// Allocates buffers of these bytes.
    pub(super) fn new(
        device: &dyn Device,
        buffers: impl IntoIterator<Item = (Activation, u64)>,
    ) -> Result<Self> {
        let mut all = std::array::from_fn(|_| None);
        for (buffer, bytes) in buffers {
            let usage = match buffer {
                // the buffer stays valid if a lost device returns
                Activation::PieceFactors => BufferUsage::Weights,
                _ => BufferUsage::Activations,
            };
            all[buffer as usize] = Some(device.alloc(bytes.max(4), usage)?);
        }
        Ok(Activations(all))
    }

    /// The memory of a buffer, if steps here use it.
    pub(super) fn get(&self, buffer: Activation) -> Option<&Slice> {
        self.0[buffer as usize].as_ref()
    }

    /// The memory of a buffer that all steps use.
    pub(super) fn of(&self, buffer: Activation) -> &Slice {
        self.get(buffer).unwrap_or_else(|| panic!("no memory was allocated for {buffer:?}"))
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
        let draw_words = sequences * (u64::from(PARAMETER_WORDS) + 1) + 1;
        // ids, positions and, in some models, the numbers of the rows
        let inputs = (3 * tokens + sequences + draw_words) * 4
            + 7 * alignment
            + if attends { attention_input_bytes(c, shape, sequences, alignment) } else { 0 };
        let room = BufferRoom { tokens, sequences, decodes: if attends { sequences } else { 0 } };
        let cost = c.cost_shape(shape.activations, shape.kv, shape.block_tokens);
        let activations = Activations::new(device, cost.buffers(room))?;
        if let (Some(latent), Some(factors)) = (&c.latent, activations.get(Activation::PieceFactors)) {
            device.write(factors, bytemuck::cast_slice(&latent.factors()))?;
        }
        Ok(Arena {
            inputs: device.alloc(inputs.max(4), BufferUsage::Activations)?,
            activations,
            ordered: AtomicU32::new(0),
        })
    }

    /// Writes the order of a step's rows by head, where attention is over latents, unless the last step had
    /// as many. No step that reads the order may run.
    pub(super) fn order_by_head(&self, device: &dyn Device, heads: u32, tokens: u32) -> Result<()> {
        let [order_buffer, starts_buffer] =
            [Activation::HeadOrder, Activation::HeadStarts].map(|buffer| self.activations.get(buffer));
        let (Some(order_buffer), Some(starts_buffer)) = (order_buffer, starts_buffer) else { return Ok(()) };
        if self.ordered.load(Ordering::Relaxed) == tokens {
            return Ok(());
        }
        let order: Vec<u32> =
            (0..heads).flat_map(|head| (0..tokens).map(move |token| token * heads + head)).collect();
        let starts: Vec<u32> = (0..=heads).map(|head| head * tokens).collect();
        device.write(&rows_of(order_buffer, tokens * heads, 1, DType::U32), bytemuck::cast_slice(&order))?;
        device.write(&rows_of(starts_buffer, heads + 1, 1, DType::U32), bytemuck::cast_slice(&starts))?;
        self.ordered.store(tokens, Ordering::Relaxed);
        Ok(())
    }
}

/// Bytes of [`AttentionInputs`](super::attention::AttentionInputs) for the largest step, with up to `decodes`
/// decodes.
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
                assert_eq!(taken, counted, "{name} in {x}");
            }
        }
    }
}
