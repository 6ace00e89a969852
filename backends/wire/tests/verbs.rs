//! RDMA against the demands that every transport meets, and connections of bytes over it. Needs a device:
//! `hwtests/rdma.sh` runs this.

mod conformance;
mod ends;

use conformance::Pair;
use ends::{LONG, both_send, take};
use mixfleet_wire::verbs::{Verbs, VerbsOptions};
use mixfleet_wire::{Duplex, DuplexListener, LinkAddress, Security};
use std::io::ErrorKind as IoKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

fn pair() -> Pair {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let open = Verbs::open(VerbsOptions { listen, ..VerbsOptions::default() });
    Pair::one(open.unwrap_or_else(|absent| panic!("{}", absent.reason)))
}

conformance!(verbs, super::pair);

/// Connected ends of a connection of bytes: the calling one and the called one.
fn ends_by_rdma() -> (Duplex, Duplex) {
    let address = LinkAddress::Rdma(SocketAddr::from(([127, 0, 0, 1], 0)));
    let listener = DuplexListener::bind(&address, Security::LoopbackOnly, LONG).unwrap();
    let deadline = Instant::now() + LONG;
    std::thread::scope(|scope| {
        let call = scope
            .spawn(|| Duplex::call(listener.address(), &Security::LoopbackOnly, LONG, deadline).unwrap());
        let (called, _) = listener.accept().unwrap().welcome(deadline).unwrap();
        (call.join().unwrap(), called)
    })
}

/// Each message waits for the one before, so that each end sleeps, and there are many more messages than
/// writes that may be open.
#[test]
fn small_messages_go_back_and_forth_and_the_end_is_noticed() {
    let (a, b) = ends_by_rdma();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..300u32 {
                assert_eq!(take(&b, 9), [&b"out: "[..], &round.to_le_bytes()].concat());
                b.send(&[&round.to_be_bytes(), b"", b" back"], LONG, &mut || Ok(false)).unwrap();
            }
        });
        for round in 0..300u32 {
            a.send(&[b"out: ", &round.to_le_bytes()], LONG, &mut || Ok(false)).unwrap();
            assert_eq!(take(&a, 9), [&round.to_be_bytes()[..], b" back"].concat());
        }
    });
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(b.receive(&mut [0; 8], Some(soon)).unwrap(), None);
    a.send(&[b"last"], LONG, &mut || Ok(false)).unwrap();
    a.end_sending();
    assert_eq!(take(&b, 4), b"last");
    assert_eq!(b.receive(&mut [0; 8], None).unwrap_err().kind(), IoKind::UnexpectedEof);
    b.close();
    assert_eq!(a.receive(&mut [0; 8], None).unwrap_err().kind(), IoKind::UnexpectedEof);
}

/// There is no reader at first, so that the maximum number of writes is open, and then the ring is full.
#[test]
fn writes_and_bytes_that_nobody_reads_are_held_back() {
    let (a, b) = ends_by_rdma();
    let mut send = |bytes: &[u8]| a.send(&[bytes], Duration::ZERO, &mut || Ok(false));
    let sent = (0..200u8).take_while(|byte| send(&[*byte]).is_ok()).collect::<Vec<u8>>();
    assert!((8..64).contains(&sent.len()), "{} writes of 64 that the other end has room for", sent.len());
    assert_eq!(send(b"x").unwrap_err().kind(), IoKind::TimedOut);
    assert!(take(&b, sent.len()) == sent);
    let much: Vec<u8> = (0..2u32 << 20).map(|i| (i % 251) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| a.send(&[&much], LONG, &mut || Ok(false)).unwrap());
        assert!(take(&b, much.len()) == much);
    });
}

#[test]
fn two_ends_that_both_send_more_than_there_is_room_for_do_not_wait_for_each_other() {
    let (a, b) = ends_by_rdma();
    both_send(&a, &b, 4 << 20);
}
