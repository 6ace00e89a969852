//! Converts text to token ids and back, by the checkpoint's `tokenizer.json` or `tiktoken.model`.

use super::byte_level::{byte_symbol, symbol_bytes};
use super::error::{Error, LFS_POINTER, LFS_PROBLEM, Result};
use super::gguf::{self, GgufFile, is_gguf};
use super::specials::Specials;
use super::{tiktoken, tokenizer_config};
use mixfleet_hal::files;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use tokenizers::{Model, NormalizedString, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

/// Replaces bytes that are not UTF-8, including those of an incomplete character.
const REPLACEMENT: char = '\u{FFFD}';

/// Maximum size of a `tokenizer.json` in bytes: published ones stay below 40 MB.
const FILE_BYTES_MAX: u64 = 512 << 20;

/// Maximum factor by which a tokenizer may lengthen text before dividing it, and after joining it again:
/// published ones stay below 100.
const GROWTH_MAX: usize = 256;
/// Maximum number of bytes that such a step may add.
const ADDED_BYTES_MAX: usize = 1024;

/// Maximum number of tokens that a stream holds back while their text may still change. A character takes
/// four byte tokens; longer runs are meaningless bytes.
const HELD_TOKENS_MAX: usize = 64;

/// A tokenizer that is cheap to clone.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    /// Whether the vocabulary spells bytes as printable characters (GPT-2, Llama 3, Qwen).
    byte_level: bool,
    specials: Arc<Specials>,
    bytes_max: Arc<OnceLock<Option<usize>>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a checkpoint directory and the tokens that only `tokenizer_config.json` has,
    /// or else `tiktoken.model`, or the tokens of a GGUF file.
    ///
    /// # Errors
    /// When the file is missing or not a tokenizer.
    pub fn open(directory: &Path) -> Result<Self> {
        if is_gguf(directory) {
            return gguf::tokenizer(&GgufFile::open(directory)?);
        }
        let file = directory.join("tokenizer.json");
        if !file.exists() && directory.join(tiktoken::FILE).exists() {
            return Self::new(tiktoken::open(directory)?);
        }
        let bytes = files::read(&file, FILE_BYTES_MAX).map_err(|e| Error::read(&file, e))?;
        if bytes.starts_with(LFS_POINTER) {
            return Err(Error::file(&file, LFS_PROBLEM));
        }
        let mut inner = parse(&bytes).map_err(|e| Error::file(&file, format!("not a tokenizer: {e}")))?;
        tokenizer_config::add_tokens(directory, &mut inner)?;
        Self::new(inner)
    }

    /// Wraps a tokenizer. Its truncation and padding are turned off, so that a prompt is never cut silently.
    ///
    /// # Errors
    /// None in practice; the library's setter is fallible.
    pub fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        inner.with_truncation(None).map_err(|e| Error::Tokenizer(e.to_string()))?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder()).unwrap_or_default();
        let normalizer = serde_json::to_value(inner.get_normalizer()).unwrap_or_default();
        check_growth("normalizer", &normalizer)?;
        check_growth("decoder", &decoder)?;
        let decoder = decoder.to_string();
        let byte_level = decoder.contains("\"ByteLevel\"");
        let added = inner.get_added_vocabulary().get_added_tokens_decoder();
        let special = added.values().filter(|token| token.special).map(|token| token.content.as_str());
        let specials = Arc::new(Specials::new(special)?);
        Ok(Tokenizer { inner: Arc::new(inner), byte_level, specials, bytes_max: Arc::default() })
    }

    /// Token ids of a plain prompt, with the special tokens that the tokenizer itself adds (bos).
    ///
    /// # Errors
    /// When the tokenizer has no token for some part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Token ids of a rendered chat. No special token is added, since the chat contains them all.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>> {
        self.encode_with(rendered, false)
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, add_special_tokens);
        Ok(encoding.map_err(|e| Error::Tokenizer(e.to_string()))?.get_ids().to_vec())
    }

    /// The names of the special tokens.
    pub(super) fn specials(&self) -> Arc<Specials> {
        self.specials.clone()
    }

    /// Checks that `ids`, encoded from `text`, contain no special token more often than its name occurs in
    /// `text`: a normaliser, or a vocabulary that lists special tokens as words, may produce more.
    ///
    /// # Errors
    /// When some special token does.
    pub fn check_specials(&self, ids: &[u32], text: &str, add_special_tokens: bool) -> Result<()> {
        let mut allowed: HashMap<u32, usize> = HashMap::new();
        for (name, count) in self.specials.names().iter().zip(self.specials.counts(text)) {
            *allowed.entry(self.token_to_id(name).unwrap_or(u32::MAX)).or_default() += count;
        }
        let added = if add_special_tokens { self.encode("")? } else { Vec::new() };
        added.iter().for_each(|id| *allowed.entry(*id).or_default() += 1);
        // Text without a token of its own becomes the unknown token.
        let unknown = self.inner.get_model().tokenize("\u{10FFFF}").unwrap_or_default();
        for id in ids.iter().filter(|id| unknown.iter().all(|token| token.id != **id)) {
            let Some(left) = allowed.get_mut(id) else { continue };
            *left = left.checked_sub(1).ok_or_else(|| {
                let name = self.id_to_token(*id).unwrap_or_default();
                Error::Tokenizer(format!("this tokenizer makes the special token {name:?} of plain text"))
            })?;
        }
        Ok(())
    }

    /// Positions in `text` where [`encode_marked`](Self::encode_marked) needs a mark to prevent special
    /// tokens, alone or together with text before or after it.
    pub fn special_places(&self, text: &str) -> Vec<usize> {
        self.specials.places(text)
    }

    /// Token ids of `text` without the character `mark`, as [`encode`](Self::encode) gives them, except that
    /// names interrupted by `mark` do not become special tokens.
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and when the tokenizer's normaliser removes the mark.
    pub fn encode_marked(&self, text: &str, mark: char, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let inner = &self.inner;
            // This follows the library's own steps, with the marks removed after it has searched for special
            // tokens.
            let mut pieces: PreTokenizedString =
                inner.get_added_vocabulary().extract_and_normalize(inner.get_normalizer(), text);
            let kept = pieces.get_splits(OffsetReferential::Normalized, OffsetType::None);
            let kept: usize = kept.iter().map(|(piece, ..)| piece.matches(mark).count()).sum();
            if kept != text.matches(mark).count() {
                return Err("this tokenizer cannot take the text of its special tokens as plain text".into());
            }
            pieces.normalize(|piece: &mut NormalizedString| {
                piece.filter(|character| character != mark);
                Ok(())
            })?;
            if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| inner.get_model().tokenize(piece.get()))?;
            let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
            Ok(inner.post_process(encoding, None, add_special_tokens)?.get_ids().to_vec())
        };
        encode().map_err(|error| Error::Tokenizer(error.to_string()))
    }

    /// The maximum number of bytes of text that one token can represent; none without a limit, as where
    /// unknown text of any length becomes one token.
    pub fn token_bytes_max(&self) -> Option<usize> {
        *self.bytes_max.get_or_init(|| self.find_bytes_max())
    }

    fn find_bytes_max(&self) -> Option<usize> {
        let parts = serde_json::to_value(PartsOf(&self.inner)).ok()?;
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let swallows_spaces = added.values().any(|token| token.lstrip || token.rstrip);
        if swallows_spaces || !keeps_all(&parts["pre_tokenizer"]) {
            return None;
        }
        let shrinks = shrinks_by(&parts["normalizer"])?;
        // If a byte has no token, text of any length may vanish or become one unknown token.
        let spelled = |byte: u8| match self.byte_level {
            true => Some(byte_symbol(byte).to_string()),
            false => (parts["byte_fallback"] == true).then(|| format!("<0x{byte:02X}>")),
        };
        if !(0..=255).all(|byte| spelled(byte).is_some_and(|token| self.token_to_id(&token).is_some())) {
            return None;
        }
        let bytes = |token: &String| match self.byte_level {
            true => token.chars().count(),
            false => token.len(),
        };
        let words = self.inner.get_vocab(false).keys().map(bytes).max().unwrap_or(0);
        let names = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        Some(words.max(names).max(1).saturating_mul(shrinks))
    }

    /// Text of `ids` without special tokens. Unknown ids are skipped.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_with(ids, false)
    }

    fn decode_with(&self, ids: &[u32], specials: bool) -> Result<String> {
        self.inner.decode(ids, !specials).map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// The bytes that one token represents by itself, including special tokens, as `logprobs` shows them.
    /// They may be a part of a character; a word keeps the space before it. Empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id);
        if added {
            return token.into_bytes();
        }
        if self.byte_level {
            return token.chars().flat_map(symbol_bytes).collect();
        }
        match is_byte(&token).then(|| u8::from_str_radix(&token[3..5], 16)) {
            Some(Ok(byte)) => vec![byte],
            _ => token.replace('\u{2581}', " ").into_bytes(),
        }
    }

    /// Whether a token represents no text, such as the beginning of a prompt or the end of a turn.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }

    #[cfg(any(test, feature = "testing"))]
    /// [`token_bytes`](Self::token_bytes) as text; parts of characters show as U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    /// The token as the vocabulary spells it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens in the vocabulary, including added ones. A model may have more rows.
    pub fn vocab(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(false).map_err(|e| Error::Tokenizer(e.to_string()))
    }

    /// The token as the vocabulary spells it, if it represents text: it is known and, unless `specials` count
    /// as text, not special.
    fn visible_token(&self, id: u32, specials: bool) -> Option<String> {
        let token = self.inner.id_to_token(id)?;
        let special = self.inner.get_added_vocabulary().is_special_token(&token);
        (specials || !special).then_some(token)
    }

    /// Starts a new stream of text, without special tokens.
    pub fn stream(&self) -> TokenStream {
        let tokenizer = self.clone();
        TokenStream { tokenizer, specials: false, ids: Vec::new(), read: 0, emitted: String::new() }
    }

    /// Starts a new stream of text in which special tokens show as their names.
    pub fn stream_with_specials(&self) -> TokenStream {
        TokenStream { specials: true, ..self.stream() }
    }
}

/// Turns tokens into text one by one. It emits only text that later tokens cannot change: whole characters,
/// each with the space that its position in the sequence gives it. The concatenated increments are the text
/// that [`Tokenizer::decode`] gives for the whole sequence.
#[derive(Clone, Debug)]
pub struct TokenStream {
    tokenizer: Tokenizer,
    /// Whether special tokens show.
    specials: bool,
    /// The tokens of `emitted`, then the held-back tokens. All are decoded together because sentencepiece
    /// decoders drop the space before the first token of their input.
    ids: Vec<u32>,
    /// Number of `ids` that belong to `emitted`.
    read: usize,
    /// Text of `ids[..read]`.
    emitted: String,
}

impl TokenStream {
    /// Adds the next token and returns the text that is now certain: often one token's, sometimes none,
    /// sometimes that of several.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.tokenizer.visible_token(id, self.specials) else { return Ok(String::new()) };
        self.ids.push(id);
        let text = self.tokenizer.decode_with(&self.ids, self.specials)?;
        let held = self.ids.len() - self.read;
        let open = text.ends_with(REPLACEMENT) || is_byte(&token);
        if text.len() <= self.emitted.len() || (open && held < HELD_TOKENS_MAX) {
            return Ok(String::new());
        }
        let Some(new) = text.strip_prefix(self.emitted.as_str()).map(str::to_owned) else {
            return Ok(String::new());
        };
        self.ids.drain(..self.read);
        self.emitted = self.tokenizer.decode_with(&self.ids, self.specials)?;
        self.read = self.ids.len();
        Ok(new)
    }

    /// Ends the stream and returns the text held back so far.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode_with(&self.ids, self.specials)?;
        let same = |((_, a), b): &((usize, char), char)| a == b;
        let common: usize = text
            .char_indices()
            .zip(self.emitted.chars())
            .take_while(same)
            .map(|((_, c), _)| c.len_utf8())
            .sum();
        Ok(text[common..].to_owned())
    }
}

/// The steps before text is divided into tokens, as `tokenizer.json` spells them.
struct PartsOf<'a>(&'a tokenizers::Tokenizer);

impl serde::Serialize for PartsOf<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let byte_fallback = match self.0.get_model() {
            tokenizers::ModelWrapper::BPE(model) => model.byte_fallback,
            tokenizers::ModelWrapper::Unigram(model) => model.byte_fallback(),
            _ => false,
        };
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("normalizer", &self.0.get_normalizer())?;
        map.serialize_entry("pre_tokenizer", &self.0.get_pre_tokenizer())?;
        map.serialize_entry("byte_fallback", &byte_fallback)?;
        map.end()
    }
}

/// Refuses a step that can lengthen text by more than the maximum, and so take unbounded memory.
fn check_growth(step: &str, parts: &serde_json::Value) -> Result<()> {
    let growth = grows_by(parts);
    if growth.factor <= GROWTH_MAX && growth.added_bytes <= ADDED_BYTES_MAX {
        return Ok(());
    }
    Err(Error::Tokenizer(format!(
        "its {step} may make text {} times and {} bytes longer, expected at most {GROWTH_MAX} times and \
         {ADDED_BYTES_MAX} bytes",
        growth.factor, growth.added_bytes
    )))
}

/// Maximum lengthening of text by a step, in bytes.
struct Growth {
    factor: usize,
    added_bytes: usize,
}

fn grows_by(parts: &serde_json::Value) -> Growth {
    let length = |field: &str| parts[field].as_str().map_or(0, str::len);
    let by = |factor: usize| Growth { factor: factor.max(1), added_bytes: 0 };
    match parts["type"].as_str() {
        // U+FDFA of 3 bytes becomes 33 bytes; no other character grows by more.
        Some("NFKC" | "NFKD") => by(11),
        Some("NFC" | "NFD" | "BertNormalizer") => by(3),
        Some("Lowercase" | "ByteLevel") => by(2),
        Some("Prepend") => Growth { factor: 1, added_bytes: length("prepend") },
        // A pattern of a regular expression may match single bytes, and between all of them.
        Some("Replace") => match parts["pattern"]["String"].as_str().map(str::len) {
            Some(from) if from > 0 => by(length("content").div_ceil(from)),
            _ => by(length("content").saturating_add(1)),
        },
        Some("Precompiled") => by(longest_of_charsmap(parts["precompiled_charsmap"].as_str().unwrap_or(""))),
        Some("Sequence") => {
            let steps = parts["normalizers"].as_array().or(parts["decoders"].as_array());
            steps.into_iter().flatten().map(grows_by).fold(by(1), |all, step| Growth {
                factor: all.factor.saturating_mul(step.factor),
                added_bytes: all.added_bytes.saturating_mul(step.factor).saturating_add(step.added_bytes),
            })
        }
        _ => by(1),
    }
}

/// The longest replacement of sentencepiece's table: after the length of its index and the index, texts that
/// end with a zero byte.
fn longest_of_charsmap(charsmap: &str) -> usize {
    use base64::Engine;
    let Ok(table) = base64::engine::general_purpose::STANDARD.decode(charsmap) else { return usize::MAX };
    let Some((length, rest)) = table.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or(rest);
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1)
}

/// The factor by which a normaliser can shorten text at most, in bytes; none if no bound is known.
fn shrinks_by(normalizer: &serde_json::Value) -> Option<usize> {
    match normalizer["type"].as_str() {
        None => Some(1),
        // Three letters of three bytes become one syllable of three bytes; no other sequence shrinks by more.
        Some("NFC" | "NFD") => Some(3),
        Some("Prepend") => Some(1),
        Some("Replace") => {
            let from = normalizer["pattern"]["String"].as_str()?;
            let to = normalizer["content"].as_str()?;
            (from.len() <= to.len()).then_some(1)
        }
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array()?;
            parts.iter().map(shrinks_by).try_fold(1, |all, part| Some(all * part?))
        }
        Some(_) => None,
    }
}

/// Whether a pre-tokenizer is known to drop nothing.
fn keeps_all(pre_tokenizer: &serde_json::Value) -> bool {
    match pre_tokenizer["type"].as_str() {
        None | Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split") => pre_tokenizer["behavior"].as_str().is_some_and(|behavior| behavior != "Removed"),
        Some("Sequence") => {
            pre_tokenizer["pretokenizers"].as_array().is_some_and(|parts| parts.iter().all(keeps_all))
        }
        Some(_) => false,
    }
}

/// Parses a `tokenizer.json`. The library panics on some malformed files (0.23: a decoder of unknown shape, a
/// template that names a missing token), at once or on first use, so it is used once here, where a panic can
/// become an error.
fn parse(bytes: &[u8]) -> std::result::Result<tokenizers::Tokenizer, String> {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).map_err(|e| e.to_string())?;
    let parse_and_try = || {
        let tokenizer = tokenizers::Tokenizer::from_bytes(bytes)?;
        let ids = tokenizer.encode_fast("A trial: 1 ½ 角\n", true)?.get_ids().to_vec();
        tokenizer.decode(&ids, true)?;
        Ok(tokenizer)
    };
    match std::panic::catch_unwind(parse_and_try) {
        Ok(parsed) => parsed.map_err(|e: tokenizers::Error| e.to_string()),
        Err(_) => Err("the tokenizers library cannot read it".into()),
    }
}

/// Whether a token is a byte of sentencepiece's byte fallback, such as `<0x0A>`. Its decoder processes a run
/// of them as a whole: the text of a run may change until the run has ended.
fn is_byte(token: &str) -> bool {
    token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
