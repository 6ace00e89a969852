//! What each instance has to do, and when it will probably be done.

use super::{Instance, InstanceId, RequestId};
use mixfleet_hal::units::Seconds;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The requests in the fleet.
pub(super) type Works = BTreeMap<RequestId, Work>;

/// A request that has its place.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) prompt_tokens: u32,
    pub(super) max_tokens: u32,
    /// Assumed length of the answer.
    pub(super) output_tokens: u32,
    pub(super) prefill: InstanceId,
    pub(super) decode: InstanceId,
    /// Predicted end of prefill and transfer, made at placement.
    pub(super) ready_at: Seconds,
    pub(super) phase: Phase,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// `done` prompt tokens have their KV; the rest takes `remaining`.
    Prefill {
        done: u32,
        remaining: Seconds,
    },
    Transfer,
    Decode {
        generated: u32,
    },
}

impl Work {
    pub(super) fn generated(&self) -> u32 {
        match self.phase {
            Phase::Decode { generated } => generated,
            _ => 0,
        }
    }

    /// Assumed length of the whole answer. One that outlived its estimate is taken to be half-way.
    fn output_expected(&self) -> u32 {
        let generated = self.generated();
        if generated < self.output_tokens {
            self.output_tokens
        } else {
            generated.saturating_mul(2).min(self.max_tokens).max(generated)
        }
    }

    fn decodes_from(&self, now: Seconds) -> Seconds {
        match self.phase {
            Phase::Decode { .. } => now,
            _ => self.ready_at.max(now),
        }
    }
}

/// Sequences that decode together, with the KV that a step reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) sequences: u32,
    pub(super) kv_tokens: u64,
}

impl Batch {
    pub(super) fn with(self, kv_tokens: u64) -> Batch {
        Batch { sequences: self.sequences + 1, kv_tokens: self.kv_tokens + kv_tokens }
    }
}

/// Prefill work that waits or runs on an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Backlog {
    /// Predicted time of all of it, undisturbed.
    pub(super) time: Seconds,
    /// Steps that it takes beside decodes.
    pub(super) chunks: u64,
}

/// An instance that is up, with its work.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) spec: Instance,
    /// Prompts placed here, in order of arrival; the first one runs.
    pub(super) prefilling: VecDeque<RequestId>,
    /// When the first prompt began, or last made progress.
    pub(super) moved_at: Seconds,
    /// Requests whose tokens come, or will come, from here.
    pub(super) decoding: BTreeSet<RequestId>,
}

impl Load {
    pub(super) fn new(spec: Instance) -> Self {
        Load { spec, prefilling: VecDeque::new(), moved_at: Seconds::ZERO, decoding: BTreeSet::new() }
    }

    /// Steps beside decodes that `tokens` of prompt take.
    pub(super) fn chunks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.spec.prefill_tokens_beside_decode_max.max(1)))
    }

    /// Prefill work ahead of a new arrival. The first prompt has run since it last made progress.
    pub(super) fn backlog(&self, works: &Works, now: Seconds) -> Backlog {
        let mut backlog = Backlog { time: Seconds::ZERO, chunks: 0 };
        let mut running = (now - self.moved_at).max(Seconds::ZERO);
        for work in self.prefilling.iter().filter_map(|id| works.get(id)) {
            if let Phase::Prefill { done, remaining } = work.phase {
                backlog.time += (remaining - running).max(Seconds::ZERO);
                backlog.chunks += self.chunks(work.prompt_tokens - done);
                running = Seconds::ZERO;
            }
        }
        backlog
    }

    fn works<'a>(&'a self, works: &'a Works) -> impl Iterator<Item = &'a Work> {
        self.decoding.iter().filter_map(|id| works.get(id))
    }

    /// Who decodes here now.
    pub(super) fn batch(&self, works: &Works) -> Batch {
        let running = self.works(works).filter(|work| matches!(work.phase, Phase::Decode { .. }));
        running.fold(Batch::default(), |batch, work| {
            batch.with(u64::from(work.prompt_tokens) + u64::from(work.generated()))
        })
    }

    pub(super) fn step(&self, batch: Batch) -> Seconds {
        self.spec.cost.decode_step_s(batch.sequences, batch.kv_tokens)
    }

    /// What its decoding requests are predicted to do, all at the present step's pace.
    pub(super) fn forecast(&self, works: &Works, now: Seconds) -> Forecast {
        let batch = self.batch(works);
        let first = self.works(works).next().map_or(0, |work| u64::from(work.prompt_tokens));
        // Nothing decodes yet: the pace is that of the first sequence alone.
        let pace = self.step(if batch.sequences == 0 { Batch::default().with(first) } else { batch });
        let courses = self.works(works).map(|work| {
            let remaining = work.output_expected() - work.generated();
            let from = work.decodes_from(now);
            let context = u64::from(work.prompt_tokens) + u64::from(work.generated());
            Course { from, until: from + pace * f64::from(remaining), context, remaining }
        });
        Forecast { now, pace, capacity_tokens: self.spec.kv_capacity_tokens, courses: courses.collect() }
    }
}

/// A request's predicted way through decode.
#[derive(Clone, Copy, Debug)]
struct Course {
    from: Seconds,
    until: Seconds,
    /// Tokens at `from`.
    context: u64,
    /// Tokens still to come.
    remaining: u32,
}

/// The near future of an instance that decodes.
#[derive(Clone, Debug)]
pub(super) struct Forecast {
    now: Seconds,
    /// Per token.
    pace: Seconds,
    capacity_tokens: u64,
    courses: Vec<Course>,
}

impl Forecast {
    /// Who will probably decode at the later time `then`: without those who will have ended, with
    /// those whose prefill will have. The load of now would be stale by the time a new prompt is
    /// done, and admission by it oscillates (Mooncake, section 7).
    pub(super) fn batch_at(&self, then: Seconds) -> Batch {
        let present = self.courses.iter().filter(|course| course.from <= then && then < course.until);
        present.fold(Batch::default(), |batch, course| {
            let tokens = (then - course.from) / self.pace.max(Seconds(f64::MIN_POSITIVE));
            batch.with(course.context + tokens.min(f64::from(course.remaining)) as u64)
        })
    }

    /// Everyone who decodes here or will, together.
    pub(super) fn everyone(&self) -> Batch {
        self.courses.iter().fold(Batch::default(), |batch, course| batch.with(course.context))
    }

    /// Tokens of the present requests that fall beside a newcomer's `output_tokens`, at most.
    pub(super) fn tokens_beside(&self, output_tokens: u32) -> u64 {
        self.courses.iter().map(|course| u64::from(course.remaining.min(output_tokens))).sum()
    }

    /// Time until enough requests will have ended that `tokens` of KV fit beside the rest.
    pub(super) fn kv_wait(&self, tokens: u64) -> Seconds {
        let held = |course: &Course| course.context + u64::from(course.remaining);
        let mut total: u64 = self.courses.iter().map(held).sum();
        let mut courses: Vec<&Course> = self.courses.iter().collect();
        courses.sort_by(|a, b| a.until.0.total_cmp(&b.until.0));
        let mut wait = Seconds::ZERO;
        for course in courses {
            if total + tokens <= self.capacity_tokens {
                break;
            }
            total -= held(course);
            wait = course.until - self.now;
        }
        wait
    }

    /// Time until the first request ends, if there is any.
    pub(super) fn first_end(&self) -> Option<Seconds> {
        self.courses.iter().map(|course| course.until - self.now).reduce(Seconds::min)
    }
}
