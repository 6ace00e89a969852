//! The pools of a plan, and the steps of its search, in words.

use crate::plan::tiers;
use crate::screen::{devices_of, word};
use mixfleet_planner::search::SearchProgress;
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::program::Duty;

/// Pools in words, those in use: `8 x H100-SXM-80GB as 2 instances prefill + 3 x RTX-4090 decode`.
pub(super) fn pools_words(parts: &[OfferedPart], pools: &[PlannedPool]) -> String {
    let used = pools.iter().filter(|pool| pool.count > 0);
    used.map(|pool| pool_words(parts, pool)).collect::<Vec<_>>().join(" + ")
}

fn pool_words(parts: &[OfferedPart], pool: &PlannedPool) -> String {
    let name = parts[pool.part].name();
    let devices = devices_of(pool.count, pool.layout.devices, &name);
    let attends = pool.attends.map_or_else(String::new, |others| {
        format!(" with {} {} for attention", others.devices, parts[others.part].name())
    });
    let spare = pool.spare.map_or("", |_| " with attention on those for prompts");
    let duty = match pool.duty {
        Duty::Whole => "",
        Duty::Prefill => " prefill",
        Duty::Decode => " decode",
    };
    format!("{devices}{}{attends}{duty}{spare}", pool.layout.words())
}

/// A step of a search in a line.
pub(in crate::plan) fn progress_words(parts: &[OfferedPart], progress: SearchProgress<'_>) -> String {
    match progress {
        SearchProgress::Ranked { fleets, requests } => {
            format!("{fleets} fleets by rates; simulating {requests} requests")
        }
        SearchProgress::Simulated { pools, tiers, policy, trial } => {
            let (bound, end) = if trial.held { ("", "held") } else { ("at most ", "missed") };
            let fleet = format!("{}{}", pools_words(parts, pools), tiers::words(tiers));
            format!("{fleet}, {}: {bound}{:.2} %, {end}", word(&policy), 100.0 * trial.attained)
        }
        SearchProgress::Stressed { pools, load, times, attained } => {
            let percent = 100.0 * attained.unwrap_or(0.0);
            format!("{}, load x {load}, times x {times}: {percent:.2} %", pools_words(parts, pools))
        }
    }
}
