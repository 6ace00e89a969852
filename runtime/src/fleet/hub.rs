//! The hub of a worker process, which serves several routers and peers.

use super::ledger::{BEAT, OrderedWork, WorkLedger, WorkUpdate};
use super::registry::InstanceState;
use super::rights::{Listening, RouterOrders, relay};
use super::seats::{Seat, Seats};
use super::session::{
    Caller, Command, Hello, InstanceReport, ModelIdentity, PeerMessage, Session, SessionRefusal,
};
use crate::engine::directory::{Directory, Inboxes};
use crate::engine::instance::Surroundings;
use crate::engine::messages::{EndNotice, FromWorker, KvMessage, Report, ToWorker};
use crate::engine::{HandOffLimits, Held, Links, Loaded};
use crate::env::SharedEnv;
use crate::mailbox::{INBOX_MAX, MessageReceiver, MessageSender, REPORTS_MAX, mailbox};
use crate::metrics::Metrics;
use crate::request::RouterId;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_i64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{CostModel, LinkCost};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use mixfleet_scheduler::quarantine::QUARANTINE;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

/// Maximum number of sessions that wait to begin or end; further ones are refused.
const EVENTS_MAX: usize = 1024;

/// Commands of routers that may wait for the ledger; sessions wait while there are more.
const GIVEN_MAX: usize = 1024;

/// Ends of instances, reported to routers that come later.
const ENDS_MAX: usize = 1024;

/// The configuration of a process with devices.
pub struct WorkerProcess {
    /// The environment.
    pub env: SharedEnv,
    /// The model that it serves.
    pub model: ModelIdentity,
    /// Its instances, with ids that are unique in the fleet.
    pub instances: Vec<(InstanceId, Loaded, CostModel)>,
    /// Its transports to other memories.
    pub links: Links,
    /// Limits of KV staging.
    pub hand_off: HandOffLimits,
    /// The process's metrics.
    pub metrics: Metrics,
}

/// A running worker process. It ends when the last clone is gone.
#[derive(Clone, Debug)]
pub struct Hub {
    model: ModelIdentity,
    caller: Caller,
    instances: Vec<InstanceId>,
    events: mpsc::Sender<Event>,
    router_seats: Seats<RouterId>,
    peer_seats: Seats<InstanceId>,
    states: watch::Receiver<BTreeMap<InstanceId, InstanceState>>,
}

enum Event {
    Router {
        seat: Seat<RouterId>,
        session: Session<InstanceReport, Command>,
        clock: Option<Seconds>,
    },
    Peer {
        instances: Vec<InstanceId>,
        cost: LinkCost,
        session: Session<PeerMessage, PeerMessage>,
        seats: PeerSeats,
    },
    Inspect(mpsc::Sender<Held>),
    /// Answer lengths must be reported now.
    Beat,
    RouterGone {
        router: RouterId,
        session: u64,
    },
    PeerGone {
        instances: Vec<InstanceId>,
        session: u64,
    },
}

/// The seats of a calling peer; empty for a peer that was called.
type PeerSeats = Vec<Seat<InstanceId>>;

impl WorkerProcess {
    /// Starts the instances, and a hub that lets routers and peers reach them.
    ///
    /// # Errors
    /// When a device gives no queue or no staging memory.
    pub fn start(self) -> Result<Hub> {
        let WorkerProcess { env, model, instances, links, hand_off, metrics } = self;
        let (reports, incoming) = mailbox("reports", REPORTS_MAX);
        let directory = Directory::default();
        let surroundings = Surroundings {
            env: env.clone(),
            links,
            hand_off,
            directory: directory.clone(),
            reports,
            metrics: metrics.clone(),
        };
        let ids: Vec<InstanceId> = instances.iter().map(|(id, ..)| *id).collect();
        for (id, loaded, cost) in instances {
            loaded.start(id, cost, &surroundings)?;
        }
        crate::engine::join(&ids, &surroundings);
        drop(surroundings);
        let (events, told) = mpsc::channel(EVENTS_MAX);
        let (given, commands) = mpsc::channel(GIVEN_MAX);
        let (told_states, states) = watch::channel(BTreeMap::new());
        let running = HubTask {
            env: env.clone(),
            directory,
            known: ids.iter().map(|&id| (id, Known::default())).collect(),
            routers: BTreeMap::new(),
            ledger: WorkLedger::default(),
            ends: VecDeque::new(),
            beating: false,
            peers: BTreeMap::new(),
            sessions: 0,
            open: BTreeMap::new(),
            metrics: metrics.clone(),
            events: events.downgrade(),
            given,
            states: told_states,
        };
        env.spawn(Box::pin(running.serve(incoming, told, commands)));
        let (router_seats, peer_seats) = (Seats::default(), Seats::default());
        let caller = Caller::new(&*env);
        Ok(Hub { model, caller, instances: ids, events, router_seats, peer_seats, states })
    }
}

impl Hub {
    /// The ids of its instances.
    pub fn instances(&self) -> &[InstanceId] {
        &self.instances
    }

    /// The states that its instances have now; routers change their roles.
    pub fn states(&self) -> watch::Receiver<BTreeMap<InstanceId, InstanceState>> {
        self.states.clone()
    }

    /// The greeting with which this process calls a peer.
    pub fn hello(&self) -> Hello {
        Hello::new(self.model.clone(), self.caller)
    }

    /// Completes when the last instance is down.
    pub async fn ended(&self) {
        self.events.closed().await;
    }

    fn tell(&self, event: Event) -> std::result::Result<(), SessionRefusal> {
        self.events.try_send(event).map_err(|error| match error {
            TrySendError::Full(_) => SessionRefusal::Busy,
            TrySendError::Closed(_) => SessionRefusal::Ending,
        })
    }

    /// Checks that a caller belongs to the same fleet, and means this process.
    pub(super) fn check(&self, hello: &Hello) -> std::result::Result<(), SessionRefusal> {
        hello.check(&self.model)?;
        match hello.callee.filter(|callee| !self.instances.contains(callee)) {
            Some(callee) => Err(SessionRefusal::Elsewhere(callee)),
            None => Ok(()),
        }
    }

    /// Accepts a router, and returns the router's end of the session.
    ///
    /// # Errors
    /// When the caller has another version, serves another model, means another process or uses another
    /// router's id, or when this process is ending.
    pub fn accept_router(
        &self,
        hello: &Hello,
        router: RouterId,
    ) -> std::result::Result<Session<Command, InstanceReport>, SessionRefusal> {
        self.check(hello)?;
        let seat = self.router_seats.take(router, hello.caller).ok_or(SessionRefusal::RouterTaken(router))?;
        let (theirs, ours) = Session::pair();
        let event = Event::Router { seat, session: ours, clock: hello.clock };
        self.tell(event)?;
        Ok(theirs)
    }

    /// Accepts a process with `instances` as a peer for KV over a link of this cost, and returns the caller's
    /// end of the session.
    ///
    /// # Errors
    /// When the caller has another version, serves another model, means another process or uses an id of this
    /// process or of another peer, or when this process is ending.
    pub fn accept_peer(
        &self,
        hello: &Hello,
        instances: Vec<InstanceId>,
        cost: LinkCost,
    ) -> std::result::Result<Session<PeerMessage, PeerMessage>, SessionRefusal> {
        self.check(hello)?;
        if let Some(&twice) = instances.iter().find(|&instance| self.instances.contains(instance)) {
            return Err(SessionRefusal::Twice(twice));
        }
        let seat = |&id: &InstanceId| {
            self.peer_seats.take(id, hello.caller).ok_or(SessionRefusal::InstanceTaken(id))
        };
        let seats = instances.iter().map(seat).collect::<std::result::Result<PeerSeats, SessionRefusal>>()?;
        let (theirs, ours) = Session::pair();
        let event = Event::Peer { instances, cost, session: ours, seats };
        self.tell(event)?;
        Ok(theirs)
    }

    /// The blocks that each instance holds after its current step, for checks of routers' indexes. Instances
    /// that are down are missing.
    pub async fn held(&self) -> Held {
        let (answer, mut answers) = mpsc::channel(self.instances.len().max(1));
        let _ = self.events.send(Event::Inspect(answer)).await;
        let mut held = Held::new();
        while let Some(mut more) = answers.recv().await {
            held.append(&mut more);
        }
        held
    }

    /// Exchanges KV with a process with `instances`, which has accepted the other end of `session`.
    pub fn add_peer(
        &self,
        instances: Vec<InstanceId>,
        cost: LinkCost,
        session: Session<PeerMessage, PeerMessage>,
    ) {
        // If there is no room for it the session ends, and the other end calls again.
        let _ = self.tell(Event::Peer { instances, cost, session, seats: PeerSeats::new() });
    }
}

/// The state of an instance that later routers must be told.
#[derive(Default)]
struct Known {
    /// Its `Up` message; none once it is down.
    up: Option<FromWorker>,
    /// Whether it was up before, and failed.
    failed: bool,
    stored: BTreeMap<Tier, BTreeSet<BlockHash>>,
    tiers: BTreeMap<Tier, LinkCost>,
    links: BTreeMap<InstanceId, LinkCost>,
}

struct HubTask {
    env: SharedEnv,
    directory: Directory,
    known: BTreeMap<InstanceId, Known>,
    routers: BTreeMap<RouterId, (u64, MessageSender<InstanceReport>)>,
    /// Work that routers gave to the instances.
    ledger: WorkLedger,
    /// Instances that routers lost with a request, and when they said so.
    ends: VecDeque<(Seconds, EndNotice)>,
    /// Whether the next beat is scheduled.
    beating: bool,
    /// Sessions to peers, by each of their instances.
    peers: BTreeMap<InstanceId, u64>,
    /// Number of sessions so far.
    sessions: u64,
    /// Open sessions; each ends when its sender is dropped.
    open: BTreeMap<u64, oneshot::Sender<()>>,
    metrics: Metrics,
    events: mpsc::WeakSender<Event>,
    /// Receives routers' commands for the ledger.
    given: mpsc::Sender<(InstanceId, OrderedWork)>,
    states: States,
}

/// The states of this process's instances, which its record in the registry follows.
type States = watch::Sender<BTreeMap<InstanceId, InstanceState>>;

/// Changes the state that the fleet knows of an instance.
fn note(states: &States, instance: InstanceId, change: impl FnOnce(&mut InstanceState)) {
    states.send_if_modified(|states| {
        let before = states.get(&instance).copied();
        change(states.entry(instance).or_default());
        states.get(&instance).copied() != before
    });
}

impl HubTask {
    async fn serve(
        mut self,
        mut reports: MessageReceiver<Report>,
        mut told: mpsc::Receiver<Event>,
        mut commands: mpsc::Receiver<(InstanceId, OrderedWork)>,
    ) {
        loop {
            tokio::select! {
                biased;
                event = told.recv() => match event {
                    Some(event) => self.event(event),
                    None => return,
                },
                // The ledger learns of a command before the instance can report on it.
                Some((instance, given)) = commands.recv() => {
                    if let OrderedWork::Ended { of, notice } = given {
                        self.ended(of, instance, notice);
                        continue;
                    }
                    let news = self.ledger.commanded(instance, &given, self.env.unix_time());
                    self.spread(news);
                }
                report = reports.recv() => match report {
                    Some((instance, message)) => self.report(instance, message),
                    None => return,
                },
            }
        }
    }

    /// Sends a report to the router of its request, or to all routers if it concerns the instance.
    fn report(&mut self, instance: InstanceId, message: FromWorker) {
        if let Some(request) = message.request() {
            let news = self.ledger.reported(instance, &message, self.env.unix_time());
            self.spread(news);
            self.tell(RouterId::of(request), instance, message);
            return;
        }
        let Some(known) = self.known.get_mut(&instance) else { return };
        match &message {
            FromWorker::Stored { tier, hashes } => known.stored.entry(*tier).or_default().extend(hashes),
            FromWorker::Evicted { tier, hashes } => {
                let stored = known.stored.entry(*tier).or_default();
                hashes.iter().for_each(|hash| _ = stored.remove(hash));
            }
            FromWorker::Tier { tier, cost } => {
                known.tiers.insert(*tier, *cost);
            }
            FromWorker::Link { to, cost } => {
                known.links.insert(*to, *cost);
            }
            FromWorker::LinkDown { to } => {
                known.links.remove(to);
            }
            FromWorker::Load(load) => {
                if let Some(FromWorker::Up { instance, .. }) = &known.up {
                    self.metrics.load(&instance.device, load);
                }
                let degraded = load.is_degraded;
                note(&self.states, instance, |state| state.degraded = degraded);
            }
            FromWorker::Up { instance: told, .. } => {
                let role = told.role;
                known.up = Some(message.clone());
                if std::mem::take(&mut known.failed) {
                    self.part();
                }
                note(&self.states, instance, |state| state.role = role);
            }
            FromWorker::Down(_) => {
                *known = Known { failed: true, ..Known::default() };
                note(&self.states, instance, |state| state.degraded = false);
                self.ledger.down(instance);
                // This process continues, and so do the links of others to it.
                let others = self.known.keys().chain(self.peers.keys()).filter(|&&other| other != instance);
                for &other in others {
                    self.directory.tell(other, instance, KvMessage::Down);
                }
            }
            _ => {}
        }
        let up = self.known.values().filter(|known| known.up.is_some()).count();
        self.metrics.instances.set(to_i64(up));
        for &router in self.routers.keys() {
            self.tell(router, instance, message.clone());
        }
    }

    fn tell(&self, router: RouterId, instance: InstanceId, message: FromWorker) {
        if let Some((_, out)) = self.routers.get(&router) {
            // The session's task notices that a router is gone.
            let _ = out.send(InstanceReport { instance, message });
        }
    }

    /// Reports to the other routers, and to later ones, that one of them lost an instance.
    fn ended(&mut self, of: RouterId, instance: InstanceId, notice: EndNotice) {
        let is_same = |known: &EndNotice| (known.engine, known.digest) == (notice.engine, notice.digest);
        let now = self.env.now();
        while self.ends.front().is_some_and(|(at, _)| (now - *at).0 > QUARANTINE.0) {
            self.ends.pop_front();
        }
        if self.ends.iter().any(|(_, known)| is_same(known) && (known.is_certain || !notice.is_certain)) {
            return;
        }
        self.ends.retain(|(_, known)| !is_same(known));
        if self.ends.len() == ENDS_MAX {
            self.ends.pop_front();
        }
        self.ends.push_back((now, notice));
        for &router in self.routers.keys().filter(|&&router| router != of) {
            self.tell(router, instance, FromWorker::Ended(notice));
        }
    }

    /// Tells each router of the others' work.
    fn spread(&mut self, news: Vec<WorkUpdate>) {
        if self.routers.len() > 1 {
            for WorkUpdate { of, instance, work } in news {
                for &router in self.routers.keys().filter(|&&router| router != of) {
                    self.tell(router, instance, FromWorker::Others(vec![work]));
                }
            }
        }
        if self.ledger.has_grown() && !std::mem::replace(&mut self.beating, true) {
            let (env, events) = (self.env.clone(), self.events.clone());
            let since_s = self.env.now().0 % BEAT.as_secs_f64();
            self.env.spawn(Box::pin(async move {
                env.sleep(BEAT.saturating_sub(Duration::from_secs_f64(since_s))).await;
                if let Some(events) = events.upgrade() {
                    let _ = events.send(Event::Beat).await;
                }
            }));
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Router { seat, session, clock } => self.router(seat, session, clock),
            Event::Peer { instances, cost, session, seats } => self.peer(instances, cost, session, seats),
            Event::Inspect(answer) => {
                for &instance in self.known.keys() {
                    self.directory.manage(instance, ToWorker::Inspect(answer.clone()));
                }
            }
            Event::Beat => {
                self.beating = false;
                let news = self.ledger.beat(self.env.unix_time());
                self.spread(news);
            }
            Event::RouterGone { router, session } => {
                self.open.remove(&session);
                if self.routers.get(&router).is_some_and(|(current, _)| *current == session) {
                    self.routers.remove(&router);
                    self.abandon(router);
                }
            }
            Event::PeerGone { instances, session } => {
                self.open.remove(&session);
                self.peer_gone(&instances, session);
            }
        }
    }

    fn next_session(&mut self) -> u64 {
        self.sessions += 1;
        self.sessions
    }

    /// Ends all sessions after a failed instance was reopened: messages that others still send to it, or
    /// about it, belong to its earlier life. Callers call again.
    fn part(&mut self) {
        for router in std::mem::take(&mut self.routers).into_keys() {
            self.abandon(router);
        }
        for (peer, session) in self.peers.clone() {
            self.peer_gone(&[peer], session);
        }
        self.open.clear();
    }

    fn abandon(&mut self, router: RouterId) {
        let news = self.ledger.abandon(router);
        self.spread(news);
        for &instance in self.known.keys() {
            self.directory.manage(instance, ToWorker::Abandon { router });
        }
    }

    fn router(
        &mut self,
        seat: Seat<RouterId>,
        session: Session<InstanceReport, Command>,
        clock: Option<Seconds>,
    ) {
        let (router, now) = (*seat.id(), self.env.unix_time());
        // Requests of routers with different clocks meet here, so each due time is converted to the clock of
        // this process.
        let behind = clock.filter(|clock| clock.0.is_finite()).map_or(Seconds::ZERO, |clock| now - clock);
        let number = self.next_session();
        // The router has placed the requests of an earlier session again.
        self.abandon(router);
        self.routers.insert(router, (number, session.out));
        for (&instance, known) in &self.known {
            let Some(up) = &known.up else { continue };
            self.tell(router, instance, up.clone());
            let links = known.links.iter().map(|(&to, &cost)| FromWorker::Link { to, cost });
            let tiers = known.tiers.iter().map(|(&tier, &cost)| FromWorker::Tier { tier, cost });
            let stored = known.stored.iter();
            let stored = stored
                .map(|(&tier, blocks)| FromWorker::Stored { tier, hashes: blocks.iter().copied().collect() });
            links.chain(tiers).chain(stored).for_each(|message| self.tell(router, instance, message));
        }
        let up = self.known.iter().find(|(_, known)| known.up.is_some()).map(|(instance, _)| *instance);
        for (instance, (_, notice)) in up.into_iter().cycle().zip(&self.ends) {
            self.tell(router, instance, FromWorker::Ended(*notice));
        }
        for WorkUpdate { instance, work, .. } in self.ledger.all(now) {
            self.tell(router, instance, FromWorker::Others(vec![work]));
        }
        let from = RouterOrders { router, clock_behind: behind, given: self.given.clone() };
        let carried = self.listening().forward_orders(session.incoming, from);
        self.listen(number, carried, seat, Event::RouterGone { router, session: number });
    }

    fn listening(&self) -> Listening {
        let (own, directory) = (self.known.keys().copied().collect(), self.directory.clone());
        Listening { own, directory, refused: self.metrics.commands_refused.clone() }
    }

    /// Lets a session be carried until it ends, or this process ends it.
    fn listen(
        &mut self,
        number: u64,
        carried: impl Future<Output = ()> + Send + 'static,
        seat: impl Send + 'static,
        end: Event,
    ) {
        let events = self.events.clone();
        let (open, parted) = oneshot::channel();
        self.open.insert(number, open);
        self.env.spawn(Box::pin(async move {
            tokio::select! {
                biased;
                _ = parted => {}
                () = carried => {}
            }
            drop(seat);
            if let Some(events) = events.upgrade() {
                let _ = events.send(end).await;
            }
        }));
    }

    /// Sends messages for the peer's instances into the session, and receives its messages about KV.
    fn peer(
        &mut self,
        instances: Vec<InstanceId>,
        cost: LinkCost,
        session: Session<PeerMessage, PeerMessage>,
        seats: PeerSeats,
    ) {
        let number = self.next_session();
        // The messages lost by an earlier session are unknown.
        let old: Vec<(InstanceId, u64)> =
            instances.iter().filter_map(|&peer| Some((peer, *self.peers.get(&peer)?))).collect();
        old.into_iter().for_each(|(peer, session)| self.peer_gone(&[peer], session));
        for &peer in &instances {
            self.peers.insert(peer, number);
            let (words, messages) = mailbox("relay", INBOX_MAX);
            self.directory.enter(peer, Inboxes { orders: None, words: Some(words) });
            let to_peer = move |(from, word)| Some(PeerMessage { instance: peer, from, word });
            self.env.spawn(Box::pin(relay(messages, session.out.clone(), to_peer)));
        }
        let own: Vec<InstanceId> = self.known.keys().copied().collect();
        for (instance, &to) in own.into_iter().flat_map(|own| instances.iter().map(move |to| (own, to))) {
            self.report(instance, FromWorker::Link { to, cost });
        }
        let theirs: BTreeSet<InstanceId> = instances.iter().copied().collect();
        let (listening, incoming) = (self.listening(), session.incoming);
        let carried = async move { listening.forward_kv_messages(incoming, &theirs).await };
        self.listen(number, carried, seats, Event::PeerGone { instances, session: number });
    }

    fn peer_gone(&mut self, instances: &[InstanceId], session: u64) {
        let own: Vec<InstanceId> = self.known.keys().copied().collect();
        for &peer in instances {
            if self.peers.get(&peer) != Some(&session) {
                continue;
            }
            self.peers.remove(&peer);
            self.directory.leave(peer);
            for &instance in &own {
                self.directory.tell(instance, peer, KvMessage::Down);
                self.report(instance, FromWorker::LinkDown { to: peer });
            }
        }
    }
}
