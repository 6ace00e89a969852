//! KV is copied between a device and pinned host memory wherever the device can pin it, and memory is pinned
//! once and unpinned before it is fenced.

use crate::fleet::{TestFleet, pressure};
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::transport::{Descriptor, Endpoint, RemoteAccess, Transport};
use mixfleet_hal::{BufferUsage, Device, Error, Result, Slice};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role as FleetRole;
use mixfleet_simulated::FaultyDevice;
use mixfleet_wire::InProcessTransport;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

/// Pinned memory, and counts of copies and fences.
#[derive(Default)]
struct Host {
    /// End by first address.
    pinned: BTreeMap<usize, usize>,
    /// Number of ranges that were ever pinned.
    pins: usize,
    /// Number of KV copies between a device and pinned memory.
    direct: usize,
    /// Number of KV copies between a device and other memory.
    others: usize,
    /// Number of fenced regions.
    fenced: usize,
    /// Number of regions that were pinned when they were fenced.
    fenced_while_pinned: usize,
}

type SharedHost = Arc<Mutex<Host>>;

/// A device that distinguishes pinned memory.
struct Pinning {
    inner: Arc<dyn Device>,
    host: SharedHost,
    refuses: bool,
    kv: Mutex<Vec<Slice>>,
}

struct Guard(SharedHost, usize, #[allow(dead_code, reason = "keeps it alive")] Arc<dyn SharedMemory>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().unwrap().pinned.remove(&self.1);
    }
}

impl Pinning {
    fn note(&self, slice: &Slice, data: &[u8]) {
        if self.kv.lock().unwrap().iter().any(|kv| Arc::ptr_eq(&kv.buffer, &slice.buffer)) {
            let (first, end) = (data.as_ptr().addr(), data.as_ptr().addr() + data.len());
            let host = &mut *self.host.lock().unwrap();
            let before = host.pinned.range(..=first).next_back();
            let direct = before.is_some_and(|(_, &pinned_end)| end <= pinned_end);
            *(if direct { &mut host.direct } else { &mut host.others }) += 1;
        }
    }
}

impl Device for Pinning {
    mixfleet_hal::forward_device!(self => self.inner; info, limits, support, import, reaches, queue, memory_free, health);

    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        let slice = self.inner.alloc(bytes, role)?;
        if role == BufferUsage::Kv {
            self.kv.lock().unwrap().push(slice.clone());
        }
        Ok(slice)
    }
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.note(to, data);
        self.inner.write(to, data)
    }
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.note(from, data);
        self.inner.read(from, data)
    }
    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        if self.refuses {
            return Err(Error::unsupported("no memory may be locked here"));
        }
        let mapping = memory.mapping().expect("regions have addresses");
        let mut host = self.host.lock().unwrap();
        let twice = host.pinned.insert(mapping.address, mapping.address + mapping.bytes as usize);
        assert_eq!(twice, None, "pinned already");
        host.pins += 1;
        Ok(Some(Box::new(Guard(self.host.clone(), mapping.address, memory))))
    }
}

/// The in-process transport, which checks pinned ranges when it fences.
struct Fencing {
    inner: InProcessTransport,
    host: SharedHost,
    addresses: Mutex<HashMap<u64, usize>>,
}

impl Transport for Fencing {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let address = memory.mapping().expect("regions have addresses").address;
        let region = self.inner.register(memory, access)?;
        self.addresses.lock().unwrap().insert(region.epoch, address);
        Ok(region)
    }
    fn deregister(&self, region: &Descriptor) -> Result<()> {
        let address = self.addresses.lock().unwrap()[&region.epoch];
        let mut host = self.host.lock().unwrap();
        host.fenced += 1;
        host.fenced_while_pinned += usize::from(host.pinned.contains_key(&address));
        drop(host);
        self.inner.deregister(region)
    }
    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        self.inner.connect(local, region)
    }
}

/// Serves requests that are handed off, on devices with too little memory and host memory as a lower tier.
fn served(roles: [FleetRole; 2], faults: FaultPlan, refuses: bool) -> Host {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let host = SharedHost::default();
    let device = |id: &str, faults| {
        let inner = Arc::new(FaultyDevice::new(Arc::new(ReferenceDevice::named(id)), faults));
        Arc::new(Pinning { inner, host: host.clone(), refuses, kv: Mutex::default() })
    };
    let fencing =
        Fencing { inner: InProcessTransport::new(), host: host.clone(), addresses: Mutex::default() };
    let fleet = TestFleet::new(checkpoint.clone())
        .transport(Arc::new(fencing))
        .with_device(roles[0], device("device0", faults))
        .with_device(roles[1], device("device1", FaultPlan::default()))
        .blocks(12)
        .lower(16, None);
    // This compares every answer.
    fleet.run_many(&SeededEnv::new(3), pressure(&checkpoint, 3, 8));
    std::mem::take(&mut *host.lock().unwrap())
}

#[test]
fn kv_goes_through_pinned_memory_alone() {
    let host = served([FleetRole::Prefill, FleetRole::Decode], FaultPlan::default(), false);
    assert_eq!(host.others, 0, "of {} copies", host.others + host.direct);
    assert!(host.direct > 20, "{}", host.direct);
    // These are two pools, an outbox and a landing region.
    assert!(host.pins >= 4, "{}", host.pins);
}

#[test]
fn memory_is_unpinned_before_it_is_fenced() {
    let fails = FaultPlan::exactly(Fault::Fail, 300, u64::MAX);
    let host = served([FleetRole::Auto, FleetRole::Auto], fails, false);
    assert!(host.fenced > 0, "no peer was lost");
    assert_eq!(host.fenced_while_pinned, 0, "of {}", host.fenced);
}

#[test]
fn where_nothing_may_be_pinned_everything_is_served() {
    let host = served([FleetRole::Prefill, FleetRole::Decode], FaultPlan::default(), true);
    assert_eq!((host.pins, host.direct), (0, 0));
    assert!(host.others > 20, "{}", host.others);
}
