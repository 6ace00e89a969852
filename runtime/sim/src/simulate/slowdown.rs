//! Instances that become slower during a run: by heat, by other load, by a fault.

use super::engine::Message;
use super::{Next, World};
use crate::fleet_file::{InstancePool, PoolSlowdown};
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{Event, InstanceId};
use std::sync::Arc;

/// An instance whose steps take longer from a time on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowdown {
    /// Its index among the setup's instances.
    pub instance: u32,
    /// Time in the trace, in seconds, after which the next step is the first slower one.
    pub from_s: f64,
    /// Factor on the time of its cost model.
    pub times: f64,
    /// Whether the fleet machine is told at once, instead of learning from measured steps.
    pub told: bool,
}

impl Slowdown {
    /// The slowdown of each instance that `slowdown` of a fleet file selects.
    pub(super) fn of_each(slowdown: &PoolSlowdown, pools: &[InstancePool]) -> Vec<Slowdown> {
        let PoolSlowdown { ref pool, instance, from_s, times, told } = *slowdown;
        let names = pools.iter().flat_map(|pool| std::iter::repeat_n(&pool.name, pool.count as usize));
        let of_pool = (0..).zip(names).filter(|(_, name)| *name == pool);
        let those = (0..).zip(of_pool).filter(|(at, _)| instance.is_none_or(|one| one == *at));
        those.map(|(_, (instance, _))| Slowdown { instance, from_s, times, told }).collect()
    }
}

impl World<'_> {
    pub(super) fn schedule_slowdowns(&mut self) {
        for (index, slowdown) in (0..).zip(&self.setup.slowdowns) {
            self.schedule(slowdown.from_s, Next::SlowsDown { index });
        }
    }

    pub(super) fn slows_down(&mut self, index: u32) {
        let Slowdown { instance, times, told, .. } = self.setup.slowdowns[index as usize];
        let usual = self.setup.instances[instance as usize].spec.cost.clone();
        let cost = Arc::new(CostModel::Scaled(times, usual));
        self.send(instance, Message::Cost(cost.clone()));
        let known = self.routers.first().instances().find(|known| known.id == InstanceId(instance)).cloned();
        if let Some(mut known) = known.filter(|_| told) {
            known.cost = cost;
            self.tell(Event::InstanceUp(known));
        }
    }
}
