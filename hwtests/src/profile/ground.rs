//! Device memory for measurements: random data that no cache holds, and commands over it.
//!
//! What the engine streams (weights, tables, KV pages) is taken from *cold* windows, a different one for each
//! command, over more bytes than the last-level cache holds. What one operation passes to the next
//! (activations) stays in place and may be *warm*, as in the engine.

use super::Problem;
use mixfleet_hal::cast::{low_u32, to_f32, to_u32, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::random::Stream;
use mixfleet_hal::sample::{LOG2_E, PARAMETER_WORDS, Parameters, fraction};
use mixfleet_hal::units::MIB;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, OpSig, Operand, OperandAccess, Slice};
use mixfleet_report::numbers::size;

/// Alignment of windows, unless the device's own is larger.
const STRIDE: u64 = 4096;
/// Maximum number of commands that differ only in their windows; small weights need many of them to stay out
/// of every cache.
const VARIANTS_MAX: u64 = 2048;
/// Number of operand sets that take turns staying in place. A device may cache what it derives from an
/// operand (a packed form, say) only as it would in the engine, where the operand is the same.
const WARM_SETS: u64 = 2;
const TILE_BYTES: usize = 8 << 20;
const SEED: u64 = 0x9A0F_11E5;

/// The device memory of a profile.
pub(crate) struct Ground<'a> {
    device: &'a dyn Device,
    tile: Vec<u8>,
    slabs: Vec<Slice>,
    slab_bytes: u64,
    warm: Option<Slice>,
    bytes_max: u64,
}

/// Generates random bytes that are small normal numbers in bf16, f16 and f32 and no NaN in f8: no zero pages,
/// no subnormals, nothing compressible. The high byte of each pair is a sign and one of two exponents.
pub(crate) fn noise(bytes: usize) -> Vec<u8> {
    let mut stream = Stream::new(SEED);
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        for pair in stream.next_u64().to_le_bytes().chunks_exact(2) {
            let low = if pair[0] & 0x7F == 0x7F { pair[0] ^ 1 } else { pair[0] };
            out.extend([low, pair[1] & 0x81 | 0x3C]);
        }
    }
    out.truncate(bytes);
    out
}

impl<'a> Ground<'a> {
    /// Allocates `cold_bytes` on the device, in slabs of at least `operand_bytes` if the device allows.
    pub(crate) fn new(
        device: &'a dyn Device,
        cold_bytes: u64,
        operand_bytes: u64,
        bytes_max: u64,
    ) -> Result<Self, Problem> {
        let limit = device.limits().allocation_bytes_max;
        let total = cold_bytes.max(operand_bytes).max(STRIDE);
        let slab_bytes = operand_bytes.max(total.min(256 * MIB)).clamp(STRIDE, limit.max(STRIDE));
        let tile = noise(TILE_BYTES.min(to_usize(total)));
        let mut ground = Ground { device, tile, slabs: Vec::new(), slab_bytes, warm: None, bytes_max };
        for _ in 0..total.div_ceil(slab_bytes) {
            let slab = device.alloc(slab_bytes, BufferUsage::Weights)?;
            ground.fill(&slab)?;
            ground.slabs.push(slab);
        }
        Ok(ground)
    }

    /// Returns the first `bytes` bytes of the cold memory.
    pub(crate) fn region(&self, bytes: u64) -> Result<Slice, Problem> {
        self.room(bytes)?;
        Ok(self.slabs[0].range(0, bytes))
    }

    fn room(&self, bytes: u64) -> Result<(), Problem> {
        if bytes > self.slab_bytes {
            let (want, have) = (size(bytes), size(self.slab_bytes));
            return Err(Problem::Skip(format!("needs a buffer of {want}, the profiler may use {have}")));
        }
        Ok(())
    }

    /// Restores random data where a measurement wrote something else.
    pub(crate) fn fill(&self, slice: &Slice) -> Result<(), Problem> {
        let mut at = 0;
        while at < slice.bytes {
            let piece = self.tile.len().min(to_usize(slice.bytes - at));
            self.device.write(&slice.range(at, piece as u64), &self.tile[..piece])?;
            at += piece as u64;
        }
        Ok(())
    }

    fn stride(&self, bytes: u64) -> u64 {
        bytes.max(1).next_multiple_of(STRIDE.max(self.device.limits().alignment_bytes))
    }

    /// Returns the `index`th window of `bytes` bytes, wrapping around.
    fn window(&self, bytes: u64, index: u64) -> Slice {
        let stride = self.stride(bytes);
        let per_slab = (self.slab_bytes / stride).max(1);
        let index = index % (per_slab * self.slabs.len() as u64);
        self.slabs[to_usize(index / per_slab)].range(index % per_slab * stride, bytes)
    }

    /// Returns the number of disjoint windows of `bytes` bytes.
    fn windows(&self, bytes: u64) -> u64 {
        (self.slab_bytes / self.stride(bytes)).max(1) * self.slabs.len() as u64
    }

    /// Returns commands of `sig` over different cold windows, to be run in turn.
    pub(crate) fn commands(&mut self, sig: &OpSig) -> Result<Vec<Cmd>, Problem> {
        let operands = sig.operands();
        let bytes: Vec<u64> = operands.iter().map(|operand| extent_bytes(sig, operand)).collect();
        let cold: Vec<bool> = operands.iter().map(is_cold).collect();
        let cold_each: Vec<u64> =
            cold.iter().zip(&bytes).filter(|(cold, _)| **cold).map(|(_, &b)| b).collect();
        let largest = cold_each.iter().copied().max().unwrap_or(0);
        self.room(largest)?;
        let needed = cold_each.len() as u64;
        let variants = self.windows(largest).checked_div(needed).unwrap_or(1);
        if variants == 0 {
            let want = size(cold_each.iter().sum());
            return Err(Problem::Skip(format!("needs {want} of buffers, more than the profiler may use")));
        }
        let variants = variants.min(VARIANTS_MAX);
        let warm = self.warm_operands(sig, &operands, &bytes, &cold, variants.min(WARM_SETS))?;
        (0..variants)
            .map(|variant| {
                let warm = &warm[(variant % WARM_SETS) as usize];
                let mut next = variant * needed;
                let args: Vec<Slice> = (0..operands.len())
                    .map(|i| match &warm[i] {
                        Some(slice) => slice.clone(),
                        None => {
                            next += 1;
                            self.window(largest, next - 1).range(0, bytes[i])
                        }
                    })
                    .collect();
                Ok(Cmd::new(*sig, &args)?)
            })
            .collect()
    }

    /// Places the warm operands, with contents, in one buffer, `sets` times.
    fn warm_operands(
        &mut self,
        sig: &OpSig,
        operands: &[Operand],
        bytes: &[u64],
        cold: &[bool],
        sets: u64,
    ) -> Result<Vec<Vec<Option<Slice>>>, Problem> {
        let warm = |i: usize| if cold[i] { 0 } else { self.stride(bytes[i]) };
        let set_bytes: u64 = (0..operands.len()).map(warm).sum();
        let buffer = self.warm_buffer(sets * set_bytes)?;
        let mut all = Vec::with_capacity(to_usize(sets));
        let mut at = 0;
        for _ in 0..sets {
            let mut slices = Vec::with_capacity(operands.len());
            for (i, operand) in operands.iter().enumerate() {
                if cold[i] {
                    slices.push(None);
                    continue;
                }
                let slice = buffer.range(at, bytes[i]);
                at += self.stride(bytes[i]);
                match contents(sig, operand) {
                    Some(contents) => self.device.write(&slice, &contents)?,
                    None if operand.access != OperandAccess::Write => self.fill(&slice)?,
                    None => {}
                }
                slices.push(Some(slice));
            }
            all.push(slices);
        }
        Ok(all)
    }

    fn warm_buffer(&mut self, bytes: u64) -> Result<Slice, Problem> {
        let bytes = bytes.max(STRIDE);
        let limit = self.device.limits().allocation_bytes_max.min(self.bytes_max);
        if bytes > limit {
            let (want, have) = (size(bytes), size(limit));
            return Err(Problem::Skip(format!("needs {want} for activations, the profiler may use {have}")));
        }
        if let Some(warm) = self.warm.as_ref().filter(|warm| warm.bytes >= bytes) {
            return Ok(warm.range(0, bytes));
        }
        self.warm = None;
        let slice = self.device.alloc(bytes, BufferUsage::Activations)?;
        self.warm = Some(slice.clone());
        Ok(slice)
    }
}

/// Returns the bytes of `sig`'s streamed operands: of the largest one and of all.
pub(crate) fn cold_bytes(sig: &OpSig) -> (u64, u64) {
    let operands = sig.operands();
    let cold = operands.iter().filter(|o| is_cold(o)).map(|o| extent_bytes(sig, o).next_multiple_of(STRIDE));
    cold.fold((0, 0), |(largest, sum), bytes| (largest.max(bytes), sum + bytes))
}

/// Whether the engine would stream the operand from memory.
fn is_cold(operand: &Operand) -> bool {
    matches!(operand.name, "weight" | "table" | "k_pool" | "v_pool" | "from" | "to")
}

/// Returns the operand's size in bytes; paged KV has the pages that the operation accesses.
fn extent_bytes(sig: &OpSig, operand: &Operand) -> u64 {
    match operand.extent {
        Extent::Exactly(elements) => elements * operand.dtype.size_bytes(),
        Extent::PagesOf(elements) => pages(sig) * elements * operand.dtype.size_bytes(),
    }
}

/// Returns the number of KV pages that `sig` accesses, with separate pages for every sequence.
fn pages(sig: &OpSig) -> u64 {
    let of = |tokens: u64, page_tokens: u32| tokens.div_ceil(u64::from(page_tokens.max(1))).max(1);
    match *sig {
        OpSig::AttnPrefill { sequences, pages_max, .. } | OpSig::AttnDecode { sequences, pages_max, .. } => {
            (u64::from(sequences) * u64::from(pages_max)).max(1)
        }
        OpSig::KvWrite { tokens, kv: KvShape { page_tokens, .. }, .. }
        | OpSig::KvGather { tokens, kv: KvShape { page_tokens, .. }, .. }
        | OpSig::KvScatter { tokens, kv: KvShape { page_tokens, .. }, .. } => {
            of(u64::from(tokens), page_tokens)
        }
        _ => 0,
    }
}

fn words(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Returns 0 .. n in random order, as KV pages are in practice.
fn shuffled(n: u64) -> Vec<u32> {
    let (mut items, mut stream) = ((0..to_u32(n)).collect::<Vec<_>>(), Stream::new(SEED));
    for i in (1..items.len()).rev() {
        items.swap(i, to_usize(stream.below(i as u64 + 1)));
    }
    items
}

/// Returns the contents that an operand needs to be valid; `None` if random numbers will do.
fn contents(sig: &OpSig, operand: &Operand) -> Option<Vec<u8>> {
    let mut stream = Stream::new(SEED);
    match (*sig, operand.name) {
        (OpSig::Embed { tokens, vocab, .. } | OpSig::QuantisedEmbed { tokens, vocab, .. }, "ids") => {
            Some(words((0..tokens).map(|_| to_u32(stream.below(u64::from(vocab))))))
        }
        // whole pages in random order, as a prefix cache allocates them
        (
            OpSig::KvWrite { tokens, kv: KvShape { page_tokens, .. }, .. }
            | OpSig::KvGather { tokens, kv: KvShape { page_tokens, .. }, .. }
            | OpSig::KvScatter { tokens, kv: KvShape { page_tokens, .. }, .. },
            "slots",
        ) => {
            let order = shuffled(pages(sig));
            let slot = |i: u32| order[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
            Some(words((0..tokens).map(slot)))
        }
        (_, "pages") => Some(words(shuffled(pages(sig)))),
        (OpSig::AttnDecode { sequences, kv_tokens, .. }, "range") => {
            let context = to_u32(kv_tokens / u64::from(sequences.max(1)));
            Some(words((0..sequences).flat_map(|_| [0, context])))
        }
        (OpSig::AttnPrefill { tokens, sequences, .. }, "query_start") => {
            Some(words((0..=sequences).map(|i| i * (tokens / sequences.max(1)))))
        }
        (OpSig::AttnPrefill { sequences, kv_tokens, .. }, "context") => {
            let context = to_u32(kv_tokens / u64::from(sequences.max(1)));
            Some(words((0..sequences).map(|_| context)))
        }
        // logits as a model makes them, drawn at temperature 1 and top-p 0.95, which leaves some tens of
        // tokens
        (OpSig::Sample { rows, cols, .. }, "logits") => {
            let row: Vec<f32> = (0..cols).map(|_| to_f32(6.0 * stream.next_normal())).collect();
            Some(bytemuck::cast_slice(&row).repeat(rows as usize))
        }
        (OpSig::Sample { rows, .. }, "parameters") => {
            let mut row = Parameters { scale: LOG2_E, top_p: fraction(0.95), ..Parameters::GREEDY };
            Some(words((0..rows).flat_map(|_| {
                row.uniform = low_u32(stream.next_u64());
                bytemuck::cast::<_, [u32; PARAMETER_WORDS as usize]>(row)
            })))
        }
        // every touched expert has as many rows, and which choices they are is random
        (OpSig::GroupedGemm { grouped, .. }, "order") => Some(words(shuffled(grouped.choices.into()))),
        (OpSig::GroupedGemm { grouped, .. }, "starts") => {
            let touched = u64::from(grouped.touched.max(1));
            let start = |expert: u64| u64::from(grouped.own()) * expert.min(touched) / touched;
            Some(words((0..=u64::from(grouped.experts)).map(|expert| to_u32(start(expert)))))
        }
        // rotations preserve length, however often they are repeated
        (OpSig::Rope { tokens, head_dim, part, .. }, "cos_sin") => {
            let head_dim = part.map_or(head_dim, |part| part.length);
            let mut bytes = Vec::new();
            for _ in 0..tokens {
                let angles: Vec<f64> = (0..head_dim / 2).map(|_| stream.next_unit() * 100.0).collect();
                angles.iter().for_each(|a| DType::F32.encode(a.cos(), &mut bytes));
                angles.iter().for_each(|a| DType::F32.encode(a.sin(), &mut bytes));
            }
            Some(bytes)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::work::WorkItem;
    use crate::reference::ReferenceDevice;

    #[test]
    fn noise_is_finite_and_normal_in_every_dtype() {
        let bytes = noise(1 << 16);
        for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3] {
            let values = dtype.decode(&bytes);
            assert!(values.iter().all(|v| v.is_finite()), "{dtype}");
            let least = if dtype == DType::F8E4m3 { 0.0 } else { 1e-3 };
            assert!(values.iter().all(|v| v.abs() >= least && v.abs() <= 448.0), "{dtype}");
        }
        let distinct: std::collections::HashSet<&[u8]> = bytes.chunks(8).collect();
        assert!(distinct.len() > 8000, "repeats compress");
    }

    #[test]
    fn commands_of_every_kind_are_valid_and_take_turns() {
        let device = ReferenceDevice::default();
        let mut ground = Ground::new(&device, 1 << 20, 1 << 19, 1 << 20).unwrap();
        for id in [
            "gemm.bf16.m3.n64.k64",
            "gemm.bf16.m3.n64.k64.acc",
            "attn_decode.bf16.b3.c17.gqa2.kv2.d16",
            "attn_prefill.bf16.t9.c5.gqa2.kv2.d16",
            "kv_write.bf16.t9.kv2.d16",
            "kv_gather.bf16.t9.kv2.d16",
            "kv_scatter.bf16.t9.kv2.d16",
            "embed.bf16.t5.v100.h64",
            "rope.bf16.t3.heads2.d16",
            "rms_norm.bf16.t3.h64",
            "sample.f32.t3.v130",
            "attn_merge.bf16.p2.t4.d16",
            "silu_mul.bf16.e64",
            "clamped_swiglu.bf16.e64",
            "gelu_mul.bf16.e64",
            "soft_cap.f32.e64",
            "route.f32.t3.e8.a2",
            "grouped_gemm.bf16.r6.fan2.e4.touched3.n16.k32",
            "combine.bf16.t3.a2.h16",
        ] {
            let Some(WorkItem::Op(sig)) = WorkItem::parse(id, 8) else { panic!("{id}") };
            let commands = ground.commands(&sig).unwrap();
            let mut queue = device.queue().unwrap();
            let ticket = queue.submit(&commands[..commands.len().min(3)]).unwrap();
            queue.wait(ticket, std::time::Duration::from_secs(9)).unwrap_or_else(|e| panic!("{id}: {e}"));
            if id.starts_with("gemm") {
                assert!(!commands[0].args()[1].overlaps(&commands[1].args()[1]), "{id}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_left_out_with_the_reason() {
        let device = ReferenceDevice::default();
        let mut ground = Ground::new(&device, 1 << 20, 0, 1 << 20).unwrap();
        for id in ["gemm.bf16.m1.n4096.k4096", "gemm.bf16.m4096.n64.k4096"] {
            let Some(WorkItem::Op(sig)) = WorkItem::parse(id, 8) else { panic!("{id}") };
            let Err(Problem::Skip(reason)) = ground.commands(&sig) else { panic!("{id}") };
            assert!(reason.contains("MiB"), "{reason}");
        }
    }
}
