//! Traces of requests: arrival times, lengths, and shared prefixes.
//!
//! [`Trace::open`] reads any supported file as a stream of [`Request`]s in order of time; [`Requests`]
//! transforms a stream; [`stats`] summarises it; [`generate`] creates one. Formats, repairs and the
//! accounting of hits are documented in docs/reference/traces.md.

mod agentic;
mod chain;
mod closed_loop;
mod error;
mod format;
pub mod generate;
mod lines;
mod mooncake;
mod read;
mod recorded;
mod request_log;
pub mod stats;
mod steady;
mod table;
mod time;
mod transform;

pub use closed_loop::ClosedLoop;
pub use error::TraceError;
pub use format::Format;
pub use lines::Progress;
pub use mooncake::key_of;
pub use read::{ReadOptions, Repairs, Trace};
pub use recorded::{RecordedRequest, RecordedRun};
pub use steady::SteadyLoad;
pub use transform::Requests;

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use std::sync::Arc;

/// Maximum plausible length of a prompt or answer in tokens; more is a mistake in the file, and would let one
/// line require any amount of memory.
pub const TOKENS_MAX: u32 = 1 << 24;

/// Maximum time of a trace, and of a simulation, in seconds: 317 years. Later times are a mistake, and f64 no
/// longer resolves microseconds there.
pub const TIME_S_MAX: f64 = 1e10;
/// Times from this on are dates: seconds since 1970, from 2001 on. They count from the first request.
const UNIX_S_MIN: f64 = 1e9;
/// Dates beyond it, of the year 5138, are in another unit.
const DATE_S_MAX: f64 = 1e11;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The request's index in the trace, from 0, in order of arrival.
    pub id: u64,
    /// Arrival time from the trace's start.
    pub at: Seconds,
    /// Prompt length, 1 to [`TOKENS_MAX`].
    pub prompt_tokens: u32,
    /// Answer length, 1 to [`TOKENS_MAX`].
    pub output_tokens: u32,
    /// Keys of the prompt's blocks, each covering all blocks before it; at most `ceil(prompt / block)`, so
    /// that the last may be that of a partial block. Empty if the trace has no information about prefixes.
    pub chain: Vec<BlockHash>,
    /// The conversation that it belongs to, if known.
    pub session: Option<ConversationTurn>,
    /// Client, model or other label, if the trace has one.
    pub class: Option<Arc<str>>,
}

/// A request's place in a conversation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConversationTurn {
    /// Id of the conversation, equal for all its requests.
    pub id: u64,
    /// The request whose answer must end first; it comes earlier in the trace. None for the first.
    pub after: Option<u64>,
    /// Time from the end of that answer to this request: the user's thinking, or a tool's run. Zero for the
    /// first.
    pub think: Seconds,
    /// Number of requests of the conversation that come later in the trace, if known.
    pub left: Option<u32>,
}

impl Request {
    /// Prompt tokens saved by a hit of the first `blocks` blocks. A block hit counts whole, except the last
    /// one of a prompt, which counts up to the prompt's end.
    pub fn reused_tokens(&self, blocks: usize, block_tokens: u32) -> u32 {
        to_u32((blocks as u64 * u64::from(block_tokens)).min(u64::from(self.prompt_tokens)))
    }

    /// The same request with its chain in blocks of `to` tokens instead of `from`.
    ///
    /// Coarser blocks combine keys, finer ones derive several from one, and other ratios do both over the
    /// greatest common divisor. Prefixes that two requests share stay shared as far as whole blocks show:
    /// refining cannot find a shared part of a block that the trace did not distinguish.
    ///
    /// # Panics
    /// When a block size is zero.
    pub fn rechain(mut self, from: u32, to: u32) -> Self {
        self.chain = chain::rechain(&self.chain, self.prompt_tokens, from, to);
        self
    }
}
