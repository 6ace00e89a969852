//! A planned fleet, started as its Compose file says, on simulated parts.

use super::{Process, ProcessFleet, wait_until_served};
use crate::common::{golden, mixfleet, scratch};
use crate::plan::lists;

/// 32B parameters are more than two L4 hold: an instance is two stages of two.
#[test]
fn a_planned_instance_of_several_devices_serves_as_its_compose_file_starts_it() {
    let Some(fleet) = ProcessFleet::new("planned") else { return };
    let out = scratch("planned-out");
    let load =
        ["--rate", "0.1", "--input-tokens", "500", "--output-tokens", "50", "--ttft", "10", "--tbt", "0.2"];
    let mut plan = mixfleet();
    plan.args(["plan", "--model", "qwen2.5-32b", "--parts", "L4", "--budget-s", "600", "--out"]).arg(&out);
    let output = plan.args(load).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(out.join("compose.yaml")).unwrap();
    let etcd = format!("http://127.0.0.1:{}", fleet.port);
    let model = fleet.model.to_str().unwrap();
    // what Compose would start, at free ports, with this etcd and checkpoint, and simulated parts for GPUs
    let here = |word: &String| match word.as_str() {
        "http://127.0.0.1:2379" => etcd.clone(),
        "/model" => model.to_owned(),
        word if word.starts_with("127.0.0.1:") || word.starts_with("0.0.0.0:") => "127.0.0.1:0".to_owned(),
        word => simulated(word),
    };
    let commands = lists(&text, "command:");
    let of = |name: &str| {
        let words = commands.iter().filter(|words| words[0] == name);
        words.map(|words| words.iter().map(here).collect::<Vec<String>>()).collect::<Vec<_>>()
    };
    let further = ["--activations", "f32", "--kv-dtype", "f32", "--lease-s", "2"];
    let mut selectors = Vec::new();
    let mut workers = Vec::new();
    for words in of("worker") {
        let devices = words.windows(2).filter(|pair| pair[0] == "--device");
        selectors.extend(devices.map(|pair| pair[1].strip_suffix("=auto").unwrap().to_owned()));
        let mut worker = Process::start(mixfleet().args(words).args(further).args(["--kv-memory", "0.02"]));
        worker.says("joined");
        workers.push(worker);
    }
    let stages = |selector: &String| selector.starts_with("pp:(tp:sim:L4#");
    assert!(!selectors.is_empty() && selectors.iter().all(stages), "{selectors:?}");
    let routers = of("router");
    assert_eq!(routers.len(), 1, "{text}");
    let mut command = mixfleet();
    command.env_remove("MIXFLEET_API_KEY").args(&routers[0]).args(further);
    let mut router = Process::start(&mut command);
    let line = router.says("ready: http://");
    let address = line.split_once("ready: http://").unwrap().1.trim().trim_end_matches("/v1");
    wait_until_served(address, &golden(&fleet.model)["cases"][0]);
    let placed = router.says("placed");
    assert!(selectors.iter().any(|selector| placed.contains(selector.as_str())), "{placed}");
}

/// GPUs as simulated parts.
fn simulated(word: &str) -> String {
    word.replace("cuda:", "sim:L4#")
}
