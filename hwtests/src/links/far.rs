//! The other end of a link.

use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::transport::{Endpoint, Piece};
use mixfleet_hal::{BufferUsage, Device, Result, Slice};
use std::sync::Arc;
use std::time::Duration;

/// Memory beyond a link, and the memory on this side that bytes go out of and come in to.
pub trait Far {
    /// Length of the shorter of both.
    fn bytes(&self) -> u64;
    /// Puts `data` at the front of the near memory.
    ///
    /// # Errors
    /// When it is longer.
    fn load(&mut self, data: &[u8]) -> Result<()>;
    /// Shows the first `bytes` of the near memory.
    ///
    /// # Errors
    /// When it is shorter.
    fn show(&mut self, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()>;
    /// Moves the first `bytes` there.
    ///
    /// # Errors
    /// The link's.
    fn put(&mut self, bytes: u64) -> Result<()>;
    /// Moves the first `bytes` back.
    ///
    /// # Errors
    /// The link's.
    fn get(&mut self, bytes: u64) -> Result<()>;
}

/// A registered region.
pub struct OverTransport {
    endpoint: Box<dyn Endpoint>,
    near: Arc<dyn SharedMemory>,
    far_bytes: u64,
    timeout: Duration,
}

impl OverTransport {
    /// `endpoint` leads from `near` to a region of `far_bytes`; one transfer takes at most `timeout`.
    pub fn new(
        endpoint: Box<dyn Endpoint>,
        near: Arc<dyn SharedMemory>,
        far_bytes: u64,
        timeout: Duration,
    ) -> Self {
        OverTransport { endpoint, near, far_bytes, timeout }
    }

    /// What the way says of itself.
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

/// A device's memory, through its own write and read.
pub struct OnDevice {
    device: Arc<dyn Device>,
    far: Slice,
    near: Arc<dyn SharedMemory>,
    _pinned: Option<Pinned>,
}

impl OnDevice {
    /// Takes as much of the device's memory as `near` has.
    ///
    /// # Errors
    /// When the device has less.
    pub fn new(device: Arc<dyn Device>, near: Arc<dyn SharedMemory>) -> Result<Self> {
        let far = device.alloc(near.size_bytes(), BufferUsage::Kv)?;
        Ok(OnDevice { device, far, near, _pinned: None })
    }

    /// With `near` pinned; none where that means nothing to the device.
    ///
    /// # Errors
    /// When the device has less, or may not pin it.
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
