//! What an instance's machine is told, and what it answers.

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
    /// It is a prefix that nobody has asked for yet, whose KV comes from elsewhere: what lands stays in the
    /// cache, and nothing is computed. All of its tokens are to be pulled.
    Keep,
}

/// What the worker tells the machine.
#[derive(Debug)]
pub enum Event<T> {
    /// Compute this sequence.
    Add {
        /// Its id.
        request: RequestId,
        /// When it is wanted.
        urgency: Urgency,
        /// Prompt, and what was generated before if it continues.
        text: T,
        /// Leading tokens whose KV another instance can send: what is not here of them is waited for once.
        pulls: u32,
        /// What then.
        after: After,
    },
    /// Make room for a sequence whose KV comes from elsewhere.
    Reserve {
        /// Its id.
        request: RequestId,
        /// When it is wanted.
        urgency: Urgency,
        /// Prompt, and what was generated before if it continues.
        text: T,
    },
    /// The KV of the first `tokens_valid` tokens of a sequence that waits for it is in its blocks. Missing
    /// ones are recomputed here.
    Landed {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV arrived and was verified.
        tokens_valid: u32,
        /// The other instance drew the token after the last one; the sequence's text has it.
        next: bool,
    },
    /// Another instance wants the KV of these tokens, as far as it is here. The blocks are kept until
    /// `Event::Unlend`.
    Lend {
        /// For whom: there may be a sequence of the same request here, of which this is independent.
        request: RequestId,
        /// Leading tokens of its prompt.
        text: T,
    },
    /// Lent blocks are no longer read.
    Unlend {
        /// For whom they were.
        request: RequestId,
    },
    /// What came of an `Action::Load`.
    Loaded {
        /// Its id.
        request: RequestId,
        /// Leading blocks of those asked for whose KV is in its pages now. The rest is computed.
        blocks: u32,
    },
    /// The step is done. Texts have the tokens that were drawn.
    StepDone {
        /// For each sequence whose part had `sample` set, in the step's order.
        sampled: Vec<Sampled>,
    },
    /// A handed-off sequence's blocks are no longer read.
    Release {
        /// Its id.
        request: RequestId,
    },
    /// The client left, or the request goes on elsewhere. Unknown ids are fine.
    Cancel {
        /// Its id.
        request: RequestId,
    },
    /// The device has nothing to do.
    Idle,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Whose.
    pub request: RequestId,
    /// The answer ends with it.
    pub finished: bool,
}

/// What the worker must do. What `Evicted` names can be read before anything else is done; where a sequence's
/// blocks lie, [`Instance::pages`](super::Instance::pages) says.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<B> {
    /// Run this; then `Event::StepDone`.
    Run(Step),
    /// Bring these blocks from the lower tiers, as far as they are there; then `Event::Loaded`. Nothing runs
    /// beside it: what comes takes part in the next step, and the next in the queue finds it in the cache.
    Load {
        /// For whom.
        request: RequestId,
        /// Their numbers in its text and among its pages.
        blocks: Range<u32>,
        /// Their keys.
        chain: Vec<BlockHash>,
    },
    /// An added sequence got its blocks.
    Admitted {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV was here already.
        tokens_cached: u32,
    },
    /// A sequence whose KV comes from elsewhere got its blocks: send it from `tokens_cached` on.
    Reserved {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV is here already.
        tokens_cached: u32,
    },
    /// The leading blocks that `Event::Lend` asked for and that are here.
    Lent {
        /// For whom.
        request: RequestId,
        /// Where they lie.
        pages: Vec<u32>,
    },
    /// A reservation was taken back before its KV was complete: the request starts anew.
    Revoked {
        /// Its id.
        request: RequestId,
    },
    /// What was asked for cannot be: nothing of it is here. One that has the same id goes on.
    Refused {
        /// Its id.
        request: RequestId,
        /// Why.
        reason: Refusal,
    },
    /// What came of a prefix that was to be kept is in the cache: nothing more is done of it here.
    Kept {
        /// Its id.
        request: RequestId,
    },
    /// A sequence lost its blocks and will be recomputed here. For the metrics.
    Preempted {
        /// Its id.
        request: RequestId,
    },
    /// These prefixes are in the cache now.
    Stored(Vec<BlockHash>),
    /// These are not any more.
    Evicted(Vec<Evicted<B>>),
}

/// One forward pass over several sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Those with one new token first, then those with several.
    pub sequences: Vec<StepSequence>,
}

/// A sequence's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// Whose.
    pub request: RequestId,
    /// Tokens before the new ones; their KV is in its pages.
    pub start: u32,
    /// New tokens.
    pub tokens: u32,
    /// The last new token is the sequence's last: draw the next.
    pub sample: bool,
}
