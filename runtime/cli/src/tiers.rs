//! Opens the tiers below the devices as the flags say.

use crate::args::TierArgs;
use anyhow::{Context, Result};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::GIB;
use mixfleet_runtime::engine::{Loaded, LowerTiers};
use mixfleet_runtime::env::SharedEnv;
use mixfleet_runtime::pool::{Pool, SSD_TIMEOUT, SsdConfig, WrittenBack};
use mixfleet_scheduler::cost::CostModel;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
#[cfg(unix)]
use {
    mixfleet_hal::random,
    mixfleet_runtime::pool::disk::{Disk, Opening, PrivateDirectory},
    std::io::{ErrorKind, Read, Write},
};

/// Time for writing the blocks that only host memory holds to the disk when the process ends.
const WRITE_BACK: Duration = Duration::from_secs(10);
/// Time until the disk must have made them durable, so that a hanging disk does not delay the exit.
/// (Kubernetes waits 30 s for everything.)
const SAFE: Duration = Duration::from_secs(20);

/// Time after which a directory that has not opened is given up, so that a hanging mount does not delay the
/// start.
const OPENED: Duration = Duration::from_secs(10);

/// The file with the key of the block hashes in a directory. Only its owner may read it: with the key one can
/// construct colliding prompts.
#[cfg(unix)]
const SECRET: &str = "secret";

/// The pools of this process's instances, by device.
#[derive(Clone, Default)]
pub(crate) struct InstancePools(Vec<(String, Pool)>);

impl InstancePools {
    pub(crate) fn of(instances: &[(Loaded, CostModel)]) -> Self {
        let own = |(loaded, _): &(Loaded, CostModel)| Some((loaded.id(), loaded.pool()?.clone()));
        InstancePools(instances.iter().filter_map(own).collect())
    }

    /// Writes the blocks of host memory to the disks, for a bounded time, once nothing uses the pools.
    pub(crate) async fn write_back(self) {
        let disks: Vec<_> = self.0.into_iter().filter(|(_, pool)| pool.has_disk()).collect();
        if disks.is_empty() {
            return;
        }
        let (done, written) = oneshot::channel::<()>();
        let until = Instant::now() + WRITE_BACK;
        let left = Arc::new(done);
        for (device, pool) in disks {
            let left = left.clone();
            // On a separate thread, which the exit of the process does not wait for.
            let write_back = move || {
                write_back(&device, &pool, until);
                drop(left);
            };
            if let Err(error) = Builder::new().name("write back".into()).spawn(write_back) {
                tracing::warn!(%error, "host memory's KV is not on the disk: no thread for it");
            }
        }
        drop(left);
        if tokio::time::timeout(SAFE, written).await.is_err() {
            tracing::warn!("a disk below a device takes too long; what it did not get is lost");
        }
    }
}

fn write_back(device: &str, pool: &Pool, until: Instant) {
    let WrittenBack { blocks, of } = pool.write_back(&mut || Instant::now() < until);
    match pool.sync() {
        Ok(()) => tracing::info!(device, blocks, of, "host memory's KV is on the disk"),
        Err(error) => tracing::warn!(device, %error, "host memory's KV may not be on the disk"),
    }
}

fn bytes(gib: f64) -> u64 {
    to_u64(gib * GIB as f64)
}

/// Runs `work` on a directory; returns none, with a warning, if that takes longer than `limit`. Its thread
/// then keeps hanging, and nothing waits for it.
fn in_time<T: Send + 'static>(
    directory: &Path,
    limit: Duration,
    work: impl FnOnce(&Path) -> Result<T> + Send + 'static,
) -> Result<Option<T>> {
    let (tell, told) = mpsc::channel();
    let own = directory.to_path_buf();
    let body = move || drop(tell.send(work(&own)));
    Builder::new().name("opening".into()).spawn(body).context("--kv-ssd: no thread to open it")?;
    match told.recv_timeout(limit) {
        Ok(result) => result.map(Some),
        Err(_) => {
            let (directory, seconds) = (directory.display(), limit.as_secs_f64());
            tracing::error!(
                "--kv-ssd: {directory} does not answer within {seconds} s; it is left out until the next start"
            );
            Ok(None)
        }
    }
}

/// The digest that must match before blocks of earlier processes may be used, once it is known.
pub(crate) type NamespaceFuture = std::pin::Pin<Box<dyn Future<Output = Option<u64>> + Send>>;

/// The tiers below the device `selector`, if configured; their blocks belong to `namespace`.
pub(crate) fn of(args: &TierArgs, selector: &str, namespace: NamespaceFuture) -> Result<Option<LowerTiers>> {
    let Some(dram) = args.kv_dram else { return Ok(None) };
    let ssd = match args.kv_ssd.as_deref().zip(args.kv_ssd_gib) {
        Some((directory, gib)) => {
            let (selector, bytes) = (selector.to_string(), bytes(gib));
            in_time(directory, OPENED, move |directory| disk(directory, &selector, bytes))?
        }
        None => None,
    };
    Ok(Some(LowerTiers { dram_bytes: bytes(dram), ssd, namespace }))
}

#[cfg(unix)]
fn disk(directory: &Path, selector: &str, bytes: u64) -> Result<SsdConfig> {
    // A device's name may contain characters that a file name must not.
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let own = private(directory)?.path().join(selector.chars().map(plain).collect::<String>());
    let disk = mixfleet_runtime::pool::disk::RealDisk::open(&own).context("--kv-ssd")?;
    // Returns after one of each disk operation that the start needs later has succeeded.
    disk.names().context("--kv-ssd")?;
    // This is a cache: blocks of another model are useless here.
    Ok(SsdConfig { disk: Arc::new(disk), bytes, wipe: true, timeout: SSD_TIMEOUT })
}

#[cfg(not(unix))]
fn disk(_: &Path, _: &str, _: u64) -> Result<SsdConfig> {
    anyhow::bail!("{UNIX_ONLY}")
}

#[cfg(not(unix))]
const UNIX_ONLY: &str = "--kv-ssd: a disk below the device works on Unix only; leave it out";

/// Opens the directory that the operator names, following a link there, since it is the operator's.
#[cfg(unix)]
fn private(directory: &Path) -> Result<PrivateDirectory> {
    let resolved = match directory.canonicalize() {
        Ok(resolved) => resolved,
        // It will be created.
        Err(error) if error.kind() == ErrorKind::NotFound => directory.to_path_buf(),
        Err(error) => {
            return Err(error)
                .with_context(|| format!("--kv-ssd: {} cannot be looked at", directory.display()));
        }
    };
    PrivateDirectory::open(&resolved).context("--kv-ssd")
}

/// The secret of the directory, which makes blocks valid from run to run; created if there is none. None
/// without a directory; one that does not answer is left out of `args`.
///
/// # Errors
/// When it cannot be read or created.
#[cfg(unix)]
pub(crate) fn secret(args: &mut TierArgs, env: &SharedEnv) -> Result<Option<[u8; 16]>> {
    let Some(directory) = args.kv_ssd.clone() else { return Ok(None) };
    let env = env.clone();
    let secret = in_time(&directory, OPENED, move |directory| secret_of(directory, &env))?;
    if secret.is_none() {
        (args.kv_ssd, args.kv_ssd_gib) = (None, None);
    }
    Ok(secret)
}

#[cfg(unix)]
fn secret_of(directory: &Path, env: &SharedEnv) -> Result<[u8; 16]> {
    let directory = private(directory)?;
    let shown = directory.path().join(SECRET);
    let shown = shown.display();
    match directory.file(SECRET, Opening::Existing) {
        Ok(file) => {
            let mut bytes = Vec::new();
            // No more than a valid secret has, and one byte to detect longer files.
            file.take(17)
                .read_to_end(&mut bytes)
                .with_context(|| format!("--kv-ssd: cannot read {shown}"))?;
            let secret =
                bytes.try_into().ok().with_context(|| format!("--kv-ssd: {shown} is damaged; remove it"))?;
            Ok(secret)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let bits = [env.random(), env.random()];
            let halves = [random::bits(bits[0], 0), random::bits(bits[1], 1)];
            let secret: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
            let create = || {
                let mut file = directory.file(SECRET, Opening::New)?;
                file.write_all(&secret)?;
                file.sync_all()?;
                directory.sync_names()
            };
            create().with_context(|| format!("--kv-ssd: cannot write {shown}"))?;
            Ok(secret.try_into().expect("two halves of eight bytes"))
        }
        Err(error) => Err(error).with_context(|| format!("--kv-ssd: cannot read {shown}")),
    }
}

/// This build has no directory to keep a secret in.
#[cfg(not(unix))]
pub(crate) fn secret(args: &mut TierArgs, _: &SharedEnv) -> Result<Option<[u8; 16]>> {
    anyhow::ensure!(args.kv_ssd.is_none(), "{UNIX_ONLY}");
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_does_not_answer_is_left_out_and_holds_up_no_start() {
        let (hangs, until) = mpsc::channel::<()>();
        let hung = in_time(Path::new("/mnt"), Duration::from_millis(20), move |_| {
            until.recv().ok();
            Ok(())
        });
        assert_eq!(hung.ok(), Some(None));
        drop(hangs);
        let answers = in_time(Path::new("/mnt"), OPENED, |directory| Ok(directory.to_path_buf()));
        assert_eq!(answers.ok().flatten().as_deref(), Some(Path::new("/mnt")));
        assert!(
            in_time(Path::new("/mnt"), OPENED, |_| -> Result<()> { anyhow::bail!("it is not") }).is_err()
        );
    }
}
