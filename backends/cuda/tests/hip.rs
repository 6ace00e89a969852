//! Compiles the portable kernels, and the CUDA kernels without tensor cores, with AMD's compiler, as a HIP
//! backend would need. Needs no GPU, but hipcc (Debian: hipcc).

use crate::nvrtc::{in_parallel, models, others, programs};
use mixfleet_cuda::kernels::{KernelProgram, KernelSource};
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// In the place of device.h.
const DEVICE: &str = include_str!("hip/device.h");
/// RDNA 2, whose waves have 32 lanes as the kernels expect; Debian 12 has no device library of RDNA 3.
const ARCHITECTURE: &str = "gfx1030";
/// Number of variants of each source that are compiled, spread over all variants.
const VARIANTS: usize = 4;

fn is_ported(source: KernelSource) -> bool {
    use KernelSource::{
        DecodeMma, FewRows, FewRowsGated, FewRowsOfOneX, LatentMma, PrefillMma, PrefillWgmma,
    };
    let few_rows = matches!(source, FewRows | FewRowsOfOneX | FewRowsGated);
    !few_rows && !matches!(source, PrefillMma | PrefillWgmma | DecodeMma | LatentMma)
}

/// What the compiler says of a program; nothing if it compiles.
fn refused(program: &KernelProgram, at: usize) -> Option<String> {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = folder.join(format!("hip-{}-{at}.hip", std::process::id()));
    std::fs::write(&file, program.source(DEVICE)).unwrap();
    let object = file.with_extension("o");
    let mut hipcc = Command::new("hipcc");
    hipcc.arg(format!("--offload-arch={ARCHITECTURE}")).args(["--cuda-device-only", "-Werror", "-O2", "-c"]);
    let done = hipcc.arg(&file).arg("-o").arg(&object).output().unwrap();
    let bytes = std::fs::metadata(&object).map_or(0, |object| object.len());
    let _ = (std::fs::remove_file(&file), std::fs::remove_file(&object));
    let is_right = done.status.success() && bytes > 0;
    (!is_right).then(|| {
        let (name, macros) = (program.body.name(), program.macros());
        format!("{name}: {macros}{}", String::from_utf8_lossy(&done.stderr))
    })
}

#[test]
fn what_needs_no_tensor_cores_compiles_for_amd() {
    if Command::new("hipcc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: kernels are not compiled for AMD devices: no hipcc (Debian: hipcc)");
        return;
    }
    let all: BTreeSet<KernelProgram> = models().iter().chain(&others()).flat_map(programs).collect();
    let mut by_source: BTreeMap<KernelSource, Vec<KernelProgram>> = BTreeMap::new();
    for program in all.into_iter().filter(|program| is_ported(program.body)) {
        by_source.entry(program.body).or_default().push(program);
    }
    assert!(by_source.len() >= 8, "{:?}", by_source.keys());
    let some = by_source.values().flat_map(|of| of.iter().step_by(of.len().div_ceil(VARIANTS)));
    let work: Vec<_> = some.enumerate().collect();
    let said = in_parallel(&work, |(at, program)| refused(program, *at));
    let said: Vec<String> = said.into_iter().flatten().collect();
    assert!(said.is_empty(), "{} of {} fail:\n{}", said.len(), work.len(), said.join("\n"));
    eprintln!(
        "{} programs of {:?}",
        work.len(),
        by_source.keys().map(|source| source.name()).collect::<Vec<_>>()
    );
}
