//! Attention in f64.

use super::{Rig, f64s};
use mixfleet_hal::{Cmd, DType, KvShape, OpSig};

/// Shape and dtypes of a case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub page_tokens: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub x: DType,
    pub kv: DType,
}

/// Pools filled through `KvWrite`, and their content.
struct Filled {
    pools: [Vec<u8>; 2],
    table: Vec<u8>,
    pages_max: u32,
    /// `[sequences][tokens * kv_heads * head_dim]`
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
}

/// Gives each sequence `lengths[i]` tokens on shuffled pages of a pool whose other slots hold NaN.
fn fill(rig: &Rig, case: &Case, lengths: &[u32]) -> Filled {
    let Case { page_tokens, kv_heads, head_dim, kv, .. } = *case;
    let pages_max = lengths.iter().map(|l| l.div_ceil(page_tokens)).max().unwrap().max(1);
    let count = pages_max * lengths.len() as u32;
    let mut free: Vec<u32> = (0..count + 1).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, rig.below(i as u64 + 1) as usize);
    }
    let table: Vec<u32> = free[..count as usize].to_vec();
    let elements = (count + 1) * page_tokens * kv_heads * head_dim;
    let mut nan = Vec::new();
    for _ in 0..elements {
        kv.encode(f64::NAN, &mut nan);
    }
    let mut pools = [nan.clone(), nan];
    let (mut all_k, mut all_v) = (Vec::new(), Vec::new());
    for (i, &length) in lengths.iter().enumerate() {
        let row = &table[i * pages_max as usize..];
        let slots: Vec<u32> =
            (0..length).map(|t| row[(t / page_tokens) as usize] * page_tokens + t % page_tokens).collect();
        let (k, v) =
            (rig.random(kv, length * kv_heads * head_dim), rig.random(kv, length * kv_heads * head_dim));
        all_k.push(f64s(kv, &k));
        all_v.push(f64s(kv, &v));
        let sig = OpSig::KvWrite {
            tokens: length,
            x: kv,
            kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
        };
        let [k_pool, v_pool] = pools;
        let mut after = rig.run(&sig, &[k, v, rig.u32s(&slots), k_pool, v_pool]).unwrap();
        let v_pool = after.pop().unwrap();
        pools = [after.pop().unwrap(), v_pool];
    }
    Filled { pools, table: rig.u32s(&table), pages_max, k: all_k, v: all_v }
}

/// Maximum, sum and un-normalised output of one query over keys `a..b`, with the bounds that the scores'
/// error gives: each score errs by `delta` at most, so each weight by a factor of exp(2 delta).
struct Exact {
    max: f64,
    sum: f64,
    acc: Vec<f64>,
    magnitude: Vec<f64>,
    delta: f64,
}

fn attend(case: &Case, q: &[f64], k: &[f64], v: &[f64], kv_head: usize, (a, b): (usize, usize)) -> Exact {
    let (dim, stride) = (case.head_dim as usize, (case.kv_heads * case.head_dim) as usize);
    let scale = 1.0 / (dim as f64).sqrt();
    let row = |m: &[f64], t: usize| m[t * stride + kv_head * dim..][..dim].to_vec();
    let mut delta: f64 = 0.0;
    let scores: Vec<f64> = (a..b)
        .map(|t| {
            let products: Vec<f64> = q.iter().zip(row(k, t)).map(|(x, y)| x * y * scale).collect();
            delta = delta.max(
                super::bound::sum(&products) + 4.0 * super::bound::F32 * products.iter().sum::<f64>().abs(),
            );
            products.iter().sum()
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut acc, mut magnitude) = (vec![0.0; dim], vec![0.0; dim]);
    let mut sum = 0.0;
    for (t, score) in (a..b).zip(&scores) {
        let p = (score - max).exp();
        sum += p;
        for (d, value) in row(v, t).into_iter().enumerate() {
            acc[d] += p * value;
            magnitude[d] += p * value.abs();
        }
    }
    // subtraction of the maximum, the exponential and its rescalings
    delta += (max.abs().min(1e3) + 16.0) * super::bound::F32;
    Exact { max, sum, acc, magnitude, delta: 2.0 * delta + 2.0 * ((b - a) as f64 + 4.0) * super::bound::F32 }
}

/// Checks `AttnPrefill` for sequences of (queries, context).
pub fn prefill(rig: &Rig, case: &Case, sequences: &[(u32, u32)], window: Option<u32>) {
    let Case { page_tokens, heads, kv_heads, head_dim, x, kv } = *case;
    let filled = fill(rig, case, &sequences.iter().map(|s| s.1).collect::<Vec<_>>());
    let tokens: u32 = sequences.iter().map(|s| s.0).sum();
    let mut start = vec![0];
    for (queries, _) in sequences {
        start.push(start.last().unwrap() + queries);
    }
    let contexts: Vec<u32> = sequences.iter().map(|s| s.1).collect();
    let sig = OpSig::AttnPrefill {
        tokens,
        sequences: sequences.len() as u32,
        pairs: 1,
        kv_tokens: 1,
        heads,
        pages_max: filled.pages_max,
        window,
        sinks: false,
        x,
        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
        cap: None,
    };
    let q = rig.random(x, tokens * heads * head_dim);
    let [k_pool, v_pool] = filled.pools.clone();
    let inputs = [
        q.clone(),
        rig.u32s(&start),
        rig.u32s(&contexts),
        filled.table.clone(),
        k_pool,
        v_pool,
        vec![0; q.len()],
    ];
    let result = rig.run(&sig, &inputs).unwrap();
    assert_eq!(result[6], rig.run(&sig, &inputs).unwrap()[6], "{}: {sig:?} twice", rig.isa);
    // weights may be rounded to bf16 before they meet the values
    let weight = if x == DType::Bf16 { x.unit_roundoff() } else { 0.0 };
    let (q, got) = (f64s(x, &q), f64s(x, &result[6]));
    let (heads, dim) = (heads as usize, head_dim as usize);
    for (s, &(queries, context)) in sequences.iter().enumerate() {
        for i in 0..queries as usize {
            let end = (context - queries) as usize + i + 1;
            let first = window.map_or(0, |w| end.saturating_sub(w as usize));
            for head in 0..heads {
                let at = ((start[s] as usize + i) * heads + head) * dim;
                let kv_head = head / (heads / kv_heads as usize);
                let exact = attend(case, &q[at..at + dim], &filled.k[s], &filled.v[s], kv_head, (first, end));
                for d in 0..dim {
                    let value = exact.acc[d] / exact.sum;
                    let limit = (2.0 * exact.delta + weight) * exact.magnitude[d] / exact.sum
                        + super::bound::round(x, value);
                    let error = (got[at + d] - value).abs();
                    assert!(
                        error <= limit,
                        "{}: {sig:?} sequence {s} query {i} head {head} dim {d}: {} not {value} +- {limit}",
                        rig.isa,
                        got[at + d]
                    );
                }
            }
        }
    }
}

/// Checks `AttnDecode` for sequences of (first, end), and `AttnMerge` over three parts of them.
pub fn decode(rig: &Rig, case: &Case, ranges: &[(u32, u32)]) {
    let Case { heads, kv_heads, head_dim, x, .. } = *case;
    let filled = fill(rig, case, &ranges.iter().map(|r| r.1).collect::<Vec<_>>());
    let sequences = ranges.len() as u32;
    let q = rig.random(x, sequences * heads * head_dim);
    let whole = run_decode(rig, case, &filled, &q, ranges);
    assert_eq!(whole, run_decode(rig, case, &filled, &q, ranges), "{}: {case:?} twice", rig.isa);
    let (acc, stat) = (f64s(DType::F32, &whole.0), f64s(DType::F32, &whole.1));
    let queries = f64s(x, &q);
    let (dim, group) = (head_dim as usize, (heads / kv_heads) as usize);
    for row in 0..(sequences * heads) as usize {
        let (s, head) = (row / heads as usize, row % heads as usize);
        let range = (ranges[s].0 as usize, ranges[s].1 as usize);
        let (max, sum) = (stat[2 * row], stat[2 * row + 1]);
        let got = &acc[row * dim..][..dim];
        if range.0 == range.1 {
            assert!(
                max == f64::NEG_INFINITY && sum == 0.0 && got.iter().all(|&a| a == 0.0),
                "{}: empty range",
                rig.isa
            );
            continue;
        }
        let exact =
            attend(case, &queries[row * dim..][..dim], &filled.k[s], &filled.v[s], head / group, range);
        assert!((max - exact.max).abs() <= exact.delta, "{}: {case:?} max {max}, not {}", rig.isa, exact.max);
        assert!(
            (sum - exact.sum).abs() <= 2.0 * exact.delta * exact.sum,
            "{}: {case:?} sum {sum}, not {}",
            rig.isa,
            exact.sum
        );
        for (d, &got) in got.iter().enumerate() {
            let limit = 2.0 * exact.delta * exact.magnitude[d];
            let value = exact.acc[d];
            assert!((got - value).abs() <= limit, "{}: {case:?} acc {got}, not {value}", rig.isa);
        }
    }
    recombines(rig, case, &filled, &q, ranges, &whole);
}

/// `acc` and `stat`.
type Partial = (Vec<u8>, Vec<u8>);

fn run_decode(rig: &Rig, case: &Case, filled: &Filled, q: &[u8], ranges: &[(u32, u32)]) -> Partial {
    let Case { page_tokens, heads, kv_heads, head_dim, x, kv } = *case;
    let sequences = ranges.len() as u32;
    let sig = OpSig::AttnDecode {
        sequences,
        kv_tokens: 1,
        heads,
        pages_max: filled.pages_max,
        x,
        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
        cap: None,
    };
    let flat: Vec<u32> = ranges.iter().flat_map(|r| [r.0, r.1]).collect();
    let rows = (sequences * heads) as usize;
    let [k_pool, v_pool] = filled.pools.clone();
    let (acc, stat) = (vec![0xFF; rows * head_dim as usize * 4], vec![0xFF; rows * 8]);
    let mut result = rig
        .run(&sig, &[q.to_vec(), rig.u32s(&flat), filled.table.clone(), k_pool, v_pool, acc, stat])
        .unwrap();
    let stat = result.pop().unwrap();
    (result.pop().unwrap(), stat)
}

fn recombines(rig: &Rig, case: &Case, filled: &Filled, q: &[u8], ranges: &[(u32, u32)], whole: &Partial) {
    let rows = ranges.len() as u32 * case.heads;
    let merge = |parts: &[Partial]| {
        let sig = OpSig::AttnMerge {
            parts: parts.len() as u32,
            rows,
            head_dim: case.head_dim,
            sinks: 0,
            out: DType::F32,
        };
        let (acc, stat): (Vec<_>, Vec<_>) = parts.iter().cloned().unzip();
        let out = vec![0xFF; (rows * case.head_dim * 4) as usize];
        f64s(DType::F32, &rig.run(&sig, &[acc.concat(), stat.concat(), out]).unwrap()[2])
    };
    let expected = merge(std::slice::from_ref(whole));
    let (mut cuts_a, mut cuts_b) = (Vec::new(), Vec::new());
    for &(a, b) in ranges {
        let mut cuts = [0; 2].map(|_| a + rig.below(u64::from(b - a) + 1) as u32);
        cuts.sort_unstable();
        cuts_a.push(cuts[0]);
        cuts_b.push(cuts[1]);
    }
    let part = |first: Vec<u32>, end: Vec<u32>| {
        let ranges: Vec<(u32, u32)> = first.into_iter().zip(end).collect();
        run_decode(rig, case, filled, q, &ranges)
    };
    let starts = ranges.iter().map(|r| r.0).collect();
    let ends = ranges.iter().map(|r| r.1).collect();
    let parts = [part(starts, cuts_a.clone()), part(cuts_a, cuts_b.clone()), part(cuts_b, ends)];
    let dim = case.head_dim as usize;
    for (at, (a, b)) in expected.iter().zip(merge(&parts)).enumerate() {
        // relative to the row: an element near zero is a difference of large terms
        let size = expected[at / dim * dim..][..dim].iter().fold(0f64, |m, v| m.max(v.abs()));
        assert!((a - b).abs() <= 1e-5 * size, "{}: {case:?} merged {b}, whole {a}", rig.isa);
    }
}

/// An `AttnDecode` that is valid but for its range or page, for the error tests.
pub fn bad_decode(rig: &Rig, range: [u32; 2], page: u32) -> Cmd {
    let sig = OpSig::AttnDecode {
        sequences: 1,
        kv_tokens: 1,
        heads: 1,
        pages_max: 1,
        x: DType::F32,
        kv: KvShape { kv_heads: 1, head_dim: 16, page_tokens: 16, dtype: DType::F32, latent: None },
        cap: None,
    };
    let zeros = |o: &mixfleet_hal::Operand| match o.extent {
        mixfleet_hal::op::Extent::Exactly(n) | mixfleet_hal::op::Extent::PagesOf(n) => {
            vec![0u8; (n * o.dtype.size_bytes()) as usize]
        }
    };
    let mut slices: Vec<_> = sig.operands().iter().map(|o| rig.upload(o.dtype, &zeros(o))).collect();
    slices[1] = rig.upload(DType::U32, &rig.u32s(&range));
    slices[2] = rig.upload(DType::U32, &rig.u32s(&[page]));
    Cmd::new(sig, &slices).unwrap()
}
