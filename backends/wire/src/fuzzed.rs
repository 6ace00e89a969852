//! Entry points for fuzzing the protocols' parsers.

use crate::answer::GrantStatus;
use crate::key::RegionKey;
use mixfleet_hal::transport::Descriptor;

/// Parses `bytes` as every message of the protocols.
///
/// # Panics
/// If a message that was parsed differs after a round trip.
pub fn words(bytes: &[u8]) {
    let answer = bytes.first().and_then(|byte| GrantStatus::decode(*byte));
    assert!(answer.is_none_or(|answer| GrantStatus::decode(answer as u8) == Some(answer)));
    if let Some(key) = std::str::from_utf8(bytes).ok().and_then(RegionKey::from_hex) {
        assert!(RegionKey::from_hex(&key.to_hex()) == Some(key));
    }
    #[cfg(unix)]
    crate::tcp::check_words(bytes);
    #[cfg(target_os = "linux")]
    crate::shm::check_words(bytes);
    #[cfg(all(feature = "verbs", target_os = "linux"))]
    crate::verbs::check_words(bytes);
}

/// Returns the first bytes that a client sends on a stream to `region`; empty if TCP does not serve it.
#[cfg(unix)]
pub fn tcp_greeting(region: &Descriptor) -> Vec<u8> {
    crate::tcp::greeting(region).unwrap_or_default()
}
