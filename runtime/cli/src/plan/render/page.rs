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
    body.heading(2, "What a fleet gets for its rent");
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
            vec![
                TableCell::number(number.to_string()),
                TableCell::number(format!("{:.2}", fleet.usd_per_hour)),
                TableCell::number(format!("{input:.3}")),
                TableCell::number(format!("{output:.3}")),
                TableCell::number(format!("{:.2}", 100.0 * fleet.trial.attained)),
                TableCell::text(format!("{load:.2}/{times:.2}")),
                TableCell::text(
                    Bottleneck::of(&fleet.trial.results).map_or_else(|| "-".into(), |found| found.text()),
                ),
                TableCell::text(planned.words(&fleet.pools, fleet.stored)),
            ]
        })
        .collect();
    let header = ["", "$/h", "$/Mt in", "$/Mt out", "attained %", "slack", "bottleneck", "fleet"];
    body.table(&header, &rows);
}

/// Rent against TTFT, TBT and attainment, a dot for each fleet.
fn rents(body: &mut Html, planned: &Planned<'_>) {
    let x = PlotAxis { label: "rent in $/h", unit: "", scale: Scale::Linear };
    let seconds = |label| PlotAxis { label, unit: "s", scale: Scale::Linear };
    let share = PlotAxis { label: "share within the objectives", unit: "", scale: Scale::Linear };
    let (args, fleets) = (planned.args, &planned.outcome.fleets);
    let mut figure = |y: PlotAxis, limit: Limit, of: &dyn Fn(&ProvenFleet) -> f64, caption: &str| {
        let dot = |(number, fleet): (u32, &ProvenFleet)| {
            let points = vec![(fleet.usd_per_hour, of(fleet))];
            Series { name: format!("fleet {number}"), points, mark: Mark::Dots }
        };
        let series: Vec<Series> = (1..).zip(fleets).map(dot).collect();
        Chart { x, y, series: &series, roof: &[], limits: &[limit] }.draw(body, caption);
    };
    let mut times = |label, objective, of: &dyn Fn(&ProvenFleet) -> f64| {
        figure(seconds(label), Limit::Y(objective, "objective"), of, &format!("Rent and {label}."));
    };
    times("TTFT, p99", args.ttft, &|fleet| fleet.trial.results.ttft_s.p99);
    times("TBT, p99", args.tbt, &|fleet| fleet.trial.results.tbt_s.p99);
    let attained = |fleet: &ProvenFleet| fleet.trial.attained;
    let caption = "Rent and the share of requests that met the objectives.";
    figure(share, Limit::Y(args.attain, "objective"), &attained, caption);
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
