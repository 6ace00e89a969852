//! Sessions over gRPC: what goes through, who is turned away, and how an end is noticed.

mod fleet;

use fleet::{ask, greedy, prompt, request};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{DType, Device};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::fleet::registry::{InstanceRecord, LinkState, Member, Members, Seat};
use mixfleet_runtime::fleet::rpc::{CallError, Door, Pem, Remote, RpcConfig, Ways};
use mixfleet_runtime::fleet::{
    Hub, Model, Refusal, Router, RouterId, RouterParts, WorkerProcess, attend_members, meet_members,
};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, PrefillCoefficients};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_wire::{HostRegion, Shm};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const NAME: &str = "mixfleet";

/// An end is noticed long before; this only ends a test that fails.
const LONG: Duration = Duration::from_secs(60);

struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn member(&self) -> Pem {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![NAME.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pem {
            authority: self.0.as_ref().pem(),
            certificates: certificate.pem(),
            key: key.serialize_pem(),
            name: NAME.into(),
        }
    }
}

/// A busy machine is not taken for a lost one.
fn config(tls: Option<Pem>) -> RpcConfig {
    RpcConfig { silence: LONG, tls }
}

fn model() -> Model {
    Model { digest: "model".into(), tokenizer_digest: "tokenizer".into() }
}

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

fn real_env() -> SharedEnv {
    Arc::new(RealEnv::new(tokio::runtime::Handle::current()))
}

/// A worker process with one device, in this one.
struct Worker {
    hub: Hub,
    ways: Ways,
    member: Member,
}

fn worker(env: &SharedEnv, checkpoint: &Checkpoint, id: u32, role: Role, config: RpcConfig) -> Worker {
    let device: Arc<dyn Device> = Arc::new(ReferenceDevice::named(&format!("device{id}")));
    let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
    let limits = InstanceLimits {
        activations: DType::F32,
        kv: DType::F32,
        kv_bytes: 512 * checkpoint.config.kv_bytes_per_token(DType::F32),
        step_tokens_max: 24,
        prefill_tokens_beside_decode_max: 12,
        sequences_max: 8,
        block_tokens: Some(8),
    };
    let spec = InstanceSpec { device, weights, role, price: None, limits };
    let loaded = Loaded::new(&Arc::new(checkpoint.config.clone()), spec).unwrap();
    let cost = Coefficients {
        prefill_s: PrefillCoefficients { overhead: 1e-3, per_token: 1e-4, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base: 1e-3, per_sequence: 1e-5, per_kv_token: 0.0 },
    };
    let region = |bytes: u64| Ok(Arc::new(HostRegion::new(bytes as usize)?) as Arc<dyn SharedMemory>);
    let links = Links { transports: vec![Arc::new(Shm::new().unwrap())], make_region: Arc::new(region) };
    let hand_off = HandOffLimits { slot_bytes: 2048, slots: 3, ..HandOffLimits::default() };
    let record = InstanceRecord {
        id: InstanceId(id),
        device: format!("device{id}"),
        role,
        usd_per_hour: None,
        kv_capacity_tokens: loaded.kv_capacity_tokens(),
    };
    let process = WorkerProcess {
        env: env.clone(),
        model: model(),
        instances: vec![(InstanceId(id), loaded, CostModel::Coefficients(cost))],
        links: links.clone(),
        hand_off,
        metrics: Metrics::new(),
    };
    let (hub, ways) = (process.start().unwrap(), Ways { links, hand_off });
    let door = Door::open(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), config).unwrap();
    let seat = Seat::Worker { instances: vec![record], transports: vec!["shm".into()], not_offered: vec![] };
    let member = Member::new(model(), door.address().to_string(), seat);
    tokio::spawn(door.serve(env.clone(), hub.clone(), ways.clone()));
    Worker { hub, ways, member }
}

fn router(env: &SharedEnv, checkpoint: &Checkpoint, model: Model) -> (EngineHandle, Router) {
    let parts = RouterParts {
        env: env.clone(),
        config: Arc::new(checkpoint.config.clone()),
        identity: Identity::new(model.digest, model.tokenizer_digest, [1, 2]),
        id: RouterId(7),
        kv: DType::F32,
        limits: EngineConfig::default(),
        events: None,
        placements: Arc::new(Placements::new(1)),
        metrics: Metrics::new(),
    };
    parts.start()
}

fn members(workers: &[&Worker]) -> Members {
    Arc::new(workers.iter().map(|w| (w.member.name(), w.member.clone())).collect::<BTreeMap<_, _>>())
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_on_one_process_and_decode_on_another_under_tls() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), Authority::new());
    let config = || config(Some(authority.member()));
    let prefill = worker(&env, &checkpoint, 3, Role::Prefill, config());
    let decode = worker(&env, &checkpoint, 5, Role::Decode, config());
    let (handle, router) = router(&env, &checkpoint, model());
    let (_known, known) = watch::channel(members(&[&prefill, &decode]));
    tokio::spawn(attend_members(env.clone(), router, known.clone(), config()));
    let (own, mut said) = watch::channel(decode.member.clone());
    let (hub, ways) = (decode.hub.clone(), decode.ways.clone());
    tokio::spawn(meet_members(env.clone(), hub, ways, known, own, config()));
    let up = |member: &Member| matches!(member.links.get("worker-3"), Some(LinkState::Up { .. }));
    tokio::time::timeout(LONG, said.wait_for(up)).await.expect("the link is measured").unwrap();

    // The router may learn of both workers and their link a moment later than this test.
    while handle.submit(request("first".into(), vec![1], 1, None)).await.is_err() {
        tokio::task::yield_now().await;
    }
    for (at, length) in [1, 30, 90].into_iter().enumerate() {
        let prompt = prompt(length, at as u64, &checkpoint.config);
        let expected = greedy(&checkpoint, &prompt, 12);
        let answer = ask(&handle, format!("{at}"), prompt, 12, None).await;
        assert_eq!(answer.failure, None);
        assert_eq!(answer.tokens, expected, "{length} tokens of prompt");
        assert_eq!(answer.placed, [("device3".to_string(), "device5".to_string())]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_of_the_fleet_is_turned_away() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), Authority::new());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(Some(authority.member())));
    let (_handle, router) = router(&env, &checkpoint, model());
    let call = async |config: &RpcConfig| {
        let remote = Remote::connect(&env, &worker.member.address, config).await?;
        remote.router(&router.hello(), router.id()).await.map(drop)
    };
    assert_eq!(call(&config(Some(authority.member()))).await, Ok(()));
    let no_identity = Pem { certificates: String::new(), key: String::new(), ..authority.member() };
    let foreign = Authority::new().member();
    let with_a_foreign_certificate = Pem { authority: authority.member().authority, ..foreign.clone() };
    for stranger in [None, Some(foreign), Some(with_a_foreign_certificate), Some(no_identity)] {
        let refused = call(&config(stranger.clone())).await;
        assert!(matches!(refused, Err(CallError::Failed(_))), "{stranger:?}: {refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_is_refused_with_the_reason() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(None));
    let remote = Remote::connect(&env, &worker.member.address, &config(None)).await.unwrap();
    let other = Model { digest: "another".into(), ..model() };
    let (_handle, router) = router(&env, &checkpoint, other);
    let refused = remote.router(&router.hello(), router.id()).await.unwrap_err();
    assert_eq!(refused, CallError::Refused(Refusal::Model { what: "model".into() }));
    let refused = remote.peer(&router.hello(), &[InstanceId(9)], Default::default()).await.unwrap_err();
    assert!(refused.to_string().contains("--model"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_means_a_process_that_is_gone_or_has_its_ids_is_refused() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(None));
    let remote = Remote::connect(&env, &worker.member.address, &config(None)).await.unwrap();
    let (_handle, router) = router(&env, &checkpoint, model());
    // As one that was started again calls the record of its earlier life, which outlives it by a lease.
    let earlier = router.hello().to(Some(InstanceId(0)));
    let gone = CallError::Refused(Refusal::Elsewhere(InstanceId(0)));
    assert_eq!(remote.router(&earlier, router.id()).await.unwrap_err(), gone);
    assert_eq!(remote.peer(&earlier, &[InstanceId(1)], Default::default()).await.unwrap_err(), gone);
    let itself = remote.peer(&router.hello(), &[InstanceId(1)], Default::default()).await.unwrap_err();
    assert_eq!(itself, CallError::Refused(Refusal::Twice(InstanceId(1))));
    let meant = router.hello().to(Some(InstanceId(1)));
    assert!(remote.router(&meant, router.id()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_listened_to_beyond_this_host_in_the_clear() {
    let wide = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let refused = Door::open(wide, config(None)).err().expect("refused");
    assert!(refused.to_string().contains("certificates"), "{refused}");
    let refused = Remote::connect(&real_env(), "192.0.2.1:9", &config(None)).await.err().expect("refused");
    assert!(refused.to_string().contains("certificates"), "{refused}");
}

/// What becomes of a network.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Works,
    /// Nothing comes any more, and nobody says so.
    Silent,
    /// As when a process ends.
    Closed,
}

/// Carries connections to `address` until their fate is another.
async fn proxy(address: String) -> (SocketAddr, watch::Sender<Fate>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (fate, told) = watch::channel(Fate::Works);
    let listens = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (mut far, mut told) = (TcpStream::connect(&address).await.unwrap(), told.clone());
            tokio::spawn(async move {
                let end = async move { told.wait_for(|&fate| fate != Fate::Works).await.map(|fate| *fate) };
                let fate = tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => Fate::Closed,
                    fate = end => fate.unwrap_or(Fate::Closed),
                };
                if fate == Fate::Silent {
                    std::future::pending::<()>().await;
                }
            });
        }
    });
    (listens, fate)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_with_its_connection_and_when_nothing_comes_any_more() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(None));
    let (_handle, router) = router(&env, &checkpoint, model());
    let impatient = RpcConfig { silence: Duration::from_secs(1), tls: None };
    let call = async |address: &str| {
        let remote = Remote::connect(&env, address, &impatient).await?;
        remote.router(&router.hello(), router.id()).await
    };
    for fate in [Fate::Closed, Fate::Silent] {
        let (near, network) = proxy(worker.member.address.clone()).await;
        // A machine that is busy for half of the silence looks like one that is lost.
        let called = async {
            loop {
                match call(&near.to_string()).await {
                    Ok(session) => break session,
                    Err(error) => eprintln!("calls again: {error}"),
                }
            }
        };
        let session = tokio::time::timeout(LONG, called).await.expect("the worker answers");
        let attended = tokio::spawn({
            let router = router.clone();
            async move { router.attend(session).await }
        });
        network.send_replace(fate);
        tokio::time::timeout(LONG, attended).await.expect("the end is noticed").unwrap();
    }
}
