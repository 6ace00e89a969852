//! Who answers in a chat: a model on devices of this process, or a server.

use super::ChatArgs;
use crate::args::GenerateArgs;
use crate::failure::UsageError;
use crate::generate::ReadyModel;
use crate::generate::answer::CollectedAnswer;
use crate::server::{self, NamedServer};
use anyhow::{Result, bail};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{EngineAnswer, EngineCall, EngineEndpoint, EngineShare, OutsideEngine};
use mixfleet_runtime::api::{Marked, TextModel};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::ChatMessage;
use mixfleet_runtime::request::{GenerateRequest, Sampling};
use serde_json::{Value, json};
use std::io::Write;
use std::pin::pin;
use std::time::Instant;

pub(super) enum ChatPartner {
    Here(Box<ReadyModel>),
    There(Box<NamedServer>),
}

/// An answer, which was printed as it came.
pub(super) struct ChatAnswer {
    pub(super) text: String,
    pub(super) tokens: usize,
    /// Seconds from the question to each piece.
    pub(super) times_s: Vec<f64>,
    /// Whether the user ended it.
    pub(super) stopped: bool,
}

impl ChatPartner {
    pub(super) async fn open(args: &ChatArgs) -> Result<Self> {
        if let Some(address) = &args.against {
            let named = server::open(address, args.key_file.as_deref(), args.served_model.clone()).await?;
            return Ok(ChatPartner::There(Box::new(named)));
        }
        let generate = GenerateArgs::of_devices(args.model.clone(), args.remote.clone(), args.device.clone());
        let ready = ReadyModel::checked(&generate, |model| match &model.text.template {
            Some(_) => Ok(()),
            None => bail!(UsageError("this model has no chat template: use 'mixfleet generate'".to_owned())),
        })?;
        Ok(ChatPartner::Here(Box::new(ready)))
    }

    pub(super) fn name(&self) -> String {
        match self {
            ChatPartner::Here(ready) => ready.model.name.clone(),
            ChatPartner::There(named) => named.name(),
        }
    }

    /// Prints the answer to a conversation as it comes, until `stop`.
    pub(super) async fn answer(
        &self,
        args: &ChatArgs,
        messages: &[ChatMessage],
        turn: u64,
        stop: impl Future<Output = ()>,
    ) -> Result<ChatAnswer> {
        match self {
            ChatPartner::Here(ready) => here(args, ready, messages, turn, stop).await,
            ChatPartner::There(named) => there(args, named, messages, turn, stop).await,
        }
    }

    /// Waits until its devices are free.
    pub(super) async fn end(self) {
        if let ChatPartner::Here(ready) = self {
            ready.end().await;
        }
    }
}

async fn here(
    args: &ChatArgs,
    ready: &ReadyModel,
    messages: &[ChatMessage],
    turn: u64,
    stop: impl Future<Output = ()>,
) -> Result<ChatAnswer> {
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
        let context = config.context_max;
        bail!("the conversation fills the model's context of {context} tokens: /new begins another one");
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
    let answer = CollectedAnswer::new(model.text.tokenizer.stream(), true);
    let answer = answer.collect_until(updates, ready.env.clone(), stop).await?;
    let times_s = answer.times_s.iter().map(|time_s| time_s - asked_s).collect();
    Ok(ChatAnswer { tokens: answer.ids.len(), times_s, stopped: answer.stopped, text: answer.text })
}

async fn there(
    args: &ChatArgs,
    named: &NamedServer,
    messages: &[ChatMessage],
    turn: u64,
    stop: impl Future<Output = ()>,
) -> Result<ChatAnswer> {
    let messages: Vec<Value> =
        messages.iter().map(|message| json!({"role": message.role, "content": message.content})).collect();
    let mut body = json!({
        "model": named.model, "messages": messages, "max_tokens": args.max_tokens,
        "seed": args.seed.wrapping_add(turn), "stream": true, "stream_options": {"include_usage": true},
    });
    if let Some(temperature) = args.temperature {
        body["temperature"] = json!(temperature);
    }
    let call = EngineCall {
        endpoint: EngineEndpoint::Chat,
        body: body.to_string().into_bytes().into(),
        stream: true,
        begun: None,
        tokens_max: None,
        trace: None,
        share: EngineShare::Whole,
    };
    let mut stop = pin!(stop);
    let asked = Instant::now();
    let mut answer = ChatAnswer { text: String::new(), tokens: 0, times_s: Vec::new(), stopped: false };
    let asking = async {
        match named.engine.ask(&call).await? {
            EngineAnswer::Stream(stream) => Ok::<_, anyhow::Error>(stream),
            EngineAnswer::Refused { status, body, .. } => {
                bail!("the server refuses with status {status}: {}", String::from_utf8_lossy(&body))
            }
            _ => bail!("the server does not stream"),
        }
    };
    let mut stream = tokio::select! {
        stream = asking => stream?,
        () = &mut stop => return Ok(ChatAnswer { stopped: true, ..answer }),
    };
    loop {
        let chunk = tokio::select! {
            chunk = stream.next() => chunk,
            () = &mut stop => {
                answer.stopped = true;
                break;
            }
        };
        let Some(chunk) = chunk.transpose()? else { break };
        if chunk.has_token() {
            answer.times_s.push(asked.elapsed().as_secs_f64());
            answer.tokens += 1;
            answer.text.push_str(&chunk.text);
            let mut out = std::io::stdout().lock();
            out.write_all(mixfleet_hal::printable::printable_lines(&chunk.text).as_bytes())?;
            out.flush()?;
        }
        if let Some(usage) = chunk.usage.filter(|usage| usage.completion_tokens > 0) {
            answer.tokens = mixfleet_hal::cast::to_usize(u64::from(usage.completion_tokens));
        }
    }
    Ok(answer)
}
