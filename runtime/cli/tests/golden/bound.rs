//! In bf16 logits are within a bound of what they exactly are.

use super::{all_pairs, is_turn_of, logits, open, wgpu};
use crate::common::{devices, fixtures, golden, ids};
use mixfleet_hal::DType;
use mixfleet_runtime::model::{Checkpoint, Oracle};

/// A first-order, norm-wise bound on the logits' error with bf16 activations and KV.
///
/// Per layer eight quantities are rounded to bf16 on the way to the residual stream, which itself is
/// f32: the norm's output, q (with k alike), v, the attention output, the second norm's output, gate,
/// up and their product; and the final norm's output once. Roundings are taken as independent, each of
/// relative size u = 2^-8, so the relative error of the final hidden vector is about u sqrt(8 L + 1).
/// By Cauchy and Schwarz logit i is then off by at most |w_i| |h| u sqrt(8 L + 1), where
/// |h| <= sqrt(hidden) max|norm weight| since h is normalised. Cauchy-Schwarz is pessimistic by about
/// sqrt(hidden), which is the room for what first order leaves out (the softmax's amplification).
fn bf16_bound(checkpoint: &Checkpoint) -> Vec<f64> {
    let config = &checkpoint.config;
    let head = if config.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let norm = checkpoint.values("model.norm.weight").unwrap();
    let hidden_norm = f64::from(config.hidden).sqrt() * norm.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
    let roundings = f64::from(8 * config.layers + 1);
    let relative = DType::Bf16.unit_roundoff() * roundings.sqrt();
    let rows = checkpoint.values(head).unwrap();
    let row_norm = |row: &[f64]| row.iter().map(|w| w * w).sum::<f64>().sqrt();
    rows.chunks(config.hidden as usize).map(|row| row_norm(row) * hidden_norm * relative).collect()
}

#[test]
fn bf16_logits_of_the_fixtures_stay_within_the_bound() {
    let devices: Vec<_> = devices().into_iter().chain(wgpu()).collect();
    let (mut decided, mut ratio_max) = (0, 0.0f64);
    for fixture in fixtures() {
        let checkpoint = open(&fixture);
        if checkpoint.config.experts.is_some() {
            println!(
                "SKIPPED: {}: in bf16 a token may choose other experts, which no bound covers",
                fixture.display()
            );
            continue;
        }
        let vocab = checkpoint.config.vocab as usize;
        let bound = bf16_bound(&checkpoint);
        let oracle = Oracle::new(&checkpoint);
        for (number, case) in golden(&fixture)["cases"].as_array().unwrap().iter().enumerate() {
            let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
            let sequence = [prompt.clone(), greedy.clone()].concat();
            let exact = oracle.logits(&sequence); // [tokens, vocab]
            let turns = devices.iter().enumerate();
            for (_, device) in turns.filter(|(at, _)| is_turn_of(*at, number, devices.len())) {
                let rows = logits(&**device, &checkpoint, &sequence, &[prompt.len()], DType::Bf16);
                for (at, row) in rows.iter().enumerate() {
                    let exact = &exact[(prompt.len() - 1 + at) * vocab..][..vocab];
                    let place = || format!("{} on {}, step {at}", fixture.display(), device.info().id);
                    for i in 0..vocab {
                        let error = (f64::from(row[i]) - exact[i]).abs();
                        ratio_max = ratio_max.max(error / bound[i]);
                        assert!(
                            error <= bound[i],
                            "{}: logit {i} off by {error}, bound {}",
                            place(),
                            bound[i]
                        );
                    }
                    let Some(&expected) = greedy.get(at) else { continue };
                    let expected = expected as usize;
                    let clear =
                        |i: usize| i == expected || exact[expected] - exact[i] > bound[i] + bound[expected];
                    if (0..vocab).all(clear) {
                        decided += 1;
                        let best = (0..vocab).fold(0, |best, i| if row[i] > row[best] { i } else { best });
                        assert_eq!(best, expected, "{}", place());
                    }
                }
            }
        }
    }
    println!("{decided} steps decided by the bound, largest error / bound {ratio_max:.3}");
    let wanted = if all_pairs() { 100 } else { 30 };
    assert!(decided > wanted, "the bound decides only {decided} steps");
}
