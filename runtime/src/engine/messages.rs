//! What the coordinator and the instances' workers tell each other.

use crate::request::{FinishReason, GenerateRequest, Logprobs, ServiceTier};
use mixfleet_hal::DType;
use mixfleet_hal::transport::Descriptor;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{Load, RequestId};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::kv::hash::PrefixHasher;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A request in the engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Job {
    /// Its id; smaller is older.
    pub(super) request: RequestId,
    /// Instances begin prompts in this order.
    pub(super) due: Seconds,
    /// Grows with every placement of the request: messages of an earlier one are ignored.
    pub(super) attempt: u32,
    /// What the client asked for.
    pub(super) wanted: Arc<GenerateRequest>,
    /// The tokens that the client already has.
    pub(super) generated: Vec<u32>,
    /// Hashes its blocks in its tenant's namespace.
    pub(super) hasher: PrefixHasher,
}

impl Job {
    /// Nobody reads along.
    pub(super) fn gives_way(&self) -> bool {
        self.wanted.tier == ServiceTier::Flex
    }

    /// Prompt and answer so far.
    pub(super) fn tokens(&self) -> Vec<u32> {
        [&self.wanted.prompt_ids[..], &self.generated].concat()
    }
}

/// Where an instance wants pieces from one peer: equal slots of a region that can be reached in several ways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Landing {
    /// The region by every transport that reaches it, best first.
    pub(super) regions: Vec<Descriptor>,
    /// Slots.
    pub(super) slots: u32,
    /// Bytes of a slot: the largest piece.
    pub(super) slot_bytes: u64,
}

/// Where a prompt's KV goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HandOff {
    /// The placement that it belongs to.
    pub(super) attempt: u32,
    /// The first token whose KV the receiver lacks.
    pub(super) from: u32,
    /// The receiver.
    pub(super) to: InstanceId,
    /// Its slots for this sender.
    pub(super) landing: Landing,
    /// Dtype that both agreed on.
    pub(super) wire: DType,
}

/// Which KV of a request a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PieceId {
    /// Which layer.
    pub(super) layer: u32,
    /// First token.
    pub(super) first: u32,
    /// Tokens.
    pub(super) tokens: u32,
    /// How often it was sent before.
    pub(super) retries: u32,
}

/// A piece of KV in a receiver's slot, or on its way there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parcel {
    /// Whose.
    pub(super) request: RequestId,
    /// Of which placement.
    pub(super) attempt: u32,
    /// Which part.
    pub(super) piece: PieceId,
    /// Where it lies.
    pub(super) slot: u32,
    /// Length of the payload.
    pub(super) bytes: u64,
    /// XXH3-64 of the payload, taken before it was sent.
    pub(super) hash: u64,
    /// Dtype of the payload.
    pub(super) wire: DType,
}

/// To an instance's worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToWorker {
    /// Compute this prompt, then decode it here or hand it off.
    Add {
        /// The request.
        job: Job,
        /// Where its KV goes, if it is decoded elsewhere.
        hand_off: Option<HandOff>,
    },
    /// Make room for this prompt's KV.
    Reserve {
        /// The request.
        job: Job,
        /// Who will send it.
        sender: InstanceId,
    },
    /// KV has arrived in a staging slot.
    Landed {
        /// From whom.
        sender: InstanceId,
        /// What.
        parcel: Parcel,
    },
    /// A slot has been read and may be written again.
    Credit {
        /// Whose slot.
        receiver: InstanceId,
        /// Which.
        slot: u32,
    },
    /// KV will not arrive: every try failed.
    Lost {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// What.
        piece: PieceId,
    },
    /// The prompt is computed; with the last piece the sequence can decode.
    HandedOver {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// The token that was drawn after the prompt.
        next: u32,
    },
    /// The receiver's verdict on a piece.
    Verdict {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// Which piece.
        piece: PieceId,
        /// It arrived as it was sent.
        intact: bool,
    },
    /// (To itself.) A sequence that waits for KV may be complete.
    Settle {
        /// Which.
        request: RequestId,
    },
    /// Drop the request, whatever its state.
    Cancel {
        /// Which.
        request: RequestId,
    },
    /// An instance was lost: nothing more is sent to it or taken from it.
    PeerDown {
        /// Which.
        peer: InstanceId,
    },
}

/// From an instance's worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromWorker {
    /// The instance can take requests.
    Ready,
    /// A prompt got its blocks.
    Admitted {
        /// Whose.
        request: RequestId,
        /// Tokens reused from the cache.
        tokens_cached: u32,
    },
    /// Room was made; KV is wanted from `tokens_cached` on.
    Reserved {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// Tokens whose KV is here already.
        tokens_cached: u32,
        /// Where the rest is to land.
        landing: Landing,
    },
    /// A reservation was taken back: place the request anew.
    Revoked {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
    },
    /// Prompt tokens are computed.
    Progress {
        /// Whose.
        request: RequestId,
        /// Leading tokens done.
        tokens: u32,
    },
    /// All KV has arrived; the request decodes here now.
    Joined {
        /// Whose.
        request: RequestId,
    },
    /// A token was drawn.
    Drawn {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// Position in the answer, from 0.
        index: u32,
        /// The token.
        token: u32,
        /// If wanted.
        logprobs: Option<Logprobs>,
        /// The answer ends with it.
        finish: Option<FinishReason>,
    },
    /// The request cannot be completed.
    RequestFailed {
        /// Whose.
        request: RequestId,
        /// Of which placement.
        attempt: u32,
        /// Why, for the client.
        message: String,
    },
    /// Prefixes that the cache holds now.
    Stored(Vec<BlockHash>),
    /// Prefixes that it holds no longer.
    Evicted(Vec<BlockHash>),
    /// After each step and whenever the instance becomes idle.
    Load(Load),
    /// The device failed; the instance is gone.
    Down(mixfleet_hal::Error),
}

/// A worker's message with its sender.
pub(super) type Report = (InstanceId, FromWorker);
