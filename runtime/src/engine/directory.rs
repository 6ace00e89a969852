//! The inboxes of all instances' workers, in this process or behind a connection.

use super::messages::{FromPeer, KvMessage, Order, ToWorker};
use crate::mailbox::MessageSender;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// The inboxes of an instance, for orders and for messages of peers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inboxes {
    /// The inbox for orders; none if the instance takes no orders from this process.
    pub(crate) orders: Option<MessageSender<ToWorker>>,
    /// The inbox for peers' messages; none if no instance here exchanges KV with it.
    pub(crate) words: Option<MessageSender<FromPeer>>,
}

/// The inboxes of the fleet's workers, shared by all clones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory(Arc<RwLock<BTreeMap<InstanceId, Inboxes>>>);

impl Directory {
    /// Sends messages for `instance` to `inboxes` from now on.
    pub(crate) fn enter(&self, instance: InstanceId, inboxes: Inboxes) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(instance, inboxes);
    }

    /// Sends no more messages to `instance`.
    pub(crate) fn leave(&self, instance: InstanceId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }

    /// The inboxes of `instance`, as far as they are known.
    pub(crate) fn find(&self, instance: InstanceId) -> Inboxes {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&instance).cloned().unwrap_or_default()
    }

    /// Gives an order. If the worker is gone, the order is dropped: its report, or that of its connection,
    /// has its requests replayed.
    pub(crate) fn order(&self, instance: InstanceId, order: Order) {
        self.manage(instance, ToWorker::Order(order));
    }

    /// Sends a message of the instance's own process.
    pub(crate) fn manage(&self, instance: InstanceId, message: ToWorker) {
        self.find(instance).orders.map(|orders| orders.send(message));
    }

    /// Sends a message of `from` to `instance`. False if it cannot be delivered.
    pub(crate) fn tell(&self, instance: InstanceId, from: InstanceId, word: KvMessage) -> bool {
        self.find(instance).words.is_some_and(|words| words.send((from, word)).is_ok())
    }

    /// Completes when no more peers' messages can be sent to `instance`.
    pub(crate) async fn gone(&self, instance: InstanceId) {
        if let Some(words) = self.find(instance).words {
            words.closed().await;
        }
    }
}
