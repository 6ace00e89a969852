//! The oracle against hand-made results and identities; the bounds against arithmetic that is good
//! enough and arithmetic that is not.

use mixfleet_hal::random::Stream;
use mixfleet_hal::sample::{LOG2_E, NO_TOKEN, Parameters, fraction, weight};
use mixfleet_hal::{DType, KvShape, OpSig, Scalar};
use mixfleet_hwtests::{bounds::bounds, oracle};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use DType::{Bf16, F32};

fn run(sig: OpSig, operands: &[&[f64]]) -> Vec<Vec<f64>> {
    let mut operands: Vec<Vec<f64>> = operands.iter().map(|o| o.to_vec()).collect();
    oracle::run(&sig, &mut operands).unwrap();
    operands
}

fn runner() -> TestRunner {
    TestRunner::new(ProptestConfig::with_cases(64))
}

#[test]
fn small_results_by_hand() {
    let gemm = OpSig::Gemm { m: 2, n: 1, k: 2, x: F32, weight: F32, out: F32, bias: true, accumulate: true };
    let out = run(gemm, &[&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0], &[10.0], &[100.0, 200.0]]);
    assert_eq!(out[3], [127.0, 249.0]);
    let norm = OpSig::RmsNorm { rows: 1, cols: 2, eps: Scalar(1.5), x: F32, weight: F32, out: F32 };
    assert_eq!(run(norm, &[&[1.0, 2.0], &[3.0, 5.0], &[0.0; 2]])[2], [1.5, 5.0]);
    let rope = OpSig::Rope { tokens: 1, heads: 1, head_dim: 4, x: F32, part: None };
    let quarter_turn = [0.0, 1.0, 1.0, 0.0]; // cos, cos, sin, sin
    assert_eq!(run(rope, &[&[1.0, 2.0, 3.0, 4.0], &quarter_turn])[0], [-3.0, 2.0, 1.0, 4.0]);
    let silu = OpSig::SiluMul { elements: 2, x: F32 };
    assert_eq!(run(silu, &[&[0.0, -1e4], &[3.0, 3.0], &[1.0; 2]])[2], [0.0, 0.0]);
}

/// What `Sample` does to one row: the result's words, the logits after penalties, the list of best tokens.
fn drawn(
    logits: &[f64],
    parameters: Parameters,
    history: &[(u32, f32)],
    tops: u32,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let sig = OpSig::Sample { rows: 1, cols: logits.len() as u32, history: history.len() as u32, tops };
    let words: [u32; 8] = bytemuck::cast(parameters);
    let words = words.map(f64::from);
    let entries: Vec<f64> =
        history.iter().flat_map(|&(id, less)| [f64::from(id), f64::from(less.to_bits())]).collect();
    let starts = [0.0, history.len() as f64];
    let (out, top) = ([0.0; 4], vec![0.0; 2 * tops as usize]);
    let mut operands: Vec<&[f64]> = vec![logits, &words];
    if !history.is_empty() {
        operands.extend([&starts[..], &entries]);
    }
    operands.push(&out);
    if tops > 0 {
        operands.push(&top);
    }
    let mut done = run(sig, &operands);
    let top = if tops > 0 { done.pop().unwrap() } else { Vec::new() };
    (done.pop().unwrap(), done.swap_remove(0), top)
}

#[test]
fn draws_by_hand() {
    let bits = |v: f32| f64::from(v.to_bits());
    let nothing = f64::from(NO_TOKEN);
    // weights 1, 1/2, 1/2, 1/4, 0 of the best, by id
    let logits = [0.0, -1.0, -1.0, -2.0, f64::NEG_INFINITY];
    let plain = Parameters { scale: 1.0, ..Parameters::GREEDY };
    let draw = |parameters: Parameters| drawn(&logits, parameters, &[], 0).0[0];
    assert_eq!(draw(Parameters::GREEDY), 0.0);
    let at = |share: f64, parameters: Parameters| draw(Parameters { uniform: fraction(share), ..parameters });
    assert_eq!(
        [0.0, 0.44, 0.45, 0.66, 0.67, 0.88, 0.89, 1.0].map(|u| at(u, plain)),
        [0., 0., 1., 1., 2., 2., 3., 3.]
    );
    // the lower id of two equal ones is kept
    assert_eq!(at(1.0, Parameters { top_k: 2, ..plain }), 1.0);
    assert_eq!(at(1.0, Parameters { top_k: 99, ..plain }), 3.0);
    assert_eq!(at(1.0, Parameters { top_p: fraction(0.44), ..plain }), 0.0);
    assert_eq!(at(1.0, Parameters { top_p: fraction(0.45), ..plain }), 1.0);
    assert_eq!(at(1.0, Parameters { top_p: 0, ..plain }), 0.0);
    assert_eq!(at(1.0, Parameters { min_p: 0.5, ..plain }), 2.0);
    assert_eq!(at(1.0, Parameters { min_p: 1.0, ..plain }), 0.0);

    // penalties: a factor by sign, then a difference; an id without a logit is passed over
    let penalised =
        Parameters { repetition: 2.0, repetition_inverse: 0.5, logprobs: 1, ..Parameters::GREEDY };
    let (out, logits, top) = drawn(&[4.0, 3.0, -1.0], penalised, &[(0, 0.5), (2, 0.0), (3, 1.0)], 4);
    assert_eq!(logits, [1.5, 3.0, -2.0]);
    let sum = weight(0.0, LOG2_E) + weight(-1.0, LOG2_E) + weight(-5.0, LOG2_E);
    assert_eq!(out, [1.0, bits(-1.0), (sum & 0xFFFF_FFFF) as f64, (sum >> 32) as f64]);
    let below = f32::NEG_INFINITY;
    assert_eq!(top, [0.0, 0.0, 1.0, bits(-1.0), 2.0, bits(-5.0), nothing, bits(below)]);
    assert_eq!(drawn(&[4.0], Parameters::GREEDY, &[], 1).2, [nothing, bits(below)], "not asked for");

    // a NaN ends the row, and so does the lack of any token
    let wrong = [1.0, f64::NAN, f64::INFINITY, 0.0];
    assert_eq!(drawn(&wrong, penalised, &[], 1).0, [1.0, bits(f32::NAN), 0.0, 0.0]);
    let none = [f64::NEG_INFINITY; 3];
    assert_eq!(drawn(&none, penalised, &[], 0).0, [nothing, bits(below), 0.0, 0.0]);
    // the zeros are equal
    assert_eq!(drawn(&[-0.0, 0.0], plain, &[], 0).0[..2], [0.0, 0.0]);
}

#[test]
fn indices_that_name_nothing_are_errors() {
    let embed = OpSig::Embed { tokens: 1, vocab: 2, hidden: 1, table: F32, out: F32 };
    let mut operands = vec![vec![2.0], vec![1.0, 2.0], vec![0.0]];
    assert!(oracle::run(&embed, &mut operands).unwrap_err().contains("index 2 is not below 2"));
}

/// Two queries at positions 1 and 2 of a sequence in pages 1 and 0; window 2; two heads on one KV head.
#[test]
fn prefill_sees_pages_window_and_groups() {
    let sig = OpSig::AttnPrefill {
        tokens: 2,
        sequences: 1,
        pairs: 4,
        kv_tokens: 3,
        heads: 2,
        pages_max: 2,
        window: Some(2),
        sinks: false,
        x: F32,
        kv: KvShape { kv_heads: 1, head_dim: 1, page_tokens: 2, dtype: F32, latent: None },
        cap: None,
    };
    // all keys 0: each output is the mean of the two values seen; token t is at slot [2, 3, 0][t]
    let v_pool = [4.0, f64::NAN, 1.0, 2.0];
    let k_pool = [0.0, f64::NAN, 0.0, 0.0];
    let q = [1.0; 4];
    let out = run(sig, &[&q, &[0.0, 2.0], &[3.0], &[1.0, 0.0], &k_pool, &v_pool, &[0.0; 4]]);
    assert_eq!(out[6], [1.5, 1.5, 3.0, 3.0]);
}

#[test]
fn decode_over_any_cut_merges_to_prefill() {
    let property = |(context, cut, seed): (u32, u32, u64)| {
        let (heads, kv_heads, dim, page_tokens) = (4u32, 2u32, 8u32, 3u32);
        let cut = cut % (context + 1);
        let pages_max = context.div_ceil(page_tokens);
        let mut stream = Stream::new(seed);
        let mut normal = |n: u32| -> Vec<f64> { (0..n).map(|_| stream.next_normal() * 2.0).collect() };
        let q = normal(heads * dim);
        let pool = pages_max * page_tokens * kv_heads * dim;
        let (k, v) = (normal(pool), normal(pool));
        let pages: Vec<f64> = (0..pages_max).rev().map(f64::from).collect();
        let prefill = OpSig::AttnPrefill {
            tokens: 1,
            sequences: 1,
            pairs: u64::from(context),
            kv_tokens: u64::from(context),
            heads,
            pages_max,
            window: None,
            sinks: false,
            x: F32,
            kv: KvShape { kv_heads, head_dim: dim, page_tokens, dtype: F32, latent: None },
            cap: None,
        };
        let out = vec![0.0; q.len()];
        let whole = run(prefill, &[&q, &[0.0, 1.0], &[f64::from(context)], &pages, &k, &v, &out]);
        let part = |first: u32, end: u32| {
            let sig = OpSig::AttnDecode {
                sequences: 1,
                kv_tokens: u64::from(end - first),
                heads,
                pages_max,
                x: F32,
                kv: KvShape { kv_heads, head_dim: dim, page_tokens, dtype: F32, latent: None },
                cap: None,
            };
            run(sig, &[&q, &[f64::from(first), f64::from(end)], &pages, &k, &v, &out, &[0.0; 8]])
        };
        let (a, b) = (part(0, cut), part(cut, context));
        let merge = OpSig::AttnMerge { parts: 2, rows: heads, head_dim: dim, sinks: 0, out: F32 };
        let merged = run(merge, &[&[&a[5][..], &b[5]].concat(), &[&a[6][..], &b[6]].concat(), &out]);
        for (merged, whole) in merged[2].iter().zip(&whole[6]) {
            prop_assert!((merged - whole).abs() < 1e-12, "{merged} {whole}");
        }
        Ok(())
    };
    runner().run(&(1u32..40, 0u32..40, any::<u64>()), property).unwrap();
}

/// The share of its bound by which a Gemm errs that rounds its running sum with `round`.
fn gemm_ratio(k: u32, seed: u64, round: fn(f64) -> f64) -> f64 {
    let sig = OpSig::Gemm { m: 1, n: 1, k, x: F32, weight: Bf16, out: F32, bias: false, accumulate: false };
    let mut stream = Stream::new(seed);
    let mut values = |dtype: DType| -> Vec<f64> {
        let mut bytes = Vec::new();
        (0..k).for_each(|_| dtype.encode(stream.next_normal(), &mut bytes));
        dtype.decode(&bytes)
    };
    let before = vec![values(F32), values(Bf16), vec![0.0]];
    let mut want = before.clone();
    oracle::run(&sig, &mut want).unwrap();
    let got = before[0].iter().zip(&before[1]).fold(0.0, |sum, (x, w)| round(sum + round(x * w)));
    let bound = bounds(&sig, &before, &want)[2].as_ref().unwrap()[0];
    (got - want[2][0]).abs() / bound
}

#[test]
fn the_gemm_bound_admits_f32_and_refuses_bf16_accumulation() {
    let as_f32 = |v: f64| f64::from(v as f32);
    let as_bf16 = |v: f64| {
        let mut bytes = Vec::new();
        Bf16.encode(v, &mut bytes);
        Bf16.decode(&bytes)[0]
    };
    let property = |(k, seed): (u32, u64)| {
        prop_assert!(gemm_ratio(k, seed, as_f32) <= 1.0);
        Ok(())
    };
    runner().run(&(1u32..500, any::<u64>()), property).unwrap();
    let refused = (0..50).filter(|&seed| gemm_ratio(200, seed, as_bf16) > 1.0).count();
    assert!(refused >= 48, "{refused} of 50");
}
