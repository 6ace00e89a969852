use super::*;

const F32: DType = DType::F32;
const GEMM: OpSig =
    OpSig::Gemm { m: 2, n: 3, k: 5, x: F32, weight: DType::Bf16, out: F32, bias: true, accumulate: true };

#[test]
fn gemm_counts_operands_flops_and_bytes() {
    assert!(GEMM.operands().iter().map(|o| o.name).eq(["x", "weight", "bias", "out"]));
    assert_eq!(GEMM.flops(), 60.0);
    assert_eq!(GEMM.bytes(), f64::from(2 * 5 * 4 + 3 * 5 * 2 + 3 * 2 + 2 * (2 * 3 * 4)));
}

#[test]
fn the_shape_of_paged_kv_is_written_as_fields_of_its_operation() {
    let kv = KvShape { kv_heads: 2, head_dim: 16, page_tokens: 8, dtype: DType::Bf16, latent: None };
    let sig = OpSig::KvGather { tokens: 3, kv, wire: DType::F32 };
    let json = serde_json::json!({
        "op": "kv_gather", "tokens": 3, "kv_heads": 2, "head_dim": 16, "page_tokens": 8, "kv": "bf16",
        "wire": "f32",
    });
    assert_eq!(serde_json::to_value(sig).unwrap(), json);
    assert_eq!(serde_json::from_value::<OpSig>(json).unwrap(), sig);
    assert_eq!((sig.kv(), GEMM.kv(), kv.wire_token_bytes(DType::F32)), (Some(kv), None, 2 * 2 * 16 * 4));
}

#[test]
fn kv_of_eight_bits_has_the_bytes_of_its_codes_and_scales() {
    let kv = KvShape { kv_heads: 2, head_dim: 16, page_tokens: 8, dtype: DType::I8, latent: None };
    assert_eq!(kv.wire_token_bytes(DType::F8E4m3), 2 * 2 * (16 + 4));
    let gather = OpSig::KvGather { tokens: 3, kv, wire: DType::F8E4m3 };
    let extents = gather.operands().iter().map(|operand| operand.extent).collect::<Vec<_>>();
    let page = Extent::PagesOf(8 * 2 * 20);
    assert_eq!(extents, [Extent::Exactly(3), page, page, Extent::Exactly(3 * 2 * 2 * 20)]);
    assert_eq!(gather.bytes(), f64::from(3 * 4 + 3 * 80 + 3 * 80));
    let scales = gather.operands().iter().map(|operand| gather.has_scales(operand)).collect::<Vec<_>>();
    assert_eq!(scales, [false, true, true, true]);
    let write = |kv| OpSig::KvWrite { tokens: 1, x: F32, kv };
    assert!(write(kv).check().is_ok());
    assert!(write(KvShape { head_dim: 18, ..kv }).check().unwrap_err().contains("heads of 18"));
    assert!(write(KvShape { dtype: DType::U32, ..kv }).check().unwrap_err().contains("cannot be u32"));
}

#[test]
fn quantised_weights_are_operands_between_x_and_the_bias() {
    let weight = Quantised::NVFP4;
    let sig =
        OpSig::QuantisedGemm { m: 2, n: 3, k: 32, x: F32, weight, out: F32, bias: true, accumulate: false };
    assert!(sig.operands().iter().map(|o| o.name).eq(["x", "codes", "scales", "outer", "bias", "out"]));
    assert_eq!(sig.flops(), 2.0 * 2.0 * 3.0 * 32.0);
    assert_eq!(sig.bytes(), f64::from(2 * 32 * 4 + 3 * 16 + 3 * 2 + 4 + 3 * 4 + 2 * 3 * 4));
    assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(sig)).unwrap(), sig);
    let table = OpSig::QuantisedEmbed { tokens: 2, vocab: 100, hidden: 24, table: weight, out: F32 };
    assert!(table.check().is_ok());
    assert_eq!(table.bytes(), f64::from(2 * 4 + 2 * 12 + 2 * 2 + 4 + 2 * 24 * 4));
    let odd = OpSig::QuantisedEmbed { tokens: 2, vocab: 100, hidden: 23, table: weight, out: F32 };
    assert!(odd.check().unwrap_err().contains("quantised_embed: 23 columns"));
}

#[test]
fn only_rows_in_use_of_a_table_are_counted() {
    let sig = OpSig::Embed { tokens: 4, vocab: 1000, hidden: 8, table: DType::Bf16, out: DType::F32 };
    assert_eq!(sig.bytes(), f64::from(4 * 4 + 4 * 8 * 2 + 4 * 8 * 4));
}

#[test]
fn a_signature_survives_json_and_wrong_shapes_are_named() {
    assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(GEMM)).unwrap(), GEMM);
    let rope = OpSig::Rope { tokens: 1, heads: 1, head_dim: 3, x: DType::F32, part: None };
    assert!(rope.check().unwrap_err().contains("odd"));
}

/// DeepSeek-V3 with 16 heads: a token's latent is read once, as key and as value.
#[test]
fn keys_that_contain_their_values_have_one_pool_and_a_scale_of_their_own() {
    let latent = Some(LatentKv { rank: 512, scale: crate::Scalar(0.125) });
    let kv = KvShape { kv_heads: 1, head_dim: 576, page_tokens: 16, dtype: DType::Bf16, latent };
    assert_eq!((kv.token(), kv.value_dim(), kv.scale()), (576, 512, 0.125));
    assert_eq!(kv.wire_token_bytes(DType::F32), 576 * 4);
    let (x, heads, sequences) = (DType::Bf16, 16, 2);
    let decode = OpSig::AttnDecode { sequences, kv_tokens: 100, heads, pages_max: 4, x, kv, cap: None };
    let names = |sig: &OpSig| sig.operands().iter().map(|operand| operand.name).collect::<Vec<_>>();
    assert_eq!(names(&decode), ["q", "range", "pages", "k_pool", "acc", "stat"]);
    assert_eq!(decode.operands()[4].extent, Extent::Exactly(2 * 16 * 512));
    assert_eq!(decode.flops(), 100.0 * 16.0 * (2.0 * 576.0 + 2.0 * 512.0 + 1.0));
    let others = f64::from(2 * 16 * 576 * 2 + 2 * 2 * 4 + 2 * 4 * 4 + 2 * 16 * 512 * 4 + 2 * 16 * 2 * 4);
    assert_eq!(decode.bytes(), others + 100.0 * 576.0 * 2.0);
    assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(decode)).unwrap(), decode);
    assert_eq!(names(&OpSig::KvWrite { tokens: 1, x, kv }), ["k", "slots", "k_pool"]);
    assert_eq!(names(&OpSig::KvGather { tokens: 1, kv, wire: x }), ["slots", "k_pool", "out"]);
    assert_eq!(names(&OpSig::KvScatter { tokens: 1, kv, wire: x }), ["wire", "slots", "k_pool"]);
    let with = |latent, kv_heads| {
        let kv = KvShape { latent: Some(latent), kv_heads, ..kv };
        OpSig::KvWrite { tokens: 1, x, kv }.check()
    };
    let good = LatentKv { rank: 576, scale: crate::Scalar(1.0) };
    assert_eq!(with(good, 1), Ok(()));
    assert!(with(good, 2).unwrap_err().contains("kv_write: latent KV of 2 heads"));
    assert!(with(LatentKv { rank: 577, ..good }, 1).unwrap_err().contains("values of 577"));
    assert!(with(LatentKv { scale: crate::Scalar(0.0), ..good }, 1).unwrap_err().contains("multiplied by 0"));
}

#[test]
fn columns_and_rotated_parts_lie_within_rows() {
    let (rows, x) = (3, DType::Bf16);
    let copy = |cols, from, to| {
        let of = |(row, first)| ColumnsOf { row, first };
        OpSig::CopyColumns { rows, cols, from: of(from), to: of(to), x }
    };
    let whole = copy(8, (8, 0), (24, 16));
    assert_eq!((whole.check(), whole.bytes(), whole.flops()), (Ok(()), f64::from(2 * 3 * 8 * 2), 0.0));
    assert!(copy(8, (8, 1), (24, 0)).check().unwrap_err().contains("8 columns from 1 on of 8"));
    assert!(copy(8, (8, 0), (24, u32::MAX)).check().is_err());
    let rope = |head_dim, first, length| {
        let part = Some(RotaryPart { first, length, interleaved: true });
        OpSig::Rope { tokens: 2, heads: 3, head_dim, part, x }
    };
    let part = rope(19, 3, 16);
    assert_eq!((part.check(), part.flops()), (Ok(()), f64::from(3 * 2 * 3 * 16)));
    assert_eq!(part.bytes(), f64::from(2 * 2 * 3 * 16 * 2 + 2 * 16 * 4));
    assert!(rope(19, 4, 16).check().unwrap_err().contains("16 numbers from 4 on of a head of 19"));
    assert!(rope(19, 0, 15).check().is_err());
    let pairs = |interleaved| RotaryPart { first: 3, length: 4, interleaved }.pairs().collect::<Vec<_>>();
    assert_eq!((pairs(false), pairs(true)), (vec![[3, 5], [4, 6]], vec![[3, 4], [5, 6]]));
}
