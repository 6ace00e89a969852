//! Every kernel, in the variants that plans make, compiled by NVRTC: to PTX and to machine code, for each
//! architecture that it may meet. Needs no GPU, but libnvrtc (`MIXFLEET_CUDA_LIBRARIES` names its directory).

use mixfleet_cuda::Library;
use mixfleet_cuda::compile::{Architecture, compile};
use mixfleet_cuda::kernels::{DEVICE, KernelProgram};
use mixfleet_cuda::plan::{ALIGNMENT_BYTES, DeviceRange, KV_PAGE_TOKENS, PlanStep, PlanTarget, plan};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{DType, DeviceLimits, KvShape, OpSig};
use mixfleet_hwtests::{SuiteLevel, entries};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The programs that `sig` needs on a small and on a large device, at aligned addresses.
fn programs(sig: &OpSig) -> Vec<KernelProgram> {
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
    let program = |step| match step {
        PlanStep::Launch(launch) => Some(launch.program),
        _ => None,
    };
    steps.filter_map(program).collect()
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
    for (heads, kv_heads, head_dim) in [(32, 8, 128), (28, 4, 128), (64, 8, 128), (14, 2, 64), (8, 4, 256)] {
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

fn compile_all(programs: &[KernelProgram], architectures: &[Architecture]) {
    let work: Vec<_> = architectures.iter().flat_map(|a| programs.iter().map(move |p| (p, a))).collect();
    let (next, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((program, architecture)) = work.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match compile(program.body.name(), &program.source(DEVICE), architecture) {
                        Ok(code) => assert!(!code.is_empty()),
                        Err(log) => errors.lock().unwrap().push(format!("{log}\n{}", program.macros)),
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().unwrap();
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
