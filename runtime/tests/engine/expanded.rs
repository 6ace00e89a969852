//! Prompts over latents give the same results with attention to latents and with expanded keys and values.

use mixfleet_hal::{Cmd, DType, Device, OpSig, Queue};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::variants::tiny_variants;
use std::sync::Arc;
use std::time::Duration;

const BLOCK_TOKENS: u32 = 8;
/// Tokens of each of two sequences.
const TOKENS: usize = 120;

/// A model on the reference device, with two sequences in pages of no order.
struct Run {
    device: ReferenceDevice,
    queue: Box<dyn Queue>,
    forward: Forward,
    pages: [Vec<u32>; 2],
}

impl Run {
    fn new(checkpoint: &Checkpoint) -> Self {
        let device = ReferenceDevice::default();
        let weights = checkpoint.place(&device, &mut |_, _| {}).unwrap();
        let blocks = 2 * (TOKENS as u32).div_ceil(BLOCK_TOKENS);
        let shape = StepShape {
            tokens_max: 2 * TOKENS as u32,
            sequences_max: 2,
            blocks,
            block_tokens: BLOCK_TOKENS,
            activations: DType::F32,
            kv: DType::F32,
        };
        let forward = Forward::new(&device, Arc::new(checkpoint.config.clone()), weights, shape).unwrap();
        let own = |first: u32| (first..blocks).step_by(2).rev().collect();
        Run { queue: device.queue().unwrap(), device, forward, pages: [own(0), own(1)] }
    }

    /// Runs a step of parts of the sequences, each by its number, first token and end. Gives the logits of
    /// each and whether prompts were expanded.
    fn step(&mut self, tokens: &[Vec<u32>; 2], parts: &[(usize, usize, usize)]) -> (Vec<Vec<f32>>, bool) {
        let input = |&(sequence, start, end): &(usize, usize, usize)| StepInput {
            start: start as u32,
            tokens: &tokens[sequence][start..end],
            pages: &self.pages[sequence][..end.div_ceil(BLOCK_TOKENS as usize)],
            draw: Some(DrawInput::GREEDY),
        };
        let inputs: Vec<_> = parts.iter().map(input).collect();
        let pass = self.forward.begin(&self.device, &inputs).unwrap();
        let list = self.forward.whole(&pass).unwrap();
        let ticket = self.queue.submit(&list).unwrap();
        self.queue.wait(ticket, Duration::from_secs(60)).unwrap();
        let vocab = self.forward.config().vocab as usize;
        let mut logits = vec![0f32; parts.len() * vocab];
        self.device.read(&self.forward.logits(&pass), bytemuck::cast_slice_mut(&mut logits)).unwrap();
        (logits.chunks(vocab).map(<[f32]>::to_vec).collect(), is_expanded(&list))
    }
}

fn is_expanded(list: &[Cmd]) -> bool {
    list.iter().any(|cmd| matches!(cmd.sig(), OpSig::AttnPrefill { kv, .. } if kv.latent.is_none()))
}

/// The same model, whose prompts attend to latents.
fn absorbing(mut checkpoint: Checkpoint) -> Checkpoint {
    checkpoint.config.latent.as_mut().unwrap().lengths.expanded_tokens = 0;
    checkpoint
}

/// A first-order, norm-wise bound on the difference of a logit between two ways to compute it in f32, as that
/// of the golden tests in bf16. The device rounds what an operation writes and nothing in between. On the way
/// to the residual stream of a layer these are at most 16 in either way: norm; q's latent, its norm, q and
/// its rotation; the key's latent, its norm and rotation; absorbed the lifted query, what it attended to and
/// its value, expanded the scaled latent, key, value and what was attended to; the second norm, gate, up and
/// product; and the final norm's output once. Taken as independent and of relative size u = 2^-24, they make
/// the two final hidden vectors differ by about u sqrt(2 (16 L + 1)), and logit i by at most |w_i| |h| times
/// that, by Cauchy and Schwarz, which is pessimistic by about sqrt(hidden): room for what first order leaves
/// out.
fn bound(checkpoint: &Checkpoint) -> Vec<f64> {
    let config = &checkpoint.config;
    let norm = checkpoint.values("model.norm.weight").unwrap();
    let hidden = f64::from(config.hidden).sqrt() * norm.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
    let relative = DType::F32.unit_roundoff() * f64::from(2 * (16 * config.layers + 1)).sqrt();
    let rows = checkpoint.values("lm_head.weight").unwrap();
    let norm_of = |row: &[f64]| row.iter().map(|w| w * w).sum::<f64>().sqrt();
    rows.chunks(config.hidden as usize).map(|row| norm_of(row) * hidden * relative).collect()
}

#[test]
fn prompts_give_the_same_over_latents_and_over_keys_made_of_them() {
    let mut largest = 0.0f64;
    let latent = tiny_variants().into_iter().filter(|(_, random)| random.config.contains_key("kv_lora_rank"));
    for (seed, (name, random)) in (1u32..).zip(latent) {
        let checkpoint = random.load().unwrap();
        let (bound, vocab) = (bound(&checkpoint), checkpoint.config.vocab);
        let made = |first: u32| (0..TOKENS as u32).map(move |i| (i * 7 + first * seed) % vocab).collect();
        let tokens: [Vec<u32>; 2] = [made(3), made(11)];
        let mut runs = [Run::new(&checkpoint), Run::new(&absorbing(random.load().unwrap()))];
        let mut ways = Vec::new();
        // a whole prompt, one beside a decode, short chunks after either, another prompt in chunks of which
        // the second is long, two prompts at once
        for parts in [
            &[(0, 0, 64)][..],
            &[(0, 64, 65), (1, 0, 70)],
            &[(0, 65, 69)],
            &[(1, 70, 73), (0, 69, 71)],
            &[(0, 71, 72), (1, 73, 120)],
            &[(1, 0, 50)],
            &[(0, 72, 73), (1, 50, 120)],
            &[(0, 0, 60), (1, 0, 61)],
        ] {
            let [(expanded, is_made), (absorbed, is_made_there)] =
                runs.each_mut().map(|run| run.step(&tokens, parts));
            assert!(!is_made_there, "{name}: {parts:?}");
            ways.push(is_made);
            for (one, other) in expanded.iter().zip(&absorbed) {
                for (i, (a, b)) in one.iter().zip(other).enumerate() {
                    let error = f64::from((a - b).abs());
                    largest = largest.max(error / bound[i]);
                    assert!(error <= bound[i], "{name}: {parts:?}: logit {i}: {error:e}, not {:e}", bound[i]);
                }
            }
        }
        let expected = [true, true, false, false, false, true, true, true];
        assert_eq!(ways, expected, "{name}: which steps are expanded");
    }
    println!("largest difference / bound {largest:.3}");
    assert!(largest > 0.0, "nothing was compared");
}
