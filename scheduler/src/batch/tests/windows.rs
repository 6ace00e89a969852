//! Layers with a window, which give pages back.

use super::*;

/// Where a token lies in a part of the layers.
pub(super) fn slot(pages: &[u32], parts: &PageParts, token: u32, part: u32) -> (u32, u32) {
    let page = pages[(token / LIMITS.block_tokens * parts.count() + part) as usize];
    assert_ne!(page, NO_PAGE, "token {token} is read or written, and its page is gone");
    (page, token % LIMITS.block_tokens)
}

/// Parts of layers with windows, and of layers without.
pub(in super::super) fn windowed(seed: u64) -> PageParts {
    let layers: [&[Option<u32>]; 6] = [
        &[None],
        &[None, Some(6)],
        &[Some(9)],
        &[None, Some(1), Some(4)],
        &[Some(5), None, Some(5)],
        &[Some(3), Some(8)],
    ];
    LayerPages::of(layers[(seed / 2 % 6) as usize], 1000).parts
}

#[test]
fn a_sequence_holds_its_windows_and_up_to_a_block_more_and_in_the_end_nothing() {
    for seed in 0..12 {
        let page_parts = windowed(seed);
        let mut driver = Driver::new(BatchLimits { page_parts: page_parts.clone(), ..LIMITS });
        driver.add(1, (0..29).collect(), 30, After::Decode);
        let mut decoded = 0;
        while driver.turn() {
            let pages = driver.machine.pages(1);
            let held = pages.iter().filter(|&&page| page != NO_PAGE).count();
            assert_eq!(driver.machine.blocks.pages_used(), held, "{page_parts:?}");
            let Some(sequence) = driver.machine.sequences.get(1).filter(|s| s.pending() == 1) else {
                continue;
            };
            let expected = page_parts.pages_held(sequence.computed, LIMITS.block_tokens);
            assert_eq!(held as u64, expected, "{page_parts:?} after {} tokens", sequence.computed);
            decoded += 1;
        }
        assert_eq!((decoded, driver.machine.blocks.pages_used()), (29, 0));
    }
}

#[test]
fn a_prefix_is_found_up_to_where_all_layers_have_what_is_read_behind_it() {
    for seed in 0..12 {
        let page_parts = windowed(seed);
        let mut driver = Driver::new(BatchLimits { page_parts: page_parts.clone(), ..LIMITS });
        let prompt: Vec<u32> = (0..29).collect();
        for (request, cached) in [(1, 0), (2, 28)] {
            driver.tokens_cached = 0;
            driver.add(request, prompt.clone(), 20, After::Decode);
            while driver.turn() {}
            assert_eq!(driver.tokens_cached, cached, "{page_parts:?}");
        }
        // without the last block of a part the prefix is shorter for all
        let blocks = &mut driver.machine.blocks;
        let whole = blocks.whole_prefix(&mut text(prompt.clone()), 7);
        let missed: Vec<u32> = blocks.longest_prefix(&mut text(prompt[..27].to_vec()), 6);
        assert!(missed.len() as u32 <= 6 * page_parts.count());
        assert!(whole.iter().all(|&page| page != NO_PAGE), "a hand-off sends all of it");
    }
}
