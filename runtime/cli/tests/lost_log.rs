//! A server whose log cannot be written: it is not read, its reader has left, or its disk is full.

use crate::common::mixfleet;
use crate::common::server::Server;
use serde_json::json;
use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// Only ends a test that fails.
const LONG: Duration = Duration::from_secs(120);
/// Makes each request log several lines.
const TALKATIVE: &str = "export RUST_LOG=trace";

pub(crate) fn dropped_lines(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix("mixfleet_log_lines_dropped_total "));
    line.expect("the metric").parse().unwrap()
}

/// Sends SIGTERM and returns how the process ended.
pub(crate) fn terminated(child: &mut Child) -> ExitStatus {
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Asserts that a server answers while it drops its log, and that it stops on request.
fn answers_and_ends(server: &mut Server) {
    // each choice logs a line
    let body =
        json!({"model": "mixfleet-random", "prompt": "hello", "max_tokens": 1, "ignore_eos": true, "n": 64});
    let deadline = Instant::now() + LONG;
    loop {
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let metrics = server.call("GET", "/metrics", "", "").1;
        if dropped_lines(&metrics) > 0 {
            break;
        }
        assert!(Instant::now() < deadline, "no line was dropped");
    }
    assert_eq!(server.post("/v1/completions", &body).0, 200);
    assert!(terminated(&mut server.child).success());
}

#[test]
fn a_server_outlives_the_reader_of_its_log() {
    let mut server = Server::under(TALKATIVE, &["--kv-memory", "0.02"]);
    server.log = None;
    answers_and_ends(&mut server);
}

#[test]
fn a_server_answers_though_nobody_reads_its_log() {
    let mut server = Server::under(TALKATIVE, &["--kv-memory", "0.02"]);
    answers_and_ends(&mut server);
}

#[cfg(target_os = "linux")]
#[test]
fn a_server_answers_though_the_disk_of_its_log_is_full() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut command = mixfleet();
    command.args(["serve", "--listen", &address, "--kv-memory", "0.02"]).env("RUST_LOG", "trace");
    let child = command.stderr(File::create("/dev/full").unwrap()).spawn().unwrap();
    let mut server = Server { child, log: None, address, seen: String::new() };
    let deadline = Instant::now() + LONG;
    while std::net::TcpStream::connect(&server.address).is_err()
        || server.call("GET", "/health", "", "").0 != 200
    {
        assert!(server.child.try_wait().unwrap().is_none(), "it ended");
        assert!(Instant::now() < deadline, "it does not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    answers_and_ends(&mut server);
}

#[test]
fn an_error_ends_a_server_though_its_log_is_full() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut filler = writer.try_clone().unwrap();
    // ends once the pipe is full and its reader is gone
    std::thread::spawn(move || while std::io::Write::write_all(&mut filler, &[b'\n'; 4096]).is_ok() {});
    let mut command = mixfleet();
    command.args(["serve", "--listen", &taken.local_addr().unwrap().to_string(), "--kv-memory", "0.02"]);
    let mut child = command.stderr(writer).spawn().unwrap();
    let deadline = Instant::now() + LONG;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(3));
    drop(reader);
}
