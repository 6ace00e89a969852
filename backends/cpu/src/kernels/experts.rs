//! Mixtures of experts: which experts tokens choose, products by expert, and the sum of what they make.

use super::elementwise::{load_n, store_n};
use super::gemm::packed::{PackX, PanelOut, packed_words, tiles};
use super::gemm::quantised::QuantisedFewRows;
use super::gemm::rows::Rows;
use super::gemm::{Operands, Shape};
use super::quantised::QuantisedRows;
use super::simd::{Simd, Task};
use super::{Span, Worker, round_up, rows_of_a_piece, weight_row_bytes};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{DType, Error, ExpertRouting, Result, Scoring};
use std::ops::Range;

/// Columns of an expert's product that a worker computes at a time, of rows that are packed.
const PACKED_COLUMNS: usize = 256;
/// Rows that are packed at a time.
const PACKED_ROWS: usize = 128;

/// Choices of experts.
pub(crate) struct ExpertChoice {
    pub(crate) logits: Span,
    pub(crate) bias: Option<Span>,
    pub(crate) chosen: Span,
    pub(crate) weights: Span,
    pub(crate) order: Span,
    pub(crate) starts: Span,
    pub(crate) tokens: usize,
    pub(crate) routing: ExpertRouting,
}

/// Inserts a key among the best ones, behind those that are equal; a NaN is as low as any.
fn insert(best: &mut Vec<(f32, u32)>, most: usize, key: f32, expert: u32) {
    let key = if key.is_nan() { f32::NEG_INFINITY } else { key };
    if best.len() == most {
        if best.last().is_none_or(|last| key <= last.0) {
            return;
        }
        best.pop();
    }
    let at = best.iter().rposition(|other| other.0 >= key).map_or(0, |at| at + 1);
    best.insert(at, (key, expert));
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

impl ExpertChoice {
    /// Chooses for this worker's tokens.
    ///
    /// # Safety
    /// Spans are the operands of the operation.
    pub(crate) unsafe fn choose(&self, worker: &Worker<'_>) {
        let ExpertRouting { experts, active, .. } = self.routing;
        let (experts, active) = (experts as usize, active as usize);
        // SAFETY: the caller's promise.
        let bias = self.bias.map(|bias| unsafe { floats(bias, 0, experts) });
        let mut best = Vec::with_capacity(active);
        for token in worker.share(self.tokens) {
            // SAFETY: the caller's promise.
            let logits = unsafe { floats(self.logits, token * experts, experts) };
            let (max, sum) = self.softmax(&logits, self.routing.normalise);
            let score = |expert: usize| match self.routing.scoring {
                Scoring::Softmax => (logits[expert] - max).exp() / sum,
                Scoring::Sigmoid => sigmoid(logits[expert]),
            };
            if self.routing.by_logits(bias.is_some()) {
                best.clear();
                logits.iter().zip(0..).for_each(|(&key, expert)| insert(&mut best, active, key, expert));
            } else {
                // keys are scores of all experts, whatever weights are
                let (max, sum) = self.softmax(&logits, false);
                let keys = |expert: usize| {
                    let score = match self.routing.scoring {
                        Scoring::Softmax => (logits[expert] - max).exp() / sum,
                        Scoring::Sigmoid => sigmoid(logits[expert]),
                    };
                    score + bias.as_ref().map_or(0.0, |bias| bias[expert])
                };
                self.choose_in_groups(&(0..experts).map(keys).collect::<Vec<f32>>(), &mut best);
            }
            // SAFETY: the caller's promise.
            unsafe { self.put(token, &best, &logits, score) };
        }
    }

    /// The maximum and the sum of a softmax over all logits; of no use where weights are normalised.
    fn softmax(&self, logits: &[f32], unused: bool) -> (f32, f32) {
        if unused || self.routing.scoring == Scoring::Sigmoid {
            return (0.0, 1.0);
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        (max, logits.iter().map(|logit| (logit - max).exp()).sum())
    }

    fn choose_in_groups(&self, keys: &[f32], best: &mut Vec<(f32, u32)>) {
        let ExpertRouting { experts, active, groups, groups_active, group_best, .. } = self.routing;
        let size = (experts / groups) as usize;
        let mut open = Vec::with_capacity(groups_active as usize);
        for (group, keys) in (0..).zip(keys.chunks(size)) {
            best.clear();
            keys.iter().zip(0..).for_each(|(&key, expert)| insert(best, group_best as usize, key, expert));
            let sum = best.iter().fold(0.0, |sum, (key, _)| sum + key);
            insert(&mut open, groups_active as usize, sum, group);
        }
        best.clear();
        for (group, keys) in (0..).zip(keys.chunks(size)) {
            if open.iter().any(|(_, known)| *known == group) {
                let first = group * to_u32(size);
                keys.iter()
                    .zip(first..)
                    .for_each(|(&key, expert)| insert(best, active as usize, key, expert));
            }
        }
    }

    /// Writes a token's choices and their weights.
    ///
    /// # Safety
    /// As for [`ExpertChoice::choose`].
    unsafe fn put(&self, token: usize, best: &[(f32, u32)], logits: &[f32], score: impl Fn(usize) -> f32) {
        let of = |expert: u32| logits[expert as usize];
        let ExpertRouting { normalise, scoring, scale, .. } = self.routing;
        let mut weights: Vec<f32> = match (normalise, scoring) {
            (true, Scoring::Softmax) => {
                let max = best.iter().map(|(_, expert)| of(*expert)).fold(f32::NEG_INFINITY, f32::max);
                best.iter().map(|(_, expert)| (of(*expert) - max).exp()).collect()
            }
            _ => best.iter().map(|(_, expert)| score(*expert as usize)).collect(),
        };
        if normalise {
            let least = if scoring == Scoring::Sigmoid { ExpertRouting::SUM_MIN } else { 0.0 };
            let sum = weights.iter().sum::<f32>() + least;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        let first = token * best.len();
        for (i, ((_, expert), weight)) in best.iter().zip(weights).enumerate() {
            // SAFETY: the caller's promise; a token's choices are this worker's alone.
            unsafe {
                self.chosen.at(DType::U32, first + i).cast::<u32>().write_unaligned(*expert);
                let weight = weight * scale.0;
                self.weights.at(DType::F32, first + i).cast::<f32>().write_unaligned(weight);
            }
        }
    }

    /// Sorts all choices by expert.
    ///
    /// # Safety
    /// As for [`ExpertChoice::choose`], which is done.
    pub(crate) unsafe fn sort(&self) {
        let (experts, active) = (self.routing.experts as usize, self.routing.active as usize);
        let choices = self.tokens * active;
        // SAFETY: the caller's promise.
        let of = |choice: usize| unsafe { self.chosen.u32(choice) } as usize;
        let mut next = vec![0u32; experts + 1];
        (0..choices).for_each(|choice| next[of(choice) + 1] += 1);
        for expert in 0..experts {
            next[expert + 1] += next[expert];
        }
        // SAFETY: the caller's promise; every place is below the number of choices.
        unsafe {
            for (expert, start) in next.iter().enumerate() {
                self.starts.at(DType::U32, expert).cast::<u32>().write_unaligned(*start);
            }
            for choice in 0..choices {
                let place = &mut next[of(choice)];
                self.order.at(DType::U32, *place as usize).cast::<u32>().write_unaligned(to_u32(choice));
                *place += 1;
            }
        }
    }
}

/// # Safety
/// `from` holds that many f32.
unsafe fn floats(from: Span, first: usize, count: usize) -> Vec<f32> {
    // SAFETY: the caller's promise.
    (0..count).map(|i| unsafe { from.at(DType::F32, first + i).cast::<f32>().read_unaligned() }).collect()
}

/// Products with the matrices of experts.
pub(crate) struct GroupedGemm {
    /// That of one expert; rows are those of all choices.
    pub(crate) shape: Shape,
    pub(crate) x: Span,
    pub(crate) weight: Span,
    /// The weights of all experts, if they are quantised.
    pub(crate) quantised: Option<QuantisedRows>,
    pub(crate) bias: Option<Span>,
    pub(crate) order: Span,
    pub(crate) starts: Span,
    pub(crate) out: Span,
    pub(crate) fan: usize,
    pub(crate) experts: usize,
}

/// What a worker computes at a time.
struct Piece {
    expert: usize,
    /// Places in the order of choices.
    rows: Range<usize>,
    columns: Range<usize>,
    packed: bool,
}

/// The elements `first .. first + count` of an operand.
fn part(of: Span, dtype: DType, first: usize, count: usize) -> Span {
    Span { start: of.at(dtype, first), bytes: count * to_usize(dtype.size_bytes()) }
}

impl GroupedGemm {
    /// Computes pieces until none is left.
    ///
    /// # Errors
    /// `Invalid` if experts' rows are not within the choices.
    ///
    /// # Safety
    /// Spans are the operands of the operation.
    pub(crate) unsafe fn run(&self, worker: &mut Worker<'_>) -> Result<()> {
        // pieces of earlier experts, and the expert of the piece before
        let (mut before, mut expert) = (0, 0);
        let row_bytes = weight_row_bytes(&self.shape, self.quantised.as_ref());
        // a piece begins with a group of rows that share scales
        let group_rows = self.quantised.map_or(1, |weights| weights.kind.group_rows as usize);
        let streamed_columns = round_up(rows_of_a_piece(self.shape.n, row_bytes, worker.count), group_rows);
        loop {
            let wanted = worker.claim();
            let piece = loop {
                if expert == self.experts {
                    return Ok(());
                }
                // SAFETY: the caller's promise.
                let rows = unsafe { self.rows_of(expert) }?;
                let packed = Shape { m: rows.len(), ..self.shape }.is_packed(worker.isa);
                let (down, across) = if packed {
                    (PACKED_ROWS, PACKED_COLUMNS)
                } else {
                    (rows.len().max(1), streamed_columns)
                };
                let columns = self.shape.n.div_ceil(across);
                let pieces = rows.len().div_ceil(down) * columns;
                if wanted < before + pieces {
                    let (row, column) =
                        ((wanted - before) / columns * down, (wanted - before) % columns * across);
                    let rows = rows.start + row..(rows.start + row + down).min(rows.end);
                    break Piece {
                        expert,
                        rows,
                        columns: column..(column + across).min(self.shape.n),
                        packed,
                    };
                }
                before += pieces;
                expert += 1;
            };
            // SAFETY: the caller's promise; no other worker has this piece.
            unsafe { self.compute(&piece, worker) }?;
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

    /// # Safety
    /// As for [`GroupedGemm::run`].
    unsafe fn compute(&self, piece: &Piece, worker: &mut Worker<'_>) -> Result<()> {
        let Shape { m: choices, n, k, x, weight, out, .. } = self.shape;
        let (m, columns) = (piece.rows.len(), piece.columns.len());
        let mut chosen = Vec::with_capacity(m);
        for place in piece.rows.clone() {
            // SAFETY: places are below the number of choices.
            let choice = unsafe { self.order.u32(place) } as usize;
            if choice >= choices {
                let message = format!("grouped_gemm: choice {choice} at {place}, but there are {choices}");
                return Err(Error::invalid(message));
            }
            chosen.push(choice);
        }
        let shape = Shape { m, n: columns, ..self.shape };
        let dtype = shape.word_dtype(worker.isa);
        let line = piece.expert * n + piece.columns.start;
        let words = |elements: usize, dtype: DType| {
            round_up((elements * to_usize(dtype.size_bytes())).div_ceil(4), 16)
        };
        let (x_words, out_words) = (words(m * k, x), words(m * columns, out));
        let weights = self.quantised.map(|all| all.part(n, (piece.expert, piece.columns.start)));
        let packed_words = if piece.packed { round_up(packed_words(&shape, dtype), 16) } else { 0 };
        let own = match (piece.packed, &weights) {
            (true, _) => PanelOut::scratch_words(&shape, dtype).max(PackX::SCRATCH_WORDS),
            (false, Some(weights)) => QuantisedFewRows::scratch_words(&shape, weights),
            (false, None) => Rows::scratch_words(&shape),
        };
        let gathered = worker.scratch.words(x_words + out_words + packed_words + own);
        let made = gathered.wrapping_add(x_words);
        let packed = made.wrapping_add(out_words);
        let scratch = packed.wrapping_add(packed_words);
        let row = |choice: usize| part(self.x, x, choice / self.fan * k, k);
        let target = |choice: usize| part(self.out, out, choice * n + piece.columns.start, columns);
        let alone = m == 1;
        if !alone {
            for (i, &choice) in chosen.iter().enumerate() {
                let from = row(choice);
                // SAFETY: scratch has room for m rows of k elements; the operand has that row.
                unsafe {
                    let to = gathered.cast::<u8>().add(i * from.bytes);
                    std::ptr::copy_nonoverlapping(from.start, to, from.bytes);
                }
            }
        }
        let scratch_span = |at: *mut f32, words: usize| Span { start: at.cast(), bytes: words * 4 };
        let operands = Operands {
            x: if alone { row(chosen[0]) } else { scratch_span(gathered, x_words) },
            weight: match weights {
                Some(_) => Span::EMPTY,
                None => part(self.weight, weight, line * k, columns * k),
            },
            bias: self.bias.map(|bias| part(bias, weight, line, columns)),
            out: if alone { target(chosen[0]) } else { scratch_span(made, out_words) },
        };
        // SAFETY: operands hold what the shape says, and scratch what each task says.
        unsafe {
            if piece.packed {
                let tiles = 0..tiles(m, worker.isa.lanes());
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
                worker.isa.run(Rows { shape, operands, columns: 0..columns, next: columns, scratch });
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

/// `out[t] (+)= sum of weights[t, i] * x[t, i]`.
pub(crate) struct Combine {
    pub(crate) args: [Span; 3],
    pub(crate) tokens: Range<usize>,
    pub(crate) active: usize,
    pub(crate) cols: usize,
    pub(crate) dtype: DType,
    pub(crate) accumulate: bool,
}

impl Task for Combine {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Combine { args: [x, weights, out], active, cols, dtype, .. } = self;
        for token in self.tokens {
            let mut column = 0;
            while column < cols {
                let n = (cols - column).min(S::LANES);
                // SAFETY: operands hold tokens * active * cols, tokens * active and tokens * cols elements.
                unsafe {
                    let mut sum = S::splat(0.0);
                    for choice in token * active..(token + 1) * active {
                        let weight = weights.at(DType::F32, choice).cast::<f32>().read_unaligned();
                        let from = x.at(dtype, choice * cols + column);
                        sum = S::fma(S::splat(weight), load_n::<S>(dtype, from, n), sum);
                    }
                    let to = out.at(DType::F32, token * cols + column);
                    if self.accumulate {
                        sum = S::add(sum, load_n::<S>(DType::F32, to, n));
                    }
                    store_n::<S>(DType::F32, to, sum, n);
                }
                column += S::LANES;
            }
        }
    }
}
