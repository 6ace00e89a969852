//! Which requests an objective was not met for, or could not be held.

use mixfleet_scheduler::fleet::{Action, Event, RejectReason};
use mixfleet_sim::fleet_file::Slo;
use mixfleet_sim::simulate::AnswerTimes;

/// Requests that missed one objective.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Missed {
    count: u64,
    /// The lengths of their prompts, least and most.
    prompt_tokens: Option<(u32, u32)>,
    /// The best result for one of them, in seconds; for memory the most tokens that one needs.
    best: Option<f64>,
}

impl Missed {
    fn add(&mut self, prompt_tokens: u32, value: f64, better: fn(f64, f64) -> f64) {
        self.count += 1;
        let (least, most) = self.prompt_tokens.unwrap_or((prompt_tokens, prompt_tokens));
        self.prompt_tokens = Some((least.min(prompt_tokens), most.max(prompt_tokens)));
        self.best = Some(self.best.map_or(value, |best| better(best, value)));
    }

    fn requests(&self) -> String {
        let prompts = match self.prompt_tokens {
            Some((least, most)) if least == most => format!(" with prompts of {least} tokens"),
            Some((least, most)) => format!(" with prompts of {least} to {most} tokens"),
            None => String::new(),
        };
        format!("{} {}{prompts}", self.count, if self.count == 1 { "request" } else { "requests" })
    }
}

/// The requests of a run that missed an objective, late or rejected for it, and those that no instance holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unmet {
    /// The objectives, if all requests have the same.
    slo: Option<Slo>,
    /// Length of the prompt that arrived last.
    asked_tokens: u32,
    ttft: Missed,
    tbt: Missed,
    deadline: Missed,
    memory: Missed,
    /// Tokens that the largest instance holds, if some request did not fit.
    capacity_tokens: u64,
}

impl Unmet {
    pub(super) fn new(slo: Option<Slo>) -> Self {
        let none = Missed::default;
        let (ttft, tbt, deadline, memory) = (none(), none(), none(), none());
        Unmet { slo, asked_tokens: 0, ttft, tbt, deadline, memory, capacity_tokens: 0 }
    }

    pub(super) fn told(&mut self, event: &Event) {
        if let Event::Arrived(arrival) = event {
            self.asked_tokens = arrival.prompt_tokens;
        }
    }

    pub(super) fn decided(&mut self, action: &Action) {
        let Action::Reject { reason, .. } = action else { return };
        let prompt = self.asked_tokens;
        match *reason {
            RejectReason::TtftSlo { ttft_s, .. } => self.ttft.add(prompt, ttft_s, f64::min),
            RejectReason::TbtSlo { tbt_s, .. } => self.tbt.add(prompt, tbt_s, f64::min),
            RejectReason::Deadline { ends_s, .. } => self.deadline.add(prompt, ends_s, f64::min),
            RejectReason::TooLarge { tokens, capacity_tokens } => {
                self.memory.add(prompt, tokens as f64, f64::max);
                self.capacity_tokens = self.capacity_tokens.max(capacity_tokens);
            }
            RejectReason::QueueFull { .. }
            | RejectReason::Share { .. }
            | RejectReason::NoInstance
            | RejectReason::Duplicate { .. } => {}
        }
    }

    pub(super) fn finished(&mut self, answer: &AnswerTimes) {
        let Some(slo) = self.slo else { return };
        if answer.ttft_s > slo.ttft_s {
            self.ttft.add(answer.prompt_tokens, answer.ttft_s, f64::min);
        }
        if let Some(tbt_s) = answer.tbt_s.filter(|tbt_s| *tbt_s > slo.tbt_s) {
            self.tbt.add(answer.prompt_tokens, tbt_s, f64::min);
        }
    }

    /// The most KV that a request needs which no instance holds, in words.
    pub(super) fn too_large(&self) -> Option<String> {
        let tokens = self.memory.best?;
        Some(format!(
            "{tokens} tokens of KV are needed, prompt and longest answer; the largest instance holds {}",
            self.capacity_tokens
        ))
    }

    /// A description of the missed objectives, with the numbers of requests.
    pub(super) fn text(&self) -> Vec<String> {
        let objective = |of: fn(&Slo) -> f64| {
            self.slo.as_ref().map_or_else(String::new, |slo| format!(", of {} s", of(slo)))
        };
        let late = [
            ("the TTFT", self.ttft, objective(|slo| slo.ttft_s)),
            ("the TBT", self.tbt, objective(|slo| slo.tbt_s)),
            ("the deadline", self.deadline, String::new()),
        ];
        let mut text: Vec<String> = Vec::new();
        for (what, missed, objective) in late {
            if let Some(best) = missed.best {
                text.push(format!("{what} by {} (at best {best:.4} s{objective})", missed.requests()));
            }
        }
        if let Some(why) = self.too_large() {
            text.push(format!("memory by {} ({why})", self.memory.requests()));
        }
        text
    }
}
