//! Parsers of the messages between processes of a fleet, and of the records that they write.

use super::refused;
use mixfleet_runtime::events::Replay;
use mixfleet_runtime::fleet::registry::{Charter, Member};
use mixfleet_runtime::fleet::{Command, Hello, InstanceReport, SessionRefusal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Checks that an accepted message is accepted again, unchanged, after it is written: compared by bytes,
/// since some messages contain NaN.
fn check_message<T: Serialize + DeserializeOwned>(bytes: &[u8]) -> bool {
    let message: T = match rmp_serde::from_read(bytes) {
        Ok(message) => message,
        Err(error) => return refused(&error),
    };
    let written = rmp_serde::to_vec_named(&message).expect("a parsed message can be written");
    let again: T = rmp_serde::from_slice(&written).expect("a written message can be read");
    assert_eq!(rmp_serde::to_vec_named(&again).expect("as before"), written);
    true
}

/// Parses a message of any kind that is sent over gRPC.
pub(super) fn rpc_message(bytes: &[u8]) -> bool {
    let taken = [
        check_message::<Command>,
        check_message::<InstanceReport>,
        check_message::<Hello>,
        check_message::<SessionRefusal>,
    ];
    taken.map(|check| check(bytes)).contains(&true)
}

/// Parses a record of a member, or a fleet's charter.
pub(super) fn registry_record(bytes: &[u8]) -> bool {
    fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) -> Option<T> {
        let record: T = serde_json::from_slice(bytes).map_err(|error| refused(&error)).ok()?;
        let text = serde_json::to_vec(&record).expect("a parsed record can be written");
        let again: T = serde_json::from_slice(&text).expect("a written record can be read");
        assert_eq!(serde_json::to_vec(&again).expect("as before"), text);
        Some(record)
    }
    let charter = check::<Charter>(bytes);
    let member = check::<Member>(bytes);
    if let Some(member) = &member {
        assert!(!member.name().is_empty());
        let _ = (member.first_instance(), member.instances().count());
    }
    charter.is_some() || member.is_some()
}

/// Parses a log of a fleet machine's events, which is replayed or refused with the line number.
pub(super) fn event_log(bytes: &[u8]) -> bool {
    Replay::of(bytes, Some(1)).map_or_else(|error| refused(&error), |_| true)
}
