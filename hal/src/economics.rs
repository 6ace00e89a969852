//! What a device costs, kept apart from the device: the same part has many prices.

use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, UsdPerHour};
use serde::{Deserialize, Serialize};

/// A dated offer of a device for rent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Offer {
    /// The rent of one device.
    pub price: UsdPerHour,
    /// Where the price comes from: a provider's name, or "user".
    pub source: String,
    /// The day it was seen, `YYYY-MM-DD`, where known.
    pub date: Option<String>,
}

/// What one dollar per hour buys on a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerDollar {
    /// FLOP/s per $/h.
    pub flop_per_second: f64,
    /// Bytes/s per $/h.
    pub bytes_per_second: f64,
    /// Bytes of memory per $/h.
    pub bytes: f64,
}

impl PerDollar {
    /// Divides a device's rates by an offer's price. `None` for a price that is not positive.
    pub fn new(
        compute: FlopPerSecond,
        bandwidth: BytesPerSecond,
        memory: Bytes,
        price: UsdPerHour,
    ) -> Option<Self> {
        (price.0 > 0.0).then(|| PerDollar {
            flop_per_second: compute.0 / price.0,
            bytes_per_second: bandwidth.0 / price.0,
            bytes: memory.0 / price.0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dollar_buys_rates_divided_by_price() {
        let per = PerDollar::new(FlopPerSecond(100.0), BytesPerSecond(50.0), Bytes(8.0), UsdPerHour(2.0));
        assert_eq!(per, Some(PerDollar { flop_per_second: 50.0, bytes_per_second: 25.0, bytes: 4.0 }));
        assert_eq!(
            PerDollar::new(FlopPerSecond(1.0), BytesPerSecond(1.0), Bytes(1.0), UsdPerHour(0.0)),
            None
        );
    }
}
