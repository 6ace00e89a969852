//! KV in the pages of an instance's device or devices, and its copies to the wire layout and back.
//!
//! The wire layout has all KV heads of a token, whichever devices keep them, so that instances of any devices
//! exchange KV, and lower tiers keep it for all. Each of several devices gathers its part (some layers, some
//! heads, some pages), and the parts are put together in this process's memory; received KV is split there. A
//! head kept by several devices is sent by the first of them and written to all. No other module knows the
//! distribution.

use super::leaving::StepMemory;
use super::messages::{HandOff, Lacking, PieceId};
use super::worker::COPY_TIMEOUT;
use crate::model::attention::pools;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, Error, KvShape, OpSig, Queue, Result, Slice, Ticket};
use mixfleet_scheduler::batch::{Instance, LayerPages, NO_PAGE, RequestId, TokenIds};
use mixfleet_scheduler::cost::{MemberShare, Partition};
use std::ops::Range;
use std::sync::Arc;

/// A device's page geometry; the pools themselves belong to the model on it.
pub struct Pages {
    shape: KvShape,
    /// Slot numbers of the tokens to copy, on the device.
    slot_ids: Slice, // [tokens_max]
}

impl Pages {
    /// Allocates slot numbers for copies of up to `tokens_max` tokens.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &dyn Device, shape: KvShape, tokens_max: u64) -> Result<Self> {
        Ok(Pages { shape, slot_ids: device.alloc(tokens_max * 4, BufferUsage::Staging)? })
    }

    pub(super) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Uploads the slots of `tokens` of a sequence that has these pages, for one copy at a time.
    ///
    /// # Errors
    /// Those of the device.
    pub fn slots(&self, device: &dyn Device, pages: &[u32], tokens: Range<u32>) -> Result<Slice> {
        let page_tokens = self.shape.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        self.upload(device, &tokens.map(slot).collect::<Vec<u32>>())
    }

    fn upload(&self, device: &dyn Device, slots: &[u32]) -> Result<Slice> {
        let target = self.slot_ids.range(0, slots.len() as u64 * 4);
        device.write(&target, bytemuck::cast_slice(slots))?;
        Ok(target)
    }

    /// Copies from `slots` of a layer, with these pools of keys and values, to the wire layout.
    pub(super) fn gather(
        &self,
        layer: &(Slice, Slice),
        slots: Slice,
        (to, wire): (Slice, DType),
    ) -> Result<Cmd> {
        let tokens = to_u32(slots.bytes / 4);
        let sig = OpSig::KvGather { tokens, wire, kv: self.shape };
        let mut args = vec![slots];
        args.extend(pools(&self.shape, layer).cloned());
        args.push(to);
        Cmd::new(sig, &args)
    }

    /// Copies from the wire layout to `slots` of a layer, with these pools of keys and values.
    ///
    /// # Errors
    /// `Invalid` if the operands do not fit.
    pub fn scatter(&self, layer: &(Slice, Slice), slots: Slice, (from, wire): (Slice, DType)) -> Result<Cmd> {
        let tokens = to_u32(slots.bytes / 4);
        let sig = OpSig::KvScatter { tokens, wire, kv: self.shape };
        let mut args = vec![from, slots];
        args.extend(pools(&self.shape, layer).cloned());
        Cmd::new(sig, &args)
    }
}

/// What a device has of an instance's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KvPart {
    pub(super) layers: Range<u32>,
    pub(super) kv_heads: Range<u32>,
    /// It has the pages whose number leaves the first as the remainder of the second, under their number
    /// divided by the second.
    pages: (u32, u32),
    /// Whether it sends this; if not, an earlier one has it too.
    pub(super) sends: bool,
}

impl KvPart {
    /// All of it.
    pub(super) fn whole(layers: u32, kv_heads: u32) -> Self {
        KvPart { layers: 0..layers, kv_heads: 0..kv_heads, pages: (0, 1), sends: true }
    }

    /// What each member has; none if it keeps no KV.
    pub(super) fn of_members(partition: &Partition) -> Vec<Option<KvPart>> {
        let holders = partition.page_holders();
        let mut parts: Vec<Option<KvPart>> = Vec::new();
        for share in partition.shares() {
            let MemberShare { member, layers, kv_heads, .. } = share.clone();
            // where pages are divided, the first member keeps none
            let pages = if holders > 1 { (member.saturating_sub(1), holders) } else { (0, 1) };
            let part = KvPart { layers, kv_heads, pages, sends: true };
            let sends = !parts.iter().flatten().any(|earlier| earlier.has(&part));
            parts.push(share.keeps_kv().then_some(KvPart { sends, ..part }));
        }
        parts
    }

    fn has(&self, other: &KvPart) -> bool {
        let within = |own: &Range<u32>, its: &Range<u32>| own.start <= its.start && its.end <= own.end;
        within(&self.layers, &other.layers)
            && within(&self.kv_heads, &other.kv_heads)
            && self.pages == other.pages
    }
}

/// A device that keeps KV, and its memory for copies.
pub(super) struct Keeper {
    /// Its number among the devices of the instance.
    pub(super) member: usize,
    pub(super) device: Arc<dyn Device>,
    pub(super) part: KvPart,
    /// Keys and values of its layers.
    pub(super) pools: Vec<(Slice, Slice)>,
    pub(super) pages: Pages,
    /// The pages of each layer of the model.
    pub(super) layer_pages: Arc<LayerPages>,
    /// KV in flight, in the wire layout.
    staged: Slice,
    /// For KV that leaves while a step runs; none if none does.
    pub(super) leaving: Option<StepMemory>,
}

/// Tokens of a sequence in some layers: in the wire layout `[layers, tokens, 2, kv_heads, head_dim]`.
#[derive(Clone, Debug)]
pub(super) struct KvSpan<'a> {
    /// One layer, where a block has pages for parts of the layers.
    pub(super) layers: Range<u32>,
    /// The pages of the sequence, with those of all parts of a block next to each other.
    pub(super) pages: &'a [u32],
    pub(super) tokens: Range<u32>,
    pub(super) wire: DType,
}

impl PieceId {
    /// What it is in a sequence with these pages.
    pub(super) fn span<'a>(&self, pages: &'a [u32], wire: DType) -> KvSpan<'a> {
        let PieceId { layer, first, tokens, .. } = *self;
        KvSpan { layers: layer..layer + 1, pages, tokens: first..first + tokens, wire }
    }
}

/// What a device has of a span.
pub(super) struct OwnSpan {
    pub(super) layers: Range<u32>,
    /// Its tokens, counted from the first one of the span.
    pub(super) rows: Vec<u32>,
    /// Where they are in its pages.
    pub(super) slots: Vec<u32>,
    pub(super) bytes: u64,
}

/// The KV of an instance, by the devices that keep it.
pub(super) struct InstanceKv {
    /// Of all heads, in the instance's pages.
    pub(super) shape: KvShape,
    /// Layers of the whole model.
    pub(super) layers: u32,
    /// Pages of a block.
    pub(super) block_pages: u32,
    pub(super) keepers: Vec<Keeper>,
    /// The largest span, in bytes.
    span_bytes_max: u64,
    /// The largest span, in tokens.
    span_tokens_max: u64,
    /// A device's part in this process's memory.
    pub(super) packed: Vec<u8>,
}

/// A device of an instance, what it has of the KV, and its pools of keys and values by layer.
pub(super) type DeviceKv = (Arc<dyn Device>, Option<KvPart>, Vec<(Slice, Slice)>);

impl InstanceKv {
    /// Allocates memory for copies of up to `bytes_max` bytes in the wire layout and of a token at least,
    /// between host and `devices`.
    ///
    /// # Errors
    /// Those of the devices, and `Invalid` if they do not have every layer of every head and page exactly
    /// once.
    pub(super) fn new(
        (shape, layer_pages): (KvShape, LayerPages),
        devices: Vec<DeviceKv>,
        bytes_max: u64,
    ) -> Result<Self> {
        let span_bytes_max = bytes_max.max(shape.wire_token_bytes(DType::F32));
        let narrowest = DType::KV.into_iter().map(|wire| shape.wire_token_bytes(wire)).min();
        let span_tokens_max =
            (span_bytes_max / narrowest.unwrap_or(1).max(1)).max(u64::from(shape.page_tokens));
        let (layers, layer_pages) = (to_u32(layer_pages.layers.len()), Arc::new(layer_pages));
        let block_pages = layer_pages.parts.count();
        let mut keepers = Vec::new();
        for (member, (device, part, pools)) in devices.into_iter().enumerate() {
            let Some(part) = part else { continue };
            if pools.len() != part.layers.len() {
                let id = &device.info().id;
                let (layers, pools) = (part.layers.len(), pools.len());
                return Err(Error::invalid(format!("{id} has KV of {pools} layers and not of {layers}")));
            }
            let own = KvShape { kv_heads: to_u32(part.kv_heads.len()), ..shape };
            keepers.push(Keeper {
                member,
                pools,
                part,
                pages: Pages::new(&*device, own, span_tokens_max)?,
                staged: device.alloc(span_bytes_max, BufferUsage::Kv)?,
                layer_pages: layer_pages.clone(),
                leaving: None,
                device,
            });
        }
        let packed = Vec::new();
        let kv = InstanceKv { shape, layers, block_pages, keepers, span_bytes_max, span_tokens_max, packed };
        if !kv.is_complete() {
            let parts: Vec<_> = kv.keepers.iter().map(|keeper| &keeper.part).collect();
            return Err(Error::invalid(format!("devices have no, or no single, part of some KV: {parts:?}")));
        }
        Ok(kv)
    }

    /// Whether each layer of each head in each page is sent by exactly one device, so that every byte of a
    /// span is filled.
    fn is_complete(&self) -> bool {
        let parts = || self.keepers.iter().map(|keeper| &keeper.part).filter(|part| part.sends);
        let divisor = parts().map(|part| part.pages.1).max().unwrap_or(1);
        let senders = |layer: u32, head: u32, page: u32| {
            let sent = parts().filter(|KvPart { layers, kv_heads, pages: (at, of), .. }| {
                layers.contains(&layer) && kv_heads.contains(&head) && page % of == *at
            });
            sent.count()
        };
        (0..self.layers).all(|layer| {
            (0..self.shape.kv_heads).all(|head| (0..divisor).all(|page| senders(layer, head, page) == 1))
        })
    }

    /// Tokens of the largest piece that fits a receiver's slot and the copy buffer here.
    pub(super) fn piece_tokens_in(&self, to: &HandOff) -> u32 {
        let token_bytes = self.shape.wire_token_bytes(to.wire);
        let there = (to.landing.slot_bytes / token_bytes).max(1);
        to_u32(there.min(self.span_bytes_max / token_bytes).min(self.span_tokens_max))
    }

    /// The missing KV of a prompt of `tokens` tokens; the first `from` are here.
    pub(super) fn lacking(&self, from: u32, tokens: u32) -> Lacking {
        let Some(keeper) = self.keepers.first().filter(|keeper| keeper.layer_pages.parts.lets_go()) else {
            return Lacking::all(from);
        };
        let first = |layer| keeper.layer_pages.first_kept(layer, tokens, self.shape.page_tokens);
        Lacking { from, read_from: (0..self.layers).map(first).collect() }
    }

    /// Tokens in the blocks of a sequence that has these pages.
    pub(super) fn tokens_in(&self, pages: &[u32]) -> u32 {
        to_u32(pages.len()) / self.block_pages * self.shape.page_tokens
    }

    /// Bytes of this many tokens of a layer.
    pub(super) fn layer_bytes(&self, tokens: u32, wire: DType) -> u64 {
        u64::from(tokens) * self.shape.wire_token_bytes(wire)
    }

    /// Reads a span into `place`, with the queues of all devices in their order.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn read(
        &mut self,
        queues: &mut [&mut dyn Queue],
        span: &KvSpan<'_>,
        place: &mut [u8],
    ) -> Result<()> {
        self.check(span, place.len())?;
        let mut running: Vec<(&Keeper, OwnSpan, Ticket)> = Vec::new();
        for keeper in self.keepers.iter().filter(|keeper| keeper.part.sends) {
            let Some(own) = keeper.own(span) else { continue };
            let list = keeper.copies(&own, span.wire, Pages::gather)?;
            let ticket = queues[keeper.member].submit_for(&list, &[keeper.staged.range(0, own.bytes)])?;
            running.push((keeper, own, ticket));
        }
        for (keeper, own, ticket) in running {
            keeper.wait(queues, ticket)?;
            let staged = keeper.staged.range(0, own.bytes);
            keeper.put(&self.shape, (span, &own, &staged), place, &mut self.packed)?;
        }
        Ok(())
    }

    /// Writes a span, with the queues of all devices in their order.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn write(
        &mut self,
        queues: &mut [&mut dyn Queue],
        span: &KvSpan<'_>,
        payload: &[u8],
    ) -> Result<()> {
        self.check(span, payload.len())?;
        let mut running: Vec<(&Keeper, Ticket)> = Vec::new();
        for keeper in &self.keepers {
            let Some(own) = keeper.own(span) else { continue };
            let staged = keeper.staged.range(0, own.bytes);
            let runs = Runs::of(&self.shape, &keeper.part, span, &own);
            if let Some(run) = runs.only() {
                keeper.device.write(&staged, &payload[run])?;
            } else {
                self.packed.resize(to_usize(own.bytes), 0);
                let packed = &mut self.packed;
                runs.each(&mut |whole, part| packed[part].copy_from_slice(&payload[whole]));
                keeper.device.write(&staged, &self.packed)?;
            }
            let list = keeper.copies(&own, span.wire, Pages::scatter)?;
            running.push((keeper, queues[keeper.member].submit(&list)?));
        }
        running.into_iter().try_for_each(|(keeper, ticket)| keeper.wait(queues, ticket))
    }

    /// Copies the KV of a token from its page and back on the devices that have it, without the host.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn warm(&self, queues: &mut [&mut dyn Queue]) -> Result<()> {
        let pages = vec![0; self.block_pages as usize];
        let span = KvSpan { layers: 0..1, pages: &pages, tokens: 0..1, wire: self.shape.dtype };
        for keeper in &self.keepers {
            let Some(own) = keeper.own(&span) else { continue };
            let mut list = keeper.copies(&own, span.wire, Pages::gather)?;
            list.extend(keeper.copies(&own, span.wire, Pages::scatter)?);
            let ticket = queues[keeper.member].submit(&list)?;
            keeper.wait(queues, ticket)?;
        }
        Ok(())
    }

    /// Whether all of a span is in pages that the sequence still has, and in the same ones for all layers.
    fn is_there(&self, span: &KvSpan<'_>) -> bool {
        let Some(keeper) = self.keepers.first().filter(|_| self.block_pages > 1) else {
            return true;
        };
        let (part, _) = keeper.layer_pages.layers[span.layers.start as usize];
        let blocks =
            span.tokens.start / self.shape.page_tokens..span.tokens.end.div_ceil(self.shape.page_tokens);
        let page = |block: u32| span.pages[(block * self.block_pages + part) as usize];
        span.layers.len() == 1 && blocks.into_iter().all(|block| page(block) != NO_PAGE)
    }

    fn check(&self, span: &KvSpan<'_>, bytes: usize) -> Result<()> {
        let tokens = to_u32(span.tokens.len());
        let expected = span.layers.len() as u64 * self.layer_bytes(tokens, span.wire);
        let fits = expected <= self.span_bytes_max && u64::from(tokens) <= self.span_tokens_max;
        let known = span.tokens.end <= self.tokens_in(span.pages) && self.is_there(span);
        if bytes as u64 != expected || !fits || !known {
            return Err(Error::invalid(format!("{bytes} bytes are not the KV of {span:?}")));
        }
        Ok(())
    }
}

/// KV of the sequences of an instance machine, for senders and receivers.
pub(super) struct SequenceKv<'a> {
    pub(super) kv: &'a mut InstanceKv,
    pub(super) machine: &'a Instance<TokenIds>,
    /// The queues that copy KV, in the order of members.
    pub(super) queues: Vec<&'a mut dyn Queue>,
}

impl SequenceKv<'_> {
    /// Reads a piece into `place`: from a request's own pages, or from `lent` ones.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn read(
        &mut self,
        request: RequestId,
        lent: Option<&[u32]>,
        piece: &PieceId,
        wire: DType,
        place: &mut [u8],
    ) -> Result<()> {
        let pages = lent.unwrap_or_else(|| self.machine.pages(request));
        self.kv.read(&mut self.queues, &piece.span(pages, wire), place)
    }

    /// Writes a piece to a request's pages.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn write(
        &mut self,
        request: RequestId,
        piece: &PieceId,
        wire: DType,
        payload: &[u8],
    ) -> Result<()> {
        self.kv.write(&mut self.queues, &piece.span(self.machine.pages(request), wire), payload)
    }
}

impl Keeper {
    /// What it has of a span.
    pub(super) fn own(&self, span: &KvSpan<'_>) -> Option<OwnSpan> {
        let layers = &self.part.layers;
        let layers = layers.start.max(span.layers.start)..layers.end.min(span.layers.end);
        let (part, _) = self.layer_pages.layers[span.layers.start as usize];
        let (rows, slots): (Vec<u32>, Vec<u32>) = self.slots(span, part).unzip();
        let token_bytes = self.pages.shape.wire_token_bytes(span.wire);
        let bytes = layers.len() as u64 * rows.len() as u64 * token_bytes;
        (bytes > 0).then_some(OwnSpan { layers, rows, slots, bytes })
    }

    /// The tokens of a span that it has, counted from the first one, and where they are in its pages of a
    /// part of the layers.
    pub(super) fn slots(&self, span: &KvSpan<'_>, part: u32) -> impl Iterator<Item = (u32, u32)> {
        let KvPart { pages: (at, of), .. } = self.part;
        let (page_tokens, parts) = (self.pages.shape.page_tokens, self.layer_pages.parts.count());
        span.tokens.clone().filter_map(move |token| {
            let page = span.pages[(token / page_tokens * parts + part) as usize];
            let slot = page / of * page_tokens + token % page_tokens;
            (page % of == at).then_some((token - span.tokens.start, slot))
        })
    }

    /// Reads what it has of a span, whose wire layout is at `staged`, into its place in the whole.
    pub(super) fn put(
        &self,
        whole: &KvShape,
        (span, own, staged): (&KvSpan<'_>, &OwnSpan, &Slice),
        place: &mut [u8],
        packed: &mut Vec<u8>,
    ) -> Result<()> {
        let runs = Runs::of(whole, &self.part, span, own);
        if let Some(run) = runs.only() {
            return self.device.read(staged, &mut place[run]);
        }
        packed.resize(to_usize(own.bytes), 0);
        self.device.read(staged, packed)?;
        runs.each(&mut |whole, part| place[whole].copy_from_slice(&packed[part]));
        Ok(())
    }

    /// The commands that copy between its pages and its staged memory, one for each layer.
    fn copies(
        &self,
        own: &OwnSpan,
        wire: DType,
        copy: impl Fn(&Pages, &(Slice, Slice), Slice, (Slice, DType)) -> Result<Cmd>,
    ) -> Result<Vec<Cmd>> {
        let slots = self.pages.upload(&*self.device, &own.slots)?;
        let layer_bytes = own.bytes / own.layers.len() as u64;
        let of_layer = |(at, layer): (u64, u32)| {
            let pools = &self.pools[(layer - self.part.layers.start) as usize];
            let staged = (self.staged.range(at * layer_bytes, layer_bytes), wire);
            copy(&self.pages, pools, slots.clone(), staged)
        };
        (0..).zip(own.layers.clone()).map(of_layer).collect()
    }

    fn wait(&self, queues: &mut [&mut dyn Queue], ticket: Ticket) -> Result<()> {
        let failed = |error: Error| error.context(format!("copying KV on {}", self.device.info().id));
        queues[self.member].wait(ticket, COPY_TIMEOUT).map(drop).map_err(failed)
    }
}

/// The runs of bytes that a device has of a span.
struct Runs<'a> {
    own: &'a OwnSpan,
    /// Layers of the span before the device's first one, and tokens of the span.
    before: usize,
    tokens: usize,
    /// Bytes of a row of all heads, of the device's heads, and before these.
    row: usize,
    width: usize,
    offset: usize,
    /// Rows of a token: keys, and values where they are apart.
    of_token: usize,
}

impl<'a> Runs<'a> {
    fn of(whole: &KvShape, part: &KvPart, span: &KvSpan<'_>, own: &'a OwnSpan) -> Self {
        let head = to_usize(whole.head_elements(span.wire) * span.wire.size_bytes());
        Runs {
            own,
            before: (own.layers.start - span.layers.start) as usize,
            tokens: span.tokens.len(),
            row: whole.kv_heads as usize * head,
            width: part.kv_heads.len() * head,
            offset: part.kv_heads.start as usize * head,
            of_token: whole.pools() as usize,
        }
    }

    /// All of them in the span, if they are contiguous.
    fn only(&self) -> Option<Range<usize>> {
        let start = self.before * self.tokens * self.of_token * self.row;
        let is_one = self.width == self.row && self.own.rows.len() == self.tokens;
        is_one.then(|| start..start + to_usize(self.own.bytes))
    }

    /// Calls `copy` with each one in the span and in the device's part.
    fn each(&self, copy: &mut dyn FnMut(Range<usize>, Range<usize>)) {
        let mut at = 0;
        for layer in 0..self.own.layers.len() {
            for &token in &self.own.rows {
                // keys, then values
                for row in 0..self.of_token {
                    let place = ((self.before + layer) * self.tokens + token as usize) * self.of_token + row;
                    let start = place * self.row + self.offset;
                    copy(start..start + self.width, at..at + self.width);
                    at += self.width;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
