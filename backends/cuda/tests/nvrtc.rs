//! Every kernel, in the variants that plans make, compiled by NVRTC: to PTX and to machine code, for each
//! architecture that it may meet. Needs no GPU, but libnvrtc (`MIXFLEET_CUDA_LIBRARIES` names its directory).

use mixfleet_cuda::Library;
use mixfleet_cuda::compile::{Architecture, KernelResources, compile, resources};
use mixfleet_cuda::kernels::{DEVICE, KernelProgram};
use mixfleet_cuda::plan::{
    self, ALIGNMENT_BYTES, DeviceRange, KV_PAGE_TOKENS, KernelLaunch, PlanStep, PlanTarget, PlannedOp,
};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{ColumnsOf, DType, DeviceLimits, KvShape, LatentKv, OpSig, RotaryPart, Scalar, Support};
use mixfleet_hwtests::{SuiteLevel, entries};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The launches that `sig` needs at aligned addresses, on a small device, and on a large one without cuBLASLt
/// and with it.
pub(crate) fn launches(sig: &OpSig) -> Vec<KernelLaunch> {
    launches_of(&[(*sig, apart(sig, 1 << 20))])
}

/// Aligned places for the operands of `sig` from `address` on.
fn apart(sig: &OpSig, mut address: u64) -> Vec<DeviceRange> {
    let place = |operand: &mixfleet_hal::op::Operand| {
        let elements = match operand.extent {
            Extent::Exactly(n) => n,
            Extent::PagesOf(page) => 4 * page,
        };
        let bytes = elements * operand.dtype.size_bytes();
        let place = DeviceRange { address, bytes };
        address += bytes.next_multiple_of(ALIGNMENT_BYTES);
        place
    };
    sig.operands().iter().map(place).collect()
}

/// Devices for which plans differ.
fn targets() -> [PlanTarget; 4] {
    [(1, false, false), (1, false, true), (132, false, true), (132, true, true)].map(
        |(multiprocessors, blas, wgmma)| PlanTarget {
            capability: 90,
            wgmma,
            multiprocessors,
            shared_bytes_max: 232_448,
            blas,
            scratch: DeviceRange { address: 1 << 40, bytes: 64 << 20 },
        },
    )
}

/// The launches of `ops`, each alone or fused with the next.
fn launches_of(ops: &[PlannedOp]) -> Vec<KernelLaunch> {
    let targets = targets();
    let steps = targets.iter().flat_map(|target| match plan::fused(ops, target).expect("a plan") {
        Some((_, steps)) => steps,
        None => plan::plan(&ops[0].0, &ops[0].1, target).expect("a plan"),
    });
    let launch = |step| match step {
        PlanStep::Launch(launch) => Some(launch),
        _ => None,
    };
    steps.filter_map(launch).collect()
}

/// What a decode step of a model joins.
fn joined() -> Vec<Vec<PlannedOp>> {
    let mut lists = Vec::new();
    let at = |number: u64| (number + 1) << 32;
    for (x, weight) in [(DType::Bf16, DType::Bf16), (DType::F16, DType::F16), (DType::F32, DType::Bf16)] {
        for m in [1, 9] {
            let (n, k, out) = (4096, 4096, x);
            let sig = OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false };
            let mut products: Vec<PlannedOp> = (0..3).map(|number| (sig, apart(&sig, at(number)))).collect();
            let rows = products[0].1[0];
            products.iter_mut().for_each(|product| product.1[0] = rows);
            lists.push(products.clone());
            let sig = OpSig::SiluMul { elements: u64::from(m * n), x };
            let mut places = apart(&sig, at(3));
            places[..2].copy_from_slice(&[products[0].1[2], products[1].1[2]]);
            lists.push(vec![products[0].clone(), products[1].clone(), (sig, places)]);
        }
        let kv =
            KvShape { kv_heads: 8, head_dim: 128, page_tokens: KV_PAGE_TOKENS, dtype: weight, latent: None };
        let rope = |heads| OpSig::Rope { tokens: 4, heads, head_dim: 128, x, part: None };
        let (queries, mut keys) = (apart(&rope(32), at(0)), apart(&rope(8), at(1)));
        keys[1] = queries[1];
        let write = OpSig::KvWrite { tokens: 4, x, kv };
        let mut places = apart(&write, at(2));
        places[0] = keys[0];
        lists.push(vec![(rope(32), queries), (rope(8), keys), (write, places)]);
        let (sequences, heads, pages_max, kv_tokens) = (4, 32, 256, 16_000);
        let decode = OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv, cap: None };
        let merge = OpSig::AttnMerge { parts: 1, rows: sequences * heads, head_dim: 128, sinks: 0, out: x };
        let (decoded, mut merged) = (apart(&decode, at(0)), apart(&merge, at(1)));
        merged[..2].copy_from_slice(&decoded[5..]);
        lists.push(vec![(decode, decoded), (merge, merged)]);
    }
    lists
}

pub(crate) fn programs(sig: &OpSig) -> Vec<KernelProgram> {
    launches(sig).into_iter().map(|launch| launch.program).collect()
}

/// Matrix products and attention of real models, whose variants the conformance cases do not all have: in
/// each dtype of activations, weights and KV that an instance may be given.
pub(crate) fn models() -> Vec<OpSig> {
    let mut sigs = Vec::new();
    for x in DType::FLOATS {
        for weight in DType::FLOATS.into_iter().chain((x == DType::Bf16).then_some(DType::F8E4m3)) {
            for (m, n, out) in [(1, 1024), (9, 1024), (64, 1024), (1, 128_256), (9, 128_256), (64, 128_256)]
                .into_iter()
                .flat_map(|(m, n)| BTreeSet::from([x, DType::F32]).into_iter().map(move |out| (m, n, out)))
            {
                let accumulate = out == DType::F32;
                sigs.push(OpSig::Gemm { m, n, k: 4096, x, weight, out, bias: true, accumulate });
            }
        }
        for kv in DType::FLOATS {
            sigs.extend(attention(x, kv));
        }
    }
    sigs
}

/// Attention of models: with each number of heads that share KV where all is of one dtype.
fn attention(x: DType, kv: DType) -> Vec<OpSig> {
    const SHAPES: [(u32, u32, u32); 4] = [(32, 8, 128), (14, 2, 64), (32, 32, 96), (8, 4, 256)];
    const MORE: [(u32, u32, u32); 8] = [
        (32, 8, 64),
        (32, 32, 128),
        (16, 8, 128),
        (24, 8, 128),
        (40, 8, 128),
        (12, 2, 128),
        (28, 4, 128),
        (64, 8, 128),
    ];
    let (sequences, page_tokens, pages_max, kv_tokens) = (4, KV_PAGE_TOKENS, 256, 16_000);
    let shapes = SHAPES.iter().chain(MORE.iter().filter(|_| x == kv));
    let plain = shapes.map(|&(heads, kv_heads, head_dim)| {
        (heads, KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None })
    });
    // of DeepSeek-V3, and of a member of eight
    let of_latents = [128, 16].map(|heads| (heads, latents(kv)));
    let both = |(heads, kv)| {
        let (tokens, pairs, window) = (1000, 0, None);
        [
            OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x, kv, cap: None },
            OpSig::AttnPrefill {
                tokens,
                sequences,
                pairs,
                kv_tokens,
                heads,
                pages_max,
                window,
                sinks: false,
                x,
                kv,
                cap: None,
            },
        ]
    };
    plain.chain(of_latents).flat_map(both).collect()
}

/// The KV of DeepSeek.
fn latents(dtype: DType) -> KvShape {
    let latent = Some(LatentKv { rank: 512, scale: Scalar(0.1352) });
    KvShape { kv_heads: 1, head_dim: 576, page_tokens: KV_PAGE_TOKENS, dtype, latent }
}

/// What models are served by, beside [`models`].
pub(crate) fn others() -> Vec<OpSig> {
    use DType::F32;
    let (tokens, page_tokens, kv_heads, hidden, head_dim) = (64, KV_PAGE_TOKENS, 8, 4096, 128);
    let (rows, eps) = (8, Scalar(1e-5));
    // the second vocabulary is no whole number of vectors
    let draws = [128_256, 50_257].map(|cols| OpSig::Sample { rows, cols, history: 64, tops: 20 });
    let mut sigs = draws.to_vec();
    for x in DType::FLOATS {
        sigs.extend([
            OpSig::Embed { tokens, vocab: 128_256, hidden, table: x, out: F32 },
            OpSig::Rope { tokens, heads: 32, head_dim, x, part: None },
            OpSig::SiluMul { elements: 64 * 14_336, x },
            OpSig::Add { elements: 64 * 4096, x },
            OpSig::AttnMerge { parts: 1, rows: 64, head_dim, sinks: 0, out: x },
            OpSig::AttnMerge { parts: 1, rows: 64, head_dim: 512, sinks: 0, out: x },
        ]);
        let part = Some(RotaryPart { first: 128, length: 64, interleaved: true });
        let of = |row, first| ColumnsOf { row, first };
        sigs.extend([
            OpSig::Rope { tokens, heads: 128, head_dim: 192, x, part },
            OpSig::CopyColumns { rows: tokens, cols: 512, from: of(576, 0), to: of(512, 0), x },
        ]);
        for other in DType::FLOATS {
            sigs.extend([
                OpSig::RmsNorm { rows: tokens, cols: hidden, eps, x: F32, weight: other, out: x },
                OpSig::RmsNorm { rows: tokens, cols: head_dim, eps, x, weight: other, out: x },
            ]);
            let plain = KvShape { kv_heads, head_dim, page_tokens, dtype: other, latent: None };
            for kv in [plain, latents(other)] {
                sigs.extend([
                    OpSig::KvWrite { tokens, x, kv },
                    OpSig::KvGather { tokens, kv, wire: x },
                    OpSig::KvScatter { tokens, kv, wire: x },
                ]);
            }
        }
    }
    sigs
}

/// Whether models in bf16 are served by it.
fn serves_bf16(sig: &OpSig) -> bool {
    use DType::{Bf16, F16, F32};
    match *sig {
        OpSig::Gemm { x, weight, out, .. } => {
            [(Bf16, Bf16), (F32, Bf16)].contains(&(x, weight)) && [x, F32].contains(&out)
        }
        OpSig::AttnDecode { x, kv, .. } | OpSig::AttnPrefill { x, kv, .. } => (x, kv.dtype) == (Bf16, Bf16),
        OpSig::KvWrite { x, kv, .. } => (x, kv.dtype) == (Bf16, Bf16),
        OpSig::KvGather { wire, kv, .. } | OpSig::KvScatter { wire, kv, .. } => {
            (wire, kv.dtype) == (Bf16, Bf16)
        }
        OpSig::RmsNorm { weight, out, .. } => (weight, out) == (Bf16, Bf16),
        OpSig::Embed { table, .. } => table == Bf16,
        OpSig::Rope { x, .. } | OpSig::SiluMul { x, .. } | OpSig::Add { x, .. } => x == Bf16,
        OpSig::AttnMerge { out, .. } => out == Bf16,
        _ => sig.operands().iter().all(|operand| operand.dtype != F16),
    }
}

pub(crate) const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// A row of the table of kernels: how it is launched, and what it takes on each architecture.
struct Row {
    kernel: &'static str,
    variant: String,
    /// Of a block on Hopper, with what the launch adds.
    shared_bytes: u32,
    is_of_bf16: bool,
    taken: Vec<KernelResources>,
}

impl Row {
    fn spills(&self) -> bool {
        self.taken.iter().any(|taken| taken.spill_bytes > 0)
    }

    fn text(&self) -> String {
        let cell = |taken: &KernelResources| match (taken.spill_bytes, taken.stack_bytes) {
            (0, 0) => taken.registers.to_string(),
            (0, stack) => format!("{} (stack {stack})", taken.registers),
            (spilled, _) => format!("{} (spilled {spilled})", taken.registers),
        };
        let cells: Vec<String> = self.taken.iter().map(cell).collect();
        let Row { kernel, variant, shared_bytes, .. } = self;
        format!("| `{kernel}` | {variant} | {shared_bytes} | {} |\n", cells.join(" | "))
    }
}

/// Compiles what `sigs` launch for every architecture.
fn rows(sigs: &[OpSig]) -> Vec<Row> {
    let mut wanted: BTreeMap<_, bool> = BTreeMap::new();
    let alone = sigs.iter().map(|sig| (serves_bf16(sig), launches(sig)));
    let joined = joined().into_iter().map(|ops| (ops.iter().all(|op| serves_bf16(&op.0)), launches_of(&ops)));
    for (is_of_bf16, launches) in alone.chain(joined) {
        for launch in launches {
            *wanted.entry((launch.kernel, launch.program, launch.shared_bytes)).or_default() |= is_of_bf16;
        }
    }
    let programs: BTreeSet<KernelProgram> = wanted.keys().map(|&(_, program, _)| program).collect();
    let work: Vec<_> = programs.iter().flat_map(|p| ARCHITECTURES.map(|a| (*p, a))).collect();
    eprintln!("{} programs for {} architectures", programs.len(), ARCHITECTURES.len());
    let taken = in_parallel(&work, |(program, architecture)| {
        let target = Architecture::Machine((*architecture).to_owned());
        resources(program.body.name(), &program.source(DEVICE), &target)
    });
    let mut by_work = BTreeMap::new();
    for (key, taken) in work.iter().zip(taken) {
        by_work.insert(*key, taken.unwrap_or_else(|log| panic!("{key:?}: {log}")));
    }
    let row = |((kernel, program, dynamic), is_of_bf16): (_, bool)| {
        let program: KernelProgram = program;
        let of = |architecture| {
            let kernels = &by_work[&(program, architecture)];
            kernels.iter().find(|taken| taken.kernel == kernel).expect("a kernel of the program").clone()
        };
        let macros = program.macros().replace("#define ", "").replace('\n', ", ");
        Row {
            kernel,
            variant: macros.trim_end_matches(", ").to_owned(),
            shared_bytes: of("sm_90a").shared_bytes + dynamic,
            is_of_bf16,
            taken: ARCHITECTURES.map(of).to_vec(),
        }
    };
    wanted.into_iter().map(row).collect()
}

/// Resources of each kernel that serves a model on each architecture, as tables of the documentation: for
/// models in bf16, for others where something spills, and the rest. `MIXFLEET_CUDA_STATIC` names the file to
/// write.
#[test]
#[ignore = "compiles each program for each architecture, which takes many minutes"]
fn the_kernels_of_all_models_fit_every_architecture() {
    const SPILL_BYTES_MAX: u32 = 256;
    if !nvrtc_is_here() {
        return;
    }
    let rows = rows(&[models(), others()].concat());
    let mut wrong = Vec::new();
    for row in &rows {
        // what a thread spills stays in the first cache
        let fits = |taken: &KernelResources| {
            (1..=255).contains(&taken.registers) && taken.spill_bytes <= SPILL_BYTES_MAX
        };
        // more than 48 KiB must be requested by the launch
        if !row.taken.iter().all(fits) || row.shared_bytes > 227 << 10 {
            wrong.push(row.text());
        }
    }
    let part = |title: &str, of: &dyn Fn(&&Row) -> bool| {
        let rows: Vec<String> = rows.iter().filter(of).map(Row::text).collect();
        format!("{title}: {}\n\n{}\n", rows.len(), rows.concat())
    };
    let page = [
        part("Models in bf16", &|row| row.is_of_bf16),
        part("Others that spill", &|row| !row.is_of_bf16 && row.spills()),
        part("The rest", &|row| !row.is_of_bf16 && !row.spills()),
    ]
    .concat();
    eprint!("{page}");
    if let Some(path) = std::env::var_os("MIXFLEET_CUDA_STATIC") {
        std::fs::write(path, page).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.concat());
}

/// Applies `f` to all of `work` on all cores.
pub(crate) fn in_parallel<T: Sync, R: Send>(work: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = work.get(at) else { return };
                    let result = f(item);
                    done.lock().unwrap().push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

fn compile_all(programs: &[KernelProgram], architectures: &[Architecture]) {
    let work: Vec<_> = architectures.iter().flat_map(|a| programs.iter().map(move |p| (p, a))).collect();
    let compiled = in_parallel(&work, |(program, architecture)| {
        let code = compile(program.body.name(), &program.source(DEVICE), architecture);
        code.map(|code| assert!(!code.is_empty())).map_err(|log| format!("{log}\n{}", program.macros()))
    });
    let errors: Vec<String> = compiled.into_iter().filter_map(Result::err).collect();
    assert!(errors.is_empty(), "{} of {} fail:\n{}", errors.len(), work.len(), errors.join("\n"));
    eprintln!("{} programs for {architectures:?}", programs.len());
}

fn nvrtc_is_here() -> bool {
    let here = Library::Nvrtc.is_present();
    if !here {
        eprintln!("SKIPPED: kernels are not compiled for NVIDIA devices: {}", Library::Nvrtc.remedy());
    }
    here
}

/// Machine code for Hopper, where registers and shared memory run out if they do, and PTX for the oldest
/// part, with `MIXFLEET_NVRTC=full` for all.
#[test]
fn what_models_use_compiles() {
    if !nvrtc_is_here() {
        return;
    }
    let joined = joined().into_iter().flat_map(|ops| launches_of(&ops)).map(|launch| launch.program);
    let programs: BTreeSet<KernelProgram> = models().iter().flat_map(programs).chain(joined).collect();
    let programs: Vec<KernelProgram> = programs.into_iter().collect();
    let full = std::env::var("MIXFLEET_NVRTC").is_ok_and(|level| level == "full");
    let ptx = ["compute_80", "compute_89", "compute_100"].map(|a| Architecture::Ptx(a.to_owned()));
    let ptx = if full { &ptx[..] } else { &ptx[..1] };
    compile_all(&programs, &[&[Architecture::Machine("sm_90a".to_owned())], ptx].concat());
}

/// Hopper's prefill attention keeps all in registers, and its products run beside the rest. A branch that the
/// assembler cannot tell to be the same for all lanes of a warp is enough to lose the latter.
#[test]
fn products_of_warpgroups_are_not_serialized() {
    if !nvrtc_is_here() {
        return;
    }
    let sigs =
        [(DType::Bf16, 64), (DType::Bf16, 128), (DType::F16, 64), (DType::F16, 128)].map(|(x, head_dim)| {
            let kv = KvShape { kv_heads: 8, head_dim, page_tokens: KV_PAGE_TOKENS, dtype: x, latent: None };
            let (tokens, sequences, pairs, kv_tokens, heads, pages_max) = (4096, 1, 0, 4096, 32, 256);
            OpSig::AttnPrefill {
                tokens,
                sequences,
                pairs,
                kv_tokens,
                heads,
                pages_max,
                window: None,
                sinks: false,
                x,
                kv,
                cap: None,
            }
        });
    let launches = sigs.iter().flat_map(launches).filter(|launch| launch.kernel == "attn_prefill_wgmma");
    let programs: BTreeSet<KernelProgram> = launches.map(|launch| launch.program).collect();
    assert_eq!(programs.len(), sigs.len());
    for program in programs {
        let target = Architecture::Machine("sm_90a".to_owned());
        for taken in resources(program.body.name(), &program.source(DEVICE), &target).unwrap() {
            assert!(!taken.serialized && taken.spill_bytes == 0, "{taken:?}\n{}", program.macros());
        }
    }
}

/// PTX of every variant of the conformance cases: their syntax and types.
#[test]
fn every_variant_compiles() {
    if !nvrtc_is_here() {
        return;
    }
    let limits = DeviceLimits {
        allocation_bytes_max: 1 << 40,
        alignment_bytes: ALIGNMENT_BYTES,
        imports_host_memory: false,
        kv_page_tokens: KV_PAGE_TOKENS,
        replay_pays: true,
        copies_beside: true,
    };
    let cases = entries(SuiteLevel::Full, &limits).into_iter().filter_map(|entry| entry.case);
    let [smallest, ..] = targets();
    let supported = cases.filter(|case| plan::support(&case.sig, &smallest) != Support::No);
    let programs: BTreeSet<KernelProgram> = supported.flat_map(|case| programs(&case.sig)).collect();
    let programs: Vec<KernelProgram> = programs.into_iter().collect();
    compile_all(&programs, &[Architecture::Ptx("compute_80".to_owned())]);
}

#[test]
fn a_wrong_program_is_told_with_the_compilers_log() {
    if !nvrtc_is_here() {
        return;
    }
    let log = compile("wrong.cu", "int f( {", &Architecture::Ptx("compute_80".to_owned())).unwrap_err();
    assert!(log.contains("wrong.cu") && log.contains("error"), "{log}");
}
