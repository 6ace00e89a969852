//! Instances whose devices divide whole experts (`ep:`): their rates in a plan, the planned file, and a
//! simulation of it.

use crate::common::fleet_from;
use crate::common::full_loop::FullLoop;
use mixfleet_hal::catalog::part;
use mixfleet_hal::economics::Price;
use mixfleet_hal::units::{BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::engines;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::models::find;
use mixfleet_scheduler::plan::candidates::{InstanceKind, PartKernels, RequestSize, ServiceLevel};
use mixfleet_scheduler::plan::layouts::InstanceLayout;
use mixfleet_scheduler::plan::load::SizeClass;
use mixfleet_scheduler::plan::market::{Market, MarketAsk, PlannedPool};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::PlannedText;

const H100: &str = "H100-SXM-80GB";
const BF16: StoredAs = StoredAs::Plain(DType::Bf16);
const SIZE: RequestSize = RequestSize { input_tokens: 1000, output_tokens: 257, cached_share: 0.0 };

fn ask(model: &str, expert_skew: f32) -> MarketAsk {
    MarketAsk {
        model: find(model).unwrap(),
        stored: vec![BF16],
        expert_skew,
        engine: engines::find("mixfleet").unwrap(),
        parts: vec![OfferedPart::new(part(H100).unwrap(), UsdPerHour(2.69))],
        classes: vec![SizeClass { size: SIZE, slowest: SIZE, rate: 1.0 }],
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.03) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(50e9),
        links: Vec::new(),
    }
}

#[test]
fn a_written_plan_has_the_room_the_times_and_the_rate_by_which_it_was_counted() {
    let in_two = InstanceLayout { stages: 2, ..InstanceLayout::of(8) };
    for (model, layout, skew) in [
        ("qwen3-30b-a3b", InstanceLayout::of(2), 0.0),
        ("qwen3-30b-a3b", InstanceLayout::of(4), 0.5),
        ("mixtral-8x7b", in_two, 0.0),
    ] {
        let layout = layout.by_member();
        let market = Market::new(ask(model, skew));
        let pool = |duty, count| PlannedPool { part: 0, layout, attends: None, spare: None, duty, count };
        let prices = [Price { usd_per_hour: UsdPerHour(2.69), basis: "a list".into(), date: None }];
        let text = PlannedText { market: &market, prices: &prices };
        let pools = [pool(Duty::Prefill, 8), pool(Duty::Decode, 1)];
        let text = text.of(&pools, BF16, &PlannedTiers::default(), Policy::default());
        let file = fleet_from(&text);

        let ask = market.ask();
        let own = (part(H100).unwrap(), &PartKernels::of(part(H100).unwrap()));
        let kind = InstanceKind::of(own, layout, (ask.model, skew), BF16, ask.engine).unwrap();
        let kind = kind.in_stages(layout.stages, ask.nic);
        let written = &file.pools[1];
        let ratio = written.cache_tokens as f64 / (kind.room().0 / file.model.kv_bytes_per_token);
        assert!((ratio - 1.0).abs() < 0.01, "{model}{}: {ratio} of the room", layout.words());
        for batch in [8u32, 64, 200] {
            let keys = u64::from(batch * (SIZE.input_tokens + SIZE.output_tokens / 2));
            let steps = [&kind.cost, &written.cost].map(|cost| cost.decode_step_s(batch, keys).0);
            assert!(
                (steps[0] / steps[1] - 1.0).abs() < 0.02,
                "{model}{}, {batch}: {steps:?}",
                layout.words()
            );
        }

        let carried = kind.carries(Duty::Decode, &SIZE, &ask.level).unwrap();
        let RequestSize { input_tokens, output_tokens, .. } = SIZE;
        let answer = carried.latency * f64::from(output_tokens);
        let load = FullLoop { clients: carried.batch, input_tokens, output_tokens, answer };
        let planned = f64::from(carried.batch) / carried.latency.0;
        let share = load.tokens_per_s(&file) / planned;
        eprintln!("{model}{}, {} sequences: {share:.3} of the planned rate", layout.words(), carried.batch);
        // after an answer its place is empty until the KV of the client's next prompt is there: some 3 of
        // 256 steps
        assert!((0.98..1.01).contains(&share), "{model}{}: {share} of the planned rate", layout.words());
    }
}
