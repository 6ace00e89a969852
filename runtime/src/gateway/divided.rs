//! One request on two engines: one computes its prompt, another one takes the KV over and answers.
//!
//! A divided request always ends like an undivided one: if the KV is not handed over, or not taken over in
//! time, an engine recomputes the prompt and answers. The engine with the KV keeps it until it is taken, or
//! until its own lease of it ends: there is no request to drop it.

use super::relay::{Passage, QUEUE_MAX, lost, silent};
use super::{Gateway, RelayRequest};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{
    EngineAnswer, EngineFault, EngineFaultKind, EngineHandOff, EngineShare, EngineUsage,
};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{MeasuredSteps, Prefill};
use mixfleet_scheduler::fleet::{Event, InstanceId};
use std::time::Duration;

/// Time for a part of a request beyond a multiple of its prediction, since queues are only estimated. Longer
/// than any pull, and shorter than clients' timeouts.
const SHARE_LATE: Seconds = Seconds(120.0);
const SHARE_TIMES: f64 = 4.0;
/// The same once the engine with the KV is lost: KV that was not pulled by then never will be.
const LOST_LATE: Seconds = Seconds(20.0);

/// KV that an answer begins with.
#[derive(Debug)]
pub(super) struct TakenKv {
    /// The engine that has it.
    pub(super) from: usize,
    pub(super) hand_off: EngineHandOff,
    /// When the answer should have begun, or be there if it comes whole.
    until: Seconds,
    /// How long a whole answer is predicted to take from its first token on.
    answer: Seconds,
}

impl Passage {
    /// Has an engine compute the prompt for another one; its refusal of the request, if it refuses.
    pub(super) async fn ask_prompt(
        &mut self,
        from: usize,
        to: usize,
    ) -> Result<Option<EngineAnswer>, EngineFault> {
        let (gateway, engine) = (self.gateway.clone(), self.gateway.engine(from).clone());
        let call = self.call(EngineShare::Prompt);
        let asked = gateway.env.now();
        let limit = duration(SHARE_LATE + self.ttft * SHARE_TIMES);
        let answer = tokio::select! {
            biased;
            answer = engine.ask(&call) => answer,
            () = gateway.lost(from) => Err(lost()),
            () = gateway.lost(to) => {
                self.leave_prompt();
                Err(lost())
            }
            () = gateway.env.sleep(limit) => Err(silent(limit)),
        };
        let (hand_off, usage) = match answer? {
            EngineAnswer::HandedOff { hand_off, usage } => (hand_off, usage),
            refused @ EngineAnswer::Refused { .. } => return Ok(Some(refused)),
            EngineAnswer::Whole(_) | EngineAnswer::Stream(_) => {
                let detail = "it answered a request for a prompt's KV with text";
                return Err(EngineFault::new(EngineFaultKind::Malformed, detail));
            }
        };
        let now = gateway.env.now();
        gateway.note_began(from, asked);
        gateway.note_answered(from);
        let is_alone = self.times.alone && gateway.lock().seats[from].own == 1;
        if let Some(usage) = usage.filter(|_| is_alone) {
            gateway.learn_prompt(from, &usage, self.cached, now - asked);
        }
        self.leave_prompt();
        self.tell_spans(from, now);
        let instance = InstanceId(to_u32(from));
        gateway.tell(Event::PrefillDone { request: self.request, instance });
        self.is_divided = true;
        self.ttft = self.transfer;
        (self.times.asked, self.times.alone) = (now, false);
        self.tried_next(to, now);
        let answer = match self.wanted.stream {
            true => Seconds::ZERO,
            false => self.tbt * f64::from(gateway.longest_answer(&self.wanted)),
        };
        let until = now + SHARE_LATE + (self.transfer + answer) * SHARE_TIMES;
        self.taken = Some(TakenKv { from, hand_off, until, answer });
        Ok(None)
    }

    /// The answer has begun: its KV was taken over.
    pub(super) fn took_over(&mut self) {
        let (Some(taken), Some(at)) = (self.taken.take(), self.at) else { return };
        self.gateway.note_hand_off(taken.from, at);
    }

    /// The prefill engine has no more work on it.
    pub(super) fn leave_prompt(&mut self) {
        let Some(from) = self.prompt_at.take() else { return };
        let now = self.gateway.env.now();
        let mut state = self.gateway.lock();
        state.seats[from].own -= 1;
        Gateway::note_left(&mut state, from, now, self.request);
    }

    /// Whether it is the division that failed, and not the engine as such. Then it is taken from both
    /// engines, to be done by one.
    pub(super) fn is_hand_off(&mut self, fault: &EngineFault) -> bool {
        use EngineFaultKind::{Cut, Failed, Malformed, NotHandedOff, NotTaken};
        let (why, from) = match (self.prompt_at, &self.taken, fault.kind) {
            (Some(_), _, NotTaken) => ("two engines cannot share it", None),
            (Some(from), _, NotHandedOff) => {
                self.gateway.hand_off_failed(&[from], "not_handed_over");
                ("its prompt's KV was not handed over", None)
            }
            (None, Some(taken), Failed | Malformed | NotTaken | NotHandedOff) => {
                let ends: Vec<usize> = self.at.into_iter().chain([taken.from]).collect();
                self.gateway.hand_off_failed(&ends, "not_taken_over");
                ("its prompt's KV was not taken over", Some(taken.from))
            }
            // usually that engine, whatever its part; but an engine may die of the KV that it takes over
            (None, Some(taken), Cut) => {
                let ends: Vec<usize> = self.at.into_iter().chain([taken.from]).collect();
                self.gateway.hand_off_failed(&ends, "cut");
                return false;
            }
            _ => return false,
        };
        if fault.kind != NotTaken || self.taken.is_some() {
            let id = &self.wanted.id;
            let engines: Vec<&str> =
                from.into_iter().chain(self.at).map(|at| self.gateway.engine(at).name()).collect();
            tracing::warn!(id, ?engines, %fault, why, "a request goes on undivided");
        }
        self.undivided = Some(why);
        if let Some(from) = from {
            self.avoided.push(from);
            self.doubted.push(from);
        }
        self.count_cost();
        self.leave();
        true
    }
}

impl Gateway {
    /// Completes when an answer that begins with handed over KV should have come.
    pub(super) fn overdue(&self, taken: Option<&TakenKv>) -> impl Future<Output = EngineFault> + use<'_> {
        let watched = taken.map(|taken| (taken.from, taken.until, taken.answer));
        async move {
            let Some((from, until, answer)) = watched else { return std::future::pending().await };
            let began = self.env.now();
            let is_lost = tokio::select! {
                biased;
                () = async {
                    self.lost(from).await;
                    self.env.sleep(duration(LOST_LATE + answer * SHARE_TIMES)).await;
                } => true,
                () = self.env.sleep(duration(until - began)) => false,
            };
            let waited = (self.env.now() - began).0;
            let why = if is_lost { ", and the engine that had it is lost" } else { "" };
            let detail = format!("nothing came in {waited:.0} s of an answer with another engine's KV{why}");
            EngineFault::new(EngineFaultKind::NotHandedOff, detail)
        }
    }

    /// Tokens of an answer at most.
    fn longest_answer(&self, wanted: &RelayRequest) -> u32 {
        self.lock().lengths(wanted).1
    }

    /// Learns from a prompt that was computed for another engine, with nothing else at work.
    fn learn_prompt(&self, at: usize, usage: &EngineUsage, cached: u32, time: Seconds) {
        let cached = usage.cached_tokens.unwrap_or(cached).min(usage.prompt_tokens);
        let part = Prefill { context: cached, tokens: usage.prompt_tokens - cached, last: true };
        let steps = MeasuredSteps { parts: vec![part], sequences: 0, kv_tokens: 0, steps: 1, time };
        self.learn_steps(at, Some(steps).filter(|_| part.tokens > 0));
    }

    /// Reports that KV of one engine was taken over by another one.
    fn note_hand_off(&self, from: usize, to: usize) {
        self.metrics.handed_off(self.engine(from).name(), self.engine(to).name());
        let mut state = self.lock();
        [from, to].into_iter().for_each(|at| state.seats[at].hand_offs.answered());
    }

    /// Reports that one was not. Engines at which several in a row fail have no part in any for a while.
    fn hand_off_failed(&self, ends: &[usize], cause: &'static str) {
        self.metrics.not_handed_off(cause);
        let now = self.env.now();
        let fault = EngineFault::new(EngineFaultKind::NotHandedOff, cause);
        let mut state = self.lock();
        for &at in ends {
            if let Some(pause) = state.seats[at].hand_offs.failed(now, &fault) {
                let engine = self.engine(at).name();
                tracing::warn!(
                    engine,
                    cause,
                    pause_s = pause.0,
                    "hand-offs suspended after repeated failures"
                );
            }
        }
    }
}

fn duration(time: Seconds) -> Duration {
    Duration::try_from_secs_f64(time.0.max(0.0)).unwrap_or(QUEUE_MAX).min(QUEUE_MAX)
}
