//! What a run is worth: counts, times, hits and dollars.

use super::classes::Promised;
use super::copies::{Copies, Replicated};
use super::engine::Gaps;
use super::network::Network;
use super::observe::AnswerTimes;
use super::occupancy::{Occupancy, PoolUse};
use super::quantiles::{Distribution, Quantiles};
use super::tiers::ByTier;
use super::{Flight, Setup};
use crate::fleet_file::{Class, Slo, TbtMetric};
use crate::trace::Request;
use crate::trace::stats::ratio;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Ordered, Seconds};
use mixfleet_scheduler::fleet::RejectReason;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A share of blocks and of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hit {
    /// Of the prompts' blocks.
    pub block: f64,
    /// Of their tokens.
    pub token: f64,
}

/// Shares of the prompts' tokens, by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HitBySource {
    /// In the memory of the devices.
    pub device: f64,
    /// In host memory.
    pub dram: f64,
    /// On the disk.
    pub ssd: f64,
    /// On another instance.
    pub pulled: f64,
}

/// Blocks of a prompt that were not computed, by where they were found.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Reused {
    tiers: ByTier,
    pulled: usize,
}

impl Reused {
    /// Of `known` leading blocks the devices held `hits`; then come those that were loaded, then those that
    /// were pulled.
    pub(super) fn new(hits: usize, known: usize, loaded: ByTier) -> Self {
        let staged = known.saturating_sub(hits);
        let lower = loaded[1..].iter().sum::<usize>().min(staged);
        let ssd = loaded[2].min(lower);
        Reused { tiers: [hits.min(known), lower - ssd, ssd], pulled: staged - lower }
    }

    /// Their tokens.
    pub(super) fn tokens(&self, block_tokens: u32) -> u32 {
        to_u32(self.blocks()) * block_tokens
    }

    fn blocks(&self) -> u64 {
        (self.tiers.iter().sum::<usize>() + self.pulled) as u64
    }
}

/// One pool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoolResult {
    /// Its name.
    pub name: String,
    /// Its instances.
    pub instances: u32,
    /// Seconds that they computed prompts.
    pub prefill_device_s: f64,
    /// Seconds that they decoded.
    pub decode_device_s: f64,
    /// Share of the time that they worked.
    pub utilisation: f64,
    /// Rent of the whole time; 0 without a price.
    pub usd_rent: f64,
    /// Rent of the time that they worked.
    pub usd_busy: f64,
    /// How far its resources were used while there were requests.
    #[serde(default)]
    pub used: PoolUse,
    /// The origin of its times.
    #[serde(flatten, default)]
    pub basis: PoolBasis,
}

/// The origin of a pool's times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolBasis {
    /// What they were derived from.
    pub times_from: String,
    /// Their likely relative error, where it is known.
    pub likely_error: Option<f64>,
}

impl PoolBasis {
    /// Both in words.
    pub fn text(&self) -> String {
        let error =
            self.likely_error.map_or_else(String::new, |e| format!(", likely within {:.0} %", 100.0 * e));
        format!("{}{error}", self.times_from)
    }
}

/// Completed requests that were not answered as promised; one can miss both objectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Misses {
    /// Their first token came too late.
    pub ttft: u64,
    /// Their gaps between tokens were too long.
    pub tbt: u64,
    /// Their last token came after their deadline.
    pub deadline: u64,
}

/// Results of one class.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassResult {
    /// Of the fleet file; `default` has the rest.
    pub name: String,
    /// Requests in the trace.
    pub requests: u64,
    /// Answered in full.
    pub completed: u64,
    /// Arrival to first token.
    pub ttft_s: Distribution,
    /// Arrival to last token.
    pub e2e_s: Distribution,
    /// Requests that were answered as promised, of all.
    pub slo_attainment: f64,
}

/// Results of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`Results::SCHEMA`].
    pub schema: String,
    /// Requests in the trace.
    pub requests: u64,
    /// Answered in full.
    pub completed: u64,
    /// Turned away on arrival, by reason.
    pub rejected: BTreeMap<String, u64>,
    /// Given up after their prefill, since their decode instance had become too busy.
    pub dropped: u64,
    /// Requests that were rejected, dropped or not answered as promised.
    #[serde(default)]
    pub missed: u64,
    /// The completed ones of these, by what they missed.
    #[serde(default)]
    pub missed_by: Misses,
    /// Number of times that a running request gave its memory to others and recomputed later.
    #[serde(default)]
    pub preemptions: u64,
    /// Arrival to first token.
    pub ttft_s: Distribution,
    /// Mean time per token after the first, of each request.
    pub tpot_s: Distribution,
    /// The gaps by the SLO's metric, of each request.
    pub tbt_s: Distribution,
    /// Arrival to last token.
    pub e2e_s: Distribution,
    /// Requests that were answered as promised, of all: within both objectives, or by their deadline.
    pub slo_attainment: f64,
    /// Each class, if there is another than `default`.
    #[serde(default)]
    pub classes: Vec<ClassResult>,
    /// The same per second of the run.
    pub goodput_rps: f64,
    /// Tokens of answers per second of the run.
    #[serde(default)]
    pub output_tokens_per_s: f64,
    /// What of the prompts was not computed.
    pub prefix_hit: Hit,
    /// The tokens of that, by where they were found.
    #[serde(default)]
    pub prefix_hit_from: HitBySource,
    /// Seconds of devices.
    pub prefill_device_s: f64,
    /// Seconds of devices.
    pub decode_device_s: f64,
    /// Of the former, for requests that were dropped afterwards.
    pub prefill_wasted_s: f64,
    /// By pair of pools, `from->to`.
    pub kv_bytes_moved: BTreeMap<String, f64>,
    /// The part of it that was copied ahead of demand or taken by KV nodes, if the fleet does that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicated: Option<Replicated>,
    /// Rent of the fleet for the whole time, and traffic.
    pub usd_rent: f64,
    /// Rent of the time that devices worked, and traffic.
    pub usd_busy: f64,
    /// Per million tokens of prompts and answers; `None` where nothing was completed.
    pub usd_rent_per_million_tokens: Option<f64>,
    /// Likewise.
    pub usd_busy_per_million_tokens: Option<f64>,
    /// Each pool.
    pub pools: Vec<PoolResult>,
    /// Time from the first arrival to the last token.
    pub simulated_s: f64,
}

impl Results {
    /// Counts further requests, which were rejected for `reason` before the fleet saw them.
    pub fn reject(&mut self, reason: &str, requests: u64) {
        if requests == 0 {
            return;
        }
        let good = self.slo_attainment * self.requests as f64;
        self.requests += requests;
        self.missed += requests;
        self.slo_attainment = good / self.requests as f64;
        *self.rejected.entry(reason.to_owned()).or_default() += requests;
    }
}

impl Results {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.simulation/1";

    /// How many requests missed TTFT, TBT and memory, be it that they were rejected for it.
    pub fn missed_of(&self) -> [u64; 3] {
        let rejected = |word: &str| self.rejected.get(word).copied().unwrap_or(0);
        let by = self.missed_by;
        [by.ttft + rejected("ttft_slo"), by.tbt + rejected("tbt_slo"), rejected("too_large")]
    }
}

/// Requests of one class, or all.
#[derive(Clone, Default)]
pub(super) struct RequestCounts {
    pub(super) requests: u64,
    completed: u64,
    good: u64,
    ttft_s: Quantiles,
    e2e_s: Quantiles,
}

impl RequestCounts {
    fn finished(&mut self, answer: &AnswerTimes, good: bool) {
        self.completed += 1;
        self.good += u64::from(good);
        self.ttft_s.add(answer.ttft_s);
        self.e2e_s.add(answer.e2e_s);
    }

    fn slo_attainment(&self) -> f64 {
        ratio(self.good, self.requests)
    }
}

/// Counts as the run goes on.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) all: RequestCounts,
    pub(super) missed: u64,
    missed_by: Misses,
    /// By number.
    classes: Vec<RequestCounts>,
    dropped: u64,
    pub(super) preemptions: u64,
    rejected: BTreeMap<String, u64>,
    tpot_s: Quantiles,
    tbt_s: Quantiles,
    blocks: u64,
    prompt_tokens: u64,
    reused: Reused,
    tokens: u64,
    output_tokens: u64,
    busy: Vec<(f64, f64)>,
    wasted_s: f64,
    block_tokens: u32,
    slo: Slo,
}

impl Ledger {
    pub(super) fn new(setup: &Setup) -> Self {
        Ledger {
            classes: vec![RequestCounts::default(); setup.classes.len() + 1],
            busy: vec![(0.0, 0.0); setup.pools.len()],
            block_tokens: setup.block_tokens.max(1),
            slo: setup.slo,
            ..Ledger::default()
        }
    }

    pub(super) fn arrived(&mut self, request: &Request, class: u32) {
        self.all.requests += 1;
        self.classes[class as usize].requests += 1;
        self.blocks += u64::from(request.prompt_tokens.div_ceil(self.block_tokens));
        self.prompt_tokens += u64::from(request.prompt_tokens);
    }

    /// Counts by the reason's name in JSON.
    pub(super) fn rejected(&mut self, reason: &RejectReason) {
        self.missed += 1;
        let reason = serde_json::to_value(reason).unwrap_or_default();
        let word = reason["reason"].as_str().unwrap_or_default().to_owned();
        *self.rejected.entry(word).or_default() += 1;
    }

    pub(super) fn dropped(&mut self, prefill_s: f64) {
        self.dropped += 1;
        self.missed += 1;
        self.wasted_s += prefill_s;
    }

    pub(super) fn began(&mut self, reused: Reused) {
        let all = &mut self.reused;
        all.tiers = [0, 1, 2].map(|tier| all.tiers[tier] + reused.tiers[tier]);
        all.pulled += reused.pulled;
    }

    pub(super) fn busy(&mut self, pool: u32, prefill_s: f64, decode_s: f64) {
        let busy = &mut self.busy[pool as usize];
        busy.0 += prefill_s;
        busy.1 += decode_s;
    }

    /// Device time of a pool: prompts and decoding.
    pub(super) fn worked_s(&self, pool: u32) -> (f64, f64) {
        self.busy[pool as usize]
    }

    pub(super) fn finished(
        &mut self,
        request: u64,
        flight: &Flight,
        now_s: f64,
        gaps: &[Gaps],
    ) -> AnswerTimes {
        let Flight { prompt_tokens, output_tokens, arrived_s, first_token_s, .. } = *flight;
        let (ttft_s, e2e_s) = (first_token_s - arrived_s, now_s - arrived_s);
        self.tokens += u64::from(prompt_tokens) + u64::from(output_tokens);
        self.output_tokens += u64::from(output_tokens);
        let tbt_s = (output_tokens > 1).then(|| gap_metric(gaps, self.slo.tbt_metric));
        let tpot_s = tbt_s.map(|_| (now_s - first_token_s) / f64::from(output_tokens - 1));
        tpot_s.into_iter().for_each(|tpot_s| self.tpot_s.add(tpot_s));
        tbt_s.into_iter().for_each(|tbt_s| self.tbt_s.add(tbt_s));
        // In this order: TTFT, TBT, deadline.
        let late = match flight.promised {
            Promised::Objectives(slo) => {
                [ttft_s > slo.ttft_s, tbt_s.is_some_and(|tbt_s| tbt_s > slo.tbt_s), false]
            }
            Promised::By(at_s) => [false, false, now_s > at_s],
        };
        let good = late == [false; 3];
        self.missed_by.ttft += u64::from(late[0]);
        self.missed_by.tbt += u64::from(late[1]);
        self.missed_by.deadline += u64::from(late[2]);
        let answer =
            AnswerTimes { request, prompt_tokens, output_tokens, arrived_s, ttft_s, tpot_s, tbt_s, e2e_s };
        self.all.finished(&answer, good);
        self.classes[flight.class as usize].finished(&answer, good);
        self.missed += u64::from(!good);
        answer
    }

    fn class_results(&self, setup: &Setup) -> Vec<ClassResult> {
        if setup.classes.is_empty() {
            return Vec::new();
        }
        let names =
            std::iter::once(Class::DEFAULT).chain(setup.classes.iter().map(|class| class.name.as_str()));
        let result = |(name, count): (&str, &RequestCounts)| ClassResult {
            name: name.to_owned(),
            requests: count.requests,
            completed: count.completed,
            ttft_s: (&count.ttft_s).into(),
            e2e_s: (&count.e2e_s).into(),
            slo_attainment: count.slo_attainment(),
        };
        names.zip(&self.classes).map(result).collect()
    }

    #[expect(clippy::too_many_lines, reason = "one field of the results after the other")]
    pub(super) fn results(
        &self,
        setup: &Setup,
        ended_s: f64,
        (network, copies, occupancy): (&Network, &Copies, &Occupancy),
    ) -> Results {
        let per_million = |usd: f64| (self.tokens > 0).then(|| usd / self.tokens as f64 * 1e6);
        let of_tokens = |blocks: u64| ratio(blocks * u64::from(self.block_tokens), self.prompt_tokens);
        let traffic_usd: f64 = network.moved().values().map(|(_, usd)| usd).sum();
        let pool = |(at, name): (usize, &String)| {
            let of_pool = || setup.instances.iter().filter(move |instance| instance.spec.pool == to_u32(at));
            let (instances, (prefill_device_s, decode_device_s)) = (to_u32(of_pool().count()), self.busy[at]);
            let busy_s = prefill_device_s + decode_device_s;
            let utilisation = busy_s / (f64::from(instances) * ended_s).max(f64::MIN_POSITIVE);
            let rate =
                of_pool().filter_map(|i| i.spec.price).map(|price| (price * Seconds(1.0)).0).sum::<f64>();
            let usd_busy = rate / f64::from(instances.max(1)) * busy_s;
            let (name, usd_rent) = (name.clone(), rate * ended_s);
            PoolResult {
                name,
                instances,
                prefill_device_s,
                decode_device_s,
                utilisation,
                usd_rent,
                usd_busy,
                used: occupancy.used(at),
                basis: setup.bases.get(at).cloned().unwrap_or_default(),
            }
        };
        let pools: Vec<PoolResult> = setup.pools.iter().enumerate().map(pool).collect();
        let sum = |of: fn(&PoolResult) -> f64| pools.iter().map(of).sum::<f64>();
        let (usd_rent, usd_busy) = (sum(|p| p.usd_rent) + traffic_usd, sum(|p| p.usd_busy) + traffic_usd);
        let name = |pool: u32| setup.pools[pool as usize].as_str();
        let moved =
            network.moved().iter().map(|(&(a, b), &(bytes, _))| (format!("{}->{}", name(a), name(b)), bytes));
        Results {
            schema: Results::SCHEMA.to_owned(),
            requests: self.all.requests,
            completed: self.all.completed,
            rejected: self.rejected.clone(),
            dropped: self.dropped,
            missed: self.missed,
            missed_by: self.missed_by,
            preemptions: self.preemptions,
            ttft_s: (&self.all.ttft_s).into(),
            tpot_s: (&self.tpot_s).into(),
            tbt_s: (&self.tbt_s).into(),
            e2e_s: (&self.all.e2e_s).into(),
            slo_attainment: self.all.slo_attainment(),
            classes: self.class_results(setup),
            output_tokens_per_s: if ended_s > 0.0 { self.output_tokens as f64 / ended_s } else { 0.0 },
            goodput_rps: if ended_s > 0.0 { self.all.good as f64 / ended_s } else { 0.0 },
            prefix_hit: Hit {
                block: ratio(self.reused.blocks(), self.blocks),
                token: of_tokens(self.reused.blocks()),
            },
            prefix_hit_from: HitBySource {
                device: of_tokens(self.reused.tiers[0] as u64),
                dram: of_tokens(self.reused.tiers[1] as u64),
                ssd: of_tokens(self.reused.tiers[2] as u64),
                pulled: of_tokens(self.reused.pulled as u64),
            },
            prefill_device_s: sum(|p| p.prefill_device_s),
            decode_device_s: sum(|p| p.decode_device_s),
            prefill_wasted_s: self.wasted_s,
            kv_bytes_moved: moved.collect(),
            replicated: (setup.fleet.replicate.is_some()
                || setup.instances.iter().any(|i| i.spec.role.keeps()))
            .then_some(copies.sent),
            usd_rent,
            usd_busy,
            usd_rent_per_million_tokens: per_million(usd_rent),
            usd_busy_per_million_tokens: per_million(usd_busy),
            pools,
            simulated_s: ended_s,
        }
    }
}

/// A request's gaps as one number.
fn gap_metric(gaps: &[Gaps], metric: TbtMetric) -> f64 {
    let count: u32 = gaps.iter().map(|run| run.count).sum();
    if count == 0 {
        return 0.0;
    }
    let mean = |run: &Gaps| 0.5 * (run.first_s + run.last_s);
    if metric == TbtMetric::Mean {
        return gaps.iter().map(|run| f64::from(run.count) * mean(run)).sum::<f64>() / f64::from(count);
    }
    // within a run the gaps grow evenly, so that its longest ones are its last
    let longest = |tokens: u32| -> (f64, f64) {
        // The first of equals comes first.
        let by_length = gaps.iter().zip(0..).map(|(run, at)| (Ordered(run.last_s), Reverse(at)));
        let mut runs: BinaryHeap<(Ordered, Reverse<usize>)> = by_length.collect();
        let (mut left, mut sum, mut least) = (tokens, 0.0, f64::INFINITY);
        while left > 0
            && let Some((_, Reverse(at))) = runs.pop()
        {
            let run = &gaps[at];
            let taken = run.count.min(left);
            let step_s = (run.last_s - run.first_s) / f64::from(run.count.max(2) - 1);
            let first_taken_s = run.last_s - step_s * f64::from(taken.max(1) - 1);
            sum += f64::from(taken) * 0.5 * (first_taken_s + run.last_s);
            least = least.min(first_taken_s);
            left -= taken;
        }
        (sum / f64::from(tokens), least)
    };
    match metric {
        TbtMetric::P99 => longest((count / 100).max(1)).1,
        _ => longest(count.div_ceil(10)).0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_tenth_and_the_mean_are_those_of_the_single_gaps() {
        let gaps = [
            Gaps { count: 15, first_s: 0.010, last_s: 0.024 },
            Gaps { count: 1, first_s: 0.5, last_s: 0.5 },
            Gaps { count: 4, first_s: 0.020, last_s: 0.020 },
        ];
        let mut single: Vec<f64> = (0..15).map(|i| 0.010 + 0.001 * f64::from(i)).collect();
        single.extend([0.5, 0.02, 0.02, 0.02, 0.02]);
        single.sort_by(|a, b| b.total_cmp(a));
        let mean = single.iter().sum::<f64>() / 20.0;
        assert!((gap_metric(&gaps, TbtMetric::Mean) - mean).abs() < 1e-12);
        assert!((gap_metric(&gaps, TbtMetric::Longest10) - (0.5 + 0.024) / 2.0).abs() < 1e-12);
        assert_eq!(gap_metric(&gaps, TbtMetric::P99), 0.5);
        assert_eq!(gap_metric(&[], TbtMetric::P99), 0.0);
    }
}
