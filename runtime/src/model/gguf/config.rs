//! Converts the metadata of a GGUF file to the configuration of a checkpoint.

use super::super::config::ModelConfig;
use super::super::error::{Error, Result};
use super::file::{GgufFile, GgufTensor};
use super::kinds::GgmlKind;
use super::text;
use mixfleet_hal::DType;
use mixfleet_hal::cast::{to_f32, to_u32};
use serde_json::{Map, Value, json};

/// A supported architecture, and the corresponding `model_type`.
struct GgufArchitecture {
    name: &'static str,
    model_type: &'static str,
    /// The `model_type` for files with experts; none if the architecture never has any.
    with_experts: Option<&'static str>,
    /// Keys of [`UNSUPPORTED`] that are read for this architecture.
    reads: &'static [&'static str],
    /// Whether rope may rotate only a part of a head.
    partial_rope: bool,
    /// Other families whose files have this architecture.
    also: &'static [&'static str],
}

/// The architectures of the files of a family.
pub(in super::super) fn architectures_of(model_type: &str) -> Vec<&'static str> {
    let is_of = |architecture: &&GgufArchitecture| {
        let GgufArchitecture { model_type: own, with_experts, also, .. } = **architecture;
        own == model_type || with_experts == Some(model_type) || also.contains(&model_type)
    };
    ARCHITECTURES.iter().filter(is_of).map(|architecture| architecture.name).collect()
}

const ARCHITECTURES: [GgufArchitecture; 20] = [
    GgufArchitecture { with_experts: Some("mixtral"), also: &["mistral"], ..of("llama", "llama") },
    of("qwen2", "qwen2"),
    of("qwen3", "qwen3"),
    GgufArchitecture { with_experts: Some("qwen2_moe"), ..of("qwen2moe", "qwen2_moe") },
    GgufArchitecture { with_experts: Some("qwen3_moe"), ..of("qwen3moe", "qwen3_moe") },
    GgufArchitecture { reads: &[WINDOW], partial_rope: true, ..of("phi3", "phi3") },
    of("smollm3", "smollm3"),
    GgufArchitecture { reads: &GRANITE_SCALES, also: &["granitemoehybrid"], ..of("granite", "granite") },
    GgufArchitecture {
        with_experts: Some("granitemoeshared"),
        reads: &GRANITE_SCALES,
        also: &["granitemoe", "granitemoehybrid"],
        ..of("granitemoe", "granite")
    },
    GgufArchitecture {
        with_experts: Some("minimax_m2"),
        partial_rope: true,
        ..of("minimax-m2", "minimax_m2")
    },
    of("ernie4_5", "ernie4_5"),
    of("seed_oss", "seed_oss"),
    GgufArchitecture { reads: &[TEMPERATURE, YARN_LOG], ..of("mistral3", "ministral3") },
    // with windows it is OLMo 3
    GgufArchitecture { reads: &[WINDOW, PATTERN], also: &["olmo3"], ..of("olmo2", "olmo2") },
    GgufArchitecture { with_experts: Some("olmoe"), ..of("olmoe", "olmoe") },
    GgufArchitecture { partial_rope: true, ..of("glm4", "glm4") },
    GgufArchitecture { reads: &[WINDOW, PATTERN], ..of("exaone4", "exaone4") },
    of("gemma", "gemma"),
    GgufArchitecture { reads: &[WINDOW, PATTERN, SCORE_CAP, LOGIT_CAP], ..of("gemma2", "gemma2") },
    GgufArchitecture { reads: &[WINDOW, PATTERN, LOGIT_CAP], ..of("gemma3", "gemma3_text") },
];

const fn of(name: &'static str, model_type: &'static str) -> GgufArchitecture {
    GgufArchitecture { name, model_type, with_experts: None, reads: &[], partial_rope: false, also: &[] }
}

/// Also the state of layers that a Granite 4 of attention alone does not have.
const GRANITE_SCALES: [&str; 5] =
    ["attention.scale", "embedding_scale", "logit_scale", "residual_scale", "ssm.state_size"];
const TEMPERATURE: &str = "attention.temperature_scale";
const YARN_LOG: &str = "rope.scaling.yarn_log_multiplier";
const WINDOW: &str = "attention.sliding_window";
const SCORE_CAP: &str = "attn_logit_softcapping";
const LOGIT_CAP: &str = "final_logit_softcapping";
const PATTERN: &str = "attention.sliding_window_pattern";

/// Factors that divide the frequencies of rope (Llama 3).
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Phi-3's factors for contexts up to the original one.
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// Tensors that are read with the configuration, and tensors for contexts beyond the model's.
pub(super) const OF_ROPE: [&str; 3] = [ROPE_FACTORS, SHORT_FACTORS, "rope_factors_long.weight"];

/// The factors that divide the frequencies of rope, if the file has any.
pub(super) fn rope_factors(gguf: &GgufFile) -> Option<(&'static str, &GgufTensor)> {
    OF_ROPE[..2].iter().find_map(|name| Some((*name, gguf.tensors.get(*name)?)))
}

/// Keys of attention, rope and experts that are read or have no effect. All others are refused where they
/// have one, so that a key of later files is not passed over.
const READ: [&str; 27] = [
    "attention.causal",
    "attention.group_norm_epsilon",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_ext_factor",
];
const READ_PREFIXES: [&str; 2] = ["rope.scaling.yarn_attn", "rope.scaling.yarn_beta_"];

/// Other keys after the architecture's name that change the computation and are not read: refused where they
/// have an effect.
const UNSUPPORTED: [&str; 29] = [
    "activation.situ_beta",
    "activation.situ_linear_beta",
    "adapters.count",
    SCORE_CAP,
    "attn_res.block_size",
    "deepstack_mapping",
    "dense_2_feat_out",
    "embedding_length_out",
    "embedding_length_per_layer_input",
    "embedding_scale",
    LOGIT_CAP,
    "full_attention_interval",
    "hash_layer_count",
    "hidden_activation",
    "hrm.layers_per_stack",
    "hyper_connection.count",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "logit_scale",
    "moe_every_n_layers",
    "moe_latent_size",
    "nextn_predict_layers",
    "num_loops",
    "residual_scale",
    "router_logit_softcapping",
    "ssm.state_size",
    "swiglu_clamp_exp",
    "swin_norm",
    "use_parallel_residual",
];

/// Keys whose number has an effect even if it is one.
const NEVER_NEUTRAL: [&str; 5] =
    ["attention.scale", TEMPERATURE, SCORE_CAP, LOGIT_CAP, "router_logit_softcapping"];

/// Refuses keys that change the computation and are not read.
fn check_keys(keys: &ArchitectureKeys, architecture: &GgufArchitecture) -> Result<()> {
    let prefix = keys.key("");
    let names = keys.gguf.keys().filter_map(|key| key.strip_prefix(&prefix));
    let is_unread = |name: &str| {
        let is_of_group = ["attention.", "rope.", "expert"].iter().any(|group| name.starts_with(group));
        let is_read = READ.contains(&name) || READ_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        !architecture.reads.contains(&name) && (UNSUPPORTED.contains(&name) || is_of_group && !is_read)
    };
    let mut unread: Vec<&str> = names.filter(|name| is_unread(name)).collect();
    unread.sort_unstable();
    for name in unread {
        let is_one = NEVER_NEUTRAL.contains(&name) && keys.float(name).is_ok_and(|value| value == Some(1.0));
        if is_one || keys.gguf.has_effect(&keys.key(name)) {
            return Err(keys.error(name, "not supported in a GGUF file of this architecture"));
        }
    }
    Ok(())
}

/// Access to the keys of an architecture.
struct ArchitectureKeys<'a> {
    gguf: &'a GgufFile,
    architecture: &'a str,
}

impl ArchitectureKeys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn number(&self, name: &str) -> Result<Option<u64>> {
        self.gguf.number(&self.key(name))
    }

    fn required(&self, name: &str) -> Result<u64> {
        self.number(name)?.ok_or_else(|| self.error(name, "missing"))
    }

    fn float(&self, name: &str) -> Result<Option<f64>> {
        self.gguf.float(&self.key(name))
    }

    fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        self.gguf.error(&self.key(name), problem)
    }
}

/// Returns the configuration that a GGUF file describes.
///
/// # Errors
/// The error names the key that is missing or not supported.
pub(in super::super) fn config(gguf: &GgufFile, bytes: Option<&[u8]>) -> Result<ModelConfig> {
    let name = gguf.text("general.architecture")?.unwrap_or("(missing)");
    let Some(architecture) = ARCHITECTURES.iter().find(|known| known.name == name) else {
        let supported: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
        let problem = format!("'{name}' is not supported; supported: {}", supported.join(", "));
        return Err(gguf.error("general.architecture", problem));
    };
    if let Some(kind) = gguf.text("general.type")?.filter(|kind| *kind != "model") {
        return Err(gguf.error("general.type", format!("'{kind}' is not supported: this is no whole model")));
    }
    let keys = ArchitectureKeys { gguf, architecture: name };
    check_keys(&keys, architecture)?;
    if gguf.flag(&keys.key("attention.causal"))? == Some(false) {
        return Err(keys.error("attention.causal", "false is not supported: this is no decoder"));
    }
    let mut object = shape(&keys, architecture)?;
    let experts = experts(&keys, architecture)?;
    let model_type = match (&experts, architecture.with_experts) {
        (Some(_), Some(model_type)) => model_type,
        _ => architecture.model_type,
    };
    let (model_type, own) = family_fields(&keys, model_type)?;
    object.extend(own);
    object.insert("model_type".to_owned(), model_type.into());
    object.extend(experts.unwrap_or_default());
    if let Some(scaling) = rope_scaling(&keys)? {
        object.insert("rope_scaling".to_owned(), scaling);
    }
    object.insert("eos_token_id".to_owned(), json!(text::ends(gguf)?));
    if let Some(bos) = gguf.token("tokenizer.ggml.bos_token_id")? {
        object.insert("bos_token_id".to_owned(), bos.into());
    }
    let mut config = ModelConfig::parse(&gguf.file, &object).map_err(|error| by_key(&keys, error))?;
    // its norms are stored whole, and matrices apart
    (config.layout.offset_norms, config.layout.granite_mlp) = (false, false);
    let is_bare = gguf.flag(&keys.key("rope.scaling.finetuned"))? == Some(false);
    if is_bare && name == "granite" {
        // a rotation by zero still carries the factor of scores
        config.rope.inv_freq.fill(0.0);
    }
    config.layout.fused_qkv = gguf.tensors.contains_key("blk.0.attn_qkv.weight");
    let has_bias = |modules: &[&str]| {
        modules.iter().any(|module| {
            let mut layers = (0..config.layers).map(|layer| format!("blk.{layer}.{module}.bias"));
            layers.any(|name| gguf.tensors.contains_key(&name))
        })
    };
    let (qkv, output) = (has_bias(&["attn_q", "attn_k", "attn_v"]), has_bias(&["attn_output"]));
    let mlp = has_bias(&["ffn_gate", "ffn_up", "ffn_down"]);
    (config.qkv_bias, config.o_bias, config.mlp_bias) = (qkv, output, mlp && config.experts.is_none());
    if let Some((name, factors)) = rope_factors(gguf) {
        let stored = bytes.and_then(|bytes| bytes.get(factors.range.clone()));
        divide_frequencies(gguf, &mut config, name, factors, stored)?;
        if name == SHORT_FACTORS {
            config.rope.scale = to_f32(keys.float("rope.scaling.attn_factor")?.unwrap_or(1.0));
            let original = keys.number("rope.scaling.original_context_length")?;
            config.context_max = config.context_max.min(original.map_or(u32::MAX, to_u32));
        }
    }
    let up = ["ffn_up", "ffn_up_exps"].map(|name| gguf.tensors.get(&format!("blk.0.{name}.weight")));
    let up = up.into_iter().flatten().next();
    config.format = up.and_then(|tensor| tensor.kind.quantised()).map(|kind| kind.format());
    Ok(config)
}

/// An error about a field that names the key which the field was read from.
fn by_key(keys: &ArchitectureKeys, error: Error) -> Error {
    const KEYS: [(&str, &str); 8] = [
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("max_position_embeddings", "context_length"),
        ("num_attention_heads", "attention.head_count"),
        ("num_hidden_layers", "block_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("rope_theta", "rope.freq_base"),
    ];
    match error {
        Error::Field { file, field, problem } => {
            let known = KEYS.iter().find(|(name, _)| *name == field);
            Error::Field { file, field: known.map_or(field, |(_, key)| keys.key(key)), problem }
        }
        other => other,
    }
}

/// The fields that every architecture has.
fn shape(keys: &ArchitectureKeys, architecture: &GgufArchitecture) -> Result<Map<String, Value>> {
    let gguf = keys.gguf;
    let (heads, hidden) = (keys.required("attention.head_count")?, keys.required("embedding_length")?);
    let head_dim = keys.number("attention.key_length")?.unwrap_or(hidden / heads.max(1));
    let rotated = keys.number("rope.dimension_count")?.unwrap_or(head_dim);
    for name in ["attention.value_length", "rope.dimension_count"] {
        if name == "rope.dimension_count" && architecture.partial_rope {
            continue;
        }
        if keys.number(name)?.is_some_and(|length| length != head_dim) {
            let problem = format!("not supported unless it is the head's length, {head_dim}");
            return Err(keys.error(name, problem));
        }
    }
    let Some(embedding) = gguf.tensors.get("token_embd.weight") else {
        return Err(Error::tensor(&gguf.file, "token_embd.weight", "missing"));
    };
    let eps = keys.float("attention.layer_norm_rms_epsilon")?;
    let eps = eps.ok_or_else(|| keys.error("attention.layer_norm_rms_epsilon", "missing"))?;
    let mut object = json!({
        "hidden_size": hidden,
        "intermediate_size": keys.required("feed_forward_length")?,
        "num_hidden_layers": keys.required("block_count")?,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "vocab_size": embedding.rows,
        "max_position_embeddings": keys.required("context_length")?,
        "rms_norm_eps": eps,
        "tie_word_embeddings": !gguf.tensors.contains_key("output.weight"),
        "rope_theta": keys.float("rope.freq_base")?.unwrap_or(10_000.0),
        "dtype": "bfloat16",
    });
    if architecture.partial_rope {
        object["partial_rotary_factor"] = json!(rotated as f64 / head_dim.max(1) as f64);
    }
    Ok(object.as_object().cloned().unwrap_or_default())
}

/// The fields of one architecture alone, and the family if they determine it.
fn family_fields(
    keys: &ArchitectureKeys,
    model_type: &'static str,
) -> Result<(&'static str, Map<String, Value>)> {
    let window = keys.number(WINDOW)?.filter(|window| *window > 0);
    let scale = |name: &str| -> Result<Option<f64>> { Ok(keys.float(name)?.filter(|scale| *scale != 0.0)) };
    let (model_type, fields) = match model_type {
        "granite" | "granitemoeshared" => {
            let head_dim = keys.required("embedding_length")? / keys.required("attention.head_count")?.max(1);
            let head_dim = keys.number("attention.key_length")?.unwrap_or(head_dim);
            let usual = 1.0 / (head_dim.max(1) as f64).sqrt();
            let fields = json!({
                "logits_scaling": scale("logit_scale")?.unwrap_or(1.0),
                "residual_multiplier": scale("residual_scale")?.unwrap_or(1.0),
                "embedding_multiplier": scale("embedding_scale")?.unwrap_or(1.0),
                "attention_multiplier": scale("attention.scale")?.unwrap_or(usual),
            });
            (model_type, fields)
        }
        "olmo2" if window.is_some() => {
            let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
            check_one_rope(keys)?;
            let types = layer_types(keys, 4)?;
            let fields =
                json!({"sliding_window": window, "layer_types": types, "rope_local_base_freq": theta});
            ("olmo3", fields)
        }
        // llama.cpp assumes windows for the model of 64 layers alone
        "exaone4" => {
            let layers = keys.required("block_count")?;
            match layers {
                64 => {
                    let window = window.unwrap_or(4096);
                    ("exaone4", json!({"sliding_window": window, "layer_types": layer_types(keys, 4)?}))
                }
                _ => ("exaone4", json!({"sliding_window": null})),
            }
        }
        "gemma2" => {
            check_one_rope(keys)?;
            let fields = json!({
                "sliding_window": window.unwrap_or(4096),
                "layer_types": layer_types(keys, 2)?,
                "query_pre_attn_scalar": gemma_scale(keys, 46)?,
                SCORE_CAP: keys.float(SCORE_CAP)?.unwrap_or(50.0),
                LOGIT_CAP: keys.float(LOGIT_CAP)?.unwrap_or(30.0),
            });
            (model_type, fields)
        }
        "gemma3_text" => {
            let types = window.map(|_| layer_types(keys, 6)).transpose()?;
            let fields = json!({
                "sliding_window": window,
                "layer_types": types,
                "query_pre_attn_scalar": gemma_scale(keys, 62)?,
                "rope_local_base_freq": keys.float("rope.freq_base_swa")?.unwrap_or(10_000.0),
                LOGIT_CAP: scale(LOGIT_CAP)?,
            });
            (model_type, fields)
        }
        _ => (model_type, json!({})),
    };
    Ok((model_type, fields.as_object().cloned().unwrap_or_default()))
}

/// The square of the divisor of scores of Gemma 2 and 3, which files leave out. llama.cpp knows the 27B
/// model, where it differs from the length of a head, by its number of layers.
fn gemma_scale(keys: &ArchitectureKeys, layers_of_27b: u64) -> Result<u64> {
    let per_head = keys.required("embedding_length")? / keys.required("attention.head_count")?.max(1);
    match keys.required("block_count")? == layers_of_27b {
        true => Ok(per_head),
        false => Ok(keys.number("attention.key_length")?.unwrap_or(per_head)),
    }
}

/// Refuses a rope of layers with a window that differs from the others'.
fn check_one_rope(keys: &ArchitectureKeys) -> Result<()> {
    let own = keys.float("rope.freq_base_swa")?;
    if own.is_some_and(|own| keys.float("rope.freq_base").ok().flatten() != Some(own)) {
        return Err(keys.error("rope.freq_base_swa", "not supported unless it is rope.freq_base"));
    }
    Ok(())
}

/// Whether each layer has a window: from a list, or all but every nth layer.
fn layer_types(keys: &ArchitectureKeys, period: u64) -> Result<Vec<&'static str>> {
    let of = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    if let Ok(Some(of_layers)) = keys.gguf.numbers(&keys.key(PATTERN)) {
        return Ok(of_layers.iter().map(|slides| of(*slides != 0.0)).collect());
    }
    let every = keys.number(PATTERN)?.unwrap_or(period);
    // too many are refused later
    let layers = keys.required("block_count")?.min(u64::from(u16::MAX));
    Ok((1..=layers).map(|layer| of(every == 0 || layer % every != 0)).collect())
}

/// The fields of experts, if there are any.
fn experts(keys: &ArchitectureKeys, architecture: &GgufArchitecture) -> Result<Option<Map<String, Value>>> {
    let count = keys.number("expert_count")?.unwrap_or(0);
    if count == 0 {
        return Ok(None);
    }
    let Some(model_type) = architecture.with_experts else {
        return Err(keys.error("expert_count", format!("{count}, and this architecture has no experts here")));
    };
    // the multiplier of a token's expert weights, and whether they are normalised to one
    for name in ["expert_weights_scale", "expert_weights_norm"] {
        if keys.gguf.has_effect(&keys.key(name)) && model_type == "qwen2_moe" {
            return Err(keys.error(name, "not supported in a GGUF file of this architecture"));
        }
    }
    if keys.float("expert_weights_scale")?.is_some_and(|scale| scale != 0.0 && scale != 1.0) {
        return Err(keys.error("expert_weights_scale", "not supported unless it is 1"));
    }
    // 0 (absent) and 1 are softmax, 2 is a sigmoid
    let (gating, is_sigmoid) = (keys.number("expert_gating_func")?.unwrap_or(0), model_type == "minimax_m2");
    if gating != 2 && is_sigmoid || gating > 1 && !is_sigmoid {
        let supported = if is_sigmoid { "2, which is a sigmoid" } else { "1, which is softmax" };
        return Err(keys.error("expert_gating_func", format!("not supported unless it is {supported}")));
    }
    let active = keys.required("expert_used_count")?;
    let mut fields = json!({"num_experts": count, "num_local_experts": count, "num_experts_per_tok": active});
    let mut put = |name: &str, value: Value| fields[name] = value;
    let whole = keys.required("feed_forward_length")?;
    let own = keys.number("expert_feed_forward_length")?;
    let shared = keys.number(SHARED)?;
    match model_type {
        "granitemoeshared" => put("shared_intermediate_size", shared.unwrap_or(0).into()),
        "mixtral" | "minimax_m2" | "olmoe" => {
            if keys.gguf.has_effect(&keys.key(SHARED)) {
                return Err(keys.error(SHARED, "not supported in a GGUF file of this architecture"));
            }
            put("intermediate_size", own.filter(|_| is_sigmoid).unwrap_or(whole).into());
        }
        _ => {
            put("moe_intermediate_size", own.unwrap_or(whole / active.max(1)).into());
            put("norm_topk_prob", (model_type == "qwen3_moe").into());
            put("decoder_sparse_step", 1.into());
            put("shared_expert_intermediate_size", shared.unwrap_or(whole).into());
        }
    }
    Ok(fields.as_object().cloned())
}

const SHARED: &str = "expert_shared_feed_forward_length";

/// `rope_scaling` in the format of `config.json`.
fn rope_scaling(keys: &ArchitectureKeys) -> Result<Option<Value>> {
    let factor = keys.float("rope.scaling.factor")?.or(keys.float("rope.scale_linear")?);
    let factor = factor.filter(|factor| *factor != 0.0);
    let attention = keys.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let kind_key = keys.key("rope.scaling.type");
    let kind = keys.gguf.text(&kind_key)?;
    let is_long = keys.gguf.tensors.contains_key(SHORT_FACTORS);
    if kind != Some("yarn") && attention != 1.0 && !is_long {
        return Err(keys.error("rope.scaling.attn_factor", "not supported without yarn"));
    }
    match (kind.unwrap_or("linear"), factor) {
        // the tensors of factors hold the rest
        ("linear" | "longrope", None) if is_long => Ok(None),
        ("none", _) | ("linear", None) => Ok(None),
        ("linear", Some(factor)) => Ok(Some(json!({"rope_type": "linear", "factor": factor}))),
        ("yarn", factor) => {
            let whole = |name: &str| keys.float(&format!("rope.scaling.yarn_{name}"));
            let extrapolated = whole("ext_factor")?.unwrap_or(1.0);
            if extrapolated != 1.0 && extrapolated >= 0.0 {
                return Err(keys.error("rope.scaling.yarn_ext_factor", "not supported unless it is 1"));
            }
            let factor = factor.unwrap_or(1.0);
            let attention = attention * whole("attn_factor")?.unwrap_or(1.0);
            let mut yarn = json!({"rope_type": "yarn", "factor": factor,
                "original_max_position_embeddings": keys.number("rope.scaling.original_context_length")?});
            if attention != 1.0 {
                yarn["attention_factor"] = json!(attention * (0.1 * factor.max(1.0).ln() + 1.0));
            }
            if let Some(log) = keys.float(YARN_LOG)?.filter(|log| *log != 0.0) {
                (yarn["mscale"], yarn["mscale_all_dim"]) = (json!(1.0), json!(log));
            }
            if let Some(beta) = keys.float(TEMPERATURE)?.filter(|beta| *beta != 0.0) {
                yarn["llama_4_scaling_beta"] = json!(beta);
            }
            for name in ["beta_fast", "beta_slow"] {
                if let Some(beta) = whole(name)?.filter(|beta| *beta > 0.0) {
                    yarn[name] = json!(beta);
                }
            }
            Ok(Some(yarn))
        }
        (other, _) => {
            let problem = format!("'{other}' is not supported; supported: none, linear, yarn");
            Err(keys.gguf.error(&kind_key, problem))
        }
    }
}

/// Divides the frequencies by a tensor of factors; without the file's bytes they stay unchanged.
fn divide_frequencies(
    gguf: &GgufFile,
    config: &mut ModelConfig,
    name: &str,
    factors: &GgufTensor,
    stored: Option<&[u8]>,
) -> Result<()> {
    let frequencies = &mut config.rope.inv_freq;
    if factors.kind != GgmlKind::F32 || factors.rows != 1 || factors.columns != frequencies.len() as u64 {
        let problem = format!("expected {} factors in F32", frequencies.len());
        return Err(Error::tensor(&gguf.file, name, problem));
    }
    for (frequency, factor) in frequencies.iter_mut().zip(DType::F32.decode(stored.unwrap_or_default())) {
        *frequency /= to_f32(factor);
        if !(frequency.is_finite() && *frequency > 0.0) {
            return Err(Error::tensor(&gguf.file, name, format!("{factor} is not a valid factor")));
        }
    }
    Ok(())
}
