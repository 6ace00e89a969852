//! Decides how many samples to take.

use super::document::Flag;
use super::stats::SampleStats;
use mixfleet_hal::cast::to_u32;

/// A clock, which tests can replace.
pub trait TimeSource: Send + Sync {
    /// Returns the seconds since an arbitrary start.
    fn seconds(&self) -> f64;
}

/// The host's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct HostClock(std::time::Instant);

impl Default for HostClock {
    fn default() -> Self {
        HostClock(std::time::Instant::now())
    }
}

impl TimeSource for HostClock {
    fn seconds(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }
}

/// The effort to spend on one point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SampleBudget {
    /// Minimum number of samples.
    pub(crate) samples_min: usize,
    /// Maximum number of samples.
    pub(crate) samples_max: usize,
    /// Seconds after which no further sample starts.
    pub(crate) seconds: f64,
}

/// Samples within this share of the smallest count as steady.
const STEADY: f64 = 0.03;
/// Number of steady samples required in a row.
const STEADY_RUN: usize = 3;
/// Number of warm-up runs after which unsteadiness is accepted and flagged.
const RAMP_MAX: usize = 30;
/// Share of the time that warming up may take.
const RAMP_SHARE: f64 = 0.5;
/// Coefficient of variation above which a point is noisy.
pub(crate) const NOISE_MAX: f64 = 0.05;

/// The samples of one point.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PointSamples {
    pub(crate) stats: SampleStats,
    /// Number of runs before the samples.
    pub(crate) ramp: u32,
    pub(crate) flags: Vec<Flag>,
}

/// Calls `once`, which returns the seconds of one run, until three in a row agree; these are the first
/// samples. Then takes more.
pub(crate) fn sample<E>(
    clock: &dyn TimeSource,
    effort: SampleBudget,
    mut once: impl FnMut() -> Result<f64, E>,
) -> Result<Option<PointSamples>, E> {
    let start = clock.seconds();
    let spent = || clock.seconds() - start;
    let (mut runs, mut steady) = (Vec::new(), false);
    while !steady
        && runs.len() < RAMP_MAX
        && (runs.len() < STEADY_RUN || spent() < RAMP_SHARE * effort.seconds)
    {
        runs.push(once()?);
        steady = runs.len() >= STEADY_RUN && agree(&runs[runs.len() - STEADY_RUN..]);
    }
    let ramp = runs.len().saturating_sub(STEADY_RUN);
    let mut samples = runs.split_off(ramp);
    while samples.len() < effort.samples_max
        && (spent() < effort.seconds || samples.len() < effort.samples_min && spent() < 2.0 * effort.seconds)
    {
        samples.push(once()?);
    }
    let few = samples.len() < effort.samples_min;
    let Some(stats) = SampleStats::new(samples) else { return Ok(None) };
    let flag = |set: bool, flag| set.then_some(flag);
    let flags =
        [flag(!steady, Flag::Unsteady), flag(stats.cv > NOISE_MAX, Flag::Noisy), flag(few, Flag::FewSamples)];
    Ok(Some(PointSamples { stats, ramp: to_u32(ramp), flags: flags.into_iter().flatten().collect() }))
}

fn agree(runs: &[f64]) -> bool {
    let (least, most) = runs.iter().fold((f64::INFINITY, 0.0f64), |(l, m), &r| (l.min(r), m.max(r)));
    most <= least * (1.0 + STEADY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that advances by given numbers of nanoseconds.
    #[derive(Default)]
    struct TestClock(AtomicU64);

    impl TimeSource for TestClock {
        fn seconds(&self) -> f64 {
            self.0.load(Ordering::Relaxed) as f64 * 1e-9
        }
    }

    fn run(times: impl Fn(usize) -> f64, effort: SampleBudget) -> PointSamples {
        let (clock, mut at) = (TestClock::default(), 0);
        let once = || {
            let seconds = times(at);
            at += 1;
            clock.0.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
            Ok::<f64, Infallible>(seconds)
        };
        sample(&clock, effort, once).unwrap().unwrap()
    }

    const EFFORT: SampleBudget = SampleBudget { samples_min: 5, samples_max: 20, seconds: 1.0 };

    #[test]
    fn the_ramp_ends_when_three_agree() {
        let samples = run(|i| if i < 4 { 1e-3 * (10 - i) as f64 } else { 1e-3 }, EFFORT);
        assert_eq!((samples.ramp, samples.stats.samples.len()), (4, 20));
        assert_eq!((samples.stats.median, samples.flags), (1e-3, vec![]));
    }

    #[test]
    fn what_never_settles_is_flagged() {
        let samples = run(|i| if i % 2 == 0 { 1e-3 } else { 2e-3 }, EFFORT);
        assert_eq!(samples.flags, [Flag::Unsteady, Flag::Noisy]);
        assert_eq!(samples.ramp as usize, RAMP_MAX - STEADY_RUN);
    }

    #[test]
    fn slow_points_get_fewer_samples_and_say_so() {
        let samples = run(|_| 0.6, EFFORT);
        assert_eq!(samples.stats.samples.len(), 4);
        assert_eq!(samples.flags, [Flag::FewSamples]);
        let samples = run(|_| 0.3, EFFORT);
        assert_eq!((samples.stats.samples.len(), samples.flags.len()), (5, 0));
    }
}
