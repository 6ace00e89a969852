//! Mixtures of experts: shape, configuration in checkpoints, and tensor names.

use super::error::Result;
use super::fields::Fields;
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{ExpertRouting, OpSig, Scalar, Scoring};
use mixfleet_scheduler::cost::{Experts, MemberShare};
use serde_json::Value;
use std::ops::Range;

/// Bounds well above any real model.
const EXPERTS_MAX: u32 = 1 << 12;
const INNER_MAX: u32 = 1 << 20;

/// The experts that take the place of the MLP in some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// Routing of tokens to experts.
    pub routing: ExpertRouting,
    /// Experts with local matrices: all, except on one of several devices that divide whole experts.
    pub held: Range<u32>,
    /// Length of an expert's inner layer.
    pub intermediate: u32,
    /// Length of the shared expert's inner layer, which every token goes through; 0 without one.
    pub shared: u32,
    /// Whether a bias corrects the routing (DeepSeek-V3).
    pub correction: bool,
    /// Whether a gate scales the output of the shared expert (Qwen2-MoE).
    pub shared_gate: bool,
    /// Whether each layer has experts; the others have an MLP.
    pub layers: Vec<bool>,
    /// Alpha and limit of a clamped activation over gate and up in one matrix, with biases (gpt-oss).
    pub clamped: Option<[Scalar; 2]>,
    /// Naming of the tensors.
    pub names: ExpertNames,
}

/// Naming of the experts' tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.experts.0.gate_proj` and so on, and a router `mlp.gate`.
    Projections,
    /// `block_sparse_moe.experts.0.w1` and so on, and a router `block_sparse_moe.gate` (Mixtral).
    Numbered,
    /// As `Projections`, and shared experts `mlp.shared_experts` (DeepSeek, GLM-4-MoE).
    DeepSeek,
    /// As `Numbered`, and a correction bias beside the router (MiniMax-M2).
    MiniMax,
    /// A router `block_sparse_moe.router.layer`; [`TensorLayout`](super::stored::TensorLayout) says where the
    /// matrices are (Granite MoE).
    Granite,
    /// `mlp.experts.gate_up_proj` and `mlp.experts.down_proj` of all experts, and a router `mlp.router`
    /// (gpt-oss).
    Fused,
}

impl ExpertNames {
    /// The router, within a layer.
    pub(super) const fn router(self) -> &'static str {
        match self {
            ExpertNames::Projections | ExpertNames::DeepSeek => "mlp.gate",
            ExpertNames::Numbered | ExpertNames::MiniMax => "block_sparse_moe.gate",
            ExpertNames::Granite => "block_sparse_moe.router.layer",
            ExpertNames::Fused => "mlp.router",
        }
    }

    /// Prefix of the experts of a layer.
    pub(super) const fn experts(self) -> &'static str {
        match self {
            ExpertNames::Projections | ExpertNames::DeepSeek | ExpertNames::Fused => "mlp.experts",
            ExpertNames::Numbered | ExpertNames::MiniMax | ExpertNames::Granite => "block_sparse_moe.experts",
        }
    }

    /// The shared expert of a layer.
    pub(super) const fn shared(self) -> &'static str {
        match self {
            ExpertNames::DeepSeek => "mlp.shared_experts",
            _ => "mlp.shared_expert",
        }
    }

    /// The routing bias, within a layer.
    pub(super) const fn correction(self) -> &'static str {
        match self {
            ExpertNames::MiniMax => "block_sparse_moe.e_score_correction_bias",
            _ => "mlp.gate.e_score_correction_bias",
        }
    }

    /// Gate, up and down of an expert.
    pub(super) const fn matrices(self) -> [&'static str; 3] {
        match self {
            ExpertNames::Projections | ExpertNames::DeepSeek | ExpertNames::Granite => {
                ["gate_proj", "up_proj", "down_proj"]
            }
            ExpertNames::Numbered | ExpertNames::MiniMax => ["w1", "w3", "w2"],
            ExpertNames::Fused => [GATE_UP, GATE_UP, DOWN],
        }
    }
}

/// The matrices of all experts together, within `mlp.experts`: gate and up with alternating rows, and down.
/// Their biases have the same names with [`BIAS`] appended.
pub(super) const GATE_UP: &str = "gate_up_proj";
pub(super) const DOWN: &str = "down_proj";
pub(super) const BIAS: &str = "_bias";

/// The gate of the shared expert, within a layer.
pub(super) const SHARED_GATE: &str = "mlp.shared_expert_gate";

impl Mixture {
    /// Reads the experts of a family that has them; none for other families.
    ///
    /// # Errors
    /// The error names the field.
    pub(super) fn parse(fields: &Fields, family: &str, layers: u32) -> Result<Option<Self>> {
        if family.starts_with("deepseek") || family == "kimi_k2" || family == "glm4_moe" {
            return deepseek(fields, family, layers).map(Some);
        }
        let names = match family {
            "mixtral" => ExpertNames::Numbered,
            "gpt_oss" => ExpertNames::Fused,
            "minimax_m2" => ExpertNames::MiniMax,
            "granitemoe" | "granitemoeshared" | "granitemoehybrid" => ExpertNames::Granite,
            _ => ExpertNames::Projections,
        };
        let own = || fields.count_required("intermediate_size", INNER_MAX);
        let (count, active, inner) = match family {
            "mixtral" => (8, 2, own()?),
            "gpt_oss" => (128, 4, own()?),
            "qwen2_moe" => (60, 4, 1408),
            "qwen3_moe" => (128, 8, 768),
            "olmoe" => (64, 8, own()?),
            "minimax_m2" => (256, 8, own()?),
            "granitemoehybrid" if fields.get("num_local_experts").and_then(Value::as_u64) == Some(0) => {
                return Ok(None);
            }
            "granitemoe" | "granitemoeshared" | "granitemoehybrid" => (8, 2, own()?),
            _ => return Ok(None),
        };
        // transformers 4 and 5 spell it differently
        let count = match fields.count("num_experts", EXPERTS_MAX)? {
            Some(count) => count,
            None => fields.count("num_local_experts", EXPERTS_MAX)?.unwrap_or(count),
        };
        let active = fields.count("num_experts_per_tok", EXPERTS_MAX)?.unwrap_or(active);
        if active > count {
            let problem = format!("{active}, expected at most num_experts ({count})");
            return Err(fields.error("num_experts_per_tok", problem));
        }
        let gpt_oss = family == "gpt_oss";
        let (minimax, granite) = (family == "minimax_m2", names == ExpertNames::Granite);
        let always = family == "mixtral" || gpt_oss || minimax || granite;
        let uniform = always || family == "olmoe";
        let intermediate = match uniform {
            true => inner,
            false => fields.count("moe_intermediate_size", INNER_MAX)?.unwrap_or(inner),
        };
        let normalise = always || fields.flag("norm_topk_prob", false)?;
        let qwen2 = family == "qwen2_moe";
        let shared = match family {
            "qwen2_moe" => fields.count("shared_expert_intermediate_size", INNER_MAX)?.unwrap_or(5632),
            "granitemoehybrid" => granite_inner(fields)?,
            "granitemoeshared" if fields.has(GRANITE_SHARED) => match fields.get(GRANITE_SHARED) {
                Some(Value::Number(none)) if none.as_u64() == Some(0) => 0,
                _ => granite_inner(fields)?,
            },
            "granitemoeshared" => 1024,
            _ => 0,
        };
        let softmax = ExpertRouting::softmax(count, active, normalise);
        Ok(Some(Mixture {
            routing: ExpertRouting {
                scoring: if minimax { Scoring::Sigmoid } else { softmax.scoring },
                ..softmax
            },
            held: 0..count,
            intermediate,
            shared,
            correction: minimax,
            shared_gate: qwen2,
            layers: if uniform { vec![true; layers as usize] } else { sparse_layers(fields, layers)? },
            clamped: if gpt_oss { Some(clamp(fields)?) } else { None },
            names,
        }))
    }

    /// The share of a member of devices that divide a model with `whole` columns of inner layers.
    pub(super) fn of_member(&self, share: &MemberShare, whole: u32) -> Self {
        Mixture {
            held: share.experts.clone(),
            intermediate: to_u32(share.inner_of_experts(self.intermediate, whole).len()),
            shared: to_u32(Experts::share(self.shared, &share.inner, whole).len()),
            layers: self.layers[share.layers.start as usize..share.layers.end as usize].to_vec(),
            ..self.clone()
        }
    }

    /// Whether other devices have other experts.
    pub(super) fn is_share(&self) -> bool {
        self.held.len() < self.routing.experts as usize
    }

    /// The shape for cost prediction.
    pub fn cost(&self) -> Experts {
        let dense = self.layers.iter().filter(|has_experts| !**has_experts).count();
        Experts {
            shared: self.shared,
            dense_layers: to_u32(dense),
            quantised_alone: self.clamped.is_some(),
            shared_gate: self.shared_gate,
            clamped: self.clamped.is_some(),
            routing: Some(self.routing),
            held: self.is_share().then_some(to_u32(self.held.len())),
            correction: self.correction,
            ..Experts::new(self.routing.experts, self.routing.active, self.intermediate)
        }
    }
}

/// Length of Granite's MLP beside or instead of experts.
const GRANITE_SHARED: &str = "shared_intermediate_size";

pub(super) fn granite_inner(fields: &Fields) -> Result<u32> {
    Ok(fields.count(GRANITE_SHARED, INNER_MAX)?.unwrap_or(1024))
}

/// The experts of DeepSeek-V2 and V3, of Kimi K2 and of GLM-4-MoE: the first layers have none, all shared
/// experts are one, and groups limit the routing.
#[expect(clippy::too_many_lines, reason = "one field of the configuration after the other")]
fn deepseek(fields: &Fields, family: &str, layers: u32) -> Result<Mixture> {
    let (v2, glm) = (family == "deepseek_v2", family == "glm4_moe");
    let count = |field: &str, max: u32, of_glm: u32| match glm {
        true => Ok(fields.count(field, max)?.unwrap_or(of_glm)),
        false => fields.count_required(field, max),
    };
    let active = count("num_experts_per_tok", EXPERTS_MAX, 8)?;
    let intermediate = count("moe_intermediate_size", INNER_MAX, 1408)?;
    let count = count("n_routed_experts", EXPERTS_MAX, 128)?;
    let shared = fields.count("n_shared_experts", EXPERTS_MAX)?.unwrap_or(u32::from(glm));
    let shared = intermediate.checked_mul(shared).filter(|inner| *inner <= INNER_MAX);
    let shared = shared.ok_or_else(|| fields.error("n_shared_experts", "the shared experts are too long"))?;
    let scoring = match fields.text("scoring_func")?.unwrap_or(if v2 { "softmax" } else { "sigmoid" }) {
        "softmax" => Scoring::Softmax,
        "sigmoid" => Scoring::Sigmoid,
        other => {
            let problem = format!("'{other}' is not supported; supported: softmax, sigmoid");
            return Err(fields.error("scoring_func", problem));
        }
    };
    // number of best experts whose scores rank a group; none without groups
    let method = fields.text("topk_method")?.unwrap_or(if v2 { "greedy" } else { "noaux_tc" });
    let group_best = match method {
        "greedy" => 0,
        "group_limited_greedy" => 1,
        "noaux_tc" => 2,
        other => {
            let problem =
                format!("'{other}' is not supported; supported: greedy, group_limited_greedy, noaux_tc");
            return Err(fields.error("topk_method", problem));
        }
    };
    let (groups, groups_active) = match group_best {
        0 => (1, 1),
        _ => {
            let groups = fields.count("n_group", EXPERTS_MAX)?.unwrap_or(1);
            (groups, fields.count("topk_group", EXPERTS_MAX)?.unwrap_or(groups))
        }
    };
    let normalise = fields.flag("norm_topk_prob", !v2)?;
    let scale = to_f32(fields.positive("routed_scaling_factor")?.unwrap_or(1.0));
    if v2 && normalise && scale != 1.0 {
        let problem = format!("{scale} with norm_topk_prob is not supported; supported: 1");
        return Err(fields.error("routed_scaling_factor", problem));
    }
    let routing = ExpertRouting {
        experts: count,
        active,
        scoring,
        groups,
        groups_active,
        // one group is not compared with others
        group_best: if groups == 1 { 1 } else { group_best },
        normalise,
        scale: Scalar(scale),
    };
    let sig = OpSig::Route { tokens: 1, bias: false, routing };
    sig.check().map_err(|problem| fields.error("n_group", problem))?;
    let first = match fields.get("first_k_dense_replace").map(Value::as_u64) {
        None => u64::from(glm),
        Some(Some(first)) => first,
        Some(None) => return Err(fields.error("first_k_dense_replace", "expected a whole number")),
    };
    let step = fields.count("moe_layer_freq", 1 << 12)?.unwrap_or(1);
    let has_experts = |layer: u32| u64::from(layer) >= first && layer.is_multiple_of(step);
    Ok(Mixture {
        routing,
        held: 0..count,
        intermediate,
        shared,
        correction: method == "noaux_tc",
        shared_gate: false,
        layers: (0..layers).map(has_experts).collect(),
        clamped: None,
        names: ExpertNames::DeepSeek,
    })
}

/// Alpha and limit of gpt-oss.
fn clamp(fields: &Fields) -> Result<[Scalar; 2]> {
    let (alpha, limit) = (fields.positive("swiglu_alpha")?, fields.positive("swiglu_limit")?);
    Ok([alpha.unwrap_or(1.702), limit.unwrap_or(7.0)].map(|number| Scalar(to_f32(number))))
}

/// Which layers have experts, in Qwen's configuration fields.
fn sparse_layers(fields: &Fields, layers: u32) -> Result<Vec<bool>> {
    let step = fields.count("decoder_sparse_step", 1 << 12)?.unwrap_or(1);
    let plain = fields.numbers("mlp_only_layers")?.unwrap_or_default();
    if let Some(beyond) = plain.iter().find(|layer| **layer >= layers) {
        let problem = format!("{beyond}, expected numbers below num_hidden_layers ({layers})");
        return Err(fields.error("mlp_only_layers", problem));
    }
    Ok((0..layers).map(|layer| !plain.contains(&layer) && (layer + 1).is_multiple_of(step)).collect())
}
