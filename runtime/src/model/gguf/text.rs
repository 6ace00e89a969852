//! The tokenizer and the chat template of a GGUF file.

use super::super::chat::ChatTemplate;
use super::super::error::{Error, Result};
use super::super::tokenizer::Tokenizer;
use super::file::GgufFile;
use serde_json::{Map, Value, json};

/// Token types of ggml: control tokens are special, user-defined ones are found in text first.
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";

/// How text is split before pairs are merged, by the name that the file gives: the expression of a tokenizer
/// of this kind, or none where that of GPT-2 is built in; whether text is normalised (NFC); and whether whole
/// words of the vocabulary are taken before merges.
fn splitting(name: &str) -> Option<(Option<&'static str>, bool, bool)> {
    const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    match name {
        "gpt-2" => Some((None, false, false)),
        "llama-bpe" | "llama3" | "llama-v3" => Some((Some(LLAMA3), false, true)),
        "qwen2" => Some((Some(QWEN2), true, false)),
        _ => None,
    }
}

fn token<'a>(gguf: &'a GgufFile, key: &str) -> Result<Option<&'a str>> {
    let tokens = gguf.texts(TOKENS)?.unwrap_or_default();
    let id = gguf.token(key)?;
    match id.map(|id| tokens.get(id as usize)) {
        None => Ok(None),
        Some(Some(token)) => Ok(Some(token)),
        Some(None) => Err(gguf.error(key, format!("there are {} tokens", tokens.len()))),
    }
}

/// The tokenizer of a file: byte-level BPE.
///
/// # Errors
/// The error names the key that is missing or not supported.
pub(in super::super) fn tokenizer(gguf: &GgufFile) -> Result<Tokenizer> {
    let model = gguf.text("tokenizer.ggml.model")?.unwrap_or("(missing)");
    if model != "gpt2" {
        let problem = format!("'{model}' is not supported; supported: gpt2, which is byte-level BPE");
        return Err(gguf.error("tokenizer.ggml.model", problem));
    }
    let name = gguf.text("tokenizer.ggml.pre")?.unwrap_or("(missing)");
    let Some((expression, normalises, ignores_merges)) = splitting(name) else {
        let problem = format!("'{name}' is not supported; supported: gpt-2, llama-bpe, qwen2");
        return Err(gguf.error("tokenizer.ggml.pre", problem));
    };
    let tokens = gguf.texts(TOKENS)?.ok_or_else(|| gguf.error(TOKENS, "missing"))?;
    let merges = gguf.texts(MERGES)?.ok_or_else(|| gguf.error(MERGES, "missing"))?;
    let types = gguf.numbers("tokenizer.ggml.token_type")?.unwrap_or_default();
    let mut vocab = Map::with_capacity(tokens.len());
    let mut added = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        let kind = types.get(id).copied().unwrap_or(1.0);
        if kind == CONTROL || kind == USER_DEFINED {
            added.push(
                json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL}),
            );
        }
        if vocab.insert(token.clone(), id.into()).is_some() {
            return Err(gguf.error(TOKENS, format!("token {id} is there twice")));
        }
    }
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let pre_tokenizer = match expression {
        None => bytes(true),
        Some(expression) => json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
            bytes(false)]}),
    };
    let bos = token(gguf, "tokenizer.ggml.bos_token_id")?;
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(ignores_merges);
    let sequence = json!({"Sequence": {"id": "A", "type_id": 0}});
    let processor = bos.filter(|_| adds_bos).map(|bos| {
        let id = gguf.token("tokenizer.ggml.bos_token_id").ok().flatten();
        let special = json!({"SpecialToken": {"id": bos, "type_id": 0}});
        json!({"type": "TemplateProcessing", "single": [special, sequence],
            "pair": [special, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}}})
    });
    let json = json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalises.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": pre_tokenizer,
        "post_processor": processor,
        "decoder": bytes(true),
        "model": {"type": "BPE", "vocab": Value::Object(vocab), "merges": merges, "ignore_merges": ignores_merges},
    });
    let failed = |e| Error::file(&gguf.file, format!("its tokenizer is damaged: {e}"));
    let inner = tokenizers::Tokenizer::from_bytes(json.to_string()).map_err(failed)?;
    Tokenizer::new(inner)
}

/// The chat template of a file; none if there is none.
///
/// # Errors
/// When it is not valid Jinja, or a special token has no text.
pub(in super::super) fn template(gguf: &GgufFile) -> Result<Option<ChatTemplate>> {
    let special = |key: &str| token(gguf, key).map(|token| token.map(str::to_owned));
    let (bos, eos) = (special("tokenizer.ggml.bos_token_id")?, special("tokenizer.ggml.eos_token_id")?);
    let source = gguf.text("tokenizer.chat_template")?;
    source.map(|source| ChatTemplate::new(source, bos, eos)).transpose()
}
