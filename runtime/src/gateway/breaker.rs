//! Suspends an engine that fails repeatedly, and tries it with one request after each pause.
//!
//! A failure counts once it is the engine's own: when another engine has begun to answer the same request,
//! when the answer had begun, or when the request was the trial. A request that no engine answers counts
//! against none of them, so that a bad request suspends none, and a single engine is never suspended. If only
//! suspended engines could take a request, it goes to one of them.

use super::{ChoiceLimits, Fleetwide, Gateway};
use mixfleet_hal::outside::EngineFault;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use serde_json::{Value, json};
use std::time::Duration;

/// Consecutive failures after which an engine is suspended.
pub(super) const FAILURES_MAX: u32 = 3;
/// The first pause; each further one is twice as long, up to the maximum.
pub(super) const PAUSE_FIRST: Seconds = Seconds(1.0);
const PAUSE_MAX: Seconds = Seconds(60.0);

/// State of an engine's circuit breaker.
#[derive(Debug)]
pub(super) struct Breaker {
    phase: BreakerPhase,
    /// Failures since a request was answered in full.
    failures: u32,
    /// The length of the next pause.
    pause: Seconds,
    /// The latest failure, as in the log.
    fault: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum BreakerPhase {
    /// It gets requests.
    Closed,
    /// It gets none until then, and then one.
    Open { since: Seconds, until: Seconds },
    /// This request tries it.
    HalfOpen { since: Seconds, request: RequestId },
}

impl Default for Breaker {
    fn default() -> Self {
        let (phase, fault) = (BreakerPhase::Closed, String::new());
        Breaker { phase, failures: 0, pause: PAUSE_FIRST, fault }
    }
}

impl Breaker {
    /// Whether it is suspended, or one request tries it.
    pub(super) fn is_open(&self) -> bool {
        self.phase != BreakerPhase::Closed
    }

    /// The latest failure, while it is suspended.
    pub(super) fn open_fault(&self) -> Option<&str> {
        self.is_open().then_some(self.fault.as_str())
    }

    /// Whether the pause is over and no request tries it yet.
    fn is_due(&self, now: Seconds) -> bool {
        matches!(self.phase, BreakerPhase::Open { until, .. } if until <= now)
    }

    /// A request is placed there; true if it is the one that tries it.
    fn placed(&mut self, now: Seconds, request: RequestId) -> bool {
        match self.phase {
            BreakerPhase::Open { since, until } if until <= now => {
                self.phase = BreakerPhase::HalfOpen { since, request };
                true
            }
            _ => false,
        }
    }

    /// A request sent at that time has its first token; true if that ends the suspension. One more failure
    /// before a whole answer begins it again.
    fn began(&mut self, asked: Seconds) -> bool {
        let (BreakerPhase::Open { since, .. } | BreakerPhase::HalfOpen { since, .. }) = self.phase else {
            return false;
        };
        if asked < since {
            return false;
        }
        (self.phase, self.failures) = (BreakerPhase::Closed, FAILURES_MAX - 1);
        true
    }

    /// A request was answered in full.
    pub(super) fn answered(&mut self) {
        if !self.is_open() {
            *self = Breaker::default();
        }
    }

    /// A failure that is the engine's own; the length of the pause that begins, if one does.
    pub(super) fn failed(&mut self, now: Seconds, fault: &EngineFault) -> Option<Seconds> {
        if self.is_open() {
            return None;
        }
        self.failures += 1;
        fault.detail.clone_into(&mut self.fault);
        (self.failures >= FAILURES_MAX).then(|| self.rest(now, fault.retry_after))
    }

    fn rest(&mut self, now: Seconds, wish: Option<Duration>) -> Seconds {
        let wish = wish.map_or(Seconds::ZERO, |wish| Seconds(wish.as_secs_f64()));
        let pause = Seconds(self.pause.0.max(wish.0).min(PAUSE_MAX.0));
        self.phase = BreakerPhase::Open { since: now, until: now + pause };
        self.pause = Seconds((pause.0 * 2.0).min(PAUSE_MAX.0));
        pause
    }

    /// The request that tries it failed there; the length of the next pause.
    fn failed_try(&mut self, now: Seconds, request: RequestId, fault: &EngineFault) -> Option<Seconds> {
        if !matches!(self.phase, BreakerPhase::HalfOpen { request: tries, .. } if tries == request) {
            return None;
        }
        self.failures += 1;
        fault.detail.clone_into(&mut self.fault);
        Some(self.rest(now, fault.retry_after))
    }

    /// A request has left it. If it was the one that tries, and showed nothing, the next one does.
    fn left(&mut self, now: Seconds, request: RequestId) {
        if let BreakerPhase::HalfOpen { since, request: tries } = self.phase
            && tries == request
        {
            self.phase = BreakerPhase::Open { since, until: now };
        }
    }

    /// Ends the rest if the pause is over; one more failure begins it again. True if it ended.
    pub(super) fn try_again(&mut self, now: Seconds) -> bool {
        let is_due = self.is_due(now);
        if is_due {
            (self.phase, self.failures) = (BreakerPhase::Closed, FAILURES_MAX - 1);
        }
        is_due
    }

    /// Lets a request try it immediately if it is suspended: it was restarted.
    pub(super) fn restarted(&mut self, now: Seconds) {
        if let BreakerPhase::Open { since, .. } | BreakerPhase::HalfOpen { since, .. } = self.phase {
            self.phase = BreakerPhase::Open { since, until: now };
        }
    }

    /// The displayed state of a suspended engine.
    fn shown(&self, engine: &str, now: Seconds) -> Option<Value> {
        let tried_in = match self.phase {
            BreakerPhase::Closed => return None,
            BreakerPhase::Open { until, .. } => Some((until - now).0.max(0.0)),
            BreakerPhase::HalfOpen { .. } => None,
        };
        let (failures, fault) = (self.failures, &self.fault);
        Some(json!({"engine": engine, "failures": failures, "fault": fault, "tried_in_s": tried_in}))
    }
}

impl Fleetwide {
    /// Whether an engine that is not avoided gets requests, or is one of `resting`.
    pub(super) fn may_take(&self, at: usize, limits: ChoiceLimits<'_>) -> bool {
        let seat = &self.seats[at];
        let is_there = seat.instance.is_some() && !seat.rests && !limits.avoided.contains(&at);
        is_there && (!seat.breaker.is_open() || limits.resting.contains(&at))
    }

    /// Engines that rest and may take this request now: those whose pause is over, or all.
    pub(super) fn resting(&self, now: Seconds, avoided: &[usize], all: bool) -> Vec<usize> {
        let may = |at: usize| {
            let (seat, breaker) = (&self.seats[at], &self.seats[at].breaker);
            let is_there = seat.instance.is_some() && !seat.rests && !avoided.contains(&at);
            is_there && breaker.is_open() && (all || breaker.is_due(now))
        };
        (0..self.seats.len()).filter(|&at| may(at)).collect()
    }
}

impl Gateway {
    /// Reports that a request was placed on an engine.
    pub(super) fn note_placed(&self, state: &mut Fleetwide, at: usize, now: Seconds, request: RequestId) {
        if state.seats[at].breaker.placed(now, request) {
            tracing::info!(engine = self.engine(at).name(), request, "a request tries a suspended engine");
        }
    }

    /// Reports that a request sent at that time has its first token, or the whole answer.
    pub(super) fn note_began(&self, at: usize, asked: Seconds) {
        let mut state = self.lock();
        if state.seats[at].breaker.began(asked) {
            self.count_instances(&state);
            tracing::info!(engine = self.engine(at).name(), "a suspended engine answers again");
        }
    }

    /// Reports that a request was answered in full.
    pub(super) fn note_answered(&self, at: usize) {
        self.lock().seats[at].breaker.answered();
    }

    /// Reports that a request failed on the engine that it was to try; true if it was that one.
    pub(super) fn note_failed_try(&self, at: usize, request: RequestId, fault: &EngineFault) -> bool {
        let now = self.env.now();
        let pause = self.lock().seats[at].breaker.failed_try(now, request, fault);
        self.say_rest(at, pause, fault);
        pause.is_some()
    }

    /// Reports a failure that is the engine's own.
    pub(super) fn note_failed(&self, at: usize, fault: &EngineFault) {
        let now = self.env.now();
        let mut state = self.lock();
        let pause = state.seats[at].breaker.failed(now, fault);
        if pause.is_some() {
            self.count_instances(&state);
        }
        drop(state);
        self.say_rest(at, pause, fault);
    }

    fn say_rest(&self, at: usize, pause: Option<Seconds>, fault: &EngineFault) {
        let Some(pause) = pause else { return };
        let engine = self.engine(at).name();
        tracing::warn!(engine, pause_s = pause.0, %fault, "engine suspended after repeated failures");
        self.metrics.engine_rested(engine);
    }

    /// Reports that a request has left an engine.
    pub(super) fn note_left(state: &mut Fleetwide, at: usize, now: Seconds, request: RequestId) {
        state.seats[at].breaker.left(now, request);
    }

    /// The engines that rest, for display.
    pub(crate) fn resting_engines(&self) -> Vec<Value> {
        let (state, now) = (self.lock(), self.env.now());
        let shown = |(at, seat): (usize, &super::EngineSeat)| seat.breaker.shown(self.engine(at).name(), now);
        state.seats.iter().enumerate().filter_map(shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::outside::EngineFaultKind;

    fn fault() -> EngineFault {
        EngineFault::new(EngineFaultKind::Failed, "status 500")
    }

    fn opened(now: f64) -> Breaker {
        let mut breaker = Breaker::default();
        let pauses: Vec<_> = (0..FAILURES_MAX).map(|_| breaker.failed(Seconds(now), &fault())).collect();
        assert_eq!(pauses, [None, None, Some(PAUSE_FIRST)]);
        breaker
    }

    #[test]
    fn pauses_grow_while_tries_fail_and_one_request_tries_at_a_time() {
        let (mut breaker, mut now) = (opened(0.0), 0.0);
        let mut pauses = Vec::new();
        let mut pause = PAUSE_FIRST;
        for request in 0..8 {
            assert!(!breaker.placed(Seconds(now), request), "the pause is not over");
            now += pause.0;
            assert!(breaker.is_due(Seconds(now)) && breaker.placed(Seconds(now), request));
            assert!(!breaker.is_due(Seconds(now)) && !breaker.placed(Seconds(now), 99), "one tries it");
            assert_eq!(breaker.failed_try(Seconds(now), 99, &fault()), None, "of another request");
            pause = breaker.failed_try(Seconds(now), request, &fault()).unwrap();
            pauses.push(pause.0);
        }
        assert_eq!(pauses, [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]);
    }

    #[test]
    fn a_first_token_ends_the_rest_and_a_whole_answer_the_memory_of_it() {
        let mut breaker = opened(5.0);
        assert!(breaker.placed(Seconds(6.0), 7));
        assert!(!breaker.began(Seconds(4.0)), "the request was sent before the suspension");
        assert!(breaker.began(Seconds(6.0)) && !breaker.is_open());
        assert_eq!(breaker.failed(Seconds(7.0), &fault()), Some(Seconds(2.0)), "one more failure is enough");
        assert!(breaker.placed(Seconds(9.0), 8) && breaker.began(Seconds(9.0)));
        breaker.answered();
        assert_eq!(breaker.failed(Seconds(10.0), &fault()), None);
    }

    #[test]
    fn a_try_that_shows_nothing_is_followed_by_another_and_engines_wishes_are_kept() {
        let mut breaker = opened(0.0);
        assert!(breaker.placed(Seconds(1.0), 7));
        breaker.left(Seconds(1.5), 7);
        assert!(breaker.placed(Seconds(1.5), 8));
        let wish = EngineFault { retry_after: Some(Duration::from_secs(30)), ..fault() };
        assert_eq!(breaker.failed_try(Seconds(2.0), 8, &wish), Some(Seconds(30.0)));
        assert_eq!(breaker.shown("e", Seconds(12.0)).unwrap()["tried_in_s"], 20.0);
        breaker.restarted(Seconds(12.0));
        assert!(breaker.is_due(Seconds(12.0)));
    }
}
