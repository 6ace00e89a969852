//! The rope table on the device: a row per position, computed once.

use super::ModelConfig;
use super::config::Rope;
use super::graph::StepShape;
use mixfleet_hal::{BufferUsage, Device, Result, Slice};
use std::sync::atomic::{AtomicU32, Ordering};

/// Positions that are computed at a time, at least.
const ROWS_MIN: u32 = 1024;

/// Rows of cosines and sines for every position that KV memory has room for. They are computed as positions
/// are reached, since a context may be long and requests short.
#[derive(Debug)]
pub(super) struct RopeTable {
    table: Slice, // [rows, width] f32
    rows: u32,
    width: u32,
    filled: AtomicU32,
}

impl RopeTable {
    pub(super) fn new(device: &dyn Device, config: &ModelConfig, shape: &StepShape) -> Result<Self> {
        let rows = config.context_max.min(shape.blocks.saturating_mul(shape.block_tokens)).max(1);
        let width = config.rotated();
        let bytes = u64::from(rows) * u64::from(width) * 4;
        let table = device.alloc(bytes, BufferUsage::Weights)?;
        Ok(RopeTable { table, rows, width, filled: AtomicU32::new(0) })
    }

    /// Makes sure that all rows up to `position` are computed. No step that reads later rows may still run.
    pub(super) fn extend_to(&self, device: &dyn Device, rope: &Rope, position: u32) -> Result<()> {
        let filled = self.filled.load(Ordering::Relaxed);
        if position < filled {
            return Ok(());
        }
        let end = position.saturating_add(1).next_power_of_two().max(ROWS_MIN).min(self.rows);
        let positions: Vec<u32> = (filled..end).collect();
        let row_bytes = u64::from(self.width) * 4;
        let to = self.table.range(u64::from(filled) * row_bytes, positions.len() as u64 * row_bytes);
        device.write(&to, bytemuck::cast_slice(&rope.table(&positions)))?;
        self.filled.store(end, Ordering::Relaxed);
        Ok(())
    }

    /// The table, `[positions, width]` f32.
    pub(super) fn table(&self) -> &Slice {
        &self.table
    }

    /// Positions that the table has rows for.
    pub(super) fn positions(&self) -> u32 {
        self.rows
    }
}
