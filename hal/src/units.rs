//! Physical quantities as types, so that seconds cannot be added to dollars.
//!
//! GB is 1e9 bytes and GiB is 2^30 bytes throughout.

use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// 1e9 bytes.
pub const GB: f64 = 1e9;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(transparent)]
        pub struct $name(pub f64);

        impl Add for $name { type Output = Self; fn add(self, other: Self) -> Self { $name(self.0 + other.0) } }
        impl AddAssign for $name { fn add_assign(&mut self, other: Self) { self.0 += other.0; } }
        impl Sub for $name { type Output = Self; fn sub(self, other: Self) -> Self { $name(self.0 - other.0) } }
        impl Mul<f64> for $name { type Output = Self; fn mul(self, factor: f64) -> Self { $name(self.0 * factor) } }
        impl Div<f64> for $name { type Output = Self; fn div(self, factor: f64) -> Self { $name(self.0 / factor) } }
        impl Div for $name { type Output = f64; fn div(self, other: Self) -> f64 { self.0 / other.0 } }
        impl std::iter::Sum for $name { fn sum<I: Iterator<Item = Self>>(items: I) -> Self { $name(items.map(|q| q.0).sum()) } }
        impl $name {
            /// Zero.
            pub const ZERO: Self = $name(0.0);
            /// The larger of the two.
            pub fn max(self, other: Self) -> Self { $name(self.0.max(other.0)) }
            /// The smaller of the two.
            pub fn min(self, other: Self) -> Self { $name(self.0.min(other.0)) }
        }
    };
}

quantity!(/** A span of time, in seconds. */ Seconds);
quantity!(/** An amount of memory or traffic, in bytes. */ Bytes);
quantity!(/** Floating-point operations; a fused multiply-add counts two. */ Flop);
quantity!(/** Arithmetic rate, in floating-point operations per second. */ FlopPerSecond);
quantity!(/** Bandwidth, in bytes per second. */ BytesPerSecond);
quantity!(/** Money. */ Usd);
quantity!(/** The rent of a device. */ UsdPerHour);

/// A number in the total order of [`f64::total_cmp`], for keys of maps and heaps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ordered(pub f64);

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ordered {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ordered {}

impl Div<BytesPerSecond> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<FlopPerSecond> for Flop {
    type Output = Seconds;
    fn div(self, rate: FlopPerSecond) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Mul<Seconds> for UsdPerHour {
    type Output = Usd;
    fn mul(self, time: Seconds) -> Usd {
        Usd(self.0 * time.0 / 3600.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_have_the_right_unit() {
        assert_eq!(Bytes(100e9) / BytesPerSecond(50e9), Seconds(2.0));
        assert_eq!(Flop(4e12) / FlopPerSecond(2e12), Seconds(2.0));
        assert_eq!(UsdPerHour(3600.0) * Seconds(2.0), Usd(2.0));
    }

    #[test]
    fn any_two_numbers_are_ordered() {
        let mut numbers = [f64::NAN, 1.0, f64::INFINITY, -0.0, 0.0, -3.0].map(Ordered);
        numbers.sort();
        assert_eq!(numbers[..5], [-3.0, -0.0, 0.0, 1.0, f64::INFINITY].map(Ordered));
        assert!(numbers[5].0.is_nan() && numbers[5] == numbers[5] && Ordered(0.0) != Ordered(-0.0));
    }
}
