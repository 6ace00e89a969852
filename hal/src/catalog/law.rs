//! Published kernel times of parts, thinned out to the points that predict the rest best.
//!
//! `laws/*.txt` are written by `cargo run --release -p mixfleet-hal --example laws`, one file per part. A law
//! begins with a line that says what it is of and how far its points predict its table; each further line is
//! a point: the shape as [`LawKind::sig`] takes it, and the time in microseconds.

use crate::profile::Point;
use crate::units::Seconds;
use crate::{DType, KvShape, OpSig};
use std::fmt;
use std::sync::LazyLock;

/// Head length and page size of the published attention kernels.
const HEAD_DIM: u32 = 128;
const PAGE_TOKENS: u32 = 16;

/// A kind of operation that a law is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LawKind {
    /// Matrix products.
    Gemm,
    /// Attention of one new token per sequence.
    AttnDecode,
    /// Attention of prompts.
    AttnPrefill,
}

impl LawKind {
    /// All kinds.
    pub const ALL: [LawKind; 3] = [LawKind::Gemm, LawKind::AttnDecode, LawKind::AttnPrefill];

    /// Returns the name of its operations; see [`OpSig::name`].
    pub fn name(self) -> &'static str {
        match self {
            LawKind::Gemm => "gemm",
            LawKind::AttnDecode => "attn_decode",
            LawKind::AttnPrefill => "attn_prefill",
        }
    }

    /// Returns the operation of this shape with weights or keys in `dtype`. The shape is `[m, n, k]`,
    /// `[sequences, keys of each, heads, KV heads]`, or `[sequences, new tokens of each, keys of each before
    /// them, heads, KV heads]`. `None` if the shape has another length or is too large.
    pub fn sig(self, dtype: DType, shape: &[u32]) -> Option<OpSig> {
        let kv = |kv_heads| KvShape {
            kv_heads,
            head_dim: HEAD_DIM,
            page_tokens: PAGE_TOKENS,
            dtype,
            latent: None,
        };
        let x = DType::Bf16;
        match (self, shape) {
            (LawKind::Gemm, &[m, n, k]) => {
                Some(OpSig::Gemm { m, n, k, x: dtype, weight: dtype, out: x, bias: false, accumulate: false })
            }
            (LawKind::AttnDecode, &[sequences, context, heads, kv_heads]) => Some(OpSig::AttnDecode {
                sequences,
                kv_tokens: u64::from(sequences) * u64::from(context),
                heads,
                pages_max: context.div_ceil(PAGE_TOKENS),
                x,
                kv: kv(kv_heads),
                cap: None,
            }),
            (LawKind::AttnPrefill, &[sequences, each, past, heads, kv_heads]) => {
                let (tokens, all) = (sequences.checked_mul(each)?, each.checked_add(past)?);
                let triangle = u64::from(tokens) * (u64::from(each) + 1) / 2;
                Some(OpSig::AttnPrefill {
                    tokens,
                    sequences,
                    pairs: u64::from(tokens) * u64::from(past) + triangle,
                    kv_tokens: u64::from(sequences) * u64::from(all),
                    heads,
                    pages_max: all.div_ceil(PAGE_TOKENS),
                    window: None,
                    sinks: false,
                    x,
                    kv: kv(kv_heads),
                    cap: None,
                })
            }
            _ => None,
        }
    }

    /// Returns the shape from which [`LawKind::sig`] makes `sig`.
    fn shape(sig: &OpSig) -> Vec<u32> {
        let each =
            |all: u64, sequences: u32| u32::try_from(all / u64::from(sequences.max(1))).unwrap_or(u32::MAX);
        match *sig {
            OpSig::Gemm { m, n, k, .. } => vec![m, n, k],
            OpSig::AttnDecode { sequences, kv_tokens, heads, kv, .. } => {
                vec![sequences, each(kv_tokens, sequences), heads, kv.kv_heads]
            }
            OpSig::AttnPrefill { sequences, tokens, kv_tokens, heads, kv, .. } => {
                let new = each(u64::from(tokens), sequences);
                vec![sequences, new, each(kv_tokens, sequences) - new, heads, kv.kv_heads]
            }
            _ => Vec::new(),
        }
    }
}

/// Measured points of one kind of operation on one part, and how far they predict the table that they are of.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredLaw {
    /// The kind of operation.
    pub kind: LawKind,
    /// Dtype of weights or keys.
    pub dtype: DType,
    /// The engine whose kernels were measured, with its version.
    pub engine: String,
    /// The table and its licence.
    pub source: String,
    /// Number of rows of the table, repeated ones counted once.
    pub rows: usize,
    /// Mean relative error of what the points predict, over all rows.
    pub error: f64,
    /// The same over the held-out rows, which the choice never used.
    pub error_unseen: f64,
    /// The points.
    pub points: Vec<Point>,
}

impl fmt::Display for MeasuredLaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MeasuredLaw { kind, dtype, engine, source, rows, error, error_unseen, points } = self;
        let (kind, dtype) = (kind.name(), dtype.name());
        write!(f, "law {kind} {dtype}; engine {engine}; rows {rows}; error {error:.4}; ")?;
        writeln!(f, "error_unseen {error_unseen:.4}; source {source}")?;
        for point in points {
            LawKind::shape(&point.sig).iter().try_for_each(|size| write!(f, "{size} "))?;
            writeln!(f, "{:.3}", point.time.0 * 1e6)?;
        }
        Ok(())
    }
}

impl MeasuredLaw {
    /// Reads the laws of a file; lines that begin with `#` say nothing.
    ///
    /// # Errors
    /// The first line that is not understood.
    pub fn parse(text: &str) -> Result<Vec<MeasuredLaw>, String> {
        let mut laws: Vec<MeasuredLaw> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let wrong = || format!("'{line}' is neither a law heading nor a point");
            if line.starts_with("law ") {
                laws.push(head(line).ok_or_else(wrong)?);
                continue;
            }
            let law = laws.last_mut().ok_or_else(wrong)?;
            law.points.push(point(law.kind, law.dtype, line).ok_or_else(wrong)?);
        }
        Ok(laws)
    }
}

fn head(line: &str) -> Option<MeasuredLaw> {
    let field = |name: &str| line.split("; ").find_map(|field| field.strip_prefix(name)?.strip_prefix(' '));
    let (kind, dtype) = field("law")?.split_once(' ')?;
    Some(MeasuredLaw {
        kind: LawKind::ALL.into_iter().find(|known| known.name() == kind)?,
        dtype: [DType::Bf16, DType::F8E4m3].into_iter().find(|known| known.name() == dtype)?,
        engine: field("engine")?.to_owned(),
        source: field("source")?.to_owned(),
        rows: field("rows")?.parse().ok()?,
        error: field("error")?.parse().ok()?,
        error_unseen: field("error_unseen")?.parse().ok()?,
        points: Vec::new(),
    })
}

fn point(kind: LawKind, dtype: DType, line: &str) -> Option<Point> {
    let (shape, us) = line.rsplit_once(' ')?;
    let shape = shape.split(' ').map(|size| size.parse().ok()).collect::<Option<Vec<u32>>>()?;
    let time = Seconds(us.parse::<f64>().ok().filter(|us| *us > 0.0)? * 1e-6);
    Some(Point { sig: kind.sig(dtype, &shape)?, time })
}

/// The texts of the laws, by the part's id.
pub const LAW_FILES: [(&str, &str); 6] = [
    ("A100-SXM-80GB", include_str!("laws/a100-sxm-80gb.txt")),
    ("H100-SXM-80GB", include_str!("laws/h100-sxm-80gb.txt")),
    ("H200-SXM-141GB", include_str!("laws/h200-sxm-141gb.txt")),
    ("L40S", include_str!("laws/l40s.txt")),
    ("RTX-PRO-6000-SE", include_str!("laws/rtx-pro-6000-se.txt")),
    ("RTX-4090", include_str!("laws/rtx-4090.txt")),
];

/// Returns the laws of a part; none if nothing about it was published.
pub(super) fn laws(id: &str) -> &'static [MeasuredLaw] {
    static LAWS: LazyLock<Vec<(&str, Vec<MeasuredLaw>)>> = LazyLock::new(|| {
        LAW_FILES.map(|(id, text)| (id, MeasuredLaw::parse(text).expect("a law of the catalog"))).into()
    });
    LAWS.iter().find(|(known, _)| *known == id).map_or(&[], |(_, laws)| laws)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_law_survives_being_written_and_read() {
        for (id, text) in LAW_FILES {
            let laws = MeasuredLaw::parse(text).unwrap();
            let written: String = laws.iter().map(ToString::to_string).collect();
            assert_eq!(MeasuredLaw::parse(&written).unwrap(), laws, "{id}");
        }
    }

    #[test]
    fn every_law_has_at_most_40_points_of_its_own_kind() {
        for (id, _) in LAW_FILES {
            assert!(super::super::part(id).is_some(), "{id}");
            for law in laws(id) {
                assert!((1..=40).contains(&law.points.len()), "{id}");
                assert!(law.points.iter().all(|point| point.sig.name() == law.kind.name()), "{id}");
            }
        }
    }

    #[test]
    fn a_line_that_is_no_point_is_named() {
        let head = "law gemm bf16; engine a; rows 1; error 0.1; error_unseen 0.1; source b";
        for bad in ["1 2 3", "1 2 3 4 5", "1 2 3 -4", "1 2 x 4", "law gemm f64; engine a"] {
            let error = MeasuredLaw::parse(&format!("{head}\n{bad}\n")).unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
        assert!(MeasuredLaw::parse("1 2 3 4").is_err());
        assert_eq!(MeasuredLaw::parse(&format!("# why\n{head}\n1 2 3 4\n")).unwrap()[0].points.len(), 1);
    }
}
