//! What one instance more of each pool brings.

use super::opened::OpenedFleet;
use super::watch::RunWatch;
use crate::trace_file::FileBar;
use anyhow::Result;
use mixfleet_hal::units::Ordered;
use mixfleet_sim::capacity::SHARE;
use mixfleet_sim::simulate::{Distribution, Results};
use serde::Serialize;
use std::fmt::Write as _;

/// Gain of attainment below which an addition does not help.
const GAIN_MIN: f64 = 1e-4;

/// The fleet with one instance more of a pool.
#[derive(Debug, Serialize)]
pub(super) struct Addition {
    pub(super) pool: String,
    /// Rent of the instance.
    pub(super) usd_per_hour: Option<f64>,
    pub(super) slo_attainment: f64,
    pub(super) ttft_s: Distribution,
    pub(super) tbt_s: Distribution,
}

/// The additions, and the best of them.
#[derive(Debug, Serialize)]
pub(super) struct Additions {
    /// Attainment without any.
    slo_attainment: f64,
    /// The share of requests that is to meet the SLO.
    share: f64,
    pub(super) each: Vec<Addition>,
    /// The pool of the cheapest with which that share does, or else of the one that gains most per dollar.
    cheapest: Option<String>,
}

impl Additions {
    /// Simulates the load with one instance more of each pool.
    pub(super) fn simulate(fleet: &OpenedFleet<'_>, results: &Results) -> Result<Self> {
        let mut each = Vec::new();
        for (at, pool) in fleet.file.pools.iter().enumerate() {
            let setup = fleet.with_one_more(at)?;
            let mut load = fleet.load()?;
            let mut watch = RunWatch::new(FileBar::new(load.progress()), &setup);
            let with = fleet.play(&mut load, &setup, &mut watch)?;
            each.push(Addition {
                pool: pool.name.clone(),
                usd_per_hour: pool.usd_per_hour,
                slo_attainment: with.slo_attainment,
                ttft_s: with.ttft_s,
                tbt_s: with.tbt_s,
            });
        }
        let slo_attainment = results.slo_attainment;
        let cheapest = cheapest(&each, slo_attainment).map(|best| best.pool.clone());
        Ok(Additions { slo_attainment, share: SHARE, each, cheapest })
    }

    /// In words.
    pub(super) fn best(&self) -> String {
        let share = 100.0 * self.share;
        match &self.cheapest {
            _ if self.slo_attainment >= self.share => format!("none is needed for {share} %"),
            None => "none helps".into(),
            Some(pool) => {
                let reaches =
                    |addition: &&Addition| addition.pool == *pool && addition.slo_attainment >= self.share;
                match self.each.iter().find(reaches) {
                    Some(_) => format!("{pool}, the cheapest with {share} % within the SLO"),
                    None => format!("{pool}, which gains most per dollar; no single one reaches {share} %"),
                }
            }
        }
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for (at, addition) in self.each.iter().enumerate() {
            let name = if at == 0 { "one more" } else { "" };
            let rent = addition.rent();
            let percent =
                [addition.slo_attainment, addition.slo_attainment - self.slo_attainment].map(|x| 100.0 * x);
            let _ = writeln!(
                text,
                "  {name:<16} {}, {rent}: {:.2} % within the SLO, {:+.2} points",
                addition.pool, percent[0], percent[1]
            );
        }
        let _ = writeln!(text, "  {:<16} {}", "best addition", self.best());
        text
    }
}

impl Addition {
    pub(super) fn rent(&self) -> String {
        self.usd_per_hour.map_or_else(|| "at an unknown price".into(), |usd| format!("${usd:.3} per hour"))
    }
}

fn cheapest(each: &[Addition], without: f64) -> Option<&Addition> {
    let rent = |addition: &Addition| addition.usd_per_hour.unwrap_or(f64::INFINITY);
    let enough = each.iter().filter(|addition| addition.slo_attainment >= SHARE);
    let per_dollar = |addition: &Addition| {
        let gain = addition.slo_attainment - without;
        // Without a price the gain alone counts, after all that have one.
        addition
            .usd_per_hour
            .map_or((false, Ordered(gain)), |usd| (true, Ordered(gain / usd.max(f64::MIN_POSITIVE))))
    };
    let helps = each.iter().filter(|addition| addition.slo_attainment - without > GAIN_MIN);
    if without >= SHARE {
        return None;
    }
    enough
        .min_by(|a, b| rent(a).total_cmp(&rent(b)))
        .or_else(|| helps.max_by_key(|addition| per_dollar(addition)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheapest_that_suffices_comes_before_the_one_that_gains_most_per_dollar() {
        let addition = |pool: &str, usd_per_hour, slo_attainment| {
            let none = Distribution::default();
            Addition { pool: pool.into(), usd_per_hour, slo_attainment, ttft_s: none, tbt_s: none }
        };
        let best = |each: &[Addition], without| cheapest(each, without).map(|best| best.pool.clone());
        let mut each =
            vec![addition("a", Some(4.0), 0.98), addition("b", Some(1.0), 0.915), addition("c", None, 0.985)];
        assert_eq!(best(&each, 0.9).as_deref(), Some("a"));
        each[1].slo_attainment = 0.925;
        assert_eq!(best(&each, 0.9).as_deref(), Some("b"));
        each.push(addition("d", Some(9.0), 0.995));
        assert_eq!(best(&each, 0.9).as_deref(), Some("d"));
        assert_eq!(best(&each, 0.99), None);
        assert_eq!(best(&each[1..2], 0.925), None);
    }
}
