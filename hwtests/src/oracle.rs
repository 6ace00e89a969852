//! The meaning of every operation, in plain float64.
//!
//! Operands are decoded, in the order of [`OpSig::operands`]; written ones are replaced by the exact result,
//! not rounded to their dtype. Paged KV is the logical array `[slots, kv_heads, head_dim]`, since the layout
//! of pages is private to a device. `Sample` and KV of eight bits are in the arithmetic that they
//! prescribe, which leaves nothing open. Nothing here is fast, and no code is shared with any backend.

use crate::scaled::stored;
use crate::{draws, experts, quantised};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{KvShape, OpSig, RotaryPart};

/// Replaces the written operands of `sig` by the correct results.
///
/// # Errors
/// If an index is out of range. Operands of the wrong length are a bug in the caller.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
pub fn run(sig: &OpSig, operands: &mut [Vec<f64>]) -> Result<(), String> {
    match (*sig, operands) {
        (OpSig::Embed { hidden, .. }, [ids, table, out]) => {
            let mut rows = Vec::with_capacity(out.len());
            for &id in ids.iter() {
                rows.extend_from_slice(row(table, id, hidden as usize)?);
            }
            *out = rows;
        }
        (OpSig::RmsNorm { cols, eps, .. }, [x, weight, out]) => {
            let cols = cols as usize;
            for (x, out) in x.chunks(cols).zip(out.chunks_mut(cols)) {
                let mean_square = x.iter().map(|v| v * v).sum::<f64>() / cols as f64;
                let norm = (mean_square + f64::from(eps.0)).sqrt();
                for i in 0..cols {
                    out[i] = x[i] / norm * weight[i];
                }
            }
        }
        (OpSig::Gemm { n, k, accumulate, .. }, [x, weight, rest @ ..]) => {
            let (bias, out) = match rest {
                [bias, out] => (Some(bias), out),
                [out] => (None, out),
                _ => return Err("gemm: wrong number of operands".into()),
            };
            let (n, k) = (n as usize, k as usize);
            for (i, out) in out.iter_mut().enumerate() {
                let (token, feature) = (i / n, i % n);
                let sum = dot(&x[token * k..][..k], &weight[feature * k..][..k]);
                let added = bias.as_ref().map_or(0.0, |b| b[feature]) + if accumulate { *out } else { 0.0 };
                *out = sum + added;
            }
        }
        (OpSig::Rope { head_dim, heads, part, .. }, [x, cos_sin]) => {
            let part = part.unwrap_or(RotaryPart { first: 0, length: head_dim, interleaved: false });
            let (width, half) = (part.length as usize, part.length as usize / 2);
            for (h, head) in x.chunks_mut(head_dim as usize).enumerate() {
                let (cos, sin) = cos_sin[h / heads as usize * width..][..width].split_at(half);
                for (i, pair) in part.pairs().enumerate() {
                    let [at, other] = pair.map(|place| place as usize);
                    let (a, b) = (head[at], head[other]);
                    head[at] = a * cos[i] - b * sin[i];
                    head[other] = b * cos[i] + a * sin[i];
                }
            }
        }
        (OpSig::CopyColumns { cols, from: of, to: into, .. }, [from, to]) => {
            let [cols, first, other] = [cols, of.first, into.first].map(|column| column as usize);
            for (from, to) in from.chunks(of.row as usize).zip(to.chunks_mut(into.row as usize)) {
                to[other..other + cols].copy_from_slice(&from[first..first + cols]);
            }
        }
        (OpSig::KvWrite { kv, .. }, operands) => {
            let (rows, rest) = operands.split_at_mut(kv.pools() as usize);
            let (slots, pools) = rest.split_first_mut().ok_or("kv_write: no slots")?;
            let width = (kv.kv_heads * kv.head_dim) as usize;
            for (rows, pool) in rows.iter().zip(pools) {
                for (row, &slot) in rows.chunks(width).zip(slots.iter()) {
                    row_mut(pool, slot, width)?.copy_from_slice(&stored(kv.dtype, kv.head_dim, row));
                }
            }
        }
        (OpSig::KvScatter { kv, .. }, [wire, slots, pools @ ..]) => {
            let width = (kv.kv_heads * kv.head_dim) as usize;
            let token = kv.pools() as usize * width;
            for (token, &slot) in wire.chunks(token).zip(slots.iter()) {
                for (row, pool) in token.chunks(width).zip(pools.iter_mut()) {
                    row_mut(pool, slot, width)?.copy_from_slice(&stored(kv.dtype, kv.head_dim, row));
                }
            }
        }
        (OpSig::KvGather { kv, wire, .. }, [slots, pools @ .., out]) => {
            let width = (kv.kv_heads * kv.head_dim) as usize;
            let token = kv.pools() as usize * width;
            for (token, &slot) in out.chunks_mut(token).zip(slots.iter()) {
                for (to, pool) in token.chunks_mut(width).zip(pools.iter()) {
                    to.copy_from_slice(&stored(wire, kv.head_dim, row(pool, slot, width)?));
                }
            }
        }
        (OpSig::AttnPrefill { heads, kv, .. }, operands) => {
            let last = operands.len() - 1;
            let mut out = vec![0.0; operands[last].len()]; // [tokens, heads, value_dim]
            for query in queries(sig, operands)? {
                for head in 0..heads as usize {
                    let part = attend(sig, operands, &query, head);
                    let (max, sum) = with_sink(part.max, part.sum, sink(sig, operands, head));
                    let at = (query.row * heads as usize + head) * kv.value_dim() as usize;
                    for (out, acc) in out[at..].iter_mut().zip(&part.acc) {
                        *out = acc * share(part.max, max) / sum;
                    }
                }
            }
            operands[last] = out;
        }
        (OpSig::AttnDecode { heads, .. }, operands) => {
            let (mut acc, mut stat) = (Vec::new(), Vec::new());
            for query in queries(sig, operands)? {
                for head in 0..heads as usize {
                    let part = attend(sig, operands, &query, head);
                    acc.extend(part.acc);
                    stat.extend([part.max, part.sum]);
                }
            }
            let last = operands.len() - 1;
            operands[last - 1] = acc; // [sequences, heads, value_dim]
            operands[last] = stat; // [sequences, heads, 2]
        }
        (OpSig::AttnMerge { parts, rows, head_dim, .. }, operands) => {
            let (parts, rows, dim) = (parts as usize, rows as usize, head_dim as usize);
            let mut out = Vec::with_capacity(rows * dim);
            for r in 0..rows {
                let (max, total) = merged_stat(sig, operands, r);
                let (acc, stat) = (&operands[0], &operands[1]);
                for d in 0..dim {
                    let weighted =
                        |p: usize| share(stat[(p * rows + r) * 2], max) * acc[(p * rows + r) * dim + d];
                    let sum: f64 = (0..parts).map(weighted).sum();
                    out.push(if total == 0.0 { 0.0 } else { sum / total });
                }
            }
            if let Some(last) = operands.last_mut() {
                *last = out;
            }
        }
        (OpSig::SiluMul { .. }, [gate, up, out]) => {
            for i in 0..out.len() {
                out[i] = gate[i] / (1.0 + (-gate[i]).exp()) * up[i];
            }
        }
        (OpSig::GeluMul { .. }, [gate, up, out]) => {
            for i in 0..out.len() {
                let z = (2.0 / std::f64::consts::PI).sqrt() * (gate[i] + 0.044715 * gate[i].powi(3));
                out[i] = gate[i] / (1.0 + (-2.0 * z).exp()) * up[i];
            }
        }
        (OpSig::ClampedSwiglu { alpha, limit, .. }, [gate_up, out]) => {
            let (alpha, limit) = (f64::from(alpha.0), f64::from(limit.0));
            for (pair, out) in gate_up.chunks(2).zip(out) {
                let (gate, up) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
                *out = (up + 1.0) * gate / (1.0 + (-alpha * gate).exp());
            }
        }
        (OpSig::SoftCap { .. }, [x]) => x.iter_mut().for_each(|x| *x = capped(cap_of(sig), *x)),
        (OpSig::Route { .. }, operands) => experts::route(sig, operands)?,
        (OpSig::GroupedGemm { .. }, operands) => experts::grouped_gemm(sig, operands)?,
        (OpSig::Combine { active, cols, accumulate, .. }, [x, weights, out]) => {
            let (active, cols) = (active as usize, cols as usize);
            for (i, out) in out.iter_mut().enumerate() {
                let (token, column) = (i / cols, i % cols);
                let choices = token * active..(token + 1) * active;
                let sum: f64 = choices.map(|choice| weights[choice] * x[choice * cols + column]).sum();
                *out = sum + if accumulate { *out } else { 0.0 };
            }
        }
        (OpSig::Add { .. }, [a, b, out]) => {
            for i in 0..out.len() {
                out[i] = a[i] + b[i];
            }
        }
        (OpSig::QuantisedEmbed { .. } | OpSig::QuantisedGemm { .. }, operands) => {
            quantised::run(sig, operands)?
        }
        (OpSig::Sample { .. }, operands) => draws::run(sig, operands)?,
        (OpSig::Copy { .. }, [from, to]) => to.clone_from(from),
        (OpSig::Fill { word, .. }, [to]) => to.fill(f64::from(word)),
        (sig, _) => return Err(format!("{}: wrong number of operands", sig.name())),
    }
    Ok(())
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn row(table: &[f64], index: f64, width: usize) -> Result<&[f64], String> {
    let start = to_usize(index) * width;
    table
        .get(start..start + width)
        .ok_or_else(|| format!("index {index} is not below {}", table.len() / width))
}

fn row_mut(table: &mut [f64], index: f64, width: usize) -> Result<&mut [f64], String> {
    let (start, rows) = (to_usize(index) * width, table.len() / width);
    table.get_mut(start..start + width).ok_or_else(|| format!("index {index} is not below {rows}"))
}

/// One query row of an attention operation, with the slots of the keys that it sees, in order.
pub(crate) struct Query {
    pub(crate) row: usize,
    pub(crate) slots: Vec<usize>,
}

/// Returns every query row of `AttnPrefill` or `AttnDecode`.
pub(crate) fn queries(sig: &OpSig, operands: &[Vec<f64>]) -> Result<Vec<Query>, String> {
    let index = |operand: usize, at: usize| to_usize(operands[operand][at]);
    let queries = match *sig {
        OpSig::AttnPrefill {
            tokens, sequences, pages_max, window, kv: KvShape { page_tokens, .. }, ..
        } => {
            let mut queries = Vec::new();
            for s in 0..sequences as usize {
                let (first, end, context) = (index(1, s), index(1, s + 1), index(2, s));
                if end > tokens as usize {
                    return Err(format!("sequence {s} ends at query {end} of {tokens}"));
                }
                for row in first..end {
                    let position = (context + row)
                        .checked_sub(end)
                        .ok_or_else(|| format!("sequence {s} has more queries than context"))?;
                    let oldest = window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
                    let slots = slots(operands, 3, s, pages_max, page_tokens, oldest..position + 1)?;
                    queries.push(Query { row, slots });
                }
            }
            queries
        }
        OpSig::AttnDecode { sequences, pages_max, kv: KvShape { page_tokens, .. }, .. } => (0..sequences
            as usize)
            .map(|s| {
                let range = index(1, 2 * s)..index(1, 2 * s + 1);
                Ok(Query { row: s, slots: slots(operands, 2, s, pages_max, page_tokens, range)? })
            })
            .collect::<Result<Vec<_>, String>>()?,
        _ => return Err(format!("{} has no queries", sig.name())),
    };
    let (pool, width) = pool_and_width(sig);
    let pool_slots = operands[pool].len() / width;
    match queries.iter().flat_map(|q| &q.slots).find(|&&slot| slot >= pool_slots) {
        Some(slot) => Err(format!("slot {slot} is not below {pool_slots}")),
        None => Ok(queries),
    }
}

/// Returns the index of an attention operation's `k_pool` (`v_pool` follows, if there is one) and the number
/// of elements per slot.
fn pool_and_width(sig: &OpSig) -> (usize, usize) {
    match *sig {
        OpSig::AttnPrefill { kv, .. } => (4, (kv.kv_heads * kv.head_dim) as usize),
        OpSig::AttnDecode { kv, .. } => (3, (kv.kv_heads * kv.head_dim) as usize),
        _ => unreachable!("only attention has queries over a pool"),
    }
}

/// Returns the slots of a token range of sequence `s`, according to its row of the page table.
fn slots(
    operands: &[Vec<f64>],
    table: usize,
    s: usize,
    pages_max: u32,
    page_tokens: u32,
    tokens: std::ops::Range<usize>,
) -> Result<Vec<usize>, String> {
    let pages = &operands[table][s * pages_max as usize..][..pages_max as usize];
    let page_tokens = page_tokens as usize;
    tokens
        .map(|t| {
            let page =
                *pages.get(t / page_tokens).ok_or_else(|| format!("token {t} is past the page table"))?;
            Ok(to_usize(page) * page_tokens + t % page_tokens)
        })
        .collect()
}

/// Un-normalised attention of one head of one query over its keys.
pub(crate) struct PartialAttention {
    /// The largest score; -inf without keys.
    pub(crate) max: f64,
    /// Sum of exp(score - max).
    pub(crate) sum: f64,
    /// Sum of exp(score - max) * v.
    pub(crate) acc: Vec<f64>, // [value_dim]
}

/// The operands of one head of one query: `q`, and `(k, v)` of each key that it sees.
pub(crate) struct HeadView<'a> {
    pub(crate) q: &'a [f64],
    pub(crate) keys: Vec<(&'a [f64], &'a [f64])>,
}

/// Selects one head of one query from the operands.
pub(crate) fn head_view<'a>(
    sig: &OpSig,
    operands: &'a [Vec<f64>],
    query: &Query,
    head: usize,
) -> HeadView<'a> {
    let (heads, kv) = match *sig {
        OpSig::AttnPrefill { heads, kv, .. } | OpSig::AttnDecode { heads, kv, .. } => (heads, kv),
        _ => unreachable!("only attention has heads over a pool"),
    };
    let (dim, value_dim) = (kv.head_dim as usize, kv.value_dim() as usize);
    let (pool, width) = pool_and_width(sig);
    // keys may contain their values
    let values = pool + kv.pools() as usize - 1;
    let kv_head = head / (heads / kv.kv_heads) as usize;
    let q = &operands[0][(query.row * heads as usize + head) * dim..][..dim];
    let keys = query.slots.iter().map(|slot| slot * width + kv_head * dim);
    let keys = keys.map(|at| (&operands[pool][at..][..dim], &operands[values][at..][..value_dim]));
    HeadView { q, keys: keys.collect() }
}

/// What an attention operation multiplies scores by, and the length of its values.
pub(crate) fn scale_and_values(sig: &OpSig) -> (f64, usize) {
    sig.kv().map_or((1.0, 0), |kv| (kv.scale(), kv.value_dim() as usize))
}

/// The soft cap of scores or values, if they have one.
pub(crate) fn cap_of(sig: &OpSig) -> Option<f64> {
    match *sig {
        OpSig::AttnPrefill { cap, .. } | OpSig::AttnDecode { cap, .. } => cap.map(|cap| f64::from(cap.0)),
        OpSig::SoftCap { cap, .. } => Some(f64::from(cap.0)),
        _ => None,
    }
}

/// A number with a soft cap.
pub(crate) fn capped(cap: Option<f64>, x: f64) -> f64 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

fn attend(sig: &OpSig, operands: &[Vec<f64>], query: &Query, head: usize) -> PartialAttention {
    let HeadView { q, keys } = head_view(sig, operands, query, head);
    let (scale, value_dim) = scale_and_values(sig);
    let scores: Vec<f64> = keys.iter().map(|(k, _)| capped(cap_of(sig), dot(q, k) * scale)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut part = PartialAttention { max, sum: 0.0, acc: vec![0.0; value_dim] };
    for (score, (_, v)) in scores.iter().zip(&keys) {
        let p = (score - max).exp();
        part.sum += p;
        for (acc, v) in part.acc.iter_mut().zip(*v) {
            *acc += p * v;
        }
    }
    part
}

/// Returns the factor that rescales a part's sums from its own maximum to the common one.
pub(crate) fn share(part_max: f64, max: f64) -> f64 {
    if part_max == f64::NEG_INFINITY { 0.0 } else { (part_max - max).exp() }
}

/// The sink of a head of `AttnPrefill`, or of a row of `AttnMerge`; -inf without sinks.
pub(crate) fn sink(sig: &OpSig, operands: &[Vec<f64>], row: usize) -> f64 {
    match *sig {
        OpSig::AttnPrefill { sinks: true, .. } => operands[operands.len() - 2][row],
        OpSig::AttnMerge { sinks, .. } if sinks > 0 => operands[2][row % sinks as usize],
        _ => f64::NEG_INFINITY,
    }
}

/// Adds the weight of a sink to a maximum and the sum that is relative to it.
pub(crate) fn with_sink(max: f64, sum: f64, sink: f64) -> (f64, f64) {
    let all = max.max(sink);
    (all, sum * share(max, all) + share(sink, all))
}

/// Returns the common maximum and sum of row `r` of `AttnMerge` over all parts, and the sink.
pub(crate) fn merged_stat(sig: &OpSig, operands: &[Vec<f64>], r: usize) -> (f64, f64) {
    let OpSig::AttnMerge { parts, rows, .. } = *sig else { unreachable!("only it has parts") };
    let (parts, rows, stat) = (parts as usize, rows as usize, &operands[1]);
    let of = |p: usize| (stat[(p * rows + r) * 2], stat[(p * rows + r) * 2 + 1]);
    let max = (0..parts).map(|p| of(p).0).fold(f64::NEG_INFINITY, f64::max);
    let sum = (0..parts).map(|p| share(of(p).0, max) * of(p).1).sum();
    with_sink(max, sum, sink(sig, operands, r))
}
