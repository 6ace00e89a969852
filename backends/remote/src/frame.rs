//! Messages on a connection.

use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_wire::Duplex;
use std::io;
use std::ops::Range;
use std::time::Instant;

/// Bytes before a message: its length.
const HEAD_BYTES: usize = 4;

/// Bytes received at a time while the next message's length is unknown: a whole piece of data, and some of
/// the next message.
const AHEAD_BYTES: usize = 68 << 10;

/// Bodies of large messages that are kept for later ones.
const SPARE_MAX: usize = 4;

/// A long message's memory grows by this as it arrives, so that a length alone takes none.
const GROWTH_BYTES: usize = 1 << 20;

/// Appends a message that begins with `kind` and that `fill` continues; `data` bytes are to follow it.
pub(crate) fn put_frame<E>(
    out: &mut Vec<u8>,
    kind: u8,
    data: usize,
    fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
) -> Result<(), E> {
    let start = out.len();
    out.extend([0; HEAD_BYTES]);
    out.push(kind);
    if let Err(error) = fill(out) {
        out.truncate(start);
        return Err(error);
    }
    let length = out.len() - start - HEAD_BYTES + data;
    out[start..start + HEAD_BYTES].copy_from_slice(&to_u32(length).to_le_bytes());
    Ok(())
}

/// A message without its length, which begins with what it is.
#[derive(Default)]
pub(crate) struct MessageBody {
    bytes: Vec<u8>,
    length: usize,
}

impl std::ops::Deref for MessageBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// A message that has arrived.
pub(crate) enum Arrived {
    /// It is in the reader's memory until the next one is received.
    InReader(Range<usize>),
    /// It was too long for that.
    Apart(MessageBody),
}

/// Receives messages.
pub(crate) struct FrameReader {
    ahead: Vec<u8>,
    from: usize,
    to: usize,
    /// A partly received long message, and the number of bytes so far.
    part: Option<(MessageBody, usize)>,
    spare: Vec<MessageBody>,
    length_max: usize,
}

impl FrameReader {
    pub(crate) fn new(length_max: usize) -> Self {
        let ahead = vec![0; AHEAD_BYTES];
        FrameReader { ahead, from: 0, to: 0, part: None, spare: Vec::new(), length_max }
    }

    /// From now on, messages may have this length.
    pub(crate) fn allow(&mut self, length_max: usize) {
        self.length_max = length_max;
    }

    /// Bytes of memory for a partly received long message.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        self.part.as_ref().map_or(0, |(body, _)| body.bytes.capacity())
    }

    /// The bytes of the message that was received last.
    pub(crate) fn bytes<'a>(&'a self, arrived: &'a Arrived) -> &'a [u8] {
        match arrived {
            Arrived::InReader(range) => &self.ahead[range.clone()],
            Arrived::Apart(body) => body,
        }
    }

    /// The message that was received last, to be kept.
    pub(crate) fn kept(&mut self, arrived: Arrived) -> MessageBody {
        match arrived {
            Arrived::Apart(body) => body,
            Arrived::InReader(range) => self.begun(range.len(), range),
        }
    }

    /// Takes the memory of a message back.
    pub(crate) fn recycle(&mut self, body: MessageBody) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(body);
        }
    }

    /// The same for one that was not kept.
    pub(crate) fn recycle_arrived(&mut self, arrived: Arrived) {
        if let Arrived::Apart(body) = arrived {
            self.recycle(body);
        }
    }

    /// The next message; `None` once `deadline` has passed. A deadline in the past takes what has arrived.
    pub(crate) fn next(&mut self, link: &Duplex, deadline: Option<Instant>) -> io::Result<Option<Arrived>> {
        loop {
            let came = match &mut self.part {
                Some((body, filled)) if *filled == body.length => {
                    return Ok(self.part.take().map(|(body, _)| Arrived::Apart(body)));
                }
                Some((body, filled)) => {
                    if *filled == body.bytes.len() {
                        body.bytes.resize((*filled + GROWTH_BYTES).min(body.length), 0);
                    }
                    let end = body.length.min(body.bytes.len());
                    let came = link.receive(&mut body.bytes[*filled..end], deadline)?;
                    *filled += came.unwrap_or(0);
                    came
                }
                None => {
                    if let Some(arrived) = self.take_ahead()? {
                        return Ok(Some(Arrived::InReader(arrived)));
                    }
                    if self.part.is_some() {
                        continue;
                    }
                    let came = link.receive(&mut self.ahead[self.to..], deadline)?;
                    self.to += came.unwrap_or(0);
                    came
                }
            };
            if came.is_none() {
                return Ok(None);
            }
        }
    }

    /// Takes the next message if it is here. If not, makes room for the rest of it.
    fn take_ahead(&mut self) -> io::Result<Option<Range<usize>>> {
        let here = self.from..self.to;
        let head = self.ahead[here.clone()].first_chunk::<HEAD_BYTES>();
        let length = head.map_or(1, |head| to_usize(u32::from_le_bytes(*head)));
        if length == 0 || length > self.length_max {
            let detail = format!("a message of {length} bytes, where 1 to {} are allowed", self.length_max);
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        let begin = here.start + HEAD_BYTES;
        if begin + length <= here.end {
            self.from = begin + length;
            return Ok(Some(begin..self.from));
        }
        if HEAD_BYTES + length > self.ahead.len() {
            (self.from, self.to) = (0, 0);
            self.part = Some((self.begun(length, begin..here.end), here.end - begin));
        } else if here.is_empty() || begin + length > self.ahead.len() {
            self.ahead.copy_within(here.clone(), 0);
            (self.from, self.to) = (0, here.len());
        }
        Ok(None)
    }

    /// A message of such a length that begins with bytes that are here.
    fn begun(&mut self, length: usize, here: Range<usize>) -> MessageBody {
        let mut body = self.spare.pop().unwrap_or_default();
        if body.bytes.len() < here.len() {
            body.bytes.resize(here.len(), 0);
        }
        body.bytes[..here.len()].copy_from_slice(&self.ahead[here]);
        body.length = length;
        body
    }
}
