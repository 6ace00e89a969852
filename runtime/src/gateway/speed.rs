//! Learns an external engine's speed while an answer streams: prompt times from its first token, step times
//! from every few further tokens. The end of the answer corrects the lengths that were assumed.

use super::relay::Passage;
use super::{EngineSeat, Gateway};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::outside::EngineUsage;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{MeasuredSteps, Prefill};
use mixfleet_scheduler::fleet::{Event, InstanceId};

/// Fewest further tokens whose time is learned from.
const STEPS_LEARNED_MIN: u32 = 8;

/// Factor by which lengths may differ from assumed ones; beyond it, corrections are learned again.
const LENGTHS_WITHIN: f64 = 1.125;

/// Times and counts of one attempt at a request.
#[derive(Default)]
pub(super) struct Times {
    pub(super) asked: Seconds,
    pub(super) first: Option<Seconds>,
    pub(super) last: Seconds,
    /// Whether something of the answer came.
    pub(super) came: bool,
    /// Whether nothing else was at the engine until its first token.
    pub(super) alone: bool,
    pub(super) chunks: u32,
    /// Sum over further chunks of the answers that were in progress there.
    pub(super) batch_sum: u64,
    /// The prompt whose time was reported.
    pub(super) prompt: Option<Prefill>,
    pub(super) reported: ReportedSteps,
}

/// Chunks with reported times, and the last one's time.
#[derive(Clone, Copy, Default)]
pub(super) struct ReportedSteps {
    chunks: u32,
    batch_sum: u64,
    tokens: f64,
    until: Seconds,
}

impl Times {
    /// Returns the prompt's time, unless one of about these lengths was reported.
    fn take_prompt(&mut self, prompt_tokens: u32, cached: u32) -> Option<MeasuredSteps> {
        let time = self.first? - self.asked;
        let cached = cached.min(prompt_tokens);
        let part = Prefill { context: cached, tokens: prompt_tokens - cached, last: true };
        let known = self.prompt.map_or(0, |told| told.tokens);
        if !self.alone || part.tokens == 0 || is_within(f64::from(known), f64::from(part.tokens)) {
            return None;
        }
        self.prompt = Some(part);
        Some(MeasuredSteps { parts: vec![part], sequences: 0, kv_tokens: 0, steps: 1, time })
    }

    /// Returns the time of the steps since the last report, if they are enough.
    fn take_steps(&mut self, prompt_tokens: u32, tokens_per_chunk: f64) -> Option<MeasuredSteps> {
        let first = self.first?;
        let before = match self.reported {
            ReportedSteps { chunks: 0, .. } => ReportedSteps { chunks: 1, until: first, ..self.reported },
            reported => reported,
        };
        let further = self.chunks.saturating_sub(before.chunks);
        let tokens = f64::from(further) * tokens_per_chunk;
        let steps = to_u32(to_u64(tokens.round()));
        if further == 0 || steps < STEPS_LEARNED_MIN {
            return None;
        }
        let batch = (self.batch_sum - before.batch_sum) as f64 / f64::from(further);
        let sequences = to_u32(to_u64(batch.round().max(1.0)));
        let length = u64::from(prompt_tokens) + to_u64(before.tokens + tokens / 2.0);
        let (kv_tokens, time) = (length * u64::from(sequences), self.last - before.until);
        self.reported = ReportedSteps {
            chunks: self.chunks,
            batch_sum: self.batch_sum,
            tokens: before.tokens + tokens,
            until: self.last,
        };
        Some(MeasuredSteps { parts: Vec::new(), sequences, kv_tokens, steps, time })
    }
}

fn is_within(one: f64, other: f64) -> bool {
    one.max(other) <= one.min(other) * LENGTHS_WITHIN
}

impl EngineSeat {
    /// Tokens in a chunk of its streams; 1 until the end of an answer has shown how many.
    fn tokens_per_chunk(&self) -> f64 {
        self.tokens_per_chunk.unwrap_or(1.0)
    }
}

impl Passage {
    /// Whether the times of this attempt are those of its engine alone.
    fn is_measured(&self) -> bool {
        self.wanted.stream && self.avoided.is_empty()
    }

    /// Reports the time of the prompt, of an assumed length, at its first token.
    pub(super) fn measure_prompt(&mut self, at: usize) {
        if self.is_measured() && !self.is_divided {
            let prompt_tokens = self.gateway.assumed_prompt_tokens(&self.wanted);
            let steps = self.times.take_prompt(prompt_tokens, self.cached);
            self.gateway.learn_steps(at, steps);
        }
    }

    /// Reports the time of the steps since the last report, if they are enough.
    pub(super) fn measure_steps(&mut self, at: usize) {
        if self.is_measured() && self.wanted.choices == 1 {
            let (prompt_tokens, tokens_per_chunk) = {
                let state = self.gateway.lock();
                (state.lengths(&self.wanted).0, state.seats[at].tokens_per_chunk())
            };
            let steps = self.times.take_steps(prompt_tokens, tokens_per_chunk);
            self.gateway.learn_steps(at, steps);
        }
    }

    /// Reports the unreported part of a complete answer, and repeats reports that assumed other lengths.
    pub(super) fn measure_all(&mut self, at: usize, usage: &EngineUsage) {
        self.gateway.learn_lengths(&self.wanted, usage);
        if !self.is_measured() {
            return;
        }
        if !self.is_divided {
            let cached = usage.cached_tokens.unwrap_or(self.cached);
            let steps = self.times.take_prompt(usage.prompt_tokens, cached);
            self.gateway.learn_steps(at, steps);
        }
        if self.wanted.choices == 1 && self.times.chunks > 1 {
            let further = f64::from(usage.completion_tokens.saturating_sub(1));
            let tokens_per_chunk = further / f64::from(self.times.chunks - 1);
            let assumed = {
                let seat = &mut self.gateway.lock().seats[at];
                let assumed = seat.tokens_per_chunk();
                let is_proven = usage.completion_tokens > STEPS_LEARNED_MIN;
                seat.tokens_per_chunk =
                    Some(tokens_per_chunk).filter(|_| is_proven).or(seat.tokens_per_chunk);
                assumed
            };
            if !is_within(assumed, tokens_per_chunk) {
                self.times.reported = ReportedSteps::default();
            }
            let steps = self.times.take_steps(usage.prompt_tokens, tokens_per_chunk);
            self.gateway.learn_steps(at, steps);
        }
    }
}

impl Gateway {
    /// Learns from steps of an engine, if any were measured.
    pub(super) fn learn_steps(&self, at: usize, steps: Option<MeasuredSteps>) {
        let Some(steps) = steps else { return };
        let instance = InstanceId(to_u32(at));
        let mut state = self.lock();
        state.front.step(Event::Measured { instance, steps });
        if self.metrics.learned(self.engine(at).name(), state.front.machine(), instance) {
            self.count_instances(&state);
        }
    }
}
