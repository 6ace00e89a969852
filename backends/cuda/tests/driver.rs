//! The whole backend over a driver that is a library of this test: loading, queues, graphs, transfers,
//! errors.
//!
//! Libraries are found by the loader's path, which a process reads once: each test runs in a child of its
//! own.

#![allow(unsafe_code)] // one call asks the fake driver what it counted

mod counts;

use mixfleet_cuda::CudaBackend;
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, ErrorKind, OpSig, Result};
use mixfleet_hwtests::cases::{Case, TokenSpread};
use mixfleet_hwtests::{CheckOutcome, Entry, SuiteLevel, SuiteOptions, SuiteVerdict, attempt, run};
use mixfleet_wire::HostRegion;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
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
        .args(["--exact", &format!("driver::{name}"), "--nocapture"])
        .env(INSIDE, directory)
        .env("LD_LIBRARY_PATH", directory)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&child.stdout);
    let said = format!("{stdout}{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && stdout.contains("1 passed"), "{said}");
    eprint!("{said}");
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
        let mut options = SuiteOptions::new(SuiteLevel::Quick);
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
        assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
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
                let case = Case { sig, spread: TokenSpread::Even, seed: 3 };
                let report = attempt(&*device, &Entry { name: "gemm", case: Some(case) }, LONG);
                assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
            }
        }
    });
}

#[test]
fn transfers_of_any_length_arrive() {
    with_fake_driver("transfers_of_any_length_arrive", |device| {
        // below, at and above the pinned halves of 4 MiB, and several of them
        for bytes in [1, 4 << 20, (4 << 20) + 1, 13_000_003u64] {
            for role in [BufferUsage::Weights, BufferUsage::Staging] {
                let slice = device.alloc(bytes, role).unwrap();
                let data: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect();
                device.write(&slice, &data).unwrap();
                let mut got = vec![0; data.len()];
                device.read(&slice, &mut got).unwrap();
                assert!(got == data, "{bytes} bytes of {role:?}");
            }
        }
        assert_eq!(device.alloc(3 << 30, BufferUsage::Kv).unwrap_err().kind, ErrorKind::OutOfMemory);
    });
}

#[test]
fn free_memory_is_what_the_driver_has_left() {
    with_fake_driver("free_memory_is_what_the_driver_has_left", |device| {
        let free = || device.memory_free().expect("a driver that tells").0;
        let before = free();
        assert_eq!(before, 2.0 * f64::from(1 << 30), "nothing is allocated yet");
        let held = device.alloc(100 << 20, BufferUsage::Kv).unwrap();
        assert_eq!(before - free(), f64::from(100 << 20));
        // a queue has scratch of its own
        let queue = device.queue().unwrap();
        assert_eq!(before - free(), f64::from(164 << 20));
        drop((held, queue));
        assert_eq!(free(), before);
    });
}

/// Copies to and from pinned memory of others and of the driver's own, since the last call; ranges of others
/// that are pinned.
fn counted() -> [u64; 3] {
    static BEFORE: Mutex<[u64; 2]> = Mutex::new([0; 2]);
    let mut counts = [0; 3];
    // SAFETY: the library is the one that the backend loaded; the function fills three numbers.
    unsafe {
        let driver = libloading::Library::new("libcuda.so").unwrap();
        let count: libloading::Symbol<unsafe extern "C" fn(*mut u64) -> i32> =
            driver.get(b"fake_count").unwrap();
        assert_eq!(count(counts.as_mut_ptr()), 0);
    }
    let mut before = BEFORE.lock().unwrap();
    let [others, own, ranges] = counts;
    let since = [others - before[0], own - before[1], ranges];
    *before = [others, own];
    since
}

#[test]
fn copies_of_pinned_memory_are_direct_until_it_is_unpinned() {
    with_fake_driver("copies_of_pinned_memory_are_direct_until_it_is_unpinned", |device| {
        // three halves long
        const BYTES: u64 = 9 << 20;
        let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
        let near: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        let mut patterns = 1..;
        let mut there_and_back = |offset: u64, bytes: u64| {
            let seed: u64 = patterns.next().unwrap();
            let sent: Vec<u8> = (0..bytes).map(|i| (i * 7 + i / 251 + seed) as u8).collect();
            near.store(offset, &sent).unwrap();
            let part = far.range(BYTES - bytes, bytes);
            near.view(offset, bytes, &mut |data| device.write(&part, data).unwrap()).unwrap();
            near.store(offset, &vec![0; bytes as usize]).unwrap();
            near.update(offset, bytes, &mut |data| device.read(&part, data).unwrap()).unwrap();
            near.view(offset, bytes, &mut |data| assert!(data == sent, "{bytes} bytes at {offset}")).unwrap();
        };
        counted();
        there_and_back(0, BYTES);
        assert_eq!(counted(), [0, 6, 0]);

        let pinned = device.pin(near.clone()).unwrap().expect("memory with an address");
        assert_eq!(device.pin(near.clone()).err().unwrap().kind, ErrorKind::Other, "pinned twice");
        for (offset, bytes) in [(0, BYTES), (0, 1), (BYTES - 1, 1), (4095, 5 << 20)] {
            there_and_back(offset, bytes);
            assert_eq!(counted(), [2, 0, 1], "{bytes} bytes at {offset}");
        }
        drop(pinned);
        assert_eq!(counted(), [0, 0, 0]);
        there_and_back(0, BYTES);
        assert_eq!(counted(), [0, 6, 0]);
        assert_eq!(Arc::strong_count(&near), 1);
    });
}

/// The first half of a region is pinned: what lies across its end goes through the halves, and so does what
/// is beside it.
#[test]
fn copies_across_the_end_of_pinned_memory_are_right() {
    struct Part(Arc<HostRegion>, u64);
    impl SharedMemory for Part {
        fn size_bytes(&self) -> u64 {
            self.1
        }
        fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
            self.0.view(offset, bytes, look)
        }
        fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
            self.0.update(offset, bytes, change)
        }
        fn mapping(&self) -> Option<Mapping> {
            Some(Mapping { bytes: self.1, ..self.0.mapping()? })
        }
    }
    with_fake_driver("copies_across_the_end_of_pinned_memory_are_right", |device| {
        const BYTES: u64 = 1 << 20;
        let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
        let near = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        let _pinned = device.pin(Arc::new(Part(near.clone(), BYTES / 2))).unwrap().unwrap();
        let data: Vec<u8> = (0..BYTES).map(|i| (i * 3 + i / 251) as u8).collect();
        near.store(0, &data).unwrap();
        for (offset, bytes, direct) in
            [(0, BYTES, 0), (BYTES / 2 - 1, 2, 0), (BYTES / 2, 7, 0), (BYTES / 2 - 9, 9, 1)]
        {
            let part = far.range(offset, bytes);
            counted();
            near.view(offset, bytes, &mut |data| device.write(&part, data).unwrap()).unwrap();
            assert_eq!(counted(), [direct, 1 - direct, 1], "{bytes} bytes at {offset}");
        }
        near.store(0, &vec![0; BYTES as usize]).unwrap();
        near.update(0, BYTES, &mut |data| device.read(&far, data).unwrap()).unwrap();
        near.view(0, BYTES, &mut |got| assert!(got == data)).unwrap();
    });
}

/// Unpinned by one thread while others copy: the fake fails if a copy is under way.
#[test]
fn memory_may_be_pinned_and_unpinned_under_copies() {
    with_fake_driver("memory_may_be_pinned_and_unpinned_under_copies", |device| {
        const BYTES: u64 = 4096;
        let near = Arc::new(HostRegion::new(BYTES as usize).unwrap());
        std::thread::scope(|scope| {
            for word in [3u8, 5] {
                let (device, near) = (&device, &near);
                scope.spawn(move || {
                    let far = device.alloc(BYTES, BufferUsage::Kv).unwrap();
                    device.write(&far, &[word; BYTES as usize]).unwrap();
                    for _ in 0..500 {
                        let mut read = |data: &mut [u8]| {
                            device.read(&far, data).unwrap();
                            assert!(data.iter().all(|&byte| byte == word));
                        };
                        near.update(0, BYTES, &mut read).unwrap();
                    }
                });
            }
            for _ in 0..500 {
                drop(device.pin(near.clone()).unwrap().unwrap());
            }
        });
        let [direct, staged, pinned] = counted();
        assert_eq!((direct + staged, pinned), (1002, 0));
    });
}

#[test]
fn what_cannot_be_pinned_harms_nothing() {
    with_fake_driver("what_cannot_be_pinned_harms_nothing", |device| {
        // the fake refuses this length
        let refused = Arc::new(HostRegion::new(0x0BAD).unwrap());
        assert_eq!(device.pin(refused.clone()).err().unwrap().kind, ErrorKind::Unsupported);
        assert!(device.pin(Arc::new(HostRegion::new(0).unwrap())).unwrap().is_none());
        let far = device.alloc(0x0BAD, BufferUsage::Kv).unwrap();
        refused.update(0, 0x0BAD, &mut |data| data.fill(5)).unwrap();
        refused.view(0, 0x0BAD, &mut |data| device.write(&far, data).unwrap()).unwrap();
        let mut got = vec![0; 0x0BAD];
        device.read(&far, &mut got).unwrap();
        assert_eq!((got, counted()), (vec![5; 0x0BAD], [0, 2, 0]));
        // memory and its pinning may outlive the device
        let memory: Arc<dyn SharedMemory> = Arc::new(HostRegion::new(4096).unwrap());
        let pinned = device.pin(memory.clone()).unwrap().unwrap();
        drop((far, device));
        drop(memory);
        assert_eq!(counted()[2], 1);
        drop(pinned);
        assert_eq!(counted()[2], 0);
    });
}

#[test]
fn reads_and_writes_wait_for_the_batches_that_use_the_buffer() {
    with_fake_driver("reads_and_writes_wait_for_the_batches_that_use_the_buffer", |device| {
        let slice = device.alloc(4096, BufferUsage::Activations).unwrap();
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
        let slice = device.alloc(64, BufferUsage::Activations).unwrap();
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
        let slice = device.alloc(64, BufferUsage::Activations).unwrap();
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
            device.alloc(64, BufferUsage::Kv).unwrap_err(),
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
        let alloc = |bytes: u32| device.alloc(bytes.into(), BufferUsage::Activations).unwrap();
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
