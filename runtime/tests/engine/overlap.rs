//! The KV of a layer is sent before later layers begin: the prefill device of this test refuses to begin
//! layer k+1 before layer k has landed in the decode device's pages.

use crate::fleet::wayward::Wayward;
use crate::fleet::{TestFleet, greedy, prompt};
use mixfleet_hal::{Cmd, Device, Elapsed, Error, ErrorKind, Graph, OpSig, Queue, Result, Ticket};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role as FleetRole;
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// Timeout, which only a failing test reaches.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// The prefill device began this layer.
    Began(usize),
    /// The decode device scattered this layer's KV.
    Landed(usize),
}

/// The events that both devices report.
#[derive(Default)]
struct Book {
    seen: Mutex<Vec<Seen>>,
    changed: Condvar,
}

impl Book {
    fn note(&self, event: Seen) {
        self.seen.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    fn count(&self, which: fn(&Seen) -> bool) -> usize {
        self.seen.lock().unwrap().iter().filter(|seen| which(seen)).count()
    }

    fn wait_for(&self, event: Seen) {
        let seen = self.seen.lock().unwrap();
        let waited = self.changed.wait_timeout_while(seen, PATIENCE, |seen| !seen.contains(&event)).unwrap();
        drop(waited);
    }
}

/// A queue that runs batches on a thread; if `gated`, it holds each layer back until the previous one has
/// landed.
fn threaded(mut inner: Box<dyn Queue>, book: Arc<Book>, gated: bool) -> ThreadQueue {
    let (batches, incoming) = mpsc::channel::<Vec<Cmd>>();
    let (done, results) = mpsc::channel();
    std::thread::spawn(move || {
        for batch in incoming {
            for command in &batch {
                observe(command, &book, gated);
            }
            let elapsed = inner.submit(&batch).and_then(|ticket| inner.wait(ticket, PATIENCE));
            if done.send(elapsed).is_err() {
                return;
            }
        }
    });
    ThreadQueue { batches, results, submitted: 0, finished: Vec::new() }
}

fn observe(command: &Cmd, book: &Book, gated: bool) {
    match command.sig() {
        OpSig::KvWrite { .. } if gated => {
            let layer = book.count(|seen| matches!(seen, Seen::Began(_)));
            if layer > 0 {
                book.wait_for(Seen::Landed(layer - 1));
            }
            book.note(Seen::Began(layer));
        }
        OpSig::KvScatter { .. } => {
            let layer = book.count(|seen| matches!(seen, Seen::Landed(_)));
            book.note(Seen::Landed(layer));
        }
        _ => {}
    }
}

struct ThreadQueue {
    batches: mpsc::Sender<Vec<Cmd>>,
    results: mpsc::Receiver<Result<Elapsed>>,
    submitted: u64,
    finished: Vec<Elapsed>,
}

impl Queue for ThreadQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.batches
            .send(cmds.to_vec())
            .map_err(|_| Error::new(ErrorKind::DeviceLost, "the thread ended"))?;
        self.submitted += 1;
        Ok(Ticket(self.submitted - 1))
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        while self.finished.len() as u64 <= ticket.0 {
            let result = self.results.recv_timeout(timeout);
            self.finished.push(result.map_err(|e| Error::new(ErrorKind::Timeout, e.to_string()))??);
        }
        Ok(self.finished[ticket.0 as usize])
    }

    fn record(&mut self, _: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Err(Error::unsupported("this test records nothing"))
    }

    fn replay(&mut self, _: &Arc<dyn Graph>) -> Result<Ticket> {
        Err(Error::unsupported("this test records nothing"))
    }
}

#[test]
fn a_layers_kv_lands_before_the_next_layer_begins() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let prompt = prompt(9, 1, &checkpoint.config);
    let expected = greedy(&checkpoint, &prompt, 4);
    let book = Arc::new(Book::default());
    let watched = |at: usize, gated| -> Arc<dyn Device> {
        let book = book.clone();
        let queue = move |inner| -> Box<dyn Queue> { Box::new(threaded(inner, book.clone(), gated)) };
        Arc::new(Wayward::new(&format!("device{at}")).queuing(queue).replay_pays(false))
    };
    let fleet = TestFleet::new(checkpoint.clone())
        .with_device(FleetRole::Prefill, watched(0, true))
        .with_device(FleetRole::Decode, watched(1, false));

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let env: SharedEnv = Arc::new(RealEnv::new(runtime.handle().clone()));
    let handle = fleet.start(env.clone());
    let answer = runtime.block_on(crate::fleet::ask(&handle, "overlap".into(), prompt, 4, None));
    assert_eq!(answer.tokens, expected);

    let layers = checkpoint.config.layers as usize;
    let seen = book.seen.lock().unwrap().clone();
    let began = |k| seen.iter().position(|s| *s == Seen::Began(k)).expect("the layer ran");
    let landed = |k| seen.iter().position(|s| *s == Seen::Landed(k)).expect("the layer's KV landed");
    for layer in 0..layers - 1 {
        assert!(landed(layer) < began(layer + 1), "layer {layer}: {seen:?}");
    }

    // The prefill side releases its pages, which its next report shows. The pause only spaces the polls: its
    // length matters only for how long a failing test waits.
    let freed = runtime.block_on(async {
        for _ in 0..3000 {
            if fleet.usage_of(0) == 0.0 {
                return true;
            }
            env.sleep(Duration::from_millis(10)).await;
        }
        false
    });
    assert!(freed, "the prefill side still holds pages");
}
