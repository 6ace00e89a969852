//! Several routers of the same instances: each has its own fleet machine, and learns of the others'
//! placements after a delay.
//!
//! As between `mixfleet router`s, instances report added, progressed and completed work of other routers at
//! once, and the lengths of answers every [`BEAT_S`]. Requests are assigned to the routers in turn, by their
//! ids.

use super::World;
use super::agenda::Next;
use crate::fleet_file::Routing;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{
    Action, Arrival, Event, Fleet, FleetConfig, Instance, InstanceId, OthersWork, Role,
};
use mixfleet_scheduler::table::IdMap;
use std::collections::{BTreeSet, VecDeque};

/// Interval at which instances report the lengths of answers, as in `serve`.
const BEAT_S: f64 = 0.1;

/// What other routers must know of a placed request.
struct Entry {
    prompt_tokens: u32,
    max_tokens: u32,
    class: u32,
    due_s: f64,
    ready_s: f64,
    prefill: InstanceId,
    decode: InstanceId,
    generated: u32,
}

/// The routers' machines.
pub(super) struct RouterMachines {
    fleets: Vec<Fleet>,
    delay_s: f64,
    entries: IdMap<Entry>,
    /// Reports of other routers' work in flight to each router, with their times.
    coming: Vec<VecDeque<(f64, InstanceId, OthersWork)>>,
    /// Requests whose answers have grown since the last beat.
    grown: BTreeSet<u64>,
}

impl RouterMachines {
    pub(super) fn new(config: &FleetConfig, Routing { count, delay_s }: Routing) -> Self {
        let count = count.max(1) as usize;
        RouterMachines {
            fleets: (0..count).map(|_| Fleet::new(config.clone())).collect(),
            delay_s,
            entries: IdMap::default(),
            coming: vec![VecDeque::new(); count],
            grown: BTreeSet::new(),
        }
    }

    /// The first router's machine.
    pub(super) fn first(&self) -> &Fleet {
        &self.fleets[0]
    }

    fn owner(&self, request: u64) -> usize {
        to_usize(request % self.fleets.len() as u64)
    }

    /// Passes an event to the router of its request, or to all, and its effects to the others after the
    /// delay.
    pub(super) fn tell(&mut self, now_s: f64, event: Event, actions: &mut Vec<Action>) {
        if let [fleet] = &mut self.fleets[..] {
            return fleet.step(Seconds(now_s), event, actions);
        }
        match event {
            Event::Arrived(arrival) => self.arrived(now_s, arrival, actions),
            Event::DecodeStep { instance, requests, tokens } => {
                for router in 0..self.fleets.len() {
                    let own = requests.iter().copied().filter(|&request| self.owner(request) == router);
                    let requests: Vec<u64> = own.collect();
                    if requests.is_empty() {
                        continue;
                    }
                    for &request in &requests {
                        if let Some(entry) = self.entries.get_mut(request) {
                            entry.generated += tokens;
                            self.grown.insert(request);
                        }
                    }
                    self.step(router, now_s, Event::DecodeStep { instance, requests, tokens }, actions);
                }
            }
            Event::PrefillProgress { request, tokens, .. } => {
                self.step(self.owner(request), now_s, event, actions);
                self.spread(now_s, request, |entry, now_s| {
                    (entry.prefill, entry.prompt(request, now_s, tokens))
                });
            }
            Event::PrefillDone { request, .. } => {
                self.step(self.owner(request), now_s, event, actions);
                let gone = OthersWork::PromptGone { request, done: true };
                self.spread(now_s, request, |entry, _| (entry.prefill, gone));
                if actions.iter().any(|action| matches!(action, Action::Drop { .. })) {
                    self.ended(now_s, request, false);
                } else if self.entries.get(request).is_some_and(|entry| entry.prefill == entry.decode) {
                    self.joined(now_s, request);
                }
            }
            Event::TransferDone { request, .. } => {
                self.step(self.owner(request), now_s, event, actions);
                self.joined(now_s, request);
            }
            Event::Offered { request, .. } => self.step(self.owner(request), now_s, event, actions),
            Event::Finished { request } | Event::Cancelled { request } => {
                let is_complete = matches!(event, Event::Finished { .. });
                self.step(self.owner(request), now_s, event, actions);
                self.ended(now_s, request, is_complete);
            }
            of_all => {
                for router in 0..self.fleets.len() {
                    self.step(router, now_s, of_all.clone(), actions);
                }
            }
        }
    }

    /// Feeds a router the reports that have arrived by now, and then `event`.
    fn step(&mut self, router: usize, now_s: f64, event: Event, actions: &mut Vec<Action>) {
        let (fleet, coming) = (&mut self.fleets[router], &mut self.coming[router]);
        while coming.front().is_some_and(|(at_s, ..)| *at_s <= now_s) {
            let Some((at_s, instance, work)) = coming.pop_front() else { break };
            fleet.step(Seconds(at_s), Event::Others { instance, works: vec![work] }, actions);
        }
        fleet.step(Seconds(now_s), event, actions);
    }

    fn arrived(&mut self, now_s: f64, arrival: Arrival, actions: &mut Vec<Action>) {
        let Arrival { request, prompt_tokens, max_tokens, class, .. } = arrival;
        self.step(self.owner(request), now_s, Event::Arrived(arrival), actions);
        for action in &*actions {
            if let Action::SetRole { instance, role } = *action {
                self.role_set(now_s, self.owner(request), instance, role);
            }
        }
        let place = actions.iter().find_map(|action| match *action {
            Action::Place { prefill, decode, urgency, ref explanation, .. } => {
                Some((prefill, decode, urgency.due.0, now_s + explanation.ready_in().0))
            }
            _ => None,
        });
        let Some((prefill, decode, due_s, ready_s)) = place else { return };
        let entry = Entry { prompt_tokens, max_tokens, class, due_s, ready_s, prefill, decode, generated: 0 };
        self.entries.insert(request, entry);
        self.spread(now_s, request, |entry, now_s| (prefill, entry.prompt(request, now_s, 0)));
        self.spread(now_s, request, |entry, now_s| (decode, entry.answer(request, now_s)));
    }

    /// Tells the other routers that a router has changed a role.
    fn role_set(&mut self, now_s: f64, by: usize, instance: InstanceId, role: Role) {
        let known = self.fleets[by].instances().find(|known| known.id == instance).cloned();
        let Some(spec) = known else { return };
        for router in (0..self.fleets.len()).filter(|&router| router != by) {
            let spec = Instance { role, ..spec.clone() };
            self.step(router, now_s, Event::InstanceUp(spec), &mut Vec::new());
        }
    }

    fn joined(&mut self, now_s: f64, request: u64) {
        if let Some(entry) = self.entries.get_mut(request) {
            entry.generated = 1;
        }
        self.spread(now_s, request, |entry, now_s| (entry.decode, entry.answer(request, now_s)));
    }

    fn ended(&mut self, now_s: f64, request: u64, is_complete: bool) {
        let gone = OthersWork::PromptGone { request, done: false };
        self.spread(now_s, request, |entry, _| (entry.prefill, gone));
        self.spread(now_s, request, |entry, _| {
            let length = is_complete.then_some(entry.generated.max(1));
            (entry.decode, OthersWork::AnswerGone { request, length })
        });
        self.entries.remove(request);
        self.grown.remove(&request);
    }

    /// Reports that a prompt's prefill begins after its first `tokens`.
    pub(super) fn began(&mut self, now_s: f64, request: u64, tokens: u32) {
        if tokens > 0 {
            self.spread(now_s, request, |entry, at_s| (entry.prefill, entry.prompt(request, at_s, tokens)));
        }
    }

    /// Reports the lengths of answers that have grown.
    fn beat(&mut self, now_s: f64) {
        for request in std::mem::take(&mut self.grown) {
            self.spread(now_s, request, |entry, at_s| (entry.decode, entry.answer(request, at_s)));
        }
    }

    /// Schedules a report for the other routers.
    fn spread(
        &mut self,
        now_s: f64,
        request: u64,
        work: impl FnOnce(&Entry, f64) -> (InstanceId, OthersWork),
    ) {
        let Some(entry) = self.entries.get(request) else { return };
        let at_s = now_s + self.delay_s;
        let (instance, work) = work(entry, at_s);
        let owner = self.owner(request);
        for (_, coming) in self.coming.iter_mut().enumerate().filter(|(router, _)| *router != owner) {
            coming.push_back((at_s, instance, work));
        }
    }
}

impl World<'_> {
    /// Schedules the `number`th beat, if there are several routers.
    pub(super) fn schedule_beat(&mut self, number: u32) {
        if self.routers.fleets.len() > 1 {
            self.schedule(f64::from(number) * BEAT_S, Next::Beat { number });
        }
    }

    pub(super) fn beat(&mut self, number: u32) {
        (0..to_u32(self.engines.len())).for_each(|instance| self.catch_up(instance));
        self.routers.beat(self.now_s);
        self.schedule_beat(number + 1);
    }
}

impl Entry {
    fn prompt(&self, request: u64, at_s: f64, done: u32) -> OthersWork {
        let Entry { prompt_tokens, due_s, prefill, decode, .. } = *self;
        OthersWork::Prompt { request, prefill, due_in: Seconds(due_s - at_s), prompt_tokens, done, decode }
    }

    fn answer(&self, request: u64, at_s: f64) -> OthersWork {
        let Entry { prompt_tokens, max_tokens, class, ready_s, generated, .. } = *self;
        let ready_in = Seconds(ready_s - at_s);
        OthersWork::Answer {
            request,
            prompt_tokens,
            max_tokens,
            ready_in,
            class,
            output_tokens_hint: None,
            generated,
        }
    }
}
