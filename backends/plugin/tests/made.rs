//! Has `make` compile the libraries in C of `hwtests/plugin`, once a process.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Names that folder to a process that a test starts.
pub(crate) const MADE_BY_PARENT: &str = "MIXFLEET_PLUGIN_LIBRARIES";

/// The folder with the compiled libraries; none where there is no C compiler.
pub(crate) fn libraries() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    MADE.get_or_init(make).as_deref()
}

/// The library whose matrix products go to a BLAS; none where there is no BLAS, or no compiler.
#[allow(dead_code, reason = "one of the two crates that have this file asks for it")]
pub(crate) fn blas() -> Option<PathBuf> {
    let out = libraries()?;
    let made = made_in(out, &["blas"]);
    if !made.status.success() {
        println!("SKIPPED: no BLAS (Debian: libopenblas-dev): {}", String::from_utf8_lossy(&made.stderr));
        return None;
    }
    Some(out.join("blas.so"))
}

/// A library that was compiled against the header of an earlier interface, which is kept as it was.
#[allow(dead_code, reason = "one of the two crates that have this file asks for it")]
pub(crate) fn released(abi: u32) -> Option<PathBuf> {
    let out = libraries()?.join(format!("released-{abi}"));
    std::fs::create_dir_all(&out).unwrap();
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/released/{abi}"));
    let loops = out.join("loops.so");
    let made = made_in(&out, &[&format!("HEADER={}", header.display()), loops.to_str().unwrap()]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(loops)
}

/// Has `make` compile them, without cargo on its path.
fn make() -> Option<PathBuf> {
    if let Some(made) = std::env::var_os(MADE_BY_PARENT) {
        return Some(made.into());
    }
    if Command::new("cc").arg("--version").output().is_err()
        || Command::new("make").arg("-v").output().is_err()
    {
        println!("SKIPPED: no C compiler and make");
        return None;
    }
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("plugin-{}", std::process::id()));
    std::fs::create_dir_all(&out).unwrap();
    let output = made_in(&out, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "warnings: {}", String::from_utf8_lossy(&output.stderr));
    Some(out)
}

fn made_in(out: &Path, targets: &[&str]) -> Output {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hwtests/plugin");
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(source)
        .arg(format!("OUT={}", out.display()))
        .args(targets)
        .env("PATH", "/usr/bin:/bin");
    make.output().unwrap()
}
