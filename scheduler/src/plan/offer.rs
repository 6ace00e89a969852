//! A part at a price.

use mixfleet_hal::catalog::Part;
use mixfleet_hal::units::UsdPerHour;

/// A part that may be rented, at a price.
#[derive(Clone, Debug)]
pub struct OfferedPart {
    /// The part.
    pub part: &'static Part,
    /// Rent of one device.
    pub usd_per_hour: UsdPerHour,
    /// Maximum number of devices, if there is one.
    pub most: Option<u32>,
    /// Number of owned devices, which cost nothing.
    pub owned: u32,
    /// Whether the provider may take them back at any time.
    pub spot: bool,
    /// Further instances of each of its pools in use, in case others fail or are taken back.
    pub spares: u32,
    /// Where they stand; offers of one region have the same.
    pub region: String,
}

impl OfferedPart {
    /// Any number of devices of a part that stay as long as they are paid for.
    pub fn new(part: &'static Part, usd_per_hour: UsdPerHour) -> Self {
        let region = String::new();
        OfferedPart { part, usd_per_hour, most: None, owned: 0, spot: false, spares: 0, region }
    }

    /// The part and what tells its offers apart, for display.
    pub fn name(&self) -> String {
        let spot = if self.spot { " spot" } else { "" };
        let place = if self.region.is_empty() { String::new() } else { format!(" in {}", self.region) };
        format!("{}{spot}{place}", self.part.id)
    }

    /// The same in lower case without spaces, for names of pools and files.
    pub fn word(&self) -> String {
        self.name().to_ascii_lowercase().replace(' ', "-")
    }
}
