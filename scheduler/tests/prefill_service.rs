//! Compares the closed form of two clusters with a published case study, where the file that restates it is
//! available.

use crate::two_clusters::{DividedPrompts, LengthShare, RemotePrefill};
use mixfleet_hal::units::{Bytes, BytesPerSecond, MIB, Seconds};
use std::path::Path;

fn near(got: f64, published: f64, tolerance: f64) -> bool {
    (got / published - 1.0).abs() <= tolerance
}

/// The lines of a file of shared data, without its remarks.
fn lines(file: &str) -> Option<Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured").join(file);
    let Ok(text) = std::fs::read_to_string(path) else {
        eprintln!("SKIPPED: ../shared/data/measured/{file} is absent; nothing compared");
        return None;
    };
    Some(text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect())
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
