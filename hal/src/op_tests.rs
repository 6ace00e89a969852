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
    let kv = KvShape { kv_heads: 2, head_dim: 16, page_tokens: 8, dtype: DType::Bf16 };
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
    let kv = KvShape { kv_heads: 2, head_dim: 16, page_tokens: 8, dtype: DType::I8 };
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
    let rope = OpSig::Rope { tokens: 1, heads: 1, head_dim: 3, x: DType::F32 };
    assert!(rope.check().unwrap_err().contains("odd"));
}
