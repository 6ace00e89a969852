//! What ends of a connection of bytes must do, however it goes.

use super::Duplex;
use std::time::{Duration, Instant};

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Receives this many bytes.
pub(crate) fn take(from: &Duplex, bytes: usize) -> Vec<u8> {
    let (mut all, mut part) = (Vec::new(), vec![0; 64 << 10]);
    while all.len() < bytes {
        let room = part.len().min(bytes - all.len());
        let came = from.receive(&mut part[..room], Some(Instant::now() + LONG)).unwrap().expect("in time");
        all.extend_from_slice(&part[..came]);
    }
    all
}

/// Two ends that both send more than there is room for do not wait for each other.
pub(crate) fn both_send(a: &Duplex, b: &Duplex, bytes: u32) {
    let much: Vec<u8> = (0..bytes).map(|i| (i % 251) as u8).collect();
    let mut came = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            b.send(&[&much], LONG, &mut || Ok(false)).unwrap();
            assert!(take(b, much.len()) == much);
        });
        let mut part = vec![0; 1 << 20];
        let mut drain = || {
            let received = a.receive(&mut part, Some(Instant::now()))?;
            came.extend_from_slice(&part[..received.unwrap_or(0)]);
            Ok(received.is_some())
        };
        a.send(&[&much], LONG, &mut drain).unwrap();
        let rest = take(a, much.len() - came.len());
        came.extend(rest);
    });
    assert!(came == much, "{a:?}");
}
