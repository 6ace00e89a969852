//! Mixtures of experts. The matrices of experts are cut between experts.

use super::{GROUP, Operand, Planner, element_shape, words};
use crate::kernels::{File, Kernel};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, Error, OpSig, Result, Scoring};

/// Rows of an expert, on average, up to which each is computed alone.
const FEW_ROWS_MAX: u32 = 8;
/// Columns per workgroup in `grouped_few`.
const COLS: u32 = 4;
/// Edge length of a tile in `grouped_many`, and its threads.
const TILE: u64 = 64;
const TILE_GROUP: u32 = 256;

impl Planner {
    pub(super) fn route(&mut self, sig: &OpSig, operands: &[Operand]) -> Result<()> {
        let OpSig::Route { tokens, bias, routing } = *sig else { return Ok(()) };
        let [logits, .., chosen, weights, order, starts] = operands else {
            return Err(Error::invalid("route: wrong number of operands"));
        };
        let largest = operands.iter().map(|operand| operand.window.bytes).max().unwrap_or(0);
        self.runs_of(sig, 1, largest, 1)?;
        let kernel = |entry| {
            let kernel = Kernel::new(File::Route, entry, GROUP).number("EXPERTS", routing.experts);
            kernel.number("ACTIVE", routing.active).number("GROUPS", routing.groups)
        };
        let by_sigmoid = u32::from(routing.scoring == Scoring::Sigmoid);
        let [open, best] = [routing.groups_active, routing.group_best];
        let normalise = u32::from(routing.normalise);
        let shape = [tokens, bias.into(), by_sigmoid, open, best, normalise, routing.scale.0.to_bits()];
        // what is absent must be bound anyway
        let correction = if bias { &operands[1] } else { logits };
        self.dispatch(&kernel("route"), &[logits, correction], &[chosen, weights], &shape, tokens.into());
        self.dispatch(&kernel("route_order"), &[chosen], &[order, starts], &shape, 1);
        Ok(())
    }

    pub(super) fn grouped(&mut self, sig: &OpSig, operands: &[Operand]) -> Result<()> {
        let OpSig::GroupedGemm { grouped, n, k, .. } = *sig else { return Ok(()) };
        let (x, weight, bias, order, starts, out) = match operands {
            [x, weight, bias, order, starts, out] => (x, weight, Some(bias), order, starts, out),
            [x, weight, order, starts, out] => (x, weight, None, order, starts, out),
            _ => return Err(Error::invalid("grouped_gemm: wrong number of operands")),
        };
        let (n64, k64, choices) = (u64::from(n), u64::from(k), u64::from(grouped.choices));
        let wide = out.dtype != DType::F32 && n % 2 == 1;
        let results = if wide { choices * n64 * 4 } else { out.window.bytes };
        let whole = [x.window.bytes, order.window.bytes, starts.window.bytes, results];
        self.runs_of(sig, 1, whole.into_iter().max().unwrap_or(0), 1)?;
        let target = if wide { self.scratch(choices * n64) } else { out.clone() };
        let aligned = |operand: &Operand| operand.window.offset.is_multiple_of(16);
        let few = grouped.choices <= FEW_ROWS_MAX.saturating_mul(grouped.touched);
        let of_expert = n64 * k64;
        // an expert's matrix and bias begin with a word
        let unit = if of_expert % 2 == 1 || (bias.is_some() && n % 2 == 1) { 2 } else { 1 };
        for (first, count) in
            self.runs_of(sig, grouped.experts.into(), of_expert * weight.dtype.size_bytes(), unit)?
        {
            let weight = weight.part(first * of_expert, count * of_expert);
            let bias_part = bias.map_or_else(|| x.clone(), |bias| bias.part(first * n64, count * n64));
            let kernel = if few {
                Kernel::new(File::Grouped, "grouped_few", GROUP).summing(COLS)
            } else {
                Kernel::new(File::Grouped, "grouped_many", TILE_GROUP)
            };
            let kernel = kernel
                .flag("WIDE", k.is_multiple_of(8) && aligned(x) && aligned(&weight))
                .dtype("D0", x.dtype)
                .dtype("D1", weight.dtype)
                .dtype("D2", weight.dtype)
                .dtype("OUT", target.dtype);
            let groups = match few {
                true => n64.div_ceil(COLS.into()) * choices,
                false => n64.div_ceil(TILE) * (choices / TILE + count.min(choices)),
            };
            let (first, count) = (to_u32(first), to_u32(count));
            let shape =
                [grouped.choices, grouped.fan, grouped.experts, first, count, n, k, bias.is_some().into()];
            let inputs = [x, &weight, &bias_part, order, starts];
            self.dispatch(&kernel, &inputs, &[&target], &shape, groups);
        }
        if wide {
            self.narrow(&target, out, false);
        }
        Ok(())
    }

    pub(super) fn combine(&mut self, sig: &OpSig, operands: &[Operand]) -> Result<()> {
        let (OpSig::Combine { tokens, active, cols, accumulate, .. }, [x, weights, out]) = (*sig, operands)
        else {
            return Ok(());
        };
        let kernel =
            Kernel::new(File::Elements, "combine", GROUP).dtype("D0", x.dtype).dtype("OUT", DType::F32);
        let (active64, cols64) = (u64::from(active), u64::from(cols));
        let row_bytes = (active64 * cols64 * x.dtype.size_bytes()).max(cols64 * 4);
        for (first, count) in self.runs(sig, tokens.into(), row_bytes)? {
            let x = x.part(first * active64 * cols64, count * active64 * cols64);
            let weights = weights.part(first * active64, count * active64);
            let out = out.part(first * cols64, count * cols64);
            let shape = element_shape(count * cols64, cols, active, (0, 0), accumulate.into());
            let groups = (count * cols64).div_ceil(GROUP.into());
            self.dispatch(&kernel, &[&x, &weights], &[&out], &shape, groups);
        }
        Ok(())
    }

    pub(super) fn clamped_swiglu(&mut self, sig: &OpSig, operands: &[Operand]) -> Result<()> {
        let (OpSig::ClampedSwiglu { alpha, limit, x, .. }, [gate_up, out]) = (*sig, operands) else {
            return Ok(());
        };
        let kernel = Kernel::new(File::Elements, "clamped_swiglu", GROUP).dtype("D0", x).dtype("OUT", x);
        for (first, count) in self.runs(sig, out.elements(), 2 * x.size_bytes())? {
            let (gate_up, out) = (gate_up.part(2 * first, 2 * count), out.part(first, count));
            let shape = element_shape(count, 1, 1, (alpha.0.to_bits(), limit.0.to_bits()), 0);
            self.dispatch(&kernel, &[&gate_up], &[&out], &shape, words(count, x).div_ceil(GROUP.into()));
        }
        Ok(())
    }
}
