//! What the coordinator and the instances' workers tell each other.

use crate::request::RouterId;
use crate::request::{Failure, FinishReason, GenerateRequest, Logprobs};
use mixfleet_hal::DType;
use mixfleet_hal::transport::Descriptor;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{BatchLoad, RequestId, Urgency};
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::{Instance, InstanceId, MeasuredSteps, OthersWork, Role};
use mixfleet_scheduler::kv::hash::PrefixHasher;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What instances hold, tier by tier, in order.
pub type Held = BTreeMap<InstanceId, Vec<(Tier, BlockHash)>>;

/// A request, as one instance gets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// A smaller id is older.
    pub(crate) request: RequestId,
    /// When it is wanted. Instances begin prompts in this order: seconds since 1970 by the sender's clock,
    /// since requests of several routers meet.
    pub(crate) urgency: Urgency,
    /// When its KV is thought to be where it decodes, likewise.
    pub(crate) ready: Seconds,
    /// Grows with every placement of the request: messages of an earlier one are ignored.
    pub(crate) attempt: u32,
    pub(crate) wanted: Arc<GenerateRequest>,
    /// The tokens that the client already has.
    pub(crate) generated: Vec<u32>,
    /// Hashes its blocks in its tenant's namespace.
    pub(crate) hasher: PrefixHasher,
}

impl Job {
    /// Tokens of prompt and answer so far.
    pub(crate) fn length(&self) -> usize {
        self.wanted.prompt_ids.len() + self.generated.len()
    }

    /// Tokens of prompt and answer, at most.
    pub(crate) fn length_max(&self) -> u64 {
        self.wanted.prompt_ids.len() as u64 + u64::from(self.wanted.max_tokens)
    }

    /// Prompt and answer so far.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        [&self.wanted.prompt_ids[..], &self.generated].concat()
    }
}

/// Where an instance wants pieces from one peer: equal slots of a region that can be reached in several ways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Landing {
    /// The region by every transport that reaches it, best first.
    pub(crate) regions: Vec<Descriptor>,
    pub(crate) slots: u32,
    /// The largest piece.
    pub(crate) slot_bytes: u64,
}

/// Where a prompt's KV goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HandOff {
    pub(crate) attempt: u32,
    /// The first token whose KV the receiver lacks.
    pub(crate) from: u32,
    pub(crate) to: InstanceId,
    /// The receiver's slots for this sender.
    pub(crate) landing: Landing,
    /// The dtype that suits both.
    pub(crate) wire: DType,
}

/// Which KV of a request one instance sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// All of its prompt's: the sequence decodes where it goes.
    HandOff,
    /// That of a prefix: the rest is computed where it goes.
    Prefix,
}

/// Who sends a part of a prompt's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Source {
    /// The instance that has it, or will.
    pub(crate) holder: InstanceId,
    /// Leading tokens of which it can send what the receiver lacks.
    pub(crate) until: u32,
}

impl Source {
    /// As far as a prompt of `tokens` tokens can be taken from others: in whole blocks, and one token is
    /// computed.
    pub(crate) fn capped(self, tokens: usize, block_tokens: u32) -> Self {
        let most = (tokens as u32).saturating_sub(1) / block_tokens * block_tokens;
        Source { until: self.until.min(most), ..self }
    }
}

/// A piece of a request's KV: one layer of some tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PieceId {
    pub(crate) layer: u32,
    /// The first token.
    pub(crate) first: u32,
    pub(crate) tokens: u32,
    /// How often it was sent before.
    pub(crate) retries: u32,
}

/// A piece of KV in a receiver's slot, or on its way there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parcel {
    pub(crate) request: RequestId,
    pub(crate) attempt: u32,
    pub(crate) piece: PieceId,
    pub(crate) slot: u32,
    /// Length of the payload.
    pub(crate) bytes: u64,
    /// XXH3-64 of the payload, taken before it was sent.
    pub(crate) hash: u64,
    /// Dtype of the payload.
    pub(crate) wire: DType,
}

/// What a coordinator has an instance do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Compute this prompt, then decode it here or hand it off. `pull` is who was chosen to send more of its
    /// prefix.
    Add { job: Job, hand_off: Option<HandOff>, pull: Option<Source> },
    /// Make room for this prompt's KV, which `sender` will send.
    Reserve { job: Job, sender: InstanceId },
    /// Send the KV of this prompt's first `until` tokens to another instance, as far as it is here.
    Lend { job: Job, until: u32, to: HandOff },
    /// Have this prompt's KV sent here and keep it in the cache: nobody waits for it, and nothing is
    /// computed.
    Copy { job: Job, holder: InstanceId },
    /// Nothing comes of the prefix that this prompt waits for.
    NotLent { request: RequestId, attempt: u32 },
    /// The instance gets work of this role from now on, from all routers: it tells them.
    SetRole { role: Role },
    /// Drop the request, whatever its state.
    Cancel { request: RequestId },
}

/// What an instance says to another one about KV that goes from one of them to the other.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PeerWord {
    /// The sender sends the first `until` tokens of a prefix: nothing beyond is waited for.
    Lent { request: RequestId, attempt: u32, until: u32 },
    /// The sender's KV has arrived in a staging slot.
    Landed(Parcel),
    /// The receiver has read a slot, which may be written again.
    Credit { slot: u32 },
    /// The sender gives a piece up: every try failed.
    Lost { request: RequestId, attempt: u32, piece: PieceId },
    /// The sender has computed the prompt and drawn `next`; with the last piece the sequence can decode.
    HandedOver { request: RequestId, attempt: u32, next: u32 },
    /// The receiver decodes the sequence: nothing of it is read from the sender any more.
    TakenOver { request: RequestId, attempt: u32 },
    /// The receiver has compared a piece with its hash.
    Verdict { request: RequestId, attempt: u32, piece: PieceId, intact: bool },
    /// The instance is lost: nothing more is sent to it or taken from it.
    Down,
}

/// A peer's word, with the instance that it comes from.
pub(crate) type FromPeer = (InstanceId, PeerWord);

/// To an instance's worker, from its coordinators and its own process.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// From a coordinator.
    Order(Order),
    /// A router is gone: drop all of its requests.
    Abandon { router: RouterId },
    /// Say what all tiers hold.
    Inspect(mpsc::Sender<Held>),
}

/// From an instance's worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The instance takes requests from now on, with KV of this dtype, and says something at least every
    /// `silence_max` while it has work.
    Up { instance: Box<Instance>, kv: DType, silence_max: Seconds },
    /// KV can go from here to another instance.
    Link { to: InstanceId, cost: LinkCost },
    /// It cannot any more.
    LinkDown { to: InstanceId },
    /// A prompt got its blocks, with the KV of `tokens_cached` tokens from the cache and from others.
    Admitted { request: RequestId, attempt: u32, tokens_cached: u32 },
    /// Room was made; KV is wanted from `tokens_cached` on.
    Reserved { request: RequestId, attempt: u32, tokens_cached: u32, landing: Landing },
    /// A reservation was taken back: place the request anew.
    Revoked { request: RequestId, attempt: u32 },
    /// Room was made, but no KV can come from `sender` now: place the request anew.
    Refused { request: RequestId, attempt: u32, sender: InstanceId, reason: String },
    /// A copy has come as far as it will, and is in the cache.
    Kept { request: RequestId },
    /// So many leading tokens of a prompt are computed.
    Progress { request: RequestId, tokens: u32 },
    /// All KV has arrived; the request decodes here now.
    Joined { request: RequestId },
    /// A token was drawn.
    Drawn {
        request: RequestId,
        attempt: u32,
        /// Position in the answer, from 0.
        index: u32,
        token: u32,
        logprobs: Option<Logprobs>,
        /// The answer ends with it.
        finish: Option<FinishReason>,
    },
    /// The request cannot be completed.
    RequestFailed { request: RequestId, attempt: u32, failure: Failure },
    /// Blocks of prefixes that a tier holds now.
    Stored { tier: Tier, hashes: Vec<BlockHash> },
    /// Blocks that a tier holds no longer.
    Evicted { tier: Tier, hashes: Vec<BlockHash> },
    /// What it takes to bring blocks from a lower tier to the device.
    Tier { tier: Tier, cost: LinkCost },
    /// After each step and whenever the instance becomes idle.
    Load(BatchLoad),
    /// What a step took that the instance has run, without the time in which it waited for others.
    Ran(MeasuredSteps),
    /// (From its process.) What is new of the work that the instance does for other routers.
    Others(Vec<OthersWork>),
    /// (From the coordinator's own process.) Say what the fleet's machine thinks that tiers hold.
    #[serde(skip)]
    Inspect(mpsc::Sender<Held>),
    /// The device failed; the instance is gone.
    Down(mixfleet_hal::Error),
    /// (From the router itself.) Its process is not reached any more from here. Others may reach it, and
    /// their requests go on.
    Unreachable(mixfleet_hal::Error),
}

/// A worker's message with its sender.
pub(crate) type Report = (InstanceId, FromWorker);

impl FromWorker {
    /// The request that it is about.
    pub(crate) fn request(&self) -> Option<RequestId> {
        match self {
            FromWorker::Admitted { request, .. }
            | FromWorker::Reserved { request, .. }
            | FromWorker::Revoked { request, .. }
            | FromWorker::Refused { request, .. }
            | FromWorker::Progress { request, .. }
            | FromWorker::Joined { request }
            | FromWorker::Kept { request }
            | FromWorker::Drawn { request, .. }
            | FromWorker::RequestFailed { request, .. } => Some(*request),
            FromWorker::Up { .. }
            | FromWorker::Link { .. }
            | FromWorker::LinkDown { .. }
            | FromWorker::Stored { .. }
            | FromWorker::Evicted { .. }
            | FromWorker::Tier { .. }
            | FromWorker::Load(_)
            | FromWorker::Ran(_)
            | FromWorker::Others(_)
            | FromWorker::Inspect(_)
            | FromWorker::Down(_)
            | FromWorker::Unreachable(_) => None,
        }
    }
}
