//! A fleet of simulated devices, started from a plan's FLEET.toml, on requests that the plan did not see.
//!
//! The plan is made from rates and runs of the simulator. Here the engine of `serve` runs on time-only
//! devices of the same parts, in virtual time, so that what the simulator leaves out would show.

use crate::engine::parts;
use crate::fleet::clock::WorldClock;
use mixfleet_hal::catalog::{Part, part};
use mixfleet_hal::economics::{Price, Selection};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds, UsdPerHour};
use mixfleet_hal::{DType, Device, StoredAs};
use mixfleet_planner::repair::{RepairLimits, TrialLoad};
use mixfleet_runtime::engine::{EngineConfig, InstanceLimits, InstanceSpec, Loaded};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::RandomCheckpoint;
use mixfleet_runtime::request::Update;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{FleetConfig, Policy};
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::candidates::ServiceLevel;
use mixfleet_scheduler::plan::load::LoadTally;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PlannedPool};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_scheduler::{engines, models::KnownModel};
use mixfleet_sim::fleet_file::{FleetFile, InstancePool, PlannedText};
use mixfleet_sim::simulate::{Choices, Setup};
use mixfleet_sim::trace::{ReadOptions, Request, Trace};
use mixfleet_simulated::TimeOnlyDevice;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum KV of an instance, since the host holds its written part: 12 KiB for a token.
const KV_TOKENS_MAX: u64 = 120_000;
/// Fleets of the ranking that are repaired.
const REPAIRED: usize = 3;

/// The planned load, and the served load.
struct Scene {
    model: &'static KnownModel,
    /// The parts on offer, at built-in prices.
    parts: &'static [&'static str],
    level: ServiceLevel,
    attain: f64,
    /// Factor by which the trace's requests arrive faster.
    speedup: f64,
    /// Share of requests that the plan adds to those in its trace.
    headroom: f64,
    /// Seconds of the trace for the plan, and for serving.
    seen: Range<f64>,
    unseen: Range<f64>,
}

/// Requests of an hour of chats; made-up ones of like lengths where there is no trace.
fn hour() -> Vec<Request> {
    let name = "traces/AzureLLMInferenceTrace_conv_2023.csv.zst";
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data").join(name);
    if file.is_file() {
        return Trace::open(&file, ReadOptions::default()).unwrap().collect::<Result<_, _>>().unwrap();
    }
    println!("SKIPPED: no ../shared/data/{name}: made-up requests in its place");
    let (mut random, mut at_s) = (Stream::new(7), 0.0);
    let made = (0..20_000).map(|id| {
        at_s -= (1.0 - random.next_unit()).ln() / 5.5;
        let mut tokens =
            |mean: f64| (mean * (0.9 * random.next_normal() - 0.4).exp()).clamp(4.0, 4000.0) as u32;
        Request {
            id,
            at: Seconds(at_s),
            prompt_tokens: tokens(1150.0),
            output_tokens: tokens(210.0),
            chain: Vec::new(),
            session: None,
            class: None,
        }
    });
    made.collect()
}

impl Scene {
    /// The requests of a part of the trace, as they arrive.
    fn requests(&self, hour: &[Request], from: &Range<f64>) -> Vec<Request> {
        let start = hour[0].at.0 + from.start;
        let own = hour.iter().filter(|request| from.contains(&(request.at.0 - hour[0].at.0)));
        own.map(|request| Request { at: Seconds((request.at.0 - start) / self.speedup), ..request.clone() })
            .collect()
    }

    fn trials<'a>(&self, requests: &'a [Request], policy: Policy) -> TrialLoad<'a> {
        let choices = Choices { policy, ..Choices::default() };
        TrialLoad { requests, block_tokens: None, speedup: 1.0, share: self.attain, choices }
    }

    fn market(&self, requests: &[Request]) -> (Market, Vec<Price>) {
        let mut tally = LoadTally::default();
        requests.iter().for_each(|request| tally.add(request.prompt_tokens, request.output_tokens, 0));
        let mut classes = tally.classes(requests[requests.len() - 1].at, self.attain);
        classes.iter_mut().for_each(|class| class.rate *= 1.0 + self.headroom);
        let known: Vec<&Part> = self.parts.iter().map(|id| part(id).unwrap()).collect();
        let price = |part: &&Part| Selection::default().price_or_reference(part.id, &[]).unwrap();
        let prices: Vec<Price> = known.iter().map(price).collect();
        let offered = |(part, price): (&&'static Part, &Price)| OfferedPart::new(part, price.usd_per_hour);
        let market = Market::new(MarketAsk {
            model: self.model,
            stored: vec![StoredAs::Plain(DType::Bf16)],
            expert_skew: 0.0,
            engine: engines::find("mixfleet").unwrap(),
            parts: known.iter().zip(&prices).map(offered).collect(),
            classes,
            answer_tokens_max: Setup::MAX_TOKENS,
            level: self.level,
            attain: self.attain,
            confidence: 0.5,
            nic: BytesPerSecond(InstancePool::NIC_GB_PER_S * GB),
            links: Vec::new(),
        });
        (market, prices)
    }

    /// The cheapest fleet that holds on the requests that the plan sees, as FLEET.toml, and the same with an
    /// instance less of each pool.
    fn plan(&self, seen: &[Request]) -> (String, Vec<String>) {
        let (market, prices) = self.market(seen);
        let text = PlannedText { market: &market, prices: &prices };
        let (policy, stored) = (Policy::LeastLoaded, market.ask().stored[0]);
        let trials = TrialLoad { speedup: 1.0 + self.headroom, ..self.trials(seen, policy) };
        let mut best: Option<(f64, Vec<PlannedPool>)> = None;
        let mut ranked = market.rank(&Microlp, REPAIRED);
        ranked.retain(|fleet| fleet.pools.iter().all(|pool| pool.attends.is_none()));
        for fleet in ranked.into_iter().take(REPAIRED) {
            let pools = fleet.pools;
            let file = parsed(&text.of(&pools, stored, &PlannedTiers::default(), policy));
            let with = |counts: &[u32]| {
                let all = pools.iter().zip(counts);
                all.map(|(pool, count)| PlannedPool { count: *count, ..pool.clone() }).collect::<Vec<_>>()
            };
            let rent = |counts: &[u32]| market.usd_per_hour(&with(counts), stored).0;
            let limits = RepairLimits {
                fits: &|_| true,
                rent: &rent,
                go_on: &|| true,
                exchanges: false,
                told: &|_, _| (),
            };
            let found = trials.repair(&file, &limits).unwrap().unwrap();
            let mut pools = with(&found.counts);
            pools.retain(|pool| pool.count > 0);
            let usd = market.usd_per_hour(&pools, stored).0;
            if found.trial.held && best.as_ref().is_none_or(|(least, _)| usd < *least) {
                best = Some((usd, pools));
            }
        }
        let (usd, pools) = best.expect("a fleet that holds");
        println!("planned for {} requests, ${usd:.2}/h:", seen.len());
        for pool in &pools {
            let id = market.parts()[pool.part].part.id;
            println!("  {} x {} {id} {:?}", pool.count, pool.layout.devices, pool.duty);
        }
        let less = |at: usize| {
            let mut fewer = pools.clone();
            fewer[at].count -= 1;
            text.of(&fewer, stored, &PlannedTiers::default(), policy)
        };
        (text.of(&pools, stored, &PlannedTiers::default(), policy), (0..pools.len()).map(less).collect())
    }

    /// Share of `requests` that meet the objectives on the fleet of `text`: in the simulator, and in the
    /// engine.
    fn attained(&self, text: &str, requests: &[Request]) -> [f64; 2] {
        let (file, policy) = (parsed(text), policy_of(text));
        let counts: Vec<u32> = file.pools.iter().map(|pool| pool.count).collect();
        let trials = self.trials(requests, policy);
        let simulated = trials.trial(&file, &counts, true, &|| true).unwrap().unwrap();
        [simulated.attained, self.served(&file, policy, requests)]
    }

    fn served(&self, file: &FleetFile, policy: Policy, requests: &[Request]) -> f64 {
        let env = SeededEnv::with_blocking_workers(1);
        let checkpoint = RandomCheckpoint::of_shape(self.model).unwrap();
        let config = Arc::new(checkpoint.model_config().unwrap());
        let every = file.pools.iter().flat_map(|pool| std::iter::repeat_n(pool, pool.count as usize));
        let instances: Vec<_> =
            every.zip(0..).map(|(pool, at)| instance(pool, at, &checkpoint, &env)).collect();
        let fleet = FleetConfig { policy, ..EngineConfig::default().fleet };
        let engine = parts::of_file(file, &env, &config, fleet);
        let handle = engine.start(instances, parts::links()).unwrap();
        let (world, level, wanted) = (env.clone(), self.level, requests.to_vec());
        let held = env.run(async move {
            let (mut answers, start) = (Vec::new(), world.now());
            for request in wanted {
                let wait = (start + request.at).0 - world.now().0;
                world.sleep(Duration::from_secs_f64(wait.max(0.0))).await;
                let mut random = Stream::new(request.id);
                let vocab = u64::from(config.vocab);
                let prompt: Vec<u32> =
                    (0..request.prompt_tokens).map(|_| random.below(vocab) as u32).collect();
                let submitted = handle.submit(parts::greedy(
                    request.id.to_string(),
                    prompt.into(),
                    request.output_tokens,
                ));
                let came = world.now();
                let Ok(mut updates) = submitted.await else { continue };
                let (clock, (sender, answer)) = (world.clone(), tokio::sync::oneshot::channel());
                world.spawn(Box::pin(async move {
                    let mut times = vec![came];
                    while let Some(update) = updates.recv().await {
                        if matches!(update, Update::Token { .. }) {
                            times.push(clock.now());
                        }
                    }
                    let _ =
                        sender.send(times.len() as u32 > request.output_tokens && level_holds(level, &times));
                }));
                answers.push(answer);
            }
            let mut held = 0;
            for answer in answers {
                held += u32::from(answer.await.unwrap());
            }
            held
        });
        f64::from(held) / requests.len() as f64
    }
}

/// Whether the first token, and the mean of the longest tenth of the gaps, come in time.
fn level_holds(level: ServiceLevel, times: &[Seconds]) -> bool {
    let mut gaps: Vec<f64> = times.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    let ttft = gaps.remove(0);
    gaps.sort_by(|a, b| b.total_cmp(a));
    let longest = &gaps[..gaps.len().div_ceil(10)];
    let tbt = longest.iter().sum::<f64>() / longest.len().max(1) as f64;
    ttft <= level.ttft.0 && tbt <= level.tbt.0
}

fn parsed(text: &str) -> FleetFile {
    FleetFile::parse(text, Path::new(""), &|path| Err(format!("{} is not read", path.display()))).unwrap()
}

/// The policy that a fleet file names for `simulate` and `serve`.
fn policy_of(text: &str) -> Policy {
    let file: toml::Table = text.parse().unwrap();
    let named = file.get("scheduling").and_then(|table| table.get("policy"));
    named.map_or(Policy::default(), |name| name.clone().try_into().unwrap())
}

/// A time-only device of a pool's part, with the model loaded and the limits of the pool.
fn instance(
    pool: &InstancePool,
    at: u32,
    checkpoint: &RandomCheckpoint,
    env: &SeededEnv,
) -> (Loaded, CostModel) {
    assert_eq!(pool.devices_per_instance, 1, "an instance of the engine is one device");
    let part = part(pool.device.as_deref().unwrap()).unwrap();
    let profile = part.best_profile();
    let clock = Arc::new(WorldClock(env.clone()));
    let device: Arc<dyn Device> =
        Arc::new(TimeOnlyDevice::new(&format!("{}-{at}", pool.name), profile, clock).unwrap());
    let config = Arc::new(checkpoint.model_config().unwrap());
    let weights = checkpoint.unwritten(&*device).unwrap();
    let limits = InstanceLimits {
        activations: DType::Bf16,
        kv: DType::Bf16,
        kv_bytes: pool.cache_tokens.min(KV_TOKENS_MAX) * config.kv_bytes_per_token(DType::Bf16),
        step_tokens_max: pool.engine.max_batched_tokens,
        prefill_tokens_beside_decode_max: pool.engine.max_prefill_tokens_beside_decode,
        sequences_max: pool.engine.max_sequences,
        block_tokens: None,
    };
    let price = pool.usd_per_hour.map(UsdPerHour);
    let spec = InstanceSpec { device, weights, role: pool.role, price, limits };
    (Loaded::new(&config, spec).unwrap(), pool.cost.clone())
}

/// With `MIXFLEET_UNSEEN` (seconds) this much of the trace is planned for, and as much served.
#[test]
fn a_planned_fleet_of_simulated_devices_meets_its_objective_on_requests_that_the_plan_did_not_see() {
    let long = std::env::var("MIXFLEET_UNSEEN").map_or(30.0, |value| value.parse().expect("seconds"));
    let (first, second) = (600.0, 2220.0);
    let scene = Scene {
        model: find("qwen2.5-0.5b").unwrap(),
        parts: &["L4", "A10G"],
        level: ServiceLevel { ttft: Seconds(1.0), tbt: Seconds(0.05) },
        attain: 0.95,
        speedup: 20.0,
        headroom: 0.2,
        seen: first..first + long,
        unseen: second..second + long,
    };
    let hour = hour();
    let (seen, unseen) = (scene.requests(&hour, &scene.seen), scene.requests(&hour, &scene.unseen));
    let (text, less) = scene.plan(&seen);
    let [simulated, served] = scene.attained(&text, &unseen);
    println!("of {} others {served:.4} hold in the engine, {simulated:.4} in the simulator", unseen.len());
    assert!(served >= scene.attain, "{served}");
    for text in less {
        let [simulated, served] = scene.attained(&text, &unseen);
        println!("  with an instance less {served:.4}, {simulated:.4} in the simulator");
        assert!(served < scene.attain, "{served} hold with\n{text}");
    }
}
