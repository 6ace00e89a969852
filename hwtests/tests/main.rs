//! The bench from outside: oracle, profiler, validation and links.

mod law;
mod links;
mod oracle;
mod profile;
mod reference;
mod schema;
mod validate;
