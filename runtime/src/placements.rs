//! The most recent placement decisions with their explanations, for `/debug/placement`.

use crate::metrics::RequestPhases;
use mixfleet_scheduler::fleet::Explanation;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Explanations of placements by request id; the newest `capacity` are kept.
#[derive(Debug)]
pub struct Placements {
    capacity: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// By number; the largest is the newest.
    entries: BTreeMap<u64, Entry>,
    numbers: HashMap<String, u64>,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    id: String,
    owner: Option<String>,
    /// None until the request is placed.
    explanation: Option<Value>,
}

impl Kept {
    fn get(&self, id: &str) -> Option<&Entry> {
        self.entries.get(self.numbers.get(id)?)
    }
}

impl Placements {
    /// Keeps the newest `capacity` explanations.
    pub fn new(capacity: usize) -> Self {
        Placements { capacity, kept: Mutex::default() }
    }

    /// Sets the owner of a future engine request.
    pub(crate) fn claim(&self, id: &str, owner: &str) {
        self.put(Entry { id: id.to_string(), owner: Some(owner.to_string()), explanation: None });
    }

    /// Records (or, after a replay, replaces) the explanation of an engine request.
    pub fn record(&self, id: &str, explanation: Value) {
        self.put(Entry { id: id.to_string(), owner: None, explanation: Some(explanation) });
    }

    /// Records and logs a decision on the request that clients know by `id`, with further fields.
    pub(crate) fn decided(&self, id: &str, explanation: &Explanation, fields: &[(&str, Value)]) {
        let mut value = serde_json::to_value(explanation).expect("an explanation is plain data");
        fields.iter().for_each(|(name, field)| value[*name] = field.clone());
        self.record(id, value);
        let Some(chosen) = explanation.chosen() else { return };
        let terms = chosen.terms.as_ref();
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        tracing::info!(
            id,
            prefill = %chosen.prefill_device,
            decode = %chosen.decode_device,
            cached_tokens = terms.map(|terms| terms.cached_tokens),
            ttft_s = terms.map(|terms| rounded(terms.ttft_s)),
            tbt_s = terms.map(|terms| rounded(terms.tbt_s)),
            score = terms.map(|terms| terms.score),
            candidates = explanation.candidates.len(),
            "placed"
        );
    }

    /// Adds a request's cost, in dollars, to its displayed record.
    pub(crate) fn cost(&self, id: &str, usd: f64) {
        self.amend(id, "cost_usd", usd.into());
    }

    /// Adds a request's phases and number of tokens to its displayed record.
    pub(crate) fn phases(&self, id: &str, phases: RequestPhases, tokens: Option<u32>) {
        let RequestPhases { queue, prefill, decode } = phases;
        let phases = json!({
            "queue_s": queue.0, "prefill_s": prefill.0, "decode_s": decode.0, "tokens": tokens,
        });
        self.amend(id, "phases", phases);
    }

    /// Sets a field of a displayed record, if it is still kept.
    fn amend(&self, id: &str, field: &str, value: Value) {
        let mut kept = self.lock();
        let Some(number) = kept.numbers.get(id).copied() else { return };
        let known = kept.entries.get_mut(&number).and_then(|known| known.explanation.as_mut());
        if let Some(explanation) = known {
            explanation[field] = value;
        }
    }

    /// What a response cost, all of its choices together, in dollars.
    pub(crate) fn usd(&self, id: &str) -> Option<f64> {
        let kept = self.lock();
        let of = |entry: &Entry| entry.explanation.as_ref()?.get("cost_usd")?.as_f64();
        let choices = (0..).map_while(|choice| kept.get(&format!("{id}-{choice}")));
        kept.get(id).into_iter().chain(choices).filter_map(of).reduce(|a, b| a + b)
    }

    fn put(&self, mut entry: Entry) {
        let mut kept = self.lock();
        let number = kept.next;
        kept.next += 1;
        if let Some(old) = kept.numbers.insert(entry.id.clone(), number)
            && let Some(known) = kept.entries.remove(&old)
        {
            entry.owner = entry.owner.or(known.owner);
        }
        kept.entries.insert(number, entry);
        while kept.entries.len() > self.capacity {
            if let Some((_, oldest)) = kept.entries.pop_first() {
                kept.numbers.remove(&oldest.id);
            }
        }
    }

    /// The explanation of an engine request, or of a response's first choice, if `shown` allows its owner.
    pub fn explain(&self, id: &str, shown: impl Fn(Option<&str>) -> bool) -> Option<Value> {
        let kept = self.lock();
        let find = |id: &str| kept.get(id).filter(|known| shown(known.owner.as_deref()));
        find(id).or_else(|| find(&format!("{id}-0")))?.explanation.clone()
    }

    /// Ids of the explanations kept, newest first, of owners that `shown` allows.
    pub(crate) fn recent(&self, shown: impl Fn(Option<&str>) -> bool) -> Vec<String> {
        let kept = self.lock();
        let entries = kept.entries.values().rev().filter(|known| known.explanation.is_some());
        entries.filter(|known| shown(known.owner.as_deref())).map(|known| known.id.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
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
        placements.record("d", serde_json::json!({}));
        placements.cost("d", 0.5);
        assert_eq!((placements.usd("d"), placements.usd("c")), (Some(0.5), None));
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
