//! Pages of parts of the layers, so that layers with a window keep no more than it.
//!
//! Layers of one window are a group, and a group is divided into parts of as many layers as all others have.
//! A block of a sequence is one page of each part. Pages of all parts have equal bytes and come from the same
//! memory: what one part gives back, any other takes.

use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ops::Range;

/// Stands for a page that a sequence has no longer, or never had, since no later token reads it.
pub const NO_PAGE: u32 = u32::MAX;

/// A step names the pages of each part, so that a model that would be in more parts is in one.
const PARTS_MAX: usize = 8;

/// The pages of a block: the window of each part of the layers; parts without one come first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Option<u32>>", into = "Vec<Option<u32>>")]
pub struct PageParts {
    windows: Cow<'static, [Option<u32>]>,
}

/// Which pages a layer's KV is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPages {
    /// The parts.
    pub parts: PageParts,
    /// For each layer its part, and its place among that part's layers.
    pub layers: Vec<(u32, u32)>,
}

impl PageParts {
    /// A block is a page of all layers, and kept as long as its sequence.
    pub const ONE: PageParts = PageParts { windows: Cow::Borrowed(&[None]) };

    /// Number of pages of a block.
    pub fn count(&self) -> u32 {
        to_u32(self.windows.len())
    }

    /// The window of each part.
    pub fn windows(&self) -> &[Option<u32>] {
        &self.windows
    }

    /// Whether blocks are given back before their sequence ends.
    pub fn lets_go(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }

    /// The tokens whose keys each part still holds of a sequence of `tokens` tokens, once these are computed:
    /// from the block in which the window of the next token begins.
    pub fn kept(&self, tokens: u64, block_tokens: u32) -> impl Iterator<Item = Range<u64>> {
        self.windows.iter().map(move |&window| {
            first_kept(window, tokens, block_tokens) * u64::from(block_tokens.max(1))..tokens
        })
    }

    /// Number of the `computed` tokens of a prompt of `prompt` tokens that are sent to a decode instance with
    /// such pages: as many tokens of all layers.
    pub fn tokens_sent(&self, computed: &Range<u64>, prompt: u64, block_tokens: u32) -> f64 {
        let sent =
            |kept: Range<u64>| kept.end.min(computed.end).saturating_sub(kept.start.max(computed.start));
        self.kept(prompt, block_tokens).map(sent).sum::<u64>() as f64 / f64::from(self.count())
    }

    /// Pages that a sequence of `tokens` computed tokens holds, in blocks of this many tokens.
    pub fn pages_held(&self, tokens: u64, block_tokens: u32) -> u64 {
        let block = u64::from(block_tokens.max(1));
        self.kept(tokens, block_tokens).map(|kept| kept.end.div_ceil(block) - kept.start / block).sum()
    }

    /// The same as tokens of whole blocks that would take as many pages.
    pub fn block_tokens_held(&self, tokens: u64, block_tokens: u32) -> u64 {
        let pages = self.pages_held(tokens, block_tokens);
        (pages * u64::from(block_tokens.max(1))).div_ceil(u64::from(self.count()))
    }

    /// Tokens that would take as much memory in all layers as a sequence of `tokens` does, had it a part of
    /// its last block.
    pub fn tokens_held(&self, tokens: u64, block_tokens: u32) -> u64 {
        let kept: u64 = self.kept(tokens, block_tokens).map(|kept| kept.end - kept.start).sum();
        kept.div_ceil(u64::from(self.count()))
    }
}

impl Default for PageParts {
    fn default() -> Self {
        PageParts::ONE
    }
}

impl TryFrom<Vec<Option<u32>>> for PageParts {
    type Error = String;

    fn try_from(windows: Vec<Option<u32>>) -> Result<Self, String> {
        match windows.len() {
            1..=PARTS_MAX => Ok(PageParts { windows: windows.into() }),
            parts => Err(format!("{parts} parts of the layers; there are 1 to {PARTS_MAX}")),
        }
    }
}

impl From<PageParts> for Vec<Option<u32>> {
    fn from(parts: PageParts) -> Self {
        parts.windows.into_owned()
    }
}

impl LayerPages {
    /// All layers in one page, kept as long as their sequence.
    pub fn whole(layers: u32) -> Self {
        LayerPages { parts: PageParts::ONE, layers: (0..layers).map(|layer| (0, layer)).collect() }
    }

    /// The parts of layers with these windows, of sequences of up to `context_max` tokens.
    pub fn of(windows: &[Option<u32>], context_max: u32) -> Self {
        let own: Vec<Option<u32>> =
            windows.iter().map(|window| window.filter(|&window| window < context_max)).collect();
        let mut groups = own.clone();
        groups.sort_unstable();
        groups.dedup();
        let sizes: Vec<usize> =
            groups.iter().map(|group| own.iter().filter(|window| *window == group).count()).collect();
        let part_layers = sizes.iter().copied().fold(0, greatest_divisor);
        if part_layers == 0 || own.len() / part_layers > PARTS_MAX {
            return LayerPages::whole(to_u32(windows.len()));
        }
        let mut layers = vec![(0, 0); own.len()];
        let mut parts = Vec::new();
        for (&group, size) in groups.iter().zip(sizes) {
            let (first, count) = (parts.len(), size / part_layers);
            let its = layers.iter_mut().zip(&own).filter(|(_, window)| **window == group);
            for (at, (layer, _)) in its.enumerate() {
                *layer = (to_u32(first + at % count), to_u32(at / count));
            }
            parts.extend(std::iter::repeat_n(group, count));
        }
        LayerPages { parts: PageParts { windows: parts.into() }, layers }
    }

    /// The first token whose keys a layer still holds of a sequence of `tokens` tokens.
    pub fn first_kept(&self, layer: u32, tokens: u32, block_tokens: u32) -> u32 {
        let part = self.layers.get(layer as usize).map_or(0, |(part, _)| *part);
        let kept = self.parts.kept(tokens.into(), block_tokens).nth(part as usize);
        kept.map_or(0, |kept| to_u32(kept.start))
    }

    /// Keys that the layers together hold of a sequence of `tokens` tokens, one for each token and layer: the
    /// amount sent to an instance that continues it.
    pub fn layer_tokens_held(&self, tokens: u64, block_tokens: u32) -> u64 {
        let kept: u64 = self.parts.kept(tokens, block_tokens).map(|kept| kept.end - kept.start).sum();
        kept * u64::from(self.part_layers())
    }

    /// Layers of a part.
    pub fn part_layers(&self) -> u32 {
        to_u32(self.layers.len()) / self.parts.count()
    }

    /// Keys in a page of this many tokens, one for each token in each of the part's layers.
    pub fn page_layer_tokens(&self, block_tokens: u32) -> u64 {
        u64::from(self.part_layers()) * u64::from(block_tokens)
    }
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

/// The first block that a token at `computed`, or a later one, reads through a window.
pub(crate) fn first_kept(window: Option<u32>, computed: u64, block_tokens: u32) -> u64 {
    let before = |window: u32| (computed + 1).saturating_sub(u64::from(window.max(1)));
    window.map_or(0, |window| before(window) / u64::from(block_tokens.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Option<u32> = None;
    const W: Option<u32> = Some(128);

    #[test]
    fn parts_have_equal_numbers_of_layers_of_one_window() {
        let parts = |windows: &[Option<u32>]| {
            let pages = LayerPages::of(windows, 1000);
            (pages.parts.windows().to_vec(), pages.layers)
        };
        assert_eq!(parts(&[FULL; 3]), (vec![FULL], vec![(0, 0), (0, 1), (0, 2)]));
        assert_eq!(parts(&[W, FULL, W, FULL]), (vec![FULL, W], vec![(1, 0), (0, 0), (1, 1), (0, 1)]));
        assert_eq!(parts(&[W, W, FULL]), (vec![FULL, W, W], vec![(1, 0), (2, 0), (0, 0)]));
        assert_eq!(parts(&[W; 2]), (vec![W], vec![(0, 0), (0, 1)]));
        // a window as long as the context is none, and one layer among many is not worth separate pages
        assert_eq!(parts(&[Some(1000), FULL]).0, [FULL]);
        assert_eq!(parts(&[vec![W; 8], vec![FULL]].concat()).0, [FULL]);
    }

    #[test]
    fn what_is_held_is_the_window_and_up_to_a_block_more() {
        let pages = LayerPages::of(&[W, FULL], 1 << 20);
        assert_eq!(pages.parts.pages_held(16, 16), 2);
        assert_eq!(pages.parts.pages_held(8192, 16), 512 + 8);
        for tokens in 1..1000u64 {
            let held = pages.parts.pages_held(tokens, 16) - tokens.div_ceil(16);
            assert!(held * 16 <= (tokens + 15).min(128 + 2 * 16), "{tokens}");
            // the next token sees 127 before it
            assert!(held * 16 >= tokens.min(127), "{tokens}");
            let as_tokens = pages.parts.block_tokens_held(tokens, 16);
            assert_eq!(as_tokens, (held + tokens.div_ceil(16)) * 8);
            assert!((as_tokens - 16..=as_tokens).contains(&pages.parts.tokens_held(tokens, 16)), "{tokens}");
        }
        assert_eq!(PageParts::ONE.tokens_held(17, 16), 17);
        assert_eq!(PageParts::ONE.block_tokens_held(17, 16), 32);
    }
}
