//! Sets of logical CPUs in the kernel's notation.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Larger than the maximum number of CPUs of any Linux build (8192 on x86), and small enough that a corrupt
/// list does not exhaust memory.
const CPU_MAX: u32 = 1 << 16;

/// Logical CPUs, ascending and without repeats; written as `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuList(Vec<u32>);

impl CpuList {
    /// Creates a list from CPUs in any order.
    pub fn new(mut cpus: Vec<u32>) -> CpuList {
        cpus.sort_unstable();
        cpus.dedup();
        CpuList(cpus)
    }

    /// Returns the CPUs, ascending.
    pub fn cpus(&self) -> &[u32] {
        &self.0
    }

    /// Returns the number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the list contains `cpu`.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut cpus = Vec::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&cpu| cpu < CPU_MAX);
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => return Err(format!("'{part}' is neither a CPU nor a range of CPUs")),
            }
            // overlapping ranges must not add up either
            if cpus.len() > CPU_MAX as usize {
                return Err(format!("more than {CPU_MAX} CPUs"));
            }
        }
        Ok(CpuList::new(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for &cpu in &self.0 {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => runs.push((cpu, cpu)),
            }
        }
        for (i, (first, last)) in runs.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

impl TryFrom<String> for CpuList {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<CpuList> for String {
    fn from(list: CpuList) -> String {
        list.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn damaged_lists_are_errors() {
        for bad in ["x", "3-1", "-1", "0-4294967295", "0-70000", "1,,2-", "0-65535,0-65535"] {
            assert!(bad.parse::<CpuList>().is_err(), "{bad}");
        }
        assert_eq!("".parse(), Ok(CpuList::default()));
        assert_eq!("0-2,5\n".parse(), Ok(CpuList::new(vec![5, 0, 1, 2, 2])));
    }

    proptest! {
        #[test]
        fn text_and_list_are_inverse(cpus in prop::collection::vec(0u32..300, 0..40)) {
            let list = CpuList::new(cpus);
            prop_assert_eq!(list.to_string().parse(), Ok(list));
        }
    }
}
