//! Tables by number: a request's id, a block's key.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Spreads consecutive numbers, the same in every run, unlike the standard hasher, which draws a seed from the system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        // Where a product is well spread: its high bits.
        self.0.rotate_left(26)
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A table by id. What it iterates over comes in no order that may decide anything.
#[derive(Clone, Debug)]
pub struct IdMap<V>(HashMap<u64, V, BuildHasherDefault<Spread>>);

impl<V> Default for IdMap<V> {
    fn default() -> Self {
        IdMap(HashMap::default())
    }
}

impl<V> FromIterator<(u64, V)> for IdMap<V> {
    fn from_iter<I: IntoIterator<Item = (u64, V)>>(values: I) -> Self {
        IdMap(values.into_iter().collect())
    }
}

impl<V> IdMap<V> {
    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of `id`.
    pub fn get(&self, id: u64) -> Option<&V> {
        self.0.get(&id)
    }

    /// The value of `id`, to be changed.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut V> {
        self.0.get_mut(&id)
    }

    /// Whether `id` has a value.
    pub fn contains(&self, id: u64) -> bool {
        self.0.contains_key(&id)
    }

    /// Puts a value in; returns the one that was there.
    pub fn insert(&mut self, id: u64, value: V) -> Option<V> {
        self.0.insert(id, value)
    }

    /// Takes the value of `id` out.
    pub fn remove(&mut self, id: u64) -> Option<V> {
        self.0.remove(&id)
    }

    /// The ids for which `keep` holds, in order.
    pub fn ids_where(&self, mut keep: impl FnMut(&V) -> bool) -> Vec<u64> {
        let mut ids: Vec<u64> = self.0.iter().filter(|(_, value)| keep(value)).map(|(&id, _)| id).collect();
        ids.sort_unstable();
        ids
    }
}
