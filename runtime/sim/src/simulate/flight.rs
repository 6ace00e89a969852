//! A request on its way through the fleet.

use super::classes::Promised;
use super::engine::{Gaps, Job};
use crate::trace::ConversationTurn;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::Urgency;
use mixfleet_scheduler::fleet::Objective;
use mixfleet_scheduler::kv::BlockHash;
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
    /// Places that it has lost.
    pub(super) attempt: u32,
    /// Where a part of its prefix shall come from, and up to which token,
    pub(super) pull: Option<(u32, u32)>,
    /// and what of that is where it is computed.
    pub(super) pull_held_tokens: u32,
    pub(super) arrived_s: f64,
    /// Tokens of the prompt that its decode instance holds.
    pub(super) held_tokens: u32,
    /// When it is wanted, as the scheduler says.
    pub(super) urgency: Urgency,
    /// It goes so much ahead of the place that its objective gives it.
    pub(super) head_start: Seconds,
    /// Tokens of the prompt that were not computed.
    pub(super) known_tokens: u32,
    /// When its prefill began; its layers leave from then on.
    pub(super) prefill_began_s: f64,
    pub(super) first_token_s: f64,
    pub(super) last_token_s: f64,
    /// Tokens that it had got when it lost its last place, and the times between them.
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
