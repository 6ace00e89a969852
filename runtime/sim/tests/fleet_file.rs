//! Profiles of serving engines as directories, generated here and measured elsewhere.

use mixfleet_scheduler::cost::{CostModel, Prefill};
use mixfleet_sim::engine_profile::{EngineProfile, TableDirectory};
use mixfleet_sim::fleet_file::{FleetFile, FleetFileError};
use std::path::{Path, PathBuf};

/// A profile measured with vLLM on one RTX 4090, by the format's authors.
const MEASURED: &str = "../../../shared/data/measured/rtx4090-llama-3.1-8b";

fn fleet(directory: &Path, keys: &str) -> Result<FleetFile, FleetFileError> {
    let model =
        "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\nprofile = \"engine\"\n";
    let none = |path: &Path| Err(format!("{} is not asked for", path.display()));
    FleetFile::parse(&format!("{model}{keys}"), directory, &none)
}

/// A directory of tables that follow a law: a step of `rows` takes 1 ms + 10 us per row, attention 1 us per
/// 1000 pairs or keys of one layer.
fn made(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let engine = directory.join("engine");
    if directory.exists() {
        std::fs::remove_dir_all(&directory).unwrap();
    }
    std::fs::create_dir_all(&engine).unwrap();
    let mut dense = String::from("layer,tokens,time_us\n");
    for rows in [1, 64, 512] {
        let us = 1000 + 10 * rows;
        // There are 32 layers with two norms each.
        dense += &format!("embedding,{rows},{}\n", us / 2);
        dense += &format!("layernorm,{rows},{}\n", f64::from(us) / 2.0 / 32.0 / 4.0);
        dense += &format!("qkv_proj,{rows},{}\n", f64::from(us) / 2.0 / 32.0 / 2.0);
    }
    std::fs::write(engine.join("dense.csv"), dense).unwrap();
    std::fs::write(
        engine.join("per_sequence.csv"),
        "layer,sequences,time_us\nlm_head,1,100\nlm_head,64,100\n",
    )
    .unwrap();
    let mut attention = String::from("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n");
    for chunk in [0, 16, 512] {
        for context in [0, 1000, 4000] {
            for (sequences, keys) in [(0, 0), (1, 16), (1, 4096), (8, 16), (8, 4096)] {
                let absent = chunk == 0 && (context > 0 || sequences == 0);
                if !absent {
                    let us = f64::from(chunk * context + sequences * keys) / 1000.0 + 1.0;
                    attention += &format!("{chunk},{context},{sequences},{keys},{us}\n");
                }
            }
        }
    }
    std::fs::write(engine.join("attention.csv"), attention).unwrap();
    directory
}

fn ms(cost: &CostModel, parts: &[(u32, u32)], batch: u32, kv_tokens: u64) -> f64 {
    let part = |&(context, tokens)| Prefill { context, tokens, last: true };
    let parts: Vec<Prefill> = parts.iter().map(part).collect();
    cost.step_s(&parts, batch, kv_tokens).0 * 1e3
}

#[test]
fn tables_are_read_as_they_are_meant() {
    let fleet = fleet(&made("law"), "cache_tokens = 9000").unwrap();
    let cost = &fleet.pools[0].cost;
    let close = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
    let layers = 32.0 * 1e-3;
    close(ms(cost, &[], 4, 4 * 1000), 1.04 + 0.1 + layers * 5.0);
    close(ms(cost, &[(1000, 256)], 0, 0), 1.0 + 2.56 + 0.1 + layers * 257.0);
    close(ms(cost, &[(1000, 256)], 4, 4 * 1000), 1.0 + 2.6 + 0.1 + layers * 261.0);
    // A second chunk adds its work and no kernel.
    close(ms(cost, &[(1000, 256), (500, 64)], 0, 0), 1.0 + 3.2 + 0.1 + layers * 289.0);
}

#[test]
fn a_directory_that_lacks_something_is_refused_with_the_reason() {
    let error = |name: &str, change: &dyn Fn(&Path)| {
        let directory = made(name);
        change(&directory.join("engine"));
        fleet(&directory, "cache_tokens = 9000").unwrap_err().to_string()
    };
    let edit = |engine: &Path, file: &str, from: &str, to: &str| {
        let text = std::fs::read_to_string(engine.join(file)).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(engine.join(file), text.replace(from, to)).unwrap();
    };
    let gone = error("gone", &|engine| std::fs::remove_file(engine.join("per_sequence.csv")).unwrap());
    assert!(gone.contains("pool 'a': profile") && gone.contains("per_sequence.csv"), "{gone}");
    let column = error("column", &|engine| edit(engine, "dense.csv", "time_us", "time_ms"));
    assert!(column.contains("dense.csv") && column.contains("time_us"), "{column}");
    let negative =
        error("negative", &|engine| edit(engine, "dense.csv", "embedding,1,505", "embedding,1,-505"));
    assert!(negative.contains("time -505"), "{negative}");
    let hole = error("hole", &|engine| edit(engine, "attention.csv", "16,1000,1,16,", "16,1001,1,16,"));
    assert!(hole.contains("attention lacks prefill_chunk 16"), "{hole}");
    let scattered = error("scattered", &|engine| {
        let rows: String = (1..3000).map(|at| format!("16,{at},{at},{at},5\n")).collect();
        let text = std::fs::read_to_string(engine.join("attention.csv")).unwrap();
        std::fs::write(engine.join("attention.csv"), text + &rows).unwrap();
    });
    assert!(scattered.contains("should be a grid"), "{scattered}");
    let meta =
        |text: &'static str| move |engine: &Path| std::fs::write(engine.join("meta.json"), text).unwrap();
    let other = error("other", &meta(r#"{"model": "Qwen/Qwen3-8B"}"#));
    assert!(other.contains("of the model Qwen/Qwen3-8B, and the fleet serves llama-3.1-8b"), "{other}");
    let cut = error("cut", &meta(r#"{"engine_kwargs": {"tensor_parallel_size": 2}}"#));
    assert!(cut.contains("devices_per_instance: is 1, and the profile was measured with 2"), "{cut}");
}

#[test]
fn meta_yaml_tells_the_engine_and_a_run_goes_before() {
    let directory = made("meta");
    let engine = directory.join("engine");
    let yaml = "vllm_version: 0.28.0\ngpu: NVIDIA L4\nmodel: meta-llama/Llama-3.1-8B\nprofiled_at: '2026-09-04'\n\
                tp_degrees: [1, 2]\nengine_effective:\n  tensor_parallel_size: 1\n  block_size: 32\n  \
                max_num_batched_tokens: 4096\n  max_num_seqs: 128\n  hf_overrides:\n    num_hidden_layers: 1\n";
    std::fs::write(engine.join("meta.yaml"), yaml).unwrap();
    let keys = "cache_tokens = 9000";
    let read = fleet(&directory, keys).unwrap();
    let pool = &read.pools[0];
    let limits = (pool.engine.max_batched_tokens, pool.engine.max_sequences, read.kv.block_tokens);
    assert_eq!((limits, pool.device.as_deref()), ((4096, 128, 32), Some("L4")));
    std::fs::write(engine.join("meta.json"), r#"{"engine_kwargs": {"max_num_seqs": 16}}"#).unwrap();
    let run = fleet(&directory, keys).unwrap();
    assert_eq!((run.pools[0].engine.max_sequences, run.pools[0].engine.max_batched_tokens), (16, 4096));
    let profile = EngineProfile::read_directory(&TableDirectory::find(&engine, 1)).unwrap();
    assert_eq!(
        (profile.engine.as_str(), profile.provenance.measured_at.as_str()),
        ("vllm/0.28.0", "2026-09-04")
    );

    // As a document it gives the same fleet, under either key.
    let text = serde_json::to_string(&profile).unwrap();
    assert_eq!(EngineProfile::from_json(&text), Ok(Some(profile.clone())));
    std::fs::write(directory.join("engine.json"), &text).unwrap();
    let model =
        "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\ncache_tokens = 9000\n";
    let none = |path: &Path| Err(format!("{} is not asked for", path.display()));
    for key in ["device", "profile"] {
        let text = format!("{model}{key} = \"engine.json\"\n");
        let same = FleetFile::parse(&text, &directory, &none).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(same.pools[0].cost, run.pools[0].cost);
        assert_eq!(same.pools[0].engine, run.pools[0].engine);
    }
    let both = format!("{model}device = \"engine.json\"\nprofile = \"engine\"\n");
    let error = FleetFile::parse(&both, &directory, &none).unwrap_err().to_string();
    assert!(error.contains("pool 'a': profile") && error.contains("give one of them"), "{error}");
    let mut slow = profile;
    slow.attention[0].seconds.0 = -1.0;
    let error = EngineProfile::from_json(&serde_json::to_string(&slow).unwrap()).unwrap_err();
    assert!(error.contains("times are positive"), "{error}");
    let broken = text.replacen("\"devices\":1", "\"device_count\":1", 1);
    assert!(EngineProfile::from_json(&broken).unwrap_err().contains("missing field `devices`"));
}

/// The schema of `docs/schema`, which `MIXFLEET_WRITE_SCHEMA=1` writes anew.
#[test]
fn the_published_schema_of_engine_profiles_is_that_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema/engine-profile-1.json");
    let want = EngineProfile::json_schema();
    if std::env::var_os("MIXFLEET_WRITE_SCHEMA").is_some() {
        std::fs::write(&path, format!("{want:#}\n")).unwrap();
    }
    let published: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap_or_default()).unwrap_or_default();
    assert!(
        published == want,
        "write docs/schema/engine-profile-1.json anew with MIXFLEET_WRITE_SCHEMA=1 cargo test -p mixfleet-sim --test \
         all the_published_schema"
    );
}

#[test]
fn newer_tables_say_the_same_in_other_words() {
    let older = made("older");
    let newer = made("newer");
    let engine = newer.join("engine/tp1");
    std::fs::create_dir_all(&engine).unwrap();
    for file in ["dense.csv", "per_sequence.csv"] {
        std::fs::rename(newer.join("engine").join(file), engine.join(file)).unwrap();
    }
    let mut attention =
        String::from("layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us\n");
    for chunk in [0, 16, 512] {
        for key in [16, 256, 512, 1024, 2048, 4256] {
            for (sequences, keys) in [(0, 0), (1, 16), (1, 4096), (8, 16), (8, 4096)] {
                let context = key - chunk / 2;
                let key = if chunk == 0 { 0 } else { key };
                if context >= 0 && (chunk > 0 || sequences > 0) {
                    let us = f64::from(chunk * context + sequences * keys) / 1000.0 + 1.0;
                    attention += &format!("attention,{chunk},{key}.0,{sequences},{keys},1,{us}\n");
                    attention += &format!("attention,{chunk},{key}.0,{sequences},{keys},4,{}\n", 9.0 * us);
                    attention += &format!("indexer,{chunk},{key}.0,{sequences},{keys},1,{}\n", 9.0 * us);
                }
            }
        }
    }
    std::fs::write(engine.join("attention.csv"), attention).unwrap();
    let cost = |directory: &Path| fleet(directory, "cache_tokens = 9000").unwrap().pools[0].cost.clone();
    let (older, same) = (cost(&older), cost(&newer));
    let same_answer = |parts: &[(u32, u32)], batch, kv_tokens| {
        let ratio = ms(&same, parts, batch, kv_tokens) / ms(&older, parts, batch, kv_tokens);
        assert!((ratio - 1.0).abs() < 1e-3, "{parts:?} {batch} {kv_tokens}: {ratio}");
    };
    same_answer(&[], 4, 4000);
    same_answer(&[(1000, 256)], 0, 0);
    same_answer(&[(300, 500)], 3, 2000);
    same_answer(&[(0, 512)], 8, 8 * 1500);
    std::fs::write(engine.join("moe.csv"), "").unwrap();
    let experts = fleet(&newer, "").unwrap_err().to_string();
    assert!(experts.contains("moe.csv"), "{experts}");
}

#[test]
fn a_hole_in_the_measurements_goes_on_straight() {
    let directory = made("straight");
    let file = directory.join("engine/attention.csv");
    let text = std::fs::read_to_string(&file).unwrap();
    // 64 sequences only fit with little context; the two smaller batches extrapolate.
    std::fs::write(&file, format!("{text}0,0,64,16,2.024\n")).unwrap();
    let fleet = fleet(&directory, "cache_tokens = 9000").unwrap();
    let got = ms(&fleet.pools[0].cost, &[], 64, 64 * 4096);
    let want = 1.64 + 0.1 + 0.032 * (64.0 * 4.096 + 1.0);
    assert!((got / want - 1.0).abs() < 1e-3, "{got} {want}");
}

#[test]
fn the_measured_engine_is_read_with_all_it_says() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(MEASURED);
    if !directory.exists() {
        eprintln!("SKIPPED: {MEASURED} is absent; it belongs beside the repository");
        return;
    }
    let text = format!(
        "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"a\"\nprofile = {:?}\n",
        directory.display().to_string()
    );
    let fleet = FleetFile::parse(&text, Path::new(""), &|_| Err("not asked for".into())).unwrap();
    let pool = &fleet.pools[0];
    assert_eq!((fleet.kv.block_tokens, pool.cache_tokens), (16, 2588 * 16));
    assert_eq!((pool.engine.max_batched_tokens, pool.engine.max_sequences), (2048, 256));
    assert_eq!(pool.device.as_deref(), Some("RTX-4090"));
    // These are measured rows, one per kind: 32 layers of attention and of dense operations.
    let sum =
        |layers: &[f64], once: &[f64]| (32.0 * layers.iter().sum::<f64>() + once.iter().sum::<f64>()) * 1e-3;
    let dense_1 = [2.592, 126.766, 247.292, 2.0 * 1.85083, 38.1313, 54.898, 2.17567];
    let dense_2048 = [168.943, 1459.55, 2896.81, 2.0 * 28.4845, 419.483, 631.069, 26.228];
    let head_1 = [1096.93, 25.001];
    let step = sum(&dense_1, &head_1) + sum(&[14.1853], &[2.837, 1.94167]);
    assert!((ms(&pool.cost, &[], 1, 1024) / step - 1.0).abs() < 1e-6);
    let chunk = sum(&dense_2048, &head_1) + sum(&[566.486], &[10.346, 26.6973]);
    assert!((ms(&pool.cost, &[(1024, 2048)], 0, 0) / chunk - 1.0).abs() < 1e-6);
}
