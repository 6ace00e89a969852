//! Numbers as integers of another type, without a silent wrap.
//!
//! An integer that does not fit is a bug: debug builds assert, release builds give the nearest value of the
//! type, so that a length that is too long stays too long. Untrusted values are checked by `try_from`. A
//! fraction is truncated, as by `as`: NaN is 0, and a value beyond the type gives its nearest value.

use std::fmt::Display;

mod sealed {
    pub trait HasSign: Copy + super::Display {
        fn is_negative(self) -> bool;
    }
}

/// A number that can become an integer of another type.
pub trait Number: sealed::HasSign {
    /// As a byte.
    fn u8(self) -> u8;
    /// As a `u16`.
    fn u16(self) -> u16;
    /// As a `u32`.
    fn u32(self) -> u32;
    /// As a `u64`.
    fn u64(self) -> u64;
    /// As a `usize`.
    fn usize(self) -> usize;
    /// As an `i32`.
    fn i32(self) -> i32;
    /// As an `i64`.
    fn i64(self) -> i64;
}

/// What becomes of an integer that does not fit.
#[cold]
#[inline(never)]
#[track_caller]
fn nearest<N: sealed::HasSign, T>(value: N, least: T, most: T) -> T {
    debug_assert!(false, "{value} does not fit into {}", std::any::type_name::<T>());
    if value.is_negative() { least } else { most }
}

macro_rules! integers {
    ($($from:ident: $is_negative:expr;)*) => { $(
        impl sealed::HasSign for $from {
            fn is_negative(self) -> bool {
                $is_negative(self)
            }
        }
        impl Number for $from {
            integers!(@to u8 u16 u32 u64 usize i32 i64);
        }
    )* };
    (@to $($to:ident)*) => { $(
        #[inline]
        #[track_caller]
        fn $to(self) -> $to {
            // A closure would not be at the caller's line.
            match $to::try_from(self) {
                Ok(value) => value,
                Err(_) => nearest(self, $to::MIN, $to::MAX),
            }
        }
    )* };
}

macro_rules! fractions {
    ($($from:ident)*) => { $(
        impl sealed::HasSign for $from {
            fn is_negative(self) -> bool {
                self < 0.0
            }
        }
        impl Number for $from {
            fractions!(@to u8 u16 u32 u64 usize i32 i64);
        }
    )* };
    (@to $($to:ident)*) => { $(
        #[inline]
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the nearest value is meant")]
        fn $to(self) -> $to {
            self as $to
        }
    )* };
}

integers! {
    u8: |_| false;
    u16: |_| false;
    u32: |_| false;
    u64: |_| false;
    u128: |_| false;
    usize: |_| false;
    i8: |value| value < 0;
    i32: |value| value < 0;
    i64: |value| value < 0;
    isize: |value| value < 0;
}

fractions! { f32 f64 }

macro_rules! functions {
    ($($name:ident $to:ident)*) => { $(
        #[doc = concat!("`value` as a `", stringify!($to), "`; see the module for values that do not fit.")]
        #[inline]
        #[track_caller]
        pub fn $name(value: impl Number) -> $to {
            value.$to()
        }
    )* };
}

functions! { to_u8 u8  to_u16 u16  to_u32 u32  to_u64 u64  to_usize usize  to_i32 i32  to_i64 i64 }

/// The nearest `f32`, which beyond its range is infinite.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the nearest value is meant")]
pub fn to_f32(value: f64) -> f32 {
    value as f32
}

macro_rules! low {
    ($($name:ident $to:ident $bits:literal)*) => { $(
        #[doc = concat!("The low ", stringify!($bits), " bits of a word, such as a hash.")]
        #[inline]
        #[expect(clippy::cast_possible_truncation, reason = "the low bits are meant")]
        pub fn $name(word: u64) -> $to {
            word as $to
        }
    )* };
}

low! { low_u8 u8 8  low_u16 u16 16  low_u32 u32 32 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_stays_as_it_is_and_fractions_are_cut_off() {
        assert_eq!((to_u8(255usize), to_u32(u64::from(u32::MAX)), to_i64(7u8)), (255, u32::MAX, 7));
        assert_eq!((to_u64(1.9), to_usize(-3.0), to_i32(-1.5f32), to_u8(1e9)), (1, 0, -1, 255));
        assert_eq!((to_u32(f64::NAN), to_u64(f64::INFINITY)), (0, u64::MAX));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "asserted in debug builds")]
    #[should_panic(expected = "4294967296 does not fit into u32")]
    fn an_integer_that_does_not_fit_is_a_bug() {
        to_u32(1u64 << 32);
    }

    #[test]
    #[cfg_attr(debug_assertions, ignore = "asserted in debug builds")]
    fn an_integer_that_does_not_fit_gives_the_nearest_value() {
        assert_eq!((to_u32(1u64 << 32), to_u32(-1i64), to_u8(256usize)), (u32::MAX, 0, 255));
    }
}
