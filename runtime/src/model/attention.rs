//! KV pages on a device, and the attention inputs of a step.

use super::arena::Packer;
use super::expanded::ExpandedInputs;
use super::step::{StepInput, StepShape};
use super::{ModelConfig, Tensor};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{BufferUsage, DType, Device, KvShape, Result, Slice};
use mixfleet_scheduler::batch::{LayerPages, NO_PAGE};
use mixfleet_scheduler::layers::{AttentionSizes, KvSizes, StepTable, visible_keys};
use std::borrow::Cow;

/// The KV of a model, or of some of its heads, on a device. A clone is the same KV.
#[derive(Clone)]
pub(super) struct Attention {
    pools: Vec<(Slice, Slice)>,
    kv: KvShape,
    /// The window of each layer, as its index in `windows`.
    window_of: Vec<usize>,
    /// The distinct windows of the layers.
    windows: Vec<Option<u32>>,
    /// The pages of each layer.
    pages: LayerPages,
    /// Pages in each pool besides the spare ones that are never read.
    page_count: u32,
    /// The sinks of each layer's heads; none where they are unknown.
    sinks: Option<Vec<Tensor>>, // [heads] f32
}

/// The device memory of attention inputs of a step; slots and pages per part of the layers.
pub(super) struct AttentionInputs {
    slots: Vec<Slice>,
    /// Ranges per distinct window.
    ranges: Vec<Slice>,
    decode_pages: Vec<Slice>,
    query_start: Slice,
    context: Slice,
    prefill_pages: Vec<Slice>,
    /// Inputs of prefills that attend to keys expanded from latents.
    pub(super) expanded: Option<ExpandedInputs>,
}

/// How layers differ in reading KV: the distinct windows, and the number of parts with separate pages.
#[derive(Clone, Copy)]
pub(super) struct Reaches<'a> {
    pub(super) windows: &'a [Option<u32>],
    pub(super) parts: u32,
}

/// The windows of a model's layers, each once.
pub(super) fn distinct_windows(config: &ModelConfig) -> Vec<Option<u32>> {
    let mut windows = config.windows.clone();
    windows.sort_unstable();
    windows.dedup();
    windows
}

/// The sizes of a step with these decodes and prefills.
pub(super) fn attention_sizes(
    decode: &[StepInput<'_>],
    prefill: &[StepInput<'_>],
    Reaches { windows, parts }: Reaches<'_>,
) -> AttentionSizes {
    let pages_max =
        |inputs: &[StepInput<'_>]| inputs.iter().map(|p| to_u32(p.pages.len()) / parts).max().unwrap_or(0);
    let tokens = prefill.iter().map(|part| part.tokens.len()).sum::<usize>() + decode.len();
    let kv = |&window: &Option<u32>| {
        let decode_tokens = decode.iter().map(|part| visible_keys(part.start, window)).sum();
        let mut kv = KvSizes { decode_tokens, ..KvSizes::default() };
        prefill.iter().for_each(|part| kv.add_prefill(&part.prefill(), window));
        kv
    };
    AttentionSizes {
        tokens: to_u32(tokens),
        written: to_u32(tokens),
        decodes: to_u32(decode.len()),
        partial: 0,
        prefills: to_u32(prefill.len()),
        decode_pages_max: pages_max(decode),
        prefill_pages_max: pages_max(prefill),
        expanded_pages_max: None,
        kv: windows.iter().map(kv).collect(),
    }
}

/// Attention inputs of a step: see the operands of the operations.
pub(super) struct AttentionTables {
    /// Slots per part of the layers.
    pub(super) slots: Vec<Vec<u32>>,
    /// Ranges per distinct window.
    pub(super) ranges: Vec<Vec<u32>>,
    /// Block tables per part of the layers.
    pub(super) decode_pages: Vec<Vec<u32>>,
    query_start: Vec<u32>,
    context: Vec<u32>,
    pub(super) prefill_pages: Vec<Vec<u32>>,
}

/// The pages of a sequence in a part of the layers. A page that was dropped is replaced by the first one
/// present: its content is masked, but a device may load it.
fn of_part(pages: &[u32], part: u32, parts: u32) -> Cow<'_, [u32]> {
    if parts == 1 && pages.first() != Some(&NO_PAGE) {
        return Cow::Borrowed(pages);
    }
    let its = pages.chunks_exact(parts as usize).map(|block| block[part as usize]);
    let first = its.clone().find(|&page| page != NO_PAGE).unwrap_or(0);
    Cow::Owned(its.map(|page| if page == NO_PAGE { first } else { page }).collect())
}

impl AttentionTables {
    /// Sizes for decodes and prefills like these.
    pub(super) fn of(
        decode: &[StepInput<'_>],
        prefill: &[StepInput<'_>],
        block_tokens: u32,
        sizes: &AttentionSizes,
        Reaches { windows, parts }: Reaches<'_>,
    ) -> Self {
        let slots_of = |part: u32, p: &StepInput<'_>| {
            let slot = |i: u32| {
                let page = p.pages[(i / block_tokens * parts + part) as usize];
                page * block_tokens + i % block_tokens
            };
            (p.start..p.start + to_u32(p.tokens.len())).map(slot).collect::<Vec<u32>>()
        };
        let slots = |part| decode.iter().chain(prefill).flat_map(|p| slots_of(part, p)).collect();
        let ranges = windows.iter().map(|&window| {
            let ends = decode.iter().map(|p| p.start + 1);
            ends.flat_map(|end| [end - to_u32(visible_keys(end - 1, window)), end]).collect()
        });
        let mut query_start = vec![0];
        for part in prefill {
            query_start.push(query_start[query_start.len() - 1] + to_u32(part.tokens.len()));
        }
        let table = |inputs: &[StepInput<'_>], length| {
            let of = |part| inputs.iter().map(move |p| of_part(p.pages, part, parts));
            (0..parts).map(|part| Self::padded(of(part), length)).collect()
        };
        AttentionTables {
            slots: (0..parts).map(slots).collect(),
            ranges: ranges.collect(),
            decode_pages: table(decode, sizes.decode_pages_max),
            query_start,
            context: prefill.iter().map(|p| p.start + to_u32(p.tokens.len())).collect(),
            prefill_pages: table(prefill, sizes.prefill_pages_max),
        }
    }

    /// Lists of pages, each cut or filled up to a length.
    pub(super) fn padded<'a>(lists: impl Iterator<Item = Cow<'a, [u32]>>, length: u32) -> Vec<u32> {
        let (length, mut all) = (length as usize, Vec::new());
        for (before, pages) in (0..).step_by(length.max(1)).zip(lists) {
            all.extend(pages.iter().take(length));
            all.resize(before + length, 0);
        }
        all
    }

    /// Adds padding decodes to a step that has only decodes; they read nothing and write from slot
    /// `first_spare` on.
    pub(super) fn pad(&mut self, rows: u32, first_spare: u32, pages_max: u32) {
        self.slots.iter_mut().for_each(|slots| slots.extend((0..rows).map(|i| first_spare + i)));
        self.ranges.iter_mut().for_each(|ranges| ranges.extend(zeros(2 * rows as usize)));
        self.decode_pages.iter_mut().for_each(|pages| pages.extend(zeros((rows * pages_max) as usize)));
    }

    /// Packs the inputs for the device.
    pub(super) fn put(self, packer: &mut Packer<'_>) -> AttentionInputs {
        let mut put = |all: Vec<Vec<u32>>| all.into_iter().map(|words| packer.put_words(words)).collect();
        AttentionInputs {
            slots: put(self.slots),
            ranges: put(self.ranges),
            decode_pages: put(self.decode_pages),
            prefill_pages: put(self.prefill_pages),
            query_start: packer.put_words(self.query_start),
            context: packer.put_words(self.context),
            expanded: None,
        }
    }
}

impl Attention {
    /// Allocates KV pools, with `spare` pages beside those of `shape`.
    pub(super) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        shape: &StepShape,
        spare: u32,
    ) -> Result<Self> {
        let kv = shape.kv_shape(config);
        let page_bytes = u64::from(kv.page_tokens) * kv.row() * kv.dtype.size_bytes();
        let pages = config.pages.clone();
        let page_count = shape.blocks * pages.parts.count();
        let pool_bytes = u64::from(page_count + spare) * page_bytes;
        let pool = || device.alloc(pool_bytes, BufferUsage::Kv);
        let windows = distinct_windows(config);
        let place = |window| windows.iter().position(|w| w == window).expect("every window is listed");
        let both = |_| {
            let keys = pool()?;
            // where keys contain values, the keys' pools stand for both
            let values = if kv.latent.is_some() { keys.clone() } else { pool()? };
            Ok((keys, values))
        };
        // layers of different parts have different pages of the same pools
        let of_part = (0..pages.part_layers()).map(both).collect::<Result<Vec<_>>>()?;
        Ok(Attention {
            pools: pages.layers.iter().map(|&(_, at)| of_part[at as usize].clone()).collect(),
            pages,
            page_count,
            kv,
            window_of: config.windows.iter().map(place).collect(),
            windows,
            sinks: upload_sinks(device, config)?,
        })
    }

    /// How the layers differ in reading KV.
    pub(super) fn reaches(&self) -> Reaches<'_> {
        Reaches { windows: &self.windows, parts: self.pages.parts.count() }
    }

    /// The first slot that belongs to no sequence.
    pub(super) fn first_spare(&self) -> u32 {
        self.page_count * self.kv.page_tokens
    }

    /// The pools of keys and values of each layer.
    pub(super) fn pools(&self) -> &[(Slice, Slice)] {
        &self.pools
    }

    /// The pools of layer `at` that operations take.
    pub(super) fn pools_of(&self, at: usize) -> impl Iterator<Item = &Slice> {
        pools(&self.kv, &self.pools[at])
    }

    /// The number of layer `at`'s window among the distinct ones, and the window.
    pub(super) fn window(&self, at: usize) -> (usize, Option<u32>) {
        let which = self.window_of[at];
        (which, self.windows[which])
    }

    /// The sinks of layer `at`'s heads, if they are known.
    pub(super) fn sinks_of(&self, at: usize) -> Option<&Tensor> {
        self.sinks.as_ref().map(|sinks| &sinks[at])
    }

    /// The inputs of layer `at` in a step.
    pub(super) fn table<'a>(
        &self,
        at: usize,
        inputs: &'a AttentionInputs,
        table: StepTable,
    ) -> Option<&'a Slice> {
        let (part, which) = (self.pages.layers[at].0 as usize, self.window_of[at]);
        match table {
            StepTable::Slots => inputs.slots.get(part),
            StepTable::Ranges => inputs.ranges.get(which),
            StepTable::DecodePages => inputs.decode_pages.get(part),
            StepTable::QueryStart => Some(&inputs.query_start),
            StepTable::Context => Some(&inputs.context),
            StepTable::PrefillPages => inputs.prefill_pages.get(part),
            StepTable::PieceFrom(piece) => inputs.expanded.as_ref()?.piece(piece).map(|[from, _]| from),
            StepTable::PieceTo(piece) => inputs.expanded.as_ref()?.piece(piece).map(|[_, to]| to),
            StepTable::ExpandedPages => inputs.expanded.as_ref().map(|expanded| &expanded.pages),
            _ => None,
        }
    }
}

/// The pools of a layer that operations take.
pub(crate) fn pools<'a>(kv: &KvShape, (keys, values): &'a (Slice, Slice)) -> impl Iterator<Item = &'a Slice> {
    [keys, values].into_iter().take(kv.pools() as usize)
}

/// Puts the sinks of each layer on a device, if they are known.
fn upload_sinks(device: &dyn Device, config: &ModelConfig) -> Result<Option<Vec<Tensor>>> {
    let (layers, heads) = (config.layers as usize, config.heads as usize);
    let Some(sinks) = config.sinks.as_ref().filter(|sinks| sinks.len() == layers * heads) else {
        return Ok(None);
    };
    let one = |layer: &[f32]| {
        let slice = device.alloc(layer.len() as u64 * 4, BufferUsage::Weights)?;
        device.write(&slice, bytemuck::cast_slice(layer))?;
        Ok(Tensor::plain(slice, DType::F32))
    };
    sinks.chunks(heads).map(one).collect::<Result<_>>().map(Some)
}

pub(super) fn zeros(count: usize) -> impl Iterator<Item = u32> {
    std::iter::repeat_n(0, count)
}
