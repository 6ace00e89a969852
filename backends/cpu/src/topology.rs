//! The host's cores and memory, and selectors of sets of cores.

use mixfleet_hal::{Error, Result};

/// Returns the cores that this process may run on, in ascending order.
pub(crate) fn cores_allowed() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: an all-zero cpu_set_t is valid, and the call writes at most its size.
        let (failed, set) = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0, set)
        };
        let bits = 8 * size_of::<libc::cpu_set_t>();
        // SAFETY: the index is below the number of bits of the set.
        let cores: Vec<usize> = (0..bits).filter(|&i| unsafe { libc::CPU_ISSET(i, &set) }).collect();
        if !failed && !cores.is_empty() {
            return cores;
        }
    }
    (0..std::thread::available_parallelism().map_or(1, |n| n.get())).collect()
}

/// Binds the calling thread to `cores`, and with it the threads that it starts from then on.
///
/// # Errors
/// When the system refuses, binds no threads, or knows none of the cores; the thread runs where it did.
pub(crate) fn bind_thread(cores: &[usize]) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let bits = 8 * size_of::<libc::cpu_set_t>();
        // SAFETY: an all-zero cpu_set_t is valid, and each index is below the number of its bits; 0 is the
        // calling thread.
        let failed = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cores.iter().filter(|&&core| core < bits).for_each(|&core| libc::CPU_SET(core, &mut set));
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) != 0
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = cores;
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// Formats [0, 1, 2, 5] as `0-2,5`.
pub(crate) fn ranges(cores: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &core in cores {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == core => *last = core,
            _ => parts.push((core, core)),
        }
    }
    let text = |&(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Returns the cores that `selector` names among `allowed`, ascending.
///
/// # Errors
/// `Invalid`, listing the cores that exist.
pub(crate) fn select(selector: &str, allowed: &[usize]) -> Result<Vec<usize>> {
    let wrong = |why: &str| {
        let have = ranges(allowed);
        Error::invalid(format!(
            "device '{selector}': {why}; this process may use cores {have}: cpu, cpu@0, cpu@1-3 or cpu@0,2"
        ))
    };
    let list = match selector.strip_prefix("cpu") {
        Some("") => return Ok(allowed.to_vec()),
        Some(rest) => rest.strip_prefix('@').ok_or_else(|| wrong("expected '@' after 'cpu'"))?,
        None => return Err(wrong("not a CPU selector")),
    };
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| {
            text.parse::<usize>().map_err(|_| wrong(&format!("'{part}' is not a core or range")))
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(wrong(&format!("range '{part}' is empty")));
        }
        // checked before it is expanded, since 0-18446744073709551615 would exhaust memory
        if !allowed.contains(&first) || !allowed.contains(&last) {
            return Err(wrong(&format!("no core '{part}'")));
        }
        for core in first..=last {
            if !allowed.contains(&core) {
                return Err(wrong(&format!("no core {core}")));
            }
            if cores.contains(&core) {
                return Err(wrong(&format!("core {core} is named twice")));
            }
            cores.push(core);
        }
    }
    cores.sort_unstable();
    Ok(cores)
}

/// Returns the processor's name.
pub(crate) fn model_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .find(|l| l.starts_with(key))
            .and_then(|l| l.split_once(':'))
            .map(|(_, v)| v.trim().to_string())
    };
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_string());
    match (field("cpu family"), field("model\t")) {
        (Some(family), Some(model)) => format!("{name} (family {family} model {model})"),
        _ => name,
    }
}

/// Returns a field of `/proc/meminfo` in bytes.
fn meminfo(field: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let value = info.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    Some(value.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

/// Returns a number of the control group's memory; `None` without one, or if it is `max`.
fn control_group(file: &str) -> Option<u64> {
    std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
}

/// Returns the bytes of memory that this process may use, limited by the machine or the control group; 0 if
/// unknown.
pub(crate) fn memory_bytes() -> u64 {
    let total = meminfo("MemTotal").unwrap_or(0);
    match control_group("memory.max") {
        Some(limit) if total == 0 || limit < total => limit,
        _ => total,
    }
}

/// Returns the bytes that this process could still take without swapping; `None` if unknown.
pub(crate) fn memory_free_bytes() -> Option<u64> {
    let available = meminfo("MemAvailable")?;
    let rest = control_group("memory.max").zip(control_group("memory.current"));
    Some(rest.map_or(available, |(limit, used)| available.min(limit.saturating_sub(used))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_name_cores_or_say_which_exist() {
        let allowed = [0, 1, 2, 5];
        assert_eq!(select("cpu", &allowed).unwrap(), allowed);
        assert_eq!(select("cpu@5", &allowed).unwrap(), [5]);
        assert_eq!(select("cpu@2,0-1", &allowed).unwrap(), [0, 1, 2]);
        for bad in [
            "cpu@",
            "cpu@3",
            "cpu@0-5",
            "cpu@1,1",
            "cpu@2-1",
            "cpu@x",
            "cpu:0",
            "gpu",
            "cpu@0-99999999999999999999",
            "cpu@-1",
        ] {
            let error = select(bad, &allowed).unwrap_err();
            assert!(error.detail.contains("0-2,5") && error.detail.contains(bad), "{bad}: {error}");
        }
    }
}
