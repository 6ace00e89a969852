//! Levels that test more than a device: links between memories (4), and serving (6).

use super::serving;
use crate::links;
use mixfleet_hal::Device;
use mixfleet_hal::transport::RemoteAccess;
use mixfleet_hwtests::links::check::{self, TransportEnds};
use mixfleet_hwtests::links::{Far, LinkEffort, LinkRate, OnDevice, OverTransport, measure};
use mixfleet_hwtests::validate::protocol::Assignment;
use mixfleet_hwtests::validate::{CaseResult, CaseStatus};
use std::sync::Arc;
use std::time::Duration;

/// Minimum rate of an intact link: a tenth of gigabit Ethernet, which every path within a host exceeds a
/// hundredfold. A lower rate is a warning, since time decides no verdict on correctness.
const BYTES_PER_S_MIN: f64 = 12.5e6;
/// Time after which a transfer of [`BYTES`] counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a long transfer.
const BYTES: u64 = 16 << 20;

/// Runs a group of these levels: [`mixfleet_hwtests::validate::child::Beyond`].
pub(super) fn run(
    device: &Arc<dyn Device>,
    assignment: &Assignment,
    wanted: &dyn Fn(&str) -> bool,
    emit: &mut dyn FnMut(CaseResult),
) -> bool {
    let group = assignment.group.as_str();
    match group.split_once('.') {
        Some(("l4", "copy")) => copies(device, group, wanted, emit),
        Some(("l4", name)) => transport(name, group, wanted, emit),
        Some(("l6", "serving")) => serving::run(&assignment.device, wanted, emit),
        _ => return false,
    }
    true
}

fn transport(name: &str, group: &str, wanted: &dyn Fn(&str) -> bool, emit: &mut dyn FnMut(CaseResult)) {
    let rate = format!("{group}.rate");
    let transport = match links::open(name) {
        Ok(transport) => transport,
        Err(why) => {
            let absent = |id| CaseResult::new(id, CaseStatus::Unsupported, format!("absent: {why}"));
            return check::cases(group).chain([rate]).filter(|id| wanted(id)).map(absent).for_each(emit);
        }
    };
    let ends = TransportEnds { owner: &*transport, user: &*transport, make: &links::memory };
    check::run(&ends, group, wanted, emit);
    if wanted(&rate) {
        emit(judged(rate, || {
            let region = transport.register(links::memory(BYTES)?, RemoteAccess::ReadWrite)?;
            let near = links::memory(BYTES)?;
            let way = transport.connect(near.clone(), &region)?;
            let rates = times(&mut OverTransport::new(way, near, BYTES, TIMEOUT))?;
            transport.deregister(&region)?;
            Ok(rates)
        }));
    }
}

fn copies(
    device: &Arc<dyn Device>,
    group: &str,
    wanted: &dyn Fn(&str) -> bool,
    emit: &mut dyn FnMut(CaseResult),
) {
    let id = format!("{group}.rate");
    if wanted(&id) {
        emit(judged(id, || times(&mut OnDevice::new(device.clone(), links::memory(BYTES)?)?)));
    }
}

fn times(far: &mut dyn Far) -> mixfleet_hal::Result<[LinkRate; 2]> {
    measure(far, &LinkEffort { large_bytes: BYTES, tries_min: 5, seconds: 0.2 })
}

/// The verdict on a link: wrong data fails; a rate below the minimum warns.
fn judged(id: String, rates: impl FnOnce() -> mixfleet_hal::Result<[LinkRate; 2]>) -> CaseResult {
    let rates = match rates() {
        Ok(rates) => rates,
        Err(error) => return CaseResult::new(id, CaseStatus::Fail, error.to_string()),
    };
    let slow = rates.iter().map(|rate| rate.bytes_per_s_median).fold(f64::INFINITY, f64::min);
    let result = if slow < BYTES_PER_S_MIN {
        let why = format!(
            "{:.1} MB/s, less than the {:.1} MB/s of any link within a host",
            slow / 1e6,
            BYTES_PER_S_MIN / 1e6
        );
        CaseResult::new(id, CaseStatus::QualityWarning, why)
    } else {
        CaseResult::pass(id)
    };
    let [there, back] = rates;
    result.fact("there", there).fact("back", back)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hwtests::reference::ReferenceDevice;
    use mixfleet_hwtests::validate::Settings;

    /// Runs every case of a group on the slow oracle device.
    fn cases(group: &str) -> Vec<CaseResult> {
        let mut results = Vec::new();
        assert!(taken(group, &mut |result| results.push(result)));
        results
    }

    fn taken(group: &str, emit: &mut dyn FnMut(CaseResult)) -> bool {
        let device: Arc<dyn Device> = Arc::new(ReferenceDevice::default());
        let assignment = Assignment {
            device: "reference".into(),
            group: group.into(),
            settings: Settings::quick(),
            only: vec![],
            done: vec![],
            soak: None,
        };
        run(&device, &assignment, &|_| true, emit)
    }

    #[test]
    fn transports_of_this_host_pass_or_say_why_they_are_absent() {
        for group in ["l4.memory", "l4.shm", "l4.tcp", "l4.verbs"] {
            let results = cases(group);
            assert_eq!(results.len(), check::cases(group).count() + 1);
            for result in results {
                let absent = result.status == CaseStatus::Unsupported;
                let right = matches!(result.status, CaseStatus::Pass | CaseStatus::QualityWarning);
                assert!(right || (absent && group == "l4.verbs"), "{result:?}");
                assert_eq!(absent, result.reason.is_some_and(|why| why.starts_with("absent: ")));
            }
        }
        assert_eq!(cases("l4.copy").len(), 1);
    }

    #[test]
    fn groups_of_others_are_not_taken() {
        assert!(!taken("l7.dreams", &mut |_| unreachable!()));
    }
}
