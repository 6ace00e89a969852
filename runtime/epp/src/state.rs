//! The shared state of a picker's requests: settings, the current pool and buffered bytes.

use crate::pool::EndpointPool;
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::picker::{PickRefusal, Picker};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    pub(crate) picker: Arc<Picker>,
    /// Addresses by the position of an engine, in the proxies' format.
    pub(crate) addresses: Vec<String>,
    pub(crate) positions: HashMap<String, usize>,
    pub(crate) objectives: BTreeMap<String, i32>,
    /// Positions of endpoints that have left the pool.
    absent: Vec<usize>,
}

impl PoolInForce {
    pub(crate) fn new(picker: Picker, pool: &EndpointPool) -> Self {
        let addresses: Vec<String> = pool.endpoints.iter().map(|one| one.address.to_string()).collect();
        let positions = addresses.iter().cloned().zip(0..).collect();
        let (picker, objectives) = (Arc::new(picker), pool.objectives.clone());
        PoolInForce { picker, addresses, positions, objectives, absent: Vec::new() }
    }

    /// The same engines, of which those outside of `pool` get no requests.
    fn narrowed(&self, pool: &EndpointPool) -> Self {
        let present: BTreeSet<String> = pool.endpoints.iter().map(|one| one.address.to_string()).collect();
        let addresses = self.addresses.iter().enumerate();
        let absent = addresses.filter(|(_, address)| !present.contains(*address)).map(|(at, _)| at);
        PoolInForce {
            picker: self.picker.clone(),
            addresses: self.addresses.clone(),
            positions: self.positions.clone(),
            objectives: pool.objectives.clone(),
            absent: absent.collect(),
        }
    }

    /// Whether no endpoint is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.absent.len() == self.addresses.len()
    }

    /// The positions of endpoints that have left, and of those outside of a list of addresses with or without
    /// ports, if there is one.
    pub(crate) fn left_out(&self, subset: Option<&[String]>) -> Vec<usize> {
        let Some(listed) = subset else { return self.absent.clone() };
        let host = |address: &str| address.rsplit_once(':').map(|(host, _)| host.to_owned());
        let is_listed = |address: &String| {
            listed.iter().any(|one| one == address || Some(one.as_str()) == host(address).as_deref())
        };
        let addresses = self.addresses.iter().enumerate();
        let is_out = |(at, address): &(usize, &String)| !is_listed(address) || self.absent.contains(at);
        addresses.filter(is_out).map(|(at, _)| at).collect()
    }
}

/// The shared state of all requests.
pub(crate) struct PickerState {
    env: SharedEnv,
    pub(crate) settings: PickerSettings,
    pool: RwLock<Option<Arc<PoolInForce>>>,
    /// Whether another picker has the lease by which only one of several gets requests.
    stands_by: AtomicBool,
    /// Bytes of bodies that wait for a destination.
    held_bytes: AtomicUsize,
}

impl PickerState {
    pub(crate) fn new(env: SharedEnv, settings: PickerSettings) -> Self {
        PickerState {
            env,
            settings,
            pool: RwLock::default(),
            stands_by: AtomicBool::new(false),
            held_bytes: AtomicUsize::new(0),
        }
    }

    pub(crate) fn stand_by(&self, stands_by: bool) {
        self.stands_by.store(stands_by, Ordering::Release);
    }

    /// Whether proxies should send requests: a pool is present, and no other picker has the lease.
    pub(crate) fn is_ready(&self) -> bool {
        self.pool().is_some() && !self.stands_by.load(Ordering::Acquire)
    }

    pub(crate) fn take_pool(&self, pool: PoolInForce) {
        *self.pool.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(pool));
    }

    /// Ends requests to the endpoints outside of `pool`.
    pub(crate) fn narrow(&self, pool: &EndpointPool) {
        let mut present = self.pool.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(wide) = present.take() {
            *present = Some(Arc::new(wide.narrowed(pool)));
        }
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
