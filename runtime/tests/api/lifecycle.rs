//! Loading, ready, draining, stopped.

use super::support::{ADDRESS, MODEL, Play, Response, Setup, run};
use mixfleet_runtime::api::Shutdown;
use mixfleet_runtime::env::Env;
use serde_json::json;
use std::sync::Arc;
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;

#[test]
fn loading_is_a_503_until_ready() {
    let setup = Setup { loading: true, ..Setup::play(Play::say("hi")) };
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a"});
        assert_eq!(server.get("/health").await.status, 503);
        assert_eq!(server.get("/metrics").await.status, 200);
        for response in [server.get("/v1/models").await, server.post("/v1/completions", &body).await] {
            assert_eq!((response.error().0, response.error().3.as_str()), (503, "loading"));
            assert_eq!(response.headers["retry-after"], "5");
        }
        server.make_ready();
        assert_eq!(server.get("/health").await.status, 200);
        assert_eq!(server.post("/v1/completions", &body).await.status, 200);
        server.api.drain();
        server.make_ready();
        assert_eq!(server.get("/health").await.json(), json!({"status": "draining"}));
        assert_eq!(server.post("/v1/completions", &body).await.error().3, "draining");
    });
}

#[test]
fn health_is_ok_only_while_a_pair_of_instances_can_serve_and_live_whatever_they_can() {
    run(Setup::play(Play::say("hi")), |server| async move {
        assert_eq!(server.get("/health").await.status, 200);
        // One instance is up, but cannot both prefill and decode.
        server.metrics.instances.set(1);
        server.metrics.serves.set(0);
        let told = server.get("/health").await;
        assert_eq!((told.status, told.json()), (503, json!({"status": "no pair of instances can serve"})));
        assert_eq!(server.get("/live").await.status, 200);
        server.metrics.serves.set(1);
        assert_eq!(server.get("/health").await.status, 200);
    });
}

#[test]
fn draining_finishes_what_runs_and_closes_the_rest() {
    let gate = Arc::new(Semaphore::new(0));
    let setup = Setup::play(Play::Gate(vec![97], gate.clone()));
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let mut idle = server.env.connect(ADDRESS).unwrap();
        let mut running = server.open_stream("/v1/completions", &body).await;
        server.shutdown.send(Shutdown::Drain).unwrap();
        assert_eq!(idle.read(&mut [0]).await.unwrap(), 0, "an idle connection is closed");
        assert!(server.env.now().0 < 1.0, "and not by its timeout");
        server.until("nothing is accepted", || server.env.connect(ADDRESS).is_err()).await;
        assert_eq!(server.ended.available_permits(), 0);
        gate.add_permits(1);
        let mut rest = String::new();
        running.read_to_string(&mut rest).await.unwrap();
        assert!(rest.contains("data: [DONE]") && rest.ends_with("0\r\n\r\n"), "{rest}");
        server.ended.acquire().await.unwrap().forget();
        assert_eq!(server.cancellations(), 0);
    });
}

#[test]
fn a_second_signal_cuts_what_runs() {
    run(Setup::play(Play::Hang(vec![97])), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let mut running = server.open_stream("/v1/completions", &body).await;
        server.shutdown.send(Shutdown::Drain).unwrap();
        server.until("nothing is accepted", || server.env.connect(ADDRESS).is_err()).await;
        assert_eq!(server.ended.available_permits(), 0);
        server.shutdown.send(Shutdown::Stop).unwrap();
        server.ended.acquire().await.unwrap().forget();
        let mut rest = Vec::new();
        running.read_to_end(&mut rest).await.unwrap();
        assert!(!rest.ends_with(b"0\r\n\r\n"), "a cut stream must not look complete");
        server.until("cancelled", || server.cancellations() == 1).await;
    });
}

#[test]
fn a_connection_carries_several_requests() {
    run(Setup::play(Play::say("")), |server| async move {
        let request = "GET /health HTTP/1.1\r\nhost: api\r\n\r\n";
        let last = "GET /v1/models HTTP/1.1\r\nhost: api\r\nconnection: close\r\n\r\n";
        let bytes = format!("{request}{request}{last}");
        let mut connection = server.env.connect(ADDRESS).unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut connection, bytes.as_bytes()).await.unwrap();
        let mut all = String::new();
        connection.read_to_string(&mut all).await.unwrap();
        assert_eq!(all.matches("HTTP/1.1 200 OK").count(), 3);
        let models = all.rfind("HTTP/1.1").unwrap();
        assert_eq!(Response::parse(&all.as_bytes()[models..]).json()["object"], "list");
    });
}
