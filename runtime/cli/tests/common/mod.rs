//! What the binary's tests share.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

#[cfg(feature = "fleet")]
pub(crate) mod members;
pub(crate) mod server;
mod standin;

use mixfleet_hal::{Backend, Device};
use mixfleet_runtime::model::ModelConfig;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// The fixture checkpoints of families that are served.
pub(crate) fn fixtures() -> Vec<PathBuf> {
    for (fixture, why) in refused_fixtures() {
        println!("SKIPPED: {}: {why}", fixture.file_name().unwrap_or_default().display());
    }
    all_fixtures().into_iter().filter(|path| ModelConfig::open(path).is_ok()).collect()
}

/// The fixture checkpoint of this name, one of the served ones.
pub(crate) fn fixture(name: &str) -> PathBuf {
    let mut served = all_fixtures().into_iter();
    served.find(|path| path.ends_with(name)).unwrap_or_else(|| panic!("there is no fixture '{name}'"))
}

/// The fixture checkpoints that are not served, and why.
pub(crate) fn refused_fixtures() -> Vec<(PathBuf, String)> {
    let refused = |path: PathBuf| {
        let error = ModelConfig::open(&path).err()?.to_string();
        Some((path, error))
    };
    all_fixtures().into_iter().filter_map(refused).collect()
}

/// A checkpoint in `directory` of a family that is not served: its configuration, which is all that a refusal
/// reads.
pub(crate) fn unserved(directory: &Path) -> PathBuf {
    let checkpoint = directory.join("of-no-family");
    std::fs::create_dir_all(&checkpoint).unwrap();
    let config = std::fs::read_to_string(fixture("llama-gqa-f32").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["model_type"] = "of_no_family".into();
    config["architectures"] = vec!["OfNoFamilyForCausalLM"].into();
    std::fs::write(checkpoint.join("config.json"), config.to_string()).unwrap();
    checkpoint
}

/// The fixtures beside this clone, or generated checkpoints where it has none. `MIXFLEET_FIXTURES` names
/// another directory; one that is not there shows what a clone without fixtures tests.
fn all_fixtures() -> Vec<PathBuf> {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/fixtures");
        let root = std::env::var_os("MIXFLEET_FIXTURES").map_or_else(beside, PathBuf::from);
        if root.is_dir() {
            return root;
        }
        println!("no fixture checkpoints at {}: generated ones stand in", root.display());
        standin::directory()
    });
    let entries = std::fs::read_dir(root).unwrap();
    let directories = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let mut found: Vec<_> = directories.flat_map(gguf_files_or_itself).collect();
    found.sort();
    found
}

/// The GGUF files in a directory, each of which is a checkpoint, or the directory if there are none.
fn gguf_files_or_itself(directory: PathBuf) -> Vec<PathBuf> {
    let inside = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = inside.filter(|path| path.extension().is_some_and(|end| end == "gguf")).collect();
    if files.is_empty() { vec![directory] } else { files }
}

/// The golden outputs of a checkpoint; those of `model-NAME.gguf` are in `golden-NAME.json`.
pub(crate) fn golden(fixture: &Path) -> Value {
    let file = match fixture
        .file_stem()
        .and_then(|stem| stem.to_str())
        .and_then(|stem| stem.strip_prefix("model"))
    {
        Some(name) if fixture.is_file() => fixture.with_file_name(format!("golden{name}.json")),
        _ => fixture.join("golden.json"),
    };
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The CPU, and an OpenCL device where this build and machine have one.
pub(crate) fn devices() -> Vec<Arc<dyn Device>> {
    let mut devices = vec![mixfleet_cpu::CpuBackend.open("cpu").unwrap()];
    match mixfleet_opencl::OpenClBackend.probe() {
        Ok(found) => devices.push(mixfleet_opencl::OpenClBackend.open(&found[0].id).unwrap()),
        Err(absent) => println!("SKIPPED: OpenCL placements: {absent}"),
    }
    devices
}

/// What a test leaves on disk, removed when its thread ends.
struct Home(PathBuf);

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

thread_local! {
    static HOME: Home = {
        static TESTS: AtomicU32 = AtomicU32::new(0);
        let number = TESTS.fetch_add(1, Ordering::Relaxed);
        Home(std::env::temp_dir().join(format!("mixfleet-cli-{}-{number}", std::process::id())))
    };
}

/// An empty directory for this thread's test, removed with it.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let directory = HOME.with(|home| home.0.join(name));
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

/// The directory of calibrations and other caches: shared by a run of all tests, each of which is a process
/// that would otherwise measure every device; without nextest, for this test alone.
fn cache() -> PathBuf {
    match std::env::var("NEXTEST_RUN_ID") {
        Ok(run) => Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache-{run}")),
        Err(_) => HOME.with(|home| home.0.join(".cache")),
    }
}

/// The binary, with what it caches kept for this run of tests, and its data for this test alone.
pub(crate) fn mixfleet() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mixfleet"));
    command.env("XDG_CACHE_HOME", cache());
    command.env("XDG_DATA_HOME", HOME.with(|home| home.0.join(".data")));
    command.env_remove("MIXFLEET_API_KEY");
    command
}

pub(crate) struct Generate<'a> {
    pub(crate) model: &'a Path,
    pub(crate) prompt_ids: &'a [u32],
    pub(crate) max_tokens: u32,
    pub(crate) prefill: &'a str,
    pub(crate) decode: &'a str,
    /// Further arguments.
    pub(crate) further: &'a [&'a str],
}

/// `mixfleet generate` in f32, greedy.
pub(crate) fn generate(request: &Generate<'_>) -> Value {
    let ids: Vec<String> = request.prompt_ids.iter().map(u32::to_string).collect();
    let output = mixfleet()
        .args(["generate", "--json", "--ignore-eos", "--temperature", "0"])
        .args(["--activations", "f32", "--kv-dtype", "f32", "--kv-memory", "0.02"])
        .args(["--max-tokens", &request.max_tokens.to_string(), "--prompt-ids", &ids.join(",")])
        .args(["--prefill", request.prefill, "--decode", request.decode])
        .args(request.further)
        .arg("--model")
        .arg(request.model)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} -> {}: {errors}", request.prefill, request.decode);
    serde_json::from_slice(&output.stdout).unwrap()
}
