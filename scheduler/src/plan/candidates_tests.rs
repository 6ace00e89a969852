use super::branching::Microlp;
use super::candidates::*;
use super::layouts::InstanceLayout;
use super::linear::Search;
use super::program::*;
use crate::cost::{AllReduce, CostModel, ProfileCost};
use crate::engines;
use crate::models;
use crate::sizing::usable_bytes;
use mixfleet_hal::catalog::part;
use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds, UsdPerHour};
use mixfleet_hal::{DType, StoredAs};

fn kind(id: &str, devices: u32, model: &str) -> Result<InstanceKind, String> {
    let (model, engine) = (models::find(model).unwrap(), engines::find("vllm").unwrap());
    let kernels = PartKernels::of(part(id).unwrap());
    InstanceKind::of(
        (part(id).unwrap(), &kernels),
        InstanceLayout::of(devices),
        (model, 0.0),
        StoredAs::Plain(DType::Bf16),
        engine,
    )
}

/// Rates that a plan computes on demand equal those of full tables.
#[test]
fn times_are_those_of_tables_with_all_values() {
    for (devices, model) in [(1, "llama-3.1-8b"), (4, "qwen3-30b-a3b")] {
        let own = part("L40S").unwrap();
        let kind = kind("L40S", devices, model).unwrap();
        let cost = ProfileCost {
            profile: kind.profile.clone(),
            shape: kind.shape.clone(),
            chunk_tokens: kind.step_tokens_max,
            all_reduce: if devices > 1 { AllReduce::of(own, devices) } else { None },
            engine: engines::find("vllm").unwrap().cost,
        };
        let all = CostModel::Profile(Box::new(cost)).compiled();
        for (tokens, batch) in [(1, 1), (700, 3), (9000, 64), (150_000, 900)] {
            assert_eq!(kind.cost.prefill_s(tokens / 3, tokens), all.prefill_s(tokens / 3, tokens));
            let keys = u64::from(tokens) * u64::from(batch);
            assert_eq!(kind.cost.decode_step_s(batch, keys), all.decode_step_s(batch, keys));
        }
        assert_eq!(kind.cost, all);
    }
}

const CHAT: RequestSize = RequestSize { input_tokens: 1024, output_tokens: 257, cached_share: 0.0 };

fn level(ttft: f64, tbt: f64) -> ServiceLevel {
    ServiceLevel { ttft: Seconds(ttft), tbt: Seconds(tbt) }
}

#[test]
fn a_prompt_keeps_an_instance_busy_for_its_time_and_must_be_in_time() {
    let h100 = kind("H100-SXM-80GB", 1, "llama-3.1-8b").unwrap();
    let carried = h100.carries(Duty::Prefill, &CHAT, &level(0.5, 1.0)).unwrap();
    assert_eq!(carried.instances, h100.cost.prefill_s(0, 1024).0);
    let cached = RequestSize { cached_share: 0.75, ..CHAT };
    let rest = h100.carries(Duty::Prefill, &cached, &level(0.5, 1.0)).unwrap();
    assert_eq!(rest.instances, h100.cost.prefill_s(768, 256).0);
    assert!(rest.instances < carried.instances * 0.6, "{rest:?} {carried:?}");
    let late = h100.carries(Duty::Prefill, &CHAT, &level(carried.latency.0 * 0.99, 1.0));
    assert!(late.unwrap_err().contains("TTFT"));
    // all cached: one token remains to be computed
    let all = RequestSize { cached_share: 1.0, ..CHAT };
    let one = h100.carries(Duty::Prefill, &all, &level(0.5, 1.0)).unwrap();
    assert_eq!(one.instances, h100.cost.prefill_s(1023, 1).0);
}

#[test]
fn decode_takes_the_largest_batch_that_time_and_memory_allow() {
    let h100 = kind("H100-SXM-80GB", 1, "llama-3.1-8b").unwrap();
    let context = 1024 + 256 / 2;
    let step = |batch: u32| h100.cost.decode_step_s(batch, u64::from(batch) * context);
    let tight = h100.carries(Duty::Decode, &CHAT, &level(1.0, 0.010)).unwrap();
    assert!(step(tight.batch).0 <= 0.010 && step(tight.batch + 1).0 > 0.010, "{tight:?}");
    assert_eq!(tight.instances, 256.0 * step(tight.batch).0 / f64::from(tight.batch));
    // what vLLM uses of 80 GB, less 16.06 GB of weights, holds this many sequences of 128 KiB a token
    let loose = h100.carries(Duty::Decode, &CHAT, &level(1.0, 1.0)).unwrap();
    let room = usable_bytes(Bytes(80e9), true) - h100.weights.0;
    assert_eq!(loose.batch, (room / (131_072.0 * context as f64)).floor() as u32);
    assert!(loose.instances < tight.instances);
    assert!(h100.carries(Duty::Decode, &CHAT, &level(1.0, 0.001)).unwrap_err().contains("one sequence"));
}

#[test]
fn a_whole_request_costs_no_more_than_its_two_halves_and_no_less_than_decoding() {
    for id in ["H100-SXM-80GB", "L40S", "RTX-4090"] {
        let kind = kind(id, 1, "llama-3.1-8b").unwrap();
        for output_tokens in [17, 257, 2049] {
            let size = RequestSize { output_tokens, ..CHAT };
            let of = |duty| kind.carries(duty, &size, &level(2.0, 0.2)).unwrap();
            let (whole, prefill, decode) = (of(Duty::Whole), of(Duty::Prefill), of(Duty::Decode));
            // at the batch that is left when a step also computes prompts
            let step = kind.cost.decode_step_s(
                whole.batch,
                u64::from(whole.batch) * u64::from(1024 + (output_tokens - 1) / 2),
            );
            let decode_then = f64::from(output_tokens - 1) * step.0 / f64::from(whole.batch);
            assert!(whole.instances >= decode.instances, "{id}: {whole:?} {decode:?}");
            assert!(
                whole.instances <= (prefill.instances + decode_then) * 1.02,
                "{id}: {whole:?} {prefill:?}"
            );
            assert!(whole.latency.0 <= 0.2 && whole.batch <= decode.batch, "{id}: {whole:?}");
        }
        let none = RequestSize { output_tokens: 1, ..CHAT };
        let whole = kind.carries(Duty::Whole, &none, &level(2.0, 0.2));
        assert_eq!(whole, kind.carries(Duty::Prefill, &none, &level(2.0, 0.2)));
    }
}

#[test]
fn what_cannot_be_held_or_divided_is_refused_with_the_reason() {
    let whole =
        |id: &str, devices, model| kind(id, devices, model)?.carries(Duty::Whole, &CHAT, &level(5.0, 0.2));
    assert!(whole("L40S", 1, "llama-3.1-70b").unwrap_err().contains("1 x 48 GB"));
    assert!(whole("L40S", 8, "llama-3.1-70b").is_ok());
    assert!(whole("H100-SXM-80GB", 3, "llama-3.1-70b").unwrap_err().contains("divide over 3"));
    let long = RequestSize { input_tokens: 100_000, ..CHAT };
    let carried = kind("RTX-4090", 1, "llama-3.1-8b").unwrap().carries(Duty::Decode, &long, &level(1.0, 1.0));
    assert!(carried.unwrap_err().contains("100256 tokens"));
}

/// An H20 holds and reads the KV that an H100 has no room for beside the weights; latent attention is not
/// given away (Step-3, arXiv 2507.19427).
#[test]
fn attention_apart_makes_room_for_sequences_and_needs_a_network() {
    let kernels = |id: &str| PartKernels::of(part(id).unwrap());
    let products = |id: &str, model: &str| {
        let (model, engine) = (models::find(model).unwrap(), engines::find("vllm").unwrap());
        let stored = StoredAs::Plain(DType::Bf16);
        let own = kernels(id);
        ProductsKind::of((part(id).unwrap(), &own), InstanceLayout::of(4), model, stored, engine).unwrap()
    };
    let (h20, h100) = (kernels("H20-96GB"), products("H100-SXM-80GB", "llama-3.1-70b"));
    let of = |devices: u32, network: f64| {
        let kind = h100.with(&h20, devices, BytesPerSecond(network)).unwrap();
        kind.carries(Duty::Decode, &CHAT, &level(1.0, 0.1))
    };
    let alone = kind("H100-SXM-80GB", 4, "llama-3.1-70b").unwrap();
    let alone = alone.carries(Duty::Decode, &CHAT, &level(1.0, 0.1)).unwrap();
    let apart = of(8, 183e9).unwrap();
    assert!(apart.batch > alone.batch && apart.instances < alone.instances, "{apart:?} {alone:?}");
    assert!(of(2, 183e9).unwrap().batch < apart.batch);
    assert!(of(8, 20e9).unwrap().batch < apart.batch);
    assert!(of(8, 1e6).unwrap_err().contains("one sequence"));
    // the memory of the attention devices holds a sequence
    let kind = h100.with(&h20, 2, BytesPerSecond(183e9)).unwrap();
    let tokens = (2.0 * usable_bytes(Bytes(96e9), true) / 327_680.0) as u32;
    // in whole pages of 16 tokens
    let tokens = tokens - tokens % 16;
    assert!(kind.holds(tokens) && !kind.holds(tokens + 1));
    let latent = products("H200-SXM-141GB", "deepseek-v3").with(&h20, 8, BytesPerSecond(183e9));
    assert!(latent.unwrap_err().contains("per byte of KV"));
}

/// The rates of two parts make a program: an H20 at Step-3's price decodes what an H100 prefills, for less
/// than either alone.
#[test]
fn a_mix_of_two_parts_follows_from_their_rates_and_prices() {
    let kinds = [("H100-SXM-80GB", 4, 2.69), ("H20-96GB", 4, 0.80)];
    let size = RequestSize { input_tokens: 6000, output_tokens: 400, cached_share: 0.0 };
    let solve = |only: Option<usize>| {
        let mut program = Program {
            classes: vec![DemandClass { name: "all".into(), rate: 40.0, asks: Duty::Whole }],
            ..Program::default()
        };
        for (at, (id, devices, price)) in
            kinds.into_iter().enumerate().filter(|(at, _)| only.is_none_or(|only| only == *at))
        {
            let kind = kind(id, devices, "llama-3.1-70b").unwrap();
            for duty in [Duty::Whole, Duty::Prefill, Duty::Decode] {
                let Ok(carried) = kind.carries(duty, &size, &level(3.0, 0.1)) else { continue };
                program.placings.push(Placing {
                    on: program.rentables.len(),
                    class: 0,
                    duty,
                    instances: carried.instances,
                    takes: Vec::new(),
                });
                program.rentables.push(Rentable {
                    name: format!("{at} {duty:?}"),
                    usd_per_hour: UsdPerHour(price * f64::from(devices)),
                    most: 200,
                    takes: Vec::new(),
                    spares: 0,
                });
            }
        }
        let fleet = program.solve(&Microlp, Search::default()).unwrap();
        let pools = program.rentables.iter().zip(&fleet.counts).filter(|(_, count)| **count > 0);
        (fleet.clone(), pools.map(|(kind, _)| kind.name.clone()).collect::<Vec<_>>())
    };
    let (mix, pools) = solve(None);
    let alone = [solve(Some(0)).0, solve(Some(1)).0];
    eprintln!("{mix:?} {pools:?}, alone {:?}", alone.each_ref().map(|fleet| fleet.usd_per_hour));
    assert!(pools.contains(&"0 Prefill".to_owned()), "{pools:?}");
    assert!(pools.iter().any(|name| name == "1 Decode" || name == "1 Whole"), "{pools:?}");
    assert!(alone.iter().all(|fleet| mix.usd_per_hour.0 < fleet.usd_per_hour.0 * 0.97), "{mix:?} {alone:?}");
    assert!(mix.lower_bound <= mix.usd_per_hour && mix.proven);
}
