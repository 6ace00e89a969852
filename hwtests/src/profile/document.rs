//! The document: what was measured, how, on what, and under which conditions.
//!
//! `docs/profile-format.md` explains every field; `docs/schema/profile-1.json` is generated from here.
//! Added fields keep the version, so readers must ignore what they do not know.

use super::control::Control;
use super::plan::ProfileLevel;
use super::stats::SampleStats;
use super::work::Group;
use mixfleet_hal::device::Health;
use mixfleet_hal::{Device, DeviceKind, OpSig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A measured device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.profile/1")]
pub struct ProfileDocument {
    /// Name and version of the document: [`Document::SCHEMA`].
    pub schema: String,
    /// What measured it.
    pub tool: Tool,
    /// When it began, RFC 3339 in UTC; empty if the caller did not say.
    #[serde(default)]
    pub measured_at: String,
    /// How much was asked for.
    pub level: ProfileLevel,
    /// Whether everything asked for was at least tried. False after an interruption.
    pub complete: bool,
    /// Seconds that measuring took.
    pub seconds: f64,
    /// The device.
    pub device: DeviceIdentity,
    /// Under what conditions.
    pub conditions: Conditions,
    /// The conformance checks that the numbers rest on.
    pub checks: Vec<Check>,
    /// Everything measured, in order.
    pub points: Vec<PointResult>,
    /// Readings of the same two works through the profile, every few seconds.
    #[serde(default)]
    pub controls: Vec<Control>,
    /// Straight lines through the points.
    pub fits: Fits,
    /// The handful of numbers that the part is known by.
    pub summary: ProfileSummary,
    /// Rent, and what a dollar buys.
    #[serde(default)]
    pub economics: Option<Economics>,
}

/// The program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The command line, if the caller gave it.
    #[serde(default)]
    pub command: String,
}

/// Static facts about the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceIdentity {
    /// The selector that opens it.
    pub id: String,
    /// The backend.
    pub backend: String,
    /// The part's name.
    pub name: String,
    /// `cpu`, `gpu`, `accelerator` or `simulated`.
    pub kind: String,
    /// Memory that buffers may take.
    pub memory_bytes: f64,
    /// Cores, compute units or multiprocessors.
    pub compute_units: u32,
    /// Measurements hold only for an equal one.
    pub fingerprint: String,
    /// Further facts.
    pub notes: Vec<Fact>,
    /// The largest single allocation.
    pub allocation_bytes_max: u64,
    /// Tokens in a KV page, as the device likes it best and as it was measured.
    pub kv_page_tokens: u32,
}

/// A named fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Fact {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
}

impl Fact {
    /// From anything.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Fact {
        Fact { name: name.into(), value: value.into() }
    }
}

/// What the device said of its state at one moment; what it did not say is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct State {
    /// Degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<f64>,
    /// Joules since an unknown start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Memory errors that were corrected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors_corrected: Option<u64>,
    /// Memory errors that were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors_uncorrected: Option<u64>,
}

impl From<Health> for State {
    fn from(health: Health) -> Self {
        State {
            temperature_c: health.temperature_c,
            power_w: health.power_w,
            clock_mhz: health.clock_mhz,
            energy_j: health.energy_j,
            errors_corrected: health.errors_corrected,
            errors_uncorrected: health.errors_uncorrected,
        }
    }
}

/// The conditions of a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Conditions {
    /// Before the first point.
    pub before: State,
    /// After the last one.
    pub after: State,
    /// What the caller knows of the machine: governor, load, other users of the device, kernel.
    pub facts: Vec<Fact>,
    /// What to beware of.
    pub flags: Vec<Flag>,
    /// Bytes over which buffers were rotated so that no cache holds them.
    pub cold_bytes: u64,
}

/// Something to beware of, of a point or of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Flag {
    /// The samples' coefficient of variation is above 5 %.
    Noisy,
    /// Three samples in a row never agreed within 3 %.
    Unsteady,
    /// Fewer samples than the level wants, for lack of time.
    FewSamples,
    /// The clock fell by more than 10 % while it was measured.
    Throttled,
    /// Something else used the machine or the device.
    OtherLoad,
    /// The device runs it by conversion, not natively.
    Emulated,
    /// Memory errors were counted while it was measured.
    MemoryErrors,
}

impl Flag {
    /// All.
    pub const ALL: [Flag; 7] = [
        Flag::Noisy,
        Flag::Unsteady,
        Flag::FewSamples,
        Flag::Throttled,
        Flag::OtherLoad,
        Flag::Emulated,
        Flag::MemoryErrors,
    ];

    /// As JSON and pages spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Flag::Noisy => "noisy",
            Flag::Unsteady => "unsteady",
            Flag::FewSamples => "few-samples",
            Flag::Throttled => "throttled",
            Flag::OtherLoad => "other-load",
            Flag::Emulated => "emulated",
            Flag::MemoryErrors => "memory-errors",
        }
    }
}

/// The conformance of one class of operations, checked before it was timed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// Operation and dtypes, in the order of its operands.
    pub class: String,
    /// Cases tried.
    pub cases: u32,
    /// Whether all were right.
    pub passed: bool,
    /// The largest error as a share of its bound.
    #[serde(default)]
    pub ratio_max: Option<f64>,
    /// What was wrong.
    #[serde(default)]
    pub reason: Option<String>,
}

/// How a point ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PointStatus {
    /// Measured.
    Ok,
    /// The device says that it cannot.
    Unsupported,
    /// Left out on purpose; the reason says why.
    Skipped,
    /// Tried, and it went wrong.
    Error,
}

/// Whose clock timed a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Timer {
    /// The device's.
    Device,
    /// The host's.
    Host,
}

/// One measured point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PointResult {
    /// Its stable name.
    pub id: String,
    /// The part of the profile it belongs to.
    pub group: Group,
    /// How it ended.
    pub status: PointStatus,
    /// Why, where it is not `ok`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The operation, for points that are one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<std::collections::BTreeMap<String, serde_json::Value>>")]
    pub sig: Option<OpSig>,
    /// Floating-point operations of one run.
    pub flops: f64,
    /// Bytes that one run must move.
    pub bytes: f64,
    /// Time of one run, its share of the batch's launch excluded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<SampleStats>,
    /// Runs in one sample.
    #[serde(default)]
    pub runs_per_sample: u32,
    /// Runs before three samples in a row agreed.
    #[serde(default)]
    pub ramp: u32,
    /// When measuring it ended, in seconds since the profile began.
    #[serde(default)]
    pub at_s: f64,
    /// Whose clock it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// What to beware of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<Flag>,
    /// Rate at the beginning and the end of a long run, for points of `sustained`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_run: Option<LongRun>,
}

/// A long run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LongRun {
    /// How long.
    pub seconds: f64,
    /// Median time of a run in the first tenth.
    pub burst_s: f64,
    /// Median time of a run in the last third.
    pub sustained_s: f64,
    /// Rate at the end over rate at the beginning.
    pub ratio: f64,
    /// Joules per run, where the device counts energy and the run was 10 s or longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules_per_run: Option<f64>,
    /// The device's state through the run.
    pub states: Vec<State>,
}

/// `fixed_s + bytes * s_per_byte`, from `from_bytes` on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LineFit {
    /// The least size it holds for.
    pub from_bytes: f64,
    /// Per transfer.
    pub fixed_s: f64,
    /// Per byte.
    pub s_per_byte: f64,
}

/// Straight lines through points.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Fits {
    /// Host time of a batch beyond its device time: what submitting and waiting cost.
    #[serde(default)]
    pub launch_s: Option<f64>,
    /// Time of each further command that does next to nothing. Points' times exclude it.
    #[serde(default)]
    pub launch_per_command_s: Option<f64>,
    /// The same on the host's clock: larger where the host feeds the device too slowly.
    #[serde(default)]
    pub launch_per_command_host_s: Option<f64>,
    /// What each command costs beyond that if it needs the one before it and is of another kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dependence_s: Option<f64>,
    /// Host memory to device.
    #[serde(default)]
    pub host_to_device: Vec<LineFit>,
    /// Device to host memory.
    #[serde(default)]
    pub device_to_host: Vec<LineFit>,
}

/// A rate and the point that reached it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReachedRate {
    /// FLOP/s or bytes/s.
    pub rate: f64,
    /// The point.
    pub point: String,
}

/// Arithmetic of one dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compute {
    /// The dtype of both inputs.
    pub dtype: String,
    /// FLOP/s and where.
    pub reached: ReachedRate,
}

/// The numbers that a part is known by; medians, not bests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileSummary {
    /// Best product by dtype.
    pub compute: Vec<Compute>,
    /// Plain read of the largest working set.
    #[serde(default)]
    pub memory_read: Option<ReachedRate>,
    /// Plain write of the largest working set.
    #[serde(default)]
    pub memory_write: Option<ReachedRate>,
    /// Copy over the largest working set; both directions counted.
    #[serde(default)]
    pub memory_copy: Option<ReachedRate>,
    /// Best rate at which decode attention reads KV.
    #[serde(default)]
    pub decode_attention: Option<ReachedRate>,
    /// Best arithmetic rate of prefill attention.
    #[serde(default)]
    pub prefill_attention: Option<ReachedRate>,
    /// Rows at which a bf16 product becomes bound by arithmetic: compute over bandwidth, times bytes per
    /// weight over two.
    #[serde(default)]
    pub ridge_rows: Option<f64>,
    /// Largest transfer from the host.
    #[serde(default)]
    pub host_to_device: Option<ReachedRate>,
    /// Largest transfer to the host.
    #[serde(default)]
    pub device_to_host: Option<ReachedRate>,
    /// How many points ended how.
    pub ok: u32,
    /// Points that the device cannot.
    pub unsupported: u32,
    /// Points left out.
    pub skipped: u32,
    /// Points that went wrong.
    pub error: u32,
    /// Points with a flag.
    pub flagged: u32,
}

/// Price, and what it buys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Economics {
    /// The rent.
    pub usd_per_hour: f64,
    /// Where the price comes from.
    pub source: String,
    /// Best FLOP/s per $/h.
    #[serde(default)]
    pub flop_per_second: Option<f64>,
    /// Bytes/s read per $/h.
    #[serde(default)]
    pub bytes_per_second: Option<f64>,
    /// Bytes of memory per $/h.
    pub bytes: f64,
}

impl ProfileDocument {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.profile/1";

    /// Reads a document of this schema.
    ///
    /// # Errors
    /// In words, for another schema or text that is no document.
    pub fn from_json(text: &str) -> Result<ProfileDocument, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(Self::SCHEMA) => {}
            Some(other) => return Err(format!("schema '{other}', expected '{}'", Self::SCHEMA)),
            None => return Err(format!("no field 'schema', expected '{}'", Self::SCHEMA)),
        }
        serde_json::from_value(value).map_err(|e| format!("not a document of {}: {e}", Self::SCHEMA))
    }

    /// The point of that name.
    pub fn point(&self, id: &str) -> Option<&PointResult> {
        self.points.iter().find(|point| point.id == id)
    }

    /// The JSON Schema of this document, as in `docs/schema/profile-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(ProfileDocument).to_value()
    }
}

impl PointResult {
    /// FLOP/s for what is bound by arithmetic, bytes/s for the rest, at the median; `None` without a time
    /// or without work.
    pub fn rate(&self) -> Option<Rate> {
        let seconds = self.seconds.as_ref()?.median;
        let arithmetic = match self.group {
            Group::Prefill => true,
            Group::Gemm => self.flops > 16.0 * self.bytes,
            Group::Sustained => self.flops > 0.0,
            _ => false,
        };
        let (amount, unit) = if arithmetic { (self.flops, Unit::Flop) } else { (self.bytes, Unit::Byte) };
        (amount > 0.0 && seconds > 0.0).then(|| Rate { value: amount / seconds, unit })
    }

    /// Whether it has a number.
    pub fn is_ok(&self) -> bool {
        self.status == PointStatus::Ok
    }
}

/// What a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Floating-point operations.
    Flop,
    /// Bytes.
    Byte,
}

/// An amount per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Per second.
    pub value: f64,
    /// Of what.
    pub unit: Unit,
}

impl DeviceIdentity {
    pub(crate) fn of(device: &dyn Device) -> DeviceIdentity {
        let (info, limits) = (device.info(), device.limits());
        let kind = match info.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            DeviceKind::Accelerator => "accelerator",
            DeviceKind::Simulated => "simulated",
        };
        DeviceIdentity {
            id: info.id.clone(),
            backend: info.backend.clone(),
            name: info.name.clone(),
            kind: kind.to_owned(),
            memory_bytes: info.memory.0,
            compute_units: info.compute_units,
            fingerprint: info.fingerprint.clone(),
            notes: info.notes.iter().map(|(name, value)| Fact::new(name, value)).collect(),
            allocation_bytes_max: limits.allocation_bytes_max,
            kv_page_tokens: limits.kv_page_tokens,
        }
    }
}
