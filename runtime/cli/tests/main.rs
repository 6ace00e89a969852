//! The binary from outside.

mod api_page;
mod board;
mod checkpoints;
mod common;
mod compare;
mod connections;
#[cfg(feature = "fleet")]
mod deploy;
#[cfg(all(feature = "fleet", feature = "otlp"))]
mod docs_pages;
mod echo;
mod engines;
#[path = "../../engines/tests/fake.rs"]
mod fake;
#[cfg(target_os = "linux")]
mod first_hour;
mod fit;
#[cfg(feature = "fleet")]
mod fleet;
mod forms;
mod generate;
mod golden;
#[cfg(target_os = "linux")]
mod gpu;
mod grammars;
#[cfg(unix)]
mod habits;
#[cfg(target_os = "linux")]
mod hollow;
#[cfg(target_os = "linux")]
mod hostile_files;
mod house;
mod import;
mod kv_exchange;
#[cfg(unix)]
mod lost_log;
#[path = "../../../backends/plugin/tests/made.rs"]
mod made;
#[cfg(unix)]
mod manners;
#[cfg(feature = "fleet")]
mod members;
mod own_devices;
#[cfg(target_os = "linux")]
mod peers;
mod plan;
mod plugin;
mod profile;
#[path = "../../engines/tests/publisher.rs"]
mod publisher;
mod reports;
mod roles;
#[cfg(all(feature = "fleet", feature = "otlp"))]
mod screens;
mod serve;
mod simulate;
mod simulated;
#[cfg(target_os = "linux")]
mod terminal;
mod tiers;
mod topo;
mod trace;
#[cfg(feature = "otlp")]
mod traces;
mod validate;
mod verdicts;
