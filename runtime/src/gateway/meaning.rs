//! Digest of a body's content, so that a request that was sent again is recognised.

use mixfleet_hal::outside::EngineEndpoint;
use mixfleet_scheduler::quarantine::RequestDigest;
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt;

/// Fields that do not change the computation: the user, the priority, and the form of the answer. A seed is
/// among them, since clients draw another one for each retry.
const WITHOUT_MEANING: [&str; 19] = [
    "cache_salt",
    "deadline",
    "deadline_s",
    "metadata",
    "model",
    "nvext",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "requests_left",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "timeout",
    "user",
];

/// The digest of a body for `endpoint`. The order of fields, white space, escapes and fields of no meaning do
/// not count. A body that is no JSON counts byte by byte.
pub(super) fn of_body(endpoint: EngineEndpoint, body: &[u8]) -> RequestDigest {
    let mut hasher = Sha256::new();
    hasher.update(endpoint.path());
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let mut whole = Sha256::new();
    let seed = HashedValue { hasher: &mut whole, ignored: &WITHOUT_MEANING };
    match seed.deserialize(&mut deserializer) {
        Ok(()) => hasher.update(whole.finalize()),
        Err(_) => hasher.update(body),
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let (half, _) = digest.split_at(16);
    RequestDigest(u128::from_be_bytes(half.try_into().expect("16 bytes of 32")))
}

/// Feeds a JSON value to a hasher, piece by piece, so that large bodies are not built in memory.
struct HashedValue<'h> {
    hasher: &'h mut Sha256,
    /// Fields of this object that do not count.
    ignored: &'static [&'static str],
}

impl<'de> DeserializeSeed<'de> for HashedValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl HashedValue<'_> {
    fn feed(self, kind: u8, bytes: &[u8]) {
        self.hasher.update([kind]);
        self.hasher.update((bytes.len() as u64).to_le_bytes());
        self.hasher.update(bytes);
    }
}

impl<'de> Visitor<'de> for HashedValue<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.feed(b'n', b"");
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.feed(b'b', &[u8::from(value)]);
        Ok(())
    }

    // 5, 5.0 and 5e0 are one number to most engines
    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.feed(b'0', &(value as f64).to_le_bytes());
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.feed(b'0', &(value as f64).to_le_bytes());
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.feed(b'0', &value.to_le_bytes());
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        self.feed(b's', value.as_bytes());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        self.hasher.update(b"[");
        while elements.next_element_seed(HashedValue { hasher: self.hasher, ignored: &[] })?.is_some() {}
        self.hasher.update(b"]");
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        // sorted, and of two fields with one name the last one, as in what engines are sent
        let mut fields: BTreeMap<String, [u8; 32]> = BTreeMap::new();
        while let Some(name) = entries.next_key::<String>()? {
            let mut hasher = Sha256::new();
            entries.next_value_seed(HashedValue { hasher: &mut hasher, ignored: &[] })?;
            if self.ignored.iter().any(|ignored| *ignored == name) {
                continue;
            }
            fields.insert(name, hasher.finalize().into());
            if fields.len() > FIELDS_MAX {
                return Err(A::Error::custom("too many fields"));
            }
        }
        let null = null_digest();
        self.hasher.update(b"{");
        for (name, digest) in fields.iter().filter(|(_, digest)| **digest != null) {
            self.hasher.update((name.len() as u64).to_le_bytes());
            self.hasher.update(name);
            self.hasher.update(digest);
        }
        self.hasher.update(b"}");
        Ok(())
    }
}

/// Maximum number of fields of an object that are sorted; of one with more, all bytes count.
const FIELDS_MAX: usize = 65_536;

/// Digest of null, which is the same as no field.
fn null_digest() -> [u8; 32] {
    let mut hasher = Sha256::new();
    HashedValue { hasher: &mut hasher, ignored: &[] }.feed(b'n', b"");
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(body: &str) -> RequestDigest {
        of_body(EngineEndpoint::Chat, body.as_bytes())
    }

    #[test]
    fn a_request_sent_again_in_another_spelling_has_the_same_digest() {
        let one = digest(r#"{"model":"m","prompt":"caf\u00e9","max_tokens":5,"tools":[{"a":1,"b":[2]}]}"#);
        for same in [
            r#"{ "max_tokens" : 5.0 , "prompt":"café", "model":"m","tools":[{"b":[2],"a":1}] }"#,
            r#"{"prompt":"caf\u00e9","max_tokens":5,"tools":[{"a":1,"b":[2]}],"user":"u","seed":7,"stop":null}"#,
            r#"{"prompt":"x","prompt":"café","max_\u0074okens":5,"tools":[{"a":1,"b":[2]}],"stream":true}"#,
        ] {
            assert_eq!(digest(same), one, "{same}");
        }
        for other in [
            r#"{"prompt":"café","max_tokens":6,"tools":[{"a":1,"b":[2]}]}"#,
            r#"{"prompt":"cafe","max_tokens":5,"tools":[{"a":1,"b":[2]}]}"#,
            r#"{"prompt":"café","max_tokens":5,"tools":[{"a":1,"b":[[2]]}]}"#,
            r#"{"prompt":"café","max_tokens":5,"tools":[{"a":1,"b":2}]}"#,
            r#"{"prompt":"café","max_tokens":5,"tools":[{"a":"1","b":[2]}]}"#,
            "x",
        ] {
            assert_ne!(digest(other), one, "{other}");
        }
        assert_ne!(of_body(EngineEndpoint::Completions, b"{}"), of_body(EngineEndpoint::Chat, b"{}"));
    }

    #[test]
    fn what_is_no_json_or_too_deep_counts_by_its_bytes() {
        let deep = "[".repeat(100_000);
        assert_ne!(digest(&deep), digest(&deep[1..]));
        assert_eq!(digest(&deep), digest(&deep));
    }
}
