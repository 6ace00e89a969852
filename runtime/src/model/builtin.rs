//! The built-in model, used when there is no checkpoint at hand: a small Llama with random weights and one
//! token per byte. It demonstrates that everything runs; its text means nothing.

use super::byte_level::byte_symbol;
use super::chat::ChatTemplate;
use super::error::{Error, Result};
use super::load::Checkpoint;
use super::names;
use super::random::RandomCheckpoint;
use super::tokenizer::Tokenizer;
use mixfleet_hal::DType;
use serde_json::{Map, Value, json};

/// The model's name in the API.
pub const NAME: &str = "mixfleet-random";

/// Special tokens, whose ids are their indices; byte b has the id `SPECIALS.len() + b`.
const SPECIALS: [&str; 5] = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"];
pub(super) const BOS: u32 = 0;
pub(super) const EOS: u32 = 1;
#[expect(clippy::cast_possible_truncation, reason = "a constant, 261")]
pub(super) const VOCAB: u32 = SPECIALS.len() as u32 + 256;

/// The chat template: role marker, content, end marker.
const TEMPLATE: &str = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\
    {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// The weights: 5 million parameters in bf16, context 4096.
///
/// # Errors
/// None in practice: the configuration is a constant that the tests load.
pub fn checkpoint() -> Result<Checkpoint> {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCAB,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "bos_token_id": BOS, "eos_token_id": EOS, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    });
    let config = config.as_object().cloned().unwrap_or_default();
    let random = RandomCheckpoint { config, dtype: DType::Bf16, seed: 1 };
    let mut tensors = random.tensors()?;
    if let Some(head) = tensors.iter_mut().find(|tensor| tensor.name == names::LM_HEAD) {
        favour_readable_text(&mut head.bytes);
    }
    Checkpoint::from_parts(random.model_config()?, tensors)
}

/// Zeroes the rows of the LM head of all tokens but printable ASCII. Their logits are 0 then, and a printable
/// token nearly always has a larger one, so that the text stays readable.
fn favour_readable_text(head: &mut [u8]) {
    let row_bytes = head.len() / VOCAB as usize;
    for (id, row) in head.chunks_mut(row_bytes).enumerate() {
        let byte = id.checked_sub(SPECIALS.len()).and_then(|byte| u8::try_from(byte).ok());
        if !byte.is_some_and(|byte| byte == b' ' || byte.is_ascii_graphic()) {
            row.fill(0);
        }
    }
}

/// The tokenizer: one token per byte of UTF-8, and a bos in front of plain prompts.
///
/// # Errors
/// None in practice: it is a constant that the tests load.
pub fn tokenizer() -> Result<Tokenizer> {
    tokenizer_of(VOCAB)
}

/// The tokenizer for random weights of a larger vocabulary. It encodes as [`tokenizer`] does; each further id
/// up to `vocab` decodes to a word of its own, so that every token that such a model samples is text.
///
/// # Errors
/// None in practice: the tests load vocabularies of published sizes.
pub fn tokenizer_of(vocab: u32) -> Result<Tokenizer> {
    let special = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    let mut ids: Map<String, Value> =
        SPECIALS.iter().enumerate().map(|(id, text)| (text.to_string(), json!(id))).collect();
    ids.extend(
        (0..=255).map(|byte: u8| (byte_symbol(byte).to_string(), json!(SPECIALS.len() + usize::from(byte)))),
    );
    let space = byte_symbol(b' ');
    ids.extend((VOCAB..vocab).map(|id| (format!("{space}w{id}"), json!(id))));
    let json = json!({
        "version": "1.0",
        "added_tokens": SPECIALS.iter().enumerate().map(special).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": SPECIALS[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIALS[0]: {"id": SPECIALS[0], "ids": [BOS], "tokens": [SPECIALS[0]]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    });
    let inner = tokenizers::Tokenizer::from_bytes(json.to_string());
    Tokenizer::new(inner.map_err(|e| Error::Tokenizer(e.to_string()))?)
}

/// The content of the tokenizer's `tokenizer_config.json`.
pub(super) fn tokenizer_config() -> Value {
    json!({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1], "chat_template": TEMPLATE})
}

/// The chat template.
///
/// # Errors
/// None in practice: it is a constant that the tests render.
pub fn chat_template() -> Result<ChatTemplate> {
    let special = |token: &str| Some(token.to_owned());
    ChatTemplate::new(TEMPLATE, special(SPECIALS[0]), special(SPECIALS[1]))
}

#[cfg(test)]
mod tests {
    use super::super::Oracle;
    use super::*;

    #[test]
    fn it_loads_and_speaks_readable_nonsense() {
        let checkpoint = checkpoint().expect("a checkpoint");
        assert_eq!((checkpoint.config.context_max, checkpoint.config.vocab), (4096, VOCAB));
        let parameters = checkpoint.size_bytes() / 2;
        assert!((3_000_000..8_000_000).contains(&parameters), "{parameters}");
        let tokenizer = tokenizer().expect("a tokenizer");
        assert_eq!(tokenizer.vocab(), VOCAB as usize);
        let mut ids = tokenizer.encode("Hello").expect("encodes");
        assert_eq!(ids, [BOS].into_iter().chain(b"Hello".map(|b| u32::from(b) + 5)).collect::<Vec<_>>());
        let oracle = Oracle::new(&checkpoint);
        for _ in 0..8 {
            let logits = oracle.last_logits(&ids);
            let best = (0..VOCAB).max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]));
            ids.push(best.expect("a token"));
        }
        let text = tokenizer.decode(&ids).expect("decodes");
        assert!(
            text.starts_with("Hello") && text.len() == 13 && text.bytes().all(|b| (32..127).contains(&b)),
            "{text}"
        );
        assert!(ids[6..].iter().any(|id| *id != ids[6]), "{text}: always the same");
    }

    #[test]
    fn ids_of_a_larger_vocabulary_decode_to_words_and_prompts_are_still_bytes() {
        let (small, large) = (tokenizer().expect("a tokenizer"), tokenizer_of(128_256).expect("a tokenizer"));
        assert_eq!(large.vocab(), 128_256);
        for text in ["Hello", " w261 w128255", "Grüße\n"] {
            assert_eq!(large.encode(text).expect("encodes"), small.encode(text).expect("encodes"));
        }
        assert_eq!(large.decode(&[77, 261, 128_255]).expect("decodes"), "H w261 w128255");
        let words = |id: u32| large.decode(&[id]).expect("decodes");
        assert!((VOCAB..128_256).all(|id| words(id) == format!(" w{id}")), "each id has a word of its own");
    }

    #[test]
    fn its_chat_marks_the_roles() {
        let template = chat_template().expect("a template");
        let messages = [super::super::ChatMessage::new("user", "Hi")];
        let rendered = template.render(&messages, true, &Map::new(), 0).expect("renders");
        assert_eq!(rendered, "<|user|>Hi<|end|><|assistant|>");
        let ids = tokenizer().expect("a tokenizer").encode_chat(&rendered).expect("encodes");
        assert_eq!(ids, [2, 5 + 72, 5 + 105, 1, 3]);
    }
}
