//! The conversions between dtypes, which the kernels do by bits, against the crate `half`: every value of 16
//! bits, and the f32s at which rounding goes wrong. A row of a table is fetched in another dtype.

use half::{bf16, f16};
use mixfleet_hal::random::bits;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, OpSig};
use mixfleet_wgpu::WgpuBackend;
use std::sync::Arc;
use std::time::Duration;

fn device() -> Option<Arc<dyn Device>> {
    match WgpuBackend.probe() {
        Ok(_) => Some(WgpuBackend.open("wgpu").unwrap()),
        Err(absent) => {
            eprintln!("SKIPPED: no wgpu device: {absent}");
            None
        }
    }
}

/// `elements` in `from`, as `to`.
fn converted(device: &dyn Device, elements: &[u8], from: DType, to: DType) -> Vec<u8> {
    let hidden = elements.len() as u64 / from.size_bytes();
    let table = device.alloc(elements.len() as u64, BufferUsage::Weights).unwrap();
    let ids = device.alloc(4, BufferUsage::Activations).unwrap();
    let out = device.alloc(hidden * to.size_bytes(), BufferUsage::Activations).unwrap();
    device.write(&table, elements).unwrap();
    device.write(&ids, &[0; 4]).unwrap();
    let sig = OpSig::Embed { tokens: 1, vocab: 1, hidden: hidden as u32, table: from, out: to };
    let cmd = Cmd::new(sig, &[ids, table, out.clone()]).unwrap();
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[cmd]).unwrap();
    queue.wait(ticket, Duration::from_secs(600)).unwrap();
    let mut bytes = vec![0; out.bytes as usize];
    device.read(&out, &mut bytes).unwrap();
    bytes
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks::<2>().0.iter().map(|&word| u16::from_le_bytes(word))
}

#[test]
fn sixteen_bits_become_thirty_two_exactly() {
    let Some(device) = device() else { return };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [DType::F16, DType::Bf16] {
        let got = DType::F32.decode(&converted(&*device, &all, dtype, DType::F32));
        for ((word, want), got) in (0..=u16::MAX).zip(dtype.decode(&all)).zip(got) {
            // a subnormal bf16 is a subnormal f32, which may be flushed
            let flushed = want.abs() < f64::from(f32::MIN_POSITIVE) && got == 0.0;
            let same = got == want || flushed || (got.is_nan() && want.is_nan());
            assert!(same, "{dtype} {word:#06x}: {got:e}, not {want:e}");
        }
    }
}

#[test]
fn thirty_two_bits_round_to_the_nearest_even() {
    let Some(device) = device() else { return };
    // every finite f16, the midpoint to its neighbour, and the values beside the midpoint
    let halves = (0..=u16::MAX).filter(|&word| f16::from_bits(word).is_finite()).flat_map(|word| {
        let (a, b) = (f16::from_bits(word).to_f32(), f16::from_bits(word ^ 1).to_f32());
        let middle = (a + b) / 2.0;
        [a, middle, middle.next_up(), middle.next_down()]
    });
    let uppers = (0..1 << 15).map(|i| f32::from_bits((bits(3, i) as u32 & 0xFFFF_0000) | 0x8000));
    let random = (0..1 << 15).map(|i| f32::from_bits(bits(4, i) as u32));
    let special = [65519.0, 65520.0, 1e9, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, -0.0];
    // subnormal f32s may be flushed
    let kept = |value: &f32| !value.is_subnormal();
    let values: Vec<f32> = halves.chain(uppers).chain(random).chain(special).filter(kept).collect();
    let table: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let f16s = converted(&*device, &table, DType::F32, DType::F16);
    for (value, got) in values.iter().zip(words(&f16s).map(f16::from_bits)) {
        let want = f16::from_f32(*value);
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "f16 of {value:e}: {got}, not {want}");
    }
    let bf16s = converted(&*device, &table, DType::F32, DType::Bf16);
    for (value, got) in values.iter().zip(words(&bf16s).map(bf16::from_bits)) {
        let want = bf16::from_f32(*value);
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "bf16 of {value:e}: {got}, not {want}");
    }
}
