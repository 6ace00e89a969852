//! Calibrations cached between runs, so that only the first start measures.

use crate::cache;
use anyhow::{Context, Result};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::engine::calibrate::CalibrationBudget;
use mixfleet_runtime::engine::{Loaded, calibrate, speed};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::{ModelConfig, utc_day};
use mixfleet_scheduler::cost::{ModelShape, StepCalibration};
use mixfleet_sim::fleet_file::OwnCalibration;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;

/// What a calibration is valid for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CalibrationKey {
    /// The device, its driver and its kernels.
    pub(crate) fingerprint: String,
    /// Digest of the model's shape, since the values of weights do not affect a step's time.
    pub(crate) model: String,
    pub(crate) dtypes: String,
    pub(crate) chunk: u32,
    /// Whether it is of few sizes ([`CalibrationBudget::BRIEF`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) brief: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct CalibrationDocument {
    schema: String,
    key: CalibrationKey,
    calibration: StepCalibration,
    /// What simulations and plans find it by; versions before this one wrote none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    of: Option<CalibrationSubject>,
}

/// The model and the day of a calibration.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct CalibrationSubject {
    shape: ModelShape,
    measured_on: String,
}

/// The cached calibration, or a new one, which is cached. True if it was measured now.
pub(crate) fn get(
    key: CalibrationKey,
    loaded: &mut Loaded,
    recalibrate: bool,
    env: &dyn Env,
) -> Result<(StepCalibration, bool)> {
    let whole = CalibrationKey { brief: false, ..key.clone() };
    let file = cache::file("calibration", &key);
    // a whole one serves for a brief one
    let known = [(cache::file("calibration", &whole), &whole), (file.clone(), &key)];
    let mut kept = known.iter().filter_map(|(file, key)| Some((file.as_ref()?, read(file.as_ref()?, key)?)));
    if !recalibrate && let Some((file, kept)) = kept.next() {
        if kept.of.is_none() {
            keep(file, &CalibrationDocument { of: Some(subject(loaded, env)), ..kept.clone() });
        }
        return Ok((kept.calibration, false));
    }
    let budget = if key.brief { CalibrationBudget::BRIEF } else { CalibrationBudget::WHOLE };
    let measured = loaded.calibrate(env, budget).with_context(|| format!("calibrating {}", loaded.id()))?;
    if let Some(file) = file {
        let (schema, of) = (calibrate::SCHEMA.into(), Some(subject(loaded, env)));
        keep(&file, &CalibrationDocument { schema, key, calibration: measured.clone(), of });
    }
    Ok((measured, true))
}

fn subject(loaded: &Loaded, env: &dyn Env) -> CalibrationSubject {
    CalibrationSubject { shape: loaded.cost_shape(), measured_on: utc_day(to_u64(env.unix_time().0)) }
}

fn keep(file: &Path, document: &CalibrationDocument) {
    let written = serde_json::to_vec_pretty(document).map_err(Into::into);
    if let Err(error) = written.and_then(|text| cache::write(file, &text)) {
        tracing::warn!(%error, "the calibration cannot be kept; the next start measures again");
    }
}

/// The calibrations that are kept of a device.
pub(crate) fn kept_of(fingerprint: &str) -> Vec<OwnCalibration> {
    let of_device = |bytes: Vec<u8>| {
        let CalibrationDocument { schema, key, calibration, of } = serde_json::from_slice(&bytes).ok()?;
        let CalibrationSubject { shape, measured_on } = of?;
        let holds = schema == calibrate::SCHEMA && key.fingerprint == fingerprint;
        (holds && calibration.is_complete()).then_some(OwnCalibration {
            shape,
            steps: calibration,
            measured_on,
            brief: key.brief,
        })
    };
    cache::files("calibration").iter().filter_map(|file| of_device(cache::read(file)?)).collect()
}

/// The speeds of devices that share a model, cached or measured now; equal devices have equal speeds.
pub(crate) fn speeds(
    devices: &[Arc<dyn Device>],
    config: &ModelConfig,
    shape_digest: &str,
    activations: DType,
    again: bool,
) -> Result<Vec<f64>> {
    let fingerprint = |device: &Arc<dyn Device>| device.info().fingerprint.clone();
    if devices.iter().all(|device| fingerprint(device) == fingerprint(&devices[0])) {
        return Ok(vec![1.0; devices.len()]);
    }
    let mut known: Vec<(String, f64)> = Vec::new();
    let of = |device: &Arc<dyn Device>| {
        let own = fingerprint(device);
        if let Some((_, speed)) = known.iter().find(|(of, _)| *of == own) {
            return Ok(*speed);
        }
        let file = cache::file("speed", &(&own, shape_digest, activations.to_string()));
        let kept = file
            .as_ref()
            .filter(|_| !again)
            .and_then(|file| serde_json::from_slice(&cache::read(file)?).ok());
        let speed = match kept {
            Some(speed) => speed,
            None => speed::products_per_s(&**device, config, activations)
                .with_context(|| format!("measuring the speed of {}", device.info().id))?,
        };
        if let (None, Some(file)) = (kept, file) {
            // the next start measures again
            let _ = cache::write(&file, &serde_json::to_vec(&speed)?);
        }
        tracing::info!(device = %device.info().id, products_per_s = speed, "its share of the model is in proportion");
        known.push((own, speed));
        Ok(speed)
    };
    devices.iter().map(of).collect()
}

fn read(file: &Path, key: &CalibrationKey) -> Option<CalibrationDocument> {
    let document: CalibrationDocument = serde_json::from_slice(&cache::read(file)?).ok()?;
    let holds = document.schema == calibrate::SCHEMA && document.key == *key;
    (holds && document.calibration.is_complete()).then_some(document)
}
