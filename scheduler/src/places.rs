//! Slots for requests in progress; the last slots are reserved for parties with few.

use crate::ids::PartyId;
use std::collections::BTreeMap;

/// The reserved part of all slots, for parties below their share: one in this many.
const KEPT_FOR_OTHERS: usize = 8;

/// The number of requests in progress of each party; requests without a party are not counted.
#[derive(Clone, Debug, Default)]
pub struct PartyCounts(BTreeMap<PartyId, usize>);

impl PartyCounts {
    /// Adds a request.
    pub fn enter(&mut self, party: PartyId) {
        if party != PartyId::NONE {
            *self.0.entry(party).or_default() += 1;
        }
    }

    /// Removes a request.
    pub fn leave(&mut self, party: PartyId) {
        let Some(requests) = self.0.get_mut(&party) else { return };
        *requests -= 1;
        if *requests == 0 {
            self.0.remove(&party);
        }
    }

    /// Number of requests of a party.
    pub fn requests(&self, party: PartyId) -> usize {
        self.0.get(&party).copied().unwrap_or(0)
    }

    /// Number of parties, with `party`; 0 for work without one.
    pub fn with(&self, party: PartyId) -> usize {
        match party {
            PartyId::NONE => 0,
            _ => self.0.len() + usize::from(!self.0.contains_key(&party)),
        }
    }

    /// Whether `party` gets no more of `most` slots, `taken` of which are taken: it has more than its share,
    /// as if one more party were here, and the free slots are reserved for others.
    pub fn leaves_the_rest(&self, party: PartyId, taken: usize, most: usize) -> bool {
        let kept = most / KEPT_FOR_OTHERS;
        let share = most / (self.0.len() + 1);
        self.requests(party) > share && most.saturating_sub(taken) <= kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets `party` ask until it gets no more of 16 places; returns how many it got.
    fn fill(counts: &mut PartyCounts, party: PartyId, taken: &mut usize) -> usize {
        let before = *taken;
        while *taken < 16 && !counts.leaves_the_rest(party, *taken, 16) {
            counts.enter(party);
            *taken += 1;
        }
        *taken - before
    }

    #[test]
    fn the_last_places_are_for_parties_below_their_share() {
        let (mut counts, mut taken) = (PartyCounts::default(), 0);
        assert_eq!(fill(&mut counts, PartyId(1), &mut taken), 14);
        assert_eq!(fill(&mut counts, PartyId(2), &mut taken), 2);
        assert_eq!((counts.with(PartyId(2)), counts.with(PartyId(3)), counts.with(PartyId::NONE)), (2, 3, 0));
        (0..14).for_each(|_| counts.leave(PartyId(1)));
        assert_eq!((counts.requests(PartyId(1)), counts.with(PartyId(2))), (0, 1));
    }

    #[test]
    fn work_without_a_party_and_few_places_have_no_rest() {
        let (mut counts, mut taken) = (PartyCounts::default(), 0);
        assert_eq!(fill(&mut counts, PartyId::NONE, &mut taken), 16);
        counts.enter(PartyId(1));
        assert!(!counts.leaves_the_rest(PartyId(1), 1, 2), "of two places none is kept");
    }
}
