//! Work that other routers gave to the same instances: it takes their time and their memory like one's own.
//!
//! Instances tell of it as it comes, gets on and goes. A prompt of others stands in its instance's queue at
//! its own due time, and an answer of others has a seat, so whatever is predicted of an instance counts both.
//! What this router does not do is to decide on them: they are not among its requests, and nothing is placed
//! anew for them.

use super::forecast::Seat;
use super::load::{Phase, Work};
use super::{Fleet, InstanceId, RequestId};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// What another router's request is at, on one instance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum OthersWork {
    /// Its prompt is to be computed, or has got further. Also said by who decodes it, before there is room
    /// for its KV.
    Prompt {
        /// Which.
        request: RequestId,
        /// Who computes it.
        prefill: InstanceId,
        /// Its place in the order, from now.
        due_in: Seconds,
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Leading tokens that are done.
        done: u32,
        /// Who decodes it.
        decode: InstanceId,
    },
    /// Its prompt is done, or given up.
    PromptGone {
        /// Which.
        request: RequestId,
        /// It was computed to the end: its KV leaves for where it is decoded.
        done: bool,
    },
    /// It decodes there, or will; or it has got further.
    Answer {
        /// Which.
        request: RequestId,
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Tokens that it may get there.
        max_tokens: u32,
        /// Until its KV was thought to be there when it got its place, from now.
        ready_in: Seconds,
        /// Requests of a class have answers alike in length.
        class: u32,
        /// Tokens that it will probably generate, if someone knows.
        #[serde(default)]
        output_tokens_hint: Option<u32>,
        /// Tokens that it has got there; none until it decodes.
        generated: u32,
    },
    /// It does not decode there any more.
    AnswerGone {
        /// Which.
        request: RequestId,
        /// The answer is complete, with so many tokens.
        length: Option<u32>,
    },
}

impl Fleet {
    /// `instance` tells what it does for others.
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
                            tbt_slo: None,
                            prompt_tokens,
                            prefill,
                            decode,
                            transfer_tokens: prompt_tokens,
                            prefill_time: remaining,
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
            self.occupy(now, at, to, work.prompt_tokens);
        }
    }

    /// What others had on an instance that is gone is no work any more.
    pub(super) fn others_down(&mut self, instance: InstanceId) {
        for request in self.works.ids_where(|work| work.is_others && work.prefill == instance) {
            self.works.remove(request);
            self.others_prompts -= 1;
        }
    }
}

#[cfg(test)]
mod tests;
