//! The explanation of a decision: every candidate with its terms, and why it lost.

use super::{InstanceId, Pull, RequestId};
use crate::cost::Corrections;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The unit of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoreUnit {
    /// Dollars, if every instance has a price.
    Usd,
    /// Seconds.
    Seconds,
}

/// A decision with all candidates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The request.
    pub request: RequestId,
    /// The time of the decision.
    pub decided_at: Seconds,
    /// The unit of scores.
    pub score_unit: ScoreUnit,
    /// Score units per second of waiting: dollars, or 1.
    pub wait_weight: f64,
    /// Share of the instances that have work, with this request: the weight of the price of device time.
    #[serde(default)]
    pub busy_share: f64,
    /// The assumed number of output tokens.
    pub output_tokens: u32,
    /// Number of instances that were up.
    pub instances: u32,
    /// Number of parties with requests in progress, including this request's: the request gets one share of
    /// this many, which its predicted wait allows for. 0 if its party is unknown.
    #[serde(default)]
    pub parties: u32,
    /// The placements that the policy finally compared: all pairs in a small fleet, the best few in a large
    /// one. Empty if none was considered.
    pub candidates: Vec<Candidate>,
}

impl Explanation {
    /// The placement that was chosen.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.outcome == Outcome::Chosen)
    }

    /// Leading tokens of the prompt that the chosen prefill instance holds after the pull; `None` if it pulls
    /// nothing.
    pub fn pulled_until(&self) -> Option<u32> {
        let Candidate { pull, terms, .. } = self.chosen()?;
        let (Some(_), Some(terms)) = (pull, terms) else { return None };
        Some(terms.cached_tokens + terms.pulled_tokens)
    }

    /// Predicted time until the KV of the chosen placement is where it decodes.
    pub fn ready_in(&self) -> Seconds {
        let terms = self.chosen().and_then(|chosen| chosen.terms);
        terms.map_or(Seconds::ZERO, |terms| Seconds(terms.ttft_s + terms.transfer_s))
    }
}

/// One possible placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The instance that would compute the prompt.
    pub prefill: InstanceId,
    /// Its device.
    pub prefill_device: Arc<str>,
    /// The instance that would generate the tokens.
    pub decode: InstanceId,
    /// Its device.
    pub decode_device: Arc<str>,
    /// The prefix that would be copied to the prefill instance first.
    pub pull: Option<Pull>,
    /// The prediction; none if the placement is impossible.
    pub terms: Option<Terms>,
    /// Why it was or was not chosen.
    pub outcome: Outcome,
}

/// The predicted terms of a placement. `ttft_s` is the sum of `queue_s`, `pull_s`, `kv_wait_s`,
/// `interleave_s`, `prefill_s` and `overhead_s`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// Prompt tokens whose KV the prefill instance already has.
    pub cached_tokens: u32,
    /// Prompt tokens whose KV it first pulls from another instance.
    pub pulled_tokens: u32,
    /// Prompt tokens whose KV must be sent over the link.
    pub transfer_tokens: u32,
    /// Prefill work ahead of it.
    pub queue_s: f64,
    /// Time of loading from lower tiers, and of the pull beyond the queue.
    pub pull_s: f64,
    /// Time until the decode instance has room for its KV, beyond the queue.
    pub kv_wait_s: f64,
    /// Decode steps of other requests between its own and the queue's prefill chunks.
    pub interleave_s: f64,
    /// Time of its own prefill.
    pub prefill_s: f64,
    /// What first tokens there take beyond their prediction where nothing is in their way, as it was learned.
    #[serde(default)]
    pub overhead_s: f64,
    /// The exposed part of the KV transfer, including the wait behind earlier transfers.
    pub transfer_s: f64,
    /// The part of the hand-off that counts: the transfer that would be exposed if nothing of the prompt were
    /// cached and the links were free, and the wait for room there that the queue hides.
    pub hand_off_s: f64,
    /// Predicted TTFT.
    pub ttft_s: f64,
    /// Predicted time to the last token, for an answer of the assumed length. This and the next two are
    /// predicted in the order of scores until a candidate meets the objectives; for the other candidates the
    /// current batch's step is assumed.
    pub ends_s: f64,
    /// Mean time of its decode steps, in the batch predicted for the end of its prefill, including the delay
    /// by other requests' KV that lands during them.
    pub tbt_s: f64,
    /// A bound that its TBT, as the objective measures it, will probably not exceed. It is the longest likely
    /// step while it decodes, with requests that were accepted before it and land after it and what their KV
    /// takes of the longest steps, and a share of the transfer and of the wait for room of the fastest
    /// candidate's KV.
    pub tbt_peak_s: f64,
    /// Time of a step in the current batch.
    pub tbt_now_s: f64,
    /// Delay that it causes to other requests: to those that decode where it prefills, and to those that
    /// decode where it decodes, whose steps its landing KV delays.
    pub delay_s: f64,
    /// The most by which its prompt would make an answer on its prefill instance miss its TBT objective; 0 if
    /// none.
    #[serde(default)]
    pub overrun_s: f64,
    /// Price of the device time that it uses, times the share of the instances that have work, and of its
    /// traffic; 0 without prices.
    pub busy_usd: f64,
    /// What the KV memory is worth that it holds on instances whose memory binds, for as long as it does, in
    /// units of the score; 0 where `kv_weight` is.
    #[serde(default)]
    pub memory: f64,
    /// Learned factors of the prediction: prefill and transfers of the prefill instance, steps of the decode
    /// instance.
    #[serde(default)]
    pub corrections: Corrections,
    /// `busy_usd + wait_weight * (own * (ttft_s + hand_off_s) + delay_s) + memory`, where `own` is 1, or 0.1
    /// of a request with a deadline; the lowest wins.
    pub score: f64,
}

/// Why a candidate was or was not chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It was chosen.
    Chosen,
    /// Its score is higher.
    HigherScore {
        /// The difference from the chosen candidate's score.
        by: f64,
        /// The term that contributes most to the difference.
        mainly: Term,
    },
    /// It is the best, but another instance is tried, which is predicted to be slower and has measured
    /// nothing for long.
    TrialElsewhere {
        /// The instance.
        instance: InstanceId,
    },
    /// Its score is the same and its ids are higher.
    TieLostById,
    /// It would miss the TTFT objective.
    MissesTtftSlo {
        /// The excess in seconds.
        by_s: f64,
    },
    /// It would miss the TBT objective.
    MissesTbtSlo {
        /// The excess in seconds.
        by_s: f64,
    },
    /// It would make an answer beside its prompt miss the TBT objective.
    OverrunsTbtSlo {
        /// The excess in seconds.
        by_s: f64,
    },
    /// It would miss the deadline.
    MissesDeadline {
        /// The excess in seconds.
        by_s: f64,
    },
    /// It does not fit, even if the instance were empty.
    TooSmall {
        /// The instance.
        instance: InstanceId,
        /// Number of tokens that would have to fit.
        tokens: u64,
        /// Number of tokens that fit.
        capacity_tokens: u64,
    },
    /// No link joins the two.
    NoLink,
}

/// A term of the score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // each is the field of the same name in `Terms`
pub enum Term {
    Queue,
    Pull,
    KvWait,
    Interleave,
    Prefill,
    Transfer,
    Delay,
    Busy,
    Memory,
}

impl Terms {
    /// Predicted TTFT and mean time of a further token, without learned corrections.
    pub fn uncorrected_s(&self) -> [f64; 2] {
        let Corrections { prefill, step, .. } = self.corrections;
        let prompts = (self.queue_s + self.prefill_s) / prefill;
        [prompts + self.interleave_s / step + self.pull_s + self.kv_wait_s, self.tbt_s / step]
    }

    /// The term in which this exceeds `other` most, in units of the score.
    pub(super) fn mainly_above(&self, other: &Terms, own_weight: f64, wait_weight: f64) -> Term {
        let seconds = |f: fn(&Terms) -> f64| own_weight * (f(self) - f(other));
        let differences = [
            (Term::Queue, seconds(|t| t.queue_s)),
            (Term::Pull, seconds(|t| t.pull_s)),
            (Term::KvWait, seconds(|t| t.kv_wait_s)),
            (Term::Interleave, seconds(|t| t.interleave_s)),
            (Term::Prefill, seconds(|t| t.prefill_s)),
            (Term::Transfer, seconds(|t| t.hand_off_s)),
            (Term::Delay, wait_weight * (self.delay_s - other.delay_s)),
            (Term::Busy, self.busy_usd - other.busy_usd),
            (Term::Memory, self.memory - other.memory),
        ];
        let first = differences[0];
        differences.into_iter().fold(first, |most, next| if next.1 > most.1 { next } else { most }).0
    }
}

impl fmt::Display for Explanation {
    /// One line per candidate, for the log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.request)?;
        let unit = match self.score_unit {
            ScoreUnit::Usd => "usd",
            ScoreUnit::Seconds => "s",
        };
        for candidate in &self.candidates {
            let Candidate { prefill_device, decode_device, terms, outcome, .. } = candidate;
            write!(f, "\n  prefill {prefill_device}, decode {decode_device}: ")?;
            if let Some(t) = terms {
                write!(
                    f,
                    "ttft {:.4} s = queue {:.4} + pull {:.4} ({} tokens) + kv wait {:.4} + interleaved {:.4} + prefill {:.4} ({} tokens \
                     cached); transfer {:.4} s, tbt {:.4} s, delay {:.4} s, memory {:.3e} {unit}, score {:.3e} {unit}: ",
                    t.ttft_s,
                    t.queue_s,
                    t.pull_s,
                    t.pulled_tokens,
                    t.kv_wait_s,
                    t.interleave_s,
                    t.prefill_s,
                    t.cached_tokens,
                    t.transfer_s,
                    t.tbt_s,
                    t.delay_s,
                    t.memory,
                    t.score
                )?;
            }
            match outcome {
                Outcome::Chosen => write!(f, "chosen")?,
                Outcome::TrialElsewhere { instance } => {
                    write!(f, "best, but instance {instance} is tried")?;
                }
                Outcome::HigherScore { by, mainly } => write!(f, "{by:.3e} {unit} more, mainly {mainly:?}")?,
                Outcome::TieLostById => write!(f, "same score, higher id")?,
                Outcome::MissesTtftSlo { by_s } => write!(f, "first token {by_s:.4} s late")?,
                Outcome::MissesTbtSlo { by_s } => write!(f, "tokens {by_s:.4} s too slow")?,
                Outcome::OverrunsTbtSlo { by_s } => write!(f, "tokens beside it {by_s:.4} s too slow")?,
                Outcome::MissesDeadline { by_s } => write!(f, "last token {by_s:.4} s late")?,
                Outcome::TooSmall { instance, tokens, capacity_tokens } => {
                    write!(f, "{tokens} tokens do not fit {capacity_tokens} of instance {instance}")?;
                }
                Outcome::NoLink => write!(f, "no link")?,
            }
        }
        Ok(())
    }
}
