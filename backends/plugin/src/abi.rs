//! The C interface, version 1. The header `include/mixfleet.h` is made of this file.
//!
//! A library exports one function, `mixfleet_backend`, which returns a table of functions that stays valid
//! for as long as the process runs. Functions may be called by several threads at a time, but for one device
//! at most one of `run`, `replay`, `write` and `read` is in progress. Each returns a status, 0 or an error's;
//! what it then says in `error` is shown to people.
//!
//! Structures grow at their ends only. Each begins with its size in bytes as the writer knows it; what lies
//! beyond that is not read, and counts as 0.

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

/// 32-bit floats.
pub const MIXFLEET_F32: u32 = 0;
/// The upper 16 bits of an f32.
pub const MIXFLEET_BF16: u32 = 1;
/// 16-bit floats of IEEE 754.
pub const MIXFLEET_F16: u32 = 2;
/// 8-bit floats with 4 exponent and 3 fraction bits and no infinities.
pub const MIXFLEET_F8E4M3: u32 = 3;
/// Unsigned 32-bit integers.
pub const MIXFLEET_U32: u32 = 4;

/// `shape.embed`. Operands: ids `[tokens]` u32, table `[vocab, hidden]`, out `[tokens, hidden]`.
pub const MIXFLEET_EMBED: u32 = 0;
/// `shape.rms_norm`. Operands: x `[rows, cols]`, weight `[cols]`, out `[rows, cols]` = x / sqrt(mean(x^2) +
/// eps) * weight.
pub const MIXFLEET_RMS_NORM: u32 = 1;
/// `shape.gemm`. Operands: x `[m, k]`, weight `[n, k]`, with `bias` bias `[n]`, out `[m, n]` = x weight^T (+
/// bias) (+ out with `accumulate`), accumulated in f32.
pub const MIXFLEET_GEMM: u32 = 2;
/// `shape.rope`. Operands: x `[tokens, heads, head_dim]` in place, cos_sin `[tokens, head_dim]` f32
/// (head_dim/2 cosines, then as many sines): pairs (i, i + head_dim/2) become (a cos - b sin, b cos + a
/// sin).
pub const MIXFLEET_ROPE: u32 = 3;
/// `shape.kv_write`. Operands: k, v `[tokens, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool. A
/// slot is page * page_tokens + offset in the page; the layout in a page is the library's own.
pub const MIXFLEET_KV_WRITE: u32 = 4;
/// `shape.attn_prefill`. Operands: q `[tokens, heads, head_dim]`, query_start `[sequences + 1]` u32, context
/// `[sequences]` u32 (keys that the last query sees), pages `[sequences, pages_max]` u32, k_pool, v_pool,
/// out `[tokens, heads, head_dim]`. Causal, scaled by 1/sqrt(head_dim).
pub const MIXFLEET_ATTN_PREFILL: u32 = 5;
/// `shape.attn_decode`. Operands: q `[sequences, heads, head_dim]`, range `[sequences, 2]` u32 (first and
/// one past the last key), pages `[sequences, pages_max]` u32, k_pool, v_pool, acc `[sequences, heads,
/// head_dim]` f32 = sum of exp(score - max) v, stat `[sequences, heads, 2]` f32 = max, sum. An empty range
/// gives 0, -inf, 0.
pub const MIXFLEET_ATTN_DECODE: u32 = 6;
/// `shape.attn_merge`. Operands: acc `[parts, rows, head_dim]` f32, stat `[parts, rows, 2]` f32, out `[rows,
/// head_dim]`: joined by maxima and sums, and normalised. A row whose parts are all empty gives 0.
pub const MIXFLEET_ATTN_MERGE: u32 = 7;
/// `shape.elements`. Operands: gate, up, out `[elements]` = gate / (1 + exp(-gate)) * up.
pub const MIXFLEET_SILU_MUL: u32 = 8;
/// `shape.elements`. Operands: a, b, out `[elements]` = a + b.
pub const MIXFLEET_ADD: u32 = 9;
/// `shape.sample`. Draws tokens, as hal/src/sample.rs says; a device without it has the host draw.
pub const MIXFLEET_SAMPLE: u32 = 10;
/// `shape.bytes`. Operands: from, to.
pub const MIXFLEET_COPY: u32 = 11;
/// `shape.bytes`. Operand: to, every 32-bit word of which becomes `word`.
pub const MIXFLEET_FILL: u32 = 12;
/// `shape.kv_move`. Operands: slots `[tokens]` u32, k_pool, v_pool, out `[tokens, 2, kv_heads, head_dim]`.
pub const MIXFLEET_KV_GATHER: u32 = 13;
/// `shape.kv_move`. Operands: in `[tokens, 2, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool.
pub const MIXFLEET_KV_SCATTER: u32 = 14;

/// A device of the library, which alone knows what it is.
#[derive(Debug)]
pub struct MixfleetDevice {
    _private: [u8; 0],
}

/// Memory of a device, of which only the library knows what it is.
#[derive(Debug)]
pub struct MixfleetBuffer {
    _private: [u8; 0],
}

/// A batch that a library has prepared for many runs, which alone knows what it is.
#[derive(Debug)]
pub struct MixfleetGraph {
    _private: [u8; 0],
}

/// What went wrong, for people: text that ends with a zero.
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
    /// Cores, compute units or the like; 0 if not known.
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

/// Paged KV.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKv {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Dtype of what is in pages.
    pub dtype: u32,
}

/// Shape of `MIXFLEET_EMBED`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetEmbed {
    /// Rows to fetch.
    pub tokens: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// Length of a row.
    pub hidden: u32,
    /// Dtype of the table.
    pub table: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_RMS_NORM`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRmsNorm {
    /// Rows.
    pub rows: u32,
    /// Length of a row.
    pub cols: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Dtype of x.
    pub x: u32,
    /// Dtype of the weight.
    pub weight: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_GEMM`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetGemm {
    /// Rows of x.
    pub m: u32,
    /// Rows of the weight.
    pub n: u32,
    /// Inner dimension.
    pub k: u32,
    /// Dtype of x.
    pub x: u32,
    /// Dtype of weight and bias.
    pub weight: u32,
    /// Dtype of the result.
    pub out: u32,
    /// 1 if a bias follows the weight.
    pub bias: u32,
    /// 1 if the result is added to what is in out.
    pub accumulate: u32,
}

/// Shape of `MIXFLEET_ROPE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRope {
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Dtype of x.
    pub x: u32,
}

/// Shape of `MIXFLEET_KV_WRITE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKvWrite {
    /// Tokens.
    pub tokens: u32,
    /// Dtype of k and v.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_PREFILL`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnPrefill {
    /// Pairs of query and key that are visible.
    pub pairs: u64,
    /// Keys over all sequences.
    pub kv_tokens: u64,
    /// New tokens over all sequences.
    pub tokens: u32,
    /// Sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Length of a row of the page table.
    pub pages_max: u32,
    /// A query at p sees keys p-window+1 to p; 0 if it sees all up to p.
    pub window: u32,
    /// Dtype of q and out.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_DECODE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnDecode {
    /// Keys over all ranges.
    pub kv_tokens: u64,
    /// Sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Length of a row of the page table.
    pub pages_max: u32,
    /// Dtype of q.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_MERGE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnMerge {
    /// Parts of the KV.
    pub parts: u32,
    /// Sequences times heads.
    pub rows: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetElements {
    /// Elements.
    pub elements: u64,
    /// Dtype of all operands.
    pub x: u32,
}

/// Shape of `MIXFLEET_SAMPLE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetSample {
    /// Rows.
    pub rows: u32,
    /// Length of a row.
    pub cols: u32,
    /// Entries of the history.
    pub history: u32,
    /// Best tokens to list.
    pub tops: u32,
}

/// Shape of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetBytes {
    /// Bytes, a multiple of 4.
    pub bytes: u64,
    /// What to fill with.
    pub word: u32,
}

/// Shape of `MIXFLEET_KV_GATHER` and `MIXFLEET_KV_SCATTER`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKvMove {
    /// Slots.
    pub tokens: u32,
    /// Dtype outside of pages.
    pub wire: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// The shape of an operation; its kind says which.
#[repr(C)]
#[derive(Clone, Copy)]
pub union MixfleetShape {
    /// Of `MIXFLEET_EMBED`.
    pub embed: MixfleetEmbed,
    /// Of `MIXFLEET_RMS_NORM`.
    pub rms_norm: MixfleetRmsNorm,
    /// Of `MIXFLEET_GEMM`.
    pub gemm: MixfleetGemm,
    /// Of `MIXFLEET_ROPE`.
    pub rope: MixfleetRope,
    /// Of `MIXFLEET_KV_WRITE`.
    pub kv_write: MixfleetKvWrite,
    /// Of `MIXFLEET_ATTN_PREFILL`.
    pub attn_prefill: MixfleetAttnPrefill,
    /// Of `MIXFLEET_ATTN_DECODE`.
    pub attn_decode: MixfleetAttnDecode,
    /// Of `MIXFLEET_ATTN_MERGE`.
    pub attn_merge: MixfleetAttnMerge,
    /// Of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
    pub elements: MixfleetElements,
    /// Of `MIXFLEET_SAMPLE`.
    pub sample: MixfleetSample,
    /// Of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
    pub bytes: MixfleetBytes,
    /// Of `MIXFLEET_KV_GATHER` and `MIXFLEET_KV_SCATTER`.
    pub kv_move: MixfleetKvMove,
    /// Room for shapes of later versions.
    pub reserved: [u64; 16],
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
    /// Its operands, none when a device is asked what it supports.
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

/// The functions of a library. Those that are marked as optional may be null.
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
    /// Runs operations one after the other, each of which sees what the earlier ones wrote, and returns when
    /// all are done.
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
    /// Optional, as `replay` and `forget` are; all three or none. Prepares operations for many runs, for
    /// which a library copies what it needs of them: `ops` and their operands' lists end with the call, and
    /// the buffers stay. What buffers hold changes between runs.
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
