//! A plan as text.

use super::Planned;
use super::document::{bottleneck, missed, usd_per_million};
use super::search::{ProvenFleet, pool_words};
use crate::simulate::word;
use mixfleet_scheduler::fleet::Policy;
use std::fmt::Write as _;

/// Parts without an offer that are named in a line.
const IDS_MAX: usize = 6;

pub(super) fn of(planned: &Planned<'_>) -> String {
    let Planned { args, model, stored, load, offers, outcome } = planned;
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "  {name:<16} {value}");
    };
    line("model", format!("{} in {stored}, engine {}", model.name, args.engine.name));
    let [input, output] = load.mean_tokens;
    line("load", load.text.clone());
    line("", format!("{:.3} requests/s, in the mean {input:.0} tokens to {output:.0}", load.rate));
    if args.headroom > 0.0 {
        line("", format!("planned for {:.0} % more", 100.0 * args.headroom));
    }
    let percent = 100.0 * args.attain;
    line("objectives", format!("TTFT {} s, TBT {} s, for {percent} % of the requests", args.ttft, args.tbt));
    if !offers.without_offer.is_empty() {
        let (some, more) = offers.without_offer.split_at(offers.without_offer.len().min(IDS_MAX));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more (--json)", more.len()) };
        line("without offer", format!("not candidates: {}{more}", some.join(", ")));
    }
    if let Some(best) = outcome.fleets.first() {
        fleets(&mut text, planned);
        below(&mut text, planned, best);
    }
    text
}

fn fleets(text: &mut String, planned: &Planned<'_>) {
    let outcome = planned.outcome;
    let _ = writeln!(
        text,
        "\n{:>3} {:>9} {:>8} {:>8} {:>9} {:>7}  {:<32} fleet",
        "", "$/h", "$/Mt in", "$/Mt out", "attained", "error", "bottleneck"
    );
    for (at, fleet) in outcome.fleets.iter().enumerate() {
        let tie = at > 0 && fleet.ties_with(&outcome.fleets[0]);
        let mark = if tie { format!("{}=", at + 1) } else { format!("{}", at + 1) };
        let [input, output] = usd_per_million(planned, fleet);
        let error = fleet.likely_error.map_or("?".into(), |error| format!("{:.0} %", 100.0 * error));
        let _ = writeln!(
            text,
            "{mark:>3} {:>9.2} {input:>8.3} {output:>8.3} {:>7.2} % {error:>7}  {:<32} {}",
            fleet.usd_per_hour,
            100.0 * fleet.trial.attained,
            bottleneck(planned, fleet).unwrap_or_else(|| "-".into()),
            words(planned, fleet)
        );
    }
    if outcome.fleets.iter().skip(1).any(|fleet| fleet.ties_with(&outcome.fleets[0])) {
        let _ = writeln!(text, "  = is not told from the first within the likely error of its times");
    }
}

fn below(text: &mut String, planned: &Planned<'_>, best: &ProvenFleet) {
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
        line(
            "lower bound",
            format!("${bound:.2}/h by rates, without waiting; the first is {gap:.1} % above it"),
        );
    }
    if let Some(why) = why_lost(planned) {
        line("second", why);
    }
    let mut told: Vec<usize> = Vec::new();
    for pool in outcome.fleets.iter().flat_map(|fleet| &fleet.pools) {
        if !told.contains(&pool.part) {
            let name = if told.is_empty() { "prices" } else { "" };
            let (id, price) = (offers.parts[pool.part].part.id, &offers.prices[pool.part]);
            line(name, format!("{id} ${:.3}/h: {}", price.usd_per_hour.0, price.basis));
            told.push(pool.part);
        }
    }
    if !outcome.complete {
        let budget = args.budget_s;
        line("stopped", format!("before all was simulated (--budget-s {budget}): the best so far"));
    }
    if let Some(directory) = &args.out {
        line("written", directory.join("FLEET.toml").display().to_string());
    }
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
    if let Some(what) = bottleneck(planned, second) {
        let _ = write!(text, "; with one instance less of {what} it misses the objective");
    }
    if second.ties_with(first) {
        text.push_str("; the difference is within the likely error");
    }
    Some(text)
}

/// Why there is no fleet, and the nearest that can be met.
pub(super) fn unmet(planned: &Planned<'_>) -> String {
    let outcome = planned.outcome;
    let mut text = String::from("no fleet was found that meets the objective");
    for shortfall in &outcome.shortfall {
        let _ = write!(text, "; {shortfall}");
    }
    if let Some(nearest) = &outcome.nearest {
        let results = &nearest.trial.results;
        let _ = write!(
            text,
            "; {} binds in simulation: the nearest is {}, where {:.2} % of the requests meet it (p99 of TTFT {:.3} s, of \
             TBT {:.4} s)",
            missed(&nearest.trial),
            words(planned, nearest),
            100.0 * nearest.trial.attained,
            results.ttft_s.p99,
            results.tbt_s.p99
        );
    }
    if outcome.shortfall.is_empty() && !outcome.complete {
        text.push_str("; the time ended before all was simulated, a longer --budget-s may find one");
    }
    text
}

fn words(planned: &Planned<'_>, fleet: &ProvenFleet) -> String {
    let all = fleet.pools.iter().map(|pool| pool_words(planned.offers.parts[pool.part].part.id, pool));
    let policy =
        if fleet.policy == Policy::default() { String::new() } else { format!(", {}", word(&fleet.policy)) };
    format!("{}{policy}", all.collect::<Vec<_>>().join(" + "))
}
