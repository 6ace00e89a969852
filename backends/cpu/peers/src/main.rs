//! f32 matrix products of the crate `gemm` on all cores: `gemm-peer M N K [SECONDS]` prints the GFLOP/s of
//! every repetition, one a line, after one that warms up.

use gemm::{Parallelism, gemm};
use std::time::{Duration, Instant};

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let [m, n, k, rest @ ..] = &numbers[..] else {
        eprintln!("usage: gemm-peer M N K [SECONDS]");
        std::process::exit(2);
    };
    let (m, n, k) = (*m, *n, *k);
    let patience = Duration::from_secs(rest.first().copied().unwrap_or(3) as u64);
    let values = |count: usize| (0..count).map(|i| ((i * 2654435761) % 1000) as f32 / 500.0 - 1.0).collect();
    let (x, weight): (Vec<f32>, Vec<f32>) = (values(m * k), values(n * k)); // [m, k], [n, k]
    let mut out = vec![0f32; m * n]; // [m, n]
    let mut product = || {
        let start = Instant::now();
        // SAFETY: the strides describe row-major [m, n], [m, k] and the transpose of row-major [n, k],
        // all of the allocated sizes.
        unsafe {
            gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                1,
                n as isize,
                false,
                x.as_ptr(),
                1,
                k as isize,
                weight.as_ptr(),
                k as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::Rayon(0),
            );
        }
        start.elapsed().as_secs_f64()
    };
    product();
    let start = Instant::now();
    while start.elapsed() < patience {
        println!("{:.2}", 2.0 * (m * n * k) as f64 / product() / 1e9);
    }
    assert!(out.iter().all(|value| value.is_finite()));
}
