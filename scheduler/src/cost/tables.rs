//! A step's time as tables, for frequent queries, and for engines whose tables were measured.

use super::Prefill;
use super::calibrated::rise;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};

/// Maximum length of the prefix sums over a long prompt's chunks.
const CHUNKS_MAX: u32 = 4096;

/// Values at the knots of a rectangular grid. They are interpolated linearly along each axis; below the first
/// knot its value applies (a kernel's minimum time), beyond the last one they are extrapolated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "GridParts")]
pub struct Grid {
    axes: Vec<Axis>,
    values: Values,
}

/// Values at the knots, with the last axis fastest.
#[derive(Clone, Debug, Serialize)]
#[serde(into = "Vec<f64>")]
enum Values {
    Known(Vec<f64>),
    Lazy(LazyValues),
}

/// Values that are computed when they are first asked for.
#[derive(Clone)]
struct LazyValues {
    known: Vec<OnceLock<f64>>,
    /// The value of an index.
    of: Arc<dyn Fn(usize) -> f64 + Send + Sync>,
}

impl std::fmt::Debug for LazyValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = self.known.iter().filter(|value| value.get().is_some()).count();
        write!(f, "{known} of {} values", self.known.len())
    }
}

impl Values {
    #[inline]
    fn at(&self, index: usize) -> f64 {
        match self {
            Values::Known(values) => values[index],
            Values::Lazy(lazy) => *lazy.known[index].get_or_init(|| (lazy.of)(index)),
        }
    }

    fn len(&self) -> usize {
        match self {
            Values::Known(values) => values.len(),
            Values::Lazy(lazy) => lazy.known.len(),
        }
    }
}

impl From<Values> for Vec<f64> {
    fn from(values: Values) -> Self {
        (0..values.len()).map(|index| values.at(index)).collect()
    }
}

impl PartialEq for Values {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && (0..self.len()).all(|index| self.at(index) == other.at(index))
    }
}

/// A grid before validation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GridParts {
    axes: Vec<Vec<f64>>,
    values: Vec<f64>,
}

impl TryFrom<GridParts> for Grid {
    type Error = String;

    fn try_from(GridParts { axes, values }: GridParts) -> Result<Self, String> {
        Grid::new(axes, values)
    }
}

impl Grid {
    /// Creates a grid from the ascending knots of each axis and the values, with the last axis fastest.
    ///
    /// # Errors
    /// A description: an axis is empty or not ascending, or values are too few, too many or not finite.
    pub fn new(axes: Vec<Vec<f64>>, values: Vec<f64>) -> Result<Self, String> {
        let rises = |axis: &Vec<f64>| !axis.is_empty() && axis.windows(2).all(|pair| pair[0] < pair[1]);
        if axes.is_empty() || !axes.iter().all(rises) {
            return Err("the knots of a table must rise".into());
        }
        let count: usize = axes.iter().map(Vec::len).product();
        if values.len() != count {
            return Err(format!("a table of {count} knots has {} values", values.len()));
        }
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(format!("a table has the value {value}")),
            None => Ok(Grid::checked(axes, values)),
        }
    }

    /// Creates a grid from valid parts.
    pub(super) fn checked(axes: Vec<Vec<f64>>, values: Vec<f64>) -> Self {
        debug_assert_eq!(axes.iter().map(Vec::len).product::<usize>(), values.len());
        Grid { axes: axes.into_iter().map(Axis::from).collect(), values: Values::Known(values) }
    }

    /// A grid of zeros with these axes.
    pub(super) fn zero(axes: usize) -> Self {
        Grid::checked(vec![vec![0.0]; axes], vec![0.0])
    }

    /// Tabulates a function of two numbers, which is called once for each queried value.
    pub(super) fn of_two(
        first: Vec<u32>,
        second: Vec<u32>,
        time: impl Fn(u32, u32) -> f64 + Send + Sync + 'static,
    ) -> Self {
        let axis =
            |knots: &[u32]| Axis::from(knots.iter().map(|&knot| f64::from(knot)).collect::<Vec<f64>>());
        let axes = vec![axis(&first), axis(&second)];
        let known = vec![OnceLock::new(); first.len() * second.len()];
        let of = move |index: usize| time(first[index / second.len()], second[index % second.len()]);
        Grid { axes, values: Values::Lazy(LazyValues { known, of: Arc::new(of) }) }
    }

    /// The same grid with all values computed, which are found faster.
    fn computed(self) -> Self {
        Grid { values: Values::Known(self.values.into()), ..self }
    }

    /// Number of axes.
    pub(super) fn dimensions(&self) -> usize {
        self.axes.len()
    }

    /// The knots of an axis, ascending.
    pub fn knots(&self, axis: usize) -> &[f64] {
        &self.axes[axis].knots
    }

    /// The value at `point`; coordinates beyond the last knots are clamped.
    pub(super) fn at_most<const D: usize>(&self, point: [f64; D]) -> f64 {
        let last = |axis: usize| self.axes[axis].knots.last().copied().unwrap_or(0.0);
        let inside: [f64; D] = std::array::from_fn(|axis| point[axis].min(last(axis)));
        self.at(inside)
    }

    /// A copy of a grid of two axes in which no value is less than that of a smaller size or context.
    #[must_use]
    pub(super) fn rising(&self) -> Grid {
        let [first, second] = [0, 1].map(|axis| self.knots(axis));
        let mut values: Vec<f64> = first
            .iter()
            .flat_map(|&a| second.iter().map(move |&b| (a, b)))
            .map(|(a, b)| self.at([a, b]))
            .collect();
        let columns = second.len();
        values.chunks_mut(columns).for_each(|row| rise(row.iter_mut()));
        (0..columns).for_each(|column| rise(values.iter_mut().skip(column).step_by(columns)));
        Grid::checked(vec![first.to_vec(), second.to_vec()], values)
    }

    /// The grid of what `value` makes of each knot of two axes and its value.
    pub(super) fn map(&self, value: impl Fn([f64; 2], f64) -> f64) -> Grid {
        let [first, second] = [0, 1].map(|axis| self.knots(axis));
        let knots = first.iter().flat_map(|&a| second.iter().map(move |&b| [a, b]));
        let values = knots.enumerate().map(|(index, knot)| value(knot, self.values.at(index))).collect();
        Grid::checked(vec![first.to_vec(), second.to_vec()], values)
    }

    /// The geometric mean of the values, which are above 0.
    pub(super) fn geometric_mean(&self) -> f64 {
        let logs: f64 = (0..self.len()).map(|index| self.values.at(index).ln()).sum();
        (logs / self.len() as f64).exp()
    }

    /// Number of knots.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no knot; never true.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The value at `point`, which has one coordinate per axis.
    pub fn at<const D: usize>(&self, point: [f64; D]) -> f64 {
        debug_assert_eq!(D, self.axes.len());
        let (mut first, mut share, mut stride) = (0, [0.0; D], [0; D]);
        let mut step = 1;
        for d in (0..D).rev() {
            let axis = &self.axes[d];
            let (cell, inside) = axis.cell(point[d]);
            first += cell * step;
            share[d] = inside;
            stride[d] = if axis.knots.len() > 1 { step } else { 0 };
            step *= axis.knots.len();
        }
        let mut total = 0.0;
        for corner in 0..1usize << D {
            let (mut at, mut weight) = (first, 1.0);
            for d in 0..D {
                if corner >> d & 1 == 1 {
                    at += stride[d];
                    weight *= share[d];
                } else {
                    weight *= 1.0 - share[d];
                }
            }
            if weight != 0.0 {
                total += weight * self.values.at(at);
            }
        }
        total
    }
}

/// Ascending knots, found by the leading bits of a number.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "Vec<f64>")]
struct Axis {
    knots: Vec<f64>,
    /// For each bucket the cell that contains its least number.
    starts: Vec<u32>,
}

/// A bucket is 1/16 of an octave: exponent and four bits of fraction, starting at 1.
const BUCKET_BITS: u32 = 48;

fn bucket(at: f64) -> usize {
    to_usize((at.max(1.0).to_bits() >> BUCKET_BITS) - (1f64.to_bits() >> BUCKET_BITS))
}

impl From<Vec<f64>> for Axis {
    fn from(knots: Vec<f64>) -> Self {
        let buckets = bucket(knots.last().copied().unwrap_or(1.0)) as u64 + 1;
        let least = |index: u64| {
            f64::from_bits((1f64.to_bits() >> BUCKET_BITS << BUCKET_BITS) + (index << BUCKET_BITS))
        };
        let cells = knots.len().saturating_sub(2);
        let cell = |at: f64| to_u32(knots.partition_point(|knot| *knot <= at).saturating_sub(1).min(cells));
        // Numbers below 1 are in the first bucket too.
        let starts = (0..buckets).map(|index| if index == 0 { 0 } else { cell(least(index)) }).collect();
        Axis { knots, starts }
    }
}

impl From<Axis> for Vec<f64> {
    fn from(axis: Axis) -> Self {
        axis.knots
    }
}

impl Axis {
    /// The cell that contains `at`, and the position in it: 0 to 1, and more beyond the last knot.
    fn cell(&self, at: f64) -> (usize, f64) {
        let knots = self.knots.as_slice();
        if knots.len() < 2 {
            return (0, 0.0);
        }
        let mut low = self.starts[bucket(at).min(self.starts.len() - 1)] as usize;
        while low + 2 < knots.len() && knots[low + 1] <= at {
            low += 1;
        }
        (low, ((at - knots[low]) / (knots[low + 1] - knots[low])).max(0.0))
    }
}

/// The components of a step, each as a table of seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepParts {
    /// Seconds of every step.
    pub overhead_s: f64,
    /// `[tokens]`: all operations but attention and LM head over the rows of a step.
    pub dense: Grid,
    /// `[rows]`: LM head and sampling.
    pub head: Grid,
    /// `[tokens, context before]`: attention of one chunk, all layers.
    pub prefill: Grid,
    /// `[sequences, mean context]`: attention of sequences that decode one token each.
    pub decode: Grid,
    /// `[tokens, context before, sequences, mean context]`: attention of both in one kernel, if the engine
    /// has one; otherwise they run one after the other.
    pub mixed: Option<Grid>,
    /// Chunk size assumed for whole prompts.
    pub chunk_tokens: u32,
}

/// A step's time from tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "StepParts", into = "StepParts")]
pub struct StepTables {
    parts: StepParts,
    /// Attention of the first k full chunks of a prompt.
    prompt: Vec<f64>,
}

impl TryFrom<StepParts> for StepTables {
    type Error = String;

    fn try_from(parts: StepParts) -> Result<Self, String> {
        StepTables::new(parts)
    }
}

impl From<StepTables> for StepParts {
    fn from(tables: StepTables) -> Self {
        tables.parts
    }
}

impl StepTables {
    /// Checks the tables' axes.
    ///
    /// # Errors
    /// A description: a table has too few or too many axes, or chunks have no tokens.
    pub fn new(parts: StepParts) -> Result<Self, String> {
        let StepParts { dense, head, prefill, decode, mixed, .. } = &parts;
        let axes = [("dense", dense, 1), ("head", head, 1), ("prefill", prefill, 2), ("decode", decode, 2)];
        let mixed = mixed.iter().map(|mixed| ("mixed", mixed, 4));
        for (name, grid, want) in axes.into_iter().chain(mixed) {
            if grid.axes.len() != want {
                return Err(format!("the table '{name}' has {} axes instead of {want}", grid.axes.len()));
            }
        }
        if parts.chunk_tokens == 0 || !parts.overhead_s.is_finite() {
            return Err("steps need chunks of at least one token and a finite overhead".into());
        }
        Ok(Self::of(parts))
    }

    /// Step tables from valid parts.
    pub(super) fn of(parts: StepParts) -> Self {
        let chunk = f64::from(parts.chunk_tokens);
        let contexts = parts.prefill.axes[1].knots.last().copied().unwrap_or(0.0);
        let chunks = to_u32((contexts / chunk).ceil()).saturating_add(1).min(CHUNKS_MAX);
        let (mut total, mut prompt) = (0.0, vec![0.0]);
        for index in 0..chunks {
            total += parts.prefill.at([chunk, f64::from(index) * chunk]);
            prompt.push(total);
        }
        StepTables { parts, prompt }
    }

    /// The same tables, in which every step takes `seconds` before anything else.
    pub(super) fn beginning_after(self, seconds: Seconds) -> Self {
        StepTables { parts: StepParts { overhead_s: seconds.0, ..self.parts }, ..self }
    }

    /// The same tables with all values computed.
    pub(super) fn computed(self) -> Self {
        let StepParts { prefill, decode, .. } = self.parts;
        StepTables {
            parts: StepParts { prefill: prefill.computed(), decode: decode.computed(), ..self.parts },
            ..self
        }
    }

    /// Time of a mixed step; see [`super::CostModel::step_s`].
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let drawn = to_u32(parts.iter().filter(|part| part.last).count()) + batch;
        let head = if drawn == 0 { 0.0 } else { self.parts.head.at([f64::from(drawn)]) };
        let attention = self.attention(parts, batch, kv_tokens);
        Seconds(self.parts.overhead_s + self.parts.dense.at([f64::from(rows)]) + head + attention)
    }

    /// Time of a prompt alone, chunk by chunk; see [`super::CostModel::prefill_s`].
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let full = (new_tokens - 1) / self.parts.chunk_tokens;
        let done = full * self.parts.chunk_tokens;
        let rest = Prefill { context: context_before + done, tokens: new_tokens - done, last: true };
        let last = self.step_s(&[rest], 0, 0);
        if full == 0 {
            return last;
        }
        let each = self.parts.overhead_s + self.parts.dense.at([f64::from(self.parts.chunk_tokens)]);
        last + Seconds(each * f64::from(full) + self.full_chunks(context_before, full))
    }

    /// Attention of `count` full chunks starting at `context`.
    fn full_chunks(&self, context: u32, count: u32) -> f64 {
        let chunk = f64::from(self.parts.chunk_tokens);
        let (first, share) = (
            (context / self.parts.chunk_tokens) as usize,
            f64::from(context % self.parts.chunk_tokens) / chunk,
        );
        let run = |from: usize| Some(self.prompt.get(from + count as usize)? - self.prompt[from]);
        match (run(first), run(first + 1)) {
            (Some(before), Some(after)) => (1.0 - share) * before + share * after,
            _ => (0..count)
                .map(|i| self.parts.prefill.at([chunk, f64::from(context) + f64::from(i) * chunk]))
                .sum(),
        }
    }

    fn attention(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> f64 {
        let mean = if batch == 0 { 0.0 } else { kv_tokens as f64 / f64::from(batch) };
        let alone = |part: &Prefill| self.parts.prefill.at([f64::from(part.tokens), f64::from(part.context)]);
        let work = |part: &Prefill| {
            f64::from(part.tokens) * (f64::from(part.context) + 0.5 * f64::from(part.tokens))
        };
        // The chunk with the most work runs beside decode; the others add the time beyond a kernel's minimum,
        // since all chunks share one kernel.
        let Some(largest) = parts.iter().reduce(|a, b| if work(b) > work(a) { b } else { a }) else {
            return if batch == 0 { 0.0 } else { self.parts.decode.at([f64::from(batch), mean]) };
        };
        let with_decode = match (&self.parts.mixed, batch) {
            (_, 0) => alone(largest),
            (Some(mixed), _) => {
                let (tokens, context) = (f64::from(largest.tokens), f64::from(largest.context));
                mixed.at([tokens, context, f64::from(batch), mean])
            }
            (None, _) => alone(largest) + self.parts.decode.at([f64::from(batch), mean]),
        };
        if parts.len() == 1 {
            return with_decode;
        }
        let least = self.parts.prefill.values.at(0);
        let others = parts.iter().map(|part| alone(part) - least).sum::<f64>();
        with_decode + others - (alone(largest) - least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_value_is_computed_once_and_only_if_it_is_asked_for() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let time = move |a: u32, b: u32| {
            counted.fetch_add(1, Ordering::Relaxed);
            f64::from(a * a + b)
        };
        let grid = Grid::of_two(vec![1, 2, 4, 8], vec![10, 20, 40], time);
        assert_eq!(grid.at([2.0, 20.0]), 24.0);
        assert_eq!(calls.load(Ordering::Relaxed), 1, "a knot needs no other");
        assert_eq!((grid.at([3.0, 30.0]), grid.at([3.0, 30.0])), (40.0, 40.0));
        assert_eq!(calls.load(Ordering::Relaxed), 4);
        let all = grid.clone().computed();
        assert_eq!((calls.load(Ordering::Relaxed), grid.len()), (12, 12));
        assert_eq!((all.at([3.0, 30.0]), &all), (40.0, &grid));
    }
}
