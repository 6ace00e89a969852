//! How tokens choose experts, and the rows that experts work on.

use crate::cast::to_u32;
use crate::operand::{Extent, Operand, OperandAccess, product};
use crate::quantised::QuantisedPart;
use crate::{DType, MatrixKind, OpSig, Scalar};
use serde::{Deserialize, Serialize};

/// What an expert's logit becomes as a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Scoring {
    /// `exp(l) / sum over all experts of exp(l)`.
    Softmax,
    /// `1 / (1 + exp(-l))`.
    Sigmoid,
}

/// How a token chooses experts.
///
/// A token takes the `active` experts with the highest keys; of equal ones those of lower numbers, best
/// first. The key is the score plus the correction bias; without a bias and without groups it is the logit
/// itself, which orders experts as scores do and is exact. With groups (DeepSeek-AI 2024, arXiv 2412.19437,
/// section 2.1.2), which are `groups` runs of experts of equal length, only experts of the `groups_active`
/// best groups can be chosen; a group is as good as the sum of its `group_best` highest keys, added from
/// the highest on. Keys are computed in f32; a NaN is never above another key.
///
/// The weight of a choice is its score without bias, with `normalise` divided by the sum of the token's
/// choices (plus 1e-20 for `Sigmoid`), and times `scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExpertRouting {
    /// Experts.
    pub experts: u32,
    /// Experts that a token chooses.
    pub active: u32,
    /// What logits become.
    pub scoring: Scoring,
    /// Groups of experts; 1 without groups.
    pub groups: u32,
    /// Groups that a token can choose from.
    pub groups_active: u32,
    /// Experts of a group whose keys say how good it is.
    pub group_best: u32,
    /// Whether a token's weights are divided by their sum.
    pub normalise: bool,
    /// Factor of all weights.
    pub scale: Scalar,
}

impl ExpertRouting {
    /// Added to a sum of sigmoids before dividing by it.
    pub const SUM_MIN: f32 = 1e-20;

    /// `active` of `experts` by softmax, without groups.
    pub const fn softmax(experts: u32, active: u32, normalise: bool) -> Self {
        ExpertRouting {
            experts,
            active,
            scoring: Scoring::Softmax,
            groups: 1,
            groups_active: 1,
            group_best: 1,
            normalise,
            scale: Scalar(1.0),
        }
    }

    /// Whether keys are the logits themselves.
    pub const fn by_logits(&self, bias: bool) -> bool {
        !bias && self.groups == 1
    }

    /// The operands of `Route`, in order.
    pub(crate) fn operands(&self, tokens: u32, bias: bool) -> Vec<Operand> {
        let ExpertRouting { experts, active, .. } = *self;
        let choices = product(&[tokens, active]);
        let mut operands = vec![of("logits", OperandAccess::Read, DType::F32, product(&[tokens, experts]))];
        if bias {
            operands.push(of("bias", OperandAccess::Read, DType::F32, u64::from(experts)));
        }
        operands.push(of("chosen", OperandAccess::Write, DType::U32, choices));
        operands.push(of("weights", OperandAccess::Write, DType::F32, choices));
        operands.push(of("order", OperandAccess::Write, DType::U32, choices));
        operands.push(of("starts", OperandAccess::Write, DType::U32, u64::from(experts) + 1));
        operands
    }

    /// An exponential, a sum and a comparison for each expert and choice.
    pub(crate) fn flops(&self, tokens: u32) -> f64 {
        f64::from(tokens) * f64::from(self.experts) * (3.0 + f64::from(self.active))
    }

    /// Checks what the type cannot express.
    pub(crate) fn check(&self) -> Result<(), String> {
        let ExpertRouting { experts, active, groups, groups_active, group_best, .. } = *self;
        if experts == 0 || groups == 0 || !experts.is_multiple_of(groups) {
            return Err(format!("route: {experts} experts do not divide into {groups} groups"));
        }
        let size = experts / groups;
        if groups_active == 0 || groups_active > groups || group_best == 0 || group_best > size {
            return Err(format!(
                "route: {groups_active} of {groups} groups by the best {group_best} of {size} experts each"
            ));
        }
        if active == 0 || u64::from(active) > product(&[groups_active, size]) {
            return Err(format!("route: {active} experts of {groups_active} groups of {size}"));
        }
        Ok(())
    }
}

/// Rows that are grouped by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GroupedRows {
    /// Rows of the result: choices of all tokens.
    pub choices: u32,
    /// Consecutive choices that share a row of `x`: all of a token, or 1.
    pub fan: u32,
    /// Experts.
    pub experts: u32,
    /// Experts that are expected to have rows; the bytes of weights are proportional to it, the result does
    /// not depend on it.
    pub touched: u32,
    /// Expected number of choices that fall on experts outside this share of a layer's: `starts` begin beyond
    /// 0 or end before `choices`, and the rows of choices outside of them stay as they are. 0 if every choice
    /// is one of these experts. Affects predictions only, not results.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub others: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl GroupedRows {
    /// Choices that are expected to be of one of these experts.
    pub const fn own(&self) -> u32 {
        self.choices.saturating_sub(self.others)
    }

    /// Experts that are expected to have no rows.
    pub const fn idle(&self) -> u32 {
        self.experts.saturating_sub(self.touched)
    }

    /// The operands of `GroupedGemm`, in order.
    pub(crate) fn operands(
        &self,
        [n, k]: [u32; 2],
        x: DType,
        weight: MatrixKind,
        out: DType,
        bias: bool,
    ) -> Vec<Operand> {
        let GroupedRows { choices, fan, experts, others, .. } = *self;
        let mut operands = vec![of("x", OperandAccess::Read, x, product(&[choices / fan.max(1), k]))];
        let part = |part: &QuantisedPart| of(part.name, OperandAccess::Read, part.dtype, part.elements());
        operands.extend(weight.parts(experts, n, k).iter().map(part));
        if bias {
            operands.push(of("bias", OperandAccess::Read, weight.bias(), product(&[experts, n])));
        }
        operands.push(of("order", OperandAccess::Read, DType::U32, u64::from(choices)));
        operands.push(of("starts", OperandAccess::Read, DType::U32, u64::from(experts) + 1));
        let access = if others > 0 { OperandAccess::ReadWrite } else { OperandAccess::Write };
        operands.push(of("out", access, out, product(&[choices, n])));
        operands
    }

    /// Checks what the type cannot express.
    pub(crate) fn check(&self, weight: MatrixKind, columns: u32) -> Result<(), String> {
        if let MatrixKind::Quantised(quantised) = weight {
            quantised.check(columns).map_err(|problem| format!("grouped_gemm: {problem}"))?;
        }
        let GroupedRows { choices, fan, experts, touched, others } = *self;
        if fan == 0 || !choices.is_multiple_of(fan) {
            return Err(format!("grouped_gemm: {choices} choices do not divide into rows of {fan}"));
        }
        if touched > experts {
            return Err(format!("grouped_gemm: {touched} of {experts} experts have rows"));
        }
        if others > choices {
            return Err(format!("grouped_gemm: {others} of {choices} choices are of other experts"));
        }
        Ok(())
    }
}

impl OpSig {
    /// An older operation of about the same arithmetic and traffic, whose time is used if this operation was
    /// not measured. It is for `GroupedGemm` a plain product with as many rows as an expert has and the
    /// columns of all experts that have some, for `Route` a draw, for `Combine` and `CopyColumns` the
    /// selection of rows.
    pub fn equivalent(&self) -> Option<OpSig> {
        Some(match *self {
            OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } => {
                let touched = grouped.touched.max(1);
                let m = to_u32((f64::from(grouped.own()) / f64::from(touched)).max(1.0).round());
                let (n, accumulate) = (n.saturating_mul(touched), false);
                match weight {
                    MatrixKind::Plain(weight) => OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate },
                    MatrixKind::Quantised(weight) => {
                        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate }
                    }
                }
            }
            OpSig::Route { tokens, routing, .. } => {
                OpSig::Sample { rows: tokens, cols: routing.experts, history: 0, tops: 0 }
            }
            OpSig::Combine { tokens, active, cols, x, .. } => {
                let choices = tokens.saturating_mul(active);
                OpSig::Embed { tokens: choices, vocab: choices, hidden: cols, table: x, out: x }
            }
            OpSig::CopyColumns { rows, cols, x, .. } => {
                OpSig::Embed { tokens: rows, vocab: rows, hidden: cols, table: x, out: x }
            }
            OpSig::ClampedSwiglu { elements, x, .. } | OpSig::GeluMul { elements, x } => {
                OpSig::SiluMul { elements, x }
            }
            OpSig::SoftCap { elements, .. } => OpSig::SiluMul { elements, x: DType::F32 },
            _ => return None,
        })
    }
}

fn of(name: &'static str, access: OperandAccess, dtype: DType, elements: u64) -> Operand {
    Operand { name, access, dtype, extent: Extent::Exactly(elements) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTING: ExpertRouting =
        ExpertRouting { groups: 4, groups_active: 2, group_best: 2, ..ExpertRouting::softmax(8, 3, true) };

    #[test]
    fn a_product_by_experts_reads_the_weights_of_touched_ones_alone() {
        let grouped = GroupedRows { choices: 6, fan: 2, experts: 8, touched: 3, others: 0 };
        let (x, weight, out) = (DType::F32, MatrixKind::Plain(DType::Bf16), DType::F32);
        let sig = OpSig::GroupedGemm { grouped, n: 5, k: 7, x, weight, out, bias: true };
        assert!(sig.operands().iter().map(|o| o.name).eq(["x", "weight", "bias", "order", "starts", "out"]));
        assert_eq!(sig.bytes(), f64::from(3 * 7 * 4 + 3 * 5 * 8 * 2 + 6 * 4 + 9 * 4 + 6 * 5 * 4));
        assert_eq!(sig.flops(), f64::from(2 * 6 * 5 * 7));
        assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(sig)).unwrap(), sig);
        let weight = MatrixKind::Quantised(crate::Quantised::MXFP4);
        let packed = OpSig::GroupedGemm { grouped, n: 5, k: 32, x, weight, out, bias: true };
        let names = ["x", "codes", "scales", "bias", "order", "starts", "out"];
        assert!(packed.operands().iter().map(|o| o.name).eq(names));
        let of_expert = 5 * (32 / 2 + 2 + 4);
        assert_eq!(packed.bytes(), f64::from(3 * 32 * 4 + 3 * of_expert + 6 * 4 + 9 * 4 + 6 * 5 * 4));
        assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(packed)).unwrap(), packed);
        // of the choices of other experts nothing is written, and their rows are not lost
        let share = GroupedRows { others: 2, ..grouped };
        let weight = MatrixKind::Plain(DType::Bf16);
        let sig = OpSig::GroupedGemm { grouped: share, n: 5, k: 7, x, weight, out, bias: false };
        assert_eq!(sig.operands().last().map(|out| out.access), Some(OperandAccess::ReadWrite));
        assert_eq!(sig.bytes(), f64::from(3 * 7 * 4 + 3 * 5 * 7 * 2 + 6 * 4 + 9 * 4 + 4 * 5 * 4));
        assert_eq!(sig.flops(), f64::from(2 * 4 * 5 * 7));
        assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(sig)).unwrap(), sig);
        let odd = GroupedRows { fan: 4, ..grouped };
        assert!(OpSig::GroupedGemm { grouped: odd, n: 5, k: 7, x, weight, out, bias: true }.check().is_err());
    }

    #[test]
    fn impossible_choices_are_named() {
        let sig = |routing| OpSig::Route { tokens: 3, bias: true, routing };
        assert_eq!(sig(ROUTING).check(), Ok(()));
        assert_eq!(serde_json::from_value::<OpSig>(serde_json::json!(sig(ROUTING))).unwrap(), sig(ROUTING));
        let wrong = |routing: ExpertRouting, what: &str| {
            let problem = sig(routing).check().unwrap_err();
            assert!(problem.contains(what), "{problem}");
        };
        wrong(ExpertRouting { groups: 3, ..ROUTING }, "8 experts do not divide into 3 groups");
        wrong(ExpertRouting { groups_active: 5, ..ROUTING }, "5 of 4 groups");
        wrong(ExpertRouting { group_best: 3, ..ROUTING }, "best 3 of 2");
        wrong(ExpertRouting { active: 5, ..ROUTING }, "5 experts of 2 groups of 2");
        wrong(ExpertRouting { active: 0, ..ROUTING }, "0 experts");
    }
}
