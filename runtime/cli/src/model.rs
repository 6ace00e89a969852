//! The model to serve: a checkpoint directory, or a model with random weights.

use crate::args::ModelArgs;
use crate::check_files;
use crate::failure::UsageError;
use crate::hub::{self, Located};
use crate::trials::ChildTrials;
use anyhow::{Context, Result};
use mixfleet_hal::DType;
use mixfleet_hal::files::{self, TEXT_BYTES_MAX};
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::model::{
    ChatTemplate, Checkpoint, GenerationDefaults, RandomCheckpoint, Tokenizer, builtin,
};
use mixfleet_runtime::request::Sampling;
use mixfleet_runtime::text::LoadedText;
use std::path::Path;
use std::sync::Arc;
use twox_hash::XxHash3_128;

/// What stands before the shape's name if the weights are to be random.
const RANDOM: &str = "random:";

/// A checkpoint with its tokenizer and chat template, and the dtypes to run it in.
pub(crate) struct LoadedModel {
    pub(crate) name: String,
    pub(crate) checkpoint: Checkpoint,
    /// What its weights are drawn from, if they are random: devices that compute nothing need none.
    pub(crate) random: Option<RandomCheckpoint>,
    pub(crate) text: Arc<LoadedText>,
    /// The checkpoint's sampling parameters.
    pub(crate) defaults: GenerationDefaults,
    pub(crate) activations: DType,
    pub(crate) kv: DType,
    /// Digest of the configuration and the tensors' shapes, but not of their content.
    pub(crate) shape_digest: String,
    pub(crate) tokenizer_digest: String,
}

impl LoadedModel {
    /// Maps the checkpoint and reads tokenizer and chat template.
    pub(crate) fn load(args: &ModelArgs, env: &SharedEnv) -> Result<Self> {
        let shape = args.model.as_ref().and_then(|model| model.to_str()?.strip_prefix(RANDOM));
        let located = args.model.as_deref().filter(|_| shape.is_none()).map(hub::located).transpose()?;
        let (name, checkpoint, random, tokenizer, template) = match (&located, shape) {
            (_, Some(shape)) => random(shape)?,
            (Some(located), None) => open(located, args.random_weights)?,
            (None, None) => (
                builtin::NAME.to_string(),
                builtin::checkpoint()?,
                None,
                builtin::tokenizer()?,
                Some(builtin::chat_template()?),
            ),
        };
        let defaults = match &located {
            Some(located) => GenerationDefaults::open(&located.path)?,
            None => GenerationDefaults::default(),
        };
        let activations = args.activations.unwrap_or(checkpoint.config.dtype);
        let tokenizer_digest =
            format!("{:032x}", XxHash3_128::oneshot(tokenizer.to_json().unwrap_or_default().as_bytes()));
        let vocab = checkpoint.config.vocab;
        let text = LoadedText::new(tokenizer, template, env.clone(), vocab);
        Ok(LoadedModel {
            name,
            shape_digest: checkpoint.shape_digest(),
            text: Arc::new(text.with_trials(Box::new(ChildTrials))),
            defaults,
            activations,
            kv: args.kv_dtype.unwrap_or(activations),
            checkpoint,
            random,
            tokenizer_digest,
        })
    }
}

impl LoadedModel {
    /// How a request is sampled that does not say.
    pub(crate) fn sampling(&self) -> Sampling {
        let (given, plain) = (&self.defaults, Sampling::default());
        Sampling {
            temperature: given.temperature.unwrap_or(plain.temperature),
            top_p: given.top_p.unwrap_or(plain.top_p),
            top_k: given.top_k.unwrap_or(plain.top_k),
            min_p: given.min_p.unwrap_or(plain.min_p),
            repetition_penalty: given.repetition_penalty.unwrap_or(plain.repetition_penalty),
            ..plain
        }
    }
}

/// Name, weights and where they are from, tokenizer and chat template.
type Loading = (String, Checkpoint, Option<RandomCheckpoint>, Tokenizer, Option<ChatTemplate>);

/// A model of a known shape whose weights are random, with the tokenizer of the built-in one.
fn random(shape: &str) -> Result<Loading> {
    let known = mixfleet_scheduler::models::find(shape).map_err(|error| UsageError(error.to_string()))?;
    let random = RandomCheckpoint::of_shape(known)?;
    let (name, checkpoint) = (format!("{RANDOM}{}", known.name), random.repeating()?);
    let tokenizer = builtin::tokenizer_of(checkpoint.config.vocab)?;
    Ok((name, checkpoint, Some(random), tokenizer, Some(builtin::chat_template()?)))
}

/// Whether a directory has a configuration, and no weights.
fn has_no_weights(directory: &Path) -> bool {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    directory.join("config.json").is_file()
        && !files.into_iter().any(|file| file.path().extension().is_some_and(|end| end == "safetensors"))
}

/// Why nothing there can be a checkpoint, if so, and what to do.
pub(crate) fn misnamed(path: &Path) -> Option<String> {
    let shown = path.display();
    let is_gguf = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    if path.is_file() && !is_gguf {
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return Some(format!(
            "{shown} is a file and no GGUF file: name the directory that it is in, {}",
            folder.display()
        ));
    }
    None
}

/// Opens a checkpoint, whose weights are drawn at random if that is `asked` for and there are none.
fn open(located: &Located, asked: bool) -> Result<Loading> {
    let directory = located.path.as_path();
    if let Some(why) = misnamed(directory) {
        return Err(UsageError(why).into());
    }
    let failed = || format!("cannot load the checkpoint in {}", directory.display());
    check_files::in_child(directory).with_context(failed)?;
    let (checkpoint, random) = match asked {
        false => (Checkpoint::open(directory, &mixfleet_cpu::host::Mapper).with_context(failed)?, None),
        true if !has_no_weights(directory) => {
            let why = format!("--random-weights: there are weights in {}", directory.display());
            return Err(UsageError(why).into());
        }
        true => {
            tracing::warn!(
                directory = %directory.display(),
                "weights are random: devices that compute get them, and answers mean nothing"
            );
            let text = files::read(&directory.join("config.json"), TEXT_BYTES_MAX).with_context(failed)?;
            let config: serde_json::Map<_, _> = serde_json::from_slice(&text).with_context(failed)?;
            let named = ["dtype", "torch_dtype"].into_iter().find_map(|key| config.get(key)?.as_str());
            let dtype = match named {
                Some("float32") => DType::F32,
                Some("float16") => DType::F16,
                _ => DType::Bf16,
            };
            let random = RandomCheckpoint { config, dtype, seed: 1 };
            (random.repeating().with_context(failed)?, Some(random))
        }
    };
    let tokenizer = Tokenizer::open(directory)
        .context("mixfleet needs the checkpoint's tokenizer, the file tokenizer.json or tiktoken.model")?;
    let template = ChatTemplate::open(directory)?;
    let absolute = directory.canonicalize().unwrap_or_else(|_| directory.to_path_buf());
    let named = if directory.is_file() { absolute.file_stem() } else { absolute.file_name() };
    let named = named.map(|name| name.to_string_lossy().into_owned());
    let name = located.name.clone().or(named).unwrap_or_else(|| "model".into());
    Ok((name, checkpoint, random, tokenizer, template))
}
