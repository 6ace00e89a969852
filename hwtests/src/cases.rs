//! The test cases: every operation, every combination of dtypes, and the shapes at which kernels tend to
//! break.
//!
//! Dimensions are swept over 1, primes, and one below, at and above the tile sizes 8, 16, 32 and 64. Dtype
//! combinations are crossed with a few shapes, and shapes with a few combinations; the full product would
//! only repeat itself.

mod experts;
mod latent;
mod scaled;

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{CodeKind, DType, DeviceLimits, KvShape, OpSig, Quantised, Scalar, ScaleKind, ZeroKind};
use serde::{Deserialize, Serialize};

/// How thorough a conformance run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SuiteLevel {
    /// Each operation and dtype combination with a few shapes; takes seconds.
    Quick,
    /// All edge shapes.
    Full,
}

/// How tokens are distributed over sequences, which the signature leaves open.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenSpread {
    /// The signature determines everything.
    Even,
    /// For `AttnPrefill`: (new tokens, context) of each sequence.
    Queries(Vec<(u32, u32)>),
    /// For `AttnDecode`: (first, one past the last) key of each sequence.
    Ranges(Vec<(u32, u32)>),
    /// For `GroupedGemm`: rows of each expert.
    Experts(Vec<u32>),
    /// For `GroupedGemm` with a share of a layer's experts: choices of all experts before them, rows of each,
    /// and choices of all behind them.
    ExpertShare(Vec<u32>),
}

/// One test case, from whose fields the operands follow.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The operation under test.
    pub sig: OpSig,
    /// How tokens are distributed over sequences.
    pub spread: TokenSpread,
    /// Seed of the random operands.
    pub seed: u64,
}

const EDGES: [u32; 18] = [1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65];
use DType::{Bf16, F16, F32};

struct CaseBuilder {
    cases: Vec<Case>,
    full: bool,
    page_tokens: u32,
}

/// Returns all cases of a level for a device with these limits.
pub fn cases(level: SuiteLevel, limits: &DeviceLimits) -> Vec<Case> {
    let page_tokens = limits.kv_page_tokens.max(1);
    let mut b = CaseBuilder { cases: Vec::new(), full: level == SuiteLevel::Full, page_tokens };
    b.rows();
    b.gemm();
    b.quantised();
    b.elements();
    b.latent();
    b.kv();
    b.prefill();
    b.decode();
    b.merge();
    b.routes();
    b.grouped();
    b.combine();
    b.scaled();
    b.shares();
    b.cases
}

/// Counts the visible query-key pairs of `AttnPrefill`.
fn pairs(spread: &[(u32, u32)], window: Option<u32>) -> u64 {
    let of = |&(queries, context): &(u32, u32)| {
        (context - queries..context).map(|p| u64::from((p + 1).min(window.unwrap_or(u32::MAX)))).sum::<u64>()
    };
    spread.iter().map(of).sum()
}

/// Shape of attention's heads.
#[derive(Clone, Copy)]
struct CaseHeads {
    ratio: u32,
    kv_heads: u32,
    head_dim: u32,
}

/// Which keys a query of a prefill sees, beside those before it.
#[derive(Clone, Copy)]
struct PrefillMask {
    window: Option<u32>,
    sinks: bool,
    cap: Option<Scalar>,
}

impl PrefillMask {
    const NONE: PrefillMask = PrefillMask { window: None, sinks: false, cap: None };

    /// A soft cap that most scores come near.
    const CAPPED: PrefillMask = PrefillMask { cap: Some(Scalar(5.0)), ..PrefillMask::NONE };

    fn window(tokens: u32, sinks: bool) -> PrefillMask {
        PrefillMask { window: Some(tokens), sinks, cap: None }
    }

    fn sinks(sinks: bool) -> PrefillMask {
        PrefillMask { window: None, sinks, cap: None }
    }
}

const SMALL: CaseHeads = CaseHeads { ratio: 2, kv_heads: 2, head_dim: 16 };

/// Whole rows share a scale.
const WHOLE: u32 = 1 << 20;

/// The formats that checkpoints have, and the other combinations of codes, scales and zeros.
fn kinds() -> Vec<Quantised> {
    use CodeKind::{E2m1, E4m3, I8, U4, U5, U6};
    use ScaleKind as Scale;
    use ZeroKind::{Middle, Minima, Points};
    let of = Quantised::in_rows;
    vec![
        of(U4, 32, Scale::Bf16, Middle),
        of(U4, 32, Scale::Bf16, Points),
        of(U4, 64, Scale::F16, Points),
        of(U4, 128, Scale::F32, Middle),
        of(U4, 32, Scale::F16, Middle),
        of(U4, 32, Scale::F16, Minima),
        of(U4, WHOLE, Scale::F32, Points),
        of(U4, 32, Scale::I8, Minima),
        of(U5, 32, Scale::I8, Minima),
        of(U6, 16, Scale::I8, Middle),
        of(U5, 32, Scale::F16, Points),
        of(U6, 32, Scale::Bf16, Middle),
        of(I8, 32, Scale::F16, Middle),
        of(I8, WHOLE, Scale::Bf16, Middle),
        of(I8, 64, Scale::F32, Points),
        of(I8, 32, Scale::F16, Minima),
        of(E4m3, WHOLE, Scale::Bf16, Middle),
        Quantised { group_rows: 128, ..of(E4m3, 128, Scale::F32, Middle) },
        Quantised { group_rows: 16, ..of(E4m3, 24, Scale::F32, Middle) },
        Quantised { group_rows: WHOLE, ..of(I8, WHOLE, Scale::F32, Middle) },
        of(E2m1, 32, Scale::F32, Middle),
        Quantised::MXFP4,
        Quantised::NVFP4,
    ]
}

impl CaseBuilder {
    fn push(&mut self, sig: OpSig, spread: TokenSpread) {
        let seed = self.cases.len() as u64 + 1;
        self.cases.push(Case { sig, spread, seed });
    }

    fn even(&mut self, sig: OpSig) {
        self.push(sig, TokenSpread::Even);
    }

    /// Returns `edges`, or a few of them at the quick level.
    fn sweep(&self) -> &'static [u32] {
        if self.full { &EDGES } else { &[1, 7, 33] }
    }

    fn rows(&mut self) {
        for (table, out) in two_dtypes() {
            self.even(OpSig::Embed { tokens: 5, vocab: 37, hidden: 33, table, out });
        }
        for &n in self.sweep() {
            self.even(OpSig::Embed { tokens: n, vocab: 19, hidden: 64, table: Bf16, out: F32 });
            self.even(OpSig::Embed { tokens: 3, vocab: n, hidden: n, table: Bf16, out: F32 });
        }
        let eps = Scalar(1e-5);
        for (x, weight) in two_dtypes() {
            for out in DType::FLOATS {
                self.even(OpSig::RmsNorm { rows: 3, cols: 67, eps, x, weight, out });
            }
        }
        for &n in self.sweep() {
            self.even(OpSig::RmsNorm { rows: n, cols: 64, eps, x: F32, weight: Bf16, out: F32 });
            self.even(OpSig::RmsNorm { rows: 2, cols: n, eps, x: F32, weight: F32, out: F32 });
            self.even(OpSig::RmsNorm {
                rows: 2,
                cols: n,
                eps: Scalar(1.0),
                x: Bf16,
                weight: Bf16,
                out: Bf16,
            });
        }
        self.even(OpSig::RmsNorm { rows: 2, cols: 4099, eps, x: F32, weight: Bf16, out: F32 });
    }

    fn gemm(&mut self) {
        let sig = |(m, n, k), (x, weight, out), (bias, accumulate)| OpSig::Gemm {
            m,
            n,
            k,
            x,
            weight,
            out,
            bias,
            accumulate,
        };
        for (x, weight) in two_dtypes() {
            for out in DType::FLOATS {
                for shape in [(1, 35, 70), (3, 18, 33), (20, 19, 40)] {
                    self.even(sig(shape, (x, weight, out), (true, true)));
                }
            }
        }
        for flags in [(false, false), (true, false), (false, true)] {
            for m in [1, 4, 17] {
                self.even(sig((m, 33, 65), (F32, Bf16, F32), flags));
                self.even(sig((m, 32, 64), (Bf16, Bf16, Bf16), flags));
            }
        }
        let mixes: &[_] = if self.full {
            &[(F32, F32, F32), (F32, Bf16, F32), (Bf16, Bf16, Bf16)]
        } else {
            &[(F32, Bf16, F32)]
        };
        for &dtypes in mixes {
            for &e in self.sweep() {
                for shape in [(e, 19, 37), (5, e, 37), (1, e, 37), (5, 19, e), (1, 19, e), (e, e, e)] {
                    self.even(sig(shape, dtypes, (false, false)));
                }
            }
            for shape in [(1, 67, 4096), (2, 130, 515), (70, 129, 257)] {
                self.even(sig(shape, dtypes, (false, false)));
            }
        }
    }

    /// Products and lookups with quantised weights.
    fn quantised(&mut self) {
        let gemm = |(m, n, k), weight, (x, out), (bias, accumulate)| OpSig::QuantisedGemm {
            m,
            n,
            k,
            x,
            weight,
            out,
            bias,
            accumulate,
        };
        for (index, weight) in kinds().into_iter().enumerate() {
            // a kernel is compiled for each kind and dtypes
            let narrow = self.full || index % 6 == 1;
            let (one, more) = if weight.scale == ScaleKind::I8 { (256, 768) } else { (32, 160) };
            for (k, other) in [(one, more), (more, one)] {
                self.even(gemm((1, 35, k), weight, (F32, F32), (true, true)));
                self.even(gemm((3, 19, other), weight, (F32, F32), (false, false)));
                self.even(gemm((17, 33, k), weight, (F32, F32), (false, true)));
                if narrow {
                    self.even(gemm((2, 9, other), weight, (Bf16, Bf16), (true, false)));
                    self.even(gemm((9, 21, k), weight, (Bf16, F32), (false, true)));
                    self.even(gemm((1, 5, k), weight, (F16, F16), (false, false)));
                }
                self.even(OpSig::QuantisedEmbed { tokens: 5, vocab: 37, hidden: k, table: weight, out: F32 });
            }
            if narrow {
                self.even(OpSig::QuantisedEmbed {
                    tokens: 3,
                    vocab: 19,
                    hidden: one,
                    table: weight,
                    out: Bf16,
                });
            }
            if self.full {
                for m in [2, 4, 5, 6, 7, 8, 9, 16, 31, 65] {
                    self.even(gemm((m, 18, more), weight, (F32, F32), (false, false)));
                    self.even(gemm((m, 40, more), weight, (Bf16, Bf16), (false, false)));
                }
                self.even(gemm((1, 131, 4 * more), weight, (F32, F32), (false, false)));
                self.even(gemm((70, 129, more), weight, (F32, F32), (true, true)));
                self.even(gemm((70, 129, more), weight, (F16, F32), (true, true)));
            }
        }
    }

    fn elements(&mut self) {
        for x in DType::FLOATS {
            for &n in self.sweep().iter().chain(&[1009, 4096]) {
                self.even(OpSig::SiluMul { elements: u64::from(n), x });
                self.even(OpSig::GeluMul { elements: u64::from(n), x });
                let (alpha, limit) = (Scalar(1.702), Scalar(7.0));
                self.even(OpSig::ClampedSwiglu { elements: u64::from(n), alpha, limit, x });
                self.even(OpSig::Add { elements: u64::from(n), x });
            }
            for &head_dim in self.head_dims() {
                self.even(OpSig::Rope { tokens: 3, heads: 5, head_dim, part: None, x });
            }
            self.even(OpSig::Rope { tokens: 1, heads: 1, head_dim: 2, part: None, x });
            self.even(OpSig::Rope { tokens: 17, heads: 3, head_dim: 6, part: None, x });
        }
        for &n in self.sweep().iter().chain(&[1009, 4096]) {
            self.even(OpSig::SoftCap { elements: u64::from(n), cap: Scalar(30.0) });
        }
        for &n in self.sweep() {
            self.even(OpSig::Copy { bytes: u64::from(n) * 4 });
            self.even(OpSig::Fill { bytes: u64::from(n) * 4, word: 0xDEAD_BEEF });
        }
        self.draws();
        self.even(OpSig::Copy { bytes: 100_004 });
        self.even(OpSig::Fill { bytes: 100_004, word: 0 });
    }

    /// A case has as many rows as there are kinds of logits and of parameters, or they change with the seed.
    fn draws(&mut self) {
        for &n in self.sweep() {
            for (history, tops) in [(0, 0), (9, 3), (0, 70)] {
                self.even(OpSig::Sample { rows: 3, cols: n, history, tops });
            }
            self.even(OpSig::Sample { rows: n, cols: 130, history: 4 * n, tops: 1 });
        }
        for (history, tops) in [(0, 0), (300, 0), (1000, 5)] {
            for _ in 0..if self.full { 11 } else { 1 } {
                self.even(OpSig::Sample { rows: 17, cols: 257, history, tops });
            }
            self.even(OpSig::Sample { rows: 4, cols: 32_003, history, tops });
        }
        self.even(OpSig::Sample { rows: 5, cols: 4096, history: 12_000, tops: 20 });
        self.even(OpSig::Sample { rows: 2, cols: 128_256, history: 0, tops: 20 });
    }

    fn head_dims(&self) -> &'static [u32] {
        if self.full { &[8, 12, 16, 32, 64, 80, 128] } else { &[16, 80] }
    }

    /// Returns the device's preferred page size and others that a peer may use.
    fn page_sizes(&self) -> Vec<u32> {
        let mut sizes = if self.full { vec![self.page_tokens, 1, 5, 16, 32] } else { vec![self.page_tokens] };
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn kv(&mut self) {
        for page_tokens in self.page_sizes() {
            for (kv, other) in two_dtypes() {
                let (kv_heads, head_dim) = (2, 16);
                for tokens in [1, page_tokens + 1] {
                    self.even(OpSig::KvWrite {
                        tokens,
                        x: other,
                        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                    });
                    self.even(OpSig::KvGather {
                        tokens,
                        wire: other,
                        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                    });
                    self.even(OpSig::KvScatter {
                        tokens,
                        wire: other,
                        kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                    });
                }
            }
        }
        for &head_dim in self.head_dims() {
            for kv_heads in [1, 3, 8] {
                let (tokens, page_tokens) = (7, self.page_tokens);
                self.even(OpSig::KvWrite {
                    tokens,
                    x: F32,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: Bf16, latent: None },
                });
                self.even(OpSig::KvGather {
                    tokens,
                    wire: F32,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: F16, latent: None },
                });
            }
        }
    }

    fn attn_prefill(
        &mut self,
        spread: &[(u32, u32)],
        shape: CaseHeads,
        page_tokens: u32,
        mask: PrefillMask,
        x: DType,
        dtype: DType,
    ) {
        let CaseHeads { kv_heads, head_dim, .. } = shape;
        let kv = KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None };
        self.prefill_over(spread, shape, kv, mask, x);
    }

    fn prefill_over(
        &mut self,
        spread: &[(u32, u32)],
        shape: CaseHeads,
        kv: KvShape,
        mask: PrefillMask,
        x: DType,
    ) {
        let PrefillMask { window, sinks, cap } = mask;
        let longest = spread.iter().map(|s| s.1).max().unwrap_or(0);
        let sig = OpSig::AttnPrefill {
            tokens: spread.iter().map(|s| s.0).sum(),
            sequences: to_u32(spread.len()),
            pairs: pairs(spread, window),
            kv_tokens: spread.iter().map(|s| u64::from(s.1)).sum(),
            heads: shape.ratio * shape.kv_heads,
            pages_max: longest.div_ceil(kv.page_tokens) + 1,
            window,
            sinks,
            x,
            kv,
            cap,
        };
        self.push(sig, TokenSpread::Queries(spread.to_vec()));
    }

    fn prefill(&mut self) {
        let p = self.page_tokens;
        let unlike = [(1, 1), (5, 9), (3, (p + 1).max(3)), (1, 40), (17, 17)];
        for (x, kv) in two_dtypes() {
            self.attn_prefill(&unlike, SMALL, p, PrefillMask::NONE, x, kv);
            self.attn_prefill(&unlike, SMALL, p, PrefillMask::window(8, true), x, kv);
            self.attn_prefill(&unlike, SMALL, p, PrefillMask::CAPPED, x, kv);
        }
        let (x, kv) = (F32, Bf16);
        for (ratio, kv_heads) in (1..=8).map(|ratio| (ratio, 2)).chain([(3, 1), (1, 5)]) {
            if self.full || ratio % 3 == 1 {
                self.attn_prefill(
                    &[(2, 2), (3, 11)],
                    CaseHeads { ratio, kv_heads, head_dim: 16 },
                    p,
                    PrefillMask::NONE,
                    x,
                    kv,
                );
            }
        }
        for &head_dim in self.head_dims() {
            let shape = CaseHeads { ratio: 3, kv_heads: 2, head_dim };
            self.attn_prefill(&[(7, 7), (4, 30)], shape, p, PrefillMask::NONE, x, kv);
            self.attn_prefill(&[(9, 9), (3, 20)], shape, p, PrefillMask::sinks(true), x, kv);
            self.attn_prefill(&[(5, 70)], shape, p, PrefillMask::window(33, true), Bf16, Bf16);
            self.attn_prefill(&[(5, 70)], shape, p, PrefillMask::CAPPED, Bf16, Bf16);
            self.attn_prefill(&[(7, 7), (4, 30)], shape, p, PrefillMask::window(6, false), Bf16, Bf16);
        }
        for page_tokens in self.page_sizes() {
            for context in [page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens + 1] {
                if context > 0 {
                    self.attn_prefill(
                        &[(1, context), (context, context)],
                        SMALL,
                        page_tokens,
                        PrefillMask::NONE,
                        x,
                        kv,
                    );
                }
            }
        }
        // windows below, at and above the context, and at the edge of a page
        for window in [1, 2, p, 19, 20, 21] {
            self.attn_prefill(
                &[(20, 20), (3, 45), (1, 20)],
                SMALL,
                p,
                PrefillMask::window(window, false),
                x,
                kv,
            );
            self.attn_prefill(&[(20, 20), (3, 45)], SMALL, p, PrefillMask::window(window, true), x, kv);
        }
        // a sequence without new tokens between two that have some
        self.attn_prefill(&[(2, 5), (0, 3), (4, 4)], SMALL, p, PrefillMask::NONE, x, kv);
        for &e in self.sweep() {
            self.attn_prefill(
                &[(e, e + 2)],
                CaseHeads { ratio: 2, kv_heads: 1, head_dim: 16 },
                p,
                PrefillMask::sinks(e % 2 == 0),
                x,
                kv,
            );
        }
    }

    fn attn_decode(
        &mut self,
        ranges: &[(u32, u32)],
        shape: CaseHeads,
        page_tokens: u32,
        x: DType,
        kv: DType,
    ) {
        self.decode_capped(ranges, shape, page_tokens, None, x, kv);
    }

    fn decode_capped(
        &mut self,
        ranges: &[(u32, u32)],
        shape: CaseHeads,
        page_tokens: u32,
        cap: Option<Scalar>,
        x: DType,
        kv: DType,
    ) {
        let longest = ranges.iter().map(|r| r.1).max().unwrap_or(0);
        let sig = OpSig::AttnDecode {
            sequences: to_u32(ranges.len()),
            kv_tokens: ranges.iter().map(|r| u64::from(r.1 - r.0)).sum(),
            heads: shape.ratio * shape.kv_heads,
            pages_max: longest.div_ceil(page_tokens) + 1,
            x,
            kv: KvShape {
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                page_tokens,
                dtype: kv,
                latent: None,
            },
            cap,
        };
        self.push(sig, TokenSpread::Ranges(ranges.to_vec()));
    }

    fn decode(&mut self) {
        let p = self.page_tokens;
        let unlike = [(0, 1), (0, 0), (3, p + 2), (p, p), (0, 70), (p - 1, p + 1)];
        for (x, kv) in two_dtypes() {
            self.attn_decode(&unlike, SMALL, p, x, kv);
            self.decode_capped(&unlike, SMALL, p, PrefillMask::CAPPED.cap, x, kv);
        }
        let (x, kv) = (F32, Bf16);
        for (ratio, kv_heads) in (1..=8).map(|ratio| (ratio, 2)).chain([(3, 1), (1, 5)]) {
            if self.full || ratio % 3 == 1 {
                self.attn_decode(&[(0, 11), (2, 3)], CaseHeads { ratio, kv_heads, head_dim: 16 }, p, x, kv);
            }
        }
        for &head_dim in self.head_dims() {
            let shape = CaseHeads { ratio: 3, kv_heads: 2, head_dim };
            self.attn_decode(&[(0, 37), (5, 23)], shape, p, x, kv);
            self.attn_decode(&[(0, 37), (5, 23)], shape, p, Bf16, F16);
            self.decode_capped(&[(0, 37), (5, 23)], shape, p, PrefillMask::CAPPED.cap, Bf16, Bf16);
        }
        for page_tokens in self.page_sizes() {
            for end in [0, 1, page_tokens - 1, page_tokens, page_tokens + 1] {
                self.attn_decode(&[(0, end), (end / 2, end + page_tokens)], SMALL, page_tokens, x, kv);
            }
        }
        for &e in self.sweep() {
            self.attn_decode(&vec![(0, 3); e as usize], SMALL, p, x, kv);
        }
        self.attn_decode(&[(0, 0)], SMALL, p, x, kv);
        self.attn_decode(&[(0, 1000), (7, 777)], SMALL, p, x, kv);
    }

    fn merge(&mut self) {
        for out in DType::FLOATS {
            for parts in [1, 2, 3, 7, 16] {
                self.even(OpSig::AttnMerge { parts, rows: 6, head_dim: 16, sinks: 0, out });
                self.even(OpSig::AttnMerge { parts, rows: 12, head_dim: 16, sinks: 6, out });
            }
        }
        for &n in self.sweep() {
            self.even(OpSig::AttnMerge { parts: 3, rows: n, head_dim: 80, sinks: 0, out: F32 });
            self.even(OpSig::AttnMerge { parts: 1, rows: 2 * n, head_dim: 24, sinks: n, out: F32 });
        }
        for &head_dim in self.head_dims() {
            self.even(OpSig::AttnMerge { parts: 4, rows: 5, head_dim, sinks: 0, out: Bf16 });
            self.even(OpSig::AttnMerge { parts: 2, rows: 9, head_dim, sinks: 3, out: Bf16 });
        }
    }
}

fn two_dtypes() -> impl Iterator<Item = (DType, DType)> {
    DType::FLOATS.into_iter().flat_map(|a| DType::FLOATS.into_iter().map(move |b| (a, b)))
}
