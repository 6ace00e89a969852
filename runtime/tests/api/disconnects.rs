//! A client that disconnects cancels its requests.

use super::support::{ADDRESS, MODEL, Play, Setup, request, run};
use mixfleet_runtime::env::Env;
use serde_json::json;
use std::time::Duration;
use tokio::io::AsyncWriteExt;

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
