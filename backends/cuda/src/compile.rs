//! Compiles kernels to machine code with NVRTC, which works without a GPU.

use crate::kernel_cache::{self, KernelKey};
use crate::libraries::Library;
use cudarc::nvrtc::{result, sys};
use mixfleet_hal::cast::{to_i32, to_usize};
use std::ffi::{CString, c_char, c_int};
use std::sync::OnceLock;

/// The target of a compilation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Machine code for one capability, such as `sm_90`.
    Machine(String),
    /// PTX such as `compute_90`, which the driver compiles further.
    Ptx(String),
}

impl Architecture {
    /// Whether its kernels wait for the launch before theirs (FOLLOW in device.h), so that they may be
    /// launched early.
    pub(crate) fn follows(&self) -> bool {
        let number = self.option().trim_start_matches(|c: char| !c.is_ascii_digit());
        let number = number.trim_end_matches(|c: char| !c.is_ascii_digit());
        number.parse::<u32>().is_ok_and(|capability| capability >= 90)
    }

    /// Whether code for it may have Hopper's products of warpgroups (wgmma).
    pub fn has_wgmma(&self) -> bool {
        self.option() == "sm_90a"
    }

    fn option(&self) -> &str {
        let (Architecture::Machine(target) | Architecture::Ptx(target)) = self;
        target
    }
}

/// Returns the capabilities that this NVRTC knows; empty if it does not say.
fn known() -> &'static [c_int] {
    static KNOWN: OnceLock<Vec<c_int>> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let mut count = 0;
        // SAFETY: the calls write `count` numbers into a list of that length; the library is present.
        unsafe {
            if sys::nvrtcGetNumSupportedArchs(&mut count).result().is_err() || count <= 0 {
                return Vec::new();
            }
            let mut list = vec![0; to_usize(count)];
            match sys::nvrtcGetSupportedArchs(list.as_mut_ptr()).result() {
                Ok(()) => list,
                Err(_) => Vec::new(),
            }
        }
    })
}

/// Selects machine code if NVRTC knows the device, since that needs no second compiler of another version, or
/// else PTX of the nearest older capability. Machine code for 9.0 has what only that capability has.
pub fn architecture(capability: u32) -> Architecture {
    let known = known();
    if known.contains(&to_i32(capability)) {
        let features = if capability == 90 && major().is_some_and(|major| major >= 12) { "a" } else { "" };
        return Architecture::Machine(format!("sm_{capability}{features}"));
    }
    nearest_ptx(capability)
}

/// Selects PTX of a capability, or of the nearest older one that NVRTC knows: any newer device runs it.
pub fn nearest_ptx(capability: u32) -> Architecture {
    let nearest = known().iter().copied().filter(|&c| c <= to_i32(capability)).max();
    Architecture::Ptx(format!("compute_{}", nearest.unwrap_or(80)))
}

const LANGUAGE: &str = "--std=c++17";

/// Compiles a program as [`compile`] does, unless the user's cache directory has its code.
///
/// # Errors
/// NVRTC's log, or why there is none.
pub fn cached(name: &str, source: &str, architecture: &Architecture) -> Result<Vec<u8>, String> {
    if !Library::Nvrtc.is_present() {
        return Err(Library::Nvrtc.remedy());
    }
    let Some((directory, version)) = kernel_cache::directory().zip(version()) else {
        return compile(name, source, architecture);
    };
    let key = KernelKey::new(&[version, architecture.option(), LANGUAGE, source]);
    if let Some(code) = kernel_cache::load(&directory, &key) {
        return Ok(code);
    }
    let code = compile(name, source, architecture)?;
    if let Err(error) = kernel_cache::store(&directory, &key, &code) {
        tracing::debug!(%error, directory = %directory.display(), "a compiled kernel is not kept");
    }
    Ok(code)
}

/// Returns NVRTC's major version; `None` if it does not say.
fn major() -> Option<u32> {
    version()?.strip_prefix("nvrtc ")?.split('.').next()?.parse().ok()
}

/// Returns NVRTC's version; `None` if it does not say.
fn version() -> Option<&'static str> {
    static VERSION: OnceLock<Option<String>> = OnceLock::new();
    let ask = || {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two numbers; the library is present.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
        Some(format!("nvrtc {major}.{minor}"))
    };
    VERSION.get_or_init(ask).as_deref()
}

/// Compiles a program; PTX ends in a zero byte.
///
/// # Errors
/// NVRTC's log, or why there is none.
pub fn compile(name: &str, source: &str, architecture: &Architecture) -> Result<Vec<u8>, String> {
    compile_telling(name, source, architecture, &[]).map(|(code, _)| code)
}

/// Compiles a program, and returns its code with the compiler's log.
fn compile_telling(
    name: &str,
    source: &str,
    architecture: &Architecture,
    more: &[&str],
) -> Result<(Vec<u8>, String), String> {
    if !Library::Nvrtc.is_present() {
        return Err(Library::Nvrtc.remedy());
    }
    let text = |text: &str| CString::new(text).map_err(|e| format!("{name}: {e}"));
    let (source, file) = (text(source)?, text(name)?);
    let program = result::create_program(&source, Some(&file)).map_err(|e| format!("{name}: {e}"))?;
    let target = architecture.option();
    let mut options = vec![format!("--gpu-architecture={target}"), LANGUAGE.to_owned()];
    options.extend(more.iter().map(|&option| option.to_owned()));
    // SAFETY: `program` was created above and is destroyed below, after its last use; `source` outlives it.
    unsafe {
        let code = result::compile_program(program, &options)
            .map_err(|e| format!("{name} for {target}: {e}\n{}", log(program)))
            .and_then(|()| code(program, architecture).map_err(|e| format!("{name} for {target}: {e}")))
            .map(|code| (code, log(program)));
        let _ = result::destroy_program(program);
        code
    }
}

/// What a thread and a block of a kernel take of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Shared memory of a block in bytes, without what a launch adds.
    pub shared_bytes: u32,
    /// Memory of a thread's own in bytes: arrays with computed indices, and registers that are spilled.
    pub stack_bytes: u32,
    /// Bytes of spilled registers that are stored and loaded.
    pub spill_bytes: u32,
    /// Whether the assembler made products of warpgroups wait for each other, which costs most of their
    /// speed.
    pub serialized: bool,
}

/// Compiles a program to machine code and returns what each of its kernels takes.
///
/// # Errors
/// NVRTC's log, or why there is none.
pub fn resources(
    name: &str,
    source: &str,
    architecture: &Architecture,
) -> Result<Vec<KernelResources>, String> {
    let (_, log) = compile_telling(name, source, architecture, &["--ptxas-options=-v"])?;
    Ok(resources_in(&log))
}

/// Reads the log of the assembler.
fn resources_in(log: &str) -> Vec<KernelResources> {
    let number = |line: &str, unit: &str| {
        let before = line.split(unit).next().filter(|before| before.len() < line.len())?;
        before.split_whitespace().next_back()?.parse::<u32>().ok()
    };
    let mut kernels: Vec<KernelResources> = Vec::new();
    let serialized = |line: &&str| line.contains("wgmma.mma_async instructions are serialized");
    let serialized: Vec<&str> = log.lines().filter(serialized).collect();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            let serialized = serialized.iter().any(|line| line.contains(&format!("'{kernel}'")));
            kernels.push(KernelResources { kernel, serialized, ..KernelResources::default() });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        let fields = [
            (&mut kernel.registers, " registers"),
            (&mut kernel.shared_bytes, " bytes smem"),
            (&mut kernel.stack_bytes, " bytes stack frame"),
        ];
        for (field, unit) in fields {
            *field = number(line, unit).unwrap_or(*field);
        }
        let spills =
            [" bytes spill stores", " bytes spill loads"].map(|unit| number(line, unit).unwrap_or(0));
        kernel.spill_bytes += spills[0] + spills[1];
    }
    kernels
}

/// # Safety
/// `program` is alive.
unsafe fn log(program: sys::nvrtcProgram) -> String {
    // SAFETY: the caller's promise.
    let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
    let bytes: Vec<u8> = log.into_iter().map(i8::cast_unsigned).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// # Safety
/// `program` is alive and compiled.
unsafe fn code(
    program: sys::nvrtcProgram,
    architecture: &Architecture,
) -> Result<Vec<u8>, result::NvrtcError> {
    // SAFETY: the caller's promise; each second call writes as many bytes as the first one returned.
    unsafe {
        let mut bytes = 0;
        match architecture {
            Architecture::Machine(_) => sys::nvrtcGetCUBINSize(program, &mut bytes).result()?,
            Architecture::Ptx(_) => sys::nvrtcGetPTXSize(program, &mut bytes).result()?,
        }
        let mut code = vec![0u8; bytes];
        let into = code.as_mut_ptr().cast::<c_char>();
        match architecture {
            Architecture::Machine(_) => sys::nvrtcGetCUBIN(program, into).result()?,
            Architecture::Ptx(_) => sys::nvrtcGetPTX(program, into).result()?,
        }
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_wait_for_the_launch_before_from_9_0_on() {
        let follows = |target: &str| Architecture::Machine(target.to_owned()).follows();
        assert_eq!(
            ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_120"].map(follows),
            [false, false, true, true, true]
        );
        assert!(!Architecture::Ptx("compute_80".to_owned()).follows());
    }

    #[test]
    fn the_assemblers_log_tells_what_each_kernel_takes() {
        let log = "\
ptxas info    : (C7518) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'second'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1200 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 19 registers, used 0 barriers, 364 bytes cmem[0]
";
        let kernel = |kernel: &str, registers, shared_bytes, stack_bytes, spill_bytes| KernelResources {
            kernel: kernel.to_owned(),
            registers,
            shared_bytes,
            stack_bytes,
            spill_bytes,
            serialized: kernel == "second",
        };
        assert_eq!(resources_in(log), [kernel("first", 255, 1200, 24, 24), kernel("second", 19, 0, 0, 0)]);
    }
}
