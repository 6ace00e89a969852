//! Compiled kernels that the driver gives away, on disk between processes.

use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, OpSig};
use mixfleet_hwtests::{SuiteLevel, cases};
use mixfleet_wgpu::{AdapterOverrides, WgpuBackend, WgpuDevice};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Opens the device, runs one command of each kind on zeroes and returns what a product gave, with how long
/// that took.
fn start(kernels: Option<&Path>) -> (Vec<u8>, Duration) {
    let began = Instant::now();
    let device =
        WgpuDevice::open_keeping(0, AdapterOverrides::default(), kernels.map(PathBuf::from)).unwrap();
    let mut queue = device.queue().unwrap();
    let sizes = [2u32, 4, 8, 16];
    let mut kinds = std::collections::BTreeSet::new();
    let others = cases::cases(SuiteLevel::Quick, &device.limits()).into_iter().map(|case| case.sig);
    let products = sizes.map(|m| {
        let x = DType::F32;
        OpSig::Gemm { m, n: 8, k: 8, x, weight: x, out: x, bias: false, accumulate: false }
    });
    let mut product = Vec::new();
    for sig in others.filter(|sig| kinds.insert(sig.name())).chain(products) {
        if device.support(&sig) == mixfleet_hal::Support::No {
            continue;
        }
        let args: Vec<_> = sig
            .operands()
            .iter()
            .filter_map(|operand| match operand.extent {
                mixfleet_hal::op::Extent::Exactly(n) => Some(operand.dtype.size_bytes() * n),
                mixfleet_hal::op::Extent::PagesOf(_) => None,
            })
            .map(|bytes| {
                let slice = device.alloc(bytes.max(4), BufferUsage::Activations).unwrap().range(0, bytes);
                device.write(&slice, &vec![0x3f; bytes as usize]).unwrap();
                slice
            })
            .collect();
        if args.len() < sig.operands().len() || sig.operands().iter().any(|o| o.dtype == DType::U32) {
            continue;
        }
        let ticket = queue.submit(&[Cmd::new(sig, &args).unwrap()]).unwrap();
        queue.wait(ticket, Duration::from_secs(600)).unwrap();
        if matches!(sig, OpSig::Gemm { .. }) {
            let out = args.last().unwrap();
            product = vec![0; out.bytes as usize];
            device.read(out, &mut product).unwrap();
        }
    }
    (product, began.elapsed())
}

#[test]
fn compiled_kernels_are_kept_and_damaged_ones_are_harmless() {
    if let Err(absent) = WgpuBackend.probe() {
        return eprintln!("SKIPPED: no wgpu device: {absent}");
    }
    let directory = std::env::temp_dir().join(format!("mixfleet-wgpu-kept-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&directory);
    let files = || -> Vec<PathBuf> {
        std::fs::read_dir(&directory)
            .map_or(Vec::new(), |found| found.flatten().map(|file| file.path()).collect())
    };
    let (expected, without) = start(None);
    assert!(files().is_empty());
    let (cold, first) = start(Some(&directory));
    assert_eq!(cold, expected);
    let [file] = &files()[..] else { return eprintln!("SKIPPED: the driver gives no compiled kernels") };
    let whole = std::fs::read(file).unwrap();
    let (warm, second) = start(Some(&directory));
    assert_eq!(warm, expected);
    eprintln!("{} bytes; without {without:?}, first {first:?}, second {second:?}", whole.len());
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [&whole[..whole.len() / 2], &flipped, b"", b"something else"] {
        std::fs::write(file, damaged).unwrap();
        let (product, _) = start(Some(&directory));
        assert_eq!(product, expected);
        assert_eq!(files().len(), 1, "one whole file in its place");
        assert_ne!(std::fs::read(file).unwrap(), damaged);
    }
    std::fs::remove_dir_all(directory).unwrap();
}
