//! The far end of a link.

use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::transport::{Endpoint, Piece};
use mixfleet_hal::{BufferUsage, Device, Result, Slice};
use std::sync::Arc;
use std::time::Duration;

/// Memory at the far end of a link, paired with the near memory that its transfers use.
pub trait Far {
    /// Returns the length of the shorter of the two memories.
    fn bytes(&self) -> u64;
    /// Copies `data` to the start of the near memory.
    ///
    /// # Errors
    /// If it is longer than the memory.
    fn load(&mut self, data: &[u8]) -> Result<()>;
    /// Calls `look` with the first `bytes` bytes of the near memory.
    ///
    /// # Errors
    /// If the memory is shorter.
    fn show(&mut self, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()>;
    /// Transfers the first `bytes` bytes to the far end.
    ///
    /// # Errors
    /// Those of the link.
    fn put(&mut self, bytes: u64) -> Result<()>;
    /// Transfers the first `bytes` bytes back.
    ///
    /// # Errors
    /// Those of the link.
    fn get(&mut self, bytes: u64) -> Result<()>;
}

/// A region registered with a transport.
pub struct OverTransport {
    endpoint: Box<dyn Endpoint>,
    near: Arc<dyn SharedMemory>,
    far_bytes: u64,
    timeout: Duration,
}

impl OverTransport {
    /// Creates a far end from `endpoint`, which connects `near` to a region of `far_bytes` bytes; `timeout`
    /// bounds one transfer.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        near: Arc<dyn SharedMemory>,
        far_bytes: u64,
        timeout: Duration,
    ) -> Self {
        OverTransport { endpoint, near, far_bytes, timeout }
    }

    /// Returns the connection's details for operators.
    pub fn details(&self) -> String {
        self.endpoint.details()
    }
}

fn front(bytes: u64) -> [Piece; 1] {
    [Piece { local: 0, remote: 0, bytes }]
}

impl Far for OverTransport {
    fn bytes(&self) -> u64 {
        self.near.size_bytes().min(self.far_bytes)
    }

    fn load(&mut self, data: &[u8]) -> Result<()> {
        self.near.store(0, data)
    }

    fn show(&mut self, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.near.view(0, bytes, look)
    }

    fn put(&mut self, bytes: u64) -> Result<()> {
        let transfer = self.endpoint.write(&front(bytes))?;
        self.endpoint.wait(transfer, self.timeout)
    }

    fn get(&mut self, bytes: u64) -> Result<()> {
        let transfer = self.endpoint.read(&front(bytes))?;
        self.endpoint.wait(transfer, self.timeout)
    }
}

/// The memory of a device, accessed by its own write and read.
pub struct OnDevice {
    device: Arc<dyn Device>,
    far: Slice,
    near: Arc<dyn SharedMemory>,
    _pinned: Option<Pinned>,
}

impl OnDevice {
    /// Allocates as much device memory as `near` has.
    ///
    /// # Errors
    /// If the device has less.
    pub fn new(device: Arc<dyn Device>, near: Arc<dyn SharedMemory>) -> Result<Self> {
        let far = device.alloc(near.size_bytes(), BufferUsage::Kv)?;
        Ok(OnDevice { device, far, near, _pinned: None })
    }

    /// Like `new`, but with `near` pinned; `None` if pinning means nothing to the device.
    ///
    /// # Errors
    /// If the device has less memory, or cannot pin it.
    pub fn pinned(device: Arc<dyn Device>, near: Arc<dyn SharedMemory>) -> Result<Option<Self>> {
        let Some(pinned) = device.pin(near.clone())? else { return Ok(None) };
        Ok(Some(OnDevice { _pinned: Some(pinned), ..OnDevice::new(device, near)? }))
    }
}

impl Far for OnDevice {
    fn bytes(&self) -> u64 {
        self.near.size_bytes()
    }

    fn load(&mut self, data: &[u8]) -> Result<()> {
        self.near.store(0, data)
    }

    fn show(&mut self, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.near.view(0, bytes, look)
    }

    fn put(&mut self, bytes: u64) -> Result<()> {
        let mut written = Ok(());
        self.near.view(0, bytes, &mut |data| written = self.device.write(&self.far.range(0, bytes), data))?;
        written
    }

    fn get(&mut self, bytes: u64) -> Result<()> {
        let mut read = Ok(());
        self.near.update(0, bytes, &mut |data| read = self.device.read(&self.far.range(0, bytes), data))?;
        read
    }
}
