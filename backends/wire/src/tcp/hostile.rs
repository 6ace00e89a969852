//! Tests against peers that violate the protocol.

use super::protocol::{FrameHeader, FrameReply, RANGES_MAX, Range, TcpHello, Welcome};
use super::{Tcp, TcpAddress, TcpConfig};
use crate::HostRegion;
use crate::answer::GrantStatus;
use crate::one_sided::Direction;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Piece, RemoteAccess, Transport};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

const BYTES: u64 = 64;

fn owner(access: RemoteAccess) -> (Tcp, Arc<HostRegion>, Descriptor) {
    let tcp = Tcp::new(TcpConfig::loopback()).unwrap();
    let memory = Arc::new(HostRegion::new(BYTES as usize).unwrap());
    let descriptor = tcp.register(memory.clone(), access).unwrap();
    (tcp, memory, descriptor)
}

fn hello(descriptor: &Descriptor) -> TcpHello {
    TcpAddress::decode(descriptor).unwrap().hello(descriptor, 0)
}

/// Sends `words` to the owner and returns the socket with the reply.
fn greet(tcp: &Tcp, words: &[u8]) -> (TcpStream, Option<GrantStatus>) {
    let mut socket = TcpStream::connect(tcp.listens_on()).unwrap();
    socket.write_all(words).unwrap();
    let mut answer = [0; Welcome::BYTES];
    socket.read_exact(&mut answer).unwrap();
    (socket, GrantStatus::decode(Welcome::decode(&answer).answer))
}

fn frame(direction: Direction, ranges: &[Range]) -> Vec<u8> {
    let mut words = FrameHeader { direction, ranges: ranges.len() as u16, frame: 0 }.encode().to_vec();
    words.extend(ranges.iter().flat_map(Range::encode));
    words
}

fn is_untouched(memory: &HostRegion) -> bool {
    let mut bytes = [1; BYTES as usize];
    memory.load(0, &mut bytes).unwrap();
    bytes == [0; BYTES as usize]
}

/// Returns what the owner still sends before it closes.
fn rest(mut socket: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    // a reset counts as the end too: the owner closed before it had read everything
    let _ = socket.read_to_end(&mut said);
    said
}

#[test]
fn a_wrong_hello_is_told_why_and_closed() {
    let (tcp, memory, descriptor) = owner(RemoteAccess::ReadWrite);
    let good = hello(&descriptor);
    let mut key = good.key;
    key.0[15] ^= 1;
    let mut other_version = good.encode();
    other_version[7] += 1;
    let wrong = [
        (TcpHello { key, ..good }.encode(), GrantStatus::Unknown),
        (TcpHello { epoch: good.epoch + 1, ..good }.encode(), GrantStatus::Unknown),
        (other_version, GrantStatus::Version),
        ([b'G'; TcpHello::BYTES], GrantStatus::Version),
    ];
    for (mut words, expected) in wrong.map(|(words, expected)| (words.to_vec(), expected)) {
        // followed at once by a write that would be valid
        words.extend(frame(Direction::Write, &[Range { offset: 0, bytes: 1 }]));
        words.push(9);
        let (socket, answer) = greet(&tcp, &words);
        assert_eq!((answer, rest(socket)), (Some(expected), vec![]));
    }
    assert!(is_untouched(&memory));
}

#[test]
fn frames_that_reach_too_far_are_refused_before_anything_is_written() {
    let (tcp, memory, descriptor) = owner(RemoteAccess::ReadWrite);
    let good = Range { offset: 0, bytes: 8 };
    let mut wrong = Vec::new();
    for direction in [Direction::Write, Direction::Read] {
        for (offset, bytes) in [(BYTES - 1, 2), (BYTES + 1, 0), (u64::MAX, 2), (0, u64::MAX)] {
            wrong.push(frame(direction, &[good, Range { offset, bytes }]));
        }
    }
    let too_many = FrameHeader { direction: Direction::Write, ranges: RANGES_MAX as u16, frame: 0 }.encode();
    wrong.push([&too_many[..2], &(RANGES_MAX as u16 + 1).to_le_bytes(), &too_many[4..]].concat());
    wrong.push([7; FrameHeader::BYTES].to_vec());
    for mut words in wrong {
        words.extend([9; 2 * BYTES as usize]);
        let (mut socket, answer) = greet(&tcp, &hello(&descriptor).encode());
        assert_eq!(answer, Some(GrantStatus::ReadWrite));
        socket.write_all(&words).unwrap();
        let mut said = [0; FrameReply::BYTES];
        socket.read_exact(&mut said).unwrap();
        assert!(FrameReply::decode(&said).unwrap().refused && rest(socket).is_empty());
    }
    assert!(is_untouched(&memory));
}

#[test]
fn what_was_not_granted_is_refused() {
    for (access, direction) in
        [(RemoteAccess::Read, Direction::Write), (RemoteAccess::Write, Direction::Read)]
    {
        let (tcp, memory, descriptor) = owner(access);
        let (mut socket, _) = greet(&tcp, &hello(&descriptor).encode());
        socket.write_all(&frame(direction, &[Range { offset: 0, bytes: 8 }])).unwrap();
        socket.write_all(&[9; 8]).unwrap();
        let mut said = [0; FrameReply::BYTES];
        socket.read_exact(&mut said).unwrap();
        assert!(FrameReply::decode(&said).unwrap().refused && rest(socket).is_empty());
        assert!(is_untouched(&memory));
    }
}

#[test]
fn the_fence_does_not_wait_for_the_rest_of_a_frame() {
    let (tcp, memory, descriptor) = owner(RemoteAccess::Write);
    let (mut socket, _) = greet(&tcp, &hello(&descriptor).encode());
    socket.write_all(&frame(Direction::Write, &[Range { offset: 0, bytes: BYTES }])).unwrap();
    socket.write_all(&[9; 8]).unwrap();
    // half of it has arrived once the first byte has
    let mut first = [0];
    while first[0] == 0 {
        memory.load(0, &mut first).unwrap();
        std::thread::yield_now();
    }
    tcp.deregister(&descriptor).unwrap();
    memory.store(0, &[0; BYTES as usize]).unwrap();
    // the peer may not have noticed yet
    let _ = socket.write_all(&[9; BYTES as usize - 8]);
    assert!(rest(socket).is_empty() && is_untouched(&memory));
    assert_eq!(Arc::strong_count(&memory), 1);
}

#[test]
fn silent_strangers_make_room_for_others() {
    let (tcp, _memory, descriptor) = owner(RemoteAccess::Write);
    let strangers: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(tcp.listens_on()).unwrap()).collect();
    let local = Arc::new(HostRegion::new(1).unwrap());
    // ends because all pending streams time out together after two seconds
    let mut way = loop {
        match tcp.connect(local.clone(), &descriptor) {
            Ok(way) => break way,
            Err(_) => std::thread::yield_now(),
        }
    };
    let transfer = way.write(&[Piece { local: 0, remote: 0, bytes: 1 }]).unwrap();
    way.wait(transfer, Duration::from_secs(60)).unwrap();
    drop(strangers);
}

#[test]
fn a_peer_gets_in_at_once_beside_silent_strangers() {
    let (tcp, _memory, descriptor) = owner(RemoteAccess::Write);
    let strangers: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(tcp.listens_on()).unwrap()).collect();
    let local = Arc::new(HostRegion::new(1).unwrap());
    assert!(tcp.connect(local, &descriptor).is_ok());
    drop(strangers);
}

#[test]
fn streams_beyond_the_limit_are_told_so() {
    let config = TcpConfig { streams: 1, streams_max: 2, ..TcpConfig::loopback() };
    let tcp = Tcp::new(config).unwrap();
    let memory = Arc::new(HostRegion::new(BYTES as usize).unwrap());
    let descriptor = tcp.register(memory.clone(), RemoteAccess::Write).unwrap();
    let ways = [(); 2].map(|()| tcp.connect(memory.clone(), &descriptor).unwrap());
    let refused = tcp.connect(memory.clone(), &descriptor).err().unwrap();
    assert_eq!(refused.kind, mixfleet_hal::ErrorKind::OutOfMemory);
    drop(ways);
    // ends because the streams of dropped connections close
    while tcp.connect(memory.clone(), &descriptor).is_err() {
        std::thread::yield_now();
    }
}
