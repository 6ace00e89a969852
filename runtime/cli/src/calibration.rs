//! Calibrations cached between runs, so that only the first start measures.

use crate::cache;
use anyhow::{Context, Result};
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::engine::calibrate::CalibrationBudget;
use mixfleet_runtime::engine::{Loaded, calibrate, speed};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::ModelConfig;
use mixfleet_scheduler::cost::StepCalibration;
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

#[derive(Debug, Serialize, Deserialize)]
struct CalibrationDocument {
    schema: String,
    key: CalibrationKey,
    calibration: StepCalibration,
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
    let mut kept = known.iter().filter_map(|(file, key)| read(file.as_ref()?, key));
    if !recalibrate && let Some(kept) = kept.next() {
        return Ok((kept, false));
    }
    let budget = if key.brief { CalibrationBudget::BRIEF } else { CalibrationBudget::WHOLE };
    let measured = loaded.calibrate(env, budget).with_context(|| format!("calibrating {}", loaded.id()))?;
    if let Some(file) = file
        && let Err(error) = write(&file, key, &measured)
    {
        tracing::warn!(%error, "the calibration cannot be kept; the next start measures again");
    }
    Ok((measured, true))
}

/// The speeds of devices that divide a model, cached or measured now; those of equal devices are equal.
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

fn read(file: &Path, key: &CalibrationKey) -> Option<StepCalibration> {
    let document: CalibrationDocument = serde_json::from_slice(&cache::read(file)?).ok()?;
    let holds = document.schema == calibrate::SCHEMA && document.key == *key;
    (holds && document.calibration.is_complete()).then_some(document.calibration)
}

fn write(file: &Path, key: CalibrationKey, measured: &StepCalibration) -> Result<()> {
    let document =
        CalibrationDocument { schema: calibrate::SCHEMA.into(), key, calibration: measured.clone() };
    cache::write(file, &serde_json::to_vec_pretty(&document)?)
}
