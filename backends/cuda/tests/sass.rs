//! Compares the machine code of the kernels that serve models with a table.
//!
//! For each architecture: instructions of the inner loop, accesses that do not know their address space,
//! registers, spills, shared memory. Needs no GPU, but libnvrtc and nvdisasm (`MIXFLEET_NVDISASM` names it).

use crate::emulated::formats;
use crate::nvrtc::{ARCHITECTURES, in_parallel, launches};
use mixfleet_cuda::Library;
use mixfleet_cuda::compile::{Architecture, compile, resources};
use mixfleet_cuda::kernels::DEVICE;
use mixfleet_cuda::plan::{KV_PAGE_TOKENS, KernelLaunch};
use mixfleet_hal::{DType, GroupedRows, KvShape, MatrixKind, OpSig, Quantised, Scalar};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

const TABLE: &str = include_str!("sass.tsv");
/// Of a table's number, how much more is no worse.
const SLACK: f64 = 1.1;
/// Bytes that a thread of a product of few quantised rows may spill.
const SPILLED_MAX_BYTES: usize = 8;

/// What a kernel takes on an architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    /// Instructions of the inner loop: the longest that has no loop in it, with tensor cores if any has. All
    /// of a kernel without loops.
    inner: usize,
    /// Loads and stores whose address space the assembler does not know.
    generic: usize,
    registers: usize,
    spilled: usize,
    shared: usize,
}

impl Taken {
    fn numbers(self) -> [usize; 5] {
        [self.inner, self.generic, self.registers, self.spilled, self.shared]
    }

    fn text(self) -> String {
        self.numbers().map(|number| number.to_string()).join("/")
    }
}

/// The instructions of a kernel in nvdisasm's text, each with its label, if any.
fn instructions<'a>(text: &'a str, kernel: &str) -> (Vec<&'a str>, BTreeMap<&'a str, usize>) {
    let head = format!(".text.{kernel}:");
    let mut own = text.lines().skip_while(|line| line.trim() != head).skip(1);
    let (mut all, mut labels) = (Vec::new(), BTreeMap::new());
    for line in own.by_ref().take_while(|line| !line.starts_with("//---")) {
        let line = line.trim();
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, all.len());
        } else if let Some((_, code)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) {
            all.push(code.split(';').next().unwrap_or_default().trim());
        }
    }
    (all, labels)
}

/// The name of an instruction, without its predicate and what is behind the first dot.
fn name_of(instruction: &str) -> &str {
    let rest = match instruction.strip_prefix('@') {
        Some(rest) => rest.split_once(' ').map_or("", |(_, rest)| rest.trim()),
        None => instruction,
    };
    rest.split([' ', '.']).next().unwrap_or_default()
}

fn inner_loop(all: &[&str], labels: &BTreeMap<&str, usize>) -> usize {
    let backwards = |(at, code): (usize, &&str)| {
        let label = code.split_once("`(").and_then(|(_, rest)| rest.split(')').next())?;
        let first = *labels.get(label)?;
        (name_of(code) == "BRA" && first < at).then_some((first, at))
    };
    let loops: Vec<(usize, usize)> = all.iter().enumerate().filter_map(backwards).collect();
    let has_other =
        |one: &(usize, usize)| loops.iter().any(|other| other != one && other.0 >= one.0 && other.1 <= one.1);
    let multiplies = |one: &(usize, usize)| {
        all[one.0..=one.1].iter().any(|code| ["HMMA", "HGMMA"].contains(&name_of(code)))
    };
    let inner = loops.iter().filter(|one| !has_other(one));
    let longest = inner.map(|one| (multiplies(one), one.1 - one.0 + 1)).max();
    longest.map_or(all.iter().filter(|code| name_of(code) != "NOP").count(), |(_, length)| length)
}

fn disassembled(disassembler: &Path, code: &[u8]) -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.{number}.cubin", std::process::id()));
    std::fs::write(&file, code).unwrap();
    let output = Command::new(disassembler).arg("-c").arg(&file).output().expect("nvdisasm starts");
    let _ = std::fs::remove_file(&file);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn measure(disassembler: &Path, launch: &KernelLaunch, architecture: &str) -> Taken {
    let target = Architecture::Machine(architecture.to_owned());
    let (name, source) = (launch.program.body.name(), launch.program.source(DEVICE));
    let of = resources(name, &source, &target).unwrap_or_else(|log| panic!("{log}"));
    let of = of.into_iter().find(|taken| taken.kernel == launch.kernel).expect("a kernel of the program");
    let code = compile(name, &source, &target).unwrap_or_else(|log| panic!("{log}"));
    let text = disassembled(disassembler, &code);
    let (all, labels) = instructions(&text, launch.kernel);
    assert!(all.len() > 10, "{architecture}: {} is in what nvdisasm says", launch.kernel);
    Taken {
        inner: inner_loop(&all, &labels),
        generic: all.iter().filter(|code| ["LD", "ST", "ATOM"].contains(&name_of(code))).count(),
        registers: of.registers as usize,
        spilled: of.spill_bytes as usize,
        shared: (of.shared_bytes + launch.shared_bytes) as usize,
    }
}

/// What a model in bf16 runs, and products of each format that runs on tensor cores.
fn operations() -> Vec<OpSig> {
    use DType::{Bf16, F8E4m3, F32};
    let mut sigs = Vec::new();
    for weight in formats() {
        for m in [1, 16, 512] {
            let (n, k, x, out) = (14_336, 4096, Bf16, F32);
            sigs.push(OpSig::QuantisedGemm { m, n, k, x, weight, out, bias: false, accumulate: false });
        }
    }
    let kv = |dtype| KvShape { kv_heads: 8, head_dim: 128, page_tokens: KV_PAGE_TOKENS, dtype, latent: None };
    let (sequences, pages_max, kv_tokens, tokens, heads) = (4, 256, 16_000, 64, 32);
    for dtype in [Bf16, F8E4m3] {
        let kv = kv(dtype);
        sigs.push(OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x: Bf16, kv, cap: None });
        sigs.push(OpSig::KvWrite { tokens, x: Bf16, kv });
    }
    for m in [1, 16] {
        let (n, k, x, out) = (14_336, 4096, Bf16, F32);
        sigs.push(OpSig::Gemm { m, n, k, x, weight: x, out, bias: false, accumulate: false });
    }
    let eps = Scalar(1e-5);
    sigs.extend([
        OpSig::RmsNorm { rows: tokens, cols: 4096, eps, x: F32, weight: Bf16, out: Bf16 },
        OpSig::Rope { tokens, heads, head_dim: 128, x: Bf16, part: None },
        OpSig::SiluMul { elements: 64 * 14_336, x: Bf16 },
        OpSig::Combine { tokens, active: 8, cols: 4096, x: F32, accumulate: true },
        OpSig::Sample { rows: 8, cols: 128_256, history: 64, tops: 20 },
        OpSig::AttnMerge { parts: 1, rows: 64, head_dim: 128, sinks: 0, out: Bf16 },
    ]);
    sigs.extend([(64, 64), (4096, 128)].map(|(choices, touched)| {
        let grouped = GroupedRows { choices, fan: 8, experts: 128, touched, others: 0 };
        let weight = MatrixKind::Quantised(Quantised::MXFP4);
        OpSig::GroupedGemm { grouped, n: 768, k: 2048, weight, x: Bf16, out: Bf16, bias: false }
    }));
    sigs
}

/// The table's rows by kernel and variant: what each architecture takes.
fn table(disassembler: &Path) -> BTreeMap<String, Vec<Taken>> {
    let mut wanted = BTreeMap::new();
    for launch in operations().iter().flat_map(launches) {
        let macros = launch.program.macros().replace("#define ", "").replace('\n', ", ");
        let key = format!("{}\t{}\t{}", launch.kernel, macros.trim_end_matches(", "), launch.shared_bytes);
        wanted.entry(key).or_insert(launch);
    }
    let work: Vec<_> = wanted.values().flat_map(|launch| ARCHITECTURES.map(|a| (launch, a))).collect();
    let taken = in_parallel(&work, |(launch, architecture)| measure(disassembler, launch, architecture));
    wanted.into_keys().zip(taken.chunks(ARCHITECTURES.len()).map(<[Taken]>::to_vec)).collect()
}

fn text_of(rows: &BTreeMap<String, Vec<Taken>>) -> String {
    let mut text = format!("kernel\tvariant\tadded\t{}\n", ARCHITECTURES.join("\t"));
    for (key, taken) in rows {
        let cells: Vec<String> = taken.iter().map(|taken| taken.text()).collect();
        writeln!(text, "{key}\t{}", cells.join("\t")).unwrap();
    }
    text
}

/// What is worse than the table says, or not in it.
fn complaints(rows: &BTreeMap<String, Vec<Taken>>, table: &str) -> Vec<String> {
    const NAMES: [&str; 5] = ["inner loop", "generic accesses", "registers", "spilled bytes", "shared bytes"];
    let kept: BTreeMap<String, &str> = table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let cells: Vec<&str> = line.splitn(4, '\t').collect();
            Some((cells.get(..3)?.join("\t"), *cells.get(3)?))
        })
        .collect();
    let mut wrong = Vec::new();
    for (key, taken) in rows {
        let Some(cells) = kept.get(key) else {
            wrong.push(format!("{key}: not in the table"));
            continue;
        };
        for ((taken, cell), architecture) in taken.iter().zip(cells.split('\t')).zip(ARCHITECTURES) {
            let before = cell.split('/').map(|number| number.parse::<usize>().expect("a number"));
            for ((now, before), name) in taken.numbers().into_iter().zip(before).zip(NAMES) {
                if now as f64 > before as f64 * SLACK {
                    wrong.push(format!("{key}: {architecture}: {name}: {now}, and the table has {before}"));
                }
            }
        }
    }
    let gone = kept.keys().filter(|key| !rows.contains_key(*key));
    wrong.extend(gone.map(|key| format!("{key}: in the table, but no kernel")));
    wrong
}

/// Instructions of the inner loop for a weight in products of few rows of each format, at most.
fn of_few_rows(rows: &BTreeMap<String, Vec<Taken>>) -> f64 {
    let mut most: f64 = 0.0;
    for (key, taken) in rows.iter().filter(|(key, _)| key.starts_with("quantised_few_rows\t")) {
        let tiles = if key.contains("ROW_TILES 2") { 2.0 } else { 1.0 };
        for taken in taken {
            assert!(taken.spilled <= SPILLED_MAX_BYTES, "{key}: {} bytes", taken.spilled);
            // a warp takes 128 columns of 16 rows of each tile
            most = most.max(taken.inner as f64 / (tiles * 16.0 * 128.0 / 32.0));
        }
    }
    most
}

/// Nothing that models run takes 10 % more than the table says, or an access that does not know its address
/// space. `MIXFLEET_CUDA_TABLE` names a file to write the table to.
#[test]
fn no_kernel_takes_more_than_the_table_says() {
    let disassembler = std::env::var_os("MIXFLEET_NVDISASM").map(PathBuf::from);
    let Some(disassembler) = disassembler.filter(|_| Library::Nvrtc.is_present()) else {
        eprintln!(
            "SKIPPED: the machine code of kernels is not counted: it needs libnvrtc and, named by \
             MIXFLEET_NVDISASM, nvdisasm of PyPI's nvidia-cuda-nvdisasm"
        );
        return;
    };
    let rows = table(&disassembler);
    if let Some(path) = std::env::var_os("MIXFLEET_CUDA_TABLE") {
        std::fs::write(path, text_of(&rows)).unwrap();
        return;
    }
    let generic = rows.iter().filter(|(_, taken)| taken.iter().any(|taken| taken.generic > 0));
    assert_eq!(generic.map(|row| row.0).collect::<Vec<_>>(), Vec::<&String>::new());
    let wrong = complaints(&rows, TABLE);
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    let most = of_few_rows(&rows);
    eprintln!("{} kernels; at most {most:.1} instructions for a weight of few rows", rows.len());
    assert!(most <= 8.0, "{most}");
}

#[test]
fn what_is_worse_than_the_table_is_told() {
    let of = |inner, spilled| Taken { inner, spilled, registers: 100, ..Taken::default() };
    let row = |inner, spilled| BTreeMap::from([("k\tX bf16\t0".to_owned(), vec![of(inner, spilled); 6])]);
    let table = text_of(&row(100, 0));
    assert_eq!(complaints(&row(110, 0), &table), Vec::<String>::new());
    assert_eq!(complaints(&row(111, 0), &table).len(), 6);
    assert_eq!(complaints(&row(50, 8), &table).len(), 6);
    assert_eq!(complaints(&BTreeMap::new(), &table), ["k\tX bf16\t0: in the table, but no kernel"]);
    assert_eq!(complaints(&row(1, 0), "kernel\n"), ["k\tX bf16\t0: not in the table"]);
}

#[test]
fn the_inner_loop_is_the_one_that_multiplies() {
    let text = "\
//--------------------- .text.k --------------------------
\t.section\t.text.k,\"ax\"
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R2, [R4.64] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R2, R4 ;
        /*0030*/              @!P0 LD.E R3, [R2.64] ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   FADD R1, R1, R1 ;
        /*0070*/                   FADD R1, R1, R1 ;
        /*0080*/                   FADD R1, R1, R1 ;
        /*0090*/               @P1 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
//--------------------- .nv.shared --------------------------
        /*00c0*/                   FADD R1, R1, R1 ;
";
    let (all, labels) = instructions(text, "k");
    assert_eq!((all.len(), inner_loop(&all, &labels)), (12, 3));
    assert_eq!(all.iter().filter(|code| name_of(code) == "LD").count(), 1);
}
