//! A queue: a thread that has the library run batches.

use crate::opened::OpenedDevice;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, ErrorKind, Graph, Queue, Result, Ticket};
use std::any::Any;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Batches whose times are kept.
const TIMES_MAX: usize = 4096;

/// What is done.
#[derive(Default)]
struct Done {
    /// Number of batches that are done.
    count: u64,
    /// Times of the latest of them.
    times: std::collections::VecDeque<Seconds>,
    /// The first batch that failed, and how.
    failed: Option<(u64, Error)>,
}

#[derive(Default)]
struct Progress {
    done: Mutex<Done>,
    changed: Condvar,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue of a library's device.
pub(crate) struct PluginQueue {
    batches: Sender<Vec<Cmd>>,
    submitted: u64,
    progress: Arc<Progress>,
    id: String,
}

/// A batch to run again.
struct Recorded(Vec<Cmd>);

impl Graph for Recorded {
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
        let progress = Arc::new(Progress::default());
        let told = progress.clone();
        let work = move || run(&device, &incoming, &told);
        let thread = std::thread::Builder::new().name(format!("queue {id}")).spawn(work);
        thread.map_err(|error| Error::new(ErrorKind::Other, format!("{id}: no thread: {error}")))?;
        Ok(PluginQueue { batches, submitted: 0, progress, id: id.to_owned() })
    }
}

/// Runs batches until the queue is dropped. One that never ends keeps its thread, and nothing else.
fn run(device: &Arc<OpenedDevice>, batches: &Receiver<Vec<Cmd>>, progress: &Progress) {
    while let Ok(cmds) = batches.recv() {
        let began = Instant::now();
        let failed = progress.lock().failed.is_some();
        let result = if failed { Ok(()) } else { device.run(&cmds) };
        let time = Seconds(began.elapsed().as_secs_f64());
        // buffers are freed before it is said that the batch is done
        drop(cmds);
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
        let gone = |_| Error::new(ErrorKind::DeviceLost, format!("{}: its thread is gone", self.id));
        self.batches.send(cmds.to_vec()).map_err(gone)?;
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if ticket.0 == 0 || ticket.0 > self.submitted {
            return Err(Error::invalid(format!("{}: ticket {} was not given", self.id, ticket.0)));
        }
        let waits = |done: &mut Done| done.count < ticket.0 && done.failed.is_none();
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
        Ok(Arc::new(Recorded(cmds.to_vec())))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<Recorded>();
        let Recorded(cmds) =
            recorded.ok_or_else(|| Error::invalid("the batch was recorded by another queue"))?;
        self.submit(cmds)
    }
}
