//! The cost model counts exactly the operations that the forward pass submits.

use mixfleet_hal::{DType, KvShape, LatentKv, OpSig, Scalar};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::variants::{styled_variants, tiny_variants};
use mixfleet_scheduler::cost::{OpCounts, Prefill};
use std::collections::HashMap;
use std::sync::Arc;

pub(super) const BLOCK_TOKENS: u32 = 8;

/// Removes what costs nothing (eps, rows of a table that are not read), and sizes that a recorded decode step
/// rounds up.
fn key(sig: OpSig) -> OpSig {
    match sig {
        // norms that a family stores less one, or without a factor, are kept in f32: one row of weights
        OpSig::RmsNorm { rows, cols, x, out, .. } => {
            OpSig::RmsNorm { rows, cols, eps: Scalar(0.0), x, weight: DType::F32, out }
        }
        OpSig::AttnDecode { sequences, heads, cap, x, kv, .. } => {
            let (kv_tokens, pages_max) = (0, 0);
            OpSig::AttnDecode {
                sequences,
                kv_tokens,
                heads,
                pages_max,
                x,
                kv: unscaled(kv),
                cap: cap.map(|_| Scalar(1.0)),
            }
        }
        // latents' scale is the model's
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks,
            x,
            cap,
            kv,
        } => {
            let kv = unscaled(kv);
            OpSig::AttnPrefill {
                tokens,
                sequences,
                pairs,
                kv_tokens,
                heads,
                pages_max,
                window,
                sinks,
                x,
                kv,
                cap: cap.map(|_| Scalar(1.0)),
            }
        }
        OpSig::KvWrite { tokens, x, kv } => OpSig::KvWrite { tokens, x, kv: unscaled(kv) },
        OpSig::KvGather { tokens, kv, wire } => OpSig::KvGather { tokens, kv: unscaled(kv), wire },
        // the rope table's length depends on the KV memory
        OpSig::Embed { tokens, hidden, table, out, .. } => {
            OpSig::Embed { tokens, vocab: 0, hidden, table, out }
        }
        // so are soft caps
        OpSig::SoftCap { elements, .. } => OpSig::SoftCap { elements, cap: Scalar(1.0) },
        // what rows are multiplied by is the model's
        OpSig::Fill { bytes, .. } => OpSig::Fill { bytes, word: 0 },
        sig => sig,
    }
}

fn unscaled(kv: KvShape) -> KvShape {
    KvShape { latent: kv.latent.map(|latent| LatentKv { scale: Scalar(1.0), ..latent }), ..kv }
}

pub(super) fn counted(sigs: impl Iterator<Item = (OpSig, u64)>) -> HashMap<OpSig, u64> {
    let mut counts = HashMap::new();
    for (sig, runs) in sigs {
        *counts.entry(key(sig)).or_default() += runs;
    }
    counts
}

/// The operations that the forward pass submits for `parts`.
fn submitted(device: &ReferenceDevice, forward: &Forward, parts: &[StepInput<'_>]) -> HashMap<OpSig, u64> {
    let step = forward.begin(device, parts).unwrap();
    let list = forward.whole(&step).unwrap();
    counted(list.iter().map(|cmd| (*cmd.sig(), 1)))
}

#[test]
fn every_family_costs_what_it_runs() {
    for (name, checkpoint) in tiny_variants().into_iter().chain(styled_variants()) {
        let checkpoint = checkpoint.load().unwrap();
        let config = Arc::new(checkpoint.config.clone());
        let device = ReferenceDevice::default();
        let weights = checkpoint.place(&device, &mut |_, _| {}).unwrap();
        let shape = StepShape {
            tokens_max: 96,
            sequences_max: 4,
            blocks: 16,
            block_tokens: BLOCK_TOKENS,
            activations: DType::F32,
            kv: DType::F32,
        };
        let forward = Forward::new(&device, config.clone(), weights, shape).unwrap();
        let cost = config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS);
        let same = |ops: OpCounts, parts: &[StepInput<'_>], what: &str| {
            assert_eq!(counted(ops.into_iter()), submitted(&device, &forward, parts), "{name}: {what}");
        };
        let (pages, ids) = (Vec::from_iter(0..16u32), [1u32; 70]);
        let prompt = |start: u32, tokens: u32| StepInput {
            start,
            tokens: &ids[..tokens as usize],
            pages: &pages[..(start + tokens).div_ceil(BLOCK_TOKENS) as usize],
            draw: Some(DrawInput::GREEDY),
        };
        same(cost.prefill_ops(9, 12, true), &[prompt(9, 12)], "prefill");
        let decode =
            StepInput { start: 20, tokens: &ids[..1], pages: &pages[..3], draw: Some(DrawInput::GREEDY) };
        // as many as a recorded step has rows
        same(cost.decode_ops(4, 4 * 21), &vec![decode.clone(); 4], "decode");
        // with latents, prompts that are expanded: alone, after others, and beside decodes and each other
        let part = |context, tokens| Prefill { context, tokens, last: true };
        let is_expanded = |ops: &OpCounts| {
            ops.iter().any(|(sig, _)| matches!(sig, OpSig::AttnPrefill { kv, .. } if kv.latent.is_none()))
        };
        for (parts, decodes) in [
            (vec![part(0, 70)], 0),
            (vec![part(40, 70)], 0),
            (vec![part(0, 70)], 2),
            (vec![part(0, 24), part(10, 60)], 1),
        ] {
            let ops = cost.step_ops(&parts, decodes, u64::from(decodes) * 21);
            assert!(is_expanded(&ops), "{name}");
            let of = |part: &Prefill| prompt(part.context, part.tokens);
            let inputs: Vec<_> =
                vec![decode.clone(); decodes as usize].into_iter().chain(parts.iter().map(of)).collect();
            same(ops, &inputs, &format!("{decodes} decodes and {parts:?}"));
        }
    }
}
