//! Implements `mixfleet serve`.

use crate::args::{DeviceRole, FrontArgs, InstanceArgs, ModelArgs, ServeArgs};
use crate::connections::{is_loopback, raise_descriptors};
use crate::failure::UsageError;
use crate::model::LoadedModel;
use crate::remote::RemoteArgs;
use crate::settings::ServeSettings;
use crate::start::{self, ServingDevices, StartOptions};
use crate::tiers::InstancePools;
use crate::worker_engines::{KvCanary, WorkerEngine, check_roles};
use crate::{backends, logs, otlp};
use anyhow::{Context, Result};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::api::{
    Access, Api, KeysFile, Limits, Placements, ServedModel, Serving, Shutdown, observe_api,
};
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::env::{RealEnv, SharedEnv, Task};
use mixfleet_runtime::events::{EventLog, Writer};
use mixfleet_runtime::gateway::{Gateway, GatewayParts};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::fleet::{FleetConfig, Rebalance, Replicate, Role};
use mixfleet_sim::simulate::Choices;
use std::fs::File;
use std::io::BufWriter;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Decisions kept for `/debug/placement`.
const PLACEMENTS_KEPT: usize = 1000;

pub(crate) fn run(args: ServeArgs, settings: &ServeSettings) -> Result<()> {
    check_roles(&args.worker_engine)?;
    if args.dry_run {
        check(&args.front)?;
        return settings.print(args.front.json);
    }
    log(args.front.json)?;
    check(&args.front)?;
    settings.say_unused();
    let ServeArgs { model, instances, kv_exchange, worker_engine, kv_canary, front: options, remote, .. } =
        args;
    if !worker_engine.is_empty() {
        return run_server(async {
            let load = move |around: Around, options: &FrontArgs| {
                load_engines(&worker_engine, kv_canary, options, around)
            };
            front(options, &mut ServeSignals::new()?, Awaited::Engines, load).await.map(drop)
        });
    }
    let load = move |around: Around, options: &FrontArgs| {
        load(&model, &instances, &remote, kv_exchange, options, around)
    };
    run_server(async {
        let mut signals = ServeSignals::new()?;
        if let Some(pools) = front(options, &mut signals, Awaited::Model, load).await? {
            signals.or_until_next(pools.write_back()).await;
        }
        Ok(())
    })
}

/// Minimum number of threads that serve connections, so that a busy one is less than half of them.
const SERVING_THREADS_MIN: usize = 4;

/// Runs a server until its process ends.
pub(crate) fn run_server(main: impl Future<Output = Result<()>>) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).max(SERVING_THREADS_MIN);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let ended = runtime.block_on(main);
    // It ends with the process: other threads still wait by its clock, and a blocked thread must not delay
    // the exit.
    std::mem::forget(runtime);
    ended
}

/// The signals that end a process.
pub(crate) struct ServeSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl ServeSignals {
    pub(crate) fn new() -> Result<Self> {
        Ok(ServeSignals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Runs the last work of a process; a further signal ends it at once.
    pub(crate) async fn or_until_next(&mut self, last: impl Future<Output = ()>) {
        tokio::select! {
            () = last => {}
            () = self.next() => tracing::warn!("second signal: exiting immediately"),
        }
    }
}

/// What a server provides to the function that loads its model.
pub(crate) struct Around {
    pub(crate) env: SharedEnv,
    pub(crate) metrics: Metrics,
    pub(crate) placements: Arc<Placements>,
    pub(crate) events: Option<EventLog>,
}

pub(crate) fn log(json: bool) -> Result<()> {
    logs::start(json)?;
    backends::say_loaded();
    Ok(())
}

pub(crate) fn check(args: &FrontArgs) -> Result<()> {
    if !is_loopback("--listen", &args.listen)? && args.api_key.is_none() && args.api_keys.is_none() {
        let message = "reaches beyond this machine: give --api-key (or MIXFLEET_API_KEY) or --api-keys, or listen on 127.0.0.1";
        return Err(UsageError(format!("--listen {} {message}", args.listen)).into());
    }
    if args.api_key.as_deref().is_some_and(str::is_empty) {
        return Err(UsageError("--api-key is empty".into()).into());
    }
    args.connections.check()?;
    args.scheduling.choices()?;
    rebalance(args)?;
    Ok(())
}

/// What a server must have before it answers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    Model,
    Engines,
}

impl Awaited {
    const fn words(self) -> &'static str {
        match self {
            Awaited::Model => "the model is still loading",
            Awaited::Engines => "no external engine has answered yet",
        }
    }
}

/// Listens, answers once `load` is done, and ends at a signal. Returns what `load` keeps beside the model.
pub(crate) async fn front<M: Into<Serving> + Send + 'static, K: Send + 'static>(
    args: FrontArgs,
    signals: &mut ServeSignals,
    awaited: Awaited,
    load: impl FnOnce(Around, &FrontArgs) -> Result<(M, K)> + Send + 'static,
) -> Result<Option<K>> {
    let real = RealEnv::new(tokio::runtime::Handle::current());
    let env: SharedEnv = Arc::new(real);
    let metrics = Metrics::new();
    logs::count_dropped_in(&metrics.log_lines_dropped);
    let traces = otlp::begin(&metrics)?;
    let placements = Arc::new(Placements::new(PLACEMENTS_KEPT));
    let limits = Limits {
        requests_max: args.requests.get(),
        readers_max: mixfleet_runtime::budget::work_threads(),
        ..args.connections.limits(raise_descriptors())
    };
    let origins = args.connections.origins("--listen", &args.listen)?;
    let (keys, access) = access(&args)?;
    let api = Api::new(env.clone(), metrics.clone(), placements.clone(), limits, access);
    api.waits_for(awaited.words());
    if let Some(keys) = keys {
        api.follow(keys).context("--api-keys: no thread is left to follow the file")?;
    }
    let watched = api.clone();
    let watch = |listener, env, origins| -> Task { Box::pin(observe_api(listener, env, watched, origins)) };
    args.connections.watch(watch).await?;
    let listener = env.listen(&args.listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {}", args.listen))?;
    let address = listener.address();
    let (shutdown, told) = watch::channel(Shutdown::No);
    let mut server = tokio::spawn(mixfleet_runtime::api::serve(listener, api.clone(), origins, told));
    tracing::info!(%address, "listening; {}", awaited.words());

    let (events, mut writer) = event_log(&args, &env)?.unzip();
    let drain_s = args.connections.drain_s();
    let around = Around { env: env.clone(), metrics, placements, events };
    let mut loading = tokio::task::spawn_blocking(move || load(around, &args));
    let (mut loaded, mut kept) = (false, None);
    loop {
        tokio::select! {
            model = &mut loading, if !loaded => {
                loaded = true;
                let (model, keep) = model.context("loading was cut short")??;
                kept = Some(keep);
                api.ready(model);
                tracing::info!("ready: http://{address}/v1");
            }
            () = signals.next() => stop(&shutdown, drain_s),
            _ = &mut server => {
                if let Some(writer) = writer.take() {
                    // An error was reported when it occurred, and clients got their answers all the same.
                    let _ = writer.close().await;
                }
                otlp::end(traces).await;
                return Ok(kept);
            }
        }
        if !loaded && *shutdown.borrow() != Shutdown::No {
            // Nothing runs yet, and loading cannot be interrupted.
            logs::exit(0);
        }
    }
}

/// The API keys that the flags give, and the file that contains them, if any.
fn access(args: &FrontArgs) -> Result<(Option<KeysFile>, Access)> {
    let (file, access) = match &args.api_keys {
        None => (None, Access::from(args.api_key.clone())),
        Some(path) => {
            let wrong = |error| UsageError(format!("--api-keys {}: {error}", path.display()));
            let (file, access) = KeysFile::open(path).map_err(wrong)?;
            (Some(file), access)
        }
    };
    Ok((file, access.hiding_cached_tokens(args.hide_cached_tokens)))
}

/// The event log of `--events`.
fn event_log(args: &FrontArgs, env: &SharedEnv) -> Result<Option<(EventLog, Writer)>> {
    let Some(path) = &args.events else { return Ok(None) };
    let file = File::create(path).with_context(|| format!("--events: cannot create {}", path.display()))?;
    Ok(Some(EventLog::start(env, Box::new(BufWriter::new(file)))))
}

/// The first signal drains for a bounded time, the second one stops at once.
fn stop(shutdown: &watch::Sender<Shutdown>, drain_s: f64) {
    let next = if *shutdown.borrow() == Shutdown::No { Shutdown::Drain } else { Shutdown::Stop };
    if next == Shutdown::Drain {
        tracing::info!(
            drain_s,
            "draining: running requests may finish, new ones are refused; signal again to stop now"
        );
    }
    let _ = shutdown.send(next);
}

fn load(
    model_args: &ModelArgs,
    instances: &InstanceArgs,
    remote: &RemoteArgs,
    kv_exchange: Option<String>,
    args: &FrontArgs,
    around: Around,
) -> Result<(ServedModel, InstancePools)> {
    let model = load_model(model_args, &around.env)?;
    let Around { env, metrics, placements, events } = around;
    let instances = ServingDevices { remote: remote.clone(), ..chosen(instances) };
    let choice = StartOptions { instances, engine: engine_config(args)?, events, kv_exchange };
    let engine = start::engine(&model, model_args, choice, &env, metrics, placements)?;
    let served = served(model, args, engine.handle, engine.context, &env);
    Ok((ServedModel { exchange: engine.exchange, ..served }, engine.pools))
}

/// Waits for the first engine that answers.
fn load_engines(
    engines: &[WorkerEngine],
    kv_canary: KvCanary,
    args: &FrontArgs,
    around: Around,
) -> Result<(Arc<Gateway>, ())> {
    let specs = engines.iter().map(WorkerEngine::open).collect::<Result<Vec<_>>>()?;
    let specs = specs.into_iter().flatten().collect();
    let Around { env, metrics, placements, events } = around;
    let limits = engine_config(args)?;
    let (name, canaries) = (args.name.clone(), kv_canary.config());
    let parts = GatewayParts { env, name, limits, events, placements, metrics, canaries };
    Ok((tokio::runtime::Handle::current().block_on(parts.start(specs)), ()))
}

pub(crate) fn load_model(args: &ModelArgs, env: &SharedEnv) -> Result<LoadedModel> {
    if args.model.is_none() {
        tracing::warn!(
            "no --model: serving a small built-in model with random weights; its text means nothing"
        );
    }
    LoadedModel::load(args, env)
}

/// The devices that the flags name.
pub(crate) fn chosen(args: &InstanceArgs) -> ServingDevices {
    let devices = if args.device.is_empty() {
        let all = backends::default_selectors();
        all.into_iter().map(|device| DeviceRole { device, role: Role::Auto }).collect()
    } else {
        args.device.iter().flat_map(backends::expand).collect()
    };
    ServingDevices {
        devices,
        prices: args.usd_per_hour.iter().map(|p| (p.device.clone(), p.usd_per_hour)).collect(),
        sequences_max: args.sequences,
        prompts_first: false,
        attn_split: args.attn_split,
        remote: RemoteArgs::default(),
        tiers: args.tiers.clone(),
        profiles: args.profile.clone(),
        recalibrate: args.recalibrate,
        brief: false,
        pinned: !args.no_pin,
    }
}

/// What trials of devices that are predicted to be slow may cost of the time of requests.
pub(crate) const TRIAL_SHARE: f64 = 0.01;

/// The limits that the flags set.
pub(crate) fn engine_config(args: &FrontArgs) -> Result<EngineConfig> {
    let Choices { policy, admission, seed } = args.scheduling.choices()?;
    let default = EngineConfig::default();
    let fleet = FleetConfig {
        requests_max: args.requests.get(),
        ttft_slo: args.ttft_slo.map(Seconds),
        tbt_slo: args.tbt_slo.map(Seconds),
        policy,
        pull: !args.no_pull,
        admission,
        drop_at_decode: args.scheduling.drop_late,
        wait_usd_per_s: args.scheduling.wait_usd_per_s,
        kv_weight: args.scheduling.kv_weight,
        trial_share: args.scheduling.trial_share.unwrap_or(TRIAL_SHARE),
        replicate: args.replicate_gb_per_s.map(|rate| Replicate::new(rate * 1e9)),
        rebalance: rebalance(args)?,
        seed,
        ..default.fleet
    };
    Ok(EngineConfig { fleet, flex_deadline: Seconds(args.flex_deadline_s), ..default })
}

/// When devices with a role change it.
fn rebalance(args: &FrontArgs) -> Result<Option<Rebalance>> {
    if !args.flexible {
        let numbers = [args.rebalance_high, args.rebalance_low, args.rebalance_hold_s];
        if numbers.iter().any(Option::is_some) {
            let cause =
                "--rebalance-high, --rebalance-low and --rebalance-hold-s are of no use without --flexible";
            return Err(UsageError(format!("{cause} (flexible = true of a [[pool]] in a fleet file)")).into());
        }
        return Ok(None);
    }
    // All devices of this process are in one pool.
    let usual = Rebalance::new(vec![0]);
    let rule = Rebalance {
        high: args.rebalance_high.unwrap_or(usual.high),
        low: args.rebalance_low.unwrap_or(usual.low),
        hold: args.rebalance_hold_s.map_or(usual.hold, Seconds),
        pools: usual.pools,
    };
    if rule.low >= rule.high {
        let (low, high) = (rule.low, rule.high);
        return Err(
            UsageError(format!("--rebalance-low {low} must be less than --rebalance-high {high}")).into()
        );
    }
    Ok(Some(rule))
}

pub(crate) fn served(
    model: LoadedModel,
    args: &FrontArgs,
    engine: EngineHandle,
    context: u32,
    env: &SharedEnv,
) -> ServedModel {
    let defaults = model.sampling();
    ServedModel {
        name: args.name.clone().unwrap_or(model.name),
        created: to_u64(env.unix_time().0),
        engine,
        text: model.text,
        context,
        eos_ids: model.checkpoint.config.eos_ids.clone().into(),
        defaults,
        answer_tokens: model.defaults.max_new_tokens,
        exchange: None,
    }
}
