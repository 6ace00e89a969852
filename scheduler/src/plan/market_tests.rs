use super::branching::Microlp;
use super::candidates::{RequestSize, ServiceLevel};
use super::load::SizeClass;
use super::market::*;
use super::program::Duty;
use super::shortfall::Shortfall;
use crate::{engines, models};
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::{BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};

fn class(input_tokens: u32, output_tokens: u32, rate: f64) -> SizeClass {
    SizeClass { size: RequestSize { input_tokens, output_tokens, cached_share: 0.0 }, rate }
}

/// Llama-3.1-70B on an H100 and an H20, which decodes for less and computes prompts for more.
fn ask(classes: Vec<SizeClass>) -> MarketAsk {
    let offer = |id, usd| OfferedPart { part: part(id).unwrap(), usd_per_hour: UsdPerHour(usd), most: None };
    MarketAsk {
        model: models::find("llama-3.1-70b").unwrap(),
        stored: StoredAs::Plain(DType::Bf16),
        engine: engines::find("vllm").unwrap(),
        parts: vec![offer("H100-SXM-80GB", 2.69), offer("H20-96GB", 0.80)],
        classes,
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(3.0), tbt: Seconds(0.1) },
        attain: 0.99,
        nic: BytesPerSecond(12.5e9),
        spares: 0,
    }
}

fn is_of_one_part(fleet: &FormedFleet) -> bool {
    fleet.pools.iter().all(|pool| pool.part == fleet.pools[0].part)
}

#[test]
fn a_mix_comes_first_where_parts_differ_and_all_stand_above_the_bound() {
    let market = Market::new(ask(vec![class(6000, 400, 30.0), class(1000, 200, 10.0)]));
    let (bound, fleets) = (market.lower_bound(&Microlp).unwrap(), market.rank(&Microlp, 3));
    eprintln!("{bound:?} {fleets:#?}");
    assert!(!is_of_one_part(&fleets[0]), "{:?}", fleets[0]);
    let alone = fleets.iter().find(|fleet| is_of_one_part(fleet)).unwrap();
    assert!(fleets[0].usd_per_hour.0 < 0.97 * alone.usd_per_hour.0, "{fleets:?}");
    assert!(fleets.windows(2).all(|pair| pair[0].usd_per_hour <= pair[1].usd_per_hour));
    assert!(bound < fleets[0].usd_per_hour && bound.0 > 0.7 * fleets[0].usd_per_hour.0, "{bound:?}");
    for fleet in &fleets {
        let rents =
            fleet.pools.iter().map(|pool| market.rent(pool.part, pool.devices).0 * f64::from(pool.count));
        assert!((rents.sum::<f64>() - fleet.usd_per_hour.0).abs() < 1e-9);
    }
    assert_eq!(market.rank(&Microlp, 3), fleets);
}

/// KV of 8,000 tokens of 320 KiB leaves an instance over 1.25 GB/s in 2.1 s, so that the network and not
/// arithmetic says how many compute prompts.
#[test]
fn a_slow_network_makes_divided_fleets_dearer() {
    let split = |nic| {
        let mut ask = ask(vec![class(8000, 400, 30.0)]);
        ask.nic = BytesPerSecond(nic);
        let fleets = Market::new(ask).rank(&Microlp, 3);
        let of = |fleet: &&FormedFleet| matches!(fleet.form, FleetForm::Split { prefill: 0, decode: 1 });
        fleets.iter().find(of).map_or(f64::INFINITY, |fleet| fleet.usd_per_hour.0)
    };
    let (fast, slow) = (split(12.5e9), split(1.25e9));
    assert!(fast.is_finite() && slow > 1.2 * fast, "{fast} {slow}");
}

#[test]
fn an_inventory_is_kept_to_and_is_what_binds_where_it_is_too_small() {
    let limited = |most: [u32; 2], rate| {
        let mut ask = ask(vec![class(6000, 400, rate)]);
        ask.attain = 1.0;
        ask.parts.iter_mut().zip(most).for_each(|(offer, most)| offer.most = Some(most));
        Market::new(ask)
    };
    let free = limited([800, 800], 10.0).rank(&Microlp, 2).remove(0);
    let devices = |fleet: &FormedFleet, part| -> u32 {
        let own = fleet.pools.iter().filter(|pool| pool.part == part);
        own.map(|pool| pool.count * pool.devices).sum()
    };
    let h20s = devices(&free, 1);
    assert!(h20s > 8, "{free:?}");
    let market = limited([800, h20s - 4], 10.0);
    let bound = market.lower_bound(&Microlp).unwrap();
    for fleet in market.rank(&Microlp, 2) {
        assert!(devices(&fleet, 1) <= h20s - 4, "{fleet:?}");
        assert!(fleet.usd_per_hour >= bound && fleet.usd_per_hour >= free.usd_per_hour, "{fleet:?} {free:?}");
    }
    let small = limited([8, 8], 10.0);
    assert!(small.lower_bound(&Microlp).is_err() && small.rank(&Microlp, 2).is_empty());
    let [Shortfall::Inventory { carried }] = small.shortfall(&Microlp)[..] else {
        panic!("{:?}", small.shortfall(&Microlp))
    };
    assert!(carried > 0.01 && carried < 0.9, "{carried}");
    assert!(limited([8, 8], 10.0 * carried).lower_bound(&Microlp).is_ok());
    assert!(limited([8, 8], 10.0 * (carried + 0.01)).lower_bound(&Microlp).is_err());
}

/// What is said to be nearest can be met, and what is a little shorter cannot.
#[test]
fn an_objective_that_nothing_meets_is_told_with_the_nearest_that_something_does() {
    let with = |ttft, tbt, attain| {
        let mut ask = ask(vec![class(500, 100, 9.5), class(8000, 100, 0.5)]);
        ask.level = ServiceLevel { ttft: Seconds(ttft), tbt: Seconds(tbt) };
        ask.attain = attain;
        Market::new(ask)
    };
    let nearest = |market: &Market| match &market.shortfall(&Microlp)[..] {
        [Shortfall::Ttft { nearest_s, .. } | Shortfall::Tbt { nearest_s, .. }] => *nearest_s,
        other => panic!("{other:?}"),
    };
    assert!(with(0.02, 0.1, 0.99).rank(&Microlp, 3).is_empty());
    let ttft = nearest(&with(0.02, 0.1, 0.99));
    assert!(with(ttft * 1.001, 0.1, 0.99).shortfall(&Microlp).is_empty());
    assert_eq!(nearest(&with(ttft * 0.999, 0.1, 0.99)), ttft);
    // one request in twenty has the long prompt, and may miss
    let short = nearest(&with(0.001, 0.1, 0.95));
    assert!(short < 0.2 * ttft, "{short} {ttft}");
    assert!(with(short * 1.001, 0.1, 0.95).lower_bound(&Microlp).is_ok());
    let tbt = nearest(&with(3.0, 0.001, 0.99));
    assert!(with(3.0, tbt * 1.001, 0.99).shortfall(&Microlp).is_empty() && tbt > 0.002);

    let mut ask = ask(vec![class(1000, 100, 1.0)]);
    ask.parts = vec![OfferedPart { part: part("L4").unwrap(), usd_per_hour: UsdPerHour(0.5), most: Some(4) }];
    assert_eq!(Market::new(ask).shortfall(&Microlp), [Shortfall::Memory { held: 0.0 }]);
}

#[test]
fn spares_are_instances_of_each_pool_in_use() {
    let of = |spares| {
        let mut ask = ask(vec![class(6000, 400, 30.0)]);
        ask.spares = spares;
        Market::new(ask).rank(&Microlp, 1)
    };
    let (none, two) = (of(0), of(2));
    assert!(two[0].usd_per_hour > none[0].usd_per_hour);
    assert!(two.iter().flat_map(|fleet| &fleet.pools).all(|pool| pool.count > 2), "{two:?}");
    assert!(two.iter().flat_map(|fleet| &fleet.pools).any(|pool| pool.duty != Duty::Whole));
}

/// 100 rows of prompts for each token of an answer are more than a step has, so that prompts and answers take
/// turns.
#[test]
fn long_prompts_with_short_answers_are_served_whole_too() {
    let ask = ask(vec![class(20_000, 11, 1.0)]);
    let fleets =
        Market::new(MarketAsk { engine: engines::find("mixfleet").unwrap(), ..ask }).rank(&Microlp, 3);
    let cost = |wanted: fn(&FleetForm) -> bool| {
        let of = fleets.iter().filter(|fleet| wanted(&fleet.form));
        of.map(|fleet| fleet.usd_per_hour.0).fold(f64::INFINITY, f64::min)
    };
    let whole = cost(|form| matches!(form, FleetForm::Alone(0)));
    let split = cost(|form| matches!(form, FleetForm::Split { prefill: 0, decode: 0 }));
    assert!(whole.is_finite() && whole <= split, "{whole} {split}");
}
