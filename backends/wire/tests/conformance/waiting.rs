//! The meaning and the lifetime of batch ids.

use super::{LONG, Pair, content, noise, piece, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::transport::{RemoteAccess, TransferId};
use std::time::Duration;

pub(crate) fn a_transfer_ends_once(make: &dyn Fn() -> Pair) {
    let (pair, here) = (make(), region(&[1; 4]));
    let mut way = pair.way(&here, &pair.share(&region(&[0; 4]), RemoteAccess::Write));
    let done = way.write(&[piece(0, 0, 1)]).unwrap();
    way.wait(done, LONG).unwrap();
    assert_eq!(way.wait(done, LONG).unwrap_err().kind, ErrorKind::Closed);
    let given_up = way.write(&[piece(0, 0, 1)]).unwrap();
    way.cancel(given_up).unwrap();
    assert_eq!(way.wait(given_up, LONG).unwrap_err().kind, ErrorKind::Closed);
    assert_eq!(way.wait(TransferId(99), LONG).unwrap_err().kind, ErrorKind::Invalid);
}

pub(crate) fn batches_are_waited_for_in_any_order(make: &dyn Fn() -> Pair) {
    const BATCHES: u64 = 32;
    const BYTES: u64 = 100_000;
    let bytes = noise((BATCHES * BYTES) as usize, 5);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::ReadWrite));
    let mut transfers: Vec<TransferId> =
        (0..BATCHES).map(|i| way.write(&[piece(i * BYTES, i * BYTES, BYTES)]).unwrap()).collect();
    transfers.sort_by_key(|transfer| transfer.0 * 7 % BATCHES);
    for transfer in transfers {
        way.wait(transfer, LONG).unwrap();
    }
    assert!(content(&there) == bytes);
}

pub(crate) fn zero_time_only_asks(make: &dyn Fn() -> Pair) {
    let bytes = noise(8 << 20, 6);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::Write));
    let transfer = way.write(&[piece(0, 0, bytes.len() as u64)]).unwrap();
    // Ends because asking is enough for it to go on.
    while let Err(error) = way.wait(transfer, Duration::ZERO) {
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
        std::thread::yield_now();
    }
    assert!(content(&there) == bytes);
}

/// More than sockets and windows hold, so that it does not all go at the beginning.
pub(crate) fn batches_move_while_the_user_does_something_else(make: &dyn Fn() -> Pair) {
    const PIECES: u64 = 8;
    let bytes = noise(8 << 20, 12);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::ReadWrite));
    let length = bytes.len() as u64 / PIECES;
    let begin = |at: u64| way.write(&[piece(at * length, at * length, length)]).unwrap();
    let transfers: Vec<TransferId> = (0..PIECES).map(begin).collect();
    let begun = std::time::Instant::now();
    while content(&there) != bytes {
        assert!(begun.elapsed() < LONG, "a transfer that has begun does not proceed by itself");
        std::thread::yield_now();
    }
    for transfer in transfers {
        way.wait(transfer, LONG).unwrap();
    }
}

pub(crate) fn a_way_that_is_dropped_in_the_middle_ends(make: &dyn Fn() -> Pair) {
    let bytes = noise(8 << 20, 13);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let descriptor = pair.share(&there, RemoteAccess::ReadWrite);
    for _ in 0..4 {
        let mut way = pair.way(&here, &descriptor);
        way.write(&[piece(0, 0, bytes.len() as u64)]).unwrap();
        drop(way);
        assert_eq!(std::sync::Arc::strong_count(&here), 1);
    }
    write(&mut *pair.way(&here, &descriptor), &[piece(0, 0, bytes.len() as u64)]).unwrap();
    assert!(content(&there) == bytes);
}

pub(crate) fn a_batch_given_up_leaves_the_way_open(make: &dyn Fn() -> Pair) {
    let (big, small) = (noise(8 << 20, 7), noise(1000, 8));
    let (pair, here) = (make(), region(&big));
    let there = region(&vec![0; big.len() + small.len()]);
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::ReadWrite));
    let length = big.len() as u64;
    for round in 0..4 {
        let all = [piece(0, 0, length)];
        let given_up = if round % 2 == 0 { way.write(&all) } else { way.read(&all) }.unwrap();
        way.cancel(given_up).unwrap();
        write(&mut *way, &[piece(0, length, 1000)]).unwrap();
        let mut landed = vec![0; 1000];
        mixfleet_hal::memory::SharedMemory::load(&*there, length, &mut landed).unwrap();
        assert!(landed == content(&here)[..1000]);
    }
}
