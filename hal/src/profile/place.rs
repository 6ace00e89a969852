//! Feature coordinates of operations, and distances between them.

use crate::{DType, KvShape, MatrixKind, OpSig, Quantised};

/// Number of coordinates: log2 of the operation's bytes, then of its shape; unused ones are 0.
pub(super) const DIMENSIONS: usize = 6;
/// An operation's coordinates within its class.
pub(super) type FeaturePoint = [f64; DIMENSIONS];

/// Weight of the byte count in the distance, relative to 1 for the others; caches make efficiency jump along
/// lines of equal traffic.
const BYTES_WEIGHT: f64 = 2.0;

/// Operations that run the same kernels: the kind, the input dtype, and the dtype of weights or keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KernelClass {
    pub(super) name: &'static str,
    pub(super) dtypes: [DType; 2],
    /// Whether several query heads share a KV head in decode attention, for which engines have a separate
    /// kernel.
    pub(super) grouped: bool,
    /// How the weights are quantised, if they are.
    pub(super) quantised: Option<Quantised>,
}

impl KernelClass {
    pub(super) fn of(sig: &OpSig) -> Self {
        let dtypes = match *sig {
            OpSig::Gemm { x, weight, .. }
            | OpSig::GroupedGemm { x, weight: MatrixKind::Plain(weight), .. } => [x, weight],
            OpSig::QuantisedGemm { x, .. } | OpSig::GroupedGemm { x, .. } => [x, x],
            OpSig::AttnPrefill { x, kv: KvShape { dtype: kv, .. }, .. }
            | OpSig::AttnDecode { x, kv: KvShape { dtype: kv, .. }, .. } => [x, kv],
            _ => [narrowest(sig); 2],
        };
        let quantised = match *sig {
            OpSig::QuantisedGemm { weight, .. }
            | OpSig::GroupedGemm { weight: MatrixKind::Quantised(weight), .. } => Some(weight),
            OpSig::QuantisedEmbed { table, .. } => Some(table),
            _ => None,
        };
        KernelClass { name: sig.name(), dtypes, grouped: grouped(sig), quantised }
    }
}

/// Returns the Euclidean distance, with bytes weighted.
pub(super) fn distance(a: &FeaturePoint, b: &FeaturePoint) -> f64 {
    let bytes = along_bytes(a, b);
    (1..DIMENSIONS).map(|d| (a[d] - b[d]).powi(2)).sum::<f64>().mul_add(1.0, bytes * bytes).sqrt()
}

/// Returns the part of [`distance`] due to bytes alone.
pub(super) fn along_bytes(a: &FeaturePoint, b: &FeaturePoint) -> f64 {
    BYTES_WEIGHT * (a[0] - b[0]).abs()
}

/// Returns the coordinates of an operation within its kind.
pub(super) fn coordinates(sig: &OpSig) -> [f64; DIMENSIONS] {
    let log = |value: f64| value.max(0.25).log2();
    let n = |value: u32| log(f64::from(value));
    let per = |a: u64, b: u32| log(a as f64 / f64::from(b.max(1)));
    let shape: [f64; 5] = match *sig {
        OpSig::Gemm { m, n: columns, k, .. } | OpSig::QuantisedGemm { m, n: columns, k, .. } => {
            [n(m), n(columns), n(k), 0.0, 0.0]
        }
        OpSig::AttnPrefill { tokens, sequences, pairs, heads, kv, .. } => {
            let (ratio, head_dim) = heads_of(heads, kv);
            [
                per(u64::from(tokens), sequences),
                per(pairs, tokens),
                n(sequences),
                log(ratio),
                n(kv.kv_heads) + log(head_dim),
            ]
        }
        OpSig::AttnDecode { sequences, kv_tokens, heads, kv, .. } => {
            let (ratio, head_dim) = heads_of(heads, kv);
            [n(sequences), per(kv_tokens, sequences), log(ratio), n(kv.kv_heads), log(head_dim)]
        }
        OpSig::Embed { tokens, hidden, .. } | OpSig::QuantisedEmbed { tokens, hidden, .. } => {
            [n(tokens), n(hidden), 0.0, 0.0, 0.0]
        }
        OpSig::RmsNorm { rows, cols, .. } => [n(rows), n(cols), 0.0, 0.0, 0.0],
        OpSig::Sample { rows, cols, history, tops } => [n(rows), n(cols), n(history), n(tops), 0.0],
        OpSig::Rope { tokens, heads, head_dim, .. } => [n(tokens), n(heads), n(head_dim), 0.0, 0.0],
        OpSig::KvWrite { tokens, kv: KvShape { kv_heads, head_dim, .. }, .. }
        | OpSig::KvGather { tokens, kv: KvShape { kv_heads, head_dim, .. }, .. }
        | OpSig::KvScatter { tokens, kv: KvShape { kv_heads, head_dim, .. }, .. } => {
            [n(tokens), n(kv_heads), n(head_dim), 0.0, 0.0]
        }
        OpSig::AttnMerge { parts, rows, head_dim, .. } => [n(parts), n(rows), n(head_dim), 0.0, 0.0],
        OpSig::Route { tokens, routing, .. } => {
            [n(tokens), n(routing.experts), n(routing.active), n(routing.groups), 0.0]
        }
        // rows of a touched expert, as of a product
        OpSig::GroupedGemm { grouped, n: columns, k, .. } => {
            [per(grouped.own().into(), grouped.touched), n(columns), n(k), n(grouped.touched), 0.0]
        }
        OpSig::Combine { tokens, active, cols, .. } => [n(tokens), n(active), n(cols), 0.0, 0.0],
        OpSig::SiluMul { .. }
        | OpSig::GeluMul { .. }
        | OpSig::ClampedSwiglu { .. }
        | OpSig::SoftCap { .. }
        | OpSig::Add { .. }
        | OpSig::CopyColumns { .. }
        | OpSig::Copy { .. }
        | OpSig::Fill { .. } => [0.0; 5],
    };
    [log(sig.bytes()), shape[0], shape[1], shape[2], shape[3], shape[4]]
}

/// Query heads per KV head, and the length of a head. Latents (keys that contain their values) count as keys
/// and values of half the stored length, with as many query heads as give the same arithmetic.
fn heads_of(heads: u32, kv: KvShape) -> (f64, f64) {
    let (ratio, head_dim) = (f64::from(heads) / f64::from(kv.kv_heads.max(1)), f64::from(kv.head_dim));
    if kv.latent.is_none() {
        return (ratio, head_dim);
    }
    let arithmetic = |key: f64, value: f64| 2.0 * key + 2.0 * value + 1.0;
    let half = head_dim / 2.0;
    (ratio * arithmetic(head_dim, f64::from(kv.value_dim())) / arithmetic(half, half), half)
}

/// Returns the distance of two operations of one class, apart from their shapes.
pub(super) fn mismatch(a: &OpSig, b: &OpSig) -> f64 {
    let unlike = |differs: bool, distance: f64| if differs { distance } else { 0.0 };
    let pages = |p: u32, q: u32| 0.5 * (f64::from(p.max(1)) / f64::from(q.max(1))).log2().abs();
    match (*a, *b) {
        (
            OpSig::Gemm { out, bias, accumulate, .. },
            OpSig::Gemm { out: out2, bias: bias2, accumulate: accumulate2, .. },
        ) => {
            unlike(out != out2, 0.25) + unlike(accumulate != accumulate2, 0.25) + unlike(bias != bias2, 0.25)
        }
        (OpSig::GroupedGemm { out, bias, .. }, OpSig::GroupedGemm { out: out2, bias: bias2, .. }) => {
            unlike(out != out2, 0.25) + unlike(bias != bias2, 0.25)
        }
        (
            OpSig::AttnPrefill { window, kv: KvShape { page_tokens, .. }, .. },
            OpSig::AttnPrefill { window: window2, kv: KvShape { page_tokens: page2, .. }, .. },
        ) => unlike(window.is_some() != window2.is_some(), 1.0) + pages(page_tokens, page2),
        (
            OpSig::AttnDecode { kv: KvShape { page_tokens, .. }, .. },
            OpSig::AttnDecode { kv: KvShape { page_tokens: page2, .. }, .. },
        ) => pages(page_tokens, page2),
        _ => 0.0,
    }
}

/// Whether several query heads share a KV head.
fn grouped(sig: &OpSig) -> bool {
    matches!(*sig, OpSig::AttnDecode { heads, kv: KvShape { kv_heads, .. }, .. } if heads > kv_heads)
}

/// Returns the dtype by which kernels of the small operations differ most.
fn narrowest(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Embed { table: a, out: b, .. }
        | OpSig::RmsNorm { x: a, out: b, .. }
        | OpSig::KvWrite { x: a, kv: KvShape { dtype: b, .. }, .. }
        | OpSig::KvGather { wire: b, kv: KvShape { dtype: a, .. }, .. }
        | OpSig::KvScatter { wire: a, kv: KvShape { dtype: b, .. }, .. } => {
            if a.size_bytes() <= b.size_bytes() { a } else { b }
        }
        OpSig::Rope { x, .. }
        | OpSig::CopyColumns { x, .. }
        | OpSig::SiluMul { x, .. }
        | OpSig::GeluMul { x, .. }
        | OpSig::ClampedSwiglu { x, .. }
        | OpSig::Combine { x, .. }
        | OpSig::Add { x, .. }
        | OpSig::AttnMerge { out: x, .. } => x,
        _ => DType::F32,
    }
}
