use super::super::random::RandomCheckpoint;
use super::super::testing::{MemoryDevice, ReadFiles, fixtures, scratch};
use super::super::variants::{styled_variants, tiny_variants};
use super::super::weights::{Tensor, Weights};
use super::*;
use mixfleet_hal::Device;
use mixfleet_hal::random::Stream;
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_scheduler::cost::{Experts, LatentAttention};
use mixfleet_scheduler::layers::Weight;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

#[path = "load_whole_tests.rs"]
mod whole;

fn variant(name: &str) -> RandomCheckpoint {
    tiny_variants().into_iter().find(|(other, _)| *other == name).expect("a variant").1
}

/// The error of loading a checkpoint to which `damage` was done after it was written.
fn error_after(name: &str, shards: usize, damage: impl FnOnce(&Path)) -> String {
    let directory = scratch(&format!("load-{name}"));
    variant("llama2").write(&directory, shards).expect("a checkpoint");
    Checkpoint::open(&directory, &ReadFiles).expect("good before the damage");
    damage(&directory);
    Checkpoint::open(&directory, &ReadFiles).expect_err("damaged").to_string()
}

/// Rewrites the header of a safetensors file, and leaves the data unchanged.
fn edit_header(file: &Path, edit: impl FnOnce(&mut Map<String, Value>)) {
    let bytes = std::fs::read(file).expect("a file");
    let end = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..end]).expect("a header");
    edit(&mut header);
    write_parts(file, Value::Object(header).to_string().as_bytes(), &bytes[end..]);
}

fn write_parts(file: &Path, header: &[u8], data: &[u8]) {
    let bytes = [&(header.len() as u64).to_le_bytes(), header, data].concat();
    std::fs::write(file, bytes).expect("a file");
}

fn assert_says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "'{word}' is not in: {error}");
    }
}

#[test]
fn every_variant_survives_the_disk() {
    for (i, (name, random)) in tiny_variants().into_iter().chain(styled_variants()).enumerate() {
        let directory = scratch(&format!("load-variant-{name}"));
        random.write(&directory, 1 + i % 3).expect("written");
        let loaded = Checkpoint::open(&directory, &ReadFiles).expect(name);
        let made = random.load().expect(name);
        assert_eq!(loaded.config, made.config, "{name}");
        assert_eq!(loaded.directory(), made.directory(), "{name}");
        for (tensor, ..) in made.directory() {
            assert_eq!(loaded.bytes(tensor), made.bytes(tensor), "{name} {tensor}");
        }
        assert!(made.config.rope.inv_freq.iter().all(|f| f.is_finite()), "{name}");
    }
}

#[test]
fn damage_is_blamed_on_the_file_and_the_tensor() {
    let single = |dir: &Path| dir.join("model.safetensors");
    let error = error_after("truncated", 1, |dir| {
        let bytes = std::fs::read(single(dir)).expect("a file");
        std::fs::write(single(dir), &bytes[..bytes.len() - 10]).expect("a file");
    });
    assert_says(&error, &["model.safetensors", "tensor '", "truncated?"]);
    let error = error_after("shard-truncated", 3, |dir| {
        std::fs::write(dir.join("model-00002-of-00003.safetensors"), [1, 2, 3]).expect("a file");
    });
    assert_says(&error, &["model-00002-of-00003.safetensors", "3 bytes", "truncated?"]);
    let error = error_after("shard-missing", 3, |dir| {
        std::fs::remove_file(dir.join("model-00003-of-00003.safetensors")).expect("a file");
    });
    assert_says(&error, &["model-00003-of-00003.safetensors"]);
    let error = error_after("absent", 1, |dir| std::fs::remove_file(single(dir)).expect("a file"));
    assert_says(&error, &["model.safetensors", "model.safetensors.index.json"]);
    let error = error_after("header-long", 1, |dir| {
        std::fs::write(single(dir), [0xFF; 64]).expect("a file");
    });
    assert_says(&error, &["header of 18446744073709551615 bytes", "not safetensors?"]);
    let error = error_after("renamed", 1, |dir| {
        edit_header(&single(dir), |header| {
            let entry = header.remove("model.norm.weight").expect("there");
            header.insert("model.nrom.weight".into(), entry);
        });
    });
    assert_says(&error, &["tensor 'model.norm.weight'", "missing", "[48]"]);
    let error = error_after("shape", 1, |dir| {
        edit_header(&single(dir), |h| h["model.layers.1.mlp.up_proj.weight"]["shape"] = json!([48, 80]));
    });
    assert_says(
        &error,
        &["model.safetensors", "'model.layers.1.mlp.up_proj.weight'", "[48, 80]", "[80, 48]"],
    );
    let error = error_after("size", 1, |dir| {
        edit_header(&single(dir), |h| h["lm_head.weight"]["shape"] = json!([261, 49]));
    });
    assert_says(&error, &["'lm_head.weight'", "expected", "[261, 49]"]);

    let error = error_after("product", 1, |dir| {
        edit_header(&single(dir), |h| h["lm_head.weight"]["shape"] = json!([1u64 << 63, 1u64 << 63]));
    });
    assert_says(&error, &["'lm_head.weight'", "more than 2^64"]);

    let error = error_after("dtype", 1, |dir| {
        edit_header(&single(dir), |h| h["lm_head.weight"]["dtype"] = json!("F8_E4M3"));
    });
    assert_says(&error, &["'lm_head.weight'", "F8_E4M3", "supported: F32, BF16, F16"]);

    let error = error_after("backwards", 1, |dir| {
        edit_header(&single(dir), |h| h["lm_head.weight"]["data_offsets"] = json!([8, 4]));
    });
    assert_says(&error, &["'lm_head.weight'", "8..4"]);

    let error = error_after("overlap", 1, |dir| {
        edit_header(&single(dir), |h| {
            h["model.norm.weight"]["data_offsets"] =
                h["model.layers.1.input_layernorm.weight"]["data_offsets"].clone();
        });
    });
    assert_says(&error, &["model.safetensors", "norm.weight'", "overlaps another tensor"]);

    let error = error_after("tail", 1, |dir| {
        let bytes = [std::fs::read(single(dir)).expect("a file"), vec![0; 5]].concat();
        std::fs::write(single(dir), bytes).expect("a file");
    });
    assert_says(&error, &["5 bytes after the last tensor"]);
}

#[test]
fn a_tensor_that_stands_twice_is_refused() {
    let error = error_after("twice", 1, |dir| {
        let entry = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
        let header = format!(r#"{{"a":{entry},"a":{entry}}}"#);
        write_parts(&dir.join("model.safetensors"), header.as_bytes(), &[]);
    });
    assert_says(&error, &["tensor 'a'", "twice"]);

    let error = error_after("two-shards", 2, |dir| {
        let first = dir.join("model-00001-of-00002.safetensors");
        std::fs::copy(first, dir.join("model-00002-of-00002.safetensors")).expect("a copy");
        let index = json!({"weight_map": {
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
            "model.layers.0.input_layernorm.weight": "model-00002-of-00002.safetensors"}});
        std::fs::write(dir.join(INDEX), index.to_string()).expect("a file");
    });
    assert_says(&error, &["model-00002-of-00002.safetensors", "also in", "model-00001-of-00002.safetensors"]);
}

#[test]
fn a_wrong_index_is_refused() {
    let with = |name: &str, index: Value| {
        error_after(name, 2, |dir| std::fs::write(dir.join(INDEX), index.to_string()).expect("a file"))
    };
    assert_says(&with("index-empty", json!({})), &[INDEX, "weight_map", "missing"]);
    let file = "model-00001-of-00002.safetensors";
    let ghost = json!({"weight_map": {"lm_head.weight": file, "model.norm.weight": file}});
    assert_says(&with("index-ghost", ghost), &[file, INDEX, "missing, though"]);
    assert_says(
        &with("index-path", json!({"weight_map": {"a": "../x"}})),
        &[INDEX, "'a'", "../x", "file name"],
    );
    assert_says(&with("index-type", json!({"weight_map": {"a": 7}})), &[INDEX, "'a'", "file name"]);
}

fn read(device: &dyn Device, tensor: &Tensor) -> Vec<f64> {
    let mut bytes = vec![0; tensor.slice.bytes as usize];
    device.read(&tensor.slice, &mut bytes).expect("read");
    tensor.dtype.decode(&bytes)
}

#[expect(clippy::too_many_lines, reason = "one weight after the other")]
fn assert_placed(checkpoint: &Checkpoint, device: &dyn Device) -> Weights {
    let mut seen = Vec::new();
    let weights = checkpoint.place(device, &mut |done, total| seen.push((done, total))).expect("placed");
    // sinks are placed with attention
    let sinks = checkpoint.config.sinks.as_ref().map_or(0, |sinks| sinks.len() as u64);
    let all = match checkpoint.config.latent {
        None => checkpoint.size_bytes() - sinks * checkpoint.config.dtype.size_bytes(),
        // up-projections are split when they are placed
        Some(_) => seen.last().expect("a step").1,
    };
    assert!(seen.is_sorted() && seen.last() == Some(&(all, all)), "{seen:?}");
    let same = |tensor: &Tensor, name: &str| {
        assert!(tensor.slice.offset.is_multiple_of(device.limits().alignment_bytes), "{name}");
        assert_eq!(read(device, tensor), checkpoint.values(name).expect(name), "{name}");
    };
    let of_model = |weight| weights.get(0, weight).expect("placed");
    same(of_model(Weight::Embedding), "model.embed_tokens.weight");
    same(of_model(Weight::LastNorm), "model.norm.weight");
    let head = if checkpoint.config.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    same(of_model(Weight::LmHead), head);
    for i in 0..weights.layers() {
        let optional = |weight: Weight, there: bool, name: &str| {
            let tensor = weights.get(i, weight);
            assert_eq!(tensor.is_some(), there, "{name}");
            tensor.iter().for_each(|tensor| same(tensor, &format!("model.layers.{i}.{name}")));
        };
        let part = |weight, name: &str| optional(weight, true, name);
        let c = &checkpoint.config;
        for norm in [Weight::AttnNorm, Weight::AttnPostNorm, Weight::MlpNorm, Weight::MlpPostNorm] {
            let name = c.layout.norms.name(norm);
            optional(norm, name.is_some(), name.unwrap_or("(no norm)"));
        }
        match &c.latent {
            None => {
                part(Weight::Q, "self_attn.q_proj.weight");
                part(Weight::K, "self_attn.k_proj.weight");
                part(Weight::V, "self_attn.v_proj.weight");
            }
            Some(latent) => {
                let has_down = latent.lengths.q_rank > 0;
                optional(Weight::QDown, has_down, "self_attn.q_a_proj.weight");
                optional(Weight::QDownNorm, has_down, "self_attn.q_a_layernorm.weight");
                part(
                    Weight::Q,
                    &format!("self_attn.{}.weight", if has_down { "q_b_proj" } else { "q_proj" }),
                );
                part(Weight::KvDown, "self_attn.kv_a_proj_with_mqa.weight");
                part(Weight::KvNorm, "self_attn.kv_a_layernorm.weight");
            }
        }
        part(Weight::O, "self_attn.o_proj.weight");
        optional(Weight::QBias, c.qkv_bias, "self_attn.q_proj.bias");
        optional(Weight::KBias, c.qkv_bias, "self_attn.k_proj.bias");
        optional(Weight::VBias, c.qkv_bias, "self_attn.v_proj.bias");
        optional(Weight::OBias, c.o_bias, "self_attn.o_proj.bias");
        optional(Weight::QNorm, c.qk_norm, "self_attn.q_norm.weight");
        optional(Weight::KNorm, c.qk_norm, "self_attn.k_norm.weight");
        let mlp = |there: bool, stem: &str| {
            optional(Weight::Gate, there, &format!("{stem}.gate_proj.weight"));
            optional(Weight::Up, there, &format!("{stem}.up_proj.weight"));
            optional(Weight::Down, there, &format!("{stem}.down_proj.weight"));
            optional(Weight::GateBias, there && c.mlp_bias, &format!("{stem}.gate_proj.bias"));
            optional(Weight::UpBias, there && c.mlp_bias, &format!("{stem}.up_proj.bias"));
            optional(Weight::DownBias, there && c.mlp_bias, &format!("{stem}.down_proj.bias"));
        };
        let Some(experts) = c.experts_of(i) else {
            mlp(true, "mlp");
            continue;
        };
        mlp(experts.shared > 0, experts.names.shared());
        optional(Weight::Correction, experts.correction, experts.names.correction());
        optional(Weight::SharedGate, experts.shared_gate, "mlp.shared_expert_gate.weight");
        part(Weight::Router, &format!("{}.weight", experts.names.router()));
        optional(Weight::RouterBias, experts.clamped.is_some(), "mlp.router.bias");
        if experts.clamped.is_some() {
            part(Weight::ExpertGate, "mlp.experts.gate_up_proj");
            part(Weight::ExpertDown, "mlp.experts.down_proj");
            part(Weight::ExpertGateBias, "mlp.experts.gate_up_proj_bias");
            part(Weight::ExpertDownBias, "mlp.experts.down_proj_bias");
            continue;
        }
        let matrices = [Weight::ExpertGate, Weight::ExpertUp, Weight::ExpertDown];
        for (weight, matrix) in matrices.into_iter().zip(experts.names.matrices()) {
            let tensor = weights.get(i, weight).expect("placed");
            let each = (0..experts.routing.experts).flat_map(|expert| {
                let name = format!("model.layers.{i}.{}.{expert}.{matrix}.weight", experts.names.experts());
                checkpoint.values(&name).expect("an expert")
            });
            assert_eq!(read(device, tensor), each.collect::<Vec<f64>>(), "{matrix}");
        }
    }
    weights
}

#[test]
fn placed_weights_are_the_stored_ones_however_they_get_there() {
    for (name, random) in tiny_variants().into_iter().chain(styled_variants()) {
        let directory = scratch(&format!("place-{name}"));
        random.write(&directory, 2).expect("written");
        for checkpoint in [Checkpoint::open(&directory, &ReadFiles).expect(name), random.load().expect(name)]
        {
            for device in
                [MemoryDevice::new(true, 1), MemoryDevice::new(true, 64), MemoryDevice::new(false, 64)]
            {
                assert_placed(&checkpoint, &device);
            }
        }
    }
}

#[test]
fn a_device_that_imports_copies_nothing_and_shares_tied_embeddings() {
    let checkpoint = variant("qwen2").load().expect("a checkpoint");
    let device = MemoryDevice::new(true, 64);
    let weights = assert_placed(&checkpoint, &device);
    assert!(device.allocations.lock().expect("a lock").is_empty());
    let [embed, head] = [Weight::Embedding, Weight::LmHead].map(|of| weights.get(0, of).expect("placed"));
    assert!(Arc::ptr_eq(&embed.slice.buffer, &head.slice.buffer));
}

#[test]
fn what_repeats_is_copied_by_the_device_and_rows_and_matrices_differ() {
    let device = ReferenceDevice::named("reference");
    for (name, random) in tiny_variants() {
        let checkpoint = random.repeating_every(3 * 256).expect(name);
        assert_eq!(checkpoint.size_bytes(), random.load().expect(name).size_bytes());
        let held: usize = checkpoint.shards.iter().map(|shard| shard.as_bytes().len()).sum();
        assert!((held as u64) < checkpoint.size_bytes() / 4, "{name}: {held} bytes");
        assert_placed(&checkpoint, &device);
    }
    let checkpoint = variant("llama3").repeating_every(67 * 256).expect("a checkpoint");
    let (q, k) = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight");
    let [q, k] = [q, k].map(|name| checkpoint.values(name).expect(name));
    let hidden = checkpoint.config.hidden as usize;
    let rows: HashSet<String> =
        q.chunks(hidden).chain(k.chunks(hidden)).map(|row| format!("{row:?}")).collect();
    assert_eq!(rows.len(), (q.len() + k.len()) / hidden);
}

#[test]
fn known_models_get_their_shapes_unless_they_are_of_another_kind() {
    for model in mixfleet_scheduler::models::models() {
        match RandomCheckpoint::of_shape(model) {
            Ok(random) => {
                let config = random.model_config().expect(model.name);
                assert_eq!(config.cost_shape(DType::Bf16, DType::Bf16, 16), model.shape(DType::Bf16));
            }
            Err(error) => {
                assert!(model.windows.is_some() || !model.is_plain(), "{error}");
                assert_says(&error.to_string(), &[model.name, "not supported"]);
            }
        }
    }
}

#[test]
fn odd_headers_are_loaded_by_copy() {
    let directory = scratch("load-odd");
    variant("llama3").write(&directory, 1).expect("a checkpoint");
    let file = directory.join("model.safetensors");
    let bytes = std::fs::read(&file).expect("a file");
    let end = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
    let padding = if end.is_multiple_of(2) { " " } else { "  " };
    write_parts(&file, &[&bytes[8..end], padding.as_bytes()].concat(), &bytes[end..]);
    let checkpoint = Checkpoint::open(&directory, &ReadFiles).expect("the format allows it");
    let device = MemoryDevice::new(true, 1);
    assert_placed(&checkpoint, &device);
    assert_eq!(device.allocations.lock().expect("a lock").len(), checkpoint.directory().len());
}

#[test]
fn a_bias_takes_the_dtype_of_its_matrix() {
    let random = variant("qwen2");
    let mut tensors = random.tensors().expect("tensors");
    let mut biases = 0;
    for tensor in tensors.iter_mut().filter(|tensor| tensor.name.ends_with(".bias")) {
        let values = tensor.dtype.decode(&tensor.bytes);
        (tensor.dtype, tensor.bytes) = (DType::F32, Vec::new());
        values.iter().for_each(|value| DType::F32.encode(*value, &mut tensor.bytes));
        biases += 1;
    }
    let checkpoint =
        Checkpoint::from_parts(random.model_config().expect("a config"), tensors).expect("a checkpoint");
    let device = MemoryDevice::new(true, 64);
    let weights = assert_placed(&checkpoint, &device);
    assert_eq!(device.allocations.lock().expect("a lock").len(), biases);
    let bias = |layer| weights.get(layer, Weight::QBias);
    assert!((0..weights.layers()).all(|layer| bias(layer).is_some_and(|bias| bias.dtype == DType::Bf16)));
}

#[test]
fn parts_that_do_not_fit_the_config_are_refused() {
    let random = variant("llama2");
    let config = random.model_config().expect("a config");
    let mut parts = random.tensors().expect("tensors");
    parts[0].bytes.pop();
    let error = Checkpoint::from_parts(config.clone(), parts.clone()).expect_err("too short").to_string();
    assert_says(&error, &["model.embed_tokens.weight", "expected"]);
    parts.remove(0);
    let error = Checkpoint::from_parts(config, parts).expect_err("missing").to_string();
    assert_says(&error, &["model.embed_tokens.weight", "missing"]);
}

/// Truncates one file of a checkpoint or flips bits in it, `count` times over; loading (including tokenizer
/// and template) must end in a value or an error. Returns the number of errors.
fn errors_after_random_damage(source: &Path, name: &str, count: u64) -> u64 {
    let directory = scratch(name);
    let mut files: Vec<PathBuf> = std::fs::read_dir(source)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|file| !file.ends_with("golden.json"))
        .collect();
    files.sort();
    let originals: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).expect("a file")).collect();
    let targets: Vec<PathBuf> =
        files.iter().map(|file| directory.join(file.file_name().expect("a name"))).collect();
    for (target, bytes) in targets.iter().zip(&originals) {
        std::fs::write(target, bytes).expect("a file");
    }
    let mut random = Stream::new(20_261_120);
    let mut errors = 0;
    for _ in 0..count {
        let victim = random.below(files.len() as u64) as usize;
        let mut bytes = originals[victim].clone();
        if random.below(2) == 0 {
            bytes.truncate(random.below(bytes.len() as u64) as usize);
        } else {
            for _ in 0..=random.below(8) {
                // Mostly in the header: in the data every bit pattern is a number.
                let reach = if random.below(4) == 0 { bytes.len() } else { bytes.len().min(4096) };
                bytes[random.below(reach as u64) as usize] ^= 1 << random.below(8);
            }
        }
        std::fs::write(&targets[victim], &bytes).expect("a file");
        let loaded = Checkpoint::open(&directory, &ReadFiles);
        let tokenizer = super::super::Tokenizer::open(&directory);
        let template = super::super::ChatTemplate::open(&directory);
        errors += u64::from(loaded.is_err() || tokenizer.is_err() || template.is_err());
        if let Ok(checkpoint) = loaded {
            assert_eq!(checkpoint.directory().len(), names::shapes(&checkpoint.config).len());
            assert!(checkpoint.directory().iter().all(|(name, ..)| checkpoint.bytes(name).is_some()));
            let device = MemoryDevice::new(true, 4);
            checkpoint.place(&device, &mut |_, _| {}).expect("what loads can be placed");
        }
        std::fs::write(&targets[victim], &originals[victim]).expect("a file");
    }
    errors
}

#[test]
fn random_damage_gives_errors_and_no_panic() {
    for (name, shards) in [("llama3", 1), ("qwen3", 3)] {
        let source = scratch(&format!("damage-source-{name}"));
        variant(name).write(&source, shards).expect("a checkpoint");
        let errors = errors_after_random_damage(&source, &format!("damage-{name}"), 200);
        assert!(errors > 100, "{name}: only {errors} of 200 were noticed");
    }
}

#[test]
fn random_damage_of_the_fixtures_gives_errors_and_no_panic() {
    for fixture in fixtures() {
        let name = fixture.file_name().expect("a name").to_string_lossy();
        let errors = errors_after_random_damage(&fixture, &format!("damage-{name}"), 200);
        assert!(errors > 60, "{name}: only {errors} of 200 were noticed");
    }
}

/// Elements `[rows][columns]` of a matrix of a checkpoint.
fn part_of(checkpoint: &Checkpoint, name: &str, rows: Range<u32>, columns: Option<Range<u32>>) -> Vec<f64> {
    let values = checkpoint.values(name).expect(name);
    let width = values.len() / checkpoint.tensors[name].shape[0] as usize;
    let columns = columns.map_or(0..width, |c| c.start as usize..c.end as usize);
    (rows.start as usize..rows.end as usize)
        .flat_map(|row| values[row * width..][columns.clone()].to_vec())
        .collect()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one weight after the other")]
fn a_member_gets_its_share_of_the_weights_and_no_more() {
    for (name, random) in tiny_variants() {
        let checkpoint = random.load().expect(name);
        let c = &checkpoint.config;
        let (hidden, d) = (c.hidden, c.head_dim);
        for members in [2, 3] {
            for share in c.divided(members).expect(name).shares() {
                let wide = |range: &Range<u32>| range.start * d..range.end * d;
                let (q, kv) = (wide(&share.heads), wide(&share.kv_heads));
                let (copying, importing) = (MemoryDevice::new(false, 64), MemoryDevice::new(true, 1));
                for device in [&copying, &importing] {
                    let mut seen = Vec::new();
                    let weights =
                        checkpoint.place_share(device, share, &mut |done, all| seen.push((done, all)));
                    let weights = weights.expect("placed").expect("weights");
                    assert!(seen.is_sorted() && seen.last().is_some_and(|(done, all)| done == all), "{name}");
                    let placed = |weight| weights.get(1, weight).expect("placed");
                    let same = |weight: Weight, part: &str, rows: Range<u32>, columns| {
                        let part = format!("model.layers.1.{part}");
                        let expected = part_of(&checkpoint, &part, rows, columns);
                        assert_eq!(read(device, placed(weight)), expected, "{name} {part}");
                    };
                    match &c.latent {
                        None => {
                            same(Weight::Q, "self_attn.q_proj.weight", q.clone(), None);
                            same(Weight::K, "self_attn.k_proj.weight", kv.clone(), None);
                            same(Weight::V, "self_attn.v_proj.weight", kv.clone(), None);
                            same(Weight::O, "self_attn.o_proj.weight", 0..hidden, Some(q.clone()));
                        }
                        Some(latent) => {
                            let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = latent.lengths;
                            let of = |each: u32| share.heads.start * each..share.heads.end * each;
                            let queries = if q_rank > 0 { "q_b_proj" } else { "q_proj" };
                            same(Weight::Q, &format!("self_attn.{queries}.weight"), of(nope + rope), None);
                            same(Weight::O, "self_attn.o_proj.weight", 0..hidden, Some(of(v)));
                            let down = "self_attn.kv_a_proj_with_mqa.weight";
                            same(Weight::KvDown, down, 0..kv_rank + rope, None);
                            let up = "model.layers.1.self_attn.kv_b_proj.weight";
                            let [lift, lower] = latent.apart(&part_of(&checkpoint, up, of(nope + v), None));
                            assert_eq!(read(device, placed(Weight::Lift)), lift, "{name}");
                            assert_eq!(read(device, placed(Weight::Lower)), lower, "{name}");
                        }
                    }
                    let is_there = |weight| weights.get(1, weight).is_some();
                    if c.qkv_bias {
                        same(Weight::QBias, "self_attn.q_proj.bias", q.clone(), None);
                        same(Weight::VBias, "self_attn.v_proj.bias", kv.clone(), None);
                    }
                    let once = c.o_bias && share.is_first();
                    assert_eq!(is_there(Weight::OBias), once, "{name}: added once");
                    let head = if c.tied_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
                    let rows = part_of(&checkpoint, head, share.vocab.clone(), None);
                    assert_eq!(read(device, placed(Weight::LmHead)), rows, "{name}");
                    let Some(experts) = c.experts_of(1) else {
                        same(Weight::Gate, "mlp.gate_proj.weight", share.inner.clone(), None);
                        same(Weight::Up, "mlp.up_proj.weight", share.inner.clone(), None);
                        same(Weight::Down, "mlp.down_proj.weight", 0..hidden, Some(share.inner.clone()));
                        let once = c.mlp_bias && share.is_first();
                        assert_eq!(is_there(Weight::DownBias), once, "{name}: added once");
                        if c.mlp_bias {
                            same(Weight::UpBias, "mlp.up_proj.bias", share.inner.clone(), None);
                        }
                        continue;
                    };
                    let inner = Experts::share(experts.intermediate, &share.inner, c.intermediate);
                    let [gate, up, down] = experts.names.matrices();
                    if experts.clamped.is_some() {
                        let stem = "model.layers.1.mlp.experts";
                        let both = 2 * experts.intermediate;
                        let of = |expert: u32| {
                            let rows = expert * both + 2 * inner.start..expert * both + 2 * inner.end;
                            part_of(&checkpoint, &format!("{stem}.gate_up_proj"), rows, None)
                        };
                        let all: Vec<f64> = (0..experts.routing.experts).flat_map(of).collect();
                        assert_eq!(read(device, placed(Weight::ExpertGate)), all, "{name}");
                        let rows = 0..experts.routing.experts * hidden;
                        same(Weight::ExpertDown, "mlp.experts.down_proj", rows, Some(inner.clone()));
                        let (rows, columns) = (0..experts.routing.experts, 2 * inner.start..2 * inner.end);
                        let bias = "mlp.experts.gate_up_proj_bias";
                        same(Weight::ExpertGateBias, bias, rows, Some(columns));
                        assert_eq!(is_there(Weight::ExpertDownBias), share.is_first(), "{name}: added once");
                        continue;
                    }
                    for (weight, matrix, rows, columns) in [
                        (Weight::ExpertGate, gate, inner.clone(), None),
                        (Weight::ExpertUp, up, inner.clone(), None),
                        (Weight::ExpertDown, down, 0..hidden, Some(inner.clone())),
                    ] {
                        let stem = format!("model.layers.1.{}", experts.names.experts());
                        let of = |expert| {
                            let one = format!("{stem}.{expert}.{matrix}.weight");
                            part_of(&checkpoint, &one, rows.clone(), columns.clone())
                        };
                        let all: Vec<f64> = (0..experts.routing.experts).flat_map(of).collect();
                        assert_eq!(read(device, placed(weight)), all, "{name} {matrix}");
                    }
                }
                if c.experts.is_some() {
                    continue; // experts are copied on every device
                }
                let allocated =
                    |device: &MemoryDevice| device.allocations.lock().expect("a lock").iter().sum::<u64>();
                let of = |rows: usize, columns: u32| rows as u64 * u64::from(columns);
                let (heads, kv_heads, inner) = (share.heads.len(), share.kv_heads.len(), share.inner.len());
                let back = of(heads, d * hidden) + of(inner, hidden);
                let layer =
                    back + of(heads, d * hidden) + 2 * of(kv_heads, d * hidden) + 2 * of(inner, hidden);
                let vectors = allocated(&copying) / c.dtype.size_bytes()
                    - u64::from(c.layers) * layer
                    - of(c.vocab as usize, hidden)
                    - of(share.vocab.len(), hidden);
                // the rest are norms and biases
                let longest = u64::from(hidden + c.intermediate + c.heads * d);
                assert!(
                    vectors <= u64::from(c.layers + 1) * 4 * longest,
                    "{name}: {vectors} elements too many"
                );
                // a mapping is used in place, except for columns
                assert_eq!(
                    allocated(&importing),
                    u64::from(c.layers) * back * c.dtype.size_bytes(),
                    "{name}"
                );
            }
        }
    }
}
