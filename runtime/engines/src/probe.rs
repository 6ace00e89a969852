//! What an engine tells of itself.

use crate::http::HttpEngine;
use crate::kind::EngineKind;
use crate::metrics::Exposition;
use hyper::{Method, StatusCode};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::outside::{EngineFault, EngineFaultKind, EngineModel, EngineState};
use serde::Deserialize;
use std::sync::PoisonError;

/// Models that are read of a list.
const MODELS_MAX: usize = 256;

#[derive(Deserialize)]
struct Models {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    #[serde(default)]
    aliases: Vec<String>,
    /// vLLM's.
    max_model_len: Option<u32>,
    meta: Option<ModelFacts>,
    /// The model that this one is an adapter of, at vLLM.
    parent: Option<String>,
}

/// llama.cpp's.
#[derive(Deserialize)]
struct ModelFacts {
    n_ctx: Option<u32>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

/// llama.cpp's.
#[derive(Deserialize)]
struct Properties {
    default_generation_settings: SlotFacts,
    total_slots: u32,
    build_info: Option<String>,
}

#[derive(Deserialize)]
struct SlotFacts {
    n_ctx: u32,
}

impl HttpEngine {
    /// Finds the replica in its seat, if it has one, and requests its state.
    pub(crate) async fn look(&self) -> Result<EngineState, EngineFault> {
        let Some(seat) = &self.seat else { return self.ask_state().await };
        let is_listed = seat.look().await?;
        match self.ask_state().await {
            Ok(mut state) => {
                state.leaving = !is_listed;
                state.missing.extend(seat.left_out().await);
                Ok(state)
            }
            Err(fault) => {
                seat.fail().await;
                Err(fault)
            }
        }
    }

    /// Requests health, models, version, memory and load.
    async fn ask_state(&self) -> Result<EngineState, EngineFault> {
        let (status, _) = self.short(Method::GET, "/health", Vec::new()).await?;
        if status != StatusCode::OK {
            let kind = match status {
                StatusCode::SERVICE_UNAVAILABLE => EngineFaultKind::Busy,
                _ => EngineFaultKind::Failed,
            };
            return Err(EngineFault::new(kind, format!("/health answers {}", status.as_u16())));
        }
        let mut state = EngineState { models: self.models().await?, ..EngineState::default() };
        let names = state.models.iter().map(|model| model.name.clone()).collect();
        *self.listed.lock().unwrap_or_else(PoisonError::into_inner) = names;
        match self.kind {
            EngineKind::Mixfleet | EngineKind::Vllm => self.version(&mut state).await?,
            EngineKind::LlamaCpp => self.properties(&mut state).await?,
        }
        self.load(&mut state).await?;
        Ok(state)
    }

    async fn models(&self) -> Result<Vec<EngineModel>, EngineFault> {
        let (status, body) = self.short(Method::GET, "/v1/models", Vec::new()).await?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let detail = format!("/v1/models answers {}: it wants another key", status.as_u16());
            return Err(EngineFault::new(EngineFaultKind::Failed, detail));
        }
        let read: Option<Models> =
            (status == StatusCode::OK).then(|| serde_json::from_slice(&body).ok()).flatten();
        let Some(Models { data }) = read.filter(|models| !models.data.is_empty()) else {
            let detail = format!("/v1/models (status {}) lists no model", status.as_u16());
            return Err(EngineFault::new(EngineFaultKind::Malformed, detail));
        };
        let adapters = data.iter().filter(|model| model.parent.is_some()).take(MODELS_MAX);
        let adapters = adapters.map(|model| model.id.clone()).collect();
        *self.adapters.lock().unwrap_or_else(PoisonError::into_inner) = adapters;
        let named = data.into_iter().take(MODELS_MAX).flat_map(|model| {
            let context = model.max_model_len.or(model.meta.and_then(|meta| meta.n_ctx));
            let others = model.aliases.into_iter().filter(|alias| *alias != model.id).collect::<Vec<_>>();
            std::iter::once(model.id).chain(others).map(move |name| EngineModel { name, context })
        });
        Ok(named.collect())
    }

    async fn version(&self, state: &mut EngineState) -> Result<(), EngineFault> {
        let (_, body) = self.short(Method::GET, "/version", Vec::new()).await?;
        match serde_json::from_slice::<Version>(&body) {
            Ok(Version { version }) => state.version = Some(version),
            Err(_) => state.missing.push("/version tells no version".into()),
        }
        Ok(())
    }

    async fn properties(&self, state: &mut EngineState) -> Result<(), EngineFault> {
        let (_, body) = self.short(Method::GET, "/props", Vec::new()).await?;
        let Ok(Properties { default_generation_settings: slot, total_slots, build_info }) =
            serde_json::from_slice(&body)
        else {
            state.missing.push("/props reports no slots: its KV memory is not known".into());
            return Ok(());
        };
        state.version = build_info;
        state.sequences_max = Some(total_slots.max(1));
        state.kv_tokens = Some(u64::from(slot.n_ctx) * u64::from(total_slots));
        state.block_tokens = Some(1);
        for model in &mut state.models {
            model.context = Some(slot.n_ctx);
        }
        Ok(())
    }

    async fn load(&self, state: &mut EngineState) -> Result<(), EngineFault> {
        let (status, body) = self.short(Method::GET, "/metrics", Vec::new()).await?;
        let text = String::from_utf8_lossy(&body);
        let exposition = Exposition::new(if status == StatusCode::OK { &text } else { "" });
        let names = self.kind.load_names();
        let count = |names: &[&str]| {
            let told = names.iter().find_map(|name| exposition.sum(name));
            told.map(|count| to_u32(to_u64(count)))
        };
        (state.running, state.waiting) = (count(names.running), count(names.waiting));
        state.kv_usage = names.kv_usage.iter().find_map(|name| exposition.largest(name));
        if state.running.is_none() || state.waiting.is_none() {
            let hint = self.kind.metrics_hint();
            let sentence = format!("/metrics reports no queue: only requests from here are counted ({hint})");
            state.missing.push(sentence);
        }
        if self.kind == EngineKind::Mixfleet {
            let tokens = exposition.sum("mixfleet_kv_capacity_tokens");
            state.kv_tokens = tokens.filter(|tokens| *tokens >= 1.0).map(to_u64);
            let block = exposition.largest("mixfleet_kv_block_tokens").map(|tokens| to_u32(to_u64(tokens)));
            state.block_tokens = block.filter(|tokens| *tokens > 0);
        }
        if self.kind == EngineKind::Vllm {
            const FACTS: &str = "vllm:cache_config_info";
            let memory = kv_memory(&exposition);
            state.kv_tokens = memory.tokens.filter(|tokens| *tokens >= 1.0).map(to_u64);
            state.block_tokens = memory.block_tokens.filter(|tokens| *tokens > 0);
            state.kv_dtype = exposition.label(FACTS, "cache_dtype").map(str::to_owned);
            state.hands_off = exposition.sum("vllm:nixl_xfer_time_seconds_count").is_some();
        }
        if self.kind.is_like_vllm() && state.kv_tokens.is_none() {
            state
                .missing
                .push("/metrics reports no KV memory: only the model's context limits requests".into());
        }
        Ok(())
    }
}

/// KV memory as metrics tell it.
struct ToldKvMemory {
    tokens: Option<f64>,
    block_tokens: Option<u32>,
}

/// Reads the KV memory under the names of vLLM, SGLang or TensorRT-LLM.
fn kv_memory(exposition: &Exposition<'_>) -> ToldKvMemory {
    for (facts, block, blocks) in [
        ("vllm:cache_config_info", "block_size", "num_gpu_blocks"),
        ("sglang:cache_config_info", "page_size", "num_pages"),
    ] {
        let tokens = exposition.label_products(facts, &[block, blocks]);
        let block_tokens = exposition.label(facts, block).and_then(|tokens| tokens.parse().ok());
        if tokens.is_some() || block_tokens.is_some() {
            return ToldKvMemory { tokens, block_tokens };
        }
    }
    let block_tokens = exposition.largest("trtllm_kv_cache_tokens_per_block");
    let blocks = exposition.sum("trtllm_kv_cache_max_blocks");
    ToldKvMemory {
        tokens: block_tokens.zip(blocks).map(|(tokens, blocks)| tokens * blocks),
        block_tokens: block_tokens.map(|tokens| to_u32(to_u64(tokens))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_memory_is_read_by_each_name() {
        let told = |text: &str| {
            let ToldKvMemory { tokens, block_tokens } = kv_memory(&Exposition::new(text));
            (tokens, block_tokens)
        };
        let vllm = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n";
        assert_eq!(told(vllm), (Some(1600.0), Some(16)));
        let sglang = "sglang:cache_config_info{page_size=\"64\",num_pages=\"10\"} 1\n";
        assert_eq!(told(sglang), (Some(640.0), Some(64)));
        let trtllm = "trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 4\n";
        assert_eq!(told(trtllm), (Some(128.0), Some(32)));
        assert_eq!(told("other 1\n"), (None, None));
    }
}
