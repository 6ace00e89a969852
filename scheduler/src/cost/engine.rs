//! What a serving engine adds to the times of its kernels.

use serde::{Deserialize, Serialize};

/// How an engine's step differs from the sum of the kernels that a profile predicts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineCost {
    /// Whether q, k and v are one product and gate and up another, and whole steps are launched at once, so
    /// that a command adds nothing to its kernel.
    pub fused: bool,
    /// Time that a layer with experts takes beyond its products: choosing, sorting and quantising rows.
    #[serde(default)]
    pub per_expert_layer_s: f64,
    /// Whether products in 4 bits and sums of few bytes follow the laws of external engines' kernels.
    #[serde(default)]
    pub external: bool,
    /// Host time of a step that its kernels do not hide: scheduling, preparing inputs and returning tokens.
    #[serde(default)]
    pub per_step_s: f64,
    /// The same of each sequence that draws a token in the step.
    #[serde(default)]
    pub per_sequence_s: f64,
}

impl EngineCost {
    /// This project's engine: one operation after the other.
    pub const OURS: EngineCost = EngineCost {
        fused: false,
        external: false,
        per_expert_layer_s: 0.0,
        per_step_s: 0.0,
        per_sequence_s: 0.0,
    };
    /// An engine of fused kernels and recorded steps that adds nothing.
    pub const FUSED: EngineCost = EngineCost { fused: true, ..EngineCost::OURS };
    const EXTERNAL: EngineCost = EngineCost { external: true, ..EngineCost::FUSED };
    /// vLLM; times of layers of experts are fitted by the example `truth` of the simulator to published runs,
    /// and the host's times chosen on them (docs/results/truth.md).
    pub const VLLM: EngineCost = EngineCost {
        per_expert_layer_s: 48e-6,
        per_step_s: 0.5e-3,
        per_sequence_s: 10e-6,
        ..EngineCost::EXTERNAL
    };
    /// SGLang, as vLLM.
    pub const SGLANG: EngineCost = EngineCost {
        per_expert_layer_s: 61e-6,
        per_step_s: 0.7e-3,
        per_sequence_s: 20e-6,
        ..EngineCost::EXTERNAL
    };
    /// TensorRT-LLM, as vLLM.
    pub const TENSORRT_LLM: EngineCost = EngineCost {
        per_expert_layer_s: 43e-6,
        per_step_s: 0.1e-3,
        per_sequence_s: 8e-6,
        ..EngineCost::EXTERNAL
    };
}

impl Default for EngineCost {
    fn default() -> Self {
        EngineCost::OURS
    }
}
