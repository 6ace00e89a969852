//! The published tables of kernel times as measured points.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use mixfleet_hal::catalog::{LawKind, MeasuredLaw, Part};
use mixfleet_hal::profile::{DeviceProfile, Point, Predictor, distil};
use mixfleet_hal::random;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, OpSig};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Samples of one device by operation, and the operations in order of their appearance.
type Samples = (Vec<OpSig>, HashMap<OpSig, Vec<f64>>);

/// Medians by device and operation, in order of the operations' first appearance.
pub(crate) type Measured = BTreeMap<String, Vec<Point>>;

pub(crate) type Line = HashMap<String, String>;

/// The rows of a measured table as columns by name, or `None`, said aloud, where the data is absent.
fn lines(name: &str) -> Option<Vec<Line>> {
    let lines =
        lines_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured").join(name));
    if lines.is_none() {
        println!("SKIPPED: no ../shared/data/measured/{name}");
    }
    lines
}

/// The rows of a table, if there is such a file.
pub(crate) fn lines_of(path: &Path) -> Option<Vec<Line>> {
    let text = std::fs::read_to_string(path).ok()?;
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

/// The tables' name of a dtype.
fn called(dtype: DType) -> &'static str {
    if dtype == DType::F8E4m3 { "fp8" } else { "bfloat16" }
}

fn sig(kind: LawKind, dtype: DType, shape: &[u32]) -> OpSig {
    kind.sig(dtype, shape).expect("a shape of its kind")
}

/// Products of inputs and weights in `dtype`.
pub(crate) fn gemms_in(dtype: DType) -> Option<Measured> {
    Some(gemms_of(lines("gemm.csv")?, dtype))
}

pub(crate) fn gemms_of(mut rows: Vec<Line>, dtype: DType) -> Measured {
    rows.retain(|row| row["gemm_dtype"] == called(dtype));
    collect(&rows, |row| sig(LawKind::Gemm, dtype, &["m", "n", "k"].map(|name| number(row, name))))
}

const ATTENTION: [&str; 4] = ["batch_size", "seq", "num_heads", "nkv"];

/// Attention of one new token over keys in `dtype`.
pub(crate) fn decodes_over(dtype: DType) -> Option<Measured> {
    Some(decodes_of(lines("decode_attention.csv")?, dtype))
}

pub(crate) fn decodes_of(mut rows: Vec<Line>, dtype: DType) -> Measured {
    rows.retain(|row| row["kv_cache_dtype"] == called(dtype));
    collect(&rows, |row| sig(LawKind::AttnDecode, dtype, &ATTENTION.map(|name| number(row, name))))
}

/// Attention of whole prompts.
pub(crate) fn prefills() -> Option<Measured> {
    Some(prefills_of(&lines("context_attention.csv")?))
}

pub(crate) fn prefills_of(rows: &[Line]) -> Measured {
    collect(rows, |row| {
        let [sequences, tokens, heads, kv_heads] = ATTENTION.map(|name| number(row, name));
        sig(LawKind::AttnPrefill, DType::Bf16, &[sequences, tokens, 0, heads, kv_heads])
    })
}

/// The rows of an RTX 4090's engine profile (Llama-3.1-8B, one device) as products, decode attention and
/// prefill attention.
fn rtx_4090() -> Option<[Vec<Point>; 3]> {
    let of = |name: &str| lines(&format!("rtx4090-llama-3.1-8b/{name}.csv"));
    let point = |kind: LawKind, shape: &[u32], row: &Line| {
        let time = Seconds(row["time_us"].parse::<f64>().expect("microseconds") * 1e-6);
        Point { sig: sig(kind, DType::Bf16, shape), time }
    };
    let weight = |layer: &str| match layer {
        "qkv_proj" => Some((6144, 4096)),
        "o_proj" => Some((4096, 4096)),
        "gate_up_proj" => Some((28672, 4096)),
        "down_proj" => Some((4096, 14336)),
        "lm_head" => Some((128_256, 4096)),
        _ => None,
    };
    let gemms = |rows: &[Line], size: &str| -> Vec<Point> {
        let gemm = |row: &Line| {
            let (n, k) = weight(&row["layer"])?;
            Some(point(LawKind::Gemm, &[number(row, size), n, k], row))
        };
        rows.iter().filter_map(gemm).collect()
    };
    let products = [gemms(&of("dense")?, "tokens"), gemms(&of("per_sequence")?, "sequences")].concat();
    let (mut decodes, mut prefills) = (Vec::new(), Vec::new());
    for row in &of("attention")? {
        let [tokens, past, sequences, context] =
            ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"].map(|name| number(row, name));
        match (tokens, sequences) {
            (0, 0) => {}
            (0, _) => decodes.push(point(LawKind::AttnDecode, &[sequences, context, 32, 8], row)),
            (_, 0) => prefills.push(point(LawKind::AttnPrefill, &[1, tokens, past, 32, 8], row)),
            _ => {}
        }
    }
    Some([products, decodes, prefills])
}

/// One published table of a part.
pub(crate) struct Table {
    pub(crate) kind: LawKind,
    pub(crate) dtype: DType,
    engine: &'static str,
    source: &'static str,
    pub(crate) points: Vec<Point>,
}

/// The tables' names of parts, and the catalog's.
pub(crate) const PARTS: [(&str, &str); 5] = [
    ("a100_sxm", "A100-SXM-80GB"),
    ("h100_sxm", "H100-SXM-80GB"),
    ("h200_sxm", "H200-SXM-141GB"),
    ("l40s", "L40S"),
    ("rtx_pro_6000_server", "RTX-PRO-6000-SE"),
];

/// All tables by the catalog's id of the part.
pub(crate) fn by_part() -> Option<Vec<(&'static str, Vec<Table>)>> {
    let (wide, narrow) = (DType::Bf16, DType::F8E4m3);
    let mut kinds = [
        (LawKind::Gemm, wide, gemms_in(wide)?),
        (LawKind::Gemm, narrow, gemms_in(narrow)?),
        (LawKind::AttnDecode, wide, decodes_over(wide)?),
        (LawKind::AttnDecode, narrow, decodes_over(narrow)?),
        (LawKind::AttnPrefill, wide, prefills()?),
    ];
    let source = "ai-dynamo/aiconfigurator kernel tables, Apache-2.0";
    let of = |(device, id): (&'static str, &'static str)| {
        let engine = if device == "a100_sxm" { "vllm/0.14.0" } else { "vllm/0.24.0" };
        let tables = kinds.iter_mut().filter_map(|(kind, dtype, measured)| {
            let points = measured.remove(device)?;
            Some(Table { kind: *kind, dtype: *dtype, engine, source, points })
        });
        (id, tables.collect())
    };
    let mut parts: Vec<(&str, Vec<Table>)> = PARTS.into_iter().map(of).collect();
    let source = "casys-kaist/LLMServingSim engine profile of Llama-3.1-8B, MIT";
    let table = |(kind, points)| Table { kind, dtype: wide, engine: "vllm/0.19.0", source, points };
    parts.push(("RTX-4090", LawKind::ALL.into_iter().zip(rtx_4090()?).map(table).collect()));
    Some(parts)
}

/// Mean of |predicted / measured - 1|.
pub(crate) fn error<'a>(predictor: &Predictor, points: impl IntoIterator<Item = &'a Point>) -> f64 {
    let off = |point: &Point| (predictor.time(&point.sig) / point.time - 1.0).abs();
    let (count, sum) = points.into_iter().fold((0.0, 0.0), |(n, sum), point| (n + 1.0, sum + off(point)));
    sum / count
}

/// Points of a law.
const POINTS_MAX: usize = 40;
/// Seed by which a quarter of a table is kept from the choice.
const SEED: u64 = 20_261_123;

/// The rows of a table that the choice of points may look at, and the others.
pub(crate) fn seen_and_unseen(points: &[Point]) -> (Vec<Point>, Vec<Point>) {
    let mut index = 0;
    points.iter().cloned().partition(|_| {
        index += 1;
        !random::bits(SEED, index).is_multiple_of(4)
    })
}

/// The law of a table: the points that predict it best, and how far they are off.
pub(crate) fn law_of(part: &Part, table: &Table) -> MeasuredLaw {
    let (seen, unseen) = seen_and_unseen(&table.points);
    let mut points = distil(&part.profile(), &seen, POINTS_MAX);
    points.sort_by(|a, b| a.sig.bytes().total_cmp(&b.sig.bytes()).then(a.time.0.total_cmp(&b.time.0)));
    let law = MeasuredLaw {
        kind: table.kind,
        dtype: table.dtype,
        engine: table.engine.to_owned(),
        source: table.source.to_owned(),
        rows: table.points.len(),
        error: 0.0,
        error_unseen: 0.0,
        points,
    };
    // the text states the measured value
    let [mut law] = MeasuredLaw::parse(&law.to_string()).expect("a law").try_into().expect("one law");
    let predictor = Predictor::new(&DeviceProfile { points: law.points.clone(), ..part.profile() });
    (law.error, law.error_unseen) = (error(&predictor, &table.points), error(&predictor, &unseen));
    law
}
