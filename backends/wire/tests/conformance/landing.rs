//! Bytes arrive exactly, and nowhere else.

use super::{Pair, content, noise, piece, read, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::transport::{Piece, RemoteAccess};

pub(crate) fn pieces_land_where_they_should_and_nowhere_else(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1, 2, 3]), region(&[0; 8]));
    let descriptor = pair.share(&there, RemoteAccess::ReadWrite);
    assert_eq!(descriptor.bytes, 8);
    assert_eq!(descriptor.transport, pair.owner.name());
    let mut way = pair.way(&here, &descriptor);
    write(&mut *way, &[piece(0, 6, 2), piece(2, 1, 1)]).unwrap();
    assert_eq!(content(&there), [0, 3, 0, 0, 0, 0, 1, 2]);
    read(&mut *way, &[piece(1, 7, 1)]).unwrap();
    assert_eq!(content(&here), [1, 2, 3]);
    read(&mut *way, &[piece(2, 6, 1), piece(0, 1, 1)]).unwrap();
    assert_eq!((content(&here), content(&there)), (vec![3, 2, 1], vec![0, 3, 0, 0, 0, 0, 1, 2]));
}

pub(crate) fn reads_bring_what_is_there(make: &dyn Fn() -> Pair) {
    let bytes = noise(3 << 20, 1);
    let (pair, here, there) = (make(), region(&vec![0; bytes.len()]), region(&bytes));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::Read));
    let half = bytes.len() as u64 / 2;
    read(&mut *way, &[piece(half, half, half), piece(0, 0, half)]).unwrap();
    assert!(content(&here) == bytes);
}

pub(crate) fn long_pieces_and_ways_from_a_memory_to_itself_are_whole(make: &dyn Fn() -> Pair) {
    let bytes = noise(3_000_001, 2);
    let (pair, both) = (make(), region(&[&bytes[..], &vec![0; bytes.len()]].concat()));
    let mut way = pair.way(&both, &pair.share(&both, RemoteAccess::Write));
    let length = bytes.len() as u64;
    write(&mut *way, &[piece(0, length, length)]).unwrap();
    assert!(content(&both)[bytes.len()..] == bytes && content(&both)[..bytes.len()] == bytes);
}

pub(crate) fn nothing_is_a_batch_too(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1; 2]), region(&[0; 2]));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::ReadWrite));
    write(&mut *way, &[]).unwrap();
    read(&mut *way, &[]).unwrap();
    write(&mut *way, &[piece(2, 0, 0), piece(0, 1, 1), piece(0, 2, 0)]).unwrap();
    read(&mut *way, &[piece(0, 2, 0)]).unwrap();
    assert_eq!((content(&here), content(&there)), (vec![1; 2], vec![0, 1]));
}

pub(crate) fn many_small_pieces_land(make: &dyn Fn() -> Pair) {
    const PIECES: u64 = 5000;
    const BYTES: u64 = 7;
    let bytes = noise((PIECES * BYTES) as usize, 3);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let back = region(&vec![0; bytes.len()]);
    let descriptor = pair.share(&there, RemoteAccess::ReadWrite);
    // 7 and 5000 have no common divisor: every place is taken once.
    let pieces: Vec<Piece> = (0..PIECES).map(|i| piece(i * BYTES, i * 7 % PIECES * BYTES, BYTES)).collect();
    write(&mut *pair.way(&here, &descriptor), &pieces).unwrap();
    let landed = content(&there);
    for piece in &pieces {
        let (from, to) = (piece.local as usize, piece.remote as usize);
        assert_eq!(bytes[from..from + BYTES as usize], landed[to..to + BYTES as usize]);
    }
    read(&mut *pair.way(&back, &descriptor), &pieces).unwrap();
    assert!(content(&back) == bytes);
}

pub(crate) fn big_batches_land(make: &dyn Fn() -> Pair) {
    const BLOCK: u64 = 1 << 20;
    const BLOCKS: u64 = 64;
    let bytes = noise((BLOCK * BLOCKS) as usize, 4);
    let (pair, here, there) = (make(), region(&bytes), region(&vec![0; bytes.len()]));
    let descriptor = pair.share(&there, RemoteAccess::ReadWrite);
    let pieces: Vec<Piece> = (0..BLOCKS).map(|i| piece(i * BLOCK, (BLOCKS - 1 - i) * BLOCK, BLOCK)).collect();
    write(&mut *pair.way(&here, &descriptor), &pieces).unwrap();
    let landed = content(&there);
    let (block, landed) = (BLOCK as usize, landed.rchunks(BLOCK as usize));
    assert!(bytes.chunks(block).eq(landed));
    let back = region(&vec![0; bytes.len()]);
    read(&mut *pair.way(&back, &descriptor), &pieces).unwrap();
    assert!(content(&back) == bytes);
}

pub(crate) fn one_piece_out_of_bounds_stops_all(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1; 4]), region(&[0; 8]));
    let mut way = pair.way(&here, &pair.share(&there, RemoteAccess::ReadWrite));
    for bad in [piece(0, 7, 2), piece(3, 0, 2), piece(0, u64::MAX, 1), piece(0, 1, u64::MAX), piece(5, 0, 0)]
    {
        assert_eq!(way.write(&[piece(0, 0, 2), bad]).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(way.read(&[piece(0, 0, 2), bad]).unwrap_err().kind, ErrorKind::Invalid);
    }
    assert_eq!((content(&here), content(&there)), (vec![1; 4], vec![0; 8]));
    // The way is as good as before.
    write(&mut *way, &[piece(3, 7, 1)]).unwrap();
    assert_eq!(content(&there), [0, 0, 0, 0, 0, 0, 0, 1]);
}

pub(crate) fn a_region_is_reached_only_as_its_owner_said(make: &dyn Fn() -> Pair) {
    let (pair, here, there) = (make(), region(&[1; 2]), region(&[0; 2]));
    for access in [RemoteAccess::Write, RemoteAccess::Read] {
        let mut way = pair.way(&here, &pair.share(&there, access));
        let piece = [piece(0, 0, 1)];
        let refused = if access.may_write() { way.read(&piece) } else { way.write(&piece) };
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!((content(&here), content(&there)), (vec![1; 2], vec![0; 2]));
    }
}

pub(crate) fn two_ways_reach_one_region(make: &dyn Fn() -> Pair) {
    let (pair, there) = (make(), region(&[0; 4]));
    let descriptor = pair.share(&there, RemoteAccess::ReadWrite);
    let (one, two) = (region(&[1; 2]), region(&[2; 2]));
    let (mut first, mut second) = (pair.way(&one, &descriptor), pair.way(&two, &descriptor));
    write(&mut *first, &[piece(0, 0, 2)]).unwrap();
    write(&mut *second, &[piece(0, 2, 2)]).unwrap();
    assert_eq!(content(&there), [1, 1, 2, 2]);
    drop(first);
    read(&mut *second, &[piece(0, 0, 2)]).unwrap();
    assert_eq!(content(&two), [1, 1]);
}
