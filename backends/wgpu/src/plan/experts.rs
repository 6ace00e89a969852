//! Mixtures of experts. The matrices of experts are cut between experts.

use super::quantised::numbers_of;
use super::{GROUP, Planner, TensorView, element_shape, words};
use crate::kernels::{Kernel, ShaderFile, TILE, TILE_GROUP};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{CodeKind, DType, Error, OpSig, Quantised, Result, Scoring, ZeroKind};

/// Rows of an expert, on average, up to which each is computed alone.
const FEW_ROWS_MAX: u32 = 8;
/// Columns per workgroup in `grouped_few`.
const COLS: u32 = 4;

/// The numbers of code and scale of weights that `code_weights.wgsl` reads: codes of whole bytes or nibbles
/// with a scale, whose groups end with matrices and octets of columns.
fn scaled_codes(format: &Quantised, n: u32, k: u32) -> Result<[u32; 2]> {
    let codes = matches!(format.code, CodeKind::U4 | CodeKind::I8 | CodeKind::E2m1 | CodeKind::E4m3);
    let scaled = format.zero == ZeroKind::Middle && format.supers() == 0 && !format.outer;
    let columns = format.group_columns >= k || format.group_columns.is_multiple_of(8);
    let whole = k.is_multiple_of(8) && columns && n.is_multiple_of(format.group_rows);
    match codes && scaled && whole {
        true => Ok(numbers_of(format)),
        false => Err(Error::unsupported(format!("wgpu: experts with {format} weights of {n} x {k}"))),
    }
}

impl Planner {
    pub(super) fn route(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::Route { tokens, bias, routing } = *sig else { return Ok(()) };
        let [logits, .., chosen, weights, order, starts] = operands else {
            return Err(Error::invalid("route: wrong number of operands"));
        };
        let largest = operands.iter().map(|operand| operand.window.bytes).max().unwrap_or(0);
        self.runs_of(sig, 1, largest, 1)?;
        let kernel = |entry| {
            let kernel = Kernel::new(ShaderFile::Route, entry, GROUP).number("EXPERTS", routing.experts);
            kernel.number("ACTIVE", routing.active).number("GROUPS", routing.groups)
        };
        let by_sigmoid = u32::from(routing.scoring == Scoring::Sigmoid);
        let [open, best] = [routing.groups_active, routing.group_best];
        let normalise = u32::from(routing.normalise);
        let shape = [tokens, bias.into(), by_sigmoid, open, best, normalise, routing.scale.0.to_bits()];
        // absent operands must be bound anyway
        let correction = if bias { &operands[1] } else { logits };
        self.dispatch(&kernel("route"), &[logits, correction], &[chosen, weights], &shape, tokens.into());
        self.dispatch(&kernel("route_order"), &[chosen], &[order, starts], &shape, 1);
        Ok(())
    }

    pub(super) fn grouped(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::GroupedGemm { grouped, n, k, weight: kind, bias, .. } = *sig else { return Ok(()) };
        let ([x, weights @ .., order, starts, out], arrays) = (operands, kind.part_count()) else {
            return Err(Error::invalid("grouped_gemm: wrong number of operands"));
        };
        let (weights, bias) = (&weights[..arrays], weights.get(arrays).filter(|_| bias));
        let format = kind.quantised().map(|format| scaled_codes(&format, n, k)).transpose()?;
        let (n64, choices) = (u64::from(n), u64::from(grouped.choices));
        let wide = out.dtype != DType::F32 && n % 2 == 1;
        if wide && grouped.others > 0 {
            // whole rows are narrowed, also rows that should stay unchanged
            let message = format!("wgpu: grouped_gemm: {n} columns of {} for a share of experts", out.dtype);
            return Err(Error::unsupported(message));
        }
        let results = if wide { choices * n64 * 4 } else { out.window.bytes };
        let whole = [x.window.bytes, order.window.bytes, starts.window.bytes, results];
        self.runs_of(sig, 1, whole.into_iter().max().unwrap_or(0), 1)?;
        let target = if wide { self.scratch(choices * n64) } else { out.clone() };
        let aligned = |operand: &TensorView| operand.window.offset.is_multiple_of(16);
        let few = grouped.own() <= FEW_ROWS_MAX.saturating_mul(grouped.touched);
        let of_expert = |which: usize| weights[which].elements() / u64::from(grouped.experts.max(1));
        // an expert's matrix and bias begin with a word
        let whole_words = |elements: u64, dtype: DType| (elements * dtype.size_bytes()).is_multiple_of(4);
        let even = (0..arrays).all(|which| whole_words(of_expert(which), weights[which].dtype))
            && bias.is_none_or(|bias| whole_words(n64, bias.dtype));
        let unit = if even { 1 } else { 4 };
        let matrix_bytes = of_expert(0) * weights[0].dtype.size_bytes();
        for (first, count) in self.runs_of(sig, grouped.experts.into(), matrix_bytes, unit)? {
            let part = |which: usize| weights[which].part(first * of_expert(which), count * of_expert(which));
            let weight = part(0);
            let scales = if format.is_some() { part(1) } else { x.clone() };
            let bias_part = bias.map_or_else(|| x.clone(), |bias| bias.part(first * n64, count * n64));
            let file = if format.is_some() { ShaderFile::GroupedCodes } else { ShaderFile::Grouped };
            let kernel = if few {
                Kernel::new(file, "grouped_few", GROUP).summing(COLS)
            } else {
                self.in_tiles(Kernel::new(file, "grouped_many", TILE_GROUP), x, &weight)
            };
            let kernel = match format {
                Some([code, scale]) => kernel.number("CODE", code).number("SCALE", scale),
                None => kernel.dtype("D1", weight.dtype),
            };
            let wide = k.is_multiple_of(8) && aligned(x) && (format.is_some() || aligned(&weight));
            let kernel = kernel
                .flag("WIDE", wide)
                .dtype("D0", x.dtype)
                .dtype("D2", kind.bias())
                .dtype("OUT", target.dtype);
            let groups = match few {
                true => n64.div_ceil(COLS.into()) * choices,
                false => n64.div_ceil(TILE.into()) * (choices / u64::from(TILE) + count.min(choices)),
            };
            let (first, count) = (to_u32(first), to_u32(count));
            let groups_of =
                kind.quantised().map_or([1, 1], |format| [format.group_rows, format.group_columns]);
            let (bias, [rows, cols]) = (u32::from(bias.is_some()), groups_of);
            let shape = [grouped.choices, grouped.fan, grouped.experts, first, count, n, k, bias, rows, cols];
            let inputs = [x, &weight, &bias_part, order, starts, &scales];
            let inputs = &inputs[..if format.is_some() { 6 } else { 5 }];
            self.dispatch(&kernel, inputs, &[&target], &shape, groups);
        }
        if wide {
            self.narrow(&target, out, false);
        }
        Ok(())
    }

    pub(super) fn combine(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let (OpSig::Combine { tokens, active, cols, accumulate, .. }, [x, weights, out]) = (*sig, operands)
        else {
            return Ok(());
        };
        let kernel =
            Kernel::new(ShaderFile::Elements, "combine", GROUP).dtype("D0", x.dtype).dtype("OUT", DType::F32);
        let (active64, cols64) = (u64::from(active), u64::from(cols));
        let row_bytes = (active64 * cols64 * x.dtype.size_bytes()).max(cols64 * 4);
        for (first, count) in self.runs(sig, tokens.into(), row_bytes)? {
            let x = x.part(first * active64 * cols64, count * active64 * cols64);
            let weights = weights.part(first * active64, count * active64);
            let out = out.part(first * cols64, count * cols64);
            let shape = element_shape(count * cols64, cols, active, [0, 0], accumulate.into());
            let groups = (count * cols64).div_ceil(GROUP.into());
            self.dispatch(&kernel, &[&x, &weights], &[&out], &shape, groups);
        }
        Ok(())
    }

    pub(super) fn clamped_swiglu(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let (OpSig::ClampedSwiglu { alpha, limit, x, .. }, [gate_up, out]) = (*sig, operands) else {
            return Ok(());
        };
        let kernel =
            Kernel::new(ShaderFile::Elements, "clamped_swiglu", GROUP).dtype("D0", x).dtype("OUT", x);
        for (first, count) in self.runs(sig, out.elements(), 2 * x.size_bytes())? {
            let (gate_up, out) = (gate_up.part(2 * first, 2 * count), out.part(first, count));
            let shape = element_shape(count, 1, 1, [alpha.0.to_bits(), limit.0.to_bits()], 0);
            self.dispatch(&kernel, &[&gate_up], &[&out], &shape, words(count, x).div_ceil(GROUP.into()));
        }
        Ok(())
    }
}
