//! Tenants with their own keys are isolated.

use super::support::{MODEL, Play, Response, Server, Setup, request, run};
use mixfleet_runtime::api::{Access, KeysFile};
use mixfleet_runtime::env::Env;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

const TENANTS: &str = "
    [[tenant]]
    name = 'alpha'
    key = 'a-key'
    requests = 1
    max_tokens = 8
    [[tenant]]
    name = 'beta'
    key = 'b-key'
    hide_cached_tokens = true
    [[tenant]]
    name = 'watcher'
    key = 'w-key'
    debug = 'all'
    [[tenant]]
    name = 'blind'
    key = 'x-key'
    debug = 'none'
";

fn setup(play: Play) -> Setup {
    Setup { access: Some(Access::tenants(TENANTS).unwrap()), ..Setup::play(play) }
}

async fn ask(server: &Server, key: &str, method: &str, path: &str, body: Value) -> Response {
    let headers = format!("authorization: Bearer {key}\r\n");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    server.exchange(&request(method, path, &headers, body.as_bytes())).await
}

async fn complete(server: &Server, key: &str, more: Value) -> Response {
    let mut body = json!({"model": MODEL, "prompt": "a"});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask(server, key, "POST", "/v1/completions", body).await
}

#[test]
fn each_key_has_a_cache_of_its_own() {
    let salts = run(setup(Play::say("")), |server| async move {
        assert_eq!(complete(&server, "c-key", json!({})).await.error().0, 401);
        for (key, own) in [("a-key", None), ("b-key", None), ("a-key", Some("s")), ("b-key", Some("s"))] {
            assert_eq!(complete(&server, key, json!({ "cache_salt": own })).await.status, 200);
        }
        server.submissions().into_iter().map(|request| request.cache_salt.unwrap()).collect::<Vec<_>>()
    });
    let mut distinct = salts.clone();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 4, "{salts:?}");
}

#[test]
fn each_tenant_has_an_account_and_sees_its_own() {
    run(setup(Play::say("ab")), |server| async move {
        for key in ["a-key", "b-key", "b-key"] {
            assert_eq!(complete(&server, key, json!({"max_tokens": 2})).await.status, 200);
        }
        let seen = async |key: &str| {
            let answer = ask(&server, key, "GET", "/usage", Value::Null).await;
            let accounts = answer.json()["data"].as_array().unwrap().clone();
            let of = |account: &Value| {
                let count = |field: &str| account[field].as_u64().unwrap();
                let (requests, tokens) = (count("requests"), count("prompt_tokens"));
                (account["tenant"].as_str().unwrap().to_owned(), requests, tokens, count("completion_tokens"))
            };
            accounts.iter().map(of).collect::<Vec<_>>()
        };
        // a prompt has a token in front, and an answer of two ends with one
        let (alpha, beta) = (("alpha".to_owned(), 1, 2, 3), ("beta".to_owned(), 2, 4, 6));
        assert_eq!(seen("a-key").await, std::slice::from_ref(&alpha));
        assert_eq!(seen("b-key").await, std::slice::from_ref(&beta));
        let nothing = |name: &str| (name.to_owned(), 0, 0, 0);
        assert_eq!(seen("w-key").await, [alpha, beta, nothing("watcher"), nothing("blind")]);
        assert_eq!(seen("x-key").await, [nothing("blind")]);
        assert_eq!(ask(&server, "c-key", "GET", "/usage", Value::Null).await.status, 401);
    });
}

#[test]
fn who_leaves_pays_for_tokens_that_were_not_read() {
    const TOKENS: usize = 3000;
    let setup = |drops_late| Setup { context: 1 << 20, drops_late, ..setup(Play::Hang(vec![97; TOKENS])) };
    let leave = |server: Server| async move {
        let headers = "authorization: Bearer b-key\r\n";
        let body = json!({"model": MODEL, "prompt": "a", "stream": true, "max_tokens": TOKENS}).to_string();
        let mut running = server.env.connect(super::support::ADDRESS).unwrap();
        let first = request("POST", "/v1/completions", headers, body.as_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut running, &first).await.unwrap();
        server.until("submitted", || server.submissions().len() == 1).await;
        // one token is made each millisecond
        server.env.sleep(Duration::from_secs(4)).await;
        drop(running);
        server.until("cancelled", || server.cancellations() == 1).await;
        let account = ask(&server, "b-key", "GET", "/usage", Value::Null).await.json()["data"][0].clone();
        assert_eq!(account["completion_tokens"], TOKENS, "{account}");
    };
    for drops_late in [false, true] {
        run(setup(drops_late), leave);
    }
}

#[test]
fn a_tenant_has_so_many_requests_in_work_and_then_a_429() {
    run(setup(Play::Hang(vec![97])), |server| async move {
        let headers = "authorization: Bearer a-key\r\n";
        let body = json!({"model": MODEL, "prompt": "a", "stream": true}).to_string();
        let mut running = server.env.connect(super::support::ADDRESS).unwrap();
        let first = request("POST", "/v1/completions", headers, body.as_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut running, &first).await.unwrap();
        server.until("submitted", || server.submissions().len() == 1).await;
        let refused = complete(&server, "a-key", json!({})).await;
        assert_eq!((refused.error().0, refused.headers["retry-after"].as_str()), (429, "1"));
        let mut other = server.env.connect(super::support::ADDRESS).unwrap();
        let second = request("POST", "/v1/completions", "authorization: Bearer b-key\r\n", body.as_bytes());
        tokio::io::AsyncWriteExt::write_all(&mut other, &second).await.unwrap();
        server.until("another tenant is served", || server.submissions().len() == 2).await;
        drop(running);
        server.until("cancelled", || server.cancellations() == 1).await;
        let mut again = server.env.connect(super::support::ADDRESS).unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut again, &first).await.unwrap();
        server.until("the place came back", || server.submissions().len() == 3).await;
    });
}

#[test]
fn a_tenant_holds_half_of_what_all_bodies_may_take_from_wherever_it_asks() {
    let setup = setup(Play::say("")).with_limits(|limits| limits.bodies_bytes_max = 1000);
    run(setup, |server| async move {
        let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer b-key\r\n";
        let half = format!("{head}content-length: 950\r\n\r\n{}", " ".repeat(450));
        let mut slow = server.env.connect_from([10, 0, 0, 1].into(), super::support::ADDRESS).unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut slow, half.as_bytes()).await.unwrap();
        server.env.sleep(Duration::from_millis(1)).await;
        let filled = json!({"user": " ".repeat(100)});
        let refused = complete(&server, "b-key", filled.clone()).await;
        assert_eq!((refused.error().0, refused.headers["retry-after"].as_str()), (429, "1"));
        assert_eq!(complete(&server, "w-key", filled.clone()).await.status, 200, "another tenant's share");
        drop(slow);
        server.env.sleep(Duration::from_millis(1)).await;
        assert_eq!(complete(&server, "b-key", filled).await.status, 200, "the bytes came back");
    });
}

#[test]
fn a_tenant_is_given_so_many_tokens_an_answer() {
    run(setup(Play::say("")), |server| async move {
        let refused = complete(&server, "a-key", json!({"max_tokens": 9})).await;
        assert_eq!((refused.error().0, refused.error().2.as_deref()), (400, Some("max_tokens")));
        assert_eq!(complete(&server, "a-key", json!({})).await.status, 200);
        assert_eq!(complete(&server, "b-key", json!({"max_tokens": 9})).await.status, 200);
        let granted: Vec<u32> = server.submissions().iter().map(|request| request.max_tokens).collect();
        assert_eq!(granted, [8, 9]);
    });
}

#[test]
fn other_tenants_requests_are_not_there_under_debug() {
    run(setup(Play::say("")), |server| async move {
        let mut ids = Vec::new();
        for key in ["a-key", "b-key"] {
            let id = complete(&server, key, json!({})).await.json()["id"].as_str().unwrap().to_string();
            server.placements.record(&format!("{id}-0"), json!({"of": key}));
            ids.push(id);
        }
        let seen = async |key: &str| {
            let list = ask(&server, key, "GET", "/debug/placement", Value::Null).await.json();
            let mut shown = Vec::new();
            for id in &ids {
                let path = format!("/debug/placement/{id}");
                shown.push(ask(&server, key, "GET", &path, Value::Null).await.status);
            }
            (list["data"].as_array().unwrap().len(), shown)
        };
        assert_eq!(seen("a-key").await, (1, vec![200, 404]));
        assert_eq!(seen("b-key").await, (1, vec![404, 200]));
        assert_eq!(seen("w-key").await, (2, vec![200, 200]));
        assert_eq!(seen("x-key").await, (0, vec![404, 404]));
    });
}

#[test]
fn cached_tokens_are_hidden_from_whom_they_shall_not_be_told() {
    run(setup(Play::say("")), |server| async move {
        let details = async |key| {
            complete(&server, key, json!({})).await.json()["usage"]["prompt_tokens_details"].clone()
        };
        assert_eq!(details("a-key").await, json!({"cached_tokens": 3}));
        assert_eq!(details("b-key").await, Value::Null);
        let streamed = json!({"stream": true, "stream_options": {"include_usage": true}});
        assert!(!complete(&server, "b-key", streamed).await.body.contains("cached_tokens"));
    });
    let hidden = Access::from(None).hiding_cached_tokens(true);
    run(Setup { access: Some(hidden), ..Setup::play(Play::say("")) }, |server| async move {
        let body = json!({"model": MODEL, "prompt": "a"});
        let usage = server.post("/v1/completions", &body).await.json()["usage"].clone();
        assert_eq!((&usage["prompt_tokens"], &usage["prompt_tokens_details"]), (&json!(2), &Value::Null));
    });
}

/// A file that is deleted with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn write(&self, text: &str) {
        // The file is replaced by a new one, as editors do, so that it counts as changed at any clock
        // resolution.
        let next = self.0.with_extension("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, &self.0).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn keys_follow_their_file_and_a_broken_file_changes_nothing() {
    let file = Scratch(std::env::temp_dir().join(format!("mixfleet-keys-{}.toml", std::process::id())));
    let tenant = |key: &str| format!("[[tenant]]\nname = 'one'\nkey = '{key}'\n");
    file.write(&tenant("old"));
    let (keys, access) = KeysFile::open(&file.0).unwrap();
    run(Setup { access: Some(access), ..Setup::play(Play::say("")) }, move |server| async move {
        server.api.follow(keys).unwrap();
        let statuses = async || {
            server.env.sleep(Duration::from_secs(5)).await;
            let mut statuses = Vec::new();
            for key in ["old", "new"] {
                statuses.push(ask(&server, key, "GET", "/v1/models", Value::Null).await.status);
            }
            statuses
        };
        assert_eq!(statuses().await, [200, 401]);
        file.write("[[tenant]]\nname = ");
        assert_eq!(statuses().await, [200, 401], "a broken file");
        std::fs::remove_file(&file.0).unwrap();
        assert_eq!(statuses().await, [200, 401], "no file");
        file.write(&tenant("new"));
        assert_eq!(statuses().await, [401, 200]);
    });
    assert!(KeysFile::open(&std::env::temp_dir()).is_err(), "a directory");
}
