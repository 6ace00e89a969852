//! Reads the envelope of an answer or of a chunk of one, and replaces values in it in place.

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{EngineChunk, EngineFault, EngineFaultKind, EngineUsage, WholeAnswer};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::ops::Range;

/// Characters of an engine's error that are passed on.
const ERROR_CHARS_MAX: usize = 400;

#[derive(Deserialize)]
struct ChunkEnvelope<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    created: Option<&'a RawValue>,
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(default, borrow)]
    choices: Option<Vec<ChunkChoice<'a>>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ChunkChoice<'a> {
    #[serde(default)]
    index: u32,
    #[serde(borrow)]
    delta: Option<ChunkDelta<'a>>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct ChunkDelta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    reasoning_content: Option<IgnoredAny>,
    reasoning: Option<IgnoredAny>,
    tool_calls: Option<IgnoredAny>,
    function_call: Option<IgnoredAny>,
    refusal: Option<IgnoredAny>,
}

impl ChunkDelta<'_> {
    fn adds_other(&self) -> bool {
        let others =
            [&self.reasoning_content, &self.reasoning, &self.tool_calls, &self.function_call, &self.refusal];
        others.into_iter().any(Option::is_some)
    }
}

#[derive(Deserialize)]
struct ChunkUsage {
    prompt_tokens: u32,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<UsageDetails>,
}

#[derive(Deserialize)]
struct UsageDetails {
    cached_tokens: Option<u32>,
}

/// The names that an answer may give its model, and what the client calls it.
pub(crate) struct ModelNames<'a> {
    pub(crate) accepted: &'a [String],
    pub(crate) client: &'a str,
}

/// What a continued answer has in common with its beginning.
pub(crate) struct Beginning<'a> {
    pub(crate) id: &'a str,
    pub(crate) created: &'a str,
    /// Tokens of the text before it.
    pub(crate) tokens: u32,
}

fn malformed(detail: impl Into<String>) -> EngineFault {
    EngineFault::new(EngineFaultKind::Malformed, detail)
}

fn parse<'a>(text: &'a [u8], what: &str) -> Result<ChunkEnvelope<'a>, EngineFault> {
    let envelope: ChunkEnvelope<'a> = serde_json::from_slice(text)
        .map_err(|error| malformed(format!("{what} is not what OpenAI's interface has: {error}")))?;
    match envelope.error {
        Some(error) => Err(EngineFault::new(EngineFaultKind::Failed, error_text(error.get().as_bytes()))),
        None => Ok(envelope),
    }
}

/// The text of an engine's error.
pub(crate) fn error_text(document: &[u8]) -> String {
    #[derive(Deserialize)]
    struct ErrorWords {
        message: String,
    }
    #[derive(Deserialize)]
    struct ErrorDocument {
        error: ErrorWords,
    }
    let words = serde_json::from_slice(document).map(|ErrorDocument { error }| error);
    let message = match words.or_else(|_| serde_json::from_slice(document)) {
        Ok(ErrorWords { message }) => message,
        Err(_) => String::from_utf8_lossy(document).into_owned(),
    };
    let message: String = message.chars().filter(|c| !c.is_control()).take(ERROR_CHARS_MAX).collect();
    if message.is_empty() { "it gives no reason".into() } else { message }
}

/// The code of an engine's error, if it has one.
pub(crate) fn error_code(document: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Coded {
        code: String,
    }
    #[derive(Deserialize)]
    struct CodedError {
        error: Coded,
    }
    serde_json::from_slice(document).ok().map(|CodedError { error }| error.code)
}

fn usage(raw: Option<&RawValue>) -> Option<EngineUsage> {
    let ChunkUsage { prompt_tokens, completion_tokens, prompt_tokens_details } =
        serde_json::from_str(raw?.get()).ok()?;
    Some(EngineUsage {
        prompt_tokens,
        completion_tokens: completion_tokens.unwrap_or(0),
        cached_tokens: prompt_tokens_details.and_then(|details| details.cached_tokens),
    })
}

/// A value in a text, and what replaces it.
type ValueEdit = (Range<usize>, Vec<u8>);

fn edit(text: &[u8], value: &RawValue, replacement: impl Into<Vec<u8>>) -> ValueEdit {
    let from = value.get().as_ptr().addr() - text.as_ptr().addr();
    (from..from + value.get().len(), replacement.into())
}

fn apply(text: Vec<u8>, mut edits: Vec<ValueEdit>) -> Vec<u8> {
    if edits.is_empty() {
        return text;
    }
    edits.sort_by_key(|(range, _)| range.start);
    let (mut written, mut done) = (Vec::with_capacity(text.len() + 64), 0);
    for (range, replacement) in edits {
        written.extend_from_slice(&text[done..range.start]);
        written.extend_from_slice(&replacement);
        done = range.end;
    }
    written.extend_from_slice(&text[done..]);
    written
}

/// Checks the model that an answer names; the edit that calls it by the client's name, if it has another one.
fn model_edit(
    text: &[u8],
    model: Option<&RawValue>,
    names: &ModelNames<'_>,
) -> Result<Option<ValueEdit>, EngineFault> {
    let raw = model.ok_or_else(|| malformed("its answer names no model"))?;
    let name: Cow<'_, str> = serde_json::from_str::<String>(raw.get())
        .map(Cow::Owned)
        .map_err(|_| malformed("its answer's model is not a name"))?;
    if name == names.client {
        return Ok(None);
    }
    if !names.accepted.iter().any(|accepted| *accepted == name) {
        let name: String = name.chars().take(64).collect();
        return Err(malformed(format!("it answers by another model, {name:?}")));
    }
    let client = serde_json::to_vec(names.client).map_err(|error| malformed(error.to_string()))?;
    Ok(Some(edit(text, raw, client)))
}

/// Whether this is the reason of an answer that is complete.
fn completes(reason: &str) -> bool {
    !matches!(reason, "abort" | "error")
}

fn cut(reason: &str) -> EngineFault {
    EngineFault::new(EngineFaultKind::Cut, format!("it ended its answer for the reason {reason:?}"))
}

/// Reads a whole answer, and calls its model by the client's name.
pub(crate) fn whole(text: Vec<u8>, names: &ModelNames<'_>) -> Result<WholeAnswer, EngineFault> {
    let envelope = parse(&text, "its answer")?;
    let choices = envelope.choices.unwrap_or_default();
    if choices.is_empty() {
        return Err(malformed("its answer has no choices"));
    }
    for choice in &choices {
        match choice.finish_reason.as_deref() {
            Some(reason) if completes(reason) => {}
            Some(reason) => return Err(cut(reason)),
            None => return Err(malformed("a choice of its answer has no end")),
        }
    }
    let usage = usage(envelope.usage);
    let at_limit = choices.iter().filter(|choice| choice.finish_reason.as_deref() == Some("length")).count();
    let (choices, at_limit) = (to_u32(choices.len()), to_u32(at_limit));
    let edits: Vec<ValueEdit> = model_edit(&text, envelope.model, names)?.into_iter().collect();
    Ok(WholeAnswer { body: apply(text, edits), usage, choices, at_limit })
}

/// What a chunk says, without its data, and the number of its choices.
fn content(envelope: &ChunkEnvelope<'_>) -> Result<(EngineChunk, usize), EngineFault> {
    let raw = |value: Option<&RawValue>| value.map_or_else(String::new, |value| value.get().to_owned());
    let mut read = EngineChunk {
        usage: usage(envelope.usage),
        id: raw(envelope.id),
        created: raw(envelope.created),
        ..EngineChunk::default()
    };
    let choices = envelope.choices.as_deref().unwrap_or_default();
    for choice in choices {
        let content = choice.delta.as_ref().and_then(|delta| delta.content.as_deref());
        let added = choice.text.as_deref().or(content).unwrap_or_default();
        match choice.index {
            0 => read.text.push_str(added),
            _ => read.adds_other |= !added.is_empty(),
        }
        read.adds_other |= choice.delta.as_ref().is_some_and(ChunkDelta::adds_other);
        if let Some(reason) = &choice.finish_reason {
            if !completes(reason) {
                return Err(cut(reason));
            }
            read.ends_choice = true;
            read.at_limit = reason == "length";
        }
    }
    Ok((read, choices.len()))
}

/// Reads a chunk that passes by unchanged.
pub(crate) fn passing(text: &[u8]) -> Result<EngineChunk, EngineFault> {
    content(&parse(text, "a chunk of its answer")?).map(|(read, _)| read)
}

/// Reads the lengths of a whole answer that passes by unchanged.
pub(crate) fn passing_usage(text: &[u8]) -> Result<Option<EngineUsage>, EngineFault> {
    Ok(usage(parse(text, "its answer")?.usage))
}

/// Reads a chunk, and returns the client's version of it.
pub(crate) fn chunk(
    text: Vec<u8>,
    names: &ModelNames<'_>,
    usage_asked: bool,
    beginning: Option<&Beginning<'_>>,
) -> Result<EngineChunk, EngineFault> {
    let envelope = parse(&text, "a chunk of its answer")?;
    let (mut read, choices) = content(&envelope)?;
    let mut edits: Vec<ValueEdit> = model_edit(&text, envelope.model, names)?.into_iter().collect();
    if let Some(Beginning { id, created, tokens }) = beginning {
        // the one that only says whose turn it is went out before
        if !read.has_token() && !read.ends_choice && choices > 0 {
            return Ok(read);
        }
        let same = [(envelope.id, *id), (envelope.created, *created)];
        edits.extend(
            same.into_iter()
                .filter(|(_, value)| !value.is_empty())
                .filter_map(|(raw, value)| raw.map(|raw| edit(&text, raw, value))),
        );
        if let Some((raw, told)) = envelope.usage.zip(read.usage) {
            let whole = EngineUsage {
                prompt_tokens: told.prompt_tokens.saturating_sub(*tokens),
                completion_tokens: told.completion_tokens + tokens,
                cached_tokens: told
                    .cached_tokens
                    .map(|cached| cached.min(told.prompt_tokens.saturating_sub(*tokens))),
            };
            edits.push(edit(&text, raw, usage_json(whole)));
            read.usage = Some(whole);
        }
    }
    let tells_lengths_only = choices == 0 && envelope.usage.is_some();
    if usage_asked || !tells_lengths_only {
        read.data = Some(apply(text, edits));
    }
    Ok(read)
}

fn usage_json(usage: EngineUsage) -> Vec<u8> {
    let EngineUsage { prompt_tokens, completion_tokens, cached_tokens } = usage;
    let details = cached_tokens.map(|cached| serde_json::json!({ "cached_tokens": cached }));
    let document = serde_json::json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": u64::from(prompt_tokens) + u64::from(completion_tokens),
        "prompt_tokens_details": details,
    });
    document.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: ModelNames<'_> = ModelNames { accepted: &[], client: "m" };

    fn read(text: &str) -> Result<EngineChunk, EngineFault> {
        chunk(text.into(), &NAMES, false, None)
    }

    fn data(chunk: EngineChunk) -> String {
        String::from_utf8(chunk.data.unwrap()).unwrap()
    }

    #[test]
    fn a_chunk_is_passed_on_as_it_is() {
        let text = r#"{"id":"a","created":7,"model":"m", "choices":[{"index":0,"delta":{"content":"x\n"},"finish_reason":null}],"odd":[1.0]}"#;
        let chunk = read(text).unwrap();
        assert_eq!((chunk.text.as_str(), chunk.adds_other, chunk.ends_choice), ("x\n", false, false));
        assert_eq!((chunk.id.as_str(), chunk.created.as_str()), ("\"a\"", "7"));
        assert_eq!(data(chunk), text);
    }

    #[test]
    fn what_a_chunk_adds_is_seen() {
        let of = |choice: &str| read(&format!(r#"{{"model":"m","choices":[{choice}]}}"#)).unwrap();
        let other = |choice: &str| of(choice).adds_other;
        assert!(other(r#"{"index":0,"delta":{"tool_calls":[{}]}}"#));
        assert!(other(r#"{"index":0,"delta":{"reasoning_content":"hm"}}"#));
        assert!(other(r#"{"index":1,"delta":{"content":"x"}}"#));
        assert!(!other(r#"{"index":0,"delta":{"role":"assistant","content":null,"tool_calls":null}}"#));
        assert_eq!(of(r#"{"index":0,"text":"t","finish_reason":"stop"}"#).text, "t");
        assert!(of(r#"{"index":0,"text":"","finish_reason":"stop"}"#).ends_choice);
    }

    #[test]
    fn lengths_are_read_and_shown_to_those_who_asked() {
        let text = r#"{"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13,"prompt_tokens_details":{"cached_tokens":8}}}"#;
        let hidden = read(text).unwrap();
        let usage = EngineUsage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: Some(8) };
        assert_eq!((hidden.usage, hidden.data), (Some(usage), None));
        assert_eq!(data(chunk(text.into(), &NAMES, true, None).unwrap()), text);
    }

    #[test]
    fn a_continued_answer_looks_like_one() {
        let beginning = Beginning { id: "\"first\"", created: "1", tokens: 3 };
        let continued = |text: &str| chunk(text.into(), &NAMES, true, Some(&beginning)).unwrap();
        let role =
            r#"{"id":"b","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
        assert_eq!(continued(role).data, None);
        let text = r#"{"created":9,"model":"m","id":"b","choices":[{"index":0,"delta":{"content":"x"}}]}"#;
        let expected =
            r#"{"created":1,"model":"m","id":"first","choices":[{"index":0,"delta":{"content":"x"}}]}"#;
        assert_eq!(data(continued(text)), expected);
        let usage = continued(
            r#"{"id":"b","model":"m","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":4,"total_tokens":16,"prompt_tokens_details":{"cached_tokens":11}}}"#,
        );
        let whole = EngineUsage { prompt_tokens: 9, completion_tokens: 7, cached_tokens: Some(9) };
        assert_eq!(usage.usage, Some(whole));
        let document: serde_json::Value = serde_json::from_str(&data(usage)).unwrap();
        assert_eq!(document["usage"]["total_tokens"], 16);
    }

    #[test]
    fn another_model_an_error_or_nonsense_is_no_answer() {
        let kind = |text: &str| read(text).unwrap_err().kind;
        assert_eq!(kind(r#"{"model":"other","choices":[]}"#), EngineFaultKind::Malformed);
        assert_eq!(kind(r#"{"choices":[]}"#), EngineFaultKind::Malformed);
        assert_eq!(kind("<html>"), EngineFaultKind::Malformed);
        assert_eq!(kind(r#"{"model":"m","choices":7}"#), EngineFaultKind::Malformed);
        assert_eq!(
            kind(r#"{"model":"m","choices":[{"index":0,"finish_reason":"abort"}]}"#),
            EngineFaultKind::Cut
        );
        let failed = read(r#"{"error":{"message":"no more","code":500}}"#).unwrap_err();
        assert_eq!((failed.kind, failed.detail.as_str()), (EngineFaultKind::Failed, "no more"));
    }

    #[test]
    fn a_whole_answer_has_choices_that_end() {
        let accepted = ["f.gguf".to_owned()];
        let names = ModelNames { accepted: &accepted, client: "m" };
        let text = r#"{"id":"a","model":"f.gguf","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}"#;
        let answer = whole(text.into(), &names).unwrap();
        assert_eq!(String::from_utf8(answer.body).unwrap(), text.replace("f.gguf", "m"));
        assert_eq!((answer.usage.unwrap().completion_tokens, answer.choices, answer.at_limit), (2, 1, 0));
        for wrong in [
            r#"{"model":"m","choices":[]}"#,
            r#"{"model":"m","choices":[{"index":0}]}"#,
            r#"{"model":"m","choices":[{"finish_reason":"error"}]}"#,
            r#"{"model":"x","choices":[{"finish_reason":"stop"}]}"#,
            r#"[]"#,
            "",
        ] {
            assert!(whole(wrong.into(), &names).is_err(), "{wrong}");
        }
    }
}
