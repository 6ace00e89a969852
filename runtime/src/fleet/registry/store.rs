//! The operations that a registry needs from its store.

use super::RegistryError;
use futures_util::future::BoxFuture;
use std::time::Duration;

/// An answer that may never come, so callers have a deadline.
pub(super) type StoreAnswer<'a, T> = BoxFuture<'a, Result<T, RegistryError>>;

/// A lease's number.
pub(super) type Lease = i64;

/// The content of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) value: Vec<u8>,
    /// The store's revision at which the key was created. The older of two keys has the smaller one.
    pub(super) created: i64,
    /// The store's revision at which it was last written.
    pub(super) revision: i64,
    /// The lease that it ends with; 0 if none.
    pub(super) lease: Lease,
}

/// A precondition of a write.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    /// The key has this revision; 0 means that it does not exist.
    Revision(String, i64),
    /// The key ends with this lease.
    Lease(String, Lease),
    /// No key has this prefix.
    NoneBelow(String),
}

/// A change reported by a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Put { key: String, value: Vec<u8> },
    Gone { key: String },
}

/// The few operations of etcd that a fleet uses. Each observes everything that was answered before it was
/// called.
pub(super) trait Store: Send + Sync {
    /// The content of `key`.
    fn get(&self, key: String) -> StoreAnswer<'_, Option<Entry>>;

    /// All keys that begin with `prefix`, and the store's revision.
    fn list(&self, prefix: String) -> StoreAnswer<'_, (Vec<(String, Entry)>, i64)>;

    /// Writes if all of `conditions` hold, and returns whether they did.
    fn put_if(
        &self,
        conditions: Vec<Condition>,
        key: String,
        value: Vec<u8>,
        lease: Lease,
    ) -> StoreAnswer<'_, bool>;

    /// Creates a lease that ends, with its keys, `span` after it was last kept alive.
    fn grant(&self, span: Duration) -> StoreAnswer<'_, Lease>;

    /// Renews a lease, and returns whether it still lived.
    fn keep_alive(&self, lease: Lease) -> StoreAnswer<'_, bool>;

    /// Ends a lease.
    fn revoke(&self, lease: Lease) -> StoreAnswer<'_, ()>;

    /// Changes of keys that begin with `prefix`, from `revision` on.
    fn watch(&self, prefix: String, revision: i64) -> StoreAnswer<'_, Box<dyn Watch>>;
}

/// A stream of changes. It may become silent without an end.
pub(super) trait Watch: Send {
    /// The next changes. Changes that were not returned yet are kept if the future is dropped.
    fn next(&mut self) -> StoreAnswer<'_, Vec<Change>>;
}
