//! The forward pass as commands: one list per layer, so that the KV of a layer can be sent while later layers
//! still run.
//!
//! The residual stream is f32 whatever the dtype of activations: it is read and written once per block, and
//! rounding it would cost more accuracy than all other roundings together.

use super::arena::{Arena, Packer, rows_of, table_row};
use super::attention::zeros;
use super::attention::{
    Attention, AttentionArena, AttentionInputs, AttentionSizes, AttentionTables, Reaches,
};
use super::draws::{DrawArena, DrawOutputs, DrawSizes};
use super::expanded::{self, ExpandedTables};
use super::latent::LatentStep;
use super::mixture::MlpStep;
use super::product::{Out, embedding, gemm};
use super::reach::visible;
use super::rope_table::RopeTable;
pub use super::step::{StepInput, StepShape};
use super::{HeadWeights, KvWeights, ModelConfig, Tensor, Weights};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Cmd, DType, Device, Error, OpSig, Result, Scalar, Slice};
use mixfleet_scheduler::cost::MemberShare;
use std::sync::Arc;

/// Minimum row length of the block table in a recorded step, so that short sequences share a recording.
const PAGES_MIN: u32 = 8;

/// Rows of a recorded step come in multiples of this from there on, and in powers of two below.
const ROWS_STEP: u32 = 8;

/// Number of rows of the recording that a step of `decodes` rows uses.
fn bucket(decodes: u32) -> u32 {
    if decodes < ROWS_STEP { decodes.next_power_of_two() } else { decodes.next_multiple_of(ROWS_STEP) }
}

/// A step whose inputs are on the device; its commands are built list by list.
pub struct Pass {
    sizes: Sizes,
    inputs: Inputs,
    key: Option<StepKey>,
}

/// Steps of equal keys on one [`Forward`] have equal commands, so that one recording serves all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey {
    /// Number of rows, each of which decodes one token or nothing.
    decodes: u32,
    /// Row length of the block table.
    pages_max: u32,
    draws: Option<DrawSizes>,
}

impl Pass {
    /// Number of rows of the logits: one per part whose next token is needed.
    pub fn rows(&self) -> u32 {
        to_u32(self.sizes.picks.len()) - self.sizes.padding
    }

    /// Number of rows of activations: one per new token.
    pub(super) fn tokens(&self) -> u32 {
        self.sizes.rows.tokens
    }

    /// The key of a recording of this step; none for steps that are unlikely to recur.
    pub fn key(&self) -> Option<StepKey> {
        self.key
    }
}

/// A model on a device, ready to run steps.
pub struct Forward {
    config: Arc<ModelConfig>,
    /// None where others' KV is kept and nothing computed.
    weights: Option<Weights>,
    shape: StepShape,
    /// None on a member that leaves attention to others.
    attention: Option<Attention>,
    arena: Arena,
    draws: Option<DrawArena>,
    rope: Arc<RopeTable>,
    alignment: u64,
    replay_pays: bool,
    /// Rows of the LM head here.
    logit_cols: u32,
    /// Whether projections back to the residual stream add to it. They do on the first of the members that
    /// divide a model; on the others they replace it, so that the sum over all members is the residual.
    adds: bool,
}

/// The device memory of a step's inputs.
struct Inputs {
    ids: Slice,
    positions: Slice,
    attention: Option<AttentionInputs>,
    picks: Slice,
    draws: Option<DrawOutputs>,
}

/// The sizes of a step.
struct Sizes {
    rows: AttentionSizes,
    /// Decodes that stand for nothing: they read no KV, write theirs where nothing is read, and come last.
    padding: u32,
    picks: Vec<u32>,
    draws: Option<DrawSizes>,
}

impl Forward {
    /// Allocates KV pools and activations on `device`.
    pub fn new(
        device: &dyn Device,
        config: Arc<ModelConfig>,
        weights: Weights,
        shape: StepShape,
    ) -> Result<Self> {
        let draws = DrawArena::new(device, config.vocab, shape.sequences_max)?;
        let rope = Arc::new(RopeTable::new(device, &config, &shape)?);
        Forward::with(device, config, (Some(weights), rope), shape, draws, true)
    }

    /// Allocates the KV pools of a model of which this device only keeps KV that others computed.
    pub fn keeping(device: &dyn Device, config: Arc<ModelConfig>, shape: StepShape) -> Result<Self> {
        // no step runs, so activations take no room
        let least = StepShape { tokens_max: 1, sequences_max: 1, ..shape };
        let rope = Arc::new(RopeTable::new(device, &config, &least)?);
        Ok(Forward { shape, ..Forward::with(device, config, (None, rope), least, None, true)? })
    }

    /// Allocates the KV pools, unless it keeps none, and activations of a member's share of a model. Only
    /// [`run_stages`](super::divided::run_stages) and [`run_apart`](super::apart::run_apart) run it; one of
    /// the members draws.
    pub fn of_member(
        device: &dyn Device,
        config: &ModelConfig,
        share: &MemberShare,
        weights: Weights,
        shape: StepShape,
    ) -> Result<Self> {
        let draws = match share.draws() {
            true => DrawArena::new(device, config.vocab, shape.sequences_max)?,
            false => None,
        };
        let config = Arc::new(config.of_member(share));
        let rope = Arc::new(RopeTable::new(device, &config, &shape)?);
        let whole = Forward::with(device, config, (Some(weights), rope), shape, draws, share.keeps_kv())?;
        let (logit_cols, adds) = (to_u32(share.vocab.len()), share.is_first());
        // members of unlike devices have the same rows only if no device rounds them up
        Ok(Forward { logit_cols, adds, replay_pays: false, ..whole })
    }

    /// The same member for the second of two batches in flight: the same weights, and activations of its own.
    ///
    /// # Errors
    /// Those of the device, and `Unsupported` if it keeps KV or a step cannot be halved.
    pub fn for_second_batch(&self, device: &dyn Device) -> Result<Self> {
        let shape = self.shape.of_second_batch().filter(|_| self.attention.is_none());
        let shape = shape.ok_or_else(|| Error::unsupported("this member runs one batch at a time"))?;
        let draws = match self.draws {
            Some(_) => DrawArena::new(device, self.config.vocab, shape.sequences_max)?,
            None => None,
        };
        let own = (self.weights.clone(), self.rope.clone());
        let second = Forward::with(device, self.config.clone(), own, shape, draws, false)?;
        let Forward { logit_cols, adds, replay_pays, .. } = *self;
        Ok(Forward { logit_cols, adds, replay_pays, ..second })
    }

    fn with(
        device: &dyn Device,
        config: Arc<ModelConfig>,
        (weights, rope): (Option<Weights>, Arc<RopeTable>),
        shape: StepShape,
        draws: Option<DrawArena>,
        keeps_kv: bool,
    ) -> Result<Self> {
        let replay_pays = device.limits().replay_pays;
        // where the padding of recorded steps writes
        let spare = if replay_pays { (ROWS_STEP - 1).div_ceil(shape.block_tokens) } else { 0 };
        let config = expanded::on_device(device, config, weights.as_ref().filter(|_| keeps_kv), &shape);
        let attention = keeps_kv.then(|| Attention::new(device, &config, &shape, spare)).transpose()?;
        let alignment = device.limits().alignment_bytes.max(4);
        let arena = Arena::new(device, &config, &shape, alignment, keeps_kv)?;
        let (logit_cols, adds) = (config.vocab, true);
        Ok(Forward {
            config,
            weights,
            shape,
            attention,
            arena,
            draws,
            rope,
            alignment,
            replay_pays,
            logit_cols,
            adds,
        })
    }

    /// The configuration of the model, or of the share of it that is here.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The limits of a step.
    pub fn shape(&self) -> &StepShape {
        &self.shape
    }

    /// Whether logits are computed here.
    pub(super) fn has_head(&self) -> bool {
        self.weights.as_ref().is_some_and(|weights| weights.head.is_some())
    }

    /// Whether steps can run, for which it has weights.
    pub fn computes(&self) -> bool {
        self.weights.is_some()
    }

    fn weights(&self) -> Result<&Weights> {
        let none = || Error::unsupported("KV is kept here, and there are no weights to compute with");
        self.weights.as_ref().ok_or_else(none)
    }

    /// The pools of keys and values of each layer here; none on a member that keeps no KV.
    pub fn kv_pools(&self) -> &[(Slice, Slice)] {
        self.attention.as_ref().map_or(&[], Attention::pools)
    }

    /// Uploads the inputs of a step. Parts with one token come first. No earlier step may still run, since it
    /// reads the same buffers.
    pub fn begin(&self, device: &dyn Device, parts: &[StepInput<'_>]) -> Result<Pass> {
        let mut sizes = self.sizes(parts);
        let key = self.replay_pays.then(|| self.evened(&mut sizes)).flatten();
        let inputs = self.upload(device, parts, &sizes)?;
        Ok(Pass { sizes, inputs, key })
    }

    /// Rounds the sizes of a step that only decodes up to sizes that later steps will share: a few numbers of
    /// rows, block tables whose length is a power of two, all blocks full. That changes only what a device
    /// expects to read, not the result, since the ranges define what is read.
    fn evened(&self, sizes: &mut Sizes) -> Option<StepKey> {
        let (decodes, windows) = (sizes.rows.decodes, self.reaches().windows);
        if decodes == 0 || sizes.rows.tokens != decodes || sizes.picks.len() != decodes as usize {
            return None;
        }
        let row_max = table_row(&self.config, &self.shape);
        let pages_max = sizes.rows.decode_pages_max.next_power_of_two().max(PAGES_MIN).min(row_max);
        sizes.rows.decode_pages_max = pages_max;
        let rows = bucket(decodes).min(self.shape.sequences_max);
        sizes.padding = rows - decodes;
        (sizes.rows.decodes, sizes.rows.tokens, sizes.rows.written) = (rows, rows, rows);
        sizes.picks.extend(decodes..rows);
        for (kv, &window) in sizes.rows.kv.iter_mut().zip(windows) {
            let last = (pages_max * self.shape.block_tokens).min(self.config.context_max) - 1;
            kv.decode_tokens = u64::from(rows) * visible(last, window);
        }
        Some(StepKey { decodes: rows, pages_max, draws: sizes.draws })
    }

    /// The logits of a step: `[rows, vocab]` f32, one row per part with `sample`, in order.
    pub fn logits(&self, step: &Pass) -> Slice {
        rows_of(&self.arena.logits, step.rows(), self.config.vocab, DType::F32)
    }

    /// The logits of a step that are computed here: `[rows, rows of the LM head]` f32.
    pub(super) fn own_logits(&self, step: &Pass) -> Slice {
        rows_of(&self.arena.logits, step.rows(), self.logit_cols, DType::F32)
    }

    /// The residual stream of a step: `[tokens, hidden]` f32.
    pub(super) fn step_residual(&self, step: &Pass) -> Slice {
        self.residual(step.sizes.rows.tokens)
    }

    /// The memory of the residual streams of all steps.
    pub(super) fn residual_memory(&self) -> &Slice {
        &self.arena.residual
    }

    /// How the layers whose KV is here differ in what they read.
    fn reaches(&self) -> Reaches<'_> {
        self.attention.as_ref().map_or(Reaches { windows: &[], parts: 1 }, Attention::reaches)
    }

    /// What of a step is read once it is done: what was drawn, or the logits if the device cannot draw.
    pub fn results(&self, step: &Pass) -> Vec<Slice> {
        self.drawn(step).map_or_else(|| vec![self.logits(step)], |drawn| drawn.results(step.rows()))
    }

    /// The drawn tokens of a step; none if the device cannot draw.
    pub fn drawn<'a>(&self, step: &'a Pass) -> Option<&'a DrawOutputs> {
        step.inputs.draws.as_ref()
    }

    fn sizes(&self, parts: &[StepInput<'_>]) -> Sizes {
        let decodes = parts.iter().take_while(|p| p.tokens.len() == 1).count();
        let (decode, prefill) = parts.split_at(decodes);
        let mut picks = Vec::new();
        let mut row = 0;
        for part in parts {
            row += to_u32(part.tokens.len());
            if part.draw.is_some() {
                picks.push(row - 1);
            }
        }
        let draws = (self.draws.is_some() && !picks.is_empty())
            .then(|| DrawSizes::of(parts.iter().filter_map(|part| part.draw.as_ref())));
        let mut rows = AttentionSizes::of(decode, prefill, self.reaches());
        let latent = self.config.latent.as_ref();
        rows.expanded = latent.is_some_and(|latent| latent.expands(prefill, self.shape.block_tokens));
        Sizes { rows, padding: 0, picks, draws }
    }

    fn upload(&self, device: &dyn Device, parts: &[StepInput<'_>], sizes: &Sizes) -> Result<Inputs> {
        let halves = parts.split_at((sizes.rows.decodes - sizes.padding) as usize);
        let padding = sizes.padding as usize;
        let mut packer = Packer { bytes: Vec::new(), alignment: self.alignment, target: &self.arena.inputs };
        let at = |p: &StepInput<'_>| p.start..p.start + to_u32(p.tokens.len());
        let ids = parts.iter().flat_map(|p| p.tokens.iter().copied()).chain(zeros(padding));
        let positions: Vec<u32> = parts.iter().flat_map(at).chain(zeros(padding)).collect();
        let attention = self.attention.as_ref().map(|attention| {
            let (block, rows) = (self.shape.block_tokens, &sizes.rows);
            let mut tables = AttentionTables::of(halves.0, halves.1, block, rows, attention.reaches());
            tables.pad(sizes.padding, attention.first_spare(), rows.decode_pages_max);
            let mut inputs = tables.put(&mut packer);
            let latent = self.config.latent.as_ref().filter(|_| rows.expanded);
            inputs.expanded = latent.map(|latent| {
                ExpandedTables::of(halves.1, block).put(latent.lengths.piece_tokens(), &mut packer)
            });
            inputs
        });
        let draws = match (&self.draws, sizes.draws) {
            (Some(arena), Some(draws)) => {
                let rows = parts.iter().filter_map(|part| part.draw.as_ref());
                Some(arena.upload(device, rows, padding, draws, &mut packer)?)
            }
            _ => None,
        };
        let inputs = Inputs {
            ids: packer.put_words(ids),
            positions: packer.put_words(positions.iter().copied()),
            attention,
            picks: packer.put_words(sizes.picks.iter().copied()),
            draws,
        };
        device.write(&self.arena.inputs.range(0, packer.bytes.len() as u64), &packer.bytes)?;
        if let Some(latent) = &self.arena.latent {
            latent.order(device, self.config.heads, sizes.rows.lifted())?;
        }
        self.rope.extend_to(device, &self.config.rope, positions.iter().copied().max().unwrap_or(0))?;
        Ok(inputs)
    }

    /// All commands of a step.
    pub fn whole(&self, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.embed(pass)?;
        for layer in 0..self.config.layers as usize {
            list.extend(self.layer(layer, pass)?);
        }
        list.extend(self.head(pass)?);
        Ok(list)
    }

    /// The commands for the token embedding, where the first layers are, and for the rows of the rope table.
    pub fn embed(&self, Pass { sizes, inputs, .. }: &Pass) -> Result<Vec<Cmd>> {
        let (vocab, hidden, tokens) = (self.config.vocab, self.config.hidden, sizes.rows.tokens);
        let lookup = self.weights()?.embed.as_ref().map(|table| {
            let mut args = vec![inputs.ids.clone()];
            args.extend(table.arrays().cloned());
            args.push(self.residual(tokens));
            Cmd::new(embedding(tokens, vocab, hidden, table.kind()), &args)
        });
        let rope = self.rope.rows(&inputs.positions, tokens, &self.cos_sin(tokens))?;
        Ok(lookup.transpose()?.into_iter().chain([rope]).collect())
    }

    fn cos_sin(&self, tokens: u32) -> Slice {
        rows_of(&self.arena.cos_sin, tokens, self.config.rotated(), DType::F32)
    }

    fn residual(&self, rows: u32) -> Slice {
        rows_of(&self.arena.residual, rows, self.config.hidden, DType::F32)
    }

    /// The commands of decoder layer `at`.
    pub fn layer(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.attention_block(at, pass)?;
        list.extend(self.mlp_block(at, pass)?);
        Ok(list)
    }

    /// The commands of layer `at` from the residual stream to attention's part of it.
    pub(super) fn attention_block(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.attention_inputs(at, pass)?;
        if let (Some(attention), Some(inputs)) = (&self.attention, &pass.inputs.attention) {
            let rows = &pass.sizes.rows;
            attention.commands(at, rows, inputs, &self.arena.attention, &mut list)?;
            if let (Some(step), KvWeights::Latent(weights)) =
                (self.latent_step(rows).filter(|_| rows.expanded), &self.weights()?.layers[at].kv)
            {
                step.attend(weights, attention.latents(at), (rows, inputs), &mut list)?;
            }
        }
        list.extend(self.attention_output(at, pass)?);
        Ok(list)
    }

    /// The commands of layer `at` from what was attended to, to the residual stream.
    pub(super) fn attention_output(&self, at: usize, Pass { sizes, .. }: &Pass) -> Result<Vec<Cmd>> {
        let (w, c, x) = (&self.weights()?.layers[at], &self.config, self.shape.activations);
        let (tokens, mut list) = (sizes.rows.tokens, Vec::with_capacity(2));
        let residual = self.residual(tokens);
        let (attended, columns) = match (self.latent_step(&sizes.rows), &w.kv) {
            (Some(step), KvWeights::Latent(weights)) => {
                (step.values(weights, &mut list)?, c.heads * step.latent.lengths.v)
            }
            _ => {
                let columns = c.heads * c.head_dim;
                (rows_of(&self.arena.attention.attended, tokens, columns, x), columns)
            }
        };
        let (o_bias, out) = (w.o_bias.as_ref(), self.back(&residual));
        list.push(gemm(tokens, &attended, x, &w.o, o_bias, c.hidden, columns, out)?);
        Ok(list)
    }

    /// What latent attention needs of a step; none for other attention.
    fn latent_step(&self, rows: &AttentionSizes) -> Option<LatentStep<'_>> {
        Some(LatentStep {
            config: &self.config,
            latent: self.config.latent.as_ref()?,
            attention: &self.arena.attention,
            arena: self.arena.latent.as_ref()?,
            tokens: rows.tokens,
            lifted: rows.lifted(),
            x: self.shape.activations,
        })
    }

    /// Queries, keys, values and what was attended to of a step's rows.
    pub(super) fn attention_arena(&self) -> &AttentionArena {
        &self.arena.attention
    }

    /// What a projection back to the residual stream does with it.
    fn back<'a>(&self, residual: &'a Slice) -> Out<'a> {
        if self.adds { Out::Add(residual) } else { Out::Set(residual, DType::F32) }
    }

    /// The commands of layer `at` after attention.
    pub(super) fn mlp_block(&self, at: usize, Pass { sizes, .. }: &Pass) -> Result<Vec<Cmd>> {
        let (w, c, x, arena) =
            (&self.weights()?.layers[at], &self.config, self.shape.activations, &self.arena);
        let tokens = sizes.rows.tokens;
        let mut list = Vec::with_capacity(5);
        let residual = self.residual(tokens);
        let normed = rows_of(&arena.normed, tokens, c.hidden, x);
        list.push(self.norm(tokens, c.hidden, (&residual, DType::F32), &w.mlp_norm, &normed)?);
        let step = MlpStep { config: c, arena, tokens, x, normed: &normed };
        match (&w.mlp, &w.experts) {
            (Some(mlp), None) => step.mlp(mlp, c.intermediate, self.back(&residual), &mut list)?,
            (shared, Some(experts)) => {
                step.experts(at, (shared.as_ref(), experts), (&residual, self.adds), &mut list)?;
            }
            (None, None) => {}
        }
        Ok(list)
    }

    /// The commands of layer `at` from the residual stream to queries, keys and values: norm, projections,
    /// per-head norms and rope.
    pub(super) fn attention_inputs(&self, at: usize, Pass { sizes, .. }: &Pass) -> Result<Vec<Cmd>> {
        let (w, mut list) = (&self.weights()?.layers[at], Vec::with_capacity(20));
        let (c, x, arena, tokens) = (&self.config, self.shape.activations, &self.arena, sizes.rows.tokens);
        let (q_cols, kv_cols) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let normed = rows_of(&arena.normed, tokens, c.hidden, x);
        list.push(self.norm(
            tokens,
            c.hidden,
            (&self.residual(tokens), DType::F32),
            &w.attn_norm,
            &normed,
        )?);
        let [k_weight, v_weight] = match &w.kv {
            KvWeights::Apart(weights) => weights,
            KvWeights::Latent(weights) => {
                let none = || Error::invalid("latents without latent attention");
                let step = self.latent_step(&sizes.rows).ok_or_else(none)?;
                step.inputs((weights, &w.q), &normed, &self.cos_sin(tokens), &mut list)?;
                return Ok(list);
            }
        };
        let q = rows_of(&arena.attention.q, tokens, q_cols, x);
        let k = rows_of(&arena.attention.k, tokens, kv_cols, x);
        let v = rows_of(&arena.attention.v, tokens, kv_cols, x);
        let (q_raw, k_raw) = if c.qk_norm {
            (rows_of(&arena.attention.attended, tokens, q_cols, x), rows_of(&arena.k_raw, tokens, kv_cols, x))
        } else {
            (q.clone(), k.clone())
        };
        let mut project = |weight: &Tensor, bias: Option<&Tensor>, n, out| -> Result<()> {
            list.push(gemm(tokens, &normed, x, weight, bias, n, c.hidden, Out::Set(out, x))?);
            Ok(())
        };
        project(&w.q, w.q_bias.as_ref(), q_cols, &q_raw)?;
        project(k_weight, w.k_bias.as_ref(), kv_cols, &k_raw)?;
        project(v_weight, w.v_bias.as_ref(), kv_cols, &v)?;
        if let (Some(q_norm), Some(k_norm)) = (&w.q_norm, &w.k_norm) {
            list.push(self.norm(tokens * c.heads, c.head_dim, (&q_raw, x), q_norm, &q)?);
            list.push(self.norm(tokens * c.kv_heads, c.head_dim, (&k_raw, x), k_norm, &k)?);
        }
        for (slice, heads) in [(&q, c.heads), (&k, c.kv_heads)] {
            let sig = OpSig::Rope { tokens, heads, head_dim: c.head_dim, part: c.rotary(), x };
            list.push(Cmd::new(sig, &[slice.clone(), self.cos_sin(tokens)])?);
        }
        Ok(list)
    }

    /// The commands of final norm, LM head and draw over the rows with `draw`; empty if there are none.
    pub fn head(&self, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.logits_block(pass)?;
        list.extend(self.draw_block(pass)?);
        Ok(list)
    }

    /// The commands of final norm and LM head, where the last layers are.
    pub(super) fn logits_block(&self, Pass { sizes, inputs, .. }: &Pass) -> Result<Vec<Cmd>> {
        let (c, arena, rows) = (&self.config, &self.arena, to_u32(sizes.picks.len()));
        let Some(HeadWeights { norm, lm_head }) = self.weights()?.head.as_ref().filter(|_| rows > 0) else {
            return Ok(Vec::new());
        };
        let mut list = Vec::new();
        let mut last = self.residual(sizes.rows.tokens);
        if rows < sizes.rows.tokens {
            let picked = rows_of(&arena.picked, rows, c.hidden, DType::F32);
            let (vocab, hidden) = (sizes.rows.tokens, c.hidden);
            let sig = OpSig::Embed { tokens: rows, vocab, hidden, table: DType::F32, out: DType::F32 };
            list.push(Cmd::new(sig, &[inputs.picks.clone(), last, picked.clone()])?);
            last = picked;
        }
        let x = self.shape.activations;
        let normed = rows_of(&arena.normed, rows, c.hidden, x);
        list.push(self.norm(rows, c.hidden, (&last, DType::F32), norm, &normed)?);
        let logits = rows_of(&arena.logits, rows, self.logit_cols, DType::F32);
        let out = Out::Set(&logits, DType::F32);
        list.push(gemm(rows, &normed, x, lm_head, None, self.logit_cols, c.hidden, out)?);
        Ok(list)
    }

    /// The command of the draw from whole rows of logits; none where there is nothing to draw.
    pub(super) fn draw_block(&self, Pass { sizes, inputs, .. }: &Pass) -> Result<Option<Cmd>> {
        let (rows, vocab) = (to_u32(sizes.picks.len()), self.config.vocab);
        let draws = inputs.draws.as_ref().filter(|_| rows > 0);
        let logits = rows_of(&self.arena.logits, rows, vocab, DType::F32);
        draws.map(|draws| draws.command(rows, vocab, &logits)).transpose()
    }

    fn norm(
        &self,
        rows: u32,
        cols: u32,
        (x, dtype): (&Slice, DType),
        weight: &Tensor,
        out: &Slice,
    ) -> Result<Cmd> {
        let (eps, to) = (Scalar(self.config.norm_eps), self.shape.activations);
        let sig = OpSig::RmsNorm { rows, cols, eps, x: dtype, weight: weight.dtype, out: to };
        Cmd::new(sig, &[x.clone(), weight.slice.clone(), out.clone()])
    }
}
