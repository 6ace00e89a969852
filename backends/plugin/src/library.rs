//! Loading a library, and the devices that it says to have.

use crate::abi::{
    MIXFLEET_ABI, MIXFLEET_DEVICE_LOST, MIXFLEET_INVALID, MIXFLEET_OK, MIXFLEET_OUT_OF_MEMORY,
    MIXFLEET_UNSUPPORTED, MixfleetBackend, MixfleetEntry, MixfleetError, MixfleetInfo,
};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{Absent, DeviceInfo, DeviceKind, DeviceLimits, Error, ErrorKind, Result};
use std::ffi::{CStr, c_char};
use std::path::Path;

/// The function that a library exports.
const ENTRY: &[u8] = b"mixfleet_backend";
/// Bytes of a table of version 1 up to its last function that is not optional.
const TABLE_BYTES_MIN: usize = std::mem::offset_of!(MixfleetBackend, memory_free);
/// Devices of a library.
const DEVICES_MAX: i32 = 4096;
const NAME_BYTES_MAX: usize = 32;
/// Alignment beyond which no offset of a model's tensors can be.
const ALIGNMENT_MAX: u64 = 4096;

/// The functions of a loaded library, which stays loaded.
#[derive(Debug)]
pub(crate) struct PluginLibrary {
    pub(crate) name: &'static str,
    pub(crate) table: FunctionTable,
}

/// A table all of whose functions that are not optional are there.
#[derive(Clone, Copy)]
pub(crate) struct FunctionTable(pub(crate) MixfleetBackend);

// SAFETY: the name is a text that stays as it is, and functions may be called by any thread.
unsafe impl Send for FunctionTable {}
// SAFETY: as above.
unsafe impl Sync for FunctionTable {}

impl std::fmt::Debug for FunctionTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FunctionTable")
    }
}

/// Refuses a file that was cut, which ends the process that loads it. Only 64-bit ELF is looked at.
fn check_whole(path: &Path) -> std::result::Result<(), String> {
    let Ok(file) = std::fs::read(path) else { return Ok(()) };
    let bytes = |from: usize, count: usize| file.get(from..from.checked_add(count)?);
    let number = |from: usize, count: usize| {
        let bytes = bytes(from, count)?.iter().rev();
        Some(bytes.fold(0u64, |all, byte| all << 8 | u64::from(*byte)))
    };
    if bytes(0, 6) != Some(b"\x7fELF\x02\x01") {
        return Ok(());
    }
    // where segments are described, how long a description is, and how many there are
    let ends = || -> Option<bool> {
        let (at, each, count) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
        for index in 0..count {
            let segment = to_usize(at.checked_add(index * each)?);
            // PT_LOAD: bytes of the file that are mapped
            if number(segment, 4)? == 1 {
                let end = number(segment.checked_add(0x08)?, 8)?
                    .checked_add(number(segment.checked_add(0x20)?, 8)?)?;
                if end > file.len() as u64 {
                    return Some(false);
                }
            }
        }
        Some(true)
    };
    match ends() {
        Some(true) => Ok(()),
        _ => Err("the file is cut off; copy or build it again".into()),
    }
}

/// A copy of a table, in which functions that the library does not know of are null.
fn checked(table: *const MixfleetBackend) -> std::result::Result<MixfleetBackend, String> {
    // SAFETY: the table begins with its size and version, in every version of the interface.
    let (bytes, abi) = unsafe {
        (std::ptr::addr_of!((*table).struct_bytes).read(), std::ptr::addr_of!((*table).abi).read())
    };
    if abi != MIXFLEET_ABI {
        return Err(format!("it is for version {abi} of the interface; this is version {MIXFLEET_ABI}"));
    }
    let bytes = bytes as usize;
    if bytes < TABLE_BYTES_MIN {
        return Err(format!(
            "its table has {bytes} bytes; version {MIXFLEET_ABI} has {TABLE_BYTES_MIN} at least"
        ));
    }
    let mut copy = std::mem::MaybeUninit::<MixfleetBackend>::zeroed();
    let own = bytes.min(size_of::<MixfleetBackend>());
    // SAFETY: the library states the table's size; fields beyond it are zero, which is null for every
    // function.
    let copy = unsafe {
        std::ptr::copy_nonoverlapping(table.cast::<u8>(), copy.as_mut_ptr().cast::<u8>(), own);
        copy.assume_init()
    };
    let missing = [
        ("name", copy.name.is_null()),
        ("count", copy.count.is_none()),
        ("info", copy.info.is_none()),
        ("open", copy.open.is_none()),
        ("close", copy.close.is_none()),
        ("support", copy.support.is_none()),
        ("alloc", copy.alloc.is_none()),
        ("free", copy.free.is_none()),
        ("write", copy.write.is_none()),
        ("read", copy.read.is_none()),
        ("run", copy.run.is_none()),
    ];
    if let Some((name, _)) = missing.iter().find(|(_, missing)| *missing) {
        return Err(format!("its table has no '{name}'"));
    }
    match [copy.record.is_some(), copy.replay.is_some(), copy.forget.is_some()] {
        [true, true, true] | [false, false, false] => Ok(copy),
        _ => Err("its table has some of 'record', 'replay' and 'forget'; all three or none".into()),
    }
}

/// Where a library puts its error message.
pub(crate) fn no_error() -> MixfleetError {
    MixfleetError { struct_bytes: to_u32(size_of::<MixfleetError>()), text: [0; 252] }
}

/// A library's answer as a result.
pub(crate) fn status(of: &str, code: i32, error: &MixfleetError) -> Result<()> {
    let kind = match code {
        MIXFLEET_OK => return Ok(()),
        MIXFLEET_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        MIXFLEET_UNSUPPORTED => ErrorKind::Unsupported,
        MIXFLEET_DEVICE_LOST => ErrorKind::DeviceLost,
        MIXFLEET_INVALID => ErrorKind::Invalid,
        _ => ErrorKind::Other,
    };
    let said = text(&error.text);
    let said = if said.is_empty() { format!("status {code}, and no reason") } else { said };
    Err(Error::new(kind, format!("{of}: {said}")))
}

/// Text up to its zero, or to the end if it has none.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> =
        bytes.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

impl PluginLibrary {
    /// Loads a library, which stays loaded.
    ///
    /// # Errors
    /// When the file is no library of this interface, or what it says cannot be.
    pub(crate) fn load(path: &Path) -> std::result::Result<Self, Absent> {
        let wrong = |cause: String| Absent::new(format!("{}: {cause}", path.display()));
        check_whole(path).map_err(wrong)?;
        // SAFETY: this runs the library's initialisers; naming a library means trusting it.
        let library = unsafe { libloading::Library::new(path) };
        let library = library.map_err(|error| wrong(format!("it cannot be loaded: {error}")))?;
        // a device may be in use until the process ends
        let library = Box::leak(Box::new(library));
        // SAFETY: the interface says what the function of this name is.
        let entry = unsafe { library.get::<MixfleetEntry>(ENTRY) };
        let entry =
            entry.map_err(|_| wrong("it exports no 'mixfleet_backend', so it is no backend".into()))?;
        // SAFETY: the library's function, called as the interface says.
        let table = unsafe { entry(MIXFLEET_ABI) };
        if table.is_null() {
            let cause =
                format!("it has nothing for version {MIXFLEET_ABI} of the interface; build it for that");
            return Err(wrong(cause));
        }
        let table = checked(table).map_err(wrong)?;
        // SAFETY: a string that ends with a zero and stays, as the interface says, and `checked` saw that it
        // is there.
        let name = unsafe { CStr::from_ptr(table.name) }.to_string_lossy().into_owned();
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(fits) {
            let cause = format!("its name {name:?} is not of 1 to {NAME_BYTES_MAX} of a-z, 0-9 and _");
            return Err(wrong(cause));
        }
        let name = Box::leak(name.into_boxed_str());
        Ok(PluginLibrary { name, table: FunctionTable(table) })
    }

    /// What a device is, and its limits.
    pub(crate) fn describe(&self, index: u32) -> Result<(DeviceInfo, DeviceLimits)> {
        let selector = format!("{}:{index}", self.name);
        let mut error = no_error();
        // SAFETY: plain numbers, for which zero is a value.
        let mut info: MixfleetInfo = unsafe { std::mem::zeroed() };
        info.struct_bytes = to_u32(size_of::<MixfleetInfo>());
        let describe = self.table.0.info.ok_or_else(|| Error::invalid("no 'info'"))?;
        // SAFETY: both structures are ours and have the sizes that they name.
        let code = unsafe { describe(index, &raw mut info, &raw mut error) };
        status(&selector, code, &error)?;
        let MixfleetInfo { memory_bytes, allocation_bytes_max, alignment_bytes, kv_page_tokens, .. } = info;
        let lies = |what: String| Err(Error::invalid(format!("{selector}: the library says {what}")));
        if memory_bytes == 0 || allocation_bytes_max == 0 {
            return lies("that it has no memory".into());
        }
        if !alignment_bytes.is_power_of_two() || alignment_bytes > ALIGNMENT_MAX {
            return lies(format!(
                "that offsets are multiples of {alignment_bytes}; up to {ALIGNMENT_MAX} is a power of two"
            ));
        }
        if !(1..=4096).contains(&kv_page_tokens) {
            return lies(format!("that a KV page has {kv_page_tokens} tokens; supported: 1 to 4096"));
        }
        let kind = match info.kind {
            1 => DeviceKind::Cpu,
            2 => DeviceKind::Gpu,
            _ => DeviceKind::Accelerator,
        };
        let info = DeviceInfo {
            id: selector,
            backend: self.name.to_owned(),
            name: text(&info.name),
            kind,
            memory: Bytes(memory_bytes as f64),
            compute_units: info.compute_units,
            fingerprint: format!("{} {}", self.name, text(&info.fingerprint)),
            notes: vec![("backend".into(), "third-party library, trusted like this program".into())],
        };
        let limits = DeviceLimits {
            allocation_bytes_max,
            alignment_bytes,
            imports_host_memory: false,
            kv_page_tokens,
            replay_pays: self.table.0.record.is_some(),
            copies_beside: false,
        };
        Ok((info, limits))
    }

    /// Number of devices, or why there are none.
    pub(crate) fn count(&self) -> std::result::Result<u32, Absent> {
        let mut error = no_error();
        let Some(count) = self.table.0.count else { return Err(Absent::new("no 'count'")) };
        // SAFETY: the error is ours and has the size that it names.
        let found = unsafe { count(&raw mut error) };
        let said = text(&error.text);
        match found {
            0 => Err(Absent::new(if said.is_empty() { "the library finds no device".into() } else { said })),
            1..=DEVICES_MAX => Ok(found.unsigned_abs()),
            _ => {
                let said = if said.is_empty() { format!("the library counts {found} devices") } else { said };
                Err(Absent::new(said))
            }
        }
    }
}
