//! Whether a device supports what a model needs of it.

use crate::model::experts::Mixture;
use crate::model::graph::StepShape;
use crate::model::product::{embedding, product};
use crate::model::{ExpertWeights, KvWeights, MlpWeights, ModelConfig, Tensor, Weights};
use mixfleet_hal::{DType, Device, Error, MatrixKind, OpSig, Result, Scalar, Support};

/// Checks that the device supports the operations with weights that differ between models.
pub(super) fn check_products(
    device: &dyn Device,
    c: &ModelConfig,
    weights: &Weights,
    shape: &StepShape,
) -> Result<()> {
    let (x, heads, head_dim) = (shape.activations, c.heads, c.head_dim);
    let layer = &weights.layers[0];
    let gemm = |weight: &Tensor, shape, out| product(1, shape, (x, weight.kind(), out), c.qkv_bias, false);
    let q_cols = heads * head_dim;
    let plain = MatrixKind::Plain(DType::F32);
    let mut needed = vec![
        // that of the embedding, or of rows of the rope table
        embedding(1, c.vocab, c.hidden, weights.embed.as_ref().map_or(plain, Tensor::kind)),
        OpSig::RmsNorm {
            rows: 1,
            cols: c.hidden,
            eps: Scalar(c.norm_eps),
            x: DType::F32,
            weight: layer.attn_norm.dtype,
            out: x,
        },
        OpSig::SiluMul { elements: 1, x },
    ];
    match (&layer.kv, &c.latent) {
        (KvWeights::Apart([k, v]), _) => {
            let kv_cols = c.kv_heads * head_dim;
            needed.push(gemm(&layer.q, (q_cols, c.hidden), x));
            needed.extend([k, v].map(|weight| gemm(weight, (kv_cols, c.hidden), x)));
            needed.push(gemm(&layer.o, (c.hidden, q_cols), DType::F32));
            needed.push(OpSig::Rope { tokens: 1, heads, head_dim, part: c.rotary(), x });
        }
        (KvWeights::Latent(weights), Some(latent)) => {
            needed.extend(latent.operations((&layer.q, weights), (c.hidden, heads), x));
            let columns = heads * latent.lengths.v;
            needed.push(gemm(&layer.o, (c.hidden, columns), DType::F32));
        }
        (KvWeights::Latent(_), None) => return Err(Error::invalid("latents without latent attention")),
    }
    if let Some(MlpWeights { gate, up, down, .. }) = &layer.mlp {
        let inner = c.experts_of(0).map_or(c.intermediate, |experts| experts.shared);
        needed.extend([gate, up].map(|weight| gemm(weight, (inner, c.hidden), x)));
        needed.push(gemm(down, (c.hidden, inner), DType::F32));
    }
    needed.extend(weights.head.as_ref().map(|head| gemm(&head.lm_head, (c.vocab, c.hidden), DType::F32)));
    needed.dedup();
    check_support(device, &needed)?;
    let layers = weights.layers.iter().filter_map(|layer| layer.experts.as_ref());
    match (&c.experts, layers.into_iter().next()) {
        (Some(experts), Some(weights)) => check_support(device, &of_experts(c, experts, weights, x)),
        _ => Ok(()),
    }
}

/// The operations of a layer with experts.
fn of_experts(c: &ModelConfig, experts: &Mixture, weights: &ExpertWeights, x: DType) -> Vec<OpSig> {
    let (routing, cost) = (experts.routing, experts.cost());
    let [_, gate_bias, down_bias] = weights.biases.each_ref().map(Option::is_some);
    let product = |of_tokens, n, k, (weight, bias): (&Tensor, bool)| {
        let grouped = cost.grouped(1, of_tokens);
        OpSig::GroupedGemm { grouped, n, k, x, weight: weight.kind(), out: x, bias }
    };
    let inner = experts.intermediate;
    let (rows, function) = match experts.clamped {
        Some([alpha, limit]) => (2 * inner, OpSig::ClampedSwiglu { elements: 1, alpha, limit, x }),
        None => (inner, OpSig::SiluMul { elements: 1, x }),
    };
    vec![
        function,
        OpSig::Route { tokens: 1, bias: weights.correction.is_some(), routing },
        product(true, rows, c.hidden, (&weights.gate, gate_bias)),
        product(false, c.hidden, inner, (&weights.down, down_bias)),
        OpSig::Combine { tokens: 1, active: routing.active, cols: c.hidden, x, accumulate: true },
    ]
}

/// Checks that the device supports a model's attention.
pub(super) fn check_attention(device: &dyn Device, c: &ModelConfig, shape: &StepShape) -> Result<()> {
    let (x, kv, heads) = (shape.activations, shape.kv_shape(c), c.heads);
    let wire = kv.dtype;
    let window = c.windows.iter().flatten().next().copied();
    let sinks = c.sinks.is_some();
    let (tokens, sequences, pairs, kv_tokens, pages_max) = (1, 1, 1, 1, 1);
    let needed = [
        OpSig::KvGather { tokens, wire, kv },
        OpSig::KvScatter { tokens, wire, kv },
        OpSig::KvWrite { tokens, x, kv },
        OpSig::AttnPrefill { tokens, sequences, pairs, kv_tokens, heads, pages_max, window, sinks, x, kv },
        OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv },
        OpSig::AttnMerge {
            parts: 1,
            rows: heads,
            head_dim: kv.value_dim(),
            sinks: if sinks { heads } else { 0 },
            out: x,
        },
    ];
    check_support(device, &needed)
}

/// Checks that the device supports some operations.
pub(super) fn check_support(device: &dyn Device, needed: &[OpSig]) -> Result<()> {
    match needed.iter().find(|sig| device.support(sig) == Support::No) {
        None => Ok(()),
        Some(sig) if sig.kv().is_some_and(|kv| kv.dtype.is_scaled()) => {
            let (id, dtype) = (&device.info().id, sig.kv().map(|kv| kv.dtype.name()).unwrap_or_default());
            Err(Error::unsupported(format!(
                "{id} does not keep KV in {dtype} (no {} of it); choose another --kv-dtype or device",
                sig.name()
            )))
        }
        Some(sig) => Err(Error::unsupported(format!(
            "{} cannot run {sig:?}, which this model needs; choose another device or other dtypes",
            device.info().id
        ))),
    }
}
