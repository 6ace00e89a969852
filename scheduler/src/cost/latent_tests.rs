//! What latent attention costs.

use super::{EXPANDED_TOKENS, LatentAttention, MemberWork, ModelShape, Prefill};
use crate::layers::{AttentionSizes, LayerOps, OpArg, OpSink};
use crate::models::find;
use mixfleet_hal::{DType, OpSig};

fn attention(ops: &[(OpSig, u64)]) -> Vec<(OpSig, u64)> {
    let is = |sig: &OpSig| matches!(sig, OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. });
    ops.iter().filter(|(sig, _)| is(sig)).copied().collect()
}

/// Adds up the arithmetic of operations.
struct Flops(f64);

impl OpSink for Flops {
    fn push(&mut self, sig: OpSig, _: &[OpArg]) {
        self.0 += sig.flops();
    }
}

/// The shape of a model whose prompts attend to latents.
fn absorbing(name: &str) -> ModelShape {
    let shape = find(name).unwrap().shape(DType::Bf16);
    let latent = shape.latent.map(|latent| LatentAttention { expanded_tokens: 0, ..latent });
    ModelShape { latent, ..shape }
}

#[test]
fn decode_reads_latents_once_and_computes_with_all_heads() {
    for name in ["deepseek-v3", "kimi-k2", "deepseek-v2-lite"] {
        let shape = find(name).unwrap().shape(DType::Bf16);
        let [(sig, runs)] = attention(&shape.decode_ops(4, 4 * 8192))[..] else { panic!("one attention") };
        assert_eq!(runs, u64::from(shape.layers()));
        let keys = 4.0 * 8192.0;
        let flops = keys * f64::from(shape.heads) * (2.0 * 576.0 + 2.0 * 512.0 + 1.0);
        assert_eq!(sig.flops(), flops, "{name}");
        let kv = keys * 576.0 * 2.0;
        assert!((sig.bytes() / kv - 1.0).abs() < 0.05, "{name}: {} {kv}", sig.bytes());
    }
}

#[test]
fn other_engines_expand_the_latents_of_prompts_and_those_of_earlier_chunks_again() {
    let shape = absorbing("deepseek-v3");
    let prompt = |context| [Prefill { context, tokens: 1000, last: false }];
    let pairs = 1000.0 * 1001.0 / 2.0;
    for (fused, of_pair) in
        [(true, 2.0 * 192.0 + 2.0 * 128.0 + 1.0), (false, 2.0 * 576.0 + 2.0 * 512.0 + 1.0)]
    {
        let ops = shape.attention_ops(&prompt(0), 0, 0, fused).merged();
        let [(sig, _)] = attention(&ops)[..] else { panic!("one attention") };
        assert_eq!(sig.flops(), pairs * 128.0 * of_pair);
    }
    let up = |context| {
        let mut ops = shape.dense_ops(1000, MemberWork::All, true).merged();
        ops.extend(shape.attention_ops(&prompt(context), 0, 0, true).merged());
        let expands = |sig: &OpSig| matches!(*sig, OpSig::Gemm { n, k, .. } if (n, k) == (128 * 256, 512));
        let rows = |(sig, runs): &(OpSig, u64)| match *sig {
            OpSig::Gemm { m, .. } if expands(sig) => u64::from(m) * runs,
            _ => 0,
        };
        ops.iter().map(rows).sum::<u64>()
    };
    assert_eq!([up(0), up(3000)], [61 * 1000, 61 * 4000]);
}

/// The chosen way has fewer operations by the operations' own counts. These also count an
/// exponential for each pair, and rotations, which the choice ignores: a thousandth of the total.
#[test]
fn prompts_are_expanded_where_that_is_less_arithmetic() {
    let shape = find("deepseek-v2-lite").unwrap().shape(DType::Bf16);
    let latent = shape.latent.unwrap();
    let is_expanded = |context, tokens| latent.expands(&[Prefill { context, tokens, last: true }], 16);
    for context in [0, 100, 1000, 5000] {
        for tokens in [1, 50, 100, 150, 200, 250, 300, 1000, 3000] {
            let part = [Prefill { context, tokens, last: true }];
            let mut sizes = AttentionSizes::counted(&shape, &part, (0, 0), std::iter::once(None));
            let list = LayerOps::counted(&shape);
            let (mut made, mut over) = (Flops(0.0), Flops(0.0));
            sizes.expanded_pages_max = None;
            list.lift(&latent, tokens, &mut over);
            list.attend_prefills((0, None), &sizes, &mut over);
            list.lower(&latent, tokens, &mut over);
            let pages_max = sizes.prefill_pages_max;
            sizes.expanded_pages_max = Some(pages_max);
            list.move_queries(&latent, &sizes, &mut made);
            list.attend_expanded(&latent, pages_max, &sizes, &mut made);
            list.cut_values(&latent, &sizes, &mut made);
            let (made, over) = (made.0, over.0);
            if (made / over - 1.0).abs() > 2e-3 {
                assert_eq!(is_expanded(context, tokens), made < over, "{tokens} after {context}");
            }
        }
    }
    assert_eq!([127, 128].map(|tokens| is_expanded(0, tokens)), [false, true]);
    // there is memory for this many keys, and pages begin anew for each prompt
    assert_eq!([0, 1].map(|context| is_expanded(context, EXPANDED_TOKENS)), [true, false]);
    let two = |tokens| [tokens, EXPANDED_TOKENS / 2].map(|tokens| Prefill { context: 0, tokens, last: true });
    assert!(latent.expands(&two(EXPANDED_TOKENS / 2), 16));
    assert!(!latent.expands(&two(EXPANDED_TOKENS / 2 + 1), 16));
}

/// Latents are expanded piece by piece, those of earlier chunks as well.
#[test]
fn every_key_that_prompts_see_is_expanded_once() {
    let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
    let ops = shape.prefill_ops(2000, 1000, false);
    let gathered = ops.iter().filter_map(|(sig, runs)| match *sig {
        OpSig::KvGather { tokens, .. } => Some((tokens, *runs)),
        _ => None,
    });
    assert_eq!(gathered.collect::<Vec<_>>(), [(1024, 2 * 61), (3000 - 2048, 61)]);
}

#[test]
fn every_device_of_tensor_parallelism_keeps_all_latents() {
    let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
    assert_eq!((shape.kv_copies(8), shape.split(8).kv_bytes_per_token()), (8.0, 70_272));
    assert_eq!(find("qwen3-32b").unwrap().shape(DType::Bf16).kv_copies(16), 2.0);
}
