//! A connection between two processes of one user whose bytes go through pages that both have mapped.
//!
//! The pages hold a ring for each direction, with the numbers of bytes that were written and read so far. A
//! sender never sleeps on them; a receiver sleeps on the Unix socket over which the pages came, having said
//! so in the pages, and is then sent a byte. The socket's end is the connection's.
//!
//! What the peer puts into the pages is used only after it was copied and compared with the ring's length.

use super::hello::{is_sealed, receive_answer, send_answer, user_of};
use crate::answer::GrantStatus;
use crate::pipe::Pipe;
use crate::poll;
use crate::region::nameless_file;
use crate::ring::{self, RING_BYTES, Ring, between};
use mixfleet_hal::cast::to_u64;
use std::fs::File;
use std::io::{self, ErrorKind as IoKind};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes after which the receiver is notified, so that it copies them out while more are written.
const TOLD_BYTES: usize = 32 << 10;

/// What the pages begin with; changes with their meaning.
const MAGIC: u64 = u64::from_le_bytes(*b"mfpipe\0\x01");
/// The counters of both directions, each on its own cache line, come before the rings.
const WORDS_BYTES: usize = 4096;
const LINE_BYTES: usize = 64;
const PAGES_BYTES: usize = WORDS_BYTES + 2 * RING_BYTES;

/// One end of such a connection.
pub(crate) struct SharedPipe {
    map: memmap2::MmapRaw,
    socket: UnixStream,
    /// The number of the ring into which this end writes: 0 for the one that was called.
    own: usize,
    /// Bytes that this end has written, and read, so far.
    written: Mutex<u64>,
    read: Mutex<u64>,
    is_closed: AtomicBool,
}

/// A ring in the shared pages.
struct RingPages<'a> {
    map: &'a memmap2::MmapRaw,
    which: usize,
}

impl RingPages<'_> {
    fn line(&self, line: usize) -> *mut u8 {
        // SAFETY: the fourth and last line of the second ring is far from the end of the words.
        unsafe { self.map.as_mut_ptr().add((1 + 3 * self.which + line) * LINE_BYTES) }
    }

    fn written(&self) -> &AtomicU64 {
        // SAFETY: the counter is inside the pages, aligned, and both processes access it only as an atomic.
        unsafe { AtomicU64::from_ptr(self.line(0).cast()) }
    }

    fn read(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.line(1).cast()) }
    }

    /// 1 while the receiver sleeps, or is about to.
    fn sleeps(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.line(2).cast()) }
    }

    /// Copies `bytes` bytes that begin with the ring's `number`th one, in one or two parts; `copy` is given
    /// where a part is, where it is in the whole, and its length.
    fn parts(&self, number: u64, bytes: usize, mut copy: impl FnMut(*mut u8, usize, usize)) {
        // SAFETY: both rings lie behind the words, and a part ends with its ring.
        let begin = unsafe { self.map.as_mut_ptr().add(WORDS_BYTES + self.which * RING_BYTES) };
        // SAFETY: as above.
        ring::parts(number, bytes, |at, place, bytes| copy(unsafe { begin.add(at) }, place, bytes));
    }
}

fn lock(count: &Mutex<u64>) -> MutexGuard<'_, u64> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}

fn other_user() -> io::Error {
    io::Error::new(IoKind::PermissionDenied, "the process at the other end is of another user")
}

/// Whether the peer is a process of this process's user.
fn is_own_user(socket: &UnixStream) -> io::Result<bool> {
    // SAFETY: only returns a number.
    Ok(user_of(socket)? == unsafe { libc::geteuid() })
}

fn map(file: &File) -> io::Result<memmap2::MmapRaw> {
    memmap2::MmapOptions::new().len(PAGES_BYTES).map_raw(file)
}

impl SharedPipe {
    /// The end of the process that was called on `socket`.
    pub(crate) fn welcome(socket: UnixStream) -> io::Result<Self> {
        if !is_own_user(&socket)? {
            let _ = send_answer(&socket, GrantStatus::Unknown, &[]);
            return Err(other_user());
        }
        let file = nameless_file(PAGES_BYTES as u64)?.ok_or(IoKind::Unsupported)?;
        let map = map(&file)?;
        // SAFETY: the first counter of the pages, which are not shared yet.
        unsafe { map.as_mut_ptr().cast::<u64>().write(MAGIC) };
        send_answer(&socket, GrantStatus::ReadWrite, &[file.as_raw_fd()])?;
        SharedPipe::new(map, socket, 0)
    }

    /// The end of the process that calls, which waits for the pages until `deadline`.
    pub(crate) fn call(socket: UnixStream, deadline: Instant) -> io::Result<Self> {
        if !is_own_user(&socket)? {
            return Err(other_user());
        }
        socket.set_read_timeout(Some(crate::stream::remaining(deadline)?))?;
        let (answer, files) = receive_answer(&socket)?;
        if answer != GrantStatus::ReadWrite {
            return Err(other_user());
        }
        let unfit = |detail: &str| io::Error::new(IoKind::InvalidData, detail.to_owned());
        let [file]: [File; 1] = files.try_into().map_err(|_| unfit("no pages came along"))?;
        if !is_sealed(file.as_raw_fd(), PAGES_BYTES as u64)? {
            return Err(unfit("the pages that came are too few, or could become so"));
        }
        let map = map(&file)?;
        // SAFETY: the first counter of the pages.
        if unsafe { map.as_ptr().cast::<u64>().read_volatile() } != MAGIC {
            return Err(unfit(
                "the pages that came have another layout: both processes must be of one release",
            ));
        }
        SharedPipe::new(map, socket, 1)
    }

    fn new(map: memmap2::MmapRaw, socket: UnixStream, own: usize) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let (written, read) = Default::default();
        Ok(SharedPipe { map, socket, own, written, read, is_closed: AtomicBool::new(false) })
    }

    fn outgoing(&self) -> RingPages<'_> {
        RingPages { map: &self.map, which: self.own }
    }

    fn incoming(&self) -> RingPages<'_> {
        RingPages { map: &self.map, which: 1 - self.own }
    }

    /// Publishes the number of written bytes to the receiver, and wakes it if it sleeps.
    fn tell(&self, ring: &RingPages<'_>, written: u64) -> io::Result<()> {
        ring.written().store(written, Ordering::Release);
        // either the receiver sees the written count before it sleeps, or its intent to sleep is seen here
        fence(Ordering::SeqCst);
        if ring.sleeps().load(Ordering::Relaxed) == 0 || ring.sleeps().swap(0, Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: an open socket and a place of one byte.
        if unsafe { libc::send(self.socket.as_raw_fd(), [0u8].as_ptr().cast(), 1, flags) } >= 0 {
            return Ok(());
        }
        match io::Error::last_os_error() {
            // it has bytes to wake up by
            error if error.kind() == IoKind::WouldBlock => Ok(()),
            error => Err(error),
        }
    }

    /// Takes the bytes that woke this end, and returns whether the peer sends no more.
    fn is_ended(&self) -> io::Result<bool> {
        let mut bytes = [0u8; 64];
        // SAFETY: an open socket and a place of the given length.
        let came = unsafe {
            libc::recv(self.socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
        };
        if came >= 0 {
            return Ok(came == 0);
        }
        match io::Error::last_os_error() {
            error if matches!(error.kind(), IoKind::WouldBlock | IoKind::Interrupted) => Ok(false),
            error if error.kind() == IoKind::ConnectionReset => Ok(true),
            error => Err(error),
        }
    }
}

impl Ring for SharedPipe {
    fn room(&self) -> io::Result<usize> {
        let used = between(*lock(&self.written), self.outgoing().read().load(Ordering::Acquire))?;
        Ok(RING_BYTES - used)
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Pipe for SharedPipe {
    fn send(&self, parts: &[&[u8]]) -> io::Result<usize> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Err(IoKind::BrokenPipe.into());
        }
        let ring = self.outgoing();
        let mut written = lock(&self.written);
        let (mut sent, mut untold) = (0, 0);
        'parts: for part in parts {
            let mut left = *part;
            while !left.is_empty() {
                let room = RING_BYTES - between(*written, ring.read().load(Ordering::Acquire))?;
                let (now, later) = left.split_at(left.len().min(room).min(TOLD_BYTES));
                if now.is_empty() {
                    break 'parts;
                }
                ring.parts(*written, now.len(), |to, from, bytes| {
                    // SAFETY: `bytes` bytes from `from` on are within `now`; those in the ring are not read
                    // before they are published. A peer that does so all the same sees bytes.
                    unsafe { std::ptr::copy_nonoverlapping(now.as_ptr().add(from), to, bytes) }
                });
                *written = written.wrapping_add(to_u64(now.len()));
                (sent, untold, left) = (sent + now.len(), untold + now.len(), later);
                if untold >= TOLD_BYTES {
                    self.tell(&ring, *written)?;
                    untold = 0;
                }
            }
        }
        if untold > 0 {
            self.tell(&ring, *written)?;
        }
        let is_empty = parts.iter().all(|part| part.is_empty());
        if sent == 0 && !is_empty { Err(IoKind::WouldBlock.into()) } else { Ok(sent) }
    }

    fn receive(&self, place: &mut [u8]) -> io::Result<usize> {
        let ring = self.incoming();
        let mut read = lock(&self.read);
        let mut here = between(ring.written().load(Ordering::Acquire), *read)?;
        if here == 0 {
            if !self.is_ended()? {
                return Err(IoKind::WouldBlock.into());
            }
            // what it wrote before its end
            here = between(ring.written().load(Ordering::Acquire), *read)?;
        }
        let bytes = here.min(place.len());
        ring.parts(*read, bytes, |from, to, bytes| {
            // SAFETY: `bytes` bytes from `to` on are within `place`. A peer that still writes there only
            // changes plain bytes, which have not been used yet.
            unsafe { std::ptr::copy_nonoverlapping(from, place.as_mut_ptr().add(to), bytes) }
        });
        *read = read.wrapping_add(to_u64(bytes));
        ring.read().store(*read, Ordering::Release);
        Ok(bytes)
    }

    fn has_bytes(&self) -> io::Result<bool> {
        Ok(self.incoming().written().load(Ordering::Acquire) != *lock(&self.read))
    }

    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let ring = self.incoming();
        ring.sleeps().store(1, Ordering::Relaxed);
        // as where the peer tells
        fence(Ordering::SeqCst);
        let mut entry = poll::readable(&self.socket);
        let slept = match self.has_bytes()? {
            true => Ok(()),
            false => poll::wait(std::slice::from_mut(&mut entry), timeout),
        };
        ring.sleeps().store(0, Ordering::Relaxed);
        slept?;
        Ok(entry.revents != 0 || self.has_bytes()?)
    }

    fn wait_to_send(&self, meanwhile: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<()> {
        ring::wait_to_send(self, meanwhile)
    }

    fn end_sending(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn pair() -> (SharedPipe, SharedPipe) {
        let (calling, called) = UnixStream::pair().unwrap();
        let called = SharedPipe::welcome(called).unwrap();
        (SharedPipe::call(calling, Instant::now() + LONG).unwrap(), called)
    }

    fn kind<T>(outcome: io::Result<T>) -> IoKind {
        outcome.err().expect("an error").kind()
    }

    #[test]
    fn bytes_come_in_order_around_the_end_of_a_ring_and_up_to_the_end() {
        let (a, b) = pair();
        let all: Vec<u8> = (0..3 * RING_BYTES as u32 + 17).map(|i| (i % 251) as u8).collect();
        let (mut sent, mut came) = (0, Vec::new());
        let mut place = vec![0; 100_003];
        while came.len() < all.len() {
            let (one, two) = all[sent..].split_at((all.len() - sent).min(7));
            sent += match a.send(&[one, b"", two]) {
                Ok(bytes) => bytes,
                Err(error) => {
                    assert_eq!(error.kind(), IoKind::WouldBlock);
                    0
                }
            };
            let bytes = b.receive(&mut place).unwrap();
            came.extend_from_slice(&place[..bytes]);
        }
        assert!(came == all);
        assert_eq!(kind(b.receive(&mut place)), IoKind::WouldBlock);
        a.send(&[b"last"]).unwrap();
        a.end_sending();
        assert_eq!((b.receive(&mut place).unwrap(), &place[..4]), (4, &b"last"[..]));
        assert_eq!(b.receive(&mut place).unwrap(), 0);
        b.send(&[b"back"]).unwrap();
        assert_eq!(a.receive(&mut place).unwrap(), 4);
        b.close();
        assert_eq!(kind(b.send(&[b"more"])), IoKind::BrokenPipe);
        assert_eq!(a.receive(&mut place).unwrap(), 0);
    }

    /// Each end sleeps after each message, so that a waking that got lost would hang.
    #[test]
    fn who_sleeps_is_woken_by_each_message_and_by_the_end() {
        let (a, b) = pair();
        let wait = |pipe: &SharedPipe, place: &mut [u8]| loop {
            match pipe.receive(place) {
                Err(error) if error.kind() == IoKind::WouldBlock => {
                    let begun = Instant::now();
                    Pipe::sleep(pipe, Some(LONG)).unwrap();
                    assert!(begun.elapsed() < LONG, "it was not woken");
                }
                other => return other.unwrap(),
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut place = [0; 8];
                while wait(&b, &mut place) > 0 {
                    b.send(&[&place[..1]]).unwrap();
                }
            });
            let mut place = [0; 8];
            for round in 0..2000u32 {
                a.send(&[&[round as u8]]).unwrap();
                assert_eq!((wait(&a, &mut place), place[0]), (1, round as u8));
            }
            a.close();
        });
    }

    #[test]
    fn counters_that_no_peer_has_end_the_connection() {
        for (written, read) in [(RING_BYTES as u64 + 1, 0), (u64::MAX, 0), (0, 1), (0, u64::MAX - 7)] {
            let (a, b) = pair();
            // as a peer that writes what it likes into its own words
            a.outgoing().written().store(written, Ordering::SeqCst);
            a.incoming().read().store(read, Ordering::SeqCst);
            if written > 0 {
                assert_eq!(kind(b.receive(&mut [0; 8])), IoKind::InvalidData, "{written}");
            } else if read == 1 {
                assert_eq!(kind(b.send(&[b"x"])), IoKind::InvalidData, "{read}");
                assert_eq!(kind(ring::wait_for_room(&b, LONG)), IoKind::InvalidData, "{read}");
            } else {
                // eight bytes too few are read, as if they were in flight
                assert_eq!(b.send(&[b"x"]).unwrap(), 1);
            }
        }
    }

    #[test]
    fn pages_that_do_not_fit_are_refused() {
        let call = |bytes: u64, answer| {
            let (calling, called) = UnixStream::pair().unwrap();
            let file = nameless_file(bytes).unwrap().unwrap();
            send_answer(&called, answer, &[file.as_raw_fd()]).unwrap();
            kind(SharedPipe::call(calling, Instant::now() + LONG))
        };
        assert_eq!(call(PAGES_BYTES as u64 - 1, GrantStatus::ReadWrite), IoKind::InvalidData);
        // another layout
        assert_eq!(call(PAGES_BYTES as u64, GrantStatus::ReadWrite), IoKind::InvalidData);
        assert_eq!(call(PAGES_BYTES as u64, GrantStatus::Unknown), IoKind::PermissionDenied);
        let (calling, called) = UnixStream::pair().unwrap();
        send_answer(&called, GrantStatus::ReadWrite, &[]).unwrap();
        assert_eq!(kind(SharedPipe::call(calling, Instant::now() + LONG)), IoKind::InvalidData);
        let (calling, _silent) = UnixStream::pair().unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        assert_eq!(kind(SharedPipe::call(calling, soon)), IoKind::WouldBlock);
    }

    #[test]
    fn a_sender_without_room_learns_that_nobody_reads_any_more() {
        let (a, b) = pair();
        while a.send(&[&[7; 4096]]).is_ok() {}
        ring::wait_for_room(&a, Duration::from_millis(1)).unwrap();
        drop(b);
        assert_eq!(kind(ring::wait_for_room(&a, LONG)), IoKind::BrokenPipe);
    }
}
