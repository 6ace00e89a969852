//! The operations that a profile should have to predict the steps of a model.

use super::ModelShape;
use mixfleet_hal::OpSig;
use std::collections::HashSet;

/// Sequences, and keys of each, with which decode attention is measured.
const DECODE: ([u32; 4], [u32; 5]) = ([1, 4, 16, 64], [32, 128, 512, 2048, 8192]);
/// New tokens of a prompt, and keys before them, with which its attention is measured.
const PREFILL: ([u32; 3], [u32; 3]) = ([32, 128, 512], [0, 512, 2048]);
/// Steps of more rows compute logits for fewer.
const LOGITS_MAX: u32 = 64;
/// Of operations that are not products, only every n-th number of rows is measured: their times are smooth.
const SMALL_FACTOR: u32 = 8;

impl ModelShape {
    /// What steps of these numbers of `rows`, in ascending order, submit to a device, each operation once:
    /// products by rows, attention by its own sizes, and the rest at fewer sizes.
    pub fn distinct_ops(&self, rows: &[u32]) -> Vec<OpSig> {
        let is_attention = |sig: &OpSig| {
            matches!(sig, OpSig::AttnDecode { .. } | OpSig::AttnPrefill { .. } | OpSig::AttnMerge { .. })
        };
        let is_product = |sig: &OpSig| {
            matches!(sig, OpSig::Gemm { .. } | OpSig::QuantisedGemm { .. } | OpSig::GroupedGemm { .. })
        };
        let mut ops = Vec::new();
        let mut small = 0;
        for &rows in rows {
            let step = match rows <= LOGITS_MAX {
                true => self.decode_ops(rows, u64::from(rows)),
                false => self.prefill_ops(0, rows, false),
            };
            let with_small = rows >= small;
            if with_small {
                small = rows.saturating_mul(SMALL_FACTOR);
            }
            let kept = |sig: &OpSig| is_product(sig) || with_small && !is_attention(sig);
            ops.extend(step.into_iter().map(|(sig, _)| sig).filter(kept));
        }
        let decodes = DECODE.0.iter().flat_map(|&batch| {
            DECODE.1.iter().map(move |&keys| self.decode_ops(batch, u64::from(batch) * u64::from(keys)))
        });
        let prefills = PREFILL
            .0
            .iter()
            .flat_map(|&tokens| PREFILL.1.iter().map(move |&before| self.prefill_ops(before, tokens, false)));
        for step in decodes.chain(prefills) {
            ops.extend(step.into_iter().map(|(sig, _)| sig).filter(is_attention));
        }
        let mut seen = HashSet::new();
        ops.retain(|sig| seen.insert(*sig));
        ops
    }
}

#[cfg(test)]
mod tests {
    use crate::models::find;
    use mixfleet_hal::{DType, OpSig};
    use std::collections::HashSet;

    const ROWS: [u32; 5] = [1, 8, 9, 64, 512];

    #[test]
    fn every_product_of_a_step_is_there() {
        for name in ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"] {
            let shape = find(name).expect("a known model").shape(DType::Bf16);
            let ops = shape.distinct_ops(&ROWS);
            let known: HashSet<OpSig> = ops.iter().copied().collect();
            assert_eq!(known.len(), ops.len(), "{name}: one is there twice");
            for (sig, _) in shape.prefill_ops(0, 512, false).into_iter().chain(shape.decode_ops(9, 9)) {
                let is_product = matches!(sig, OpSig::Gemm { .. } | OpSig::GroupedGemm { .. });
                assert!(!is_product || known.contains(&sig), "{name}: {}", sig.name());
            }
            let (sequences, keys) = (16, 16 * 2048);
            let attends = |(sig, _): &(OpSig, u64)| matches!(sig, OpSig::AttnDecode { .. });
            assert!(
                shape
                    .decode_ops(sequences, keys)
                    .iter()
                    .filter(|op| attends(op))
                    .all(|op| known.contains(&op.0))
            );
            assert!(ops.iter().any(|sig| matches!(sig, OpSig::RmsNorm { .. })), "{name}: the rest");
        }
    }
}
