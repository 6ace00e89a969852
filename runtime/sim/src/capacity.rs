//! Searches for the load that a fleet sustains: the highest speed-up of a trace at which enough requests meet
//! the SLO.

use serde::Serialize;

/// Default share of requests that must meet the SLO.
pub const SHARE: f64 = 0.99;
/// Maximum ratio of the speed-up that failed to the one that passed.
pub const PRECISION: f64 = 1.02;
/// Minimum speed-up; at lower speeds no two requests of any realistic trace overlap.
pub const SPEEDUP_MIN: f64 = 1.0 / 4096.0;
/// Maximum speed-up; at higher speeds all requests of a trace arrive at once.
pub const SPEEDUP_MAX: f64 = 1_048_576.0;

/// What a probe has to find out: whether `share` of all `requests` meet the SLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Requests of the trace.
    pub requests: u64,
    /// The share of requests that must meet the SLO.
    pub share: f64,
}

impl Goal {
    /// The share that meets the SLO if `missed` requests do not and all others do.
    pub fn attainable(&self, missed: u64) -> f64 {
        self.requests.saturating_sub(missed) as f64 / self.requests.max(1) as f64
    }

    /// Whether enough requests have missed the SLO that the probe fails regardless of the others.
    pub fn is_out_of_reach(&self, missed: u64) -> bool {
        self.attainable(missed) < self.share
    }
}

/// The result of a run at one speed-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Factor by which arrivals are faster than recorded.
    pub speedup: f64,
    /// Requests per second from the trace's start to the last arrival.
    pub requests_per_s: f64,
    /// Share of all requests that met the SLO, 0 to 1. If the probe ended as soon as it was sure to fail, the
    /// share that was still possible then.
    pub slo_attainment: f64,
    /// Whether that share is enough.
    pub passed: bool,
}

impl Probe {
    /// A run at `speedup` with the goal `share`: `requests` arrived, the last one `last_at_s` after the
    /// trace's start.
    pub fn new(speedup: f64, share: f64, requests: u64, last_at_s: f64, slo_attainment: f64) -> Self {
        let requests_per_s = if last_at_s > 0.0 { requests as f64 / last_at_s } else { f64::INFINITY };
        Probe { speedup, requests_per_s, slo_attainment, passed: slo_attainment >= share }
    }
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Capacity {
    /// The highest speed-up that passed below the lowest that failed. `None` if all failed, down to
    /// [`SPEEDUP_MIN`].
    pub best: Option<Probe>,
    /// Whether any speed-up failed; if not, `best` is only a lower bound.
    pub bounded: bool,
    /// All probes, in the order of the search.
    pub probes: Vec<Probe>,
}

/// Doubles or halves from 1 until one speed-up passes and the next fails, then halves their ratio until it is
/// within [`PRECISION`]. Attainment need not decrease monotonically with load: speed-ups beyond the lowest
/// that failed are not tried.
///
/// # Errors
/// An error of `probe`, which ends the search.
pub fn search<E>(mut probe: impl FnMut(f64) -> Result<Probe, E>) -> Result<Capacity, E> {
    let mut probes = vec![probe(1.0)?];
    let (mut best, mut failed) = match probes[0] {
        first if first.passed => (Some(first), None),
        first => (None, Some(first.speedup)),
    };
    loop {
        let speedup = match (best, failed) {
            (Some(Probe { speedup, .. }), None) if speedup < SPEEDUP_MAX => 2.0 * speedup,
            (None, Some(failed)) if failed > SPEEDUP_MIN => 0.5 * failed,
            (Some(Probe { speedup, .. }), Some(failed)) if failed > PRECISION * speedup => {
                (speedup * failed).sqrt()
            }
            _ => break,
        };
        let next = probe(speedup)?;
        if next.passed {
            best = Some(next)
        } else {
            failed = Some(speedup)
        }
        probes.push(next);
    }
    Ok(Capacity { best, bounded: failed.is_some(), probes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::convert::Infallible;

    fn found(passes: impl Fn(f64) -> bool) -> Capacity {
        let probe = |speedup| {
            let slo_attainment = f64::from(u8::from(passes(speedup)));
            Ok::<_, Infallible>(Probe::new(speedup, SHARE, 100, 100.0 / speedup, slo_attainment))
        };
        search(probe).unwrap_or_else(|never| match never {})
    }

    proptest! {
        #[test]
        fn a_threshold_is_found_from_both_sides(log2 in -11.9f64..19.9) {
            let threshold = log2.exp2();
            let capacity = found(|speedup| speedup <= threshold);
            let best = capacity.best.expect("1/4096 passes").speedup;
            prop_assert!(best <= threshold && threshold < PRECISION * best, "{} {}", best, threshold);
            prop_assert!(capacity.bounded && capacity.probes.len() <= 30);
        }

        #[test]
        fn all_that_passed_lies_below_all_that_failed(bits in any::<u64>()) {
            // It passes or fails at random, in steps of a fifth of a doubling.
            let capacity = found(|speedup| (bits >> ((5.0 * (speedup.log2() + 12.0)) as u64 % 64)) & 1 == 1);
            let of = |passed| capacity.probes.iter().filter(move |p| p.passed == passed).map(|p| p.speedup);
            let (highest, lowest) = (of(true).fold(0.0, f64::max), of(false).fold(f64::INFINITY, f64::min));
            prop_assert!(highest < lowest);
            prop_assert_eq!(capacity.best.map_or(0.0, |best| best.speedup), highest);
        }
    }

    #[test]
    fn a_fleet_that_always_fails_has_no_capacity_and_one_that_never_does_no_bound() {
        let never = found(|_| false);
        assert!(never.best.is_none() && never.bounded);
        assert_eq!(never.probes.last().map(|probe| probe.speedup), Some(SPEEDUP_MIN));
        let always = found(|_| true);
        assert_eq!(always.best.map(|best| best.speedup), Some(SPEEDUP_MAX));
        assert!(!always.bounded);
    }

    #[test]
    fn an_error_ends_the_search() {
        let mut asked = 0;
        let failing = |speedup| {
            asked += 1;
            if speedup > 1.0 { Err("unreadable") } else { Ok(Probe::new(speedup, SHARE, 1, 1.0, 1.0)) }
        };
        assert_eq!(search(failing), Err("unreadable"));
        assert_eq!(asked, 2);
    }
}
