//! Limits and timeouts of connections.

use super::support::{ADDRESS, MODEL, Play, Response, Server, Setup, request, run};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use mixfleet_runtime::api::{Origins, Shutdown, serve};
use mixfleet_runtime::budget::Connections;
use mixfleet_runtime::env::{Connection, Env, Listener};
use serde_json::{Value, json};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const HALF_OPEN: &[u8] = b"GET /live HTTP/1.1\r\nhost: api\r\n";

fn house(max: usize, per_address_max: usize, aside_max: usize) -> Setup {
    let connections = Connections { max, per_address_max, aside_max };
    Setup::play(Play::Hang(vec![97])).with_limits(|limits| limits.connections = connections)
}

fn stream() -> Value {
    json!({"model": MODEL, "prompt": "a", "stream": true})
}

fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

impl Server {
    /// Requests `path` for a client at `ip`.
    async fn ask(&self, ip: IpAddr, path: &str) -> Response {
        let mut connection = self.env.connect_from(ip, ADDRESS).unwrap();
        let method = if path.starts_with("/v1/c") { "POST" } else { "GET" };
        connection.write_all(&request(method, path, "", stream().to_string().as_bytes())).await.unwrap();
        Response::read(&mut connection).await
    }

    /// Opens a connection from `ip` that sends these bytes and no more.
    async fn sent(&self, ip: IpAddr, bytes: &[u8]) -> Box<dyn Connection> {
        let mut connection = self.env.connect_from(ip, ADDRESS).unwrap();
        connection.write_all(bytes).await.unwrap();
        connection
    }

    /// Opens a stream from `ip` that hangs after its first event.
    async fn stream_from(&self, ip: IpAddr) -> Box<dyn Connection> {
        let body = stream().to_string();
        let mut connection = self.sent(ip, &request("POST", "/v1/completions", "", body.as_bytes())).await;
        let mut seen = Vec::new();
        while !seen.windows(5).any(|window| window == b"data:") {
            assert_ne!(
                connection.read_buf(&mut seen).await.unwrap(),
                0,
                "{}",
                String::from_utf8_lossy(&seen)
            );
        }
        connection
    }
}

/// Whether the server has closed the connection.
async fn is_closed(server: &Server, connection: &mut Box<dyn Connection>) -> bool {
    let mut bytes = Vec::new();
    tokio::select! { biased;
        read = connection.read_to_end(&mut bytes) => read.is_err() || bytes.is_empty(),
        () = server.env.sleep(Duration::from_millis(1)) => false,
    }
}

#[test]
fn a_thousand_half_open_connections_do_not_keep_newcomers_waiting() {
    for sends in [&b""[..], HALF_OPEN] {
        run(house(64, 32, 8), move |server| async move {
            let mut strangers = Vec::new();
            for number in 0..1024 {
                strangers.push(server.sent(ip(number as u8 % 4), sends).await);
            }
            let before = server.env.now();
            for path in ["/live", "/health", "/v1/models"] {
                assert_eq!(server.ask(ip(0), path).await.status, 200, "{path}");
                assert_eq!(server.ask(ip(9), path).await.status, 200, "{path}");
            }
            assert!((server.env.now() - before).0 < 1.0);
            assert!(is_closed(&server, &mut strangers[0]).await, "the oldest makes room");
            assert!(!is_closed(&server, &mut strangers[1023]).await, "the youngest stays");
        });
    }
}

#[test]
fn a_connection_that_asks_nothing_ends_soon_and_one_that_rests_stays() {
    run(house(8, 8, 2), |server| async move {
        let mut silent = server.sent(ip(1), b"").await;
        let mut half_open = server.sent(ip(1), HALF_OPEN).await;
        let mut resting = server.sent(ip(1), b"GET /live HTTP/1.1\r\nhost: api\r\n\r\n").await;
        assert_ne!(resting.read_buf(&mut Vec::new()).await.unwrap(), 0);
        server.env.sleep(Duration::from_millis(9900)).await;
        assert!(!is_closed(&server, &mut silent).await && !is_closed(&server, &mut half_open).await);
        server.env.sleep(Duration::from_millis(200)).await;
        assert!(is_closed(&server, &mut silent).await && is_closed(&server, &mut half_open).await);
        server.env.sleep(Duration::from_secs(40)).await;
        assert!(!is_closed(&server, &mut resting).await);
        server.env.sleep(Duration::from_secs(10)).await;
        assert!(is_closed(&server, &mut resting).await);
    });
}

#[test]
fn beside_a_house_full_of_work_the_watchers_are_answered_and_others_are_told_to_retry() {
    run(house(4, 4, 2), |server| async move {
        let mut running = Vec::new();
        for last in 0..4 {
            running.push(server.stream_from(ip(last)).await);
        }
        for path in ["/live", "/health", "/metrics"] {
            assert_eq!(server.ask(ip(7), path).await.status, 200, "{path}");
        }
        let refused = server.ask(ip(7), "/v1/completions").await;
        assert_eq!((refused.error().0, refused.error().3.as_str()), (503, "connections_exhausted"));
        assert_eq!(
            (refused.headers["retry-after"].as_str(), refused.headers["connection"].as_str()),
            ("1", "close")
        );
        // The overflow is connections without requests: the oldest one is closed.
        let mut strangers = Vec::new();
        for last in 10..200 {
            strangers.push(server.sent(ip(last), HALF_OPEN).await);
        }
        assert_eq!(server.ask(ip(8), "/live").await.status, 200);
        assert_eq!(
            (server.submissions().len(), server.cancellations()),
            (4, 0),
            "a connection at work is not disturbed"
        );
        running.pop();
        server.until("a place is free", || server.cancellations() == 1).await;
        drop(server.stream_from(ip(9)).await);
    });
}

#[test]
fn who_has_to_go_or_finds_no_place_is_counted() {
    run(house(4, 4, 2), |server| async move {
        let mut strangers = Vec::new();
        for last in 0..10 {
            strangers.push(server.sent(ip(last), HALF_OPEN).await);
        }
        server.env.sleep(Duration::from_millis(1)).await;
        assert_eq!(server.metrics.connections_evicted.get(), 6);
        let mut running = Vec::new();
        for last in 0..4 {
            running.push(server.stream_from(ip(last)).await);
        }
        assert_eq!(server.metrics.connections_evicted.get(), 10, "four more for those with requests");
        assert_eq!(server.ask(ip(7), "/v1/completions").await.status, 503);
        let told = server.metrics.encode();
        assert!(told.contains("http_refused_total{code=\"connections_exhausted\"} 1\n"), "{told}");
    });
}

#[test]
fn one_address_has_no_more_than_its_share() {
    run(house(8, 4, 2), |server| async move {
        let greedy = ip(1);
        let mut running = Vec::new();
        for _ in 0..4 {
            running.push(server.stream_from(greedy).await);
        }
        assert_eq!(server.ask(greedy, "/v1/completions").await.error().0, 503);
        assert_eq!(server.ask(greedy, "/live").await.status, 200);
        for last in 2..6 {
            running.push(server.stream_from(ip(last)).await);
        }
        assert_eq!((running.len(), server.cancellations()), (8, 0));

        // While it only waits, its own oldest connection is closed, and none of another client.
        drop(running);
        server.until("all are cancelled", || server.cancellations() == 8).await;
        let mut other = server.sent(ip(2), HALF_OPEN).await;
        let mut own = server.sent(greedy, HALF_OPEN).await;
        let mut more = Vec::new();
        for _ in 0..100 {
            more.push(server.sent(greedy, HALF_OPEN).await);
        }
        drop(server.stream_from(greedy).await);
        assert!(is_closed(&server, &mut own).await && !is_closed(&server, &mut other).await);
    });
}

#[test]
fn whose_wrong_requests_are_answered_holds_no_place_by_not_reading() {
    run(house(4, 4, 1), |server| async move {
        // The answers exceed the connection's buffers, so that the last ones are never written.
        let asked = [
            request("GET", "/v1/nothing", "", b""),
            b"GET /metrics HTTP/1.1\r\nhost: api\r\n\r\n".repeat(20),
        ];
        let asked = asked
            .map(|bytes| String::from_utf8(bytes).unwrap().replace("connection: close\r\n", ""))
            .concat();
        let mut strangers = Vec::new();
        for _ in 0..20 {
            strangers.push(server.sent(ip(1), asked.as_bytes()).await);
        }
        server.env.sleep(Duration::from_millis(5)).await;
        for _ in 0..4 {
            strangers.push(server.stream_from(ip(2)).await);
        }
    });
}

#[test]
fn an_answer_that_is_still_read_is_not_cut_for_a_newcomer() {
    let connections = Connections { max: 2, per_address_max: 2, aside_max: 1 };
    let setup =
        Setup::play(Play::say(&"a".repeat(40))).with_limits(|limits| limits.connections = connections);
    run(setup, |server| async move {
        let body =
            json!({"model": MODEL, "prompt": "a", "n": 100, "logprobs": 5, "max_tokens": 50}).to_string();
        let mut slow = server.sent(ip(1), &request("POST", "/v1/completions", "", body.as_bytes())).await;
        server.until("all is computed", || server.submissions().len() == 100).await;
        server.env.sleep(Duration::from_secs(5)).await;
        let mut newcomers = Vec::new();
        for last in 10..30 {
            newcomers.push(server.sent(ip(last), HALF_OPEN).await);
        }
        server.env.sleep(Duration::from_secs(5)).await;
        let answer = Response::read(&mut slow).await;
        assert!(answer.status == 200 && answer.body.len() > 128 * 1024, "{} bytes", answer.body.len());
        assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 100);
    });
}

/// A listener that fails as if the process had no descriptors left, and then works.
struct Exhausted {
    inner: Box<dyn Listener>,
    fails: u32,
}

impl Listener for Exhausted {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Box<dyn Connection>, SocketAddr)>> {
        Box::pin(async move {
            if self.fails > 0 {
                self.fails -= 1;
                return Err(io::Error::from_raw_os_error(24));
            }
            self.inner.accept().await
        })
    }

    fn address(&self) -> String {
        self.inner.address()
    }
}

#[test]
fn without_descriptors_accepting_pauses_and_goes_on_when_there_are_some() {
    run(Setup::play(Play::say("hi")), |server| async move {
        let inner = server.env.listen("second:80").await.unwrap();
        let listener = Box::new(Exhausted { inner, fails: 50 });
        let told = server.shutdown.subscribe();
        let ended = serve(listener, server.api.clone(), Origins::default(), told).boxed();
        server.env.spawn(ended);
        let before = server.env.now();
        let mut connection = server.env.connect("second:80").unwrap();
        connection.write_all(&request("GET", "/live", "", b"")).await.unwrap();
        assert_eq!(Response::read(&mut connection).await.status, 200);
        let took_s = (server.env.now() - before).0;
        assert!((4.9..5.2).contains(&took_s), "50 pauses, not a spin: {took_s}");
    });
}

#[test]
fn draining_is_bounded_whatever_clients_do() {
    let setup =
        Setup::play(Play::Endless(97)).with_limits(|limits| limits.drain_timeout = Duration::from_secs(7));
    run(setup, |server| async move {
        let unread = server.open_stream("/v1/completions", &stream()).await;
        let slow_body = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n{";
        let slow = server.sent(ip(1), slow_body).await;
        let half_open = server.sent(ip(1), HALF_OPEN).await;
        server.env.sleep(Duration::from_secs(1)).await;
        let before = server.env.now();
        server.shutdown.send(Shutdown::Drain).unwrap();
        server.ended.acquire().await.unwrap().forget();
        let took_s = (server.env.now() - before).0;
        assert!((6.9..7.1).contains(&took_s), "{took_s}");
        server.until("cancelled", || server.cancellations() == 1).await;
        drop((unread, slow, half_open));
    });
}

#[test]
fn draining_waits_for_nobody_who_asks_nothing() {
    run(house(8, 8, 1), |server| async move {
        let _half_open = server.sent(ip(1), HALF_OPEN).await;
        let _silent = server.sent(ip(1), b"").await;
        let mut resting = server.sent(ip(1), b"GET /live HTTP/1.1\r\nhost: api\r\n\r\n").await;
        assert_ne!(resting.read_buf(&mut Vec::new()).await.unwrap(), 0);
        let before = server.env.now();
        server.shutdown.send(Shutdown::Drain).unwrap();
        server.ended.acquire().await.unwrap().forget();
        assert!((server.env.now() - before).0 < 0.1);
    });
}
