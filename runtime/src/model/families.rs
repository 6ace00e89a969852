//! Families of models: those that are served, and what others need that no operation here does.

/// A family, by the `model_type` of its `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFamily {
    /// `model_type`.
    pub model_type: &'static str,
    /// Models that people know it by.
    pub models: &'static str,
    /// Operations that it needs and that are not there; none if it is served.
    pub missing: &'static [&'static str],
}

const SOFT_CAPPING: &str = "soft-capping of scores and logits";
const POST_NORMS: &str = "norms of what attention and MLP make, before it is added";
const GELU: &str = "an MLP with GELU";
const NO_ROPE: &str = "layers without rope";
const TWO_ROPES: &str = "two ropes, by kind of layer";
const WHOLE_QK_NORM: &str = "norms of all heads of queries and keys together";
const SCALES: &str = "scales of embeddings, residuals, scores and logits";
const STATE: &str = "a recurrent state (linear attention or a state space)";
const CHUNKS: &str = "attention in chunks, with a temperature by position";
const SPARSE: &str = "sparse attention by an index";
const FUSED: &str = "q, k, v in one matrix, gate and up in another";
const LONG_ROPE: &str = "a rope with factors for long and for short prompts (longrope)";

const fn served(model_type: &'static str, models: &'static str) -> ModelFamily {
    ModelFamily { model_type, models, missing: &[] }
}

const fn lacks(
    model_type: &'static str,
    models: &'static str,
    missing: &'static [&'static str],
) -> ModelFamily {
    ModelFamily { model_type, models, missing }
}

/// All families that are known here, in the order of their names.
pub const FAMILIES: [ModelFamily; 40] = [
    lacks("cohere", "Command R", &["layer norms", "attention and MLP side by side", SCALES]),
    lacks("cohere2", "Command A, R7B", &["layer norms", "attention and MLP side by side", NO_ROPE, SCALES]),
    served("deepseek_v2", "DeepSeek V2, V2-Lite"),
    served("deepseek_v3", "DeepSeek V3, R1, V3.1"),
    lacks("deepseek_v32", "DeepSeek V3.2", &[SPARSE]),
    lacks("exaone4", "EXAONE 4", &[POST_NORMS, NO_ROPE]),
    lacks("gemma", "Gemma", &[GELU, SCALES]),
    lacks("gemma2", "Gemma 2", &[SOFT_CAPPING, POST_NORMS, GELU, SCALES]),
    lacks("gemma3_text", "Gemma 3", &[POST_NORMS, GELU, TWO_ROPES, SCALES]),
    lacks("gemma4_text", "Gemma 4", &[POST_NORMS, GELU, TWO_ROPES, SCALES, "embeddings of each layer"]),
    lacks("glm", "GLM-4-9B-Chat", &[FUSED, "half of a head rotated by pairs, in a dense family"]),
    lacks("glm4", "GLM-4-0414", &[POST_NORMS, FUSED]),
    served("glm4_moe", "GLM-4.5, 4.6"),
    served("gpt_oss", "gpt-oss"),
    lacks("granite", "Granite 3, 4 dense", &[SCALES]),
    lacks("granitemoe", "Granite 3 MoE", &[SCALES, FUSED]),
    lacks("granitemoehybrid", "Granite 4", &[SCALES, STATE]),
    served("kimi_k2", "Kimi K2"),
    served("llama", "Llama 1 to 3, SmolLM2, Yi, TinyLlama, DeepSeek-R1-Distill-Llama"),
    lacks("llama4_text", "Llama 4", &[NO_ROPE, CHUNKS, "experts scaled by a sigmoid before their products"]),
    lacks("minimax_m2", "MiniMax M2", &[WHOLE_QK_NORM]),
    lacks("ministral", "Ministral", &["windows in some layers of a mistral"]),
    lacks("ministral3", "Ministral 3", &["a temperature by position"]),
    served("mistral", "Mistral 7B, Nemo, Small"),
    served("mixtral", "Mixtral"),
    lacks("nemotron", "Nemotron 4, Minitron", &["an MLP with squared ReLU", "layer norms"]),
    lacks("olmo2", "OLMo 2", &[POST_NORMS, WHOLE_QK_NORM]),
    lacks("olmo3", "OLMo 3", &[POST_NORMS, WHOLE_QK_NORM]),
    lacks("olmoe", "OLMoE", &[WHOLE_QK_NORM]),
    lacks("phi", "Phi-1, Phi-2", &["layer norms", "attention and MLP side by side", GELU]),
    lacks("phi3", "Phi-3, Phi-4", &[FUSED, LONG_ROPE]),
    lacks("phimoe", "Phi-3.5-MoE", &["layer norms", "a choice of experts by sparse mixing", LONG_ROPE]),
    served("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
    served("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    served("qwen3", "Qwen3"),
    lacks("qwen3_5_text", "Qwen3.5", &[STATE]),
    served("qwen3_moe", "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder"),
    lacks("qwen3_next", "Qwen3-Next", &[STATE]),
    lacks("smollm3", "SmolLM3", &[NO_ROPE]),
    lacks("starcoder2", "StarCoder2", &["layer norms", GELU]),
];

/// What a family lacks, in words; none if it is served or not known.
pub(super) fn lacking(model_type: &str) -> Option<String> {
    let family = FAMILIES.iter().find(|family| family.model_type == model_type)?;
    (!family.missing.is_empty()).then(|| family.missing.join("; "))
}

#[cfg(test)]
mod tests {
    use super::super::ModelConfig;
    use super::*;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn what_is_listed_as_served_is_and_the_rest_is_refused_with_what_it_lacks() {
        let names = FAMILIES.map(|family| family.model_type);
        assert!(names.is_sorted(), "in the order of names");
        for family in FAMILIES {
            let config = json!({"model_type": family.model_type});
            let config = config.as_object().expect("an object");
            let error = ModelConfig::parse(Path::new("config.json"), config).unwrap_err().to_string();
            // a family that is served is not refused for its name, but for what this configuration lacks
            assert_eq!(error.contains("model_type"), !family.missing.is_empty(), "{error}");
            for what in family.missing {
                assert!(error.contains(what), "{error}");
            }
        }
        assert_eq!(lacking("llama"), None);
    }
}
