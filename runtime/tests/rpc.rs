//! Sessions over gRPC: messages, refusals, and how the end of a session is noticed.

#[path = "../../backends/wire/tests/authority/mod.rs"]
mod authority;
mod revoked;

use self::authority::{Authority, SERIAL};
use crate::fleet::{ask, greedy, prompt, request};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{DType, Device};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::api::Placements;
use mixfleet_runtime::engine::{
    EngineConfig, EngineParts, HandOffLimits, Identity, InstanceLimits, InstanceSpec, Links, Loaded,
};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::fleet::registry::{InstanceRecord, LinkState, Member, Members, Seat};
use mixfleet_runtime::fleet::rpc::{
    self, CallError, Certificates, End, FleetListener, Kind, ProbeLinks, Remote, RpcConfig, Token, Trust,
};
use mixfleet_runtime::fleet::{
    Hub, ModelIdentity, Router, RouterId, SessionRefusal, WorkerProcess, connect_peers, connect_workers,
};
use mixfleet_runtime::metrics::Metrics;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::EngineHandle;
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, PrefillCoefficients};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_wire::{HostRegion, Shm, TlsFiles, TlsPem};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const NAME: &str = "mixfleet";

/// An end is noticed long before this, which only ends a failing test.
const LONG: Duration = Duration::from_secs(60);

/// A certificate authority of a fleet.
struct FleetAuthority(Authority);

impl FleetAuthority {
    fn new() -> Self {
        FleetAuthority(Authority::new())
    }

    /// Certificates with this name, which trust `authority`.
    fn believing(&self, authority: &FleetAuthority, name: &str) -> Trust {
        let (authority, (certificates, key)) = (authority.0.pem(), self.0.signs(&[name]));
        let pem = TlsPem {
            authority: &authority,
            certificates: &certificates,
            key: &key,
            revoked: "",
            fleet: NAME,
        };
        known(mixfleet_wire::TlsIdentity::new(&pem).unwrap())
    }

    fn named(&self, name: &str) -> Trust {
        self.believing(self, name)
    }

    fn member(&self) -> Trust {
        self.named(NAME)
    }
}

/// A member's certificates, and different ones to call with, for an intruder.
#[derive(Debug)]
struct Known {
    identity: Arc<mixfleet_wire::TlsIdentity>,
    client: Option<Arc<rustls::ClientConfig>>,
}

fn known(identity: mixfleet_wire::TlsIdentity) -> Trust {
    Trust::Tls(Arc::new(Known { identity: Arc::new(identity), client: None }))
}

impl Certificates for Known {
    fn server(&self) -> Arc<rustls::ServerConfig> {
        self.identity.control_server()
    }
    fn client(&self) -> Arc<rustls::ClientConfig> {
        self.client.clone().unwrap_or_else(|| self.identity.control_client())
    }
    fn name(&self) -> ServerName<'static> {
        self.identity.server_name()
    }
    fn is_of(&self, certificate: &CertificateDer<'_>, kind: Kind) -> bool {
        let kind = match kind {
            Kind::Router => mixfleet_wire::TlsMemberKind::Router,
            Kind::Worker => mixfleet_wire::TlsMemberKind::Worker,
        };
        self.identity.is_of(certificate, kind)
    }
    fn watch(&self, shown: &[CertificateDer<'_>], end: End) -> rpc::Watch {
        let end = match end {
            End::Caller => mixfleet_wire::TlsEnd::Caller,
            End::Called => mixfleet_wire::TlsEnd::Called,
        };
        let mut watch = self.identity.watch(shown, end);
        Box::new(move || watch.is_believed())
    }
}

/// The token of all processes of one user.
fn token() -> Trust {
    Trust::Token(Token::parse(&"5a".repeat(32)).unwrap())
}

/// A configuration in which a busy machine does not count as lost.
fn config(trust: Trust) -> RpcConfig {
    RpcConfig { silence: LONG, trust }
}

fn model() -> ModelIdentity {
    ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() }
}

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

fn real_env() -> SharedEnv {
    Arc::new(RealEnv::new(tokio::runtime::Handle::current()))
}

/// A worker process with one device, within this process.
struct Worker {
    hub: Hub,
    probe_links: ProbeLinks,
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
        prefill_tokens_beside_decode_max: Some(12),
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
        degraded: false,
    };
    let process = WorkerProcess {
        env: env.clone(),
        model: model(),
        instances: vec![(InstanceId(id), loaded, CostModel::Coefficients(cost))],
        links: links.clone(),
        hand_off,
        metrics: Metrics::new(),
    };
    let (hub, probe_links) = (process.start().unwrap(), ProbeLinks { links, hand_off });
    let door = FleetListener::open(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), config).unwrap();
    let seat = Seat::Worker { instances: vec![record], transports: vec!["shm".into()], not_offered: vec![] };
    let member = Member::new(model(), door.address().to_string(), seat);
    tokio::spawn(door.serve(env.clone(), hub.clone(), probe_links.clone()));
    Worker { hub, probe_links, member }
}

fn router(env: &SharedEnv, checkpoint: &Checkpoint, model: ModelIdentity) -> (EngineHandle, Router) {
    let parts = EngineParts {
        env: env.clone(),
        config: Arc::new(checkpoint.config.clone()),
        identity: Identity::new(model.digest, model.tokenizer_digest, [1, 2]),
        limits: EngineConfig::default(),
        events: None,
        placements: Arc::new(Placements::new(1)),
        metrics: Metrics::new(),
    };
    parts.start_router(RouterId(7), DType::F32)
}

fn members(workers: &[&Worker]) -> Members {
    Arc::new(workers.iter().map(|w| (w.member.name(), w.member.clone())).collect::<BTreeMap<_, _>>())
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_on_one_process_and_decode_on_another_under_tls() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    let config = || config(authority.member());
    let prefill = worker(&env, &checkpoint, 3, Role::Prefill, config());
    let decode = worker(&env, &checkpoint, 5, Role::Decode, config());
    let (handle, router) = router(&env, &checkpoint, model());
    let (_known, known) = watch::channel(members(&[&prefill, &decode]));
    tokio::spawn(connect_workers(env.clone(), router, known.clone(), config()));
    let (own, mut said) = watch::channel(decode.member.clone());
    let (hub, probe_links) = (decode.hub.clone(), decode.probe_links.clone());
    tokio::spawn(connect_peers(env.clone(), hub, probe_links, known, own, config()));
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
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(authority.member()));
    let (_handle, router) = router(&env, &checkpoint, model());
    let call = async |config: &RpcConfig| {
        let remote = Remote::connect(&env, &worker.member.address, config).await?;
        remote.router(&router.hello(), router.id()).await.map(drop)
    };
    assert_eq!(call(&config(authority.member())).await, Ok(()));
    let anonymous = |versions: &[&'static rustls::SupportedProtocolVersion], with_certificate: bool| {
        let (certificate, key) = authority.0.signs(&[NAME]);
        let der = |text: &str| CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(der(&authority.0.pem())).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        let mut client = match with_certificate {
            true => {
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                client.with_client_auth_cert(vec![der(&certificate)], key).unwrap()
            }
            false => client.with_no_client_auth(),
        };
        client.alpn_protocols = vec![b"h2".to_vec()];
        let (certificates, key, ca) = (&certificate, &key, &authority.0.pem());
        let pem = TlsPem { authority: ca, certificates, key, revoked: "", fleet: NAME };
        let identity = mixfleet_wire::TlsIdentity::new(&pem).unwrap();
        Trust::Tls(Arc::new(Known { identity: Arc::new(identity), client: Some(Arc::new(client)) }))
    };
    let (new, old) = (&rustls::version::TLS13, &rustls::version::TLS12);
    assert_eq!(call(&config(anonymous(&[new], true))).await, Ok(()));
    let foreign = FleetAuthority::new();
    for stranger in [
        token(),
        foreign.member(),
        foreign.believing(&authority, NAME),
        anonymous(&[new], false),
        anonymous(&[old], true),
    ] {
        let refused = call(&config(stranger.clone())).await;
        assert!(matches!(refused, Err(CallError::Failed(_))), "{stranger:?}: {refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_model_is_refused_with_the_reason() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(token()));
    let remote = Remote::connect(&env, &worker.member.address, &config(token())).await.unwrap();
    let other = ModelIdentity { digest: "another".into(), ..model() };
    let (_handle, router) = router(&env, &checkpoint, other);
    let refused = remote.router(&router.hello(), router.id()).await.unwrap_err();
    assert_eq!(refused, CallError::Refused(SessionRefusal::Model { what: "model".into() }));
    let refused = remote.peer(&router.hello(), &[InstanceId(9)], Default::default()).await.unwrap_err();
    assert!(refused.to_string().contains("--model"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_means_a_process_that_is_gone_or_has_its_ids_is_refused() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(token()));
    let remote = Remote::connect(&env, &worker.member.address, &config(token())).await.unwrap();
    let (_handle, router) = router(&env, &checkpoint, model());
    // A restarted process may be called by the record of its earlier life, which outlives it by a lease.
    let earlier = router.hello().to(Some(InstanceId(0)));
    let gone = CallError::Refused(SessionRefusal::Elsewhere(InstanceId(0)));
    assert_eq!(remote.router(&earlier, router.id()).await.unwrap_err(), gone);
    assert_eq!(remote.peer(&earlier, &[InstanceId(1)], Default::default()).await.unwrap_err(), gone);
    let itself = remote.peer(&router.hello(), &[InstanceId(1)], Default::default()).await.unwrap_err();
    assert_eq!(itself, CallError::Refused(SessionRefusal::Twice(InstanceId(1))));
    let meant = router.hello().to(Some(InstanceId(1)));
    assert!(remote.router(&meant, router.id()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_listened_to_beyond_this_host_in_the_clear() {
    let wide = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let refused = FleetListener::open(wide, config(token())).err().expect("refused");
    assert!(refused.to_string().contains("certificates"), "{refused}");
    let refused = Remote::connect(&real_env(), "192.0.2.1:9", &config(token())).await.err().expect("refused");
    assert!(refused.to_string().contains("certificates"), "{refused}");
}

/// The state of a network.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Works,
    /// Nothing arrives any more, and no error is reported.
    Silent,
    /// Connections close, as when a process ends.
    Closed,
}

/// Forwards connections to `address` until the state changes.
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
    let authority = FleetAuthority::new();
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(authority.member()));
    let (_handle, router) = router(&env, &checkpoint, model());
    // With a token a caller means an address, which the proxy does not have.
    let impatient = RpcConfig { silence: Duration::from_secs(1), trust: authority.member() };
    let call = async |address: &str| {
        let remote = Remote::connect(&env, address, &impatient).await?;
        remote.router(&router.hello(), router.id()).await
    };
    for fate in [Fate::Closed, Fate::Silent] {
        let (near, network) = proxy(worker.member.address.clone()).await;
        // A machine that is busy for half of the silence looks like a lost one.
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
            async move { router.add_worker(session).await }
        });
        network.send_replace(fate);
        tokio::time::timeout(LONG, attended).await.expect("the end is noticed").unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_have_this_users_token_is_refused() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(token()));
    let (_handle, router) = router(&env, &checkpoint, model());
    let other = Trust::Token(Token::parse(&Token::random_text().unwrap()).unwrap());
    let stranger = Remote::connect(&env, &worker.member.address, &config(other)).await.unwrap();
    let hello = router.hello();
    let refusals = [
        stranger.router(&hello, router.id()).await.map(drop).unwrap_err(),
        stranger.peer(&hello, &[InstanceId(9)], Default::default()).await.map(drop).unwrap_err(),
    ];
    assert!(refusals.iter().all(|refused| refused.to_string().contains("token")), "{refusals:?}");
    let member = Remote::connect(&env, &worker.member.address, &config(token())).await.unwrap();
    assert!(member.router(&hello, router.id()).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_was_proved_to_another_address_is_refused() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(token()));
    let (_handle, router) = router(&env, &checkpoint, model());
    // An intruder claims in etcd that it is the worker, and forwards what it gets.
    let (between, _network) = proxy(worker.member.address.clone()).await;
    let remote = Remote::connect(&env, &between.to_string(), &config(token())).await.unwrap();
    let refused = remote.router(&router.hello(), router.id()).await.map(drop).unwrap_err();
    assert!(refused.to_string().contains("token"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_callers_certificate_says_what_it_may_call() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(authority.named("worker.mixfleet")));
    let (_handle, router) = router(&env, &checkpoint, model());
    let hello = router.hello();
    for (at, (name, as_router, as_worker)) in [
        ("mixfleet", true, true),
        ("router.mixfleet", true, false),
        ("worker.mixfleet", false, true),
        ("other", false, false),
    ]
    .into_iter()
    .enumerate()
    {
        let call = async |kind: Kind| {
            let trust = config(authority.named(name));
            let remote = Remote::connect(&env, &worker.member.address, &trust).await?;
            let peers = [InstanceId(10 + at as u32)];
            match kind {
                Kind::Router => remote.router(&hello, router.id()).await.map(drop),
                Kind::Worker => remote.peer(&hello, &peers, Default::default()).await.map(drop),
            }
        };
        for (kind, is_let) in [(Kind::Router, as_router), (Kind::Worker, as_worker)] {
            let called = call(kind).await;
            assert_eq!(called.is_ok(), is_let, "{name} as {kind:?}: {called:?}");
        }
    }
    // The called process must have a worker's certificate.
    let decoy = self::worker(&env, &checkpoint, 2, Role::Auto, config(authority.named("router.mixfleet")));
    let called = Remote::connect(&env, &decoy.member.address, &config(authority.member())).await;
    let refused = called.err().expect("refused").to_string();
    assert!(refused.contains("certificate"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_renewed_and_taken_back_without_a_new_start() {
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    let directory = std::env::temp_dir().join(format!("mixfleet-rpc-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let write = |name: &str, text: String| {
        std::fs::write(directory.join(name), text).unwrap();
        directory.join(name)
    };
    let member = |name: &str| {
        let (certificate, key) = authority.0.signs(&[name]);
        (write("member.pem", certificate), write("member.key", key))
    };
    // This is a router's certificate, by mistake.
    let (certificates, key) = member("router.mixfleet");
    let files = TlsFiles {
        authority: write("ca.pem", authority.0.pem()),
        certificates,
        key,
        revoked: Some(write("crl.pem", authority.0.revokes(&[]))),
        fleet: NAME.into(),
    };
    let trust = known(mixfleet_wire::TlsIdentity::of_files(files, Box::new(|_| {})).unwrap());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(trust));
    let (_handle, router) = router(&env, &checkpoint, model());
    let call = async || {
        let remote = Remote::connect(&env, &worker.member.address, &config(authority.member())).await?;
        remote.router(&router.hello(), router.id()).await.map(drop)
    };
    let until = async |is_let: bool| {
        let wait = async {
            while call().await.is_ok() != is_let {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(LONG, wait).await.expect("files are looked at each second");
    };
    assert!(call().await.is_err());
    member(NAME);
    until(true).await;
    write("crl.pem", authority.0.revokes(&[SERIAL]));
    until(false).await;
    write("crl.pem", authority.0.revokes(&[SERIAL + 1]));
    until(true).await;
    std::fs::remove_dir_all(directory).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_another_process_is_already_is_refused() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let worker = worker(&env, &checkpoint, 1, Role::Auto, config(token()));
    let remote = Remote::connect(&env, &worker.member.address, &config(token())).await.unwrap();
    let (_one, one) = router(&env, &checkpoint, model());
    let (_other, other) = router(&env, &checkpoint, model());
    let first = remote.router(&one.hello(), RouterId(7)).await.unwrap();
    let taken = CallError::Refused(SessionRefusal::RouterTaken(RouterId(7)));
    assert_eq!(remote.router(&other.hello(), RouterId(7)).await.map(drop), Err(taken));
    assert!(remote.router(&one.hello(), RouterId(7)).await.is_ok());
    drop(first);
    let free = async {
        while remote.router(&other.hello(), RouterId(7)).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, free).await.expect("the id is free when its sessions have ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_strangers_keep_no_member_out_and_do_not_stay() {
    let (env, checkpoint) = (real_env(), checkpoint());
    let impatient = RpcConfig { silence: Duration::from_secs(2), trust: token() };
    let worker = worker(&env, &checkpoint, 1, Role::Auto, impatient);
    let (_handle, router) = router(&env, &checkpoint, model());
    let mut strangers = Vec::new();
    for _ in 0..100 {
        strangers.push(TcpStream::connect(&worker.member.address).await.unwrap());
    }
    let remote = Remote::connect(&env, &worker.member.address, &config(token())).await.unwrap();
    let session = remote.router(&router.hello(), router.id()).await.unwrap();
    for mut stranger in strangers {
        let mut said = Vec::new();
        let end = tokio::io::AsyncReadExt::read_to_end(&mut stranger, &mut said);
        // The session must end in some way.
        let _ = tokio::time::timeout(LONG, end).await.expect("a stranger is sent away");
    }
    assert!(!session.out.is_closed());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_takes_a_call_and_never_answers_is_given_up() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let mut taken = Vec::new();
        while let Ok((socket, _)) = listener.accept().await {
            taken.push(socket);
        }
    });
    let (env, checkpoint, authority) = (real_env(), checkpoint(), FleetAuthority::new());
    let (_handle, router) = router(&env, &checkpoint, model());
    for trust in [token(), authority.member()] {
        let impatient = RpcConfig { silence: Duration::from_secs(1), trust };
        let call = async {
            let remote = Remote::connect(&env, &address, &impatient).await?;
            remote.router(&router.hello(), router.id()).await.map(drop)
        };
        let called = tokio::time::timeout(LONG, call).await.expect("it is given up");
        assert!(matches!(called, Err(CallError::Failed(_))), "{called:?}");
    }
}
