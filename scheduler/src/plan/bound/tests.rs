use super::*;
use crate::plan::branching::Microlp;
use crate::plan::candidates::{RequestSize, ServiceLevel};
use crate::plan::load::SizeClass;
use crate::plan::market::MarketAsk;
use crate::plan::offer::OfferedPart;
use crate::{engines, models};
use mixfleet_hal::catalog::part;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::BytesPerSecond;
use mixfleet_hal::{DType, StoredAs};

fn class(input_tokens: u32, output_tokens: u32, rate: f64) -> SizeClass {
    let size = RequestSize { input_tokens, output_tokens, cached_share: 0.0 };
    SizeClass { size, slowest: size, rate }
}

/// Llama-3.1-8B on three parts.
fn market(classes: Vec<SizeClass>) -> Market {
    let offer = |id, usd| OfferedPart::new(part(id).unwrap(), UsdPerHour(usd));
    Market::new(MarketAsk {
        model: models::find("llama-3.1-8b").unwrap(),
        stored: vec![StoredAs::Plain(DType::Bf16)],
        expert_skew: 0.0,
        engine: engines::find("vllm").unwrap(),
        parts: vec![offer("H100-SXM-80GB", 2.69), offer("L40S", 0.86), offer("RTX-4090", 0.34)],
        classes,
        answer_tokens_max: 0,
        level: ServiceLevel { ttft: Seconds(2.0), tbt: Seconds(0.05) },
        attain: 0.99,
        confidence: 0.5,
        nic: BytesPerSecond(12.5e9),
        links: Vec::new(),
    })
}

#[test]
fn no_ranked_fleet_is_below_the_bound_of_whole_instances_and_none_of_it_is_lost_by_leaving_kinds_out() {
    let mut random = Stream::new(11);
    for seed in 0..12 {
        let mut draw = |least: f64, most: f64| least * (most / least).powf(random.next_unit());
        let classes = (0..1 + seed % 3)
            .map(|_| class(draw(100.0, 6000.0) as u32, draw(20.0, 600.0) as u32, draw(0.1, 20.0)))
            .collect();
        let market = market(classes);
        let (divided, whole) =
            (market.lower_bound(&Microlp).unwrap(), market.whole_lower_bound(&Microlp, None).unwrap());
        let least = market.rank(&Microlp, 2)[0].usd_per_hour;
        assert!(divided <= whole && whole <= least, "seed {seed}: {divided:?} {whole:?} {least:?}");
        let rates: Vec<f64> = market.ask.classes.iter().map(|class| class.rate).collect();
        let span = Span { rates, unserved: market.left_out_max() };
        let bound =
            |kinds: &[&MarketKind]| market.program_of_span(kinds, &span).solve(&Microlp, SEARCH).unwrap();
        let all: Vec<&MarketKind> = market.kinds.iter().chain(market.apart_kinds()).collect();
        let (all, kept) = (bound(&all), bound(&market.undominated()));
        let both = all.lower_bound.max(kept.lower_bound) <= all.usd_per_hour.min(kept.usd_per_hour);
        assert!(both, "seed {seed}: {all:?} {kept:?}");
    }
}

#[test]
fn a_load_that_keeps_no_instance_busy_takes_one() {
    let market = market(vec![class(500, 100, 0.01)]);
    let [divided, whole] =
        [market.lower_bound(&Microlp), market.whole_lower_bound(&Microlp, None)].map(|usd| usd.unwrap().0);
    let fleet = &market.rank(&Microlp, 1)[0];
    assert!(divided < 0.1 * whole, "{divided} {whole}");
    assert!((whole - fleet.usd_per_hour.0).abs() < 1e-6, "{whole} {fleet:?}");
}

/// A fifth of an hour has five times the requests of the rest.
#[test]
fn the_densest_span_of_a_trace_counts() {
    let counts = |slot: u64| if (20..32).contains(&slot) { 500 } else { 100 };
    let requests: Vec<Vec<u64>> = (0..60).map(|slot| vec![counts(slot)]).collect();
    let all: u64 = requests.iter().flatten().sum();
    let slots =
        |answer| LoadSlots { slot: Seconds(60.0), requests: requests.clone(), answer: Seconds(answer) };
    let market = market(vec![class(1000, 200, all as f64 / 3600.0)]);
    let span = market.densest(&slots(5.0)).unwrap();
    assert!((span.rates[0] - 6000.0 / 725.0).abs() < 1e-9, "{:?}", span.rates);
    assert!((span.unserved * 725.0 - 0.01 * all as f64).abs() < 1e-3, "{}", span.unserved);
    let bound = |slots: Option<&LoadSlots>| market.whole_lower_bound(&Microlp, slots).unwrap().0;
    let [none, dense, slow] = [bound(None), bound(Some(&slots(5.0))), bound(Some(&slots(1e6)))];
    assert!(dense > 1.8 * none && slow == none, "{none} {dense} {slow}");
}
