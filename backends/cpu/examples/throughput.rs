//! What the kernels reach, as ratios to this machine's limits measured in the same run:
//! `cargo run --release -p mixfleet-cpu --example throughput [cpu@0
//! [gemm|quantised|experts|attention|model|launch]]`. Limits: a plain read of 2 GiB by one thread per core,
//! and the bf16 dot product in registers. Shapes: the projections of a 1.1 B model (hidden 2048, intermediate
//! 5632, 32 heads, 4 KV heads of 64). Every figure is the best of several runs; GEMM weights are cycled
//! through 1 GiB so that no cache holds them.

#![allow(unsafe_code, clippy::print_stdout)]

use mixfleet_cpu::CpuBackend;
use mixfleet_hal::{
    Backend, BufferUsage, Cmd, CodeKind, DType, Device, GroupedRows, KvShape, MatrixKind, OpSig, Quantised,
    Queue, Scalar, ScaleKind, Slice, ZeroKind,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WEIGHTS_BYTES: u64 = 1 << 30;

struct Bench {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    read_rate: f64,
    dot_rate: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let selector = std::env::args().nth(1).unwrap_or_else(|| "cpu".into());
    let only = std::env::args().nth(2);
    let wanted = |name: &str| only.as_deref().is_none_or(|o| o == name);
    let device = CpuBackend.open(&selector)?;
    println!("{}", device.info().fingerprint);
    let threads = device.info().compute_units as usize;
    let (read_rate, dot_rate) = (read_rate(threads)?, dot_rate(threads));
    println!("limits: read {:.1} GB/s, bf16 dot {:.0} GFLOP/s", read_rate / 1e9, dot_rate / 1e9);
    let queue = device.queue()?;
    let mut bench = Bench { device, queue, read_rate, dot_rate };
    if wanted("gemm") {
        for x in [DType::Bf16, DType::F32] {
            for m in [1, 2, 4, 8, 16, 32, 128, 512, 2048] {
                for (n, k) in [(256, 2048), (2048, 2048), (5632, 2048), (2048, 5632), (32000, 2048)] {
                    if m <= 32 || (n < 32000 && (x == DType::Bf16 || m == 512)) {
                        bench.gemm(m, n, k, x)?;
                    }
                }
            }
        }
    }
    if wanted("quantised") {
        for (name, weight) in formats() {
            for (m, n, k) in
                [(1, 2048, 2048), (1, 5632, 2048), (1, 2048, 5632), (8, 5632, 2048), (128, 5632, 2048)]
            {
                for x in [DType::F32, DType::Bf16] {
                    bench.quantised(name, weight, m, n, k, x)?;
                }
            }
            bench.quantised(name, weight, 512, 5632, 2048, DType::Bf16)?;
        }
    }
    if wanted("experts") {
        for choices in [2, 16, 64, 256, 1024, 4096] {
            for weight in [MatrixKind::Plain(DType::Bf16), MatrixKind::Quantised(Quantised::MXFP4)] {
                bench.experts(choices, 3584, 1024, weight)?;
            }
        }
    }
    if wanted("attention") {
        for (sequences, context) in [(1, 512), (1, 4096), (8, 512), (8, 4096)] {
            bench.decode(sequences, context)?;
        }
        for tokens in [128, 512, 2048, 8192] {
            bench.prefill(tokens)?;
        }
    }
    if wanted("model") {
        let weights = bench.weights()?;
        for (sequences, tokens, context) in
            [(1, 1, 64), (8, 8, 64), (1, 1, 2048), (1, 512, 512), (1, 2048, 2048)]
        {
            bench.model(&weights, sequences, tokens, context)?;
        }
    }
    if wanted("launch") {
        bench.launch()?;
    }
    Ok(())
}

/// Formats of weights by the name that files give them.
fn formats() -> [(&'static str, Quantised); 6] {
    let of = Quantised::in_rows;
    [
        ("Q4_0", of(CodeKind::U4, 32, ScaleKind::F16, ZeroKind::Middle)),
        ("int4 g32 bf16", of(CodeKind::U4, 32, ScaleKind::Bf16, ZeroKind::Points)),
        ("Q4_K", of(CodeKind::U4, 32, ScaleKind::I8, ZeroKind::Minima)),
        ("Q6_K", of(CodeKind::U6, 16, ScaleKind::I8, ZeroKind::Middle)),
        ("Q8_0", of(CodeKind::I8, 32, ScaleKind::F16, ZeroKind::Middle)),
        ("MXFP4", Quantised::MXFP4),
    ]
}

impl Bench {
    fn quantised(
        &mut self,
        name: &str,
        weight: Quantised,
        m: u32,
        n: u32,
        k: u32,
        x: DType,
    ) -> mixfleet_hal::Result<()> {
        let sig = OpSig::QuantisedGemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        let bytes = weight.bytes(1, n, k);
        let count = if m <= 32 { (WEIGHTS_BYTES / bytes).max(1) } else { 2 };
        let input = self.alloc(u64::from(m) * u64::from(k) * x.size_bytes())?;
        let output = self.alloc(u64::from(m) * u64::from(n) * x.size_bytes())?;
        let mut commands = Vec::new();
        for _ in 0..count {
            let mut args = vec![input.clone()];
            for part in weight.parts(1, n, k) {
                args.push(self.alloc(part.elements() * part.dtype.size_bytes())?);
            }
            args.push(output.clone());
            commands.push(Cmd::new(sig, &args)?);
        }
        let group =
            if m <= 32 { usize::try_from((100_000_000 / bytes).clamp(1, count)).unwrap_or(1) } else { 1 };
        let batches: Vec<Vec<Cmd>> = commands.chunks_exact(group).map(<[Cmd]>::to_vec).collect();
        let seconds = self.best(&batches)? / group as f64;
        let (rate, flops) = (bytes as f64 / seconds, sig.flops() / seconds);
        println!(
            "{name} {x} m {m:4} n {n:5} k {k}: {:7.1} us {:6.1} GB/s ({:3.0} % of read) {:6.1} GFLOP/s",
            seconds * 1e6,
            rate / 1e9,
            100.0 * rate / self.read_rate,
            flops / 1e9,
        );
        Ok(())
    }

    /// Products of 8 experts, of rows that are spread evenly over them.
    fn experts(&mut self, choices: u32, n: u32, k: u32, weight: MatrixKind) -> mixfleet_hal::Result<()> {
        const EXPERTS: u32 = 8;
        let x = DType::Bf16;
        let grouped =
            GroupedRows { choices, fan: 2, experts: EXPERTS, touched: EXPERTS.min(choices), others: 0 };
        let sig = OpSig::GroupedGemm { grouped, n, k, x, weight, out: x, bias: false };
        let starts: Vec<u32> = (0..=EXPERTS).map(|expert| expert * choices / EXPERTS).collect();
        let indices = [self.words(&(0..choices).collect::<Vec<_>>())?, self.words(&starts)?];
        let input = self.alloc(u64::from(choices / 2) * u64::from(k) * 2)?;
        let output = self.alloc(u64::from(choices) * u64::from(n) * 2)?;
        let (mut batches, bytes) = (Vec::new(), weight.bytes(EXPERTS, n, k));
        for _ in 0..8 {
            let mut args = vec![input.clone()];
            for part in weight.parts(EXPERTS, n, k) {
                args.push(self.alloc(part.elements() * part.dtype.size_bytes())?);
            }
            args.extend(indices.iter().chain([&output]).cloned());
            batches.push(vec![Cmd::new(sig, &args)?]);
        }
        let seconds = self.best(&batches)?;
        let touched = bytes as f64 * f64::from(grouped.touched) / f64::from(EXPERTS);
        println!(
            "experts {} choices {choices:4} n {n} k {k}: {:7.1} us {:6.1} GB/s ({:3.0} % of read) {:6.1} GFLOP/s",
            if weight.quantised().is_some() { "MXFP4" } else { "bf16" },
            seconds * 1e6,
            touched / seconds / 1e9,
            100.0 * touched / seconds / self.read_rate,
            sig.flops() / seconds / 1e9,
        );
        Ok(())
    }

    /// Seconds of the fastest of several runs of `cmds`; repeated runs cycle through the batches.
    fn best(&mut self, batches: &[Vec<Cmd>]) -> mixfleet_hal::Result<f64> {
        let (mut best, start, mut runs) = (f64::INFINITY, Instant::now(), 0);
        while runs < 5 || (start.elapsed() < Duration::from_millis(1500) && runs < 2000) {
            let ticket = self.queue.submit(&batches[runs % batches.len()])?;
            let elapsed = self.queue.wait(ticket, Duration::from_secs(100))?;
            best = best.min(elapsed.time.0);
            runs += 1;
        }
        Ok(best)
    }

    fn alloc(&self, bytes: u64) -> mixfleet_hal::Result<Slice> {
        let slice = self.device.alloc(bytes, BufferUsage::Activations)?;
        // magnitudes of 2^-7 to 2^-3 of either sign, in bf16 and in f32: no zero pages, no subnormals, and
        // scores that differ as a model's do
        let drawn = (0..bytes.min(1 << 20).div_ceil(2)).map(|i| {
            let bits = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
            ((bits & 0x807F) | (0x3C00 + (bits >> 8 & 3) * 0x80)) as u16
        });
        let piece: Vec<u8> = drawn.flat_map(u16::to_le_bytes).collect();
        let mut at = 0;
        while at < bytes {
            let n = piece.len().min((bytes - at) as usize);
            self.device.write(&slice.range(at, n as u64), &piece[..n])?;
            at += n as u64;
        }
        Ok(slice)
    }

    fn gemm(&mut self, m: u32, n: u32, k: u32, x: DType) -> mixfleet_hal::Result<()> {
        let weight = DType::Bf16;
        let sig = OpSig::Gemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        let bytes = u64::from(n) * u64::from(k) * 2;
        let count = if m <= 32 { (WEIGHTS_BYTES / bytes).max(1) } else { 2 };
        let weights = self.alloc(bytes * count)?;
        let input = self.alloc(u64::from(m) * u64::from(k) * x.size_bytes())?;
        let output = self.alloc(u64::from(m) * u64::from(n) * x.size_bytes())?;
        let commands =
            |i: u64| Cmd::new(sig, &[input.clone(), weights.range(i * bytes, bytes), output.clone()]);
        // at least 100 MB per batch, so that the launch cost is negligible
        let group = if m <= 32 { (100_000_000 / bytes).clamp(1, count) } else { 1 };
        let batches = (0..count / group).map(|b| (0..group).map(|i| commands(b * group + i)).collect());
        let batches: Vec<Vec<Cmd>> = batches.collect::<Result<_, _>>()?;
        let seconds = self.best(&batches)? / group as f64;
        let (rate, flops) = (bytes as f64 / seconds, sig.flops() / seconds);
        println!(
            "gemm {x}*bf16 m {m:4} n {n:5} k {k}: {:7.1} us {:6.1} GB/s ({:3.0} % of read) {:6.1} GFLOP/s ({:3.0} % of dot)",
            seconds * 1e6,
            rate / 1e9,
            100.0 * rate / self.read_rate,
            flops / 1e9,
            100.0 * flops / self.dot_rate
        );
        Ok(())
    }

    /// Pools and a page table for `sequences` of `context` tokens each, `copies` times.
    fn pools(&self, sequences: u32, context: u32) -> mixfleet_hal::Result<(Slice, Slice, Slice, u32)> {
        let pages_max = context.div_ceil(32);
        let pool = || self.alloc(u64::from(sequences * pages_max) * 32 * 4 * 64 * 2);
        let table: Vec<u8> = (0..sequences * pages_max).flat_map(u32::to_le_bytes).collect();
        let pages = self.device.alloc(table.len() as u64, BufferUsage::Activations)?;
        self.device.write(&pages, &table)?;
        Ok((pool()?, pool()?, pages, pages_max))
    }

    fn words(&self, values: &[u32]) -> mixfleet_hal::Result<Slice> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let slice = self.device.alloc(bytes.len() as u64, BufferUsage::Activations)?;
        self.device.write(&slice, &bytes)?;
        Ok(slice)
    }

    fn decode(&mut self, sequences: u32, context: u32) -> mixfleet_hal::Result<()> {
        let (heads, kv_heads, head_dim, page_tokens) = (32, 4, 64, 32);
        let mut batch = Vec::new();
        let (q, acc) = (self.alloc(u64::from(sequences) * 4096)?, self.alloc(u64::from(sequences) * 8192)?);
        let stat = self.alloc(u64::from(sequences) * 256)?;
        let range = self.words(&[0, context].repeat(sequences as usize))?;
        let mut bytes = 0.0;
        for _ in 0..22 {
            let (k, v, pages, pages_max) = self.pools(sequences, context)?;
            let kv_tokens = u64::from(sequences) * u64::from(context);
            let (x, kv) = (DType::Bf16, DType::Bf16);
            let sig = OpSig::AttnDecode {
                sequences,
                kv_tokens,
                heads,
                pages_max,
                x,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                cap: None,
            };
            bytes += kv_tokens as f64 * 1024.0;
            batch.push(Cmd::new(sig, &[q.clone(), range.clone(), pages, k, v, acc.clone(), stat.clone()])?);
        }
        let seconds = self.best(&[batch])?;
        let rate = bytes / seconds;
        println!(
            "attn_decode {sequences} x {context}, 22 layers: {:8.1} us {:6.1} GB/s ({:3.0} % of read)",
            seconds * 1e6,
            rate / 1e9,
            100.0 * rate / self.read_rate
        );
        Ok(())
    }

    fn prefill(&mut self, tokens: u32) -> mixfleet_hal::Result<()> {
        let (heads, kv_heads, head_dim, page_tokens, sequences) = (32, 4, 64, 32, 1);
        let (k, v, pages, pages_max) = self.pools(1, tokens)?;
        let (q, out) = (self.alloc(u64::from(tokens) * 4096)?, self.alloc(u64::from(tokens) * 4096)?);
        let (start, context) = (self.words(&[0, tokens])?, self.words(&[tokens])?);
        let pairs = u64::from(tokens) * u64::from(tokens + 1) / 2;
        let (x, kv, window, kv_tokens) = (DType::Bf16, DType::Bf16, None, u64::from(tokens));
        let sig = OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window,
            sinks: false,
            x,
            kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
            cap: None,
        };
        let cmd = Cmd::new(sig, &[q, start, context, pages, k, v, out])?;
        let seconds = self.best(&[vec![cmd]])?;
        let rate = sig.flops() / seconds;
        println!(
            "attn_prefill {tokens}: {:8.1} us {:6.1} GFLOP/s ({:3.0} % of dot)",
            seconds * 1e6,
            rate / 1e9,
            100.0 * rate / self.dot_rate
        );
        Ok(())
    }

    /// All weights of the model: per layer q, k, v, o, gate, up, down; then the output head.
    fn weights(&self) -> mixfleet_hal::Result<Vec<(Slice, u32, u32)>> {
        let layer =
            [(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (5632, 2048), (5632, 2048), (2048, 5632)];
        let shapes = (0..22).flat_map(|_| layer).chain([(32000, 2048)]);
        shapes.map(|(n, k)| Ok((self.alloc(u64::from(n) * u64::from(k) * 2)?, n, k))).collect()
    }

    /// One step of the whole model as the runtime submits it: `tokens` new tokens over `sequences`.
    #[expect(clippy::too_many_lines, reason = "one list of the operations of a model")]
    fn model(
        &mut self,
        weights: &[(Slice, u32, u32)],
        sequences: u32,
        tokens: u32,
        context: u32,
    ) -> mixfleet_hal::Result<()> {
        let (x, weight, kv) = (DType::Bf16, DType::Bf16, DType::Bf16);
        let (heads, kv_heads, head_dim, page_tokens) = (32, 4, 64, 32);
        let rows = |width: u32| self.alloc(u64::from(tokens) * u64::from(width) * 2);
        let [stream, normed, q, k, v, attended] =
            [rows(2048)?, rows(2048)?, rows(2048)?, rows(256)?, rows(256)?, rows(2048)?];
        let [gate, up, inner] = [rows(5632)?, rows(5632)?, rows(5632)?];
        let gain = self.alloc(4096)?;
        let table = self.alloc(u64::from(tokens) * 256)?;
        let (k_pool, v_pool, pages, pages_max) = self.pools(sequences, context)?;
        let slots = self.words(&(0..tokens).collect::<Vec<_>>())?;
        let start = self.words(&(0..=sequences).map(|s| s * tokens / sequences).collect::<Vec<_>>())?;
        let contexts = self.words(&vec![context; sequences as usize])?;
        let range = self.words(&[0, context].repeat(sequences as usize))?;
        let acc = self.alloc(u64::from(tokens) * 8192)?;
        let stat = self.alloc(u64::from(tokens) * 256)?;
        let logits = self.alloc(u64::from(sequences) * 64000)?;
        let mut batch: Vec<Cmd> = Vec::new();
        let mut add = |sig: OpSig, args: &[&Slice]| -> mixfleet_hal::Result<()> {
            batch.push(Cmd::new(sig, &args.iter().map(|&s| s.clone()).collect::<Vec<_>>())?);
            Ok(())
        };
        let norm = |rows| OpSig::RmsNorm { rows, cols: 2048, eps: Scalar(1e-5), x, weight, out: x };
        let rope = |heads| OpSig::Rope { tokens, heads, head_dim, x, part: None };
        let project = |(_, n, k): &(Slice, u32, u32), m, accumulate| OpSig::Gemm {
            m,
            n: *n,
            k: *k,
            x,
            weight,
            out: x,
            bias: false,
            accumulate,
        };
        let (decode, elements) = (tokens == sequences, u64::from(tokens) * 5632);
        let kv_tokens = u64::from(sequences) * u64::from(context);
        let (layers, head) = weights.split_at(22 * 7);
        for w in layers.chunks(7) {
            add(norm(tokens), &[&stream, &gain, &normed])?;
            for (w, out) in w[..3].iter().zip([&q, &k, &v]) {
                add(project(w, tokens, false), &[&normed, &w.0, out])?;
            }
            add(rope(heads), &[&q, &table])?;
            add(rope(kv_heads), &[&k, &table])?;
            let write = OpSig::KvWrite {
                tokens,
                x,
                kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
            };
            add(write, &[&k, &v, &slots, &k_pool, &v_pool])?;
            if decode {
                let sig = OpSig::AttnDecode {
                    sequences,
                    kv_tokens,
                    heads,
                    pages_max,
                    x,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                    cap: None,
                };
                add(sig, &[&q, &range, &pages, &k_pool, &v_pool, &acc, &stat])?;
                let merge = OpSig::AttnMerge { parts: 1, rows: tokens * heads, head_dim, sinks: 0, out: x };
                add(merge, &[&acc, &stat, &attended])?;
            } else {
                let pairs = u64::from(tokens) * u64::from(tokens + 1) / 2;
                let sig = OpSig::AttnPrefill {
                    tokens,
                    sequences,
                    pairs,
                    kv_tokens,
                    heads,
                    pages_max,
                    window: None,
                    sinks: false,
                    x,
                    kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
                    cap: None,
                };
                add(sig, &[&q, &start, &contexts, &pages, &k_pool, &v_pool, &attended])?;
            }
            add(project(&w[3], tokens, true), &[&attended, &w[3].0, &stream])?;
            add(norm(tokens), &[&stream, &gain, &normed])?;
            add(project(&w[4], tokens, false), &[&normed, &w[4].0, &gate])?;
            add(project(&w[5], tokens, false), &[&normed, &w[5].0, &up])?;
            add(OpSig::SiluMul { elements, x }, &[&gate, &up, &inner])?;
            add(project(&w[6], tokens, true), &[&inner, &w[6].0, &stream])?;
        }
        let last = normed.range(0, u64::from(sequences) * 4096);
        add(norm(sequences), &[&stream.range(0, last.bytes), &gain, &last])?;
        add(project(&head[0], sequences, false), &[&last, &head[0].0, &logits])?;
        let flops: f64 = batch.iter().map(|c| c.sig().flops()).sum();
        let bytes: f64 = weights.iter().map(|w| w.0.bytes as f64).sum();
        let seconds = self.best(&[batch])?;
        println!(
            "model, {sequences} x {context}, {tokens} new: {:8.1} ms {:7.1} tokens/s, weights at {:5.1} GB/s ({:3.0} % of read), {:6.1} GFLOP/s ({:3.0} % of dot)",
            seconds * 1e3,
            f64::from(tokens) / seconds,
            bytes / seconds / 1e9,
            100.0 * bytes / seconds / self.read_rate,
            flops / seconds / 1e9,
            100.0 * flops / seconds / self.dot_rate
        );
        Ok(())
    }

    /// What dependent steps cost when there is nothing to do in them.
    fn launch(&mut self) -> mixfleet_hal::Result<()> {
        let (a, b) = (self.alloc(128 << 10)?, self.alloc(128 << 10)?);
        let copy = OpSig::Copy { bytes: 128 << 10 };
        let pairs = [Cmd::new(copy, &[a.clone(), b.clone()])?, Cmd::new(copy, &[b, a])?];
        let chain: Vec<Cmd> = (0..200).map(|i| pairs[i % 2].clone()).collect();
        let seconds = self.best(&[chain])?;
        println!("200 dependent copies of 128 KiB: {:.2} us each", seconds / 200.0 * 1e6);
        let ticket_cost = self.best(&[vec![pairs[0].clone()]])?;
        println!("one copy alone: {:.2} us", ticket_cost * 1e6);
        Ok(())
    }
}

/// Bytes per second of a plain read of huge pages by `threads` threads, each of one part or four side by
/// side, with lines fetched ahead or without: the best of these.
fn read_rate(threads: usize) -> std::io::Result<f64> {
    let mut map = memmap2::MmapMut::map_anon(2 << 30)?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    map.fill(1);
    // SAFETY: any bytes are words; pages are aligned for them.
    let (_, data, _) = unsafe { map.align_to::<u64>() };
    let pass = |fetches: bool, streams: usize| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(data.len().div_ceil(threads)) {
                scope.spawn(move || std::hint::black_box(sum(part, fetches, streams)));
            }
        });
        map.len() as f64 / start.elapsed().as_secs_f64()
    };
    Ok((0..16).map(|i| pass(i % 2 == 0, if i % 4 < 2 { 1 } else { 4 })).fold(0.0, f64::max))
}

fn sum(part: &[u64], fetches: bool, streams: usize) -> u64 {
    let mut sums = [0u64; 64];
    let streams: Vec<&[u64]> = part.chunks(part.len().div_ceil(streams)).collect();
    for at in (0..streams[0].len()).step_by(64) {
        for chunk in streams.iter().filter_map(|stream| stream.get(at..at + 64)) {
            #[cfg(target_arch = "x86_64")]
            if fetches {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                for line in 0..8 {
                    let ahead = chunk.as_ptr().wrapping_add(128 + 8 * line);
                    // SAFETY: a prefetch never faults.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
                }
            }
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum = sum.wrapping_add(*value);
            }
        }
    }
    let _ = fetches;
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Floating-point operations per second of the bf16 dot product in registers; 0 where there is none.
fn dot_rate(threads: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
        const ROUNDS: usize = 20_000_000;
        let pass = || {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    // SAFETY: both features were just detected.
                    scope.spawn(|| std::hint::black_box(unsafe { dots(ROUNDS) }));
                }
            });
            (ROUNDS * 12 * 64 * threads) as f64 / start.elapsed().as_secs_f64()
        };
        return (0..3).map(|_| pass()).fold(0.0, f64::max);
    }
    let _ = threads;
    0.0
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots(rounds: usize) -> f32 {
    use std::arch::x86_64::*;
    let mut acc = [_mm512_setzero_ps(); 12];
    // SAFETY: 64 bytes of zeros are a vector of bf16.
    let one: __m512bh = unsafe { std::mem::zeroed() };
    let one = std::hint::black_box(one);
    for _ in 0..rounds {
        for acc in &mut acc {
            *acc = _mm512_dpbf16_ps(*acc, one, one);
        }
    }
    acc.into_iter().map(|v| _mm512_reduce_add_ps(v)).sum()
}
