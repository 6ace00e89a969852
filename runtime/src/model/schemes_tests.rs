use super::super::testing::{MemoryDevice, ReadFiles, fixtures_named, golden, ids, scratch};
use super::super::{Checkpoint, Oracle};
use std::path::{Path, PathBuf};

const FIXTURES: [&str; 5] =
    ["llama-fp8-block", "llama-w4a16-ct", "llama-awq", "llama-gptq", "llama-nvfp4-ct"];

fn open(directory: &Path) -> Checkpoint {
    Checkpoint::open(directory, &ReadFiles).unwrap()
}

#[test]
fn the_oracle_follows_the_golden_tokens_of_each_format() {
    for fixture in fixtures_named(&FIXTURES) {
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

/// Codes are used where they are stored, if they are stored in that order; nothing is dequantised.
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
        // a name of the same length that nobody asks for
        let (quoted, other) = (format!("\"{tensor}\""), format!("\"{}\"", "x".repeat(tensor.len())));
        let at = bytes.windows(quoted.len()).position(|window| window == quoted.as_bytes()).expect(tensor);
        bytes[at..at + quoted.len()].copy_from_slice(other.as_bytes());
        std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
        let error = Checkpoint::open(&directory, &ReadFiles).unwrap_err().to_string();
        std::fs::remove_dir_all(&directory).unwrap();
        error
    };
    let module = "model.layers.0.mlp.up_proj";
    let needed = [
        ("llama-fp8-block", vec!["weight_scale_inv"]),
        ("llama-w4a16-ct", vec!["weight_packed", "weight_scale", "weight_zero_point"]),
        ("llama-awq", vec!["qweight", "qzeros", "scales"]),
        ("llama-gptq", vec!["qweight", "qzeros", "scales"]),
        ("llama-nvfp4-ct", vec!["weight_packed", "weight_scale", "weight_global_scale"]),
    ];
    for (name, tensors) in needed {
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
