//! Planned instances of vLLM as pods.

use super::{EngineAt, VllmFleet, image};
use crate::plan::deploy::instances::{HOST_DEVICES_MAX, pool_name, sharing_word};
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_sim::fleet_file::role_of;
use serde_json::json;

/// The router of Kubernetes, which the gateway is made after.
const ROUTER: &str = include_str!("router.yaml");
/// The port of an instance's API; the others follow it as they do on one machine.
pub(super) const PORT: u32 = 8000;

/// What reaches pods by their names, and lets only the gateway and each other do so.
const ENGINES: &str = "---
apiVersion: v1
kind: Service
metadata:
  name: mixfleet-engines
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    app.kubernetes.io/name: mixfleet
    app.kubernetes.io/component: engine
  ports:
    - name: http
      port: 8000
---
# Neither vLLM's API nor its KV events ask who is there.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: mixfleet-engines
spec:
  podSelector:
    matchLabels:
      app.kubernetes.io/name: mixfleet
      app.kubernetes.io/component: engine
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              app.kubernetes.io/name: mixfleet
";

/// A set of pods for each pool, and the gateway before them.
pub(super) fn write(fleet: &VllmFleet<'_>) -> Result<String, String> {
    let mut arguments = fleet.serve();
    let mut text = format!(
        "# {}\n# Instead of the files in docs/deploy/kubernetes, which say how images, models, nodes and the key are made.\n",
        fleet.header
    );
    let mut sets = String::new();
    for pool in fleet.pools {
        let name = format!("mixfleet-{}", pool_name(fleet.parts, pool));
        let known = fleet.known(pool);
        for number in 0..pool.count {
            let at = EngineAt { host: format!("{name}-{number}.mixfleet-engines"), port: PORT };
            arguments.extend(fleet.worker_engine(pool, &known, &at));
        }
        sets.push_str(&pods(
            fleet,
            pool,
            &PodSet {
                kind: "StatefulSet",
                name: &name,
                spec: "  serviceName: mixfleet-engines\n  podManagementPolicy: Parallel\n",
                labels: &[],
                port: PORT,
                beside: "",
            },
        )?);
    }
    arguments.extend(["--listen".into(), "0.0.0.0:8000".into(), "--json".into()]);
    text.push_str(&gateway(&arguments)?);
    text.push_str(ENGINES);
    text.push_str(&sets);
    Ok(text)
}

/// The router with other arguments, without a model and certificates.
fn gateway(arguments: &[String]) -> Result<String, String> {
    // a part of the file, from the line that begins so to the one before that which begins so
    let cut = |text: &str, from: &str, to: &str, instead: &str| {
        let missing = |word: &str| format!("the router of docs/deploy/kubernetes has no '{}'", word.trim());
        let start = text.find(from).ok_or_else(|| missing(from))?;
        let end = text[start..].find(to).ok_or_else(|| missing(to))? + start;
        Ok::<_, String>(format!("{}{instead}{}", &text[..start], &text[end..]))
    };
    let arguments: String = arguments.iter().map(|word| format!("            - {}\n", json!(word))).collect();
    let mut text = format!("---\n{}", ROUTER.trim_start_matches("---\n"));
    for (from, to, instead) in [
        ("            - router\n", "          env:\n", arguments.as_str()),
        ("          volumeMounts:\n", "---\n", ""),
        ("      nodeSelector:\n", "      topologySpreadConstraints:\n", ""),
        // each gateway counts only its own requests in flight
        ("  replicas: 2\n", "  selector:\n", "  replicas: 1\n"),
    ] {
        text = cut(&text, from, to, instead)?;
    }
    let text = text
        .replace("mixfleet-router", "mixfleet-gateway")
        .replace("component: router", "component: gateway");
    Ok(text.replace("- name: router\n", "- name: gateway\n"))
}

/// A set of pods with one instance of a pool each.
pub(super) struct PodSet<'a> {
    pub(super) kind: &'a str,
    pub(super) name: &'a str,
    /// Lines of its specification.
    pub(super) spec: &'a str,
    /// Labels of its pods besides those that its selector has.
    pub(super) labels: &'a [(&'a str, String)],
    /// The engine's port.
    pub(super) port: u32,
    /// Lines for containers that run beside the engine.
    pub(super) beside: &'a str,
}

/// Labels by which a set selects the pods of a pool.
fn selected(fleet: &VllmFleet<'_>, pool: &PlannedPool) -> Vec<(&'static str, String)> {
    vec![
        ("app.kubernetes.io/name", "mixfleet".into()),
        ("app.kubernetes.io/component", "engine".into()),
        ("mixfleet/part", fleet.parts[pool.part].word()),
        ("mixfleet/role", role_of(pool.duty).into()),
        ("mixfleet/devices", sharing_word(fleet.parts, pool).unwrap_or_else(|| "one".into())),
    ]
}

/// The pods of a pool: a set of them, or groups of them for instances that span hosts.
pub(super) fn pods(fleet: &VllmFleet<'_>, pool: &PlannedPool, set: &PodSet<'_>) -> Result<String, String> {
    let &PodSet { kind, name, spec, labels: further, .. } = set;
    let selected = selected(fleet, pool);
    let labels = |all: &[(&str, String)], indent: &str| -> String {
        all.iter().map(|(key, value)| format!("{indent}{key}: {value}\n")).collect()
    };
    let (count, hosts) = (pool.count, hosts_of_instance(pool));
    if hosts == 1 {
        let engine = engine_pod(fleet, pool, set, &PodRank { hosts, is_leader: true })?;
        return Ok(format!(
            "---\napiVersion: apps/v1\nkind: {kind}\nmetadata:\n  name: {name}\nspec:\n{spec}  replicas: {count}\n  \
             selector:\n    matchLabels:\n{}  template:\n    metadata:\n      labels:\n{}{}    spec:\n{engine}",
            labels(&selected, "      "),
            labels(&selected, "        "),
            labels(further, "        "),
        ));
    }
    let template = |is_leader: bool| -> Result<String, String> {
        let engine = engine_pod(fleet, pool, set, &PodRank { hosts, is_leader })?;
        let deeper: String = engine.lines().map(|line| format!("  {line}\n")).collect();
        // requests go to the leader alone
        let further = if is_leader { labels(further, "          ") } else { String::new() };
        let selected = labels(&selected, "          ");
        Ok(format!("      metadata:\n        labels:\n{selected}{further}      spec:\n{deeper}"))
    };
    Ok(format!(
        "---\n# For clusters with LeaderWorkerSet: {hosts} pods are an instance. Schema not checked.\n\
         apiVersion: leaderworkerset.x-k8s.io/v1\nkind: LeaderWorkerSet\nmetadata:\n  name: {name}\nspec:\n  \
         replicas: {count}\n  leaderWorkerTemplate:\n    size: {hosts}\n    restartPolicy: RecreateGroupOnPodRestart\n    \
         leaderTemplate:\n{}    workerTemplate:\n{}",
        template(true)?,
        template(false)?
    ))
}

/// Hosts of an instance, each with the same number of devices.
pub(super) fn hosts_of_instance(pool: &PlannedPool) -> u32 {
    let devices = pool.layout.devices;
    let is_even = |hosts: &u32| devices.is_multiple_of(*hosts);
    (devices.div_ceil(HOST_DEVICES_MAX)..=devices).find(is_even).unwrap_or(1)
}

/// A pod of an instance that may span hosts.
struct PodRank {
    hosts: u32,
    /// Whether it has the instance's API.
    is_leader: bool,
}

impl PodRank {
    /// What joins the processes of an instance: vLLM's own launcher, with the names that LeaderWorkerSet
    /// gives to its pods.
    fn arguments(&self) -> Vec<String> {
        let hosts = self.hosts.to_string();
        let rank = if self.is_leader { "0" } else { "$(LWS_WORKER_INDEX)" };
        let all =
            ["--nnodes", &hosts, "--node-rank", rank, "--master-addr", "$(LWS_LEADER_ADDRESS)", "--headless"];
        let count = match (self.hosts, self.is_leader) {
            (1, _) => 0,
            (_, true) => all.len() - 1,
            (_, false) => all.len(),
        };
        all[..count].iter().map(|&word| word.to_owned()).collect()
    }
}

/// The port and probes of the instance's API.
fn api_probes(port: u32) -> String {
    format!(
        "          ports:
            - name: http
              containerPort: {port}
          # Weights are read first, which may take long.
          startupProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: 10
            failureThreshold: 360
          livenessProbe:
            httpGet:
              path: /health
              port: http
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
"
    )
}

/// The specification of a pod.
fn engine_pod(
    fleet: &VllmFleet<'_>,
    pool: &PlannedPool,
    set: &PodSet<'_>,
    rank: &PodRank,
) -> Result<String, String> {
    let part = &fleet.parts[pool.part];
    let image = image(part.part.vendor)?;
    let (devices, word) = (pool.layout.devices / rank.hosts, part.word());
    let &PodSet { port, .. } = set;
    let beside = if rank.is_leader { set.beside } else { "" };
    let probes = if rank.is_leader { api_probes(port) } else { String::new() };
    let command = fleet.command(pool, "0.0.0.0", port).into_iter().chain(rank.arguments());
    let arguments: String = command.map(|word| format!("            - {}\n", json!(word))).collect();
    Ok(format!(
        "      nodeSelector:
        mixfleet/part: {word}
      tolerations:
        - key: {resource}
          operator: Exists
          effect: NoSchedule
{beside}      containers:
        - name: vllm
          image: {}
          command: [vllm, serve]
          args:
{arguments}          env:
            - name: VLLM_NIXL_SIDE_CHANNEL_HOST
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            - name: VLLM_NIXL_SIDE_CHANNEL_PORT
              value: \"{}\"
{probes}          resources:
            limits:
              {resource}: \"{devices}\"
          volumeMounts:
            - name: model
              mountPath: /model
              readOnly: true
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: model
          hostPath:
            path: /var/lib/mixfleet/model
            type: Directory
        # Between the processes of an instance.
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: 16Gi
",
        image.name(),
        port + 1,
        resource = image.resource,
    ))
}
