//! What each operation does to digests. There is no arithmetic: the profile determines the time, and the
//! answer is a hash.

mod attention;
mod experts;
mod kv;
mod logits;
mod rows;

use crate::memory::{BufferContents, WriteEffect};
use mixfleet_hal::{Cmd, DType, OpSig, Result};

/// Identifies the operation in a mix, so that no two operations mix alike.
#[derive(Clone, Copy)]
enum Tag {
    Embed = 1,
    RmsNorm,
    Gemm,
    Accumulate,
    Rope,
    SiluMul,
    Add,
    Key,
    Value,
    Attention,
    Swiglu,
    Route,
    Combine,
    CopyColumns,
    GeluMul,
    SoftCap,
}

/// Runs one command.
///
/// # Errors
/// `Invalid` for another device's buffers and for out-of-range indices.
pub(crate) fn run(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let args = cmd.args();
    match *cmd.sig() {
        OpSig::Embed { .. } => rows::embed(store, cmd),
        OpSig::RmsNorm { .. } => rows::rms_norm(store, cmd),
        OpSig::QuantisedEmbed { .. } => rows::quantised_embed(store, cmd),
        OpSig::Gemm { .. } | OpSig::QuantisedGemm { .. } => rows::gemm(store, cmd),
        OpSig::Rope { .. } => rows::rope(store, cmd),
        OpSig::CopyColumns { .. } => rows::copy_columns(store, cmd),
        OpSig::SiluMul { x, .. } => rows::elementwise(store, Tag::SiluMul, args, x),
        OpSig::GeluMul { x, .. } => rows::elementwise(store, Tag::GeluMul, args, x),
        OpSig::Add { x, .. } => rows::elementwise(store, Tag::Add, args, x),
        OpSig::SoftCap { .. } => {
            let x = &args[0];
            rows::elementwise(store, Tag::SoftCap, &[x.clone(), x.clone(), x.clone()], DType::F32)
        }
        OpSig::ClampedSwiglu { .. } => experts::swiglu(store, cmd),
        OpSig::Route { .. } => experts::route(store, cmd),
        OpSig::GroupedGemm { .. } => experts::grouped_gemm(store, cmd),
        OpSig::Combine { .. } => experts::combine(store, cmd),
        OpSig::Sample { .. } => logits::sample(store, cmd),
        OpSig::KvWrite { .. } => kv::write(store, cmd),
        OpSig::KvGather { .. } => kv::gather(store, cmd),
        OpSig::KvScatter { .. } => kv::scatter(store, cmd),
        OpSig::AttnPrefill { .. } => attention::prefill(store, cmd),
        OpSig::AttnDecode { .. } => attention::decode(store, cmd),
        OpSig::AttnMerge { .. } => attention::merge(store, cmd),
        OpSig::Copy { .. } => {
            let bytes = store.bytes(&args[0])?.to_vec();
            store.edit(&args[1], WriteEffect::Any)?.copy_from_slice(&bytes);
            Ok(())
        }
        OpSig::Fill { word, .. } => {
            let out = store.edit(&args[0], WriteEffect::Any)?;
            out.as_chunks_mut::<4>().0.fill(word.to_le_bytes());
            Ok(())
        }
    }
}
