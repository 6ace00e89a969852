//! A profile, a device, and a model on it that is driven step by step.

#![allow(dead_code, reason = "each test file uses a part of it")]

use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::sample::Drawn;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, OpSig, Queue, Slice};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_simulated::{TimeOnlyDevice, VirtualClock};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const GREEDY: Option<DrawInput<'static>> = Some(DrawInput::GREEDY);

pub(crate) const TIMEOUT: Duration = Duration::from_secs(3600);
/// Blocks of 8 tokens that fill the pools.
pub(crate) const POOL_TOKENS: u32 = 240;

/// 1 TB/s, 100 TFLOP/s, 1 GB.
pub(crate) fn profile() -> DeviceProfile {
    let compute = vec![(DType::F32, FlopPerSecond(50e12)), (DType::Bf16, FlopPerSecond(100e12))];
    DeviceProfile {
        name: "test part".into(),
        fingerprint: "test".into(),
        launch: Seconds(10e-6),
        launch_per_command: Seconds(1e-6),
        ..DeviceProfile::roof(compute, BytesPerSecond(1e12), Bytes(1e9))
    }
}

pub(crate) fn device(id: &str) -> Arc<dyn Device> {
    let device = TimeOnlyDevice::new(id, profile(), Arc::new(VirtualClock::default()));
    Arc::new(device.unwrap())
}

/// How a rig stores what it computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) block_tokens: u32,
    pub(crate) activations: DType,
    pub(crate) kv: DType,
}

pub(crate) const PLAIN: Form = Form { block_tokens: 8, activations: DType::Bf16, kv: DType::Bf16 };

/// A model on a simulated device.
pub(crate) struct Rig {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) forward: Forward,
    pub(crate) form: Form,
}

impl Rig {
    pub(crate) fn new(checkpoint: &Checkpoint, form: Form) -> Self {
        Rig::on(device("sim:test"), checkpoint, form)
    }

    pub(crate) fn on(device: Arc<dyn Device>, checkpoint: &Checkpoint, form: Form) -> Self {
        let shape = StepShape {
            tokens_max: 64,
            sequences_max: 8,
            blocks: POOL_TOKENS / form.block_tokens,
            block_tokens: form.block_tokens,
            activations: form.activations,
            kv: form.kv,
        };
        let weights = checkpoint.place(&*device, &mut |_, _| {}).unwrap();
        let forward = Forward::new(&*device, Arc::new(checkpoint.config.clone()), weights, shape).unwrap();
        Rig { queue: device.queue().unwrap(), device, forward, form }
    }

    /// Pages for `tokens` tokens; other `salt`s take others, and in another order.
    pub(crate) fn pages(&self, tokens: u32, salt: u32) -> Vec<u32> {
        let blocks = self.forward.shape().blocks;
        // steps that have no divisor in common with any of the pool's numbers of blocks
        let step = [1, 7, 11, 13][salt as usize % 4];
        (0..tokens.div_ceil(self.form.block_tokens)).map(|i| (salt * 31 + i * step) % blocks).collect()
    }

    pub(crate) fn run(&mut self, cmds: &[Cmd]) {
        let ticket = self.queue.submit(cmds).unwrap();
        self.queue.wait(ticket, TIMEOUT).unwrap();
    }

    pub(crate) fn read(&self, slice: &Slice) -> Vec<u8> {
        let mut bytes = vec![0; slice.bytes as usize];
        self.device.read(slice, &mut bytes).unwrap();
        bytes
    }

    /// One forward pass; returns the logits of each sampled part. The drawn tokens must agree with them.
    pub(crate) fn step(&mut self, parts: &[StepInput<'_>]) -> Vec<Vec<f32>> {
        let pass = self.forward.begin(&*self.device, parts).unwrap();
        let list = self.forward.whole(&pass).unwrap();
        self.run(&list);
        if pass.rows() == 0 {
            return Vec::new();
        }
        let logits = DType::F32.decode(&self.read(&self.forward.logits(&pass)));
        let rows = logits.chunks(self.forward.config().vocab as usize);
        let rows: Vec<Vec<f32>> = rows.map(|row| row.iter().map(|&v| v as f32).collect()).collect();
        if let Some(draws) = self.forward.drawn(&pass) {
            let drawn = self.read(draws.drawn());
            let ids =
                drawn.chunks(size_of::<Drawn>()).map(|row| u32::from_le_bytes(*row.first_chunk().unwrap()));
            for (row, id) in rows.iter().zip(ids) {
                assert_eq!(winner(row), id);
            }
        }
        rows
    }

    /// Computes `tokens` after `start` in chunks of these sizes (the last takes the rest); the logits
    /// after the last one.
    pub(crate) fn prefill(&mut self, start: u32, tokens: &[u32], pages: &[u32], chunks: &[u32]) -> Vec<f32> {
        let mut at = 0;
        let mut sizes = chunks.iter().copied().filter(|&size| size > 0);
        loop {
            let left = tokens.len() - at;
            let size = sizes.next().map_or(left, |size| (size as usize).min(left)).min(64);
            let chunk = &tokens[at..at + size];
            let last = size == left;
            let mut logits = self.step(&[StepInput {
                start: start + at as u32,
                tokens: chunk,
                pages,
                draw: last.then_some(DrawInput::GREEDY),
            }]);
            if last {
                return logits.remove(0);
            }
            at += size;
        }
    }

    /// Draws `count` tokens greedily after `logits`, which `length` tokens gave.
    pub(crate) fn decode(&mut self, length: u32, logits: &[f32], pages: &[u32], count: u32) -> Vec<u32> {
        let mut tokens = vec![winner(logits)];
        for step in 1..count {
            let token = tokens[tokens.len() - 1];
            let start = length + step - 1;
            let logits = self.step(&[StepInput { start, tokens: &[token], pages, draw: GREEDY }]);
            tokens.push(winner(&logits[0]));
        }
        tokens
    }

    /// Slots of a sequence's tokens.
    pub(crate) fn slots(&self, pages: &[u32], tokens: u32) -> Vec<u32> {
        let block = self.form.block_tokens;
        (0..tokens).map(|i| pages[(i / block) as usize] * block + i % block).collect()
    }

    /// Takes a layer's KV of these slots out in the wire layout, as `wire`.
    pub(crate) fn gather(&mut self, layer: usize, slots: &[u32], wire: DType) -> Vec<u8> {
        let (tokens, kv) = (slots.len() as u32, self.kv_shape());
        let sig = OpSig::KvGather { tokens, wire, kv };
        let bytes = u64::from(kv.pools() * tokens * kv.kv_heads * kv.head_dim) * wire.size_bytes();
        let out = self.device.alloc(bytes, BufferUsage::Staging).unwrap();
        let mut args = vec![self.upload(slots)];
        args.extend(self.pools(layer));
        args.push(out.clone());
        self.run(&[Cmd::new(sig, &args).unwrap()]);
        self.read(&out)
    }

    /// Puts what another rig gathered into these slots.
    pub(crate) fn scatter(&mut self, layer: usize, slots: &[u32], wire: DType, data: &[u8]) {
        let sig = OpSig::KvScatter { tokens: slots.len() as u32, wire, kv: self.kv_shape() };
        let from = self.device.alloc(data.len() as u64, BufferUsage::Staging).unwrap();
        self.device.write(&from, data).unwrap();
        let mut args = vec![from, self.upload(slots)];
        args.extend(self.pools(layer));
        self.run(&[Cmd::new(sig, &args).unwrap()]);
    }

    fn kv_shape(&self) -> KvShape {
        self.forward.config().kv_shape(self.form.block_tokens, self.form.kv)
    }

    /// The pools of a layer; latents have one.
    fn pools(&self, layer: usize) -> Vec<Slice> {
        let (k, v) = self.forward.kv_pools()[layer].clone();
        [k, v].into_iter().take(self.kv_shape().pools() as usize).collect()
    }

    fn upload(&self, words: &[u32]) -> Slice {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let slice = self.device.alloc(bytes.len() as u64, BufferUsage::Activations).unwrap();
        self.device.write(&slice, &bytes).unwrap();
        slice
    }
}

/// The index of the largest logit, which must be larger than all others by far.
pub(crate) fn winner(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best });
    let others = logits.iter().enumerate().filter(|(at, _)| *at != best).map(|(_, v)| *v);
    let second = others.fold(f32::NEG_INFINITY, f32::max);
    assert!(
        logits.iter().all(|v| v.is_finite()) && logits[best] > second + 100.0,
        "{} {second}",
        logits[best]
    );
    best as u32
}
