//! Planned instances of vLLM behind an inference gateway, with mixfleet's endpoint picker.

use super::VllmFleet;
use super::kubernetes::{PORT, PodSet, hosts_of_instance, pods};
use crate::plan::deploy::StartFile;
use crate::plan::deploy::instances::pool_name;
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::program::Duty;
use serde_json::json;
use std::fmt::Write as _;

const RBAC: &str = include_str!("rbac.yaml");
const PICKER: &str = include_str!("picker.yaml");
const POOL: &str = include_str!("pool.yaml");
const ROUTE: &str = include_str!("route.yaml");

/// The port of an engine behind llm-d's sidecar, which has the pool's port.
const BEHIND_SIDECAR: u32 = 8200;

/// llm-d's sidecar: it has the prompt computed where the request's header x-prefiller-host-port says.
const SIDECAR: &str = "      initContainers:
        # Of the release of llm-d that the cluster has.
        - name: routing-proxy
          image: ghcr.io/llm-d/llm-d-routing-sidecar:v0.9.0
          restartPolicy: Always
          args:
            - --port=8000
            - --vllm-port=8200
            - --connector=nixlv2
            - --secure-proxy=false
          ports:
            - name: proxy
              containerPort: 8000
";

const MONITOR: &str = "# For clusters with Prometheus' operator. Schema not checked.
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: mixfleet-epp
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: mixfleet
      app.kubernetes.io/component: picker
  endpoints:
    - port: metrics
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: mixfleet-engines
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: mixfleet
      app.kubernetes.io/component: engine
  podMetricsEndpoints:
    - port: http
";

const KUSTOMIZATION: &str =
    "# kubectl apply -k . in a namespace for it. Leave out monitor.yaml without Prometheus' operator, and \
scaled-objects.yaml
# without KEDA.
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
  - engines.yaml
  - pool.yaml
  - rbac.yaml
  - picker.yaml
  - route.yaml
  - monitor.yaml
  - scaled-objects.yaml
configMapGenerator:
  - name: mixfleet-scale
    files: [scale.yaml]
patches:
  - target:
      kind: Deployment
      name: mixfleet-epp
    patch: |-
      - op: add
        path: /spec/template/spec/containers/0/args/-
        value: --scale=/scale/scale.yaml
      - op: add
        path: /spec/template/spec/containers/0/args/-
        value: --scaler=:9004
      - op: add
        path: /spec/template/spec/containers/0/volumeMounts
        value: [{name: scale, mountPath: /scale, readOnly: true}]
      - op: add
        path: /spec/template/spec/volumes
        value: [{name: scale, configMap: {name: mixfleet-scale}}]
";

/// What is scaled where an instance spans hosts.
const GROUPS: &str = "    apiVersion: leaderworkerset.x-k8s.io/v1\n    kind: LeaderWorkerSet\n";

/// Times the planned rent that autoscaling may spend, until the user says otherwise.
const BUDGET_TIMES: f64 = 2.0;

impl VllmFleet<'_> {
    /// What starts it behind a gateway of Kubernetes.
    pub(in crate::plan::deploy) fn llmd_files(&self) -> Vec<StartFile> {
        vec![
            ("engines.yaml", self.fault_of_parts().and_then(|()| self.deployments())),
            ("pool.yaml", Ok(POOL.into())),
            ("rbac.yaml", Ok(RBAC.into())),
            ("picker.yaml", self.picker()),
            ("route.yaml", Ok(ROUTE.into())),
            ("monitor.yaml", Ok(MONITOR.into())),
            ("scale.yaml", Ok(self.scale())),
            ("scaled-objects.yaml", Ok(self.scaled_objects())),
            ("kustomization.yaml", Ok(format!("# {}\n{KUSTOMIZATION}", self.header))),
        ]
    }

    /// The picker with the plan's objectives and policy.
    fn picker(&self) -> Result<String, String> {
        let last = "            - --json\n";
        if !PICKER.contains(last) {
            return Err("the picker of docs/deploy/kubernetes does not end with --json".into());
        }
        let more: String =
            self.gateway.iter().map(|word| format!("            - {}\n", json!(word))).collect();
        Ok(PICKER.replacen(last, &(more + last), 1))
    }

    fn rent(&self, pool: &PlannedPool) -> f64 {
        self.parts[pool.part].usd_per_hour.0 * f64::from(pool.layout.devices)
    }

    /// The plan for the picker's scaler.
    fn scale(&self) -> String {
        let planned: f64 = self.pools.iter().map(|pool| self.rent(pool) * f64::from(pool.count)).sum();
        let [prompts, answers] = self.tokens_per_s;
        let mut text = format!(
            "# {}\n# budgetUsdPerHour is twice the planned rent; scaling never exceeds it.\nbudgetUsdPerHour: {:.2}\n\
             promptTokensPerS: {prompts:.3}\nanswerTokensPerS: {answers:.3}\npools:\n",
            self.header,
            planned * BUDGET_TIMES
        );
        for pool in self.pools {
            let _ = writeln!(
                text,
                "  - {{name: {}, replicas: {}, min: 1, max: {}, usdPerHour: {}, prompts: {}, answers: {}}}",
                pool_name(self.parts, pool),
                pool.count,
                pool.count.saturating_mul(4),
                self.rent(pool),
                pool.duty != Duty::Decode,
                pool.duty != Duty::Prefill
            );
        }
        text
    }

    fn scaled_objects(&self) -> String {
        let object = |pool: &PlannedPool| {
            let name = pool_name(self.parts, pool);
            let kind = if hosts_of_instance(pool) > 1 { GROUPS } else { "" };
            format!(
                "---\napiVersion: keda.sh/v1alpha1\nkind: ScaledObject\nmetadata:\n  name: mixfleet-{name}\nspec:\n  \
                 scaleTargetRef:\n{kind}    name: mixfleet-{name}\n  minReplicaCount: 1\n  maxReplicaCount: {}\n  triggers:\n    \
                 - type: external\n      metadata:\n        scalerAddress: mixfleet-epp:9004\n        pool: {name}\n",
                pool.count.saturating_mul(4)
            )
        };
        let objects: String = self.pools.iter().map(object).collect();
        format!("# {}\n# For clusters with KEDA. Schema not checked.\n{objects}", self.header)
    }

    /// A Deployment for each pool, whose pods are the InferencePool's, or a LeaderWorkerSet, whose leaders
    /// are.
    fn deployments(&self) -> Result<String, String> {
        let mut text = format!("# {}\n", self.header);
        let is_divided = self.pools.iter().any(|pool| pool.duty == Duty::Prefill);
        for pool in self.pools {
            if hosts_of_instance(pool) > 1 && pool.layout.experts == LayoutExperts::WithSequences {
                return Err(
                    "an instance divides sequences over several hosts, whose ranks vLLM joins by Ray".into(),
                );
            }
            let has_sidecar = is_divided && pool.duty != Duty::Prefill;
            text.push_str(&pods(
                self,
                pool,
                &PodSet {
                    kind: "Deployment",
                    name: &format!("mixfleet-{}", pool_name(self.parts, pool)),
                    spec: "",
                    labels: &self.told(pool),
                    port: if has_sidecar { BEHIND_SIDECAR } else { PORT },
                    beside: if has_sidecar { SIDECAR } else { "" },
                },
            )?);
        }
        Ok(text)
    }

    /// Labels that select the pods, and tell the picker what they are.
    fn told(&self, pool: &PlannedPool) -> Vec<(&'static str, String)> {
        let usd = json!(self.rent(pool).to_string()).to_string();
        let mut labels = vec![("app", "vllm".to_owned()), ("mixfleet.dev/usd-per-hour", usd)];
        let role = match pool.duty {
            Duty::Prefill => Some("prefill"),
            Duty::Decode => Some("decode"),
            _ => None,
        };
        labels.extend(role.map(|role| ("llm-d.ai/role", role.to_owned())));
        // as arguments of an engine, which are empty where its times are measured
        for word in self.known(pool).split(',') {
            let known = ["part", "shape", "stored", "tp"].into_iter().zip(LABELS);
            let Some((name, value)) = word.split_once('=') else { continue };
            let label = known.filter(|(of, _)| *of == name).map(|(_, label)| label);
            labels.extend(label.map(|label| (label, json!(value).to_string())));
        }
        labels
    }
}

const LABELS: [&str; 4] =
    ["mixfleet.dev/part", "mixfleet.dev/shape", "mixfleet.dev/stored", "mixfleet.dev/tp"];
