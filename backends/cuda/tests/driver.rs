//! The whole backend over a driver that is a library of this test: loading, queues, graphs, transfers,
//! errors.
//!
//! Libraries are found by the loader's path, which a process reads once: each test runs in a child of its
//! own.

#![allow(unsafe_code)] // a request to the fake driver for its counters

mod counts;
mod libraries;
mod peers;
mod pinned;
mod products;

use libraries::Driver;
use mixfleet_cuda::CudaBackend;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, ErrorKind, OpSig};
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const INSIDE: &str = "FAKE_CUDA_DIRECTORY";
const LONG: Duration = Duration::from_secs(60);

/// Runs `test` in a child of this process that finds the libraries.
fn with_fake_driver(name: &str, test: impl FnOnce(Arc<dyn Device>)) {
    in_children(name, Driver::New, &[&[]], test);
}

/// Runs `test` in children of this process that find the libraries, one after the other, each with choices in
/// its environment. They share a cache directory of their own.
fn in_children(name: &str, driver: Driver, choices: &[&[(&str, &str)]], test: impl FnOnce(Arc<dyn Device>)) {
    if std::env::var_os(INSIDE).is_some() {
        return test(CudaBackend.open("cuda").unwrap());
    }
    let Some(directory) = libraries::directory(driver) else {
        return eprintln!("SKIPPED: the fake driver needs g++ on x86-64 Linux");
    };
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "cache-{}-{}",
        name.replace("::", "-"),
        std::process::id()
    ));
    for choices in choices {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("driver::{name}"), "--nocapture"])
            .env(INSIDE, directory)
            .env("LD_LIBRARY_PATH", directory)
            .env("XDG_CACHE_HOME", &cache)
            .envs(choices.iter().copied())
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&child.stdout);
        let said = format!("{stdout}{}", String::from_utf8_lossy(&child.stderr));
        assert!(child.status.success() && stdout.contains("1 passed"), "{choices:?}: {said}");
        eprint!("{said}");
    }
    let _ = std::fs::remove_dir_all(cache);
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

/// With PTX, without early launches, and named so that profiles of both are kept apart.
#[test]
fn a_device_can_be_used_as_an_older_one() {
    const NAME: &str = "a_device_can_be_used_as_an_older_one";
    let children = [
        [("MIXFLEET_CUDA_AS", "8.9"), ("EXPECTED", "9.0 as 8.9"), ("EXPECTED_EARLY", "0")],
        [("MIXFLEET_CUDA_AS", "9.0"), ("EXPECTED", "9.0"), ("EXPECTED_EARLY", "1")],
        [("MIXFLEET_CUDA_EARLY", "0"), ("EXPECTED", "9.0"), ("EXPECTED_EARLY", "0")],
    ];
    in_children(NAME, Driver::New, &children.each_ref().map(|child| &child[..]), |device| {
        let info = device.info();
        let expected = std::env::var("EXPECTED").unwrap();
        let note = info.notes.iter().find(|(key, _)| key == "compute capability");
        assert_eq!(note.map(|(_, value)| value), Some(&expected));
        assert!(info.fingerprint.contains(&format!("/{expected}/")), "{}", info.fingerprint);
        let sig = OpSig::Add { elements: 64, x: DType::F32 };
        let commands = [counts::command(&*device, sig), counts::command(&*device, sig)];
        let calls = counts::calls_of(|| {
            let mut queue = device.queue().unwrap();
            let ticket = queue.submit(&commands).unwrap();
            queue.wait(ticket, LONG).unwrap();
        });
        let early = std::env::var("EXPECTED_EARLY").unwrap();
        assert_eq!(counts::count(&calls, "cuLaunchKernelEx").to_string(), early, "{calls:?}");
    });
}

#[test]
fn a_clock_that_is_held_down_is_told() {
    const NAME: &str = "a_clock_that_is_held_down_is_told";
    let [set, clock, reasons] = ["FAKE_NVML_SET_MHZ", "FAKE_NVML_CLOCK_MHZ", "FAKE_NVML_REASONS"];
    let child = |set_mhz, clock_mhz, why, allowed| {
        [(set, set_mhz), (clock, clock_mhz), (reasons, why), ("EXPECTED_MHZ", allowed)]
    };
    let children = [
        // an idle device's is low without a cause
        child("1755", "345", "1", "1980"),
        child("1200", "345", "1", "1200"),
        // by a limit of power, as is usual under load; by a setting; by heat
        child("1755", "1500", "4", "1980"),
        child("1755", "1410", "2", "1410"),
        child("1755", "900", "0x44", "900"),
    ];
    in_children(NAME, Driver::New, &children.each_ref().map(|child| &child[..]), |device| {
        let health = device.health();
        let number = |name: &str| -> Option<f64> { std::env::var(name).unwrap().parse().ok() };
        assert_eq!(health.clock_mhz_max, Some(1980.0));
        assert_eq!((health.clock_mhz, health.clock_mhz_allowed), (number(clock), number("EXPECTED_MHZ")));
    });
}

/// As in a container whose loader knows neither the driver's directory nor Python's.
#[test]
fn libraries_that_the_loader_does_not_know_are_found_by_their_variable() {
    let name = "libraries_that_the_loader_does_not_know_are_found_by_their_variable";
    if std::env::var_os(INSIDE).is_none() && CudaBackend.probe().is_ok() {
        return eprintln!("SKIPPED: the loader finds an NVIDIA device here");
    }
    let directory = libraries::directory(Driver::New).unwrap_or(Path::new(""));
    let variable = ("MIXFLEET_CUDA_LIBRARIES", directory.to_str().unwrap());
    in_children(name, Driver::New, &[&[("LD_LIBRARY_PATH", ""), variable]], |device| {
        assert_eq!(device.info().name, "Fake GPU");
        let slice = device.alloc(64, BufferUsage::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        let ticket = queue.submit(&[fill(&slice, 7)]).unwrap();
        queue.wait(ticket, LONG).unwrap();
        let mut got = [0; 64];
        device.read(&slice, &mut got).unwrap();
        assert_eq!(got.to_vec(), 7u32.to_le_bytes().repeat(16));
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
            "sample",
            "copy",
            "fill",
        ];
        options.only = names.map(str::to_owned).into();
        let report = run(&*device, &options, &mut |_| {});
        assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
    });
}

/// Each child gets the number of programs that it should compile.
#[test]
fn kernels_are_compiled_once_per_compiler_and_source() {
    const NAME: &str = "kernels_are_compiled_once_per_compiler_and_source";
    const EXPECTED: &str = "EXPECTED_COMPILATIONS";
    let child = |count, minor, damage| [(EXPECTED, count), ("FAKE_NVRTC_MINOR", minor), ("DAMAGE", damage)];
    let children = [
        child("2", "8", ""),
        child("0", "8", "damage"),
        child("2", "8", ""), // a damaged entry is compiled anew
        child("0", "8", ""),
        child("2", "9", ""), // another compiler
        child("0", "8", ""),
    ];
    let choices: Vec<&[(&str, &str)]> = children.iter().map(|child| &child[..]).collect();
    in_children(NAME, Driver::New, &choices, |device| {
        let mut queue = device.queue().unwrap();
        for elements in [64, 63, 64] {
            // whole vectors, single elements
            let add = counts::command(&*device, OpSig::Add { elements, x: DType::F32 });
            let ticket = queue.submit(&[add]).unwrap();
            queue.wait(ticket, LONG).unwrap();
        }
        let compiled = counts::count(&counts::calls("libnvrtc.so.13"), "nvrtcCompileProgram");
        assert_eq!(compiled.to_string(), std::env::var(EXPECTED).unwrap());
        if std::env::var("DAMAGE").unwrap() == "damage" {
            let entries = Path::new(&std::env::var("XDG_CACHE_HOME").unwrap()).join("mixfleet/kernels");
            for entry in std::fs::read_dir(entries).unwrap() {
                let path = entry.unwrap().path();
                let mut bytes = std::fs::read(&path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(path, bytes).unwrap();
            }
        }
    });
}

/// Times come from the device's clock, and nothing panics to find that out.
#[test]
fn a_driver_before_12_8_measures_time_as_well() {
    in_children("a_driver_before_12_8_measures_time_as_well", Driver::Old, &[&[]], |device| {
        let panics = Arc::new(AtomicUsize::new(0));
        let counter = panics.clone();
        std::panic::set_hook(Box::new(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
        }));
        let slice = device.alloc(64, BufferUsage::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        for word in 0..3 {
            let ticket = queue.submit(&[fill(&slice, word)]).unwrap();
            assert_eq!(queue.wait(ticket, LONG).unwrap().clock, ClockKind::Device);
        }
        let _ = std::panic::take_hook();
        assert_eq!(panics.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn transfers_of_any_length_arrive() {
    with_fake_driver("transfers_of_any_length_arrive", |device| {
        // below, at and above the pinned halves of 4 MiB, and several halves
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
        // a queue has scratch of its own once it computes
        let mut queue = device.queue().unwrap();
        queue.submit(&[fill(&held, 0)]).unwrap();
        assert_eq!(before - free(), f64::from(100 << 20));
        let add = counts::command(&*device, OpSig::Add { elements: 64, x: DType::F32 });
        let with_operands = free();
        queue.submit(std::slice::from_ref(&add)).unwrap();
        assert_eq!(with_operands - free(), f64::from(64 << 20));
        drop((held, queue, add));
        assert_eq!(free(), before);
    });
}

#[test]
fn the_memory_of_a_graph_is_told_and_given_back() {
    with_fake_driver("the_memory_of_a_graph_is_told_and_given_back", |device| {
        let slice = device.alloc(4096, BufferUsage::Activations).unwrap();
        let mut queue = device.queue().unwrap();
        let free = || device.memory_free().unwrap().0;
        let before = free();
        let graph = queue.record(&[fill(&slice, 1), fill(&slice, 2)]).unwrap();
        assert_eq!((graph.memory_bytes(), before - free()), (2 * 4096, 8192.0));
        let alone = queue.record(&[fill(&slice, 1)]).unwrap();
        assert_eq!(alone.memory_bytes(), 0, "one command needs no graph");
        drop(graph);
        assert_eq!(free(), before);
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
