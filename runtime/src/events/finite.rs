//! Finds numbers that JSON cannot hold: serde_json writes them as null, and an optional one would read back
//! as absent.

use serde::ser::{self, Serialize, Serializer};
use std::fmt::Display;

/// Why a value cannot be logged.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub(super) struct NotFinite(String);

impl ser::Error for NotFinite {
    fn custom<T: Display>(message: T) -> Self {
        NotFinite(message.to_string())
    }
}

/// # Errors
/// When a float in `value` is infinite or no number.
pub(super) fn check<T: Serialize + ?Sized>(value: &T) -> Result<(), NotFinite> {
    value.serialize(Check)
}

/// Writes nothing and looks at every float.
struct Check;

/// Methods that are given no float.
macro_rules! fine {
    ($($method:ident($($value:ty),*);)*) => {
        $(fn $method(self $(, _: $value)*) -> Result<(), NotFinite> { Ok(()) })*
    };
}

/// Methods that are given one value, behind its names.
macro_rules! wrapped {
    ($($method:ident($($name:ty),*);)*) => {
        $(fn $method<T: Serialize + ?Sized>(self $(, _: $name)*, value: &T) -> Result<(), NotFinite> {
            check(value)
        })*
    };
}

/// Methods that begin a value of several parts.
macro_rules! begun {
    ($($method:ident($($name:ty),*);)*) => {
        $(fn $method(self $(, _: $name)*) -> Result<Check, NotFinite> { Ok(self) })*
    };
}

/// Values of several fields; each is passed to one of the methods, after its name.
macro_rules! parts {
    ($($part:ident: $($method:ident($($name:ty)?)),*;)*) => {
        $(impl ser::$part for Check {
            type Ok = ();
            type Error = NotFinite;

            $(fn $method<T: Serialize + ?Sized>(&mut self $(, _: $name)?, value: &T) -> Result<(), NotFinite> {
                check(value)
            })*

            fn end(self) -> Result<(), NotFinite> {
                Ok(())
            }
        })*
    };
}

impl Serializer for Check {
    type Ok = ();
    type Error = NotFinite;
    type SerializeSeq = Check;
    type SerializeTuple = Check;
    type SerializeTupleStruct = Check;
    type SerializeTupleVariant = Check;
    type SerializeMap = Check;
    type SerializeStruct = Check;
    type SerializeStructVariant = Check;

    fine! {
        serialize_bool(bool);
        serialize_i8(i8);
        serialize_i16(i16);
        serialize_i32(i32);
        serialize_i64(i64);
        serialize_u8(u8);
        serialize_u16(u16);
        serialize_u32(u32);
        serialize_u64(u64);
        serialize_char(char);
        serialize_str(&str);
        serialize_bytes(&[u8]);
        serialize_none();
        serialize_unit();
        serialize_unit_struct(&'static str);
        serialize_unit_variant(&'static str, u32, &'static str);
    }

    wrapped! {
        serialize_some();
        serialize_newtype_struct(&'static str);
        serialize_newtype_variant(&'static str, u32, &'static str);
    }

    begun! {
        serialize_seq(Option<usize>);
        serialize_tuple(usize);
        serialize_tuple_struct(&'static str, usize);
        serialize_tuple_variant(&'static str, u32, &'static str, usize);
        serialize_map(Option<usize>);
        serialize_struct(&'static str, usize);
        serialize_struct_variant(&'static str, u32, &'static str, usize);
    }

    fn serialize_f32(self, value: f32) -> Result<(), NotFinite> {
        self.serialize_f64(f64::from(value))
    }

    fn serialize_f64(self, value: f64) -> Result<(), NotFinite> {
        if value.is_finite() { Ok(()) } else { Err(NotFinite(format!("a value is {value}"))) }
    }

    fn collect_str<T: Display + ?Sized>(self, _: &T) -> Result<(), NotFinite> {
        Ok(())
    }
}

parts! {
    SerializeSeq: serialize_element();
    SerializeTuple: serialize_element();
    SerializeTupleStruct: serialize_field();
    SerializeTupleVariant: serialize_field();
    SerializeMap: serialize_key(), serialize_value();
    SerializeStruct: serialize_field(&'static str);
    SerializeStructVariant: serialize_field(&'static str);
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::Seconds;
    use mixfleet_scheduler::cost::LinkCost;
    use mixfleet_scheduler::fleet::{Event, FleetConfig, InstanceId, Link};

    #[test]
    fn infinity_is_found_however_deep_and_optional() {
        let config = FleetConfig { ttft_slo: Some(Seconds(f64::INFINITY)), ..FleetConfig::new(1, 1) };
        assert_eq!(check(&config), Err(NotFinite("a value is inf".into())));
        let cost = LinkCost { latency: Seconds(f64::NAN), ..LinkCost::default() };
        let link = Link { from: InstanceId(0), to: InstanceId(1), cost };
        assert_eq!(check(&vec![Some(Event::LinkUp(link))]), Err(NotFinite("a value is NaN".into())));
        assert_eq!(check(&FleetConfig::new(1, 1)), Ok(()));
    }
}
