//! `mixfleet serve`

use crate::args::{DeviceRole, ServeArgs};
use crate::model::Model;
use crate::start::{self, Choice};
use crate::{Usage, backends};
use anyhow::{Context, Result};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::api::{Api, Limits, Placements, ServedModel, Shutdown};
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_runtime::engine::events::{EventLog, Writer};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::request::Sampling;
use mixfleet_scheduler::fleet::{Policy, Role};
use mixfleet_sim::simulate::Choices;
use std::fs::File;
use std::io::{BufWriter, IsTerminal};
use std::net::ToSocketAddrs;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Decisions kept for `/debug/placement`.
const PLACEMENTS_KEPT: usize = 1000;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    log(args.json);
    check(&args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(args))
}

fn log(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        builder.json().init();
    } else {
        builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).init();
    }
}

fn check(args: &ServeArgs) -> Result<()> {
    let addresses = args.listen.to_socket_addrs();
    let addresses =
        addresses.map_err(|e| Usage(format!("--listen {}: {e}; expected HOST:PORT", args.listen)))?;
    let beyond = addresses.into_iter().any(|address| !address.ip().is_loopback());
    if beyond && args.api_key.is_none() {
        let message =
            "reaches beyond this machine: give --api-key (or MIXFLEET_API_KEY), or listen on 127.0.0.1";
        return Err(Usage(format!("--listen {} {message}", args.listen)).into());
    }
    if args.api_key.as_deref().is_some_and(str::is_empty) {
        return Err(Usage("--api-key is empty".into()).into());
    }
    let flex = ("--flex-deadline-s", Some(args.flex_deadline_s));
    for (flag, slo) in [("--ttft-slo", args.ttft_slo), ("--tbt-slo", args.tbt_slo), flex] {
        if slo.is_some_and(|s| !(s.is_finite() && s > 0.0)) {
            return Err(Usage(format!("{flag} must be a positive number of seconds")).into());
        }
    }
    args.scheduling.choices()?;
    Ok(())
}

async fn serve(args: ServeArgs) -> Result<()> {
    let real = RealEnv::new(tokio::runtime::Handle::current());
    let env: SharedEnv = Arc::new(real);
    let metrics = Metrics::new();
    let placements = Arc::new(Placements::new(PLACEMENTS_KEPT));
    let limits = Limits { requests_max: args.requests.get(), ..Limits::default() };
    let api = Api::new(env.clone(), metrics.clone(), placements.clone(), limits, args.api_key.clone());
    let listener = env.listen(&args.listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {}", args.listen))?;
    let address = listener.address();
    let (shutdown, told) = watch::channel(Shutdown::No);
    let mut server = tokio::spawn(mixfleet_runtime::api::serve(listener, api.clone(), told));
    tracing::info!(%address, "listening; loading the model");

    let (events, mut writer) = event_log(&args, &env)?.unzip();
    let (env2, name) = (env.clone(), args.name.clone());
    let mut loading =
        tokio::task::spawn_blocking(move || load(&args, name, &env2, metrics, placements, events));
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut loaded = false;
    loop {
        tokio::select! {
            model = &mut loading, if !loaded => {
                loaded = true;
                api.ready(model.context("loading was cut short")??);
                tracing::info!("ready: http://{address}/v1");
            }
            _ = interrupt.recv() => stop(&shutdown),
            _ = terminate.recv() => stop(&shutdown),
            _ = &mut server => {
                if let Some(writer) = writer.take() {
                    // An error was said when it happened; clients got their answers all the same.
                    let _ = writer.close().await;
                }
                return Ok(());
            }
        }
        if !loaded && *shutdown.borrow() != Shutdown::No {
            // Nothing runs yet, and loading cannot be interrupted.
            std::process::exit(0);
        }
    }
}

/// The log that --events asks for.
fn event_log(args: &ServeArgs, env: &SharedEnv) -> Result<Option<(EventLog, Writer)>> {
    let Some(path) = &args.events else { return Ok(None) };
    let file = File::create(path).with_context(|| format!("--events: cannot create {}", path.display()))?;
    Ok(Some(EventLog::start(env, Box::new(BufWriter::new(file)))))
}

/// The first signal drains, the second one cuts.
fn stop(shutdown: &watch::Sender<Shutdown>) {
    let next = if *shutdown.borrow() == Shutdown::No { Shutdown::Drain } else { Shutdown::Stop };
    if next == Shutdown::Drain {
        tracing::info!("draining: running requests finish, new ones are refused; signal again to stop now");
    }
    let _ = shutdown.send(next);
}

fn load(
    args: &ServeArgs,
    name: Option<String>,
    env: &SharedEnv,
    metrics: Metrics,
    placements: Arc<Placements>,
    events: Option<EventLog>,
) -> Result<ServedModel> {
    if args.model.model.is_none() {
        tracing::warn!(
            "no --model: serving a small built-in model with random weights; its text means nothing"
        );
    }
    let model = Model::load(&args.model, env)?;
    let devices = if args.device.is_empty() {
        let all = backends::default_selectors();
        all.into_iter().map(|device| DeviceRole { device, role: Role::Auto }).collect()
    } else {
        args.device.iter().flat_map(backends::expand).collect()
    };
    let Choices { policy, admission, seed } = args.scheduling.choices()?;
    if matches!(policy, Policy::KvcacheCentric { .. }) {
        tracing::warn!(
            "prefixes are not pulled from one device to another: what kvcache-centric would pull is recomputed"
        );
    }
    let choice = Choice {
        devices,
        prices: args.usd_per_hour.iter().map(|p| (p.device.clone(), p.usd_per_hour)).collect(),
        sequences_max: args.sequences,
        engine: EngineConfig {
            requests_max: args.requests.get(),
            ttft_slo: args.ttft_slo.map(Seconds),
            tbt_slo: args.tbt_slo.map(Seconds),
            flex_deadline: Seconds(args.flex_deadline_s),
            policy,
            admission,
            seed,
            ..EngineConfig::default()
        },
        events,
        profiles: args.profile.clone(),
        recalibrate: args.recalibrate,
    };
    let engine = start::engine(&model, &args.model, choice, env, metrics, placements)?;
    let config = &model.checkpoint.config;
    Ok(ServedModel {
        name: name.unwrap_or(model.name),
        created: env.unix_time().0 as u64,
        engine: engine.handle,
        text: model.text,
        context: engine.context,
        eos_ids: config.eos_ids.clone().into(),
        defaults: Sampling::default(),
    })
}
