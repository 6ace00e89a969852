//! What the fleet's machine is told, and what it decides.

use super::explain::Explanation;
use super::learn::MeasuredSteps;
use super::others::OthersWork;
use crate::batch::Urgency;
use crate::cost::{CostModel, LinkCost};
use crate::ids::{InstanceId, RequestId};
use crate::kv::{BlockHash, Tier};
use mixfleet_hal::DType;
use mixfleet_hal::units::{Seconds, UsdPerHour};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What an instance may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Only prompts.
    Prefill,
    /// Only tokens.
    Decode,
    /// Whatever the numbers say.
    #[default]
    Auto,
}

impl Role {
    /// Whether it may compute prompts.
    pub fn prefills(self) -> bool {
        self != Role::Decode
    }

    /// Whether it may generate tokens.
    pub fn decodes(self) -> bool {
        self != Role::Prefill
    }
}

/// A copy of the model on a device, as the fleet sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    /// Its id, unique in the fleet.
    pub id: InstanceId,
    /// The device's selector, for people.
    pub device: Arc<str>,
    /// What it may do.
    pub role: Role,
    /// Those of one pool share what joins it to other pools.
    #[serde(default)]
    pub pool: u32,
    /// What things take on it. Instances of one kind share it.
    pub cost: Arc<CostModel>,
    /// Its rent. Prices count only if every instance has one.
    pub price: Option<UsdPerHour>,
    /// Tokens that its KV memory holds.
    pub kv_capacity_tokens: u64,
    /// Its network card, each direction. Joins it to every other instance that has one.
    #[serde(default)]
    pub nic: Option<LinkCost>,
    /// Tokens in a KV block, and their dtype; chains of this kind are looked up for it.
    pub kv_block_tokens: u32,
    /// Dtype of its KV.
    pub kv_dtype: DType,
    /// Prompt tokens of a step that also decodes: how often decode steps interrupt a prefill. None: as many
    /// as the tightest TBT objective there allows.
    #[serde(default)]
    pub prefill_tokens_beside_decode_max: Option<u32>,
    /// New tokens in one of its steps, at most: what it lends to others it sends between two steps. 0 where
    /// that is not known.
    #[serde(default)]
    pub step_tokens_max: u32,
}

impl Instance {
    /// Its blocks have the keys of `chain`.
    pub fn has_blocks_of(&self, chain: &PromptChain) -> bool {
        (self.kv_block_tokens, self.kv_dtype) == (chain.block_tokens, chain.kv_dtype)
    }

    /// Its blocks have the same keys as those of `other`, so that one can take over what the other holds as
    /// it is.
    pub fn has_blocks_like(&self, other: &Instance) -> bool {
        (self.kv_block_tokens, self.kv_dtype) == (other.kv_block_tokens, other.kv_dtype)
    }
}

/// A way for KV from one instance to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The sender.
    pub from: InstanceId,
    /// The receiver.
    pub to: InstanceId,
    /// What it takes.
    pub cost: LinkCost,
}

/// A prefix that is copied to the prefill instance before, or while, the rest is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pull {
    /// Who holds it.
    pub from: InstanceId,
    /// Tokens to copy: those that follow what the prefill instance holds itself.
    pub tokens: u32,
}

/// The keys of a prompt's full blocks for one kind of blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptChain {
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Dtype of the KV in it.
    pub kv_dtype: DType,
    /// Keys, from the first block on.
    pub hashes: Vec<BlockHash>,
}

/// A request that wants a place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// Its id.
    pub request: RequestId,
    /// Length of the prompt; of a replay, with the tokens that the client already has.
    pub prompt_tokens: u32,
    /// Tokens to generate at most.
    pub max_tokens: u32,
    /// Tokens that it will probably generate, if someone knows.
    pub output_tokens_hint: Option<u32>,
    /// One chain for each kind of blocks in the fleet, by size and dtype; a missing one means nothing is
    /// cached there.
    pub chains: Vec<PromptChain>,
    /// When it was due, if it was accepted before and lost its instance: it keeps its place in the order of
    /// prompts, and neither bound nor SLO turns it away now.
    pub replay: Option<Seconds>,
    /// Requests of a class have answers alike in length, which the fleet learns.
    #[serde(default)]
    pub class: u32,
    /// When its user wants it.
    #[serde(default)]
    pub objective: Objective,
    /// It goes ahead of the place that its objective gives it by so much, or behind it if this is below 0; up
    /// to [`HEAD_START_MAX`].
    #[serde(default)]
    pub head_start: Seconds,
}

/// Nobody goes further ahead of his place in the order, or behind it: a request is overtaken only by those
/// that come before it is due, or so soon after.
pub const HEAD_START_MAX: Seconds = Seconds(3600.0);

/// When a request's user wants the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "objective", rename_all = "snake_case")]
pub enum Objective {
    /// As the fleet's configuration says.
    #[default]
    Fleet,
    /// Someone reads along.
    Interactive {
        /// To the first token.
        ttft_slo: Option<Seconds>,
        /// Between tokens.
        tbt_slo: Option<Seconds>,
    },
    /// The answer must be complete at a time. Of a workflow, a chain of requests with one deadline, each
    /// request states the workflow's.
    Deadline {
        /// On the fleet's clock.
        at: Seconds,
        /// This one and those that will follow from it; at least 1.
        requests_left: u32,
    },
}

/// What happened. Events about requests or instances that the fleet does not know (any more) are late
/// and change nothing; those of a request name the instance, so that a lost placement's are told apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A request wants a place. Answered by exactly one `Place` or `Reject`, which is the last action.
    Arrived(Arrival),
    /// The KV of the first `tokens` prompt tokens is there.
    PrefillProgress {
        /// Whose.
        request: RequestId,
        /// Where.
        instance: InstanceId,
        /// Leading prompt tokens done, cached ones included.
        tokens: u32,
    },
    /// The prompt is done and the first token is drawn.
    PrefillDone {
        /// Whose.
        request: RequestId,
        /// Where.
        instance: InstanceId,
    },
    /// The KV has landed and decoding can start.
    TransferDone {
        /// Whose.
        request: RequestId,
        /// The receiver.
        instance: InstanceId,
    },
    /// Steps gave each of these requests so many tokens.
    DecodeStep {
        /// Where.
        instance: InstanceId,
        /// Whose.
        requests: Vec<RequestId>,
        /// How many each.
        tokens: u32,
    },
    /// An instance works for other routers too: what is new of that.
    Others {
        /// Where.
        instance: InstanceId,
        /// What.
        works: Vec<OthersWork>,
    },
    /// What steps took that an instance ran.
    Measured {
        /// Where.
        instance: InstanceId,
        /// Which, and how long.
        steps: MeasuredSteps,
    },
    /// The answer is complete.
    Finished {
        /// Whose.
        request: RequestId,
    },
    /// The client left, or the runtime gave up.
    Cancelled {
        /// Whose.
        request: RequestId,
    },
    /// An instance holds these blocks now.
    KvStored {
        /// Which.
        instance: InstanceId,
        /// The blocks' keys.
        hashes: Vec<BlockHash>,
        /// Where.
        #[serde(default)]
        tier: Tier,
    },
    /// An instance no longer holds these blocks.
    KvEvicted {
        /// Which.
        instance: InstanceId,
        /// The blocks' keys.
        hashes: Vec<BlockHash>,
        /// Where.
        #[serde(default)]
        tier: Tier,
    },
    /// An instance can hold blocks in a tier below its devices.
    TierUp {
        /// Which.
        instance: InstanceId,
        /// Where.
        tier: Tier,
        /// What it takes to load them.
        cost: LinkCost,
    },
    /// An instance holds no blocks any more.
    KvCleared {
        /// Which.
        instance: InstanceId,
    },
    /// An instance joined, or changed its role, cost or price; its requests stay.
    InstanceUp(Instance),
    /// An instance is gone with its KV, its work and its ways to others. What comes back tells of its ways
    /// anew.
    InstanceDown {
        /// Which.
        instance: InstanceId,
    },
    /// A way was opened, or measured anew.
    LinkUp(Link),
    /// A way was closed.
    LinkDown {
        /// Where from.
        from: InstanceId,
        /// Where to.
        to: InstanceId,
    },
    /// What joins two pools, beyond the network cards of the two instances.
    PoolsJoined {
        /// From instances of this pool.
        from: u32,
        /// To instances of that one.
        to: u32,
        /// What it takes.
        cost: LinkCost,
    },
}

/// What must be done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Run the request there.
    Place {
        /// Which.
        request: RequestId,
        /// Computes the prompt.
        prefill: InstanceId,
        /// Generates the tokens; may be the same.
        decode: InstanceId,
        /// Copied to the prefill instance first.
        pull: Option<Pull>,
        /// When it is wanted: instances begin prompts in the order of their due times, equal ones as they
        /// came. It is fixed on arrival, so that nobody is overtaken for ever.
        urgency: Urgency,
        /// Every candidate with its terms.
        explanation: Box<Explanation>,
    },
    /// Turn the request away; it has left the fleet.
    Reject {
        /// Which.
        request: RequestId,
        /// Why, with the numbers.
        reason: RejectReason,
        /// When another try may succeed, from now; none: never, or unknown.
        retry_after: Option<Seconds>,
        /// Every candidate with its terms.
        explanation: Box<Explanation>,
    },
    /// The prompt is done, but its decode instance is too busy for the objective by now: the request has left
    /// the fleet.
    Drop {
        /// Which.
        request: RequestId,
        /// Why, with the numbers.
        reason: RejectReason,
    },
    /// The request lost an instance and has left the fleet: let it arrive again, as a replay, with the
    /// prompt extended by the tokens that the client already has.
    Replay {
        /// Which.
        request: RequestId,
        /// An instance that still works on it and must drop it.
        drop_on: Option<InstanceId>,
    },
    /// From now on the instance gets work of this role only; what it has, it finishes.
    SetRole {
        /// Which.
        instance: InstanceId,
        /// Prefill or decode.
        role: Role,
    },
    /// Copy a prefix to another instance, for requests to come; said before the placement of the request that
    /// shows the need. What does not arrive, or finds no room there, is dropped: nobody waits for it.
    Replicate {
        /// Who holds all of it.
        from: InstanceId,
        /// Who will.
        to: InstanceId,
        /// The keys of its blocks, from the first on.
        hashes: Vec<BlockHash>,
        /// Tokens to copy: the last ones, which follow what the receiver holds.
        tokens: u32,
    },
}

/// Why a request was turned away.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum RejectReason {
    /// It fits no instance, even an empty one.
    #[error(
        "{tokens} tokens of prompt and output fit no KV memory; the largest that could serve it holds {capacity_tokens}"
    )]
    TooLarge {
        /// Prompt and `max_tokens` together.
        tokens: u64,
        /// The most that any candidate's decode instance holds.
        capacity_tokens: u64,
    },
    /// As many requests are in the fleet as its bound allows.
    #[error("{requests} requests are in work, the bound is {requests_max}")]
    QueueFull {
        /// In the fleet now.
        requests: usize,
        /// The bound.
        requests_max: usize,
    },
    /// No placement is predicted to give the first token in time.
    #[error("the best placement gives the first token in {ttft_s:.3} s, the objective is {slo_s:.3} s")]
    TtftSlo {
        /// The best predicted TTFT.
        ttft_s: f64,
        /// The objective.
        slo_s: f64,
    },
    /// No placement with a timely first token is predicted to generate fast enough.
    #[error("the best placement takes {tbt_s:.4} s per token, the objective is {slo_s:.4} s")]
    TbtSlo {
        /// The best predicted time between tokens.
        tbt_s: f64,
        /// The objective.
        slo_s: f64,
    },
    /// No placement is predicted to complete the answer before its deadline.
    #[error("the best placement completes the answer in {ends_s:.3} s, its deadline is in {deadline_s:.3} s")]
    Deadline {
        /// The best predicted time to the last token.
        ends_s: f64,
        /// Time to the deadline.
        deadline_s: f64,
    },
    /// No instance is up for prefill, or for decode, or no link joins two that are.
    #[error("no pair of instances can serve it now")]
    NoInstance,
    /// A request with this id is in the fleet already; that one goes on.
    #[error("request {request} is in work already")]
    Duplicate {
        /// The id.
        request: RequestId,
    },
}
