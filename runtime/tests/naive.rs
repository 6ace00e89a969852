//! A second float64 forward pass, with which the oracle of all devices is compared. It shares nothing with
//! it: one token at a time, from `config.json` and tensors as they are written.

use mixfleet_runtime::model::variants::{styled_variants, tiny_variants};
use mixfleet_runtime::model::{Oracle, RandomCheckpoint};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::f64::consts::{PI, TAU};

/// Names of an MLP's matrices, in the order of their use.
const MATRICES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Families whose layers have experts, unless the configuration excludes some.
const MIXED: [&str; 7] =
    ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "minimax_m2", "granitemoeshared"];

struct Naive<'a> {
    config: &'a Map<String, Value>,
    tensors: HashMap<String, Vec<f64>>,
    /// By layer, a row for each previous token.
    keys: Vec<Vec<Vec<f64>>>,
    values: Vec<Vec<Vec<f64>>>,
}

impl<'a> Naive<'a> {
    fn new(random: &'a RandomCheckpoint) -> Self {
        let config = &random.config;
        let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        let stored = random.tensors().unwrap().into_iter();
        let tensors = stored.map(|tensor| (tensor.name, tensor.dtype.decode(&tensor.bytes))).collect();
        Naive { config, tensors, keys: vec![Vec::new(); layers], values: vec![Vec::new(); layers] }
    }

    fn tensor(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn number(&self, field: &str) -> Option<f64> {
        self.config.get(field).and_then(Value::as_f64)
    }

    fn count(&self, field: &str) -> usize {
        self.number(field).unwrap_or_else(|| panic!("{field}")) as usize
    }

    fn says(&self, field: &str) -> bool {
        self.config.get(field).and_then(Value::as_bool).unwrap_or(false)
    }

    fn is(&self, family: &str) -> bool {
        self.config["model_type"] == family
    }

    fn begins(&self, family: &str) -> bool {
        self.config["model_type"].as_str().unwrap().starts_with(family)
    }

    fn heads(&self) -> usize {
        self.count("num_attention_heads")
    }

    fn kv_heads(&self) -> usize {
        self.number("num_key_value_heads").map_or(self.heads(), |heads| heads as usize)
    }

    fn head_dim(&self) -> usize {
        self.number("head_dim").map_or(self.count("hidden_size") / self.heads(), |dim| dim as usize)
    }

    /// Length of the part of a head that is rotated, its first.
    fn rotated(&self) -> usize {
        let usual = if self.is("glm") || self.is("glm4") { 0.5 } else { 1.0 };
        let part = self.head_dim() as f64 * self.number("partial_rotary_factor").unwrap_or(usual);
        self.number("rotary_dim").unwrap_or(part) as usize
    }

    /// `weight x`, plus the bias if `biased`.
    fn linear(&self, name: &str, x: &[f64], biased: bool) -> Vec<f64> {
        let mut out = product(self.tensor(&format!("{name}.weight")), x);
        if biased {
            let bias = self.tensor(&format!("{name}.bias"));
            out.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        out
    }

    /// Divides each piece as long as the weight by its root mean square, and scales it.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.tensor(&format!("{name}.weight"));
        let (eps, offset) = (self.number("rms_norm_eps").unwrap(), f64::from(self.begins("gemma")));
        let mut out = Vec::new();
        for piece in x.chunks(weight.len()) {
            let squares: f64 = piece.iter().map(|value| value * value).sum();
            let root = (squares / piece.len() as f64 + eps).sqrt();
            out.extend(piece.iter().zip(weight).map(|(value, weight)| value / root * (weight + offset)));
        }
        out
    }

    /// The rotation of pair `i` of a head per position, in radians.
    fn turn(&self, layer: usize, i: usize) -> f64 {
        let nested = self.config.get("rope_parameters").or(self.config.get("rope_scaling"));
        let rope = nested.and_then(Value::as_object).cloned().unwrap_or_default();
        let given = rope.get("rope_theta").and_then(Value::as_f64).or(self.number("rope_theta"));
        let slides = self.window(layer) < usize::MAX;
        let absent = match self.config["model_type"].as_str().unwrap() {
            "mixtral" => 1e6,
            "gemma3_text" if !slides => 1e6,
            "smollm3" => 2e6,
            "minimax_m2" => 5e6,
            "ernie4_5" => 5e5,
            _ => 1e4,
        };
        let plain = given.unwrap_or(absent).powf(-2.0 * i as f64 / self.rotated() as f64);
        let of = |field: &str| rope[field].as_f64().unwrap();
        match rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str) {
            None | Some("default") => plain,
            Some("linear") if self.is("gemma3_text") && slides => plain,
            Some("linear") => plain / of("factor"),
            Some("llama3") => {
                // turns within the context that the model was first trained on
                let turns = of("original_max_position_embeddings") * plain / TAU;
                let (low, high) = (of("low_freq_factor"), of("high_freq_factor"));
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                plain * kept + plain / of("factor") * (1.0 - kept)
            }
            Some(other) => panic!("rope of type {other}"),
        }
    }

    fn rotate(&self, layer: usize, x: &mut [f64], position: usize) {
        let every = self.number("no_rope_layer_interval").map_or(usize::MAX, |every| every as usize);
        let is_bare = self.is("exaone4") && self.window(layer) == usize::MAX;
        let is_of_granite = self.is("granitemoehybrid"); // whose position_embedding_type is absent here
        if is_bare || is_of_granite || (layer + 1).is_multiple_of(every) {
            return;
        }
        let half = self.rotated() / 2;
        let neighbours = self.begins("glm") && !self.is("glm4_moe") || self.is("ernie4_5");
        for head in x.chunks_mut(self.head_dim()) {
            for i in 0..half {
                let (sin, cos) = (position as f64 * self.turn(layer, i)).sin_cos();
                let (first, second) = if neighbours { (2 * i, 2 * i + 1) } else { (i, half + i) };
                let (a, b) = (head[first], head[second]);
                head[first] = a * cos - b * sin;
                head[second] = a * sin + b * cos;
            }
        }
    }

    /// How many tokens a layer looks back on, itself included.
    fn window(&self, layer: usize) -> usize {
        let slides = match self.config.get("layer_types") {
            Some(types) => types[layer] == "sliding_attention",
            None if self.is("mistral") => true,
            None if self.is("gpt_oss") || self.is("gemma2") => layer.is_multiple_of(2),
            None if self.is("gemma3_text") => {
                !(layer + 1).is_multiple_of(self.count("sliding_window_pattern"))
            }
            None if self.is("exaone4") => !(layer + 1).is_multiple_of(4),
            None => self.says("use_sliding_window") && layer >= self.count("max_window_layers"),
        };
        if slides { self.number("sliding_window").map_or(usize::MAX, |w| w as usize) } else { usize::MAX }
    }

    fn attention(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let (at, dim) = (format!("model.layers.{layer}.self_attn"), self.head_dim());
        let all = self.says("attention_bias") || self.is("gpt_oss") || self.says("use_bias");
        let sinks = self.tensors.get(&format!("{at}.sinks"));
        let biased = all || self.is("qwen2") || self.is("qwen2_moe") || self.is("seed_oss");
        let [mut query, mut key, value] =
            ["q_proj", "k_proj", "v_proj"].map(|part| self.linear(&format!("{at}.{part}"), x, biased));
        if self.tensors.contains_key(&format!("{at}.q_norm.weight")) {
            query = self.norm(&format!("{at}.q_norm"), &query);
            key = self.norm(&format!("{at}.k_norm"), &key);
        }
        let position = self.keys[layer].len();
        self.rotate(layer, &mut query, position);
        self.rotate(layer, &mut key, position);
        self.keys[layer].push(key);
        self.values[layer].push(value);
        let first = (position + 1).saturating_sub(self.window(layer));
        let group = self.heads() / self.kv_heads();
        let mut out = Vec::new();
        for (head, query) in query.chunks(dim).enumerate() {
            let of_head = (head / group) * dim..(head / group + 1) * dim;
            let score = |key: &Vec<f64>| {
                let dot: f64 = key[of_head.clone()].iter().zip(query).map(|(k, q)| k * q).sum();
                let before = self.number("query_pre_attn_scalar").unwrap_or(dim as f64);
                let scale = self.number("attention_multiplier").unwrap_or(1.0 / before.sqrt());
                self.capped("attn_logit_softcapping", dot * scale).exp()
            };
            let scores: Vec<f64> = self.keys[layer][first..].iter().map(score).collect();
            let sink = sinks.map_or(0.0, |sinks| sinks[head].exp());
            let sum = scores.iter().sum::<f64>() + sink;
            out.extend(of_head.clone().map(|i| {
                let values = self.values[layer][first..].iter();
                values.zip(&scores).map(|(value, score)| value[i] * score / sum).sum::<f64>()
            }));
        }
        self.linear(&format!("{at}.o_proj"), &out, all && !self.is("qwen2") && !self.begins("glm"))
    }

    fn capped(&self, field: &str, x: f64) -> f64 {
        self.number(field).map_or(x, |cap| cap * (x / cap).tanh())
    }

    /// What lies between gate and up on the one hand and down on the other.
    fn inner(&self, gate: &[f64], up: &[f64]) -> Vec<f64> {
        let function = |g: f64| match self.begins("gemma") {
            true => 0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044715 * g * g * g)).tanh()),
            false => g / (1.0 + (-g).exp()),
        };
        gate.iter().zip(up).map(|(g, u)| function(*g) * u).collect()
    }

    /// An MLP whose gate and up are the halves of one matrix.
    fn halved(&self, both: &[f64], down: &[f64], x: &[f64]) -> Vec<f64> {
        let both = product(both, x);
        let (gate, up) = both.split_at(both.len() / 2);
        product(down, &self.inner(gate, up))
    }

    /// The MLP of a layer without experts.
    fn plain(&self, at: &str, x: &[f64]) -> Vec<f64> {
        let of = |name: &str| self.tensor(&format!("{at}.{name}.weight"));
        if self.is("granitemoehybrid") {
            return self.halved(of("shared_mlp.input_linear"), of("shared_mlp.output_linear"), x);
        }
        match self.tensors.contains_key(&format!("{at}.mlp.gate_up_proj.weight")) {
            true => self.halved(of("mlp.gate_up_proj"), of("mlp.down_proj"), x),
            false => self.mlp(&format!("{at}.mlp"), MATRICES, x),
        }
    }

    /// Experts whose gates and ups are one tensor, and the one that all tokens go through.
    fn granite_experts(&self, at: &str, x: &[f64]) -> Vec<f64> {
        let of = |name: &str| self.tensor(&format!("{at}.{name}.weight"));
        let logits = product(of("block_sparse_moe.router.layer"), x);
        let mut best: Vec<usize> = (0..logits.len()).collect();
        best.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        best.truncate(self.count("num_experts_per_tok"));
        let sum: f64 = best.iter().map(|expert| logits[*expert].exp()).sum();
        let mut out = self.halved(of("shared_mlp.input_linear"), of("shared_mlp.output_linear"), x);
        let part = |name: &str, expert: usize| {
            let all = of(name);
            let length = all.len() / logits.len();
            &all[expert * length..(expert + 1) * length]
        };
        for expert in best {
            let [input, output] = ["input_linear", "output_linear"]
                .map(|name| part(&format!("block_sparse_moe.{name}"), expert));
            let made = self.halved(input, output, x);
            out.iter_mut().zip(made).for_each(|(to, made)| *to += made * logits[expert].exp() / sum);
        }
        out
    }

    fn mlp(&self, at: &str, [gate, up, down]: [&str; 3], x: &[f64]) -> Vec<f64> {
        let biased = self.says("mlp_bias") || self.says("use_bias");
        let part = |part: &str, x: &[f64]| self.linear(&format!("{at}.{part}"), x, biased);
        let (gate, up) = (part(gate, x), part(up, x));
        part(down, &self.inner(&gate, &up))
    }

    fn has_experts(&self, layer: usize) -> bool {
        let is_plain = |layers: &Value| layers.as_array().unwrap().contains(&layer.into());
        let plain = self.config.get("mlp_only_layers").is_some_and(is_plain);
        let step = self.number("decoder_sparse_step").map_or(1, |step| step as usize);
        let mixed = MIXED.iter().any(|family| self.is(family));
        let behind_plain = self.is("glm4_moe") && layer >= self.count("first_k_dense_replace");
        behind_plain || mixed && !plain && (layer + 1).is_multiple_of(step)
    }

    /// Gate and up of an inner element are neighbouring rows.
    fn gpt_oss_expert(&self, at: &str, expert: usize, x: &[f64]) -> Vec<f64> {
        let product = |matrix: &str, x: &[f64], rows: usize| {
            let values = |name: String| self.tensor(&name);
            let weight = values(format!("{at}.experts.{matrix}"));
            let bias = values(format!("{at}.experts.{matrix}_bias"));
            let rows = expert * rows..(expert + 1) * rows;
            let of = |row: usize| {
                let terms =
                    x.iter().enumerate().map(|(column, value)| weight[row * x.len() + column] * value);
                terms.sum::<f64>() + bias[row]
            };
            rows.map(of).collect::<Vec<f64>>()
        };
        let inner = self.count("intermediate_size");
        let both = product("gate_up_proj", x, 2 * inner);
        let of = |i: usize| {
            let (gate, up) = (both[2 * i].min(7.0), both[2 * i + 1].clamp(-7.0, 7.0));
            (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
        };
        product("down_proj", &(0..inner).map(of).collect::<Vec<f64>>(), x.len())
    }

    /// Each expert's weight is its sigmoid; a bias affects only the choice.
    fn sigmoid_experts(&self, at: &str, x: &[f64]) -> Vec<f64> {
        let minimax = self.is("minimax_m2");
        let (at, bias, matrices) = match minimax {
            true => (format!("{at}.block_sparse_moe"), "e_score_correction_bias", ["w1", "w3", "w2"]),
            false => (format!("{at}.mlp"), "gate.e_score_correction_bias", MATRICES),
        };
        let bias = self.tensor(&format!("{at}.{bias}"));
        let logits = self.linear(&format!("{at}.gate"), x, false);
        let scores: Vec<f64> = logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        let mut best: Vec<usize> = (0..scores.len()).collect();
        best.sort_by(|a, b| (scores[*b] + bias[*b]).total_cmp(&(scores[*a] + bias[*a])));
        best.truncate(self.count("num_experts_per_tok"));
        let sum: f64 = best.iter().map(|expert| scores[*expert]).sum();
        let mut out = match minimax {
            true => vec![0.0; x.len()],
            false => self.mlp(&format!("{at}.shared_experts"), MATRICES, x),
        };
        for expert in best {
            let made = self.mlp(&format!("{at}.experts.{expert}"), matrices, x);
            let share = scores[expert] / sum * self.number("routed_scaling_factor").unwrap_or(1.0);
            out.iter_mut().zip(made).for_each(|(sum, value)| *sum += value * share);
        }
        out
    }

    /// The output of a row's experts, and of the shared one.
    fn experts(&self, at: &str, x: &[f64]) -> Vec<f64> {
        if self.is("glm4_moe") || self.is("minimax_m2") {
            return self.sigmoid_experts(at, x);
        }
        if self.begins("granite") {
            return self.granite_experts(at, x);
        }
        let (mixtral, gpt_oss) = (self.is("mixtral"), self.is("gpt_oss"));
        let (at, matrices) = match mixtral {
            true => (format!("{at}.block_sparse_moe"), ["w1", "w3", "w2"]),
            false => (format!("{at}.mlp"), MATRICES),
        };
        let powers: Vec<f64> = self
            .linear(&format!("{at}.{}", if gpt_oss { "router" } else { "gate" }), x, gpt_oss)
            .iter()
            .map(|logit| logit.exp())
            .collect();
        let mut best: Vec<usize> = (0..powers.len()).collect();
        best.sort_by(|a, b| powers[*b].total_cmp(&powers[*a]));
        best.truncate(self.count("num_experts_per_tok"));
        let of_all: f64 = powers.iter().sum();
        let of_best: f64 = best.iter().map(|expert| powers[*expert]).sum();
        let whole = if mixtral || gpt_oss || self.says("norm_topk_prob") { of_best } else { of_all };
        let mut out = vec![0.0; x.len()];
        let mut add = |made: Vec<f64>, share: f64| {
            out.iter_mut().zip(made).for_each(|(sum, value)| *sum += value * share);
        };
        for expert in best {
            let made = match gpt_oss {
                true => self.gpt_oss_expert(&at, expert, x),
                false => self.mlp(&format!("{at}.experts.{expert}"), matrices, x),
            };
            add(made, powers[expert] / whole);
        }
        if self.is("qwen2_moe") {
            let gate = self.linear(&format!("{at}.shared_expert_gate"), x, false)[0];
            add(self.mlp(&format!("{at}.shared_expert"), matrices, x), 1.0 / (1.0 + (-gate).exp()));
        }
        out
    }

    /// Names of the norms before and after attention, and before and after the MLP, where there are any.
    fn norms(&self) -> [Option<&'static str>; 4] {
        let (input, attention) = (Some("input_layernorm"), Some("post_attention_layernorm"));
        let (before, after) = (Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm"));
        match self.config["model_type"].as_str().unwrap() {
            "gemma2" | "gemma3_text" => [input, attention, before, after],
            "olmo2" | "exaone4" => [None, attention, None, after],
            "glm4" => [input, Some("post_self_attn_layernorm"), attention, Some("post_mlp_layernorm")],
            _ => [input, None, attention, None],
        }
    }

    /// Takes the next token and gives the logits after it.
    fn step(&mut self, token: u32) -> Vec<f64> {
        let hidden = self.count("hidden_size");
        let usual = if self.begins("gemma") { (hidden as f64).sqrt() } else { 1.0 };
        let factor = self.number("embedding_multiplier").unwrap_or(usual);
        let residual = self.number("residual_multiplier").unwrap_or(1.0);
        let embed = &self.tensor("model.embed_tokens.weight")[token as usize * hidden..][..hidden];
        let mut x: Vec<f64> = embed.iter().map(|value| value * factor).collect();
        let norms = self.norms();
        for layer in 0..self.keys.len() {
            let at = format!("model.layers.{layer}");
            let norm = |naive: &Self, which: usize, x: &[f64]| match norms[which] {
                Some(name) => naive.norm(&format!("{at}.{name}"), x),
                None => x.to_vec(),
            };
            let normed = norm(self, 0, &x);
            let attended = self.attention(layer, &normed);
            let attended = norm(self, 1, &attended);
            x.iter_mut().zip(attended).for_each(|(x, more)| *x += more * residual);
            let normed = norm(self, 2, &x);
            let made = match self.has_experts(layer) {
                true => self.experts(&at, &normed),
                false => self.plain(&at, &normed),
            };
            let made = norm(self, 3, &made);
            x.iter_mut().zip(made).for_each(|(x, more)| *x += more * residual);
        }
        let usual = self.begins("gemma"); // tied unless the configuration says otherwise
        let usual = usual || self.is("smollm3") || self.is("ernie4_5");
        let tied = self.config.get("tie_word_embeddings").map_or(usual, |tied| tied == true);
        let head = if tied { "model.embed_tokens" } else { "lm_head" };
        let logits = self.linear(head, &self.norm("model.norm", &x), false);
        let divisor = self.number("logits_scaling").unwrap_or(1.0);
        logits.into_iter().map(|logit| self.capped("final_logit_softcapping", logit / divisor)).collect()
    }
}

fn product(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; weight.len() / x.len()];
    for (row, sum) in out.iter_mut().enumerate() {
        for (column, value) in x.iter().enumerate() {
            *sum += weight[row * x.len() + column] * value;
        }
    }
    out
}

/// What the oracle's rope table in f32 may be off by within so few positions.
const ERROR_MAX: f64 = 5e-5;

#[test]
fn the_oracle_agrees_with_a_naive_forward_pass_on_every_family() {
    let mut compared = 0;
    for (name, random) in tiny_variants().into_iter().chain(styled_variants()) {
        if name.contains("yarn") || ["phi3-longrope", "olmo3", "ministral3"].contains(&name) {
            continue; // its table has tests of its own, by numbers of transformers
        }
        if name.starts_with("deepseek") {
            continue; // the tests of fixtures compare it with transformers
        }
        let checkpoint = random.load().unwrap();
        let mut naive = Naive::new(&random);
        let tokens: Vec<u32> = (0..23).map(|i| (i * 11 + 5) % 256).collect();
        let logits = Oracle::new(&checkpoint).logits(&tokens);
        let vocab = checkpoint.config.vocab as usize;
        for (at, &token) in tokens.iter().enumerate() {
            let errors = naive.step(token).into_iter().zip(&logits[at * vocab..]).map(|(a, b)| (a - b).abs());
            let error = errors.fold(0.0, f64::max);
            assert!(error < ERROR_MAX, "{name}: logits after token {at} are off by {error:e}");
        }
        compared += 1;
    }
    assert_eq!(compared, 31);
}
