//! Limits of a step, and a sequence's part in it.

use super::ModelConfig;
use super::draws::DrawInput;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, KvShape};
use mixfleet_scheduler::layers::Prefill;

/// The maximum size of a step, and its dtypes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Maximum number of new tokens in a step.
    pub tokens_max: u32,
    /// Maximum number of sequences in a step.
    pub sequences_max: u32,
    /// Number of KV blocks of the instance.
    pub blocks: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of the KV pools.
    pub kv: DType,
}

impl StepShape {
    /// The largest step of the second of two batches, which has half of the sequences and no prompts; none if
    /// it cannot be halved.
    pub fn of_second_batch(&self) -> Option<StepShape> {
        let sequences = self.sequences_max / 2;
        (sequences > 0).then_some(StepShape { tokens_max: sequences, sequences_max: sequences, ..*self })
    }

    /// The KV layout of a model in these pages.
    pub fn kv_shape(&self, config: &ModelConfig) -> KvShape {
        config.kv_shape(self.block_tokens, self.kv)
    }
}

/// One sequence's part in a step.
#[derive(Clone, Debug)]
pub struct StepInput<'a> {
    /// Number of tokens whose KV is computed already.
    pub start: u32,
    /// New tokens.
    pub tokens: &'a [u32],
    /// Block table for `start` and `tokens` together, with a page for each part of the layers.
    pub pages: &'a [u32],
    /// Parameters of drawing the token after the last new one; none if it is known or not needed.
    pub draw: Option<DrawInput<'a>>,
}

impl StepInput<'_> {
    /// The part as a piece of a prompt.
    pub(super) fn prefill(&self) -> Prefill {
        Prefill { context: self.start, tokens: to_u32(self.tokens.len()), last: self.draw.is_some() }
    }
}
