//! Limits on the numbers of a fleet file: well beyond any real fleet, and such that nothing computed from
//! them overflows, underflows or requires unbounded memory. Further conditions are checked where a number is
//! used.

use super::FleetFileError;
use mixfleet_hal::cast::to_u64;
use toml::{Table, Value};

/// Minimum of a nonzero value of most keys.
const LEAST: f64 = 1e-15;
/// Maximum number of instances of all pools together.
pub const INSTANCES_MAX: u64 = 10_000;
/// Maximum number of tokens in a tier of an instance, stated or derived from bytes.
pub(super) const TIER_TOKENS_MAX: u64 = 1_000_000_000_000;

/// The minimum nonzero value and the maximum value of a key, in every table: counts, bytes, seconds, rates
/// and dollars.
fn bounds(key: &str) -> (f64, f64) {
    match key {
        "layers" | "head_dim" | "pipeline_stages" | "devices_per_instance" | "attn_devices" => {
            (LEAST, 4096.0)
        }
        "heads" | "kv_heads" => (LEAST, 16_384.0),
        "max_sequences" => (LEAST, 65_536.0),
        "hidden" | "intermediate" | "block_tokens" | "pipeline_chunk_tokens" => (LEAST, 1_048_576.0),
        "max_batched_tokens" | "max_prefill_tokens_beside_decode" => (LEAST, 1_048_576.0),
        "vocab" => (LEAST, 16_777_216.0),
        "count" => (LEAST, INSTANCES_MAX as f64),
        "cache_tokens" | "dram_tokens" | "ssd_tokens" => (LEAST, TIER_TOKENS_MAX as f64),
        "cache_bytes" | "dram_bytes" | "ssd_bytes" | "weight_bytes" => (LEAST, 1e18),
        "kv_bytes_per_token" => (1.0, 1e12),
        "gb_per_s" | "nic_gb_per_s" | "dram_gb_per_s" | "ssd_gb_per_s" => (1e-6, 1e9),
        "ttft_s" | "tbt_s" | "deadline_s" => (1e-6, 1e9),
        "hold_s" => (1e-3, 1e9),
        "replicate_gb_per_s" | "usd_per_hour" | "usd_per_gib_hour" | "usd_per_gb" => (LEAST, 1e9),
        "latency_s" | "overhead" | "base" => (LEAST, 1e6),
        "per_token" => (LEAST, 1e3),
        _ => (LEAST, 1e15),
    }
}

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
    let counts = counts.map(|pool| to_u64(pool.get("count").and_then(Value::as_integer).unwrap_or(1).max(0)));
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
    let (least, most) = bounds(key);
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
