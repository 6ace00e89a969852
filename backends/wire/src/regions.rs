//! The regions that an owner lets peers reach.

use crate::key::RegionKey;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Registered memory.
pub(crate) trait FencedRegion {
    /// Whether this is the memory.
    fn is_of(&self, memory: &Arc<dyn SharedMemory>) -> bool;

    /// Refuses further peers, and returns when none writes or reads any more.
    ///
    /// # Errors
    /// When a peer may still write; then the memory stays registered, and it can be tried again.
    fn fence(&self) -> Result<()>;
}

/// All regions of a transport, by their keys, with their epochs.
pub(crate) struct RegionTable<R>(Mutex<Registered<R>>);

struct Registered<R> {
    by_key: BTreeMap<RegionKey, (u64, Arc<R>)>,
    next_epoch: u64,
}

impl<R> Default for RegionTable<R> {
    fn default() -> Self {
        RegionTable(Mutex::new(Registered { by_key: BTreeMap::new(), next_epoch: 0 }))
    }
}

/// The error for a region that is not there.
pub(crate) fn not_registered(epoch: u64) -> Error {
    Error::new(ErrorKind::Closed, format!("no region is registered under epoch {epoch} and this key"))
}

impl<R: FencedRegion> RegionTable<R> {
    /// Creates an empty set, whose epochs begin anywhere.
    pub(crate) fn new() -> Result<Self> {
        let random = RegionKey::random()?.0;
        let next_epoch = u64::from_le_bytes(random[..8].try_into().expect("eight of sixteen bytes"));
        Ok(RegionTable(Mutex::new(Registered { by_key: BTreeMap::new(), next_epoch })))
    }

    fn lock(&self) -> MutexGuard<'_, Registered<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers what `make` makes of `memory`, under a new key and epoch. What it was registered under ends.
    ///
    /// # Errors
    /// The errors of `make` and of the older region's fence.
    pub(crate) fn add(
        &self,
        memory: &Arc<dyn SharedMemory>,
        make: impl FnOnce() -> Result<R>,
    ) -> Result<(RegionKey, u64)> {
        let mut registered = self.lock();
        let older = registered.by_key.iter().find(|(_, (_, region))| region.is_of(memory));
        if let Some((key, region)) = older.map(|(&key, (_, region))| (key, region.clone())) {
            region.fence()?;
            registered.by_key.remove(&key);
        }
        let (key, region) = (RegionKey::random()?, Arc::new(make()?));
        let epoch = registered.next_epoch;
        registered.next_epoch = epoch.wrapping_add(1);
        registered.by_key.insert(key, (epoch, region));
        Ok((key, epoch))
    }

    /// Ends a region, once no peer reaches it.
    ///
    /// # Errors
    /// `Closed` if there is none, and the errors of its fence.
    pub(crate) fn remove(&self, key: RegionKey, epoch: u64) -> Result<()> {
        self.find(key, epoch)?.fence()?;
        self.lock().by_key.remove(&key).map(drop).ok_or_else(|| not_registered(epoch))
    }

    /// Finds a region.
    ///
    /// # Errors
    /// `Closed` if there is none.
    pub(crate) fn find(&self, key: RegionKey, epoch: u64) -> Result<Arc<R>> {
        let registered = self.lock();
        let found = registered.by_key.get(&key).filter(|(current, _)| *current == epoch);
        found.map(|(_, region)| region.clone()).ok_or_else(|| not_registered(epoch))
    }

    /// Returns all regions.
    pub(crate) fn all(&self) -> Vec<Arc<R>> {
        self.lock().by_key.values().map(|(_, region)| region.clone()).collect()
    }

    /// Ends every region.
    pub(crate) fn end(&self) {
        let ended = std::mem::take(&mut self.lock().by_key);
        for (_, region) in ended.into_values() {
            // a stopped peer keeps the memory; its owner was notified to deregister first
            let _ = region.fence();
        }
    }
}
