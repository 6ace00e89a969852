//! Memberships in a world where everything goes wrong.

use super::super::session::ModelIdentity;
use super::sim::{Reachability, SimClient, SimFaults, SimRegistry};
use super::{InstanceRecord, Member, Membership, Registry, RegistryError, Seat};
use crate::env::{SeededEnv, SharedEnv};
use crate::request::RouterId;
use futures_util::FutureExt;
use mixfleet_scheduler::fleet::{InstanceId, Role};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(3);
/// Answers in flight time out, a pause follows, and attaching tries some seven times.
const SETTLED: Duration = Duration::from_secs(30);

const TROUBLE: SimFaults = SimFaults {
    latency_s_max: 0.2,
    lost_asks: 20,
    lost_answers: 30,
    failed_answers: 20,
    silent_watches: 200,
};

fn model() -> ModelIdentity {
    ModelIdentity { digest: "model".into(), tokenizer_digest: "tokenizer".into() }
}

fn worker(address: &str, ids: &[InstanceId]) -> Member {
    let instances = ids.iter().map(|&id| InstanceRecord {
        id,
        device: "cpu".into(),
        role: Role::Auto,
        usd_per_hour: None,
        kv_capacity_tokens: 1,
        degraded: false,
    });
    let (transports, not_offered) = (Vec::new(), Vec::new());
    let seat = Seat::Worker { instances: instances.collect(), transports, not_offered };
    Member::new(model(), address.into(), seat)
}

/// A member, and why it ended.
struct Process {
    membership: Membership,
    address: String,
    ended: Arc<Mutex<Option<RegistryError>>>,
}

impl Process {
    /// Joins with ids that the registry gives, or with these.
    async fn join(env: &SharedEnv, registry: &Registry, address: &str, ids: Option<Vec<u32>>) -> Self {
        Self::join_with(env, registry, registry.patience, address, ids).await
    }

    /// As `join`, but its membership waits so long for answers.
    async fn join_with(
        env: &SharedEnv,
        registry: &Registry,
        patience: Duration,
        address: &str,
        ids: Option<Vec<u32>>,
    ) -> Self {
        let charter = registry.charter(&model(), [0; 16]).await.unwrap();
        let ids = match ids {
            Some(ids) => ids.into_iter().map(InstanceId).collect(),
            None => registry.instance_ids(1).await.unwrap(),
        };
        let registry = Registry { patience, ..registry.clone() };
        let mut membership = registry.join(charter, worker(address, &ids));
        let (taken, ended) = (membership.taken(), Arc::default());
        let why: Arc<Mutex<Option<RegistryError>>> = Arc::clone(&ended);
        env.spawn(Box::pin(async move { *why.lock().unwrap() = Some(taken.await) }));
        Process { membership, address: address.into(), ended }
    }

    fn ended(&self) -> bool {
        self.ended.lock().unwrap().is_some()
    }

    /// Whether `record` is its own, under a lease.
    fn has_record(&self, store: &SimRegistry, name: &str) -> bool {
        let records = store.records();
        let record = records.get(&format!("mixfleet/test/members/{name}"));
        record.is_some_and(|record| record.is_leased && record.value.contains(&self.address))
    }
}

struct Scene {
    env: SharedEnv,
    store: SimRegistry,
}

impl Scene {
    fn new(env: &SeededEnv, faults: SimFaults) -> Self {
        let env: SharedEnv = Arc::new(env.clone());
        Scene { store: SimRegistry::new(&env, faults), env }
    }

    fn process(&self) -> (SimClient, Registry) {
        let client = self.store.client();
        let registry = client.registry("test", LEASE);
        (client, registry)
    }

    /// Up to this many seconds.
    async fn a_while(&self, seconds: f64) {
        let share = self.env.random() as f64 / u64::MAX as f64;
        self.env.sleep(Duration::from_secs_f64(seconds * share)).await;
    }
}

/// A process is cut off at any point in its joining or after it, the store loses its data, and another
/// process gets its id. Returns the fault after all works again.
fn two_with_one_id(seed: u64, patience: Duration) -> Result<(), String> {
    let world = SeededEnv::new(seed);
    let env = world.clone();
    world.run(async move {
        let scene = Scene::new(&env, TROUBLE);
        let (cut, registry) = scene.process();
        let old = Process::join_with(&scene.env, &registry, patience, "old", Some(vec![0])).await;
        scene.a_while(3.0).await;
        cut.set_link(Reachability::Silent);
        scene.store.stop();
        scene.store.lose_data();
        scene.store.start();
        let (_, registry) = scene.process();
        let new = Process::join(&scene.env, &registry, "new", Some(vec![0])).await;
        scene.a_while(4.0).await;
        cut.set_link(Reachability::Up);
        scene.a_while(10.0).await;
        scene.store.set_faults(false);
        scene.env.sleep(SETTLED).await;
        let (mut old_has, mut new_has) = (false, false);
        // The store may say otherwise for a moment: a record's lease ends, and is written anew.
        for _ in 0..3 {
            (old_has, new_has) =
                (old.has_record(&scene.store, "worker-0"), new.has_record(&scene.store, "worker-0"));
            scene.env.sleep(LEASE).await;
        }
        match (old.ended(), new.ended()) {
            (true, false) if new_has => Ok(()),
            (false, true) if old_has => Ok(()),
            ended => Err(format!("ended: {ended:?}, record: {:?}", (old_has, new_has))),
        }
    })
}

#[test]
fn of_two_processes_with_one_id_exactly_one_ends() {
    for seed in 0..400 {
        two_with_one_id(seed, LEASE / 3).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

#[test]
fn without_a_deadline_two_processes_keep_one_id() {
    let found = (0..50).filter(|&seed| two_with_one_id(seed, Duration::from_secs(1 << 20)).is_err()).count();
    assert!(found > 25, "{found} of 50 seeds");
}

#[test]
fn answers_that_get_lost_make_no_process_take_its_own_name_for_anothers() {
    let faults = SimFaults { lost_answers: 150, lost_asks: 50, failed_answers: 50, ..TROUBLE };
    for seed in 0..60 {
        let world = SeededEnv::new(seed);
        let env = world.clone();
        world.run(async move {
            let scene = Scene::new(&env, faults);
            let process = Process::join(&scene.env, &scene.process().1, "one", Some(vec![0])).await;
            for _ in 0..100 {
                scene.env.sleep(Duration::from_secs(10)).await;
                assert!(!process.ended(), "seed {seed}: {:?}", process.ended.lock().unwrap());
            }
            scene.store.set_faults(false);
            scene.env.sleep(SETTLED).await;
            assert!(process.has_record(&scene.store, "worker-0"), "seed {seed}");
        });
    }
}

#[test]
fn whose_record_was_removed_writes_it_anew_and_whose_id_was_given_again_ends() {
    for seed in 0..50 {
        let world = SeededEnv::new(seed);
        let env = world.clone();
        world.run(async move {
            let scene = Scene::new(&env, SimFaults { latency_s_max: 0.1, ..SimFaults::default() });
            let old = Process::join(&scene.env, &scene.process().1, "old", None).await;
            old.membership.joined().await;
            scene.store.remove_keys();
            scene.env.sleep(LEASE).await;
            assert!(!old.ended() && old.has_record(&scene.store, "worker-0"), "seed {seed}");
            // Its lease lives on, and an immediate newcomer gets its id.
            scene.a_while(2.0).await;
            scene.store.remove_keys();
            let new = Process::join(&scene.env, &scene.process().1, "new", Some(vec![0])).await;
            scene.env.sleep(SETTLED).await;
            let (survivor, ended) = if old.ended() { (&new, &old) } else { (&old, &new) };
            assert!(!survivor.ended() && survivor.has_record(&scene.store, "worker-0"), "seed {seed}");
            let why = ended.ended.lock().unwrap();
            assert!(matches!(&*why, Some(RegistryError::Taken(name)) if name == "worker-0"), "seed {seed}");
        });
    }
}

#[test]
fn of_two_members_that_share_an_id_under_unlike_names_exactly_one_ends() {
    for seed in 0..100 {
        let world = SeededEnv::new(seed);
        let env = world.clone();
        world.run(async move {
            let scene = Scene::new(&env, SimFaults { latency_s_max: 0.3, ..SimFaults::default() });
            let (one, other) = (scene.process().1, scene.process().1);
            let one = Process::join(&scene.env, &one, "one", Some(vec![0, 1])).await;
            let other = Process::join(&scene.env, &other, "other", Some(vec![1, 2])).await;
            scene.env.sleep(SETTLED).await;
            assert!(one.ended() != other.ended(), "seed {seed}: {}", one.ended());
            let has = (one.has_record(&scene.store, "worker-0"), other.has_record(&scene.store, "worker-1"));
            assert_eq!(has, (!one.ended(), !other.ended()), "seed {seed}");
        });
    }
}

#[test]
fn what_a_silent_watch_does_not_tell_is_read() {
    let world = SeededEnv::new(1);
    let env = world.clone();
    world.run(async move {
        let faults = SimFaults { silent_watches: 1000, ..SimFaults::default() };
        let scene = Scene::new(&env, faults);
        let first = Process::join(&scene.env, &scene.process().1, "first", None).await;
        first.membership.joined().await;
        scene.env.sleep(LEASE / 3).await;
        let _second = Process::join(&scene.env, &scene.process().1, "second", None).await;
        let mut members = first.membership.members();
        let known = members.wait_for(|members| members.contains_key("worker-1"));
        tokio::select! {
            known = known => drop(known.unwrap()),
            () = scene.env.sleep(5 * LEASE) => panic!("the second member is not known"),
        }
    });
}

#[test]
fn a_counter_without_ids_left_is_refused_and_no_id_is_given_again() {
    for (first, count, given) in [(u64::from(u32::MAX), 1, 1), (u64::from(u32::MAX), 2, 0), (u64::MAX, 1, 0)]
    {
        let world = SeededEnv::new(1);
        let env = world.clone();
        world.run(async move {
            let (_, registry) = Scene::new(&env, SimFaults::default()).process();
            registry.count_past("instance", first).await.unwrap();
            match registry.instance_ids(count).await {
                Ok(ids) => assert_eq!((ids, given), (vec![InstanceId(u32::MAX)], 1)),
                Err(error) => {
                    let problem =
                        format!("{count} ids from {first} on, and the last that there can be is 4294967295");
                    assert!(given == 0 && error.to_string().contains(&problem), "{error}");
                }
            }
        });
    }
}

#[test]
fn nobody_has_joined_before_the_record_is_written() {
    let world = SeededEnv::new(1);
    let env = world.clone();
    world.run(async move {
        let scene = Scene::new(&env, SimFaults { latency_s_max: 0.1, ..SimFaults::default() });
        let (client, registry) = scene.process();
        let charter = registry.charter(&model(), [0; 16]).await.unwrap();
        client.set_link(Reachability::Silent);
        let membership =
            registry.join(charter, Member::new(model(), "r".into(), Seat::Router { id: RouterId(3) }));
        scene.env.sleep(SETTLED).await;
        assert!(membership.joined().now_or_never().is_none());
        client.set_link(Reachability::Up);
        membership.joined().await;
        assert!(scene.store.records().contains_key("mixfleet/test/members/router-3"));
        membership.leave().await;
        assert!(!scene.store.records().contains_key("mixfleet/test/members/router-3"));
    });
}

#[test]
fn of_two_models_that_come_first_at_once_the_one_that_is_a_member_first_stays_and_the_other_ends() {
    let world = SeededEnv::new(1);
    let env = world.clone();
    world.run(async move {
        let scene = Scene::new(&env, SimFaults::default());
        let (registry, others) = (scene.process().1, scene.process().1);
        let charter = registry.charter(&model(), [0; 16]).await.unwrap();
        // No record exists yet, so the charter has no owner.
        let other = ModelIdentity { digest: "other".into(), ..model() };
        let theirs = others.charter(&other, [1; 16]).await.unwrap();
        let first = others.join(theirs, Member { model: other, ..worker("first", &[InstanceId(1)]) });
        first.joined().await;
        let mut late = registry.join(charter, worker("late", &[InstanceId(0)]));
        tokio::select! {
            biased;
            why = late.taken() => assert!(matches!(why, RegistryError::Refused(_)), "{why}"),
            () = scene.env.sleep(SETTLED) => panic!("it waits for a fleet that is another's"),
        }
    });
}

#[test]
fn while_the_store_is_away_a_member_waits_and_is_one_again() {
    let world = SeededEnv::new(7);
    let env = world.clone();
    world.run(async move {
        let scene = Scene::new(&env, TROUBLE);
        let process = Process::join(&scene.env, &scene.process().1, "one", None).await;
        process.membership.joined().await;
        for _ in 0..5 {
            scene.store.stop();
            scene.a_while(20.0).await;
            scene.store.start();
            scene.a_while(20.0).await;
            assert!(!process.ended());
        }
        scene.store.set_faults(false);
        scene.env.sleep(SETTLED).await;
        assert!(process.has_record(&scene.store, "worker-0"));
    });
}
