//! Prompts over latents as they are defined: what their tokens see is gathered from KV pages, keys and values
//! of every head are made of it, and queries attend to these as in any other attention.
//!
//! It is done where it is less arithmetic and there is memory for the keys
//! ([`LatentAttention::expands`]), for all prompts of a step or for none, and takes no operation of its own:
//!
//! - Keys are one product of what is stored, by a matrix `[heads, nope + rope, kv_rank + rope]` that hands
//!   the rotated part to each head.
//! - Operations multiply scores by `1/sqrt(nope + rope)`. What else a family multiplies them by goes into
//!   what keys are made of: a rotation by no angle, whose cosines are this factor.
//! - Values are padded to the length of keys: nothing reads the columns behind them, whatever these hold. It
//!   costs attention `4 (nope + rope)` operations a pair in place of `2 (nope + rope) + 2 v`: 768 in place of
//!   640 in DeepSeek-V3, beside 2176 over latents.

use super::ModelConfig;
use super::arena::{Packer, rows_of};
use super::attention::{AttentionInputs, AttentionSizes};
use super::latent::{LatentHeads, LatentStep};
use super::product::{Out, gemm, product};
use super::step::{StepInput, StepShape};
use super::{KvWeights, LatentWeights, Weights};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{BufferUsage, Cmd, ColumnsOf, DType, Device, KvShape, OpSig, Result, Slice, Support};
use mixfleet_scheduler::cost::{LatentAttention, Prefill};
use std::sync::Arc;

/// Memory for keys and values that are made of latents, and for what is between.
#[derive(Debug)]
pub(super) struct ExpandedArena {
    stored: Slice,  // [piece, kv_rank + rope]
    latents: Slice, // [piece, kv_rank]
    keys: Slice,    // [piece, heads, nope + rope]
    made: Slice,    // [piece, heads, v]
    values: Slice,  // [piece, heads, nope + rope]: these, padded
    factors: Slice, // [piece, kv_rank + rope] f32: cosines, and sines of 0
    pools: [Slice; 2],
}

impl ExpandedArena {
    pub(super) fn new(
        device: &dyn Device,
        (heads, latent): (u32, &LatentHeads),
        shape: &StepShape,
        alloc: &dyn Fn(u64) -> Result<Slice>,
    ) -> Result<Option<Self>> {
        let lengths = &latent.lengths;
        if lengths.expanded_tokens == 0 {
            return Ok(None);
        }
        let (query, stored, piece) = (lengths.query(), lengths.stored(), lengths.piece_tokens());
        let of = |columns: u64| alloc(u64::from(piece) * columns * shape.activations.size_bytes());
        let of_heads = |length: u32| of(u64::from(heads) * u64::from(length));
        let pool = || alloc(pool_bytes(lengths, heads, shape));
        let factor = f64::from(latent.scale.0) * f64::from(query).sqrt();
        let half = std::iter::repeat_n(to_f32(factor), stored as usize / 2);
        let row: Vec<f32> = half.chain(std::iter::repeat_n(0.0, stored as usize / 2)).collect();
        // it stays what it is if a device that was lost comes back
        let factors = device.alloc(u64::from(piece) * u64::from(stored) * 4, BufferUsage::Weights)?;
        device.write(&factors, bytemuck::cast_slice(&row.repeat(piece as usize)))?;
        Ok(Some(ExpandedArena {
            stored: of(stored.into())?,
            latents: of(lengths.kv_rank.into())?,
            keys: of_heads(query)?,
            made: of_heads(lengths.v)?,
            values: of_heads(query)?,
            factors,
            pools: [pool()?, pool()?],
        }))
    }
}

/// Bytes of the keys of all tokens that there is memory for, and of their values.
fn pool_bytes(lengths: &LatentAttention, heads: u32, shape: &StepShape) -> u64 {
    let kv = lengths.expanded_kv(heads, shape.block_tokens, shape.activations);
    let tokens = u64::from(lengths.expanded_pages(shape.block_tokens)) * u64::from(shape.block_tokens);
    tokens * kv.row() * kv.dtype.size_bytes()
}

/// The model on a device, whose prompts attend to latents where it lacks what expanding them needs.
pub(super) fn on_device(
    device: &dyn Device,
    config: Arc<ModelConfig>,
    weights: Option<&Weights>,
    shape: &StepShape,
) -> Arc<ModelConfig> {
    let Some(latent) = config.latent.as_ref().filter(|latent| latent.lengths.expanded_tokens > 0) else {
        return config;
    };
    let expands = weights.and_then(|weights| weights.layers.first()).is_some_and(|layer| {
        let KvWeights::Latent(weights) = &layer.kv else { return false };
        let needed = latent.expanded_operations(weights, (&config, shape));
        let fits = pool_bytes(&latent.lengths, config.heads, shape) <= device.limits().allocation_bytes_max;
        !needed.is_empty() && fits && needed.iter().all(|sig| device.support(sig) != Support::No)
    });
    if expands {
        return config;
    }
    let lengths = LatentAttention { expanded_tokens: 0, ..latent.lengths };
    let latent = Some(LatentHeads { lengths, ..latent.clone() });
    Arc::new(ModelConfig { latent, ..(*config).clone() })
}

impl LatentHeads {
    /// Operations of one row that a device must have to expand latents; none without the matrix for it.
    fn expanded_operations(&self, w: &LatentWeights, (c, shape): (&ModelConfig, &StepShape)) -> Vec<OpSig> {
        let Some(keys) = &w.keys else { return Vec::new() };
        let (lengths, heads, x) = (&self.lengths, c.heads, shape.activations);
        let (query, stored) = (lengths.query(), lengths.stored());
        let kv = lengths.expanded_kv(heads, shape.block_tokens, x);
        let (tokens, sequences, pairs, kv_tokens, pages_max) = (1, 1, 1, 1, 1);
        let of = |row| ColumnsOf { row, first: 0 };
        let [short, long] = [lengths.v, query].map(of);
        let pad = OpSig::CopyColumns { rows: 1, cols: lengths.v, from: short, to: long, x };
        let (window, sinks) = (None, false);
        vec![
            OpSig::KvGather { tokens, kv: shape.kv_shape(c), wire: x },
            OpSig::Rope { tokens, heads: 1, head_dim: stored, part: None, x },
            product(1, (heads * query, stored), (x, keys.kind(), x), false, false),
            product(1, (heads * lengths.v, lengths.kv_rank), (x, w.lower.kind(), x), false, false),
            pad,
            OpSig::KvWrite { tokens, x, kv },
            OpSig::AttnPrefill {
                tokens,
                sequences,
                pairs,
                kv_tokens,
                heads,
                pages_max,
                window,
                sinks,
                x,
                kv,
            },
        ]
    }

    /// Whether a step's prompts are expanded.
    pub(super) fn expands(&self, prefill: &[StepInput<'_>], block_tokens: u32) -> bool {
        let part =
            |p: &StepInput<'_>| Prefill { context: p.start, tokens: to_u32(p.tokens.len()), last: false };
        self.lengths.expands(&prefill.iter().map(part).collect::<Vec<_>>(), block_tokens)
    }
}

/// Where what prompts see is, and where their keys and values are put.
pub(super) struct ExpandedTables {
    /// Slots of the latents.
    from: Vec<u32>,
    /// Slots of the keys made of them; each sequence has pages of its own.
    to: Vec<u32>,
    pages: Vec<u32>,
    pages_max: u32,
}

/// The same on a device, the slots by pieces.
pub(super) struct ExpandedInputs {
    pieces: Vec<(u32, [Slice; 2])>,
    pages: Slice,
    pages_max: u32,
}

impl ExpandedTables {
    pub(super) fn of(prefill: &[StepInput<'_>], block_tokens: u32) -> Self {
        let keys = |p: &StepInput<'_>| p.start + to_u32(p.tokens.len());
        let pages_max = prefill.iter().map(|p| keys(p).div_ceil(block_tokens)).max().unwrap_or(0);
        let (mut from, mut to, mut pages, mut first) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for part in prefill {
            let own = keys(part).div_ceil(block_tokens);
            let slot = |i: u32| part.pages[(i / block_tokens) as usize] * block_tokens + i % block_tokens;
            from.extend((0..keys(part)).map(slot));
            to.extend((0..keys(part)).map(|i| first * block_tokens + i));
            pages.extend((0..pages_max).map(|page| if page < own { first + page } else { 0 }));
            first += own;
        }
        ExpandedTables { from, to, pages, pages_max }
    }

    /// The most bytes that [`ExpandedTables::put`] takes, of steps of so many sequences.
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

    /// Packs it for the device.
    pub(super) fn put(&self, piece_tokens: u32, packer: &mut Packer<'_>) -> ExpandedInputs {
        let length = piece_tokens.max(1) as usize;
        let pieces = self.from.chunks(length).zip(self.to.chunks(length)).map(|(from, to)| {
            let slots = [from, to].map(|words| packer.put(bytemuck::cast_slice(words)));
            (to_u32(from.len()), slots)
        });
        ExpandedInputs {
            pieces: pieces.collect(),
            pages: packer.put(bytemuck::cast_slice(&self.pages)),
            pages_max: self.pages_max,
        }
    }
}

impl LatentStep<'_> {
    /// Rows of those that attend to keys of their own, behind as many columns of each of the others.
    fn rows_behind(&self, slice: &Slice, before: u32, columns: u32) -> Slice {
        let bytes = |rows: u32, columns: u32| u64::from(rows) * u64::from(columns) * self.x.size_bytes();
        slice.range(bytes(self.lifted, before), bytes(self.tokens - self.lifted, columns))
    }

    /// Appends the command that moves the queries of prompts to where they attend from, before what decodes
    /// attended to is written over them.
    pub(super) fn move_queries(&self, list: &mut Vec<Cmd>) -> Result<()> {
        let (heads, lengths) = (self.config.heads, &self.latent.lengths);
        let (query, stored) = (lengths.query(), lengths.stored());
        let from = self.rows_behind(&self.attention.attended, heads * query, heads * query);
        let to = self.rows_behind(&self.attention.q, heads * stored, heads * query);
        let rows = (self.tokens - self.lifted) * heads;
        list.push(self.copy((rows, query), (&from, [query, 0]), (&to, [query, 0]))?);
        Ok(())
    }

    /// Appends the commands in which prompts attend to keys and values that are made of latents, of which
    /// `pool` has all that they see.
    pub(super) fn attend(
        &self,
        w: &LatentWeights,
        (pool, kv): (&Slice, KvShape),
        (sizes, inputs): (&AttentionSizes, &AttentionInputs),
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let (Some(arena), Some(keys), Some(tables)) = (&self.arena.expanded, &w.keys, &inputs.expanded)
        else {
            return Ok(());
        };
        let LatentStep { config: c, latent, attention, x, .. } = *self;
        let LatentAttention { kv_rank, v, .. } = latent.lengths;
        let (heads, query, stored) = (c.heads, latent.lengths.query(), latent.lengths.stored());
        let made_kv = latent.lengths.expanded_kv(heads, kv.page_tokens, x);
        let [key_pool, value_pool] = &arena.pools;
        for (tokens, [from, to]) in &tables.pieces {
            let tokens = *tokens;
            let rows = |slice: &Slice, columns: u32| rows_of(slice, tokens, columns, x);
            let (all, latents) = (rows(&arena.stored, stored), rows(&arena.latents, kv_rank));
            let (made_keys, made) = (rows(&arena.keys, heads * query), rows(&arena.made, heads * v));
            let values = rows(&arena.values, heads * query);
            let gather = OpSig::KvGather { tokens, kv, wire: x };
            list.push(Cmd::new(gather, &[from.clone(), pool.clone(), all.clone()])?);
            list.push(self.copy((tokens, kv_rank), (&all, [stored, 0]), (&latents, [kv_rank, 0]))?);
            let factors = rows_of(&arena.factors, tokens, stored, DType::F32);
            let turn = OpSig::Rope { tokens, heads: 1, head_dim: stored, part: None, x };
            list.push(Cmd::new(turn, &[all.clone(), factors])?);
            list.push(gemm(tokens, &all, x, keys, None, heads * query, stored, Out::Set(&made_keys, x))?);
            list.push(gemm(tokens, &latents, x, &w.lower, None, heads * v, kv_rank, Out::Set(&made, x))?);
            list.push(self.copy((tokens * heads, v), (&made, [v, 0]), (&values, [query, 0]))?);
            let write = OpSig::KvWrite { tokens, x, kv: made_kv };
            let args = [made_keys, values, to.clone(), key_pool.clone(), value_pool.clone()];
            list.push(Cmd::new(write, &args)?);
        }
        let (tokens, which) = (self.tokens - self.lifted, sizes.kv[0]);
        let q = self.rows_behind(&attention.q, heads * stored, heads * query);
        let out = self.rows_behind(&attention.attended, heads * kv_rank, heads * query);
        let sig = OpSig::AttnPrefill {
            tokens,
            sequences: sizes.prefills,
            pairs: which.prefill_pairs,
            kv_tokens: which.prefill_tokens,
            heads,
            pages_max: tables.pages_max,
            window: None,
            sinks: false,
            x,
            kv: made_kv,
        };
        let (starts, context) = (inputs.query_start.clone(), inputs.context.clone());
        let args = [q, starts, context, tables.pages.clone(), key_pool.clone(), value_pool.clone(), out];
        list.push(Cmd::new(sig, &args)?);
        Ok(())
    }

    /// Appends the command that takes values `[tokens, heads, v]` out of what prompts attended to.
    pub(super) fn cut_values(&self, to: &Slice, list: &mut Vec<Cmd>) -> Result<()> {
        let LatentAttention { kv_rank, v, .. } = self.latent.lengths;
        let (heads, query) = (self.config.heads, self.latent.lengths.query());
        let attended = self.rows_behind(&self.attention.attended, heads * kv_rank, heads * query);
        let values = self.rows_behind(to, heads * v, heads * v);
        let rows = (self.tokens - self.lifted) * heads;
        list.push(self.copy((rows, v), (&attended, [query, 0]), (&values, [v, 0]))?);
        Ok(())
    }
}
