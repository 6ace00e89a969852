//! One model after the other, where several share what there is.

use super::offers::Offers;
use super::{ModelWanted, PlanArgs, Printed, document, market, plan};
use crate::screen;
use crate::{Failed, Usage};
use anyhow::Result;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::market::PlannedPool;
use serde_json::json;
use std::io::Write;

/// Models up to which every order is tried.
const ORDERS_MAX: usize = 3;

/// Plans each model and prints the plans in the order that was asked for.
pub(super) fn run(args: &PlanArgs, wanted: Vec<ModelWanted>, offers: &Offers) -> Result<()> {
    if args.html.is_some() {
        return Err(Usage("--html: a page has one model; plan them one by one".into()).into());
    }
    for (at, model) in wanted.iter().enumerate() {
        if wanted[..at].iter().any(|other| other.model.name == model.model.name) {
            let name = model.model.name;
            return Err(
                Usage(format!("--model: {name} is there twice; give one trace of all its load")).into()
            );
        }
    }
    let mut left = offers.clone();
    let mut printed: Vec<(usize, Printed)> = Vec::new();
    let order =
        if offers.are_limited() { cheapest_order(args, &wanted, offers) } else { identity(wanted.len()) };
    let mut wanted: Vec<Option<ModelWanted>> = wanted.into_iter().map(Some).collect();
    for at in order {
        let Some(mut model) = wanted[at].take() else { continue };
        model.out = args.out.as_ref().map(|directory| directory.join(model.model.name));
        let of_model = plan(args, model, &left)?;
        left.take(&of_model.pools);
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

fn identity(models: usize) -> Vec<usize> {
    (0..models).collect()
}

/// The order in which models take of what there is so that all together cost least by rates: the earlier ones
/// have the choice.
fn cheapest_order(args: &PlanArgs, wanted: &[ModelWanted], offers: &Offers) -> Vec<usize> {
    if wanted.len() > ORDERS_MAX {
        return identity(wanted.len());
    }
    let usd = |order: &[usize]| {
        let (mut left, mut usd) = (offers.clone(), 0.0);
        for &at in order {
            let ModelWanted { model, load, .. } = &wanted[at];
            let Some(fleet) = market(args, model, load, &left).rank(&Microlp, 1).into_iter().next() else {
                return f64::INFINITY;
            };
            left.take(&fleet.pools);
            usd += fleet.usd_per_hour.0;
        }
        usd
    };
    let orders = orders(wanted.len()).into_iter().map(|order| (usd(&order), order));
    orders.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or_else(Vec::new, |(_, order)| order)
}

/// Every order of so many, the one as they stand first.
fn orders(count: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    for _ in 0..count {
        let longer = |order: Vec<usize>| {
            let rest: Vec<usize> = (0..count).filter(|at| !order.contains(at)).collect();
            rest.into_iter().map(move |at| [&order[..], &[at]].concat()).collect::<Vec<_>>()
        };
        all = all.into_iter().flat_map(longer).collect();
    }
    all
}

impl Offers {
    /// Whether there are only so many of anything.
    fn are_limited(&self) -> bool {
        self.parts.iter().any(|offer| offer.most.is_some() || offer.owned > 0)
    }

    /// Takes the devices of some pools away, those that are owned first.
    fn take(&mut self, pools: &[PlannedPool]) {
        let taken = pools.iter().flat_map(|pool| pool.takes().map(|(part, each)| (part, pool.count, each)));
        for (part, count, each) in taken {
            let offer = &mut self.parts[part];
            let devices = count.saturating_mul(each);
            offer.owned = offer.owned.saturating_sub(devices);
            offer.most = offer.most.map(|most| most.saturating_sub(devices));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_all_and_the_given_one_is_first() {
        let all = orders(3);
        assert_eq!((all.len(), &all[0][..], &all[5][..]), (6, &[0, 1, 2][..], &[2, 1, 0][..]));
        assert_eq!(orders(0), [Vec::<usize>::new()]);
    }
}
