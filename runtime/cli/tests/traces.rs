//! Traces of requests, as a collector gets them.

use crate::common::server::Server;
use crate::engines::gateway;
use crate::fake::FakeEngine;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use prost::Message;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A client's span.
pub(crate) const CLIENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A collector of OTLP over HTTP.
pub(crate) struct FakeCollector {
    pub(crate) address: String,
    came: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl FakeCollector {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let came = Arc::new(Mutex::new(Vec::new()));
        let kept = came.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, kept) = (stream.unwrap(), kept.clone());
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    loop {
                        let (mut head, mut length) = (String::new(), 0);
                        while !head.ends_with("\r\n\r\n") {
                            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                                return;
                            }
                        }
                        for line in head.lines() {
                            if let Some((name, value)) = line.split_once(':')
                                && name.eq_ignore_ascii_case("content-length")
                            {
                                length = value.trim().parse().unwrap();
                            }
                        }
                        assert!(head.starts_with("POST /v1/traces "), "{head}");
                        let mut body = vec![0; length];
                        reader.read_exact(&mut body).unwrap();
                        kept.lock().unwrap().push(ExportTraceServiceRequest::decode(&*body).unwrap());
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                    }
                });
            }
        });
        FakeCollector { address, came }
    }

    /// A server whose spans it gets.
    fn serve(&self, arguments: &[&str]) -> Server {
        let mut command = crate::common::mixfleet();
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(arguments);
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &self.address).env("OTEL_BSP_SCHEDULE_DELAY", "50");
        Server::spawned(command.stderr(Stdio::piped()).spawn().unwrap())
    }

    /// The spans that came, once these names are among them, in the order of their begins.
    pub(crate) fn spans(&self, names: &[&str]) -> Vec<Span> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let came = self.came.lock().unwrap();
            let resources = came.iter().flat_map(|request| &request.resource_spans);
            let mut spans: Vec<Span> =
                resources.flat_map(|of| &of.scope_spans).flat_map(|of| of.spans.clone()).collect();
            drop(came);
            if names.iter().all(|name| spans.iter().any(|span| span.name == *name)) {
                spans.sort_by_key(|span| (span.start_time_unix_nano, span.end_time_unix_nano));
                return spans;
            }
            let had: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
            assert!(Instant::now() < until, "{names:?} are not all among {had:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The service that reported a span of this name.
pub(crate) fn service_of(collector: &FakeCollector, name: &str) -> String {
    let came = collector.came.lock().unwrap();
    let has =
        |of: &&ResourceSpans| of.scope_spans.iter().flat_map(|of| &of.spans).any(|span| span.name == name);
    let of = came.iter().flat_map(|request| &request.resource_spans).find(has).unwrap();
    let of = &of.resource.as_ref().unwrap().attributes;
    format!("{:?}", of.iter().find(|fact| fact.key == "service.name").unwrap().value)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn fact(span: &Span, name: &str) -> String {
    let found = span.attributes.iter().find(|fact| fact.key == name);
    format!("{:?}", found.unwrap_or_else(|| panic!("no {name}: {span:?}")).value)
}

/// The request's own span, in a client's trace, and its phases as consecutive children.
pub(crate) fn request_of<'a>(spans: &'a [Span], phases: &[&str]) -> &'a Span {
    let own = spans.iter().find(|span| span.name == "chat_completions").unwrap();
    assert_eq!(hexadecimal(&own.trace_id), CLIENT[3..35]);
    assert_eq!(hexadecimal(&own.parent_span_id), CLIENT[36..52]);
    assert_eq!(own.kind, 2, "a server's");
    let mut last = own.start_time_unix_nano;
    for phase in phases {
        let mut its = spans.iter().filter(|span| span.name == *phase);
        let (Some(span), None) = (its.next(), its.next()) else { panic!("one {phase}: {spans:?}") };
        assert_eq!((&span.trace_id, &span.parent_span_id), (&own.trace_id, &own.span_id), "{phase}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        // both clocks are read for each span
        let slack = 5_000_000;
        assert!(span.start_time_unix_nano + slack >= last, "{phase}: {spans:?}");
        assert!(span.end_time_unix_nano <= own.end_time_unix_nano + slack, "{phase}: {spans:?}");
        last = span.start_time_unix_nano;
    }
    own
}

#[test]
fn a_request_to_an_engine_is_one_trace_with_the_clients_and_the_engines() {
    let (collector, fake) = (FakeCollector::start(), FakeEngine::start("vllm", "m"));
    *fake.shared.pace.lock().unwrap() = Duration::from_millis(20);
    let engine = format!("--worker-engine=vllm:{},part=H100-SXM-80GB,shape=llama-3.1-8b", fake.url());
    let server = collector.serve(&[&engine]);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "count"}], "max_tokens": 4, "stream": true});
    let header = format!("traceparent: {CLIENT}\r\n");
    assert_eq!(server.call("POST", "/v1/chat/completions", &header, &body.to_string()).0, 200);
    let spans = collector.spans(&["chat_completions", "queue", "prefill", "decode"]);
    let own = request_of(&spans, &["queue", "prefill", "decode"]);
    assert!(fact(own, "mixfleet.outcome").contains("success"));
    assert!(fact(own, "gen_ai.usage.output_tokens").contains('4'));
    let prefill = spans.iter().find(|span| span.name == "prefill").unwrap();
    assert!(fact(prefill, "mixfleet.instance").contains(&fake.address));
    // three further tokens came 20 ms apart
    let decode = spans.iter().find(|span| span.name == "decode").unwrap();
    assert!(decode.end_time_unix_nano - decode.start_time_unix_nano >= 55_000_000, "{decode:?}");
    let came = fake.asked().pop().unwrap();
    let told = format!("traceparent: {}{}-01\r\n", &CLIENT[..36], hexadecimal(&own.span_id));
    assert!(came.headers.contains(&told), "{told}: {}", came.headers);

    // whose trace is not recorded, is not here either, but goes on
    let header = format!("traceparent: {}0\r\n", &CLIENT[..54]);
    let before = collector.spans(&["chat_completions"]).len();
    assert_eq!(server.call("POST", "/v1/chat/completions", &header, &body.to_string()).0, 200);
    assert!(fake.asked().pop().unwrap().headers.contains(&CLIENT[..36]));
    // a request without a trace begins one; the other request's spans would have come after it
    assert_eq!(
        server.post("/v1/chat/completions", &json!({"model": "m", "messages": [], "max_tokens": 2})).0,
        200
    );
    let until = Instant::now() + Duration::from_secs(60);
    while collector.spans(&["chat_completions"]).len() < before + 4 {
        assert!(Instant::now() < until, "{:?}", collector.spans(&["chat_completions"]));
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = collector.spans(&["chat_completions"]);
    let others: Vec<&Span> =
        after.iter().filter(|span| hexadecimal(&span.trace_id) != CLIENT[3..35]).collect();
    assert!(after.len() == before + 4 && others.len() == 4, "{after:?}");
    assert!(others.iter().any(|span| span.parent_span_id.is_empty()));
}

#[test]
fn a_request_that_two_engines_share_has_its_hand_off_in_its_trace() {
    let collector = FakeCollector::start();
    let (first, second) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    let engine = |fake: &FakeEngine, role: &str| {
        *fake.shared.hands_over.lock().unwrap() = crate::roles::parameters();
        format!("--worker-engine=vllm:{}={role},part=H100-SXM-80GB,shape=llama-3.1-8b", fake.url())
    };
    let engines = [engine(&first, "prefill"), engine(&second, "decode")];
    let server = collector.serve(&[&engines[0], &engines[1], "--kv-canary=off"]);
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "count"}], "max_tokens": 4, "stream": true});
    let header = format!("traceparent: {CLIENT}\r\n");
    assert_eq!(server.call("POST", "/v1/chat/completions", &header, &body.to_string()).0, 200);
    let phases = ["queue", "prefill", "hand-off", "decode"];
    let spans = collector.spans(&[&["chat_completions"][..], &phases].concat());
    request_of(&spans, &phases);
    let instance =
        |name: &str| fact(spans.iter().find(|span| span.name == name).unwrap(), "mixfleet.instance");
    assert!(instance("prefill").contains(&first.address) && instance("hand-off").contains(&second.address));
    assert_eq!(instance("hand-off"), instance("decode"));
}

#[test]
fn without_a_collector_a_clients_trace_passes_to_the_engine_as_it_came() {
    let fake = FakeEngine::start("vllm", "m");
    let server = gateway(&[(&fake, "vllm", ",part=H100-SXM-80GB,shape=llama-3.1-8b")], &[]);
    let body = json!({"model": "m", "prompt": "count", "max_tokens": 2}).to_string();
    for (sent, passes) in [(CLIENT, true), ("00-nonsense", false)] {
        let header = format!("traceparent: {sent}\r\n");
        assert_eq!(server.call("POST", "/v1/completions", &header, &body).0, 200);
        let headers = fake.asked().pop().unwrap().headers;
        assert_eq!(headers.contains(&format!("traceparent: {sent}\r\n")), passes, "{headers}");
        assert_eq!(headers.contains("traceparent"), passes);
    }
}

#[test]
fn a_request_on_two_devices_has_its_hand_off_in_its_trace() {
    let collector = FakeCollector::start();
    let devices = ["--device", "cpu@0=prefill", "--device", "cpu@1=decode", "--kv-memory", "0.02"];
    let server = collector.serve(&devices);
    let (_, models) = server.call("GET", "/v1/models", "", "");
    let models: Value = serde_json::from_str(&models).unwrap();
    let body = json!({"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "count for me"}],
        "max_tokens": 6, "ignore_eos": true});
    let header = format!("traceparent: {CLIENT}\r\n");
    let (status, answer) = server.call("POST", "/v1/chat/completions", &header, &body.to_string());
    assert_eq!(status, 200, "{answer}");
    let spans = collector.spans(&["chat_completions", "queue", "prefill", "hand-off", "decode"]);
    request_of(&spans, &["queue", "prefill", "decode"]);
    let instance =
        |name: &str| fact(spans.iter().find(|span| span.name == name).unwrap(), "mixfleet.instance");
    assert_eq!(instance("prefill"), instance("hand-off"));
    assert_ne!(instance("prefill"), instance("decode"));
}
