//! The shared state of a picker's requests: settings, the current pool and buffered bytes.

use crate::pool::EndpointPool;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::picker::{PickRefusal, Picker};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Bytes of all bodies that wait for a destination; further ones get 429.
const HELD_BYTES_MAX: usize = 1 << 30;
/// Settings of the operator.
#[derive(Clone, Copy, Debug)]
pub struct PickerSettings {
    /// Maximum number of endpoints that are named after the destination.
    pub fallbacks: usize,
}

/// A pool whose endpoints get requests.
pub(crate) struct PoolInForce {
    pub(crate) picker: Picker,
    /// Addresses by the position of an engine, in the proxies' format.
    pub(crate) addresses: Vec<String>,
    pub(crate) positions: HashMap<String, usize>,
    pub(crate) objectives: BTreeMap<String, i32>,
}

impl PoolInForce {
    pub(crate) fn new(picker: Picker, pool: &EndpointPool) -> Self {
        let addresses: Vec<String> = pool.endpoints.iter().map(|one| one.address.to_string()).collect();
        let positions = addresses.iter().cloned().zip(0..).collect();
        PoolInForce { picker, addresses, positions, objectives: pool.objectives.clone() }
    }

    /// The positions of all endpoints outside of a list of addresses with or without ports.
    pub(crate) fn all_but(&self, listed: &[String]) -> Vec<usize> {
        let host = |address: &str| address.rsplit_once(':').map(|(host, _)| host.to_owned());
        let is_listed = |address: &String| {
            listed.iter().any(|one| one == address || Some(one.as_str()) == host(address).as_deref())
        };
        let addresses = self.addresses.iter().enumerate();
        addresses.filter(|(_, address)| !is_listed(address)).map(|(at, _)| at).collect()
    }
}

/// The shared state of all requests.
pub(crate) struct PickerState {
    env: SharedEnv,
    pub(crate) settings: PickerSettings,
    pool: RwLock<Option<Arc<PoolInForce>>>,
    /// Bytes of bodies that wait for a destination.
    held_bytes: AtomicUsize,
}

impl PickerState {
    pub(crate) fn new(env: SharedEnv, settings: PickerSettings) -> Self {
        PickerState { env, settings, pool: RwLock::default(), held_bytes: AtomicUsize::new(0) }
    }

    pub(crate) fn take_pool(&self, pool: PoolInForce) {
        *self.pool.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(pool));
    }

    pub(crate) fn pool(&self) -> Option<Arc<PoolInForce>> {
        self.pool.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn random_id(&self) -> String {
        format!("pick-{:016x}{:016x}", self.env.random(), self.env.random())
    }

    /// Reserves bytes of a body that waits.
    ///
    /// # Errors
    /// The refusal of the request, if too many bytes wait.
    pub(crate) fn hold(&self, bytes: usize) -> Result<(), PickRefusal> {
        let held = self.held_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        if held <= HELD_BYTES_MAX {
            return Ok(());
        }
        self.release(bytes);
        Err(PickRefusal::overloaded("too many bytes of requests wait for a destination"))
    }

    pub(crate) fn release(&self, bytes: usize) {
        let before = self.held_bytes.fetch_sub(bytes, Ordering::AcqRel);
        assert!(before >= bytes, "{bytes} bytes are released, and {before} were held");
    }
}
