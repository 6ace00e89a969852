//! The keys that the queries of a step reach through a window.

use super::graph::StepInput;
use mixfleet_hal::cast::to_u32;

/// Keys read by decodes, and pairs and keys of prefills, in a layer.
#[derive(Clone, Copy, Default)]
pub(super) struct KvSizes {
    pub(super) decode_tokens: u64,
    pub(super) prefill_pairs: u64,
    pub(super) prefill_tokens: u64,
}

impl KvSizes {
    pub(super) fn of(decode: &[StepInput<'_>], prefill: &[StepInput<'_>], window: Option<u32>) -> Self {
        let mut kv = KvSizes::default();
        for part in decode {
            kv.decode_tokens += visible(part.start, window);
        }
        for part in prefill {
            let new = to_u32(part.tokens.len());
            kv.prefill_pairs += (0..new).map(|i| visible(part.start + i, window)).sum::<u64>();
            kv.prefill_tokens += visible(part.start, window) - 1 + u64::from(new);
        }
        kv
    }
}

/// Number of keys that the query at `position` attends to.
pub(super) fn visible(position: u32, window: Option<u32>) -> u64 {
    u64::from(window.unwrap_or(u32::MAX).min(position + 1))
}
