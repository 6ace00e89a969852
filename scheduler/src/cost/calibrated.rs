//! Cost models from the measured time of steps at a grid of sizes.
//!
//! For a part of the catalog, the measurements adjust what the catalog's kernel times predict. With the
//! ratios of measured to predicted time at the knots, interpolated between them and constant beyond them, a
//! step takes
//!
//! ```text
//! base(step) (P p + D d) / (P + D)
//! ```
//!
//! where `P` and `D` are the base's times of its prompts and of its decodes alone, and `p` and `d` their
//! ratios.
//!
//! For any other device the measurements are the whole model. The step of a chunk, with its LM head apart
//! from its layers, takes the time of the products of its rows, and of its attention. A chunk of `n` tokens
//! after `c` others computes `n (c + n / 2)` pairs, so that the growth from no context to `c` gives the time
//! per pair; the rest is the time of the products.

use super::{
    Coefficients, CostModel, DecodeCoefficients, Grid, Prefill, PrefillCoefficients, StepParts, StepTables,
};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Measured times of steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCalibration {
    /// Steps of one chunk that ends its prompt: numbers of new tokens and of earlier ones. Not empty.
    pub prefill: Vec<StepPoint>,
    /// Steps of sequences that decode one token each: numbers of sequences and context of each. Not empty.
    pub decode: Vec<StepPoint>,
    /// Rows that draw a token, ascending, and seconds of embedding, LM head and sampling, which are part of
    /// both; 0 where these were not measured apart. Not empty.
    pub head: Vec<(u32, f64)>,
    /// Prompt tokens of a step, at most.
    pub chunk_tokens: u32,
}

/// The measured time of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPoint {
    /// Tokens of the chunk, or sequences.
    pub size: u32,
    /// Context tokens.
    pub context: u32,
    /// Time of the step.
    pub seconds: f64,
}

/// A cost model whose times are adjusted to those measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UncheckedCalibrated")]
pub struct CalibratedCost {
    base: CostModel,
    /// `[tokens, context before]`: measured over predicted time of a chunk.
    prefill: Grid,
    /// `[sequences, mean context]`: the same of a decode step.
    decode: Grid,
    chunk_tokens: u32,
}

/// The fields of a [`CalibratedCost`] as another process sent them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UncheckedCalibrated {
    base: CostModel,
    prefill: Grid,
    decode: Grid,
    chunk_tokens: u32,
}

impl TryFrom<UncheckedCalibrated> for CalibratedCost {
    type Error = String;

    fn try_from(sent: UncheckedCalibrated) -> Result<Self, String> {
        let UncheckedCalibrated { base, prefill, decode, chunk_tokens } = sent;
        if [&prefill, &decode].iter().any(|ratios| ratios.dimensions() != 2) || chunk_tokens == 0 {
            return Err("a calibrated cost has two axes of ratios, and chunks of at least one token".into());
        }
        Ok(CalibratedCost { base, prefill, decode, chunk_tokens })
    }
}

/// How measured times compare with predicted ones: geometric means of their ratios.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationRatios {
    /// Of chunks of prompts.
    pub prefill: f64,
    /// Of decode steps.
    pub decode: f64,
}

impl StepCalibration {
    /// Whether there is a point of each kind, and no time that none can take.
    pub fn is_complete(&self) -> bool {
        let is_time = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        let are_times =
            |points: &[StepPoint]| !points.is_empty() && points.iter().all(|point| is_time(point.seconds));
        let rises = self.head.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let heads = !self.head.is_empty() && self.head.iter().all(|&(_, seconds)| is_time(seconds));
        are_times(&self.prefill) && are_times(&self.decode) && heads && rises
    }

    /// The cost model of a device known only by these measurements.
    pub fn alone(&self) -> CostModel {
        let measured = |point: &StepPoint| point.seconds;
        let (whole, steps) =
            (grid(&self.prefill, measured, extended), grid(&self.decode, measured, extended));
        let [tokens, contexts] = [0, 1].map(|axis| whole.knots(axis));
        let [sequences, decode_contexts] = [0, 1].map(|axis| steps.knots(axis));
        let heads: Vec<StepPoint> =
            self.head.iter().map(|&(size, seconds)| StepPoint { size, context: 0, seconds }).collect();
        let heads = undisturbed(&heads);
        let (rows, seconds) = heads.iter().map(|head| (f64::from(head.size), head.seconds)).unzip();
        let heads = Grid::checked(vec![rows], seconds);
        let head = |rows: f64| heads.at([rows]);
        // the products of a chunk, and of sequences with hardly any context
        let of_chunk = |n: f64| {
            let alone = whole.at([n, 0.0]);
            let own_pairs = contexts
                .get(1)
                .map_or(0.0, |&context| (whole.at([n, context]) - alone) * (n / (2.0 * context)));
            (alone - own_pairs.max(0.0) - head(1.0)).max(0.0)
        };
        let of_decode = |n: f64| (steps.at([n, decode_contexts[0]]) - head(n)).max(0.0);
        let most = sequences.last().copied().unwrap_or(0.0);
        let mut dense: Vec<(f64, f64)> = sequences.iter().map(|&n| (n, of_decode(n))).collect();
        dense.extend(tokens.iter().filter(|&&n| n > most).map(|&n| (n, of_chunk(n))));
        let (rows, mut seconds): (Vec<f64>, Vec<f64>) = dense.into_iter().unzip();
        rise(seconds.iter_mut());
        let dense = Grid::checked(vec![rows], seconds);
        let prefill = whole.map(|[n, _], whole| (whole - dense.at([n]) - head(1.0)).max(0.0)).rising();
        let decode = steps.map(|[n, _], step| (step - dense.at([n]) - head(n)).max(0.0)).rising();
        CostModel::Tables(Arc::new(StepTables::of(StepParts {
            overhead_s: 0.0,
            dense,
            head: heads.clone(),
            prefill,
            decode,
            mixed: None,
            chunk_tokens: self.chunk_tokens.max(1),
        })))
    }

    /// The cost model of a device whose prediction `base` is known, and the ratio of the measured times to
    /// it.
    pub fn adjusting(&self, base: CostModel) -> (CostModel, CalibrationRatios) {
        let ratio = |measured: f64, predicted: Seconds| {
            let ratio = measured / predicted.0;
            if ratio.is_finite() && ratio > 0.0 { ratio } else { 1.0 }
        };
        let of_chunk = |&StepPoint { size: tokens, context, seconds }: &StepPoint| {
            ratio(seconds, base.step_s(&[Prefill { context, tokens, last: true }], 0, 0))
        };
        let of_step = |&StepPoint { size: sequences, context, seconds }: &StepPoint| {
            let keys = u64::from(sequences) * u64::from(context);
            ratio(seconds, base.decode_step_s(sequences, keys))
        };
        let prefill = grid(&self.prefill, of_chunk, nearest);
        let decode = grid(&self.decode, of_step, nearest);
        let ratios = CalibrationRatios { prefill: prefill.geometric_mean(), decode: decode.geometric_mean() };
        let chunk_tokens = self.chunk_tokens.max(1);
        (CostModel::Calibrated(Arc::new(CalibratedCost { base, prefill, decode, chunk_tokens })), ratios)
    }

    /// Coefficients through the smallest and the largest sizes.
    pub fn coefficients(&self) -> Coefficients {
        let measured = |point: &StepPoint| point.seconds;
        let (whole, steps) =
            (grid(&self.prefill, measured, extended), grid(&self.decode, measured, extended));
        let ends = |grid: &Grid, axis| {
            let knots = grid.knots(axis);
            [knots[0], knots[knots.len() - 1]]
        };
        let ([small, large], [_, context]) = (ends(&whole, 0), ends(&whole, 1));
        let prefill = [(0.0, small), (0.0, large), (context, large)];
        let prefill_s = prefill.map(|(context, tokens)| whole.at([tokens, context]));
        let ([one, many], [short, long]) = (ends(&steps, 0), ends(&steps, 1));
        let decode = [(one, short), (many, short), (one, long)];
        let decode_s = decode.map(|(batch, context)| steps.at([batch, context]));
        Coefficients { prefill_s: fit_prefill(prefill, prefill_s), decode_s: fit_decode(decode, decode_s) }
    }
}

/// Raises each value to the largest before it: a larger step takes no less time, and extrapolation beyond the
/// last size must not fall below 0.
pub(super) fn rise<'a>(values: impl Iterator<Item = &'a mut f64>) {
    values.fold(0.0, |most: f64, value| {
        *value = value.max(most);
        *value
    });
}

/// A step that took more than this many times the time of a larger one was disturbed, for example by
/// compilation.
const DISTURBED_ABOVE: f64 = 2.0;

/// `points`, with the time of each disturbed point replaced by that of the fastest larger step.
fn undisturbed(points: &[StepPoint]) -> Vec<StepPoint> {
    let least = |point: &StepPoint| {
        let larger = points.iter().filter(|other| other.size >= point.size && other.context >= point.context);
        larger.map(|other| other.seconds).fold(point.seconds, f64::min)
    };
    let cleaned = |point: &StepPoint| {
        let least = least(point);
        let seconds = if point.seconds > DISTURBED_ABOVE * least { least } else { point.seconds };
        StepPoint { seconds, ..*point }
    };
    points.iter().map(cleaned).collect()
}

/// Returns the grid of the points' sizes and contexts with `value` of each point. For a missing point,
/// `missing` gets the axes and the rows before it, the last of which is incomplete.
fn grid(
    points: &[StepPoint],
    value: impl Fn(&StepPoint) -> f64,
    missing: impl Fn([&[f64]; 2], &[Vec<f64>]) -> f64,
) -> Grid {
    let points = undisturbed(points);
    let known: BTreeMap<(u32, u32), f64> =
        points.iter().map(|point| ((point.size, point.context), value(point))).collect();
    let axis = |of: fn(&StepPoint) -> u32| {
        let knots: BTreeSet<u32> = points.iter().map(of).collect();
        knots.into_iter().collect::<Vec<u32>>()
    };
    let (sizes, contexts) = (axis(|point| point.size), axis(|point| point.context));
    let numbers = |knots: &[u32]| knots.iter().map(|&knot| f64::from(knot)).collect::<Vec<f64>>();
    let (first, second) = (numbers(&sizes), numbers(&contexts));
    let mut rows: Vec<Vec<f64>> = Vec::new();
    for &size in &sizes {
        rows.push(Vec::new());
        for &context in &contexts {
            let value = known.get(&(size, context)).copied();
            let value = value.unwrap_or_else(|| missing([&first, &second], &rows));
            rows.last_mut().expect("just pushed").push(value);
        }
    }
    Grid::checked(vec![first, second], rows.concat())
}

/// Repeats the value of the next shorter context, or else of the next smaller size.
fn nearest(_: [&[f64]; 2], rows: &[Vec<f64>]) -> f64 {
    let (row, column) = (rows.len() - 1, rows[rows.len() - 1].len());
    match column.checked_sub(1) {
        Some(before) => rows[row][before],
        None => row.checked_sub(1).map_or(1.0, |before| rows[before][0]),
    }
}

/// Extrapolates linearly: along a row with the growth of the row before it, in proportion to their sizes, and
/// in the first column with the growth of the two values before it.
fn extended([first, second]: [&[f64]; 2], rows: &[Vec<f64>]) -> f64 {
    let (row, column) = (rows.len() - 1, rows[rows.len() - 1].len());
    let Some(before) = row.checked_sub(1).map(|at| &rows[at]) else {
        let last = |back: usize| column.checked_sub(back).map_or(0.0, |at| rows[row][at]);
        let slope = match column {
            0 | 1 => 0.0,
            _ => (last(1) - last(2)) / (second[column - 1] - second[column - 2]),
        };
        let from = column.checked_sub(1).map_or(0.0, |at| second[at]);
        return last(1) + slope.max(0.0) * (second[column] - from);
    };
    if column > 0 {
        let grows = (before[column] - before[column - 1]).max(0.0);
        return rows[row][column - 1] + grows * (first[row] / first[row - 1].max(1.0));
    }
    let slope = match row {
        1 => 0.0,
        _ => (before[0] - rows[row - 2][0]) / (first[row - 1] - first[row - 2]),
    };
    before[0] + slope.max(0.0) * (first[row] - first[row - 1])
}

impl CalibratedCost {
    /// Time of a mixed step; see [`CostModel::step_s`].
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let step = self.base.step_s(parts, batch, kv_tokens);
        if parts.is_empty() {
            return step * self.of_decode(batch, kv_tokens);
        }
        let tokens: f64 = parts.iter().map(|part| f64::from(part.tokens)).sum();
        let contexts = parts.iter().map(|part| f64::from(part.tokens) * f64::from(part.context)).sum::<f64>();
        // all rows go through the products together
        let rows = tokens + f64::from(batch);
        let of_prompts = self.prefill.at_most([rows, contexts / tokens.max(1.0)]);
        if batch == 0 {
            return step * of_prompts;
        }
        let prompts = self.base.step_s(parts, 0, 0).0;
        let decodes = self.base.decode_step_s(batch, kv_tokens).0;
        let of_decodes = self.of_decode(batch, kv_tokens);
        step * ((prompts * of_prompts + decodes * of_decodes) / (prompts + decodes).max(f64::MIN_POSITIVE))
    }

    fn of_decode(&self, batch: u32, kv_tokens: u64) -> f64 {
        self.decode.at_most([f64::from(batch), kv_tokens as f64 / f64::from(batch.max(1))])
    }

    /// Time of a prompt alone; see [`CostModel::prefill_s`]. Its chunks have the ratio of the one in the
    /// middle.
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let chunk = new_tokens.min(self.chunk_tokens);
        let middle = f64::from(context_before) + f64::from(new_tokens - chunk) / 2.0;
        let ratio = self.prefill.at_most([f64::from(chunk), middle]);
        self.base.prefill_s(context_before, new_tokens) * ratio
    }

    /// The same with the base's times in tables.
    pub(super) fn compiled(&self) -> Self {
        CalibratedCost { base: self.base.compiled(), ..self.clone() }
    }
}

/// Fits overhead + per_token n + per_token_squared ((p + n)² - p²) to the points (p, n).
fn fit_prefill(points: [(f64, f64); 3], seconds: [f64; 3]) -> PrefillCoefficients {
    let [small, large, deep] = points;
    let squares = |(p, n): (f64, f64)| n * (2.0 * p + n);
    let more = squares(deep) - squares(large);
    let per_token_squared = if more > 0.0 { ((seconds[2] - seconds[1]) / more).max(0.0) } else { 0.0 };
    let linear = |at: usize, point| seconds[at] - per_token_squared * squares(point);
    let tokens = large.1 - small.1;
    let per_token =
        if tokens > 0.0 { ((linear(1, large) - linear(0, small)) / tokens).max(0.0) } else { 0.0 };
    let overhead = (linear(0, small) - per_token * small.1).max(0.0);
    PrefillCoefficients { overhead, per_token, per_token_squared }
}

/// Fits base + per_sequence b + per_kv_token k to the points (batch, context of each).
fn fit_decode(points: [(f64, f64); 3], seconds: [f64; 3]) -> DecodeCoefficients {
    let [one, many, deep] = points.map(|(batch, context)| (batch, batch * context));
    let keys = deep.1 - one.1;
    let per_kv_token = if keys > 0.0 { ((seconds[2] - seconds[0]) / keys).max(0.0) } else { 0.0 };
    let sequences = many.0 - one.0;
    let grown = seconds[1] - seconds[0] - per_kv_token * (many.1 - one.1);
    let per_sequence = if sequences > 0.0 { (grown / sequences).max(0.0) } else { 0.0 };
    let base = (seconds[0] - per_sequence * one.0 - per_kv_token * one.1).max(0.0);
    DecodeCoefficients { base, per_sequence, per_kv_token }
}

#[cfg(test)]
mod tests {
    use super::super::{EngineCost, ProfileCost};
    use super::*;
    use crate::models::find;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;

    const CHUNK: u32 = 2048;

    /// What `cost` takes, as if it had been measured.
    fn measured(cost: &CostModel) -> StepCalibration {
        let points = |sizes: &[u32], contexts: &[u32], seconds: &dyn Fn(u32, u32) -> Seconds| {
            let pairs = sizes.iter().flat_map(|&size| contexts.iter().map(move |&context| (size, context)));
            pairs
                .map(|(size, context)| StepPoint { size, context, seconds: seconds(size, context).0 })
                .collect()
        };
        let chunk = |tokens, context| cost.step_s(&[Prefill { context, tokens, last: true }], 0, 0);
        let step = |n: u32, context: u32| cost.step_s(&[], n, u64::from(n) * u64::from(context));
        StepCalibration {
            prefill: points(&[16, 64, 128, 256, 512, 1024, 2048], &[0, 2048, 16384], &chunk),
            decode: points(&[1, 4, 16, 64, 256], &[1, 256, 4096, 16384], &step),
            head: vec![(1, 0.0)],
            chunk_tokens: CHUNK,
        }
    }

    fn on(id: &str, times: f64) -> CostModel {
        let (shape, profile) = (find("llama-3.1-8b").unwrap().shape(DType::Bf16), part(id).unwrap());
        let profile = profile.best_profile();
        let (chunk_tokens, engine) = (CHUNK, EngineCost::OURS);
        let cost = ProfileCost { profile, shape, chunk_tokens, all_reduce: None, engine };
        CostModel::Scaled(times, Arc::new(CostModel::Profile(Box::new(cost)))).compiled()
    }

    fn near(got: Seconds, wanted: Seconds, error: f64) {
        assert!((got / wanted - 1.0).abs() < error, "{got:?} where {wanted:?} are wanted");
    }

    #[test]
    fn measured_times_adjust_what_is_known_between_and_beyond() {
        let truth = on("L40S", 1.25);
        let (cost, ratios) = measured(&truth).adjusting(on("L40S", 1.0));
        assert!((ratios.prefill - 1.25).abs() < 1e-9 && (ratios.decode - 1.25).abs() < 1e-9);
        for (context, tokens) in [(0, 100), (0, 3000), (5000, 1500), (0, 40_000)] {
            near(cost.prefill_s(context, tokens), truth.prefill_s(context, tokens), 1e-9);
        }
        for (batch, context) in [(1, 10), (7, 700), (100, 3000), (300, 30_000)] {
            let keys = u64::from(batch) * context;
            near(cost.decode_step_s(batch, keys), truth.decode_step_s(batch, keys), 1e-9);
            let part = [Prefill { context: 100, tokens: 333, last: true }];
            near(cost.step_s(&part, batch, keys), truth.step_s(&part, batch, keys), 1e-9);
        }
    }

    #[test]
    fn disturbed_steps_get_the_time_of_larger_ones() {
        let truth = on("L40S", 1.0);
        let clean = measured(&truth);
        let mut held_up = clean.clone();
        held_up.decode[0].seconds += 0.6;
        held_up.prefill[1].seconds += 0.6;
        held_up.head.push((4, 0.0));
        held_up.head[0].1 = 0.6;
        for cost in [held_up.alone(), held_up.adjusting(on("L40S", 1.0)).0] {
            near(cost.prefill_s(0, 512), truth.prefill_s(0, 512), 0.05);
            near(cost.decode_step_s(1, 100), truth.decode_step_s(1, 100), 0.05);
        }
    }

    #[test]
    fn a_calibration_with_a_single_prompt_size_extrapolates_upwards() {
        let at = |size, context, seconds| StepPoint { size, context, seconds };
        let calibration = StepCalibration {
            prefill: vec![at(16, 0, 0.6), at(16, 1024, 0.017), at(16, 3584, 0.018)],
            decode: vec![at(1, 1, 0.58), at(1, 64, 0.0026), at(1, 4096, 0.0025)],
            head: vec![(1, 6e-5)],
            chunk_tokens: 512,
        };
        let cost = calibration.alone();
        let [short, long] = [16, 512].map(|tokens| cost.prefill_s(0, tokens));
        assert!(short.0 > 0.01 && short.0 < 0.02 && long > short, "{short:?} {long:?}");
        let step = cost.decode_step_s(1, 512);
        assert!(step.0 > 0.002 && step.0 < 0.004, "{step:?}");
    }

    #[test]
    fn a_cost_of_another_form_is_adjusted_at_its_measurements() {
        let truth = on("L40S", 1.0);
        let (cost, ratios) = measured(&truth).adjusting(on("RTX-4090", 1.0));
        assert!(ratios.prefill != 1.0 && ratios.decode > 1.0, "{ratios:?}");
        near(cost.prefill_s(0, 512), truth.prefill_s(0, 512), 1e-9);
        near(cost.decode_step_s(64, 64 * 256), truth.decode_step_s(64, 64 * 256), 1e-9);
        near(cost.prefill_s(0, 700), truth.prefill_s(0, 700), 0.08);
        near(cost.decode_step_s(40, 40 * 1000), truth.decode_step_s(40, 40 * 1000), 0.08);
    }

    #[test]
    fn measurements_alone_predict_steps_of_prompts_and_of_decodes() {
        let truth = on("L40S", 1.0);
        let cost = measured(&truth).alone();
        for (context, tokens) in [(0, 16), (0, 100), (2048, 512), (4000, 1000), (0, 10_000)] {
            near(cost.prefill_s(context, tokens), truth.prefill_s(context, tokens), 0.08);
        }
        for (batch, context) in [(1, 1), (4, 4096), (30, 1000), (256, 16_384)] {
            let keys = u64::from(batch) * context;
            near(cost.decode_step_s(batch, keys), truth.decode_step_s(batch, keys), 0.08);
            let part = [Prefill { context: 100, tokens: 333, last: true }];
            near(cost.step_s(&part, batch, keys), truth.step_s(&part, batch, keys), 0.12);
        }
    }

    #[test]
    fn what_was_not_measured_goes_on_as_what_was() {
        let time = |batch: u32, context: u32| 5.0 + 2.0 * f64::from(batch) + 0.5 * f64::from(batch * context);
        let all = |(size, context)| StepPoint { size, context, seconds: time(size, context) };
        let points = [(1, 1), (1, 4), (2, 1), (2, 16), (4, 4)].map(all);
        let values = grid(&points, |point| point.seconds, extended);
        for (batch, context) in [(1, 16), (2, 4), (4, 1), (4, 16)] {
            let value = values.at([f64::from(batch), f64::from(context)]);
            assert!((value / time(batch, context) - 1.0).abs() < 1e-9, "{batch} of {context}: {value}");
        }
        let sizes = grid(&points, |point| f64::from(point.size), nearest);
        assert_eq!((sizes.at([4.0, 1.0]), sizes.at([4.0, 16.0])), (2.0, 4.0));
    }

    #[test]
    fn a_cost_that_is_sent_is_read_again_or_refused() {
        let (cost, _) =
            measured(&on("L40S", 1.25)).adjusting(CostModel::Coefficients(Coefficients::default()));
        let text = serde_json::to_value(&cost).unwrap();
        assert_eq!(serde_json::from_value::<CostModel>(text.clone()).unwrap(), cost);
        let wrong = |field: &str, value: serde_json::Value| {
            let mut text = text.clone();
            text["calibrated"][field] = value;
            serde_json::from_value::<CostModel>(text).unwrap_err().to_string()
        };
        let one_axis = serde_json::json!({"axes": [[1.0, 2.0]], "values": [1.0, 1.0]});
        assert!(wrong("prefill", one_axis.clone()).contains("two axes"));
        assert!(wrong("decode", one_axis).contains("two axes"));
        assert!(wrong("chunk_tokens", 0.into()).contains("at least one token"));
    }

    #[test]
    fn a_calibration_without_points_is_not_complete() {
        let whole = measured(&on("L40S", 1.0));
        assert!(whole.is_complete());
        assert!(!StepCalibration { prefill: Vec::new(), ..whole.clone() }.is_complete());
        assert!(!StepCalibration { head: vec![(2, 0.0), (1, 0.0)], ..whole.clone() }.is_complete());
        let point = StepPoint { seconds: -1.0, ..whole.decode[0] };
        assert!(!StepCalibration { decode: vec![point], ..whole }.is_complete());
    }

    #[test]
    fn a_fit_goes_through_its_points() {
        let (a, b, c) = (0.01, 2e-4, 3e-8);
        let points = [(0.0, 16.0), (0.0, 128.0), (2048.0, 128.0)];
        let seconds = points.map(|(p, n): (f64, f64)| a + b * n + c * ((p + n) * (p + n) - p * p));
        let fit = fit_prefill(points, seconds);
        assert!((fit.overhead / a - 1.0).abs() < 1e-9 && (fit.per_token / b - 1.0).abs() < 1e-9);
        assert!((fit.per_token_squared / c - 1.0).abs() < 1e-9);

        let points = [(1.0, 1.0), (8.0, 1.0), (1.0, 2049.0)];
        let seconds = points.map(|(n, k): (f64, f64)| 0.02 + 1e-3 * n + 5e-8 * n * k);
        let fit = fit_decode(points, seconds);
        assert!((fit.base / 0.02 - 1.0).abs() < 1e-9 && (fit.per_sequence / 1e-3 - 1.0).abs() < 1e-9);
        assert!((fit.per_kv_token / 5e-8 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn noise_never_gives_a_negative_coefficient() {
        let fit = fit_prefill([(0.0, 16.0), (0.0, 128.0), (2048.0, 128.0)], [0.5, 0.2, 0.1]);
        assert!(fit.overhead >= 0.0 && fit.per_token >= 0.0 && fit.per_token_squared >= 0.0);
    }
}
