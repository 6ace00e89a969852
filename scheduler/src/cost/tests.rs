use super::*;
use crate::models;
use mixfleet_hal::catalog::{Part, part};
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};
use mixfleet_hal::{DType, OpSig};
use proptest::prelude::*;

fn llama_8b_on(profile: DeviceProfile, chunk_tokens: u32, all_reduce: Option<AllReduce>) -> CostModel {
    let shape = models::find("llama-3.1-8b").unwrap().shape(DType::Bf16);
    CostModel::Profile(Box::new(ProfileCost {
        profile,
        shape,
        chunk_tokens,
        all_reduce,
        engine: EngineCost::OURS,
    }))
}

/// Kernels with a minimum time and staircases over rows, as real ones have.
fn measured() -> DeviceProfile {
    let mut profile = part("L40S").unwrap().profile();
    let shape = models::find("llama-3.1-8b").unwrap().shape(DType::Bf16);
    let law = |sig: &OpSig| {
        let tiles = match *sig {
            OpSig::Gemm { m, .. } => f64::from(m.div_ceil(64) * 64) / f64::from(m),
            _ => 1.0,
        };
        Seconds(5e-6 + profile.roofline(sig).0 * (0.7 * tiles + 0.6))
    };
    let rows = [1, 2, 4, 8, 16, 32, 64, 65, 128, 129, 256, 512, 1024, 2048];
    let mut points: Vec<Point> = Vec::new();
    for &rows in &rows {
        for context in [0, 512, 8192] {
            let part = Prefill { context, tokens: rows, last: true };
            let ops =
                shape.step_ops(&[part], rows.min(256), u64::from(rows.min(256)) * u64::from(context + 1));
            points.extend(ops.into_iter().map(|(sig, _)| Point { time: law(&sig), sig }));
        }
    }
    profile.points = points;
    profile
}

fn near(slow: &CostModel, fast: &CostModel, share: f64, ask: impl Fn(&CostModel) -> Seconds, what: &str) {
    let (slow, fast) = (ask(slow).0, ask(fast).0);
    assert!((fast / slow - 1.0).abs() < share, "{what}: {fast} against {slow}");
}

#[test]
fn tables_answer_like_the_profile_that_they_were_made_of() {
    let reached = |id: &str| part(id).unwrap().reached_profile().unwrap();
    let four = AllReduce::of(part("L40S").unwrap(), 4);
    let cases = [
        ("datasheet", llama_8b_on(part("H100-SXM-80GB").unwrap().profile(), 2048, None)),
        ("reached", llama_8b_on(reached("L40S"), 8192, None)),
        ("four devices", llama_8b_on(reached("L40S"), 2048, four)),
        ("measured", llama_8b_on(measured(), 512, None)),
    ];
    for (name, slow) in cases {
        let fast = slow.compiled();
        let mut state = 7u64;
        let mut draw = |most: f64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Log-uniform from 1 to `most`.
            (most.ln() * (state >> 11) as f64 / (1u64 << 53) as f64).exp() as u32
        };
        for _ in 0..60 {
            let (batch, mean, context, tokens) =
                (draw(512.0), draw(32_768.0), draw(100_000.0) - 1, draw(2000.0));
            let kv = u64::from(batch) * u64::from(mean);
            let what = format!("{name}: {tokens} after {context}, {batch} at {mean}");
            near(&slow, &fast, 0.01, |cost| cost.decode_step_s(batch, kv), &what);
            near(&slow, &fast, 0.01, |cost| cost.prefill_s(context, tokens), &what);
            let part = Prefill { context, tokens: tokens.min(512), last: true };
            near(&slow, &fast, 0.01, |cost| cost.step_s(&[part], batch, kv), &what);
        }
    }
}

#[test]
fn several_chunks_share_a_step_in_tables_too() {
    let slow = llama_8b_on(part("L40S").unwrap().reached_profile().unwrap(), 2048, None);
    let fast = slow.compiled();
    let part = |context, tokens, last| Prefill { context, tokens, last };
    let parts = [part(0, 300, true), part(4096, 700, false), part(100, 500, true)];
    near(&slow, &fast, 0.01, |cost| cost.step_s(&parts, 20, 20 * 1500), "three chunks");
}

#[test]
fn tensor_parallelism_divides_the_work_and_pays_for_sums() {
    let (h100, l40s) = (part("H100-SXM-80GB").unwrap(), part("L40S").unwrap());
    let on = |part: &Part, devices| {
        llama_8b_on(part.reached_profile().unwrap(), 2048, AllReduce::of(part, devices))
    };
    let speedup = |part, ask: fn(&CostModel) -> Seconds| ask(&on(part, 1)) / ask(&on(part, 4));
    let decode = |cost: &CostModel| cost.decode_step_s(64, 64 * 4096);
    let prefill = |cost: &CostModel| cost.prefill_s(0, 2048);
    assert!((2.0..4.0).contains(&speedup(h100, decode)), "{}", speedup(h100, decode));
    assert!((2.0..4.0).contains(&speedup(h100, prefill)), "{}", speedup(h100, prefill));
    // Over PCIe the all-reduces of a chunk take longer than all its arithmetic on one device.
    assert!(speedup(l40s, prefill) < 1.0, "{}", speedup(l40s, prefill));
}

#[test]
fn damaged_tables_are_refused_where_they_are_read() {
    let text = serde_json::to_value(wrap(model(1e9, 1e9)).compiled()).unwrap();
    let refused = |place: &str, value: serde_json::Value| {
        let mut changed = text.clone();
        *changed.pointer_mut(place).unwrap() = value;
        serde_json::from_value::<CostModel>(changed).unwrap_err().to_string()
    };
    let line = serde_json::json!({ "axes": [[1.0, 2.0]], "values": [1.0, 2.0] });
    assert!(refused("/tables/decode", line).contains("'decode' has 1 axes instead of 2"));
    assert!(refused("/tables/head/values", serde_json::json!([1.0])).contains("1 values"));
    assert!(refused("/tables/chunk_tokens", serde_json::json!(0)).contains("at least one token"));
}

#[test]
fn grids_go_on_straight_and_bad_ones_are_refused() {
    let grid = Grid::new(vec![vec![1.0, 2.0], vec![0.0, 10.0]], vec![1.0, 11.0, 2.0, 22.0]).unwrap();
    assert_eq!(grid.at([1.0, 5.0]), 6.0);
    assert_eq!(grid.at([1.5, 10.0]), 16.5);
    assert_eq!(grid.at([2.0, 20.0]), 42.0);
    assert_eq!(grid.at([0.0, -1.0]), 1.0);
    assert!(Grid::new(vec![vec![2.0, 1.0]], vec![1.0, 2.0]).unwrap_err().contains("rise"));
    assert!(Grid::new(vec![vec![1.0, 2.0]], vec![1.0]).unwrap_err().contains("2 knots"));
    assert!(Grid::new(vec![vec![1.0]], vec![f64::NAN]).unwrap_err().contains("NaN"));
    assert_eq!(Grid::new(vec![vec![3.0]], vec![7.0]).unwrap().at([100.0]), 7.0);
}

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
        shape: counted::tests::small(),
        chunk_tokens: 32,
        all_reduce: None,
        engine: EngineCost::OURS,
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
    // Activations and norms add 11 % at this small size.
    assert!(step > weight_bytes / 1e9 && step < 1.15 * weight_bytes / 1e9, "{step}");
}

#[test]
fn with_endless_bandwidth_prefill_is_flops_over_rate_and_chunks_pay_launches() {
    let cost = model(1e9, 1e18);
    let flops: f64 = cost.shape.prefill_ops(0, 32, true).iter().map(|(s, c)| s.flops() * *c as f64).sum();
    let whole = wrap(cost.clone());
    let (one, two) = (whole.prefill_s(0, 32).0, whole.prefill_s(0, 64).0);
    assert!((one - flops / 1e9 - 1e-5).abs() < 1e-12);
    let second: f64 = cost.shape.prefill_ops(32, 32, true).iter().map(|(s, c)| s.flops() * *c as f64).sum();
    // The first of two chunks needs no LM head.
    let head = 2.0 * 64.0 * 1000.0 + 4.0 * 64.0;
    assert!((two - (flops + second - head) / 1e9 - 2e-5).abs() < 1e-9, "{two}");
}

#[test]
fn measured_points_carry_over() {
    let mut cost = model(1e9, 1e9);
    let before = wrap(cost.clone()).prefill_s(0, 32);
    for (sig, _) in cost.shape.prefill_ops(0, 32, true) {
        let time = cost.profile.roofline(&sig) * 3.0;
        cost.profile.points.push(Point { sig, time });
    }
    let launch = cost.profile.launch;
    let after = wrap(cost).prefill_s(0, 32);
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
    let prefill_s = PrefillCoefficients { overhead: 0.0, per_token: 1.19e-4, per_token_squared: 7.467e-10 };
    let decode_s = DecodeCoefficients { base: 0.0262, per_sequence: 0.0, per_kv_token: 3.5e-8 };
    let cost = CostModel::Coefficients(Coefficients { prefill_s, decode_s });
    assert!((cost.prefill_s(0, 8_000).0 - 1.000).abs() < 0.001);
    assert!((cost.prefill_s(0, 128_000).0 - 27.47).abs() < 0.01);
    assert!((cost.decode_step_s(4, 1_000_000).0 - 0.0612).abs() < 1e-12);
}

#[test]
fn a_cost_model_survives_json() {
    let cost = wrap(model(1e9, 1e9));
    for cost in [cost.compiled(), cost] {
        let text = serde_json::to_string(&cost).unwrap();
        assert_eq!(serde_json::from_str::<CostModel>(&text).unwrap(), cost);
    }
}

proptest! {
    #[test]
    fn the_pieces_of_a_prompt_take_what_the_whole_takes(
        before in 0u32..100_000, pieces in proptest::collection::vec(1u32..5000, 1..6)
    ) {
        let prefill_s = PrefillCoefficients { overhead: 0.08, per_token: 1.19e-4, per_token_squared: 7.467e-10 };
        let cost = CostModel::Coefficients(Coefficients { prefill_s, ..Coefficients::default() });
        let (mut context, mut total) = (before, 0.0);
        for (index, &tokens) in pieces.iter().enumerate() {
            let last = index + 1 == pieces.len();
            total += cost.step_s(&[Prefill { context, tokens, last }], 0, 0).0;
            context += tokens;
        }
        let whole = cost.prefill_s(before, pieces.iter().sum()).0;
        prop_assert!((total / whole - 1.0).abs() < 1e-9, "{} {}", total, whole);
    }

    #[test]
    fn a_line_over_any_knots_is_a_line(
        mut knots in proptest::collection::vec(0.0f64..5000.0, 2..60), at in proptest::collection::vec(0.0f64..20_000.0, 20)
    ) {
        knots.sort_by(f64::total_cmp);
        knots.dedup();
        let grid = Grid::new(vec![knots.clone()], knots.iter().map(|knot| 3.0 * knot + 1.0).collect());
        let grid: Grid = serde_json::from_str(&serde_json::to_string(&grid.unwrap()).unwrap()).unwrap();
        for at in at {
            let want = 3.0 * at.max(knots[0]) + 1.0;
            prop_assert!((grid.at([at]) / want - 1.0).abs() < 1e-9, "{} at {}", grid.at([at]), at);
        }
    }

    #[test]
    fn a_grid_meets_its_knots(values in proptest::collection::vec(0.0f64..1e3, 24)) {
        let axes = vec![vec![1.0, 2.0], vec![0.0, 16.0, 32.0], vec![1.0, 4.0], vec![5.0, 6.0]];
        let grid = Grid::new(axes.clone(), values.clone()).unwrap();
        let mut index = 0;
        for &a in &axes[0] { for &b in &axes[1] { for &c in &axes[2] { for &d in &axes[3] {
            prop_assert!((grid.at([a, b, c, d]) - values[index]).abs() < 1e-9);
            index += 1;
        }}}}
    }
}

#[test]
fn external_engines_add_host_time_per_step_and_sequence() {
    let of = |engine: EngineCost| {
        let profile = part("H100-SXM-80GB").unwrap().reached_profile().unwrap();
        let shape = models::find("llama-3.1-8b").unwrap().shape(DType::Bf16);
        let cost = ProfileCost { profile, shape, chunk_tokens: 512, all_reduce: None, engine };
        CostModel::Profile(Box::new(cost)).compiled()
    };
    let (plain, vllm) = (of(EngineCost::FUSED), of(EngineCost::VLLM));
    let more = |batch| (vllm.decode_step_s(batch, 4096) - plain.decode_step_s(batch, 4096)).0;
    let (step, sequence) = (EngineCost::VLLM.per_step_s, EngineCost::VLLM.per_sequence_s);
    for batch in [1, 16, 64] {
        let host = step + f64::from(batch) * sequence;
        assert!((more(batch) / host - 1.0).abs() < 1e-6, "{batch}: {} against {host}", more(batch));
    }
    // a chunk that ends no prompt draws nothing
    let middle = [Prefill { context: 0, tokens: 512, last: false }];
    let more = (vllm.step_s(&middle, 0, 0) - plain.step_s(&middle, 0, 0)).0;
    assert!((more / step - 1.0).abs() < 1e-6, "{more}");
    assert_eq!((EngineCost::OURS.per_step_s, EngineCost::OURS.per_sequence_s), (0.0, 0.0));
}
