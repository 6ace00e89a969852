//! Checks that a device supports the operations of a model.

use crate::model::bind::NeededOps;
use crate::model::graph::StepShape;
use crate::model::{ModelConfig, Weights};
use mixfleet_hal::{Device, Error, OpSig, Result, Support};
use mixfleet_scheduler::layers::{AttentionSizes, KvSizes, LayerOps};

/// A step of one row that decodes and one of a prompt.
fn smallest_step() -> AttentionSizes {
    let kv = vec![KvSizes { decode_tokens: 1, prefill_pairs: 1, prefill_tokens: 1 }];
    AttentionSizes {
        tokens: 2,
        written: 1,
        decodes: 1,
        prefills: 1,
        decode_pages_max: 1,
        prefill_pages_max: 1,
        kv,
        ..AttentionSizes::default()
    }
}

/// Checks that the device supports the operations with weights that differ between models.
pub(super) fn check_products(
    device: &dyn Device,
    c: &ModelConfig,
    weights: &Weights,
    shape: &StepShape,
) -> Result<()> {
    let model = c.cost_shape(shape.activations, shape.kv, shape.block_tokens);
    let list = LayerOps { constants: c.constants(), ..LayerOps::counted(&model) };
    let row = AttentionSizes { tokens: 1, written: 1, decodes: 1, ..AttentionSizes::default() };
    let mut needed = NeededOps::of(Some((weights, 0)));
    list.embed(1, c.vocab, &mut needed);
    list.rotations(1, 1, &mut needed);
    list.attention_inputs(&row, &mut needed);
    list.attention_outputs(&row, &mut needed);
    list.mlp(1, c.experts_of(0).is_some(), &mut needed);
    list.logits(1, 1, &mut needed);
    check_support(device, &needed.finish())?;
    let Some(layer) = (0..weights.layers()).find(|&at| c.experts_of(at).is_some()) else {
        return Ok(());
    };
    let mut needed = NeededOps::of(Some((weights, layer)));
    list.mlp(1, true, &mut needed);
    check_support(device, &needed.finish())
}

/// Checks that the device supports a model's attention.
pub(super) fn check_attention(device: &dyn Device, c: &ModelConfig, shape: &StepShape) -> Result<()> {
    let model = c.cost_shape(shape.activations, shape.kv, shape.block_tokens);
    let list = LayerOps { constants: c.constants(), ..LayerOps::counted(&model) };
    let (kv, window) = (shape.kv_shape(c), c.windows.iter().flatten().next().copied());
    let mut attends = NeededOps::of(None);
    list.attend((0, window), &smallest_step(), &mut attends);
    let (tokens, wire) = (1, kv.dtype);
    let mut needed = vec![OpSig::KvGather { tokens, wire, kv }, OpSig::KvScatter { tokens, wire, kv }];
    needed.extend(attends.finish());
    check_support(device, &needed)
}

/// Checks that the device supports some operations.
pub(super) fn check_support(device: &dyn Device, needed: &[OpSig]) -> Result<()> {
    match needed.iter().find(|sig| device.support(sig) == Support::No) {
        None => Ok(()),
        Some(sig) if sig.kv().is_some_and(|kv| kv.dtype.is_scaled()) => {
            let (id, dtype) = (&device.info().id, sig.kv().map(|kv| kv.dtype.name()).unwrap_or_default());
            Err(Error::unsupported(format!(
                "{id} does not keep KV in {dtype} (no {} in that dtype); choose another --kv-dtype or device",
                sig.name()
            )))
        }
        Some(sig) => Err(Error::unsupported(format!(
            "{} cannot run {sig:?}, which this model needs; choose another device or other dtypes",
            device.info().id
        ))),
    }
}
