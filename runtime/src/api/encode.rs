//! Converts text to token ids of the model, and refuses text that cannot fit before it is tokenised in full.

use super::ServedModel;
use super::errors::ApiError;
use super::text::Marked;

/// Text up to this length is tokenised at once; longer text is first counted in pieces of this length.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes per token below which a long text may not fit, and is counted first.
const BYTES_PER_TOKEN: usize = 4;
/// A text is refused when its pieces have this many times the tokens that would fit, since other cuts could
/// give fewer tokens.
const PIECES_MARGIN: usize = 2;

/// Reports whether no caller waits for the result any more.
pub(crate) type Stopped<'a> = &'a dyn Fn() -> bool;

/// Tokenises one field of a request.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub(crate) model: &'a ServedModel,
    /// The field's name, for error messages.
    pub(crate) field: &'static str,
    pub(crate) stopped: Stopped<'a>,
}

impl Encoder<'_> {
    /// The ids of `prompt`, each of which has a row in the model's embedding.
    pub(crate) fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, ApiError> {
        self.check_length(&prompt.unmarked())?;
        self.check_stopped()?;
        let text = &self.model.text;
        let ids = text.encode(prompt, add_special).map_err(|error| self.failed(&error))?;
        let vocabulary = text.vocabulary_size();
        match ids.iter().find(|id| **id >= vocabulary) {
            None => Ok(ids),
            Some(id) => Err(self.failed(&format!(
                "the tokenizer returned token {id}, and the model has only {vocabulary}: tokenizer and model do not match"
            ))),
        }
    }

    /// Converts an error of the tokenizer or template for the client.
    pub(crate) fn failed(&self, error: &str) -> ApiError {
        let field = self.field;
        ApiError::value(field, format!("'{field}' cannot be turned into a prompt: {error}"))
    }

    /// Ends work for a client that has left, by an error that is not sent.
    pub(crate) fn check_stopped(&self) -> Result<(), ApiError> {
        match (self.stopped)() {
            true => Err(ApiError::server("the client has left")),
            false => Ok(()),
        }
    }

    /// Refuses a text that has more tokens than the context, where that costs less than tokenising it.
    fn check_length(&self, text: &str) -> Result<(), ApiError> {
        let context = self.model.context as usize;
        let longest = self.model.text.token_bytes_max();
        if let Some(longest) = longest {
            let tokens_min = text.len().div_ceil(longest.max(1));
            if tokens_min > context {
                return Err(self.too_long(tokens_min));
            }
        }
        if text.len() <= PIECE_BYTES.max(context.saturating_mul(BYTES_PER_TOKEN)) {
            return Ok(());
        }
        let (mut rest, mut tokens) = (text, 0);
        while !rest.is_empty() {
            self.check_stopped()?;
            let whole = (PIECE_BYTES..rest.len()).find(|at| rest.is_char_boundary(*at));
            let (piece, after) = rest.split_at(whole.unwrap_or(rest.len()));
            let prompt = Marked::plain(piece.to_string());
            tokens += self.model.text.encode(&prompt, false).map_err(|error| self.failed(&error))?.len();
            rest = after;
            if tokens > context.saturating_mul(PIECES_MARGIN).saturating_add(PIECE_BYTES / 64) {
                return Err(self.too_long(context + 1));
            }
        }
        Ok(())
    }

    /// The error for a prompt that has at least `tokens_min` tokens.
    pub(crate) fn too_long(&self, tokens_min: usize) -> ApiError {
        let context = self.model.context;
        let message = format!(
            "the model's context holds {context} tokens; the request has at least {tokens_min} in the prompt"
        );
        ApiError::context_length(self.field, message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::{TextDecoder, TextModel};
    use super::*;
    use crate::model::ChatMessage;
    use crate::request::{EngineHandle, Sampling};
    use serde_json::{Map, Value};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const CONTEXT: usize = 1000;

    /// A tokenizer that makes one token of each run of equal bytes.
    struct Runs {
        token_bytes_max: Option<usize>,
        encoded_bytes: AtomicUsize,
    }

    impl TextModel for Runs {
        fn encode(&self, prompt: &Marked, _: bool) -> Result<Vec<u32>, String> {
            self.encoded_bytes.fetch_add(prompt.text.len(), Ordering::Relaxed);
            let mut ids: Vec<u32> = prompt.text.bytes().map(u32::from).collect();
            ids.dedup();
            Ok(ids)
        }

        fn special_places(&self, _: &str) -> Vec<usize> {
            Vec::new()
        }

        fn token_bytes_max(&self) -> Option<usize> {
            self.token_bytes_max
        }

        fn render_chat(
            &self,
            _: &[ChatMessage],
            _: bool,
            _: &Map<String, Value>,
            _: bool,
            _: &dyn Fn() -> bool,
        ) -> Result<crate::model::RenderedChat, String> {
            unreachable!("no chats here")
        }

        fn tool_style(&self) -> Option<crate::model::ToolStyle> {
            None
        }

        fn decoder(&self) -> Box<dyn TextDecoder> {
            unreachable!("no answers here")
        }

        fn check_grammar(
            &self,
            _: &crate::grammar::Grammar,
            _: crate::grammar::GrammarClient<'_>,
        ) -> Result<(), crate::grammar::GrammarError> {
            Err(crate::grammar::GrammarError::Refused("there is no grammar of bytes".into()))
        }

        fn token_bytes(&self, id: u32) -> Vec<u8> {
            vec![id as u8]
        }

        fn vocabulary_size(&self) -> u32 {
            u32::from(b'z')
        }
    }

    /// The tokens of `text`, or the error; and the number of bytes that were tokenised for it.
    fn encode(
        token_bytes_max: Option<usize>,
        text: &str,
        stopped: Stopped<'_>,
    ) -> (Result<usize, String>, usize) {
        let runs = Arc::new(Runs { token_bytes_max, encoded_bytes: AtomicUsize::new(0) });
        let model = ServedModel {
            name: "runs".into(),
            created: 0,
            engine: EngineHandle::channel(1).0,
            text: runs.clone(),
            context: CONTEXT as u32,
            eos_ids: [].into(),
            defaults: Sampling::default(),
            answer_tokens: None,
            exchange: None,
        };
        let encoder = Encoder { model: &model, field: "prompt", stopped };
        let ids = encoder.encode(&Marked::plain(text.into()), true);
        let ids = ids.map(|ids| ids.len()).map_err(|error| error.to_json());
        (ids, runs.encoded_bytes.load(Ordering::Relaxed))
    }

    #[test]
    fn what_cannot_fit_by_its_bytes_alone_is_refused_without_tokenising() {
        let (refused, encoded) = encode(Some(4), &"ab".repeat(2 * CONTEXT + 1), &|| false);
        let error = refused.unwrap_err();
        assert!(error.contains("context_length_exceeded") && error.contains("at least 1001"), "{error}");
        assert_eq!(encoded, 0);
        // At most as many bytes as the context could hold are tokenised; the result's length is checked by
        // the caller.
        let (fits, _) = encode(Some(4), &"a".repeat(4 * CONTEXT), &|| false);
        assert_eq!(fits, Ok(1));
    }

    #[test]
    fn where_a_token_has_no_bound_a_long_text_is_given_up_after_a_few_pieces() {
        let long = "ab".repeat(4 << 20);
        let (refused, encoded) = encode(None, &long, &|| false);
        assert!(refused.unwrap_err().contains("context_length_exceeded"));
        assert!(encoded <= PIECE_BYTES, "{encoded} of {} bytes were tokenised", long.len());
        let (fits, _) = encode(None, &"a".repeat(8 << 20), &|| false);
        assert_eq!(fits, Ok(1), "a long text of few tokens is none to refuse");
    }

    #[test]
    fn tokenising_ends_soon_after_its_client_has_left() {
        let looks = AtomicUsize::new(0);
        let leaves = || looks.fetch_add(1, Ordering::Relaxed) == 3;
        let (ended, encoded) = encode(None, &"a".repeat(8 << 20), &leaves);
        assert!(ended.unwrap_err().contains("has left"));
        assert_eq!(encoded, 3 * PIECE_BYTES);
        assert_eq!(encode(None, "abc", &|| true).1, 0);
    }

    #[test]
    fn an_id_beyond_the_embedding_is_refused_by_its_number() {
        let (refused, _) = encode(None, "abz", &|| false);
        let error = refused.unwrap_err();
        assert!(error.contains("token 122") && error.contains("only 122"), "{error}");
        assert_eq!(encode(None, "aby", &|| false).0, Ok(3));
    }
}
