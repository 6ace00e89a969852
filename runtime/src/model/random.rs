//! Checkpoints with random weights, for tests and for trying the program without a download.

use super::config::ModelConfig;
use super::error::{Error, Result};
use super::load::{Checkpoint, HostTensor, Location};
use super::names::PlannedTensor;
use super::stored::{self, StoredTensor};
use super::{builtin, names};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::random::Stream;
use mixfleet_hal::{DType, HostMemory};
use mixfleet_scheduler::layers::Weight;
use mixfleet_scheduler::models::{KnownModel, Windows};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

/// Where tensors of a repeating checkpoint may begin in their pattern: a step keeps every device's alignment.
const STEP_BYTES: usize = 256;

/// Bytes after which a large tensor of a repeating checkpoint repeats: a prime number of steps, so that no
/// row of a matrix equals one of the thousands before it.
pub const PERIOD_BYTES: usize = 16_381 * STEP_BYTES;

/// A checkpoint whose weights are derived from a seed. Its output means nothing.
#[derive(Clone, Debug)]
pub struct RandomCheckpoint {
    /// The content of its `config.json`, in either spelling.
    pub config: Map<String, Value>,
    /// Stored dtype of all tensors.
    pub dtype: DType,
    /// Seed of the generator.
    pub seed: u64,
}

impl RandomCheckpoint {
    /// The model's shape.
    ///
    /// # Errors
    /// When `config` is invalid; the error names the field.
    pub fn model_config(&self) -> Result<ModelConfig> {
        let mut config = ModelConfig::parse(Path::new("config.json"), &self.config)?;
        (config.dtype, config.format) = (self.dtype, None);
        // zeros, as for uninitialised weights
        let heads = config.layers as usize * config.heads as usize;
        config.sinks = config.sinks.map(|_| std::iter::repeat_n(0.0, heads).collect());
        Ok(config)
    }

    /// The tensors. Matrices are uniform with the variance that preserves the magnitude of activations,
    /// biases are small, norms are around 1.
    ///
    /// # Errors
    /// When `config` is invalid.
    pub fn tensors(&self) -> Result<Vec<HostTensor>> {
        let config = self.model_config()?;
        let one = |(i, (tensor, weight)): (usize, (StoredTensor, Weight))| {
            let StoredTensor { name, shape, .. } = tensor;
            let mut spread = Spread::of(weight, &shape);
            if config.layout.offset_norms && spread.middle == 1.0 {
                spread.middle = 0.0;
            }
            let stream = Stream::new(self.seed ^ mixfleet_hal::random::bits(self.seed, i as u64));
            let bytes = spread.fill(shape.iter().product(), self.dtype, stream);
            HostTensor { name, dtype: self.dtype, shape, bytes }
        };
        Ok(stored::stored_tensors(&config).into_iter().enumerate().map(one).collect())
    }

    /// The checkpoint in memory.
    ///
    /// # Errors
    /// When `config` is invalid.
    pub fn load(&self) -> Result<Checkpoint> {
        Checkpoint::from_parts(self.model_config()?, self.tensors()?)
    }

    /// A checkpoint of the shape of a known model, in bf16, with the context of Llama 3.1.
    ///
    /// # Errors
    /// When the runtime does not run models of this kind.
    pub fn of_shape(model: &KnownModel) -> Result<Self> {
        let gemma = model.windows.filter(|_| model.repository.starts_with("google/gemma-3"));
        if model.windows.is_some() && gemma.is_none() {
            let problem = "layers with and without a sliding window in turn are not supported";
            return Err(Error::file(Path::new(model.name), problem));
        }
        if !model.is_plain() {
            let problem = "experts, latent attention and linear attention are not supported";
            return Err(Error::file(Path::new(model.name), problem));
        }
        let (model_type, architecture) = match (model.qk_norm, model.qkv_bias) {
            (true, _) => ("qwen3", "Qwen3ForCausalLM"),
            (_, true) => ("qwen2", "Qwen2ForCausalLM"),
            _ => ("llama", "LlamaForCausalLM"),
        };
        let config = json!({
            "model_type": model_type, "architectures": [architecture], "hidden_act": "silu",
            "hidden_size": model.hidden, "intermediate_size": model.intermediate,
            "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "vocab_size": model.vocab,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
            "tie_word_embeddings": model.tied_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "bos_token_id": builtin::BOS, "eos_token_id": builtin::EOS,
        });
        let mut config = config.as_object().cloned().unwrap_or_default();
        if let Some(Windows { tokens, period }) = gemma {
            let own = json!({
                "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
                "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": model.head_dim,
                "sliding_window": tokens, "sliding_window_pattern": period,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            });
            config.extend(own.as_object().cloned().unwrap_or_default());
        }
        Ok(RandomCheckpoint { config, dtype: DType::Bf16, seed: 1 })
    }

    /// The checkpoint in little host memory, for models of any size. A tensor of more than [`PERIOD_BYTES`]
    /// repeats after that many bytes, from its own offset in a pattern, and a device copies them repeatedly.
    /// Neighbouring rows of a matrix differ, as do matrices of the same shape.
    ///
    /// # Errors
    /// When `config` is invalid.
    pub fn repeating(&self) -> Result<Checkpoint> {
        self.repeating_every(PERIOD_BYTES)
    }

    pub(super) fn repeating_every(&self, period_bytes: usize) -> Result<Checkpoint> {
        let config = self.model_config()?;
        let mut random = Stream::new(self.seed);
        let (mut patterns, mut tensors) = (Vec::new(), HashMap::new());
        let mut known: Vec<Spread> = Vec::new();
        let elements = period_bytes as u64 / self.dtype.size_bytes();
        for tensor in names::tensors(&config) {
            let spread = Spread::of(tensor.weight, &tensor.shape);
            let PlannedTensor { name, shape, .. } = tensor;
            let shard = known.iter().position(|other| *other == spread).unwrap_or_else(|| {
                known.push(spread);
                let period = spread.fill(elements, self.dtype, Stream::new(random.next_u64()));
                patterns.push(Arc::new(period.repeat(2)) as Arc<dyn HostMemory>);
                known.len() - 1
            });
            let start = to_usize(random.below((period_bytes / STEP_BYTES) as u64)) * STEP_BYTES;
            let bytes = to_usize(shape.iter().product::<u64>() * self.dtype.size_bytes());
            let range = start..start + bytes.min(period_bytes);
            tensors.insert(name, Location { dtype: self.dtype, shape, shard, range });
        }
        Ok(Checkpoint { config, shards: patterns, tensors, made: BTreeMap::new() }.with_sinks())
    }

    /// Writes the checkpoint as transformers would: `config.json`, safetensors (with an index if `shards` is
    /// above 1), and the byte-level tokenizer and chat template of the built-in model.
    ///
    /// # Errors
    /// When `config` is invalid or a file cannot be written.
    pub fn write(&self, directory: &Path, shards: usize) -> Result<()> {
        let save = |name: &str, text: &[u8]| {
            let file = directory.join(name);
            std::fs::write(&file, text).map_err(|e| Error::read(&file, e))
        };
        let tensors = self.tensors()?;
        let per_shard = tensors.len().div_ceil(shards.max(1)).max(1);
        let count = tensors.len().div_ceil(per_shard);
        let mut weight_map = BTreeMap::new();
        for (i, part) in tensors.chunks(per_shard).enumerate() {
            let name = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            weight_map.extend(part.iter().map(|tensor| (tensor.name.clone(), name.clone())));
            save(&name, &serialize(part).map_err(|e| Error::file(&directory.join(&name), e.to_string()))?)?;
        }
        if count > 1 {
            let index = json!({"metadata": {}, "weight_map": weight_map});
            save("model.safetensors.index.json", index.to_string().as_bytes())?;
        }
        save("config.json", Value::Object(self.config.clone()).to_string().as_bytes())?;
        save("tokenizer.json", builtin::tokenizer()?.to_json()?.as_bytes())?;
        save("tokenizer_config.json", builtin::tokenizer_config().to_string().as_bytes())
    }
}

/// Distribution of a tensor's elements.
#[derive(Clone, Copy, PartialEq)]
struct Spread {
    middle: f64,
    deviation: f64,
}

impl Spread {
    fn of(weight: Weight, shape: &[u64]) -> Self {
        let (middle, deviation) = match (weight, shape) {
            (Weight::Embedding | Weight::Sinks, _) => (0.0, 1.0),
            (_, [_, inputs]) => (0.0, (1.0 / *inputs as f64).sqrt()),
            (Weight::Correction, _) => (0.0, 0.1),
            (weight, _) if weight.is_bias() => (0.0, 0.2),
            _ => (1.0, 0.1),
        };
        Spread { middle, deviation }
    }

    /// Random elements.
    fn fill(self, elements: u64, dtype: DType, mut stream: Stream) -> Vec<u8> {
        let width = self.deviation * 12f64.sqrt(); // a uniform density of width w has variance w^2 / 12
        let mut bytes = Vec::with_capacity(to_usize(elements * dtype.size_bytes()));
        for _ in 0..elements {
            dtype.encode(self.middle + width * (stream.next_unit() - 0.5), &mut bytes);
        }
        bytes
    }
}

fn serialize(tensors: &[HostTensor]) -> std::result::Result<Vec<u8>, safetensors::SafeTensorError> {
    let view = |tensor: &'_ HostTensor| {
        let dtype = match tensor.dtype {
            DType::F32 => Dtype::F32,
            DType::Bf16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            DType::F8E4m3 => Dtype::F8_E4M3,
            DType::I8 => Dtype::I8,
            DType::U32 => Dtype::U32,
        };
        let shape = tensor.shape.iter().map(|dim| to_usize(*dim)).collect();
        (dtype, shape)
    };
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let (dtype, shape) = view(tensor);
        views.push((tensor.name.as_str(), TensorView::new(dtype, shape, &tensor.bytes)?));
    }
    safetensors::serialize(views, None)
}
