//! Runs the fleet machine under a small simulated fleet with queues, batches, transfers, failing instances
//! and leaving clients. No request may be lost, duplicated or placed on an instance that is down, and
//! replaying a log of events gives the same actions.

use mixfleet_hal::DType;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{
    Coefficients, CostModel, DecodeCoefficients, KvCopyCost, LinkCost, PrefillCoefficients,
};
use mixfleet_scheduler::fleet::{
    Action, Arrival, Event, Fleet, FleetConfig, Instance, InstanceId, Link, PromptChain, Role,
};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::collections::{BTreeMap, VecDeque};

const BLOCK: u32 = 16;
const INSTANCES: [(u32, Role); 5] =
    [(1, Role::Prefill), (2, Role::Auto), (3, Role::Decode), (4, Role::Auto), (5, Role::Decode)];

#[derive(Clone, Copy)]
struct Setup {
    seed: u64,
    requests: u64,
    /// Mean seconds between arrivals.
    gap_s: f64,
    /// Whether instances fail, clients leave, and work takes up to half longer than predicted.
    rough: bool,
    ttft_slo_s: Option<f64>,
    requests_max: usize,
}

/// A future event of the environment. `attempt` and `life` identify events of a lost placement.
#[derive(Clone, Copy, Debug)]
enum Next {
    Arrive { request: u64 },
    PrefillEnd { instance: u32, life: u32, request: u64, attempt: u32 },
    TransferEnd { instance: u32, life: u32, request: u64, attempt: u32 },
    StepEnd { instance: u32, life: u32 },
    Leave { request: u64 },
    Fail { instance: u32 },
    Return { instance: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Rejected,
    Left,
}

#[derive(Default)]
struct Request {
    document: u64,
    prompt: u32,
    output: u32,
    arrived_s: f64,
    produced: u32,
    attempt: u32,
    /// The deadline, set at the first placement.
    due: Option<Seconds>,
    placed: Option<(u32, u32)>,
    prefill_s: f64,
    transfer_s: f64,
    ttft_s: Option<f64>,
    ends: Vec<End>,
}

#[derive(Default)]
struct Worker {
    up: bool,
    life: u32,
    prompts: VecDeque<(u64, u32)>,
    prefilling: bool,
    batch: Vec<(u64, u32)>,
    stepping: bool,
}

struct World {
    setup: Setup,
    random: Stream,
    fleet: Fleet,
    now_s: f64,
    /// Events by time in nanoseconds, then in order of insertion.
    agenda: BTreeMap<(u64, u64), Next>,
    inserted: u64,
    requests: BTreeMap<u64, Request>,
    workers: BTreeMap<u32, Worker>,
    /// Every event with its time as JSON, and every action.
    log: Vec<(f64, String)>,
    actions: Vec<String>,
}

fn config(setup: Setup) -> FleetConfig {
    FleetConfig {
        requests_max: setup.requests_max,
        output_tokens_expected: 20,
        ttft_slo: setup.ttft_slo_s.map(Seconds),
        ..FleetConfig::new(1000, 8)
    }
}

fn instance(id: u32, role: Role) -> Instance {
    let speed = f64::from(id);
    let prefill_s = PrefillCoefficients { overhead: 0.001, per_token: 1e-3 / speed, per_token_squared: 1e-8 };
    let decode_s = DecodeCoefficients { base: 0.02 / speed, per_sequence: 1e-4, per_kv_token: 1e-7 };
    Instance {
        id: InstanceId(id),
        device: format!("part{id}").into(),
        role,
        pool: 0,
        cost: CostModel::Coefficients(Coefficients { prefill_s, decode_s }).into(),
        price: None,
        nic: None,
        kv_capacity_tokens: 20_000,
        kv_block_tokens: BLOCK,
        kv_dtype: DType::F32,
        prefill_tokens_beside_decode_max: Some(128),
        step_tokens_max: 0,
        kv_copies: KvCopyCost::default(),
        kv_parts: mixfleet_scheduler::batch::PageParts::ONE,
    }
}

impl World {
    fn new(setup: Setup) -> Self {
        let mut world = World {
            setup,
            random: Stream::new(setup.seed),
            fleet: Fleet::new(config(setup)),
            now_s: 0.0,
            agenda: BTreeMap::new(),
            inserted: 0,
            requests: BTreeMap::new(),
            workers: BTreeMap::new(),
            log: Vec::new(),
            actions: Vec::new(),
        };
        for (id, role) in INSTANCES {
            world.workers.insert(id, Worker { up: true, ..Worker::default() });
            world.tell(Event::InstanceUp(instance(id, role)));
        }
        for (from, _) in INSTANCES {
            world.link(from);
        }
        world.plan();
        world
    }

    /// Reports the links of an instance to all others.
    fn link(&mut self, from: u32) {
        let cost = LinkCost { latency: Seconds(1e-4), seconds_per_byte: 2e-7, usd_per_byte: 0.0 };
        for (to, _) in INSTANCES {
            self.tell(Event::LinkUp(Link { from: InstanceId(from), to: InstanceId(to), cost }));
        }
    }

    /// Draws arrivals, departures and failures beforehand.
    fn plan(&mut self) {
        let mut time = 0.0;
        for request in 0..self.setup.requests {
            time += -self.setup.gap_s * (1.0 - self.random.next_unit()).ln();
            let document = self.random.below(8);
            let prompt = 20 + self.random.below(500) as u32;
            let output = 1 + self.random.below(40) as u32;
            let new = Request { document, prompt, output, arrived_s: time, ..Request::default() };
            self.requests.insert(request, new);
            self.at(time, Next::Arrive { request });
            if self.setup.rough && self.random.below(10) == 0 {
                let patience = self.random.next_unit();
                self.at(time + patience, Next::Leave { request });
            }
        }
        if self.setup.rough {
            for _ in 0..12 {
                let instance = 1 + self.random.below(5) as u32;
                let (fails, back) = (time * self.random.next_unit(), self.random.next_unit());
                self.at(fails, Next::Fail { instance });
                self.at(fails + back, Next::Return { instance });
            }
        }
    }

    fn at(&mut self, time_s: f64, next: Next) {
        self.inserted += 1;
        self.agenda.insert(((time_s * 1e9) as u64, self.inserted), next);
    }

    fn after(&mut self, predicted_s: f64, next: Next) {
        let factor = if self.setup.rough { 1.0 + 0.5 * self.random.next_unit() } else { 1.0 };
        self.at(self.now_s + predicted_s * factor, next);
    }

    /// Gives the fleet machine an event and carries out its actions.
    fn tell(&mut self, event: Event) {
        self.log.push((self.now_s, serde_json::to_string(&event).unwrap()));
        let mut actions = Vec::new();
        self.fleet.step(Seconds(self.now_s), event, &mut actions);
        for action in actions {
            self.actions.push(serde_json::to_string(&action).unwrap());
            self.obey(action);
        }
    }

    fn obey(&mut self, action: Action) {
        match action {
            Action::Place { request, prefill, decode, urgency, explanation, .. } => {
                let due = urgency.due;
                assert!(self.workers[&prefill.0].up && self.workers[&decode.0].up, "placed on a lost one");
                let terms = explanation.chosen().and_then(|c| c.terms).expect("a placement has terms");
                let state = self.requests.get_mut(&request).unwrap();
                assert_eq!((state.placed, &state.ends[..]), (None, &[][..]), "request {request}");
                state.attempt += 1;
                assert_eq!(
                    *state.due.get_or_insert(due),
                    due,
                    "request {request} lost its place in the order"
                );
                state.placed = Some((prefill.0, decode.0));
                (state.prefill_s, state.transfer_s) = (terms.prefill_s, terms.transfer_s);
                let entry = (request, state.attempt);
                self.workers.get_mut(&prefill.0).unwrap().prompts.push_back(entry);
                self.start_prefill(prefill.0);
            }
            Action::Reject { request, retry_after, .. } => {
                assert!(retry_after.is_none_or(|s| s.0 >= 0.0 && s.0.is_finite()));
                if self.requests[&request].attempt > 0 {
                    // It was accepted once, so it is retried until an instance is back.
                    self.at(self.now_s + 0.1, Next::Arrive { request });
                } else {
                    self.requests.get_mut(&request).unwrap().ends.push(End::Rejected);
                }
            }
            Action::Drop { .. } | Action::SetRole { .. } | Action::Replicate { .. } => {
                panic!("unexpected action: {action:?}")
            }
            Action::Replay { request, .. } => {
                let state = self.requests.get_mut(&request).unwrap();
                assert!(state.placed.take().is_some(), "request {request} was not placed");
                self.at(self.now_s, Next::Arrive { request });
            }
        }
    }

    fn start_prefill(&mut self, instance: u32) {
        let worker = self.workers.get_mut(&instance).unwrap();
        while !worker.prefilling
            && let Some((request, attempt)) = worker.prompts.pop_front()
        {
            let state = &self.requests[&request];
            if state.attempt == attempt && state.placed.is_some() {
                worker.prefilling = true;
                let next = Next::PrefillEnd { instance, life: worker.life, request, attempt };
                let time = state.prefill_s;
                return self.after(time, next);
            }
        }
    }

    fn join(&mut self, instance: u32, request: u64, attempt: u32) {
        self.workers.get_mut(&instance).unwrap().batch.push((request, attempt));
        self.start_step(instance);
    }

    fn start_step(&mut self, instance: u32) {
        let requests = &self.requests;
        let worker = self.workers.get_mut(&instance).unwrap();
        worker
            .batch
            .retain(|(id, attempt)| requests[id].attempt == *attempt && requests[id].placed.is_some());
        if worker.stepping || worker.batch.is_empty() {
            return;
        }
        worker.stepping = true;
        let life = worker.life;
        let sequences = worker.batch.len() as u32;
        let kv_tokens: u32 =
            worker.batch.iter().map(|(id, _)| requests[id].prompt + requests[id].produced).sum();
        let cost = instance_cost(instance);
        let time = cost.decode_step_s(sequences, u64::from(kv_tokens)).0;
        self.after(time, Next::StepEnd { instance, life });
    }

    fn token(&mut self, request: u64) {
        let now_s = self.now_s;
        let state = self.requests.get_mut(&request).unwrap();
        state.produced += 1;
        state.ttft_s.get_or_insert(now_s - state.arrived_s);
        if state.produced == state.output {
            state.placed = None;
            state.ends.push(End::Finished);
            self.tell(Event::Finished { request });
        }
    }

    fn arrive(&mut self, request: u64) {
        let state = &self.requests[&request];
        if !state.ends.is_empty() {
            return;
        }
        let prompt_tokens = state.prompt + state.produced;
        // A document's text, then the request's own.
        let own = |i: u32| if (i + 1) * BLOCK <= state.prompt / 2 { 0 } else { request + 1 };
        let hash = |i: u32| BlockHash(state.document << 48 | own(i) << 16 | u64::from(i));
        let hashes = (0..prompt_tokens / BLOCK).map(hash).collect();
        self.tell(Event::Arrived(Arrival {
            request,
            prompt_tokens,
            max_tokens: state.output - state.produced,
            chains: vec![PromptChain { block_tokens: BLOCK, kv_dtype: DType::F32, hashes }],
            replay: state.due,
            ..Arrival::default()
        }));
    }

    fn happen(&mut self, next: Next) {
        let current = |world: &World, instance: u32, life: u32| world.workers[&instance].life == life;
        let valid = |world: &World, request: u64, attempt: u32| {
            world.requests[&request].attempt == attempt && world.requests[&request].placed.is_some()
        };
        match next {
            Next::Arrive { request } => self.arrive(request),
            Next::PrefillEnd { instance, life, request, attempt } if current(self, instance, life) => {
                self.workers.get_mut(&instance).unwrap().prefilling = false;
                if valid(self, request, attempt) {
                    self.prefilled(instance, request, attempt);
                }
                self.start_prefill(instance);
            }
            Next::TransferEnd { instance, life, request, attempt }
                if current(self, instance, life) && valid(self, request, attempt) =>
            {
                self.tell(Event::TransferDone { request, instance: InstanceId(instance) });
                self.join(instance, request, attempt);
            }
            Next::StepEnd { instance, life } if current(self, instance, life) => {
                let worker = self.workers.get_mut(&instance).unwrap();
                worker.stepping = false;
                let batch: Vec<(u64, u32)> = worker.batch.clone();
                let batch = batch.into_iter().filter(|&(id, attempt)| valid(self, id, attempt));
                let requests: Vec<u64> = batch.map(|(id, _)| id).collect();
                let step = Event::DecodeStep {
                    instance: InstanceId(instance),
                    requests: requests.clone(),
                    tokens: 1,
                };
                self.tell(step);
                requests.into_iter().for_each(|request| self.token(request));
                self.start_step(instance);
            }
            Next::Leave { request } if self.requests[&request].ends.is_empty() => {
                let state = self.requests.get_mut(&request).unwrap();
                state.placed = None;
                state.ends.push(End::Left);
                self.tell(Event::Cancelled { request });
            }
            Next::Fail { instance } if self.workers[&instance].up => {
                let life = self.workers[&instance].life + 1;
                self.workers.insert(instance, Worker { life, ..Worker::default() });
                self.tell(Event::InstanceDown { instance: InstanceId(instance) });
            }
            Next::Return { instance } if !self.workers[&instance].up => {
                self.workers.get_mut(&instance).unwrap().up = true;
                let (_, role) = INSTANCES[instance as usize - 1];
                self.tell(Event::InstanceUp(self::instance(instance, role)));
                self.link(instance);
            }
            _ => {}
        }
    }

    fn prefilled(&mut self, instance: u32, request: u64, attempt: u32) {
        let id = InstanceId(instance);
        self.tell(Event::PrefillDone { request, instance: id });
        let state = &self.requests[&request];
        let shared = (0..state.prompt / 2 / BLOCK).map(|i| BlockHash(state.document << 48 | u64::from(i)));
        let stored = Event::KvStored { instance: id, hashes: shared.collect(), tier: Tier::Device };
        let (transfer_s, decode) = (state.transfer_s, state.placed.map(|(_, decode)| decode));
        self.tell(stored);
        self.token(request);
        match decode.filter(|_| self.requests[&request].placed.is_some()) {
            Some(decode) if decode == instance => self.join(instance, request, attempt),
            Some(decode) => {
                let life = self.workers[&decode].life;
                self.after(transfer_s, Next::TransferEnd { instance: decode, life, request, attempt });
            }
            None => {}
        }
    }

    fn run(mut self) -> Self {
        while let Some(((time_ns, _), next)) = self.agenda.pop_first() {
            self.now_s = time_ns as f64 / 1e9;
            self.happen(next);
        }
        self
    }

    fn count(&self, end: End) -> usize {
        self.requests.values().filter(|request| request.ends == [end]).count()
    }
}

fn instance_cost(id: u32) -> std::sync::Arc<CostModel> {
    instance(id, Role::Auto).cost
}

fn rough(seed: u64) -> Setup {
    Setup { seed, requests: 300, gap_s: 0.02, rough: true, ttft_slo_s: Some(1.0), requests_max: 60 }
}

#[test]
fn every_request_ends_exactly_once_whatever_fails() {
    let (mut replays, mut rejected, mut left) = (0, 0, 0);
    for seed in 0..10 {
        let world = World::new(rough(seed)).run();
        for (id, request) in &world.requests {
            assert_eq!(request.ends.len(), 1, "seed {seed}, request {id}: {:?}", request.ends);
            assert!(request.ends != [End::Finished] || request.produced == request.output);
        }
        assert_eq!(world.fleet.requests(), 0, "seed {seed}: the fleet still holds requests");
        replays += world.actions.iter().filter(|action| action.contains("\"replay\"")).count();
        rejected += world.count(End::Rejected);
        left += world.count(End::Left);
    }
    // The runs covered the intended cases.
    assert!(replays > 20 && rejected > 20 && left > 20, "{replays} {rejected} {left}");
}

#[test]
fn equal_seeds_give_equal_actions_and_a_log_replays() {
    let (a, b) = (World::new(rough(3)).run(), World::new(rough(3)).run());
    assert_eq!(a.actions, b.actions);
    assert_ne!(a.actions, World::new(rough(4)).run().actions);

    let mut fleet = Fleet::new(config(rough(3)));
    let mut actions = Vec::new();
    for (time, event) in &a.log {
        fleet.step(Seconds(*time), serde_json::from_str(event).unwrap(), &mut actions);
    }
    let replayed: Vec<String> = actions.iter().map(|action| serde_json::to_string(action).unwrap()).collect();
    assert_eq!(replayed, a.actions);
}

#[test]
fn under_overload_whoever_is_accepted_is_served_in_time() {
    let slo = 0.5;
    let ttft_slo_s = Some(slo);
    let setup = Setup { seed: 1, requests: 600, gap_s: 0.004, rough: false, ttft_slo_s, requests_max: 600 };
    let world = World::new(setup).run();
    let (finished, rejected) = (world.count(End::Finished), world.count(End::Rejected));
    assert_eq!(finished + rejected, 600);
    assert!(finished > 100 && rejected > 100, "{finished} finished, {rejected} rejected");
    let late = world.requests.values().filter(|r| r.ttft_s.is_some_and(|ttft| ttft > slo)).count();
    assert_eq!(late, 0);
    let free = World::new(Setup { ttft_slo_s: None, ..setup }).run();
    let late = free.requests.values().filter(|r| r.ttft_s.is_some_and(|ttft| ttft > slo)).count();
    assert!(late > 100, "without early rejection only {late} are late");
}
