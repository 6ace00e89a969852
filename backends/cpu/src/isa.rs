//! Instruction levels of this processor.

use mixfleet_hal::Error;

/// An instruction level, lowest first. A device runs only those in [`Isa::available`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust code.
    Portable,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL, DQ.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with AVX512-BF16 and AVX512-VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// The same, and AMX with tiles of bf16.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with dot products of bytes (FEAT_DotProd).
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// The same, and dot products of bf16 (FEAT_BF16).
    #[cfg(target_arch = "aarch64")]
    NeonBf16,
}

/// Environment variable that lowers the level: `portable`, `avx2`, `avx512`, `avx512bf16` or `amx`, and on
/// aarch64 `portable`, `neon`, `neondot` or `neonbf16`.
pub const ISA_VARIABLE: &str = "MIXFLEET_CPU_ISA";

impl Isa {
    /// Returns the levels that this processor supports, lowest first.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut)]
        let mut levels = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            let avx512 = avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
            let bf16 = avx512 && has!("avx512bf16") && has!("avx512vnni");
            let present = [
                (avx2, Isa::Avx2),
                (avx512, Isa::Avx512),
                (bf16, Isa::Avx512Bf16),
                (bf16 && has_amx_bf16(), Isa::Amx),
            ];
            levels.extend(present.into_iter().filter(|(has, _)| *has).map(|(_, isa)| isa));
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected as has;
            let neon = has!("neon");
            let dot = neon && has!("dotprod");
            let present = [(neon, Isa::Neon), (dot, Isa::NeonDot), (dot && has!("bf16"), Isa::NeonBf16)];
            levels.extend(present.into_iter().filter(|(has, _)| *has).map(|(_, isa)| isa));
        }
        levels
    }

    /// Returns the highest supported level, or the lower one set by [`ISA_VARIABLE`].
    ///
    /// # Errors
    /// `Invalid` if the variable names an unknown or unsupported level.
    pub fn chosen() -> Result<Isa, Error> {
        let levels = Isa::available();
        let Ok(wish) = std::env::var(ISA_VARIABLE) else {
            return Ok(*levels.last().unwrap_or(&Isa::Portable));
        };
        levels.iter().copied().find(|isa| isa.name() == wish).ok_or_else(|| {
            let names: Vec<_> = levels.iter().map(|isa| isa.name()).collect();
            let names = names.join(", ");
            Error::invalid(format!("{ISA_VARIABLE}={wish}: this processor has {names}"))
        })
    }

    /// Returns the number of f32 lanes in a vector.
    pub(crate) const fn lanes(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => 16,
            _ => 8,
        }
    }

    /// Whether the bf16 dot product is a single instruction.
    pub(crate) fn has_dot_bf16(self) -> bool {
        matches!(self.name(), "avx512bf16" | "amx" | "neonbf16")
    }

    /// Whether there are tiles of bf16.
    pub(crate) fn has_tiles(self) -> bool {
        self.name() == "amx"
    }

    /// Returns the lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => "neondot",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonBf16 => "neonbf16",
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether the processor has AMX with bf16, and the system lets this process use it: Linux grants a process
/// the tile state (8 KiB a thread) only on request.
#[cfg(target_arch = "x86_64")]
fn has_amx_bf16() -> bool {
    /// CPUID leaf 7, EDX (Intel's manual, volume 2A): AMX-BF16 and AMX-TILE.
    const BITS: u32 = 1 << 22 | 1 << 24;
    static HAS: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        let leaves = std::arch::x86_64::__cpuid(0).eax;
        leaves >= 7 && std::arch::x86_64::__cpuid_count(7, 0).edx & BITS == BITS && may_use_tiles()
    });
    *HAS
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn may_use_tiles() -> bool {
    /// `arch_prctl` of Linux 5.16: requests a component of the extended thread state; tiles are component 18.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILES: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILES) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn may_use_tiles() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_rise_from_portable_and_have_a_name_each() {
        let levels = Isa::available();
        let names: Vec<_> = levels.iter().map(|isa| isa.name()).collect();
        eprintln!("instruction levels: {}", names.join(", "));
        assert_eq!(levels[0], Isa::Portable);
        assert!(levels.is_sorted());
        assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), names.len());
    }
}
