//! Compares what the planner's formulas give with published tables, where the files that restate them are
//! available.

use mixfleet_hal::DType;
use mixfleet_hal::catalog::part;
use mixfleet_hal::economics::{Ability, Origin};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, Flop, FlopPerSecond, MIB, Seconds, UsdPerHour};
use mixfleet_scheduler::plan::apart::{PartRates, TokenWork};
use mixfleet_scheduler::plan::remote::{DividedPrompts, LengthShare, RemotePrefill};
use std::path::Path;

/// The lines of a file of shared data, without its remarks.
fn lines(file: &str) -> Option<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured").join(file);
    let Ok(text) = std::fs::read_to_string(path) else {
        eprintln!("SKIPPED: ../shared/data/measured/{file} is absent; nothing was compared with it");
        return None;
    };
    Some(text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect())
}

fn near(got: f64, published: f64, tolerance: f64) -> bool {
    (got / published - 1.0).abs() <= tolerance
}

/// Step-3's prices ($/h), arithmetic (fp8 on Hopper, bf16 elsewhere) and bandwidth: arXiv 2507.19427, table
/// 2.
const STEP3_PARTS: [(&str, f64, f64, f64); 4] = [
    ("H800", 2.0, 1.98e15, 3.35e12),
    ("H20", 0.8, 2.96e14, 4.0e12),
    ("A800", 0.75, 3.12e14, 2.0e12),
    ("910B", 0.67, 2.8e14, 1.6e12),
];

/// A row of Step-3's tables 3 and 6: what a token takes at 8K and 32K of context, and the costs at both.
struct Step3Row {
    model: String,
    work: [TokenWork; 2],
    attention: [[f64; 4]; 2],
    feed_forward: [f64; 4],
}

fn step3() -> Option<Vec<Step3Row>> {
    let lines = lines("step3_cost_table.csv")?;
    let row = |line: &String| {
        let fields: Vec<&str> = line.split(',').collect();
        let number = |at: usize| -> f64 { fields[at].parse().expect("a number") };
        let four = |at: usize| [0, 1, 2, 3].map(|part| number(at + part));
        let work = |kv: usize, attention: usize| TokenWork {
            attention: Flop(number(attention)),
            kv: Bytes(number(kv)),
            projections: Flop(number(3)),
            feed_forward: Flop(number(4)),
        };
        Step3Row {
            model: fields[0].to_owned(),
            work: [work(1, 2), work(5, 6)],
            attention: [four(7), four(11)],
            feed_forward: four(15),
        }
    };
    Some(lines.iter().skip(1).map(row).collect())
}

fn priced(prices: [f64; 4]) -> [(UsdPerHour, PartRates); 4] {
    std::array::from_fn(|at| {
        let (_, _, flop, bytes) = STEP3_PARTS[at];
        let rates = PartRates { flop: FlopPerSecond(flop), bytes: BytesPerSecond(bytes) };
        (UsdPerHour(prices[at]), rates)
    })
}

#[test]
fn step_3s_table_comes_out_in_all_its_entries() {
    let Some(rows) = step3() else { return };
    let parts = priced(STEP3_PARTS.map(|(_, price, ..)| price));
    let (mut entries, mut worst) = (0, 0.0f64);
    let mut compare = |what: String, usd: f64, published: f64| {
        let off = (usd * 1e6 - published).abs();
        assert!(off <= 0.0015, "{what}: {} against {published}", usd * 1e6);
        (entries, worst) = (entries + 1, worst.max(off));
    };
    for row in &rows {
        for (at, (rent, rates)) in parts.iter().enumerate() {
            let name = |what: &str| format!("{} {what} on {}", row.model, STEP3_PARTS[at].0);
            for (context, work) in row.work.iter().enumerate() {
                let usd = (*rent * work.attention_side_s(rates)).0;
                compare(name("attention"), usd, row.attention[context][at]);
            }
            compare(
                name("feed forward"),
                (*rent * row.work[0].feed_forward_s(rates)).0,
                row.feed_forward[at],
            );
        }
    }
    eprintln!("{entries} entries, at most ${worst:.5} per million tokens off");
    assert_eq!(entries, 108);
}

/// The paper's picks: attention of Qwen on the H20 and of DeepSeek-V3 on the H800, feed forward on the H800
/// everywhere, so that DeepSeek-V3 is rented whole.
#[test]
fn step_3s_picks_come_out() {
    let Some(rows) = step3() else { return };
    let parts = priced(STEP3_PARTS.map(|(_, price, ..)| price));
    for (model, attention, usd) in [
        ("DSv3", "H800", [0.068, 0.211]),
        ("Qwen3 MoE", "H20", [0.062, 0.193]),
        ("Qwen3 32B", "H20", [0.083, 0.262]),
        ("Step-3", "H20", [0.055, 0.129]),
    ] {
        let row = rows.iter().find(|row| row.model == model).expect("a row");
        for (work, usd) in row.work.iter().zip(usd) {
            let apart = work.cheapest(&parts).expect("parts");
            assert_eq!(STEP3_PARTS[apart.attention.0].0, attention, "{model}");
            assert_eq!(STEP3_PARTS[apart.feed_forward.0].0, "H800", "{model}");
            assert!((apart.usd().0 * 1e6 - usd).abs() <= 0.0015, "{model}: {:?} against {usd}", apart.usd());
            let whole = attention == "H800";
            assert_eq!(apart.usd().0 >= apart.together.1.0 * (1.0 - 1e-12), whole, "{model}");
        }
        // Latent attention is bound by arithmetic on all but the H800; that of few heads per KV head by
        // bandwidth.
        let bound = parts.map(|(_, rates)| row.work[0].is_bound_by_arithmetic(&rates));
        match model {
            "DSv3" => assert_eq!(bound, [false, true, true, true]),
            "Qwen3 MoE" | "Qwen3 32B" => assert_eq!(bound, [false; 4]),
            _ => {}
        }
    }
}

/// Twenty price vectors, from half to twice the published prices, against costs written out in one line each.
#[test]
fn picks_follow_prices_as_an_independent_formula_says() {
    let Some(rows) = step3() else { return };
    for seed in 0..20 {
        let mut random = Stream::new(seed);
        let prices = STEP3_PARTS.map(|(_, price, ..)| price * 4f64.powf(random.next_unit() - 0.5));
        for row in &rows {
            for work in &row.work {
                let [mut attention, mut feed_forward, mut together] = [(9, f64::MAX); 3];
                for (at, (_, _, f, b)) in STEP3_PARTS.into_iter().enumerate() {
                    let (per_flop, per_byte) = (prices[at] / 3600.0 / f, prices[at] / 3600.0 / b);
                    let read = (work.attention.0 * per_flop).max(work.kv.0 * per_byte);
                    let side = read + work.projections.0 * per_flop;
                    let rest = work.feed_forward.0 * per_flop;
                    if side < attention.1 {
                        attention = (at, side);
                    }
                    if rest < feed_forward.1 {
                        feed_forward = (at, rest);
                    }
                    if side + rest < together.1 {
                        together = (at, side + rest);
                    }
                }
                let got = work.cheapest(&priced(prices)).expect("parts");
                for (got, (at, usd)) in
                    [(got.attention, attention), (got.feed_forward, feed_forward), (got.together, together)]
                {
                    assert_eq!(got.0, at, "seed {seed}, {}", row.model);
                    assert!(near(got.1.0, usd, 1e-9), "seed {seed}, {}: {got:?} {usd}", row.model);
                }
            }
        }
    }
}

/// Bf16 arithmetic and bandwidth, as claimed or as published.
fn rates<P: Origin>(ability: &Ability<P>) -> PartRates {
    let one = ability.per_dollar(UsdPerHour(1.0)).expect("a price");
    let flop = one.flop_per_second(DType::Bf16).expect("bf16");
    PartRates { flop: FlopPerSecond(flop), bytes: BytesPerSecond(one.bytes_per_second) }
}

/// A token of Llama 3 70B: 80 layers, 64 heads and 8 KV heads of 128, hidden 8192, feed forward 28672.
fn llama_70b(context: f64) -> TokenWork {
    TokenWork {
        attention: Flop(4.0 * 80.0 * 64.0 * 128.0 * context),
        kv: Bytes(327_680.0 * context),
        projections: Flop(2.0 * 80.0 * 8192.0 * (2.0 * 8192.0 + 2.0 * 1024.0)),
        feed_forward: Flop(2.0 * 80.0 * 3.0 * 8192.0 * 28_672.0),
    }
}

/// MegaScale-Infer (arXiv 2504.02263, table 3) rents attention on the H20 and experts on the L40S, by prices
/// relative to the L20's; Lamina (arXiv 2405.01814, table 1) finds that the H20 reads 2.85 times the bytes of
/// an H100 for a dollar.
#[test]
fn attention_goes_where_bytes_are_cheap_and_feed_forward_where_flop_are() {
    let claimed =
        |id: &str, price: f64| (UsdPerHour(price), rates(&Ability::claimed(part(id).expect("a part"))));
    let ids = ["L20", "L40S", "H20-96GB", "H800-SXM-80GB"];
    let parts: Vec<_> =
        ids.iter().zip([1.00, 1.08, 1.85, 5.28]).map(|(id, price)| claimed(id, price)).collect();
    for context in [4096.0, 32_768.0] {
        let apart = llama_70b(context).cheapest(&parts).expect("parts");
        assert_eq!((ids[apart.attention.0], ids[apart.feed_forward.0]), ("H20-96GB", "L40S"));
        assert!(apart.usd().0 < apart.together.1.0 * 0.85, "{apart:?}");
    }
    let (h100, h20) = (claimed("H100-SXM-80GB", 11.06), claimed("H20-96GB", 4.63));
    let work = llama_70b(8192.0);
    let usd = |(rent, rates): (UsdPerHour, PartRates)| (rent * work.attention_s(&rates)).0;
    assert!(near(usd(h100) / usd(h20), 2.85, 0.01), "{}", usd(h100) / usd(h20));
}

/// NEO's figure 10a: the throughput of an A10G with Llama 3 8B on prompts of 1000 tokens gains 12.2, 13.3,
/// 29.7 and 79.3 % from attention on 4, 8, 16 and 32 host cores beside it. A core of that host reads 204.8
/// GB/s / 48. The cores attend to as many more sequences as they can in a step, which reads the weights and
/// fills the rest of the memory with KV; each is worth as much as one on the device. Nothing is fitted, so
/// that only the shape and the size can be expected to agree: it gives 11, 22, 44 and 89 %.
#[test]
fn attention_on_host_cores_gains_as_their_bandwidth_grows() {
    const CONTEXT: f64 = 1100.0;
    let (weights, memory) = (16.06e9, 24e9 * 0.9);
    let work = TokenWork {
        attention: Flop(4.0 * 32.0 * 32.0 * 128.0 * CONTEXT),
        kv: Bytes(131_072.0 * CONTEXT),
        projections: Flop(0.0),
        feed_forward: Flop(0.0),
    };
    let a10g = rates(&Ability::claimed(part("A10G").expect("a part")));
    let batch = (memory - weights) / work.kv.0;
    let step = Bytes(weights) / a10g.bytes + work.attention_s(&a10g) * batch;
    let gain = |cores: f64| {
        let host =
            PartRates { flop: FlopPerSecond(cores * 50e9), bytes: BytesPerSecond(cores * 204.8e9 / 48.0) };
        assert!(!work.is_bound_by_arithmetic(&host));
        step / work.attention_s(&host) / batch
    };
    let published = [(4.0, 0.122), (8.0, 0.133), (16.0, 0.297), (32.0, 0.793)];
    let gains = published.map(|(cores, _)| gain(cores));
    eprintln!("gains {gains:.3?}");
    assert!(gains.windows(2).all(|pair| pair[0] < pair[1]), "{gains:?}");
    for ((cores, published), gain) in published.into_iter().zip(gains) {
        assert!((0.5..2.0).contains(&(gain / published)), "{cores} cores: {gain} against {published}");
    }
}

/// hetero-papers 4(i), with the shares of bandwidth that vLLM's decode attention reaches: against an H100 at
/// $2.69, L40S below $0.58, RTX PRO 6000 below $1.33, RTX 4090 below $0.83. By the catalog's shares they are
/// $0.583, $1.325 and $0.846; the published one of the last follows from a share of
/// 0.90, and the catalog has 0.92.
#[test]
fn published_break_even_prices_of_attention_come_out_of_published_shares() {
    let rates = |id: &str| rates(&Ability::published(part(id).expect("a part")).expect("shares"));
    let work = llama_70b(4096.0);
    let h100 = rates("H100-SXM-80GB");
    for (id, published) in [("L40S", 0.58), ("RTX-PRO-6000-SE", 1.33), ("RTX-4090", 0.83)] {
        let rates = rates(id);
        assert!(!work.is_bound_by_arithmetic(&rates), "{id}");
        let price = work.attention_break_even(&rates, (UsdPerHour(2.69), &h100));
        assert!(near(price.0, published, 0.05), "{id}: {price:?}");
        let alone = TokenWork { projections: Flop(0.0), ..work };
        let at = |price: f64| {
            let parts = [(UsdPerHour(price), rates), (UsdPerHour(2.69), h100)];
            alone.cheapest(&parts).expect("parts").attention.0
        };
        assert_eq!((at(price.0 * 0.999), at(price.0 * 1.001)), (0, 1), "{id}");
    }
}

/// Lengths of prompts in the case study of prefill as a service: lognormal, mu 9.90 and sigma 1.00, truncated
/// to 128 and 131,072 tokens; here at 20,000 lengths with even logarithms.
fn prompts() -> Vec<LengthShare> {
    const COUNT: u32 = 20_000;
    let (from, to) = (128f64.ln(), 131_072f64.ln());
    let at = |index: f64| from + (to - from) * index / f64::from(COUNT);
    let density = |log: f64| (-0.5 * (log - 9.90).powi(2)).exp();
    let logs = || (0..COUNT).map(|index| at(f64::from(index) + 0.5));
    let all: f64 = logs().map(density).sum();
    logs().map(|log| LengthShare { tokens: log.exp().round() as u32, share: density(log) / all }).collect()
}

/// The parabola through three measured lengths around `tokens`.
fn along(points: &[(f64, f64)], tokens: f64) -> f64 {
    let first =
        points.iter().skip(1).take_while(|(length, _)| *length < tokens).count().min(points.len() - 2);
    let [(x0, y0), (x1, y1), (x2, y2)] = points[first.min(points.len() - 3)..][..3] else { unreachable!() };
    let (low, high) = ((y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1));
    y0 + low * (tokens - x0) + (high - low) / (x2 - x0) * (tokens - x0) * (tokens - x1)
}

fn mean(lengths: &[LengthShare], counts: impl Fn(u32) -> bool) -> f64 {
    let counted = lengths.iter().filter(|length| counts(length.tokens));
    let (sum, share) =
        counted.fold((0.0, 0.0), |(sum, all), l| (sum + l.share * f64::from(l.tokens), all + l.share));
    sum / share
}

/// The case study of arXiv 2604.15039: 4 remote instances of 8 H200, 8 local ones of 8 H20, 100 Gb/s.
///
/// The paper lists prefill times of the H200 at four lengths and none of the H20, so a line for the H20 is
/// solved from two of its results: 1.64 requests/s of three instances on prompts up to 19.4K, and 2.11 of
/// nine on all prompts; 3.91 of five instances give what one decodes. What remains is predicted: the
/// threshold, the division, 3.24, and 2.45 of the naive division. Chords between the four lengths and the
/// time of the mean length give 1.58 for the paper's 1.61 of the remote cluster and 3.19 in all, since the
/// chord from 32K to 128K lies above a convex time; the parabola through them and the mean of the times give
/// 1.60 and 3.24.
#[test]
fn the_case_study_of_prefill_as_a_service_comes_out() {
    let Some(lines) = lines("prfaas_case.csv") else { return };
    let rows: Vec<[f64; 3]> = lines[1..]
        .iter()
        .map(|line| {
            let mut fields = line.split(',').map(|field| field.parse().expect("a number"));
            std::array::from_fn(|_| fields.next().expect("three columns"))
        })
        .collect();
    let times: Vec<(f64, f64)> = rows.iter().map(|row| (row[0], row[2])).collect();
    let kv: Vec<(f64, f64)> = rows.iter().map(|row| (row[0], row[1] * MIB as f64)).collect();
    let lengths = prompts();
    let (short, all) = (mean(&lengths, |tokens| tokens <= 19_400), mean(&lengths, |_| true));
    assert!(near(all, 27_471.0, 0.002), "{all}");
    let per_token = (9.0 / 2.11 - 3.0 / 1.64) / (all - short);
    let overhead = 3.0 / 1.64 - per_token * short;
    let case = RemotePrefill {
        lengths: &lengths,
        remote: 4,
        remote_prefill_s: &|tokens| Seconds(along(&times, f64::from(tokens))),
        kv_bytes: &|tokens| Bytes(along(&kv, f64::from(tokens))),
        link: BytesPerSecond(100e9 / 8.0),
        local: 8,
        local_prefill_s: &|tokens| Seconds(overhead + per_token * f64::from(tokens)),
        decode_rate: 3.91 / 5.0,
    };
    let best = case.best().expect("lengths");
    eprintln!("H20: {overhead:.3} s + {:.4} ms/token; {best:?}", per_token * 1e3);
    assert_eq!((best.prefill, best.decode), (3, 5));
    assert!(near(f64::from(best.threshold), 19_400.0, 0.05), "{best:?}");
    assert!(near(best.rate, 3.24, 0.03), "{best:?}");
    assert!(near(best.remote_share, 0.496, 0.03), "{best:?}");
    let gigabits = best.link.0 * 8.0 / 1e9;
    assert!(near(gigabits, 13.0, 0.1), "{gigabits}");

    let naive: DividedPrompts = case.at(0, 0);
    assert!(near(naive.rate, 2.45, 0.03), "{naive:?}");
    // 96 H20: as many instances as both clusters have, and nothing remote
    let alone = RemotePrefill { remote: 0, local: 12, ..case }.best().expect("lengths");
    assert_eq!((alone.prefill, alone.decode), (9, 3));
    assert!(near(alone.rate, 2.11, 0.03) && alone.remote_share == 0.0, "{alone:?}");
    // with a link of 10 Gb/s it is the link that binds, and fewer prompts are sent
    let narrow = RemotePrefill { link: BytesPerSecond(10e9 / 8.0), ..case }.best().expect("lengths");
    assert!(narrow.rate < best.rate && narrow.remote_share < best.remote_share, "{narrow:?}");
    assert!(near(narrow.link.0, 10e9 / 8.0, 0.03), "{narrow:?}");
}
