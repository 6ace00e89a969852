//! The work that each router gave to the instances of a process, for telling the other routers.
//!
//! Commands announce work, and reports its progress. New and completed work is reported immediately, and the
//! progress of prompts once per step; the lengths of answers are reported periodically.

use crate::engine::messages::{EndNotice, FromWorker, Job, Order};
use crate::request::RouterId;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{InstanceId, OthersWork};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Interval at which routers are sent the lengths of other routers' answers.
pub(super) const BEAT: Duration = Duration::from_millis(100);

/// A request on an instance.
type WorkKey = (InstanceId, RequestId);

/// Work of one router, to be reported to the others.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WorkUpdate {
    pub(super) of: RouterId,
    pub(super) instance: InstanceId,
    pub(super) work: OthersWork,
}

/// A prompt that is to be computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptWork {
    /// Due time in seconds since 1970, by the clock of this process.
    due: Seconds,
    prefill: InstanceId,
    tokens: u32,
    done: u32,
    decode: InstanceId,
}

/// An answer that is to be generated.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerWork {
    prompt_tokens: u32,
    max_tokens: u32,
    /// Time at which its KV should be there, on the same clock.
    ready: Seconds,
    class: u32,
    output_tokens_hint: Option<u32>,
    generated: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    prompt: Option<PromptWork>,
    answer: Option<AnswerWork>,
}

/// All work of all routers on the instances of a process.
#[derive(Debug, Default)]
pub(super) struct WorkLedger {
    entries: BTreeMap<WorkKey, Entry>,
    /// Answers that have grown since the last beat.
    grown: BTreeSet<WorkKey>,
}

impl WorkLedger {
    /// Records a command of a router to `instance` at `now`, in seconds since 1970.
    pub(super) fn commanded(
        &mut self,
        instance: InstanceId,
        command: &OrderedWork,
        now: Seconds,
    ) -> Vec<WorkUpdate> {
        match *command {
            OrderedWork::Work { request, prompt, answer } => {
                self.entries.insert((instance, request), Entry { prompt, answer });
                self.news((instance, request), now)
            }
            OrderedWork::Cancel { request } => self.gone((instance, request), None),
            OrderedWork::Ended { .. } => Vec::new(),
        }
    }

    /// Records a report of `instance` about a request.
    pub(super) fn reported(
        &mut self,
        instance: InstanceId,
        report: &FromWorker,
        now: Seconds,
    ) -> Vec<WorkUpdate> {
        let Some(request) = report.request() else { return Vec::new() };
        let place = (instance, request);
        let Some(entry) = self.entries.get_mut(&place) else { return Vec::new() };
        match report {
            FromWorker::Admitted { tokens_cached: tokens, .. } | FromWorker::Progress { tokens, .. } => {
                let Some(prompt) = entry.prompt.as_mut().filter(|prompt| *tokens > prompt.done) else {
                    return Vec::new();
                };
                prompt.done = *tokens;
                self.prompt_news(place, now).into_iter().collect()
            }
            FromWorker::Joined { .. } => {
                // The instance that computed it has reported that.
                entry.prompt = None;
                if let Some(answer) = &mut entry.answer {
                    answer.generated = answer.generated.max(1);
                }
                self.answer_news(place, now).into_iter().collect()
            }
            FromWorker::Drawn { index, finish, .. } => {
                let mut news = Vec::new();
                if entry.prompt.take().is_some() {
                    let work = OthersWork::PromptGone { request, done: true };
                    news.push(WorkUpdate { of: RouterId::of(request), instance, work });
                }
                let began = entry.answer.as_mut().is_some_and(|answer| {
                    answer.generated = answer.generated.saturating_add(1);
                    answer.generated == 1
                });
                if finish.is_some() || entry.answer.is_none() {
                    news.extend(self.gone(place, finish.map(|_| index.saturating_add(1))));
                } else if began {
                    news.extend(self.answer_news(place, now));
                } else {
                    self.grown.insert(place);
                }
                news
            }
            FromWorker::RequestFailed { .. } | FromWorker::Revoked { .. } | FromWorker::Refused { .. } => {
                self.gone(place, None)
            }
            _ => Vec::new(),
        }
    }

    /// The answers that have grown since the last beat.
    pub(super) fn beat(&mut self, now: Seconds) -> Vec<WorkUpdate> {
        let grown = std::mem::take(&mut self.grown);
        grown.into_iter().filter_map(|place| self.answer_news(place, now)).collect()
    }

    /// Whether some answer has grown since the last beat.
    pub(super) fn has_grown(&self) -> bool {
        !self.grown.is_empty()
    }

    /// Removes the work of a router that is gone.
    pub(super) fn abandon(&mut self, router: RouterId) -> Vec<WorkUpdate> {
        let all = self.entries.keys().copied();
        let its: Vec<WorkKey> = all.filter(|&(_, request)| RouterId::of(request) == router).collect();
        its.into_iter().flat_map(|place| self.gone(place, None)).collect()
    }

    /// Removes the work on an instance that is down, which routers do by themselves.
    pub(super) fn down(&mut self, instance: InstanceId) {
        self.entries.retain(|(at, _), _| *at != instance);
        self.grown.retain(|(at, _)| *at != instance);
    }

    /// All work, for a router that connects later.
    pub(super) fn all(&self, now: Seconds) -> Vec<WorkUpdate> {
        self.entries.keys().flat_map(|&place| self.news(place, now)).collect()
    }

    fn news(&self, place: WorkKey, now: Seconds) -> Vec<WorkUpdate> {
        self.prompt_news(place, now).into_iter().chain(self.answer_news(place, now)).collect()
    }

    fn prompt_news(&self, (instance, request): WorkKey, now: Seconds) -> Option<WorkUpdate> {
        let PromptWork { due, prefill, tokens, done, decode } =
            self.entries.get(&(instance, request))?.prompt?;
        let due_in = due - now;
        let work = OthersWork::Prompt { request, prefill, due_in, prompt_tokens: tokens, done, decode };
        Some(WorkUpdate { of: RouterId::of(request), instance, work })
    }

    fn answer_news(&self, (instance, request): WorkKey, now: Seconds) -> Option<WorkUpdate> {
        let AnswerWork { prompt_tokens, max_tokens, ready, class, output_tokens_hint, generated } =
            self.entries.get(&(instance, request))?.answer?;
        let ready_in = ready - now;
        let work = OthersWork::Answer {
            request,
            prompt_tokens,
            max_tokens,
            ready_in,
            class,
            output_tokens_hint,
            generated,
        };
        Some(WorkUpdate { of: RouterId::of(request), instance, work })
    }

    fn gone(&mut self, place: WorkKey, length: Option<u32>) -> Vec<WorkUpdate> {
        self.grown.remove(&place);
        let Some(Entry { prompt, answer }) = self.entries.remove(&place) else { return Vec::new() };
        let (instance, request) = place;
        let prompt = prompt.map(|_| OthersWork::PromptGone { request, done: false });
        let answer = answer.map(|_| OthersWork::AnswerGone { request, length });
        let works = prompt.into_iter().chain(answer);
        works.map(|work| WorkUpdate { of: RouterId::of(request), instance, work }).collect()
    }
}

/// The part of a router's command that others must know.
#[derive(Clone, Copy, Debug)]
pub(super) enum OrderedWork {
    /// New work.
    Work { request: RequestId, prompt: Option<PromptWork>, answer: Option<AnswerWork> },
    /// Work is cancelled.
    Cancel { request: RequestId },
    /// A router lost an instance; the report goes to the others.
    Ended { of: RouterId, notice: EndNotice },
}

impl OrderedWork {
    /// The work in a command; none if it takes neither relevant time nor memory.
    pub(super) fn of(instance: InstanceId, command: &Order) -> Option<OrderedWork> {
        let prompt = |job: &Job, prefill, decode| PromptWork {
            due: job.urgency.due,
            prefill,
            tokens: to_u32(job.length()),
            done: 0,
            decode,
        };
        let answer = |job: &Job| AnswerWork {
            prompt_tokens: to_u32(job.length()),
            max_tokens: job.wanted.max_tokens.saturating_sub(to_u32(job.generated.len())),
            ready: job.ready,
            class: job.wanted.hints.tier as u32,
            output_tokens_hint: job.wanted.hints.output_tokens,
            generated: 0,
        };
        Some(match command {
            Order::Add { job, hand_off: None, .. } => OrderedWork::Work {
                request: job.request,
                prompt: Some(prompt(job, instance, instance)),
                answer: Some(answer(job)),
            },
            Order::Add { job, hand_off: Some(to), .. } => OrderedWork::Work {
                request: job.request,
                prompt: Some(prompt(job, instance, to.to)),
                answer: None,
            },
            // The prompt is not requested before there is room, but it will be.
            Order::Reserve { job, sender } => OrderedWork::Work {
                request: job.request,
                prompt: Some(prompt(job, *sender, instance)),
                answer: Some(answer(job)),
            },
            Order::Cancel { request } => OrderedWork::Cancel { request: *request },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::FinishReason;

    const PREFILL: InstanceId = InstanceId(1);
    const DECODE: InstanceId = InstanceId(2);
    const REQUEST: RequestId = 7;

    fn given(prefill: InstanceId, answers: bool) -> OrderedWork {
        let due = Seconds(10.0);
        let prompt = PromptWork { due, prefill, tokens: 100, done: 0, decode: DECODE };
        let answer = AnswerWork {
            prompt_tokens: 100,
            max_tokens: 20,
            ready: Seconds(12.0),
            class: 0,
            generated: 0,
            output_tokens_hint: None,
        };
        OrderedWork::Work { request: REQUEST, prompt: Some(prompt), answer: answers.then_some(answer) }
    }

    fn drawn(index: u32, finish: Option<FinishReason>) -> FromWorker {
        FromWorker::Drawn { request: REQUEST, attempt: 0, index, token: 1, logprobs: None, finish }
    }

    fn works(news: Vec<WorkUpdate>) -> Vec<OthersWork> {
        news.into_iter().map(|news| news.work).collect()
    }

    #[test]
    fn of_a_split_request_others_hear_when_it_comes_gets_on_and_goes() {
        let mut ledger = WorkLedger::default();
        let now = Seconds(9.0);
        // The decode instance makes room first, and announces the prompt that will be computed elsewhere.
        let told = works(ledger.commanded(DECODE, &given(PREFILL, true), now));
        assert!(matches!(
            told[..],
            [
                OthersWork::Prompt { prefill: PREFILL, due_in: Seconds(1.0), done: 0, .. },
                OthersWork::Answer { generated: 0, ready_in: Seconds(3.0), .. }
            ]
        ));
        ledger.commanded(PREFILL, &given(PREFILL, false), now);
        let told =
            works(ledger.reported(PREFILL, &FromWorker::Progress { request: REQUEST, tokens: 64 }, now));
        assert!(matches!(told[..], [OthersWork::Prompt { done: 64, .. }]));
        let told = works(ledger.reported(PREFILL, &drawn(0, None), now));
        assert_eq!(told, [OthersWork::PromptGone { request: REQUEST, done: true }]);
        let told = works(ledger.reported(DECODE, &FromWorker::Joined { request: REQUEST }, now));
        assert!(matches!(told[..], [OthersWork::Answer { generated: 1, .. }]));
        assert!(ledger.reported(DECODE, &drawn(1, None), now).is_empty() && ledger.has_grown());
        assert!(matches!(works(ledger.beat(now))[..], [OthersWork::Answer { generated: 2, .. }]));
        assert!(!ledger.has_grown());
        let told = works(ledger.reported(DECODE, &drawn(2, Some(FinishReason::Stop)), now));
        assert_eq!(told, [OthersWork::AnswerGone { request: REQUEST, length: Some(3) }]);
        assert!(ledger.all(now).is_empty(), "{ledger:?}");
    }

    #[test]
    fn nothing_is_left_of_what_is_cancelled_abandoned_or_lost() {
        let now = Seconds(9.0);
        let mut ledger = WorkLedger::default();
        let begin = |ledger: &mut WorkLedger| ledger.commanded(DECODE, &given(DECODE, true), now);
        begin(&mut ledger);
        let gone = [
            OthersWork::PromptGone { request: REQUEST, done: false },
            OthersWork::AnswerGone { request: REQUEST, length: None },
        ];
        assert_eq!(works(ledger.commanded(DECODE, &OrderedWork::Cancel { request: REQUEST }, now)), gone);
        begin(&mut ledger);
        assert!(ledger.abandon(RouterId(9)).is_empty());
        assert_eq!(works(ledger.abandon(RouterId::of(REQUEST))), gone);
        begin(&mut ledger);
        ledger.down(DECODE);
        assert!(ledger.all(now).is_empty());
    }
}
