//! A device on which replays are faster gets its decode steps as a few recordings, and gives the same tokens.

use crate::fleet::wayward::Wayward;
use crate::fleet::{TestFleet, ask, greedy, prompt};
use mixfleet_hal::{Cmd, Elapsed, Graph, Queue, Result, Ticket};
use mixfleet_runtime::env::{SeededEnv, SharedEnv};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::Role as FleetRole;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

#[derive(Default)]
struct Counts {
    recorded: AtomicUsize,
    replayed: AtomicUsize,
}

/// A queue that counts recordings and replays.
struct CountingQueue {
    inner: Box<dyn Queue>,
    counts: Arc<Counts>,
}

impl Queue for CountingQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.inner.submit(cmds)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.inner.wait(ticket, timeout)
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.counts.recorded.fetch_add(1, Relaxed);
        self.inner.record(cmds)
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.counts.replayed.fetch_add(1, Relaxed);
        self.inner.replay(graph)
    }
}

/// Recordings and replays.
type Counted = (usize, usize);

/// Generates this many tokens for each request together, over several KV blocks; returns the counts until the
/// engine was up, and since.
fn generate(replay_pays: bool, tokens: &[u32]) -> (Counted, Counted) {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let prompts: Vec<_> = (0..tokens.len()).map(|at| prompt(9, at as u64, &checkpoint.config)).collect();
    let expected = prompts.iter().zip(tokens).map(|(prompt, &n)| greedy(&checkpoint, prompt, n as usize));
    let expected: Vec<_> = expected.collect();
    let counts = Arc::new(Counts::default());
    let noted = counts.clone();
    let counting =
        move |inner| -> Box<dyn Queue> { Box::new(CountingQueue { inner, counts: noted.clone() }) };
    let device = Wayward::new("device0").queuing(counting).replay_pays(replay_pays);
    let fleet = TestFleet::new(checkpoint).with_device(FleetRole::Auto, Arc::new(device));
    let env = SeededEnv::new(5);
    let shared: SharedEnv = Arc::new(env.clone());
    let handle = fleet.start(shared);
    let counted = || (counts.recorded.load(Relaxed), counts.replayed.load(Relaxed));
    let before = counted();
    let tokens = tokens.to_vec();
    let answers = env.run(async move {
        let asked =
            prompts.into_iter().zip(tokens).map(|(prompt, n)| ask(&handle, "one".into(), prompt, n, None));
        futures_util::future::join_all(asked).await
    });
    assert_eq!(answers.into_iter().map(|answer| answer.tokens).collect::<Vec<_>>(), expected);
    let after = counted();
    (before, (after.0 - before.0, after.1 - before.1))
}

#[test]
fn a_sequence_that_grows_needs_one_recording_which_is_made_before_the_engine_is_up() {
    // The first token comes from prefill; 21 tokens of context stay within the smallest block table.
    let (before, after) = generate(true, &[13]);
    assert_eq!(after, (0, 12));
    assert!(before.0 > 0 && before.0 == before.1, "each is run once: {before:?}");
}

#[test]
fn batches_of_many_sizes_share_a_few_recordings() {
    // Batches shrink from 7 to 1; rows that do nothing fill them up to 8, 4, 2 and 1, which is there already.
    let (_, (recorded, replayed)) = generate(true, &[7, 8, 9, 10, 11, 12, 13]);
    assert!(recorded <= 3 && replayed >= 6, "{recorded} recordings, {replayed} replays");
}

#[test]
fn where_replay_does_not_pay_nothing_is_recorded() {
    assert_eq!(generate(false, &[5]), ((0, 0), (0, 0)));
}
