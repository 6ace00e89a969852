//! Twice the load that a fleet sustains: the value of admission (Mooncake v3, section 7).

#![allow(clippy::print_stdout)]

use crate::common::{mooncake, seeds, shared};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::simulate::{Choices, Observer, Results, Sample, Setup, run};
use mixfleet_sim::trace::{ReadOptions, Requests, Trace};
use std::path::Path;

/// An SLO whose TBT is three quarters fixed step time: with 3 decode instances it binds before prefill does.
const SLO: &str = "ttft_s = 30.0\ntbt_s = 0.035\ntbt_metric = \"mean\"";

/// Load of the prefill and of the decode pool, every 5 s.
#[derive(Default)]
struct Loads(Vec<f64>, Vec<f64>);

impl Observer for Loads {
    fn interval_s(&self) -> Option<f64> {
        Some(5.0)
    }
    fn sampled(&mut self, sample: &Sample) {
        if sample.pool == 0 { self.0.push(sample.prefill_load) } else { self.1.push(sample.decode_load) }
    }
}

impl Loads {
    /// Standard deviations of both, without the beginning and the end, and their covariance.
    fn swing(&self) -> (f64, f64, f64) {
        let count = self.0.len();
        let steady = count / 20..count - count / 10;
        let (a, b) = (&self.0[steady.clone()], &self.1[steady]);
        let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
        let (mean_a, mean_b) = (mean(a), mean(b));
        let product = |v: &[f64], at: f64, w: &[f64], with: f64| {
            v.iter().zip(w).map(|(x, y)| (x - at) * (y - with)).sum::<f64>() / v.len() as f64
        };
        let (sd_a, sd_b) = (product(a, mean_a, a, mean_a).sqrt(), product(b, mean_b, b, mean_b).sqrt());
        (sd_a, sd_b, product(a, mean_a, b, mean_b))
    }
}

fn play(path: &Path, admission: Admission, seed: u64) -> (Results, (f64, f64, f64)) {
    let choices = Choices { policy: Policy::PerDollar, admission, seed };
    let mut setup = Setup::new(&mooncake((8, 3), 80.0, SLO), choices);
    setup.fleet.drop_at_decode = true;
    let trace = Trace::open(path, ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    let mut loads = Loads::default();
    let requests = trace.jitter(Seconds(3.0), seed).speedup(2.0);
    let results = run(&setup, requests, &mut loads).unwrap_or_else(|error| panic!("{error}"));
    (results, loads.swing())
}

#[test]
fn prediction_answers_most_wastes_least_and_calms_the_pools() {
    let Some(path) = shared("traces/mooncake-conversation.jsonl.zst") else { return };
    for seed in seeds() {
        let play = |admission| {
            let (r, swing) = play(&path, admission, seed);
            println!(
                "seed {seed}, {admission:?}: {:.3} good requests/s, {:.0} prefill seconds wasted, loads swing by {:.3} and {:.3}, \
                 together {:.5}",
                r.goodput_rps, r.prefill_wasted_s, swing.0, swing.1, swing.2
            );
            (r, swing)
        };
        let (none, _) = play(Admission::None);
        let (early, swings) = play(Admission::EarlyRejection);
        let (predicted, calm) = play(Admission::Prediction);
        assert!(predicted.goodput_rps > early.goodput_rps && early.goodput_rps > none.goodput_rps, "{seed}");
        assert!(
            predicted.prefill_wasted_s < 0.25 * early.prefill_wasted_s
                && early.prefill_wasted_s < none.prefill_wasted_s,
            "{seed}"
        );
        // With admission by the current load the pools swing in anti-phase.
        let together = swings.0 * swings.1;
        assert!(swings.2 < -0.1 * together && calm.2.abs() < 0.5 * swings.2.abs(), "{swings:?} {calm:?}");
        assert!(calm.0 <= 0.5 * swings.0, "{swings:?} {calm:?}");
        assert!(calm.1 < swings.1, "{swings:?} {calm:?}");
    }
}
