//! Supported families: defaults of their configuration classes, and the differences of their layers from
//! Llama's.
//!
//! A dense family is one entry of [`FAMILIES`]. A [`LayerStyle`](mixfleet_scheduler::layers::LayerStyle) has
//! the differences in computation, which `style.rs` derives from the entry and the configuration. A
//! [`TensorLayout`] has the differences in storage.

use super::rope::RopeDefaults;
use super::stored::{NormNames, TensorLayout};
use mixfleet_scheduler::layers::NormPlacement;

/// A supported `model_type` and the defaults of its configuration class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) model_type: &'static str,
    pub(super) architecture: &'static str,
    pub(super) context_max: u32,
    /// `None` means as many as query heads.
    pub(super) kv_heads: Option<u32>,
    /// `None` means hidden / heads.
    pub(super) head_dim: Option<u32>,
    pub(super) norm_eps: f64,
    pub(super) rope: RopeDefaults,
    /// Rope defaults of layers with a window, if they differ.
    pub(super) sliding_rope: Option<RopeDefaults>,
    /// Whether the LM head is the embedding unless the configuration says otherwise.
    pub(super) tied: bool,
    /// Whether the MLP's activation is GELU instead of SiLU.
    pub(super) gelu: bool,
    pub(super) biases: FamilyBiases,
    pub(super) qk_norm: QkNorm,
    pub(super) scales: StreamScales,
    pub(super) layout: TensorLayout,
    /// Whether rotated pairs are adjacent.
    pub(super) interleaved: bool,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FamilyBiases {
    /// None, regardless of the configuration.
    Never,
    /// q, k and v.
    Qkv,
    /// q, k and v if this field is true; the second value is its default.
    QkvBy(&'static str, bool),
    /// All projections of attention if `attention_bias` is true, which has this default. With `with_mlp`,
    /// those of the MLP if `mlp_bias` is true.
    AttentionBy { default: bool, with_mlp: bool },
    /// All projections of attention and of the MLP if this field is true.
    AllBy(&'static str),
    /// Those for which `attention_bias` (true by default), `attention_out_bias` and `mlp_bias` say so.
    Each,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QkNorm {
    Never,
    /// Per head.
    Heads,
    /// Per head where `use_qk_norm` is true.
    HeadsByFlag,
    /// Over all heads together.
    Whole,
}

/// Multipliers of the residual stream, scores and logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamScales {
    None,
    /// The four multipliers of Granite.
    Granite,
    /// Embeddings times the root of their length; in Gemma 3, scores over the root of
    /// `query_pre_attn_scalar`.
    Gemma,
}

const LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    context_max: 2048,
    kv_heads: None,
    head_dim: None,
    norm_eps: 1e-6,
    rope: RopeDefaults { theta: 1e4, partial: None },
    sliding_rope: None,
    tied: false,
    gelu: false,
    biases: FamilyBiases::AttentionBy { default: false, with_mlp: true },
    qk_norm: QkNorm::Never,
    scales: StreamScales::None,
    layout: TensorLayout::LLAMA,
    interleaved: false,
};

/// Biases of attention by `attention_bias`, which is false by default.
const BY_FLAG: FamilyBiases = FamilyBiases::AttentionBy { default: false, with_mlp: false };

const GLM: Family = Family {
    context_max: 131_072,
    kv_heads: Some(2),
    head_dim: Some(128),
    norm_eps: 1.5625e-7,
    rope: RopeDefaults { theta: 1e4, partial: Some(0.5) },
    biases: FamilyBiases::QkvBy("attention_bias", true),
    layout: TensorLayout { fused_mlp: true, ..TensorLayout::LLAMA },
    interleaved: true,
    ..of("glm", "GlmForCausalLM")
};

const GEMMA: Family = Family {
    context_max: 8192,
    kv_heads: Some(16),
    head_dim: Some(256),
    tied: true,
    gelu: true,
    biases: BY_FLAG,
    scales: StreamScales::Gemma,
    layout: TensorLayout { offset_norms: true, ..TensorLayout::LLAMA },
    ..of("gemma", "GemmaForCausalLM")
};

const OLMO2: Family = Family {
    norm_eps: 1e-5,
    biases: BY_FLAG,
    qk_norm: QkNorm::Whole,
    layout: TensorLayout { norms: NormNames::Olmo, ..TensorLayout::LLAMA },
    ..of("olmo2", "Olmo2ForCausalLM")
};

const GRANITE_MOE: Family = Family {
    scales: StreamScales::Granite,
    biases: BY_FLAG,
    layout: TensorLayout { granite_mlp: true, ..TensorLayout::LLAMA },
    ..of("granitemoe", "GraniteMoeForCausalLM")
};

/// All supported families.
pub(super) const FAMILIES: [Family; 32] = [
    LLAMA,
    Family {
        context_max: 131_072,
        kv_heads: Some(8),
        biases: FamilyBiases::Never,
        ..of("mistral", "MistralForCausalLM")
    },
    Family {
        context_max: 131_072,
        kv_heads: Some(8),
        biases: FamilyBiases::Never,
        ..of("ministral", "MinistralForCausalLM")
    },
    Family {
        context_max: 262_144,
        kv_heads: Some(8),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 1e6, partial: None },
        biases: FamilyBiases::Never,
        ..of("ministral3", "Ministral3ForCausalLM")
    },
    Family {
        context_max: 32_768,
        kv_heads: Some(32),
        biases: FamilyBiases::Qkv,
        ..of("qwen2", "Qwen2ForCausalLM")
    },
    Family {
        context_max: 32_768,
        kv_heads: Some(32),
        head_dim: Some(128),
        biases: BY_FLAG,
        qk_norm: QkNorm::Heads,
        ..of("qwen3", "Qwen3ForCausalLM")
    },
    Family {
        context_max: 32_768,
        kv_heads: Some(16),
        biases: FamilyBiases::QkvBy("qkv_bias", true),
        ..of("qwen2_moe", "Qwen2MoeForCausalLM")
    },
    Family {
        context_max: 32_768,
        kv_heads: Some(4),
        biases: BY_FLAG,
        qk_norm: QkNorm::Heads,
        ..of("qwen3_moe", "Qwen3MoeForCausalLM")
    },
    Family {
        context_max: 131_072,
        kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 1e6, partial: None },
        biases: FamilyBiases::Never,
        ..of("mixtral", "MixtralForCausalLM")
    },
    Family {
        context_max: 131_072,
        kv_heads: Some(8),
        head_dim: Some(64),
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 1.5e5, partial: None },
        biases: FamilyBiases::AttentionBy { default: true, with_mlp: false },
        ..of("gpt_oss", "GptOssForCausalLM")
    },
    Family {
        context_max: 131_072,
        kv_heads: Some(8),
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 1e4, partial: Some(0.5) },
        biases: FamilyBiases::QkvBy("attention_bias", false),
        qk_norm: QkNorm::HeadsByFlag,
        ..of("glm4_moe", "Glm4MoeForCausalLM")
    },
    Family { biases: FamilyBiases::Never, ..of("deepseek_v2", "DeepseekV2ForCausalLM") },
    Family { context_max: 4096, biases: FamilyBiases::Never, ..of("deepseek_v3", "DeepseekV3ForCausalLM") },
    Family { context_max: 4096, biases: FamilyBiases::Never, ..of("kimi_k2", "DeepseekV3ForCausalLM") },
    Family {
        context_max: 4096,
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 1e4, partial: Some(1.0) },
        biases: FamilyBiases::Never,
        layout: TensorLayout { fused_qkv: true, fused_mlp: true, ..TensorLayout::LLAMA },
        ..of("phi3", "Phi3ForCausalLM")
    },
    Family {
        context_max: 32_768,
        kv_heads: Some(4),
        rope: RopeDefaults { theta: 2e6, partial: None },
        tied: true,
        ..of("smollm3", "SmolLM3ForCausalLM")
    },
    Family { scales: StreamScales::Granite, ..of("granite", "GraniteForCausalLM") },
    GRANITE_MOE,
    Family { model_type: "granitemoeshared", architecture: "GraniteMoeSharedForCausalLM", ..GRANITE_MOE },
    Family { model_type: "granitemoehybrid", architecture: "GraniteMoeHybridForCausalLM", ..GRANITE_MOE },
    Family {
        context_max: 196_608,
        kv_heads: Some(8),
        head_dim: Some(128),
        rope: RopeDefaults { theta: 5e6, partial: Some(1.0) },
        biases: FamilyBiases::Never,
        qk_norm: QkNorm::Whole,
        ..of("minimax_m2", "MiniMaxM2ForCausalLM")
    },
    Family {
        context_max: 131_072,
        kv_heads: Some(2),
        head_dim: Some(128),
        norm_eps: 1e-5,
        rope: RopeDefaults { theta: 5e5, partial: None },
        tied: true,
        biases: FamilyBiases::AllBy("use_bias"),
        interleaved: true,
        ..of("ernie4_5", "Ernie4_5ForCausalLM")
    },
    Family {
        context_max: 524_288,
        kv_heads: Some(8),
        head_dim: Some(128),
        biases: FamilyBiases::Each,
        ..of("seed_oss", "SeedOssForCausalLM")
    },
    OLMO2,
    Family {
        model_type: "olmo3",
        architecture: "Olmo3ForCausalLM",
        rope: RopeDefaults { theta: 5e5, partial: None },
        sliding_rope: Some(RopeDefaults { theta: 5e5, partial: None }),
        ..OLMO2
    },
    Family {
        context_max: 4096,
        norm_eps: 1e-5,
        biases: BY_FLAG,
        qk_norm: QkNorm::Whole,
        ..of("olmoe", "OlmoeForCausalLM")
    },
    GEMMA,
    Family {
        model_type: "gemma2",
        architecture: "Gemma2ForCausalLM",
        kv_heads: Some(4),
        layout: TensorLayout { norms: NormNames::Gemma, ..GEMMA.layout },
        ..GEMMA
    },
    Family {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        context_max: 131_072,
        kv_heads: Some(4),
        rope: RopeDefaults { theta: 1e6, partial: None },
        sliding_rope: Some(RopeDefaults { theta: 1e4, partial: None }),
        qk_norm: QkNorm::Heads,
        layout: TensorLayout { norms: NormNames::Gemma, ..GEMMA.layout },
        ..GEMMA
    },
    GLM,
    Family {
        model_type: "glm4",
        architecture: "Glm4ForCausalLM",
        layout: TensorLayout { norms: NormNames::Glm4, ..GLM.layout },
        ..GLM
    },
    Family {
        kv_heads: Some(32),
        norm_eps: 1e-5,
        biases: FamilyBiases::Never,
        qk_norm: QkNorm::Heads,
        layout: TensorLayout { norms: NormNames::Olmo, ..TensorLayout::LLAMA },
        ..of("exaone4", "Exaone4ForCausalLM")
    },
];

impl Family {
    /// Whether devices can divide its layers.
    pub(super) fn divides(&self) -> bool {
        self.layout.norms.placement() == NormPlacement::Before && self.qk_norm != QkNorm::Whole
    }
}

/// Returns a family with Llama's defaults under another name.
const fn of(model_type: &'static str, architecture: &'static str) -> Family {
    Family { model_type, architecture, ..LLAMA }
}
