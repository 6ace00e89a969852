//! Members of a fleet whose logs are no longer read.

use super::{LONG, ProcessFleet, get, stream};
use crate::common;
use crate::lost_log::{dropped_lines, terminated};
use serde_json::Value;
use std::io::Read;
use std::sync::mpsc;
use std::time::Instant;

#[test]
fn a_router_and_a_worker_outlive_the_readers_of_their_logs() {
    let Some(mut fleet) = ProcessFleet::new("lost-log") else { return };
    fleet.environment.push(("RUST_LOG".into(), "debug".into()));
    let mut worker = fleet.worker("cpu", "auto", &["--listen-http", "127.0.0.1:0"]);
    let line = worker.says("answers /live");
    let of_worker =
        line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().replace('"', "");
    worker.says("joined");
    let (mut router, of_router) = fleet.router();
    // the thread that reads a log ends with the next line that is not received
    (worker.log, router.log) = (mpsc::channel().1, mpsc::channel().1);
    let case: Value = common::golden(&fleet.model)["cases"][0].clone();
    let deadline = Instant::now() + LONG;
    loop {
        let mut answer = String::new();
        stream(&of_router, &case, 4).read_to_string(&mut answer).unwrap();
        // a router is ready before it has heard of its worker
        assert!(answer.contains("data: [DONE]") || answer.contains("no pair of instances"), "{answer}");
        let dropped = [&of_worker, &of_router].map(|address| dropped_lines(&get(address, "/metrics")));
        if dropped.iter().all(|lines| *lines > 0) {
            break;
        }
        assert!(Instant::now() < deadline, "lines that were dropped: {dropped:?}");
    }
    assert!(terminated(&mut router.child).success());
    assert!(terminated(&mut worker.child).success());
}
