//! One trace through the processes of a fleet.

use super::{ProcessFleet, get};
use crate::traces::{CLIENT, FakeCollector, request_of, service_of};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

#[test]
fn a_request_is_one_trace_through_router_and_workers() {
    let Some(mut fleet) = ProcessFleet::new("traced") else { return };
    let collector = FakeCollector::start();
    let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector.address), ("OTEL_BSP_SCHEDULE_DELAY", "50")];
    fleet.environment = variables.map(|(name, value)| (name.into(), value.into())).into();
    let _prefill = fleet.joined("cpu@0", "prefill", &[]);
    let _decode = fleet.joined("cpu@1", "decode", &[]);
    let (_router, address) = fleet.router();
    let until = Instant::now() + Duration::from_secs(60);
    while !get(&address, "/health").starts_with("HTTP/1.1 200") {
        assert!(Instant::now() < until, "the router finds no pair of workers");
        std::thread::sleep(Duration::from_millis(10));
    }
    let body = json!({"model": "llama-gqa-f32", "messages": [{"role": "user", "content": "count for me"}],
        "max_tokens": 6, "ignore_eos": true})
    .to_string();
    let mut stream = TcpStream::connect(&address).unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
                content-type: application/json\r\n";
    write!(stream, "{head}traceparent: {CLIENT}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let names = ["chat_completions", "queue", "prefill", "hand-off", "decode"];
    let spans = collector.spans(&names);
    request_of(&spans, &["queue", "prefill", "decode"]);
    for (name, service) in names.into_iter().zip(["router", "router", "worker", "worker", "worker"]) {
        let told = service_of(&collector, name);
        assert!(told.contains(&format!("mixfleet-{service}")), "{name}: {told}");
    }
}
