//! Resolves names on the command line to devices.

use super::comparison::Basis;
use crate::args::DevicePrice;
use crate::failure::UsageError;
use crate::{own_devices, profiles};
use anyhow::Result;
use mixfleet_hal::DType;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::economics::{Ability, Origin, PerDollar, Price};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, BytesPerSecond, UsdPerHour};
use mixfleet_scheduler::classes::PricedDevice;
use mixfleet_scheduler::cost::{CostModel, EngineCost, ModelShape, ProfileCost, StepCalibration};
use mixfleet_sim::fleet_file::OwnDevice;
use std::path::{Path, PathBuf};

/// A device to compare: in the catalog, measured, or both.
#[derive(Clone, Debug)]
pub(super) struct Compared {
    pub(super) name: String,
    pub(super) part: Option<&'static Part>,
    pub(super) measured: Option<DeviceProfile>,
    /// Calibration or profile, for a device of this machine.
    pub(super) own: Option<OwnSteps>,
    pub(super) price: Option<Price>,
}

/// A device of this machine.
#[derive(Clone, Debug)]
pub(super) struct OwnSteps {
    memory: Bytes,
    /// Times of the model's steps that serving measured there.
    steps: Option<StepCalibration>,
    /// Where its times are from.
    pub(super) times_from: String,
}

impl Compared {
    /// The device as input of the comparison. A device without evidence of kind `basis` uses its best
    /// evidence.
    pub(super) fn candidate(&self, basis: Basis) -> PricedDevice {
        let claimed = || self.part.map(Part::profile);
        let bare = || {
            let memory = self.own.as_ref().map_or(Bytes::ZERO, |own| own.memory);
            DeviceProfile::roof(Vec::new(), BytesPerSecond(f64::INFINITY), memory)
        };
        let reached = || self.part.and_then(Part::reached_profile);
        let profile = match basis {
            Basis::Datasheet => claimed(),
            Basis::Published => reached(),
            Basis::Measured | Basis::Mixed => self.measured.clone().or_else(reached),
        };
        let profile = profile.or_else(claimed).or_else(|| self.measured.clone());
        let steps = self.own.as_ref().filter(|_| self.is_measured_for(basis) && self.measured.is_none());
        PricedDevice {
            name: self.name.clone(),
            profile: profile.unwrap_or_else(bare),
            steps: steps.and_then(|own| own.steps.clone()),
            price: self.price.as_ref().map(|price| price.usd_per_hour),
        }
    }
}

impl Compared {
    /// Whether its own measurements are the basis of a comparison by `basis`.
    pub(super) fn is_measured_for(&self, basis: Basis) -> bool {
        self.is_measured() && matches!(basis, Basis::Measured | Basis::Mixed)
    }

    /// Whether it was measured: its operations, or steps of the model.
    pub(super) fn is_measured(&self) -> bool {
        self.measured.is_some() || self.has_own_steps()
    }

    /// Whether steps of the model were measured on it, as a device of this machine.
    pub(super) fn has_own_steps(&self) -> bool {
        self.own.as_ref().is_some_and(|own| own.steps.is_some())
    }

    /// Whether kernel times are known that were published for it, or are borrowed from its relatives.
    pub(super) fn is_published(&self) -> bool {
        self.part.is_some_and(|part| part.reached_profile().is_some())
    }
}

impl Compared {
    /// A warning, if the profile given for a part names another one. Only the part's number is compared,
    /// since vendors and drivers spell the rest in many ways.
    pub(super) fn misnamed(&self) -> Option<String> {
        let (part, profile) = (self.part?, self.measured.as_ref()?);
        let plain = |text: &str| -> String {
            text.chars().filter(|c| c.is_ascii_alphanumeric()).map(|c| c.to_ascii_lowercase()).collect()
        };
        let number = part.id.split('-').find(|word| word.contains(|c: char| c.is_ascii_digit()))?;
        let other = !profile.name.is_empty() && !plain(&profile.name).contains(&plain(number));
        other.then(|| format!("the profile given for {} was measured on '{}'", part.id, profile.name))
    }
}

/// One line of the per-dollar table, whose numbers all have one origin.
pub(super) struct PerDollarRow {
    pub(super) origin: &'static str,
    pub(super) flop_per_second: Vec<(DType, f64)>,
    pub(super) bytes_per_second: f64,
    pub(super) bytes: f64,
}

impl<P: Origin> From<PerDollar<P>> for PerDollarRow {
    fn from(per: PerDollar<P>) -> Self {
        let (origin, bytes_per_second, bytes) = (per.origin(), per.bytes_per_second, per.bytes);
        PerDollarRow { origin, flop_per_second: per.flop_per_second, bytes_per_second, bytes }
    }
}

impl Compared {
    /// What a dollar buys on the device, once per origin of its numbers. Empty without a price.
    pub(super) fn per_dollar(&self) -> Vec<PerDollarRow> {
        let Some(Price { usd_per_hour: price, .. }) = self.price else { return Vec::new() };
        let claimed = self.part.and_then(|part| Ability::claimed(part).per_dollar(price));
        let published = self.part.and_then(Ability::published).and_then(|able| able.per_dollar(price));
        let measured = self.measured.as_ref().and_then(|profile| Ability::measured(profile).ok());
        let measured = measured.and_then(|able| able.per_dollar(price));
        [claimed.map(PerDollarRow::from), published.map(PerDollarRow::from), measured.map(PerDollarRow::from)]
            .into_iter()
            .flatten()
            .collect()
    }
}

/// The model for which devices are compared.
pub(super) struct ComparedModel<'a> {
    pub(super) name: &'a str,
    pub(super) shape: &'a ModelShape,
}

/// The parts, profiles and devices of this machine that the user named, without repetition, or else all parts
/// with a price.
pub(super) fn resolve(
    words: &[String],
    profiles: &[(String, PathBuf)],
    model: &ComparedModel<'_>,
    price: impl Fn(&str) -> Option<Price>,
) -> Result<Vec<Compared>> {
    let mut devices: Vec<Compared> = Vec::new();
    for word in words {
        if let Some(part) = catalog::part(word) {
            add(&mut devices, part.id, None);
        } else if Path::new(word).is_file() {
            let name = Path::new(word).file_stem().unwrap_or_default().to_string_lossy().into_owned();
            add(&mut devices, &name, Some(profiles::read(Path::new(word))?));
        } else if let Some(own) = own_devices::find(word).map_err(UsageError)? {
            devices.retain(|device| device.name != *word);
            devices.push(own_device(&own, model)?);
        } else {
            let part = catalog::named(word)
                .map_err(|why| UsageError(format!("there is no file '{word}', and {why}")))?;
            add(&mut devices, part.id, None);
        }
    }
    for (name, file) in profiles {
        add(&mut devices, name, Some(profiles::read(file)?));
    }
    let asked = !words.is_empty();
    for device in &mut devices {
        device.price = price(&device.name);
    }
    if !asked {
        for part in catalog::parts() {
            let known = devices.iter().any(|device| device.name == part.id);
            if let (false, Some(price)) = (known, price(part.id)) {
                add(&mut devices, part.id, None);
                devices.last_mut().expect("just added").price = Some(price);
            }
        }
    }
    Ok(devices)
}

/// Adds a device of that name; if it exists already, the measurement is added to it.
fn add(devices: &mut Vec<Compared>, name: &str, measured: Option<DeviceProfile>) {
    let part = catalog::named(name).ok();
    let name = part.map_or(name, |part| part.id);
    match devices.iter_mut().find(|device| device.name.eq_ignore_ascii_case(name)) {
        Some(device) => device.measured = measured.or(device.measured.take()),
        None => devices.push(Compared { name: name.into(), part, measured, own: None, price: None }),
    }
}

/// A device of this machine with its times of the model's steps.
fn own_device(own: &OwnDevice, model: &ComparedModel<'_>) -> Result<Compared> {
    let &ComparedModel { name: model, shape } = model;
    let catalog = |part: &'static Part, chunk_tokens| {
        let profile = part.best_profile();
        let shape = shape.on(&profile);
        let engine = EngineCost::OURS;
        let cost = ProfileCost { profile, shape, chunk_tokens, all_reduce: None, engine };
        (part, CostModel::Profile(Box::new(cost)))
    };
    let (steps, times_from) = match own.calibration(shape) {
        Some(known) => {
            let catalog = own.part.map(|part| catalog(part, known.steps.chunk_tokens));
            (Some(known.steps.clone()), own.predicted(known, catalog).1)
        }
        None if own.part.is_none() => return Err(UsageError(own.lacks(model, 1)).into()),
        None => (None, own.lacks(model, 1)),
    };
    let own_steps = OwnSteps { memory: own.memory, steps, times_from };
    let (name, part) = (own.selector.clone(), own.part);
    Ok(Compared { name, part, measured: None, own: Some(own_steps), price: None })
}

/// Applies prices from the command line, which take precedence over all others.
pub(super) fn state_prices(devices: &mut [Compared], stated: &[DevicePrice]) -> Result<()> {
    for (at, DevicePrice { device: name, usd_per_hour }) in stated.iter().enumerate() {
        if stated[..at].iter().any(|before| before.device.eq_ignore_ascii_case(name)) {
            return Err(UsageError(format!("--usd-per-hour: two prices for {name}; give one")).into());
        }
        if *usd_per_hour <= 0.0 {
            return Err(
                UsageError(format!("--usd-per-hour {name}=0: a part for nothing has no comparison")).into()
            );
        }
        let of_part = catalog::named(name).map_or(name.as_str(), |part| part.id);
        // a profile's file is as good as the name that it gives
        let of_file = name.strip_suffix(".json").map(|path| path.rsplit('/').next().unwrap_or(path));
        let is_meant = |device: &&mut Compared| {
            device.name.eq_ignore_ascii_case(name) || [Some(of_part), of_file].contains(&Some(&*device.name))
        };
        let Some(device) = devices.iter_mut().find(is_meant) else {
            let known: Vec<&str> = devices.iter().map(|device| device.name.as_str()).take(8).collect();
            let known = known.join(", ");
            return Err(UsageError(format!(
                "--usd-per-hour: '{name}' is not compared; compared are {known}"
            ))
            .into());
        };
        let basis = "stated on the command line".to_string();
        device.price = Some(Price { usd_per_hour: UsdPerHour(*usd_per_hour), basis, date: None });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve_names(words: &[&str]) -> Result<Vec<String>> {
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let priced = |name: &str| mixfleet_hal::economics::Selection::default().price_or_reference(name, &[]);
        let model = mixfleet_scheduler::models::find("llama-3.1-8b").unwrap();
        let shape = model.shape(mixfleet_hal::DType::Bf16);
        Ok(resolve(&words, &[], &ComparedModel { name: model.name, shape: &shape }, priced)?
            .into_iter()
            .map(|device| device.name)
            .collect())
    }

    #[test]
    fn parts_are_found_once_in_any_case_and_others_refused() {
        assert_eq!(
            resolve_names(&["l4", "L4", "rtx4090", "h100-sxm"]).unwrap(),
            ["L4", "RTX-4090", "H100-SXM-80GB"]
        );
        let several = resolve_names(&["h100"]).unwrap_err().to_string();
        assert!(
            several.contains("may be any of H100-SXM-80GB, ") && several.ends_with("; name one"),
            "{several}"
        );
        let error = resolve_names(&["rtx-4091"]).unwrap_err();
        assert!(error.is::<UsageError>() && error.to_string().contains("closest: RTX-4090"), "{error}");
        assert!(resolve_names(&[]).unwrap().len() > 30);
    }

    #[test]
    fn a_stated_price_wins_and_must_belong_to_a_device() {
        let mut devices =
            vec![Compared { name: "L4".into(), part: None, measured: None, own: None, price: None }];
        let state = |name: &str, usd_per_hour| [DevicePrice { device: name.into(), usd_per_hour }];
        state_prices(&mut devices, &state("l4", 0.5)).unwrap();
        assert_eq!(devices[0].price.as_ref().unwrap().usd_per_hour, UsdPerHour(0.5));
        state_prices(&mut devices, &state("profiles/L4.json", 0.4)).unwrap();
        assert_eq!(devices[0].price.as_ref().unwrap().usd_per_hour, UsdPerHour(0.4));
        assert!(state_prices(&mut devices, &state("L40S", 0.5)).is_err());
        assert!(state_prices(&mut devices, &state("L4", 0.0)).is_err());
        let twice = [state("L4", 0.5), state("l4", 0.6)].concat();
        assert!(state_prices(&mut devices, &twice).unwrap_err().to_string().contains("two prices for l4"));
    }

    #[test]
    fn a_profile_of_another_part_is_doubted() {
        let measured_on = |name: &str| {
            let part = catalog::part("RTX-4090").unwrap();
            let measured = Some(DeviceProfile { name: name.into(), ..part.profile() });
            Compared { name: part.id.into(), part: Some(part), measured, own: None, price: None }.misnamed()
        };
        assert_eq!(measured_on("NVIDIA GeForce RTX 4090"), None);
        assert_eq!(measured_on(""), None);
        assert!(measured_on("NVIDIA L4").unwrap().contains("was measured on 'NVIDIA L4'"));
    }
}
