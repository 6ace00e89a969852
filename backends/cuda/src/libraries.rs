//! Finds NVIDIA's libraries on this machine. cudarc panics on calls into an absent library, so everything is
//! checked here before it is called.

use cudarc::{cublaslt, driver, nvrtc};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Environment variable with directories to search in addition to the system's, separated by colons.
const SEARCH_VARIABLE: &str = "MIXFLEET_CUDA_LIBRARIES";

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// libcuda, which comes with the kernel driver.
    Driver,
    /// libnvrtc, the kernel compiler.
    Nvrtc,
    /// libcublasLt, for large matrix products.
    CublasLt,
}

impl Library {
    /// Whether it can be loaded, which is determined once.
    ///
    /// A library outside the loader's path (a Python wheel, a toolkit without ldconfig) is loaded here by its
    /// path first, so that cudarc's look-up by name finds it by its SONAME.
    pub fn is_present(self) -> bool {
        static ANSWERS: [OnceLock<bool>; 3] = [const { OnceLock::new() }; 3];
        *ANSWERS[self as usize].get_or_init(|| self.loads() || (self.load_by_path() && self.loads()))
    }

    fn loads(self) -> bool {
        // SAFETY: loads and unloads a library whose initialisers are NVIDIA's and take no part of ours.
        unsafe {
            match self {
                Library::Driver => driver::sys::is_culib_present(),
                Library::Nvrtc => nvrtc::sys::is_culib_present(),
                Library::CublasLt => cublaslt::sys::is_culib_present(),
            }
        }
    }

    /// Returns the file name prefixes, in the order of loading.
    fn files(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so."],
            Library::Nvrtc => &["libnvrtc-builtins.so.", "libnvrtc.so."],
            Library::CublasLt => &["libcublasLt.so."],
        }
    }

    fn load_by_path(self) -> bool {
        directories(&|name| std::env::var_os(name)).into_iter().any(|directory| {
            let files: Option<Vec<PathBuf>> =
                self.files().iter().map(|file| newest(&directory, file)).collect();
            files.is_some_and(|files| {
                files.into_iter().all(|file| {
                    // SAFETY: as in `loads`.
                    let loaded = unsafe { libloading::Library::new(&file) };
                    // never unloaded, since cudarc's look-up relies on it
                    loaded.map(std::mem::forget).is_ok()
                })
            })
        })
    }

    /// Returns where to get it.
    pub fn remedy(self) -> String {
        let what = match self {
            Library::Driver => "libcuda cannot be loaded: install NVIDIA's driver",
            Library::Nvrtc => {
                "libnvrtc cannot be loaded: install the CUDA toolkit or the wheel nvidia-cuda-nvrtc-cu12"
            }
            Library::CublasLt => {
                "libcublasLt cannot be loaded: install the CUDA toolkit or the wheel nvidia-cublas-cu12"
            }
        };
        format!("{what}, and name its directory in {SEARCH_VARIABLE} if the loader does not know it")
    }
}

/// Loads the library whose file name begins so from where drivers, toolkits and Python wheels put libraries.
pub(crate) fn by_path(prefix: &str) -> Option<libloading::Library> {
    let found = directories(&|name| std::env::var_os(name)).into_iter();
    // SAFETY: as in `loads`.
    found
        .filter_map(|directory| newest(&directory, prefix))
        .find_map(|file| unsafe { libloading::Library::new(file) }.ok())
}

/// Returns the last file of `directory` whose name begins with `prefix` and a version.
fn newest(directory: &Path, prefix: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).ok()?.flatten().map(|entry| entry.path());
    let versioned = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    entries.filter(versioned).max()
}

/// Where containers and WSL put the libraries of the kernel driver, which their loader may not know.
const DRIVER_DIRECTORIES: [&str; 2] = ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"];

/// Returns the directories where drivers, toolkits and Python wheels put libraries, by what `variable` says
/// of the environment.
fn directories(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let list = |name: &str| -> Vec<PathBuf> {
        variable(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let path = |name: &str| variable(name).map(PathBuf::from);
    let mut found = list(SEARCH_VARIABLE);
    let toolkits =
        [path("CUDA_PATH"), path("CUDA_HOME"), Some("/usr/local/cuda".into()), Some("/opt/cuda".into())];
    found.extend(toolkits.into_iter().flatten().flat_map(|root| [root.join("lib64"), root.join("lib")]));
    let environments =
        [path("VIRTUAL_ENV"), path("CONDA_PREFIX"), path("HOME").map(|home| home.join(".local"))];
    let pythons =
        environments.into_iter().flatten().chain(list("PATH").into_iter().flat_map(|bin| prefixes(&bin)));
    let pythons = pythons.chain(["/usr/local".into(), "/usr".into()]);
    for version in pythons.flat_map(|prefix| children(&prefix.join("lib"))) {
        if !version.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")) {
            continue;
        }
        for packages in ["site-packages", "dist-packages"] {
            let wheels = children(&version.join(packages).join("nvidia"));
            found.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    found.extend(DRIVER_DIRECTORIES.map(PathBuf::from));
    found
}

/// Returns the environments whose Python is called by `bin/python3`: the one that `bin` is in, and the one
/// that a link there leads to. No further, since a virtual environment's own Python is a link to another one.
fn prefixes(bin: &Path) -> Vec<PathBuf> {
    let python = bin.join("python3");
    if !python.exists() {
        return Vec::new();
    }
    let linked = std::fs::read_link(&python).ok().map(|target| bin.join(target));
    let prefix = |python: PathBuf| python.parent().and_then(Path::parent).map(Path::to_path_buf);
    [Some(python), linked].into_iter().flatten().filter_map(prefix).collect()
}

fn children(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).map(|entries| entries.flatten().map(|e| e.path()).collect());
    entries.unwrap_or_default()
}

/// Runs calls into a library that may be too old for one of them, in which case cudarc panics.
pub(crate) fn guarded<T>(place: &str, calls: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(calls)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        let cause = text.unwrap_or_else(|| "a panic without a message".to_owned());
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("cuda: {place}: {cause}; update NVIDIA's driver or toolkit"),
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_a_file_is_found_and_bare_names_are_not() {
        let directory = std::env::temp_dir().join(format!("mixfleet-cuda-libraries-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        for file in ["libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.12.9"] {
            std::fs::write(directory.join(file), "").unwrap();
        }
        assert_eq!(newest(&directory, "libnvrtc.so."), Some(directory.join("libnvrtc.so.13")));
        assert_eq!(newest(&directory, "libcublasLt.so."), None);
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn wheels_are_found_by_the_python_of_the_path_and_drivers_where_containers_put_them() {
        let root = std::env::temp_dir().join(format!("mixfleet-cuda-pythons-{}", std::process::id()));
        let packages =
            |environment: &str| root.join(environment).join("lib/python3.12/site-packages/nvidia/cu13/lib");
        let bin = |environment: &str| root.join(environment).join("bin");
        for environment in ["opt/torch/.venv", "opt/conda", "linked"] {
            std::fs::create_dir_all(packages(environment)).unwrap();
            std::fs::create_dir_all(bin(environment)).unwrap();
        }
        std::fs::write(bin("opt/torch/.venv").join("python3"), "").unwrap();
        std::fs::write(bin("linked").join("python3"), "").unwrap();
        std::fs::create_dir_all(root.join("links")).unwrap();
        std::os::unix::fs::symlink("../linked/bin/python3", root.join("links/python3")).unwrap();
        let path = std::env::join_paths([bin("opt/torch/.venv"), root.join("absent"), root.join("links")]);
        let environment = |name: &str| match name {
            "PATH" => path.as_ref().ok().cloned(),
            "CONDA_PREFIX" => Some(root.join("opt/conda").into_os_string()),
            _ => None,
        };
        let found = directories(&environment);
        let wheels: Vec<_> =
            found.iter().filter(|d| d.starts_with(&root)).map(|d| d.canonicalize()).collect();
        let expected =
            ["opt/conda", "opt/torch/.venv", "linked"].map(|name| packages(name).canonicalize().unwrap());
        assert_eq!(wheels.into_iter().map(|d| d.unwrap()).collect::<Vec<_>>(), expected);
        for driver in DRIVER_DIRECTORIES {
            assert!(found.contains(&PathBuf::from(driver)), "{found:?}");
        }
        assert_eq!(
            directories(&|name| (name == SEARCH_VARIABLE).then(|| "/a:/b".into()))[..2],
            ["/a", "/b"].map(PathBuf::from)
        );
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_panic_becomes_an_error() {
        let error = guarded("a test", || -> Result<()> { panic!("Missing symbol cuNothing") }).unwrap_err();
        assert!(error.detail.contains("cuNothing") && error.kind == ErrorKind::Unsupported, "{error}");
    }
}
