//! Decode steps that a device replays.

use crate::model::graph::{Forward, Pass, StepKey};
use mixfleet_hal::{ErrorKind, Graph, Queue, Result, Ticket};
use std::collections::HashMap;
use std::sync::Arc;

/// Maximum number of recordings: a dozen batch sizes, a few lengths of the block table and ways of drawing
/// each.
const RECORDINGS_MAX: usize = 256;

/// The recordings of a queue. Once there are too many, the one that was used least recently goes.
#[derive(Default)]
pub(super) struct Recordings {
    kept: HashMap<StepKey, (Arc<dyn Graph>, u64)>,
    /// Number of steps run, the clock of `kept`.
    steps: u64,
}

impl Recordings {
    /// Submits a decode-only step from its recording, which the first step of its kind makes.
    pub(super) fn run(
        &mut self,
        queue: &mut dyn Queue,
        forward: &Forward,
        pass: &Pass,
        key: StepKey,
    ) -> Result<Ticket> {
        self.steps += 1;
        if let Some((graph, used)) = self.kept.get_mut(&key) {
            *used = self.steps;
            return queue.replay(graph);
        }
        let list = forward.whole(pass)?;
        let graph = match queue.record(&list) {
            Ok(graph) => graph,
            Err(error) if error.kind == ErrorKind::Unsupported => {
                return queue.submit_for(&list, &forward.results(pass));
            }
            Err(error) => return Err(error),
        };
        if self.kept.len() >= RECORDINGS_MAX {
            let oldest = self.kept.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            oldest.map(|key| self.kept.remove(&key));
        }
        let ticket = queue.replay(&graph)?;
        self.kept.insert(key, (graph, self.steps));
        Ok(ticket)
    }

    /// Forgets all recordings, since they are valid on one queue only.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }
}
