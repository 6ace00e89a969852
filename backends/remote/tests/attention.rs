//! What attention on devices of other processes sends, counted at the socket.

#![allow(clippy::print_stdout, reason = "a test says what it counted")]

use crate::common::{Crossed, TIMEOUT, lend, open, wire};
use mixfleet_hal::{Backend, DType, Device, Queue};
use mixfleet_remote::RemoteDevice;
use mixfleet_runtime::model::RandomCheckpoint;
use mixfleet_runtime::model::apart::{ApartBatch, ApartQueues, AttentionMember, run_apart};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::leaving::KvStays;
use mixfleet_scheduler::cost::{AttnBytes, AttnSplit};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const BLOCK_TOKENS: u32 = 32;
const SEQUENCES: u32 = 64;
/// Each sequence has two blocks; the second has one key.
const START: u32 = BLOCK_TOKENS;

fn checkpoint(layers: u32) -> RandomCheckpoint {
    let config = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "dtype": "float32", "tie_word_embeddings": true, "rope_theta": 10_000.0,
        "bos_token_id": 0, "eos_token_id": 1,
    });
    RandomCheckpoint { config: config.as_object().unwrap().clone(), dtype: DType::F32, seed: 3 }
}

fn total(wires: &[Arc<Crossed>]) -> [u64; 2] {
    let sum = |of: fn(&Crossed) -> u64| wires.iter().map(|crossed| of(crossed)).sum();
    [sum(|crossed| crossed.out.load(Ordering::SeqCst)), sum(|crossed| crossed.back.load(Ordering::SeqCst))]
}

/// Bytes out and back of a step that decodes this many sequences, and the partition's count per token and
/// layer.
fn step(layers: u32, sequences: u32, split: AttnSplit, workers: u32) -> ([u64; 2], AttnBytes) {
    let checkpoint = checkpoint(layers).load().unwrap();
    let config = &checkpoint.config;
    let partition = config.with_attention(workers as usize, split).unwrap();
    let (device, lent) = (core(), (0..workers).map(|_| wire(lend(core()))));
    let (addresses, wires): (Vec<_>, Vec<_>) = lent.unzip();
    let devices: Vec<RemoteDevice> = addresses.into_iter().map(open).collect();
    let shape = StepShape {
        tokens_max: SEQUENCES,
        sequences_max: SEQUENCES,
        blocks: 2 * SEQUENCES,
        block_tokens: BLOCK_TOKENS,
        activations: DType::F32,
        kv: DType::F32,
    };
    let weights = checkpoint.place_share(&*device, &partition.shares()[0], &mut |_, _| {}).unwrap().unwrap();
    let forward = Forward::of_member(&*device, config, &partition.shares()[0], weights, shape).unwrap();
    let own = StepShape { blocks: shape.blocks / partition.page_holders(), ..shape };
    let members: Vec<AttentionMember> = (1..=workers)
        .zip(&devices)
        .map(|(member, device)| AttentionMember::new(device, config, (&partition, member), own).unwrap())
        .collect();
    let mut queues: Vec<Box<dyn Queue>> = devices.iter().map(|device| device.queue().unwrap()).collect();
    let mut queue = device.queue().unwrap();
    let pages: Vec<[u32; 2]> = (0..sequences).map(|at| [2 * at, 2 * at + 1]).collect();
    let draw = Some(DrawInput::GREEDY);
    let parts: Vec<StepInput<'_>> =
        pages.iter().map(|pages| StepInput { start: START, tokens: &[1], pages, draw }).collect();

    let before = total(&wires);
    let attending = devices.iter().zip(&members).map(|(device, member)| (device as &dyn Device, member));
    let batch = ApartBatch::begin((&*device, &forward), attending, &parts).unwrap();
    let attending = queues.iter_mut().map(|queue| &mut **queue as &mut dyn Queue).collect();
    let mut queues = ApartQueues { first: &mut *queue, attending };
    let mut exchange = ThroughHost::default();
    run_apart(&mut queues, &[batch], &mut exchange, TIMEOUT, &mut KvStays, &mut |_, _| Ok(())).unwrap();
    let after = total(&wires);

    let cost = config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS);
    let holders = if split == AttnSplit::Range { workers } else { 1 };
    ([after[0] - before[0], after[1] - before[1]], partition.attention_bytes(&cost, holders).unwrap())
}

fn core() -> Arc<dyn Device> {
    mixfleet_cpu::CpuBackend.open("cpu@0").unwrap()
}

#[test]
fn a_layer_sends_queries_keys_values_and_results_and_little_else() {
    // by request, both blocks of a sequence would have to be on one device
    for (split, workers) in [(AttnSplit::Head, 1), (AttnSplit::Head, 2), (AttnSplit::Range, 2)] {
        for sequences in [1, SEQUENCES] {
            let (few, many) = (2, 6);
            let (small, _) = step(few, sequences, split, workers);
            let (large, AttnBytes { out, back }) = step(many, sequences, split, workers);
            let inputs = small[0] - u64::from(few) * (large[0] - small[0]) / u64::from(many - few);
            println!("by {split} on {workers}, {sequences} sequences: {inputs} bytes of inputs a step");
            for (which, payload, most) in [(0, out, 128), (1, back, 24)] {
                let layer = (large[which] - small[which]) / u64::from(many - few);
                let payload = payload * u64::from(sequences);
                let beside = layer - payload;
                println!("  {layer} bytes a layer, {beside} of them beyond the payload");
                assert!(beside <= most * u64::from(workers), "{beside} bytes beside {payload}");
                if sequences == SEQUENCES {
                    assert!(beside * 50 <= payload, "{beside} bytes beside {payload}");
                }
            }
        }
    }
}
