//! Profiles of few points: the products and attention steps that tell most are measured, and the rest is
//! predicted, with the help of published measurements of other parts where they help.

use super::document::{PointStatus, ProfileDocument};
use super::work::WorkItem;
use mixfleet_hal::catalog::{lenders, part_of_driver};
use mixfleet_hal::profile::{DeviceProfile, ExpectedError, Predictor, worth_measuring};
use mixfleet_hal::{DType, OpSig};
use std::collections::HashSet;

/// Returns what to measure of `works`, with at most `count` products and attention steps, and the products
/// and attention steps that are left; the chosen ones are in `dtype`, in which a model is served.
pub(super) fn chosen(
    works: Vec<WorkItem>,
    dtype: DType,
    count: Option<usize>,
) -> (Vec<WorkItem>, Vec<WorkItem>) {
    let Some(count) = count else { return (works, Vec::new()) };
    let candidates: Vec<OpSig> =
        works.iter().filter_map(limited).filter(|sig| dtype_of(sig) == Some(dtype)).collect();
    let worth: HashSet<OpSig> = worth_measuring(&candidates, count).into_iter().collect();
    works.into_iter().partition(|work| limited(work).is_none_or(|sig| worth.contains(&sig)))
}

/// Returns how far predictions from the document's points are likely to be off, by kind of operation.
pub(super) fn expected(document: &ProfileDocument) -> Vec<ExpectedError> {
    let Some(profile) = document.measured_profile() else { return Vec::new() };
    let limited =
        |expected: &&ExpectedError| ["gemm", "attn_decode", "attn_prefill"].contains(&&*expected.op);
    predictor(&profile).expected_errors().iter().filter(limited).cloned().collect()
}

/// Returns the profile with predictions for the skipped points.
pub(super) fn completed(document: &ProfileDocument, measured: &DeviceProfile) -> DeviceProfile {
    let known: HashSet<(&str, Option<DType>)> =
        measured.points.iter().map(|point| (point.sig.name(), dtype_of(&point.sig))).collect();
    let skipped = document.points.iter().filter(|point| point.status == PointStatus::Skipped);
    let left = skipped.filter_map(|point| point.sig);
    let left = left.filter(|sig| dtype_of(sig).is_some() && known.contains(&(sig.name(), dtype_of(sig))));
    measured.completed(&predictor(measured), left)
}

/// Prepares a profile with the parts of the catalog whose measurements were published.
fn predictor(profile: &DeviceProfile) -> Predictor {
    let others: Vec<Predictor> = lenders().iter().map(|(_, lender)| lender.clone()).collect();
    // what others reach are shares of their datasheets
    let claim = part_of_driver(&profile.name).map(|part| part.profile());
    let (compute, bandwidth) =
        claim.map_or((profile.compute.clone(), profile.bandwidth), |claim| (claim.compute, claim.bandwidth));
    Predictor::borrowing(&DeviceProfile { compute, bandwidth, ..profile.clone() }, &others)
}

/// Returns the operation if the budget limits its kind.
fn limited(work: &WorkItem) -> Option<OpSig> {
    match work {
        WorkItem::Op(sig) => dtype_of(sig).map(|_| *sig),
        _ => None,
    }
}

/// Returns the dtype of weights or keys of a product or an attention step.
fn dtype_of(sig: &OpSig) -> Option<DType> {
    match *sig {
        OpSig::Gemm { weight, .. } => Some(weight),
        OpSig::AttnDecode { kv, .. } | OpSig::AttnPrefill { kv, .. } => Some(kv.dtype),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::{ProfileLevel, plan};
    use super::*;

    #[test]
    fn a_budget_limits_products_and_attention_and_leaves_the_rest() {
        let works = plan(ProfileLevel::Default, 16, &[], &[]);
        let (all, none) = chosen(works.clone(), DType::Bf16, None);
        assert_eq!((all.len(), none.len()), (works.len(), 0));
        let (measured, left) = chosen(works.clone(), DType::Bf16, Some(32));
        assert_eq!(measured.len() + left.len(), works.len());
        let limited_of = |works: &[WorkItem]| works.iter().filter_map(limited).collect::<Vec<_>>();
        let sigs = limited_of(&measured);
        assert_eq!(sigs.len(), 32);
        assert!(sigs.iter().all(|sig| dtype_of(sig) == Some(DType::Bf16)));
        for kind in ["gemm", "attn_decode", "attn_prefill"] {
            assert!(sigs.iter().filter(|sig| sig.name() == kind).count() >= 5, "{kind}");
        }
        assert_eq!(limited_of(&left).len(), left.len());
    }
}
