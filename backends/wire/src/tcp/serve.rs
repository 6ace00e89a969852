//! The passive end of one stream.

use super::inbox::ReceiveBuffer;
use super::parts::IovecQueue;
use super::protocol::{FrameHeader, FrameReply, PAYLOAD_BYTES_MAX, Range};
use super::server::RegionUser;
use crate::one_sided::Direction;
use crate::stream::SecureStream;
use std::io::{self, Write};

/// Handles frames until the peer closes, the protocol is violated or the region is fenced.
pub(super) fn serve(link: &mut SecureStream, inbox: &mut ReceiveBuffer, user: &RegionUser) -> io::Result<()> {
    let mut answer = Vec::new();
    loop {
        let head: [u8; FrameHeader::BYTES] = inbox.take(link)?;
        let Some(head) = FrameHeader::decode(&head) else {
            return refuse(link, 0);
        };
        let ranges = inbox.fill(link, usize::from(head.ranges) * Range::BYTES, None)?;
        let Some(mut parts) = place(&head, ranges, user) else {
            return refuse(link, head.frame);
        };
        answer.clear();
        answer.extend(FrameReply { refused: false, frame: head.frame }.encode());
        let mut reply = IovecQueue::default();
        reply.push(answer.as_mut_ptr(), answer.len() as u64);
        match head.direction {
            Direction::Write => inbox.receive(link, &mut parts)?,
            Direction::Read => reply.append(parts),
        }
        send(link, &mut reply)?;
    }
}

/// Resolves the ranges of a frame; `None` if the peer may not access them.
fn place(head: &FrameHeader, ranges: &[u8], user: &RegionUser) -> Option<IovecQueue> {
    let mut parts = IovecQueue::default();
    for range in ranges.as_chunks().0 {
        let Range { offset, bytes } = Range::decode(range);
        parts.push(user.address(offset, bytes)?, bytes);
        if parts.bytes() > PAYLOAD_BYTES_MAX {
            return None;
        }
    }
    head.direction.is_allowed(user.access()).then_some(parts)
}

/// Reports a refusal and ends the stream, since only a broken peer sends such a frame.
fn refuse(link: &mut SecureStream, frame: u64) -> io::Result<()> {
    say(link, &FrameReply { refused: true, frame }.encode())
}

/// Sends all of `words` on a blocking stream.
pub(super) fn say(link: &mut SecureStream, words: &[u8]) -> io::Result<()> {
    link.write_all(words)?;
    link.flush()
}

/// Sends all of `parts` on a blocking stream.
fn send(link: &mut SecureStream, parts: &mut IovecQueue) -> io::Result<()> {
    while parts.bytes() > 0 {
        let sent = parts.with(None, |parts| link.send(parts))?;
        parts.advance(sent);
    }
    link.flush()
}
