//! The slow reference for tests: a forward pass in `f64` over a whole sequence, with no cache, no device and
//! no code shared with the engine except the loader and the rope table.

use super::config::{ModelConfig, Rope};
use super::experts::{BIAS, DOWN, GATE_UP, Mixture, SHARED_GATE};
use super::latent::LatentHeads;
use super::load::Checkpoint;
use super::names;
use mixfleet_hal::cast::{to_i32, to_u32};
use mixfleet_hal::{DType, Scalar, Scoring};
use mixfleet_scheduler::cost::LatentAttention;
use mixfleet_scheduler::layers::{LayerRope, Weight};
use std::collections::HashMap;

/// A model's parameters as `f64`.
#[derive(Clone, Debug)]
pub struct Oracle {
    config: ModelConfig,
    weights: HashMap<String, Vec<f64>>,
    /// Dtype to which KV is rounded.
    kv: Option<DType>,
}

impl Oracle {
    /// Converts all parameters, to eight bytes each.
    pub fn new(checkpoint: &Checkpoint) -> Self {
        let names = names::shapes(&checkpoint.config).into_iter().map(|(name, _)| name);
        let weights = names.map(|name| {
            let values = checkpoint.values(&name).unwrap_or_default();
            (name, values)
        });
        Oracle { config: checkpoint.config.clone(), weights: weights.collect(), kv: None }
    }

    /// Keeps KV in `dtype`, and computes with the rounded values.
    #[must_use]
    pub fn with_kv(self, dtype: DType) -> Self {
        Oracle { kv: Some(dtype), ..self }
    }

    /// Logits after each token: `[tokens, vocab]`.
    ///
    /// # Panics
    /// When an id is not below the vocabulary size.
    pub fn logits(&self, ids: &[u32]) -> Vec<f64> {
        let head = if self.config.tied_embeddings { names::EMBED } else { names::LM_HEAD };
        let eps = self.config.scales.stream_eps;
        let normed = self.norm_by(&self.hidden(ids), names::NORM, eps); // [tokens, hidden]
        self.capped_logits(matmul(&normed, &self.weights[head], self.config.hidden as usize))
    }

    /// Logits after the last token: `[vocab]`. Much cheaper than all of them if the vocabulary is large.
    ///
    /// # Panics
    /// When there is no token, or an id is not below the vocabulary size.
    pub fn last_logits(&self, ids: &[u32]) -> Vec<f64> {
        let head = if self.config.tied_embeddings { names::EMBED } else { names::LM_HEAD };
        let hidden = self.config.hidden as usize;
        let x = self.hidden(ids); // [tokens, hidden]
        let eps = self.config.scales.stream_eps;
        let normed = self.norm_by(&x[x.len() - hidden..], names::NORM, eps);
        self.capped_logits(matmul(&normed, &self.weights[head], hidden))
    }

    fn capped_logits(&self, logits: Vec<f64>) -> Vec<f64> {
        let cap = self.config.scales.logit_cap;
        logits.into_iter().map(|logit| soft_capped(cap, logit)).collect()
    }

    /// The residual stream after all layers: `[tokens, hidden]`.
    fn hidden(&self, ids: &[u32]) -> Vec<f64> {
        let hidden = self.config.hidden as usize;
        let embed = &self.weights[names::EMBED]; // [vocab, hidden]
        let scale = f64::from(self.config.scales.embedding);
        let row = |&id: &u32| embed[id as usize * hidden..][..hidden].iter().map(move |v| v * scale);
        let mut x: Vec<f64> = ids.iter().flat_map(row).collect();
        for layer in 0..self.config.layers as usize {
            let attended = self.attention(layer, &x);
            add(&mut x, &self.post_norm(layer, Weight::AttnPostNorm, attended));
            let mixed = self.mlp(layer, &x);
            add(&mut x, &self.post_norm(layer, Weight::MlpPostNorm, mixed));
        }
        x
    }

    /// `x . weight^T + bias` with the layer's parameters `{part}.weight` and, if present, `{part}.bias`.
    fn linear(&self, layer: usize, part: &str, x: &[f64], inputs: usize) -> Vec<f64> {
        let name = names::in_layer(layer, part);
        let mut out = matmul(x, &self.weights[&format!("{name}.weight")], inputs);
        if let Some(bias) = self.weights.get(&format!("{name}.bias")) {
            out.chunks_mut(bias.len()).for_each(|row| add(row, bias));
        }
        out
    }

    /// RMS norm over rows of the weight's length.
    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        self.norm_by(x, name, self.config.norm_eps)
    }

    /// A norm of the residual stream before a block; the stream itself where the family has none there.
    fn block_input(&self, layer: usize, norm: Weight, x: &[f64]) -> Vec<f64> {
        match self.config.layout.norms.name(norm) {
            Some(name) => self.norm_by(x, &names::in_layer(layer, name), self.config.scales.stream_eps),
            None => x.to_vec(),
        }
    }

    /// A norm of a block's output, where the family has one.
    fn post_norm(&self, layer: usize, norm: Weight, made: Vec<f64>) -> Vec<f64> {
        match self.config.layout.norms.name(norm) {
            Some(name) => self.norm(&made, &names::in_layer(layer, name)),
            None => made,
        }
    }

    fn norm_by(&self, x: &[f64], name: &str, eps: f32) -> Vec<f64> {
        let weight = &self.weights[name];
        let eps = f64::from(eps);
        let row = |row: &[f64]| {
            let mean_square = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean_square + eps).sqrt();
            row.iter().zip(weight).map(|(v, w)| v * scale * w).collect::<Vec<_>>()
        };
        x.chunks(weight.len()).flat_map(row).collect()
    }

    fn mlp(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let x = self.block_input(layer, Weight::MlpNorm, x);
        match self.config.experts_of(layer) {
            None => self.swiglu(layer, "mlp", ["gate_proj", "up_proj", "down_proj"], &x),
            Some(experts) => self.mixture(layer, experts, &x),
        }
    }

    /// `down(silu(gate(x)) * up(x))` with the layer's matrices of these names.
    fn swiglu(&self, layer: usize, stem: &str, names: [&str; 3], x: &[f64]) -> Vec<f64> {
        let hidden = self.config.hidden as usize;
        let [gate, up, down] = names.map(|name| format!("{stem}.{name}"));
        let gate = self.linear(layer, &gate, x, hidden); // [tokens, inner]
        let up = self.linear(layer, &up, x, hidden);
        let function = if self.config.style.gelu { gelu } else { silu };
        let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| function(*g) * u).collect();
        self.linear(layer, &down, &inner, inner.len() / (x.len() / hidden))
    }

    /// The experts that each token chooses, and the shared one.
    fn mixture(&self, layer: usize, experts: &Mixture, x: &[f64]) -> Vec<f64> {
        let hidden = self.config.hidden as usize;
        let names = experts.names.matrices();
        let mut out = Vec::with_capacity(x.len());
        for token in x.chunks(hidden) {
            let logits = self.linear(layer, experts.names.router(), token, hidden);
            let scores = match experts.routing.scoring {
                Scoring::Softmax => softmax(logits),
                Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
            };
            let order = self.chosen(layer, experts, &scores);
            let sum: f64 = order.iter().map(|&expert| scores[expert]).sum();
            let mut row = vec![0.0; hidden];
            for expert in order {
                let weight = scores[expert] / if experts.routing.normalise { sum } else { 1.0 };
                let weight = weight * f64::from(experts.routing.scale.0);
                let made = match experts.clamped {
                    Some(clamp) => self.clamped(layer, (expert, experts.intermediate as usize), clamp, token),
                    None => {
                        let stem = format!("{}.{expert}", experts.names.experts());
                        self.swiglu(layer, &stem, names, token)
                    }
                };
                row.iter_mut().zip(made).for_each(|(to, made)| *to += weight * made);
            }
            if experts.shared > 0 {
                let stem = experts.names.shared();
                let made = self.swiglu(layer, stem, ["gate_proj", "up_proj", "down_proj"], token);
                let weight = match experts.shared_gate {
                    true => 1.0 / (1.0 + (-self.linear(layer, SHARED_GATE, token, hidden)[0]).exp()),
                    false => 1.0,
                };
                row.iter_mut().zip(made).for_each(|(to, made)| *to += weight * made);
            }
            out.extend(row);
        }
        out
    }

    /// The experts of the best scores, or of the best corrected ones in the best groups.
    fn chosen(&self, layer: usize, experts: &Mixture, scores: &[f64]) -> Vec<usize> {
        let routing = &experts.routing;
        let mut keys = scores.to_vec();
        if experts.correction {
            add(&mut keys, &self.weights[&names::in_layer(layer, experts.names.correction())]);
        }
        let best = |mut order: Vec<usize>, of: &dyn Fn(usize) -> f64, count: u32| {
            order.sort_by(|&a, &b| of(b).total_cmp(&of(a)));
            order.truncate(count as usize);
            order
        };
        let size = keys.len() / routing.groups as usize;
        let goodness = |group: usize| {
            let own: Vec<usize> = (group * size..(group + 1) * size).collect();
            best(own, &|expert| keys[expert], routing.group_best).iter().map(|&expert| keys[expert]).sum()
        };
        let groups = best((0..routing.groups as usize).collect(), &goodness, routing.groups_active);
        let open = groups.iter().flat_map(|group| group * size..(group + 1) * size).collect();
        best(open, &|expert| keys[expert], routing.active)
    }

    /// The activation of an expert with a clamped function.
    fn clamped(
        &self,
        layer: usize,
        (expert, inner): (usize, usize),
        [alpha, limit]: [Scalar; 2],
        token: &[f64],
    ) -> Vec<f64> {
        let (alpha, limit) = (f64::from(alpha.0), f64::from(limit.0));
        let product = |matrix: &str, x: &[f64], outputs: usize| {
            let all = names::in_layer(layer, &format!("mlp.experts.{matrix}"));
            let weight = &self.weights[&all][expert * outputs * x.len()..][..outputs * x.len()];
            let mut out = matmul(x, weight, x.len());
            add(&mut out, &self.weights[&(all + BIAS)][expert * outputs..][..outputs]);
            out
        };
        let both = product(GATE_UP, token, 2 * inner);
        let one = |pair: &[f64]| {
            let (gate, up) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
            gate / (1.0 + (-alpha * gate).exp()) * (up + 1.0)
        };
        let inner: Vec<f64> = both.chunks(2).map(one).collect();
        product(DOWN, &inner, token.len())
    }

    fn attention(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let c = &self.config;
        if let Some(latent) = &c.latent {
            return self.latent_attention(layer, latent, x);
        }
        let (hidden, head_dim) = (c.hidden as usize, c.head_dim as usize);
        let (heads, kv_heads) = (c.heads as usize, c.kv_heads as usize);
        let tokens = x.len() / hidden;
        let x = self.block_input(layer, Weight::AttnNorm, x);
        let mut q = self.linear(layer, "self_attn.q_proj", &x, hidden); // [tokens, heads, head_dim]
        let mut k = self.linear(layer, "self_attn.k_proj", &x, hidden); // [tokens, kv_heads, head_dim]
        let mut v = self.linear(layer, "self_attn.v_proj", &x, hidden);
        if c.qk_norm {
            q = self.norm(&q, &names::in_layer(layer, "self_attn.q_norm.weight"));
            k = self.norm(&k, &names::in_layer(layer, "self_attn.k_norm.weight"));
        }
        let rope = match c.style.rope_of(layer) {
            LayerRope::Main => Some(&c.rope),
            LayerRope::Second => c.second_rope.as_ref(),
            LayerRope::Absent => None,
        };
        if let Some(rope) = rope {
            self.rotate(rope, &mut q, heads);
            self.rotate(rope, &mut k, kv_heads);
        }
        if let Some(dtype) = self.kv {
            k.chunks_mut(head_dim).chain(v.chunks_mut(head_dim)).for_each(|head| keep(dtype, head));
        }

        let mut out = vec![0.0; tokens * heads * head_dim]; // [tokens, heads, head_dim]
        for token in 0..tokens {
            let first = c.windows[layer].map_or(0, |window| (token + 1).saturating_sub(window as usize));
            for head in 0..heads {
                let query = head_of(&q, head_dim, heads, token, head);
                let kv_head = head / (heads / kv_heads);
                let score = |t| {
                    let key = head_of(&k, head_dim, kv_heads, t, kv_head);
                    soft_capped(c.scales.score_cap, dot(query, key) / (head_dim as f64).sqrt())
                };
                let mut scores: Vec<f64> = (first..=token).map(score).collect();
                scores.extend(c.sinks_in(layer).get(head).map(|sink| f64::from(*sink)));
                let weights = softmax(scores); // a sink has no value
                let place = (token * heads + head) * head_dim;
                for (t, weight) in (first..=token).zip(weights) {
                    let value = head_of(&v, head_dim, kv_heads, t, kv_head);
                    out[place..place + head_dim].iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
        self.linear(layer, "self_attn.o_proj", &out, heads * head_dim)
    }

    /// Latent attention by definition: every head's keys and values are expanded from each token's latent.
    fn latent_attention(&self, layer: usize, latent: &LatentHeads, x: &[f64]) -> Vec<f64> {
        let c = &self.config;
        let (hidden, heads) = (c.hidden as usize, c.heads as usize);
        let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = latent.lengths;
        let [q_rank, kv_rank, nope, rope, v] = [q_rank, kv_rank, nope, rope, v].map(|n| n as usize);
        let of = |part: &str| format!("self_attn.{part}");
        let x = self.block_input(layer, Weight::AttnNorm, x);
        let mut q = match q_rank {
            0 => self.linear(layer, &of("q_proj"), &x, hidden),
            _ => {
                let low = self.linear(layer, &of("q_a_proj"), &x, hidden);
                let low = self.norm(&low, &names::in_layer(layer, &of("q_a_layernorm.weight")));
                self.linear(layer, &of("q_b_proj"), &low, q_rank)
            }
        }; // [tokens, heads, nope + rope]
        let down = self.linear(layer, &of("kv_a_proj_with_mqa"), &x, hidden);
        let (mut latents, mut turned) = (Vec::new(), Vec::new());
        for row in down.chunks(kv_rank + rope) {
            latents.extend_from_slice(&row[..kv_rank]);
            turned.extend_from_slice(&row[kv_rank..]);
        }
        let mut latents = self.norm(&latents, &names::in_layer(layer, &of("kv_a_layernorm.weight")));
        for (position, token) in q.chunks_mut(heads * (nope + rope)).enumerate() {
            token.chunks_mut(nope + rope).for_each(|head| self.turn_neighbours(&mut head[nope..], position));
        }
        for (position, token) in turned.chunks_mut(rope).enumerate() {
            self.turn_neighbours(token, position);
        }
        if let Some(dtype) = self.kv {
            latents.chunks_mut(kv_rank).chain(turned.chunks_mut(rope)).for_each(|part| keep(dtype, part));
        }
        let up = self.linear(layer, &of("kv_b_proj"), &latents, kv_rank); // [tokens, heads, nope + v]
        let tokens = x.len() / hidden;
        let mut out = vec![0.0; tokens * heads * v]; // [tokens, heads, v]
        for token in 0..tokens {
            for head in 0..heads {
                let query = head_of(&q, nope + rope, heads, token, head);
                let score = |t: usize| {
                    let key = &head_of(&up, nope + v, heads, t, head)[..nope];
                    let turned = &turned[t * rope..][..rope];
                    (dot(&query[..nope], key) + dot(&query[nope..], turned)) * f64::from(latent.scale.0)
                };
                let weights = softmax((0..=token).map(score).collect());
                let place = (token * heads + head) * v;
                for (t, weight) in weights.into_iter().enumerate() {
                    let value = &head_of(&up, nope + v, heads, t, head)[nope..];
                    out[place..place + v].iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
        self.linear(layer, &of("o_proj"), &out, heads * v)
    }

    /// Rotary embedding of adjacent pairs at a position.
    fn turn_neighbours(&self, x: &mut [f64], position: usize) {
        let table = self.config.rope.table(&[to_u32(position)]);
        let half = x.len() / 2;
        for (i, pair) in x.chunks_exact_mut(2).enumerate() {
            let (cos, sin) = (f64::from(table[i]), f64::from(table[half + i]));
            let (a, b) = (pair[0], pair[1]);
            (pair[0], pair[1]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }

    /// Rotary embedding of `x [tokens, heads, head_dim]`, or of the first part of each head, with token t at
    /// position t.
    fn rotate(&self, rope: &Rope, x: &mut [f64], heads: usize) {
        let head_dim = self.config.head_dim as usize;
        for (position, token) in x.chunks_mut(heads * head_dim).enumerate() {
            let table = rope.table(&[to_u32(position)]); // [2 * half]
            let half = table.len() / 2;
            for head in token.chunks_mut(head_dim) {
                for i in 0..half {
                    let (cos, sin) = (f64::from(table[i]), f64::from(table[half + i]));
                    let (at, other) =
                        if self.config.interleaved { (2 * i, 2 * i + 1) } else { (i, half + i) };
                    let (a, b) = (head[at], head[other]);
                    (head[at], head[other]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
        }
    }
}

/// A number with a soft cap, if there is one.
fn soft_capped(cap: Option<f32>, x: f64) -> f64 {
    cap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh())
}

/// Rounds a head to the values of `dtype`: for eight bits, to codes times the least power of two at which the
/// largest magnitude does not exceed the largest code.
fn keep(dtype: DType, head: &mut [f64]) {
    let largest = head.iter().fold(0.0f64, |largest, v| largest.max(v.abs()));
    let code = if dtype == DType::I8 { 127.0 } else { 448.0 };
    let scale = match dtype.is_scaled() && largest > 0.0 {
        true => f64::powi(2.0, to_i32((largest / code).log2().ceil())),
        false => 1.0,
    };
    let mut bytes = Vec::new();
    head.iter().for_each(|v| dtype.encode(v / scale, &mut bytes));
    head.iter_mut().zip(dtype.decode(&bytes)).for_each(|(v, kept)| *v = kept * scale);
}

/// The vector of one head in `m [tokens, heads, head_dim]`.
fn head_of(m: &[f64], head_dim: usize, heads: usize, token: usize, head: usize) -> &[f64] {
    &m[(token * heads + head) * head_dim..][..head_dim]
}

/// `x [rows, inputs] . weight [outputs, inputs]^T`: `[rows, outputs]`.
fn matmul(x: &[f64], weight: &[f64], inputs: usize) -> Vec<f64> {
    let mut products = Vec::with_capacity(x.len() / inputs * (weight.len() / inputs));
    for row in x.chunks(inputs) {
        for w in weight.chunks(inputs) {
            products.push(dot(row, w));
        }
    }
    products
}

/// Indexed instead of iterated: test builds do not inline iterator calls.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (mut sum, mut at) = (0.0, 0);
    while at < a.len() {
        sum += a[at] * b[at];
        at += 1;
    }
    sum
}

fn add(to: &mut [f64], other: &[f64]) {
    to.iter_mut().zip(other).for_each(|(t, o)| *t += o);
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// GELU in the tanh form.
fn gelu(x: f64) -> f64 {
    let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + z.tanh())
}

fn softmax(scores: Vec<f64>) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

#[cfg(test)]
#[path = "oracle_tests.rs"]
mod tests;
