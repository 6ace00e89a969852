//! Picks the shortest queue in prefill seconds, regardless of caches.

use super::super::{Fleet, Role};
use super::{Pick, Question};

pub(super) fn picks(fleet: &Fleet, question: &Question<'_>) -> Vec<Pick> {
    let queue = |at: usize| {
        let load = &fleet.loads[at];
        (fleet.ahead(load, question).0.time.0, load.batch().sequences)
    };
    let shorter = |a: usize, b: usize| if queue(b) < queue(a) { b } else { a };
    let prefill = fleet.able_for(question.arrival, Role::prefills).map(|(at, _)| at).reduce(shorter);
    let pair = prefill.and_then(|prefill| Some((prefill, fleet.decoder_for(question.arrival, prefill)?)));
    pair.map(|(prefill, decode)| Pick { prefill, decode, pull: None }).into_iter().collect()
}
