//! Events and actions of the transfer machine.
//!
//! `R` is what an instance says of the room that it has for KV, and `T` a drawn token: the machine passes
//! them on and does not look at them.

use crate::fleet::{Explanation, Pull};
use crate::ids::{InstanceId, RequestId};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// The sender of a prompt's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixSource {
    /// The instance that has it, or will have it.
    pub holder: InstanceId,
    /// End of the leading tokens that it can send.
    pub until: u32,
}

impl PrefixSource {
    /// Returns the source of a placement's pull.
    pub fn of(pull: Option<Pull>, explanation: &Explanation) -> Option<Self> {
        Some(PrefixSource { holder: pull?.from, until: explanation.pulled_until()? })
    }

    /// Limits it to what a prompt of `tokens` tokens can use: whole blocks, and one token must be computed.
    pub fn capped(self, tokens: usize, block_tokens: u32) -> Self {
        let most = to_u32(tokens).saturating_sub(1) / block_tokens * block_tokens;
        PrefixSource { until: self.until.min(most), ..self }
    }
}

/// An instance that reports on one placement of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reporter {
    /// The instance.
    pub instance: InstanceId,
    /// The request, or the copy.
    pub request: RequestId,
    /// The number of the placement, from the order that the instance got; 0 for a copy.
    pub attempt: u32,
}

/// An input of the transfer machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<R, T> {
    /// The fleet machine placed a request, for the first time or again.
    Placed {
        /// The request's id.
        request: RequestId,
        /// The instance that computes the prompt.
        prefill: InstanceId,
        /// The instance that generates the tokens; may be the same.
        decode: InstanceId,
        /// The prefix that the prefill instance gets first.
        pull: Option<PrefixSource>,
    },
    /// An instance has room for KV that another one sends.
    Reserved {
        /// The receiver.
        by: Reporter,
        /// Its room.
        room: R,
    },
    /// A prompt got its blocks: no more of its prefix is waited for.
    Admitted {
        /// The instance.
        by: Reporter,
    },
    /// An instance drew a token.
    Drawn {
        /// The instance.
        by: Reporter,
        /// Position in the answer, from 0.
        index: u32,
        /// The token.
        token: T,
        /// Time at which it was drawn, or became known.
        at: Seconds,
    },
    /// All KV of a hand-off is at the decode instance.
    Joined {
        /// The request's id.
        request: RequestId,
        /// The decode instance.
        instance: InstanceId,
        /// Time at which that became known.
        at: Seconds,
    },
    /// An instance revoked a reservation, of a request or a copy.
    Revoked {
        /// The instance.
        by: Reporter,
    },
    /// The answer is complete.
    Finished {
        /// The request's id.
        request: RequestId,
        /// The instance that drew the last token.
        instance: InstanceId,
        /// Whether it knows that this was the last one.
        knows: bool,
    },
    /// The client left, or the request failed.
    Cancelled {
        /// The request's id.
        request: RequestId,
    },
    /// A request lost its place, as the fleet machine says of an instance that is down.
    Lost {
        /// The request's id.
        request: RequestId,
    },
    /// The fleet machine wants a prefix copied.
    CopyWanted {
        /// The id of the copy, which no request has.
        request: RequestId,
        /// The instance that holds it, and its end.
        source: PrefixSource,
        /// The receiver.
        to: InstanceId,
    },
    /// A copy is in the receiver's cache, as far as it arrived.
    Kept {
        /// The id of the copy.
        request: RequestId,
    },
    /// The receiver gave a copy up.
    CopyFailed {
        /// The id of the copy.
        request: RequestId,
    },
    /// An instance is down. The requests that lose their place with it are reported by `Lost`.
    InstanceDown {
        /// The instance.
        instance: InstanceId,
    },
    /// No KV goes from one instance to another any more.
    LinkDown {
        /// The sender.
        from: InstanceId,
        /// The receiver.
        to: InstanceId,
    },
}

/// An output of the transfer machine: orders to instances, and what the driver has to do itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<R, T> {
    /// Order: compute a prompt, then decode it or hand it off.
    Add {
        /// The instance, the request and the number of its placement.
        to: Reporter,
        /// The decode instance, if it is another one, and its room.
        hand_off: Option<(InstanceId, R)>,
        /// The prefix that comes from elsewhere.
        pull: Option<PrefixSource>,
    },
    /// Order: make room for the KV of a prompt that another instance computes.
    Reserve {
        /// The instance, the request and the number of its placement.
        to: Reporter,
        /// The instance that computes the prompt.
        sender: InstanceId,
    },
    /// Order: send a prefix, of a request or of a copy.
    Lend {
        /// The holder, the request and the number of its placement.
        to: Reporter,
        /// End of the prefix.
        until: u32,
        /// The receiver.
        receiver: InstanceId,
        /// The room of the receiver.
        room: R,
    },
    /// Order: do not wait for a prefix.
    NotLent {
        /// The instance, the request and the number of its placement.
        to: Reporter,
    },
    /// Order: keep a prefix that another instance sends.
    Copy {
        /// The receiver and the copy.
        to: Reporter,
        /// The instance that holds it, and its end.
        source: PrefixSource,
    },
    /// Order: drop a request or a copy in any state.
    Cancel {
        /// The instance.
        instance: InstanceId,
        /// The request's id.
        request: RequestId,
    },
    /// The answer goes on with this token.
    Token {
        /// The instance that drew it.
        by: Reporter,
        /// The token.
        token: T,
    },
    /// An instance drew a token that is not its turn: it is not to be trusted.
    OutOfTurn {
        /// The instance.
        by: Reporter,
        /// Position in the answer that it claims.
        index: u32,
        /// Position of the next token.
        next: u32,
    },
    /// A request decodes where its KV was sent, and its first token was passed on.
    TransferDone {
        /// The request's id.
        request: RequestId,
        /// The decode instance.
        instance: InstanceId,
    },
    /// A hand-off delayed the second token by so long after the prompt was computed.
    Exposed {
        /// The delay.
        time: Seconds,
    },
    /// A request loses its place, without the fleet machine's knowledge.
    Unplace {
        /// The request's id.
        request: RequestId,
    },
    /// A request without a place was cancelled where it was: the fleet machine has to place it again.
    PlaceAgain {
        /// The request's id.
        request: RequestId,
    },
    /// A copy is over: it was kept, or dropped.
    CopyEnded {
        /// The id of the copy.
        request: RequestId,
        /// Whether its receiver kept what arrived.
        kept: bool,
    },
}
