//! Planned instances of vLLM as graphs of NVIDIA Dynamo, with the pools' grid of its global router.

use super::VllmFleet;
use super::kubernetes::PORT;
use crate::plan::deploy::StartFile;
use crate::plan::deploy::instances::pool_name;
use crate::worker_engines::WorkerEngine;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::program::Duty;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// The release whose fields and images these files have.
const RELEASE: &str = "1.6.1";
/// Namespace of Kubernetes, which the operator puts before those of Dynamo.
const NAMESPACE: &str = "default";
/// Rows and columns of a grid.
const RESOLUTION: u32 = 4;
/// Sequences of a step in the comparison of decode pools.
const BATCH: u32 = 8;

/// A pool in a grid: its predicted times, and its rent.
struct GridPool {
    cost: Option<CostModel>,
    usd_per_s: f64,
}

/// What a grid compares.
#[derive(Clone, Copy)]
enum GridOf {
    /// Seconds of a prompt of some tokens.
    Prompt,
    /// Seconds of a step at a context of some tokens.
    Step,
}

impl GridPool {
    fn time_s(&self, of: GridOf, tokens: u32) -> f64 {
        let Some(cost) = &self.cost else { return f64::INFINITY };
        match of {
            GridOf::Prompt => cost.prefill_s(0, tokens).0,
            GridOf::Step => cost.decode_step_s(BATCH, u64::from(BATCH) * u64::from(tokens)).0,
        }
    }
}

/// For each length and target the cheapest of the pools that meet it, or else the fastest.
fn mapping(pools: &[GridPool], of: GridOf, tokens_max: u32, targets_s: [f64; 2]) -> Vec<Vec<usize>> {
    let edge = |at: u32| f64::from(at + 1) / f64::from(RESOLUTION);
    let row = |row: u32| {
        let tokens = tokens_max / RESOLUTION * (row + 1);
        let best = |column: u32| {
            let target_s = targets_s[0] + (targets_s[1] - targets_s[0]) * edge(column);
            let rank = |pool: &GridPool| {
                let time_s = pool.time_s(of, tokens);
                if time_s <= target_s { (false, time_s * pool.usd_per_s) } else { (true, time_s) }
            };
            let ranked = pools.iter().map(rank).enumerate();
            let order =
                |one: &(bool, f64), other: &(bool, f64)| one.0.cmp(&other.0).then(one.1.total_cmp(&other.1));
            ranked.min_by(|(_, one), (_, other)| order(one, other)).map_or(0, |(at, _)| at)
        };
        (0..RESOLUTION).map(best).collect()
    };
    (0..RESOLUTION).map(row).collect()
}

impl VllmFleet<'_> {
    /// What starts it under Dynamo's operator.
    pub(in crate::plan::deploy) fn dynamo_files(&self) -> Vec<StartFile> {
        let kustomization = format!(
            "# {}\n# The operator puts Kubernetes' namespace before Dynamo's: outside of '{NAMESPACE}', replace \
             '{NAMESPACE}-' in both files.\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n\
             namespace: {NAMESPACE}\nresources:\n  - dynamo.yaml\nconfigMapGenerator:\n  \
             - name: mixfleet-global-router\n    files: [global-router.json]\ngeneratorOptions:\n  \
             disableNameSuffixHash: true\n",
            self.header
        );
        vec![
            ("dynamo.yaml", self.fault().and_then(|()| self.graphs())),
            ("global-router.json", self.global_router().map(|grid| format!("{grid:#}\n"))),
            ("kustomization.yaml", Ok(kustomization)),
        ]
    }

    fn of_duty(&self, is_meant: impl Fn(Duty) -> bool) -> Vec<&PlannedPool> {
        self.pools.iter().filter(|pool| is_meant(pool.duty)).collect()
    }

    /// The configuration of Dynamo's global router.
    fn global_router(&self) -> Result<Value, String> {
        let [ttft_s, tbt_s] = self.objectives;
        let tokens_max = self.model.context.min(32_768);
        let names = |pools: &[&PlannedPool]| -> Vec<String> {
            pools.iter().map(|pool| format!("{NAMESPACE}-{}", pool_name(self.parts, pool))).collect()
        };
        let grid = |pools: &[&PlannedPool], of: GridOf, slo_s: f64| {
            let compared = self.grid_pools(pools)?;
            Ok::<_, String>(mapping(&compared, of, tokens_max, [slo_s / 2.0, slo_s * 1.5]))
        };
        let ms = |slo_s: f64| [slo_s * 500.0, slo_s * 1500.0];
        let ([ttft_min, ttft_max], [itl_min, itl_max]) = (ms(ttft_s), ms(tbt_s));
        let whole = self.of_duty(|duty| duty == Duty::Whole);
        let (prefill, decode) =
            (self.of_duty(|duty| duty == Duty::Prefill), self.of_duty(|duty| duty == Duty::Decode));
        if prefill.is_empty() {
            let by_ttft = grid(&whole, GridOf::Prompt, ttft_s)?;
            // longest prompts: a pool that meets the first token's target for these meets it for all
            let rows: Vec<Vec<usize>> = (0..RESOLUTION as usize)
                .map(|at| vec![by_ttft[RESOLUTION as usize - 1][at]; RESOLUTION as usize])
                .collect();
            return Ok(json!({
                "mode": "agg", "num_agg_pools": whole.len(), "agg_pool_dynamo_namespaces": names(&whole),
                "agg_pool_selection_strategy": {
                    "ttft_min_ms": ttft_min, "ttft_max_ms": ttft_max, "ttft_resolution": RESOLUTION,
                    "itl_min_ms": itl_min, "itl_max_ms": itl_max, "itl_resolution": RESOLUTION,
                    "agg_pool_mapping": rows,
                },
            }));
        }
        if !whole.is_empty() || decode.is_empty() {
            return Err("Dynamo's global router has pools that divide all requests or none".into());
        }
        Ok(json!({
            "mode": "disagg",
            "num_prefill_pools": prefill.len(), "prefill_pool_dynamo_namespaces": names(&prefill),
            "num_decode_pools": decode.len(), "decode_pool_dynamo_namespaces": names(&decode),
            "prefill_pool_selection_strategy": {
                "ttft_min_ms": ttft_min, "ttft_max_ms": ttft_max, "ttft_resolution": RESOLUTION,
                "isl_min": 0, "isl_max": tokens_max, "isl_resolution": RESOLUTION,
                "prefill_pool_mapping": grid(&prefill, GridOf::Prompt, ttft_s)?,
            },
            "decode_pool_selection_strategy": {
                "itl_min_ms": itl_min, "itl_max_ms": itl_max, "itl_resolution": RESOLUTION,
                "context_length_min": 0, "context_length_max": tokens_max, "context_length_resolution": RESOLUTION,
                "decode_pool_mapping": grid(&decode, GridOf::Step, tbt_s)?,
            },
        }))
    }

    /// The pools as a grid compares them.
    fn grid_pools(&self, pools: &[&PlannedPool]) -> Result<Vec<GridPool>, String> {
        let pool = |pool: &&PlannedPool| {
            let known = self.known(pool);
            let engine = format!("vllm:http://127.0.0.1{known}").parse::<WorkerEngine>()?;
            let opened = engine.open().map_err(|error| format!("{error:#}"))?;
            let cost = opened.into_iter().next().and_then(|spec| spec.cost);
            if cost.is_none() && pools.len() > 1 {
                let name = pool_name(self.parts, pool);
                return Err(format!(
                    "times of '{name}' are not predicted, so that its pools cannot be compared"
                ));
            }
            let usd_per_hour = self.parts[pool.part].usd_per_hour.0 * f64::from(pool.layout.devices);
            Ok(GridPool { cost, usd_per_s: usd_per_hour / 3600.0 })
        };
        pools.iter().map(pool).collect()
    }

    /// A graph for the frontend and the global router, and one for each pool.
    fn graphs(&self) -> Result<String, String> {
        let [ttft_ms, tbt_ms] = self.objectives.map(|slo_s| slo_s * 1e3);
        let frontend = ["--router-mode", "round-robin", "--namespace", &format!("{NAMESPACE}-mixfleet")]
            .map(String::from);
        let router = [
            "--config".into(),
            "/config/global-router.json".into(),
            "--model-name".into(),
            self.model.name.into(),
            "--default-ttft-target".into(),
            ttft_ms.to_string(),
            "--default-itl-target".into(),
            tbt_ms.to_string(),
            "--namespace".into(),
            format!("{NAMESPACE}-mixfleet"),
        ];
        let mounted = "      extraPodSpec:\n        volumes:\n          - name: config\n            configMap:\n              \
                       name: mixfleet-global-router\n        mainContainer:\n          volumeMounts:\n            \
                       - name: config\n              mountPath: /config\n              readOnly: true\n";
        let plain = "      extraPodSpec:\n        mainContainer:\n";
        let mut text = format!(
            "# {}\n# For Dynamo {RELEASE}. Schema not checked.\n{}{}{}",
            self.header,
            graph("mixfleet"),
            service("Frontend", "frontend", "mixfleet", "dynamo.frontend", &frontend, plain),
            service("GlobalRouter", "default", "mixfleet", "dynamo.global_router", &router, mounted),
        );
        for pool in self.pools {
            let name = pool_name(self.parts, pool);
            let component = if pool.duty == Duty::Prefill { "prefill" } else { "backend" };
            let local = ["--endpoint".to_owned(), format!("{NAMESPACE}-{name}.{component}.generate")];
            let worker = self.dynamo_worker(pool);
            text.push_str("---\n");
            text.push_str(&graph(&format!("mixfleet-{name}")));
            text.push_str(&service("LocalRouter", "default", &name, "dynamo.router", &local, plain));
            let part = format!(
                "      extraPodSpec:\n        nodeSelector:\n          mixfleet/part: {}\n        mainContainer:\n",
                self.parts[pool.part].word()
            );
            text.push_str(&service("Worker", "worker", &name, "dynamo.vllm", &worker, &part));
            if pool.duty != Duty::Whole {
                let kind = if pool.duty == Duty::Prefill { "prefill" } else { "decode" };
                let _ = writeln!(text, "      subComponentType: {kind}");
            }
            let devices = pool.layout.devices;
            let _ = write!(
                text,
                "      replicas: {}\n      resources:\n        limits:\n          gpu: \"{devices}\"\n",
                pool.count
            );
        }
        Ok(text)
    }

    /// The worker's arguments: those of vLLM, without what Dynamo decides.
    fn dynamo_worker(&self, pool: &PlannedPool) -> Vec<String> {
        let mut words = self.command(pool, "0.0.0.0", PORT);
        let mut without = |flag: &str| {
            if let Some(at) = words.iter().position(|word| word == flag) {
                words.drain(at..at + 2);
            }
        };
        ["--host", "--port", "--kv-transfer-config", "--kv-events-config"].into_iter().for_each(&mut without);
        words.insert(0, "--model".into());
        match pool.duty {
            Duty::Prefill => words.extend(["--disaggregation-mode".into(), "prefill".into()]),
            Duty::Decode => words.extend(["--disaggregation-mode".into(), "decode".into()]),
            _ => {}
        }
        words
    }
}

/// The head of a graph.
fn graph(name: &str) -> String {
    format!(
        "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata:\n  name: {name}\nspec:\n  services:\n"
    )
}

/// A service of a graph, which runs a module of Python.
fn service(name: &str, kind: &str, namespace: &str, module: &str, arguments: &[String], pod: &str) -> String {
    let mut text =
        format!("    {name}:\n      componentType: {kind}\n      dynamoNamespace: {namespace}\n{pod}");
    let _ = write!(
        text,
        "          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:{RELEASE}\n          command: [python3, -m, {module}]\n          args:\n"
    );
    for argument in arguments {
        let _ = writeln!(text, "            - {}", json!(argument));
    }
    if kind != "worker" {
        text.push_str("      replicas: 1\n");
    }
    text
}
