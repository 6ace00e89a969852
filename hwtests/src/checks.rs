//! Checks that involve more than a single operation: memory, ordering, recombination of attention, and bad
//! indices.

use crate::bench::{BenchError, ConformanceBench, SubmitMode};
use crate::cases::{Case, TokenSpread};
use crate::checked::checked;
use crate::paged::Paged;
use mixfleet_hal::cast::{low_u8, to_u32, to_u64, to_usize};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::random::{self, Stream};
use mixfleet_hal::{BufferUsage, Cmd, DType, ErrorKind, KvShape, OpSig, Slice};
use std::sync::Arc;

/// A check, which returns the largest error as a share of its bound if it compares numbers.
type ConformanceCheck = fn(&ConformanceBench<'_>) -> Result<Option<f64>, BenchError>;

/// All checks by name.
pub(crate) const ALL: [(&str, ConformanceCheck); 7] = [
    ("memory", memory),
    ("import", import),
    ("order", order),
    ("partition_by_tokens", |bench| partition(bench, by_tokens)),
    ("partition_by_heads", |bench| partition(bench, by_heads)),
    ("partition_by_requests", |bench| partition(bench, by_requests)),
    ("index_out_of_range", index_out_of_range),
];

fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| low_u8(random::bits(seed, i))).collect()
}

fn fail<T>(reason: impl Into<String>) -> Result<T, BenchError> {
    Err(BenchError::Failed(reason.into()))
}

/// Data written is read back unchanged, for every buffer usage, in whole and in part, without touching the
/// rest.
fn memory(bench: &ConformanceBench<'_>) -> Result<Option<f64>, BenchError> {
    let device = bench.device;
    let align = device.limits().alignment_bytes.max(1);
    for (seed, role) in
        [BufferUsage::Weights, BufferUsage::Kv, BufferUsage::Activations, BufferUsage::Staging]
            .into_iter()
            .enumerate()
    {
        let bytes = 4096 + 3 * align;
        let slice = device.alloc(bytes, role)?;
        let mut want = noise(seed as u64, bytes);
        device.write(&slice, &want)?;
        let part = noise(99, 2 * align + 1);
        device.write(&slice.range(align, part.len() as u64), &part)?;
        want[to_usize(align)..][..part.len()].copy_from_slice(&part);
        let mut got = vec![0; want.len()];
        device.read(&slice, &mut got)?;
        if let Some(i) = (0..want.len()).find(|&i| want[i] != got[i]) {
            return fail(format!(
                "{role:?}: byte {i} of {bytes} is {:#x}, was written as {:#x}",
                got[i], want[i]
            ));
        }
        let mut inside = vec![0; 7];
        device.read(&slice.range(2 * align, 7), &mut inside)?;
        if inside != want[2 * to_usize(align)..][..7] {
            return fail(format!("{role:?}: a read from byte {} got other bytes", 2 * align));
        }
    }
    through_pinned(bench)?;
    Ok(None)
}

/// Copies through pinned memory are correct, in whole and in part, and still work after unpinning.
fn through_pinned(bench: &ConformanceBench<'_>) -> Result<(), BenchError> {
    let device = bench.device;
    // longer than the chunks that copies are commonly split into
    const BYTES: u64 = (9 << 20) + 5;
    let near: Arc<dyn SharedMemory> = Arc::new(Paged::new(BYTES));
    let mut pinned = match device.pin(near.clone()) {
        Ok(Some(pinned)) => Some(pinned),
        Ok(None) => return Ok(()),
        // a limit of this host, not an error of the device
        Err(error) if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::OutOfMemory) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let far = device.alloc(BYTES, BufferUsage::Kv)?;
    for (round, (offset, bytes)) in
        [(0, BYTES), (4097, BYTES - 4098), (8, 1), (0, BYTES)].into_iter().enumerate()
    {
        if round == 3 {
            pinned.take();
        }
        let (seed, part) = (round as u64, far.range(0, bytes));
        let (mut want, sent) = (noise(seed + 10, BYTES), noise(seed, bytes));
        near.store(offset, &sent)?;
        let mut outcome = Ok(());
        near.view(offset, bytes, &mut |data| outcome = device.write(&part, data))?;
        outcome.clone()?;
        near.store(0, &want)?;
        near.update(offset, bytes, &mut |data| outcome = device.read(&part, data))?;
        outcome?;
        want[to_usize(offset)..][..to_usize(bytes)].copy_from_slice(&sent);
        let mut wrong = None;
        near.view(0, BYTES, &mut |got| wrong = (0..want.len()).find(|&i| want[i] != got[i]))?;
        if let Some(at) = wrong {
            return fail(format!(
                "byte {at} is another after {bytes} bytes at {offset} of pinned memory went there and back"
            ));
        }
    }
    Ok(())
}

/// An operation reads imported host memory in place.
fn import(bench: &ConformanceBench<'_>) -> Result<Option<f64>, BenchError> {
    if !bench.device.limits().imports_host_memory {
        return match bench.device.import(Arc::new(vec![0u8; 4096])) {
            Err(error) if error.kind == ErrorKind::Unsupported => Err(BenchError::Unsupported),
            _ => fail("import works or fails otherwise than 'unsupported', but the limits deny it"),
        };
    }
    let want = noise(5, 10_000);
    let from = bench.device.import(Arc::new(want.clone()))?;
    let to = bench.device.alloc(10_000, BufferUsage::Activations)?;
    bench.finish(&[Cmd::new(OpSig::Copy { bytes: 10_000 }, &[from, to.clone()])?], SubmitMode::Submit)?;
    let mut got = vec![0; want.len()];
    bench.device.read(&to, &mut got)?;
    if got != want { fail("a copy out of imported memory got other bytes") } else { Ok(None) }
}

/// Commands of one queue see what earlier ones wrote, across batches that were not waited for.
fn order(bench: &ConformanceBench<'_>) -> Result<Option<f64>, BenchError> {
    const BYTES: u64 = 4096;
    let device = bench.device;
    let scratch = device.alloc(BYTES, BufferUsage::Activations)?;
    let outs: Vec<Slice> =
        (0..16).map(|_| device.alloc(BYTES, BufferUsage::Activations)).collect::<Result<_, _>>()?;
    let mut queue = device.queue()?;
    let mut tickets = Vec::new();
    for (word, out) in outs.iter().enumerate() {
        let fill =
            Cmd::new(OpSig::Fill { bytes: BYTES, word: to_u32(word) + 1 }, std::slice::from_ref(&scratch))?;
        let copy = Cmd::new(OpSig::Copy { bytes: BYTES }, &[scratch.clone(), out.clone()])?;
        tickets.push(queue.submit(&[fill, copy])?);
    }
    let last = tickets.len() - 1;
    for at in [last, 0] {
        queue.wait(tickets[at], bench.timeout)?;
    }
    for (word, out) in outs.iter().enumerate() {
        let mut got = vec![0; to_usize(BYTES)];
        device.read(out, &mut got)?;
        if got != (to_u32(word) + 1).to_le_bytes().repeat(to_usize(BYTES) / 4) {
            return fail(format!("batch {word} of 16 saw what a batch before or after it wrote"));
        }
    }
    Ok(None)
}

/// One piece of an attention operation: its command and the (sequence, head) rows that it covers.
struct AttentionPiece {
    rows: Vec<usize>,
    sig: OpSig,
    operands: Vec<Vec<f64>>,
}

const CONTEXTS: [(u32, u32); 4] = [(0, 70), (0, 33), (0, 1), (2, 19)];
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Splits an attention operation into pieces, runs and merges them, and compares with the whole, within 1e-5
/// of the largest element of the row (single elements may cancel). Activations are f32, because a device may
/// round its weights to them, relative to a different maximum in each piece.
fn partition(
    bench: &ConformanceBench<'_>,
    cut: fn(&OpSig, &[Vec<f64>], &mut Stream) -> Vec<AttentionPiece>,
) -> Result<Option<f64>, BenchError> {
    let page_tokens = bench.device.limits().kv_page_tokens.max(1);
    let rows = CONTEXTS.len() * HEADS;
    let mut worst = None;
    for (seed, kv) in DType::KV.into_iter().enumerate() {
        let sig = OpSig::AttnDecode {
            sequences: to_u32(CONTEXTS.len()),
            kv_tokens: CONTEXTS.iter().map(|r| u64::from(r.1 - r.0)).sum(),
            heads: to_u32(HEADS),
            pages_max: 70u32.div_ceil(page_tokens),
            x: DType::F32,
            kv: KvShape {
                kv_heads: to_u32(KV_HEADS),
                head_dim: to_u32(HEAD_DIM),
                page_tokens,
                dtype: kv,
                latent: None,
            },
            cap: None,
        };
        let case = Case { sig, spread: TokenSpread::Ranges(CONTEXTS.to_vec()), seed: 1000 + seed as u64 };
        let operands = case.operands();
        let all = AttentionPiece { rows: (0..rows).collect(), sig, operands: operands.clone() };
        let whole = match merged(bench, vec![all], rows) {
            Err(BenchError::Unsupported) => continue,
            whole => whole?,
        };
        let parts = merged(bench, cut(&sig, &operands, &mut Stream::new(seed as u64)), rows)?;
        for (whole, parts) in whole.chunks(HEAD_DIM).zip(parts.chunks(HEAD_DIM)) {
            let scale = whole.iter().fold(0.0f64, |max, v| max.max(v.abs()));
            let error = whole.iter().zip(parts).fold(0.0f64, |max, (w, p)| max.max((w - p).abs()));
            worst = Some(worst.unwrap_or(0.0f64).max(error / (1e-5 * scale)));
        }
    }
    match worst {
        None => Err(BenchError::Unsupported),
        Some(worst) if worst > 1.0 => fail(format!("parts recombine to {worst:.2} times 1e-5 of the whole")),
        Some(worst) => Ok(Some(worst)),
    }
}

/// Runs the pieces, arranges them in as many layers as any row has pieces, and merges those.
fn merged(
    bench: &ConformanceBench<'_>,
    pieces: Vec<AttentionPiece>,
    rows: usize,
) -> Result<Vec<f64>, BenchError> {
    let mut layers = vec![0; rows];
    pieces.iter().flat_map(|piece| &piece.rows).for_each(|&row| layers[row] += 1);
    let parts = layers.iter().copied().max().unwrap_or(0);
    let mut acc = vec![0.0; parts * rows * HEAD_DIM]; // [parts, rows, head_dim]
    let mut stat = [f64::NEG_INFINITY, 0.0].repeat(parts * rows); // [parts, rows, 2]
    let mut next = vec![0; rows];
    for piece in pieces {
        let done = checked(bench, &piece.sig, &piece.operands)?.done;
        for (from, &row) in piece.rows.iter().enumerate() {
            let to = next[row] * rows + row;
            next[row] += 1;
            acc[to * HEAD_DIM..][..HEAD_DIM]
                .copy_from_slice(&done.operands[5][from * HEAD_DIM..][..HEAD_DIM]);
            stat[to * 2..][..2].copy_from_slice(&done.operands[6][from * 2..][..2]);
        }
    }
    let sig = OpSig::AttnMerge {
        parts: to_u32(parts),
        rows: to_u32(rows),
        head_dim: to_u32(HEAD_DIM),
        sinks: 0,
        out: DType::F32,
    };
    let out = vec![f64::NAN; rows * HEAD_DIM];
    Ok(checked(bench, &sig, &[acc, stat, out])?.done.operands.swap_remove(2))
}

/// Returns an `AttnDecode` over other sequences, heads or ranges than `sig`, with its result operands.
fn resized(
    sig: &OpSig,
    heads: usize,
    kv_heads: usize,
    mut operands: Vec<Vec<f64>>,
) -> (OpSig, Vec<Vec<f64>>) {
    let OpSig::AttnDecode { pages_max, cap, x, kv: KvShape { page_tokens, dtype: kv, head_dim, .. }, .. } =
        *sig
    else {
        unreachable!("only attn_decode is cut")
    };
    let sequences = operands[1].len() / 2;
    operands[5] = vec![f64::NAN; sequences * heads * HEAD_DIM];
    operands[6] = vec![f64::NAN; sequences * heads * 2];
    let sig = OpSig::AttnDecode {
        sequences: to_u32(sequences),
        kv_tokens: operands[1].chunks(2).map(|r| to_u64(r[1] - r[0])).sum(),
        heads: to_u32(heads),
        pages_max,
        x,
        kv: KvShape { kv_heads: to_u32(kv_heads), head_dim, page_tokens, dtype: kv, latent: None },
        cap,
    };
    (sig, operands)
}

/// Splits each sequence into five token ranges at random positions; some are empty.
fn by_tokens(sig: &OpSig, operands: &[Vec<f64>], stream: &mut Stream) -> Vec<AttentionPiece> {
    const PARTS: usize = 5;
    let cuts: Vec<Vec<f64>> = operands[1]
        .chunks(2)
        .map(|range| {
            let inside = |_| range[0] + stream.below(to_u64(range[1] - range[0]) + 1) as f64;
            let mut cuts: Vec<f64> = (1..PARTS).map(inside).chain(range.iter().copied()).collect();
            cuts.sort_by(f64::total_cmp);
            cuts
        })
        .collect();
    let piece = |part: usize| {
        let mut operands = operands.to_vec();
        operands[1] = cuts.iter().flat_map(|cuts| [cuts[part], cuts[part + 1]]).collect();
        let (sig, operands) = resized(sig, HEADS, KV_HEADS, operands);
        AttentionPiece { rows: (0..CONTEXTS.len() * HEADS).collect(), sig, operands }
    };
    (0..PARTS).map(piece).collect()
}

/// Splits by KV head, with separate KV for each piece.
fn by_heads(sig: &OpSig, operands: &[Vec<f64>], _: &mut Stream) -> Vec<AttentionPiece> {
    let group = HEADS / KV_HEADS;
    let piece = |kv_head: usize| {
        let mut operands = operands.to_vec();
        let pick = |values: &[f64], of: usize, first: usize, count: usize| -> Vec<f64> {
            values
                .chunks(of * HEAD_DIM)
                .flat_map(|row| row[first * HEAD_DIM..][..count * HEAD_DIM].to_vec())
                .collect()
        };
        operands[0] = pick(&operands[0], HEADS, kv_head * group, group);
        operands[3] = pick(&operands[3], KV_HEADS, kv_head, 1);
        operands[4] = pick(&operands[4], KV_HEADS, kv_head, 1);
        let (sig, operands) = resized(sig, group, 1, operands);
        let row = |i: usize| i / group * HEADS + kv_head * group + i % group;
        AttentionPiece { rows: (0..CONTEXTS.len() * group).map(row).collect(), sig, operands }
    };
    (0..KV_HEADS).map(piece).collect()
}

/// Splits by sequence.
fn by_requests(sig: &OpSig, operands: &[Vec<f64>], _: &mut Stream) -> Vec<AttentionPiece> {
    let piece = |s: usize| {
        let mut operands = operands.to_vec();
        for values in operands.iter_mut().take(3) {
            let row = values.len() / CONTEXTS.len();
            *values = values[s * row..][..row].to_vec();
        }
        let (sig, operands) = resized(sig, HEADS, KV_HEADS, operands);
        AttentionPiece { rows: (s * HEADS..(s + 1) * HEADS).collect(), sig, operands }
    };
    (0..CONTEXTS.len()).map(piece).collect()
}

/// An out-of-range index is an error or has no effect on other data, and the device still works afterwards.
fn index_out_of_range(bench: &ConformanceBench<'_>) -> Result<Option<f64>, BenchError> {
    let floats = (DType::F32, DType::F32);
    let embed = OpSig::Embed { tokens: 2, vocab: 8, hidden: 16, table: floats.0, out: floats.1 };
    let wrong = Case { sig: embed, spread: TokenSpread::Even, seed: 1 };
    let (kv_heads, head_dim, page_tokens) = (1, 8, bench.device.limits().kv_page_tokens.max(1));
    let write = OpSig::KvWrite {
        tokens: 2,
        x: floats.0,
        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: floats.1, latent: None },
    };
    let written = Case { sig: write, spread: TokenSpread::Even, seed: 2 };
    for (case, operand) in [(&wrong, 0), (&written, 2)] {
        for far in [1e3, 4e6, f64::from(u32::MAX)] {
            let mut operands = case.operands();
            operands[operand][1] = far;
            match bench.execute(&case.sig, &operands, SubmitMode::Submit) {
                Ok(_) => {}
                Err(BenchError::Failed(reason)) if reason.starts_with("Invalid") => {}
                Err(trouble) => return Err(trouble),
            }
        }
        checked(bench, &case.sig, &case.operands())?;
    }
    Ok(None)
}
