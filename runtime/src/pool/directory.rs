//! The file that says which pools may use a directory.

use super::check::{Layout, VERSION};
use super::disk::Disk;
use super::{PoolError, journal, ssd};
use mixfleet_hal::cast::{to_u32, to_usize};
use std::io;
use twox_hash::XxHash3_64;

const FILE: &str = "meta";
const NEW_FILE: &str = "meta.new";
const MAGIC: &[u8; 16] = b"mixfleet-kv-pool";
const OURS: [&str; 5] = [FILE, NEW_FILE, journal::FILE, journal::NEW_FILE, ssd::FILE];

/// Bytes of the file: magic (16), version (4), tokens per block (4), bytes per block (8), namespace (8),
/// XXH3-64 of those (8).
pub(super) const META_BYTES: u64 = 48;

fn encode(layout: &Layout) -> Vec<u8> {
    let mut meta = MAGIC.to_vec();
    meta.extend_from_slice(&VERSION.to_le_bytes());
    meta.extend_from_slice(&to_u32(layout.block_tokens).to_le_bytes());
    meta.extend_from_slice(&(layout.block_bytes as u64).to_le_bytes());
    meta.extend_from_slice(&layout.namespace.to_le_bytes());
    let digest = XxHash3_64::oneshot(&meta);
    meta.extend_from_slice(&digest.to_le_bytes());
    meta
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Why a pool of `layout` may not use a directory with this file, if so.
fn difference(meta: &[u8], layout: &Layout) -> Option<String> {
    let ours = encode(layout);
    if meta == ours {
        return None;
    }
    if meta.len() < 20 || number(&meta[16..20]) != u64::from(VERSION) {
        let version = meta.get(16..20).map_or("unknown".into(), |bytes| number(bytes).to_string());
        return Some(format!("its format has version {version}, this program reads {VERSION}"));
    }
    if meta.len() != ours.len() || meta[40..] != XxHash3_64::oneshot(&meta[..40]).to_le_bytes() {
        return Some(format!("its file `{FILE}` is damaged"));
    }
    let mut found = Vec::new();
    for (name, range) in [("tokens a block", 20..24), ("bytes a block", 24..32)] {
        let (theirs, ours) = (number(&meta[range.clone()]), number(&ours[range]));
        if theirs != ours {
            found.push(format!("it has {theirs} {name}, this pool {ours}"));
        }
    }
    if meta[32..40] != ours[32..40] {
        found.push("it belongs to another model, tokenizer, KV dtype or fleet".into());
    }
    Some(found.join("; "))
}

/// Whether this is the file of a pool. Its digest identifies one whose first bytes are damaged.
fn is_ours(meta: &[u8]) -> bool {
    let digest = |rest: &[u8]| XxHash3_64::oneshot(&[MAGIC, &rest[..24]].concat()).to_le_bytes();
    meta.starts_with(MAGIC)
        || meta.get(MAGIC.len()..).is_some_and(|rest| rest.len() == 32 && rest[24..] == digest(rest))
}

fn failed(doing: &str) -> impl FnOnce(io::Error) -> PoolError {
    let doing = doing.to_string();
    move |source| PoolError::Io { doing, source }
}

/// Reads the file of a directory; none if the directory is empty. A directory that is not a pool's is
/// refused.
pub(super) fn read_identity(disk: &dyn Disk) -> Result<Option<Vec<u8>>, PoolError> {
    let names = disk.names().map_err(failed("list the pool's directory"))?;
    if let Some(other) = names.iter().find(|name| !OURS.contains(&name.as_str())) {
        return Err(PoolError::Foreign(format!("`{other}` is not a pool's file")));
    }
    if names.iter().any(|name| name == FILE) {
        let mut meta = vec![0; to_usize(META_BYTES) + 1];
        let read = disk.read_at(FILE, 0, &mut meta).map_err(failed("read whose pool it is"))?;
        meta.truncate(read);
        if !is_ours(&meta) {
            return Err(PoolError::Foreign(format!("its file `{FILE}` is not a pool's")));
        }
        return Ok(Some(meta));
    }
    match names.iter().find(|name| *name != NEW_FILE) {
        // The first start, or a wipe, may have ended early; then nothing else is left.
        Some(other) => Err(PoolError::Foreign(format!("it has `{other}` without `{FILE}`"))),
        None => Ok(None),
    }
}

/// Ensures that the directory belongs to pools of this layout.
pub(super) fn prepare(disk: &dyn Disk, layout: &Layout, wipe: bool) -> Result<(), PoolError> {
    if let Some(meta) = read_identity(disk)? {
        match difference(&meta, layout) {
            None => return Ok(()),
            Some(difference) if !wipe => return Err(PoolError::Mismatch(difference)),
            Some(difference) => tracing::warn!("the KV pool's directory is wiped: {difference}"),
        }
    }
    // The file that identifies the pool is removed last, also if power is lost, so that a directory that is
    // wiped halfway is still recognised.
    let wipe = || {
        for name in [journal::NEW_FILE, journal::FILE, ssd::FILE] {
            disk.remove(name)?;
        }
        disk.sync_names()?;
        disk.remove(FILE)
    };
    wipe().map_err(failed("wipe the pool's directory"))?;
    let create = || {
        disk.write_at(NEW_FILE, 0, &encode(layout))?;
        disk.sync(NEW_FILE)?;
        disk.rename(NEW_FILE, FILE)?;
        disk.sync_names()
    };
    create().map_err(failed("write to the pool's directory"))
}
