//! A planned fleet as files that start it: Compose and Kubernetes, for mixfleet's engine and for vLLM.

mod instances;
mod vllm;

use super::Planned;
use super::found::ProvenFleet;
use crate::simulate::word;
use instances::{WorkerDevice, backend, next_instance, pool_name, sharing_word};
use mixfleet_hal::units::{Bytes, GIB};
use mixfleet_hwtests::files::write_whole;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_sim::fleet_file::role_of;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use vllm::VllmFleet;

/// The workers of Kubernetes that others are made after.
const WORKER: &str = include_str!("../../../../docs/deploy/kubernetes/worker.yaml");

/// Writes what starts `fleet` into `directory`, and says in words what it wrote, or why nothing.
pub(super) fn write(planned: &Planned<'_>, fleet: &ProvenFleet, directory: &Path) -> std::io::Result<String> {
    if fleet.tiers.nodes > 0 {
        let gib = fleet.tiers.dram.0 / GIB as f64;
        let why = format!("KV nodes are started by hand, with mixfleet worker --role kv --kv-dram {gib}");
        return Ok(format!("no files that start it: {why}"));
    }
    match planned.args.engine.name {
        engine if engine != "mixfleet" && (fleet.is_apart() || fleet.has_spare()) => {
            Ok(format!("no files that start it: {engine} has no devices that attend for others"))
        }
        "vllm" => {
            let vllm = VllmFleet {
                parts: &planned.offers.parts,
                pools: &fleet.pools,
                model: planned.model.name,
                stored: fleet.stored,
                header: header(planned, fleet),
                gateway: router_flags(planned, fleet),
            };
            write_whole(&directory.join("vllm.sh"), vllm.lines().as_bytes())?;
            let written = [("compose.yaml", vllm.compose()), ("engines.yaml", vllm.kubernetes())];
            let mut said = "vllm.sh".to_owned();
            for (name, text) in written {
                match text {
                    Ok(text) => {
                        write_whole(&directory.join(name), text.as_bytes())?;
                        let _ = write!(said, ", {name}");
                    }
                    Err(why) => {
                        let _ = write!(said, "; no {name}: {why}");
                    }
                }
            }
            Ok(said)
        }
        "mixfleet" => {
            let services = match compose(planned, fleet) {
                Ok(services) => services,
                Err(why) => return Ok(format!("no files that start it: {why}")),
            };
            write_whole(&directory.join("compose.yaml"), services.as_bytes())?;
            match kubernetes(planned, fleet) {
                Ok(workers) => {
                    write_whole(&directory.join("workers.yaml"), workers.as_bytes())?;
                    Ok("compose.yaml, and workers.yaml for Kubernetes".into())
                }
                Err(why) => Ok(format!("compose.yaml, and none for Kubernetes: {why}")),
            }
        }
        other => Ok(format!("no files that start it: they are written for mixfleet and vllm, not {other}")),
    }
}

/// A deployment for each pool, with a pod for each instance.
fn kubernetes(planned: &Planned<'_>, fleet: &ProvenFleet) -> Result<String, String> {
    if fleet.tiers.ssd.0 > 0.0 {
        return Err(
            "where its disks are mounted is the cluster's; give each worker --kv-ssd and --kv-ssd-gib".into(),
        );
    }
    let template = WORKER.split("---\n").next().unwrap_or_default();
    let mut text = format!("# {}\n", header(planned, fleet));
    text.push_str("# The router and the rest are those of docs/deploy/kubernetes; start the router with\n");
    let _ = writeln!(text, "#   {}", router_flags(planned, fleet).join(" "));
    for pool in &fleet.pools {
        let part = planned.offers.parts[pool.part].part;
        let mut parts = pool.takes().map(|(part, _)| part);
        if parts.any(|other| other != pool.part) {
            return Err("a pod's devices are of one part; docs/serving.md says how mixfleet member lends those of other hosts".into());
        }
        let (_, resource) = backend(part.vendor)
            .ok_or_else(|| format!("mixfleet's own engine has no backend for {}", part.id))?;
        let (id, role) = (planned.offers.parts[pool.part].word(), role_of(pool.duty));
        // each pod sees its own devices alone, the first as 0
        let of = next_instance(&planned.offers.parts, pool, &mut BTreeMap::new())?;
        let WorkerDevice { selector, usd_per_hour } = of;
        let devices: u32 = pool.takes().map(|(_, devices)| devices).sum();
        let shared = sharing_word(&planned.offers.parts, pool);
        let shared = shared.map_or_else(String::new, |word| format!("@mixfleet/devices: {word}\n"));
        let quoted = tier_flags(fleet, pool).into_iter().map(|word| format!("            - \"{word}\"\n"));
        let tiers: String = quoted.collect();
        let changes = [
            ("kind: DaemonSet", "kind: Deployment".to_owned()),
            ("spec:\n  selector:", format!("spec:\n  replicas: {}\n  selector:", pool.count)),
            ("  updateStrategy:", "  strategy:".into()),
            ("      maxUnavailable: 1\n", "      maxUnavailable: 1\n      maxSurge: 0\n".into()),
            ("mixfleet-prefill", format!("mixfleet-{}", pool_name(&planned.offers.parts, pool))),
            ("component: prefill\n", format!("component: {role}\n@mixfleet/part: {id}\n{shared}")),
            ("mixfleet/prefill: \"true\"", format!("mixfleet/part: {id}")),
            (
                "            - cuda\n",
                format!(
                    "            - {selector}\n            - --usd-per-hour\n            - {selector}={usd_per_hour}\n"
                ),
            ),
            (
                "            - prefill\n            - --kv-memory\n            - \"40\"\n",
                format!("            - {role}\n{tiers}"),
            ),
            ("nvidia.com/gpu: \"1\"", format!("nvidia.com/gpu: \"{devices}\"")),
            ("nvidia.com/gpu", resource.into()),
        ];
        let mut worker = template.to_owned();
        for (from, to) in changes {
            if !worker.contains(from) {
                return Err(format!("the worker of docs/deploy/kubernetes has no '{from}'"));
            }
            worker = worker.replace(from, &to);
        }
        // a label that was added stands as deep as the one before it
        let mut indent = 0;
        text.push_str("---\n");
        for line in worker.lines() {
            let label = line.strip_prefix('@');
            indent = if label.is_some() { indent } else { line.len() - line.trim_start().len() };
            let _ = writeln!(text, "{}{}", " ".repeat(label.map_or(0, |_| indent)), label.unwrap_or(line));
        }
    }
    Ok(text)
}

/// What a worker of a pool is told of its tiers, of which disks are in the volume that all share.
fn tier_flags(fleet: &ProvenFleet, pool: &PlannedPool) -> Vec<String> {
    if !fleet.tiers.are_of(pool) {
        return Vec::new();
    }
    let gib = |bytes: Bytes| (bytes.0 / GIB as f64).to_string();
    let dram = vec!["--kv-dram".into(), gib(fleet.tiers.dram)];
    let ssd = ["--kv-ssd".into(), "/shared/kv".into(), "--kv-ssd-gib".into(), gib(fleet.tiers.ssd)];
    let with_ssd = fleet.tiers.ssd.0 > 0.0;
    dram.into_iter().chain(ssd.into_iter().filter(|_| with_ssd)).collect()
}

/// All instances on one machine, after docs/deploy/compose.yaml.
fn compose(planned: &Planned<'_>, fleet: &ProvenFleet) -> Result<String, String> {
    let parts = &planned.offers.parts;
    let places: BTreeSet<&str> = fleet
        .pools
        .iter()
        .flat_map(PlannedPool::takes)
        .map(|(part, _)| parts[part].region.as_str())
        .collect();
    if places.len() > 1 {
        return Err("its instances are in several regions, each of which has its own machines".into());
    }
    let mut text = format!("# {}\n", header(planned, fleet));
    text.push_str(
        "# All on one machine, whose devices are numbered in the order of the pools ('mixfleet devices' lists them):\n\
         #   MODEL=/path/to/checkpoint API_KEY=secret docker compose -f compose.yaml up\n\
         # The image is that of docs/deploy/Dockerfile.\n\
         name: mixfleet\n\nx-mixfleet: &mixfleet\n  image: mixfleet\n  network_mode: service:etcd\n  depends_on: [etcd]\n  \
         restart: unless-stopped\n  environment:\n    XDG_CACHE_HOME: /shared\n  volumes:\n    \
         - ${MODEL:?the checkpoint's directory}:/model:ro\n    - shared:/shared\n\nservices:\n  etcd:\n    \
         image: quay.io/coreos/etcd:v3.6.5\n    restart: unless-stopped\n    command:\n      - etcd\n      \
         - --data-dir=/etcd-data\n      - --listen-client-urls=http://127.0.0.1:2379\n      \
         - --advertise-client-urls=http://127.0.0.1:2379\n    volumes:\n      - etcd:/etcd-data\n    ports:\n      \
         - \"127.0.0.1:8000:8000\"\n",
    );
    let mut service = |name: &str, more: &str, words: &[String]| {
        let _ = write!(text, "\n  {name}:\n    <<: *mixfleet\n{more}    command:\n");
        words.iter().for_each(|word| {
            // in quotes, since a number is no word to Compose
            let _ = writeln!(text, "      - {}", serde_json::json!(word));
        });
    };
    let common = |name: &str| {
        let words = [name, "--etcd", "http://127.0.0.1:2379", "--model", "/model"];
        words.map(String::from).to_vec()
    };
    let router =
        [common("router"), router_flags(planned, fleet), vec!["--listen".into(), "0.0.0.0:8000".into()]];
    let key = "    environment:\n      XDG_CACHE_HOME: /shared\n      MIXFLEET_API_KEY: ${API_KEY:?clients send it}\n    \
               stop_grace_period: 2m\n";
    service("router", key, &router.concat());
    let mut taken = BTreeMap::new();
    for (at, pool) in (0..).zip(&fleet.pools) {
        let mut words = common("worker");
        words.extend(["--role".into(), role_of(pool.duty).into()]);
        words.extend(tier_flags(fleet, pool));
        for _ in 0..pool.count {
            let WorkerDevice { selector, usd_per_hour } = next_instance(parts, pool, &mut taken)?;
            let price = format!("{selector}={usd_per_hour}");
            words.extend(["--device".into(), selector, "--usd-per-hour".into(), price]);
        }
        words.extend(["--listen-http".into(), format!("127.0.0.1:{}", 9000 + at)]);
        let backends = pool.takes().filter_map(|(part, _)| Some(backend(parts[part].part.vendor)?.0));
        let backends: BTreeSet<&str> = backends.collect();
        let mut more = String::new();
        for (of, lines) in [("cuda", "    gpus: all\n"), ("wgpu", "    devices:\n      - /dev/dri\n")] {
            more.push_str(if backends.contains(of) { lines } else { "" });
        }
        service(&pool_name(parts, pool), &more, &words);
    }
    text.push_str("\nvolumes:\n  etcd:\n  shared:\n");
    Ok(text)
}

fn header(planned: &Planned<'_>, fleet: &ProvenFleet) -> String {
    let usd = fleet.usd_per_hour;
    let (model, stored) = (planned.model.name, fleet.stored);
    format!("planned by mixfleet plan: {model} in {stored} for {}, ${usd:.2}/h", planned.load.text)
        .replace(char::is_control, " ")
}

fn router_flags(planned: &Planned<'_>, fleet: &ProvenFleet) -> Vec<String> {
    let [ttft, tbt] = [planned.args.ttft, planned.args.tbt].map(|seconds| seconds.to_string());
    let policy = word(&fleet.policy);
    ["--ttft-slo", &ttft, "--tbt-slo", &tbt, "--policy", &policy].map(String::from).to_vec()
}
