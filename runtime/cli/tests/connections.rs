//! Clients of the binary that only hold connections, come by strange names, or never let go.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use crate::common;
use crate::common::server::Server;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

/// Under this limit on open files, one client could hold all connections.
const OPEN_FILES: u32 = 256;

fn completion(prompt: &str) -> Value {
    json!({"model": "mixfleet-random", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true})
}

fn status(server: &Server, path: &str) -> u16 {
    server.call("GET", path, "", "").0
}

/// What the kernel says of a process's open files: the soft limit, and how many there are.
fn open_files(server: &Server) -> (u64, usize) {
    let of = |file: &str| format!("/proc/{}/{file}", server.child.id());
    let limits = std::fs::read_to_string(of("limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let soft = line.split_whitespace().nth(3).unwrap().parse().unwrap();
    (soft, std::fs::read_dir(of("fd")).unwrap().count())
}

/// A server under a shell's limit on open files, with two devices where there are two cores.
fn limited(limit: &str, arguments: &[&str]) -> Server {
    let two = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    let devices: &[&str] = match two {
        true => &["--device", "cpu@0=prefill", "--device", "cpu@1=decode"],
        false => {
            println!("SKIPPED: one core only: no KV goes from one device to another");
            &["--device", "cpu"]
        }
    };
    Server::under(limit, &[&["--kv-memory", "0.02"], devices, arguments].concat())
}

#[test]
fn idle_strangers_leave_enough_for_hand_offs_between_devices() {
    let server = limited(&format!("ulimit -n {OPEN_FILES}"), &[]);
    let strangers: Vec<TcpStream> = (0..OPEN_FILES + 100)
        .map(|number| {
            let mut stream = server.connect();
            if number % 2 == 0 {
                // it may be closed already to make room for others
                let _ = stream.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n");
            }
            stream
        })
        .collect();
    assert_eq!((status(&server, "/live"), status(&server, "/health")), (200, 200));
    let (limit, open) = open_files(&server);
    assert_eq!(limit, u64::from(OPEN_FILES));
    assert!(open < OPEN_FILES as usize - 40, "{open} files are open, and hand-offs need some");
    // the first hand-off there: it makes the memory that KV goes through
    for prompt in ["a", "hand-off", "between two devices"] {
        let (status, answer) = server.post("/v1/completions", &completion(&prompt.repeat(40)));
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!((status(&server, "/live"), status(&server, "/health")), (200, 200));
    drop(strangers);
    assert_eq!(server.post("/v1/completions", &completion("after them")).0, 200);
}

#[test]
fn the_soft_limit_on_open_files_is_raised_to_the_hard_one() {
    let server = limited("ulimit -Sn 64; ulimit -Hn 512", &[]);
    assert_eq!(open_files(&server).0, 512);
    let strangers: Vec<TcpStream> = (0..200).map(|_| server.connect()).collect();
    assert_eq!(status(&server, "/health"), 200);
    assert_eq!(server.post("/v1/completions", &completion("beside them")).0, 200);
    drop(strangers);
}

/// A request whose body does not come.
fn stuck(server: &Server) -> TcpStream {
    let mut stream = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    // The server asks for the body: the request is in progress.
    let mut asks = [0; 12];
    stream.read_exact(&mut asks).unwrap();
    assert_eq!(&asks, b"HTTP/1.1 100");
    stream
}

/// A client whose request exceeds the socket buffers, and that reads nothing.
fn never_reading(server: &Server) -> TcpStream {
    let stream = server.connect();
    let mut asks = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        let line = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(200);
        // ends when the server does
        while asks.write_all(line.as_bytes()).is_ok() {}
    });
    stream
}

#[test]
fn draining_ends_in_time_whatever_clients_do() {
    let server = Server::start(&["--drain-s", "1"]);
    let (stuck, unread) = (stuck(&server), never_reading(&server));
    server.signal();
    let (status, log) = server.wait();
    assert!(status.success(), "{status}: {log}");
    assert!(log.contains("drain_s"), "{log}");
    drop((stuck, unread));
}

#[test]
fn a_second_signal_ends_a_long_drain_at_once() {
    let mut server = Server::start(&["--drain-s", "100000"]);
    let (stuck, unread) = (stuck(&server), never_reading(&server));
    server.signal();
    // two that come at once are one
    while !server.log_line().contains("draining") {}
    server.signal();
    let (status, log) = server.wait();
    assert!(status.success(), "{status}: {log}");
    drop((stuck, unread));
}

#[test]
fn no_thread_panics_because_the_process_ends() {
    let keys = common::scratch("keys").join("keys.toml");
    std::fs::write(&keys, "[[tenant]]\nname = \"a\"\nkey = \"b\"\n").unwrap();
    let server = Server::start(&["--api-keys", keys.to_str().unwrap(), "--health-listen", "127.0.0.1:0"]);
    server.signal();
    let (status, log) = server.wait();
    assert!(status.success() && !log.contains("panicked"), "{status}: {log}");
}

#[test]
fn those_who_watch_have_an_address_of_their_own() {
    let server = Server::start(&["--health-listen", "127.0.0.1:0", "--drain-s", "100000"]);
    let line = server.seen.lines().find(|line| line.contains("answers /live")).unwrap();
    let address =
        line.split("address=").nth(1).unwrap().trim_matches(|c: char| c == '"' || c.is_whitespace());
    let get = |path: &str, host: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let word = answer.split("\"status\":").nth(1).unwrap_or_default();
        (answer[9..12].parse::<u16>().unwrap(), word.trim_matches(|c: char| !c.is_alphanumeric()).to_string())
    };
    assert_eq!(get("/live", address), (200, "ok".into()));
    assert_eq!(get("/health", address), (200, "ok".into()));
    assert_eq!(get("/metrics", address).0, 200);
    assert_eq!(get("/v1/models", address).0, 404);
    assert_eq!(get("/metrics", "evil.example").0, 403);
    let stuck = stuck(&server);
    server.signal();
    // its own port accepts no more connections; the reason is here
    while TcpStream::connect(&server.address).is_ok() {
        std::thread::yield_now();
    }
    assert_eq!(get("/live", address), (200, "ok".into()));
    assert_eq!(get("/health", address), (503, "draining".into()));
    server.signal();
    assert!(server.wait().0.success());
    drop(stuck);
}

#[test]
fn strange_names_and_pages_need_leave() {
    let ask = |server: &Server, host: &str, more: &str| {
        let mut stream = server.connect();
        let body = completion("x").to_string();
        let length = body.len();
        write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{more}content-length: {length}\r\n\r\n{body}")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let code = serde_json::from_str::<Value>(body).unwrap()["error"]["code"].as_str().map(str::to_string);
        (head[9..12].parse::<u16>().unwrap(), code)
    };
    let json = "content-type: application/json\r\n";
    let page = "origin: https://chat.example\r\n";
    let server = Server::start(&[]);
    assert_eq!(ask(&server, &server.address, json), (200, None));
    assert_eq!(ask(&server, "rebound.example", json), (403, Some("host_not_allowed".into())));
    for more in [page.to_string(), format!("{page}{json}"), format!("{page}content-type: text/plain\r\n")] {
        assert_eq!(ask(&server, "localhost", &more), (403, Some("origin_not_allowed".into())));
    }
    let server = Server::start(&["--allow-host", "models.example", "--allow-origin", "https://chat.example"]);
    assert_eq!(ask(&server, "models.example:8000", json), (200, None));
    assert_eq!(ask(&server, "localhost", &format!("{page}{json}")), (200, None));
    assert_eq!(ask(&server, "rebound.example", json).0, 403);
}

#[test]
fn mistakes_about_connections_are_named() {
    let fails = |arguments: &[&str], words: &[&str]| {
        let output = common::mixfleet().arg("serve").args(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{arguments:?}: {text}");
    };
    fails(&["--allow-host", "http://a"], &["--allow-host", "no host"]);
    fails(&["--allow-origin", "a.example"], &["--allow-origin", "https://HOST"]);
    fails(&["--health-listen", "nonsense"], &["--health-listen", "HOST:PORT"]);
    for seconds in ["-1", "nan", "inf"] {
        fails(&[&format!("--drain-s={seconds}")], &["--drain-s"]);
    }
}
