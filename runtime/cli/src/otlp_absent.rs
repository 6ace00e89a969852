//! What stands in for OpenTelemetry in a build without it.

use anyhow::Result;
use mixfleet_runtime::metrics::Metrics;

/// Says that nothing is sent to the collector that the environment names.
pub(crate) fn begin(_: &Metrics) -> Result<Option<std::convert::Infallible>> {
    if std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some() {
        tracing::warn!(
            "OTEL_EXPORTER_OTLP_ENDPOINT: this build sends no traces: build with the feature otlp"
        );
    }
    Ok(None)
}

pub(crate) async fn end(_: Option<std::convert::Infallible>) {}
