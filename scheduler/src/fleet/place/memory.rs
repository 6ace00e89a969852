//! The cost of KV memory.

use super::super::Fleet;
use super::{DecodeSide, PrefillSide, Question, ScoreUnit};
use mixfleet_hal::units::Seconds;

impl Fleet {
    /// The cost of the memory that the request holds where memory binds, in units of the score: KV bytes
    /// times seconds, as a share of the instance's memory and of its rent.
    pub(super) fn memory_cost(
        &self,
        question: &Question<'_>,
        side: &PrefillSide,
        decoder: &DecodeSide<'_>,
        (ttft, transfer): (Seconds, Seconds),
    ) -> f64 {
        if self.config.kv_weight == 0.0 {
            return 0.0;
        }
        let (prompt, output) = (u64::from(question.arrival.prompt_tokens), question.output_tokens);
        let cost = |at: usize, tokens: u64, held: Seconds| {
            let load = &self.loads[at];
            let share = load.spec.tokens_held(tokens) as f64 / load.spec.kv_capacity_tokens.max(1) as f64;
            let time = held * (share * load.memory_binds(prompt + u64::from(output)));
            match (question.score_unit, load.spec.price) {
                (ScoreUnit::Usd, Some(price)) => (price * time).0,
                _ => time.0,
            }
        };
        let computing = side.interleave + side.prefill;
        let answering = decoder.tbt_now * f64::from(output);
        let whole = prompt + u64::from(output / 2);
        let cost = if side.at == decoder.at {
            cost(side.at, whole, computing + answering)
        } else {
            // Room for the KV is reserved before the prompt is computed.
            cost(side.at, prompt, computing + transfer) + cost(decoder.at, whole, ttft + transfer + answering)
        };
        cost * self.config.kv_weight
    }
}
