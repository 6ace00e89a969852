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

use super::{Activation, LayerOps, ModelShape, OpArg, OpSink, Projection, Weight};
use mixfleet_hal::cast::to_u32;
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
    /// Whether a gate scales the shared experts' output for each row (Qwen2-MoE).
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

/// The expected maximum of this many independent normal numbers of mean 0 and deviation 1, from one on.
const GREATEST_OF: [f64; 8] = [0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424];

const fn none() -> Scalar {
    Scalar(0.0)
}

const fn one() -> u32 {
    1
}

impl Experts {
    /// `count` experts with `intermediate` inner rows in every layer; a token uses `active` of them.
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
    /// A member with a share p of the experts gets a mean of `c p` of c choices. Its variance is `c p (1 -
    /// p)`, as of c draws, plus `(c p)^2 skew^2 (1 - p) / held`, since its `held` experts are chosen more or
    /// less often than others in the long run. The maximum of `members` such numbers is about as many
    /// deviations above the mean as that of normal ones.
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

    /// The part of one of `devices` in tensor parallelism.
    pub(crate) fn split(self, devices: u32) -> Self {
        let shared = self.shared / devices;
        match self.by_member && devices > 1 {
            true => Experts { shared, held: Some(self.count.div_ceil(devices)), ..self },
            false => Experts { shared, intermediate: self.intermediate / devices, ..self },
        }
    }

    /// Other devices to which a row is sent on average, where whole experts are divided over devices.
    pub(crate) fn peers(&self) -> f64 {
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
}

/// An MLP over normed rows.
struct Mlp {
    inner: u32,
    has_biases: bool,
}

impl LayerOps<'_> {
    /// Pushes the norm and the MLP of a layer, or its experts.
    pub fn mlp(&self, tokens: u32, has_experts: bool, ops: &mut impl OpSink) {
        self.block_input(tokens, Weight::MlpNorm, ops);
        let has_biases = self.shape.mlp_bias;
        let Some(experts) = self.shape.experts.filter(|_| has_experts) else {
            let mlp = Mlp { inner: self.shape.intermediate, has_biases };
            return self.plain_mlp(tokens, &mlp, self.adds, ops);
        };
        let shared = Mlp { inner: experts.shared, has_biases: has_biases && !experts.shared_gate };
        match (experts.shared > 0, experts.shared_gate) {
            (true, true) => self.gated_mlp(tokens, &shared, ops),
            (true, false) => self.plain_mlp(tokens, &shared, self.adds, ops),
            (false, _) => {}
        }
        // the first term replaces the residual
        self.routed(&experts, tokens, self.adds || experts.shared > 0, ops);
    }

    fn plain_mlp(&self, tokens: u32, mlp: &Mlp, adds: bool, ops: &mut impl OpSink) {
        self.inner_layer(tokens, mlp, ops);
        let bias = Some(Weight::DownBias).filter(|_| mlp.has_biases);
        self.back([tokens, mlp.inner], Activation::Inner, (Weight::Down, bias), adds, ops);
    }

    /// Gate and up of an MLP, and their product.
    fn inner_layer(&self, tokens: u32, mlp: &Mlp, ops: &mut impl OpSink) {
        let bias = |weight| Some(weight).filter(|_| mlp.has_biases);
        let projection = |weight, bias, to| Projection { weight, bias, columns: mlp.inner, to };
        let of = [
            projection(Weight::Gate, bias(Weight::GateBias), Activation::Gate),
            projection(Weight::Up, bias(Weight::UpBias), Activation::Up),
        ];
        self.products([tokens, self.shape.hidden], Activation::Normed, &of, ops);
        let elements = u64::from(tokens) * u64::from(mlp.inner);
        if self.shape.style.gelu {
            let args = [Activation::Gate, Activation::Up, Activation::Inner].map(OpArg::from);
            return ops.push(OpSig::GeluMul { elements, x: self.shape.activation }, &args);
        }
        self.silu(elements, ops);
    }

    fn silu(&self, elements: u64, ops: &mut impl OpSink) {
        let args = [Activation::Gate, Activation::Up, Activation::Inner].map(OpArg::from);
        ops.push(OpSig::SiluMul { elements, x: self.shape.activation }, &args);
    }

    /// An MLP whose result a gate scales: the choice of one of one.
    fn gated_mlp(&self, tokens: u32, mlp: &Mlp, ops: &mut impl OpSink) {
        let routing = ExpertRouting { scoring: Scoring::Sigmoid, ..ExpertRouting::softmax(1, 1, false) };
        self.choose(tokens, routing, (Weight::SharedGate, None), None, ops);
        self.inner_layer(tokens, mlp, ops);
        let down =
            Projection { weight: Weight::Down, bias: None, columns: self.shape.hidden, to: Activation::Made };
        self.products([tokens, mlp.inner], Activation::Inner, &[down], ops);
        self.combine(tokens, 1, self.adds, ops);
    }

    /// The product that gives experts' logits, and the choice.
    fn choose(
        &self,
        tokens: u32,
        routing: ExpertRouting,
        (router, bias): (Weight, Option<Weight>),
        correction: Option<Weight>,
        ops: &mut impl OpSink,
    ) {
        let ModelShape { hidden: k, activation: x, weight, .. } = *self.shape;
        let (m, n, has_bias, logits) = (tokens, routing.experts, bias.is_some(), Activation::ExpertLogits);
        let (out, accumulate) = (DType::F32, false);
        let sig = OpSig::Gemm { m, n, k, x, weight, out, bias: has_bias, accumulate };
        ops.push(sig, &[Activation::Normed.into(), router.into(), bias.into(), logits.into()]);
        let args = [
            logits.into(),
            correction.into(),
            Activation::Chosen.into(),
            Activation::ChoiceWeights.into(),
            Activation::ChoiceOrder.into(),
            Activation::ChoiceStarts.into(),
        ];
        ops.push(OpSig::Route { tokens, bias: correction.is_some(), routing }, &args);
    }

    /// The routed experts: the gate, the choice, products by experts, and the sum of what they make.
    fn routed(&self, experts: &Experts, tokens: u32, adds: bool, ops: &mut impl OpSink) {
        let (x, hidden, inner) = (self.shape.activation, self.shape.hidden, experts.intermediate);
        let bias = |weight, has: bool| Some(weight).filter(|_| experts.clamped && has);
        let routing = experts.routing.unwrap_or(ExpertRouting::softmax(experts.count, experts.active, true));
        let correction = Some(Weight::Correction).filter(|_| experts.correction);
        self.choose(tokens, routing, (Weight::Router, bias(Weight::RouterBias, true)), correction, ops);

        let [gate, up, made] = [Activation::Gate, Activation::Up, Activation::Made];
        let of_gate = (Weight::ExpertGate, bias(Weight::ExpertGateBias, true));
        let normed = Activation::Normed;
        if self.joins || experts.clamped {
            self.by_expert(experts, (tokens, of_gate), [2 * inner, hidden], [normed, gate], ops);
        } else {
            self.by_expert(experts, (tokens, of_gate), [inner, hidden], [normed, gate], ops);
            self.by_expert(experts, (tokens, (Weight::ExpertUp, None)), [inner, hidden], [normed, up], ops);
        }
        let choices = u64::from(tokens) * u64::from(experts.active);
        let elements = choices * u64::from(inner);
        match experts.clamped {
            true => {
                let [alpha, limit] = self.constants.clamp;
                let args = [gate, Activation::Inner].map(OpArg::from);
                ops.push(OpSig::ClampedSwiglu { elements, alpha, limit, x }, &args);
            }
            false => self.silu(elements, ops),
        }
        let is_share = experts.held.is_some_and(|held| held < experts.count);
        if is_share {
            // what experts of other members make of a row is theirs to add
            let bytes = choices * u64::from(hidden) * x.size_bytes();
            ops.push(OpSig::Fill { bytes, word: 0 }, &[made.into()]);
        }
        // where members share the columns of experts, the first of them adds the bias
        let down_bias = bias(Weight::ExpertDownBias, self.adds || is_share);
        self.by_expert(
            experts,
            (tokens, (Weight::ExpertDown, down_bias)),
            [hidden, inner],
            [Activation::Inner, made],
            ops,
        );
        self.combine(tokens, experts.active, adds, ops);
    }

    /// A product by experts, from rows in one buffer to rows in another.
    fn by_expert(
        &self,
        experts: &Experts,
        (tokens, (by, bias)): (u32, (Weight, Option<Weight>)),
        [n, k]: [u32; 2],
        [from, to]: [Activation; 2],
        ops: &mut impl OpSink,
    ) {
        let (x, weight) = (self.shape.activation, MatrixKind::Plain(self.shape.weight));
        let grouped = experts.grouped(tokens, from == Activation::Normed);
        let sig = OpSig::GroupedGemm { grouped, n, k, x, weight, out: x, bias: bias.is_some() };
        let args = [
            from.into(),
            by.into(),
            bias.into(),
            Activation::ChoiceOrder.into(),
            OpArg::From(Activation::ChoiceStarts, self.constants.first_expert.into()),
            to.into(),
        ];
        ops.push(sig, &args);
    }

    /// The weighted sum of a row's expert outputs.
    fn combine(&self, tokens: u32, active: u32, accumulate: bool, ops: &mut impl OpSink) {
        let ModelShape { hidden: cols, activation: x, .. } = *self.shape;
        let args = [Activation::Made, Activation::ChoiceWeights, Activation::Residual].map(OpArg::from);
        ops.push(OpSig::Combine { tokens, active, cols, x, accumulate }, &args);
    }
}
