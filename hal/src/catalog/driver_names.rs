//! What drivers call parts of the catalog.

use super::{Part, part, parts};

/// Names that drivers report, as NVIDIA's lists of supported products have them, with the part's id. Names
/// that are the catalog's own but for punctuation are not listed.
const NAMES: [(&str, &str); 19] = [
    ("Tesla T4", "T4"),
    ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
    ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
    ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ("NVIDIA A10G", "A10G"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
    ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
    ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
    ("NVIDIA H100 NVL", "H100-NVL-94GB"),
    ("NVIDIA H200", "H200-SXM-141GB"),
    ("NVIDIA H200 NVL", "H200-NVL-141GB"),
    ("NVIDIA H800", "H800-SXM-80GB"),
    ("NVIDIA H20", "H20-96GB"),
    ("NVIDIA GH200 480GB", "GH200-96GB"),
    ("NVIDIA B200", "B200-SXM"),
    ("NVIDIA GB200", "GB200"),
    ("NVIDIA GeForce RTX 3060", "RTX-3060-12GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000-WS"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-SE"),
];

/// Precedes the name of a part that is simulated.
pub const SIMULATED: &str = "simulated ";

/// Returns the part that a driver calls `name`. The name may be that of a MIG slice (`... MIG 1g.10gb`) or of
/// a simulated device.
pub fn part_of_driver(name: &str) -> Option<&'static Part> {
    let name = name.strip_prefix(SIMULATED).unwrap_or(name);
    let name = name.split_once(" MIG ").map_or(name, |(whole, _)| whole);
    let plain = |name: &str| -> String { name.chars().filter(|c| c.is_alphanumeric()).collect() };
    let same = |known: &str| plain(known).eq_ignore_ascii_case(&plain(name));
    let listed = NAMES.iter().find(|(known, _)| same(known)).and_then(|(_, id)| part(id));
    listed.or_else(|| parts().iter().find(|part| same(part.name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_names_find_their_parts() {
        for (name, id) in NAMES {
            assert_eq!(part_of_driver(name).map(|part| part.id), Some(id));
        }
        let id = |name| part_of_driver(name).map(|part| part.id);
        assert_eq!(id("NVIDIA GeForce RTX 4090"), Some("RTX-4090"));
        assert_eq!(id("simulated NVIDIA GeForce RTX 4090"), Some("RTX-4090"));
        assert_eq!(id("NVIDIA A100-SXM4-80GB"), Some("A100-SXM-80GB"));
        assert_eq!(id("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), Some("H100-SXM-80GB"));
        assert_eq!((id("llvmpipe"), id("")), (None, None));
    }
}
