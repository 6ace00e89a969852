//! Published kernel times (vLLM on five GPUs, collected by ai-dynamo/aiconfigurator) as measured points.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use mixfleet_hal::catalog;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, KvShape, OpSig};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Samples of one device by operation, and the operations in order of their appearance.
type Samples = (Vec<OpSig>, HashMap<OpSig, Vec<f64>>);

/// Medians by device and operation, in order of the operations' first appearance.
pub(crate) type Measured = BTreeMap<String, Vec<Point>>;

type Line = HashMap<String, String>;

/// The rows of a measured table as columns by name, or `None`, said aloud, where the data is absent.
fn lines(name: &str) -> Option<Vec<Line>> {
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

fn number(row: &Line, column: &str) -> u32 {
    row[column].parse().unwrap_or_else(|_| panic!("{column}: {} is not a number", row[column]))
}

fn collect(rows: &[Line], sig: impl Fn(&Line) -> OpSig) -> Measured {
    let mut times: BTreeMap<String, Samples> = BTreeMap::new();
    for row in rows {
        let (order, of) = times.entry(row["device"].clone()).or_default();
        let sig = sig(row);
        let samples = of.entry(sig).or_default();
        if samples.is_empty() {
            order.push(sig);
        }
        samples.push(row["latency"].parse::<f64>().expect("milliseconds") * 1e-3);
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

/// Products in bf16.
pub(crate) fn gemms() -> Option<Measured> {
    let mut rows = lines("gemm.csv")?;
    rows.retain(|row| row["gemm_dtype"] == "bfloat16");
    Some(collect(&rows, |row| {
        let [m, n, k] = ["m", "n", "k"].map(|name| number(row, name));
        let (x, weight, out) = (DType::Bf16, DType::Bf16, DType::Bf16);
        OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }
    }))
}

/// Attention of one new token over keys in bf16.
pub(crate) fn decodes() -> Option<Measured> {
    let mut rows = lines("decode_attention.csv")?;
    rows.retain(|row| row["kv_cache_dtype"] == "bfloat16");
    Some(collect(&rows, |row| {
        let [sequences, context, heads, kv_heads] =
            ["batch_size", "seq", "num_heads", "nkv"].map(|name| number(row, name));
        OpSig::AttnDecode {
            sequences,
            kv_tokens: u64::from(sequences) * u64::from(context),
            heads,
            pages_max: context.div_ceil(16),
            x: DType::Bf16,
            kv: KvShape { kv_heads, head_dim: 128, page_tokens: 16, dtype: DType::Bf16 },
        }
    }))
}

/// Attention of whole prompts.
pub(crate) fn prefills() -> Option<Measured> {
    Some(collect(&lines("context_attention.csv")?, |row| {
        let [sequences, context, heads, kv_heads] =
            ["batch_size", "seq", "num_heads", "nkv"].map(|name| number(row, name));
        let tokens = sequences * context;
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs: u64::from(tokens) * (u64::from(context) + 1) / 2,
            kv_tokens: u64::from(tokens),
            heads,
            pages_max: context.div_ceil(16),
            window: None,
            x: DType::Bf16,
            kv: KvShape { kv_heads, head_dim: 128, page_tokens: 16, dtype: DType::Bf16 },
        }
    }))
}

/// A profile of `points`, with the best rates among them as its roofline.
pub(crate) fn profile(points: Vec<Point>) -> DeviceProfile {
    let best = |amount: fn(&OpSig) -> f64| {
        points.iter().map(|point| amount(&point.sig) / point.time.0).fold(0.0, f64::max)
    };
    let compute = vec![(DType::Bf16, FlopPerSecond(best(OpSig::flops)))];
    let roof = DeviceProfile::roof(compute, BytesPerSecond(best(OpSig::bytes)), Bytes(80e9));
    DeviceProfile { points, ..roof }
}

/// The datasheet of a device in these tables.
pub(crate) fn datasheet(device: &str) -> DeviceProfile {
    let id = match device {
        "a100_sxm" => "A100-SXM-80GB",
        "h100_sxm" => "H100-SXM-80GB",
        "h200_sxm" => "H200-SXM-141GB",
        "l40s" => "L40S",
        "rtx_pro_6000_server" => "RTX-PRO-6000-SE",
        other => panic!("{other} has no entry in the catalog"),
    };
    catalog::part(id).expect("a known part").profile()
}

/// The two sizes that a model decides: columns and depth of a weight, or query heads and KV heads.
pub(crate) fn model_shape(sig: &OpSig) -> (u32, u32) {
    match *sig {
        OpSig::Gemm { n, k, .. } => (n, k),
        OpSig::AttnDecode { heads, kv: KvShape { kv_heads, .. }, .. }
        | OpSig::AttnPrefill { heads, kv: KvShape { kv_heads, .. }, .. } => (heads, kv_heads),
        _ => panic!("{} is not in the tables", sig.name()),
    }
}

/// Rows of a product, sequences of attention.
pub(crate) fn batch(sig: &OpSig) -> u32 {
    match *sig {
        OpSig::Gemm { m, .. } => m,
        OpSig::AttnDecode { sequences, .. } | OpSig::AttnPrefill { sequences, .. } => sequences,
        _ => panic!("{} is not in the tables", sig.name()),
    }
}

/// Keys of each sequence; 0 for products.
pub(crate) fn context(sig: &OpSig) -> u64 {
    match *sig {
        OpSig::AttnDecode { sequences, kv_tokens, .. } | OpSig::AttnPrefill { sequences, kv_tokens, .. } => {
            kv_tokens / u64::from(sequences)
        }
        _ => 0,
    }
}
