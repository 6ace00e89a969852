//! A connection of bytes by one-sided writes over RDMA.
//!
//! Each end owns a ring of memory into which the other writes. A write is followed by an immediate value that
//! says how many bytes it was, and bytes that were read are given back by an immediate value without data. A
//! receiver looks at its completion queue for a while before it sleeps on it. The ends meet over a socket,
//! which stays open: its end is the connection's.
//!
//! What the peer says is used only after it was compared with the ring's length, and what it writes only
//! after it was copied. Nothing that crosses is encrypted.

use super::offer::{ConnectReply, ConnectRequest};
use super::{Accepted, Verbs, VerbsEndpoint, VerbsOptions, key};
use crate::key::RegionKey;
use crate::pipe::Pipe;
use crate::poll;
use crate::region::HostRegion;
use crate::ring::{self, RING_BYTES, Ring, between};
use crate::stream::{SecureStream, remaining};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, TransferId, Transport};
use mixfleet_hal::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes after which the receiver is notified, so that it copies them out while more are written.
const TOLD_BYTES: usize = 64 << 10;
/// Writes that the peer has not given back yet: it posts 64 receives, and notices of read bytes need some of
/// them.
const WRITES_MAX: u32 = 32;
/// Bytes, and writes, after which they are given back.
const GIVEN_BYTES: u64 = RING_BYTES as u64 / 4;
const GIVEN_WRITES: u32 = WRITES_MAX / 4;
/// Marks a give-back: below it the number of writes, and in the lower 20 bits that of bytes.
const GIVEN: u32 = 1 << 31;
const GIVEN_SHIFT: u32 = 20;
/// Maximum length of a line of the rendezvous.
const LINE_BYTES: usize = 256 << 10;
/// Drain timeout before reporting the end of the stream to the peer.
const LAST: Duration = Duration::from_secs(1);

/// A line of the rendezvous.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RdmaLine {
    /// The ring into which the other end writes.
    Ring(Descriptor),
    Offer(ConnectRequest),
    Answer(ConnectReply),
    /// There is no RDMA between the ends, for this reason.
    Refused(String),
}

/// One end of such a connection.
pub(crate) struct VerbsPipe {
    // dropped in this order: writes end before the memory is released
    sending: Mutex<PipeSender>,
    _accepted: Accepted,
    reading: Mutex<PipeReader>,
    verbs: Verbs,
    key: RegionKey,
    epoch: u64,
    ring: Arc<HostRegion>,
    stream: Mutex<SecureStream>,
    socket: TcpStream,
    /// Bytes that have arrived, and the writes that brought them since they were last given back.
    arrived: AtomicU64,
    writes: AtomicU32,
    /// Bytes and writes that the peer has given back.
    given_bytes: AtomicU64,
    given_writes: AtomicU64,
    is_closed: AtomicBool,
}

struct PipeSender {
    endpoint: VerbsEndpoint,
    staged: Arc<HostRegion>,
    /// Bytes, and writes, so far.
    written: u64,
    writes: u64,
    flying: VecDeque<TransferId>,
}

struct PipeReader {
    /// Bytes so far, and how many of them were not given back.
    read: u64,
    owed: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn other(error: Error) -> io::Error {
    let kind = if error.kind == ErrorKind::Closed { IoKind::BrokenPipe } else { IoKind::Other };
    io::Error::new(kind, error.to_string())
}

fn unfit(detail: String) -> io::Error {
    io::Error::new(IoKind::InvalidData, detail)
}

/// Lines over a socket.
struct SocketLines {
    stream: SecureStream,
    came: Vec<u8>,
    deadline: Instant,
}

impl SocketLines {
    fn send(&mut self, line: &RdmaLine) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.stream.socket().set_write_timeout(Some(remaining(self.deadline)?))?;
        self.stream.write_all(&text)?;
        self.stream.flush()
    }

    fn receive(&mut self) -> io::Result<RdmaLine> {
        let end = loop {
            if let Some(end) = self.came.iter().position(|byte| *byte == b'\n') {
                break end;
            }
            if self.came.len() > LINE_BYTES {
                return Err(unfit("the line by which RDMA is offered is too long".into()));
            }
            self.stream.socket().set_read_timeout(Some(remaining(self.deadline)?))?;
            let mut some = [0; 4096];
            match self.stream.read(&mut some) {
                Ok(0) => return Err(IoKind::UnexpectedEof.into()),
                Ok(count) => self.came.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == IoKind::Interrupted => {}
                Err(error) if error.kind() == IoKind::WouldBlock => return Err(IoKind::TimedOut.into()),
                Err(error) => return Err(error),
            }
        };
        let line = self.came.drain(..=end).collect::<Vec<u8>>();
        match serde_json::from_slice(&line).map_err(|error| unfit(format!("no offer of RDMA: {error}")))? {
            RdmaLine::Refused(why) => Err(io::Error::other(format!("the peer says: {why}"))),
            line => Ok(line),
        }
    }

    /// Takes what this end has come to; tells the peer why there is nothing.
    fn or_refuse<T>(&mut self, found: Result<T, String>) -> io::Result<T> {
        found.map_err(|why| {
            // the peer may have gone already
            let _ = self.send(&RdmaLine::Refused(why.clone()));
            io::Error::other(why)
        })
    }
}

/// The options of each end: one queue pair, since there is no order between several.
fn options() -> VerbsOptions {
    VerbsOptions { queue_pairs: 1, ..VerbsOptions::default() }
}

impl VerbsPipe {
    /// Whether this host could be an end.
    ///
    /// # Errors
    /// Why it has no RDMA.
    pub(crate) fn check() -> io::Result<()> {
        Verbs::open(options()).map(drop).map_err(|absent| io::Error::other(absent.reason))
    }

    /// Meets the other end, which does the same, over `stream` until `deadline`.
    pub(crate) fn meet(stream: SecureStream, deadline: Instant) -> io::Result<Self> {
        let mut lines = SocketLines { stream, came: Vec::new(), deadline };
        let verbs = lines.or_refuse(Verbs::open(options()).map_err(|absent| absent.reason))?;
        let memory = || HostRegion::new(RING_BYTES).map(Arc::new).map_err(|error| error.to_string());
        let (ring, staged) = (lines.or_refuse(memory())?, lines.or_refuse(memory())?);
        let own = verbs.register(ring.clone(), RemoteAccess::Write).map_err(|error| error.to_string());
        let own = lines.or_refuse(own)?;
        lines.send(&RdmaLine::Ring(own.clone()))?;
        let unexpected = || unfit("another line of the offer of RDMA was expected".into());
        let RdmaLine::Ring(theirs) = lines.receive()? else { return Err(unexpected()) };
        if theirs.bytes != to_u64(RING_BYTES) {
            let detail = format!("the peer has a ring of {} bytes: run one release on both", theirs.bytes);
            return Err(unfit(detail));
        }
        let half = verbs.open_half(staged.clone(), &theirs).map_err(|error| error.to_string());
        let mut half = lines.or_refuse(half)?;
        // of one NIC, for the same reason
        half.halves.truncate(1);
        half.offer.rails.truncate(1);
        lines.send(&RdmaLine::Offer(half.offer.clone()))?;
        let RdmaLine::Offer(offer) = lines.receive()? else { return Err(unexpected()) };
        let accepted = verbs.accept(&offer).map_err(|error| error.to_string());
        let (answer, accepted) = lines.or_refuse(accepted)?;
        lines.send(&RdmaLine::Answer(answer))?;
        let RdmaLine::Answer(answer) = lines.receive()? else { return Err(unexpected()) };
        let endpoint = half.join(&answer).map_err(other)?;
        let stream = lines.stream;
        let socket = stream.socket().try_clone()?;
        socket.set_nonblocking(true)?;
        Ok(VerbsPipe {
            sending: Mutex::new(PipeSender {
                endpoint,
                staged,
                written: 0,
                writes: 0,
                flying: VecDeque::new(),
            }),
            _accepted: accepted,
            reading: Mutex::new(PipeReader { read: 0, owed: 0 }),
            key: key(&own).map_err(other)?,
            epoch: own.epoch,
            verbs,
            ring,
            stream: Mutex::new(stream),
            socket,
            arrived: AtomicU64::new(0),
            writes: AtomicU32::new(0),
            given_bytes: AtomicU64::new(0),
            given_writes: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Processes the peer's notices.
    fn take_notices(&self) -> io::Result<()> {
        while let Some(notice) = self.verbs.owner.notice(self.key, self.epoch).map_err(other)? {
            if notice & GIVEN == 0 {
                self.arrived.fetch_add(notice.into(), Ordering::AcqRel);
                self.writes.fetch_add(1, Ordering::AcqRel);
            } else {
                let (bytes, writes) = (notice & ((1 << GIVEN_SHIFT) - 1), (notice & !GIVEN) >> GIVEN_SHIFT);
                self.given_bytes.fetch_add(bytes.into(), Ordering::AcqRel);
                self.given_writes.fetch_add(writes.into(), Ordering::AcqRel);
            }
        }
        Ok(())
    }

    /// Room in the peer's ring; none while the peer has not given back enough writes.
    fn room_of(&self, sending: &PipeSender) -> io::Result<usize> {
        let used = between(sending.written, self.given_bytes.load(Ordering::Acquire))?;
        let writes = sending.writes.wrapping_sub(self.given_writes.load(Ordering::Acquire));
        if writes > u64::from(WRITES_MAX) {
            return Err(unfit("the peer gives back writes that there were not".into()));
        }
        Ok(if writes == u64::from(WRITES_MAX) { 0 } else { RING_BYTES - used })
    }

    fn here(&self, reading: &PipeReader) -> io::Result<usize> {
        between(self.arrived.load(Ordering::Acquire), reading.read)
    }

    /// Whether the peer sends no more.
    fn is_ended(&self) -> io::Result<bool> {
        match lock(&self.stream).read(&mut [0; 64]) {
            Ok(0) => Ok(true),
            Ok(_) => Err(unfit("bytes on the socket beside RDMA".into())),
            Err(error) if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => Ok(false),
            Err(error) if matches!(error.kind(), IoKind::ConnectionReset | IoKind::UnexpectedEof) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Gives back the bytes and writes that were read, once there are enough of either.
    fn give_back(&self, reading: &mut PipeReader) -> io::Result<()> {
        if reading.owed < GIVEN_BYTES && self.writes.load(Ordering::Acquire) < GIVEN_WRITES {
            return Ok(());
        }
        let (bytes, writes) = (to_u32(reading.owed), self.writes.swap(0, Ordering::AcqRel));
        reading.owed = 0;
        let notice = GIVEN | writes << GIVEN_SHIFT | bytes;
        lock(&self.sending).post(&[], notice)
    }
}

impl PipeSender {
    fn post(&mut self, pieces: &[Piece], notice: u32) -> io::Result<()> {
        let transfer = self.endpoint.write_with_immediate(pieces, notice).map_err(other)?;
        self.flying.push_back(transfer);
        self.settle(Duration::ZERO)
    }

    /// Forgets writes that are done, waiting at most so long for each.
    fn settle(&mut self, longest: Duration) -> io::Result<()> {
        while let Some(&first) = self.flying.front() {
            match self.endpoint.wait(first, longest) {
                Ok(()) => self.flying.pop_front(),
                Err(error) if error.kind == ErrorKind::Timeout => return Ok(()),
                Err(error) => return Err(other(error)),
            };
        }
        Ok(())
    }

    /// Copies what fits of `parts` behind each other to where it is sent from, at most `room` bytes.
    fn stage(&self, parts: &mut [&[u8]], room: usize) -> io::Result<usize> {
        let mut staged = 0;
        for part in parts {
            let (now, later) = part.split_at(part.len().min(room - staged));
            *part = later;
            let mut stored = Ok(());
            ring::parts(self.written.wrapping_add(to_u64(staged)), now.len(), |at, from, bytes| {
                if stored.is_ok() {
                    stored = self.staged.store(to_u64(at), &now[from..from + bytes]);
                }
            });
            stored.map_err(other)?;
            staged += now.len();
        }
        Ok(staged)
    }
}

impl Ring for VerbsPipe {
    fn room(&self) -> io::Result<usize> {
        self.take_notices()?;
        let mut sending = lock(&self.sending);
        sending.settle(Duration::ZERO)?;
        self.room_of(&sending)
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Pipe for VerbsPipe {
    fn send(&self, parts: &[&[u8]]) -> io::Result<usize> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(IoKind::BrokenPipe.into());
        }
        let mut left = parts.to_vec();
        let mut sending = lock(&self.sending);
        let mut sent = 0;
        while left.iter().any(|part| !part.is_empty()) {
            let mut room = self.room_of(&sending)?;
            if room == 0 {
                self.take_notices()?;
                room = self.room_of(&sending)?;
            }
            let bytes = sending.stage(&mut left, room.min(TOLD_BYTES))?;
            if bytes == 0 {
                break;
            }
            let mut pieces = Vec::with_capacity(2);
            ring::parts(sending.written, bytes, |at, _, bytes| {
                pieces.push(Piece { local: to_u64(at), remote: to_u64(at), bytes: to_u64(bytes) });
            });
            sending.post(&pieces, to_u32(bytes))?;
            sending.written = sending.written.wrapping_add(to_u64(bytes));
            sending.writes = sending.writes.wrapping_add(1);
            sent += bytes;
        }
        let is_empty = parts.iter().all(|part| part.is_empty());
        if sent == 0 && !is_empty { Err(IoKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn receive(&self, place: &mut [u8]) -> io::Result<usize> {
        let mut reading = lock(&self.reading);
        let mut here = self.here(&reading)?;
        if here == 0 {
            self.take_notices()?;
            here = self.here(&reading)?;
        }
        if here == 0 {
            if !self.is_ended()? {
                return Err(IoKind::WouldBlock.into());
            }
            // what it wrote before its end
            self.take_notices()?;
            here = self.here(&reading)?;
        }
        let bytes = here.min(place.len());
        let mut loaded = Ok(());
        ring::parts(reading.read, bytes, |at, to, bytes| {
            if loaded.is_ok() {
                loaded = self.ring.load(to_u64(at), &mut place[to..to + bytes]);
            }
        });
        loaded.map_err(other)?;
        reading.read = reading.read.wrapping_add(to_u64(bytes));
        reading.owed += to_u64(bytes);
        // an end that has closed takes nothing back
        if let Err(error) = self.give_back(&mut reading)
            && !self.is_ended()?
        {
            return Err(error);
        }
        Ok(bytes)
    }

    fn has_bytes(&self) -> io::Result<bool> {
        self.take_notices()?;
        Ok(self.arrived.load(Ordering::Acquire) != lock(&self.reading).read)
    }

    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let (channels, fds) = self.verbs.owner.arm(self.key, self.epoch).map_err(other)?;
        let mut entries: Vec<libc::pollfd> = fds.iter().map(poll::readable).collect();
        entries.push(poll::readable(&self.socket));
        // completions before the queue was armed raise no event
        if !self.has_bytes()? {
            poll::wait(&mut entries, timeout)?;
        }
        channels.iter().for_each(|channel| channel.drain());
        let is_ended = entries.last().is_some_and(|socket| socket.revents != 0);
        Ok(is_ended || self.has_bytes()?)
    }

    fn wait_to_send(&self, meanwhile: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<()> {
        ring::wait_to_send(self, meanwhile)
    }

    fn end_sending(&self) {
        // a failure is the peer's end
        let _ = lock(&self.sending).settle(LAST);
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
