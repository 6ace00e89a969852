//! What names an instance and a request, in either machine and in what they know of KV.

use serde::{Deserialize, Serialize};

/// Identifies a request; smaller is older.
pub type RequestId = u64;

/// Identifies an instance; the smaller id wins a tie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstanceId(pub u32);

impl std::fmt::Display for InstanceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Identifies a party; instances are shared equally among parties: a tenant, or a client's address where keys
/// do not distinguish clients. The number is a hash of its name, the same in every process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PartyId(pub u64);

impl PartyId {
    /// An unknown party: work without a party has no share, and takes nothing from one.
    pub const NONE: PartyId = PartyId(0);
}
