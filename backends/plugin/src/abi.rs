//! The C interface, version 1. The header `include/mixfleet.h` is made of this file and of `shapes.rs`.
//!
//! A library exports one function, `mixfleet_backend`, which returns a table of functions that stays valid
//! for as long as the process runs. Functions may be called by several threads at a time, but for one device
//! at most one of `run`, `replay`, `write` and `read` is in progress. Each returns a status, 0 or an error's;
//! what it then says in `error` is shown to people.
//!
//! Structures grow at their ends only. Each begins with its size in bytes as its writer knows it; fields
//! beyond that size are not read, and count as 0.

use crate::shapes::MixfleetShape;
use std::ffi::{c_char, c_void};

/// The version of the interface; libraries of another one are refused.
pub const MIXFLEET_ABI: u32 = 1;

/// It is done.
pub const MIXFLEET_OK: i32 = 0;
/// There is not enough memory.
pub const MIXFLEET_OUT_OF_MEMORY: i32 = 1;
/// The device cannot do this at all.
pub const MIXFLEET_UNSUPPORTED: i32 = 2;
/// The device is gone, and every later call fails too.
pub const MIXFLEET_DEVICE_LOST: i32 = 3;
/// The caller broke the contract: an index beyond its table, for example.
pub const MIXFLEET_INVALID: i32 = 4;
/// Anything else.
pub const MIXFLEET_FAILED: i32 = 5;

/// A device of the library, which alone knows what it is.
#[derive(Debug)]
pub struct MixfleetDevice {
    _private: [u8; 0],
}

/// Memory of a device, opaque to all but the library.
#[derive(Debug)]
pub struct MixfleetBuffer {
    _private: [u8; 0],
}

/// A batch that a library has prepared for many runs, which alone knows what it is.
#[derive(Debug)]
pub struct MixfleetGraph {
    _private: [u8; 0],
}

/// An error message: text that ends with a zero byte.
#[repr(C)]
pub struct MixfleetError {
    /// Size of this structure in bytes.
    pub struct_bytes: u32,
    /// The text.
    pub text: [c_char; 252],
}

/// What a device is.
#[repr(C)]
pub struct MixfleetInfo {
    /// Size of this structure in bytes; the library leaves it as it is.
    pub struct_bytes: u32,
    /// Cores, compute units or similar; 0 if not known.
    pub compute_units: u32,
    /// Memory of all buffers together, in bytes.
    pub memory_bytes: u64,
    /// The largest buffer, in bytes.
    pub allocation_bytes_max: u64,
    /// Offsets of operands are multiples of this power of two.
    pub alignment_bytes: u64,
    /// Tokens of a KV page in which attention is fastest.
    pub kv_page_tokens: u32,
    /// 1 for host cores, 2 for a graphics processor, 3 for any other part.
    pub kind: u32,
    /// Name of the part, for people; ends with a zero.
    pub name: [c_char; 128],
    /// What measurements hold for: part, driver, version of the kernels; ends with a zero.
    pub fingerprint: [c_char; 128],
}

/// A part of a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetSlice {
    /// The buffer.
    pub buffer: *mut MixfleetBuffer,
    /// Where it begins there, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// An operation. Sizes, alignment and overlaps of its operands were checked; indices in them were not.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetOp {
    /// Size of this structure in bytes.
    pub struct_bytes: u32,
    /// Its kind, `MIXFLEET_EMBED` and so on. Kinds that are not known are not supported.
    pub kind: u32,
    /// Its shape.
    pub shape: MixfleetShape,
    /// The operands; none in a query for support.
    pub args: *const MixfleetSlice,
    /// Number of operands.
    pub arg_count: u32,
    /// 0.
    pub reserved: u32,
}

/// A device's health. What it cannot tell stays NaN.
#[repr(C)]
pub struct MixfleetHealth {
    /// Size of this structure in bytes.
    pub struct_bytes: u32,
    /// 0.
    pub reserved: u32,
    /// Temperature in degrees Celsius.
    pub temperature_c: f64,
    /// Power draw in watts.
    pub power_w: f64,
    /// Clock in MHz.
    pub clock_mhz: f64,
}

/// The functions of a library. Those marked as optional may be null.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetBackend {
    /// Size of this structure in bytes.
    pub struct_bytes: u32,
    /// `MIXFLEET_ABI`.
    pub abi: u32,
    /// The lower-case name by which devices are selected, as in `acme:0`; ends with a zero.
    pub name: *const c_char,
    /// Number of devices, or below 0 with the reason why there are none in `error`.
    pub count: Option<unsafe extern "C" fn(error: *mut MixfleetError) -> i32>,
    /// Describes a device, without opening it.
    pub info:
        Option<unsafe extern "C" fn(index: u32, info: *mut MixfleetInfo, error: *mut MixfleetError) -> i32>,
    /// Opens a device.
    pub open: Option<
        unsafe extern "C" fn(index: u32, device: *mut *mut MixfleetDevice, error: *mut MixfleetError) -> i32,
    >,
    /// Closes a device, all of whose buffers are freed.
    pub close: Option<unsafe extern "C" fn(device: *mut MixfleetDevice)>,
    /// Whether a device can run an operation: 0 no, 1 at native speed, 2 slowly or by conversion.
    pub support: Option<unsafe extern "C" fn(device: *mut MixfleetDevice, op: *const MixfleetOp) -> i32>,
    /// Allocates memory, which holds nothing of another process.
    pub alloc: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            bytes: u64,
            buffer: *mut *mut MixfleetBuffer,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Frees memory, which nothing uses any more.
    pub free: Option<unsafe extern "C" fn(device: *mut MixfleetDevice, buffer: *mut MixfleetBuffer)>,
    /// Copies from the host to a device.
    pub write: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            to: *const MixfleetSlice,
            data: *const c_void,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Copies from a device to the host.
    pub read: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            from: *const MixfleetSlice,
            data: *mut c_void,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Runs operations in order, each of which sees the writes of earlier ones, and returns when all are
    /// done.
    pub run: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            ops: *const MixfleetOp,
            count: u32,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Optional: bytes of memory that could be allocated now.
    pub memory_free: Option<unsafe extern "C" fn(device: *mut MixfleetDevice) -> u64>,
    /// Optional: reads the device's health.
    pub health: Option<unsafe extern "C" fn(device: *mut MixfleetDevice, health: *mut MixfleetHealth)>,
    /// Optional, together with `replay` and `forget`: all three or none. Prepares operations for many runs;
    /// the library must copy what it keeps: `ops` and their operand lists are valid only during the call,
    /// while the buffers stay. The content of buffers changes between runs.
    pub record: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            ops: *const MixfleetOp,
            count: u32,
            graph: *mut *mut MixfleetGraph,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Runs a prepared batch as `run` would.
    pub replay: Option<
        unsafe extern "C" fn(
            device: *mut MixfleetDevice,
            graph: *mut MixfleetGraph,
            error: *mut MixfleetError,
        ) -> i32,
    >,
    /// Frees a prepared batch, which does not run.
    pub forget: Option<unsafe extern "C" fn(device: *mut MixfleetDevice, graph: *mut MixfleetGraph)>,
}

/// What a library exports as `mixfleet_backend`: its table for a version of the interface, or null if it has
/// none for that.
pub type MixfleetEntry = unsafe extern "C" fn(abi: u32) -> *const MixfleetBackend;
