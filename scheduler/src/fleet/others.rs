//! Work that other routers gave to the same instances, which takes their time and memory.
//!
//! Instances report it as it is added, progresses and ends. A prompt of another router is in its instance's
//! queue at its own due time, and an answer of another router takes a place, so predictions for an instance
//! count both. This router does not decide on them: they are not among its requests, and are not placed
//! again.

use super::forecast::Seat;
use super::load::{Phase, Work};
use super::stalls::Stalls;
use super::{Fleet, InstanceId, PartyId, RequestId};
use crate::cost::KvCopy;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// The state of another router's request on one instance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum OthersWork {
    /// Its prompt is to be computed, or has progressed. The decode instance reports this too, before there is
    /// room for its KV.
    Prompt {
        /// The request's id.
        request: RequestId,
        /// The instance that computes it.
        prefill: InstanceId,
        /// Its due time, from now.
        due_in: Seconds,
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Number of leading tokens that are done.
        done: u32,
        /// The instance that decodes it.
        decode: InstanceId,
    },
    /// Its prompt is done, or given up.
    PromptGone {
        /// The request's id.
        request: RequestId,
        /// Whether it was computed completely, so that its KV is sent to where it is decoded.
        done: bool,
    },
    /// It decodes on the instance, or will; or it has progressed.
    Answer {
        /// The request's id.
        request: RequestId,
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Maximum number of tokens that it may get there.
        max_tokens: u32,
        /// Time from now until its KV was expected when it was placed.
        ready_in: Seconds,
        /// The request's class, whose answers have similar lengths.
        class: u32,
        /// Expected number of generated tokens, if known.
        #[serde(default)]
        output_tokens_hint: Option<u32>,
        /// Number of tokens that it has got there; none until it decodes.
        generated: u32,
    },
    /// It no longer decodes there.
    AnswerGone {
        /// The request's id.
        request: RequestId,
        /// The length of the answer, if it is complete.
        length: Option<u32>,
    },
}

impl Fleet {
    /// Updates the work of `instance` for other routers.
    pub(super) fn others(&mut self, now: Seconds, instance: InstanceId, works: &[OthersWork]) {
        for &work in works {
            let Some(at) = self.position(instance) else { return };
            match work {
                OthersWork::Prompt { request, prefill, due_in, prompt_tokens, done, decode } => {
                    let done = done.min(prompt_tokens);
                    if self.works.get(request).is_some_and(|work| work.is_others && work.prefill == prefill) {
                        self.prefill_progress(now, request, prefill, done);
                    } else if let Some(at) = self.position(prefill)
                        && !self.works.contains(request)
                        && due_in.0.is_finite()
                    {
                        let remaining = self.loads[at].prefill_s(done, prompt_tokens - done);
                        let work = Work {
                            due: now + due_in,
                            party: PartyId::NONE,
                            tbt_slo: None,
                            prompt_tokens,
                            prefill,
                            decode,
                            transfer_tokens: prompt_tokens,
                            prefill_time: remaining,
                            alone_since: None,
                            is_others: true,
                            phase: Phase::Prefill { done, remaining },
                        };
                        self.loads.change(at, |load| load.queue(request, &work, &self.works, now));
                        self.works.insert(request, work);
                        self.others_prompts += 1;
                    }
                }
                OthersWork::PromptGone { request, done } => self.others_prompt_gone(now, request, done),
                OthersWork::Answer {
                    request,
                    prompt_tokens,
                    max_tokens,
                    ready_in,
                    class,
                    output_tokens_hint: hint,
                    generated,
                } => {
                    let expected = hint.unwrap_or_else(|| self.lengths.mean(class)).min(max_tokens);
                    let ready_in = if ready_in.0.is_finite() { ready_in } else { Seconds::ZERO };
                    let seat = Seat {
                        request,
                        ready_at: now + ready_in,
                        prompt_tokens,
                        max_tokens,
                        output_tokens: expected,
                        hinted: hint.is_some(),
                        class,
                        tbt_slo: self.config.tbt_slo,
                        generated: 0,
                        stalls: Stalls::default(),
                        // The bytes sent there are unknown.
                        lands: KvCopy::default(),
                    };
                    self.loads.change(at, |load| load.seat_of_others(seat, generated));
                }
                OthersWork::AnswerGone { request, length } => {
                    let seat = self.loads.change(at, |load| load.release(request));
                    if let Some((seat, length)) = seat.zip(length) {
                        self.lengths.observe(seat.class, length.max(1));
                    }
                }
            }
        }
    }

    fn others_prompt_gone(&mut self, now: Seconds, request: RequestId, done: bool) {
        if !self.works.get(request).is_some_and(|work| work.is_others) {
            return;
        }
        let Some(work) = self.works.remove(request) else { return };
        self.others_prompts -= 1;
        let Some(at) = self.position(work.prefill) else { return };
        self.loads.change(at, |load| load.leave_queue(request, &work, &self.works, now));
        if let Some(to) = self.position(work.decode).filter(|&to| done && to != at) {
            let bytes = self.hand_off_bytes(&self.loads[to], work.prompt_tokens, work.prompt_tokens);
            self.occupy(now, at, to, bytes);
        }
    }

    /// Removes the work of other routers on an instance that is gone.
    pub(super) fn others_down(&mut self, instance: InstanceId) {
        for request in self.works.ids_where(|work| work.is_others && work.prefill == instance) {
            self.works.remove(request);
            self.others_prompts -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
