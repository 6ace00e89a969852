//! Limits on the memory that clients can occupy.

use super::support::{ADDRESS, MODEL, Play, Response, Server, Setup, request, run};
use mixfleet_runtime::env::{Connection, Env};
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[test]
fn a_large_body_is_a_413_even_while_it_is_still_sent() {
    run(Setup::play(Play::say("")), |server| async move {
        let body = vec![b' '; 9 << 20];
        let response = server.exchange(&request("POST", "/v1/completions", "", &body)).await;
        assert_eq!((response.error().0, response.error().3.as_str()), (413, "body_too_large"));
        let chunked = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
        let chunk = [format!("{:x}\r\n", body.len()).as_bytes(), &body, b"\r\n0\r\n\r\n"].concat();
        let response = server.exchange(&[chunked.as_bytes(), &chunk].concat()).await;
        assert_eq!(response.error().0, 413);
        let expecting = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
                         expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n";
        assert_eq!(server.exchange(expecting.as_bytes()).await.error().0, 413);
    });
}

#[test]
fn the_body_limit_is_exact() {
    let setup = Setup::play(Play::say("")).with_limits(|limits| limits.body_bytes_max = 1000);
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a"}).to_string();
        let padded = |bytes: usize| format!("{body}{}", " ".repeat(bytes - body.len()));
        for (bytes, status) in [(1000, 200), (1001, 413)] {
            let response =
                server.exchange(&request("POST", "/v1/completions", "", padded(bytes).as_bytes())).await;
            assert_eq!(response.status, status, "{bytes}");
        }
    });
}

#[test]
fn long_prompts_are_tokenised_beside() {
    let setup = Setup::play(Play::say(""));
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "x".repeat(1 << 20)});
        assert_eq!(server.post("/v1/completions", &body).await.error().3, "context_length_exceeded");
    });
}

#[test]
fn headers_are_bounded_in_bytes_and_number() {
    run(Setup::play(Play::say("")), |server| async move {
        let long = format!("x: {}\r\n", "y".repeat(40_000));
        let many: String = (0..200).map(|index| format!("x{index}: y\r\n")).collect();
        for headers in [long, many] {
            assert_eq!(server.exchange(&request("GET", "/health", &headers, b"")).await.status, 431);
        }
    });
}

#[test]
fn slow_headers_and_bodies_end() {
    run(Setup::play(Play::say("")), |server| async move {
        let mut slow = server.env.connect(ADDRESS).unwrap();
        slow.write_all(b"GET /health HTTP/1.1\r\nx: ").await.unwrap();
        let before = server.env.now();
        let mut all = Vec::new();
        slow.read_to_end(&mut all).await.unwrap();
        assert!(all.is_empty());
        assert_eq!((server.env.now() - before).0.round(), 10.0);

        let mut slow = server.env.connect(ADDRESS).unwrap();
        slow.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n{")
            .await
            .unwrap();
        let response = Response::read(&mut slow).await;
        assert_eq!(response.error().0, 408);
    });
}

#[test]
fn more_requests_are_a_429_and_slots_come_back() {
    let setup = Setup::play(Play::Hang(vec![97])).with_limits(|limits| limits.requests_max = 1);
    run(setup, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true});
        let running = server.open_stream("/v1/completions", &body).await;
        let response = server.post("/v1/completions", &body).await;
        assert_eq!(response.error().0, 429);
        assert_eq!(response.headers["retry-after"], "1");
        drop(running);
        server.until("cancelled", || server.cancellations() == 1).await;
        drop(server.open_stream("/v1/completions", &body).await);
    });
}

/// Requests a stream from an address, and returns the unread connection.
async fn stream_from(server: &Server, party: u8) -> Box<dyn Connection> {
    let mut connection = server.env.connect_from([10, 0, 0, party].into(), ADDRESS).unwrap();
    let body = json!({"model": MODEL, "prompt": "a", "stream": true}).to_string();
    let request = request("POST", "/v1/completions", "", body.as_bytes());
    connection.write_all(&request).await.unwrap();
    connection
}

#[test]
fn the_last_places_are_kept_from_an_address_that_has_most() {
    let setup = Setup::play(Play::Hang(vec![97])).with_limits(|limits| limits.requests_max = 16);
    run(setup, |server| async move {
        let mut running = Vec::new();
        for count in 1..=14 {
            running.push(stream_from(&server, 1).await);
            server.until("submitted", || server.submissions().len() == count).await;
        }
        let refused = Response::read(&mut stream_from(&server, 1).await).await;
        assert_eq!((refused.status, &*refused.headers["retry-after"]), (429, "1"));
        for count in 15..=16 {
            running.push(stream_from(&server, 2).await);
            server.until("submitted", || server.submissions().len() == count).await;
        }
    });
}

#[test]
fn choices_are_bounded_over_all_prompts() {
    let setup = Setup::play(Play::say("")).with_limits(|limits| limits.choices_max = 5);
    run(setup, |server| async move {
        let body = |prompts: usize| json!({"model": MODEL, "prompt": vec!["a"; prompts], "n": 2});
        assert_eq!(server.post("/v1/completions", &body(2)).await.status, 200);
        assert_eq!(server.post("/v1/completions", &body(3)).await.error().2.as_deref(), Some("n"));
    });
}

/// Opens a connection of a party that has sent `bytes` bytes of a body of 950.
async fn slow_body(server: &Server, party: u8, bytes: usize) -> Box<dyn Connection> {
    let mut slow = server.env.connect_from([10, 0, 0, party].into(), ADDRESS).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 950\r\n\r\n";
    slow.write_all(format!("{head}{}", " ".repeat(bytes)).as_bytes()).await.unwrap();
    server.env.sleep(Duration::from_millis(1)).await;
    slow
}

/// The status for a body of some hundred bytes from a party.
async fn small_body(server: &Server, party: u8) -> Response {
    let body = format!("{}{}", json!({"model": MODEL, "prompt": "a"}), " ".repeat(100));
    let mut connection = server.env.connect_from([10, 0, 0, party].into(), ADDRESS).unwrap();
    connection.write_all(&request("POST", "/v1/completions", "", body.as_bytes())).await.unwrap();
    Response::read(&mut connection).await
}

#[test]
fn all_bodies_together_have_a_budget_and_then_a_429() {
    let setup = Setup::play(Play::say("")).with_limits(|limits| limits.bodies_bytes_max = 1000);
    run(setup, |server| async move {
        let slow = [slow_body(&server, 1, 450).await, slow_body(&server, 2, 450).await];
        let refused = small_body(&server, 3).await;
        assert_eq!((refused.error().0, refused.headers["retry-after"].as_str()), (429, "1"));
        let small = json!({"model": MODEL, "prompt": "a"});
        assert_eq!(server.post("/v1/completions", &small).await.status, 200, "what fits is served");
        drop(slow);
        server.env.sleep(Duration::from_millis(1)).await;
        assert_eq!(small_body(&server, 3).await.status, 200, "the bytes came back");
    });
}

#[test]
fn one_address_holds_half_of_what_all_bodies_may_take() {
    let setup = Setup::play(Play::say("")).with_limits(|limits| limits.bodies_bytes_max = 1000);
    run(setup, |server| async move {
        let slow = slow_body(&server, 1, 450).await;
        let refused = small_body(&server, 1).await;
        assert_eq!((refused.error().0, refused.headers["retry-after"].as_str()), (429, "1"));
        assert!(refused.body.contains("of this key or address"), "{}", refused.body);
        assert_eq!(small_body(&server, 2).await.status, 200, "another address has its own share");
        drop(slow);
        server.env.sleep(Duration::from_millis(1)).await;
        assert_eq!(small_body(&server, 1).await.status, 200, "the bytes came back");
    });
}

/// A server with so little room for unread data that one client soon exceeds its share.
fn with_small_backlogs(play: Play) -> Setup {
    let setup = Setup::play(play).with_limits(|limits| limits.answers_bytes_max = 256 << 10);
    Setup { context: 1 << 20, ..setup }
}

#[test]
fn an_answer_whose_client_does_not_read_is_bounded() {
    run(with_small_backlogs(Play::Endless(97)), |server| async move {
        let body =
            json!({"model": MODEL, "prompt": "a", "stream": true, "logprobs": 2, "max_tokens": 500_000});
        let mut stalled = server.open_stream("/v1/completions", &body).await;
        // the limit on stalls is a minute
        server.env.sleep(Duration::from_secs(30)).await;
        assert_eq!(server.cancellations(), 1);
        let mut rest = Vec::new();
        stalled.read_to_end(&mut rest).await.unwrap();
        let rest = String::from_utf8(rest).unwrap();
        assert!(rest.contains("its client reads too slowly") && !rest.contains("[DONE]"), "{rest}");
    });
}

#[test]
fn an_answer_whose_client_reads_is_not_bounded() {
    let play = Play::Reply(vec![97; 20_000], mixfleet_runtime::request::FinishReason::Length);
    run(with_small_backlogs(play), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "stream": true, "logprobs": 2});
        let response = server.post("/v1/completions", &body).await;
        assert_eq!(response.events().last(), Some(&"[DONE]"));
        assert_eq!(response.events().len(), 20_002);
    });
}

#[test]
fn a_whole_answer_that_is_too_long_to_keep_is_a_429() {
    let play = Play::Reply(vec![97; 20_000], mixfleet_runtime::request::FinishReason::Length);
    run(with_small_backlogs(play), |server| async move {
        let body = json!({"model": MODEL, "prompt": "a", "logprobs": 2});
        let response = server.post("/v1/completions", &body).await;
        assert_eq!(response.error().0, 429, "{}", response.body);
        assert!(response.body.contains("use 'stream'"), "{}", response.body);
        let short = json!({"model": MODEL, "prompt": "a", "max_tokens": 4});
        assert_eq!(server.post("/v1/completions", &short).await.status, 200, "the held bytes are free again");
    });
}

#[test]
fn a_body_with_hundreds_of_optional_fields_is_a_400() {
    run(Setup::play(Play::say("")), |server| async move {
        let with = |count: usize| {
            let mut body = json!({"model": MODEL, "prompt": "a", "metadata": {}});
            (0..count).for_each(|number| body[format!("x_{number}")] = number.into());
            body
        };
        assert_eq!(server.post("/v1/completions", &with(400)).await.status, 200);
        let refused = server.post("/v1/completions", &with(600)).await;
        assert_eq!(refused.error().0, 400);
        assert!(refused.body.contains("more than 512 fields"), "{}", refused.body);
    });
}
