//! The memory that a request body takes, measured in a process of its own.

#[allow(dead_code, reason = "shared with the tests of the interface")]
#[path = "api/support.rs"]
mod support;

use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::builtin;
use mixfleet_runtime::text::LoadedText;
use serde_json::json;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use support::{ADDRESS, MODEL, Play, Response, Setup, request, run};
use tokio::io::AsyncWriteExt;

/// Only one test measures at a time.
static PROCESS: Mutex<()> = Mutex::new(());

/// Measures the growth of this process's memory.
#[derive(Clone, Copy)]
struct Watch {
    before_mib: u64,
}

impl Watch {
    /// Starts measuring; none, with a message, if the system does not support it.
    fn begin() -> Option<(MutexGuard<'static, ()>, Self)> {
        let process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        // This resets the peak.
        drop(std::fs::write("/proc/self/clear_refs", "5"));
        let begun = peak_mib().map(|before_mib| (process, Watch { before_mib }));
        if begun.is_none() {
            eprintln!("skipped: this system does not tell a process's memory");
        }
        begun
    }

    /// The growth of the peak since the start.
    fn more_mib(&self) -> u64 {
        peak_mib().unwrap() - self.before_mib
    }
}

/// The peak memory of this process in MiB; none if the system does not support it.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib >> 10)
}

#[test]
fn what_is_not_used_of_a_body_is_skipped_and_not_built() {
    let Some((_alone, watch)) = Watch::begin() else { return };
    run(Setup::play(Play::say("")), move |server| async move {
        let filling = "[0],".repeat(1_950_000);
        for (path, field) in [
            ("/v1/completions", "metadata"),
            ("/v1/completions", "messages"),
            ("/v1/chat/completions", "unheard_of"),
            ("/v1/chat/completions", "tools"),
            ("/v1/chat/completions", "chat_template_kwargs"),
        ] {
            let needed = json!({"prompt": "a", "messages": [{"role": "user", "content": "x"}]});
            let (name, other) = match path {
                "/v1/completions" => ("prompt", &needed["prompt"]),
                _ => ("messages", &needed["messages"]),
            };
            let body = format!(r#"{{"model":"{MODEL}","{name}":{other},"{field}":[{}0]}}"#, filling);
            assert!((7_800_000..8 << 20).contains(&body.len()));
            let response = server.exchange(&request("POST", path, "", body.as_bytes())).await;
            let refused = matches!(field, "messages" | "tools" | "chat_template_kwargs");
            assert_eq!(response.status, if refused { 400 } else { 200 }, "{field}: {}", response.body);
            let more = watch.more_mib();
            assert!(more < 100, "{path} with {field}: {more} MiB for {} bytes", body.len());
        }
    });
}

#[test]
fn eight_large_bodies_at_once_cost_their_bytes_and_no_more() {
    let Some((_alone, watch)) = Watch::begin() else { return };
    run(Setup::play(Play::say("")), move |server| async move {
        let filling = "[0],".repeat(1_900_000);
        let body = format!(r#"{{"model":"{MODEL}","prompt":"a","metadata":[{filling}0]}}"#);
        let whole = Arc::new(request("POST", "/v1/completions", "", body.as_bytes()));
        drop((filling, body));
        let (told, mut ends) = tokio::sync::mpsc::unbounded_channel();
        for last in 0..8 {
            let (server, whole, told) = (server.clone(), whole.clone(), told.clone());
            server.env.clone().spawn(Box::pin(async move {
                let mut connection = server.env.connect_from([10, 0, 0, last].into(), ADDRESS).unwrap();
                connection.write_all(&whole).await.unwrap();
                told.send(Response::read(&mut connection).await.status).unwrap();
            }));
        }
        drop(told);
        while let Some(status) = ends.recv().await {
            assert_eq!(status, 200);
        }
        // While it grows a body takes one and a half times its size, and this client holds it once more.
        let more = watch.more_mib();
        eprintln!("eight bodies of 7.6 MB: {more} MiB at the peak");
        assert!(more < 250, "{more} MiB for eight bodies of 7.6 MB");
    });
}

/// The built-in tokenizer and chat template, and a context large enough for any body.
fn with_a_template() -> Setup {
    let tokenizer = builtin::tokenizer().unwrap();
    let vocab = tokenizer.vocab() as u32;
    let template = Some(builtin::chat_template().unwrap());
    let text = LoadedText::new(tokenizer, template, Arc::new(SeededEnv::new(1)), vocab);
    Setup { text: Arc::new(text), context: 1 << 30, ..Setup::play(Play::say("")) }
}

#[test]
fn messages_are_built_for_the_template_only_as_many_as_a_chat_may_have() {
    let Some((_alone, watch)) = Watch::begin() else { return };
    run(with_a_template(), move |server| async move {
        let message = r#"{"role":"user","content":""}"#;
        for (count, status) in [(16_384, 200), (250_000, 400)] {
            let messages = format!("{message},").repeat(count - 1);
            let body = format!(r#"{{"model":"{MODEL}","messages":[{messages}{message}]}}"#);
            assert!(body.len() < 8 << 20);
            let response =
                server.exchange(&request("POST", "/v1/chat/completions", "", body.as_bytes())).await;
            assert_eq!(response.status, status, "{}", response.body);
            let more = watch.more_mib();
            eprintln!("{count} empty messages: {more} MiB at the peak");
            assert!(more < 100, "{count} messages: {more} MiB for {} bytes", body.len());
        }
    });
}

#[test]
fn no_array_of_a_body_is_built_beyond_its_bound() {
    let Some((_alone, watch)) = Watch::begin() else { return };
    run(Setup { context: 4096, ..Setup::play(Play::say("")) }, move |server| async move {
        for (path, field, before, item, after) in [
            ("/v1/completions", "stop", "[", r#""a""#, "]"),
            ("/v1/completions", "stop_token_ids", "[", "1", "]"),
            ("/v1/completions", "prompt", "[", "1", "]"),
            ("/v1/completions", "prompt", "[", "[1]", "]"),
            ("/v1/completions", "prompt", "[[", "1", "]]"),
            ("/v1/completions", "prompt", "[", r#""a""#, "]"),
            ("/v1/completions", "logit_bias", "{", r#""12345":1"#, "}"),
            ("/v1/completions", "modalities", "[", r#""text""#, "]"),
            ("/v1/chat/completions", "tools", "[", "{}", "]"),
            (
                "/v1/chat/completions",
                "messages",
                r#"[{"role":"user","content":["#,
                r#"{"type":"text","text":""}"#,
                "]}]",
            ),
        ] {
            let many = format!("{item},").repeat((8 << 20) / (item.len() + 1) - 50);
            let others = match (path, field) {
                ("/v1/completions", "prompt") | ("/v1/chat/completions", "messages") => "",
                ("/v1/completions", _) => r#""prompt":"a","#,
                _ => r#""messages":[{"role":"user","content":"x"}],"#,
            };
            let body = format!(r#"{{"model":"{MODEL}",{others}"{field}":{before}{many}{item}{after}}}"#);
            drop(many);
            assert!((6 << 20..8 << 20).contains(&body.len()), "{field}: {}", body.len());
            let response = server.exchange(&request("POST", path, "", body.as_bytes())).await;
            assert_eq!(response.status, 400, "{field}: {}", response.body);
            let more = watch.more_mib();
            assert!(more < 100, "{path} with {field}: {more} MiB for {} bytes", body.len());
        }
    });
}
