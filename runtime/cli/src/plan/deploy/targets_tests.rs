//! The files for other projects, as they stand in `tests/plans`, where `hwtests/deploy.sh` checks them.

use super::vllm::VllmFleet;
use mixfleet_hal::catalog;
use mixfleet_hal::units::UsdPerHour;
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::models;
use mixfleet_scheduler::plan::layouts::InstanceLayout;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans")
}

/// Compares files with those of a folder, or writes them there.
fn compare(name: &str, files: Vec<super::StartFile>) {
    let is_written = std::env::var_os("MIXFLEET_WRITE_PLANS").is_some();
    for (file, text) in files {
        let path = folder().join(name).join(file);
        let text = text.unwrap_or_else(|why| panic!("{name}: no {file}: {why}"));
        if is_written {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
        } else {
            let known = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(known == text, "{} differs; MIXFLEET_WRITE_PLANS=1 writes it", path.display());
        }
    }
}

/// What is made of a fleet of these pools: part, devices of an instance, duty, instances.
fn with_fleet(pools: &[(usize, u32, Duty, u32)], of: impl Fn(&VllmFleet<'_>)) {
    let offer = |name: &str, usd: f64| OfferedPart::new(catalog::part(name).unwrap(), UsdPerHour(usd));
    let parts = [offer("H100-SXM-80GB", 2.5), offer("L4", 0.5), offer("L40S", 1.2)];
    let pool = |&(part, devices, duty, count): &(usize, u32, Duty, u32)| PlannedPool {
        part,
        layout: InstanceLayout::of(devices),
        attends: None,
        spare: None,
        duty,
        count,
    };
    let pools: Vec<PlannedPool> = pools.iter().map(pool).collect();
    of(&VllmFleet {
        parts: &parts,
        pools: &pools,
        model: models::find("llama-3.1-8b").unwrap(),
        stored: StoredAs::Plain(DType::Bf16),
        header: "planned by mixfleet plan".into(),
        gateway: ["--ttft-slo", "1", "--tbt-slo", "0.05"].map(String::from).to_vec(),
        objectives: [1.0, 0.05],
        tokens_per_s: [18_000.0, 900.0],
    });
}

#[test]
fn a_divided_fleet_is_written_for_each_project() {
    with_fleet(&[(0, 1, Duty::Prefill, 2), (2, 2, Duty::Decode, 3)], |fleet| {
        compare("llmd", fleet.llmd_files());
        compare("dynamo", fleet.dynamo_files());
        compare("kserve", fleet.kserve_files());
    });
}

#[test]
fn a_fleet_of_whole_pools_is_written_for_each_project() {
    with_fleet(&[(0, 1, Duty::Whole, 2), (1, 1, Duty::Whole, 4)], |fleet| {
        compare("llmd-whole", fleet.llmd_files());
        compare("dynamo-whole", fleet.dynamo_files());
        compare("kserve-whole", fleet.kserve_files());
    });
}

#[test]
fn instances_that_span_hosts_are_groups_of_pods() {
    let two_hosts = InstanceLayout { stages: 2, ..InstanceLayout::of(16) };
    with_fleet(&[(0, 16, Duty::Whole, 2)], |fleet| {
        let pools: Vec<PlannedPool> =
            fleet.pools.iter().map(|pool| PlannedPool { layout: two_hosts, ..pool.clone() }).collect();
        let fleet = VllmFleet { pools: &pools, header: fleet.header.clone(), gateway: Vec::new(), ..*fleet };
        let of = |name: &str| {
            let found = fleet.llmd_files().into_iter().find(|(file, _)| *file == name);
            found.expect("a file").1.unwrap_or_else(|why| panic!("{name}: {why}"))
        };
        let engines = of("engines.yaml");
        let (leader, worker) = engines.split_once("    workerTemplate:\n").expect("two templates");
        for (text, words) in [
            (
                leader,
                &["kind: LeaderWorkerSet\n", "  replicas: 2\n", "    size: 2\n", "        app: vllm\n"][..],
            ),
            (leader, &["- \"--node-rank\"\n              - \"0\"\n", "Schema not checked", "livenessProbe:"]),
            (worker, &["- \"--node-rank\"\n              - \"$(LWS_WORKER_INDEX)\"\n", "- \"--headless\"\n"]),
            (leader, &["nvidia.com/gpu: \"8\"\n", "- \"$(LWS_LEADER_ADDRESS)\"\n"]),
            (worker, &["nvidia.com/gpu: \"8\"\n", "- \"$(LWS_LEADER_ADDRESS)\"\n"]),
        ] {
            words.iter().for_each(|word| assert!(text.contains(word), "no {word} in {text}"));
        }
        assert!(!leader.contains("--headless"), "{leader}");
        // the pool's selector finds leaders alone, which have the API
        assert!(!worker.contains("app: vllm") && !worker.contains("Probe"), "{worker}");
        assert!(of("scaled-objects.yaml").contains("    kind: LeaderWorkerSet\n    name: mixfleet-auto-"));
        for files in [fleet.dynamo_files(), fleet.kserve_files()] {
            let why = files.into_iter().find_map(|(_, text)| text.err()).expect("no one's files");
            assert!(why.contains("several hosts"), "{why}");
        }
    });
}

#[test]
fn what_kserve_cannot_have_is_explained() {
    with_fleet(&[(0, 1, Duty::Prefill, 2), (1, 1, Duty::Decode, 3), (2, 1, Duty::Decode, 3)], |fleet| {
        let why = fleet.kserve_files().remove(0).1.unwrap_err();
        assert!(why.contains("--for llmd"), "{why}");
    });
}

#[test]
fn tight_memory_is_used_to_a_larger_share() {
    with_fleet(&[(0, 2, Duty::Whole, 1)], |fleet| {
        let model = models::find("llama-3.1-70b").unwrap();
        let fleet = VllmFleet { model, header: String::new(), gateway: Vec::new(), ..*fleet };
        let lines = fleet.lines();
        assert!(lines.contains("--gpu-memory-utilization 0.95 --max-model-len 20480"), "{lines}");
    });
    with_fleet(&[(0, 1, Duty::Whole, 1)], |fleet| {
        assert!(!fleet.lines().contains("--gpu-memory-utilization"));
        let model = models::find("llama-3.1-70b").unwrap();
        let fleet = VllmFleet { model, header: String::new(), gateway: Vec::new(), ..*fleet };
        assert!(fleet.compose().is_err_and(|cause| cause.contains("no room for KV")));
    });
}
