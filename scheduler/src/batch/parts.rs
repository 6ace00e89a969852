//! Pages of parts of the layers, so that layers with a window keep no more than it.
//!
//! Layers of one window are a group, and a group is divided into parts of as many layers as all others have.
//! A block of a sequence is one page of each part. Pages of all parts have equal bytes and come from the same
//! memory: what one part gives back, any other takes.

use super::{BlockPool, Instance, RequestId, Sequence, Text};
use mixfleet_hal::cast::to_u32;
use std::borrow::Cow;

/// Stands for a page that a sequence has no longer, or never had, since no later token reads it.
pub const NO_PAGE: u32 = u32::MAX;

/// A step names the pages of each part, so that a model that would be in more parts is in one.
const PARTS_MAX: usize = 8;

/// The pages of a block: the window of each part of the layers; parts without one come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageParts {
    windows: Cow<'static, [Option<u32>]>,
}

/// Which pages a layer's KV is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerPages {
    /// The parts.
    pub parts: PageParts,
    /// For each layer its part, and its place among the layers of it.
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

    /// Pages that a sequence of `tokens` tokens holds once they are computed, in blocks of so many tokens.
    pub fn pages_held(&self, tokens: u32, block_tokens: u32) -> u64 {
        let blocks = tokens.div_ceil(block_tokens);
        let held = |&window: &Option<u32>| u64::from(blocks - first_kept(window, tokens, block_tokens));
        self.windows.iter().map(held).sum()
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

    /// Layers of a part.
    pub fn part_layers(&self) -> u32 {
        to_u32(self.layers.len()) / self.parts.count()
    }
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

/// The first block that a token at `computed`, or a later one, reads through a window.
pub(super) fn first_kept(window: Option<u32>, computed: u32, block_tokens: u32) -> u32 {
    window.map_or(0, |window| (computed + 1).saturating_sub(window.max(1)) / block_tokens)
}

/// Gives back the pages of a sequence that no later token of it reads, the first ones first.
pub(super) fn let_go<T: Text>(blocks: &mut BlockPool<T::Block>, sequence: &mut Sequence<T>) {
    if !blocks.parts().lets_go() {
        return;
    }
    let (block_tokens, count) = (blocks.block_tokens(), blocks.parts().count() as usize);
    for part in 0..count {
        let window = blocks.parts().windows()[part];
        let until = first_kept(window, sequence.computed, block_tokens) as usize;
        let until = until.min(sequence.pages.len() / count);
        let gone_before = |&block: &usize| sequence.pages[block * count + part] == NO_PAGE;
        let from = (0..until).rev().find(gone_before).map_or(0, |block| block + 1);
        for block in from..until {
            let page = std::mem::replace(&mut sequence.pages[block * count + part], NO_PAGE);
            blocks.release(page);
        }
    }
}

impl<T: Text> Instance<T> {
    /// Gives back what a sequence that runs reads no longer. Who hands its KV off sends all of it.
    pub(super) fn give_back(&mut self, request: RequestId) {
        if let Some(sequence) = self.sequences.get_mut(request)
            && sequence.preemptable()
        {
            let_go(&mut self.blocks, sequence);
        }
    }
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
        // what is never left is no window, and one layer among many is not worth a page for each
        assert_eq!(parts(&[Some(1000), FULL]).0, [FULL]);
        assert_eq!(parts(&[vec![W; 8], vec![FULL]].concat()).0, [FULL]);
    }

    #[test]
    fn what_is_held_is_the_window_and_up_to_a_block_more() {
        let pages = LayerPages::of(&[W, FULL], 1 << 20);
        assert_eq!(pages.parts.pages_held(16, 16), 2);
        assert_eq!(pages.parts.pages_held(8192, 16), 512 + 8);
        for tokens in 1..1000 {
            let held = pages.parts.pages_held(tokens, 16) - u64::from(tokens.div_ceil(16));
            assert!(held * 16 <= u64::from((tokens + 15).min(128 + 2 * 16)), "{tokens}");
            // the next token sees 127 before it
            let seen = u64::from(tokens.min(127));
            assert!(held * 16 >= seen, "{tokens}");
        }
    }
}
