//! Chunked pipeline parallelism (Mooncake, FAST'25, section 5.1): an instance whose devices form stages, each
//! with an equal share of the layers. A long prompt runs through them in chunks, several of which are in
//! flight at a time.
//!
//! Chunks that pass in order through stages with the same time c_i for chunk i are a permutation flow shop of
//! identical machines: the last chunk leaves the last stage after `sum c_i + (stages - 1) max c_i`. A hop of
//! activations to the next stage overlaps with neighbouring chunks, except for the hops of the bottleneck
//! chunk:
//!
//! ```text
//! prefill = sum c_i + (stages - 1) max (c_i + h_i)
//! ```
//!
//! with the hop h_i of chunk i. This equals the simulated flow shop as long as no hop takes longer than its
//! chunk's computation; otherwise the longer of the two counts in the sum, and the formula is an upper bound.

use super::{CostModel, LinkCost, Prefill};
use mixfleet_hal::units::{Bytes, Seconds};
use serde::{Deserialize, Serialize};

/// Consecutive pipeline stages with equal shares of a model's layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineCost {
    /// The cost of steps if one stage had all layers.
    pub whole: CostModel,
    /// Number of stages, at least 1. Each has the same share of the layers; the work of only the first or the
    /// last counts as spread over all.
    pub stages: u32,
    /// Prompt tokens of a chunk, at least 1.
    pub chunk_tokens: u32,
    /// Bytes of a token's activations between layers.
    pub hop: LinkCost,
    /// Activations of a token between layers.
    pub bytes_per_token: f64,
}

impl PipelineCost {
    /// Time to compute a prompt's rest alone; see [`CostModel::prefill_s`].
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let chunk_tokens = self.chunk_tokens.max(1);
        let chunks = (0..new_tokens.div_ceil(chunk_tokens)).map(|index| {
            let done = index * chunk_tokens;
            let tokens = chunk_tokens.min(new_tokens - done);
            let part = Prefill { context: context_before + done, tokens, last: done + tokens == new_tokens };
            (self.stage_s(&[part]), self.hop_s(tokens))
        });
        through(self.stages, chunks)
    }

    /// Time of a step that passes through the stages alone: each stage waits for the previous one, so nothing
    /// is gained over one stage, and the hops are added.
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        self.whole.step_s(parts, batch, kv_tokens) + self.hop_s(rows) * f64::from(self.stages.max(1) - 1)
    }

    fn stage_s(&self, parts: &[Prefill]) -> Seconds {
        self.whole.step_s(parts, 0, 0) * (1.0 / f64::from(self.stages.max(1)))
    }

    fn hop_s(&self, rows: u32) -> Seconds {
        self.hop.time(Bytes(f64::from(rows) * self.bytes_per_token))
    }
}

/// The time at which the last chunk is done, from the chunks' times in a stage and on a hop.
fn through(stages: u32, chunks: impl Iterator<Item = (Seconds, Seconds)>) -> Seconds {
    let (mut sum, mut longest) = (Seconds::ZERO, Seconds::ZERO);
    for (stage, hop) in chunks {
        sum += if stages > 1 { stage.max(hop) } else { stage };
        longest = longest.max(stage + hop);
    }
    sum + longest * f64::from(stages.max(1) - 1)
}

#[cfg(test)]
mod tests {
    use super::super::{Coefficients, DecodeCoefficients, PrefillCoefficients};
    use super::*;
    use proptest::prelude::*;

    /// A simulation in which every stage and every hop serves one chunk after the other.
    fn simulated(stages: u32, chunks: &[(f64, f64)]) -> f64 {
        let mut ready = vec![0.0; chunks.len()];
        for machine in 0..2 * stages - 1 {
            let mut free = 0.0f64;
            for (at, &(stage, hop)) in ready.iter_mut().zip(chunks) {
                free = free.max(*at) + if machine % 2 == 0 { stage } else { hop };
                *at = free;
            }
        }
        ready.last().copied().unwrap_or(0.0)
    }

    fn formula(stages: u32, chunks: &[(f64, f64)]) -> f64 {
        through(stages, chunks.iter().map(|&(stage, hop)| (Seconds(stage), Seconds(hop)))).0
    }

    fn cost(stages: u32, seconds_per_byte: f64) -> PipelineCost {
        let prefill_s = PrefillCoefficients { overhead: 0.0, per_token: 1e-4, per_token_squared: 1e-9 };
        let decode_s = DecodeCoefficients { base: 0.02, per_sequence: 1e-4, per_kv_token: 0.0 };
        PipelineCost {
            whole: CostModel::Coefficients(Coefficients { prefill_s, decode_s }),
            stages,
            chunk_tokens: 1000,
            hop: LinkCost { seconds_per_byte, ..LinkCost::default() },
            bytes_per_token: 1e4,
        }
    }

    proptest! {
        #[test]
        fn the_formula_is_the_flow_shop_while_hops_are_short(
            stages in 1u32..9,
            chunks in proptest::collection::vec((0.1..2.0, 0.0..1.0f64), 1..12),
        ) {
            let chunks: Vec<(f64, f64)> = chunks.into_iter().map(|(stage, part): (f64, f64)| (stage, stage * part)).collect();
            let (formula, simulated) = (formula(stages, &chunks), simulated(stages, &chunks));
            prop_assert!((formula - simulated).abs() < 1e-9, "{formula} {simulated}");
        }

        #[test]
        fn with_long_hops_it_is_an_upper_bound_and_at_most_twice_as_much(
            stages in 2u32..9,
            chunks in proptest::collection::vec((0.1..2.0, 0.0..4.0f64), 1..12),
        ) {
            let (formula, simulated) = (formula(stages, &chunks), simulated(stages, &chunks));
            prop_assert!(formula >= simulated - 1e-9, "{formula} {simulated}");
            prop_assert!(formula <= simulated * 2.0 + 1e-9, "{formula} {simulated}");
        }
    }

    #[test]
    fn four_stages_take_nearly_a_quarter_of_a_long_prompt_and_all_of_a_short_one() {
        let (one, four) = (cost(1, 0.0), cost(4, 0.0));
        let whole = CostModel::prefill_s(&one.whole, 0, 100_000);
        assert!((one.prefill_s(0, 100_000) / whole - 1.0).abs() < 1e-9);
        let speedup = whole / four.prefill_s(0, 100_000);
        assert!((3.7..4.0).contains(&speedup), "{speedup}");
        assert!((four.prefill_s(0, 1000) / CostModel::prefill_s(&one.whole, 0, 1000) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn hops_show_once_per_stage_and_a_decode_step_passes_all() {
        // 1000 tokens of 10 kB at 1 GB/s take 10 ms.
        let more = cost(4, 1e-9).prefill_s(0, 8000) - cost(4, 0.0).prefill_s(0, 8000);
        assert!((more.0 - 0.03).abs() < 1e-9, "{more:?}");
        let model = CostModel::Pipeline(cost(4, 1e-9).into());
        assert!((model.decode_step_s(10, 1000).0 - (0.021 + 3.0 * 10.0 * 1e4 * 1e-9)).abs() < 1e-9);
        assert_eq!(model.prefill_s(50, 0), Seconds::ZERO);
    }
}
