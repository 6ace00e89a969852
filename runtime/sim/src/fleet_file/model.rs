//! The `[model]` table.

use super::{FleetFileError, Model, raw};
use mixfleet_hal::DType;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::models;

/// Tokens per page of an engine's KV; it affects little but the cost of a page table.
const PAGE_TOKENS: u32 = 16;

/// The name of a model without one.
pub(super) const INLINE: &str = "inline";

fn wrong(key: &str, cause: impl Into<String>) -> FleetFileError {
    FleetFileError::value(format!("[model] {key}"), cause)
}

pub(super) fn resolve(raw: &raw::Model) -> Result<Model, FleetFileError> {
    let dtype = raw.dtype.as_deref().map_or(Ok(DType::Bf16), |name| dtype("dtype", name))?;
    let kv = raw.kv_dtype.as_deref().map_or(Ok(dtype), |name| self::dtype("kv_dtype", name))?;
    let positive = |key: &str, value: Option<f64>| match value {
        Some(value) if !(value.is_finite() && value > 0.0) => {
            Err(wrong(key, format!("is {value}; it must be a positive number")))
        }
        value => Ok(value),
    };
    let kv_bytes_per_token = positive("kv_bytes_per_token", raw.kv_bytes_per_token)?;
    let weight_bytes = positive("weight_bytes", raw.weight_bytes)?.map(Bytes);

    let keys = shape_keys(raw);
    let given: Vec<&str> = keys.iter().filter(|(_, value)| value.is_some()).map(|(key, _)| *key).collect();
    if let Some((key, _)) = keys.iter().find(|(_, value)| *value == Some(0)) {
        return Err(wrong(key, "is 0; it must be at least 1"));
    }
    let name = raw.name.clone().unwrap_or_else(|| INLINE.into());
    if let (["layers"], Some(kv_bytes_per_token)) = (&given[..], kv_bytes_per_token) {
        let (layers, weights) = (raw.layers.unwrap_or(1), weight_bytes.unwrap_or(Bytes::ZERO));
        return Ok(Model { name, layers, kv_bytes_per_token, weights, shape: None });
    }
    let (name, shape, counted) = if given.is_empty() {
        let name = raw.name.as_deref();
        let name = name.ok_or_else(|| wrong("name", "is missing; give it, or the model's shape"))?;
        let known = models::find(name).map_err(|error| wrong("name", error.to_string()))?;
        (known.name.into(), ModelShape { kv, ..known.shape(dtype) }, known.weight_bytes(dtype))
    } else {
        let shape = inline(raw, dtype, kv)?;
        let parameters = models::matrix_parameters(&shape, raw.tied_embeddings.unwrap_or(false));
        (name, shape, Bytes((parameters * dtype.size_bytes()) as f64))
    };
    Ok(Model {
        name,
        layers: shape.layers(),
        kv_bytes_per_token: kv_bytes_per_token.unwrap_or(shape.kv_bytes_per_token() as f64),
        weights: weight_bytes.unwrap_or(counted),
        shape: Some(shape),
    })
}

fn shape_keys(raw: &raw::Model) -> [(&'static str, Option<u32>); 7] {
    [
        ("layers", raw.layers),
        ("hidden", raw.hidden),
        ("heads", raw.heads),
        ("kv_heads", raw.kv_heads),
        ("head_dim", raw.head_dim),
        ("intermediate", raw.intermediate),
        ("vocab", raw.vocab),
    ]
}

fn inline(raw: &raw::Model, dtype: DType, kv: DType) -> Result<ModelShape, FleetFileError> {
    let need = |key: &str, value: Option<u32>| {
        let hint = "a shape has layers, hidden, heads, kv_heads, intermediate and vocab (or layers and \
                    kv_bytes_per_token alone, where every pool has a calibration)";
        value.ok_or_else(|| wrong(key, format!("is missing; {hint}")))
    };
    let (hidden, heads) = (need("hidden", raw.hidden)?, need("heads", raw.heads)?);
    let kv_heads = raw.kv_heads.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(wrong("kv_heads", format!("is {kv_heads}; it must divide heads, which is {heads}")));
    }
    let head_dim = match raw.head_dim {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => return Err(wrong("head_dim", "is missing, and hidden does not divide by heads")),
    };
    Ok(ModelShape {
        hidden,
        intermediate: need("intermediate", raw.intermediate)?,
        heads,
        kv_heads,
        head_dim,
        vocab: need("vocab", raw.vocab)?,
        windows: vec![None; need("layers", raw.layers)? as usize],
        weight: dtype,
        activation: if dtype == DType::F8E4m3 { DType::Bf16 } else { dtype },
        kv,
        page_tokens: PAGE_TOKENS,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
    })
}

fn dtype(key: &str, name: &str) -> Result<DType, FleetFileError> {
    let known = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3];
    let found = known.into_iter().find(|dtype| name.eq_ignore_ascii_case(dtype.name()));
    found.ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|dtype| dtype.name()).collect();
        wrong(key, format!("is '{name}'; known are {}", names.join(", ")))
    })
}
