//! The most recent placement decisions with their explanations, for `/debug/placement`.

use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Explanations of placements by request id; the newest `capacity` are kept.
#[derive(Debug)]
pub struct Placements {
    capacity: usize,
    entries: Mutex<VecDeque<Entry>>,
}

#[derive(Debug)]
struct Entry {
    id: String,
    owner: Option<String>,
    /// None until the request is placed.
    explanation: Option<Value>,
}

impl Placements {
    /// Keeps the newest `capacity` explanations.
    pub fn new(capacity: usize) -> Self {
        Placements { capacity, entries: Mutex::default() }
    }

    /// Sets the owner of a future engine request.
    pub(crate) fn claim(&self, id: &str, owner: &str) {
        self.put(Entry { id: id.to_string(), owner: Some(owner.to_string()), explanation: None });
    }

    /// Records (or, after a replay, replaces) the explanation of an engine request.
    pub fn record(&self, id: &str, explanation: Value) {
        self.put(Entry { id: id.to_string(), owner: None, explanation: Some(explanation) });
    }

    fn put(&self, mut entry: Entry) {
        let mut entries = self.lock();
        if let Some(at) = entries.iter().position(|known| known.id == entry.id)
            && let Some(known) = entries.remove(at)
        {
            entry.owner = entry.owner.or(known.owner);
        }
        entries.push_back(entry);
        while entries.len() > self.capacity {
            entries.pop_front();
        }
    }

    /// The explanation of an engine request, or of a response's first choice, if `shown` allows its owner.
    pub(crate) fn explain(&self, id: &str, shown: impl Fn(Option<&str>) -> bool) -> Option<Value> {
        let entries = self.lock();
        let find = |id: &str| entries.iter().find(|known| known.id == id && shown(known.owner.as_deref()));
        find(id).or_else(|| find(&format!("{id}-0")))?.explanation.clone()
    }

    /// Ids of the explanations kept, newest first, of owners that `shown` allows.
    pub(crate) fn recent(&self, shown: impl Fn(Option<&str>) -> bool) -> Vec<String> {
        let entries = self.lock();
        let entries = entries.iter().rev().filter(|known| known.explanation.is_some());
        entries.filter(|known| shown(known.owner.as_deref())).map(|known| known.id.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
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
        let all = |_: Option<&str>| true;
        assert_eq!(placements.recent(all), ["c-0", "a-0"]);
        assert_eq!(placements.explain("a", all), Some(3.into()));
        assert_eq!(placements.explain("c-0", all), Some(4.into()));
        assert_eq!(placements.explain("b-0", all), None);
    }

    #[test]
    fn what_belongs_to_another_is_as_if_it_were_not_there() {
        let placements = Placements::new(8);
        placements.claim("a-0", "alpha");
        placements.claim("b-0", "beta");
        let all = |_: Option<&str>| true;
        let alphas = |owner: Option<&str>| owner == Some("alpha");
        assert!(placements.recent(all).is_empty(), "nothing is placed yet");
        for id in ["a-0", "b-0", "c-0"] {
            placements.record(id, id.into());
        }
        placements.record("a-0", "again".into());
        assert_eq!(placements.recent(alphas), ["a-0"]);
        assert_eq!(placements.explain("a", alphas), Some("again".into()));
        assert_eq!((placements.explain("b-0", alphas), placements.explain("c", alphas)), (None, None));
        assert_eq!(placements.recent(all).len(), 3);
    }
}
