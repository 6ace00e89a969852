//! Predicts steps of a model whose attention has devices of its own, from the profiles of all.
//!
//! In every layer the members wait for each other, so that a step takes the time of the products on the first
//! one, of attention on the slowest of the others, and of what crosses between; each layer is submitted to
//! both sides.

use super::tables::{Grid, StepParts, StepTables};
use super::{
    AttnSplit, CostModel, LinkCost, MemberShare, MemberWork, ModelShape, OpCounts, Partition, Prefill, knots,
};
use mixfleet_hal::OpSig;
use mixfleet_hal::profile::{DeviceProfile, Predictor};
use mixfleet_hal::units::{Bytes, Seconds};
use std::sync::Arc;

/// Sequences in a step, and tokens of context, up to which tables are made.
const SEQUENCES_MAX: u32 = 1024;
const CONTEXT_MAX: u32 = 131_072;

/// A member with its share, and what predicts its operations.
struct ProfiledMember {
    share: MemberShare,
    predictor: Predictor,
}

/// A model over profiled devices that wait for each other.
struct Lockstep {
    shape: ModelShape,
    split: AttnSplit,
    /// Members that attend; those among which pages are divided.
    holders: u32,
    first: ProfiledMember,
    attending: Vec<ProfiledMember>,
    exchange: LinkCost,
    /// Bytes that cross per token and layer.
    bytes: u64,
}

impl CostModel {
    /// The cost of steps of a model of this shape on devices of these profiles, the first of which has the
    /// weights while the others attend; `exchange` is the cost of what crosses in a layer. Sequences that are
    /// divided by request are taken to be spread evenly.
    ///
    /// # Errors
    /// When attention has no members of its own, or the profiles are not those of the members.
    pub fn lockstep(
        partition: &Partition,
        shape: &ModelShape,
        profiles: &[DeviceProfile],
        exchange: LinkCost,
        chunk_tokens: u32,
    ) -> Result<CostModel, String> {
        let split = partition.split().ok_or("attention has no members of its own")?;
        let shares = partition.shares();
        if shares.len() != profiles.len() {
            return Err(format!("{} profiles are not those of {} members", profiles.len(), shares.len()));
        }
        let mut members = shares.iter().zip(profiles).map(|(share, profile)| ProfiledMember {
            share: share.clone(),
            predictor: Predictor::new(profile),
        });
        let first = members.next().ok_or("attention has no members of its own")?;
        let holders = partition.page_holders();
        // queries of a sequence that is divided by ranges go to all
        let of_token = if split == AttnSplit::Range { holders } else { 1 };
        let bytes = partition.attention_bytes(shape, of_token).map_or(0, |bytes| bytes.out + bytes.back);
        let attending = members.collect();
        let cost = Lockstep { shape: shape.clone(), split, holders, first, attending, exchange, bytes };
        Ok(CostModel::Tables(Arc::new(Arc::new(cost).tables(chunk_tokens.max(1)))))
    }
}

impl ProfiledMember {
    fn sum(&self, ops: &OpCounts) -> f64 {
        let launch = self.predictor.profile().launch_per_command;
        let time = |(sig, count): &(OpSig, u64)| (self.predictor.time(sig) + launch) * *count as f64;
        ops.iter().map(time).sum::<Seconds>().0
    }

    /// Seconds to submit lists of commands and wait for them.
    fn submissions(&self, lists: u32) -> f64 {
        self.predictor.profile().launch.0 * f64::from(lists)
    }
}

impl Lockstep {
    /// The slowest member that attends, by what each takes.
    fn slowest(&self, of: impl Fn(&ProfiledMember) -> f64) -> f64 {
        self.attending.iter().map(of).fold(0.0, f64::max)
    }

    /// Seconds of what is done row by row: products, what crosses, and writing keys and values.
    fn dense_s(&self, rows: u32) -> f64 {
        let written = if self.split == AttnSplit::Head { rows } else { rows.div_ceil(self.holders) };
        let of_rows = |member: &ProfiledMember, rows: u32| {
            let mut ops = member.share.of(&self.shape).dense_ops(rows, false).merged();
            let products = member.share.work == MemberWork::Products;
            ops.retain(|(sig, _)| sig.kv().is_none() == products);
            member.sum(&ops)
        };
        let crossing = self.exchange.time(Bytes(f64::from(rows) * self.bytes as f64)).0;
        of_rows(&self.first, rows)
            + self.slowest(|member| of_rows(member, written))
            + crossing * f64::from(self.shape.layers())
    }

    fn head_s(&self, rows: u32) -> f64 {
        self.first.sum(&self.shape.head_ops(rows, rows))
    }

    fn decode_s(&self, sequences: u32, context: u32) -> f64 {
        let (sequences, devices) = match self.split {
            AttnSplit::Head => (sequences, 1),
            AttnSplit::Request => (sequences.div_ceil(self.holders), 1),
            AttnSplit::Range => (sequences, self.holders),
        };
        let keys = (u64::from(sequences) * u64::from(context)).div_ceil(devices.into());
        self.attention_s(&[], sequences, keys)
    }

    fn prefill_s(&self, tokens: u32, context: u32) -> f64 {
        if self.split == AttnSplit::Range && self.holders > 1 {
            // row by row, over the keys of each member
            let mean = u64::from(context) + u64::from(tokens).div_ceil(2);
            return self.attention_s(&[], tokens, (u64::from(tokens) * mean).div_ceil(self.holders.into()));
        }
        self.attention_s(&[Prefill { context, tokens, last: false }], 0, 0)
    }

    fn attention_s(&self, parts: &[Prefill], sequences: u32, keys: u64) -> f64 {
        self.slowest(|member| {
            member.sum(&member.share.of(&self.shape).attention_ops(parts, sequences, keys).merged())
        })
    }

    fn tables(self: Arc<Self>, chunk_tokens: u32) -> StepTables {
        let layers = self.shape.layers();
        let contexts = knots::geometric(CONTEXT_MAX, 4);
        let with_none: Vec<u32> = std::iter::once(0).chain(contexts.iter().copied()).collect();
        let (prefill, decode) = (self.clone(), self.clone());
        let prefill = move |tokens: u32, context: u32| prefill.prefill_s(tokens, context);
        let decode = move |sequences: u32, context: u32| decode.decode_s(sequences, context);
        StepTables::of(StepParts {
            overhead_s: self.first.submissions(layers + 1) + self.slowest(|one| one.submissions(layers)),
            dense: knots::adaptive(chunk_tokens.max(SEQUENCES_MAX), |rows| self.dense_s(rows)),
            head: knots::adaptive(SEQUENCES_MAX, |rows| self.head_s(rows)),
            prefill: Grid::of_two(knots::geometric(chunk_tokens, 8), with_none, prefill),
            decode: Grid::of_two(knots::geometric(SEQUENCES_MAX, 4), contexts, decode),
            mixed: None,
            chunk_tokens,
        })
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
        CostModel::lockstep(&partition, &shape, &profiles, exchange, 512).unwrap()
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

    #[test]
    fn profiles_of_others_are_refused() {
        let shape = llama();
        let profile = part("L40S").unwrap().profile();
        let of = |partition: &Partition, profiles: &[DeviceProfile]| {
            CostModel::lockstep(partition, &shape, profiles, NO_TIME, 512).unwrap_err()
        };
        let apart = Partition::attention(&shape, 1, AttnSplit::Head).unwrap();
        assert!(of(&apart, std::slice::from_ref(&profile)).contains("1 profiles"));
        let divided = Partition::even(&shape, 2).unwrap();
        assert!(of(&divided, &[profile.clone(), profile]).contains("no members of its own"));
    }
}
