//! Sensor readings of the cores, from the kernel's files under a root.
//!
//! Every reading is optional: virtual machines expose few of them, and only root may read the energy counter
//! (since Linux 5.10, against power side channels). Temperature, power, energy and memory errors cover all
//! packages, even for a device with few cores.

use mixfleet_hal::Health;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Sensor drivers of processors.
const SENSORS: [&str; 4] = ["coretemp", "k10temp", "zenpower", "cpu_thermal"];

/// Reads health repeatedly and remembers the energy counters, which wrap, and the time that cores were busy.
pub(crate) struct HealthReader {
    root: PathBuf,
    cores: Vec<usize>,
    meters: Mutex<Meters>,
    /// Ticks of all cores at the last reading.
    ticks: Mutex<Ticks>,
}

/// Time of cores since start, in ticks of the kernel.
#[derive(Clone, Copy, Default)]
struct Ticks {
    busy: u64,
    all: u64,
}

/// The state of the energy counters.
#[derive(Default)]
struct Meters {
    /// Raw counter of each package at the last reading, in microjoules.
    last: Vec<(PathBuf, u64)>,
    joules: f64,
    read_at: Option<(Instant, f64)>,
}

impl HealthReader {
    /// Creates a reader for `cores` of the machine under `root`.
    pub(crate) fn new(root: impl Into<PathBuf>, cores: &[usize]) -> HealthReader {
        HealthReader {
            root: root.into(),
            cores: cores.to_vec(),
            meters: Mutex::default(),
            ticks: Mutex::default(),
        }
    }

    /// Reads the current state. Power is the mean since the previous reading, so the first reading has none
    /// unless a sensor provides it.
    pub(crate) fn read(&self) -> Health {
        let energy_j = self.energy_j();
        let memory = self.root.join("sys/devices/system/edac/mc");
        Health {
            temperature_c: self.temperature_c(),
            power_w: self.sensor_power_w().or_else(|| self.mean_power_w(energy_j)),
            energy_j,
            busy: self.busy(),
            clock_mhz: self.clock_mhz(),
            clock_mhz_max: None,
            clock_mhz_allowed: None,
            errors_corrected: sum_of(&memory, "mc", "ce_count"),
            errors_uncorrected: sum_of(&memory, "mc", "ue_count"),
        }
    }

    /// Returns the share of the time since the last reading in which the cores worked, for whomever; of the
    /// first reading, since the machine started.
    fn busy(&self) -> Option<f64> {
        let stat = std::fs::read_to_string(self.root.join("proc/stat")).ok()?;
        let of_core = |line: &str| {
            let (core, counts) = line.strip_prefix("cpu")?.split_once(' ')?;
            self.cores.contains(&core.parse().ok()?).then(|| ticks(counts)).flatten()
        };
        let now = stat.lines().filter_map(of_core).reduce(|sum, core| Ticks {
            busy: sum.busy.saturating_add(core.busy),
            all: sum.all.saturating_add(core.all),
        })?;
        let last = std::mem::replace(&mut *self.ticks.lock().unwrap_or_else(PoisonError::into_inner), now);
        let passed = now.all.checked_sub(last.all).filter(|&passed| passed > 0)?;
        Some(now.busy.saturating_sub(last.busy).min(passed) as f64 / passed as f64)
    }

    /// Returns the mean clock of the cores, from the clock driver or else from the kernel's own estimate.
    fn clock_mhz(&self) -> Option<f64> {
        let driver = |core: &usize| {
            let file = format!("sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq");
            number(&self.root.join(file)).map(|khz| khz / 1e3)
        };
        let clocks: Option<Vec<f64>> = self.cores.iter().map(driver).collect();
        mean(&clocks.or_else(|| self.cpuinfo_mhz())?)
    }

    fn cpuinfo_mhz(&self) -> Option<Vec<f64>> {
        let info = std::fs::read_to_string(self.root.join("proc/cpuinfo")).ok()?;
        let mut clocks = Vec::new();
        let mut core = None;
        for (name, value) in info.lines().filter_map(|line| line.split_once(':')) {
            match name.trim() {
                "processor" => core = value.trim().parse::<usize>().ok(),
                "cpu MHz" if core.is_some_and(|core| self.cores.contains(&core)) => {
                    clocks.extend(value.trim().parse::<f64>().ok());
                }
                _ => {}
            }
        }
        Some(clocks)
    }

    /// Lists the directories of processor sensors.
    fn sensors(&self) -> Vec<PathBuf> {
        let named =
            |at: &PathBuf| text(&at.join("name")).is_some_and(|name| SENSORS.contains(&name.as_str()));
        entries(&self.root.join("sys/class/hwmon"), "hwmon").into_iter().filter(named).collect()
    }

    /// Returns the temperature of the hottest package, preferring `Tdie` because `Tctl` of old AMD parts has
    /// an offset for fan control.
    fn temperature_c(&self) -> Option<f64> {
        let mut die = Vec::new();
        let mut other = Vec::new();
        for sensor in self.sensors() {
            for input in entries(&sensor, "temp").iter().filter_map(|at| at.to_str()?.strip_suffix("_input"))
            {
                let Some(degrees) = number(Path::new(&format!("{input}_input"))).map(|milli| milli / 1e3)
                else {
                    continue;
                };
                let label = text(Path::new(&format!("{input}_label"))).unwrap_or_default();
                if label == "Tdie" { die.push(degrees) } else { other.push(degrees) }
            }
        }
        let readings = if die.is_empty() { other } else { die };
        readings.into_iter().reduce(f64::max)
    }

    fn sensor_power_w(&self) -> Option<f64> {
        let of = |sensor: PathBuf| {
            let inputs = ["power1_average", "power1_input"].map(|file| number(&sensor.join(file)));
            inputs.into_iter().flatten().next().map(|microwatts| microwatts / 1e6)
        };
        let watts: Vec<f64> = self.sensors().into_iter().filter_map(of).collect();
        (!watts.is_empty()).then(|| watts.iter().sum())
    }

    /// Returns the joules that all packages used since the first reading.
    fn energy_j(&self) -> Option<f64> {
        let zones = entries(&self.root.join("sys/class/powercap"), "intel-rapl:");
        let package = |at: &PathBuf| text(&at.join("name")).is_some_and(|name| name.starts_with("package"));
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = false;
        for zone in zones.into_iter().filter(package) {
            let Some(now) = text(&zone.join("energy_uj")).and_then(|text| text.parse::<u64>().ok()) else {
                continue;
            };
            found = true;
            let used = match meters.last.iter_mut().find(|(known, _)| *known == zone) {
                Some((_, last)) => {
                    let before = std::mem::replace(last, now);
                    let range = text(&zone.join("max_energy_range_uj")).and_then(|text| text.parse().ok());
                    // a lower value means one wrap; without a range the use is unknown
                    now.checked_sub(before)
                        .or(range.map(|range: u64| range.saturating_sub(before).saturating_add(now)))
                }
                None => {
                    meters.last.push((zone, now));
                    None
                }
            };
            meters.joules += used.unwrap_or(0) as f64 / 1e6;
        }
        found.then_some(meters.joules)
    }

    /// Returns the mean power since the previous reading.
    fn mean_power_w(&self, energy_j: Option<f64>) -> Option<f64> {
        let (now, joules) = (Instant::now(), energy_j?);
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        let (then, before) = meters.read_at.replace((now, joules))?;
        let seconds = (now - then).as_secs_f64();
        // the counters update every millisecond
        (seconds > 0.01).then(|| (joules - before) / seconds)
    }
}

/// Reads the counts of a core in `/proc/stat`: user, nice, system, idle, waiting for input, then others; what
/// guests used is part of the first two.
fn ticks(counts: &str) -> Option<Ticks> {
    let counts: Vec<u64> = counts.split_whitespace().take(8).map_while(|count| count.parse().ok()).collect();
    let all = counts.iter().copied().fold(0, u64::saturating_add);
    let idle = counts.get(3)?.saturating_add(counts.get(4).copied().unwrap_or(0));
    Some(Ticks { busy: all.saturating_sub(idle), all })
}

fn text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &Path) -> Option<f64> {
    text(path)?.parse().ok().filter(|number: &f64| number.is_finite())
}

fn mean(numbers: &[f64]) -> Option<f64> {
    (!numbers.is_empty()).then(|| numbers.iter().sum::<f64>() / numbers.len() as f64)
}

/// Lists the entries of `directory` that begin with `prefix`, sorted.
fn entries(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let found = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let begins = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(prefix)
    };
    let mut paths: Vec<PathBuf> = found.map(|entry| entry.path()).filter(begins).collect();
    paths.sort();
    paths
}

/// Returns the sum of `file` over all entries of `directory`, if there are any.
fn sum_of(directory: &Path, prefix: &str, file: &str) -> Option<u64> {
    let counts = entries(directory, prefix).into_iter();
    counts.filter_map(|at| text(&at.join(file))?.parse::<u64>().ok()).reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary directory, removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("mixfleet-health-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }

        fn write(&self, files: &[(&str, &str)]) {
            for (path, text) in files {
                let path = self.0.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_empty_machine_tells_nothing() {
        let scratch = Scratch::new("empty");
        assert_eq!(HealthReader::new(&scratch.0, &[0]).read(), Health::default());
    }

    #[test]
    fn a_server_tells_all() {
        let scratch = Scratch::new("server");
        scratch.write(&[
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "3000000\n"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "3500000\n"),
            ("sys/class/hwmon/hwmon0/name", "nvme\n"),
            ("sys/class/hwmon/hwmon0/temp1_input", "99000\n"),
            ("sys/class/hwmon/hwmon1/name", "k10temp\n"),
            ("sys/class/hwmon/hwmon1/temp1_input", "90000\n"),
            ("sys/class/hwmon/hwmon1/temp1_label", "Tctl\n"),
            ("sys/class/hwmon/hwmon1/temp2_input", "63125\n"),
            ("sys/class/hwmon/hwmon1/temp2_label", "Tdie\n"),
            ("sys/class/hwmon/hwmon2/name", "zenpower\n"),
            ("sys/class/hwmon/hwmon2/power1_input", "123500000\n"),
            ("sys/class/powercap/intel-rapl:0/name", "package-0\n"),
            ("sys/class/powercap/intel-rapl:0/energy_uj", "1000000\n"),
            ("sys/devices/system/edac/mc/mc0/ce_count", "3\n"),
            ("sys/devices/system/edac/mc/mc1/ce_count", "4\n"),
            ("sys/devices/system/edac/mc/mc0/ue_count", "0\n"),
            ("proc/stat", "cpu  9 9 9 9\ncpu0 20 10 10 50 10 0 0 0 15 0\ncpu1 10 0 0 90\ncpu10 7 7 7 7\n"),
        ]);
        let expected = Health {
            temperature_c: Some(63.125),
            power_w: Some(123.5),
            energy_j: Some(0.0),
            busy: Some(0.25),
            clock_mhz: Some(3250.0),
            clock_mhz_max: None,
            clock_mhz_allowed: None,
            errors_corrected: Some(7),
            errors_uncorrected: Some(0),
        };
        assert_eq!(HealthReader::new(&scratch.0, &[0, 1]).read(), expected);
    }

    #[test]
    fn the_clock_comes_from_cpuinfo_where_no_driver_tells() {
        let scratch = Scratch::new("cpuinfo");
        let cpu = |n: u32, mhz: u32| format!("processor\t: {n}\ncpu MHz\t\t: {mhz}.500\n\n");
        scratch.write(&[("proc/cpuinfo", &(cpu(0, 1000) + &cpu(1, 2000) + &cpu(2, 4000)))]);
        assert_eq!(HealthReader::new(&scratch.0, &[1, 2]).read().clock_mhz, Some(3000.5));
    }

    #[test]
    fn cores_are_busy_since_the_last_reading() {
        let scratch = Scratch::new("busy");
        let reader = HealthReader::new(&scratch.0, &[1]);
        let read = |stat: &str| {
            scratch.write(&[("proc/stat", stat)]);
            reader.read().busy
        };
        assert_eq!(read("cpu1 100 0 0 300\n"), Some(0.25));
        assert_eq!(read("cpu0 900 0 0 300\ncpu1 190 0 0 310\n"), Some(0.9));
        assert_eq!(read("cpu1 190 0 0 310\n"), None, "no time passed");
        assert_eq!(read("cpu1 10 0 0 10\n"), None, "counted anew");
        assert_eq!(read("cpu1 10 0 0 110\n"), Some(0.0));
        assert_eq!([read("cpu1 10 0\n"), read("cpu2 1 1 1 1\n"), read("rubbish")], [None; 3]);
    }

    #[test]
    fn the_energy_counter_never_falls() {
        let scratch = Scratch::new("energy");
        let package = |energy: &str| {
            scratch.write(&[
                ("sys/class/powercap/intel-rapl:0/name", "package-0"),
                ("sys/class/powercap/intel-rapl:0/max_energy_range_uj", "10000000"),
                ("sys/class/powercap/intel-rapl:0/energy_uj", energy),
                // part of the package, which is counted already
                ("sys/class/powercap/intel-rapl:0:0/name", "core"),
                ("sys/class/powercap/intel-rapl:0:0/energy_uj", "5000000"),
            ]);
        };
        package("7000000");
        let reader = HealthReader::new(&scratch.0, &[0]);
        assert_eq!(reader.read().energy_j, Some(0.0));
        package("9500000");
        assert_eq!(reader.read().energy_j, Some(2.5));
        package("1000000");
        assert_eq!(reader.read().energy_j, Some(4.0), "wrapped at 10 J");
        package("rubbish");
        assert_eq!(reader.read().energy_j, None);
        package("1500000");
        assert_eq!(reader.read().energy_j, Some(4.5));
    }
}
