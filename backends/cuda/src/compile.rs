//! Compiles kernels to machine code with NVRTC, which works without a GPU.

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
/// else PTX of the nearest older capability.
pub fn architecture(capability: u32) -> Architecture {
    let known = known();
    if known.contains(&to_i32(capability)) {
        return Architecture::Machine(format!("sm_{capability}"));
    }
    let nearest = known.iter().copied().filter(|&c| c <= to_i32(capability)).max();
    Architecture::Ptx(format!("compute_{}", nearest.unwrap_or(80)))
}

/// Compiles a program; PTX ends in a zero byte.
///
/// # Errors
/// NVRTC's log, or why there is none.
pub fn compile(name: &str, source: &str, architecture: &Architecture) -> Result<Vec<u8>, String> {
    if !Library::Nvrtc.is_present() {
        return Err(Library::Nvrtc.remedy());
    }
    let text = |text: &str| CString::new(text).map_err(|e| format!("{name}: {e}"));
    let (source, file) = (text(source)?, text(name)?);
    let program = result::create_program(&source, Some(&file)).map_err(|e| format!("{name}: {e}"))?;
    let (Architecture::Machine(target) | Architecture::Ptx(target)) = architecture;
    let options = [format!("--gpu-architecture={target}"), "--std=c++17".to_owned()];
    // SAFETY: `program` was created above and is destroyed below, after its last use; `source` outlives it.
    unsafe {
        let code = result::compile_program(program, &options)
            .map_err(|e| format!("{name} for {target}: {e}\n{}", log(program)))
            .and_then(|()| code(program, architecture).map_err(|e| format!("{name} for {target}: {e}")));
        let _ = result::destroy_program(program);
        code
    }
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
    // SAFETY: the caller's promise; each second call writes as many bytes as the first one told.
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
