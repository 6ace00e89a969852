//! Cases of mixtures of experts.

use super::{CaseBuilder, TokenSpread, two_dtypes};
use mixfleet_hal::DType::{self, Bf16, F16, F32};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{
    CodeKind, ExpertRouting, GroupedRows, MatrixKind, OpSig, Quantised, Scalar, ScaleKind, Scoring, ZeroKind,
};

/// The dtypes of a grouped product.
#[derive(Clone, Copy)]
struct GroupedDtypes {
    x: DType,
    weight: MatrixKind,
    out: DType,
}

impl GroupedDtypes {
    fn of(x: DType, weight: MatrixKind) -> GroupedDtypes {
        GroupedDtypes { x, weight, out: x }
    }
}

impl CaseBuilder {
    pub(super) fn routes(&mut self) {
        let softmax = ExpertRouting::softmax;
        let grouped = |experts, active, groups, groups_active, group_best| ExpertRouting {
            scoring: Scoring::Sigmoid,
            groups,
            groups_active,
            group_best,
            scale: Scalar(2.5),
            ..softmax(experts, active, true)
        };
        for &n in self.sweep() {
            for normalise in [false, true] {
                self.even(OpSig::Route { tokens: n, bias: false, routing: softmax(8, 2, normalise) });
                self.even(OpSig::Route { tokens: 5, bias: false, routing: softmax(n, n.min(3), normalise) });
            }
            self.even(OpSig::Route { tokens: n, bias: true, routing: grouped(8, 2, 1, 1, 1) });
            self.even(OpSig::Route { tokens: n, bias: true, routing: grouped(16, 4, 4, 2, 2) });
        }
        // every expert, and one of one, as the gate of a shared expert
        self.even(OpSig::Route { tokens: 9, bias: false, routing: softmax(7, 7, false) });
        let gate = ExpertRouting { scoring: Scoring::Sigmoid, ..softmax(1, 1, false) };
        self.even(OpSig::Route { tokens: 9, bias: false, routing: gate });
        // as published: Qwen3-30B-A3B, gpt-oss-120b, DeepSeek-V2-Lite, DeepSeek-V3
        let large = [
            (false, softmax(128, 8, true)),
            (false, softmax(128, 4, true)),
            (false, softmax(64, 6, false)),
            (true, grouped(256, 8, 8, 4, 2)),
        ];
        for (bias, routing) in large {
            for tokens in [1, 3, 70] {
                self.even(OpSig::Route { tokens, bias, routing });
            }
        }
        let by_best =
            ExpertRouting { scoring: Scoring::Softmax, scale: Scalar(16.0), ..grouped(160, 6, 8, 3, 1) };
        self.even(OpSig::Route {
            tokens: 5,
            bias: false,
            routing: ExpertRouting { normalise: false, ..by_best },
        });
    }

    fn grouped_gemm(&mut self, rows: &[u32], fan: u32, n: u32, k: u32, dtypes: GroupedDtypes, bias: bool) {
        self.products(TokenSpread::Experts(rows.to_vec()), fan, n, k, dtypes, bias);
    }

    fn products(&mut self, spread: TokenSpread, fan: u32, n: u32, k: u32, dtypes: GroupedDtypes, bias: bool) {
        let GroupedDtypes { x, weight, out } = dtypes;
        let (rows, own) = match &spread {
            TokenSpread::Experts(rows) => (rows, &rows[..]),
            TokenSpread::ExpertShare(rows) => (rows, &rows[1..rows.len() - 1]),
            _ => return,
        };
        let choices = rows.iter().sum();
        let touched = to_u32(own.iter().filter(|&&rows| rows > 0).count());
        let others = choices - own.iter().sum::<u32>();
        let grouped = GroupedRows { choices, fan, experts: to_u32(own.len()), touched, others };
        self.push(OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias }, spread);
    }

    /// Shares of a layer's experts: first, middle and last ones, few rows and many, and none.
    pub(super) fn shares(&mut self) {
        let (plain, mxfp4) = (MatrixKind::Plain(Bf16), MatrixKind::Quantised(Quantised::MXFP4));
        let spreads: [&[u32]; 8] = [
            &[0, 2, 1, 3],
            &[3, 2, 1, 0],
            &[5, 1, 0, 4, 2],
            &[12, 0, 0, 0],
            &[0, 0, 0, 12],
            &[33, 65, 3, 67],
            &[70, 130, 2],
            &[1, 30, 7, 40],
        ];
        for rows in spreads {
            for (x, weight) in [(F32, plain), (Bf16, plain), (F32, mxfp4)] {
                let dtypes = GroupedDtypes::of(x, weight);
                self.products(TokenSpread::ExpertShare(rows.to_vec()), 1, 34, 64, dtypes, false);
                self.products(TokenSpread::ExpertShare(rows.to_vec()), 2, 38, 96, dtypes, true);
            }
        }
        let odd = TokenSpread::ExpertShare(vec![3, 30, 0, 1, 2]);
        self.products(odd, 1, 19, 37, GroupedDtypes::of(F32, plain), true);
    }

    pub(super) fn grouped(&mut self) {
        for (x, weight) in two_dtypes() {
            for out in DType::FLOATS {
                self.grouped_gemm(
                    &[2, 0, 3, 1],
                    2,
                    19,
                    40,
                    GroupedDtypes { x, weight: MatrixKind::Plain(weight), out },
                    true,
                );
            }
        }
        let plain = MatrixKind::Plain(Bf16);
        let (own, narrow) = (GroupedDtypes::of(F32, plain), GroupedDtypes::of(Bf16, plain));
        // all rows with one expert, first and last; none with most; more than a tile, and one more than that
        let skewed: [&[u32]; 7] = [
            &[12, 0, 0],
            &[0, 0, 12],
            &[0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            &[1, 1, 1, 1, 1, 1, 1, 1],
            &[65, 3, 0, 64],
            &[1, 16, 17, 15, 1],
            &[200, 0, 2],
        ];
        for rows in skewed {
            for dtypes in [own, narrow] {
                self.grouped_gemm(rows, 1, 33, 65, dtypes, false);
                self.grouped_gemm(rows, 2, 32, 64, dtypes, true);
            }
        }
        for &e in self.sweep() {
            for (n, k) in [(e, 37), (19, e), (e, e)] {
                self.grouped_gemm(&[3, 0, 1, 2], 2, n, k, own, false);
            }
            self.grouped_gemm(&[e, 0, 1], 1, 19, 37, own, false);
        }
        for rows in [&[0, 1, 0, 1][..], &[30, 7, 0, 35]] {
            self.grouped_gemm(rows, 2, 130, 515, own, false);
            self.grouped_gemm(rows, 1, 67, 1024, narrow, true);
        }
        self.quantised_experts(&skewed);
    }

    /// Formats in which experts are stored: gpt-oss, DeepSeek-V4 and others in MXFP4, and one for each other
    /// way of scaling.
    fn quantised_experts(&mut self, skewed: &[&[u32]]) {
        let mxfp4 = MatrixKind::Quantised(Quantised::MXFP4);
        for rows in skewed {
            for x in [F32, Bf16] {
                self.grouped_gemm(rows, 1, 33, 64, GroupedDtypes::of(x, mxfp4), false);
                self.grouped_gemm(rows, 2, 38, 96, GroupedDtypes::of(x, mxfp4), true);
            }
        }
        for &e in self.sweep() {
            self.grouped_gemm(&[3, 0, 1, 2], 2, e, 32, GroupedDtypes::of(F32, mxfp4), true);
            self.grouped_gemm(&[e, 0, 1], 1, 19, 160, GroupedDtypes::of(F32, mxfp4), false);
        }
        self.grouped_gemm(&[30, 7, 0, 35], 2, 130, 512, GroupedDtypes::of(F16, mxfp4), true);
        let rows = Quantised::in_rows;
        let blocks =
            Quantised { group_rows: 16, ..rows(CodeKind::E4m3, 64, ScaleKind::F32, ZeroKind::Middle) };
        let others = [
            blocks,
            rows(CodeKind::E4m3, 1 << 16, ScaleKind::Bf16, ZeroKind::Middle),
            rows(CodeKind::I8, 64, ScaleKind::F32, ZeroKind::Middle),
            rows(CodeKind::U4, 32, ScaleKind::Bf16, ZeroKind::Middle),
            rows(CodeKind::U4, 64, ScaleKind::F16, ZeroKind::Points),
            rows(CodeKind::U4, 32, ScaleKind::F32, ZeroKind::Minima),
            Quantised::NVFP4,
        ];
        for weight in others.map(MatrixKind::Quantised) {
            self.grouped_gemm(&[2, 0, 3, 1], 2, 32, 128, GroupedDtypes::of(F32, weight), true);
            self.grouped_gemm(&[20, 1, 0, 67], 1, 48, 64, GroupedDtypes::of(F32, weight), false);
        }
    }

    pub(super) fn combine(&mut self) {
        for x in DType::FLOATS {
            for &n in self.sweep() {
                for accumulate in [false, true] {
                    self.even(OpSig::Combine { tokens: n, active: 2, cols: 33, x, accumulate });
                    if n <= 9 {
                        self.even(OpSig::Combine { tokens: 3, active: n, cols: 16, x, accumulate });
                    }
                }
                self.even(OpSig::Combine { tokens: 2, active: 3, cols: n, x, accumulate: true });
            }
            self.even(OpSig::Combine { tokens: 3, active: 8, cols: 2048, x, accumulate: true });
        }
    }
}
