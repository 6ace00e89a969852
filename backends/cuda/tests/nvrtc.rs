//! Every kernel, in the variants that plans make, compiled by NVRTC: to PTX and to machine code, for each
//! architecture that it may meet. Needs no GPU, but libnvrtc (`MIXFLEET_CUDA_LIBRARIES` names its directory).

use mixfleet_cuda::Library;
use mixfleet_cuda::compile::{Architecture, compile, resources};
use mixfleet_cuda::kernels::{DEVICE, KernelProgram};
use mixfleet_cuda::plan::{
    ALIGNMENT_BYTES, DeviceRange, KV_PAGE_TOKENS, KernelLaunch, PlanStep, PlanTarget, plan,
};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{DType, DeviceLimits, KvShape, OpSig, Scalar};
use mixfleet_hwtests::{SuiteLevel, entries};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The launches that `sig` needs on a small and on a large device, at aligned addresses.
fn launches(sig: &OpSig) -> Vec<KernelLaunch> {
    let mut address = 1 << 20;
    let places: Vec<DeviceRange> = sig
        .operands()
        .iter()
        .map(|operand| {
            let elements = match operand.extent {
                Extent::Exactly(n) => n,
                Extent::PagesOf(page) => 4 * page,
            };
            let bytes = elements * operand.dtype.size_bytes();
            let place = DeviceRange { address, bytes };
            address += bytes.next_multiple_of(ALIGNMENT_BYTES);
            place
        })
        .collect();
    let target = |multiprocessors| PlanTarget {
        capability: 90,
        multiprocessors,
        shared_bytes_max: 232_448,
        blas: false,
        scratch: DeviceRange { address: 1 << 40, bytes: 64 << 20 },
    };
    let steps = [1, 132].into_iter().flat_map(|count| plan(sig, &places, &target(count)).expect("a plan"));
    let launch = |step| match step {
        PlanStep::Launch(launch) => Some(launch),
        _ => None,
    };
    steps.filter_map(launch).collect()
}

fn programs(sig: &OpSig) -> Vec<KernelProgram> {
    launches(sig).into_iter().map(|launch| launch.program).collect()
}

/// Shapes of real models, whose variants the conformance cases do not all have.
fn models() -> Vec<OpSig> {
    use DType::{Bf16, F8E4m3, F16, F32};
    let mut sigs = Vec::new();
    for (x, weight) in [(Bf16, Bf16), (F16, F16), (F32, Bf16), (F32, F32), (Bf16, F8E4m3)] {
        for m in [1, 9, 64] {
            for n in [1024, 128_256] {
                sigs.push(OpSig::Gemm { m, n, k: 4096, x, weight, out: F32, bias: true, accumulate: true });
            }
        }
    }
    for (heads, kv_heads, head_dim) in
        [(32, 8, 128), (28, 4, 128), (64, 8, 128), (14, 2, 64), (32, 32, 96), (8, 4, 256)]
    {
        for (x, kv) in [(Bf16, Bf16), (F16, F16), (F32, Bf16), (F32, F32), (Bf16, F16)] {
            let (sequences, page_tokens, pages_max) = (4, KV_PAGE_TOKENS, 256);
            let kv_tokens = 16_000;
            sigs.push(OpSig::AttnDecode {
                sequences,
                kv_tokens,
                heads,
                pages_max,
                x,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv },
            });
            sigs.push(OpSig::AttnPrefill {
                tokens: 1000,
                sequences,
                pairs: 0,
                kv_tokens,
                heads,
                pages_max,
                window: None,
                x,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv },
            });
        }
    }
    sigs
}

/// What models are served by, beside [`models`].
fn others() -> Vec<OpSig> {
    use DType::{Bf16, F16, F32};
    let (tokens, page_tokens, kv_heads) = (64, KV_PAGE_TOKENS, 8);
    let (rows, cols) = (8, 128_256);
    let mut sigs = vec![OpSig::Sample { rows, cols, history: 64, tops: 20 }];
    for x in [Bf16, F16] {
        let eps = Scalar(1e-5);
        sigs.extend([
            OpSig::Embed { tokens, vocab: 128_256, hidden: 4096, table: x, out: F32 },
            OpSig::RmsNorm { rows: tokens, cols: 4096, eps, x: F32, weight: x, out: x },
            OpSig::RmsNorm { rows: tokens, cols: 128, eps, x, weight: x, out: x },
            OpSig::Rope { tokens, heads: 32, head_dim: 128, x },
            OpSig::SiluMul { elements: 64 * 14_336, x },
            OpSig::Add { elements: 64 * 4096, x },
            OpSig::AttnMerge { parts: 1, rows: 64, head_dim: 128, out: x },
        ]);
        let kv = KvShape { kv_heads, head_dim: 128, page_tokens, dtype: x };
        let wire = x;
        sigs.extend([
            OpSig::KvWrite { tokens, x, kv },
            OpSig::KvGather { tokens, kv, wire },
            OpSig::KvScatter { tokens, kv, wire },
        ]);
    }
    sigs
}

/// Whether models in bf16 are served by it.
fn serves_bf16(sig: &OpSig) -> bool {
    use DType::{Bf16, F16, F32};
    match *sig {
        OpSig::Gemm { x, weight, .. } => [(Bf16, Bf16), (F32, Bf16)].contains(&(x, weight)),
        OpSig::AttnDecode { x, kv, .. } | OpSig::AttnPrefill { x, kv, .. } => (x, kv.dtype) == (Bf16, Bf16),
        _ => sig.operands().iter().all(|operand| operand.dtype != F16),
    }
}

/// What each kernel of a bf16 model takes on each architecture, as a table of the documentation:
/// `MIXFLEET_CUDA_STATIC` names the file to write.
#[test]
#[ignore = "compiles each program for each architecture, which takes minutes"]
fn the_kernels_of_bf16_models_fit_every_architecture() {
    const SPILL_BYTES_MAX: u32 = 256;
    const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"];
    if !nvrtc_is_here() {
        return;
    }
    let sigs = [models(), others()].concat();
    let wanted: BTreeSet<_> = sigs
        .iter()
        .filter(|sig| serves_bf16(sig))
        .flat_map(launches)
        .map(|launch| (launch.kernel, launch.program, launch.shared_bytes))
        .collect();
    let programs: BTreeSet<KernelProgram> = wanted.iter().map(|&(_, program, _)| program).collect();
    let work: Vec<_> = programs.iter().flat_map(|p| ARCHITECTURES.map(|a| (*p, a))).collect();
    let taken = in_parallel(&work, |(program, architecture)| {
        let target = Architecture::Machine((*architecture).to_owned());
        resources(program.body.name(), &program.source(DEVICE), &target)
    });
    let mut by_work = BTreeMap::new();
    for (key, taken) in work.iter().zip(taken) {
        by_work.insert(*key, taken.unwrap_or_else(|log| panic!("{key:?}: {log}")));
    }
    let (mut page, mut wrong) = (String::new(), Vec::new());
    for (kernel, program, dynamic) in &wanted {
        let of = |architecture| {
            let kernels = &by_work[&(*program, architecture)];
            kernels.iter().find(|taken| taken.kernel == *kernel).expect("a kernel of the program")
        };
        let cells = ARCHITECTURES.map(|architecture| {
            let taken = of(architecture);
            assert!(taken.registers > 0 && taken.registers <= 255, "{kernel}: {taken:?}");
            // what a thread spills stays in the first cache
            if taken.spill_bytes > SPILL_BYTES_MAX {
                wrong.push(format!("{kernel} {} on {architecture}: {taken:?}", program.macros()));
            }
            match (taken.spill_bytes, taken.stack_bytes) {
                (0, 0) => taken.registers.to_string(),
                (0, stack) => format!("{} (stack {stack})", taken.registers),
                (spilled, _) => format!("{} (spilled {spilled})", taken.registers),
            }
        });
        let shared = of("sm_90a").shared_bytes + dynamic;
        if shared > if *dynamic > 0 { 227 << 10 } else { 48 << 10 } {
            wrong.push(format!("{kernel}: {shared} bytes of shared memory"));
        }
        let macros = program.macros().replace("#define ", "").replace('\n', ", ");
        let cells = cells.join(" | ");
        page += &format!("| `{kernel}` | {} | {shared} | {cells} |\n", macros.trim_end_matches(", "));
    }
    eprint!("{page}");
    if let Some(path) = std::env::var_os("MIXFLEET_CUDA_STATIC") {
        std::fs::write(path, page).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Applies `f` to all of `work` on all cores.
fn in_parallel<T: Sync, R: Send>(work: &[T], f: impl Fn(&T) -> R + Sync) -> Vec<R> {
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

/// Machine code for Hopper, where registers and shared memory run out if they do, and PTX for the others.
#[test]
fn what_models_use_compiles() {
    if !nvrtc_is_here() {
        return;
    }
    let programs: BTreeSet<KernelProgram> = models().iter().flat_map(programs).collect();
    let programs: Vec<KernelProgram> = programs.into_iter().collect();
    let ptx = ["compute_80", "compute_89", "compute_100"].map(|a| Architecture::Ptx(a.to_owned()));
    compile_all(&programs, &[&[Architecture::Machine("sm_90".to_owned())], &ptx[..]].concat());
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
    };
    let cases = entries(SuiteLevel::Full, &limits).into_iter().filter_map(|entry| entry.case);
    let programs: BTreeSet<KernelProgram> = cases.flat_map(|case| programs(&case.sig)).collect();
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
