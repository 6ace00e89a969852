//! Engines over real sockets, against one that can die, stall, lie and cut.

mod answers;
mod fake;
mod kv_follow;
mod publisher;
mod recorded;
mod shared;
