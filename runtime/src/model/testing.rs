//! Helpers for the unit tests of this module.

use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Buffer, BufferUsage, Device, DeviceInfo, DeviceKind, DeviceLimits, FileMapper, Health, HostMemory, OpSig,
    Queue, Slice, Support,
};
use serde_json::Value;
use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Reads files instead of mapping them: the same bytes, without `unsafe`.
pub(super) struct ReadFiles;

impl FileMapper for ReadFiles {
    fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>> {
        Ok(Arc::new(std::fs::read(path)?))
    }
}

/// The fixture checkpoints, or none, with a message, if this clone lacks them.
pub(super) fn fixtures() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures");
    let names = ["llama-gqa-f32", "llama3-rope-bf16-sharded", "qwen3-qknorm-tied-bf16"];
    let found: Vec<_> = names.iter().map(|name| root.join(name)).filter(|dir| dir.is_dir()).collect();
    if found.is_empty() {
        eprintln!("SKIPPED: no fixture checkpoints at ../shared/fixtures");
    }
    found
}

/// The directories of these names among the fixtures, or none, with a message.
pub(super) fn fixtures_named(names: &[&str]) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures");
    let (found, absent): (Vec<_>, Vec<_>) =
        names.iter().map(|name| root.join(name)).partition(|dir| dir.is_dir());
    absent.iter().for_each(|dir| eprintln!("SKIPPED: no fixture at {}", dir.display()));
    found
}

pub(super) fn golden(fixture: &Path) -> Value {
    golden_at(&fixture.join("golden.json"))
}

pub(super) fn golden_at(file: &Path) -> Value {
    let text = std::fs::read(file).expect("a golden file");
    serde_json::from_slice(&text).expect("a golden file is JSON")
}

pub(super) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("id") as u32).collect()
}

pub(super) fn floats(value: &Value) -> Vec<f64> {
    value.as_array().expect("floats").iter().map(|x| x.as_f64().expect("float")).collect()
}

/// A directory for one test, empty at first and removed at its end.
pub(super) struct Scratch(PathBuf);

pub(super) fn scratch(name: &str) -> Scratch {
    let directory = std::env::temp_dir().join(format!("mixfleet-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a temporary directory");
    Scratch(directory)
}

impl std::ops::Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A device that has only memory, and counts its calls.
pub(super) struct MemoryDevice {
    pub(super) info: DeviceInfo,
    pub(super) limits: DeviceLimits,
    pub(super) allocations: Mutex<Vec<u64>>,
}

#[derive(Debug)]
struct MemoryBuffer(Mutex<Vec<u8>>);

impl Buffer for MemoryBuffer {
    fn size_bytes(&self) -> u64 {
        self.0.lock().expect("a lock").len() as u64
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl MemoryDevice {
    pub(super) fn new(imports_host_memory: bool, alignment_bytes: u64) -> Self {
        let info = DeviceInfo {
            id: "memory".into(),
            backend: "memory".into(),
            name: "memory".into(),
            kind: DeviceKind::Accelerator,
            memory: Bytes(1e9),
            compute_units: 1,
            fingerprint: "memory".into(),
            notes: vec![],
        };
        let allocation_bytes_max = 1 << 30;
        let limits = DeviceLimits {
            allocation_bytes_max,
            alignment_bytes,
            imports_host_memory,
            kv_page_tokens: 16,
            replay_pays: false,
            copies_beside: false,
        };
        MemoryDevice { info, limits, allocations: Mutex::default() }
    }
}

fn bytes_of(slice: &Slice) -> (&Mutex<Vec<u8>>, std::ops::Range<usize>) {
    let buffer = slice.buffer.as_any().downcast_ref::<MemoryBuffer>().expect("own buffer");
    (&buffer.0, slice.offset as usize..(slice.offset + slice.bytes) as usize)
}

impl Device for MemoryDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn support(&self, _: &OpSig) -> Support {
        Support::No
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> mixfleet_hal::Result<Slice> {
        self.allocations.lock().expect("a lock").push(bytes);
        Ok(Slice::whole(Arc::new(MemoryBuffer(Mutex::new(vec![0xAA; bytes as usize])))))
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> mixfleet_hal::Result<Slice> {
        Ok(Slice::whole(Arc::new(MemoryBuffer(Mutex::new(memory.as_bytes().to_vec())))))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> mixfleet_hal::Result<()> {
        let (bytes, range) = bytes_of(to);
        bytes.lock().expect("a lock")[range].copy_from_slice(data);
        Ok(())
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> mixfleet_hal::Result<()> {
        let (bytes, range) = bytes_of(from);
        data.copy_from_slice(&bytes.lock().expect("a lock")[range]);
        Ok(())
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> mixfleet_hal::Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> mixfleet_hal::Result<Box<dyn Queue>> {
        Err(mixfleet_hal::Error::unsupported("memory only"))
    }

    fn memory_free(&self) -> Option<Bytes> {
        None
    }

    fn health(&self) -> Health {
        Health::default()
    }
}
