//! Messages on a connection.

use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_wire::Duplex;
use std::io;
use std::time::Instant;

/// Bytes before a message: its length.
const HEAD_BYTES: usize = 4;

/// Bytes that are received at a time where the next message's length is not known.
const AHEAD_BYTES: usize = 16 << 10;

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
pub(crate) struct Body {
    bytes: Vec<u8>,
    length: usize,
}

impl std::ops::Deref for Body {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// Receives messages.
pub(crate) struct FrameReader {
    ahead: Vec<u8>,
    from: usize,
    to: usize,
    /// A message of which a part has arrived, and the number of its bytes so far.
    part: Option<(Body, usize)>,
    spare: Vec<Body>,
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

    /// Bytes of memory for a message of which a part has arrived.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        self.part.as_ref().map_or(0, |(body, _)| body.bytes.capacity())
    }

    /// Takes the memory of a message back.
    pub(crate) fn recycle(&mut self, body: Body) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(body);
        }
    }

    /// The next message; `None` once `deadline` has passed. A deadline in the past takes what has arrived.
    pub(crate) fn next(&mut self, link: &Duplex, deadline: Option<Instant>) -> io::Result<Option<Body>> {
        loop {
            self.begin()?;
            let came = match &mut self.part {
                Some((body, filled)) if *filled == body.length => {
                    return Ok(self.part.take().map(|(body, _)| body));
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
                    self.ahead.copy_within(self.from..self.to, 0);
                    (self.from, self.to) = (0, self.to - self.from);
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

    /// Begins a message whose length has arrived, unless one is being received.
    fn begin(&mut self) -> io::Result<()> {
        let ahead = &self.ahead[self.from..self.to];
        let (None, Some(head)) = (&self.part, ahead.first_chunk::<HEAD_BYTES>()) else { return Ok(()) };
        let length = to_usize(u32::from_le_bytes(*head));
        if length == 0 || length > self.length_max {
            let detail = format!("a message of {length} bytes, where 1 to {} are allowed", self.length_max);
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        let mut body = self.spare.pop().unwrap_or_default();
        let here = length.min(ahead.len() - HEAD_BYTES);
        if body.bytes.len() < here {
            body.bytes.resize(here, 0);
        }
        body.bytes[..here].copy_from_slice(&ahead[HEAD_BYTES..HEAD_BYTES + here]);
        body.length = length;
        self.from += HEAD_BYTES + here;
        self.part = Some((body, here));
        Ok(())
    }
}
