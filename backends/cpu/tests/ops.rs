//! Every operation on every instruction level against f64, element by element within an a-priori bound.

use crate::common::{Rig, bound, f64s, levels, reference};
use mixfleet_hal::{DType, KvShape, OpSig, Scalar};

const FLOATS: [DType; 3] = DType::FLOATS;

#[test]
fn gemm_at_tile_edges_with_bias_and_accumulation() {
    for rig in levels("cpu") {
        for (i, &(m, n, k)) in [
            (1, 1, 1),
            (1, 65, 127),
            (1, 64, 64),
            (2, 7, 33),
            (3, 17, 5),
            (4, 8, 32),
            (7, 31, 64),
            (8, 70, 129),
            (13, 5, 31),
            (16, 33, 64),
            (49, 31, 63),
            (23, 33, 65),
            (24, 64, 31),
            (72, 97, 300),
            (61, 32, 4099),
            (0, 4, 4),
            (3, 4, 0),
            (50, 3, 0),
        ]
        .iter()
        .enumerate()
        {
            let flag = |bit: usize| (i >> bit) & 1 == 1;
            gemm(&rig, (m, n, k), [FLOATS[i % 3], FLOATS[i / 2 % 3], FLOATS[i / 3 % 3]], flag(0), flag(1));
        }
    }
}

#[test]
fn gemm_in_every_combination_of_dtypes() {
    for rig in levels("cpu") {
        for x in FLOATS {
            for weight in FLOATS {
                for out in FLOATS {
                    for m in [1, 3, 50] {
                        gemm(&rig, (m, 34, 70), [x, weight, out], m == 3, m != 1);
                    }
                }
            }
        }
    }
}

fn gemm(rig: &Rig, (m, n, k): (u32, u32, u32), [x, weight, out]: [DType; 3], bias: bool, accumulate: bool) {
    let sig = OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate };
    let mut inputs = vec![rig.random(x, m * k), rig.random(weight, n * k)];
    if bias {
        inputs.push(rig.random(weight, n));
    }
    inputs.push(rig.random(out, m * n));
    let result = rig.run(&sig, &inputs).unwrap();
    let values: Vec<Vec<f64>> = sig.operands().iter().zip(&inputs).map(|(o, b)| f64s(o.dtype, b)).collect();
    let old = &values[values.len() - 1];
    let got = f64s(out, &result[inputs.len() - 1]);
    let (n, k) = (n as usize, k as usize);
    for (at, &got) in got.iter().enumerate() {
        let (i, j) = (at / n, at % n);
        let mut terms: Vec<f64> = (0..k).map(|c| values[0][i * k + c] * values[1][j * k + c]).collect();
        terms.extend(bias.then(|| values[2][j]));
        terms.extend(accumulate.then(|| old[at]));
        let exact: f64 = terms.iter().sum();
        let limit = bound::sum(&terms) + bound::round(out, exact);
        assert!(
            (got - exact).abs() <= limit,
            "{}: {sig:?} at {i},{j}: {got}, not {exact} +- {limit}",
            rig.isa
        );
    }
}

#[test]
fn rms_norm_rope_silu_add() {
    for rig in levels("cpu") {
        for (i, &(rows, cols)) in [(1, 1), (3, 7), (2, 16), (5, 33), (300, 64), (1, 2048)].iter().enumerate()
        {
            let [x, weight, out] = [FLOATS[i % 3], FLOATS[(i + 1) % 3], FLOATS[i / 2 % 3]];
            norm(&rig, rows, cols, [x, weight, out]);
            norm(&rig, rows, cols, [x; 3]);
            rope(&rig, rows, 3, 2 * cols, x);
            for elements in [cols, rows * cols, 5000] {
                binary(&rig, u64::from(elements), x, true);
                binary(&rig, u64::from(elements), x, false);
            }
        }
    }
}

fn norm(rig: &Rig, rows: u32, cols: u32, [x, weight, out]: [DType; 3]) {
    let sig = OpSig::RmsNorm { rows, cols, eps: Scalar(1e-5), x, weight, out };
    let inputs = [rig.random(x, rows * cols), rig.random(weight, cols), rig.random(out, rows * cols)];
    let got = f64s(out, &rig.run(&sig, &inputs).unwrap()[2]);
    let (xs, ws, cols) = (f64s(x, &inputs[0]), f64s(weight, &inputs[1]), cols as usize);
    for (at, &got) in got.iter().enumerate() {
        let row = &xs[at / cols * cols..][..cols];
        let mean = row.iter().map(|v| v * v).sum::<f64>() / cols as f64;
        let exact = xs[at] / (mean + f64::from(1e-5f32)).sqrt() * ws[at % cols];
        let limit = (cols as f64 + 8.0) * bound::F32 * exact.abs() + bound::round(out, exact);
        assert!((got - exact).abs() <= limit, "{}: {sig:?} at {at}: {got}, not {exact}", rig.isa);
    }
}

fn rope(rig: &Rig, tokens: u32, heads: u32, head_dim: u32, x: DType) {
    let sig = OpSig::Rope { tokens, heads, head_dim, x, part: None };
    let inputs = [rig.random(x, tokens * heads * head_dim), rig.random(DType::F32, tokens * head_dim)];
    let got = f64s(x, &rig.run(&sig, &inputs).unwrap()[0]);
    let (xs, table) = (f64s(x, &inputs[0]), f64s(DType::F32, &inputs[1]));
    let (heads, dim) = (heads as usize, head_dim as usize);
    for (at, &got) in got.iter().enumerate() {
        let (token, d) = (at / (heads * dim), at % dim);
        let (half, i) = (dim / 2, d % (dim / 2));
        let (a, b) = (xs[at - d + i], xs[at - d + i + half]);
        let (cos, sin) = (table[token * dim + i], table[token * dim + half + i]);
        let terms = if d < half { [a * cos, -b * sin] } else { [b * cos, a * sin] };
        let exact = terms[0] + terms[1];
        let limit = bound::sum(&terms) + bound::round(x, exact);
        assert!((got - exact).abs() <= limit, "{}: {sig:?} at {at}: {got}, not {exact}", rig.isa);
    }
}

fn binary(rig: &Rig, elements: u64, x: DType, silu: bool) {
    let sig = if silu { OpSig::SiluMul { elements, x } } else { OpSig::Add { elements, x } };
    let inputs = [0; 3].map(|_| rig.random(x, elements as u32));
    let got = f64s(x, &rig.run(&sig, &inputs).unwrap()[2]);
    let (a, b) = (f64s(x, &inputs[0]), f64s(x, &inputs[1]));
    for (at, &got) in got.iter().enumerate() {
        let exact = if silu { a[at] / (1.0 + (-a[at]).exp()) * b[at] } else { a[at] + b[at] };
        let limit = 16.0 * bound::F32 * exact.abs() + bound::round(x, exact);
        assert!((got - exact).abs() <= limit, "{}: {sig:?} at {at}: {got}, not {exact}", rig.isa);
    }
}

#[test]
fn embed_copy_fill() {
    for rig in levels("cpu") {
        for (table, out) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
            let sig = OpSig::Embed { tokens: 5, vocab: 9, hidden: 37, table, out };
            let ids = rig.u32s(&[8, 0, 3, 3, 7]);
            let inputs = [ids, rig.random(table, 9 * 37), rig.random(out, 5 * 37)];
            let got = f64s(out, &rig.run(&sig, &inputs).unwrap()[2]);
            let rows = f64s(table, &inputs[1]);
            for (at, &got) in got.iter().enumerate() {
                let exact = rows[[8, 0, 3, 3, 7][at / 37] * 37 + at % 37];
                assert!((got - exact).abs() <= bound::round(out, exact), "{}: embed {table} {out}", rig.isa);
            }
        }
        for bytes in [4u64, 4096, 123_456] {
            let from = rig.random(DType::F32, bytes as u32 / 4);
            let result = rig.run(&OpSig::Copy { bytes }, &[from.clone(), vec![0; bytes as usize]]).unwrap();
            assert_eq!(result[1], from);
            let result =
                rig.run(&OpSig::Fill { bytes, word: 0xDEAD_BEEF }, &[vec![0; bytes as usize]]).unwrap();
            assert_eq!(result[0], 0xDEAD_BEEF_u32.to_le_bytes().repeat(bytes as usize / 4));
        }
    }
}

#[test]
fn kv_rows_come_back_as_they_went_in() {
    for rig in levels("cpu") {
        for (page_tokens, kv_heads, head_dim) in
            [(16, 2, 64), (32, 1, 16), (7, 3, 5), (1, 1, 1), (4, 2, 6), (3, 1, 8)]
        {
            for (x, kv) in FLOATS.into_iter().flat_map(|a| FLOATS.map(|b| (a, b))) {
                let (tokens, pages) = (5u32, 4u32);
                let row = kv_heads * head_dim;
                let last = pages * page_tokens - 1;
                let slots = rig.u32s(&[last, 0, last / 2, 1.min(last), last / 3]);
                let pool = vec![0u8; (pages * page_tokens * row) as usize * kv.size_bytes() as usize];
                let write = OpSig::KvWrite {
                    tokens,
                    x,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                };
                let inputs = [
                    rig.random(x, tokens * row),
                    rig.random(x, tokens * row),
                    slots.clone(),
                    pool.clone(),
                    pool.clone(),
                ];
                let pools = rig.run(&write, &inputs).unwrap();
                let gather = OpSig::KvGather {
                    tokens,
                    wire: DType::F32,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                };
                let wire = vec![0u8; (tokens * 2 * row * 4) as usize];
                let got =
                    rig.run(&gather, &[slots.clone(), pools[3].clone(), pools[4].clone(), wire]).unwrap();
                let rows = f64s(DType::F32, &got[3]);
                let (k, v, row) = (f64s(x, &inputs[0]), f64s(x, &inputs[1]), row as usize);
                let slots_used = f64s(DType::U32, &slots);
                for (at, &value) in rows.iter().enumerate() {
                    let (token, rest) = (at / (2 * row), at % (2 * row));
                    // of two tokens with one slot the later wins
                    let token = (0..5).rev().find(|&t| slots_used[t] == slots_used[token]).unwrap();
                    let exact = if rest < row { k[token * row + rest] } else { v[token * row + rest - row] };
                    assert!(
                        (value - exact).abs() <= bound::round(kv, exact),
                        "{}: {write:?} at {at}: {value}, not {exact}",
                        rig.isa
                    );
                }
                let scatter = OpSig::KvScatter {
                    tokens,
                    wire: DType::F32,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                };
                let again = rig.run(&scatter, &[got[3].clone(), slots, pool.clone(), pool]).unwrap();
                assert_eq!((&again[2], &again[3]), (&pools[3], &pools[4]), "{}: {scatter:?}", rig.isa);
            }
        }
    }
}

#[test]
fn prefill_attention_matches_the_reference() {
    for rig in levels("cpu") {
        for (page_tokens, heads, kv_heads, head_dim) in
            [(16, 4, 2, 16), (32, 8, 1, 64), (7, 3, 3, 5), (80, 5, 1, 48), (16, 14, 1, 32), (2, 2, 2, 8)]
        {
            for (x, kv) in [
                (DType::F32, DType::F32),
                (DType::Bf16, DType::Bf16),
                (DType::F32, DType::Bf16),
                (DType::F16, DType::F16),
                (DType::Bf16, DType::F32),
            ] {
                for window in [None, Some(1), Some(17)] {
                    let case = reference::Case { page_tokens, heads, kv_heads, head_dim, x, kv };
                    reference::prefill(&rig, &case, &[(1, 1), (3, 16), (20, 37), (0, 5), (5, 300)], window);
                }
            }
        }
    }
}

#[test]
fn decode_attention_matches_the_reference_and_recombines() {
    for rig in levels("cpu") {
        for (page_tokens, heads, kv_heads, head_dim) in
            [(16, 4, 2, 16), (32, 8, 1, 64), (7, 3, 3, 5), (48, 13, 1, 32)]
        {
            for (x, kv) in [
                (DType::F32, DType::F32),
                (DType::Bf16, DType::Bf16),
                (DType::F16, DType::F16),
                (DType::F32, DType::Bf16),
            ] {
                let case = reference::Case { page_tokens, heads, kv_heads, head_dim, x, kv };
                reference::decode(&rig, &case, &[(0, 0), (0, 1), (5, 16), (15, 33), (0, 700), (100, 1300)]);
            }
        }
    }
}
