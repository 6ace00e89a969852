//! Rows between their stored dtype and f32.

use super::simd::Simd;
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_usize;

/// Loads one vector of `dtype`, widened.
///
/// # Safety
/// `from` holds `LANES` elements. `dtype` is a float.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(dtype: DType, from: *const u8) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => S::load_bf16(from.cast()),
            DType::F16 => S::load_f16(from.cast()),
            DType::F32 | DType::U32 | DType::F8E4m3 | DType::I8 => S::load(from.cast()),
        }
    }
}

/// Stores one vector, rounded to `dtype`.
///
/// # Safety
/// `to` has room for `LANES` elements. `dtype` is a float.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(dtype: DType, to: *mut u8, v: S::V) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Bf16 => S::store_bf16(to.cast(), v),
            DType::F16 => S::store_f16(to.cast(), v),
            DType::F32 | DType::U32 | DType::F8E4m3 | DType::I8 => S::store(to.cast(), v),
        }
    }
}

/// A vector whose first `count < LANES` lanes come from memory; the others are zero.
///
/// # Safety
/// `from` holds `count` elements.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd>(dtype: DType, from: *const u8, count: usize) -> S::V {
    let mut padded = [0u8; 64];
    // SAFETY: count < LANES elements of at most 4 bytes fit 64 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), count * to_usize(dtype.size_bytes()));
        load::<S>(dtype, padded.as_ptr())
    }
}

/// Stores the first `count < LANES` lanes.
///
/// # Safety
/// `to` has room for `count` elements.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd>(dtype: DType, to: *mut u8, v: S::V, count: usize) {
    let mut padded = [0u8; 64];
    // SAFETY: LANES elements of at most 4 bytes fit 64 bytes.
    unsafe {
        store::<S>(dtype, padded.as_mut_ptr(), v);
        std::ptr::copy_nonoverlapping(padded.as_ptr(), to, count * to_usize(dtype.size_bytes()));
    }
}

/// Widens `count` elements. What follows them in `to`, up to a whole vector, becomes zero.
///
/// # Safety
/// `from` holds `count` elements; `to` has room for `count` rounded up to `LANES`; no overlap.
#[inline(always)]
pub(crate) unsafe fn widen<S: Simd>(dtype: DType, from: *const u8, to: *mut f32, count: usize) {
    let size = to_usize(dtype.size_bytes());
    let whole = count - count % S::LANES;
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i < whole {
            S::store(to.add(i), load::<S>(dtype, from.add(i * size)));
            i += S::LANES;
        }
        if i < count {
            S::store(to.add(i), load_part::<S>(dtype, from.add(i * size), count - i));
        }
    }
}

/// Rounds `count` f32 to `dtype`.
///
/// # Safety
/// `from` holds `count` rounded up to `LANES`; `to` has room for `count` elements; no overlap.
#[inline(always)]
pub(crate) unsafe fn narrow<S: Simd>(dtype: DType, from: *const f32, to: *mut u8, count: usize) {
    let size = to_usize(dtype.size_bytes());
    let whole = count - count % S::LANES;
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i < whole {
            store::<S>(dtype, to.add(i * size), S::load(from.add(i)));
            i += S::LANES;
        }
        if i < count {
            store_part::<S>(dtype, to.add(i * size), S::load(from.add(i)), count - i);
        }
    }
}
