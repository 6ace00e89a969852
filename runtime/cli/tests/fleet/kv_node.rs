//! A KV node among workers as processes.

use super::{LONG, ProcessFleet, alone, rest, stream, wait_until_served};
use crate::common;

#[test]
fn a_kv_node_takes_an_answer_of_another_worker_and_costs_nothing_when_it_is_killed() {
    const TOKENS: usize = 200;
    let Some(fleet) = ProcessFleet::new("kv-node") else { return };
    let case = &common::golden(&fleet.model)["cases"][5];
    let expected = alone(&fleet, case, TOKENS);
    let (_worker, _) = fleet.joined("cpu@0", "auto", &[]);
    let (mut node, name) = fleet.node(&["--kv-dram", "0.1", "--usd-per-hour", "kv=0.25"]);
    let (router, address) = fleet.router();
    wait_until_served(&address, case);
    let status = fleet.status();
    let members = status["members"].as_array().unwrap();
    let seats =
        members.iter().flat_map(|member| member["seat"]["instances"].as_array().into_iter().flatten());
    let its: Vec<_> = seats.filter(|instance| instance["role"] == "kv").collect();
    assert_eq!(its.len(), 1, "{status}");
    assert_eq!((its[0]["device"].as_str(), its[0]["usd_per_hour"].as_f64()), (Some("kv"), Some(0.25)));

    let begun = std::time::Instant::now();
    let mut is_taken = false;
    // the links between the two may still be measured
    while !is_taken {
        assert!(begun.elapsed() < LONG, "the node takes nothing");
        assert_eq!(rest(stream(&address, case, TOKENS), String::new()), expected);
        is_taken = router.log.try_iter().any(|line| line.contains("a prefix is copied"));
    }
    assert_eq!(rest(stream(&address, case, TOKENS), String::new()), expected);
    node.kill();
    assert!(fleet.names().contains(&name));
    assert_eq!(rest(stream(&address, case, TOKENS), String::new()), expected);
}

#[test]
fn a_kv_node_without_memory_or_with_a_device_is_refused() {
    for (flags, says) in [
        (&["--kv-dtype", "f32"][..], "--role kv needs --kv-dram"),
        (&["--kv-dram", "1", "--device", "cpu"], "--device: a KV node (--role kv) has no device"),
        (&["--kv-dram", "1", "--sequences", "4"], "--sequences: a KV node"),
        (&["--kv-dram", "1", "--chunk", "64"], "--chunk: a KV node"),
        (&["--kv-dram", "1", "--kv-memory", "1"], "--kv-memory: a KV node"),
        (&["--kv-dram", "1", "--usd-per-hour", "cpu=1"], "--usd-per-hour cpu: no such device"),
    ] {
        let mut command = common::mixfleet();
        command.args(["worker", "--etcd", "http://127.0.0.1:1", "--role", "kv"]).args(flags);
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(says), "{error}");
    }
}
