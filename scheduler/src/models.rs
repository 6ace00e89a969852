//! Shapes of well-known models, so that devices can be compared without a checkpoint.
//!
//! Dense models only: a [`ModelShape`] has no experts yet, and a mixture of experts counted as dense would be
//! wrong by its ratio of all to active parameters. [`find`] reports the mixtures that it knows by name.

use crate::cost::ModelShape;
use mixfleet_hal::DType;
use mixfleet_hal::catalog::closest_names;
use mixfleet_hal::units::Bytes;

/// A dense decoder-only transformer, with its published configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KnownModel {
    /// The model's name, matched without regard to case.
    pub name: &'static str,
    /// Published number of parameters, in billions.
    pub parameters_b: f64,
    /// Decoder layers.
    pub layers: u32,
    /// Length of the residual stream.
    pub hidden: u32,
    /// Length of the MLP's inner layer.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Sliding windows, if it has them.
    pub windows: Option<Windows>,
    /// Whether the LM head is the embedding.
    pub tied_embeddings: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether q and k are normalised per head.
    pub qk_norm: bool,
}

/// Layers with a sliding window among layers without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Keys that a query attends to.
    pub tokens: u32,
    /// The last of this many consecutive layers has no window; 0 means that every layer has one.
    pub period: u32,
}

/// A dense model from its name and `[layers, hidden, intermediate, heads, kv_heads, head_dim, vocab]`.
const fn dense(name: &'static str, parameters_b: f64, numbers: [u32; 7]) -> KnownModel {
    let [layers, hidden, intermediate, heads, kv_heads, head_dim, vocab] = numbers;
    KnownModel {
        name,
        parameters_b,
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocab,
        windows: None,
        tied_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
    }
}

impl KnownModel {
    const fn tied(self) -> Self {
        KnownModel { tied_embeddings: true, ..self }
    }
    const fn biased(self) -> Self {
        KnownModel { qkv_bias: true, ..self }
    }
    const fn normed(self) -> Self {
        KnownModel { qk_norm: true, ..self }
    }
    const fn windows(self, tokens: u32, period: u32) -> Self {
        KnownModel { windows: Some(Windows { tokens, period }), ..self }
    }
}

const MODELS: &[KnownModel] = &[
    dense("llama-2-7b", 6.74, [32, 4096, 11008, 32, 32, 128, 32000]),
    dense("llama-2-13b", 13.02, [40, 5120, 13824, 40, 40, 128, 32000]),
    dense("llama-2-70b", 68.98, [80, 8192, 28672, 64, 8, 128, 32000]),
    dense("llama-3.1-8b", 8.03, [32, 4096, 14336, 32, 8, 128, 128_256]),
    dense("llama-3.1-70b", 70.55, [80, 8192, 28672, 64, 8, 128, 128_256]),
    dense("llama-3.1-405b", 405.85, [126, 16384, 53248, 128, 8, 128, 128_256]),
    dense("llama-3.2-1b", 1.24, [16, 2048, 8192, 32, 8, 64, 128_256]).tied(),
    dense("llama-3.2-3b", 3.21, [28, 3072, 8192, 24, 8, 128, 128_256]).tied(),
    dense("llama-3.3-70b", 70.55, [80, 8192, 28672, 64, 8, 128, 128_256]),
    dense("mistral-7b", 7.25, [32, 4096, 14336, 32, 8, 128, 32768]),
    dense("mistral-nemo-12b", 12.25, [40, 5120, 14336, 32, 8, 128, 131_072]),
    dense("mistral-small-24b", 23.57, [40, 5120, 32768, 32, 8, 128, 131_072]),
    dense("mistral-large-123b", 122.61, [88, 12288, 28672, 96, 8, 128, 32768]),
    dense("qwen2.5-0.5b", 0.49, [24, 896, 4864, 14, 2, 64, 151_936]).tied().biased(),
    dense("qwen2.5-1.5b", 1.54, [28, 1536, 8960, 12, 2, 128, 151_936]).tied().biased(),
    dense("qwen2.5-3b", 3.09, [36, 2048, 11008, 16, 2, 128, 151_936]).tied().biased(),
    dense("qwen2.5-7b", 7.62, [28, 3584, 18944, 28, 4, 128, 152_064]).biased(),
    dense("qwen2.5-14b", 14.77, [48, 5120, 13824, 40, 8, 128, 152_064]).biased(),
    dense("qwen2.5-32b", 32.76, [64, 5120, 27648, 40, 8, 128, 152_064]).biased(),
    dense("qwen2.5-72b", 72.70, [80, 8192, 29568, 64, 8, 128, 152_064]).biased(),
    dense("qwen3-0.6b", 0.60, [28, 1024, 3072, 16, 8, 128, 151_936]).tied().normed(),
    dense("qwen3-1.7b", 1.72, [28, 2048, 6144, 16, 8, 128, 151_936]).tied().normed(),
    dense("qwen3-4b", 4.02, [36, 2560, 9728, 32, 8, 128, 151_936]).tied().normed(),
    dense("qwen3-8b", 8.19, [36, 4096, 12288, 32, 8, 128, 151_936]).normed(),
    dense("qwen3-14b", 14.77, [40, 5120, 17408, 40, 8, 128, 151_936]).normed(),
    dense("qwen3-32b", 32.76, [64, 5120, 25600, 64, 8, 128, 151_936]).normed(),
    dense("gemma-3-12b", 11.77, [48, 3840, 15360, 16, 8, 256, 262_208]).tied().normed().windows(1024, 6),
    dense("gemma-3-27b", 27.01, [62, 5376, 21504, 32, 16, 128, 262_208]).tied().normed().windows(1024, 6),
    dense("phi-4", 14.66, [40, 5120, 17920, 40, 10, 128, 100_352]),
];

/// Names of mixtures of experts and hybrids, which are not supported.
const NOT_DENSE: &[&str] = &[
    "deepseek-r1",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-4.5",
    "glm-4.5-air",
    "glm-5",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "kimi-k2",
    "llama-4-maverick",
    "llama-4-scout",
    "minimax-m2.5",
    "mixtral-8x22b",
    "mixtral-8x7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-coder-480b-a35b",
    "qwen3.5-35b-a3b",
];

/// Tokens per KV page of these shapes; it affects little but the cost of a page table.
const PAGE_TOKENS: u32 = 16;

impl KnownModel {
    /// Number of parameters of the matrices.
    pub fn parameters(&self) -> u64 {
        matrix_parameters(&self.shape(DType::Bf16), self.tied_embeddings)
    }

    /// Memory for the weights in `weight`.
    pub fn weight_bytes(&self, weight: DType) -> Bytes {
        Bytes((self.parameters() * weight.size_bytes()) as f64)
    }

    /// The model's shape with weights, activations and KV in `dtype`. Activations of 8-bit weights have 16
    /// bits, but where products read them.
    pub fn shape(&self, dtype: DType) -> ModelShape {
        let window = |layer: u32| {
            let Windows { tokens, period } = self.windows?;
            (!(layer + 1).is_multiple_of(period)).then_some(tokens)
        };
        ModelShape {
            hidden: self.hidden,
            intermediate: self.intermediate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            windows: (0..self.layers).map(window).collect(),
            weight: dtype,
            activation: if dtype == DType::F8E4m3 { DType::Bf16 } else { dtype },
            kv: dtype,
            page_tokens: PAGE_TOKENS,
            qkv_bias: self.qkv_bias,
            o_bias: false,
            mlp_bias: false,
            qk_norm: self.qk_norm,
        }
    }
}

/// Number of parameters of a model's matrices; norms and biases are less than a thousandth of them.
pub fn matrix_parameters(shape: &ModelShape, tied_embeddings: bool) -> u64 {
    let [layers, hidden, intermediate, heads, kv_heads, head_dim, vocab] = [
        shape.layers(),
        shape.hidden,
        shape.intermediate,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.vocab,
    ]
    .map(u64::from);
    let attention = hidden * head_dim * (2 * heads + 2 * kv_heads);
    let tables = if tied_embeddings { 1 } else { 2 };
    layers * (attention + 3 * hidden * intermediate) + tables * vocab * hidden
}

/// All known models, by family and size.
pub fn models() -> &'static [KnownModel] {
    MODELS
}

/// The model of this name, without regard to case.
///
/// # Errors
/// [`UnknownModel`], with similar names.
pub fn find(name: &str) -> Result<&'static KnownModel, UnknownModel> {
    if let Some(model) = MODELS.iter().find(|model| model.name.eq_ignore_ascii_case(name)) {
        return Ok(model);
    }
    if NOT_DENSE.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        return Err(UnknownModel::NotDense(name.into()));
    }
    let closest = closest_names(name, MODELS.iter().map(|model| model.name));
    if closest.is_empty() {
        return Err(UnknownModel::Nothing(name.into()));
    }
    Err(UnknownModel::Closest { name: name.into(), closest: closest.join(", ") })
}

/// Why a name has no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownModel {
    /// The model is known not to be a dense transformer.
    #[error(
        "'{0}' is no dense transformer (it has experts or other attention); costs are of dense ones so far"
    )]
    NotDense(String),
    /// Other models have similar names.
    #[error("no model is called '{name}'; closest: {closest}")]
    Closest {
        /// The requested name.
        name: String,
        /// Similar names, separated by commas.
        closest: String,
    },
    /// No known name is similar.
    #[error("no model is called '{0}'; give a name such as llama-3.1-8b or a checkpoint directory")]
    Nothing(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_the_published_ones() {
        for model in models() {
            let counted = model.parameters() as f64 / 1e9;
            assert!(
                (counted / model.parameters_b - 1.0).abs() < 0.01,
                "{}: {counted} against {}",
                model.name,
                model.parameters_b
            );
        }
        assert!(models().len() >= 25);
    }

    #[test]
    fn names_are_found_in_any_case_and_others_explained() {
        assert_eq!(find("LLaMA-3.1-8B").unwrap().layers, 32);
        assert!(matches!(find("Mixtral-8x7B"), Err(UnknownModel::NotDense(_))));
        let error = find("llama3.1-8b").unwrap_err().to_string();
        assert!(error.contains("closest: llama-3.1-8b"), "{error}");
        assert!(find("x").unwrap_err().to_string().contains("checkpoint directory"));
    }

    #[test]
    fn shapes_have_the_published_kv_and_windows() {
        let kv = |name: &str| find(name).unwrap().shape(DType::Bf16).kv_bytes_per_token();
        assert_eq!([kv("llama-3.1-8b"), kv("llama-3.1-70b"), kv("qwen3-32b")], [131_072, 327_680, 262_144]);
        let gemma = find("gemma-3-27b").unwrap().shape(DType::Bf16);
        let full = gemma.windows.iter().filter(|window| window.is_none()).count();
        assert_eq!((gemma.windows.len(), full), (62, 10));
    }
}
