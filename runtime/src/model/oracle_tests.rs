use super::super::testing::{ReadFiles, fixtures, floats, golden, ids};
use super::*;

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// The golden logits come from transformers' `from_pretrained` in f32, which keeps rope frequencies exact.
#[test]
fn golden_logits_of_the_fixtures() {
    for fixture in fixtures() {
        let checkpoint = Checkpoint::open(&fixture, &ReadFiles).expect("a good checkpoint");
        let oracle = Oracle::new(&checkpoint);
        for case in golden(&fixture)["cases"].as_array().expect("cases") {
            let prompt = ids(&case["prompt_ids"]);
            let sequence = [prompt.clone(), ids(&case["greedy_ids"])].concat();
            let logits = oracle.logits(&sequence); // [tokens, vocab]
            let vocab = checkpoint.config.vocab as usize;
            let first = &logits[(prompt.len() - 1) * vocab..][..vocab];
            let last = &logits[(sequence.len() - 1) * vocab..];
            let text = &case["text"];
            let difference = largest_difference(first, &floats(&case["first_logits"]));
            assert!(difference < 5e-5, "{} {text}: first {difference:e}", fixture.display());
            let difference = largest_difference(last, &floats(&case["last_logits"]));
            assert!(difference < 5e-5, "{} {text}: last {difference:e}", fixture.display());
            assert!(largest_difference(&oracle.last_logits(&sequence), last) < 1e-12);
        }
    }
}
