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
    ClusterAccess, EndpointPicker, EndpointPool, FleetScaler, LeaseTimes, OpenPool, OpenedPool, PickerLease,
    PickerListeners, PickerSettings, PoolName, follow_inference_pool, follow_pool, hold_lease,
};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::api::{Origins, Placements, observe_placements};
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv, Task};
use mixfleet_runtime::gateway::{EngineSpec, GatewayParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_scheduler::fleet::{FleetConfig, Role};
use mixfleet_sim::simulate::Choices;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Decisions kept for `/debug/placement`.
const PLACEMENTS_KEPT: usize = 10_000;

#[derive(Clone, Debug, Args)]
pub(crate) struct EppArgs {
    /// Endpoints of the pool, as llm-d's file discovery has them; reloaded on change
    #[arg(long, value_name = "FILE.yaml", required_unless_present = "inference_pool")]
    pool: Option<PathBuf>,
    /// InferencePool (v1) whose ready pods are the endpoints
    #[arg(long, value_name = "NAME", conflicts_with = "pool")]
    inference_pool: Option<String>,
    /// Its namespace [default: that of the credentials]
    #[arg(long, value_name = "NS", requires = "inference_pool")]
    namespace: Option<String>,
    /// Lease by which one of several pickers is ready [default: all are]
    #[arg(long, value_name = "NAME", requires = "inference_pool")]
    lease: Option<String>,
    /// Address for Envoy's external processing; :PORT for all interfaces
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9002", value_parser = address)]
    listen: String,
    /// Address for gRPC health checks
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9003", value_parser = address)]
    health: String,
    /// Address of /metrics, /live, /health and /debug/placement
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9090", value_parser = address)]
    metrics: String,
    #[command(flatten)]
    scaling: ScalerArgs,
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

/// KEDA's external scaler, beside a picker or a router.
#[derive(Clone, Debug, Args)]
pub(crate) struct ScalerArgs {
    /// The planned fleet whose replicas KEDA asks for
    #[arg(long, value_name = "FILE.yaml", requires = "scaler", hide = true)]
    scale: Option<PathBuf>,
    /// Address of KEDA's external scaler
    #[arg(long, value_name = "HOST:PORT", requires = "scale", value_parser = address, hide = true)]
    scaler: Option<String>,
}

impl ScalerArgs {
    /// Reads the plan, if there is to be a scaler.
    ///
    /// # Errors
    /// When the file is not a plan.
    pub(crate) fn read(&self) -> Result<Option<PlannedScaler>> {
        let (Some(file), Some(address)) = (&self.scale, &self.scaler) else { return Ok(None) };
        let text = mixfleet_hal::files::read_text(file);
        let text = text.with_context(|| format!("--scale: cannot read {}", file.display()))?;
        let hint = "'mixfleet plan --engine vllm --for llmd --out DIR' writes such a file, scale.yaml";
        let wrong = |why: String| UsageError(format!("--scale {}: {why}; {hint}", file.display()));
        let scaler = FleetScaler::read(&text).map_err(wrong)?;
        Ok(Some(PlannedScaler { scaler, address: address.clone() }))
    }
}

/// A scaler that does not listen yet.
pub(crate) struct PlannedScaler {
    scaler: FleetScaler,
    address: String,
}

impl PlannedScaler {
    /// Decides replicas, and serves autoscalers, forever.
    ///
    /// # Errors
    /// When the address cannot be listened on.
    pub(crate) async fn start(self, env: SharedEnv, metrics: Metrics) -> Result<()> {
        let PlannedScaler { scaler, address } = self;
        let listener = bind("--scaler", &address).await?;
        tracing::info!(scaler = %listener.local_addr()?, "serves autoscalers");
        tokio::spawn(scaler.clone().follow(env, metrics));
        tokio::spawn(async move {
            if let Err(error) = scaler.serve(listener).await {
                tracing::error!(%error, "the scaler ended");
            }
        });
        Ok(())
    }
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
    let scaler = args.scaling.read()?;
    if let Some(file) = &args.pool {
        let text = mixfleet_hal::files::read_text(file);
        let text = text.with_context(|| format!("--pool: cannot read {}", file.display()))?;
        let wrong = |why: String| UsageError(format!("--pool {}: {why}", file.display()));
        let pool = EndpointPool::read(&text).map_err(wrong)?;
        engines(&pool).map_err(|error| wrong(format!("{error:#}")))?;
    }
    run_server(pick(args, limits, scaler))
}

async fn pick(args: EppArgs, limits: EngineConfig, scaler: Option<PlannedScaler>) -> Result<()> {
    let mut signals = ServeSignals::new()?;
    raise_descriptors();
    let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
    let metrics = Metrics::new();
    logs::count_dropped_in(&metrics.log_lines_dropped);
    let traces = otlp::begin(&metrics)?;
    let placements = Arc::new(Placements::new(PLACEMENTS_KEPT));
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
    if let Some(scaler) = scaler {
        scaler.start(env.clone(), metrics.clone()).await?;
    }
    tracing::info!(
        listen = %listeners.processing.local_addr()?,
        health = %listeners.health.local_addr()?,
        "picks endpoints for Envoy"
    );
    let source_env = env.clone();
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
    let (tell, told) = tokio::sync::watch::channel(false);
    let ending = |mut told: tokio::sync::watch::Receiver<bool>| async move {
        let _ = told.wait_for(|told| *told).await;
    };
    let source = PoolSource { picker: picker.clone(), env: source_env, open };
    let (following, leading) = source.follow(&args, ending(told.clone())).await?;
    let mut serving = Box::pin(mixfleet_epp::serve(picker, listeners, ending(told)));
    tokio::select! {
        () = following => unreachable!("a pool is followed forever"),
        served = &mut serving => served.context("serving ended")?,
        () = signals.next() => {
            tracing::info!("ending: requests in the picker may finish; signal again to end now");
            let _ = tell.send(true);
            signals.or_until_next(async {
                // another picker gets the lease while requests finish here
                let (_, served) = tokio::join!(leading, serving);
                drop(served);
            })
            .await;
        }
    }
    otlp::end(traces).await;
    Ok(())
}

async fn bind(flag: &str, address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("{flag}: cannot listen on {address}"))
}

/// What follows a pool.
struct PoolSource {
    picker: EndpointPicker,
    env: SharedEnv,
    open: OpenPool,
}

impl PoolSource {
    /// Follows the pool's file, or the cluster's objects, forever; the other task holds the lease, if there
    /// is one, until `told`.
    async fn follow(
        self,
        args: &EppArgs,
        told: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(Task, JoinHandle<()>)> {
        let PoolSource { picker, env, open } = self;
        if let Some(file) = args.pool.clone() {
            let following: Task = Box::pin(follow_pool(picker, file, open));
            return Ok((following, tokio::spawn(async {})));
        }
        let name = args.inference_pool.clone().context("--pool or --inference-pool is needed")?;
        let cluster = ClusterAccess::infer().await.map_err(|why| {
            UsageError(format!("--inference-pool: no access to a Kubernetes API server: {why}"))
        })?;
        let namespace = args.namespace.clone().unwrap_or_else(|| cluster.namespace.clone());
        let leading = match &args.lease {
            None => tokio::spawn(async {}),
            Some(lease) => {
                let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "mixfleet-epp".into());
                let lease = PickerLease {
                    namespace: namespace.clone(),
                    name: lease.clone(),
                    identity: format!("{host}_{:016x}", env.random()),
                    times: LeaseTimes::default(),
                };
                tokio::spawn(hold_lease(picker.clone(), cluster.clone(), env, lease, told))
            }
        };
        let pool = PoolName { namespace, name };
        let following: Task = Box::pin(follow_inference_pool(picker, cluster, pool, open));
        Ok((following, leading))
    }
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
        engines.extend(
            opened.with_context(|| format!("endpoint '{}'", endpoint.name))?.into_iter().map(whole_too),
        );
    }
    Ok(engines)
}

/// An endpoint that answers may compute its prompts too: a pair is used where it is predicted to be better.
fn whole_too(spec: EngineSpec) -> EngineSpec {
    match spec.role {
        Role::Decode => EngineSpec { role: Role::Auto, takes_kv: true, ..spec },
        _ => spec,
    }
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
