//! Matrix products.

use super::{Planner, TensorView};
use crate::kernels::{Kernel, ShaderFile, TILE, TILE_GROUP};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, OpSig, Result};

/// Maximum number of rows that one group handles all together, so that it reads its columns of the weights
/// once.
const FEW_ROWS_MAX: u64 = 16;
/// Columns per workgroup in `few_rows`, and its threads.
const COLS: u32 = 4;
const FEW_GROUP: u32 = 64;
/// A product of `rows` rows of `x` with `cols` rows of the weights, all that `weight` holds: the columns of
/// `out` [rows, n] from `col` on. `bias` covers all columns.
pub(super) struct ColumnProduct<'a> {
    pub(super) x: &'a TensorView,
    pub(super) weight: &'a TensorView,
    pub(super) bias: Option<&'a TensorView>,
    pub(super) out: &'a TensorView,
    pub(super) rows: u64,
    pub(super) col: u64,
    pub(super) cols: u64,
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) accumulate: bool,
}

impl Planner {
    pub(super) fn gemm(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::Gemm { m, n, k, accumulate, .. } = *sig else { return Ok(()) };
        let (x, weight, bias, out) = match operands {
            [x, weight, bias, out] => (x, weight, Some(bias), out),
            [x, weight, out] => (x, weight, None, out),
            _ => return Ok(()),
        };
        let (n64, k64) = (u64::from(n), u64::from(k));
        let wide = out.dtype != DType::F32 && n % 2 == 1;
        // f32 results, which go through scratch memory, need the most
        let row_bytes = (k64 * x.dtype.size_bytes()).max(n64 * if wide { 4 } else { out.dtype.size_bytes() });
        let columns = self.runs_of(sig, n64, k64 * weight.dtype.size_bytes(), COLS.into())?;
        for (row, rows) in self.runs(sig, m.into(), row_bytes)? {
            self.scratch_used = 0;
            let x = x.part(row * k64, rows * k64);
            let out = out.part(row * n64, rows * n64);
            let target = if wide { self.scratch(rows * n64) } else { out.clone() };
            for &(col, cols) in &columns {
                let weight = weight.part(col * k64, cols * k64);
                let accumulate = accumulate && !wide;
                let (x, weight, out) = (&x, &weight, &target);
                self.columns(&ColumnProduct { x, weight, bias, out, rows, col, cols, n, k, accumulate });
            }
            if wide {
                self.narrow(&target, &out, accumulate);
            }
        }
        Ok(())
    }

    /// Plans the product.
    pub(super) fn columns(&mut self, product: &ColumnProduct<'_>) {
        let ColumnProduct { x, weight, bias, out, rows, col, cols, n, k, accumulate } = *product;
        // a kernel without a bias never reads the operand bound in its place
        let bias_part = bias.map_or_else(|| x.clone(), |bias| bias.part(col, cols));
        let (kernel, groups) = self.product(x, weight, out, rows, cols, k);
        let flags = [u32::from(bias.is_some()), u32::from(accumulate)];
        let shape = [to_u32(rows), to_u32(cols), k, n, to_u32(col), flags[0], flags[1]];
        self.dispatch(&kernel, &[x, weight, &bias_part], &[out], &shape, groups);
    }

    /// Returns the kernel for `rows` rows and `cols` columns, and its workgroups.
    fn product(
        &self,
        x: &TensorView,
        weight: &TensorView,
        out: &TensorView,
        rows: u64,
        cols: u64,
        k: u32,
    ) -> (Kernel, u64) {
        // rows of eight elements begin at multiples of 16 bytes if the operand does
        let aligned = |operand: &TensorView| operand.window.offset.is_multiple_of(16);
        let wide = k.is_multiple_of(8) && aligned(x) && aligned(weight);
        let (kernel, groups) = if rows <= FEW_ROWS_MAX {
            // as few kernels as leave no more than half of the rows, or four, empty
            let per_group = if rows == 1 { 1 } else { to_u32(rows).next_power_of_two().max(4) };
            let kernel = Kernel::new(ShaderFile::Gemm, "few_rows", FEW_GROUP);
            let kernel = kernel.summing(per_group * COLS).number("ROWS", per_group);
            (kernel, cols.div_ceil(COLS.into()))
        } else {
            let kernel = self.in_tiles(Kernel::new(ShaderFile::Gemm, "many_rows", TILE_GROUP), x, weight);
            (kernel, cols.div_ceil(TILE.into()) * rows.div_ceil(TILE.into()))
        };
        let kernel = kernel
            .flag("WIDE", wide)
            .dtype("D0", x.dtype)
            .dtype("D1", weight.dtype)
            .dtype("D2", weight.dtype)
            .dtype("OUT", out.dtype);
        (kernel, groups)
    }

    /// Has the kernel multiply matrices where the adapter does so with what the operands are: f16, whose
    /// products are exact in f32. bf16 is not among the types, and half of f32 would be lost.
    pub(super) fn in_tiles(&self, kernel: Kernel, x: &TensorView, weight: &TensorView) -> Kernel {
        match self.demands.matrices {
            Some(unit) if x.dtype == DType::F16 && weight.dtype == DType::F16 => kernel.by_matrices(unit),
            _ => kernel,
        }
    }
}
