//! The state of the host during a measurement, without which numbers cannot be compared.

use crate::Tree;
use crate::cores;
use crate::tree::TreeReader;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Facts that affect CPU measurements; what the kernel does not report is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostConditions {
    /// The processor's name.
    pub cpu_model: Option<String>,
    /// Microcode version.
    pub microcode: Option<String>,
    /// Number of logical CPUs that are online.
    pub cpus: usize,
    /// Whether the processor reports that it is virtualised.
    pub hypervisor: bool,
    /// Kernel release.
    pub kernel: Option<String>,
    /// The frequency governor, with commas if CPUs differ.
    pub governor: Option<String>,
    /// Lowest current clock of any CPU in MHz.
    pub clock_mhz_min: Option<f64>,
    /// Highest current clock of any CPU in MHz.
    pub clock_mhz_max: Option<f64>,
    /// Whether clocks above nominal are allowed.
    pub turbo: Option<bool>,
    /// Whether cores run two or more threads.
    pub hyperthreads: Option<bool>,
    /// Mean number of runnable threads over 1, 5 and 15 minutes.
    pub load_average: Option<[f64; 3]>,
    /// Number of other runnable threads at the moment of reading.
    pub runnable_others: Option<u32>,
    /// CPU quota of the control group in cores; absent without a limit.
    pub cpu_quota_cores: Option<f64>,
    /// Setting of transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
    /// Whether the kernel migrates pages between NUMA nodes by itself.
    pub numa_balancing: Option<bool>,
    /// Power limits in watts, by name.
    pub power_limits_w: Vec<(String, f64)>,
    /// Total memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory available without swapping, in bytes.
    pub memory_available_bytes: Option<u64>,
}

/// Reads the conditions of the machine under `root`; `/` is this one.
pub fn conditions(root: &Path) -> HostConditions {
    HostConditions::read(&Tree::at(root))
}

const CPU: &str = "sys/devices/system/cpu";
const POWERCAP: &str = "sys/class/powercap";
const CGROUP: &str = "sys/fs/cgroup";

impl HostConditions {
    /// Reads the conditions from a tree.
    pub fn read(tree: &Tree) -> HostConditions {
        let mut reader = TreeReader { tree, notes: Vec::new() };
        let reader = &mut reader;
        let cpus = tree.numbered(CPU, "cpu");
        let (clock_mhz_min, clock_mhz_max, governor) = clocks(reader, &cpus);
        let no_turbo = reader.number::<u32>(&format!("{CPU}/intel_pstate/no_turbo")).map(|off| off == 0);
        let boost = || reader.tree.text(&format!("{CPU}/cpufreq/boost")).map(|on| on == "1");
        let turbo = no_turbo.or_else(boost);
        let flags = cores::cpuinfo(reader, "flags").unwrap_or_default();
        let (load_average, runnable_others) = load(reader);
        HostConditions {
            cpu_model: cores::cpuinfo(reader, "model name"),
            microcode: cores::cpuinfo(reader, "microcode"),
            cpus: cpus.len(),
            hypervisor: flags.split_whitespace().any(|flag| flag == "hypervisor"),
            kernel: tree.text("proc/sys/kernel/osrelease"),
            governor,
            clock_mhz_min,
            clock_mhz_max,
            turbo,
            hyperthreads: tree.text(&format!("{CPU}/smt/active")).map(|on| on == "1"),
            load_average,
            runnable_others,
            cpu_quota_cores: quota(reader),
            transparent_huge_pages: tree.text("sys/kernel/mm/transparent_hugepage/enabled").and_then(chosen),
            numa_balancing: tree.text("proc/sys/kernel/numa_balancing").map(|mode| mode != "0"),
            power_limits_w: power_limits(reader),
            memory_bytes: cores::memory(reader),
            memory_available_bytes: available(tree),
        }
    }

    /// Returns the known facts as names and values for display.
    pub fn pairs(&self) -> Vec<(String, String)> {
        let yes = |on: bool| if on { "on" } else { "off" }.to_owned();
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / GIB);
        let clocks = self.clock_mhz_min.zip(self.clock_mhz_max);
        let load = self.load_average.map(|[a, b, c]| format!("{a:.2} {b:.2} {c:.2}"));
        let facts = [
            ("cpu model", self.cpu_model.clone()),
            ("microcode", self.microcode.clone()),
            ("cpus", Some(self.cpus.to_string())),
            ("hypervisor", self.hypervisor.then(|| "yes: a virtual machine".to_owned())),
            ("kernel", self.kernel.clone()),
            ("governor", self.governor.clone()),
            ("clock range", clocks.map(|(min, max)| format!("{min:.0} to {max:.0} MHz"))),
            ("turbo", self.turbo.map(yes)),
            ("hyperthreads", self.hyperthreads.map(yes)),
            ("load average", load),
            ("other runnable threads", self.runnable_others.map(|n| n.to_string())),
            ("cpu quota", self.cpu_quota_cores.map(|cores| format!("{cores} cores"))),
            ("transparent huge pages", self.transparent_huge_pages.clone()),
            ("numa balancing", self.numa_balancing.map(yes)),
            ("memory", self.memory_bytes.map(gib)),
            ("memory available", self.memory_available_bytes.map(gib)),
        ];
        let known = facts.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let limits = self.power_limits_w.iter();
        let limits = limits.map(|(name, watts)| (format!("power limit {name}"), format!("{watts} W")));
        known.chain(limits).collect()
    }
}

const GIB: f64 = mixfleet_hal::units::GIB as f64;

/// Returns the word in brackets of `always [madvise] never`.
fn chosen(text: String) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_owned())
}

/// Returns the lowest and highest clock of all CPUs in MHz, and their governors.
fn clocks(reader: &mut TreeReader, cpus: &[(u32, String)]) -> (Option<f64>, Option<f64>, Option<String>) {
    let mut governors: Vec<String> = Vec::new();
    let (mut min, mut max) = (None::<f64>, None::<f64>);
    for (_, cpu) in cpus {
        let at = format!("{CPU}/{cpu}/cpufreq");
        let mhz = |reader: &mut TreeReader, file: &str| {
            reader.number::<f64>(&format!("{at}/{file}")).map(|khz| khz / 1e3).filter(|mhz| mhz.is_finite())
        };
        let low = mhz(reader, "cpuinfo_min_freq");
        min = low.map(|low| min.map_or(low, |min| min.min(low))).or(min);
        let high = mhz(reader, "cpuinfo_max_freq");
        max = high.map(|high| max.map_or(high, |max| max.max(high))).or(max);
        let governor = reader.tree.text(&format!("{at}/scaling_governor"));
        governors.extend(governor.filter(|governor| !governors.contains(governor)));
    }
    (min, max, (!governors.is_empty()).then(|| governors.join(",")))
}

/// Returns the load averages, and the number of other runnable threads.
fn load(reader: &mut TreeReader) -> (Option<[f64; 3]>, Option<u32>) {
    // "0.24 0.41 0.95 2/100 22346"
    let parsed = reader.value("proc/loadavg", |text| {
        let words: Vec<&str> = text.split_whitespace().collect();
        let [one, five, fifteen, threads, ..] = words[..] else { return None };
        let averages = [one.parse().ok()?, five.parse().ok()?, fifteen.parse().ok()?];
        let running = threads.split_once('/')?.0.parse::<u32>().ok()?;
        Some((averages, running.saturating_sub(1)))
    });
    parsed.unzip()
}

/// Returns the lowest CPU quota between this process's control group and the root, in cores.
fn quota(reader: &mut TreeReader) -> Option<f64> {
    let groups = reader.tree.text("proc/self/cgroup")?;
    let mut least: Option<f64> = None;
    for line in groups.lines() {
        // "0::/user.slice" (v2), "4:cpu,cpuacct:/docker/1234" (v1)
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let v2 = id == "0" && controllers.is_empty();
        if !v2 && !controllers.split(',').any(|controller| controller == "cpu") || group.contains("..") {
            continue;
        }
        let hierarchy = if v2 { CGROUP.to_owned() } else { format!("{CGROUP}/cpu") };
        let mut group = group.trim_end_matches('/');
        loop {
            let at = format!("{hierarchy}{group}");
            let cores = if v2 { quota_v2(reader, &at) } else { quota_v1(reader, &at) };
            least = cores.map(|cores| least.map_or(cores, |least| least.min(cores))).or(least);
            let Some((parent, _)) = group.rsplit_once('/') else { break };
            group = parent;
        }
    }
    least
}

fn quota_v2(reader: &mut TreeReader, at: &str) -> Option<f64> {
    // "200000 100000", "max 100000"
    let parse = |text: &str| {
        let (quota, period) = text.split_once(' ')?;
        if quota == "max" {
            return Some(None);
        }
        let (quota, period) = (quota.parse::<f64>().ok()?, period.parse::<f64>().ok()?);
        (period > 0.0).then_some(Some(quota / period))
    };
    reader.value(&format!("{at}/cpu.max"), parse).flatten()
}

fn quota_v1(reader: &mut TreeReader, at: &str) -> Option<f64> {
    let quota = reader.number::<i64>(&format!("{at}/cpu.cfs_quota_us")).filter(|quota| *quota > 0)?;
    let period = reader.number::<i64>(&format!("{at}/cpu.cfs_period_us")).filter(|period| *period > 0)?;
    Some(quota as f64 / period as f64)
}

/// Returns the packages' limits, such as `package-0 long_term`, 240.
fn power_limits(reader: &mut TreeReader) -> Vec<(String, f64)> {
    let mut limits = Vec::new();
    for zone in reader.tree.list(POWERCAP) {
        let at = format!("{POWERCAP}/{zone}");
        let Some(package) =
            reader.tree.text(&format!("{at}/name")).filter(|name| name.starts_with("package"))
        else {
            continue;
        };
        for constraint in 0..3 {
            let file = |what: &str| format!("{at}/constraint_{constraint}_{what}");
            let Some(microwatts) = reader.number::<u64>(&file("power_limit_uw")) else { break };
            let name = reader.tree.text(&file("name")).unwrap_or_else(|| constraint.to_string());
            limits.push((format!("{package} {name}"), microwatts as f64 / 1e6));
        }
    }
    limits
}

fn available(tree: &Tree) -> Option<u64> {
    let info = tree.text("proc/meminfo")?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recording;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let mut recording = Recording::default();
        for (path, text) in files {
            recording.files.insert((*path).into(), (*text).into());
        }
        recording.lists.insert(CPU.into(), vec!["cpu0".into(), "cpu1".into(), "cpuidle".into()]);
        recording.lists.insert(POWERCAP.into(), vec!["intel-rapl:0".into()]);
        Tree::recorded(recording).unwrap()
    }

    #[test]
    fn conditions_of_a_server_are_read() {
        let tree = tree(&[
            ("proc/cpuinfo", "model name\t: EPYC\nmicrocode\t: 0xa1\nflags\t: fpu hypervisor\n"),
            ("proc/loadavg", "1.50 2.25 3.00 5/900 4242"),
            ("proc/self/cgroup", "4:cpu,cpuacct:/x\n0::/a/b"),
            ("sys/fs/cgroup/a/b/cpu.max", "max 100000"),
            ("sys/fs/cgroup/a/cpu.max", "250000 100000"),
            ("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "-1"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave"),
            ("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_min_freq", "1500000"),
            ("sys/devices/system/cpu/cpu1/cpufreq/cpuinfo_max_freq", "3700000"),
            ("sys/devices/system/cpu/cpufreq/boost", "1"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
            ("sys/class/powercap/intel-rapl:0/name", "package-0"),
            ("sys/class/powercap/intel-rapl:0/constraint_0_power_limit_uw", "240000000"),
            ("sys/class/powercap/intel-rapl:0/constraint_0_name", "long_term"),
        ]);
        let read = HostConditions::read(&tree);
        assert_eq!(read.cpus, 2);
        assert!(read.hypervisor);
        assert_eq!(read.governor.as_deref(), Some("performance,powersave"));
        assert_eq!((read.clock_mhz_min, read.clock_mhz_max), (Some(1500.0), Some(3700.0)));
        assert_eq!(read.turbo, Some(true));
        assert_eq!((read.load_average, read.runnable_others), (Some([1.5, 2.25, 3.0]), Some(4)));
        assert_eq!(read.cpu_quota_cores, Some(2.5));
        assert_eq!(read.transparent_huge_pages.as_deref(), Some("madvise"));
        assert_eq!(read.power_limits_w, [("package-0 long_term".to_owned(), 240.0)]);
        let pairs = read.pairs();
        assert!(pairs.contains(&("cpu quota".into(), "2.5 cores".into())), "{pairs:?}");
        assert!(pairs.contains(&("power limit package-0 long_term".into(), "240 W".into())), "{pairs:?}");
    }

    #[test]
    fn an_empty_tree_has_no_conditions() {
        let read = HostConditions::read(&Tree::recorded(Recording::default()).unwrap());
        assert_eq!(read, HostConditions::default());
        assert_eq!(read.pairs(), [("cpus".to_owned(), "0".to_owned())]);
    }

    #[test]
    fn an_older_control_group_limits_too() {
        let tree = tree(&[
            ("proc/self/cgroup", "4:cpu,cpuacct:/x/y"),
            ("sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "150000"),
            ("sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000"),
        ]);
        assert_eq!(HostConditions::read(&tree).cpu_quota_cores, Some(1.5));
    }
}
