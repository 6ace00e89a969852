//! What a serving engine adds to the times of its kernels.

use mixfleet_hal::OpSig;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// How an engine's step differs from the sum of the kernels that a profile predicts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineCost {
    /// Whether q, k and v are one product and gate and up another, and whole steps are launched at once, so
    /// that a command adds nothing to its kernel.
    pub fused: bool,
    /// Time per sequence that draws a token, not hidden behind the device: scheduling, sampling,
    /// detokenising.
    pub per_sequence_s: f64,
    /// Time that a product or an attention kernel takes more than alone; below 0 where its start overlaps
    /// with the kernel before.
    pub per_kernel_s: f64,
    /// Time of its all-reduces, relative to NCCL's.
    pub all_reduces: f64,
    /// Time that a layer with experts takes beyond its products: choosing, sorting and quantising rows.
    #[serde(default)]
    pub per_expert_layer_s: f64,
}

impl EngineCost {
    /// This project's engine: one operation after the other.
    pub const OURS: EngineCost = EngineCost {
        fused: false,
        per_sequence_s: 0.0,
        per_kernel_s: 0.0,
        all_reduces: 1.0,
        per_expert_layer_s: 0.0,
    };
    /// An engine of fused kernels and recorded steps that adds nothing.
    pub const FUSED: EngineCost = EngineCost { fused: true, ..EngineCost::OURS };
    /// vLLM, fitted by the example `truth` of the simulator to published runs (docs/results/truth.md).
    pub const VLLM: EngineCost = EngineCost {
        per_sequence_s: 4e-7,
        per_kernel_s: -1e-8,
        all_reduces: 0.997,
        per_expert_layer_s: 55e-6,
        ..EngineCost::FUSED
    };
    /// SGLang, fitted as vLLM; of mixtures of experts alone, since no dense model's runs are published.
    pub const SGLANG: EngineCost = EngineCost { per_expert_layer_s: 58e-6, ..EngineCost::FUSED };
    /// TensorRT-LLM, fitted as vLLM.
    pub const TENSORRT_LLM: EngineCost = EngineCost {
        per_kernel_s: -1.8e-7,
        all_reduces: 0.959,
        per_expert_layer_s: 45e-6,
        ..EngineCost::FUSED
    };

    /// The time of an operation, from that of its kernel alone; at least half of it.
    pub(super) fn of(&self, sig: &OpSig, kernel: Seconds) -> Seconds {
        match sig {
            OpSig::Gemm { .. } | OpSig::AttnDecode { .. } | OpSig::AttnPrefill { .. } => {
                (kernel + Seconds(self.per_kernel_s)).max(kernel * 0.5)
            }
            _ => kernel,
        }
    }
}

impl Default for EngineCost {
    fn default() -> Self {
        EngineCost::OURS
    }
}
