//! One device from its first look to its report.

use super::facts;
use super::progress::Bar;
use super::run_log::RunLog;
use super::sign::Signer;
use crate::failure::UsageError;
use crate::machine;
use crate::{backends, built};
use anyhow::{Context, Result};
use mixfleet_hal::DeviceInfo;
use mixfleet_hwtests::validate::{
    CaseStatus, Environment, PartFile, Record, Start, Validation, ValidationPlan, groups, package, runner,
};
use std::path::{Path, PathBuf};

/// What the examinations of a run have in common.
pub(super) struct Examination<'a> {
    pub(super) part: Option<&'a PartFile>,
    pub(super) signer: Option<&'a Signer>,
    pub(super) here: &'a facts::HostFacts,
    pub(super) began_at: &'a str,
    /// Whether other devices are examined at the same time.
    pub(super) one_of_several: bool,
}

/// A device that was looked at.
pub(super) struct Looked {
    pub(super) plan: ValidationPlan,
    /// None if it did not open.
    pub(super) info: Option<DeviceInfo>,
}

/// What an examination leaves.
pub(super) struct Examined {
    pub(super) report: Validation,
    pub(super) signature: Option<PathBuf>,
}

impl Examination<'_> {
    /// Opens the device in a child first, so that a driver that crashes does not end this process.
    pub(super) fn look(&self, mut plan: ValidationPlan, start: &dyn Start) -> Result<Looked> {
        let identity = ValidationPlan { level: 0, only: vec!["l0.identity".to_owned()], ..plan.clone() };
        let looked = runner::run(&identity, start, &[], &mut |_| {});
        if let (None, [case]) = (&looked.device, &looked.cases[..])
            && case.status == CaseStatus::NotRun
            // a child has shown that this does not crash, and here its error is reported in its own type
            && let Err(error) = backends::open(&plan.device)
        {
            return Err(error);
        }
        if let Some(info) = &looked.device {
            if groups(&plan).iter().any(|group| group != "l0.discover") {
                backends::must_compute(info)?;
            }
            plan.settings.facts = self.here.about(info);
            if let Some(part) = self.part {
                part.is_about(&info.name, self.here.pci_id(info).as_deref()).map_err(UsageError)?;
            }
        }
        Ok(Looked { plan, info: looked.device })
    }

    /// Runs the plan and writes the report to `folder`, if there is one.
    pub(super) fn examine(
        &self,
        device: &Looked,
        start: &dyn Start,
        earlier: &[Record],
        folder: Option<&Path>,
    ) -> Result<Examined> {
        let plan = &device.plan;
        let mut log = RunLog::open(folder, plan, earlier.is_empty())?;
        let progress = Bar::new(plan, self.one_of_several);
        let outcome = runner::run(plan, start, earlier, &mut |record| {
            progress.see(record);
            log.add(record);
        });
        progress.finish();
        log.finish()?;
        let today = self.began_at.get(..10).unwrap_or_default();
        let report = Validation::new(plan, outcome, self.part, today);
        let mut signature = None;
        if let Some(folder) = folder {
            let environment = environment(&report, self.here, device.info.as_ref(), self.began_at.to_owned());
            package::write(folder, &report, &environment).context("cannot write the report")?;
            signature = self.signer.map(|signer| signer.sign(folder, &report)).transpose()?;
        }
        Ok(Examined { report, signature })
    }
}

fn environment(
    report: &Validation,
    here: &facts::HostFacts,
    device: Option<&DeviceInfo>,
    began_at: String,
) -> Environment {
    let commit = built::COMMIT;
    Environment {
        commit: commit.map(|commit| commit.trim_end_matches("-dirty").to_owned()),
        dirty: commit.map(|commit| commit.ends_with("-dirty")),
        features: built::features().into_iter().map(str::to_owned).collect(),
        build: built::build(),
        command: std::env::args().collect(),
        began_at,
        ended_at: machine::now(),
        host: here.host(),
        device: device.map(|info| here.about(info)).unwrap_or_default(),
        ..Environment::of(report)
    }
}
