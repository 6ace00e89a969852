//! Implements `mixfleet validate --self-test`: which injected faults the suite detects.

use crate::backends;
use crate::failure::Failed;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::Device;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::validate::detect::TABLE_HEADER;
use mixfleet_hwtests::validate::{Detection, DetectionTrial, FaultyTrial, detect};
use mixfleet_simulated::FaultyDevice;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::Arc;

pub(crate) fn run(device: Option<&str>, json: bool) -> Result<()> {
    let base: Arc<dyn Device> = match device {
        Some(selector) => {
            let device = backends::open(selector)?;
            backends::must_compute(device.info())?;
            device
        }
        None => Arc::new(ReferenceDevice::default()),
    };
    let trial = DetectionTrial::thorough();
    let mut out = std::io::stdout().lock();
    if !json {
        writeln!(out, "{} ({}), {} seeded plans per cell", base.info().id, base.info().name, trial.seeds)?;
        writeln!(out, "{TABLE_HEADER}")?;
    }
    let progress = LevelProgress::new(trial.rows());
    let mut broken = None;
    let rows = detect(base, &wrap, &trial, &mut |row| {
        let written = || if json { Ok(()) } else { writeln!(out, "{row}").and_then(|()| out.flush()) };
        if let Err(error) = progress.see(row, written) {
            broken.get_or_insert(error);
        }
    })
    .map_err(anyhow::Error::msg)?;
    progress.bar.finish_and_clear();
    if let Some(error) = broken {
        return Err(error.into());
    }
    if json {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| {
                let mut value = json!(row);
                value["chance_per_pass"] = json!(row.chance());
                value
            })
            .collect();
        let document =
            json!({"schema": "mixfleet.validation-self-test/1", "seeds": trial.seeds, "rows": rows});
        writeln!(out, "{document:#}")?;
    }
    let missed = missed(&rows);
    if !missed.is_empty() {
        bail!(Failed(format!("the suite misses required faults: {}", missed.join("; "))));
    }
    Ok(())
}

/// Progress on standard error: a bar on a terminal, otherwise a line per level.
struct LevelProgress {
    bar: ProgressBar,
    rows: usize,
}

impl LevelProgress {
    fn new(rows: usize) -> LevelProgress {
        // The oracle takes 40 s of one core in a release build (AMD EPYC).
        eprintln!(
            "self-test: {rows} rows; about a minute on the oracle in a release build, longer on a slow device"
        );
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(rows as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}");
        bar.set_style(style.expect("a fixed template"));
        LevelProgress { bar, rows }
    }

    /// Reports `row` around its output by `write`.
    fn see(&self, row: &Detection, write: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
        self.bar.set_message(format!("level {}", row.level));
        let written = self.bar.suspend(write);
        // The first row of a level is the one without a fault.
        if self.bar.is_hidden() && row.fault.is_none() {
            eprintln!("self-test: level {}, row {} of {}", row.level, self.bar.position() + 1, self.rows);
        }
        self.bar.inc(1);
        written
    }
}

fn wrap(base: Arc<dyn Device>, plan: FaultPlan, transfers: bool) -> FaultyTrial {
    let device = FaultyDevice::new(base, plan);
    let device = Arc::new(if transfers { device.striking_transfers() } else { device });
    let (counting, striking) = (device.clone(), device.clone());
    FaultyTrial {
        device,
        operations: Box::new(move || counting.commands()),
        struck: Box::new(move || striking.struck()),
    }
}

/// Levels that must detect a fault at the highest rate.
fn must_see(fault: Fault) -> &'static [u8] {
    match fault {
        Fault::BitFlip | Fault::Drop | Fault::Stale | Fault::Fail => &[1, 2, 5],
        Fault::Slow { .. } => &[3],
        Fault::Hang => &[1, 2, 3, 5],
    }
}

fn missed(rows: &[Detection]) -> Vec<String> {
    let highest = rows.iter().map(|row| row.rate).fold(0.0, f64::max);
    let wrong = |row: &&Detection| match row.fault {
        None => row.caught > 0,
        Some(fault) => {
            let seen = row.passes > 0 && row.caught == row.passes;
            let told = fault != Fault::Hang || row.timeouts == row.passes;
            row.rate == highest && must_see(fault).contains(&row.level) && !(seen && told)
        }
    };
    rows.iter()
        .filter(wrong)
        .map(|row| row.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(level: u8, fault: Option<Fault>, caught: u64) -> Detection {
        let (rate, operations, struck_share) = (0.5, 100, 1.0);
        Detection { level, fault, rate, operations, struck_share, passes: 2, caught, timeouts: caught }
    }

    #[test]
    fn a_level_that_must_see_a_fault_and_does_not_is_named() {
        assert!(
            missed(&[row(1, None, 0), row(1, Some(Fault::Drop), 2), row(3, Some(Fault::Drop), 0)]).is_empty()
        );
        assert_eq!(missed(&[row(2, Some(Fault::Stale), 1)]).len(), 1);
        assert_eq!(missed(&[row(3, Some(Fault::Slow { times: 10 }), 0)]).len(), 1);
        assert_eq!(missed(&[row(5, None, 1)]).len(), 1, "a false alarm");
    }
}
