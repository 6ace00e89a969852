//! Picks the least queue and prefill with each instance's own prefix (Mooncake's "cache-aware" baseline):
//! Algorithm 1 without its branch that pulls.

use super::super::{Fleet, Role};
use super::{Pick, Question};

pub(super) fn picks(fleet: &Fleet, question: &Question<'_>) -> Vec<Pick> {
    let mut best: Option<(usize, f64)> = None;
    for (at, load) in fleet.able_for(question.arrival, Role::prefills) {
        let cached = question.cached_on(at);
        let prefill = load.prefill_s(cached, question.arrival.prompt_tokens - cached);
        let begins = fleet.ahead(load, question).0.time.max(question.loading_on(at));
        let ttft_s = (begins + prefill).0;
        if best.is_none_or(|(_, least)| ttft_s < least) {
            best = Some((at, ttft_s));
        }
    }
    let pair = best.and_then(|(prefill, _)| Some((prefill, fleet.decoder_for(question.arrival, prefill)?)));
    pair.map(|(prefill, decode)| Pick { prefill, decode, pull: None }).into_iter().collect()
}
