//! What a registry asks of the store where it lies.

use super::RegistryError;
use futures_util::future::BoxFuture;
use std::time::Duration;

/// An answer that may never come: whoever waits for it has a deadline.
pub(super) type Answer<'a, T> = BoxFuture<'a, Result<T, RegistryError>>;

/// A lease's number.
pub(super) type Lease = i64;

/// What stands under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) value: Vec<u8>,
    /// The store's revision when the key came to be. Of two keys the older has the smaller.
    pub(super) created: i64,
    /// The store's revision when it was written last.
    pub(super) revision: i64,
    /// The lease that it ends with; 0 if none.
    pub(super) lease: Lease,
}

/// What must be so for a write to be done.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    /// The key has this revision; 0 means that there is none.
    Revision(String, i64),
    /// The key ends with this lease.
    Lease(String, Lease),
    /// No key begins so.
    NoneBelow(String),
}

/// A change that a watch tells of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Put { key: String, value: Vec<u8> },
    Gone { key: String },
}

/// The few operations of etcd that a fleet uses. Each sees all that was answered before it was asked.
pub(super) trait Store: Send + Sync {
    /// What stands under `key`.
    fn get(&self, key: String) -> Answer<'_, Option<Entry>>;

    /// All keys that begin with `prefix`, and the store's revision.
    fn list(&self, prefix: String) -> Answer<'_, (Vec<(String, Entry)>, i64)>;

    /// Writes if all of `conditions` hold; whether they did.
    fn put_if(
        &self,
        conditions: Vec<Condition>,
        key: String,
        value: Vec<u8>,
        lease: Lease,
    ) -> Answer<'_, bool>;

    /// A lease that ends `span` after it was last kept alive, and its keys with it.
    fn grant(&self, span: Duration) -> Answer<'_, Lease>;

    /// Whether the lease lives: if so, its time begins anew.
    fn keep_alive(&self, lease: Lease) -> Answer<'_, bool>;

    /// Ends a lease.
    fn revoke(&self, lease: Lease) -> Answer<'_, ()>;

    /// Changes of keys that begin with `prefix`, from `revision` on.
    fn watch(&self, prefix: String, revision: i64) -> Answer<'_, Box<dyn Watch>>;
}

/// A stream of changes. It may fall silent without an end.
pub(super) trait Watch: Send {
    /// The next changes. What was not returned yet is kept when this is dropped.
    fn next(&mut self) -> Answer<'_, Vec<Change>>;
}
