//! How fast weights are hashed beside how fast they are read: `cargo run --release -p mixfleet --example
//! digest_rate -- MODEL [THREADS]`.

#![allow(clippy::print_stdout, reason = "an example says what it measured")]

use mixfleet_runtime::model::Checkpoint;
use std::path::PathBuf;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let model = PathBuf::from(words.next().ok_or("expected MODEL [THREADS]")?);
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = words.next().map_or(Ok(all), |threads| threads.parse())?;
    let checkpoint = Checkpoint::open(&model, &mixfleet_cpu::host::Mapper)?;
    let bytes = checkpoint.size_bytes() as f64;
    let tensors: Vec<&[u8]> =
        checkpoint.directory().into_iter().filter_map(|(name, ..)| checkpoint.bytes(name)).collect();
    for round in 1..=5 {
        let start = Instant::now();
        let sums: Vec<u64> = std::thread::scope(|scope| {
            let part = |thread: usize| {
                tensors.iter().map(|tensor| sum(tensor, thread, threads)).fold(0, u64::wrapping_add)
            };
            let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
            workers.into_iter().map(|worker| worker.join().unwrap_or(0)).collect()
        });
        let read_s = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let digesting = checkpoint.digesting();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| digesting.work(&|_| {}));
            }
        });
        let digest = digesting.finish()?;
        let hash_s = start.elapsed().as_secs_f64();
        let [read, hashed] = [read_s, hash_s].map(|seconds| bytes / seconds / 1e9);
        let sum = sums.into_iter().fold(0, u64::wrapping_add);
        println!(
            "{round}: {threads} threads, read {read:.2} GB/s, hashed {hashed:.2} GB/s ({digest}, sum {sum:x})"
        );
    }
    Ok(())
}

/// The sum of a thread's share of the words.
fn sum(bytes: &[u8], thread: usize, threads: usize) -> u64 {
    let share = bytes.len().div_ceil(threads).next_multiple_of(8);
    let own = &bytes[(thread * share).min(bytes.len())..((thread + 1) * share).min(bytes.len())];
    own.chunks_exact(8).fold(0, |sum, word| {
        sum.wrapping_add(u64::from_le_bytes([
            word[0], word[1], word[2], word[3], word[4], word[5], word[6], word[7],
        ]))
    })
}
