//! What `/debug/placement` shows: the last decisions, each explained.

use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Explanations of placements by request id, the newest `capacity` of them.
#[derive(Debug)]
pub struct Placements {
    capacity: usize,
    entries: Mutex<VecDeque<(String, Value)>>,
}

impl Placements {
    /// Keeps the newest `capacity` explanations.
    pub fn new(capacity: usize) -> Self {
        Placements { capacity, entries: Mutex::default() }
    }

    /// Records (or, after a replay, replaces) the explanation of an engine request.
    pub fn record(&self, id: &str, explanation: Value) {
        let mut entries = self.lock();
        entries.retain(|(known, _)| known != id);
        entries.push_back((id.to_string(), explanation));
        while entries.len() > self.capacity {
            entries.pop_front();
        }
    }

    /// The explanation of an engine request, or of the first choice of a response.
    pub fn explain(&self, id: &str) -> Option<Value> {
        let entries = self.lock();
        let find = |id: &str| entries.iter().find(|(known, _)| known == id);
        find(id).or_else(|| find(&format!("{id}-0"))).map(|(_, explanation)| explanation.clone())
    }

    /// Ids of the explanations kept, newest first.
    pub fn recent(&self) -> Vec<String> {
        self.lock().iter().rev().map(|(id, _)| id.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(String, Value)>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_is_bounded_and_newest_first() {
        let placements = Placements::new(2);
        for (id, value) in [("a-0", 1), ("b-0", 2), ("a-0", 3), ("c-0", 4)] {
            placements.record(id, value.into());
        }
        assert_eq!(placements.recent(), ["c-0", "a-0"]);
        assert_eq!(placements.explain("a"), Some(3.into()));
        assert_eq!(placements.explain("c-0"), Some(4.into()));
        assert_eq!(placements.explain("b-0"), None);
    }
}
