//! A plan as one self-contained HTML page.

use super::Planned;
use super::document::usd_per_million;
use mixfleet_hal::cast::to_u32;
use mixfleet_planner::found::ProvenFleet;
use mixfleet_planner::prices::{PricedFleet, price_map};
use mixfleet_report::html::{Html, TableCell};
use mixfleet_report::svg::{Chart, Limit, Mark, PlotAxis, Scale, Series};
use mixfleet_scheduler::plan::market::{FormedFleet, Market, PlannedPool};
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::fleet_file::role_of;

/// Renders the page.
pub(in crate::plan) fn page(planned: &Planned<'_>, market: &Market) -> String {
    let Planned { args, load, outcome, .. } = planned;
    let mut body = Html::default();
    let percent = 100.0 * args.attain;
    body.facts(&[
        ("model", planned.model_words()),
        ("load", format!("{}, {:.3} requests/s", load.text, load.rate)),
        ("objectives", format!("TTFT {} s, TBT {} s, for {percent} % of the requests", args.ttft, args.tbt)),
        ("lower bound", outcome.lower_bound.map_or("none".into(), |usd| format!("${usd:.2}/h by rates"))),
    ]);
    body.heading(2, "Fleets");
    fleets(&mut body, planned);
    body.heading(2, "Dollars and attainment");
    rents(&mut body, planned);
    if let Some(parts) = two_parts(planned) {
        body.heading(2, "The cheapest fleet at other prices");
        prices(&mut body, planned, market, parts);
    }
    if planned.hours.len() > 1 {
        body.heading(2, "The load by the hour");
        hours(&mut body, planned);
    }
    mixfleet_report::html::page("Plan of a fleet", &load.text, &body)
}

fn fleets(body: &mut Html, planned: &Planned<'_>) {
    let rows: Vec<Vec<TableCell>> = (1..)
        .zip(&planned.outcome.fleets)
        .map(|(number, fleet): (u32, _)| {
            let [input, output] = usd_per_million(planned, fleet);
            let [load, times] = fleet.stress.slack(planned.args.attain);
            let chosen = if number == 1 { " (chosen)" } else { "" };
            vec![
                TableCell::text(planned.words(&fleet.pools, fleet.stored) + chosen),
                TableCell::number(format!("{:.2}", fleet.usd_per_hour)),
                TableCell::number(format!("{input:.3}")),
                TableCell::number(format!("{output:.3}")),
                TableCell::number(format!("{:.2}", 100.0 * fleet.trial.attained)),
                TableCell::text(format!("{load:.2}/{times:.2}")),
                TableCell::text(
                    Bottleneck::of(&fleet.trial.results).map_or_else(|| "-".into(), |found| found.text()),
                ),
            ]
        })
        .collect();
    let header = ["fleet", "$/h", "$/Mt in", "$/Mt out", "attained %", "slack", "bottleneck"];
    body.table(&header, &rows);
}

/// Rent against attainment, with the likely error of each share; the first fleet is the chosen one.
fn rents(body: &mut Html, planned: &Planned<'_>) {
    let x = PlotAxis { label: "rent in $/h", unit: "", scale: Scale::Fitted };
    let y = PlotAxis { label: "% of requests within the objectives", ..x };
    let (args, fleets) = (planned.args, &planned.outcome.fleets);
    let dot = |(number, fleet): (u32, &ProvenFleet)| {
        let attained = fleet.trial.attained;
        let [low, high] = share_within(attained, fleet.trial.results.requests);
        let points = [low, attained, high].map(|share| (fleet.usd_per_hour, 100.0 * share)).to_vec();
        let mark = if number == 1 { Mark::Chosen } else { Mark::Range };
        Series { name: planned.words(&fleet.pools, fleet.stored), points, mark }
    };
    let series: Vec<Series> = (1..).zip(fleets).map(dot).collect();
    let limits = [Limit::Y(100.0 * args.attain, "objective")];
    let caption = "Rent and the share of requests that met the objectives in simulation; bars are the 95 % interval by \
                   the number of requests. Slack in the table says what the fleet stands beyond that.";
    Chart { x, y, series: &series, roof: &[], limits: &limits }.draw(body, caption);
}

/// The 95 % interval of a share of this many requests, after Wilson (1927).
fn share_within(share: f64, requests: u64) -> [f64; 2] {
    const Z: f64 = 1.96;
    let n = requests.max(1) as f64;
    let middle = share + Z * Z / (2.0 * n);
    let half = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    [-half, half].map(|half| ((middle + half) / (1.0 + Z * Z / n)).clamp(0.0, 1.0))
}

/// The parts of the first fleet, or its part and the next one that another fleet has.
fn two_parts(planned: &Planned<'_>) -> Option<[usize; 2]> {
    let mut all = planned.outcome.fleets.iter().flat_map(|fleet| &fleet.pools).map(|pool| pool.part);
    let first = all.next()?;
    Some([first, all.find(|part| *part != first)?])
}

/// What a fleet of one or two parts is, without its numbers of instances.
fn kind(planned: &Planned<'_>, fleet: &FormedFleet) -> String {
    let of = |pool: &PlannedPool| match (planned.offers.parts[pool.part].part.id, role_of(pool.duty)) {
        (id, "auto") => id.to_owned(),
        (id, role) => format!("{id} {role}"),
    };
    let mut all: Vec<String> = fleet.pools.iter().map(of).collect();
    all.dedup();
    let dtype = if planned.stored.len() > 1 { format!(", {}", fleet.stored) } else { String::new() };
    format!("{}{dtype}", all.join(" + "))
}

/// The cheapest simulated fleet at each price of two parts.
fn prices(body: &mut Html, planned: &Planned<'_>, market: &Market, pair: [usize; 2]) {
    let mut series: Vec<Series> = Vec::new();
    for PricedFleet { usd_per_hour: [x, y], fleet } in price_map(market, &planned.outcome.fleets, pair) {
        let (name, point) = (kind(planned, &fleet), (x, y));
        match series.iter_mut().find(|known| known.name == name) {
            Some(known) => known.points.push(point),
            None => series.push(Series { name, points: vec![point], mark: Mark::Dots }),
        }
    }
    let ids = pair.map(|part| market.parts()[part].name());
    let own = pair.map(|part| market.parts()[part].usd_per_hour.0);
    let x = PlotAxis { label: "price of the first part in $/h", unit: "", scale: Scale::Decimal };
    let y = PlotAxis { label: "price of the second part in $/h", ..x };
    let limits = [Limit::X(own[0], "its price"), Limit::Y(own[1], "its price")];
    let chart = Chart { x, y, series: &series, roof: &[], limits: &limits };
    let caption = format!(
        "The cheapest fleet by the program, not simulated, of the parts above; the first part is {}, the second {}.",
        ids[0], ids[1]
    );
    chart.draw(body, &caption);
}

fn hours(body: &mut Html, planned: &Planned<'_>) {
    let x = PlotAxis { label: "hour", unit: "", scale: Scale::Linear };
    let line = |name: &str, of: &dyn Fn(usize) -> Option<f64>| {
        let points =
            (0..planned.hours.len()).filter_map(|at| Some((f64::from(to_u32(at)), of(at)?))).collect();
        Series { name: name.to_owned(), points, mark: Mark::Line }
    };
    let hour = |at: usize| &planned.hours[at];
    let load = [line("requests", &|at| Some(hour(at).requests_per_s))];
    let y = PlotAxis { label: "requests per second", ..x };
    Chart { x, y, series: &load, roof: &[], limits: &[] }.draw(body, "Requests per second.");
    let usd = [
        line("cheapest fleet", &|at| hour(at).usd_per_hour()),
        line("lower bound", &|at| hour(at).lower_bound),
    ];
    let y = PlotAxis { label: "rent in $/h", ..x };
    let caption = "Rent of the cheapest fleet for each hour by the program, not simulated.";
    Chart { x, y, series: &usd, roof: &[], limits: &[] }.draw(body, caption);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_holds_its_share_and_narrows_with_requests() {
        for share in [0.0, 0.5, 0.99, 1.0] {
            let [few, many] = [100, 10_000].map(|requests| share_within(share, requests));
            for [low, high] in [few, many] {
                assert!(
                    low >= 0.0 && low <= share + 1e-12 && high >= share - 1e-12 && high <= 1.0,
                    "{low} {high}"
                );
            }
            assert!(few[1] - few[0] > many[1] - many[0]);
        }
        // Brown, Cai and DasGupta (2001): 50 of 100
        let [low, high] = share_within(0.5, 100);
        assert!((low - 0.4038).abs() < 1e-3 && (high - 0.5962).abs() < 1e-3, "{low} {high}");
    }
}
