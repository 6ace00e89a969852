//! What a step and a transfer take, in seconds, from numbers alone.

mod link;
mod shape;

pub use link::LinkCost;
pub use shape::{ModelShape, OpCounts};

use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// Predicts the time of prefill and of decode steps on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CostModel {
    /// Operation by operation from a device's profile.
    Profile(Box<ProfileCost>),
    /// From coefficients fitted to a whole serving engine; they know what a profile cannot.
    Coefficients(Coefficients),
}

/// A model on a profiled device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileCost {
    /// The device.
    pub profile: DeviceProfile,
    /// The model.
    pub shape: ModelShape,
    /// Prompt tokens of one step; longer prompts run in chunks, each of which pays the launch cost
    /// and reads the weights again.
    pub chunk_tokens: u32,
}

/// Coefficients of prefill and decode time, all in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Of a prompt.
    pub prefill_s: PrefillCoefficients,
    /// Of a decode step.
    pub decode_s: DecodeCoefficients,
}

/// prefill of n tokens with p reused = overhead + per_token (n - p) + per_token_squared (n² - p²)
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillCoefficients {
    /// Per request.
    pub overhead: f64,
    /// Per computed token.
    pub per_token: f64,
    /// Per computed pair of tokens, causality not discounted.
    pub per_token_squared: f64,
}

/// step = base + per_sequence * batch + per_kv_token * KV tokens of the whole batch
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeCoefficients {
    /// Per step.
    pub base: f64,
    /// Per sequence in it.
    pub per_sequence: f64,
    /// Per token of context that the step reads.
    pub per_kv_token: f64,
}

impl CostModel {
    /// Time to compute `new_tokens` of a prompt after `context_before` tokens whose KV is there.
    /// No tokens take no time.
    pub fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        if new_tokens == 0 {
            return Seconds::ZERO;
        }
        match self {
            CostModel::Profile(cost) => cost.prefill_s(context_before, new_tokens),
            CostModel::Coefficients(Coefficients { prefill_s: c, .. }) => {
                let (p, n) = (f64::from(context_before), f64::from(context_before) + f64::from(new_tokens));
                Seconds(c.overhead + c.per_token * (n - p) + c.per_token_squared * (n * n - p * p))
            }
        }
    }

    /// Time of one decode step of `batch` sequences with `kv_tokens` tokens of context together.
    /// An empty batch takes no time.
    pub fn decode_step_s(&self, batch: u32, kv_tokens: u64) -> Seconds {
        if batch == 0 {
            return Seconds::ZERO;
        }
        match self {
            CostModel::Profile(cost) => {
                let ops = cost.shape.decode_ops(batch, kv_tokens);
                cost.profile.launch + cost.sum(&ops)
            }
            CostModel::Coefficients(Coefficients { decode_s: c, .. }) => {
                Seconds(c.base + c.per_sequence * f64::from(batch) + c.per_kv_token * kv_tokens as f64)
            }
        }
    }
}

impl ProfileCost {
    fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let chunk_tokens = self.chunk_tokens.max(1);
        let chunks = new_tokens.div_ceil(chunk_tokens);
        let mut ops = OpCounts::new();
        for chunk in 0..chunks {
            let done = chunk * chunk_tokens;
            let tokens = chunk_tokens.min(new_tokens - done);
            let head = chunk + 1 == chunks;
            for (sig, count) in self.shape.prefill_ops(context_before + done, tokens, head) {
                shape::push(&mut ops, sig, count);
            }
        }
        self.profile.launch * f64::from(chunks) + self.sum(&ops)
    }

    fn sum(&self, ops: &OpCounts) -> Seconds {
        let each = |sig| self.profile.time(sig) + self.profile.launch_per_command;
        ops.iter().map(|(sig, count)| each(sig) * *count as f64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DType;
    use mixfleet_hal::profile::Point;
    use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};

    fn model(flop_per_second: f64, bytes_per_second: f64) -> ProfileCost {
        ProfileCost {
            profile: DeviceProfile {
                fingerprint: "test".into(),
                launch: Seconds(1e-5),
                ..DeviceProfile::roof(
                    vec![(DType::F32, FlopPerSecond(flop_per_second))],
                    BytesPerSecond(bytes_per_second),
                    Bytes(1e9),
                )
            },
            shape: shape::tests::small(),
            chunk_tokens: 32,
        }
    }

    fn wrap(cost: ProfileCost) -> CostModel {
        CostModel::Profile(Box::new(cost))
    }

    #[test]
    fn with_endless_arithmetic_a_small_decode_step_is_weight_bytes_over_bandwidth() {
        let cost = wrap(model(1e18, 1e9));
        let layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 160 * 3;
        let weight_bytes = f64::from(2 * (3 * layer + 64 * 1000));
        let step = cost.decode_step_s(1, 1).0 - 1e-5;
        // Activations and norms come on top: 11 % at this toy size.
        assert!(step > weight_bytes / 1e9 && step < 1.15 * weight_bytes / 1e9, "{step}");
    }

    #[test]
    fn with_endless_bandwidth_prefill_is_flops_over_rate_and_chunks_pay_launches() {
        let cost = model(1e9, 1e18);
        let flops: f64 = cost.shape.prefill_ops(0, 32, true).iter().map(|(s, c)| s.flops() * *c as f64).sum();
        let (one, two) = (cost.prefill_s(0, 32).0, cost.prefill_s(0, 64).0);
        assert!((one - flops / 1e9 - 1e-5).abs() < 1e-12);
        let second: f64 =
            cost.shape.prefill_ops(32, 32, true).iter().map(|(s, c)| s.flops() * *c as f64).sum();
        // The first of two chunks needs no LM head.
        let head = 2.0 * 64.0 * 1000.0 + 4.0 * 64.0;
        assert!((two - (flops + second - head) / 1e9 - 2e-5).abs() < 1e-9, "{two}");
    }

    #[test]
    fn measured_points_carry_over() {
        let mut cost = model(1e9, 1e9);
        let before = cost.prefill_s(0, 32);
        for (sig, _) in cost.shape.prefill_ops(0, 32, true) {
            let time = cost.profile.roofline(&sig) * 3.0;
            cost.profile.points.push(Point { sig, time });
        }
        let launch = cost.profile.launch;
        let after = cost.prefill_s(0, 32);
        assert!(((after - launch) / (before - launch) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_cached_prefix_saves_time_and_nothing_costs_nothing() {
        let cost = wrap(model(1e9, 1e9));
        assert!(cost.prefill_s(48, 16) < cost.prefill_s(0, 64));
        assert_eq!(cost.prefill_s(64, 0), Seconds::ZERO);
        assert_eq!(cost.decode_step_s(0, 0), Seconds::ZERO);
        assert!(cost.decode_step_s(2, 100) < cost.decode_step_s(2, 10_000));
    }

    #[test]
    fn coefficients_reproduce_the_published_fit() {
        // LLaMA3-70B on 8xA800, FAST'25 figure 14: 1.000 s at 8000 tokens, 27.47 s at 128000.
        let prefill_s =
            PrefillCoefficients { overhead: 0.0, per_token: 1.19e-4, per_token_squared: 7.467e-10 };
        let decode_s = DecodeCoefficients { base: 0.0262, per_sequence: 0.0, per_kv_token: 3.5e-8 };
        let cost = CostModel::Coefficients(Coefficients { prefill_s, decode_s });
        assert!((cost.prefill_s(0, 8_000).0 - 1.000).abs() < 0.001);
        assert!((cost.prefill_s(0, 128_000).0 - 27.47).abs() < 0.01);
        assert!((cost.decode_step_s(4, 1_000_000).0 - 0.0612).abs() < 1e-12);
    }

    #[test]
    fn a_cost_model_survives_json() {
        let cost = wrap(model(1e9, 1e9));
        let text = serde_json::to_string(&cost).unwrap();
        assert_eq!(serde_json::from_str::<CostModel>(&text).unwrap(), cost);
    }
}
