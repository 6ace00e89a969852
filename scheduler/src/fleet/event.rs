//! Events and actions of the fleet machine.

use super::explain::Explanation;
use super::others::OthersWork;
use crate::batch::Urgency;
use crate::cost::{CostModel, KvCopyCost, LinkCost, MeasuredSteps};
use crate::ids::{InstanceId, PartyId, RequestId};
use crate::kv::parts::PageParts;
use crate::kv::{BlockHash, Tier};
use mixfleet_hal::DType;
use mixfleet_hal::units::{Seconds, UsdPerHour};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// The role of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It only computes prompts.
    Prefill,
    /// It only generates tokens.
    Decode,
    /// It prefills and decodes, as the scores decide.
    #[default]
    Auto,
    /// It computes nothing: it keeps KV computed by others, and lends it (a KV node).
    Kv,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 4] = [Role::Prefill, Role::Decode, Role::Auto, Role::Kv];

    /// Its name, as on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Auto => "auto",
            Role::Kv => "kv",
        }
    }

    /// Whether it may compute prompts.
    pub fn prefills(self) -> bool {
        matches!(self, Role::Prefill | Role::Auto)
    }

    /// Whether it may generate tokens.
    pub fn decodes(self) -> bool {
        matches!(self, Role::Decode | Role::Auto)
    }

    /// Whether it computes anything.
    pub fn computes(self) -> bool {
        self != Role::Kv
    }

    /// Whether it is only there to keep KV.
    pub fn keeps(self) -> bool {
        self == Role::Kv
    }
}

/// A copy of the model on a device, as the fleet machine sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    /// Its id, unique in the fleet.
    pub id: InstanceId,
    /// The device's selector, for display.
    pub device: Arc<str>,
    /// The instance's role.
    pub role: Role,
    /// Its pool; the instances of a pool share the links to other pools.
    #[serde(default)]
    pub pool: u32,
    /// Its cost model, shared by instances of one kind.
    pub cost: Arc<CostModel>,
    /// Its rent. Prices count only if every instance has one.
    pub price: Option<UsdPerHour>,
    /// Tokens that fit into its KV memory.
    pub kv_capacity_tokens: u64,
    /// Its network interface, in each direction, which joins it to every other instance that has one.
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
    /// Maximum new tokens per step; pulled prefixes are sent between two steps. 0 if unknown.
    #[serde(default)]
    pub step_tokens_max: u32,
    /// What KV that lands on it, or leaves it, takes of its steps.
    #[serde(default)]
    pub kv_copies: KvCopyCost,
    /// The pages of its blocks: layers with a window may keep no more than it.
    #[serde(default)]
    pub kv_parts: PageParts,
}

impl Instance {
    /// The tokens of all layers that take as much memory as a sequence of `tokens` does here; the last block
    /// may be used in part.
    pub fn tokens_held(&self, tokens: u64) -> u64 {
        self.kv_parts.tokens_held(tokens, self.kv_block_tokens)
    }

    /// The same in whole blocks, as the sequence really holds them.
    pub fn block_tokens_held(&self, tokens: u64) -> u64 {
        self.kv_parts.block_tokens_held(tokens, self.kv_block_tokens)
    }

    /// Number of the `computed` tokens of a prompt of `prompt` tokens that are sent to it for decoding: as
    /// many tokens of all layers.
    pub fn tokens_sent(&self, computed: &Range<u32>, prompt: u32) -> f64 {
        let computed = u64::from(computed.start)..u64::from(computed.end);
        self.kv_parts.tokens_sent(&computed, prompt.into(), self.kv_block_tokens)
    }

    /// The size of the pieces in which `new_tokens` of a prompt are computed, as far as it is known.
    pub(crate) fn piece(&self, new_tokens: u32) -> u32 {
        piece(new_tokens, self.step_tokens_max)
    }

    /// Its blocks have the keys of `chain`.
    pub fn has_blocks_of(&self, chain: &PromptChain) -> bool {
        (self.kv_block_tokens, self.kv_dtype) == (chain.block_tokens, chain.kv_dtype)
    }

    /// Its blocks have the same keys as those of `other`, so that one can use the other's blocks as they are.
    pub fn has_blocks_like(&self, other: &Instance) -> bool {
        (self.kv_block_tokens, self.kv_dtype) == (other.kv_block_tokens, other.kv_dtype)
    }
}

/// The size of the pieces in which `new_tokens` of a prompt are computed, in steps of at most this many; 0 if
/// unknown.
pub(super) fn piece(new_tokens: u32, step_tokens_max: u32) -> u32 {
    if step_tokens_max == 0 { new_tokens } else { new_tokens.min(step_tokens_max) }
}

/// A link for KV from one instance to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The sender.
    pub from: InstanceId,
    /// The receiver.
    pub to: InstanceId,
    /// The link's cost.
    pub cost: LinkCost,
}

/// A prefix that is copied to the prefill instance before, or while, the rest is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pull {
    /// The instance that holds it.
    pub from: InstanceId,
    /// Tokens to copy, which follow those that the prefill instance holds.
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

/// A request to be placed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// The request's id.
    pub request: RequestId,
    /// Length of the prompt; for a replay, including the tokens that the client already has.
    pub prompt_tokens: u32,
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// Expected number of generated tokens, if known.
    pub output_tokens_hint: Option<u32>,
    /// One chain for each kind of blocks in the fleet, by size and dtype; a missing one means nothing is
    /// cached there.
    pub chains: Vec<PromptChain>,
    /// The due time of a request that was accepted before and lost its instance: it keeps its place in the
    /// order of prompts, and is not rejected any more.
    pub replay: Option<Seconds>,
    /// The request's class, whose answer lengths the fleet machine learns.
    #[serde(default)]
    pub class: u32,
    /// The objective of the request.
    #[serde(default)]
    pub objective: Objective,
    /// Shift of its due time in seconds: earlier if positive, later if negative; up to [`HEAD_START_MAX`].
    #[serde(default)]
    pub head_start: Seconds,
    /// The party whose share of the fleet it uses.
    #[serde(default)]
    pub party: PartyId,
    /// Instances that have no part in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<InstanceId>,
    /// Whether one instance may compute its prompt for another one.
    #[serde(default, skip_serializing_if = "RequestDivision::is_by_role")]
    pub division: RequestDivision,
}

impl Arrival {
    /// Whether an instance may run the part of the request for which a role `can`.
    pub(super) fn may_use(&self, instance: &Instance, can: fn(Role) -> bool) -> bool {
        self.may_use_role(instance.role, can) && !self.exclude.contains(&instance.id)
    }

    /// Whether instances of a role may run the part of the request for which a role `can`.
    pub(super) fn may_use_role(&self, role: Role, can: fn(Role) -> bool) -> bool {
        match self.division {
            RequestDivision::Undivided => role.computes(),
            RequestDivision::ByRole | RequestDivision::NotAmong(_) => can(role),
        }
    }

    /// Whether one instance may compute the prompt and another one the answer.
    pub(super) fn may_divide(&self, prefill: InstanceId, decode: InstanceId) -> bool {
        match &self.division {
            RequestDivision::ByRole => true,
            RequestDivision::NotAmong(instances) => {
                [prefill, decode].iter().all(|end| !instances.contains(end))
            }
            RequestDivision::Undivided => false,
        }
    }
}

/// Whether one instance may compute the prompt of a request, and another one its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestDivision {
    /// As roles and links allow.
    #[default]
    ByRole,
    /// The same, but these share it with no other one.
    NotAmong(Vec<InstanceId>),
    /// One instance computes all of it, in any role.
    Undivided,
}

impl RequestDivision {
    fn is_by_role(&self) -> bool {
        *self == RequestDivision::ByRole
    }
}

/// Bounds head starts and penalties: a request is overtaken only by requests that arrive before it is due, or
/// within this time after.
pub const HEAD_START_MAX: Seconds = Seconds(3600.0);

/// When the answer of a request is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "objective", rename_all = "snake_case")]
pub enum Objective {
    /// As the fleet's configuration says.
    #[default]
    Fleet,
    /// The answer is read as it streams.
    Interactive {
        /// Maximum TTFT.
        ttft_slo: Option<Seconds>,
        /// Maximum TBT.
        tbt_slo: Option<Seconds>,
    },
    /// The answer must be complete at a time. Each request of a workflow, a chain of requests with one
    /// deadline, states the workflow's.
    Deadline {
        /// The deadline on the fleet's clock.
        at: Seconds,
        /// Number of requests left in the workflow, including this one; at least 1.
        requests_left: u32,
    },
}

/// An input of the fleet machine. Events about unknown requests or instances are late and change nothing;
/// those of a request name the instance, so that events of a lost placement can be distinguished.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A request arrived. It is answered by exactly one `Place` or `Reject`, which is the last action.
    Arrived(Arrival),
    /// The KV of the first `tokens` prompt tokens is computed.
    PrefillProgress {
        /// The request's id.
        request: RequestId,
        /// The instance.
        instance: InstanceId,
        /// Number of leading prompt tokens done, including cached ones.
        tokens: u32,
    },
    /// The prompt is computed and the first token is drawn.
    PrefillDone {
        /// The request's id.
        request: RequestId,
        /// The instance.
        instance: InstanceId,
    },
    /// The KV has landed and decoding can start.
    TransferDone {
        /// The request's id.
        request: RequestId,
        /// The receiver.
        instance: InstanceId,
    },
    /// Steps gave each of these requests `tokens` tokens.
    DecodeStep {
        /// The instance.
        instance: InstanceId,
        /// The ids of the requests.
        requests: Vec<RequestId>,
        /// The number of tokens per request.
        tokens: u32,
    },
    /// The work of an instance for other routers changed.
    Others {
        /// The instance.
        instance: InstanceId,
        /// The changes of that work.
        works: Vec<OthersWork>,
    },
    /// The measured time of steps that an instance ran.
    Measured {
        /// The instance.
        instance: InstanceId,
        /// The measured steps.
        steps: MeasuredSteps,
    },
    /// The answer is complete.
    Finished {
        /// The request's id.
        request: RequestId,
    },
    /// An instance holds the KV of a request's prompt and answer, and KV nodes may take a copy. This is only
    /// of use where [`Fleet::has_kv_node`](super::Fleet::has_kv_node).
    Offered {
        /// The request's id.
        request: RequestId,
        /// The instance.
        instance: InstanceId,
        /// The keys of the prefix, for each kind of blocks in the fleet.
        chains: Vec<PromptChain>,
    },
    /// The client left, or the runtime gave up.
    Cancelled {
        /// The request's id.
        request: RequestId,
    },
    /// An instance holds these blocks now.
    KvStored {
        /// The instance.
        instance: InstanceId,
        /// The blocks' keys.
        hashes: Vec<BlockHash>,
        /// The tier.
        #[serde(default)]
        tier: Tier,
    },
    /// An instance no longer holds these blocks.
    KvEvicted {
        /// The instance.
        instance: InstanceId,
        /// The blocks' keys.
        hashes: Vec<BlockHash>,
        /// The tier.
        #[serde(default)]
        tier: Tier,
    },
    /// An instance can hold blocks in a tier below its devices.
    TierUp {
        /// The instance.
        instance: InstanceId,
        /// The tier.
        tier: Tier,
        /// The cost of loading them.
        cost: LinkCost,
    },
    /// An instance holds no blocks any more.
    KvCleared {
        /// The instance.
        instance: InstanceId,
    },
    /// An instance joined, or changed its role, cost or price; its requests stay.
    InstanceUp(Instance),
    /// An instance is gone with its KV, its work and its links. If it returns, its links are reported again.
    InstanceDown {
        /// The instance.
        instance: InstanceId,
    },
    /// A link was opened, or measured again.
    LinkUp(Link),
    /// A link was closed.
    LinkDown {
        /// The sending instance.
        from: InstanceId,
        /// The receiving instance.
        to: InstanceId,
    },
    /// Two pools are joined by a link besides the network interfaces of their instances.
    PoolsJoined {
        /// The pool of the sending instances.
        from: u32,
        /// The pool of the receiving instances.
        to: u32,
        /// The link's cost.
        cost: LinkCost,
    },
}

/// An output of the fleet machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Run the request on these instances.
    Place {
        /// The request's id.
        request: RequestId,
        /// The instance that computes the prompt.
        prefill: InstanceId,
        /// The instance that generates the tokens; may be the same.
        decode: InstanceId,
        /// A prefix that is copied to the prefill instance first.
        pull: Option<Pull>,
        /// Due time: instances begin prompts in the order of their due times, equal ones in order of arrival.
        /// It is fixed on arrival, so that no request is overtaken for ever.
        urgency: Urgency,
        /// All candidates with their terms.
        explanation: Box<Explanation>,
    },
    /// Reject the request, which has left the fleet.
    Reject {
        /// The request's id.
        request: RequestId,
        /// The reason, with the numbers.
        reason: RejectReason,
        /// Time from now after which a retry may succeed; none if never, or unknown.
        retry_after: Option<Seconds>,
        /// All candidates with their terms.
        explanation: Box<Explanation>,
    },
    /// The prompt is computed, but its decode instance is too busy for the objective by now: the request has
    /// left the fleet.
    Drop {
        /// The request's id.
        request: RequestId,
        /// The reason, with the numbers.
        reason: RejectReason,
    },
    /// The request lost an instance and has left the fleet: it must arrive again as a replay, with the prompt
    /// extended by the tokens that the client already has.
    Replay {
        /// The request's id.
        request: RequestId,
        /// An instance that still works on it and must drop it.
        drop_on: Option<InstanceId>,
    },
    /// From now on the instance gets work of this role only; it finishes the work that it has.
    SetRole {
        /// The instance.
        instance: InstanceId,
        /// The role: prefill or decode.
        role: Role,
    },
    /// Copy a prefix to another instance for later requests, or to a KV node. This precedes the placement of
    /// the request that shows the need, or responds to an offer. A copy that does not arrive, or finds no
    /// room, is dropped: nothing waits for it.
    Replicate {
        /// The instance that holds all of the prefix.
        from: InstanceId,
        /// The instance that receives it.
        to: InstanceId,
        /// The keys of its blocks, from the first on.
        hashes: Vec<BlockHash>,
        /// Tokens to copy: the last ones, which follow those that the receiver holds.
        tokens: u32,
    },
}

/// Why a request was rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum RejectReason {
    /// It fits no instance, even an empty one.
    #[error(
        "{tokens} tokens of prompt and output fit no KV memory; the largest that could serve it holds {capacity_tokens}"
    )]
    TooLarge {
        /// Tokens of prompt and `max_tokens` together.
        tokens: u64,
        /// The largest capacity of any candidate's decode instance.
        capacity_tokens: u64,
    },
    /// The limit of requests in the fleet is reached.
    #[error("{requests} requests are in progress, the limit is {requests_max}")]
    QueueFull {
        /// Number of requests in the fleet now.
        requests: usize,
        /// The limit.
        requests_max: usize,
    },
    /// The last places are kept for parties that hold less than their share.
    #[error(
        "{requests} of {requests_max} requests in progress are from this client; the remaining slots are for others"
    )]
    Share {
        /// Number of requests of this party.
        requests: usize,
        /// The limit of all parties together.
        requests_max: usize,
    },
    /// No placement is predicted to meet the TTFT objective.
    #[error("the best placement gives the first token in {ttft_s:.3} s, the objective is {slo_s:.3} s")]
    TtftSlo {
        /// The best predicted TTFT.
        ttft_s: f64,
        /// The objective.
        slo_s: f64,
    },
    /// No placement that meets the TTFT objective is predicted to meet the TBT objective.
    #[error("the best placement takes {tbt_s:.4} s per token, the objective is {slo_s:.4} s")]
    TbtSlo {
        /// The best predicted TBT.
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
    /// A request with this id is in the fleet already, and continues.
    #[error("request {request} is already in progress")]
    Duplicate {
        /// The id.
        request: RequestId,
    },
}
