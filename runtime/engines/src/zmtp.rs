//! One side of a ZeroMQ connection over TCP: ZMTP 3.0 without authentication, for sockets SUB and DEALER.
//!
//! ```text
//! greeting  ff 8*00 7f, version 03 00, mechanism "NULL" in 20 bytes, 00, 31*00
//! frame     flags (1 more follow, 2 long, 4 command), length in 1 or 8 bytes, body
//! ```
//!
//! What a peer can make this side hold is limited, and anything else than such frames ends the connection.

use mixfleet_hal::cast::{to_u8, to_u32};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Maximum bytes of a message, all its frames together.
pub(crate) const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Maximum frames of a message.
const FRAMES_MAX: usize = 16;
/// Bytes that are read at once.
const READ_BYTES: usize = 64 << 10;

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The frames of a message.
pub(crate) type ZmtpMessage = Vec<Vec<u8>>;

/// The outcome of a handshake with a peer.
#[derive(Debug, PartialEq)]
enum PeerInput {
    Message(ZmtpMessage),
    Command(Vec<u8>),
}

/// Cuts bytes into messages and commands.
#[derive(Debug, Default)]
struct FrameDecoder {
    buffer: Vec<u8>,
    /// Bytes of the buffer that are done with.
    done: usize,
    /// The frames of a message so far.
    message: ZmtpMessage,
    message_bytes: usize,
}

impl FrameDecoder {
    fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..std::mem::take(&mut self.done));
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message or command, if it is complete.
    fn next(&mut self) -> Result<Option<PeerInput>, String> {
        loop {
            let rest = &self.buffer[self.done..];
            let Some((&flags, sized)) = rest.split_first() else { return Ok(None) };
            if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
                return Err(format!("a frame has flags {flags:#04x}"));
            }
            let (length, body) = if flags & LONG == 0 {
                let Some((&length, body)) = sized.split_first() else { return Ok(None) };
                (u64::from(length), body)
            } else {
                let Some((length, body)) = sized.split_first_chunk() else { return Ok(None) };
                (u64::from_be_bytes(*length), body)
            };
            let room = MESSAGE_BYTES_MAX - self.message_bytes;
            let length = usize::try_from(length).ok().filter(|length| *length <= room);
            let length =
                length.ok_or_else(|| format!("a message is longer than {MESSAGE_BYTES_MAX} bytes"))?;
            let Some(body) = body.get(..length) else { return Ok(None) };
            let body = body.to_vec();
            self.done += 1 + if flags & LONG == 0 { 1 } else { 8 } + length;
            if flags & COMMAND != 0 {
                return Ok(Some(PeerInput::Command(body)));
            }
            if self.message.len() == FRAMES_MAX {
                return Err(format!("a message has more than {FRAMES_MAX} frames"));
            }
            self.message_bytes += length;
            self.message.push(body);
            if flags & MORE == 0 {
                self.message_bytes = 0;
                return Ok(Some(PeerInput::Message(std::mem::take(&mut self.message))));
            }
        }
    }
}

/// The type of this side's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZmqSocket {
    /// Subscribes to what a PUB socket says.
    Sub,
    /// Sends a request to a ROUTER socket.
    Dealer,
}

impl ZmqSocket {
    fn name(self) -> &'static str {
        match self {
            ZmqSocket::Sub => "SUB",
            ZmqSocket::Dealer => "DEALER",
        }
    }

    fn may_meet(self, other: &[u8]) -> bool {
        match self {
            ZmqSocket::Sub => matches!(other, b"PUB" | b"XPUB"),
            ZmqSocket::Dealer => matches!(other, b"ROUTER" | b"DEALER" | b"REP"),
        }
    }
}

/// A connection to a peer.
#[derive(Debug)]
pub(crate) struct ZmqPeer {
    stream: TcpStream,
    frames: FrameDecoder,
}

impl ZmqPeer {
    /// Greets the other side and reads its identity.
    ///
    /// # Errors
    /// Why it cannot be talked with.
    pub(crate) async fn meet(mut stream: TcpStream, socket: ZmqSocket) -> Result<Self, String> {
        let lost = |error: std::io::Error| format!("the connection broke while greeting: {error}");
        stream.set_nodelay(true).map_err(lost)?;
        let mut greeting = [0; GREETING_BYTES];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.map_err(lost)?;
        let mut theirs = [0; GREETING_BYTES];
        stream.read_exact(&mut theirs).await.map_err(lost)?;
        if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
            return Err("it does not speak ZMTP 3".into());
        }
        if theirs[12..32] != greeting[12..32] {
            return Err("it requires authentication, which is not supported".into());
        }
        let mut ready = b"\x05READY".to_vec();
        for (name, value) in [("Socket-Type", socket.name()), ("Identity", "")] {
            ready.push(to_u8(name.len()));
            ready.extend_from_slice(name.as_bytes());
            ready.extend_from_slice(&to_u32(value.len()).to_be_bytes());
            ready.extend_from_slice(value.as_bytes());
        }
        let mut peer = ZmqPeer { stream, frames: FrameDecoder::default() };
        peer.write(&[framed(COMMAND, &ready)]).await?;
        match peer.next().await? {
            PeerInput::Command(command) => {
                let kind = socket_type(&command)?;
                if !socket.may_meet(kind) {
                    let kind = String::from_utf8_lossy(kind);
                    return Err(format!("a socket {kind} does not talk with {}", socket.name()));
                }
            }
            PeerInput::Message(_) => return Err("it sends no identity".into()),
        }
        Ok(peer)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) async fn send(&mut self, message: &[&[u8]]) -> Result<(), String> {
        let last = message.len().saturating_sub(1);
        let frames = message.iter().enumerate();
        let frames: Vec<Vec<u8>> =
            frames.map(|(at, body)| framed(if at < last { MORE } else { 0 }, body)).collect();
        self.write(&frames).await
    }

    /// Waits for a message. It may be given up waiting for at any time, and waited for again.
    ///
    /// # Errors
    /// The connection is broken, or of no use any more.
    pub(crate) async fn receive(&mut self) -> Result<ZmtpMessage, String> {
        loop {
            if let PeerInput::Message(message) = self.next().await? {
                return Ok(message);
            }
        }
    }

    async fn write(&mut self, frames: &[Vec<u8>]) -> Result<(), String> {
        self.stream
            .write_all(&frames.concat())
            .await
            .map_err(|error| format!("the connection broke: {error}"))
    }

    async fn next(&mut self) -> Result<PeerInput, String> {
        let mut piece = Vec::new();
        loop {
            if let Some(unit) = self.frames.next()? {
                return Ok(unit);
            }
            piece.clear();
            piece.reserve(READ_BYTES);
            match self.stream.read_buf(&mut piece).await {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(_) => self.frames.push(&piece),
                Err(error) => return Err(format!("the connection broke: {error}")),
            }
        }
    }
}

/// A frame with its head.
fn framed(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = match u8::try_from(body.len()) {
        Ok(length) => vec![flags, length],
        Err(_) => [&[flags | LONG][..], &(body.len() as u64).to_be_bytes()].concat(),
    };
    frame.extend_from_slice(body);
    frame
}

/// The type of socket that a READY command tells.
fn socket_type(command: &[u8]) -> Result<&[u8], String> {
    let wrong = || "it sends no identity".to_owned();
    let mut rest = match command.strip_prefix(b"\x05READY") {
        Some(rest) => rest,
        None if command.starts_with(b"\x05ERROR") => {
            let why = String::from_utf8_lossy(command.get(7..).unwrap_or_default());
            return Err(format!("it refuses the connection: {}", why.chars().take(255).collect::<String>()));
        }
        None => return Err(wrong()),
    };
    while let Some((&length, more)) = rest.split_first() {
        let (name, more) = more.split_at_checked(usize::from(length)).ok_or_else(wrong)?;
        let (length, more) = more.split_first_chunk().ok_or_else(wrong)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(|_| wrong())?;
        let (value, more) = more.split_at_checked(length).ok_or_else(wrong)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(value);
        }
        rest = more;
    }
    Err(wrong())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(frames: &mut FrameDecoder) -> Result<Vec<PeerInput>, String> {
        std::iter::from_fn(|| frames.next().transpose()).collect()
    }

    #[test]
    fn frames_are_read_as_they_stand_in_the_protocol() {
        let mut frames = FrameDecoder::default();
        frames.push(b"\x04\x03\x01PX\x01\x01a\x02\0\0\0\0\0\0\0\x02bc\0\0");
        let message =
            |parts: &[&str]| PeerInput::Message(parts.iter().map(|part| part.as_bytes().to_vec()).collect());
        let expected = [PeerInput::Command(b"\x01PX".to_vec()), message(&["a", "bc"]), message(&[""])];
        assert_eq!(all(&mut frames), Ok(expected.into()));
    }

    #[test]
    fn what_would_take_much_memory_is_refused_before_it_comes() {
        let refused = |bytes: &[u8]| {
            let mut frames = FrameDecoder::default();
            frames.push(bytes);
            all(&mut frames).is_err()
        };
        assert!(refused(&[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]));
        assert!(refused(&[2, 0, 0, 0, 0, 0x01, 0, 0, 0]));
        assert!(refused(&[1, 0].repeat(FRAMES_MAX + 1)));
        assert!(refused(&[8, 0]) && refused(&[5, 0]));
        assert!(!refused(&[2, 0, 0, 0, 0, 0, 0x40, 0, 0]));
    }

    #[test]
    fn the_other_side_says_what_it_is() {
        let ready = b"\x05READY\x08Identity\0\0\0\0\x0bsocket-type\0\0\0\x03PUB";
        assert_eq!(socket_type(ready), Ok(&b"PUB"[..]));
        for end in 0..ready.len() {
            assert!(socket_type(&ready[..end]).is_err());
        }
        assert!(socket_type(b"\x05ERROR\x03bad").unwrap_err().contains("bad"));
        assert!(ZmqSocket::Sub.may_meet(b"XPUB") && !ZmqSocket::Sub.may_meet(b"ROUTER"));
    }

    proptest! {
        #[test]
        fn messages_are_read_back_however_they_are_cut(
            messages in proptest::collection::vec(
                proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..400), 1..4), 0..4),
            cut in 1..300_usize,
        ) {
            let mut bytes = Vec::new();
            for message in &messages {
                for (at, body) in message.iter().enumerate() {
                    bytes.extend(framed(if at + 1 < message.len() { MORE } else { 0 }, body));
                }
            }
            let (mut frames, mut read) = (FrameDecoder::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                frames.push(piece);
                read.extend(all(&mut frames).unwrap());
            }
            prop_assert_eq!(read, messages.into_iter().map(PeerInput::Message).collect::<Vec<_>>());
        }

        #[test]
        fn hostile_bytes_end_the_connection_and_nothing_more(bytes in proptest::collection::vec(any::<u8>(), 0..99)) {
            let mut frames = FrameDecoder::default();
            frames.push(&bytes);
            let _ = all(&mut frames);
            let _ = socket_type(&bytes);
            prop_assert!(frames.message_bytes <= MESSAGE_BYTES_MAX);
        }
    }
}
