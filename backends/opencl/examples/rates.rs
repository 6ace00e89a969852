//! Rates of the kernels that decide a model's speed, by the device's own clock; best of several runs.
//!
//! `cargo run --release -p mixfleet-opencl --features opencl --example rates [cpu|gpu [few]]`: `cpu` or `gpu`
//! selects the kernels for processors or for GPUs instead of the first device's own, `few` only products of
//! few rows.

#![allow(clippy::print_stdout, reason = "its purpose")]

use mixfleet_hal::random::Stream;
use mixfleet_hal::{
    BufferUsage, Cmd, CodeKind, DType, Device, Error, KvShape, OpSig, Quantised, Result, ScaleKind, ZeroKind,
};
use mixfleet_opencl::{KernelTuning, OpenClDevice};
use std::time::Duration;

const RUNS: usize = 7;

/// Random operands: floats of magnitude 1, and zeros for indices.
fn operands(device: &dyn Device, sig: &OpSig) -> Result<Cmd> {
    let mut stream = Stream::new(1);
    let mut args = Vec::new();
    for operand in sig.operands() {
        let elements = match operand.extent {
            mixfleet_hal::op::Extent::Exactly(n) => n,
            mixfleet_hal::op::Extent::PagesOf(page) => page * 256,
        };
        let slice = device.alloc(elements * operand.dtype.size_bytes(), BufferUsage::Activations)?;
        let mut bytes = Vec::new();
        for i in 0..elements {
            let value = match operand.name {
                "query_start" => (i * elements_of(sig)) as f64,
                "context" => elements_of(sig) as f64,
                "range" => (i % 2 * elements_of(sig)) as f64,
                "pages" => (i % 256) as f64,
                _ if operand.dtype == DType::U32 => 0.0,
                _ => stream.next_unit() - 0.5,
            };
            operand.dtype.encode(value, &mut bytes);
        }
        device.write(&slice, &bytes)?;
        args.push(slice);
    }
    Cmd::new(*sig, &args)
}

/// Keys of the one sequence of an attention.
fn elements_of(sig: &OpSig) -> u64 {
    match *sig {
        OpSig::AttnPrefill { kv_tokens, sequences, .. } | OpSig::AttnDecode { kv_tokens, sequences, .. } => {
            kv_tokens / u64::from(sequences)
        }
        _ => 0,
    }
}

fn measure(device: &dyn Device, name: &str, sig: OpSig) -> Result<()> {
    let cmd = operands(device, &sig)?;
    let mut queue = device.queue()?;
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let ticket = queue.submit(std::slice::from_ref(&cmd))?;
        best = best.min(queue.wait(ticket, Duration::from_secs(120))?.time.0);
    }
    let (gflops, gbytes) = (sig.flops() / best * 1e-9, sig.bytes() / best * 1e-9);
    println!("{name:<44} {:>9.3} ms {gflops:>8.1} GFLOP/s {gbytes:>7.1} GB/s", best * 1e3);
    Ok(())
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let tuning = match words.first().map(String::as_str) {
        None => None,
        Some("cpu") => Some(KernelTuning::Cpu),
        Some("gpu") => Some(KernelTuning::Gpu),
        Some(other) => return Err(Error::invalid(format!("'{other}': use cpu or gpu"))),
    };
    let device = OpenClDevice::open(0, tuning)?;
    let device: &dyn Device = &device;
    println!("{}: {}", device.info().id, device.info().name);
    use DType::{Bf16, F32};
    for m in [1, 4, 8, 16] {
        let (n, k) = (8192, 2048);
        let sig = OpSig::Gemm { m, n, k, x: F32, weight: Bf16, out: F32, bias: false, accumulate: false };
        measure(device, &format!("gemm {m} x {n} x {k}, weight bf16"), sig)?;
        let weight = Quantised::in_rows(CodeKind::U4, 32, ScaleKind::F16, ZeroKind::Middle);
        let sig = OpSig::QuantisedGemm { m, n, k, x: F32, weight, out: F32, bias: false, accumulate: false };
        measure(device, "the same of 4-bit codes in groups of 32", sig)?;
    }
    if words.get(1).is_some_and(|word| word == "few") {
        return Ok(());
    }
    for (x, weight) in [(F32, F32), (F32, Bf16), (Bf16, Bf16)] {
        for (m, n, k) in
            [(1, 8192, 2048), (8, 8192, 2048), (512, 2048, 2048), (512, 8192, 2048), (512, 2048, 8192)]
        {
            let sig = OpSig::Gemm { m, n, k, x, weight, out: F32, bias: false, accumulate: false };
            measure(device, &format!("gemm {m} x {n} x {k}, x {x}, weight {weight}"), sig)?;
        }
    }
    let (heads, kv_heads, head_dim, page_tokens) = (32, 8, 64, 16);
    for tokens in [512u32, 2048] {
        let (n, pages_max) = (u64::from(tokens), tokens / page_tokens);
        let sig = OpSig::AttnPrefill {
            tokens,
            sequences: 1,
            pairs: n * (n + 1) / 2,
            kv_tokens: n,
            heads,
            pages_max,
            window: None,
            sinks: false,
            x: F32,
            kv: KvShape { kv_heads, head_dim, page_tokens, dtype: Bf16, latent: None },
            cap: None,
        };
        measure(device, &format!("attn_prefill of {tokens}"), sig)?;
        let sig = OpSig::AttnDecode {
            sequences: 8,
            kv_tokens: 8 * n,
            heads,
            pages_max,
            x: F32,
            kv: KvShape { kv_heads, head_dim, page_tokens, dtype: Bf16, latent: None },
            cap: None,
        };
        measure(device, &format!("attn_decode of 8 x {tokens}"), sig)?;
    }
    measure(device, "sample 1 x 128256", OpSig::Sample { rows: 1, cols: 128_256, history: 0, tops: 0 })?;
    measure(device, "add 2048", OpSig::Add { elements: 2048, x: F32 })?;
    measure(device, "copy 256 MB", OpSig::Copy { bytes: 256_000_000 })
}
