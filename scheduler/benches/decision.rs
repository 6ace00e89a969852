//! The time of a placement: one `Event::Arrived` with 100 blocks in a busy fleet, by the number of instances.
//!
//! `cargo bench -p mixfleet-scheduler --bench decision`: criterion's mean, and quantiles of single decisions.

#![allow(missing_docs, clippy::print_stdout)]

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use mixfleet_hal::DType;
use mixfleet_hal::random::{Stream, bits};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_scheduler::cost::{
    Coefficients, CostModel, DecodeCoefficients, KvCopyCost, LinkCost, PrefillCoefficients,
};
use mixfleet_scheduler::fleet::{
    Action, Arrival, Event, Fleet, FleetConfig, Instance, InstanceId, PromptChain, Role,
};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u32 = 16;
const BLOCKS: u32 = 100;
/// Number of documents that prompts begin with.
const DOCUMENTS: u64 = 5000;
/// Blocks of a prompt that belong to its document.
const SHARED: u32 = 60;
/// Prompts waiting for each prefill instance.
const WAITING: usize = 2;
/// Answers in progress at each decode instance.
const DECODING: usize = 32;

struct World {
    fleet: Fleet,
    random: Stream,
    requests: u64,
    waiting: VecDeque<(u64, InstanceId, InstanceId)>,
    decoding: VecDeque<u64>,
    instances: usize,
    actions: Vec<Action>,
    now: f64,
}

impl World {
    /// A fleet in which half of the instances prefill and half decode, with two speeds of each, at two
    /// prices.
    fn new(instances: u32) -> Self {
        let config = FleetConfig {
            ttft_slo: Some(Seconds(30.0)),
            tbt_slo: Some(Seconds(0.1)),
            pull: true,
            ..FleetConfig::new(320 * 1024, 80)
        };
        let mut fleet = Fleet::new(config);
        let mut actions = Vec::new();
        let cost = |speed: f64| {
            let prefill_s =
                PrefillCoefficients { overhead: 0.01, per_token: 1e-4 / speed, per_token_squared: 1e-9 };
            let decode_s = DecodeCoefficients { base: 0.02 / speed, per_sequence: 1e-5, per_kv_token: 3e-8 };
            Arc::new(CostModel::Coefficients(Coefficients { prefill_s, decode_s }))
        };
        let costs = [cost(1.0), cost(2.0)];
        for id in 0..instances {
            let fast = (id / 2 % 2) as usize;
            let spec = Instance {
                id: InstanceId(id),
                device: "part".into(),
                role: if id % 2 == 0 { Role::Prefill } else { Role::Decode },
                pool: id % 2,
                cost: costs[fast].clone(),
                price: Some(UsdPerHour(1.0 + fast as f64)),
                nic: Some(LinkCost { seconds_per_byte: 1e-11, ..LinkCost::default() }),
                kv_capacity_tokens: 1_000_000,
                kv_block_tokens: BLOCK,
                kv_dtype: DType::F32,
                prefill_tokens_beside_decode_max: Some(2048),
                step_tokens_max: 2048,
                kv_copies: KvCopyCost::default(),
                kv_parts: mixfleet_scheduler::batch::PageParts::ONE,
            };
            fleet.step(Seconds::ZERO, Event::InstanceUp(spec), &mut actions);
        }
        let mut world = World {
            fleet,
            random: Stream::new(1),
            requests: 0,
            waiting: VecDeque::new(),
            decoding: VecDeque::new(),
            instances: instances as usize,
            actions: Vec::new(),
            now: 0.0,
        };
        while world.decoding.len() < world.instances / 2 * DECODING {
            let arrival = world.arrival();
            world.decide(arrival);
            world.go_on();
        }
        world
    }

    fn tell(&mut self, event: Event) {
        self.fleet.step(Seconds(self.now), event, &mut self.actions);
    }

    fn arrival(&mut self) -> Event {
        let (request, document) = (self.requests, self.random.below(DOCUMENTS));
        self.requests += 1;
        let of = |block: u32| if block < SHARED { document } else { DOCUMENTS + request };
        let hashes = (0..BLOCKS).map(|block| BlockHash(bits(of(block), u64::from(block)))).collect();
        Event::Arrived(Arrival {
            request,
            prompt_tokens: BLOCKS * BLOCK + 1,
            max_tokens: 4096,
            chains: vec![PromptChain { block_tokens: BLOCK, kv_dtype: DType::F32, hashes }],
            ..Arrival::default()
        })
    }

    /// The measured operation.
    fn decide(&mut self, arrival: Event) {
        self.actions.clear();
        self.tell(arrival);
    }

    /// Plays the rest of a request's events, and enough other requests to keep the fleet equally busy.
    fn go_on(&mut self) {
        let Some(Action::Place { request, prefill, decode, .. }) = self.actions.first() else {
            panic!("not placed: {:?}", self.actions)
        };
        let (request, prefill, decode) = (*request, *prefill, *decode);
        self.waiting.push_back((request, prefill, decode));
        // Time advances as fast as the fleet computes prompts.
        self.now += 0.1 / (self.instances as f64 / 2.0);
        while self.waiting.len() > self.instances / 2 * WAITING {
            let Some((request, prefill, decode)) = self.waiting.pop_front() else { break };
            let document = self.random.below(DOCUMENTS);
            let hashes = (0..SHARED).map(|block| BlockHash(bits(document, u64::from(block)))).collect();
            self.tell(Event::KvStored { instance: prefill, hashes, tier: Tier::Device });
            self.tell(Event::PrefillDone { request, instance: prefill });
            self.tell(Event::TransferDone { request, instance: decode });
            self.tell(Event::DecodeStep { instance: decode, requests: vec![request], tokens: 100 });
            self.decoding.push_back(request);
        }
        while self.decoding.len() > self.instances / 2 * DECODING {
            let Some(request) = self.decoding.pop_front() else { break };
            self.tell(Event::Finished { request });
        }
    }

    fn decision(&mut self) -> Duration {
        let arrival = self.arrival();
        let start = Instant::now();
        self.decide(arrival);
        let took = start.elapsed();
        self.go_on();
        took
    }
}

fn decision(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decision");
    for instances in [16, 100, 1000] {
        let mut world = World::new(instances);
        group.bench_function(BenchmarkId::from_parameter(instances), |bencher| {
            bencher.iter_custom(|count| (0..count).map(|_| world.decision()).sum());
        });
        let mut times: Vec<f64> = (0..20_000).map(|_| world.decision().as_secs_f64() * 1e6).collect();
        times.sort_by(f64::total_cmp);
        let (p50, p99) = (times[times.len() / 2], times[times.len() / 100 * 99]);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        println!("{instances} instances: mean {mean:.1} us, p50 {p50:.1} us, p99 {p99:.1} us");
    }
    group.finish();
}

criterion_group!(benches, decision);
criterion_main!(benches);
