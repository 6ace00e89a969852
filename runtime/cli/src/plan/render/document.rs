//! A plan as a JSON document, `mixfleet.plan/1`.

use super::Planned;
use crate::screen::word;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::GIB;
use mixfleet_planner::found::{ApartFound, ProvenFleet};
use mixfleet_planner::hours::{self, HourPlan};
use mixfleet_planner::repair::FleetTrial;
use mixfleet_planner::stress::FACTORS;
use mixfleet_scheduler::cost::ExpertsBy;
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_sim::bottleneck::Bottleneck;
use mixfleet_sim::fleet_file::role_of;
use serde_json::{Value, json};

/// The schema of several plans.
pub(in crate::plan) const SEVERAL: &str = "mixfleet.plans/1";

pub(in crate::plan) fn of(planned: &Planned<'_>) -> Value {
    let Planned { args, model, stored, load, offers, outcome, .. } = planned;
    let fleets: Vec<Value> = outcome.fleets.iter().map(|fleet| self::fleet(planned, fleet)).collect();
    let homogeneous = outcome.fleets.iter().position(ProvenFleet::is_homogeneous);
    let id = |part: usize| offers.parts[part].part.id;
    let repriced: Vec<Value> = (planned.repriced.iter())
        .map(|at| json!({ "part": id(at.part), "factor": at.factor, "cheapest": at.cheapest }))
        .collect();
    let break_evens: Vec<Value> = (planned.break_evens.iter().enumerate())
        .map(|(part, known)| {
            let usd = match known {
                Some(BreakEven::At(usd)) => Some(usd.0),
                Some(BreakEven::Useless | BreakEven::Indispensable) | None => None,
            };
            let own = offers.parts[part].usd_per_hour.0;
            let spot = offers.parts[part].spot;
            json!({ "part": id(part), "spot": spot, "usd_per_hour": own, "break_even_usd_per_hour": usd })
        })
        .collect();
    json!({
        "schema": "mixfleet.plan/1",
        "model": model.name,
        "dtype": outcome.fleets.first().map_or(stored[0], |fleet| fleet.stored).name(),
        "dtypes": stored.iter().map(|stored| stored.name()).collect::<Vec<_>>(),
        "engine": args.engine.name,
        "load": {
            "text": load.text,
            "requests": load.requests.len(),
            "requests_per_s": load.rate,
            "mean_input_tokens": load.mean_tokens[0],
            "mean_output_tokens": load.mean_tokens[1],
            "headroom": args.headroom,
        },
        "objectives": { "ttft_s": args.ttft, "tbt_s": args.tbt, "attain": args.attain },
        "confidence": args.confidence,
        "expert_skew": args.expert_skew,
        "spares": args.spares,
        "fleets": fleets,
        "homogeneous": homogeneous.map(|at| fleets[at].clone()),
        "lower_bound_usd_per_hour": outcome.lower_bound,
        "runner_up_lost": super::table::why_lost(planned),
        "most_robust": outcome.most_robust(),
        "attention_apart": elsewhere(planned, &outcome.apart, ProvenFleet::is_apart),
        "attention_spare": elsewhere(planned, &outcome.spare, ProvenFleet::has_spare),
        "repriced": repriced,
        "break_evens": break_evens,
        "hours": planned.hours.iter().map(|hour| self::hour(planned, hour)).collect::<Vec<_>>(),
        "saved_by_the_hour": hours::renting_by_the_hour(planned.hours).map(|(_, saved)| saved),
        "ranked": outcome.ranked,
        "complete": outcome.complete,
        "shortfall": outcome.shortfall,
        "nearest": outcome.nearest.as_ref().map(|nearest| self::fleet(planned, nearest)),
        "without_offer": offers.without_offer,
        "unlisted": offers.unlisted,
        "without_kernels": offers.without_kernels,
        "warnings": offers.warnings,
    })
}

fn fleet(planned: &Planned<'_>, fleet: &ProvenFleet) -> Value {
    let best = planned.outcome.fleets.first();
    let [input, output] = usd_per_million(planned, fleet);
    let results = &fleet.trial.results;
    let [load, times] = fleet.stress.slack(planned.args.attain);
    let under = |attained: [Option<f64>; 2]| -> Vec<Value> {
        let each = FACTORS.iter().zip(attained);
        each.map(|(factor, attained)| json!({ "factor": factor, "attained": attained })).collect()
    };
    let change = |of: &OwnedChange| {
        let id = planned.offers.parts[of.part].part.id;
        json!({ "part": id, "devices_owned": of.owned, "devices_planned": of.planned })
    };
    let changes =
        planned.args.have.as_ref().map(|_| changes(planned, fleet).iter().map(change).collect::<Vec<_>>());
    json!({
        "usd_per_hour": fleet.usd_per_hour,
        "dtype": fleet.stored.name(),
        "attained": fleet.trial.attained,
        "pools": fleet.pools.iter().zip(&fleet.less).map(|(pool, less)| self::pool(planned, pool, less)).collect::<Vec<_>>(),
        "usd_per_million_input_tokens": input,
        "usd_per_million_output_tokens": output,
        "kv_tiers": {
            "dram_gib": fleet.tiers.dram.0 / GIB as f64,
            "ssd_gib": fleet.tiers.ssd.0 / GIB as f64,
            "kv_nodes": fleet.tiers.nodes,
            "usd_per_hour": fleet.tiers.rent(&fleet.pools).0,
        },
        "policy": word(&fleet.policy),
        "likely_error": fleet.likely_error,
        "slack": { "load": load, "times": times },
        "attained_under": { "load": under(fleet.stress.load), "times": under(fleet.stress.times) },
        "changes": changes,
        "tied_with_first": best.is_some_and(|best| fleet.ties_with(best)),
        "no_instance_can_be_spared": fleet.least,
        "bottleneck": Bottleneck::of(results),
        "missed_with_one_less": with_one_less(planned, fleet),
        "planned_usd_per_hour": fleet.planned_usd_per_hour,
        "ttft_s": results.ttft_s,
        "tbt_s": results.tbt_s,
    })
}

fn pool(planned: &Planned<'_>, pool: &PlannedPool, less: &Option<FleetTrial>) -> Value {
    let offer = &planned.offers.parts[pool.part];
    json!({
        "part": offer.part.id,
        "spot": offer.spot,
        "region": offer.region,
        "role": role_of(pool.duty),
        "count": pool.count,
        "devices_per_instance": pool.layout.devices,
        "pipeline_stages": pool.layout.stages,
        "expert_parallel": pool.layout.experts == LayoutExperts::WithSequences,
        "experts_by_member": pool.layout.experts == LayoutExperts::Divided(ExpertsBy::Member),
        "attention": attention(planned, pool),
        "attention_spare": pool.spare.map(|spare| {
            json!({
                "part": planned.offers.parts[spare.part].part.id,
                "devices_per_instance": spare.layout.devices,
            })
        }),
        "usd_per_hour_of_device": offer.usd_per_hour,
        "price_from": planned.offers.prices[pool.part].basis,
        "attained_at_most_with_one_less": less.as_ref().map(|trial| trial.attained),
    })
}

/// The devices of an instance that attend for the others.
fn attention(planned: &Planned<'_>, pool: &PlannedPool) -> Value {
    pool.attends.map_or(Value::Null, |others| {
        let offer = &planned.offers.parts[others.part];
        json!({
            "part": offer.part.id,
            "devices": others.devices,
            "usd_per_hour_of_device": offer.usd_per_hour,
            "price_from": planned.offers.prices[others.part].basis,
        })
    })
}

/// Outcome for the cheapest fleet that satisfies `is`, or why there is none.
fn elsewhere(planned: &Planned<'_>, found: &ApartFound, is: fn(&ProvenFleet) -> bool) -> Value {
    let place = planned.outcome.fleets.iter().position(is);
    match found {
        ApartFound::Planned(fleet) => json!({
            "usd_per_hour_by_rates": fleet.usd_per_hour.0,
            "fleet": place,
            "usd_per_hour": place.map(|at| planned.outcome.fleets[at].usd_per_hour),
        }),
        ApartFound::None(why) => json!({ "none": why }),
    }
}

fn hour(planned: &Planned<'_>, hour: &HourPlan) -> Value {
    let of = |pool: &PlannedPool| {
        json!({
            "part": planned.offers.parts[pool.part].part.id,
            "role": role_of(pool.duty),
            "count": pool.count,
            "devices_per_instance": pool.layout.devices,
            "pipeline_stages": pool.layout.stages,
            "expert_parallel": pool.layout.experts == LayoutExperts::WithSequences,
            "experts_by_member": pool.layout.experts == LayoutExperts::Divided(ExpertsBy::Member),
        })
    };
    json!({
        "requests_per_s": hour.requests_per_s,
        "lower_bound_usd_per_hour": hour.lower_bound,
        "usd_per_hour": hour.usd_per_hour(),
        "dtype": hour.fleet.as_ref().map(|fleet| fleet.stored.name()),
        "pools": hour.fleet.iter().flat_map(|fleet| &fleet.pools).map(of).collect::<Vec<_>>(),
    })
}

/// Devices of a part that are owned, and that a fleet has.
pub(super) struct OwnedChange {
    pub(super) part: usize,
    pub(super) owned: u32,
    pub(super) planned: u32,
}

/// What a fleet has of the parts that it or the owner has.
pub(super) fn changes(planned: &Planned<'_>, fleet: &ProvenFleet) -> Vec<OwnedChange> {
    let of = |(part, offer): (usize, &OfferedPart)| {
        let devices = fleet.pools.iter().map(|pool| pool.devices_of(part)).sum::<u64>();
        OwnedChange { part, owned: offer.owned, planned: to_u32(devices) }
    };
    let all = planned.offers.parts.iter().enumerate().map(of);
    all.filter(|change| change.owned > 0 || change.planned > 0).collect()
}

/// Rent per million tokens of prompts and of answers, each pool's divided by the time that it spent on them.
pub(super) fn usd_per_million(planned: &Planned<'_>, fleet: &ProvenFleet) -> [f64; 2] {
    let used = fleet.trial.results.pools.iter().filter(|pool| pool.instances > 0);
    let (mut usd, mut all) = ([0.0; 2], 0.0);
    for (pool, result) in fleet.pools.iter().zip(used) {
        let rent_of =
            |(part, devices): (usize, u32)| planned.offers.parts[part].usd_per_hour.0 * f64::from(devices);
        let rent = pool.takes().map(rent_of).sum::<f64>() * f64::from(pool.count);
        let both = (result.prefill_device_s + result.decode_device_s).max(f64::MIN_POSITIVE);
        usd[0] += rent * result.prefill_device_s / both;
        usd[1] += rent * result.decode_device_s / both;
        all += rent;
    }
    // owned devices cost nothing
    let paid = fleet.usd_per_hour / all;
    let load = planned.load;
    [0, 1].map(|at| paid * usd[at] / (load.rate * load.mean_tokens[at] * 3600.0 / 1e6))
}

/// What a fleet misses first with one instance less: the pool that it depends on most, and the objective.
pub(super) fn with_one_less(planned: &Planned<'_>, fleet: &ProvenFleet) -> Option<String> {
    let runs = fleet.pools.iter().zip(&fleet.less).filter_map(|(pool, less)| Some((pool, less.as_ref()?)));
    let (pool, trial) = runs.min_by(|(_, a), (_, b)| a.attained.total_cmp(&b.attained))?;
    let (name, duty) = (planned.offers.parts[pool.part].name(), role_of(pool.duty));
    let duty = if duty == "auto" { String::new() } else { format!(" {duty}") };
    Some(format!("{name}{duty} ({})", missed(trial)))
}

/// The objective that most requests of a run missed.
pub(super) fn missed(trial: &FleetTrial) -> &'static str {
    let counts = ["TTFT", "TBT", "memory"].into_iter().zip(trial.results.missed_of());
    let most = counts.rev().max_by_key(|(_, count)| *count);
    most.filter(|(_, count)| *count > 0).map_or("-", |(what, _)| what)
}
