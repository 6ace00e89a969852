//! Messages between the coordinator and the instances' workers.

use crate::request::RouterId;
use crate::request::{Failure, FinishReason, GenerateRequest, Logprobs};
use mixfleet_hal::DType;
use mixfleet_hal::transport::Descriptor;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{BatchLoad, RequestId, Urgency};
use mixfleet_scheduler::cost::{LinkCost, MeasuredSteps};
use mixfleet_scheduler::fleet::{Instance, InstanceId, OthersWork, Role};
use mixfleet_scheduler::kv::hash::PrefixHasher;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use mixfleet_scheduler::quarantine::{AnswerMoment, RequestDigest};
use mixfleet_scheduler::transfer::PrefixSource;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The blocks that each instance holds, by tier.
pub type Held = BTreeMap<InstanceId, Vec<(Tier, BlockHash)>>;

/// A request as one instance gets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The request's id, smaller for older requests.
    pub(crate) request: RequestId,
    /// When the request is wanted, in seconds since 1970 by the sender's clock, as requests of several
    /// routers meet. Instances begin prompts in this order.
    pub(crate) urgency: Urgency,
    /// Predicted time at which its KV is where it decodes, on the same clock.
    pub(crate) ready: Seconds,
    /// The number of its placement: messages of an earlier one are ignored.
    pub(crate) attempt: u32,
    pub(crate) wanted: Arc<GenerateRequest>,
    /// Tokens that the client already has.
    pub(crate) generated: Vec<u32>,
    /// Hashes its blocks in its tenant's namespace.
    pub(crate) hasher: PrefixHasher,
}

impl Job {
    /// Length of prompt and answer so far.
    pub(crate) fn length(&self) -> usize {
        self.wanted.prompt_ids.len() + self.generated.len()
    }

    /// Maximum length of prompt and answer.
    pub(crate) fn length_max(&self) -> u64 {
        self.wanted.prompt_ids.len() as u64 + u64::from(self.wanted.max_tokens)
    }

    /// Tokens of prompt and answer so far.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        [&self.wanted.prompt_ids[..], &self.generated].concat()
    }
}

/// The staging slots of one sender at a receiver, in a region that several transports may reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Landing {
    /// The region's descriptors, one for each transport, best first.
    pub(crate) regions: Vec<Descriptor>,
    pub(crate) slots: u32,
    /// Size of a slot, and of the largest piece.
    pub(crate) slot_bytes: u64,
}

/// Which KV of a prompt a receiver lacks and will keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lacking {
    /// The first token whose KV it has in no layer.
    pub(crate) from: u32,
    /// By layer, the first token that a token behind the prompt reads; nothing if all are kept.
    pub(crate) read_from: Vec<u32>,
}

impl Lacking {
    /// All layers of the tokens from this one on.
    pub(crate) fn all(from: u32) -> Self {
        Lacking { from, read_from: Vec::new() }
    }

    /// The first token of a layer that is sent.
    pub(crate) fn first(&self, layer: u32) -> u32 {
        self.read_from.get(layer as usize).map_or(self.from, |&read_from| read_from.max(self.from))
    }

    /// The first token of which any layer is sent.
    pub(crate) fn first_of_all(&self) -> u32 {
        self.read_from.iter().copied().min().unwrap_or(0).max(self.from)
    }
}

/// The receiver of a prompt's KV.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HandOff {
    pub(crate) attempt: u32,
    pub(crate) lacking: Lacking,
    pub(crate) to: InstanceId,
    /// The receiver's slots for this sender.
    pub(crate) landing: Landing,
    /// The dtype in which KV is sent.
    pub(crate) wire: DType,
}

/// The kind of a KV transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// All KV of a prompt is sent; the receiver decodes the sequence.
    HandOff,
    /// The KV of a prefix is sent; the receiver computes the rest.
    Prefix,
}

/// A piece of a request's KV: some tokens of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PieceId {
    pub(crate) layer: u32,
    /// The first token.
    pub(crate) first: u32,
    pub(crate) tokens: u32,
    /// Number of earlier sends.
    pub(crate) retries: u32,
}

/// A piece of KV in a receiver's slot, or in transit to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parcel {
    pub(crate) request: RequestId,
    pub(crate) attempt: u32,
    pub(crate) piece: PieceId,
    pub(crate) slot: u32,
    /// Length of the payload.
    pub(crate) bytes: u64,
    /// XXH3-64 of the payload, computed before it was sent.
    pub(crate) hash: u64,
    /// Dtype of the payload.
    pub(crate) wire: DType,
}

/// An order of a coordinator to an instance.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Compute this prompt, then decode it here or hand it off. `pull` names the instance chosen to send more
    /// of its prefix.
    Add { job: Job, hand_off: Option<HandOff>, pull: Option<PrefixSource> },
    /// Make room for this prompt's KV, which `sender` will send.
    Reserve { job: Job, sender: InstanceId },
    /// Send the KV of this prompt's first `until` tokens to another instance, as far as it is here.
    Lend { job: Job, until: u32, to: HandOff },
    /// Have this prompt's KV sent here and keep it in the cache; nothing is computed.
    Copy { job: Job, holder: InstanceId },
    /// No prefix will be sent for this prompt.
    NotLent { request: RequestId, attempt: u32 },
    /// Take on this role for all routers, and report it to them.
    SetRole { role: Role },
    /// Drop the request in any state.
    Cancel { request: RequestId },
    /// (To its process.) Tell the other routers.
    Ended(EndNotice),
}

/// An instance was lost that had a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndNotice {
    /// The instance that was lost.
    pub(crate) engine: InstanceId,
    /// What the request asked for.
    pub(crate) digest: RequestDigest,
    /// What there was of the answer.
    pub(crate) moment: AnswerMoment,
    /// Whether the instance said that it ended; else perhaps only the way to it was lost.
    pub(crate) is_certain: bool,
}

/// A message about KV between the two instances of a transfer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KvMessage {
    /// The sender sends the first `until` tokens of a prefix and no more.
    Lent { request: RequestId, attempt: u32, until: u32 },
    /// The sender's KV has arrived in a staging slot.
    Landed(Parcel),
    /// The receiver has read a slot, which may be written again.
    Credit { slot: u32 },
    /// The sender gives a piece up, since every attempt failed.
    Lost { request: RequestId, attempt: u32, piece: PieceId },
    /// The sender has computed the prompt and drawn `next`; with the last piece the sequence can decode.
    HandedOver { request: RequestId, attempt: u32, next: u32 },
    /// The receiver decodes the sequence, and needs no more of the sender's KV.
    TakenOver { request: RequestId, attempt: u32 },
    /// The receiver has compared a piece with its hash.
    Verdict { request: RequestId, attempt: u32, piece: PieceId, intact: bool },
    /// The instance is lost: nothing more is sent to it or accepted from it.
    Down,
}

/// A peer's message with its sender.
pub(crate) type FromPeer = (InstanceId, KvMessage);

/// A message to an instance's worker from its coordinators and its own process.
#[derive(Debug)]
pub(crate) enum ToWorker {
    /// An order of a coordinator.
    Order(Order),
    /// A router is gone: drop all of its requests.
    Abandon { router: RouterId },
    /// Report the blocks that all tiers hold.
    Inspect(mpsc::Sender<Held>),
}

/// A report of an instance's worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// The instance accepts requests from now on, with KV of this dtype, sends and takes KV as `codes` of
    /// eight bits if it can, and reports at least every `silence_max` while it has work.
    Up {
        instance: Box<Instance>,
        kv: DType,
        #[serde(default)]
        codes: bool,
        silence_max: Seconds,
    },
    /// KV can be sent from here to another instance.
    Link { to: InstanceId, cost: LinkCost },
    /// KV can no longer be sent from here to another instance.
    LinkDown { to: InstanceId },
    /// A prompt got its blocks, with the KV of `tokens_cached` tokens from the cache and from others.
    Admitted { request: RequestId, attempt: u32, tokens_cached: u32 },
    /// Room was made for the missing KV.
    Reserved { request: RequestId, attempt: u32, lacking: Lacking, landing: Landing },
    /// A reservation was revoked: place the request again.
    Revoked { request: RequestId, attempt: u32 },
    /// Room was made, but no KV can come from `sender` now: place the request again.
    Refused { request: RequestId, attempt: u32, sender: InstanceId, reason: String },
    /// A copy is in the cache as far as it arrived.
    Kept { request: RequestId },
    /// This many leading tokens of a prompt are computed.
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
        /// Why the answer ends with this token, if it does.
        finish: Option<FinishReason>,
    },
    /// The request cannot be completed.
    RequestFailed { request: RequestId, attempt: u32, failure: Failure },
    /// Blocks of prefixes that a tier now holds.
    Stored { tier: Tier, hashes: Vec<BlockHash> },
    /// Blocks that a tier no longer holds.
    Evicted { tier: Tier, hashes: Vec<BlockHash> },
    /// The cost of loading blocks from a lower tier to the device.
    Tier { tier: Tier, cost: LinkCost },
    /// The load after a step, and whenever the instance becomes idle.
    Load(BatchLoad),
    /// The time of a step, without the time that it waited for other instances.
    Ran(MeasuredSteps),
    /// (From its process.) Changes of the work that the instance does for other routers.
    Others(Vec<OthersWork>),
    /// (From its process.) Another router lost an instance.
    Ended(EndNotice),
    /// (From the coordinator's own process.) Report the blocks that the fleet machine attributes to tiers.
    #[serde(skip)]
    Inspect(mpsc::Sender<Held>),
    /// The device failed; the instance is gone.
    Down(mixfleet_hal::Error),
    /// (From the router itself.) Its process cannot be reached from here any more. Other routers may reach
    /// it, and their requests continue.
    Unreachable(mixfleet_hal::Error),
}

/// A worker's report with its instance.
pub(crate) type Report = (InstanceId, FromWorker);

impl FromWorker {
    /// The request that the report concerns.
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
            | FromWorker::Ended(_)
            | FromWorker::Inspect(_)
            | FromWorker::Down(_)
            | FromWorker::Unreachable(_) => None,
        }
    }
}
