//! A backend in a library.

use crate::device::PluginDevice;
use crate::library::PluginLibrary;
use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, Error, Result};
use std::path::Path;
use std::sync::Arc;

/// A backend in a shared library.
#[derive(Clone, Debug)]
pub struct PluginBackend(Arc<PluginLibrary>);

impl PluginBackend {
    /// Loads a library. It runs in this process from then on, and is never unloaded.
    ///
    /// # Errors
    /// When the file is no library of this interface, or what it says cannot be.
    pub fn load(path: &Path) -> std::result::Result<Self, Absent> {
        PluginLibrary::load(path).map(|library| PluginBackend(Arc::new(library)))
    }
}

impl Backend for PluginBackend {
    fn name(&self) -> &'static str {
        self.0.name
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        let described = (0..self.0.count()?).map(|index| self.0.describe(index).map(|(info, _)| info));
        described.collect::<Result<_>>().map_err(|error| Absent::new(error.to_string()))
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        let name = self.0.name;
        let index = match selector.strip_prefix(name).map(|rest| rest.strip_prefix(':').unwrap_or(rest)) {
            Some("") => Ok(0),
            Some(index) => index.parse::<u32>().map_err(|_| ()),
            None => Err(()),
        };
        let index =
            index.map_err(|()| Error::invalid(format!("'{selector}' is no device; write '{name}:0'")))?;
        let count = self.0.count().map_err(|absent| Error::unsupported(absent.reason))?;
        if index >= count {
            return Err(Error::invalid(format!(
                "there is no '{selector}'; {name} counts its devices from 0 and has {count}"
            )));
        }
        Ok(Arc::new(PluginDevice::open(self.0.clone(), index)?))
    }
}
