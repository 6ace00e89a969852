//! Products and lookups with quantised weights. Some columns of the weights at a time become f32 in scratch
//! memory, with which the product runs as with any others.

use super::gemm::ColumnProduct;
use super::{GROUP, NAN, Planner, TensorView, words};
use crate::kernels::{Kernel, ShaderFile};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{CodeKind, DType, Error, OpSig, Quantised, Result, ScaleKind, ZeroKind};

/// Bytes of weights in f32 that are made at a time.
const TILE_BYTES: u64 = 16 << 20;
/// Columns of a product come in multiples of this.
const COLUMNS: u64 = 4;

/// The arrays of weights.
struct Arrays {
    codes: TensorView,
    /// The high bits of codes, or the outer scale.
    high: Option<TensorView>,
    has_high: bool,
    /// Scales, zeros and supers.
    others: [Option<TensorView>; 3],
}

impl Arrays {
    fn of(quantised: &Quantised, columns: u32, operands: &[TensorView]) -> Result<Arrays> {
        let has_high = quantised.code.high_bits() > 0;
        if has_high && quantised.outer {
            return Err(Error::unsupported("wgpu: codes of 5 and 6 bits with an outer scale"));
        }
        let parts = quantised.parts(1, 1, columns);
        let named = |name: &str| {
            let at = parts.iter().position(|part| part.name == name);
            at.and_then(|at| operands.get(at)).cloned()
        };
        let codes = named("codes").ok_or_else(|| Error::invalid("wgpu: no codes"))?;
        let high = named(if quantised.outer { "outer" } else { "high" });
        let others = ["scales", "zeros", "supers"].map(named);
        Ok(Arrays { codes, high, has_high, others })
    }

    /// The arrays of the weight, with codes limited to `count` rows from `first` on; the codes stand in for
    /// absent arrays.
    fn rows(&self, quantised: &Quantised, columns: u32, first: u64, count: u64) -> [TensorView; 5] {
        let part = |operand: &TensorView, bits: u32| {
            let row = u64::from(columns) * u64::from(bits) / 32;
            operand.part(first * row, count * row)
        };
        let codes = part(&self.codes, quantised.code.low_bits());
        let high = match &self.high {
            Some(high) if self.has_high => part(high, quantised.code.high_bits()),
            Some(outer) => outer.clone(),
            None => codes.clone(),
        };
        let [scales, zeros, supers] = self.others.clone().map(|own| own.unwrap_or_else(|| codes.clone()));
        [codes, high, scales, zeros, supers]
    }
}

/// The numbers that kernels have for code and scale.
pub(super) fn numbers_of(quantised: &Quantised) -> [u32; 2] {
    let code = CodeKind::ALL.iter().position(|code| *code == quantised.code).map_or(0, to_u32);
    let scale = match quantised.scale {
        ScaleKind::F32 => 0,
        ScaleKind::Bf16 => 1,
        ScaleKind::F16 => 2,
        ScaleKind::E4m3 => 3,
        ScaleKind::I8 => 4,
    };
    [code, scale]
}

fn decoding(entry: &'static str, quantised: &Quantised) -> Kernel {
    let [code, scale] = numbers_of(quantised);
    let zero = match quantised.zero {
        ZeroKind::Middle => 0,
        ZeroKind::Points => 1,
        ZeroKind::Minima => 2,
    };
    Kernel::new(ShaderFile::Quantised, entry, GROUP)
        .number("CODE", code)
        .number("SCALE", scale)
        .number("ZERO", zero)
        .number("SUPERS", quantised.supers())
        .flag("OUTER", quantised.outer)
}

impl Planner {
    pub(super) fn quantised_gemm(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::QuantisedGemm { m, n, k, weight, bias, accumulate, .. } = *sig else { return Ok(()) };
        let count = weight.part_count();
        let (x, out) = (&operands[0], &operands[operands.len() - 1]);
        let bias = bias.then(|| &operands[count + 1]);
        let arrays = Arrays::of(&weight, k, &operands[1..=count])?;
        let (n64, k64) = (u64::from(n), u64::from(k));
        let wide = out.dtype != DType::F32 && n % 2 == 1;
        let row_bytes = (k64 * x.dtype.size_bytes()).max(n64 * if wide { 4 } else { out.dtype.size_bytes() });
        let tile = TILE_BYTES.min(self.window_bytes()) / (4 * k64).max(1) / COLUMNS * COLUMNS;
        if tile == 0 {
            return Err(Error::unsupported(format!(
                "wgpu: rows of {k} weights exceed this adapter's bindings"
            )));
        }
        for (row, rows) in self.runs(sig, m.into(), row_bytes)? {
            self.scratch_used = 0;
            let x = x.part(row * k64, rows * k64);
            let out = out.part(row * n64, rows * n64);
            let target = if wide { self.scratch(rows * n64) } else { out.clone() };
            let decoded = self.scratch(tile.min(n64) * k64);
            for col in (0..n64).step_by(usize::try_from(tile).unwrap_or(usize::MAX)) {
                let cols = tile.min(n64 - col);
                let made = decoded.part(0, cols * k64);
                self.dequantise(&weight, k, &arrays, col, cols, &made);
                let accumulate = accumulate && !wide;
                let (x, weight, out) = (&x, &made, &target);
                self.columns(&ColumnProduct { x, weight, bias, out, rows, col, cols, n, k, accumulate });
            }
            if wide {
                self.narrow(&target, &out, accumulate);
            }
        }
        Ok(())
    }

    /// Adds a kernel that writes some rows of weights in f32.
    fn dequantise(
        &mut self,
        quantised: &Quantised,
        k: u32,
        arrays: &Arrays,
        first: u64,
        count: u64,
        to: &TensorView,
    ) {
        let parts = arrays.rows(quantised, k, first, count);
        let elements = count * u64::from(k);
        let (first, end) = (to_u32(first), to_u32(first + count));
        let groups = [quantised.group_rows, quantised.group_columns];
        let shape = [to_u32(elements), k, first, end, 0, groups[0], groups[1], NAN];
        let kernel = decoding("dequantise", quantised);
        self.dispatch(&kernel, &parts.each_ref(), &[to], &shape, elements.div_ceil(GROUP.into()));
    }

    pub(super) fn quantised_embed(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::QuantisedEmbed { tokens, vocab, hidden, table, .. } = *sig else { return Ok(()) };
        let count = table.part_count();
        let (ids, out) = (&operands[0], &operands[operands.len() - 1]);
        let arrays = Arrays::of(&table, hidden, &operands[1..=count])?;
        let hidden64 = u64::from(hidden);
        let row_bytes = hidden64 * u64::from(table.code.low_bits()) / 8;
        let mut parts = self.runs(sig, vocab.into(), row_bytes)?;
        if parts.is_empty() {
            parts.push((0, 0)); // an empty table has no row for any id
        }
        let kernel = decoding("lookup", &table).dtype("OUT", out.dtype);
        for (row, rows) in self.runs(sig, tokens.into(), hidden64 * out.dtype.size_bytes())? {
            let (ids, out) = (ids.part(row, rows), out.part(row * hidden64, rows * hidden64));
            for &(first, count) in &parts {
                let [codes, high, scales, zeros, supers] = arrays.rows(&table, hidden, first, count);
                let (elements, end) = (rows * hidden64, to_u32(first + count));
                let groups = [table.group_rows, table.group_columns];
                let shape = [to_u32(elements), hidden, to_u32(first), end, vocab, groups[0], groups[1], NAN];
                let threads = words(elements, out.dtype).div_ceil(GROUP.into());
                let inputs = [&codes, &high, &scales, &zeros, &supers, &ids];
                self.dispatch(&kernel, &inputs, &[&out], &shape, threads);
            }
        }
        Ok(())
    }
}
