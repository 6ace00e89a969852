use super::*;
use mixfleet_hal::DType;
use proptest::prelude::*;

pub(crate) fn small() -> ModelShape {
    ModelShape {
        hidden: 64,
        intermediate: 160,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: 1000,
        windows: vec![None; 3],
        weight: DType::Bf16,
        activation: DType::F32,
        kv: DType::Bf16,
        page_tokens: 16,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
        rotary: None,
        sinks: false,
        style: crate::layers::LayerStyle::default(),
        format: None,
        experts: None,
        latent: None,
        linear: None,
    }
}

fn gemm_flops(ops: &OpCounts) -> f64 {
    let gemms = ops.iter().filter(|(sig, _)| matches!(sig, OpSig::Gemm { .. }));
    gemms.map(|(sig, count)| sig.flops() * *count as f64).sum()
}

#[test]
fn matrix_flops_are_twice_the_parameters_per_token() {
    let shape = small();
    let per_layer = 64 * (4 * 16) * 2 + 64 * (2 * 16) * 2 + 64 * 160 * 3;
    let head = 64 * 1000;
    let prefill = gemm_flops(&shape.prefill_ops(0, 10, true));
    assert_eq!(prefill, f64::from(2 * (10 * 3 * per_layer + head)));
    assert_eq!(gemm_flops(&shape.prefill_ops(0, 10, false)), f64::from(2 * 10 * 3 * per_layer));
    let decode = gemm_flops(&shape.decode_ops(7, 700));
    assert_eq!(decode, f64::from(2 * 7 * (3 * per_layer + head)));
}

#[test]
fn kv_bytes_of_llama_3_70b_are_the_published_327680() {
    let shape = ModelShape { windows: vec![None; 80], kv_heads: 8, head_dim: 128, ..small() };
    assert_eq!(shape.kv_bytes_per_token(), 327_680);
}

#[test]
fn a_window_bounds_what_decode_reads_in_its_layers_only() {
    let shape = ModelShape { windows: vec![Some(8), None, Some(8)], ..small() };
    let ops = shape.decode_ops(2, 100);
    let reads: Vec<(u64, u64)> = ops
        .iter()
        .filter_map(|(sig, count)| match sig {
            OpSig::AttnDecode { kv_tokens, .. } => Some((*kv_tokens, *count)),
            _ => None,
        })
        .collect();
    assert_eq!(reads, [(16, 2), (100, 1)]);
}

#[test]
fn a_mixed_step_has_the_rows_of_both_and_the_attention_of_each() {
    let shape = small();
    let part = |context, tokens, last| Prefill { context, tokens, last };
    let mixed = shape.step_ops(&[part(5, 10, false), part(0, 3, true)], 7, 700);
    let per_layer = 64 * (4 * 16) * 2 + 64 * (2 * 16) * 2 + 64 * 160 * 3;
    assert_eq!(gemm_flops(&mixed), f64::from(2 * (20 * 3 * per_layer + 8 * 64 * 1000)));
    let attention = |ops: OpCounts| {
        let is = |sig: &OpSig| matches!(sig, OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. });
        ops.iter().filter(|(sig, _)| is(sig)).map(|(s, c)| s.flops() * *c as f64).sum::<f64>()
    };
    let apart = [shape.prefill_ops(5, 10, false), shape.prefill_ops(0, 3, true), shape.decode_ops(7, 700)];
    assert_eq!(attention(mixed), apart.into_iter().map(attention).sum::<f64>());
}

#[test]
fn a_split_model_has_a_share_of_each_matrix_and_whole_kv_heads() {
    let shape = ModelShape { heads: 64, kv_heads: 8, intermediate: 28672, ..small() };
    assert_eq!(shape.check_split(8), Ok(()));
    let flops = |shape: &ModelShape| gemm_flops(&shape.prefill_ops(0, 16, true));
    assert_eq!(flops(&shape.split(8)) * 8.0, flops(&shape));
    assert_eq!(shape.split(16).kv_heads, 1);
    assert!(shape.check_split(3).unwrap_err().contains("64 heads"));
    assert!(ModelShape { kv_heads: 6, ..shape }.check_split(4).unwrap_err().contains("6 KV heads"));
}

proptest! {
    #[test]
    fn every_operation_is_well_formed(before in 0u32..500, new in 1u32..300, batch in 1u32..40) {
        for (sig, count) in small().prefill_ops(before, new, true).into_iter().chain(small().decode_ops(batch, u64::from(before))) {
            prop_assert!(count > 0);
            prop_assert_eq!(sig.check(), Ok(()));
            prop_assert!(sig.bytes() >= 0.0);
        }
    }
}
