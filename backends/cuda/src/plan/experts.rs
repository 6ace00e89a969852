//! Mixtures of experts: the portable kernels.

use super::quantised::{ALL_PARTS, CodeMacros, all_parts};
use super::{DeviceRange, KernelArg, PlanStep, launch, vector};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::{OpSig, Result, Scoring};

/// Rows of an expert, on average, up to which reading its weights once per few rows is faster than a mostly
/// empty tile.
const FEW_ROWS_MAX: u32 = 16;
/// Rows per block in `grouped_few`, and its threads.
const ROWS: u32 = 4;
const FEW_THREADS: u32 = 64;
/// Edge length of a tile in `grouped_many`, and its threads.
const TILE: u32 = 64;
const TILE_THREADS: u32 = 256;

/// Plans the choice, one block per token, and its order by expert.
pub(super) fn route(sig: &OpSig, args: &[KernelArg]) -> Result<Vec<PlanStep>> {
    let OpSig::Route { tokens, bias, routing } = *sig else { unreachable!("called for route") };
    let program = |threads: u32| {
        let macros: [(&'static str, &dyn Macro); 4] = [
            ("EXPERTS", &routing.experts),
            ("ACTIVE", &routing.active),
            ("GROUPS", &routing.groups),
            ("GROUP", &threads),
        ];
        KernelProgram::new(KernelSource::Route, &macros)
    };
    let at = 1 + usize::from(bias);
    // a bias that is absent is not read
    let mut choice = vec![args[0], args[usize::from(bias)], args[at], args[at + 1]];
    let by_sigmoid = u32::from(routing.scoring == Scoring::Sigmoid);
    let flags =
        [bias.into(), by_sigmoid, routing.groups_active, routing.group_best, routing.normalise.into()];
    choice.extend(flags.map(KernelArg::U32));
    choice.push(KernelArg::F32(routing.scale.0));
    let order = vec![args[at], args[at + 2], args[at + 3], KernelArg::U32(tokens * routing.active)];
    let few = routing.experts.next_power_of_two().clamp(32, 256);
    Ok(vec![
        launch(program(few), "route", [tokens.into(), 1, 1], few, choice)?,
        launch(program(1024), "route_order", [tokens.min(1).into(), 1, 1], 1024, order)?,
    ])
}

/// Plans products with the matrices of experts.
pub(super) fn grouped(sig: &OpSig, operands: &[DeviceRange], mut args: Vec<KernelArg>) -> Result<PlanStep> {
    let OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } = *sig else {
        unreachable!("called for grouped_gemm")
    };
    let quantised = weight.quantised();
    if let Some(quantised) = &quantised {
        all_parts(quantised, k, &mut args);
    }
    let matrices = if quantised.is_some() { ALL_PARTS } else { 1 };
    if !bias {
        args.insert(1 + matrices, args[0]); // never read
    }
    let choices = grouped.choices;
    args.extend([choices, grouped.fan, grouped.experts, n, k, u32::from(bias)].map(KernelArg::U32));
    args.extend(quantised.iter().flat_map(|q| [q.group_rows, q.group_columns]).map(KernelArg::U32));
    let format = quantised.as_ref().map(CodeMacros::of);
    let weight = weight.bias();
    let mut dtypes: Vec<(&'static str, &dyn Macro)> = vec![("X", &x), ("WEIGHT", &weight), ("OUT", &out)];
    dtypes.extend(format.iter().flat_map(CodeMacros::list));
    let source = if quantised.is_some() { KernelSource::GroupedCodes } else { KernelSource::Grouped };
    if grouped.own() <= FEW_ROWS_MAX.saturating_mul(grouped.touched) {
        // while experts have a row each, a block has one too
        let rows = if grouped.own() <= 2 * grouped.touched { 1 } else { ROWS };
        let vec = if format.is_some() {
            vector(k.into(), &operands[..1])
        } else {
            vector(k.into(), &operands[..2])
        };
        let macros = [&dtypes[..], &[("VEC", &vec), ("GROUP", &FEW_THREADS), ("ROWS", &rows)]].concat();
        let grid = [n.into(), choices.div_ceil(rows).into(), 1];
        let program = KernelProgram::new(source, &macros);
        return launch(program, "grouped_few", grid, FEW_THREADS, args);
    }
    let macros = [&dtypes[..], &[("VEC", &1u32), ("GROUP", &FEW_THREADS), ("ROWS", &ROWS)]].concat();
    let tiles = u64::from(choices / TILE) + u64::from(grouped.experts.min(choices));
    let grid = [n.div_ceil(TILE).into(), tiles, 1];
    launch(KernelProgram::new(source, &macros), "grouped_many", grid, TILE_THREADS, args)
}
