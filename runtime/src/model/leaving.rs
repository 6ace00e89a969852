//! What leaves the members of an instance while they run a step.

use mixfleet_hal::{Cmd, Result};

/// KV that leaves layer by layer while members run a step. Members, the batches of the step and the layers of
/// each member have numbers from 0 on.
pub trait LayerKv {
    /// Returns the commands that gather the KV of a layer on a member: they run behind those that write it,
    /// and those of the layer before have left.
    ///
    /// # Errors
    /// Those of the member's device.
    fn gather(&mut self, member: usize, batch: usize, layer: usize) -> Result<Vec<Cmd>>;

    /// Sends what was gathered of a layer, which all members that run it have done. The first of these is
    /// named. It waits for nobody else, since members may wait for what comes next.
    ///
    /// # Errors
    /// Those of the members' devices.
    fn leave(&mut self, member: usize, batch: usize, layer: usize) -> Result<()>;
}

/// No KV leaves.
pub struct KvStays;

impl LayerKv for KvStays {
    fn gather(&mut self, _: usize, _: usize, _: usize) -> Result<Vec<Cmd>> {
        Ok(Vec::new())
    }

    fn leave(&mut self, _: usize, _: usize, _: usize) -> Result<()> {
        Ok(())
    }
}
