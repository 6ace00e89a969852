//! The weights of an average of predictions, from the error of each.

/// Weight of the errors in other kinds of operation: a device that is unlike others in one kind is likely to
/// be so in all, and a kind has few points.
const OTHER_KINDS: f64 = 0.5;
/// Share of the error without other devices that the average must save to consist of them alone; if it saves
/// less, they get a proportional weight.
const SAVING: f64 = 0.2;
/// Penalty on the squared differences between others' shares: few points do not tell them apart.
const EVEN: f64 = 0.05;
/// Own share above which others get nothing: they are too unlike.
const OWN_MAX: f64 = 0.6;
/// Step at which the search for the weights ends.
const STEP_MIN: f64 = 0.01;

/// What predictions of one point missed it by when they did not know it.
pub(super) struct Miss {
    /// The kind of operation.
    pub(super) kind: &'static str,
    /// ln(predicted / measured) by the device's own points, and by each of the others.
    pub(super) by: Vec<f64>,
}

/// Returns the weights, of sum 1, with which an average of the predictions misses least; `None` if no point
/// of this kind was left out. The first is that of the device's own points.
pub(super) fn shares(kind: &str, misses: &[&Miss]) -> Option<Vec<f64>> {
    let count = misses.iter().find(|miss| miss.kind == kind)?.by.len();
    let others = (count - 1) as f64;
    let of = |miss: &&Miss| if miss.kind == kind { 1.0 } else { OTHER_KINDS };
    let points: f64 = misses.iter().map(of).sum();
    let mean = |by: &dyn Fn(&[f64]) -> f64| {
        misses.iter().map(|miss| of(miss) * by(&miss.by).abs()).sum::<f64>() / points
    };
    let alone = mean(&|by| by[0]);
    let cost = |shares: &[f64]| {
        let missed = mean(&|by| by.iter().zip(shares).map(|(miss, share)| miss * share).sum());
        let borrowed = 1.0 - shares[0];
        let uneven: f64 = shares[1..].iter().map(|share| (share - borrowed / others).powi(2)).sum();
        missed + SAVING * alone * borrowed + EVEN * uneven
    };
    let best = descend(vec![1.0 / count as f64; count], cost);
    Some(if best[0] > OWN_MAX { own(count) } else { best })
}

/// Returns the weights that rely on the device's own points alone.
fn own(count: usize) -> Vec<f64> {
    (0..count).map(|index| if index == 0 { 1.0 } else { 0.0 }).collect()
}

/// Lowers a cost over weights of sum 1 by moving ever smaller shares from one to another; at its kinks it may
/// end a little above the least.
fn descend(mut shares: Vec<f64>, cost: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let count = shares.len();
    let (mut least, mut step) = (cost(&shares), 0.5_f64);
    while step > STEP_MIN {
        let mut moved = false;
        for (from, to) in (0..count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            let share = step.min(shares[from]);
            if from == to || share <= 0.0 {
                continue;
            }
            let before = (shares[from], shares[to]);
            shares[from] -= share;
            shares[to] += share;
            let new = cost(&shares);
            if new < least - 1e-12 {
                (least, moved) = (new, true);
            } else {
                (shares[from], shares[to]) = before;
            }
        }
        if !moved {
            step /= 2.0;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of one kind with these misses by own points and by others.
    fn misses<const N: usize>(kind: &'static str, by: [f64; N], count: usize) -> Vec<Miss> {
        let sign = |index: usize| if index.is_multiple_of(2) { 1.0 } else { -1.0 };
        (0..count).map(|index| Miss { kind, by: by.map(|miss| miss * sign(index)).into() }).collect()
    }

    fn shares(kind: &str, misses: &[Miss]) -> Option<Vec<f64>> {
        super::shares(kind, &misses.iter().collect::<Vec<_>>())
    }

    #[test]
    fn others_that_miss_less_are_taken_and_those_that_miss_more_are_not() {
        let good = shares("gemm", &misses("gemm", [0.3, 0.05, 0.4], 8)).unwrap();
        assert!(good[1] > 0.6 && good[0] < 0.1, "{good:?}");
        assert!((good.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        let bad = shares("gemm", &misses("gemm", [0.1, 0.3, 0.4], 8)).unwrap();
        assert_eq!(bad, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn others_that_save_little_get_nothing() {
        let equal = shares("gemm", &misses("gemm", [0.10, 0.095, 0.098], 8)).unwrap();
        assert_eq!(equal, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_device_that_is_unlike_others_in_most_kinds_is_so_in_all() {
        let few = misses("gemm", [0.12, 0.10, 0.08], 4);
        let alone = shares("gemm", &few).unwrap();
        assert!(alone[0] < 0.5, "{alone:?}");
        let all: Vec<Miss> = few.into_iter().chain(misses("decode", [0.1, 0.9, 0.8], 20)).collect();
        assert_eq!(shares("gemm", &all).unwrap(), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn opposite_misses_cancel() {
        let both = shares("gemm", &misses("gemm", [0.2, -0.2], 8)).unwrap();
        assert!((both[0] - 0.5).abs() < 0.02, "{both:?}");
    }

    #[test]
    fn a_kind_without_points_has_no_weights_of_its_own() {
        assert_eq!(shares("gemm", &misses("decode", [0.1, 0.2, 0.3], 8)), None);
    }
}
