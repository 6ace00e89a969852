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
/// Files of earlier versions of transformers, which count where `added_tokens_decoder` is absent.
const NAMES_FILE: &str = "special_tokens_map.json";
const ADDED_FILE: &str = "added_tokens.json";
/// Fields that name a special token.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Fields that name several, in a list, or in an object by the names of their variables.
const FURTHER: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];
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
    let file = directory.join(FILE);
    let object = named_tokens(directory)?;
    let fields = Fields::new(&file, &object);
    let mut named = content(&fields, "eos_token")?.map(str::to_owned);
    if named.is_none() {
        let file = directory.join(NAMES_FILE);
        let object = read_object_if_present(&file)?.unwrap_or_default();
        named = content(&Fields::new(&file, &object), "eos_token")?.map(str::to_owned);
    }
    let Some(name) = named else { return Ok(None) };
    let by_id = added(&fields)?;
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

/// The fields of `tokenizer_config.json`. As in transformers, those of `special_tokens_map.json` take
/// precedence where the former has no `added_tokens_decoder`.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn named_tokens(directory: &Path) -> Result<Map<String, Value>> {
    let mut object = read_object_if_present(&directory.join(FILE))?.unwrap_or_default();
    if object.get(ADDED).is_none_or(Value::is_null) {
        object.extend(read_object_if_present(&directory.join(NAMES_FILE))?.unwrap_or_default());
    }
    Ok(object)
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
        let token = token_of(token, false).ok_or_else(|| wrong("its 'content' is missing or empty"))?;
        all.push((id, token));
    }
    all.sort_by_key(|(id, _)| *id);
    Ok(all)
}

/// A token that is written as a text or an object; none without a text.
fn token_of(value: &Value, is_special: bool) -> Option<AddedToken> {
    let text = value.as_str().or(value["content"].as_str()).filter(|text| !text.is_empty())?;
    let flag = |name: &str, usual: bool| value.get(name).and_then(Value::as_bool).unwrap_or(usual);
    let special = is_special || flag("special", false);
    let token = AddedToken::from(text, special)
        .single_word(flag("single_word", false))
        .lstrip(flag("lstrip", false))
        .rstrip(flag("rstrip", false))
        .normalized(flag("normalized", !special));
    Some(token)
}

/// The special tokens that are named, in the order in which transformers adds them.
fn named(fields: &Fields) -> Vec<AddedToken> {
    let further = FURTHER.iter().filter_map(|field| fields.get(field));
    let further = further.flat_map(|value| match value {
        Value::Array(list) => list.iter().collect::<Vec<_>>(),
        Value::Object(map) => map.values().collect(),
        _ => Vec::new(),
    });
    let all = NAMED.iter().filter_map(|field| fields.get(field)).chain(further);
    all.filter_map(|value| token_of(value, true)).collect()
}

/// The tokens of `added_tokens.json` by id.
fn added_before(directory: &Path, specials: &[AddedToken]) -> Result<Vec<(u32, AddedToken)>> {
    let file = directory.join(ADDED_FILE);
    let object = read_object_if_present(&file)?.unwrap_or_default();
    let mut all = Vec::new();
    for (text, id) in &object {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id < ID_MAX);
        let id = id.ok_or_else(|| Fields::new(&file, &object).error(text, "expected a token id"))?;
        let special = specials.iter().any(|token| token.content == *text);
        all.push((id, AddedToken::from(text.as_str(), special).normalized(!special)));
    }
    all.sort_by_key(|(id, _)| *id);
    Ok(all)
}

/// Adds the tokens of a checkpoint directory that its `tokenizer.json` lacks, with the flags of
/// `tokenizer_config.json`: those of `added_tokens_decoder`, and those that are named as special.
///
/// # Errors
/// The error names a token that would have another id than the file says, or an unsupported setting.
pub(super) fn add_tokens(directory: &Path, inner: &mut tokenizers::Tokenizer) -> Result<()> {
    const SPLIT: &str = "split_special_tokens";
    let file = directory.join(FILE);
    let object = named_tokens(directory)?;
    let fields = Fields::new(&file, &object);
    if fields.flag(SPLIT, false)? {
        return Err(
            fields.error(SPLIT, "true is not supported: a template's special tokens would be plain text")
        );
    }
    let specials = named(&fields);
    let is_before = fields.get(ADDED).is_none();
    let listed = if is_before { added_before(directory, &specials)? } else { added(&fields)? };
    let failed = |e: tokenizers::Error| Error::file(&file, e.to_string());
    for (id, mut token) in listed {
        let (name, is_known) = (token.content.clone(), is_added(inner, &token.content));
        if is_before && is_known {
            continue;
        }
        token.special |= specials.iter().any(|special| special.content == name);
        inner.add_tokens([token]).map_err(failed)?;
        let given = inner.token_to_id(&name);
        if given != Some(id) && !is_known {
            let given = given.map_or_else(|| "none".to_owned(), |given| given.to_string());
            let problem = format!(
                "{name:?} is in this file alone, and the next free id after those of tokenizer.json is {given}"
            );
            let (source, field) = match is_before {
                true => (directory.join(ADDED_FILE), name),
                false => (file.clone(), format!("{ADDED}.{id}")),
            };
            return Err(Fields::new(&source, &object).error(&field, problem));
        }
    }
    for token in specials {
        if !is_added(inner, &token.content) {
            inner.add_tokens([token]).map_err(failed)?;
        }
    }
    Ok(())
}

/// Whether a text is a token besides the vocabulary.
fn is_added(inner: &tokenizers::Tokenizer, text: &str) -> bool {
    inner.get_added_vocabulary().get_vocab().contains_key(text)
}
