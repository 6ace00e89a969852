//! Implements `mixfleet chat`.

use crate::args::{DeviceRole, GenerateArgs, ModelArgs};
use crate::failure::UsageError;
use crate::generate::ReadyModel;
use crate::generate::answer::CollectedAnswer;
use crate::remote::RemoteArgs;
use anyhow::{Result, bail};
use clap::Args;
use mixfleet_hal::cast::to_u32;
use mixfleet_runtime::api::{Marked, TextModel};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::ChatMessage;
use mixfleet_runtime::request::{GenerateRequest, Sampling};
use std::io::{BufRead, IsTerminal, Write};

/// Messages about the conversation itself.
const HELP: &str = "/new begins another conversation, /quit or the end of input (Ctrl-D) ends";

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]")]
    device: Vec<DeviceRole>,
    /// System prompt of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: u32,
    /// Sampling temperature; 0 is greedy [default: the model's, else 1]
    #[arg(long, value_parser = crate::args::temperature)]
    temperature: Option<f32>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub(crate) fn run(args: ChatArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let generate = GenerateArgs::of_devices(args.model.clone(), args.remote.clone(), args.device.clone());
        let ready = ReadyModel::checked(&generate, |model| match &model.text.template {
            Some(_) => Ok(()),
            None => bail!(UsageError("this model has no chat template: use 'mixfleet generate'".to_owned())),
        })?;
        let talked = talk(&args, &ready).await;
        ready.end().await;
        talked
    })
}

/// Reads what the user says until the end of input, and answers it.
async fn talk(args: &ChatArgs, ready: &ReadyModel) -> Result<()> {
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        eprintln!("{}: {HELP}", ready.model.name);
    }
    let system = args.system.iter().map(|text| ChatMessage::new("system", text.as_str()));
    let begin: Vec<ChatMessage> = system.collect();
    let mut messages = begin.clone();
    let mut turn = 0;
    loop {
        if is_terminal {
            eprint!("> ");
            std::io::stderr().flush()?;
        }
        let mut said = String::new();
        if std::io::stdin().lock().read_line(&mut said)? == 0 {
            return Ok(());
        }
        match said.trim() {
            "" => continue,
            "/quit" => return Ok(()),
            "/new" => {
                messages.clone_from(&begin);
                continue;
            }
            said => messages.push(ChatMessage::new("user", said)),
        }
        turn += 1;
        match answer(args, ready, &messages, turn).await {
            Ok(text) => messages.push(ChatMessage::new("assistant", text)),
            // the next tokens may form valid text
            Err(error) if is_terminal => {
                messages.pop();
                eprintln!("mixfleet: {error:#}");
            }
            Err(error) => return Err(error),
        }
    }
}

/// Prints the answer to a conversation as it comes; its text.
async fn answer(args: &ChatArgs, ready: &ReadyModel, messages: &[ChatMessage], turn: u64) -> Result<String> {
    let (model, config) = (&ready.model, &ready.model.checkpoint.config);
    let said = messages.iter().map(|message| &message.content);
    if said.into_iter().any(|text| !model.text.special_places(text).is_empty()) {
        bail!("the conversation holds the text of a special token, which is not passed on");
    }
    let rendered = model.text.render_chat(messages, true, &serde_json::Map::new(), true, &|| false);
    let marked = rendered.and_then(|rendered| Marked::chat(rendered, None));
    let prompt = marked.and_then(|marked| model.text.encode(&marked, false)).map_err(anyhow::Error::msg)?;
    let left = config.context_max.saturating_sub(to_u32(prompt.len()));
    if left == 0 {
        bail!("the conversation fills the model's context of {} tokens: {HELP}", config.context_max);
    }
    let (asked_s, sampling) = (ready.env.now().0, model.sampling());
    let request = GenerateRequest {
        eos_ids: config.eos_ids.clone().into(),
        sampling: Sampling {
            temperature: args.temperature.unwrap_or(sampling.temperature),
            seed: args.seed.wrapping_add(turn),
            ..sampling
        },
        ..GenerateRequest::greedy(format!("chat-{turn}"), prompt, args.max_tokens.clamp(1, left))
    };
    let updates = ready.engine.handle.submit(request).await?;
    let answer =
        CollectedAnswer::new(model.text.tokenizer.stream(), true).collect(updates, ready.env.clone()).await?;
    writeln!(std::io::stdout().lock())?;
    if let (true, [first, .., last]) = (std::io::stderr().is_terminal(), &answer.times_s[..]) {
        let (ttft_s, rate) = (first - asked_s, (answer.times_s.len() - 1) as f64 / (last - first).max(1e-9));
        eprintln!("[{} tokens, the first after {ttft_s:.2} s, {rate:.1} tokens/s]", answer.ids.len());
    }
    Ok(answer.text)
}
