//! The bench from outside: oracle, profiler, validation and links.

mod folder;
mod law;
mod links;
mod oracle;
mod profile;
mod reference;
mod reports;
mod schema;
mod validate;
