//! Turns the scattered measurements of attention in an engine's profile into rectangular tables.

use super::{EngineProfile, floats};
use mixfleet_scheduler::cost::Grid;
use std::collections::{BTreeMap, BTreeSet};

/// Measured attention of one layer in seconds, by prompt chunk, then by `[context, sequences, keys of
/// each]`.
#[derive(Debug)]
pub(super) struct AttentionTable {
    by_chunk: BTreeMap<u32, BTreeMap<[u32; 3], f64>>,
    /// Whether the context is given as the mean number of keys that a query of the chunk attends to: context
    /// + chunk / 2.
    mean_keys: bool,
}

/// Values of a table beyond which measurements are not the grid that they should be.
const VALUES_MAX: usize = 1 << 22;
const NAMES: [&str; 3] = ["context", "n_decode", "kv_decode"];

impl AttentionTable {
    /// The points of `profile`.
    pub(super) fn new(profile: &EngineProfile) -> Self {
        let mut table = AttentionTable { by_chunk: BTreeMap::new(), mean_keys: profile.mean_keys };
        for at in &profile.attention {
            let key = [at.prefill_context, at.decode_sequences, at.decode_context];
            table.by_chunk.entry(at.prefill_tokens).or_default().insert(key, at.seconds.0);
        }
        table
    }

    /// Attention of sequences that decode one token each: `[sequences, context of each]`.
    ///
    /// # Errors
    /// A description of the missing measurement.
    pub(super) fn decode(&self, scale: f64) -> Result<Grid, String> {
        self.of_chunk(0, true, [1, 2], scale)
    }

    /// Attention of one chunk alone: `[tokens, context before]`.
    ///
    /// # Errors
    /// A description of the missing measurement.
    pub(super) fn prefill(&self, scale: f64) -> Result<Grid, String> {
        let (chunks, contexts) = (self.chunks(false), self.contexts());
        let mut values = Vec::new();
        for &chunk in &chunks {
            let own = self.of_chunk(chunk, false, [0], scale)?;
            values.extend(contexts.iter().map(|&context| own.at([self.coordinate(chunk, context)])));
        }
        Grid::new(vec![floats(&chunks), floats(&contexts)], values)
            .map_err(|_| "attention has no chunk of a prompt alone".into())
    }

    /// Attention of a chunk beside decoding sequences: `[tokens, context before, sequences, context of
    /// each]`, if it was measured.
    ///
    /// # Errors
    /// A description of the missing measurement.
    pub(super) fn mixed(&self, scale: f64) -> Result<Option<Grid>, String> {
        let (chunks, contexts) = (self.chunks(true), self.contexts());
        if chunks.is_empty() {
            return Ok(None);
        }
        let axis = |d: usize| -> Vec<u32> {
            let rows = chunks.iter().flat_map(|&chunk| self.rows(chunk, true));
            let knots: BTreeSet<u32> = rows.map(|(key, _)| key[d]).collect();
            knots.into_iter().collect()
        };
        let (sequences, keys) = (axis(1), axis(2));
        bounded(&[chunks.len(), contexts.len(), sequences.len(), keys.len()])?;
        let mut values = Vec::new();
        for chunk in &chunks {
            let own = self.of_chunk(*chunk, true, [0, 1, 2], scale)?;
            for &context in &contexts {
                let context = self.coordinate(*chunk, context);
                for &sequences in &sequences {
                    values.extend(
                        keys.iter().map(|&keys| own.at([context, f64::from(sequences), f64::from(keys)])),
                    );
                }
            }
        }
        let axes = [&chunks, &contexts, &sequences, &keys].map(|axis| floats(axis)).to_vec();
        Grid::new(axes, values).map(Some)
    }

    /// The rows of a chunk, beside decoding sequences or alone.
    fn rows(&self, chunk: u32, decodes: bool) -> impl Iterator<Item = (&[u32; 3], &f64)> {
        let rows = self.by_chunk.get(&chunk).into_iter().flatten();
        rows.filter(move |([_, sequences, _], _)| (*sequences > 0) == decodes)
    }

    /// Those rows by these of their coordinates.
    fn of_chunk<const D: usize>(
        &self,
        chunk: u32,
        decodes: bool,
        axes: [usize; D],
        scale: f64,
    ) -> Result<Grid, String> {
        let known = self.rows(chunk, decodes).map(|(key, time)| (axes.map(|d| key[d]), time * scale));
        grid(&known.collect(), axes.map(|d| NAMES[d]), &format!("prefill_chunk {chunk}"))
    }

    /// Chunks with such a row.
    fn chunks(&self, decodes: bool) -> Vec<u32> {
        let chunks = self.by_chunk.keys().copied().filter(|&chunk| chunk > 0);
        chunks.filter(|&chunk| self.rows(chunk, decodes).next().is_some()).collect()
    }

    /// The contexts of the tables: the measured ones, if the file states contexts as such.
    fn contexts(&self) -> Vec<u32> {
        let rows = self.by_chunk.iter().filter(|(chunk, _)| **chunk > 0).flat_map(|(_, rows)| rows.keys());
        let mut contexts: BTreeSet<u32> = rows.map(|key| key[0]).collect();
        contexts.extend(self.mean_keys.then_some(0));
        contexts.into_iter().collect()
    }

    /// The coordinate of a chunk after `context` among the rows of its size.
    fn coordinate(&self, chunk: u32, context: u32) -> f64 {
        f64::from(context) + if self.mean_keys { 0.5 * f64::from(chunk) } else { 0.0 }
    }
}

/// Checks that a table with these knots along its axes is not too large.
fn bounded(knots: &[usize]) -> Result<(), String> {
    let values = knots.iter().try_fold(1usize, |all, knots| all.checked_mul(*knots));
    match values.filter(|values| *values <= VALUES_MAX) {
        Some(_) => Ok(()),
        None => Err(format!("attention is scattered over {knots:?} different sizes; it should be a grid")),
    }
}

/// A grid over all knots of `known`, with missing values filled in.
fn grid<const D: usize>(known: &BTreeMap<[u32; D], f64>, names: [&str; D], of: &str) -> Result<Grid, String> {
    if known.is_empty() {
        return Err(format!("attention has no rows of {of} with {} alone", names.join(" and ")));
    }
    let axes: [Vec<u32>; D] = std::array::from_fn(|d| {
        let knots: BTreeSet<u32> = known.keys().map(|key| key[d]).collect();
        knots.into_iter().collect()
    });
    bounded(&axes.each_ref().map(Vec::len))?;
    let values = filled(&axes, known).map_err(|at| {
        let missing = names.iter().zip(at).map(|(name, value)| format!("{name} {value}"));
        let missing: Vec<String> = missing.collect();
        format!("attention lacks {of}, {} and its neighbours", missing.join(", "))
    })?;
    Grid::new(axes.iter().map(|axis| floats(axis)).collect(), values)
}

/// Every knot's value, with the last axis fastest. A missing value (usually for lack of memory) is
/// extrapolated linearly from the two before it along some axis.
///
/// # Errors
/// The first knot for which there are no two.
fn filled<const D: usize>(
    axes: &[Vec<u32>; D],
    known: &BTreeMap<[u32; D], f64>,
) -> Result<Vec<f64>, [u32; D]> {
    let strides: [usize; D] = std::array::from_fn(|d| axes[d + 1..].iter().map(Vec::len).product());
    let count: usize = axes.iter().map(Vec::len).product();
    let mut values: Vec<f64> = Vec::with_capacity(count);
    for flat in 0..count {
        let index: [usize; D] = std::array::from_fn(|d| flat / strides[d] % axes[d].len());
        let at: [u32; D] = std::array::from_fn(|d| axes[d][index[d]]);
        let along = |d: usize| {
            let before = index[d].checked_sub(2)?;
            let (far, near) = (values[flat - 2 * strides[d]], values[flat - strides[d]]);
            let knot = |i: usize| f64::from(axes[d][i]);
            let share = (knot(before + 2) - knot(before + 1)) / (knot(before + 1) - knot(before));
            Some(near + (near - far).max(0.0) * share)
        };
        let value = known.get(&at).copied().or_else(|| (0..D).rev().find_map(along));
        values.push(value.ok_or(at)?);
    }
    Ok(values)
}
