//! Compares the requested parts, and prints and writes the comparison.

use super::args::CompareArgs;
use super::comparison::{Basis, PartsComparison, is_in_doubt};
use super::devices::{self, Compared, ComparedModel};
use super::render::{json, page, table};
use crate::failure::UsageError;
use crate::model_shape::{self, SizedModel};
use crate::{prices, screen};
use anyhow::{Context, Result};
use mixfleet_hal::DType;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::economics::{PricePick, Selection};
use mixfleet_hal::units::{Ordered, Seconds};
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::classes::{Classified, Demand, Job, PricedDevice, classify};
use std::io::Write;
use std::path::Path;

pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    let comparison = compare(args)?;
    for warning in &comparison.warnings {
        eprintln!("warning: {warning}");
    }
    for own in comparison.devices.iter().filter_map(|device| device.own.as_ref()) {
        eprintln!("{}", own.times_from);
    }
    if let Some(path) = &args.html {
        let cannot_write = || format!("cannot write {}", path.display());
        write_whole(path, page::page(&comparison).as_bytes()).with_context(cannot_write)?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{:#}", json::document(&comparison))?;
        return Ok(());
    }
    table::write(&mut out, &comparison)
}

fn compare(args: &CompareArgs) -> Result<PartsComparison> {
    let demand = Demand {
        prompt_tokens: args.prompt,
        context_tokens: args.context,
        batch_max: args.batch,
        devices_max: args.devices,
        engine: args.engine.cost,
        ttft: args.ttft.map(Seconds),
        tbt: args.tbt.map(Seconds),
        ..model_demand(args)?
    };
    let list = args.prices.as_deref().map(prices::read).transpose()?.unwrap_or_default();
    let pick = if args.least { PricePick::Least } else { PricePick::Median };
    let model = ComparedModel { name: &args.model, shape: &demand.shape };
    let mut devices = devices::resolve(&args.parts, &args.profile, &model, |name| {
        Selection { spot: args.spot, pick }.price_or_reference(name, &list.offers)
    })?;
    devices::state_prices(&mut devices, &args.usd_per_hour)?;
    let basis = Basis::of(&devices);
    let candidates: Vec<PricedDevice> = devices.iter().map(|device| device.candidate(basis)).collect();
    let likely = |device: &PricedDevice| args.engine.likely_error(&device.profile, &demand.shape);
    let likely_errors: Vec<Option<f64>> = candidates.iter().map(likely).collect();
    let classified = classify(&demand, &candidates);
    // The cheapest decode first; then parts in doubt, and last those that cannot decode or have no price.
    let place = |compared: &Compared, device: &Classified, likely: Option<f64>| {
        let costs = [Job::Decode, Job::Prefill].map(|job| {
            let cost = device.standing(job).and_then(|standing| standing.cost);
            Ordered(cost.map_or(f64::INFINITY, |cost| cost.0))
        });
        (costs[0].0.is_infinite(), is_in_doubt(compared, basis, likely), costs)
    };
    let mut rows: Vec<_> = devices.into_iter().zip(classified.into_iter().zip(likely_errors)).collect();
    rows.sort_by_key(|(compared, (device, likely))| place(compared, device, *likely));
    let (devices, rest): (Vec<Compared>, Vec<_>) = rows.into_iter().unzip();
    let (classified, likely_errors): (Vec<Classified>, Vec<_>) = rest.into_iter().unzip();
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let mut warnings = list.warnings(&names);
    warnings.extend(devices.iter().filter_map(Compared::misnamed));
    let left_out = |part: &&Part| devices.iter().all(|device| device.name != part.id);
    let without_offer = match args.parts.is_empty() {
        true => catalog::parts().iter().filter(left_out).map(|part| part.id).collect(),
        false => Vec::new(),
    };
    let model = args.model.clone();
    Ok(PartsComparison { model, demand, basis, devices, classified, likely_errors, without_offer, warnings })
}

/// The demand of a known model, or of the shape in a directory's `config.json`.
fn model_demand(args: &CompareArgs) -> Result<Demand> {
    let SizedModel { name, shape, tied_embeddings, context_max } =
        model_shape::of(&args.model, args.dtype).map_err(|error| error.context("--model"))?;
    for (flag, tokens) in [("prompt", args.prompt), ("context", args.context)] {
        if tokens > context_max && !model_shape::is_checkpoint(Path::new(&args.model)) {
            let message =
                format!("--{flag}: {tokens} tokens are beyond the context of {name}, {context_max} tokens");
            return Err(UsageError(message).into());
        }
    }
    let kv = args.kv_dtype.unwrap_or(shape.kv);
    if kv == DType::U32 {
        return Err(UsageError("--kv-dtype: KV is in f32, bf16, f16, fp8 or int8".into()).into());
    }
    let shape = shape.with_kv(kv);
    let weights = shape.weight_bytes(tied_embeddings);
    Ok(Demand::new(shape, weights))
}
