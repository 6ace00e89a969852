//! The same fleet and requests in the simulator.

use super::{BLOCK_TOKENS, STEP_TOKENS_MAX, Scene, Seen, Step};
use mixfleet_runtime::engine::EngineConfig;
use mixfleet_scheduler::batch::{BatchLimits, PageDevices, PageParts};
use mixfleet_scheduler::fleet::{Event, FleetConfig, Instance};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_sim::fleet_file::{Class, ClassMembers, Promise, Routing, Slo, TbtMetric};
use mixfleet_sim::simulate::{InstanceSetup, Setup, run};
use mixfleet_sim::trace::Request;
use std::collections::BTreeSet;

/// Simulates the fleet and the requests that were served.
pub(super) fn simulated(scene: &Scene, fleet: FleetConfig, steps: &[Step]) -> Seen {
    let mut known = BTreeSet::new();
    let (mut instances, mut pool_links, mut requests) = (Vec::new(), Vec::new(), Vec::new());
    for step in steps {
        match step.event.clone() {
            Event::InstanceUp(up) if known.insert((up.id, up.id)) => instances.push(InstanceSetup {
                limits: BatchLimits {
                    blocks_total: (up.kv_capacity_tokens / u64::from(BLOCK_TOKENS)) as u32,
                    block_tokens: BLOCK_TOKENS,
                    step_tokens_max: STEP_TOKENS_MAX,
                    prefill_tokens_beside_decode_max: up.prefill_tokens_beside_decode_max,
                    sequences_max: scene.sequences_max as usize,
                    spare_blocks: BatchLimits::spare_blocks(
                        (up.kv_capacity_tokens / u64::from(BLOCK_TOKENS)) as u32,
                        scene.sequences_max as usize,
                    ),
                    lower_tiers: false,
                    cache_policy: CachePolicy::Lru,
                    page_devices: PageDevices::ONE,
                    page_parts: PageParts::ONE,
                },
                tiers: Vec::new(),
                lenders: Vec::new(),
                spec: Instance { pool: up.id.0, nic: None, step_tokens_max: STEP_TOKENS_MAX, ..up },
            }),
            Event::LinkUp(link) if known.insert((link.from, link.to)) => {
                pool_links.push((link.from.0, link.to.0, link.cost))
            }
            // The simulator places requests again by itself.
            Event::Arrived(arrival) if arrival.replay.is_none() => requests.push(Ok(Request {
                id: arrival.request,
                at: step.now,
                prompt_tokens: arrival.prompt_tokens,
                output_tokens: arrival.max_tokens,
                chain: arrival.chains[0].hashes.clone(),
                session: None,
                class: [None, Some("flex"), Some("priority")][arrival.class as usize].map(Into::into),
            })),
            _ => {}
        }
    }
    let setup = Setup {
        slo: Slo { ttft_s: 1.5, tbt_s: 0.03, tbt_metric: TbtMetric::Mean },
        classes: vec![
            Class {
                name: "flex".into(),
                members: ClassMembers::Label("flex".into()),
                promise: Promise::Deadline(EngineConfig::default().flex_deadline.0),
                priority: 0.0,
            },
            Class {
                name: "priority".into(),
                members: ClassMembers::Label("priority".into()),
                promise: Promise::Interactive { ttft_s: 1.5, tbt_s: 0.03 },
                priority: -60.0,
            },
        ],
        bases: Vec::new(),
        slowdowns: Vec::new(),
        routers: Routing { count: scene.routers.into(), delay_s: 0.0 },
        fleet,
        max_tokens: 1,
        block_tokens: BLOCK_TOKENS,
        pools: instances.iter().map(|i: &InstanceSetup| i.spec.device.to_string()).collect(),
        instances,
        pool_links,
    };
    let mut seen = Seen::default();
    seen.hit = run(&setup, requests.into_iter(), &mut seen).unwrap().prefix_hit.token;
    seen
}
