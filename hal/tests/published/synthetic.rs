//! A part that is unlike any real one, for predictions that must not suffer from others.

use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, OpSig};

/// The datasheet of a part, and the times of these operations on it. `seed` draws the floor, the ridge and
/// the shape: waves of tiles, depth lost in filling the units, keys that are processed serially, and prefill
/// that gets faster or slower per pair with its length. The law has no term for any of these.
pub(crate) fn part(seed: u64, sigs: &[OpSig]) -> (DeviceProfile, Vec<Point>) {
    let mut stream = Stream::new(seed);
    let mut between = |low: f64, high: f64| {
        let share = stream.below(1 << 20) as f64 / f64::from(1 << 20);
        low + (high - low) * share
    };
    let (peak, rate) = (10f64.powf(between(13.3, 15.2)), 10f64.powf(between(11.5, 12.8)));
    let roof =
        DeviceProfile::roof(vec![(DType::Bf16, FlopPerSecond(peak))], BytesPerSecond(rate), Bytes(48e9));
    let (reached, streamed) = (peak * between(0.3, 0.95), rate * between(0.35, 0.95));
    let floor = 10f64.powf(between(-5.7, -4.2));
    let (rows, columns) = (2f64.powf(between(3.0, 7.0).floor()), 2f64.powf(between(6.0, 8.0).floor()));
    let (units, filling) = (between(16.0, 200.0).floor(), between(0.0, 2000.0));
    let (beside, walked) = (between(0.0, 1.0), 10f64.powf(between(-9.0, -7.5)));
    let (slow, steep) = (10f64.powf(between(1.5, 3.5)), between(-0.1, 0.1));
    let noise = between(0.0, 0.05);
    let both = |a: f64, b: f64| a.max(b) + beside * a.min(b);
    let time = |sig: &OpSig| match *sig {
        OpSig::Gemm { m, n, k, .. } => {
            let tiles = (f64::from(m) / rows).ceil() * (f64::from(n) / columns).ceil();
            let waves = ((tiles / units).ceil() * units / tiles).min(3.0);
            let depth = 1.0 + filling / f64::from(k);
            both(
                waves * depth * tiles * rows * columns * 2.0 * f64::from(k) / reached,
                sig.bytes() / streamed,
            )
        }
        OpSig::AttnDecode { sequences, kv_tokens, heads, kv, .. } => {
            let items = f64::from(sequences) * f64::from(kv.kv_heads);
            let keys = kv_tokens as f64 / f64::from(sequences);
            let serial = if heads > kv.kv_heads { 0.0 } else { walked * keys * (items / units).ceil() };
            both(sig.bytes() / streamed, 4.0 * sig.flops() / reached).max(serial)
        }
        OpSig::AttnPrefill { tokens, sequences, .. } => {
            let each = f64::from(tokens) / f64::from(sequences);
            let share = each / (each + slow) * (each / 1000.0).powf(steep);
            both(sig.flops() / (reached * share), sig.bytes() / streamed)
        }
        _ => panic!("{} is not in the tables", sig.name()),
    };
    let mut jitter = Stream::new(!seed);
    let points = sigs.iter().map(|sig| {
        let drawn = jitter.below(1 << 20) as f64 / f64::from(1 << 19) - 1.0;
        Point { sig: *sig, time: Seconds((floor + time(sig)) * (1.0 + noise * drawn)) }
    });
    let points = points.collect();
    (roof, points)
}
