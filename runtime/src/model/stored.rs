//! Storage of a model's tensors: names, fused tensors, and folded norms.
//!
//! A tensor that a layer needs may be some rows of a stored one (q, k and v in one matrix). Norms may be
//! stored minus one, and may absorb multipliers of other operations.

use super::config::ModelConfig;
use super::names::{self, PlannedTensor};
use mixfleet_hal::DType;
use mixfleet_scheduler::layers::{NormPlacement, Weight};
use std::ops::Range;

/// Differences of a family's files from Llama's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// Whether q, k and v are one matrix, stacked by rows.
    pub fused_qkv: bool,
    /// Whether gate and up are one matrix, stacked by rows.
    pub fused_mlp: bool,
    /// Naming of norms.
    pub norms: NormNames,
    /// Whether norms are stored minus one (Gemma).
    pub offset_norms: bool,
    /// Whether the MLP is `shared_mlp`, and gate and up are one matrix there and in each expert, all of which
    /// are one tensor (Granite MoE).
    pub granite_mlp: bool,
}

/// Names of a layer's norms, which determine their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormNames {
    /// `input_layernorm` and `post_attention_layernorm`, which is before the MLP.
    Llama,
    /// Llama's two, and `post_self_attn_layernorm` and `post_mlp_layernorm` after attention and MLP (GLM-4).
    Glm4,
    /// `input_layernorm` and `pre_feedforward_layernorm` before attention and MLP, `post_attention_layernorm`
    /// and `post_feedforward_layernorm` after them (Gemma 3).
    Gemma,
    /// `post_attention_layernorm` and `post_feedforward_layernorm`, after attention and MLP (OLMo 2).
    Olmo,
}

impl NormNames {
    /// Positions of the norms.
    pub(super) const fn placement(self) -> NormPlacement {
        match self {
            NormNames::Llama => NormPlacement::Before,
            NormNames::Glm4 | NormNames::Gemma => NormPlacement::Around,
            NormNames::Olmo => NormPlacement::After,
        }
    }

    /// The name of a norm within a layer; none if layers do not have it.
    pub(super) const fn name(self, norm: Weight) -> Option<&'static str> {
        Some(match (self, norm) {
            (NormNames::Llama | NormNames::Glm4 | NormNames::Gemma, Weight::AttnNorm) => {
                "input_layernorm.weight"
            }
            (NormNames::Gemma, Weight::MlpNorm) => "pre_feedforward_layernorm.weight",
            (NormNames::Llama | NormNames::Glm4, Weight::MlpNorm) => "post_attention_layernorm.weight",
            (NormNames::Glm4, Weight::AttnPostNorm) => "post_self_attn_layernorm.weight",
            (NormNames::Glm4, Weight::MlpPostNorm) => "post_mlp_layernorm.weight",
            (NormNames::Olmo | NormNames::Gemma, Weight::AttnPostNorm) => "post_attention_layernorm.weight",
            (NormNames::Olmo | NormNames::Gemma, Weight::MlpPostNorm) => "post_feedforward_layernorm.weight",
            _ => return None,
        })
    }
}

impl TensorLayout {
    /// Separate tensors, and norms as in Llama.
    pub const LLAMA: TensorLayout = TensorLayout {
        fused_qkv: false,
        fused_mlp: false,
        norms: NormNames::Llama,
        offset_norms: false,
        granite_mlp: false,
    };
}

/// Conversion of stored norm weights at load: `(w + offset) * factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct NormFold {
    offset: f32,
    factor: f32,
}

impl NormFold {
    /// Returns the converted elements as f32.
    pub(super) fn apply(self, dtype: DType, stored: &[u8]) -> Vec<u8> {
        let (offset, factor) = (f64::from(self.offset), f64::from(self.factor));
        let mut out = Vec::with_capacity(stored.len() * 2);
        dtype.decode(stored).iter().for_each(|w| DType::F32.encode((w + offset) * factor, &mut out));
        out
    }
}

/// Position of a planned tensor in a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct StoredTensor {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    /// Rows of the stored tensor that form the planned one, of all its matrices together; none means all.
    pub(super) rows: Option<Range<u64>>,
    pub(super) fold: Option<NormFold>,
}

/// Finds a planned tensor of a model in its checkpoint.
pub(super) fn stored_tensor(config: &ModelConfig, tensor: &PlannedTensor) -> StoredTensor {
    let fold = fold_of(config, tensor.weight);
    let part = match config.layout.granite_mlp {
        true => granite_rows(config, tensor),
        false => fused_rows(config, tensor.weight).filter(|_| tensor.expert.is_none()),
    };
    let Some((FusedRows { name, first, of }, layer)) = part.zip(tensor.layer) else {
        return StoredTensor { name: tensor.name.clone(), shape: tensor.shape.clone(), rows: None, fold };
    };
    let rows = first..first + tensor.shape[0];
    let shape = [&of[..], &tensor.shape[1..]].concat();
    StoredTensor { name: names::in_layer(layer as usize, name), shape, rows: Some(rows), fold }
}

/// The tensors of a checkpoint, each once, with the first weight that is derived from it.
pub(super) fn stored_tensors(config: &ModelConfig) -> Vec<(StoredTensor, Weight)> {
    let mut all: Vec<(StoredTensor, Weight)> = Vec::new();
    for planned in names::tensors(config) {
        let stored = stored_tensor(config, &planned);
        // parts of a stored tensor are adjacent: the first one represents it
        if stored.rows.as_ref().is_none_or(|rows| rows.start == 0) {
            all.push((stored, planned.weight));
        }
    }
    all
}

/// Position of a matrix in a fused tensor: its first row, and the shape of the whole tensor but for the
/// length of a row.
struct FusedRows {
    name: &'static str,
    first: u64,
    of: Vec<u64>,
}

/// Positions of the matrices of Granite's experts and MLP.
fn granite_rows(config: &ModelConfig, tensor: &PlannedTensor) -> Option<FusedRows> {
    const INPUT: &str = "block_sparse_moe.input_linear.weight";
    let n = |count: u32| u64::from(count);
    let experts = config.experts_of(tensor.layer? as usize);
    let inner = n(experts.map_or(config.intermediate, |experts| experts.shared));
    let (hidden, own) = (n(config.hidden), n(experts.map_or(0, |experts| experts.intermediate)));
    let all = n(experts.map_or(0, |experts| experts.routing.experts));
    let expert = n(tensor.expert.unwrap_or(0));
    let mlp = |name, first, rows| Some(FusedRows { name, first, of: vec![rows] });
    let packed =
        |name, first, rows: u64| Some(FusedRows { name, first: expert * rows + first, of: vec![all, rows] });
    match tensor.weight {
        Weight::Gate => mlp("shared_mlp.input_linear.weight", 0, 2 * inner),
        Weight::Up => mlp("shared_mlp.input_linear.weight", inner, 2 * inner),
        Weight::Down => mlp("shared_mlp.output_linear.weight", 0, hidden),
        Weight::ExpertGate => packed(INPUT, 0, 2 * own),
        Weight::ExpertUp => packed(INPUT, own, 2 * own),
        Weight::ExpertDown => packed("block_sparse_moe.output_linear.weight", 0, hidden),
        _ => None,
    }
}

fn fused_rows(config: &ModelConfig, weight: Weight) -> Option<FusedRows> {
    let n = |count: u32| u64::from(count);
    let (q, kv) = (n(config.heads) * n(config.head_dim), n(config.kv_heads) * n(config.head_dim));
    let inner = n(config.intermediate);
    let TensorLayout { fused_qkv, fused_mlp, .. } = config.layout;
    let qkv = |first| Some(FusedRows { name: "self_attn.qkv_proj.weight", first, of: vec![q + 2 * kv] });
    let mlp = |first| Some(FusedRows { name: "mlp.gate_up_proj.weight", first, of: vec![2 * inner] });
    match weight {
        Weight::Q if fused_qkv => qkv(0),
        Weight::K if fused_qkv => qkv(q),
        Weight::V if fused_qkv => qkv(q + kv),
        Weight::Gate if fused_mlp => mlp(0),
        Weight::Up if fused_mlp => mlp(inner),
        _ => None,
    }
}

/// Returns the conversion of a stored norm; none if it is used unchanged.
fn fold_of(config: &ModelConfig, weight: Weight) -> Option<NormFold> {
    let factor = match weight {
        Weight::LastNorm => config.scales.last_norm,
        Weight::AttnPostNorm | Weight::MlpPostNorm => config.scales.branch,
        Weight::AttnNorm | Weight::MlpNorm | Weight::QNorm | Weight::KNorm => 1.0,
        _ => return None,
    };
    let offset = if config.layout.offset_norms { 1.0 } else { 0.0 };
    (factor != 1.0 || offset != 0.0).then_some(NormFold { offset, factor })
}
