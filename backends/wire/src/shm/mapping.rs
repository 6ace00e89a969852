//! The active end: maps the peer's pages and copies to and from them.

use super::control::CopyFlags;
use super::hello::{ShmHello, is_sealed, receive_answer};
use super::{ShmAddress, socket_address};
use crate::one_sided::{Carrier, Direction, OneSided, Reach};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Piece, RemoteAccess};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Bytes copied at a time, which bounds how long an owner waits when it revokes its memory.
const CHUNK_BYTES: u64 = 1 << 20;
/// Timeout for the owner's reply, which comes from one thread that only maps and sends.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct ShmMapping {
    local: Arc<dyn SharedMemory>,
    pages: PeerPages,
    reach: Reach,
    control: CopyFlags,
    /// Stays open as long as the owner lives.
    socket: UnixStream,
}

/// The peer's memory; pages granted for reading are mapped read-only.
enum PeerPages {
    Write(memmap2::MmapRaw),
    Read(memmap2::MmapRaw),
}

fn closed(detail: String) -> Error {
    Error::new(ErrorKind::Closed, detail)
}

impl ShmMapping {
    pub(super) fn open(
        local: Arc<dyn SharedMemory>,
        address: &ShmAddress,
        region: &Descriptor,
    ) -> Result<OneSided<Self>> {
        let gone = |error| closed(format!("the owner of {region:?} does not answer: {error}"));
        let mut socket = UnixStream::connect_addr(&socket_address(&address.socket)?).map_err(gone)?;
        socket.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(gone)?;
        socket.write_all(&ShmHello { key: address.key, epoch: region.epoch }.encode()).map_err(gone)?;
        let (answer, files) = receive_answer(&socket).map_err(gone)?;
        let access = answer.access(region)?;
        let [pages, control]: [File; 2] =
            files.try_into().map_err(|_| closed("the owner sent no pages along".into()))?;
        let fits = |file: &File, bytes| is_sealed(file.as_raw_fd(), bytes).unwrap_or(false);
        if !fits(&pages, region.bytes.max(1)) || !fits(&control, CopyFlags::bytes()) {
            return Err(closed("the owner's file is shorter than it said, or could become so".into()));
        }
        let refused =
            |error| Error::new(ErrorKind::OutOfMemory, format!("map {} bytes: {error}", region.bytes));
        let control = CopyFlags::open(&control).map_err(refused)?;
        let pages = PeerPages::map(&pages, region.bytes, access).map_err(refused)?;
        let reach = Reach { local_bytes: local.size_bytes(), remote_bytes: region.bytes, access };
        Ok(OneSided::new(ShmMapping { local, pages, reach, control, socket }))
    }

    fn over(&self) -> Error {
        closed("the region is no longer registered".into())
    }

    /// Copies one piece, which is inside both memories.
    fn copy(&self, piece: Piece, direction: Direction) -> Result<()> {
        let Piece { local, remote, bytes } = piece;
        let mut granted = false;
        match (direction, &self.pages) {
            (Direction::Write, PeerPages::Write(map)) => self.local.view(local, bytes, &mut |from| {
                // SAFETY: the piece is inside the mapping. The owner does not use these bytes during the
                // copy, or verifies them; a copy that another process sees half done is bytes like any other.
                granted = self.control.copy(|| unsafe {
                    let to = map.as_mut_ptr().add(to_usize(remote));
                    std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len());
                });
            })?,
            (Direction::Read, PeerPages::Write(map) | PeerPages::Read(map)) => {
                self.local.update(local, bytes, &mut |to| {
                    // SAFETY: as above.
                    granted = self.control.copy(|| unsafe {
                        let from = map.as_ptr().add(to_usize(remote));
                        std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
                    });
                })?;
            }
            (Direction::Write, PeerPages::Read(_)) => {
                return Err(Error::invalid("the pages are for reading"));
            }
        }
        if granted { Ok(()) } else { Err(self.over()) }
    }
}

impl PeerPages {
    fn map(file: &File, bytes: u64, access: RemoteAccess) -> std::io::Result<Self> {
        let mut options = memmap2::MmapOptions::new();
        options.len(to_usize(bytes.max(1)));
        if access.may_write() {
            let map = options.map_raw(file)?;
            crate::region::prefer_huge_pages(&map);
            Ok(PeerPages::Write(map))
        } else {
            Ok(PeerPages::Read(options.map_raw_read_only(file)?))
        }
    }
}

impl Carrier for ShmMapping {
    fn reach(&self) -> Reach {
        self.reach
    }

    /// The pages outlive the owner's process, but are not read then.
    fn check_peer(&mut self) -> Result<()> {
        if self.control.is_over() {
            return Err(self.over());
        }
        let mut byte = 0u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: an open socket and a place of one byte.
        let received = unsafe { libc::recv(self.socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
        let silent = received < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock;
        if silent { Ok(()) } else { Err(closed("the owner's process has ended".into())) }
    }

    fn begin(&mut self, _batch: u64, pieces: &[Piece], direction: Direction) -> Result<u64> {
        for piece in pieces {
            for at in (0..piece.bytes).step_by(to_usize(CHUNK_BYTES)) {
                let bytes = CHUNK_BYTES.min(piece.bytes - at);
                self.copy(Piece { local: piece.local + at, remote: piece.remote + at, bytes }, direction)?;
            }
        }
        // data read after the revocation may belong to another owner
        if self.control.is_over() { Err(self.over()) } else { Ok(0) }
    }
}
