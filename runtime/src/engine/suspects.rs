//! The coordinator's part for requests that may have ended instances: they are tried again one at a time, and
//! not once too many instances ended with them.

use super::coordinator::{Coordinator, Tracked};
use super::messages::{EndNotice, Order};
use crate::request::{Failure, GenerateRequest, Rejection, Submission};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::quarantine::{AnswerMoment, EngineTry, Quarantined, RequestDigest, TryPermit};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;

/// Longest time that a suspect waits until it can be tried without others; then it is tried beside them.
pub(super) const ALONE_MAX: Seconds = Seconds(60.0);
/// Instances that surely ended with a request, from which on it does not wait for unreachable ones to return.
const CERTAIN_MIN: usize = 2;
/// Suspects that clients have sent again and that wait to be tried.
const HELD_MAX: usize = 256;
/// Ends reported by other routers, of instances that are up here.
const RUMOURS_MAX: usize = 1024;

/// The digest of a request's content: all but its id, its seed, its hints and its party.
fn digest(wanted: &GenerateRequest) -> RequestDigest {
    let GenerateRequest { prompt_ids, max_tokens, eos_ids, sampling, logprobs, grammar, .. } = wanted;
    let sampling = crate::request::Sampling { seed: 0, ..sampling.clone() };
    let length = (&wanted.forced_ids, &wanted.minimum, &wanted.vocabulary, max_tokens);
    let others = serde_json::to_vec(&(length, eos_ids, sampling, logprobs, grammar));
    let mut hasher = Sha256::new();
    hasher.update((prompt_ids.len() as u64).to_le_bytes());
    prompt_ids.iter().for_each(|id| hasher.update(id.to_le_bytes()));
    hasher.update(others.expect("a request is plain data"));
    let digest: [u8; 32] = hasher.finalize().into();
    let (half, _) = digest.split_at(16);
    RequestDigest(u128::from_be_bytes(half.try_into().expect("16 bytes of 32")))
}

/// Whether the request is the likely cause of the ends: else the instances may return.
fn is_settled(why: &Quarantined) -> bool {
    why.certain >= CERTAIN_MIN || why.certain == why.engines
}

/// The error for clients.
fn words(why: &Quarantined) -> String {
    let Quarantined { engines, left, .. } = why;
    format!(
        "{engines} instances were lost while they worked on this request: it is not tried again for {:.0} s",
        left.0.max(1.0).ceil()
    )
}

impl Tracked {
    /// What its instances have given of the answer since it was last placed.
    fn moment(&self) -> AnswerMoment {
        if self.generated.len() > self.generated_before {
            AnswerMoment::Answering
        } else if self.generated.is_empty() {
            AnswerMoment::Unanswered
        } else {
            AnswerMoment::Continuing
        }
    }
}

impl Coordinator {
    /// Refuses a submission that has ended instances, or holds it while others are tried. None if no work is
    /// left for it.
    pub(super) fn admit_suspect(&mut self, submission: Submission) -> Option<Submission> {
        if self.quarantine.is_empty() {
            return Some(submission);
        }
        let now = self.env.now();
        match self.quarantine.permit(digest(&submission.request), now) {
            TryPermit::Free => Some(submission),
            TryPermit::Refused(why) => {
                self.metrics.requests_quarantined.inc();
                let refusal = if is_settled(&why) { Rejection::Quarantined } else { Rejection::Unavailable };
                let _ = submission.admitted.send(Err(refusal(words(&why))));
                None
            }
            _ if self.quarantine.is_trying() && self.held.len() < HELD_MAX => {
                if !submission.admitted.is_closed() {
                    self.held.push_back(submission);
                }
                None
            }
            _ => Some(submission),
        }
    }

    /// Submits again what waited while suspects were tried.
    pub(super) fn submit_held(&mut self) {
        for submission in std::mem::take(&mut self.held) {
            self.submit(submission);
        }
    }

    /// A request was sent to its instances.
    pub(super) fn note_try(&mut self, request: RequestId, engine: InstanceId) {
        if !self.quarantine.is_empty()
            && let Some(tried) = self.engine_try(request, engine)
        {
            self.quarantine.tried(&tried);
        }
    }

    fn engine_try(&self, request: RequestId, engine: InstanceId) -> Option<EngineTry> {
        let tracked = self.requests.get(&request)?;
        Some(EngineTry { request, digest: digest(&tracked.wanted), engine, began: tracked.asked_at })
    }

    /// The digest of a request that may be a suspect; none if no request is.
    fn suspect(&self, request: RequestId) -> Option<RequestDigest> {
        let tracked = self.requests.get(&request).filter(|_| !self.quarantine.is_empty())?;
        Some(digest(&tracked.wanted))
    }

    /// Records a lost instance that had these requests. All of them are recorded before any is tried again,
    /// since one of them may be known as the cause.
    pub(super) fn note_ends(&mut self, instance: InstanceId, requests: &[RequestId], is_certain: bool) {
        for &request in requests {
            let Some(tried) = self.engine_try(request, instance) else { continue };
            let Some(tracked) = self.requests.get_mut(&request) else { continue };
            tracked.losses.push((instance, is_certain));
            let moment = tracked.moment();
            self.quarantine.ended(&tried, moment, is_certain, self.env.now());
            self.announce_end(EndNotice { engine: instance, digest: tried.digest, moment, is_certain });
        }
    }

    /// Has the workers tell the other routers.
    fn announce_end(&self, notice: EndNotice) {
        for &instance in self.instances.keys() {
            self.send(instance, Order::Ended(notice));
        }
    }

    /// Another router lost an instance. While this one has it, perhaps only the other's way to it is
    /// lost: unless the instance said that it ended, that counts once this one loses it too.
    pub(super) fn hear_end(&mut self, notice: EndNotice) {
        if !notice.is_certain && self.instances.contains_key(&notice.engine) {
            if self.rumours.len() == RUMOURS_MAX {
                self.rumours.pop_front();
            }
            self.rumours.push_back(notice);
            return;
        }
        self.believe(notice);
    }

    /// Accepts the reports of other routers about an instance that this one has lost too.
    pub(super) fn believe_rumours(&mut self, lost: InstanceId) {
        let (of_it, others) = self.rumours.iter().partition(|notice| notice.engine == lost);
        self.rumours = others;
        let of_it: VecDeque<EndNotice> = of_it;
        of_it.into_iter().for_each(|notice| self.believe(notice));
    }

    fn believe(&mut self, EndNotice { engine, digest, moment, is_certain }: EndNotice) {
        self.quarantine.heard(digest, engine, moment, is_certain, self.env.now());
    }

    /// Why a request that lost its place is not tried again, if so: that, and whether the losses are certain.
    pub(super) fn quarantined(&mut self, request: RequestId) -> Option<(Failure, bool)> {
        let digest = self.suspect(request)?;
        let TryPermit::Refused(why) = self.quarantine.permit(digest, self.env.now()) else {
            return None;
        };
        let losses = &self.requests.get(&request)?.losses;
        // Instances that are only unreachable may return.
        let certain = losses.iter().filter(|(_, certain)| *certain).count();
        let is_known = certain >= CERTAIN_MIN || certain == losses.len();
        Some((Failure::engine(words(&why)), is_known && is_settled(&why)))
    }

    /// Whether a request that lost its place waits, since another suspect is tried.
    pub(super) fn waits_for_trial(&mut self, request: RequestId) -> bool {
        let Some(digest) = self.suspect(request) else { return false };
        self.quarantine.is_trying() && self.quarantine.permit(digest, self.env.now()) != TryPermit::Free
    }

    /// A token of a request came.
    pub(super) fn note_token(&mut self, request: RequestId) {
        if !self.quarantine.is_empty() {
            self.quarantine.began(request);
        }
    }

    /// A request is over; `is_whole` if its answer is complete.
    pub(super) fn note_over(&mut self, request: RequestId, wanted: &GenerateRequest, is_whole: bool) {
        self.quarantine.left(request);
        if is_whole && !self.quarantine.is_empty() {
            self.quarantine.answered(digest(wanted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Sampling;

    #[test]
    fn a_digest_is_of_what_is_asked_and_not_of_who_asks() {
        let one = GenerateRequest::greedy("a", vec![1, 2, 3], 5);
        let sampling = Sampling { seed: 9, ..one.sampling.clone() };
        let same = GenerateRequest { id: "b".into(), sampling, cache_salt: Some("t".into()), ..one.clone() };
        assert_eq!(digest(&same), digest(&one));
        for other in [
            GenerateRequest::greedy("a", vec![1, 2, 4], 5),
            GenerateRequest::greedy("a", vec![1, 2, 3], 6),
            GenerateRequest { logprobs: Some(1), ..one.clone() },
        ] {
            assert_ne!(digest(&other), digest(&one), "{other:?}");
        }
    }
}
