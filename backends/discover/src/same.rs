//! Identifies devices of different backends that are the same part.

use crate::{PciAddress, PciDevice, Topology};
use mixfleet_hal::{DeviceInfo, DeviceKind};
use std::collections::BTreeMap;

/// Devices that are the same part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamePart {
    /// Indices into the list of devices, ascending; two or more.
    pub devices: Vec<usize>,
    /// How this is known, in words.
    pub reason: String,
}

/// What identifies a part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PartIdentity {
    Host,
    Pci(PciAddress),
    Uuid(String),
}

impl PartIdentity {
    fn reason(&self) -> String {
        match self {
            PartIdentity::Host => "the host's cores".into(),
            PartIdentity::Pci(address) => format!("PCI address {address}"),
            PartIdentity::Uuid(uuid) => format!("unique id {uuid}"),
        }
    }
}

/// Normalises ids: `GPU-01ab...`, `01AB-...` and `01ab...` are the same.
fn plain_uuid(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let digits: String = text.trim_start_matches("gpu-").chars().filter(|c| *c != '-').collect();
    let real = digits.bytes().all(|b| b.is_ascii_hexdigit()) && digits.bytes().any(|b| b != b'0');
    (real && digits.len() >= 8).then_some(digits)
}

fn note<'a>(device: &'a DeviceInfo, name: &str) -> Option<&'a str> {
    device.notes.iter().find(|(what, _)| what == name).map(|(_, value)| value.as_str())
}

/// Returns the PCI address in a device's notes.
pub fn pci_of(device: &DeviceInfo) -> Option<PciAddress> {
    note(device, "pci")?.parse().ok()
}

impl Topology {
    /// Returns the PCI address of `device`: the one that its backend reports, or that of the part with its
    /// unique id; `None` for cores and simulated devices. What a device of another machine reports is an
    /// address there.
    pub fn address_of(&self, device: &DeviceInfo) -> Option<PciAddress> {
        match device.kind {
            DeviceKind::Cpu | DeviceKind::Simulated => return None,
            DeviceKind::Gpu | DeviceKind::Accelerator => {}
        }
        let uuid = note(device, "uuid").and_then(plain_uuid);
        let has_id = |part: &&PciDevice| uuid.is_some() && part.uuid.as_deref().and_then(plain_uuid) == uuid;
        pci_of(device).or_else(|| self.pci.iter().find(has_id).map(|part| part.address))
    }
}

fn identities(device: &DeviceInfo, topology: &Topology) -> Vec<PartIdentity> {
    match device.kind {
        // a CPU runtime (PoCL, llvmpipe) uses the host's CPU
        DeviceKind::Cpu => return vec![PartIdentity::Host],
        DeviceKind::Simulated => return Vec::new(),
        DeviceKind::Gpu | DeviceKind::Accelerator => {}
    }
    let uuid = note(device, "uuid").and_then(plain_uuid);
    let pci = topology.address_of(device);
    pci.map(PartIdentity::Pci).into_iter().chain(uuid.map(PartIdentity::Uuid)).collect()
}

/// Groups the `devices` that are the same part: by the PCI address (note `pci`) or the unique id (note
/// `uuid`) that their backends report, with the address that `topology` knows for an id. CPUs are the host's
/// cores. Devices of one backend with different ids stay separate even at one address, since they are slices
/// of a part (MIG).
pub fn same_part(devices: &[DeviceInfo], topology: &Topology) -> Vec<SamePart> {
    let mut owners: BTreeMap<PartIdentity, Vec<usize>> = BTreeMap::new();
    for (index, device) in devices.iter().enumerate() {
        for identity in identities(device, topology) {
            owners.entry(identity).or_default().push(index);
        }
    }
    let mut groups: Vec<SamePart> = Vec::new();
    for (identity, members) in owners {
        for &index in &members[1..] {
            join(&mut groups, members[0], index, &identity, devices);
        }
    }
    groups.retain(|group| group.devices.len() > 1);
    groups.sort_by_key(|group| group.devices[0]);
    groups
}

fn join(groups: &mut Vec<SamePart>, a: usize, b: usize, identity: &PartIdentity, devices: &[DeviceInfo]) {
    let mut take = |index: usize| match groups.iter().position(|group| group.devices.contains(&index)) {
        Some(place) => groups.remove(place),
        None => SamePart { devices: vec![index], reason: String::new() },
    };
    let mut first = take(a);
    if first.devices.contains(&b) {
        groups.push(first);
        return;
    }
    let second = take(b);
    let slices = |&a: &usize, &b: &usize| {
        let uuids = note(&devices[a], "uuid").zip(note(&devices[b], "uuid"));
        devices[a].backend == devices[b].backend && uuids.is_some_and(|(a, b)| !a.eq_ignore_ascii_case(b))
    };
    if first.devices.iter().any(|a| second.devices.iter().any(|b| slices(a, b))) {
        groups.extend([first, second]);
        return;
    }
    first.devices.extend(second.devices);
    first.devices.sort_unstable();
    if first.reason.is_empty() {
        first.reason = if second.reason.is_empty() { identity.reason() } else { second.reason };
    }
    groups.push(first);
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::Bytes;

    fn device(id: &str, kind: DeviceKind, notes: &[(&str, &str)]) -> DeviceInfo {
        DeviceInfo {
            id: id.into(),
            backend: id.split(':').next().unwrap().into(),
            name: id.into(),
            kind,
            memory: Bytes(0.0),
            compute_units: 1,
            fingerprint: id.into(),
            notes: notes.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect(),
        }
    }

    fn ids(groups: &[SamePart], devices: &[DeviceInfo]) -> Vec<Vec<String>> {
        let names = |group: &SamePart| group.devices.iter().map(|&i| devices[i].id.clone()).collect();
        groups.iter().map(names).collect()
    }

    #[test]
    fn cpus_are_the_host_and_gpus_meet_by_address_or_id() {
        use DeviceKind::{Cpu, Gpu, Simulated};
        let devices = [
            device("cpu", Cpu, &[]),
            device("cuda:0", Gpu, &[("pci", "00000000:1B:00.0"), ("uuid", "GPU-0badcafe-1")]),
            device("cuda:1", Gpu, &[("pci", "0000:43:00.0"), ("uuid", "GPU-0badcafe-2")]),
            device("opencl:0", Cpu, &[]),
            device("opencl:1", Gpu, &[("pci", "0000:43:00.0")]),
            device("wgpu:0", Gpu, &[("uuid", "0BADCAFE1")]),
            device("wgpu:1", Cpu, &[("uuid", "00000000")]),
            device("wgpu:2", Gpu, &[("uuid", "0000000000000000")]),
            device("sim:h100", Simulated, &[("pci", "0000:43:00.0")]),
        ];
        let groups = same_part(&devices, &Topology::default());
        let expected =
            [vec!["cpu", "opencl:0", "wgpu:1"], vec!["cuda:0", "wgpu:0"], vec!["cuda:1", "opencl:1"]];
        assert_eq!(ids(&groups, &devices), expected);
        assert_eq!(groups[0].reason, "the host's cores");
        assert_eq!(groups[1].reason, "unique id 0badcafe1");
        assert_eq!(groups[2].reason, "PCI address 0000:43:00.0");
    }

    #[test]
    fn slices_of_a_part_stay_apart() {
        let at = ("pci", "0000:1b:00.0");
        let devices = [
            device("cuda:0", DeviceKind::Gpu, &[at, ("uuid", "MIG-1")]),
            device("cuda:1", DeviceKind::Gpu, &[at, ("uuid", "MIG-2")]),
            device("cuda:2", DeviceKind::Gpu, &[at, ("uuid", "GPU-bbbbbbbb")]),
        ];
        assert_eq!(same_part(&devices[1..], &Topology::default()), []);
        let all = same_part(&devices, &Topology::default());
        assert_eq!(all, []);
    }
}
