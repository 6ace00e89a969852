//! A plan as text.

use super::Planned;
use super::document::{self, missed, usd_per_million, with_one_less};
use crate::plan::tiers;
use crate::prices;
use crate::screen::word;
use mixfleet_hal::units::UsdPerHour;
use mixfleet_planner::found::{ApartFound, ProvenFleet};
use mixfleet_planner::hours::{self, HourPlan};
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_sim::bottleneck::Bottleneck;
use std::fmt::Write as _;

/// Parts without an offer that are named in a line.
const IDS_MAX: usize = 6;
/// Break-evens that are shown, those nearest to the parts' prices.
const BREAK_EVENS_MAX: usize = 4;

pub(in crate::plan) fn of(planned: &Planned<'_>, started: Option<&str>) -> String {
    let Planned { args, load, offers, outcome, .. } = planned;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    line("model", planned.model_words());
    let [input, output] = load.mean_tokens;
    line("load", load.text.clone());
    line("", format!("{:.3} requests/s, in the mean {input:.0} tokens to {output:.0}", load.rate));
    if args.headroom > 0.0 {
        line("", format!("planned for {:.0} % more", 100.0 * args.headroom));
    }
    if args.confidence > 0.5 {
        line("", format!("planned for times that are no longer with a probability of {}", args.confidence));
    }
    let percent = 100.0 * args.attain;
    line("objectives", format!("TTFT {} s, TBT {} s, for {percent} % of the requests", args.ttft, args.tbt));
    let mut not_candidates = |name: &str, ids: &[String], hint: &str| {
        let (some, more) = ids.split_at(ids.len().min(IDS_MAX));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more (--json)", more.len()) };
        if !some.is_empty() {
            line(name, format!("not candidates: {}{more}{hint}", some.join(", ")));
        }
    };
    not_candidates("without offer", &offers.without_offer, "");
    not_candidates(
        "without kernels",
        &offers.without_kernels,
        "; no published timings: name them in --parts to include",
    );
    not_candidates(
        "not listed",
        &offers.unlisted,
        "; add --marketplaces or --estimates, or name them in --parts",
    );
    if let Some(best) = outcome.fleets.first() {
        fleets(&mut text, planned);
        below(&mut text, planned, best, started);
    }
    text
}

fn fleets(text: &mut String, planned: &Planned<'_>) {
    let outcome = planned.outcome;
    let _ = writeln!(
        text,
        "\n{:>3} {:>9} {:>8} {:>8} {:>9} {:>7} {:>9}  {:<48} fleet",
        "", "$/h", "$/Mt in", "$/Mt out", "attained", "error", "slack", "bottleneck"
    );
    for (at, fleet) in outcome.fleets.iter().enumerate() {
        let tie = at > 0 && fleet.ties_with(&outcome.fleets[0]);
        let mark = if tie { format!("{}=", at + 1) } else { format!("{}", at + 1) };
        let [input, output] = usd_per_million(planned, fleet);
        let error = fleet.likely_error.map_or("?".into(), |error| format!("{:.0} %", 100.0 * error));
        let [load, times] = fleet.stress.slack(planned.args.attain);
        let _ = writeln!(
            text,
            "{mark:>3} {:>9.2} {input:>8.3} {output:>8.3} {:>7.2} % {error:>7} {:>9}  {:<48} {}",
            fleet.usd_per_hour,
            100.0 * fleet.trial.attained,
            format!("{load:.2}/{times:.2}"),
            Bottleneck::of(&fleet.trial.results).map_or_else(|| "-".into(), |found| found.text()),
            words(planned, fleet)
        );
    }
    if outcome.fleets.iter().skip(1).any(|fleet| fleet.ties_with(&outcome.fleets[0])) {
        let _ = writeln!(text, "  = within model error of #1");
    }
    let _ = writeln!(
        text,
        "  slack: the factor on the load, and on times, under which it still holds (1.25 and 1.5 are tried)"
    );
}

/// Outcome for the cheapest fleet that satisfies `is`.
fn attention(
    planned: &Planned<'_>,
    best: &ProvenFleet,
    found: &ApartFound,
    is: fn(&ProvenFleet) -> bool,
) -> String {
    let fleets = &planned.outcome.fleets;
    let fleet = match found {
        ApartFound::None(why) => return format!("none: {why}"),
        ApartFound::Planned(fleet) => fleet,
    };
    match fleets.iter().position(is) {
        Some(0) => "the first has it".into(),
        Some(at) => {
            let own = &fleets[at];
            let more = 100.0 * (own.usd_per_hour / best.usd_per_hour - 1.0);
            let word = if own.ties_with(best) { ", which is within the likely error" } else { "" };
            format!("loses: number {} costs {more:.1} % more than the first{word}", at + 1)
        }
        None => format!(
            "none held the objective in simulation; by rates ${:.2}/h, where the first is ${:.2}/h: {}",
            fleet.usd_per_hour.0,
            best.planned_usd_per_hour,
            planned.words(&fleet.pools, fleet.stored)
        ),
    }
}

#[expect(clippy::too_many_lines, reason = "one line for each fact")]
fn below(text: &mut String, planned: &Planned<'_>, best: &ProvenFleet, started: Option<&str>) {
    let Planned { args, offers, outcome, .. } = planned;
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    match outcome.fleets.iter().find(|fleet| fleet.is_homogeneous()) {
        Some(one) if std::ptr::eq(one, best) => {
            line("of one part", "the first is the best of these too".into())
        }
        Some(one) => {
            let more = 100.0 * (one.usd_per_hour / best.usd_per_hour - 1.0);
            let word = if one.ties_with(best) { ", which is within the likely error" } else { "" };
            line(
                "of one part",
                format!("{}: ${:.2}/h, {more:.1} % more{word}", words(planned, one), one.usd_per_hour),
            );
        }
        None => line("of one part", "none was found that meets the objective".into()),
    }
    if let Some(bound) = outcome.lower_bound {
        let gap = 100.0 * (best.usd_per_hour / bound - 1.0);
        let above = match bound > 0.0 {
            true if best.has_spare() => format!(
                "; it counts no attention on those for prompts, which puts the first {gap:+.1} % from it"
            ),
            true => format!("; the first is {gap:.1} % above it"),
            false => String::new(),
        };
        line("lower bound", format!("${bound:.2}/h by rates, without waiting{above}"));
    }
    if let Some(why) = why_lost(planned) {
        line("second", why);
    }
    if outcome.with_tiers > 0 && !outcome.fleets.iter().any(|fleet| fleet.tiers.dram.0 > 0.0) {
        line("tiers", "none of --dram and --ssd makes one of the two cheapest fleets cheaper".into());
    }
    line("attention apart", attention(planned, best, &outcome.apart, ProvenFleet::is_apart));
    line("attention spare", attention(planned, best, &outcome.spare, ProvenFleet::has_spare));
    if let Some(robust) = outcome.most_robust() {
        let stress = outcome.fleets[robust].stress;
        let [load, times] = [stress.load, stress.times].map(|of| 100.0 * of[0].unwrap_or(0.0));
        line(
            "most robust",
            format!(
                "#{} (within 5 % of the cheapest): {load:.1} % meet the objectives with 25 % more load, \
                 {times:.1} % with steps 25 % slower",
                robust + 1
            ),
        );
    }
    for repriced in planned.repriced {
        let (name, times) = (offers.parts[repriced.part].name(), repriced.factor);
        line(
            "if dearer",
            format!("at {times} times the price of {name} number {} is cheapest", repriced.cheapest + 1),
        );
    }
    for (at, words) in nearest_break_evens(planned).into_iter().enumerate() {
        line(if at == 0 { "break-evens" } else { "" }, words);
    }
    if let Some(words) = changes(planned, best) {
        line("owned", words);
    }
    if let Some(words) = by_the_hour(planned) {
        line("by the hour", words);
    }
    let mut told: Vec<usize> = Vec::new();
    for (part, _) in outcome.fleets.iter().flat_map(|fleet| &fleet.pools).flat_map(PlannedPool::takes) {
        if !told.contains(&part) {
            let title = if told.is_empty() { "prices" } else { "" };
            let (name, price) = (offers.parts[part].name(), &offers.prices[part]);
            let old = prices::age_days(price).filter(|days| *days > prices::OLD_DAYS);
            let old = old.map_or_else(String::new, |days| format!(" ({days} days old)"));
            line(title, format!("{name} ${:.3}/h: {}{old}", price.usd_per_hour.0, price.basis));
            told.push(part);
        }
    }
    if !outcome.complete {
        let by = match outcome.interrupted {
            true => "by a signal".to_owned(),
            false => format!("--budget-s {}", args.budget_s),
        };
        line("stopped", format!("before all was simulated ({by}): the best so far"));
    }
    if let Some(directory) = planned.out {
        line("written", directory.join("FLEET.toml").display().to_string());
        line("", started.unwrap_or_default().into());
    }
}

/// The break-evens nearest to the parts' prices, in words.
fn nearest_break_evens(planned: &Planned<'_>) -> Vec<String> {
    let offers = planned.offers.parts.iter().zip(planned.break_evens);
    let at = offers.filter_map(|(offer, known)| match known {
        Some(BreakEven::At(usd)) => Some((offer, *usd)),
        Some(BreakEven::Useless | BreakEven::Indispensable) | None => None,
    });
    let mut near: Vec<(f64, String)> = at
        .map(|(offer, UsdPerHour(usd))| {
            let (name, own) = (offer.name(), offer.usd_per_hour.0);
            let word = if own <= usd { "would leave above" } else { "would enter below" };
            ((usd / own).ln().abs(), format!("{name} (${own:.3}/h) {word} ${usd:.3}/h"))
        })
        .collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    near.into_iter().take(BREAK_EVENS_MAX).map(|(_, words)| words).collect()
}

/// Owned devices that a fleet uses, and devices to add.
fn changes(planned: &Planned<'_>, fleet: &ProvenFleet) -> Option<String> {
    planned.args.have.as_ref()?;
    let all = document::changes(planned, fleet).into_iter().map(|change| {
        let (name, used) = (planned.offers.parts[change.part].name(), change.planned.min(change.owned));
        match (change.planned, change.owned) {
            (planned, owned) if planned > owned => format!("add {} x {name}", planned - owned),
            (planned, owned) if planned < owned => format!("switch off {} x {name}", owned - planned),
            _ => format!("keep {used} x {name}"),
        }
    });
    Some(all.collect::<Vec<_>>().join(", "))
}

/// What the hours of the load take, and what renting by the hour would save.
fn by_the_hour(planned: &Planned<'_>) -> Option<String> {
    let hours = planned.hours;
    let dearest = hours::dearest(hours)?;
    let (mean, saved) = hours::renting_by_the_hour(hours)?;
    let most = hours[dearest].usd_per_hour()?;
    let least = hours.iter().filter_map(HourPlan::usd_per_hour).fold(f64::INFINITY, f64::min);
    Some(format!(
        "{} hours by the program: ${least:.2}/h to ${most:.2}/h (hour {dearest}), ${mean:.2}/h in the mean if rented by \
         the hour, {:.1} % less than hour {dearest}'s fleet all the time",
        hours.len(),
        100.0 * saved
    ))
}

/// Why the second fleet is not the first.
pub(super) fn why_lost(planned: &Planned<'_>) -> Option<String> {
    let [first, second, ..] = &planned.outcome.fleets[..] else { return None };
    let more = second.usd_per_hour - first.usd_per_hour;
    let percent = 100.0 * more / first.usd_per_hour;
    let [a, b] = [first, second].map(|fleet| usd_per_million(planned, fleet));
    let tokens = planned.load.mean_tokens;
    let dearer = [0, 1].map(|at| (b[at] - a[at]) * tokens[at]);
    let (what, at) = if dearer[0] > dearer[1] { ("prompts", 0) } else { ("answers", 1) };
    let mut text = format!(
        "{} costs ${more:.2}/h more ({percent:.1} %): its {what} cost ${:.3} per million tokens, against ${:.3}",
        words(planned, second),
        b[at],
        a[at]
    );
    if let Some(what) = with_one_less(planned, second) {
        let _ = write!(text, "; with one instance less of {what} it misses the objective");
    }
    if second.ties_with(first) {
        text.push_str("; the difference is within the likely error");
    }
    Some(text)
}

/// Why there is no fleet, and the nearest that can be met.
pub(in crate::plan) fn unmet(planned: &Planned<'_>) -> String {
    let outcome = planned.outcome;
    let mut text = String::from("no fleet was found that meets the objective");
    for shortfall in &outcome.shortfall {
        let _ = write!(text, "; {shortfall}");
    }
    if let Some(nearest) = &outcome.nearest {
        let results = &nearest.trial.results;
        let _ = write!(
            text,
            "; {} binds in simulation: the nearest is {}, where {:.2} % of the requests meet it",
            missed(&nearest.trial),
            words(planned, nearest),
            100.0 * nearest.trial.attained
        );
        // a run that was stopped has none
        if results.ttft_s.count > 0 {
            let (ttft, tbt) = (results.ttft_s.p99, results.tbt_s.p99);
            let _ = write!(text, " (p99 of TTFT {ttft:.3} s, of TBT {tbt:.4} s)");
        }
    }
    if outcome.shortfall.is_empty() && !outcome.complete {
        text.push_str(match outcome.interrupted {
            true => "; it was stopped before all was simulated",
            false => "; the time ended before all was simulated, a longer --budget-s may find one",
        });
    }
    text
}

fn words(planned: &Planned<'_>, fleet: &ProvenFleet) -> String {
    let pools = planned.words(&fleet.pools, fleet.stored);
    let policy =
        if fleet.policy == Policy::default() { String::new() } else { format!(", {}", word(&fleet.policy)) };
    format!("{pools}{}{policy}", tiers::words(&fleet.tiers))
}
