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
}

impl EngineCost {
    /// This project's engine: one operation after the other.
    pub const OURS: EngineCost = EngineCost { fused: false, per_expert_layer_s: 0.0 };
    /// An engine of fused kernels and recorded steps that adds nothing.
    pub const FUSED: EngineCost = EngineCost { fused: true, ..EngineCost::OURS };
    /// vLLM, fitted by the example `truth` of the simulator to published runs (docs/results/truth.md).
    pub const VLLM: EngineCost = EngineCost { per_expert_layer_s: 55e-6, ..EngineCost::FUSED };
    /// SGLang, fitted as vLLM.
    pub const SGLANG: EngineCost = EngineCost { per_expert_layer_s: 58e-6, ..EngineCost::FUSED };
    /// TensorRT-LLM, fitted as vLLM.
    pub const TENSORRT_LLM: EngineCost = EngineCost { per_expert_layer_s: 42e-6, ..EngineCost::FUSED };
}

impl Default for EngineCost {
    fn default() -> Self {
        EngineCost::OURS
    }
}
