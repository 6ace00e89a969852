//! Adapts a checkpoint's tokenizer and chat template to the API.

use crate::api::{Marked, TextDecoder, TextModel};
use crate::env::SharedEnv;
use crate::grammar::{Grammar, GrammarClient, GrammarError, Grammars, Trials};
use crate::model::{
    ChatMessage, ChatTemplate, ControlText, Conversation, RenderedChat, TokenStream, Tokenizer, ToolStyle,
};
use mixfleet_hal::cast::to_u64;
use serde_json::{Map, Value};
use std::sync::{Arc, OnceLock};

/// The tokenizer and chat template of a loaded model.
pub struct LoadedText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, or none if the checkpoint has none; chats are refused then.
    pub template: Option<ChatTemplate>,
    /// The environment, which gives templates the date.
    pub env: SharedEnv,
    /// The size of the model's vocabulary: every token id is below it.
    pub vocab: u32,
    /// What compiles the grammars of answers.
    pub grammars: Arc<Grammars>,
    /// What tells apart what the template and the client wrote, made for the first chat.
    control: OnceLock<Result<ControlText, String>>,
}

impl LoadedText {
    /// The tokenizer and chat template of a model whose vocabulary has `vocab` tokens.
    /// Grammars are compiled untried.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, env: SharedEnv, vocab: u32) -> Self {
        let grammars = Arc::new(Grammars::new(tokenizer.clone(), vocab, None));
        LoadedText { tokenizer, template, env, vocab, grammars, control: OnceLock::new() }
    }

    /// Tries grammars by `trials` before they are compiled here.
    pub fn with_trials(mut self, trials: Box<dyn Trials>) -> Self {
        self.grammars = Arc::new(Grammars::new(self.tokenizer.clone(), self.vocab, Some(trials)));
        self
    }
}

impl TextModel for LoadedText {
    fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, String> {
        let Marked { text, mark, is_strict } = prompt;
        let encoded = match (mark, add_special) {
            (Some(mark), _) => self.tokenizer.encode_marked(text, *mark, add_special),
            (None, true) => self.tokenizer.encode(text),
            (None, false) => self.tokenizer.encode_chat(text),
        };
        let ids = encoded.map_err(|error| error.to_string())?;
        if *is_strict {
            let checked = self.tokenizer.check_specials(&ids, text, add_special);
            checked.map_err(|error| error.to_string())?;
        }
        Ok(ids)
    }

    fn special_places(&self, text: &str) -> Vec<usize> {
        self.tokenizer.special_places(text)
    }

    fn token_bytes_max(&self) -> Option<usize> {
        self.tokenizer.token_bytes_max()
    }

    fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
        keeps_text: bool,
        stopped: &dyn Fn() -> bool,
    ) -> Result<RenderedChat, String> {
        let Some(template) = &self.template else {
            return Err("this model has no chat template; use /v1/completions".into());
        };
        let now_s = to_u64(self.env.unix_time().0);
        if !keeps_text {
            let text = template.render_until(messages, add_generation_prompt, arguments, now_s, stopped);
            return Ok(RenderedChat { text: text.map_err(|error| error.to_string())?, places: Vec::new() });
        }
        let chat = Conversation { messages, add_generation_prompt, arguments, now_s };
        let new = || ControlText::new(template, &self.tokenizer).map_err(|error| error.to_string());
        let control = self.control.get_or_init(new).as_ref().map_err(Clone::clone)?;
        control.render(template, &chat, stopped).map_err(|error| error.to_string())
    }

    fn tool_style(&self) -> Option<ToolStyle> {
        self.template.as_ref()?.tool_style()
    }

    fn reads_argument(&self, name: &str) -> bool {
        self.template.as_ref().is_some_and(|template| template.reads(name))
    }

    fn decoder_with_specials(&self) -> Box<dyn TextDecoder> {
        Box::new(Decoder(Some(self.tokenizer.stream_with_specials())))
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        Box::new(Decoder(Some(self.tokenizer.stream())))
    }

    fn decoder_showing(&self, marks: Vec<&'static str>) -> Box<dyn TextDecoder> {
        let inner = Decoder(Some(self.tokenizer.stream()));
        Box::new(ShowingDecoder { inner, tokenizer: self.tokenizer.clone(), marks })
    }

    fn check_grammar(&self, grammar: &Grammar, client: GrammarClient<'_>) -> Result<(), GrammarError> {
        self.grammars.begin(grammar, &Arc::default(), client).map(drop)
    }

    fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.tokenizer.token_bytes(id)
    }

    fn vocabulary_size(&self) -> u32 {
        self.vocab
    }
}

/// An incremental decoder, empty once finished.
struct Decoder(Option<TokenStream>);

impl TextDecoder for Decoder {
    fn push(&mut self, id: u32) -> Result<String, String> {
        self.0.as_mut().map_or(Ok(String::new()), |stream| stream.push(id).map_err(|e| e.to_string()))
    }

    fn finish(&mut self) -> Result<String, String> {
        self.0.take().map_or(Ok(String::new()), |stream| stream.finish().map_err(|e| e.to_string()))
    }
}

/// A decoder that shows some special tokens, as text between two streams of it.
struct ShowingDecoder {
    inner: Decoder,
    tokenizer: Tokenizer,
    marks: Vec<&'static str>,
}

impl TextDecoder for ShowingDecoder {
    fn push(&mut self, id: u32) -> Result<String, String> {
        if !self.tokenizer.is_special(id) {
            return self.inner.push(id);
        }
        let name = self.tokenizer.token_bytes(id);
        let Some(mark) = self.marks.iter().find(|mark| mark.as_bytes() == name) else {
            return self.inner.push(id);
        };
        let before = self.inner.finish()?;
        self.inner = Decoder(Some(self.tokenizer.stream()));
        Ok(before + mark)
    }

    fn finish(&mut self) -> Result<String, String> {
        self.inner.finish()
    }
}
