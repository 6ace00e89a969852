//! Serving engines: the limits that they start with, and what they add to the time of their kernels.

use crate::batch::BatchLimits;
use crate::cost::{EngineCost, ModelShape};
use crate::sizing::{ridge, step_tokens};
use mixfleet_hal::WeightFormat;
use mixfleet_hal::catalog::Part;
use mixfleet_hal::profile::{DeviceProfile, Evidence};

/// Likely error of layers with experts, whose kernels no law is of: four in five published runs lie within it
/// (docs/results/truth.md).
const MIXTURE_ERROR: f64 = 0.20;
/// Likely error of weights in formats without tables.
const FORMAT_ERROR: f64 = 0.15;

/// The name of this project's engine.
pub const OURS: &str = "mixfleet";

/// A serving engine as it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KnownEngine {
    /// Its name, in lower case.
    pub name: &'static str,
    /// Other names of the engine.
    pub aliases: &'static [&'static str],
    /// Maximum rows of a step.
    pub step_tokens: u32,
    /// Maximum number of running sequences.
    pub sequences: u32,
    /// Whether prompts fill a step up beside decodes, instead of as far as the TBT objective allows.
    pub fills_steps: bool,
    /// Whether devices of an instance can divide sequences and whole experts, with all other weights on each.
    pub divides_sequences: bool,
    /// Devices of an instance that can have the weights where others attend for them, in it or beside prompts
    /// of their own; 0 if none can attend for others.
    pub apart_devices_max: u32,
    /// What it adds to the time of its kernels.
    pub cost: EngineCost,
    /// How far four in five published runs lie from what it is predicted to give, where kernels are known
    /// (docs/results/truth.md); 0 if there is no published run.
    pub error: f64,
}

impl KnownEngine {
    /// Whether this many devices can hold the weights under attention offload.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check_apart(&self, devices: u32) -> Result<(), String> {
        match self.apart_devices_max {
            0 => Err(format!("{} has no devices that attend for others", self.name)),
            most if devices > most => Err(format!(
                "{} has the weights on at most {most} device where others attend, not on {devices}",
                self.name
            )),
            _ => Ok(()),
        }
    }

    /// Maximum rows of a step on a part, if that is known: this project's engine sizes steps by the part's
    /// ridge.
    pub fn step_tokens_on(&self, part: Option<&Part>, shape: &ModelShape) -> u32 {
        match part {
            Some(part) if self.name == OURS => step_tokens(shape, ridge(part, shape.weight)),
            _ => self.step_tokens,
        }
    }

    /// The likely relative error of step times: the largest kernel error of the model on `profile`, plus the
    /// remainder of the engine beyond kernels. `None` if the kernels' error is unknown, or they were measured
    /// as whole steps.
    pub fn likely_error(&self, profile: &DeviceProfile, shape: &ModelShape) -> Option<f64> {
        let evidence = profile.provenance.evidence.iter();
        let concerns = |evidence: &&Evidence| [shape.weight, shape.kv].contains(&evidence.dtype);
        let errors = evidence.filter(concerns).filter_map(|evidence| evidence.error);
        let unknown = [
            (shape.experts.is_some(), MIXTURE_ERROR),
            (shape.format.is_some_and(|format| format != WeightFormat::Fp8), FORMAT_ERROR),
        ];
        let more = unknown.iter().filter(|(applies, _)| *applies).map(|(_, error)| *error);
        errors.reduce(f64::max).map(|kernels| more.fold(kernels.hypot(self.error), f64::hypot))
    }
}

/// The limits that the engines' documentation states for parts of at least 70 GB.
const ENGINES: [KnownEngine; 4] = [
    KnownEngine {
        name: OURS,
        aliases: &[],
        step_tokens: BatchLimits::STEP_TOKENS_MAX,
        sequences: BatchLimits::SEQUENCES_MAX,
        fills_steps: false,
        divides_sequences: false,
        apart_devices_max: 1,
        cost: EngineCost::OURS,
        error: 0.0,
    },
    // `max_num_batched_tokens` and `max_num_seqs` of vLLM's API server.
    KnownEngine {
        name: "vllm",
        aliases: &[],
        step_tokens: 8192,
        sequences: 1024,
        fills_steps: true,
        divides_sequences: true,
        apart_devices_max: 0,
        cost: EngineCost::VLLM,
        error: 0.11,
    },
    // `chunked_prefill_size`.
    KnownEngine {
        name: "sglang",
        aliases: &[],
        step_tokens: 8192,
        sequences: 1024,
        fills_steps: true,
        divides_sequences: true,
        apart_devices_max: 0,
        cost: EngineCost::SGLANG,
        error: 0.15,
    },
    // `max_num_tokens` and `max_batch_size`.
    KnownEngine {
        name: "tensorrt-llm",
        aliases: &["trtllm", "trt-llm"],
        step_tokens: 8192,
        sequences: 2048,
        fills_steps: true,
        divides_sequences: true,
        apart_devices_max: 0,
        cost: EngineCost::TENSORRT_LLM,
        error: 0.19,
    },
];

/// vLLM as if its devices could attend for others.
#[cfg(test)]
pub(crate) static ATTENDING: KnownEngine = KnownEngine { apart_devices_max: 8, ..ENGINES[1] };

/// All known engines; the first is this project's.
pub fn engines() -> &'static [KnownEngine] {
    &ENGINES
}

/// The engine of this name, in any case.
///
/// # Errors
/// The names that are known.
pub fn find(name: &str) -> Result<&'static KnownEngine, String> {
    let is = |known: &str| known.eq_ignore_ascii_case(name);
    let found = ENGINES.iter().find(|engine| is(engine.name) || engine.aliases.iter().any(|alias| is(alias)));
    found.ok_or_else(|| {
        let names: Vec<&str> = ENGINES.iter().map(|engine| engine.name).collect();
        format!("is '{name}'; known are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_found_by_any_of_their_names() {
        for engine in engines() {
            for name in engine.aliases.iter().chain([&engine.name]) {
                assert_eq!(find(&name.to_uppercase()), Ok(engine));
            }
        }
        assert_eq!(
            find("ollama").unwrap_err(),
            "is 'ollama'; known are mixfleet, vllm, sglang, tensorrt-llm"
        );
    }
}
