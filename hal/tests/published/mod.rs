//! Published kernel times (vLLM on five GPUs, collected by ai-dynamo/aiconfigurator) as measured points.

mod further;
pub(crate) mod synthetic;
mod tables;

use mixfleet_hal::catalog;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};
use mixfleet_hal::{DType, KvShape, OpSig};

pub(crate) use further::further_in;
pub(crate) use tables::{Measured, by_part, error, law_of};
use tables::{PARTS, decodes_over, gemms_in};

/// Products in bf16.
pub(crate) fn gemms() -> Option<Measured> {
    gemms_in(DType::Bf16).map(known)
}

/// Attention of one new token over keys in bf16.
pub(crate) fn decodes() -> Option<Measured> {
    decodes_over(DType::Bf16).map(known)
}

/// Attention of whole prompts in bf16.
pub(crate) fn prefills() -> Option<Measured> {
    tables::prefills().map(known)
}

/// The rows of the devices that the bars are for; others have a test of their own.
fn known(mut measured: Measured) -> Measured {
    measured.retain(|device, _| PARTS.iter().any(|(known, _)| known == device));
    measured
}

/// A profile of `points`, with the best rates among them as its roofline.
pub(crate) fn profile(points: Vec<Point>) -> DeviceProfile {
    let best = |amount: fn(&OpSig) -> f64| {
        points.iter().map(|point| amount(&point.sig) / point.time.0).fold(0.0, f64::max)
    };
    let compute = vec![(DType::Bf16, FlopPerSecond(best(OpSig::flops)))];
    let roof = DeviceProfile::roof(compute, BytesPerSecond(best(OpSig::bytes)), Bytes(80e9));
    DeviceProfile { points, ..roof }
}

/// The catalog's datasheet of a device that further tables name; `None` if it does not know it.
pub(crate) fn datasheet_of(device: &str) -> Option<DeviceProfile> {
    if PARTS.iter().any(|(known, _)| *known == device) {
        return Some(datasheet(device));
    }
    let device = device.to_ascii_uppercase().replace('_', "-");
    let named = |id: &str| device.split('-').all(|word| id.split('-').any(|part| part == word));
    let part = catalog::parts().iter().find(|part| named(&part.id.to_ascii_uppercase()))?;
    Some(part.profile())
}

/// The datasheet of a device in these tables.
pub(crate) fn datasheet(device: &str) -> DeviceProfile {
    let (_, id) = PARTS.iter().find(|(known, _)| *known == device).expect("an entry in the catalog");
    catalog::part(id).expect("a known part").profile()
}

/// The two sizes that a model decides: columns and depth of a weight, or query heads and KV heads.
pub(crate) fn model_shape(sig: &OpSig) -> (u32, u32) {
    match *sig {
        OpSig::Gemm { n, k, .. } => (n, k),
        OpSig::AttnDecode { heads, kv: KvShape { kv_heads, .. }, .. }
        | OpSig::AttnPrefill { heads, kv: KvShape { kv_heads, .. }, .. } => (heads, kv_heads),
        _ => panic!("{} is not in the tables", sig.name()),
    }
}

/// Rows of a product, sequences of attention.
pub(crate) fn batch(sig: &OpSig) -> u32 {
    match *sig {
        OpSig::Gemm { m, .. } => m,
        OpSig::AttnDecode { sequences, .. } | OpSig::AttnPrefill { sequences, .. } => sequences,
        _ => panic!("{} is not in the tables", sig.name()),
    }
}

/// Keys of each sequence; 0 for products.
pub(crate) fn context(sig: &OpSig) -> u64 {
    match *sig {
        OpSig::AttnDecode { sequences, kv_tokens, .. } | OpSig::AttnPrefill { sequences, kv_tokens, .. } => {
            kv_tokens / u64::from(sequences)
        }
        _ => 0,
    }
}
