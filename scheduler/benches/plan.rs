//! The time of a plan without its simulations. It covers rates, bound and ranking of all parts with a
//! built-in price, for one load of 24 classes, on all cores; and the bound and the cheapest fleet of each of
//! 672 hours.
//!
//! `cargo bench -p mixfleet-scheduler --features microlp --bench plan`

#![allow(missing_docs, clippy::print_stdout)]

use mixfleet_hal::catalog::parts;
use mixfleet_hal::economics::Selection;
use mixfleet_hal::units::{BytesPerSecond, Seconds};
use mixfleet_hal::{DType, StoredAs};
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::candidates::ServiceLevel;
use mixfleet_scheduler::plan::load::{LoadTally, SizeClass};
use mixfleet_scheduler::plan::market::{Market, MarketAsk};
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::offered::PartOnOffer;
use mixfleet_scheduler::{engines, models};
use std::time::Instant;

/// Prompts from 64 to 16,384 tokens and answers from 16 to 1,024, the middle ones most often.
fn classes() -> Vec<SizeClass> {
    let mut tally = LoadTally::default();
    for input in 0..8u32 {
        for output in 0..3u32 {
            let many = 1000 / (1 + input.abs_diff(4)) / (1 + output.abs_diff(1));
            (0..many).for_each(|_| tally.add(96 << input, 24 << (2 * output), 0));
        }
    }
    tally.classes(Seconds(600.0), 0.99)
}

/// The rates of all parts, as the command finds them.
fn on_all_cores(ask: &MarketAsk) -> Market {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let of = |first: usize| {
        let own = (first..ask.parts.len()).step_by(cores);
        own.map(|part| (part, PartOnOffer::new(ask, part))).collect::<Vec<_>>()
    };
    let mut rates: Vec<(usize, PartOnOffer)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|first| scope.spawn(move || of(first))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("rates")).collect()
    });
    rates.sort_by_key(|(part, _)| *part);
    Market::of(ask.clone(), rates.into_iter().map(|(_, rates)| rates).collect())
}

/// Bound and cheapest fleet of 672 hours whose load moves between a fifth and all of the market's.
fn by_the_hour(market: &Market, rates: &[f64]) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let planned = |hour: usize| {
        let day = 0.6 + 0.4 * (hour as f64 * std::f64::consts::TAU / 24.0 + rates[hour % rates.len()]).sin();
        let market = market.with_rates(&rates.iter().map(|rate| rate * day).collect::<Vec<_>>());
        market.lower_bound(&Microlp).is_ok() && market.cheapest(&Microlp).is_some()
    };
    std::thread::scope(|scope| {
        let of = |first: usize| (first..672).step_by(cores).filter(|hour| planned(*hour)).count();
        let threads: Vec<_> = (0..cores).map(|first| scope.spawn(move || of(first))).collect();
        threads.into_iter().map(|thread| thread.join().expect("hours")).sum()
    })
}

fn main() {
    let offers = parts().iter().filter_map(|part| {
        let price = Selection::default().price_or_reference(part.id, &[])?;
        Some(OfferedPart::new(part, price.usd_per_hour))
    });
    let offers: Vec<OfferedPart> = offers.collect();
    for model in ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"] {
        let ask = MarketAsk {
            model: models::find(model).expect("a known model"),
            stored: vec![StoredAs::Plain(DType::Bf16)],
            expert_skew: 0.0,
            engine: engines::find("mixfleet").expect("a known engine"),
            parts: offers.clone(),
            classes: classes(),
            answer_tokens_max: 4096,
            level: ServiceLevel { ttft: Seconds(5.0), tbt: Seconds(0.1) },
            attain: 0.99,
            confidence: 0.5,
            nic: BytesPerSecond(12.5e9),
            links: Vec::new(),
        };
        let classes = ask.classes.len();
        let times: Vec<[f64; 3]> = (0..5)
            .map(|_| {
                let start = Instant::now();
                let market = on_all_cores(&ask);
                let rates_s = start.elapsed().as_secs_f64();
                let bound = market.whole_lower_bound(&Microlp, None).expect("a bound");
                let bound_s = start.elapsed().as_secs_f64() - rates_s;
                let fleets = market.rank(&Microlp, 3);
                let rank_s = start.elapsed().as_secs_f64() - rates_s - bound_s;
                assert!(fleets.iter().all(|fleet| fleet.usd_per_hour >= bound) && !fleets.is_empty());
                [rates_s, bound_s, rank_s]
            })
            .collect();
        let rates: Vec<f64> = ask.classes.iter().map(|class| class.rate).collect();
        let market = on_all_cores(&ask);
        let start = Instant::now();
        assert_eq!(by_the_hour(&market, &rates), 672);
        println!("{model}, 672 hours: {:.1} s", start.elapsed().as_secs_f64());
        let median = |at: usize| {
            let mut of: Vec<f64> = times.iter().map(|times| times[at]).collect();
            of.sort_by(f64::total_cmp);
            of[of.len() / 2]
        };
        println!(
            "{model}, {} parts, {classes} classes: rates {:.3} s, bound {:.3} s, ranking {:.3} s",
            offers.len(),
            median(0),
            median(1),
            median(2)
        );
    }
}
