//! Algorithm 1 of Mooncake (FAST'25, section 4.1) as printed:
//!
//! ```text
//! for each prefill instance i:
//!   if best_len / i.prefix_len > threshold:  pull best_len - i.prefix_len, T_transfer of that
//!   else:                                    T_transfer = 0, reuse i.prefix_len
//!   TTFT = T_transfer + T_queue + T_prefill; keep the least
//! ```
//!
//! It does not compare the pull with recomputing. A prefix of 0 makes the ratio infinite; the holder of the
//! best prefix pulls nothing.

use super::super::{Fleet, Role};
use super::{Part, Pick, Question};
use mixfleet_hal::units::Seconds;

pub(super) fn picks(fleet: &Fleet, question: &Question<'_>, threshold: f64) -> Vec<Pick> {
    let longest = question.longest().filter(|_| fleet.config.pull);
    let mut best: Option<(f64, usize, Option<Part>)> = None;
    for (at, load) in fleet.able_for(question.arrival, Role::prefills) {
        let own = question.cached_on(at);
        let pull = longest.filter(|&(holder, tokens)| {
            holder != at && tokens > own && f64::from(tokens) > threshold * f64::from(own)
        });
        let pull = pull.map(|(holder, tokens)| (holder, tokens - own));
        let transfer =
            pull.map_or(Seconds::ZERO, |(from, tokens)| fleet.pull_time(question.now, from, at, tokens));
        let transfer = transfer.max(question.loading_on(at));
        let known = own + pull.map_or(0, |(_, tokens)| tokens);
        let prefill = load.prefill_s(known, question.arrival.prompt_tokens - known);
        let ttft_s = (transfer + fleet.ahead(load, question).0.time + prefill).0;
        if best.is_none_or(|(least, ..)| ttft_s < least) {
            best = Some((ttft_s, at, pull));
        }
    }
    let placed = best
        .and_then(|(_, prefill, pull)| Some((prefill, pull, fleet.decoder_for(question.arrival, prefill)?)));
    placed.map(|(prefill, pull, decode)| Pick { prefill, decode, pull }).into_iter().collect()
}
