//! Drawing a step's tokens on the device.

use super::arena::{Packer, rows_of};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::sample::{DRAWN_WORDS, Parameters};
use mixfleet_hal::{BufferUsage, DType, Device, OpSig, Result, Slice, Support};
use mixfleet_scheduler::layers::{DrawSizes, StepTable};
use std::sync::OnceLock;

/// Entries of the history for which a step has room, if it has any.
const HISTORY_MIN: u32 = 256;

/// Parameters of drawing one token.
#[derive(Clone, Copy, Debug)]
pub struct DrawInput<'a> {
    /// The row's parameters.
    pub parameters: Parameters,
    /// Tokens whose logits penalties change, each once, with the bits of the f32 that is subtracted.
    pub history: &'a [[u32; 2]],
    /// Number of best tokens to list with their log-probabilities.
    pub tops: u32,
}

impl DrawInput<'_> {
    /// Takes the best token.
    pub const GREEDY: DrawInput<'static> =
        DrawInput { parameters: Parameters::GREEDY, history: &[], tops: 0 };
}

/// The sizes of the draws of these rows.
pub(super) fn draw_sizes<'a>(rows: impl Iterator<Item = &'a DrawInput<'a>>) -> DrawSizes {
    let (mut history, mut tops) = (0, 0);
    for row in rows {
        history += row.history.len();
        tops = tops.max(row.tops);
    }
    let rounded = |count: u32, min: u32| if count == 0 { 0 } else { count.next_power_of_two().max(min) };
    DrawSizes { history: rounded(to_u32(history), HISTORY_MIN), tops: rounded(tops, 1) }
}

/// The device memory of draws.
#[derive(Debug)]
pub(super) struct DrawArena {
    drawn: Slice, // [sequences, DRAWN_WORDS] u32
    /// `[2^i, 2]` u32 each.
    histories: Growing,
    /// `[2^i, sequences, 2]` u32 each.
    tops: Growing,
}

impl DrawArena {
    /// Allocates the memory that every step needs; none if the device cannot draw.
    pub(super) fn new(device: &dyn Device, vocab: u32, sequences: u32) -> Result<Option<Self>> {
        let sig = OpSig::Sample { rows: 1, cols: vocab, history: HISTORY_MIN, tops: 1 };
        if device.support(&sig) == Support::No {
            return Ok(None);
        }
        let drawn = device.alloc(u64::from(sequences * DRAWN_WORDS) * 4, BufferUsage::Activations)?;
        let tops = Growing::new(u64::from(sequences) * 8);
        Ok(Some(DrawArena { drawn, histories: Growing::new(8), tops }))
    }

    /// Uploads histories, and packs the other parameters of the rows.
    pub(super) fn upload<'a>(
        &self,
        device: &dyn Device,
        rows: impl Iterator<Item = &'a DrawInput<'a>>,
        padding: usize,
        sizes: DrawSizes,
        packer: &mut Packer<'_>,
    ) -> Result<DrawOutputs> {
        let (mut parameters, mut starts, mut history) = (Vec::new(), vec![0], Vec::new());
        for row in rows.chain(std::iter::repeat_n(&DrawInput::GREEDY, padding)) {
            parameters.push(row.parameters);
            history.extend_from_slice(row.history);
            starts.push(to_u32(history.len()));
        }
        let rows = to_u32(parameters.len());
        let entries = match sizes.history {
            0 => None,
            room => {
                let buffer = self.histories.get(device, room)?;
                device.write(&buffer.range(0, history.len() as u64 * 8), bytemuck::cast_slice(&history))?;
                Some((packer.put_words(starts), buffer))
            }
        };
        let top = match sizes.tops {
            0 => None,
            tops => Some(rows_of(&self.tops.get(device, tops)?, rows, tops * 2, DType::U32)),
        };
        Ok(DrawOutputs {
            parameters: packer.put(bytemuck::cast_slice(&parameters)),
            history: entries,
            sizes,
            drawn: rows_of(&self.drawn, rows, DRAWN_WORDS, DType::U32),
            top,
        })
    }
}

/// A step's draws on the device.
#[derive(Debug)]
pub struct DrawOutputs {
    parameters: Slice,
    /// Where each row's entries begin, and the entries.
    history: Option<(Slice, Slice)>,
    sizes: DrawSizes,
    drawn: Slice,
    top: Option<Slice>,
}

impl DrawOutputs {
    /// `[rows]` of [`Drawn`](mixfleet_hal::sample::Drawn).
    pub fn drawn(&self) -> &Slice {
        &self.drawn
    }

    /// `[rows, tops, 2]` u32, the best tokens with the f32 of their logit minus the best one, and `tops`;
    /// none if no row wants them.
    pub fn top(&self) -> Option<(&Slice, u32)> {
        self.top.as_ref().map(|top| (top, self.sizes.tops))
    }

    /// The memory of the first `rows`, with their best tokens if any row wants those.
    pub(super) fn results(&self, rows: u32) -> Vec<Slice> {
        let drawn = rows_of(&self.drawn, rows, DRAWN_WORDS, DType::U32);
        let top = self.top().map(|(top, tops)| rows_of(top, rows, tops * 2, DType::U32));
        std::iter::once(drawn).chain(top).collect()
    }

    /// The sizes of the draws.
    pub(super) fn sizes(&self) -> DrawSizes {
        self.sizes
    }

    /// An operand of a draw.
    pub(super) fn table(&self, table: StepTable) -> Option<&Slice> {
        match table {
            StepTable::DrawParameters => Some(&self.parameters),
            StepTable::HistoryStarts => self.history.as_ref().map(|(starts, _)| starts),
            StepTable::History => self.history.as_ref().map(|(_, entries)| entries),
            StepTable::Drawn => Some(&self.drawn),
            StepTable::Tops => self.top.as_ref(),
            _ => None,
        }
    }
}

/// Buffers for powers of two of a unit, allocated when they are first needed, since most requests need none.
/// Their addresses stay, so that recordings stay valid.
#[derive(Debug)]
struct Growing {
    unit_bytes: u64,
    buffers: [OnceLock<Slice>; 32],
}

impl Growing {
    fn new(unit_bytes: u64) -> Self {
        Growing { unit_bytes, buffers: Default::default() }
    }

    /// The buffer of `units`, a power of two.
    fn get(&self, device: &dyn Device, units: u32) -> Result<Slice> {
        let buffer = &self.buffers[units.trailing_zeros() as usize];
        if let Some(slice) = buffer.get() {
            return Ok(slice.clone());
        }
        let slice = device.alloc(u64::from(units) * self.unit_bytes, BufferUsage::Activations)?;
        Ok(buffer.get_or_init(|| slice).clone())
    }
}
