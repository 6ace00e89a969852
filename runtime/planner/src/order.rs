//! The order in which several models take of one limited stock.

use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::market::{Market, PlannedPool};
use mixfleet_scheduler::plan::offer::OfferedPart;

/// Models up to which every order is tried.
const ORDERS_MAX: usize = 3;

/// Whether any part is limited or owned, so that the order of models matters.
fn is_limited(parts: &[OfferedPart]) -> bool {
    parts.iter().any(|offer| offer.most.is_some() || offer.owned > 0)
}

/// Takes the devices of some pools out of the stock, owned ones first.
pub fn take_from_stock(parts: &mut [OfferedPart], pools: &[PlannedPool]) {
    let taken = pools.iter().flat_map(|pool| pool.takes().map(|(part, each)| (part, pool.count, each)));
    for (part, count, each) in taken {
        let offer = &mut parts[part];
        let devices = count.saturating_mul(each);
        offer.owned = offer.owned.saturating_sub(devices);
        offer.most = offer.most.map(|most| most.saturating_sub(devices));
    }
}

/// Returns the order in which `models` models take of `parts` so that all together cost least by rates: the
/// earlier ones have the choice. `market` is a model's market over the parts that are left.
pub fn cheapest_order(
    models: usize,
    parts: &[OfferedPart],
    market: impl Fn(usize, Vec<OfferedPart>) -> Market,
) -> Vec<usize> {
    if models > ORDERS_MAX || !is_limited(parts) {
        return (0..models).collect();
    }
    let usd = |order: &[usize]| {
        let (mut left, mut usd) = (parts.to_vec(), 0.0);
        for &at in order {
            let Some(fleet) = market(at, left.clone()).rank(&Microlp, 1).into_iter().next() else {
                return f64::INFINITY;
            };
            take_from_stock(&mut left, &fleet.pools);
            usd += fleet.usd_per_hour.0;
        }
        usd
    };
    let orders = orders(models).into_iter().map(|order| (usd(&order), order));
    orders.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or_else(Vec::new, |(_, order)| order)
}

/// All permutations of `0..count`, the identity first.
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
