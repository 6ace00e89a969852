//! What prompts do to the TBT of answers beside which they run.
//!
//! Where prompts are sized to the objectives of the answers beside them, no step is too long. Where they fill
//! steps up whatever decodes, each makes a few gaps of all answers long, and only so many of them fit into the
//! share of gaps by which TBT is measured.

use super::load::Load;
use mixfleet_hal::units::Seconds;

/// The steps of prompts in which an answer took part, or will, and what they add to its gaps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stalls {
    time: Seconds,
    steps: u64,
}

impl Stalls {
    fn with(self, other: Stalls) -> Stalls {
        Stalls { time: self.time + other.time, steps: self.steps + other.steps }
    }

    /// What they add to the mean of the longest `gaps` gaps.
    fn added(self, gaps: f64) -> Seconds {
        self.time * (1.0 / (self.steps.max(1) as f64).max(gaps))
    }
}

impl Load {
    /// The stalls of the answers here by a prompt of `tokens` tokens, which takes `time`.
    pub(super) fn stalls_of(&self, tokens: u32, time: Seconds) -> Option<Stalls> {
        self.spec.prefill_tokens_beside_decode_max?;
        Some(Stalls { time, steps: self.chunks(tokens) })
    }

    /// Adds a prompt that will run beside the answers here.
    pub(super) fn stall(&mut self, stalls: Stalls) {
        for seat in self.seats_mut() {
            seat.stalls = seat.stalls.with(stalls);
        }
    }

    /// By how much another prompt would make an answer here miss its TBT objective that meets it without:
    /// the most of them, if there is one. TBT is the mean of the longest `share` of an answer's gaps.
    pub(super) fn overruns(&self, stalls: Stalls, share: f64) -> Option<Seconds> {
        let step = self.step(self.everyone());
        let over = self.seats().iter().filter_map(|seat| {
            let (slo, gaps) = (seat.tbt_slo?, (share * f64::from(seat.output_tokens)).max(1.0));
            let over = |stalls: Stalls| step + stalls.added(gaps) - slo;
            let with = over(seat.stalls.with(stalls));
            (over(seat.stalls).0 <= 0.0 && with.0 > 0.0).then_some(with)
        });
        over.reduce(Seconds::max)
    }
}
