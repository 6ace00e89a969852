//! Measures what attention offload gains at equal cost: by the rates of a plan, by a simulation, and by the
//! engine of `serve` in virtual time, under one load.
//!
//! Clients in a closed loop each have a context, which their first request computes; all later ones find it
//! in the cache of the instance but for its last block, so that the instance does little but decode. Only
//! tokens of the time in which all clients decode are counted.
//!
//! The engine's single device stands for the whole group, and takes the times that the cost model of the pool
//! predicts for the layers of a step, as `serve` does for simulated parts that share a model. Its model has
//! one small layer in place of those of Llama-3.1-70B, whose KV would not fit into the host, so that tokens
//! are hashes of its KV and times are those of the large one.

use super::parts;
use crate::fleet::clock::WorldClock;
use mixfleet_hal::catalog::part;
use mixfleet_hal::random::{Stream, bits};
use mixfleet_hal::units::{BytesPerSecond, GB, Seconds};
use mixfleet_hal::{Cmd, DType, Device, StoredAs};
use mixfleet_runtime::engine::{EngineConfig, InstanceLimits, InstanceSpec, Loaded};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::RandomCheckpoint;
use mixfleet_runtime::request::{EngineHandle, Update};
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::engines;
use mixfleet_scheduler::fleet::{Admission, FleetConfig};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::plan::candidates::{
    InstanceKind, PartKernels, ProductsKind, RequestSize, ServiceLevel,
};
use mixfleet_scheduler::plan::layouts::InstanceLayout;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Setup, run};
use mixfleet_sim::trace::{ConversationTurn, Request};
use mixfleet_simulated::{GroupTimes, TimeOnlyDevice};
use serde_json::json;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ENGINE: &str = "vllm";
/// Four cards of 400 Gbit/s each, at what such a card was measured to reach (arXiv 2405.01814).
const NETWORK_GB_PER_S: f64 = 4.0 * 45.7;
const PRICES: [(&str, f64); 3] = [("H100-SXM-80GB", 2.69), ("RTX-4090", 0.34), ("H20-96GB", 0.80)];
const TBT_S: f64 = 0.05;
const BLOCK_TOKENS: u32 = 16;
/// Answers of each client that decode beside those of all others; the first and the last only partly.
const ROUNDS: u32 = 3;
/// The largest difference between any two of the three, of gains and of tokens per second; and that between
/// the simulator and the engine, which run the same machines on the same costs.
const APART_MAX: f64 = 0.1;
const SAME_MAX: f64 = 0.03;

fn price(id: &str) -> f64 {
    PRICES.iter().find(|(known, _)| *known == id).unwrap().1
}

/// Four H100 with the weights of the model, and devices that attend for them.
#[derive(Clone, Copy, Debug)]
struct Case {
    attending: Option<(&'static str, u32)>,
    /// Tokens of a prompt, and of an answer.
    input_tokens: u32,
    output_tokens: u32,
}

/// When an answer began and ended.
#[derive(Clone, Copy, Debug)]
struct Answer {
    first_s: f64,
    end_s: f64,
}

/// Requests of this many clients, with their times.
struct Load {
    case: Case,
    clients: u32,
    /// Time by which all contexts are computed.
    computed: Seconds,
    /// Time over which the first answers of clients then begin.
    ramp: Seconds,
}

impl Load {
    /// The earliest time of a client's request in this round; the first round computes its context.
    fn at(&self, client: u32, round: u32) -> Seconds {
        match round {
            0 => Seconds::ZERO,
            _ => self.computed + self.ramp * (f64::from(client) / f64::from(self.clients)),
        }
    }

    fn output_tokens(&self, round: u32) -> u32 {
        if round == 0 { 1 } else { self.case.output_tokens }
    }

    /// Tokens per second of the time in which all clients decode, by the answers of each in their order.
    fn rate(&self, answers: &[Vec<Answer>]) -> f64 {
        assert!(answers.iter().all(|own| own.len() == ROUNDS as usize), "all are answered");
        let begin = answers.iter().map(|own| own[0].first_s).fold(0.0, f64::max);
        let end = answers.iter().map(|own| own[own.len() - 1].end_s).fold(f64::INFINITY, f64::min);
        let shortest = TBT_S / 4.0 * f64::from(self.case.output_tokens);
        assert!(end - begin > shortest, "all decode together from {begin} to {end} s");
        let tokens = |answer: &Answer| {
            let within = answer.end_s.min(end) - answer.first_s.max(begin);
            let share = within.max(0.0) / (answer.end_s - answer.first_s);
            share * f64::from(self.case.output_tokens - 1)
        };
        answers.iter().flatten().map(tokens).sum::<f64>() / (end - begin)
    }
}

/// Times of a group of devices as those of one.
#[derive(Debug)]
struct StandIn {
    cost: CostModel,
    /// Layers, and columns of logits.
    model: (u32, u32),
}

impl GroupTimes for StandIn {
    fn time(&self, batch: &[Cmd]) -> Option<Seconds> {
        self.cost.of_operations(batch.iter().map(|cmd| *cmd.sig()), self.model)
    }
}

impl Case {
    fn usd_per_hour(&self) -> f64 {
        let attending = self.attending.map_or(0.0, |(id, count)| price(id) * f64::from(count));
        4.0 * price("H100-SXM-80GB") + attending
    }

    /// USD per million tokens.
    fn usd_per_mtok(&self, tokens_per_s: f64) -> f64 {
        self.usd_per_hour() / (tokens_per_s * 3600.0) * 1e6
    }

    fn kind(&self) -> InstanceKind {
        let (model, engine) = (find("llama-3.1-70b").unwrap(), engines::find(ENGINE).unwrap());
        let (own, layout) = (part("H100-SXM-80GB").unwrap(), InstanceLayout::of(4));
        let (h100, stored) = (PartKernels::of(own), StoredAs::Plain(DType::Bf16));
        let Some((id, count)) = self.attending else {
            return InstanceKind::of((own, &h100), layout, (model, 0.0), stored, engine).unwrap();
        };
        let products = ProductsKind::of((own, &h100), layout, model, stored, engine).unwrap();
        let others = PartKernels::of(part(id).unwrap());
        products.with(&others, count, BytesPerSecond(NETWORK_GB_PER_S * GB)).unwrap()
    }

    /// Sequences in a step, and tokens per second, by the rates of a plan; a step has as many sequences as
    /// find room for their contexts when all are longest.
    fn planned(&self) -> (u32, f64) {
        let level = ServiceLevel { ttft: Seconds(30.0), tbt: Seconds(TBT_S) };
        let cached = f64::from(self.input_tokens - BLOCK_TOKENS) / f64::from(self.input_tokens);
        let (input_tokens, output_tokens) = (self.input_tokens, self.output_tokens);
        let size = RequestSize { input_tokens, output_tokens, cached_share: cached };
        let mut kind = self.kind();
        let most = kind.carries(Duty::Whole, &size, &level).unwrap().batch;
        // a hundredth stays free for sequences that grow
        let room = self.fleet(most).pools[0].cache_tokens * 99 / 100;
        let longest = (input_tokens + output_tokens).next_multiple_of(BLOCK_TOKENS);
        kind.sequences_max = most.min((room / u64::from(longest)) as u32);
        let carried = kind.carries(Duty::Whole, &size, &level).unwrap();
        assert_eq!(carried.batch, kind.sequences_max, "{self:?}: fewer sequences take no longer");
        (carried.batch, f64::from(carried.batch) / carried.latency.0)
    }

    /// The fleet of one such instance, for this many sequences.
    fn fleet(&self, clients: u32) -> FleetFile {
        let device = self.attending.map_or_else(
            || "device = \"H100-SXM-80GB\"".to_owned(),
            |(id, count)| format!("device = \"attn:H100-SXM-80GB,{id}\"\nattn_devices = {count}"),
        );
        let text = format!(
            "version = 1\n[kv]\nblock_tokens = {BLOCK_TOKENS}\n[model]\nname = \"llama-3.1-70b\"\n\
             [slo]\ntbt_s = {TBT_S}\n[engine]\nname = \"{ENGINE}\"\n\
             [[pool]]\nname = \"group\"\n{device}\ndevices_per_instance = 4\n\
             nic_gb_per_s = {NETWORK_GB_PER_S:?}\nmax_sequences = {clients}\n"
        );
        let none = |path: &Path| Err(format!("{} is not read", path.display()));
        FleetFile::parse(&text, Path::new(""), &none).unwrap()
    }

    fn load(&self, clients: u32, file: &FleetFile) -> Load {
        let prompt_s = file.pools[0].cost.prefill_s(0, self.input_tokens);
        let ramp = Seconds(TBT_S * f64::from(self.output_tokens));
        Load { case: *self, clients, computed: prompt_s * (2.0 * f64::from(clients)), ramp }
    }
}

/// The answers of a simulated run, by client.
struct Seen {
    clients: u32,
    answers: Vec<Vec<Answer>>,
}

impl Observer for Seen {
    fn finished(&mut self, _: f64, times: &AnswerTimes) {
        let Some(later) = times.request.checked_sub(u64::from(self.clients)) else { return };
        let first_s = times.arrived_s + times.ttft_s;
        let end_s = times.arrived_s + times.e2e_s;
        self.answers[(later / u64::from(ROUNDS)) as usize].push(Answer { first_s, end_s });
    }
}

fn simulated(load: &Load, file: &FleetFile) -> f64 {
    let (clients, rounds) = (load.clients, ROUNDS);
    // the contexts first, then the answers of one client after the other's
    let later = (0..clients).flat_map(|client| (1..=rounds).map(move |round| (client, round)));
    let all = (0..clients).map(|client| (client, 0)).chain(later);
    let requests = all.zip(0u64..).map(|((client, round), id)| {
        let blocks = u64::from(load.case.input_tokens / BLOCK_TOKENS);
        let key = |block| BlockHash(bits(u64::from(client) + 1, block));
        let after = match round {
            0 => None,
            1 => Some(u64::from(client)),
            _ => Some(id - 1),
        };
        Ok(Request {
            id,
            at: load.at(client, round),
            prompt_tokens: load.case.input_tokens,
            output_tokens: load.output_tokens(round),
            chain: (0..blocks).map(key).collect(),
            session: Some(ConversationTurn {
                id: u64::from(client),
                after,
                think: Seconds::ZERO,
                left: Some(rounds - round),
            }),
            class: None,
        })
    });
    let setup = Setup::new(file, Choices { admission: Admission::None, ..Choices::default() });
    assert_eq!(setup.block_tokens, BLOCK_TOKENS);
    let mut seen = Seen { clients, answers: vec![Vec::new(); clients as usize] };
    let results = run(&setup, requests, &mut seen).unwrap();
    assert_eq!(results.completed, u64::from(clients * (rounds + 1)), "all are served");
    load.rate(&seen.answers)
}

/// One small layer, whose attention reads KV of as many tokens as a large model's.
fn small_model() -> RandomCheckpoint {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "bos_token_id": 254, "eos_token_id": 255, "torch_dtype": "bfloat16",
    });
    RandomCheckpoint { config: config.as_object().unwrap().clone(), dtype: DType::Bf16, seed: 1 }
}

fn engine(file: &FleetFile, env: &SeededEnv) -> EngineHandle {
    let (pool, checkpoint) = (&file.pools[0], small_model().load().unwrap());
    let config = Arc::new(checkpoint.config.clone());
    let own = part("H100-SXM-80GB").unwrap();
    let profile = own.best_profile();
    let times = Arc::new(StandIn { cost: pool.cost.clone(), model: (config.layers, config.vocab) });
    let clock = Arc::new(WorldClock(env.clone()));
    let device: Arc<dyn Device> =
        Arc::new(TimeOnlyDevice::of_group(&pool.name, profile, clock, times).unwrap());
    let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
    let limits = InstanceLimits {
        activations: DType::Bf16,
        kv: DType::Bf16,
        kv_bytes: pool.cache_tokens * config.kv_bytes_per_token(DType::Bf16),
        step_tokens_max: pool.engine.max_batched_tokens,
        prefill_tokens_beside_decode_max: pool.engine.max_prefill_tokens_beside_decode,
        sequences_max: pool.engine.max_sequences,
        block_tokens: Some(BLOCK_TOKENS),
    };
    let spec = InstanceSpec { device, weights, role: pool.role, price: None, limits };
    let fleet = FleetConfig { admission: Admission::None, ..EngineConfig::default().fleet };
    let parts = parts::of_file(file, env, &config, fleet);
    parts.start(vec![(Loaded::new(&config, spec).unwrap(), pool.cost.clone())], parts::links()).unwrap()
}

/// Tokens per second of the engine, and the prompt tokens that a later request of a client computes.
fn served(load: &Arc<Load>, file: &FleetFile) -> (f64, u32) {
    let env = SeededEnv::with_blocking_workers(1);
    let handle = engine(file, &env);
    let most_computed = Arc::new(Mutex::new(0));
    let (world, own, most) = (env.clone(), load.clone(), most_computed.clone());
    let answers = env.run(async move {
        let mut ends = Vec::new();
        for client in 0..own.clients {
            let (sender, end) = tokio::sync::oneshot::channel();
            let one = answers_of(client, world.clone(), handle.clone(), own.clone(), most.clone());
            world.spawn(Box::pin(async move {
                let _ = sender.send(one.await);
            }));
            ends.push(end);
        }
        drop(handle);
        let mut answers = Vec::new();
        for end in ends {
            answers.push(end.await.unwrap());
        }
        answers
    });
    env.end();
    let most_computed = *most_computed.lock().unwrap();
    (load.rate(&answers), most_computed)
}

async fn answers_of(
    client: u32,
    env: SeededEnv,
    handle: EngineHandle,
    load: Arc<Load>,
    most_computed: Arc<Mutex<u32>>,
) -> Vec<Answer> {
    let mut random = Stream::new(u64::from(client));
    let prompt: Arc<[u32]> = (0..load.case.input_tokens).map(|_| random.below(250) as u32).collect();
    let mut answers = Vec::new();
    for round in 0..=ROUNDS {
        let wait = load.at(client, round).0 - env.now().0;
        env.sleep(Duration::from_secs_f64(wait.max(0.0))).await;
        let request = parts::greedy(format!("{client}-{round}"), prompt.clone(), load.output_tokens(round));
        let mut updates = handle.submit(request).await.unwrap();
        let (mut first_s, mut tokens) = (None, 0);
        while let Some(update) = updates.recv().await {
            match update {
                Update::Token { .. } => {
                    first_s.get_or_insert(env.now().0);
                    tokens += 1;
                }
                Update::Started { cached_tokens } if round > 0 => {
                    let mut most = most_computed.lock().unwrap();
                    *most = (*most).max(load.case.input_tokens - cached_tokens);
                }
                Update::Failed(failure) => panic!("{client}-{round}: {failure:?}"),
                _ => {}
            }
        }
        assert_eq!(tokens, load.output_tokens(round), "{client}-{round}");
        if round > 0 {
            answers.push(Answer { first_s: first_s.unwrap(), end_s: env.now().0 });
        }
    }
    answers
}

/// Tokens per second planned, simulated and served.
fn rates(case: Case) -> [f64; 3] {
    let (clients, planned) = case.planned();
    let file = case.fleet(clients);
    let load = Arc::new(case.load(clients, &file));
    let simulated = simulated(&load, &file);
    let (served, computed) = served(&load, &file);
    assert!(computed <= BLOCK_TOKENS, "{case:?}: {computed} tokens of a context were computed again");
    let rates = [planned, simulated, served];
    let of = rates.map(|rate| format!("{rate:.0} tokens/s ${:.3}/Mtok", case.usd_per_mtok(rate)));
    println!(
        "{:?}, {} and {} tokens, {clients} sequences: planned {}, simulated {}, served {}",
        case.attending, case.input_tokens, case.output_tokens, of[0], of[1], of[2]
    );
    rates
}

/// The largest ratio of two of them, less 1.
fn spread(values: &[f64]) -> f64 {
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most / values.iter().copied().fold(f64::INFINITY, f64::min) - 1.0
}

/// Cases of Lamina and Step-3: attention of Llama-3.1-70B on 16 RTX 4090 at a context of 2K, and on 8 H20 at
/// 4K, each beside four H100, against these alone. With a single H20 all three say that it loses.
///
/// With `MIXFLEET_EQUAL_COST` (tokens of an answer) answers are so long.
#[test]
fn plan_simulation_and_engine_agree_on_what_attention_apart_gains_at_equal_cost_and_where_it_loses() {
    let answers = std::env::var("MIXFLEET_EQUAL_COST").map_or(65, |value| value.parse().expect("tokens"));
    let case = |attending, context: u32| Case {
        attending,
        // the middle of an answer is at this context
        input_tokens: (context - answers / 2) / BLOCK_TOKENS * BLOCK_TOKENS,
        output_tokens: answers,
    };
    let (short, long) = (2048, 4096);
    let alone = [short, long].map(|context| (case(None, context), rates(case(None, context))));
    for (id, count, context, wins) in [
        ("RTX-4090", 16, short, None),
        ("H20-96GB", 8, long, Some(true)),
        ("H20-96GB", 1, short, Some(false)),
    ] {
        let (alone, without) = alone[usize::from(context == long)];
        let apart = case(Some((id, count)), context);
        let with = rates(apart);
        let gains = [0, 1, 2].map(|by| alone.usd_per_mtok(without[by]) / apart.usd_per_mtok(with[by]));
        let [planned, simulated, served] = gains;
        println!("  {count} x {id}: gain {planned:.3} planned, {simulated:.3} simulated, {served:.3} served");
        for values in [with, without, gains] {
            assert!(spread(&values) < APART_MAX, "{id}: {values:?} differ by more than {APART_MAX}");
            assert!(spread(&values[1..]) < SAME_MAX, "{id}: {values:?} differ by more than {SAME_MAX}");
        }
        if let Some(wins) = wins {
            assert!(gains.iter().all(|gain| (*gain > 1.0) == wins), "{id}: {gains:?}");
        }
    }
}
