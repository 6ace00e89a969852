//! Kimi's tokenizer: a file `tiktoken.model` of tokens and their ranks, and names of special tokens in
//! `tokenizer_config.json`.
//!
//! Such a tokenizer repeatedly joins the two neighbours whose joined bytes are the token of lowest rank. The
//! library's BPE joins pairs by the order of a list instead, so the list has every division of every token
//! into two others, by the rank of the whole, as transformers' `TikTokenConverter` makes it. Both give the
//! same tokens unless two overlapping pairs make the same bytes: one takes the left pair, the other the pair
//! whose left part has the lower rank.

use super::byte_level::byte_symbol;
use super::error::{Error, Result};
use super::fields::{Fields, read_object};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use mixfleet_hal::cast::to_u32;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

/// The file's name in a checkpoint directory.
pub(super) const FILE: &str = "tiktoken.model";
const CONFIG_FILE: &str = "tokenizer_config.json";
/// The tokenizer's class, whose expression is [`PATTERN`].
const CLASS: &str = "TikTokenTokenizer";

/// Maximum size of the file in bytes: Kimi's has 2.8 MB.
const BYTES_MAX: u64 = 64 << 20;
/// Maximum length of a token in bytes. The number of its divisions grows with it.
const TOKEN_BYTES_MAX: usize = 1024;
/// Number of ids after the last rank that are special tokens, with or without names.
const RESERVED: u32 = 256;
/// Bound well above any real number of special tokens.
const SPECIALS_MAX: u32 = 1 << 16;

/// Pattern of the pieces that tokens are joined in: runs of Han characters, words by case with a character
/// before them, up to three digits, other signs, and white space.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Reads the tokenizer of a checkpoint directory.
///
/// # Errors
/// The error names the file, and the line or field.
pub(super) fn open(directory: &Path) -> Result<tokenizers::Tokenizer> {
    let file = directory.join(FILE);
    let bytes = mixfleet_hal::files::read(&file, BYTES_MAX).map_err(|e| Error::read(&file, e))?;
    let tokens = tokens(&bytes).map_err(|problem| Error::file(&file, problem))?;
    let config_file = directory.join(CONFIG_FILE);
    let config = read_object(&config_file)?;
    let specials = specials(&Fields::new(&config_file, &config), &tokens)?;
    build(&tokens, specials).map_err(|e| Error::file(&file, format!("not a tokenizer: {e}")))
}

/// The tokens by rank, each in lines `base64 rank`.
fn tokens(text: &[u8]) -> std::result::Result<Vec<Vec<u8>>, String> {
    let mut by_rank = BTreeMap::new();
    let mut ranks: HashMap<Vec<u8>, u32> = HashMap::new();
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let (token, rank) = entry(line).map_err(|problem| format!("line {number}: {problem}"))?;
        if let Some(other) = ranks.insert(token.clone(), rank) {
            return Err(format!("line {number}: its token also has the rank {other}"));
        }
        if by_rank.insert(rank, token).is_some() {
            return Err(format!("line {number}: rank {rank} occurs twice"));
        }
    }
    if let Some(missing) = (0..=u8::MAX).find(|byte| !ranks.contains_key([*byte].as_slice())) {
        return Err(format!("byte 0x{missing:02X} has no token, expected one for each of 256 bytes"));
    }
    let count = to_u32(by_rank.len());
    match by_rank.last_key_value() {
        Some((last, _)) if *last >= count => {
            Err(format!("{count} tokens up to rank {last}, expected every rank from 0 on"))
        }
        _ => Ok(by_rank.into_values().collect()),
    }
}

/// The token and the rank of a line.
fn entry(line: &[u8]) -> std::result::Result<(Vec<u8>, u32), String> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let (Some(token), Some(rank), None) = (words.next(), words.next(), words.next()) else {
        return Err("expected a token in base64 and its rank".into());
    };
    let token = STANDARD.decode(token).map_err(|_| "its token is not valid base64")?;
    if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
        return Err(format!("a token of {} bytes, expected 1 to {TOKEN_BYTES_MAX}", token.len()));
    }
    let rank = std::str::from_utf8(rank).ok().and_then(|rank| rank.parse().ok());
    Ok((token, rank.ok_or("its rank is not a whole number of 32 bits")?))
}

/// The special tokens, by id from the one after the last rank.
fn specials(config: &Fields, tokens: &[Vec<u8>]) -> Result<Vec<AddedToken>> {
    const FIELD: &str = "added_tokens_decoder";
    if let Some(class) = config.text("tokenizer_class")?.filter(|class| *class != CLASS) {
        let problem = format!("'{class}' with {FILE} is not supported; supported: {CLASS}");
        return Err(config.error("tokenizer_class", problem));
    }
    let first = to_u32(tokens.len());
    let mut named = BTreeMap::new();
    for (id, token) in config.object(FIELD)?.into_iter().flatten() {
        let fields = |problem: String| config.error(&format!("{FIELD}.{id}"), problem);
        let last = first.saturating_add(SPECIALS_MAX);
        let place = id.parse::<u32>().ok().filter(|id| (first..last).contains(id));
        let place = place.ok_or_else(|| {
            fields(format!("expected an id from {first} on, after the tokens of {FILE}, below {last}"))
        })?;
        let content = token["content"].as_str().filter(|content| !content.is_empty());
        let content = content.ok_or_else(|| fields("its 'content' is missing or empty".into()))?;
        let special = token["special"].as_bool().unwrap_or(true);
        named.insert(place, AddedToken::from(content, special).normalized(false));
    }
    let end = named.last_key_value().map_or(0, |(last, _)| last + 1).max(first.saturating_add(RESERVED));
    let of = |id| {
        let reserved = || AddedToken::from(format!("<|reserved_token_{id}|>"), true).normalized(false);
        named.remove(&id).unwrap_or_else(reserved)
    };
    let all: Vec<AddedToken> = (first..end).map(of).collect();
    // For a name that the library knows, it returns the existing id.
    let mut seen: HashMap<&str, u32> = HashMap::new();
    let spelled: HashMap<String, u32> = tokens.iter().map(|token| spelling(token)).zip(0..).collect();
    for (id, token) in (first..).zip(&all) {
        let name = token.content.as_str();
        if let Some(other) = seen.insert(name, id).or(spelled.get(name).copied()) {
            let problem = format!("'{name}' is also the name of token {other}");
            return Err(config.error(&format!("{FIELD}.{id}"), problem));
        }
    }
    Ok(all)
}

/// A token as byte-level vocabularies spell it.
fn spelling(token: &[u8]) -> String {
    token.iter().copied().map(byte_symbol).collect()
}

fn build(tokens: &[Vec<u8>], specials: Vec<AddedToken>) -> tokenizers::Result<tokenizers::Tokenizer> {
    let ranks: HashMap<&[u8], u32> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    let mut merges = Vec::new();
    for token in tokens {
        let divided = (1..token.len()).map(|at| token.split_at(at));
        let known = |(left, right)| Some((ranks.get(left)?, ranks.get(right)?, left, right));
        let mut pairs: Vec<_> = divided.filter_map(known).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(.., left, right)| (spelling(left), spelling(right))));
    }
    let vocab: Vocab = tokens.iter().map(|token| spelling(token)).zip(0..).collect();
    // a word that is a token is not divided, regardless of merges
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build()?;
    let bytes = ByteLevel::new(false, true, false);
    let words = Split::new(SplitPattern::Regex(PATTERN.into()), SplitDelimiterBehavior::Isolated, false)?;
    let steps = vec![PreTokenizerWrapper::Split(words), PreTokenizerWrapper::ByteLevel(bytes)];
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(Sequence::new(steps)));
    inner.with_decoder(Some(bytes));
    inner.add_tokens(specials)?;
    Ok(inner)
}

#[cfg(test)]
#[path = "tiktoken_tests.rs"]
mod tests;
