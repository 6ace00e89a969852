//! A batch of commands as steps that all workers walk together.
//!
//! A step waits at a barrier only if it conflicts with something since the last barrier that may have run on
//! another worker. Small operations run on the first worker alone, one after the other, so a chain of them
//! needs no barrier at all.

use crate::isa::Isa;
use crate::kernels::gemm::PackedForm;
use crate::kernels::{self, KernelPhase, OperandSpan};
use crate::memory::{CpuBuffer, buffer_of};
use mixfleet_hal::{Buffer, Cmd, DType, Error, KvShape, MatrixKind, OpSig, OperandAccess, Result, Slice};
use std::sync::Arc;

/// Maximum number of operands of any operation.
const OPERANDS_MAX: usize = 11;

/// Bytes below which waking the other workers does not pay: about 2 us on one core.
const SOLO_BYTES: f64 = 48e3;

/// Arithmetic below which waking the other workers does not pay.
const SOLO_FLOPS: f64 = 100e3;

/// One operation, or one phase of it.
#[derive(Debug)]
pub(crate) struct ProgramStep {
    pub(crate) sig: OpSig,
    pub(crate) args: [OperandSpan; OPERANDS_MAX],
    pub(crate) phase: KernelPhase,
    /// Whether all workers meet before this step.
    pub(crate) barrier: bool,
    /// Whether only the first worker runs it.
    pub(crate) solo: bool,
}

/// A batch, ready to run any number of times.
#[derive(Debug)]
pub(crate) struct CpuProgram {
    pub(crate) steps: Vec<ProgramStep>,
    /// Buffers to lock, ordered by address, and whether each is written.
    buffers: Vec<(Arc<dyn Buffer>, bool)>,
    /// Words of scratch shared by the workers.
    pub(crate) shared_words: usize,
}

/// A memory access of a step since the last barrier.
#[derive(Clone, Copy)]
struct Touch {
    what: TouchedPlace,
    write: bool,
    solo: bool,
}

#[derive(Clone, Copy)]
enum TouchedPlace {
    Memory(OperandSpan),
    /// The workers' shared scratch.
    Shared,
}

impl Touch {
    fn conflicts(&self, other: &Touch) -> bool {
        let same = match (self.what, other.what) {
            (TouchedPlace::Memory(a), TouchedPlace::Memory(b)) => a.overlaps(b),
            (TouchedPlace::Shared, TouchedPlace::Shared) => true,
            _ => false,
        };
        same && (self.write || other.write) && !(self.solo && other.solo)
    }
}

/// The `x` that is packed in shared scratch, and its form.
type PackedOperand = (usize, usize, DType, PackedForm);

/// Collects steps and determines where barriers are needed.
struct CpuProgramBuilder {
    isa: Isa,
    workers: usize,
    steps: Vec<ProgramStep>,
    touched: Vec<Touch>,
    packed: Option<(OperandSpan, PackedOperand)>,
    shared_words: usize,
}

impl CpuProgram {
    /// Checks and prepares `cmds` for a device of `workers` workers.
    ///
    /// # Errors
    /// `Invalid` for another backend's buffer, a written import, or a zero dimension where none is allowed.
    pub(crate) fn new(cmds: &[Cmd], isa: Isa, workers: usize) -> Result<Self> {
        let (steps, touched) = (Vec::with_capacity(cmds.len()), Vec::new());
        let mut builder = CpuProgramBuilder { isa, workers, steps, touched, packed: None, shared_words: 0 };
        let mut buffers: Vec<(Arc<dyn Buffer>, bool)> = Vec::new();
        for cmd in cmds {
            check_sig(cmd.sig())?;
            let mut args = [OperandSpan::EMPTY; OPERANDS_MAX];
            let mut access = [OperandAccess::Read; OPERANDS_MAX];
            for (i, (operand, slice)) in cmd.sig().operands().iter().zip(cmd.args()).enumerate() {
                let write = operand.access != OperandAccess::Read;
                args[i] = resolve(slice, write)
                    .map_err(|e| e.context(format!("{} '{}'", cmd.sig().name(), operand.name)))?;
                access[i] = operand.access;
                note(&mut buffers, slice, write);
            }
            builder.command(cmd.sig(), &args, &access[..cmd.args().len()]);
        }
        buffers.sort_by_key(|(buffer, _)| Arc::as_ptr(buffer).cast::<u8>() as usize);
        Ok(CpuProgram { steps: builder.steps, buffers, shared_words: builder.shared_words })
    }

    /// Returns the buffers to lock, in an order common to all programs, and whether each is written.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = (&CpuBuffer, bool)> {
        self.buffers.iter().filter_map(|(buffer, write)| Some((buffer.as_any().downcast_ref()?, *write)))
    }
}

/// Resolves the memory of an operand.
fn resolve(slice: &Slice, write: bool) -> Result<OperandSpan> {
    let buffer = buffer_of(slice)?;
    if write && buffer.is_read_only() {
        return Err(Error::invalid("imported host memory is read-only; write to a buffer of `alloc`"));
    }
    Ok(buffer.span(slice))
}

fn note(buffers: &mut Vec<(Arc<dyn Buffer>, bool)>, slice: &Slice, write: bool) {
    let known =
        buffers.iter_mut().find(|(b, _)| std::ptr::addr_eq(Arc::as_ptr(b), Arc::as_ptr(&slice.buffer)));
    match known {
        Some((_, written)) => *written |= write,
        None => buffers.push((slice.buffer.clone(), write)),
    }
}

/// Rejects what `OpSig::check` allows but no kernel can run.
///
/// # Errors
/// `Unsupported` for integers in place of floats, `Invalid` for a zero dimension where none is allowed.
pub(crate) fn check_sig(sig: &OpSig) -> Result<()> {
    sig.check().map_err(Error::invalid)?;
    let counted = matches!(sig, OpSig::Sample { .. } | OpSig::Copy { .. } | OpSig::Fill { .. });
    let is_index = |name| {
        let steps = matches!(name, "ids" | "slots" | "query_start" | "context" | "pages" | "range");
        steps || matches!(name, "chosen" | "order" | "starts")
    };
    if let OpSig::GroupedGemm { n, weight: MatrixKind::Quantised(kind), .. } = *sig
        && !kind.group_rows.is_power_of_two()
        && kind.group_rows < n
    {
        let message = format!("grouped_gemm: groups of {} rows; supported: powers of two", kind.group_rows);
        return Err(Error::unsupported(message));
    }
    for operand in sig.operands() {
        let stored = DType::FLOATS.contains(&operand.dtype) || sig.has_scales(&operand);
        let packed = matches!(operand.name, "codes" | "high" | "scales" | "zeros");
        if !packed && !counted && !is_index(operand.name) && !stored {
            let message = format!("{}: operand '{}' cannot be {}", sig.name(), operand.name, operand.dtype);
            return Err(Error::unsupported(message));
        }
    }
    let Some(KvShape { kv_heads, head_dim, page_tokens, .. }) = sig.kv() else { return Ok(()) };
    if page_tokens == 0 || kv_heads == 0 || head_dim == 0 {
        let message = format!(
            "{}: page_tokens {page_tokens}, kv_heads {kv_heads} and head_dim {head_dim} must not be zero",
            sig.name()
        );
        return Err(Error::invalid(message));
    }
    Ok(())
}

impl CpuProgramBuilder {
    fn command(&mut self, sig: &OpSig, args: &[OperandSpan; OPERANDS_MAX], access: &[OperandAccess]) {
        let (phases, words) = kernels::phases(sig, &args[..access.len()], self.isa, self.workers);
        self.shared_words = self.shared_words.max(words);
        let whole = phases == [KernelPhase::Whole];
        // sorting needs a barrier, at every size
        let is_route = matches!(sig, OpSig::Route { .. });
        let is_grouped = matches!(sig, OpSig::GroupedGemm { .. });
        let solo = self.workers == 1
            || (whole && is_route)
            || (whole && sig.bytes() < SOLO_BYTES && sig.flops() < SOLO_FLOPS);
        for &phase in phases {
            if phase == KernelPhase::PackX && self.is_packed(sig, args[0]) {
                continue;
            }
            let mut touches: Vec<Touch> = Vec::with_capacity(access.len() + 1);
            for (i, kind) in access.iter().enumerate() {
                if touches_operand(phase, i, access.len(), *kind, is_grouped) {
                    touches.push(Touch {
                        what: TouchedPlace::Memory(args[i]),
                        write: *kind != OperandAccess::Read,
                        solo,
                    });
                }
            }
            if !matches!(phase, KernelPhase::Whole | KernelPhase::Choose | KernelPhase::Sort) {
                let write = matches!(phase, KernelPhase::PackX | KernelPhase::Chunks);
                touches.push(Touch { what: TouchedPlace::Shared, write, solo });
                if write {
                    self.packed = packed_form(sig, self.isa)
                        .filter(|_| phase == KernelPhase::PackX)
                        .map(|p| (args[0], p));
                }
            }
            self.push(ProgramStep { sig: *sig, args: *args, phase, barrier: false, solo }, &touches);
        }
    }

    fn push(&mut self, mut step: ProgramStep, touches: &[Touch]) {
        step.barrier = touches.iter().any(|t| self.touched.iter().any(|u| u.conflicts(t)));
        if step.barrier {
            self.touched.clear();
        }
        self.touched.extend(touches);
        // packed data is stale once its source is written
        let stale = self.packed.is_some_and(|(x, _)| {
            touches
                .iter()
                .any(|t| t.write && matches!(t.what, TouchedPlace::Memory(span) if span.overlaps(x)))
        });
        if stale {
            self.packed = None;
        }
        self.steps.push(step);
    }

    /// Whether shared scratch already holds this Gemm's `x`; q, k and v share one packing.
    fn is_packed(&self, sig: &OpSig, x: OperandSpan) -> bool {
        self.packed.is_some_and(|(span, form)| {
            span.start == x.start && span.bytes == x.bytes && packed_form(sig, self.isa) == Some(form)
        })
    }
}

/// Whether a phase accesses operand `index`.
fn touches_operand(
    phase: KernelPhase,
    index: usize,
    count: usize,
    access: OperandAccess,
    is_grouped: bool,
) -> bool {
    match phase {
        KernelPhase::Whole => true,
        KernelPhase::Choose => index + 2 < count,
        KernelPhase::Sort => index + 2 >= count || index + 4 == count,
        // the choices of experts say which rows; experts of few rows read `x` as it is
        KernelPhase::PackX if is_grouped => access == OperandAccess::Read,
        KernelPhase::MultiplyPacked if is_grouped => true,
        KernelPhase::PackX => index == 0,
        KernelPhase::MultiplyPacked => index != 0,
        KernelPhase::Chunks => access == OperandAccess::Read,
        KernelPhase::Sums => index == 1 || access != OperandAccess::Read,
    }
}

/// Returns what determines the bytes of packed `x` besides `x` itself.
fn packed_form(sig: &OpSig, isa: Isa) -> Option<PackedOperand> {
    let shape = kernels::gemm_shape(sig)?;
    Some((shape.m, shape.k, shape.x, shape.packed_form(isa)?))
}
