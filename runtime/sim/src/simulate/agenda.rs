//! Scheduled events in order of time, and of scheduling at equal times.

use mixfleet_hal::units::Ordered;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A scheduled event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Next {
    /// The instance's steps end, unless it has a later plan than this.
    StepsEnd { instance: u32, plan: u64 },
    /// The instance may have something to start: a message came.
    Wake { instance: u32 },
    /// A prompt's KV has arrived at its decode instance.
    Landed { request: u64, attempt: u32 },
    /// An instance has room for KV, of which it holds `held_tokens`: senders get the notice, after direct
    /// messages.
    Reserved { instance: u32, request: u64, attempt: u32, held_tokens: u32 },
    /// The decode instance has taken over a request: its prefill instance gets the notice.
    TakenOver { request: u64, attempt: u32 },
    /// A reservation was revoked.
    Revoked { instance: u32, request: u64, attempt: u32 },
    /// An instance has handled a request to lend, and sends the prefix once it is on its devices.
    Lent { from: u32, prefix: LentPrefix, ready: Ordered },
    /// Blocks of a sequence have come from lower tiers of its instance.
    Loaded { instance: u32, request: u64, attempt: u32, blocks: u32 },
    /// A pulled prefix has arrived: of a prompt, or of a copy ahead of demand.
    Pulled { from: u32, prefix: LentPrefix },
    /// Routers receive the lengths of other routers' answers, for the `number`th time.
    Beat { number: u32 },
    /// An instance becomes slower, by the setup's slowdown at `index`.
    SlowsDown { index: u32 },
    /// A request arrives later than in the trace, after an answer that took longer.
    Arrive { request: u64 },
}

/// A prefix that an instance sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LentPrefix {
    pub(super) request: u64,
    pub(super) attempt: u32,
    pub(super) to: u32,
    /// Leading tokens that the receiver has once it has arrived.
    pub(super) tokens: u32,
    /// Tokens to send, some of which are on the sender's devices.
    pub(super) sent: u32,
    pub(super) gathered: u32,
}

/// The scheduled events.
#[derive(Default)]
pub(super) struct Agenda {
    heap: BinaryHeap<Reverse<(Ordered, u64, Next)>>,
    /// Events scheduled for the current time, which are half of all: a queue is cheaper.
    soon: VecDeque<(u64, Next)>,
    soon_s: f64,
    scheduled: u64,
}

impl Agenda {
    pub(super) fn next_at(&self) -> Option<f64> {
        if self.soon_is_next() { Some(self.soon_s) } else { self.heap.peek().map(|Reverse((at, ..))| at.0) }
    }

    pub(super) fn schedule(&mut self, now_s: f64, at_s: f64, next: Next) {
        self.scheduled += 1;
        if at_s == now_s && (self.soon.is_empty() || self.soon_s == at_s) {
            self.soon_s = at_s;
            self.soon.push_back((self.scheduled, next));
        } else {
            self.heap.push(Reverse((Ordered(at_s), self.scheduled, next)));
        }
    }

    pub(super) fn pop(&mut self) -> Option<(f64, Next)> {
        if self.soon_is_next() {
            return self.soon.pop_front().map(|(_, next)| (self.soon_s, next));
        }
        self.heap.pop().map(|Reverse((at, _, next))| (at.0, next))
    }

    fn soon_is_next(&self) -> bool {
        let Some(&(number, _)) = self.soon.front() else { return false };
        self.heap.peek().is_none_or(|Reverse((at, other, _))| (Ordered(self.soon_s), number) < (*at, *other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::Stream;

    #[test]
    fn what_is_scheduled_happens_in_order_of_time_and_at_one_time_as_scheduled() {
        for seed in 0..50 {
            let mut random = Stream::new(seed);
            let (mut agenda, mut naive, mut now_s, mut number) = (Agenda::default(), Vec::new(), 0.0, 0);
            for _ in 0..400 {
                if random.below(5) > 1 {
                    let at_s = now_s + random.below(3) as f64;
                    agenda.schedule(now_s, at_s, Next::Arrive { request: number });
                    naive.push((at_s, number));
                    number += 1;
                    continue;
                }
                let first = naive.iter().copied().min_by(|a, b| a.partial_cmp(b).expect("times order"));
                assert_eq!(agenda.next_at(), first.map(|(at_s, _)| at_s), "seed {seed}");
                let popped = agenda.pop();
                assert_eq!(
                    popped,
                    first.map(|(at_s, request)| (at_s, Next::Arrive { request })),
                    "seed {seed}"
                );
                naive.retain(|&other| Some(other) != first);
                now_s = first.map_or(now_s, |(at_s, _)| at_s);
            }
        }
    }
}
