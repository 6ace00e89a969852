//! Random batches compared with two plain arrays.

use super::{Pair, content, noise, piece, read, region, write};
use mixfleet_hal::transport::{Piece, RemoteAccess};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const HERE: u64 = 40_000;
const THERE: u64 = 70_000;
/// Maximum size of a piece: more than two pages, and often zero.
const PIECE_MAX: u64 = 9000;

/// One batch: whether it reads, and its pieces.
type Batch = (bool, Vec<Piece>);

/// Pieces that do not overlap where they land: their order is not promised.
fn disjoint(reading: bool, pieces: &[Piece]) -> Vec<Piece> {
    let target = |piece: &Piece| if reading { piece.local } else { piece.remote };
    let mut kept: Vec<Piece> = Vec::new();
    for &piece in pieces {
        let apart = |other: &Piece| {
            target(&piece) + piece.bytes <= target(other) || target(other) + other.bytes <= target(&piece)
        };
        if kept.iter().all(apart) {
            kept.push(piece);
        }
    }
    kept
}

fn batch() -> impl Strategy<Value = Batch> {
    let one = (0..=PIECE_MAX, any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(
        |(bytes, local, remote)| {
            let at = |index: prop::sample::Index, all: u64| index.index((all - bytes + 1) as usize) as u64;
            piece(at(local, HERE), at(remote, THERE), bytes)
        },
    );
    let pieces = prop::collection::vec(one, 0..12);
    (any::<bool>(), pieces).prop_map(|(reading, pieces)| (reading, disjoint(reading, &pieces)))
}

pub(crate) fn random_batches_do_what_a_model_does(make: &dyn Fn() -> Pair) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    // its own seed: hwtests/rdma.sh runs it in guests, without cargo's settings
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[5; 32]);
    let pair = make();
    let cases = prop::collection::vec(batch(), 1..12);
    TestRunner::new_with_rng(config, rng).run(&cases, |batches| run(&pair, &batches)).unwrap();
}

fn run(pair: &Pair, batches: &[Batch]) -> std::result::Result<(), TestCaseError> {
    let (mut here, mut there) = (noise(HERE as usize, 10), noise(THERE as usize, 11));
    let (local, remote) = (region(&here), region(&there));
    let descriptor = pair.share(&remote, RemoteAccess::ReadWrite);
    let mut way = pair.way(&local, &descriptor);
    for (reading, pieces) in batches {
        let moved = if *reading { read(&mut *way, pieces) } else { write(&mut *way, pieces) };
        moved.unwrap();
        for piece in pieces {
            let (l, r) = (piece.local as usize, piece.remote as usize);
            let bytes = piece.bytes as usize;
            if *reading {
                here[l..l + bytes].copy_from_slice(&there[r..r + bytes]);
            } else {
                there[r..r + bytes].copy_from_slice(&here[l..l + bytes]);
            }
        }
    }
    prop_assert!(content(&local) == here, "this end");
    prop_assert!(content(&remote) == there, "the peer's end");
    pair.owner.deregister(&descriptor).unwrap();
    Ok(())
}
