//! Instances that become slower during a run: by heat, by other load, by a fault.

use super::engine::Message;
use super::{Next, World};
use crate::fleet_file::PoolSlowdown;
use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::{Event, InstanceId};
use std::sync::Arc;

impl World<'_> {
    pub(super) fn schedule_slowdowns(&mut self) {
        for (index, slowdown) in (0..).zip(&self.setup.slowdowns) {
            self.schedule(slowdown.from_s, Next::SlowsDown { index });
        }
    }

    pub(super) fn slows_down(&mut self, index: u32) {
        let setup = self.setup;
        let PoolSlowdown { ref pool, instance, times, told, .. } = setup.slowdowns[index as usize];
        let is_of_pool = |at: &u32| setup.pools[setup.instances[*at as usize].spec.pool as usize] == *pool;
        let of_pool = (0..to_u32(setup.instances.len())).filter(is_of_pool);
        for (_, at) in (0..).zip(of_pool).filter(|(number, _)| instance.is_none_or(|one| one == *number)) {
            let usual = setup.instances[at as usize].spec.cost.clone();
            let cost = Arc::new(CostModel::Scaled(times, usual));
            self.sharing.is_usually(at, &cost);
            self.send(at, Message::Cost(cost.clone()));
            let known = self.routers.first().instances().find(|known| known.id == InstanceId(at)).cloned();
            if let Some(mut known) = known.filter(|_| told) {
                known.cost = cost;
                self.tell(Event::InstanceUp(known));
            }
        }
    }
}
