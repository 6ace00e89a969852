//! External engines as instances of a fleet: vLLM, llama.cpp and other mixfleet processes, over HTTP/1.
//!
//! [`HttpEngine`] is an [`OutsideEngine`](mixfleet_hal::outside::OutsideEngine). A client's body goes to the
//! engine unchanged, except for the few fields that must differ there (`body`, `continued`). The response is
//! checked to be an answer, cut into events (`sse`), and passed on; only the envelope of an event is read
//! (`chunk`). `canary` requests the log-probabilities of a request's first tokens. `hand_off` writes and
//! reads the fields by which two engines share a request. The content of an engine's cache is followed by its
//! KV events (`kv_follow`), over a connection of our own (`zmtp`), and `prompt` has the engine tokenise a
//! request. `passing` reads answers that another process carries. Engines behind one name have seats
//! (`replicas`). [`EngineKind`] has the differences between the kinds.
//!
//! Absent: placement, retries, knowledge of clients, clocks other than limits on waiting for an engine.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod ask;
mod body;
mod bound;
mod canary;
mod chunk;
mod continued;
mod hand_off;
mod http;
mod kind;
pub mod kv_events;
mod kv_follow;
mod kv_source;
mod metrics;
mod object;
mod passing;
mod probe;
mod prompt;
mod replicas;
mod sse;
#[cfg_attr(not(feature = "tls"), path = "tls_absent.rs")]
mod tls;
mod zmtp;

pub use http::{EngineAddress, HttpEngine};
pub use kind::EngineKind;
pub use kv_source::{KvEventsAt, KvSource};
pub use passing::AnswerReader;
pub use replicas::{NameLookup, system_lookup};
