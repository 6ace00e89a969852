//! What the operands of operations are, as symbols.

use mixfleet_hal::OpSig;

/// Takes the operations of a list, in order.
pub trait OpSink {
    /// Takes an operation, with an argument for each of its operands. An argument may stand for several
    /// operands: [`OpArg::Pools`], or a weight that consists of several arrays, as which it has another kind
    /// than in `sig`.
    fn push(&mut self, sig: OpSig, args: &[OpArg]);
}

/// An operand of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpArg {
    /// A buffer of activations, from this element on. Its length follows from the operation.
    From(Activation, u64),
    /// A weight of the layer, or of the model.
    Weight(Weight),
    /// Inputs of a step on the device.
    Table(StepTable),
    /// The pools of the layer's KV: of keys and values, or of latents.
    Pools,
    /// No operand.
    Absent,
}

impl From<Activation> for OpArg {
    fn from(buffer: Activation) -> Self {
        OpArg::From(buffer, 0)
    }
}

impl From<Weight> for OpArg {
    fn from(weight: Weight) -> Self {
        OpArg::Weight(weight)
    }
}

impl From<Option<Weight>> for OpArg {
    fn from(weight: Option<Weight>) -> Self {
        weight.map_or(OpArg::Absent, OpArg::Weight)
    }
}

impl From<StepTable> for OpArg {
    fn from(table: StepTable) -> Self {
        OpArg::Table(table)
    }
}

/// A buffer of activations, shared by layers. In the dtype of activations unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `[tokens, hidden]` f32.
    Residual,
    /// `[tokens, hidden]`, after a norm.
    Normed,
    /// `[tokens, rotated]` f32: cosines and sines.
    CosSin,
    /// The same of a second rope.
    SecondCosSin,
    /// `[tokens, hidden]` f32: what attention or an MLP made, before its norm.
    Branch,
    /// `[tokens]` f32: what rows are multiplied by before they are added to the residual stream.
    RowFactors,
    /// `[tokens, heads, head_dim]`.
    Q,
    /// `[tokens, kv_heads, head_dim]`.
    K,
    /// `[tokens, kv_heads, head_dim]`; of latent attention the latents `[tokens, kv_rank]`.
    V,
    /// `[tokens, heads, value_dim]`; before that, queries before their norm, or whole ones of latents.
    Attended,
    /// `[tokens, kv_heads, head_dim]`: keys before their norm.
    RawK,
    /// `[decodes, heads, value_dim]` f32: sums that are not normalised.
    Sums,
    /// `[decodes, heads, 2]` f32: maximum and sum of weights.
    Stats,
    /// `[tokens, intermediate]`, or of all choices of experts; with each up behind its gate where these are
    /// one matrix.
    Gate,
    /// As `Gate`.
    Up,
    /// As `Gate`: their product.
    Inner,
    /// `[tokens, experts]` f32.
    ExpertLogits,
    /// `[tokens, active]` u32.
    Chosen,
    /// `[tokens, active]` f32.
    ChoiceWeights,
    /// `[tokens * active]` u32.
    ChoiceOrder,
    /// `[experts + 1]` u32.
    ChoiceStarts,
    /// `[tokens, active, hidden]`: what experts make of a row.
    Made,
    /// `[tokens, q_rank]`.
    LowQ,
    /// `[tokens, q_rank]`, after a norm.
    LowQNormed,
    /// `[tokens, kv_rank]`: latents before their norm.
    RawLatent,
    /// `[tokens, heads, nope]`, or `[tokens, heads, v]`.
    HeadParts,
    /// `[tokens, heads, kv_rank]`: queries as long as latents.
    LiftedQ,
    /// `[heads, tokens]` u32: rows by head.
    HeadOrder,
    /// `[heads + 1]` u32: where the rows of heads begin.
    HeadStarts,
    /// `[piece, kv_rank + rope]`: the stored rows of tokens whose latents are expanded.
    PieceStored,
    /// `[piece, kv_rank]`.
    PieceLatents,
    /// `[piece, kv_rank + rope]` f32: factors of `PieceStored`, as cosines, and sines of 0.
    PieceFactors,
    /// `[piece, heads, nope + rope]`.
    PieceKeys,
    /// `[piece, heads, v]`: values.
    PieceMade,
    /// `[piece, heads, nope + rope]`: values, padded.
    PieceValues,
    /// Pages of expanded keys.
    ExpandedKeyPool,
    /// Pages of expanded values.
    ExpandedValuePool,
    /// `[rows, hidden]` f32: the rows of the residual stream that become logits.
    Picked,
    /// `[rows, vocab]` f32.
    Logits,
    /// What only layers have that the runtime does not serve.
    Unserved,
}

impl Activation {
    /// Number of buffers.
    pub const COUNT: usize = Activation::Unserved as usize + 1;
}

/// A weight of a layer, or of the model; see the runtime's weights for their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are those of the tensors")]
pub enum Weight {
    Embedding,
    LastNorm,
    LmHead,
    AttnNorm,
    Q,
    K,
    V,
    O,
    QBias,
    KBias,
    VBias,
    OBias,
    QNorm,
    KNorm,
    Sinks,
    QDown,
    QDownNorm,
    KvDown,
    KvNorm,
    /// Up-projections of latents, used where the keys and values of all tokens are expanded.
    KvUp,
    Lift,
    Lower,
    Keys,
    MlpNorm,
    AttnPostNorm,
    MlpPostNorm,
    /// Of the MLP, or of the shared experts; likewise up and down.
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
    SharedGate,
    Router,
    RouterBias,
    Correction,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    ExpertGateBias,
    ExpertDownBias,
    /// A matrix of layers that the runtime does not serve.
    Unserved,
}

impl Weight {
    /// Number of weights.
    pub const COUNT: usize = Weight::Unserved as usize + 1;

    /// Whether it belongs to no layer.
    pub fn is_of_model(self) -> bool {
        matches!(self, Weight::Embedding | Weight::LastNorm | Weight::LmHead)
    }

    /// Whether it is the bias of a projection.
    pub fn is_bias(self) -> bool {
        use Weight as W;
        let of_attention = matches!(self, W::QBias | W::KBias | W::VBias | W::OBias);
        let of_mlp = matches!(self, W::GateBias | W::UpBias | W::DownBias);
        of_attention || of_mlp || matches!(self, W::RouterBias | W::ExpertGateBias | W::ExpertDownBias)
    }

    /// Whether it is a matrix of routed experts.
    pub fn is_of_experts(self) -> bool {
        matches!(self, Weight::ExpertGate | Weight::ExpertUp | Weight::ExpertDown)
    }

    /// Whether it is another matrix that quantised formats apply to.
    pub fn is_projection(self) -> bool {
        use Weight::{Down, Gate, K, KvDown, KvUp, O, Q, QDown, Unserved, Up, V};
        matches!(self, Q | K | V | O | QDown | KvDown | KvUp | Gate | Up | Down | Unserved)
    }
}

/// Inputs and outputs of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepTable {
    /// `[tokens]` u32: tokens.
    Ids,
    /// `[tokens]` u32.
    Positions,
    /// `[positions, rotated]` f32: cosines and sines of all positions.
    Rotations,
    /// The same of a second rope.
    SecondRotations,
    /// `[tokens]` u32: the numbers of the rows.
    Rows,
    /// `[tokens]` u32: where keys and values are written.
    Slots,
    /// `[decodes, 2]` u32: the keys that decodes read.
    Ranges,
    /// Block tables of decodes.
    DecodePages,
    /// `[prefills + 1]` u32.
    QueryStart,
    /// `[prefills]` u32.
    Context,
    /// Block tables of prefills.
    PrefillPages,
    /// Slots of a piece of the latents that are expanded.
    PieceFrom(u32),
    /// Slots of the expanded keys.
    PieceTo(u32),
    /// Block tables of the keys that are made.
    ExpandedPages,
    /// `[rows]` u32: the rows that become logits.
    Picks,
    /// `[rows, 8]` u32.
    DrawParameters,
    /// `[rows + 1]` u32.
    HistoryStarts,
    /// `[history, 2]` u32.
    History,
    /// `[rows, 4]` u32: the drawn tokens.
    Drawn,
    /// `[rows, tops, 2]` u32: the best tokens.
    Tops,
}
