//! The model to serve: a checkpoint directory, or a model with random weights.

use crate::Usage;
use crate::args::ModelArgs;
use anyhow::{Context, Result};
use mixfleet_hal::DType;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::model::{ChatTemplate, Checkpoint, RandomCheckpoint, Tokenizer, builtin};
use mixfleet_runtime::text::LoadedText;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// What stands before the shape's name if the weights are to be random.
const RANDOM: &str = "random:";

/// A checkpoint with its tokenizer and chat template, and the dtypes to run it in.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) text: Arc<LoadedText>,
    pub(crate) activations: DType,
    pub(crate) kv: DType,
    /// Digest of the configuration and the tensors' shapes, but not of their content.
    pub(crate) shape_digest: String,
    pub(crate) tokenizer_digest: String,
}

impl Model {
    /// Maps the checkpoint and reads tokenizer and chat template.
    pub(crate) fn load(args: &ModelArgs, env: &SharedEnv) -> Result<Self> {
        let (name, checkpoint, tokenizer, template) = match &args.model {
            Some(directory) => match directory.to_str().and_then(|text| text.strip_prefix(RANDOM)) {
                Some(shape) => random(shape)?,
                None => open(directory)?,
            },
            None => (
                builtin::NAME.to_string(),
                builtin::checkpoint()?,
                builtin::tokenizer()?,
                Some(builtin::chat_template()?),
            ),
        };
        let activations = args.activations.unwrap_or(checkpoint.config.dtype);
        let tokenizer_digest =
            format!("{:032x}", xxh3_128(tokenizer.to_json().unwrap_or_default().as_bytes()));
        let vocab = checkpoint.config.vocab;
        Ok(Model {
            name,
            shape_digest: checkpoint.shape_digest(),
            text: Arc::new(LoadedText { tokenizer, template, env: env.clone(), vocab }),
            activations,
            kv: args.kv_dtype.unwrap_or(activations),
            checkpoint,
            tokenizer_digest,
        })
    }
}

/// A model of a known shape whose weights are random, with the tokenizer of the built-in one.
fn random(shape: &str) -> Result<(String, Checkpoint, Tokenizer, Option<ChatTemplate>)> {
    let known = mixfleet_scheduler::models::find(shape).map_err(|error| Usage(error.to_string()))?;
    let checkpoint = RandomCheckpoint::of_shape(known)?.repeating()?;
    let name = format!("{RANDOM}{}", known.name);
    Ok((name, checkpoint, builtin::tokenizer()?, Some(builtin::chat_template()?)))
}

fn open(directory: &Path) -> Result<(String, Checkpoint, Tokenizer, Option<ChatTemplate>)> {
    let checkpoint = Checkpoint::open(directory, &mixfleet_cpu::host::Mapper)
        .with_context(|| format!("cannot load the checkpoint in {}", directory.display()))?;
    let tokenizer = Tokenizer::open(directory)
        .context("mixfleet needs the checkpoint's fast tokenizer, the file tokenizer.json")?;
    let template = ChatTemplate::open(directory)?;
    let absolute = directory.canonicalize().unwrap_or_else(|_| directory.to_path_buf());
    let name = absolute.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
    Ok((name, checkpoint, tokenizer, template))
}
