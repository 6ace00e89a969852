//! The arithmetic and the traffic of operations.

use crate::op::{Extent, KvShape, OpSig, OperandAccess};
use crate::operand::product;

/// Arithmetic of a query and a key that it sees: `q.k`, `p.v`, and the exponential.
fn per_pair(kv: KvShape) -> f64 {
    2.0 * f64::from(kv.head_dim) + 2.0 * f64::from(kv.value_dim()) + 1.0
}

impl OpSig {
    /// Counts floating-point operations: two for a multiply-add, one for an exponential or a division.
    pub fn flops(&self) -> f64 {
        match *self {
            OpSig::Gemm { m, n, k, .. } | OpSig::QuantisedGemm { m, n, k, .. } => {
                2.0 * f64::from(m) * f64::from(n) * f64::from(k)
            }
            OpSig::AttnPrefill { pairs, heads, kv, .. } => pairs as f64 * f64::from(heads) * per_pair(kv),
            OpSig::AttnDecode { kv_tokens, heads, kv, .. } => {
                kv_tokens as f64 * f64::from(heads) * per_pair(kv)
            }
            OpSig::AttnMerge { parts, rows, head_dim, .. } => {
                2.0 * f64::from(parts) * f64::from(rows) * f64::from(head_dim)
            }
            OpSig::RmsNorm { rows, cols, .. } => 4.0 * f64::from(rows) * f64::from(cols),
            OpSig::Rope { tokens, heads, head_dim, part, .. } => {
                let rotated = part.map_or(head_dim, |part| part.length);
                3.0 * product(&[tokens, heads, rotated]) as f64
            }
            OpSig::SiluMul { elements, .. } => 4.0 * elements as f64,
            OpSig::ClampedSwiglu { elements, .. } => 6.0 * elements as f64,
            OpSig::GeluMul { elements, .. } => 8.0 * elements as f64,
            OpSig::SoftCap { elements, .. } => 6.0 * elements as f64,
            OpSig::Route { tokens, routing, .. } => routing.flops(tokens),
            OpSig::GroupedGemm { grouped, n, k, .. } => {
                2.0 * f64::from(grouped.own()) * f64::from(n) * f64::from(k)
            }
            OpSig::Combine { tokens, active, cols, .. } => 2.0 * product(&[tokens, active, cols]) as f64,
            OpSig::Add { elements, .. } => elements as f64,
            OpSig::Embed { .. }
            | OpSig::QuantisedEmbed { .. }
            | OpSig::KvWrite { .. }
            | OpSig::CopyColumns { .. }
            | OpSig::Sample { .. }
            | OpSig::Copy { .. }
            | OpSig::Fill { .. }
            | OpSig::KvGather { .. }
            | OpSig::KvScatter { .. } => 0.0,
        }
    }

    /// Counts the bytes that must cross the device's memory at least once: every operand once, but only the
    /// rows in use of a table or of paged KV.
    pub fn bytes(&self) -> f64 {
        let dense: u64 = self
            .operands()
            .iter()
            .map(|operand| match (operand.extent, operand.access) {
                (Extent::Exactly(n), OperandAccess::ReadWrite) => 2 * n * operand.dtype.size_bytes(),
                (Extent::Exactly(n), _) => n * operand.dtype.size_bytes(),
                (Extent::PagesOf(_), _) => 0,
            })
            .sum();
        let rows = |tokens: u64, kv: KvShape| tokens * kv.token() * kv.dtype.size_bytes();
        let total = match *self {
            OpSig::Embed { tokens, vocab, hidden, table, .. } => {
                dense
                    - (product(&[vocab, hidden]) - product(&[tokens.min(vocab), hidden])) * table.size_bytes()
            }
            OpSig::GroupedGemm { grouped, n, k, weight, out, bias, .. } => {
                // a row of another expert's is neither read nor written, though `out` counts as both
                let kept = match grouped.others {
                    0 => 0,
                    others => product(&[grouped.choices, n]) + product(&[others, n]),
                };
                let bias = if bias { u64::from(n) * weight.bias().size_bytes() } else { 0 };
                let idle = weight.bytes(grouped.idle(), n, k) + u64::from(grouped.idle()) * bias;
                dense - idle - kept * out.size_bytes()
            }
            OpSig::QuantisedEmbed { tokens, vocab, hidden, table, .. } => {
                dense - table.bytes(1, vocab, hidden) + table.bytes(1, tokens.min(vocab), hidden)
            }
            OpSig::Rope { tokens, heads, head_dim, part: Some(part), x } => {
                dense - 2 * product(&[tokens, heads, head_dim - part.length]) * x.size_bytes()
            }
            OpSig::CopyColumns { rows, cols, x, .. } => 2 * product(&[rows, cols]) * x.size_bytes(),
            // only penalties write
            OpSig::Sample { rows, cols, history, .. } => {
                dense - product(&[rows, cols]) * 4 + u64::from(history) * 4
            }
            OpSig::KvWrite { tokens, kv, .. }
            | OpSig::KvGather { tokens, kv, .. }
            | OpSig::KvScatter { tokens, kv, .. } => dense + rows(u64::from(tokens), kv),
            OpSig::AttnPrefill { kv_tokens, kv, .. } | OpSig::AttnDecode { kv_tokens, kv, .. } => {
                dense + rows(kv_tokens, kv)
            }
            _ => dense,
        };
        total as f64
    }
}
