//! Sensor readings from NVML, which comes with the driver; every reading is optional.

use crate::libraries;
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
/// NVML constants for the GPU's temperature sensor, clocks and volatile ECC counters.
const TEMPERATURE_GPU: c_int = 0;
const CLOCK_GRAPHICS: c_int = 0;
const CLOCK_SM: c_int = 1;
const VOLATILE_ECC: c_int = 0;
/// NVML constants for corrected and uncorrected memory errors.
const CORRECTED: c_int = 0;
const UNCORRECTED: c_int = 1;
/// NVML's reasons for a clock below the highest one: the device is idle.
const REASON_IDLE: c_ulonglong = 0x1;
/// Clock limits by a setting, by temperature or by the power supply; the usual power limit is not counted.
const REASONS_HELD: c_ulonglong = 0x2 | 0x8 | 0x20 | 0x40 | 0x80;

impl Monitor {
    /// Opens the device at `pci`; `None` if NVML or the device in it is missing.
    pub(crate) fn new(pci: &str) -> Option<Monitor> {
        let names = ["libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll"];
        // SAFETY: NVML's initialisers take no part of ours.
        let library = names.iter().find_map(|name| unsafe { Library::new(name) }.ok());
        let library = library.or_else(|| libraries::by_path("libnvidia-ml.so."))?;
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

    /// Calls a query with a 64-bit result.
    fn wide(&self, name: &[u8]) -> Option<c_ulonglong> {
        let mut value: c_ulonglong = 0;
        // SAFETY: as in `number`.
        let code = unsafe {
            let ask =
                self.library.get::<unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int>(name).ok()?;
            ask(self.handle, &mut value)
        };
        (code == SUCCESS).then_some(value)
    }

    /// The highest clock that is allowed now of `max`: what applications are set to, if that was lowered, and
    /// the clock as it is where the driver says that something holds it down. That of an idle device is low
    /// without a cause.
    fn clock_mhz_allowed(&self, max: f64) -> f64 {
        let set = self.choice(b"nvmlDeviceGetApplicationsClock\0", CLOCK_GRAPHICS);
        let usual = self.choice(b"nvmlDeviceGetDefaultApplicationsClock\0", CLOCK_GRAPHICS);
        let lowered = set.filter(|set| usual.is_some_and(|usual| *set < usual));
        let reasons = self.wide(b"nvmlDeviceGetCurrentClocksThrottleReasons\0").unwrap_or(0);
        let is_held = reasons & REASON_IDLE == 0 && reasons & REASONS_HELD != 0;
        let held = is_held.then(|| self.choice(b"nvmlDeviceGetClockInfo\0", CLOCK_SM)).flatten();
        [lowered, held].into_iter().flatten().fold(max, f64::min)
    }

    /// The share of the driver's last sampling period, up to a second, in which a kernel ran.
    fn busy(&self) -> Option<f64> {
        let mut percents: [c_uint; 2] = [0; 2]; // of compute, then of memory
        // SAFETY: nvml.h's structure for this function is two unsigned integers.
        let code = unsafe {
            let ask = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut [c_uint; 2]) -> c_int>(
                    b"nvmlDeviceGetUtilizationRates\0",
                )
                .ok()?;
            ask(self.handle, &mut percents)
        };
        (code == SUCCESS).then(|| f64::from(percents[0]) / 100.0)
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
        let clock_mhz_max = self.choice(b"nvmlDeviceGetMaxClockInfo\0", CLOCK_SM);
        Health {
            temperature_c: self.choice(b"nvmlDeviceGetTemperature\0", TEMPERATURE_GPU),
            power_w: self.number(b"nvmlDeviceGetPowerUsage\0").map(|milliwatts| milliwatts * 1e-3),
            energy_j: self
                .wide(b"nvmlDeviceGetTotalEnergyConsumption\0")
                .map(|millijoules| millijoules as f64 * 1e-3),
            busy: self.busy(),
            clock_mhz: self.choice(b"nvmlDeviceGetClockInfo\0", CLOCK_SM),
            clock_mhz_max,
            clock_mhz_allowed: clock_mhz_max.map(|max| self.clock_mhz_allowed(max)),
            errors_corrected: self.memory_errors(CORRECTED),
            errors_uncorrected: self.memory_errors(UNCORRECTED),
        }
    }
}
