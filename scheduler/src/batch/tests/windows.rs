//! Layers with a window, which give pages back.

use super::*;
use crate::cost::ModelShape;
use crate::models::find;

/// The page and slot of a token in a part of the layers.
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
            let expected = page_parts.pages_held(sequence.computed.into(), LIMITS.block_tokens);
            assert_eq!(held as u64, expected, "{page_parts:?} after {} tokens", sequence.computed);
            decoded += 1;
        }
        assert_eq!((decoded, driver.machine.blocks.pages_used()), (29, 0));
    }
}

/// The memory of a sequence has a single formula; the machine, the shape of a model and the fleet's view of
/// an instance agree with it.
#[test]
fn what_is_predicted_to_be_held_is_what_the_machine_holds() {
    let mut random = Stream::new(14);
    let mut let_go = 0;
    for _ in 0..200 {
        let groups: Vec<Option<u32>> = (0..1 + random.below(3))
            .map(|_| (random.below(3) > 0).then(|| 1 + random.below(20) as u32))
            .collect();
        let each = 1 + random.below(3) as usize;
        let windows: Vec<Option<u32>> = groups.iter().cycle().take(groups.len() * each).copied().collect();
        let shape = ModelShape {
            windows,
            page_tokens: LIMITS.block_tokens,
            ..find("llama-3.1-8b").unwrap().shape(DType::Bf16)
        };
        let pages = shape.window_pages();
        let limits = BatchLimits { page_parts: pages.parts.clone(), ..LIMITS };
        let mut driver = Driver::new(limits);
        let (prompt, answer) = (1 + random.below(30) as u32, 2 + random.below(14) as usize);
        driver.add(1, (0..prompt).collect(), answer, After::Decode);
        while driver.turn() {
            let Some(sequence) = driver.machine.sequences.get(1).filter(|s| s.computed >= prompt) else {
                continue;
            };
            let (tokens, held) = (sequence.computed, driver.machine.blocks.pages_used() as u64);
            let page_bytes = pages.page_layer_tokens(LIMITS.block_tokens) * shape.kv_bytes_per_token()
                / u64::from(shape.layers());
            assert_eq!(shape.sequence_bytes(tokens), held * page_bytes, "{:?} {tokens}", shape.windows);
            let of_blocks = u64::from(pages.parts.count());
            let in_tokens = pages.parts.block_tokens_held(tokens.into(), LIMITS.block_tokens);
            assert_eq!(in_tokens, (held * u64::from(LIMITS.block_tokens)).div_ceil(of_blocks));
            let sent = pages.parts.tokens_sent(&(0..tokens.into()), tokens.into(), LIMITS.block_tokens);
            let bytes = sent * shape.kv_bytes_per_token() as f64;
            assert!((bytes - shape.sent_bytes(tokens) as f64).abs() < 0.5, "{:?} {tokens}", shape.windows);
            let_go += u32::from(shape.sequence_bytes(tokens) < shape.whole_sequence_bytes(tokens));
        }
    }
    assert!(let_go > 500, "{let_go}");
}

#[test]
fn what_was_not_sent_of_a_prompt_is_found_by_nobody() {
    for seed in 0..12 {
        let page_parts = windowed(seed);
        let mut machine = Instance::new(BatchLimits { page_parts: page_parts.clone(), ..LIMITS });
        let prompt: Vec<u32> = (0..29).collect();
        let urgency = Urgency::due_at(Seconds::ZERO);
        let mut actions = Vec::new();
        machine.step(Event::Reserve { request: 1, urgency, text: text(prompt.clone()) }, &mut actions);
        machine.step(Event::Idle, &mut actions);
        assert!(matches!(actions[..], [Action::Reserved { tokens_cached: 0, .. }]), "{actions:?}");
        machine.step(Event::Landed { request: 1, tokens_valid: 29, next: true }, &mut actions);
        let found = machine.blocks.whole_prefix(&mut text(prompt), 7).len();
        let expected = if page_parts.lets_go() { 0 } else { 7 };
        assert_eq!(found, expected, "{page_parts:?}");
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
