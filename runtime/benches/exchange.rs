//! What members of an instance exchange per layer: the sum of residual streams over two cores, beside a copy
//! of as many bytes and a round trip of both queues.
//!
//! `cargo bench -p mixfleet-runtime --bench exchange`

#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::{Backend, BufferUsage, Cmd, Collective, Device, MemberSlice, OpSig};
use mixfleet_runtime::model::exchange::ThroughHost;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a residual stream of 1024: of one token, and of chunks of 128 and 512.
const BYTES: [u64; 3] = [4096, 128 * 4096, 512 * 4096];

fn cores() -> Vec<Arc<dyn Device>> {
    ["cpu@0", "cpu@1"].map(|core| CpuBackend.open(core).expect("two cores")).to_vec()
}

fn exchange(criterion: &mut Criterion) {
    let cores = cores();
    let mut group = criterion.benchmark_group("all_reduce");
    for bytes in BYTES {
        group.throughput(Throughput::Bytes(bytes));
        let slice = |device: &Arc<dyn Device>| {
            let slice = device.alloc(bytes, BufferUsage::Activations).expect("memory");
            device.write(&slice, &vec![0; bytes as usize]).expect("written");
            slice
        };
        let slices: Vec<_> = cores.iter().map(slice).collect();
        group.bench_with_input(BenchmarkId::new("sum", bytes), &bytes, |bencher, _| {
            let mut exchange = ThroughHost::default();
            let members: Vec<_> = cores.iter().zip(&slices).collect();
            let members: Vec<_> = members
                .into_iter()
                .map(|(device, slice)| MemberSlice { device: &**device, slice: slice.clone() })
                .collect();
            bencher.iter(|| exchange.sum(black_box(&members)).expect("summed"));
        });
        group.bench_with_input(BenchmarkId::new("memcpy", bytes), &bytes, |bencher, _| {
            let (from, mut to) = (vec![1u8; bytes as usize], vec![0u8; bytes as usize]);
            bencher.iter(|| black_box(&mut to).copy_from_slice(black_box(&from)));
        });
    }
    group.finish();
}

fn ping_pong(criterion: &mut Criterion) {
    let cores = cores();
    let mut queues: Vec<_> = cores.iter().map(|device| device.queue().expect("a queue")).collect();
    let lists: Vec<Vec<Cmd>> = cores
        .iter()
        .map(|device| {
            let [from, to] = [0, 1].map(|_| device.alloc(4, BufferUsage::Activations).expect("memory"));
            vec![Cmd::new(OpSig::Copy { bytes: 4 }, &[from, to]).expect("a copy")]
        })
        .collect();
    criterion.bench_function("submit and wait on two queues", |bencher| {
        bencher.iter(|| {
            let tickets: Vec<_> = queues
                .iter_mut()
                .zip(&lists)
                .map(|(queue, list)| queue.submit(list).expect("sent"))
                .collect();
            for (queue, ticket) in queues.iter_mut().zip(tickets) {
                queue.wait(ticket, Duration::from_secs(10)).expect("done");
            }
        });
    });
}

criterion_group!(benches, exchange, ping_pong);
criterion_main!(benches);
