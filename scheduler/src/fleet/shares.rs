//! What other parties' prompts delay a request by. Instances divide their steps and memory themselves
//! (`batch/shares.rs`).

use super::Fleet;
use super::load::{Backlog, Load, Phase};
use super::place::Question;

impl Fleet {
    /// Returns the prefill work on `load` ahead of the request, and the number of prompts that it precedes.
    /// Prompts of other parties count as far as their turns come before the request's.
    pub(super) fn backlog_in_turn(&self, load: &Load, question: &Question<'_>) -> (Backlog, u32) {
        let (now, due, party) = (question.now, question.objectives.due, question.objectives.party);
        let (whole, behind) = load.backlog(now, due, &self.works);
        if !question.contended {
            return (whole, behind);
        }
        let (mut own, mut others) = (Backlog::default(), 0);
        for work in load.queued().filter_map(|request| self.works.get(request)) {
            let Phase::Prefill { done, remaining } = work.phase else { continue };
            if work.party == party && work.due <= due {
                own.time += remaining;
                own.chunks += load.chunks(work.prompt_tokens - done);
            } else if work.party != party && work.due <= due {
                others += 1;
            }
        }
        if others == 0 {
            return (whole, behind);
        }
        let parties = self.parties.with(party);
        let step = load.running_step(now, &self.works);
        let time = (own.time * parties as f64 + step).min(whole.time);
        let chunks = (own.chunks * parties as u64 + 1).min(whole.chunks);
        (Backlog { time, chunks }, behind + others)
    }
}
