//! Updates of requests that wait for a client to read them, with a limit on their bytes.
//!
//! The engine never waits for a client, so unread updates are held here. All answers share a budget, half of
//! it for one party; an answer that exceeds it is cancelled, and its client gets an error.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc::error::{SendError, TrySendError};
use tokio::sync::{Notify, mpsc};

use super::{Failure, Logprobs, Update};
use crate::budget::{BudgetError, HeldBytes};

/// Bytes of an answer that may wait without counting against the budget, so that an answer whose client reads
/// is never cut off.
pub(crate) const FREE_BYTES: usize = 64 << 10;

/// Bytes of the updates that wait for one client, over all choices of its request.
#[derive(Debug)]
pub struct AnswerBacklog {
    waiting: Mutex<WaitingBytes>,
    over: AtomicBool,
    exceeded: Notify,
}

#[derive(Debug)]
struct WaitingBytes {
    bytes: usize,
    /// Bytes held of the budget; none without a limit.
    held: Option<HeldBytes>,
}

impl AnswerBacklog {
    /// A backlog whose bytes beyond [`FREE_BYTES`] are `held`, which holds nothing yet.
    pub fn within(held: HeldBytes) -> Arc<Self> {
        Self::new(Some(held))
    }

    /// A backlog without a limit, for callers in this process that read all updates.
    pub fn unlimited() -> Arc<Self> {
        Self::new(None)
    }

    fn new(held: Option<HeldBytes>) -> Arc<Self> {
        Arc::new(AnswerBacklog {
            waiting: Mutex::new(WaitingBytes { bytes: 0, held }),
            over: AtomicBool::new(false),
            exceeded: Notify::new(),
        })
    }

    /// Whether the budget was exceeded: nothing more is sent.
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Counts an update of this many bytes. Returns whether there is room; if not, the answer ends.
    fn grow(&self, bytes: usize) -> bool {
        let fits = !self.is_over() && self.lock().grow(bytes).is_ok();
        if !fits && !self.over.swap(true, Ordering::AcqRel) {
            tracing::warn!("an answer is cancelled: its client reads too slowly");
            self.exceeded.notify_waiters();
        }
        fits
    }

    /// Waits until the budget is exceeded.
    async fn exceeded(&self) {
        let notified = self.exceeded.notified();
        if !self.is_over() {
            notified.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, WaitingBytes> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitingBytes {
    fn grow(&mut self, bytes: usize) -> Result<(), BudgetError> {
        let all = self.bytes + bytes;
        if let Some(held) = &mut self.held {
            held.grow(all.saturating_sub(FREE_BYTES).saturating_sub(held.bytes()))?;
        }
        self.bytes = all;
        Ok(())
    }

    fn shrink(&mut self, bytes: usize) {
        self.bytes -= bytes;
        if let Some(held) = &mut self.held {
            held.shrink(held.bytes().saturating_sub(self.bytes.saturating_sub(FREE_BYTES)));
        }
    }
}

/// Bytes that log-probabilities take beside the fields that refer to them.
pub(crate) fn logprobs_bytes(logprobs: &Logprobs) -> usize {
    size_of_val(&logprobs.top[..])
}

fn update_bytes(update: &Update) -> usize {
    let beside = match update {
        Update::Token { logprobs: Some(logprobs), .. } => logprobs_bytes(logprobs),
        _ => 0,
    };
    size_of::<Update>() + beside
}

/// A channel for the updates of one choice, with room for `bound` of them.
pub fn update_channel(bound: usize, backlog: Arc<AnswerBacklog>) -> (UpdateSender, UpdateReceiver) {
    let (updates, receiver) = mpsc::channel(bound);
    (UpdateSender { updates, backlog: backlog.clone() }, UpdateReceiver { updates: receiver, backlog })
}

/// The engine's end of a channel of updates.
#[derive(Clone, Debug)]
pub struct UpdateSender {
    updates: mpsc::Sender<Update>,
    backlog: Arc<AnswerBacklog>,
}

impl UpdateSender {
    /// Sends an update, or drops it if the client reads too slowly.
    ///
    /// # Errors
    /// When the channel is full, or the receiver is gone.
    pub fn try_send(&self, update: Update) -> Result<(), TrySendError<Update>> {
        let bytes = update_bytes(&update);
        if !self.backlog.grow(bytes) {
            return Ok(());
        }
        let sent = self.updates.try_send(update);
        if sent.is_err() {
            self.backlog.lock().shrink(bytes);
        }
        sent
    }

    /// Sends an update once the channel has room for it.
    ///
    /// # Errors
    /// When the receiver is gone, or its client reads too slowly.
    pub async fn send(&self, update: Update) -> Result<(), SendError<Update>> {
        let bytes = update_bytes(&update);
        if !self.backlog.grow(bytes) {
            return Err(SendError(update));
        }
        let sent = self.updates.send(update).await;
        if sent.is_err() {
            self.backlog.lock().shrink(bytes);
        }
        sent
    }

    /// Updates that there is room for.
    pub fn capacity(&self) -> usize {
        self.updates.capacity()
    }

    /// Waits until the receiver is gone, or until its client has let too much wait.
    pub async fn closed(&self) {
        tokio::select! {
            () = self.updates.closed() => {}
            () = self.backlog.exceeded() => {}
        }
    }
}

/// The API's end of a channel of updates. Dropping it cancels the request.
#[derive(Debug)]
pub struct UpdateReceiver {
    updates: mpsc::Receiver<Update>,
    backlog: Arc<AnswerBacklog>,
}

impl UpdateReceiver {
    /// The next update, or `None` once the engine has closed the channel.
    pub async fn recv(&mut self) -> Option<Update> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next update, if one waits.
    pub fn try_recv(&mut self) -> Option<Update> {
        let update = self.updates.try_recv().ok()?;
        self.backlog.lock().shrink(update_bytes(&update));
        Some(update)
    }

    /// Polls for the next update, which is a failure where too much had to wait.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Update>> {
        let update = ready!(self.updates.poll_recv(context));
        if let Some(update) = &update {
            self.backlog.lock().shrink(update_bytes(update));
        } else if self.backlog.is_over() {
            let message = "the answer was cancelled: its client reads too slowly";
            return Poll::Ready(Some(Update::Failed(Failure::exhausted(message))));
        }
        Poll::Ready(update)
    }
}

impl Drop for UpdateReceiver {
    fn drop(&mut self) {
        self.updates.close();
        while let Ok(update) = self.updates.try_recv() {
            self.backlog.lock().shrink(update_bytes(&update));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::{ByteBudget, Party};

    fn token(alternatives: usize) -> Update {
        Update::Token { id: 1, logprobs: Some(Logprobs { chosen: -1.0, top: vec![(2, -2.0); alternatives] }) }
    }

    fn holder(budget: &ByteBudget, name: &str) -> HeldBytes {
        budget.holder(Party::Tenant(name.into()))
    }

    fn take_all(updates: &mut UpdateReceiver) -> Vec<Update> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut taken = Vec::new();
        while let Poll::Ready(Some(update)) = updates.poll_recv(&mut context) {
            let ended = matches!(update, Update::Failed(_));
            taken.push(update);
            if ended {
                break;
            }
        }
        taken
    }

    #[test]
    fn an_answer_beyond_the_budget_ends_with_a_reason() {
        let budget = ByteBudget::new(256 << 10);
        let (sender, mut receiver) = update_channel(10_000, AnswerBacklog::within(holder(&budget, "a")));
        let update_bytes = update_bytes(&token(20));
        (0..10_000).for_each(|_| sender.try_send(token(20)).unwrap());
        let room = FREE_BYTES + (128 << 10);
        assert!(budget.left() >= 128 << 10, "half is left for others");
        let mut closed = std::pin::pin!(sender.closed());
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(closed.as_mut().poll(&mut context).is_ready(), "the engine is notified");
        let sent = 10_000 - sender.capacity();
        assert_eq!(sent, room / update_bytes);
        assert_eq!(take_all(&mut receiver).len(), sent, "no end before the engine has closed the channel");
        assert_eq!(budget.left(), 256 << 10);
    }

    #[test]
    fn a_client_that_reads_is_not_cut_off_by_others() {
        let budget = ByteBudget::new(256 << 10);
        let stalled = AnswerBacklog::within(holder(&budget, "a"));
        let (flood, mut kept) = update_channel(10_000, stalled);
        (0..10_000).for_each(|_| flood.try_send(token(20)).unwrap());
        let (sender, mut receiver) = update_channel(10, AnswerBacklog::within(holder(&budget, "a")));
        for _ in 0..1000 {
            sender.try_send(token(20)).unwrap();
            assert_eq!(take_all(&mut receiver).len(), 1);
        }
        drop(flood);
        assert!(matches!(take_all(&mut kept).last(), Some(Update::Failed(_))));
    }

    #[test]
    fn choices_share_one_backlog_and_give_back_what_they_held() {
        let budget = ByteBudget::new(1 << 20);
        let backlog = AnswerBacklog::within(holder(&budget, "a"));
        let choices: Vec<_> = (0..4).map(|_| update_channel(10_000, backlog.clone())).collect();
        for (sender, _) in &choices {
            (0..5000).for_each(|_| sender.try_send(token(20)).unwrap());
        }
        assert!(backlog.is_over());
        drop(choices);
        assert_eq!((budget.left(), backlog.lock().bytes), (1 << 20, 0));
    }
}
