//! Endpoints from an API server: pods that come, go and change, lists that are read again, and a lease.

use crate::cluster::Cluster;
use crate::double::*;
use mixfleet_epp::{LeaseTimes, PickerLease, PoolName, follow_inference_pool, follow_pool, hold_lease};
use serde_json::{Value, json};
use std::time::Duration;

fn pool(labels: Value) -> Value {
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "vllm", "annotations": {"mixfleet.dev/objectives": "{batch: -1}"}},
        "spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": 8000}],
                 "endpointPickerRef": {"name": "mixfleet-epp", "port": {"number": 9002}}},
    })
}

/// A pod at the `at`th address.
fn pod(at: usize, ready: bool, more: &[(&str, &str)]) -> Value {
    let mut labels = json!({"app": "vllm"});
    for (label, value) in more {
        labels[*label] = (*value).into();
    }
    let ready = if ready { "True" } else { "False" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{at}"), "labels": labels},
        "status": {"podIP": format!("10.0.0.{}", at + 1), "conditions": [{"type": "Ready", "status": ready}]},
    })
}

/// The destinations of a request now, sorted; the refusal's text if there are none.
async fn now(world: &World) -> Result<Vec<String>, String> {
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
    let (_passing, answer) = world.proxy().await.asked(&HEADERS, None).await;
    match answer {
        Response::RequestHeaders(_) => {
            let mut all: Vec<String> = destinations(&answer).split(',').map(str::to_owned).collect();
            all.sort();
            Ok(all)
        }
        other => Err(String::from_utf8(refusal(other).body).expect("text")),
    }
}

/// Waits until requests go to these endpoints.
async fn until(world: &World, expected: &[usize]) {
    let mut addresses: Vec<String> = expected.iter().map(|at| address(*at)).collect();
    addresses.sort();
    while now(world).await.ok().as_ref() != Some(&addresses) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_refused(world: &World, part: &str) {
    while !now(world).await.is_err_and(|why| why.contains(part)) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn follow(world: &World, cluster: &Cluster) {
    let name = PoolName { namespace: "ns".into(), name: "vllm".into() };
    tokio::spawn(follow_inference_pool(world.picker.clone(), cluster.access(), name, world.opener()));
}

#[tokio::test]
async fn ready_pods_of_the_pool_get_requests() {
    let (world, cluster) = (World::empty().await, Cluster::new().await);
    follow(&world, &cluster);
    until_refused(&world, "no endpoint").await;
    cluster.put("pods", pod(0, true, &[]));
    cluster.put("pods", pod(1, false, &[]));
    cluster.put("pods", json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "labels": {"app": "x"}},
                               "status": {"podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]}}));
    cluster.put("inferencepools", pool(json!({"app": "vllm"})));
    until(&world, &[0]).await;
    assert!(world.picker.is_ready());
    // it comes, becomes ready, is not ready, changes its labels, goes
    cluster.put("pods", pod(1, true, &[]));
    until(&world, &[0, 1]).await;
    cluster.put("pods", pod(0, false, &[]));
    until(&world, &[1]).await;
    cluster.put("pods", pod(0, true, &[]));
    until(&world, &[0, 1]).await;
    cluster.put("pods", pod(0, true, &[("mixfleet.dev/usd-per-hour", "2.5")]));
    while !world.opened().contains(&"vllm:http://10.0.0.1:8000=auto,usd=2.5".to_owned()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    cluster.put("pods", pod(2, true, &[("mixfleet.dev/colour", "red")]));
    cluster.put("pods", pod(3, true, &[]));
    until(&world, &[0, 1, 3]).await;
    for at in [0, 1] {
        cluster.delete("pods", &format!("pod-{at}"));
    }
    until(&world, &[3]).await;
    cluster.delete("pods", "pod-3");
    until_refused(&world, "no endpoint of the pool is ready").await;
}

#[tokio::test]
async fn a_watch_that_ends_or_is_too_old_is_made_up_for() {
    let (world, cluster) = (World::empty().await, Cluster::new().await);
    cluster.put("inferencepools", pool(json!({"app": "vllm"})));
    cluster.put("pods", pod(0, true, &[]));
    follow(&world, &cluster);
    until(&world, &[0]).await;
    assert_eq!(cluster.lists("pods"), 1);
    // cut: the watch continues from where it was
    cluster.cut();
    cluster.put("pods", pod(1, true, &[]));
    until(&world, &[0, 1]).await;
    assert_eq!(cluster.lists("pods"), 1);
    // while the server is away the known pods stay; then too much has happened
    cluster.set_down(true);
    cluster.compact();
    assert_eq!(now(&world).await.map(|all| all.len()), Ok(2));
    cluster.delete("pods", "pod-0");
    cluster.put("pods", pod(2, true, &[]));
    cluster.set_down(false);
    until(&world, &[1, 2]).await;
    assert!(cluster.lists("pods") >= 2, "it lists again after 410 Gone");
}

#[tokio::test]
async fn a_pool_that_selects_other_pods_gets_them() {
    let (world, cluster) = (World::empty().await, Cluster::new().await);
    cluster.put("inferencepools", pool(json!({"app": "vllm", "tier": "a"})));
    cluster.put("pods", pod(0, true, &[("tier", "a")]));
    cluster.put("pods", pod(1, true, &[("tier", "b")]));
    follow(&world, &cluster);
    until(&world, &[0]).await;
    cluster.put("inferencepools", pool(json!({"app": "vllm", "tier": "b"})));
    until(&world, &[1]).await;
    cluster.put("inferencepools", json!({"metadata": {"name": "vllm"}, "spec": {"selector": 1}}));
    cluster.put("inferencepools", pool(json!({"app": "vllm"})));
    until(&world, &[0, 1]).await;
    cluster.delete("inferencepools", "vllm");
    until_refused(&world, "no endpoint of the pool is ready").await;
}

fn lease(identity: &str) -> PickerLease {
    let times = LeaseTimes {
        duration: Duration::from_secs(1),
        deadline: Duration::from_millis(700),
        retry: Duration::from_millis(20),
    };
    PickerLease { namespace: "ns".into(), name: "mixfleet-epp".into(), identity: identity.into(), times }
}

#[tokio::test]
async fn one_of_two_pickers_is_ready_and_the_other_takes_over() {
    let cluster = Cluster::new().await;
    cluster.put("inferencepools", pool(json!({"app": "vllm"})));
    cluster.put("pods", pod(0, true, &[]));
    let (one, two) = (World::empty().await, World::empty().await);
    let hold = |world: &World, name: &str, told: tokio::sync::oneshot::Receiver<()>| {
        let told = async { drop(told.await) };
        tokio::spawn(hold_lease(world.picker.clone(), cluster.access(), world.env.clone(), lease(name), told))
    };
    let holder =
        || cluster.get("leases", "mixfleet-epp").map(|lease| lease["spec"].clone()).unwrap_or_default();
    let (end_one, told_one) = tokio::sync::oneshot::channel();
    let (_end_two, told_two) = tokio::sync::oneshot::channel();
    let first = hold(&one, "one", told_one);
    for world in [&one, &two] {
        follow(world, &cluster);
        until(world, &[0]).await;
    }
    let ready = async |world: &World, expected: bool| {
        while world.picker.is_ready() != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    ready(&one, true).await;
    let second = hold(&two, "two", told_two);
    ready(&two, false).await;
    let renewed = holder()["renewTime"].clone();
    while holder()["renewTime"] == renewed {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!((&holder()["holderIdentity"], two.picker.is_ready()), (&"one".into(), false));
    // given back: the other one has it before it would have expired
    let _ = end_one.send(());
    first.await.expect("it ends");
    ready(&two, true).await;
    assert_eq!((&holder()["holderIdentity"], &holder()["leaseTransitions"]), (&"two".into(), &1.into()));
    // another picker has written it, as after a pause of this one: it stands by, and takes it when it expires
    let mut stolen = cluster.get("leases", "mixfleet-epp").expect("a lease");
    stolen["spec"]["holderIdentity"] = "three".into();
    cluster.put("leases", stolen);
    ready(&two, false).await;
    assert_eq!(now(&two).await, Ok(vec![address(0)]), "late requests are answered");
    ready(&two, true).await;
    // no picker can renew while the server is away
    cluster.set_down(true);
    ready(&two, false).await;
    cluster.set_down(false);
    ready(&two, true).await;
    second.abort();
    assert_eq!(
        cluster.unused(),
        Vec::<String>::new(),
        "the Role grants what a picker needs and nothing more"
    );
}

#[tokio::test]
async fn a_changed_file_takes_effect_and_a_faulty_one_does_not() {
    let world = World::empty().await;
    let file = std::env::temp_dir().join(format!("mixfleet-epp-{}.yaml", std::process::id()));
    let text = |all: &[usize]| {
        let entry = |at: &usize| format!("{{name: e{at}, address: 10.0.0.{}, port: '8000'}}", at + 1);
        format!("endpoints: [{}]\n", all.iter().map(entry).collect::<Vec<_>>().join(", "))
    };
    std::fs::write(&file, text(&[0, 1])).expect("it is written");
    tokio::spawn(follow_pool(world.picker.clone(), file.clone(), world.opener()));
    until(&world, &[0, 1]).await;
    assert_eq!(world.opened().len(), 2);
    // an endpoint that leaves, and comes back, starts nothing anew
    std::fs::write(&file, text(&[1])).expect("it is written");
    until(&world, &[1]).await;
    std::fs::write(&file, "endpoints: [").expect("it is written");
    std::fs::write(&file, text(&[0, 1])).expect("it is written");
    until(&world, &[0, 1]).await;
    assert_eq!(world.opened().len(), 2);
    std::fs::write(&file, text(&[1, 2])).expect("it is written");
    until(&world, &[1, 2]).await;
    assert_eq!(world.opened().len(), 4);
    std::fs::remove_file(&file).expect("it is there");
}
