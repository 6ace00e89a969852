//! Time of operations that reach a device a few at a time, as a share of a step's time.

use super::{CostModel, Prefill};
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;

impl CostModel {
    /// The time of operations of a model with this many layers and logit columns: the time of a step, times
    /// the share of its layers in the operations. Logits take no time, since the time of a step's layers
    /// includes them. `None` for operations without layers or logits.
    ///
    /// Prompts in a step are taken to be of equal length, since operations have their sums alone.
    pub fn of_operations(
        &self,
        operations: impl IntoIterator<Item = OpSig>,
        (layers, vocab): (u32, u32),
    ) -> Option<Seconds> {
        let (mut prompts, mut decodes) = ((0u32, None), (0u32, None));
        let mut has_logits = false;
        for operation in operations {
            match operation {
                OpSig::AttnPrefill { tokens, sequences, kv_tokens, .. } => {
                    prompts = (prompts.0 + 1, Some((tokens, sequences, kv_tokens)));
                }
                OpSig::AttnDecode { sequences, kv_tokens, .. } => {
                    decodes = (decodes.0 + 1, Some((sequences, kv_tokens)));
                }
                OpSig::Gemm { n, .. } => has_logits |= n == vocab,
                _ => {}
            }
        }
        let run = prompts.0.max(decodes.0);
        if run == 0 {
            return has_logits.then_some(Seconds::ZERO);
        }
        let (sequences, keys) = decodes.1.unwrap_or((0, 0));
        let (tokens, count, kv_tokens) = prompts.1.unwrap_or((0, 0, 0));
        let before = kv_tokens.saturating_sub(tokens.into()) as f64 / f64::from(count.max(1));
        let part = |at: u32| Prefill {
            context: to_u32(to_u64(before)),
            tokens: tokens / count + u32::from(at < tokens % count),
            last: false,
        };
        let parts: Vec<Prefill> = (0..count).map(part).filter(|part| part.tokens > 0).collect();
        Some(self.step_s(&parts, sequences, keys) * (f64::from(run) / f64::from(layers.max(1))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{Coefficients, DecodeCoefficients, PrefillCoefficients};
    use mixfleet_hal::{DType, KvShape};

    const KV: KvShape =
        KvShape { kv_heads: 1, head_dim: 8, page_tokens: 16, dtype: DType::Bf16, latent: None };

    fn cost() -> CostModel {
        CostModel::Coefficients(Coefficients {
            prefill_s: PrefillCoefficients { overhead: 0.5, per_token: 0.25, per_token_squared: 0.0 },
            decode_s: DecodeCoefficients { base: 8.0, per_sequence: 1.0, per_kv_token: 0.125 },
        })
    }

    fn decode(sequences: u32, kv_tokens: u64) -> OpSig {
        let (heads, pages_max, x) = (1, 4, DType::Bf16);
        OpSig::AttnDecode { sequences, heads, kv_tokens, pages_max, x, kv: KV, cap: None }
    }

    fn logits(m: u32) -> OpSig {
        let (x, weight, out) = (DType::Bf16, DType::Bf16, DType::F32);
        OpSig::Gemm { m, n: 256, k: 8, x, weight, out, bias: false, accumulate: false }
    }

    #[test]
    fn layers_take_their_share_of_a_step_and_logits_none() {
        let (cost, model) = (cost(), (4, 256));
        let whole = cost.decode_step_s(3, 40);
        assert_eq!(cost.of_operations([decode(3, 40); 4], model), Some(whole));
        assert_eq!(cost.of_operations([decode(3, 40)], model), Some(whole * 0.25));
        assert_eq!(cost.of_operations([logits(3)], model), Some(Seconds::ZERO));
        assert_eq!(cost.of_operations([OpSig::Copy { bytes: 8 }], model), None);
    }
}
