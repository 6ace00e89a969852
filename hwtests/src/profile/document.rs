//! The profile document: measurements, method, machine and conditions.
//!
//! `docs/schema/profile-1.json`, which describes every field, is generated from here;
//! `docs/reference/profile-format.md` explains the names of points.
//! Added fields keep the version, so readers must ignore what they do not know.

use super::control::Control;
use super::plan::ProfileLevel;
use super::stats::SampleStats;
use super::work::PointGroup;
use mixfleet_hal::device::Health;
use mixfleet_hal::profile::ExpectedError;
use mixfleet_hal::{Device, DeviceKind, OpSig};
use mixfleet_report::numbers::scaled;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The measurements of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(title = "mixfleet.profile/1")]
pub struct ProfileDocument {
    /// Name and version of the document schema: [`ProfileDocument::SCHEMA`].
    pub schema: String,
    /// The program that measured it.
    pub tool: Tool,
    /// Start time, RFC 3339 in UTC; empty if the caller did not provide it.
    #[serde(default)]
    pub measured_at: String,
    /// The level of detail that was requested.
    pub level: ProfileLevel,
    /// Whether everything requested was at least tried; false after an interruption.
    pub complete: bool,
    /// Duration of the measurement in seconds.
    pub seconds: f64,
    /// The measured device.
    pub device: DeviceIdentity,
    /// Conditions before and after the measurement.
    pub conditions: Conditions,
    /// The conformance checks that the numbers rest on.
    pub checks: Vec<ClassCheck>,
    /// All points, in order.
    pub points: Vec<PointResult>,
    /// Readings of the controls, taken every few seconds.
    #[serde(default)]
    pub controls: Vec<Control>,
    /// Lines fitted through the points.
    pub fits: Fits,
    /// The headline numbers of the part.
    pub summary: ProfileSummary,
    /// Rent, and what a dollar buys.
    #[serde(default)]
    pub economics: Option<Economics>,
    /// How far predictions from a limited number of points are likely to be off; empty if it was not limited.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expected: Vec<ExpectedError>,
}

/// The program that produced a document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tool {
    /// Name of the program.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// The command line, if the caller provided it.
    #[serde(default)]
    pub command: String,
}

/// Static facts about the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceIdentity {
    /// The selector that opens the device.
    pub id: String,
    /// Name of the backend.
    pub backend: String,
    /// Name of the part.
    pub name: String,
    /// `cpu`, `gpu`, `accelerator` or `simulated`.
    pub kind: String,
    /// Memory available to buffers, in bytes.
    pub memory_bytes: f64,
    /// Cores, compute units or multiprocessors.
    pub compute_units: u32,
    /// The fingerprint; measurements hold only for devices with an equal one.
    pub fingerprint: String,
    /// Further facts.
    pub notes: Vec<Fact>,
    /// The largest single allocation in bytes.
    pub allocation_bytes_max: u64,
    /// Tokens in a KV page: the device's preferred size, with which it was measured.
    pub kv_page_tokens: u32,
}

/// A named fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Fact {
    /// Name of the fact.
    pub name: String,
    /// Value of the fact.
    pub value: String,
}

impl Fact {
    /// Creates a fact.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Fact {
        Fact { name: name.into(), value: value.into() }
    }
}

/// The device's readings at one moment; readings that it does not provide are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "State")]
pub struct DeviceReadings {
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Power in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Clock in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<f64>,
    /// Energy in joules since an arbitrary start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Corrected memory errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors_corrected: Option<u64>,
    /// Uncorrected memory errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errors_uncorrected: Option<u64>,
}

impl From<Health> for DeviceReadings {
    fn from(health: Health) -> Self {
        DeviceReadings {
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
    /// Readings before the first point.
    pub before: DeviceReadings,
    /// Readings after the last point.
    pub after: DeviceReadings,
    /// What the caller knows about the machine: governor, load, other users of the device, kernel.
    pub facts: Vec<Fact>,
    /// Warnings about the whole measurement.
    pub flags: Vec<Flag>,
    /// Size in bytes of the memory over which buffers rotate so that no cache holds them.
    pub cold_bytes: u64,
}

/// A warning about a point or a whole measurement.
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
    /// All flags.
    pub const ALL: [Flag; 7] = [
        Flag::Noisy,
        Flag::Unsteady,
        Flag::FewSamples,
        Flag::Throttled,
        Flag::OtherLoad,
        Flag::Emulated,
        Flag::MemoryErrors,
    ];

    /// Returns the name used in JSON and on pages.
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

/// The result of checking the conformance of one class of operations before timing it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Check")]
pub struct ClassCheck {
    /// Operation and dtypes, in the order of its operands.
    pub class: String,
    /// Number of cases tried.
    pub cases: u32,
    /// Whether all cases passed.
    pub passed: bool,
    /// The largest error as a share of its bound.
    #[serde(default)]
    pub ratio_max: Option<f64>,
    /// The fault, if any.
    #[serde(default)]
    pub reason: Option<String>,
}

/// How the measurement of a point ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PointStatus {
    /// It was measured.
    Ok,
    /// The device does not support it.
    Unsupported,
    /// It was skipped for the given reason.
    Skipped,
    /// It was tried and failed.
    Error,
}

/// The clock that timed a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Timer {
    /// The device's clock.
    Device,
    /// The host's clock.
    Host,
}

/// One measured point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PointResult {
    /// Stable name of the point.
    pub id: String,
    /// The group it belongs to.
    pub group: PointGroup,
    /// How the measurement ended.
    pub status: PointStatus,
    /// Why it is not `ok`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The operation, if the point is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<std::collections::BTreeMap<String, serde_json::Value>>")]
    pub sig: Option<OpSig>,
    /// Floating-point operations per run.
    pub flops: f64,
    /// Bytes that one run must move.
    pub bytes: f64,
    /// Seconds per run, excluding launch cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<SampleStats>,
    /// Runs per sample.
    #[serde(default)]
    pub runs_per_sample: u32,
    /// Warm-up runs before three samples in a row agreed.
    #[serde(default)]
    pub ramp: u32,
    /// Time at which the measurement ended, in seconds since the profile began.
    #[serde(default)]
    pub at_s: f64,
    /// The clock that timed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// Warnings about the point.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<Flag>,
    /// Rates at the beginning and the end of a long run, for points of `sustained`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub long_run: Option<LongRun>,
}

/// The results of a long run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LongRun {
    /// Duration in seconds.
    pub seconds: f64,
    /// Median seconds per run in the first tenth.
    pub burst_s: f64,
    /// Median seconds per run in the last third.
    pub sustained_s: f64,
    /// Rate at the end divided by the rate at the beginning.
    pub ratio: f64,
    /// Joules per run, if the device counts energy and the run took 10 s or longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules_per_run: Option<f64>,
    /// Readings of the device through the run.
    pub states: Vec<DeviceReadings>,
}

/// A line `fixed_s + bytes * s_per_byte` for sizes of at least `from_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LineFit {
    /// The smallest size that it applies to.
    pub from_bytes: f64,
    /// Fixed seconds per transfer.
    pub fixed_s: f64,
    /// Seconds per byte.
    pub s_per_byte: f64,
}

/// Lines and costs fitted through points.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Fits {
    /// Cost of submitting and waiting for a batch: host time in excess of device time.
    #[serde(default)]
    pub launch_s: Option<f64>,
    /// Time of each further command that does next to nothing; times of points exclude it.
    #[serde(default)]
    pub launch_per_command_s: Option<f64>,
    /// The same time on the host's clock, which is larger if the host feeds the device too slowly.
    #[serde(default)]
    pub launch_per_command_host_s: Option<f64>,
    /// Cost of a command of a layer beyond `launch_per_command_s`; negative where the device joins some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dependence_s: Option<f64>,
    /// Cost of copies from host memory to the device.
    #[serde(default)]
    pub host_to_device: Vec<LineFit>,
    /// Cost of copies from the device to host memory.
    #[serde(default)]
    pub device_to_host: Vec<LineFit>,
}

/// A rate and the point that reached it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReachedRate {
    /// FLOP/s or bytes/s.
    pub rate: f64,
    /// Name of the point.
    pub point: String,
}

/// The best arithmetic rate of one dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compute {
    /// Dtype of both inputs.
    pub dtype: String,
    /// The best rate in FLOP/s, and its point.
    pub reached: ReachedRate,
}

/// The headline numbers of a part, which are medians, not best values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileSummary {
    /// Best matrix product by dtype.
    pub compute: Vec<Compute>,
    /// Read bandwidth over the largest working set.
    #[serde(default)]
    pub memory_read: Option<ReachedRate>,
    /// Write bandwidth over the largest working set.
    #[serde(default)]
    pub memory_write: Option<ReachedRate>,
    /// Copy bandwidth over the largest working set, counting both directions.
    #[serde(default)]
    pub memory_copy: Option<ReachedRate>,
    /// Best rate at which decode attention reads KV.
    #[serde(default)]
    pub decode_attention: Option<ReachedRate>,
    /// Best arithmetic rate of prefill attention.
    #[serde(default)]
    pub prefill_attention: Option<ReachedRate>,
    /// Number of rows at which a bf16 product becomes compute-bound: compute over bandwidth, times bytes per
    /// weight over two.
    #[serde(default)]
    pub ridge_rows: Option<f64>,
    /// Rate of the largest copy from the host.
    #[serde(default)]
    pub host_to_device: Option<ReachedRate>,
    /// Rate of the largest copy to the host.
    #[serde(default)]
    pub device_to_host: Option<ReachedRate>,
    /// Number of points that were measured.
    pub ok: u32,
    /// Number of points that the device does not support.
    pub unsupported: u32,
    /// Number of points that were skipped.
    pub skipped: u32,
    /// Number of points that failed.
    pub error: u32,
    /// Number of points with a flag.
    pub flagged: u32,
}

/// The price of a device, and what it buys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Economics {
    /// Rent in dollars per hour.
    pub usd_per_hour: f64,
    /// Source of the price.
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

    /// Parses a document of this schema.
    ///
    /// # Errors
    /// A message, for another schema or invalid text.
    pub fn from_json(text: &str) -> Result<ProfileDocument, String> {
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        match value.get("schema").and_then(|schema| schema.as_str()) {
            Some(Self::SCHEMA) => {}
            Some(other) => return Err(format!("schema '{other}', expected '{}'", Self::SCHEMA)),
            None => return Err(format!("no field 'schema', expected '{}'", Self::SCHEMA)),
        }
        serde_json::from_value(value).map_err(|e| format!("not a document of {}: {e}", Self::SCHEMA))
    }

    /// Returns the point with this name.
    pub fn point(&self, id: &str) -> Option<&PointResult> {
        self.points.iter().find(|point| point.id == id)
    }

    /// Returns the JSON Schema of this document, as in `docs/schema/profile-1.json`.
    pub fn json_schema() -> serde_json::Value {
        schemars::schema_for!(ProfileDocument).to_value()
    }
}

impl PointResult {
    /// Returns the median rate: FLOP/s if bound by arithmetic, bytes/s otherwise; `None` without a time or
    /// without work.
    pub fn rate(&self) -> Option<Rate> {
        let seconds = self.seconds.as_ref()?.median;
        let arithmetic = match self.group {
            PointGroup::Prefill => true,
            PointGroup::Gemm => self.flops > 16.0 * self.bytes,
            PointGroup::Sustained => self.flops > 0.0,
            _ => false,
        };
        let (amount, unit) =
            if arithmetic { (self.flops, RateUnit::Flop) } else { (self.bytes, RateUnit::Byte) };
        (amount > 0.0 && seconds > 0.0).then(|| Rate { value: amount / seconds, unit })
    }

    /// Whether it has a number.
    pub fn is_ok(&self) -> bool {
        self.status == PointStatus::Ok
    }
}

/// The unit that a rate counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateUnit {
    /// Floating-point operations.
    Flop,
    /// Bytes.
    Byte,
}

/// A rate with its unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Amount per second.
    pub value: f64,
    /// Unit of the amount.
    pub unit: RateUnit,
}

impl Rate {
    /// Formats the rate with its unit: `41.2 GB/s`, `412 GFLOP/s`.
    pub fn text(self) -> String {
        let unit = match self.unit {
            RateUnit::Flop => "FLOP/s",
            RateUnit::Byte => "B/s",
        };
        scaled(self.value, unit)
    }
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
