//! `quantization_config` of a `config.json`: which matrices are quantised, and how.
//!
//! Activations and KV are not quantised, regardless of the field. Every other unknown entry that would change
//! the weights is refused by name.

use super::error::Result;
use super::fields::{Fields, read_object};
use super::schemes::{Granularity, Scheme};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_u32;
use regex_lite::Regex;
use serde_json::{Map, Value};
use std::path::Path;

/// The longest side of a block that shares a scale.
const GROUP_MAX: u32 = 1 << 16;

/// Storage of a checkpoint's matrices.
#[derive(Clone, Debug, Default)]
pub(super) struct Quantisation {
    schemes: Vec<(Vec<Target>, Scheme)>,
    ignored: Vec<Target>,
}

/// The modules to which an entry applies.
#[derive(Clone, Debug)]
enum Target {
    /// Every projection.
    Linear,
    /// The module of this name, modules inside it, and modules whose name ends with it.
    Name(String),
    /// Modules whose name begins as the expression specifies.
    Pattern(Regex),
}

impl Target {
    fn names(&self, module: &str) -> bool {
        match self {
            Target::Linear => false,
            Target::Name(name) => {
                let inside = |name: &str| module.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
                module == name || inside(name) || module.ends_with(&format!(".{name}"))
            }
            Target::Pattern(pattern) => pattern.find(module).is_some_and(|found| found.start() == 0),
        }
    }
}

impl Quantisation {
    /// Reads the field of the `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), and when the file cannot be read.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        let file = directory.join("config.json");
        Self::parse(&Fields::new(&file, &read_object(&file)?))
    }

    /// Reads the field of a configuration; nothing is quantised without it.
    ///
    /// # Errors
    /// The error names the field that is not supported.
    pub(super) fn parse(config: &Fields) -> Result<Self> {
        let Some(object) = config.object("quantization_config")? else { return Ok(Quantisation::default()) };
        let fields = Fields { file: config.file, object, prefix: "quantization_config." };
        let method = fields.text("quant_method")?.unwrap_or("(missing)");
        match method {
            "fp8" => fp8(&fields),
            "awq" => awq(&fields),
            "gptq" => gptq(&fields),
            "compressed-tensors" => compressed_tensors(&fields),
            "mxfp4" => mxfp4(&fields),
            other => {
                let problem = format!(
                    "'{other}' is not supported; supported: fp8, mxfp4, compressed-tensors, awq, gptq, \
                     and GGUF files"
                );
                Err(fields.error("quant_method", problem))
            }
        }
    }

    /// The scheme of a module's matrix; none if it is not quantised.
    pub(super) fn scheme(&self, module: &str) -> Option<&Scheme> {
        if self.ignored.iter().any(|target| target.names(module)) {
            return None;
        }
        let named = self.schemes.iter().find(|(targets, _)| targets.iter().any(|t| t.names(module)));
        let linear = || {
            let all = |targets: &Vec<Target>| targets.iter().any(|t| matches!(t, Target::Linear));
            self.schemes.iter().find(|(targets, _)| module != "model.embed_tokens" && all(targets))
        };
        named.or_else(linear).map(|(_, scheme)| scheme)
    }

    /// The first of the schemes, which represents all in costs.
    pub(super) fn first(&self) -> Option<&Scheme> {
        self.schemes.first().map(|(_, scheme)| scheme)
    }

    fn of_all(scheme: Scheme, ignored: Vec<Target>) -> Self {
        Quantisation { schemes: vec![(vec![Target::Linear], scheme)], ignored }
    }
}

/// Refuses a field that is set and not among `known`.
fn check_known(fields: &Fields, known: &[&str]) -> Result<()> {
    let unknown = |name: &&String| fields.get(name).is_some() && !known.contains(&name.as_str());
    match fields.object.keys().find(unknown) {
        Some(name) => Err(fields.error(name, "this field is not supported")),
        None => Ok(()),
    }
}

/// Refuses a field that has another value than `only`, or none.
fn check_is(fields: &Fields, name: &str, only: &[Value]) -> Result<()> {
    match fields.get(name) {
        Some(value) if !only.contains(value) => {
            let shown = only.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
            Err(fields.error(name, format!("{value} is not supported; supported: {shown}")))
        }
        _ => Ok(()),
    }
}

/// Names and expressions (`re:`, or with `*`).
fn targets(fields: &Fields, name: &str, of: Option<Vec<&str>>) -> Result<Vec<Target>> {
    let target = |text: &str| -> Result<Target> {
        let expression = match text.strip_prefix("re:") {
            Some(expression) => format!("^(?:{expression})"),
            None if text == "Linear" => return Ok(Target::Linear),
            None if text.contains('*') => {
                let parts: Vec<String> = text.split('*').map(escaped).collect();
                format!("^(?:{})", parts.join(".*"))
            }
            None => return Ok(Target::Name(text.to_owned())),
        };
        let pattern = Regex::new(&expression).map_err(|e| fields.error(name, format!("'{text}': {e}")))?;
        Ok(Target::Pattern(pattern))
    };
    of.unwrap_or_default().into_iter().map(target).collect()
}

fn escaped(text: &str) -> String {
    let special = |c: char| !(c.is_alphanumeric() || c == '_');
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

/// The sides of a block: two numbers.
fn block(fields: &Fields, name: &str) -> Result<Option<[u32; 2]>> {
    let Some(value) = fields.get(name) else { return Ok(None) };
    let side = |value: &Value| {
        value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=GROUP_MAX).contains(n))
    };
    match value.as_array().map(|sides| sides.iter().map(side).collect::<Option<Vec<u32>>>()) {
        Some(Some(sides)) if sides.len() == 2 => Ok(Some([sides[0], sides[1]])),
        _ => Err(fields.error(name, format!("{value}, expected two lengths"))),
    }
}

fn fp8(fields: &Fields) -> Result<Quantisation> {
    check_known(
        fields,
        &[
            "quant_method",
            "activation_scheme",
            "fmt",
            "weight_block_size",
            "modules_to_not_convert",
            "ignored_layers",
            "scale_fmt",
        ],
    )?;
    check_is(fields, "fmt", &["e4m3".into(), "float8_e4m3fn".into()])?;
    check_is(fields, "scale_fmt", &["float".into()])?;
    let mut ignored = targets(fields, "modules_to_not_convert", fields.texts("modules_to_not_convert")?)?;
    ignored.extend(targets(fields, "ignored_layers", fields.texts("ignored_layers")?)?);
    let scheme = match block(fields, "weight_block_size")? {
        Some(block) => Scheme::Float8 { granularity: Granularity::Block(block), scale: "weight_scale_inv" },
        None => Scheme::Float8 { granularity: Granularity::Channel, scale: "weight_scale" },
    };
    Ok(Quantisation::of_all(scheme, ignored))
}

/// The scheme of gpt-oss's experts.
fn mxfp4(fields: &Fields) -> Result<Quantisation> {
    check_known(fields, &["quant_method", "modules_to_not_convert", "dequantize"])?;
    check_is(fields, "dequantize", &[false.into()])?;
    let ignored = targets(fields, "modules_to_not_convert", fields.texts("modules_to_not_convert")?)?;
    Ok(Quantisation::of_all(Scheme::Mxfp4, ignored))
}

/// The columns of a group; -1 is a whole row.
fn group_size(fields: &Fields) -> Result<Option<u32>> {
    match fields.get("group_size") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        _ => fields.count_required("group_size", GROUP_MAX).map(Some),
    }
}

fn awq(fields: &Fields) -> Result<Quantisation> {
    check_known(
        fields,
        &[
            "quant_method",
            "bits",
            "group_size",
            "zero_point",
            "version",
            "modules_to_not_convert",
            "backend",
            "do_fuse",
        ],
    )?;
    check_is(fields, "bits", &[4.into()])?;
    check_is(fields, "version", &["gemm".into(), "GEMM".into()])?;
    check_is(fields, "zero_point", &[true.into()])?;
    let ignored = targets(fields, "modules_to_not_convert", fields.texts("modules_to_not_convert")?)?;
    Ok(Quantisation::of_all(Scheme::Awq { group: group_size(fields)? }, ignored))
}

fn gptq(fields: &Fields) -> Result<Quantisation> {
    // fields about the calibration have no effect
    check_known(
        fields,
        &[
            "quant_method",
            "bits",
            "group_size",
            "desc_act",
            "sym",
            "damp_percent",
            "damp_auto_increment",
            "static_groups",
            "true_sequential",
            "checkpoint_format",
            "model_file_base_name",
            "model_name_or_path",
            "meta",
            "lm_head",
            "pack_dtype",
            "is_marlin_format",
            "quantizer",
            "dataset",
            "tokenizer",
            "use_cuda_fp16",
            "batch_size",
            "modules_in_block_to_quantize",
            "module_name_preceding_first_block",
            "block_name_to_quantize",
            "use_exllama",
            "cache_block_outputs",
            "model_seqlen",
            "pad_token_id",
            "exllama_config",
            "max_input_length",
            "mse",
        ],
    )?;
    check_is(fields, "bits", &[4.into()])?;
    check_is(fields, "desc_act", &[false.into()])?;
    check_is(fields, "is_marlin_format", &[false.into()])?;
    check_is(fields, "checkpoint_format", &["gptq".into()])?;
    check_is(fields, "pack_dtype", &["int32".into()])?;
    check_is(fields, "lm_head", &[false.into()])?;
    Ok(Quantisation::of_all(Scheme::Gptq { group: group_size(fields)? }, Vec::new()))
}

fn compressed_tensors(fields: &Fields) -> Result<Quantisation> {
    check_known(
        fields,
        &[
            "quant_method",
            "format",
            "ignore",
            "kv_cache_scheme",
            "quantization_status",
            "config_groups",
            "version",
            "global_compression_ratio",
            "sparsity_config",
            "transform_config",
        ],
    )?;
    let empty = Value::Object(Map::new());
    check_is(fields, "transform_config", std::slice::from_ref(&empty))?;
    if let Some(sparsity) = fields.object("sparsity_config")?.filter(|object| !object.is_empty()) {
        let inner =
            Fields { file: fields.file, object: sparsity, prefix: "quantization_config.sparsity_config." };
        check_is(&inner, "format", &["dense".into()])?;
    }
    check_is(fields, "quantization_status", &["compressed".into(), "frozen".into()])?;
    let format = fields.text("format")?;
    let Some(groups) = fields.object("config_groups")? else {
        return Err(fields.error("config_groups", "missing, expected an object of groups"));
    };
    let mut quantisation =
        Quantisation { schemes: Vec::new(), ignored: targets(fields, "ignore", fields.texts("ignore")?)? };
    for (name, group) in groups {
        let prefix = format!("quantization_config.config_groups.{name}.");
        let Some(object) = group.as_object() else {
            return Err(
                fields.error(&format!("config_groups.{name}"), format!("{group}, expected an object"))
            );
        };
        let group = Fields { file: fields.file, object, prefix: &prefix };
        check_known(&group, &["targets", "weights", "input_activations", "output_activations", "format"])?;
        let targets = targets(&group, "targets", group.texts("targets")?)?;
        let format = group.text("format")?.or(format);
        if let Some(weights) = group.object("weights")? {
            let prefix = format!("{prefix}weights.");
            let weights = Fields { file: fields.file, object: weights, prefix: &prefix };
            quantisation.schemes.push((targets, scheme_of(&group, &weights, format)?));
        }
    }
    Ok(quantisation)
}

/// The scheme of one group of compressed-tensors.
#[expect(clippy::too_many_lines, reason = "one arm for each published scheme")]
fn scheme_of(group: &Fields, weights: &Fields, format: Option<&str>) -> Result<Scheme> {
    check_known(
        weights,
        &[
            "num_bits",
            "type",
            "strategy",
            "group_size",
            "symmetric",
            "dynamic",
            "actorder",
            "block_structure",
            "observer",
            "observer_kwargs",
            "scale_dtype",
            "zp_dtype",
        ],
    )?;
    check_is(weights, "dynamic", &[false.into()])?;
    check_is(weights, "actorder", &["weight".into(), "static".into()])?;
    let symmetric = weights.flag("symmetric", true)?;
    let bits = weights.count_required("num_bits", 16)?;
    let kind = weights.text("type")?.unwrap_or("int");
    let strategy = weights.text("strategy")?.unwrap_or("tensor");
    let granularity = match strategy {
        "tensor" => Granularity::Tensor,
        "channel" => Granularity::Channel,
        "group" | "tensor_group" => Granularity::Block([1, weights.count_required("group_size", GROUP_MAX)?]),
        "block" => {
            let block = block(weights, "block_structure")?;
            Granularity::Block(
                block.ok_or_else(|| weights.error("block_structure", "missing for strategy 'block'"))?,
            )
        }
        other => return Err(weights.error("strategy", format!("'{other}' is not supported"))),
    };
    let needs = |name: &str, is: bool, what: &str| match is {
        true => Ok(()),
        false => {
            let value = weights.get(name).cloned().unwrap_or_default();
            Err(weights.error(name, format!("{value} is not supported with this format; supported: {what}")))
        }
    };
    match format {
        Some("pack-quantized") => {
            needs("num_bits", bits == 4, "4")?;
            needs("type", kind == "int", "int")?;
            Ok(Scheme::Packed { granularity, symmetric })
        }
        Some("int-quantized") => {
            needs("num_bits", bits == 8, "8")?;
            needs("type", kind == "int", "int")?;
            Ok(Scheme::Int8 { granularity, symmetric })
        }
        Some("float-quantized" | "naive-quantized") if kind == "float" => {
            needs("num_bits", bits == 8, "8")?;
            Ok(Scheme::Float8 { granularity, scale: "weight_scale" })
        }
        Some("naive-quantized") => {
            needs("num_bits", bits == 8, "8")?;
            Ok(Scheme::Int8 { granularity, symmetric })
        }
        Some("nvfp4-pack-quantized") => {
            needs("group_size", weights.get("group_size") == Some(&16.into()), "16")?;
            Ok(Scheme::Nvfp4)
        }
        Some("mxfp4-pack-quantized") => {
            needs("group_size", weights.get("group_size") == Some(&32.into()), "32")?;
            Ok(Scheme::Mxfp4)
        }
        other => {
            let problem = format!(
                "{other:?} is not supported; supported: pack-quantized, int-quantized, float-quantized, \
                 nvfp4-pack-quantized, mxfp4-pack-quantized"
            );
            Err(group.error("format", problem))
        }
    }
}

/// The dtype of a stored float, by the name that safetensors gives it.
pub(super) fn float_dtype(name: &str) -> Option<DType> {
    match name {
        "F32" => Some(DType::F32),
        "BF16" => Some(DType::Bf16),
        "F16" => Some(DType::F16),
        _ => None,
    }
}

/// Bytes of an element, by the name that safetensors gives its type.
pub(super) fn element_bytes(name: &str) -> Option<u64> {
    match name {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "BF16" | "F16" | "I16" | "U16" => Some(2),
        "I8" | "U8" | "F8_E4M3" | "F8_E8M0" | "BOOL" => Some(1),
        _ => None,
    }
}

/// A side of a matrix, which [`super::config::ModelConfig`] bounds.
pub(super) fn side(length: u64) -> u32 {
    to_u32(length)
}

#[cfg(test)]
#[path = "quantisation_tests.rs"]
mod tests;
