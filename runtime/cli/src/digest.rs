//! The digest of a model's weights: computed once, cached until a file changes, and computed beside serving.
//!
//! `serve` needs it only to know whose KV is on a disk. It computes the digest on a thread that gets the
//! cores' spare time, and uses the disk from then on. Members of a fleet cannot proceed without it, and use
//! all cores.

use crate::cache;
use anyhow::{Context, Result};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::memory::FileStamp;
use mixfleet_runtime::model::Checkpoint;
use serde::{Deserialize, Serialize};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

const SCHEMA: &str = "mixfleet.digest/1";

/// Resolution of file times: if a file changed less than this long ago, a later change may leave its stamp as
/// it is.
const STAMP_STEP: Duration = Duration::from_millis(100);

/// Interval between two checks of the files of a checkpoint in use.
const LOOK: Duration = Duration::from_secs(1);

/// Interval between two progress messages.
const SAID_EVERY: Duration = Duration::from_secs(5);

/// What a cached digest is valid for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DigestKey {
    /// The configuration, and all tensors' names, dtypes and shapes.
    shape: String,
    files: Vec<FileStamp>,
}

#[derive(Debug, Serialize, Deserialize)]
struct DigestDocument {
    schema: String,
    key: DigestKey,
    digest: String,
}

/// A digest that is known, or will be.
pub(crate) struct Digest {
    known: watch::Receiver<Option<String>>,
    /// Receives the digest when it is known.
    tell: watch::Sender<Option<String>>,
}

impl Digest {
    /// The digest that an earlier run cached, if the files have not changed since; otherwise one that is not
    /// being computed yet.
    pub(crate) fn kept(checkpoint: &Checkpoint) -> Self {
        Digest::from(key(checkpoint).and_then(|key| read(&key)))
    }

    /// The digest that an earlier run cached, or one that is computed now, on all cores. Blocks.
    ///
    /// # Errors
    /// If a file changes during the read.
    #[cfg(feature = "fleet")]
    pub(crate) fn now(checkpoint: &Checkpoint) -> Result<Self> {
        let digest = Digest::kept(checkpoint);
        if digest.known.borrow().is_some() {
            return Ok(digest);
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Digest::from(Some(compute(checkpoint, threads)?)))
    }

    fn from(digest: Option<String>) -> Self {
        let (tell, known) = watch::channel(digest);
        Digest { known, tell }
    }

    /// The digest, if it is known by now.
    pub(crate) fn known(&self) -> Option<String> {
        self.known.borrow().clone()
    }

    /// Completes when the digest is known; with none if it never will be.
    pub(crate) fn wait(&self) -> impl Future<Output = Option<String>> + Send + use<> {
        let mut known = self.known.clone();
        async move { known.wait_for(Option::is_some).await.ok()?.clone() }
    }

    /// Computes the digest in the background, unless it is known.
    pub(crate) fn begin(self, checkpoint: Checkpoint) {
        if self.known().is_some() {
            return;
        }
        let body = move || {
            mixfleet_cpu::host::yield_to_others();
            match compute(&checkpoint, 1) {
                Ok(digest) => drop(self.tell.send_replace(Some(digest))),
                Err(error) => {
                    tracing::error!(%error, "the weights have no digest: KV of earlier runs is not used")
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("digest".into()).spawn(body) {
            tracing::error!(%error, "no thread for the weights' digest: KV of earlier runs is not used");
        }
    }
}

impl Digest {
    /// Watches the checkpoint's files, so that a file that was only touched, or rewritten with the same
    /// bytes, remains usable: readers of a file stop once it was written to. If the digest is known, all
    /// bytes are hashed again after a write, and if they are the same the write is ignored.
    pub(crate) fn watch_over(&self, checkpoint: Checkpoint) {
        let known = self.known.clone();
        let body = move || {
            let mut hashed = None;
            loop {
                std::thread::sleep(LOOK);
                let Some(digest) = known.borrow().clone() else {
                    match known.has_changed() {
                        Ok(_) => continue,
                        Err(_) => return,
                    }
                };
                if checkpoint.check().is_ok() {
                    continue;
                }
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let settled = checkpoint.stamps().filter(|stamps| is_settled(stamps, since_epoch));
                let Some(stamps) = settled.filter(|stamps| hashed.as_ref() != Some(stamps)) else { continue };
                tracing::warn!("a file of the checkpoint was written to: all its bytes are hashed again");
                let is_same = checkpoint.digesting().is(&digest);
                if is_same {
                    checkpoint.accept(&stamps);
                }
                match is_same && checkpoint.check().is_ok() {
                    true => tracing::warn!("the weights are unchanged and stay in use"),
                    false => tracing::error!("the weights have changed: restart"),
                }
                hashed = Some(stamps);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("weights".into()).spawn(body) {
            tracing::warn!(%error, "no thread watches over the checkpoint: do not write to its files");
        }
    }
}

/// Computes the digest on `threads` threads, including this one, and caches it.
fn compute(checkpoint: &Checkpoint, threads: usize) -> Result<String> {
    let (start, since_epoch) =
        (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    let (bytes, before) = (checkpoint.size_bytes(), key(checkpoint));
    tracing::info!(bytes, threads, "computing the digest of the weights");
    let (hashed, said) = (AtomicU64::new(0), Mutex::new(start));
    let done = |piece| {
        let hashed = hashed.fetch_add(piece, Ordering::Relaxed) + piece;
        if let Ok(mut said) = said.try_lock()
            && said.elapsed() > SAID_EVERY
        {
            *said = Instant::now();
            tracing::info!(hashed, bytes, "computing the digest of the weights");
        }
    };
    let digesting = checkpoint.digesting();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread is available, the others do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || digesting.work(&done));
        }
        digesting.work(&done);
    });
    let digest = digesting.finish().context("the digest of the weights")?;
    tracing::info!(digest, bytes, seconds = start.elapsed().as_secs_f64(), "the weights' digest is known");
    let settled = before.filter(|before| is_settled(&before.files, since_epoch));
    if let Some(key) = settled.filter(|before| key(checkpoint).as_ref() == Some(before))
        && let Err(error) = write(key, &digest)
    {
        tracing::warn!(%error, "the weights' digest cannot be kept; the next start computes it again");
    }
    Ok(digest)
}

fn key(checkpoint: &Checkpoint) -> Option<DigestKey> {
    Some(DigestKey { shape: checkpoint.shape_digest(), files: checkpoint.stamps()? })
}

/// Whether every change from `now` on will show in the stamps.
fn is_settled(files: &[FileStamp], now: Duration) -> bool {
    let settled = |file: &FileStamp| {
        let (seconds, nanoseconds) = file.changed;
        let changed = Duration::new(to_u64(seconds.max(0)), to_u32(nanoseconds.clamp(0, 999_999_999)));
        changed + STAMP_STEP < now
    };
    files.iter().all(settled)
}

fn read(key: &DigestKey) -> Option<String> {
    let document: DigestDocument =
        serde_json::from_slice(&cache::read(&cache::file("digest", key)?)?).ok()?;
    (document.schema == SCHEMA && document.key == *key).then_some(document.digest)
}

fn write(key: DigestKey, digest: &str) -> Result<()> {
    let Some(file) = cache::file("digest", &key) else { return Ok(()) };
    let document = DigestDocument { schema: SCHEMA.into(), key, digest: digest.into() };
    cache::write(&file, &serde_json::to_vec_pretty(&document)?)
}
