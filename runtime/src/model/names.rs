//! The tensors of a model: their names in a checkpoint, their shapes, and what a member of several devices
//! has of them.

use super::config::ModelConfig;
use super::experts::{BIAS, CORRECTION, DOWN, ExpertNames, GATE_UP, Mixture, SHARED, SHARED_GATE, packed};
use mixfleet_scheduler::cost::{Experts, LatentAttention, MemberShare};
use std::ops::Range;

pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const NORM: &str = "model.norm.weight";
pub(super) const LM_HEAD: &str = "lm_head.weight";
/// The sinks of attention, within a layer. They are a part of the configuration, and no tensor on a device.
pub(super) const SINKS: &str = "self_attn.sinks";

/// The name of a layer's tensor.
pub(super) fn in_layer(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// Name and shape of every tensor that a model of this shape has, in the order of the forward pass.
pub(super) fn shapes(config: &ModelConfig) -> Vec<(String, Vec<u64>)> {
    let wide = |n: u32| u64::from(n);
    let (hidden, vocab, inner) = (wide(config.hidden), wide(config.vocab), wide(config.intermediate));
    let head_dim = wide(config.head_dim);
    let (q, kv) = (wide(config.heads) * head_dim, wide(config.kv_heads) * head_dim);

    let mut all = vec![(EMBED.to_owned(), vec![vocab, hidden])];
    for layer in 0..config.layers as usize {
        let mut add = |part: &str, shape: &[u64]| all.push((in_layer(layer, part), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        if let Some(latent) = &config.latent {
            latent.shapes((hidden, wide(config.heads)), &mut add);
            add("self_attn.o_proj.weight", &[hidden, wide(config.heads) * wide(latent.lengths.v)]);
        } else {
            add("self_attn.q_proj.weight", &[q, hidden]);
            add("self_attn.k_proj.weight", &[kv, hidden]);
            add("self_attn.v_proj.weight", &[kv, hidden]);
            add("self_attn.o_proj.weight", &[hidden, q]);
        }
        if config.qkv_bias {
            add("self_attn.q_proj.bias", &[q]);
            add("self_attn.k_proj.bias", &[kv]);
            add("self_attn.v_proj.bias", &[kv]);
        }
        if config.o_bias {
            add("self_attn.o_proj.bias", &[hidden]);
        }
        if config.sinks.is_some() {
            add(SINKS, &[wide(config.heads)]);
        }
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        add("post_attention_layernorm.weight", &[hidden]);
        if let Some(experts) = config.experts_of(layer) {
            add_experts(experts, hidden, &mut add);
            continue;
        }
        add("mlp.gate_proj.weight", &[inner, hidden]);
        add("mlp.up_proj.weight", &[inner, hidden]);
        add("mlp.down_proj.weight", &[hidden, inner]);
        if config.mlp_bias {
            add("mlp.gate_proj.bias", &[inner]);
            add("mlp.up_proj.bias", &[inner]);
            add("mlp.down_proj.bias", &[hidden]);
        }
    }
    all.push((NORM.to_owned(), vec![hidden]));
    if !config.tied_embeddings {
        all.push((LM_HEAD.to_owned(), vec![vocab, hidden]));
    }
    all
}

/// The tensors of a layer's experts: all matrices of a kind one after the other.
fn add_experts(experts: &Mixture, hidden: u64, add: &mut dyn FnMut(&str, &[u64])) {
    let (count, inner, shared) =
        (experts.routing.experts, u64::from(experts.intermediate), u64::from(experts.shared));
    add(&format!("{}.weight", experts.names.router()), &[u64::from(count), hidden]);
    if experts.names == ExpertNames::Fused {
        let (at, count) = (experts.names.experts(), u64::from(count));
        add(&format!("{}.bias", experts.names.router()), &[count]);
        for (matrix, rows, columns) in [(GATE_UP, 2 * inner, hidden), (DOWN, hidden, inner)] {
            add(&format!("{at}.{matrix}"), &[count * rows, columns]);
            add(&format!("{at}.{matrix}{BIAS}"), &[count, rows]);
        }
        return;
    }
    if experts.correction {
        add(CORRECTION, &[u64::from(count)]);
    }
    let [gate, up, down] = experts.names.matrices();
    for (matrix, shape) in [(gate, [inner, hidden]), (up, [inner, hidden]), (down, [hidden, inner])] {
        for expert in 0..count {
            add(&format!("{}.{expert}.{matrix}.weight", experts.names.experts()), &shape);
        }
    }
    if shared > 0 {
        let stem = experts.names.shared();
        add(&format!("{stem}.gate_proj.weight"), &[shared, hidden]);
        add(&format!("{stem}.up_proj.weight"), &[shared, hidden]);
        add(&format!("{stem}.down_proj.weight"), &[hidden, shared]);
    }
    if experts.shared_gate {
        add(&format!("{SHARED_GATE}.weight"), &[1, hidden]);
    }
}

/// A part of a tensor `[rows, columns]`; a vector is a column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Whole,
    Rows(Range<u64>),
    Columns(Range<u64>),
    /// These rows of each of the matrices that it consists of, which have so many rows.
    RowsOfEach(Range<u64>, u64),
}

/// The layer of a tensor, by its name.
fn layer_of(name: &str) -> Option<u32> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// A member's part of a tensor; none if it has nothing of it.
pub(super) fn cut(config: &ModelConfig, share: &MemberShare, name: &str) -> Option<Cut> {
    if layer_of(name).is_some_and(|layer| !share.layers.contains(&layer)) {
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
    let (heads, kv_heads, inner) = (config.heads, config.kv_heads, config.intermediate);
    // rows of a head's query, of what makes its key and value of a latent, and of its value
    let (of_query, of_latent, of_value) = match config.latent.as_ref().map(|latent| latent.lengths) {
        Some(LatentAttention { nope, rope, v, .. }) => (nope + rope, nope + v, v),
        None => (config.head_dim, 0, config.head_dim),
    };
    // the inner layer of what it belongs to, and the share of it
    if packed(name).is_some_and(|(_, expert)| !share.experts.contains(&expert)) {
        return None;
    }
    let of_expert = |length: u32| (share.inner_of_experts(length, inner), length);
    let (part_of_inner, inner) = match &config.experts {
        Some(experts) if packed(name).is_some() || experts.names == ExpertNames::Fused => {
            of_expert(experts.intermediate)
        }
        Some(experts) if name.contains(SHARED) => {
            (Experts::share(experts.shared, &share.inner, inner), experts.shared)
        }
        _ => (share.inner.clone(), inner),
    };
    let (stem, kind) = name.rsplit_once('.').unwrap_or((name, ""));
    let module = stem.rsplit('.').next().unwrap_or(stem);
    if module == "experts" && share.has_whole_experts() {
        // rows of an expert's matrix; its biases are a row
        let rows = match kind {
            GATE_UP => 2 * inner,
            DOWN => config.hidden,
            _ => 1,
        };
        return Some(Cut::Rows(range(&share.experts, rows)));
    }
    if module == "experts" {
        let all = part_of_inner == (0..inner);
        let gates = range(&part_of_inner, 2);
        return Some(match kind.strip_suffix(BIAS).unwrap_or(kind) {
            DOWN if kind.ends_with(BIAS) => return share.is_first().then_some(Cut::Whole),
            _ if all => Cut::Whole,
            DOWN => Cut::Columns(range(&part_of_inner, 1)),
            _ if kind.ends_with(BIAS) => Cut::Columns(gates),
            _ => Cut::RowsOfEach(gates, 2 * u64::from(inner)),
        });
    }
    Some(match (module, kind) {
        ("self_attn", "sinks") => return None,
        ("q_proj" | "q_b_proj", _) => part(Cut::Rows, &share.heads, heads, of_query),
        ("kv_b_proj", _) => part(Cut::Rows, &share.heads, heads, of_latent),
        ("k_proj" | "v_proj", _) => part(Cut::Rows, &share.kv_heads, kv_heads, config.head_dim),
        ("gate_proj" | "up_proj" | "w1" | "w3", _) => part(Cut::Rows, &part_of_inner, inner, 1),
        // it is added once
        ("o_proj" | "down_proj", "bias") => return share.is_first().then_some(Cut::Whole),
        ("o_proj", _) => part(Cut::Columns, &share.heads, heads, of_value),
        ("down_proj" | "w2", _) => part(Cut::Columns, &part_of_inner, inner, 1),
        ("embed_tokens", _) if !share.embeds() => return None,
        ("norm" | "lm_head", _) if !share.has_head() => return None,
        ("lm_head", _) => part(Cut::Rows, &share.vocab, config.vocab, 1),
        _ => Cut::Whole,
    })
}
