//! Products and lookups with quantised weights.
//!
//! | kernel | when |
//! |---|---|
//! | `widen` and cuBLASLt by slabs | more than 32 rows of such codes, if cuBLASLt takes the output |
//! | `quantised_few_rows`, tensor cores | codes u4, i8, e2m1, e4m3; groups of 32, 64 or 128 j columns |
//! | `quantised_gemm` | any format; f32 arithmetic without tensor cores, so slow |

use super::few_rows::FEW_ROWS_MAX;
use super::{
    DeviceRange, KernelArg, Matmul, PlanStep, PlanTarget, THREADS, VEC_BYTES, WORKSPACE_BYTES, gemm, launch,
    launch_each,
};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::{CodeKind, DType, Error, OpSig, Quantised, Result, ZeroKind};

/// Threads of a block, which share k.
const GEMV_THREADS: u32 = 128;
/// Rows per block.
const GEMV_ROWS: u32 = 4;

/// Columns of a step of `quantised_few_rows`, which must not straddle groups, and of a chunk.
const STEP_COLUMNS: u32 = 32;
const CHUNK_COLUMNS: u32 = 128;
/// What the kernel takes for a group of whole rows.
const WHOLE_ROWS: u32 = 1 << 20;
/// Warps of its blocks, which share k.
const WARPS: u32 = 4;
/// Shared memory for its copies in flight: two blocks or more fit a multiprocessor of any part.
const RING_BYTES: u32 = 48 << 10;

/// Rows up to which `quantised_few_rows` has fewer instructions, 16 rows at a time, than `widen`.
const FEW_LAUNCHES_ROWS_MAX: u32 = 2 * FEW_ROWS_MAX;
/// Bytes of floats that are made of codes at a time, which a second cache holds.
const SLAB_BYTES: u64 = 16 << 20;
/// Rows of weights in a slab come in multiples of this, which keeps alignments, up to a maximum.
const SLAB_ROWS: u32 = 128;
const SLAB_ROWS_MAX: u32 = 1 << 15;
const WIDEN_THREADS: u32 = 128;

/// Arrays of weights in a kernel's arguments.
pub(super) const ALL_PARTS: usize = 6;

/// How `quantised_few_rows` is compiled for a format.
struct CodeRows {
    /// Parts that `x` is cut into.
    split: u32,
    /// Columns below a scale.
    columns: u32,
    /// Bytes of a warp's codes in a stage, for each tile of 16 rows of weights.
    tile_bytes: u32,
}

impl CodeRows {
    /// None if it takes no such product.
    fn of(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Option<CodeRows> {
        let OpSig::QuantisedGemm { k, x, weight, .. } = *sig else { return None };
        let split = match x {
            DType::Bf16 | DType::F16 => 1,
            DType::F32 => 3,
            _ => return None,
        };
        // 5 and 6 bits are in two planes
        let codes = weight.code.high_bits() == 0 && !weight.outer;
        let columns = if weight.group_columns >= k { WHOLE_ROWS } else { weight.group_columns };
        let groups = match columns {
            STEP_COLUMNS => true,
            64 => weight.supers() == 0,
            _ => weight.supers() == 0 && columns.is_multiple_of(CHUNK_COLUMNS),
        };
        let whole = (1..=WHOLE_ROWS).contains(&k) && k.is_multiple_of(STEP_COLUMNS);
        let fits = target.capability >= 80 && codes && groups && whole && gemm::aligned(operands);
        let tile_bytes = 16 * CHUNK_COLUMNS * weight.code.bits() / 8;
        fits.then_some(CodeRows { split, columns, tile_bytes })
    }

    /// Rows of `x` in a launch.
    fn rows_max(&self) -> u32 {
        if self.split == 1 { FEW_ROWS_MAX } else { 8 }
    }

    /// Tiles of 16 rows of weights in a block, and stages of its ring.
    fn shape(&self, m: u32, n: u32, target: &PlanTarget) -> (u32, u32, u32) {
        let element = if self.split == 3 { 4 } else { 2 };
        let stage =
            |tiles: u32| WARPS * (tiles * self.tile_bytes + 8 * m.div_ceil(8) * CHUNK_COLUMNS * element);
        // blocks with two tiles read `x` half as often, if there are enough of them
        let enough = n.div_ceil(32) >= 2 * target.multiprocessors && 2 * stage(2) <= RING_BYTES;
        let tiles = if enough { 2 } else { 1 };
        let stages = (RING_BYTES / stage(tiles)).min(4);
        (tiles, stages, stages * stage(tiles))
    }
}

/// Plans of products; `args` has all arrays of the weights, and a place for the bias.
impl CodeRows {
    fn few_rows(
        &self,
        sig: &OpSig,
        operands: &[DeviceRange],
        args: Vec<KernelArg>,
        target: &PlanTarget,
    ) -> Result<Vec<PlanStep>> {
        let OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } = *sig else {
            unreachable!("as `of` says")
        };
        let format = CodeMacros::of(&weight);
        let launches = (0..m).step_by(to_usize(self.rows_max())).map(|row| {
            let rows = self.rows_max().min(m - row);
            let (row_tiles, stages, shared_bytes) = self.shape(rows, n, target);
            let tiles = rows.div_ceil(8);
            let mut args = args.clone();
            args[0] = args[0].further(u64::from(row) * u64::from(k) * x.size_bytes());
            args[8] = args[8].further(u64::from(row) * u64::from(n) * out.size_bytes());
            args.extend([rows, n, k, u32::from(bias), u32::from(accumulate)].map(KernelArg::U32));
            args.extend([KernelArg::U32(weight.group_rows), KernelArg::Settled(operands[1])]);
            let shape: [(&'static str, &dyn Macro); 8] = [
                ("X", &x),
                ("OUT", &out),
                ("WEIGHT", &DType::F32),
                ("SPLIT", &self.split),
                ("COLUMNS", &self.columns),
                ("ROW_TILES", &row_tiles),
                ("TILES", &tiles),
                ("STAGES", &stages),
            ];
            let macros = [&shape[..], &[("WARPS", &WARPS)], &format.list()].concat();
            let program = KernelProgram::new(KernelSource::FewRowsCodes, &macros);
            let grid = [u64::from(n.div_ceil(16 * row_tiles)), 1, 1];
            let mut step = launch(program, "quantised_few_rows", grid, 32 * WARPS, args)?;
            if let PlanStep::Launch(launch) = &mut step {
                launch.shared_bytes = shared_bytes;
            }
            Ok(step)
        });
        launches.collect()
    }

    /// Rows of weights that are made floats at a time for cuBLASLt, if it is to multiply them.
    fn slab_rows(&self, sig: &OpSig, target: &PlanTarget) -> Option<u32> {
        let OpSig::QuantisedGemm { m, n, k, x, out, bias, accumulate, .. } = *sig else { return None };
        let dtypes = out == x || out == DType::F32;
        // its bias has the output's dtype, and it rounds a product before it adds the previous content
        let exact = out == DType::F32 || !(bias || accumulate);
        let vectors = (u64::from(n) * out.size_bytes()).is_multiple_of(VEC_BYTES);
        let room = target.scratch.bytes.saturating_sub(WORKSPACE_BYTES).min(SLAB_BYTES);
        let fit = to_u32(room / (u64::from(k) * x.size_bytes())).min(SLAB_ROWS_MAX);
        let rows = fit / SLAB_ROWS * SLAB_ROWS;
        let takes = target.blas && m > FEW_LAUNCHES_ROWS_MAX && dtypes && exact && vectors && rows > 0;
        takes.then_some(rows)
    }

    fn by_slabs(
        &self,
        sig: &OpSig,
        operands: &[DeviceRange],
        args: Vec<KernelArg>,
        slab_rows: u32,
        target: &PlanTarget,
    ) -> Result<Vec<PlanStep>> {
        let OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } = *sig else {
            unreachable!("as `of` says")
        };
        let (format, slab) = (CodeMacros::of(&weight), target.scratch.address + WORKSPACE_BYTES);
        let macros: [(&'static str, &dyn Macro); 3] =
            [("X", &x), ("COLUMNS", &self.columns), ("GROUP", &WIDEN_THREADS)];
        let program = KernelProgram::new(KernelSource::Widen, &[&macros[..], &format.list()].concat());
        let last = operands.len() - 1;
        let mut steps = Vec::new();
        for first in (0..n).step_by(to_usize(slab_rows)) {
            let rows = slab_rows.min(n - first);
            let mut own = args[1..=ALL_PARTS].to_vec();
            own.push(KernelArg::Address(slab));
            own.extend([first, k, weight.group_rows].map(KernelArg::U32));
            let grid = [u64::from(k.div_ceil(8 * WIDEN_THREADS)), rows.into(), 1];
            steps.push(launch(program, "widen", grid, WIDEN_THREADS, own)?);
            steps.push(PlanStep::Matmul(Matmul {
                shape: (m, rows, k),
                dtype: x,
                out_dtype: out,
                x: operands[0].address,
                weight: slab,
                bias: bias.then(|| operands[last - 1].address + u64::from(first) * DType::F32.size_bytes()),
                out: operands[last].address + u64::from(first) * out.size_bytes(),
                out_columns: n,
                accumulate,
            }));
        }
        Ok(steps)
    }
}

/// Whether products of this kind run on tensor cores.
pub(super) fn is_fast(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> bool {
    CodeRows::of(sig, operands, target).is_some()
}

/// Plans a product or a lookup.
pub(super) fn plan(
    sig: &OpSig,
    operands: &[DeviceRange],
    mut args: Vec<KernelArg>,
    target: &PlanTarget,
) -> Result<Vec<PlanStep>> {
    match *sig {
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
            all_parts(&weight, k, &mut args);
            if !bias {
                args.insert(7, args[0]); // never read
            }
            if let Some(kernel) = CodeRows::of(sig, operands, target) {
                return match kernel.slab_rows(sig, target) {
                    Some(rows) => kernel.by_slabs(sig, operands, args, rows, target),
                    None => kernel.few_rows(sig, operands, args, target),
                };
            }
            let last = [n, k, u32::from(bias), u32::from(accumulate)].map(KernelArg::U32);
            args.push(KernelArg::U32(m));
            args.extend(last);
            args.extend([weight.group_rows, weight.group_columns].map(KernelArg::U32));
            let grid = [n.into(), m.div_ceil(GEMV_ROWS).into(), 1];
            let program = program(&weight, x, out, GEMV_THREADS);
            Ok(vec![launch(program, "quantised_gemm", grid, GEMV_THREADS, args)?])
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            all_parts(&table, hidden, &mut args);
            let count = u64::from(tokens) * u64::from(hidden);
            args.extend([KernelArg::U32(vocab), KernelArg::U32(hidden), KernelArg::U64(count)]);
            args.extend([table.group_rows, table.group_columns].map(KernelArg::U32));
            let program = program(&table, DType::F32, out, THREADS);
            Ok(vec![launch_each(program, "quantised_embed", count, args)?])
        }
        _ => Err(Error::unsupported(format!("cuda: {} has no quantised weights", sig.name()))),
    }
}

/// The operands of quantised weights as the kernels take them: of each kind one, repeated where the format
/// has none.
pub(super) fn all_parts(quantised: &Quantised, columns: u32, args: &mut Vec<KernelArg>) {
    let there: Vec<&str> = quantised.parts(1, 1, columns).iter().map(|part| part.name).collect();
    let mut given = args.splice(1..=there.len(), []).collect::<Vec<_>>().into_iter();
    let first = args[0];
    let names: [&str; ALL_PARTS] = ["codes", "high", "scales", "zeros", "supers", "outer"];
    let all = names.map(|name| there.contains(&name).then(|| given.next()).flatten().unwrap_or(first));
    args.splice(1..1, all);
}

/// What a kernel knows of a format.
pub(super) struct CodeMacros {
    code: u32,
    scale: DType,
    zero: u32,
    supers: u32,
    outer: u32,
}

impl CodeMacros {
    pub(super) fn of(quantised: &Quantised) -> Self {
        CodeMacros {
            code: CodeKind::ALL.iter().position(|code| *code == quantised.code).map_or(0, to_u32),
            scale: quantised.scale.dtype().unwrap_or(DType::U32),
            zero: match quantised.zero {
                ZeroKind::Middle => 0,
                ZeroKind::Points => 1,
                ZeroKind::Minima => 2,
            },
            supers: quantised.supers(),
            outer: u32::from(quantised.outer),
        }
    }

    pub(super) fn list(&self) -> [(&'static str, &dyn Macro); 5] {
        [
            ("CODE", &self.code),
            ("SCALE", &self.scale),
            ("ZERO", &self.zero),
            ("SUPERS", &self.supers),
            ("OUTER", &self.outer),
        ]
    }
}

fn program(quantised: &Quantised, x: DType, out: DType, threads: u32) -> KernelProgram {
    let format = CodeMacros::of(quantised);
    let others: [(&'static str, &dyn Macro); 4] =
        [("X", &x), ("OUT", &out), ("WEIGHT", &DType::F32), ("GROUP", &threads)];
    KernelProgram::new(KernelSource::Quantised, &[&others[..], &format.list()].concat())
}

#[cfg(test)]
mod tests {
    use super::super::tests::HOPPER;
    use super::*;
    use mixfleet_hal::ScaleKind;

    const TARGET: PlanTarget =
        PlanTarget { scratch: DeviceRange { address: 1 << 40, bytes: 64 << 20 }, ..HOPPER };

    fn product(m: u32, weight: Quantised, dtypes: [DType; 2]) -> OpSig {
        let [x, out] = dtypes;
        OpSig::QuantisedGemm { m, n: 5000, k: 4096, x, weight, out, bias: true, accumulate: true }
    }

    fn places(sig: &OpSig) -> Vec<DeviceRange> {
        (1..=sig.operands().len() as u64).map(|i| DeviceRange { address: i << 32, bytes: 1 << 30 }).collect()
    }

    fn steps(sig: &OpSig, target: &PlanTarget) -> Vec<PlanStep> {
        super::super::plan(sig, &places(sig), target).unwrap()
    }

    #[test]
    fn slabs_are_all_rows_of_the_weights_once() {
        let q4_0 = Quantised::in_rows(CodeKind::U4, 32, ScaleKind::F16, ZeroKind::Middle);
        let sig = product(33, q4_0, [DType::Bf16, DType::F32]);
        let steps = steps(&sig, &TARGET);
        let places = places(&sig);
        let (bias, out) = (places[3].address, places[4].address);
        let mut next = 0;
        for pair in steps.chunks(2) {
            let [PlanStep::Launch(widen), PlanStep::Matmul(product)] = pair else { panic!("{pair:?}") };
            let (_, rows, _) = product.shape;
            assert_eq!((widen.kernel, widen.grid), ("widen", [4, rows, 1]));
            assert_eq!(widen.args[ALL_PARTS + 1], KernelArg::U32(next));
            assert_eq!(widen.args[ALL_PARTS], KernelArg::Address(product.weight));
            assert!(u64::from(rows) * 8192 <= SLAB_BYTES && product.weight >= TARGET.scratch.address);
            let at = u64::from(next) * 4;
            assert_eq!((product.out, product.bias, product.out_columns), (out + at, Some(bias + at), 5000));
            next += rows;
        }
        assert_eq!((next, steps.len()), (5000, 6));
    }

    #[test]
    fn each_format_has_its_kernel() {
        use CodeKind::{E2m1, E4m3, I8, U4, U6};
        let kernel = |m, weight, dtypes, target: &PlanTarget| {
            let steps = steps(&product(m, weight, dtypes), target);
            let PlanStep::Launch(launch) = &steps[0] else { panic!("{steps:?}") };
            (launch.kernel, steps.len())
        };
        let rows = |code, columns, scale| Quantised::in_rows(code, columns, scale, ZeroKind::Middle);
        let (to_f32, f32s) = ([DType::Bf16, DType::F32], [DType::F32, DType::F32]);
        for weight in [
            rows(U4, 32, ScaleKind::F16),
            rows(U4, 128, ScaleKind::Bf16),
            rows(I8, 32, ScaleKind::I8),
            rows(E4m3, 4096, ScaleKind::F32),
            rows(E2m1, 32, ScaleKind::Bf16),
        ] {
            assert_eq!(kernel(16, weight, to_f32, &TARGET), ("quantised_few_rows", 1));
            assert_eq!(kernel(17, weight, to_f32, &TARGET), ("quantised_few_rows", 2));
            assert_eq!(kernel(16, weight, f32s, &TARGET), ("quantised_few_rows", 2));
            assert_eq!(kernel(64, weight, to_f32, &TARGET).0, "widen");
            // what cuBLASLt would round before it adds
            assert_eq!(kernel(64, weight, [DType::Bf16, DType::Bf16], &TARGET).0, "quantised_few_rows");
            let without = PlanTarget { blas: false, ..TARGET };
            assert_eq!(kernel(64, weight, to_f32, &without), ("quantised_few_rows", 4));
        }
        for weight in [Quantised::NVFP4, rows(U6, 16, ScaleKind::I8), rows(U4, 16, ScaleKind::I8)] {
            assert_eq!(kernel(1, weight, to_f32, &TARGET), ("quantised_gemm", 1));
        }
    }
}
