//! Admission: whether the placement that a policy picked is good enough, or the request is rejected at once.

use super::explain::{Candidate, Outcome, Terms};
use super::place::Question;
use super::{Arrival, Fleet, HEAD_START_MAX, Objective, PartyId, RejectReason};
use crate::batch::Urgency;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// The requests that are rejected on arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// No request that fits is rejected: late is better than never.
    None,
    /// Requests that would miss an objective with the current load are rejected. By the time the prompt is
    /// computed the load has changed, so the pools swing in anti-phase (Mooncake v3, section 7.3).
    EarlyRejection,
    /// Requests that would miss an objective with the load predicted from the end of their prefill on are
    /// rejected.
    #[default]
    Prediction,
}

/// The part of its time after which a prompt with a deadline is due: the rest is for requests that are due at
/// the same time, and for prediction errors.
const DUE_AFTER: f64 = 0.75;

/// The objectives of a request in seconds from now, and its place in the order of prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objectives {
    ttft_s: f64,
    pub(super) tbt_slo: Option<Seconds>,
    /// The limits of the time to the last token; none without a deadline.
    pub(super) ends: Option<Ends>,
    /// The prompt's due time on the fleet's clock.
    pub(super) due: Seconds,
    /// Whose share it uses.
    pub(super) party: PartyId,
    admission: Admission,
    /// Whether the first token waits for the KV's transfer.
    waits_for_transfer: bool,
}

/// The deadline of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    /// An equal share of the time to the deadline for each remaining request (equal flexibility; Kao and
    /// Garcia-Molina, 1993).
    share_s: f64,
    deadline_s: f64,
}

impl Objectives {
    /// The TBT as far ahead as admission looks.
    fn tbt(&self, terms: &Terms) -> f64 {
        if self.admission == Admission::EarlyRejection { terms.tbt_now_s } else { terms.tbt_peak_s }
    }

    fn timely(&self, terms: &Terms) -> bool {
        self.first_token_s(terms) <= self.ttft_s
    }

    fn first_token_s(&self, terms: &Terms) -> f64 {
        terms.ttft_s + if self.waits_for_transfer { terms.transfer_s } else { 0.0 }
    }

    /// The urgency, for the instances.
    pub(super) fn urgency(&self) -> Urgency {
        let (due, gives_way) = (self.due, self.ends.is_some());
        Urgency { due, gives_way, tbt_slo: self.tbt_slo, party: self.party }
    }

    /// The first objective that is missed.
    pub(super) fn missed(&self, terms: &Terms) -> Option<Outcome> {
        let tbt_s = self.tbt_slo.map_or(f64::INFINITY, |slo| slo.0);
        if !self.timely(terms) {
            Some(Outcome::MissesTtftSlo { by_s: self.first_token_s(terms) - self.ttft_s })
        } else if self.tbt(terms) > tbt_s {
            Some(Outcome::MissesTbtSlo { by_s: self.tbt(terms) - tbt_s })
        } else if terms.overrun_s > 0.0 {
            Some(Outcome::OverrunsTbtSlo { by_s: terms.overrun_s })
        } else {
            let late_s = self.ends.map_or(f64::NEG_INFINITY, |ends| terms.ends_s - ends.share_s);
            (late_s > 0.0).then_some(Outcome::MissesDeadline { by_s: late_s })
        }
    }
}

impl Fleet {
    /// The objectives of `arrival`. Prompts are due in the order of their objectives: interactive requests
    /// when the first token is due; requests with a deadline when three quarters of the time to it have
    /// passed, less the predicted time of the answer; all of them earlier by their head start. These times
    /// never change, even if a request arrives again after its instance was lost, so a request is overtaken
    /// only by requests that arrive before it is due.
    pub(super) fn objectives(&self, now: Seconds, arrival: &Arrival) -> Objectives {
        let Seconds(ahead_s) = arrival.head_start;
        let ahead = Seconds(ahead_s.clamp(-HEAD_START_MAX.0, HEAD_START_MAX.0));
        let due = |due: Seconds| arrival.replay.unwrap_or(due - ahead);
        let read = |ttft_slo: Option<Seconds>, tbt_slo| Objectives {
            ttft_s: ttft_slo.map_or(f64::INFINITY, |slo| slo.0),
            tbt_slo,
            ends: None,
            due: due(now + ttft_slo.unwrap_or(Seconds::ZERO)),
            party: arrival.party,
            admission: self.config.admission,
            waits_for_transfer: self.config.first_token_at_decode,
        };
        match arrival.objective {
            Objective::Fleet => read(self.config.ttft_slo, self.config.tbt_slo),
            Objective::Interactive { ttft_slo, tbt_slo } => read(ttft_slo, tbt_slo),
            Objective::Deadline { at, requests_left } => {
                let deadline_s = (at - now).0.max(0.0);
                let share_s = deadline_s / f64::from(requests_left.max(1));
                let answer = self.pace * f64::from(self.output_tokens(arrival));
                let due = due(now + (Seconds(share_s) - answer).max(Seconds::ZERO) * DUE_AFTER);
                Objectives { ends: Some(Ends { share_s, deadline_s }), due, ..read(None, None) }
            }
        }
    }

    /// The candidate with the lowest score that meets the objectives. If none does, and the request may not
    /// be rejected, the least late one. Sets every candidate's outcome.
    pub(super) fn admit(
        &self,
        candidates: &mut [Candidate],
        question: &Question<'_>,
    ) -> Result<usize, RejectReason> {
        let objectives = question.objectives;
        // Among equals, the lowest score wins, then the first.
        let lowest =
            |candidates: &[Candidate], key: &dyn Fn(&Terms) -> f64, keep: &dyn Fn(&Terms) -> bool| {
                let terms = candidates.iter().enumerate().filter_map(|(i, c)| Some((i, c.terms.as_ref()?)));
                let kept = terms.filter(|(_, t)| keep(t)).map(|(i, t)| (i, key(t), t.score));
                let least = kept.min_by(|a, b| a.1.total_cmp(&b.1).then(a.2.total_cmp(&b.2)));
                least.map(|(i, key, _)| (i, key))
            };
        let takes_all = question.arrival.replay.is_some() || self.config.admission == Admission::None;
        let chosen = lowest(candidates, &|t| t.score, &|t| objectives.missed(t).is_none());
        let late = |t: &Terms| if objectives.ends.is_some() { t.ends_s } else { objectives.first_token_s(t) };
        let fastest = chosen.is_none().then(|| lowest(candidates, &late, &|_| true)).flatten();
        let verdict = match (chosen, fastest, objectives.ends) {
            (Some((i, _)), ..) => Ok(i),
            (None, None, _) => Err(impossible(candidates)),
            (None, Some((i, _)), _) if takes_all => Ok(i),
            // Later requests of the workflow may make up for it.
            (None, Some((i, ends_s)), Some(ends)) if ends_s <= ends.deadline_s => Ok(i),
            (None, Some((_, ends_s)), Some(Ends { deadline_s, .. })) => {
                Err(RejectReason::Deadline { ends_s, deadline_s })
            }
            (None, Some((_, ttft_s)), None) => {
                let slo_s = objectives.tbt_slo.map_or(0.0, |slo| slo.0);
                let tbt = |t: &Terms| match t.overrun_s {
                    0.0 => objectives.tbt(t),
                    over_s => objectives.tbt(t).max(slo_s + over_s),
                };
                let fast = lowest(candidates, &tbt, &|t| objectives.timely(t));
                match (fast, objectives.tbt_slo) {
                    (Some((_, tbt_s)), Some(slo)) => Err(RejectReason::TbtSlo { tbt_s, slo_s: slo.0 }),
                    _ => Err(RejectReason::TtftSlo { ttft_s, slo_s: objectives.ttft_s }),
                }
            }
        };
        let winner = verdict.as_ref().ok().and_then(|&i| candidates[i].terms);
        for (i, candidate) in candidates.iter_mut().enumerate() {
            let Some(terms) = &candidate.terms else { continue };
            candidate.outcome = match &winner {
                Some(_) if verdict == Ok(i) => Outcome::Chosen,
                Some(best) if chosen.is_some() && terms.score > best.score => Outcome::HigherScore {
                    by: terms.score - best.score,
                    mainly: terms.mainly_above(best, question.own_weight(), question.wait_weight),
                },
                _ => objectives.missed(terms).unwrap_or(Outcome::TieLostById),
            };
        }
        verdict
    }

    /// Time after which a retry may succeed.
    pub(super) fn retry_after(&self, now: Seconds, reason: &RejectReason) -> Option<Seconds> {
        match *reason {
            RejectReason::TtftSlo { ttft_s, slo_s } => Some(Seconds(ttft_s - slo_s)),
            // A retry would be later still.
            RejectReason::Deadline { .. } => None,
            RejectReason::QueueFull { .. } | RejectReason::Share { .. } | RejectReason::TbtSlo { .. } => {
                let ends = self.loads.iter().filter_map(|load| load.forecast(&self.lengths, now).first_end());
                ends.reduce(Seconds::min)
            }
            RejectReason::TooLarge { .. } | RejectReason::NoInstance | RejectReason::Duplicate { .. } => None,
        }
    }
}

/// Why none of `candidates` is possible.
fn impossible(candidates: &[Candidate]) -> RejectReason {
    let sizes = candidates.iter().filter_map(|candidate| match candidate.outcome {
        Outcome::TooSmall { tokens, capacity_tokens, .. } => Some((capacity_tokens, tokens)),
        _ => None,
    });
    let no_link = candidates.iter().any(|candidate| candidate.outcome == Outcome::NoLink);
    match sizes.max() {
        Some((capacity_tokens, tokens)) if !no_link => RejectReason::TooLarge { tokens, capacity_tokens },
        _ => RejectReason::NoInstance,
    }
}
