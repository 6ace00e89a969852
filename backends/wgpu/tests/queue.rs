//! Queues and memory: what the conformance suite takes for granted.

use mixfleet_hal::random::bits;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, ErrorKind, OpSig, Slice};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_wgpu::{AdapterOverrides, WgpuBackend, WgpuDevice};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

fn device() -> Option<WgpuDevice> {
    match WgpuBackend.probe() {
        Ok(_) => Some(WgpuDevice::open(0, AdapterOverrides::default()).unwrap()),
        Err(absent) => {
            eprintln!("SKIPPED: no wgpu device: {absent}");
            None
        }
    }
}

fn gemm(m: u32, n: u32, k: u32, dtype: DType) -> OpSig {
    OpSig::Gemm { m, n, k, x: dtype, weight: dtype, out: dtype, bias: false, accumulate: false }
}

fn fill(to: &Slice, word: u32) -> Cmd {
    Cmd::new(OpSig::Fill { bytes: to.bytes, word }, std::slice::from_ref(to)).unwrap()
}

#[test]
fn foreign_memory_is_refused_and_the_queue_goes_on() {
    let Some(device) = device() else { return };
    let own = device.alloc(64, BufferUsage::Activations).unwrap();
    let foreign = ReferenceDevice::default().alloc(64, BufferUsage::Activations).unwrap();
    assert_eq!(device.write(&foreign, &[0; 64]).unwrap_err().kind, ErrorKind::Invalid);
    let mut queue = device.queue().unwrap();
    let copy = Cmd::new(OpSig::Copy { bytes: 64 }, &[own.clone(), foreign]).unwrap();
    let error = queue.submit(&[copy]).unwrap_err();
    assert!(error.detail.contains("another device"), "{error}");
    let ticket = queue.submit(&[fill(&own, 7)]).unwrap();
    queue.wait(ticket, LONG).unwrap();
    let mut got = [0; 64];
    device.read(&own, &mut got).unwrap();
    assert_eq!(got.to_vec(), 7u32.to_le_bytes().repeat(16));
}

#[test]
fn a_wait_that_is_over_can_be_repeated() {
    let Some(device) = device() else { return };
    let alloc = |elements: u64| device.alloc(elements * 4, BufferUsage::Activations).unwrap();
    let args = [alloc(64 * 128), alloc(128 * 128), alloc(64 * 128)];
    let cmd = Cmd::new(gemm(64, 128, 128, DType::F32), &args).unwrap();
    let mut queue = device.queue().unwrap();
    let graph = queue.record(std::slice::from_ref(&cmd)).unwrap();
    let tickets: Vec<_> = (0..80).map(|_| queue.replay(&graph).unwrap()).collect();
    let last = tickets[tickets.len() - 1];
    if let Err(error) = queue.wait(last, Duration::ZERO) {
        assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
    }
    let once = queue.wait(last, LONG).unwrap();
    assert!(once.time.0 > 0.0);
    assert_eq!(queue.wait(last, Duration::ZERO).unwrap(), once);
    assert!(queue.wait(tickets[3], LONG).is_ok());
    let empty = queue.submit(&[]).unwrap();
    assert_eq!(queue.wait(empty, LONG).unwrap().time.0, 0.0);
    let unknown = mixfleet_hal::Ticket(empty.0 + 1);
    assert_eq!(queue.wait(unknown, LONG).unwrap_err().kind, ErrorKind::Invalid);
}

#[test]
fn results_that_come_along_with_a_batch_are_not_read_once_memory_has_changed() {
    let Some(device) = device() else { return };
    let slice = device.alloc(64, BufferUsage::Activations).unwrap();
    let mut queue = device.queue().unwrap();
    // the largest word, and how often memory was mapped for it
    let read = |slice: &Slice| {
        let before = device.counts().maps;
        let mut bytes = vec![0; slice.bytes as usize];
        device.read(slice, &mut bytes).unwrap();
        let words = bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word));
        (words.max(), device.counts().maps - before)
    };
    let results = std::slice::from_ref(&slice);
    let ticket = queue.submit_for(&[fill(&slice, 7)], results).unwrap();
    queue.wait(ticket, LONG).unwrap();
    assert_eq!(read(&slice), (Some(7), 0));
    assert_eq!(read(&slice.range(8, 4)), (Some(7), 0));
    device.write(&slice.range(8, 4), &8u32.to_le_bytes()).unwrap();
    assert_eq!(read(&slice), (Some(8), 1), "written by the host");
    let first = queue.submit_for(&[fill(&slice, 9)], results).unwrap();
    let second = queue.submit(&[fill(&slice, 10)]).unwrap();
    queue.wait(first, LONG).unwrap();
    queue.wait(second, LONG).unwrap();
    assert_eq!(read(&slice), (Some(10), 1), "written by a later batch");
}

#[test]
fn queues_on_several_threads_do_not_disturb_each_other() {
    let Some(device) = device() else { return };
    let work = |word: u32| {
        let mut queue = device.queue().unwrap();
        let (a, b) =
            (device.alloc(4096, BufferUsage::Kv).unwrap(), device.alloc(4096, BufferUsage::Kv).unwrap());
        for round in 0..30 {
            let word = word * 1000 + round;
            let copy = Cmd::new(OpSig::Copy { bytes: 4096 }, &[a.clone(), b.clone()]).unwrap();
            let ticket = queue.submit(&[fill(&a, word), copy]).unwrap();
            queue.wait(ticket, LONG).unwrap();
            let mut got = vec![0; 4096];
            device.read(&b, &mut got).unwrap();
            assert_eq!(got, word.to_le_bytes().repeat(1024));
        }
    };
    std::thread::scope(|scope| (1..=4).for_each(|word| drop(scope.spawn(move || work(word)))));
}

/// wgpu forbids to read and write one buffer in one dispatch, and to copy within one: the backend copies
/// aside.
#[test]
fn operands_that_share_a_buffer_give_the_same_bits() {
    let Some(device) = device() else { return };
    let gemm = gemm(3, 10, 24, DType::Bf16);
    let add = OpSig::Add { elements: 33, x: DType::F16 };
    let copy = OpSig::Copy { bytes: 132 };
    for sig in [gemm, add, copy] {
        let sizes: Vec<u64> = sig.operands().into_iter().map(device_bytes).collect();
        let contents: Vec<Vec<u8>> = sizes
            .iter()
            .enumerate()
            // small floats in both 16-bit types
            .map(|(i, &n)| {
                (0..n).map(|at| if at % 2 == 1 { 0x3D } else { bits(i as u64, at) as u8 }).collect()
            })
            .collect();
        let result = |args: &[Slice]| {
            for (slice, bytes) in args.iter().zip(&contents) {
                device.write(slice, bytes).unwrap();
            }
            let mut queue = device.queue().unwrap();
            let ticket = queue.submit(&[Cmd::new(sig, args).unwrap()]).unwrap();
            queue.wait(ticket, LONG).unwrap();
            let mut out = vec![0; *sizes.last().unwrap() as usize];
            device.read(&args[args.len() - 1], &mut out).unwrap();
            out
        };
        let apart: Vec<Slice> =
            sizes.iter().map(|&n| device.alloc(n, BufferUsage::Activations).unwrap()).collect();
        let whole = device.alloc(sizes.iter().map(|n| n + 8).sum(), BufferUsage::Activations).unwrap();
        let mut offset = 4;
        let together: Vec<Slice> = sizes
            .iter()
            .map(|&n| {
                offset += n.next_multiple_of(4);
                whole.range(offset - n.next_multiple_of(4), n)
            })
            .collect();
        assert_eq!(result(&together), result(&apart), "{sig:?}");
    }
}

fn device_bytes(operand: mixfleet_hal::Operand) -> u64 {
    match operand.extent {
        mixfleet_hal::op::Extent::Exactly(n) | mixfleet_hal::op::Extent::PagesOf(n) => {
            n * operand.dtype.size_bytes()
        }
    }
}

#[test]
fn bytes_at_any_offset_are_written_and_read() {
    let Some(device) = device() else { return };
    let whole = device.alloc(103, BufferUsage::Staging).unwrap();
    let mut want: Vec<u8> = (0..103).collect();
    device.write(&whole, &want).unwrap();
    for (offset, bytes) in [(0, 1), (1, 1), (3, 2), (5, 3), (7, 1), (9, 14), (99, 4), (102, 1), (50, 0)] {
        let data: Vec<u8> = (0..bytes).map(|i| (200 + i) as u8).collect();
        device.write(&whole.range(offset, bytes), &data).unwrap();
        want[offset as usize..][..bytes as usize].copy_from_slice(&data);
        let mut part = vec![0; bytes as usize];
        device.read(&whole.range(offset, bytes), &mut part).unwrap();
        assert_eq!(part, data, "{bytes} bytes at {offset}");
    }
    let mut got = vec![0; 103];
    device.read(&whole, &mut got).unwrap();
    assert_eq!(got, want);
}

#[test]
fn an_odd_offset_and_too_much_memory_are_refused() {
    let Some(device) = device() else { return };
    let slice = device.alloc(64, BufferUsage::Activations).unwrap();
    let halves = [0, 16, 34].map(|offset| slice.range(offset, 10));
    let add = Cmd::new(OpSig::Add { elements: 5, x: DType::F16 }, &halves).unwrap();
    let error = device.queue().unwrap().submit(&[add]).unwrap_err();
    assert!(error.kind == ErrorKind::Invalid && error.detail.contains("multiples of 4"), "{error}");
    let too_much = device.limits().allocation_bytes_max + 1;
    assert_eq!(device.alloc(too_much, BufferUsage::Kv).unwrap_err().kind, ErrorKind::OutOfMemory);
}

#[test]
fn a_lost_device_says_so_in_every_call() {
    let Some(device) = device() else { return };
    let slice = device.alloc(4096, BufferUsage::Activations).unwrap();
    let mut queue = device.queue().unwrap();
    let graph = queue.record(&[fill(&slice, 1)]).unwrap();
    let before = queue.submit(&[fill(&slice, 1)]).unwrap();
    device.lose();
    let lost = |error: mixfleet_hal::Error| assert_eq!(error.kind, ErrorKind::DeviceLost, "{error}");
    lost(queue.wait(before, LONG).unwrap_err());
    lost(queue.submit(&[fill(&slice, 2)]).unwrap_err());
    lost(queue.submit(&[]).unwrap_err());
    lost(queue.replay(&graph).unwrap_err());
    lost(queue.record(&[fill(&slice, 2)]).map(|_| ()).unwrap_err());
    lost(device.alloc(64, BufferUsage::Kv).unwrap_err());
    lost(device.write(&slice, &[0; 4096]).unwrap_err());
    lost(device.read(&slice, &mut [0; 4096]).unwrap_err());
    lost(device.queue().map(|_| ()).unwrap_err());
    // another opening of the same adapter is not concerned
    let again = WgpuDevice::open(0, AdapterOverrides::default()).unwrap();
    assert!(again.alloc(64, BufferUsage::Kv).is_ok());
}
