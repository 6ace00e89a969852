//! The API key.

use axum::http::{HeaderMap, header};

/// A key that clients must present as `Authorization: Bearer KEY`.
#[derive(Clone)]
pub(crate) struct ApiKey(String);

impl ApiKey {
    pub(crate) fn new(key: String) -> Self {
        ApiKey(key)
    }

    /// Whether a request carries the key.
    pub(crate) fn admits(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(header::AUTHORIZATION) else { return false };
        let bytes = value.as_bytes();
        let Some((scheme, key)) = bytes.split_at_checked(7) else { return false };
        scheme.eq_ignore_ascii_case(b"Bearer ") && same(key.trim_ascii(), self.0.as_bytes())
    }
}

/// Compares in a time that depends on the lengths only.
fn same(left: &[u8], right: &[u8]) -> bool {
    let difference = left.iter().zip(right).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b)));
    left.len() == right.len() && difference == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_is_admitted() {
        let key = ApiKey::new("secret".into());
        let admits = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            key.admits(&headers)
        };
        assert!(admits("Bearer secret") && admits("bearer secret"));
        for wrong in ["secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret", ""] {
            assert!(!admits(wrong), "{wrong}");
        }
        assert!(!key.admits(&HeaderMap::new()));
    }
}
