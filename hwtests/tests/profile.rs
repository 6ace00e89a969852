//! The profiler against a device whose law is known, the reference device, and broken ones.

use crate::law::{
    BANDWIDTH, CACHE_SPEED, COMMAND_S, COMPUTE, COPY_S, Flaw, LAUNCH_S, LawDevice, TIRED, cached,
    law as law_of,
};
use crate::schema;
use mixfleet_hal::DType;
use mixfleet_hal::profile::{DeviceProfile, Evidence, EvidenceBasis, Sustained};
use mixfleet_hal::units::Bytes;
use mixfleet_hwtests::profile::compare::{Comparison, ComparisonVerdict};
use mixfleet_hwtests::profile::{
    Conformance, Fact, Flag, PointResult, PointStatus, ProfileDocument, ProfileLevel, ProfileOptions,
    ProfileProgress, WorkItem, card, conform, device_profile_schema, measure, page, run,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use serde_json::Value;
use std::sync::atomic::Ordering;

/// Points that the oracle can keep up with.
const POINTS: [&str; 22] = [
    "gemm.bf16.m1.n128.k256",
    "gemm.bf16.m4.n128.k256",
    "gemm.bf16.m16.n128.k256",
    "gemm.bf16.m64.n128.k256",
    "gemm.bf16.m16.n64.k128.acc",
    "gemm.bf16.m64.n256.k128",
    "attn_decode.bf16.b1.c64.gqa2.kv2.d32",
    "attn_decode.bf16.b4.c256.gqa2.kv2.d32",
    "attn_prefill.bf16.t16.c16.gqa2.kv2.d32",
    "rms_norm.bf16.t64.h1024",
    "silu_mul.bf16.e65536",
    "kv_gather.bf16.t128.kv2.d32",
    "memory_read.64KiB",
    "memory_read.256KiB",
    "memory_read.4MiB",
    "memory_write.4MiB",
    "memory_copy.4MiB",
    "copy_h2d.4KiB",
    "copy_h2d.64KiB",
    "copy_h2d.1MiB",
    "copy_h2d.4MiB",
    "launch.commands100",
];

fn options(device: &LawDevice, only: &[&str]) -> ProfileOptions {
    ProfileOptions {
        only: only.iter().map(|id| (*id).to_owned()).collect(),
        cold_bytes: 2 << 20,
        memory_bytes_max: Some(16 << 20),
        clock: device.clock.clone(),
        measured_at: "2026-11-20T12:00:00Z".to_owned(),
        command: "test".to_owned(),
        facts: vec![Fact::new("governor", "none")],
        price: Some((0.5, "a test".to_owned())),
        ..ProfileOptions::new(ProfileLevel::Quick)
    }
}

fn profile(flaw: Flaw, only: &[&str]) -> ProfileDocument {
    let device = LawDevice::new(flaw);
    let options = options(&device, only);
    run(&device, &options, &mut |_| {})
}

fn median(point: &PointResult) -> f64 {
    assert_eq!(point.status, PointStatus::Ok, "{}: {:?}", point.id, point.reason);
    point.seconds.as_ref().unwrap().median
}

fn near(got: f64, want: f64, share: f64, what: &str) {
    assert!((got / want - 1.0).abs() <= share, "{what}: {got:e}, must be {want:e}");
}

#[test]
fn every_time_is_that_of_the_law() {
    let document = profile(Flaw::None, &POINTS);
    assert_eq!(document.points.len(), POINTS.len());
    assert!(document.complete && document.checks.iter().all(|check| check.passed && check.cases > 0));
    for point in &document.points {
        let Some(WorkItem::Op(sig)) = WorkItem::parse(&point.id, 8) else { continue };
        // activations stay in place and may stay in the cache; weights, even a norm's, are others each time
        let warm = matches!(sig.name(), "silu_mul" | "add" | "rope");
        let want = if warm { cached(&sig) } else { law_of(&sig) };
        near(median(point), want.max(0.1 * (want + COMMAND_S)), 0.05, &point.id);
        assert_eq!(point.flags, [], "{}", point.id);
    }
    let rate = |id: &str| {
        let point = document.point(id).unwrap();
        point.bytes / median(point)
    };
    near(rate("memory_read.4MiB"), BANDWIDTH, 0.02, "beyond the cache");
    near(rate("memory_read.256KiB"), CACHE_SPEED * BANDWIDTH, 0.05, "inside the cache");
}

/// What a command of the chain takes beyond the same one alone.
fn dependence_s() -> f64 {
    let chain = [
        "rms_norm.bf16.t8.h256",
        "gemm.bf16.m8.n512.k256",
        "gemm.bf16.m8.n512.k256",
        "silu_mul.bf16.e4096",
        "gemm.bf16.m8.n256.k512.acc",
    ];
    let slower = |id: &&str| match WorkItem::parse(id, 8) {
        Some(WorkItem::Op(sig)) => {
            let alone = cached(&sig).max(0.1 * (cached(&sig) + COMMAND_S));
            (law_of(&sig) - alone) / chain.len() as f64
        }
        other => panic!("{id}: {other:?}"),
    };
    chain.iter().map(slower).sum()
}

#[test]
fn launches_that_a_device_joins_are_not_counted_in_a_step() {
    let document = profile(Flaw::Joins, &POINTS);
    near(document.fits.launch_per_command_s.unwrap(), COMMAND_S, 0.02, "a command");
    // but for up, which is like the gate before it
    let wanted = dependence_s() - 0.8 * COMMAND_S;
    assert!(wanted < 0.0 && wanted > -COMMAND_S, "{wanted}");
    near(-document.fits.dependence_s.unwrap(), -wanted, 0.05, "dependence");
    let profile = document.device_profile().unwrap();
    near(profile.launch_per_command.0, COMMAND_S + wanted, 0.1, "a command of a step");
}

#[test]
fn fits_and_summary_recover_the_law() {
    let document = profile(Flaw::None, &POINTS);
    let fits = &document.fits;
    near(fits.launch_s.unwrap(), LAUNCH_S, 0.02, "launch");
    near(fits.launch_per_command_s.unwrap(), COMMAND_S, 0.02, "a command");
    // by this law a command is quick where the one before it was the same, which in a chain it never is
    near(fits.dependence_s.unwrap(), dependence_s(), 0.05, "dependence");
    for line in &fits.host_to_device {
        near(line.fixed_s, COPY_S.0, 0.05, "copy, fixed");
        near(line.s_per_byte, COPY_S.1, 0.05, "copy, per byte");
    }
    assert_eq!(fits.host_to_device.len(), 3);
    let s = &document.summary;
    near(s.memory_read.as_ref().unwrap().rate, BANDWIDTH, 0.02, "read");
    assert_eq!(s.memory_read.as_ref().unwrap().point, "memory_read.4MiB");
    near(s.ridge_rows.unwrap(), s.compute[0].reached.rate / BANDWIDTH, 0.02, "ridge");
    assert_eq!((s.ok as usize, s.flagged, s.error), (POINTS.len(), 0, 0));
    let economics = document.economics.as_ref().unwrap();
    near(economics.bytes_per_second.unwrap(), 2.0 * BANDWIDTH, 0.02, "per dollar");
}

#[test]
fn its_device_profile_predicts_what_was_not_measured() {
    let document = profile(Flaw::None, &POINTS);
    let profile = document.device_profile().unwrap();
    assert_eq!(profile.bandwidths.len(), 5);
    near(profile.host_to_device.time(Bytes(1e5)).unwrap().0, COPY_S.0 + 1e5 * COPY_S.1, 0.05, "a copy");
    for id in ["gemm.bf16.m2.n128.k256", "gemm.bf16.m8.n128.k256", "gemm.bf16.m32.n128.k256"] {
        let Some(WorkItem::Op(sig)) = WorkItem::parse(id, 8) else { panic!("{id}") };
        near(profile.time(&sig).0, law_of(&sig), 0.15, id);
    }
    let Some(WorkItem::Op(sig)) = WorkItem::parse("gemm.bf16.m64.n128.k256", 8) else { panic!() };
    let batch = profile.batch_time(&[sig, sig]).0;
    let dependence = document.fits.dependence_s.unwrap();
    near(batch, LAUNCH_S + 2.0 * (COMMAND_S + dependence + law_of(&sig)), 0.02, "a batch");
    assert!(profile.compute[0].1.0 <= COMPUTE * 1.01);
}

#[test]
fn within_a_budget_of_points_the_rest_is_predicted_and_the_error_to_expect_is_told() {
    let rows = [1, 2, 4, 8, 16, 24, 32, 48, 64];
    let gemms = rows.iter().flat_map(|m| [64, 128].map(|n| format!("gemm.bf16.m{m}.n{n}.k256")));
    let steps = [64, 128, 256].map(|keys| format!("attn_decode.bf16.b4.c{keys}.gqa2.kv2.d32"));
    let names: Vec<String> =
        gemms.chain(steps).chain(["memory_read.4MiB", "silu_mul.bf16.e65536"].map(str::to_owned)).collect();
    let device = LawDevice::new(Flaw::None);
    let only: Vec<&str> = names.iter().map(String::as_str).collect();
    let all = options(&device, &only);
    let document = run(&device, &ProfileOptions { points_max: Some(12), ..all }, &mut |_| {});
    assert_eq!(document.points.len(), names.len());
    let limited = |point: &&PointResult| point.id.starts_with("gemm") || point.id.starts_with("attn");
    let (left, measured): (Vec<_>, Vec<_>) =
        document.points.iter().partition(|point| point.status == PointStatus::Skipped);
    assert_eq!(measured.iter().copied().filter(limited).count(), 12);
    assert!(left.iter().all(|point| point.reason.as_ref().unwrap().contains("budget")), "{left:?}");

    let expected: Vec<(&str, usize)> =
        document.expected.iter().map(|expected| (expected.op.as_str(), expected.points)).collect();
    assert_eq!(expected, [("gemm", 9), ("attn_decode", 3)]);
    assert!(document.expected[0].error > 0.0 && document.expected[0].error < 0.5, "{:?}", document.expected);
    let profile = document.device_profile().unwrap();
    for point in &left {
        let sig = point.sig.unwrap();
        let predicted = profile.points.iter().find(|point| point.sig == sig).expect("a prediction");
        near(predicted.time.0, law_of(&sig), 0.3, &point.id);
    }
    let told = profile.provenance.evidence.iter().find(|evidence| evidence.op == "gemm").unwrap();
    assert_eq!(told.error, Some(document.expected[0].error));
    let card = card(&document);
    assert!(card.contains("predicts") && card.contains("from 9 points"), "{card}");
    assert!(profile_without_budget(&device, &only).expected.is_empty());
}

fn profile_without_budget(device: &LawDevice, only: &[&str]) -> ProfileDocument {
    run(device, &options(device, &only[..2]), &mut |_| {})
}

#[test]
fn a_wrong_operation_gets_no_number_and_a_lacking_one_is_no_error() {
    let document = profile(Flaw::Wrong("silu_mul"), &POINTS);
    let point = document.point("silu_mul.bf16.e65536").unwrap();
    assert_eq!((point.status, point.seconds.is_none()), (PointStatus::Error, true));
    assert!(point.reason.as_ref().unwrap().contains("conformance"), "{:?}", point.reason);
    assert!(document.point("rms_norm.bf16.t64.h1024").unwrap().is_ok());
    assert_eq!(document.checks.iter().filter(|check| !check.passed).count(), 1);
    assert!(card(&document).contains("WRONG") && document.complete);

    let document = profile(Flaw::Lacks("attn_decode"), &POINTS);
    let point = document.point("attn_decode.bf16.b1.c64.gqa2.kv2.d32").unwrap();
    assert_eq!(point.status, PointStatus::Unsupported);
    assert_eq!((document.summary.unsupported, document.summary.error), (2, 0));
}

#[test]
fn whatever_was_asked_for_and_did_not_come_is_told_with_the_reason() {
    let only = ["attn_decode.bf16.b1.c64.gqa2.kv2.d32", "rms_norm.bf16.t64.h1024", "attn_*", "gemm.*.m77.*"];
    let document = profile(Flaw::Lacks("attn_decode"), &only[..2]);
    let missing = document.missing(&only.map(str::to_owned));
    assert_eq!(missing.len(), 3, "{missing:?}");
    assert!(missing[0].contains("unsupported: the device has no"), "{missing:?}");
    assert!(missing[2].contains("no point of the quick level is called so"), "{missing:?}");
    assert!(
        profile(Flaw::None, &["rms_norm.bf16.t64.h1024"])
            .missing(&only[1..2].iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
            .is_empty()
    );
}

#[test]
fn noise_is_flagged_and_not_hidden() {
    let document = profile(Flaw::Noisy, &["rms_norm.bf16.t4.h256"]);
    let point = &document.points[0];
    assert!(point.flags.contains(&Flag::Noisy) && point.flags.contains(&Flag::Unsteady), "{:?}", point.flags);
    assert_eq!(document.summary.flagged, 1);
    assert!(point.seconds.as_ref().unwrap().samples.len() >= 3);
}

#[test]
fn what_would_take_too_long_is_left_out_with_its_time() {
    let mut device = LawDevice::new(Flaw::None);
    device.slowness = 3e4;
    let options = options(&device, &["rms_norm.bf16.t4.h256", "memory_copy.8MiB"]);
    let document = run(&device, &options, &mut |_| {});
    let point = document.point("rms_norm.bf16.t4.h256").unwrap();
    assert!(point.flags.contains(&Flag::FewSamples) || point.is_ok(), "{point:?}");
    let hurried = ProfileOptions { budget_s: Some(0.001), ..options };
    let document = run(&device, &hurried, &mut |_| {});
    assert!(document.points.iter().all(PointResult::is_ok), "a named point is measured");
    let options = ProfileOptions { only: vec!["small".to_owned()], ..hurried };
    let document = run(&device, &options, &mut |_| {});
    assert!(!document.points.is_empty());
    for point in &document.points {
        assert_eq!(point.status, PointStatus::Skipped);
        assert!(point.reason.as_ref().unwrap().contains("would take"), "{:?}", point.reason);
    }
    assert!(document.complete, "left out on purpose is not interrupted");
}

#[test]
fn what_was_left_out_for_lack_of_time_is_measured_in_the_time_left_over() {
    let mut device = LawDevice::new(Flaw::None);
    device.slowness = 1e4;
    // 512 rows take 0.6 s each time: more than a quick profile gives to one point
    let options = ProfileOptions { budget_s: Some(500.0), ..options(&device, &["rms_norm.*.h2048"]) };
    let mut late = Vec::new();
    let document = run(&device, &options, &mut |progress| {
        if let ProfileProgress::Done(point) = progress
            && point.reason.as_ref().is_some_and(|reason| reason.contains("would take"))
        {
            late.push(point.id.clone());
        }
    });
    assert_eq!(late, ["rms_norm.bf16.t512.h2048"]);
    assert!(document.points.iter().all(PointResult::is_ok), "{:?}", document.points);
}

#[test]
fn an_interruption_leaves_a_document_that_says_so() {
    let device = LawDevice::new(Flaw::None);
    let options = options(&device, &POINTS);
    let cancelled = options.cancelled.clone();
    let document = run(&device, &options, &mut |progress| {
        if let ProfileProgress::Done(_) = progress {
            cancelled.store(true, Ordering::Relaxed);
        }
    });
    assert!(!document.complete && document.points.len() == POINTS.len());
    assert_eq!(document.summary.ok, 1);
    assert_eq!(document.points[5].reason.as_deref(), Some("interrupted"));
    assert!(card(&document).contains("INCOMPLETE") && page(&document).contains("Incomplete"));
}

#[test]
fn a_long_run_sees_a_part_slow_down() {
    let only = ["sustained.stream"];
    let fresh = profile(Flaw::None, &only);
    near(fresh.points[0].long_run.as_ref().unwrap().ratio, 1.0, 1e-6, "fresh");
    let tired = profile(Flaw::Tires, &only);
    let run = tired.points[0].long_run.as_ref().unwrap();
    near(run.ratio, TIRED, 0.01, "tired");
    assert!(run.seconds >= 2.0 && run.states.len() > 5 && run.joules_per_run.is_none());
}

#[test]
fn points_are_measured_by_name_and_unknown_names_come_back() {
    let device = LawDevice::new(Flaw::None);
    let options = options(&device, &[]);
    let points =
        measure(&device, &["rope.bf16.t4.heads2.d32", "no.such.point", "memory_read.64KiB"], &options);
    assert_eq!(points.len(), 3);
    assert_eq!(points.iter().filter(|point| point.is_ok()).count(), 2);
    let unknown = points.iter().find(|point| point.id == "no.such.point").unwrap();
    assert_eq!(unknown.status, PointStatus::Skipped);
}

#[test]
fn the_reference_device_can_be_profiled() {
    let options = ProfileOptions {
        cold_bytes: 1 << 18,
        memory_bytes_max: Some(1 << 20),
        ..ProfileOptions::new(ProfileLevel::Quick)
    };
    let ids = ["rms_norm.bf16.t1.h64", "gemm.f32.m3.n16.k32", "launch.empty", "copy_d2h.4KiB"];
    for point in measure(&ReferenceDevice::default(), &ids, &options) {
        assert!(median(&point) >= 0.0, "{}", point.id);
    }
}

#[test]
fn comparing_takes_spread_into_account() {
    let a = profile(Flaw::None, &POINTS);
    let mut b = a.clone();
    b.economics.as_mut().unwrap().usd_per_hour = 1.0;
    let same = Comparison::new(&a, &b);
    assert!(
        same.points.iter().all(|p| p.verdict == ComparisonVerdict::Same && p.ratio_per_dollar == Some(0.5))
    );
    assert!(same.same_fingerprint && same.below(0.99).is_empty());
    let id = "gemm.bf16.m64.n128.k256";
    let slower = b.points.iter_mut().find(|point| point.id == id).unwrap();
    let stats = slower.seconds.as_mut().unwrap();
    for value in [&mut stats.median, &mut stats.p5, &mut stats.p95] {
        *value *= 1.5;
    }
    let worse = Comparison::new(&a, &b);
    assert_eq!(worse.below(0.9).iter().map(|p| p.id.as_str()).collect::<Vec<_>>(), [id]);
    assert!(worse.below(0.5).is_empty() && worse.to_string().contains("slower"));
    // half of the samples spread as widely as the difference: no verdict then
    let noisy = b.points.iter_mut().find(|point| point.id == id).unwrap().seconds.as_mut().unwrap();
    (noisy.p5, noisy.p95) = (noisy.median * 0.4, noisy.median * 1.6);
    assert!(Comparison::new(&a, &b).below(0.9).is_empty());
}

#[test]
fn a_document_is_what_its_schema_says_and_reads_back() {
    let document = profile(Flaw::None, &POINTS);
    let text = serde_json::to_string(&document).unwrap();
    assert_eq!(ProfileDocument::from_json(&text).unwrap(), document);
    let schema = ProfileDocument::json_schema();
    let value = serde_json::to_value(&document).unwrap();
    assert_eq!(conform(&schema, &value), Conformance::default());
    let mut broken = value.clone();
    broken["points"][0]["status"] = "fine".into();
    broken["device"].as_object_mut().unwrap().remove("fingerprint");
    broken["extra"] = true.into();
    let found = conform(&schema, &broken);
    assert_eq!((found.errors.len(), found.unknown), (2, vec!["extra".to_owned()]), "{:?}", found.errors);
    assert!(found.errors.iter().any(|error| error.starts_with("device.fingerprint is missing; add it")));
    assert!(
        found.errors.iter().any(|error| error.starts_with("points[0].status is \"fine\"; expected one of"))
    );
    for wrong in ["{", "{}", r#"{"schema":"mixfleet.profile/2"}"#, r#"{"schema":"mixfleet.profile/1"}"#] {
        assert!(ProfileDocument::from_json(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn the_published_schema_is_that_of_the_program() {
    schema::assert_published("profile-1.json", &ProfileDocument::json_schema(), "profile");
    schema::assert_published("device-profile-1.json", &device_profile_schema(), "profile");
}

/// A path into a document.
type Steps = Vec<Value>;

fn fields(value: &Value, path: &Steps, all: &mut Vec<Steps>) {
    let mut inside = |key: Value, value: &Value, counts: bool| {
        let path = [path.clone(), vec![key]].concat();
        all.extend(counts.then(|| path.clone()));
        fields(value, &path, all);
    };
    match value {
        Value::Object(object) => {
            object.iter().for_each(|(key, value)| inside(key.as_str().into(), value, true))
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(at, value)| inside(at.into(), value, false))
        }
        _ => {}
    }
}

fn at<'a>(document: &'a mut Value, path: &[Value]) -> &'a mut Value {
    path.iter().fold(document, |value, step| match step {
        Value::String(key) => &mut value[key.as_str()],
        index => &mut value[usize::try_from(index.as_u64().unwrap()).unwrap()],
    })
}

#[test]
fn the_schema_of_device_profiles_and_their_reader_refuse_the_same_documents() {
    let mut profile = profile(Flaw::None, &POINTS).device_profile().unwrap();
    profile.provenance.evidence.push(Evidence {
        op: "gemm".into(),
        dtype: DType::Bf16,
        basis: EvidenceBasis::Borrowed { from: vec!["L4".into()] },
        error: Some(0.1),
    });
    profile.sustained = Some(Sustained { compute: 0.9, bandwidth: 1.0 });
    let (schema, document) = (device_profile_schema(), serde_json::to_value(&profile).unwrap());
    assert_eq!(conform(&schema, &document), Conformance::default());
    let reads = |document: &Value| serde_json::from_value::<DeviceProfile>(document.clone()).is_ok();
    let mut paths = Vec::new();
    fields(&document, &Steps::new(), &mut paths);
    let (mut missing, mut wrong) = (0, 0);
    for path in &paths {
        let (key, before) = path.split_last().unwrap();
        let mut without = document.clone();
        at(&mut without, before).as_object_mut().unwrap().remove(key.as_str().unwrap());
        assert_eq!(conform(&schema, &without).errors.is_empty(), reads(&without), "without {path:?}");
        missing += usize::from(!reads(&without));
        let mut other = document.clone();
        *at(&mut other, path) = serde_json::json!([[true]]);
        assert_eq!(conform(&schema, &other).errors.is_empty(), reads(&other), "another type at {path:?}");
        wrong += usize::from(!reads(&other));
        let mut more = document.clone();
        let object = at(&mut more, before).as_object_mut().unwrap();
        object.insert("none_of_ours".into(), 1.into());
        let found = conform(&schema, &more);
        let told = if reads(&more) { found.unknown.len() == 1 } else { !found.errors.is_empty() };
        assert!(told, "beside {path:?}: {found:?}");
    }
    assert!(missing > 100 && wrong == paths.len(), "{missing} required fields, {wrong} of {}", paths.len());
    let mut negative = document.clone();
    let points = negative["points"].as_array_mut().unwrap();
    let gemm = points.iter().position(|point| point["sig"]["op"] == "gemm").unwrap();
    points[gemm]["sig"]["m"] = (-1).into();
    let error = &conform(&schema, &negative).errors[0];
    assert!(error.starts_with(&format!("points[{gemm}].sig.m is -1; expected")), "{error}");
}

#[test]
fn card_and_page_show_the_numbers_and_ask_for_nothing_from_outside() {
    let document = profile(Flaw::None, &POINTS);
    let card = card(&document);
    for word in ["compute", "bf16", "memory", "read", "|####", "1 $/h", "links", "launch", "a law"] {
        assert!(card.contains(word), "{word}\n{card}");
    }
    assert!(card.lines().all(|line| line.chars().count() <= 100), "{card}");
    let mut odd = document.clone();
    let reached = odd.summary.memory_read.clone().unwrap().point;
    let noisy = odd.points.iter_mut().find(|point| point.id == reached).unwrap();
    noisy.flags.push(Flag::Noisy);
    noisy.seconds.as_mut().unwrap().cv = 0.68;
    odd.fits.host_to_device[0].fixed_s = 0.0;
    let odd = mixfleet_hwtests::profile::card(&odd);
    let line = odd.lines().find(|line| line.contains("read ")).unwrap();
    assert!(line.contains("noisy 68 %"), "{odd}");
    assert!(card.contains("+ ") && !odd.contains("+ 0.00"), "{odd}");
    let mut known = document.clone();
    known.device.name = "NVIDIA GeForce RTX 4090".into();
    known.summary.memory_read.as_mut().unwrap().rate = 504e9;
    let known = mixfleet_hwtests::profile::card(&known);
    let line = known.lines().find(|line| line.contains("read ")).unwrap();
    assert!(line.contains("|#########.........|  50 %") && known.contains("of RTX-4090"), "{known}");
    assert!(!card.contains(" of RTX-4090"), "{card}");
    let listed = mixfleet_hwtests::profile::points(&document);
    let measured = document.points.iter().filter(|point| point.seconds.is_some()).count();
    let rows = listed.lines().filter(|line| line.contains(['\u{2588}']));
    assert_eq!(rows.count(), measured, "a distribution each: {listed}");
    let page = page(&document);
    assert!(page.matches("<svg").count() >= 4, "{}", page.matches("<svg").count());
    for word in ["http:", "https:", "<script", "src=", "NaN", "inf\""] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(page.contains("gemm.bf16.m64.n128.k256") && page.contains("viewBox"));
}
