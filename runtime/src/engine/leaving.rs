//! KV that leaves the devices of an instance while a step runs.
//!
//! After the commands of a layer, each device gathers its part of the outgoing tokens into a separate buffer.
//! While later layers run, the parts are read from there and put together. Pieces without a free slot at the
//! receiver are read from the pages later, like all other KV (`pages.rs`).

use super::pages::{InstanceKv, Keeper, KvSpan, OwnSpan};
use crate::model::graph::StepShape;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{BufferUsage, Cmd, DType, Error, Result, Slice};
use std::ops::Range;

/// A device's memory for KV that leaves while a step runs.
pub(super) struct StepMemory {
    /// Slot numbers of the tokens that leave.
    slot_ids: Slice,
    /// The outgoing KV of one layer each, since a read waits for all uses of its buffer.
    gathered: Vec<Slice>,
}

/// Tokens of a sequence whose KV leaves while a step runs.
pub(super) struct LeavingTokens {
    pub(super) tokens: Range<u32>,
    pub(super) wire: DType,
    /// Each device's part of one of these layers, and the buffer for it; none if it sends nothing.
    places: Vec<Option<Place>>,
}

struct Place {
    own: OwnSpan,
    /// The first of its slot numbers, and the distance between those of two parts of the layers.
    slot: u64,
    stride: u64,
    /// Its slot numbers in all parts of the layers.
    slots: Vec<u32>,
    /// Where its KV begins in the memory of a layer.
    offset: u64,
}

/// Slot numbers and bytes that are taken of each device's memory.
#[derive(Clone, Default)]
pub(super) struct Taken(Vec<(u64, u64)>);

impl Keeper {
    fn alignment(&self) -> u64 {
        self.device.limits().alignment_bytes.max(4)
    }

    fn leaving(&self) -> Result<&StepMemory> {
        let none = || Error::unsupported("no KV leaves this device during a step");
        self.leaving.as_ref().ok_or_else(none)
    }
}

impl StepMemory {
    /// The memory of the layer with this number on its device.
    fn layer(&self, layer: usize) -> &Slice {
        &self.gathered[layer % self.gathered.len()]
    }
}

impl InstanceKv {
    /// Allocates memory for outgoing KV during steps of this shape: on each member for this many layers at a
    /// time.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn leaves_in_steps(&mut self, shape: &StepShape, layers: &[usize]) -> Result<()> {
        let StepShape { tokens_max: tokens, sequences_max: sequences, .. } = *shape;
        let block_pages = u64::from(self.block_pages);
        for keeper in self.keepers.iter_mut().filter(|keeper| keeper.part.sends) {
            let (device, padding) = (&keeper.device, u64::from(sequences) * keeper.alignment());
            let bytes = u64::from(tokens) * keeper.pages.shape().wire_token_bytes(DType::F32);
            let layers = layers[keeper.member].min(keeper.part.layers.len());
            let gathered = (0..layers).map(|_| device.alloc(bytes + padding, BufferUsage::Kv));
            let slot_bytes = (u64::from(tokens) * 4 + padding) * block_pages;
            let slot_ids = device.alloc(slot_bytes, BufferUsage::Staging)?;
            keeper.leaving = Some(StepMemory { slot_ids, gathered: gathered.collect::<Result<_>>()? });
        }
        Ok(())
    }

    /// The number, in the whole model, of a member's layer.
    pub(super) fn layer_of(&self, member: usize, layer: usize) -> u32 {
        let keeper = self.keepers.iter().find(|keeper| keeper.member == member);
        keeper.map_or(0, |keeper| keeper.part.layers.start) + to_u32(layer)
    }

    /// The outgoing KV of a sequence with these pages, in memory that is not `taken` yet.
    pub(super) fn leaving(
        &self,
        (pages, tokens): (&[u32], Range<u32>),
        wire: DType,
        Taken(taken): &mut Taken,
    ) -> LeavingTokens {
        taken.resize(self.keepers.len(), (0, 0));
        let places = self.keepers.iter().zip(taken).map(|(keeper, (slots, bytes))| {
            let first = keeper.part.layers.start;
            let span = KvSpan { layers: first..first + 1, pages, tokens: tokens.clone(), wire };
            let own = keeper.own(&span).filter(|_| keeper.part.sends)?;
            let (slot, offset) = (*slots, *bytes);
            let stride = (own.slots.len() as u64).next_multiple_of(keeper.alignment().div_ceil(4));
            let mut all = Vec::with_capacity(to_usize(stride) * self.block_pages as usize);
            for part in 0..self.block_pages {
                all.resize(part as usize * to_usize(stride), 0);
                all.extend(keeper.slots(&span, part).map(|(_, slot)| slot));
            }
            *slots = slot + stride * u64::from(self.block_pages);
            *bytes = (offset + own.bytes).next_multiple_of(keeper.alignment());
            Some(Place { own, slot, stride, slots: all, offset })
        });
        let places = places.collect();
        LeavingTokens { tokens, wire, places }
    }

    /// Whether a member gathers its layer with this number where it gathers that layer of the whole model.
    pub(super) fn shares_memory(&self, (member, layer): (usize, usize), other: u32) -> bool {
        let keeper = self.keepers.iter().find(|keeper| keeper.member == member);
        keeper.is_some_and(|Keeper { part, leaving, .. }| {
            let buffers = leaving.as_ref().map_or(1, |memory| memory.gathered.len());
            let own = other.checked_sub(part.layers.start).filter(|_| part.layers.contains(&other));
            own.is_some_and(|own| own as usize % buffers == layer % buffers)
        })
    }

    /// The commands of a member that gather its part of one of its layers, for the tokens of which that layer
    /// is sent. Those of its first layer also upload the tokens' positions, for all layers.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn gather<'a>(
        &self,
        (member, layer): (usize, usize),
        leaving: impl Iterator<Item = (&'a LeavingTokens, bool)> + Clone,
    ) -> Result<Vec<Cmd>> {
        let Some(at) = self.keepers.iter().position(|keeper| keeper.member == member) else {
            return Ok(Vec::new());
        };
        let keeper = &self.keepers[at];
        let its =
            leaving.filter_map(|(leaving, sent)| Some((leaving.wire, sent, leaving.places[at].as_ref()?)));
        let Some((_, _, first)) = its.clone().next() else { return Ok(Vec::new()) };
        let memory = keeper.leaving()?;
        if layer == 0 {
            let mut slots: Vec<u32> = Vec::new();
            for (_, _, place) in its.clone() {
                slots.resize(to_usize(place.slot - first.slot), 0);
                slots.extend(&place.slots);
            }
            let at = memory.slot_ids.range(first.slot * 4, slots.len() as u64 * 4);
            keeper.device.write(&at, bytemuck::cast_slice(&slots))?;
        }
        let pools = &keeper.pools[layer];
        let (part, _) = keeper.layer_pages.layers[keeper.part.layers.start as usize + layer];
        let gather = |(wire, _, Place { own, slot, stride, offset, .. }): (DType, bool, &Place)| {
            let first = slot + stride * u64::from(part);
            let slots = memory.slot_ids.range(first * 4, own.slots.len() as u64 * 4);
            keeper.pages.gather(pools, slots, (memory.layer(layer).range(*offset, own.bytes), wire))
        };
        its.filter(|(_, sent, _)| *sent).map(gather).collect()
    }

    /// Reads the KV of a layer of the whole model, which all devices that have it gathered, of some of the
    /// tokens into `place`.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn read_gathered(
        &mut self,
        leaving: &LeavingTokens,
        (layer, tokens): (u32, Range<u32>),
        place: &mut [u8],
    ) -> Result<()> {
        let LeavingTokens { tokens: all, wire, places } = leaving;
        let span = KvSpan { layers: layer..layer + 1, pages: &[], tokens: tokens.clone(), wire: *wire };
        let (from, to) = (tokens.start - all.start, tokens.end - all.start);
        for (keeper, at) in self.keepers.iter().zip(places) {
            let Some(Place { own, offset, .. }) = at else { continue };
            if !keeper.part.layers.contains(&layer) {
                continue;
            }
            let (before, until) =
                (own.rows.partition_point(|&row| row < from), own.rows.partition_point(|&row| row < to));
            let rows: Vec<u32> = own.rows[before..until].iter().map(|row| row - from).collect();
            if rows.is_empty() {
                continue;
            }
            let row_bytes = own.bytes / own.rows.len() as u64;
            let bytes = row_bytes * rows.len() as u64;
            let memory = keeper.leaving()?.layer((layer - keeper.part.layers.start) as usize);
            let gathered = memory.range(offset + row_bytes * before as u64, bytes);
            let own = OwnSpan { layers: span.layers.clone(), rows, slots: Vec::new(), bytes };
            keeper.put(&self.shape, (&span, &own, &gathered), place, &mut self.packed)?;
        }
        Ok(())
    }
}
