//! Implements `mixfleet devices`.

mod watch;

use crate::args::DevicesArgs;
use crate::backends;
use crate::screen;
use anyhow::Result;
use mixfleet_discover::{DiscoveredMachine, PciDevice, SamePart, Topology, pci_of, same_part};
use mixfleet_hal::DeviceInfo;
use mixfleet_hal::units::GIB;
use serde_json::{Value, json};
use std::io::Write;

pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    if args.watch {
        return watch::run(args);
    }
    let mut found = Vec::new();
    let mut absent: Vec<(String, String)> = Vec::new();
    for (backend, devices) in backends::probe() {
        match devices {
            Ok(devices) => found.extend(devices),
            Err(why) => absent.push((backend.into(), why.reason)),
        }
    }
    let here = DiscoveredMachine::read();
    absent.extend(here.absent.iter().map(|(name, why)| ((*name).into(), why.reason.clone())));
    let same = same_part(&found, &here.topology);
    let mut out = screen::output(args.json);
    if args.json {
        let absent: Vec<_> = absent.iter().map(|(what, why)| json!({"what": what, "reason": why})).collect();
        let devices: Vec<_> = found.iter().map(|device| document(device, &here.topology)).collect();
        let same: Vec<_> = same.iter().map(|part| same_document(part, &found)).collect();
        let document =
            json!({"schema": "mixfleet.devices/1", "devices": devices, "same_parts": same, "absent": absent});
        writeln!(out, "{document:#}")?;
        return Ok(());
    }
    write_table(&mut out, &found, &same, &absent, &here.topology)
}

/// Lists devices with their places, then the unavailable ones with reasons.
fn write_table(
    out: &mut impl Write,
    found: &[DeviceInfo],
    same: &[SamePart],
    absent: &[(String, String)],
    topology: &Topology,
) -> Result<()> {
    writeln!(out, "{:<14} name, compute units, memory", "device")?;
    for (index, device) in found.iter().enumerate() {
        write_device(out, device)?;
        write_place(out, device, topology)?;
        let first = same.iter().find(|part| part.devices[1..].contains(&index));
        if let Some(part) = first {
            let first = &found[part.devices[0]].id;
            writeln!(out, "{:<14} the same part as {first}: {}", "", part.reason)?;
        }
    }
    writeln!(out, "\nnot found")?;
    for (what, why) in absent {
        writeln!(out, "  {what:<12} {why}")?;
    }
    Ok(())
}

/// The PCI device behind a device, if its backend reports it and the topology contains it.
fn part<'a>(device: &DeviceInfo, topology: &'a Topology) -> Option<&'a PciDevice> {
    topology.device(pci_of(device)?)
}

fn nearest(part: &PciDevice, topology: &Topology) -> Vec<String> {
    topology.nearest_nics(part).into_iter().map(|nic| topology.name_of(nic)).collect()
}

/// A device and its location as JSON.
fn document(device: &DeviceInfo, topology: &Topology) -> Value {
    let mut document = json!(device);
    if let Some(part) = part(device, topology) {
        document["place"] = json!({
            "pci": part.address,
            "numa_node": part.node,
            "link": part.link,
            "nearest_nics": nearest(part, topology),
        });
    }
    document
}

fn same_document(part: &SamePart, found: &[DeviceInfo]) -> Value {
    let ids: Vec<_> = part.devices.iter().map(|&index| &found[index].id).collect();
    json!({"devices": ids, "reason": part.reason})
}

fn write_device(out: &mut impl Write, device: &DeviceInfo) -> Result<()> {
    let memory = device.memory.0 / GIB as f64;
    let (id, name) = (&device.id, &device.name);
    let units = match device.compute_units {
        0 => String::new(),
        units => format!("{units} units, "),
    };
    writeln!(out, "{id:<14} {name}, {units}{memory:.1} GiB")?;
    for (what, value) in &device.notes {
        writeln!(out, "{:<14} {what}: {value}", "")?;
    }
    Ok(())
}

fn write_place(out: &mut impl Write, device: &DeviceInfo, topology: &Topology) -> Result<()> {
    let Some(part) = part(device, topology) else { return Ok(()) };
    if let Some(link) = part.link {
        writeln!(out, "{:<14} link: {}", "", link.words())?;
    }
    if let Some(node) = part.node {
        writeln!(out, "{:<14} numa node: {node}", "")?;
    }
    let nearest = topology.nearest_nics(part);
    if let Some(nic) = nearest.first() {
        let distance = topology.distance(part, nic);
        let names: Vec<_> = nearest.iter().map(|nic| topology.name_of(nic)).collect();
        let (names, term, words) = (names.join(" or "), distance.term(), distance.words());
        writeln!(out, "{:<14} nearest NIC: {names} ({term}: {words})", "")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DeviceKind;
    use mixfleet_hal::units::Bytes;

    fn device(id: &str, name: &str, compute_units: u32) -> DeviceInfo {
        DeviceInfo {
            id: id.into(),
            backend: id.split(':').next().unwrap().into(),
            name: name.into(),
            kind: DeviceKind::Gpu,
            memory: Bytes(8.0 * GIB as f64),
            compute_units,
            fingerprint: "f".into(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_count_of_units_that_is_not_known_is_left_out() {
        let shown = |compute_units| {
            let mut out = Vec::new();
            write_device(&mut out, &device("wgpu:0", "Acme X1", compute_units)).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(shown(0).trim_end(), "wgpu:0         Acme X1, 8.0 GiB");
        assert_eq!(shown(14).trim_end(), "wgpu:0         Acme X1, 14 units, 8.0 GiB");
    }

    /// The screen of a made-up machine: what this one has would be another one on each.
    #[test]
    fn devices_show_what_they_showed_on_80_and_120_columns() {
        let mut first =
            device("cuda:0", "Acme X1 with a name that its vendor made as long as it could be", 128);
        first.notes.push(("driver".into(), "570.1".into()));
        let found = [first, device("wgpu:0", "Acme X1", 0)];
        let same = [SamePart { devices: vec![0, 1], reason: "PCI 0000:01:00.0".into() }];
        let why = "no platform: install the driver of the part, or name its directory in OCL_ICD_VENDORS for the loader";
        let absent = [("opencl".to_owned(), why.to_owned())];
        let shown = |columns: usize| {
            let mut shown = Vec::new();
            let mut out = screen::Folding::new(&mut shown, Some(columns));
            write_table(&mut out, &found, &same, &absent, &Topology::default()).unwrap();
            drop(out);
            String::from_utf8(shown).unwrap()
        };
        assert_eq!(
            shown(80),
            "\
device         name, compute units, memory
cuda:0         Acme X1 with a name that its vendor made as long as it could be,
               128 units, 8.0 GiB
               driver: 570.1
wgpu:0         Acme X1, 8.0 GiB
               the same part as cuda:0: PCI 0000:01:00.0

not found
  opencl       no platform: install the driver of the part, or name its
               directory in OCL_ICD_VENDORS for the loader
"
        );
        assert_eq!(
            shown(120),
            "\
device         name, compute units, memory
cuda:0         Acme X1 with a name that its vendor made as long as it could be, 128 units, 8.0 GiB
               driver: 570.1
wgpu:0         Acme X1, 8.0 GiB
               the same part as cuda:0: PCI 0000:01:00.0

not found
  opencl       no platform: install the driver of the part, or name its directory in OCL_ICD_VENDORS for the loader
"
        );
    }
}
