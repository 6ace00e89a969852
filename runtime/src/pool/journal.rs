//! Which slot of the disk holds which block, as an append-only file, so that opening a pool reads no payload.
//!
//! A record is 32 bytes, little endian: kind (4), slot (4), hash (8), zeros (8), XXH3-64 of those seeded with
//! the record's position and the namespace (8). The journal only decides how many blocks are found again: a
//! record that is lost, late or stale names a slot whose frame says otherwise when it is read. So writes to
//! it are never synced, and damaged records are skipped.

use super::disk::Disk;
use super::lane::DiskAccess;
use mixfleet_scheduler::kv::BlockHash;
use std::collections::HashMap;
use std::io::{ErrorKind, Result};
use twox_hash::XxHash3_64;

pub(super) const FILE: &str = "journal";
pub(super) const NEW_FILE: &str = "journal.new";

pub(super) const RECORD_BYTES: u64 = RECORD_LENGTH as u64;
const RECORD_LENGTH: usize = 32;
/// Records of a full journal per slot. It is rewritten at three per slot, and the new one has at most one per
/// slot to which one is being added.
pub(super) const RECORDS_PER_SLOT_MAX: u64 = 4;

const STORED: u32 = 1;
const FREED: u32 = 2;
const CHUNK_BYTES: usize = 1 << 20;

/// A block in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) slot: u32,
    pub(super) hash: BlockHash,
}

/// The open journal.
#[derive(Debug)]
pub(super) struct Journal {
    namespace: u64,
    /// Position of the next record. A record that was cut short is overwritten.
    records: u64,
    rewrite_at: u64,
    slots: u32,
}

/// What a journal contained when it was opened.
#[derive(Debug, Default)]
pub(super) struct Replayed {
    /// The block that each slot holds at the end, the longest stored first; each hash once.
    pub(super) blocks: Vec<Stored>,
    /// Number of damaged records.
    pub(super) damaged: u64,
}

impl Journal {
    /// Reads the journal; a missing file is an empty one. Slots from `slots` on count as freed.
    pub(super) fn open(disk: &dyn Disk, namespace: u64, slots: u32) -> Result<(Self, Replayed)> {
        let bytes = disk.len(FILE)?.unwrap_or(0);
        let mut replay = Replay::default();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut offset = 0;
        while offset < bytes {
            let read = disk.read_at(FILE, offset, &mut chunk)?;
            if read == 0 {
                break;
            }
            for (place, record) in (offset / RECORD_BYTES..).zip(chunk[..read].chunks(RECORD_LENGTH)) {
                replay.add(decode(record, place, namespace), slots);
            }
            offset += read as u64;
        }
        let mut journal = Journal { namespace, records: bytes.div_ceil(RECORD_BYTES), rewrite_at: 0, slots };
        journal.rewrite_later();
        Ok((journal, replay.finish()))
    }

    pub(super) fn stored(&mut self, disk: &DiskAccess, block: Stored) -> Result<()> {
        self.append(disk, STORED, block)
    }

    pub(super) fn freed(&mut self, disk: &DiskAccess, slot: u32) -> Result<()> {
        self.append(disk, FREED, Stored { slot, hash: BlockHash(0) })
    }

    /// Whether most of its records are obsolete.
    pub(super) fn is_long(&self) -> bool {
        self.records >= self.rewrite_at
    }

    /// Replaces the journal by a new one of `blocks` alone, in this order. With `sync`, the journal and the
    /// names of all files are durable when this returns. After an error the old journal stays in use.
    pub(super) fn rewrite(&mut self, disk: &DiskAccess, blocks: &[Stored], sync: bool) -> Result<()> {
        // Also after an error, so that not every record tries again.
        self.rewrite_later();
        let records =
            (0..).zip(blocks).flat_map(|(place, &block)| encode(STORED, block, place, self.namespace));
        let records: Vec<u8> = records.collect();
        let replace = move |disk: &dyn Disk| {
            disk.remove(NEW_FILE)?;
            disk.write_at(NEW_FILE, 0, &records)?;
            if sync {
                disk.sync(NEW_FILE)?;
            }
            disk.rename(NEW_FILE, FILE)?;
            if sync { disk.sync_names() } else { Ok(()) }
        };
        match sync {
            true => disk.run_long(replace)?,
            false => disk.run(replace)?,
        }
        self.records = blocks.len() as u64;
        self.rewrite_later();
        Ok(())
    }

    fn rewrite_later(&mut self) {
        let slots = u64::from(self.slots);
        self.rewrite_at = (self.records + slots).max(slots * (RECORDS_PER_SLOT_MAX - 1));
    }

    fn append(&mut self, disk: &DiskAccess, kind: u32, block: Stored) -> Result<()> {
        let record = encode(kind, block, self.records, self.namespace);
        let offset = self.records * RECORD_BYTES;
        disk.run(move |disk| disk.write_at(FILE, offset, &record))?;
        self.records += 1;
        Ok(())
    }
}

#[derive(Default)]
struct Replay {
    by_slot: HashMap<u32, (u64, Stored)>,
    by_hash: HashMap<BlockHash, u32>,
    order: u64,
    damaged: u64,
}

impl Replay {
    fn add(&mut self, record: Option<(u32, Stored)>, slots: u32) {
        let Some((kind, block)) = record else {
            self.damaged += 1;
            return;
        };
        self.order += 1;
        if let Some((_, before)) = self.by_slot.remove(&block.slot) {
            self.by_hash.remove(&before.hash);
        }
        if kind == STORED && block.slot < slots {
            if let Some(elsewhere) = self.by_hash.insert(block.hash, block.slot) {
                self.by_slot.remove(&elsewhere);
            }
            self.by_slot.insert(block.slot, (self.order, block));
        }
    }

    fn finish(self) -> Replayed {
        let mut blocks: Vec<(u64, Stored)> = self.by_slot.into_values().collect();
        blocks.sort_unstable_by_key(|&(order, _)| order);
        Replayed { blocks: blocks.into_iter().map(|(_, block)| block).collect(), damaged: self.damaged }
    }
}

fn checksum(fields: &[u8], place: u64, namespace: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(namespace ^ place, fields)
}

fn encode(kind: u32, block: Stored, place: u64, namespace: u64) -> [u8; RECORD_LENGTH] {
    let mut record = [0; RECORD_LENGTH];
    record[..4].copy_from_slice(&kind.to_le_bytes());
    record[4..8].copy_from_slice(&block.slot.to_le_bytes());
    record[8..16].copy_from_slice(&block.hash.0.to_le_bytes());
    let sum = checksum(&record[..24], place, namespace);
    record[24..].copy_from_slice(&sum.to_le_bytes());
    record
}

/// Decodes a record; none if it is damaged.
fn decode(record: &[u8], place: u64, namespace: u64) -> Option<(u32, Stored)> {
    let (fields, sum) = record.split_at_checked(24)?;
    if sum != checksum(fields, place, namespace).to_le_bytes() {
        return None;
    }
    let word = |at: usize| u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]]);
    let hash = BlockHash(u64::from(word(8)) | u64::from(word(12)) << 32);
    let kind = word(0);
    [STORED, FREED].contains(&kind).then_some((kind, Stored { slot: word(4), hash }))
}

/// Whether a failure means that there is no room, rather than that the medium is bad.
pub(super) fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::disk::SimDisk;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn a_journal_says_what_was_told_and_survives_any_cut(
            told in proptest::collection::vec((any::<bool>(), 0u32..6, 0u64..9), 0..40),
            rewrite in 0usize..40,
            cut in 0u64..64,
        ) {
            let disk = SimDisk::default();
            let access = DiskAccess::new(std::sync::Arc::new(disk.clone()));
            let (mut journal, _) = Journal::open(&disk, 3, 6).unwrap();
            let mut naive: BTreeMap<u32, u64> = BTreeMap::new();
            for (step, &(store, slot, hash)) in told.iter().enumerate() {
                naive.retain(|&other, held| other != slot && !(store && *held == hash));
                if store {
                    naive.insert(slot, hash);
                    journal.stored(&access, Stored { slot, hash: BlockHash(hash) }).unwrap();
                } else {
                    journal.freed(&access, slot).unwrap();
                }
                if step == rewrite {
                    let (_, replayed) = Journal::open(&disk, 3, 6).unwrap();
                    journal.rewrite(&access, &replayed.blocks, true).unwrap();
                    prop_assert_eq!(disk.names().unwrap(), [FILE]);
                }
            }
            let (_, replayed) = Journal::open(&disk, 3, 6).unwrap();
            let read: BTreeMap<u32, u64> = replayed.blocks.iter().map(|block| (block.slot, block.hash.0)).collect();
            prop_assert_eq!(&read, &naive);
            prop_assert!(replayed.damaged == 0);
            let (_, foreign) = Journal::open(&disk, 4, 6).unwrap();
            prop_assert!(foreign.blocks.is_empty());

            // After a cut, whole records are read, and so are records that are appended then.
            let length = disk.len(FILE).unwrap().unwrap_or(0).saturating_sub(cut);
            disk.cut(FILE, length).unwrap();
            let (mut journal, replayed) = Journal::open(&disk, 3, 6).unwrap();
            prop_assert_eq!(replayed.damaged, u64::from(length % RECORD_BYTES != 0));
            journal.stored(&access, Stored { slot: 5, hash: BlockHash(77) }).unwrap();
            let (_, replayed) = Journal::open(&disk, 3, 6).unwrap();
            prop_assert_eq!(replayed.blocks.last().map(|block| block.hash), Some(BlockHash(77)));
        }
    }
}
