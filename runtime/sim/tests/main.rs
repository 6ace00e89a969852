//! Integration tests of the simulator.

mod apart;
mod bottleneck;
mod capacity;
mod classes;
mod common;
mod experts;
mod extremes;
mod fleet_file;
mod generated;
mod import;
mod kv_nodes;
mod learns;
mod memory;
mod overload;
mod recorded;
mod replicate;
mod roles;
mod routers;
mod simulate;
mod spare;
mod stats;
mod tiers;
mod timeline;
mod traces;
