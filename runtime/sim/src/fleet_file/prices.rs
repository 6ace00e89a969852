//! Rents from other offers than the file's.

use super::{FleetFile, FleetFileError};
use mixfleet_hal::economics::Price;

impl FleetFile {
    /// Replaces the rent of every pool by `price`, the price of one device by its id in the catalog. A pool
    /// for whose part there is none keeps the rent that the file states for it.
    ///
    /// # Errors
    /// The pool and its part, if the file states none either.
    pub fn reprice(&mut self, price: &dyn Fn(&str) -> Option<Price>) -> Result<(), FleetFileError> {
        for pool in &mut self.pools {
            let devices = f64::from(pool.devices_per_instance) * f64::from(pool.pipeline_stages);
            let attending = pool.attention.iter().map(|of| (of.device.as_deref(), f64::from(of.count)));
            let parts: Vec<_> = std::iter::once((pool.device.as_deref(), devices)).chain(attending).collect();
            let found = parts.iter().map(|(id, devices)| {
                let found = id.and_then(price)?;
                Some((found.usd_per_hour.0 * devices, found.basis))
            });
            match found.collect::<Option<Vec<(f64, String)>>>() {
                Some(found) => {
                    let (rents, bases): (Vec<f64>, Vec<String>) = found.into_iter().unzip();
                    pool.usd_per_hour = Some(rents.iter().sum());
                    (pool.price_basis, pool.price_stated) = (bases.join("; "), false);
                }
                None if pool.price_stated => {}
                None => {
                    let lacks = parts.iter().find(|(id, _)| id.and_then(price).is_none());
                    let part = lacks
                        .and_then(|(id, _)| *id)
                        .map_or("its device, which the catalog does not have".into(), |id| {
                            format!("its part {id}")
                        });
                    let cause = format!(
                        "the list of prices has no offer for {part}; add one, or give the pool usd_per_hour"
                    );
                    return Err(FleetFileError::value(format!("pool '{}'", pool.name), cause));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::UsdPerHour;
    use std::path::Path;

    fn fleet(pools: &str) -> FleetFile {
        let none = |path: &Path| Err(format!("{} is not needed here", path.display()));
        let text = format!("version = 1\n[model]\nname = 'llama-3.1-8b'\n{pools}");
        FleetFile::parse(&text, Path::new(""), &none).unwrap()
    }

    fn half_a_dollar(id: &str) -> Option<Price> {
        (id == "L40S").then(|| Price {
            usd_per_hour: UsdPerHour(0.5),
            basis: "a list, 2026-11-01".into(),
            date: None,
        })
    }

    #[test]
    fn a_list_replaces_what_it_has_and_a_rent_of_the_file_stands_where_it_has_nothing() {
        let offered = "[[pool]]\nname = 'a'\ndevice = 'L40S'\ndevices_per_instance = 2\nusd_per_hour = 9.0\n";
        let stated = "[[pool]]\nname = 'b'\ndevice = 'L4'\nusd_per_hour = 0.3\n";
        let mut fleet = fleet(&format!("{offered}{stated}"));
        fleet.reprice(&half_a_dollar).unwrap();
        let rents: Vec<_> =
            fleet.pools.iter().map(|pool| (pool.usd_per_hour, pool.price_basis.as_str())).collect();
        assert_eq!(rents, [(Some(1.0), "a list, 2026-11-01"), (Some(0.3), "stated in the fleet file")]);
    }

    #[test]
    fn a_part_without_an_offer_is_named() {
        let mut fleet = fleet("[[pool]]\nname = 'b'\ndevice = 'L4'\n");
        let error = fleet.reprice(&half_a_dollar).unwrap_err().to_string();
        assert!(error.contains("pool 'b'") && error.contains("no offer for its part L4"), "{error}");
    }
}
