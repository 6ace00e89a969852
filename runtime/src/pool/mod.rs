//! The lower tiers of a worker's KV cache: whole blocks as bytes in host memory and on a disk.
//!
//! A block is the KV of `block_tokens` tokens in all layers, in the wire layout, under its chained hash.
//! Prompts determine the hashes, so a block's token ids are stored and compared: a hash alone serves nothing.
//! A prompt opens a [`Lease`] on its chain of blocks: blocks on the disk are loaded to host memory, and
//! blocks in host memory are pinned until the lease is dropped. Blocks evicted from the device are
//! [kept](Pool::keep) in host memory, and those evicted there go to the disk, least recently used first. The
//! scheduler's own [`BlockCache`](mixfleet_scheduler::kv::BlockCache), one per tier, decides that, so that a
//! simulated pool and a real one make equal decisions.
//!
//! Calls block for as long as the disk takes, and may overlap: no lock is held while payloads are read,
//! written or copied. [`Lease::poll_next`] does not wait for reads. A journal record (32 bytes) is written
//! under the lock.

mod check;
mod directory;
pub mod disk;
mod dram;
mod events;
mod journal;
mod lane;
mod lease;
mod ssd;
mod traffic;

pub(crate) use check::{FrameRefusal, Layout};
pub use events::{PoolEvent, Snapshot};
pub use lease::{Lease, NextBlock};
pub use traffic::Kept;

use crate::env::SharedEnv;
use disk::Disk;
use dram::{Dram, Slab};
use events::Events;
use futures_util::future::BoxFuture;
use lane::{DiskAccess, DiskTask};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_scheduler::kv::{BlockHash, Tier};
use ssd::{Frames, Ssd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::Notify;

/// Default timeout of a read or write of the disk: a hundred times what an intact, busy disk takes.
pub const SSD_TIMEOUT: Duration = Duration::from_secs(1);

/// Configuration of a pool's disk.
#[derive(Clone)]
pub struct SsdConfig {
    /// A directory for this tier alone.
    pub disk: Arc<dyn Disk>,
    /// Maximum bytes of all its files together.
    pub bytes: u64,
    /// Whether an existing pool of another model, block size or format may be deleted. Files that are not a
    /// pool's are never deleted.
    pub wipe: bool,
    /// Timeout of a read or write after which a disk with its own thread ([`Pool::start_disk`]) is out until
    /// it answers. In one turn the wait is less than twice as long.
    pub timeout: Duration,
}

/// Configuration of a pool.
pub struct PoolConfig {
    /// Bytes of a block: all layers of `block_tokens` tokens in the wire layout.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Digest of everything that must be equal before blocks may be shared: the fleet's secret, weights,
    /// tokenizer, KV dtype.
    pub namespace: u64,
    /// Bytes of host memory, at least one block.
    pub dram_bytes: u64,
    /// The disk, if it is known yet; see [`Pool::attach`].
    pub ssd: Option<SsdConfig>,
}

/// Why a pool cannot be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Host memory was refused, or a call violated its contract.
    #[error(transparent)]
    Hal(#[from] mixfleet_hal::Error),
    /// A tier is too small for one block.
    #[error(
        "the pool's {tier} tier has {bytes} bytes and needs {needed} for one block: give it more, or leave it out"
    )]
    TooSmall {
        /// The tier's name.
        tier: &'static str,
        /// Bytes that it was given.
        bytes: u64,
        /// Bytes that one block needs.
        needed: u64,
    },
    /// Another process, or another pool of this one, uses the directory.
    #[error("the directory {} is in use by another pool: give each worker its own directory", .0.display())]
    InUse(PathBuf),
    /// Other users could read or change the files, or redirect their names.
    #[error("{} is not used for KV, which reveals prompts: {why}; restrict it to this user (chown, chmod 700), or name another directory (created if absent)", .path.display())]
    Exposed {
        /// The exposed path.
        path: PathBuf,
        /// Access of users to it.
        why: String,
    },
    /// The directory holds files that are not a pool's.
    #[error("the directory is not a KV pool's ({0}): name an empty or a new one")]
    Foreign(String),
    /// The directory holds blocks that this pool may not serve.
    #[error("the directory holds another KV pool: {0}; name another directory, or allow it to be wiped")]
    Mismatch(String),
    /// The pool already has a disk.
    #[error("the pool has a disk already")]
    Attached,
    /// The operating system refused an operation.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The attempted operation.
        doing: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// Counters of a pool since it was opened, and what it holds now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks in host memory now.
    pub dram_blocks: u64,
    /// Blocks on the disk now; some may be in host memory too.
    pub ssd_blocks: u64,
    /// Blocks that leases found in host memory.
    pub hits_dram: u64,
    /// Blocks that leases loaded from the disk.
    pub hits_ssd: u64,
    /// Blocks written to the disk.
    pub demoted: u64,
    /// Blocks that left host memory and could not be stored on the disk.
    pub lost: u64,
    /// Blocks found torn, corrupted or unreadable on the disk, and dropped.
    pub bad: u64,
    /// Blocks that another prompt had stored under the same hash, and that were not served.
    pub collisions: u64,
    /// Journal records that were damaged when the pool was opened.
    pub journal_damaged: u64,
    /// Why the disk stores no blocks at present, if so.
    pub ssd_paused: Option<String>,
    /// Why the disk is out at present, if it is: what it holds is unknown.
    pub ssd_out: Option<String>,
    /// How often the disk went out, or could not be opened.
    pub ssd_outages: u64,
}

/// The result of [`Pool::write_back`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Blocks that are in host memory and on the disk now.
    pub blocks: u64,
    /// Blocks in host memory that the disk has room for.
    pub of: u64,
}

struct State {
    dram: Dram,
    ssd: Option<Ssd>,
    /// Events that were not taken yet.
    events: Events,
    counts: PoolStats,
}

struct Shared {
    layout: Layout,
    slab: Slab,
    state: Mutex<State>,
    /// Notified when the disk is opened or goes out, and by [`Pool::announce`].
    changed: Notify,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked here, so that every user of the state sees that the disk is out.
        if state.give_up_disk() {
            self.changed.notify_one();
        }
        state
    }
}

/// A pool, without keeping it alive.
pub struct WeakPool(Weak<Shared>);

impl WeakPool {
    /// The pool, if it still exists.
    pub fn upgrade(&self) -> Option<Pool> {
        self.0.upgrade().map(Pool)
    }
}

/// Blocks in host memory and on a disk. Clones are the same pool.
#[derive(Clone)]
pub struct Pool(Arc<Shared>);

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "Pool({} blocks in DRAM, {} on SSD)", stats.dram_blocks, stats.ssd_blocks)
    }
}

/// Allocates this many bytes of memory that transports can reach.
pub type MakeRegion = dyn Fn(u64) -> mixfleet_hal::Result<Arc<dyn SharedMemory>> + Send + Sync;

impl Pool {
    /// Allocates host memory with `make_region`, and opens or creates the disk's files. No payload is read:
    /// every block is checked when it is used.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn new(config: PoolConfig, make_region: &MakeRegion) -> Result<Self, PoolError> {
        let PoolConfig { block_bytes, block_tokens, namespace, dram_bytes, ssd } = config;
        let block = usize::try_from(block_bytes).ok().filter(|&bytes| bytes > 0 && block_tokens > 0);
        let Some(block) = block else {
            let detail = format!("a KV block of {block_bytes} bytes and {block_tokens} tokens holds nothing");
            return Err(mixfleet_hal::Error::invalid(detail).into());
        };
        let layout = Layout { block_bytes: block, block_tokens: block_tokens as usize, namespace };
        let slots = dram::slots(&layout, dram_bytes);
        if slots == 0 {
            return Err(PoolError::TooSmall { tier: "dram", bytes: dram_bytes, needed: block_bytes });
        }
        let slab = Slab::new(slots, block_bytes, make_region)?;
        let mut state = State {
            dram: Dram::new(slots),
            ssd: None,
            events: Events::default(),
            counts: PoolStats::default(),
        };
        if let Some(ssd) = ssd {
            let (opened, damaged) = ssd::open(ssd, layout)?;
            state.counts.journal_damaged = damaged;
            state.ssd = Some(opened);
        }
        let (state, changed) = (Mutex::new(state), Notify::new());
        Ok(Pool(Arc::new(Shared { layout, slab, state, changed })))
    }

    /// Opens or creates the files of a disk for a pool without one, while the pool is in use. Blocks found
    /// there for `namespace` are reported as stored. Blocks of another namespace are refused or deleted, as
    /// `ssd` says.
    ///
    /// # Errors
    /// See [`PoolError`]. The pool continues with host memory alone.
    pub fn attach(&self, ssd: SsdConfig, namespace: u64) -> Result<(), PoolError> {
        self.attach_by(ssd, namespace, |_| ())
    }

    /// Checks that a disk can be attached, with any blocks. Changes nothing.
    ///
    /// # Errors
    /// See [`PoolError`].
    pub fn check(&self, ssd: &SsdConfig) -> Result<(), PoolError> {
        ssd::check(ssd, &self.0.layout)
    }

    /// Attaches a disk as [`attach`](Self::attach) does, and calls `begin` on its access before anything uses
    /// it.
    fn attach_by<T>(
        &self,
        ssd: SsdConfig,
        namespace: u64,
        begin: impl FnOnce(&DiskAccess) -> T,
    ) -> Result<T, PoolError> {
        if self.has_disk() {
            return Err(PoolError::Attached);
        }
        let (opened, damaged) = ssd::open(ssd, Layout { namespace, ..self.0.layout })?;
        let mut state = self.0.state();
        if state.ssd.is_some() {
            return Err(PoolError::Attached);
        }
        let begun = begin(&opened.frames.access);
        opened.hashes().into_iter().for_each(|hash| state.events.add(hash, Tier::Ssd, true));
        state.counts.journal_damaged += damaged;
        state.counts.ssd_out = None;
        state.ssd = Some(opened);
        drop(state);
        self.0.changed.notify_one();
        Ok(begun)
    }

    /// Starts a thread for the disk, which is opened already or is to be opened by [`attach`](Self::attach)
    /// once `namespace` is known (never if that is none). From then on a disk that does not answer in time is
    /// out: its blocks are reported as evicted, and nothing waits for it. When it answers, it is opened again
    /// after a pause.
    ///
    /// # Errors
    /// When the operating system refuses a thread.
    pub fn start_disk(
        &self,
        ssd: SsdConfig,
        namespace: BoxFuture<'static, Option<u64>>,
        name: &str,
        env: &SharedEnv,
    ) -> std::io::Result<()> {
        let attendant = DiskTask { pool: self.downgrade(), ssd, env: env.clone(), name: name.into() };
        env.spawn_worker(name, Box::pin(attendant.start_disk(namespace)))
    }

    /// Begins a turn of the pool's user, with new time for the disk.
    pub fn begin_turn(&self) {
        if let Some(ssd) = &self.0.state().ssd {
            ssd.frames.access.begin_turn();
        }
    }

    fn frames(&self) -> Option<Arc<Frames>> {
        self.0.state().ssd.as_ref().map(|ssd| ssd.frames.clone())
    }

    fn note_out(&self, why: &str) {
        let mut state = self.0.state();
        state.counts.ssd_out = Some(why.into());
        state.counts.ssd_outages += 1;
        drop(state);
        self.0.changed.notify_one();
    }

    /// Completes when a disk was opened or went out, or others [announced](Self::announce) something, since
    /// this last completed: there are events, and [`has_disk`](Self::has_disk) may have changed.
    pub async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// Wakes the receiver of the events, for another user of the pool that has left some.
    pub fn announce(&self) {
        self.0.changed.notify_one();
    }

    /// Bytes and tokens of a block.
    pub fn block_size(&self) -> (usize, usize) {
        (self.0.layout.block_bytes, self.0.layout.block_tokens)
    }

    /// Blocks that fit into host memory.
    pub fn dram_slots(&self) -> usize {
        self.0.state().dram.cache.capacity()
    }

    /// A reference to the pool that does not keep it alive.
    pub fn downgrade(&self) -> WeakPool {
        WeakPool(Arc::downgrade(&self.0))
    }

    /// Uses the blocks of a prompt: `chain` has the hashes of its blocks, `tokens` its token ids from the
    /// first on. The leading blocks that are held are loaded to host memory and pinned, up to the first that
    /// is not held, is bad, is another prompt's, or finds no room.
    pub fn lease(&self, chain: &[BlockHash], tokens: &[u32]) -> Lease {
        let mut lease = self.begin_lease(chain, tokens);
        while lease.bring_next() {}
        lease
    }

    /// The same, but only blocks in host memory are pinned: [`Lease::bring_next`] and [`Lease::poll_next`]
    /// lease them one by one.
    pub fn begin_lease(&self, chain: &[BlockHash], tokens: &[u32]) -> Lease {
        Lease::begin(self.0.clone(), chain, tokens)
    }

    /// Stores a block that is evicted from a device, which counts as one use of it. `fill` is called to put
    /// its KV into a slot only if host memory lacks the block and has room; a copy on the disk is neither
    /// read nor written.
    ///
    /// # Errors
    /// Those of `fill`, after which the block is not held; `Invalid` if `tokens` is not one block.
    pub fn keep(
        &self,
        hash: BlockHash,
        tokens: &[u32],
        fill: &mut dyn FnMut(&mut [u8]) -> mixfleet_hal::Result<()>,
    ) -> mixfleet_hal::Result<Kept> {
        if tokens.len() != self.0.layout.block_tokens {
            let (is, wanted) = (tokens.len(), self.0.layout.block_tokens);
            return Err(mixfleet_hal::Error::invalid(format!(
                "a KV block of {is} tokens in a pool of {wanted}"
            )));
        }
        self.0.keep(traffic::Wanted { hash, tokens }, fill)
    }

    /// Whether there is a disk now.
    pub fn has_disk(&self) -> bool {
        self.0.state().ssd.is_some()
    }

    /// The events since the last call, in order. They accumulate until then, so a caller takes them after
    /// each use of the pool.
    pub fn take_events(&self) -> Vec<PoolEvent> {
        self.0.state().events.take()
    }

    /// What both tiers hold now.
    pub fn snapshot(&self) -> Snapshot {
        self.0.state().snapshot()
    }

    /// What both tiers hold now, for a caller that then follows the events after it.
    pub fn begin_to_follow(&self) -> Snapshot {
        let mut state = self.0.state();
        state.events.take();
        state.snapshot()
    }

    /// The pool's counters.
    pub fn stats(&self) -> PoolStats {
        let state = self.0.state();
        let mut stats = state.counts.clone();
        stats.dram_blocks = state.dram.cache.len() as u64;
        if let Some(ssd) = &state.ssd {
            stats.ssd_blocks = ssd.cache.len() as u64;
            stats.ssd_paused = ssd.paused().map(str::to_string);
        }
        stats
    }

    /// Copies the blocks of host memory to the disk before the process ends, in place of blocks that are on
    /// the disk alone, for as long as `go_on`, which is called before each block, returns true. The block
    /// that host memory would evict last is copied first, and will be the last that the disk evicts. Pinned
    /// blocks are skipped.
    pub fn write_back(&self, go_on: &mut dyn FnMut() -> bool) -> WrittenBack {
        self.0.write_back(go_on)
    }

    /// Waits until the blocks on the disk would survive a power failure, and saves their eviction order.
    /// Other users of the disk wait.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn sync(&self) -> Result<(), PoolError> {
        let synced = self.0.state().ssd.as_mut().map_or(Ok(()), Ssd::sync);
        synced.map_err(|source| PoolError::Io { doing: "sync the pool's files".into(), source })
    }

    /// The host memory of all blocks.
    pub fn regions(&self) -> &[Arc<dyn SharedMemory>] {
        self.0.slab.regions()
    }
}

impl State {
    /// Drops a disk that does not answer. True if there was one.
    fn give_up_disk(&mut self) -> bool {
        let Some(why) = self.ssd.as_ref().and_then(|ssd| ssd.frames.access.out()) else { return false };
        let Some(ssd) = self.ssd.take() else { return false };
        let blocks = ssd.hashes();
        tracing::warn!(why, blocks = blocks.len(), "the KV pool's disk is out; its blocks are recomputed");
        blocks.into_iter().for_each(|hash| self.events.add(hash, Tier::Ssd, false));
        self.counts.ssd_out = Some(why);
        self.counts.ssd_outages += 1;
        true
    }

    fn snapshot(&self) -> Snapshot {
        let ssd = self.ssd.as_ref().map(Ssd::hashes).unwrap_or_default();
        Snapshot { dram: self.dram.hashes(), ssd }
    }

    fn tier(&self, hash: BlockHash) -> Option<Tier> {
        if self.dram.get(hash).is_some() {
            return Some(Tier::Dram);
        }
        self.ssd.as_ref()?.place(hash).map(|_| Tier::Ssd)
    }
}
