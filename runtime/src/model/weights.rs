//! A model's parameters in a device's memory.

use mixfleet_hal::{DType, MatrixKind, Quantised, Slice};
use mixfleet_scheduler::layers::Weight;

/// A matrix or vector on a device.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The elements on the device; of a quantised matrix its codes.
    pub slice: Slice,
    /// Stored dtype; that of words for codes.
    pub dtype: DType,
    /// How the matrix is quantised, and its arrays behind the codes.
    pub quantised: Option<(Quantised, Vec<Slice>)>,
}

impl Tensor {
    /// Elements of a dtype.
    pub fn plain(slice: Slice, dtype: DType) -> Self {
        Tensor { slice, dtype, quantised: None }
    }

    /// How it is stored.
    pub fn kind(&self) -> MatrixKind {
        match &self.quantised {
            Some((quantised, _)) => MatrixKind::Quantised(*quantised),
            None => MatrixKind::Plain(self.dtype),
        }
    }

    /// Its arrays, in the order of [`MatrixKind::parts`].
    pub fn arrays(&self) -> impl Iterator<Item = &Slice> {
        std::iter::once(&self.slice).chain(self.quantised.iter().flat_map(|(_, others)| others))
    }
}

/// One decoder layer. Matrices are `[out features, in features]`, as stored.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// RMS norm before attention, `[hidden]`.
    pub attn_norm: Tensor,
    /// Query projection, `[heads * head_dim, hidden]`; of latent attention from `q_rank` where it has one.
    pub q: Tensor,
    /// What makes keys and values.
    pub kv: KvWeights,
    /// Output projection of attention, `[hidden, heads * head_dim]`.
    pub o: Tensor,
    /// Query bias, `[heads * head_dim]`, with `qkv_bias`.
    pub q_bias: Option<Tensor>,
    /// Key bias, `[kv_heads * head_dim]`, with `qkv_bias`.
    pub k_bias: Option<Tensor>,
    /// Value bias, `[kv_heads * head_dim]`, with `qkv_bias`.
    pub v_bias: Option<Tensor>,
    /// Output bias of attention, `[hidden]`, with `o_bias`.
    pub o_bias: Option<Tensor>,
    /// Per-head norm of queries, `[head_dim]`, with `qk_norm`.
    pub q_norm: Option<Tensor>,
    /// Per-head norm of keys, `[head_dim]`, with `qk_norm`.
    pub k_norm: Option<Tensor>,
    /// RMS norm before the MLP, `[hidden]`.
    pub mlp_norm: Tensor,
    /// The MLP, or the shared expert; none where only chosen experts are.
    pub mlp: Option<MlpWeights>,
    /// Experts, where the layer has some.
    pub experts: Option<ExpertWeights>,
}

/// What makes a layer's keys and values.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one per layer")]
pub enum KvWeights {
    /// The projections of keys and of values, `[kv_heads * head_dim, hidden]` both.
    Apart([Tensor; 2]),
    /// Latent attention.
    Latent(LatentWeights),
}

/// The matrices of latent attention.
#[derive(Clone, Debug)]
pub struct LatentWeights {
    /// Projection of queries to `q_rank` numbers, `[q_rank, hidden]`, and the norm of these, if there is one.
    pub q_down: Option<(Tensor, Tensor)>,
    /// Projection to latents and the rotated part of keys, `[kv_rank + rope, hidden]`.
    pub kv_down: Tensor,
    /// RMS norm of latents, `[kv_rank]`.
    pub kv_norm: Tensor,
    /// What lifts queries to latents, `[heads, kv_rank, nope]`.
    pub lift: Tensor,
    /// What makes values of the latents that were attended to, `[heads, v, kv_rank]`.
    pub lower: Tensor,
    /// What makes keys of what is stored, `[heads, nope + rope, kv_rank + rope]`; none where prompts attend
    /// to latents.
    pub keys: Option<Tensor>,
}

/// The matrices of an MLP.
#[derive(Clone, Debug)]
pub struct MlpWeights {
    /// Gate projection, `[intermediate, hidden]`.
    pub gate: Tensor,
    /// Up projection, `[intermediate, hidden]`.
    pub up: Tensor,
    /// Down projection, `[hidden, intermediate]`.
    pub down: Tensor,
    /// Gate bias, `[intermediate]`, with `mlp_bias`.
    pub gate_bias: Option<Tensor>,
    /// Up bias, `[intermediate]`, with `mlp_bias`.
    pub up_bias: Option<Tensor>,
    /// Down bias, `[hidden]`, with `mlp_bias`.
    pub down_bias: Option<Tensor>,
}

/// The experts of a layer.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// What gives experts' logits, `[experts, hidden]`.
    pub router: Tensor,
    /// Gate projections, `[experts, intermediate, hidden]`, or each row before that of up: `[experts,
    /// intermediate, 2, hidden]`.
    pub gate: Tensor,
    /// Up projections, `[experts, intermediate, hidden]`, if they are apart.
    pub up: Option<Tensor>,
    /// Down projections, `[experts, hidden, intermediate]`.
    pub down: Tensor,
    /// What corrects the choice, `[experts]` f32, if the model has it.
    pub correction: Option<Tensor>,
    /// Biases of router, gate with up, and down; the first member of several has the last.
    pub biases: [Option<Tensor>; 3],
    /// The gate of the shared expert, `[1, hidden]`, with `shared_gate`.
    pub shared_gate: Option<Tensor>,
}

/// The parameters of a model, or of a stage of its layers, on one device.
#[derive(Clone, Debug)]
pub struct Weights {
    /// Token embedding, `[vocab, hidden]`; none without the first layers.
    pub embed: Option<Tensor>,
    /// Decoder layers, in order.
    pub layers: Vec<LayerWeights>,
    /// What follows the last layer; none without it.
    pub head: Option<HeadWeights>,
}

/// What turns the residual stream into logits.
#[derive(Clone, Debug)]
pub struct HeadWeights {
    /// Final RMS norm, `[hidden]`.
    pub norm: Tensor,
    /// LM head, `[vocab, hidden]`; the embedding itself if tied.
    pub lm_head: Tensor,
}

impl Weights {
    /// A weight of a layer, or of the model; none if it is not here.
    pub(super) fn get(&self, layer: usize, weight: Weight) -> Option<&Tensor> {
        let at = self.layers.get(layer);
        let (mlp, experts) = (|| at?.mlp.as_ref(), || at?.experts.as_ref());
        let latent = || if let KvWeights::Latent(latent) = &at?.kv { Some(latent) } else { None };
        let apart = || if let KvWeights::Apart(apart) = &at?.kv { Some(apart) } else { None };
        let bias = |which: usize| experts()?.biases[which].as_ref();
        match weight {
            Weight::Embedding => self.embed.as_ref(),
            Weight::LastNorm => Some(&self.head.as_ref()?.norm),
            Weight::LmHead => Some(&self.head.as_ref()?.lm_head),
            Weight::AttnNorm => Some(&at?.attn_norm),
            Weight::Q => Some(&at?.q),
            Weight::K => Some(&apart()?[0]),
            Weight::V => Some(&apart()?[1]),
            Weight::O => Some(&at?.o),
            Weight::QBias => at?.q_bias.as_ref(),
            Weight::KBias => at?.k_bias.as_ref(),
            Weight::VBias => at?.v_bias.as_ref(),
            Weight::OBias => at?.o_bias.as_ref(),
            Weight::QNorm => at?.q_norm.as_ref(),
            Weight::KNorm => at?.k_norm.as_ref(),
            Weight::QDown => latent()?.q_down.as_ref().map(|(down, _)| down),
            Weight::QDownNorm => latent()?.q_down.as_ref().map(|(_, norm)| norm),
            Weight::KvDown => Some(&latent()?.kv_down),
            Weight::KvNorm => Some(&latent()?.kv_norm),
            Weight::Lift => Some(&latent()?.lift),
            Weight::Lower => Some(&latent()?.lower),
            Weight::Keys => latent()?.keys.as_ref(),
            Weight::MlpNorm => Some(&at?.mlp_norm),
            Weight::Gate => Some(&mlp()?.gate),
            Weight::Up => Some(&mlp()?.up),
            Weight::Down => Some(&mlp()?.down),
            Weight::GateBias => mlp()?.gate_bias.as_ref(),
            Weight::UpBias => mlp()?.up_bias.as_ref(),
            Weight::DownBias => mlp()?.down_bias.as_ref(),
            Weight::SharedGate => experts()?.shared_gate.as_ref(),
            Weight::Router => Some(&experts()?.router),
            Weight::RouterBias => bias(0),
            Weight::Correction => experts()?.correction.as_ref(),
            Weight::ExpertGate => Some(&experts()?.gate),
            Weight::ExpertUp => experts()?.up.as_ref(),
            Weight::ExpertDown => Some(&experts()?.down),
            Weight::ExpertGateBias => bias(1),
            Weight::ExpertDownBias => bias(2),
            Weight::Sinks | Weight::KvUp | Weight::Unserved => None,
        }
    }
}
