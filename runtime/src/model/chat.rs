//! Renders messages to a prompt by the checkpoint's Jinja template, in the environment that transformers'
//! `apply_chat_template` provides.

use super::error::{Error, Result};
use super::fields::Fields;
use super::gguf::{self, GgufFile, is_gguf};
use super::jinja;
use super::strftime::strftime;
use super::tool_style::ToolStyle;
use super::{template_limits, tokenizer_config};
use minijinja::value::{Serde, merge_maps};
use minijinja::{Environment, ErrorKind, Value, context};
use mixfleet_hal::files;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value as Json};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// Steps that a template may take for any chat: published ones take a few hundred per message.
const FUEL: u64 = 200_000;
/// Additional steps that a template may take for each message.
const FUEL_PER_MESSAGE: u64 = 1000;
/// Maximum steps for all messages together; a million take tens of milliseconds.
const FUEL_MAX: u64 = 50_000_000;

/// Maximum number of bytes that a template may print.
const OUTPUT_BYTES_MAX: usize = 32 << 20;

/// Maximum words and symbols in one tag: published templates have less than a fifth of that.
const TAG_WORDS_MAX: usize = 500;
/// Maximum number of branches: published templates have less than a fifth of that.
const BRANCHES_MAX: usize = 200;

const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The template of requests with tools, in a folder of further templates, or by its name in a list.
const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";
const TOOL_TEMPLATE: &str = "tool_use";
const DEFAULT_TEMPLATE: &str = "default";
const CONFIG_FILE: &str = "tokenizer_config.json";

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Map<String, Json>")]
pub struct ChatMessage {
    /// The role: `system`, `user`, `assistant`, or another one that the template knows.
    pub role: String,
    /// The text. In JSON it may also be a list of `{"type": "text", "text": ...}`, which are joined by
    /// newlines.
    pub content: String,
    /// Further fields such as `name`, `reasoning_content` and `tool_calls`, which some templates print.
    pub extra: Map<String, Json>,
    /// The fields in their order, as templates see them; empty where that is role, content, and the others.
    order: Vec<String>,
}

impl ChatMessage {
    /// A message of text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        ChatMessage { role: role.into(), content: content.into(), extra: Map::new(), order: Vec::new() }
    }

    /// The message with its fields in another order. A `content` outside of the order is left out of the
    /// template's view, like a null field; all other fields outside of the order come last.
    #[must_use]
    pub fn ordered(mut self, order: Vec<String>) -> Self {
        let usual = ["role", "content"].into_iter().chain(self.extra.keys().map(String::as_str));
        let is_usual = order.iter().map(String::as_str).eq(usual);
        self.order = if is_usual { Vec::new() } else { order };
        self
    }
}

impl Serialize for ChatMessage {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        MessageView { message: self, in_parts: false }.serialize(serializer)
    }
}

/// A part of a message's text.
#[derive(Serialize)]
struct TextPart<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

/// A message as a template sees it.
struct MessageView<'a> {
    message: &'a ChatMessage,
    /// Whether its text is a list of parts.
    in_parts: bool,
}

impl Serialize for MessageView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let ChatMessage { role, content, extra, order } = self.message;
        let mut map = serializer.serialize_map(None)?;
        let given = order.iter().map(String::as_str);
        let named: Vec<&str> = if order.is_empty() { vec!["role", "content"] } else { given.collect() };
        for field in &named {
            match *field {
                "role" => map.serialize_entry("role", role)?,
                "content" if self.in_parts => {
                    map.serialize_entry("content", &[TextPart { kind: "text", text: content }])?;
                }
                "content" => map.serialize_entry("content", content)?,
                field => extra.get(field).map_or(Ok(()), |value| map.serialize_entry(field, value))?,
            }
        }
        for (field, value) in extra.iter().filter(|(field, _)| !named.contains(&field.as_str())) {
            map.serialize_entry(field, value)?;
        }
        map.end()
    }
}

impl TryFrom<Map<String, Json>> for ChatMessage {
    type Error = String;

    fn try_from(mut fields: Map<String, Json>) -> std::result::Result<Self, String> {
        fields.retain(|_, value| !value.is_null()); // clients echo answers with their empty fields
        let order: Vec<String> = fields.keys().cloned().collect();
        let role = match fields.shift_remove("role") {
            Some(Json::String(role)) => role,
            _ => return Err("a message needs a 'role', a string".into()),
        };
        let content = content_text(fields.shift_remove("content").unwrap_or_default())?;
        for (field, value) in &fields {
            if !(matches!(field.as_str(), "name" | "reasoning_content") && value.is_string()) {
                return Err(format!("message field '{field}' is not supported"));
            }
        }
        Ok(ChatMessage { role, content, extra: fields, order: Vec::new() }.ordered(order))
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

/// A compiled chat template with the special tokens that it may print. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    sources: Arc<TemplateSources>,
    tool_style: Option<ToolStyle>,
    /// Whether it prints the text of messages only if that is a list of parts.
    needs_parts: bool,
}

/// The parts of a template.
#[derive(Clone, Debug)]
struct TemplateSources {
    default: String,
    /// The template of requests with tools, where it differs.
    tool_use: Option<String>,
    /// The special tokens by their names as variables: `bos_token` and others.
    tokens: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Reads the template of a GGUF file or of a checkpoint directory: `chat_template.jinja`, or else
    /// `chat_template` of `tokenizer_config.json` (a string, or a list of named ones). Of several, in
    /// such a list or in the folder `additional_chat_templates`, `tool_use` renders requests with tools
    /// and `default` all others. `None` if there is none: such a model completes text but does not chat.
    ///
    /// # Errors
    /// When a file cannot be read, or the template is not valid Jinja.
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        if is_gguf(directory) {
            return gguf::template(&GgufFile::open(directory)?);
        }
        let config_file = directory.join(CONFIG_FILE);
        let object = tokenizer_config::named_tokens(directory)?;
        let fields = Fields::new(&config_file, &object);
        let (default, named) = match text_if_present(&directory.join(TEMPLATE_FILE))? {
            Some(source) => (Some(source), None),
            None => named_templates(&fields)?,
        };
        let tool_use = text_if_present(&directory.join(TOOL_TEMPLATE_FILE))?.or(named);
        let Some(default) = default else { return Ok(None) };
        Self::of(TemplateSources { default, tool_use, tokens: special_tokens(&object) }).map(Some)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// When it is not valid Jinja; the error names the line.
    pub fn new(source: &str, bos_token: Option<String>, eos_token: Option<String>) -> Result<Self> {
        let tokens = [("bos_token", bos_token), ("eos_token", eos_token)];
        let tokens =
            tokens.into_iter().filter_map(|(name, token)| token.map(|token| (name.to_owned(), token)));
        Self::of(TemplateSources { default: source.to_owned(), tool_use: None, tokens: tokens.collect() })
    }

    fn of(sources: TemplateSources) -> Result<Self> {
        let mut environment = jinja::environment().map_err(template_error)?;
        let named = [(DEFAULT_TEMPLATE, Some(&sources.default)), (TOOL_TEMPLATE, sources.tool_use.as_ref())];
        for (name, source) in named {
            let Some(source) = source else { continue };
            check_depth(source)?;
            template_limits::check_namespaces(source)?;
            environment.add_template_owned(name, jinja::translate(source)).map_err(template_error)?;
        }
        let tool_style = ToolStyle::of(sources.tool_use.as_ref().unwrap_or(&sources.default));
        let (environment, sources) = (Arc::new(environment), Arc::new(sources));
        let mut template = ChatTemplate { environment, sources, tool_style, needs_parts: false };
        template.needs_parts = !template.prints_text() && {
            template.needs_parts = true;
            template.prints_text()
        };
        Ok(template)
    }

    /// Whether the template prints the text of a message, and not the message's JSON.
    fn prints_text(&self) -> bool {
        const TEXT: &str = "qzxj";
        let messages = [ChatMessage::new("user", TEXT)];
        let text = self.render(&messages, false, &Map::new(), 0);
        text.is_ok_and(|text| text.contains(TEXT) && !text.contains("type'") && !text.contains("type\""))
    }

    /// A conversation as this template expects it.
    pub(super) fn values(&self, chat: &Conversation<'_>) -> ChatValues {
        ChatValues::of(chat, self.needs_parts)
    }

    /// The source text of all templates.
    pub(super) fn source(&self) -> String {
        let TemplateSources { default, tool_use, .. } = &*self.sources;
        [default.as_str(), tool_use.as_deref().unwrap_or_default()].concat()
    }

    /// The template with its source and special tokens changed by `change`.
    ///
    /// # Errors
    /// When the changed source is not valid Jinja.
    pub(super) fn changed(&self, change: &dyn Fn(&str) -> String) -> Result<Self> {
        let TemplateSources { default, tool_use, tokens } = &*self.sources;
        let tokens = tokens.iter().map(|(name, token)| (name.clone(), change(token))).collect();
        Self::of(TemplateSources {
            default: change(default),
            tool_use: tool_use.as_deref().map(change),
            tokens,
        })
    }

    /// The style of the model's tool calls; none if its template has no tools.
    pub fn tool_style(&self) -> Option<ToolStyle> {
        self.tool_style
    }

    /// Whether the template reads a variable of this name that it does not set itself.
    pub fn reads(&self, name: &str) -> bool {
        let named = self.environment.templates();
        named.into_iter().any(|(_, template)| template.undeclared_variables(false).contains(name))
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
    /// As for `render_until`.
    pub(super) fn render_chat(&self, chat: &Conversation<'_>, stopped: &dyn Fn() -> bool) -> Result<String> {
        self.render_values(chat, self.values(chat), stopped)
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
        let tools = values.arguments.get_item(&Value::from("tools")).unwrap_or_default();
        let has_tools = !tools.is_undefined() && !tools.is_none();
        let tokens = self.sources.tokens.iter().map(|(name, token)| (name.as_str(), token.as_str()));
        let further = [Value::from_pairs(tokens), context! { documents => () }, values.arguments];
        let context = context! {
            messages => values.messages,
            tools => if has_tools { tools } else { Value::from(()) },
            add_generation_prompt => chat.add_generation_prompt,
            strftime_now,
            ..merge_maps(further)
        };
        let mut environment = (*self.environment).clone();
        let fuel = FUEL.saturating_add(FUEL_PER_MESSAGE.saturating_mul(chat.messages.len() as u64));
        environment.set_fuel(Some(fuel.min(FUEL_MAX)));
        let name =
            if has_tools && self.sources.tool_use.is_some() { TOOL_TEMPLATE } else { DEFAULT_TEMPLATE };
        let template = environment.get_template(name).map_err(template_error)?;
        jinja::begin();
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

/// A conversation as a template sees it.
pub(super) struct ChatValues {
    /// A list of maps.
    pub(super) messages: Value,
    /// A map.
    pub(super) arguments: Value,
}

impl ChatValues {
    fn of(chat: &Conversation<'_>, in_parts: bool) -> Self {
        let in_view = |message| MessageView { message, in_parts };
        let messages: Vec<MessageView<'_>> = chat.messages.iter().map(in_view).collect();
        ChatValues { messages: Value::from(Serde(messages)), arguments: Value::from(Serde(chat.arguments)) }
    }
}

/// The text that a template has printed so far.
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

/// The text of a file, if there is one.
fn text_if_present(file: &Path) -> Result<Option<String>> {
    match files::read_text(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::read(file, error)),
    }
}

/// The templates of `tokenizer_config.json`: the default one, and the one for requests with tools.
fn named_templates(fields: &Fields) -> Result<(Option<String>, Option<String>)> {
    match fields.get("chat_template") {
        None => Ok((None, None)),
        Some(Json::String(source)) => Ok((Some(source.clone()), None)),
        Some(Json::Array(list)) => {
            let named = |name: &str| {
                let found = list.iter().find(|entry| entry["name"] == name);
                found.and_then(|entry| entry["template"].as_str()).map(str::to_owned)
            };
            match named(DEFAULT_TEMPLATE) {
                Some(default) => Ok((Some(default), named(TOOL_TEMPLATE))),
                None => Err(fields.error("chat_template", "has no template named 'default'")),
            }
        }
        Some(_) => Err(fields.error("chat_template", "expected a string or a list of named templates")),
    }
}

/// The special tokens that `tokenizer_config.json` names: strings, or objects with the string in `content`.
fn special_tokens(object: &Map<String, Json>) -> Vec<(String, String)> {
    let token = |value: &Json| value.as_str().or(value["content"].as_str()).map(str::to_owned);
    let named = object.iter().filter(|(name, _)| name.ends_with("_token"));
    let named =
        named.chain(object.get("extra_special_tokens").and_then(Json::as_object).into_iter().flatten());
    named.filter_map(|(name, value)| Some((name.clone(), token(value)?))).collect()
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

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
