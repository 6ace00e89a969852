//! Reads an answer that another process carries, and changes nothing of it.

use crate::chunk;
use crate::sse::{SseDecoder, SseEvent};
use mixfleet_hal::outside::{EngineChunk, EngineFault, EngineFaultKind, EngineUsage};

/// Maximum size of a whole answer that is kept until its lengths can be read; those of a longer one are not.
const WHOLE_BYTES_MAX: usize = 8 << 20;

/// The part of an answer that has passed so far.
#[derive(Debug)]
pub struct AnswerReader {
    form: PassingForm,
    /// Whether nothing more is read: what passes is not what OpenAI's interface has, or too long.
    is_lost: bool,
    is_complete: bool,
}

#[derive(Debug)]
enum PassingForm {
    Stream(SseDecoder),
    Whole(Vec<u8>),
}

impl AnswerReader {
    /// A reader of a stream of events, or of one document.
    pub fn new(is_stream: bool) -> Self {
        let form = match is_stream {
            true => PassingForm::Stream(SseDecoder::default()),
            false => PassingForm::Whole(Vec::new()),
        };
        AnswerReader { form, is_lost: false, is_complete: false }
    }

    /// Takes the next bytes, in any pieces, and returns the chunks of a stream that they complete.
    ///
    /// # Errors
    /// What of it cannot be read. Nothing behind it is.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<EngineChunk>, EngineFault> {
        if self.is_lost {
            return Ok(Vec::new());
        }
        let read = self.read(piece);
        self.is_lost = read.is_err();
        read
    }

    fn read(&mut self, piece: &[u8]) -> Result<Vec<EngineChunk>, EngineFault> {
        let too_long =
            |what| EngineFault::new(EngineFaultKind::Malformed, format!("{what} is too long to read"));
        match &mut self.form {
            PassingForm::Whole(text) if text.len() + piece.len() > WHOLE_BYTES_MAX => {
                *text = Vec::new();
                Err(too_long("its answer"))
            }
            PassingForm::Whole(text) => {
                text.extend_from_slice(piece);
                Ok(Vec::new())
            }
            PassingForm::Stream(decoder) => {
                let mut events = Vec::new();
                decoder.push(piece, &mut events).map_err(|_| too_long("an event of its answer"))?;
                let mut chunks = Vec::new();
                for event in events {
                    match event {
                        SseEvent::Data(data) if data == b"[DONE]" => self.is_complete = true,
                        SseEvent::Data(data) => chunks.push(chunk::passing(&data)?),
                        SseEvent::Error(data) => {
                            return Err(EngineFault::new(EngineFaultKind::Failed, chunk::error_text(&data)));
                        }
                    }
                }
                Ok(chunks)
            }
        }
    }

    /// Whether it reads a stream.
    pub fn is_stream(&self) -> bool {
        matches!(self.form, PassingForm::Stream(_))
    }

    /// Whether a stream said that it is complete.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Lengths of a whole answer, once all of it has passed.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub fn usage(&mut self) -> Result<Option<EngineUsage>, EngineFault> {
        match &mut self.form {
            PassingForm::Whole(text) if !self.is_lost => chunk::passing_usage(&std::mem::take(text)),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = concat!(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n",
        "data: {\"model\":\"any\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n",
        ": still here\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}]}\r\n\r\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n",
        "data: [DONE]\n\n",
    );

    proptest! {
        #[test]
        fn a_stream_reads_the_same_in_any_pieces(cuts in proptest::collection::vec(0..STREAM.len(), 0..12)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut reader = AnswerReader::new(true);
            let mut chunks = Vec::new();
            for pair in cuts.windows(2) {
                chunks.extend(reader.push(&STREAM.as_bytes()[pair[0]..pair[1]]).unwrap());
            }
            let text: String = chunks.iter().map(|chunk| chunk.text.as_str()).collect();
            prop_assert_eq!(text.as_str(), "ab");
            prop_assert_eq!(chunks.iter().filter(|chunk| chunk.has_token()).count(), 2);
            let usage = chunks.iter().find_map(|chunk| chunk.usage).unwrap();
            prop_assert_eq!((usage.prompt_tokens, usage.completion_tokens), (7, 2));
            prop_assert!(reader.is_complete());
        }
    }

    #[test]
    fn a_whole_answer_tells_its_lengths_and_nonsense_tells_none() {
        let mut reader = AnswerReader::new(false);
        reader.push(br#"{"choices":[{"index":0}],"usage":{"prompt_"#).unwrap();
        reader.push(br#"tokens":3,"completion_tokens":1}}"#).unwrap();
        let usage = reader.usage().unwrap().unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (3, 1));
        let mut reader = AnswerReader::new(false);
        reader.push(b"<html>").unwrap();
        assert!(reader.usage().is_err());
        let mut reader = AnswerReader::new(true);
        assert!(reader.push(b"data: nonsense\n\n").is_err());
        assert_eq!(reader.push(STREAM.as_bytes()), Ok(Vec::new()), "nothing behind a fault is read");
    }
}
