//! The order of requests, which is the same on every instance.

use super::{Phase, RequestId};
use mixfleet_hal::units::Seconds;
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::collections::vec_deque::Iter;

/// A request's place in the order: by due time, then by arrival.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The due time on the fleet's clock.
    pub due: Seconds,
    /// The request's id, smaller for older requests.
    pub request: RequestId,
}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        self.due.0.total_cmp(&other.due.0).then(self.request.cmp(&other.request))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Place {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Place {}

/// Places in order. Most are added last and removed first, so this is a queue, which keeps its memory.
#[derive(Debug, Default)]
pub(super) struct InOrder(VecDeque<Place>);

impl InOrder {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn first(&self) -> Option<&Place> {
        self.0.front()
    }

    pub(super) fn last(&self) -> Option<&Place> {
        self.0.back()
    }

    pub(super) fn iter(&self) -> Iter<'_, Place> {
        self.0.iter()
    }

    pub(super) fn insert(&mut self, place: Place) {
        if self.0.back().is_none_or(|last| *last < place) {
            self.0.push_back(place);
        } else if let Err(at) = self.0.binary_search(&place) {
            self.0.insert(at, place);
        }
    }

    pub(super) fn remove(&mut self, place: &Place) {
        if let Ok(at) = self.0.binary_search(place) {
            self.0.remove(at);
        }
    }
}

impl<'a> IntoIterator for &'a InOrder {
    type Item = &'a Place;
    type IntoIter = Iter<'a, Place>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// The places in each phase, in order.
#[derive(Debug, Default)]
pub(super) struct Places([InOrder; 6]);

impl Places {
    pub(super) fn of(&self, phase: Phase) -> &InOrder {
        &self.0[phase as usize]
    }

    pub(super) fn of_mut(&mut self, phase: Phase) -> &mut InOrder {
        &mut self.0[phase as usize]
    }
}

/// The first of `places` after `after`, or of all.
pub(super) fn next(places: &InOrder, after: Option<Place>) -> Option<Place> {
    let from = after.map_or(0, |after| places.0.partition_point(|place| *place <= after));
    places.0.get(from).copied()
}
