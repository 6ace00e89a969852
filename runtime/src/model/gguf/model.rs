//! A GGUF file's configuration, as that of a checkpoint, and its tensors.

use super::super::config::ModelConfig;
use super::super::error::{Error, Result};
use super::super::load::{Checkpoint, Location};
use super::super::made::{MadeMatrix, MadePart, SourceTensor};
use super::super::names::{self, PlannedTensor};
use super::super::repack::{self, BlockPart, GgufBlock};
use super::file::{GgufFile, GgufTensor};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{CodeKind, DType, FileMapper, HostMemory, MatrixKind, Quantised, ScaleKind, ZeroKind};
use mixfleet_scheduler::layers::Weight;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];
/// Factors that divide the frequencies of rope (Llama 3).
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The configuration that a GGUF file describes.
///
/// # Errors
/// The error names the key that is missing or not supported.
pub(in super::super) fn config(gguf: &GgufFile, bytes: Option<&[u8]>) -> Result<ModelConfig> {
    let architecture = gguf.text("general.architecture")?.unwrap_or("(missing)");
    if !ARCHITECTURES.contains(&architecture) {
        let problem = format!("'{architecture}' is not supported; supported: {}", ARCHITECTURES.join(", "));
        return Err(gguf.error("general.architecture", problem));
    }
    let key = |name: &str| format!("{architecture}.{name}");
    let required = |name: &str| -> Result<u64> {
        let missing = || gguf.error(&key(name), "missing");
        gguf.number(&key(name))?.ok_or_else(missing)
    };
    for name in ["expert_count", "attention.sliding_window"] {
        if gguf.number(&key(name))?.is_some_and(|count| count > 0) {
            return Err(gguf.error(&key(name), "not supported in a GGUF file"));
        }
    }
    let heads = required("attention.head_count")?;
    let hidden = required("embedding_length")?;
    let head_dim = gguf.number(&key("attention.key_length"))?.unwrap_or(hidden / heads.max(1));
    for name in ["attention.value_length", "rope.dimension_count"] {
        if gguf.number(&key(name))?.is_some_and(|length| length != head_dim) {
            return Err(
                gguf.error(&key(name), format!("not supported unless it is the head's length, {head_dim}"))
            );
        }
    }
    let Some(embedding) = gguf.tensors.get("token_embd.weight") else {
        return Err(Error::tensor(&gguf.file, "token_embd.weight", "missing"));
    };
    let mut object: Map<String, Value> = Map::new();
    let mut put = |name: &str, value: Value| object.insert(name.to_owned(), value);
    put("model_type", architecture.into());
    put("hidden_size", hidden.into());
    put("intermediate_size", required("feed_forward_length")?.into());
    put("num_hidden_layers", required("block_count")?.into());
    put("num_attention_heads", heads.into());
    put("num_key_value_heads", gguf.number(&key("attention.head_count_kv"))?.unwrap_or(heads).into());
    put("head_dim", head_dim.into());
    put("vocab_size", embedding.rows.into());
    put("max_position_embeddings", required("context_length")?.into());
    let eps = gguf.float(&key("attention.layer_norm_rms_epsilon"))?;
    let eps = eps.ok_or_else(|| gguf.error(&key("attention.layer_norm_rms_epsilon"), "missing"))?;
    put("rms_norm_eps", json!(eps));
    put("tie_word_embeddings", (!gguf.tensors.contains_key("output.weight")).into());
    put("rope_theta", json!(gguf.float(&key("rope.freq_base"))?.unwrap_or(10_000.0)));
    put("dtype", "bfloat16".into());
    if let Some(scaling) = rope_scaling(gguf, &key)? {
        put("rope_scaling", scaling);
    }
    let ends = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].map(|name| gguf.token(name));
    let ends = ends.into_iter().collect::<Result<Vec<_>>>()?;
    let mut ends: Vec<u32> = ends.into_iter().flatten().collect();
    ends.dedup();
    put("eos_token_id", json!(ends));
    if let Some(bos) = gguf.token("tokenizer.ggml.bos_token_id")? {
        put("bos_token_id", bos.into());
    }
    let mut config = ModelConfig::parse(&gguf.file, &object)?;
    if let Some(factors) = gguf.tensors.get(ROPE_FACTORS) {
        let stored = bytes.and_then(|bytes| bytes.get(factors.range.clone()));
        divide_frequencies(gguf, &mut config, factors, stored)?;
    }
    let up = gguf.tensors.get("blk.0.ffn_up.weight");
    config.format = up.and_then(|tensor| kind_of(tensor.kind)).map(|(_, kind)| kind.format());
    Ok(config)
}

/// `rope_scaling` as `config.json` has it.
fn rope_scaling(gguf: &GgufFile, key: &impl Fn(&str) -> String) -> Result<Option<Value>> {
    let kind = gguf.text(&key("rope.scaling.type"))?.unwrap_or("none");
    let factor = gguf.float(&key("rope.scaling.factor"))?;
    match kind {
        "none" => Ok(None),
        "linear" | "yarn" => {
            let original = gguf.number(&key("rope.scaling.original_context_length"))?;
            Ok(Some(
                json!({"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}),
            ))
        }
        other => {
            let problem = format!("'{other}' is not supported; supported: none, linear, yarn");
            Err(gguf.error(&key("rope.scaling.type"), problem))
        }
    }
}

/// Divides the frequencies by a tensor of factors; without the file's bytes they stay as they are.
fn divide_frequencies(
    gguf: &GgufFile,
    config: &mut ModelConfig,
    factors: &GgufTensor,
    stored: Option<&[u8]>,
) -> Result<()> {
    let frequencies = &mut config.rope.inv_freq;
    if factors.kind != 0 || factors.rows != 1 || factors.columns != frequencies.len() as u64 {
        let problem = format!("expected {} factors in F32", frequencies.len());
        return Err(Error::tensor(&gguf.file, ROPE_FACTORS, problem));
    }
    for (frequency, factor) in frequencies.iter_mut().zip(DType::F32.decode(stored.unwrap_or_default())) {
        *frequency /= to_f32(factor);
        if !(frequency.is_finite() && *frequency > 0.0) {
            return Err(Error::tensor(&gguf.file, ROPE_FACTORS, format!("{factor} is no factor")));
        }
    }
    Ok(())
}

/// The dtype of plain types of ggml.
fn plain_of(kind: u32) -> Option<DType> {
    match kind {
        0 => Some(DType::F32),
        1 => Some(DType::F16),
        30 => Some(DType::Bf16),
        _ => None,
    }
}

/// The block and the description of quantised types of ggml.
fn kind_of(kind: u32) -> Option<(GgufBlock, Quantised)> {
    let of = Quantised::in_rows;
    match kind {
        2 => Some((GgufBlock::Q4_0, of(CodeKind::U4, 32, ScaleKind::F16, ZeroKind::Middle))),
        8 => Some((GgufBlock::Q8_0, of(CodeKind::I8, 32, ScaleKind::F16, ZeroKind::Middle))),
        12 => Some((GgufBlock::Q4K, of(CodeKind::U4, 32, ScaleKind::I8, ZeroKind::Minima))),
        13 => Some((GgufBlock::Q5K, of(CodeKind::U5, 32, ScaleKind::I8, ZeroKind::Minima))),
        14 => Some((GgufBlock::Q6K, of(CodeKind::U6, 16, ScaleKind::I8, ZeroKind::Middle))),
        _ => None,
    }
}

/// The name that a tensor of a checkpoint has in a GGUF file.
fn stored_name(tensor: &PlannedTensor) -> Option<String> {
    let module = match tensor.weight {
        Weight::Embedding => "token_embd",
        Weight::LastNorm => "output_norm",
        Weight::LmHead => "output",
        Weight::AttnNorm => "attn_norm",
        Weight::MlpNorm => "ffn_norm",
        Weight::Q | Weight::QBias => "attn_q",
        Weight::K | Weight::KBias => "attn_k",
        Weight::V | Weight::VBias => "attn_v",
        Weight::O | Weight::OBias => "attn_output",
        Weight::QNorm => "attn_q_norm",
        Weight::KNorm => "attn_k_norm",
        Weight::Gate | Weight::GateBias => "ffn_gate",
        Weight::Up | Weight::UpBias => "ffn_up",
        Weight::Down | Weight::DownBias => "ffn_down",
        _ => return None,
    };
    let end = if tensor.weight.is_bias() { "bias" } else { "weight" };
    Some(match tensor.layer {
        Some(layer) => format!("blk.{layer}.{module}.{end}"),
        None => format!("{module}.{end}"),
    })
}

/// Whether rows of a tensor of this architecture stand in the order of pairs that rope turns.
fn is_paired(architecture: &str, weight: Weight) -> bool {
    architecture == "llama" && matches!(weight, Weight::Q | Weight::K | Weight::QBias | Weight::KBias)
}

/// Opens a GGUF file as a checkpoint; its tensors stay where they are until they are placed.
///
/// # Errors
/// The error names the file and the key or tensor that is missing, damaged or not supported.
pub(in super::super) fn open(file: &Path, mapper: &dyn FileMapper) -> Result<Checkpoint> {
    let memory: Arc<dyn HostMemory> = mapper.map(file).map_err(|e| Error::read(file, e))?;
    let bytes = memory.as_bytes();
    let gguf = GgufFile::parse(file, bytes, bytes.len() as u64)?;
    let mut config = config(&gguf, Some(bytes))?;
    let architecture = config.family.clone();
    let (mut tensors, mut made) = (HashMap::new(), BTreeMap::new());
    let mut plain_bytes = HashMap::new();
    for planned in names::tensors(&config) {
        let (stored, weight) = (stored_name(&planned), planned.weight);
        let PlannedTensor { name, shape, .. } = planned;
        let wrong = |problem: String| Error::tensor(file, &name, problem);
        let stored = stored.and_then(|name| gguf.tensors.get(&name).map(|t| (name, t)));
        let Some((stored_name, tensor)) = stored else {
            return Err(wrong(format!("missing, expected {shape:?} for this {architecture}")));
        };
        let (rows, columns) = if let [rows, columns] = shape[..] { (rows, columns) } else { (1, shape[0]) };
        if (tensor.rows, tensor.columns) != (rows, columns) {
            let problem = format!("{} x {}, expected {shape:?}", tensor.rows, tensor.columns);
            return Err(Error::tensor(file, &stored_name, problem));
        }
        let paired = is_paired(&architecture, weight);
        match plain_of(tensor.kind) {
            Some(dtype) if !paired => {
                if shape.len() == 2 {
                    *plain_bytes.entry(dtype).or_insert(0) += tensor.range.len();
                }
                tensors.insert(name, Location { dtype, shape, shard: 0, range: tensor.range.clone() });
            }
            _ if shape.len() == 1 => {
                let problem = format!("type {} of ggml for a vector is not supported", tensor.kind);
                return Err(Error::tensor(file, &stored_name, problem));
            }
            _ => {
                let head_dim = paired.then_some(config.head_dim as usize);
                let matrix = made_matrix(tensor, head_dim);
                made.insert(name.clone(), matrix.map_err(|p| Error::tensor(file, &stored_name, p))?);
            }
        }
    }
    let most = plain_bytes.into_iter().max_by_key(|(dtype, bytes)| (*bytes, *dtype));
    config.dtype = most.map_or(DType::Bf16, |(dtype, _)| dtype);
    Ok(Checkpoint { config, shards: vec![memory], tensors, made })
}

/// A matrix of blocks or of elements, whose rows stand in the order of pairs in heads of this length, if so.
fn made_matrix(tensor: &GgufTensor, head_dim: Option<usize>) -> std::result::Result<MadeMatrix, String> {
    let (rows, columns) = (to_u32(tensor.rows), to_u32(tensor.columns));
    let source = SourceTensor { shard: 0, range: tensor.range.clone() };
    let order = move |row: usize| head_dim.map_or(row, |head_dim| repack::unpaired(row, head_dim));
    let size = (rows as usize, columns as usize);
    if let Some(dtype) = plain_of(tensor.kind) {
        let part = MadePart::made(&source, move |bytes| repack::reordered(bytes, size.0, order));
        return MadeMatrix::new(MatrixKind::Plain(dtype), (rows, columns), vec![part]);
    }
    let (block, kind) = kind_of(tensor.kind).ok_or_else(|| "it is not quantised".to_owned())?;
    let part = |name: &str| {
        let what = match name {
            "high" => BlockPart::High,
            "scales" => BlockPart::Scales,
            "zeros" => BlockPart::Zeros,
            "supers" => BlockPart::Supers,
            _ => BlockPart::Codes,
        };
        MadePart::made(&source, move |bytes| block.part(bytes, size, what, order))
    };
    let parts = kind.parts(1, rows, columns).iter().map(|array| part(array.name)).collect();
    MadeMatrix::new(MatrixKind::Quantised(kind), (rows, columns), parts)
}
