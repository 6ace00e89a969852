//! The kernel tables of ai-dynamo/aiconfigurator: a file per kind of operation, CSV (`gemm_perf.txt`) or
//! Parquet (`gemm_perf.parquet`), times in milliseconds. The columns are those of its collectors:
//!
//! - products: `gemm_dtype, m, n, k, latency`;
//! - attention: `batch_size, isl, num_heads, num_key_value_heads, head_dim, step, attn_dtype,
//!   kv_cache_dtype, latency`; a decoding sequence has `isl + step` keys, a prompt `isl` tokens after `step`.
//!
//! Extracts with the columns `seq` for keys or tokens and `nkv` for KV heads are read too. What a device
//! profile cannot hold is counted by its reason.

use super::table::{Row, Table};
use mixfleet_hal::catalog::LawKind;
use mixfleet_hal::profile::Point;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, OpSig};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// All tables below a path.
#[derive(Debug, Default)]
pub struct KernelTables {
    /// By device and engine, in the order of their names.
    pub sets: Vec<TableSet>,
    /// Number of rows that were left out, by reason.
    pub left_out: BTreeMap<String, u64>,
    /// Names of files that are no tables of products or attention.
    pub not_read: Vec<String>,
}

/// The tables of one device and engine.
#[derive(Debug)]
pub struct TableSet {
    /// The device, as the tables name it.
    pub device: String,
    /// The engine with its version, as `vllm/0.24.0`.
    pub engine: String,
    /// Number of rows.
    pub rows: u64,
    /// Median times by operation, in the order of their first appearance.
    pub points: Vec<Point>,
}

/// Which of several devices, engines and dtypes to take; `None` takes the only one, or all dtypes.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableChoice<'a> {
    /// The device, as the tables name it.
    pub device: Option<&'a str>,
    /// The engine, with or without its version.
    pub engine: Option<&'a str>,
    /// Dtype of weights or keys.
    pub dtype: Option<DType>,
}

/// Samples by operation, and the operations in the order of their first appearance.
#[derive(Default)]
struct Samples {
    rows: u64,
    order: Vec<OpSig>,
    of: HashMap<OpSig, Vec<f64>>,
}

impl Samples {
    fn add(&mut self, sig: OpSig, seconds: f64) {
        self.rows += 1;
        let samples = self.of.entry(sig).or_default();
        if samples.is_empty() {
            self.order.push(sig);
        }
        samples.push(seconds);
    }

    fn set(mut self, (device, engine): (String, String)) -> TableSet {
        let median = |sig: OpSig| {
            let samples = self.of.get_mut(&sig)?;
            samples.sort_by(f64::total_cmp);
            Some(Point { sig, time: Seconds(samples[samples.len() / 2]) })
        };
        TableSet {
            device,
            engine,
            rows: self.rows,
            points: self.order.into_iter().filter_map(median).collect(),
        }
    }
}

impl KernelTables {
    /// Reads the table at `path`, or all tables in and below that directory.
    ///
    /// # Errors
    /// A message about the file that cannot be read, or that there is none.
    pub fn read(path: &Path) -> Result<Self, String> {
        let mut files = Vec::new();
        find(path, &mut files)?;
        if files.is_empty() {
            return Err(format!("{}: no table (*.parquet, *.csv, *.txt) in or below it", path.display()));
        }
        let mut tables = KernelTables::default();
        let mut sets: BTreeMap<(String, String), Samples> = BTreeMap::new();
        for file in &files {
            let table = Table::read(file)?;
            let Some(kind) = kind(&table, file) else {
                tables.not_read.push(file.file_name().unwrap_or_default().display().to_string());
                continue;
            };
            for row in table.rows() {
                match sig(kind, &row)? {
                    Ok(sig) => {
                        sets.entry(origin(&row)).or_default().add(sig, row.positive("latency")? * 1e-3)
                    }
                    Err(why) => {
                        *tables.left_out.entry(format!("{} rows with {why}", kind.name())).or_default() += 1
                    }
                }
            }
        }
        tables.sets = sets.into_iter().map(|(origin, samples)| samples.set(origin)).collect();
        if tables.sets.is_empty() {
            let rows = tables.left_out.keys().map(String::as_str);
            let why: Vec<&str> = rows.chain(tables.not_read.iter().map(String::as_str)).collect();
            let why = why.join(", ");
            return Err(format!("{}: no rows of products or attention, but {why}", path.display()));
        }
        Ok(tables)
    }

    /// The tables of one device and engine, of the given dtype alone if one is given.
    ///
    /// # Errors
    /// A message that lists what there is, if the choice leaves none or several.
    pub fn choose(&mut self, choice: TableChoice) -> Result<TableSet, String> {
        let same =
            |wanted: Option<&str>, name: &str| wanted.is_none_or(|wanted| wanted.eq_ignore_ascii_case(name));
        let of_engine = |name: &str| {
            let without = name.split_once('/').map_or(name, |(engine, _)| engine);
            same(choice.engine, name) || same(choice.engine, without)
        };
        let fits = |set: &TableSet| same(choice.device, &set.device) && of_engine(&set.engine);
        let fitting: Vec<usize> = (0..self.sets.len()).filter(|at| fits(&self.sets[*at])).collect();
        let [only] = fitting[..] else {
            let names =
                self.sets.iter().map(|set| format!("--device '{}' --engine '{}'", set.device, set.engine));
            let (names, count) = (names.collect::<Vec<_>>().join("\n  "), fitting.len());
            return Err(format!("{count} tables fit; choose one of\n  {names}"));
        };
        let mut set = self.sets.swap_remove(only);
        if let Some(dtype) = choice.dtype {
            set.points.retain(|point| dtype_of(&point.sig) == dtype);
            if set.points.is_empty() {
                return Err(format!("the tables of {} have no rows in {dtype}", set.device));
            }
        }
        Ok(set)
    }
}

/// Dtype of an operation's weights or keys.
pub(super) fn dtype_of(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Gemm { weight, .. } => weight,
        ref other => other.kv().map_or(DType::F32, |kv| kv.dtype),
    }
}

/// The table files in and below `path`, in order.
fn find(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let failed = |cause: std::io::Error| format!("{}: {cause}", path.display());
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = std::fs::read_dir(path).map_err(failed)?;
    let mut entries: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(failed)?;
    entries.sort();
    for entry in entries {
        let end = entry.extension().and_then(|end| end.to_str()).unwrap_or_default().to_ascii_lowercase();
        if entry.is_dir() || ["parquet", "csv", "txt"].contains(&end.as_str()) {
            find(&entry, files)?;
        }
    }
    Ok(())
}

/// What a table is of: its columns tell products, and `op_name` or the file's name tells attention.
fn kind(table: &Table, file: &Path) -> Option<LawKind> {
    if table.has(&["gemm_dtype", "m", "n", "k", "latency"]) {
        return Some(LawKind::Gemm);
    }
    let tokens = table.has(&["isl"]) || table.has(&["seq"]);
    if !tokens || !table.has(&["batch_size", "num_heads", "latency"]) {
        return None;
    }
    let name = table.rows().next().and_then(|row| row.text(&["op_name"]));
    let name = name.or(file.file_name().and_then(|name| name.to_str())).unwrap_or_default();
    match name {
        _ if ["mla", "dsa", "encoder"].iter().any(|other| name.contains(other)) => None,
        _ if name.contains("generation") || name.contains("decode") => Some(LawKind::AttnDecode),
        _ if name.contains("context") || name.contains("prefill") => Some(LawKind::AttnPrefill),
        _ => None,
    }
}

/// The device and the engine of a row; empty where the table does not say.
fn origin(row: &Row) -> (String, String) {
    let device = row.text(&["device"]).unwrap_or_default().to_owned();
    let engine = match (row.text(&["engine"]), row.text(&["framework"]), row.text(&["version"])) {
        (Some(engine), ..) => engine.to_owned(),
        (None, Some(framework), version) => {
            format!("{}/{}", framework.to_ascii_lowercase(), version.unwrap_or("unknown"))
        }
        (None, None, _) => String::new(),
    };
    (device, engine)
}

/// The operation of a row, or why a device profile cannot hold it.
///
/// # Errors
/// A message about a cell that is not understood.
fn sig(kind: LawKind, row: &Row) -> Result<Result<OpSig, String>, String> {
    let dtype = |column: &str| match row.text(&[column]) {
        None | Some("bfloat16") => Ok(DType::Bf16),
        Some("float16" | "half") => Ok(DType::F16),
        Some("fp8") => Ok(DType::F8E4m3),
        Some(other) => Err(format!("{column} {other}")),
    };
    if kind == LawKind::Gemm {
        let shape = [row.number(&["m"])?, row.number(&["n"])?, row.number(&["k"])?];
        return Ok(dtype("gemm_dtype").and_then(|dtype| made(kind, dtype, &shape)));
    }
    let more = |columns: &[&str], usual: u32| match row.text(columns) {
        None => Ok(usual),
        Some(_) => row.number(columns),
    };
    let (sequences, each, step) =
        (row.number(&["batch_size"])?, row.number(&["isl", "seq"])?, more(&["step"], 0)?);
    let (heads, kv_heads) = (row.number(&["num_heads"])?, row.number(&["num_key_value_heads", "nkv"])?);
    let (head_dim, beams, window) =
        (more(&["head_dim"], 128)?, more(&["beam_width"], 1)?, more(&["window_size"], 0)?);
    let keys = each.saturating_add(step);
    Ok((|| {
        if beams > 1 {
            return Err(format!("beam_width {beams}"));
        }
        if window > 0 && window < keys {
            return Err("a sliding window".into());
        }
        let (x, kv_dtype) = (dtype("attn_dtype")?, dtype("kv_cache_dtype")?);
        let shape = match kind {
            LawKind::AttnDecode => vec![sequences, keys, heads, kv_heads],
            _ => vec![sequences, each, step, heads, kv_heads],
        };
        let mut sig = made(kind, kv_dtype, &shape)?;
        if let OpSig::AttnDecode { x: query, kv, .. } | OpSig::AttnPrefill { x: query, kv, .. } = &mut sig {
            (*query, kv.head_dim) = (x, head_dim);
        }
        Ok(sig)
    })())
}

/// The operation of this shape, checked.
fn made(kind: LawKind, dtype: DType, shape: &[u32]) -> Result<OpSig, String> {
    let mut sig = kind.sig(dtype, shape).ok_or("a shape that is too large")?;
    if let OpSig::Gemm { out, .. } = &mut sig {
        *out = if dtype == DType::F8E4m3 { DType::Bf16 } else { dtype };
    }
    let none =
        shape.iter().enumerate().any(|(at, size)| *size == 0 && !(kind == LawKind::AttnPrefill && at == 2));
    if none { Err("a size of 0".into()) } else { sig.check().map(|()| sig) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(name: &str, files: &[(&str, &str)]) -> Result<KernelTables, String> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/tmp/import").join(name);
        let _ = std::fs::remove_dir_all(&directory);
        for (file, text) in files {
            let path = directory.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        KernelTables::read(&directory)
    }

    const GEMM: &str = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n\
        VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch,bfloat16,16,4096,4096,0.02\n\
        VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch,bfloat16,16,4096,4096,0.04\n\
        VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch,bfloat16,16,4096,4096,0.03\n\
        VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch,fp8_block,16,4096,4096,0.01\n\
        VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch,fp8,16,4096,4096,0.01\n";
    const ATTENTION: &str = "framework,version,device,op_name,kernel_source,batch_size,isl,num_heads,\
        num_key_value_heads,head_dim,beam_width,attn_dtype,kv_cache_dtype,step,latency\n";
    const H100: &str = "VLLM,0.24.0,NVIDIA H100 80GB HBM3";

    #[test]
    fn the_tables_of_collectors_become_points_with_medians() {
        let decode = format!(
            "{ATTENTION}{H100},generation_attention,flash,4,1,32,8,64,1,bfloat16,fp8,1023,0.05\n\
             {H100},generation_attention,flash,4,1,32,8,64,2,bfloat16,fp8,1023,0.05\n"
        );
        let context =
            format!("{ATTENTION}{H100},context_attention,flash,2,512,32,8,128,1,bfloat16,bfloat16,0,0.1\n");
        let mla =
            format!("{ATTENTION}{H100},generation_mla,flash,2,512,32,8,128,1,bfloat16,bfloat16,0,0.1\n");
        let nccl = "nccl_dtype,num_gpus,message_size,op_name,latency\nhalf,2,256,all_reduce,0.005\n";
        let mut read = tables(
            "collected",
            &[
                ("gemm/gemm_perf.txt", GEMM),
                ("generation_attention_perf.txt", &decode),
                ("context_attention_perf.txt", &context),
                ("mla.txt", &mla),
                ("nccl_perf.txt", nccl),
                ("notes.md", "not read"),
            ],
        )
        .unwrap();
        let reasons: Vec<&str> = read.left_out.keys().map(String::as_str).collect();
        assert_eq!(reasons, ["attn_decode rows with beam_width 2", "gemm rows with gemm_dtype fp8_block",]);
        assert_eq!(read.not_read, ["mla.txt", "nccl_perf.txt"]);
        let set = read.choose(TableChoice { engine: Some("VLLM"), ..TableChoice::default() }).unwrap();
        assert_eq!((set.device.as_str(), set.engine.as_str()), ("NVIDIA H100 80GB HBM3", "vllm/0.24.0"));
        assert_eq!((set.points.len(), set.rows), (4, 6));
        let gemm =
            set.points.iter().find(|point| dtype_of(&point.sig) == DType::Bf16 && point.sig.name() == "gemm");
        assert_eq!(gemm.unwrap().time, Seconds(0.03 * 1e-3));
        let decode = set.points.iter().find(|point| point.sig.name() == "attn_decode").unwrap();
        let OpSig::AttnDecode { sequences, kv_tokens, heads, x, kv, .. } = decode.sig else { panic!() };
        assert_eq!((sequences, kv_tokens, heads, x), (4, 4 * 1024, 32, DType::Bf16));
        assert_eq!((kv.kv_heads, kv.head_dim, kv.dtype), (8, 64, DType::F8E4m3));
        let prefill = set.points.iter().find(|point| point.sig.name() == "attn_prefill").unwrap();
        let OpSig::AttnPrefill { tokens, pairs, kv_tokens, .. } = prefill.sig else { panic!() };
        assert_eq!((tokens, pairs, kv_tokens), (1024, 2 * 512 * 513 / 2, 1024));
    }

    #[test]
    fn several_devices_are_listed_and_one_is_chosen() {
        let two = format!("{GEMM}SGLang,0.5,NVIDIA L40S,gemm,torch,bfloat16,1,8,8,0.01\n");
        let read = || tables("several", &[("gemm_perf.txt", &two)]).unwrap();
        let error = read().choose(TableChoice::default()).unwrap_err();
        assert!(
            error.contains("2 tables fit") && error.contains("--device 'NVIDIA L40S' --engine 'sglang/0.5'")
        );
        let l40s = TableChoice { device: Some("nvidia l40s"), ..TableChoice::default() };
        assert_eq!(read().choose(l40s).unwrap().points.len(), 1);
        let fp8 = TableChoice { dtype: Some(DType::F8E4m3), ..l40s };
        assert!(read().choose(fp8).unwrap_err().contains("no rows in f8e4m3"));
        assert!(
            read().choose(TableChoice { device: Some("L4"), ..l40s }).unwrap_err().contains("0 tables fit")
        );
    }

    #[test]
    fn a_wrong_cell_and_an_empty_directory_are_errors() {
        let wrong = GEMM.replace("4096,0.02", "-1,0.02");
        assert!(tables("wrong", &[("gemm_perf.txt", &wrong)]).unwrap_err().contains("row 1: k is '-1'"));
        let slow = GEMM.replace(",0.02", ",nan");
        assert!(tables("wrong", &[("gemm_perf.txt", &slow)]).unwrap_err().contains("latency is 'nan'"));
        assert!(tables("empty", &[("notes.md", "")]).unwrap_err().contains("no table"));
        assert!(tables("other", &[("moe_perf.txt", "a,b\n1,2\n")]).unwrap_err().contains("but moe_perf.txt"));
    }
}
