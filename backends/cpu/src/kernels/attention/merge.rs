//! Recombines partial attention and normalises it.

use super::scalar_exp;
use crate::kernels::OperandSpan;
use crate::kernels::convert::{load, load_part, store, store_part};
use crate::kernels::simd::{Simd, SimdTask};
use mixfleet_hal::DType;
use std::ops::Range;

/// Rows `range` of an `AttnMerge`.
pub(crate) struct AttnMergeRows {
    pub(crate) acc: OperandSpan,
    pub(crate) stat: OperandSpan,
    /// The sinks of `heads` heads.
    pub(crate) sinks: Option<(OperandSpan, usize)>,
    pub(crate) out: OperandSpan,
    pub(crate) parts: usize,
    pub(crate) rows: usize,
    pub(crate) range: Range<usize>,
    pub(crate) head_dim: usize,
    pub(crate) dtype: DType,
}

impl AttnMergeRows {
    /// Maximum or sum (`which` 0 or 1) of one row of one part.
    #[inline(always)]
    unsafe fn stat(&self, part: usize, row: usize, which: usize) -> f32 {
        let index = (part * self.rows + row) * 2 + which;
        // SAFETY: stat holds [parts, rows, 2].
        unsafe { self.stat.at(DType::F32, index).cast::<f32>().read_unaligned() }
    }

    /// The sink of a row; -inf without sinks.
    #[inline(always)]
    unsafe fn sink(&self, row: usize) -> f32 {
        // SAFETY: sinks hold an element for each head.
        self.sinks.map_or(f32::NEG_INFINITY, |(sinks, heads)| unsafe {
            sinks.at(DType::F32, row % heads).cast::<f32>().read_unaligned()
        })
    }
}

impl SimdTask for AttnMergeRows {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (dim, dtype) = (self.head_dim, self.dtype);
        for row in self.range.clone() {
            // SAFETY: acc holds [parts, rows, dim], out [rows, dim].
            unsafe {
                let sink = self.sink(row);
                let mut max = sink;
                for part in 0..self.parts {
                    max = max.max(self.stat(part, row, 0));
                }
                let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
                let mut sum = scalar_exp::<S>(sink - base);
                for part in 0..self.parts {
                    sum += self.stat(part, row, 1) * scalar_exp::<S>(self.stat(part, row, 0) - base);
                }
                let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                let mut d = 0;
                while d < dim {
                    let n = (dim - d).min(S::LANES);
                    let mut total = S::splat(0.0);
                    for part in 0..self.parts {
                        let factor = scalar_exp::<S>(self.stat(part, row, 0) - base) * inverse;
                        let from = self.acc.at(DType::F32, (part * self.rows + row) * dim + d);
                        let v = if n == S::LANES {
                            load::<S>(DType::F32, from)
                        } else {
                            load_part::<S>(DType::F32, from, n)
                        };
                        total = S::fma(v, S::splat(factor), total);
                    }
                    let out = self.out.at(dtype, row * dim + d);
                    if n == S::LANES {
                        store::<S>(dtype, out, total);
                    } else {
                        store_part::<S>(dtype, out, total, n);
                    }
                    d += S::LANES;
                }
            }
        }
    }
}
