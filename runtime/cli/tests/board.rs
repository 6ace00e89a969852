//! The board and the alert rules of docs/deploy ask for what `/metrics` has.

use crate::common::server::Server;
use crate::engines::gateway;
use crate::fake::{FakeEngine, Mood};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Labels of each sample's name.
type Samples = BTreeMap<String, BTreeSet<String>>;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy")
}

/// Every expression of the board, by the panel's title, and every one of the rules, by the alert's name.
fn expressions() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(directory().join("grafana/dashboards/mixfleet.json")).unwrap();
    let board: Value = serde_json::from_str(&text).unwrap();
    let mut all = Vec::new();
    for panel in board["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        let targets = panel["targets"].as_array().map(Vec::as_slice).unwrap_or_default();
        assert!(panel["type"] == "row" || !targets.is_empty(), "{title} shows nothing");
        all.extend(
            targets.iter().map(|target| (title.to_owned(), target["expr"].as_str().unwrap().to_owned())),
        );
    }
    let rules = std::fs::read_to_string(directory().join("prometheus/alerts.yaml")).unwrap();
    let mut name = String::new();
    for line in rules.lines().map(str::trim) {
        if let Some(alert) = line.strip_prefix("- alert: ") {
            name = alert.to_owned();
        } else if let Some(expression) = line.strip_prefix("expr: ") {
            all.push((name.clone(), expression.to_owned()));
        }
    }
    all
}

/// The metrics that an expression of PromQL names, each with the labels that it selects or groups by.
fn asked_for(expression: &str) -> Vec<(String, BTreeSet<String>)> {
    const WORDS: [&str; 14] = [
        "and",
        "bool",
        "by",
        "group_left",
        "group_right",
        "ignoring",
        "offset",
        "on",
        "or",
        "sum",
        "max",
        "min",
        "unless",
        "without",
    ];
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let (mut found, mut grouped) = (Vec::<(String, BTreeSet<String>)>::new(), BTreeSet::new());
    let (mut rest, mut after_by) = (expression, false);
    while let Some(c) = rest.chars().next() {
        if c.is_ascii_digit() {
            // a number, perhaps with an exponent or a unit
            rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '.');
        } else if c == '[' {
            rest = &rest[rest.find(']').expect("a range ends") + 1..];
        } else if c == '{' {
            let end = rest.find('}').expect("a selector ends");
            let labels = rest[1..end]
                .split(',')
                .filter_map(|matcher| Some(matcher.split_once(['=', '!'])?.0.trim().to_owned()));
            found.last_mut().expect("a selector follows a name").1.extend(labels);
            rest = &rest[end + 1..];
        } else if is_name(c) {
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            let (word, behind) = rest.split_at(end);
            rest = behind;
            let is_call = behind.trim_start().starts_with('(');
            if word == "by" {
                after_by = true;
            } else if !is_call && !WORDS.contains(&word) {
                found.push((word.to_owned(), BTreeSet::new()));
            }
        } else if c == '(' && std::mem::take(&mut after_by) {
            let end = rest.find(')').expect("a list of labels ends");
            grouped.extend(rest[1..end].split(',').map(|label| label.trim().to_owned()));
            rest = &rest[end + 1..];
        } else {
            rest = &rest[c.len_utf8()..];
        }
    }
    found.iter_mut().for_each(|(_, labels)| labels.extend(grouped.iter().cloned()));
    found
}

fn samples(server: &Server) -> Samples {
    let (status, text) = server.call("GET", "/metrics", "", "");
    assert_eq!(status, 200);
    let mut all = Samples::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').unwrap();
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let names =
            labels.split(',').filter_map(|pair| pair.split_once("=\"")).map(|(name, _)| name.to_owned());
        all.entry(name.to_owned()).or_default().extend(names);
    }
    all
}

/// Metrics of a server on its own devices, and of one in front of external engines.
fn live() -> [Samples; 2] {
    let own = Server::start(&["--usd-per-hour", "cpu=1", "--device", "cpu"]);
    let (_, models) = own.call("GET", "/v1/models", "", "");
    let name = serde_json::from_str::<Value>(&models).unwrap()["data"][0]["id"].clone();
    let (status, answer) =
        own.post("/v1/completions", &json!({"model": name, "prompt": "a b", "max_tokens": 12}));
    assert_eq!(status, 200, "{answer}");

    let (first, second) = (FakeEngine::start("vllm", "m"), FakeEngine::start("llamacpp", "m"));
    let engines =
        gateway(&[(&first, "vllm", ",usd=1"), (&second, "llamacpp", ",usd=1")], &["--policy", "round-robin"]);
    first.set(Mood::Status(500, "{}".into()));
    for stream in [true, false, true, false] {
        let mut body = json!({"model": "m", "prompt": "a b c", "max_tokens": 12});
        body["stream"] = stream.into();
        let (status, answer) = engines.call("POST", "/v1/completions", "", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        first.set(Mood::Well);
    }
    [samples(&own), samples(&engines)]
}

#[test]
fn no_panel_of_the_board_and_no_alert_asks_for_what_is_not_there() {
    let (all, live) = (expressions(), live());
    assert!(all.len() > 40, "{}", all.len());
    let mut money = 0;
    for (of, expression) in &all {
        let asked = asked_for(expression);
        assert!(!asked.is_empty(), "{of}: {expression} asks for nothing");
        // `up` is Prometheus's own
        for (name, labels) in asked.iter().filter(|(name, _)| name != "up") {
            money += usize::from(name.contains("_usd"));
            let there: Vec<&BTreeSet<String>> = live.iter().filter_map(|samples| samples.get(name)).collect();
            assert!(!there.is_empty(), "{of}: {expression}: /metrics has no {name}");
            let has = |label: &&String| there.iter().any(|known| known.contains(*label));
            let missing: Vec<&String> = labels.iter().filter(|label| !has(label)).collect();
            assert!(missing.is_empty(), "{of}: {expression}: {name} has no {missing:?}");
        }
    }
    assert!(money > 5, "the board shows dollars");
    // what boards for vLLM ask for is there in both ways of serving
    for name in
        ["vllm:time_to_first_token_seconds_bucket", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
    {
        assert!(
            live.iter().all(|samples| samples.get(name).is_some_and(|labels| labels.contains("model_name"))),
            "{name}"
        );
    }
}

#[test]
fn names_and_labels_of_an_expression_are_found() {
    let names = |text: &str| -> Vec<String> { asked_for(text).into_iter().map(|(name, _)| name).collect() };
    assert_eq!(
        names("1e6 * sum by (class) (rate(a_total[$__rate_interval])) / b:c{x=\"y(z\"} > 0.01"),
        ["a_total", "b:c"]
    );
    let labels = asked_for("histogram_quantile(0.99, sum by (le, k) (rate(h_bucket{model=\"$m\"}[5m])))");
    let expected: BTreeSet<String> = ["k", "le", "model"].map(str::to_owned).into();
    assert_eq!(labels, [("h_bucket".to_owned(), expected)]);
}
