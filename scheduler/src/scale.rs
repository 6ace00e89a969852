//! Decides the replicas of the pools of a planned fleet from the measured load, within a budget.
//!
//! The plan says what each pool carries. A pool's wanted replicas are its planned ones times the load over
//! the planned load: of prompt tokens for pools that compute prompts, of answer tokens for those that decode,
//! of the larger share for pools that do both. Where the budget does not suffice, all pools are cut at the
//! same share of the plan, so that prompts and answers stay in proportion.

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Share of a step by which rounding of the load must not add a replica.
const ROUNDING: f64 = 1e-9;

/// A pool of a planned fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ScaledPool {
    /// Its name.
    pub name: String,
    /// Planned replicas.
    pub replicas: u32,
    /// Minimum replicas.
    #[serde(default = "one_replica")]
    pub min: u32,
    /// Maximum replicas.
    pub max: u32,
    /// Rent of a replica.
    pub usd_per_hour: f64,
    /// Whether it computes prompts.
    #[serde(default = "yes")]
    pub prompts: bool,
    /// Whether it generates answers.
    #[serde(default = "yes")]
    pub answers: bool,
}

fn one_replica() -> u32 {
    1
}

fn yes() -> bool {
    true
}

/// A planned fleet, and how it may be scaled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ScalePlan {
    /// Rent that all replicas together never exceed.
    pub budget_usd_per_hour: f64,
    /// Load that the planned replicas carry: prompt tokens a second.
    pub prompt_tokens_per_s: f64,
    /// The same for tokens of answers.
    pub answer_tokens_per_s: f64,
    /// Share of the load that is added to it.
    #[serde(default)]
    pub headroom: f64,
    /// Time over which the load is averaged.
    #[serde(default = "window_s")]
    pub window_s: f64,
    /// Minimum time between two changes of direction of a pool, and time after which the rent of removed
    /// replicas is free for others.
    #[serde(default = "cooldown_s")]
    pub cooldown_s: f64,
    /// The pools.
    pub pools: Vec<ScaledPool>,
}

fn window_s() -> f64 {
    120.0
}

fn cooldown_s() -> f64 {
    300.0
}

/// A measured load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScaleLoad {
    /// Prompt tokens a second.
    pub prompt_tokens_per_s: f64,
    /// Tokens of answers a second.
    pub answer_tokens_per_s: f64,
}

/// Direction of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleTurn {
    Up,
    Down,
}

/// A pool's replicas over time.
#[derive(Debug)]
struct ScaleState {
    replicas: u32,
    /// The latest change's direction, and when the direction last changed.
    turned: Option<(ScaleTurn, Seconds)>,
    /// Larger replicas of the cool-down's time, newest last, each with the time at which it ended.
    held: VecDeque<(Seconds, u32)>,
    /// Wanted replicas of the cool-down's time, newest last.
    wanted: VecDeque<(Seconds, u32)>,
}

/// Scales the pools of a plan.
#[derive(Debug)]
pub struct PoolScaler {
    plan: ScalePlan,
    states: Vec<ScaleState>,
}

impl ScalePlan {
    /// Checks the plan.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn check(&self) -> Result<(), String> {
        let is_rate = |value: f64| value.is_finite() && value > 0.0;
        for (name, value) in [
            ("budgetUsdPerHour", self.budget_usd_per_hour),
            ("promptTokensPerS", self.prompt_tokens_per_s),
            ("answerTokensPerS", self.answer_tokens_per_s),
            ("windowS", self.window_s),
            ("cooldownS", self.cooldown_s),
        ] {
            if !is_rate(value) {
                return Err(format!("{name}: expected a number above 0"));
            }
        }
        if !(0.0..=100.0).contains(&self.headroom) {
            return Err("headroom: expected a share from 0 to 100".into());
        }
        for (at, pool) in self.pools.iter().enumerate() {
            let ScaledPool { name, replicas, min, max, usd_per_hour, prompts, answers } = pool;
            let wrong = |why: &str| Err(format!("pool '{name}': {why}"));
            if self.pools[..at].iter().any(|other| other.name == *name) {
                return wrong("another pool has this name");
            }
            if *replicas == 0 || min > max || !usd_per_hour.is_finite() || *usd_per_hour < 0.0 {
                return wrong("expected replicas above 0, min up to max, and a rent of 0 or more");
            }
            if !prompts && !answers {
                return wrong("it computes neither prompts nor answers");
            }
        }
        let least: f64 = self.pools.iter().map(|pool| f64::from(pool.min) * pool.usd_per_hour).sum();
        if least > self.budget_usd_per_hour {
            let budget = self.budget_usd_per_hour;
            return Err(format!(
                "the minimum replicas cost ${least:.2}/h, above the budget of ${budget:.2}/h"
            ));
        }
        Ok(())
    }
}

impl PoolScaler {
    /// Begins with the minimum replicas of each pool.
    ///
    /// # Errors
    /// The fault of the plan.
    pub fn new(plan: ScalePlan) -> Result<Self, String> {
        plan.check()?;
        let state = |pool: &ScaledPool| ScaleState {
            replicas: pool.min,
            turned: None,
            held: VecDeque::new(),
            wanted: VecDeque::new(),
        };
        let states = plan.pools.iter().map(state).collect();
        Ok(PoolScaler { plan, states })
    }

    /// The plan.
    pub fn plan(&self) -> &ScalePlan {
        &self.plan
    }

    /// Present replicas of the pools, in the plan's order.
    pub fn replicas(&self) -> Vec<u32> {
        self.states.iter().map(|state| state.replicas).collect()
    }

    /// Decides the replicas at `now`, for the load of the window before it.
    pub fn step(&mut self, now: Seconds, load: ScaleLoad) {
        let headroom = 1.0 + self.plan.headroom;
        let prompts = (load.prompt_tokens_per_s * headroom / self.plan.prompt_tokens_per_s).max(0.0);
        let answers = (load.answer_tokens_per_s * headroom / self.plan.answer_tokens_per_s).max(0.0);
        let shares: Vec<f64> = (self.plan.pools.iter())
            .map(|pool| match (pool.prompts, pool.answers) {
                (true, false) => prompts,
                (false, true) => answers,
                _ => prompts.max(answers),
            })
            .collect();
        let cooldown = Seconds(self.plan.cooldown_s);
        let mut floors = Vec::new();
        for ((pool, state), share) in self.plan.pools.iter().zip(&mut self.states).zip(&shares) {
            state.forget(now - cooldown);
            let wanted = scaled_replicas(pool, *share);
            state.wanted.push_back((now, wanted));
            // it shrinks to the most that was wanted in the cool-down's time
            let most = state.wanted.iter().map(|(_, wanted)| *wanted).max().unwrap_or(wanted);
            if most < state.replicas && state.may_turn(ScaleTurn::Down, now, cooldown) {
                state.change(now, most);
            }
            floors.push(state.replicas);
        }
        let allowed = self.within_budget(&shares, now, cooldown);
        for (state, (replicas, floor)) in self.states.iter_mut().zip(allowed.into_iter().zip(floors)) {
            if replicas > floor {
                state.change(now, replicas);
            }
        }
        let usd_per_hour = self.reserved_usd_per_hour();
        assert!(
            usd_per_hour <= self.plan.budget_usd_per_hour * (1.0 + ROUNDING),
            "replicas of ${usd_per_hour}/h exceed the budget"
        );
    }

    /// Rent of the present replicas, and of those that were removed within the cool-down's time.
    pub fn reserved_usd_per_hour(&self) -> f64 {
        let pools = self.plan.pools.iter().zip(&self.states);
        pools.map(|(pool, state)| f64::from(state.reserved()) * pool.usd_per_hour).sum()
    }

    /// The replicas at the largest common share of the plan that the budget allows, none below the present.
    fn within_budget(&self, shares: &[f64], now: Seconds, cooldown: Seconds) -> Vec<u32> {
        let at_share = |cap: f64| -> Vec<u32> {
            let pools = self.plan.pools.iter().zip(&self.states).zip(shares);
            pools
                .map(|((pool, state), share)| match state.may_turn(ScaleTurn::Up, now, cooldown) {
                    true => scaled_replicas(pool, share.min(cap)).max(state.replicas),
                    false => state.replicas,
                })
                .collect()
        };
        let usd_per_hour = |replicas: &[u32]| -> f64 {
            let pools = self.plan.pools.iter().zip(&self.states).zip(replicas);
            pools
                .map(|((pool, state), count)| f64::from(state.reserved().max(*count)) * pool.usd_per_hour)
                .sum()
        };
        // shares at which a pool gets a replica more
        let mut steps: Vec<f64> = vec![0.0];
        for (pool, share) in self.plan.pools.iter().zip(shares) {
            let most = scaled_replicas(pool, *share);
            steps.extend((1..=most).map(|count| f64::from(count) / f64::from(pool.replicas)));
        }
        steps.sort_by(f64::total_cmp);
        let fits = |cap: &&f64| usd_per_hour(&at_share(**cap)) <= self.plan.budget_usd_per_hour;
        let best = steps.partition_point(|cap| fits(&cap));
        at_share(steps[best.saturating_sub(1)])
    }
}

/// A pool's replicas at a share of the planned load.
fn scaled_replicas(pool: &ScaledPool, share: f64) -> u32 {
    let replicas = (f64::from(pool.replicas) * share * (1.0 - ROUNDING)).ceil();
    to_u32(replicas.min(f64::from(pool.max))).clamp(pool.min, pool.max)
}

impl ScaleState {
    /// Forgets what was before `from`.
    fn forget(&mut self, from: Seconds) {
        self.held.retain(|(ended, _)| ended.0 > from.0);
        self.wanted.retain(|(at, _)| at.0 > from.0);
    }

    /// The most replicas of the cool-down's time: an autoscaler may not yet have removed them.
    fn reserved(&self) -> u32 {
        self.held.iter().map(|(_, replicas)| *replicas).chain([self.replicas]).max().unwrap_or(0)
    }

    fn may_turn(&self, turn: ScaleTurn, now: Seconds, cooldown: Seconds) -> bool {
        self.turned.is_none_or(|(last, at)| last == turn || (now - at).0 >= cooldown.0)
    }

    fn change(&mut self, now: Seconds, replicas: u32) {
        let turn = if replicas > self.replicas { ScaleTurn::Up } else { ScaleTurn::Down };
        if turn == ScaleTurn::Down {
            self.held.push_back((now, self.replicas));
        }
        if self.turned.is_none_or(|(last, _)| last != turn) {
            self.turned = Some((turn, now));
        }
        self.replicas = replicas;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(budget: f64) -> ScalePlan {
        let pool = |name: &str, replicas, usd_per_hour, prompts, answers| ScaledPool {
            name: name.into(),
            replicas,
            min: 1,
            max: 20,
            usd_per_hour,
            prompts,
            answers,
        };
        ScalePlan {
            budget_usd_per_hour: budget,
            prompt_tokens_per_s: 10_000.0,
            answer_tokens_per_s: 2000.0,
            headroom: 0.0,
            window_s: 60.0,
            cooldown_s: 300.0,
            pools: vec![pool("prefill", 2, 2.5, true, false), pool("decode", 4, 0.7, false, true)],
        }
    }

    fn load(share: f64) -> ScaleLoad {
        ScaleLoad { prompt_tokens_per_s: 10_000.0 * share, answer_tokens_per_s: 2000.0 * share }
    }

    #[test]
    fn the_planned_load_gets_the_planned_replicas() {
        let mut scaler = PoolScaler::new(plan(100.0)).unwrap();
        assert_eq!(scaler.replicas(), [1, 1]);
        scaler.step(Seconds(0.0), load(1.0));
        assert_eq!(scaler.replicas(), [2, 4]);
        scaler.step(Seconds(10.0), load(1.01));
        assert_eq!(scaler.replicas(), [3, 5]);
        // less is wanted for as long as the cool-down before replicas go
        for second in 1..31 {
            scaler.step(Seconds(10.0 + 10.0 * f64::from(second)), load(0.5));
        }
        assert_eq!(scaler.replicas(), [1, 2]);
    }

    #[test]
    fn a_budget_cuts_all_pools_at_the_same_share() {
        let mut scaler = PoolScaler::new(plan(11.0)).unwrap();
        scaler.step(Seconds(0.0), load(3.0));
        assert_eq!((scaler.replicas(), scaler.reserved_usd_per_hour()), (vec![3, 5], 11.0));
        let mut scaler = PoolScaler::new(plan(10.9)).unwrap();
        scaler.step(Seconds(0.0), load(3.0));
        assert_eq!(scaler.replicas(), [2, 4], "the next share of the plan needs a replica of both");
        let error = PoolScaler::new(plan(3.0)).unwrap_err();
        assert!(error.contains("$3.20/h"), "{error}");
    }

    #[test]
    fn a_faulty_plan_is_explained() {
        for (change, part) in [
            (Box::new(|plan: &mut ScalePlan| plan.window_s = 0.0) as Box<dyn Fn(&mut ScalePlan)>, "windowS"),
            (Box::new(|plan| plan.headroom = f64::NAN), "headroom"),
            (Box::new(|plan| plan.pools[1].name = "prefill".into()), "this name"),
            (Box::new(|plan| plan.pools[1].replicas = 0), "replicas above 0"),
            (Box::new(|plan| plan.pools[1].answers = false), "neither"),
        ] {
            let mut plan = plan(100.0);
            change(&mut plan);
            let error = plan.check().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    /// Replicas told to autoscalers that ask at different times, and how often each pool turned.
    fn run(plan: &ScalePlan, shares: &[(f64, f64)], polls: &[usize]) -> Result<(), TestCaseError> {
        let mut scaler = PoolScaler::new(plan.clone()).unwrap();
        let mut asked = scaler.replicas();
        let mut turns: Vec<Vec<(f64, bool)>> = vec![Vec::new(); plan.pools.len()];
        for (step, (prompts, answers)) in shares.iter().enumerate() {
            let now = 10.0 * step as f64;
            let before = scaler.replicas();
            let load = ScaleLoad {
                prompt_tokens_per_s: plan.prompt_tokens_per_s * prompts,
                answer_tokens_per_s: plan.answer_tokens_per_s * answers,
            };
            scaler.step(Seconds(now), load);
            let after = scaler.replicas();
            for (at, (old, new)) in before.iter().zip(&after).enumerate() {
                if old != new && turns[at].last().is_none_or(|(_, up)| *up != (new > old)) {
                    turns[at].push((now, new > old));
                }
                // each autoscaler asks within a minute
                if (step + polls[at]).is_multiple_of(6) {
                    asked[at] = *new;
                }
            }
            for told in [&after, &asked] {
                let usd: f64 =
                    plan.pools.iter().zip(told).map(|(pool, n)| pool.usd_per_hour * f64::from(*n)).sum();
                prop_assert!(usd <= plan.budget_usd_per_hour + 1e-6, "${usd} at {now} s");
            }
        }
        for turns in turns {
            for pair in turns.windows(2) {
                prop_assert!(pair[1].0 - pair[0].0 >= plan.cooldown_s, "{turns:?}");
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn no_load_exceeds_the_budget_or_makes_a_pool_oscillate(
            budget in 3.3f64..40.0,
            period in 5.0f64..200.0,
            height in 0.1f64..6.0,
            noise in prop::collection::vec((0.0f64..2.0, 0.0f64..2.0), 120),
            polls in prop::collection::vec(0usize..6, 2),
        ) {
            let wave = |step: usize| height * (1.0 + (step as f64 * std::f64::consts::TAU / period).sin());
            let shares: Vec<(f64, f64)> =
                noise.iter().enumerate().map(|(step, (a, b))| (wave(step) * a, wave(step) * b)).collect();
            run(&plan(budget), &shares, &polls)?;
        }
    }
}
