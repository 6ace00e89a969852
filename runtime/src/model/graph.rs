//! The forward pass as commands: one list per layer, so that the KV of a layer can be sent while later layers
//! still run.
//!
//! The residual stream is f32 for every dtype of activations: it is read and written once per block, and
//! rounding it would cost more accuracy than all other roundings together.

use super::arena::{Activations, Arena, Packer, rows_of, table_row};
use super::attention::zeros;
use super::attention::{Attention, AttentionInputs, AttentionTables, Reaches, attention_sizes};
use super::bind::{Binder, BoundMemory};
use super::draws::{DrawArena, DrawOutputs, draw_sizes};
use super::expanded::{self, ExpandedTables};
use super::rope_table::{RopeTable, RopeTables};
pub use super::step::{StepInput, StepShape};
use super::{ModelConfig, Weights};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Cmd, DType, Device, Error, Result, Slice};
use mixfleet_scheduler::cost::{MemberShare, ModelShape};
use mixfleet_scheduler::layers::{
    Activation, AttentionSizes, DrawSizes, LayerConstants, LayerOps, NormPlacement, StepTable, Weight,
    visible_keys,
};
use std::sync::Arc;

/// Minimum row length of the block table in a recorded step, so that short sequences share a recording.
const PAGES_MIN: u32 = 8;

/// Step from which rows of a recorded step are multiples of this; below, they are powers of two.
const ROWS_STEP: u32 = 8;

/// Number of rows of the recording that a step of `decodes` rows uses.
fn bucket(decodes: u32) -> u32 {
    if decodes < ROWS_STEP { decodes.next_power_of_two() } else { decodes.next_multiple_of(ROWS_STEP) }
}

/// A step whose inputs are on the device; its commands are built list by list.
pub struct Pass {
    sizes: Sizes,
    inputs: StepInputs,
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
    /// The local part of the model, by which operations are listed.
    model: ModelShape,
    constants: LayerConstants,
    /// None where a member only keeps KV of others.
    weights: Option<Weights>,
    shape: StepShape,
    /// None on a member that leaves attention to others.
    attention: Option<Attention>,
    arena: Arena,
    draws: Option<DrawArena>,
    rope: Arc<RopeTables>,
    alignment: u64,
    replay_pays: bool,
    /// Whether projections back to the residual stream add to it ([`LayerOps::adds`]).
    adds: bool,
}

/// The device memory of a step's inputs.
pub(super) struct StepInputs {
    ids: Slice,
    positions: Slice,
    rotations: Slice,
    second_rotations: Option<Slice>,
    /// None where no operation reads them.
    rows: Option<Slice>,
    attention: Option<AttentionInputs>,
    picks: Slice,
    draws: Option<DrawOutputs>,
}

impl StepInputs {
    /// The inputs of a step, except attention's.
    pub(super) fn table(&self, table: StepTable) -> Option<&Slice> {
        match table {
            StepTable::Ids => Some(&self.ids),
            StepTable::Positions => Some(&self.positions),
            StepTable::Rotations => Some(&self.rotations),
            StepTable::SecondRotations => self.second_rotations.as_ref(),
            StepTable::Rows => self.rows.as_ref(),
            StepTable::Picks => Some(&self.picks),
            _ => self.draws.as_ref()?.table(table),
        }
    }
}

/// The sizes of a step.
struct Sizes {
    rows: AttentionSizes,
    /// Padding decodes: they read no KV, write to a slot that is never read, and come last.
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
        let rope = Arc::new(RopeTable::both(device, &config, &shape)?);
        Forward::with(device, config, (Some(weights), rope), shape, draws, true)
    }

    /// Allocates the KV pools of a member that only keeps KV computed by others.
    pub fn keeping(device: &dyn Device, config: Arc<ModelConfig>, shape: StepShape) -> Result<Self> {
        // no step runs, so activations take no memory
        let least = StepShape { tokens_max: 1, sequences_max: 1, ..shape };
        let rope = Arc::new(RopeTable::both(device, &config, &least)?);
        Ok(Forward { shape, ..Forward::with(device, config, (None, rope), least, None, true)? })
    }

    /// Allocates the KV pools, if any, and activations of a member's share of a model. Only
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
        let rope = Arc::new(RopeTable::both(device, &config, &shape)?);
        let whole = Forward::with(device, config, (Some(weights), rope), shape, draws, share.keeps_kv())?;
        let model = ModelShape { vocab: to_u32(share.vocab.len()), ..whole.model.clone() };
        // members on different devices have equal rows only if no device rounds them up
        Ok(Forward { model, adds: share.is_first(), replay_pays: false, ..whole })
    }

    /// Returns the member for the second of two batches in flight: the same weights, with its own
    /// activations.
    ///
    /// # Errors
    /// Errors of the device, and `Unsupported` if it keeps KV or a step cannot be halved.
    pub fn for_second_batch(&self, device: &dyn Device) -> Result<Self> {
        let shape = self.shape.of_second_batch().filter(|_| self.attention.is_none());
        let shape = shape.ok_or_else(|| Error::unsupported("this member runs one batch at a time"))?;
        let draws = match self.draws {
            Some(_) => DrawArena::new(device, self.config.vocab, shape.sequences_max)?,
            None => None,
        };
        let own = (self.weights.clone(), self.rope.clone());
        let second = Forward::with(device, self.config.clone(), own, shape, draws, false)?;
        let Forward { adds, replay_pays, .. } = *self;
        Ok(Forward { model: self.model.clone(), adds, replay_pays, ..second })
    }

    fn with(
        device: &dyn Device,
        config: Arc<ModelConfig>,
        (weights, rope): (Option<Weights>, Arc<RopeTables>),
        shape: StepShape,
        draws: Option<DrawArena>,
        keeps_kv: bool,
    ) -> Result<Self> {
        let replay_pays = device.limits().replay_pays;
        // slots to which the padding of recorded steps writes
        let spare = if replay_pays { (ROWS_STEP - 1).div_ceil(shape.block_tokens) } else { 0 };
        let config = expanded::on_device(device, config, weights.as_ref().filter(|_| keeps_kv), &shape);
        let attention = keeps_kv.then(|| Attention::new(device, &config, &shape, spare)).transpose()?;
        let alignment = device.limits().alignment_bytes.max(4);
        let arena = Arena::new(device, &config, &shape, alignment, keeps_kv)?;
        Ok(Forward {
            model: config.cost_shape(shape.activations, shape.kv, shape.block_tokens),
            constants: config.constants(),
            config,
            weights,
            shape,
            attention,
            arena,
            draws,
            rope,
            alignment,
            replay_pays,
            adds: true,
        })
    }

    /// The configuration of the model, or of the local share.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The limits of a step.
    pub fn shape(&self) -> &StepShape {
        &self.shape
    }

    /// Whether logits are computed on this device.
    pub(super) fn has_head(&self) -> bool {
        self.weights.as_ref().is_some_and(|weights| weights.get(0, Weight::LmHead).is_some())
    }

    /// Whether steps can run, which requires weights.
    pub fn computes(&self) -> bool {
        self.weights.is_some()
    }

    fn weights(&self) -> Result<&Weights> {
        let none = || Error::unsupported("KV is kept here, and there are no weights to compute with");
        self.weights.as_ref().ok_or_else(none)
    }

    /// The local pools of keys and values of each layer; none on a member that keeps no KV.
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
            kv.decode_tokens = u64::from(rows) * visible_keys(last, window);
        }
        Some(StepKey { decodes: rows, pages_max, draws: sizes.draws })
    }

    /// The logits of a step: `[rows, vocab]` f32, one row per part with `sample`, in order.
    pub fn logits(&self, step: &Pass) -> Slice {
        rows_of(self.activations().of(Activation::Logits), step.rows(), self.config.vocab, DType::F32)
    }

    /// The locally computed logits of a step: `[rows, rows of the LM head]` f32.
    pub(super) fn own_logits(&self, step: &Pass) -> Slice {
        rows_of(self.activations().of(Activation::Logits), step.rows(), self.model.vocab, DType::F32)
    }

    /// The residual stream of a step: `[tokens, hidden]` f32.
    pub(super) fn step_residual(&self, step: &Pass) -> Slice {
        rows_of(self.residual_memory(), step.sizes.rows.tokens, self.config.hidden, DType::F32)
    }

    /// The memory of the residual streams of all steps.
    pub(super) fn residual_memory(&self) -> &Slice {
        self.activations().of(Activation::Residual)
    }

    /// How the layers with local KV differ in reading it.
    fn reaches(&self) -> Reaches<'_> {
        self.attention.as_ref().map_or(Reaches { windows: &[], parts: 1 }, Attention::reaches)
    }

    /// The result that the host reads after a step: the draws, or the logits if the device cannot draw.
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
            .then(|| draw_sizes(parts.iter().filter_map(|part| part.draw.as_ref())));
        let mut rows = attention_sizes(decode, prefill, self.reaches());
        let latent = self.config.latent.as_ref();
        let block_tokens = self.shape.block_tokens;
        if latent.is_some_and(|latent| latent.expands(prefill, block_tokens)) {
            rows.expanded_pages_max = Some(ExpandedTables::pages_max(prefill, block_tokens));
        }
        Sizes { rows, padding: 0, picks, draws }
    }

    fn upload(&self, device: &dyn Device, parts: &[StepInput<'_>], sizes: &Sizes) -> Result<StepInputs> {
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
            let latent = self.config.latent.as_ref().filter(|_| rows.expanded_pages_max.is_some());
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
        let numbered = self.model.style.norms == NormPlacement::After;
        let inputs = StepInputs {
            rotations: self.rope.main.table().clone(),
            second_rotations: self.rope.second.as_ref().map(|table| table.table().clone()),
            rows: numbered.then(|| packer.put_words(0..sizes.rows.tokens)),
            ids: packer.put_words(ids),
            positions: packer.put_words(positions.iter().copied()),
            attention,
            picks: packer.put_words(sizes.picks.iter().copied()),
            draws,
        };
        device.write(&self.arena.inputs.range(0, packer.bytes.len() as u64), &packer.bytes)?;
        self.arena.order_by_head(device, self.config.heads, sizes.rows.lifted())?;
        self.rope.extend_to(device, &self.config, positions.iter().copied().max().unwrap_or(0))?;
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

    /// The step's operations outside of layers.
    fn ops(&self) -> LayerOps<'_> {
        self.ops_of(0)
    }

    /// The step's operations of a layer.
    fn ops_of(&self, layer: usize) -> LayerOps<'_> {
        let rope = self.model.style.rope_of(layer);
        LayerOps { shape: &self.model, constants: self.constants, adds: self.adds, joins: false, rope }
    }

    /// A binder of about `operations` operations of layer `layer` to memory.
    fn binder<'a>(&'a self, layer: usize, pass: &'a Pass, operations: usize) -> Result<Binder<'a>> {
        let memory = BoundMemory {
            activations: &self.arena.activations,
            weights: Some(self.weights()?),
            attention: self.attention.as_ref().zip(pass.inputs.attention.as_ref()),
            inputs: Some(&pass.inputs),
            layer,
        };
        Ok(Binder::new(memory, operations))
    }

    /// The commands for the token embedding, on the first stage, and for the rows of the rope table.
    pub fn embed(&self, pass: &Pass) -> Result<Vec<Cmd>> {
        let (tokens, mut list) = (pass.tokens(), self.binder(0, pass, 2)?);
        if self.weights()?.get(0, Weight::Embedding).is_some() {
            self.ops().embed(tokens, self.config.vocab, &mut list);
        }
        self.ops().rotations(tokens, self.rope.main.positions(), &mut list);
        list.finish()
    }

    /// The commands of decoder layer `at`.
    pub fn layer(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.attention_block(at, pass)?;
        list.extend(self.mlp_block(at, pass)?);
        Ok(list)
    }

    /// The commands of layer `at` from the residual stream to the attention output.
    pub(super) fn attention_block(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let (ops, sizes, mut list) = (self.ops_of(at), &pass.sizes.rows, self.binder(at, pass, 20)?);
        ops.attention_inputs(sizes, &mut list);
        if let Some(attention) = &self.attention {
            ops.attend(attention.window(at), sizes, &mut list);
        }
        ops.attention_outputs(sizes, &mut list);
        list.finish()
    }

    /// The commands of layer `at` from the residual stream to queries, keys and values.
    pub(super) fn attention_inputs(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.binder(at, pass, 8)?;
        self.ops_of(at).attention_inputs(&pass.sizes.rows, &mut list);
        list.finish()
    }

    /// The commands of layer `at` from the attention output to the residual stream.
    pub(super) fn attention_output(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.binder(at, pass, 2)?;
        self.ops().attention_outputs(&pass.sizes.rows, &mut list);
        list.finish()
    }

    /// Buffers of activations.
    pub(super) fn activations(&self) -> &Activations {
        &self.arena.activations
    }

    /// The commands of layer `at` after attention.
    pub(super) fn mlp_block(&self, at: usize, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.binder(at, pass, 8)?;
        self.ops().mlp(pass.tokens(), self.config.experts_of(at).is_some(), &mut list);
        list.finish()
    }

    /// The commands of final norm, LM head and draw over the rows with `draw`; empty if there are none.
    pub fn head(&self, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.logits_block(pass)?;
        list.extend(self.draw_block(pass)?);
        Ok(list)
    }

    /// The commands of final norm and LM head, on the last stage.
    pub(super) fn logits_block(&self, pass: &Pass) -> Result<Vec<Cmd>> {
        let mut list = self.binder(0, pass, 3)?;
        if self.has_head() {
            self.ops().logits(to_u32(pass.sizes.picks.len()), pass.tokens(), &mut list);
        }
        list.finish()
    }

    /// The command of the draw from whole rows of logits; none without draws.
    pub(super) fn draw_block(&self, pass: &Pass) -> Result<Option<Cmd>> {
        let Some(draws) = &pass.inputs.draws else { return Ok(None) };
        let mut list = self.binder(0, pass, 1)?;
        let rows = to_u32(pass.sizes.picks.len());
        self.ops().draw(rows, self.config.vocab, draws.sizes(), &mut list);
        Ok(list.finish()?.pop())
    }
}
