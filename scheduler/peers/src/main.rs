//! The prefix index and two others under the same load, each in its own process: rates, lookup times and
//! resident size, and the ratios of ours to theirs. In each round all take turns; the medians are printed.
//!
//! `cargo run --release --manifest-path scheduler/peers/Cargo.toml --
//! [blocks] [replication] [rate] [rounds] [turns]`

#![forbid(unsafe_code)]

#[allow(dead_code)]
#[path = "../../benches/load/mod.rs"]
mod load;

#[cfg(feature = "dynamo")]
use dynamo_kv_router::RadixTree;
#[cfg(feature = "dynamo")]
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
            seq_hash: SequenceHash(key.0),
            content_hash: ContentHash(content),
        }));
        let map = &mut self.maps[instance as usize];
        self.index.apply_stored(instance, &self.blocks, None, map).expect("a chain from its start");
    }
    fn evict(&mut self, instance: u32, chain: &Chain, from: usize) {
        self.hashes.clear();
        self.hashes.extend(chain.keys.iter().skip(from).rev().map(|&key| SequenceHash(key.0)));
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
#[cfg(feature = "dynamo")]
#[derive(Default)]
struct Dynamo {
    tree: RadixTree,
    events: u64,
}

#[cfg(feature = "dynamo")]
impl Dynamo {
    fn event(&mut self, instance: u32, data: KvCacheEventData) {
        self.events += 1;
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        self.tree.apply_event(RouterEvent::new(u64::from(instance), event)).expect("a valid event");
    }
}

#[cfg(feature = "dynamo")]
impl Subject for Dynamo {
    fn store(&mut self, instance: u32, chain: &Chain) {
        let block = |(&key, &content): (&mixfleet_scheduler::kv::BlockHash, &u64)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(key.0),
            tokens_hash: LocalBlockHash(content),
            mm_extra_info: None,
        };
        let blocks = chain.keys.iter().zip(&chain.contents).map(block).collect();
        let data = KvCacheStoreData { parent_hash: None, start_position: None, blocks };
        self.event(instance, KvCacheEventData::Stored(data));
    }
    fn evict(&mut self, instance: u32, chain: &Chain, from: usize) {
        let block_hashes =
            chain.keys.iter().skip(from).rev().map(|&key| ExternalSequenceBlockHash(key.0)).collect();
        self.event(instance, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
    }
    fn lookup(&mut self, chain: &Chain) -> usize {
        let contents = chain.contents.iter().map(|&content| LocalBlockHash(content)).collect();
        let scores = self.tree.find_matches(contents, false).scores;
        scores.values().copied().max().unwrap_or(0) as usize
    }
}

const INSTANCES: u32 = 64;
const SUBJECTS: &[&str] =
    if cfg!(feature = "dynamo") { &["mixfleet", "kv-index", "dynamo"] } else { &["mixfleet", "kv-index"] };

fn run(subject: &str, settings: &Settings) -> Figures {
    match subject {
        "mixfleet" => load::measure(&mut Ours::default(), settings),
        "kv-index" => load::measure(&mut KvIndex::new(INSTANCES), settings),
        #[cfg(feature = "dynamo")]
        "dynamo" => load::measure(&mut Dynamo::default(), settings),
        other => panic!("{other} is none of {SUBJECTS:?}"),
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

/// Measures one index in its own process.
fn measured(subject: &str, arguments: &[String]) -> Vec<f64> {
    eprintln!("{subject} ...");
    let program = std::env::current_exe().expect("this program's path");
    let output = Command::new(program)
        .args(arguments)
        .env("INDEX_PEERS_SUBJECT", subject)
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("the program starts again");
    assert!(output.status.success(), "{subject} failed");
    let text = String::from_utf8(output.stdout).expect("figures");
    eprint!("{text}");
    text.split_whitespace().map(|figure| figure.parse().expect("a figure")).collect()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: f64| {
        arguments.get(at).map_or(default, |text| text.parse().expect("an argument is a number"))
    };
    let (blocks, replication, rate) = (number(0, 1e7) as usize, number(1, 1.0) as u32, number(2, 1e6));
    let (rounds, turns) = (number(3, 1.0) as usize, number(4, 2e5) as u64);
    if let Ok(subject) = std::env::var("INDEX_PEERS_SUBJECT") {
        let figures = run(&subject, &Settings { blocks, instances: INSTANCES, replication, rate, turns });
        println!("{}", columns(&figures).map(|figure| figure.to_string()).join(" "));
        return;
    }
    let mut rows: Vec<Vec<Vec<f64>>> = vec![Vec::new(); SUBJECTS.len()];
    for _ in 0..rounds {
        for (row, subject) in rows.iter_mut().zip(SUBJECTS) {
            row.push(measured(subject, &arguments));
        }
    }
    let median = |row: &[Vec<f64>], at: usize| {
        let mut all: Vec<f64> = row.iter().map(|figures| figures[at]).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    print!("{:20}", "");
    SUBJECTS.iter().for_each(|subject| print!("{subject:>12}"));
    SUBJECTS[1..].iter().for_each(|subject| print!("{:>12}", format!("/ {subject}")));
    println!("   (times better)");
    for (at, (what, more_is_better)) in COLUMNS.into_iter().enumerate() {
        let figures: Vec<f64> = rows.iter().map(|row| median(row, at)).collect();
        print!("{what:20}");
        figures.iter().for_each(|figure| print!("{figure:12.3e}"));
        for theirs in &figures[1..] {
            let ratio = figures[0] / theirs;
            print!("{:12.2}", if more_is_better { ratio } else { 1.0 / ratio });
        }
        println!();
    }
}
