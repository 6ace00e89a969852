//! Mixtures of experts: what the experts of a model cost in a step.
//!
//! Each row chooses `active` of `count` experts. Were choices independent and even, b rows would touch
//! `count (1 - (1 - active / count)^b)` of them, and each of these has its weights read once. Where no
//! product by experts was measured, its time is that of a plain product of equal arithmetic, weights and
//! results ([`OpSig::equivalent`]). Skewed choices touch fewer experts and make the busiest one slower;
//! neither is counted.
//!
//! Members of an instance that divide whole experts ([`Experts::by_member`]) have unlike numbers of a step's
//! choices, and all wait for the busiest: [`Experts::busiest`].

use super::partition::count;
use super::shape::{LayerWork, push};
use super::{MemberShare, ModelShape};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::{DType, ExpertRouting, GroupedRows, MatrixKind, OpSig, Scalar, Scoring};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The experts that take the place of the MLP in some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Routed experts of a layer.
    pub count: u32,
    /// Experts that a token goes through.
    pub active: u32,
    /// Length of an expert's inner layer.
    pub intermediate: u32,
    /// Length of the inner layer of all shared experts together, which every token goes through; 0 for none.
    pub shared: u32,
    /// First layers, which have a plain MLP instead.
    pub dense_layers: u32,
    /// Beyond those, the last of this many consecutive layers has experts, and the others a plain MLP.
    pub every: u32,
    /// Whether quantised formats apply to the experts alone, as in the published weights of gpt-oss.
    #[serde(default)]
    pub quantised_alone: bool,
    /// Whether a gate of its own scales what the shared experts make of a row (Qwen2-MoE).
    #[serde(default)]
    pub shared_gate: bool,
    /// Whether an expert's gate and up are one matrix, all of its matrices and the router have biases, and
    /// its function is clamped (gpt-oss).
    #[serde(default)]
    pub clamped: bool,
    /// How rows choose, if not by a normalised softmax.
    #[serde(default)]
    pub routing: Option<ExpertRouting>,
    /// Whether a bias corrects the choice.
    #[serde(default)]
    pub correction: bool,
    /// Devices of an instance over which whole experts are divided (expert parallelism): each computes the
    /// rest of the model for its share of the sequences. 1 where devices share everything evenly.
    #[serde(default = "one")]
    pub spread: u32,
    /// Whether members of an instance that divide everything else as in tensor parallelism divide whole
    /// experts, instead of the columns of each.
    #[serde(default)]
    pub by_member: bool,
    /// Of the experts those whose matrices a member has that divides whole ones with others; all if none.
    #[serde(default)]
    pub held: Option<u32>,
    /// How unlike experts are in the number of tokens that choose them: the standard deviation of these
    /// numbers over their mean, in the long run. 0 where each is chosen as often.
    #[serde(default = "none")]
    pub skew: Scalar,
}

/// The expected greatest of so many independent normal numbers of mean 0 and deviation 1, from one on.
const GREATEST_OF: [f64; 8] = [0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424];

/// Alpha and limit of gpt-oss, which affect no cost.
const CLAMP: (Scalar, Scalar) = (Scalar(1.702), Scalar(7.0));

const fn none() -> Scalar {
    Scalar(0.0)
}

const fn one() -> u32 {
    1
}

impl Experts {
    /// `count` experts with `intermediate` inner rows in every layer, of which a token goes through `active`.
    pub const fn new(count: u32, active: u32, intermediate: u32) -> Self {
        Experts {
            count,
            active,
            intermediate,
            shared: 0,
            dense_layers: 0,
            every: 1,
            quantised_alone: false,
            shared_gate: false,
            clamped: false,
            routing: None,
            correction: false,
            spread: 1,
            by_member: false,
            held: None,
            skew: Scalar(0.0),
        }
    }

    /// Choices of the busiest of `members`, each with an equal share of the experts, of `choices` of all.
    ///
    /// A member with a share p of the experts has a mean of `c p` of c choices. Which it has deviates by
    /// `c p (1 - p)` as c draws do, and by `(c p)^2 skew^2 (1 - p) / held` since its own `held` experts are
    /// chosen more or less often than others in the long run; these are variances. The greatest of `members`
    /// such numbers lies about as many deviations above the mean as that of normal ones.
    pub fn busiest(&self, choices: f64, members: u32) -> f64 {
        let part = 1.0 / f64::from(members.max(1));
        let (mean, held) = (choices * part, (f64::from(self.count) * part).max(1.0));
        let by_draw = mean * (1.0 - part);
        let by_skew = (mean * f64::from(self.skew.0)).powi(2) * (1.0 - part) / held;
        let at = (members.max(1) as usize).min(GREATEST_OF.len()) - 1;
        (mean + GREATEST_OF[at] * (by_draw + by_skew).sqrt()).min(choices)
    }

    /// Layers with experts among `layers`.
    pub fn layers(&self, layers: u32) -> u32 {
        let every = self.every.max(1);
        layers / every - self.dense_layers.min(layers) / every
    }

    /// Experts that `rows` rows are expected to touch.
    pub fn touched(&self, rows: f64) -> f64 {
        let missed = 1.0 - f64::from(self.active) / f64::from(self.count);
        f64::from(self.count) * (1.0 - missed.max(0.0).powf(rows))
    }

    /// The rows of a product by experts of `tokens` rows of one device: of choices whose rows of `x` are
    /// their tokens', or their own. An expert is touched or not, and at least one is.
    pub fn grouped(&self, tokens: u32, of_tokens: bool) -> GroupedRows {
        let spread = self.spread.max(1);
        let experts = self.held.unwrap_or(self.count / spread).max(1);
        // the rows of all devices choose among the experts that this one holds
        let part = f64::from(experts) / f64::from(self.count.max(1));
        let touched = self.touched(f64::from(tokens) * f64::from(spread)) * part;
        let choices = tokens.saturating_mul(self.active);
        let own = match self.held {
            Some(held) if held < self.count && self.by_member => {
                self.busiest(choices.into(), self.count.div_ceil(held.max(1)))
            }
            Some(held) if held < self.count => f64::from(choices) * part,
            _ => f64::from(choices),
        };
        // where there are other experts, any choice may be one of theirs
        let others_min = u32::from(experts < self.count && spread == 1).min(choices);
        GroupedRows {
            choices,
            fan: if of_tokens { self.active } else { 1 },
            experts,
            touched: to_u32(touched.round()).clamp(1, experts),
            others: (choices - to_u32(own.round()).min(choices)).max(others_min),
        }
    }

    /// What a member that has `part` of `whole` columns of the MLP's inner layer has of an inner layer of
    /// experts. Where there are many columns they are cut between words of codes, of four bits too.
    pub fn share(inner: u32, part: &Range<u32>, whole: u32) -> Range<u32> {
        const WORD: u64 = 8;
        let word = if inner >= 64 && u64::from(inner).is_multiple_of(WORD) { WORD } else { 1 };
        let at = |column: u32| {
            let exact = u64::from(inner) * u64::from(column) / u64::from(whole.max(1));
            to_u32(exact / word * word)
        };
        at(part.start)..at(part.end)
    }

    /// What a member with this share of a model with `whole` columns of the MLP has of them.
    pub(super) fn of_share(self, share: &MemberShare, whole: u32) -> Self {
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

    /// The part of one of `devices` in tensor parallelism.
    pub(super) fn split(self, devices: u32) -> Self {
        let shared = self.shared / devices;
        match self.by_member && devices > 1 {
            true => Experts { shared, held: Some(self.count.div_ceil(devices)), ..self },
            false => Experts { shared, intermediate: self.intermediate / devices, ..self },
        }
    }

    /// Other devices to which a row is sent on average, where whole experts are divided over devices.
    pub(super) fn peers(&self) -> f64 {
        let devices = f64::from(self.spread.max(1));
        (devices - 1.0) * (1.0 - (1.0 - 1.0 / devices).powf(f64::from(self.active)))
    }
}

impl ModelShape {
    /// Layers with a plain MLP, and layers with experts.
    pub fn mlp_layers(&self) -> [u32; 2] {
        let mixed = self.experts.map_or(0, |experts| experts.layers(self.layers()));
        [self.layers() - mixed, mixed]
    }

    /// The longest inner layer of a row over all layers: of all experts that it goes through together.
    pub(super) fn inner_length(&self) -> u64 {
        let n = u64::from;
        let plain = if self.mlp_layers()[0] > 0 { n(self.intermediate) } else { 0 };
        self.experts.map_or(plain, |experts| {
            plain.max(n(experts.shared)).max(n(experts.active) * n(experts.intermediate))
        })
    }

    /// Bytes of what a row needs beside inner layers to go through experts: logits, choices, and what each
    /// makes of it.
    pub(super) fn expert_activation_bytes(&self, experts: &Experts) -> u64 {
        let n = u64::from;
        let choices = n(experts.active);
        4 * n(experts.count) + 12 * choices + choices * n(self.hidden) * self.activation.size_bytes()
    }

    /// Devices over which whole experts are divided; 1 without expert parallelism.
    pub fn spread(&self) -> u32 {
        self.experts.map_or(1, |experts| experts.spread.max(1))
    }

    /// The same model with whole experts on each of `devices` (expert parallelism); `None` without experts.
    pub fn with_whole_experts(&self, devices: u32) -> Option<ModelShape> {
        let experts = Some(Experts { spread: devices, ..self.experts? });
        Some(ModelShape { experts, ..self.clone() })
    }

    /// The same model whose whole experts members of an instance divide, as unlike as this (see
    /// [`Experts::skew`]); `None` without experts.
    pub fn with_experts_by_member(&self, skew: f32) -> Option<ModelShape> {
        let experts = Some(Experts { by_member: true, skew: Scalar(skew), ..self.experts? });
        Some(ModelShape { experts, ..self.clone() })
    }

    /// The MLPs of all layers over `tokens` rows of one device.
    pub(super) fn mlp(&self, work: &mut LayerWork, tokens: u32) {
        let [plain, mixed] = self.mlp_layers().map(u64::from);
        if plain > 0 {
            self.plain_mlp(work, tokens, self.intermediate, plain);
        }
        if let Some(experts) = self.experts.filter(|_| mixed > 0) {
            if experts.shared > 0 && experts.shared_gate {
                self.gated_mlp(work, tokens, experts.shared, mixed);
            } else if experts.shared > 0 {
                self.plain_mlp(work, tokens, experts.shared, mixed);
            }
            self.route(work, &experts, tokens, mixed);
        }
    }

    /// An MLP whose result a gate scales: the choice of one of one.
    fn gated_mlp(&self, work: &mut LayerWork, tokens: u32, intermediate: u32, layers: u64) {
        let (x, hidden) = (self.activation, self.hidden);
        let (join, times) = if work.fused { (2, 1) } else { (1, 2) };
        push(&mut work.plain, self.router(tokens, 1, false), layers);
        let routing = ExpertRouting { scoring: Scoring::Sigmoid, ..ExpertRouting::softmax(1, 1, false) };
        push(&mut work.plain, OpSig::Route { tokens, bias: false, routing }, layers);
        self.product(work, [tokens, join * intermediate, hidden], false, times * layers);
        push(
            &mut work.plain,
            OpSig::SiluMul { elements: u64::from(tokens) * u64::from(intermediate), x },
            layers,
        );
        self.product(work, [tokens, hidden, intermediate], false, layers);
        let sum = OpSig::Combine { tokens, active: 1, cols: hidden, x, accumulate: true };
        push(&mut work.plain, sum, layers);
    }

    /// The product that gives experts' logits.
    fn router(&self, m: u32, n: u32, bias: bool) -> OpSig {
        let (x, weight, out) = (self.activation, self.weight, DType::F32);
        OpSig::Gemm { m, n, k: self.hidden, x, weight, out, bias, accumulate: false }
    }

    fn plain_mlp(&self, work: &mut LayerWork, tokens: u32, intermediate: u32, layers: u64) {
        let x = self.activation;
        let (join, times) = if work.fused { (2, 1) } else { (1, 2) };
        self.product(work, [tokens, join * intermediate, self.hidden], self.mlp_bias, times * layers);
        let elements = u64::from(tokens) * u64::from(intermediate);
        push(&mut work.plain, OpSig::SiluMul { elements, x }, layers);
        self.sum(work, [tokens, self.hidden, intermediate], self.mlp_bias, layers);
    }

    /// The routed experts: the gate, the choice, three products by experts, and the sum of what they make.
    fn route(&self, work: &mut LayerWork, experts: &Experts, tokens: u32, layers: u64) {
        let (x, weight, bias) = (self.activation, self.weight, experts.clamped);
        push(&mut work.plain, self.router(tokens, experts.count, bias), layers);
        let routing = experts.routing.unwrap_or(ExpertRouting::softmax(experts.count, experts.active, true));
        push(&mut work.plain, OpSig::Route { tokens, bias: experts.correction, routing }, layers);

        let product = |of_tokens, n, k| {
            let grouped = experts.grouped(tokens, of_tokens);
            OpSig::GroupedGemm { grouped, n, k, x, weight: MatrixKind::Plain(weight), out: x, bias }
        };
        let (join, times) = if work.fused || experts.clamped { (2, 1) } else { (1, 2) };
        let (inner, hidden) = (experts.intermediate, self.hidden);
        push(&mut work.stored, product(true, join * inner, hidden), times * layers);
        let elements = u64::from(tokens) * u64::from(experts.active) * u64::from(inner);
        let activation = match experts.clamped {
            true => OpSig::ClampedSwiglu { elements, alpha: CLAMP.0, limit: CLAMP.1, x },
            false => OpSig::SiluMul { elements, x },
        };
        push(&mut work.plain, activation, layers);
        if experts.held.is_some_and(|held| held < experts.count) {
            // what other members' experts make of a row counts as nothing here
            let bytes = u64::from(tokens) * u64::from(experts.active) * u64::from(hidden) * x.size_bytes();
            push(&mut work.plain, OpSig::Fill { bytes, word: 0 }, layers);
        }
        push(&mut work.stored, product(false, hidden, inner), layers);
        let sum = OpSig::Combine { tokens, active: experts.active, cols: hidden, x, accumulate: true };
        push(&mut work.plain, sum, layers);
    }

    /// Bytes that one device sends to its peers in a step of `rows` rows of all devices, for all layers with
    /// experts, once; the results come back in as many.
    pub(super) fn exchanged_bytes(&self, rows: u32) -> f64 {
        let Some(experts) = self.experts else { return 0.0 };
        let own = f64::from(rows) / f64::from(experts.spread.max(1));
        own * experts.peers() * f64::from(self.hidden) * self.activation.size_bytes().max(2) as f64
    }

    /// Elements of the experts of all layers, of those that a token goes through, and of the shared ones with
    /// the gates: matrices only.
    pub(super) fn expert_parameters(&self) -> [u64; 3] {
        let Some(experts) = self.experts else { return [0; 3] };
        let layers = u64::from(self.mlp_layers()[1]) * u64::from(self.hidden);
        let of = |count: u32| layers * 3 * u64::from(count) * u64::from(experts.intermediate);
        let around = 3 * u64::from(experts.shared) + u64::from(experts.count);
        let held = experts.held.unwrap_or(experts.count);
        // a token goes through those that are held as often as they are many
        let active = of(experts.active) * u64::from(held) / u64::from(experts.count.max(1));
        [of(held), active, layers * around]
    }
}

/// The number of rows, as an integer, of `rows` rows divided over `spread` devices.
pub(super) fn share(rows: u32, spread: u32) -> u32 {
    rows.div_ceil(spread.max(1))
}

/// The keys of a device's share of the sequences.
pub(super) fn share_keys(kv_tokens: u64, batch: u32, spread: u32) -> u64 {
    if spread <= 1 {
        return kv_tokens;
    }
    to_u64(kv_tokens as f64 * f64::from(share(batch, spread)) / f64::from(batch.max(1)))
}

#[cfg(test)]
mod tests {
    use super::super::{AllReduce, CostModel, EngineCost, ProfileCost};
    use super::*;
    use crate::models::find;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::random::Stream;
    use mixfleet_hal::units::Seconds;
    use std::collections::HashSet;

    #[test]
    fn touched_experts_are_those_of_random_choices() {
        let experts = Experts::new(64, 6, 1);
        let mut random = Stream::new(7);
        for rows in [1, 4, 16, 100] {
            let mut total = 0;
            for _ in 0..400 {
                let mut touched = HashSet::new();
                for _ in 0..rows {
                    let mut chosen = HashSet::new();
                    while chosen.len() < 6 {
                        chosen.insert(random.below(64));
                    }
                    touched.extend(chosen);
                }
                total += touched.len();
            }
            let (drawn, formula) = (total as f64 / 400.0, experts.touched(f64::from(rows)));
            assert!((drawn / formula - 1.0).abs() < 0.02, "{rows} rows: {drawn} against {formula}");
        }
    }

    #[test]
    fn the_busiest_member_has_what_drawn_choices_give_it() {
        let (experts, rows) = (Experts::new(64, 6, 1), 96);
        for (members, skew) in [(2, 0.0), (4, 0.0), (8, 0.0), (4, 0.5)] {
            let (held, mut most, mut total) = (experts.count / members, 0.0, 0.0);
            let mut stream = Stream::new(u64::from(members) + 7);
            for _ in 0..400 {
                // how popular experts are differs from layer to layer
                let of = |stream: &mut Stream| (1.0 + skew * stream.next_normal()).max(0.0);
                let weights: Vec<f64> = (0..experts.count).map(|_| of(&mut stream)).collect();
                let mut own = vec![0.0; members as usize];
                for _ in 0..rows {
                    let mut left = weights.clone();
                    for _ in 0..experts.active {
                        let mut at = stream.next_unit() * left.iter().sum::<f64>();
                        let last = left.len() - 1;
                        let chosen = left.iter().position(|weight| {
                            at -= weight;
                            at < 0.0
                        });
                        let chosen = chosen.unwrap_or(last);
                        left[chosen] = 0.0;
                        own[chosen / held as usize] += 1.0;
                    }
                }
                most += own.iter().copied().fold(0.0, f64::max);
                total += own.iter().sum::<f64>();
            }
            let (drawn, choices) = (most / 400.0, total / 400.0);
            let with = Experts { skew: Scalar(skew as f32), ..experts };
            let formula = with.busiest(choices, members);
            // a row never chooses an expert twice, which evens out what is drawn a little
            assert!((drawn / formula - 1.0).abs() < 0.03, "{members} {skew}: {drawn} {formula}");
        }
        assert_eq!(experts.busiest(60.0, 1), 60.0);
    }

    #[test]
    fn experts_by_member_send_what_tensor_parallelism_sends_and_wait_for_the_busiest() {
        let shape = find("qwen3-30b-a3b").unwrap().shape(DType::Bf16);
        let whole = shape.with_experts_by_member(0.0).unwrap();
        let among = AllReduce::of(part("H100-SXM-80GB").unwrap(), 4).unwrap();
        assert_eq!(among.of_step(&whole, 100), among.of_step(&shape, 100));
        assert_eq!((whole.check_split(8), whole.kv_copies(8)), (Ok(()), shape.kv_copies(8)));
        assert!(whole.check_split(3).is_err());
        let arithmetic = |shape: &ModelShape, rows: u32| {
            let ops = shape.split(4).step_ops(&[], rows, 0);
            let of_experts = ops.iter().filter(|(sig, _)| matches!(sig, OpSig::GroupedGemm { .. }));
            of_experts.map(|(sig, count)| sig.flops() * *count as f64).sum::<f64>()
        };
        for rows in [16, 4096] {
            let busiest = whole.experts.unwrap().busiest(f64::from(8 * rows), 4) / f64::from(2 * rows);
            let ratio = arithmetic(&whole, rows) / arithmetic(&shape, rows);
            assert!((ratio / busiest - 1.0).abs() < 0.02, "{rows}: {ratio} {busiest}");
        }
    }

    #[test]
    fn columns_of_experts_are_cut_between_words_of_codes() {
        let cut = |inner| [0..96, 96..160].map(|part| Experts::share(inner, &part, 160));
        assert_eq!(cut(64), [0..32, 32..64]);
        assert_eq!(cut(2048), [0..1224, 1224..2048]);
        // few columns, or no words
        assert_eq!((cut(40), cut(70)), ([0..24, 24..40], [0..42, 42..70]));
    }

    #[test]
    fn layers_with_experts_are_counted() {
        let with = |dense_layers, every| Experts { dense_layers, every, ..Experts::new(8, 2, 1) };
        let counts = [with(0, 1), with(3, 1), with(0, 2), with(100, 1)].map(|experts| experts.layers(48));
        assert_eq!(counts, [48, 45, 24, 0]);
    }

    fn stored_bytes(shape: &ModelShape, rows: u32) -> f64 {
        let bytes = |(sig, runs): &(OpSig, u64)| match *sig {
            OpSig::Gemm { n, k, weight, .. } => {
                *runs as f64 * f64::from(n) * f64::from(k) * weight.size_bytes() as f64
            }
            OpSig::GroupedGemm { grouped, n, k, weight: MatrixKind::Plain(weight), .. } => {
                let matrices = f64::from(grouped.touched) * f64::from(n) * f64::from(k);
                *runs as f64 * matrices * weight.size_bytes() as f64
            }
            _ => 0.0,
        };
        // with the up-projections of latents as they are stored: here they are decoded and taken apart
        shape.dense_ops(rows, true).stored.iter().map(bytes).sum()
    }

    /// A step of one row reads what is active, a large one everything that is resident.
    #[test]
    fn a_step_reads_the_weights_of_touched_experts() {
        for name in ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b"] {
            let model = find(name).unwrap();
            let shape = model.shape(DType::Bf16);
            let count = model.parameters();
            let gates =
                u64::from(shape.mlp_layers()[1] * shape.hidden) * u64::from(shape.experts.unwrap().count);
            let own = if shape.experts.unwrap().quantised_alone { 0 } else { count.shared - gates };
            let near = |rows, parameters: u64| {
                let ratio = stored_bytes(&shape, rows) / (2.0 * parameters as f64);
                assert!((ratio - 1.0).abs() < 0.005, "{name}, {rows} rows: {ratio}");
            };
            near(1, own + count.routed_active);
            near(10_000, own + count.routed);
        }
    }

    #[test]
    fn arithmetic_is_of_the_active_parameters_at_any_batch() {
        let model = find("qwen3-235b-a22b").unwrap();
        let shape = model.shape(DType::Bf16);
        let active = model.parameters().active() - model.parameters().tables;
        // where rows do not fill experts evenly, a touched expert's rows are rounded
        for (rows, error) in [(1, 0.01), (64, 0.25), (4096, 0.01)] {
            let work = shape.dense_ops(rows, true);
            let all = work.plain.iter().chain(&work.stored);
            let flops: f64 = all
                .filter(|(sig, _)| matches!(sig, OpSig::Gemm { .. } | OpSig::GroupedGemm { .. }))
                .map(|(sig, runs)| sig.flops() * *runs as f64)
                .sum();
            let ratio = flops / (2.0 * f64::from(rows) * active as f64);
            assert!((ratio - 1.0).abs() < error, "{rows} rows: {ratio}");
        }
    }

    fn on_h200s(name: &str, devices: u32, whole: bool) -> CostModel {
        let part = part("H200-SXM-141GB").unwrap();
        let mut shape = find(name).unwrap().shape_as("fp8".parse().unwrap());
        if whole {
            shape.experts.as_mut().unwrap().spread = devices;
        }
        assert_eq!(shape.check_split(devices), Ok(()));
        CostModel::Profile(Box::new(ProfileCost {
            profile: part.reached_profile().unwrap(),
            shape,
            chunk_tokens: 2048,
            all_reduce: AllReduce::of(part, devices),
            engine: EngineCost::OURS,
        }))
    }

    #[test]
    fn what_an_engine_adds_to_a_layer_with_experts_counts_once_in_each() {
        let with = |engine| match on_h200s("deepseek-v3", 8, false) {
            CostModel::Profile(cost) => CostModel::Profile(Box::new(ProfileCost { engine, ..*cost })),
            other => other,
        };
        let nothing = EngineCost { per_expert_layer_s: 0.0, ..EngineCost::VLLM };
        let more = with(EngineCost::VLLM).decode_step_s(4, 4000) - with(nothing).decode_step_s(4, 4000);
        assert!((more.0 / (58.0 * EngineCost::VLLM.per_expert_layer_s) - 1.0).abs() < 1e-6, "{more:?}");
    }

    /// With latent attention, tensor parallelism makes every device read the KV of all sequences; dividing
    /// the sequences and the experts does not.
    #[test]
    fn whole_experts_pay_where_devices_would_all_read_the_same_latents() {
        let (sliced, whole) = (on_h200s("deepseek-v3", 8, false), on_h200s("deepseek-v3", 8, true));
        let step = |cost: &CostModel, batch: u32| cost.decode_step_s(batch, u64::from(batch) * 16_384);
        assert!(step(&whole, 256).0 < 0.9 * step(&sliced, 256).0);
        // A single sequence is computed by one device alone.
        assert!(step(&whole, 1) > step(&sliced, 1));
    }

    #[test]
    fn rows_are_sent_to_the_devices_of_their_experts() {
        let mut shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        shape.experts.as_mut().unwrap().spread = 8;
        // 8 draws among 8 devices miss one with (7/8)^8
        let peers = 7.0 * (1.0 - 0.875f64.powi(8));
        assert_eq!(shape.exchanged_bytes(800), 100.0 * peers * 7168.0 * 2.0);
        assert_eq!(shape.split(8), shape);
        assert!(shape.check_split(7).unwrap_err().contains("256 experts"));
        let sums = AllReduce::of(part("H200-SXM-141GB").unwrap(), 8).unwrap().of_step(&shape, 800);
        assert!(sums > Seconds::ZERO);
    }

    #[test]
    fn tables_of_a_mixture_answer_like_its_operations() {
        let by_member = |cost: CostModel| match cost {
            CostModel::Profile(mut cost) => {
                cost.shape = cost.shape.with_experts_by_member(0.5).unwrap();
                CostModel::Profile(cost)
            }
            other => other,
        };
        for (name, slow) in [
            ("deepseek-v3", on_h200s("deepseek-v3", 8, true)),
            ("deepseek-v3", on_h200s("deepseek-v3", 8, false)),
            ("qwen3-next-80b-a3b", on_h200s("qwen3-next-80b-a3b", 2, false)),
            ("deepseek-v3 by member", by_member(on_h200s("deepseek-v3", 8, false))),
        ] {
            let fast = slow.compiled();
            for (batch, context) in [(1, 300), (17, 5000), (200, 2000), (900, 900)] {
                let keys = u64::from(batch) * context;
                let ratio = fast.decode_step_s(batch, keys) / slow.decode_step_s(batch, keys);
                assert!((ratio - 1.0).abs() < 0.03, "{name}, {batch} x {context}: {ratio}");
            }
            for (before, tokens) in [(0, 100), (0, 5000), (3000, 2048)] {
                let ratio = fast.prefill_s(before, tokens) / slow.prefill_s(before, tokens);
                assert!((ratio - 1.0).abs() < 0.03, "{name}, {tokens} after {before}: {ratio}");
            }
        }
    }
}
