//! Published figures of one load each: benchmark pages, and MLPerf Inference's data centre results.

use crate::rows::Figure;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, StoredAs, WeightFormat};
use mixfleet_scheduler::engines::{self, KnownEngine};
use mixfleet_scheduler::models::{self, KnownModel};
use mixfleet_sim::trace::{ClosedLoop, Request};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// Requests of a burst that are simulated: enough for every sequence of an engine, several times over.
const BURST_MAX: u64 = 4096;
/// Requests of an arrival-driven run that are simulated.
const ARRIVALS: u64 = 1500;

/// How requests come to one of the instances.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FigureLoad {
    /// All at once.
    Burst,
    /// From this many clients.
    Closed(u32),
    /// At random, this many a second.
    Arrivals(f64),
}

/// One load on equal instances, and what was measured under it.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    /// The set that it is of.
    pub(crate) set: &'static str,
    pub(crate) name: String,
    pub(crate) model: &'static KnownModel,
    pub(crate) part: &'static Part,
    pub(crate) engine: &'static KnownEngine,
    pub(crate) stored: StoredAs,
    pub(crate) kv: DType,
    pub(crate) tensor: u32,
    pub(crate) stages: u32,
    pub(crate) instances: u32,
    pub(crate) experts_by_member: bool,
    pub(crate) sequences_max: Option<u32>,
    pub(crate) load: FigureLoad,
    pub(crate) requests: u64,
    /// Least and most tokens.
    pub(crate) prompt: [u32; 2],
    pub(crate) answer: [u32; 2],
    pub(crate) measured: Vec<(Figure, f64)>,
}

/// The figures that can be predicted, and how many cannot, by reason.
#[derive(Default)]
pub(crate) struct Set {
    pub(crate) figures: Vec<Published>,
    pub(crate) skipped: BTreeMap<String, usize>,
}

impl Published {
    /// The requests of one instance.
    pub(crate) fn requests(&self) -> Vec<Request> {
        let each = |all: u64| all.div_ceil(u64::from(self.instances));
        let requests = each(self.requests).clamp(1, BURST_MAX);
        let (clients, requests) = match self.load {
            FigureLoad::Burst => (requests as u32, requests),
            FigureLoad::Closed(clients) => (each(clients.into()) as u32, requests),
            FigureLoad::Arrivals(_) => (ARRIVALS as u32, ARRIVALS),
        };
        let load = ClosedLoop {
            clients,
            requests: requests.max(clients.into()),
            prompt_tokens: self.prompt,
            output_tokens: self.answer,
            think: Seconds::ZERO,
            ramp: Seconds::ZERO,
            seed: 1,
        };
        let mut all: Vec<Request> = load.requests().filter_map(Result::ok).collect();
        if let FigureLoad::Arrivals(rate) = self.load {
            let (mut at, mut random) = (0.0, Stream::new(1));
            for request in &mut all {
                at -= (1.0 - random.next_unit()).ln() * f64::from(self.instances) / rate;
                (request.at, request.session) = (Seconds(at), None);
            }
        }
        all
    }

    /// Tokens of a figure's numerator in one request, of `figure`'s rate.
    pub(crate) fn tokens(&self) -> [f64; 2] {
        [self.prompt, self.answer].map(|[least, most]| (f64::from(least) + f64::from(most)) / 2.0)
    }
}

#[derive(Deserialize)]
struct Row {
    row: String,
    part: String,
    model: String,
    dtype: String,
    kv: String,
    engine: String,
    tp: u32,
    pp: u32,
    dp: u32,
    kind: String,
    clients: f64,
    requests: f64,
    isl: f64,
    osl: f64,
    metric: String,
    value: f64,
    extra: String,
}

/// What the column `extra` may say.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Extra {
    tpot: Option<f64>,
    ep: bool,
    mns: u32,
}

/// Reads the file of benchmark pages.
pub(crate) fn pages(path: &Path) -> Result<Set, String> {
    read(path, "pages", |row: &Row| page(row))
}

fn read<R: serde::de::DeserializeOwned>(
    path: &Path,
    set: &str,
    of: impl Fn(&R) -> Result<Published, String>,
) -> Result<Set, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{set}: {}: {error}", path.display());
    let mut found = Set::default();
    for row in csv::Reader::from_path(path).map_err(|error| failed(&error))?.deserialize() {
        match of(&row.map_err(|error| failed(&error))?) {
            Ok(figure) => found.figures.push(figure),
            Err(why) => *found.skipped.entry(why).or_default() += 1,
        }
    }
    Ok(found)
}

fn page(row: &Row) -> Result<Published, String> {
    let extra: Extra = serde_json::from_str(&row.extra).unwrap_or_default();
    let figure = match row.metric.as_str() {
        "out_tok_s" => Figure::TokensPerS,
        "duration_s" => Figure::Duration,
        "total_tok_s_alone" => Figure::AllTokensPerS,
        "tg_tok_s" => Figure::DecodeAlone,
        "pp_tok_s" => Figure::PromptAlone,
        other => return Err(format!("metric {other}")),
    };
    let tokens = |count: f64| [count.round() as u32; 2];
    let mut measured = vec![(figure, row.value)];
    measured.extend(extra.tpot.filter(|_| row.kind == "closed").map(|s| (Figure::Tpot, s)));
    Ok(Published {
        set: "pages",
        name: row.row.clone(),
        model: models::find(&row.model).map_err(|_| format!("model {}", row.model))?,
        part: catalog::part(&row.part).ok_or_else(|| format!("part {}", row.part))?,
        engine: engines::find(&row.engine)?,
        stored: row.dtype.parse()?,
        kv: if row.kv == "fp8" { DType::F8E4m3 } else { DType::Bf16 },
        tensor: row.tp,
        stages: row.pp,
        instances: row.dp,
        experts_by_member: extra.ep && row.tp > 1,
        sequences_max: (extra.mns > 0).then_some(extra.mns),
        load: if row.kind == "burst" { FigureLoad::Burst } else { FigureLoad::Closed(row.clients as u32) },
        requests: row.requests as u64,
        prompt: tokens(row.isl),
        answer: tokens(row.osl),
        measured,
    })
}

#[derive(Deserialize)]
struct MlperfRow {
    division: String,
    system: String,
    model: String,
    scenario: String,
    accelerator: String,
    per_node: u32,
    nodes: u32,
    framework: String,
    tokens_per_s: Option<f64>,
    samples_per_s: Option<f64>,
    tpot_mean_ns: Option<f64>,
}

/// Reads MLPerf's results. Prompts have the mean length of the suite's data sets, answers that of the run;
/// both vary evenly from nothing to twice the mean.
pub(crate) fn mlperf(path: &Path) -> Result<Set, String> {
    read(path, "mlperf", |row: &MlperfRow| result(row))
}

/// The model, the mean length of its data set's prompts, and the devices of an instance with 80 GB or less
/// memory each and with more.
fn suite(model: &str) -> Result<(&'static str, u32), String> {
    Ok(match model {
        "llama2-70b-99" | "llama2-70b-99.9" => ("llama-2-70b", 294),
        "llama3.1-8b" | "llama3_1-8b" => ("llama-3.1-8b", 778),
        "llama3.1-405b" => ("llama-3.1-405b", 9428),
        "deepseek-r1" => ("deepseek-v3", 1020),
        other => return Err(format!("model {other}: lengths are not published, or images")),
    })
}

fn accelerator(name: &str) -> Result<&'static Part, String> {
    const KNOWN: [(&str, &str); 12] = [
        ("MI300X", "MI300X"),
        ("MI325X", "MI325X"),
        ("MI350X", "MI350X"),
        ("MI355X", "MI355X"),
        ("B60", "ARC-PRO-B60"),
        ("GB200", "GB200"),
        ("GB300", "GB300"),
        ("B200", "B200-SXM"),
        ("B300", "B300-SXM"),
        ("H200-SXM", "H200-SXM-141GB"),
        ("H200-NVL", "H200-NVL-141GB"),
        ("PRO 6000", "RTX-PRO-6000-SE"),
    ];
    let known = KNOWN.iter().find(|(word, _)| name.contains(word) && !name.contains("Dual"));
    let part = known.and_then(|(_, id)| catalog::part(id));
    part.ok_or_else(|| format!("part {name}"))
}

fn result(row: &MlperfRow) -> Result<Published, String> {
    if row.division != "closed" {
        return Err("open division".into());
    }
    if row.nodes != 1 {
        return Err("several servers".into());
    }
    let (model, prompt) = suite(&row.model)?;
    let (part, model) = (accelerator(&row.accelerator)?, models::find(model).map_err(|e| e.to_string())?);
    let stored = match (part.vendor, part.rates.fp4.is_some()) {
        ("NVIDIA", true) => StoredAs::Quantised(WeightFormat::Nvfp4),
        ("AMD", true) => StoredAs::Quantised(WeightFormat::Mxfp4),
        (_, false) if part.vendor == "Intel" => return Err(format!("part {}: format not stated", part.id)),
        _ => StoredAs::Quantised(WeightFormat::Fp8),
    };
    let (tokens, samples) = row.tokens_per_s.zip(row.samples_per_s).ok_or("no tokens per second")?;
    let mean = (tokens / samples).round() as u32;
    let (load, measured) = match (row.scenario.as_str(), row.tpot_mean_ns) {
        ("Offline", _) => (FigureLoad::Burst, (Figure::TokensPerS, tokens)),
        ("Server" | "Interactive", Some(ns)) => (FigureLoad::Arrivals(samples), (Figure::Tpot, ns * 1e-9)),
        (other, _) => return Err(format!("scenario {other}")),
    };
    let fits = |devices: &u32| {
        f64::from(*devices) * part.memory_bytes().0 * 0.7 > model.weight_bytes(stored).0
            && row.per_node.is_multiple_of(*devices)
    };
    let tensor = [1, 2, 4, 8].into_iter().find(fits).ok_or("does not fit into a server")?;
    Ok(Published {
        set: "mlperf",
        name: format!("{} {} {}", row.system, row.model, row.scenario),
        model,
        part,
        engine: engines::find(if row.framework.contains("TensorRT") { "tensorrt-llm" } else { "vllm" })?,
        stored,
        kv: DType::F8E4m3,
        tensor,
        stages: 1,
        instances: row.per_node / tensor,
        experts_by_member: model.experts.is_some(),
        sequences_max: None,
        load,
        requests: u64::MAX,
        prompt: [1, 2 * prompt],
        answer: [1, 2 * mean],
        measured: vec![measured],
    })
}
