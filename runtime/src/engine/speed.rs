//! How fast a device is at a model's products beside other devices, for shares in proportion.

use crate::model::ModelConfig;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, Result, Slice};
use std::time::Duration;

/// Rows of a product: of a small decode step, and of a chunk of a prompt.
const ROWS: [u32; 2] = [1, 128];
/// Bytes of all matrices that are multiplied: more than caches hold.
const BYTES: u64 = 128 << 20;
/// Number of measurements; the shortest counts.
const REPEATS: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Number of products with the weights of an MLP that `device` computes per second: the geometric mean of the
/// rates at one row, which memory bounds, and at many, which arithmetic does. The weights of the model need
/// not be there yet.
///
/// # Errors
/// Errors of the device.
pub fn products_per_s(device: &dyn Device, config: &ModelConfig, activations: DType) -> Result<f64> {
    let (n, k, weight, x) = (config.intermediate, config.hidden, config.dtype, activations);
    let filled = |rows: u32, columns: u32, dtype: DType, usage| -> Result<Slice> {
        let bytes = u64::from(rows) * u64::from(columns) * dtype.size_bytes();
        let slice = device.alloc(bytes, usage)?;
        // memory that was never written may be no memory yet
        device.write(&slice, &vec![0; to_usize(bytes)])?;
        Ok(slice)
    };
    let matrix_bytes = u64::from(n) * u64::from(k) * weight.size_bytes();
    let count = to_u32(BYTES.div_ceil(matrix_bytes.max(1)).clamp(1, 3 * u64::from(config.layers)));
    let matrices = (0..count).map(|_| filled(n, k, weight, BufferUsage::Weights));
    let matrices = matrices.collect::<Result<Vec<_>>>()?;
    let mut queue = device.queue()?;
    let mut product = 1.0;
    for m in ROWS {
        let rows = filled(m, k, x, BufferUsage::Activations)?;
        let out = filled(m, n, x, BufferUsage::Activations)?;
        let sig = OpSig::Gemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        let list = matrices.iter().map(|matrix| Cmd::new(sig, &[rows.clone(), matrix.clone(), out.clone()]));
        let list = list.collect::<Result<Vec<_>>>()?;
        let mut least = f64::INFINITY;
        for _ in 0..=REPEATS {
            let ticket = queue.submit(&list)?;
            least = least.min(queue.wait(ticket, TIMEOUT)?.time.0);
        }
        product *= f64::from(count) / least.max(1e-9);
    }
    Ok(product.sqrt())
}
