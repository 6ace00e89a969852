//! What a prediction takes: `cargo run --release -p mixfleet-hal --example predictor_speed`.

#![allow(clippy::print_stdout)]

use mixfleet_hal::profile::{DeviceProfile, Point, Predictor};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, KvShape, OpSig};
use std::hint::black_box;
use std::time::Instant;

const POINTS: usize = 2000;
const QUESTIONS: u64 = 100_000;

/// A decode step of any size: 1 to 2048 sequences of 1 to 32,767 keys.
fn decode(stream: &mut Stream) -> OpSig {
    let sequences = 1 << stream.below(12);
    let context_max = 1 << stream.below(16);
    let context = 1 + stream.below(context_max);
    let kv_heads = 1 << stream.below(4);
    OpSig::AttnDecode {
        sequences,
        kv_tokens: u64::from(sequences) * context,
        heads: 8 * kv_heads,
        pages_max: context.div_ceil(16) as u32,
        x: DType::Bf16,
        kv: KvShape { kv_heads, head_dim: 128, page_tokens: 16, dtype: DType::Bf16, latent: None },
        cap: None,
    }
}

fn main() {
    let compute = vec![(DType::Bf16, FlopPerSecond(1e15))];
    let roof = DeviceProfile::roof(compute, BytesPerSecond(3e12), Bytes(8e10));
    let mut stream = Stream::new(1);
    let points = (0..POINTS).map(|_| {
        let sig = decode(&mut stream);
        Point { sig, time: (roof.roofline(&sig) + Seconds(1e-5)) * (1.0 + 0.1 * stream.next_unit()) }
    });
    let profile = DeviceProfile { points: points.collect(), ..roof.clone() };
    let begin = Instant::now();
    let predictor = Predictor::new(&profile);
    println!("{POINTS} points prepared in {:.1} ms", begin.elapsed().as_secs_f64() * 1e3);
    let questions: Vec<OpSig> = (0..QUESTIONS).map(|_| decode(&mut stream)).collect();
    let begin = Instant::now();
    for sig in &questions {
        black_box(predictor.time(black_box(sig)));
    }
    println!("{:.2} us per prediction", begin.elapsed().as_secs_f64() * 1e6 / QUESTIONS as f64);
}
