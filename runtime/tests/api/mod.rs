//! The HTTP interface from outside: real HTTP bytes over in-memory connections, in the seeded
//! environment, against an engine whose answers the tests script.

mod answers;
mod connections;
mod disconnects;
mod errors;
mod lifecycle;
mod limits;
mod origins;
mod prompts;
mod responses;
mod streams;
mod support;
mod tenants;
mod told;
mod vllm;
