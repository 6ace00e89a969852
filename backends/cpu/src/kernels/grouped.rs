//! Products of rows with the matrices of the experts that they chose.
//!
//! An expert's rows form one product and run like a product of that many rows: few rows stream the weights,
//! many are packed. On tiles all experts' rows are packed first, into shared scratch, so that every panel of
//! weights is used once for all of them.

use super::gemm::packed::{PackX, PanelOut, packed_words, tiles as word_tiles};
use super::gemm::quantised::QuantisedFewRows;
use super::gemm::rows::GemmRows;
#[cfg(target_arch = "x86_64")]
use super::gemm::tiles::{self, TilePanel, TileX};
use super::gemm::{GemmShape, Operands, PackedForm};
use super::quantised::QuantisedRows;
use super::{KernelPhase, KernelWorker, OperandSpan, round_up, rows_of_a_piece, weight_row_bytes};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, Error, Result};
use std::ops::Range;

/// Columns of an expert's product that a worker computes at a time, of rows that are packed as words.
const PACKED_COLUMNS: usize = 256;
/// Rows that are packed as words at a time.
const PACKED_ROWS: usize = 128;

/// Products with the matrices of experts.
pub(crate) struct GroupedGemm {
    /// The shape for one expert; rows count all choices.
    pub(crate) shape: GemmShape,
    pub(crate) x: OperandSpan,
    pub(crate) weight: OperandSpan,
    /// The weights of all experts, if they are quantised.
    pub(crate) quantised: Option<QuantisedRows>,
    pub(crate) bias: Option<OperandSpan>,
    pub(crate) order: OperandSpan,
    pub(crate) starts: OperandSpan,
    pub(crate) out: OperandSpan,
    pub(crate) fan: usize,
    pub(crate) experts: usize,
}

/// What a worker computes at a time.
struct ExpertTask {
    expert: usize,
    /// Places in the order of choices.
    rows: Range<usize>,
    columns: Range<usize>,
    form: Option<PackedForm>,
    /// Tiles of the experts before, for one that runs on tiles.
    #[cfg(target_arch = "x86_64")]
    first_tile: usize,
    /// First column of the worker's next piece, if it is of the same expert; else the number of columns.
    #[cfg(target_arch = "x86_64")]
    next: usize,
}

/// The elements `first .. first + count` of an operand.
fn part(of: OperandSpan, dtype: DType, first: usize, count: usize) -> OperandSpan {
    OperandSpan { start: of.at(dtype, first), bytes: count * to_usize(dtype.size_bytes()) }
}

impl GroupedGemm {
    /// Runs a phase: packing of `x` for tiles, or all products.
    ///
    /// # Errors
    /// `Invalid` if experts' rows are not within the choices, or a choice is none.
    ///
    /// # Safety
    /// Spans are the operands of the operation, and `worker.shared` holds packed `x` after that phase.
    pub(crate) unsafe fn run(&self, phase: KernelPhase, worker: &mut KernelWorker<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match phase {
                #[cfg(target_arch = "x86_64")]
                KernelPhase::PackX => self.pack_tiles(worker),
                _ => self.multiply(phase == KernelPhase::MultiplyPacked, worker),
            }
        }
    }

    /// How an expert's rows are packed, given their number.
    fn form(&self, rows: usize, on_tiles: bool, worker: &KernelWorker<'_>) -> Option<PackedForm> {
        let shape = GemmShape { m: rows, ..self.shape };
        match shape.packed_form(worker.isa) {
            Some(PackedForm::Tiles) if !on_tiles => {
                shape.is_packed(worker.isa).then(|| PackedForm::Words(shape.word_dtype(worker.isa)))
            }
            form => form,
        }
    }

    /// Packs this worker's tiles of the rows of experts that have enough rows.
    ///
    /// # Safety
    /// As for [`GroupedGemm::run`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn pack_tiles(&self, worker: &mut KernelWorker<'_>) -> Result<()> {
        let GemmShape { k, x, .. } = self.shape;
        let mut tile = 0;
        for expert in 0..self.experts {
            // SAFETY: the caller's promise.
            let rows = unsafe { self.rows_of(expert) }?;
            if self.form(rows.len(), true, worker) != Some(PackedForm::Tiles) {
                continue;
            }
            for first in rows.clone().step_by(tiles::ROWS) {
                tile += 1;
                if tile % worker.count != worker.index {
                    continue;
                }
                let places = first..(first + tiles::ROWS).min(rows.end);
                let shape = GemmShape { m: places.len(), ..self.shape };
                let row_bytes = k * to_usize(x.size_bytes());
                let gathered_words = round_up((tiles::ROWS * row_bytes).div_ceil(4), 16);
                let gathered = worker.scratch.words(gathered_words + TileX::SCRATCH_WORDS);
                let span = OperandSpan { start: gathered.cast(), bytes: shape.m * row_bytes };
                let operands =
                    Operands { x: span, weight: OperandSpan::EMPTY, bias: None, out: OperandSpan::EMPTY };
                // SAFETY: the caller's promise; shared scratch has a tile for every 16 rows of an expert.
                unsafe {
                    self.gather(&self.choices(places)?, span);
                    let packed = worker.shared.add((tile - 1) * tiles::tile_words(k));
                    let scratch = gathered.add(gathered_words);
                    worker.isa.run(TileX { shape, operands, tiles: 0..1, packed, scratch });
                }
            }
        }
        Ok(())
    }

    /// Computes pieces until none is left.
    ///
    /// # Safety
    /// As for [`GroupedGemm::run`].
    unsafe fn multiply(&self, on_tiles: bool, worker: &mut KernelWorker<'_>) -> Result<()> {
        // pieces of earlier experts, and the expert of the piece before
        let (mut before, mut expert) = (0, 0);
        #[cfg(target_arch = "x86_64")]
        let mut first_tile = 0;
        let row_bytes = weight_row_bytes(&self.shape, self.quantised.as_ref());
        // a piece begins with a group of rows that share scales
        let group_rows = self.quantised.map_or(1, |weights| weights.kind.group_rows as usize);
        let streamed_columns = round_up(rows_of_a_piece(self.shape.n, row_bytes, worker.count), group_rows);
        let mut wanted = worker.claim();
        loop {
            let next = worker.claim();
            let piece = loop {
                if expert == self.experts {
                    return Ok(());
                }
                // SAFETY: the caller's promise.
                let rows = unsafe { self.rows_of(expert) }?;
                let form = self.form(rows.len(), on_tiles, worker);
                let (down, across) = match form {
                    #[cfg(target_arch = "x86_64")]
                    Some(PackedForm::Tiles) => {
                        let shape = GemmShape { m: rows.len(), ..self.shape };
                        (rows.len(), tiles::panel_rows(&shape, worker.count))
                    }
                    Some(_) => (PACKED_ROWS, PACKED_COLUMNS),
                    None => (rows.len().max(1), streamed_columns),
                };
                let columns = self.shape.n.div_ceil(across);
                let pieces = rows.len().div_ceil(down) * columns;
                if wanted < before + pieces {
                    let (row, column) =
                        ((wanted - before) / columns * down, (wanted - before) % columns * across);
                    break ExpertTask {
                        expert,
                        rows: rows.start + row..(rows.start + row + down).min(rows.end),
                        columns: column..(column + across).min(self.shape.n),
                        form,
                        #[cfg(target_arch = "x86_64")]
                        first_tile,
                        #[cfg(target_arch = "x86_64")]
                        next: ((next - before) * across).min(self.shape.n),
                    };
                }
                before += pieces;
                #[cfg(target_arch = "x86_64")]
                if form == Some(PackedForm::Tiles) {
                    first_tile += tiles::x_tiles(rows.len());
                }
                expert += 1;
            };
            // SAFETY: the caller's promise; no other worker has this piece.
            unsafe {
                match piece.form {
                    #[cfg(target_arch = "x86_64")]
                    Some(PackedForm::Tiles) => self.multiply_tiles(&piece, worker)?,
                    _ => self.compute(&piece, worker)?,
                }
            }
            wanted = next;
        }
    }

    /// # Safety
    /// As for [`GroupedGemm::run`].
    unsafe fn rows_of(&self, expert: usize) -> Result<Range<usize>> {
        // SAFETY: the caller's promise.
        let [start, end] = [0, 1].map(|i| unsafe { self.starts.u32(expert + i) } as usize);
        if start > end || end > self.shape.m {
            let message =
                format!("grouped_gemm: expert {expert} has rows {start}..{end} of {}", self.shape.m);
            return Err(Error::invalid(message));
        }
        Ok(start..end)
    }

    /// The choices at some places.
    ///
    /// # Errors
    /// `Invalid` for one that is none.
    ///
    /// # Safety
    /// As for [`GroupedGemm::run`]; places are below the number of choices.
    unsafe fn choices(&self, places: Range<usize>) -> Result<Vec<usize>> {
        let choices = self.shape.m;
        let checked = |place: usize| {
            // SAFETY: the caller's promise.
            let choice = unsafe { self.order.u32(place) } as usize;
            if choice >= choices {
                let message = format!("grouped_gemm: choice {choice} at {place}, but there are {choices}");
                return Err(Error::invalid(message));
            }
            Ok(choice)
        };
        places.map(checked).collect()
    }

    /// The row of `x` of a choice.
    fn row(&self, choice: usize) -> OperandSpan {
        let GemmShape { k, x, .. } = self.shape;
        part(self.x, x, choice / self.fan * k, k)
    }

    /// Copies the rows of choices one behind the other.
    ///
    /// # Safety
    /// As for [`GroupedGemm::run`]; `to` has room for them.
    unsafe fn gather(&self, choices: &[usize], to: OperandSpan) {
        for (i, &choice) in choices.iter().enumerate() {
            let from = self.row(choice);
            // SAFETY: the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(from.start, to.start.add(i * from.bytes), from.bytes);
            }
        }
    }

    /// Weights and bias of `count` columns of an expert from one on.
    fn weights_of(&self, expert: usize, first: usize, count: usize) -> (OperandSpan, Option<OperandSpan>) {
        let GemmShape { n, k, weight, .. } = self.shape;
        let line = expert * n + first;
        let weights = match self.quantised {
            Some(_) => OperandSpan::EMPTY,
            None => part(self.weight, weight, line * k, count * k),
        };
        (weights, self.bias.map(|bias| part(bias, weight, line, count)))
    }

    /// # Safety
    /// As for [`GroupedGemm::run`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn multiply_tiles(&self, piece: &ExpertTask, worker: &mut KernelWorker<'_>) -> Result<()> {
        let ExpertTask { expert, columns, next, first_tile, .. } = piece;
        let shape = GemmShape { m: piece.rows.len(), ..self.shape };
        let (weight, bias) = self.weights_of(*expert, 0, shape.n);
        let operands = Operands { x: OperandSpan::EMPTY, weight, bias, out: self.out };
        // SAFETY: the caller's promise; scratch is as large as the task says.
        unsafe {
            let choices = self.choices(piece.rows.clone())?;
            worker.isa.run(TilePanel {
                shape,
                operands,
                quantised: self.quantised.map(|all| all.part(shape.n, *expert, 0)),
                columns: columns.clone(),
                next: *next,
                out_rows: Some(&choices),
                packed: worker.shared.add(first_tile * tiles::tile_words(shape.k)),
                scratch: worker.scratch.words(TilePanel::scratch_words(&shape, columns.len())),
            });
        }
        Ok(())
    }

    /// # Safety
    /// As for [`GroupedGemm::run`].
    unsafe fn compute(&self, piece: &ExpertTask, worker: &mut KernelWorker<'_>) -> Result<()> {
        let GemmShape { n, k, x, out, .. } = self.shape;
        let (m, columns) = (piece.rows.len(), piece.columns.len());
        // SAFETY: the caller's promise.
        let chosen = unsafe { self.choices(piece.rows.clone()) }?;
        let shape = GemmShape { m, n: columns, ..self.shape };
        let dtype = shape.word_dtype(worker.isa);
        let words = |elements: usize, dtype: DType| {
            round_up((elements * to_usize(dtype.size_bytes())).div_ceil(4), 16)
        };
        let is_packed = piece.form.is_some();
        let (x_words, out_words) = (words(m * k, x), words(m * columns, out));
        let weights = self.quantised.map(|all| all.part(n, piece.expert, piece.columns.start));
        let packed_words = if is_packed { round_up(packed_words(&shape, dtype), 16) } else { 0 };
        let own = match (is_packed, &weights) {
            (true, _) => PanelOut::scratch_words(&shape, dtype).max(PackX::SCRATCH_WORDS),
            (false, Some(weights)) => QuantisedFewRows::scratch_words(&shape, weights),
            (false, None) => GemmRows::scratch_words(&shape),
        };
        let gathered = worker.scratch.words(x_words + out_words + packed_words + own);
        let made = gathered.wrapping_add(x_words);
        let packed = made.wrapping_add(out_words);
        let scratch = packed.wrapping_add(packed_words);
        let target = |choice: usize| part(self.out, out, choice * n + piece.columns.start, columns);
        let alone = m == 1;
        let scratch_span = |at: *mut f32, words: usize| OperandSpan { start: at.cast(), bytes: words * 4 };
        if !alone {
            // SAFETY: scratch has room for m rows of k elements; the operand has those rows.
            unsafe { self.gather(&chosen, scratch_span(gathered, x_words)) };
        }
        let (weight, bias) = self.weights_of(piece.expert, piece.columns.start, columns);
        let operands = Operands {
            x: if alone { self.row(chosen[0]) } else { scratch_span(gathered, x_words) },
            weight,
            bias,
            out: if alone { target(chosen[0]) } else { scratch_span(made, out_words) },
        };
        // SAFETY: operands hold what the shape says, and scratch what each task says.
        unsafe {
            if is_packed {
                let tiles = 0..word_tiles(m, worker.isa.lanes());
                worker.isa.run(PackX { shape, operands, dtype, tiles, packed, scratch });
                for panel in 0..columns.div_ceil(2 * worker.isa.lanes()) {
                    worker.isa.run(PanelOut {
                        shape,
                        operands,
                        dtype,
                        panel,
                        packed,
                        scratch,
                        quantised: weights,
                    });
                }
            } else if let Some(weights) = weights {
                let (columns, is_ordered) = (0..columns, false);
                worker.isa.run(QuantisedFewRows { shape, operands, weights, columns, is_ordered, scratch });
            } else {
                worker.isa.run(GemmRows { shape, operands, columns: 0..columns, scratch });
            }
            if !alone {
                for (i, &choice) in chosen.iter().enumerate() {
                    let to = target(choice);
                    std::ptr::copy_nonoverlapping(made.cast::<u8>().add(i * to.bytes), to.start, to.bytes);
                }
            }
        }
        Ok(())
    }
}
