//! Samples of the pools' load at equal intervals of virtual time. Only the current interval's counts are
//! kept.

use super::World;
use super::observe::Sample;
use crate::trace::TraceError;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::Phases;
use mixfleet_scheduler::fleet::InstanceId;

/// The current work of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Occupation {
    pub(super) phases: Phases,
    pub(super) used_tokens: u64,
    pub(super) cached_tokens: u64,
    /// Time of the decode step; 0 if nothing decodes.
    pub(super) step_s: f64,
    /// Time of a decode step of one sequence alone; 0 if nothing decodes.
    pub(super) least_step_s: f64,
    /// Time of the current plan so far spent on prompts, and on decoding.
    pub(super) worked_s: (f64, f64),
}

/// Maximum samples of a run: a busy century by the second, or some days by the millisecond.
const SAMPLES_MAX: u64 = 20_000_000;

/// The counts of one pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) dropped: u64,
    pub(super) completed: u64,
    /// Device time up to the last sample.
    worked_s: (f64, f64),
}

#[derive(Default)]
pub(super) struct Timeline {
    /// The interval; none if no samples are wanted.
    interval_s: Option<f64>,
    /// Number of the next sample, from 1.
    next: u64,
    /// Number of samples so far.
    taken: u64,
    sampled_s: f64,
    /// Whether the fleet had no request at the last sample.
    idle: bool,
    pub(super) arrived: u64,
    pub(super) rejected: u64,
    pub(super) pools: Vec<Counts>,
}

impl Timeline {
    pub(super) fn new(interval_s: Option<f64>, pools: usize) -> Self {
        Timeline { interval_s, next: 1, pools: vec![Counts::default(); pools], ..Timeline::default() }
    }

    /// Time of the next sample, if it is before `then_s`. For a time without requests it is the last one.
    fn due(&mut self, then_s: f64, idle: bool) -> Option<f64> {
        let interval_s = self.interval_s?;
        if idle && self.idle {
            self.next = self.next.max(to_u64((then_s / interval_s).ceil()).saturating_sub(1));
        }
        if self.taken > SAMPLES_MAX {
            return None;
        }
        let due_s = self.next as f64 * interval_s;
        (due_s < then_s).then_some(due_s)
    }

    /// # Errors
    /// When there are too many samples for any table or page.
    pub(super) fn check(&self) -> Result<(), TraceError> {
        if self.taken > SAMPLES_MAX { Err(TraceError::Samples(SAMPLES_MAX)) } else { Ok(()) }
    }
}

impl World<'_> {
    /// Advances to `then_s`; events of that time come after the samples before it.
    pub(super) fn move_to(&mut self, then_s: f64) {
        self.watch_use(then_s);
        while let Some(due_s) = self.timeline.due(then_s, self.flights.is_empty()) {
            self.sample(due_s);
            self.timeline.next += 1;
            self.timeline.taken += 1;
        }
        self.now_s = self.now_s.max(then_s);
    }

    /// Takes the sample of the interval that the run's end cuts short.
    pub(super) fn last_sample(&mut self) {
        if self.timeline.interval_s.is_some() && self.now_s > self.timeline.sampled_s {
            self.sample(self.now_s);
        }
    }

    fn sample(&mut self, time_s: f64) {
        let interval_s = time_s - self.timeline.sampled_s;
        for pool in 0..to_u32(self.setup.pools.len()) {
            let sample = self.sample_pool(pool, time_s, interval_s);
            self.observer.sampled(&sample);
        }
        (self.timeline.arrived, self.timeline.rejected) = (0, 0);
        (self.timeline.sampled_s, self.timeline.idle) = (time_s, self.flights.is_empty());
    }

    fn sample_pool(&mut self, pool: u32, time_s: f64, interval_s: f64) -> Sample {
        let slo = self.setup.slo;
        let mut sample = Sample {
            time_s,
            interval_s,
            pool,
            fleet_arrived: self.timeline.arrived,
            fleet_rejected: self.timeline.rejected,
            ..Sample::default()
        };
        let mut worked_s = self.ledger.worked_s(pool);
        let (mut instances, mut queue_s, mut step_s) = (0u32, 0.0, 0.0);
        for (at, engine) in self.engines.iter().enumerate().filter(|(_, engine)| engine.pool() == pool) {
            let now = engine.occupation(time_s);
            instances += 1;
            sample.queued += now.phases.queued as u64;
            sample.prefilling += now.phases.prefilling as u64;
            sample.receiving += (now.phases.asking + now.phases.receiving) as u64;
            sample.decoding += now.phases.decoding as u64;
            sample.used_tokens += now.used_tokens;
            sample.cached_tokens += now.cached_tokens;
            step_s += now.step_s;
            queue_s += self.routers.first().queued_prefill(InstanceId(to_u32(at)), Seconds(time_s)).0;
            worked_s.0 += now.worked_s.0;
            worked_s.1 += now.worked_s.1;
        }
        let instances = f64::from(instances.max(1));
        let counts = &mut self.timeline.pools[pool as usize];
        let of_interval = |worked_s: f64, before_s: f64| (worked_s - before_s) / (instances * interval_s);
        sample.prefill_utilisation = of_interval(worked_s.0, counts.worked_s.0);
        sample.decode_utilisation = of_interval(worked_s.1, counts.worked_s.1);
        sample.prefill_load = queue_s / (instances * slo.ttft_s);
        sample.decode_load = step_s / (instances * slo.tbt_s);
        (sample.dropped, sample.completed) = (counts.dropped, counts.completed);
        *counts = Counts { worked_s, ..Counts::default() };
        sample
    }
}
