//! RDMA against the demands that every transport meets, and connections of bytes over it. Needs a device:
//! `hwtests/rdma.sh` runs this.

mod conformance;

use conformance::Pair;
use mixfleet_wire::verbs::{Verbs, VerbsOptions};
use mixfleet_wire::{Duplex, DuplexListener, LinkAddress, Security};
use std::io::ErrorKind as IoKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn pair() -> Pair {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let open = Verbs::open(VerbsOptions { listen, ..VerbsOptions::default() });
    Pair::one(open.unwrap_or_else(|absent| panic!("{}", absent.reason)))
}

conformance!(verbs, super::pair);

/// Connected ends of a connection of bytes: the calling one and the called one.
fn ends() -> (Duplex, Duplex) {
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

fn take(from: &Duplex, bytes: usize) -> Vec<u8> {
    let (mut all, mut part) = (Vec::new(), vec![0; 50_001]);
    while all.len() < bytes {
        let room = part.len().min(bytes - all.len());
        let came = from.receive(&mut part[..room], Some(Instant::now() + LONG)).unwrap().expect("in time");
        all.extend_from_slice(&part[..came]);
    }
    all
}

/// Each message waits for the one before, so that each end sleeps, and there are many more of them than
/// writes that may be open.
#[test]
fn small_messages_go_back_and_forth_and_the_end_is_noticed() {
    let (a, b) = ends();
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

/// Nobody reads at first, so that the ring is full of writes, and then of bytes.
#[test]
fn writes_and_bytes_that_nobody_reads_are_held_back() {
    let (a, b) = ends();
    let many: Vec<u8> = (0..200u8).collect();
    let much: Vec<u8> = (0..2u32 << 20).map(|i| (i % 251) as u8).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            many.iter().for_each(|byte| a.send(&[&[*byte]], LONG, &mut || Ok(false)).unwrap());
            a.send(&[&much], LONG, &mut || Ok(false)).unwrap();
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(take(&b, many.len()) == many);
        std::thread::sleep(Duration::from_millis(200));
        assert!(take(&b, much.len()) == much);
    });
}

#[test]
fn two_ends_that_both_send_more_than_there_is_room_for_do_not_wait_for_each_other() {
    let much: Vec<u8> = (0..4u32 << 20).map(|i| (i % 251) as u8).collect();
    let (a, b) = ends();
    let mut came = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            b.send(&[&much], LONG, &mut || Ok(false)).unwrap();
            assert!(take(&b, much.len()) == much);
        });
        let mut part = vec![0; 1 << 20];
        let mut drain = || {
            let received = a.receive(&mut part, Some(Instant::now()))?;
            came.extend_from_slice(&part[..received.unwrap_or(0)]);
            Ok(received.is_some())
        };
        a.send(&[&much], LONG, &mut drain).unwrap();
        let rest = take(&a, much.len() - came.len());
        came.extend(rest);
    });
    assert!(came == much);
}
