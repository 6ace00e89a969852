//! A publisher of KV events that speaks ZMTP as libzmq does, and can lose, forget and be started anew.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Shared {
    batches: Vec<(u64, Vec<u8>)>,
    next: u64,
    subscribers: Vec<TcpStream>,
    /// Batches that one replay can say before its queue is full.
    replay_max: usize,
    replays: usize,
}

pub(crate) struct Publisher {
    pub(crate) events: String,
    pub(crate) replay: String,
    shared: Arc<Mutex<Shared>>,
}

impl Publisher {
    pub(crate) fn start() -> Self {
        let [events, replay] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [events_at, replay_at] =
            [&events, &replay].map(|it| format!("tcp://{}", it.local_addr().unwrap()));
        let shared = Arc::new(Mutex::new(Shared { replay_max: usize::MAX, ..Shared::default() }));
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            for stream in events.incoming().map_while(Result::ok) {
                let shared = of_thread.clone();
                std::thread::spawn(move || subscriber(&shared, stream));
            }
        });
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            for stream in replay.incoming().map_while(Result::ok) {
                let shared = of_thread.clone();
                std::thread::spawn(move || replay_to(&shared, stream));
            }
        });
        // the engine's notation for a port that it binds
        let events = events_at.replace("127.0.0.1", "*");
        Publisher { events, replay: replay_at, shared }
    }

    /// Publishes a batch to the subscribers.
    pub(crate) fn say(&self, payload: &[u8]) {
        self.keep(payload, true);
    }

    /// A batch that reaches no subscriber.
    pub(crate) fn lose(&self, payload: &[u8]) {
        self.keep(payload, false);
    }

    fn keep(&self, payload: &[u8], is_said: bool) {
        let mut shared = self.shared.lock().unwrap();
        let number = shared.next;
        shared.next += 1;
        shared.batches.push((number, payload.to_vec()));
        if is_said {
            let text = message(&[b"kv-events", &number.to_be_bytes(), payload]);
            shared.subscribers.retain_mut(|stream| stream.write_all(&text).is_ok());
        }
    }

    /// Closes all connections of subscribers.
    pub(crate) fn cut(&self) {
        let mut shared = self.shared.lock().unwrap();
        shared.subscribers.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    /// Keeps only the last `count` batches for replay.
    pub(crate) fn keep_last(&self, count: usize) {
        let mut shared = self.shared.lock().unwrap();
        let first = shared.batches.len().saturating_sub(count);
        shared.batches.drain(..first);
    }

    /// Limits one replay to this many batches.
    pub(crate) fn replay_at_most(&self, count: usize) {
        self.shared.lock().unwrap().replay_max = count;
    }

    /// Forgets everything and counts from 0.
    pub(crate) fn start_anew(&self) {
        self.cut();
        let mut shared = self.shared.lock().unwrap();
        shared.batches.clear();
        shared.next = 0;
    }

    pub(crate) fn subscribers(&self) -> usize {
        self.shared.lock().unwrap().subscribers.len()
    }

    pub(crate) fn replays(&self) -> usize {
        self.shared.lock().unwrap().replays
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.cut();
    }
}

pub(crate) fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let head = match u8::try_from(body.len()) {
        Ok(length) => vec![flags, length],
        Err(_) => [&[flags | 2][..], &(body.len() as u64).to_be_bytes()].concat(),
    };
    [head, body.to_vec()].concat()
}

fn message(frames: &[&[u8]]) -> Vec<u8> {
    let last = frames.len() - 1;
    frames.iter().enumerate().flat_map(|(at, body)| frame(u8::from(at < last), body)).collect()
}

/// Greets, says what it is, and reads what the other is.
fn greet(stream: &mut TcpStream, kind: &str) -> std::io::Result<()> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting)?;
    stream.read_exact(&mut greeting)?;
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((kind.len() as u32).to_be_bytes());
    ready.extend(kind.as_bytes());
    stream.write_all(&frame(4, &ready))?;
    read_frame(stream).map(drop)
}

/// A short frame: whether more follow, and its body.
fn read_frame(stream: &mut TcpStream) -> std::io::Result<(bool, Vec<u8>)> {
    let mut head = [0; 2];
    stream.read_exact(&mut head)?;
    let mut body = vec![0; usize::from(head[1])];
    stream.read_exact(&mut body)?;
    Ok((head[0] & 1 == 1, body))
}

fn subscriber(shared: &Mutex<Shared>, mut stream: TcpStream) -> std::io::Result<()> {
    greet(&mut stream, "PUB")?;
    assert_eq!(read_frame(&mut stream)?, (false, vec![1]), "it subscribes to everything");
    shared.lock().unwrap().subscribers.push(stream);
    Ok(())
}

/// The messages of what a publisher sent, greeting and all.
pub(crate) fn messages(bytes: &[u8]) -> Vec<Vec<Vec<u8>>> {
    let (mut rest, mut all, mut message) = (&bytes[64..], Vec::new(), Vec::new());
    while let [flags, head @ ..] = rest {
        let (length, body) = match flags & 2 {
            0 => (usize::from(head[0]), &head[1..]),
            _ => (u64::from_be_bytes(head[..8].try_into().unwrap()) as usize, &head[8..]),
        };
        if flags & 4 == 0 {
            message.push(body[..length].to_vec());
            if flags & 1 == 0 {
                all.push(std::mem::take(&mut message));
            }
        }
        rest = &body[length..];
    }
    all
}

/// Publishes one batch, number 0, to every subscriber of this connection.
pub(crate) fn say_once(stream: &mut TcpStream, payload: &[u8]) -> std::io::Result<()> {
    greet(stream, "PUB")?;
    read_frame(stream)?;
    stream.write_all(&message(&[b"kv-events", &0_u64.to_be_bytes(), payload]))
}

fn replay_to(shared: &Mutex<Shared>, mut stream: TcpStream) -> std::io::Result<()> {
    greet(&mut stream, "ROUTER")?;
    loop {
        assert_eq!(read_frame(&mut stream)?, (true, Vec::new()));
        let (_, from) = read_frame(&mut stream)?;
        let from = u64::from_be_bytes(from.try_into().unwrap());
        let mut shared = shared.lock().unwrap();
        shared.replays += 1;
        let wanted = shared.batches.iter().filter(|(number, _)| *number >= from);
        for (number, payload) in wanted.take(shared.replay_max) {
            stream.write_all(&message(&[b"", b"kv-events", &number.to_be_bytes(), payload]))?;
        }
        // where messages were lost, the last of the kept ones still come
        let last = shared.batches.last().filter(|_| shared.replay_max != usize::MAX);
        if let Some((number, payload)) = last.filter(|(number, _)| *number >= from) {
            stream.write_all(&message(&[b"", b"kv-events", &number.to_be_bytes(), payload]))?;
        }
        stream.write_all(&message(&[b"", b"", &u64::MAX.to_be_bytes(), b""]))?;
    }
}
