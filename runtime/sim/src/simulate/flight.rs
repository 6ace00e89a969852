//! The state of a request in the fleet.

use super::classes::Promised;
use super::engine::{Gaps, Job};
use crate::trace::ConversationTurn;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{PageParts, Urgency};
use mixfleet_scheduler::fleet::{Instance, Objective};
use mixfleet_scheduler::kv::BlockHash;
use std::ops::Range;
use std::sync::Arc;

/// A request in the fleet.
pub(super) struct Flight {
    pub(super) class: u32,
    pub(super) promised: Promised,
    pub(super) objective: Objective,
    pub(super) session: Option<ConversationTurn>,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) chain: Arc<[BlockHash]>,
    pub(super) prefill: u32,
    pub(super) decode: u32,
    /// Number of places that it has lost.
    pub(super) attempt: u32,
    /// The holder of its pulled prefix, and the end of the prefix.
    pub(super) pull: Option<(u32, u32)>,
    /// Number of tokens of it that the prefill instance holds.
    pub(super) pull_held_tokens: u32,
    pub(super) arrived_s: f64,
    /// Number of prompt tokens that its decode instance holds.
    pub(super) held_tokens: u32,
    /// Its urgency from the scheduler.
    pub(super) urgency: Urgency,
    /// Its head start on the place that its objective gives it.
    pub(super) head_start: Seconds,
    /// Number of prompt tokens that were not computed.
    pub(super) known_tokens: u32,
    /// Start of its prefill, from when on its layers are sent.
    pub(super) prefill_began_s: f64,
    pub(super) first_token_s: f64,
    pub(super) last_token_s: f64,
    /// Tokens that it had when it lost its last place, and the gaps between them.
    pub(super) drawn: u32,
    pub(super) gaps: Vec<Gaps>,
}

impl Flight {
    pub(super) fn job(&self, request: u64) -> Job {
        Job {
            request,
            prompt_tokens: self.prompt_tokens + self.drawn,
            output_tokens: self.output_tokens - self.drawn,
            chain: self.chain.clone(),
            urgency: self.urgency,
        }
    }
}

/// The receiver of a prompt's KV.
#[derive(Clone, Debug)]
pub(super) struct HandOffTarget {
    prompt_tokens: u32,
    /// The first token that it lacks.
    lacks_from: u32,
    /// Its pages, in blocks of so many tokens.
    parts: PageParts,
    block_tokens: u32,
}

impl HandOffTarget {
    pub(super) fn new(flight: &Flight, decoder: &Instance) -> Self {
        HandOffTarget {
            prompt_tokens: flight.prompt_tokens + flight.drawn,
            lacks_from: flight.held_tokens,
            parts: decoder.kv_parts.clone(),
            block_tokens: decoder.kv_block_tokens,
        }
    }

    /// What is sent of the `computed` tokens: as many tokens of all layers.
    pub(super) fn tokens_sent(&self, computed: &Range<u32>) -> f64 {
        let computed = u64::from(computed.start.max(self.lacks_from))..u64::from(computed.end);
        self.parts.tokens_sent(&computed, self.prompt_tokens.into(), self.block_tokens)
    }
}
