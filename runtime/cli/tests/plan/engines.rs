//! A planned fleet of vLLM, started as its files say, on engines that are none.

use super::{STEADY, lists, number, planned, pools};
use crate::common::server::Server;
use crate::common::{mixfleet, scratch};
use crate::fake::FakeEngine;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

/// The values of each `flag` of a command.
fn of<'a>(words: &'a [String], flag: &str) -> Vec<&'a str> {
    words.windows(2).filter(|pair| pair[0] == flag).map(|pair| pair[1].as_str()).collect()
}

/// Plans for vLLM, and returns the first fleet, the gateway's command and the engines' commands.
fn written(out: &Path, more: &[&str]) -> (Value, Vec<String>, Vec<Vec<String>>) {
    let files = ["--engine", "vllm", "--out", out.to_str().unwrap()];
    let document = planned(&STEADY, &[&files, more].concat());
    let compose = std::fs::read_to_string(out.join("compose.yaml")).unwrap();
    let (gateways, engines): (Vec<_>, Vec<_>) =
        lists(&compose, "command:").into_iter().partition(|words| words[0] == "serve");
    let [gateway] = gateways.try_into().unwrap();
    (document["fleets"][0].clone(), gateway, engines)
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario from plan to answer")]
fn what_a_plan_for_vllm_writes_starts_a_gateway_that_answers_by_its_engines() {
    let out = scratch("plan-vllm").join("out");
    let (fleet, gateway, engines) = written(&out, &[]);
    let instances: u64 = pools(&fleet).iter().map(|pool| pool["count"].as_u64().unwrap()).sum();
    assert!(instances >= 2 && engines.len() as u64 == instances, "{fleet:#}");
    // one a service: a fake stands where each would listen
    let (mut fakes, mut at) = (Vec::new(), BTreeMap::new());
    for words in &engines {
        let [name, host, port] = ["--served-model-name", "--host", "--port"].map(|flag| of(words, flag)[0]);
        let fake = FakeEngine::start("vllm", name);
        *fake.shared.hands_over.lock().unwrap() = crate::roles::parameters();
        at.insert(format!("vllm:http://{host}:{port}"), format!("vllm:{}", fake.url()));
        fakes.push(fake);
    }
    assert_eq!(at.len(), engines.len(), "each has a port of its own: {engines:?}");
    let told = of(&gateway, "--worker-engine");
    assert_eq!(told.len(), engines.len(), "{gateway:?}");
    for role in ["prefill", "decode"] {
        let its = pools(&fleet).iter().filter(|pool| pool["role"] == role);
        let planned: u64 = its.map(|pool| pool["count"].as_u64().unwrap()).sum();
        let written = told.iter().filter(|word| word.contains(&format!("={role},"))).count() as u64;
        assert_eq!(written, planned, "{told:?}");
    }
    let here = |word: &String| {
        let mut word = word.clone();
        for (planned, fake) in &at {
            word = match word.strip_prefix(planned.as_str()) {
                Some(rest) if !rest.starts_with(|c: char| c.is_ascii_digit()) => format!("{fake}{rest}"),
                _ => word,
            };
        }
        if word == "0.0.0.0:8000" { "127.0.0.1:0".into() } else { word }
    };
    let words: Vec<String> = gateway.iter().map(here).collect();
    let command = |words: &[String]| {
        let mut command = mixfleet();
        command.args(words).env("MIXFLEET_API_KEY", "secret").stderr(Stdio::piped());
        command
    };
    let server = Server::spawned(command(&words).spawn().unwrap());
    let key = "authorization: Bearer secret\r\n";
    let body =
        json!({"model": "llama-3.1-8b", "prompt": "count", "max_tokens": 2, "stream": false}).to_string();
    for _ in 0..8 {
        let (status, answer) = server.call("POST", "/v1/completions", key, &body);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!("w0 w1 ")), "{answer}");
    }
    assert_eq!(server.call("POST", "/v1/completions", "", &body).0, 401, "clients send the key");
    // of a request that two engines share, the one that answers
    let is_canary =
        |body: &Value| body["cache_salt"].as_str().is_some_and(|salt| salt.starts_with("canary-"));
    let is_answer = |body: &Value| {
        let is_own = body["prompt"] == "count" && !is_canary(body);
        is_own && body["kv_transfer_params"]["do_remote_decode"] != true
    };
    let answered = |fake: &FakeEngine| fake.asked().iter().filter(|came| is_answer(&came.body)).count();
    assert_eq!(fakes.iter().map(answered).sum::<usize>(), 8);
    // rents are those of the plan, so that placement uses the planned dollars
    let usd = |word: &&str| -> f64 {
        let rest = word.split_once(",usd=").unwrap().1;
        rest.split(',').next().unwrap().parse().unwrap()
    };
    let rent: f64 = told.iter().map(usd).sum();
    assert!((rent - number(&fleet["usd_per_hour"])).abs() < 1e-6, "{told:?}");

    // the file's statement about an engine is not trusted if the engine can be queried
    for (from, to, says) in [
        (",part=", ",part=X", "no part is called 'X"),
        (",usd=", ",usd=-", "no price"),
        (",shape=llama", ",shape=lama", "shape=lama"),
        ("vllm:", "vlm:", "unknown kind"),
    ] {
        let lied: Vec<String> = words.iter().map(|word| word.replacen(from, to, 1)).collect();
        let output = command(&lied).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(says), "{to}: {error}");
    }
    // an engine that serves another model than its service says is not used
    let other = FakeEngine::start("vllm", "another");
    let first = format!("vllm:{}", fakes[0].url());
    let lied: Vec<String> =
        words.iter().map(|word| word.replace(&first, &format!("vllm:{}", other.url()))).collect();
    let mut server = Server::spawned(command(&lied).spawn().unwrap());
    server.wait_for("llama-3.1-8b");
    for _ in 0..8 {
        assert_eq!(server.call("POST", "/v1/completions", key, &body).0, 200);
    }
    assert_eq!(other.asked().len(), 0);
}

#[test]
fn what_pods_are_told_is_what_containers_of_one_machine_are() {
    let out = scratch("plan-vllm-pods").join("out");
    let (fleet, gateway, engines) = written(&out, &["--dtype", "fp8"]);
    let pods = std::fs::read_to_string(out.join("engines.yaml")).unwrap();
    let commands = lists(&pods, "args:");
    assert_eq!(commands.len(), 1 + pools(&fleet).len(), "{pods}");
    // everything but addresses: where the gateway and engines listen, and the pairing
    let apart = |words: &[String]| {
        let mut words = words.to_vec();
        words.retain(|word| word != "--json" && !word.starts_with('{'));
        for word in &mut words {
            if let Some((_, rest)) = word.strip_prefix("vllm:http://").and_then(|rest| rest.split_once(',')) {
                *word = rest.to_owned();
            }
        }
        let ports = words.iter().position(|word| word == "--host");
        ports.into_iter().for_each(|at| drop(words.drain(at..at + 4)));
        words
    };
    assert_eq!(apart(&commands[0]), apart(&gateway));
    let mut engines = engines.iter();
    for (pool, words) in pools(&fleet).iter().zip(&commands[1..]) {
        for _ in 0..pool["count"].as_u64().unwrap() {
            assert_eq!(apart(words), apart(engines.next().unwrap()));
        }
        assert!(words.ends_with(&["fp8".to_owned()]) || words.contains(&"fp8".to_owned()), "{words:?}");
        // each pod's address is one of the gateway's engines
        let name = format!("mixfleet-{}-{}", pool["role"].as_str().unwrap(), pool["part"].as_str().unwrap());
        let first = format!("vllm:http://{}-0.mixfleet-engines:8000", name.to_lowercase());
        assert!(of(&commands[0], "--worker-engine").iter().any(|word| word.starts_with(&first)), "{pods}");
        let replicas = format!(
            "name: {}\nspec:\n  serviceName: mixfleet-engines\n  podManagementPolicy: Parallel\n  replicas: {}\n",
            name.to_lowercase(),
            pool["count"]
        );
        assert!(pods.contains(&replicas), "{replicas}: {pods}");
    }
}
