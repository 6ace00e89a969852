//! The token-layers of a prompt that have landed, each counted once.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of landed tokens by layer.
pub(super) struct Coverage {
    /// End by first token, for ranges that neither touch nor overlap.
    layers: Vec<BTreeMap<u32, u32>>,
    token_layers: u64,
}

impl Coverage {
    pub(super) fn new(layers: u32) -> Self {
        Coverage { layers: vec![BTreeMap::new(); layers as usize], token_layers: 0 }
    }

    /// Number of token-layers that landed.
    pub(super) fn token_layers(&self) -> u64 {
        self.token_layers
    }

    /// Whether all of `tokens` landed in `layer`.
    pub(super) fn has(&self, layer: u32, tokens: &Range<u32>) -> bool {
        let before = self.layers[layer as usize].range(..=tokens.start).next_back();
        before.is_some_and(|(_, &end)| end >= tokens.end)
    }

    /// Records landed tokens; some may have landed before.
    pub(super) fn add(&mut self, layer: u32, tokens: Range<u32>) {
        let ranges = &mut self.layers[layer as usize];
        let Range { mut start, mut end } = tokens;
        // The range is joined with all ranges that it touches.
        while let Some((&first, &last)) = ranges.range(..=end).next_back().filter(|(_, last)| **last >= start)
        {
            ranges.remove(&first);
            self.token_layers -= u64::from(last - first);
            (start, end) = (start.min(first), end.max(last));
        }
        ranges.insert(start, end);
        self.token_layers += u64::from(end - start);
        debug_assert_eq!(self.token_layers, self.counted(), "what landed is counted once");
    }

    fn counted(&self) -> u64 {
        self.layers.iter().flatten().map(|(first, end)| u64::from(end - first)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn each_token_of_a_layer_counts_once(pieces in prop::collection::vec((0u32..3, 0u32..40, 1u32..12), 0..40)) {
            let (mut coverage, mut naive) = (Coverage::new(3), BTreeSet::new());
            for (layer, first, tokens) in pieces {
                let range = first..first + tokens;
                let all = range.clone().all(|token| naive.contains(&(layer, token)));
                prop_assert_eq!(coverage.has(layer, &range), all);
                coverage.add(layer, range.clone());
                naive.extend(range.map(|token| (layer, token)));
                prop_assert_eq!(coverage.token_layers(), naive.len() as u64);
            }
        }
    }
}
