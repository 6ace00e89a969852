//! A device around another one forwards each method.

use mixfleet_hal::memory::{Mapping, Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Buffer, BufferUsage, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, Health, HostMemory, OpSig,
    Queue, Result, Slice, Support,
};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// Records the calls.
struct Noting {
    info: DeviceInfo,
    asked: Mutex<Vec<&'static str>>,
}

impl Noting {
    fn note(&self, method: &'static str) {
        self.asked.lock().unwrap().push(method);
    }
}

#[derive(Debug)]
struct Empty;

impl Buffer for Empty {
    fn size_bytes(&self) -> u64 {
        0
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl SharedMemory for Empty {
    fn size_bytes(&self) -> u64 {
        0
    }
    fn view(&self, _: u64, _: u64, _: &mut dyn FnMut(&[u8])) -> Result<()> {
        Ok(())
    }
    fn update(&self, _: u64, _: u64, _: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        Ok(())
    }
    fn mapping(&self) -> Option<Mapping> {
        None
    }
}

fn nothing() -> Slice {
    Slice::whole(Arc::new(Empty))
}

impl Device for Noting {
    fn info(&self) -> &DeviceInfo {
        self.note("info");
        &self.info
    }
    fn limits(&self) -> DeviceLimits {
        self.note("limits");
        DeviceLimits {
            allocation_bytes_max: 7,
            alignment_bytes: 1,
            imports_host_memory: true,
            kv_page_tokens: 8,
            replay_pays: true,
            copies_beside: true,
        }
    }
    fn support(&self, _: &OpSig) -> Support {
        self.note("support");
        Support::Native
    }
    fn alloc(&self, _: u64, _: BufferUsage) -> Result<Slice> {
        self.note("alloc");
        Ok(nothing())
    }
    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        self.note("import");
        Ok(nothing())
    }
    fn reaches(&self, _: &Slice) -> bool {
        self.note("reaches");
        true
    }
    fn write(&self, _: &Slice, _: &[u8]) -> Result<()> {
        self.note("write");
        Ok(())
    }
    fn read(&self, _: &Slice, _: &mut [u8]) -> Result<()> {
        self.note("read");
        Ok(())
    }
    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        self.note("pin");
        Ok(Some(Box::new(memory)))
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.note("queue");
        Err(Error::unsupported("no queue"))
    }
    fn memory_free(&self) -> Option<Bytes> {
        self.note("memory_free");
        Some(Bytes(3.0))
    }
    fn health(&self) -> Health {
        self.note("health");
        Health { clock_mhz: Some(2.0), ..Health::default() }
    }
}

struct Around(Noting);

impl Device for Around {
    mixfleet_hal::forward_device!(self => self.0;
        info, limits, support, alloc, import, reaches, write, read, pin, queue, memory_free, health);
}

#[test]
fn a_wrapper_forwards_each_method_with_its_answer() {
    let info = DeviceInfo {
        id: "inner".into(),
        backend: "test".into(),
        name: "inner".into(),
        kind: DeviceKind::Simulated,
        memory: Bytes(1.0),
        compute_units: 1,
        fingerprint: "inner".into(),
        notes: vec![],
    };
    let around = Around(Noting { info, asked: Mutex::default() });
    assert_eq!(around.info().id, "inner");
    assert_eq!(around.limits().allocation_bytes_max, 7);
    assert_eq!(around.support(&OpSig::Fill { bytes: 4, word: 0 }), Support::Native);
    around.alloc(4, BufferUsage::Kv).unwrap();
    around.import(Arc::new(vec![1u8])).unwrap();
    assert!(around.reaches(&nothing()));
    around.write(&nothing(), &[]).unwrap();
    around.read(&nothing(), &mut []).unwrap();
    assert!(around.pin(Arc::new(Empty)).unwrap().is_some());
    assert!(around.queue().is_err());
    assert_eq!(around.memory_free(), Some(Bytes(3.0)));
    assert_eq!(around.health().clock_mhz, Some(2.0));
    let asked = around.0.asked.into_inner().unwrap();
    let methods = [
        "info",
        "limits",
        "support",
        "alloc",
        "import",
        "reaches",
        "write",
        "read",
        "pin",
        "queue",
        "memory_free",
        "health",
    ];
    assert_eq!(asked, methods);
}
