//! The order of requests: the same on every instance.

use super::{Phase, RequestId};
use mixfleet_hal::units::Seconds;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Bound;

/// A request's place in the order: by when it is due, equal ones as they came.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// On the fleet's clock.
    pub due: Seconds,
    /// Smaller is older.
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

/// Who is in which phase, in order.
#[derive(Debug, Default)]
pub(super) struct Places([BTreeSet<Place>; 6]);

impl Places {
    pub(super) fn of(&self, phase: Phase) -> &BTreeSet<Place> {
        &self.0[phase as usize]
    }

    pub(super) fn of_mut(&mut self, phase: Phase) -> &mut BTreeSet<Place> {
        &mut self.0[phase as usize]
    }
}

/// The first of `places` after `after`, or of all.
pub(super) fn next(places: &BTreeSet<Place>, after: Option<Place>) -> Option<Place> {
    let from = after.map_or(Bound::Unbounded, Bound::Excluded);
    places.range((from, Bound::Unbounded)).next().copied()
}
