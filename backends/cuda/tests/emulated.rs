//! The conformance suite on the CUDA kernels, run on the CPU.

use crate::emulator::EmulatedDevice;
use crate::fused::Scene;
use mixfleet_hal::{
    Cmd, CodeKind, DType, KvShape, LatentKv, OpSig, Quantised, Scalar, ScaleKind, Support, ZeroKind,
};
use mixfleet_hwtests::cases::{Case, TokenSpread};
use mixfleet_hwtests::{CheckOutcome, SuiteEntry, SuiteLevel, SuiteOptions, SuiteVerdict, attempt, run};
use std::collections::BTreeSet;
use std::time::Duration;

fn device(multiprocessors: u32) -> Option<EmulatedDevice> {
    told(EmulatedDevice::new(multiprocessors))
}

fn told(device: Option<EmulatedDevice>) -> Option<EmulatedDevice> {
    if device.is_none() {
        eprintln!("SKIPPED: the emulator needs g++ on x86-64 Linux");
    }
    device
}

/// All operations but cuBLASLt's, at few shapes.
#[test]
fn every_operation_conforms() {
    let Some(device) = device(2) else { return };
    let report = run(&device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    eprintln!("{report}");
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

fn try_case(device: &EmulatedDevice, sig: OpSig, spread: TokenSpread) {
    use mixfleet_hal::Device;
    assert_ne!(device.support(&sig), Support::No, "{sig:?}");
    let entry = SuiteEntry { name: sig.name(), case: Some(Case { sig, spread, seed: 7 }) };
    let report = attempt(device, &entry, Duration::from_secs(60));
    assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
}

fn decode(ranges: &[(u32, u32)], (ratio, kv_heads, head_dim): (u32, u32, u32), x: DType, kv: DType) -> OpSig {
    let longest = ranges.iter().map(|r| r.1).max().unwrap_or(0);
    OpSig::AttnDecode {
        sequences: ranges.len() as u32,
        kv_tokens: ranges.iter().map(|r| u64::from(r.1 - r.0)).sum(),
        heads: ratio * kv_heads,
        pages_max: longest.div_ceil(16) + 1,
        x,
        kv: KvShape { kv_heads, head_dim, page_tokens: 16, dtype: kv, latent: None },
        cap: None,
    }
}

/// Ranges that begin and end inside pages and tiles, are empty, or need several parts.
#[test]
fn decode_attention_conforms_on_all_ways() {
    use DType::{Bf16, F16, F32};
    let ranges = [(0, 1), (0, 0), (3, 18), (16, 17), (0, 333), (15, 130), (7, 71)];
    for multiprocessors in [1, 8] {
        let Some(device) = device(multiprocessors) else { return };
        let tensor_cores = [(Bf16, Bf16), (F16, F16), (F32, Bf16)]
            .map(|dtypes| [(1, 2, 64), (4, 2, 128), (7, 1, 128), (12, 1, 128)].map(|shape| (dtypes, shape)));
        let other_dtypes =
            [(F32, F32), (Bf16, F16)].map(|dtypes| [(1, 2, 64), (12, 1, 128)].map(|s| (dtypes, s)));
        // no vector spans these heads
        let other_heads = [(3, 2, 33), (2, 1, 80), (2, 1, 256)].map(|shape| ((F32, Bf16), shape));
        let all = tensor_cores.as_flattened().iter().chain(other_dtypes.as_flattened()).chain(&other_heads);
        for &((x, kv), shape) in all {
            try_case(&device, decode(&ranges, shape, x, kv), TokenSpread::Ranges(ranges.to_vec()));
        }
    }
}

/// Heads over latents, below, at and above whole blocks, on tensor cores: sequences of several parts, ranges
/// that begin and end inside tiles, prompts and windows. The suite has those of other dtypes.
#[test]
fn latent_attention_conforms_on_tensor_cores() {
    let ranges = [(0, 1), (0, 0), (3, 18), (16, 17), (0, 333), (15, 130), (7, 71)];
    let spread = [(1, 1), (5, 64), (0, 9), (33, 70), (2, 130)];
    let shapes = [
        (1, 48, 32, DType::Bf16),
        (17, 144, 128, DType::F16),
        (40, 96, 64, DType::Bf16),
        (20, 576, 512, DType::Bf16),
    ];
    for (heads, head_dim, rank, x) in shapes {
        let latent = Some(LatentKv { rank, scale: Scalar(0.17) });
        for multiprocessors in [1, 8] {
            let Some(device) = device(multiprocessors) else { return };
            let sig = over(latent, decode(&ranges, (heads, 1, head_dim), x, x));
            try_case(&device, sig, TokenSpread::Ranges(ranges.to_vec()));
        }
        let Some(device) = device(1) else { return };
        let window = (heads == 17).then_some(40);
        let sig = over(latent, prefill(&spread, (heads, 1, head_dim), window, x));
        try_case(&device, sig, TokenSpread::Queries(spread.to_vec()));
    }
}

/// The same attention over such KV.
fn over(latent: Option<LatentKv>, mut sig: OpSig) -> OpSig {
    if let OpSig::AttnDecode { kv, .. } | OpSig::AttnPrefill { kv, .. } = &mut sig {
        kv.latent = latent;
    }
    sig
}

/// Up to 32 heads share one read of each latent, and 40 need two. Beside keys, queries are read once.
#[test]
fn heads_of_a_block_share_one_read_of_the_latents() {
    for (heads, reads) in [(1, 1), (16, 1), (32, 1), (40, 2)] {
        let Some(mut scene) = Scene::on(device(1)) else { return };
        let latent = Some(LatentKv { rank: 512, scale: Scalar(0.1) });
        let sig = over(latent, decode(&[(0, 60), (3, 40)], (heads, 1, 576), DType::Bf16, DType::Bf16));
        let OpSig::AttnDecode { sequences, kv_tokens, pages_max, x, .. } = sig else {
            unreachable!("as made")
        };
        let q = scene.numbers(x, sequences * heads * 576);
        let range = scene.words(&[0, 60, 3, 40]);
        let pages = scene.words(&(0..sequences * pages_max).collect::<Vec<_>>());
        let k_pool = scene.numbers(x, sequences * pages_max * 16 * 576);
        let acc = scene.numbers(DType::F32, sequences * heads * 512);
        let stat = scene.numbers(DType::F32, sequences * heads * 2);
        let cmd = Cmd::new(sig, &[q, range, pages, k_pool, acc, stat]).unwrap();
        scene.run(&[&[cmd]]);
        let of_queries = u64::from(sequences * heads) * 1152;
        assert_eq!(scene.device.copied_bytes(), kv_tokens * reads * 1152 + of_queries, "{heads} heads");
    }
}

fn prefill(
    spread: &[(u32, u32)],
    (ratio, kv_heads, head_dim): (u32, u32, u32),
    window: Option<u32>,
    dtype: DType,
) -> OpSig {
    let pairs = |&(queries, context): &(u32, u32)| {
        (context - queries..context).map(|p| u64::from((p + 1).min(window.unwrap_or(u32::MAX)))).sum::<u64>()
    };
    OpSig::AttnPrefill {
        tokens: spread.iter().map(|s| s.0).sum(),
        sequences: spread.len() as u32,
        pairs: spread.iter().map(pairs).sum(),
        kv_tokens: spread.iter().map(|s| u64::from(s.1)).sum(),
        heads: ratio * kv_heads,
        pages_max: spread.iter().map(|s| s.1).max().unwrap_or(0).div_ceil(16) + 1,
        window,
        // with windows, as where they come from
        sinks: window.is_some(),
        x: dtype,
        kv: KvShape { kv_heads, head_dim, page_tokens: 16, dtype, latent: None },
        cap: None,
    }
}

/// Contexts below, at and above the tiles of 32 or 64 keys, blocks of several sequences, and windows across
/// tiles.
#[test]
fn prefill_attention_conforms_on_tensor_cores() {
    let spread = [(1, 1), (5, 64), (0, 9), (65, 65), (33, 200), (2, 130)];
    // one multiprocessor is filled by blocks of 128 rows, a hundred by those of 64
    for multiprocessors in [1, 100] {
        let Some(device) = device(multiprocessors) else { return };
        for (shape, dtype) in [
            ((4, 1, 128), DType::Bf16),
            ((3, 2, 64), DType::F16),
            ((1, 1, 128), DType::F16),
            ((3, 1, 80), DType::F16),
            ((2, 1, 96), DType::Bf16),
            ((1, 1, 192), DType::F16),
            ((2, 1, 256), DType::Bf16),
        ] {
            for window in [None, Some(1), Some(40), Some(100)] {
                let sig = prefill(&spread, shape, window, dtype);
                try_case(&device, sig, TokenSpread::Queries(spread.to_vec()));
            }
        }
    }
}

/// Hopper's kernel, over tiles of 128 keys and blocks of 128 rows. Each number of heads that share KV,
/// contexts below, at and above a tile, sequences that begin inside a tile, more tiles than buffers, windows.
#[test]
fn prefill_attention_conforms_on_warpgroups() {
    // few blocks, which go through several tiles each
    let Some(device) = told(EmulatedDevice::with_wgmma(3)) else { return };
    let mixed = [(1, 1), (5, 128), (0, 9), (129, 129), (33, 200), (2, 130), (30, 140), (47, 700)];
    let dtypes = [DType::Bf16, DType::F16];
    for ratio in 1..=8u32 {
        for (i, head_dim) in [64, 128].into_iter().enumerate() {
            let dtype = dtypes[(i + ratio as usize) % 2];
            let window = [None, Some(1), Some(40), Some(100), Some(300)][(i + ratio as usize) % 5];
            for window in BTreeSet::from([None, window]) {
                let sig = prefill(&mixed, (ratio, 1 + ratio % 2, head_dim), window, dtype);
                try_case(&device, sig, TokenSpread::Queries(mixed.to_vec()));
            }
        }
    }
}

#[test]
fn gemm_of_few_rows_conforms() {
    use DType::{Bf16, F16, F32};
    for multiprocessors in [1, 8] {
        let Some(device) = device(multiprocessors) else { return };
        for (x, weight, out) in [(Bf16, Bf16, F32), (F16, F16, F16), (F32, Bf16, Bf16), (F32, Bf16, F32)] {
            let few = [(1, 16, 8), (3, 70, 1032), (8, 33, 136), (9, 17, 64), (16, 130, 520)];
            // more rows are taken 16 at a time, the last ones alone
            for (m, n, k) in few.into_iter().chain([(17, 33, 136), (53, 17, 64)]) {
                let sig = OpSig::Gemm { m, n, k, x, weight, out, bias: m % 2 == 1, accumulate: k > 100 };
                try_case(&device, sig, TokenSpread::Even);
            }
        }
    }
}

/// Formats of checkpoints whose products of few rows run on tensor cores.
pub(crate) fn formats() -> [Quantised; 10] {
    use CodeKind::{E4m3, I8, U4};
    use ScaleKind as Scale;
    use ZeroKind::{Middle, Minima, Points};
    let rows = Quantised::in_rows;
    [
        rows(U4, 32, Scale::F16, Middle),
        rows(U4, 32, Scale::I8, Minima),
        rows(U4, 32, Scale::F16, Minima),
        rows(U4, 128, Scale::F16, Points),
        rows(U4, 64, Scale::Bf16, Middle),
        rows(I8, 32, Scale::F16, Middle),
        rows(I8, 1 << 20, Scale::F32, Middle),
        rows(E4m3, 1 << 20, Scale::Bf16, Middle),
        Quantised { group_rows: 128, ..rows(E4m3, 128, Scale::F32, Middle) },
        Quantised::MXFP4,
    ]
}

/// Rows that are no whole tile or block, and k that ends inside a chunk, for each dtype of x.
#[test]
fn quantised_products_of_few_rows_conform_on_tensor_cores() {
    use DType::{Bf16, F16, F32};
    for (multiprocessors, shapes) in
        [(1, [(16, 70, 1280), (3, 130, 256)]), (8, [(9, 17, 768), (37, 48, 512)])]
    {
        let Some(device) = device(multiprocessors) else { return };
        for (index, weight) in formats().into_iter().enumerate() {
            for (x, out) in [(Bf16, F32), (F16, F16), (F32, F32)] {
                for (m, n, k) in shapes {
                    let k = if weight.scale == ScaleKind::I8 || index % 2 == 0 { k } else { k + 32 };
                    let (bias, accumulate) = (m % 2 == 1, out == F32);
                    let sig = OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate };
                    try_case(&device, sig, TokenSpread::Even);
                }
            }
        }
    }
}

/// Weights of eight bits, alone and on both sides, in the kernels that need no tensor core for them.
#[test]
fn eight_bit_weights_conform() {
    let Some(device) = device(2) else { return };
    for x in [DType::F8E4m3, DType::Bf16, DType::F32] {
        for (m, n, k) in [(1, 19, 37), (3, 24, 64), (20, 66, 40)] {
            let weight = DType::F8E4m3;
            let sig = OpSig::Gemm { m, n, k, x, weight, out: DType::F32, bias: true, accumulate: true };
            try_case(&device, sig, TokenSpread::Even);
        }
    }
}

/// Keys of pages that the pool does not have are seen by no query, on warpgroups as on tensor cores of any
/// part.
#[test]
fn absent_pages_are_seen_by_no_query() {
    let spread = [(200, 450), (70, 70)];
    let sig = prefill(&spread, (4, 1, 128), None, DType::Bf16);
    let OpSig::AttnPrefill { tokens, heads, pages_max, kv, .. } = sig else { unreachable!("as made") };
    let outputs: Vec<Vec<f32>> = [EmulatedDevice::with_wgmma(1), EmulatedDevice::new(1)]
        .into_iter()
        .filter_map(|device| {
            let mut scene = Scene::on(device)?;
            let q = scene.numbers(DType::Bf16, tokens * heads * kv.head_dim);
            let query_start = scene.words(&[0, 200, 270]);
            let context = scene.words(&[450, 70]);
            // of the first sequence, pages at the start of a tile, inside and at its end are absent
            let absent = [0, 5, 7, 9, 20];
            let page = |at: u32| if absent.contains(&at) { u32::MAX - at } else { at };
            let pages = scene.words(&(0..2 * pages_max).map(page).collect::<Vec<_>>());
            let [k_pool, v_pool] = [2 * pages_max * kv.page_tokens * kv.head_dim; 2]
                .map(|count| scene.numbers(DType::Bf16, count));
            let out = scene.numbers(DType::Bf16, tokens * heads * kv.head_dim);
            let cmd = Cmd::new(sig, &[q, query_start, context, pages, k_pool, v_pool, out]).unwrap();
            let (memory, _) = scene.run(&[&[cmd]]);
            let bits = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
            Some(memory.last().unwrap().chunks(2).map(bits).collect())
        })
        .collect();
    let [found, expected] = &outputs[..] else { return };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 0.02, "{at}: {found} must be {expected}");
    }
    assert!(expected.iter().any(|v| v.abs() > 0.05), "something was attended to");
}
