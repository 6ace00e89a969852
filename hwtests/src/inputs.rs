//! Operands for a case: random values, valid indices, and shuffled page tables.

use crate::cases::{Case, TokenSpread};
use crate::{draws, experts, quantised, scaled};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::random::Stream;
use mixfleet_hal::{DType, KvShape, OpSig, Operand, OperandAccess};

/// Number of unused pages, which hold NaN as uninitialised memory might.
const SPARE_PAGES: u32 = 2;

impl Case {
    /// Returns the decoded operands in the order of [`OpSig::operands`]; written ones hold NaN. Paged KV is
    /// `[slots, kv_heads, head_dim]`, with NaN in slots that hold no token.
    pub fn operands(&self) -> Vec<Vec<f64>> {
        operands(self)
    }
}

fn operands(case: &Case) -> Vec<Vec<f64>> {
    let mut stream = Stream::new(case.seed);
    let pages = PagePlacement::new(case, &mut stream);
    case.sig
        .operands()
        .iter()
        .map(|operand| {
            let values = match operand.extent {
                Extent::PagesOf(page) => {
                    pages.pool(&case.sig, scaled::values_of(&case.sig, operand, page), &mut stream)
                }
                Extent::Exactly(n) if case.sig.has_scales(operand) => {
                    let n = to_usize(scaled::values_of(&case.sig, operand, n));
                    let is_written = operand.access == OperandAccess::Write;
                    if is_written { vec![f64::NAN; n] } else { floats(case, operand, n, &mut stream) }
                }
                Extent::Exactly(n) if operand.access == OperandAccess::Write => vec![f64::NAN; to_usize(n)],
                Extent::Exactly(n)
                    if let Some(values) = quantised::values(&case.sig, operand, to_usize(n), &mut stream) =>
                {
                    values
                }
                Extent::Exactly(n) if operand.dtype == DType::U32 => {
                    indices(case, operand, &pages, n, &mut stream)
                }
                Extent::Exactly(n) => floats(case, operand, to_usize(n), &mut stream),
            };
            scaled::decoded(&case.sig, operand, &scaled::encoded(&case.sig, operand, &values))
        })
        .collect()
}

/// Returns standard normal values mixed with ones that are known to break the operation.
fn floats(case: &Case, operand: &Operand, n: usize, stream: &mut Stream) -> Vec<f64> {
    let mut values: Vec<f64> = (0..n).map(|_| stream.next_normal()).collect();
    match (&case.sig, operand.name) {
        // scores spread over some tens, so that maxima move and weights underflow
        (OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. }, "q") => {
            values.iter_mut().for_each(|v| *v *= 3.0)
        }
        // exp(100) overflows f32; so does exp of the most negative f16
        (OpSig::SiluMul { .. } | OpSig::GeluMul { .. }, "gate") => {
            for (i, v) in values.iter_mut().enumerate().filter(|(i, _)| i % 5 == 3) {
                *v = [100.0, -100.0, 0.0, -30_000.0, -20.0][i / 5 % 5];
            }
        }
        // beyond the limits, where exp overflows, and where a sum with 1 cancels
        (OpSig::ClampedSwiglu { .. }, "gate_up") => {
            for (i, v) in values.iter_mut().enumerate().filter(|(i, _)| i % 5 == 3) {
                *v = [100.0, -100.0, 0.0, -1.0, 7.0][i / 5 % 5];
            }
        }
        // in the middle, near the cap and far beyond it
        (OpSig::SoftCap { cap, .. }, _) => {
            for (i, v) in values.iter_mut().enumerate() {
                *v *= f64::from(cap.0) * [0.01, 0.3, 1.0, 3.0, 1e6][i % 5];
            }
        }
        (OpSig::Route { .. }, "logits") => return experts::logits(case, stream),
        (OpSig::Route { .. }, "bias") => return experts::correction(case),
        // angles of real tables, scaled as YaRN does
        (OpSig::Rope { head_dim, part, .. }, "cos_sin") => {
            let dim = part.map_or(*head_dim, |part| part.length) as usize;
            let half = dim / 2;
            for row in values.chunks_mut(dim) {
                for i in 0..half {
                    let angle = stream.next_unit() * 1000.0;
                    (row[i], row[half + i]) = (1.2 * angle.cos(), 1.2 * angle.sin());
                }
            }
        }
        (OpSig::Sample { cols, .. }, _) => draws::logits(&mut values, *cols as usize, case.seed, stream),
        // beside scores, and far from them
        (OpSig::AttnPrefill { .. } | OpSig::AttnMerge { .. }, "sinks") => {
            for (i, v) in values.iter_mut().enumerate() {
                *v = if i % 4 == 3 { [100.0, -100.0][i / 4 % 2] } else { *v * 6.0 };
            }
        }
        (OpSig::AttnMerge { rows, .. }, "stat") => merge_stats(&mut values, *rows as usize),
        (OpSig::AttnMerge { parts, rows, head_dim, .. }, "acc") => {
            let (rows, dim) = (*rows as usize, *head_dim as usize);
            for i in (0..*parts as usize * rows).filter(|i| empty_part(i / rows, i % rows)) {
                values[i * dim..][..dim].fill(0.0);
            }
        }
        _ => {}
    }
    values
}

/// Whether a part is empty: all parts of row 1, and every third one of the others except the first.
fn empty_part(part: usize, row: usize) -> bool {
    row == 1 || (part + row) % 3 == 2
}

fn merge_stats(values: &mut [f64], rows: usize) {
    for (i, stat) in values.chunks_mut(2).enumerate() {
        let empty = empty_part(i / rows, i % rows);
        (stat[0], stat[1]) =
            if empty { (f64::NEG_INFINITY, 0.0) } else { (stat[0] * 20.0, 1.0 + stat[1].abs() * 10.0) };
    }
}

fn indices(case: &Case, operand: &Operand, pages: &PagePlacement, n: u64, stream: &mut Stream) -> Vec<f64> {
    match (&case.sig, &case.spread, operand.name) {
        (OpSig::Embed { vocab, .. } | OpSig::QuantisedEmbed { vocab, .. }, ..) => {
            let mut ids: Vec<f64> = (0..n).map(|_| stream.below(u64::from(*vocab)) as f64).collect();
            ids[0] = f64::from(*vocab - 1);
            ids
        }
        (OpSig::Sample { rows, cols, .. }, _, "parameters") => {
            draws::parameters(*rows, *cols, case.seed, stream)
        }
        (OpSig::GroupedGemm { .. }, _, "order") => experts::grouping(case).0,
        (OpSig::GroupedGemm { .. }, _, "starts") => experts::grouping(case).1,
        (OpSig::Sample { .. }, _, "history_start") => draws::history(case).0,
        (OpSig::Sample { .. }, _, "history") => draws::history(case).1,
        // reading a slot twice is allowed, writing it twice is not
        (OpSig::KvGather { .. }, ..) => {
            (0..n).map(|_| pages.slots[to_usize(stream.below(pages.slots.len() as u64))]).collect()
        }
        (.., "slots") => pages.slots[..to_usize(n)].to_vec(),
        (.., "pages") => pages.table.clone(),
        (_, TokenSpread::Queries(spread), "query_start") => {
            let ends = spread.iter().scan(0, |row, (queries, _)| {
                *row += queries;
                Some(f64::from(*row))
            });
            std::iter::once(0.0).chain(ends).collect()
        }
        (_, TokenSpread::Queries(spread), "context") => spread.iter().map(|s| f64::from(s.1)).collect(),
        (_, TokenSpread::Ranges(ranges), "range") => {
            ranges.iter().flat_map(|r| [f64::from(r.0), f64::from(r.1)]).collect()
        }
        _ => (0..n).map(|_| (stream.next_u64() >> 32) as f64).collect(),
    }
}

/// Where the tokens of a case are stored.
struct PagePlacement {
    /// Number of pages.
    count: u32,
    /// Page table, `[sequences, pages_max]`; entries beyond a sequence's context refer to a page of NaN, and
    /// those before all that its queries see to the first page that they see.
    table: Vec<f64>,
    /// Every slot that holds a token, in random order.
    slots: Vec<f64>,
}

impl PagePlacement {
    fn new(case: &Case, stream: &mut Stream) -> PagePlacement {
        // tokens of each sequence: the first one that is read, and the end
        let (page_tokens, pages_max, contexts): (u32, u32, Vec<[u32; 2]>) = match (&case.sig, &case.spread) {
            (
                OpSig::AttnPrefill { pages_max, window, kv: KvShape { page_tokens, .. }, .. },
                TokenSpread::Queries(spread),
            ) => {
                let first = |(queries, context): (u32, u32)| {
                    window.map_or(0, |window| (context - queries + 1).saturating_sub(window))
                };
                (*page_tokens, *pages_max, spread.iter().map(|&s| [first(s), s.1]).collect())
            }
            (
                OpSig::AttnDecode { pages_max, kv: KvShape { page_tokens, .. }, .. },
                TokenSpread::Ranges(ranges),
            ) => (*page_tokens, *pages_max, ranges.iter().map(|r| [r.0, r.1]).collect()),
            (
                OpSig::KvWrite { tokens, kv: KvShape { page_tokens, .. }, .. }
                | OpSig::KvGather { tokens, kv: KvShape { page_tokens, .. }, .. }
                | OpSig::KvScatter { tokens, kv: KvShape { page_tokens, .. }, .. },
                _,
            ) => (*page_tokens, 0, vec![[0, tokens + page_tokens]]),
            _ => return PagePlacement { count: 0, table: Vec::new(), slots: Vec::new() },
        };
        let used: u32 = contexts.iter().map(|[_, end]| end.div_ceil(page_tokens)).sum();
        let count = used + SPARE_PAGES;
        let mut free = shuffled(count, stream);
        let spare = f64::from(free[0]);
        let (mut table, mut slots) = (Vec::new(), Vec::new());
        for [first, context] in contexts {
            let own: Vec<u32> = free.split_off(free.len() - context.div_ceil(page_tokens) as usize);
            for token in 0..context {
                let page = own[(token / page_tokens) as usize];
                slots.push(f64::from(page * page_tokens + token % page_tokens));
            }
            let mut row: Vec<f64> = own.iter().map(|&p| f64::from(p)).collect();
            // what no query sees any more is not there, as in layers that keep their window alone
            let gone = ((first / page_tokens) as usize).min(row.len().saturating_sub(1));
            if gone > 0 {
                let seen = row[gone];
                row[..gone].fill(seen);
            }
            row.resize(pages_max.max(to_u32(row.len())) as usize, spare);
            table.extend(row);
        }
        let order = shuffled(to_u32(slots.len()), stream);
        let slots = order.iter().map(|&i| slots[i as usize]).collect();
        PagePlacement { count, table, slots }
    }

    /// Returns paged KV with values in the slots that hold a token and NaN elsewhere.
    fn pool(&self, sig: &OpSig, page_elements: u64, stream: &mut Stream) -> Vec<f64> {
        let page_tokens = sig.kv().unwrap_or_else(|| unreachable!("{} has no pool", sig.name())).page_tokens;
        let width = to_usize(page_elements / u64::from(page_tokens));
        let mut pool = vec![f64::NAN; self.count as usize * to_usize(page_elements)]; // [slots, width]
        for &slot in &self.slots {
            pool[to_usize(slot) * width..][..width].fill_with(|| stream.next_normal());
        }
        pool
    }
}

/// Returns 0 .. n in random order (Fisher-Yates).
fn shuffled(n: u32, stream: &mut Stream) -> Vec<u32> {
    let mut items: Vec<u32> = (0..n).collect();
    for i in (1..items.len()).rev() {
        items.swap(i, to_usize(stream.below(i as u64 + 1)));
    }
    items
}
