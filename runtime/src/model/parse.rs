//! Parses `config.json` and `generation_config.json` into [`ModelConfig`], in the spellings of transformers 4
//! and 5.
//!
//! Defaults of absent fields are those of transformers' configuration classes.

use super::config::ModelConfig;
use super::error::{Error, Result};
use super::experts::{self, Mixture};
use super::families;
use super::family::{FAMILIES, Family, FamilyBiases, QkNorm};
use super::fields::{Fields, read_object, read_object_if_present};
use super::gguf::{self, GgufFile, is_gguf};
use super::latent::LatentHeads;
use super::quantisation::Quantisation;
use super::rope::{self, RopeSize};
use super::schemes::Scheme;
use super::style::{self, ModelRopes, ModelScales};
use super::{tokenizer_config, wrapped};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_f32;
use mixfleet_scheduler::batch::LayerPages;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

// Bounds well above any real model; with them no product of two dimensions and an element size exceeds 64
// bits, and none of heads and head length exceeds 32.
const HIDDEN_MAX: u32 = 1 << 20;
const LAYERS_MAX: u32 = 1 << 12;
const HEADS_MAX: u32 = 1 << 14;
const HEAD_DIM_MAX: u32 = 1 << 12;
const VOCAB_MAX: u32 = 1 << 24;
const CONTEXT_MAX: u32 = 1 << 30;

impl ModelConfig {
    /// Reads `config.json` and, if present, `generation_config.json` of a checkpoint directory, or the header
    /// of a GGUF file. The end token that the tokenizer names also ends an answer.
    ///
    /// # Errors
    /// The error names the file and the field, and says what is supported.
    pub fn open(directory: &Path) -> Result<Self> {
        if is_gguf(directory) {
            return gguf::config(&GgufFile::open(directory)?, None);
        }
        let file = directory.join("config.json");
        if !file.exists() && holds_gguf(directory) {
            let problem = "there is no config.json, but a GGUF file: give that file";
            return Err(Error::file(directory, problem));
        }
        if !file.exists() && directory.join("adapter_config.json").exists() {
            let problem = "this is an adapter (LoRA): merge it into its base model, and serve the result";
            return Err(Error::file(directory, problem));
        }
        let mut config = Self::parse(&file, &read_object(&file)?)?;
        let generation = directory.join("generation_config.json");
        let object = read_object_if_present(&generation)?.unwrap_or_default();
        if let Some(ids) = Fields::new(&generation, &object).token_ids("eos_token_id")? {
            config.eos_ids = ids;
        }
        let end = tokenizer_config::end_of_answer(directory)?;
        config.eos_ids.extend(end.filter(|end| !config.eos_ids.contains(end)));
        Ok(config)
    }

    /// Reads the object of a `config.json`; `file` is for messages only.
    ///
    /// # Errors
    /// The error names the field, and says what is supported.
    pub fn parse(file: &Path, object: &Map<String, Value>) -> Result<Self> {
        let object = wrapped::text_config(object);
        let fields = Fields::new(file, &object);
        let family = family(&fields)?;
        check_activation(&fields, family)?;
        style::check_effects(&fields, family)?;

        let hidden = fields.count_required("hidden_size", HIDDEN_MAX)?;
        let layers = fields.count_required("num_hidden_layers", LAYERS_MAX)?;
        let is = |model_types: &[&str]| model_types.contains(&family.model_type);
        let context_max = fields.count("max_position_embeddings", CONTEXT_MAX)?;
        let context_max = context_max.unwrap_or(family.context_max);
        let latent = match is(&["deepseek_v2", "deepseek_v3", "kimi_k2"]) {
            true => Some(LatentHeads::parse(&fields, context_max)?),
            false => None,
        };
        let HeadShape { heads, kv_heads, head_dim, rotated } =
            head_shape(&fields, family, hidden, latent.as_ref())?;
        let [qkv_bias, o_bias, mlp_bias] = biases(&fields, family)?;
        let qk_norm = match family.qk_norm {
            QkNorm::Never => false,
            QkNorm::Heads | QkNorm::Whole => true,
            QkNorm::HeadsByFlag => fields.flag("use_qk_norm", false)?,
        };
        let norm_eps = norm_eps(&fields, family)?;
        let scales = ModelScales::parse(&fields, family, norm_eps, [hidden, head_dim])?;
        let windows = windows(&fields, family, layers)?;
        let ropes = ModelRopes::parse(&fields, family, RopeSize { rotated, context_max }, &windows)?;
        let context_limit = rope::context_limit(&fields, context_max)?.unwrap_or(context_max);
        let intermediate = match is(&["granitemoehybrid"]) {
            true => experts::granite_inner(&fields)?,
            false => fields.count_required("intermediate_size", HIDDEN_MAX)?,
        };
        Ok(ModelConfig {
            family: family.model_type.into(),
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            latent,
            vocab: fields.count_required("vocab_size", VOCAB_MAX)?,
            context_max: context_max.min(context_limit),
            norm_eps,
            qkv_bias,
            o_bias,
            mlp_bias,
            qk_norm,
            sinks: is(&["gpt_oss"]).then(|| Arc::new([]) as Arc<[f32]>),
            experts: Mixture::parse(&fields, family.model_type, layers)?,
            tied_embeddings: fields.flag("tie_word_embeddings", family.tied)?,
            windows,
            pages: LayerPages::whole(layers),
            rope: scales.scaled(ropes.main),
            second_rope: ropes.second.map(|rope| scales.scaled(rope)),
            interleaved: family.interleaved,
            style: style::layer_style(family, &scales, ropes.of_layers),
            scales,
            layout: family.layout,
            dtype: dtype(&fields)?,
            format: Quantisation::parse(&fields)?.first().map(Scheme::format),
            eos_ids: fields.token_ids("eos_token_id")?.unwrap_or_default(),
            bos_id: fields.token_ids("bos_token_id")?.and_then(|ids| ids.first().copied()),
        })
    }
}

/// Whether a directory contains a GGUF file.
fn holds_gguf(path: &Path) -> bool {
    let mut inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    inside.any(|entry| is_gguf(&entry.path()))
}

fn family(fields: &Fields) -> Result<&'static Family> {
    let supported = || {
        let names: Vec<_> =
            FAMILIES.iter().map(|f| format!("{} ({})", f.model_type, f.architecture)).collect();
        format!("supported: {}", names.join(", "))
    };
    let Some(model_type) = fields.text("model_type")? else {
        return Err(fields.error("model_type", format!("missing; {}", supported())));
    };
    let Some(family) = FAMILIES.iter().find(|family| family.model_type == model_type) else {
        let problem = match families::lacking(model_type) {
            Some(missing) => format!("'{model_type}' is not supported; it needs {missing}"),
            None => format!("'{model_type}' is not supported; {}", supported()),
        };
        return Err(fields.error("model_type", problem));
    };
    match fields.texts("architectures")?.unwrap_or_default().as_slice() {
        [] => Ok(family),
        [one] if *one == family.architecture => Ok(family),
        other => {
            let problem =
                format!("{other:?} with model_type '{model_type}' is not supported; {}", supported());
            Err(fields.error("architectures", problem))
        }
    }
}

/// Refuses an activation of the MLP that differs from the family's.
fn check_activation(fields: &Fields, family: &Family) -> Result<()> {
    // early configurations of Gemma call the tanh form gelu
    let supported: &[&str] = match family.model_type {
        "gemma" => &["gelu_pytorch_tanh", "gelu"],
        _ if family.gelu => &["gelu_pytorch_tanh"],
        _ => &["silu", "swish"],
    };
    for field in ["hidden_act", "hidden_activation"] {
        if let Some(name) = fields.text(field)?.filter(|name| !supported.contains(name)) {
            let problem = format!("'{name}' is not supported; supported: {}", supported[0]);
            return Err(fields.error(field, problem));
        }
    }
    Ok(())
}

/// Whether q, k and v, the output of attention, and the MLP have biases.
fn biases(fields: &Fields, family: &Family) -> Result<[bool; 3]> {
    Ok(match family.biases {
        FamilyBiases::Never => [false; 3],
        FamilyBiases::Qkv => [true, false, false],
        FamilyBiases::QkvBy(field, default) => [fields.flag(field, default)?, false, false],
        FamilyBiases::AttentionBy { default, with_mlp } => {
            let has = fields.flag("attention_bias", default)?;
            [has, has, with_mlp && fields.flag("mlp_bias", false)?]
        }
        FamilyBiases::AllBy(field) => [fields.flag(field, false)?; 3],
        FamilyBiases::Each => [
            fields.flag("attention_bias", true)?,
            fields.flag("attention_out_bias", false)?,
            fields.flag("mlp_bias", false)?,
        ],
    })
}

fn norm_eps(fields: &Fields, family: &Family) -> Result<f32> {
    let eps = fields.positive("rms_norm_eps")?.unwrap_or(family.norm_eps);
    // It must remain above zero in f32, in which norms are computed.
    if to_f32(eps) > 0.0 && eps <= 1.0 {
        return Ok(to_f32(eps));
    }
    Err(fields.error("rms_norm_eps", format!("{eps:e}, expected a number above 1e-45 and up to 1")))
}

/// The heads of a model: number, length, and rotated part.
struct HeadShape {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    rotated: u32,
}

fn head_shape(
    fields: &Fields,
    family: &Family,
    hidden: u32,
    latent: Option<&LatentHeads>,
) -> Result<HeadShape> {
    if let Some(LatentHeads { lengths, .. }) = latent {
        let heads = fields.count_required("num_attention_heads", HEADS_MAX)?;
        let rotated = rope::rotated(fields, lengths.rope, family.rope)?;
        return Ok(HeadShape { heads, kv_heads: 1, head_dim: lengths.stored(), rotated });
    }
    let (heads, kv_heads) = heads(fields, family)?;
    let head_dim = head_dim(fields, family, hidden, heads)?;
    // two ropes rotate whole heads
    let rotated = match family.sliding_rope {
        Some(_) => head_dim,
        None => rope::rotated(fields, head_dim, family.rope)?,
    };
    Ok(HeadShape { heads, kv_heads, head_dim, rotated })
}

fn heads(fields: &Fields, family: &Family) -> Result<(u32, u32)> {
    let heads = fields.count_required("num_attention_heads", HEADS_MAX)?;
    let kv_heads = match fields.count("num_key_value_heads", HEADS_MAX)? {
        Some(kv_heads) => kv_heads,
        None if fields.has("num_key_value_heads") => heads,
        None => family.kv_heads.unwrap_or(heads),
    };
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("{kv_heads}, expected a divisor of num_attention_heads ({heads})");
        return Err(fields.error("num_key_value_heads", problem));
    }
    Ok((heads, kv_heads))
}

fn head_dim(fields: &Fields, family: &Family, hidden: u32, heads: u32) -> Result<u32> {
    let given = match fields.count("head_dim", HEAD_DIM_MAX)? {
        None if !fields.has("head_dim") => family.head_dim,
        given => given,
    };
    let head_dim = match given {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) && hidden / heads <= HEAD_DIM_MAX => hidden / heads,
        None => {
            let problem = format!("missing, and hidden_size / num_attention_heads is {hidden} / {heads}");
            return Err(fields.error("head_dim", problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(
            fields.error("head_dim", format!("{head_dim}, expected an even number: rope turns pairs"))
        );
    }
    Ok(head_dim)
}

/// The sliding window of each layer.
fn windows(fields: &Fields, family: &Family, layers: u32) -> Result<Vec<Option<u32>>> {
    let types = fields.texts("layer_types")?;
    // read only where it has an effect: an unused field may have any value
    let window = |absent| match fields.has("sliding_window") {
        true => fields.count("sliding_window", CONTEXT_MAX),
        false => Ok(absent),
    };
    match family.model_type {
        // These have no window, regardless of the fields; Mistral has one in every layer.
        "llama" | "gemma" | "glm" | "glm4" | "glm4_moe" | "granite" | "granitemoe" | "granitemoeshared"
        | "olmo2" | "olmoe" | "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "minimax_m2" | "ernie4_5"
        | "seed_oss" => Ok(vec![None; layers as usize]),
        "granitemoehybrid" => all_attention(fields, types, layers),
        "smollm3" => {
            if fields.flag("use_sliding_window", false)? {
                return Err(fields.error("use_sliding_window", "true is not supported; supported: false"));
            }
            Ok(vec![None; layers as usize])
        }
        "olmo3" | "exaone4" | "gemma2" | "gemma3_text" | "ministral" => {
            windows_by_type(fields, family, types, window(Some(4096))?, layers)
        }
        // by default in every second layer, starting with the first
        "gpt_oss" => {
            let window = window(Some(128))?;
            match types {
                Some(types) => layer_windows(fields, &types, window, layers),
                None => Ok((0..layers).map(|layer| window.filter(|_| layer % 2 == 0)).collect()),
            }
        }
        // in every layer or in none
        "mixtral" | "phi3" | "ministral3" => {
            let window = window(None)?;
            Ok(vec![window; layers as usize])
        }
        "qwen2_moe" | "qwen3_moe" => {
            if fields.flag("use_sliding_window", false)? {
                let problem = "true is not supported with experts; supported: false";
                return Err(fields.error("use_sliding_window", problem));
            }
            match types {
                Some(types) => layer_windows(fields, &types, None, layers),
                None => Ok(vec![None; layers as usize]),
            }
        }
        "mistral" => {
            let window = window(Some(4096))?;
            let uniform = if window.is_some() { "sliding_attention" } else { "full_attention" };
            if types.is_some_and(|types| types.iter().any(|kind| *kind != uniform)) {
                let problem = format!("a mistral with this sliding_window has only '{uniform}' layers");
                return Err(fields.error("layer_types", problem));
            }
            Ok(vec![window; layers as usize])
        }
        _ => {
            let window = if fields.flag("use_sliding_window", false)? { window(Some(4096))? } else { None };
            match types {
                Some(types) => layer_windows(fields, &types, window, layers),
                None => {
                    let first = match fields.get("max_window_layers") {
                        None => 28,
                        Some(Value::Number(n)) if n.as_u64().is_some() => n.as_u64().unwrap_or_default(),
                        Some(_) => return Err(fields.error("max_window_layers", "expected a whole number")),
                    };
                    Ok((0..layers).map(|i| window.filter(|_| u64::from(i) >= first)).collect())
                }
            }
        }
    }
}

/// The windows of a family whose windowed layers are given by `layer_types`, or else all but every nth layer.
fn windows_by_type(
    fields: &Fields,
    family: &Family,
    types: Option<Vec<&str>>,
    window: Option<u32>,
    layers: u32,
) -> Result<Vec<Option<u32>>> {
    const PATTERN: &str = "sliding_window_pattern";
    if let Some(types) = types {
        return layer_windows(fields, &types, window, layers);
    }
    let every = match family.model_type {
        "ministral" => return Ok(vec![window; layers as usize]),
        "gemma2" if fields.get(PATTERN).is_none() => 2,
        "gemma3_text" => fields.count(PATTERN, LAYERS_MAX)?.unwrap_or(6),
        _ if fields.get(PATTERN).is_some() && window.is_some() => {
            let problem = "not supported without layer_types, which says the same of each layer";
            return Err(fields.error(PATTERN, problem));
        }
        _ => 4,
    };
    Ok((1..=layers).map(|layer| window.filter(|_| layer % every != 0)).collect())
}

/// Refuses layers with a state.
fn all_attention(fields: &Fields, types: Option<Vec<&str>>, layers: u32) -> Result<Vec<Option<u32>>> {
    let field = if types.is_some() { "layer_types" } else { "layers_block_type" };
    let types = types.map_or_else(|| fields.texts(field), |types| Ok(Some(types)))?;
    match types {
        Some(types) if types.iter().all(|kind| ["attention", "full_attention"].contains(kind)) => {
            layer_windows(fields, &types, None, layers)
        }
        _ => {
            let problem = "not supported unless all layers are attention: others need a recurrent state";
            Err(fields.error(field, problem))
        }
    }
}

fn layer_windows(
    fields: &Fields,
    types: &[&str],
    window: Option<u32>,
    layers: u32,
) -> Result<Vec<Option<u32>>> {
    if types.len() != layers as usize {
        let problem = format!("{} entries, expected num_hidden_layers ({layers})", types.len());
        return Err(fields.error("layer_types", problem));
    }
    let of = |kind: &&str| match *kind {
        "full_attention" | "attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => {
            Err(fields
                .error("layer_types", "'sliding_attention' without use_sliding_window and sliding_window"))
        }
        other => {
            let problem = format!("'{other}' is not supported; supported: full_attention, sliding_attention");
            Err(fields.error("layer_types", problem))
        }
    };
    types.iter().map(of).collect()
}

fn dtype(fields: &Fields) -> Result<DType> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let Some(name) = fields.text(field)? else { return Ok(DType::F32) };
    match name.trim_start_matches("torch.").parse() {
        Ok(dtype) if DType::FLOATS.contains(&dtype) => Ok(dtype),
        _ => {
            let problem = format!("'{name}' is not supported; supported: float32, bfloat16, float16");
            Err(fields.error(field, problem))
        }
    }
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
