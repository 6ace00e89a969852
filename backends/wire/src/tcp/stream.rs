//! The active end of one stream.

use super::inbox::ReceiveBuffer;
use super::parts::IovecQueue;
use super::protocol::FrameReply;
use crate::stream::SecureStream;
use std::collections::VecDeque;
use std::io;

/// A frame waiting for a stream.
pub(super) struct Frame {
    /// Id of the batch that it belongs to.
    pub(super) batch: u64,
    /// The encoded header and ranges; the frame number is filled in when the frame is sent.
    pub(super) words: Vec<u8>,
    /// The bytes to send, for a write.
    pub(super) payload: IovecQueue,
    /// The destination, for a read.
    pub(super) into: IovecQueue,
}

impl Frame {
    /// Returns the number of payload bytes, in either direction.
    fn bytes(&self) -> u64 {
        self.payload.bytes() + self.into.bytes()
    }
}

/// A frame that is being sent.
struct Going {
    /// Keeps alive the bytes that `parts` begins with.
    _words: Vec<u8>,
    parts: IovecQueue,
}

/// A frame whose reply has not fully arrived.
struct AwaitedReply {
    batch: u64,
    frame: u64,
    bytes: u64,
    /// The part of `bytes` that comes with the reply.
    coming: u64,
    into: IovecQueue,
}

/// One stream with its frames in flight.
pub(super) struct FrameStream {
    link: SecureStream,
    inbox: ReceiveBuffer,
    going: Option<Going>,
    awaited: VecDeque<AwaitedReply>,
    /// Whether the `FrameReply` of the first awaited frame has arrived.
    answered: bool,
    frames: u64,
    /// Bytes of all awaited frames.
    bytes: u64,
    /// The part of `bytes` that comes with replies.
    coming: u64,
    window_bytes: u64,
    /// Whether the socket accepts no more for now.
    full: bool,
    /// Whether the thread that waits for the stream knows this.
    watched: bool,
}

/// Maximum read data in flight without a waiting reader. The initial receive buffer holds it (128 KiB on
/// Linux, half of which is overhead), so the owner is not stalled.
const COMING_BYTES_MAX: u64 = 64 * 1024;

/// Offset of the frame number in a header.
const FRAME_AT: usize = 8;
/// Size of the buffer that receives the data of cancelled reads.
const DISCARD_BYTES: usize = 64 * 1024;

impl FrameStream {
    /// Wraps `link`, which no longer blocks and has completed its hello.
    pub(super) fn new(link: SecureStream, inbox: ReceiveBuffer, window_bytes: u64) -> Self {
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

    /// Returns what to wait for.
    pub(super) fn poll_entry(&self) -> libc::pollfd {
        let events = if self.full { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
        libc::pollfd { events, ..crate::poll::readable(self.link.socket()) }
    }

    /// Notes that a thread is about to wait for [`poll_entry`](Self::poll_entry).
    pub(super) fn watch(&mut self) {
        self.watched = self.full;
    }

    /// Whether it has become full since [`watch`](Self::watch).
    pub(super) fn is_unwatched(&self) -> bool {
        self.full && !self.watched
    }

    /// Whether something is left to move, apart from the short replies to writes.
    pub(super) fn goes_on(&self) -> bool {
        self.going.is_some() || self.coming > COMING_BYTES_MAX
    }

    /// Notes that the socket accepts data again.
    pub(super) fn has_room(&mut self) {
        self.full = false;
    }

    /// Sends frames of `queue` until the socket is full or one frame has been sent, and returns whether it
    /// could send more.
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
        self.awaited.push_back(AwaitedReply {
            batch: frame.batch,
            frame: self.frames,
            bytes,
            coming,
            into: frame.into,
        });
        self.bytes += bytes;
        self.coming += coming;
        self.frames += 1;
        self.assert_window();
        let mut parts = IovecQueue::default();
        parts.push(frame.words.as_mut_ptr(), frame.words.len() as u64);
        parts.append(frame.payload);
        self.going = Some(Going { _words: frame.words, parts });
    }

    /// Receives the bytes that have arrived, and calls `landed` with the batch of each complete frame.
    pub(super) fn receive(&mut self, landed: &mut dyn FnMut(u64)) -> io::Result<()> {
        match self.receive_all(landed) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }

    fn receive_all(&mut self, landed: &mut dyn FnMut(u64)) -> io::Result<()> {
        loop {
            if !self.answered {
                let done = FrameReply::decode(&self.inbox.take(&mut self.link)?);
                let expected = self.awaited.front().map(|awaited| awaited.frame);
                match done {
                    Some(FrameReply { refused: false, frame }) if Some(frame) == expected => {
                        self.answered = true
                    }
                    Some(FrameReply { refused: true, .. }) => {
                        return Err(broken("the owner refused a frame"));
                    }
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
            self.assert_window();
        }
    }

    /// Asserts that the bytes in flight fit into the window, unless they are one long frame, and that all of
    /// them are answered in the end.
    fn assert_window(&self) {
        let Self { bytes, coming, window_bytes, awaited, .. } = self;
        debug_assert!(
            bytes <= window_bytes || awaited.len() == 1,
            "{bytes} bytes in flight in a window of {window_bytes}"
        );
        debug_assert!(!awaited.is_empty() || (*bytes, *coming) == (0, 0), "{bytes} bytes have no answer");
    }

    /// Discards the data of a batch that is still to arrive.
    pub(super) fn discard(&mut self, batch: u64, nowhere: &mut Vec<u8>) {
        for awaited in self.awaited.iter_mut().filter(|awaited| awaited.batch == batch) {
            nowhere.resize(DISCARD_BYTES, 0);
            let mut left = awaited.into.bytes();
            awaited.into = IovecQueue::default();
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
