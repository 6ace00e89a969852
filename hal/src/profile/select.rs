//! Selects which operations are worth measuring.

use super::place::{FeaturePoint, KernelClass, coordinates, distance};
use crate::OpSig;
use std::collections::HashMap;

/// Number of candidates that a choice is evaluated on; a larger set is thinned out evenly.
const JUDGES_MAX: usize = 256;

/// Selects the `count` operations among `candidates` (all, if there are fewer) that best cover the rest. Each
/// class (kind and dtypes) gets an equal number, chosen greedily: each next one is the one that most shortens
/// the distances from all candidates to their nearest chosen one (greedy facility location; Nemhauser, Wolsey
/// & Fisher 1978: at least 63 % of the optimum).
pub fn worth_measuring(candidates: &[OpSig], count: usize) -> Vec<OpSig> {
    let (mut order, mut classes) = (Vec::new(), HashMap::<KernelClass, Vec<(OpSig, FeaturePoint)>>::new());
    for sig in candidates {
        let of = classes.entry(KernelClass::of(sig)).or_default();
        if of.is_empty() {
            order.push(KernelClass::of(sig));
        }
        of.push((*sig, coordinates(sig)));
    }
    order.sort_by_key(|class| classes[class].len());
    let mut chosen = Vec::new();
    for (index, class) in order.iter().enumerate() {
        let share = (count - chosen.len()).div_ceil(order.len() - index);
        chosen.extend(spread(&classes[class], share));
    }
    chosen
}

fn spread(candidates: &[(OpSig, FeaturePoint)], count: usize) -> Vec<OpSig> {
    let judges: Vec<&FeaturePoint> =
        candidates.iter().step_by(candidates.len().div_ceil(JUDGES_MAX)).map(|(_, at)| at).collect();
    let mut way = vec![f64::INFINITY; judges.len()];
    let mut chosen = Vec::new();
    for _ in 0..count.min(candidates.len()) {
        let total = |at: &FeaturePoint| {
            judges.iter().zip(&way).map(|(judge, way)| distance(judge, at).min(*way)).sum::<f64>()
        };
        let left = candidates.iter().filter(|(sig, _)| !chosen.contains(sig));
        let best = left.map(|(sig, at)| (total(at), sig, at)).min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((_, sig, at)) = best else { break };
        chosen.push(*sig);
        judges.iter().zip(&mut way).for_each(|(judge, way)| *way = way.min(distance(judge, at)));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn gemm((m, x): (u32, DType)) -> OpSig {
        OpSig::Gemm { m, n: 1024, k: 1024, x, weight: x, out: x, bias: false, accumulate: false }
    }

    proptest! {
        #[test]
        fn the_chosen_are_so_many_distinct_candidates(
            rows in proptest::collection::hash_set(1u32..5000, 1..60),
            others in proptest::collection::hash_set(1u32..5000, 0..60),
            count in 0usize..80,
        ) {
            let both = rows.iter().map(|m| (*m, DType::Bf16)).chain(others.iter().map(|m| (*m, DType::F32)));
            let candidates: Vec<OpSig> = both.map(gemm).collect();
            let chosen = worth_measuring(&candidates, count);
            let distinct: HashSet<OpSig> = chosen.iter().copied().collect();
            prop_assert_eq!(distinct.len(), chosen.len());
            prop_assert!(chosen.iter().all(|sig| candidates.contains(sig)));
            prop_assert_eq!(chosen.len(), count.min(candidates.len()));
        }
    }

    #[test]
    fn they_lie_all_over_the_candidates() {
        let candidates: Vec<OpSig> = (0..13).map(|power| gemm((1 << power, DType::Bf16))).collect();
        let chosen = worth_measuring(&candidates, 4);
        let near =
            |sig: &OpSig| chosen.iter().any(|one| distance(&coordinates(one), &coordinates(sig)) < 6.0);
        assert!(candidates.iter().all(near), "{chosen:?}");
    }
}
