//! The whole backend over a driver that is a library of this test: loading, queues, graphs, transfers, errors.
//!
//! Libraries are found by the loader's path, which a process reads once: each test runs in a child of its own.

use mixfleet_cuda::CudaBackend;
use mixfleet_hal::{Backend, Cmd, DType, Device, ErrorKind, OpSig, Role};
use mixfleet_hwtests::cases::{Case, Spread};
use mixfleet_hwtests::{Entry, Level, Options, Outcome, Verdict, attempt, run};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const INSIDE: &str = "FAKE_CUDA_DIRECTORY";
const LONG: Duration = Duration::from_secs(60);

/// The directory of the libraries; `None` where there is no compiler.
fn libraries() -> Option<&'static Path> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY.get_or_init(compiled).as_deref()
}

/// Compiles the libraries, unless an earlier run did.
fn compiled() -> Option<PathBuf> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return None;
    }
    let (driver, blas) = (include_str!("driver/fake.cpp"), include_str!("driver/blas.cpp"));
    let shim = include_str!("emulator/shim.h");
    let mut hasher = DefaultHasher::new();
    (driver, blas, shim).hash(&mut hasher);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{:016x}", hasher.finish()));
    std::fs::create_dir_all(&directory).unwrap();
    let write = |name: &str, text: &str| {
        // other processes read it meanwhile
        let part = directory.join(format!("{}.{name}", std::process::id()));
        std::fs::write(&part, text).and_then(|()| std::fs::rename(part, directory.join(name))).unwrap();
        directory.join(name)
    };
    write("shim.h", shim);
    write("blas.cpp", blas);
    let source = write("fake.cpp", driver);
    const NAMES: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublasLt.so"];
    if NAMES.iter().all(|name| directory.join(name).exists()) {
        return Some(directory);
    }
    let part = directory.join(format!("{}.so", std::process::id()));
    let output = Command::new("g++")
        .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-o"])
        .args([&part, &source])
        .output()
        .ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in NAMES {
        // three files, three instances: none shares the others' state
        let copy = part.with_extension(name);
        std::fs::copy(&part, &copy).and_then(|_| std::fs::rename(copy, directory.join(name))).unwrap();
    }
    std::fs::remove_file(part).unwrap();
    Some(directory)
}

/// Runs `test` in a child of this process that finds the libraries.
fn with_fake_driver(name: &str, test: impl FnOnce(Arc<dyn Device>)) {
    if std::env::var_os(INSIDE).is_some() {
        return test(CudaBackend.open("cuda").unwrap());
    }
    let Some(directory) = libraries() else {
        return eprintln!("SKIPPED: the fake driver needs g++ on x86-64 Linux");
    };
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, directory)
        .env("LD_LIBRARY_PATH", directory)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&child.stdout);
    let said = format!("{stdout}{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && stdout.contains("1 passed"), "{said}");
}

fn fill(to: &mixfleet_hal::Slice, word: u32) -> Cmd {
    Cmd::new(OpSig::Fill { bytes: to.bytes, word }, std::slice::from_ref(to)).unwrap()
}

#[test]
fn a_device_tells_what_it_is() {
    with_fake_driver("a_device_tells_what_it_is", |device| {
        let info = &CudaBackend.probe().unwrap()[0];
        assert_eq!(info, device.info());
        assert_eq!((info.id.as_str(), info.name.as_str(), info.compute_units), ("cuda:0", "Fake GPU", 2));
        let note = |key: &str| info.notes.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str());
        assert_eq!(note("pci"), Some("0000:1a:00.0"));
        assert_eq!(note("uuid"), Some("GPU-00112233-4455-6677-8899-aabbccddeeff"));
        assert_eq!((note("compute capability"), note("driver")), (Some("9.0"), Some("12.8")));
        assert_eq!(CudaBackend.open("cuda:1").err().unwrap().kind, ErrorKind::Invalid);
    });
}

/// Memory, order, bad indices, replays, and kernels of each kind, through the real queue.
#[test]
fn the_backend_conforms() {
    with_fake_driver("the_backend_conforms", |device| {
        let mut options = Options::new(Level::Quick);
        let names = [
            "memory",
            "import",
            "order",
            "index_out_of_range",
            "partition_by_tokens",
            "argmax",
            "copy",
            "fill",
        ];
        options.only = names.map(str::to_owned).into();
        let report = run(&*device, &options, &mut |_| {});
        assert_eq!(report.verdict(), Verdict::Pass, "{report}");
    });
}

/// Shapes that go to cuBLASLt, and rows alone, which do not.
#[test]
fn large_products_conform() {
    use DType::{Bf16, F8E4m3, F16, F32};
    with_fake_driver("large_products_conform", |device| {
        for (x, out) in [(Bf16, Bf16), (Bf16, F32), (F16, F16), (F32, F32), (F8E4m3, Bf16)] {
            for (bias, accumulate) in [(false, false), (x == out, false), (false, true), (x == out, true)] {
                let sig = OpSig::Gemm { m: 24, n: 48, k: 64, x, weight: x, out, bias, accumulate };
                let case = Case { sig, spread: Spread::Even, seed: 3 };
                let report = attempt(&*device, &Entry { name: "gemm", case: Some(case) }, LONG);
                assert_eq!(report.outcome, Outcome::Pass, "{sig:?}");
            }
        }
    });
}

#[test]
fn transfers_of_any_length_arrive() {
    with_fake_driver("transfers_of_any_length_arrive", |device| {
        // below, at and above the pinned halves of 4 MiB, and several of them
        for bytes in [1, 4 << 20, (4 << 20) + 1, 13_000_003u64] {
            for role in [Role::Weights, Role::Staging] {
                let slice = device.alloc(bytes, role).unwrap();
                let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect();
                device.write(&slice, &data).unwrap();
                let mut got = vec![0; data.len()];
                device.read(&slice, &mut got).unwrap();
                assert!(got == data, "{bytes} bytes of {role:?}");
            }
        }
        assert_eq!(device.alloc(2 << 30, Role::Kv).unwrap_err().kind, ErrorKind::OutOfMemory);
    });
}

#[test]
fn reads_and_writes_wait_for_the_batches_that_use_the_buffer() {
    with_fake_driver("reads_and_writes_wait_for_the_batches_that_use_the_buffer", |device| {
        let slice = device.alloc(4096, Role::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        let graph = queue.record(&[fill(&slice, 1), fill(&slice, 2)]).unwrap();
        let mut got = vec![0; 4096];
        queue.submit(&[fill(&slice, 7)]).unwrap();
        device.read(&slice, &mut got).unwrap();
        assert_eq!(got, 7u32.to_le_bytes().repeat(1024), "a recording runs nothing");
        queue.replay(&graph).unwrap();
        device.read(&slice, &mut got).unwrap();
        assert_eq!(got, 2u32.to_le_bytes().repeat(1024));
        queue.replay(&graph).unwrap();
        device.write(&slice, &[9; 4096]).unwrap();
        device.read(&slice, &mut got).unwrap();
        assert_eq!(got, [9; 4096], "the replay ran before the write");
        let mut other = device.queue().unwrap();
        assert_eq!(other.replay(&graph).unwrap_err().kind, ErrorKind::Invalid);
    });
}

#[test]
fn tickets_can_be_waited_for_late_again_and_without_work() {
    with_fake_driver("tickets_can_be_waited_for_late_again_and_without_work", |device| {
        let slice = device.alloc(64, Role::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        let tickets: Vec<_> = (0..20).map(|word| queue.submit(&[fill(&slice, word)]).unwrap()).collect();
        assert_eq!(queue.wait(tickets[19], Duration::ZERO).unwrap_err().kind, ErrorKind::Timeout);
        let once = queue.wait(tickets[19], LONG).unwrap();
        assert_eq!(queue.wait(tickets[19], Duration::ZERO).unwrap(), once);
        assert!(queue.wait(tickets[3], LONG).unwrap().time.0 > 0.0);
        let empty = queue.submit(&[]).unwrap();
        assert_eq!(queue.wait(empty, LONG).unwrap().time.0, 0.0);
        let unknown = mixfleet_hal::Ticket(empty.0 + 1);
        assert_eq!(queue.wait(unknown, LONG).unwrap_err().kind, ErrorKind::Invalid);
    });
}

#[test]
fn a_fault_loses_the_device_for_good() {
    with_fake_driver("a_fault_loses_the_device_for_good", |device| {
        let slice = device.alloc(64, Role::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        let good = queue.submit(&[fill(&slice, 1)]).unwrap();
        queue.wait(good, LONG).unwrap();
        let bad = queue.submit(&[fill(&slice, 0x0BAD_ADD7)]).unwrap();
        let error = queue.wait(bad, LONG).unwrap_err();
        assert_eq!(error.kind, ErrorKind::DeviceLost, "{error}");
        assert!(error.detail.contains("illegal memory access"), "{error}");
        assert!(queue.wait(good, LONG).is_err());
        for error in [
            queue.submit(&[fill(&slice, 1)]).unwrap_err(),
            device.alloc(64, Role::Kv).unwrap_err(),
            device.read(&slice, &mut [0; 64]).unwrap_err(),
            device.queue().err().unwrap(),
        ] {
            assert_eq!(error.kind, ErrorKind::DeviceLost, "{error}");
        }
    });
}

/// A product and a sum in one graph, replayed with other bytes.
#[test]
fn a_graph_sees_new_bytes_at_the_same_addresses() {
    with_fake_driver("a_graph_sees_new_bytes_at_the_same_addresses", |device| {
        let (m, n, k) = (2, 8, 16);
        let f32s = DType::F32;
        let sig =
            OpSig::Gemm { m, n, k, x: f32s, weight: DType::Bf16, out: f32s, bias: false, accumulate: false };
        let alloc = |bytes: u32| device.alloc(bytes.into(), Role::Activations).unwrap();
        let (x, weight, out, sum) = (alloc(m * k * 4), alloc(n * k * 2), alloc(m * n * 4), alloc(m * n * 4));
        device.write(&weight, &[0x80, 0x3F].repeat((n * k) as usize)).unwrap(); // ones
        let elements = u64::from(m * n);
        let cmds = [
            Cmd::new(sig, &[x.clone(), weight, out.clone()]).unwrap(),
            Cmd::new(OpSig::Add { elements, x: f32s }, &[out.clone(), out, sum.clone()]).unwrap(),
        ];
        let mut queue = device.queue().unwrap();
        let graph = queue.record(&cmds).unwrap();
        for value in [1.0f32, -3.0] {
            device.write(&x, &value.to_le_bytes().repeat((m * k) as usize)).unwrap();
            let ticket = queue.replay(&graph).unwrap();
            queue.wait(ticket, LONG).unwrap();
            let mut got = vec![0; (m * n * 4) as usize];
            device.read(&sum, &mut got).unwrap();
            assert_eq!(got, (value * 32.0).to_le_bytes().repeat((m * n) as usize));
        }
    });
}
