//! Sequences that are taken in, and those that are not.

use super::{Action, After, Instance, Phase, Place, PrefixHasher, Sequence};

/// Why a sequence is not taken. Whoever asks is in another process, so that no mistake of his may stop this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no tokens.
    #[error("the sequence has no tokens")]
    Empty,
    /// A sequence with this id is here.
    #[error("a sequence with this id is here already")]
    Known,
    /// Not even all blocks would hold it.
    #[error("the sequence needs more KV blocks than there are")]
    TooLong,
    /// It has no place in the order.
    #[error("the time at which the sequence is due is no number")]
    NoTime,
}

impl Instance {
    /// Why no sequence of `tokens` tokens can stand at `place`.
    fn refusal(&self, place: Place, tokens: usize) -> Option<Refusal> {
        let room = u64::from(self.limits.blocks_total) * u64::from(self.limits.block_tokens);
        if tokens == 0 {
            Some(Refusal::Empty)
        } else if self.sequences.contains_key(&place.request) {
            Some(Refusal::Known)
        } else if tokens as u64 > room {
            Some(Refusal::TooLong)
        } else {
            (!place.due.0.is_finite()).then_some(Refusal::NoTime)
        }
    }

    pub(super) fn take_in(
        &mut self,
        place: Place,
        gives_way: bool,
        tokens: Vec<u32>,
        hasher: PrefixHasher,
        (pulls, after): (u32, Option<After>),
        actions: &mut Vec<Action>,
    ) {
        let request = place.request;
        if let Some(reason) = self.refusal(place, tokens.len()) {
            actions.push(Action::Refused { request, reason });
            return;
        }
        let sequence = Sequence {
            place,
            gives_way,
            tokens,
            computed: 0,
            pages: Vec::new(),
            chain: hasher.start(self.limits.block_tokens),
            published: 0,
            phase: Phase::Waiting,
            after,
            pulls,
            cancelled: false,
        };
        self.sequences.insert(request, sequence);
        self.waiting.insert(place);
    }
}
