//! The other end of a link.

use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Endpoint, Piece};
use mixfleet_hal::{Device, Result, Role, Slice};
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
    near: Vec<u8>,
}

impl OnDevice {
    /// Takes `bytes` of staging memory.
    ///
    /// # Errors
    /// When the device has none.
    pub fn new(device: Arc<dyn Device>, bytes: u64) -> Result<Self> {
        let far = device.alloc(bytes, Role::Staging)?;
        Ok(OnDevice { device, far, near: vec![0; bytes as usize] })
    }
}

impl Far for OnDevice {
    fn bytes(&self) -> u64 {
        self.near.len() as u64
    }

    fn load(&mut self, data: &[u8]) -> Result<()> {
        self.near[..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn show(&mut self, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        look(&self.near[..bytes as usize]);
        Ok(())
    }

    fn put(&mut self, bytes: u64) -> Result<()> {
        self.device.write(&self.far.range(0, bytes), &self.near[..bytes as usize])
    }

    fn get(&mut self, bytes: u64) -> Result<()> {
        self.device.read(&self.far.range(0, bytes), &mut self.near[..bytes as usize])
    }
}
