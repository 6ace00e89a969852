//! A plan as a JSON document, `mixfleet.plan/1`.

use super::Planned;
use super::fleet_text::role;
use super::search::ProvenFleet;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_sim::repair::FleetTrial;
use serde_json::{Value, json};

pub(super) fn of(planned: &Planned<'_>) -> Value {
    let Planned { args, model, stored, load, offers, outcome } = planned;
    let fleets: Vec<Value> = outcome.fleets.iter().map(|fleet| self::fleet(planned, fleet)).collect();
    let homogeneous = outcome.fleets.iter().position(ProvenFleet::is_homogeneous);
    json!({
        "schema": "mixfleet.plan/1",
        "model": model.name,
        "dtype": stored.name(),
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
        "spares": args.spares,
        "fleets": fleets,
        "homogeneous": homogeneous.map(|at| fleets[at].clone()),
        "lower_bound_usd_per_hour": outcome.lower_bound,
        "runner_up_lost": super::table::why_lost(planned),
        "ranked": outcome.ranked,
        "complete": outcome.complete,
        "shortfall": outcome.shortfall,
        "nearest": outcome.nearest.as_ref().map(|nearest| self::fleet(planned, nearest)),
        "without_offer": offers.without_offer,
        "warnings": offers.warnings,
    })
}

fn fleet(planned: &Planned<'_>, fleet: &ProvenFleet) -> Value {
    let best = planned.outcome.fleets.first();
    let [input, output] = usd_per_million(planned, fleet);
    let results = &fleet.trial.results;
    json!({
        "usd_per_hour": fleet.usd_per_hour,
        "attained": fleet.trial.attained,
        "pools": fleet.pools.iter().zip(&fleet.less).map(|(pool, less)| self::pool(planned, pool, less)).collect::<Vec<_>>(),
        "usd_per_million_input_tokens": input,
        "usd_per_million_output_tokens": output,
        "policy": crate::simulate::word(&fleet.policy),
        "likely_error": fleet.likely_error,
        "tied_with_first": best.is_some_and(|best| fleet.ties_with(best)),
        "no_instance_can_be_spared": fleet.least,
        "bottleneck": bottleneck(planned, fleet),
        "planned_usd_per_hour": fleet.planned_usd_per_hour,
        "ttft_s": results.ttft_s,
        "tbt_s": results.tbt_s,
    })
}

fn pool(planned: &Planned<'_>, pool: &PlannedPool, less: &Option<FleetTrial>) -> Value {
    let offer = &planned.offers.parts[pool.part];
    json!({
        "part": offer.part.id,
        "role": role(pool.duty),
        "count": pool.count,
        "devices_per_instance": pool.devices,
        "usd_per_hour_of_device": offer.usd_per_hour,
        "price_from": planned.offers.prices[pool.part].basis,
        "attained_at_most_with_one_less": less.as_ref().map(|trial| trial.attained),
    })
}

/// Rent per million tokens of prompts and of answers, each pool's divided by the time that it spent on them.
pub(super) fn usd_per_million(planned: &Planned<'_>, fleet: &ProvenFleet) -> [f64; 2] {
    let used = fleet.trial.results.pools.iter().filter(|pool| pool.instances > 0);
    let mut usd = [0.0; 2];
    for (pool, result) in fleet.pools.iter().zip(used) {
        let offer = &planned.offers.parts[pool.part];
        let rent = offer.usd_per_hour.0 * f64::from(pool.devices) * f64::from(pool.count);
        let both = (result.prefill_device_s + result.decode_device_s).max(f64::MIN_POSITIVE);
        usd[0] += rent * result.prefill_device_s / both;
        usd[1] += rent * result.decode_device_s / both;
    }
    let load = planned.load;
    [0, 1].map(|at| usd[at] / (load.rate * load.mean_tokens[at] * 3600.0 / 1e6))
}

/// What a fleet misses first with one instance less: the pool that it depends on most, and the objective.
pub(super) fn bottleneck(planned: &Planned<'_>, fleet: &ProvenFleet) -> Option<String> {
    let runs = fleet.pools.iter().zip(&fleet.less).filter_map(|(pool, less)| Some((pool, less.as_ref()?)));
    let (pool, trial) = runs.min_by(|(_, a), (_, b)| a.attained.total_cmp(&b.attained))?;
    let (id, duty) = (planned.offers.parts[pool.part].part.id, role(pool.duty));
    let duty = if duty == "auto" { String::new() } else { format!(" {duty}") };
    Some(format!("{id}{duty} ({})", missed(trial)))
}

/// The objective that most requests of a run missed.
pub(super) fn missed(trial: &FleetTrial) -> &'static str {
    let by = trial.results.missed_by;
    let rejected = |word: &str| trial.results.rejected.get(word).copied().unwrap_or(0);
    let counts = [
        ("TTFT", by.ttft + rejected("ttft_slo")),
        ("TBT", by.tbt + rejected("tbt_slo")),
        ("memory", rejected("too_large")),
    ];
    counts
        .iter()
        .rev()
        .max_by_key(|(_, count)| *count)
        .filter(|(_, count)| *count > 0)
        .map_or("-", |(what, _)| *what)
}
