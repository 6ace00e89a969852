//! What a device promises beside arithmetic: order, failures, locks, other devices.

use crate::common::reference::bad_decode;
use crate::common::{LONG, Rig, levels};
use mixfleet_cpu::{CpuBackend, isa::Isa};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{
    Backend, BufferUsage, Cmd, CodeKind, DType, Device, ErrorKind, KvShape, OpSig, Quantised, ScaleKind,
    Slice, Ticket, ZeroKind,
};
use std::sync::Arc;
use std::time::Duration;

fn rig() -> Rig {
    levels("cpu").pop().unwrap()
}

fn add(a: &Slice, b: &Slice, out: &Slice) -> Cmd {
    let sig = OpSig::Add { elements: out.bytes / 4, x: DType::F32 };
    Cmd::new(sig, &[a.clone(), b.clone(), out.clone()]).unwrap()
}

fn first(device: &Arc<dyn Device>, slice: &Slice) -> f32 {
    let mut bytes = [0; 4];
    device.read(&slice.range(0, 4), &mut bytes).unwrap();
    f32::from_le_bytes(bytes)
}

#[test]
fn steps_of_a_batch_see_what_earlier_ones_wrote_on_any_worker() {
    for rig in levels("cpu") {
        // small and large: alone on one worker, and shared among all
        for elements in [16u64, 1 << 16] {
            let one: Vec<u8> = 1f32.to_le_bytes().repeat(elements as usize);
            let [a, b, c] = [0; 3].map(|_| rig.upload(DType::F32, &one));
            let small = c.range(0, 16);
            let mut batch = Vec::new();
            for _ in 0..20 {
                batch.push(add(&a, &b, &c)); // c = a + b
                batch.push(add(&c.range(4, 16), &b.range(0, 16), &a.range(0, 16))); // a[0..4] += 2 b
                batch.push(add(&a, &c, &rig.upload(DType::F32, &one)));
                batch.push(
                    Cmd::new(OpSig::Fill { bytes: 16, word: 0 }, std::slice::from_ref(&small)).unwrap(),
                );
            }
            let mut queue = rig.device.queue().unwrap();
            let ticket = queue.submit(&batch).unwrap();
            queue.wait(ticket, LONG).unwrap();
            // after the first round: c[1..5] = [2, 2, 2, 2] -> a[0..4] = 3; then c[1..4] = 4, c[4] = 2, ...
            let mut model = (vec![1f32; elements as usize], vec![1f32; elements as usize]);
            for _ in 0..20 {
                model.1 = model.0.iter().map(|a| a + 1.0).collect();
                for i in 0..4 {
                    model.0[i] = model.1[i + 1] + 1.0;
                }
                model.1[..4].fill(0.0);
            }
            for (slice, expected) in [(&a, &model.0), (&c, &model.1)] {
                let mut bytes = vec![0; slice.bytes as usize];
                rig.device.read(slice, &mut bytes).unwrap();
                let got: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                assert_eq!(&got, expected, "{}", rig.isa);
            }
        }
    }
}

#[test]
fn products_that_pack_one_input_unlike_stay_right() {
    for rig in levels("cpu") {
        let (m, n, k, x) = (60, 70, 64, DType::Bf16);
        let plain = OpSig::Gemm { m, n, k, x, weight: DType::F32, out: x, bias: false, accumulate: false };
        let halves = OpSig::Gemm { m, n, k, x, weight: x, out: x, bias: false, accumulate: false };
        let weight = Quantised::in_rows(CodeKind::I8, 32, ScaleKind::F32, ZeroKind::Middle);
        let codes = OpSig::QuantisedGemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        let input = rig.upload(x, &rig.random(x, m * k));
        let products = [plain, codes, halves, codes, plain].map(|sig| {
            let mut slices = vec![input.clone()];
            for operand in &sig.operands()[1..] {
                let Extent::Exactly(count) = operand.extent else { panic!("of no fixed size") };
                let count = u32::try_from(count).unwrap();
                let words =
                    || (0..count).map(|_| u32::try_from(rig.below(1 << 32)).unwrap()).collect::<Vec<_>>();
                let data = match operand.dtype {
                    DType::U32 => rig.u32s(&words()),
                    dtype => rig.random(dtype, count),
                };
                slices.push(rig.upload(operand.dtype, &data));
            }
            (sig, slices)
        });
        let command = |(sig, slices): &(OpSig, Vec<Slice>)| Cmd::new(*sig, slices).unwrap();
        let outs = || products.each_ref().map(|(_, slices)| bytes(&rig, slices.last().unwrap()));
        let mut queue = rig.device.queue().unwrap();
        for product in &products {
            let ticket = queue.submit(&[command(product)]).unwrap();
            queue.wait(ticket, LONG).unwrap();
        }
        let apart = outs();
        let ticket = queue.submit(&products.each_ref().map(command)).unwrap();
        queue.wait(ticket, LONG).unwrap();
        assert_eq!(outs(), apart, "{}", rig.isa);
        assert_ne!(apart[0], apart[4], "other weights give something else");
    }
}

#[test]
fn projections_of_one_input_share_its_packing_and_stay_right() {
    for rig in levels("cpu") {
        let (m, n, k) = (60, 70, 33);
        let sig = |n| OpSig::Gemm {
            m,
            n,
            k,
            x: DType::F32,
            weight: DType::F32,
            out: DType::F32,
            bias: false,
            accumulate: false,
        };
        let x = rig.upload(DType::F32, &rig.random(DType::F32, m * k));
        let weights = [0; 3].map(|_| rig.upload(DType::F32, &rig.random(DType::F32, n * k)));
        let outs = [0; 4].map(|_| rig.upload(DType::F32, &vec![0; (m * n * 4) as usize]));
        let gemm = |w: &Slice, out: &Slice| Cmd::new(sig(n), &[x.clone(), w.clone(), out.clone()]).unwrap();
        let fill =
            Cmd::new(OpSig::Fill { bytes: x.bytes, word: 1f32.to_bits() }, std::slice::from_ref(&x)).unwrap();
        let mut queue = rig.device.queue().unwrap();
        // apart: each packs for itself
        let mut apart = Vec::new();
        for (w, out) in weights.iter().zip(&outs) {
            let ticket = queue.submit(&[gemm(w, out)]).unwrap();
            queue.wait(ticket, LONG).unwrap();
            apart.push(bytes(&rig, out));
        }
        let batch = [
            gemm(&weights[0], &outs[0]),
            gemm(&weights[1], &outs[1]),
            gemm(&weights[2], &outs[2]),
            fill,
            gemm(&weights[0], &outs[3]),
        ];
        let ticket = queue.submit(&batch).unwrap();
        queue.wait(ticket, LONG).unwrap();
        for i in 0..3 {
            assert_eq!(bytes(&rig, &outs[i]), apart[i], "{}: projection {i}", rig.isa);
        }
        assert_ne!(bytes(&rig, &outs[3]), apart[0], "{}: x changed, its packing must too", rig.isa);
    }
}

fn bytes(rig: &Rig, slice: &Slice) -> Vec<u8> {
    let mut bytes = vec![0; slice.bytes as usize];
    rig.device.read(slice, &mut bytes).unwrap();
    bytes
}

#[test]
fn indices_out_of_range_fail_the_ticket_and_all_later_ones() {
    for rig in levels("cpu") {
        let word = |v: u32| rig.upload(DType::U32, &v.to_le_bytes());
        let floats = |n: usize| rig.upload(DType::F32, &vec![0; 4 * n]);
        let embed = OpSig::Embed { tokens: 1, vocab: 3, hidden: 4, table: DType::F32, out: DType::F32 };
        let write = OpSig::KvWrite {
            tokens: 1,
            x: DType::F32,
            kv: KvShape { kv_heads: 1, head_dim: 4, page_tokens: 2, dtype: DType::F32, latent: None },
        };
        let prefill = |start: [u32; 2], context: u32, page: u32| {
            let sig = OpSig::AttnPrefill {
                tokens: 2,
                sequences: 1,
                pairs: 1,
                kv_tokens: 1,
                heads: 1,
                pages_max: 2,
                window: None,
                sinks: false,
                x: DType::F32,
                kv: KvShape { kv_heads: 1, head_dim: 4, page_tokens: 2, dtype: DType::F32, latent: None },
                cap: None,
            };
            let start = rig.upload(DType::U32, &rig.u32s(&start));
            let pages = rig.upload(DType::U32, &rig.u32s(&[page; 2]));
            Cmd::new(sig, &[floats(8), start, word(context), pages, floats(8), floats(8), floats(8)]).unwrap()
        };
        let bad = [
            Cmd::new(embed, &[word(3), floats(12), floats(4)]).unwrap(),
            Cmd::new(write, &[floats(4), floats(4), word(2), floats(8), floats(8)]).unwrap(),
            bad_decode(&rig, [0, 17], 0),
            bad_decode(&rig, [0, 16], 1),
            bad_decode(&rig, [3, u32::MAX], 0),
            prefill([0, 1], 2, 0),
            prefill([1, 2], 2, 0),
            prefill([0, 3], 3, 0),
            prefill([0, 2], 1, 0),
            prefill([0, 2], 5, 0),
            prefill([0, 2], u32::MAX, 0),
            prefill([0, 2], 2, 1),
        ];
        for cmd in bad {
            let mut queue = rig.device.queue().unwrap();
            let (a, out) = (floats(4), floats(4));
            let good = add(&a, &a, &out);
            let before = queue.submit(std::slice::from_ref(&good)).unwrap();
            let failed = queue.submit(std::slice::from_ref(&cmd)).unwrap();
            let after = queue.submit(std::slice::from_ref(&good)).unwrap();
            let error = queue.wait(failed, LONG).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid, "{}: {:?}: {error}", rig.isa, cmd.sig());
            assert_eq!(queue.wait(after, LONG).unwrap_err().kind, ErrorKind::Invalid);
            assert!(queue.wait(before, LONG).is_ok());
            // another queue of the device is not concerned
            let mut other = rig.device.queue().unwrap();
            let ticket = other.submit(&[good]).unwrap();
            other.wait(ticket, LONG).unwrap();
        }
        // the same with valid indices
        let mut queue = rig.device.queue().unwrap();
        let ticket = queue.submit(&[prefill([0, 2], 4, 0), bad_decode(&rig, [0, 16], 0)]).unwrap();
        queue.wait(ticket, LONG).unwrap();
    }
}

#[test]
fn free_memory_is_below_all_memory_and_shrinks_as_buffers_are_taken() {
    let device = rig().device;
    let all = device.info().memory.0;
    // pages that are not touched take no memory, but the room of buffers
    let held = device.alloc((0.9 * all) as u64, BufferUsage::Kv).unwrap();
    let free = device.memory_free().expect("Linux tells").0;
    assert!(free > 0.0 && free <= 0.1 * all + 1.0, "{free} of {all}");
    drop(held);
    assert!(device.memory_free().unwrap().0 <= all);
}

#[test]
fn imported_memory_is_read_in_place_and_never_written() {
    let rig = rig();
    let data: Vec<u8> = [1.5f32, 2.5, -3.0, 4.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let imported = rig.device.import(Arc::new(data.clone())).unwrap();
    let out = rig.device.alloc(16, BufferUsage::Activations).unwrap();
    let mut queue = rig.device.queue().unwrap();
    let error = queue.submit(&[add(&out, &out.clone(), &imported)]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert_eq!(rig.device.write(&imported, &data).unwrap_err().kind, ErrorKind::Invalid);
    // a refused batch has no ticket: the queue goes on
    let ticket = queue.submit(&[add(&imported, &imported.clone(), &out)]).unwrap();
    queue.wait(ticket, LONG).unwrap();
    assert_eq!(first(&rig.device, &out), 3.0);
    let mut back = vec![0; 16];
    rig.device.read(&imported, &mut back).unwrap();
    assert_eq!(back, data);
}

#[test]
fn foreign_buffers_wrong_lengths_and_wild_slices_are_refused() {
    #[derive(Debug)]
    struct Foreign;
    impl mixfleet_hal::Buffer for Foreign {
        fn size_bytes(&self) -> u64 {
            16
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    let rig = rig();
    let own = rig.device.alloc(16, BufferUsage::Kv).unwrap();
    let foreign = Slice::whole(Arc::new(Foreign));
    let mut queue = rig.device.queue().unwrap();
    assert_eq!(queue.submit(&[add(&foreign, &foreign.clone(), &own)]).unwrap_err().kind, ErrorKind::Invalid);
    assert_eq!(rig.device.read(&foreign, &mut [0; 16]).unwrap_err().kind, ErrorKind::Invalid);
    assert_eq!(rig.device.read(&own, &mut [0; 8]).unwrap_err().kind, ErrorKind::Invalid);
    let wild = Slice { buffer: own.buffer.clone(), offset: u64::MAX - 3, bytes: 16 };
    assert_eq!(rig.device.read(&wild, &mut [0; 16]).unwrap_err().kind, ErrorKind::Invalid);
    assert_eq!(rig.device.alloc(1 << 60, BufferUsage::Kv).unwrap_err().kind, ErrorKind::OutOfMemory);
}

#[test]
fn a_wait_ends_at_its_timeout_and_the_work_goes_on() {
    let rig = rig();
    let x = rig.device.alloc(64 << 20, BufferUsage::Activations).unwrap();
    let y = rig.device.alloc(64 << 20, BufferUsage::Activations).unwrap();
    let copy = OpSig::Copy { bytes: 64 << 20 };
    let batch: Vec<Cmd> = (0..20).map(|_| Cmd::new(copy, &[x.clone(), y.clone()]).unwrap()).collect();
    let mut queue = rig.device.queue().unwrap();
    let tickets: Vec<Ticket> = (0..3).map(|_| queue.submit(&batch).unwrap()).collect();
    // 3.8 GB cannot be copied in no time at all
    assert_eq!(queue.wait(tickets[2], Duration::ZERO).unwrap_err().kind, ErrorKind::Timeout);
    for ticket in tickets {
        assert!(queue.wait(ticket, LONG).unwrap().time.0 > 0.0);
    }
    assert_eq!(queue.wait(Ticket(4), LONG).unwrap_err().kind, ErrorKind::Invalid);
}

#[test]
fn thousands_of_batches_over_two_queues_and_a_replayed_graph() {
    let rig = rig();
    let one = rig.upload(DType::F32, &1f32.to_le_bytes().repeat(4));
    let sums = [0; 3].map(|_| rig.upload(DType::F32, &[0; 16]));
    let step = |s: &Slice, t: &Slice| {
        [add(s, &one, t), Cmd::new(OpSig::Copy { bytes: 16 }, &[t.clone(), s.clone()]).unwrap()]
    };
    let spare = [0; 3].map(|_| rig.upload(DType::F32, &[0; 16]));
    let (mut a, mut b) = (rig.device.queue().unwrap(), rig.device.queue().unwrap());
    let graph = b.record(&step(&sums[2], &spare[2])).unwrap();
    assert_eq!(a.replay(&graph).unwrap_err().kind, ErrorKind::Invalid);
    let mut last = (Ticket(0), Ticket(0));
    for _ in 0..2000 {
        last.0 = a.submit(&step(&sums[0], &spare[0])).unwrap();
        b.submit(&step(&sums[1], &spare[1])).unwrap();
        last.1 = b.replay(&graph).unwrap();
    }
    a.wait(last.0, LONG).unwrap();
    b.wait(last.1, LONG).unwrap();
    for sum in &sums {
        assert_eq!(first(&rig.device, sum), 2000.0);
    }
}

#[test]
fn two_devices_work_at_once_and_share_buffers() {
    let all = CpuBackend.probe().unwrap();
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].id, "cpu");
    let cores = all[0].notes.iter().find(|n| n.0 == "cores").unwrap().1.clone();
    let core = |part: Option<&str>| format!("cpu@{}", part.unwrap().split('-').next().unwrap());
    let last = format!("cpu@{}", cores.rsplit([',', '-']).next().unwrap());
    let open = |selector: &str| CpuBackend.open(selector).unwrap();
    let (a, b) = (open(&core(cores.split(',').next())), open(&last));
    assert_eq!((a.info().compute_units, b.info().compute_units), (1, 1));
    let weights = a.import(Arc::new(1f32.to_le_bytes().repeat(1 << 16))).unwrap();
    std::thread::scope(|scope| {
        for device in [&a, &b] {
            let weights = &weights;
            scope.spawn(move || {
                let [x, y] = [0; 2].map(|_| device.alloc(4 << 16, BufferUsage::Activations).unwrap());
                let mut queue = device.queue().unwrap();
                for _ in 0..200 {
                    queue.submit(&[add(&x, weights, &y), add(&y, weights, &x)]).unwrap();
                }
                let ticket = queue.submit(&[]).unwrap();
                queue.wait(ticket, LONG).unwrap();
                assert_eq!(first(device, &x), 400.0);
            });
        }
    });
}

#[test]
fn selectors_that_name_no_core_say_which_exist() {
    let error = CpuBackend.open("cpu@9999").err().unwrap();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.detail.contains("cpu@9999") && error.detail.contains("cores"), "{error}");
    assert!(Isa::available().contains(&Isa::Portable));
}

#[test]
fn dropping_everything_with_work_in_flight_is_harmless() {
    let rig = rig();
    let x = rig.device.alloc(8 << 20, BufferUsage::Activations).unwrap();
    let y = rig.device.alloc(8 << 20, BufferUsage::Activations).unwrap();
    let mut queue = rig.device.queue().unwrap();
    for _ in 0..20 {
        queue.submit(&[Cmd::new(OpSig::Copy { bytes: 8 << 20 }, &[x.clone(), y.clone()]).unwrap()]).unwrap();
    }
    drop((x, y));
    drop(queue);
    drop(rig);
}

#[test]
#[cfg(target_os = "linux")]
fn a_batch_over_a_file_that_is_cut_under_it_fails_and_so_do_those_after_it() {
    use mixfleet_hal::FileMapper;
    let path = std::env::temp_dir().join(format!("mixfleet-cpu-queue-{}", std::process::id()));
    std::fs::write(&path, vec![0x3f; 1 << 20]).unwrap();
    let device = CpuBackend.open("cpu").unwrap();
    let imported = device.import(mixfleet_cpu::host::Mapper.map(&path).unwrap()).unwrap();
    let alloc = || device.alloc(1 << 20, BufferUsage::Activations).unwrap();
    let (other, out) = (alloc(), alloc());
    let batch = [add(&imported, &other, &out)];
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&batch).unwrap();
    queue.wait(ticket, LONG).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    for _ in 0..2 {
        let ticket = queue.submit(&batch).unwrap();
        let error = queue.wait(ticket, LONG).unwrap_err();
        assert_eq!(error.kind, ErrorKind::DeviceLost);
        assert!(error.detail.contains("was truncated"), "{error}");
    }
    // Another queue, and a batch that has nothing to do with the file: the device as a whole is of no use.
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[add(&other, &other, &out)]).unwrap();
    assert!(queue.wait(ticket, LONG).is_err());
    drop((imported, batch));
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[add(&other, &other, &out)]).unwrap();
    queue.wait(ticket, LONG).unwrap();
    std::fs::remove_file(&path).unwrap();
}
