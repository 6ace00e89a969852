use super::branching::Microlp;
use super::break_even::BreakEven;
use super::candidates::{InstanceKind, PartKernels, RequestSize, ServiceLevel};
use super::forms::FleetForm;
use super::layouts::InstanceLayout;
use super::load::SizeClass;
use super::market::*;
use super::offer::OfferedPart;
use super::program::Duty;
use super::regions::RegionLink;
use super::shortfall::Shortfall;
use crate::{engines, models};
use mixfleet_hal::catalog::part;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};

fn class(input_tokens: u32, output_tokens: u32, rate: f64) -> SizeClass {
    let size = RequestSize { input_tokens, output_tokens, cached_share: 0.0 };
    SizeClass { size, slowest: size, rate }
}

/// Llama-3.1-70B on an H100 and an H20, which decodes for less and computes prompts for more.
fn ask(classes: Vec<SizeClass>) -> MarketAsk {
    let offer = |id, usd| OfferedPart::new(part(id).unwrap(), UsdPerHour(usd));
    MarketAsk {
        model: models::find("llama-3.1-70b").unwrap(),
        stored: vec![StoredAs::Plain(DType::Bf16)],
        expert_skew: 0.0,
        engine: engines::find("vllm").unwrap(),
        parts: vec![offer("H100-SXM-80GB", 2.69), offer("H20-96GB", 0.80)],
        classes,
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(3.0), tbt: Seconds(0.1) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(12.5e9),
        links: Vec::new(),
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
        let rents = fleet.pools.iter().map(|pool| market.rent_of(pool).0 * f64::from(pool.count));
        assert!((rents.sum::<f64>() - fleet.usd_per_hour.0).abs() < 1e-9);
    }
    assert_eq!(market.rank(&Microlp, 3), fleets);
}

/// The instances that are cheapest for 6,000 tokens take more than 3 s for 20,000.
#[test]
fn a_class_goes_to_instances_that_are_in_time_for_its_slowest_request() {
    let devices = |slowest: u32| {
        let mut class = class(6000, 400, 30.0);
        class.slowest.input_tokens = slowest;
        let mut ask = ask(vec![class]);
        ask.parts.truncate(1);
        let market = Market::new(ask);
        let fleets = market.rank(&Microlp, 3);
        let pools = || fleets.iter().flat_map(|fleet| &fleet.pools);
        let computes = pools().filter(|pool| pool.duty != Duty::Decode).map(|pool| pool.layout.devices).min();
        (computes, market.lower_bound(&Microlp).unwrap().0)
    };
    let ((few, bound), (many, same)) = (devices(6000), devices(40_000));
    assert!(few.is_some() && few < many, "{few:?} {many:?}");
    assert_eq!(bound, same, "a bound holds for any size of single requests");
    assert_eq!(devices(2_000_000).0, None, "nothing is in time");
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
        own.map(|pool| pool.count * pool.layout.devices).sum()
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
    let shortfall = small.shortfall(&Microlp);
    let [Shortfall::Inventory { carried, missing }] = &shortfall[..] else { panic!("{shortfall:?}") };
    let carried = *carried;
    for lack in missing {
        let part = small.parts().iter().position(|offer| offer.part.id == lack.part).unwrap();
        assert_eq!(lack.devices + 8, u64::from(devices(&free, part)), "{missing:?} {free:?}");
    }
    assert!(!missing.is_empty() && shortfall[0].to_string().ends_with(" more it would carry all"));
    assert!(carried > 0.01 && carried < 0.9, "{carried}");
    assert!(limited([8, 8], 10.0 * carried).lower_bound(&Microlp).is_ok());
    assert!(limited([8, 8], 10.0 * (carried + 0.01)).lower_bound(&Microlp).is_err());
}

/// The reported nearest objective can be met, and a slightly shorter one cannot.
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
    assert!(short < 0.25 * ttft, "{short} {ttft}");
    assert!(with(short * 1.001, 0.1, 0.95).lower_bound(&Microlp).is_ok());
    let tbt = nearest(&with(3.0, 0.001, 0.99));
    assert!(with(3.0, tbt * 1.001, 0.99).shortfall(&Microlp).is_empty() && tbt > 0.002);

    let mut ask = ask(vec![class(1000, 100, 1.0)]);
    ask.parts.truncate(1);
    ask.parts[0] = OfferedPart { part: part("L4").unwrap(), most: Some(4), ..ask.parts[0].clone() };
    assert_eq!(Market::new(ask).shortfall(&Microlp), [Shortfall::Memory { held: 0.0 }]);
}

#[test]
fn spares_are_instances_of_each_pool_in_use() {
    let of = |spares| {
        let mut ask = ask(vec![class(6000, 400, 30.0)]);
        ask.parts.iter_mut().for_each(|offer| offer.spares = spares);
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

#[test]
fn more_confidence_costs_more_and_half_is_the_prediction() {
    let cost = |confidence| {
        let market = Market::new(MarketAsk { confidence, ..ask(vec![class(6000, 400, 30.0)]) });
        let fleets = market.rank(&Microlp, 1);
        [market.lower_bound(&Microlp).unwrap().0, fleets[0].usd_per_hour.0]
    };
    let (half, likely, more) = (cost(0.5), cost(0.9), cost(0.97));
    // vLLM on both parts is likely within 11 % and more, and fleets have whole instances
    assert!(likely[0] > 1.09 * half[0], "{half:?} {likely:?}");
    for at in 0..2 {
        assert!(likely[at] > half[at] && more[at] > likely[at], "{half:?} {likely:?} {more:?}");
    }
}

/// Owning the devices of the best fleet makes the rest free; owning a few saves no more than their rent.
#[test]
fn what_is_owned_costs_nothing_and_what_is_more_is_rented() {
    let with = |owned: [u32; 2]| {
        let mut ask = ask(vec![class(6000, 400, 30.0)]);
        ask.parts.iter_mut().zip(owned).for_each(|(offer, owned)| offer.owned = owned);
        let market = Market::new(ask);
        (market.lower_bound(&Microlp).unwrap().0, market.rank(&Microlp, 3).remove(0))
    };
    let devices = |fleet: &FormedFleet, part| -> u32 {
        fleet.pools.iter().filter(|pool| pool.part == part).map(|pool| pool.count * pool.layout.devices).sum()
    };
    let (free_bound, free) = with([0, 0]);
    let (bound, some) = with([0, 8]);
    assert!(devices(&free, 1) > 8 && some.usd_per_hour <= free.usd_per_hour - UsdPerHour(8.0 * 0.8 - 1e-6));
    assert!(bound < free_bound && bound > free_bound - 8.0 * 0.8 - 1e-6 && bound <= some.usd_per_hour.0);
    let all = [devices(&free, 0), devices(&free, 1)];
    let (bound, same) = with(all);
    assert!(bound.abs() < 1e-6 && same.usd_per_hour.0 == 0.0, "{bound} {same:?}");
    // dear parts that are owned go before cheap ones that are not
    let (_, owned) = with([200, 0]);
    assert!(owned.usd_per_hour.0 == 0.0 && devices(&owned, 0) <= 200 && devices(&owned, 1) == 0, "{owned:?}");
    let names: Vec<_> = owned.pools.iter().map(|pool| (pool.part, pool.layout.devices, pool.duty)).collect();
    let mut once = names.clone();
    once.dedup();
    assert_eq!(names, once, "owned and rented instances of a kind are one pool");
}

/// At the break-even a fleet with the part and one without it cost the same; a little below, the part is in
/// the best fleet.
#[test]
fn a_part_is_in_the_best_fleet_below_its_break_even_and_not_above() {
    let at = |h20: f64| {
        let mut ask = ask(vec![class(6000, 400, 60.0), class(1000, 200, 10.0)]);
        ask.parts[1].usd_per_hour = UsdPerHour(h20);
        Market::new(ask)
    };
    let takes = |market: &Market| market.rank(&Microlp, 1)[0].pools.iter().any(|pool| pool.part == 1);
    let BreakEven::At(usd) = at(0.8).break_even(&Microlp, 1) else { panic!("the H20 has one") };
    assert!(takes(&at(0.97 * usd.0)) && !takes(&at(1.03 * usd.0)), "{usd:?}");
    assert!(usd.0 > 0.8 && usd.0 < 2.69, "{usd:?}");
    // it does not depend on the price at which it is computed
    for price in [0.4, 2.0] {
        let BreakEven::At(same) = at(price).break_even(&Microlp, 1) else { panic!("the H20 has one") };
        assert!((same.0 / usd.0 - 1.0).abs() < 0.02, "{same:?} {usd:?}");
    }
    let mut alone = ask(vec![class(6000, 400, 60.0)]);
    alone.parts.truncate(1);
    assert_eq!(Market::new(alone).break_even(&Microlp, 0), BreakEven::Indispensable);
    let mut useless = ask(vec![class(6000, 400, 60.0)]);
    useless.parts[1] = OfferedPart { part: part("L4").unwrap(), most: Some(4), ..useless.parts[1].clone() };
    assert_eq!(Market::new(useless).break_even(&Microlp, 1), BreakEven::Useless);
}

/// Each hour's plan is that of a market with this hour's rates, and the night needs less.
#[test]
fn a_plan_by_the_hour_is_the_plan_of_each_hour() {
    let market = Market::new(ask(vec![class(6000, 400, 30.0), class(1000, 200, 10.0)]));
    let (day, night) = (market.rank(&Microlp, 1), market.with_rates(&[3.0, 2.0]).rank(&Microlp, 1));
    let alone = Market::new(ask(vec![class(6000, 400, 3.0), class(1000, 200, 2.0)]));
    assert_eq!(night, alone.rank(&Microlp, 1));
    assert_eq!(alone.cheapest(&Microlp).as_ref(), night.first());
    assert_eq!(market.cheapest(&Microlp).as_ref(), day.first());
    assert_eq!(market.with_rates(&[30.0, 10.0]).rank(&Microlp, 1), day);
    assert!(night[0].usd_per_hour.0 < 0.3 * day[0].usd_per_hour.0);
}

/// Counted without the program and without what the market leaves out: each pair of kinds, and each kind
/// alone.
#[test]
fn the_bound_is_above_no_divided_fleet_of_any_kinds() {
    let mut random = Stream::new(23);
    let mut drawn = |least: f64, most: f64| least * (most / least).powf(random.next_unit());
    for model in ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"] {
        let sizes =
            [(); 2].map(|()| (drawn(200.0, 20_000.0) as u32, drawn(4.0, 900.0) as u32, drawn(1.0, 40.0)));
        let mut ask = ask(sizes.map(|(input, output, rate)| class(input, output, rate)).to_vec());
        ask.model = models::find(model).unwrap();
        (ask.attain, ask.nic) = (1.0, BytesPerSecond(1e15));
        ask.level = ServiceLevel { ttft: Seconds(drawn(1.0, 10.0)), tbt: Seconds(drawn(0.03, 0.2)) };
        ask.parts.push(OfferedPart { part: part("L40S").unwrap(), ..ask.parts[0].clone() });
        ask.parts.iter_mut().for_each(|offer| offer.usd_per_hour = UsdPerHour(drawn(0.5, 3.0)));
        let bound = Market::new(ask.clone()).lower_bound(&Microlp).unwrap().0;
        let kinds = ask.parts.iter().flat_map(|offer| [1, 2, 4, 8].map(|devices| (offer, devices)));
        let kinds: Vec<(f64, InstanceKind)> = kinds
            .filter_map(|(offer, devices)| {
                let part = (offer.part, &PartKernels::of(offer.part));
                let kind = InstanceKind::of(
                    part,
                    InstanceLayout::of(devices),
                    (ask.model, 0.0),
                    ask.stored[0],
                    ask.engine,
                )
                .ok()?;
                Some((offer.usd_per_hour.0 * f64::from(devices), kind))
            })
            .collect();
        let unit = |(rent, kind): &(f64, InstanceKind), duty| -> Option<Vec<f64>> {
            let carried = |class: &SizeClass| kind.carries(duty, &class.size, &ask.level).ok();
            ask.classes.iter().map(|class| Some(rent * class.rate * carried(class)?.instances)).collect()
        };
        let of = |duty| kinds.iter().filter_map(|kind| unit(kind, duty)).collect::<Vec<_>>();
        let (whole, prefill, decode) = (of(Duty::Whole), of(Duty::Prefill), of(Duty::Decode));
        let pairs =
            prefill.iter().flat_map(|first| decode.iter().map(move |second| [&first[..], second].concat()));
        let all: Vec<f64> = whole.into_iter().chain(pairs).map(|units| units.iter().sum()).collect();
        let least = all.iter().copied().fold(f64::INFINITY, f64::min);
        eprintln!("{model}: bound {bound:.4}, the cheapest of {} fleets {least:.4}", all.len());
        assert!(all.len() > 20 && bound > 0.0 && bound <= least * (1.0 + 1e-9), "{model}: {bound} {least}");
    }
}

/// Products with weights on H100 and attention on H20, each where it is cheaper; latent attention stays.
#[test]
fn attention_apart_is_ranked_with_all_others_and_counts_in_the_bound() {
    let asked =
        |classes| MarketAsk { nic: BytesPerSecond(183e9), engine: &engines::ATTENDING, ..ask(classes) };
    let of = |ask: MarketAsk| Ok::<_, String>(Market::new(ask).attention_apart(&Microlp)?.swap_remove(0));
    let long = || asked(vec![class(6000, 400, 30.0)]);
    let market = Market::new(long());
    let found = market.attention_apart(&Microlp).unwrap();
    let divided = found.last().unwrap();
    assert!(divided.pools.iter().all(|pool| pool.duty != Duty::Whole), "{found:?}");
    assert!(divided.usd_per_hour >= found[0].usd_per_hour, "{found:?}");
    let fleet = found[0].clone();
    let decode: Vec<_> = fleet.pools.iter().filter(|pool| pool.duty != Duty::Prefill).collect();
    let on = |pool: &&PlannedPool| pool.part == 0 && pool.attends.is_some_and(|others| others.part == 1);
    assert!(!decode.is_empty() && decode.iter().all(on), "{fleet:?}");
    let rent = |pool: &PlannedPool| {
        let h20 = pool.attends.map_or(0, |others| others.devices);
        let part = [2.69, 0.80][pool.part];
        f64::from(pool.count) * (part * f64::from(pool.layout.devices) + 0.80 * f64::from(h20))
    };
    let rents: f64 = fleet.pools.iter().map(rent).sum();
    assert!((rents - fleet.usd_per_hour.0).abs() < 1e-9, "{fleet:?}");
    // it holds at least the KV that comes in a second, 320 KiB a token
    let held: f64 = fleet.pools.iter().map(|pool| 96e9 * pool.devices_of(1) as f64).sum();
    assert!(held > 30.0 * 0.3277e6 * 6200.0, "{held}");
    let ranked = market.rank(&Microlp, 3);
    assert!(
        found.iter().all(|fleet| ranked.contains(fleet))
            && ranked.windows(2).all(|pair| pair[0].usd_per_hour <= pair[1].usd_per_hour)
    );
    assert!(market.lower_bound(&Microlp).unwrap() <= fleet.usd_per_hour);
    // where such fleets alone can be had for less, no bound stands above them
    let mut dear = long();
    dear.classes[0].size.input_tokens = 500;
    dear.classes[0].slowest = dear.classes[0].size;
    dear.level.tbt = Seconds(0.03);
    let dear = Market::new(dear);
    let bound = dear.lower_bound(&Microlp).unwrap();
    assert!(dear.rank(&Microlp, 3).iter().all(|fleet| bound <= fleet.usd_per_hour), "{bound:?}");

    let twice = of(asked(vec![class(6000, 400, 60.0)])).unwrap();
    assert!(twice.usd_per_hour.0 > 1.5 * fleet.usd_per_hour.0, "{twice:?}");
    let mut few = long();
    few.parts[1].most = Some(1);
    assert!(of(few).is_err(), "an instance has two at least");
    let mut slow = long();
    slow.nic = BytesPerSecond(1e7);
    assert!(of(slow).is_err());
    let mut latent = long();
    latent.model = models::find("deepseek-v3").unwrap();
    latent.parts =
        ["H200-SXM-141GB", "H20-96GB"].map(|id| OfferedPart::new(part(id).unwrap(), UsdPerHour(1.0))).into();
    assert!(of(latent).unwrap_err().contains("per byte of KV"));
}

#[test]
fn kv_crosses_to_another_region_only_over_a_link_with_room_for_it_and_pays_for_its_bytes() {
    let link = |gb_per_s: f64, usd_per_gb: f64| RegionLink {
        from: "here".into(),
        to: "there".into(),
        bandwidth: BytesPerSecond(gb_per_s * 1e9),
        latency: Seconds(0.02),
        usd_per_gb,
    };
    let of = |links: Vec<RegionLink>, regions: [&str; 2]| {
        let mut ask = MarketAsk { links, ..ask(vec![class(6000, 400, 30.0)]) };
        ask.parts.iter_mut().zip(regions).for_each(|(offer, region)| offer.region = region.into());
        let market = Market::new(ask);
        let fleets = market.rank(&Microlp, 3);
        (market.lower_bound(&Microlp).unwrap(), fleets)
    };
    let apart = ["here", "there"];
    let is_divided = |fleet: &FormedFleet| fleet.pools.iter().any(|pool| pool.part != fleet.pools[0].part);
    let (_, one_place) = of(Vec::new(), ["", ""]);
    assert!(is_divided(&one_place[0]), "{one_place:?}");
    let (_, unlinked) = of(Vec::new(), apart);
    assert!(!unlinked.iter().any(is_divided), "{unlinked:?}");
    // 6000 tokens of 327,680 bytes, 30 times a second, are 59 GB/s
    let (_, narrow) = of(vec![link(50.0, 0.0)], apart);
    assert!(!narrow.iter().any(|fleet| matches!(fleet.form, FleetForm::Split { prefill: 0, decode: 1 })));
    let (bound, free) = of(vec![link(60.0, 0.0)], apart);
    assert_eq!(free[0], one_place[0]);
    let usd_per_gb = 1e-6;
    let (_, paid) = of(vec![link(60.0, usd_per_gb)], apart);
    let traffic = 30.0 * 6000.0 * 327_680.0 / 1e9 * 3600.0 * usd_per_gb;
    assert_eq!(paid[0].pools, free[0].pools);
    assert!((paid[0].usd_per_hour.0 - free[0].usd_per_hour.0 - traffic).abs() < 1e-6, "{paid:?} {free:?}");
    assert!(bound <= free[0].usd_per_hour);
    // at what clouds ask for traffic between regions, 59 GB/s cost $4,200 an hour
    let (_, dear) = of(vec![link(60.0, 0.02)], apart);
    assert!(!is_divided(&dear[0]), "{dear:?}");
}

#[test]
fn spot_offers_win_where_their_spares_cost_less_than_they_save() {
    let of = |rate: f64, spares: u32| {
        let mut ask = ask(vec![class(6000, 400, rate)]);
        let spot = |offer: &OfferedPart| OfferedPart {
            usd_per_hour: offer.usd_per_hour * 0.7,
            spot: true,
            spares,
            ..offer.clone()
        };
        let more: Vec<OfferedPart> = ask.parts.iter().map(spot).collect();
        ask.parts.extend(more);
        Market::new(ask).rank(&Microlp, 3)
    };
    let is_spot = |fleet: &FormedFleet| fleet.pools.iter().any(|pool| pool.part >= 2);
    assert!(is_spot(&of(30.0, 1)[0]), "one of many is cheap");
    let few = &of(1.0, 1)[0];
    assert!(!is_spot(few), "one more of two is not: {few:?}");
    assert!(is_spot(&of(1.0, 0)[0]));
    let spares = of(30.0, 2).into_iter().filter(is_spot).flat_map(|fleet| fleet.pools);
    assert!(spares.filter(|pool| pool.part >= 2).all(|pool| pool.count > 2));
}
