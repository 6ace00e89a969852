//! The prefix index under a steady load: rates, lookup times, resident size.
//!
//! `cargo bench -p mixfleet-scheduler --bench index_load -- [name=value ...]` with `blocks`, `instances`,
//! `replication`, `rate` (block operations per second), `turns`, and `holders=scattered`, which gives each
//! block its own holders and measures only the size.

#[allow(dead_code, missing_docs)]
mod load;

use load::{Ours, Settings};
use mixfleet_hal::random::bits;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::{BlockHash, PrefixIndex, Tier};

/// Bytes per pair if hardly any two blocks have the same holders in the same tiers.
fn scattered_bytes_per_pair(settings: &Settings) -> Option<f64> {
    let before = load::resident_bytes()?;
    let mut index = PrefixIndex::default();
    let step_max = u64::from((settings.instances / settings.replication).max(2) - 1);
    for block in 0..settings.blocks as u64 {
        let mut instance = bits(4, block) % u64::from(settings.instances);
        for copy in 0..u64::from(settings.replication) {
            let random = bits(5 + copy, block);
            instance = (instance + 1 + random % step_max) % u64::from(settings.instances);
            let tier = Tier::ALL[(random >> 32) as usize % 3];
            index.store(InstanceId(instance as u32), tier, &[BlockHash(bits(4, !block))]);
        }
    }
    let pairs = settings.blocks as f64 * f64::from(settings.replication);
    Some((load::resident_bytes()? - before) / pairs)
}

#[allow(clippy::print_stdout, reason = "its output is its purpose")]
fn main() {
    let mut settings =
        Settings { blocks: 10_000_000, instances: 64, replication: 1, rate: 2e6, turns: 300_000 };
    let mut scattered = false;
    for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
        let (name, value) = argument.split_once('=').unwrap_or((&argument, ""));
        let number: f64 = value.parse().unwrap_or(f64::NAN);
        match name {
            "blocks" => settings.blocks = number as usize,
            "instances" => settings.instances = number as u32,
            "replication" => settings.replication = number as u32,
            "rate" => settings.rate = number,
            "turns" => settings.turns = number as u64,
            "holders" if value == "scattered" => scattered = true,
            _ => panic!(
                "{argument}: give blocks=, instances=, replication=, rate=, turns= or holders=scattered"
            ),
        }
    }
    if scattered {
        println!("bytes per pair, scattered: {:.2?}", scattered_bytes_per_pair(&settings));
    } else {
        println!("{:#.3?}", load::measure(&mut Ours::default(), &settings));
    }
}
