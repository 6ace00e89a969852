//! Links: correct transfers pass, and incorrect ones are detected.

use crate::schema;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{RemoteAccess, Transport};
use mixfleet_hwtests::links::check::{self, TransportEnds};
use mixfleet_hwtests::links::{LinkEffort, LinksDocument, MeasuredLink, OnDevice, OverTransport, measure};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::validate::{CaseResult, CaseStatus};
use mixfleet_wire::{FaultyTransport, HostRegion, InProcessTransport};
use std::sync::Arc;
use std::time::Duration;

const EFFORT: LinkEffort = LinkEffort { large_bytes: 100_003, tries_min: 3, seconds: 0.0 };

fn memory(bytes: u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> {
    Ok(Arc::new(HostRegion::new(bytes as usize)?))
}

fn cases(transport: &dyn Transport) -> Vec<CaseResult> {
    let mut results = Vec::new();
    let ends = TransportEnds { owner: transport, user: transport, make: &memory };
    check::run(&ends, "l4.test", &|_| true, &mut |result| results.push(result));
    assert_eq!(results.len(), check::cases("l4.test").count());
    results
}

fn over(transport: &dyn Transport) -> mixfleet_hal::Result<OverTransport> {
    let (near, far) = (memory(EFFORT.large_bytes)?, memory(EFFORT.large_bytes)?);
    let region = transport.register(far, RemoteAccess::ReadWrite)?;
    let way = transport.connect(near.clone(), &region)?;
    Ok(OverTransport::new(way, near, EFFORT.large_bytes, Duration::from_secs(60)))
}

#[test]
fn a_transport_that_moves_right_passes() {
    for result in cases(&InProcessTransport::new()) {
        assert_eq!(result.status, CaseStatus::Pass, "{result:?}");
    }
}

#[test]
fn what_is_damaged_or_lost_is_seen() {
    for fault in [Fault::BitFlip, Fault::Drop] {
        let faulty = || FaultyTransport::new(InProcessTransport::new(), FaultPlan::at_rate(fault, 1.0, 7));
        let failed: Vec<String> = cases(&faulty())
            .into_iter()
            .filter(|result| result.status == CaseStatus::Fail)
            .map(|result| result.id)
            .collect();
        for id in ["l4.test.scattered_writes", "l4.test.reads"] {
            assert!(failed.iter().any(|failed| failed == id), "{fault:?}: {failed:?}");
        }
        let error = measure(&mut over(&faulty()).unwrap(), &EFFORT).unwrap_err();
        assert!(error.detail.contains("came back as another"), "{fault:?}: {error}");
    }
}

#[test]
fn rates_are_of_what_was_asked_for() {
    let device = Arc::new(ReferenceDevice::default());
    let mut far = OnDevice::new(device.clone(), memory(EFFORT.large_bytes).unwrap()).unwrap();
    for rate in measure(&mut far, &EFFORT).unwrap() {
        assert_eq!((rate.bytes, rate.tries, rate.latency_tries), (EFFORT.large_bytes, 3, 3));
        assert!(rate.bytes_per_s_median > 0.0 && rate.bytes_per_s_max >= rate.bytes_per_s_median);
        assert!(rate.latency_us_min > 0.0 && rate.latency_us_median >= rate.latency_us_min);
    }
    assert!(OnDevice::pinned(device, memory(8).unwrap()).unwrap().is_none(), "it has no copies to speed up");
}

#[test]
fn the_table_has_a_line_for_each_link_and_its_trouble() {
    let [there, back] = measure(&mut over(&InProcessTransport::new()).unwrap(), &EFFORT).unwrap();
    let good = MeasuredLink {
        link: "shm".into(),
        from: "host memory".into(),
        to: "host memory".into(),
        details: "rxe0".into(),
        there: Some(there),
        back: Some(back),
        problem: None,
    };
    let bad = MeasuredLink {
        link: "tcp".into(),
        there: None,
        back: None,
        problem: Some("cut".into()),
        ..good.clone()
    };
    let mut document = LinksDocument::new("2026-11-21T00:00:00Z".into(), "profile --links".into(), vec![]);
    document.links = vec![good, bad];
    let text = document.to_string();
    assert_eq!(text.lines().count(), 3, "{text}");
    assert!(text.contains("rxe0") && text.contains("FAILED: cut"), "{text}");
    let again: LinksDocument = serde_json::from_str(&serde_json::to_string(&document).unwrap()).unwrap();
    assert_eq!(again, document);
}

#[test]
fn the_published_schema_is_that_of_the_program() {
    schema::assert_published("links-1.json", &LinksDocument::json_schema(), "links");
}
