//! Launches of `gemm_few_rows`, alone and of several products of one `x`.

use super::{DeviceRange, KernelArg, PlanStep, PlanTarget, PlannedOp, apart, gemm, launch};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::{DType, OpSig, Result};

/// Rows above which the weights' traffic no longer dominates and cuBLASLt's tiles win.
pub(super) const FEW_ROWS_MAX: u32 = 16;
const WARPS: u32 = 8;
/// Shared memory of a block for copies in flight: two blocks fit a multiprocessor of Hopper, and one block
/// fits those with 99 KiB for a block.
const RING_BYTES: u32 = 96 << 10;
/// Pairs of steps along k that it holds.
const STAGES: std::ops::RangeInclusive<u32> = 2..=4;
/// Maximum number of products of a launch.
const PRODUCTS_MAX: usize = 3;

/// A kernel of few rows, and the file that holds it.
#[derive(Clone, Copy)]
pub(super) struct FewRowsKernel {
    source: KernelSource,
    name: &'static str,
}

pub(super) const ALONE: FewRowsKernel =
    FewRowsKernel { source: KernelSource::FewRows, name: "gemm_few_rows" };
const OF_ONE_X: FewRowsKernel =
    FewRowsKernel { source: KernelSource::FewRowsOfOneX, name: "gemm_few_rows_of_one_x" };
const GATED: FewRowsKernel =
    FewRowsKernel { source: KernelSource::FewRowsGated, name: "gemm_few_rows_gated" };

/// How a block of `gemm_few_rows` is compiled.
pub(super) struct FewRows {
    /// Tiles of 16 weight rows.
    row_tiles: u32,
    /// Tiles of 8 rows of `x`.
    tiles: u32,
    split: u32,
    stages: u32,
    shared_bytes: u32,
}

impl FewRows {
    /// For `m` rows of `x` in `split` parts, and `n` rows of weights.
    pub(super) fn new(m: u32, n: u64, split: u32, target: &PlanTarget) -> FewRows {
        // blocks with two tiles read `x` half as often, if there are enough tiles
        let enough = n.div_ceil(32) >= 3 * u64::from(target.multiprocessors);
        let large = FewRows::with_row_tiles(m, 2, split).filter(|_| enough);
        large.or_else(|| FewRows::with_row_tiles(m, 1, split)).expect("one tile fits")
    }

    /// None if the copies that must be in flight exceed their shared memory.
    fn with_row_tiles(m: u32, row_tiles: u32, split: u32) -> Option<FewRows> {
        let tiles = m.div_ceil(8);
        let slot = 2 * row_tiles + tiles * if split == 3 { 2 } else { 1 };
        let stage_bytes = 2 * slot * 16 * 32 * WARPS;
        let stages = (RING_BYTES / stage_bytes).min(*STAGES.end());
        let fits = stages >= *STAGES.start();
        fits.then_some(FewRows { row_tiles, tiles, split, stages, shared_bytes: stages * stage_bytes })
    }

    /// Blocks for `n` rows of weights.
    pub(super) fn blocks(&self, n: u32) -> u64 {
        u64::from(n.div_ceil(16 * self.row_tiles))
    }

    pub(super) fn launch(
        &self,
        kernel: FewRowsKernel,
        dtypes: &[(&'static str, &dyn Macro)],
        blocks: u64,
        args: Vec<KernelArg>,
    ) -> Result<PlanStep> {
        let shape: [(&'static str, &dyn Macro); 5] = [
            ("ROW_TILES", &self.row_tiles),
            ("TILES", &self.tiles),
            ("SPLIT", &self.split),
            ("WARPS", &WARPS),
            ("STAGES", &self.stages),
        ];
        let program = KernelProgram::new(kernel.source, &[dtypes, &shape].concat());
        let mut step = launch(program, kernel.name, [blocks, 1, 1], 32 * WARPS, args)?;
        if let PlanStep::Launch(launch) = &mut step {
            launch.shared_bytes = self.shared_bytes;
        }
        Ok(step)
    }
}

/// A product of few rows.
struct Product<'a> {
    shape: (u32, u32, u32),
    dtypes: (DType, DType, DType),
    has_bias: bool,
    accumulate: bool,
    split: u32,
    places: &'a [DeviceRange],
}

impl Product<'_> {
    fn of<'a>(op: &'a PlannedOp, target: &PlanTarget) -> Option<Product<'a>> {
        let (sig, places) = op;
        let OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } = *sig else { return None };
        let split = gemm::few_rows_split_of(sig, places, target)?;
        let whole = m > 0 && n > 0;
        let (shape, dtypes) = ((m, n, k), (x, weight, out));
        whole.then_some(Product { shape, dtypes, has_bias: bias, accumulate, split, places })
    }

    fn out(&self) -> &DeviceRange {
        &self.places[self.places.len() - 1]
    }

    fn inputs(&self) -> &[DeviceRange] {
        &self.places[..self.places.len() - 1]
    }

    /// Whether both multiply the same rows by weights of one kind.
    fn is_like(&self, other: &Product<'_>) -> bool {
        let ((m, _, k), (other_m, _, other_k)) = (self.shape, other.shape);
        let same_x = self.places[0] == other.places[0];
        same_x && (m, k, self.dtypes) == (other_m, other_k, other.dtypes)
    }
}

/// Plans the products of one `x` at the front of `ops` as one launch, with the gating of the two if that is
/// next.
pub(super) fn together(ops: &[PlannedOp], target: &PlanTarget) -> Result<Option<(usize, PlanStep)>> {
    let mut products: Vec<Product<'_>> = Vec::new();
    for op in ops.iter().take(PRODUCTS_MAX) {
        let Some(next) = Product::of(op, target) else { break };
        // one that reads or writes what an earlier one writes has to wait for it
        let fits = products.iter().all(|one| {
            let touched = next.places.iter().all(|place| apart(place, one.out()));
            next.is_like(one) && touched && one.inputs().iter().all(|input| apart(input, next.out()))
        });
        if !fits {
            break;
        }
        products.push(next);
    }
    if let ([gate, up], Some(op)) = (&products[..], ops.get(2))
        && let Some(step) = gated(gate, up, op)?
    {
        return Ok(Some((3, step)));
    }
    if products.len() < 2 {
        return Ok(None);
    }
    let count = products.len();
    let (m, _, k) = products[0].shape;
    let rows = products.iter().map(|one| u64::from(one.shape.1)).sum();
    let kernel = FewRows::new(m, rows, products[0].split, target);
    let blocks = products.iter().map(|one| kernel.blocks(one.shape.1)).sum();
    let mut args =
        vec![KernelArg::Address(products[0].places[0].address), KernelArg::U32(m), KernelArg::U32(k)];
    for number in 0..PRODUCTS_MAX {
        let one = &products[number.min(count - 1)];
        // without a bias the place is not read; a product that is not there has no rows
        let bias = if one.has_bias { 2 } else { 1 };
        args.extend([1, bias, one.places.len() - 1].map(|i| KernelArg::Address(one.places[i].address)));
        let n = if number < count { one.shape.1 } else { 0 };
        args.extend([n, u32::from(one.has_bias) + 2 * u32::from(one.accumulate)].map(KernelArg::U32));
        args.push(KernelArg::Settled(one.places[1]));
    }
    let (x, weight, out) = products[0].dtypes;
    let dtypes: [(&'static str, &dyn Macro); 3] = [("X", &x), ("WEIGHT", &weight), ("OUT", &out)];
    Ok(Some((count, kernel.launch(OF_ONE_X, &dtypes, blocks, args)?)))
}

/// Plans gate and up products with their `silu_mul`, if `op` is that.
fn gated(gate: &Product<'_>, up: &Product<'_>, op: &PlannedOp) -> Result<Option<PlanStep>> {
    let (OpSig::SiluMul { elements, x: gated }, places) = op else { return Ok(None) };
    let ((m, n, k), (x, weight, out)) = (gate.shape, gate.dtypes);
    let plain = [gate, up].iter().all(|one| !one.has_bias && !one.accumulate && one.shape == gate.shape);
    let of_both = places[0] == *gate.out() && places[1] == *up.out() && (x, x) == (out, *gated);
    let mut others = [gate, up].into_iter().flat_map(|one| one.places);
    let fits = plain && of_both && *elements == u64::from(m) * u64::from(n);
    if !fits || !others.all(|place| apart(place, &places[2])) {
        return Ok(None);
    }
    let Some(kernel) = FewRows::with_row_tiles(m, 2, gate.split) else { return Ok(None) };
    let addresses = [&gate.places[0], &gate.places[1], &up.places[1], gate.out(), up.out(), &places[2]];
    let mut args: Vec<KernelArg> = addresses.map(|place| KernelArg::Address(place.address)).to_vec();
    args.extend([m, n, k].map(KernelArg::U32));
    args.extend([gate, up].map(|one| KernelArg::Settled(one.places[1])));
    let dtypes: [(&'static str, &dyn Macro); 3] = [("X", &x), ("WEIGHT", &weight), ("OUT", &out)];
    // a block has one row tile of each
    kernel.launch(GATED, &dtypes, u64::from(n.div_ceil(16)), args).map(Some)
}
