//! One model after the other, where several share what there is.

use super::args::PlanArgs;
use super::offers::PlanOffers;
use super::render::document;
use super::run::{ModelWanted, Printed, market, plan};
use crate::failure::{Failed, UsageError};
use crate::screen;
use anyhow::Result;
use mixfleet_planner::order::{cheapest_order, take_from_stock};
use serde_json::json;
use std::io::Write;

/// Plans each model and prints the plans in the requested order.
pub(super) fn run(args: &PlanArgs, wanted: Vec<ModelWanted>, offers: &PlanOffers) -> Result<()> {
    if args.html.is_some() {
        return Err(UsageError("--html: a page has one model; plan them one by one".into()).into());
    }
    for (at, model) in wanted.iter().enumerate() {
        if wanted[..at].iter().any(|other| other.model.name == model.model.name) {
            let name = model.model.name;
            return Err(UsageError(format!(
                "--model: {name} is there twice; give one trace of all its load"
            ))
            .into());
        }
    }
    let mut left = offers.clone();
    let mut printed: Vec<(usize, Printed)> = Vec::new();
    let order = cheapest_order(wanted.len(), &offers.parts, |at, parts| {
        let ModelWanted { model, load, .. } = &wanted[at];
        market(args, model, load, &PlanOffers { parts, ..offers.clone() })
    });
    let mut wanted: Vec<Option<ModelWanted>> = wanted.into_iter().map(Some).collect();
    for at in order {
        let Some(mut model) = wanted[at].take() else { continue };
        model.out = args.out.as_ref().map(|directory| directory.join(model.model.name));
        let of_model = plan(args, model, &left)?;
        take_from_stock(&mut left.parts, &of_model.pools);
        printed.push((at, of_model));
    }
    printed.sort_by_key(|(at, _)| *at);
    let printed: Vec<Printed> = printed.into_iter().map(|(_, printed)| printed).collect();
    let usd: Option<f64> = printed.iter().map(|printed| printed.usd_per_hour).sum();
    let mut out = screen::output(args.json);
    if args.json {
        let plans: Vec<_> = printed.iter().map(|printed| &printed.document).collect();
        let all = json!({ "schema": document::SEVERAL, "usd_per_hour": usd, "plans": plans });
        writeln!(out, "{all:#}")?;
    } else {
        printed.iter().try_for_each(|printed| writeln!(out, "{}", printed.table))?;
        if let Some(usd) = usd {
            writeln!(out, "  {:<16} ${usd:.2}/h", "all models")?;
        }
    }
    let unmet: Vec<String> = printed.into_iter().filter_map(|printed| printed.unmet).collect();
    if unmet.is_empty() { Ok(()) } else { Err(Failed(unmet.join("\n")).into()) }
}
