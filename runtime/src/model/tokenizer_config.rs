//! Tokens in `tokenizer_config.json`: the one that ends an answer, and tokens that no other file has.

use super::error::{Error, Result};
use super::fields::{Fields, read_object_if_present};
use mixfleet_hal::files;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::AddedToken;

const FILE: &str = "tokenizer_config.json";
const ADDED: &str = "added_tokens_decoder";
/// Files that name the token that ends an answer, in the order in which transformers reads them.
const END_FILES: [&str; 2] = [FILE, "special_tokens_map.json"];
/// Maximum size of a `tokenizer.json` in bytes: published ones stay below 40 MB.
const TOKENIZER_BYTES_MAX: u64 = 512 << 20;
/// Bound well above any real vocabulary.
const ID_MAX: u32 = 1 << 24;

/// The tokens of a `tokenizer.json`.
#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    added_tokens: Vec<ListedToken>,
}

#[derive(Deserialize)]
struct ListedToken {
    id: u32,
    content: String,
}

/// The words of a `tokenizer.json` whose vocabulary is a map.
#[derive(Deserialize)]
struct VocabularyDocument {
    model: Vocabulary,
}

#[derive(Deserialize)]
struct Vocabulary {
    vocab: HashMap<String, u32>,
}

/// The id of the token that a checkpoint directory's tokenizer names as the end of an answer; none without
/// one, or if the vocabulary lacks it.
///
/// # Errors
/// The error names the file and the field.
pub(super) fn end_of_answer(directory: &Path) -> Result<Option<u32>> {
    let mut named = None;
    for name in END_FILES {
        let file = directory.join(name);
        let object = read_object_if_present(&file)?.unwrap_or_default();
        named = content(&Fields::new(&file, &object), "eos_token")?.map(str::to_owned);
        if named.is_some() {
            break;
        }
    }
    let Some(name) = named else { return Ok(None) };
    let file = directory.join(FILE);
    let object = read_object_if_present(&file)?.unwrap_or_default();
    let by_id = added(&Fields::new(&file, &object))?;
    if let Some((id, _)) = by_id.iter().find(|(_, token)| token.content == name) {
        return Ok(Some(*id));
    }
    let file = directory.join("tokenizer.json");
    if !file.exists() {
        return Ok(None);
    }
    let bytes = files::read(&file, TOKENIZER_BYTES_MAX).map_err(|e| Error::read(&file, e))?;
    // an invalid tokenizer is refused where the tokenizer is opened
    let listed = serde_json::from_slice::<Listed>(&bytes).map(|listed| listed.added_tokens);
    if let Some(token) = listed.unwrap_or_default().into_iter().find(|token| token.content == name) {
        return Ok(Some(token.id));
    }
    let words = serde_json::from_slice::<VocabularyDocument>(&bytes).map(|words| words.model.vocab);
    Ok(words.ok().and_then(|words| words.get(&name).copied()))
}

/// The text of a token, which is a string or an object.
fn content<'a>(fields: &Fields<'a>, field: &str) -> Result<Option<&'a str>> {
    match fields.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Object(token)) => match token.get("content") {
            Some(Value::String(text)) => Ok(Some(text)),
            _ => Err(fields.error(field, "expected a token with a 'content'")),
        },
        Some(other) => Err(fields.error(field, format!("{other}, expected a token"))),
    }
}

/// The tokens of `added_tokens_decoder` by id.
fn added(fields: &Fields) -> Result<Vec<(u32, AddedToken)>> {
    let mut all = Vec::new();
    for (id, token) in fields.object(ADDED)?.into_iter().flatten() {
        let wrong = |problem: &str| fields.error(&format!("{ADDED}.{id}"), problem);
        let id = id.parse().ok().filter(|id| *id < ID_MAX).ok_or_else(|| wrong("expected a token id"))?;
        let text = token["content"].as_str().filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| wrong("its 'content' is missing or empty"))?;
        let flag = |name: &str, usual: bool| token[name].as_bool().unwrap_or(usual);
        let special = flag("special", false);
        let token = AddedToken::from(text, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special));
        all.push((id, token));
    }
    all.sort_by_key(|(id, _)| *id);
    Ok(all)
}

/// Adds the tokens of a checkpoint directory's `tokenizer_config.json` that its `tokenizer.json` lacks.
///
/// # Errors
/// The error names a token that would have another id than the file says.
pub(super) fn add_tokens(directory: &Path, inner: &mut tokenizers::Tokenizer) -> Result<()> {
    let file = directory.join(FILE);
    let object: Map<String, Value> = read_object_if_present(&file)?.unwrap_or_default();
    let fields = Fields::new(&file, &object);
    let known = inner.get_added_vocabulary().get_added_tokens_decoder();
    let known: Vec<String> = known.values().map(|token| token.content.clone()).collect();
    for (id, token) in added(&fields)? {
        if known.contains(&token.content) {
            continue;
        }
        let name = token.content.clone();
        inner.add_tokens([token]).map_err(|e| Error::file(&file, e.to_string()))?;
        let given = inner.token_to_id(&name);
        if given != Some(id) {
            let given = given.map_or_else(|| "none".to_owned(), |given| given.to_string());
            let problem = format!(
                "{name:?} is in this file alone, and the next free id after those of tokenizer.json is {given}"
            );
            return Err(fields.error(&format!("{ADDED}.{id}"), problem));
        }
    }
    Ok(())
}
