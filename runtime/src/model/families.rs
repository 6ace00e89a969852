//! Families of models: supported ones, and the missing operations of others.

use super::family::FAMILIES as SUPPORTED;
use super::gguf;

/// A family, by the `model_type` of its `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelFamily {
    /// `model_type`.
    pub model_type: &'static str,
    /// Common model names of the family.
    pub models: &'static str,
    /// Missing operations; none if the family is supported.
    pub missing: &'static [&'static str],
}

const STATE: &str = "a recurrent state (linear attention or a state space)";
const CHUNKS: &str = "attention in chunks, with a temperature by position";
const SPARSE: &str = "sparse attention by an index";

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

/// All known families, in the order of their names.
pub const FAMILIES: [ModelFamily; 46] = [
    lacks("apertus", "Apertus", &["an MLP with xIELU and without a gate"]),
    lacks("cohere", "Command R", &["layer norms", "attention and MLP side by side"]),
    lacks("cohere2", "Command A, R7B", &["layer norms", "attention and MLP side by side"]),
    served("deepseek_v2", "DeepSeek V2, V2-Lite"),
    served("deepseek_v3", "DeepSeek V3, R1, V3.1"),
    lacks("deepseek_v32", "DeepSeek V3.2", &[SPARSE]),
    served("ernie4_5", "ERNIE 4.5 dense"),
    lacks(
        "ernie4_5_moe",
        "ERNIE 4.5 with experts",
        &["a choice of experts by softmax with a correction bias"],
    ),
    served("exaone4", "EXAONE 4"),
    served("gemma", "Gemma"),
    served("gemma2", "Gemma 2"),
    served("gemma3_text", "Gemma 3 (text)"),
    lacks("gemma4_text", "Gemma 4", &["embeddings of each layer", "keys and values that layers share"]),
    served("glm", "GLM-4-9B-Chat"),
    served("glm4", "GLM-4-0414"),
    served("glm4_moe", "GLM-4.5, 4.6"),
    served("gpt_oss", "gpt-oss"),
    served("granite", "Granite 3 dense"),
    served("granitemoe", "Granite 3 MoE"),
    served("granitemoehybrid", "Granite 4 without Mamba layers"),
    served("granitemoeshared", "Granite MoE with shared experts"),
    lacks("hunyuan_v1_dense", "Hunyuan dense", &["norms of queries and keys after rope"]),
    served("kimi_k2", "Kimi K2"),
    served("llama", "Llama 1 to 3, SmolLM2, Yi, TinyLlama, DeepSeek-R1-Distill-Llama"),
    lacks("llama4_text", "Llama 4", &[CHUNKS, "experts scaled by a sigmoid before their products"]),
    served("minimax_m2", "MiniMax M2"),
    served("ministral", "Ministral"),
    served("ministral3", "Ministral 3 (text)"),
    served("mistral", "Mistral 7B, Nemo, Small"),
    served("mixtral", "Mixtral"),
    lacks("nemotron", "Nemotron 4, Minitron", &["an MLP with squared ReLU", "layer norms"]),
    served("olmo2", "OLMo 2"),
    served("olmo3", "OLMo 3"),
    served("olmoe", "OLMoE"),
    lacks("phi", "Phi-1, Phi-2", &["layer norms", "attention and MLP side by side"]),
    served("phi3", "Phi-3, Phi-4, Phi-4-mini"),
    lacks("phimoe", "Phi-3.5-MoE", &["layer norms", "a choice of experts by sparse mixing"]),
    served("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
    served("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    served("qwen3", "Qwen3"),
    lacks("qwen3_5_text", "Qwen3.5", &[STATE]),
    served("qwen3_moe", "Qwen3-30B-A3B, 235B-A22B, Qwen3-Coder"),
    lacks("qwen3_next", "Qwen3-Next", &[STATE]),
    served("seed_oss", "Seed-OSS"),
    served("smollm3", "SmolLM3"),
    lacks("starcoder2", "StarCoder2", &["layer norms", "an MLP without a gate"]),
];

/// Where a supported family runs, and from which files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilySupport {
    /// Architectures of its GGUF files; none if these are not supported.
    pub gguf: Vec<&'static str>,
    /// Whether devices can divide its layers (`tp:`).
    pub divides: bool,
    /// Whether the C interface for backends has its operations.
    pub plug_ins: bool,
}

impl ModelFamily {
    /// Returns where the family runs; none if it is not supported.
    pub fn support(&self) -> Option<FamilySupport> {
        let family = SUPPORTED.iter().find(|family| family.model_type == self.model_type)?;
        Some(FamilySupport {
            gguf: gguf::architectures_of(self.model_type),
            divides: family.divides(),
            plug_ins: !family.gelu,
        })
    }
}

/// The missing operations of a family, as text; none if it is supported or unknown.
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
            // a supported family is refused for its configuration, not for its name
            assert_eq!(error.contains("model_type"), !family.missing.is_empty(), "{error}");
            for what in family.missing {
                assert!(error.contains(what), "{error}");
            }
        }
        assert_eq!(lacking("llama"), None);
    }
}
