//! Admission: whether the placement that a policy picked is good enough, or the request is turned away at once.

use super::explain::{Candidate, Outcome, Terms};
use super::place::Question;
use super::{Fleet, RejectReason};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// What is turned away on arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// Nothing that fits: late is better than never.
    None,
    /// What would miss an objective with the load of now. By the time the prompt is done that load is another one, so the
    /// pools swing in anti-phase (Mooncake v3, section 7.3).
    EarlyRejection,
    /// What would miss an objective with the load that is predicted for the end of its prefill.
    #[default]
    Prediction,
}

/// The objectives as a filter.
struct Objectives {
    ttft_s: f64,
    tbt_s: f64,
    admission: Admission,
}

impl Objectives {
    /// Time between tokens, as far ahead as admission looks.
    fn tbt(&self, terms: &Terms) -> f64 {
        if self.admission == Admission::EarlyRejection { terms.tbt_now_s } else { terms.tbt_s }
    }

    fn timely(&self, terms: &Terms) -> bool {
        terms.ttft_s <= self.ttft_s
    }

    fn met(&self, terms: &Terms) -> bool {
        self.timely(terms) && self.tbt(terms) <= self.tbt_s
    }
}

impl Fleet {
    /// The lowest score among those within the objectives. Where none is, and the request may not be turned away, the
    /// least late one. Writes every candidate's outcome.
    pub(super) fn admit(
        &self,
        candidates: &mut [Candidate],
        question: &Question<'_>,
    ) -> Result<usize, RejectReason> {
        let objectives = Objectives {
            ttft_s: self.config.ttft_slo.map_or(f64::INFINITY, |slo| slo.0),
            tbt_s: self.config.tbt_slo.map_or(f64::INFINITY, |slo| slo.0),
            admission: self.config.admission,
        };
        let lowest =
            |candidates: &[Candidate], key: &dyn Fn(&Terms) -> f64, keep: &dyn Fn(&Terms) -> bool| {
                candidates
                    .iter()
                    .enumerate()
                    .filter_map(|(i, c)| c.terms.as_ref().filter(|t| keep(t)).map(|t| (i, key(t))))
                    .min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))
            };
        let takes_all = question.arrival.replay || self.config.admission == Admission::None;
        let chosen = lowest(candidates, &|t| t.score, &|t| objectives.met(t));
        let fastest = lowest(candidates, &|t| t.ttft_s, &|_| true);
        let chosen = chosen.or(fastest.filter(|_| takes_all));
        let verdict = match (chosen, fastest) {
            (Some((i, _)), _) => Ok(i),
            (None, None) => Err(impossible(candidates)),
            (None, Some((_, ttft_s))) => {
                match lowest(candidates, &|t| objectives.tbt(t), &|t| objectives.timely(t)) {
                    Some((_, tbt_s)) => Err(RejectReason::TbtSlo { tbt_s, slo_s: objectives.tbt_s }),
                    None => Err(RejectReason::TtftSlo { ttft_s, slo_s: objectives.ttft_s }),
                }
            }
        };
        let winner = verdict.as_ref().ok().and_then(|&i| candidates[i].terms);
        for (i, candidate) in candidates.iter_mut().enumerate() {
            let Some(terms) = candidate.terms else { continue };
            let tbt_s = objectives.tbt(&terms);
            candidate.outcome = match winner {
                Some(_) if verdict == Ok(i) => Outcome::Chosen,
                _ if terms.ttft_s > objectives.ttft_s => {
                    Outcome::MissesTtftSlo { by_s: terms.ttft_s - objectives.ttft_s }
                }
                _ if tbt_s > objectives.tbt_s => Outcome::MissesTbtSlo { by_s: tbt_s - objectives.tbt_s },
                Some(best) if terms.score > best.score => Outcome::HigherScore {
                    by: terms.score - best.score,
                    mainly: terms.mainly_above(&best, question.wait_weight),
                },
                _ => Outcome::TieLostById,
            };
        }
        verdict
    }

    /// When another try may succeed.
    pub(super) fn retry_after(&self, now: Seconds, reason: &RejectReason) -> Option<Seconds> {
        match *reason {
            RejectReason::TtftSlo { ttft_s, slo_s } => Some(Seconds(ttft_s - slo_s)),
            RejectReason::QueueFull { .. } | RejectReason::TbtSlo { .. } => {
                let ends = self.loads.iter().filter_map(|load| load.forecast(&self.works, now).first_end());
                ends.reduce(Seconds::min)
            }
            RejectReason::TooLarge { .. } | RejectReason::NoInstance | RejectReason::Duplicate { .. } => None,
        }
    }
}

/// Why none of `candidates` is possible at all.
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
