//! Carries a session over a pair of streams.

use super::super::session::Session;
use super::codec::encode;
use bytes::Bytes;
use futures_util::Stream;
use serde::Serialize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

/// Maximum bytes that wait for a slow peer: a second of tokens of a thousand sequences is 100 kB, and all
/// blocks of a large cache, for a new router, about 10 MB.
pub(super) const BACKLOG_BYTES_MAX: usize = 64 << 20;

/// Overhead of a waiting message.
const MESSAGE_BYTES: usize = 64;

/// The sending end of a stream's queue, which never waits: a message that does not fit ends the session.
pub(super) struct Outlet {
    queue: mpsc::UnboundedSender<Bytes>,
    waiting_bytes: Arc<AtomicUsize>,
    bytes_max: usize,
}

/// The stream of outgoing messages.
pub(super) struct Outflow {
    queue: mpsc::UnboundedReceiver<Bytes>,
    waiting_bytes: Arc<AtomicUsize>,
}

/// Both ends of a queue that holds `bytes_max` bytes.
pub(super) fn outflow(bytes_max: usize) -> (Outlet, Outflow) {
    let (queue, taken) = mpsc::unbounded_channel();
    let waiting_bytes = Arc::new(AtomicUsize::new(0));
    (
        Outlet { queue, waiting_bytes: waiting_bytes.clone(), bytes_max },
        Outflow { queue: taken, waiting_bytes },
    )
}

impl Outlet {
    /// Appends a message.
    fn put(&self, message: Bytes) -> Result<(), Ended> {
        let bytes = message.len() + MESSAGE_BYTES;
        let waiting = self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if waiting > self.bytes_max {
            return Err(Ended::Backlog(waiting));
        }
        self.queue.send(message).map_err(|_| Ended::Quietly)
    }
}

impl Stream for Outflow {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let next = self.queue.poll_recv(context);
        if let Poll::Ready(Some(message)) = &next {
            self.waiting_bytes.fetch_sub(message.len() + MESSAGE_BYTES, Ordering::Relaxed);
        }
        next
    }
}

/// Why a session is over.
enum Ended {
    Quietly,
    Broken(Status),
    Backlog(usize),
}

/// Carries a session until either end is dropped or the streams end. `peer` names the other end in the log.
pub(super) async fn carry<Out: Serialize, In>(
    peer: String,
    session: Session<In, Out>,
    outlet: Outlet,
    stream: Streaming<In>,
) {
    match until_it_ends(session, &outlet, stream).await {
        Ended::Quietly => tracing::debug!(peer, "a session ended"),
        Ended::Broken(status) => tracing::info!(peer, %status, "a session broke"),
        Ended::Backlog(bytes) => {
            tracing::warn!(peer, bytes, "session ended: the peer does not accept messages");
        }
    }
}

async fn until_it_ends<Out: Serialize, In>(
    mut session: Session<In, Out>,
    outlet: &Outlet,
    mut stream: Streaming<In>,
) -> Ended {
    loop {
        let step = tokio::select! {
            message = session.incoming.recv() => match message {
                Some(message) => encode(&message).map_err(Ended::Broken).and_then(|bytes| outlet.put(bytes)),
                None => Err(Ended::Quietly),
            },
            message = async {
                session.out.room().await;
                stream.message().await
            } => match message {
                Ok(Some(message)) => session.out.send(message).map_err(|_| Ended::Quietly),
                Ok(None) => Err(Ended::Quietly),
                Err(status) => Err(Ended::Broken(status)),
            },
            () = session.out.closed() => Err(Ended::Quietly),
            () = outlet.queue.closed() => Err(Ended::Quietly),
        };
        if let Err(ended) = step {
            return ended;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn what_waits_is_bounded_and_what_is_taken_makes_room() {
        let message = || Bytes::from(vec![7; 1000]);
        let (outlet, mut outflow) = outflow(3 * (1000 + MESSAGE_BYTES));
        for _ in 0..3 {
            assert!(outlet.put(message()).is_ok());
        }
        let next = std::future::poll_fn(|context| Pin::new(&mut outflow).poll_next(context)).now_or_never();
        assert_eq!(next, Some(Some(message())));
        assert!(outlet.put(message()).is_ok());
        assert!(matches!(outlet.put(message()), Err(Ended::Backlog(_))));
    }
}
