use super::super::testing::{MemoryDevice, ReadFiles, fixtures_named, golden, ids, scratch};
use super::super::{Checkpoint, Oracle};
use super::*;
use mixfleet_hal::{Device, HostMemory, Slice};
use mixfleet_scheduler::layers::Weight;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const GPT_OSS: &str = "gpt-oss-mxfp4";
const FIXTURES: [&str; 5] =
    ["llama-fp8-block", "llama-w4a16-ct", "llama-awq", "llama-gptq", "llama-nvfp4-ct"];

fn open(directory: &Path) -> Checkpoint {
    Checkpoint::open(directory, &ReadFiles).unwrap()
}

#[test]
fn the_oracle_follows_the_golden_tokens_of_each_format() {
    for fixture in fixtures_named(&[&FIXTURES[..], &[GPT_OSS]].concat()) {
        let checkpoint = open(&fixture);
        let (oracle, vocab) = (Oracle::new(&checkpoint), checkpoint.config.vocab as usize);
        for case in golden(&fixture)["cases"].as_array().expect("cases") {
            let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
            let sequence = [prompt.clone(), greedy.clone()].concat();
            let logits = oracle.logits(&sequence[..sequence.len() - 1]);
            for (at, &token) in greedy.iter().enumerate() {
                let row = &logits[(prompt.len() - 1 + at) * vocab..][..vocab];
                let best = (0..vocab).max_by(|a, b| row[*a].total_cmp(&row[*b])).expect("a token");
                assert_eq!(best, token as usize, "{} token {at}", fixture.display());
            }
        }
    }
}

/// Codes are used where they are stored, if the order matches; nothing is dequantised.
#[test]
fn a_device_that_imports_allocates_little_beside_the_file() {
    for fixture in fixtures_named(&FIXTURES) {
        let checkpoint = open(&fixture);
        let device = MemoryDevice::new(true, 1);
        checkpoint.place(&device, &mut |_, _| {}).unwrap();
        let allocated: u64 = device.allocations.lock().unwrap().iter().sum();
        let stored = std::fs::metadata(fixture.join("model.safetensors")).unwrap().len();
        let transposed = fixture.ends_with("llama-awq") || fixture.ends_with("llama-gptq");
        assert_eq!(allocated * 10 > stored, transposed, "{}: {allocated} of {stored}", fixture.display());
        // the file's own quantised tensors, in another order and with zero points as numbers
        assert!(allocated < stored, "{}: {allocated} of {stored}", fixture.display());
        let whole = MemoryDevice::new(false, 64);
        checkpoint.place(&whole, &mut |_, _| {}).unwrap();
        let all: u64 = whole.allocations.lock().unwrap().iter().sum();
        assert_eq!(all, checkpoint.size_bytes());
        assert!(all as f64 <= 1.1 * stored as f64, "{}: {all} of {stored}", fixture.display());
    }
}

#[test]
fn what_is_missing_or_of_another_shape_is_named() {
    let without = |fixture: &Path, tensor: &str| {
        let directory: PathBuf = scratch("schemes-damaged").to_path_buf();
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::copy(fixture.join("config.json"), directory.join("config.json")).unwrap();
        let mut bytes = std::fs::read(fixture.join("model.safetensors")).unwrap();
        // a name of the same length that no reader looks up
        let (quoted, other) = (format!("\"{tensor}\""), format!("\"{}\"", "x".repeat(tensor.len())));
        let at = bytes.windows(quoted.len()).position(|window| window == quoted.as_bytes()).expect(tensor);
        bytes[at..at + quoted.len()].copy_from_slice(other.as_bytes());
        std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
        let error = Checkpoint::open(&directory, &ReadFiles).unwrap_err().to_string();
        std::fs::remove_dir_all(&directory).unwrap();
        error
    };
    let needed = [
        ("llama-fp8-block", vec!["weight_scale_inv"]),
        ("llama-w4a16-ct", vec!["weight_packed", "weight_scale", "weight_zero_point"]),
        ("llama-awq", vec!["qweight", "qzeros", "scales"]),
        ("llama-gptq", vec!["qweight", "qzeros", "scales"]),
        ("llama-nvfp4-ct", vec!["weight_packed", "weight_scale", "weight_global_scale"]),
        (GPT_OSS, vec!["down_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"]),
    ];
    for (name, tensors) in needed {
        let module = format!("model.layers.0.mlp.{}", if name == GPT_OSS { "experts" } else { "up_proj" });
        for fixture in fixtures_named(&[name]) {
            for tensor in &tensors {
                let name = format!("{module}.{tensor}");
                let error = without(&fixture, &name);
                assert!(
                    error.contains(&format!("{module}.{tensor}'")) && error.contains("missing"),
                    "{error}"
                );
            }
        }
    }
}

/// GPTQ with `desc_act` assigns inputs to groups in another order, regardless of the configuration.
#[test]
fn inputs_in_another_order_than_their_groups_are_refused_by_the_tensor() {
    for fixture in fixtures_named(&["llama-gptq"]) {
        let directory = scratch("schemes-order");
        std::fs::copy(fixture.join("config.json"), directory.join("config.json")).unwrap();
        let good = std::fs::read(fixture.join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        let entries: serde_json::Value = serde_json::from_slice(&good[8..header]).unwrap();
        for module in ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"] {
            let tensor = format!("{module}.g_idx");
            let start = header + entries[&tensor]["data_offsets"][0].as_u64().unwrap() as usize;
            let mut bytes = good.clone();
            // the last input of the first group and the first one of the second, with 64 in a group
            (0..4).for_each(|byte| bytes.swap(start + 4 * 63 + byte, start + 4 * 64 + byte));
            std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
            let error = Checkpoint::open(&directory, &ReadFiles).unwrap_err().to_string();
            assert!(error.contains(&format!("'{tensor}'")) && error.contains("desc_act"), "{error}");
        }
        std::fs::write(directory.join("model.safetensors"), &good).unwrap();
        open(&directory);
    }
}

/// Codes of experts are used in place; only scales and biases are converted.
#[test]
fn experts_in_mxfp4_take_little_beside_the_file_and_their_shares_are_disjoint() {
    for fixture in fixtures_named(&[GPT_OSS]) {
        let checkpoint = open(&fixture);
        let device = MemoryDevice::new(true, 1);
        checkpoint.place(&device, &mut |_, _| {}).unwrap();
        let allocated: u64 = device.allocations.lock().unwrap().iter().sum();
        let stored = std::fs::metadata(fixture.join("model.safetensors")).unwrap().len();
        assert!(allocated * 10 < stored, "{allocated} of {stored}");
        let weights = |share| {
            let device = MemoryDevice::new(false, 64);
            let placed = checkpoint.place_share(&device, share, &mut |_, _| {}).unwrap().unwrap();
            [Weight::ExpertGate, Weight::ExpertDown].map(|weight| {
                let matrix = placed.get(1, weight).unwrap();
                let arrays: Vec<Vec<f64>> = matrix.arrays().map(|array| words(&device, array)).collect();
                arrays.into_iter().next().unwrap()
            })
        };
        let shares = checkpoint.config.divided(2).unwrap();
        let [first, second] = [0, 1].map(|at| weights(&shares.shares()[at]));
        let all = |name: &str| checkpoint.made[name].array(0, &checkpoint.shards).unwrap().to_vec();
        let [gate_up, down] =
            ["gate_up_proj", "down_proj"].map(|m| all(&format!("model.layers.1.mlp.experts.{m}")));
        // 8 experts with 64 inner elements of 64: rows of 32 bytes, of which a member has 64 per expert
        let halves = gate_up.chunks(128 * 32).map(|expert| expert.split_at(64 * 32));
        let [one, other]: [Vec<u8>; 2] = [
            halves.clone().flat_map(|h| h.0.to_vec()).collect(),
            halves.flat_map(|h| h.1.to_vec()).collect(),
        ];
        assert_eq!((as_words(&one), as_words(&other)), (first[0].clone(), second[0].clone()));
        let rows = down.chunks(32).map(|row| row.split_at(16));
        let [one, other]: [Vec<u8>; 2] =
            [rows.clone().flat_map(|h| h.0.to_vec()).collect(), rows.flat_map(|h| h.1.to_vec()).collect()];
        assert_eq!((as_words(&one), as_words(&other)), (first[1].clone(), second[1].clone()));
    }
}

fn as_words(bytes: &[u8]) -> Vec<f64> {
    DType::U32.decode(bytes)
}

fn words(device: &MemoryDevice, slice: &Slice) -> Vec<f64> {
    let mut bytes = vec![0; slice.bytes as usize];
    device.read(slice, &mut bytes).unwrap();
    as_words(&bytes)
}

/// Experts that were not quantised are stored with inputs as rows.
#[test]
fn plain_experts_are_transposed() {
    let (experts, rows, columns) = (2u32, 6u32, 4u32);
    let value = |expert: u32, row: u32, column: u32| f64::from(expert * 100 + row * 10 + column);
    let mut bytes = Vec::new();
    for expert in 0..experts {
        for column in 0..columns {
            (0..rows).for_each(|row| DType::F32.encode(value(expert, row, column), &mut bytes));
        }
    }
    let range = 0..bytes.len();
    let shards: Vec<Arc<dyn HostMemory>> = vec![Arc::new(bytes)];
    let stored = FoundTensor {
        source: SourceTensor { shard: 0, range },
        dtype: "F32".to_owned(),
        shape: vec![2, 4, 6],
        bytes: shards[0].as_bytes(),
    };
    let find = |name: &str| (name == "m.experts.down_proj").then(|| stored.clone());
    let made = fused_experts(None, "m.experts.down_proj", (experts, experts * rows, columns), &find).unwrap();
    let expected =
        (0..experts).flat_map(|e| (0..rows).flat_map(move |r| (0..columns).map(move |c| value(e, r, c))));
    assert_eq!(made.values(&shards).unwrap(), expected.collect::<Vec<f64>>());
    let (tensor, problem) =
        fused_experts(Some(&Scheme::Nvfp4), "m.experts.down_proj", (2, 12, 4), &find).unwrap_err();
    assert!(tensor.ends_with("down_proj") && problem.contains("supported: mxfp4"), "{problem}");
}
