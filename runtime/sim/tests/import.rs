//! Published tables of kernel times as profiles.

#![allow(clippy::print_stdout)]

use crate::common::shared;
use mixfleet_hal::DType;
use mixfleet_hal::catalog;
use mixfleet_hal::profile::EvidenceBasis;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::models;
use mixfleet_sim::engine_profile::{EngineProfile, TableDirectory};
use mixfleet_sim::import::{KernelTables, TableChoice, TableOrigin, TableSet, device_profile, operations};

fn origin<'a>(set: &'a TableSet) -> TableOrigin<'a> {
    TableOrigin { device: &set.device, engine: &set.engine, source: "a test", rows: set.rows }
}

/// The bf16 rows of an H100 (vLLM's kernels, collected by ai-dynamo/aiconfigurator).
#[test]
fn a_part_is_imported_and_a_quarter_of_its_rows_predicted_from_the_others() {
    let mut points = Vec::new();
    let mut sets = Vec::new();
    for file in ["gemm", "decode_attention", "context_attention"] {
        let Some(path) = shared(&format!("measured/{file}.csv")) else { return };
        let choice =
            TableChoice { device: Some("h100_sxm"), dtype: Some(DType::Bf16), ..TableChoice::default() };
        let set = KernelTables::read(&path).unwrap().choose(choice).unwrap();
        points.extend(set.points.iter().cloned());
        sets.push(set);
    }
    let part = catalog::part("H100-SXM-80GB");
    let (profile, errors) = device_profile(points.clone(), origin(&sets[0]), part, None).unwrap();
    assert_eq!(profile.points, points, "all kinds were measured, so that nothing comes from the catalog");
    assert_eq!((errors.len(), profile.memory), (3, part.unwrap().memory_bytes()));
    for (held, evidence) in errors.iter().zip(&profile.provenance.evidence) {
        println!(
            "{}: {} of {} held out, MAPE {:.3}, bias {:+.3}",
            held.op, held.held_out, held.points, held.error, held.bias
        );
        assert!(held.held_out * 5 > held.points && held.held_out * 3 < held.points);
        assert!(held.error < 0.08, "{held:?}");
        assert_eq!((&evidence.basis, evidence.error), (&EvidenceBasis::Measured, Some(held.error)));
    }
    // Points of the table are in the profile exactly.
    assert_eq!(profile.time(&points[0].sig), points[0].time);
}

#[test]
fn kinds_without_rows_come_from_the_catalog_and_unknown_parts_need_their_memory() {
    let Some(path) = shared("measured/gemm.csv") else { return };
    let choice = TableChoice { device: Some("a100_sxm"), ..TableChoice::default() };
    let set = KernelTables::read(&path).unwrap().choose(choice).unwrap();
    let gemms = set.points.len();
    let part = catalog::part("A100-SXM-80GB");
    let (profile, errors) = device_profile(set.points.clone(), origin(&set), part, None).unwrap();
    assert_eq!(errors.len(), 1);
    let of = |name: &str| profile.points.iter().filter(|point| point.sig.name() == name).count();
    assert!(of("gemm") == gemms && of("attn_decode") > 0 && of("attn_prefill") > 0);
    assert!(profile.provenance.remarks[1].contains("attn_decode") && profile.provenance.evidence.len() > 2);

    let error = device_profile(set.points.clone(), origin(&set), None, None).unwrap_err();
    assert!(error.contains("'a100_sxm'") && error.contains("--part") && error.contains("--memory-gib"));
    let (unknown, _) = device_profile(set.points.clone(), origin(&set), None, Some(Bytes(8e10))).unwrap();
    assert_eq!((unknown.points.len(), unknown.memory), (gemms, Bytes(8e10)));
    // The best rates of the rows are the roofline, below which nothing is.
    assert!(set.points.iter().all(|point| point.time.0 >= 0.999 * unknown.roofline(&point.sig).0));
    let attention = set.points.into_iter().filter(|point| point.sig.name() != "gemm").collect();
    let origin = TableOrigin { device: "x", engine: "", source: "", rows: 0 };
    assert!(device_profile(attention, origin, None, Some(Bytes(1e9))).unwrap_err().contains("gemm"));
}

#[test]
fn an_engines_operations_are_those_of_its_model() {
    let Some(log) = shared("measured/rtx4090-llama-3.1-8b/requests.jsonl") else { return };
    let directory = TableDirectory::find(log.parent().unwrap(), 1);
    let profile = EngineProfile::read_directory(&directory).unwrap();
    assert_eq!((profile.engine.as_str(), profile.devices), ("vllm/0.19.0", 1));
    assert_eq!((profile.limits.cache_tokens, profile.limits.max_sequences), (Some(2588 * 16), Some(256)));
    let shape = models::find("llama-3.1-8b").unwrap().shape(DType::Bf16);
    let points = operations(&profile, &shape).unwrap();
    let count = |name: &str| points.iter().filter(|point| point.sig.name() == name).count();
    assert_eq!(count("gemm"), 4 * 152 + 40);
    assert!(count("attn_decode") > 50 && count("attn_prefill") > 50);
    // The smallest step reads 1.05 GB of the head's weights.
    let head = points.iter().filter(|point| point.sig.bytes() > 1.05e9).map(|point| point.time.0);
    assert!((head.fold(f64::INFINITY, f64::min) / 1.09693e-3 - 1.0).abs() < 1e-6);
    let other = models::find("llama-3.1-70b").unwrap().shape(DType::Bf16);
    let odd = EngineProfile { devices: 3, ..profile.clone() };
    assert!(operations(&odd, &other).unwrap_err().contains('3'));
    let nothing = EngineProfile {
        dense: [("moe".to_owned(), vec![(1, Seconds(1.0))])].into(),
        per_sequence: Default::default(),
        attention: Vec::new(),
        ..profile
    };
    assert!(operations(&nothing, &shape).unwrap_err().contains("qkv_proj"));
}
