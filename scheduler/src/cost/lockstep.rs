//! Predicts steps of a model with attention offload, from the profiles of all devices.
//!
//! A step of one batch takes, summed over its layers, P for products on the devices with the weights, N for
//! the network, and A for attention on the slowest of the other devices, one after the other. Of two batches
//! in flight, each of half the sequences, one is multiplied while the other attends (staggered, as in Lamina,
//! arXiv 2405.01814). They alternate between two machines and a link, each of which serves one at a time, so
//! that a round of both takes
//!
//! ```text
//! max(P1 + P2, A1 + A2, N1 + N2, longest of P + A + N)
//! ```
//!
//! and a step is the shorter of this and of all in one batch. What crosses in a layer is a round trip and the
//! bytes of [`Partition::attention_bytes`]. Prompts are either attended to by the others too, or where the
//! weights are; then their KV alone crosses, beside everything else.

use super::mixture::share_keys;
use super::profiled::ProfileCost;
use super::tables::StepTables;
use super::{
    AttnSplit, Coefficients, CostModel, DecodeCoefficients, EngineCost, LinkCost, MemberWork, ModelShape,
    Partition, Prefill, PrefillCoefficients,
};
use mixfleet_hal::profile::{DeviceProfile, Predictor};
use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A model over devices with its weights, and others with its KV.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockstepCost {
    /// Work of the devices with the weights; devices that share the layers count as one.
    products: CostModel,
    /// What each of the others does with its own share; equal ones stand once.
    attending: Vec<CostModel>,
    /// Prompt tokens of a step.
    chunk_tokens: u32,
    /// How these divide the KV, and how many divide its pages.
    split: AttnSplit,
    holders: u32,
    /// What crosses in one layer there and back.
    exchange: LinkCost,
    layers: u32,
    /// Bytes that cross per layer and row whose attention is apart, and of KV alone.
    row_bytes: f64,
    kv_bytes: f64,
    /// How batches and prompts are run.
    attending_to: Attending,
}

/// Whether attention runs beside products, and for which rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attending {
    /// Whether two batches may be in flight.
    pub staggered: bool,
    /// Whether prompts are attended to where the weights are.
    pub prompts_with_weights: bool,
}

impl Attending {
    /// What simulations and plans take an instance to do.
    pub const STAGGERED: Attending = Attending { staggered: true, prompts_with_weights: true };

    /// What this project's engine does.
    pub const ENGINE: Attending = Attending { staggered: true, prompts_with_weights: false };
}

/// What a batch takes of each side and of the link between them, all layers.
pub(super) struct BatchTimes {
    pub(super) products: f64,
    pub(super) attention: f64,
    /// What it waits for the link.
    pub(super) waits: f64,
    /// What it takes of the link.
    pub(super) link: f64,
}

impl BatchTimes {
    fn alone(&self) -> f64 {
        (self.products + self.attention + self.waits).max(self.link)
    }

    /// The time in which both of two batches in flight come around.
    fn round(&self, other: &BatchTimes) -> f64 {
        let sides =
            [self.products + other.products, self.attention + other.attention, self.link + other.link];
        sides.into_iter().fold(self.alone().max(other.alone()), f64::max)
    }
}

impl LockstepCost {
    /// What crosses in a layer over a network: a message there and back takes 33 us, as published for GPUs
    /// over RDMA (Lamina, arXiv 2405.01814).
    pub fn network(bandwidth: BytesPerSecond) -> LinkCost {
        LinkCost { latency: Seconds(33e-6), seconds_per_byte: 1.0 / bandwidth.0, usd_per_byte: 0.0 }
    }

    /// What devices with the weights do of steps, from the cost as if they had all work, which `by` predicts.
    pub fn products(first: &ProfileCost, by: &Arc<Predictor>, attending_to: Attending) -> Arc<StepTables> {
        let lists = first.profile.launch * f64::from(first.shape.layers() + 1);
        let prompts = attending_to.prompts_with_weights;
        let tables = Arc::new(first.clone()).tables_of(by, MemberWork::Products, prompts);
        Arc::new(tables.beginning_after(lists + Seconds(first.engine.per_step_s)))
    }

    /// The cost of steps of a model that is divided so: on devices with the weights, with their cost as if
    /// they had all work and their products, and on others, each with what predicts it. `exchange` is the
    /// cost of what crosses in a layer. Sequences that are divided by request are taken to be spread evenly.
    ///
    /// # Errors
    /// If no members are set apart for attention, or the predictors do not match the members.
    pub fn new(
        partition: &Partition,
        (first, products): (&ProfileCost, Arc<StepTables>),
        others: &[Arc<Predictor>],
        exchange: LinkCost,
        attending_to: Attending,
    ) -> Result<Self, String> {
        let split = partition.split().ok_or("no members are set apart for attention")?;
        let shares = partition.shares();
        if shares.len() != others.len() + 1 {
            return Err(format!("{} profiles for {} members", others.len() + 1, shares.len()));
        }
        let ProfileCost { ref shape, engine, chunk_tokens, .. } = *first;
        let (holders, layers) = (partition.page_holders(), shape.layers());
        // queries of a sequence that is divided by ranges go to all
        let of_token = if split == AttnSplit::Range { holders } else { 1 };
        let bytes = partition.attention_bytes(shape, of_token).ok_or("attention has no members")?;
        let stored: u64 = shares.iter().map(|share| share.kv_bytes_per_token(shape)).sum();
        let kv_bytes = stored as f64 / f64::from(layers.max(1) * holders);

        let prompts = attending_to.prompts_with_weights;
        let mut attending = Vec::new();
        let mut known: Vec<(usize, &Arc<Predictor>)> = Vec::new();
        for (share, predictor) in shares.iter().skip(1).zip(others) {
            let same = |(heads, of): &(usize, &Arc<Predictor>)| {
                *heads == share.heads.len() && Arc::ptr_eq(of, predictor)
            };
            if known.iter().any(same) {
                continue;
            }
            known.push((share.heads.len(), predictor));
            let profile = predictor.profile().clone();
            let lists = profile.launch * f64::from(layers);
            let own = share.of(&shape.on(&profile));
            let own = ProfileCost { profile, shape: own, chunk_tokens, all_reduce: None, engine };
            let tables = Arc::new(own).tables_of(predictor, MemberWork::Attention, !prompts);
            attending.push(CostModel::Tables(Arc::new(tables.beginning_after(lists))));
        }
        Ok(LockstepCost {
            products: CostModel::Tables(products),
            attending,
            chunk_tokens,
            split,
            holders,
            exchange,
            layers,
            row_bytes: (bytes.out + bytes.back) as f64,
            kv_bytes,
            attending_to,
        })
    }

    /// The cost of steps whose time for one batch was measured, exchanges included, on this project's
    /// instances. Time that grows with keys counts as attention and all else as products, which
    /// underestimates the overlap.
    pub fn measured(whole: Coefficients) -> Self {
        let Coefficients { prefill_s, decode_s } = whole;
        let products = Coefficients {
            prefill_s: PrefillCoefficients { per_token_squared: 0.0, ..prefill_s },
            decode_s: DecodeCoefficients { per_kv_token: 0.0, ..decode_s },
        };
        let attention = Coefficients {
            prefill_s: PrefillCoefficients { overhead: 0.0, per_token: 0.0, ..prefill_s },
            decode_s: DecodeCoefficients { base: 0.0, per_sequence: 0.0, ..decode_s },
        };
        LockstepCost {
            products: CostModel::Coefficients(products),
            attending: vec![CostModel::Coefficients(attention)],
            // the chunks of a prompt take what the whole takes
            chunk_tokens: u32::MAX,
            split: AttnSplit::Head,
            holders: 1,
            exchange: LinkCost::default(),
            layers: 0,
            row_bytes: 0.0,
            kv_bytes: 0.0,
            attending_to: Attending::ENGINE,
        }
    }

    /// The same with all values of its tables computed.
    pub(super) fn computed(self) -> Self {
        let computed = |cost| match cost {
            CostModel::Tables(tables) => CostModel::Tables(Arc::new(StepTables::clone(&tables).computed())),
            other => other,
        };
        let attending = self.attending.into_iter().map(computed).collect();
        LockstepCost { products: computed(self.products), attending, ..self }
    }

    /// Time to compute a prompt's rest alone; see [`CostModel::prefill_s`].
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let chunk_tokens = self.chunk_tokens;
        let chunk = |index: u32| {
            let done = index * chunk_tokens;
            let tokens = chunk_tokens.min(new_tokens - done);
            let last = done + tokens == new_tokens;
            self.step_s(&[Prefill { context: context_before + done, tokens, last }], 0, 0)
        };
        (0..new_tokens.div_ceil(chunk_tokens)).map(chunk).sum()
    }

    /// Time of a step; see [`CostModel::step_s`]. Prompts go with the first of two batches.
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let alone = self.of_batch(parts, batch, kv_tokens).alone();
        Seconds(self.round_s(parts, batch, kv_tokens).map_or(alone, |round| alone.min(round)))
    }

    /// The number of groups of sequences that a step should decode in, in which it takes the least time.
    pub(super) fn groups(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> u32 {
        let alone = self.of_batch(parts, batch, kv_tokens).alone();
        if self.round_s(parts, batch, kv_tokens).is_some_and(|round| round < alone) { 2 } else { 1 }
    }

    /// Time of a step with two batches in flight, if there may be.
    fn round_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Option<f64> {
        let second = batch / 2;
        if !self.attending_to.staggered || second == 0 {
            return None;
        }
        let keys = share_keys(kv_tokens, batch, 2);
        let one = self.of_batch(parts, batch - second, keys.min(kv_tokens));
        let other = self.of_batch(&[], second, kv_tokens - keys.min(kv_tokens));
        Some(one.round(&other))
    }

    /// The same if the requests are divided evenly over this many equal devices.
    pub(super) fn with_holders(self, holders: u32) -> Self {
        LockstepCost { holders, ..self }
    }

    fn of_batch(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> BatchTimes {
        self.sides(parts, batch, (batch, kv_tokens))
    }

    /// Time of a batch of this many sequences with this context in tokens, whose attention partly runs on
    /// other devices.
    pub(super) fn sides(&self, parts: &[Prefill], rows: u32, (batch, kv_tokens): (u32, u64)) -> BatchTimes {
        let prompt_rows = f64::from(parts.iter().map(|part| part.tokens).sum::<u32>());
        let (rows_apart, kv_alone) = match self.attending_to.prompts_with_weights {
            true => (f64::from(batch), prompt_rows),
            false => (f64::from(batch) + prompt_rows, 0.0),
        };
        let crossing = |bytes: f64, trips: bool| {
            let time =
                self.exchange.time(Bytes(bytes)) - if trips { Seconds::ZERO } else { self.exchange.latency };
            time.0 * f64::from(self.layers)
        };
        let waits = if rows_apart > 0.0 { crossing(rows_apart * self.row_bytes, true) } else { 0.0 };
        let attends = |cost: &CostModel| self.attends(cost, parts, batch, kv_tokens).0;
        BatchTimes {
            products: self.products.step_s(parts, rows, 0).0,
            attention: self.attending.iter().map(attends).fold(0.0, f64::max),
            waits,
            link: waits + crossing(kv_alone * self.kv_bytes, false),
        }
    }

    /// What one of the devices that attend takes.
    fn attends(&self, cost: &CostModel, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        // where the weights are, prompts' KV is attended to, and written here beside everything else
        let parts = if self.attending_to.prompts_with_weights { &[] } else { parts };
        if batch == 0 && parts.is_empty() {
            return Seconds::ZERO;
        }
        match self.split {
            AttnSplit::Range if self.holders > 1 => {
                // prompts row by row, over the keys of each device
                let (rows, keys) = parts.iter().fold((batch, kv_tokens), |(rows, keys), part| {
                    let mean = u64::from(part.context) + u64::from(part.tokens).div_ceil(2);
                    (rows + part.tokens, keys + u64::from(part.tokens) * mean)
                });
                cost.step_s(&[], rows, keys.div_ceil(self.holders.into()))
            }
            _ => {
                let keys = share_keys(kv_tokens, batch, self.holders);
                cost.step_s(parts, batch.div_ceil(self.holders), keys)
            }
        }
    }
}

impl CostModel {
    /// The cost of steps of a model of this shape on devices of these profiles: the first has the weights,
    /// the others run attention; steps have up to `rows` prompt tokens.
    ///
    /// # Errors
    /// As [`LockstepCost::new`].
    pub fn lockstep(
        partition: &Partition,
        shape: &ModelShape,
        profiles: &[DeviceProfile],
        (exchange, how): (LinkCost, Attending),
        chunk_tokens: u32,
    ) -> Result<CostModel, String> {
        let profile = profiles.first().ok_or("no profiles are given")?.clone();
        let first = ProfileCost {
            profile,
            shape: shape.clone(),
            chunk_tokens: chunk_tokens.max(1),
            all_reduce: None,
            engine: EngineCost::OURS,
        };
        let predictors: Vec<_> = profiles.iter().map(|profile| Arc::new(Predictor::new(profile))).collect();
        let others = predictors.get(1..).unwrap_or_default();
        let products = LockstepCost::products(&first, &predictors[0], how);
        let cost = LockstepCost::new(partition, (&first, products), others, exchange, how)?;
        Ok(CostModel::Lockstep(Arc::new(cost)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{EngineCost, ProfileCost};
    use crate::models;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;

    const NO_TIME: LinkCost = LinkCost { latency: Seconds(0.0), seconds_per_byte: 0.0, usd_per_byte: 0.0 };

    fn llama() -> ModelShape {
        models::find("llama-3.1-8b").unwrap().shape(DType::Bf16)
    }

    fn apart(split: AttnSplit, parts: &[&str], exchange: LinkCost) -> CostModel {
        let shape = llama();
        let partition = Partition::attention(&shape, parts.len() as u32 - 1, split).unwrap();
        let profiles: Vec<_> = parts.iter().map(|id| part(id).unwrap().profile()).collect();
        CostModel::lockstep(&partition, &shape, &profiles, (exchange, Attending::default()), 512).unwrap()
    }

    #[test]
    fn over_links_that_take_no_time_two_equal_devices_take_what_one_does() {
        let profile = part("H100-SXM-80GB").unwrap().profile();
        let lists = (profile.launch * f64::from(2 * llama().layers())).0;
        let one = CostModel::Profile(Box::new(ProfileCost {
            profile,
            shape: llama(),
            chunk_tokens: 512,
            all_reduce: None,
            engine: EngineCost::OURS,
        }));
        for split in AttnSplit::ALL {
            let two = apart(split, &["H100-SXM-80GB", "H100-SXM-80GB"], NO_TIME);
            let close = |two: Seconds, one: Seconds, what: &str| {
                let ratio = (two.0 - lists) / one.0;
                assert!((ratio - 1.0).abs() < 0.01, "{what} by {split}: {ratio}");
            };
            close(two.decode_step_s(16, 16 * 1024), one.decode_step_s(16, 16 * 1024), "decode");
            close(two.prefill_s(1024, 512), one.prefill_s(1024, 512), "prefill");
        }
    }

    #[test]
    fn more_devices_divide_attention_alone_and_the_slowest_counts() {
        let context = |cost: &CostModel| {
            let step = |context: u64| cost.decode_step_s(32, 32 * context).0;
            step(8192) - step(1024)
        };
        for split in AttnSplit::ALL {
            let of = |parts: &[&str]| apart(split, parts, NO_TIME);
            let one = of(&["H100-SXM-80GB", "RTX-4090"]);
            let two = of(&["H100-SXM-80GB", "RTX-4090", "RTX-4090"]);
            let slower = of(&["H100-SXM-80GB", "RTX-4090", "L4"]);
            let ratio = context(&one) / context(&two);
            assert!((1.9..2.1).contains(&ratio), "by {split}: {ratio}");
            assert!(context(&slower) > 1.5 * context(&two), "by {split}");
        }
    }

    #[test]
    fn what_crosses_is_paid_in_every_layer() {
        let link = LinkCost { latency: Seconds(1e-5), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };
        let of =
            |exchange| apart(AttnSplit::Head, &["H100-SXM-80GB", "L40S"], exchange).decode_step_s(8, 800);
        let crossing = of(link).0 - of(NO_TIME).0;
        // 32 layers; 12,288 bytes of a token out and 8192 back
        let expected = 32.0 * (1e-5 + 8.0 * (12_288.0 + 8192.0) * 1e-9);
        assert!((crossing / expected - 1.0).abs() < 1e-6, "{crossing} for {expected}");
    }

    /// Two batches over these parts, one with the weights and the others attending.
    fn staggered(parts: &[&str], exchange: LinkCost, attending: Attending) -> CostModel {
        let shape = llama();
        let partition = Partition::attention(&shape, parts.len() as u32 - 1, AttnSplit::Head).unwrap();
        let profiles: Vec<_> = parts.iter().map(|id| part(id).unwrap().profile()).collect();
        let first = ProfileCost {
            profile: profiles[0].clone(),
            shape,
            chunk_tokens: 512,
            all_reduce: None,
            engine: EngineCost::OURS,
        };
        let [first_one, others] = [0, 1].map(|at| Arc::new(Predictor::new(&profiles[at])));
        let products = LockstepCost::products(&first, &first_one, attending);
        let others = vec![others; parts.len() - 1];
        let cost = LockstepCost::new(&partition, (&first, products), &others, exchange, attending).unwrap();
        CostModel::Lockstep(Arc::new(cost))
    }

    #[test]
    fn two_batches_hide_the_smaller_side_and_never_take_longer_than_one() {
        let parts = ["H100-SXM-80GB", "H100-SXM-80GB"];
        let both = Attending { staggered: true, prompts_with_weights: false };
        let (one, two) = (staggered(&parts, NO_TIME, Attending::default()), staggered(&parts, NO_TIME, both));
        let (mut hidden_most, mut saved_none) = (0.0f64, false);
        for context in [128, 512, 2048, 8192, 32_768] {
            // of 256 sequences, halves take half of the attention and nearly all of the products
            let keys = 256 * context;
            let (sum, step) = (one.decode_step_s(256, keys).0, two.decode_step_s(256, keys).0);
            assert!(step <= sum * (1.0 + 1e-12), "{context}: {step} {sum}");
            let half = one.decode_step_s(128, keys / 2).0;
            assert!(step >= half.min(sum) * (1.0 - 1e-9), "a batch waits for no less than itself");
            hidden_most = hidden_most.max((sum - step) / half);
            saved_none |= step == sum;
        }
        assert!(saved_none, "few keys are attended to in no time, and halves read the weights twice");
        assert!(hidden_most > 0.3, "{hidden_most}");
        assert_eq!(one.decode_step_s(1, 500), two.decode_step_s(1, 500), "one sequence is one batch");
    }

    #[test]
    fn a_step_is_cut_in_two_where_that_is_predicted_to_take_less() {
        let parts = ["H100-SXM-80GB", "H100-SXM-80GB"];
        let [one, two] = [Attending::default(), Attending::ENGINE].map(|how| staggered(&parts, NO_TIME, how));
        let measured = Coefficients {
            prefill_s: PrefillCoefficients { overhead: 0.01, per_token: 1e-4, per_token_squared: 1e-9 },
            decode_s: DecodeCoefficients { base: 0.02, per_sequence: 1e-4, per_kv_token: 1e-7 },
        };
        let whole = CostModel::Coefficients(measured);
        let by_steps = CostModel::Lockstep(Arc::new(LockstepCost::measured(measured)));
        let chunk = [Prefill { context: 100, tokens: 200, last: true }];
        for (one, two) in [(one, two), (whole, by_steps)] {
            let mut cut = 0;
            for (batch, context) in
                [(1, 1 << 20), (2, 16), (2, 1 << 20), (256, 128), (256, 8192), (255, 8192)]
            {
                let keys = u64::from(batch) * context;
                for parts in [&[][..], &chunk] {
                    let (alone, step) = (one.step_s(parts, batch, keys).0, two.step_s(parts, batch, keys).0);
                    let groups = two.decode_groups(parts, batch, keys);
                    assert_eq!(
                        groups == 2,
                        step < alone * (1.0 - 1e-9),
                        "{batch} of {context}: {step} {alone}"
                    );
                    assert!(step <= alone * (1.0 + 1e-9), "{batch} of {context}: {step} {alone}");
                    assert!(batch > 1 || groups == 1, "one sequence is one batch");
                    cut += u32::from(groups == 2);
                }
                assert_eq!(one.decode_groups(&[], batch, keys), 1);
            }
            assert!(cut > 0);
            let prompt = (one.prefill_s(0, 5000).0, two.prefill_s(0, 5000).0);
            assert!((prompt.0 / prompt.1 - 1.0).abs() < 1e-9, "{prompt:?}");
        }
    }

    #[test]
    fn a_round_of_two_batches_is_that_of_two_machines_and_a_link() {
        // each half takes its turns in order on the products, the link there and back, and attention
        let round = |[p, n, a]: [f64; 3]| {
            let (mut free, mut ready, mut ends) = ([0.0f64; 3], [0.0f64; 2], Vec::new());
            for _ in 0..200 {
                for at in &mut ready {
                    for (machine, time) in [(0, p), (1, n), (2, a)] {
                        *at = free[machine].max(*at) + time;
                        free[machine] = *at;
                    }
                }
                ends.push(ready[0]);
            }
            (ends[199] - ends[99]) / 100.0
        };
        for times in [[3.0, 1.0, 2.0], [1.0, 0.2, 1.0], [1.0, 5.0, 1.0], [2.0, 2.0, 2.0], [0.5, 0.1, 4.0]] {
            let [products, waits, attention] = times;
            let batch = BatchTimes { products, attention, waits, link: waits };
            let formula = batch.round(&batch);
            assert!((round(times) - formula).abs() < 1e-9, "{times:?}: {} {formula}", round(times));
        }
    }

    #[test]
    fn prompts_with_the_weights_send_their_kv_beside_their_computation() {
        let link =
            |rate: f64| LinkCost { latency: Seconds(1e-5), seconds_per_byte: 1.0 / rate, usd_per_byte: 0.0 };
        let own = Attending { staggered: false, prompts_with_weights: true };
        let parts = ["H100-SXM-80GB", "RTX-4090"];
        let of = |rate: f64| staggered(&parts, link(rate), own).prefill_s(0, 2048).0;
        assert_eq!(of(1e12), of(1e11), "4 KiB of each of 2048 tokens and 32 layers are hidden");
        // 2048 tokens of 131,072 bytes
        assert!((of(1e8) / (2048.0 * 131_072.0 / 1e8) - 1.0).abs() < 1e-9);
        let apart = staggered(&parts, link(1e12), Attending::default()).prefill_s(0, 2048).0;
        assert!(of(1e12) < apart, "there and back in every layer: {} {apart}", of(1e12));
    }

    #[test]
    fn profiles_of_others_are_refused() {
        let shape = llama();
        let profile = part("L40S").unwrap().profile();
        let of = |partition: &Partition, profiles: &[DeviceProfile]| {
            CostModel::lockstep(partition, &shape, profiles, (NO_TIME, Attending::ENGINE), 512).unwrap_err()
        };
        let apart = Partition::attention(&shape, 1, AttnSplit::Head).unwrap();
        assert!(of(&apart, std::slice::from_ref(&profile)).contains("1 profiles"));
        let divided = Partition::even(&shape, 2).unwrap();
        assert!(of(&divided, &[profile.clone(), profile]).contains("no members are set apart for attention"));
    }
}
