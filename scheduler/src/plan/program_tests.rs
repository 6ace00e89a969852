#[allow(dead_code, reason = "the published case study reads the rest")]
#[path = "../../tests/two_clusters.rs"]
mod two_clusters;

use super::branching::Microlp;
use super::linear::{Search, Unsolved};
use super::program::*;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds, UsdPerHour};
use two_clusters::{LengthShare, RemotePrefill};

fn solve(program: &Program) -> Result<PlannedFleet, Unplanned> {
    program.solve(&Microlp, Search::default())
}

fn rentable(name: &str, price: f64, most: u32) -> Rentable {
    Rentable { name: name.into(), usd_per_hour: UsdPerHour(price), most, takes: Vec::new(), spares: 0 }
}

fn class(name: &str, rate: f64, asks: Duty) -> DemandClass {
    DemandClass { name: name.into(), rate, asks }
}

fn placing(on: usize, class: usize, duty: Duty, instances: f64) -> Placing {
    Placing { on, class, duty, instances, takes: Vec::new() }
}

/// The example configuration of Mélange's authors: requests/s that an A10G and an A100 serve of four buckets,
/// 30 of which arrive per second.
fn melange(slices: Option<u32>) -> Program {
    let rates = [0.2, 0.1, 0.5, 0.2].map(|share| share * 30.0);
    let capacities = [[2.0, 1.0, 5.0, 2.0], [20.0, 20.0, 40.0, 20.0]];
    let placings = capacities.iter().enumerate().flat_map(|(on, row)| {
        row.iter().enumerate().map(move |(bucket, rate)| placing(on, bucket, Duty::Whole, 1.0 / rate))
    });
    Program {
        rentables: vec![rentable("A10G", 1.01, 100), rentable("A100", 3.67, 100)],
        classes: rates.map(|rate| class("bucket", rate, Duty::Whole)).into(),
        placings: placings.collect(),
        slices,
        ..Program::default()
    }
}

#[test]
fn melanges_example_comes_out() {
    // their README: $6.70 with one slice; four and eight as another solver found (HiGHS)
    for (slices, usd, counts) in [(1, 6.70, [3, 1]), (4, 5.69, [2, 1]), (8, 5.69, [2, 1])] {
        let fleet = solve(&melange(Some(slices))).unwrap();
        assert!((fleet.usd_per_hour.0 - usd).abs() < 1e-6 && fleet.proven, "{slices} slices: {fleet:?}");
        assert_eq!(fleet.counts, counts, "{slices} slices");
        assert!(fleet.lower_bound <= fleet.usd_per_hour);
    }
    // What eight slices miss: a third of the third bucket fills one A10G, and the rest one A100.
    for slices in [None, Some(3)] {
        let fleet = solve(&melange(slices)).unwrap();
        assert!((fleet.usd_per_hour.0 - 4.68).abs() < 1e-6, "{fleet:?}");
        assert_eq!(fleet.counts, [1, 1]);
    }
}

/// Requests per second that parts with some bandwidth and arithmetic do of a bucket, by the roofline: a 7B
/// model in 16 bits, whose token has 0.5 MB of KV, in batches that fill the memory.
fn seven_b(bandwidth: f64, flop: f64, memory: f64, tokens: [f64; 2]) -> Option<f64> {
    let [input, output] = tokens;
    let kv = 524_288.0 * (input + output / 2.0);
    let batch = ((memory * 0.9 - 13.5e9) / kv).floor();
    let step = (13.5e9 + batch * kv) / bandwidth;
    (batch >= 1.0).then(|| 1.0 / (13.5e9 * input / flop + output * step / batch))
}

/// Mélange's four parts at its prices, and six buckets: what the program finds is what going through all
/// divisions of slices finds.
#[test]
fn on_melanges_parts_and_prices_no_division_of_slices_costs_less() {
    let parts = [
        ("L4", 0.70, [0.3e12, 121e12, 24e9]),
        ("A10G", 1.01, [0.6e12, 70e12, 24e9]),
        ("A100", 3.67, [2.0e12, 312e12, 80e9]),
        ("H100", 7.516, [3.35e12, 989e12, 80e9]),
    ];
    let buckets =
        [[100.0, 100.0], [100.0, 1000.0], [1000.0, 100.0], [1000.0, 1000.0], [8000.0, 200.0], [30e3, 500.0]];
    for rate in [0.5, 2.0, 8.0] {
        let shares = [0.35, 0.2, 0.2, 0.15, 0.07, 0.03];
        let mut program = Program {
            rentables: parts.iter().map(|(name, price, _)| rentable(name, *price, 1000)).collect(),
            classes: shares.map(|share| class("bucket", share * rate, Duty::Whole)).into(),
            slices: Some(2),
            ..Program::default()
        };
        for (on, (_, _, [bandwidth, flop, memory])) in parts.into_iter().enumerate() {
            for (bucket, tokens) in buckets.into_iter().enumerate() {
                let rate = seven_b(bandwidth, flop, memory, tokens);
                program.placings.extend(rate.map(|rate| placing(on, bucket, Duty::Whole, 1.0 / rate)));
            }
        }
        assert!(program.placings.len() < 24, "the longest bucket does not fit on all");
        let fleet = solve(&program).unwrap();
        let least = cheapest_by_trying(&program).unwrap();
        assert!((fleet.usd_per_hour.0 - least).abs() < 1e-6, "{rate}/s: {fleet:?} against {least}");
        let divided = solve(&Program { slices: None, ..program }).unwrap();
        assert!(divided.usd_per_hour.0 < least + 1e-6 && divided.lower_bound <= divided.usd_per_hour);
    }
}

/// All ways to divide `slices` of a class over its placings, as numbers of slices of all placings.
fn divisions(program: &Program, class: usize) -> Vec<Vec<u32>> {
    let slices = program.slices.unwrap();
    let own: Vec<usize> =
        (0..program.placings.len()).filter(|&at| program.placings[at].class == class).collect();
    let asked = program.classes[class].asks.stages();
    let mut found = vec![vec![0; program.placings.len()]];
    for &at in &own {
        found = found
            .into_iter()
            .flat_map(|before| {
                (0..=slices).map(move |count| {
                    let mut next = before.clone();
                    next[at] = count;
                    next
                })
            })
            .filter(|counts| asked.iter().all(|stage| sum(program, &own, counts, *stage) <= slices))
            .collect();
    }
    found.retain(|counts| asked.iter().all(|stage| sum(program, &own, counts, *stage) == slices));
    found
}

fn sum(program: &Program, own: &[usize], counts: &[u32], stage: WorkStage) -> u32 {
    own.iter().filter(|&&at| program.placings[at].duty.stages().contains(&stage)).map(|&at| counts[at]).sum()
}

/// The rent of the cheapest fleet, by trying all divisions of all classes; `None` if none is allowed.
fn cheapest_by_trying(program: &Program) -> Option<f64> {
    let loads = |counts: &[u32]| -> Vec<(f64, u32)> {
        let mut loads = vec![(0.0, 0); program.rentables.len()];
        for (placing, &count) in program.placings.iter().zip(counts) {
            let rate = program.classes[placing.class].rate / f64::from(program.slices.unwrap());
            loads[placing.on].0 += rate * placing.instances * f64::from(count);
            loads[placing.on].1 += count;
        }
        loads
    };
    let mut all: Vec<Vec<(f64, u32)>> = vec![vec![(0.0, 0); program.rentables.len()]];
    for class in 0..program.classes.len() {
        let mut ways: Vec<_> = divisions(program, class).iter().map(|counts| loads(counts)).collect();
        // several divisions of one class may load every kind alike
        ways.dedup();
        let add = |a: &[(f64, u32)], b: &[(f64, u32)]| {
            a.iter().zip(b).map(|(a, b)| (a.0 + b.0, a.1 + b.1)).collect()
        };
        all = all.iter().flat_map(|a| ways.iter().map(move |b| add(a, b))).collect();
    }
    all.iter().filter_map(|loads| rent(program, loads)).min_by(f64::total_cmp)
}

/// What the whole instances cost that carry these loads; `None` if they are too many.
fn rent(program: &Program, loads: &[(f64, u32)]) -> Option<f64> {
    let counts: Vec<f64> = loads
        .iter()
        .zip(&program.rentables)
        .map(|(&(load, slices), rentable)| match slices {
            0 => 0.0,
            _ => (load - 1e-9).ceil().max(0.0) + f64::from(rentable.spares),
        })
        .collect();
    let mut taken = vec![0.0; program.ceilings.len()];
    for (rentable, count) in program.rentables.iter().zip(&counts) {
        rentable.takes.iter().for_each(|&(at, amount)| taken[at] += amount * count);
    }
    let fits =
        program.rentables.iter().zip(&counts).all(|(rentable, count)| *count <= f64::from(rentable.most))
            && program.ceilings.iter().zip(&taken).all(|(ceiling, taken)| *taken <= ceiling.most);
    let rents =
        program.rentables.iter().zip(&counts).map(|(rentable, count)| rentable.usd_per_hour.0 * count);
    let used = program.ceilings.iter().zip(&taken).map(|(ceiling, taken)| ceiling.usd_per_hour.0 * taken);
    fits.then(|| rents.chain(used).sum())
}

/// A program of at most four kinds of instance, at most four of each, with every duty, some for several.
fn any_sliced(seed: u64) -> Program {
    let mut random = Stream::new(seed);
    let kinds = 1 + random.below(4) as usize;
    let classes = 1 + random.below(2) as usize;
    let shared = random.below(3) == 0;
    let mut program = Program {
        slices: Some(1 + random.below(if classes == 1 { 4 } else { 2 }) as u32),
        ..Program::default()
    };
    let spares = u32::from(random.below(4) == 0);
    if shared {
        let price = UsdPerHour(0.2 * random.next_unit());
        program.ceilings.push(Ceiling { name: "devices".into(), most: 9.5, usd_per_hour: price });
    }
    for at in 0..classes {
        let asks = [Duty::Whole, Duty::Whole, Duty::Whole, Duty::Decode][random.below(4) as usize];
        program.classes.push(class(&format!("class {at}"), 0.2 + 2.0 * random.next_unit(), asks));
    }
    for on in 0..kinds {
        let mut kind = rentable(&format!("kind {on}"), 0.3 + 4.0 * random.next_unit(), 4);
        kind.takes = if shared { vec![(0, 1.0 + random.below(2) as f64)] } else { Vec::new() };
        kind.spares = spares * (on as u32 % 3);
        program.rentables.push(kind);
        let duties: &[Duty] = match random.below(8) {
            0..3 => &[Duty::Whole],
            3 => &[Duty::Prefill],
            4..7 => &[Duty::Decode],
            _ => &[Duty::Prefill, Duty::Whole, Duty::Decode],
        };
        for at in 0..classes {
            for &duty in duties {
                let instances = duty.stages().len() as f64 * (0.1 + 0.6 * random.next_unit());
                let can = random.below(8) > 0;
                program.placings.extend(can.then(|| placing(on, at, duty, instances)));
            }
        }
    }
    program
}

/// Solves 200 programs, and compares with what each costs, if it can be served.
fn costs_what_trying_finds(any: impl Fn(u64) -> (Program, Option<f64>)) {
    let mut planned = 0;
    for seed in 0..200 {
        let (program, usd) = any(seed);
        match (solve(&program), usd) {
            (Ok(fleet), Some(usd)) => {
                assert!(
                    (fleet.usd_per_hour.0 - usd).abs() < 1e-6,
                    "seed {seed}: {usd}, {fleet:?}\n{program:?}"
                );
                assert!(fleet.proven && fleet.lower_bound <= fleet.usd_per_hour, "seed {seed}: {fleet:?}");
                planned += 1;
            }
            (Err(Unplanned::TooLittle | Unplanned::Unserved { .. }), None) => {}
            (fleet, usd) => panic!("seed {seed}: {usd:?}, {fleet:?}\n{program:?}"),
        }
    }
    eprintln!("{planned} of 200 programs have a fleet");
    assert!(planned >= 80, "{planned}");
}

#[test]
fn two_hundred_small_programs_in_slices_cost_what_trying_all_divisions_finds() {
    costs_what_trying_finds(|seed| {
        let program = any_sliced(seed);
        let usd = cheapest_by_trying(&program);
        (program, usd)
    });
}

/// Whether counts carry a class that may be divided arbitrarily, each kind having one duty: whole and decode
/// instances are useful everywhere, so that each stage only needs enough of them.
fn carries_one(program: &Program, counts: &[u32]) -> bool {
    let able = |stage: WorkStage| -> f64 {
        let own = program.placings.iter().filter(|placing| placing.duty.stages().contains(&stage));
        own.map(|placing| f64::from(counts[placing.on]) / placing.instances).sum()
    };
    let asked = program.classes[0].asks.stages();
    asked.iter().all(|stage| able(*stage) >= program.classes[0].rate - 1e-9)
}

/// Whether counts carry two classes, all duties being whole: the first class goes first where it costs the
/// least of the second.
fn carries_two(program: &Program, counts: &[u32]) -> bool {
    let load = |on: usize, class: usize| {
        let own = program.placings.iter().find(|placing| placing.on == on && placing.class == class);
        own.map(|placing| placing.instances)
    };
    let mut kinds: Vec<_> =
        counts.iter().enumerate().map(|(on, count)| (f64::from(*count), load(on, 0), load(on, 1))).collect();
    let loss = |a: Option<f64>, b: Option<f64>| a.map_or(f64::MAX, |a| b.map_or(0.0, |b| a / b));
    kinds.sort_by(|a, b| loss(a.1, a.2).total_cmp(&loss(b.1, b.2)));
    let [mut first, mut second] = [program.classes[0].rate, program.classes[1].rate];
    for (count, a, b) in kinds {
        let busy = a.map_or(0.0, |a| count.min(first * a));
        first -= a.map_or(0.0, |a| busy / a);
        second -= b.map_or(0.0, |b| (count - busy) / b);
    }
    first <= 1e-9 && second <= 1e-9
}

/// The rent of the cheapest counts that carry the load, by trying all.
fn cheapest_of_all_counts(program: &Program, carries: impl Fn(&Program, &[u32]) -> bool) -> Option<f64> {
    let mut counts: Vec<Vec<u32>> = vec![Vec::new()];
    for rentable in &program.rentables {
        let grow = |before: Vec<u32>| (0..=rentable.most).map(move |count| [&before[..], &[count]].concat());
        counts = counts.into_iter().flat_map(grow).collect();
    }
    let usd = |counts: &Vec<u32>| -> f64 {
        program
            .rentables
            .iter()
            .zip(counts)
            .map(|(kind, count)| kind.usd_per_hour.0 * f64::from(*count))
            .sum()
    };
    counts.iter().filter(|counts| carries(program, counts)).map(usd).min_by(f64::total_cmp)
}

fn any_divided(seed: u64) -> (Program, bool) {
    let mut random = Stream::new(seed ^ 0xd1_71de);
    let two = random.below(2) == 1;
    let mut program = Program::default();
    for at in 0..1 + usize::from(two) {
        program.classes.push(class(&format!("class {at}"), 0.2 + 3.0 * random.next_unit(), Duty::Whole));
    }
    for on in 0..1 + random.below(4) as usize {
        program.rentables.push(rentable(&format!("kind {on}"), 0.3 + 4.0 * random.next_unit(), 4));
        let any = [Duty::Whole, Duty::Prefill, Duty::Decode];
        let duty = if two { Duty::Whole } else { any[random.below(3) as usize] };
        for at in 0..program.classes.len() {
            if random.below(6) > 0 {
                let stages = duty.stages().len() as f64;
                program.placings.push(placing(on, at, duty, stages * (0.1 + 0.4 * random.next_unit())));
            }
        }
    }
    (program, two)
}

#[test]
fn two_hundred_small_programs_that_divide_freely_cost_what_trying_all_counts_finds() {
    costs_what_trying_finds(|seed| {
        let (program, two) = any_divided(seed);
        let usd = match two {
            true => cheapest_of_all_counts(&program, carries_two),
            false => cheapest_of_all_counts(&program, carries_one),
        };
        (program, usd)
    });
}

/// Two clusters that a threshold of prompt length divides best: the program, which may divide prompts anyhow,
/// carries what the closed form says and hardly more.
#[test]
fn the_program_carries_what_the_closed_form_of_two_clusters_says() {
    for seed in 0..6 {
        let mut random = Stream::new(seed);
        let lengths: Vec<LengthShare> =
            (1..=48).map(|step| LengthShare { tokens: 700 * step, share: 1.0 / 48.0 }).collect();
        let (fast, slow) = (4e-5 * (0.7 + random.next_unit()), 1.4e-4 * (0.8 + random.next_unit()));
        let case = RemotePrefill {
            lengths: &lengths,
            remote: 1 + random.below(4) as u32,
            remote_prefill_s: &|tokens| Seconds(0.5 + fast * f64::from(tokens)),
            kv_bytes: &|tokens| Bytes(2e4 * f64::from(tokens)),
            link: BytesPerSecond(1.25e10),
            local: 4 + random.below(5) as u32,
            local_prefill_s: &|tokens| Seconds(0.3 + slow * f64::from(tokens)),
            decode_rate: 0.5 + random.next_unit(),
        };
        let best = case.best().unwrap();
        let at = |rate: f64| {
            let mut program = Program {
                rentables: vec![
                    rentable("remote", 1.0, case.remote),
                    rentable("local prefill", 1.0, case.local),
                    rentable("local decode", 1.0, case.local),
                ],
                ceilings: vec![
                    Ceiling { name: "local".into(), most: case.local.into(), usd_per_hour: UsdPerHour(0.0) },
                    Ceiling { name: "link".into(), most: case.link.0, usd_per_hour: UsdPerHour(0.0) },
                ],
                ..Program::default()
            };
            program.rentables[1].takes = vec![(0, 1.0)];
            program.rentables[2].takes = vec![(0, 1.0)];
            for (at, length) in lengths.iter().enumerate() {
                program.classes.push(class("length", rate * length.share, Duty::Whole));
                let remote = placing(0, at, Duty::Prefill, (case.remote_prefill_s)(length.tokens).0);
                let kv = vec![(1, (case.kv_bytes)(length.tokens).0)];
                program.placings.push(Placing { takes: kv, ..remote });
                program.placings.push(placing(1, at, Duty::Prefill, (case.local_prefill_s)(length.tokens).0));
                program.placings.push(placing(2, at, Duty::Decode, 1.0 / case.decode_rate));
            }
            solve(&program)
        };
        let fleet = at(best.rate * 0.999).unwrap_or_else(|error| panic!("seed {seed}: {error}, {best:?}"));
        assert!(fleet.counts[1] + fleet.counts[2] <= case.local, "seed {seed}: {fleet:?}");
        assert_eq!(at(best.rate * 1.05), Err(Unplanned::TooLittle), "seed {seed}: {best:?}");
    }
}

#[test]
fn a_program_without_an_answer_says_why() {
    let mut program = melange(Some(2));
    program.placings.retain(|placing| placing.class != 2);
    let unserved = Unplanned::Unserved { class: "bucket".into(), stage: WorkStage::Prefill };
    assert_eq!(solve(&program), Err(unserved));
    let mut program = melange(None);
    program.rentables.iter_mut().for_each(|rentable| rentable.most = 1);
    program.classes[0].rate = 60.0;
    assert_eq!(solve(&program), Err(Unplanned::TooLittle));
    let mut program = melange(None);
    program.placings[3].on = 7;
    assert!(matches!(solve(&program), Err(Unplanned::Invalid(why)) if why.contains("bucket")));
    program.placings[3].on = 0;
    program.classes[1].rate = f64::NAN;
    assert!(matches!(solve(&program), Err(Unplanned::Invalid(_))));
    assert!(matches!(solve(&melange(Some(0))), Err(Unplanned::Invalid(_))));
}

/// A search that may not branch still gives a fleet that carries the load, and says that it is not proven;
/// the same limits give the same fleet.
#[test]
fn however_small_the_load_one_instance_is_rented() {
    for rate in [1e-9, 1e-6, 1e-3, 0.1] {
        let mut program = melange(None);
        program.classes.iter_mut().for_each(|class| class.rate = rate);
        let fleet = solve(&program).unwrap();
        assert_eq!(fleet.counts.iter().sum::<u32>(), 1, "{rate}: {fleet:?}");
        assert!(fleet.lower_bound <= fleet.usd_per_hour, "{rate}: {fleet:?}");
    }
}

#[test]
fn a_limit_of_nodes_gives_a_whole_fleet_and_always_the_same() {
    let mut random = Stream::new(3);
    let mut program = Program::default();
    for on in 0..8 {
        program.rentables.push(rentable(&format!("kind {on}"), 0.5 + 3.0 * random.next_unit(), 50));
    }
    for at in 0..12 {
        program.classes.push(class(&format!("class {at}"), 0.5 + random.next_unit(), Duty::Whole));
        program.placings.extend((0..8).map(|on| placing(on, at, Duty::Whole, 0.1 + random.next_unit())));
    }
    let search = Search { nodes_max: 0, gap: 0.0 };
    let first = program.solve(&Microlp, search).unwrap();
    let best = solve(&program).unwrap();
    assert!(!first.proven && best.proven, "{first:?}");
    assert!(first.usd_per_hour >= best.usd_per_hour && best.usd_per_hour >= best.lower_bound);
    for (on, count) in first.counts.iter().enumerate() {
        let own = program.placings.iter().zip(&first.shares).filter(|(placing, _)| placing.on == on);
        let load: f64 =
            own.map(|(placing, share)| placing.instances * share * program.classes[placing.class].rate).sum();
        assert!(load <= f64::from(*count) + 1e-6, "{on}: {load} on {count}");
    }
    let few = Search { nodes_max: 20, gap: 0.0 };
    assert_eq!(program.solve(&Microlp, few), program.solve(&Microlp, few));
    // in slices there is nowhere to start from
    let sliced = Program { slices: Some(7), ..program };
    match sliced.solve(&Microlp, search) {
        Ok(fleet) => assert!(!fleet.proven, "{fleet:?}"),
        Err(error) => assert_eq!(error, Unplanned::Solver(Unsolved::Interrupted)),
    }
}

#[test]
fn spares_are_added_to_each_kind_in_use_and_may_make_one_kind_cheaper_than_two() {
    let with = |spares: [u32; 2]| {
        let mut program = melange(None);
        program.rentables.iter_mut().zip(spares).for_each(|(kind, spares)| kind.spares = spares);
        program
    };
    let fleet = solve(&with([1, 1])).unwrap();
    // 1.125 A100 and a spare are 3 for $11.01; one of each and a spare of each are $9.36
    assert_eq!((fleet.counts.clone(), to_u32(fleet.usd_per_hour.0 * 100.0)), (vec![2, 2], 936), "{fleet:?}");
    // 12 A10G and 4 spares, against 1 + 4 of each at $23.40
    let fleet = solve(&with([4, 4])).unwrap();
    assert_eq!((fleet.counts, (fleet.usd_per_hour.0 * 100.0).round() as u32), (vec![16, 0], 1616));
    // where A10G alone need them, A100 alone are cheaper
    assert_eq!(solve(&with([40, 0])).unwrap().counts, [0, 2]);
}

#[test]
fn a_priced_link_is_used_only_where_it_pays() {
    // prompts cost $1 an instance here and $0.5 behind a link that takes a GB/s of each request per second
    let at = |price: f64, most: f64| {
        let mut program = Program {
            rentables: vec![
                rentable("here", 1.0, 100),
                rentable("there", 0.5, 100),
                rentable("decode", 1.0, 100),
            ],
            classes: vec![class("all", 10.0, Duty::Whole)],
            ceilings: vec![Ceiling { name: "link".into(), most, usd_per_hour: UsdPerHour(price) }],
            placings: vec![
                placing(0, 0, Duty::Prefill, 1.0),
                placing(1, 0, Duty::Prefill, 1.0),
                placing(2, 0, Duty::Decode, 1.0),
            ],
            ..Program::default()
        };
        program.placings[1].takes = vec![(0, 1e9)];
        solve(&program).unwrap().counts
    };
    assert_eq!(at(0.4e-9, 1e12), [0, 10, 10]);
    assert_eq!(at(0.6e-9, 1e12), [10, 0, 10]);
    assert_eq!(at(0.4e-9, 4e9), [6, 4, 10]);
}
