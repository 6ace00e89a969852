//! Instances that only compute prompts, one at a time.

use super::{Engine, Plan};

impl Engine {
    /// Computes one prompt at a time, in one go: where nothing decodes there is nobody to disturb.
    pub(super) fn alone(&self) -> bool {
        self.prefills && self.streamed && self.decoding.is_empty()
    }

    /// Somebody waits who comes before the prompt that is being computed.
    pub(super) fn is_overtaken(&self, now_s: f64) -> bool {
        let next = self.queue.front().filter(|_| self.next_is_ready(now_s));
        next.zip(self.prefilling.first()).is_some_and(|(next, first)| next.place() < first.place())
    }

    /// A prompt in one go that is overtaken stops where a step in progress would end; when that is.
    pub(super) fn pause(&mut self, now_s: f64) -> Option<f64> {
        if !self.is_overtaken(now_s) {
            return None;
        }
        let context = self.prefilling.first()?.context;
        let Some(Plan::Mixed { parts, decodes: false, began_s, time_s, .. }) = &mut self.at else {
            return None;
        };
        let [tokens] = parts.as_mut_slice() else { return None };
        let steps = tokens.div_ceil(self.step_tokens_max);
        let time_of = |steps: u32| self.cost.prefill_s(context, steps * self.step_tokens_max).0;
        let (mut less, mut enough) = (0, steps);
        while less + 1 < enough {
            let middle = less + (enough - less) / 2;
            if time_of(middle) >= now_s - *began_s { enough = middle } else { less = middle }
        }
        if enough == steps {
            return None;
        }
        (*tokens, *time_s) = (enough * self.step_tokens_max, time_of(enough));
        self.plans += 1;
        Some(*began_s + *time_s)
    }
}
