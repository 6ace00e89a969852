//! Implements `mixfleet router` and `mixfleet worker`.

use super::join::Join;
use super::transports::{self, Offered, PIECE_TIMEOUT};
use super::{RouterArgs, WorkerArgs, node};
use crate::affinity::LocatedDevices;
use crate::connections::{is_loopback, raise_descriptors, watch};
use crate::digest::Digest;
use crate::failure::UsageError;
use crate::logs;
use crate::remote::RemoteArgs;
use crate::serve::{self, Around, ServeSignals};
use crate::start;
use crate::tiers::InstancePools;
use anyhow::{Context, Result};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::api::{Origins, ServedModel, observe};
use mixfleet_runtime::engine::{EngineConfig, EngineParts, HandOffLimits, Identity, Loaded};
use mixfleet_runtime::env::{RealEnv, SharedEnv, Task};
use mixfleet_runtime::fleet::registry::{Charter, InstanceRecord, InstanceState, Member, Membership, Seat};
use mixfleet_runtime::fleet::rpc::{FleetListener, ProbeLinks};
use mixfleet_runtime::fleet::{Hub, ModelIdentity, WorkerProcess, connect_peers, connect_workers};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{InstanceId, Role};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch::{Receiver, Sender};

/// Timeout for telling etcd that a process leaves.
const LEAVE: Duration = Duration::from_secs(5);

/// Runs `mixfleet router`.
pub(crate) fn router(args: RouterArgs) -> Result<()> {
    serve::log(args.front.json)?;
    serve::check(&args.front)?;
    #[cfg(feature = "epp")]
    let scaler = args.scaling.read()?;
    let RouterArgs { join, model, front, .. } = args;
    serve::run_server(async {
        let mut signals = ServeSignals::new()?;
        let handle = tokio::runtime::Handle::current();
        let load = move |around: Around, front: &crate::args::FrontArgs| {
            handle.block_on(async {
                #[cfg(feature = "epp")]
                if let Some(scaler) = scaler {
                    scaler.start(around.env.clone(), around.metrics.clone()).await?;
                }
                join_as_router(&join, &model, front, around).await
            })
        };
        if let Some(membership) = serve::front(front, &mut signals, serve::Awaited::Model, load).await? {
            signals.or_until_next(leave(membership)).await;
        }
        Ok(())
    })
}

/// Removes this member's record; if etcd is away, the lease ends by itself.
async fn leave(membership: Membership) {
    if tokio::time::timeout(LEAVE, membership.leave()).await.is_err() {
        tracing::warn!("etcd does not answer; this process's record there ends with its lease");
    }
}

async fn join_as_router(
    args: &super::JoinArgs,
    model_args: &crate::args::ModelArgs,
    front: &crate::args::FrontArgs,
    around: Around,
) -> Result<(ServedModel, Membership)> {
    let Around { env, metrics, placements, events } = around;
    let join = args.open(&env).await?;
    let model = serve::load_model(model_args, &env)?;
    let (charter, own, _) = charter(&join, &model, &env).await?;
    let id = join.registry.router_id().await?;
    let limits = EngineConfig {
        // Within two leases a lost worker is back, or all members know that it is lost; a third one lets all
        // reconnect to a member that was cut off.
        patience: Seconds(3.0 * args.lease().as_secs_f64()),
        ..serve::engine_config(front)?
    };
    let identity = identity(&charter, &own);
    let parts = EngineParts {
        env: env.clone(),
        config: Arc::new(model.checkpoint.config.clone()),
        identity,
        limits,
        events,
        placements,
        metrics,
    };
    let (engine, router) = parts.start_router(id, model.kv);
    let member = Member::new(own, front.listen.clone(), Seat::Router { id });
    let name = member.name();
    let mut membership = join.registry.join(charter, member);
    end_if_taken(&mut membership, &env);
    env.spawn(Box::pin(connect_workers(env.clone(), router, membership.members(), join.rpc)));
    membership.joined().await;
    tracing::info!(member = name, fleet = args.fleet, "joined");
    let context = model.checkpoint.config.context_max;
    Ok((serve::served(model, front, engine, context, &env), membership))
}

/// Ends the process at once if another one has the same id, since this one would receive its requests.
fn end_if_taken(membership: &mut Membership, env: &SharedEnv) {
    let taken = membership.taken();
    env.spawn(Box::pin(async move {
        let error = taken.await;
        tracing::error!(%error, "this process must leave the fleet");
        logs::exit(3);
    }));
}

fn identity(charter: &Charter, own: &ModelIdentity) -> Identity {
    Identity {
        model_digest: own.digest.clone(),
        tokenizer_digest: own.tokenizer_digest.clone(),
        secret: charter.secret,
    }
}

/// What all members of the fleet share, and what this process serves.
///
/// # Errors
/// When the weights change while their digest is computed, or the fleet serves something else.
async fn charter(
    join: &Join,
    model: &crate::model::LoadedModel,
    env: &SharedEnv,
) -> Result<(Charter, ModelIdentity, Digest)> {
    let checkpoint = model.checkpoint.clone();
    let computing = tokio::task::spawn_blocking(move || Digest::now(&checkpoint));
    let digest = computing.await.context("the digest was cut short")??;
    let known = digest.known().context("the weights have no digest")?;
    let own = ModelIdentity { digest: known, tokenizer_digest: model.tokenizer_digest.clone() };
    let secret = Identity::new(String::new(), String::new(), [env.random(), env.random()]).secret;
    let charter = join.registry.charter(&own, secret).await.context("cannot join the fleet")?;
    Ok((charter, own, digest))
}

/// Runs `mixfleet worker`.
pub(crate) fn worker(args: WorkerArgs) -> Result<()> {
    serve::log(args.json)?;
    if let Some((_, name)) =
        args.transports.iter().enumerate().find(|(at, name)| args.transports[..*at].contains(name))
    {
        let name = format!("{name:?}").to_lowercase();
        return Err(UsageError(format!("--transports names {name} twice")).into());
    }
    node::check(&args)?;
    let control = args.join.listen("--listen-control", &args.listen_control)?;
    let data = match &args.listen_data {
        Some(text) => args.join.listen("--listen-data", text)?,
        None => SocketAddr::new(control.ip(), 0),
    };
    serve::run_server(work(args, control, data))
}

async fn work(args: WorkerArgs, control: SocketAddr, data: SocketAddr) -> Result<()> {
    let env: SharedEnv = Arc::new(RealEnv::new(tokio::runtime::Handle::current()));
    let mut signals = ServeSignals::new()?;
    raise_descriptors();
    let metrics = Metrics::new();
    logs::count_dropped_in(&metrics.log_lines_dropped);
    let traces = crate::otlp::begin(&metrics)?;
    let (ready, is_ready) = tokio::sync::watch::channel(false);
    if let Some(address) = &args.listen_http {
        let (flag, metrics) = ("--listen-http", metrics.clone());
        let origins = Origins::new(is_loopback(flag, address)?, &[], &[]).map_err(anyhow::Error::msg)?;
        let serve =
            |listener, env, origins| -> Task { Box::pin(observe(listener, env, metrics, is_ready, origins)) };
        watch(flag, address, origins, serve).await?;
    }
    let joining = join_as_worker(&args, &env, control, data, metrics);
    let joined = tokio::select! {
        joined = joining => joined?,
        () = signals.next() => return Ok(()),
    };
    let JoinedWorker { membership, serving, hub, pools } = joined;
    ready.send_replace(true);
    tokio::select! {
        served = serving => served.context("serving was cut short")??,
        () = hub.ended() => {
            leave(membership).await;
            anyhow::bail!("the last device of this process is down: its log says why");
        }
        () = signals.next() => {}
    }
    // Routers notice that the connection closes, and place this process's requests elsewhere.
    tracing::info!("leaving");
    let last = async {
        leave(membership).await;
        pools.write_back().await;
        crate::otlp::end(traces).await;
    };
    signals.or_until_next(last).await;
    Ok(())
}

/// A worker process that has joined its fleet.
struct JoinedWorker {
    membership: Membership,
    serving: tokio::task::JoinHandle<Result<(), mixfleet_runtime::fleet::rpc::CallError>>,
    hub: Hub,
    pools: InstancePools,
}

async fn join_as_worker(
    args: &WorkerArgs,
    env: &SharedEnv,
    control: SocketAddr,
    data: SocketAddr,
    metrics: Metrics,
) -> Result<JoinedWorker> {
    let join = args.join.open(env).await?;
    let door = FleetListener::open(control, join.rpc.clone())?;
    let model = serve::load_model(&args.model, env)?;
    let (charter, own, digest) = charter(&join, &model, env).await?;
    let (loaded, prices) = load(args, model, identity(&charter, &own), digest, env.clone()).await?;
    let pools = InstancePools::of(&loaded);
    let hand_off = HandOffLimits { timeout: PIECE_TIMEOUT, ..HandOffLimits::default() };
    let located = LocatedDevices::of(&loaded);
    let open = || transports::open(args, &join, data, &hand_off, &located);
    let (worker_env, offered) = match args.instances.no_pin {
        true => (env.clone(), open()),
        false => (located.bind_instances(env), located.start_near("the threads of transports", open)?),
    };
    let Offered { transports, not_offered } = offered?;
    let names = transports.iter().map(|transport| transport.name().to_owned()).collect();
    let probe_links = ProbeLinks { links: start::links(transports), hand_off };
    let ids = join.registry.instance_ids(to_u32(loaded.len())).await?;
    let records = ids.iter().zip(&loaded).zip(prices);
    let instances = records.map(|((&id, (loaded, _)), price)| record(id, loaded, price)).collect();
    let process = WorkerProcess {
        env: worker_env,
        model: own.clone(),
        instances: ids.into_iter().zip(loaded).map(|(id, (loaded, cost))| (id, loaded, cost)).collect(),
        links: probe_links.links.clone(),
        hand_off: probe_links.hand_off,
        metrics,
    };
    let hub = process.start()?;
    let address = door.address();
    let serving = tokio::spawn(door.serve(env.clone(), hub.clone(), probe_links.clone()));
    let member =
        Member::new(own, address.to_string(), Seat::Worker { instances, transports: names, not_offered });
    let name = member.name();
    let mut membership = join.registry.join(charter, member);
    end_if_taken(&mut membership, env);
    let (members, record) = (membership.members(), membership.record());
    env.spawn(Box::pin(record_states(hub.states(), record.clone())));
    env.spawn(Box::pin(connect_peers(env.clone(), hub.clone(), probe_links, members, record, join.rpc)));
    membership.joined().await;
    tracing::info!(member = name, %address, fleet = args.join.fleet, "joined");
    Ok(JoinedWorker { membership, serving, hub, pools })
}

/// Minimum time between two changes of a record: etcd tells every member of each.
const RECORD_INTERVAL: Duration = Duration::from_secs(5);

/// Keeps the states in this process's record equal to those of its instances.
async fn record_states(mut states: Receiver<BTreeMap<InstanceId, InstanceState>>, record: Sender<Member>) {
    loop {
        {
            let states = states.borrow_and_update();
            record.send_if_modified(|member| member.set_states(&states));
        }
        let earliest = tokio::time::Instant::now() + RECORD_INTERVAL;
        if states.changed().await.is_err() {
            return;
        }
        tokio::time::sleep_until(earliest).await;
    }
}

/// Loads the model on the devices, and returns them with their rents. Blocks its thread.
async fn load(
    args: &WorkerArgs,
    model: crate::model::LoadedModel,
    identity: Identity,
    digest: Digest,
    env: SharedEnv,
) -> Result<(Vec<(Loaded, CostModel)>, Vec<Option<f64>>)> {
    if args.role.keeps() {
        let (loaded, cost, price) = node::open(args, &model, &identity, &digest)?;
        return Ok((vec![(loaded, cost)], vec![price]));
    }
    let mut chosen = serve::chosen(&args.instances);
    chosen.remote = RemoteArgs::new(args.join.token_file.clone(), args.join.tls.clone());
    for device in &mut chosen.devices {
        if device.role == Role::Auto {
            device.role = args.role;
        }
    }
    let model_args = args.model.clone();
    let loading = tokio::task::spawn_blocking(move || {
        let loaded = start::instances(&model, &model_args, &chosen, &identity, &digest, &env)?;
        let prices = chosen.devices.iter().map(|d| chosen.prices.get(&d.device).copied()).collect();
        Ok((loaded, prices))
    });
    loading.await.context("loading was cut short")?
}

fn record(id: InstanceId, loaded: &Loaded, usd_per_hour: Option<f64>) -> InstanceRecord {
    InstanceRecord {
        id,
        device: loaded.id(),
        role: loaded.role(),
        usd_per_hour,
        kv_capacity_tokens: loaded.kv_capacity_tokens(),
        degraded: false,
    }
}
