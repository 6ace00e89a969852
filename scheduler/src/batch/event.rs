//! Events and actions of the instance machine.

use super::{Evicted, Refusal, RequestId, Urgency};
use crate::kv::BlockHash;
use std::ops::Range;

/// What happens to a sequence once its prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It decodes here.
    Decode,
    /// Its KV goes to another instance; the blocks are kept until `Event::Release`.
    HandOff,
    /// It is a prefix copied ahead of demand, whose KV comes from elsewhere: what lands stays in the cache,
    /// and nothing is computed. All of its tokens are pulled.
    Keep,
}

/// An input of the instance machine, from the worker.
#[derive(Debug)]
pub enum Event<T> {
    /// Compute this sequence.
    Add {
        /// The request's id.
        request: RequestId,
        /// When it is wanted.
        urgency: Urgency,
        /// The prompt, and tokens generated earlier if it continues.
        text: T,
        /// Number of leading tokens whose KV another instance can send: tokens missing here are waited for
        /// once.
        pulls: u32,
        /// What happens after the prompt.
        after: After,
    },
    /// Make room for a sequence whose KV comes from elsewhere.
    Reserve {
        /// The request's id.
        request: RequestId,
        /// When it is wanted.
        urgency: Urgency,
        /// The prompt, and tokens generated earlier if it continues.
        text: T,
    },
    /// The KV of the first `tokens_valid` tokens of a waiting sequence is in its blocks. Missing tokens are
    /// recomputed here.
    Landed {
        /// The request's id.
        request: RequestId,
        /// Number of leading tokens whose KV arrived and was verified.
        tokens_valid: u32,
        /// Whether the other instance drew the token after the last one, which the sequence's text contains.
        next: bool,
    },
    /// Another instance pulls the KV of these tokens, as far as it is here. The blocks are kept until
    /// `Event::Unlend`.
    Lend {
        /// The request that the KV is for: this instance may have its own sequence of that request,
        /// independent of the reservation.
        request: RequestId,
        /// Leading tokens of its prompt.
        text: T,
    },
    /// The blocks of a `Lend` are no longer read.
    Unlend {
        /// The request's id.
        request: RequestId,
    },
    /// The result of an `Action::Load`.
    Loaded {
        /// The request's id.
        request: RequestId,
        /// Number of leading requested blocks whose KV is in the pages now. The rest is computed.
        blocks: u32,
    },
    /// The step is done. Texts contain the drawn tokens.
    StepDone {
        /// One entry for each sequence with `sample` set, in the step's order.
        sampled: Vec<Sampled>,
    },
    /// A handed-off sequence's blocks are no longer read.
    Release {
        /// The request's id.
        request: RequestId,
    },
    /// The client left, or the request continues elsewhere. Unknown ids are ignored.
    Cancel {
        /// The request's id.
        request: RequestId,
    },
    /// The device has nothing to do.
    Idle,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The request's id.
    pub request: RequestId,
    /// Whether the answer ends with this token.
    pub finished: bool,
}

/// An output of the instance machine. Blocks named by `Evicted` can be read before anything else is done, and
/// those in pages of a sequence that loads until something is loaded there;
/// [`Instance::pages`](super::Instance::pages) gives a sequence's pages.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<B> {
    /// Run this step; then `Event::StepDone`.
    Run(Step),
    /// Load these blocks from the lower tiers, as many as are there; then `Event::Loaded`. Steps of other
    /// sequences may run during the load; a queued sequence whose next block is among these waits for it.
    Load {
        /// The request's id.
        request: RequestId,
        /// Indices of the blocks in its text and its pages.
        blocks: Range<u32>,
        /// The keys of the blocks.
        chain: Vec<BlockHash>,
    },
    /// An added sequence got its blocks.
    Admitted {
        /// The request's id.
        request: RequestId,
        /// Number of leading tokens whose KV was here already.
        tokens_cached: u32,
    },
    /// A sequence whose KV comes from elsewhere got its blocks: its KV is needed from `tokens_cached` on.
    Reserved {
        /// The request's id.
        request: RequestId,
        /// Number of leading tokens whose KV is here already.
        tokens_cached: u32,
    },
    /// The leading blocks requested by `Event::Lend` that are here.
    Lent {
        /// The request's id.
        request: RequestId,
        /// The pages of the blocks.
        pages: Vec<u32>,
    },
    /// A reservation was revoked before its KV was complete: the request starts again.
    Revoked {
        /// The request's id.
        request: RequestId,
    },
    /// The request cannot be carried out, and no state of it is kept. An earlier request with the same id
    /// continues.
    Refused {
        /// The request's id.
        request: RequestId,
        /// The reason.
        reason: Refusal,
    },
    /// The prefix that was to be kept is in the cache as far as it arrived: nothing more is done for it here.
    Kept {
        /// The request's id.
        request: RequestId,
    },
    /// A sequence lost its blocks and will be recomputed here. Reported for the metrics.
    Preempted {
        /// The request's id.
        request: RequestId,
    },
    /// These prefixes are in the cache now.
    Stored(Vec<BlockHash>),
    /// These blocks are no longer in the cache.
    Evicted(Vec<Evicted<B>>),
}

/// One forward pass over several sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Sequences with one new token first, then those with several. Rows of a sequence whose tokens are
    /// known are several parts with one token, in order.
    pub sequences: Vec<StepSequence>,
}

/// A sequence's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// The request's id.
    pub request: RequestId,
    /// Number of tokens before the new ones, whose KV is in its pages.
    pub start: u32,
    /// Number of new tokens.
    pub tokens: u32,
    /// Whether the last new token is the sequence's last, so that the next one is drawn.
    pub sample: bool,
}
