//! The shares of their datasheets that published kernels reach.

use super::{LawKind, MeasuredLaw, Part};
use crate::profile::{DeviceProfile, Evidence, EvidenceBasis as Basis, Point, Predictor};
use crate::units::{BytesPerSecond, FlopPerSecond};
use crate::{DType, KvShape, OpSig};
use serde::Serialize;
use std::sync::LazyLock;

/// Shares of datasheet rates that vLLM's kernels were measured to reach, in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MeasuredEfficiency {
    /// Catalog id of the part.
    pub id: &'static str,
    /// Share of the memory bandwidth in decode attention: 64 query and 8 KV heads of 128, context 4096, batch
    /// 32 to 64.
    pub attention_decode: f64,
    /// Share of the arithmetic rate in large matrix products.
    pub gemm: f64,
    /// Share of the memory bandwidth in matrix products of few rows.
    pub gemm_few_rows: f64,
    /// Source of the shares.
    pub source: &'static str,
}

const AICONFIGURATOR: &str = "derived from aiconfigurator's vLLM kernel tables (Apache-2.0)";

const fn vllm(id: &'static str, attention_decode: f64, gemm: f64, gemm_few_rows: f64) -> MeasuredEfficiency {
    MeasuredEfficiency { id, attention_decode, gemm, gemm_few_rows, source: AICONFIGURATOR }
}

/// A part whose shares were published as the best of all kernels. They are lowered as those of the H200 are
/// by what its kernels reach on average: 0.86 of the best rate in large products, and 0.94 in those of few
/// rows. Decode attention is the B200's.
const fn blackwell(id: &'static str, gemm: f64, gemm_few_rows: f64) -> MeasuredEfficiency {
    MeasuredEfficiency {
        id,
        attention_decode: 0.82,
        gemm,
        gemm_few_rows,
        source: "derived from aiconfigurator's TensorRT-LLM kernel tables (Apache-2.0)",
    }
}

const REACHED: &[MeasuredEfficiency] = &[
    vllm("A100-SXM-80GB", 0.63, 0.91, 0.74),
    vllm("H100-SXM-80GB", 0.88, 0.80, 0.87),
    vllm("H200-SXM-141GB", 0.83, 0.78, 0.82),
    vllm("B200-SXM", 0.82, 0.70, 0.77),
    blackwell("GB200", 0.69, 0.82),
    blackwell("B300-SXM", 0.80, 0.81),
    blackwell("GB300", 0.77, 0.79),
    vllm("L40S", 0.74, 0.64, 0.83),
    vllm("RTX-PRO-6000-SE", 0.81, 0.85, 0.82),
    vllm("ARC-PRO-B60", 0.945, 0.90, 0.92),
    MeasuredEfficiency {
        id: "RTX-4090",
        attention_decode: 0.92,
        gemm: 0.99,
        gemm_few_rows: 0.91,
        source: "derived from LLMServingSim's vLLM profile (MIT)",
    },
];

pub(super) fn reached(id: &str) -> Option<&'static MeasuredEfficiency> {
    REACHED.iter().find(|reached| reached.id == id)
}

/// Likely error when one part's laws predict another part of the same architecture: the H100 and the H200
/// predict each other to 4 to 11 %. `hal/tests/laws.rs` prints these errors.
const SAME: f64 = 0.10;
/// The same for another architecture: L40S, RTX PRO 6000 and A100 by each other, 13 to 37 %.
const ANOTHER: f64 = 0.30;
/// The same for the B200 and its kin by the H200: published runs of dense models are 5 to 13 % off
/// (docs/results/truth.md).
const BLACKWELL: f64 = 0.15;
/// Likely error of the datasheet in full: what it is off by where there are laws, 10 to 86 %.
const DATASHEET_ERROR: f64 = 0.60;
/// Share of its datasheet that a part without kernel times is taken to reach: with the error below it covers
/// what parts with kernel times reach, 0.3 to 0.9.
const UNMEASURED: f64 = 0.5;
/// Likely error of that.
const UNMEASURED_ERROR: f64 = 0.45;

/// Parts without a law of some kind; those whose laws tell most about them, nearest first: the same
/// architecture, then the same sort of memory; and how far these are likely to be off.
const RELATIVES: &[(&[&str], &[&str], f64)] = &[
    (&["A100-SXM-40GB", "A100-PCIe-80GB", "A800-SXM-80GB", "A30"], &["A100-SXM-80GB"], SAME),
    (&["A40", "A10", "A10G", "RTX-A6000"], &["A100-SXM-80GB", "L40S"], ANOTHER),
    (&["RTX-3060-12GB", "RTX-3090", "RTX-3090-Ti"], &["A100-SXM-80GB", "RTX-4090"], ANOTHER),
    (&["L4", "L40", "L20", "RTX-6000-Ada"], &["L40S"], SAME),
    (&["RTX-4080", "RTX-4090"], &["RTX-4090", "L40S"], SAME),
    (&["H100-PCIe-80GB", "H100-NVL-94GB", "H800-SXM-80GB"], &["H100-SXM-80GB"], SAME),
    (&["H200-NVL-141GB", "H20-96GB", "GH200-96GB"], &["H200-SXM-141GB"], SAME),
    (&["B200-SXM", "GB200", "B300-SXM", "GB300"], &["H200-SXM-141GB"], BLACKWELL),
    (&["RTX-PRO-6000-WS", "RTX-5070-Ti", "RTX-5080", "RTX-5090"], &["RTX-PRO-6000-SE"], SAME),
];

/// The kinds of operation and the dtypes that laws are of.
const COVERED: [(LawKind, DType); 5] = [
    (LawKind::Gemm, DType::Bf16),
    (LawKind::Gemm, DType::F8E4m3),
    (LawKind::AttnDecode, DType::Bf16),
    (LawKind::AttnDecode, DType::F8E4m3),
    (LawKind::AttnPrefill, DType::Bf16),
];

/// Returns the datasheet lowered to what kernels were measured to reach, on the part or on its relatives.
pub(super) fn profile(part: &Part) -> Option<DeviceProfile> {
    let mut profile = part.profile();
    let lenders = lenders_of(part.id);
    let borrowing = Predictor::borrowing(&profile, &lenders);
    let by_sm = by_sm(part, &profile).map(|roof| Predictor::borrowing(&roof, &lenders));
    let lending = |kind| by_sm.as_ref().filter(|_| kind == LawKind::Gemm).unwrap_or(&borrowing);
    for (kind, dtype) in COVERED {
        let (basis, error, points) = match own(part, &profile, kind, dtype) {
            Some((error, points)) => (Basis::Measured, error, points),
            None => match borrowed(part, lending(kind), kind, dtype) {
                Some((from, points)) => (Basis::Borrowed { from }, Some(relatives(part.id).1), points),
                None => (Basis::Datasheet, Some(DATASHEET_ERROR), Vec::new()),
            },
        };
        profile.provenance.evidence.push(Evidence { op: kind.name().into(), dtype, basis, error });
        profile.points.extend(points.iter().flat_map(alike));
    }
    (!profile.points.is_empty()).then_some(profile)
}

/// Parts with fewer SMs for their bandwidth than any part with kernel times, and their number of SMs.
const FEW_SMS: &[(&str, f64)] = &[("H20-96GB", 78.0)];
/// Bandwidth per SM of the H100's datasheet, of which its products of few rows reach 0.8 to 0.87
/// (`gemm.csv`): 3350 GB/s over 132 SMs. Lent shares apply to it.
const SM_BYTES_PER_S: f64 = 3350e9 / 132.0;

/// Returns the profile with the bandwidth that the part's SMs get in products, if they bound it.
fn by_sm(part: &Part, profile: &DeviceProfile) -> Option<DeviceProfile> {
    let (_, sms) = FEW_SMS.iter().find(|(id, _)| *id == part.id)?;
    let most = BytesPerSecond(sms * SM_BYTES_PER_S);
    Some(DeviceProfile { bandwidth: most, ..profile.clone() })
}

/// Returns the datasheet at [`UNMEASURED`] of its rates, for a part without kernel times.
pub(super) fn half_datasheet(part: &Part) -> DeviceProfile {
    let mut profile = part.profile();
    profile.bandwidth = BytesPerSecond(profile.bandwidth.0 * UNMEASURED);
    profile.compute.iter_mut().for_each(|(_, rate)| *rate = FlopPerSecond(rate.0 * UNMEASURED));
    profile.formats.iter_mut().for_each(|(_, rate)| *rate = FlopPerSecond(rate.0 * UNMEASURED));
    let evidence = |(kind, dtype): (LawKind, DType)| Evidence {
        op: kind.name().into(),
        dtype,
        basis: Basis::Datasheet,
        error: Some(UNMEASURED_ERROR),
    };
    profile.provenance.evidence = COVERED.map(evidence).into();
    profile
}

/// Returns the measurements of the part itself, and their error.
fn own(part: &Part, roof: &DeviceProfile, kind: LawKind, dtype: DType) -> Option<(Option<f64>, Vec<Point>)> {
    if let Some(law) = law_of(part.id, kind, dtype) {
        return Some((Some(law.error), law.points.clone()));
    }
    let (reached, wide) = (part.reached()?, dtype == DType::Bf16);
    let shares = reached.shares().into_iter().filter(|(sig, _)| wide && sig.name() == kind.name());
    let points: Vec<Point> =
        shares.map(|(sig, share)| Point { time: roof.roofline(&sig) / share, sig }).collect();
    (!points.is_empty()).then_some((None, points))
}

/// Returns what the part's relatives predict for the operations measured on the nearest of them.
fn borrowed(
    part: &Part,
    borrowing: &Predictor,
    kind: LawKind,
    dtype: DType,
) -> Option<(Vec<String>, Vec<Point>)> {
    // without units for the dtype, the datasheet's rate is that of another
    let needed = if kind == LawKind::Gemm { dtype } else { DType::Bf16 };
    part.rates.of(needed)?;
    let with_law: Vec<&str> = relatives(part.id).0.filter(|id| law_of(id, kind, dtype).is_some()).collect();
    let law = law_of(with_law.first()?, kind, dtype)?;
    let point = |point: &Point| Point { time: borrowing.time(&point.sig), ..point.clone() };
    let from = with_law.iter().map(ToString::to_string).collect();
    Some((from, law.points.iter().map(point).collect()))
}

fn law_of(id: &str, kind: LawKind, dtype: DType) -> Option<&'static MeasuredLaw> {
    super::law::laws(id).iter().find(|law| (law.kind, law.dtype) == (kind, dtype))
}

/// Returns the other parts whose laws tell most about this one, and how far these are likely to be off.
fn relatives(id: &str) -> (impl Iterator<Item = &'static str>, f64) {
    let of = RELATIVES.iter().find(|(borrow, ..)| borrow.contains(&id));
    let (lend, error) = of.map_or((&[][..], DATASHEET_ERROR), |(_, lend, error)| (*lend, *error));
    let id = id.to_owned();
    (lend.iter().copied().filter(move |lender| *lender != id), error)
}

/// Returns the parts with laws and their predictors, prepared once per process.
pub fn lenders() -> &'static [(&'static str, Predictor)] {
    static PREPARED: LazyLock<Vec<(&str, Predictor)>> = LazyLock::new(|| {
        let with_laws = super::parts().iter().filter(|part| !part.laws().is_empty());
        let prepared = |part: &Part| {
            let points = part.laws().iter().flat_map(|law| law.points.clone()).collect();
            (part.id, Predictor::new(&DeviceProfile { points, ..part.profile() }))
        };
        with_laws.map(prepared).collect()
    });
    &PREPARED
}

/// Returns the laws of a part's relatives.
fn lenders_of(id: &str) -> Vec<Predictor> {
    let of = |lender: &str| lenders().iter().find(|(known, _)| *known == lender);
    relatives(id).0.filter_map(of).map(|(_, predictor)| predictor.clone()).collect()
}

/// Returns attention with queries and KV of other dtypes.
fn attention_in(mut sig: OpSig, queries: DType, keys: DType) -> OpSig {
    if let OpSig::AttnDecode { x, kv, .. } | OpSig::AttnPrefill { x, kv, .. } = &mut sig {
        *x = queries;
        kv.dtype = keys;
    }
    sig
}

/// Returns a point as measured, and in the dtypes that run the same kernels: f16 as bf16, and attention in
/// every dtype of its surroundings.
fn alike(point: &Point) -> Vec<Point> {
    use DType::{Bf16, F8E4m3, F16};
    let with = |sig: OpSig| Point { sig, time: point.time };
    match point.sig {
        OpSig::Gemm { m, n, k, x, weight, bias, accumulate, .. } => {
            let also = if x == Bf16 { [(Bf16, Bf16), (F16, F16)].as_slice() } else { &[(x, weight)] };
            let gemm = |&(x, weight): &(DType, DType)| {
                let out = if x == F8E4m3 { Bf16 } else { x };
                with(OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate })
            };
            also.iter().map(gemm).collect()
        }
        OpSig::AttnDecode { kv, .. } => {
            let also = match kv.dtype {
                Bf16 => [(Bf16, Bf16), (F16, F16), (F8E4m3, Bf16)],
                _ => [Bf16, F16, F8E4m3].map(|x| (x, kv.dtype)),
            };
            also.map(|(x, kv)| with(attention_in(point.sig, x, kv))).into()
        }
        OpSig::AttnPrefill { .. } => {
            let also =
                [(Bf16, Bf16), (F16, F16), (F8E4m3, Bf16), (Bf16, F8E4m3), (F16, F8E4m3), (F8E4m3, F8E4m3)];
            also.map(|(x, kv)| with(attention_in(point.sig, x, kv))).into()
        }
        _ => vec![point.clone()],
    }
}

impl MeasuredEfficiency {
    /// Returns the operations at which the shares were measured; they are close enough that predictions in
    /// between stay between the shares.
    fn shares(&self) -> Vec<(OpSig, f64)> {
        let x = DType::Bf16;
        let gemm = |m, n, k| {
            let (weight, out, bias, accumulate) = (x, x, false, false);
            OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
        };
        let gemms = [(4096, 4096), (8192, 8192), (28672, 8192)].into_iter().flat_map(|(n, k)| {
            let few = [1, 16, 64].map(|m| (gemm(m, n, k), self.gemm_few_rows));
            few.into_iter().chain([1024, 4096, 16384].map(|m| (gemm(m, n, k), self.gemm)))
        });
        let attention = OpSig::AttnDecode {
            sequences: 32,
            kv_tokens: 32 * 4096,
            heads: 64,
            pages_max: 4096 / 16,
            x,
            kv: KvShape { kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: x, latent: None },
            cap: None,
        };
        gemms.chain([(attention, self.attention_decode)]).collect()
    }
}
