//! The active end of a connection: cuts batches into frames and sends frames over streams.

use super::inbox::ReceiveBuffer;
use super::parts::IovecQueue;
use super::protocol::{FrameHeader, PAYLOAD_BYTES_MAX, RANGES_MAX, Range, TcpHello, Welcome};
use super::serve::say;
use super::stream::{Frame, FrameStream};
use super::{TcpAddress, TcpConfig};
use crate::answer::GrantStatus;
use crate::one_sided::{Batches, Carrier, Direction, OneSided, Reach};
use crate::pinned::PinnedRange;
use crate::poll;
use crate::stream::SecureStream;
use mixfleet_hal::cast::to_u16;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Piece, RemoteAccess};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection of several streams to one region; after opening, none of its calls blocks.
pub(super) struct TcpConnection {
    /// Dropped before `local`, which the streams hold addresses of.
    streams: Vec<FrameStream>,
    queue: VecDeque<Frame>,
    /// Whether the background thread is waiting for the streams.
    watched: bool,
    nowhere: Vec<u8>,
    frame_bytes_max: u64,
    reach: Reach,
    local: PinnedRange,
}

fn closed(detail: String) -> Error {
    Error::new(ErrorKind::Closed, detail)
}

impl TcpConnection {
    pub(super) fn open(
        local: Arc<dyn SharedMemory>,
        config: &TcpConfig,
        address: &TcpAddress,
        region: &Descriptor,
    ) -> Result<OneSided<Self>> {
        let local = PinnedRange::new(local)?;
        for socket in &address.sockets {
            config.security.check(socket)?;
        }
        let (first, access) = open_stream(config, &address.sockets, address, region, 0)?;
        let reached = first.1;
        let mut streams = vec![first.0];
        for number in 1..config.streams {
            streams.push(open_stream(config, &[reached], address, region, number)?.0.0);
        }
        Ok(OneSided::new(TcpConnection {
            streams,
            queue: VecDeque::new(),
            watched: false,
            nowhere: Vec::new(),
            frame_bytes_max: config.frame_bytes_max.min(PAYLOAD_BYTES_MAX),
            reach: Reach { local_bytes: local.bytes(), remote_bytes: region.bytes, access },
            local,
        }))
    }

    fn frame(&self, batch: u64, direction: Direction, pieces: &[Piece]) -> Result<Frame> {
        let head = FrameHeader { direction, ranges: to_u16(pieces.len()), frame: 0 };
        let mut words = Vec::with_capacity(FrameHeader::BYTES + pieces.len() * Range::BYTES);
        words.extend(head.encode());
        let mut parts = IovecQueue::default();
        for piece in pieces {
            words.extend(Range { offset: piece.remote, bytes: piece.bytes }.encode());
            parts.push(self.local.address(piece.local, piece.bytes)?, piece.bytes);
        }
        let (payload, into) = match direction {
            Direction::Write => (parts, IovecQueue::default()),
            Direction::Read => (IovecQueue::default(), parts),
        };
        Ok(Frame { batch, words, payload, into })
    }

    /// Sends as much as the streams accept, one frame on each in turn.
    fn send(&mut self) -> Result<()> {
        loop {
            let mut moved = false;
            for at in 0..self.streams.len() {
                match self.streams[at].send_one(&mut self.queue) {
                    Ok(more) => moved |= more,
                    Err(error) => return Err(has_closed(&error)),
                }
            }
            if !moved {
                return Ok(());
            }
        }
    }

    /// Returns what to poll for before calling [`moved`](Self::moved).
    pub(super) fn entries(&self) -> Vec<libc::pollfd> {
        self.streams.iter().map(FrameStream::poll_entry).collect()
    }

    /// Returns [`entries`](Self::entries) for the background thread, which is about to wait for them; empty
    /// if nothing is left to move or `moves` says that it is not the thread's turn.
    pub(super) fn watched(&mut self, moves: bool) -> Vec<libc::pollfd> {
        self.watched = moves && self.goes_on();
        if !self.watched {
            return Vec::new();
        }
        self.streams.iter_mut().for_each(FrameStream::watch);
        self.entries()
    }

    /// Whether work remains that would not progress by itself.
    fn goes_on(&self) -> bool {
        !self.queue.is_empty() || self.streams.iter().any(FrameStream::goes_on)
    }

    /// Whether the thread must re-examine the streams.
    pub(super) fn is_unwatched(&self) -> bool {
        self.goes_on() && (!self.watched || self.streams.iter().any(FrameStream::is_unwatched))
    }

    /// Handles the events in `entries`, which may be out of date; there is just less to move then.
    pub(super) fn moved(&mut self, entries: &[libc::pollfd], batches: &mut Batches) -> Result<()> {
        for (stream, entry) in self.streams.iter_mut().zip(entries) {
            if entry.revents & libc::POLLOUT != 0 {
                stream.has_room();
            }
            if entry.revents & !libc::POLLOUT != 0 {
                stream.receive(&mut |batch| batches.landed(batch, 1)).map_err(|error| has_closed(&error))?;
            }
        }
        self.send()
    }
}

/// The error that breaks a connection.
pub(super) fn has_closed(error: &io::Error) -> Error {
    closed(format!("the connection to the region has closed: {error}"))
}

impl Carrier for TcpConnection {
    fn reach(&self) -> Reach {
        self.reach
    }

    /// Sends as much of the batch as the streams accept.
    fn begin(&mut self, batch: u64, pieces: &[Piece], direction: Direction) -> Result<u64> {
        let frames = cut(pieces, self.frame_bytes_max);
        for pieces in &frames {
            let frame = self.frame(batch, direction, pieces)?;
            self.queue.push_back(frame);
        }
        self.send()?;
        Ok(frames.len() as u64)
    }

    fn progress(&mut self, batches: &mut Batches) -> Result<()> {
        let mut entries = self.entries();
        poll::wait(&mut entries, Some(Duration::ZERO)).map_err(|error| has_closed(&error))?;
        self.moved(&entries, batches)
    }

    /// Read data that still arrives goes nowhere.
    fn discard(&mut self, batch: u64) {
        self.queue.retain(|frame| frame.batch != batch);
        for stream in &mut self.streams {
            stream.discard(batch, &mut self.nowhere);
        }
    }

    fn close(&mut self) {
        self.streams.clear();
        self.queue.clear();
    }
}

/// Cuts a batch into frames, combining short pieces and splitting long ones.
fn cut(pieces: &[Piece], frame_bytes_max: u64) -> Vec<Vec<Piece>> {
    let mut frames: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for piece in pieces.iter().filter(|piece| piece.bytes > 0) {
        let mut rest = *piece;
        while rest.bytes > 0 {
            if room == 0 || frames.last().is_none_or(|frame| frame.len() == RANGES_MAX) {
                frames.push(Vec::new());
                room = frame_bytes_max;
            }
            let bytes = rest.bytes.min(room);
            if let Some(frame) = frames.last_mut() {
                frame.push(Piece { bytes, ..rest });
            }
            room -= bytes;
            rest =
                Piece { local: rest.local + bytes, remote: rest.remote + bytes, bytes: rest.bytes - bytes };
        }
    }
    frames
}

/// Opens stream `number` to the first address that answers, and returns it with that address and the granted
/// access.
fn open_stream(
    config: &TcpConfig,
    sockets: &[SocketAddr],
    address: &TcpAddress,
    region: &Descriptor,
    number: u16,
) -> Result<((FrameStream, SocketAddr), RemoteAccess)> {
    let mut last = closed("the descriptor has no address".into());
    for &socket in sockets {
        let deadline = Instant::now() + config.connect_timeout;
        match greet(config, socket, &address.hello(region, number), deadline) {
            Ok((link, inbox, welcome)) => {
                let refused = || closed(format!("{socket} answers what this end does not know"));
                let access = GrantStatus::decode(welcome.answer).ok_or_else(refused)?.access(region)?;
                if welcome.bytes != region.bytes {
                    return Err(closed(format!(
                        "the region at {socket} has {} bytes, not the {} that its descriptor says",
                        welcome.bytes, region.bytes
                    )));
                }
                return Ok(((FrameStream::new(link, inbox, config.window_bytes), socket), access));
            }
            Err(error) => last = closed(format!("the owner of {region:?} at {socket}: {error}")),
        }
    }
    Err(last)
}

fn greet(
    config: &TcpConfig,
    socket: SocketAddr,
    hello: &TcpHello,
    deadline: Instant,
) -> io::Result<(SecureStream, ReceiveBuffer, Welcome)> {
    let mut link = config.security.call(socket, config.silence, deadline)?;
    say(&mut link, &hello.encode())?;
    let mut inbox = ReceiveBuffer::new();
    let welcome = Welcome::decode(&inbox.take_by(&mut link, deadline)?);
    link.socket().set_nonblocking(true)?;
    Ok((link, inbox, welcome))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_are_the_batch_cut_up(lengths in prop::collection::vec(0u64..3000, 0..1200), most in 1u64..2000) {
            let mut at = 0;
            let pieces: Vec<Piece> = lengths.iter().map(|&bytes| {
                at += bytes;
                Piece { local: at - bytes, remote: 2 * at - bytes, bytes }
            }).collect();
            let frames = cut(&pieces, most);
            for frame in &frames {
                let bytes: u64 = frame.iter().map(|piece| piece.bytes).sum();
                prop_assert!(bytes > 0 && bytes <= most && frame.len() <= RANGES_MAX);
            }
            // adjacent pieces joined again
            let mut joined: Vec<Piece> = Vec::new();
            for piece in frames.into_iter().flatten() {
                match joined.last_mut() {
                    Some(last) if last.local + last.bytes == piece.local && last.remote + last.bytes == piece.remote =>
                        last.bytes += piece.bytes,
                    _ => joined.push(piece),
                }
            }
            let whole: Vec<Piece> = pieces.into_iter().filter(|piece| piece.bytes > 0).collect();
            prop_assert_eq!(joined, whole);
        }
    }
}
