//! Implements `mixfleet profile check`: whether a file is a profile, and its faults if not.

use crate::failure::Failed;
use crate::screen;
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hwtests::profile::{Conformance, ProfileDocument, conform, device_profile_schema, measured};
use mixfleet_sim::engine_profile::EngineProfile;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// A profile, device profile or engine profile, as JSON (docs/reference/profile-format.md)
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Errors that are printed.
const SHOWN_MAX: usize = 20;

/// The verdict on a file.
struct FileVerdict {
    /// The schema that it names.
    schema: String,
    errors: Vec<String>,
    warnings: Vec<String>,
    /// What it holds, if it is a profile.
    holds: String,
}

pub(super) fn run(args: &CheckArgs) -> Result<()> {
    let file = args.file.display();
    let text = mixfleet_hal::files::read_text(&args.file).with_context(|| format!("cannot read {file}"))?;
    let FileVerdict { schema, errors, warnings, holds } = judge(&text);
    let mut out = screen::output(args.json);
    if args.json {
        let document = json!({
            "schema": "mixfleet.profile-check/1",
            "file": args.file,
            "of": schema,
            "conforms": errors.is_empty(),
            "errors": errors,
            "warnings": warnings,
        });
        writeln!(out, "{document:#}")?;
    } else {
        for error in errors.iter().take(SHOWN_MAX) {
            writeln!(out, "error: {error}")?;
        }
        if errors.len() > SHOWN_MAX {
            writeln!(out, "... and {} further errors", errors.len() - SHOWN_MAX)?;
        }
        for warning in &warnings {
            writeln!(out, "warning: {warning}")?;
        }
        if errors.is_empty() {
            writeln!(out, "{file} conforms to {schema}: {holds}")?;
        }
    }
    match errors.len() {
        0 => Ok(()),
        1 => Err(Failed(format!("{file} does not conform: {}", errors[0])).into()),
        count => Err(Failed(format!("{file} does not conform: {count} errors")).into()),
    }
}

fn judge(text: &str) -> FileVerdict {
    let failed = |schema: &str, error: String| FileVerdict {
        schema: schema.into(),
        errors: vec![error],
        warnings: Vec::new(),
        holds: String::new(),
    };
    let document: Value = match serde_json::from_str(text) {
        Ok(document) => document,
        Err(error) => return failed("", format!("it is not JSON: {error}")),
    };
    let named = document.get("schema").and_then(Value::as_str).unwrap_or_default();
    let (schema, read) = match named {
        DeviceProfile::SCHEMA => (device_profile_schema(), device(text)),
        ProfileDocument::SCHEMA => (ProfileDocument::json_schema(), device(text)),
        EngineProfile::SCHEMA => (EngineProfile::json_schema(), engine(text)),
        other => {
            let known = [DeviceProfile::SCHEMA, EngineProfile::SCHEMA, ProfileDocument::SCHEMA].join("', '");
            return failed(other, format!("schema is '{other}'; this version knows '{known}'"));
        }
    };
    let Conformance { errors: deviations, unknown } = conform(&schema, &document);
    let unknown = unknown.iter().map(|field| format!("{field} is unknown and ignored"));
    let (mut errors, mut warnings) = (Vec::new(), Vec::new());
    let mut holds = String::new();
    match read {
        Ok(summary) => {
            holds = summary;
            warnings = deviations;
        }
        Err(why) if deviations.is_empty() => errors.push(why),
        Err(_) => errors = deviations,
    }
    warnings.extend(unknown);
    FileVerdict { schema: named.into(), errors, warnings, holds }
}

/// What a device's profile holds, in words.
fn device(text: &str) -> Result<String, String> {
    let profile = measured(text)?;
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for point in &profile.points {
        match kinds.iter_mut().find(|(name, _)| *name == point.sig.name()) {
            Some((_, count)) => *count += 1,
            None => kinds.push((point.sig.name(), 1)),
        }
    }
    let kinds: Vec<String> = kinds.iter().map(|(name, count)| format!("{count} {name}")).collect();
    let name = if profile.name.is_empty() { "a device" } else { &profile.name };
    Ok(format!(
        "{name}, {:.1} GB, {} points ({})",
        profile.memory.0 / 1e9,
        profile.points.len(),
        kinds.join(", ")
    ))
}

/// What an engine's profile holds, in words.
fn engine(text: &str) -> Result<String, String> {
    let profile = EngineProfile::from_json(text)?.ok_or("its schema is another")?;
    let EngineProfile { engine, model, device, devices, .. } = &profile;
    let layers = profile.dense.len() + profile.per_sequence.len();
    let points = profile.attention.len();
    Ok(format!(
        "{model} with {engine} on {devices} x {device}, {layers} layers, {points} points of attention"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DType;
    use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};

    #[test]
    fn a_profile_conforms_and_what_is_wrong_is_named() {
        let compute = vec![(DType::Bf16, FlopPerSecond(1e14))];
        let profile = DeviceProfile::roof(compute, BytesPerSecond(1e12), Bytes(24e9));
        let document = serde_json::to_value(profile).unwrap();
        let verdict = judge(&document.to_string());
        assert_eq!((verdict.errors.len(), verdict.warnings.len()), (0, 0), "{:?}", verdict.errors);
        assert!(verdict.holds.contains("24.0 GB, 0 points"));
        let changed = |name: &str, value: Option<Value>| {
            let mut document = document.clone();
            match value {
                Some(value) => document[name] = value,
                None => drop(document.as_object_mut().unwrap().remove(name)),
            }
            judge(&document.to_string())
        };
        for required in ["fingerprint", "compute", "bandwidth", "memory", "launch", "points"] {
            let error = &changed(required, None).errors[0];
            assert!(error.starts_with(&format!("{required} is missing; add it: ")), "{error}");
        }
        assert!(changed("schema", None).errors[0].contains("schema is ''; this version knows"));
        let unknown = changed("colour", Some("red".into()));
        assert_eq!(
            (unknown.errors.len(), &unknown.warnings[..]),
            (0, &["colour is unknown and ignored".into()][..])
        );
        let error = &changed("memory", Some("much".into())).errors[0];
        assert!(error.contains("memory is \"much\"; expected a value of type number"), "{error}");
        // Of the right type, and no memory.
        assert!(changed("memory", Some(0.into())).errors[0].contains("its memory is 0e0"));
        assert!(judge("{").errors[0].contains("not JSON"));
    }
}
