//! A-priori bounds on how far a correct device may deviate from the oracle, per element.
//!
//! Model: devices compute in f32 with relative error `u = 2^-24` per operation, in any order, fused or not,
//! flushing results below the least normal f32 to zero, and round once to the output's dtype. A sum of n
//! terms then errs by at most `gamma(n) * sum |terms|`, `gamma(n) = n u / (1 - n u)` (Higham 2002, section
//! 3.1). Functions may err as OpenCL's full profile allows: exp 3 ulp, division 2.5 ulp, square root 3 ulp,
//! with 1 ulp = 2u; the constants below round these up.

use crate::{experts, oracle, quantised};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, KvShape, OpSig, OperandAccess, RotaryPart, Scoring};

/// Unit round-off of the arithmetic.
const U: f64 = DType::F32.unit_roundoff();
/// The smallest normal f32 (and bf16), which is what one flush to zero may lose.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;
/// Relative error of an exponential with an exact argument: 4 ulp.
const EXP: f64 = 8.0 * U;
/// Relative error of a division or a square root: 3 ulp.
const DIVIDE: f64 = 6.0 * U;

/// Returns the error of `n` roundings of a term of a sum.
fn gamma(n: usize) -> f64 {
    let nu = n as f64 * U;
    nu / (1.0 - nu)
}

/// Adds the final rounding to `dtype` to the error of a value.
fn rounded(dtype: DType, want: f64, error: f64) -> f64 {
    // f16 keeps subnormals (storage conversions do), so it loses half of the smallest one; the others may be
    // flushed
    let underflow = if dtype == DType::F16 { f64::powi(2.0, -25) } else { FLUSH };
    error + dtype.unit_roundoff() * (want.abs() + error) + underflow
}

/// Returns the rounding error of a moved value, which is zero between equal dtypes, to f32, and to codes of
/// eight bits, which are prescribed.
fn moved(from: DType, to: DType, want: f64) -> f64 {
    if from == to || to == DType::F32 || to.is_scaled() { 0.0 } else { rounded(to, want, 0.0) }
}

/// Returns the bound for each element of each written operand of `sig`, and `None` for operands that are only
/// read. `before` and `want` are the operands before and after [`oracle::run`]. A bound of 0 requires the
/// exact value.
pub fn bounds(sig: &OpSig, before: &[Vec<f64>], want: &[Vec<f64>]) -> Vec<Option<Vec<f64>>> {
    let mut written: Vec<Vec<f64>> = match *sig {
        OpSig::AttnPrefill { .. } => vec![prefill(sig, before, &want[want.len() - 1])],
        OpSig::AttnDecode { .. } => decode(sig, before),
        OpSig::AttnMerge { .. } => vec![merge(sig, before, &want[want.len() - 1])],
        OpSig::Gemm { .. } => vec![gemm(sig, before, &want[want.len() - 1])],
        OpSig::GroupedGemm { .. } => vec![grouped_gemm(sig, before, &want[want.len() - 1])],
        OpSig::Route { .. } => route(sig, before, want),
        OpSig::QuantisedGemm { .. } => vec![quantised_gemm(sig, before, &want[want.len() - 1])],
        OpSig::QuantisedEmbed { .. } => vec![quantised_embed(sig, before, &want[want.len() - 1])],
        _ => {
            let operands = sig.operands();
            let written =
                operands.iter().zip(want).filter(|(operand, _)| operand.access != OperandAccess::Read);
            written
                .map(|(_, want)| (0..want.len()).map(|i| elementwise(sig, before, want[i], i)).collect())
                .collect()
        }
    };
    written.reverse();
    sig.operands()
        .iter()
        .map(|operand| (operand.access != OperandAccess::Read).then(|| written.pop()).flatten())
        .collect()
}

/// Returns the bound of element `i` for operations that need no sum over keys.
fn elementwise(sig: &OpSig, before: &[Vec<f64>], want: f64, i: usize) -> f64 {
    match *sig {
        OpSig::Embed { table, out, .. } => moved(table, out, want),
        OpSig::KvWrite { x, kv: KvShape { dtype: kv, .. }, .. } => moved(x, kv, want),
        OpSig::KvGather { wire, kv: KvShape { dtype: kv, .. }, .. } => moved(kv, wire, want),
        OpSig::KvScatter { wire, kv: KvShape { dtype: kv, .. }, .. } => moved(wire, kv, want),
        // the mean of `cols` positive squares, plus eps, errs by gamma(cols + 3) and its root by half
        // of that; then a root, a division and two products
        OpSig::RmsNorm { cols, out, .. } => {
            let relative = gamma(cols as usize + 3) / 2.0 + 2.0 * DIVIDE + gamma(2);
            rounded(out, want, relative * want.abs() + FLUSH)
        }
        // two products and a sum
        OpSig::Rope { heads, head_dim, part, x, .. } => {
            let part = part.unwrap_or(RotaryPart { first: 0, length: head_dim, interleaved: false });
            let (dim, width) = (head_dim as usize, part.length as usize);
            let (head, d) = (i / dim, i % dim);
            let Some((at, pair)) =
                part.pairs().enumerate().find(|(_, pair)| pair.iter().any(|place| *place as usize == d))
            else {
                return 0.0; // not rotated
            };
            let cos_sin = &before[1][head / heads as usize * width..][..width];
            let [a, b] = pair.map(|place| before[0][head * dim + place as usize]);
            let (a, b) = if pair[0] as usize == d { (a, b) } else { (b, a) };
            let terms = (a * cos_sin[at]).abs() + (b * cos_sin[width / 2 + at]).abs();
            rounded(x, want, gamma(2) * terms + 2.0 * FLUSH)
        }
        OpSig::CopyColumns { .. } => 0.0,
        // exp(-g) may round its argument once or twice on the way to base 2: 2u |g| relative; then a
        // sum, a division and a product. Where exp overflows the result is 0, or is flushed
        OpSig::SiluMul { x, .. } => {
            let (gate, up) = (before[0][i].abs(), before[1][i].abs());
            let relative = EXP + 2.0 * U * gate + DIVIDE + gamma(2);
            rounded(x, want, relative * want.abs() + FLUSH * (1.0 + gate) * (1.0 + up))
        }
        // as `SiluMul`; exp's argument is a polynomial of the gate, which rounds six times
        OpSig::GeluMul { x, .. } => {
            let (gate, up) = (before[0][i].abs(), before[1][i].abs());
            let argument = gate * (1.6 + 0.072 * gate * gate);
            let relative = EXP + 8.0 * U * argument.min(120.0) + DIVIDE + gamma(2);
            rounded(x, want, relative * want.abs() + FLUSH * (1.0 + gate) * (1.0 + up))
        }
        // as `SiluMul`, with one more rounding of exp's argument and a sum
        OpSig::ClampedSwiglu { alpha, limit, x, .. } => {
            let limit = f64::from(limit.0);
            let (gate, up) = (before[0][2 * i].min(limit).abs(), before[0][2 * i + 1].abs().min(limit));
            let relative = EXP + 4.0 * U * f64::from(alpha.0).abs() * gate + DIVIDE + gamma(3);
            rounded(x, want, relative * want.abs() + FLUSH * (1.0 + gate) * (2.0 + up))
        }
        OpSig::SoftCap { .. } => {
            rounded(DType::F32, want, oracle::cap_of(sig).map_or(0.0, |cap| cap_error(cap, before[0][i])))
        }
        // a product and at most as many sums as terms, one more onto the old value
        OpSig::Combine { active, cols, accumulate, .. } => {
            let (active, cols) = (active as usize, cols as usize);
            let choices = i / cols * active..(i / cols + 1) * active;
            let mut terms: f64 =
                choices.map(|choice| (before[1][choice] * before[0][choice * cols + i % cols]).abs()).sum();
            if accumulate {
                terms += before[2][i].abs();
            }
            rounded(DType::F32, want, gamma(active + 1) * terms + (active + 1) as f64 * FLUSH)
        }
        // one rounding in f32, and one to a narrower output
        OpSig::Add { x: DType::F32, .. } => rounded(DType::F32, want, 0.0),
        OpSig::Add { x, .. } => rounded(x, want, U * want.abs()),
        OpSig::Sample { .. } | OpSig::Copy { .. } | OpSig::Fill { .. } => 0.0,
        OpSig::Gemm { .. }
        | OpSig::GroupedGemm { .. }
        | OpSig::Route { .. }
        | OpSig::QuantisedGemm { .. }
        | OpSig::QuantisedEmbed { .. }
        | OpSig::AttnPrefill { .. }
        | OpSig::AttnDecode { .. }
        | OpSig::AttnMerge { .. } => unreachable!("bounded over whole rows"),
    }
}

/// A term of the dot product is rounded once as a product and at most once by each of the k + 1 sums
/// (with bias and old output): gamma(k + 2), without any assumption on order or fusing. That covers
/// dot instructions that round a pair's products one by one and flush subnormals (VDPBF16PS).
fn gemm(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::Gemm { n, k, out, bias, accumulate, .. } = *sig else { unreachable!("called for gemm") };
    let (n, k) = (n as usize, k as usize);
    let bound = |(i, &want): (usize, &f64)| {
        let (x, weight) = (&before[0][i / n * k..][..k], &before[1][i % n * k..][..k]);
        let mut terms: f64 = x.iter().zip(weight).map(|(x, w)| (x * w).abs()).sum();
        if bias {
            terms += before[2][i % n].abs();
        }
        if accumulate {
            terms += before[before.len() - 1][i].abs();
        }
        rounded(out, want, gamma(k + 2) * terms + (k + 2) as f64 * FLUSH)
    };
    want.iter().enumerate().map(bound).collect()
}

/// As `gemm` or `quantised_gemm`, with the matrix of each row's expert.
fn grouped_gemm(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::GroupedGemm { grouped, n, k, x: dtype, weight, out, bias } = *sig else {
        unreachable!("called for grouped_gemm")
    };
    let (n, k) = (n as usize, k as usize);
    let of_choice = experts::of_choices(sig, before).expect("the oracle ran on these operands");
    let at = 1 + weight.part_count();
    if weight.quantised().is_some() {
        let weights = quantised::decoded(sig, before);
        let bound = |(i, &want): (usize, &f64)| {
            let (choice, feature) = (i / n, i % n);
            let Some(expert) = of_choice[choice] else { return 0.0 };
            let line = expert * n + feature;
            let x = &before[0][choice / grouped.fan as usize * k..][..k];
            let added = if bias { before[at][line] } else { 0.0 };
            rounded(out, want, quantised_error(dtype, x, &weights[line * k..][..k], added.abs()))
        };
        return want.iter().enumerate().map(bound).collect();
    }
    let bound = |(i, &want): (usize, &f64)| {
        let (choice, feature) = (i / n, i % n);
        // rows of other experts stay unchanged
        let Some(expert) = of_choice[choice] else { return 0.0 };
        let line = expert * n + feature;
        let x = &before[0][choice / grouped.fan as usize * k..][..k];
        let mut terms: f64 = x.iter().zip(&before[1][line * k..][..k]).map(|(x, w)| (x * w).abs()).sum();
        if bias {
            terms += before[2][line].abs();
        }
        rounded(out, want, gamma(k + 1) * terms + (k + 1) as f64 * FLUSH)
    };
    want.iter().enumerate().map(bound).collect()
}

/// Roundings between a code and its weight: of an integer scale by its factor, of the outer scale, of the
/// product, of the minimum by its factor and of the difference, or of a scaled zero point.
const DECODING: usize = 5;

/// As for [`gemm`], but a term is as large as what a weight is the difference of: a device may sum codes and
/// zero points apart. With activations of 16 bits it may round a weight to their dtype, and below f16's range
/// lose half of its least subnormal.
fn quantised_gemm(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::QuantisedGemm { n, k, x: dtype, out, bias, accumulate, .. } = *sig else {
        unreachable!("called for quantised_gemm")
    };
    let (n, k, last) = (n as usize, k as usize, before.len() - 1);
    let weights = quantised::decoded(sig, before);
    let bound = |(i, &want): (usize, &f64)| {
        let (x, weight) = (&before[0][i / n * k..][..k], &weights[i % n * k..][..k]);
        let mut added = 0.0;
        if bias {
            added += before[last - 1][i % n].abs();
        }
        if accumulate {
            added += before[last][i].abs();
        }
        rounded(out, want, quantised_error(dtype, x, weight, added))
    };
    want.iter().enumerate().map(bound).collect()
}

/// The error of a row's product with weights, to which something of a size is added.
fn quantised_error(dtype: DType, x: &[f64], weight: &[(f64, f64)], added: f64) -> f64 {
    let (narrow, tiny) = match dtype {
        DType::F32 => (0.0, 0.0),
        DType::F16 => (dtype.unit_roundoff(), f64::powi(2.0, -25)),
        _ => (dtype.unit_roundoff(), 0.0),
    };
    let (k, mut terms, mut rounding) = (x.len(), added, 0.0);
    for (x, (value, magnitude)) in x.iter().zip(weight) {
        terms += (x * magnitude).abs();
        rounding += x.abs() * (value.abs() * narrow + tiny);
    }
    gamma(k + 2 + DECODING) * terms + rounding * (1.0 + gamma(k)) + (k + 2) as f64 * FLUSH
}

/// Which experts are chosen is exact. A score is a quotient: of exponentials of differences to a maximum,
/// whose arguments err by a difference and a change to base 2, or of 1 and 1 + exp. The errors of a token's
/// scores add up in the sum that normalises them, weighted by the scores.
fn route(sig: &OpSig, before: &[Vec<f64>], want: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let OpSig::Route { bias, routing, .. } = *sig else { unreachable!("called for route") };
    let at = 1 + usize::from(bias);
    let (experts, active) = (routing.experts as usize, routing.active as usize);
    let (chosen, weights) = (&want[at], &want[at + 1]);
    let mut errors = Vec::with_capacity(weights.len());
    for (token, logits) in before[0].chunks(experts).enumerate() {
        let scores = experts::scores(&routing, logits);
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let relative = |expert: usize| match routing.scoring {
            Scoring::Softmax => {
                let of = |logit: f64| EXP + 4.0 * U * (logit - max).abs();
                let of_sum: f64 = logits.iter().zip(&scores).map(|(&logit, score)| score * of(logit)).sum();
                of(logits[expert]) + of_sum + gamma(experts) + DIVIDE
            }
            Scoring::Sigmoid => EXP + 2.0 * U * logits[expert].abs() + DIVIDE + gamma(2),
        };
        let own: Vec<usize> =
            chosen[token * active..][..active].iter().map(|&expert| to_usize(expert)).collect();
        let total: f64 = own.iter().map(|&expert| scores[expert]).sum();
        let of_total: f64 = own.iter().map(|&expert| scores[expert] * relative(expert)).sum();
        for (i, &expert) in own.iter().enumerate() {
            let weight = weights[token * active + i].abs();
            let (mut error, mut lost) = (relative(expert) + U, (experts + 2) as f64 * FLUSH);
            if routing.normalise {
                error += of_total / total + gamma(active) + DIVIDE;
                lost /= total;
            }
            errors.push(rounded(
                DType::F32,
                weight,
                weight * error + lost * f64::from(routing.scale.0.abs()),
            ));
        }
    }
    vec![vec![0.0; chosen.len()], errors, vec![0.0; want[at + 2].len()], vec![0.0; want[at + 3].len()]]
}

fn quantised_embed(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::QuantisedEmbed { hidden, out, .. } = *sig else { unreachable!("called for quantised_embed") };
    let weights = quantised::decoded(sig, before);
    let hidden = hidden as usize;
    let bound = |(i, &want): (usize, &f64)| {
        let (_, magnitude) = weights[to_usize(before[0][i / hidden]) * hidden + i % hidden];
        rounded(out, want, gamma(DECODING) * magnitude + FLUSH)
    };
    want.iter().enumerate().map(bound).collect()
}

/// Error bounds of one head's un-normalised attention, with the exact sum.
struct AttentionBounds {
    max: f64,
    max_error: f64,
    sum: f64,
    sum_error: f64,
    acc_error: Vec<f64>, // [value_dim]
    acc_size: Vec<f64>,  // [value_dim] of sums of magnitudes
}

/// Score j errs by `delta_j = gamma(head_dim + 3) * scale * sum |q||k|` (products, sums, the scale and
/// its product). So the reported maximum errs by the largest delta, and the weight
/// `p_j = exp(s_j - max)` by the factor `exp(delta_j + delta_max)`, by the rounding of its argument
/// (4u (|s_j| + |max|): a difference and a change to base 2) and by exp itself.
/// Adding n terms rounds each at most n times; a running maximum may grow at each key and rescale the
/// sums by an exp and a product, whose argument errors telescope to another 4u (|s_j| + |max|).
/// Devices that feed matrix units may round the weights to the activations' dtype: `u_x * p_j`, and
/// below f16's range half of its least subnormal.
fn attention(sig: &OpSig, view: oracle::HeadView<'_>, x: DType) -> AttentionBounds {
    let oracle::HeadView { q, keys } = view;
    let (scale, value_dim) = oracle::scale_and_values(sig);
    let n = keys.len();
    let mut scores = Vec::with_capacity(n); // (score, delta)
    for (k, _) in &keys {
        let (mut score, mut terms) = (0.0, 0.0);
        for (q, k) in q.iter().zip(*k) {
            score += q * k;
            terms += (q * k).abs();
        }
        let (score, delta) = (score * scale, gamma(q.len() + 3) * scale * terms + FLUSH);
        scores.push(match oracle::cap_of(sig) {
            // no slope of tanh is above 1
            Some(cap) => (oracle::capped(Some(cap), score), delta + cap_error(cap, score)),
            None => (score, delta),
        });
    }
    let max = scores.iter().fold(f64::NEG_INFINITY, |max, &(score, _)| max.max(score));
    let delta_max = scores.iter().fold(0.0f64, |max, &(_, delta)| max.max(delta));
    let (u_x, tiny_x) = match x {
        DType::F32 => (0.0, 0.0),
        DType::F16 => (x.unit_roundoff(), f64::powi(2.0, -25)),
        _ => (x.unit_roundoff(), 0.0),
    };
    let summing = gamma(2 * n + 2) + n as f64 * EXP;
    let [acc_error, acc_size] = [(); 2].map(|()| vec![0.0; value_dim]);
    let mut out =
        AttentionBounds { max, max_error: delta_max, sum: 0.0, sum_error: 0.0, acc_error, acc_size };
    for (&(score, delta), (_, v)) in scores.iter().zip(&keys) {
        let p = (score - max).exp();
        let argument = delta + delta_max + 8.0 * U * (score.abs() + max.abs());
        let p_error = p * ((argument.exp_m1() + EXP + u_x) * (1.0 + summing) + summing) + tiny_x + FLUSH;
        out.sum += p;
        out.sum_error += p_error;
        for ((error, size), v) in out.acc_error.iter_mut().zip(&mut out.acc_size).zip(*v) {
            *error += p_error * v.abs() + FLUSH;
            *size += p * v.abs();
        }
    }
    out
}

/// The error of a soft cap, computed as `cap (1 - r)` with `r = 2 / (1 + e)` and `e = exp(2 x / cap)`. Its
/// argument is rounded by a division and two products; of the error of e, `r e / (1 + e)` remains in r.
fn cap_error(cap: f64, x: f64) -> f64 {
    let z = 2.0 * x / cap;
    let r = 2.0 / (1.0 + z.exp());
    let kept = 1.0 / (1.0 + (-z).exp());
    let of_e = EXP + (DIVIDE + 2.0 * U) * z.abs().min(200.0);
    cap * (r * (kept * of_e + U + DIVIDE) + 2.0 * U)
}

fn decode(sig: &OpSig, before: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let OpSig::AttnDecode { heads, x, .. } = *sig else { unreachable!("called for attn_decode") };
    let (mut acc, mut stat) = (Vec::new(), Vec::new());
    for query in oracle::queries(sig, before).expect("the oracle ran on these operands") {
        for head in 0..heads as usize {
            let bound = attention(sig, oracle::head_view(sig, before, &query, head), x);
            acc.extend(bound.acc_error);
            stat.extend([bound.max_error, bound.sum_error]);
        }
    }
    vec![acc, stat]
}

/// Bounds a quotient of inexact numbers: `(acc_error + |out| sum_error) / (sum - sum_error)`, plus the error
/// of the division. A sink's weight has the error of a key with an exact score, and values are rescaled once
/// more to the common maximum.
fn prefill(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::AttnPrefill { heads, x, kv, .. } = *sig else { unreachable!("called for attn_prefill") };
    let (heads, dim) = (heads as usize, kv.value_dim() as usize);
    let mut bounds = vec![0.0; want.len()]; // [tokens, heads, value_dim]
    for query in oracle::queries(sig, before).expect("the oracle ran on these operands") {
        for head in 0..heads {
            let part = attention(sig, oracle::head_view(sig, before, &query, head), x);
            let at = (query.row * heads + head) * dim;
            let sink = oracle::sink(sig, before, head);
            let (max, sum) = oracle::with_sink(part.max, part.sum, sink);
            let keep = oracle::share(part.max, max);
            let (mut rescaled, mut sum_error) = (0.0, part.sum_error);
            if sink > f64::NEG_INFINITY {
                let argument = part.max_error + 8.0 * U * (sink.abs() + part.max.abs());
                let relative = argument.exp_m1() + EXP + gamma(3);
                rescaled = keep * relative + FLUSH;
                let of_sink = oracle::share(sink, max) * relative + FLUSH;
                sum_error = keep * sum_error + part.sum * rescaled + of_sink;
            }
            for d in 0..dim {
                let out = want[at + d];
                let acc_error = keep * part.acc_error[d] + part.acc_size[d] * rescaled;
                let error = (acc_error + out.abs() * sum_error) / (sum - sum_error);
                bounds[at + d] = rounded(x, out, error + (DIVIDE + U) * out.abs());
            }
        }
    }
    bounds
}

/// Like `attention`, with the parts as keys: a share errs by exp and by its argument's rounding, a
/// product and at most `parts` sums follow; then the quotient.
fn merge(sig: &OpSig, before: &[Vec<f64>], want: &[f64]) -> Vec<f64> {
    let OpSig::AttnMerge { parts, rows, head_dim, out, .. } = *sig else {
        unreachable!("called for attn_merge")
    };
    let (parts, rows, dim) = (parts as usize, rows as usize, head_dim as usize);
    let (acc, stat) = (&before[0], &before[1]);
    let bound = |(i, &want): (usize, &f64)| {
        let (r, d) = (i / dim, i % dim);
        let (max, sum) = oracle::merged_stat(sig, before, r);
        if sum == 0.0 {
            return 0.0;
        }
        let (mut acc_error, mut sum_error) = (0.0, 0.0);
        for part in (0..parts).map(|p| p * rows + r) {
            let share = oracle::share(stat[part * 2], max);
            if share == 0.0 {
                continue;
            }
            let relative = EXP + 4.0 * U * (stat[part * 2].abs() + max.abs()) + gamma(parts + 1);
            acc_error += (share * relative + FLUSH) * acc[part * dim + d].abs() + FLUSH;
            sum_error += (share * relative + FLUSH) * stat[part * 2 + 1].abs();
        }
        let sink = oracle::sink(sig, before, r);
        if sink > f64::NEG_INFINITY {
            let weight = oracle::share(sink, max);
            sum_error += weight * (EXP + 4.0 * U * (sink.abs() + max.abs()) + gamma(parts + 1)) + FLUSH;
        }
        let error = (acc_error + want.abs() * sum_error) / (sum - sum_error);
        rounded(out, want, error + (DIVIDE + U) * want.abs())
    };
    want.iter().enumerate().map(bound).collect()
}
