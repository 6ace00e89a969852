//! Counts the overhead of a decode step: on a software adapter times do not show it. The step is that of a
//! small model, submitted as a worker does: inputs are uploaded together, each layer is a batch, only the
//! last is waited for, and the drawn tokens are read.

use mixfleet_hal::op::Extent;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, KvShape, OpSig, Queue, Scalar, Slice};
use mixfleet_wgpu::{AdapterOverrides, WgpuBackend, WgpuCounts, WgpuDevice};
use std::collections::HashMap;
use std::time::Duration;

const X: DType = DType::F32;
const LAYERS: u32 = 4;
const HIDDEN: u32 = 64;
const HEADS: u32 = 4;
const INNER: u32 = 96;
const VOCAB: u32 = 100;
const PAGES_MAX: u32 = 3;
/// Data uploaded for a step.
const INPUT_BYTES: u64 = 1 << 12;
const KV: KvShape = KvShape { kv_heads: 2, head_dim: 16, page_tokens: 16, dtype: X, latent: None };

/// The memory of a model and of its steps, by name.
struct Memories<'a> {
    device: &'a WgpuDevice,
    by_name: HashMap<String, Slice>,
}

impl Memories<'_> {
    /// The operation on memory of these names, which is allocated when it is first used.
    fn cmd(&mut self, sig: OpSig, names: &[&str], layer: u32) -> Cmd {
        let args: Vec<Slice> = sig
            .operands()
            .iter()
            .zip(names)
            .map(|(operand, name)| {
                let bytes = operand.dtype.size_bytes()
                    * match operand.extent {
                        Extent::Exactly(n) => n,
                        Extent::PagesOf(n) => n * 16 * u64::from(PAGES_MAX),
                    };
                // names of parts of a layer begin with a capital
                let own = name.starts_with(char::is_uppercase);
                let name = if own { format!("{name}{layer}") } else { (*name).to_owned() };
                let made = || self.device.alloc(bytes.max(1 << 14), BufferUsage::Activations).unwrap();
                self.by_name.entry(name).or_insert_with(made).range(0, bytes)
            })
            .collect();
        Cmd::new(sig, &args).unwrap()
    }
}

fn gemm(m: u32, n: u32, k: u32, accumulate: bool) -> OpSig {
    OpSig::Gemm { m, n, k, x: X, weight: X, out: X, bias: false, accumulate }
}

fn norm(rows: u32) -> OpSig {
    OpSig::RmsNorm { rows, cols: HIDDEN, eps: Scalar(1e-5), x: X, weight: X, out: X }
}

/// The batches of a step with this many sequences, and the slice that is read.
fn batches(of: &mut Memories<'_>, rows: u32) -> (Vec<Vec<Cmd>>, Slice) {
    let (q_cols, kv_cols) = (HEADS * KV.head_dim, KV.kv_heads * KV.head_dim);
    let rope = |heads| OpSig::Rope { tokens: rows, heads, head_dim: KV.head_dim, part: None, x: X };
    let decode = OpSig::AttnDecode {
        sequences: rows,
        kv_tokens: 40,
        heads: HEADS,
        pages_max: PAGES_MAX,
        x: X,
        kv: KV,
        cap: None,
    };
    let merge = OpSig::AttnMerge { parts: 1, rows: rows * HEADS, head_dim: KV.head_dim, sinks: 0, out: X };
    let silu = OpSig::SiluMul { elements: u64::from(rows * INNER), x: X };
    let mut all = Vec::new();
    for at in 0..LAYERS {
        let mut list = Vec::new();
        if at == 0 {
            let embed = OpSig::Embed { tokens: rows, vocab: VOCAB, hidden: HIDDEN, table: X, out: X };
            list.push(of.cmd(embed, &["inputs", "table", "residual"], at));
        }
        for (sig, names) in [
            (norm(rows), &["residual", "Norm", "normed"][..]),
            (gemm(rows, q_cols, HIDDEN, false), &["normed", "Q", "q"]),
            (gemm(rows, kv_cols, HIDDEN, false), &["normed", "K", "k"]),
            (gemm(rows, kv_cols, HIDDEN, false), &["normed", "V", "v"]),
            (rope(HEADS), &["q", "table"]),
            (rope(KV.kv_heads), &["k", "table"]),
            (OpSig::KvWrite { tokens: rows, x: X, kv: KV }, &["k", "v", "inputs", "Keys", "Values"]),
            (decode, &["q", "inputs", "inputs", "Keys", "Values", "acc", "stat"]),
            (merge, &["acc", "stat", "attended"]),
            (gemm(rows, HIDDEN, q_cols, true), &["attended", "O", "residual"]),
            (norm(rows), &["residual", "Second", "normed"]),
            (gemm(rows, INNER, HIDDEN, false), &["normed", "Gate", "gate"]),
            (gemm(rows, INNER, HIDDEN, false), &["normed", "Up", "up"]),
            (silu, &["gate", "up", "inner"]),
            (gemm(rows, HIDDEN, INNER, true), &["inner", "Down", "residual"]),
        ] {
            list.push(of.cmd(sig, names, at));
        }
        all.push(list);
    }
    let sample = OpSig::Sample { rows, cols: VOCAB, history: 0, tops: 0 };
    let head = [
        of.cmd(norm(rows), &["residual", "norm", "normed"], 0),
        of.cmd(gemm(rows, VOCAB, HIDDEN, false), &["normed", "head", "logits"], 0),
        of.cmd(sample, &["logits", "parameters", "drawn"], 0),
    ];
    let drawn = head[2].args()[2].clone();
    all.push(head.into());
    (all, drawn)
}

/// Runs a step and returns the drawn tokens.
fn step(of: &mut Memories<'_>, queue: &mut dyn Queue, rows: u32) -> Vec<u8> {
    let (batches, drawn) = batches(of, rows);
    let inputs = of.by_name["inputs"].range(0, INPUT_BYTES);
    of.device.write(&inputs, &vec![0; inputs.bytes as usize]).unwrap();
    let (last, others) = batches.split_last().unwrap();
    for list in others {
        queue.submit(list).unwrap();
    }
    let ticket = queue.submit_for(last, std::slice::from_ref(&drawn)).unwrap();
    queue.wait(ticket, Duration::from_secs(600)).unwrap();
    let mut bytes = vec![0; drawn.bytes as usize];
    of.device.read(&drawn, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_step_asks_little_beside_arithmetic() {
    if let Err(absent) = WgpuBackend.probe() {
        return eprintln!("SKIPPED: no wgpu device: {absent}");
    }
    let device = WgpuDevice::open(0, AdapterOverrides::default()).unwrap();
    let mut queue = device.queue().unwrap();
    let mut of = Memories { device: &device, by_name: HashMap::new() };
    let sizes = [1, 16];
    let first = sizes.map(|rows| step(&mut of, &mut *queue, rows));
    for (rows, drawn) in sizes.into_iter().zip(first) {
        let before = device.counts();
        assert_eq!(step(&mut of, &mut *queue, rows), drawn);
        let counts = device.counts() - before;
        eprintln!("{rows} sequences: {counts:?}");
        let dispatches = u64::from(1 + 15 * LAYERS + 3);
        let wanted = WgpuCounts {
            submissions: u64::from(LAYERS) + 1,
            dispatches,
            copies: 0,
            planned: dispatches,
            bind_groups: 0,
            maps: 1,
            bytes_written: INPUT_BYTES,
            // two timestamps, and the drawn token of each sequence
            bytes_read: 16 + 16 * u64::from(rows),
        };
        assert_eq!(counts, wanted, "{rows} sequences");
    }
}
