//! The state of a request in the fleet.

use super::classes::Promised;
use super::engine::{Gaps, Job};
use crate::trace::ConversationTurn;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{PageParts, Urgency};
use mixfleet_scheduler::fleet::{Instance, Objective};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::transfer::Reporter;
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
    /// Gaps between the tokens that it had when it lost its last place.
    pub(super) gaps: Vec<Gaps>,
}

impl Flight {
    /// What an instance gets once there are `drawn` tokens of the answer.
    pub(super) fn job(&self, to: Reporter, drawn: u32) -> Job {
        Job {
            request: to.request,
            attempt: to.attempt,
            prompt_tokens: self.prompt_tokens + drawn,
            output_tokens: self.output_tokens - drawn,
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
    /// Pages of the transfer, in blocks of this many tokens.
    parts: PageParts,
    block_tokens: u32,
}

impl HandOffTarget {
    /// The receiver of a prompt of this many tokens; it holds those before `lacks_from`.
    pub(super) fn new(prompt_tokens: u32, lacks_from: u32, decoder: &Instance) -> Self {
        HandOffTarget {
            prompt_tokens,
            lacks_from,
            parts: decoder.kv_parts.clone(),
            block_tokens: decoder.kv_block_tokens,
        }
    }

    /// Number of the `computed` tokens that are sent: as many tokens of all layers.
    pub(super) fn tokens_sent(&self, computed: &Range<u32>) -> f64 {
        let computed = u64::from(computed.start.max(self.lacks_from))..u64::from(computed.end);
        self.parts.tokens_sent(&computed, self.prompt_tokens.into(), self.block_tokens)
    }
}
