//! Sources of predicted step times. The order of sources, the first available of which counts:
//!
//! 1. a simulated group's own times;
//! 2. a measured profile of the device's fingerprint (`--profile`);
//! 3. the catalog's kernel times for a known part, adjusted by a calibration;
//! 4. the calibration alone.

use crate::calibration;
use crate::failure::UsageError;
use crate::model::LoadedModel;
use anyhow::Result;
use mixfleet_hal::Device;
use mixfleet_hal::catalog::{Part, part_of_driver};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_runtime::engine::Loaded;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_scheduler::cost::{CalibrationRatios, CostModel, StepCalibration};
use std::path::PathBuf;
use std::sync::Arc;

/// A measured step below this share of what the catalog predicts, or above its inverse, is worth a warning.
const SHARE_MIN: f64 = 0.5;

/// How devices are calibrated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measuring {
    /// Even if it was done before.
    pub(crate) again: bool,
    /// At few sizes, for what ends with an answer.
    pub(crate) brief: bool,
}

/// Where a cost model comes from.
enum CostModelSource {
    Group,
    Profile,
    Part(&'static Part, CalibrationRatios),
    Calibration,
}

/// The cost model of each instance, whose group may have its own.
///
/// # Errors
/// A profile of no device here; errors of the devices.
pub(crate) fn of(
    model: &LoadedModel,
    instances: Vec<(Loaded, Option<CostModel>)>,
    known: &[(PathBuf, DeviceProfile)],
    measuring: Measuring,
    env: &SharedEnv,
) -> Result<Vec<(Loaded, CostModel)>> {
    for (file, profile) in known {
        let mut devices = instances.iter().flat_map(|(loaded, _)| loaded.devices());
        if !devices.any(|device| device.info().fingerprint == profile.fingerprint) {
            let (file, of) = (file.display(), &profile.fingerprint);
            let message =
                format!("--profile {file}: it is of '{of}', and no device that serves here is that");
            return Err(UsageError(message).into());
        }
    }
    let mut predicted = Vec::new();
    for (mut loaded, of_group) in instances {
        let of = |device: &Arc<dyn Device>| {
            let mut profiles = known.iter().map(|(_, profile)| profile);
            profiles.find(|profile| profile.fingerprint == device.info().fingerprint).cloned()
        };
        let profiles: Option<Vec<DeviceProfile>> = loaded.devices().map(of).collect();
        let (cost, source) = match (of_group, profiles.as_deref()) {
            (Some(cost), _) => (cost, CostModelSource::Group),
            (None, Some([profile])) => (loaded.predicted_by(profile.clone()), CostModelSource::Profile),
            (None, Some(profiles)) if loaded.attends_apart() => {
                (loaded.predicted_by_members(profiles, &**env)?, CostModelSource::Profile)
            }
            _ => {
                let measured = calibrated(model, &mut loaded, measuring, env)?;
                let part = part_of(&loaded);
                let by_part = |part: &'static Part| {
                    let (cost, ratios) = loaded.predicted_by_part(part.best_profile(), &measured);
                    (cost, CostModelSource::Part(part, ratios))
                };
                let alone = || (loaded.predicted_by_steps(&measured), CostModelSource::Calibration);
                part.map_or_else(alone, by_part)
            }
        };
        say(&loaded, &cost, &source);
        predicted.push((loaded, cost));
    }
    Ok(predicted)
}

/// The part of the catalog that an instance of one device is.
fn part_of(loaded: &Loaded) -> Option<&'static Part> {
    let mut devices = loaded.devices();
    let first = devices.next().filter(|_| devices.next().is_none())?;
    part_of_driver(&first.info().name)
}

/// Logs the source of each prediction, in one line.
fn say(loaded: &Loaded, cost: &CostModel, source: &CostModelSource) {
    let (device, kv_tokens, chunk) = (loaded.id(), loaded.kv_capacity_tokens(), loaded.step_tokens_max());
    let rounded = |value: f64| (value * 1e6).round() / 1e6;
    let decode_step_s = rounded(cost.decode_step_s(1, 1).0);
    let prefill_tokens_per_s = (f64::from(chunk) / cost.prefill_s(0, chunk).0.max(1e-12)).round();
    let predicted_from = match source {
        CostModelSource::Group => "the catalog's kernel times of its parts".to_owned(),
        CostModelSource::Profile => "a measured profile".to_owned(),
        CostModelSource::Calibration => "a calibration".to_owned(),
        CostModelSource::Part(part, ratios) => {
            let [prefill, decode] = [ratios.prefill, ratios.decode].map(|times| 1.0 / times);
            if [prefill, decode].iter().any(|share| !(SHARE_MIN..=1.0 / SHARE_MIN).contains(share)) {
                tracing::warn!(
                    device = %device,
                    "its calibration is far from the catalog's {}: prefill at {prefill:.2} and decode at {decode:.2} \
                     of it; is the device shared, slowed down, or another part?",
                    part.id
                );
            }
            format!(
                "the catalog's {}, calibrated: prefill at {prefill:.2} and decode at {decode:.2} of its speed",
                part.id
            )
        }
    };
    tracing::info!(device = %device, prefill_tokens_per_s, decode_step_s, kv_tokens, predicted_from, "predicted");
}

/// The times of the model's own layers on the device, measured now or cached from before.
fn calibrated(
    model: &LoadedModel,
    loaded: &mut Loaded,
    Measuring { again, brief }: Measuring,
    env: &SharedEnv,
) -> Result<StepCalibration> {
    let key = calibration::CalibrationKey {
        fingerprint: loaded.fingerprint(),
        model: model.shape_digest.clone(),
        dtypes: format!("{} {}", model.activations, model.kv),
        chunk: loaded.step_tokens_max(),
        brief,
    };
    let (cost, measured) = calibration::get(key, loaded, again, &**env)?;
    tracing::debug!(device = %loaded.id(), measured, "calibrated");
    Ok(cost)
}
