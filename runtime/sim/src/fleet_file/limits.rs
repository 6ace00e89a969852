//! Limits on the numbers of a fleet file: well beyond any real fleet, and such that nothing computed from
//! them overflows, underflows or requires unbounded memory. Further conditions are checked where a number is
//! used.

use super::FleetFileError;
use toml::{Table, Value};

/// Minimum of a nonzero value whose key is not named below.
const LEAST: f64 = 1e-15;
const MOST: f64 = 1e15;

/// Maximum number of instances of all pools together.
const INSTANCES_MAX: u64 = 10_000;
/// Maximum number of tokens in a tier of an instance, stated or derived from bytes.
pub(super) const TIER_TOKENS_MAX: u64 = 1_000_000_000_000;

/// The maximum value of a key, in whatever table it is: counts, bytes, seconds, rates and dollars.
const GREATEST: [(&str, f64); 38] = [
    ("layers", 4096.0),
    ("hidden", 1_048_576.0),
    ("heads", 16_384.0),
    ("kv_heads", 16_384.0),
    ("head_dim", 4096.0),
    ("intermediate", 1_048_576.0),
    ("vocab", 16_777_216.0),
    ("kv_bytes_per_token", 1e12),
    ("weight_bytes", 1e18),
    ("block_tokens", 1_048_576.0),
    ("max_batched_tokens", 1_048_576.0),
    ("max_prefill_tokens_beside_decode", 1_048_576.0),
    ("max_sequences", 65_536.0),
    ("pipeline_chunk_tokens", 1_048_576.0),
    ("pipeline_stages", 4096.0),
    ("devices_per_instance", 4096.0),
    ("count", INSTANCES_MAX as f64),
    ("cache_tokens", TIER_TOKENS_MAX as f64),
    ("dram_tokens", TIER_TOKENS_MAX as f64),
    ("ssd_tokens", TIER_TOKENS_MAX as f64),
    ("cache_bytes", 1e18),
    ("dram_bytes", 1e18),
    ("ssd_bytes", 1e18),
    ("gb_per_s", 1e9),
    ("nic_gb_per_s", 1e9),
    ("dram_gb_per_s", 1e9),
    ("ssd_gb_per_s", 1e9),
    ("replicate_gb_per_s", 1e9),
    ("usd_per_hour", 1e9),
    ("usd_per_gb", 1e9),
    ("ttft_s", 1e9),
    ("tbt_s", 1e9),
    ("deadline_s", 1e9),
    ("latency_s", 1e6),
    ("hold_s", 1e9),
    ("overhead", 1e6),
    ("base", 1e6),
    ("per_token", 1e3),
];

/// The minimum nonzero value of a key.
const SMALLEST: [(&str, f64); 9] = [
    ("kv_bytes_per_token", 1.0),
    ("gb_per_s", 1e-6),
    ("nic_gb_per_s", 1e-6),
    ("dram_gb_per_s", 1e-6),
    ("ssd_gb_per_s", 1e-6),
    ("ttft_s", 1e-6),
    ("tbt_s", 1e-6),
    ("deadline_s", 1e-6),
    ("hold_s", 1e-3),
];

/// Refuses numbers outside the limits, before anything is computed from them.
pub(super) fn check(file: &Table) -> Result<(), FleetFileError> {
    for (key, value) in file {
        match value {
            Value::Table(table) => walk(table, &format!("[{key}] "))?,
            Value::Array(tables) => {
                for (at, table) in tables.iter().enumerate() {
                    let Value::Table(table) = table else { continue };
                    let name = table.get("name").and_then(Value::as_str);
                    let place = match name {
                        Some(name) => format!("{key} '{name}': "),
                        None => format!("[[{key}]] number {}: ", at + 1),
                    };
                    walk(table, &place)?;
                }
            }
            _ => {}
        }
    }
    let counts = file.get("pool").and_then(Value::as_array).into_iter().flatten();
    let counts = counts.map(|pool| pool.get("count").and_then(Value::as_integer).unwrap_or(1).max(0) as u64);
    let instances = counts.fold(0u64, u64::saturating_add);
    if instances > INSTANCES_MAX {
        let cause = format!("{instances} instances in all; there may be at most {INSTANCES_MAX}");
        return Err(FleetFileError::value("[[pool]] count", cause));
    }
    Ok(())
}

fn walk(table: &Table, place: &str) -> Result<(), FleetFileError> {
    for (key, value) in table {
        match value {
            Value::Table(inner) => walk(inner, &format!("{place}{key}."))?,
            Value::Integer(number) => within(key, *number as f64, place)?,
            Value::Float(number) => within(key, *number, place)?,
            _ => {}
        }
    }
    Ok(())
}

fn within(key: &str, value: f64, place: &str) -> Result<(), FleetFileError> {
    let of = |bounds: &[(&str, f64)]| bounds.iter().find(|(known, _)| *known == key).map(|(_, bound)| *bound);
    let (least, most) = (of(&SMALLEST).unwrap_or(LEAST), of(&GREATEST).unwrap_or(MOST));
    let wrong = |cause: String| Err(FleetFileError::value(format!("{place}{key}"), cause));
    if value.is_nan() {
        return wrong("is nan; it must be a number".into());
    }
    if value.abs() > most {
        return wrong(format!("is {value}; it must be at most {most}"));
    }
    if value > 0.0 && value < least {
        return wrong(format!("is {value:e}; it must be at least {least:e}"));
    }
    Ok(())
}
