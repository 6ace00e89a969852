//! A run of equal decode steps as one event.

use super::{Engine, Gaps, Message, Outcome};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::StepSequence;
use mixfleet_scheduler::cost::{CostModel, MeasuredSteps};

/// Steps in which each sequence gets one token.
pub(super) struct Run {
    /// The sequences of the first step.
    pub(super) parts: Vec<StepSequence>,
    began_s: f64,
    /// KV tokens of the first step.
    kv_tokens: u64,
    /// Number of steps reported to the machine and the fleet.
    pub(super) done: u32,
    /// Time at which these ended.
    pub(super) done_s: f64,
    /// Number of all steps.
    pub(super) steps: u32,
    /// Number of steps until the first answer is complete.
    pub(super) left: u32,
    /// How many times as long as alone the steps are, because of KV that comes and goes.
    slower: f64,
}

impl Run {
    /// Time of the first `steps` steps: in each one KV grows by a token per sequence.
    fn time_s(&self, cost: &CostModel, steps: u32) -> f64 {
        // A step's time is linear in its KV tokens.
        let ends = self.step_s(cost, 1) + self.step_s(cost, steps.max(1));
        f64::from(steps) * 0.5 * ends
    }

    /// Time of a step, counted from 1.
    fn step_s(&self, cost: &CostModel, number: u32) -> f64 {
        let sequences = to_u32(self.parts.len());
        let kv_tokens = self.kv_tokens + u64::from(sequences) * u64::from(number - 1);
        cost.decode_step_s(sequences, kv_tokens).0 * self.slower
    }

    /// KV tokens of the first unreported step.
    pub(super) fn tokens_done(&self) -> u64 {
        self.kv_tokens + u64::from(to_u32(self.parts.len())) * u64::from(self.done)
    }

    /// Number of steps that are done or in progress at `now_s`.
    pub(super) fn steps_by(&self, cost: &CostModel, now_s: f64) -> u32 {
        let elapsed_s = now_s - self.began_s;
        let (mut less, mut enough) = (0, self.steps);
        while less + 1 < enough {
            let middle = less + (enough - less) / 2;
            if self.time_s(cost, middle) >= elapsed_s { enough = middle } else { less = middle }
        }
        enough
    }

    pub(super) fn ends_s(&self, cost: &CostModel) -> f64 {
        self.began_s + self.time_s(cost, self.steps)
    }

    /// Total tokens and blocks of the sequences at `now_s` that the machine does not know of yet.
    pub(super) fn since_told(&self, cost: &CostModel, now_s: f64, block_tokens: u32) -> (u64, usize) {
        let (known, is) = (self.done, self.steps_by(cost, now_s).max(self.done + 1) - 1);
        let blocks = |steps: u32| {
            self.parts
                .iter()
                .map(|part| (part.start + 1 + steps).div_ceil(block_tokens) as usize)
                .sum::<usize>()
        };
        (u64::from(is - known) * self.parts.len() as u64, blocks(is) - blocks(known))
    }
}

impl Engine {
    /// The step that has just begun and the certain ones after it. Returns `parts` if it is not decode-only.
    pub(super) fn run(&mut self, began_s: f64, parts: Vec<StepSequence>) -> Result<Run, Vec<StepSequence>> {
        let left = |part: &StepSequence| {
            let active = self.machine.text(part.request).map(|text| &text.active);
            let active = active.filter(|active| active.started && part.sample)?;
            (part.tokens == 1).then(|| active.output_tokens - active.generated)
        };
        let least = parts.iter().map(left).try_fold(u32::MAX, |least, left| Some(least.min(left?)));
        let Some(left) = least else { return Err(parts) };
        let steps = 1 + self.machine.steady_steps(left.max(1) - 1);
        let kv_tokens = parts.iter().map(|part| u64::from(part.start) + 1).sum();
        let step_s = self.cost.decode_step_s(to_u32(parts.len()), kv_tokens).0;
        let (slower, lasts) = self.copying.begin(began_s, step_s);
        let steps = steps.min(lasts);
        Ok(Run { parts, began_s, kv_tokens, done: 0, done_s: began_s, steps, left, slower })
    }

    /// Reports the steps of a run that are done by `now_s`: an engine that serves reports each at once.
    pub(in crate::simulate) fn catch_up(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        let Some(super::Plan::Run(run)) = &self.at else { return };
        let begun = run.steps_by(&self.cost, now_s);
        let all = run.began_s + run.time_s(&self.cost, begun) <= now_s;
        // The end of the last step is an event of its own.
        let done = (if all { begun } else { begun - 1 }).min(run.steps - 1);
        self.advance_to(done, outcomes);
    }

    /// Advances to `done` completed steps of the run; one more has begun.
    pub(super) fn advance_to(&mut self, done: u32, outcomes: &mut Vec<Outcome>) {
        let Some(super::Plan::Run(run)) = &self.at else { return };
        if done > run.done {
            let more = done - run.done;
            self.ran(done, outcomes);
            self.machine.advance(more, &mut self.actions);
            self.carry_out(0.0, outcomes);
        }
    }

    /// Reports `done` completed steps of the run, in each of which every sequence got a token.
    pub(super) fn ran(&mut self, done: u32, outcomes: &mut Vec<Outcome>) {
        let Some(super::Plan::Run(run)) = &mut self.at else { return };
        let count = done - run.done;
        let (began_s, ended_s) = (run.done_s, run.began_s + run.time_s(&self.cost, done));
        let first_s = run.step_s(&self.cost, run.done + 1);
        let gaps = Gaps { count, first_s, last_s: run.step_s(&self.cost, done) };
        (run.done, run.done_s) = (done, ended_s);
        self.copying.end(ended_s, run.slower, ended_s - began_s);
        for part in &run.parts {
            if let Some(text) = self.machine.text_mut(part.request) {
                text.active.advance(ended_s, began_s, gaps);
            }
        }
        if self.measures {
            let sequences = to_u32(run.parts.len());
            let kv_tokens = run.kv_tokens + u64::from(sequences) * u64::from(done - count + (count - 1) / 2);
            let time = Seconds(ended_s - began_s);
            let parts = Vec::new();
            let steps = MeasuredSteps { parts, sequences, kv_tokens, steps: count, time };
            self.machine.learn(&steps);
            outcomes.push(Outcome::Ran(steps));
        }
        let requests = run.parts.iter().map(|part| part.request).collect();
        outcomes.push(Outcome::Busy { prefill_s: 0.0, decode_s: ended_s - began_s });
        outcomes.push(Outcome::Decoded { requests, tokens: count });
    }

    /// Whether a message that came during the steps drops a request.
    pub(super) fn lets_go(&self, request: u64) -> bool {
        self.inbox.iter().any(|message| matches!(message, Message::LetGo { request: its } if *its == request))
    }
}
