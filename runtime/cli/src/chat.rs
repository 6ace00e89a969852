//! Implements `mixfleet chat`.

mod input;
mod partner;

use crate::args::{DeviceRole, ModelArgs};
use crate::interrupt::interrupted;
use crate::remote::RemoteArgs;
use anyhow::Result;
use clap::Args;
use input::ChatInput;
use mixfleet_engines::EngineAddress;
use mixfleet_runtime::model::ChatMessage;
use partner::{ChatAnswer, ChatPartner};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

/// Messages about the conversation itself.
const HELP: &str = "/system TEXT sets the system prompt, /new begins another conversation, /bye or Ctrl-D ends; Ctrl-C \
                    stops an answer, and pasted text may have several lines";

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]")]
    device: Vec<DeviceRole>,
    /// Talk with a server that has OpenAI's interface, http://HOST:PORT, in place of a model here
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "device"])]
    against: Option<EngineAddress>,
    /// Model name on the server [default: the first that it lists]
    #[arg(long, value_name = "NAME", requires = "against")]
    served_model: Option<String>,
    /// File with the server's API key
    #[arg(long, value_name = "FILE", requires = "against")]
    key_file: Option<PathBuf>,
    /// System prompt of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Maximum tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = crate::numbers::count::<u32>(1..=u32::MAX.into()))]
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
        let partner = ChatPartner::open(&args).await?;
        let talked = ChatSession::new(&args, &partner).talk().await;
        partner.end().await;
        talked
    })
}

/// The messages of a chat, and what answers them.
struct ChatSession<'a> {
    args: &'a ChatArgs,
    partner: &'a ChatPartner,
    system: Option<String>,
    messages: Vec<ChatMessage>,
    /// Number of questions so far.
    turn: u64,
    is_terminal: bool,
}

impl<'a> ChatSession<'a> {
    fn new(args: &'a ChatArgs, partner: &'a ChatPartner) -> Self {
        let is_terminal = std::io::stdin().is_terminal();
        let system = args.system.clone();
        ChatSession { args, partner, system, messages: Vec::new(), turn: 0, is_terminal }
    }

    /// Reads what the user says until the end of input, and answers it.
    async fn talk(&mut self) -> Result<()> {
        let mut input = ChatInput::open(self.is_terminal)?;
        if self.is_terminal {
            eprintln!("{}: {HELP}", self.partner.name());
        }
        while let Some(said) = input.next()? {
            let (command, rest) = said.split_once(char::is_whitespace).unwrap_or((&said, ""));
            match command {
                "" => {}
                "/bye" | "/quit" => return Ok(()),
                "/help" => eprintln!("{HELP}"),
                "/new" => self.messages.clear(),
                "/system" => self.set_system(rest.trim()),
                unknown if self.is_terminal && is_command(unknown) => {
                    eprintln!("mixfleet: there is no {unknown}; {HELP}");
                }
                _ => self.say(&said).await?,
            }
        }
        Ok(())
    }

    fn set_system(&mut self, text: &str) {
        if text.is_empty() {
            eprintln!("system prompt: {}", self.system.as_deref().unwrap_or("none"));
        } else {
            self.system = Some(text.to_owned());
        }
    }

    async fn say(&mut self, said: &str) -> Result<()> {
        self.turn += 1;
        self.messages.push(ChatMessage::new("user", said));
        let system = self.system.iter().map(|text| ChatMessage::new("system", text.as_str()));
        let all: Vec<ChatMessage> = system.chain(self.messages.iter().cloned()).collect();
        match self.partner.answer(self.args, &all, self.turn, interrupted(self.is_terminal)).await {
            Ok(answer) => {
                writeln!(std::io::stdout().lock())?;
                if std::io::stderr().is_terminal() {
                    say_speed(&answer);
                }
                self.messages.push(ChatMessage::new("assistant", answer.text));
                Ok(())
            }
            // the next question may be answered
            Err(error) if self.is_terminal => {
                self.messages.pop();
                eprintln!("mixfleet: {error:#}");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

/// Whether a word is meant as a command, and not a path or a sentence.
fn is_command(word: &str) -> bool {
    word.strip_prefix('/')
        .is_some_and(|name| !name.is_empty() && name.bytes().all(|c| c.is_ascii_lowercase()))
}

fn say_speed(answer: &ChatAnswer) {
    let stopped = if answer.stopped { "stopped, " } else { "" };
    let [first_s, .., last_s] = answer.times_s[..] else {
        eprintln!("[{stopped}{} tokens]", answer.tokens);
        return;
    };
    let rate = answer.tokens.saturating_sub(1) as f64 / (last_s - first_s).max(1e-9);
    eprintln!("[{stopped}{} tokens, the first after {first_s:.2} s, {rate:.1} tokens/s]", answer.tokens);
}
