//! Queues between tasks whose senders may not wait: a worker's inbox, its reports, a session's messages.
//!
//! [`MessageSender::send`] never waits and loses nothing, so that two tasks that send to each other cannot
//! block each other. A queue is bounded because every task that takes messages from outside, or that makes
//! many, first waits for [`room`](MessageSender::room). Messages sent without waiting are bounded by the
//! requests in the fleet, and may be as many again. More than twice the bound is a bug, which debug builds
//! assert.

use std::fmt::{Debug, Formatter};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{Notify, mpsc};

/// Messages that may wait in each of a worker's inboxes: orders, and KV messages of peers.
pub const INBOX_MAX: usize = 1 << 16;
/// Reports that may wait for the coordinator or the hub, from all of its instances.
pub const REPORTS_MAX: usize = 1 << 18;
/// Messages of a session that may wait for the connection, in each direction.
pub const SESSION_MAX: usize = 1 << 16;

struct Gauge {
    name: &'static str,
    messages_max: usize,
    waiting: AtomicUsize,
    room: Notify,
}

/// The sending end of a queue. Clones send to the same queue.
pub struct MessageSender<T> {
    queue: mpsc::UnboundedSender<T>,
    gauge: Arc<Gauge>,
}

/// The end of a queue that takes.
pub struct MessageReceiver<T> {
    queue: mpsc::UnboundedReceiver<T>,
    gauge: Arc<Gauge>,
}

/// The receiving end of a queue no longer exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverGone;

/// Creates both ends of a queue in which about `messages_max` messages may wait.
pub fn mailbox<T>(name: &'static str, messages_max: usize) -> (MessageSender<T>, MessageReceiver<T>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let gauge = Arc::new(Gauge { name, messages_max, waiting: AtomicUsize::new(0), room: Notify::new() });
    (MessageSender { queue: sender, gauge: gauge.clone() }, MessageReceiver { queue: receiver, gauge })
}

impl<T> MessageSender<T> {
    /// Appends a message to the queue.
    ///
    /// # Errors
    /// [`ReceiverGone`] if the receiving end no longer exists.
    pub fn send(&self, message: T) -> Result<(), ReceiverGone> {
        let Gauge { name, messages_max, waiting, .. } = &*self.gauge;
        // Counted before it is sent, since the receiver subtracts it.
        let before = waiting.fetch_add(1, Ordering::Relaxed);
        if self.queue.send(message).is_err() {
            waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(ReceiverGone);
        }
        if before == 2 * messages_max {
            tracing::error!(queue = name, before, "more messages wait than can: please report this");
        }
        debug_assert!(before < 2 * messages_max, "{before} messages wait in the queue '{name}'");
        Ok(())
    }

    /// Completes when there is room for more messages, or the receiver is gone.
    pub async fn room(&self) {
        while self.gauge.waiting.load(Ordering::Relaxed) >= self.gauge.messages_max {
            let roomier = self.gauge.room.notified();
            let mut roomier = std::pin::pin!(roomier);
            roomier.as_mut().enable();
            // Room may have been made before the listener was registered.
            if self.gauge.waiting.load(Ordering::Relaxed) < self.gauge.messages_max {
                return;
            }
            tokio::select! {
                biased;
                () = roomier => {}
                () = self.queue.closed() => return,
            }
        }
    }

    /// Completes when the receiver is gone.
    pub async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Whether the receiver is gone.
    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }
}

impl<T> MessageReceiver<T> {
    /// The next message, or none when all senders are gone.
    pub async fn recv(&mut self) -> Option<T> {
        let message = self.queue.recv().await;
        self.taken(message.is_some());
        message
    }

    /// The next message, if one is waiting.
    ///
    /// # Errors
    /// When no message is waiting, or all senders are gone too.
    pub fn try_recv(&mut self) -> Result<T, TryRecvError> {
        let message = self.queue.try_recv();
        self.taken(message.is_ok());
        message
    }

    /// Number of waiting messages.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether all senders are gone.
    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    fn taken(&self, one: bool) {
        let Gauge { messages_max, waiting, room, .. } = &*self.gauge;
        if one && waiting.fetch_sub(1, Ordering::Relaxed) == *messages_max {
            room.notify_waiters();
        }
    }
}

impl<T> Clone for MessageSender<T> {
    fn clone(&self) -> Self {
        MessageSender { queue: self.queue.clone(), gauge: self.gauge.clone() }
    }
}

impl<T> Debug for MessageSender<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "MessageSender({})", self.gauge.name)
    }
}

impl<T> Debug for MessageReceiver<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "MessageReceiver({})", self.gauge.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn there_is_room_until_so_many_wait_and_again_when_one_is_taken() {
        let (sender, mut receiver) = mailbox("test", 2);
        let first = sender.room().now_or_never();
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        let mut room = std::pin::pin!(sender.room());
        assert_eq!((first, room.as_mut().now_or_never(), receiver.len()), (Some(()), None, 2));
        // A message sent without room is accepted all the same, and there is room again when fewer than two
        // wait.
        sender.send(3).unwrap();
        assert_eq!((receiver.recv().now_or_never(), room.as_mut().now_or_never()), (Some(Some(1)), None));
        assert_eq!((receiver.try_recv(), room.now_or_never()), (Ok(2), Some(())));
    }

    #[test]
    fn nobody_waits_for_room_where_nobody_takes_anything() {
        let (sender, receiver) = mailbox("test", 1);
        sender.send(1).unwrap();
        let mut room = std::pin::pin!(sender.room());
        assert_eq!(room.as_mut().now_or_never(), None);
        drop(receiver);
        assert_eq!((room.now_or_never(), sender.send(2)), (Some(()), Err(ReceiverGone)));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "asserted in debug builds")]
    #[should_panic(expected = "4 messages wait in the queue 'test'")]
    fn more_than_twice_the_bound_is_a_bug() {
        let (sender, _receiver) = mailbox("test", 2);
        (0..5).for_each(|message| sender.send(message).unwrap());
    }
}
