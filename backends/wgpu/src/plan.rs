//! From a command to dispatches and copies.
//!
//! **Cutting.** An adapter limits the bytes of a binding (128 MiB are guaranteed; a weight or a KV pool is
//! often larger), so a command becomes as many dispatches as it takes for each to see a *window* of every
//! operand that fits. There are two cases:
//! - Rows that do not depend on each other (tokens, elements) are cut into runs of rows, of inputs and
//!   outputs alike: [`Planner::runs`].
//! - Operands that are looked up (the weight of a `Gemm`, the table of an `Embed`, KV pools) are cut too, and
//!   each dispatch does what its part allows: some columns, or the ids and slots in it. Attention over a part
//!   of a pool leaves un-normalised output in scratch memory, which `attn_merge` recombines.
//!
//! What cannot be cut so small (a single row, the parts of an `AttnMerge`) is unsupported. Nor can one
//! query's results over all parts of a pool; those of 4096 parts, a pool of 512 GiB, still fit into 128 MiB.
//!
//! **Asides.** wgpu forbids that a dispatch reads and writes one buffer through two bindings, even where they
//! do not overlap. An input that shares its buffer with an output is copied aside first.
//!
//! **Half words.** A row of odd length in a 16-bit dtype shares a 32-bit word with the next row. Kernels that
//! assign rows to groups leave such results in scratch memory as f32, and `narrow` rounds them, one thread
//! per word.

mod attention;
mod experts;
mod gemm;
mod kv;
mod quantised;
mod sample;
#[cfg(test)]
mod shaders;
#[cfg(test)]
mod tests;

use crate::kernels::{Kernel, MatrixUnit, ShaderFile};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, Error, OpSig, OperandAccess, Result, RotaryPart, Scalar, Slice};
use std::sync::Arc;

/// Default number of threads per workgroup.
const GROUP: u32 = 64;
/// Threads of a workgroup that processes a row.
const ROW_GROUP: u32 = 256;
/// Maximum number of workgroups in each dimension, as every adapter supports.
const GRID_MAX: u32 = 65535;
/// Alignment within scratch memory, the largest that any adapter requires.
const SCRATCH_ALIGN: u64 = 256;
/// First binding of views as 16-byte vectors; inputs start at 0, views at 8, outputs at 16.
const VIEWS: u32 = 8;
/// First binding of outputs.
pub(crate) const OUTPUTS: u32 = 16;
/// Bits of NaN, which no WGSL constant can be.
const NAN: u32 = 0x7FC0_0000;

/// Where an operand is stored.
#[derive(Clone, Debug)]
pub(crate) enum OperandLocation {
    /// In a caller's buffer.
    Buffer(Slice),
    /// In the queue's memory for inputs that were copied.
    Aside,
    /// In the queue's scratch memory.
    Scratch,
}

impl OperandLocation {
    fn shares(&self, other: &OperandLocation) -> bool {
        match (self, other) {
            (OperandLocation::Buffer(a), OperandLocation::Buffer(b)) => Arc::ptr_eq(&a.buffer, &b.buffer),
            (OperandLocation::Aside, OperandLocation::Aside)
            | (OperandLocation::Scratch, OperandLocation::Scratch) => true,
            _ => false,
        }
    }
}

/// A range of memory.
#[derive(Clone, Debug)]
pub(crate) struct MemoryWindow {
    pub(crate) place: OperandLocation,
    /// Offset of the first byte in the buffer.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// A window of elements.
#[derive(Clone, Debug)]
struct TensorView {
    window: MemoryWindow,
    dtype: DType,
}

impl TensorView {
    /// Returns `count` elements, starting at element `first`.
    fn part(&self, first: u64, count: u64) -> TensorView {
        let size = self.dtype.size_bytes();
        let MemoryWindow { place, offset, .. } = self.window.clone();
        let window = MemoryWindow { place, offset: offset + first * size, bytes: count * size };
        TensorView { window, dtype: self.dtype }
    }

    fn elements(&self) -> u64 {
        self.window.bytes / self.dtype.size_bytes()
    }
}

/// A unit of work for the device.
#[derive(Clone, Debug)]
pub(crate) enum WgpuStep {
    Dispatch {
        kernel: Kernel,
        /// Binding numbers, and the bound windows.
        bindings: Vec<(u32, MemoryWindow)>,
        /// The immediates, as words.
        words: Vec<u32>,
        /// Number of workgroups along x and y.
        grid: (u32, u32),
    },
    /// A copy between ranges of equal length.
    Copy { from: MemoryWindow, to: MemoryWindow },
}

/// The adapter's requirements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demands {
    /// Maximum size of a binding in bytes.
    pub(crate) binding_bytes_max: u64,
    /// Alignment of a binding's start.
    pub(crate) binding_align: u64,
    /// What the adapter multiplies matrices with, if it does.
    pub(crate) matrices: Option<MatrixUnit>,
}

/// Plans commands as dispatches, and tracks the scratch memory that they need.
pub(crate) struct Planner {
    demands: Demands,
    pub(crate) works: Vec<WgpuStep>,
    pub(crate) aside_bytes: u64,
    pub(crate) scratch_bytes: u64,
    /// Scratch memory used by the current command.
    scratch_used: u64,
}

impl Planner {
    pub(crate) fn new(demands: Demands) -> Planner {
        Planner { demands, works: Vec::new(), aside_bytes: 0, scratch_bytes: 0, scratch_used: 0 }
    }

    /// Whether `sig` can be split finely enough for this adapter.
    pub(crate) fn supports(demands: Demands, sig: &OpSig) -> bool {
        // nothing is allocated, so any location will do
        let operands = sig.operands().into_iter().map(|operand| {
            let elements = match operand.extent {
                mixfleet_hal::op::Extent::Exactly(n) | mixfleet_hal::op::Extent::PagesOf(n) => n,
            };
            let bytes = elements.saturating_mul(operand.dtype.size_bytes());
            TensorView {
                window: MemoryWindow { place: OperandLocation::Aside, offset: 0, bytes },
                dtype: operand.dtype,
            }
        });
        let operands: Vec<TensorView> = operands.collect();
        Planner::new(demands).plan(sig, &operands).is_ok()
    }

    /// Plans a command.
    pub(crate) fn add(&mut self, cmd: &mixfleet_hal::Cmd) -> Result<()> {
        let kinds = cmd.sig().operands();
        let operands = kinds.iter().zip(cmd.args()).map(|(kind, slice)| {
            let window = MemoryWindow {
                place: OperandLocation::Buffer(slice.clone()),
                offset: slice.offset,
                bytes: slice.bytes,
            };
            TensorView { window, dtype: kind.dtype }
        });
        let operands: Vec<TensorView> = operands.collect();
        if let Some(odd) = operands.iter().position(|operand| operand.window.offset % 4 != 0) {
            let message = format!(
                "wgpu: {}: operand '{}' begins at byte {}; offsets are multiples of 4",
                cmd.sig().name(),
                kinds[odd].name,
                operands[odd].window.offset
            );
            return Err(Error::invalid(message));
        }
        self.plan(cmd.sig(), &operands)
    }

    fn plan(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        self.scratch_used = 0;
        let mut written = sig.operands().into_iter().zip(operands);
        if written.all(|(kind, operand)| kind.access == OperandAccess::Read || operand.elements() == 0) {
            return Ok(());
        }
        match (*sig, operands) {
            (OpSig::Copy { .. }, [from, to]) => self.copy(from, to),
            (OpSig::Fill { word, .. }, [to]) => self.fill(word, to)?,
            (OpSig::Add { x, .. } | OpSig::SiluMul { x, .. } | OpSig::GeluMul { x, .. }, [a, b, out]) => {
                let kernel = Kernel::new(ShaderFile::Elements, sig.name(), GROUP)
                    .dtype("D0", x)
                    .dtype("D1", x)
                    .dtype("OUT", x);
                for (first, count) in self.runs(sig, out.elements(), x.size_bytes())? {
                    let [a, b, out] = [a, b, out].map(|operand| operand.part(first, count));
                    let groups = words(count, x).div_ceil(GROUP.into());
                    self.dispatch(
                        &kernel,
                        &[&a, &b],
                        &[&out],
                        &element_shape(count, 1, 1, [0, 0], 0),
                        groups,
                    );
                }
            }
            (OpSig::Rope { .. }, [x, cos_sin]) => self.rope(sig, x, cos_sin)?,
            (OpSig::CopyColumns { .. }, [from, to]) => self.copy_columns(sig, from, to)?,
            (OpSig::Embed { .. }, [ids, table, out]) => self.embed(sig, ids, table, out)?,
            (OpSig::RmsNorm { .. }, [x, weight, out]) => self.rms_norm(sig, x, weight, out)?,
            (OpSig::AttnMerge { parts, rows, head_dim, .. }, [acc, stat, out]) => {
                let merged = MergeShape { parts, rows, dim: head_dim };
                self.merge(sig, merged, [acc, stat], out, Merged::Normalised)?;
            }
            (OpSig::AttnMerge { parts, rows, head_dim, sinks: heads, .. }, [acc, stat, sinks, out]) => {
                let merged = MergeShape { parts, rows, dim: head_dim };
                self.merge(sig, merged, [acc, stat], out, Merged::Joined(sinks, heads))?;
            }
            (OpSig::KvWrite { .. } | OpSig::KvGather { .. } | OpSig::KvScatter { .. }, _) => {
                self.kv(sig, operands)?;
            }
            (OpSig::Gemm { .. }, _) => self.gemm(sig, operands)?,
            (OpSig::QuantisedGemm { .. }, _) => self.quantised_gemm(sig, operands)?,
            (OpSig::QuantisedEmbed { .. }, _) => self.quantised_embed(sig, operands)?,
            (OpSig::Sample { .. }, _) => self.sample(sig, operands)?,
            (OpSig::Route { .. }, _) => self.route(sig, operands)?,
            (OpSig::GroupedGemm { .. }, _) => self.grouped(sig, operands)?,
            (OpSig::Combine { .. }, _) => self.combine(sig, operands)?,
            (OpSig::SoftCap { cap, .. }, [x]) => self.soft_cap(sig, cap, x)?,
            (OpSig::ClampedSwiglu { .. }, _) => self.clamped_swiglu(sig, operands)?,
            (OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. }, _) => self.attention(sig, operands)?,
            (sig, _) => return Err(Error::invalid(format!("{}: wrong number of operands", sig.name()))),
        }
        Ok(())
    }

    /// Returns the bytes of an operand that fit into a binding wherever they begin.
    fn window_bytes(&self) -> u64 {
        // a window begins up to an alignment early, and a view ends up to 12 bytes late
        self.demands.binding_bytes_max.saturating_sub(self.demands.binding_align + 12)
    }

    /// Splits `rows` rows, of at most `row_bytes` bytes in any operand, into runs (first, count) that fit.
    /// Runs begin at an even row, so that 16-bit rows of odd length begin at a word.
    fn runs(&self, sig: &OpSig, rows: u64, row_bytes: u64) -> Result<Vec<(u64, u64)>> {
        self.runs_of(sig, rows, row_bytes, 2)
    }

    /// Splits as `runs`, but into runs that begin at multiples of `unit`.
    fn runs_of(&self, sig: &OpSig, rows: u64, row_bytes: u64, unit: u64) -> Result<Vec<(u64, u64)>> {
        let fit = (self.window_bytes() / row_bytes.max(1)).min(u64::from(u32::MAX));
        if fit >= rows {
            return Ok(if rows == 0 { Vec::new() } else { vec![(0, rows)] });
        }
        let step = fit / unit * unit;
        if step == 0 {
            let bytes = row_bytes * unit;
            let max = self.demands.binding_bytes_max;
            let message =
                format!("wgpu: {}: {bytes} bytes in a binding; this adapter allows {max}", sig.name());
            return Err(Error::unsupported(message));
        }
        Ok((0..rows.div_ceil(step)).map(|i| (i * step, step.min(rows - i * step))).collect())
    }

    /// Allocates scratch memory for the current command.
    fn scratch(&mut self, elements: u64) -> TensorView {
        let (offset, bytes) = (self.scratch_used, elements * 4);
        self.scratch_used = (offset + bytes).next_multiple_of(SCRATCH_ALIGN);
        self.scratch_bytes = self.scratch_bytes.max(self.scratch_used);
        TensorView {
            window: MemoryWindow { place: OperandLocation::Scratch, offset, bytes },
            dtype: DType::F32,
        }
    }

    /// Adds a dispatch of `groups` workgroups; `inputs` and `outputs` bind in order, and vector views are
    /// bound in addition if the kernel has them.
    fn dispatch(
        &mut self,
        kernel: &Kernel,
        inputs: &[&TensorView],
        outputs: &[&TensorView],
        shape: &[u32],
        groups: u64,
    ) {
        if groups == 0 {
            return;
        }
        let views: &[u32] = match kernel.file {
            ShaderFile::Gemm | ShaderFile::Grouped => &[0, 1],
            ShaderFile::GroupedCodes => &[0],
            ShaderFile::Attention => &[4],
            _ => &[],
        };
        let mut aside = 0;
        let mut bindings = Vec::with_capacity(10);
        let mut params = [0u32; 10];
        for (i, input) in inputs.iter().enumerate() {
            let mut window = input.window.clone();
            if outputs.iter().any(|output| output.window.place.shares(&window.place)) {
                let to = MemoryWindow {
                    place: OperandLocation::Aside,
                    offset: aside,
                    bytes: window.bytes.next_multiple_of(4),
                };
                aside = (aside + to.bytes).next_multiple_of(SCRATCH_ALIGN);
                window.bytes = to.bytes;
                self.works.push(WgpuStep::Copy { from: window, to: to.clone() });
                window = to;
            }
            let number = to_u32(i);
            params[i] = self.bind(&mut bindings, number, &window, input.dtype);
            if views.contains(&number) {
                self.bind(&mut bindings, VIEWS + number, &window, input.dtype);
            }
        }
        self.aside_bytes = self.aside_bytes.max(aside);
        for (i, output) in outputs.iter().enumerate() {
            params[6 + i] = self.bind(&mut bindings, OUTPUTS + to_u32(i), &output.window, output.dtype);
        }
        let groups = u32::try_from(groups).unwrap_or(u32::MAX);
        let grid = if groups <= GRID_MAX { (groups, 1) } else { (1 << 15, groups.div_ceil(1 << 15)) };
        let words = params.iter().chain(shape).copied().collect();
        self.works.push(WgpuStep::Dispatch { kernel: kernel.clone(), bindings, words, grid });
    }

    /// Binds the aligned window around `window`, and returns the index of its first element.
    fn bind(
        &self,
        bindings: &mut Vec<(u32, MemoryWindow)>,
        number: u32,
        window: &MemoryWindow,
        dtype: DType,
    ) -> u32 {
        let before = window.offset % self.demands.binding_align;
        let bytes = (before + window.bytes).next_multiple_of(16).max(16);
        let bound = MemoryWindow { place: window.place.clone(), offset: window.offset - before, bytes };
        bindings.push((number, bound));
        to_u32(before / dtype.size_bytes())
    }

    fn copy(&mut self, from: &TensorView, to: &TensorView) {
        if to.window.bytes == 0 {
            return;
        }
        let (mut from, to) = (from.window.clone(), to.window.clone());
        // copies within a buffer are forbidden too
        if from.place.shares(&to.place) {
            let aside = MemoryWindow { place: OperandLocation::Aside, offset: 0, bytes: from.bytes };
            self.aside_bytes = self.aside_bytes.max(from.bytes);
            self.works.push(WgpuStep::Copy { from, to: aside.clone() });
            from = aside;
        }
        self.works.push(WgpuStep::Copy { from, to });
    }

    fn fill(&mut self, word: u32, to: &TensorView) -> Result<()> {
        let kernel = Kernel::new(ShaderFile::Elements, "fill", GROUP);
        let sig = OpSig::Fill { bytes: to.window.bytes, word };
        for (first, count) in self.runs(&sig, to.elements(), 4)? {
            let shape = element_shape(count, 1, 1, [0, 0], word);
            self.dispatch(&kernel, &[], &[&to.part(first, count)], &shape, count.div_ceil(GROUP.into()));
        }
        Ok(())
    }

    fn soft_cap(&mut self, sig: &OpSig, cap: Scalar, x: &TensorView) -> Result<()> {
        let kernel = Kernel::new(ShaderFile::Elements, "soft_cap", GROUP);
        for (first, count) in self.runs(sig, x.elements(), 4)? {
            let shape = element_shape(count, 1, 1, [0, 0], cap.0.to_bits());
            self.dispatch(&kernel, &[], &[&x.part(first, count)], &shape, count.div_ceil(GROUP.into()));
        }
        Ok(())
    }

    /// Adds a kernel that rounds `wide` to `out`, or accumulates it.
    fn narrow(&mut self, wide: &TensorView, out: &TensorView, accumulate: bool) {
        let kernel = Kernel::new(ShaderFile::Elements, "narrow", GROUP).dtype("OUT", out.dtype);
        let count = out.elements();
        let shape = element_shape(count, 1, 1, [0, 0], accumulate.into());
        self.dispatch(&kernel, &[wide], &[out], &shape, words(count, out.dtype).div_ceil(GROUP.into()));
    }

    fn rope(&mut self, sig: &OpSig, x: &TensorView, cos_sin: &TensorView) -> Result<()> {
        let OpSig::Rope { tokens, heads, head_dim, part, .. } = *sig else { return Ok(()) };
        let whole = RotaryPart { first: 0, length: head_dim, interleaved: false };
        let RotaryPart { first: begin, length, interleaved } = part.unwrap_or(whole);
        let width = length / 2;
        // heads and pairs of a thread; no other thread shares a 32-bit word with them
        let (own, unit) = match x.dtype {
            DType::F32 => (1, 1),
            _ if !head_dim.is_multiple_of(2) => (2, width),
            _ if !begin.is_multiple_of(2) => (1, width),
            _ if interleaved => (1, 1),
            _ if width.is_multiple_of(2) => (1, 2),
            _ => (1, width),
        };
        let kernel = Kernel::new(ShaderFile::Elements, "rope", GROUP).dtype("OUT", x.dtype);
        let kernel = kernel.number("UNIT", unit.max(1)).number("OWN", own);
        let row = u64::from(heads) * u64::from(head_dim);
        let row_bytes = (row * x.dtype.size_bytes()).max(u64::from(head_dim) * 4);
        for (first, count) in self.runs(sig, tokens.into(), row_bytes)? {
            let x = x.part(first * row, count * row);
            let cos_sin = cos_sin.part(first * u64::from(length), count * u64::from(length));
            let all_heads = count * u64::from(heads);
            let shape = element_shape(all_heads, width, heads, [begin, head_dim], interleaved.into());
            let threads = all_heads.div_ceil(own.into()) * u64::from(width / unit.max(1));
            self.dispatch(&kernel, &[&cos_sin], &[&x], &shape, threads.div_ceil(GROUP.into()));
        }
        Ok(())
    }

    fn copy_columns(&mut self, sig: &OpSig, from: &TensorView, to: &TensorView) -> Result<()> {
        let OpSig::CopyColumns { rows, cols, from: source, to: target, x } = *sig else { return Ok(()) };
        let kernel = Kernel::new(ShaderFile::Elements, "copy_columns", GROUP).dtype("D0", x).dtype("OUT", x);
        let [from_row, to_row] = [source.row, target.row].map(u64::from);
        for (first, count) in self.runs(sig, rows.into(), from_row.max(to_row) * x.size_bytes())? {
            let from = from.part(first * from_row, count * from_row);
            let to = to.part(first * to_row, count * to_row);
            let elements = count * to_row;
            let shape = element_shape(elements, cols, source.row, [source.first, target.row], target.first);
            self.dispatch(&kernel, &[&from], &[&to], &shape, words(elements, x).div_ceil(GROUP.into()));
        }
        Ok(())
    }

    fn embed(&mut self, sig: &OpSig, ids: &TensorView, table: &TensorView, out: &TensorView) -> Result<()> {
        let OpSig::Embed { tokens, vocab, hidden, .. } = *sig else { return Ok(()) };
        let kernel = Kernel::new(ShaderFile::Elements, "embed", GROUP)
            .dtype("D1", table.dtype)
            .dtype("OUT", out.dtype);
        let hidden = u64::from(hidden);
        let mut parts = self.runs(sig, vocab.into(), hidden * table.dtype.size_bytes())?;
        if parts.is_empty() {
            parts.push((0, 0)); // an empty table has no row for any id
        }
        for (row, rows) in self.runs(sig, tokens.into(), hidden * out.dtype.size_bytes())? {
            let (ids, out) = (ids.part(row, rows), out.part(row * hidden, rows * hidden));
            for &(first, count) in &parts {
                let table = table.part(first * hidden, count * hidden);
                let range = [to_u32(first), to_u32(first + count)];
                let shape = element_shape(rows * hidden, to_u32(hidden), vocab, range, NAN);
                let groups = words(rows * hidden, out.dtype).div_ceil(GROUP.into());
                self.dispatch(&kernel, &[&ids, &table], &[&out], &shape, groups);
            }
        }
        Ok(())
    }

    fn rms_norm(&mut self, sig: &OpSig, x: &TensorView, weight: &TensorView, out: &TensorView) -> Result<()> {
        let OpSig::RmsNorm { rows, cols, eps, .. } = *sig else { return Ok(()) };
        let wide = out.dtype != DType::F32 && cols % 2 == 1;
        let kernel = Kernel::new(ShaderFile::Rows, "rms_norm", ROW_GROUP)
            .summing(1)
            .dtype("D0", x.dtype)
            .dtype("D1", weight.dtype)
            .dtype("OUT", if wide { DType::F32 } else { out.dtype });
        let cols64 = u64::from(cols);
        for (first, count) in self.runs(sig, rows.into(), cols64 * 4)? {
            self.scratch_used = 0;
            let [x, out] = [x, out].map(|operand| operand.part(first * cols64, count * cols64));
            let target = if wide { self.scratch(count * cols64) } else { out.clone() };
            let shape = [to_u32(count), cols, eps.0.to_bits()];
            self.dispatch(&kernel, &[&x, weight], &[&target], &shape, count);
            if wide {
                self.narrow(&target, &out, false);
            }
        }
        Ok(())
    }

    /// Adds an `attn_merge` of `[parts, rows, dim]`.
    fn merge(
        &mut self,
        sig: &OpSig,
        merged: MergeShape,
        [acc, stat]: [&TensorView; 2],
        out: &TensorView,
        how: Merged<'_>,
    ) -> Result<()> {
        // parts are not contiguous, so all of them must fit one binding
        self.runs_of(sig, 1, acc.window.bytes.max(stat.window.bytes), 1)?;
        let kernel = Kernel::new(ShaderFile::Merge, "attn_merge", GROUP)
            .dtype("OUT", out.dtype)
            .flag("NORMALISED", !matches!(how, Merged::Part(_)));
        let (sinks, heads, stat_out) = match how {
            // absent operands must be bound anyway
            Merged::Normalised => (stat, 0, out),
            Merged::Joined(sinks, heads) => (sinks, heads, out),
            Merged::Part(stat_out) => (stat, 0, stat_out),
        };
        let MergeShape { parts, rows, dim } = merged;
        let shape = [parts, rows, dim, rows, heads];
        let groups = words(u64::from(rows) * u64::from(dim), out.dtype).div_ceil(GROUP.into());
        // a normalising kernel never writes its second output, which must be bound anyway
        self.dispatch(&kernel, &[acc, stat, sinks], &[out, stat_out], &shape, groups);
        Ok(())
    }
}

/// The shape of a merge of parts.
#[derive(Clone, Copy)]
struct MergeShape {
    parts: u32,
    rows: u32,
    /// Elements of a row.
    dim: u32,
}

/// What becomes of parts.
enum Merged<'a> {
    /// Their mean.
    Normalised,
    /// The same with `sinks` attention sinks.
    Joined(&'a TensorView, u32),
    /// A part again, with this maximum and sum.
    Part(&'a TensorView),
}

/// Returns the number of 32-bit words that `count` elements take.
fn words(count: u64, dtype: DType) -> u64 {
    (count * dtype.size_bytes()).div_ceil(4)
}

/// Returns `Shape` of elements.wgsl.
fn element_shape(count: u64, width: u32, heads: u32, range: [u32; 2], word: u32) -> [u32; 6] {
    [to_u32(count), width, heads, range[0], range[1], word]
}
