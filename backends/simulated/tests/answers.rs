//! What a time-only device answers follows from the tokens, the model and the KV that it reads, and
//! from nothing else: not from chunks, pages, batches, dtypes or devices.

use crate::common::{Form, GREEDY, PLAIN, Rig, winner};
use mixfleet_hal::DType;
use mixfleet_hal::random::Stream;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::graph::StepInput;
use mixfleet_runtime::model::variants::tiny_variants;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::LazyLock;

/// Every family: with windows, biases, head norms.
static MODELS: LazyLock<Vec<(&'static str, Checkpoint)>> = LazyLock::new(|| {
    tiny_variants().into_iter().map(|(name, random)| (name, random.load().unwrap())).collect()
});

fn model(at: usize) -> &'static Checkpoint {
    &MODELS[at % MODELS.len()].1
}

fn prompt(length: u32, seed: u64) -> Vec<u32> {
    let mut stream = Stream::new(seed);
    (0..length).map(|_| stream.below(200) as u32).collect()
}

/// Prompt in one piece on a fresh device, then greedy tokens.
fn plainly(checkpoint: &Checkpoint, prompt: &[u32], count: u32) -> (Vec<f32>, Vec<u32>) {
    let mut rig = Rig::new(checkpoint, PLAIN);
    let length = prompt.len() as u32;
    let pages = rig.pages(length + count, 0);
    let logits = rig.prefill(0, prompt, &pages, &[]);
    let tokens = rig.decode(length, &logits, &pages, count);
    (logits, tokens)
}

fn forms() -> impl Strategy<Value = Form> {
    let activations = prop::sample::select(DType::FLOATS.to_vec());
    let kv = prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16, DType::F8E4m3]);
    let block_tokens = prop::sample::select(vec![1, 3, 8, 16]);
    (block_tokens, activations, kv).prop_map(|(block_tokens, activations, kv)| Form {
        block_tokens,
        activations,
        kv,
    })
}

/// Whether KV can be kept so: latents are not kept in eight bits.
fn keeps(checkpoint: &Checkpoint, form: Form) -> bool {
    checkpoint.config.latent.is_none() || !form.kv.is_scaled()
}

/// Whether prompts in parts give what they give as a whole. Prompts over latents are expanded or not by how
/// they are divided, and the answer follows the operations.
fn divides(checkpoint: &Checkpoint) -> bool {
    checkpoint.config.latent.is_none()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn chunks_pages_and_dtypes_change_nothing(
        which in 0..64usize, length in 1..60u32, seed in 0..1000u64, form in forms(),
        chunks in vec(1..20u32, 0..6), salt in 0..50u32,
    ) {
        let (checkpoint, prompt) = (model(which), prompt(length, seed));
        prop_assume!(keeps(checkpoint, form) && (divides(checkpoint) || chunks.is_empty()));
        let (_, want) = plainly(checkpoint, &prompt, 5);
        let mut rig = Rig::new(checkpoint, form);
        let pages = rig.pages(length + 5, salt);
        let logits = rig.prefill(0, &prompt, &pages, &chunks);
        prop_assert_eq!(rig.decode(length, &logits, &pages, 5), want);
    }

    #[test]
    fn decoding_a_known_token_is_prefilling_it(which in 0..64usize, length in 2..50u32, seed in 0..1000u64) {
        let (checkpoint, prompt) = (model(which), prompt(length, seed));
        prop_assume!(divides(checkpoint));
        let (want, _) = plainly(checkpoint, &prompt, 1);
        let mut rig = Rig::new(checkpoint, PLAIN);
        let pages = rig.pages(length, 3);
        prop_assert_eq!(rig.prefill(0, &prompt, &pages, &vec![1; length as usize]), want);
    }

    #[test]
    fn tokens_computed_again_after_a_preemption_are_the_same(
        length in 1..30u32, seed in 0..1000u64, drawn in 1..20u32,
    ) {
        let (checkpoint, prompt) = (model(0), prompt(length, seed));
        let (_, want) = plainly(checkpoint, &prompt, drawn + 4);
        let mut again = prompt.clone();
        again.extend(&want[..drawn as usize]);
        let (_, rest) = plainly(checkpoint, &again, 4);
        prop_assert_eq!(&want[drawn as usize..], &rest[..]);
    }

    #[test]
    fn what_else_is_in_the_batch_changes_nothing(which in 0..64usize, seed in 0..1000u64, length in 2..20u32) {
        let checkpoint = model(which);
        prop_assume!(divides(checkpoint));
        let prompts = [prompt(length, seed), prompt(5, seed + 1), prompt(12, seed + 2)];
        let mut rig = Rig::new(checkpoint, PLAIN);
        let pages: Vec<Vec<u32>> = [0, 10, 20].map(|first| (first..first + 4).collect()).to_vec();
        // the first one decodes its last token beside the prefill of the others
        let (last, before) = prompts[0].split_last().unwrap();
        rig.prefill(0, before, &pages[0], &[]);
        let parts = [
            StepInput { start: length - 1, tokens: std::slice::from_ref(last), pages: &pages[0], draw: GREEDY },
            StepInput { start: 0, tokens: &prompts[1], pages: &pages[1], draw: None },
            StepInput { start: 0, tokens: &prompts[2], pages: &pages[2], draw: GREEDY },
        ];
        let logits = rig.step(&parts);
        prop_assert_eq!(&logits[0], &plainly(checkpoint, &prompts[0], 1).0);
        prop_assert_eq!(&logits[1], &plainly(checkpoint, &prompts[2], 1).0);
    }

    #[test]
    fn kv_on_another_device_gives_the_same_tokens(
        which in 0..64usize, length in 1..50u32, seed in 0..1000u64, here in forms(), there in forms(),
        wire in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]),
    ) {
        let (checkpoint, prompt) = (model(which), prompt(length, seed));
        prop_assume!(keeps(checkpoint, here) && keeps(checkpoint, there));
        let (_, want) = plainly(checkpoint, &prompt, 5);
        let (mut from, mut to) = (Rig::new(checkpoint, here), Rig::new(checkpoint, there));
        let (pages, pages_there) = (from.pages(length, 1), to.pages(length + 5, 2));
        let logits = from.prefill(0, &prompt, &pages, &[]);
        let (slots, slots_there) = (from.slots(&pages, length), to.slots(&pages_there, length));
        for layer in 0..checkpoint.config.layers as usize {
            let data = from.gather(layer, &slots, wire);
            to.scatter(layer, &slots_there, wire, &data);
        }
        prop_assert_eq!(to.decode(length, &logits, &pages_there, 5), want);
    }

    #[test]
    fn any_bit_of_a_visible_slot_counts_and_no_other(
        which in 0..64usize, length in 2..50u32, seed in 0..1000u64, form in forms(),
        layer in 0..8usize, values in any::<bool>(), at in any::<u64>(), bit in 0..8u32,
    ) {
        // not every code of eight bits that differs has another value
        prop_assume!(!form.kv.is_scaled());
        let (checkpoint, prompt) = (model(which), prompt(length, seed));
        let config = &checkpoint.config;
        let layer = layer % config.layers as usize;
        let mut rig = Rig::new(checkpoint, form);
        let pages = rig.pages(length, 2);
        let (last, before) = prompt.split_last().unwrap();
        rig.prefill(0, before, &pages, &[]);
        let last = [StepInput { start: length - 1, tokens: &[*last], pages: &pages, draw: GREEDY }];
        let want = rig.step(&last);
        prop_assert_eq!(&rig.step(&last), &want, "the same step again");

        // the key that is written anew by the step itself is left alone
        let token = at % u64::from(length - 1);
        let visible = config.windows[layer].is_none_or(|window| token + u64::from(window) >= u64::from(length));
        let slot = rig.slots(&pages, length)[token as usize];
        let row = u64::from(config.kv_heads * config.head_dim) * form.kv.size_bytes();
        let (k, v) = &rig.forward.kv_pools()[layer];
        let byte = (if values { v } else { k }).range(u64::from(slot) * row + (at >> 8) % row, 1);
        let old = rig.read(&byte)[0];
        rig.device.write(&byte, &[old ^ (1 << bit)]).unwrap();
        let changed = rig.step(&last);
        prop_assert_eq!(changed != want, visible, "window {:?}, token {}", config.windows[layer], token);
        rig.device.write(&byte, &[old]).unwrap();
        prop_assert_eq!(&rig.step(&last), &want, "the old byte again");
    }

    #[test]
    fn foreign_missing_and_doubled_kv_changes_the_answer(
        which in 0..64usize, seed in 0..1000u64, page in 0..3usize, way in 0..3u32,
    ) {
        let checkpoint = model(which);
        let (mine, theirs) = (prompt(33, seed), prompt(32, seed + 7000));
        let mut rig = Rig::new(checkpoint, PLAIN);
        let (pages, others) = (vec![0, 1, 2, 3, 4], vec![10, 11, 12, 13]);
        rig.prefill(0, &theirs, &others, &[]);
        rig.prefill(0, &mine[..32], &pages, &[]);
        let mut step = |pages: &[u32]| {
            rig.step(&[StepInput { start: 32, tokens: &mine[32..], pages, draw: GREEDY }]).remove(0)
        };
        let want = step(&pages);
        let mut wrong = pages.clone();
        match way {
            0 => wrong[page] = others[page],
            1 => wrong[page] = 20, // never written
            _ => wrong[page] = wrong[page + 1],
        }
        // with windows, tokens before the last few are not read
        let reach = checkpoint.config.windows.iter().map(|w| w.unwrap_or(u32::MAX)).max().unwrap();
        let end = (page as u32 + 1) * 8;
        prop_assert_eq!(step(&wrong) != want, u64::from(end) + u64::from(reach) > 33);
    }
}

#[test]
fn tokens_models_and_positions_all_count() {
    let mut seen = std::collections::HashSet::new();
    let mut winners = std::collections::BTreeSet::new();
    for (name, checkpoint) in MODELS.iter() {
        for seed in 0..20 {
            let (logits, _) = plainly(checkpoint, &prompt(9, seed), 1);
            winners.insert(winner(&logits));
            let bits: Vec<u32> = logits.iter().map(|v| v.to_bits()).collect();
            assert!(seen.insert(bits), "{name}: prompt {seed} gives the logits of another");
        }
        let (same, _) = plainly(checkpoint, &[7, 7, 7, 7], 1);
        let (longer, _) = plainly(checkpoint, &[7, 7, 7, 7, 7], 1);
        assert_ne!(same, longer, "{name}: equal tokens at other positions");
    }
    assert!(winners.len() > 50, "{} different tokens only", winners.len());
}

#[test]
fn a_changed_bit_of_the_kv_changes_nearly_every_token() {
    let checkpoint = model(0);
    let (mut changed, mut tried) = (0, 0);
    for seed in 0..100 {
        let prompt = prompt(20, seed);
        let mut rig = Rig::new(checkpoint, PLAIN);
        let pages = rig.pages(20, 0);
        let want = winner(&rig.prefill(0, &prompt, &pages, &[]));
        let (k, _) = &rig.forward.kv_pools()[0];
        let byte = k.range(seed * 5, 1);
        let old = rig.read(&byte)[0];
        rig.device.write(&byte, &[old ^ 1]).unwrap();
        let last = [StepInput { start: 19, tokens: &prompt[19..], pages: &pages, draw: GREEDY }];
        tried += 1;
        changed += u32::from(winner(&rig.step(&last)[0]) != want);
    }
    // of some 200 tokens one is the same by chance
    assert!(changed >= tried * 95 / 100, "{changed} of {tried}");
}

#[test]
fn rows_of_logits_stay_clear_over_many_steps_of_unlike_sizes() {
    // f32 activations: every projection makes a row that could be logits, and buffers are used again
    for form in [PLAIN, Form { activations: DType::F32, ..PLAIN }] {
        let mut rig = Rig::new(model(1), form);
        let pages: Vec<Vec<u32>> = (0..4).map(|first| (first * 6..first * 6 + 6).collect()).collect();
        for seed in 0..30u64 {
            let prompts: Vec<Vec<u32>> =
                (0..1 + seed % 4).map(|i| prompt(2 + (seed % 9) as u32, seed + i)).collect();
            let parts: Vec<StepInput<'_>> = prompts
                .iter()
                .zip(&pages)
                .map(|(tokens, pages)| StepInput { start: 0, tokens, pages, draw: GREEDY })
                .collect();
            // `step` checks that each row has one clear winner, and that it is drawn
            for (row, prompt) in rig.step(&parts).iter().zip(&prompts) {
                assert_eq!(winner(row), winner(&plainly(model(1), prompt, 1).0));
            }
        }
    }
}
