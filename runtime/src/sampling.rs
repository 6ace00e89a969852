//! From logits to a token: pure functions, so that a stream of tokens can continue on another machine.
//!
//! Order of processing, as in transformers and vLLM:
//! 1. repetition penalty (over prompt and output), then presence and frequency penalties (over the output),
//!    biases of single tokens, and tokens that are forbidden;
//! 2. at temperature 0 the largest logit wins (the lowest id on a tie) and nothing below matters;
//! 3. division by the temperature;
//! 4. `top_k`, then `top_p` over what is left of the distribution, then `min_p` relative to its best token;
//! 5. one draw, by the counter-based generator at (seed, index of the token in the output).
//!
//! Among equal logits the lower id counts as the better one, in `top_k` and `top_p` as well. Nothing is
//! sorted: each truncation is a threshold found by selection, in linear time over the vocabulary.

use crate::request::{Logprobs, Sampling};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::random::{bits, unit};
use mixfleet_hal::sample::{LOG2_E, Parameters, SCALE_MAX, fraction};
use std::cmp::Ordering;
use std::collections::HashMap;

/// The smallest scale of a temperature above 0.
const SCALE_MIN: f32 = 1e-20;

/// Why no token can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// A logit is NaN or +infinity: the model's output is garbage.
    #[error("the logit of token {0} is not a number")]
    NotFinite(usize),
    /// There are no logits, or all are -infinity.
    #[error("no token is possible")]
    Empty,
}

/// The tokens that precede the one to draw.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    /// The prompt's tokens.
    pub prompt: &'a [u32],
    /// The tokens drawn so far. Their number is the index of the draw.
    pub output: &'a [u32],
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// The token's id, which is the index of its logit.
    pub id: u32,
    /// Log-probabilities, where asked for.
    pub logprobs: Option<Logprobs>,
}

impl Sampling {
    /// What a device needs in order to draw token number `index` of the output.
    pub fn parameters(&self, index: u64, logprobs: bool) -> Parameters {
        // a scale of 0 would be greedy, however hot it is
        let scale = (LOG2_E / self.temperature).clamp(SCALE_MIN, SCALE_MAX);
        Parameters {
            scale: if self.temperature <= 0.0 { 0.0 } else { scale },
            top_k: self.top_k,
            top_p: fraction(self.top_p.into()),
            min_p: self.min_p.clamp(0.0, 1.0),
            repetition: self.repetition_penalty,
            repetition_inverse: 1.0 / self.repetition_penalty,
            uniform: to_u32(bits(self.seed, index) >> 32),
            logprobs: logprobs.into(),
        }
    }
}

/// The tokens whose logits penalties and biases change, kept up to date as tokens are drawn.
#[derive(Debug)]
pub struct Penalties {
    presence: f32,
    frequency: f32,
    bias: HashMap<u32, f32>,
    /// Each token with the bits of the f32 that its logit loses.
    entries: Vec<[u32; 2]>,
    /// Where a token's entry is, and how often the token was drawn.
    counts: HashMap<u32, (usize, u32)>,
    /// Number of drawn tokens that are counted.
    drawn: usize,
}

impl Penalties {
    /// The penalties of a request whose output is empty; none if no logit changes.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Option<Self> {
        let &Sampling { repetition_penalty, presence_penalty, frequency_penalty, ref logit_bias, .. } =
            sampling;
        let over_output = presence_penalty != 0.0 || frequency_penalty != 0.0;
        if repetition_penalty == 1.0 && !over_output && logit_bias.is_empty() {
            return None;
        }
        let mut penalties = Penalties {
            presence: presence_penalty,
            frequency: frequency_penalty,
            bias: logit_bias.iter().copied().collect(),
            entries: Vec::new(),
            counts: HashMap::new(),
            drawn: 0,
        };
        if repetition_penalty != 1.0 {
            prompt.iter().for_each(|&id| penalties.count(id, 0));
        }
        logit_bias.iter().for_each(|&(id, _)| penalties.count(id, 0));
        Some(penalties)
    }

    /// Counts the tokens of `output` that are not counted yet.
    pub fn follow(&mut self, output: &[u32]) {
        for &id in output.iter().skip(self.drawn) {
            self.count(id, 1);
        }
        self.drawn = output.len();
    }

    /// Each token once, with the bits of the f32 that its logit loses after the repetition penalty.
    pub fn entries(&self) -> &[[u32; 2]] {
        &self.entries
    }

    fn count(&mut self, id: u32, more: u32) {
        let (at, count) = self.counts.entry(id).or_insert_with(|| {
            self.entries.push([id, 0]);
            (self.entries.len() - 1, 0)
        });
        *count += more;
        let loss = if *count > 0 { self.presence + self.frequency * *count as f32 } else { 0.0 };
        let bias = self.bias.get(&id).copied().unwrap_or(0.0);
        self.entries[*at][1] = (loss - bias).to_bits();
    }
}

/// Draws the next token from `logits [vocab]`, but none of `forbidden`. `logprobs` requests log-probabilities
/// under the raw distribution: the drawn token's and those of this many best ones.
///
/// # Errors
/// When a logit is NaN or +infinity, or no token has a logit above -infinity.
pub fn sample(
    logits: &[f32],
    sampling: &Sampling,
    history: History<'_>,
    forbidden: &[u32],
    logprobs: Option<u32>,
) -> Result<SampledToken, SamplingError> {
    let best = argmax(logits)?;
    let penalised = penalise(logits, sampling, history, forbidden);
    let id = match &penalised {
        None if sampling.temperature <= 0.0 => best,
        Some(penalised) if sampling.temperature <= 0.0 => argmax(penalised)?,
        penalised => {
            let uniform = unit(sampling.seed, history.output.len() as u64);
            draw(penalised.as_deref().unwrap_or(logits), sampling, uniform)?
        }
    };
    let logprobs = logprobs.map(|top| raw_logprobs(logits, logits[best as usize], id, top as usize));
    Ok(SampledToken { id, logprobs })
}

/// The largest logit's id; the lowest one on a tie.
fn argmax(logits: &[f32]) -> Result<u32, SamplingError> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SamplingError::NotFinite(id));
        }
        if logit > best.map_or(f32::NEG_INFINITY, |(_, best)| best) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| to_u32(id)).ok_or(SamplingError::Empty)
}

/// The logits after penalties and without the forbidden tokens, or `None` if nothing changes.
fn penalise(
    logits: &[f32],
    sampling: &Sampling,
    history: History<'_>,
    forbidden: &[u32],
) -> Option<Vec<f32>> {
    let repetition = sampling.repetition_penalty;
    let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
    let over_output = presence != 0.0 || frequency != 0.0;
    let is_plain = repetition == 1.0 && !over_output && sampling.logit_bias.is_empty();
    if is_plain && forbidden.is_empty() {
        return None;
    }
    let mut counts: HashMap<u32, u32> = HashMap::new();
    if repetition != 1.0 {
        counts.extend(history.prompt.iter().map(|id| (*id, 0)));
    }
    for id in history.output {
        *counts.entry(*id).or_default() += 1;
    }
    let mut penalised = logits.to_vec();
    for (id, count) in counts {
        let Some(logit) = penalised.get_mut(id as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        if count > 0 {
            *logit -= presence + frequency * count as f32;
        }
    }
    for (id, bias) in sampling.logit_bias.iter() {
        if let Some(logit) = penalised.get_mut(*id as usize) {
            *logit += bias;
        }
    }
    for id in forbidden {
        if let Some(logit) = penalised.get_mut(*id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    Some(penalised)
}

/// A token with its logit, ordered with better tokens first.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
}

impl Candidate {
    fn order(&self, other: &Self) -> Ordering {
        other.logit.partial_cmp(&self.logit).unwrap_or(Ordering::Equal).then(self.id.cmp(&other.id))
    }
}

/// Draws from `logits` at a temperature above 0: the first token, by id, at which the cumulated weight
/// of the kept ones passes `uniform` of their sum.
fn draw(logits: &[f32], sampling: &Sampling, uniform: f64) -> Result<u32, SamplingError> {
    let best = logits[argmax(logits)? as usize];
    let inverse = 1.0 / f64::from(sampling.temperature);
    let weight = |logit: f32| ((f64::from(logit) - f64::from(best)) * inverse).exp();

    let mut kept: Vec<Candidate> = Vec::new();
    if sampling.top_k > 0 || sampling.top_p < 1.0 {
        kept = best_tokens(logits, sampling.top_k as usize);
        keep_top_p(&mut kept, f64::from(sampling.top_p), weight);
    }
    // The kept tokens are all those up to the last one in the order.
    let last = kept.iter().copied().max_by(Candidate::order);
    let keeps = |candidate: Candidate| last.is_none_or(|last| candidate.order(&last).is_le());
    let weight_min = f64::from(sampling.min_p).min(1.0); // the best token weighs 1
    let mut sum = 0.0;
    let cumulated = logits.iter().zip(0..).map(|(&logit, id)| {
        if keeps(Candidate { logit, id }) {
            let weight = weight(logit);
            sum += if weight >= weight_min { weight } else { 0.0 };
        }
        sum
    });
    let cumulated: Vec<f64> = cumulated.collect(); // [vocab]
    let target = uniform * sum;
    let id = match cumulated.partition_point(|c| *c <= target) {
        past_all if past_all == logits.len() => cumulated.partition_point(|c| *c < sum), // by rounding only
        id => id,
    };
    u32::try_from(id).ok().filter(|_| sum > 0.0).ok_or(SamplingError::Empty)
}

/// The `k` best tokens in no particular order; all of them if `k` is 0.
fn best_tokens(logits: &[f32], k: usize) -> Vec<Candidate> {
    let all = logits.iter().zip(0..).map(|(&logit, id)| Candidate { logit, id });
    if k == 0 || k >= logits.len() {
        return all.collect();
    }
    // Room for twice as many: selection then costs a few steps per token that ever gets in, and most
    // tokens of a large vocabulary fall short of the worst one kept so far.
    let room = (2 * k).max(64);
    let mut kept: Vec<Candidate> = Vec::with_capacity(room.min(logits.len()));
    let mut worst: Option<Candidate> = None;
    for candidate in all {
        if worst.is_some_and(|worst| candidate.order(&worst).is_gt()) {
            continue;
        }
        kept.push(candidate);
        if kept.len() == room {
            worst = Some(*kept.select_nth_unstable_by(k - 1, Candidate::order).1);
            kept.truncate(k);
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, Candidate::order);
        kept.truncate(k);
    }
    kept
}

/// Keeps the shortest run of best tokens whose weight reaches `p` of the whole, and at least one. This is a
/// quickselect by weight: each round halves the range in which the end of the run may lie.
fn keep_top_p(kept: &mut Vec<Candidate>, p: f64, weight: impl Fn(f32) -> f64) {
    if p >= 1.0 {
        return;
    }
    let mut weighed: Vec<(Candidate, f64)> = kept.iter().map(|c| (*c, weight(c.logit))).collect();
    let sum: f64 = weighed.iter().map(|(_, weight)| weight).sum();
    // Tokens lighter than this weigh less than 1 - p together: the run ends before them.
    let lightest = (1.0 - p) * sum / weighed.len() as f64;
    weighed.retain(|(_, weight)| *weight >= lightest);
    let mut missing = p * sum;
    let (mut low, mut high) = (0, weighed.len()); // the run ends in low..high
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        weighed[low..high].select_nth_unstable_by(middle - low, |(a, _), (b, _)| a.order(b));
        let better: f64 = weighed[low..middle].iter().map(|(_, weight)| weight).sum();
        if better >= missing {
            high = middle;
        } else {
            missing -= better;
            low = middle;
        }
    }
    kept.clear();
    kept.extend(weighed.iter().take(high.max(1)).map(|(candidate, _)| *candidate));
}

/// Returns the log-probability of a token under the raw distribution, and those of the `top` best ones.
///
/// # Errors
/// When a logit is NaN or +infinity, or no token has a logit above -infinity.
pub fn logprobs_of(logits: &[f32], chosen: u32, top: u32) -> Result<Logprobs, SamplingError> {
    let best = argmax(logits)?;
    Ok(raw_logprobs(logits, logits[best as usize], chosen, top as usize))
}

/// Natural logarithms of the softmax of `logits`.
fn raw_logprobs(logits: &[f32], best: f32, chosen: u32, top: usize) -> Logprobs {
    let best = f64::from(best);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - best).exp()).sum();
    let log_sum = best + sum.ln();
    let logprob = |logit: f32| to_f32(f64::from(logit) - log_sum);
    let mut best: Vec<Candidate> = Vec::new();
    if top > 0 {
        best = best_tokens(logits, top);
        best.sort_unstable_by(Candidate::order);
    }
    let top = best.iter().map(|candidate| (candidate.id, logprob(candidate.logit))).collect();
    Logprobs { chosen: logprob(logits[chosen as usize]), top }
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
