//! A model's parameters in a device's memory.

use mixfleet_hal::{DType, Slice};

/// A matrix or vector on a device.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Where it lies.
    pub slice: Slice,
    /// Stored dtype.
    pub dtype: DType,
}

/// One decoder layer. Matrices are `[out features, in features]`, as stored.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[hidden]`
    pub attn_norm: Tensor,
    /// `[heads * head_dim, hidden]`
    pub q: Tensor,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Tensor,
    /// `[kv_heads * head_dim, hidden]`
    pub v: Tensor,
    /// `[hidden, heads * head_dim]`
    pub o: Tensor,
    /// `[heads * head_dim]`, with `qkv_bias`
    pub q_bias: Option<Tensor>,
    /// `[kv_heads * head_dim]`, with `qkv_bias`
    pub k_bias: Option<Tensor>,
    /// `[kv_heads * head_dim]`, with `qkv_bias`
    pub v_bias: Option<Tensor>,
    /// `[hidden]`, with `o_bias`
    pub o_bias: Option<Tensor>,
    /// `[head_dim]`, with `qk_norm`
    pub q_norm: Option<Tensor>,
    /// `[head_dim]`, with `qk_norm`
    pub k_norm: Option<Tensor>,
    /// `[hidden]`
    pub mlp_norm: Tensor,
    /// `[intermediate, hidden]`
    pub gate: Tensor,
    /// `[intermediate, hidden]`
    pub up: Tensor,
    /// `[hidden, intermediate]`
    pub down: Tensor,
    /// `[intermediate]`, with `mlp_bias`
    pub gate_bias: Option<Tensor>,
    /// `[intermediate]`, with `mlp_bias`
    pub up_bias: Option<Tensor>,
    /// `[hidden]`, with `mlp_bias`
    pub down_bias: Option<Tensor>,
}

/// All parameters of a model on one device.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `[vocab, hidden]`
    pub embed: Tensor,
    /// Decoder layers, in order.
    pub layers: Vec<LayerWeights>,
    /// `[hidden]`
    pub norm: Tensor,
    /// `[vocab, hidden]`; the embedding itself where tied.
    pub lm_head: Tensor,
}
