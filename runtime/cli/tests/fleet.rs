//! Routers and workers as processes, with etcd: the client's view when one of them dies.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

pub(crate) mod authority;
mod kv_node;
mod lost_log;
mod planned;
mod process;
#[cfg(feature = "otlp")]
mod traced;

use crate::common;
use process::{LONG, Process, etcd, etcd_anywhere};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

/// etcd with a new data directory, and the served fixture.
struct ProcessFleet {
    etcd: Process,
    port: u16,
    data: PathBuf,
    model: PathBuf,
    /// Of every member.
    flags: Vec<String>,
    /// Of every member.
    environment: Vec<(String, String)>,
}

impl ProcessFleet {
    /// None, said aloud, without etcd or fixtures.
    fn new(name: &str) -> Option<Self> {
        let model = common::fixture("llama-gqa-f32");
        if Command::new("etcd").arg("--version").output().is_err() {
            println!("SKIPPED: no etcd on PATH (Debian: etcd-server)");
            return None;
        }
        let data = common::scratch(name);
        let (etcd, port) = etcd_anywhere(&data);
        Some(ProcessFleet { etcd, port, data, model, flags: Vec::new(), environment: Vec::new() })
    }

    fn command(&self, model: &Path, name: &str, arguments: &[&str]) -> Command {
        let mut command = common::mixfleet();
        command.args([name, "--etcd", &format!("http://127.0.0.1:{}", self.port), "--lease-s", "2"]);
        command.args(["--activations", "f32", "--kv-dtype", "f32"]);
        if !arguments.contains(&"kv") {
            command.args(["--kv-memory", "0.02"]);
        }
        command.arg("--model").arg(model).args(arguments).args(&self.flags);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn worker(&self, device: &str, role: &str, more: &[&str]) -> Process {
        let arguments = [&["--device", device, "--role", role], more].concat();
        Process::start(&mut self.command(&self.model, "worker", &arguments))
    }

    /// A worker that has joined, and its name.
    fn joined(&self, device: &str, role: &str, more: &[&str]) -> (Process, String) {
        named(self.worker(device, role, more))
    }

    /// A KV node that has joined.
    fn node(&self, more: &[&str]) -> (Process, String) {
        let arguments = [&["--role", "kv"], more].concat();
        named(Process::start(&mut self.command(&self.model, "worker", &arguments)))
    }

    /// A router that is ready, and its address.
    fn router(&self) -> (Process, String) {
        let mut router =
            Process::start(&mut self.command(&self.model, "router", &["--listen", "127.0.0.1:0"]));
        let line = router.says("ready: http://");
        let (_, address) = line.split_once("ready: http://").unwrap();
        (router, address.trim().trim_end_matches("/v1").to_string())
    }

    /// etcd ends, and loses its data.
    fn lose_etcds_data(&mut self) {
        self.etcd.kill();
        std::fs::remove_dir_all(&self.data).unwrap();
    }

    /// Of all members.
    fn names(&self) -> Vec<String> {
        let status = self.status();
        let name = |member: &Value| {
            let seat = &member["seat"];
            match seat["kind"].as_str().unwrap() {
                "router" => format!("router-{}", seat["id"]),
                _ => format!("worker-{}", seat["instances"][0]["id"]),
            }
        };
        let mut names: Vec<String> = status["members"].as_array().unwrap().iter().map(name).collect();
        names.sort();
        names
    }

    fn status(&self) -> Value {
        let url = format!("http://127.0.0.1:{}", self.port);
        let mut command = common::mixfleet();
        let output =
            command.args(["fleet", "status", "--json", "--etcd", &url]).args(&self.flags).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// A worker once it has joined, and its name.
fn named(mut worker: Process) -> (Process, String) {
    let line = worker.says("joined");
    let (_, name) = line.split_once("member=\"").unwrap();
    let name = name.split('"').next().unwrap().to_string();
    (worker, name)
}

/// The answer to a GET.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// A greedy request of a golden case, as a stream of server-sent events.
fn stream(address: &str, case: &Value, tokens: usize) -> BufReader<TcpStream> {
    let body = json!({"model": "llama-gqa-f32", "prompt": case["prompt_ids"], "max_tokens": tokens,
        "temperature": 0, "ignore_eos": true, "stream": true})
    .to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let length = body.len();
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
    BufReader::new(stream)
}

/// The text of the next event; none at the end.
fn next_text(stream: &mut BufReader<TcpStream>) -> Option<String> {
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let Some(data) = line.trim_end().strip_prefix("data: ") else {
            assert!(!line.starts_with("HTTP/1.1") || line.contains(" 200 "), "{line}");
            continue;
        };
        if data == "[DONE]" {
            return None;
        }
        let event: Value = serde_json::from_str(data).unwrap();
        assert!(event.get("error").is_none(), "{event}");
        return Some(event["choices"][0]["text"].as_str().unwrap_or_default().to_string());
    }
}

fn rest(mut stream: BufReader<TcpStream>, mut text: String) -> String {
    while let Some(more) = next_text(&mut stream) {
        text.push_str(&more);
    }
    text
}

/// What one process gives; its first tokens are the golden ones.
fn alone(fleet: &ProcessFleet, case: &Value, tokens: usize) -> String {
    let prompt = common::ids(&case["prompt_ids"]);
    let answer = common::generate(&common::Generate {
        model: &fleet.model,
        prompt_ids: &prompt,
        max_tokens: tokens as u32,
        prefill: "cpu",
        decode: "cpu",
        further: &[],
    });
    let (ids, golden) = (common::ids(&answer["ids"]), common::ids(&case["greedy_ids"]));
    let both = ids.len().min(golden.len());
    assert_eq!(ids[..both], golden[..both]);
    answer["text"].as_str().unwrap().to_string()
}

/// Until the router can place a request.
fn wait_until_served(address: &str, case: &Value) {
    let body = json!({"model": "llama-gqa-f32", "prompt": case["prompt_ids"], "max_tokens": 1}).to_string();
    let begun = std::time::Instant::now();
    loop {
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        if answer.starts_with("HTTP/1.1 200") {
            return;
        }
        assert!(begun.elapsed() < LONG, "{answer}");
        std::thread::yield_now();
    }
}

#[test]
fn a_stream_goes_on_when_its_decode_worker_is_killed_and_another_router_serves_when_one_is() {
    const TOKENS: usize = 1200;
    let Some(fleet) = ProcessFleet::new("killed") else { return };
    let case = &common::golden(&fleet.model)["cases"][5];
    let expected = alone(&fleet, case, TOKENS);
    let (_prefill, _) = fleet.joined("cpu", "prefill", &[]);
    let mut decoders = [fleet.joined("cpu@0", "decode", &[]).0, fleet.joined("cpu@1", "decode", &[]).0];
    let ((mut router, address), (_other, other_address)) = (fleet.router(), fleet.router());
    wait_until_served(&address, case);
    wait_until_served(&other_address, case);

    let mut answer = stream(&address, case, TOKENS);
    let begun: String = (0..20).map(|_| next_text(&mut answer).expect("it has begun")).collect();
    let mut placed = router.says("placed");
    while let Ok(later) = router.log.try_recv() {
        if later.contains("placed") {
            placed = later;
        }
    }
    let dying = usize::from(placed.contains("decode=cpu@1"));
    decoders[dying].kill();
    // It was in the middle of the answer: the request needs another place.
    let other = ["decode=cpu@1", "decode=cpu@0"][dying];
    let again = router.says("placed");
    assert!(again.contains(other), "{again}");
    assert!(rest(answer, begun) == expected, "the stream went on with other tokens");

    router.kill();
    assert!(rest(stream(&other_address, case, TOKENS), String::new()) == expected);
    let short = stream(&other_address, case, 48);
    assert_eq!(rest(short, String::new()), alone(&fleet, case, 48), "the golden tokens");
}

#[test]
fn a_hung_worker_is_left_out_and_comes_back() {
    let Some(fleet) = ProcessFleet::new("hung") else { return };
    let case = &common::golden(&fleet.model)["cases"][0];
    let (hung, _) = fleet.joined("cpu@0", "auto", &[]);
    let (mut router, address) = fleet.router();
    wait_until_served(&address, case);
    let begun = std::time::Instant::now();
    hung.signal("-STOP");
    router.says("a worker process is lost");
    println!("a hung worker was missed after {:.2} s; the lease is 2 s", begun.elapsed().as_secs_f64());
    let (_fresh, _) = fleet.joined("cpu@1", "auto", &[]);
    wait_until_served(&address, case);
    // It finds its sessions gone, and is a member again.
    hung.signal("-CONT");
    router.says("uses a worker process");
    router.says("uses a worker process");
}

#[test]
fn without_etcd_serving_goes_on_and_joining_waits() {
    let Some(mut fleet) = ProcessFleet::new("etcd") else { return };
    let case = &common::golden(&fleet.model)["cases"][1];
    let expected = alone(&fleet, case, 48);
    let (mut first, name) = fleet.joined("cpu@0", "auto", &[]);
    let (mut router, address) = fleet.router();
    wait_until_served(&address, case);

    fleet.etcd.kill();
    router.says("etcd is lost");
    first.says("etcd is lost");
    let mut late = fleet.worker("cpu@1", "auto", &[]);
    late.says("etcd cannot be reached: joining the fleet waits");
    assert_eq!(rest(stream(&address, case, 48), String::new()), expected);

    fleet.etcd = etcd(&fleet.data, fleet.port);
    late.says("joined");
    late.says("exchanges KV with a worker process");
    router.says_all(&["etcd is reached again", "uses a worker process"]);
    let status = fleet.status();
    assert_eq!(status["schema"], "mixfleet.fleet/1");
    let members = status["members"].as_array().unwrap();
    assert_eq!(members.len(), 3, "{status}");
    let link = members.iter().find_map(|member| member["links"].get(&name));
    assert!(link.is_some_and(|link| link["state"] == "up" && link["transport"] == "shm"), "{status}");
    assert_eq!(rest(stream(&address, case, 48), String::new()), expected);
}

#[cfg(feature = "epp")]
#[test]
fn a_router_serves_autoscalers() {
    let Some(fleet) = ProcessFleet::new("router-scaler") else { return };
    let router = |plan: &Path| {
        let words = ["--listen", "127.0.0.1:0", "--scaler", "127.0.0.1:0", "--scale", plan.to_str().unwrap()];
        Process::start(&mut fleet.command(&fleet.model, "router", &words))
    };
    let plan = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans/llmd/scale.yaml");
    let mut scaling = router(&plan);
    let line = scaling.says("serves autoscalers");
    let (_, address) = line.split_once("scaler=").unwrap();
    TcpStream::connect(address.trim()).expect("it listens");
    router(Path::new("no/plan.yaml")).says("--scale: cannot read no/plan.yaml");
}

/// A prefill worker, a decode worker and a router.
struct Split {
    _workers: [Process; 2],
    router: Process,
    address: String,
}

impl Split {
    /// Has answered a request with the golden tokens, whose KV went from one worker to the other.
    fn new(fleet: &ProcessFleet, [prefill_device, decode_device]: [&str; 2], worker_flags: &[&str]) -> Self {
        let case = &common::golden(&fleet.model)["cases"][5];
        let (prefill, _) = fleet.joined(prefill_device, "prefill", worker_flags);
        let (mut decode, _) = fleet.joined(decode_device, "decode", worker_flags);
        decode.says("exchanges KV with a worker process");
        let (mut router, address) = fleet.router();
        wait_until_served(&address, case);
        let split = |router: &mut Process| {
            let placed = router.says("placed");
            let both = [format!("prefill={prefill_device}"), format!("decode={decode_device}")];
            assert!(both.iter().all(|one| placed.contains(one)), "{placed}");
        };
        split(&mut router);
        assert_eq!(rest(stream(&address, case, 48), String::new()), alone(fleet, case, 48));
        split(&mut router);
        let metrics = get(&address, "/metrics");
        let handed = metrics.lines().find_map(|l| l.strip_prefix("mixfleet_kv_exposed_seconds_count "));
        assert!(handed.is_some_and(|count| count.parse::<u64>().unwrap() > 0), "{metrics}");
        Split { _workers: [prefill, decode], router, address }
    }
}

/// What carries KV between the two workers of a fleet.
fn transport_between(fleet: &ProcessFleet) -> String {
    let status = fleet.status();
    let members = status["members"].as_array().unwrap();
    let links = members.iter().filter_map(|member| member["links"].as_object()).flatten();
    let up: Vec<&Value> = links.map(|(_, link)| link).filter(|link| link["state"] == "up").collect();
    assert_eq!(up.len(), 1, "{status}");
    up[0]["transport"].as_str().unwrap().to_string()
}

#[test]
fn kv_of_several_devices_goes_over_tcp_where_only_that_is_wanted() {
    let Some(fleet) = ProcessFleet::new("tcp") else { return };
    let _split = Split::new(&fleet, ["tp:cpu@0,cpu@1", "cpu"], &["--transports", "tcp"]);
    assert_eq!(transport_between(&fleet), "tcp");
}

#[test]
fn members_of_one_authority_serve_under_tls_and_who_has_another_is_refused() {
    let Some(mut fleet) = ProcessFleet::new("tls") else { return };
    fleet.flags = authority::member(&fleet.data, "ours");
    let mut split = Split::new(&fleet, ["cpu@0", "cpu@1"], &["--transports", "tcp"]);
    assert_eq!(transport_between(&fleet), "tcp");

    let ours = std::mem::replace(&mut fleet.flags, authority::member(&fleet.data, "theirs"));
    // etcd takes anyone of this host here: it is the sessions that are refused.
    let (mut stranger, _) = fleet.joined("cpu", "auto", &[]);
    // as the one that calls, and as the one that is called
    for refused in [stranger.has_said("no session"), split.router.has_said("no session")] {
        assert!(refused.contains("certificate"), "{refused}");
    }
    fleet.flags = ours;
    let case = &common::golden(&fleet.model)["cases"][1];
    assert_eq!(rest(stream(&split.address, case, 48), String::new()), alone(&fleet, case, 48));
}

#[test]
fn ways_of_kv_that_cannot_be_are_usage_errors() {
    for (names, says) in [("tcp,tcp", "names tcp twice"), ("pigeon", "possible values")] {
        let mut command = common::mixfleet();
        command.args(["worker", "--etcd", "http://127.0.0.1:1", "--transports", names]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn an_etcd_that_lost_its_data_is_told_what_members_know_and_gives_no_id_twice() {
    let Some(mut fleet) = ProcessFleet::new("data-lost") else { return };
    let case = &common::golden(&fleet.model)["cases"][1];
    let expected = alone(&fleet, case, 48);
    let (mut first, first_name) = fleet.joined("cpu@0", "auto", &[]);
    let (mut second, second_name) = fleet.joined("cpu@1", "auto", &[]);
    assert_eq!([first_name.as_str(), second_name.as_str()], ["worker-0", "worker-1"]);
    let (mut router, address) = fleet.router();
    wait_until_served(&address, case);

    fleet.lose_etcds_data();
    for process in [&mut first, &mut second, &mut router] {
        process.says("etcd is lost");
    }
    assert_eq!(rest(stream(&address, case, 48), String::new()), expected);
    fleet.etcd = etcd(&fleet.data, fleet.port);
    for process in [&mut first, &mut second, &mut router] {
        process.says("etcd is reached again");
    }
    let (_third, third_name) = fleet.joined("cpu@0", "auto", &[]);
    let (_other, other_address) = fleet.router();
    assert_eq!(third_name, "worker-2");
    let status = fleet.status();
    assert_eq!(fleet.names(), ["router-0", "router-1", "worker-0", "worker-1", "worker-2"], "{status}");
    wait_until_served(&other_address, case);
    for address in [address, other_address] {
        assert_eq!(rest(stream(&address, case, 48), String::new()), expected);
    }
}

#[test]
fn whose_id_was_given_again_ends_with_the_reason() {
    let Some(mut fleet) = ProcessFleet::new("taken") else { return };
    let (mut hung, name) = fleet.joined("cpu@0", "auto", &[]);
    hung.signal("-STOP");
    fleet.lose_etcds_data();
    fleet.etcd = etcd(&fleet.data, fleet.port);
    // It cannot say that its id is in use.
    let (_newcomer, again) = fleet.joined("cpu@1", "auto", &[]);
    assert_eq!(name, again);
    hung.signal("-CONT");
    hung.says("another process is in the fleet as 'worker-0'");
    assert_eq!(hung.child.wait().unwrap().code(), Some(3));
    assert_eq!(fleet.names(), ["worker-0"]);
}

#[test]
fn who_watches_a_worker_learns_whether_it_can_serve_and_what_it_did() {
    let Some(fleet) = ProcessFleet::new("watched") else { return };
    let case = &common::golden(&fleet.model)["cases"][0];
    let arguments = ["--device", "cpu", "--listen-http", "127.0.0.1:0"];
    let mut worker = Process::start(&mut fleet.command(&fleet.model, "worker", &arguments));
    let line = worker.says("answers /live");
    let (_, address) = line.split_once("address=\"").unwrap();
    let address = address.split('"').next().unwrap().to_string();
    assert!(get(&address, "/live").starts_with("HTTP/1.1 200"));
    worker.says("joined");
    let (mut router, router_address) = fleet.router();
    wait_until_served(&router_address, case);
    assert!(get(&address, "/health").starts_with("HTTP/1.1 200"));
    assert!(get(&router_address, "/health").starts_with("HTTP/1.1 200"));
    let metrics = get(&address, "/metrics");
    let value = |name: &str| {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert!(value("mixfleet_device_steps_total{") >= 1.0 && value("mixfleet_device_tokens_total{") >= 7.0);
    assert_eq!(value("mixfleet_instances"), 1.0);
    worker.kill();
    router.says("a worker process is lost");
    // The message that its instance is gone is in flight through the router.
    let begun = std::time::Instant::now();
    while !get(&router_address, "/health").starts_with("HTTP/1.1 503") {
        assert!(begun.elapsed() < LONG);
        std::thread::yield_now();
    }
    assert!(get(&router_address, "/live").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_worker_with_another_model_is_refused_with_the_reason() {
    let Some(fleet) = ProcessFleet::new("model") else { return };
    let (_first, _) = fleet.joined("cpu@0", "auto", &[]);
    let other = fleet.model.with_file_name("qwen3-qknorm-tied-bf16");
    let output = fleet.command(&other, "worker", &["--device", "cpu@1"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("another model") && said.contains("--model"), "{said}");
}

/// Flips a bit of the last byte of the largest tensor.
fn damage(weights: &Path) {
    let mut bytes = std::fs::read(weights).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let ranges = header.as_object().unwrap().values().filter_map(|tensor| tensor["data_offsets"].as_array());
    let ranges =
        ranges.map(|range| (range[0].as_u64().unwrap() as usize, range[1].as_u64().unwrap() as usize));
    let (begin, end) = ranges.max_by_key(|(begin, end)| end - begin).unwrap();
    assert!(end - begin > 64 << 10, "its end is beyond the former limit of the search");
    bytes[start + end - 1] ^= 1;
    std::fs::write(weights, bytes).unwrap();
}

#[test]
fn a_worker_whose_shard_is_damaged_is_refused() {
    let Some(fleet) = ProcessFleet::new("damaged") else { return };
    let (_first, _) = fleet.joined("cpu@0", "auto", &[]);
    let damaged = fleet.data.join("damaged-model");
    std::fs::create_dir_all(&damaged).unwrap();
    for entry in std::fs::read_dir(&fleet.model).unwrap() {
        let entry = entry.unwrap();
        std::fs::write(damaged.join(entry.file_name()), std::fs::read(entry.path()).unwrap()).unwrap();
    }
    damage(&damaged.join("model.safetensors"));
    let output = fleet.command(&damaged, "worker", &["--device", "cpu@1"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("another model"), "{said}");
}

#[test]
fn a_worker_says_whether_it_may_use_rdma() {
    let Some(fleet) = ProcessFleet::new("rdma") else { return };
    let arguments = ["--device", "cpu@0", "--trusted-fabric"];
    let mut worker = Process::start(&mut fleet.command(&fleet.model, "worker", &arguments));
    // of a NIC, of the lack of one, or of this build
    let said = worker.says("RDMA");
    worker.says("joined");
    let mut members = fleet.status()["members"].clone();
    let begun = std::time::Instant::now();
    while members.as_array().is_none_or(Vec::is_empty) {
        assert!(begun.elapsed() < LONG, "{members}");
        members = fleet.status()["members"].clone();
    }
    let seat = &members[0]["seat"];
    let has = |list: &Value, text: &str| {
        list.as_array().is_some_and(|list| list.iter().any(|entry| entry.as_str().unwrap().starts_with(text)))
    };
    let offered = said.contains("KV may be sent over RDMA");
    assert_eq!(has(&seat["transports"], "verbs"), offered, "{said}: {members}");
    assert_eq!(has(&seat["not_offered"], "verbs: "), !offered, "{said}: {members}");
}

#[test]
fn what_leaves_this_host_needs_certificates() {
    let refused = |arguments: &[&str]| {
        let output = common::mixfleet().args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        said
    };
    let etcd = ["--etcd", "http://127.0.0.1:1"];
    let open = [&["worker"], &etcd[..], &["--listen-control", "192.0.2.1:7000"]].concat();
    assert!(refused(&open).contains("--tls-ca, --tls-cert and --tls-key"));
    let data = [&["worker"], &etcd[..], &["--listen-data", "192.0.2.1:7000"]].concat();
    assert!(refused(&data).contains("--tls-ca, --tls-cert and --tls-key"));
    assert!(refused(&["fleet", "status", "--etcd", "http://192.0.2.1:2379"]).contains("https"));
    assert!(refused(&["fleet", "status", "--etcd", "https://192.0.2.1:2379"]).contains("--tls-ca"));
    let wide = [&["worker"], &etcd[..], &["--listen-control", "0.0.0.0:7000"]].concat();
    assert!(refused(&wide).contains("by which members reach it"));
}
