//! A decision, taken apart: every candidate with its terms, and why it lost.

use super::{Corrections, InstanceId, Pull, RequestId};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// In what a score counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScoreUnit {
    /// Dollars: every instance has a price.
    Usd,
    /// Seconds.
    Seconds,
}

/// A decision with its grounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The request.
    pub request: RequestId,
    /// When it was decided.
    pub decided_at: Seconds,
    /// In what scores count.
    pub score_unit: ScoreUnit,
    /// Score units that a second of waiting counts: dollars, or 1.
    pub wait_weight: f64,
    /// Output tokens that were assumed.
    pub output_tokens: u32,
    /// Instances that were up.
    pub instances: u32,
    /// The placements that the policy compared in the end: all pairs in a small fleet, the best few in a
    /// large one. Empty when none was looked at.
    pub candidates: Vec<Candidate>,
}

impl Explanation {
    /// The placement that was chosen.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|candidate| candidate.outcome == Outcome::Chosen)
    }

    /// Leading tokens of the prompt that the chosen prefill instance holds once what it pulls is there;
    /// `None` where it pulls nothing.
    pub fn pulled_until(&self) -> Option<u32> {
        let Candidate { pull, terms, .. } = self.chosen()?;
        let (Some(_), Some(terms)) = (pull, terms) else { return None };
        Some(terms.cached_tokens + terms.pulled_tokens)
    }
}

/// One possible placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Would compute the prompt.
    pub prefill: InstanceId,
    /// Its device.
    pub prefill_device: Arc<str>,
    /// Would generate the tokens.
    pub decode: InstanceId,
    /// Its device.
    pub decode_device: Arc<str>,
    /// What would be copied to the prefill instance first.
    pub pull: Option<Pull>,
    /// The prediction; none where the placement is impossible.
    pub terms: Option<Terms>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What a placement is predicted to take. `ttft_s` is the sum of `queue_s`, `pull_s`, `kv_wait_s`,
/// `interleave_s` and `prefill_s`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Terms {
    /// Prompt tokens whose KV the prefill instance has already.
    pub cached_tokens: u32,
    /// Prompt tokens whose KV it gets from another instance first.
    pub pulled_tokens: u32,
    /// Prompt tokens whose KV must cross the link.
    pub transfer_tokens: u32,
    /// Prefill work ahead of it.
    pub queue_s: f64,
    /// Loading from lower tiers, beside which nothing runs, and what the pull delays beyond the queue.
    pub pull_s: f64,
    /// Until the decode instance has room for its KV, beyond the queue.
    pub kv_wait_s: f64,
    /// Decode steps of others that run between its own and the queue's prefill chunks.
    pub interleave_s: f64,
    /// Its own prefill.
    pub prefill_s: f64,
    /// KV transfer that does not hide behind the prefill, behind what the links still have to move.
    pub transfer_s: f64,
    /// What counts of the way to the decode instance: the transfer that would show if nothing of the prompt
    /// were cached and the links were free, and the wait for room there that the queue hides.
    pub hand_off_s: f64,
    /// Time to the first token.
    pub ttft_s: f64,
    /// Time to the last one, should the answer be as long as assumed. This and the next two are predicted in
    /// the order of scores until a candidate is within the objectives; for the others the step is that of
    /// now.
    pub ends_s: f64,
    /// Time of a decode step with it, in the batch predicted for the end of its prefill.
    pub tbt_s: f64,
    /// What its time between tokens, as the objective counts it, will probably not exceed: the longest step
    /// that is likely while it decodes, those counted who were accepted before it and land after it, and a
    /// share of the transfer and of the wait for room of the fastest candidate's KV.
    pub tbt_peak_s: f64,
    /// A step in the batch of now.
    pub tbt_now_s: f64,
    /// Waiting that it causes to others: those that decode where it prefills, and those that decode
    /// where it decodes.
    pub delay_s: f64,
    /// Price of the device time and the traffic that it uses; 0 without prices.
    pub busy_usd: f64,
    /// What the KV memory is worth that it holds on instances whose memory binds, for as long as it does, in
    /// units of the score; 0 where `kv_weight` is.
    #[serde(default)]
    pub memory: f64,
    /// What the prediction was multiplied by: prefill and transfers of the one who computes the prompt, steps
    /// of the one who decodes, as learnt from what was measured there.
    #[serde(default)]
    pub corrections: Corrections,
    /// `busy_usd + wait_weight * (own * (ttft_s + hand_off_s) + delay_s) + memory`, where `own` is 1, or 0.1
    /// of a request with a deadline; the lowest wins.
    pub score: f64,
}

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It was taken.
    Chosen,
    /// Its score is higher.
    HigherScore {
        /// Than the chosen one's, by this much.
        by: f64,
        /// The term that adds most to the difference.
        mainly: Term,
    },
    /// Its score is the same and its ids are higher.
    TieLostById,
    /// The first token would be late.
    MissesTtftSlo {
        /// By this many seconds.
        by_s: f64,
    },
    /// Its tokens would be slow.
    MissesTbtSlo {
        /// By this many seconds.
        by_s: f64,
    },
    /// The last token would be late.
    MissesDeadline {
        /// By this many seconds.
        by_s: f64,
    },
    /// It does not fit, even if the instance were empty.
    TooSmall {
        /// The instance.
        instance: InstanceId,
        /// Tokens that would have to fit.
        tokens: u64,
        /// Tokens that fit.
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
                Outcome::HigherScore { by, mainly } => write!(f, "{by:.3e} {unit} more, mainly {mainly:?}")?,
                Outcome::TieLostById => write!(f, "same score, higher id")?,
                Outcome::MissesTtftSlo { by_s } => write!(f, "first token {by_s:.4} s late")?,
                Outcome::MissesTbtSlo { by_s } => write!(f, "tokens {by_s:.4} s too slow")?,
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
