//! The time of a query to a cost model: from a profile, from its tables, and of building those.
//!
//! `cargo bench -p mixfleet-scheduler --bench cost`

#![allow(missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use mixfleet_hal::DType;
use mixfleet_hal::catalog::part;
use mixfleet_hal::random::bits;
use mixfleet_scheduler::cost::{CostModel, EngineCost, Prefill, ProfileCost};
use mixfleet_scheduler::models;
use std::hint::black_box;

/// Queries per round, all different, so that no cache helps.
const QUESTIONS: u64 = 1024;

fn model() -> CostModel {
    let profile = part("L40S").and_then(|part| part.reached_profile()).expect("published for this part");
    let shape = models::find("llama-3.1-8b").expect("in the catalog").shape(DType::Bf16);
    CostModel::Profile(Box::new(ProfileCost {
        profile,
        shape,
        chunk_tokens: 2048,
        all_reduce: None,
        engine: EngineCost::OURS,
    }))
}

/// Number of sequences, their total context, context before a chunk, and the chunk's tokens.
fn questions() -> Vec<(u32, u64, u32, u32)> {
    let below = |seed, index, most: u64| bits(seed, index) % most;
    let question = |index| {
        let batch = 1 + below(1, index, 256);
        let context = batch * (1 + below(2, index, 16_384));
        (batch as u32, context, below(3, index, 65_536) as u32, 1 + below(4, index, 2048) as u32)
    };
    (0..QUESTIONS).map(question).collect()
}

fn cost(criterion: &mut Criterion) {
    let (slow, questions) = (model(), questions());
    let fast = slow.compiled();
    let mut group = criterion.benchmark_group("cost");
    group.throughput(criterion::Throughput::Elements(QUESTIONS));
    let mut ask = |name: &str, question: &dyn Fn(u32, u64, u32, u32) -> f64| {
        group.bench_function(name, |bencher| {
            bencher.iter(|| questions.iter().map(|&(b, kv, c, n)| question(b, kv, c, n)).sum::<f64>())
        });
    };
    ask("decode step, tables", &|batch, kv, _, _| fast.decode_step_s(batch, kv).0);
    ask("prompt, tables", &|_, _, context, tokens| fast.prefill_s(context, 8 * tokens).0);
    ask("mixed step, tables", &|batch, kv, context, tokens| {
        fast.step_s(&[Prefill { context, tokens, last: true }], batch, kv).0
    });
    ask("decode step, profile", &|batch, kv, _, _| slow.decode_step_s(batch, kv).0);
    group.finish();
    criterion.bench_function("make the tables", |bencher| bencher.iter(|| black_box(&slow).compiled()));
}

criterion_group!(benches, cost);
criterion_main!(benches);
