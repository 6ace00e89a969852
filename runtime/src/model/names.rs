//! The tensors of a model: names in a checkpoint, shapes, and the part of each member of several devices.

use super::config::ModelConfig;
use super::experts::{BIAS, DOWN, ExpertNames, GATE_UP, Mixture, SHARED_GATE};
use mixfleet_scheduler::cost::{Experts, LatentAttention, MemberShare};
use mixfleet_scheduler::layers::Weight;
use std::ops::Range;

pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const NORM: &str = "model.norm.weight";
pub(super) const LM_HEAD: &str = "lm_head.weight";
/// The sinks of attention, within a layer. They belong to the configuration, and are not a tensor on a
/// device.
pub(super) const SINKS: &str = "self_attn.sinks";

/// The name of a layer's tensor.
pub(super) fn in_layer(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// A tensor of a checkpoint, and its role in the model.
#[derive(Clone, Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// The tensor's layer, if it belongs to one.
    pub(super) layer: Option<u32>,
    /// The weight that it forms, or from which others are derived: lift, lower and keys of up-projections.
    pub(super) weight: Weight,
    /// The tensor's expert, where the matrices of several are stored apart and form one weight.
    pub(super) expert: Option<u32>,
}

/// The tensors of a model, in the order of the forward pass.
struct TensorPlan {
    all: Vec<PlannedTensor>,
    layer: Option<u32>,
}

impl TensorPlan {
    fn add(&mut self, weight: Weight, part: &str, shape: &[u64]) {
        self.add_of(None, weight, part, shape);
    }

    fn add_of(&mut self, expert: Option<u32>, weight: Weight, part: &str, shape: &[u64]) {
        let name = self.layer.map_or_else(|| part.to_owned(), |layer| in_layer(layer as usize, part));
        self.all.push(PlannedTensor { name, shape: shape.to_vec(), layer: self.layer, weight, expert });
    }

    /// A norm of the residual stream, or of an addend to it, if layers have it.
    fn add_norm(&mut self, config: &ModelConfig, norm: Weight) {
        if let Some(name) = config.layout.norms.name(norm) {
            self.add(norm, name, &[config.hidden.into()]);
        }
    }

    fn add_attention(&mut self, config: &ModelConfig) {
        let n = |count: u32| u64::from(count);
        let (hidden, heads, head_dim) = (n(config.hidden), n(config.heads), n(config.head_dim));
        let (q, kv) = (heads * head_dim, n(config.kv_heads) * head_dim);
        if let Some(latent) = &config.latent {
            latent.shapes(hidden, heads, &mut |weight, part, shape| self.add(weight, part, shape));
            self.add(Weight::O, "self_attn.o_proj.weight", &[hidden, heads * n(latent.lengths.v)]);
        } else {
            self.add(Weight::Q, "self_attn.q_proj.weight", &[q, hidden]);
            self.add(Weight::K, "self_attn.k_proj.weight", &[kv, hidden]);
            self.add(Weight::V, "self_attn.v_proj.weight", &[kv, hidden]);
            self.add(Weight::O, "self_attn.o_proj.weight", &[hidden, q]);
        }
        if config.qkv_bias {
            self.add(Weight::QBias, "self_attn.q_proj.bias", &[q]);
            self.add(Weight::KBias, "self_attn.k_proj.bias", &[kv]);
            self.add(Weight::VBias, "self_attn.v_proj.bias", &[kv]);
        }
        if config.o_bias {
            self.add(Weight::OBias, "self_attn.o_proj.bias", &[hidden]);
        }
        if config.sinks.is_some() {
            self.add(Weight::Sinks, SINKS, &[heads]);
        }
        if config.qk_norm {
            let (q, kv) = if config.style.whole_qk_norm { (q, kv) } else { (head_dim, head_dim) };
            self.add(Weight::QNorm, "self_attn.q_norm.weight", &[q]);
            self.add(Weight::KNorm, "self_attn.k_norm.weight", &[kv]);
        }
    }

    /// An MLP under this name, with an inner layer of this length.
    fn add_mlp(&mut self, stem: &str, [hidden, inner]: [u64; 2], has_biases: bool) {
        self.add(Weight::Gate, &format!("{stem}.gate_proj.weight"), &[inner, hidden]);
        self.add(Weight::Up, &format!("{stem}.up_proj.weight"), &[inner, hidden]);
        self.add(Weight::Down, &format!("{stem}.down_proj.weight"), &[hidden, inner]);
        if has_biases {
            self.add(Weight::GateBias, &format!("{stem}.gate_proj.bias"), &[inner]);
            self.add(Weight::UpBias, &format!("{stem}.up_proj.bias"), &[inner]);
            self.add(Weight::DownBias, &format!("{stem}.down_proj.bias"), &[hidden]);
        }
    }

    /// A layer's experts: all matrices of a kind in sequence.
    fn add_experts(&mut self, experts: &Mixture, hidden: u64) {
        let (names, count) = (experts.names, experts.routing.experts);
        let (all, inner, shared) = (u64::from(count), experts.intermediate.into(), experts.shared.into());
        self.add(Weight::Router, &format!("{}.weight", names.router()), &[all, hidden]);
        if names == ExpertNames::Fused {
            let at = names.experts();
            self.add(Weight::RouterBias, &format!("{}.bias", names.router()), &[all]);
            for (matrix, weight, bias, [rows, columns]) in [
                (GATE_UP, Weight::ExpertGate, Weight::ExpertGateBias, [2 * inner, hidden]),
                (DOWN, Weight::ExpertDown, Weight::ExpertDownBias, [hidden, inner]),
            ] {
                self.add(weight, &format!("{at}.{matrix}"), &[all * rows, columns]);
                self.add(bias, &format!("{at}.{matrix}{BIAS}"), &[all, rows]);
            }
            return;
        }
        if experts.correction {
            self.add(Weight::Correction, names.correction(), &[all]);
        }
        let [gate, up, down] = names.matrices();
        for (matrix, weight, shape) in [
            (gate, Weight::ExpertGate, [inner, hidden]),
            (up, Weight::ExpertUp, [inner, hidden]),
            (down, Weight::ExpertDown, [hidden, inner]),
        ] {
            for expert in 0..count {
                let part = format!("{}.{expert}.{matrix}.weight", names.experts());
                self.add_of(Some(expert), weight, &part, &shape);
            }
        }
        if shared > 0 {
            self.add_mlp(names.shared(), [hidden, shared], false);
        }
        if experts.shared_gate {
            self.add(Weight::SharedGate, &format!("{SHARED_GATE}.weight"), &[1, hidden]);
        }
    }
}

/// Every tensor that a model of this shape has, in the order of the forward pass.
pub(super) fn tensors(config: &ModelConfig) -> Vec<PlannedTensor> {
    let [hidden, vocab, inner] = [config.hidden, config.vocab, config.intermediate].map(u64::from);
    let mut plan = TensorPlan { all: Vec::new(), layer: None };
    plan.add(Weight::Embedding, EMBED, &[vocab, hidden]);
    for layer in 0..config.layers {
        plan.layer = Some(layer);
        plan.add_norm(config, Weight::AttnNorm);
        plan.add_attention(config);
        plan.add_norm(config, Weight::AttnPostNorm);
        plan.add_norm(config, Weight::MlpNorm);
        match config.experts_of(layer as usize) {
            Some(experts) => plan.add_experts(experts, hidden),
            None => plan.add_mlp("mlp", [hidden, inner], config.mlp_bias),
        }
        plan.add_norm(config, Weight::MlpPostNorm);
    }
    plan.layer = None;
    plan.add(Weight::LastNorm, NORM, &[hidden]);
    if !config.tied_embeddings {
        plan.all.push(lm_head(config));
    }
    plan.all
}

/// The LM head, which is not a tensor of its own if tied to the embedding.
pub(super) fn lm_head(config: &ModelConfig) -> PlannedTensor {
    let (name, shape) = (LM_HEAD.to_owned(), vec![config.vocab.into(), config.hidden.into()]);
    PlannedTensor { name, shape, layer: None, weight: Weight::LmHead, expert: None }
}

/// Name and shape of every tensor.
#[cfg(any(test, feature = "testing"))]
pub(super) fn shapes(config: &ModelConfig) -> Vec<(String, Vec<u64>)> {
    tensors(config).into_iter().map(|tensor| (tensor.name, tensor.shape)).collect()
}

/// A part of a tensor `[rows, columns]`; a vector is a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Whole,
    Rows(Range<u64>),
    Columns(Range<u64>),
    /// These rows of each of the equal matrices that form the tensor, with their number of rows.
    RowsOfEach(Range<u64>, u64),
}

/// A member's part of a tensor; none if the part is empty.
pub(super) fn cut(config: &ModelConfig, share: &MemberShare, tensor: &PlannedTensor) -> Option<Cut> {
    let PlannedTensor { layer, weight, expert, .. } = *tensor;
    let is_elsewhere = layer.is_some_and(|layer| !share.layers.contains(&layer))
        || expert.is_some_and(|expert| !share.experts.contains(&expert));
    if is_elsewhere {
        return None;
    }
    let range = |of: &Range<u32>, each: u32| {
        let each = u64::from(each);
        u64::from(of.start) * each..u64::from(of.end) * each
    };
    let part = |cut: fn(Range<u64>) -> Cut, of: &Range<u32>, all: u32, each: u32| match *of == (0..all) {
        true => Cut::Whole,
        false => cut(range(of, each)),
    };
    let (heads, kv_heads) = (config.heads, config.kv_heads);
    // rows of a head's query, of the expansion of a latent to its key and value, and of its value
    let (of_query, of_latent, of_value) = match config.latent.as_ref().map(|latent| latent.lengths) {
        Some(LatentAttention { nope, rope, v, .. }) => (nope + rope, nope + v, v),
        None => (config.head_dim, 0, config.head_dim),
    };
    let experts = layer.and_then(|layer| config.experts_of(layer as usize));
    let is_of_experts =
        weight.is_of_experts() || matches!(weight, Weight::ExpertGateBias | Weight::ExpertDownBias);
    // the inner layer of the expert or MLP, and the share of it
    let whole = config.intermediate;
    let (part_of_inner, inner) = match experts {
        Some(experts) if is_of_experts => {
            (share.inner_of_experts(experts.intermediate, whole), experts.intermediate)
        }
        Some(experts) => (Experts::share(experts.shared, &share.inner, whole), experts.shared),
        None => (share.inner.clone(), whole),
    };
    if is_of_experts && expert.is_none() {
        return cut_fused(weight, share, (&part_of_inner, inner), config.hidden);
    }
    Some(match weight {
        Weight::Sinks => return None,
        Weight::Q | Weight::QBias => part(Cut::Rows, &share.heads, heads, of_query),
        Weight::KvUp => part(Cut::Rows, &share.heads, heads, of_latent),
        Weight::K | Weight::V | Weight::KBias | Weight::VBias => {
            part(Cut::Rows, &share.kv_heads, kv_heads, config.head_dim)
        }
        Weight::Gate | Weight::Up | Weight::GateBias | Weight::UpBias => {
            part(Cut::Rows, &part_of_inner, inner, 1)
        }
        Weight::ExpertGate | Weight::ExpertUp => part(Cut::Rows, &part_of_inner, inner, 1),
        // added by one member only
        Weight::OBias | Weight::DownBias => return share.is_first().then_some(Cut::Whole),
        Weight::O => part(Cut::Columns, &share.heads, heads, of_value),
        Weight::Down | Weight::ExpertDown => part(Cut::Columns, &part_of_inner, inner, 1),
        Weight::Embedding if !share.embeds() => return None,
        Weight::LastNorm | Weight::LmHead if !share.has_head() => return None,
        Weight::LmHead => part(Cut::Rows, &share.vocab, config.vocab, 1),
        _ => Cut::Whole,
    })
}

/// A member's part of a tensor of all experts together.
fn cut_fused(
    weight: Weight,
    share: &MemberShare,
    (part_of_inner, inner): (&Range<u32>, u32),
    hidden: u32,
) -> Option<Cut> {
    let range = |of: &Range<u32>, each: u32| {
        u64::from(of.start) * u64::from(each)..u64::from(of.end) * u64::from(each)
    };
    if share.has_whole_experts() {
        // rows of an expert's matrix; its biases are a row
        let rows = match weight {
            Weight::ExpertGate => 2 * inner,
            Weight::ExpertDown => hidden,
            _ => 1,
        };
        return Some(Cut::Rows(range(&share.experts, rows)));
    }
    let gates = range(part_of_inner, 2);
    Some(match weight {
        Weight::ExpertDownBias => return share.is_first().then_some(Cut::Whole),
        _ if *part_of_inner == (0..inner) => Cut::Whole,
        Weight::ExpertDown => Cut::Columns(range(part_of_inner, 1)),
        Weight::ExpertGateBias => Cut::Columns(gates),
        _ => Cut::RowsOfEach(gates, 2 * u64::from(inner)),
    })
}
