//! Memory of a test fleet: what rots, and what keeps a log.

use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_wire::HostRegion;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Host memory with bit flips.
pub(super) struct Rotting {
    pub(super) memory: HostRegion,
    pub(super) rots: Arc<AtomicBool>,
}

impl SharedMemory for Rotting {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> mixfleet_hal::Result<()> {
        if self.rots.load(Ordering::Relaxed) {
            self.memory.update(offset, bytes, &mut |bytes| bytes[bytes.len() / 2] ^= 1)?;
        }
        self.memory.view(offset, bytes, look)
    }

    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> mixfleet_hal::Result<()> {
        self.memory.update(offset, bytes, change)
    }

    fn mapping(&self) -> Option<Mapping> {
        self.memory.mapping()
    }
}

/// An event log in memory.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
