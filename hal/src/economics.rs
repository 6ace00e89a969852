//! What a device costs, kept apart from the device because the same part has many prices: an H100 was offered
//! at 1.5 to 13 $/h in the summer of 2026. A price is therefore always a dated input, and a stated rule
//! ([`Selection`]) decides which of several offers count.

mod reference;

pub use reference::{PriceSupport, REFERENCE_OFFERS, ReferenceOffer, reference, reference_offer};

use crate::catalog::{Part, is_claim};
use crate::profile::DeviceProfile;
use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, UsdPerHour};
use crate::{DType, Error, Result};
use serde::{Deserialize, Serialize};
use std::marker::PhantomData;

/// A dated offer to rent out a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The device: a catalog id, or the user's own name for a part.
    pub device: String,
    /// Hourly rent of one device.
    pub price: UsdPerHour,
    /// Whether the provider may take the device back at any time.
    pub spot: bool,
    /// Name of the provider, such as `aws` or `runpod`.
    pub provider: String,
    /// The provider's own term for the kind of offer, such as `on-demand` or `community`.
    pub tier: String,
    /// The region, in the provider's words; empty if unknown.
    pub region: String,
    /// Where the price was read.
    pub source: String,
    /// The day on which it was seen, as `YYYY-MM-DD`, if known.
    pub date: Option<String>,
}

/// Providers whose list prices include more than the device and are three to five times the usual price.
pub const HYPERSCALERS: [&str; 3] = ["aws", "azure", "gcp"];

fn is_hyperscaler(offer: &Offer) -> bool {
    HYPERSCALERS.iter().any(|name| offer.provider.eq_ignore_ascii_case(name))
}

/// Which of a device's offers count, and how they become one price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// Whether spot offers count instead of on-demand ones.
    pub spot: bool,
    /// How the offers that count become one price.
    pub pick: PricePick,
}

/// How several offers become one price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PricePick {
    /// The median over providers of each one's lowest price, so that a provider counts once, however many
    /// regions and sizes it lists. Hyperscalers count only if no other provider offers the device, and then
    /// with their lowest price.
    #[default]
    Median,
    /// The lowest price of all.
    Least,
}

/// A device's price and how it was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Price {
    /// Hourly rent of one device.
    pub usd_per_hour: UsdPerHour,
    /// The rule, the number of offers and their dates, for display.
    pub basis: String,
    /// The date of the newest offer, as `YYYY-MM-DD`, if known.
    pub date: Option<String>,
}

impl Selection {
    /// Returns the price by this rule from `offers`, or from the built-in table ([`reference_offer`]) if
    /// there are no offers at all: prices of two origins are not mixed.
    pub fn price_or_reference(&self, device: &str, offers: &[Offer]) -> Option<Price> {
        match offers {
            [] => self.price(device, &[reference_offer(device)?]),
            offers => self.price(device, offers),
        }
    }

    /// Returns the price of `device` (case-insensitive) by this rule; `None` if no offer counts.
    pub fn price(&self, device: &str, offers: &[Offer]) -> Option<Price> {
        let all: Vec<&Offer> = offers
            .iter()
            .filter(|offer| offer.device.eq_ignore_ascii_case(device) && offer.spot == self.spot)
            .collect();
        let outside: Vec<&Offer> = all.iter().copied().filter(|offer| !is_hyperscaler(offer)).collect();
        let (counted, usd_per_hour, rule) = match self.pick {
            PricePick::Median if !outside.is_empty() => {
                let price = median_of_providers(&outside)?;
                (outside, price, "median of providers")
            }
            _ => {
                let price = all.iter().map(|offer| offer.price).reduce(UsdPerHour::min)?;
                let rule =
                    if self.pick == PricePick::Least { "least of all" } else { "least; hyperscalers only" };
                (all, price, rule)
            }
        };
        let rule = if let [only] = counted[..] { &only.source } else { rule };
        let spot = if self.spot { "spot " } else { "" };
        let many = match counted.len() {
            1 if self.spot => ", spot".into(),
            1 => String::new(),
            count => format!(", {count} {spot}offers"),
        };
        let basis = format!("{rule}{many}{}", dates(&counted));
        let date = counted.iter().filter_map(|offer| offer.date.clone()).max();
        Some(Price { usd_per_hour, basis, date })
    }
}

fn median_of_providers(offers: &[&Offer]) -> Option<UsdPerHour> {
    let mut least: Vec<(&str, f64)> = Vec::new();
    for offer in offers {
        match least.iter_mut().find(|(provider, _)| *provider == offer.provider) {
            Some((_, price)) => *price = price.min(offer.price.0),
            None => least.push((&offer.provider, offer.price.0)),
        }
    }
    least.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (low, high) = (least.get(least.len().checked_sub(1)? / 2)?, &least[least.len() / 2]);
    Some(UsdPerHour((low.1 + high.1) / 2.0))
}

fn dates(offers: &[&Offer]) -> String {
    let known = || offers.iter().filter_map(|offer| offer.date.as_deref());
    match (known().min(), known().max()) {
        (Some(first), Some(last)) if first == last => format!(", {first}"),
        (Some(first), Some(last)) => format!(", {first} to {last}"),
        _ => String::new(),
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Where numbers about a device come from. It is a type, so that numbers of different origin cannot mix in
/// one [`PerDollar`].
pub trait Origin: sealed::Sealed {
    /// Name of the origin, for display and JSON.
    const NAME: &'static str;
}

macro_rules! origin {
    ($(#[$doc:meta])* $name:ident = $text:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {}
        impl sealed::Sealed for $name {}
        impl Origin for $name {
            const NAME: &'static str = $text;
        }
    };
}

origin!(/** The vendor's claim. */ Datasheet = "datasheet");
origin!(/** The claim, lowered to what others measured kernels to reach of it. */ Published = "published");
origin!(/** Measured on the device itself. */ Measured = "measured");

/// The rates and memory of a device, according to `P`.
#[derive(Clone, Debug, PartialEq)]
pub struct Ability<P> {
    compute: Vec<(DType, FlopPerSecond)>,
    bandwidth: BytesPerSecond,
    memory: Bytes,
    origin: PhantomData<P>,
}

impl Ability<Datasheet> {
    /// Takes what the vendor claims.
    pub fn claimed(part: &Part) -> Self {
        let profile = part.profile();
        Ability {
            compute: profile.compute,
            bandwidth: profile.bandwidth,
            memory: profile.memory,
            origin: PhantomData,
        }
    }
}

impl Ability<Published> {
    /// Scales the vendor's claim by what published measurements reach: large matrix products for arithmetic
    /// (16 bits only, since nothing else is published) and decode attention for bandwidth. `None` if nothing
    /// was published.
    pub fn published(part: &Part) -> Option<Self> {
        let reached = part.reached()?;
        let claimed = Ability::claimed(part);
        let halves = |(dtype, _): &(DType, FlopPerSecond)| matches!(dtype, DType::Bf16 | DType::F16);
        let compute = claimed.compute.into_iter().filter(halves);
        Some(Ability {
            compute: compute.map(|(dtype, rate)| (dtype, rate * reached.gemm)).collect(),
            bandwidth: claimed.bandwidth * reached.attention_decode,
            memory: claimed.memory,
            origin: PhantomData,
        })
    }
}

impl Ability<Measured> {
    /// Takes what a profile measured.
    ///
    /// # Errors
    /// `Invalid` for a profile made from the catalog, since that is a claim.
    pub fn measured(profile: &DeviceProfile) -> Result<Self> {
        if is_claim(profile) {
            return Err(Error::invalid(format!(
                "the profile '{}' restates a datasheet; measure the device with 'mixfleet profile'",
                profile.fingerprint
            )));
        }
        Ok(Ability {
            compute: profile.compute.clone(),
            bandwidth: profile.bandwidth,
            memory: profile.memory,
            origin: PhantomData,
        })
    }
}

impl<P: Origin> Ability<P> {
    /// Divides by a price; `None` if the price is not positive.
    pub fn per_dollar(&self, price: UsdPerHour) -> Option<PerDollar<P>> {
        (price.0 > 0.0).then(|| PerDollar {
            flop_per_second: self.compute.iter().map(|&(dtype, rate)| (dtype, rate.0 / price.0)).collect(),
            bytes_per_second: self.bandwidth.0 / price.0,
            bytes: self.memory.0 / price.0,
            origin: PhantomData,
        })
    }
}

/// What one dollar per hour buys on a device, according to `P`.
#[derive(Clone, Debug, PartialEq)]
pub struct PerDollar<P> {
    /// FLOP/s per $/h, by input dtype.
    pub flop_per_second: Vec<(DType, f64)>,
    /// Bytes/s per $/h.
    pub bytes_per_second: f64,
    /// Bytes of memory per $/h.
    pub bytes: f64,
    origin: PhantomData<P>,
}

impl<P: Origin> PerDollar<P> {
    /// Returns the name of the origin.
    pub const fn origin(&self) -> &'static str {
        P::NAME
    }
}

#[cfg(test)]
mod tests;
