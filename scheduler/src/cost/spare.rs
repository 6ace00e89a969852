//! Attention in what other instances have to spare. An instance keeps a part of its KV beside its weights,
//! and devices that compute prompts keep the rest and attend to it, by request (Adrenaline, arXiv
//! 2503.20552).
//!
//! In the sum of its layers a step takes P for products with weights for all rows, A for attention to its own
//! sequences, N for the network, and A' for attention to the remote sequences on the device with the most of
//! them, which overlaps A:
//!
//! ```text
//! P + max(A, N + n A')
//! ```
//!
//! where n instances have work on that device, this one included. Its time is assumed to be shared evenly
//! among them, one kernel after the other; in turn its own instance's work takes `1 / (1 - u)` times as long,
//! where the attention of other instances takes the share `u` of its time. The model ignores that prompts use
//! arithmetic while attention uses bandwidth, so that both may overlap: Adrenaline gains that in addition.

use super::lockstep::LockstepCost;
use super::profiled::ProfileCost;
use super::tables::StepTables;
use super::{Attending, AttnSplit, CostModel, LinkCost, MemberWork, Partition, Prefill};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::profile::Predictor;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A model on devices with its weights and a part of its KV; the rest of the KV is on devices of other
/// instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpareCost {
    /// Products, and attention on remote devices.
    apart: LockstepCost,
    /// Attention where the weights are.
    own: CostModel,
    /// Share of the sequences that others attend to.
    lent: f64,
    /// Instances that have work on a device that attends, this one included.
    tenants: u32,
}

/// The remote devices that an instance uses for attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpareDevices {
    /// Their number.
    pub devices: u32,
    /// Share of the sequences to which they attend, from 0 to 1.
    pub lent: f64,
    /// Instances that have work there, this one included.
    pub tenants: u32,
}

/// How many instances of a pool attend for one of another, and for how many of these one attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lending {
    /// Number of instances in the pool that attends.
    pub count: u32,
    /// Number of remote devices that run attention for one instance.
    pub lenders: u32,
    /// Maximum number of instances that one remote device serves.
    pub borrowers: u32,
}

impl Lending {
    /// Of the numbers of lending and borrowing instances, at least one each: as many lenders to each borrower
    /// as all can have, or one.
    pub fn of(lending: u32, borrowing: u32) -> Self {
        let (count, borrowing) = (lending.max(1), borrowing.max(1));
        let lenders = (count / borrowing).max(1);
        let borrowers = (u64::from(borrowing) * u64::from(lenders)).div_ceil(count.into());
        Lending { count, lenders, borrowers: to_u32(borrowers) }
    }

    /// The lenders of a borrower, by number.
    pub fn lenders_of(self, borrower: u32) -> impl Iterator<Item = u32> {
        let first = u64::from(borrower) * u64::from(self.lenders);
        (0..self.lenders).map(move |at| to_u32((first + u64::from(at)) % u64::from(self.count)))
    }

    /// The default share of lent room: as in `serve`, the free memory of a device is shared evenly among the
    /// instances that keep KV there.
    pub fn even_share(self) -> f64 {
        f64::from(self.borrowers) / (f64::from(self.borrowers) + 1.0)
    }
}

impl SpareCost {
    /// How prompts that are computed where the weights are, and batches, are run.
    const HOW: Attending = Attending { staggered: false, prompts_with_weights: true };

    /// The cost of steps on devices with the weights, whose cost as if they had all work is `first` as `by`
    /// predicts it, and on devices of other instances, which another one predicts. `exchange` is what crosses
    /// in a layer.
    ///
    /// # Errors
    /// When the model's attention cannot be apart.
    pub fn new(
        (first, by): (&ProfileCost, &Arc<Predictor>),
        others: &Arc<Predictor>,
        exchange: LinkCost,
        spare: SpareDevices,
    ) -> Result<Self, String> {
        let partition = Partition::attention(&first.shape, 1, AttnSplit::Request)?;
        let products: Arc<StepTables> = LockstepCost::products(first, by, Self::HOW);
        let others = std::slice::from_ref(others);
        let apart = LockstepCost::new(&partition, (first, products), others, exchange, Self::HOW)?;
        let lists = first.profile.launch * f64::from(first.shape.layers());
        let own = Arc::new(first.clone()).tables_of(by, MemberWork::Attention, false);
        let own = CostModel::Tables(Arc::new(own.beginning_after(lists)));
        Ok(SpareCost { apart, own, lent: 0.0, tenants: 1 }.on(spare))
    }

    /// The same with more or fewer remote devices.
    #[must_use]
    pub fn on(&self, SpareDevices { devices, lent, tenants }: SpareDevices) -> Self {
        let lent = if devices == 0 { 0.0 } else { lent.clamp(0.0, 1.0) };
        let apart = self.apart.clone().with_holders(devices.max(1));
        SpareCost { apart, own: self.own.clone(), lent, tenants: tenants.max(1) }
    }

    /// The same with this many instances that have work on the remote devices.
    #[must_use]
    pub fn among(&self, tenants: u32) -> Self {
        SpareCost { tenants: tenants.max(1), ..self.clone() }
    }

    /// The same with all values of its tables computed.
    pub(super) fn computed(self) -> Self {
        SpareCost { apart: self.apart.computed(), own: self.own.compiled(), ..self }
    }

    /// Of a batch, the sequences to which others attend, and their keys.
    fn lent(&self, batch: u32, kv_tokens: u64) -> (u32, u64) {
        let there = to_u32((f64::from(batch) * self.lent).round()).min(batch);
        (there, to_u64(kv_tokens as f64 * f64::from(there) / f64::from(batch.max(1))).min(kv_tokens))
    }

    /// Time to compute a prompt's rest alone, where the weights are; see [`CostModel::prefill_s`].
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        self.apart.prefill_s(context_before, new_tokens)
    }

    /// Time of a step; see [`CostModel::step_s`].
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let (there, keys) = self.lent(batch, kv_tokens);
        let times = self.apart.sides(parts, batch, (there, keys));
        let own = match batch - there {
            0 => 0.0,
            here => self.own.step_s(&[], here, kv_tokens - keys).0,
        };
        let others = times.waits + times.attention * f64::from(self.tenants);
        Seconds((times.products + own.max(others)).max(times.link))
    }

    /// Time that a step takes on each of the remote devices.
    fn attends_s(&self, batch: u32, kv_tokens: u64) -> Seconds {
        let apart = self.lent(batch, kv_tokens);
        Seconds(self.apart.sides(&[], batch, apart).attention)
    }
}

impl CostModel {
    /// The same cost with this many instances that have work on the remote devices; `None` if there are no
    /// remote devices.
    pub fn among(&self, tenants: u32) -> Option<CostModel> {
        match self {
            CostModel::Spare(cost) => Some(CostModel::Spare(Arc::new(cost.among(tenants)))),
            CostModel::Scaled(times, cost) => Some(CostModel::Scaled(*times, Arc::new(cost.among(tenants)?))),
            _ => None,
        }
    }

    /// The same cost with other remote devices; unchanged if there are none.
    #[must_use]
    pub fn on_spare(&self, spare: SpareDevices) -> CostModel {
        match self {
            CostModel::Spare(cost) => CostModel::Spare(Arc::new(cost.on(spare))),
            CostModel::Scaled(times, cost) => CostModel::Scaled(*times, Arc::new(cost.on_spare(spare))),
            other => other.clone(),
        }
    }

    /// The share of its time that each remote device spends on attention during consecutive steps of this
    /// batch; 0 if there are no remote devices.
    pub fn spare_share(&self, batch: u32, kv_tokens: u64) -> f64 {
        match self {
            CostModel::Spare(cost) if batch > 0 => {
                let step = cost.step_s(&[], batch, kv_tokens).0;
                if step > 0.0 { (cost.attends_s(batch, kv_tokens).0 / step).min(1.0) } else { 0.0 }
            }
            CostModel::Scaled(_, cost) => cost.spare_share(batch, kv_tokens),
            _ => 0.0,
        }
    }

    /// The cost of steps on a device of whose time others take a share.
    #[must_use]
    pub fn beside(self: &Arc<Self>, share: f64) -> Arc<CostModel> {
        /// The share left to an instance at least.
        const LEAST: f64 = 0.01;
        match share > 0.0 {
            true => Arc::new(CostModel::Scaled(1.0 / (1.0 - share).max(LEAST), self.clone())),
            false => self.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::{EngineCost, MemberShare, ModelShape};
    use crate::models;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::profile::DeviceProfile;
    use mixfleet_hal::random::Stream;

    const LINK: LinkCost = LinkCost { latency: Seconds(2e-5), seconds_per_byte: 1e-11, usd_per_byte: 0.0 };

    fn llama() -> ModelShape {
        models::find("llama-3.1-8b").unwrap().shape(DType::Bf16)
    }

    fn h100() -> DeviceProfile {
        part("H100-SXM-80GB").unwrap().profile()
    }

    fn first() -> ProfileCost {
        let (profile, shape) = (h100(), llama());
        ProfileCost { profile, shape, chunk_tokens: 512, all_reduce: None, engine: EngineCost::OURS }
    }

    /// Weights on an H100, and attention on others too.
    fn spare(others: &str, spare: SpareDevices) -> CostModel {
        let (by, other) = (Predictor::new(&h100()), Predictor::new(&part(others).unwrap().profile()));
        let cost = SpareCost::new((&first(), &Arc::new(by)), &Arc::new(other), LINK, spare);
        CostModel::Spare(Arc::new(cost.unwrap()))
    }

    #[test]
    fn without_devices_of_others_it_is_what_one_device_takes_but_for_its_lists() {
        let one = CostModel::Profile(Box::new(first()));
        let lists = (h100().launch * f64::from(2 * llama().layers())).0;
        let none = spare("L40S", SpareDevices { devices: 0, lent: 0.5, tenants: 2 });
        for (batch, context) in [(1, 100), (16, 1024), (100, 4096)] {
            let keys = u64::from(batch) * context;
            let ratio = (none.decode_step_s(batch, keys).0 - lists) / one.decode_step_s(batch, keys).0;
            assert!((ratio - 1.0).abs() < 0.02, "{batch} of {context}: {ratio}");
            assert_eq!(none.spare_share(batch, keys), 0.0);
        }
        // in four chunks, the lists of products alone
        let ratio = (none.prefill_s(0, 2048).0 - 2.0 * lists) / one.prefill_s(0, 2048).0;
        assert!((ratio - 1.0).abs() < 0.02, "{ratio}");
    }

    /// The formula of this module over the operations of each, one by one.
    fn formula(profiles: [&DeviceProfile; 2], of: SpareDevices, batch: u32, context: u64) -> f64 {
        let shape = llama();
        let sum = |profile: &DeviceProfile, work: MemberWork, rows: u32, keys: u64| {
            let share = MemberShare { work, ..MemberShare::whole(&shape) };
            let ops = share.step_ops(&shape, &[], rows, keys);
            let each = ops
                .iter()
                .map(|(sig, count)| (profile.time(sig) + profile.launch_per_command).0 * *count as f64);
            each.sum::<f64>() + profile.launch.0 * f64::from(shape.layers() + 1)
        };
        let there = (f64::from(batch) * of.lent).round();
        let here = batch - there as u32;
        let [first, other] = profiles;
        let own =
            if here == 0 { 0.0 } else { sum(first, MemberWork::Attention, here, u64::from(here) * context) };
        let each = (there / f64::from(of.devices)).ceil() as u32;
        let attends = sum(other, MemberWork::Attention, each, u64::from(each) * context);
        // (heads + 2 kv_heads) head_dim e out and heads head_dim e back, of 32 layers
        let waits = 32.0 * (2e-5 + there * 2.0 * 128.0 * f64::from(32 + 16 + 32) * 1e-11);
        let others = if there == 0.0 { 0.0 } else { waits + attends * f64::from(of.tenants) };
        sum(first, MemberWork::Products, batch, 0) + own.max(others)
    }

    #[test]
    fn a_step_is_its_products_and_the_longer_of_both_attentions() {
        let mut random = Stream::new(20_261_126);
        let (first, other) = (h100(), part("L40S").unwrap().profile());
        let mut longer = [0; 2];
        for _ in 0..200 {
            let of = SpareDevices {
                devices: 1 + random.below(4) as u32,
                lent: random.below(100) as f64 / 100.0,
                tenants: 1 + random.below(3) as u32,
            };
            let (batch, context) = (1 + random.below(256) as u32, 16 + random.below(8000));
            let step = spare("L40S", of).decode_step_s(batch, u64::from(batch) * context).0;
            let ratio = step / formula([&first, &other], of, batch, context);
            // keys are divided evenly where sequences are not, and tables are within a hundredth
            assert!((0.93..1.02).contains(&ratio), "{of:?}, {batch} of {context}: {ratio}");
            let idle = spare("L40S", SpareDevices { tenants: 1, ..of });
            longer[usize::from(step > idle.decode_step_s(batch, u64::from(batch) * context).0)] += 1;
        }
        assert!(longer.iter().all(|count| *count > 20), "either side is the longer one: {longer:?}");
    }

    #[test]
    fn others_lose_no_more_than_their_share_of_a_device_and_what_they_lose_is_attended_to() {
        for tenants in [1, 2, 3] {
            let of = SpareDevices { devices: 2, lent: 0.9, tenants };
            let cost = spare("L4", of);
            let (batch, keys) = (64, 64 * 8192);
            let share = cost.spare_share(batch, keys);
            assert!(share > 0.0 && share <= 1.0 / f64::from(tenants) + 1e-12, "{tenants}: {share}");
            let alone = cost.among(1).unwrap();
            let same = share * cost.decode_step_s(batch, keys).0;
            let attends = alone.spare_share(batch, keys) * alone.decode_step_s(batch, keys).0;
            assert!((same / attends - 1.0).abs() < 1e-9, "the device's own time stays: {same} {attends}");
            let prompts = Arc::new(CostModel::Profile(Box::new(first())));
            let slowed = prompts.beside(share).prefill_s(0, 1024).0 / prompts.prefill_s(0, 1024).0;
            assert!((slowed * (1.0 - share) - 1.0).abs() < 1e-9, "{slowed}");
        }
    }

    #[test]
    fn slower_devices_and_other_numbers_of_them_are_the_same_cost() {
        let of = SpareDevices { devices: 4, lent: 0.5, tenants: 2 };
        let cost = spare("L40S", of);
        let fewer = SpareDevices { devices: 1, ..of };
        let step = |cost: &CostModel| cost.decode_step_s(64, 64 * 4096).0;
        assert!(step(&cost.on_spare(fewer)) > step(&cost));
        assert_eq!(step(&cost.on_spare(fewer).on_spare(of)), step(&cost));
        let slowed = CostModel::Scaled(1.5, Arc::new(cost.clone()));
        assert_eq!(step(&slowed.on_spare(fewer)), 1.5 * step(&cost.on_spare(fewer)));
        assert_eq!(step(&slowed.among(1).unwrap()), 1.5 * step(&cost.among(1).unwrap()));
        assert_eq!(slowed.spare_share(64, 64 * 4096), cost.spare_share(64, 64 * 4096));
        let close = step(&cost.compiled()) / step(&cost);
        assert!((close - 1.0).abs() < 0.01, "{close}");
        let plain = CostModel::Profile(Box::new(first()));
        assert!(plain.among(2).is_none() && plain.on_spare(of) == plain);
    }

    #[test]
    fn everyone_has_as_many_lenders_and_none_has_more_borrowers_than_is_said() {
        for (lending, borrowing) in (1..20).flat_map(|a| (1..20).map(move |b| (a, b))) {
            let of = Lending::of(lending, borrowing);
            let mut borrowers = vec![0; lending as usize];
            for borrower in 0..borrowing {
                let mut own: Vec<u32> = of.lenders_of(borrower).collect();
                own.iter().for_each(|lender| borrowers[*lender as usize] += 1);
                own.sort_unstable();
                own.dedup();
                assert_eq!(own.len(), of.lenders as usize, "{lending} for {borrowing}: {own:?}");
            }
            let most = borrowers.iter().copied().max().unwrap();
            assert_eq!(most, of.borrowers, "{lending} for {borrowing}: {borrowers:?}");
            assert!(of.lenders == (lending / borrowing).max(1));
        }
    }

    #[test]
    fn latent_attention_is_refused() {
        let profile = h100();
        let shape = models::find("deepseek-v3").unwrap().shape(DType::Bf16);
        let first = ProfileCost { shape, ..first() };
        let by = Arc::new(Predictor::new(&profile));
        let refused = SpareCost::new((&first, &by), &by, LINK, SpareDevices::default());
        assert!(refused.unwrap_err().contains("per byte of KV"));
    }
}
