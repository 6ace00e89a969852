//! The `[model]` table.

use super::{FleetFileError, Model, raw};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::layers::LayerStyle;
use mixfleet_scheduler::models;

/// Tokens per page of an engine's KV; it affects little but the cost of a page table.
const PAGE_TOKENS: u32 = 16;

/// The name of a model without one.
pub(super) const INLINE: &str = "inline";

fn wrong(key: &str, cause: impl Into<String>) -> FleetFileError {
    FleetFileError::value(format!("[model] {key}"), cause)
}

pub(super) fn resolve(raw: &raw::Model) -> Result<Model, FleetFileError> {
    let stored = raw.dtype.as_deref().map_or(Ok(StoredAs::Plain(DType::Bf16)), |name| {
        name.parse().map_err(|cause: String| wrong("dtype", cause))
    })?;
    let kv = raw.kv_dtype.as_deref().map_or(Ok(stored.kv()), kv_dtype)?;
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
    let (name, shape, tied_embeddings) = if given.is_empty() {
        let name = raw.name.as_deref();
        let name = name.ok_or_else(|| wrong("name", "is missing; give it, or the model's shape"))?;
        let known = models::find(name).map_err(|error| wrong("name", error.to_string()))?;
        (known.name.into(), known.shape_as(stored).with_kv(kv), known.tied_embeddings)
    } else {
        (name, inline(raw, stored, kv)?, raw.tied_embeddings.unwrap_or(false))
    };
    Ok(Model {
        name,
        layers: shape.layers(),
        kv_bytes_per_token: kv_bytes_per_token.unwrap_or(shape.kv_bytes_per_token() as f64),
        weights: weight_bytes.unwrap_or_else(|| shape.weight_bytes(tied_embeddings)),
        shape: Some(shape),
    })
}

/// The model as divided among the devices of a pool's instance, or the key and the fault. It has whole
/// experts on each device if the pool says so, and with the rest of the weights copied to every device or
/// divided too.
pub(super) fn on_pool(model: &Model, pool: &raw::RawPool) -> Result<Model, (&'static str, String)> {
    let skew = pool.expert_skew.unwrap_or(0.0);
    if pool.expert_skew.is_some() && !(pool.experts_by_member && skew.is_finite() && skew >= 0.0) {
        return Err(("expert_skew", "must be 0 or more, and stand beside experts_by_member".into()));
    }
    if pool.experts_by_member {
        let key = "experts_by_member";
        if pool.expert_parallel {
            return Err((key, "cannot be combined with expert_parallel; give one of them".into()));
        }
        let shape = model.shape.as_ref().and_then(|shape| shape.with_experts_by_member(skew));
        let shape = shape.ok_or_else(|| (key, format!("is true, and {} has no experts", model.name)))?;
        return Ok(Model { shape: Some(shape), ..model.clone() });
    }
    whole_on_each(model, pool).map_err(|cause| ("expert_parallel", cause))
}

/// The model with whole experts on each device, and the rest of the weights on every one.
fn whole_on_each(model: &Model, pool: &raw::RawPool) -> Result<Model, String> {
    if !pool.expert_parallel {
        return Ok(model.clone());
    }
    let divided = |shape: &ModelShape| shape.with_whole_experts(pool.devices_per_instance);
    let whole = model.shape.as_ref().and_then(|shape| Some((shape, divided(shape)?)));
    let (shape, divided) = whole.ok_or_else(|| format!("is true, and {} has no experts", model.name))?;
    // no mixture of experts ties its embeddings
    let more = divided.weight_bytes(false).0 - shape.weight_bytes(false).0;
    Ok(Model { weights: Bytes(model.weights.0 + more), shape: Some(divided), ..model.clone() })
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

fn inline(raw: &raw::Model, stored: StoredAs, kv: DType) -> Result<ModelShape, FleetFileError> {
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
        weight: stored.plain(),
        activation: stored.plain(),
        kv,
        page_tokens: PAGE_TOKENS,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: false,
        rotary: None,
        sinks: false,
        style: LayerStyle::default(),
        format: stored.format(),
        experts: None,
        latent: None,
        linear: None,
    })
}

/// A dtype in which devices keep KV.
fn kv_dtype(name: &str) -> Result<DType, FleetFileError> {
    name.parse()
        .ok()
        .filter(|dtype| DType::KV.contains(dtype))
        .ok_or_else(|| wrong("kv_dtype", format!("is '{name}'; known are f32, bf16, f16, fp8 and int8")))
}
