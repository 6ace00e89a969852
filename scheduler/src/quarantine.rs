//! Decides whether a request that may have ended engines is tried again, and beside which requests.
//!
//! An engine (an external engine or an instance) *ends* when it stops answering while it has requests: its
//! connections break, or it is lost. Each request that it had is a suspect of that end. A suspect is tried
//! again, but alone: until its first token no other suspect is at the same engine, and no other request with
//! the same digest is tried anywhere. A request is quarantined once
//!
//! - two engines ended before any token of its answer, or
//! - three engines ended, whatever they had answered.
//!
//! A complete answer clears a request. That a request is quarantined clears no other one: else a request that
//! was unlucky could clear the one that is the cause. `docs/reference/failures.md` has the rule for
//! operators.

use crate::batch::RequestId;
use crate::fleet::InstanceId;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Time for which an end is remembered, from the latest one on. Longer than clients retry for, and than an
/// engine takes to load a model, so that a retry does not meet engines that have just come back.
pub const QUARANTINE: Seconds = Seconds(600.0);
/// Ends before any token that quarantine a request. One may be chance. The engine that ends for no fault of
/// the request is hit before the first token twice in a row only if two unrelated faults follow each other
/// within the time to a first token.
const UNANSWERED_ENDS_MAX: usize = 2;
/// Ends of any kind that quarantine a request. One more than above, since long answers meet unrelated faults.
const ENDS_MAX: usize = 3;
/// Maximum number of remembered requests, some 150 bytes each. Each one costs the end of an engine that had
/// it, so that a client cannot fill the table at will.
const SUSPECTS_MAX: usize = 4096;
/// Interval between two looks for entries that are too old.
const SWEEP_EVERY: Seconds = Seconds(10.0);
/// Time after which an unreachable engine counts as ended. Longer than connections take to heal.
const UNREACHABLE_MAX: Seconds = Seconds(60.0);
/// Time that news of an end takes from one router to another.
const HEARD_LATE: Seconds = Seconds(5.0);

/// Digest of the request's content: its prompt, form and parameters, without its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestDigest(#[serde(with = "halves")] pub u128);

/// 128 bits as two numbers, since some formats have none of that size.
mod halves {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(bits: &u128, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = bits.to_be_bytes();
        let half = |from: usize| u64::from_be_bytes(std::array::from_fn(|at| bytes[from + at]));
        let (high, low) = (half(0), half(8));
        (high, low).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u128, D::Error> {
        let (high, low) = <(u64, u64)>::deserialize(deserializer)?;
        Ok(u128::from(high) << 64 | u128::from(low))
    }
}

/// What an engine had given of an answer when it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AnswerMoment {
    /// Nothing.
    Unanswered,
    /// No token of its own, while continuing the answer of an engine that ended.
    Continuing,
    /// A token at least.
    Answering,
}

/// One try of a request at an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineTry {
    /// The request, for as long as it is in progress.
    pub request: RequestId,
    /// The digest of the request.
    pub digest: RequestDigest,
    /// Where it is tried.
    pub engine: InstanceId,
    /// When the request was sent to the engine.
    pub began: Seconds,
}

/// Why a request is not tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quarantined {
    /// Engines that ended with it.
    pub engines: usize,
    /// Those of them that ended for certain, or that have been away for long; perhaps only the ways to the
    /// others were lost.
    pub certain: usize,
    /// Time until it may be tried again.
    pub left: Seconds,
}

impl fmt::Display for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quarantined { engines, left, .. } = self;
        write!(
            f,
            "{engines} engines ended while they worked on this request: it is not tried again for {:.0} s",
            left.0.max(1.0).ceil()
        )
    }
}

/// Whether a request may be tried now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TryPermit {
    /// Anywhere.
    Free,
    /// Where no other suspect is tried.
    Alone,
    /// Not yet: another request with the same digest is tried.
    Later,
    /// Not at all.
    Refused(Quarantined),
}

/// An end of an engine that counts against a request.
#[derive(Clone, Copy, Debug)]
struct EngineEnd {
    engine: InstanceId,
    /// The number of the end: an engine that was started again may end again.
    incident: u64,
    at: Seconds,
    moment: AnswerMoment,
    /// Whether the engine ended, and not only the way to it.
    is_certain: bool,
}

/// The latest end of an engine.
#[derive(Clone, Copy, Debug)]
struct Incident {
    number: u64,
    at: Seconds,
}

/// A suspect that is tried.
#[derive(Clone, Copy, Debug)]
struct Trial {
    digest: RequestDigest,
    engine: InstanceId,
    /// Whether it goes on behind the first token.
    is_lasting: bool,
    has_begun: bool,
}

/// Requests that may have ended engines. It has no clock: every call says what time it is.
#[derive(Debug, Default)]
pub struct Quarantine {
    suspects: BTreeMap<RequestDigest, Vec<EngineEnd>>,
    latest: BTreeMap<InstanceId, Incident>,
    incidents: u64,
    trials: BTreeMap<RequestId, Trial>,
    sweep_at: Seconds,
}

fn is_quarantined(ends: &[EngineEnd]) -> bool {
    let unanswered = ends.iter().filter(|end| end.moment == AnswerMoment::Unanswered).count();
    ends.len() >= ENDS_MAX || unanswered >= UNANSWERED_ENDS_MAX
}

fn latest(ends: &[EngineEnd]) -> Seconds {
    ends.iter().map(|end| end.at).fold(Seconds::ZERO, |late, at| if at.0 > late.0 { at } else { late })
}

impl Quarantine {
    /// Whether no request is a suspect, so that none needs a digest.
    pub fn is_empty(&self) -> bool {
        self.suspects.is_empty()
    }

    /// Whether a request may be tried now.
    pub fn permit(&mut self, digest: RequestDigest, now: Seconds) -> TryPermit {
        self.sweep(now);
        let Some(ends) = self.suspects.get(&digest) else { return TryPermit::Free };
        let left = latest(ends) + QUARANTINE - now;
        if left.0 <= 0.0 {
            self.suspects.remove(&digest);
            return TryPermit::Free;
        }
        if is_quarantined(ends) {
            let is_settled = |end: &&EngineEnd| end.is_certain || now.0 - end.at.0 >= UNREACHABLE_MAX.0;
            let certain = ends.iter().filter(is_settled).count();
            return TryPermit::Refused(Quarantined { engines: ends.len(), certain, left });
        }
        match self.trials.values().any(|trial| trial.digest == digest && trial.counts()) {
            true => TryPermit::Later,
            false => TryPermit::Alone,
        }
    }

    /// The engines at which suspects are tried; for other requests, the engines that have not begun to
    /// answer.
    pub fn engines_on_trial(&self, permit: TryPermit) -> BTreeSet<InstanceId> {
        let counts = |trial: &&Trial| match permit {
            TryPermit::Free => !trial.has_begun,
            _ => trial.counts(),
        };
        self.trials.values().filter(counts).map(|trial| trial.engine).collect()
    }

    /// Whether a suspect is tried anywhere.
    pub fn is_trying(&self) -> bool {
        self.trials.values().any(Trial::counts)
    }

    /// A request is sent to an engine.
    pub fn tried(&mut self, tried: &EngineTry) {
        let Some(ends) = self.suspects.get(&tried.digest) else { return };
        let EngineTry { request, digest, engine, .. } = *tried;
        let is_lasting = ends.len() + 1 >= ENDS_MAX;
        self.trials.insert(request, Trial { digest, engine, is_lasting, has_begun: false });
    }

    /// The first token of a request's try has come.
    pub fn began(&mut self, request: RequestId) {
        if let Some(trial) = self.trials.get_mut(&request) {
            trial.has_begun = true;
        }
    }

    /// A request is at its engine no more, and nothing ended.
    pub fn left(&mut self, request: RequestId) {
        self.trials.remove(&request);
    }

    /// A request got a complete answer: it is no suspect.
    pub fn answered(&mut self, digest: RequestDigest) {
        if self.suspects.get(&digest).is_some_and(|ends| !is_quarantined(ends)) {
            self.suspects.remove(&digest);
        }
    }

    /// An engine ended that had the request. `is_certain` is false if perhaps only the way to it was lost.
    pub fn ended(&mut self, tried: &EngineTry, moment: AnswerMoment, is_certain: bool, now: Seconds) {
        self.sweep(now);
        self.trials.remove(&tried.request);
        let incident = self.incident(tried, now);
        let ends = self.suspects.entry(tried.digest).or_default();
        if ends.iter().any(|end| end.incident == incident) {
            return;
        }
        ends.push(EngineEnd { engine: tried.engine, incident, at: now, moment, is_certain });
        self.bound();
    }

    /// Another router reports the end of an engine that had a request with this digest. The report may be
    /// late or repeated.
    pub fn heard(
        &mut self,
        digest: RequestDigest,
        engine: InstanceId,
        moment: AnswerMoment,
        is_certain: bool,
        now: Seconds,
    ) {
        let ends = self.suspects.get_mut(&digest);
        if let Some(known) = ends.and_then(|ends| ends.iter_mut().find(|end| end.engine == engine)) {
            known.is_certain |= is_certain;
            return;
        }
        // of no request of this router
        let tried = EngineTry { request: RequestId::MAX, digest, engine, began: now - HEARD_LATE };
        self.ended(&tried, moment, is_certain, now);
    }

    /// An engine that was lost is back as it was: only the way to it had been lost.
    pub fn returned(&mut self, engine: InstanceId) {
        self.suspects.retain(|_, ends| {
            ends.retain(|end| end.is_certain || end.engine != engine);
            !ends.is_empty()
        });
    }

    /// The number of the end that broke a try: the latest one of its engine if the try began before it.
    fn incident(&mut self, tried: &EngineTry, now: Seconds) -> u64 {
        if let Some(latest) = self.latest.get(&tried.engine)
            && tried.began.0 <= latest.at.0
        {
            return latest.number;
        }
        self.incidents += 1;
        self.latest.insert(tried.engine, Incident { number: self.incidents, at: now });
        self.incidents
    }

    /// Keeps the table within its size: first those go that are not quarantined, the oldest first.
    fn bound(&mut self) {
        while self.suspects.len() > SUSPECTS_MAX {
            let age = |ends: &[EngineEnd]| (is_quarantined(ends), latest(ends).0);
            let oldest = self.suspects.iter().min_by(|(_, one), (_, other)| {
                let ((one_stays, one_at), (other_stays, other_at)) = (age(one), age(other));
                one_stays.cmp(&other_stays).then(one_at.total_cmp(&other_at))
            });
            let Some(digest) = oldest.map(|(digest, _)| *digest) else { return };
            self.suspects.remove(&digest);
        }
    }

    /// Forgets expired entries, occasionally.
    fn sweep(&mut self, now: Seconds) {
        if now.0 < self.sweep_at.0 {
            return;
        }
        self.sweep_at = now + SWEEP_EVERY;
        let is_young = |at: Seconds| (at + QUARANTINE).0 > now.0;
        self.suspects.retain(|_, ends| is_young(latest(ends)));
        self.latest.retain(|_, incident| is_young(incident.at));
    }
}

impl Trial {
    /// Whether other suspects keep away from it.
    fn counts(&self) -> bool {
        self.is_lasting || !self.has_begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AnswerMoment::{Answering, Continuing, Unanswered};

    fn tried(request: RequestId, digest: u128, engine: u32, began: f64) -> EngineTry {
        let (digest, engine) = (RequestDigest(digest), InstanceId(engine));
        EngineTry { request, digest, engine, began: Seconds(began) }
    }

    /// The permit of request 7 after engines ended one second after the other.
    fn after(moments: &[AnswerMoment]) -> TryPermit {
        let mut quarantine = Quarantine::default();
        for (at, moment) in moments.iter().enumerate() {
            let began = at as f64;
            quarantine.ended(&tried(1, 7, at as u32, began), *moment, true, Seconds(began + 0.5));
        }
        quarantine.permit(RequestDigest(7), Seconds(5.0))
    }

    #[test]
    fn two_ends_before_a_token_or_three_of_any_kind_quarantine() {
        let is_refused = |moments: &[AnswerMoment]| matches!(after(moments), TryPermit::Refused(_));
        assert_eq!(after(&[]), TryPermit::Free);
        for tried_again in
            [&[Unanswered][..], &[Answering], &[Answering, Answering], &[Unanswered, Answering]]
        {
            assert_eq!(after(tried_again), TryPermit::Alone, "{tried_again:?}");
        }
        for refused in [&[Unanswered, Unanswered][..], &[Answering, Continuing, Answering], &[Answering; 3]] {
            assert!(is_refused(refused), "{refused:?}");
        }
    }

    #[test]
    fn a_refusal_says_how_many_engines_ended_and_for_how_long() {
        let TryPermit::Refused(refused) = after(&[Unanswered, Unanswered]) else { panic!("tried again") };
        assert_eq!((refused.engines, refused.certain, refused.left.0), (2, 2, 596.5));
        assert!(refused.to_string().starts_with("2 engines ended while they worked on this request"));
    }

    #[test]
    fn an_end_is_forgotten_after_its_time_and_by_an_answer() {
        let mut quarantine = Quarantine::default();
        quarantine.ended(&tried(1, 7, 0, 0.0), Unanswered, true, Seconds(1.0));
        quarantine.answered(RequestDigest(7));
        assert_eq!(quarantine.permit(RequestDigest(7), Seconds(1.0)), TryPermit::Free);
        for engine in 0..2 {
            quarantine.ended(&tried(1, 7, engine, 2.0), Unanswered, true, Seconds(3.0));
        }
        // a copy that another engine still had
        quarantine.answered(RequestDigest(7));
        assert!(matches!(quarantine.permit(RequestDigest(7), Seconds(602.9)), TryPermit::Refused(_)));
        assert_eq!(quarantine.permit(RequestDigest(7), Seconds(603.0)), TryPermit::Free);
        assert!(quarantine.is_empty());
    }

    #[test]
    fn one_end_counts_once_however_many_copies_it_had() {
        let mut quarantine = Quarantine::default();
        for copy in 0..9 {
            quarantine.ended(&tried(copy, 7, 0, 0.0), Unanswered, true, Seconds(1.0 + copy as f64));
        }
        assert_eq!(quarantine.permit(RequestDigest(7), Seconds(9.0)), TryPermit::Alone);
        // the same engine, started again
        quarantine.ended(&tried(9, 7, 0, 8.0), Unanswered, true, Seconds(10.0));
        assert!(matches!(quarantine.permit(RequestDigest(7), Seconds(10.0)), TryPermit::Refused(_)));
    }

    #[test]
    fn suspects_are_tried_apart_until_their_first_token() {
        let mut quarantine = Quarantine::default();
        for digest in [7, 8] {
            quarantine.ended(&tried(digest as u64, digest, 0, 0.0), Unanswered, true, Seconds(1.0));
        }
        let now = Seconds(2.0);
        quarantine.tried(&tried(7, 7, 1, 2.0));
        assert_eq!(quarantine.permit(RequestDigest(7), now), TryPermit::Later, "a copy waits");
        assert_eq!(quarantine.permit(RequestDigest(8), now), TryPermit::Alone);
        let apart = |quarantine: &Quarantine| {
            [TryPermit::Alone, TryPermit::Free].map(|permit| quarantine.engines_on_trial(permit).len())
        };
        assert_eq!(apart(&quarantine), [1, 1]);
        quarantine.began(7);
        assert_eq!(apart(&quarantine), [0, 0]);
        quarantine.tried(&tried(8, 8, 2, 2.0));
        quarantine.left(8);
        assert_eq!(apart(&quarantine), [0, 0]);
    }

    #[test]
    fn a_lost_way_to_an_engine_counts_until_the_engine_is_back() {
        let mut quarantine = Quarantine::default();
        for engine in 0..2 {
            quarantine.ended(&tried(1, 7, engine, 0.0), Unanswered, false, Seconds(1.0));
        }
        for (at, certain) in [(2.0, 0), (1.0 + UNREACHABLE_MAX.0, 2)] {
            let permit = quarantine.permit(RequestDigest(7), Seconds(at));
            let TryPermit::Refused(refused) = permit else { panic!("tried at {at} s") };
            assert_eq!((refused.engines, refused.certain), (2, certain), "at {at} s");
        }
        quarantine.returned(InstanceId(1));
        assert_eq!(quarantine.permit(RequestDigest(7), Seconds(2.0)), TryPermit::Alone);
    }

    #[test]
    fn what_other_routers_tell_counts_and_is_not_counted_twice() {
        let (mut quarantine, digest) = (Quarantine::default(), RequestDigest(7));
        quarantine.ended(&tried(1, 7, 0, 0.0), Unanswered, true, Seconds(1.0));
        quarantine.heard(digest, InstanceId(0), Unanswered, true, Seconds(1.1));
        assert_eq!(quarantine.permit(digest, Seconds(2.0)), TryPermit::Alone);
        quarantine.heard(digest, InstanceId(1), Unanswered, false, Seconds(2.0));
        assert!(matches!(quarantine.permit(digest, Seconds(2.0)), TryPermit::Refused(_)));
        quarantine.returned(InstanceId(1));
        assert_eq!(quarantine.permit(digest, Seconds(2.0)), TryPermit::Alone, "only the way was lost");
        for is_certain in [false, true] {
            quarantine.heard(digest, InstanceId(1), Unanswered, is_certain, Seconds(3.0));
        }
        quarantine.returned(InstanceId(1));
        assert!(
            matches!(quarantine.permit(digest, Seconds(4.0)), TryPermit::Refused(_)),
            "it said so itself"
        );
    }

    #[test]
    fn the_table_is_bounded_and_keeps_the_quarantined() {
        let mut quarantine = Quarantine::default();
        for engine in 0..2 {
            quarantine.ended(&tried(1, 7, engine, 0.0), Unanswered, true, Seconds(1.0));
        }
        for digest in 0..2 * SUSPECTS_MAX as u128 {
            quarantine.ended(&tried(2, 100 + digest, 9, 0.0), Unanswered, true, Seconds(2.0));
        }
        assert_eq!(quarantine.suspects.len(), SUSPECTS_MAX);
        assert!(matches!(quarantine.permit(RequestDigest(7), Seconds(2.0)), TryPermit::Refused(_)));
    }
}
