//! Planned instances of vLLM as services of KServe.

use super::{VllmFleet, image};
use crate::plan::deploy::StartFile;
use crate::plan::deploy::instances::{pool_name, quoted};
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::program::Duty;
use serde_json::json;
use std::fmt::Write as _;

impl VllmFleet<'_> {
    /// What starts it under KServe.
    pub(in crate::plan::deploy) fn kserve_files(&self) -> Vec<StartFile> {
        vec![("llm-inference-services.yaml", self.fault().and_then(|()| self.kserve()))]
    }

    /// A service for each pool that answers, with the pool that computes its prompts.
    fn kserve(&self) -> Result<String, String> {
        let prefill: Vec<&PlannedPool> =
            self.pools.iter().filter(|pool| pool.duty == Duty::Prefill).collect();
        let answering: Vec<&PlannedPool> =
            self.pools.iter().filter(|pool| pool.duty != Duty::Prefill).collect();
        if prefill.len() > 1 || (prefill.len() == 1 && answering.len() > 1) {
            return Err(
                "a service of KServe has one pool for prompts and one that answers; --for llmd has any"
                    .into(),
            );
        }
        let mut text = format!(
            "# {}\n# Schema not checked. The claim 'model' has the checkpoint. KServe's own scheduler picks among the pods of one \
             service,\n# and does not weigh dollars between services: --for llmd does.\n",
            self.header
        );
        for pool in answering {
            let _ = write!(
                text,
                "---\napiVersion: serving.kserve.io/v1alpha1\nkind: LLMInferenceService\nmetadata:\n  name: mixfleet-{}\n\
                 spec:\n  model:\n    uri: pvc://model\n    name: {}\n  router:\n    gateway: {{}}\n    route: {{}}\n    \
                 scheduler: {{}}\n{}",
                pool_name(self.parts, pool),
                json!(self.model.name),
                self.workload(pool, "  ")?
            );
            if let Some(prompts) = prefill.first() {
                let _ = write!(text, "  prefill:\n{}", self.workload(prompts, "    ")?);
            }
        }
        Ok(text)
    }

    /// Replicas, parallelism and pods of a pool.
    fn workload(&self, pool: &PlannedPool, indent: &str) -> Result<String, String> {
        let image = image(self.parts[pool.part].part.vendor)?;
        let layout = pool.layout;
        // the flags but for parallelism, which KServe writes, and the checkpoint, which it mounts
        let mut flags = self.flags(pool);
        for flag in ["--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"] {
            if let Some(at) = flags.iter().position(|word| word == flag) {
                flags.drain(at..at + 2);
            }
        }
        let is_expert = flags.iter().any(|word| word == "--enable-expert-parallel");
        flags.retain(|word| word != "--enable-expert-parallel");
        let by_data =
            !layout.is_by_columns() && self.flags(pool).iter().any(|word| word == "--data-parallel-size");
        let mut parallelism = format!("{}: {}", if by_data { "data" } else { "tensor" }, layout.per_stage());
        if layout.stages > 1 {
            let _ = write!(parallelism, ", pipeline: {}", layout.stages);
        }
        if is_expert {
            parallelism.push_str(", expert: true");
        }
        let words: Vec<String> = flags.iter().map(|word| quoted(word)).collect();
        let lines = [
            format!("replicas: {}", pool.count),
            format!("parallelism: {{{parallelism}}}"),
            "template:".into(),
            format!("  nodeSelector: {{mixfleet/part: {}}}", self.parts[pool.part].word()),
            "  containers:".into(),
            "    - name: main".into(),
            format!("      image: {}", image.name()),
            "      env:".into(),
            "        - name: VLLM_ADDITIONAL_ARGS".into(),
            format!("          value: {}", json!(words.join(" "))),
            "      resources:".into(),
            format!("        limits: {{{}: \"{}\"}}", image.resource, layout.devices),
        ];
        Ok(lines.map(|line| format!("{indent}{line}\n")).concat())
    }
}
