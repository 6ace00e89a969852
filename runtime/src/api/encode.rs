//! From text to token ids that the model has, without work on what cannot fit.

use super::ServedModel;
use super::errors::ApiError;
use super::text::Marked;

/// Text up to this long is tokenised in one go; longer ones are counted in pieces first, of so many bytes.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes for a token below which a long text may not fit, and is counted first.
const BYTES_PER_TOKEN: usize = 4;
/// A text is refused by its pieces when they have so many times the tokens that would fit: cut elsewhere, it has fewer.
const PIECES_MARGIN: usize = 2;

/// Says when nobody waits for the result any more.
pub(crate) type Stopped<'a> = &'a dyn Fn() -> bool;

/// Tokenises what one field of a request says.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub(crate) model: &'a ServedModel,
    /// For messages.
    pub(crate) field: &'static str,
    pub(crate) stopped: Stopped<'a>,
}

impl Encoder<'_> {
    /// The ids of `prompt`, each of which has a row in the model's embedding.
    pub(crate) fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, ApiError> {
        self.check_length(&prompt.unmarked())?;
        self.go_on()?;
        let text = &self.model.text;
        let ids = text.encode(prompt, add_special).map_err(|error| self.failed(&error))?;
        let vocabulary = text.vocabulary_size();
        match ids.iter().find(|id| **id >= vocabulary) {
            None => Ok(ids),
            Some(id) => Err(self.failed(&format!(
                "the tokenizer makes token {id} of it, and the model has only {vocabulary}: they do not belong together"
            ))),
        }
    }

    /// An error of tokenizer or template, for the client.
    pub(crate) fn failed(&self, error: &str) -> ApiError {
        let field = self.field;
        ApiError::value(field, format!("'{field}' cannot be turned into a prompt: {error}"))
    }

    /// Ends work for a client that has left; nobody reads the error.
    pub(crate) fn go_on(&self) -> Result<(), ApiError> {
        match (self.stopped)() {
            true => Err(ApiError::server("the client has left")),
            false => Ok(()),
        }
    }

    /// Refuses a text that has more tokens than the context, where that can be told for less than tokenising it.
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
            self.go_on()?;
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

    fn too_long(&self, tokens_min: usize) -> ApiError {
        let context = self.model.context;
        let message = format!(
            "the model's context holds {context} tokens; the request has at least {tokens_min} in the prompt"
        );
        ApiError::context_length(self.field, message)
    }
}
