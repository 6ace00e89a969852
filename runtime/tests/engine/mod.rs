//! The engine in one process, mostly in the seeded environment.

#![allow(clippy::print_stdout, reason = "the numbers of some tests")]

mod agree;
mod apart;
mod at_equal_cost;
mod beside;
mod contained;
mod copies;
mod cost_shape;
mod divided;
mod drawn;
mod eight_bits;
mod events;
mod expanded;
mod exposed;
mod kv_nodes;
mod learns;
mod leaving;
mod moved;
mod overlap;
mod parts;
mod pinned;
mod predictions;
mod pulls;
mod recorded;
mod requests;
mod roles;
mod routers;
mod simulated;
mod tiers;
mod unseen;
mod watched;
mod windows;
