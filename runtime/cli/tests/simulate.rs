//! `mixfleet simulate` from outside: what it writes beside its table, and what it says of mistakes.

use crate::common::{mixfleet, scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

/// Two pools, the first with a name that wants to be markup and two fields of CSV.
const FLEET: &str = r#"
version = 1
[model]
layers = 32
kv_bytes_per_token = 131072
[slo]
ttft_s = 5.0
tbt_s = 0.1
[[pool]]
name = "<script>p</script>, \"fast\""
role = "prefill"
usd_per_hour = 2.0
cache_tokens = 1_000_000
calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 0.0 } }
[[pool]]
name = "d"
role = "decode"
usd_per_hour = 1.0
cache_tokens = 1_000_000
calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 1e-5 } }
"#;

struct SimulatedPlace {
    directory: PathBuf,
    trace: PathBuf,
    fleet: PathBuf,
}

/// A directory with a fleet and a trace of 400 requests under `trace`.
fn place(name: &str, trace: &str) -> SimulatedPlace {
    let directory = scratch(&format!("simulate-{name}"));
    let (trace, fleet) = (directory.join(trace), directory.join("FLEET.toml"));
    std::fs::write(&fleet, FLEET).unwrap();
    let mut command = mixfleet();
    command.args(["trace", "generate", "--requests", "400", "--rate", "0.5", "--seed", "2", "--out"]);
    let output = command.arg(&trace).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    SimulatedPlace { directory, trace, fleet }
}

fn simulate(place: &SimulatedPlace, arguments: &[&str]) -> Output {
    let mut command = mixfleet();
    command.arg("simulate").arg("--trace").arg(&place.trace).arg("--fleet").arg(&place.fleet);
    command.args(arguments).current_dir(&place.directory).output().unwrap()
}

fn fails(output: &Output, code: i32, says: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty());
    for word in says {
        assert_eq!(error.matches(word).count(), 1, "{word}: {error}");
    }
}

/// The columns of a row; the first pool's name alone has commas.
fn row(line: &str) -> Vec<String> {
    let name = "\"<script>p</script>, \"\"fast\"\"\"";
    line.replace(name, "p").split(',').map(str::to_owned).collect()
}

#[test]
fn the_table_and_the_page_show_the_run() {
    let place = place("views", "t.jsonl");
    let arguments = ["--json", "--drop-late", "--admit", "early", "--timeline", "t.csv", "--html", "p.html"];
    let output = simulate(&place, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "a bar without a terminal");
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(results["dropped"].as_u64().unwrap() > 0 && results["completed"].as_u64().unwrap() > 0);

    let table = std::fs::read_to_string(place.directory.join("t.csv")).unwrap();
    let mut lines = table.lines();
    let header = row(lines.next().unwrap());
    let rows: Vec<Vec<String>> = lines.map(row).collect();
    assert!(rows.iter().all(|row| row.len() == header.len()), "{table}");
    let column = |name: &str| {
        let at = header.iter().position(|column| column == name).unwrap_or_else(|| panic!("{name}"));
        rows.iter().map(|row| row[at].parse::<f64>().unwrap()).collect::<Vec<f64>>()
    };
    let sum = |name| column(name).iter().sum::<f64>();
    assert_eq!(sum("completed"), results["completed"].as_f64().unwrap());
    assert_eq!(sum("dropped"), results["dropped"].as_f64().unwrap());
    assert_eq!(sum("fleet_arrived"), 2.0 * results["requests"].as_f64().unwrap());
    assert!(column("prefill_load").iter().any(|load| *load > 0.3));
    assert!(column("decode_load").iter().any(|load| *load > 0.3));
    let times = column("time_s");
    assert_eq!(times[..4], [10.0, 10.0, 20.0, 20.0]);

    let page = std::fs::read_to_string(place.directory.join("p.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && !page.contains("<script"));
    for word in ["http:", "https:", "@import", "url(", "<link", "src="] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("&lt;script&gt;p&lt;/script&gt;, &quot;fast&quot;"));
    assert!(page.contains("objective for TTFT") && page.contains("objective for TBT"));
    assert_eq!(page.matches("<svg").count(), 14, "each for wide and for narrow windows");
    assert!(!page.contains("NaN") && !page.contains("inf,") && page.len() < 400_000);

    let again = simulate(&place, &["--json", "--drop-late", "--admit", "early", "--timeline", "u.csv"]);
    assert_eq!(
        serde_json::from_slice::<Value>(&again.stdout).unwrap(),
        results,
        "a watched run is the same run"
    );
    assert_eq!(std::fs::read_to_string(place.directory.join("u.csv")).unwrap(), table);
}

#[test]
fn what_cannot_be_read_or_written_is_told_once() {
    let place = place("errors", "t.jsonl.zst");
    let but = |trace: &str, fleet: &str| SimulatedPlace {
        directory: place.directory.clone(),
        trace: place.directory.join(trace),
        fleet: place.directory.join(fleet),
    };
    fails(&simulate(&but("no.jsonl", "FLEET.toml"), &[]), 3, &["cannot read", "no.jsonl", "No such file"]);
    fails(&simulate(&but("t.jsonl.zst", "no.toml"), &[]), 3, &["cannot read", "no.toml", "No such file"]);
    let write = |name: &str, content: &[u8]| std::fs::write(place.directory.join(name), content).unwrap();
    let whole = std::fs::read(&place.trace).unwrap();
    write("cut.jsonl.zst", &whole[..whole.len() / 2]);
    let outputs = ["--html", "p.html", "--timeline", "t.csv"];
    fails(&simulate(&but("cut.jsonl.zst", "FLEET.toml"), &outputs), 3, &["cannot read", "cut.jsonl.zst"]);
    assert!(!place.directory.join("p.html").exists(), "an empty page of a run that failed");
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}"#;
    write("bad.jsonl", format!("{line}\n{line}\n{{\"timestamp\": 1}}\n").as_bytes());
    fails(&simulate(&but("bad.jsonl", "FLEET.toml"), &[]), 3, &["bad.jsonl, line 3:"]);
    write("bad.toml", FLEET.replace("cache_tokens", "cash_tokens").as_bytes());
    fails(&simulate(&but("t.jsonl.zst", "bad.toml"), &[]), 3, &["at line"]);

    fails(&simulate(&place, &["--timeline", "no/t.csv"]), 3, &["cannot write no/t.csv"]);
    fails(&simulate(&place, &["--html", "."]), 3, &["cannot write ."]);
    if Path::new("/dev/full").exists() {
        fails(&simulate(&place, &["--timeline", "/dev/full"]), 3, &["cannot write /dev/full"]);
    }
}

#[test]
fn mistakes_on_the_command_line_are_usage_errors_and_harm_no_file() {
    let place = place("usage", "t.jsonl");
    for (arguments, says) in [
        (&["--timelines", "t.csv"][..], "--timelines"),
        (&["--policy", "best"], "per-dollar"),
        (&["--timeline-interval-s", "5"], "needs --timeline or --html"),
        (&["--timeline", "t.csv", "--timeline-interval-s", "1e-6"], "below 0.001"),
        (&["--timeline", "t.csv", "--timeline-interval-s=-1"], "expected a positive number of seconds"),
        (&["--timeline", "./t.jsonl"], "over the file of --trace"),
        (&["--html", "FLEET.toml"], "over the file of --fleet"),
        (&["--timeline", "a", "--html", "./a"], "over the file of --timeline"),
    ] {
        let output = simulate(&place, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
    let files = std::fs::read_dir(&place.directory).unwrap().count();
    assert_eq!(files, 2, "nothing was made");
    assert_eq!(std::fs::read_to_string(&place.fleet).unwrap(), FLEET);
    assert!(std::fs::metadata(&place.trace).unwrap().len() > 1000);
}

#[test]
fn the_capacity_is_found_and_priced_and_a_fleet_without_one_fails() {
    let place = place("capacity", "trace.jsonl");
    let output = simulate(&place, &["--capacity=0.4", "--admit", "none", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |key: &str| document[key].as_f64().unwrap_or_else(|| panic!("{key}: {document}"));
    assert_eq!(document["schema"], "mixfleet.capacity/1");
    assert!(number("slo_attainment") >= 0.4);
    // pools of 2 and 1 dollars
    let per_usd = number("requests_per_s") * 3600.0 / 3.0;
    assert!((number("requests_per_usd") - per_usd).abs() < 1e-9 * per_usd);
    let probes = document["probes"].as_array().unwrap();
    let speedups = |passed: bool| {
        let of = probes.iter().filter(move |probe| probe["passed"] == passed);
        of.map(|probe| probe["speedup"].as_f64().unwrap())
    };
    assert_eq!(speedups(true).fold(0.0, f64::max), number("speedup"));
    assert!(speedups(false).fold(f64::INFINITY, f64::min) <= number("precision") * number("speedup"));

    std::fs::write(&place.fleet, FLEET.replace("ttft_s = 5.0", "ttft_s = 1e-6")).unwrap();
    fails(&simulate(&place, &["--capacity"]), 1, &["at any speed-up", "where 0.00 %", "[slo]"]);
    fails(&simulate(&place, &["--capacity=2"]), 2, &["a share above 0"]);
    fails(&simulate(&place, &["--capacity", "--speedup", "2"]), 2, &["--speedup"]);
}

#[test]
fn a_closed_loop_needs_no_trace_and_keeps_its_clients_busy() {
    let directory = scratch("simulate-closed-loop");
    let fleet = "version = 1\n[model]\nname = 'llama-3.1-8b'\n[engine]\nname = 'vllm'\n\
                 [[pool]]\nname = 'all'\ndevice = 'H100-SXM-80GB'\n";
    std::fs::write(directory.join("FLEET.toml"), fleet).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = mixfleet();
        command.args(["simulate", "--fleet", "FLEET.toml"]).args(arguments);
        command.current_dir(&directory).output().unwrap()
    };
    let of = |clients: &str| -> Value {
        let output =
            run(&["--closed-loop", clients, "--requests", "48", "--input-tokens", "820..1024", "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let (one, many) = (of("1"), of("16"));
    assert_eq!((&one["completed"], &many["completed"]), (&Value::from(48), &Value::from(48)));
    let number = |document: &Value, path: &str| document.pointer(path).and_then(Value::as_f64).unwrap();
    // One client: its request is always the only one, so that the throughput is an answer by its time.
    let alone = 1024.0 / number(&one, "/e2e_s/mean");
    assert!((number(&one, "/output_tokens_per_s") / alone - 1.0).abs() < 1e-3);
    // Sixteen clients share each step: more tokens per second, though each waits longer for one.
    assert!(number(&many, "/output_tokens_per_s") > 8.0 * number(&one, "/output_tokens_per_s"));
    assert!(number(&many, "/tpot_s/mean") > number(&one, "/tpot_s/mean"));
    let basis = &many["pools"][0];
    assert!(basis["times_from"].as_str().unwrap().ends_with("; engine vllm"), "{basis}");
    assert!(number(&many, "/pools/0/likely_error") < 0.2, "{basis}");
    let simulated = &many["simulated"];
    assert_eq!(simulated["pools"][0]["instances"], 1, "{simulated}");
    let rent = number(&many, "/simulated/usd_per_hour") * number(&many, "/simulated_s") / 3600.0;
    assert!((number(&many, "/usd_rent") / rent - 1.0).abs() < 1e-6, "{simulated}");
    for name in ["model", "load", "fleet", "policy", "admission", "objectives"] {
        assert!(simulated[name].as_str().is_some_and(|value| !value.is_empty()), "{name}: {simulated}");
    }
    let again = of("16");
    assert_eq!(again["simulated_s"], many["simulated_s"]);
    let table = run(&["--closed-loop", "4", "--engine", "trtllm", "--think-s", "1", "--ramp-s", "2"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for word in
        ["40 completed", "sha256 ", " per hour: $", "output tokens/s", "; engine tensorrt-llm, likely within"]
    {
        assert!(table.contains(word), "{word}: {table}");
    }
    for (arguments, says) in [
        (&[][..], "--trace"),
        (&["--closed-loop", "4", "--trace", "t.jsonl"], "cannot be used with"),
        (&["--closed-loop", "0"], "0"),
        (&["--closed-loop", "4", "--input-tokens", "9..8"], "820..1024"),
        (&["--trace", "t.jsonl", "--think-s", "1"], "cannot be used with"),
        (&["--closed-loop", "4", "--engine", "ollama"], "known are mixfleet"),
    ] {
        let output = run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
}
