//! Parsers of the files in a checkpoint directory.

use super::{Scratch, parts, refused};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, FileMapper, HostMemory};
use mixfleet_runtime::model::{ChatMessage, ChatTemplate, Checkpoint, ModelConfig, Tokenizer};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Returns the same bytes for every file.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl FileMapper for Bytes {
    fn map(&self, _: &Path) -> std::io::Result<Arc<dyn HostMemory>> {
        Ok(Arc::new(self.0.clone()))
    }
}

/// The smallest Llama configuration.
const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1,
    "num_attention_heads": 1, "vocab_size": 4, "max_position_embeddings": 16, "tie_word_embeddings": true}"#;

/// Checks that every tensor of an accepted checkpoint has the bytes that its shape requires.
fn check(checkpoint: &Checkpoint) -> bool {
    for (name, dtype, shape) in checkpoint.directory() {
        let elements: u64 = shape.iter().product();
        let bytes = checkpoint.bytes(name).expect("a tensor of its directory");
        assert_eq!(bytes.len() as u64, elements * dtype.size_bytes(), "{name}");
        assert_eq!(checkpoint.values(name).map(|values| values.len() as u64), Some(elements), "{name}");
    }
    true
}

pub(super) fn safetensors(bytes: &[u8]) -> bool {
    let directory = Scratch::with(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", b"")]);
    match Checkpoint::open(directory.path(), &Bytes(bytes.to_vec())) {
        Ok(checkpoint) => check(&checkpoint),
        Err(error) => refused(&error),
    }
}

/// Opens a GGUF file, and reads the tokenizer and the template in it.
pub(super) fn gguf(bytes: &[u8]) -> bool {
    let directory = Scratch::with(&[("model.gguf", bytes)]);
    let file = directory.path().join("model.gguf");
    if let Ok(tokenizer) = Tokenizer::open(&file) {
        let _ = tokenizer.encode("ab!<s> a");
    }
    let _ = ChatTemplate::open(&file).is_ok();
    match Checkpoint::open(&file, &Bytes(bytes.to_vec())) {
        Ok(checkpoint) => {
            let config = &checkpoint.config;
            let embedding = checkpoint.values("model.embed_tokens.weight").map(|values| values.len() as u64);
            assert_eq!(embedding, Some(u64::from(config.vocab) * u64::from(config.hidden)));
            check(&checkpoint)
        }
        Err(error) => refused(&error),
    }
}

/// Parses the index of shards, with a shard that has all tensors.
pub(super) fn safetensors_index(bytes: &[u8]) -> bool {
    let whole = include_bytes!("../../corpus/safetensors/whole");
    let directory =
        Scratch::with(&[("config.json", CONFIG.as_bytes()), ("model.safetensors.index.json", bytes)]);
    match Checkpoint::open(directory.path(), &Bytes(whole.to_vec())) {
        Ok(checkpoint) => check(&checkpoint),
        Err(error) => refused(&error),
    }
}

pub(super) fn config_json(bytes: &[u8]) -> bool {
    let Ok(object) = serde_json::from_slice::<Map<String, Value>>(bytes) else { return false };
    let config = match ModelConfig::parse(Path::new("config.json"), &object) {
        Ok(config) => config,
        Err(error) => return refused(&error),
    };
    assert!(config.layers > 0 && config.vocab > 0 && config.context_max > 0 && config.hidden > 0);
    assert!(config.kv_heads > 0 && config.heads % config.kv_heads == 0 && config.head_dim % 2 == 0);
    assert_eq!(config.windows.len(), config.layers as usize);
    assert!(config.heads.checked_mul(config.head_dim).is_some());
    assert!(config.norm_eps > 0.0 && config.norm_eps <= 1.0);
    let rope = &config.rope;
    assert_eq!(rope.inv_freq.len(), config.head_dim as usize / 2);
    assert!(
        rope.scale.is_finite()
            && rope.inv_freq.iter().all(|frequency| frequency.is_finite() && *frequency > 0.0)
    );
    let table = rope.table(&[0, config.context_max - 1]);
    assert!(table.iter().all(|value| value.is_finite()), "{rope:?}");
    assert!(config.kv_bytes_per_token(DType::F32) > 0);
    let shape = config.cost_shape(DType::F32, DType::Bf16, 16);
    shape.windows.len() == config.windows.len()
}

const TEXTS: [&str; 5] = [
    "",
    "Hello, world",
    " \u{1F600}\u{301}<e>\0",
    "\u{2581}a\u{AC00}\u{AC01}ﬁ<s></s>",
    "%%%% 12345 \n\n\t x",
];

/// Checks that an accepted tokenizer never panics in use.
pub(super) fn tokenizer_json(bytes: &[u8]) -> bool {
    let directory = Scratch::with(&[("tokenizer.json", bytes)]);
    let tokenizer = match Tokenizer::open(directory.path()) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return refused(&error),
    };
    for text in TEXTS {
        let mut streamed = tokenizer.stream();
        for id in tokenizer.encode(text).unwrap_or_default() {
            if streamed.push(id).is_err() {
                return true;
            }
            let _ = tokenizer.token_text(id);
        }
        let _ = streamed.finish();
        let _ = (
            tokenizer.encode_chat(text),
            tokenizer.encode_marked(&format!("a\u{FDD0}{text}"), '\u{FDD0}', true),
        );
        let places = tokenizer.special_places(text);
        assert!(places.iter().all(|place| text.is_char_boundary(*place)), "{places:?}");
    }
    let last = to_u32(tokenizer.vocab());
    let _ = tokenizer.decode(&[0, 1, last.saturating_sub(1), last, u32::MAX]);
    if let Some(longest) = tokenizer.token_bytes_max() {
        let long = "ab \u{E9}\u{AC00}".repeat(20);
        if let Ok(ids) = tokenizer.encode_chat(&long) {
            assert!(ids.len() * longest >= long.len(), "{} tokens of at most {longest} bytes", ids.len());
        }
    }
    true
}

/// Renders three chats.
fn render(template: &ChatTemplate, messages: &[ChatMessage], arguments: &Map<String, Value>) -> bool {
    let turns = [ChatMessage::new("system", "s"), ChatMessage::new("user", "<e>\u{1F600}{{ x }}")];
    for messages in [messages, &turns[1..], &turns] {
        match template.render(messages, true, arguments, 1_700_000_000) {
            Ok(text) => assert!(text.len() <= 32 << 20),
            Err(error) => drop(refused(&error)),
        }
    }
    true
}

/// Parses a template, then messages, then variables.
pub(super) fn chat_template(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let [source, messages, arguments] = parts(&text);
    let messages: Vec<ChatMessage> = serde_json::from_str(messages).unwrap_or_default();
    let again = serde_json::to_value(&messages).expect("a message is JSON");
    assert_eq!(serde_json::from_value::<Vec<ChatMessage>>(again).ok().as_ref(), Some(&messages));
    let arguments = serde_json::from_str(arguments).unwrap_or_default();
    match ChatTemplate::new(source, Some("<s>".into()), None) {
        Ok(template) => render(&template, &messages, &arguments),
        Err(error) => refused(&error),
    }
}

/// Parses the template in a tokenizer's configuration, and its special tokens.
pub(super) fn tokenizer_config(bytes: &[u8]) -> bool {
    let directory = Scratch::with(&[("tokenizer_config.json", bytes)]);
    match ChatTemplate::open(directory.path()) {
        Ok(Some(template)) => render(&template, &[], &Map::new()),
        Ok(None) => true,
        Err(error) => refused(&error),
    }
}
