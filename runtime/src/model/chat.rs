//! Renders messages to a prompt by the checkpoint's Jinja template, in the environment that transformers'
//! `apply_chat_template` provides.

use super::error::{Error, Result};
use super::fields::{Fields, read_object_if_present};
use super::gguf::{self, GgufFile, is_gguf};
use super::strftime::strftime;
use super::template_limits;
use minijinja::value::{Kwargs, Serde, StringInput, ValueKind};
use minijinja::{Environment, ErrorKind, State, Value, context};
use mixfleet_hal::files;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Steps that a template may take for any chat: real ones take a few hundred per message.
const FUEL: u64 = 200_000;
/// Additional steps that a template may take for each message.
const FUEL_PER_MESSAGE: u64 = 1000;
/// Maximum steps for all messages together; a million take some tens of milliseconds.
const FUEL_MAX: u64 = 50_000_000;

/// Maximum number of bytes that a template may print.
const OUTPUT_BYTES_MAX: usize = 32 << 20;

/// Maximum words and symbols in one tag: real templates have less than a fifth of that.
const TAG_WORDS_MAX: usize = 500;
/// Maximum number of branches: real templates have less than a fifth of that.
const BRANCHES_MAX: usize = 200;

const TEMPLATE_FILE: &str = "chat_template.jinja";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Json>")]
pub struct ChatMessage {
    /// The role: `system`, `user`, `assistant`, or another one that the template knows.
    pub role: String,
    /// The text. In JSON it may also be a list of `{"type": "text", "text": ...}`, which are joined by
    /// newlines.
    pub content: String,
    /// Further fields such as `name`, `reasoning_content` and `tool_calls`, which some templates print.
    #[serde(flatten)]
    pub extra: Map<String, Json>,
}

impl ChatMessage {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        ChatMessage { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

impl TryFrom<Map<String, Json>> for ChatMessage {
    type Error = String;

    fn try_from(mut fields: Map<String, Json>) -> std::result::Result<Self, String> {
        let role = match fields.remove("role") {
            Some(Json::String(role)) => role,
            _ => return Err("a message needs a 'role', a string".into()),
        };
        let content = content_text(fields.remove("content").unwrap_or_default())?;
        fields.retain(|_, value| !value.is_null()); // clients echo answers with their empty fields
        for (field, value) in &fields {
            if !(matches!(field.as_str(), "name" | "reasoning_content") && value.is_string()) {
                return Err(format!("message field '{field}' is not supported"));
            }
        }
        Ok(ChatMessage { role, content, extra: fields })
    }
}

fn content_text(content: Json) -> std::result::Result<String, String> {
    let part = |part: &Json| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (Some("text"), None) => Err("a text part needs a 'text', a string".to_owned()),
        (kind, _) => {
            Err(format!("content part of type '{}' is not supported; supported: text", kind.unwrap_or("?")))
        }
    };
    match content {
        Json::String(text) => Ok(text),
        Json::Null => Ok(String::new()),
        Json::Array(parts) => {
            Ok(parts.iter().map(part).collect::<std::result::Result<Vec<_>, _>>()?.join("\n"))
        }
        _ => Err("'content' must be a string or a list of parts".into()),
    }
}

/// A conversation to be rendered.
#[derive(Clone, Copy, Debug)]
pub struct Conversation<'a> {
    /// The messages.
    pub messages: &'a [ChatMessage],
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables of the template (`chat_template_kwargs`: `enable_thinking`, ...).
    pub arguments: &'a Map<String, Json>,
    /// Time for `strftime_now`: seconds since 1970, shown in UTC.
    pub now_s: u64,
}

/// How a model writes calls of tools, as its template shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolStyle {
    /// Each call between `<tool_call>` and `</tool_call>`, a JSON object with `name` and `arguments` (Hermes,
    /// Qwen).
    Tagged,
    /// The whole answer is a JSON object with `name` and arguments, several separated by `;`, or an array of
    /// such objects (Llama, Mistral).
    Bare {
        /// Whether arguments are called `parameters`, and not `arguments`.
        parameters: bool,
    },
}

impl ToolStyle {
    /// The key of a call's arguments.
    pub fn arguments(self) -> &'static str {
        match self {
            ToolStyle::Bare { parameters: true } => "parameters",
            ToolStyle::Tagged | ToolStyle::Bare { .. } => "arguments",
        }
    }

    /// The style of a template; none if it knows no tools.
    fn of(source: &str) -> Option<Self> {
        if !source.contains("tools") {
            None
        } else if source.contains("<tool_call>") {
            Some(ToolStyle::Tagged)
        } else if source.contains("[TOOL_CALLS]") {
            Some(ToolStyle::Bare { parameters: false })
        } else if source.contains("\"parameters\":") {
            Some(ToolStyle::Bare { parameters: true })
        } else {
            None
        }
    }
}

/// A compiled chat template with the special tokens that it may print. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: Arc<str>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    tool_style: Option<ToolStyle>,
}

impl ChatTemplate {
    /// Reads the template of a GGUF file or of a checkpoint directory: `chat_template.jinja`, or else
    /// `chat_template` of `tokenizer_config.json` (a string, or a list of named ones, of which `default`
    /// counts). `None` if there is neither: such a model completes text but does not chat.
    ///
    /// # Errors
    /// When a file cannot be read, or the template is not valid Jinja.
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        if is_gguf(directory) {
            return gguf::template(&GgufFile::open(directory)?);
        }
        let config_file = directory.join(CONFIG_FILE);
        let object = read_object_if_present(&config_file)?.unwrap_or_default();
        let fields = Fields::new(&config_file, &object);
        let template_file = directory.join(TEMPLATE_FILE);
        let source = match files::read_text(&template_file) {
            Ok(source) => Some(source),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => named_default(&fields)?,
            Err(error) => return Err(Error::read(&template_file, error)),
        };
        let (bos, eos) = (special_token(&fields, "bos_token"), special_token(&fields, "eos_token"));
        source.map(|source| Self::new(&source, bos, eos)).transpose()
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// When it is not valid Jinja; the error names the line.
    pub fn new(source: &str, bos_token: Option<String>, eos_token: Option<String>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(template_error)?);
        environment.set_unknown_method_callback(template_limits::method);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment.add_filter("indent", indent);
        environment.add_filter("join", join);
        environment.add_filter("replace", replace);
        environment.add_filter("format", template_limits::format);
        check_depth(source)?;
        template_limits::check_namespaces(source)?;
        let tool_style = ToolStyle::of(source);
        let compiled = without_generation_tags(source);
        environment.add_template_owned("chat_template", compiled).map_err(template_error)?;
        let (environment, source) = (Arc::new(environment), source.into());
        Ok(ChatTemplate { environment, source, bos_token, eos_token, tool_style })
    }

    /// The template's source text.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// The template with its source and its special tokens changed by `change`.
    ///
    /// # Errors
    /// When that is not valid Jinja.
    pub(super) fn changed(&self, change: &dyn Fn(&str) -> String) -> Result<Self> {
        let token = |token: &Option<String>| token.as_deref().map(change);
        Self::new(&change(&self.source), token(&self.bos_token), token(&self.eos_token))
    }

    /// How the model calls tools; none if its template knows none.
    pub fn tool_style(&self) -> Option<ToolStyle> {
        self.tool_style
    }

    /// Renders `messages`. With `add_generation_prompt` the text ends where the assistant's answer begins.
    /// `arguments` are further variables (`chat_template_kwargs`: `enable_thinking`, ...). `now_s` is the
    /// time for `strftime_now`: seconds since 1970, shown in UTC.
    ///
    /// # Errors
    /// When the template rejects the messages (`raise_exception`) or fails on them.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Json>,
        now_s: u64,
    ) -> Result<String> {
        self.render_until(messages, add_generation_prompt, arguments, now_s, &|| false)
    }

    /// Renders `messages` as [`render`](Self::render) does, and fails as soon as the template prints
    /// something after `stopped` became true.
    ///
    /// # Errors
    /// As [`render`](Self::render), and when it is stopped.
    pub fn render_until(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Json>,
        now_s: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<String> {
        let chat = Conversation { messages, add_generation_prompt, arguments, now_s };
        self.render_chat(&chat, stopped)
    }

    /// Renders a conversation, as [`render_until`](Self::render_until) does.
    ///
    /// # Errors
    /// As there.
    pub(super) fn render_chat(&self, chat: &Conversation<'_>, stopped: &dyn Fn() -> bool) -> Result<String> {
        self.render_values(chat, ChatValues::of(chat), stopped)
    }

    /// Renders a conversation with other values in place of its messages and arguments.
    ///
    /// # Errors
    /// As [`render_until`](Self::render_until).
    pub(super) fn render_values(
        &self,
        chat: &Conversation<'_>,
        values: ChatValues,
        stopped: &dyn Fn() -> bool,
    ) -> Result<String> {
        let now_s = chat.now_s;
        let strftime_now = Value::from_function(move |format: String| -> String { strftime(&format, now_s) });
        let token = |token: &Option<String>| token.as_ref().map_or(Value::UNDEFINED, Value::from);
        let context = context! {
            messages => values.messages,
            add_generation_prompt => chat.add_generation_prompt,
            bos_token => token(&self.bos_token),
            eos_token => token(&self.eos_token),
            strftime_now,
            ..values.arguments
        };
        let mut environment = (*self.environment).clone();
        let fuel = FUEL.saturating_add(FUEL_PER_MESSAGE.saturating_mul(chat.messages.len() as u64));
        environment.set_fuel(Some(fuel.min(FUEL_MAX)));
        let template = environment.get_template("chat_template").map_err(template_error)?;
        let mut page = Page { text: Vec::new(), left: OUTPUT_BYTES_MAX, stopped };
        // The library panics on some templates (3.0: an empty list that is read backwards).
        let render = || template.render_captured_to(context, &mut page);
        let rendered = catch_unwind(AssertUnwindSafe(render))
            .map_err(|_| Error::Template("it cannot be rendered for such a chat".into()))?;
        rendered.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => Error::Template("it takes too many steps for such a chat".into()),
            ErrorKind::WriteFailure if page.left == 0 => {
                Error::Template(format!("it prints more than {OUTPUT_BYTES_MAX} bytes"))
            }
            _ => template_error(error),
        })?;
        String::from_utf8(page.text).map_err(|error| Error::Template(error.to_string()))
    }
}

/// What a template sees of a conversation.
pub(super) struct ChatValues {
    /// A list of maps.
    pub(super) messages: Value,
    /// A map.
    pub(super) arguments: Value,
}

impl ChatValues {
    pub(super) fn of(chat: &Conversation<'_>) -> Self {
        ChatValues {
            messages: Value::from(Serde(chat.messages)),
            arguments: Value::from(Serde(chat.arguments)),
        }
    }
}

/// The text that a template has printed.
struct Page<'a> {
    text: Vec<u8>,
    /// Number of bytes that still fit; none once too many were printed.
    left: usize,
    stopped: &'a dyn Fn() -> bool,
}

impl Write for Page<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > self.left {
            self.left = 0;
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        if (self.stopped)() {
            return Err(std::io::Error::other("stopped"));
        }
        self.left -= bytes.len();
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn template_error(error: minijinja::Error) -> Error {
    let mut message = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        message = format!("{message} (line {line})");
    }
    Error::Template(message)
}

fn raise_exception(message: String) -> std::result::Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The library's filter, with its width limited to what fits into memory.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> std::result::Result<Value, minijinja::Error> {
    const WIDTH_MAX: usize = 1000;
    let asked = width.or(named.get("width")?);
    if let Some(width) = asked.filter(|width| *width > WIDTH_MAX) {
        let message = format!("indent: {width} is more than {WIDTH_MAX}");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
    }
    minijinja::filters::indent(text, width, first, blank, named)
}

/// The library's filter, with the length of its result limited: each of a chain of them can double a text.
fn join(
    state: &mut State,
    value: &Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    named: Kwargs,
) -> std::result::Result<Value, minijinja::Error> {
    let between = match &joiner {
        Some(joiner) => joiner.as_str().len(),
        None => named.get::<Option<StringInput<'_>>>("d")?.map_or(0, |joiner| joiner.as_str().len()),
    };
    let text = |value: &Value| value.as_str().map_or(0, str::len);
    // Other iterables can be read only once.
    let items =
        if value.kind() == ValueKind::Seq { value.try_iter()?.map(|item| text(&item)).sum() } else { 0 };
    let count = value.as_str().map_or(value.len().unwrap_or(0), |text| text.chars().count());
    check_length("join", items.max(text(value)).saturating_add(count.saturating_mul(between)))?;
    minijinja::filters::join(state, value, joiner, attribute, named)
}

/// The library's filter, limited in the same way.
fn replace(
    state: &mut State,
    value: StringInput<'_>,
    from: StringInput<'_>,
    to: StringInput<'_>,
) -> std::result::Result<Value, minijinja::Error> {
    let (length, to_length) = (value.as_str().len(), to.as_str().len());
    let found = length / from.as_str().len().max(1) + 1;
    check_length("replace", length.saturating_add(found.saturating_mul(to_length)))?;
    minijinja::filters::replace(state, value, from, to)
}

fn check_length(filter: &str, bytes: usize) -> std::result::Result<(), minijinja::Error> {
    if bytes <= OUTPUT_BYTES_MAX {
        return Ok(());
    }
    let message = format!("{filter}: its result could exceed {OUTPUT_BYTES_MAX} bytes");
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// Python's `json.dumps` with `ensure_ascii=False`: unlike Jinja's own filter it escapes no HTML.
fn to_json(value: &Value, arguments: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let _: Option<bool> = arguments.get("ensure_ascii")?;
    arguments.assert_all_used()?;
    let mut text = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, Spaced)),
    };
    let failed = |why: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {why}"));
    written.map_err(|e| failed(e.to_string()))?;
    String::from_utf8(text).map_err(|e| failed(e.to_string()))
}

/// Python's default separators, `", "` and `": "`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(&mut self, w: &mut W) -> std::io::Result<()> {
        w.write_all(b": ")
    }
}

/// The template of `tokenizer_config.json`.
fn named_default(fields: &Fields) -> Result<Option<String>> {
    match fields.get("chat_template") {
        None => Ok(None),
        Some(Json::String(source)) => Ok(Some(source.clone())),
        Some(Json::Array(list)) => {
            let default = list.iter().find(|entry| entry["name"] == "default");
            match default.and_then(|entry| entry["template"].as_str()) {
                Some(source) => Ok(Some(source.to_owned())),
                None => Err(fields.error("chat_template", "has no template named 'default'")),
            }
        }
        Some(_) => Err(fields.error("chat_template", "expected a string or a list of named templates")),
    }
}

/// Reads a special token: a string, or an object with the string in `content`.
fn special_token(fields: &Fields, field: &str) -> Option<String> {
    let value = fields.get(field)?;
    value.as_str().or(value["content"].as_str()).map(str::to_owned)
}

/// Limits the nesting of a template. The library's parser recurses for every operator and every `elif`,
/// without a bound: thousands of them overflow the stack, which ends the process.
fn check_depth(source: &str) -> Result<()> {
    let (mut rest, mut branches) = (source, 0);
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let tag = &rest[start + 2..];
        let (length, words) = tag_size(tag);
        branches += usize::from(tag.trim_start_matches(['-', '+']).trim_start().starts_with("el"));
        if words > TAG_WORDS_MAX || branches > BRANCHES_MAX {
            return Err(Error::Template(format!(
                "more than {TAG_WORDS_MAX} words and signs in a tag, or {BRANCHES_MAX} times elif or else"
            )));
        }
        rest = &tag[length..];
    }
    Ok(())
}

/// Length of a tag in bytes, and its number of words and symbols; a quoted string counts as one.
fn tag_size(tag: &str) -> (usize, usize) {
    let (mut words, mut quote, mut in_word, mut escaped) = (0, None, false, false);
    for (at, character) in tag.char_indices() {
        if let Some(open) = quote {
            let ends = character == open && !escaped;
            escaped = character == '\\' && !escaped;
            quote = quote.filter(|_| !ends);
            continue;
        }
        if tag[at..].starts_with("}}") || tag[at..].starts_with("%}") {
            return (at, words);
        }
        let is_word = character.is_alphanumeric() || character == '_';
        words += usize::from(!(character.is_whitespace() || is_word && in_word));
        in_word = is_word;
        quote = matches!(character, '\'' | '"').then_some(character);
    }
    (tag.len(), words)
}

/// Replaces `{% generation %}`, which marks the assistant's text for training. It renders its body, and
/// minijinja does not know it: an `if true` in its place has the same effect.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let Some(length) = tag[2..].find("%}").map(|at| at + 4) else { break };
        let word = tag[2..length - 2].trim_matches(['-', '+']).trim();
        out.push_str(before);
        match word {
            "generation" => out.push_str(&tag[..length].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..length].replace("endgeneration", "endif")),
            _ => out.push_str(&tag[..length]),
        }
        rest = &tag[length..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
