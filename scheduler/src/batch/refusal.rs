//! Accepting and refusing sequences.

use super::{Action, After, Instance, Phase, Place, RequestId, Sequence, Text, Urgency};

/// Why a sequence is refused. Orders come from other processes, whose errors must not stop this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has no tokens.
    #[error("the sequence has no tokens")]
    Empty,
    /// A sequence with this id is already here.
    #[error("a sequence with this id is here already")]
    Known,
    /// It does not fit even into all blocks.
    #[error("the sequence needs more KV blocks than there are")]
    TooLong,
    /// Its due time is not a number.
    #[error("the time at which the sequence is due is not a number")]
    NoTime,
}

impl<T: Text> Instance<T> {
    /// Why a sequence of `tokens` tokens at `place` is refused, if it is.
    fn refusal(&self, place: Place, tokens: u32) -> Option<Refusal> {
        let room = u64::from(self.limits.blocks_total) * u64::from(self.limits.block_tokens);
        if tokens == 0 {
            Some(Refusal::Empty)
        } else if self.sequences.contains(place.request) {
            Some(Refusal::Known)
        } else if u64::from(tokens) > room {
            Some(Refusal::TooLong)
        } else {
            (!place.due.0.is_finite()).then_some(Refusal::NoTime)
        }
    }

    pub(super) fn take_in(
        &mut self,
        request: RequestId,
        urgency: Urgency,
        text: T,
        (pulls, after): (u32, Option<After>),
        actions: &mut Vec<Action<T::Block>>,
    ) {
        let (place, length) = (Place { due: urgency.due, request }, text.length());
        if let Some(reason) = self.refusal(place, length) {
            actions.push(Action::Refused { request, reason });
            return;
        }
        let mut sequence = Sequence {
            place,
            urgency,
            text,
            length,
            computed: 0,
            pages: Vec::new(),
            published: 0,
            phase: Phase::Queued,
            after,
            pulls,
            cancelled: false,
        };
        sequence.phase = sequence.in_queue();
        self.parties.enter(urgency.party);
        self.places.of_mut(sequence.phase).insert(place);
        self.sequences.insert(request, sequence);
    }
}
