//! The active end of a connection: cuts batches into frames and sends frames over streams.

use super::inbox::Inbox;
use super::parts::Parts;
use super::protocol::{Head, PAYLOAD_BYTES_MAX, RANGES_MAX, Range, TcpHello, Verb, Welcome};
use super::serve::say;
use super::stream::{Frame, FrameStream};
use super::{Address, TcpConfig};
use crate::answer::GrantStatus;
use crate::batches::not_open;
use crate::memory::check;
use crate::pinned::PinnedRange;
use crate::poll;
use crate::stream::SecureStream;
use mixfleet_hal::cast::to_u16;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Piece, RemoteAccess, TransferId};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A connection of several streams to one region; after opening, none of its calls blocks.
pub(super) struct TcpConnection {
    /// Dropped before `local`, which the streams hold addresses of.
    streams: Vec<FrameStream>,
    queue: VecDeque<Frame>,
    /// For each batch neither waited for nor cancelled: the number of frames that have not landed.
    open: BTreeMap<u64, u64>,
    next: u64,
    broken: Option<Error>,
    /// Whether the background thread is waiting for the streams.
    watched: bool,
    nowhere: Vec<u8>,
    frame_bytes_max: u64,
    bytes: u64,
    access: RemoteAccess,
    local: PinnedRange,
}

fn closed(detail: String) -> Error {
    Error::new(ErrorKind::Closed, detail)
}

impl TcpConnection {
    pub(super) fn open(
        local: Arc<dyn SharedMemory>,
        config: &TcpConfig,
        address: &Address,
        region: &Descriptor,
    ) -> Result<Self> {
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
        Ok(TcpConnection {
            streams,
            queue: VecDeque::new(),
            open: BTreeMap::new(),
            next: 0,
            broken: None,
            watched: false,
            nowhere: Vec::new(),
            frame_bytes_max: config.frame_bytes_max.min(PAYLOAD_BYTES_MAX),
            bytes: region.bytes,
            access,
            local,
        })
    }

    /// Starts a batch and sends as much of it as the streams accept.
    pub(super) fn begin(&mut self, pieces: &[Piece], verb: Verb) -> Result<TransferId> {
        self.look()?;
        let allowed = match verb {
            Verb::Write => self.access.may_write(),
            Verb::Read => self.access.may_read(),
        };
        if !allowed && !pieces.is_empty() {
            return Err(Error::invalid(format!("the region was registered for {:?}", self.access)));
        }
        check(pieces, self.local.bytes(), self.bytes)?;
        let batch = self.next;
        self.next += 1;
        let frames = cut(pieces, self.frame_bytes_max);
        self.open.insert(batch, frames.len() as u64);
        for pieces in frames {
            let frame = self.frame(batch, verb, &pieces)?;
            self.queue.push_back(frame);
        }
        self.send()?;
        Ok(TransferId(batch))
    }

    fn frame(&self, batch: u64, verb: Verb, pieces: &[Piece]) -> Result<Frame> {
        let head = Head { verb, ranges: to_u16(pieces.len()), frame: 0 };
        let mut words = Vec::with_capacity(Head::BYTES + pieces.len() * Range::BYTES);
        words.extend(head.encode());
        let mut parts = Parts::default();
        for piece in pieces {
            words.extend(Range { offset: piece.remote, bytes: piece.bytes }.encode());
            parts.push(self.local.address(piece.local, piece.bytes)?, piece.bytes);
        }
        let (payload, into) = match verb {
            Verb::Write => (parts, Parts::default()),
            Verb::Read => (Parts::default(), parts),
        };
        Ok(Frame { batch, words, payload, into })
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Breaks the connection with an error that every later call repeats.
    pub(super) fn broke(&mut self, error: &io::Error) -> Error {
        let error = closed(format!("the connection to the region has closed: {error}"));
        self.broken = Some(error.clone());
        self.streams.clear();
        self.queue.clear();
        error
    }

    /// Sends as much as the streams accept, one frame on each in turn.
    fn send(&mut self) -> Result<()> {
        loop {
            let mut moved = false;
            for at in 0..self.streams.len() {
                match self.streams[at].send_one(&mut self.queue) {
                    Ok(more) => moved |= more,
                    Err(error) => return Err(self.broke(&error)),
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

    /// Moves whatever can be moved without waiting.
    pub(super) fn look(&mut self) -> Result<()> {
        let mut entries = self.entries();
        if let Err(error) = poll::wait(&mut entries, Some(Duration::ZERO)) {
            return Err(self.broke(&error));
        }
        self.moved(&entries)
    }

    /// Handles the events in `entries`, which may be out of date; there is just less to move then.
    pub(super) fn moved(&mut self, entries: &[libc::pollfd]) -> Result<()> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        for (at, entry) in entries.iter().enumerate() {
            if entry.revents & libc::POLLOUT != 0 {
                self.streams[at].has_room();
            }
            if entry.revents & !libc::POLLOUT != 0 {
                let open = &mut self.open;
                let mut landed = |batch| {
                    if let Some(left) = open.get_mut(&batch) {
                        *left -= 1;
                    }
                };
                if let Err(error) = self.streams[at].receive(&mut landed) {
                    return Err(self.broke(&error));
                }
            }
        }
        self.send()
    }

    /// Whether the outcome of a batch is available.
    pub(super) fn is_over(&self, transfer: TransferId) -> bool {
        self.broken.is_some() || self.open.get(&transfer.0).is_none_or(|&left| left == 0)
    }

    /// Takes the outcome of a batch that completed, failed or is unknown; `None` while it is in flight.
    pub(super) fn take_outcome(&mut self, transfer: TransferId) -> Option<Result<()>> {
        if !self.is_over(transfer) {
            return None;
        }
        Some(match (self.open.remove(&transfer.0), &self.broken) {
            (None, _) => Err(not_open(transfer, self.next)),
            // what landed before the connection broke has landed
            (Some(0), _) | (Some(_), None) => Ok(()),
            (Some(_), Some(error)) => Err(error.clone()),
        })
    }

    /// Cancels a batch: frames that have not started are not sent, and read data that still arrives is
    /// discarded.
    pub(super) fn give_up(&mut self, transfer: TransferId) -> Result<()> {
        if self.open.remove(&transfer.0).is_some() {
            self.queue.retain(|frame| frame.batch != transfer.0);
            for stream in &mut self.streams {
                stream.discard(transfer.0, &mut self.nowhere);
            }
        }
        match &self.broken {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
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
    address: &Address,
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
) -> io::Result<(SecureStream, Inbox, Welcome)> {
    let mut link = config.security.call(socket, config.silence, deadline)?;
    say(&mut link, &hello.encode())?;
    let mut inbox = Inbox::new();
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
