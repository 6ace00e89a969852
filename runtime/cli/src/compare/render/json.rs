//! The comparison as a JSON document, `mixfleet.compare/1`.

use crate::compare::comparison::{Basis, PartsComparison};
use crate::compare::devices::Compared;
use mixfleet_scheduler::classes::{Classified, Job, Standing};
use serde_json::{Map, Value, json};

pub(in crate::compare) fn document(comparison: &PartsComparison) -> Value {
    let PartsComparison { model, demand, basis, devices, classified, likely_errors, without_offer, warnings } =
        comparison;
    let predicted = classified.iter().zip(likely_errors.iter().copied());
    let described =
        devices.iter().zip(predicted).map(|(d, (c, likely_error))| device(d, c, likely_error, *basis));
    let mut devices: Vec<Value> = described.collect();
    for (at, device) in devices.iter_mut().enumerate() {
        device["in_doubt"] = json!(comparison.is_in_doubt(at));
    }
    json!({
        "schema": "mixfleet.compare/1",
        "model": {
            "name": model,
            "dtype": demand.shape.stored().name(),
            "kv_dtype": demand.shape.kv,
            "weight_bytes": demand.weights,
            "kv_bytes_per_token": demand.shape.kv_bytes_per_token(),
        },
        "demand": {
            "prompt_tokens": demand.prompt_tokens,
            "context_tokens": demand.context_tokens,
            "batch_max": demand.batch_max,
            "ttft_s": demand.ttft,
            "tbt_s": demand.tbt,
            "devices_max": demand.devices_max,
            "memory_share": demand.memory_share,
        },
        "basis": basis.name(),
        "devices": devices,
        "without_offer": without_offer,
        "warnings": warnings,
    })
}

fn device(device: &Compared, classified: &Classified, likely_error: Option<f64>, basis: Basis) -> Value {
    let per_dollar: Vec<Value> = device
        .per_dollar()
        .into_iter()
        .map(|line| {
            let rates: Map<String, Value> =
                line.flop_per_second.iter().map(|(dtype, rate)| (dtype.name().into(), json!(rate))).collect();
            json!({
                "origin": line.origin,
                "flop_per_second": rates,
                "bytes_per_second": line.bytes_per_second,
                "bytes": line.bytes,
            })
        })
        .collect();
    json!({
        "name": device.name,
        "part": device.part,
        "price": device.price,
        "times_from": device.own.as_ref().map(|own| &own.times_from),
        "evidence": device.candidate(basis).profile.provenance.evidence,
        "likely_error": likely_error,
        "per_dollar": per_dollar,
        "usd_per_million_output_tokens": classified.standing(Job::Decode).and_then(|decode| decode.cost).map(|usd| usd.0 * 1e6),
        "class": classified.class,
        "leans_to": classified.leans_to(),
        "jobs": classified.standings.iter().map(|standing| job(classified, standing)).collect::<Vec<_>>(),
    })
}

/// One job as JSON. The unit of `unit` fields is a token, or a GB for an hour.
fn job(device: &Classified, standing: &Standing) -> Value {
    let cheapest = device.price.map(|price| device.cheapest_at(standing.job, price));
    let (effort, unable) = match &standing.effort {
        Ok(effort) => (Some(effort), None),
        Err(why) => (None, Some(why)),
    };
    json!({
        "job": standing.job,
        "unable": unable,
        "device_seconds_per_unit": effort.map(|effort| effort.time),
        "devices": effort.map(|effort| effort.devices),
        "batch": effort.map(|effort| effort.batch),
        "latency_s": effort.map(|effort| effort.latency),
        "usd_per_unit": standing.cost,
        "cheapest": cheapest,
        "rival": standing.rival,
        "break_even_usd_per_hour": standing.break_even,
    })
}
