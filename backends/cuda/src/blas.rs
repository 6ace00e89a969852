//! Large matrix products with cuBLASLt. Its matrices are column-major, so it computes the transpose: `out^T
//! [n, m] = weight [n, k] . x^T [k, m]`, where reading each of our matrices by columns transposes it for
//! free.

use crate::driver::CudaContext;
use crate::plan::{Matmul, WORKSPACE_BYTES};
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{self, cublasLtMatmulDescAttributes_t as Desc};
use cudarc::cublaslt::sys::{cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType_t as DataType};
use cudarc::driver::sys::CUstream;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, Error, ErrorKind, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

/// Reductions of a split k may use f32 in the workspace; in place, the order would vary, and in the output's
/// type, sums would be rounded once more.
const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;

/// The cache key of an algorithm: the product without its addresses, but with their alignment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKey {
    shape: (u32, u32, u32),
    dtypes: (DType, DType),
    out_columns: u32,
    bias: bool,
    accumulate: bool,
    /// Alignment of weight, x and out in bytes, at most 256.
    alignment: [u32; 3],
}

impl MatmulKey {
    fn of(product: &Matmul) -> MatmulKey {
        let alignment =
            [product.weight, product.x, product.out].map(|address| 1 << (address | 256).trailing_zeros());
        MatmulKey {
            shape: product.shape,
            dtypes: (product.dtype, product.out_dtype),
            out_columns: product.out_columns,
            bias: product.bias.is_some(),
            accumulate: product.accumulate,
            alignment,
        }
    }
}

fn failure(place: &str, error: CublasError) -> Error {
    use sys::cublasStatus_t::*;
    let kind = match error.0 {
        CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_ARCH_MISMATCH => ErrorKind::Unsupported,
        CUBLAS_STATUS_ALLOC_FAILED => ErrorKind::OutOfMemory,
        CUBLAS_STATUS_EXECUTION_FAILED => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    };
    Error::new(kind, format!("cuda: cuBLASLt: {place}: {:?}", error.0))
}

fn data_type(dtype: DType) -> Result<DataType> {
    match dtype {
        DType::F32 => Ok(DataType::CUDA_R_32F),
        DType::Bf16 => Ok(DataType::CUDA_R_16BF),
        DType::F16 => Ok(DataType::CUDA_R_16F),
        DType::F8E4m3 => Ok(DataType::CUDA_R_8F_E4M3),
        DType::I8 | DType::U32 => Err(Error::unsupported(format!("cuda: no product of {dtype}"))),
    }
}

/// A column-major matrix layout.
struct MatrixLayout(sys::cublasLtMatrixLayout_t);

impl MatrixLayout {
    /// Creates a layout whose columns begin `leading` elements apart.
    fn new(dtype: DType, rows: u32, columns: u32, leading: u32) -> Result<MatrixLayout> {
        let created =
            result::create_matrix_layout(data_type(dtype)?, rows.into(), columns.into(), leading.into());
        created.map(MatrixLayout).map_err(|e| failure("a layout", e))
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: created once in `new`.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

impl Description {
    fn set<T>(&self, attribute: Desc, value: &T) -> Result<()> {
        // SAFETY: the description is alive; the call copies `value`, whose type is the attribute's.
        unsafe {
            result::set_matmul_desc_attribute(self.0, attribute, (value as *const T).cast(), size_of::<T>())
        }
        .map_err(|e| failure("a description", e))
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created once in `prepare`.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Preferences(sys::cublasLtMatmulPreference_t);

impl Preferences {
    fn set<T>(&self, attribute: Preference, value: &T) -> Result<()> {
        // SAFETY: as in `Description::set`.
        unsafe {
            result::set_matmul_pref_attribute(self.0, attribute, (value as *const T).cast(), size_of::<T>())
        }
        .map_err(|e| failure("preferences", e))
    }
}

impl Drop for Preferences {
    fn drop(&mut self) {
        // SAFETY: created once in `prepare`.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// A product with its algorithm.
struct Prepared {
    description: Description,
    weight: MatrixLayout,
    x: MatrixLayout,
    out: MatrixLayout,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt on one device, with the chosen algorithms.
pub(crate) struct Blas {
    context: Arc<CudaContext>,
    handle: sys::cublasLtHandle_t,
    /// The algorithms, or why there is none: what failed is not asked for again.
    prepared: Mutex<HashMap<MatmulKey, std::result::Result<Prepared, Error>>>,
}

// SAFETY: the handle may be used by any thread that bound the context; descriptions are changed under the
// lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Blas> {
        context.bind()?;
        let handle = result::create_handle().map_err(|e| failure("cublasLtCreate", e))?;
        Ok(Blas { context: context.clone(), handle, prepared: Mutex::default() })
    }

    /// Chooses an algorithm for `product` unless one was chosen before; must precede a capture. A failure is
    /// kept as well, and logged once.
    ///
    /// # Errors
    /// `Unsupported` if cuBLASLt has none, or what else it said at the first time.
    pub(crate) fn prepare(&self, product: &Matmul) -> Result<()> {
        let key = MatmulKey::of(product);
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = prepared.entry(key).or_insert_with(|| {
            self.choose(product, &key).inspect_err(|error| {
                let (m, n, k) = product.shape;
                tracing::warn!(m, n, k, dtype = %product.dtype, %error, "a product runs without cuBLASLt");
            })
        });
        chosen.as_ref().map(|_| ()).map_err(Error::clone)
    }

    fn choose(&self, product: &Matmul, key: &MatmulKey) -> Result<Prepared> {
        let (m, n, k) = product.shape;
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F);
        let description = result::create_matmul_desc(compute, scale)
            .map(Description)
            .map_err(|e| failure("cublasLtMatmulDescCreate", e))?;
        let (plain, transposed) = (0i32, 1i32); // CUBLAS_OP_N, CUBLAS_OP_T
        description.set(Desc::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
        description.set(Desc::CUBLASLT_MATMUL_DESC_TRANSB, &plain)?;
        if let Some(bias) = product.bias {
            description
                .set(Desc::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
            description.set(Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let weight = MatrixLayout::new(product.dtype, k, n, k)?;
        let x = MatrixLayout::new(product.dtype, k, m, k)?;
        let out = MatrixLayout::new(product.out_dtype, n, m, product.out_columns)?;
        let preferences = result::create_matmul_pref()
            .map(Preferences)
            .map_err(|e| failure("cublasLtMatmulPreferenceCreate", e))?;
        preferences.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &to_usize(WORKSPACE_BYTES))?;
        preferences
            .set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCTION_IN_COMPUTE_TYPE)?;
        let [of_weight, of_x, of_out] = key.alignment;
        preferences.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &of_weight)?;
        preferences.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &of_x)?;
        preferences.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &of_out)?;
        preferences.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &of_out)?;
        self.context.bind()?;
        // SAFETY: all objects are alive, and the layouts are those that `run` uses.
        let found = unsafe {
            result::get_matmul_algo_heuristic(
                self.handle,
                description.0,
                weight.0,
                x.0,
                out.0,
                out.0,
                preferences.0,
            )
        };
        let found = found.map_err(|e| failure(&format!("no algorithm for {:?}", product.shape), e))?;
        if found.workspaceSize as u64 > WORKSPACE_BYTES {
            return Err(Error::unsupported("cuda: cuBLASLt wants more workspace than it was offered"));
        }
        Ok(Prepared { description, weight, x, out, algorithm: found.algo })
    }

    /// Enqueues a prepared `product` on a stream of the bound context. `workspace` belongs to the stream and
    /// has `WORKSPACE_BYTES`.
    pub(crate) fn run(&self, product: &Matmul, stream: CUstream, workspace: u64) -> Result<()> {
        self.prepare(product)?;
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Ok(chosen)) = prepared.get(&MatmulKey::of(product)) else {
            return Err(Error::new(ErrorKind::Other, "cuda: a product that was not prepared"));
        };
        if let Some(bias) = product.bias {
            chosen.description.set(Desc::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let one = 1.0f32;
        let beta = if product.accumulate { 1.0f32 } else { 0.0 };
        // SAFETY: the addresses are operands that `Cmd` checked against the shape, alive until the batch is
        // done; alpha and beta are read before the call returns; the workspace is used by this stream alone.
        unsafe {
            result::matmul(
                self.handle,
                chosen.description.0,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                product.weight as *const c_void,
                chosen.weight.0,
                product.x as *const c_void,
                chosen.x.0,
                product.out as *const c_void,
                chosen.out.0,
                product.out as *mut c_void,
                chosen.out.0,
                &chosen.algorithm,
                workspace as *mut c_void,
                to_usize(WORKSPACE_BYTES),
                stream.cast(),
            )
        }
        .map_err(|e| failure("cublasLtMatmul", e))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once in `new`.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_are_told_apart_by_alignment_but_not_by_address() {
        let product = Matmul {
            shape: (64, 128, 256),
            dtype: DType::Bf16,
            out_dtype: DType::F32,
            x: 0x1000,
            weight: 0x2000,
            bias: None,
            out: 0x3000,
            out_columns: 128,
            accumulate: false,
        };
        assert_eq!(MatmulKey::of(&product).alignment, [256; 3]);
        let elsewhere = Matmul { x: 0x7F00, weight: 0x8100, ..product };
        assert!(MatmulKey::of(&product) == MatmulKey::of(&elsewhere));
        let odd = Matmul { x: 0x1010, ..product };
        assert_eq!(MatmulKey::of(&odd).alignment, [256, 16, 256]);
    }
}
