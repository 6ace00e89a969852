//! `mixfleet devices`

use crate::args::DevicesArgs;
use crate::backends;
use anyhow::Result;
use mixfleet_hal::DeviceInfo;
use mixfleet_hal::units::GIB;
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    let mut found = Vec::new();
    let mut absent: Vec<(String, String)> = Vec::new();
    for (backend, devices) in backends::probe() {
        match devices {
            Ok(devices) => found.extend(devices),
            Err(why) => absent.push((backend.into(), why.reason)),
        }
    }
    absent.extend(backends::NOT_LOOKED_FOR.map(|(name, why)| (name.into(), why.into())));
    let mut out = std::io::stdout().lock();
    if args.json {
        let absent: Vec<_> = absent.iter().map(|(what, why)| json!({"what": what, "reason": why})).collect();
        let document = json!({"schema": "mixfleet.devices/1", "devices": found, "absent": absent});
        writeln!(out, "{document:#}")?;
        return Ok(());
    }
    for device in &found {
        write_device(&mut out, device)?;
    }
    writeln!(out, "\nnot found")?;
    for (what, why) in &absent {
        writeln!(out, "  {what:<12} {why}")?;
    }
    Ok(())
}

fn write_device(out: &mut impl Write, device: &DeviceInfo) -> Result<()> {
    let memory = device.memory.0 / GIB as f64;
    let (id, name, units) = (&device.id, &device.name, device.compute_units);
    writeln!(out, "{id:<14} {name}, {units} units, {memory:.1} GiB")?;
    for (what, value) in &device.notes {
        writeln!(out, "{:<14} {what}: {value}", "")?;
    }
    Ok(())
}
