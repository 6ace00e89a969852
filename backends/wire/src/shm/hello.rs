//! The exchange between two processes over a Unix socket before they share pages.

use crate::answer::GrantStatus;
use crate::key::{KEY_BYTES, RegionKey};
use mixfleet_hal::cast::{to_u32, to_u64};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// Magic number and version; changes with the messages or the meaning of the pages.
const MAGIC: [u8; 8] = *b"mfshm\0\0\x01";

/// The user's only message: which region it wants, by key and epoch.
pub(super) struct ShmHello {
    pub(super) key: RegionKey,
    pub(super) epoch: u64,
}

impl ShmHello {
    /// Length of the message in bytes.
    pub(super) const BYTES: usize = 8 + KEY_BYTES + 8;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..8 + KEY_BYTES].copy_from_slice(&self.key.0);
        bytes[8 + KEY_BYTES..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (key, rest) = rest.split_first_chunk()?;
        let (epoch, _) = rest.split_first_chunk()?;
        (*magic == MAGIC).then_some(ShmHello { key: RegionKey(*key), epoch: u64::from_le_bytes(*epoch) })
    }
}

/// Parses `bytes` as a hello.
///
/// # Panics
/// If the message differs after a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_words(bytes: &[u8]) {
    if let Some(hello) = ShmHello::decode(&crate::padded::padded(bytes)) {
        assert_eq!(hello.encode(), crate::padded::padded(bytes));
    }
}

/// Number of files that accompany a grant.
const FILES: usize = 2;

/// Room for two descriptors beside the message, aligned as the kernel requires.
#[repr(C)]
union Ancillary {
    _header: libc::cmsghdr,
    bytes: [u8; 64],
}

/// Returns the user id of the peer.
pub(super) fn user_of(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = to_u32(size_of::<libc::ucred>());
    // SAFETY: an open socket, and a place of the given length.
    let status = unsafe {
        let place = (&raw mut peer).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, place, &raw mut length)
    };
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(peer.uid) }
}

/// Sends `answer` along with `files`.
pub(super) fn send_answer(socket: &UnixStream, answer: GrantStatus, files: &[RawFd]) -> io::Result<()> {
    assert!(files.len() <= FILES, "the ancillary room is for {FILES} descriptors");
    let mut byte = answer as u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut ancillary = Ancillary { bytes: [0; 64] };
    // SAFETY: all zero is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    let data_bytes = to_u32(size_of_val(files));
    // SAFETY: `CMSG_SPACE` of two descriptors is 24 bytes of the 64; the header is written before the data.
    let sent = unsafe {
        if !files.is_empty() {
            message.msg_control = (&raw mut ancillary).cast();
            message.msg_controllen = libc::CMSG_SPACE(data_bytes) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(data_bytes) as _;
            std::ptr::copy_nonoverlapping(files.as_ptr(), libc::CMSG_DATA(header).cast(), files.len());
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a reply and its files.
pub(super) fn receive_answer(socket: &UnixStream) -> io::Result<(GrantStatus, Vec<File>)> {
    let mut byte = 0u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut ancillary = Ancillary { bytes: [0; 64] };
    // SAFETY: all zero is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = (&raw mut ancillary).cast();
    message.msg_controllen = size_of::<Ancillary>() as _;
    let mut files = Vec::new();
    // SAFETY: the message's parts are buffers of ours with these lengths. The kernel has put whole headers
    // there, and every descriptor in them is new and has no other owner.
    let received = unsafe {
        let received = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
        let mut header =
            if received > 0 { libc::CMSG_FIRSTHDR(&raw const message) } else { std::ptr::null_mut() };
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let numbers = (0..bytes / size_of::<RawFd>()).map(|at| data.add(at).read_unaligned());
                files.extend(numbers.map(|number| File::from_raw_fd(number)));
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
        received
    };
    match received {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        1 => match GrantStatus::decode(byte) {
            Some(answer) => Ok((answer, files)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, format!("unknown answer {byte}"))),
        },
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether `file` has `bytes` bytes and is sealed against truncation.
pub(super) fn is_sealed(file: RawFd, bytes: u64) -> io::Result<bool> {
    // SAFETY: plain calls on an open descriptor; the place has the option's type.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        let seals = libc::fcntl(file, libc::F_GET_SEALS);
        if seals < 0 || libc::fstat(file, &raw mut about) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(seals & libc::F_SEAL_SHRINK != 0 && to_u64(about.st_size) >= bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_hello_is_read_as_it_was_written(key: [u8; KEY_BYTES], epoch: u64) {
            let read = ShmHello::decode(&ShmHello { key: RegionKey(key), epoch }.encode()).unwrap();
            prop_assert!(read.key == RegionKey(key) && read.epoch == epoch);
        }
    }

    #[test]
    fn a_hello_of_another_version_is_none() {
        let mut bytes = ShmHello { key: RegionKey([1; KEY_BYTES]), epoch: 7 }.encode();
        bytes[7] += 1;
        assert!(ShmHello::decode(&bytes).is_none());
    }

    #[test]
    fn files_go_along_with_an_answer() {
        let (here, there) = UnixStream::pair().unwrap();
        let [one, two] = [1, 2].map(|bytes| crate::region::nameless_file(bytes).unwrap().unwrap());
        send_answer(&here, GrantStatus::Read, &[one.as_raw_fd(), two.as_raw_fd()]).unwrap();
        send_answer(&here, GrantStatus::Unknown, &[]).unwrap();
        let (answer, files) = receive_answer(&there).unwrap();
        let lengths: Vec<u64> = files.iter().map(|file| file.metadata().unwrap().len()).collect();
        assert_eq!((answer, lengths), (GrantStatus::Read, vec![1, 2]));
        let (answer, files) = receive_answer(&there).unwrap();
        assert_eq!((answer, files.len()), (GrantStatus::Unknown, 0));
        drop(here);
        assert_eq!(receive_answer(&there).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_sealed_files_of_the_right_length_pass() {
        let sealed = crate::region::nameless_file(100).unwrap().unwrap();
        assert!(is_sealed(sealed.as_raw_fd(), 100).unwrap() && !is_sealed(sealed.as_raw_fd(), 101).unwrap());
        let plain = File::open("/proc/self/exe").unwrap();
        assert!(is_sealed(plain.as_raw_fd(), 1).is_err());
    }

    #[test]
    fn the_other_end_is_of_this_user() {
        let (here, _there) = UnixStream::pair().unwrap();
        // SAFETY: only returns a number.
        assert_eq!(user_of(&here).unwrap(), unsafe { libc::geteuid() });
    }
}
