//! Sends spans of requests to a collector of OpenTelemetry, by OTLP over HTTP, where
//! `OTEL_EXPORTER_OTLP_ENDPOINT` names one.

use anyhow::{Context as _, Result};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::trace::{EndedSpan, SpanFact, SpanSink};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchSpanProcessor, SpanData, SpanEvents, SpanLinks, SpanProcessor};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Where a collector is, for all that it takes and for traces alone.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"];
/// Time for an answer of the collector.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the last spans, when the process ends.
const LAST: Duration = Duration::from_secs(2);

/// Spans in flight to a collector.
pub(crate) struct Collector {
    spans: BatchSpanProcessor,
    scope: InstrumentationScope,
    /// Number of recorded traces out of 2^64 that begin here.
    sampled: u64,
}

/// Has spans sent to the collector that the environment names, if it names one.
///
/// # Errors
/// The fault of the environment variables.
pub(crate) fn begin(metrics: &Metrics) -> Result<Option<Arc<Collector>>> {
    let collector = Collector::of_environment()?;
    if let Some(collector) = &collector {
        metrics.traces.send_to(collector.clone());
    }
    Ok(collector)
}

/// Sends the remaining spans.
pub(crate) async fn end(collector: Option<Arc<Collector>>) {
    let Some(collector) = collector else { return };
    // its thread needs this runtime to send
    let ended = tokio::task::spawn_blocking(move || collector.spans.shutdown_with_timeout(LAST)).await;
    if let Ok(Err(error)) = ended {
        tracing::warn!(%error, "the last spans did not reach the collector");
    }
}

impl Collector {
    fn of_environment() -> Result<Option<Arc<Self>>> {
        let names = |name: &&str| std::env::var(name).is_ok_and(|endpoint| !endpoint.is_empty());
        let Some(name) = ENDPOINTS.iter().rev().find(|name| names(name)) else { return Ok(None) };
        let endpoint = std::env::var(name).unwrap_or_default();
        anyhow::ensure!(
            endpoint.starts_with("http://"),
            "{name}={endpoint}: collectors are reached by http:// alone; run one beside this process for others"
        );
        let client = OnRuntime {
            runtime: tokio::runtime::Handle::current(),
            client: Arc::new(HyperClient::with_default_connector(TIMEOUT, None)),
        };
        let exporter = SpanExporter::builder().with_http().with_http_client(client).build();
        let exporter = exporter.with_context(|| format!("{name}={endpoint}"))?;
        let mut spans = BatchSpanProcessor::builder(exporter).build();
        let command = std::env::args().nth(1).unwrap_or_default();
        let service = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| format!("mixfleet-{command}"));
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        spans.set_resource(&Resource::builder().with_service_name(service).with_attribute(version).build());
        let scope = InstrumentationScope::builder("mixfleet").with_version(env!("CARGO_PKG_VERSION")).build();
        tracing::info!(endpoint, "spans of requests go to a collector");
        Ok(Some(Arc::new(Collector { spans, scope, sampled: sampled()? })))
    }
}

/// The share of traces to record, by the names of OpenTelemetry's environment.
fn sampled() -> Result<u64> {
    let sampler = std::env::var("OTEL_TRACES_SAMPLER").unwrap_or_default();
    match sampler.trim_start_matches("parentbased_") {
        "" | "always_on" => Ok(u64::MAX),
        "always_off" => Ok(0),
        "traceidratio" => {
            let text = std::env::var("OTEL_TRACES_SAMPLER_ARG").unwrap_or_else(|_| "1".into());
            let share = text.parse().ok().filter(|share: &f64| (0.0..=1.0).contains(share));
            let share =
                share.with_context(|| format!("OTEL_TRACES_SAMPLER_ARG={text}: no share from 0 to 1"))?;
            Ok(mixfleet_hal::cast::to_u64(share * 2f64.powi(64)))
        }
        _ => anyhow::bail!("OTEL_TRACES_SAMPLER={sampler}: known are always_on, always_off and traceidratio"),
    }
}

impl SpanSink for Collector {
    fn ended(&self, span: EndedSpan) {
        let EndedSpan { own, parent, is_request, name, from, until, facts, failed } = span;
        let context = SpanContext::new(
            TraceId::from_bytes(own.trace.to_be_bytes()),
            SpanId::from_bytes(own.span.to_be_bytes()),
            TraceFlags::SAMPLED,
            false,
            TraceState::NONE,
        );
        self.spans.on_end(SpanData {
            span_context: context,
            parent_span_id: parent.map_or(SpanId::INVALID, |parent| SpanId::from_bytes(parent.to_be_bytes())),
            parent_span_is_remote: is_request && parent.is_some(),
            span_kind: if is_request { SpanKind::Server } else { SpanKind::Internal },
            name: name.into(),
            start_time: system_time(from),
            end_time: system_time(until),
            attributes: facts.into_iter().map(|(name, fact)| KeyValue::new(name, value(fact))).collect(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: failed.map_or(Status::Unset, Status::error),
            instrumentation_scope: self.scope.clone(),
        });
    }

    fn samples(&self, trace: u128) -> bool {
        self.sampled == u64::MAX || u64::try_from(trace & u128::from(u64::MAX)).unwrap_or(0) < self.sampled
    }
}

fn system_time(unix: Seconds) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(unix.0).unwrap_or_default()
}

fn value(fact: SpanFact) -> Value {
    match fact {
        SpanFact::Text(text) => text.into(),
        SpanFact::Count(count) => i64::try_from(count).unwrap_or(i64::MAX).into(),
        SpanFact::Real(real) => real.into(),
    }
}

/// A client that sends from this runtime on behalf of any thread: the batch thread is outside of it.
#[derive(Debug)]
struct OnRuntime {
    runtime: tokio::runtime::Handle,
    client: Arc<HyperClient>,
}

impl HttpClient for OnRuntime {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let client = self.client.clone();
        let sent = self.runtime.spawn(async move { client.send_bytes(request).await });
        Box::pin(async { sent.await? })
    }
}
