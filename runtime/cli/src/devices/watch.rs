//! `mixfleet devices --watch`: what devices do, reading after reading.

use crate::args::DevicesArgs;
use crate::backends;
use crate::screen;
use anyhow::{Context, Result};
use mixfleet_hal::units::GIB;
use mixfleet_hal::{Device, DeviceInfo, Health};
use serde_json::json;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Columns if the screen's width is unknown.
const COLUMNS: usize = 80;

/// Columns of the numbers behind a device's name.
const NUMBERS: usize = 44;

/// A device's state at a reading.
struct DeviceReading<'a> {
    info: &'a DeviceInfo,
    /// Bytes in use, by whomever; none if the device cannot tell.
    used_bytes: Option<f64>,
    health: Health,
}

/// Shows readings until the process is stopped, or the requested number.
///
/// # Errors
/// When a device that was named cannot be opened, or none can, or output fails.
pub(super) fn run(args: &DevicesArgs) -> Result<()> {
    let devices = open(&args.devices)?;
    let every = Duration::from_secs_f64(args.every);
    let mut out = screen::output(true);
    let in_place = screen::is_terminal() && !args.json;
    // loads and powers are those since the last reading
    for device in &devices {
        device.health();
    }
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        std::thread::sleep(every);
        let readings: Vec<_> = devices.iter().map(|device| read(device.as_ref())).collect();
        if args.json {
            let devices: Vec<_> = readings.iter().map(document).collect();
            writeln!(out, "{}", json!({"schema": "mixfleet.watch/1", "devices": devices}))?;
        } else {
            let lines = table(&readings, screen::columns().unwrap_or(COLUMNS));
            if shown > 0 {
                match in_place {
                    // up to the first line, and from there on nothing
                    true => out.control(&format!("\x1b[{}A\x1b[J", lines.len()))?,
                    false => writeln!(out)?,
                }
            }
            lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        }
        out.flush()?;
        shown += 1;
    }
    Ok(())
}

/// Opens the devices that were named, or all that are found and can be opened.
fn open(named: &[String]) -> Result<Vec<Arc<dyn Device>>> {
    if !named.is_empty() {
        return named.iter().map(|selector| backends::open(selector)).collect();
    }
    let found = backends::probe().into_iter().filter_map(|(_, devices)| devices.ok()).flatten();
    let mut opened = Vec::new();
    for device in found {
        match backends::open(&device.id) {
            Ok(device) => opened.push(device),
            Err(why) => tracing::warn!(device = device.id, "not watched: {why:#}"),
        }
    }
    (!opened.is_empty()).then_some(opened).context("no device can be opened; see 'mixfleet devices'")
}

fn read(device: &dyn Device) -> DeviceReading<'_> {
    let info = device.info();
    let used_bytes = device.memory_free().map(|free| (info.memory.0 - free.0).max(0.0));
    DeviceReading { info, used_bytes, health: device.health() }
}

fn document(reading: &DeviceReading<'_>) -> serde_json::Value {
    json!({
        "id": reading.info.id,
        "name": reading.info.name,
        "memory_bytes": reading.info.memory.0,
        "memory_used_bytes": reading.used_bytes,
        "health": reading.health,
    })
}

/// A line for each device below a head, none longer than `columns` unless that is less than the numbers take.
fn table(readings: &[DeviceReading<'_>], columns: usize) -> Vec<String> {
    let names: Vec<_> = readings.iter().map(|reading| (&*reading.info.id, &*reading.info.name)).collect();
    let longest = |of: fn(&(&str, &str)) -> usize| names.iter().map(of).max().unwrap_or(0);
    let ids = longest(|(id, _)| id.chars().count()).max("device".len());
    let room = columns.saturating_sub(ids + 2 + 1 + NUMBERS).min(longest(|(_, name)| name.chars().count()));
    let line = |id: &str, name: &str, numbers: &str| {
        let name: String = name.chars().take(room).collect();
        format!("{id:<ids$}  {name:<room$} {numbers}").trim_end().to_owned()
    };
    let head = cells(["memory GiB", "load", "temp", "power", "clock"]);
    let mut lines = vec![line("device", "name", &head)];
    lines.extend(readings.iter().zip(&names).map(|(reading, (id, name))| line(id, name, &numbers(reading))));
    lines
}

/// Memory, load, temperature, power and clock; a dash where the device cannot tell.
fn numbers(DeviceReading { info, used_bytes, health }: &DeviceReading<'_>) -> String {
    let gib = |bytes: f64| format!("{:.1}", bytes / GIB as f64);
    let told = |value: Option<f64>, unit: &str| value.map(|value| format!("{value:.0}{unit}"));
    let [load, temperature, power, clock] = [
        told(health.busy.map(|busy| busy * 100.0), " %"),
        told(health.temperature_c, " C"),
        told(health.power_w, " W"),
        told(health.clock_mhz, ""),
    ]
    .map(|told| told.unwrap_or("-".to_owned()));
    let memory = format!("{} of {}", used_bytes.map_or("-".to_owned(), gib), gib(info.memory.0));
    cells([&memory, &load, &temperature, &power, &clock])
}

fn cells([memory, load, temperature, power, clock]: [&str; 5]) -> String {
    format!("{memory:>16} {load:>5} {temperature:>6} {power:>7} {clock:>6}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DeviceKind;
    use mixfleet_hal::units::Bytes;

    fn device(id: &str, name: &str) -> DeviceInfo {
        DeviceInfo {
            id: id.into(),
            backend: "acme".into(),
            name: name.into(),
            kind: DeviceKind::Gpu,
            memory: Bytes(80.0 * GIB as f64),
            compute_units: 2,
            fingerprint: "f".into(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_line_fits_the_screen_and_says_what_is_not_known() {
        let long = "Acme Very Long Name Of A Part That Has Every Word Of Its Marketing In It";
        let (known, silent) = (device("acme:0", long), device("acme:10", "X1"));
        let health = Health {
            busy: Some(0.996),
            temperature_c: Some(71.4),
            power_w: Some(699.6),
            clock_mhz: Some(1980.0),
            ..Health::default()
        };
        let readings = [
            DeviceReading { info: &known, used_bytes: Some(75.25 * GIB as f64), health },
            DeviceReading { info: &silent, used_bytes: None, health: Health::default() },
        ];
        let lines = table(&readings, 80);
        assert_eq!(
            lines,
            [
                "device   name                             memory GiB  load   temp   power  clock",
                "acme:0   Acme Very Long Name Of A P     75.2 of 80.0 100 %   71 C   700 W   1980",
                "acme:10  X1                                - of 80.0     -      -       -      -",
            ]
        );
        for columns in [40, 57, 80, 120, 500] {
            let longest = table(&readings, columns).iter().map(|line| line.chars().count()).max().unwrap();
            assert!(longest <= columns.max(9 + 1 + NUMBERS), "{longest} of {columns}");
        }
        assert!(table(&readings, 200)[1].contains(long));
    }

    #[test]
    fn a_device_that_is_not_there_is_not_watched() {
        assert!(open(&["nope:0".to_owned()]).is_err_and(|error| error.is::<crate::failure::UsageError>()));
    }
}
