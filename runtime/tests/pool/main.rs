//! The KV pool from outside: against a naive model, on disks that fail, under kill -9, and on a recorded trace.

mod attached;
mod crash;
mod directory;
mod ended;
mod faults;
mod killed;
mod model;
mod naive;
mod replay;
mod served;
mod support;
