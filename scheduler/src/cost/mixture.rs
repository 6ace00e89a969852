//! What experts exchange in a step, and how many weights they have.

use super::ModelShape;
use mixfleet_hal::cast::to_u64;

impl ModelShape {
    /// Bytes that one device sends to its peers in a step of `rows` rows of all devices, for all layers with
    /// experts, once; the results come back in as many.
    pub(super) fn exchanged_bytes(&self, rows: u32) -> f64 {
        let Some(experts) = self.experts else { return 0.0 };
        let own = f64::from(rows) / f64::from(experts.spread.max(1));
        own * experts.peers() * f64::from(self.hidden) * self.activation.size_bytes().max(2) as f64
    }

    /// Elements of the experts of all layers, of the experts that a token uses, and of the shared ones with
    /// the gates: matrices only.
    pub(super) fn expert_parameters(&self) -> [u64; 3] {
        let Some(experts) = self.experts else { return [0; 3] };
        let layers = u64::from(self.mlp_layers()[1]) * u64::from(self.hidden);
        let of = |count: u32| layers * 3 * u64::from(count) * u64::from(experts.intermediate);
        let around = 3 * u64::from(experts.shared) + u64::from(experts.count);
        let held = experts.held.unwrap_or(experts.count);
        // a token uses the weights as many times as they are stored
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
    use super::super::{AllReduce, CostModel, EngineCost, Experts, MemberWork, ProfileCost};
    use super::*;
    use crate::models::find;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::random::Stream;
    use mixfleet_hal::units::Seconds;
    use mixfleet_hal::{DType, MatrixKind, OpSig, Scalar};
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
            // a row never chooses an expert twice, which evens out the draws a little
            assert!((drawn / formula - 1.0).abs() < 0.03, "{members} {skew}: {drawn} {formula}");
        }
        assert_eq!(experts.busiest(60.0, 1), 60.0);
    }

    #[test]
    fn experts_by_member_send_what_tensor_parallelism_sends_and_wait_for_the_busiest() {
        let shape = find("qwen3-30b-a3b").unwrap().shape(DType::Bf16);
        let whole = shape.with_experts_by_member(0.0).unwrap();
        let among = AllReduce::of(part("H100-SXM-80GB").unwrap(), 4).unwrap();
        assert_eq!(among.of_step(&whole, 100, false), among.of_step(&shape, 100, false));
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
        shape.dense_ops(rows, MemberWork::All, true).stored.iter().map(bytes).sum()
    }

    /// A step of one row reads the active experts, a large one all that are resident.
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
            let work = shape.dense_ops(rows, MemberWork::All, true);
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
        let sums = AllReduce::of(part("H200-SXM-141GB").unwrap(), 8).unwrap().of_step(&shape, 800, false);
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
