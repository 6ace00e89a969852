//! Known parts as data: what their vendors claim, with sources and a confidence.
//!
//! Rates are dense (vendors like to quote 2:4 sparse rates, which are twice as high) and, for floating point,
//! with f32 accumulation (consumer parts then run at half the quoted rate). Prices are not part of the
//! catalog; see [`crate::economics`].

mod amd;
mod driver_names;
mod geforce;
mod law;
mod names;
mod nvidia;
mod others;
mod reached;

pub use driver_names::{SIMULATED, part_of_driver};
pub use law::{LAW_FILES, LawKind, MeasuredLaw};
pub use names::{closest_names, is_near, names_that_begin};
pub use reached::{MeasuredEfficiency, lenders};

use crate::profile::{CopyCost, DeviceProfile, LinearSegment, Provenance};
use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, GB, Seconds};
use crate::{DType, WeightFormat};
use serde::Serialize;
use std::sync::LazyLock;

/// A part as its vendor describes it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Part {
    /// The id that users type, such as `RTX-4090` or `H100-SXM-80GB`; lookups ignore case.
    pub id: &'static str,
    /// The full name.
    pub name: &'static str,
    /// Name of the vendor.
    pub vendor: &'static str,
    /// What sort of part it is.
    pub kind: PartKind,
    /// The year of its first sale.
    pub year: u16,
    /// Arithmetic rates.
    pub rates: Rates,
    /// Memory type, size and bandwidth.
    pub memory: MemorySpec,
    /// Power limit of the part, in watts.
    pub power_w: Option<f64>,
    /// Link to the host, in GB/s per direction.
    pub host_link: Option<LinkSpec>,
    /// Link to peer devices, in GB/s of both directions together, as vendors quote it.
    pub scale_up: Option<LinkSpec>,
    /// How far to trust the numbers.
    pub confidence: Confidence,
    /// Sources of the numbers.
    pub sources: &'static str,
    /// A caveat about the numbers; may be empty.
    pub note: &'static str,
}

/// What sort of part it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PartKind {
    /// A graphics processor with its own memory.
    Gpu,
    /// Integrated graphics that share the processor's memory.
    Shared,
    /// Any other accelerator.
    Accelerator,
    /// A processor, counted as one socket.
    Cpu,
}

/// How far to trust a part's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Confidence {
    /// Bandwidth, memory and the bf16 rate agree between independent sources.
    A,
    /// Most agree, or they follow from cores and clock.
    B,
    /// One source, or sources that disagree.
    C,
}

/// Dense rates in TFLOP/s (TOPS for int8) with f32 accumulation. `None` means no such units, or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Single precision on vector units.
    pub f32: Option<f64>,
    /// Bf16 on matrix units.
    pub bf16: Option<f64>,
    /// F16 on matrix units.
    pub f16: Option<f64>,
    /// F16 on matrix units with f16 accumulation, given only if it is faster; too coarse for long sums.
    pub f16_accumulate_f16: Option<f64>,
    /// Fp8 on matrix units.
    pub fp8: Option<f64>,
    /// Fp4 on matrix units.
    pub fp4: Option<f64>,
    /// Int8 on matrix units with int32 accumulation, in TOPS.
    pub int8: Option<f64>,
}

impl Rates {
    const NONE: Rates = Rates {
        f32: None,
        bf16: None,
        f16: None,
        f16_accumulate_f16: None,
        fp8: None,
        fp4: None,
        int8: None,
    };

    const fn f32(rate: f64) -> Rates {
        Rates { f32: Some(rate), ..Rates::NONE }
    }
    const fn bf16(self, rate: f64) -> Rates {
        Rates { bf16: Some(rate), ..self }
    }
    const fn f16(self, rate: f64) -> Rates {
        Rates { f16: Some(rate), ..self }
    }
    const fn f16_accumulate_f16(self, rate: f64) -> Rates {
        Rates { f16_accumulate_f16: Some(rate), ..self }
    }
    const fn fp8(self, rate: f64) -> Rates {
        Rates { fp8: Some(rate), ..self }
    }
    const fn fp4(self, rate: f64) -> Rates {
        Rates { fp4: Some(rate), ..self }
    }
    const fn int8(self, rate: f64) -> Rates {
        Rates { int8: Some(rate), ..self }
    }

    /// Returns the rate for inputs of `dtype`, if the part has units for it.
    pub fn of(&self, dtype: DType) -> Option<FlopPerSecond> {
        let tera = match dtype {
            DType::F32 => self.f32,
            DType::Bf16 => self.bf16,
            DType::F16 => self.f16,
            DType::F8E4m3 => self.fp8,
            DType::I8 | DType::U32 => None,
        };
        tera.map(|rate| FlopPerSecond(rate * 1e12))
    }
}

/// Memory of a part, according to its datasheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemorySpec {
    /// Memory technology, such as `HBM3`, `GDDR6X` or `DDR5-4800x12`.
    pub technology: &'static str,
    /// Usable size in GB (1e9 bytes).
    pub size_gb: f64,
    /// Bandwidth in GB/s.
    pub bandwidth_gb_s: f64,
}

const fn memory(technology: &'static str, size_gb: f64, bandwidth_gb_s: f64) -> MemorySpec {
    MemorySpec { technology, size_gb, bandwidth_gb_s }
}

/// A link of a part, according to its datasheet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkSpec {
    /// Name of the link, such as `PCIe5x16` or `NVLink4`.
    pub name: &'static str,
    /// Bandwidth in GB/s.
    pub gb_s: f64,
}

const fn link(name: &'static str, gb_s: f64) -> Option<LinkSpec> {
    Some(LinkSpec { name, gb_s })
}

/// Cost of submitting one batch of commands to an accelerator. Datasheets do not give it; this is the upper
/// end of what Lamina measured (arXiv 2405.01814: at most 20 us).
pub const LAUNCH_ACCELERATOR: Seconds = Seconds(20e-6);
/// Cost of each further command on an accelerator, as in a recorded graph; assumed, not measured.
pub const LAUNCH_PER_COMMAND_ACCELERATOR: Seconds = Seconds(2e-6);
/// Cost of waking the threads of a processor; assumed, not measured.
pub const LAUNCH_CPU: Seconds = Seconds(5e-6);
/// Cost of a barrier between the threads of a processor; assumed, not measured.
pub const LAUNCH_PER_COMMAND_CPU: Seconds = Seconds(2e-6);

impl Part {
    /// Returns the memory bandwidth.
    pub fn bandwidth(&self) -> BytesPerSecond {
        BytesPerSecond(self.memory.bandwidth_gb_s * GB)
    }

    /// Returns the memory size.
    pub fn memory_bytes(&self) -> Bytes {
        Bytes(self.memory.size_gb * GB)
    }

    /// Turns the datasheet into a profile without measured points: a roofline. It is an upper bound: real
    /// kernels reach 40 to 95 % of it. The launch costs are the constants above. Dtypes without units of
    /// their own use the first known rate (f32 if known).
    pub fn profile(&self) -> DeviceProfile {
        let dtypes = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3];
        let compute = dtypes.iter().filter_map(|&dtype| Some((dtype, self.rates.of(dtype)?))).collect();
        let (launch, launch_per_command) = match self.kind {
            PartKind::Cpu => (LAUNCH_CPU, LAUNCH_PER_COMMAND_CPU),
            _ => (LAUNCH_ACCELERATOR, LAUNCH_PER_COMMAND_ACCELERATOR),
        };
        let host = CopyCost(self.host_link.map_or_else(Vec::new, |link| {
            vec![LinearSegment { from: Bytes::ZERO, fixed: launch, seconds_per_byte: 1.0 / (link.gb_s * GB) }]
        }));
        let remark = format!("a claim, not a measurement: {}", self.sources);
        DeviceProfile {
            name: self.name.into(),
            fingerprint: format!("{DATASHEET}{}", self.id),
            launch,
            launch_per_command,
            host_to_device: host.clone(),
            device_to_host: host,
            provenance: Provenance {
                tool: "mixfleet catalog".into(),
                measured_at: String::new(),
                remarks: vec![remark],
                evidence: Vec::new(),
            },
            formats: self.format_rates(),
            ..DeviceProfile::roof(compute, self.bandwidth(), self.memory_bytes())
        }
    }

    /// Returns the rates of products whose operands are both quantised, beyond fp8, which is a dtype: int8,
    /// and either form of fp4. Nvfp4 is NVIDIA's own. Int4 weights are converted everywhere.
    fn format_rates(&self) -> Vec<(WeightFormat, FlopPerSecond)> {
        let nvfp4 = self.rates.fp4.filter(|_| self.vendor == "NVIDIA");
        let known = [
            (WeightFormat::Int8, self.rates.int8),
            (WeightFormat::Mxfp4, self.rates.fp4),
            (WeightFormat::Nvfp4, nvfp4),
        ];
        known.into_iter().filter_map(|(format, tera)| Some((format, FlopPerSecond(tera? * 1e12)))).collect()
    }

    /// Returns published kernel times of the part, as points that predict the rest.
    pub fn laws(&self) -> &'static [MeasuredLaw] {
        law::laws(self.id)
    }

    /// Returns the shares of this datasheet that published kernels reach, if known.
    pub fn reached(&self) -> Option<&'static MeasuredEfficiency> {
        reached::reached(self.id)
    }

    /// Turns the datasheet, lowered to what published kernels reach, into a profile. It has points of the
    /// part's own laws, of its published shares, or as its nearest relatives predict them, each kind of
    /// operation by the best that there is; its provenance says which. `None` if there is nothing.
    pub fn reached_profile(&self) -> Option<DeviceProfile> {
        let fingerprint = format!("{REACHED}{}", self.id);
        Some(DeviceProfile { fingerprint, ..reached::profile(self)? })
    }

    /// Returns what predicts its kernels best: what published kernels reach, or else the datasheet, of a
    /// processor in full and of other devices at half.
    pub fn best_profile(&self) -> DeviceProfile {
        self.reached_profile().unwrap_or_else(|| match self.kind {
            PartKind::Cpu => self.profile(),
            _ => reached::half_datasheet(self),
        })
    }
}

const DATASHEET: &str = "datasheet:";
const REACHED: &str = "reached:";

/// Whether a profile was made from this catalog instead of from a measurement.
pub fn is_claim(profile: &DeviceProfile) -> bool {
    [DATASHEET, REACHED].iter().any(|prefix| profile.fingerprint.starts_with(prefix))
}

/// Returns all parts, ordered by vendor and age.
pub fn parts() -> &'static [Part] {
    static PARTS: LazyLock<Vec<Part>> =
        LazyLock::new(|| [nvidia::PARTS, geforce::PARTS, amd::PARTS, others::PARTS].concat());
    &PARTS
}

/// Returns the part with this id (case-insensitive).
pub fn part(id: &str) -> Option<&'static Part> {
    parts().iter().find(|part| part.id.eq_ignore_ascii_case(id))
}

/// Returns the part that a user means: the one with this id, or the only one whose id begins with it.
///
/// # Errors
/// A message with the parts that begin with it, or else with those of similar names.
pub fn named(text: &str) -> Result<&'static Part, String> {
    if let Some(part) = part(text) {
        return Ok(part);
    }
    match &names_that_begin(text, parts().iter().map(|part| part.id))[..] {
        [only] => part(only).ok_or_else(|| format!("no part is called '{text}'")),
        [] => match &closest(text)[..] {
            [] => Err(format!("no part is called '{text}'; 'mixfleet parts' lists them")),
            near => Err(format!("no part is called '{text}'; closest: {}", near.join(", "))),
        },
        several => Err(format!("'{text}' may be any of {}; name one", several.join(", "))),
    }
}

/// Returns the ids most similar to `id`, best first, for error messages about unknown ids.
pub fn closest(id: &str) -> Vec<&'static str> {
    closest_names(id, parts().iter().map(|part| part.id))
}

#[cfg(test)]
mod tests;
