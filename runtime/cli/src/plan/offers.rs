//! The parts that a plan may take: named, offered at a price, and in stock.

mod tables;

use super::args::PlanArgs;
use crate::failure::UsageError;
use crate::{own_devices, prices};
use anyhow::{Context, Result};
use mixfleet_hal::catalog::{self, Part, PartKind};
use mixfleet_hal::economics::{Offer, Price, PriceSupport, Selection, reference};
use mixfleet_hal::units::UsdPerHour;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::regions::RegionLink;
use mixfleet_sim::fleet_file::InstancePool;
use std::path::Path;
use tables::Stock;

/// The candidates, and the parts that are not.
#[derive(Clone)]
pub(super) struct PlanOffers {
    pub(super) parts: Vec<OfferedPart>,
    /// The price of each.
    pub(super) prices: Vec<Price>,
    /// The links between their regions.
    pub(super) links: Vec<RegionLink>,
    /// Parts that were requested or are in stock, and have no offer.
    pub(super) without_offer: Vec<String>,
    /// Parts with an offer but without published kernel times, not named in --parts.
    pub(super) without_kernels: Vec<String>,
    /// Parts whose built-in price no provider lists, unless --parts names them.
    pub(super) unlisted: Vec<String>,
    pub(super) warnings: Vec<String>,
}

impl PlanOffers {
    pub(super) fn read(args: &PlanArgs) -> Result<Self> {
        let list = args.prices.as_deref().map(prices::read).transpose()?.unwrap_or_default();
        let stock = args.inventory.as_deref().map(tables::inventory).transpose()?;
        let mut named = Vec::new();
        for id in &args.parts {
            named.push(part(id).map_err(|why| UsageError(format!("--parts: {why}")))?);
        }
        let accelerators = || catalog::parts().iter().filter(|part| part.kind != PartKind::Cpu);
        let mut wanted: Vec<&Part> = if named.is_empty() { accelerators().collect() } else { named };
        let Owned { devices: owned, said } =
            args.have.as_deref().map(owned_devices).transpose()?.unwrap_or_default();
        for (id, _) in &owned {
            if !wanted.iter().any(|part| part.id == *id) {
                wanted.extend(catalog::part(id));
            }
        }
        let mut offers = PlanOffers {
            parts: Vec::new(),
            prices: Vec::new(),
            links: args.links.as_deref().map(tables::links).transpose()?.unwrap_or_default(),
            without_offer: Vec::new(),
            without_kernels: Vec::new(),
            unlisted: Vec::new(),
            warnings: list.warnings(&[]),
        };
        for part in wanted {
            let own = devices_of(part, &owned);
            for (at, term) in terms(args, part, stock.as_deref()).into_iter().enumerate() {
                let owned = if at == 0 { own } else { 0 };
                // a datasheet alone promises more than kernels reach, so that it would always win
                let named = !args.parts.is_empty() || term.most.is_some() || owned > 0;
                match price(&term, &list.offers) {
                    Some(_) if !named && part.reached_profile().is_none() => {
                        offers.without_kernels.push(term.name());
                    }
                    Some(_) if !named && list.offers.is_empty() && !is_listed(args, part) => {
                        offers.unlisted.push(term.name());
                    }
                    Some(price) => {
                        offers.parts.push(OfferedPart { usd_per_hour: price.usd_per_hour, owned, ..term });
                        offers.prices.push(price);
                    }
                    // what providers do not rent out as spot was not asked for
                    None if term.spot && stock.is_none() => {}
                    None => offers.without_offer.push(term.name()),
                }
            }
        }
        if args.spot.is_some() && !offers.parts.iter().any(|offer| offer.spot) {
            offers
                .warnings
                .push("--spot: there is no spot offer; --prices takes a list that has some".into());
        }
        if args.have.is_some() && offers.parts.iter().any(|offer| !offer.region.is_empty()) {
            return Err(UsageError(
                "--have: owned devices have no region; omit the column in --inventory".into(),
            )
            .into());
        }
        offers.warnings.extend(said);
        offers.warnings.extend(offers.unlinked());
        if offers.parts.is_empty() {
            let none = match &offers.without_kernels[..] {
                [] => "no requested part has an offer; see --prices, --parts and --inventory".to_owned(),
                ids => format!(
                    "no published kernel times for the parts with an offer; use --parts {} to include them \
                     by datasheet",
                    ids.join(",")
                ),
            };
            return Err(UsageError(format!("no part is left to choose from: {none}")).into());
        }
        Ok(offers)
    }

    /// Regions without a link to any other, where there are several.
    fn unlinked(&self) -> Option<String> {
        let mut regions: Vec<&str> = self.parts.iter().map(|offer| offer.region.as_str()).collect();
        regions.sort_unstable();
        regions.dedup();
        let linked = |region: &str| self.links.iter().any(|link| link.from == region || link.to == region);
        let alone: Vec<&str> = regions.iter().copied().filter(|region| !linked(region)).collect();
        (regions.len() > 1 && !alone.is_empty()).then(|| {
            let names = alone.join(", ");
            format!("no link joins {names} to another region, so that no KV goes there or comes from there (--links)")
        })
    }
}

/// Whether a provider lists the part at its built-in price, or the user takes such a price without one.
fn is_listed(args: &PlanArgs, part: &Part) -> bool {
    match reference(part.id).map(|entry| entry.support) {
        Some(PriceSupport::Marketplaces) => args.marketplaces,
        Some(PriceSupport::Estimate) => args.estimates,
        Some(PriceSupport::Clouds(_) | PriceSupport::Hyperscalers) | None => true,
    }
}

/// A part of the catalog, or the closest ones.
fn part(id: &str) -> Result<&'static Part, String> {
    catalog::named(id)
}

/// Number of a part's devices in a list.
fn devices_of(part: &Part, list: &[(&'static str, u32)]) -> u32 {
    let own = list.iter().filter(|(id, _)| *id == part.id);
    own.fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// What a fleet file has.
#[derive(Default)]
struct Owned {
    /// Parts and numbers of devices.
    devices: Vec<(&'static str, u32)>,
    /// How devices of this machine differ from their parts.
    said: Vec<String>,
}

/// What the fleet file of `--have` has.
fn owned_devices(path: &Path) -> Result<Owned> {
    let file = own_devices::read_fleet(path, None).with_context(|| format!("--have {}", path.display()))?;
    let part = |pool: &InstancePool, id: Option<&str>| {
        id.and_then(catalog::part).map(|part| part.id).ok_or_else(|| {
            let what = "a plan needs its `device`, an id of the catalog";
            UsageError(format!(
                "--have {}: pool '{}' does not say its part; {what}",
                path.display(),
                pool.name
            ))
        })
    };
    let mut owned = Vec::new();
    let of_machine = file.pools.iter().filter(|pool| pool.own_device.is_some());
    let said = of_machine.map(|pool| format!("{}; plans count with the catalog's times", pool.cost_basis));
    let said = said.collect();
    for pool in &file.pools {
        let of_instance = pool.devices_per_instance.saturating_mul(pool.pipeline_stages);
        let own = part(pool, pool.device.as_deref())?;
        owned.push((own, pool.count.saturating_mul(of_instance)));
        if let Some(others) = &pool.attention {
            let attends = part(pool, others.device.as_deref())?;
            owned.push((attends, pool.count.saturating_mul(others.count)));
        }
    }
    Ok(Owned { devices: owned, said })
}

/// The offers of a part for a plan, without their prices: on-demand before spot.
fn terms(args: &PlanArgs, part: &'static Part, stock: Option<&[Stock]>) -> Vec<OfferedPart> {
    let term = |spot: bool, region: &str, most: Option<u32>| OfferedPart {
        spot,
        region: region.into(),
        most,
        spares: args.spares + if spot { args.spot.unwrap_or(0) } else { 0 },
        ..OfferedPart::new(part, UsdPerHour(0.0))
    };
    let Some(stock) = stock else {
        let spot = args.spot.is_some().then(|| term(true, "", None));
        return [term(false, "", None)].into_iter().chain(spot).collect();
    };
    let mut terms: Vec<OfferedPart> = Vec::new();
    for row in stock.iter().filter(|row| row.id == part.id && row.count > 0) {
        let same = |known: &&mut OfferedPart| known.spot == row.spot && known.region == row.region;
        match terms.iter_mut().find(same) {
            Some(known) => known.most = known.most.map(|most| most.saturating_add(row.count)),
            None => terms.push(term(row.spot, &row.region, Some(row.count))),
        }
    }
    terms.sort_by_key(|term| term.spot);
    terms
}

/// The price of an offer, from the rows of a list for its region or for all.
fn price(term: &OfferedPart, list: &[Offer]) -> Option<Price> {
    let selection = Selection { spot: term.spot, ..Selection::default() };
    if list.is_empty() || term.region.is_empty() {
        return selection.price_or_reference(term.part.id, list);
    }
    let here = |offer: &&Offer| offer.region.is_empty() || offer.region.eq_ignore_ascii_case(&term.region);
    let here: Vec<Offer> = list.iter().filter(here).cloned().collect();
    selection.price(term.part.id, &here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_devices_than_can_be_counted_are_the_most_that_can() {
        let list = [("L40S", 4_000_000_000), ("L4", 7), ("L40S", 4_000_000_000)];
        let count = |id| devices_of(catalog::part(id).unwrap(), &list);
        assert_eq!((count("L40S"), count("L4"), count("T4")), (u32::MAX, 7, 0));
    }
}
