//! Numbers that can be part of keys.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

/// An `f32` that can be part of a key; two are equal if their bits are. Only a finite one can be read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Scalar(#[serde(deserialize_with = "finite")] pub f32);

fn finite<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    let value = f32::deserialize(from)?;
    let wrong = || D::Error::custom(format!("{value} is no finite number of 32 bits"));
    value.is_finite().then_some(value).ok_or_else(wrong)
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Scalar {}
impl std::hash::Hash for Scalar {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_finite_numbers_are_read() {
        assert_eq!(serde_json::from_str::<Scalar>("1e-5").unwrap(), Scalar(1e-5));
        let error = serde_json::from_value::<Scalar>(serde_json::json!(1e256)).unwrap_err().to_string();
        assert!(error.contains("no finite number of 32 bits"), "{error}");
    }
}
