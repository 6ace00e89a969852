//! The ids that are in use by live sessions.

use super::session::Caller;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Which caller uses which id, and in how many sessions. Clones share the table.
#[derive(Clone, Debug)]
pub(super) struct Seats<Id>(Arc<Mutex<BTreeMap<Id, (Caller, usize)>>>);

impl<Id> Default for Seats<Id> {
    fn default() -> Self {
        Seats(Arc::default())
    }
}

/// A session's use of an id; it ends on drop.
pub(super) struct Seat<Id: Ord + Copy> {
    id: Id,
    seats: Seats<Id>,
}

impl<Id: Ord + Copy> Seats<Id> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Id, (Caller, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the id for a session of `caller`; none while another process uses it.
    pub(super) fn take(&self, id: Id, caller: Caller) -> Option<Seat<Id>> {
        let mut seats = self.lock();
        let (owner, sessions) = seats.entry(id).or_insert((caller, 0));
        if *owner != caller {
            return None;
        }
        *sessions += 1;
        Some(Seat { id, seats: self.clone() })
    }
}

impl<Id: Ord + Copy> Seat<Id> {
    pub(super) fn id(&self) -> &Id {
        &self.id
    }
}

impl<Id: Ord + Copy> Drop for Seat<Id> {
    fn drop(&mut self) {
        let mut seats = self.seats.lock();
        if let Some((_, sessions)) = seats.get_mut(&self.id) {
            *sessions -= 1;
            if *sessions == 0 {
                seats.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnv;

    #[test]
    fn an_id_in_use_is_its_processs_until_its_last_session_ends() {
        let env = SeededEnv::new(1);
        let (one, other) = (Caller::new(&env), Caller::new(&env));
        let seats = Seats::default();
        let (first, again) = (seats.take(7, one), seats.take(7, one));
        assert!(first.is_some() && again.is_some() && seats.take(7, other).is_none());
        assert!(seats.take(8, other).is_some());
        drop(first);
        assert!(seats.take(7, other).is_none());
        drop(again);
        assert!(seats.take(7, other).is_some());
    }
}
