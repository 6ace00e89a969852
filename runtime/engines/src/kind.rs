//! What engines of one kind do in their own way.

use std::fmt;
use std::str::FromStr;

/// A kind of engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// llama.cpp's server.
    LlamaCpp,
    /// This program's own: `serve` or `router`, with devices of their own or with engines.
    Mixfleet,
    /// vLLM's.
    Vllm,
}

/// Names of metrics that tell an engine's load; the first one that is there counts.
pub(crate) struct LoadNames {
    pub(crate) running: &'static [&'static str],
    pub(crate) waiting: &'static [&'static str],
    /// Share of KV memory in use.
    pub(crate) kv_usage: &'static [&'static str],
}

impl EngineKind {
    /// All kinds.
    pub const ALL: [EngineKind; 3] = [EngineKind::LlamaCpp, EngineKind::Mixfleet, EngineKind::Vllm];

    /// The kind's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::LlamaCpp => "llamacpp",
            EngineKind::Mixfleet => "mixfleet",
            EngineKind::Vllm => "vllm",
        }
    }

    /// Whether its engines hand KV over to others: vLLM's to each other, and to and from this program's own.
    pub fn hands_off(self) -> bool {
        matches!(self, EngineKind::Mixfleet | EngineKind::Vllm)
    }

    pub(crate) fn load_names(self) -> LoadNames {
        match self {
            EngineKind::LlamaCpp => LoadNames {
                running: &["llamacpp:requests_processing"],
                waiting: &["llamacpp:requests_deferred"],
                kv_usage: &["llamacpp:kv_cache_usage_ratio"],
            },
            // the first two under vLLM's names; SGLang and TensorRT-LLM are asked as vLLM is
            EngineKind::Mixfleet | EngineKind::Vllm => LoadNames {
                running: &[
                    "vllm:num_requests_running",
                    "sglang:num_running_reqs",
                    "trtllm_num_requests_running",
                ],
                waiting: &[
                    "vllm:num_requests_waiting",
                    "sglang:num_queue_reqs",
                    "trtllm_num_requests_waiting",
                ],
                kv_usage: &[
                    "vllm:kv_cache_usage_perc",
                    "vllm:gpu_cache_usage_perc",
                    "sglang:token_usage",
                    "trtllm_kv_cache_utilization",
                ],
            },
        }
    }

    /// Whether it answers requests and reports about itself as vLLM does.
    pub(crate) fn is_like_vllm(self) -> bool {
        matches!(self, EngineKind::Mixfleet | EngineKind::Vllm)
    }

    /// Whether it answers with its own name of the model, for any requested name.
    pub(crate) fn names_itself(self) -> bool {
        self == EngineKind::LlamaCpp
    }

    /// The option that enables `/metrics` there.
    pub(crate) fn metrics_hint(self) -> &'static str {
        match self {
            EngineKind::LlamaCpp => "start llama-server with --metrics",
            EngineKind::Mixfleet => "is it another program?",
            EngineKind::Vllm => {
                "do not start vLLM with --disable-log-stats; start SGLang with --enable-metrics"
            }
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EngineKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        EngineKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known = EngineKind::ALL.map(EngineKind::name).join(", ");
            format!("unknown kind of engine '{name}'; known: {known}")
        })
    }
}
