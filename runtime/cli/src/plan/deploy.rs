//! A planned fleet as files that start it, for mixfleet's engine and for vLLM: commands, Compose, Kubernetes.

mod instances;
mod own;
#[cfg(test)]
mod rows_tests;
#[cfg(test)]
mod targets_tests;
mod vllm;

use super::args::DeployTarget;
use super::render::Planned;
use crate::screen::word;
use mixfleet_planner::found::ProvenFleet;
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::engines;
use own::OwnFleet;
use std::fmt::Write as _;
use std::path::Path;
use vllm::VllmFleet;

/// A file's name, and what stands in it or why it is not written.
type StartFile = (&'static str, Result<String, String>);

/// Writes the files that start `fleet` into `directory`, and returns a description, or why there are none.
pub(super) fn write(planned: &Planned<'_>, fleet: &ProvenFleet, directory: &Path) -> std::io::Result<String> {
    let (header, router) = (header(planned, fleet), router_flags(planned, fleet));
    let files = match planned.args.engine.name {
        "vllm" => {
            let fleet = VllmFleet {
                parts: &planned.offers.parts,
                pools: &fleet.pools,
                model: planned.model,
                stored: fleet.stored,
                header,
                gateway: router,
                objectives: [planned.args.ttft, planned.args.tbt],
                tokens_per_s: planned.load.mean_tokens.map(|tokens| tokens * planned.load.rate),
            };
            match planned.args.target.unwrap_or(DeployTarget::Vllm) {
                DeployTarget::Dynamo => fleet.dynamo_files(),
                DeployTarget::Kserve => fleet.kserve_files(),
                DeployTarget::Llmd => fleet.llmd_files(),
                DeployTarget::Mixfleet | DeployTarget::Vllm => fleet.files(),
            }
        }
        engines::OURS => OwnFleet {
            parts: &planned.offers.parts,
            pools: &fleet.pools,
            shape: planned.model.shape_as(fleet.stored),
            tiers: &fleet.tiers,
            header,
            router,
        }
        .files(),
        other => {
            return Ok(format!(
                "no files that start it: they are written for mixfleet and vllm, not {other}"
            ));
        }
    };
    let (mut names, mut reasons) = (Vec::new(), String::new());
    for (name, text) in files {
        match text {
            Ok(text) => {
                write_whole(&directory.join(name), text.as_bytes())?;
                names.push(name);
            }
            Err(why) => {
                let _ = write!(reasons, "; no {name}: {why}");
            }
        }
    }
    let names = if names.is_empty() { "no files that start it".to_owned() } else { names.join(", ") };
    Ok(names + &reasons)
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
