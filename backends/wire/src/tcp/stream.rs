//! The active end of one stream.

use super::inbox::Inbox;
use super::parts::Parts;
use super::protocol::Done;
use crate::stream::SecureStream;
use std::collections::VecDeque;
use std::io;

/// A frame that waits for a stream.
pub(super) struct Frame {
    /// The number of the batch that it belongs to.
    pub(super) batch: u64,
    /// The head and the ranges. The head's frame number is set when it goes.
    pub(super) words: Vec<u8>,
    /// Of a write.
    pub(super) payload: Parts,
    /// Of a read.
    pub(super) into: Parts,
}

impl Frame {
    /// Of its payload, whichever way it goes.
    fn bytes(&self) -> u64 {
        self.payload.bytes() + self.into.bytes()
    }
}

/// A frame that goes.
struct Going {
    /// What `parts` begins with lies here.
    _words: Vec<u8>,
    parts: Parts,
}

/// A frame whose answer has not come whole.
struct Awaited {
    batch: u64,
    frame: u64,
    bytes: u64,
    /// Of `bytes`, what comes with the answer.
    coming: u64,
    into: Parts,
}

/// One stream, its frames on the way, and what they wait for.
pub(super) struct FrameStream {
    link: SecureStream,
    inbox: Inbox,
    going: Option<Going>,
    awaited: VecDeque<Awaited>,
    /// The first awaited frame's `Done` has come.
    answered: bool,
    frames: u64,
    /// Of all that is awaited.
    bytes: u64,
    /// Of these, what comes with answers.
    coming: u64,
    window_bytes: u64,
    /// It takes nothing more now.
    full: bool,
    /// Whoever waits for it knows that.
    watched: bool,
}

/// What of a read may lie in a socket until it is waited for: a receive buffer has room for it from the beginning
/// (128 KiB on Linux, half of it for overhead), so the owner is not held up.
const COMING_BYTES_MAX: u64 = 64 * 1024;

/// Offset of the frame's number in a head.
const FRAME_AT: usize = 8;
/// Where the bytes of a read go that was given up.
const DISCARD_BYTES: usize = 64 * 1024;

impl FrameStream {
    /// `link` no longer blocks; both ends have said hello.
    pub(super) fn new(link: SecureStream, inbox: Inbox, window_bytes: u64) -> Self {
        let (going, awaited, answered) = (None, VecDeque::new(), false);
        let (full, watched) = (false, false);
        let (frames, bytes, coming) = (0, 0, 0);
        FrameStream {
            link,
            inbox,
            going,
            awaited,
            answered,
            frames,
            bytes,
            coming,
            window_bytes,
            full,
            watched,
        }
    }

    /// What to wait for.
    pub(super) fn poll_entry(&self) -> libc::pollfd {
        let events = if self.full { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        libc::pollfd { events, ..crate::poll::readable(self.link.socket()) }
    }

    /// Somebody is about to wait for [`poll_entry`](Self::poll_entry).
    pub(super) fn watch(&mut self) {
        self.watched = self.full;
    }

    /// It has become full since [`watch`](Self::watch).
    pub(super) fn is_unwatched(&self) -> bool {
        self.full && !self.watched
    }

    /// Whether something is left to move for whoever began it: not the short answers to what is sent.
    pub(super) fn goes_on(&self) -> bool {
        self.going.is_some() || self.coming > COMING_BYTES_MAX
    }

    /// The socket takes something again.
    pub(super) fn has_room(&mut self) {
        self.full = false;
    }

    /// Sends frames of `queue` until it is full, or has sent one. Returns whether it could send more.
    pub(super) fn send_one(&mut self, queue: &mut VecDeque<Frame>) -> io::Result<bool> {
        if self.full {
            return Ok(false);
        }
        if self.going.is_none() {
            let room = self.window_bytes.saturating_sub(self.bytes);
            let fits = |frame: &Frame| self.bytes == 0 || frame.bytes() <= room;
            if !queue.front().is_some_and(fits) {
                return Ok(false);
            }
            if let Some(frame) = queue.pop_front() {
                self.begin(frame);
            }
        }
        match self.send_rest() {
            Ok(()) => {
                self.going = None;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.full = true;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn send_rest(&mut self) -> io::Result<()> {
        if let Some(Going { parts, .. }) = &mut self.going {
            while parts.bytes() > 0 {
                let sent = parts.with(None, |parts| self.link.send(parts))?;
                parts.advance(sent);
            }
        }
        self.link.flush()
    }

    fn begin(&mut self, mut frame: Frame) {
        frame.words[FRAME_AT..FRAME_AT + 8].copy_from_slice(&self.frames.to_le_bytes());
        let bytes = frame.bytes();
        let coming = frame.into.bytes();
        self.awaited.push_back(Awaited {
            batch: frame.batch,
            frame: self.frames,
            bytes,
            coming,
            into: frame.into,
        });
        self.bytes += bytes;
        self.coming += coming;
        self.frames += 1;
        let mut parts = Parts::default();
        parts.push(frame.words.as_mut_ptr(), frame.words.len() as u64);
        parts.append(frame.payload);
        self.going = Some(Going { _words: frame.words, parts });
    }

    /// Receives what has come, and calls `landed` with the batch of each frame that is complete.
    pub(super) fn receive(&mut self, landed: &mut dyn FnMut(u64)) -> io::Result<()> {
        match self.receive_all(landed) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }

    fn receive_all(&mut self, landed: &mut dyn FnMut(u64)) -> io::Result<()> {
        loop {
            if !self.answered {
                let done = Done::decode(&self.inbox.take(&mut self.link)?);
                let expected = self.awaited.front().map(|awaited| awaited.frame);
                match done {
                    Some(Done { refused: false, frame }) if Some(frame) == expected => self.answered = true,
                    Some(Done { refused: true, .. }) => return Err(broken("the owner refused a frame")),
                    _ => return Err(broken("the owner answered a frame that was not sent")),
                }
            }
            let first = self.awaited.front_mut().expect("an answer to it has come");
            self.inbox.receive(&mut self.link, &mut first.into)?;
            landed(first.batch);
            self.bytes -= first.bytes;
            self.coming -= first.coming;
            self.awaited.pop_front();
            self.answered = false;
        }
    }

    /// Lets what is still to come of a batch go nowhere.
    pub(super) fn discard(&mut self, batch: u64, nowhere: &mut Vec<u8>) {
        for awaited in self.awaited.iter_mut().filter(|awaited| awaited.batch == batch) {
            nowhere.resize(DISCARD_BYTES, 0);
            let mut left = awaited.into.bytes();
            awaited.into = Parts::default();
            while left > 0 {
                let bytes = left.min(DISCARD_BYTES as u64);
                awaited.into.push(nowhere.as_mut_ptr(), bytes);
                left -= bytes;
            }
        }
    }
}

fn broken(detail: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, detail)
}
