//! What a body costs in memory. In a process of its own, for it looks at the whole process.

#[allow(dead_code, reason = "shared with the tests of the interface")]
#[path = "api/support.rs"]
mod support;

use serde_json::json;
use support::{MODEL, Play, Setup, request, run};

/// The most memory that this process has had, in MiB; none where the system does not say.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib >> 10)
}

#[test]
fn what_is_not_used_of_a_body_is_skipped_and_not_built() {
    let Some(before) = peak_mib() else {
        eprintln!("skipped: this system does not tell a process's memory");
        return;
    };
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
            let refused = matches!(field, "tools" | "chat_template_kwargs");
            assert_eq!(response.status, if refused { 400 } else { 200 }, "{field}: {}", response.body);
            let more = peak_mib().unwrap() - before;
            assert!(more < 100, "{path} with {field}: {more} MiB for {} bytes", body.len());
        }
    });
}
