//! Many processes as one fleet: routers that decide, and worker processes with the devices.
//!
//! ```text
//!   clients -> router A --session--> hub of worker process X -> its instances
//!   clients -> router B --session-/         | peer session (KV's control messages; KV itself by a transport)
//!                      \--session--> hub of worker process Y -> its instances
//! ```
//!
//! A [`Router`] is a coordinator whose instances are in other processes; a [`Hub`] lets several routers use
//! the instances of one process. They communicate by [`Session`]s over any connection: this module knows no
//! network, and runs in the seeded environment. Membership comes from outside too: [`registry`] reads it from
//! a store, which with the feature `fleet` is etcd; then `rpc` carries sessions between hosts.
//!
//! What a session that ends means is the whole of the failure semantics here: at a router its instances
//! are lost and their requests go on elsewhere; at a hub the router's requests are dropped, or the way to
//! the peer is closed and fenced. A session that begins anew begins from nothing: the hub tells all that
//! its instances hold.

mod calls;
#[cfg(test)]
mod hostile_tests;
mod hub;
#[cfg(feature = "fleet")]
mod join;
mod ledger;
pub mod registry;
mod rights;
mod router;
#[cfg(feature = "fleet")]
pub mod rpc;
mod seats;
mod session;

pub use crate::request::RouterId;
pub use calls::{Dial, call_members};
pub use hub::{Hub, WorkerProcess};
#[cfg(feature = "fleet")]
pub use join::{connect_peers, connect_workers};
pub use router::Router;
pub use session::{
    Caller, Command, Hello, InstanceReport, ModelIdentity, PROTOCOL, PeerMessage, Session, SessionRefusal,
};
