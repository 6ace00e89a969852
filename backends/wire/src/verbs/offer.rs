//! The values that two ends exchange before their queue pairs connect; any channel may carry them.
//!
//! The active end sends a [`ConnectRequest`] and the owner of the region replies with a [`ConnectReply`].
//! Both hold what grants access to the memory, so the channel must be private and authenticated.

use mixfleet_hal::transport::RemoteAccess;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv6Addr;

/// Version of these messages; ends with different versions refuse each other.
pub const VERSION: u32 = 1;

/// The kind of an address, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GidKind {
    /// RoCE v2 over IPv4, which is routable and what most fabrics use.
    RoceV2Ipv4,
    /// RoCE v2 over a global IPv6 address.
    RoceV2Ipv6,
    /// RoCE v2 over a link-local address.
    RoceV2LinkLocal,
    /// RoCE v1, within one Ethernet segment.
    RoceV1,
    /// InfiniBand.
    InfiniBand,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidKind::RoceV2Ipv4 => "RoCE v2 over IPv4",
            GidKind::RoceV2Ipv6 => "RoCE v2 over IPv6",
            GidKind::RoceV2LinkLocal => "RoCE v2 within the link",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::InfiniBand => "InfiniBand",
        })
    }
}

/// One address (GID) of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PortGid {
    /// The kind of the address.
    pub kind: GidKind,
    /// The 128 bits of the address, in IPv6 notation.
    pub address: Ipv6Addr,
}

/// What one end of a possible path supports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// InfiniBand local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Maximum packet payload in bytes: a power of two from 256 to 4096.
    pub mtu_bytes: u32,
    /// Maximum number of reads that it may have in flight at a peer, per queue pair.
    pub reads_out: u8,
    /// Maximum number of a peer's reads that it serves at a time, per queue pair.
    pub reads_in: u8,
    /// Addresses of the port.
    pub gids: Vec<PortGid>,
}

/// A queue pair that is waiting to be connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePairAddress {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// Sequence number of its first packet, 24 bits.
    pub first_packet: u32,
}

/// Queue pairs on one port of the active end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedRail {
    /// The port that they use.
    pub port: Port,
    /// The queue pairs to connect.
    pub queues: Vec<QueuePairAddress>,
}

/// The active end's connection request.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Version of the message, which must equal [`VERSION`].
    pub version: u32,
    /// The region's key, from its descriptor.
    pub key: String,
    /// The region's epoch, from its descriptor.
    pub epoch: u64,
    /// One rail per NIC, nearest first.
    pub rails: Vec<RequestedRail>,
}

/// The parameters that both ends of a rail agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// Address of the active end.
    pub active: PortGid,
    /// Address of the owner's end.
    pub owner: PortGid,
    /// Packet payload in bytes.
    pub mtu_bytes: u32,
    /// Maximum number of reads that the active end may have in flight, per queue pair.
    pub reads: u8,
}

/// The owner's end of a requested rail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptedRail {
    /// Index of the rail in the request.
    pub offered: usize,
    /// The agreed parameters.
    pub path: Path,
    /// The owner's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The owner's queue pairs, in the order of the request.
    pub queues: Vec<QueuePairAddress>,
    /// The key that grants access to the region through these queue pairs.
    pub remote_key: u32,
}

/// The owner's reply to a connection request.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectReply {
    /// Address of the region in the owner's process.
    pub address: u64,
    /// Length of the region in bytes.
    pub bytes: u64,
    /// Access that was granted.
    pub access: RemoteAccess,
    /// The accepted rails, at least one.
    pub rails: Vec<AcceptedRail>,
}

impl Path {
    /// Negotiates what an active and an owning port both support; `None` if they have no kind of address in
    /// common.
    pub fn between(active: &Port, owner: &Port) -> Option<Path> {
        let pairs = active.gids.iter().flat_map(|ours| owner.gids.iter().map(move |theirs| (ours, theirs)));
        let (ours, theirs) = pairs.filter(|(a, b)| a.kind == b.kind).min_by_key(|(a, _)| a.kind)?;
        Some(Path {
            active: *ours,
            owner: *theirs,
            mtu_bytes: active.mtu_bytes.min(owner.mtu_bytes),
            reads: active.reads_out.min(owner.reads_in),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [GidKind; 5] = [
        GidKind::RoceV2Ipv4,
        GidKind::RoceV2Ipv6,
        GidKind::RoceV2LinkLocal,
        GidKind::RoceV1,
        GidKind::InfiniBand,
    ];

    fn ports() -> impl Strategy<Value = Port> {
        let gid = (0..KINDS.len(), any::<u128>())
            .prop_map(|(kind, bits)| PortGid { kind: KINDS[kind], address: Ipv6Addr::from(bits) });
        let gids = proptest::collection::vec(gid, 0..4);
        (any::<u16>(), 0..5u32, any::<u8>(), any::<u8>(), gids).prop_map(
            |(lid, mtu, reads_out, reads_in, gids)| Port {
                lid,
                mtu_bytes: 256 << mtu,
                reads_out,
                reads_in,
                gids,
            },
        )
    }

    proptest! {
        #[test]
        fn a_path_is_what_both_ends_can_do(active in ports(), owner in ports()) {
            let kinds = |port: &Port| port.gids.iter().map(|gid| gid.kind).collect::<Vec<_>>();
            let (ours, theirs) = (kinds(&active), kinds(&owner));
            let best = KINDS.into_iter().find(|kind| ours.contains(kind) && theirs.contains(kind));
            let path = Path::between(&active, &owner);
            prop_assert_eq!(path.map(|path| path.active.kind), best);
            if let Some(path) = path {
                prop_assert!(active.gids.contains(&path.active) && owner.gids.contains(&path.owner));
                prop_assert_eq!(path.active.kind, path.owner.kind);
                prop_assert!(path.mtu_bytes == active.mtu_bytes.min(owner.mtu_bytes));
                prop_assert!(path.reads <= active.reads_out && path.reads <= owner.reads_in);
            }
        }

        #[test]
        fn an_offer_survives_its_text(port in ports(), epoch: u64, number in 0..1u32 << 24) {
            let queues = vec![QueuePairAddress { number, first_packet: number }];
            let rails = vec![RequestedRail { port, queues }];
            let offer = ConnectRequest { version: VERSION, key: "00ff".into(), epoch, rails };
            let text = serde_json::to_string(&offer).unwrap();
            prop_assert!(!text.contains('\n') && serde_json::from_str::<ConnectRequest>(&text).unwrap() == offer);
        }
    }
}
