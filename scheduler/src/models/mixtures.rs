//! Mixtures of experts, with any kind of attention, by family and size.
//!
//! `head_dim` and `kv_heads` of models with latent attention stand as their configurations have them, and
//! nothing depends on them.

use super::{KnownModel, dense};
use crate::cost::{EXPANDED_TOKENS, Experts, LatentAttention, LinearAttention};

/// Attention of DeepSeek-V3 (arXiv 2412.19437).
const LATENT: LatentAttention = LatentAttention {
    q_rank: 1536,
    kv_rank: 512,
    nope: 128,
    rope: 64,
    v: 128,
    expanded_tokens: EXPANDED_TOKENS,
};

/// The layers of DeepSeek-V3 and of models derived from it.
const DEEPSEEK_V3: KnownModel = dense("deepseek-v3", 671.03, [61, 7168, 18432, 128, 128, 192, 129_280])
    .latent(LATENT)
    .experts(37.0, Experts { shared: 2048, dense_layers: 3, ..Experts::new(256, 8, 2048) });

/// The layers of Kimi K2 (arXiv 2507.20534).
const KIMI_K2: KnownModel = dense("kimi-k2", 1026.41, [61, 7168, 18432, 64, 64, 192, 163_840])
    .latent(LATENT)
    .experts(32.6, Experts { shared: 2048, dense_layers: 1, ..Experts::new(384, 8, 2048) });

/// The experts of gpt-oss, the only part of it that is published in mxfp4.
const fn gpt_oss(count: u32) -> Experts {
    Experts { quantised_alone: true, ..Experts::new(count, 4, 2880) }
}

/// Linear attention as in Qwen3-Next, in three layers of four.
const fn gated_delta(value_heads: u32) -> LinearAttention {
    LinearAttention {
        key_heads: 16,
        value_heads,
        key_dim: 128,
        value_dim: 128,
        convolution: 4,
        period: 4,
        gated: true,
    }
}

pub(super) const MODELS: &[KnownModel] = &[
    dense("mixtral-8x7b", 46.70, [32, 4096, 14336, 32, 8, 128, 32000])
        .experts(12.9, Experts::new(8, 2, 14336))
        .of("mistralai/Mixtral-8x7B-v0.1", 32768),
    dense("mixtral-8x22b", 140.62, [56, 6144, 16384, 48, 8, 128, 32000])
        .experts(39.0, Experts::new(8, 2, 16384))
        .of("mistralai/Mixtral-8x22B-v0.1", 65536),
    dense("qwen3-30b-a3b", 30.53, [48, 2048, 6144, 32, 4, 128, 151_936])
        .normed()
        .experts(3.3, Experts::new(128, 8, 768))
        .of("Qwen/Qwen3-30B-A3B", 40960),
    dense("qwen3-235b-a22b", 235.09, [94, 4096, 12288, 64, 4, 128, 151_936])
        .normed()
        .experts(22.2, Experts::new(128, 8, 1536))
        .of("Qwen/Qwen3-235B-A22B", 40960),
    dense("qwen3-coder-480b-a35b", 480.15, [62, 6144, 8192, 96, 8, 128, 151_936])
        .normed()
        .experts(35.4, Experts::new(160, 8, 2560))
        .of("Qwen/Qwen3-Coder-480B-A35B-Instruct", 262_144),
    dense("qwen3-next-80b-a3b", 79.6, [48, 2048, 5120, 16, 2, 256, 151_936])
        .normed()
        .linear(gated_delta(32))
        .experts(3.9, Experts { shared: 512, ..Experts::new(512, 10, 512) })
        .of("Qwen/Qwen3-Next-80B-A3B-Instruct", 262_144),
    dense("qwen3.5-35b-a3b", 34.7, [40, 2048, 512, 16, 2, 256, 248_320])
        .normed()
        .linear(gated_delta(32))
        .experts(3.4, Experts { shared: 512, ..Experts::new(256, 8, 512) })
        .of("Qwen/Qwen3.5-35B-A3B", 262_144),
    dense("qwen3.5-397b-a17b", 396.3, [60, 4096, 1024, 32, 2, 256, 248_320])
        .normed()
        .linear(gated_delta(64))
        .experts(17.0, Experts { shared: 1024, ..Experts::new(512, 10, 1024) })
        .of("Qwen/Qwen3.5-397B-A17B", 262_144),
    dense("gpt-oss-20b", 20.91, [24, 2880, 2880, 64, 8, 64, 201_088])
        .biased()
        .windows(128, 2)
        .experts(3.6, gpt_oss(32))
        .of("openai/gpt-oss-20b", 131_072),
    dense("gpt-oss-120b", 116.79, [36, 2880, 2880, 64, 8, 64, 201_088])
        .biased()
        .windows(128, 2)
        .experts(5.1, gpt_oss(128))
        .of("openai/gpt-oss-120b", 131_072),
    dense("llama-4-scout", 107.8, [48, 5120, 8192, 40, 8, 128, 202_048])
        .windows(8192, 4)
        .experts(17.2, Experts { shared: 8192, ..Experts::new(16, 1, 8192) })
        .of("meta-llama/Llama-4-Scout-17B-16E-Instruct", 10_485_760),
    dense("llama-4-maverick", 400.7, [48, 5120, 16384, 40, 8, 128, 202_048])
        .windows(8192, 4)
        .experts(17.2, Experts { shared: 8192, every: 2, ..Experts::new(128, 1, 8192) })
        .of("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 1_048_576),
    dense("glm-4.5", 352.8, [92, 5120, 12288, 96, 8, 128, 151_552])
        .biased()
        .normed()
        .experts(32.0, Experts { shared: 1536, dense_layers: 3, ..Experts::new(160, 8, 1536) })
        .of("zai-org/GLM-4.5", 131_072),
    dense("glm-4.5-air", 106.85, [46, 4096, 10944, 96, 8, 128, 151_552])
        .biased()
        .experts(12.0, Experts { shared: 1408, dense_layers: 1, ..Experts::new(128, 8, 1408) })
        .of("zai-org/GLM-4.5-Air", 131_072),
    dense("minimax-m2.5", 228.69, [62, 3072, 1536, 48, 8, 128, 200_064])
        .normed()
        .experts(10.0, Experts::new(256, 8, 1536))
        .of("MiniMaxAI/MiniMax-M2.5", 196_608),
    dense("deepseek-v2-lite", 15.71, [27, 2048, 10944, 16, 16, 192, 102_400])
        .latent(LatentAttention { q_rank: 0, ..LATENT })
        .experts(2.4, Experts { shared: 2816, dense_layers: 1, ..Experts::new(64, 6, 1408) })
        .of("deepseek-ai/DeepSeek-V2-Lite", 163_840),
    DEEPSEEK_V3.of("deepseek-ai/DeepSeek-V3", 163_840),
    DEEPSEEK_V3.named("deepseek-r1").of("deepseek-ai/DeepSeek-R1", 163_840),
    KIMI_K2.of("moonshotai/Kimi-K2-Instruct", 131_072),
    KIMI_K2.named("kimi-k2.5").of("moonshotai/Kimi-K2.5", 262_144),
];

/// Models that are known by name and cannot be priced, and why.
pub(super) const UNPRICED: &[(&str, &str)] = &[
    ("deepseek-v3.2", "its attention chooses keys by an index"),
    ("deepseek-v4-flash", "its attention compresses KV"),
    ("deepseek-v4-pro", "its attention compresses KV"),
    ("gemma-4-26b-a4b", "its layers have two shapes of attention"),
    ("glm-5", "its attention chooses keys by an index"),
    ("glm-5.2", "its attention chooses keys by an index"),
    ("kimi-k3", "its linear attention's lengths are not known"),
    ("minimax-m3", "its attention chooses keys by an index"),
    ("nemotron-3-nano-30b-a3b", "its layers are either attention, state space or experts"),
];
