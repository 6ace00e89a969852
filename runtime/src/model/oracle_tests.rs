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

/// The error of KV with fewer bits, as a share of the spread of logits (docs/results/kv-dtypes.md).
#[test]
fn kv_of_eight_bits_moves_logits_within_what_is_stated() {
    for fixture in fixtures() {
        let checkpoint = Checkpoint::open(&fixture, &ReadFiles).expect("a good checkpoint");
        let golden = golden(&fixture);
        let case = &golden["cases"][0];
        let sequence = [ids(&case["prompt_ids"]), ids(&case["greedy_ids"])].concat();
        let exact = Oracle::new(&checkpoint).logits(&sequence);
        let root_mean_square = |values: &mut dyn Iterator<Item = f64>| {
            (values.map(|v| v * v).sum::<f64>() / exact.len() as f64).sqrt()
        };
        let mean = exact.iter().sum::<f64>() / exact.len() as f64;
        let spread = root_mean_square(&mut exact.iter().map(|logit| logit - mean));
        let error = |dtype| {
            let logits = Oracle::new(&checkpoint).with_kv(dtype).logits(&sequence);
            root_mean_square(&mut logits.iter().zip(&exact).map(|(a, b)| a - b)) / spread
        };
        let errors = DType::KV.map(error);
        let [f32, bf16, _, fp8, int8] = errors;
        let shown = format!("{}: {errors:?}", fixture.display());
        assert!(f32 < 1e-5 && bf16 < 0.02 && fp8 < 0.25 && int8 < 0.06, "{shown}");
        assert!(f32 < bf16 && bf16 < int8 && int8 < fp8, "{shown}");
    }
}
