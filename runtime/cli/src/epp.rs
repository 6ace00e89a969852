//! Implements `mixfleet epp`.

use crate::connections::{is_loopback, raise_descriptors, watch};
use crate::failure::UsageError;
use crate::numbers::{requests, seconds};
use crate::scheduling::SchedulingArgs;
use crate::serve::{self, ServeSignals, TRIAL_SHARE, run_server};
use crate::worker_engines::WorkerEngine;
use crate::{logs, otlp};
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_epp::{
    EndpointPicker, EndpointPool, OpenPool, OpenedPool, PickerListeners, PickerSettings, follow_pool,
};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::api::{Origins, Placements, observe_placements};
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv, Task};
use mixfleet_runtime::gateway::{EngineSpec, GatewayParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_scheduler::fleet::FleetConfig;
use mixfleet_sim::simulate::Choices;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;

/// Decisions kept for `/debug/placement`.
const PLACEMENTS_KEPT: usize = 10_000;

#[derive(Clone, Debug, Args)]
pub(crate) struct EppArgs {
    /// Endpoints of the pool, as llm-d's file discovery has them; reloaded on change
    #[arg(long, value_name = "FILE.yaml")]
    pool: PathBuf,
    /// Address for Envoy's external processing; :PORT for all interfaces
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9002", value_parser = address)]
    listen: String,
    /// Address for gRPC health checks
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9003", value_parser = address)]
    health: String,
    /// Address of /metrics, /live, /health and /debug/placement
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9090", value_parser = address)]
    metrics: String,
    /// Endpoints named behind the destination; 0 for ORIGINAL_DST clusters, which take one
    #[arg(long, value_name = "N", default_value_t = 2)]
    fallbacks: usize,
    /// Reject requests whose predicted TTFT is longer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    ttft_slo: Option<f64>,
    /// Reject requests whose predicted TBT is longer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    tbt_slo: Option<f64>,
    /// Maximum requests in progress [default: 4096]
    #[arg(long, value_name = "N", default_value = "4096", hide_default_value = true, value_parser = requests)]
    requests: NonZeroUsize,
    #[command(flatten)]
    scheduling: SchedulingArgs,
    /// Log as JSON lines
    #[arg(long)]
    json: bool,
}

/// A listening address; one without a host means all interfaces.
fn address(text: &str) -> Result<String, String> {
    let whole = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    match whole.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        true => Ok(whole),
        false => Err("expected HOST:PORT or :PORT".into()),
    }
}

/// Runs `mixfleet epp`.
pub(crate) fn run(args: EppArgs) -> Result<()> {
    serve::log(args.json)?;
    let limits = limits(&args)?;
    let text = mixfleet_hal::files::read_text(&args.pool);
    let text = text.with_context(|| format!("--pool: cannot read {}", args.pool.display()))?;
    let wrong = |why: String| UsageError(format!("--pool {}: {why}", args.pool.display()));
    let pool = EndpointPool::read(&text).map_err(wrong)?;
    engines(&pool).map_err(|error| wrong(format!("{error:#}")))?;
    run_server(pick(args, limits))
}

async fn pick(args: EppArgs, limits: EngineConfig) -> Result<()> {
    let mut signals = ServeSignals::new()?;
    raise_descriptors();
    let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
    let metrics = Metrics::new();
    logs::count_dropped_in(&metrics.log_lines_dropped);
    let traces = otlp::begin(&metrics)?;
    let placements = Arc::new(Placements::new(PLACEMENTS_KEPT));
    let bind = async |flag: &str, address: &str| {
        TcpListener::bind(address).await.with_context(|| format!("{flag}: cannot listen on {address}"))
    };
    let listeners = PickerListeners {
        processing: bind("--listen", &args.listen).await?,
        health: bind("--health", &args.health).await?,
    };
    let picker = EndpointPicker::new(env.clone(), PickerSettings { fallbacks: args.fallbacks });
    // ready once the process listens: engine metrics show whether an endpoint is up
    let (_ready, is_ready) = tokio::sync::watch::channel(true);
    let origins =
        Origins::new(is_loopback("--metrics", &args.metrics)?, &[], &[]).map_err(anyhow::Error::msg)?;
    let (watched, shown) = (metrics.clone(), placements.clone());
    let observe = |listener, env, origins| -> Task {
        Box::pin(observe_placements(listener, env, watched, is_ready, origins, shown))
    };
    watch("--metrics", &args.metrics, origins, observe).await?;
    tracing::info!(
        listen = %listeners.processing.local_addr()?,
        health = %listeners.health.local_addr()?,
        "picks endpoints for Envoy"
    );
    let open: OpenPool = Arc::new(move |pool| {
        let parts = GatewayParts {
            env: env.clone(),
            name: None,
            limits: limits.clone(),
            events: None,
            placements: placements.clone(),
            metrics: metrics.clone(),
            canaries: None,
        };
        let engines = engines(pool).map_err(|error| format!("{error:#}"))?;
        Ok(OpenedPool { parts, engines })
    });
    let following = follow_pool(picker.clone(), args.pool.clone(), open);
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let mut serving = Box::pin(mixfleet_epp::serve(picker, listeners, async {
        let _ = told.await;
    }));
    tokio::select! {
        () = following => unreachable!("a file is followed forever"),
        served = &mut serving => served.context("serving ended")?,
        () = signals.next() => {
            tracing::info!("ending: requests in the picker may finish; signal again to end now");
            let _ = tell.send(());
            signals.or_until_next(async { drop(serving.await) }).await;
        }
    }
    otlp::end(traces).await;
    Ok(())
}

/// The limits from the options.
fn limits(args: &EppArgs) -> Result<EngineConfig> {
    let Choices { policy, admission, seed } = args.scheduling.choices()?;
    let default = EngineConfig::default();
    let fleet = FleetConfig {
        requests_max: args.requests.get(),
        ttft_slo: args.ttft_slo.map(Seconds),
        tbt_slo: args.tbt_slo.map(Seconds),
        policy,
        admission,
        wait_usd_per_s: args.scheduling.wait_usd_per_s,
        kv_weight: args.scheduling.kv_weight,
        trial_share: args.scheduling.trial_share.unwrap_or(TRIAL_SHARE),
        seed,
        ..default.fleet
    };
    Ok(EngineConfig { fleet, ..default })
}

/// Opens the endpoints of a pool as engines.
fn engines(pool: &EndpointPool) -> Result<Vec<EngineSpec>> {
    let mut engines = Vec::with_capacity(pool.endpoints.len());
    for endpoint in &pool.endpoints {
        let parsed = endpoint.engine.parse::<WorkerEngine>().map_err(UsageError);
        let opened = parsed.map_err(anyhow::Error::from).and_then(|engine| engine.open());
        engines.extend(opened.with_context(|| format!("endpoint '{}'", endpoint.name))?);
    }
    Ok(engines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_host_is_that_of_all_interfaces() {
        assert_eq!(address(":9002").unwrap(), "0.0.0.0:9002");
        assert_eq!(address("127.0.0.1:0").unwrap(), "127.0.0.1:0");
        for wrong in ["", "9002", "host", "host:x", ":99999"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn endpoints_of_a_pool_are_opened_with_what_their_labels_say() {
        let text = "
endpoints:
  - {name: a, address: 127.0.0.1, port: '8000', labels: {mixfleet.dev/usd-per-hour: '1.5', model: m}}
  - {name: b, address: 127.0.0.1, port: '8001', labels: {mixfleet.dev/engine: llamacpp}}
";
        let specs = engines(&EndpointPool::read(text).unwrap()).unwrap();
        let names: Vec<&str> = specs.iter().map(|spec| spec.engine.name()).collect();
        assert_eq!(names, ["vllm:127.0.0.1:8000", "llamacpp:127.0.0.1:8001"]);
        assert_eq!((specs[0].price.map(|price| price.0), specs[0].model.as_deref()), (Some(1.5), Some("m")));
        let wrong = "endpoints: [{name: a, address: 127.0.0.1, port: 1, labels: {mixfleet.dev/part: H1000}}]";
        let error = format!("{:#}", engines(&EndpointPool::read(wrong).unwrap()).err().unwrap());
        assert!(error.contains("endpoint 'a'") && error.contains("shape"), "{error}");
    }
}
