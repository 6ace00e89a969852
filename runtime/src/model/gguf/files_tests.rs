//! Small GGUF files, written here: parsed content, and refused content.

use super::super::testing::{ReadFiles, scratch};
use super::super::{Checkpoint, ModelConfig, Result, Tokenizer};
use std::path::{Path, PathBuf};

const HIDDEN: u64 = 32;
const VOCAB: usize = 16;

/// A file that is being written: keys and tensors in F32.
#[derive(Clone, Default)]
pub(super) struct Small {
    keys: Vec<(String, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Small {
    fn key(mut self, name: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.retain(|(known, _)| known != name);
        self.keys.push((name.to_owned(), [&kind.to_le_bytes()[..], value].concat()));
        self
    }

    pub(super) fn number(self, name: &str, value: u32) -> Self {
        self.key(name, 4, &value.to_le_bytes())
    }

    fn short(self, name: &str, value: u16) -> Self {
        self.key(name, 2, &value.to_le_bytes())
    }

    pub(super) fn float(self, name: &str, value: f32) -> Self {
        self.key(name, 6, &value.to_le_bytes())
    }

    pub(super) fn flag(self, name: &str, value: bool) -> Self {
        self.key(name, 7, &[u8::from(value)])
    }

    /// The file with another architecture, whose name prefixes the keys.
    pub(super) fn of_architecture(mut self, name: &str) -> Self {
        for (key, _) in &mut self.keys {
            if let Some(rest) = key.strip_prefix("llama.") {
                *key = format!("{name}.{rest}");
            }
        }
        self.text("general.architecture", name)
    }

    pub(super) fn without(mut self, tensor: &str) -> Self {
        self.tensors.retain(|(known, ..)| known != tensor);
        self
    }

    fn text(self, name: &str, value: &str) -> Self {
        self.key(name, 8, &text(value))
    }

    fn list(self, name: &str, kind: u32, values: &[Vec<u8>]) -> Self {
        let head = [&kind.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
        self.key(name, 9, &[head, values.concat()].concat())
    }

    pub(super) fn tensor(mut self, name: &str, lengths: &[u64], value: f32) -> Self {
        self.tensors.retain(|(known, ..)| known != name);
        let count = lengths.iter().product::<u64>() as usize;
        let numbers = (0..count).flat_map(|at| (value + at as f32 / 1024.0).to_le_bytes());
        self.tensors.push((name.to_owned(), lengths.to_vec(), 0, numbers.collect()));
        self
    }

    /// A llama of one layer with 16 tokens, the last ones `named`.
    pub(super) fn llama(named: &[&str]) -> Self {
        let mut tokens: Vec<String> = ('a'..='p').map(String::from).collect();
        for (token, name) in tokens.iter_mut().rev().zip(named) {
            (*name).clone_into(token);
        }
        let tokens: Vec<Vec<u8>> = tokens.iter().map(|token| text(token)).collect();
        let [h, v] = [HIDDEN, VOCAB as u64];
        let mut file = Small::default()
            .text("general.architecture", "llama")
            .number("llama.context_length", 64)
            .number("llama.embedding_length", 32)
            .number("llama.block_count", 1)
            .number("llama.feed_forward_length", 32)
            .number("llama.attention.head_count", 2)
            .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .number("tokenizer.ggml.eos_token_id", 0)
            .list("tokenizer.ggml.tokens", 8, &tokens)
            .list("tokenizer.ggml.merges", 8, &[]);
        for (name, lengths) in [("token_embd", vec![h, v]), ("output_norm", vec![h])] {
            file = file.tensor(&format!("{name}.weight"), &lengths, 0.5);
        }
        for norm in ["attn_norm", "ffn_norm"] {
            file = file.tensor(&format!("blk.0.{norm}.weight"), &[h], 1.0);
        }
        for matrix in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
            file = file.tensor(&format!("blk.0.{matrix}.weight"), &[h, h], 0.25);
        }
        file
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (name, value) in &self.keys {
            out.extend(text(name));
            out.extend(value);
        }
        let mut offset = 0u64;
        for (name, lengths, kind, bytes) in &self.tensors {
            out.extend(text(name));
            out.extend((lengths.len() as u32).to_le_bytes());
            lengths.iter().for_each(|length| out.extend(length.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += bytes.len().next_multiple_of(32) as u64;
        }
        out.resize(out.len().next_multiple_of(32), 0);
        for (.., bytes) in &self.tensors {
            out.extend(bytes);
            out.resize(out.len().next_multiple_of(32), 0);
        }
        out
    }

    fn write(&self, file: &Path) {
        std::fs::write(file, self.bytes()).unwrap();
    }

    /// Writes the file and opens it.
    pub(super) fn open(&self, name: &str) -> Result<Checkpoint> {
        let directory = scratch(name);
        let file = directory.join("small.gguf");
        self.write(&file);
        Checkpoint::open(&file, &ReadFiles)
    }

    fn ends(&self, name: &str) -> Vec<u32> {
        self.open(name).unwrap().config.eos_ids
    }
}

#[test]
fn an_answer_ends_at_the_tokens_of_keys_and_of_names() {
    let plain = Small::llama(&[]);
    assert_eq!(plain.ends("ends-plain"), [0]);
    let keys = plain
        .number("tokenizer.ggml.eot_token_id", 4)
        .number("tokenizer.ggml.eom_token_id", 5)
        .number("tokenizer.ggml.fim_pad_token_id", 6);
    assert_eq!(keys.ends("ends-keys"), [0, 4, 5, 6]);
    for name in
        ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "[EOT]"]
    {
        assert_eq!(Small::llama(&[name]).ends("ends-name"), [0, 15], "{name}");
    }
    let harmony = Small::llama(&["<|end|>", "<|return|>", "<|call|>", "<|file_sep|>"]);
    assert_eq!(harmony.ends("ends-harmony"), [0, 12, 13, 14], "behind <|end|> the answer goes on");
    let gemma = Small::llama(&["</s>", "<|tool_response>"]);
    assert_eq!(gemma.ends("ends-gemma"), [0, 14], "</s> is plain text there");
}

#[test]
fn tokens_that_end_an_answer_are_special_whatever_the_file_calls_them() {
    let directory = scratch("special-ends");
    let file = directory.join("small.gguf");
    Small::llama(&["<|im_end|>"]).write(&file);
    let tokenizer = Tokenizer::open(&file).unwrap();
    assert!(tokenizer.is_special(15) && !tokenizer.is_special(3));
    assert_eq!(tokenizer.encode("a<|im_end|>b").unwrap(), [0, 15, 1]);
}

#[test]
fn a_tensor_that_nothing_reads_is_an_error_that_names_it() {
    for name in ["blk.0.attn_sub_norm.weight", "blk.0.post_attention_norm.weight", "blk.1.attn_norm.weight"] {
        let error = Small::llama(&[]).tensor(name, &[HIDDEN], 3.0).open("unread").unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("nothing here reads it"), "{error}");
    }
    let derived = Small::llama(&[]).tensor("blk.0.attn_rot_embd.weight", &[8], 1.0);
    assert!(derived.open("derived").is_ok());
}

#[test]
fn biases_of_a_llama_are_read_in_the_order_of_its_heads() {
    let file = Small::llama(&[]).tensor("blk.0.attn_q.bias", &[HIDDEN], 1.0);
    let checkpoint = file.tensor("blk.0.ffn_down.bias", &[HIDDEN], 2.0).open("biases").unwrap();
    let config = &checkpoint.config;
    assert_eq!((config.qkv_bias, config.o_bias, config.mlp_bias), (true, false, true));
    let bias = |module: &str| checkpoint.values(&format!("model.layers.0.{module}.bias")).unwrap();
    // pairs of a head of 16 become its halves
    let paired = |at: usize| 1.0 + (at / 16 * 16 + at % 8 * 2 + at % 16 / 8) as f64 / 1024.0;
    assert_eq!(bias("self_attn.q_proj"), Vec::from_iter((0..32).map(paired)));
    assert_eq!(bias("self_attn.k_proj"), [0.0; 32], "it has none");
    assert_eq!(bias("mlp.down_proj")[1], 2.0 + 1.0 / 1024.0);
    assert_eq!(bias("mlp.gate_proj"), [0.0; 32]);
}

#[test]
fn keys_that_change_answers_are_refused_and_neutral_ones_are_not() {
    for (name, value) in [("logit_scale", 8.0), ("residual_scale", 0.22), ("final_logit_softcapping", 30.0)] {
        let file = Small::llama(&[]).float(&format!("llama.{name}"), value);
        let error = file.open("keys").unwrap_err().to_string();
        assert!(error.contains(&format!("llama.{name}")), "{error}");
        // a cap of one is a cap
        let is_neutral = Small::llama(&[]).float(&format!("llama.{name}"), 1.0).open("keys-neutral").is_ok();
        assert_eq!(is_neutral, name != "final_logit_softcapping", "{name}");
    }
    for (name, value) in
        [("rope.freq_base", f32::NAN), ("rope.freq_base", 0.0), ("attention.layer_norm_rms_epsilon", -1.0)]
    {
        let error = Small::llama(&[]).float(&format!("llama.{name}"), value).open("floats").unwrap_err();
        assert!(error.to_string().contains(&format!("llama.{name}")), "{error}");
    }
    let yarn = Small::llama(&[]).text("llama.rope.scaling.type", "longrope").open("rope").unwrap_err();
    assert!(yarn.to_string().contains("rope.scaling.type"), "{yarn}");
    let linear = Small::llama(&[]).float("llama.rope.scaling.factor", 4.0).open("rope-linear").unwrap();
    let plain = Small::llama(&[]).open("rope-plain").unwrap();
    assert_eq!(
        linear.config.rope.inv_freq[0] * 4.0,
        plain.config.rope.inv_freq[0],
        "linear is what it means"
    );
}

#[test]
fn a_file_that_is_no_model_or_damaged_is_refused() {
    let folder = scratch("gguf-refused");
    let file = folder.join("small.gguf");
    let good = Small::llama(&[]).bytes();
    let error_of = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        Checkpoint::open(&file, &ReadFiles).expect_err("refused").to_string()
    };
    let adapter = Small::llama(&[]).text("general.type", "adapter").bytes();
    let error = error_of(&adapter);
    assert!(error.contains("general.type") && error.contains("adapter"), "{error}");
    let error = error_of(&[&good[..4], &3u32.to_be_bytes(), &good[8..]].concat());
    assert!(error.contains("big-endian"), "{error}");
    let name = b"blk.0.attn_k.weight";
    let offset = good.windows(name.len()).position(|part| part == name).unwrap() + name.len() + 4 + 16 + 4;
    let moved = |to: u64| [&good[..offset], &to.to_le_bytes(), &good[offset + 8..]].concat();
    let error = error_of(&moved(0));
    assert!(error.contains("overlap"), "{error}");
    let error = error_of(&moved(33));
    assert!(error.contains("attn_k") && error.contains("no multiple of 32"), "{error}");
    std::fs::write(&file, &good).unwrap();
    assert!(Checkpoint::open(&file, &ReadFiles).is_ok());
}

#[test]
fn a_model_in_several_files_is_one_and_a_missing_file_is_named() {
    let folder = scratch("split");
    let whole = Small::llama(&[]);
    let part =
        |at: usize, count: usize| -> PathBuf { folder.join(format!("m-{:05}-of-{count:05}.gguf", at + 1)) };
    let mut first = whole.clone().short("split.count", 2).short("split.no", 0).key(
        "split.tensors.count",
        5,
        &(whole.tensors.len() as i32).to_le_bytes(),
    );
    let mut second = Small::default().short("split.count", 2).short("split.no", 1);
    second.tensors = first.tensors.split_off(4);
    first.write(&part(0, 2));
    let missing = Checkpoint::open(&part(0, 2), &ReadFiles).unwrap_err().to_string();
    assert!(missing.contains("m-00002-of-00002.gguf"), "{missing}");
    second.write(&part(1, 2));
    let divided = Checkpoint::open(&part(0, 2), &ReadFiles).unwrap();
    let one = whole.open("split-whole").unwrap();
    for (name, ..) in one.directory() {
        assert_eq!(divided.values(name), one.values(name), "{name}");
    }
    let dtype = divided.config.dtype;
    assert_eq!(ModelConfig { dtype, ..ModelConfig::open(&part(0, 2)).unwrap() }, divided.config);
    let later = Checkpoint::open(&part(1, 2), &ReadFiles).unwrap_err().to_string();
    assert!(later.contains("split.no") && later.contains("00001-of-00002"), "{later}");
}

#[test]
fn types_and_vocabularies_that_are_not_read_are_named() {
    let mut file = Small::llama(&[]);
    file.tensors[0].2 = 28;
    let error = file.open("types").unwrap_err().to_string();
    assert!(
        error.contains("token_embd.weight") && error.contains("F64") && error.contains("Q4_1"),
        "{error}"
    );
    for (key, value) in [("tokenizer.ggml.model", "t5"), ("tokenizer.ggml.pre", "unheard-of")] {
        let directory = scratch("vocabularies");
        let file = directory.join("small.gguf");
        Small::llama(&[]).text(key, value).write(&file);
        let error = Tokenizer::open(&file).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("supported"), "{error}");
    }
}

#[test]
fn a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes() {
    let directory = scratch("spm");
    let file = directory.join("small.gguf");
    let mut names: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    names.extend((0..=255).map(|byte: u8| format!("<0x{byte:02X}>")));
    let words = ["\u{2581}", "a", "b", "c", "ab", "bc", "\u{2581}a", "abc"];
    names.extend(words.map(String::from));
    let score = |name: &str| match name {
        "bc" => -1f32,
        "ab" => -2.0,
        "abc" => -3.0,
        "\u{2581}a" => -4.0,
        _ => 0.0,
    };
    let kind = |at: usize| [2u32, 3, 3].get(at).copied().unwrap_or(if at < 259 { 6 } else { 1 });
    let tokens: Vec<Vec<u8>> = names.iter().map(|name| text(name)).collect();
    let scores: Vec<Vec<u8>> = names.iter().map(|name| score(name).to_le_bytes().to_vec()).collect();
    let kinds: Vec<Vec<u8>> = (0..names.len()).map(|at| kind(at).to_le_bytes().to_vec()).collect();
    let vocabulary = Small::llama(&[])
        .text("tokenizer.ggml.model", "llama")
        .list("tokenizer.ggml.tokens", 8, &tokens)
        .list("tokenizer.ggml.scores", 6, &scores)
        .list("tokenizer.ggml.token_type", 5, &kinds);
    vocabulary.write(&file);
    let tokenizer = Tokenizer::open(&file).unwrap();
    let id = |name: &str| names.iter().position(|known| known == name).unwrap() as u32;
    let expected = [1, id("\u{2581}"), id("abc"), id("<0xC3>"), id("<0xA9>")];
    assert_eq!(tokenizer.encode("abcé").unwrap(), expected, "bc comes first, and then abc");
    assert_eq!(tokenizer.decode(&expected).unwrap(), "abcé");
    assert_eq!(tokenizer.encode("").unwrap(), [1]);
    vocabulary.key("tokenizer.ggml.add_space_prefix", 7, &[0]).write(&file);
    let tokenizer = Tokenizer::open(&file).unwrap();
    assert_eq!(tokenizer.encode(" a</s>a").unwrap(), [1, id("\u{2581}a"), 2, id("a")]);
}
