//! Cross-checks the RDMA devices of sysfs with libibverbs.

use crate::Topology;
use mixfleet_hal::Absent;

/// Returns the names of the RDMA devices that a program can open.
pub(crate) fn names() -> Result<Vec<String>, Absent> {
    let list = ibverbs::devices().map_err(|error| {
        // ENOSYS: the kernel has no RDMA at all, or no module for it is loaded
        Absent::new(format!("libibverbs finds no RDMA: {error}; a kernel with ib_uverbs would show devices"))
    })?;
    let names = list.iter().filter_map(|device| Some(device.name()?.to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return Err(Absent::new(
            "libibverbs finds no RDMA device; a NIC with its driver, or rxe, would show here",
        ));
    }
    Ok(names)
}

/// Returns what libibverbs and sysfs disagree about, one line each.
pub(crate) fn disagreements(topology: &Topology, names: &[String]) -> Vec<String> {
    let shown: Vec<&String> = topology.rdma.iter().map(|device| &device.name).collect();
    let unusable = shown.iter().filter(|name| !names.contains(name)).map(|name| {
        format!("{name} is in sysfs, but libibverbs has no driver for it (Debian: ibverbs-providers)")
    });
    let unseen = names.iter().filter(|name| !shown.contains(name));
    let unseen = unseen.map(|name| format!("{name} is known to libibverbs, but not in sysfs"));
    unusable.chain(unseen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RdmaDevice;

    #[test]
    fn devices_are_listed_or_their_absence_has_a_reason() {
        match names() {
            Ok(names) => assert!(!names.is_empty()),
            Err(absent) => assert!(absent.reason.contains("RDMA"), "{absent}"),
        }
    }

    #[test]
    fn a_device_without_a_driver_is_told() {
        let device = |name: &str| RdmaDevice {
            name: name.into(),
            pci: None,
            firmware: None,
            board: None,
            ports: Vec::new(),
        };
        let topology = Topology { rdma: vec![device("mlx5_0"), device("mlx5_1")], ..Topology::default() };
        let lines = disagreements(&topology, &["mlx5_1".into(), "rxe0".into()]);
        assert_eq!(lines.len(), 2);
        assert!(
            lines[0].starts_with("mlx5_0 is in sysfs") && lines[1].starts_with("rxe0 is known"),
            "{lines:?}"
        );
    }
}
