//! What the API needs from a tokenizer and chat template.

use serde_json::{Map, Value};

/// From text to tokens and back. Errors are messages for the client.
pub trait TextModel: Send + Sync {
    /// The tokens of `text`, with the tokenizer's own begin/end tokens if `add_special`.
    ///
    /// # Errors
    /// Why the text cannot be tokenised.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String>;

    /// The prompt text of a conversation. Each message is an object with `role`, `content` (a string)
    /// and whatever other fields the client gave it. `arguments` are extra variables of the template.
    /// The text carries its own special tokens: encode it without `add_special`.
    ///
    /// # Errors
    /// The model has no template, or the template refuses the conversation.
    fn render_chat(
        &self,
        messages: &[Value],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
    ) -> Result<String, String>;

    /// A decoder for one answer. It skips special tokens.
    fn decoder(&self) -> Box<dyn TextDecoder>;

    /// The bytes that one token stands for, for `logprobs` (a special token: its name); empty for an unknown
    /// id.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// Ids below this have a row in the model's embedding; others in a prompt are a 400.
    fn vocabulary_size(&self) -> u32;
}

/// Turns the tokens of one answer into text, bit by bit.
pub trait TextDecoder: Send {
    /// The text that has become complete with this token; empty while a character is unfinished.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn push(&mut self, id: u32) -> Result<String, String>;

    /// What is left at the end; an unfinished character becomes U+FFFD. Called once, last.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn finish(&mut self) -> Result<String, String>;
}
