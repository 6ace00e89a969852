//! The members of an instance beside its first device, which divide the model with it.
//!
//! The worker has the first one: it draws, and its device speaks for the instance. All have KV pages of the
//! same numbers, each with its own heads. KV does not leave such an instance yet, and none comes to it.

use crate::model::divided::{MemberRun, ThroughHost, run_divided};
use crate::model::graph::{Forward, Pass, StepInput};
use mixfleet_hal::{Collective, Device, Queue, Result};
use std::sync::Arc;
use std::time::Duration;

/// A device with its share of the model.
pub(super) struct MemberDevice {
    pub(super) device: Arc<dyn Device>,
    pub(super) forward: Forward,
}

/// The other members, with queues.
pub(super) struct OtherMembers {
    members: Vec<(MemberDevice, Box<dyn Queue>)>,
    exchange: Box<dyn Collective>,
}

impl OtherMembers {
    /// Opens their queues.
    ///
    /// # Errors
    /// When a device gives no queue.
    pub(super) fn open(devices: Vec<MemberDevice>) -> Result<Self> {
        let queued = |member: MemberDevice| {
            let queue = member.device.queue()?;
            Ok((member, queue))
        };
        let members = devices.into_iter().map(queued).collect::<Result<Vec<_>>>()?;
        Ok(OtherMembers { members, exchange: Box::new(ThroughHost::default()) })
    }

    /// The devices, in the order of members.
    pub(super) fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.members.iter().map(|(member, _)| &member.device)
    }

    /// Uploads the inputs of a step to each.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn begin(&self, parts: &[StepInput<'_>]) -> Result<Vec<Pass>> {
        self.members.iter().map(|(member, _)| member.forward.begin(&*member.device, parts)).collect()
    }

    /// Runs a step on the first device and on the others, whose passes follow its own.
    ///
    /// # Errors
    /// Those of the devices and of the exchange.
    pub(super) fn run<'a>(
        &'a mut self,
        first: MemberRun<'a>,
        passes: &[Pass],
        timeout: Duration,
    ) -> Result<()> {
        let others = self.members.iter_mut().map(|(MemberDevice { device, forward }, queue)| MemberRun {
            device: &**device,
            queue: &mut **queue,
            forward,
        });
        let mut members: Vec<_> = std::iter::once(first).chain(others).collect();
        run_divided(&mut members, &mut *self.exchange, passes, timeout)
    }

    /// Opens new queues.
    ///
    /// # Errors
    /// When a device gives none.
    pub(super) fn renew_queues(&mut self) -> Result<()> {
        for (member, queue) in &mut self.members {
            *queue = member.device.queue()?;
        }
        Ok(())
    }
}
