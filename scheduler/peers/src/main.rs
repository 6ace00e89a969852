//! The prefix index and two others under the same load, each in a process of its own: rates, lookup times and
//! resident size, and the ratios of ours to theirs.
//!
//! `cargo run --release --manifest-path scheduler/peers/Cargo.toml -- [blocks] [replication] [rate]`

#![forbid(unsafe_code)]

#[allow(dead_code)]
#[path = "../../benches/load/mod.rs"]
mod load;

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use load::{Chain, Figures, Ours, Settings, Subject};
use std::process::Command;

/// `kv-index`: a compressed tree over content, and one map per instance, without its worker threads.
struct KvIndex {
    index: ChainIndex,
    maps: Vec<ChainBlockMap>,
    blocks: Vec<StoredBlock>,
    hashes: Vec<SequenceHash>,
}

impl KvIndex {
    fn new(instances: u32) -> Self {
        let index = ChainIndex::with_max_workers(instances as usize);
        for instance in 0..instances {
            let id = index.intern_worker(&instance.to_string()).expect("room for all instances");
            assert_eq!(id, instance, "ids are given in order");
        }
        let maps = (0..instances).map(|_| ChainBlockMap::default()).collect();
        KvIndex { index, maps, blocks: Vec::new(), hashes: Vec::new() }
    }
}

impl Subject for KvIndex {
    fn store(&mut self, instance: u32, chain: &Chain) {
        self.blocks.clear();
        self.blocks.extend(chain.keys.iter().zip(&chain.contents).map(|(&key, &content)| StoredBlock {
            seq_hash: SequenceHash(key),
            content_hash: ContentHash(content),
        }));
        let map = &mut self.maps[instance as usize];
        self.index.apply_stored(instance, &self.blocks, None, map).expect("a chain from its start");
    }
    fn evict(&mut self, instance: u32, chain: &Chain, from: usize) {
        self.hashes.clear();
        self.hashes.extend(chain.keys.iter().skip(from).rev().map(|&key| SequenceHash(key)));
        self.index.apply_removed(instance, &self.hashes, &mut self.maps[instance as usize]);
    }
    fn lookup(&mut self, chain: &Chain) -> usize {
        let mut longest = 0;
        self.index.score_into(
            &chain.contents,
            |&content| content,
            false,
            |_, blocks| longest = longest.max(blocks),
        );
        longest as usize
    }
}

/// `dynamo-kv-router`: its single-threaded tree.
#[derive(Default)]
struct Dynamo {
    tree: RadixTree,
    events: u64,
}

impl Dynamo {
    fn event(&mut self, instance: u32, data: KvCacheEventData) {
        self.events += 1;
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        self.tree.apply_event(RouterEvent::new(u64::from(instance), event)).expect("a valid event");
    }
}

impl Subject for Dynamo {
    fn store(&mut self, instance: u32, chain: &Chain) {
        let block = |(&key, &content): (&u64, &u64)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(key),
            tokens_hash: LocalBlockHash(content),
            mm_extra_info: None,
        };
        let blocks = chain.keys.iter().zip(&chain.contents).map(block).collect();
        let data = KvCacheStoreData { parent_hash: None, start_position: None, blocks };
        self.event(instance, KvCacheEventData::Stored(data));
    }
    fn evict(&mut self, instance: u32, chain: &Chain, from: usize) {
        let block_hashes =
            chain.keys.iter().skip(from).rev().map(|&key| ExternalSequenceBlockHash(key)).collect();
        self.event(instance, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
    }
    fn lookup(&mut self, chain: &Chain) -> usize {
        let contents = chain.contents.iter().map(|&content| LocalBlockHash(content)).collect();
        let scores = self.tree.find_matches(contents, false).scores;
        scores.values().copied().max().unwrap_or(0) as usize
    }
}

const INSTANCES: u32 = 64;

fn run(subject: &str, blocks: usize, replication: u32, rate: f64) -> Figures {
    let settings = Settings { blocks, instances: INSTANCES, replication, rate, turns: 200_000 };
    match subject {
        "mixfleet" => load::measure(&mut Ours::default(), &settings),
        "kv-index" => load::measure(&mut KvIndex::new(INSTANCES), &settings),
        "dynamo" => load::measure(&mut Dynamo::default(), &settings),
        other => panic!("{other} is none of mixfleet, kv-index, dynamo"),
    }
}

/// The figures that are compared: (name, whether more is better).
const COLUMNS: [(&str, bool); 7] = [
    ("fill ops/s", true),
    ("bytes/pair filled", false),
    ("bytes/pair churned", false),
    ("closed ops/s", true),
    ("open ops/s", true),
    ("lookup p50 us", false),
    ("lookup p99 us", false),
];

fn columns(figures: &Figures) -> [f64; 7] {
    let &Figures { fill_ops_per_s, bytes_per_pair: [filled, churned], closed_ops_per_s, .. } = figures;
    let [p50, p99, ..] = figures.lookup_us;
    [fill_ops_per_s, filled, churned, closed_ops_per_s, figures.open_ops_per_s, p50, p99]
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize, default: &str| arguments.get(at).cloned().unwrap_or(default.into());
    let subject = std::env::var("INDEX_PEERS_SUBJECT").ok();
    let (blocks, replication, rate) = (argument(0, "10000000"), argument(1, "1"), argument(2, "1e6"));
    if let Some(subject) = subject {
        let number = |text: &str| text.parse::<f64>().expect("a number");
        let figures = run(&subject, number(&blocks) as usize, number(&replication) as u32, number(&rate));
        println!("{}", columns(&figures).map(|figure| figure.to_string()).join(" "));
        return;
    }
    let mut rows: Vec<(&str, Vec<f64>)> = Vec::new();
    for subject in ["mixfleet", "kv-index", "dynamo"] {
        eprintln!("{subject} ...");
        let program = std::env::current_exe().expect("this program's path");
        let output = Command::new(program)
            .args([&blocks, &replication, &rate])
            .env("INDEX_PEERS_SUBJECT", subject)
            .stderr(std::process::Stdio::inherit())
            .output()
            .expect("the program starts again");
        assert!(output.status.success(), "{subject} failed");
        let text = String::from_utf8(output.stdout).expect("figures");
        rows.push((
            subject,
            text.split_whitespace().map(|figure| figure.parse().expect("a figure")).collect(),
        ));
    }
    print!("{:20}", "");
    rows.iter().for_each(|(subject, _)| print!("{subject:>12}"));
    println!("{:>12}{:>12}   (times better)", "/ kv-index", "/ dynamo");
    for (at, (what, more_is_better)) in COLUMNS.into_iter().enumerate() {
        print!("{what:20}");
        rows.iter().for_each(|(_, figures)| print!("{:12.3e}", figures[at]));
        for (_, theirs) in &rows[1..] {
            let ratio = rows[0].1[at] / theirs[at];
            print!("{:12.2}", if more_is_better { ratio } else { 1.0 / ratio });
        }
        println!();
    }
}
