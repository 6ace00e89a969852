//! What a real vLLM 0.32.0 sent: bytes of a subscription and of a replay, as `hwtests/engines/vllm.py record`
//! wrote them, and the blocks that its script found to be there at the end.

use crate::kv_follow::{follow, run};
use crate::publisher::{Publisher, messages};
use mixfleet_engines::kv_events::{KvEvent, KvEventBatch};
use mixfleet_hal::outside::{EngineKvChange, EngineKvFeed};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

const EVENTS: &[u8] = include_bytes!("data/vllm-0.32.0/events.bin");
const REPLAY: &[u8] = include_bytes!("data/vllm-0.32.0/replay.bin");
const HELD: &str = include_str!("data/vllm-0.32.0/held.json");

#[derive(serde::Deserialize)]
struct Held {
    batches: usize,
    held: BTreeSet<u64>,
}

fn held() -> Held {
    serde_json::from_str(HELD).unwrap()
}

/// The payloads of the recorded batches.
fn payloads() -> Vec<Vec<u8>> {
    let of_events = messages(EVENTS);
    let numbers = of_events.iter().map(|message| u64::from_be_bytes(message[1][..].try_into().unwrap()));
    assert!(numbers.eq(0..held().batches as u64));
    of_events.into_iter().map(|message| message[2].clone()).collect()
}

/// Blocks, and how often each was stored.
#[derive(Default)]
struct Counted {
    blocks: BTreeMap<u64, u32>,
    lost: usize,
}

impl Counted {
    fn take(&mut self, change: &EngineKvChange) {
        match change {
            EngineKvChange::Stored { parent, blocks, tokens, block_tokens, .. } => {
                assert_eq!((tokens.len(), *block_tokens), (32 * blocks.len(), 32));
                if parent.is_none_or(|parent| self.blocks.contains_key(&parent.0)) {
                    blocks.iter().for_each(|block| *self.blocks.entry(block.0).or_default() += 1);
                }
            }
            EngineKvChange::Removed { blocks, .. } => {
                for block in blocks {
                    if let Some(times) = self.blocks.get_mut(&block.0) {
                        *times -= 1;
                    }
                }
                self.blocks.retain(|_, times| *times > 0);
            }
            EngineKvChange::Cleared { .. } => self.blocks.clear(),
            EngineKvChange::Lost { .. } => {
                self.blocks.clear();
                self.lost += 1;
            }
        }
    }

    /// Follows until nothing has come for a while and the blocks are the expected ones.
    async fn reaches_the_end(&mut self, feed: &mut Box<dyn EngineKvFeed>) {
        let expected = held().held;
        while !self.blocks.keys().eq(&expected) {
            let next = tokio::time::timeout(Duration::from_secs(30), feed.next()).await;
            let next = next.unwrap_or_else(|_| panic!("{:?} and not {expected:?}", self.blocks.keys()));
            next.iter().for_each(|change| self.take(change));
        }
    }
}

/// Sends these bytes to every client.
fn plays(bytes: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().map_while(Result::ok) {
            stream.write_all(bytes).unwrap();
            open.push(stream);
        }
    });
    port
}

#[test]
fn the_recording_has_what_the_tests_are_about() {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for payload in payloads() {
        let batch = KvEventBatch::decode(&payload).unwrap();
        assert_eq!(batch.rank, Some(0));
        for event in batch.events {
            let kind = match event {
                KvEvent::Stored(stored) if stored.plain_blocks < stored.hashes.len() => "salted",
                KvEvent::Stored(stored) if stored.parent.is_some() => "behind",
                KvEvent::Stored(_) => "first",
                KvEvent::Removed { .. } => "removed",
                KvEvent::Cleared => "cleared",
                KvEvent::Other(other) => panic!("{other}"),
            };
            *kinds.entry(kind).or_default() += 1;
        }
    }
    for kind in ["first", "behind", "salted", "removed", "cleared"] {
        assert!(kinds.contains_key(kind), "{kind}: {kinds:?}");
    }
}

#[test]
fn recorded_bytes_lead_to_the_blocks_that_are_there() {
    run(async {
        let (events, replay) = (plays(EVENTS), plays(REPLAY));
        let mut alone = follow(&format!("tcp://*:{events}"), None).await;
        Counted::default().reaches_the_end(&mut alone).await;
        let replay = format!("tcp://127.0.0.1:{replay}");
        let mut both = follow(&format!("tcp://*:{events}"), Some(&replay)).await;
        let mut counted = Counted::default();
        counted.reaches_the_end(&mut both).await;
        assert_eq!(counted.lost, 0);
    });
}

#[test]
fn recorded_batches_may_be_missed_anywhere_and_are_replayed() {
    run(async {
        let payloads = payloads();
        for missed in 0..payloads.len() - 1 {
            let publisher = Publisher::start();
            let mut feed = follow(&publisher.events, Some(&publisher.replay)).await;
            while publisher.subscribers() == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            for (at, payload) in payloads.iter().enumerate() {
                if at == missed { publisher.lose(payload) } else { publisher.say(payload) }
            }
            let mut counted = Counted::default();
            counted.reaches_the_end(&mut feed).await;
            assert_eq!(counted.lost, 0, "{missed}");
        }
    });
}
