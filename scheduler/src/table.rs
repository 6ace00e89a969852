//! Hash tables with numeric keys, such as a request's id or a block's hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A hasher that spreads consecutive numbers, equally in every run, unlike the standard hasher, which is
/// seeded by the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        // The high bits of a product are well spread.
        self.0.rotate_left(26)
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// A hash table by id. Its iteration order is arbitrary, so no decision may depend on it.
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
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value of `id`.
    pub fn get(&self, id: u64) -> Option<&V> {
        self.0.get(&id)
    }

    /// The value of `id`, mutably.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut V> {
        self.0.get_mut(&id)
    }

    /// Whether `id` has a value.
    pub fn contains(&self, id: u64) -> bool {
        self.0.contains_key(&id)
    }

    /// Inserts a value; returns the previous one.
    pub fn insert(&mut self, id: u64, value: V) -> Option<V> {
        self.0.insert(id, value)
    }

    /// Removes and returns the value of `id`.
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
