//! Cuts a byte stream into server-sent events. Bytes may come in any pieces.

/// Maximum length of one event: one with twenty alternatives for each of many tokens stays far below it.
pub(crate) const EVENT_BYTES_MAX: usize = 8 << 20;

/// What an event stream may hold besides data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SseEvent {
    /// The data of an event, of a line or several joined by newlines.
    Data(Vec<u8>),
    /// The data of an event whose name is `error`, or of llama.cpp's older field of that name.
    Error(Vec<u8>),
}

/// The state between two pieces.
#[derive(Debug, Default)]
pub(crate) struct SseDecoder {
    /// Bytes of a line that has no end yet.
    line: Vec<u8>,
    /// Lines of data of an event that has no end yet.
    data: Option<Vec<u8>>,
    is_error: bool,
    /// Whether the last byte was a carriage return, whose newline may follow.
    after_return: bool,
}

/// An event is longer than [`EVENT_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

impl SseDecoder {
    /// Takes the next piece and appends the events that it completes.
    pub(crate) fn push(&mut self, mut piece: &[u8], events: &mut Vec<SseEvent>) -> Result<(), TooLong> {
        while !piece.is_empty() {
            if std::mem::take(&mut self.after_return) && piece[0] == b'\n' {
                piece = &piece[1..];
                continue;
            }
            let Some(end) = piece.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                self.line.extend_from_slice(piece);
                return self.check();
            };
            self.line.extend_from_slice(&piece[..end]);
            self.check()?;
            self.after_return = piece[end] == b'\r';
            piece = &piece[end + 1..];
            let line = std::mem::take(&mut self.line);
            self.take_line(&line, events);
        }
        Ok(())
    }

    /// Whether an event was begun and has no end.
    pub(crate) fn is_within(&self) -> bool {
        !self.line.is_empty() || self.data.is_some()
    }

    fn check(&self) -> Result<(), TooLong> {
        let bytes = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if bytes > EVENT_BYTES_MAX { Err(TooLong) } else { Ok(()) }
    }

    fn take_line(&mut self, line: &[u8], events: &mut Vec<SseEvent>) {
        if line.is_empty() {
            let is_error = std::mem::take(&mut self.is_error);
            if let Some(data) = self.data.take() {
                events.push(if is_error { SseEvent::Error(data) } else { SseEvent::Data(data) });
            }
            return;
        }
        let (name, value) = match line.iter().position(|byte| *byte == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &[][..]),
        };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match name {
            b"data" | b"error" => {
                self.is_error |= name == b"error";
                match &mut self.data {
                    Some(data) => {
                        data.push(b'\n');
                        data.extend_from_slice(value);
                    }
                    None => self.data = Some(value.to_vec()),
                }
            }
            b"event" => self.is_error = value == b"error",
            // comments, which keep a connection open, and fields that only browsers use
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(pieces: &[&[u8]]) -> (Vec<SseEvent>, bool) {
        let (mut decoder, mut events) = (SseDecoder::default(), Vec::new());
        for piece in pieces {
            decoder.push(piece, &mut events).unwrap();
        }
        (events, decoder.is_within())
    }

    fn data(text: &str) -> SseEvent {
        SseEvent::Data(text.into())
    }

    #[test]
    fn events_end_at_blank_lines_of_any_kind() {
        let stream = b": ping\n\ndata: a\n\ndata:b\r\n\r\ndata: c\rdata: d\r\rid: 7\ndata\n\nevent: error\ndata: e\n\n";
        let error = SseEvent::Error("e".into());
        assert_eq!(all(&[stream]), (vec![data("a"), data("b"), data("c\nd"), data(""), error], false));
        assert_eq!(all(&[b"error: {}\n\n"]).0, [SseEvent::Error("{}".into())]);
        assert_eq!(all(&[b"data: a\n"]), (vec![], true));
        assert_eq!(all(&[b"data: a\n\nda"]), (vec![data("a")], true));
    }

    #[test]
    fn an_event_without_an_end_is_given_up() {
        let (mut decoder, mut events) = (SseDecoder::default(), Vec::new());
        let piece = vec![b'x'; 1 << 20];
        let results: Vec<_> = (0..10).map(|_| decoder.push(&piece, &mut events)).collect();
        assert_eq!(results[7], Ok(()));
        assert_eq!(results[8], Err(TooLong));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_give_the_same_events(
            lines in proptest::collection::vec("(data: ?|event: |error: |: |)[a-c:\r]{0,5}(\n|\r\n|\r|\n\n)", 0..12),
            cuts in proptest::collection::vec(0..200_usize, 0..12),
        ) {
            let stream = lines.concat().into_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect();
            prop_assert_eq!(all(&pieces), all(&[&stream]));
        }
    }
}
