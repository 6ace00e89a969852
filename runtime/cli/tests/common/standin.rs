//! Generated checkpoints that replace the fixtures if a clone has none beside it: of the same shapes, with
//! the outputs of the float64 forward pass as golden outputs. `runtime/tests/naive.rs` checks that pass
//! against another one.

use mixfleet_hal::DType;
use mixfleet_runtime::model::{Checkpoint, Oracle, RandomCheckpoint};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Tokens that a golden case answers with.
const TOKENS: usize = 48;

/// Prompts of the golden cases; a last one has 132 tokens, more than four KV blocks.
const PROMPTS: [&str; 5] = [
    "Each device sells something",
    "What a request costs depends on",
    "fn place(request: &Request) -> Pair {",
    "一个词元一个字节",
    " 42 café 🛰",
];

/// The id of the built-in tokenizer's first byte, after its special tokens.
const FIRST_BYTE: u32 = 5;

fn config(more: Value) -> Map<String, Value> {
    let mut config = json!({
        "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 261,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    });
    let config = config.as_object_mut().unwrap();
    config.extend(more.as_object().unwrap().clone());
    config.clone()
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| FIRST_BYTE + u32::from(byte)).collect()
}

/// The best token and how far its logit is above the next.
fn best(logits: &[f64]) -> (u32, f64) {
    let at = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
    let next = (0..logits.len()).filter(|i| *i != at).map(|i| logits[i]).fold(f64::NEG_INFINITY, f64::max);
    (at as u32, logits[at] - next)
}

fn case(oracle: &Oracle, text: &str) -> Value {
    let prompt = ids(text);
    let (mut sequence, mut margin_min) = (prompt.clone(), f64::INFINITY);
    let first = oracle.last_logits(&sequence);
    let mut last = first.clone();
    for _ in 0..TOKENS {
        let (token, margin) = best(&last);
        margin_min = margin_min.min(margin);
        sequence.push(token);
        last = oracle.last_logits(&sequence);
    }
    json!({"text": text, "prompt_ids": prompt, "greedy_ids": sequence[prompt.len()..], "min_margin": margin_min,
        "first_logits": first, "last_logits": last})
}

/// What the built-in chat template and tokenizer make of a conversation, by hand.
fn chat() -> Value {
    let (system, user) = ("Be brief.", "Where is my KV?");
    let tokens = [vec![4], ids(system), vec![1, 2], ids(user), vec![1, 3]].concat();
    json!({
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "rendered": format!("<|system|>{system}<|end|><|user|>{user}<|end|><|assistant|>"),
        "ids": tokens,
    })
}

fn write(directory: &Path, name: &str, dtype: DType, shards: usize, more: Value) {
    let directory = directory.join(name);
    std::fs::create_dir_all(&directory).unwrap();
    RandomCheckpoint { config: config(more), dtype, seed: 16 }.write(&directory, shards).unwrap();
    let oracle = Oracle::new(&Checkpoint::open(&directory, &mixfleet_cpu::host::Mapper).unwrap());
    let long = "All of the fleet is asked before a request is placed. ".repeat(3);
    let cases: Vec<Value> = PROMPTS.iter().chain([&&long[..132]]).map(|text| case(&oracle, text)).collect();
    let golden = json!({"cases": cases, "chat": chat()});
    std::fs::write(directory.join("golden.json"), golden.to_string()).unwrap();
}

/// A checkpoint whose configuration alone is there, since it is all that a refusal reads.
fn refused(directory: &Path, name: &str, more: Value) {
    std::fs::create_dir_all(directory.join(name)).unwrap();
    let config = Value::Object(config(more)).to_string();
    std::fs::write(directory.join(name).join("config.json"), config).unwrap();
}

/// The directory of the checkpoints that stand in. The tests of one build share it.
pub(super) fn directory() -> PathBuf {
    let built = std::env::current_exe().and_then(|file| file.metadata()?.modified()).unwrap();
    let age = built.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let root = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let directory = root.join(format!("stand-ins-{age}"));
    if directory.is_dir() {
        return directory;
    }
    let part = root.join(format!("stand-ins-{age}.{}", std::process::id()));
    let llama = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"});
    write(&part, "llama-gqa-f32", DType::F32, 1, llama.clone());
    let qwen3 = json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16",
        "tie_word_embeddings": true});
    write(&part, "qwen3-qknorm-tied-bf16", DType::Bf16, 2, qwen3);
    refused(&part, "deepseek-v3", json!({"model_type": "deepseek_v3"}));
    let mut quantised = llama;
    quantised["quantization_config"] = json!({"quant_method": "gptq", "bits": 4});
    refused(&part, "llama-gptq", quantised);
    // another process may have been quicker: what it wrote is the same
    if std::fs::rename(&part, &directory).is_err() {
        std::fs::remove_dir_all(&part).unwrap();
    }
    directory
}
