//! The shares of their datasheets that published kernels reach.

use crate::{DType, KvShape, OpSig};
use serde::Serialize;

/// Shares of datasheet rates that vLLM's kernels were measured to reach, in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MeasuredEfficiency {
    /// Catalog id of the part.
    pub id: &'static str,
    /// Share of the memory bandwidth in decode attention: 64 query and 8 KV heads of 128, context 4096, batch
    /// 32 to 64.
    pub attention_decode: f64,
    /// Share of the arithmetic rate in large matrix products.
    pub gemm: f64,
    /// Share of the memory bandwidth in matrix products of few rows.
    pub gemm_few_rows: f64,
    /// Source of the shares.
    pub source: &'static str,
}

const AICONFIGURATOR: &str = "derived from aiconfigurator's vLLM kernel tables (Apache-2.0)";

const fn vllm(id: &'static str, attention_decode: f64, gemm: f64, gemm_few_rows: f64) -> MeasuredEfficiency {
    MeasuredEfficiency { id, attention_decode, gemm, gemm_few_rows, source: AICONFIGURATOR }
}

const REACHED: &[MeasuredEfficiency] = &[
    vllm("A100-SXM-80GB", 0.63, 0.91, 0.74),
    vllm("H100-SXM-80GB", 0.88, 0.80, 0.87),
    vllm("H200-SXM-141GB", 0.83, 0.78, 0.82),
    vllm("B200-SXM", 0.82, 0.70, 0.77),
    vllm("L40S", 0.74, 0.64, 0.83),
    vllm("RTX-PRO-6000-SE", 0.81, 0.85, 0.82),
    vllm("ARC-PRO-B60", 0.945, 0.90, 0.92),
    MeasuredEfficiency {
        id: "RTX-4090",
        attention_decode: 0.92,
        gemm: 0.99,
        gemm_few_rows: 0.91,
        source: "derived from LLMServingSim's vLLM profile (MIT)",
    },
];

pub(super) fn reached(id: &str) -> Option<&'static MeasuredEfficiency> {
    REACHED.iter().find(|reached| reached.id == id)
}

impl MeasuredEfficiency {
    /// Returns the operations at which the shares were measured, enough of them that predictions in between
    /// stay between the shares; in bf16 and in f16, which uses the same kernels.
    pub(super) fn shares(&self) -> Vec<(OpSig, f64)> {
        [DType::Bf16, DType::F16]
            .into_iter()
            .flat_map(|x| {
                let gemm = move |m, n, k| {
                    let (weight, out, bias, accumulate) = (x, x, false, false);
                    OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
                };
                let gemms =
                    [(4096, 4096), (8192, 8192), (28672, 8192)].into_iter().flat_map(move |(n, k)| {
                        let few = [1, 16, 64].map(|m| (gemm(m, n, k), self.gemm_few_rows));
                        few.into_iter().chain([1024, 4096, 16384].map(|m| (gemm(m, n, k), self.gemm)))
                    });
                let attention = OpSig::AttnDecode {
                    sequences: 32,
                    kv_tokens: 32 * 4096,
                    heads: 64,
                    pages_max: 4096 / 16,
                    x,
                    kv: KvShape { kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: x },
                };
                gemms.chain([(attention, self.attention_decode)])
            })
            .collect()
    }
}
