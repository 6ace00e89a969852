//! Products and lookups with quantised weights: one kernel for all formats, in f32 and without tensor cores.

use super::{KernelArg, PlanStep, THREADS, launch, launch_each};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{CodeKind, DType, Error, OpSig, Quantised, Result, ZeroKind};

/// Threads of a block, which share k.
const GEMV_THREADS: u32 = 128;
/// Rows per block.
const GEMV_ROWS: u32 = 4;

/// Arrays of weights in a kernel's arguments.
pub(super) const ALL_PARTS: usize = 6;

/// Plans a product or a lookup.
pub(super) fn plan(sig: &OpSig, mut args: Vec<KernelArg>) -> Result<PlanStep> {
    match *sig {
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
            all_parts(&weight, k, &mut args);
            if !bias {
                args.insert(7, args[0]); // never read
            }
            args.extend([m, n, k, u32::from(bias), u32::from(accumulate)].map(KernelArg::U32));
            args.extend([weight.group_rows, weight.group_columns].map(KernelArg::U32));
            let grid = [n.into(), m.div_ceil(GEMV_ROWS).into(), 1];
            let program = program(&weight, x, out, GEMV_THREADS);
            launch(program, "quantised_gemm", grid, GEMV_THREADS, args)
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            all_parts(&table, hidden, &mut args);
            let count = u64::from(tokens) * u64::from(hidden);
            args.extend([KernelArg::U32(vocab), KernelArg::U32(hidden), KernelArg::U64(count)]);
            args.extend([table.group_rows, table.group_columns].map(KernelArg::U32));
            launch_each(program(&table, DType::F32, out, THREADS), "quantised_embed", count, args)
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
