//! Larger fleets, step by step, until one holds an objective.
//!
//! A run that missed its objectives shows which stage is short: late first tokens mean too few prefill
//! instances, slow tokens too few decode instances. The pools of that stage grow, in their initial
//! proportion; if that gets a run no further through its load, all pools grow.

use mixfleet_hal::units::Ordered;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::Results;

/// Factor by which the rent of what grows does so at a step, or else by one instance.
const STEP: f64 = 1.2;
/// One stage alone is short if its objective was missed this many times as often as the other's.
const ALONE: u64 = 4;
/// Minimum progress through the load, as a factor, for a step to count as helpful.
const HELPED: f64 = 1.02;
/// At this multiple of its first rent, a fleet must get further by this factor, or more instances do not help
/// it.
const TRIED: (f64, f64) = (2.3, 1.1);
/// Most rent of a fleet, as a multiple of its first.
const RENT_MAX: f64 = 8.0;

/// A fleet that grows.
#[derive(Clone, Debug)]
pub struct FleetGrowth {
    start: Vec<u32>,
    counts: Vec<u32>,
    /// Of each pool, whether it computes prompts and whether it decodes.
    stages: Vec<[bool; 2]>,
    /// How far the first run and the last one got, in requests.
    reached: Option<[f64; 2]>,
}

impl FleetGrowth {
    /// From the instances of a fleet on, but for KV nodes, which are its last pools.
    pub fn of(file: &FleetFile) -> Self {
        let computes = || file.pools.iter().take_while(|pool| !pool.role.keeps());
        let counts: Vec<u32> = computes().map(|pool| pool.count).collect();
        let stages = computes().map(|pool| [pool.role.prefills(), pool.role.decodes()]).collect();
        FleetGrowth { start: counts.clone(), counts, stages, reached: None }
    }

    /// Instances of each pool.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Adds instances after a run that missed its objectives, as far as they fit. Says whether there is a
    /// larger fleet that is worth a run.
    pub fn grow(
        &mut self,
        missed: &Results,
        fits: &dyn Fn(&[u32]) -> bool,
        rent: &dyn Fn(&[u32]) -> f64,
    ) -> bool {
        let reached = missed.requests as f64;
        let [first, last] = self.reached.unwrap_or([reached, 0.0]);
        let times = self.times(rent);
        if times >= RENT_MAX || times >= TRIED.0 && reached < TRIED.1 * first {
            return false;
        }
        let helped = reached >= HELPED * last;
        self.reached = Some([first, reached]);
        let stages = if helped { short(missed) } else { [true; 2] };
        self.add(stages, fits, rent) || self.add([true; 2], fits, rent)
    }

    /// Adds instances of the pools that do one of `stages`, as far as they fit, and says whether some did.
    fn add(
        &mut self,
        stages: [bool; 2],
        fits: &dyn Fn(&[u32]) -> bool,
        rent: &dyn Fn(&[u32]) -> f64,
    ) -> bool {
        let before = self.counts.clone();
        let grows = |pool: &usize| before[*pool] > 0 && (0..2).any(|at| stages[at] && self.stages[*pool][at]);
        let mut growing: Vec<usize> = (0..before.len()).filter(grows).collect();
        let others: Vec<u32> =
            (0..before.len()).map(|pool| if grows(&pool) { 0 } else { before[pool] }).collect();
        let of_growing = |counts: &[u32]| rent(counts) - rent(&others);
        let wanted = STEP * of_growing(&before);
        while self.counts == before || of_growing(&self.counts) < wanted {
            let share = |pool: usize| f64::from(self.counts[pool]) / f64::from(self.start[pool]);
            let with_one = |pool: usize| {
                let mut more = self.counts.clone();
                more[pool] += 1;
                more
            };
            growing.retain(|pool| fits(&with_one(*pool)));
            let order = |pool: usize| (Ordered(share(pool)), Ordered(rent(&with_one(pool))));
            let Some(&next) = growing.iter().min_by_key(|pool| order(**pool)) else { break };
            self.counts[next] += 1;
        }
        self.counts != before
    }

    /// How many times its first rent it costs; where that is nothing, as for devices that are owned, how many
    /// times the instances it has.
    fn times(&self, rent: &dyn Fn(&[u32]) -> f64) -> f64 {
        let all = |counts: &[u32]| counts.iter().map(|count| f64::from(*count)).sum::<f64>();
        match rent(&self.start) {
            first if first > 0.0 => rent(&self.counts) / first,
            _ => all(&self.counts) / all(&self.start),
        }
    }
}

/// The stages that a run which missed its objectives has too few instances for.
fn short(missed: &Results) -> [bool; 2] {
    let [ttft, tbt, _] = missed.missed_of();
    let answers = tbt + missed.dropped;
    [ttft * ALONE > answers, answers * ALONE > ttft].map(|is_short| is_short || ttft + answers == 0)
}
