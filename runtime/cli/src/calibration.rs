//! Calibrations kept between runs, so that only the first start measures.

use anyhow::{Context, Result};
use mixfleet_runtime::engine::{Loaded, calibrate};
use mixfleet_scheduler::cost::Coefficients;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use xxhash_rust::xxh3::xxh3_128;

/// What a calibration holds for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// Device, its driver and its kernels.
    pub(crate) fingerprint: String,
    pub(crate) model: String,
    pub(crate) dtypes: String,
    pub(crate) chunk: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    schema: String,
    key: Key,
    coefficients: Coefficients,
}

/// The kept calibration, or a new one, which is kept. True if it was measured now.
pub(crate) fn get(key: Key, loaded: &Loaded, recalibrate: bool) -> Result<(Coefficients, bool)> {
    let file = file(&key);
    if !recalibrate && let Some(kept) = file.as_ref().and_then(|file| read(file, &key)) {
        return Ok((kept, false));
    }
    let id = &loaded.device().info().id;
    let coefficients = loaded.calibrate().with_context(|| format!("calibrating {id}"))?;
    if let Some(file) = file
        && let Err(error) = write(&file, key, coefficients)
    {
        tracing::warn!(%error, "the calibration cannot be kept; the next start measures again");
    }
    Ok((coefficients, true))
}

fn file(key: &Key) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    let name = xxh3_128(serde_json::to_string(key).ok()?.as_bytes());
    Some(base.join("mixfleet").join(format!("calibration-{name:032x}.json")))
}

fn read(file: &PathBuf, key: &Key) -> Option<Coefficients> {
    let document: Document = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
    (document.schema == calibrate::SCHEMA && document.key == *key).then_some(document.coefficients)
}

fn write(file: &PathBuf, key: Key, coefficients: Coefficients) -> Result<()> {
    let document = Document { schema: calibrate::SCHEMA.into(), key, coefficients };
    std::fs::create_dir_all(file.parent().expect("a file in a directory"))?;
    let partial = file.with_extension(format!("{}.partial", std::process::id()));
    std::fs::write(&partial, serde_json::to_vec_pretty(&document)?)?;
    std::fs::rename(&partial, file)?;
    Ok(())
}
