//! Determines what each device is cheapest at, relative to the available devices.
//!
//! A role is not a property of a chip: it follows from seconds per token times price, compared over the fleet
//! (Ricardo's comparative advantage). So every class comes with the price at which it changes. The
//! arithmetic:
//!
//! - A model that does not fit on one device is divided by layers over `k` = 1, 2, 4, ... devices, each of
//!   which works on another batch at a time. Device seconds per token are those of one device that could hold
//!   it all. Passing on a token's activations is not counted: at most 16 kB per token and cut.
//! - prefill: `T_prefill(n) / n` for a prompt of n tokens, where `weights / k + n kv <= share memory`.
//! - decode: `T_step(b, b s) / b` at context s, for the largest batch up to `b_max` with `weights / k + b s
//!   kv <= share memory`. Little memory means small batches, which pay for reading the weights: this is where
//!   memory per dollar counts.
//! - attention: the attention operations of that step alone, on a device that holds KV and no weights
//!   (attention offload, Lamina, arXiv 2405.01814). The network is not counted.
//! - memory: a GB for an hour.
//!
//! With objectives a prompt must be computed within the one for TTFT, on an idle device, and batches are no
//! larger than a step within the one for TBT allows.
//!
//! cost = price x device seconds. A device is cheapest at a job up to its *break-even*: the least cost of any
//! rival divided by its own device seconds.

use crate::cost::{CostModel, EngineCost, ModelShape, ProfileCost, StepCalibration};
use crate::sizing::MEMORY_SHARE;
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, GB, Seconds, Usd, UsdPerHour};
use serde::Serialize;

/// Relative difference below which costs count as equal.
const TIE: f64 = 1e-9;

/// The model and the load for which devices are compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Demand {
    /// The model's shape. A device that has f16 units but no bf16 units runs it in f16.
    pub shape: ModelShape,
    /// Memory for the model's weights.
    pub weights: Bytes,
    /// Length of a prompt.
    pub prompt_tokens: u32,
    /// Context of each sequence while it decodes.
    pub context_tokens: u32,
    /// Maximum sequences in a decode step.
    pub batch_max: u32,
    /// Longest time that a prompt may take.
    pub ttft: Option<Seconds>,
    /// Longest time that a decode step may take.
    pub tbt: Option<Seconds>,
    /// Maximum number of devices over which one copy of the model may be divided.
    pub devices_max: u32,
    /// Share of a device's memory that weights and KV may fill.
    pub memory_share: f64,
    /// What the serving engine adds to its kernels.
    pub engine: EngineCost,
}

impl Demand {
    /// Prompts of 2048 tokens, decoding at 4096 tokens of context, batches up to 32 (the range of published
    /// kernel measurements), at most 8 devices (a server), 90 % of memory.
    pub fn new(shape: ModelShape, weights: Bytes) -> Self {
        Demand {
            shape,
            weights,
            prompt_tokens: 2048,
            context_tokens: 4096,
            batch_max: 32,
            ttft: None,
            tbt: None,
            devices_max: 8,
            memory_share: MEMORY_SHARE,
            engine: EngineCost::OURS,
        }
    }

    /// What one sequence of `tokens` tokens keeps.
    fn kv_bytes(&self, tokens: u32) -> f64 {
        self.shape.sequence_bytes(tokens) as f64
    }

    /// The numbers of devices 1, 2, 4, ... up to `devices_max`.
    fn cuts(&self) -> impl Iterator<Item = u32> + use<> {
        let most = self.devices_max.max(1);
        std::iter::successors(Some(1u32), |k| k.checked_mul(2)).take_while(move |k| *k <= most)
    }
}

/// A job for which a device can be rented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// Computing prompts; the unit is a token.
    Prefill,
    /// Generating tokens; the unit is a token.
    Decode,
    /// Decode attention alone, for other devices; the unit is a token.
    Attention,
    /// Holding KV; the unit is a GB for an hour.
    Memory,
}

impl Job {
    /// All jobs.
    pub const ALL: [Job; 4] = [Job::Prefill, Job::Decode, Job::Attention, Job::Memory];

    /// The job's name, for display.
    pub const fn name(self) -> &'static str {
        match self {
            Job::Prefill => "prefill",
            Job::Decode => "decode",
            Job::Attention => "attention",
            Job::Memory => "memory",
        }
    }
}

/// The resources that a unit of a job takes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Effort {
    /// Device time per unit.
    pub time: Seconds,
    /// Number of devices that share the model.
    pub devices: u32,
    /// Number of sequences in a batch.
    pub batch: u32,
    /// Time from the start of the prompt or step to its end.
    pub latency: Seconds,
}

/// The resources that a unit of `job` takes on the device of `profile`.
///
/// # Errors
/// Why the devices cannot hold what the job needs.
pub fn effort(demand: &Demand, profile: &DeviceProfile, job: Job) -> Result<Effort, String> {
    effort_by(demand, KnownTimes { profile, steps: None }, job)
}

/// Source of a device's times.
#[derive(Clone, Copy)]
struct KnownTimes<'a> {
    profile: &'a DeviceProfile,
    /// Measurements of whole steps on the device itself.
    steps: Option<&'a StepCalibration>,
}

fn effort_by(demand: &Demand, known: KnownTimes<'_>, job: Job) -> Result<Effort, String> {
    let KnownTimes { profile, steps } = known;
    let cost_model = |demand: &Demand, profile: &DeviceProfile| match steps {
        Some(steps) if profile.compute.is_empty() => steps.alone(),
        Some(steps) => steps.adjusting(cost_model(demand, profile)).0,
        None => cost_model(demand, profile),
    };
    let room = |k: u32| profile.memory.0 * demand.memory_share - demand.weights.0 / f64::from(k);
    let whole = |latency: Seconds, units: f64, devices, batch| Effort {
        time: latency / units,
        devices,
        batch,
        latency,
    };
    match job {
        Job::Prefill => {
            let (tokens, kv) = (demand.prompt_tokens, demand.kv_bytes(demand.prompt_tokens));
            let devices = demand.cuts().find(|&k| room(k) >= kv).ok_or_else(|| too_large(demand, profile))?;
            let latency = cost_model(demand, profile).prefill_s(0, tokens);
            if let Some(most) = demand.ttft.filter(|most| latency > *most) {
                return Err(too_slow("a prompt", latency, most));
            }
            Ok(whole(latency, f64::from(tokens), devices, 1))
        }
        Job::Decode => {
            let kv = demand.kv_bytes(demand.context_tokens);
            let batch = |k: u32| to_u32((room(k) / kv).floor().max(0.0)).min(demand.batch_max);
            let devices = demand.cuts().find(|&k| batch(k) == demand.batch_max).or(demand.cuts().last());
            let devices = devices.filter(|&k| batch(k) > 0).ok_or_else(|| too_large(demand, profile))?;
            let cost = cost_model(demand, profile);
            let step = |batch: u32| cost.decode_step_s(batch, context(demand, batch));
            let batch = match demand.tbt {
                None => batch(devices),
                Some(most) => {
                    // Steps grow with the batch.
                    let sizes: Vec<u32> = (1..=batch(devices)).collect();
                    let batch = to_u32(sizes.partition_point(|batch| step(*batch) <= most));
                    if batch == 0 {
                        return Err(too_slow("a decode step of one sequence", step(1), most));
                    }
                    batch
                }
            };
            Ok(whole(step(batch), f64::from(batch), devices, batch))
        }
        Job::Attention if profile.compute.is_empty() && steps.is_some() => {
            Err("only whole steps were measured, and nothing is known of their attention".into())
        }
        Job::Attention => {
            let kv = demand.kv_bytes(demand.context_tokens);
            let batch = to_u32((profile.memory.0 * demand.memory_share / kv).floor()).min(demand.batch_max);
            if batch == 0 {
                return Err(too_large(demand, profile));
            }
            let ops = demand.shape.on(profile).decode_ops(batch, context(demand, batch));
            let attention = ops.iter().filter(|(sig, _)| matches!(sig, OpSig::AttnDecode { .. }));
            let latency = attention.map(|(sig, count)| profile.time(sig) * *count as f64).sum();
            Ok(whole(latency, f64::from(batch), 1, batch))
        }
        Job::Memory => Ok(whole(Seconds(3600.0), profile.memory.0 / GB, 1, 1)),
    }
}

fn context(demand: &Demand, batch: u32) -> u64 {
    u64::from(batch) * u64::from(demand.context_tokens)
}

fn cost_model(demand: &Demand, profile: &DeviceProfile) -> CostModel {
    CostModel::Profile(Box::new(ProfileCost {
        profile: profile.clone(),
        shape: demand.shape.on(profile),
        chunk_tokens: demand.prompt_tokens,
        all_reduce: None,
        engine: demand.engine,
    }))
}

fn too_slow(what: &str, takes: Seconds, most: Seconds) -> String {
    format!("{what} takes {:.3} s, and the objective is {} s", takes.0, most.0)
}

fn too_large(demand: &Demand, profile: &DeviceProfile) -> String {
    let (memory, weights) = (profile.memory.0 / GB, demand.weights.0 / GB);
    let devices = demand.cuts().last().unwrap_or(1);
    format!("{devices} x {memory:.0} GB do not hold {weights:.0} GB of weights and a sequence's KV")
}

/// A device that may be rented.
#[derive(Clone, Debug, PartialEq)]
pub struct PricedDevice {
    /// The user's name for the device.
    pub name: String,
    /// The device's measured or published performance.
    pub profile: DeviceProfile,
    /// Times of whole steps of the model on the device itself, to which those of its profile are adjusted.
    /// Without arithmetic rates in the profile they are the whole model.
    pub steps: Option<StepCalibration>,
    /// Its rent, if known. Without a rent it does not compete, and only its break-even prices are reported.
    pub price: Option<UsdPerHour>,
}

/// What a device is cheapest at, compared with its rivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceClass {
    /// Cheapest at prefill and at decode, so that no mix is needed.
    Both,
    /// Cheapest at prefill.
    Prefill,
    /// Cheapest at decode.
    Decode,
    /// Cheapest at decode attention, but not at prefill or decode.
    Attention,
    /// Cheapest only at holding KV.
    Memory,
    /// Others do every job for less.
    Neither,
}

impl DeviceClass {
    /// The class's name, for display.
    pub const fn name(self) -> &'static str {
        match self {
            DeviceClass::Both => "both",
            DeviceClass::Prefill => "prefill",
            DeviceClass::Decode => "decode",
            DeviceClass::Attention => "attention",
            DeviceClass::Memory => "memory",
            DeviceClass::Neither => "neither",
        }
    }
}

/// A device's result for one job, compared with its rivals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Standing {
    /// The job.
    pub job: Job,
    /// The resources that a unit takes, or why the device cannot do the job.
    pub effort: Result<Effort, String>,
    /// Cost of a unit, if the price is known.
    pub cost: Option<Usd>,
    /// The cheapest rival that can do it.
    pub rival: Option<String>,
    /// The rent up to which no rival is cheaper. `None` if the device cannot do the job, or no other can.
    pub break_even: Option<UsdPerHour>,
}

/// A device's results, compared with its rivals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classified {
    /// The user's name for the device.
    pub name: String,
    /// The device's rent, if known.
    pub price: Option<UsdPerHour>,
    /// One standing for each of [`Job::ALL`], in that order.
    pub standings: Vec<Standing>,
    /// Its class at its price.
    pub class: Option<DeviceClass>,
}

impl Classified {
    /// The standing at `job`.
    pub fn standing(&self, job: Job) -> Option<&Standing> {
        self.standings.iter().find(|standing| standing.job == job)
    }

    /// Whether no rival does `job` for less, at a rent of `price`.
    pub fn cheapest_at(&self, job: Job, price: UsdPerHour) -> bool {
        self.standing(job).is_some_and(|standing| {
            standing.effort.is_ok() && standing.break_even.is_none_or(|most| price.0 <= most.0 * (1.0 + TIE))
        })
    }

    /// The device's class at a rent of `price`, with its rivals' rents unchanged.
    pub fn class_at(&self, price: UsdPerHour) -> DeviceClass {
        let cheapest = |job| self.cheapest_at(job, price);
        match (cheapest(Job::Prefill), cheapest(Job::Decode)) {
            (true, true) => DeviceClass::Both,
            (true, false) => DeviceClass::Prefill,
            (false, true) => DeviceClass::Decode,
            _ if cheapest(Job::Attention) => DeviceClass::Attention,
            _ if cheapest(Job::Memory) => DeviceClass::Memory,
            _ => DeviceClass::Neither,
        }
    }

    /// The job, prefill or decode, that it could do at the higher rent: its comparative advantage, even if
    /// others are cheaper at both. `None` if it has no rival at one of them.
    pub fn leans_to(&self) -> Option<Job> {
        let break_even = |job| self.standing(job).and_then(|standing| standing.break_even);
        let (prefill, decode) = (break_even(Job::Prefill)?, break_even(Job::Decode)?);
        Some(if prefill > decode { Job::Prefill } else { Job::Decode })
    }
}

/// Compares `candidates` with each other, in their order.
pub fn classify(demand: &Demand, candidates: &[PricedDevice]) -> Vec<Classified> {
    let efforts: Vec<Vec<Result<Effort, String>>> = candidates
        .iter()
        .map(|candidate| {
            let known = KnownTimes { profile: &candidate.profile, steps: candidate.steps.as_ref() };
            Job::ALL.iter().map(|&job| effort_by(demand, known, job)).collect()
        })
        .collect();
    let cost = |device: usize, job: usize| -> Option<Usd> {
        Some(candidates[device].price? * efforts[device][job].as_ref().ok()?.time)
    };
    let standing = |device: usize, at: usize| {
        let rivals = (0..candidates.len()).filter(|&other| other != device);
        let rival = rivals
            .filter_map(|other| Some((other, cost(other, at)?)))
            .min_by(|(_, a), (_, b)| a.0.total_cmp(&b.0));
        let own = &efforts[device][at];
        let break_even = rival.zip(own.as_ref().ok()).map(|((_, least), own)| rent_for(least, own.time));
        Standing {
            job: Job::ALL[at],
            effort: own.clone(),
            cost: cost(device, at),
            rival: rival.map(|(other, _)| candidates[other].name.clone()),
            break_even,
        }
    };
    candidates
        .iter()
        .enumerate()
        .map(|(device, PricedDevice { name, price, .. })| {
            let standings = (0..Job::ALL.len()).map(|at| standing(device, at)).collect();
            let mut classified = Classified { name: name.clone(), price: *price, standings, class: None };
            classified.class = price.map(|price| classified.class_at(price));
            classified
        })
        .collect()
}

/// Solves `cost = rent x time` for the rent.
fn rent_for(cost: Usd, time: Seconds) -> UsdPerHour {
    UsdPerHour(cost.0 / time.0 * 3600.0)
}

#[cfg(test)]
mod tests;
