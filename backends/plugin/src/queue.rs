//! A queue: a thread that has the library run batches.

use crate::opened::{OpenedDevice, PluginGraph};
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, ErrorKind, Graph, Queue, Result, Ticket};
use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Batches whose times are kept.
const TIMES_MAX: usize = 4096;

/// Number of completed batches.
#[derive(Default)]
struct PluginCompletions {
    /// Number of batches that are done.
    count: u64,
    /// Durations of the latest batches.
    times: std::collections::VecDeque<Seconds>,
    /// The first batch that failed, and how.
    failed: Option<(u64, Error)>,
}

#[derive(Default)]
struct PluginProgress {
    done: Mutex<PluginCompletions>,
    changed: Condvar,
}

impl PluginProgress {
    fn lock(&self) -> MutexGuard<'_, PluginCompletions> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue of a library's device.
pub(crate) struct PluginQueue {
    device: Arc<OpenedDevice>,
    batches: Sender<PluginBatch>,
    submitted: u64,
    progress: Arc<PluginProgress>,
    id: String,
}

/// What the thread of a queue has to run.
enum PluginBatch {
    New(Vec<Cmd>),
    Prepared(Arc<PluginGraph>),
}

/// A batch to run again: as the library has prepared it, or as it was given.
enum PluginRecording {
    Commands(Vec<Cmd>),
    Graph(Arc<PluginGraph>),
}

impl Graph for PluginRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl PluginQueue {
    pub(crate) fn start(device: Arc<OpenedDevice>, id: &str) -> Result<Self> {
        let (batches, incoming) = channel();
        let progress = Arc::new(PluginProgress::default());
        let (told, opened) = (progress.clone(), device.clone());
        let work = move || run(&opened, &incoming, &told);
        let thread = std::thread::Builder::new().name(format!("queue {id}")).spawn(work);
        thread.map_err(|error| Error::new(ErrorKind::Other, format!("{id}: no thread: {error}")))?;
        Ok(PluginQueue { device, batches, submitted: 0, progress, id: id.to_owned() })
    }

    fn send(&mut self, batch: PluginBatch) -> Result<Ticket> {
        let gone = |_| Error::new(ErrorKind::DeviceLost, format!("{}: its thread is gone", self.id));
        self.batches.send(batch).map_err(gone)?;
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }
}

/// Runs batches until the queue is dropped. One that never ends keeps its thread, and nothing else.
fn run(device: &Arc<OpenedDevice>, batches: &Receiver<PluginBatch>, progress: &PluginProgress) {
    while let Ok(batch) = batches.recv() {
        let began = Instant::now();
        let failed = progress.lock().failed.is_some();
        let result = match &batch {
            _ if failed => Ok(()),
            PluginBatch::New(cmds) => device.run(cmds),
            PluginBatch::Prepared(graph) => device.replay(graph),
        };
        let time = Seconds(began.elapsed().as_secs_f64());
        // buffers are freed before the batch is reported as done
        drop(batch);
        let mut done = progress.lock();
        done.count += 1;
        done.times.push_back(time);
        if done.times.len() > TIMES_MAX {
            done.times.pop_front();
        }
        if let Err(error) = result {
            let at = done.count;
            done.failed.get_or_insert((at, error));
        }
        progress.changed.notify_all();
    }
}

impl Queue for PluginQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.send(PluginBatch::New(cmds.to_vec()))
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if ticket.0 == 0 || ticket.0 > self.submitted {
            return Err(Error::invalid(format!("{}: ticket {} was not given", self.id, ticket.0)));
        }
        let waits = |done: &mut PluginCompletions| done.count < ticket.0 && done.failed.is_none();
        let lock = self.progress.lock();
        let waited = self.progress.changed.wait_timeout_while(lock, timeout, waits);
        let (done, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some((_, error)) = done.failed.as_ref().filter(|(at, _)| *at <= ticket.0) {
            return Err(error.clone());
        }
        if done.count < ticket.0 {
            let message = format!("{}: a batch is not done after {} s", self.id, timeout.as_secs_f64());
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        let back = usize::try_from(done.count - ticket.0).unwrap_or(usize::MAX);
        let time = done.times.iter().rev().nth(back).copied().unwrap_or(Seconds::ZERO);
        Ok(Elapsed { time, clock: ClockKind::Host })
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(match self.device.record(cmds)? {
            Some(graph) => PluginRecording::Graph(Arc::new(graph)),
            None => PluginRecording::Commands(cmds.to_vec()),
        }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        match graph.as_any().downcast_ref::<PluginRecording>() {
            Some(PluginRecording::Graph(graph)) if graph.is_of(&self.device) => {
                self.send(PluginBatch::Prepared(graph.clone()))
            }
            Some(PluginRecording::Commands(cmds)) => self.submit(cmds),
            _ => Err(Error::invalid("the batch was recorded by another device")),
        }
    }
}
