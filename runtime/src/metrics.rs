//! Prometheus metrics: `mixfleet_<what>_<unit>`, in seconds and bytes, counters ending in `_total`.
//!
//! The names of vLLM that boards expect stand beside them (`metrics/vllm.rs`).
//!
//! The API records what a client observes, the engine what happens inside. Both hold a [`Metrics`], whose
//! fields are handles on the same numbers. Callers read the clock.

mod engines;
mod exchange;
mod meter;
mod states;
mod vllm;

pub use engines::{
    CanaryLabels, CanaryQuarantineLabels, EngineFaultLabels, HandOffFailureLabels, HandOffLabels, PickLabels,
    ServedLabels,
};
pub use exchange::ExchangeLabels;
pub(crate) use meter::{Noted, RequestPhases};
pub(crate) use states::{NOT_AS_DECLARED, StateHolder};
pub use states::{ServingState, StateLabels};

use crate::request::FinishReason;
use crate::trace::Traces;
use meter::Meter;
use mixfleet_hal::cast::to_i64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{BatchLoad, RequestId};
use mixfleet_scheduler::fleet::{Action, Fleet, Instance, InstanceId, Role};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};
use states::StateRecords;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Content type of [`Metrics::encode`], which Prometheus reads since 2.5.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Labels of [`Metrics::http_responses`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct HttpLabels {
    /// The route's pattern; `other` for addresses that do not exist.
    pub route: String,
    /// The status code.
    pub status: u16,
}

/// Labels of [`Metrics::http_refused`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RefusedLabels {
    /// The error's code: `host_not_allowed`, `origin_not_allowed` or `connections_exhausted`.
    pub code: &'static str,
}

/// Labels of [`Metrics::requests`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// `completions` or `chat_completions`.
    pub endpoint: &'static str,
    /// How the request ended.
    pub outcome: RequestOutcome,
}

/// How a request that passed validation ended.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum RequestOutcome {
    /// `success`: answered in full.
    Success,
    /// `cancelled`: the client left first.
    Cancelled,
    /// `rejected`: turned away by the engine before any work.
    Rejected,
    /// `failed`: the engine could not complete it.
    Failed,
}

impl RequestOutcome {
    /// The label's value.
    pub fn name(self) -> &'static str {
        match self {
            RequestOutcome::Success => "success",
            RequestOutcome::Cancelled => "cancelled",
            RequestOutcome::Rejected => "rejected",
            RequestOutcome::Failed => "failed",
        }
    }
}

impl EncodeLabelValue for RequestOutcome {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        EncodeLabelValue::encode(&self.name(), encoder)
    }
}

/// Label of per-device metrics.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DeviceLabels {
    /// The device's id, as in `mixfleet devices`.
    pub device: String,
}

/// Labels of an instance's role.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RoleLabels {
    /// The device's id.
    pub device: String,
    /// `prefill`, `decode`, `auto` or `kv`.
    pub role: &'static str,
}

/// Labels of per-tier metrics of a device.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TierLabels {
    /// The device's id.
    pub device: String,
    /// `dram` or `ssd`.
    pub tier: &'static str,
}

/// Labels of the metrics of predictions for a device.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PredictionLabels {
    /// The device's id.
    pub device: String,
    /// `prefill`, `step` or `transfer`.
    pub kind: &'static str,
    /// `small`, `medium` or `large`: up to 128 and 1,024 prompt tokens of a step, 4 and 32 sequences, or
    /// more; `any` of transfers.
    pub size: &'static str,
}

/// Labels of [`Metrics::prediction_error`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PredictionErrorLabels {
    /// The device's id.
    pub device: String,
    /// `ttft` or `tbt`.
    pub kind: &'static str,
    /// `before` or `after` correction.
    pub correction: &'static str,
}

/// Label of metrics by class of requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ClassLabels {
    /// The service tier: `default`, `flex` or `priority`.
    pub class: &'static str,
}

/// Label of [`Metrics::request_success`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SuccessLabels {
    /// `stop` or `length`.
    pub finished_reason: &'static str,
}

/// A gauge with a fractional value.
pub type FractionGauge = Gauge<f64, AtomicU64>;

/// A counter of dollars.
pub type UsdCounter = Counter<f64, AtomicU64>;

/// A counter of seconds.
pub type TimeCounter = Counter<f64, AtomicU64>;

/// Handles on all metrics of this process; clones share the numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// The second names, once the model is known.
    vllm: Arc<OnceLock<Registry>>,
    meter: Arc<Mutex<Meter>>,
    states: Arc<Mutex<StateRecords>>,
    /// Where spans of the same requests go.
    pub traces: Traces,
    /// `mixfleet_http_responses_total{route,status}`: responses begun, by the API.
    pub http_responses: Family<HttpLabels, Counter>,
    /// `mixfleet_http_refused_total{code}`: requests refused by the server for their origin or connection,
    /// before routing.
    pub http_refused: Family<RefusedLabels, Counter>,
    /// `mixfleet_connections_evicted_total`: connections closed to make room for others, by the server.
    pub connections_evicted: Counter,
    /// `mixfleet_log_lines_dropped_total`: log lines that standard error did not take, by the binary.
    pub log_lines_dropped: Counter,
    /// `mixfleet_requests_total{endpoint,outcome}`: generation requests ended, by the API.
    pub requests: Family<RequestLabels, Counter>,
    /// `mixfleet_time_to_first_token_seconds`: request received to first token out of the engine, per
    /// choice, by the API.
    pub time_to_first_token_s: Histogram,
    /// `mixfleet_inter_token_latency_seconds` (TBT): time between two tokens of a choice, by the API.
    pub inter_token_latency_s: Histogram,
    /// `mixfleet_e2e_request_latency_seconds`: request received to answer complete, successes only, by
    /// the API.
    pub e2e_request_latency_s: Histogram,
    /// `mixfleet_prompt_tokens_total{class}`: prompt tokens of accepted requests, once per prompt, by the
    /// API.
    pub prompt_tokens: Family<ClassLabels, Counter>,
    /// `mixfleet_generation_tokens_total{class}`: tokens generated, by the API.
    pub generation_tokens: Family<ClassLabels, Counter>,
    /// `vllm:request_success_total{finished_reason}`: choices answered in full, by the API.
    pub request_success: Family<SuccessLabels, Counter>,
    /// `mixfleet_cached_tokens_total`: prompt tokens whose KV was reused, over engine requests that
    /// finished, by the API.
    pub cached_tokens: Counter,
    /// `mixfleet_request_prompt_tokens`: prompt length, by the API.
    pub request_prompt_tokens: Histogram,
    /// `mixfleet_request_generation_tokens`: answer length, by the API.
    pub request_generation_tokens: Histogram,
    /// `mixfleet_request_queue_time_seconds`: engine request accepted to first scheduled, by the engine.
    pub request_queue_time_s: Histogram,
    /// `mixfleet_request_prefill_time_seconds`: first scheduled (behind the gateway: placed) to first token,
    /// where that was seen, per engine request.
    pub request_prefill_time_s: Histogram,
    /// `mixfleet_request_decode_time_seconds`: first token to the end, where both were seen, per engine
    /// request.
    pub request_decode_time_s: Histogram,
    /// `mixfleet_predicted_time_to_first_token_seconds`: prediction at the placement of each request with a
    /// first token, from placement on.
    pub predicted_ttft_s: Histogram,
    /// `mixfleet_predicted_inter_token_latency_seconds`: the same of the mean time of a further token.
    pub predicted_tbt_s: Histogram,
    /// `mixfleet_prompt_usd_total{class}`: rent of devices for the prompts of requests that ended; a device's
    /// rent is shared equally by the requests in progress there.
    pub prompt_usd: Family<ClassLabels, UsdCounter>,
    /// `mixfleet_generation_usd_total{class}`: the same for their answers, from the first token on.
    pub generation_usd: Family<ClassLabels, UsdCounter>,
    /// `mixfleet_request_usd{class}`: both, per engine request that was answered in full.
    pub request_usd: Family<ClassLabels, Histogram, fn() -> Histogram>,
    /// `mixfleet_device_busy_usd_total{device}`: rent of a device while it had requests from here.
    pub device_busy_usd: Family<DeviceLabels, UsdCounter>,
    /// `mixfleet_device_idle_usd_total{device}`: its rent while it was up and had none.
    pub device_idle_usd: Family<DeviceLabels, UsdCounter>,
    /// `mixfleet_device_usd_per_hour{device}`: its rent while it is up.
    pub device_usd_per_hour: Family<DeviceLabels, FractionGauge>,
    /// `mixfleet_instances`: instances that accept requests, by the engine.
    pub instances: Gauge,
    /// `mixfleet_serves`: 1 while some pair of instances can prefill and decode, else 0, by the engine.
    pub serves: Gauge,
    /// `mixfleet_instance_up{device}`: 1 while an instance answers, 0 once it is lost, by the engine.
    pub instance_up: Family<DeviceLabels, Gauge>,
    /// `mixfleet_engine_up{device}`: 1 while an external engine answers, else 0, by the gateway.
    pub engine_up: Family<DeviceLabels, Gauge>,
    /// `mixfleet_device_state{device,state}`: 1 for the state of an instance or external engine, 0 for the
    /// others.
    pub device_state: Family<StateLabels, Gauge>,
    /// `mixfleet_instances_silent_total`: instances lost because they had work and reported no progress, by
    /// the engine.
    pub instances_silent: Counter,
    /// `mixfleet_worker_panics_total`: instances lost to a panic of their worker, by the engine.
    pub worker_panics: Counter,
    /// `mixfleet_engine_faults_total{device,kind}`: requests that an external engine did not answer, by kind
    /// of fault, by the gateway.
    pub engine_faults: Family<EngineFaultLabels, Counter>,
    /// `mixfleet_picks_total{outcome}`: requests of proxies that were placed, or why not, by the picker.
    pub picks: Family<PickLabels, Counter>,
    /// `mixfleet_pick_seconds`: a proxied request complete to its destination known, by the picker.
    pub pick_s: Histogram,
    /// `mixfleet_pick_prompt_tokens_total`: assumed prompt tokens of proxied requests, refused ones too, by
    /// the picker.
    pub pick_prompt_tokens: Counter,
    /// `mixfleet_picks_served_total{device,choice}`: answers of proxied requests by who really gave them, by
    /// the picker.
    pub picks_served: Family<ServedLabels, Counter>,
    /// `mixfleet_requests_quarantined_total`: requests that were refused because engines or instances had
    /// ended with them.
    pub requests_quarantined: Counter,
    /// `mixfleet_requests_dropped_total`: requests that were given up after their prompt was computed,
    /// because their decode instance was too busy (`--drop-late`).
    pub requests_dropped: Counter,
    /// `mixfleet_prefill_dropped_seconds_total`: time from the start of their prompts to its end.
    pub prefill_dropped_s: TimeCounter,
    /// `mixfleet_engine_resting{device}`: 1 while an external engine is suspended because it failed several
    /// requests in a row, by the gateway.
    pub engine_resting: Family<DeviceLabels, Gauge>,
    /// `mixfleet_engine_rests_total{device}`: number of such suspensions, by the gateway.
    pub engine_rests: Family<DeviceLabels, Counter>,
    /// `mixfleet_hand_offs_total{from,to}`: answers of external engines that began with a prompt's KV from
    /// another one, by the gateway.
    pub hand_offs: Family<HandOffLabels, Counter>,
    /// `mixfleet_hand_off_failures_total{cause}`: prompts' KV that was not handed over, or not taken over, so
    /// that the prompt was computed again, by the gateway.
    pub hand_off_failures: Family<HandOffFailureLabels, Counter>,
    /// `mixfleet_canaries_total{from,to,result}`: copies of requests that were compared, divided and by one
    /// engine alone, by the gateway.
    pub canaries: Family<CanaryLabels, Counter>,
    /// `mixfleet_canary_shares{from,to}`: 1 while these two engines may share requests, else 0, by the
    /// gateway.
    pub canary_shares: Family<HandOffLabels, Gauge>,
    /// `mixfleet_canary_drift_nats{from,to}`: median distance of their answers without a transfer, by the
    /// gateway.
    pub canary_drift: Family<HandOffLabels, FractionGauge>,
    /// `mixfleet_canary_quarantines_total{from,to,cause}`: how often two engines were quarantined, by the
    /// gateway.
    pub canary_quarantines: Family<CanaryQuarantineLabels, Counter>,
    /// `mixfleet_canary_tokens_total{device}`: tokens of canaries' prompts and answers, by the gateway.
    pub canary_tokens: Family<DeviceLabels, Counter>,
    /// `mixfleet_canary_time_seconds_total{device}`: time that canaries were in progress there, by the
    /// gateway.
    pub canary_time_s: Family<DeviceLabels, TimeCounter>,
    /// `mixfleet_requests_running{device}`: sequences in the running batch, by the engine.
    pub requests_running: Family<DeviceLabels, Gauge>,
    /// `mixfleet_requests_waiting{device}`: sequences accepted but not running, by the engine.
    pub requests_waiting: Family<DeviceLabels, Gauge>,
    /// `mixfleet_kv_cache_usage_ratios{device}`: KV pages referenced / all pages, by the engine.
    pub kv_cache_usage: Family<DeviceLabels, FractionGauge>,
    /// `mixfleet_instance_role{device,role}`: 1 for the role of a device that is up, 0 for its others.
    pub instance_role: Family<RoleLabels, Gauge>,
    /// `mixfleet_role_changes_total{device,role}`: changes to this role that this process decided
    /// (`--flexible`).
    pub role_changes: Family<RoleLabels, Counter>,
    /// `mixfleet_prefix_copies_total`: copies of prefixes that were begun ahead of demand.
    pub prefix_copies: Counter,
    /// `mixfleet_prefix_copy_tokens_total`: tokens of these prefixes.
    pub prefix_copy_tokens: Counter,
    /// `mixfleet_kv_capacity_tokens{device}`: tokens that fit into the KV memory of a device that is up, by
    /// the engine.
    pub kv_capacity_tokens: Family<DeviceLabels, Gauge>,
    /// `mixfleet_kv_block_tokens{device}`: tokens of a KV block there, by the engine.
    pub kv_block_tokens: Family<DeviceLabels, Gauge>,
    /// `mixfleet_preemptions_total{device}`: sequences that lost their KV pages, by the engine.
    pub preemptions: Family<DeviceLabels, Counter>,
    /// `mixfleet_device_tokens_total{device}`: tokens of prompts and answers that the model computed on the
    /// device, by the engine.
    pub device_tokens: Family<DeviceLabels, Counter>,
    /// `mixfleet_device_steps_total{device}`: forward passes on the device, by the engine.
    pub device_steps: Family<DeviceLabels, Counter>,
    /// `mixfleet_prediction_correction_ratios{device,kind,size}`: factor applied to predictions, learned from
    /// measured times, by the engine; 1 while predictions are within 5 %.
    pub prediction_correction: Family<PredictionLabels, FractionGauge>,
    /// `mixfleet_prediction_error_ratios{device,kind,correction}`: time of a request over its prediction at
    /// placement, by the engine; 1 is right.
    pub prediction_error: Family<PredictionErrorLabels, Histogram, fn() -> Histogram>,
    /// `mixfleet_device_degraded{device}`: 1 while its steps take more than four times what the declared part
    /// takes, or less than a quarter.
    pub device_degraded: Family<DeviceLabels, Gauge>,
    /// `mixfleet_device_energy_joules{device}`: energy counter, where the device has one, read by the engine
    /// at most once a second. Its growth divided by that of `device_tokens` is the energy per token.
    pub device_energy_j: Family<DeviceLabels, FractionGauge>,
    /// `mixfleet_device_power_watts{device}`: power draw, where the device reports it, read at most once a
    /// second.
    pub device_power_w: Family<DeviceLabels, FractionGauge>,
    /// `mixfleet_device_temperature_celsius{device}`: temperature, where the device reports it, read at most
    /// once a second.
    pub device_temperature_c: Family<DeviceLabels, FractionGauge>,
    /// `mixfleet_kv_transfer_seconds`: first block sent to last block checked, per request, by the engine.
    pub kv_transfer_s: Histogram,
    /// `mixfleet_kv_exposed_seconds`: time from the first token drawn on the prefill instance to all of its
    /// KV on the decode instance, per split request, by the engine. This is the part of the transfer that
    /// computation did not hide.
    pub kv_exposed_s: Histogram,
    /// `mixfleet_kv_transfer_bytes_total`: KV payload that arrived and passed its check, by the engine.
    pub kv_transfer_bytes: Counter,
    /// `mixfleet_kv_sent_bytes_total`: KV payload written to other instances' memory, by the engine.
    pub kv_sent_bytes: Counter,
    /// `mixfleet_kv_pulled_tokens_total`: prompt tokens whose KV was pulled from another instance, by the
    /// engine.
    pub kv_pulled_tokens: Counter,
    /// `mixfleet_kv_transfer_retries_total`: blocks sent again after a failed check, by the engine.
    pub kv_transfer_retries: Counter,
    /// `mixfleet_commands_refused_total`: commands that a worker process refused because the router or peer
    /// had no right to give them.
    pub commands_refused: Counter,
    /// `mixfleet_kv_transfer_recomputes_total`: requests whose KV was recomputed after retries failed, by
    /// the engine.
    pub kv_transfer_recomputes: Counter,
    /// `mixfleet_kv_tier_hits_total{device,tier}`: blocks found below the device and loaded, by the engine.
    pub kv_tier_hits: Family<TierLabels, Counter>,
    /// `mixfleet_kv_tier_blocks{device,tier}`: blocks held in the tier, by the engine.
    pub kv_tier_blocks: Family<TierLabels, Gauge>,
    /// `mixfleet_kv_tier_out{device,tier}`: 1 while a disk does not answer or cannot be opened and its blocks
    /// are not used, by the engine.
    pub kv_tier_out: Family<TierLabels, Gauge>,
    /// `mixfleet_kv_tier_outages_total{device,tier}`: number of such outages, by the engine.
    pub kv_tier_outages: Family<TierLabels, Counter>,
    /// `mixfleet_kv_exchange_blocks_total{direction,outcome}`: blocks from and for external engines.
    pub kv_exchange_blocks: Family<ExchangeLabels, Counter>,
    /// `mixfleet_kv_exchange_bytes_total{direction,outcome}`: the same in bytes.
    pub kv_exchange_bytes: Family<ExchangeLabels, Counter>,
    /// `mixfleet_kv_tier_bad_total{device}`: blocks that could not be read or did not match their checksum,
    /// and were dropped and recomputed, by the engine.
    pub kv_tier_bad: Family<DeviceLabels, Counter>,
}

/// Histogram bounds from 1 ms to 2 min, finer where SLOs lie.
const LATENCY_S: [f64; 22] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5,
    10.0, 30.0, 60.0, 120.0,
];
/// Histogram bounds for one token, from 0.1 ms (tiny models) to 2.5 s (a loaded CPU).
const TOKEN_S: [f64; 15] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5];
/// Histogram bounds for the tokens of a prompt or an answer.
const LENGTH_TOKENS: [f64; 18] = [
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
    32768.0, 65536.0, 131072.0,
];

/// Histogram bounds for measured over predicted time.
const PREDICTION_RATIOS: [f64; 15] =
    [0.06, 0.125, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 64.0];

/// Histogram bounds for the seconds of a pick.
const PICK_S: [f64; 13] = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.3, 3.0];
/// Histogram bounds for the dollars of a request.
const REQUEST_USD: [f64; 16] =
    [1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0];

impl Metrics {
    /// Registers all metrics under the prefix `mixfleet`.
    #[expect(clippy::too_many_lines, reason = "one list of metrics")]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("mixfleet");
        let to = &mut registry;
        Metrics {
            http_responses: plain(to, "http_responses", "Responses begun"),
            http_refused: plain(to, "http_refused", "Requests refused by access rules"),
            connections_evicted: plain(to, "connections_evicted", "Connections closed to make room"),
            log_lines_dropped: plain(
                to,
                "log_lines_dropped",
                "Log lines dropped because standard error was blocked",
            ),
            requests: plain(to, "requests", "Generation requests ended"),
            time_to_first_token_s: seconds(to, "time_to_first_token", "Received to first token", &LATENCY_S),
            inter_token_latency_s: seconds(to, "inter_token_latency", "Between two tokens", &TOKEN_S),
            e2e_request_latency_s: seconds(to, "e2e_request_latency", "Received to complete", &LATENCY_S),
            prompt_tokens: plain(to, "prompt_tokens", "Prompt tokens accepted"),
            generation_tokens: plain(to, "generation_tokens", "Tokens generated"),
            cached_tokens: plain(to, "cached_tokens", "Prompt tokens whose KV was reused"),
            request_prompt_tokens: lengths(to, "request_prompt_tokens", "Prompt length in tokens"),
            request_generation_tokens: lengths(to, "request_generation_tokens", "Answer length in tokens"),
            request_queue_time_s: seconds(to, "request_queue_time", "Accepted to scheduled", &LATENCY_S),
            request_success: Family::default(),
            request_prefill_time_s: seconds(
                to,
                "request_prefill_time",
                "Scheduled to first token",
                &LATENCY_S,
            ),
            request_decode_time_s: seconds(to, "request_decode_time", "First token to the end", &LATENCY_S),
            predicted_ttft_s: seconds(
                to,
                "predicted_time_to_first_token",
                "Predicted time from placement to first token",
                &LATENCY_S,
            ),
            predicted_tbt_s: seconds(
                to,
                "predicted_inter_token_latency",
                "Predicted mean time between two tokens",
                &TOKEN_S,
            ),
            prompt_usd: plain(to, "prompt_usd", "Rent of devices for prompts"),
            generation_usd: plain(to, "generation_usd", "Rent of devices for answers"),
            request_usd: dollars(to, "request_usd", "Rent of devices for a request"),
            device_busy_usd: plain(to, "device_busy_usd", "Rent of a device while it had requests"),
            device_idle_usd: plain(to, "device_idle_usd", "Rent of a device while it had none"),
            device_usd_per_hour: plain(to, "device_usd_per_hour", "Rent of a device that is up"),
            instances: plain(to, "instances", "Instances that take requests"),
            serves: plain(to, "serves", "Whether some pair of instances can prefill and decode"),
            instance_up: plain(to, "instance_up", "Whether an instance answers"),
            engine_up: plain(to, "engine_up", "Whether an external engine answers"),
            device_state: plain(to, "device_state", "Whether an instance or engine is in this state"),
            instances_silent: plain(to, "instances_silent", "Instances lost because they were silent"),
            worker_panics: plain(to, "worker_panics", "Instances lost to a mistake in this program"),
            engine_faults: plain(to, "engine_faults", "Requests that an engine did not answer"),
            requests_dropped: plain(to, "requests_dropped", "Requests given up after their prompt"),
            prefill_dropped_s: with_unit(
                to,
                "prefill_dropped",
                Unit::Seconds,
                "Time that the prompts of these requests took",
            ),
            picks: plain(to, "picks", "Requests of proxies that were placed, or why not"),
            pick_s: seconds(to, "pick", "Request of a proxy complete to destination known", &PICK_S),
            pick_prompt_tokens: plain(
                to,
                "pick_prompt_tokens",
                "Assumed prompt tokens of requests of proxies",
            ),
            picks_served: plain(to, "picks_served", "Answers by who really gave them"),
            requests_quarantined: plain(
                to,
                "requests_quarantined",
                "Requests refused: engines ended with them",
            ),
            engine_resting: plain(to, "engine_resting", "Whether an engine is suspended for failures"),
            engine_rests: plain(to, "engine_rests", "Suspensions of an engine for failures"),
            hand_offs: plain(to, "hand_offs", "Answers that began with another engine's KV"),
            hand_off_failures: plain(to, "hand_off_failures", "Failed hand-offs of KV between engines"),
            canaries: plain(to, "canaries", "Copies of requests that were compared"),
            canary_shares: plain(to, "canary_shares", "Whether two engines may share requests"),
            canary_drift: plain(to, "canary_drift_nats", "Median distance of answers without a transfer"),
            canary_quarantines: plain(to, "canary_quarantines", "Quarantines of two engines"),
            canary_tokens: plain(to, "canary_tokens", "Tokens of prompts and answers of canaries"),
            canary_time_s: with_unit(to, "canary_time", Unit::Seconds, "Time that canaries were in progress"),
            requests_running: plain(to, "requests_running", "Sequences in the running batch"),
            requests_waiting: plain(to, "requests_waiting", "Sequences accepted and not running"),
            kv_cache_usage: with_unit(to, "kv_cache_usage", Unit::Ratios, "KV pages referenced over all"),
            instance_role: plain(to, "instance_role", "Whether a device has this role"),
            role_changes: plain(to, "role_changes", "Changes of a device to this role"),
            prefix_copies: plain(to, "prefix_copies", "Copies of prefixes ahead of demand"),
            prefix_copy_tokens: plain(to, "prefix_copy_tokens", "Tokens of copied prefixes"),
            kv_capacity_tokens: plain(to, "kv_capacity_tokens", "Tokens that fit into KV memory"),
            kv_block_tokens: plain(to, "kv_block_tokens", "Tokens of a KV block"),
            preemptions: plain(to, "preemptions", "Sequences that lost their KV pages"),
            device_tokens: plain(to, "device_tokens", "Tokens that went through the model"),
            device_steps: plain(to, "device_steps", "Forward passes"),
            prediction_correction: with_unit(
                to,
                "prediction_correction",
                Unit::Ratios,
                "Factors applied to predictions of a device",
            ),
            prediction_error: ratios(to, "prediction_error", "Times of requests over their predictions"),
            device_degraded: plain(to, "device_degraded", "Whether a device is not the declared part"),
            device_energy_j: with_unit(to, "device_energy", Unit::Joules, "Energy counter of the device"),
            device_power_w: with_unit(to, "device_power", Unit::Other("watts".into()), "Power draw"),
            device_temperature_c: with_unit(to, "device_temperature", Unit::Celsius, "Temperature"),
            kv_transfer_s: seconds(to, "kv_transfer", "First KV block sent to last checked", &LATENCY_S),
            kv_exposed_s: seconds(to, "kv_exposed", "Prompt computed to its KV where it decodes", &LATENCY_S),
            kv_transfer_bytes: with_unit(to, "kv_transfer", Unit::Bytes, "KV payload arrived and checked"),
            kv_sent_bytes: with_unit(to, "kv_sent", Unit::Bytes, "KV payload written to other instances"),
            kv_pulled_tokens: plain(to, "kv_pulled_tokens", "Prompt tokens pulled from another instance"),
            kv_transfer_retries: plain(to, "kv_transfer_retries", "KV blocks sent again"),
            commands_refused: plain(to, "commands_refused", "Unauthorised commands of routers and peers"),
            kv_transfer_recomputes: plain(to, "kv_transfer_recomputes", "Requests recomputed after transfer"),
            kv_tier_hits: plain(to, "kv_tier_hits", "KV blocks loaded from below the device"),
            kv_tier_blocks: plain(to, "kv_tier_blocks", "KV blocks held below the device"),
            kv_tier_out: plain(to, "kv_tier_out", "Whether a disk below the device is out"),
            kv_tier_outages: plain(to, "kv_tier_outages", "Times that a disk below the device went out"),
            kv_exchange_blocks: plain(to, "kv_exchange_blocks", "KV blocks from and for external engines"),
            kv_exchange_bytes: plain(to, "kv_exchange_bytes", "The same in bytes"),
            kv_tier_bad: plain(to, "kv_tier_bad", "KV blocks found damaged below the device"),
            registry: Arc::new(registry),
            vllm: Arc::default(),
            meter: Arc::default(),
            states: Arc::default(),
            traces: Traces::default(),
        }
    }

    /// All metrics as OpenMetrics text.
    pub fn encode(&self) -> String {
        use prometheus_client::encoding::text::{encode_eof, encode_registry};
        let mut text = String::new();
        let registries = std::iter::once(&*self.registry).chain(self.vllm.get());
        registries
            .into_iter()
            .try_for_each(|registry| encode_registry(&mut text, registry))
            .and_then(|()| encode_eof(&mut text))
            .expect("a string takes all text");
        text
    }

    /// Gives the metrics that boards for vLLM expect those names too, for this model; the first call counts.
    pub fn name_model(&self, model: &str) {
        self.vllm.get_or_init(|| vllm::registry(self, model));
        // events that have not happened yet are 0 and not absent
        for class in 0..3 {
            let labels = ClassLabels::of(class);
            drop(self.prompt_tokens.get_or_create(&labels));
            drop(self.generation_tokens.get_or_create(&labels));
        }
        for finished_reason in ["stop", "length"] {
            drop(self.request_success.get_or_create(&SuccessLabels { finished_reason }));
        }
    }

    /// Distributes the rent of devices until now, so that idle rent is counted too.
    pub fn settle(&self, now: Seconds) {
        self.meter().settle(now, self);
        self.prune_states(now);
    }

    /// Processes an event of the fleet machine, and its actions.
    pub(crate) fn note(&self, now: Seconds, noted: Noted, actions: &[Action]) {
        self.meter().note(now, noted, actions, self);
    }

    /// Work on a request begins.
    pub(crate) fn request_began(&self, request: RequestId, now: Seconds) {
        self.meter().began(request, now);
    }

    /// The time of a request's first token is only assumed.
    pub(crate) fn guess_first_token(&self, request: RequestId) {
        self.meter().guess(request);
    }

    /// Dollars that a request has cost since it was last placed.
    pub(crate) fn usd(&self, request: RequestId, now: Seconds) -> Option<f64> {
        self.meter().usd(request, now, self)
    }

    /// The phases of a request that is complete now, if its first token was seen.
    pub(crate) fn phases(&self, request: RequestId, now: Seconds) -> Option<RequestPhases> {
        self.meter().phases(request, now)
    }

    /// Counts choices that were answered in full.
    pub(crate) fn succeeded(&self, reason: FinishReason, choices: u32) {
        let finished_reason = match reason {
            FinishReason::Length => "length",
            FinishReason::Stop | FinishReason::ToolCalls => "stop",
        };
        self.request_success.get_or_create(&SuccessLabels { finished_reason }).inc_by(choices.into());
    }

    fn meter(&self) -> MutexGuard<'_, Meter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Metrics {
    /// Records the load of a device.
    pub(crate) fn load(&self, device: &str, load: &BatchLoad) {
        let labels = DeviceLabels { device: device.into() };
        self.requests_running.get_or_create(&labels).set(to_i64(load.running));
        self.requests_waiting.get_or_create(&labels).set(to_i64(load.waiting));
        let blocks = load.blocks;
        let total = (blocks.used + blocks.cached + blocks.free).max(1);
        self.kv_cache_usage.get_or_create(&labels).set(blocks.used as f64 / total as f64);
    }
}

impl Metrics {
    /// Records the corrections of the predictions for an instance of `fleet`, and logs whether it has become
    /// another part than the declared one, or is as declared again. True if that has changed.
    pub(crate) fn learned(&self, device: &str, fleet: &Fleet, instance: InstanceId) -> bool {
        let (Some(corrections), Some(is_as_declared)) =
            (fleet.learned(instance), fleet.is_as_declared(instance))
        else {
            return false;
        };
        let sizes = ["small", "medium", "large"].into_iter();
        let prefill = sizes.clone().zip(corrections.prefill).map(|(size, factor)| ("prefill", size, factor));
        let step = sizes.zip(corrections.step).map(|(size, factor)| ("step", size, factor));
        for (kind, size, factor) in prefill.chain(step).chain([("transfer", "any", corrections.transfer)]) {
            let labels = PredictionLabels { device: device.into(), kind, size };
            self.prediction_correction.get_or_create(&labels).set(factor);
        }
        let labels = DeviceLabels { device: device.into() };
        let was_degraded = self.device_degraded.get_or_create(&labels).set(i64::from(!is_as_declared)) > 0;
        let (prefill, step) = (corrections.prefill, corrections.step);
        match (was_degraded, is_as_declared) {
            (false, false) => {
                let what = "degraded: not the declared part, whose times are multiplied by these factors";
                tracing::warn!(device, ?prefill, ?step, "{what}");
            }
            (true, true) => tracing::info!(device, ?prefill, ?step, "it is as declared again"),
            _ => {}
        }
        was_degraded == is_as_declared
    }

    /// Whether a device is known not to be the declared part.
    pub(crate) fn is_degraded(&self, device: &str) -> bool {
        self.device_degraded.get_or_create(&DeviceLabels { device: device.into() }).get() > 0
    }

    /// Records a request's times, and their predictions before and after correction.
    pub(crate) fn predicted(&self, device: &str, kind: &'static str, measured_s: f64, predicted_s: [f64; 2]) {
        for (correction, predicted_s) in ["before", "after"].into_iter().zip(predicted_s) {
            let labels = PredictionErrorLabels { device: device.into(), kind, correction };
            if predicted_s > 0.0 {
                self.prediction_error.get_or_create(&labels).observe(measured_s / predicted_s);
            }
        }
    }
}

impl Metrics {
    /// Records the KV memory of an instance that has come.
    pub(crate) fn loaded(&self, instance: &Instance) {
        let labels = DeviceLabels { device: instance.device.to_string() };
        self.kv_capacity_tokens.get_or_create(&labels).set(to_i64(instance.kv_capacity_tokens));
        self.kv_block_tokens.get_or_create(&labels).set(to_i64(instance.kv_block_tokens));
        self.has_role(&labels.device, Some(instance.role));
    }

    /// Records a device's role; none if it is not up.
    fn has_role(&self, device: &str, role: Option<Role>) {
        for other in Role::ALL {
            let labels = RoleLabels { device: device.into(), role: other.name() };
            self.instance_role.get_or_create(&labels).set((role == Some(other)).into());
        }
    }

    /// Records a change of role that this process decided.
    pub(crate) fn role_changed(&self, device: &str, role: Role) {
        let labels = RoleLabels { device: device.into(), role: role.name() };
        self.role_changes.get_or_create(&labels).inc();
    }

    /// Records that nothing runs on a device, because it cannot be reached.
    pub(crate) fn unload(&self, device: &str) {
        let labels = DeviceLabels { device: device.into() };
        self.requests_running.get_or_create(&labels).set(0);
        self.requests_waiting.get_or_create(&labels).set(0);
        self.kv_cache_usage.get_or_create(&labels).set(0.0);
        self.kv_capacity_tokens.get_or_create(&labels).set(0);
        self.device_degraded.get_or_create(&labels).set(0);
        self.has_role(device, None);
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn plain<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

fn with_unit<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, unit: Unit, help: &str) -> M {
    let metric = M::default();
    registry.register_with_unit(name, help, unit, metric.clone());
    metric
}

fn seconds(registry: &mut Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    let metric = Histogram::new(buckets.iter().copied());
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

fn dollars(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> Family<ClassLabels, Histogram, fn() -> Histogram> {
    let metric: Family<_, _, fn() -> Histogram> =
        Family::new_with_constructor(|| Histogram::new(REQUEST_USD));
    registry.register(name, help, metric.clone());
    metric
}

fn ratios(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> Family<PredictionErrorLabels, Histogram, fn() -> Histogram> {
    let metric: Family<_, _, fn() -> Histogram> =
        Family::new_with_constructor(|| Histogram::new(PREDICTION_RATIOS));
    registry.register_with_unit(name, help, Unit::Ratios, metric.clone());
    metric
}

fn lengths(registry: &mut Registry, name: &str, help: &str) -> Histogram {
    let metric = Histogram::new(LENGTH_TOKENS);
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_prefix_unit_and_total() {
        let metrics = Metrics::new();
        metrics.time_to_first_token_s.observe(0.2);
        metrics.kv_transfer_bytes.inc_by(7);
        metrics.kv_cache_usage.get_or_create(&DeviceLabels { device: "cpu@0".into() }).set(0.25);
        metrics
            .requests
            .get_or_create(&RequestLabels { endpoint: "completions", outcome: RequestOutcome::Success })
            .inc();
        let text = metrics.encode();
        for line in [
            "mixfleet_time_to_first_token_seconds_bucket{le=\"0.25\"} 1",
            "mixfleet_time_to_first_token_seconds_count 1",
            "mixfleet_kv_transfer_bytes_total 7",
            "mixfleet_kv_cache_usage_ratios{device=\"cpu@0\"} 0.25",
            "mixfleet_requests_total{endpoint=\"completions\",outcome=\"success\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
    }
}
