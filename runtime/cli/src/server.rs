//! A server with OpenAI's interface that a command talks to.

use crate::failure::UsageError;
use anyhow::{Context, Result};
use mixfleet_engines::{EngineAddress, EngineKind, HttpEngine};
use mixfleet_hal::outside::OutsideEngine;
use std::path::Path;

/// What to do where no server answers.
const NO_SERVER: &str = "no server with OpenAI's interface answers there; start one ('mixfleet serve', until its log \
                         says 'ready'), or correct the address";

/// A server, and its model's name.
pub(crate) struct NamedServer {
    pub(crate) engine: HttpEngine,
    pub(crate) model: String,
}

impl NamedServer {
    /// The model and the server's address, for people.
    pub(crate) fn name(&self) -> String {
        format!("{} at {}", self.model, address_of(&self.engine))
    }
}

fn address_of(engine: &HttpEngine) -> String {
    engine.name().trim_start_matches("vllm:").to_owned()
}

/// Opens the server at `--against`, with the key in a file.
///
/// # Errors
/// When the key cannot be read, or the server does not answer or lists no model.
pub(crate) async fn open(
    address: &EngineAddress,
    key_file: Option<&Path>,
    model: Option<String>,
) -> Result<NamedServer> {
    let read = |file: &Path| {
        mixfleet_hal::files::read_text(file)
            .with_context(|| format!("cannot read the key in {}", file.display()))
    };
    let key = key_file.map(read).transpose()?;
    // every server answers these requests as vLLM does
    let engine = HttpEngine::new(EngineKind::Vllm, address.clone(), key.as_deref().map(str::trim), None);
    let engine = engine.map_err(UsageError)?;
    let model = match model {
        Some(model) => model,
        None => {
            let server = address_of(&engine);
            let told = engine.probe().await.with_context(|| format!("--against {server}: {NO_SERVER}"))?;
            let first = told.models.into_iter().next();
            let nothing = || format!("--against {server}: it lists no model: name one with --served-model");
            first.with_context(nothing)?.name
        }
    };
    Ok(NamedServer { engine, model })
}
