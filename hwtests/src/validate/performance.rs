//! Level 3: compares what the profile measures with the vendor's claims. A number without a claim is only
//! recorded.

use super::case::{CaseResult, CaseStatus};
use super::part::{Claim, Quantity};
use super::protocol::{ChildMessage, Settings, ValidationEffort};
use crate::profile::{self, PointResult, ProfileProgress};
use mixfleet_hal::Device;
use serde_json::{Value, json};

/// Ratio to the claim above which a measurement is remarked upon, since the claim or the clock may be wrong.
const BEYOND: f64 = 1.25;

/// Measures the `wanted` points of the profile, with claimed ones last and longer; returns whether the device
/// is still usable.
pub(crate) fn run(
    device: &dyn Device,
    settings: &Settings,
    wanted: &dyn Fn(&str) -> bool,
    emit: &mut dyn FnMut(ChildMessage),
) -> bool {
    let (level, open, points) = planned(settings, device.limits().kv_page_tokens, wanted);
    // a claim is worth more samples, and more time for a slow point
    pass(device, level, open, emit) && pass(device, profile::ProfileLevel::Default, points, emit)
}

/// The level of points without a claim, those points, and the claimed ones.
pub(crate) fn planned(
    settings: &Settings,
    page_tokens: u32,
    wanted: &dyn Fn(&str) -> bool,
) -> (profile::ProfileLevel, Vec<String>, Vec<String>) {
    let level = match settings.effort {
        ValidationEffort::Quick => profile::ProfileLevel::Quick,
        ValidationEffort::Full => profile::ProfileLevel::Default,
    };
    let all = profile::plan(level, page_tokens, &[], &[]).into_iter().map(|work| work.id());
    let claimed = |id: &String| settings.points.contains(id);
    let open: Vec<String> = all.filter(|id| !claimed(id) && wanted(&format!("l3.{id}"))).collect();
    let points = settings.points.iter().filter(|id| wanted(&format!("l3.{id}"))).cloned().collect();
    (level, open, points)
}

/// Measures the points `only`; returns whether the device is still usable.
fn pass(
    device: &dyn Device,
    level: profile::ProfileLevel,
    only: Vec<String>,
    emit: &mut dyn FnMut(ChildMessage),
) -> bool {
    if only.is_empty() {
        return true;
    }
    let options = profile::ProfileOptions { only, ..profile::ProfileOptions::new(level) };
    let mut good = true;
    profile::run(device, &options, &mut |progress| match progress {
        ProfileProgress::Begin { id, .. } if good => emit(ChildMessage::Begin(format!("l3.{id}"))),
        ProfileProgress::Done(point) if good => {
            let result = result(point);
            good = !result.status.ends_the_device();
            emit(ChildMessage::Case(result));
        }
        _ => {}
    });
    good
}

/// Measures single points by name.
pub(crate) fn measure(
    device: &dyn Device,
    points: &[&str],
    options: &profile::ProfileOptions,
) -> Vec<CaseResult> {
    profile::measure(device, points, options).iter().map(result).collect()
}

fn result(point: &PointResult) -> CaseResult {
    let reason = point.reason.clone().unwrap_or_default();
    let status = match point.status {
        profile::PointStatus::Ok => {
            let seconds = point.seconds.as_ref().map_or(f64::NAN, |stats| stats.median);
            let result = measured(&point.id, seconds, point.flops, point.bytes);
            let of = |value: fn(&profile::SampleStats) -> f64| point.seconds.as_ref().map(value);
            return result
                .fact("coefficient_of_variation", of(|stats| stats.cv))
                .fact("seconds_p5", of(|stats| stats.p5))
                .fact("seconds_p95", of(|stats| stats.p95))
                .fact("flags", &point.flags);
        }
        profile::PointStatus::Unsupported => CaseStatus::Unsupported,
        profile::PointStatus::Skipped => CaseStatus::NotRun,
        profile::PointStatus::Error if reason.starts_with("no answer in time") => CaseStatus::Timeout,
        profile::PointStatus::Error if reason.starts_with("device lost") => CaseStatus::DeviceLost,
        profile::PointStatus::Error => CaseStatus::Fail,
    };
    CaseResult::new(format!("l3.{}", point.id), status, reason)
}

/// Returns the result of a measured point; one run takes `seconds`, does `flops` and moves `bytes`.
fn measured(point: &str, seconds: f64, flops: f64, bytes: f64) -> CaseResult {
    let result = CaseResult::pass(format!("l3.{point}")).fact("seconds", seconds);
    let with = |result: CaseResult, name: &str, amount: f64| {
        if amount > 0.0 && seconds > 0.0 { result.fact(name, amount / seconds) } else { result }
    };
    let result = with(result, "flop_per_s", flops);
    with(result, "bytes_per_s", bytes)
}

/// What a case says about a claim.
enum Measure {
    /// Measured, in the claim's unit without prefix.
    Value(f64),
    /// Measured, but in another quantity: a copy has no FLOP/s.
    OtherQuantity,
    /// Not measured.
    None,
}

fn in_quantity(case: &CaseResult, quantity: Quantity) -> Measure {
    let name = match quantity {
        Quantity::BytesPerSecond => "bytes_per_s",
        Quantity::FlopPerSecond => "flop_per_s",
        Quantity::Seconds => "seconds",
    };
    match case.facts.get(name).and_then(Value::as_f64) {
        Some(value) => Measure::Value(value),
        None if case.facts.contains_key("seconds") => Measure::OtherQuantity,
        None => Measure::None,
    }
}

/// Judges the cases of level 3 by the claims. A claimed point that was not measured is not run; one that the
/// device does not support is a failed claim.
pub fn judge(cases: &mut Vec<CaseResult>, claims: &[Claim]) {
    let mut places = Vec::new();
    for claim in claims {
        let id = format!("l3.{}", claim.point);
        let at = cases.iter().position(|case| case.id == id).unwrap_or_else(|| {
            let reason = "claimed, and never measured: no such point, or the profile did not get there";
            cases.push(CaseResult::new(&id, CaseStatus::NotRun, reason));
            cases.len() - 1
        });
        places.push(at);
    }
    // each claim is judged by the measurement, independently of other claims
    let measured: Vec<CaseStatus> = cases.iter().map(|case| case.status).collect();
    for (claim, at) in claims.iter().zip(places) {
        apply(&mut cases[at], measured[at], claim);
    }
}

/// Marks the claims of a waived case.
pub(crate) fn waived(case: &mut CaseResult) {
    if let Some(Value::Array(claims)) = case.facts.get_mut("claims") {
        let wrong = claims.iter_mut().filter(|claim| claim["status"] != json!(CaseStatus::Pass));
        wrong.for_each(|claim| claim["status"] = json!(CaseStatus::Waived));
    }
}

fn apply(case: &mut CaseResult, status: CaseStatus, claim: &Claim) {
    let unit = claim.quantity.unit();
    let claimed = claim.in_words(claim.value, 12);
    let mut note = json!({
        "value": claim.value, "unit": unit, "at_least": claim.at_least, "source": claim.source,
        "claimed_in_words": claimed,
    });
    let mut failure = None;
    match in_quantity(case, claim.quantity) {
        Measure::Value(got) => {
            let share = match claim.quantity {
                Quantity::Seconds => claim.value / got,
                _ => got / claim.value,
            };
            let measured = claim.in_words(got, 4);
            note["measured_in_words"] = json!(measured);
            note["measured"] = json!(got);
            note["share"] = json!(share);
            if share < claim.at_least {
                failure = Some(format!(
                    "measured {measured}, claimed {claimed} ({}): {:.1} % of the claim, at least {:.1} % is required",
                    claim.source,
                    share * 100.0,
                    claim.at_least * 100.0
                ));
            } else if share > BEYOND {
                note["remark"] = json!("far beyond the claim: check the claim and the clock");
            }
        }
        Measure::OtherQuantity => {
            failure = Some(format!("claimed in {unit}, which this point does not have"));
        }
        Measure::None if status == CaseStatus::Unsupported => {
            failure = Some("claimed, and the device says that it cannot".to_owned());
        }
        Measure::None => {}
    }
    note["status"] = json!(if failure.is_some() { CaseStatus::Fail } else { status });
    if let Some(failure) = failure {
        case.status = CaseStatus::Fail;
        let reasons: Vec<String> = case.reason.take().into_iter().chain([failure]).collect();
        case.reason = Some(reasons.join("; "));
    }
    let list = case.facts.entry("claims".to_owned()).or_insert_with(|| json!([]));
    if let Value::Array(list) = list {
        list.push(note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(value: f64, quantity: Quantity) -> Claim {
        let (unit, source) = (quantity.unit().to_owned(), "page 2".to_owned());
        Claim { point: "p".to_owned(), value, quantity, unit, at_least: 0.8, source }
    }

    /// Judges claims against a point that takes 2 s, does 10 FLOP and moves 100 bytes.
    fn judged(claims: &[Claim]) -> CaseResult {
        let mut cases = vec![measured("p", 2.0, 10.0, 100.0)];
        judge(&mut cases, claims);
        assert_eq!(cases.len(), 1);
        cases.remove(0)
    }

    #[test]
    fn a_claim_holds_within_its_tolerance_and_one_that_lies_fails_with_both_numbers() {
        use Quantity::*;
        for (value, quantity, want) in [
            (62.5, BytesPerSecond, CaseStatus::Pass),
            (62.6, BytesPerSecond, CaseStatus::Fail),
            (6.25, FlopPerSecond, CaseStatus::Pass),
            (6.26, FlopPerSecond, CaseStatus::Fail),
            (1.6, Seconds, CaseStatus::Pass),
            (1.59, Seconds, CaseStatus::Fail),
            (1.0, BytesPerSecond, CaseStatus::Pass),
        ] {
            let case = judged(&[claim(value, quantity)]);
            assert_eq!(case.status, want, "{value} {quantity:?}: {:?}", case.reason);
        }
        let lie = judged(&[claim(900.0, BytesPerSecond)]);
        let reason = lie.reason.unwrap();
        assert!(reason.contains("measured 50 B/s, claimed 900 B/s"), "{reason}");
        assert!(judged(&[claim(1.0, BytesPerSecond)]).facts["claims"][0]["remark"].is_string());
    }

    #[test]
    fn claims_on_one_point_are_judged_each_by_itself() {
        let (lie, held) = (claim(900.0, Quantity::BytesPerSecond), claim(5.0, Quantity::FlopPerSecond));
        for claims in [[lie.clone(), held.clone()], [held, lie]] {
            let case = judged(&claims);
            let notes = case.facts["claims"].as_array().unwrap();
            assert_eq!(case.status, CaseStatus::Fail);
            for (claim, note) in claims.iter().zip(notes) {
                assert_eq!(note["status"], if claim.value == 900.0 { "fail" } else { "pass" }, "{note}");
            }
        }
        let mut cases = vec![CaseResult::new("l3.p", CaseStatus::Unsupported, "no")];
        let claims = [claim(1.0, Quantity::Seconds), claim(1.0, Quantity::BytesPerSecond)];
        judge(&mut cases, &claims);
        let notes = cases[0].facts["claims"].as_array().unwrap();
        assert!(notes.iter().all(|note| note["status"] == "fail"), "{notes:?}");
        waived(&mut cases[0]);
        assert_eq!(cases[0].facts["claims"][1]["status"], "waived");
    }

    #[test]
    fn what_was_claimed_and_not_measured_never_passes() {
        let mut cases = vec![
            CaseResult::new("l3.p", CaseStatus::Unsupported, "no"),
            CaseResult::pass("l3.copy").fact("seconds", 1.0),
        ];
        let copy = Claim { point: "copy".to_owned(), ..claim(1.0, Quantity::FlopPerSecond) };
        let absent = Claim { point: "absent".to_owned(), ..copy.clone() };
        judge(&mut cases, &[claim(1.0, Quantity::Seconds), copy, absent]);
        let statuses: Vec<CaseStatus> = cases.iter().map(|case| case.status).collect();
        assert_eq!(statuses, [CaseStatus::Fail, CaseStatus::Fail, CaseStatus::NotRun]);
        assert_eq!(judged(&[]).status, CaseStatus::Pass, "recorded only");
    }
}
