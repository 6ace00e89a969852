use super::*;
use mixfleet_hal::{
    CodeKind, ColumnsOf, DType, ExpertRouting, GroupedRows, KvShape, LatentKv, MatrixKind, Quantised,
    RotaryPart, Scalar, ScaleKind, Scoring, ZeroKind,
};
use proptest::prelude::*;

const F32: DType = DType::F32;
const KV: KvShape = KvShape { kv_heads: 2, head_dim: 64, page_tokens: 32, dtype: DType::Bf16, latent: None };

#[expect(clippy::too_many_lines, reason = "one list of operations")]
fn sigs() -> Vec<OpSig> {
    use DType::{Bf16, F8E4m3, F16};
    vec![
        OpSig::Embed { tokens: 1, vocab: 300, hidden: 70_000, table: Bf16, out: F32 },
        OpSig::RmsNorm { rows: 1, cols: 2, eps: Scalar(1e-5), x: F32, weight: Bf16, out: F16 },
        OpSig::Gemm { m: 1, n: 2, k: 3, x: F16, weight: F8E4m3, out: F32, bias: true, accumulate: false },
        OpSig::Gemm { m: 1, n: 2, k: 3, x: F16, weight: F32, out: F32, bias: false, accumulate: true },
        OpSig::Rope { tokens: 1, heads: 2, head_dim: 64, x: Bf16, part: None },
        OpSig::Rope {
            tokens: 1,
            heads: 2,
            head_dim: 192,
            part: Some(RotaryPart { first: 128, length: 64, interleaved: true }),
            x: Bf16,
        },
        OpSig::CopyColumns {
            rows: 3,
            cols: 64,
            from: ColumnsOf { row: 192, first: 128 },
            to: ColumnsOf { row: 576, first: 512 },
            x: Bf16,
        },
        OpSig::KvWrite { tokens: 9, x: F32, kv: KV },
        OpSig::KvGather {
            tokens: 9,
            wire: F32,
            kv: KvShape { kv_heads: 1, latent: Some(LatentKv { rank: 32, scale: Scalar(0.13) }), ..KV },
        },
        OpSig::AttnPrefill {
            tokens: 1,
            sequences: 2,
            pairs: 1 << 40,
            kv_tokens: 4,
            heads: 8,
            pages_max: 6,
            window: Some(7),
            sinks: false,
            x: F32,
            kv: KV,
            cap: None,
        },
        OpSig::AttnDecode {
            sequences: 1,
            kv_tokens: 0,
            heads: 4,
            pages_max: 0,
            x: F32,
            kv: KV,
            cap: Some(Scalar(50.0)),
        },
        OpSig::SoftCap { elements: 1 << 34, cap: Scalar(30.0) },
        OpSig::AttnMerge { parts: 1, rows: 2, head_dim: 3, sinks: 0, out: F16 },
        OpSig::SiluMul { elements: 1 << 33, x: F16 },
        OpSig::GeluMul { elements: 7, x: Bf16 },
        OpSig::Add { elements: 5, x: F32 },
        OpSig::Sample { rows: 1, cols: 2, history: 0, tops: 20 },
        OpSig::Copy { bytes: 1 << 35 },
        OpSig::Fill { bytes: 4, word: u32::MAX },
        OpSig::KvGather { tokens: 1, kv: KV, wire: F16 },
        OpSig::KvScatter { tokens: 1, kv: KV, wire: F32 },
        OpSig::ClampedSwiglu { elements: 1 << 33, alpha: Scalar(1.702), limit: Scalar(7.0), x: Bf16 },
        OpSig::Route {
            tokens: 3,
            bias: true,
            routing: ExpertRouting {
                experts: 256,
                active: 8,
                scoring: Scoring::Sigmoid,
                groups: 8,
                groups_active: 4,
                group_best: 2,
                normalise: true,
                scale: Scalar(2.5),
            },
        },
        OpSig::GroupedGemm {
            grouped: GroupedRows { choices: 24, fan: 8, experts: 256, touched: 0, others: 0 },
            n: 768,
            k: 2048,
            x: Bf16,
            weight: MatrixKind::Plain(Bf16),
            out: F32,
            bias: true,
        },
        OpSig::GroupedGemm {
            grouped: GroupedRows { choices: 4, fan: 4, experts: 32, touched: 4, others: 3 },
            n: 5760,
            k: 2880,
            x: Bf16,
            weight: MatrixKind::Quantised(Quantised::MXFP4),
            out: Bf16,
            bias: true,
        },
        OpSig::AttnMerge { parts: 1, rows: 128, head_dim: 64, sinks: 64, out: F16 },
        OpSig::Combine { tokens: 3, active: 8, cols: 2048, x: Bf16, accumulate: true },
        OpSig::QuantisedEmbed { tokens: 1, vocab: 2, hidden: 3, table: Quantised::NVFP4, out: F16 },
        OpSig::QuantisedGemm {
            m: 1,
            n: 2,
            k: 3,
            x: F16,
            weight: Quantised {
                code: CodeKind::U5,
                group_rows: 128,
                group_columns: 1 << 20,
                scale: ScaleKind::I8,
                zero: ZeroKind::Minima,
                outer: false,
            },
            out: F32,
            bias: false,
            accumulate: true,
        },
    ]
}

#[test]
fn every_operation_comes_back_as_it_was() {
    for sig in sigs() {
        let mut bytes = Vec::new();
        put_sig(&mut bytes, &sig).unwrap();
        let mut taker = Taker(&bytes);
        assert_eq!(take_sig(&mut taker), Ok(sig));
        assert_eq!(taker.end(), Ok(()));
        for end in 0..bytes.len() {
            assert!(take_sig(&mut Taker(&bytes[..end])).is_err(), "{sig:?} of {end} bytes");
        }
    }
    let kinds: std::collections::BTreeSet<&str> = sigs().iter().map(OpSig::name).collect();
    assert_eq!(kinds.len(), OpSig::BLANK.len(), "an operation is not tried");
}

#[test]
fn attention_of_a_layer_takes_few_bytes() {
    let mut bytes = Vec::new();
    let decode = OpSig::AttnDecode {
        sequences: 64,
        kv_tokens: 70_000,
        heads: 16,
        pages_max: 40,
        x: F32,
        kv: KV,
        cap: None,
    };
    put_sig(&mut bytes, &decode).unwrap();
    assert!(bytes.len() <= 16, "{} bytes", bytes.len());
}

proptest! {
    #[test]
    fn numbers_come_back_and_other_bytes_are_refused_or_read(number: u64, noise: Vec<u8>) {
        let mut bytes = Vec::new();
        put(&mut bytes, number);
        prop_assert_eq!(Taker(&bytes).number(), Ok(number));
        let _ = Taker(&noise).number();
        let _ = take_sig(&mut Taker(&noise));
        let _ = Taker(&noise).error();
        let none = |_| Err(Error::invalid("no buffer"));
        let _ = take_cmds(&mut Taker(&noise), none);
    }

    #[test]
    fn failures_come_back(detail: String) {
        let error = Error::new(ErrorKind::DeviceLost, detail);
        let mut bytes = Vec::new();
        put_error(&mut bytes, &error);
        let back = Taker(&bytes).error().unwrap();
        prop_assert_eq!(back.kind, error.kind);
        // of a long detail the beginning comes
        let is_blank = error.detail.chars().next().is_none_or(char::is_whitespace);
        let unsaid = is_blank && back.detail == UNSAID;
        prop_assert!(unsaid || error.detail.starts_with(&back.detail) && !back.detail.trim().is_empty());
    }
}
