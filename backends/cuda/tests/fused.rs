//! Fused launches write the same bits as single ones, and only operations that may be fused are.

use crate::emulator::EmulatedDevice;
use mixfleet_cuda::plan::KV_PAGE_TOKENS;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, LatentKv, OpSig, Scalar, Slice};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Memory that commands share, with contents that are reset before each run.
pub(crate) struct Scene {
    pub(crate) device: EmulatedDevice,
    memory: Vec<(Slice, Vec<u8>)>,
    state: u64,
}

impl Scene {
    fn new(multiprocessors: u32) -> Option<Scene> {
        Scene::on(EmulatedDevice::new(multiprocessors))
    }

    pub(crate) fn on(device: Option<EmulatedDevice>) -> Option<Scene> {
        let Some(device) = device else {
            eprintln!("SKIPPED: the emulator needs g++ on x86-64 Linux");
            return None;
        };
        Some(Scene { device, memory: Vec::new(), state: 1 })
    }

    fn put(&mut self, bytes: Vec<u8>) -> Slice {
        let slice = self.device.alloc(bytes.len() as u64, BufferUsage::Activations).unwrap();
        self.memory.push((slice.clone(), bytes));
        slice
    }

    pub(crate) fn words(&mut self, words: &[u32]) -> Slice {
        self.put(words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    /// `count` numbers between -1 and 1.
    pub(crate) fn numbers(&mut self, dtype: DType, count: u32) -> Slice {
        let mut draw = || {
            self.state =
                self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let bytes = match dtype {
            DType::F32 => (0..count).flat_map(|_| draw().to_le_bytes()).collect(),
            DType::Bf16 => (0..count).flat_map(|_| ((draw().to_bits() >> 16) as u16).to_le_bytes()).collect(),
            _ => panic!("no numbers of {dtype}"),
        };
        self.put(bytes)
    }

    /// Runs `lists` one after another from the same memory; returns the memory afterwards, and the launches.
    pub(crate) fn run(&self, lists: &[&[Cmd]]) -> (Vec<Vec<u8>>, usize) {
        for (slice, bytes) in &self.memory {
            self.device.write(slice, bytes).unwrap();
        }
        let before = self.device.launched.load(Ordering::Relaxed);
        let mut queue = self.device.queue().unwrap();
        for list in lists {
            let ticket = queue.submit(list).unwrap();
            queue.wait(ticket, Duration::from_secs(60)).unwrap();
        }
        let read = |(slice, bytes): &(Slice, Vec<u8>)| {
            let mut now = vec![0; bytes.len()];
            self.device.read(slice, &mut now).unwrap();
            now
        };
        (self.memory.iter().map(read).collect(), self.device.launched.load(Ordering::Relaxed) - before)
    }

    /// Runs `list` one by one and at once, and returns the launches of each.
    #[track_caller]
    fn compare(&self, list: &[Cmd]) -> (usize, usize) {
        let alone: Vec<&[Cmd]> = list.chunks(1).collect();
        let (expected, separate) = self.run(&alone);
        let (found, together) = self.run(&[list]);
        for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
            assert!(expected == found, "memory {at} differs");
        }
        assert!(
            expected.iter().zip(&self.memory).any(|(now, (_, before))| now != before),
            "nothing was written"
        );
        (separate, together)
    }
}

fn gemm(m: u32, (n, k): (u32, u32), (x, out): (DType, DType), bias: bool, accumulate: bool) -> OpSig {
    OpSig::Gemm { m, n, k, x, weight: DType::Bf16, out, bias, accumulate }
}

#[test]
fn products_of_one_x_are_one_launch() {
    for (multiprocessors, m) in [(1, 1), (8, 3), (1, 9), (8, 16)] {
        for (x, out) in [(DType::Bf16, DType::Bf16), (DType::F32, DType::F32), (DType::Bf16, DType::F32)] {
            let Some(mut scene) = Scene::new(multiprocessors) else { return };
            let k = 392;
            let rows = scene.numbers(x, m * k);
            let list: Vec<Cmd> = [(70, true, false), (33, false, true), (16, true, true)]
                .map(|(n, bias, accumulate)| {
                    let mut args = vec![rows.clone(), scene.numbers(DType::Bf16, n * k)];
                    args.extend(bias.then(|| scene.numbers(DType::Bf16, n)));
                    args.push(scene.numbers(out, m * n));
                    Cmd::new(gemm(m, (n, k), (x, out), bias, accumulate), &args).unwrap()
                })
                .to_vec();
            assert_eq!(scene.compare(&list), (3, 1));
            assert_eq!(scene.compare(&list[..2]), (2, 1));
        }
    }
}

#[test]
fn a_gate_its_up_and_their_product_are_one_launch() {
    for (m, x) in [(1, DType::Bf16), (11, DType::Bf16), (3, DType::F32)] {
        let Some(mut scene) = Scene::new(4) else { return };
        let (n, k) = (72, 520);
        let rows = scene.numbers(x, m * k);
        let [gate_weight, up_weight] = [n * k; 2].map(|count| scene.numbers(DType::Bf16, count));
        let [gate, up, out] = [m * n; 3].map(|count| scene.numbers(x, count));
        let product = |weight: &Slice, to: &Slice| {
            Cmd::new(gemm(m, (n, k), (x, x), false, false), &[rows.clone(), weight.clone(), to.clone()])
                .unwrap()
        };
        let sig = OpSig::SiluMul { elements: u64::from(m * n), x };
        let silu = Cmd::new(sig, &[gate.clone(), up.clone(), out.clone()]).unwrap();
        let list = [product(&gate_weight, &gate), product(&up_weight, &up), silu];
        assert_eq!(scene.compare(&list), (3, 1));
        // other blocks may still read the rows
        let over_x = Cmd::new(sig, &[gate.clone(), up.clone(), rows.range(0, out.bytes)]).unwrap();
        assert_eq!(scene.compare(&[list[0].clone(), list[1].clone(), over_x]), (3, 2));
    }
}

/// The second product reads what the first writes, or writes what it reads, or both write the same place.
#[test]
fn products_that_depend_on_each_other_stay_apart() {
    let Some(mut scene) = Scene::new(4) else { return };
    let (m, n) = (2, 64);
    let [a, b, c] = [m * n; 3].map(|count| scene.numbers(DType::Bf16, count));
    let weights = [n * n; 2].map(|count| scene.numbers(DType::Bf16, count));
    let product = |from: &Slice, weight: &Slice, to: &Slice| {
        let sig = gemm(m, (n, n), (DType::Bf16, DType::Bf16), false, false);
        Cmd::new(sig, &[from.clone(), weight.clone(), to.clone()]).unwrap()
    };
    let chain = [product(&a, &weights[0], &b), product(&b, &weights[1], &c)];
    assert_eq!(scene.compare(&chain), (2, 2));
    let onto_x = [product(&a, &weights[0], &b), product(&a, &weights[1], &b)];
    assert_eq!(scene.compare(&onto_x), (2, 2));
    let over_weights =
        [product(&a, &weights[0], &b), product(&a, &weights[1], &weights[0].range(0, c.bytes))];
    assert_eq!(scene.compare(&over_weights), (2, 2));
}

#[test]
fn rope_and_kv_write_are_one_launch() {
    for (x, kv, head_dim) in
        [(DType::Bf16, DType::Bf16, 64), (DType::F32, DType::Bf16, 64), (DType::F32, DType::F32, 12)]
    {
        let Some(mut scene) = Scene::new(4) else { return };
        let (tokens, heads, kv_heads, pages) = (5, 6, 2, 3);
        let shape = KvShape { kv_heads, head_dim, page_tokens: KV_PAGE_TOKENS, dtype: kv, latent: None };
        let q = scene.numbers(x, tokens * heads * head_dim);
        let [k, v] = [tokens * kv_heads * head_dim; 2].map(|count| scene.numbers(x, count));
        let cos_sin = scene.numbers(DType::F32, tokens * head_dim);
        // one slot is outside the pool
        let slots = scene.words(&[3, 17, 47, 48, 0]);
        let [k_pool, v_pool] =
            [pages * KV_PAGE_TOKENS * kv_heads * head_dim; 2].map(|count| scene.numbers(kv, count));
        let rope = |heads, what: &Slice| {
            let sig = OpSig::Rope { tokens, heads, head_dim, x, part: None };
            Cmd::new(sig, &[what.clone(), cos_sin.clone()]).unwrap()
        };
        let write = |k: &Slice, v: &Slice| {
            let args = [k.clone(), v.clone(), slots.clone(), k_pool.clone(), v_pool.clone()];
            Cmd::new(OpSig::KvWrite { tokens, x, kv: shape }, &args).unwrap()
        };
        let list = [rope(heads, &q), rope(kv_heads, &k), write(&k, &v)];
        assert_eq!(scene.compare(&list), (3, 1));
        // the written keys are not the rotated ones
        assert_eq!(scene.compare(&[list[0].clone(), list[1].clone(), write(&v, &k)]), (3, 3));
    }
}

#[test]
fn decode_attention_in_parts_and_its_merge_are_two_launches() {
    let contexts = [1000, 1, 0, 130];
    let latent = Some(LatentKv { rank: 128, scale: Scalar(0.2) });
    let shapes = [(8, 2, 64, None), (20, 1, 144, latent)];
    for (out, (heads, kv_heads, head_dim, latent)) in
        [DType::Bf16, DType::F32].into_iter().flat_map(|out| shapes.map(|shape| (out, shape)))
    {
        let Some(mut scene) = Scene::new(8) else { return };
        let (sequences, pages_max) = (contexts.len() as u32, 64);
        let page_tokens = KV_PAGE_TOKENS;
        let shape = KvShape { kv_heads, head_dim, page_tokens, dtype: DType::Bf16, latent };
        let value_dim = shape.value_dim();
        let q = scene.numbers(out, sequences * heads * head_dim);
        let ranges: Vec<u32> = contexts.iter().flat_map(|&end| [0, end]).collect();
        let ranges = scene.words(&ranges);
        let pages = scene.words(&(0..sequences * pages_max).collect::<Vec<_>>());
        let pool_elements = sequences * pages_max * KV_PAGE_TOKENS * kv_heads * head_dim;
        let pools: Vec<Slice> =
            (0..shape.pools()).map(|_| scene.numbers(DType::Bf16, pool_elements)).collect();
        let acc = scene.numbers(DType::F32, sequences * heads * value_dim);
        let stat = scene.numbers(DType::F32, sequences * heads * 2);
        let merged = scene.numbers(out, sequences * heads * value_dim);
        let kv_tokens = contexts.iter().map(|&context| u64::from(context)).sum();
        let sig = OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, x: out, kv: shape, cap: None };
        let args = [vec![q, ranges, pages], pools, vec![acc.clone(), stat.clone()]].concat();
        let decode = Cmd::new(sig, &args).unwrap();
        let rows = sequences * heads;
        let sig = OpSig::AttnMerge { parts: 1, rows, head_dim: value_dim, sinks: 0, out };
        let merge = Cmd::new(sig, &[acc, stat, merged]).unwrap();
        assert_eq!(scene.compare(&[decode, merge]), (3, 2));
    }
}
