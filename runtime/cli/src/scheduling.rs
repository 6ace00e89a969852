//! The scheduler's flags, the same for `serve` and `simulate`.

use crate::failure::UsageError;
use anyhow::Result;
use clap::{Args, ValueEnum};
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::simulate::Choices;

#[derive(Clone, Debug, Args)]
pub(crate) struct SchedulingArgs {
    /// Placement: docs/explanation/scheduling.md
    #[arg(long, value_name = "NAME", default_value = "per-dollar", hide_possible_values = true)]
    policy: PolicyName,
    /// kvcache-centric pulls prefixes longer by this factor
    #[arg(long, value_name = "X", default_value_t = 1.0, hide = true)]
    threshold: f64,
    /// Admission: none, early or prediction
    #[arg(long, value_name = "NAME", default_value = "prediction", hide_possible_values = true)]
    admit: AdmitName,
    /// Drop a request after prefill if its decode device is too busy
    #[arg(long, hide = true)]
    pub(crate) drop_late: bool,
    /// Worth of a second of waiting [default: the mean rent]
    #[arg(long, value_name = "USD", allow_negative_numbers = true, value_parser = usd, hide = true)]
    pub(crate) wait_usd_per_s: Option<f64>,
    /// Cost of KV memory that binds, in rents [default: 0]
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = weight, hide = true)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) kv_weight: f64,
    /// Share of time for trials of devices predicted slow [default: 0.01; simulate: 0]
    #[arg(long, value_name = "SHARE", value_parser = share_or_none, hide = true)]
    pub(crate) trial_share: Option<f64>,
    /// Seed of all random choices
    #[arg(long, default_value_t = 0, hide = true)]
    pub(crate) seed: u64,
}

fn usd(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|usd: &f64| usd.is_finite() && *usd >= 0.0);
    value.ok_or_else(|| "expected dollars, 0 or more".into())
}

fn share_or_none(text: &str) -> Result<f64, String> {
    let value = crate::numbers::share_or_percent(text).filter(|share| (0.0..=1.0).contains(share));
    value.ok_or_else(|| "expected a share from 0 to 1".into())
}

fn weight(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|weight: &f64| (0.0..=1e6).contains(weight));
    value.ok_or_else(|| "expected a number from 0 to 1000000".into())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyName {
    Random,
    RoundRobin,
    LeastLoaded,
    CacheAware,
    KvcacheCentric,
    PerDollar,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AdmitName {
    None,
    Early,
    Prediction,
}

impl SchedulingArgs {
    /// Returns the parsed flags.
    pub(crate) fn choices(&self) -> Result<Choices> {
        if !(self.threshold.is_finite() && self.threshold >= 0.0) {
            return Err(UsageError(format!("--threshold {} is not a factor", self.threshold)).into());
        }
        let policy = match self.policy {
            PolicyName::Random => Policy::Random,
            PolicyName::RoundRobin => Policy::RoundRobin,
            PolicyName::LeastLoaded => Policy::LeastLoaded,
            PolicyName::CacheAware => Policy::CacheAware,
            PolicyName::KvcacheCentric => Policy::KvcacheCentric { threshold: self.threshold },
            PolicyName::PerDollar => Policy::PerDollar,
        };
        let admission = match self.admit {
            AdmitName::None => Admission::None,
            AdmitName::Early => Admission::EarlyRejection,
            AdmitName::Prediction => Admission::Prediction,
        };
        Ok(Choices { policy, admission, seed: self.seed })
    }
}
