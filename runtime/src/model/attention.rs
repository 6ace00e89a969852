//! KV pages on a device, and the commands that write to them and attend to them.

use super::ModelConfig;
use super::arena::{Packer, rows_of};
use super::expanded::ExpandedInputs;
use super::latent::LatentHeads;
use super::reach::{KvSizes, visible};
use super::step::{StepInput, StepShape};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, Error, KvShape, OpSig, Result, Slice};
use mixfleet_scheduler::batch::{LayerPages, NO_PAGE};
use std::borrow::Cow;

/// The KV of a model, or of some of its heads, on a device. A clone is the same KV.
#[derive(Clone)]
pub(super) struct Attention {
    pools: Vec<(Slice, Slice)>,
    kv: KvShape,
    heads: u32,
    /// Dtype of activations.
    x: DType,
    /// The window of each layer, as its place in `windows`.
    window_of: Vec<usize>,
    /// The distinct windows of the layers.
    windows: Vec<Option<u32>>,
    /// The pages of each layer.
    pages: LayerPages,
    /// Pages in each pool beside those where nothing is read.
    page_count: u32,
    /// The sinks of each layer's heads; none where they are not known.
    sinks: Option<Vec<Slice>>, // [heads] f32
    has_sinks: bool,
}

/// What attention reads and writes beside KV; the rows of decodes come first.
#[derive(Debug)]
pub(super) struct AttentionArena {
    pub(super) q: Slice,        // [tokens, heads, head_dim]
    pub(super) k: Slice,        // [tokens, kv_heads, head_dim]
    pub(super) v: Slice,        // [tokens, kv_heads, head_dim]; with latents, these
    pub(super) attended: Slice, // [tokens, heads, value_dim]; before that, q before its norm
    pub(super) acc: Slice,      // [decodes, heads, value_dim] f32
    pub(super) stat: Slice,     // [decodes, heads, 2] f32
}

/// The sizes of a step's attention.
pub(super) struct AttentionSizes {
    pub(super) tokens: u32,
    /// Rows whose keys and values are written here.
    pub(super) written: u32,
    pub(super) decodes: u32,
    /// The first so many of the decodes, whose other keys are elsewhere.
    pub(super) partial: u32,
    pub(super) prefills: u32,
    pub(super) decode_pages_max: u32,
    pub(super) prefill_pages_max: u32,
    /// Whether prefills attend to keys that are made of latents.
    pub(super) expanded: bool,
    /// Per distinct window: keys read by decodes, and pairs and keys of prefills.
    pub(super) kv: Vec<KvSizes>,
}

/// The device memory of what attention is told of a step; slots and pages per part of the layers.
pub(super) struct AttentionInputs {
    slots: Vec<Slice>,
    /// Ranges per distinct window.
    ranges: Vec<Slice>,
    decode_pages: Vec<Slice>,
    pub(super) query_start: Slice,
    pub(super) context: Slice,
    prefill_pages: Vec<Slice>,
    /// Of prefills that attend to keys that are made of latents.
    pub(super) expanded: Option<ExpandedInputs>,
}

/// How layers differ in what they read: their distinct windows, and in how many parts they are, which have
/// pages of their own.
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

impl AttentionArena {
    /// For steps of up to `tokens` rows, of which `decodes` have one token of a sequence.
    pub(super) fn new(
        config: &ModelConfig,
        x: DType,
        (tokens, decodes): (u64, u64),
        alloc: &dyn Fn(u64) -> Result<Slice>,
    ) -> Result<Self> {
        let c = config;
        let (q_cols, kv_cols) = (u64::from(c.heads * c.head_dim), u64::from(c.kv_heads * c.head_dim));
        let x = x.size_bytes();
        // with latents: these before they are joined to keys, and whole queries
        let (v_cols, out_cols, attended) = match &c.latent {
            Some(LatentHeads { lengths, .. }) => {
                let whole = lengths.kv_rank.max(lengths.nope + lengths.rope);
                let of = |length: u32| u64::from(c.heads) * u64::from(length);
                (lengths.kv_rank.into(), of(lengths.kv_rank), of(whole))
            }
            None => (kv_cols, q_cols, q_cols),
        };
        Ok(AttentionArena {
            q: alloc(tokens * q_cols * x)?,
            k: alloc(tokens * kv_cols * x)?,
            v: alloc(tokens * v_cols * x)?,
            attended: alloc(tokens * attended * x)?,
            acc: alloc(decodes * out_cols * 4)?,
            stat: alloc(decodes * u64::from(c.heads) * 8)?,
        })
    }
}

impl AttentionSizes {
    /// The first so many rows attend to what is stored.
    pub(super) fn lifted(&self) -> u32 {
        if self.expanded { self.decodes } else { self.tokens }
    }

    /// Of a step whose decodes and prefills these are.
    pub(super) fn of(
        decode: &[StepInput<'_>],
        prefill: &[StepInput<'_>],
        Reaches { windows, parts }: Reaches<'_>,
    ) -> AttentionSizes {
        let pages_max = |inputs: &[StepInput<'_>]| {
            inputs.iter().map(|p| to_u32(p.pages.len()) / parts).max().unwrap_or(0)
        };
        let tokens = prefill.iter().map(|part| part.tokens.len()).sum::<usize>() + decode.len();
        AttentionSizes {
            tokens: to_u32(tokens),
            written: to_u32(tokens),
            decodes: to_u32(decode.len()),
            partial: 0,
            prefills: to_u32(prefill.len()),
            decode_pages_max: pages_max(decode),
            prefill_pages_max: pages_max(prefill),
            expanded: false,
            kv: windows.iter().map(|&window| KvSizes::of(decode, prefill, window)).collect(),
        }
    }
}

/// What attention is told of a step: see the operands of the operations.
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

/// The pages of a sequence in a part of the layers. Where it has none any longer, the first one that it has
/// stands: nothing of it is used there, but a device may load what it masks.
fn of_part(pages: &[u32], part: u32, parts: u32) -> Cow<'_, [u32]> {
    if parts == 1 && pages.first() != Some(&NO_PAGE) {
        return Cow::Borrowed(pages);
    }
    let its = pages.chunks_exact(parts as usize).map(|block| block[part as usize]);
    let first = its.clone().find(|&page| page != NO_PAGE).unwrap_or(0);
    Cow::Owned(its.map(|page| if page == NO_PAGE { first } else { page }).collect())
}

impl AttentionTables {
    /// Of decodes and prefills of such sizes.
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
            ends.flat_map(|end| [end - to_u32(visible(end - 1, window)), end]).collect()
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

    /// Adds decodes after the last one, of a step that has nothing else, which read nothing and write from
    /// slot `first_spare` on.
    pub(super) fn pad(&mut self, rows: u32, first_spare: u32, pages_max: u32) {
        self.slots.iter_mut().for_each(|slots| slots.extend((0..rows).map(|i| first_spare + i)));
        self.ranges.iter_mut().for_each(|ranges| ranges.extend(zeros(2 * rows as usize)));
        self.decode_pages.iter_mut().for_each(|pages| pages.extend(zeros((rows * pages_max) as usize)));
    }

    /// Packs it for the device.
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
            // where keys contain values, they stand for these
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
            heads: config.heads,
            x: shape.activations,
            window_of: config.windows.iter().map(place).collect(),
            windows,
            sinks: upload_sinks(device, config)?,
            has_sinks: config.sinks.is_some(),
        })
    }

    /// How its layers differ in what they read.
    pub(super) fn reaches(&self) -> Reaches<'_> {
        Reaches { windows: &self.windows, parts: self.pages.parts.count() }
    }

    /// The first slot that no sequence has.
    pub(super) fn first_spare(&self) -> u32 {
        self.page_count * self.kv.page_tokens
    }

    /// The pools of keys and values of each layer.
    pub(super) fn pools(&self) -> &[(Slice, Slice)] {
        &self.pools
    }

    /// The latents of layer `at`, and how they are kept.
    pub(super) fn latents(&self, at: usize) -> (&Slice, KvShape) {
        (&self.pools[at].0, self.kv)
    }

    /// Appends KV write and attention of layer `at`: decodes first, then prefills, unless they attend to keys
    /// that are made of latents.
    pub(super) fn commands(
        &self,
        at: usize,
        sizes: &AttentionSizes,
        inputs: &AttentionInputs,
        arena: &AttentionArena,
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let (x, kv, heads, tokens) = (self.x, self.kv, self.heads, sizes.tokens);
        let (head_dim, value_dim) = (kv.head_dim, kv.value_dim());
        let sinks = self.sinks.as_ref().map(|sinks| &sinks[at]);
        if self.has_sinks && sinks.is_none() {
            return Err(Error::unsupported("the sinks of this model's attention were not loaded here"));
        }
        let (pools, part) = (pools(&kv, &self.pools[at]), self.pages.layers[at].0 as usize);
        if sizes.written > 0 {
            let k = rows_of(&arena.k, sizes.written, kv.kv_heads * head_dim, x);
            let v = rows_of(&arena.v, sizes.written, kv.kv_heads * value_dim, x);
            let sig = OpSig::KvWrite { tokens: sizes.written, x, kv };
            let mut args: Vec<Slice> = [k, v].into_iter().take(pools.len()).collect();
            args.push(inputs.slots[part].clone());
            args.extend(pools.iter().cloned());
            list.push(Cmd::new(sig, &args)?);
        }

        let which = self.window_of[at];
        let (window, kv_sizes) = (self.windows[which], sizes.kv[which]);
        let rows_from = |slice: &Slice, from: u32, rows: u32, columns: u32| {
            let row_bytes = u64::from(columns) * x.size_bytes();
            slice.range(u64::from(from) * row_bytes, u64::from(rows) * row_bytes)
        };
        if sizes.decodes > 0 {
            let (sequences, rows) = (sizes.decodes, sizes.decodes * heads);
            let acc = rows_of(&arena.acc, rows, value_dim, DType::F32);
            let stat = rows_of(&arena.stat, rows, 2, DType::F32);
            let (kv_tokens, pages_max) = (kv_sizes.decode_tokens, sizes.decode_pages_max);
            let sig = OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv };
            let (range, pages) = (inputs.ranges[which].clone(), inputs.decode_pages[part].clone());
            let mut args = vec![rows_from(&arena.q, 0, sequences, heads * head_dim), range, pages];
            args.extend(pools.iter().cloned());
            args.extend([acc.clone(), stat.clone()]);
            list.push(Cmd::new(sig, &args)?);
            // sinks of rows that others attend to as well join where all parts are
            let bare = if sinks.is_some() { sizes.partial * heads } else { rows };
            let mut merge = |from: u32, rows: u32, sinks: Option<&Slice>| -> Result<()> {
                let part = |slice: &Slice, columns: u32, dtype: DType| {
                    let row = u64::from(columns) * dtype.size_bytes();
                    slice.range(u64::from(from) * row, u64::from(rows) * row)
                };
                let mut args = vec![part(&acc, value_dim, DType::F32), part(&stat, 2, DType::F32)];
                args.extend(sinks.cloned());
                args.push(part(&arena.attended, value_dim, x));
                let head_dim = value_dim;
                let sinks = if sinks.is_some() { heads } else { 0 };
                list.push(Cmd::new(OpSig::AttnMerge { parts: 1, rows, head_dim, sinks, out: x }, &args)?);
                Ok(())
            };
            if bare > 0 {
                merge(0, bare, None)?;
            }
            if bare < rows {
                merge(bare, rows - bare, sinks)?;
            }
        }
        if sizes.prefills > 0 && !sizes.expanded {
            let (first, rows) = (sizes.decodes, tokens - sizes.decodes);
            let sig = OpSig::AttnPrefill {
                tokens: rows,
                sequences: sizes.prefills,
                pairs: kv_sizes.prefill_pairs,
                kv_tokens: kv_sizes.prefill_tokens,
                heads,
                pages_max: sizes.prefill_pages_max,
                window,
                sinks: sinks.is_some(),
                x,
                kv,
            };
            let (query_start, context) = (inputs.query_start.clone(), inputs.context.clone());
            let q = rows_from(&arena.q, first, rows, heads * head_dim);
            let out = rows_from(&arena.attended, first, rows, heads * value_dim);
            let pages = inputs.prefill_pages[part].clone();
            let mut args = vec![q, query_start, context, pages];
            args.extend(pools);
            args.extend(sinks.cloned());
            args.push(out);
            list.push(Cmd::new(sig, &args)?);
        }
        Ok(())
    }
}

/// The pools of a layer that operations take.
pub(crate) fn pools(kv: &KvShape, (keys, values): &(Slice, Slice)) -> Vec<Slice> {
    [keys, values].into_iter().take(kv.pools() as usize).cloned().collect()
}

/// Puts the sinks of each layer on a device, if they are known.
fn upload_sinks(device: &dyn Device, config: &ModelConfig) -> Result<Option<Vec<Slice>>> {
    let (layers, heads) = (config.layers as usize, config.heads as usize);
    let Some(sinks) = config.sinks.as_ref().filter(|sinks| sinks.len() == layers * heads) else {
        return Ok(None);
    };
    let one = |layer: &[f32]| {
        let slice = device.alloc(layer.len() as u64 * 4, BufferUsage::Weights)?;
        device.write(&slice, bytemuck::cast_slice(layer))?;
        Ok(slice)
    };
    sinks.chunks(heads).map(one).collect::<Result<_>>().map(Some)
}

pub(super) fn zeros(count: usize) -> impl Iterator<Item = u32> {
    std::iter::repeat_n(0, count)
}
