//! The rope table on the device: a row per position, computed once.

use super::ModelConfig;
use super::config::Rope;
use super::graph::StepShape;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{BufferUsage, Device, Result, Slice};
use std::sync::atomic::{AtomicU32, Ordering};

/// Positions that are computed at a time, at least.
const ROWS_MIN: u32 = 1024;

/// Rows of cosines and sines for every position that fits in KV memory. They are computed as positions are
/// reached, since a context may be long and requests short.
#[derive(Debug)]
pub(super) struct RopeTable {
    table: Slice, // [rows, width] f32
    rows: u32,
    width: u32,
    filled: AtomicU32,
}

/// The tables of a model's ropes.
#[derive(Debug)]
pub(super) struct RopeTables {
    pub(super) main: RopeTable,
    pub(super) second: Option<RopeTable>,
}

impl RopeTables {
    /// Makes sure that all rows up to `position` are computed. No step that reads later rows may still run.
    pub(super) fn extend_to(&self, device: &dyn Device, config: &ModelConfig, position: u32) -> Result<()> {
        self.main.extend_to(device, &config.rope, position)?;
        match (&self.second, &config.second_rope) {
            (Some(table), Some(rope)) => table.extend_to(device, rope, position),
            _ => Ok(()),
        }
    }
}

impl RopeTable {
    pub(super) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        rope: &Rope,
        shape: &StepShape,
    ) -> Result<Self> {
        let rows = config.context_max.min(shape.blocks.saturating_mul(shape.block_tokens)).max(1);
        let width = to_u32(2 * rope.inv_freq.len());
        let bytes = u64::from(rows) * u64::from(width) * 4;
        let table = device.alloc(bytes, BufferUsage::Weights)?;
        Ok(RopeTable { table, rows, width, filled: AtomicU32::new(0) })
    }

    /// Creates the tables of a model: of its rope, and of the second one that some layers have.
    pub(super) fn both(device: &dyn Device, config: &ModelConfig, shape: &StepShape) -> Result<RopeTables> {
        let of = |rope: &Rope| RopeTable::new(device, config, rope, shape);
        let second = config.second_rope.as_ref().map(of).transpose()?;
        Ok(RopeTables { main: of(&config.rope)?, second })
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
