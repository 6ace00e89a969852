//! What [`OpSig::Sample`] must do, by sorting, and operands that try it.
//!
//! The arithmetic is the one that [`mixfleet_hal::sample`] describes, written anew: results are exact, so a
//! device must give the same bits.

use crate::cases::Case;
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::{to_f32, to_i32, to_u32, to_u64, to_usize};
use mixfleet_hal::random::Stream;
use mixfleet_hal::sample::{
    DRAWN_WORDS, EXP2, LOG2_E, NO_TOKEN, ONE, PARAMETER_WORDS, Parameters, SCALE_MAX, WHOLE, fraction,
};

/// Result of a row that holds something else than numbers.
const NAN_BITS: u32 = 0x7FC0_0000;
/// What lowers the logit of a token that must not be drawn.
const FORBIDDEN_LOSS: f32 = 3e38;
/// Listed where there is no token.
const NOTHING: [u32; 2] = [NO_TOKEN, f32::NEG_INFINITY.to_bits()];

/// Draws a token of each row, as [`crate::oracle::run`] does all operations.
pub(crate) fn run(sig: &OpSig, operands: &mut [Vec<f64>]) -> Result<(), String> {
    let OpSig::Sample { rows, cols, history, tops } = *sig else {
        return Err(format!("{} draws nothing", sig.name()));
    };
    let (rows, cols, tops) = (rows as usize, cols as usize, tops as usize);
    let out_at = if history > 0 { 4 } else { 2 };
    let (mut out, mut top) = (Vec::new(), Vec::new());
    for r in 0..rows {
        let words = |of: &[f64], from: usize, n: usize| of[from..][..n].iter().map(|&w| to_u32(w)).collect();
        let words: Vec<u32> = words(&operands[1], r * PARAMETER_WORDS as usize, PARAMETER_WORDS as usize);
        let parameters: Parameters = bytemuck::cast_slice(&words)[0];
        let raw: Vec<f32> = operands[0][r * cols..][..cols].iter().map(|&v| to_f32(v)).collect();
        let mut logits = raw.clone();
        if history > 0 {
            let bound = |at: usize| to_usize(operands[2][at]).min(history as usize);
            for entry in bound(r)..bound(r + 1) {
                let [id, less] = [0, 1].map(|word| to_u32(operands[3][2 * entry + word]));
                let Some(logit) = logits.get_mut(id as usize) else { continue };
                operands[3][2 * entry + 1] = f64::from(logit.to_bits());
                let factor = if *logit > 0.0 { parameters.repetition_inverse } else { parameters.repetition };
                *logit *= factor;
                *logit -= f32::from_bits(less);
            }
        }
        let (drawn, best) = row(&raw, &logits, &parameters, tops);
        out.extend(drawn.map(f64::from));
        top.extend(best.as_flattened().iter().map(|&word| f64::from(word)));
        for (to, logit) in operands[0][r * cols..].iter_mut().zip(logits) {
            *to = f64::from(logit);
        }
    }
    operands[out_at] = out;
    if tops > 0 {
        operands[out_at + 1] = top;
    }
    Ok(())
}

/// Returns a row's result and its list of best tokens.
fn row(
    raw: &[f32],
    logits: &[f32],
    parameters: &Parameters,
    tops: usize,
) -> ([u32; DRAWN_WORDS as usize], Vec<[u32; 2]>) {
    let mut top = vec![NOTHING; tops];
    if let Some(wrong) = logits.iter().position(|&logit| logit.is_nan() || logit == f32::INFINITY) {
        return ([to_u32(wrong), NAN_BITS, 0, 0], top);
    }
    let order = ordered(logits);
    let best = order.first().map_or(f32::NEG_INFINITY, |&id| logits[id]);
    if best == f32::NEG_INFINITY {
        return ([NO_TOKEN, f32::NEG_INFINITY.to_bits(), 0, 0], top);
    }
    let raw_order = ordered(raw);
    let raw_best = raw[raw_order[0]];
    let below = |id: usize| if raw[id] == raw_best { 0 } else { (raw[id] - raw_best).to_bits() };
    let mut sum = 0;
    if parameters.logprobs & 1 == 1 {
        sum = raw.iter().map(|&logit| fixed(logit - raw_best, LOG2_E)).sum();
        for (entry, &id) in top.iter_mut().zip(&raw_order) {
            *entry = [to_u32(id), below(id)];
        }
    }
    let id = draw(logits, &order, parameters);
    let [low, high] = [sum & u64::from(u32::MAX), sum >> 32].map(to_u32);
    ([to_u32(id), below(id), low, high], top)
}

/// Returns all ids, best first; the lower one of equal logits.
fn ordered(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| {
        logits[b].partial_cmp(&logits[a]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(&b))
    });
    order
}

fn draw(logits: &[f32], order: &[usize], parameters: &Parameters) -> usize {
    let best = logits[order[0]];
    if parameters.scale == 0.0 {
        return order[0];
    }
    let weigh = |id: usize| fixed(logits[id] - best, parameters.scale);
    let mut kept = order.to_vec();
    if parameters.top_k > 0 {
        kept.truncate(parameters.top_k as usize);
    }
    if parameters.top_p != WHOLE {
        let target = share(kept.iter().map(|&id| weigh(id)).sum(), parameters.top_p).max(1);
        let mut sum = 0;
        let enough = kept.iter().position(|&id| {
            sum += weigh(id);
            sum >= target
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    let least = to_u64(f64::from(parameters.min_p) * ONE as f64).min(ONE);
    kept.retain(|&id| weigh(id) >= least);
    kept.sort_unstable();
    let target = share(kept.iter().map(|&id| weigh(id)).sum(), parameters.uniform);
    let mut sum = 0;
    let passed = kept.iter().find(|&&id| {
        sum += weigh(id);
        sum > target
    });
    *passed.unwrap_or_else(|| unreachable!("a fraction below 1 of a sum is below it"))
}

/// Returns 2^(difference * scale) in units of 2^-40, rounded down.
fn fixed(difference: f32, scale: f32) -> u64 {
    let y = difference * scale;
    // not a number, or too small
    if y.partial_cmp(&-41.0) != Some(std::cmp::Ordering::Greater) {
        return 0;
    }
    let n = (y + 0.5).floor();
    let f = y - n;
    let [c1, c2, c3, c4, c5, c6] = EXP2;
    let p = (((((c6 * f + c5) * f + c4) * f + c3) * f + c2) * f + c1) * f + 1.0;
    to_u64(f64::from(p) * f64::powi(2.0, to_i32(n) + 40))
}

fn share(total: u64, fraction: u32) -> u64 {
    to_u64((u128::from(total) * u128::from(fraction)) >> 32)
}

/// Returns rows of logits of every kind, in turn.
pub(crate) fn logits(values: &mut [f64], cols: usize, seed: u64, stream: &mut Stream) {
    for (r, row) in values.chunks_mut(cols.max(1)).enumerate() {
        let any = |stream: &mut Stream| to_usize(stream.below(cols as u64));
        match (r as u64 + seed) % 11 {
            // as of a model: some tokens far above the others
            0 | 6 => row.iter_mut().for_each(|v| *v *= 3.0),
            // ties of every size, of both zeros too
            1 => row.iter_mut().for_each(|v| *v = [0.0, -0.0, 1.0, 2.0, -3.0][to_usize(v.abs() * 4.0) % 5]),
            2 => row.fill(-1.25),
            3 => row[any(stream)] = 30.0,
            4 => row.iter_mut().for_each(|v| *v *= 0.01),
            5 => {
                let possible = any(stream);
                row.iter_mut().filter(|v| **v < 0.5).for_each(|v| *v = f64::NEG_INFINITY);
                row[possible] = 0.25;
            }
            7 => {
                row[any(stream)] = f64::NAN;
                row[any(stream)] = f64::NAN;
                row[any(stream)] = f64::INFINITY;
            }
            8 => row.fill(f64::NEG_INFINITY),
            9 => row.iter_mut().for_each(|v| *v *= 100.0),
            // many ties between unlike tokens, as bf16 makes them
            _ => row.iter_mut().for_each(|v| *v = (*v * 16.0).round() / 8.0),
        }
    }
}

/// Returns `rows` rows of parameters: every filter alone and with others, at its limits too.
pub(crate) fn parameters(rows: u32, cols: u32, seed: u64, stream: &mut Stream) -> Vec<f64> {
    let temperature = |t: f32| LOG2_E / t;
    let mut words = Vec::new();
    for r in 0..u64::from(rows) {
        let mut row = Parameters {
            scale: temperature(1.0),
            repetition: 1.25,
            repetition_inverse: 0.8,
            uniform: to_u32(stream.below(1 << 32)),
            logprobs: to_u32((r + seed) % 2),
            ..Parameters::GREEDY
        };
        let kind = (r + seed * 5) % 17;
        match kind {
            0 => row.scale = 0.0,
            1 => row.uniform = 0,
            2 => row.uniform = u32::MAX,
            3 => row.top_k = 1,
            4 => row.top_k = cols,
            5 => row.top_k = cols + 1,
            6 => (row.top_k, row.scale) = (5, temperature(0.7)),
            7 => row.top_p = 0,
            8 => row.top_p = fraction(0.95),
            9 => row.top_p = WHOLE - 1,
            10 => (row.top_p, row.scale) = (fraction(0.5), temperature(2.0)),
            11 => row.min_p = 1.0,
            12 => row.min_p = 0.05,
            13 => (row.top_k, row.top_p, row.min_p) = (40, fraction(0.9), 0.02),
            14 => row.scale = SCALE_MAX,
            15 => (row.scale, row.top_p) = (temperature(100.0), fraction(0.99)),
            _ => {}
        }
        words.extend(bytemuck::cast_slice::<_, u32>(&[row]).iter().map(|&word| f64::from(word)));
    }
    words
}

/// Returns where each row's entries of the history begin, and the entries. Some rows have none, some lower
/// logits so far that they weigh nothing, some ids have no logit, some entries belong to no row, and the last
/// row may claim more than there are.
pub(crate) fn history(case: &Case) -> (Vec<f64>, Vec<f64>) {
    let OpSig::Sample { rows, cols, history, .. } = case.sig else {
        unreachable!("only a draw has a history");
    };
    let mut stream = Stream::new(case.seed ^ 0x4157);
    let share = history.div_ceil(rows.max(1));
    let mut starts = vec![f64::from(history.min(1))];
    let mut entries = vec![0.0; 2 * history as usize];
    let mut at = history.min(1);
    for r in 0..rows {
        let wanted = if r % 3 == 1 { 0 } else { share.min(cols + 1) };
        let count = wanted.min(history - at);
        // distinct, and one past the last logit among them
        let (first, step) = (to_u32(stream.below(u64::from(cols) + 1)), (cols + 1) / count.max(1));
        for i in 0..count {
            let id = if i == 3 { u32::MAX } else { (first + i * step) % (cols + 1) };
            let less = [0.0f32, 0.5, 2.0, -1.0][to_usize(stream.below(4))];
            let less = if r % 6 == 5 { FORBIDDEN_LOSS } else { less };
            let entry = 2 * (at + i) as usize;
            (entries[entry], entries[entry + 1]) = (f64::from(id), f64::from(less.to_bits()));
        }
        at += count;
        let beyond = if r + 1 == rows && at == history { 7 } else { 0 };
        starts.push(f64::from(at + beyond));
    }
    (starts, entries)
}
