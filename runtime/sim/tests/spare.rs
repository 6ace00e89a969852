//! Devices that compute prompts and attend to a part of what others decode.

#![allow(clippy::print_stdout)]

use crate::common::{at_random, fleet_from};
use mixfleet_hal::catalog::part;
use mixfleet_hal::economics::Price;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::cost::{CostModel, Lending};
use mixfleet_scheduler::engines;
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::plan::candidates::{InstanceKind, PartKernels, RequestSize, ServiceLevel};
use mixfleet_scheduler::plan::layouts::InstanceLayout;
use mixfleet_scheduler::plan::load::SizeClass;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PlannedPool, PlannedSpare};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::capacity::{Goal, Probe, search};
use mixfleet_sim::fleet_file::{FleetFile, PlannedText};
use mixfleet_sim::simulate::{Choices, Observer, Results, Setup, run};
use mixfleet_sim::trace::{Request, Requests, TraceError};
use std::path::Path;

const H100: &str = "H100-SXM-80GB";

/// Llama-3.1-8B on a part: this many prefill and decode instances, the latter with `more` keys.
fn fleet(part: &str, [prefill, decode]: [u32; 2], slo: &str, more: &str) -> FleetFile {
    fleet_from(&format!(
        "version = 1\n[model]\nname = 'llama-3.1-8b'\n[slo]\n{slo}\n[engine]\nname = 'vllm'\n\
         [[pool]]\nname = 'prefill'\nrole = 'prefill'\ncount = {prefill}\ndevice = '{part}'\nnic_gb_per_s = 50.0\n\
         [[pool]]\nname = 'decode'\nrole = 'decode'\ncount = {decode}\ndevice = '{part}'\nnic_gb_per_s = 50.0\n{more}"
    ))
}

const SPARE: &str = "attn_pool = 'prefill'\nattn_pool_share = 0.75\n";

fn run_all(file: &FleetFile, requests: &[Request]) -> Results {
    let setup = Setup::new(file, Choices { admission: Admission::None, ..Choices::default() });
    run(&setup, requests.iter().cloned().map(Ok), &mut ()).unwrap()
}

/// Short prompts with long answers, all at once, then long prompts with answers of one token from `from_s`
/// on.
fn load(answers: u32, prompts: u32, from_s: f64) -> Vec<Request> {
    let request = |id: u32, at_s: f64, prompt_tokens, output_tokens| Request {
        id: id.into(),
        at: Seconds(at_s),
        prompt_tokens,
        output_tokens,
        chain: Vec::new(),
        session: None,
        class: None,
    };
    let first = (0..answers).map(|id| request(id, 0.0, 2048, 3001));
    first.chain((answers..answers + prompts).map(|id| request(id, from_s, 8192, 1))).collect()
}

#[test]
fn prompts_and_answers_cost_each_other_what_they_take_of_the_devices() {
    let slo = "ttft_s = 1000.0\ntbt_s = 10.0";
    let (file, plain) = (fleet(H100, [1, 1], slo, SPARE), fleet(H100, [1, 1], slo, ""));
    let cost = file.lent()[1].cost.clone();
    let batch = 96;
    let keys = u64::from(batch) * (2048 + 1500);
    let step = |tenants: u32| cost.among(tenants).unwrap().decode_step_s(batch, keys).0;
    assert!(step(2) > 1.1 * step(1), "both sides are seen: {} {}", step(1), step(2));

    // long answers alone, whose prompts take a few seconds of their time
    let alone = run_all(&file, &load(batch, 0, 0.0));
    let ratio = alone.tpot_s.p50 / step(1);
    assert!((0.97..1.08).contains(&ratio), "alone: {ratio}");

    // prompts all along
    let (from_s, count) = (0.0, 400);
    let both = run_all(&file, &load(batch, count, from_s));
    let ratio = both.tpot_s.p50 / step(2);
    assert!((0.95..1.05).contains(&ratio), "beside prompts: {ratio}");
    let computed = |results: &Results| results.pools[0].prefill_device_s;
    let none = run_all(&plain, &load(batch, count, from_s));
    // while answers decode, attention has its share of the device
    let lost = computed(&both) - computed(&none);
    let share = cost.spare_share(batch, keys);
    let decoded = both.pools[1].decode_device_s * share;
    let ratio = lost / decoded;
    assert!(share > 0.1 && (0.9..1.1).contains(&ratio), "{lost} s lost, {decoded} s attended to: {ratio}");
}

/// The highest rate of requests of this size at which 95 % meet the objectives on a fleet of these parts.
fn capacity(part: &str, counts: [u32; 2], [input, output]: [u64; 2], ttft_s: f64, more: &str) -> f64 {
    let mut random = Stream::new(7);
    let mut request = |id: u64, at: &mut f64| {
        *at -= (1.0 - random.next_unit()).ln();
        let [prompt_tokens, output_tokens] =
            [input, output].map(|mean| (mean / 2 + random.below(mean)) as u32);
        let (at, chain) = (Seconds(*at), Vec::new());
        Request { id, at, prompt_tokens, output_tokens, chain, session: None, class: None }
    };
    let mut at = 0.0;
    let requests: Vec<Request> = (0..1500).map(|id| request(id, &mut at)).collect();
    let file = fleet(part, counts, &format!("ttft_s = {ttft_s:?}\ntbt_s = 0.1"), more);
    let goal = Goal { requests: requests.len() as u64, share: 0.95 };
    let setup = Setup::new(&file, Choices { admission: Admission::None, ..Choices::default() });
    let probe = |speedup: f64| {
        let all = requests.iter().cloned().map(Ok).speedup(speedup);
        let results = run(&setup, all, &mut Hurried(goal))?;
        let reached = goal.attainable(results.missed);
        Ok::<_, TraceError>(Probe::new(speedup, goal.share, goal.requests, at / speedup, reached))
    };
    search(probe).unwrap().best.unwrap().requests_per_s
}

/// Ends a probe as soon as its goal is out of reach.
struct Hurried(Goal);

impl Observer for Hurried {
    fn is_decided(&self, missed: u64) -> bool {
        self.0.is_out_of_reach(missed)
    }
}

/// As many devices of a part with and without, divided between prompts and decoding as is best for each.
#[test]
fn it_gains_where_whole_instances_divide_badly_and_loses_where_they_divide_well() {
    let share = |share: f64| format!("attn_pool = 'prefill'\nattn_pool_share = {share:?}\n");
    for (part, size, alone, (with, of_room), wins) in [
        (H100, [8000, 300], [2, 1], ([2, 1], 0.25), true),
        ("L40S", [4000, 300], [2, 2], ([3, 1], 0.75), true),
        (H100, [4000, 300], [1, 1], ([1, 1], 0.25), false),
    ] {
        let rates = [capacity(part, alone, size, 5.0, ""), capacity(part, with, size, 5.0, &share(of_room))];
        let gain = rates[1] / rates[0];
        println!(
            "{part} {size:?}: {alone:?} {:.2}/s, {with:?} with {of_room} lent {:.2}/s: {gain:.3}",
            rates[0], rates[1]
        );
        assert!(if wins { gain > 1.05 } else { gain < 0.95 }, "{part} {size:?}: {rates:?}");
    }
}

/// A plan of this many lending prefill instances, and this many decode instances, of H100.
fn planned(counts: [u32; 2]) -> (Market, Vec<PlannedPool>) {
    let size = RequestSize { input_tokens: 4000, output_tokens: 400, cached_share: 0.0 };
    let market = Market::new(MarketAsk {
        model: find("llama-3.1-8b").unwrap(),
        stored: vec![StoredAs::Plain(DType::Bf16)],
        expert_skew: 0.0,
        engine: engines::find("vllm").unwrap(),
        parts: vec![OfferedPart::new(part(H100).unwrap(), UsdPerHour(2.69))],
        classes: vec![SizeClass { size, slowest: size, rate: 1.0 }],
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.1) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(50e9),
        links: Vec::new(),
    });
    let layout = InstanceLayout::of(1);
    let lends = PlannedSpare { part: 0, layout };
    let pool = |duty, count, spare| PlannedPool { part: 0, layout, attends: None, spare, duty, count };
    let pools = vec![pool(Duty::Prefill, counts[0], None), pool(Duty::Decode, counts[1], Some(lends))];
    (market, pools)
}

#[test]
fn what_a_plan_writes_lends_as_the_plan_has_it() {
    let none = |path: &Path| Err(format!("{} is not read", path.display()));
    let kernels = PartKernels::of(part(H100).unwrap());
    for (counts, share) in [([1, 1], 0.5), ([3, 1], 0.5), ([1, 2], 2.0 / 3.0)] {
        let (market, pools) = planned(counts);
        let prices = [Price { usd_per_hour: UsdPerHour(2.69), basis: "a list".into(), date: None }];
        let text = PlannedText { market: &market, prices: &prices };
        let write = |pools: &[PlannedPool]| {
            let stored = StoredAs::Plain(DType::Bf16);
            text.of(pools, stored, &PlannedTiers::default(), Policy::default())
        };
        let file = FleetFile::parse(&write(&pools), Path::new(""), &none).unwrap();
        let spare = file.pools[1].spare.as_ref().unwrap();
        assert_eq!((spare.pool.as_str(), spare.share), (file.pools[0].name.as_str(), None));
        assert!(!write(&pools[1..]).contains("attn_pool"), "the lender is not in the fleet");

        // room and times are those by which the plan counts
        let lending = Lending::of(counts[0], counts[1]);
        let ask = market.ask();
        let own = (part(H100).unwrap(), &kernels);
        let layout = InstanceLayout::of(1);
        let model = (ask.model, ask.stored[0]);
        let kind = InstanceKind::with_others(own, &kernels, layout, model, ask.engine, ask.nic).unwrap();
        let borrowed = share * kind.room().0 * f64::from(lending.lenders) / f64::from(lending.borrowers);
        let kind = kind.borrowing(lending.lenders, lending.borrowers + 1, Bytes(borrowed));
        let pool = &file.lent()[1];
        let tokens = (kind.room().0 + borrowed) / file.model.kv_bytes_per_token;
        let ratio = pool.cache_tokens as f64 / tokens;
        assert!((ratio - 1.0).abs() < 0.01, "{counts:?}: {ratio}");
        for batch in [8, 64, 200] {
            let keys = batch * 4200;
            let steps = [&kind.cost, &pool.cost].map(|cost| cost.decode_step_s(batch as u32, keys).0);
            assert!((steps[0] / steps[1] - 1.0).abs() < 0.02, "{counts:?}, {batch}: {steps:?}");
            let taken = kind.takes_of_others(&ask.classes[0].size, batch as u32);
            let share = pool.cost.spare_share(batch as u32, keys);
            assert!((taken / share - 1.0).abs() < 0.03, "{counts:?}, {batch}: {taken} {share}");
        }
    }
}

#[test]
fn equal_runs_are_equal_and_every_request_is_served_with_any_counts() {
    let requests =
        at_random(20_261_126, 20.0, 8.0, |random| (200 + random.below(6000), 1 + random.below(300)));
    for (prefill, decode) in [(1, 1), (3, 2), (2, 5), (4, 1)] {
        let file = fleet(H100, [prefill, decode], "ttft_s = 10.0", SPARE);
        let [one, other] = [0, 1].map(|_| run_all(&file, &requests));
        assert_eq!(one.completed, requests.len() as u64, "{prefill} for {decode}");
        assert_eq!(serde_json::to_string(&one).unwrap(), serde_json::to_string(&other).unwrap());
    }
}

#[test]
fn nobody_shares_where_nobody_lends() {
    let mut file = fleet(H100, [1, 1], "ttft_s = 10.0", SPARE);
    assert!(Setup::new(&file, Choices::default()).shares());
    file.pools[0].count = 0;
    let setup = Setup::new(&file, Choices::default());
    assert!(!setup.shares());
    assert!(matches!(*setup.instances[0].spec.cost, CostModel::Spare(_)), "it decodes alone");
}
