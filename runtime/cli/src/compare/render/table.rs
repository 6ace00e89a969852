//! The comparison as text and tables.

use crate::compare::comparison::PartsComparison;
use crate::compare::devices::{Compared, PerDollarRow};
use anyhow::Result;
use mixfleet_hal::DType;
use mixfleet_hal::units::{GB, UsdPerHour};
use mixfleet_scheduler::classes::{Classified, DeviceClass, Effort, Job, Standing};
use std::io::Write;

/// Number of devices beyond which only those that are cheapest at something are described.
const WORDS_MAX: usize = 8;
/// Ids of parts in a line.
const IDS_PER_LINE: usize = 6;

pub(in crate::compare) fn write(out: &mut impl Write, comparison: &PartsComparison) -> Result<()> {
    let PartsComparison { model, demand, basis, devices, classified, without_offer, .. } = comparison;
    let (weights, kv) = (demand.weights.0 / GB, demand.shape.kv_bytes_per_token());
    let (stored, kv_dtype) = (demand.shape.stored(), demand.shape.kv);
    writeln!(out, "{model} in {stored}: {weights:.1} GB of weights, {kv} B of KV per token in {kv_dtype}")?;
    let width = devices.iter().map(|device| device.name.len()).max().unwrap_or(0).max("device".len());
    let (prompt, context, batch, most) =
        (demand.prompt_tokens, demand.context_tokens, demand.batch_max, demand.devices_max);
    writeln!(out, "by {}", basis.explained())?;
    writeln!(
        out,
        "prompts of {prompt} tokens; decoding at {context} tokens, up to {batch} at once; layers cut over up to {most} \
         devices, network not counted"
    )?;
    if let Some(objectives) = comparison.objectives() {
        writeln!(out, "objectives: {objectives}")?;
    }
    speeds(out, width, comparison)?;
    if devices.iter().any(|device| device.price.is_some()) {
        per_dollar(out, width, devices)?;
        costs(out, width, comparison)?;
        prices(out, width, devices)?;
    }
    if !without_offer.is_empty() {
        writeln!(out, "not compared, since no offer is known (name a part, with --usd-per-hour PART=USD):")?;
        for ids in without_offer.chunks(IDS_PER_LINE) {
            writeln!(out, "  {}", ids.join(", "))?;
        }
    }
    writeln!(out)?;
    let priced = classified.iter().filter(|device| device.price.is_some()).count();
    let mut untold = 0;
    for (at, device) in classified.iter().enumerate() {
        // An unpriced device is compared with the priced ones, and does not compete with them.
        let compared = priced + usize::from(device.price.is_none());
        if is_described(device, compared) {
            let doubt = if comparison.is_in_doubt(at) { " (its likely error is not known)" } else { "" };
            writeln!(out, "{}{doubt}", device.name)?;
            for sentence in words(device, compared) {
                writeln!(out, "  {sentence}")?;
            }
        } else {
            untold += 1;
        }
    }
    if untold > 0 {
        writeln!(
            out,
            "{untold} parts are cheapest at nothing; to see below which price they would be, name a part, or --json"
        )?;
    }
    Ok(())
}

/// Speeds of one copy of the model on as many devices as share it.
fn speeds(out: &mut impl Write, width: usize, comparison: &PartsComparison) -> Result<()> {
    writeln!(
        out,
        "\ntokens/s of one copy of the model: of prompts, decoding in all, and decoding each sequence"
    )?;
    let mut row = |name: &str, cells: [&str; 7]| {
        let [devices, prompt, batch, all, each, step, likely] = cells;
        let line =
            format!("{name:<width$}{devices:>8}{prompt:>11}{batch:>6}{all:>10}{each:>8}{step:>9}{likely:>7}");
        writeln!(out, "{}", line.trim_end())
    };
    row("device", ["devices", "prompt t/s", "batch", "all t/s", "each", "step ms", "error"])?;
    for (at, device) in comparison.classified.iter().enumerate() {
        let effort = |job| device.standing(job).and_then(|standing| standing.effort.as_ref().ok());
        let prompt = effort(Job::Prefill).map(|of| significant(f64::from(of.devices) / of.time.0));
        let of_decode = effort(Job::Decode);
        let text = |value: fn(&Effort) -> String| of_decode.map_or_else(|| "-".into(), value);
        let cells = [
            text(|of| of.devices.to_string()),
            prompt.unwrap_or_else(|| "-".into()),
            text(|of| of.batch.to_string()),
            text(|of| significant(f64::from(of.batch) / of.latency.0)),
            text(|of| significant(1.0 / of.latency.0)),
            text(|of| significant(of.latency.0 * 1e3)),
            comparison.likely(at),
        ];
        row(&device.name, cells.each_ref().map(String::as_str))?;
    }
    if let Some(doubts) = comparison.doubts() {
        writeln!(out, "{doubts}")?;
    }
    Ok(())
}

pub(super) const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3];

fn per_dollar(out: &mut impl Write, width: usize, devices: &[Compared]) -> Result<()> {
    writeln!(out, "\nwhat 1 $/h buys: TFLOP/s by dtype, GB/s, GB")?;
    let [f32, bf16, f16, fp8] = DTYPES.map(DType::name);
    writeln!(
        out,
        "{:<width$}{:>7} {:<10}{f32:>7}{bf16:>7}{f16:>7}{fp8:>8}{:>7}{:>7}",
        "device", "$/h", "origin", "GB/s", "GB"
    )?;
    for device in devices {
        let Some(price) = &device.price else { continue };
        for (at, line) in device.per_dollar().iter().enumerate() {
            let (name, rent) = match at {
                0 => (device.name.as_str(), format!("{:.2}", price.usd_per_hour.0)),
                _ => ("", String::new()),
            };
            let [f32, bf16, f16, fp8] = DTYPES.map(|dtype| rate(line, dtype));
            let (bandwidth, memory) = (line.bytes_per_second / GB, line.bytes / GB);
            writeln!(
                out,
                "{name:<width$}{rent:>7} {:<10}{f32:>7}{bf16:>7}{f16:>7}{fp8:>8}{bandwidth:>7.0}{memory:>7.1}",
                line.origin
            )?;
        }
    }
    Ok(())
}

/// Where the prices are from.
fn prices(out: &mut impl Write, width: usize, devices: &[Compared]) -> Result<()> {
    writeln!(out, "\nprices")?;
    for device in devices {
        let from = match &device.price {
            Some(price) => price.basis.clone(),
            None => format!("no offer known; give one with --usd-per-hour {}=USD", device.name),
        };
        writeln!(out, "{:<width$}  {from}", device.name)?;
    }
    Ok(())
}

pub(super) fn rate(line: &PerDollarRow, dtype: DType) -> String {
    let found = line.flop_per_second.iter().find(|(known, _)| *known == dtype);
    found.map_or_else(|| "-".into(), |(_, rate)| significant(rate / 1e12))
}

/// A number with about three significant digits.
pub(super) fn significant(value: f64) -> String {
    if value > 0.0 && value < 0.01 {
        return format!("{value:.1e}");
    }
    let decimals = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// A price with cents, or with more digits if it is small.
fn dollars(price: UsdPerHour) -> String {
    if price.0 < 0.1 { format!("${:.4}/h", price.0) } else { format!("${:.2}/h", price.0) }
}

/// A device in the table of costs: class, prefill, decode, devices, batch, step, attention, memory.
pub(super) fn cost_row(device: &Classified) -> [String; 8] {
    let cost = |job, unit: f64| {
        let cost = device.standing(job).and_then(|standing| standing.cost);
        cost.map_or_else(|| "-".into(), |cost| significant(cost.0 * unit))
    };
    let effort = device.standing(Job::Decode).and_then(|standing| standing.effort.as_ref().ok());
    let none = || ["-", "-", "-"].map(String::from);
    let [devices, batch, step] = effort.map_or_else(none, |effort| {
        [effort.devices.to_string(), effort.batch.to_string(), significant(effort.latency.0 * 1e3)]
    });
    let class = device.class.map_or("-", DeviceClass::name).to_owned();
    let [prefill, decode, attention] = [Job::Prefill, Job::Decode, Job::Attention].map(|job| cost(job, 1e6));
    [class, prefill, decode, devices, batch, step, attention, cost(Job::Memory, 1e3)]
}

fn costs(out: &mut impl Write, width: usize, comparison: &PartsComparison) -> Result<()> {
    writeln!(out, "\nclasses, and what a job costs")?;
    let mut row = |name: &str, price: &str, cells: [&str; 5]| {
        let [class, prefill, decode, attention, memory] = cells;
        writeln!(
            out,
            "{}",
            format!("{name:<width$}{price:>7}{class:>9}{prefill:>10}{decode:>10}{attention:>11}{memory:>9}")
                .trim_end()
        )
    };
    row("device", "$/h", ["class", "prefill", "decode", "attention", "memory"])?;
    row("", "", ["", "$/Mt in", "$/Mt out", "$/Mt out", "$/TB/h"])?;
    for device in &comparison.classified {
        let rent = device.price.map_or_else(|| "-".into(), |price| format!("{:.2}", price.0));
        let [class, prefill, decode, _, _, _, attention, memory] = &cost_row(device);
        row(&device.name, &rent, [class, prefill, decode, attention, memory])?;
    }
    Ok(())
}

/// Whether the device, one of `all`, is described in words.
fn is_described(device: &Classified, all: usize) -> bool {
    all <= WORDS_MAX || !matches!(device.class, None | Some(DeviceClass::Neither))
}

/// What the device is cheapest at, what it would be cheapest at, and what it cannot do.
pub(super) fn words(device: &Classified, all: usize) -> Vec<String> {
    let mut sentences: Vec<String> =
        device.standings.iter().filter_map(|standing| sentence(device, standing, all)).collect();
    if let (Some(DeviceClass::Neither), Some(job)) = (device.class, device.leans_to()) {
        sentences.push(format!("better at {} than at the other, but others do both for less", job.name()));
    }
    sentences
}

fn sentence(device: &Classified, standing: &Standing, all: usize) -> Option<String> {
    let job = standing.job.name();
    if let Err(why) = &standing.effort {
        let cannot = matches!(standing.job, Job::Prefill | Job::Decode);
        return cannot.then(|| format!("cannot {job} this model: {why}"));
    }
    let Some(break_even) = standing.break_even else {
        let alone = device.price.is_some() && all > 1;
        return match standing.job {
            Job::Prefill | Job::Decode if alone => {
                Some(format!("is the only one with a price that can {job} this model"))
            }
            Job::Prefill | Job::Decode if all == 1 => Some(format!("{job}: nothing to compare with")),
            _ => None,
        };
    };
    let (below, rival) = (dollars(break_even), standing.rival.as_deref().unwrap_or("the others"));
    Some(match device.price {
        Some(price) if device.cheapest_at(standing.job, price) => {
            format!(
                "is the cheapest {job} of these {all} below {below} (now {}); above, {rival}",
                dollars(price)
            )
        }
        Some(price) => {
            format!("would be the cheapest {job} below {below} (now {}); now {rival}", dollars(price))
        }
        None => format!("would be the cheapest {job} below {below} (no price known); now {rival}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::StoredAs;
    use mixfleet_hal::catalog::part;
    use mixfleet_scheduler::classes::{Demand, PricedDevice, classify};
    use mixfleet_scheduler::models::find;

    fn compared(priced: &[(&str, Option<f64>)], model: &str) -> Vec<Classified> {
        let model = find(model).unwrap();
        let demand = Demand::new(model.shape(DType::Bf16), model.weight_bytes(StoredAs::Plain(DType::Bf16)));
        let candidate = |(id, price): &(&str, Option<f64>)| PricedDevice {
            name: (*id).into(),
            profile: part(id).unwrap().reached_profile().unwrap(),
            steps: None,
            price: price.map(UsdPerHour),
        };
        classify(&demand, &priced.iter().map(candidate).collect::<Vec<_>>())
    }

    fn said(device: &Classified, job: Job, all: usize) -> String {
        sentence(device, device.standing(job).unwrap(), all).unwrap_or_default()
    }

    #[test]
    fn the_price_below_which_a_part_wins_is_said() {
        let all = compared(
            &[("RTX-4090", Some(0.38)), ("L40S", Some(0.79)), ("H100-SXM-80GB", Some(2.69))],
            "llama-3.1-70b",
        );
        let attention = said(&all[0], Job::Attention, 3);
        assert!(attention.starts_with("is the cheapest attention of these 3 below $0.79"), "{attention}");
        assert!(attention.contains("(now $0.38/h); above, H100-SXM-80GB"), "{attention}");
        let l40s = said(&all[1], Job::Attention, 3);
        assert!(l40s.starts_with("would be the cheapest attention below $0."), "{l40s}");
    }

    #[test]
    fn what_cannot_be_done_or_compared_is_said_too() {
        let large = compared(&[("RTX-4090", Some(0.38)), ("B200-SXM", None)], "llama-3.1-405b");
        assert!(said(&large[0], Job::Decode, 2).contains("cannot decode this model: 8 x 24 GB"));
        assert_eq!(said(&large[1], Job::Decode, 2), "");
        let one = compared(&[("L40S", Some(0.79))], "llama-3.1-8b");
        assert_eq!(said(&one[0], Job::Decode, 1), "decode: nothing to compare with");
    }

    #[test]
    fn digits_that_matter() {
        assert_eq!(
            [0.00034, 0.0853, 1.234, 12.34, 434.7].map(significant),
            ["3.4e-4", "0.085", "1.23", "12.3", "435"]
        );
        assert_eq!([0.0512, 0.83].map(|p| dollars(UsdPerHour(p))), ["$0.0512/h", "$0.83/h"]);
    }
}
