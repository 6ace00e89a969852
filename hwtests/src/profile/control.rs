//! Control measurements that are repeated throughout a profile: changes between readings stem from clocks,
//! neighbours or the host, not from the part.

use super::Problem;
use super::document::ProfileDocument;
use super::measure::{ProfileBench, TIMEOUT, loads_of};
use super::sampler::SampleBudget;
use super::work::gemm;
use mixfleet_hal::{DType, OpSig, Support};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rows, columns and depth of the product.
const PRODUCT: (u32, u32, u32) = (128, 512, 512);
/// Rows and length of the memory read: 8 MiB in bf16 that no cache holds.
const READ: (u32, u32) = (4096, 1024);
const EFFORT: SampleBudget = SampleBudget { samples_min: 3, samples_max: 5, seconds: 0.05 };

/// One reading of the controls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Control {
    /// Time of the reading, in seconds since the profile began.
    pub at_s: f64,
    /// Seconds that the arithmetic took, if the device supports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_s: Option<f64>,
    /// Seconds that the read took, if the device supports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_s: Option<f64>,
}

impl ProfileBench<'_> {
    /// Takes a reading.
    pub(crate) fn control(&mut self, at_s: f64) -> Result<Control, Problem> {
        let (m, n, k) = PRODUCT;
        let products = loads_of(m, n, k, false);
        let reads = [DType::Bf16, DType::F16, DType::F32].map(|x| gemm(x, 1, READ.0, READ.1, false, false));
        Ok(Control { at_s, compute_s: self.reading(&products)?, read_s: self.reading(&reads)? })
    }

    /// Returns the median time of the first operation that the device supports, if any.
    fn reading(&mut self, sigs: &[OpSig]) -> Result<Option<f64>, Problem> {
        let Some(sig) = sigs.iter().find(|sig| self.device.support(sig) != Support::No) else {
            return Ok(None);
        };
        if self.checks.require(self.device, sig, TIMEOUT).is_err() {
            return Ok(None);
        }
        match self.ground.commands(sig).and_then(|commands| self.repeat(&commands, EFFORT)) {
            Ok((samples, ..)) => Ok(Some(samples.stats.median)),
            Err(Problem::Gone(reason)) => Err(Problem::Gone(reason)),
            Err(_) => Ok(None),
        }
    }
}

/// Returns the relative difference between the control readings around `at_a` of one profile and around
/// `at_b` of another. A difference between points measured at these times may be due to the surroundings by
/// as much. 0 without readings.
pub(crate) fn drift(a: &ProfileDocument, at_a: f64, b: &ProfileDocument, at_b: f64) -> f64 {
    let (of_a, of_b) = (around(&a.controls, at_a), around(&b.controls, at_b));
    let mut most = 0.0f64;
    for x in &of_a {
        for y in &of_b {
            for pair in [x.compute_s.zip(y.compute_s), x.read_s.zip(y.read_s)] {
                let ratio = pair.filter(|(x, y)| *x > 0.0 && *y > 0.0).map_or(1.0, |(x, y)| x / y);
                most = most.max(ratio.max(1.0 / ratio) - 1.0);
            }
        }
    }
    most
}

/// Returns the last reading before `at_s` and the first one after it.
fn around(controls: &[Control], at_s: f64) -> Vec<Control> {
    let before = controls.iter().rev().find(|control| control.at_s <= at_s);
    let after = controls.iter().find(|control| control.at_s > at_s);
    before.into_iter().chain(after).copied().collect()
}
