//! Where each instance's worker takes its messages, in this process or behind a connection.

use super::messages::ToWorker;
use crate::mailbox::MessageSender;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// The inboxes of the fleet's workers. Clones are one directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Directory(Arc<RwLock<BTreeMap<InstanceId, MessageSender<ToWorker>>>>);

impl Directory {
    /// From now on `inbox` takes the messages to `instance`.
    pub(crate) fn enter(&self, instance: InstanceId, inbox: MessageSender<ToWorker>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(instance, inbox);
    }

    /// Nothing goes to `instance` any more.
    pub(crate) fn leave(&self, instance: InstanceId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&instance);
    }

    /// The way to `instance`, if it is known.
    pub(crate) fn find(&self, instance: InstanceId) -> Option<MessageSender<ToWorker>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&instance).cloned()
    }

    /// Sends a message. Nobody takes it if the worker is gone: then it has reported why, or its connection
    /// has, and its requests are replayed on that report. False then.
    pub(crate) fn tell(&self, instance: InstanceId, message: ToWorker) -> bool {
        self.find(instance).is_some_and(|inbox| inbox.send(message).is_ok())
    }

    /// Completes when `instance` has room for more messages, or takes none.
    pub(crate) async fn room(&self, instance: InstanceId) {
        if let Some(inbox) = self.find(instance) {
            inbox.room().await;
        }
    }

    /// Completes when `instance` can take no more messages.
    pub(crate) async fn gone(&self, instance: InstanceId) {
        if let Some(inbox) = self.find(instance) {
            inbox.closed().await;
        }
    }
}
