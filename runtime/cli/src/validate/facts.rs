//! What the operating system reports about a device and its host: the link, the driver, other load.

use mixfleet_discover::{PciDevice, Topology, Tree, conditions, pci_of};
use mixfleet_hal::{DeviceInfo, DeviceKind};
use mixfleet_hwtests::validate::DeviceFact;
use std::path::Path;

/// This machine at one moment.
pub(crate) struct HostFacts {
    topology: Topology,
    conditions: mixfleet_discover::HostConditions,
}

impl HostFacts {
    pub(crate) fn read() -> HostFacts {
        HostFacts { topology: Topology::read(&Tree::at("/")), conditions: conditions(Path::new("/")) }
    }

    fn pci(&self, info: &DeviceInfo) -> Option<&PciDevice> {
        self.topology.device(pci_of(info)?)
    }

    /// The PCI id as `vendor:device` in hexadecimal.
    pub(crate) fn pci_id(&self, info: &DeviceInfo) -> Option<String> {
        self.pci(info).map(|pci| format!("{:04x}:{:04x}", pci.vendor, pci.device))
    }

    /// Facts about the device, for level 0.
    pub(crate) fn about(&self, info: &DeviceInfo) -> Vec<DeviceFact> {
        let mut facts = vec![self.other_load()];
        match info.kind {
            DeviceKind::Simulated => {}
            DeviceKind::Cpu => facts.push(known("governor", self.conditions.governor.clone())),
            DeviceKind::Gpu | DeviceKind::Accelerator => facts.extend(self.on_the_bus(info)),
        }
        facts
    }

    fn on_the_bus(&self, info: &DeviceInfo) -> Vec<DeviceFact> {
        let Some(pci) = self.pci(info) else {
            let why = "the backend reports no PCI address, or the system does not list it";
            return ["pci", "link", "numa", "driver"].map(|name| DeviceFact::unknown(name, why)).to_vec();
        };
        let link = match &pci.link {
            None => DeviceFact::unknown("link", "the system reports no link, like most virtual machines"),
            // An idle part lowers its link speed; missing lanes stay missing.
            Some(link) if link.is_narrow() => {
                DeviceFact::suspect("link", link.words(), link.shortfalls().join("; "))
            }
            Some(link) => DeviceFact::known("link", link.words()),
        };
        let address = pci.address;
        let id = self.pci_id(info).unwrap_or_default();
        vec![
            DeviceFact::known("pci", format!("{address} {id}")),
            link,
            known("numa", pci.node.map(|node| node.to_string())),
            known("driver", pci.driver.clone()),
        ]
    }

    /// Other load on the machine, which affects measurements but not results.
    fn other_load(&self) -> DeviceFact {
        match self.conditions.runnable_others {
            None => DeviceFact::unknown("other_load", "not reported by the system"),
            Some(0) => DeviceFact::known("other_load", "none"),
            Some(others) => {
                let remark = "other threads want the cores: measured times may be too long";
                DeviceFact::suspect("other_load", format!("{others} runnable threads"), remark)
            }
        }
    }

    /// The host, for the report.
    pub(crate) fn host(&self) -> Vec<DeviceFact> {
        let mut facts = vec![
            DeviceFact::known("os", std::env::consts::OS),
            DeviceFact::known("arch", std::env::consts::ARCH),
        ];
        facts
            .extend(self.conditions.pairs().into_iter().map(|(name, value)| DeviceFact::known(&name, value)));
        if self.conditions.governor.is_none() {
            facts.push(DeviceFact::unknown("governor", "the system reports no clock policy"));
        }
        facts
    }
}

fn known(name: &str, value: Option<String>) -> DeviceFact {
    value.map_or_else(
        || DeviceFact::unknown(name, "not reported by the system"),
        |value| DeviceFact::known(name, value),
    )
}
