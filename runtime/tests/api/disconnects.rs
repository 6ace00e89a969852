//! A client that disconnects cancels its requests.

use super::support::{ADDRESS, MODEL, Play, Response, Server, Setup, request, run};
use mixfleet_runtime::env::Env;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[test]
fn a_hundred_streams_dropped_at_once_are_a_hundred_cancellations() {
    run(Setup::play(Play::Endless(97)), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let mut connections = Vec::new();
        for _ in 0..100 {
            connections.push(server.open_stream("/v1/completions", &body).await);
        }
        assert_eq!((server.submissions().len(), server.cancellations()), (100, 0));
        drop(connections);
        server.until("100 cancelled", || server.cancellations() == 100).await;
        let counted = "mixfleet_requests_total{endpoint=\"completions\",outcome=\"cancelled\"} 100";
        assert!(server.metrics.encode().contains(counted));
    });
}

#[test]
fn a_silent_stream_is_cancelled_too() {
    run(Setup::play(Play::Hang(vec![97])), |server| async move {
        let body =
            json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": true, "n": 2});
        let connection = server.open_stream("/v1/chat/completions", &body).await;
        drop(connection);
        server.until("both choices cancelled", || server.cancellations() == 2).await;
    });
}

#[test]
fn whole_answers_are_cancelled_too() {
    run(Setup::play(Play::Hang(vec![97])), |server| async move {
        let body = json!({"model": MODEL, "prompt": ["a", "b"]}).to_string();
        let mut connections = Vec::new();
        for _ in 0..50 {
            let mut connection = server.env.connect(ADDRESS).unwrap();
            connection.write_all(&request("POST", "/v1/completions", "", body.as_bytes())).await.unwrap();
            connections.push(connection);
        }
        server.until("100 submitted", || server.submissions().len() == 100).await;
        assert_eq!(server.cancellations(), 0);
        drop(connections);
        server.until("100 cancelled", || server.cancellations() == 100).await;
    });
}

#[test]
fn a_client_that_stops_reading_is_cut_off() {
    run(Setup::play(Play::Endless(97)), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let connection = server.open_stream("/v1/completions", &body).await;
        // The connection's buffer of 64 KiB fills within a virtual second; the stall limit is 60.
        server.env.sleep(Duration::from_secs(50)).await;
        assert_eq!(server.cancellations(), 0);
        server.env.sleep(Duration::from_secs(30)).await;
        assert_eq!(server.cancellations(), 1);
        drop(connection);
    });
}

const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// All that a client gets that closes its sending side after a request.
async fn half_closed(server: &Server, sent: &[u8]) -> Vec<u8> {
    let mut connection = server.env.connect(ADDRESS).unwrap();
    connection.write_all(sent).await.unwrap();
    connection.shutdown().await.unwrap();
    let mut received = Vec::new();
    connection.read_to_end(&mut received).await.unwrap();
    received
}

fn completion(body: &Value) -> Vec<u8> {
    request("POST", "/v1/completions", "", body.to_string().as_bytes())
}

#[test]
fn a_half_closed_client_gets_its_whole_answer() {
    run(Setup::play(Play::say("all of it")), |server| async move {
        let received = half_closed(&server, &completion(&json!({"model": MODEL, "prompt": "a"}))).await;
        let response = Response::parse(received.strip_prefix(INTERIM).expect("one interim response"));
        assert_eq!((response.status, server.cancellations()), (200, 0));
        assert_eq!(response.json()["choices"][0]["text"], "all of it");
    });
}

#[test]
fn a_half_closed_client_gets_its_stream_to_the_end() {
    run(Setup::play(Play::say("all of it")), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let received = half_closed(&server, &completion(&body)).await;
        let response = Response::parse(received.strip_prefix(INTERIM).unwrap_or(&received));
        assert!(!response.truncated && response.body.ends_with("data: [DONE]\n\n"), "{}", response.body);
        let events: Vec<&str> =
            response.body.split("\n\n").filter(|event| event.starts_with("data: {")).collect();
        let text = |event: &&str| {
            serde_json::from_str::<Value>(&event[6..]).unwrap()["choices"][0]["text"]
                .as_str()
                .map(str::to_owned)
        };
        assert_eq!(events.iter().filter_map(text).collect::<String>(), "all of it");
    });
}

#[test]
fn clients_of_http_1_0_get_no_interim_response() {
    run(Setup::play(Play::say("all of it")), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a"}).to_string();
        let head =
            format!("POST /v1/completions HTTP/1.0\r\nhost: api\r\ncontent-length: {}\r\n\r\n", body.len());
        let received = half_closed(&server, &[head.as_bytes(), body.as_bytes()].concat()).await;
        assert_eq!(Response::parse(&received).json()["choices"][0]["text"], "all of it");
    });
}

#[test]
fn a_client_that_leaves_after_half_closing_is_noticed() {
    run(Setup::play(Play::Hang(vec![])), |server| async move {
        let bodies =
            [json!({"model": MODEL, "prompt": "a"}), json!({"model": MODEL, "prompt": "a", "stream": true})];
        for (number, body) in bodies.iter().enumerate() {
            let mut connection = server.env.connect(ADDRESS).unwrap();
            connection.write_all(&completion(body)).await.unwrap();
            connection.shutdown().await.unwrap();
            server.until("submitted", || server.submissions().len() == number + 1).await;
            server.env.sleep(Duration::from_secs(3)).await;
            assert_eq!(server.cancellations(), number, "it still waits");
            drop(connection);
            server.env.sleep(Duration::from_secs(3)).await;
            assert_eq!(server.cancellations(), number + 1, "{body}");
        }
    });
}

#[test]
fn a_pipelined_request_waits_for_the_answer_before_it() {
    run(Setup::play(Play::say("both")), |server| async move {
        let mut first = completion(&json!({"model": MODEL, "prompt": "a"}));
        let close = b"connection: close\r\n";
        let at = first.windows(close.len()).position(|window| window == close).unwrap();
        first.drain(at..at + close.len());
        let second = completion(&json!({"model": MODEL, "prompt": "b"}));
        let mut connection = server.env.connect(ADDRESS).unwrap();
        connection.write_all(&first).await.unwrap();
        server.until("submitted", || server.submissions().len() == 1).await;
        connection.write_all(&second).await.unwrap();
        let mut received = Vec::new();
        connection.read_to_end(&mut received).await.unwrap();
        let text = String::from_utf8(received).unwrap();
        assert_eq!(
            (text.matches("HTTP/1.1 200").count(), text.matches("\"both\"").count()),
            (2, 2),
            "{text}"
        );
    });
}
