//! Dense models, by family and size.

use super::{KnownModel, dense};

pub(super) const MODELS: &[KnownModel] = &[
    dense("llama-2-7b", 6.74, [32, 4096, 11008, 32, 32, 128, 32000]).of("meta-llama/Llama-2-7b-hf", 4096),
    dense("llama-2-13b", 13.02, [40, 5120, 13824, 40, 40, 128, 32000]).of("meta-llama/Llama-2-13b-hf", 4096),
    dense("llama-2-70b", 68.98, [80, 8192, 28672, 64, 8, 128, 32000]).of("meta-llama/Llama-2-70b-hf", 4096),
    dense("llama-3.1-8b", 8.03, [32, 4096, 14336, 32, 8, 128, 128_256])
        .of("meta-llama/Llama-3.1-8B", 131_072),
    dense("llama-3.1-70b", 70.55, [80, 8192, 28672, 64, 8, 128, 128_256])
        .of("meta-llama/Llama-3.1-70B", 131_072),
    dense("llama-3.1-405b", 405.85, [126, 16384, 53248, 128, 8, 128, 128_256])
        .of("meta-llama/Llama-3.1-405B", 131_072),
    dense("llama-3.2-1b", 1.24, [16, 2048, 8192, 32, 8, 64, 128_256])
        .tied()
        .of("meta-llama/Llama-3.2-1B", 131_072),
    dense("llama-3.2-3b", 3.21, [28, 3072, 8192, 24, 8, 128, 128_256])
        .tied()
        .of("meta-llama/Llama-3.2-3B", 131_072),
    dense("llama-3.3-70b", 70.55, [80, 8192, 28672, 64, 8, 128, 128_256])
        .of("meta-llama/Llama-3.3-70B-Instruct", 131_072),
    dense("mistral-7b", 7.25, [32, 4096, 14336, 32, 8, 128, 32768])
        .of("mistralai/Mistral-7B-Instruct-v0.3", 32768),
    dense("mistral-nemo-12b", 12.25, [40, 5120, 14336, 32, 8, 128, 131_072])
        .of("mistralai/Mistral-Nemo-Instruct-2407", 131_072),
    dense("mistral-small-24b", 23.57, [40, 5120, 32768, 32, 8, 128, 131_072])
        .of("mistralai/Mistral-Small-24B-Instruct-2501", 32768),
    dense("mistral-large-123b", 122.61, [88, 12288, 28672, 96, 8, 128, 32768])
        .of("mistralai/Mistral-Large-Instruct-2407", 131_072),
    dense("qwen2.5-0.5b", 0.49, [24, 896, 4864, 14, 2, 64, 151_936])
        .tied()
        .biased()
        .of("Qwen/Qwen2.5-0.5B-Instruct", 32768),
    dense("qwen2.5-1.5b", 1.54, [28, 1536, 8960, 12, 2, 128, 151_936])
        .tied()
        .biased()
        .of("Qwen/Qwen2.5-1.5B-Instruct", 32768),
    dense("qwen2.5-3b", 3.09, [36, 2048, 11008, 16, 2, 128, 151_936])
        .tied()
        .biased()
        .of("Qwen/Qwen2.5-3B-Instruct", 32768),
    dense("qwen2.5-7b", 7.62, [28, 3584, 18944, 28, 4, 128, 152_064])
        .biased()
        .of("Qwen/Qwen2.5-7B-Instruct", 32768),
    dense("qwen2.5-14b", 14.77, [48, 5120, 13824, 40, 8, 128, 152_064])
        .biased()
        .of("Qwen/Qwen2.5-14B", 131_072),
    dense("qwen2.5-32b", 32.76, [64, 5120, 27648, 40, 8, 128, 152_064])
        .biased()
        .of("Qwen/Qwen2.5-32B", 131_072),
    dense("qwen2.5-72b", 72.70, [80, 8192, 29568, 64, 8, 128, 152_064])
        .biased()
        .of("Qwen/Qwen2.5-72B", 131_072),
    dense("qwen3-0.6b", 0.60, [28, 1024, 3072, 16, 8, 128, 151_936])
        .tied()
        .normed()
        .of("Qwen/Qwen3-0.6B", 40960),
    dense("qwen3-1.7b", 1.72, [28, 2048, 6144, 16, 8, 128, 151_936])
        .tied()
        .normed()
        .of("Qwen/Qwen3-1.7B", 40960),
    dense("qwen3-4b", 4.02, [36, 2560, 9728, 32, 8, 128, 151_936]).tied().normed().of("Qwen/Qwen3-4B", 40960),
    dense("qwen3-8b", 8.19, [36, 4096, 12288, 32, 8, 128, 151_936]).normed().of("Qwen/Qwen3-8B", 40960),
    dense("qwen3-14b", 14.77, [40, 5120, 17408, 40, 8, 128, 151_936]).normed().of("Qwen/Qwen3-14B", 40960),
    dense("qwen3-32b", 32.76, [64, 5120, 25600, 64, 8, 128, 151_936]).normed().of("Qwen/Qwen3-32B", 40960),
    dense("gemma-3-12b", 11.77, [48, 3840, 15360, 16, 8, 256, 262_208])
        .tied()
        .normed()
        .windows(1024, 6)
        .of("google/gemma-3-12b-it", 131_072),
    dense("gemma-3-27b", 27.01, [62, 5376, 21504, 32, 16, 128, 262_208])
        .tied()
        .normed()
        .windows(1024, 6)
        .of("google/gemma-3-27b-it", 131_072),
    dense("phi-4", 14.66, [40, 5120, 17920, 40, 10, 128, 100_352]).of("microsoft/phi-4", 16384),
];
