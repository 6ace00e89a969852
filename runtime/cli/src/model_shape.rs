//! The shape of a known model or of a checkpoint, without its weights.

use crate::failure::UsageError;
use anyhow::{Context, Result};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_runtime::model::ModelConfig;
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::models::find;
use std::path::Path;

/// Tokens per KV page assumed for a checkpoint; only the size of a page table depends on it.
const PAGE_TOKENS: u32 = 16;

/// A model whose cost and size are known.
pub(crate) struct SizedModel {
    pub(crate) name: String,
    pub(crate) shape: ModelShape,
    pub(crate) tied_embeddings: bool,
    /// Longest sequence, in tokens.
    pub(crate) context_max: u32,
}

impl SizedModel {
    pub(crate) fn weight_bytes(&self) -> f64 {
        self.shape.weight_bytes(self.tied_embeddings).0
    }

    /// Bytes of weights that a step reads: all but an embedding that is not the head too.
    pub(crate) fn step_bytes(&self) -> f64 {
        self.shape.weight_bytes(true).0
    }
}

/// Whether a path is a checkpoint directory or a GGUF file.
pub(crate) fn is_checkpoint(path: &Path) -> bool {
    path.is_dir() || (path.is_file() && path.extension().is_some_and(|end| end == "gguf"))
}

/// The known model or checkpoint of that name, with its weights stored as given, else as the checkpoint has
/// them or in bf16.
pub(crate) fn of(name: &str, stored: Option<StoredAs>) -> Result<SizedModel> {
    let path = Path::new(name);
    if is_checkpoint(path) {
        let config = ModelConfig::open(path)
            .with_context(|| format!("cannot read the model's shape in {}", path.display()))?;
        let stored =
            stored.unwrap_or(config.format.map_or(StoredAs::Plain(config.dtype), StoredAs::Quantised));
        let shape = config.cost_shape(stored.plain(), stored.kv(), PAGE_TOKENS);
        let shape = ModelShape { weight: stored.plain(), ..shape.stored_as(stored.format()) };
        let ModelConfig { tied_embeddings, context_max, .. } = config;
        return Ok(SizedModel { name: name.into(), shape, tied_embeddings, context_max });
    }
    let model = find(name).map_err(|error| UsageError(format!("no checkpoint at that path, and {error}")))?;
    Ok(SizedModel {
        name: model.name.into(),
        shape: model.shape_as(stored.unwrap_or(StoredAs::Plain(DType::Bf16))),
        tied_embeddings: model.tied_embeddings,
        context_max: model.context,
    })
}
