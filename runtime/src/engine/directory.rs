//! Where each instance's worker takes its messages, in this process or behind a connection.

use super::messages::{FromPeer, Order, PeerWord, ToWorker};
use crate::mailbox::MessageSender;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// How an instance is reached: who gives orders from here, and who speaks of KV.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inboxes {
    /// None: it takes no orders from this process.
    pub(crate) orders: Option<MessageSender<ToWorker>>,
    /// None: nothing here exchanges KV with it.
    pub(crate) words: Option<MessageSender<FromPeer>>,
}

/// The inboxes of the fleet's workers. Clones are one directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory(Arc<RwLock<BTreeMap<InstanceId, Inboxes>>>);

impl Directory {
    /// From now on `inboxes` take the messages to `instance`.
    pub(crate) fn enter(&self, instance: InstanceId, inboxes: Inboxes) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(instance, inboxes);
    }

    /// Nothing goes to `instance` any more.
    pub(crate) fn leave(&self, instance: InstanceId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }

    /// The ways to `instance`, as far as they are known.
    pub(crate) fn find(&self, instance: InstanceId) -> Inboxes {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&instance).cloned().unwrap_or_default()
    }

    /// Gives an order. Nobody takes it if the worker is gone: then it has reported why, or its connection
    /// has, and its requests are replayed on that report.
    pub(crate) fn order(&self, instance: InstanceId, order: Order) {
        self.manage(instance, ToWorker::Order(order));
    }

    /// Sends what an instance is told by its own process.
    pub(crate) fn manage(&self, instance: InstanceId, message: ToWorker) {
        self.find(instance).orders.map(|orders| orders.send(message));
    }

    /// Sends a word of `from` to `instance`. False if nobody takes it.
    pub(crate) fn tell(&self, instance: InstanceId, from: InstanceId, word: PeerWord) -> bool {
        self.find(instance).words.is_some_and(|words| words.send((from, word)).is_ok())
    }

    /// Completes when no more words can be said to `instance`.
    pub(crate) async fn gone(&self, instance: InstanceId) {
        if let Some(words) = self.find(instance).words {
            words.closed().await;
        }
    }
}
