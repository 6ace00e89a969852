//! Traces: who asked for how many tokens, when, and which prefixes they shared.
//!
//! [`Trace::open`] reads any supported file as a stream of [`Request`]s in order of time; [`Requests`]
//! changes a stream on its way; [`stats`] says what is in it; [`generate`] makes one up. Formats, repairs
//! and the accounting of hits: docs/traces.md.

mod agentic;
mod chain;
mod error;
mod format;
pub mod generate;
mod lines;
mod mooncake;
mod read;
mod request_log;
pub mod stats;
mod table;
mod time;
mod transform;

pub use error::TraceError;
pub use format::Format;
pub use lines::Progress;
pub use mooncake::key_of;
pub use read::{ReadOptions, Repairs, Trace};
pub use transform::Requests;

use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use std::sync::Arc;

/// Longest prompt or answer that is believed, in tokens; more is a mistake in the file, and would let one
/// line ask for any amount of memory.
pub const TOKENS_MAX: u32 = 1 << 24;

/// The last time of a trace, and of a simulation, in seconds: 317 years. Later ones are a mistake, and f64
/// tells them apart by microseconds no more.
pub const TIME_S_MAX: f64 = 1e10;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its place in the trace, from 0, in order of arrival.
    pub id: u64,
    /// When it arrives, from the trace's start on.
    pub at: Seconds,
    /// 1 to [`TOKENS_MAX`].
    pub prompt_tokens: u32,
    /// 1 to [`TOKENS_MAX`].
    pub output_tokens: u32,
    /// Keys of the prompt's blocks, each covering all before it; at most `ceil(prompt / block)`, so that
    /// the last may be that of a partial block. Empty where the trace knows nothing of prefixes.
    pub chain: Vec<BlockHash>,
    /// The conversation that it belongs to, where the trace tells.
    pub session: Option<Session>,
    /// Client, model or other label, where the trace has one.
    pub class: Option<Arc<str>>,
}

/// A request's place in a conversation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Session {
    /// Equal for all requests of the conversation.
    pub id: u64,
    /// The request whose answer must end first; it comes earlier in the trace. None for the first.
    pub after: Option<u64>,
    /// From the end of that answer to this request: the user's thinking, or a tool's run. For the first,
    /// nothing.
    pub think: Seconds,
    /// Requests of the conversation that come later in the trace, where that is known.
    pub left: Option<u32>,
}

impl Request {
    /// Prompt tokens that `blocks` hit blocks from the start save. A block hit counts whole, the last one
    /// of a prompt only as far as the prompt goes.
    pub fn reused_tokens(&self, blocks: usize, block_tokens: u32) -> u32 {
        (blocks as u64 * u64::from(block_tokens)).min(u64::from(self.prompt_tokens)) as u32
    }

    /// The same request with its chain in blocks of `to` tokens instead of `from`.
    ///
    /// Coarser blocks fold keys, finer ones derive several from one, and other ratios do both over the
    /// greatest common divisor. Prefixes that two requests share stay shared as far as whole blocks
    /// tell: refining cannot find a shared part of a block that the trace did not tell apart.
    ///
    /// # Panics
    /// When a block is empty.
    pub fn rechain(mut self, from: u32, to: u32) -> Self {
        self.chain = chain::rechain(&self.chain, self.prompt_tokens, from, to);
        self
    }
}
