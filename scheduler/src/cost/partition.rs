//! Division of an instance's work over several devices.
//!
//! - Tensor parallelism (Megatron-LM, arXiv 1909.08053): every member has the whole residual stream. It
//!   projects to its own heads and to its own columns of the MLP, and back to a partial sum of the residual;
//!   the members' partial sums are added after attention and after the MLP of each layer. Each computes the
//!   logits of its own rows of the vocabulary. Of a layer's experts each has columns of all, or whole ones
//!   ([`ExpertsBy`]).
//! - Stages of layers: each has consecutive layers, and may itself be several members that divide these. The
//!   residual stream goes from each stage to the next; the first one embeds, the last one has the LM head.
//! - Attention offload (Lamina, arXiv 2405.01814): see [`Partition::attention`].

use super::{AttnSplit, Experts, MemberWork, ModelShape};
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Columns of the MLP and rows of the vocabulary are dealt in runs of this length where they divide into
/// such, so that matrices stay aligned for a device's kernels.
const RUN: u32 = 64;

/// What one member of an instance computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberShare {
    /// The member's number.
    pub member: u32,
    /// Its number among the members that share its layers. The first of them also adds the residual and the
    /// biases of the projections to it, and that of the last stage draws tokens.
    pub rank: u32,
    /// Its layers.
    pub layers: Range<u32>,
    /// Which operations of its heads, columns and rows it runs.
    pub work: MemberWork,
    /// Its query heads.
    pub heads: Range<u32>,
    /// The KV heads that these read. Members share one where there are fewer KV heads than members; latents
    /// are one, which all members keep.
    pub kv_heads: Range<u32>,
    /// Its columns of the MLP's inner layer, in proportion to which it has columns of the shared experts.
    pub inner: Range<u32>,
    /// Its experts of each layer: all where members divide the columns of each.
    pub experts: Range<u32>,
    /// Experts of a layer.
    pub experts_in_all: u32,
    /// Its rows of the LM head; none if it has not the last layers.
    pub vocab: Range<u32>,
}

impl MemberShare {
    /// Everything, as the only member has it.
    pub fn whole(shape: &ModelShape) -> Self {
        MemberShare {
            member: 0,
            rank: 0,
            layers: 0..shape.layers(),
            work: MemberWork::All,
            heads: 0..shape.heads,
            kv_heads: 0..shape.kv_shape().kv_heads,
            inner: 0..shape.intermediate,
            experts: 0..expert_count(shape),
            experts_in_all: expert_count(shape),
            vocab: 0..shape.vocab,
        }
    }

    /// Whether other members that share its layers have other experts, so that it has all columns of its own.
    pub fn has_whole_experts(&self) -> bool {
        count(&self.experts) < self.experts_in_all
    }

    /// Its columns of each of its experts, whose inner layers are so long, if that of the MLP is `whole`.
    pub fn inner_of_experts(&self, inner: u32, whole: u32) -> Range<u32> {
        if self.has_whole_experts() { 0..inner } else { Experts::share(inner, &self.inner, whole) }
    }

    /// Whether it is the first member of those that share its layers.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether it embeds tokens, for which it has the embedding.
    pub fn embeds(&self) -> bool {
        self.layers.start == 0 && self.has_weights()
    }

    /// Whether it computes logits, for which it has the last norm and rows of the LM head.
    pub fn has_head(&self) -> bool {
        !self.vocab.is_empty()
    }

    /// Whether it draws tokens.
    pub fn draws(&self) -> bool {
        self.is_first() && self.has_head()
    }

    /// The shape of a model with only its share of `shape`, for cost prediction.
    pub fn of(&self, shape: &ModelShape) -> ModelShape {
        ModelShape {
            windows: shape.windows[self.layers.start as usize..self.layers.end as usize].to_vec(),
            heads: count(&self.heads),
            kv_heads: count(&self.kv_heads),
            intermediate: count(&self.inner),
            vocab: count(&self.vocab),
            experts: shape.experts.map(|experts| experts.of_share(self, shape.intermediate)),
            style: shape.style.of_layers(&self.layers),
            ..shape.clone()
        }
    }
}

impl Experts {
    /// The member's share of `whole` columns of the MLP.
    fn of_share(self, share: &MemberShare, whole: u32) -> Self {
        let MemberShare { layers, experts, .. } = share;
        Experts {
            dense_layers: self.dense_layers.min(layers.end).saturating_sub(layers.start),
            intermediate: count(&share.inner_of_experts(self.intermediate, whole)),
            shared: count(&Experts::share(self.shared, &share.inner, whole)),
            by_member: false,
            held: share.has_whole_experts().then_some(count(experts)),
            ..self
        }
    }
}

/// What members that divide layers divide of their experts. What crosses between them is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsBy {
    /// The columns of each.
    #[default]
    Columns,
    /// Their number: each has whole ones.
    Member,
}

/// The shares of an instance's members: every head, column and row belongs to exactly one of them, and KV
/// heads to at least one; under attention offload, heads do so among the attention members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    pub(super) shares: Vec<MemberShare>,
    pub(super) split: Option<AttnSplit>,
}

impl Partition {
    /// Shares as equal as whole KV heads allow. If `shape` divides by the number of members, they are those
    /// of [`ModelShape::split`].
    ///
    /// # Errors
    /// When a member would have nothing, or the model has layers that cannot be divided so.
    pub fn even(shape: &ModelShape, members: u32) -> Result<Self, String> {
        Partition::in_proportion(shape, &vec![1.0; members as usize])
    }

    /// Shares in proportion to `weights`, one for each member, as whole KV heads allow. Where there are fewer
    /// KV heads than members, members share a KV head and divide its query heads.
    ///
    /// # Errors
    /// When a member would have nothing, a weight is not positive, or the model has layers that cannot be
    /// divided so.
    pub fn in_proportion(shape: &ModelShape, weights: &[f64]) -> Result<Self, String> {
        Partition::in_stages(shape, &[weights.to_vec()])
    }

    /// Stages of layers, each divided over its members as by [`Partition::in_proportion`]; `stages` has the
    /// weights of their members. A stage has layers in proportion to the sum of its members' weights.
    ///
    /// # Errors
    /// As of [`Partition::in_proportion`].
    pub fn in_stages(shape: &ModelShape, stages: &[Vec<f64>]) -> Result<Self, String> {
        Partition::in_stages_by(shape, stages, &vec![ExpertsBy::Columns; stages.len()])
    }

    /// The same, by what the members of each stage divide of experts; with whole ones each has some in
    /// proportion to its weight.
    ///
    /// # Errors
    /// As of [`Partition::in_proportion`], and if there are fewer experts than members that divide them.
    pub fn in_stages_by(shape: &ModelShape, stages: &[Vec<f64>], by: &[ExpertsBy]) -> Result<Self, String> {
        if shape.linear.is_some() {
            return Err("linear attention is not divided over devices yet".into());
        }
        let whole = |experts: &Experts| experts.spread > 1 || (experts.every > 1 && stages.len() > 1);
        if shape.experts.as_ref().is_some_and(whole) {
            return Err("whole experts and layers that have them in turn are not divided yet".into());
        }
        if let Some(why) = shape.style.undivided().filter(|_| stages.iter().any(|stage| stage.len() > 1)) {
            return Err(format!("{why} cannot be divided over devices; divide the layers instead (pp:)"));
        }
        let weights = stages.concat();
        let all_positive = weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
        if !all_positive || stages.is_empty() || stages.iter().any(Vec::is_empty) {
            return Err(format!("{stages:?} are no weights of members: all must be positive numbers"));
        }
        if to_u32(stages.len()) > shape.layers() {
            return Err(format!(
                "{} stages are more than the model's {} layers",
                stages.len(),
                shape.layers()
            ));
        }
        let sums: Vec<f64> = stages.iter().map(|stage| stage.iter().sum()).collect();
        let mut shares = Vec::with_capacity(weights.len());
        let layers = ranges(&dealt(shape.layers(), &sums));
        for ((layers, weights), by) in layers.into_iter().zip(stages).zip(by) {
            let member = to_u32(shares.len());
            shares.extend(Partition::stage(shape, layers, (weights, *by), member)?);
        }
        Ok(Partition { shares, split: None })
    }

    /// The shares of a stage; the first is that of member `first`.
    fn stage(
        shape: &ModelShape,
        layers: Range<u32>,
        (weights, by): (&[f64], ExpertsBy),
        first: u32,
    ) -> Result<Vec<MemberShare>, String> {
        let heads = heads(shape, weights)?;
        let group = shape.heads / shape.kv_shape().kv_heads.max(1);
        let inner = ranges(&in_runs(shape.intermediate, weights, "columns of the MLP")?);
        let all = expert_count(shape);
        let experts = match by {
            ExpertsBy::Columns => vec![0..all; weights.len()],
            ExpertsBy::Member if all == 0 => {
                return Err("the model has no experts, which members would divide".into());
            }
            ExpertsBy::Member if (all as usize) < weights.len() => {
                return Err(format!("{all} experts are fewer than {} members", weights.len()));
            }
            ExpertsBy::Member => ranges(&dealt(all, weights)),
        };
        let divided = |experts: &Experts| {
            let columns = if by == ExpertsBy::Columns { experts.intermediate } else { 0 };
            [(columns, "an expert"), (experts.shared, "the shared experts")]
        };
        for (inner_layer, what) in shape.experts.iter().flat_map(divided) {
            let empty = |part| Experts::share(inner_layer, part, shape.intermediate).is_empty();
            if inner_layer > 0 && inner.iter().any(empty) {
                let members = weights.len();
                return Err(format!("{inner_layer} columns of {what} leave one of {members} members none"));
            }
        }
        let vocab = match layers.end == shape.layers() {
            true => ranges(&in_runs(shape.vocab, weights, "rows of the vocabulary")?),
            false => vec![0..0; weights.len()],
        };
        let shares = (0..).zip(heads).zip(inner.into_iter().zip(experts).zip(vocab));
        let share = |((rank, heads), ((inner, experts), vocab)): ((u32, Range<u32>), _)| MemberShare {
            member: first + rank,
            rank,
            layers: layers.clone(),
            work: MemberWork::All,
            kv_heads: heads.start / group..heads.end.div_ceil(group),
            heads,
            inner,
            experts,
            experts_in_all: all,
            vocab,
        };
        Ok(shares.map(share).collect())
    }

    /// The number of members of each stage of layers; one number where all members have all layers.
    pub fn stages(&self) -> Vec<usize> {
        self.shares.chunk_by(|one, next| one.layers == next.layers).map(<[_]>::len).collect()
    }

    /// What the members of each stage divide of experts.
    pub fn experts_by(&self) -> Vec<ExpertsBy> {
        let stages = self.shares.chunk_by(|one, next| one.layers == next.layers);
        let by = |stage: &[MemberShare]| match stage.iter().any(MemberShare::has_whole_experts) {
            true => ExpertsBy::Member,
            false => ExpertsBy::Columns,
        };
        stages.map(by).collect()
    }

    /// The members' shares, in their order.
    pub fn shares(&self) -> &[MemberShare] {
        &self.shares
    }
}

/// Routed experts of a layer that has some.
fn expert_count(shape: &ModelShape) -> u32 {
    shape.experts.map_or(0, |experts| experts.count)
}

fn count(range: &Range<u32>) -> u32 {
    range.end - range.start
}

/// The query heads of each member: those of whole KV heads, or a part of those of one.
pub(super) fn heads(shape: &ModelShape, weights: &[f64]) -> Result<Vec<Range<u32>>, String> {
    let (members, kv_heads) = (to_u32(weights.len()), shape.kv_shape().kv_heads);
    if kv_heads == 0 || !shape.heads.is_multiple_of(kv_heads) {
        return Err(format!("{} heads do not divide over {kv_heads} KV heads", shape.heads));
    }
    let group = shape.heads / kv_heads;
    if members <= kv_heads {
        return Ok(ranges(&dealt(kv_heads, weights).iter().map(|heads| heads * group).collect::<Vec<_>>()));
    }
    let mut counts = Vec::new();
    for sharers in ranges(&dealt(members, &vec![1.0; kv_heads as usize])) {
        if count(&sharers) > group {
            return Err(format!("{members} members are more than the model's {} heads allow", shape.heads));
        }
        counts.extend(dealt(group, &weights[sharers.start as usize..sharers.end as usize]));
    }
    Ok(ranges(&counts))
}

/// Deals `total` to members in runs, if possible.
fn in_runs(total: u32, weights: &[f64], what: &str) -> Result<Vec<u32>, String> {
    let members = to_u32(weights.len());
    if total < members {
        return Err(format!("{total} {what} are fewer than {members} members"));
    }
    let mut run = RUN;
    while !total.is_multiple_of(run) || total / run < members {
        run /= 2;
    }
    Ok(dealt(total / run, weights).iter().map(|runs| runs * run).collect())
}

/// Divides `total` in proportion to `weights`, at least one for each (`total` is no less than their number):
/// the remainder goes to the largest fractions, the first of equals.
fn dealt(total: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let due: Vec<f64> = weights.iter().map(|weight| f64::from(total) * weight / sum).collect();
    let mut counts = vec![1; weights.len()];
    for _ in weights.len()..total as usize {
        let missing = |at: usize| due[at] - f64::from(counts[at]);
        let most = (1..counts.len()).fold(0, |best, at| if missing(at) > missing(best) { at } else { best });
        counts[most] += 1;
    }
    counts
}

/// Ranges of these lengths, end to end.
fn ranges(counts: &[u32]) -> Vec<Range<u32>> {
    let mut end = 0;
    let next = |count: &u32| {
        end += count;
        end - count..end
    };
    counts.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models;
    use mixfleet_hal::DType;
    use proptest::prelude::*;

    fn shape(heads: u32, kv_heads: u32, intermediate: u32, vocab: u32) -> ModelShape {
        let llama = models::find("llama-3.1-8b").unwrap().shape(DType::Bf16);
        ModelShape { heads, kv_heads, intermediate, vocab, ..llama }
    }

    #[test]
    fn an_even_partition_is_the_split_of_the_cost_model() {
        let shape = shape(64, 8, 28672, 128_256);
        for members in [1, 2, 4, 8] {
            assert_eq!(shape.check_split(members), Ok(()));
            for share in Partition::even(&shape, members).unwrap().shares() {
                let (of, split) = (share.of(&shape), shape.split(members));
                assert!(of.vocab.abs_diff(split.vocab) <= RUN, "{} {}", of.vocab, split.vocab);
                assert_eq!(ModelShape { vocab: split.vocab, ..of }, split);
            }
        }
        let of_one = MemberShare::whole(&shape);
        assert_eq!(Partition::even(&shape, 1).unwrap().shares(), std::slice::from_ref(&of_one));
        assert_eq!(of_one.of(&shape), shape);
    }

    #[test]
    fn heads_over_latents_are_divided_and_every_member_keeps_all_latents() {
        let shape = models::find("deepseek-v3").unwrap().shape(DType::Bf16);
        for members in [2, 8] {
            assert_eq!(shape.check_split(members), Ok(()));
            for share in Partition::even(&shape, members).unwrap().shares() {
                assert_eq!((count(&share.heads), share.kv_heads.clone()), (128 / members, 0..1));
                let (of, split) = (share.of(&shape), shape.split(members));
                assert_eq!(of.kv_bytes_per_token(), shape.kv_bytes_per_token());
                assert_eq!(ModelShape { vocab: split.vocab, kv_heads: split.kv_heads, ..of }, split);
            }
        }
        assert!(Partition::even(&ModelShape { heads: 4, ..shape }, 5).unwrap_err().contains("4 heads"));
    }

    #[test]
    fn what_does_not_divide_goes_in_whole_kv_heads_and_by_weight() {
        let heads = |shape: &ModelShape, weights: &[f64]| {
            let partition = Partition::in_proportion(shape, weights).unwrap();
            partition.shares().iter().map(|s| (s.heads.clone(), s.kv_heads.clone())).collect::<Vec<_>>()
        };
        let of = |heads, kv_heads| shape(heads, kv_heads, 14336, 32000);
        assert_eq!(heads(&of(32, 8), &[1.0; 3]), [(0..12, 0..3), (12..24, 3..6), (24..32, 6..8)]);
        assert_eq!(heads(&of(32, 8), &[3.0, 1.0]), [(0..24, 0..6), (24..32, 6..8)]);
        // fewer KV heads than members: the first one is stored twice
        assert_eq!(heads(&of(8, 2), &[1.0; 3]), [(0..2, 0..1), (2..4, 0..1), (4..8, 1..2)]);
        assert_eq!(heads(&of(16, 1), &[2.0, 1.0, 1.0]), [(0..8, 0..1), (8..12, 0..1), (12..16, 0..1)]);
    }

    #[test]
    fn what_cannot_be_divided_is_refused_in_words() {
        let error =
            |shape: &ModelShape, weights: &[f64]| Partition::in_proportion(shape, weights).unwrap_err();
        assert!(error(&shape(4, 2, 160, 512), &[1.0; 5]).contains("4 heads"));
        assert!(error(&shape(4, 2, 1, 512), &[1.0; 2]).contains("columns of the MLP"));
        assert!(error(&shape(4, 2, 160, 512), &[1.0, 0.0]).contains("positive"));
        assert!(error(&shape(4, 2, 160, 512), &[]).contains("positive"));
        let mixture = models::find("qwen3-30b-a3b").unwrap().shape(DType::Bf16);
        assert!(error(&mixture.with_whole_experts(2).unwrap(), &[1.0; 2]).contains("whole experts"));
        let shares = Partition::in_stages(&mixture, &[vec![1.0; 2], vec![1.0]]).unwrap();
        let of: Vec<_> = shares.shares().iter().map(|share| share.of(&mixture).experts.unwrap()).collect();
        assert_eq!([0, 1, 2].map(|member: usize| of[member].intermediate), [384, 384, 768]);
    }

    #[test]
    fn whole_experts_go_to_members_in_proportion_and_all_else_as_in_tensor_parallelism() {
        let mixture = models::find("qwen3-30b-a3b").unwrap().shape(DType::Bf16);
        let by = |weights: &[f64], by| Partition::in_stages_by(&mixture, &[weights.to_vec()], &[by]);
        let (whole, columns) = (by(&[3.0, 1.0], ExpertsBy::Member), by(&[3.0, 1.0], ExpertsBy::Columns));
        let (whole, columns) = (whole.unwrap(), columns.unwrap());
        assert_eq!([whole.experts_by(), columns.experts_by()], [[ExpertsBy::Member], [ExpertsBy::Columns]]);
        assert_eq!([0, 1].map(|member: usize| whole.shares()[member].experts.clone()), [0..96, 96..128]);
        for (own, sliced) in whole.shares().iter().zip(columns.shares()) {
            let (of, of_sliced) = (own.of(&mixture), sliced.of(&mixture));
            let experts = of.experts.unwrap();
            assert_eq!((experts.held, experts.intermediate), (Some(count(&own.experts)), 768));
            // as many weights, and the same of all that is no expert
            let parameters = [&of, &of_sliced].map(|shape| shape.parameters(false));
            assert_eq!(parameters[0], parameters[1]);
            assert_eq!(ModelShape { experts: of_sliced.experts, ..of }, of_sliced);
        }
        assert!(by(&vec![1.0; 129], ExpertsBy::Member).is_err());
        let dense = Partition::in_stages_by(&shape(4, 2, 160, 512), &[vec![1.0; 2]], &[ExpertsBy::Member]);
        assert!(dense.unwrap_err().contains("no experts"));
    }

    fn covers(parts: &[Range<u32>], total: u32) -> bool {
        let end =
            parts.iter().try_fold(0, |at, part| (part.start == at && part.end > at).then_some(part.end));
        end == Some(total)
    }

    proptest! {
        #[test]
        fn everything_is_computed_exactly_once(
            kv_heads in 1u32..10,
            group in 1u32..9,
            intermediate in 9u32..2000,
            vocab in 9u32..2000,
            weights in proptest::collection::vec(0.1f64..10.0, 1..9),
        ) {
            let shape = shape(kv_heads * group, kv_heads, intermediate, vocab);
            let members = to_u32(weights.len());
            let Ok(partition) = Partition::in_proportion(&shape, &weights) else {
                prop_assert!(members.div_ceil(kv_heads) > group, "only more members than heads are refused");
                return Ok(());
            };
            let shares = partition.shares();
            prop_assert_eq!(shares.len(), weights.len());
            let all = |of: fn(&MemberShare) -> &Range<u32>| shares.iter().map(|s| of(s).clone()).collect::<Vec<_>>();
            prop_assert!(covers(&all(|s| &s.heads), shape.heads));
            prop_assert!(covers(&all(|s| &s.inner), intermediate));
            prop_assert!(covers(&all(|s| &s.vocab), vocab));
            for share in shares {
                let own = share.of(&shape);
                prop_assert!(own.heads.is_multiple_of(own.kv_heads));
                // head i of a member reads its KV head i / (heads / kv_heads), as in the whole model
                for (at, head) in share.heads.clone().enumerate() {
                    let read = share.kv_heads.start + to_u32(at) / (own.heads / own.kv_heads);
                    prop_assert_eq!(read, head / group);
                }
            }
            if members <= kv_heads {
                prop_assert!(covers(&all(|s| &s.kv_heads), kv_heads));
            } else {
                prop_assert!(shares.iter().all(|s| count(&s.kv_heads) == 1));
                prop_assert!((0..kv_heads).all(|kv| shares.iter().any(|s| s.kv_heads.start == kv)));
            }
        }
    }
}
