//! The sizes of a step.

use super::ModelShape;
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};

/// A piece of a prompt in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefill {
    /// Tokens before it, whose KV is already computed.
    pub context: u32,
    /// Number of tokens to compute.
    pub tokens: u32,
    /// Whether it is the last chunk of the prompt: its last row goes through the LM head and draws a token.
    pub last: bool,
}

/// The sizes of a step's attention.
#[derive(Clone, Debug, Default)]
pub struct AttentionSizes {
    /// Rows of the step.
    pub tokens: u32,
    /// Rows whose keys and values are written here.
    pub written: u32,
    /// Rows that have one token of a sequence; they come first.
    pub decodes: u32,
    /// The number of leading decodes whose other keys are on other devices.
    pub partial: u32,
    /// Sequences with more tokens.
    pub prefills: u32,
    /// Row length of the block table of decodes.
    pub decode_pages_max: u32,
    /// Row length of the block table of prefills.
    pub prefill_pages_max: u32,
    /// Row length of the block table of expanded keys, if prefills attend to these.
    pub expanded_pages_max: Option<u32>,
    /// For each distinct window of the layers: the keys that are read.
    pub kv: Vec<KvSizes>,
}

/// Keys read by decodes, and pairs and keys of prefills, in a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvSizes {
    /// Keys that decodes read.
    pub decode_tokens: u64,
    /// Pairs of a query and a key that it sees.
    pub prefill_pairs: u64,
    /// Keys that are read at least once.
    pub prefill_tokens: u64,
}

/// Sizes that draws are rounded up to, so that steps share recordings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DrawSizes {
    /// Entries that the history has room for.
    pub history: u32,
    /// Best tokens of a row.
    pub tops: u32,
}

impl AttentionSizes {
    /// The number of leading rows that attend to stored latents; the others attend to expanded keys.
    pub fn lifted(&self) -> u32 {
        if self.expanded_pages_max.is_some() { self.decodes } else { self.tokens }
    }

    /// Of a step of chunks of prompts and one token for each of `batch` sequences with `kv_tokens` keys in
    /// total, of equal length, in layers with these windows.
    pub(crate) fn counted(
        shape: &ModelShape,
        parts: &[Prefill],
        (batch, kv_tokens): (u32, u64),
        windows: impl Iterator<Item = Option<u32>>,
    ) -> Self {
        let pages = |tokens: u64| to_u32(tokens.div_ceil(u64::from(shape.page_tokens.max(1))));
        let of = |part: &Prefill| pages(u64::from(part.context) + u64::from(part.tokens));
        let prefill_pages_max = parts.iter().map(of).max().unwrap_or(0);
        let tokens = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let is_expanded = shape.latent.is_some_and(|latent| latent.expands(parts, shape.page_tokens));
        let kv = windows.map(|window| {
            let reach = window.map_or(kv_tokens, |window| u64::from(window) * u64::from(batch));
            let mut kv = KvSizes { decode_tokens: kv_tokens.min(reach), ..KvSizes::default() };
            parts.iter().for_each(|part| kv.add_prefill(part, window));
            kv
        });
        AttentionSizes {
            tokens,
            written: tokens,
            decodes: batch,
            partial: 0,
            prefills: to_u32(parts.len()),
            decode_pages_max: pages(kv_tokens.div_ceil(u64::from(batch.max(1)))),
            prefill_pages_max,
            expanded_pages_max: is_expanded.then_some(prefill_pages_max),
            kv: kv.collect(),
        }
    }
}

impl KvSizes {
    /// Adds a piece of a prompt in a layer with this window.
    pub fn add_prefill(&mut self, part: &Prefill, window: Option<u32>) {
        let (before, new) = (u64::from(part.context), u64::from(part.tokens));
        self.prefill_pairs += visible_pairs(part.context, part.tokens, window);
        let reach = window.map(|window| u64::from(window) + new.saturating_sub(1));
        self.prefill_tokens += reach.map_or(before + new, |reach| reach.min(before + new));
    }
}

/// Number of keys that the query at `position` attends to.
pub fn visible_keys(position: u32, window: Option<u32>) -> u64 {
    u64::from(window.unwrap_or(u32::MAX).min(position + 1))
}

/// Query-key pairs of a causal chunk: the query at position p attends to min(p + 1, window) keys.
fn visible_pairs(context_before: u32, new_tokens: u32, window: Option<u32>) -> u64 {
    let (before, new) = (u64::from(context_before), u64::from(new_tokens));
    // The sum of p + 1 over the positions below the window's length, plus `window` for each further position.
    let window = window.map_or(u64::MAX, u64::from);
    let growing = window.saturating_sub(before).min(new);
    let pairs = growing * before + growing * (growing + 1) / 2;
    if growing == new { pairs } else { pairs + (new - growing) * window }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pairs_are_counted_right(before in 0u32..50, new in 0u32..50, window in proptest::option::of(1u32..60)) {
            let naive: u64 = (before..before + new).map(|position| visible_keys(position, window)).sum();
            prop_assert_eq!(visible_pairs(before, new, window), naive);
        }
    }
}
