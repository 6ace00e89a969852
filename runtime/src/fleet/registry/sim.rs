//! A store in a seeded environment that injects the faults of etcd.
//!
//! Leases end by virtual time. The store can be stopped, restarted, and lose its data; requests of a process
//! can be lost on either way (a lost response means that the write has happened), take long, or never be
//! answered; streams end, or become silent without an end. All of it is determined by the seed.

use super::RegistryError;
use super::records::Registry;
use super::store::{Change, Condition, Entry, Lease, Store, StoreAnswer, Watch};
use crate::env::SharedEnv;
use mixfleet_hal::units::Seconds;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::mpsc;

/// Faults of requests to the store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimFaults {
    /// Maximum latency in each direction, in seconds of virtual time.
    pub latency_s_max: f64,
    /// Requests per thousand that are lost, and never answered.
    pub lost_asks: u64,
    /// Requests per thousand whose answer is lost.
    pub lost_answers: u64,
    /// Requests per thousand that fail although they are carried out.
    pub failed_answers: u64,
    /// Changes per thousand after which a watch is silent, but does not end.
    pub silent_watches: u64,
}

/// Whether a process can reach the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reachability {
    /// It can.
    #[default]
    Up,
    /// Requests fail at once, and streams have ended.
    Refused,
    /// Requests are not answered, without any error.
    Silent,
}

/// A record, for checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimRecord {
    /// The written value.
    pub value: String,
    /// Whether it ends with a lease.
    pub is_leased: bool,
}

/// The store. Clones share it.
#[derive(Clone)]
pub struct SimRegistry(Arc<World>);

/// A process's client of a [`SimRegistry`].
#[derive(Clone)]
pub struct SimClient {
    world: Arc<World>,
    number: usize,
}

struct World {
    env: SharedEnv,
    faults: SimFaults,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: BTreeMap<String, Entry>,
    revision: i64,
    history: Vec<(i64, Change)>,
    leases: BTreeMap<Lease, Held>,
    /// Never reused, even after data loss, since etcd derives lease ids from the time.
    leases_given: i64,
    links: Vec<Reachability>,
    watches: Vec<Watcher>,
    is_stopped: bool,
    faults_now: bool,
}

struct Held {
    span: Duration,
    ends: Seconds,
}

struct Watcher {
    client: usize,
    prefix: String,
    from: i64,
    /// Whether it receives no further changes.
    is_silent: bool,
    told: mpsc::UnboundedSender<Vec<Change>>,
}

fn away() -> RegistryError {
    RegistryError::Etcd("the store is not reached".into())
}

impl SimRegistry {
    /// An empty store.
    pub fn new(env: &SharedEnv, faults: SimFaults) -> Self {
        let state = Mutex::new(State { faults_now: true, ..State::default() });
        SimRegistry(Arc::new(World { env: env.clone(), faults, state }))
    }

    /// A client for another process.
    pub fn client(&self) -> SimClient {
        let mut state = self.0.state();
        state.links.push(Reachability::Up);
        SimClient { world: self.0.clone(), number: state.links.len() - 1 }
    }

    /// Turns faults on or off.
    pub fn set_faults(&self, on: bool) {
        self.0.state().faults_now = on;
    }

    /// Stops answering until [`start`](Self::start).
    pub fn stop(&self) {
        let mut state = self.0.state();
        state.is_stopped = true;
        state.watches.clear();
    }

    /// Answers again. The time of leases begins anew, as in etcd.
    pub fn start(&self) {
        let now = self.0.env.now();
        let mut state = self.0.state();
        state.is_stopped = false;
        state.leases.values_mut().for_each(|lease| lease.ends = now + Seconds(lease.span.as_secs_f64()));
    }

    /// Deletes all data and ends all streams.
    pub fn lose_data(&self) {
        let mut state = self.0.state();
        state.watches.clear();
        state.keys.clear();
        state.leases.clear();
        state.history.clear();
        state.revision = 0;
    }

    /// Removes all keys; leases stay.
    pub fn remove_keys(&self) {
        let mut state = self.0.state();
        let keys: Vec<String> = state.keys.keys().cloned().collect();
        keys.into_iter().for_each(|key| self.0.remove(&mut state, key));
    }

    /// All keys.
    pub fn records(&self) -> BTreeMap<String, SimRecord> {
        let mut state = self.0.state();
        self.0.end_leases(&mut state);
        let record = |entry: &Entry| SimRecord {
            value: String::from_utf8_lossy(&entry.value).into_owned(),
            is_leased: entry.lease != 0,
        };
        state.keys.iter().map(|(key, entry)| (key.clone(), record(entry))).collect()
    }
}

impl SimClient {
    /// The registry of `fleet` for this process.
    pub fn registry(&self, fleet: &str, lease: Duration) -> Registry {
        Registry::over(&self.world.env, Arc::new(self.clone()), fleet, lease)
    }

    /// Sets whether this process reaches the store, for later and pending requests.
    pub fn set_link(&self, link: Reachability) {
        let mut state = self.world.state();
        state.links[self.number] = link;
        match link {
            Reachability::Up => {}
            Reachability::Refused => state.watches.retain(|watcher| watcher.client != self.number),
            Reachability::Silent => {
                let its = state.watches.iter_mut().filter(|watcher| watcher.client == self.number);
                its.for_each(|watcher| watcher.is_silent = true);
            }
        }
    }

    /// One direction of a request between this process and the store.
    async fn travel(&self, lost: u64) -> Result<(), RegistryError> {
        let world = &self.world;
        let share = world.env.random() as f64 / u64::MAX as f64;
        world.env.sleep(Duration::from_secs_f64(share * world.faults.latency_s_max)).await;
        let (link, is_stopped) = {
            let state = world.state();
            (state.links[self.number], state.is_stopped)
        };
        if link == Reachability::Silent || world.happens(lost) {
            return std::future::pending().await;
        }
        if link == Reachability::Refused || is_stopped { Err(away()) } else { Ok(()) }
    }

    fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<World>, &mut State) -> Result<T, RegistryError> + Send + 'static,
    ) -> StoreAnswer<'_, T> {
        Box::pin(async move {
            self.travel(self.world.faults.lost_asks).await?;
            let answer = {
                let mut state = self.world.state();
                self.world.end_leases(&mut state);
                work(&self.world, &mut state)
            };
            self.travel(self.world.faults.lost_answers).await?;
            if self.world.happens(self.world.faults.failed_answers) { Err(away()) } else { answer }
        })
    }
}

impl World {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn happens(&self, of_a_thousand: u64) -> bool {
        of_a_thousand > 0 && self.state().faults_now && self.env.random() % 1000 < of_a_thousand
    }

    fn tell(&self, state: &mut State, change: Change) {
        let (Change::Put { key, .. } | Change::Gone { key }) = &change;
        let silent = if state.faults_now { self.faults.silent_watches } else { 0 };
        let revision = state.revision;
        for watcher in state.watches.iter_mut().filter(|w| key.starts_with(&w.prefix) && revision >= w.from) {
            watcher.is_silent |= silent > 0 && self.env.random() % 1000 < silent;
            if !watcher.is_silent {
                let _ = watcher.told.send(vec![change.clone()]);
            }
        }
        state.history.push((revision, change));
    }

    fn put(&self, state: &mut State, key: String, value: Vec<u8>, lease: Lease) {
        state.revision += 1;
        let revision = state.revision;
        let created = state.keys.get(&key).map_or(revision, |entry| entry.created);
        state.keys.insert(key.clone(), Entry { value: value.clone(), created, revision, lease });
        self.tell(state, Change::Put { key, value });
    }

    fn remove(&self, state: &mut State, key: String) {
        state.revision += 1;
        state.keys.remove(&key);
        self.tell(state, Change::Gone { key });
    }

    fn end_leases(&self, state: &mut State) {
        let now = self.env.now();
        let ended = state.leases.iter().filter(|(_, held)| held.ends <= now).map(|(&lease, _)| lease);
        if !state.is_stopped {
            ended.collect::<Vec<Lease>>().into_iter().for_each(|lease| self.end_lease(state, lease));
        }
    }

    fn end_lease(&self, state: &mut State, lease: Lease) {
        state.leases.remove(&lease);
        let its = state.keys.iter().filter(|(_, entry)| entry.lease == lease).map(|(key, _)| key.clone());
        its.collect::<Vec<String>>().into_iter().for_each(|key| self.remove(state, key));
    }

    /// Watchers learn of a lease's end when it happens.
    async fn await_end(world: Weak<World>, lease: Lease, span: Duration) {
        loop {
            let Some(env) = world.upgrade().map(|world| world.env.clone()) else { return };
            env.sleep(span).await;
            let Some(world) = world.upgrade() else { return };
            let mut state = world.state();
            world.end_leases(&mut state);
            if !state.leases.contains_key(&lease) {
                return;
            }
        }
    }
}

impl State {
    fn holds(&self, condition: &Condition) -> bool {
        match condition {
            Condition::Revision(key, revision) => {
                self.keys.get(key).map_or(0, |entry| entry.revision) == *revision
            }
            Condition::Lease(key, lease) => self.keys.get(key).is_some_and(|entry| entry.lease == *lease),
            Condition::NoneBelow(prefix) => !self.keys.keys().any(|key| key.starts_with(prefix)),
        }
    }
}

impl Store for SimClient {
    fn get(&self, key: String) -> StoreAnswer<'_, Option<Entry>> {
        self.ask(move |_, state| Ok(state.keys.get(&key).cloned()))
    }

    fn list(&self, prefix: String) -> StoreAnswer<'_, (Vec<(String, Entry)>, i64)> {
        self.ask(move |_, state| {
            let its = state.keys.iter().filter(|(key, _)| key.starts_with(&prefix));
            Ok((its.map(|(key, entry)| (key.clone(), entry.clone())).collect(), state.revision))
        })
    }

    fn put_if(
        &self,
        conditions: Vec<Condition>,
        key: String,
        value: Vec<u8>,
        lease: Lease,
    ) -> StoreAnswer<'_, bool> {
        self.ask(move |world, state| {
            let holds = conditions.iter().all(|condition| state.holds(condition));
            if holds && lease != 0 && !state.leases.contains_key(&lease) {
                return Err(RegistryError::Etcd("requested lease not found".into()));
            }
            if holds {
                world.put(state, key, value, lease);
            }
            Ok(holds)
        })
    }

    fn grant(&self, span: Duration) -> StoreAnswer<'_, Lease> {
        self.ask(move |world, state| {
            state.leases_given += 1;
            let lease = state.leases_given;
            let ends = world.env.now() + Seconds(span.as_secs_f64());
            state.leases.insert(lease, Held { span, ends });
            world.env.spawn(Box::pin(World::await_end(Arc::downgrade(world), lease, span)));
            Ok(lease)
        })
    }

    fn keep_alive(&self, lease: Lease) -> StoreAnswer<'_, bool> {
        self.ask(move |world, state| {
            let held = state.leases.get_mut(&lease);
            Ok(held.map(|held| held.ends = world.env.now() + Seconds(held.span.as_secs_f64())).is_some())
        })
    }

    fn revoke(&self, lease: Lease) -> StoreAnswer<'_, ()> {
        self.ask(move |world, state| {
            world.end_lease(state, lease);
            Ok(())
        })
    }

    fn watch(&self, prefix: String, revision: i64) -> StoreAnswer<'_, Box<dyn Watch>> {
        let client = self.number;
        self.ask(move |_, state| {
            let (told, changes) = mpsc::unbounded_channel();
            let its = |(at, change): &&(i64, Change)| {
                let (Change::Put { key, .. } | Change::Gone { key }) = change;
                *at >= revision && key.starts_with(&prefix)
            };
            let missed: Vec<Change> = state.history.iter().filter(its).map(|(_, c)| c.clone()).collect();
            let _ = told.send(missed);
            state.watches.push(Watcher { client, prefix, from: revision, is_silent: false, told });
            Ok(Box::new(Watching(changes)) as Box<dyn Watch>)
        })
    }
}

struct Watching(mpsc::UnboundedReceiver<Vec<Change>>);

impl Watch for Watching {
    fn next(&mut self) -> StoreAnswer<'_, Vec<Change>> {
        Box::pin(async move { self.0.recv().await.ok_or_else(away) })
    }
}
