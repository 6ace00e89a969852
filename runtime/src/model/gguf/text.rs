//! The tokenizer and the chat template of a GGUF file, read as llama.cpp reads them.

use super::super::chat::ChatTemplate;
use super::super::error::{Error, Result};
use super::super::tokenizer::Tokenizer;
use super::file::GgufFile;
use super::pre::{self, PreTokenizer};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::HashMap;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Token types of ggml: control tokens are special, user-defined ones are found in text first.
const UNKNOWN: f64 = 2.0;
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;
const UNUSED: f64 = 5.0;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const SUPPORTED: &str = "supported: gpt2 (byte-level BPE), llama (SentencePiece), gemma4";
/// Prefix of words in vocabularies that do not spell bytes.
const SPACE: &str = "\u{2581}";

/// Keys of tokens that end an answer.
const END_KEYS: [&str; 6] = [
    EOS,
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];
/// GgufTokens that end an answer by their names.
const END_NAMES: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
    "[e~[",
];
/// Names that count where the file names no token for the key: padding, beginning of a repository, and
/// separation of files in fill-in-the-middle prompts.
const FILL_NAMES: [(&str, &[&str]); 3] = [
    ("tokenizer.ggml.fim_pad_token_id", &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    (
        "tokenizer.ggml.fim_rep_token_id",
        &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    ),
    ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>"]),
];
/// GgufTokens of harmony that are matched in text and shown.
const SHOWN_NAMES: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The kind of a file's vocabulary.
enum GgufVocabularyKind {
    Bpe(PreTokenizer),
    /// Pairs are merged by the score of the result.
    SentencePiece,
}

/// The tokens of a file, with their types.
struct GgufTokens<'a> {
    names: Cow<'a, [String]>,
    ids: HashMap<String, u32>,
    types: Vec<f64>,
    /// Tokens that end an answer.
    ends: Vec<u32>,
}

fn model(gguf: &GgufFile) -> Result<GgufVocabularyKind> {
    match gguf.text(MODEL)?.unwrap_or("(missing)") {
        "gpt2" => {
            let name = gguf.text(PRE)?.filter(|name| !name.is_empty()).unwrap_or("default");
            pre::named(name).map(GgufVocabularyKind::Bpe).ok_or_else(|| {
                let names = pre::names().collect::<Vec<_>>().join(", ");
                gguf.error(PRE, format!("'{name}' is not supported; supported: {names}"))
            })
        }
        "gemma4" => {
            pre::named("gemma4").map(GgufVocabularyKind::Bpe).ok_or_else(|| gguf.error(PRE, "not supported"))
        }
        "llama" => Ok(GgufVocabularyKind::SentencePiece),
        "bert" | "t5" => {
            let problem = format!("this is the vocabulary of an encoder, which is not served; {SUPPORTED}");
            Err(gguf.error(MODEL, problem))
        }
        other => Err(gguf.error(MODEL, format!("'{other}' is not supported; {SUPPORTED}"))),
    }
}

/// The texts of tokens. Empty ones get llama.cpp's placeholder, since a file may have several.
fn with_empty_named(names: &[String]) -> Cow<'_, [String]> {
    if names.iter().all(|name| !name.is_empty()) {
        return Cow::Borrowed(names);
    }
    let named = |(id, name): (usize, &String)| match name.is_empty() {
        true => format!("[EMPTY_{id}]"),
        false => name.clone(),
    };
    Cow::Owned(names.iter().enumerate().map(named).collect())
}

impl<'a> GgufTokens<'a> {
    fn read(gguf: &'a GgufFile) -> Result<Self> {
        let names = gguf.texts(TOKENS)?.ok_or_else(|| gguf.error(TOKENS, "missing"))?;
        let names = with_empty_named(names);
        let mut ids = HashMap::with_capacity(names.len());
        for (id, name) in (0..).zip(&*names) {
            if let Some(first) = ids.insert(name.clone(), id) {
                return Err(gguf.error(TOKENS, format!("tokens {first} and {id} are both {name:?}")));
            }
        }
        let mut types = gguf.numbers(TYPES)?.unwrap_or_default().to_vec();
        types.resize(names.len(), 1.0);
        let mut tokens = GgufTokens { names, ids, types, ends: Vec::new() };
        let ends = tokens.find_ends(gguf)?;
        let has = |tokens: &Self, name: &str| tokens.ids.get(name).is_some_and(|id| ends.contains(id));
        let harmony = has(&tokens, "<|call|>") && has(&tokens, "<|return|>");
        let solar = (has(&tokens, "<|call|>") || has(&tokens, "<|calls|>")) && has(&tokens, "<|flush|>");
        let is_part = |tokens: &Self, id: &u32| match tokens.names[*id as usize].as_str() {
            // the end of a message, after which the answer continues
            "<|end|>" => harmony || solar,
            // plain text in these vocabularies
            "</s>" => has(tokens, "<|tool_response>"),
            _ => false,
        };
        let (parts, ends): (Vec<u32>, Vec<u32>) = ends.iter().partition(|id| is_part(&tokens, id));
        for end in &ends {
            tokens.types[*end as usize] = CONTROL;
        }
        for id in parts {
            let is_end = tokens.names[id as usize] == "<|end|>";
            tokens.types[id as usize] = if is_end { USER_DEFINED } else { 1.0 };
        }
        for name in SHOWN_NAMES {
            if let Some(id) = tokens.ids.get(name) {
                tokens.types[*id as usize] = USER_DEFINED;
            }
        }
        tokens.ends = ends;
        Ok(tokens)
    }

    /// The tokens that end an answer: those of the keys, and those with known names.
    fn find_ends(&self, gguf: &GgufFile) -> Result<Vec<u32>> {
        let mut ends = Vec::new();
        for key in END_KEYS {
            let known = gguf.token(key)?.filter(|id| (*id as usize) < self.names.len());
            ends.extend(known);
            let by_name = FILL_NAMES.iter().filter(|(of, _)| *of == key && known.is_none());
            ends.extend(by_name.flat_map(|(_, names)| *names).find_map(|name| self.ids.get(*name).copied()));
        }
        if matches!(model(gguf), Ok(GgufVocabularyKind::SentencePiece)) && gguf.token(EOS)?.is_none() {
            ends.extend((self.names.len() > 2).then_some(2));
        }
        ends.extend(END_NAMES.iter().filter_map(|name| self.ids.get(*name).copied()));
        ends.sort_unstable();
        ends.dedup();
        Ok(ends)
    }

    /// Whether a token is matched in text before division.
    fn is_added(&self, id: usize) -> bool {
        [UNKNOWN, CONTROL, USER_DEFINED].contains(&self.types[id])
    }
}

/// The ids that end an answer; those of the keys alone for a file without a vocabulary.
///
/// # Errors
/// The error names the key that is wrong.
pub(super) fn ends(gguf: &GgufFile) -> Result<Vec<u32>> {
    if gguf.texts(TOKENS)?.is_some() {
        return GgufTokens::read(gguf).map(|tokens| tokens.ends);
    }
    let ids = END_KEYS.iter().map(|key| gguf.token(key)).collect::<Result<Vec<_>>>()?;
    let mut ids: Vec<u32> = ids.into_iter().flatten().collect();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
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

/// The tokenizer of a file.
///
/// # Errors
/// The error names the key that is missing or not supported.
pub(in super::super) fn tokenizer(gguf: &GgufFile) -> Result<Tokenizer> {
    let model = model(gguf)?;
    let tokens = GgufTokens::read(gguf)?;
    let merges = match &model {
        GgufVocabularyKind::Bpe(_) => listed_merges(gguf, &tokens)?,
        GgufVocabularyKind::SentencePiece => scored_merges(gguf, &tokens)?,
    };
    let failed = |e: tokenizers::Error| Error::file(&gguf.file, format!("its tokenizer is damaged: {e}"));
    let mut inner = tokenizers::Tokenizer::new(bpe(&model, &tokens, merges).map_err(failed)?);
    steps(gguf, &model, &mut inner)?;
    let (adds_bos, adds_eos) = match &model {
        GgufVocabularyKind::Bpe(rules) => (rules.adds_bos, false),
        GgufVocabularyKind::SentencePiece => (true, false),
    };
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
    let adds_eos = gguf.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(adds_eos);
    let ends = [(adds_bos, BOS, 1), (adds_eos, EOS, 2)];
    let ends = ends.map(|(adds, key, usual)| match adds {
        true => end_of_prompt(gguf, key, usual, matches!(model, GgufVocabularyKind::SentencePiece)),
        false => Ok(None),
    });
    let [bos, eos] = ends;
    inner.with_post_processor(processor(bos?, eos?));
    let added = (0..tokens.names.len()).filter(|id| tokens.is_added(*id)).map(|id| {
        let special = tokens.types[id] != USER_DEFINED;
        AddedToken::from(tokens.names[id].clone(), special).normalized(false)
    });
    let added: Vec<AddedToken> = added.filter(|token| !token.content.is_empty()).collect();
    inner.add_tokens(added).map_err(failed)?;
    Tokenizer::new(inner)
}

/// A token that begins or ends prompts: its id and text.
fn end_of_prompt<'a>(
    gguf: &'a GgufFile,
    key: &str,
    usual: u32,
    has_usual: bool,
) -> Result<Option<(u32, &'a str)>> {
    let id = gguf.token(key)?.or(has_usual.then_some(usual));
    let Some(id) = id else { return Ok(None) };
    let tokens = gguf.texts(TOKENS)?.unwrap_or_default();
    match tokens.get(id as usize) {
        Some(token) => Ok(Some((id, token))),
        None => Err(gguf.error(key, format!("there are {} tokens", tokens.len()))),
    }
}

/// The rule that adds bos before a prompt, and eos after it.
fn processor(bos: Option<(u32, &str)>, eos: Option<(u32, &str)>) -> Option<PostProcessorWrapper> {
    let special = |(_, name): &(u32, &str)| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |id: &str, kind: u32| json!({"Sequence": {"id": id, "type_id": kind}});
    let around = |inner: &[Value]| {
        let before = bos.iter().map(special);
        before.chain(inner.iter().cloned()).chain(eos.iter().map(special)).collect::<Vec<_>>()
    };
    let known = bos
        .iter()
        .chain(&eos)
        .map(|(id, name)| ((*name).to_owned(), json!({"id": name, "ids": [id], "tokens": [name]})));
    let known: serde_json::Map<String, Value> = known.collect();
    if known.is_empty() {
        return None;
    }
    let json = json!({"type": "TemplateProcessing", "single": around(&[text("A", 0)]),
        "pair": around(&[text("A", 0), text("B", 1)]), "special_tokens": known});
    serde_json::from_value(json).ok()
}

/// The steps that text passes before pairs are merged, and the steps that decode tokens.
fn steps(gguf: &GgufFile, model: &GgufVocabularyKind, inner: &mut tokenizers::Tokenizer) -> Result<()> {
    let damaged = |e: serde_json::Error| Error::file(&gguf.file, format!("its tokenizer is damaged: {e}"));
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let split = |expression: &&str| json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
    let words = |text: Vec<Value>| {
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        decoders.extend(text);
        json!({"type": "Sequence", "decoders": decoders})
    };
    let (normalizer, pre, decoder) = match model {
        GgufVocabularyKind::Bpe(rules) => {
            let mut splits: Vec<Value> = rules.expressions.iter().map(split).collect();
            splits.extend(rules.byte_level.then(|| bytes.clone()));
            let pre = Some(json!({"type": "Sequence", "pretokenizers": splits}));
            match rules.byte_level {
                true => (None, pre, bytes),
                false => (Some(spaces), pre, words(Vec::new())),
            }
        }
        GgufVocabularyKind::SentencePiece => {
            match gguf.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
                true => {
                    let prefix = json!({"type": "Prepend", "prepend": SPACE});
                    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
                    let normalizers = json!({"type": "Sequence", "normalizers": [prefix, spaces]});
                    (Some(normalizers), None, words(vec![strip]))
                }
                false => (Some(spaces), None, words(Vec::new())),
            }
        }
    };
    let normalizer: Option<NormalizerWrapper> =
        normalizer.map(serde_json::from_value).transpose().map_err(damaged)?;
    let pre: Option<PreTokenizerWrapper> = pre.map(serde_json::from_value).transpose().map_err(damaged)?;
    let decoder: DecoderWrapper = serde_json::from_value(decoder).map_err(damaged)?;
    inner.with_normalizer(normalizer).map_err(|e| Error::Tokenizer(e.to_string()))?;
    inner.with_pre_tokenizer(pre);
    inner.with_decoder(Some(decoder));
    Ok(())
}

fn bpe(
    model: &GgufVocabularyKind,
    tokens: &GgufTokens,
    merges: Vec<(String, String)>,
) -> tokenizers::Result<BPE> {
    let vocab: Vocab = tokens.ids.iter().map(|(name, id)| ((*name).to_owned(), *id)).collect();
    let builder = BPE::builder().vocab_and_merges(vocab, merges);
    match model {
        GgufVocabularyKind::Bpe(rules) => {
            builder.ignore_merges(rules.ignores_merges).byte_fallback(!rules.byte_level).build()
        }
        GgufVocabularyKind::SentencePiece => {
            let unknown = tokens.types.iter().position(|kind| *kind == UNKNOWN);
            let builder = builder.byte_fallback(true).fuse_unk(true);
            match unknown {
                Some(id) => builder.unk_token(tokens.names[id].clone()).build(),
                None => builder.build(),
            }
        }
    }
}

/// The merges that a file lists: two tokens separated by a space; the first one may begin with a space.
/// Merges of or into unknown tokens have no effect.
fn listed_merges(gguf: &GgufFile, tokens: &GgufTokens) -> Result<Vec<(String, String)>> {
    let merges = gguf.texts(MERGES)?.ok_or_else(|| gguf.error(MERGES, "missing"))?;
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges {
        let after = merge.chars().next().map_or(0, char::len_utf8);
        let Some(at) = merge[after..].find(' ').map(|at| at + after) else {
            return Err(gguf.error(MERGES, format!("{merge:?}, expected two tokens with a space between")));
        };
        let (left, right) = (&merge[..at], &merge[at + 1..]);
        let is_token = |token: &str| tokens.ids.contains_key(token);
        if is_token(left) && is_token(right) && is_token(&format!("{left}{right}")) {
            pairs.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(pairs)
}

/// The merges of SentencePiece: two neighbours whose joined text is a token, highest score first.
fn scored_merges(gguf: &GgufFile, tokens: &GgufTokens) -> Result<Vec<(String, String)>> {
    let scores = gguf.numbers(SCORES)?.ok_or_else(|| gguf.error(SCORES, "missing"))?;
    if scores.len() < tokens.names.len() {
        let (scores, names) = (scores.len(), tokens.names.len());
        return Err(gguf.error(SCORES, format!("{scores} scores of {names} tokens")));
    }
    let mut order: Vec<usize> = (0..tokens.names.len()).collect();
    // control tokens never result from merges, and unused tokens are not words
    order.retain(|id| ![CONTROL, UNKNOWN, UNUSED].contains(&tokens.types[*id]));
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    let mut pairs = Vec::new();
    for id in order {
        let name = tokens.names[id].as_str();
        for (at, _) in name.char_indices().skip(1) {
            let (left, right) = name.split_at(at);
            if tokens.ids.contains_key(left) && tokens.ids.contains_key(right) {
                pairs.push((left.to_owned(), right.to_owned()));
            }
        }
    }
    Ok(pairs)
}

/// The chat template of a file; none if there is none.
///
/// # Errors
/// When it is not valid Jinja, or a special token has no text.
pub(in super::super) fn template(gguf: &GgufFile) -> Result<Option<ChatTemplate>> {
    let special = |key: &str| token(gguf, key).map(|token| token.map(str::to_owned));
    let (bos, eos) = (special(BOS)?, special(EOS)?);
    let source = gguf.text("tokenizer.chat_template")?;
    source.map(|source| ChatTemplate::new(source, bos, eos)).transpose()
}
