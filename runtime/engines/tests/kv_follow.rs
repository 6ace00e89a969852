//! KV events over real sockets: live, missed, replayed, too old, from an engine that was started anew.

use crate::publisher::Publisher;
use mixfleet_engines::{EngineKind, HttpEngine, KvEventsAt};
use mixfleet_hal::outside::{EngineBlock, EngineKvChange, EngineKvFeed, OutsideEngine};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

pub(crate) async fn follow(events: &str, replay: Option<&str>) -> Box<dyn EngineKvFeed> {
    let engine =
        HttpEngine::new(EngineKind::Vllm, "http://127.0.0.1:1".parse().unwrap(), None, None).unwrap();
    let at = KvEventsAt::given("127.0.0.1", events, replay, 1).unwrap();
    engine.with_kv_events(at).follow_kv().await.unwrap()
}

/// A batch that says that block `block` is there, or gone; `at` makes it unlike others.
fn batch(at: u64, block: u64, is_there: bool) -> Vec<u8> {
    let event = match is_there {
        true => json!({"type": "BlockStored", "block_hashes": [block], "token_ids": [1, 2], "block_size": 2}),
        false => json!({"type": "BlockRemoved", "block_hashes": [block]}),
    };
    payload(at, &[event])
}

fn payload(at: u64, events: &[Value]) -> Vec<u8> {
    rmp_serde::to_vec(&json!([at as f64 + 0.5, events, 0])).unwrap()
}

/// The known content, from the feed.
#[derive(Default)]
struct Known {
    blocks: BTreeSet<u64>,
    causes: Vec<String>,
}

impl Known {
    fn take(&mut self, change: &EngineKvChange) {
        match change {
            EngineKvChange::Stored { blocks, .. } => self.blocks.extend(blocks.iter().map(|block| block.0)),
            EngineKvChange::Removed { blocks, .. } => blocks.iter().for_each(|EngineBlock(block)| {
                self.blocks.remove(block);
            }),
            EngineKvChange::Cleared { .. } => self.blocks.clear(),
            EngineKvChange::Lost { cause, .. } => {
                self.blocks.clear();
                self.causes.push(cause.clone());
            }
        }
    }

    /// Follows until exactly these blocks are there.
    async fn reaches(&mut self, feed: &mut Box<dyn EngineKvFeed>, blocks: &[u64]) {
        let wanted: BTreeSet<u64> = blocks.iter().copied().collect();
        while self.blocks != wanted {
            let next = tokio::time::timeout(Duration::from_secs(30), feed.next()).await;
            let next =
                next.unwrap_or_else(|_| panic!("{:?} and not {wanted:?}; {:?}", self.blocks, self.causes));
            next.iter().for_each(|change| self.take(change));
        }
    }
}

async fn connected(publisher: &Publisher) {
    while publisher.subscribers() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn what_was_said_before_and_what_is_said_later_is_known() {
    run(async {
        let publisher = Publisher::start();
        publisher.lose(&batch(0, 1, true));
        publisher.lose(&batch(1, 2, true));
        publisher.lose(&batch(2, 1, false));
        let (mut feed, mut known) =
            (follow(&publisher.events, Some(&publisher.replay)).await, Known::default());
        known.reaches(&mut feed, &[2]).await;
        publisher.say(&batch(3, 3, true));
        known.reaches(&mut feed, &[2, 3]).await;
        publisher.say(&payload(4, &[json!({"type": "AllBlocksCleared"})]));
        known.reaches(&mut feed, &[]).await;
        assert!(known.causes.is_empty(), "{:?}", known.causes);
    });
}

#[test]
fn what_was_missed_is_replayed_and_nothing_is_forgotten() {
    run(async {
        let publisher = Publisher::start();
        let (mut feed, mut known) =
            (follow(&publisher.events, Some(&publisher.replay)).await, Known::default());
        connected(&publisher).await;
        publisher.say(&batch(0, 1, true));
        known.reaches(&mut feed, &[1]).await;
        // a gap in the received events
        publisher.lose(&batch(1, 2, true));
        publisher.lose(&batch(2, 1, false));
        publisher.say(&batch(3, 3, true));
        known.reaches(&mut feed, &[2, 3]).await;
        // a connection that is cut, and a replay that does not fit its queue
        publisher.cut();
        publisher.replay_at_most(7);
        for block in 10..30 {
            publisher.lose(&batch(block, block, true));
        }
        let all: Vec<u64> = [2, 3].into_iter().chain(10..30).collect();
        known.reaches(&mut feed, &all).await;
        connected(&publisher).await;
        publisher.say(&batch(40, 40, true));
        known.reaches(&mut feed, &[&all[..], &[40]].concat()).await;
        assert!(known.causes.is_empty(), "{:?}", known.causes);
    });
}

#[test]
fn what_is_not_kept_any_more_begins_anew() {
    run(async {
        let publisher = Publisher::start();
        let (mut feed, mut known) =
            (follow(&publisher.events, Some(&publisher.replay)).await, Known::default());
        connected(&publisher).await;
        publisher.say(&batch(0, 1, true));
        known.reaches(&mut feed, &[1]).await;
        for block in 2..9 {
            publisher.lose(&batch(block, block, true));
        }
        publisher.keep_last(3);
        publisher.say(&batch(9, 9, true));
        known.reaches(&mut feed, &[6, 7, 8, 9]).await;
        assert!(known.causes[0].contains("no longer kept"), "{:?}", known.causes);
    });
}

#[test]
fn an_engine_that_was_started_anew_has_what_it_says_now() {
    run(async {
        let publisher = Publisher::start();
        let (mut feed, mut known) =
            (follow(&publisher.events, Some(&publisher.replay)).await, Known::default());
        connected(&publisher).await;
        for block in 0..3 {
            publisher.say(&batch(block, block, true));
        }
        known.reaches(&mut feed, &[0, 1, 2]).await;
        // it has said more than before when it is heard again
        publisher.start_anew();
        for block in 10..15 {
            publisher.lose(&batch(block, block, true));
        }
        known.reaches(&mut feed, &[10, 11, 12, 13, 14]).await;
        assert!(known.causes.iter().any(|cause| cause.contains("restarted")), "{:?}", known.causes);
        // and less
        publisher.start_anew();
        publisher.lose(&batch(20, 20, true));
        known.reaches(&mut feed, &[20]).await;
        publisher.start_anew();
        known.reaches(&mut feed, &[]).await;
    });
}

#[test]
fn without_replay_a_gap_begins_anew_and_the_next_batches_count() {
    run(async {
        let publisher = Publisher::start();
        publisher.lose(&batch(0, 1, true));
        let (mut feed, mut known) = (follow(&publisher.events, None).await, Known::default());
        connected(&publisher).await;
        publisher.say(&batch(1, 2, true));
        known.reaches(&mut feed, &[2]).await;
        publisher.say(&batch(2, 3, true));
        publisher.lose(&batch(3, 2, false));
        publisher.say(&batch(4, 4, true));
        known.reaches(&mut feed, &[4]).await;
        assert!(known.causes.iter().any(|cause| cause.contains("from 3 to 3")), "{:?}", known.causes);
        assert_eq!(publisher.replays(), 0);
    });
}

#[test]
fn nonsense_is_forgotten_and_the_feed_goes_on() {
    run(async {
        let publisher = Publisher::start();
        let (mut feed, mut known) =
            (follow(&publisher.events, Some(&publisher.replay)).await, Known::default());
        connected(&publisher).await;
        publisher.say(&batch(0, 1, true));
        known.reaches(&mut feed, &[1]).await;
        publisher.say(b"\xc1 not MessagePack");
        publisher.say(&batch(2, 2, true));
        known.reaches(&mut feed, &[2]).await;
        assert!(known.causes.iter().any(|cause| cause.contains("cannot be read")), "{:?}", known.causes);
    });
}

#[test]
fn an_engine_that_connects_is_waited_for() {
    run(async {
        // the engine's notation for an address that it connects to
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (mut feed, mut known) = (follow(&format!("tcp://{free}"), None).await, Known::default());
        let dialled = std::thread::spawn(move || {
            let mut stream = loop {
                match std::net::TcpStream::connect(free) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            crate::publisher::say_once(&mut stream, &batch(0, 5, true)).unwrap();
            stream
        });
        known.reaches(&mut feed, &[5]).await;
        drop(dialled.join().unwrap());
    });
}
