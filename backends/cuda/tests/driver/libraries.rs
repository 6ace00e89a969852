//! Compiles the libraries of the fake driver; the binary's tests use this file too.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The names that the loader knows them by, with the version that NVIDIA's have.
const NAMES: [&str; 5] =
    ["libcuda.so.1", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublasLt.so.13", "libnvidia-ml.so.1"];

/// The version of the driver.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Driver {
    /// 12.8 or later.
    New,
    /// An earlier one, which lacks a name.
    Old,
}

/// The directory of the libraries; `None` where there is no compiler.
pub(crate) fn directory(driver: Driver) -> Option<&'static Path> {
    static DIRECTORIES: [OnceLock<Option<PathBuf>>; 2] = [const { OnceLock::new() }; 2];
    DIRECTORIES[driver as usize].get_or_init(|| compiled(driver)).as_deref()
}

/// Compiles the libraries, unless an earlier run did.
fn compiled(version: Driver) -> Option<PathBuf> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return None;
    }
    let driver = include_str!("fake.cpp");
    let (blas, nvml) = (include_str!("blas.cpp"), include_str!("nvml.cpp"));
    let shim = include_str!("../emulator/shim.h");
    let mut hasher = DefaultHasher::new();
    (version, driver, blas, nvml, shim, NAMES).hash(&mut hasher);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{:016x}", hasher.finish()));
    std::fs::create_dir_all(&directory).unwrap();
    // other processes read and make the same files concurrently
    let own = std::process::id();
    let write = |name: &str, text: &str| {
        let part = directory.join(format!("{own}.{name}"));
        std::fs::write(&part, text).and_then(|()| std::fs::rename(part, directory.join(name))).unwrap();
    };
    write("shim.h", shim);
    write("blas.cpp", blas);
    write("nvml.cpp", nvml);
    write("fake.cpp", driver);
    if NAMES.iter().all(|name| directory.join(name).exists()) {
        return Some(directory);
    }
    let object = directory.join(format!("{own}.o"));
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-c", "-fPIC", "-fvisibility=hidden"]);
    if let Driver::Old = version {
        command.arg("-DOLD_DRIVER");
    }
    run(command.arg("-o").arg(&object).arg(directory.join("fake.cpp")))?;
    for name in NAMES {
        // a file each, an instance each: none shares the others' state
        let part = directory.join(format!("{own}.{name}"));
        run(Command::new("g++")
            .arg(format!("-Wl,-soname,{name}"))
            .args(["-shared", "-o"])
            .args([&part, &object]))?;
        std::fs::rename(part, directory.join(name)).unwrap();
    }
    std::fs::remove_file(object).unwrap();
    Some(directory)
}

/// Runs a compiler, whose refusal fails the test; `None` if it is not there.
fn run(command: &mut Command) -> Option<()> {
    let output = command.output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(())
}
