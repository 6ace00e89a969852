#![allow(clippy::print_stdout)]

use super::branching::Microlp;
use super::candidates::{RequestSize, ServiceLevel};
use super::load::SizeClass;
use super::market::*;
use super::offer::OfferedPart;
use super::program::Duty;
use crate::cost::EngineCost;
use crate::engines::KnownEngine;
use crate::{engines, models};
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::{BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};

/// An engine whose devices attend for others, without times of a host.
static LENDING: KnownEngine = KnownEngine { cost: EngineCost::FUSED, ..engines::ATTENDING };

/// Requests of one size for a model on H100 alone.
fn ask(model: &str, [input_tokens, output_tokens]: [u32; 2], rate: f64, [ttft, tbt]: [f64; 2]) -> MarketAsk {
    let size = RequestSize { input_tokens, output_tokens, cached_share: 0.0 };
    MarketAsk {
        model: models::find(model).unwrap(),
        stored: vec![StoredAs::Plain(DType::Bf16)],
        expert_skew: 0.0,
        engine: &LENDING,
        parts: vec![OfferedPart::new(part("H100-SXM-80GB").unwrap(), UsdPerHour(2.69))],
        classes: vec![SizeClass { size, slowest: size, rate }],
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(ttft), tbt: Seconds(tbt) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(50e9),
        links: Vec::new(),
    }
}

/// The rent of the cheapest fleet that divides prompts and decoding, without and with lending, at each rate.
fn rents(of: MarketAsk, rates: impl Iterator<Item = u32>) -> Vec<(f64, f64)> {
    let market = Market::new(of);
    let mut found = Vec::new();
    for rate in rates {
        let market = market.with_rates(&[f64::from(rate)]);
        let Ok(spare) = market.spare_attention(&Microlp) else { continue };
        let ranked = market.rank(&Microlp, 3);
        assert!(ranked.contains(&spare), "it is among all that are ranked");
        let rent = |pool: &PlannedPool| market.rent_of(pool).0 * f64::from(pool.count);
        let sum: f64 = spare.pools.iter().map(rent).sum();
        assert!((sum - spare.usd_per_hour.0).abs() < 1e-9, "{spare:?}");
        let [prefill, decode] = &spare.pools[..] else { panic!("{spare:?}") };
        let lends = decode.spare.unwrap();
        assert_eq!((lends.part, lends.layout), (prefill.part, prefill.layout));
        assert_eq!([prefill.duty, decode.duty], [Duty::Prefill, Duty::Decode]);
        assert!(prefill.spare.is_none() && prefill.count > 0 && decode.count > 0);
        let is_divided = |fleet: &&FormedFleet| {
            fleet.pools.iter().all(|pool| pool.duty != Duty::Whole && pool.spare.is_none())
        };
        let divided = ranked.iter().find(is_divided).unwrap();
        let counts = |fleet: &FormedFleet| fleet.pools.iter().map(|pool| pool.count).collect::<Vec<_>>();
        println!(
            "{rate}/s: {:?} ${:.2} divided, {:?} ${sum:.2} where prompts' devices attend",
            counts(divided),
            divided.usd_per_hour.0,
            counts(&spare)
        );
        found.push((divided.usd_per_hour.0, sum));
    }
    found
}

#[test]
fn it_pays_where_whole_instances_divide_badly_and_no_more_than_what_they_leave_idle() {
    for (id, tokens, wins) in [
        ("H100-SXM-80GB", [8000, 300], true),
        ("L40S", [4000, 300], true),
        ("H100-SXM-80GB", [4000, 300], false),
    ] {
        let mut ask = ask("llama-3.1-8b", tokens, 1.0, [5.0, 0.1]);
        ask.parts[0].part = part(id).unwrap();
        println!("{id}, {tokens:?} tokens");
        let found = rents(ask, (1..=12).chain([100]));
        let gains: Vec<f64> = found.iter().map(|(divided, spare)| divided / spare).collect();
        println!("{gains:.3?}");
        assert_eq!(gains.iter().any(|gain| *gain > 1.1), wins, "{id}: {gains:?}");
        assert!(gains.iter().any(|gain| *gain < 0.9), "{id} loses too: {gains:?}");
        // a device's time is divided, and not made
        assert!(gains.len() < 13 || gains[12] < 1.0, "many instances leave little idle: {gains:?}");
    }
}

#[test]
fn what_cannot_lend_is_refused_with_the_reason() {
    let of = |ask: MarketAsk| Market::new(ask).spare_attention(&Microlp).unwrap_err();
    let plain = || ask("llama-3.1-8b", [2000, 200], 5.0, [3.0, 0.1]);
    let latent = ask("deepseek-v3", [2000, 200], 5.0, [3.0, 0.1]);
    assert!(of(latent).contains("per byte of KV"));
    let mut regions = plain();
    regions.parts.push(OfferedPart { region: "elsewhere".into(), ..regions.parts[0].clone() });
    assert!(of(regions).contains("several regions"));
    let of_engine = |name: &str| MarketAsk { engine: engines::find(name).unwrap(), ..plain() };
    assert!(of(of_engine("vllm")).contains("vllm has no devices that attend"));
    let wide = MarketAsk { model: models::find("llama-3.1-70b").unwrap(), ..of_engine("mixfleet") };
    let wide = of(wide);
    assert!(wide.contains("at most 1 device"), "{wide}");
    let mut late = plain();
    late.level.ttft = Seconds(1e-4);
    let late = of(late);
    assert!(late.contains("no fleet has instances"), "{late}");
}
