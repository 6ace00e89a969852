//! The parts that a plan may take: named, offered at a price, and in stock.

use super::PlanArgs;
use crate::{Usage, prices, profiles};
use anyhow::{Context, Result, anyhow};
use mixfleet_hal::catalog::{self, Part, PartKind};
use mixfleet_hal::economics::{Price, Selection};
use mixfleet_scheduler::plan::market::OfferedPart;
use mixfleet_sim::fleet_file::{FleetFile, InstancePool};
use serde::Deserialize;
use std::path::Path;

/// The candidates, and what is none.
pub(super) struct Offers {
    pub(super) parts: Vec<OfferedPart>,
    /// The price of each.
    pub(super) prices: Vec<Price>,
    /// Parts that were asked for or are in stock, and have no offer.
    pub(super) without_offer: Vec<&'static str>,
    /// Parts with an offer of whose kernels nothing was published, and which nobody named.
    pub(super) without_kernels: Vec<&'static str>,
    pub(super) warnings: Vec<String>,
}

impl Offers {
    pub(super) fn read(args: &PlanArgs) -> Result<Self> {
        let list = args.prices.as_deref().map(prices::read).transpose()?.unwrap_or_default();
        let stock = args.inventory.as_deref().map(read_inventory).transpose()?;
        let mut named = Vec::new();
        for id in &args.parts {
            named.push(part(id).map_err(|why| Usage(format!("--parts: {why}")))?);
        }
        let accelerators = || catalog::parts().iter().filter(|part| part.kind != PartKind::Cpu);
        let mut wanted: Vec<&Part> = if named.is_empty() { accelerators().collect() } else { named };
        let owned = args.have.as_deref().map(owned_devices).transpose()?.unwrap_or_default();
        for (id, _) in &owned {
            if !wanted.iter().any(|part| part.id == *id) {
                wanted.extend(catalog::part(id));
            }
        }
        let mut offers = Offers {
            parts: Vec::new(),
            prices: Vec::new(),
            without_offer: Vec::new(),
            without_kernels: Vec::new(),
            warnings: list.warnings(&[]),
        };
        for part in wanted {
            let most = match &stock {
                None => None,
                Some(stock) => match devices_of(part, stock) {
                    0 => continue,
                    count => Some(count),
                },
            };
            // a datasheet taken at its word promises more than kernels reach, so that it would always win
            let named = !args.parts.is_empty() || most.is_some() || devices_of(part, &owned) > 0;
            match Selection::default().price_or_reference(part.id, &list.offers) {
                Some(_) if !named && part.reached_profile().is_none() => offers.without_kernels.push(part.id),
                Some(price) => {
                    let owned = devices_of(part, &owned);
                    offers.parts.push(OfferedPart { part, usd_per_hour: price.usd_per_hour, most, owned });
                    offers.prices.push(price);
                }
                None => offers.without_offer.push(part.id),
            }
        }
        if offers.parts.is_empty() {
            let none = match &offers.without_kernels[..] {
                [] => {
                    "none of those asked for has an offer; see --prices, --parts and --inventory".to_owned()
                }
                ids => format!(
                    "no kernel times are known of those with an offer; --parts {} takes their datasheets at their word",
                    ids.join(",")
                ),
            };
            return Err(Usage(format!("no part is left to choose from: {none}")).into());
        }
        Ok(offers)
    }
}

/// A part of the catalog, or the closest ones.
fn part(id: &str) -> Result<&'static Part, String> {
    catalog::part(id).ok_or_else(|| match catalog::closest(id).first() {
        Some(closest) => format!("no part is called '{id}'; closest: {closest}"),
        None => format!("no part is called '{id}'; 'mixfleet parts' lists the catalog"),
    })
}

/// Number of a part's devices in a list.
fn devices_of(part: &Part, list: &[(&'static str, u32)]) -> u32 {
    let own = list.iter().filter(|(id, _)| *id == part.id);
    own.fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// Parts and numbers of devices of a fleet file.
fn owned_devices(path: &Path) -> Result<Vec<(&'static str, u32)>> {
    let read = |path: &Path| profiles::read(path).map_err(|error| format!("{error:#}"));
    let file = FleetFile::read(path, &read, None).with_context(|| format!("--have {}", path.display()))?;
    let of = |pool: &InstancePool| {
        let part = pool.device.as_deref().and_then(catalog::part).ok_or_else(|| {
            let what = "a plan needs its `device`, an id of the catalog";
            Usage(format!("--have {}: pool '{}' does not say its part; {what}", path.display(), pool.name))
        })?;
        let of_instance = pool.devices_per_instance.saturating_mul(pool.pipeline_stages);
        Ok((part.id, pool.count.saturating_mul(of_instance)))
    };
    file.pools.iter().map(of).collect()
}

#[derive(Deserialize)]
struct Stock {
    device_id: String,
    count: u32,
}

/// Parts and numbers of devices.
fn read_inventory(path: &Path) -> Result<Vec<(&'static str, u32)>> {
    let file = path.display();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read the inventory in {file}"))?;
    let mut reader =
        csv::ReaderBuilder::new().trim(csv::Trim::All).comment(Some(b'#')).from_reader(&bytes[..]);
    let mut stock = Vec::new();
    for row in reader.deserialize::<Stock>() {
        let row = row.map_err(|error| {
            let line = error.position().map_or(1, csv::Position::line);
            anyhow!(
                "{file}:{line}: expected the columns device_id and count, as in H100-SXM-80GB,16: {error}"
            )
        })?;
        let part = part(&row.device_id).map_err(|why| anyhow!("{file}: {why}"))?;
        stock.push((part.id, row.count));
    }
    Ok(stock)
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
