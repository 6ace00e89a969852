//! The KV pool as its users see it: compared with a naive model, on disks that fail, under kill -9, and on a
//! recorded trace.

mod attached;
mod crash;
mod directory;
mod ended;
mod exchange;
mod faults;
mod hung;
mod killed;
mod model;
mod naive;
#[cfg(unix)]
mod private;
mod replay;
mod served;
mod support;
