//! What people read of a validation: its page, and two reports beside each other.

use crate::folder::Folder;
use crate::schema;
use mixfleet_hal::Device;
use mixfleet_hwtests::profile::compare::ComparisonVerdict;
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::validate::diff::MovedNumber;
use mixfleet_hwtests::validate::{
    CaseResult, CaseStatus, Environment, PartFile, ReadReport, RunOutcome, SoakPhase, SoakSample, Validation,
    ValidationDiff, ValidationPlan, diff_page, package,
};

fn gemm(share: f64) -> CaseResult {
    CaseResult::pass("l1.gemm.m1").fact("error_of_bound_max", share)
}

fn wrong(id: &str, share: f64) -> CaseResult {
    let reason = "out[0] is 5e0, must be 1e0 within 1.00e-6: 4000000.000 times that\nmore";
    CaseResult::new(id, CaseStatus::Fail, reason).fact("error_of_bound_max", share)
}

fn point(id: &str, seconds: f64, spread: f64) -> CaseResult {
    let result = CaseResult::pass(format!("l3.{id}")).fact("seconds", seconds);
    result.fact("seconds_p5", seconds * (1.0 - spread)).fact("seconds_p95", seconds * (1.0 + spread))
}

fn sample(t_s: f64, phase: SoakPhase, rate: f64) -> SoakSample {
    let (wrong, temperature_c, power_w, clock_mhz) = (Vec::new(), Some(60.0), Some(200.0), Some(1500.0));
    SoakSample {
        t_s,
        phase,
        batches: 9,
        busy_s: 1.0,
        rate: Some(rate),
        wrong,
        temperature_c,
        power_w,
        clock_mhz,
    }
}

fn report(cases: Vec<CaseResult>, samples: Vec<SoakSample>, part: Option<&str>) -> Validation {
    let device = Some(ReferenceDevice::default().info().clone());
    let part = part.map(|text| PartFile::parse(text).unwrap());
    Validation::new(
        &ValidationPlan::new("d"),
        RunOutcome { device, cases, samples },
        part.as_ref(),
        "2026-11-26",
    )
}

fn read(report: Validation) -> ReadReport {
    ReadReport { report, environment: None }
}

/// The page of a report, as in its folder.
fn page(name: &str, report: &Validation) -> String {
    let folder = Folder::new(&format!("report-{name}"));
    let environment = Environment {
        commit: Some("c0ffee".to_owned()),
        features: vec!["full".to_owned()],
        build: "x86_64 linux".to_owned(),
        ..Environment::of(report)
    };
    package::write(&folder.0, report, &environment).unwrap();
    let back = ReadReport::open(&folder.0).unwrap();
    assert_eq!((&back.report, back.environment.unwrap()), (report, environment));
    std::fs::read_to_string(folder.0.join("report.html")).unwrap()
}

#[test]
fn a_page_of_a_failure_names_it_first_and_draws_how_far_off_it_is() {
    let report =
        report(vec![gemm(0.5), wrong("l1.fill.b4", 72_886.0), wrong("l1.fill.b8", 2.0)], Vec::new(), None);
    assert_eq!(report.levels[0].error_of_bound_max, Some(72_886.0));
    let page = page("failure", &report);
    let first = page.find("FAIL: l1.fill.b4: out[0] is 5e0").expect("the first failure");
    assert!(
        page.find("<p").is_some_and(|paragraph| paragraph < first)
            && page[..first].matches("<h2").count() == 0
    );
    assert!(page.contains("times that… (and 1 more)"), "the reason is cut at its first line");
    assert!(page.contains("72886.000"), "the worst ratio");
    assert!(page.contains("cases of L1 by their largest error") && page.contains("further beyond"));
    assert!(page.contains("commit c0ffee, features: full, build: x86_64 linux"), "{page}");
}

#[test]
fn a_page_shows_claims_soak_roofline_and_what_passed_with_its_meaning() {
    let part = "match = { name = \".\" }\n[[claim]]\npoint = \"memory_read.64MiB\"\nvalue = 1\nunit = \"GB/s\"\n\
                at_least = 0.5\nsource = \"a test\"\n";
    let read = point("memory_read.64MiB", 1e-3, 0.01).fact("bytes_per_s", 9e9);
    let product =
        point("gemm.bf16.m64.n64.k64", 1e-6, 0.01).fact("flop_per_s", 1e12).fact("bytes_per_s", 1e9);
    let samples = (0..8)
        .map(f64::from)
        .flat_map(|t| [sample(t, SoakPhase::Compute, 1e12), sample(t + 0.5, SoakPhase::Bandwidth, 1e9)]);
    let report = report(vec![gemm(0.25), read, product], samples.collect(), Some(part));
    let page = page("charts", &report);
    for (words, what) in [
        ("far beyond the claim: check the claim and the clock", "the remark"),
        ("share of the claim", "claims against measured"),
        ("arithmetic rate over FLOP per byte", "the roofline"),
        ("clock over time in s", "the clock of the soak"),
        ("temperature in C over time in s", "its temperature"),
        ("power over time in s", "its power"),
        ("<summary>L1 conformance: 1 passed</summary>", "what passed"),
        ("agrees with a float64 oracle", "what that means"),
        ("largest error 0.250 of its bound", "what was found"),
    ] {
        assert!(page.contains(words), "{what}: {words}");
    }
    assert_eq!(
        page.matches("<figure>").count(),
        page.matches("class=\"data\"").count(),
        "a table for each chart"
    );
}

#[test]
fn a_report_beside_itself_is_the_same() {
    let cases = vec![gemm(0.5), wrong("l1.fill.b4", 3.0), point("launch.empty", 1e-5, 0.02)];
    let samples: Vec<SoakSample> = (0..8).map(|t| sample(f64::from(t), SoakPhase::Compute, 1e12)).collect();
    let one = read(report(cases, samples, None));
    let diff = ValidationDiff::new(&one, &one);
    let lists = [&diff.broke, &diff.waived, &diff.lost, &diff.mended, &diff.gained];
    assert!(
        lists.iter().all(|list| list.is_empty()) && diff.errors.is_empty() && diff.surroundings.is_empty()
    );
    assert_eq!((diff.numbers.len(), diff.moved().len()), (2, 0));
    assert!(diff_page(&diff).contains("Nothing that passed before fails now."));
}

#[test]
fn what_changed_is_in_the_list_of_its_kind_and_swapping_the_reports_mirrors_them() {
    let not_run = |id: &str| CaseResult::new(id, CaseStatus::NotRun, "no time");
    let before = vec![
        gemm(0.5),
        CaseResult::pass("l1.broke"),
        wrong("l1.mended", 2.0),
        CaseResult::pass("l1.lost"),
        CaseResult::pass("l1.gone"),
        not_run("l1.gained"),
        wrong("l1.still", 2.0),
        point("memory_read.64MiB", 1e-3, 0.01),
        point("memory_write.64MiB", 1e-3, 0.20),
    ];
    let after = vec![
        gemm(0.75),
        wrong("l1.broke", 9.0),
        CaseResult::pass("l1.mended"),
        not_run("l1.lost"),
        CaseResult::pass("l1.gained"),
        wrong("l1.still", 2.0),
        CaseResult::pass("l1.new"),
        point("memory_read.64MiB", 2e-3, 0.01),
        point("memory_write.64MiB", 1.2e-3, 0.20),
    ];
    let (before, after) = (read(report(before, Vec::new(), None)), read(report(after, Vec::new(), None)));
    let diff = ValidationDiff::new(&before, &after);
    let ids = |list: &[mixfleet_hwtests::validate::diff::ChangedCase]| -> Vec<String> {
        list.iter().map(|case| case.id.clone()).collect()
    };
    assert_eq!(ids(&diff.broke), ["l1.broke"]);
    assert_eq!(ids(&diff.mended), ["l1.mended"]);
    assert_eq!(ids(&diff.lost), ["l1.lost", "l1.gone"]);
    assert_eq!(ids(&diff.gained), ["l1.gained", "l1.new"]);
    let moved: Vec<(&str, f64, ComparisonVerdict)> = diff
        .moved()
        .into_iter()
        .map(|MovedNumber { id, ratio, verdict, .. }| (id.as_str(), *ratio, *verdict))
        .collect();
    assert_eq!(
        moved,
        [("l3.memory_read.64MiB", 0.5, ComparisonVerdict::Slower)],
        "within its spread is the same"
    );
    assert_eq!((diff.errors[0].a, diff.errors[0].b), (0.5, 0.75));
    let page = diff_page(&diff);
    assert!(page.contains("1 passed before and fail now; the first: l1.broke: out[0]"), "{page}");
    let text = diff.to_string();
    assert!(text.contains("l1.broke: pass -> fail") && text.contains("slower x0.500"), "{text}");

    let mirrored = ValidationDiff::new(&after, &before);
    assert_eq!((ids(&mirrored.broke), ids(&mirrored.mended)), (ids(&diff.mended), ids(&diff.broke)));
    assert_eq!(mirrored.moved()[0].ratio, 2.0);
}

#[test]
fn a_waived_failure_is_told_and_breaks_nothing() {
    let part = "match = { name = \".\" }\n[[waiver]]\ncase = \"l1.fill.*\"\nreason = \"errata\"\nuntil = 2099-01-01\n";
    let before = read(report(vec![CaseResult::pass("l1.fill.b4")], Vec::new(), None));
    let after = read(report(vec![wrong("l1.fill.b4", 2.0)], Vec::new(), Some(part)));
    let diff = ValidationDiff::new(&before, &after);
    assert_eq!((diff.broke.len(), diff.waived.len()), (0, 1));
}

#[test]
fn what_is_no_report_is_told_with_its_file() {
    let folder = Folder::new("no-report");
    let told = |text: Option<&str>| {
        if let Some(text) = text {
            std::fs::write(folder.0.join("results.json"), text).unwrap();
        }
        let error = ReadReport::open(&folder.0).unwrap_err();
        assert!(error.contains("results.json"), "{error}");
    };
    told(None);
    for text in ["", "{", "[]", "{\"schema\": \"mixfleet.profile/1\"}", "\u{0}"] {
        told(Some(text));
    }
    let mut other = report(vec![gemm(0.5)], Vec::new(), None);
    other.schema = "mixfleet.validation/9".to_owned();
    told(Some(&serde_json::to_string(&other).unwrap()));
}

#[test]
fn the_published_schema_is_that_of_the_program() {
    schema::assert_published("validation-diff-1.json", &ValidationDiff::json_schema(), "reports");
}
