//! The secret that grants access to a region.

use mixfleet_hal::{Error, ErrorKind, Result};

/// Length of a key in bytes.
pub(crate) const KEY_BYTES: usize = 16;

/// A key of 128 random bits, without `Debug` so that it cannot get into logs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RegionKey(pub(crate) [u8; KEY_BYTES]);

impl RegionKey {
    /// Draws an unguessable key.
    ///
    /// # Errors
    /// `Other` if the operating system has no randomness.
    pub(crate) fn random() -> Result<Self> {
        let mut bytes = [0; KEY_BYTES];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::new(ErrorKind::Other, format!("no random bytes for a key: {error}")))?;
        Ok(RegionKey(bytes))
    }

    /// Formats the key as 32 hexadecimal digits.
    pub(crate) fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses the output of [`to_hex`](Self::to_hex).
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 2 * KEY_BYTES || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        Some(RegionKey(u128::from_str_radix(text, 16).ok()?.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hex_and_back(bytes: [u8; KEY_BYTES]) {
            prop_assert!(RegionKey::from_hex(&RegionKey(bytes).to_hex()) == Some(RegionKey(bytes)));
        }

        #[test]
        fn other_text_is_no_key(text in "[+0-9a-g]{0,31}|[+g-z]{32}|[0-9a-f]{33,40}") {
            prop_assert!(RegionKey::from_hex(&text).is_none());
        }
    }
}
