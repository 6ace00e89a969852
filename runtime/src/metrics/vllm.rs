//! The same numbers under the names that vLLM gives them, which boards and autoscalers for it ask for.
//!
//! Each is a second name of a metric of this process. They appear once the served model is known, since
//! boards select by `model_name`.

use super::Metrics;
use prometheus_client::registry::{Registry, Unit};

/// All second names, for a model.
pub(super) fn registry(of: &Metrics, model: &str) -> Registry {
    let label = ("model_name".into(), model.to_owned().into());
    let mut registry = Registry::with_labels(std::iter::once(label));
    let to = &mut registry;
    let timed = [
        ("time_to_first_token", "Received to first token", &of.time_to_first_token_s),
        ("inter_token_latency", "Between two tokens", &of.inter_token_latency_s),
        ("e2e_request_latency", "Received to complete", &of.e2e_request_latency_s),
        ("request_queue_time", "Accepted to scheduled", &of.request_queue_time_s),
        ("request_prefill_time", "Scheduled to first token", &of.request_prefill_time_s),
        ("request_decode_time", "First token to complete", &of.request_decode_time_s),
    ];
    for (name, help, histogram) in timed {
        to.register_with_unit(format!("vllm:{name}"), help, Unit::Seconds, histogram.clone());
    }
    to.register("vllm:request_prompt_tokens", "Prompt length in tokens", of.request_prompt_tokens.clone());
    let answers = of.request_generation_tokens.clone();
    to.register("vllm:request_generation_tokens", "Answer length in tokens", answers);
    to.register("vllm:num_requests_running", "Sequences in the running batch", of.requests_running.clone());
    to.register(
        "vllm:num_requests_waiting",
        "Sequences accepted and not running",
        of.requests_waiting.clone(),
    );
    to.register("vllm:kv_cache_usage_perc", "KV memory in use, from 0 to 1", of.kv_cache_usage.clone());
    to.register("vllm:prompt_tokens", "Prompt tokens accepted", of.prompt_tokens.clone());
    to.register("vllm:generation_tokens", "Tokens generated", of.generation_tokens.clone());
    to.register("vllm:request_success", "Choices answered in full", of.request_success.clone());
    to.register("vllm:num_preemptions", "Sequences that lost their KV pages", of.preemptions.clone());
    registry
}
