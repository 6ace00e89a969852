//! Sensor readings from NVML, which comes with the driver; every reading is optional.

use libloading::Library;
use mixfleet_hal::Health;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

type Handle = *mut c_void;

/// NVML access to one device.
pub(crate) struct Monitor {
    library: Library,
    handle: Handle,
}

// SAFETY: NVML may be called by any thread (its manual, section "Thread safety"); the handle is only passed
// back.
unsafe impl Send for Monitor {}
// SAFETY: as above.
unsafe impl Sync for Monitor {}

const SUCCESS: c_int = 0;
/// NVML constants for the GPU's temperature sensor, SM clock and volatile ECC counters.
const TEMPERATURE_GPU: c_int = 0;
const CLOCK_SM: c_int = 1;
const VOLATILE_ECC: c_int = 0;
/// NVML constants for corrected and uncorrected memory errors.
const CORRECTED: c_int = 0;
const UNCORRECTED: c_int = 1;

impl Monitor {
    /// Opens the device at `pci`; `None` if NVML or the device in it is missing.
    pub(crate) fn new(pci: &str) -> Option<Monitor> {
        let names = ["libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"];
        // SAFETY: NVML's initialisers take no part of ours.
        let library = names.iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
        let address = CString::new(pci).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the signatures are nvml.h's; `address` ends in zero, and one handle is written.
        unsafe {
            let init = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0").ok()?;
            if init() != SUCCESS {
                return None;
            }
            let find = library
                .get::<unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int>(
                    b"nvmlDeviceGetHandleByPciBusId_v2\0",
                )
                .ok()?;
            if find(address.as_ptr(), &mut handle) != SUCCESS {
                return None;
            }
        }
        Some(Monitor { library, handle })
    }

    /// Calls a query with a 32-bit result.
    fn number(&self, name: &[u8]) -> Option<f64> {
        let mut value: c_uint = 0;
        // SAFETY: the callers name functions of this type in nvml.h.
        let code = unsafe {
            let ask = self.library.get::<unsafe extern "C" fn(Handle, *mut c_uint) -> c_int>(name).ok()?;
            ask(self.handle, &mut value)
        };
        (code == SUCCESS).then(|| f64::from(value))
    }

    /// Calls a query with a 32-bit result and an extra argument.
    fn choice(&self, name: &[u8], which: c_int) -> Option<f64> {
        let mut value: c_uint = 0;
        // SAFETY: as in `number`.
        let code = unsafe {
            let ask =
                self.library.get::<unsafe extern "C" fn(Handle, c_int, *mut c_uint) -> c_int>(name).ok()?;
            ask(self.handle, which, &mut value)
        };
        (code == SUCCESS).then(|| f64::from(value))
    }

    fn energy_millijoules(&self) -> Option<f64> {
        let mut value: c_ulonglong = 0;
        // SAFETY: as in `number`.
        let code = unsafe {
            let ask = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int>(
                    b"nvmlDeviceGetTotalEnergyConsumption\0",
                )
                .ok()?;
            ask(self.handle, &mut value)
        };
        (code == SUCCESS).then_some(value as f64)
    }

    fn memory_errors(&self, kind: c_int) -> Option<u64> {
        let mut value: c_ulonglong = 0;
        // SAFETY: as in `number`.
        let code = unsafe {
            let ask = self
                .library
                .get::<unsafe extern "C" fn(Handle, c_int, c_int, *mut c_ulonglong) -> c_int>(
                    b"nvmlDeviceGetTotalEccErrors\0",
                )
                .ok()?;
            ask(self.handle, kind, VOLATILE_ECC, &mut value)
        };
        (code == SUCCESS).then_some(value)
    }

    /// Reads the current state.
    pub(crate) fn health(&self) -> Health {
        Health {
            temperature_c: self.choice(b"nvmlDeviceGetTemperature\0", TEMPERATURE_GPU),
            power_w: self.number(b"nvmlDeviceGetPowerUsage\0").map(|milliwatts| milliwatts * 1e-3),
            energy_j: self.energy_millijoules().map(|millijoules| millijoules * 1e-3),
            clock_mhz: self.choice(b"nvmlDeviceGetClockInfo\0", CLOCK_SM),
            errors_corrected: self.memory_errors(CORRECTED),
            errors_uncorrected: self.memory_errors(UNCORRECTED),
        }
    }
}
