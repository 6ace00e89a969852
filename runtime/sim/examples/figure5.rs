//! Mean TTFT by policy on the conversation trace, as in figure 5 of FAST'25, and by link bandwidth:
//! `cargo run --release -p mixfleet-sim --example figure5 [TIME_FACTOR]`.

#![allow(clippy::print_stdout)]

use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{Coefficients, CostModel, DecodeCoefficients, LinkCost, PrefillCoefficients};
use mixfleet_scheduler::fleet::{Admission, FleetConfig, Policy, Role};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::fleet_file::TbtMetric;
use mixfleet_sim::simulate::{InstanceSetup, Objectives, Results, Setup, run};
use mixfleet_sim::trace::{ReadOptions, Requests, Trace};
use std::sync::Arc;

const TRACE: &str = "../shared/data/traces/mooncake-conversation.jsonl.zst";

fn setup(policy: Policy, gb_per_s: f64, time_factor: f64) -> Setup {
    let cost = CostModel::Coefficients(Coefficients {
        prefill_s: PrefillCoefficients {
            overhead: 0.08 * time_factor,
            per_token: 1.19e-4 * time_factor,
            per_token_squared: 7.467e-10 * time_factor,
        },
        decode_s: DecodeCoefficients { base: 0.0262, per_sequence: 0.0, per_kv_token: 3.5e-8 },
    });
    let cost = Arc::new(cost);
    let nic = LinkCost { latency: Seconds(1e-5), seconds_per_byte: 1e-9 / gb_per_s, usd_per_byte: 0.0 };
    let instance = |pool: u32, role| InstanceSetup {
        pool,
        device: "8xA800".into(),
        role,
        cost: cost.clone(),
        price: None,
        cache_tokens: 3_000_000,
        nic: Some(nic),
        step_tokens_max: 8192,
        sequences_max: 256,
    };
    let instances = (0..16).map(|i| instance(i / 8, if i < 8 { Role::Prefill } else { Role::Decode }));
    Setup {
        fleet: FleetConfig {
            policy,
            admission: Admission::None,
            pull: true,
            ..FleetConfig::new(327_680, 80)
        },
        block_tokens: 512,
        cache_policy: CachePolicy::Lru,
        prefix_caching: true,
        pools: vec!["prefill".into(), "decode".into()],
        instances: instances.collect(),
        pool_links: Vec::new(),
        slo: Objectives { ttft_s: 30.0, tbt_s: 0.1, metric: TbtMetric::Longest10 },
    }
}

fn mean_ttft(policy: Policy, gb_per_s: f64, factor: f64) -> Result<Results, Box<dyn std::error::Error>> {
    let trace = Trace::open(TRACE.as_ref(), ReadOptions::default())?;
    let requests = trace.jitter(Seconds(3.0), 1);
    Ok(run(&setup(policy, gb_per_s, factor), requests, &mut |_, _| {})?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let factor: f64 = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse())?;
    let threshold = 1.0;
    let policies = [
        Policy::Random,
        Policy::LeastLoaded,
        Policy::CacheAware,
        Policy::KvcacheCentric { threshold },
        Policy::PerDollar,
    ];
    for policy in policies {
        let start = std::time::Instant::now();
        let r = mean_ttft(policy, 80.0, factor)?;
        println!(
            "{policy:?}: TTFT mean {:.3} p90 {:.3} s, hit {:.3} block {:.3} token, prefill {:.0} device s, {} of {} done, SLO {:.3}, {:.2} s",
            r.ttft_s.mean,
            r.ttft_s.p90,
            r.prefix_hit.block,
            r.prefix_hit.token,
            r.prefill_device_s,
            r.completed,
            r.requests,
            r.slo_attainment,
            start.elapsed().as_secs_f64()
        );
    }
    for gb_per_s in [0.3, 1.25, 3.1, 6.2, 12.5, 25.0, 80.0] {
        let of = |policy| mean_ttft(policy, gb_per_s, factor).map(|r| r.ttft_s.mean);
        let (local, algorithm, ours) =
            (of(Policy::CacheAware)?, of(Policy::KvcacheCentric { threshold })?, of(Policy::PerDollar)?);
        println!("{gb_per_s} GB/s: cache-aware {local:.3}, Algorithm 1 {algorithm:.3}, per-dollar {ours:.3}");
    }
    Ok(())
}
