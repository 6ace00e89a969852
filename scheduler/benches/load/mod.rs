//! A workload for prefix indexes, and the measurements of an index under it. Shared with `peers/`.
//!
//! Conversations have as many blocks as the requests of Mooncake's conversation trace (mean 24, at most 250),
//! of which the first two are one of 16 system prompts. Each is held by `replication` instances. In the
//! steady state a turn looks up a conversation that is held, stores a new one at its holders, and evicts one
//! from its holders, the deepest block first. Both are drawn at random, which is harder for an index than
//! evicting the oldest, since freed blocks are scattered.

use mixfleet_hal::random::{Stream, bits};
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::kv::{BlockHash, PrefixIndex, Prefixes, Tier};
use std::time::{Duration, Instant};
use twox_hash::XxHash3_64;

/// A prompt's blocks: hashes of their content, and hashes of each block with all before it.
#[derive(Default)]
pub(crate) struct Chain {
    pub(crate) contents: Vec<u64>,
    pub(crate) keys: Vec<BlockHash>,
}

/// An index under test.
pub(crate) trait Subject {
    fn store(&mut self, instance: u32, chain: &Chain);
    /// Evicts the blocks starting at index `from`, the deepest first.
    fn evict(&mut self, instance: u32, chain: &Chain, from: usize);
    /// Finds all holders; returns the length of the longest prefix in blocks.
    fn lookup(&mut self, chain: &Chain) -> usize;
}

/// This project's index.
#[derive(Default)]
pub(crate) struct Ours {
    index: PrefixIndex,
    answer: Prefixes,
    hashes: Vec<BlockHash>,
}

impl Subject for Ours {
    fn store(&mut self, instance: u32, chain: &Chain) {
        self.index.store(InstanceId(instance), Tier::Device, &chain.keys);
    }

    fn evict(&mut self, instance: u32, chain: &Chain, from: usize) {
        self.hashes.clear();
        self.hashes.extend(chain.keys.iter().skip(from).rev());
        self.index.evict(InstanceId(instance), Tier::Device, &self.hashes);
    }

    fn lookup(&mut self, chain: &Chain) -> usize {
        self.index.lookup(&chain.keys, &mut self.answer);
        self.answer.as_slice().iter().map(|prefix| prefix.total() as usize).max().unwrap_or(0)
    }
}

pub(crate) struct Settings {
    pub(crate) blocks: usize,
    pub(crate) instances: u32,
    pub(crate) replication: u32,
    /// Block operations per second offered in the open loop.
    pub(crate) rate: f64,
    pub(crate) turns: u64,
}

#[derive(Debug)]
pub(crate) struct Figures {
    /// Operations per second of CPU time; so is `closed_ops_per_s`.
    pub(crate) fill_ops_per_s: f64,
    /// Growth of the resident size per pair of block and holder: after filling, and at the end.
    pub(crate) bytes_per_pair: [f64; 2],
    pub(crate) closed_ops_per_s: f64,
    /// Operations per second of wall time: the offered rate, if the index keeps up and the machine is
    /// otherwise idle.
    pub(crate) open_ops_per_s: f64,
    /// p50, p99, p99.9 and maximum of the lookups of the open loop without waiting, in microseconds.
    pub(crate) lookup_us: [f64; 4],
    /// The same quantiles from the time at which a lookup was due.
    pub(crate) lookup_late_us: [f64; 4],
}

/// Blocks shared by all conversations with the same system prompt.
const SYSTEM_BLOCKS: usize = 2;

/// (share of requests, blocks) in Mooncake's conversation trace (12,031 requests, blocks of 512 tokens).
const LENGTHS: &[(f64, f64)] = &[
    (0.0, 2.0),
    (0.1, 2.0),
    (0.25, 5.0),
    (0.5, 14.0),
    (0.75, 31.0),
    (0.9, 54.0),
    (0.95, 78.0),
    (0.99, 167.0),
    (1.0, 247.0),
];

pub(crate) fn chain(conversation: u64, chain: &mut Chain) {
    chain.contents.clear();
    chain.keys.clear();
    let at = bits(1, conversation) as f64 / u64::MAX as f64;
    let above = LENGTHS.iter().position(|&(share, _)| share > at).unwrap_or(LENGTHS.len() - 1);
    let ((share, length), (share_above, length_above)) = (LENGTHS[above - 1], LENGTHS[above]);
    let length = length + (length_above - length) * (at - share) / (share_above - share);
    let mut before = None;
    for block in 0..length.round() as usize {
        let whose = if block < SYSTEM_BLOCKS { conversation % 16 } else { conversation + 16 };
        let content = bits(whose, block as u64);
        let key = before.map_or(content, |before: u64| {
            let mut pair = [0; 16];
            pair[..8].copy_from_slice(&before.to_le_bytes());
            pair[8..].copy_from_slice(&content.to_le_bytes());
            XxHash3_64::oneshot_with_seed(1337, &pair)
        });
        chain.contents.push(content);
        chain.keys.push(BlockHash(key));
        before = Some(key);
    }
}

pub(crate) fn holders(conversation: u64, settings: &Settings) -> impl Iterator<Item = u32> + use<> {
    let (first, instances) = (bits(2, conversation) % u64::from(settings.instances), settings.instances);
    (0..settings.replication).map(move |copy| (first as u32 + copy * (instances / 4 + 1)) % instances)
}

/// CPU time of this thread in seconds, which other load does not affect; elapsed time if there is no /proc.
fn seconds(start: Instant) -> f64 {
    let running = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = running.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    nanoseconds.map_or(start.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

/// Resident bytes of this process; none if there is no /proc.
pub(crate) fn resident_bytes() -> Option<f64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split_whitespace().nth(1)?.parse::<f64>().ok()? * 4096.0)
}

struct Run<'a, S> {
    subject: &'a mut S,
    settings: &'a Settings,
    chain: Chain,
    random: Stream,
    /// Conversations that are held. The measurement's own memory is touched before anything is measured.
    live: Vec<u32>,
    next: u32,
    pairs: i64,
    ops: u64,
    /// Lookups of the open loop in nanoseconds: without waiting, and from the time at which they were due.
    alone: Vec<u32>,
    late: Vec<u32>,
}

/// Measures `subject`, which is empty at first.
pub(crate) fn measure(subject: &mut impl Subject, settings: &Settings) -> Figures {
    let random = Stream::new(3);
    let mut live = vec![1; settings.blocks / 16 + 16];
    live.clear();
    let times = || vec![1; settings.turns as usize];
    let mut run = Run {
        subject,
        settings,
        chain: Chain::default(),
        random,
        live,
        next: 0,
        pairs: 0,
        ops: 0,
        alone: times(),
        late: times(),
    };
    let before = resident_bytes();
    let bytes_per_pair = |run: &Run<_>| match (before, resident_bytes()) {
        (Some(before), Some(now)) => (now - before) / run.pairs as f64,
        _ => f64::NAN,
    };
    let start = Instant::now();
    let begun = seconds(start);
    while run.pairs < (settings.blocks * settings.replication as usize) as i64 {
        run.store();
    }
    let fill_ops_per_s = run.ops as f64 / (seconds(start) - begun);
    let filled = bytes_per_pair(&run);

    let (begun, ops) = (seconds(start), run.ops);
    for _ in 0..settings.turns {
        run.prepare_lookup();
        run.lookup();
        run.store();
        run.evict();
    }
    let closed_ops_per_s = (run.ops - ops) as f64 / (seconds(start) - begun);
    let open_ops_per_s = run.open_loop();
    let churned = bytes_per_pair(&run);
    Figures {
        fill_ops_per_s,
        bytes_per_pair: [filled, churned],
        closed_ops_per_s,
        open_ops_per_s,
        lookup_us: quantiles(&mut run.alone),
        lookup_late_us: quantiles(&mut run.late),
    }
}

fn quantiles(times: &mut [u32]) -> [f64; 4] {
    times.sort_unstable();
    [0.5, 0.99, 0.999, 1.0].map(|share| {
        let at = ((times.len() as f64 * share) as usize).min(times.len() - 1);
        f64::from(times[at]) / 1e3
    })
}

impl<S: Subject> Run<'_, S> {
    /// Runs operations due at a steady pace, whether or not earlier ones are done.
    fn open_loop(&mut self) -> f64 {
        let nanoseconds = |time: Duration| time.as_nanos().min(u128::from(u32::MAX)) as u32;
        let (start, first) = (Instant::now(), self.ops);
        for turn in 0..self.settings.turns as usize {
            for step in 0..3 {
                let due = start + Duration::from_secs_f64((self.ops - first) as f64 / self.settings.rate);
                if step == 0 {
                    self.prepare_lookup();
                }
                while Instant::now() < due {
                    std::hint::spin_loop();
                }
                match step {
                    0 => {
                        let begun = Instant::now();
                        self.lookup();
                        let done = Instant::now();
                        self.alone[turn] = nanoseconds(done - begun);
                        self.late[turn] = nanoseconds(done - due);
                    }
                    1 => self.store(),
                    _ => self.evict(),
                }
            }
        }
        (self.ops - first) as f64 / start.elapsed().as_secs_f64()
    }

    fn draw(&mut self) -> usize {
        self.random.below(self.live.len() as u64) as usize
    }

    fn prepare_lookup(&mut self) {
        let which = self.draw();
        chain(self.live[which].into(), &mut self.chain);
    }

    fn lookup(&mut self) {
        let blocks = self.subject.lookup(&self.chain);
        assert_eq!(blocks, self.chain.keys.len(), "every holder has the whole conversation");
        self.ops += blocks as u64;
    }

    fn store(&mut self) {
        let conversation = u64::from(self.next);
        chain(conversation, &mut self.chain);
        for instance in holders(conversation, self.settings) {
            self.subject.store(instance, &self.chain);
            self.ops += self.chain.keys.len() as u64;
            self.pairs += self.chain.keys.len().saturating_sub(SYSTEM_BLOCKS) as i64;
        }
        self.live.push(self.next);
        self.next += 1;
    }

    fn evict(&mut self) {
        let which = self.draw();
        let conversation = u64::from(self.live.swap_remove(which));
        chain(conversation, &mut self.chain);
        for instance in holders(conversation, self.settings) {
            self.subject.evict(instance, &self.chain, SYSTEM_BLOCKS);
            let blocks = self.chain.keys.len().saturating_sub(SYSTEM_BLOCKS);
            self.ops += blocks as u64;
            self.pairs -= blocks as i64;
        }
    }
}
