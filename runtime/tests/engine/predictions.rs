//! What `serve` predicts of parts against the time that they take.
//!
//! A device's time comes from published tables of single kernels (`../shared/data/measured`). The prediction
//! comes from the catalog, which has some 3 % of the points of these tables, and from the calibration that
//! `serve` begins with. A part without a table gets a relative's, scaled by the ratio of their datasheets and
//! by a factor for each kind of kernel that the catalog does not know.
//!
//! `MIXFLEET_PREDICTIONS=full` tries each model on each part; otherwise each part has one model.

use crate::engine::parts;
use crate::fleet::clock::WorldClock;
use mixfleet_hal::catalog::{LawKind, Part, part};
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::engine::calibrate::CalibrationBudget;
use mixfleet_runtime::engine::{EngineConfig, InstanceLimits, InstanceSpec, Loaded};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::{ModelConfig, RandomCheckpoint};
use mixfleet_runtime::request::Update;
use mixfleet_scheduler::cost::{CostModel, Prefill};
use mixfleet_scheduler::fleet::{Admission, FleetConfig, Role};
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::sizing::{MEMORY_SHARE, ridge, step_tokens};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Setup, run};
use mixfleet_sim::trace::Request;
use mixfleet_simulated::TimeOnlyDevice;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Parts, and the tables that their times are made of.
const PARTS: [(&str, &str); 12] = [
    ("A100-SXM-80GB", "a100_sxm"),
    ("H100-SXM-80GB", "h100_sxm"),
    ("H200-SXM-141GB", "h200_sxm"),
    ("L40S", "l40s"),
    ("RTX-PRO-6000-SE", "rtx_pro_6000_server"),
    ("L4", "l40s"),
    ("L40", "l40s"),
    ("RTX-4090", "l40s"),
    ("RTX-5090", "rtx_pro_6000_server"),
    ("A100-PCIe-80GB", "a100_sxm"),
    ("H100-PCIe-80GB", "h100_sxm"),
    ("H20-96GB", "h200_sxm"),
];
/// Parts of [`PARTS`] that have tables of their own.
const WITH_TABLES: usize = 5;
const MODELS: [&str; 5] = ["llama-3.1-8b", "qwen2.5-7b", "llama-3.2-3b", "qwen2.5-14b", "llama-2-7b"];
const PROMPTS: [u32; 6] = [100, 500, 1500, 4000, 12_000, 30_000];
const BATCHES: [u32; 4] = [1, 7, 48, 200];
/// A chunk beside decodes.
const BESIDE: Prefill = Prefill { context: 1000, tokens: 400, last: true };

/// Memory of devices here, on which models fit that their parts have no room for.
const MEMORY: Bytes = Bytes(400e9);
/// What steps take of a part's memory.
const ACTIVATIONS: Bytes = Bytes(2e9);
const KV_TOKENS_MIN: u64 = 16_000;

/// An error that a hundredth of predictions may exceed, and the largest one.
const OFF: f64 = 0.10;
const OFF_MAX: f64 = 0.15;
const OFTEN_MAX: f64 = 0.01;
/// The largest mean error of predictions from a calibration alone.
const ALONE_MEAN_MAX: f64 = 0.05;
/// The largest difference between `serve` and `simulate`.
const APART_MAX: f64 = 0.05;

/// The points of each device's tables.
type Tables = HashMap<String, Vec<(LawKind, Point)>>;

/// Reads the tables once; `None`, said aloud, where they are absent.
fn tables() -> Option<&'static Tables> {
    static TABLES: OnceLock<Option<Tables>> = OnceLock::new();
    TABLES.get_or_init(read).as_ref()
}

fn read() -> Option<Tables> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured");
    let mut tables = Tables::new();
    for (file, kind, dtype, columns) in [
        ("gemm.csv", LawKind::Gemm, "gemm_dtype", ["m", "n", "k"].as_slice()),
        (
            "decode_attention.csv",
            LawKind::AttnDecode,
            "kv_cache_dtype",
            &["batch_size", "seq", "num_heads", "nkv"],
        ),
        ("context_attention.csv", LawKind::AttnPrefill, "", &["batch_size", "seq", "num_heads", "nkv"]),
    ] {
        let path = directory.join(file);
        let Ok(mut reader) = csv::Reader::from_path(&path) else {
            println!("SKIPPED: no ../shared/data/measured/{file}: predictions not compared");
            return None;
        };
        for row in reader.deserialize::<HashMap<String, String>>() {
            let row = row.unwrap();
            if row.get(dtype).is_some_and(|dtype| dtype != "bfloat16") {
                continue;
            }
            let mut shape: Vec<u32> = columns.iter().map(|column| row[*column].parse().unwrap()).collect();
            if kind == LawKind::AttnPrefill {
                shape.insert(2, 0);
            }
            let sig = kind.sig(DType::Bf16, &shape).unwrap();
            let time = Seconds(row["latency"].parse::<f64>().unwrap() * 1e-3);
            tables.entry(row["device"].clone()).or_default().push((kind, Point { sig, time }));
        }
    }
    Some(tables)
}

/// The measured profile of the part at this index of [`PARTS`].
fn truth(at: usize, tables: &Tables) -> DeviceProfile {
    let (id, table) = PARTS[at];
    let own = part(id).unwrap().profile();
    let of_table = PARTS.iter().find(|(_, known)| *known == table).unwrap().0;
    let lender = part(of_table).unwrap().profile();
    let mut random = Stream::new(at as u64);
    let factors: BTreeMap<&str, f64> = LawKind::ALL
        .map(|kind| (kind.name(), if at < WITH_TABLES { 1.0 } else { 0.85 + 0.3 * random.next_unit() }))
        .into();
    let point = |(kind, point): &(LawKind, Point)| {
        let scale = own.roofline(&point.sig) / lender.roofline(&point.sig) * factors[kind.name()];
        Point { sig: point.sig, time: point.time * scale }
    };
    // several samples of a size count once
    let mut seen = HashMap::new();
    let points: Vec<Point> =
        tables[table].iter().map(point).filter(|point| seen.insert(point.sig, ()).is_none()).collect();
    DeviceProfile { points, memory: MEMORY, ..own }
}

/// KV capacity of an instance in tokens: the memory that the weights leave free, or [`KV_TOKENS_MIN`] where
/// these do not fit.
fn kv_tokens(part: &Part, config: &ModelConfig) -> u64 {
    let weights = config.cost_shape(DType::Bf16, DType::Bf16, 16).weight_bytes(config.tied_embeddings);
    let left = MEMORY_SHARE * part.memory_bytes().0 - weights.0 - ACTIVATIONS.0;
    ((left / config.kv_bytes_per_token(DType::Bf16) as f64) as u64).max(KV_TOKENS_MIN)
}

/// The device that takes the times of `profile`, with the model loaded, in limits that `serve` chooses.
fn loaded(part: &Part, profile: DeviceProfile, model: &RandomCheckpoint, env: &SeededEnv) -> Loaded {
    let clock = Arc::new(WorldClock(env.clone()));
    let device: Arc<dyn Device> = Arc::new(TimeOnlyDevice::new("part", profile, clock).unwrap());
    let weights = model.unwritten(&*device).unwrap();
    let config = Arc::new(model.model_config().unwrap());
    let shape = config.cost_shape(DType::Bf16, DType::Bf16, 16);
    let limits = InstanceLimits {
        activations: DType::Bf16,
        kv: DType::Bf16,
        kv_bytes: kv_tokens(part, &config) * config.kv_bytes_per_token(DType::Bf16),
        step_tokens_max: step_tokens(&shape, ridge(part, DType::Bf16)),
        prefill_tokens_beside_decode_max: None,
        sequences_max: 256,
        block_tokens: Some(16),
    };
    let spec = InstanceSpec { device, weights, role: Role::Auto, price: None, limits };
    Loaded::new(&config, spec).unwrap()
}

/// Relative errors of predictions, by kind.
#[derive(Default)]
struct Errors(BTreeMap<&'static str, Vec<(f64, String)>>);

impl Errors {
    fn add(&mut self, what: &'static str, case: String, predicted: Seconds, took: Seconds) {
        self.0.entry(what).or_default().push(((predicted / took - 1.0).abs(), case));
    }

    /// Compares predictions of steps with the device's times, as far as it holds the tokens.
    fn compare(&mut self, of: &str, held: u64, [predicted, truth]: [&CostModel; 2]) {
        for tokens in PROMPTS {
            let case = format!("{of}, prompt of {tokens}");
            self.add("prompts", case, predicted.prefill_s(0, tokens), truth.prefill_s(0, tokens));
            for batch in BATCHES {
                let keys = u64::from(batch) * u64::from(tokens);
                if keys > held {
                    continue;
                }
                let case = format!("{of}, {batch} of {tokens}");
                let steps = [predicted, truth].map(|cost| cost.decode_step_s(batch, keys));
                self.add("decodes", case.clone(), steps[0], steps[1]);
                let steps = [predicted, truth].map(|cost| cost.step_s(&[BESIDE], batch, keys));
                self.add("mixed steps", case, steps[0], steps[1]);
            }
        }
    }

    /// Prints the mean and the largest error of each kind, and returns the mean of all, the largest, and the
    /// share above [`OFF`].
    fn summary(&self, source: &str) -> (f64, f64, f64) {
        let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
        let largest = |errors: &[f64]| errors.iter().copied().fold(0.0, f64::max);
        let often =
            |errors: &[f64]| errors.iter().filter(|error| **error > OFF).count() as f64 / errors.len() as f64;
        let mut all = Vec::new();
        for (what, cases) in &self.0 {
            let errors: Vec<f64> = cases.iter().map(|(error, _)| *error).collect();
            let [mean, largest, often] =
                [mean(&errors), largest(&errors), often(&errors)].map(|of| 100.0 * of);
            let worst = cases.iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or("", |(_, case)| case);
            println!(
                "{source}: {} {what}: {mean:.1} % off in the mean, {largest:.1} % at most ({worst}), {often:.2} % \
                 above 10 %",
                errors.len()
            );
            all.extend(errors);
        }
        (mean(&all), largest(&all), often(&all))
    }
}

fn is_full() -> bool {
    std::env::var("MIXFLEET_PREDICTIONS").is_ok_and(|value| value == "full")
}

/// Each model on each part, or one on each.
fn pairs() -> impl Iterator<Item = (usize, &'static str)> {
    let all =
        (0..PARTS.len()).flat_map(|at| MODELS.iter().enumerate().map(move |(of, model)| (at, of, *model)));
    all.filter(|(at, of, _)| is_full() || at % MODELS.len() == *of).map(|(at, _, model)| (at, model))
}

#[test]
fn predictions_agree_with_measured_kernels() {
    let Some(tables) = tables() else { return };
    let (mut adjusted, mut alone) = (Errors::default(), Errors::default());
    let mut truths: HashMap<usize, DeviceProfile> = HashMap::new();
    for (at, model) in pairs() {
        let id = PARTS[at].0;
        let own = part(id).unwrap();
        let profile = truths.entry(at).or_insert_with(|| truth(at, tables)).clone();
        let random = RandomCheckpoint::of_shape(find(model).unwrap()).unwrap();
        let env = SeededEnv::with_blocking_workers(1);
        let mut loaded = loaded(own, profile.clone(), &random, &env);
        let calibration = loaded.calibrate(&env, CalibrationBudget::WHOLE).unwrap();
        let (predicted, ratios) = loaded.predicted_by_part(own.best_profile(), &calibration);
        let took = loaded.predicted_by(profile).compiled();
        let of = format!("{model} on {id}");
        println!("{of}: measured times are {:.2} and {:.2} of the catalog's", ratios.prefill, ratios.decode);
        let held = loaded.kv_capacity_tokens();
        adjusted.compare(&of, held, [&predicted, &took]);
        alone.compare(&of, held, [&loaded.predicted_by_steps(&calibration), &took]);
    }
    let (_, largest, often) = adjusted.summary("catalog, calibrated");
    let (alone_mean, ..) = alone.summary("calibration alone");
    assert!(largest < OFF_MAX && often <= OFTEN_MAX, "{largest:.3} at most, {often:.3} above {OFF}");
    assert!(alone_mean < ALONE_MEAN_MAX, "{alone_mean:.3}");
}

/// TTFT and the mean time between tokens of a request that has the instance for itself.
#[derive(Clone, Copy, Debug, Default)]
struct Answered {
    ttft_s: f64,
    tbt_s: f64,
}

struct Seen(Answered);

const TOKENS: u32 = 9;

impl Observer for Seen {
    fn finished(&mut self, _: f64, times: &AnswerTimes) {
        let tbt_s = (times.e2e_s - times.ttft_s) / f64::from(TOKENS - 1);
        self.0 = Answered { ttft_s: times.ttft_s, tbt_s };
    }
}

fn simulated(file: &FleetFile, prompt_tokens: u32) -> Answered {
    let request = Request {
        id: 0,
        at: Seconds::ZERO,
        prompt_tokens,
        output_tokens: TOKENS,
        chain: Vec::new(),
        session: None,
        class: None,
    };
    let setup = Setup::new(file, Choices { admission: Admission::None, ..Choices::default() });
    let mut seen = Seen(Answered::default());
    run(&setup, std::iter::once(Ok(request)), &mut seen).unwrap();
    seen.0
}

fn served(file: &FleetFile, own: &Part, model: &RandomCheckpoint, prompt_tokens: u32) -> Answered {
    let env = SeededEnv::with_blocking_workers(1);
    let profile = DeviceProfile { memory: MEMORY, ..own.best_profile() };
    let mut loaded = loaded(own, profile, model, &env);
    let calibration = loaded.calibrate(&env, CalibrationBudget::WHOLE).unwrap();
    let (cost, _) = loaded.predicted_by_part(own.best_profile(), &calibration);
    let config: Arc<ModelConfig> = Arc::new(model.model_config().unwrap());
    let fleet = FleetConfig { admission: Admission::None, ..EngineConfig::default().fleet };
    let parts = parts::of_file(file, &env, &config, fleet);
    let handle = parts.start(vec![(loaded, cost)], parts::links()).unwrap();
    let world = env.clone();
    let answered = env.run(async move {
        let prompt = (0..prompt_tokens).map(|at| at % 1000).collect();
        let request = parts::greedy("one".into(), prompt, TOKENS);
        let began_s = world.now().0;
        let mut updates = handle.submit(request).await.unwrap();
        let mut tokens_s = Vec::new();
        while let Some(update) = updates.recv().await {
            match update {
                Update::Token { .. } => tokens_s.push(world.now().0 - began_s),
                Update::Failed(failure) => panic!("{failure:?}"),
                _ => {}
            }
        }
        assert_eq!(tokens_s.len(), TOKENS as usize);
        let tbt_s = (tokens_s[tokens_s.len() - 1] - tokens_s[0]) / f64::from(TOKENS - 1);
        Answered { ttft_s: tokens_s[0], tbt_s }
    });
    env.end();
    answered
}

#[test]
fn serve_and_simulate_take_the_same_time_on_a_part() {
    let (mut worst, mut compared) = (0.0_f64, 0);
    for (at, model) in pairs() {
        let own = part(PARTS[at].0).unwrap();
        let random = RandomCheckpoint::of_shape(find(model).unwrap()).unwrap();
        let text = format!(
            "version = 1\n[kv]\nblock_tokens = 16\n[model]\nname = \"{model}\"\n[slo]\nttft_s = 60.0\n\
             tbt_s = 10.0\n[[pool]]\nname = \"part\"\ndevice = \"{}\"\n",
            own.id
        );
        let none = |path: &Path| Err(format!("{} is not read", path.display()));
        let file = match FleetFile::parse(&text, Path::new(""), &none) {
            Ok(file) => file,
            Err(error) => {
                assert!(error.to_string().contains("does not fit"), "{error}");
                continue;
            }
        };
        compared += 1;
        for tokens in [300, 3000] {
            let (simulated, served) = (simulated(&file, tokens), served(&file, own, &random, tokens));
            let off = [served.ttft_s / simulated.ttft_s, served.tbt_s / simulated.tbt_s];
            println!("{model} on {}, {tokens} tokens: {served:?}, simulated {simulated:?}", own.id);
            let most = off.map(|ratio| (ratio - 1.0).abs()).into_iter().fold(0.0, f64::max);
            assert!(most < APART_MAX, "{model} on {}, {tokens} tokens: {off:?}", own.id);
            worst = worst.max(most);
        }
    }
    println!("{compared} pairs: serve and simulate differ by {:.2} % at most", 100.0 * worst);
    assert!(compared > PARTS.len() / 2);
}
