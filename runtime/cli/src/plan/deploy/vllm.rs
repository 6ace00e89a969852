//! A planned fleet of vLLM behind `mixfleet serve`: launch lines, Compose, Kubernetes.

mod dynamo;
mod kserve;
mod kubernetes;
mod llmd;

use super::StartFile;
use super::instances::{HOST_DEVICES_MAX, backend, pool_name, quoted};
use crate::worker_engines::WorkerEngine;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::{StoredAs, WeightFormat};
use mixfleet_scheduler::cost::ExpertsBy;
use mixfleet_scheduler::models::KnownModel;
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_sim::fleet_file::role_of;
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The release whose names, routes and flags these files have.
const VLLM: &str = "v0.32.0";
/// The first port of an instance, where several share one network.
const PORT_FIRST: u32 = 10_000;
/// Ports of an instance: its API, then NIXL from 1 on, KV events from 20 and their replay from 30 on, one
/// port per rank.
const PORTS: u32 = 40;
/// vLLM's default share of a part's memory.
const MEMORY_SHARE: f64 = 0.9;
/// The share of an instance whose weights leave little of that for KV.
const MEMORY_SHARE_TIGHT: f64 = 0.95;
/// Tokens of KV below which an instance gets that share.
const TOKENS_TIGHT: u32 = 8192;
/// What it needs of that beside weights and KV on each device: activations and recorded steps.
const WORKSPACE_GB: f64 = 2.0;
/// Lengths are rounded to multiples of this.
const ROUND_TOKENS: u32 = 1024;

/// A planned fleet of vLLM.
pub(super) struct VllmFleet<'a> {
    pub(super) parts: &'a [OfferedPart],
    pub(super) pools: &'a [PlannedPool],
    /// A known model, by whose name clients ask too.
    pub(super) model: &'a KnownModel,
    pub(super) stored: StoredAs,
    /// A description of the plan.
    pub(super) header: String,
    /// The objectives and the policy, as `serve` takes them.
    pub(super) gateway: Vec<String>,
    /// Seconds to the first token and between tokens.
    pub(super) objectives: [f64; 2],
    /// Planned prompt tokens and tokens of answers a second.
    pub(super) tokens_per_s: [f64; 2],
}

/// Where an instance is reached.
struct EngineAt {
    host: String,
    /// Of its API; the others follow it.
    port: u32,
}

impl EngineAt {
    /// The number of an instance in a network that all share.
    fn here(number: u32) -> Self {
        EngineAt { host: "127.0.0.1".into(), port: PORT_FIRST + PORTS * number }
    }
}

impl VllmFleet<'_> {
    /// What starts it.
    pub(super) fn files(&self) -> Vec<StartFile> {
        vec![
            ("vllm.sh", Ok(self.lines())),
            ("compose.yaml", self.compose()),
            ("engines.yaml", self.kubernetes()),
        ]
    }

    /// The lines that start vLLM with the same split, one for each instance of a pool, and what stands
    /// before them.
    pub(super) fn lines(&self) -> String {
        let mut text = format!(
            "# {}\n# MODEL is the checkpoint; run each line on the part that stands above it.\n",
            self.header
        );
        if self.pools.iter().any(|pool| pool.duty != Duty::Whole) {
            text.push_str(
                "# KV goes from host to host: give each VLLM_NIXL_SIDE_CHANNEL_HOST=its own address.\n",
            );
        }
        let mut gateway = self.serve();
        let mut number = 1;
        for pool in self.pools {
            let PlannedPool { layout, count, duty, .. } = pool;
            let flags: Vec<String> = self.flags(pool).iter().map(|word| quoted(word)).collect();
            let what = match role_of(*duty) {
                "auto" => "prompts and decoding",
                role => role,
            };
            let name = self.parts[pool.part].name();
            let _ = write!(
                text,
                "\n# {count} times, each on {} x {name}: {what}\nvllm serve \"$MODEL\" --served-model-name {} {}\n",
                layout.devices,
                self.model.name,
                flags.join(" ")
            );
            let known = self.known(pool);
            for _ in 0..*count {
                let at = EngineAt { host: format!("HOST-{number}"), port: 8000 };
                gateway.extend(self.worker_engine(pool, &known, &at));
                number += 1;
            }
        }
        let words: Vec<String> = gateway.iter().map(|word| quoted(word)).collect();
        let _ = write!(
            text,
            "\n# Before them, with the hosts in place of HOST-1 and so on, and a key with --listen beyond this machine.\n\
             mixfleet {}\n",
            words.join(" ")
        );
        text.replace(" \n", "\n")
    }

    /// vLLM's arguments beside its model, its name and its ports.
    fn flags(&self, pool: &PlannedPool) -> Vec<String> {
        let mut flags: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| flags.extend(words.iter().map(|&word| word.to_owned()));
        match self.stored {
            StoredAs::Plain(mixfleet_hal::DType::Bf16) => add(&["--dtype", "bfloat16"]),
            StoredAs::Plain(_) => add(&["--dtype", "float16"]),
            StoredAs::Quantised(WeightFormat::Fp8) => add(&["--quantization", "fp8"]),
            // the checkpoint says how its weights are stored
            StoredAs::Quantised(_) => {}
        }
        let layout = pool.layout;
        let devices = layout.per_stage().to_string();
        match (layout.per_stage(), layout.experts) {
            (1, _) => {}
            (_, LayoutExperts::Divided(ExpertsBy::Columns)) => add(&["--tensor-parallel-size", &devices]),
            // whole experts over the devices of tensor parallelism
            (_, LayoutExperts::Divided(ExpertsBy::Member)) => {
                add(&["--tensor-parallel-size", &devices, "--enable-expert-parallel"]);
            }
            (_, LayoutExperts::WithSequences) => {
                add(&["--data-parallel-size", &devices, "--enable-expert-parallel"]);
            }
        }
        if layout.stages > 1 {
            add(&["--pipeline-parallel-size", &layout.stages.to_string()]);
        }
        if self.memory_share(pool) > MEMORY_SHARE {
            add(&["--gpu-memory-utilization", &MEMORY_SHARE_TIGHT.to_string()]);
        }
        if let Some(tokens) = self.bounded_context(pool) {
            add(&["--max-model-len", &tokens.to_string()]);
        }
        let role = match pool.duty {
            Duty::Prefill => Some("kv_producer"),
            Duty::Decode => Some("kv_consumer"),
            _ => None,
        };
        if let Some(role) = role {
            let transfer = format!("{{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"{role}\"}}");
            add(&["--kv-transfer-config", &transfer]);
        }
        flags
    }

    /// The longest sequence whose KV an instance surely holds, where that is less than the model's context:
    /// vLLM does not start without room for one.
    fn bounded_context(&self, pool: &PlannedPool) -> Option<u32> {
        let tokens = self.kv_tokens(pool, self.memory_share(pool)).max(ROUND_TOKENS);
        let bounded = tokens / ROUND_TOKENS * ROUND_TOKENS;
        (bounded < self.model.context).then_some(bounded)
    }

    /// The share of its parts' memory that an instance uses.
    fn memory_share(&self, pool: &PlannedPool) -> f64 {
        let is_tight = self.kv_tokens(pool, MEMORY_SHARE) < TOKENS_TIGHT.min(self.model.context);
        if is_tight { MEMORY_SHARE_TIGHT } else { MEMORY_SHARE }
    }

    /// Tokens whose KV an instance surely holds in this share of its parts' memory.
    fn kv_tokens(&self, pool: &PlannedPool, share: f64) -> u32 {
        let shape = self.model.shape_as(self.stored);
        let memory_gb = self.parts[pool.part].part.memory.size_gb;
        let devices = f64::from(pool.layout.devices);
        let left = memory_gb * 1e9 * share * devices
            - self.model.weight_bytes(self.stored).0
            - WORKSPACE_GB * 1e9 * devices;
        let per_token = (shape.kv_bytes_per_token() as f64).max(1.0);
        u32::try_from(to_u64((left / per_token).max(0.0))).unwrap_or(u32::MAX)
    }

    /// All arguments after `vllm serve`, with the checkpoint at `/model`.
    fn command(&self, pool: &PlannedPool, listens: &str, port: u32) -> Vec<String> {
        let [api, events, replay] = [port, port + 20, port + 30].map(|port| port.to_string());
        let kv_events = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": format!("tcp://*:{events}"),
            "replay_endpoint": format!("tcp://*:{replay}"),
        });
        let mut words: Vec<String> =
            ["/model", "--served-model-name", self.model.name, "--host", listens, "--port", &api]
                .map(String::from)
                .into();
        words.extend(self.flags(pool));
        words.extend(["--kv-events-config".into(), kv_events.to_string()]);
        words
    }

    /// The gateway's command without its engines.
    fn serve(&self) -> Vec<String> {
        let first = ["serve", "--name", self.model.name].map(String::from);
        first.into_iter().chain(self.gateway.iter().cloned()).collect()
    }

    /// An instance as an argument of the gateway, with the `known` facts of its pool.
    fn worker_engine(&self, pool: &PlannedPool, known: &str, at: &EngineAt) -> [String; 2] {
        let usd = self.parts[pool.part].usd_per_hour.0 * f64::from(pool.layout.devices);
        let role = match role_of(pool.duty) {
            "auto" => String::new(),
            role => format!("={role}"),
        };
        let EngineAt { host, port } = at;
        ["--worker-engine".into(), format!("vllm:http://{host}:{port}{role},usd={usd}{known}")]
    }

    /// The gateway's options that predict the instances of a pool; empty if they are measured at their start:
    /// stages, experts, and parts without published exchange times.
    fn known(&self, pool: &PlannedPool) -> String {
        let (tp, id) = (pool.layout.devices, self.parts[pool.part].part.id);
        let sharing = if tp > 1 { format!(",tp={tp}") } else { String::new() };
        let known = format!(",part={id},shape={},stored={}{sharing}", self.model.name, self.stored.name());
        let engine = format!("vllm:http://127.0.0.1{known}").parse::<WorkerEngine>();
        let is_whole = pool.layout.stages == 1 && pool.layout.is_by_columns();
        if is_whole && engine.is_ok_and(|engine| engine.open().is_ok()) { known } else { String::new() }
    }

    /// What keeps it from being started as it is planned, on one machine or as pods.
    fn fault(&self) -> Result<(), String> {
        for pool in self.pools {
            if pool.layout.devices > HOST_DEVICES_MAX {
                let devices = pool.layout.devices;
                return Err(format!(
                    "an instance has {devices} devices, in several hosts, which vLLM joins by Ray or its own launcher"
                ));
            }
        }
        self.fault_of_parts()
    }

    /// What keeps vLLM from its parts: no image, or too little memory.
    fn fault_of_parts(&self) -> Result<(), String> {
        for pool in self.pools {
            let part = &self.parts[pool.part].part;
            image(part.vendor)?;
            if self.kv_tokens(pool, MEMORY_SHARE_TIGHT) < ROUND_TOKENS {
                return Err(format!(
                    "beside weights and {WORKSPACE_GB} GB of workspace, vLLM has no room for KV on {}: plan with larger parts or --dtype",
                    part.id
                ));
            }
        }
        Ok(())
    }

    /// All instances on one machine, and the gateway before them.
    ///
    /// # Errors
    /// Why one machine cannot have them.
    pub(super) fn compose(&self) -> Result<String, String> {
        self.fault()?;
        let places: BTreeSet<&str> =
            self.pools.iter().map(|pool| self.parts[pool.part].region.as_str()).collect();
        if places.len() > 1 {
            return Err("its instances are in several regions, and machines do not span regions".into());
        }
        let mut gateway = self.serve();
        let mut engines = String::new();
        let (mut number, mut taken) = (0, [0_u32; 2]);
        for pool in self.pools {
            let (image, known) = (image(self.parts[pool.part].part.vendor)?, self.known(pool));
            for of_pool in 1..=pool.count {
                let at = EngineAt::here(number);
                gateway.extend(self.worker_engine(pool, &known, &at));
                let first = &mut taken[usize::from(image.is_rocm)];
                let devices: Vec<String> =
                    (*first..*first + pool.layout.devices).map(|n| n.to_string()).collect();
                *first += pool.layout.devices;
                let name = format!("{}-{of_pool}", pool_name(self.parts, pool));
                let _ = write!(engines, "\n  {name}:\n{}", image.compose(&devices, at.port + 1));
                engines.push_str(&list("command", &self.command(pool, "127.0.0.1", at.port)));
                number += 1;
            }
        }
        gateway.extend(["--listen".into(), "0.0.0.0:8000".into()]);
        Ok(format!(
            "# {}\n\
             # All on one machine, whose devices are numbered in the order of the pools:\n\
             #   MODEL=/path/to/checkpoint API_KEY=secret docker compose -f compose.yaml up\n\
             # The image mixfleet is that of docs/deploy/Dockerfile. All containers share the network of the first one, in\n\
             # which engines are reached over the loopback interface alone; only the gateway's port is published.\n\
             name: mixfleet\n\n\
             x-vllm: &vllm\n  entrypoint: [vllm, serve]\n  network_mode: service:network\n  depends_on: [network]\n  \
             ipc: host\n  restart: unless-stopped\n  volumes:\n    \
             - ${{MODEL:?the checkpoint's directory}}:/model:ro\n\n\
             services:\n  network:\n    image: registry.k8s.io/pause:3.10\n    restart: unless-stopped\n    ports:\n      \
             - \"127.0.0.1:8000:8000\"\n\n  \
             gateway:\n    image: mixfleet\n    network_mode: service:network\n    depends_on: [network]\n    \
             restart: unless-stopped\n    environment:\n      MIXFLEET_API_KEY: ${{API_KEY:?clients send it}}\n    \
             stop_grace_period: 2m\n{}{engines}",
            self.header,
            list("command", &gateway)
        ))
    }

    /// A pod for each instance, and the gateway before them.
    ///
    /// # Errors
    /// Parts of the plan that pods cannot run.
    pub(super) fn kubernetes(&self) -> Result<String, String> {
        self.fault()?;
        kubernetes::write(self)
    }
}

/// vLLM's image for the parts of a vendor.
#[derive(Clone, Copy)]
struct VllmImage {
    is_rocm: bool,
    /// Kubernetes' name of its devices.
    resource: &'static str,
}

fn image(vendor: &str) -> Result<VllmImage, String> {
    match (vendor, backend(vendor)) {
        ("NVIDIA" | "AMD", Some((_, resource))) => Ok(VllmImage { is_rocm: vendor == "AMD", resource }),
        _ => Err(format!("which image of vLLM drives parts of {vendor} is not known here")),
    }
}

impl VllmImage {
    fn name(self) -> String {
        format!("vllm/vllm-openai{}:{VLLM}", if self.is_rocm { "-rocm" } else { "" })
    }

    /// A service of Compose up to its command: the image, the port of NIXL and the devices.
    fn compose(self, devices: &[String], nixl: u32) -> String {
        let mut text = format!(
            "    <<: *vllm\n    image: {}\n    environment:\n      VLLM_NIXL_SIDE_CHANNEL_HOST: 127.0.0.1\n      \
             VLLM_NIXL_SIDE_CHANNEL_PORT: \"{nixl}\"\n",
            self.name()
        );
        let all = devices.join(",");
        if self.is_rocm {
            let _ = write!(
                text,
                "      HIP_VISIBLE_DEVICES: \"{all}\"\n    devices:\n      - /dev/kfd\n      - /dev/dri\n    \
                 group_add: [video]\n    security_opt: [\"seccomp:unconfined\"]\n"
            );
        } else {
            let ids: Vec<String> = devices.iter().map(|id| format!("\"{id}\"")).collect();
            let _ = write!(
                text,
                "    deploy:\n      resources:\n        reservations:\n          devices:\n            \
                 - driver: nvidia\n              device_ids: [{}]\n              capabilities: [gpu]\n",
                ids.join(", ")
            );
        }
        text
    }
}

/// Arguments as a list of a service, quoted where Compose would not read a string.
fn list(key: &str, words: &[String]) -> String {
    let mut text = format!("    {key}:\n");
    words.iter().for_each(|word| {
        let _ = writeln!(text, "      - {}", json!(word));
    });
    text
}
