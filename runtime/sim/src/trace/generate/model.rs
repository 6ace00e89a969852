//! Lengths, turns and think times of sessions, with the sources of their numbers.

use mixfleet_hal::random::Stream;

/// A distribution given by points (share, value) of its quantile function, which is geometric between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantileCurve(pub &'static [(f64, u32)]);

impl QuantileCurve {
    /// Draws one value, at least 1.
    pub(super) fn draw(self, random: &mut Stream) -> u32 {
        let share = random.next_unit();
        let above = self.0.partition_point(|&(p, _)| p <= share).clamp(1, self.0.len() - 1);
        let ((p0, v0), (p1, v1)) = (self.0[above - 1], self.0[above]);
        let (v0, v1) = (f64::from(v0.max(1)), f64::from(v1.max(1)));
        (v0 * (v1 / v0).powf((share - p0) / (p1 - p0))).round() as u32
    }

    /// The mean of the distribution.
    pub fn mean(self) -> f64 {
        let pieces = self.0.windows(2).map(|pair| {
            let ((p0, v0), (p1, v1)) = (pair[0], pair[1]);
            let (v0, v1) = (f64::from(v0.max(1)), f64::from(v1.max(1)));
            // The logarithmic mean is that of a geometric piece.
            let mean = if v0 == v1 { v0 } else { (v1 - v0) / (v1 / v0).ln() };
            (p1 - p0) * mean
        });
        pieces.sum()
    }
}

/// The number of turns of sessions. Each session continues with a probability of its own, which is Beta
/// distributed over the sessions, so that sessions that continued are likely to continue (beta-geometric).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turns {
    mean: f64,
    /// First parameter of the Beta distribution: large values approach a geometric distribution, values
    /// towards 1 are ever more unequal.
    evenness: f64,
}

impl Turns {
    /// A mean of `mean` turns, at least 1; `evenness` is above 1.
    ///
    /// # Panics
    /// When either is out of range.
    pub fn new(mean: f64, evenness: f64) -> Self {
        assert!(mean >= 1.0 && evenness > 1.0, "{mean} turns, evenness {evenness}");
        Turns { mean, evenness }
    }

    /// Mean number of turns of a session.
    pub fn mean(self) -> f64 {
        self.mean
    }

    /// Probability that a session continues after turn `turn`, counted from 1.
    pub(super) fn go_on(self, turn: u32) -> f64 {
        let beta = (self.mean - 1.0) * (self.evenness - 1.0);
        let survived = f64::from(turn - 1) + beta;
        survived / (survived + self.evenness)
    }
}

/// The statistics of sessions; lengths are in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SessionModel {
    /// Number of turns of a session.
    pub turns: Turns,
    /// Length of the first prompt, including the system prompt.
    pub first: QuantileCurve,
    /// Length that a further prompt adds to the previous one and its answer.
    pub growth: QuantileCurve,
    /// Length of answers.
    pub output: QuantileCurve,
    /// Time from the end of an answer to the next prompt, in milliseconds.
    pub think_ms: QuantileCurve,
    /// Length of a system prompt.
    pub system_tokens: u32,
    /// Number of different system prompts, equally likely; 0 means that none is shared.
    pub system_prompts: u32,
    /// A context that would be longer starts over.
    pub prompt_tokens_max: u32,
}

impl SessionModel {
    /// The same statistics with another mean number of turns.
    pub fn with_turns(self, mean: f64) -> Self {
        SessionModel { turns: Turns::new(mean, self.turns.evenness), ..self }
    }

    /// Mean duration of a session in seconds.
    pub(super) fn session_s(&self, answer_s_per_token: f64) -> f64 {
        let turn_s = self.think_ms.mean() / 1e3 + self.output.mean() * answer_s_per_token;
        (self.turns.mean - 1.0) * turn_s
    }
}

/// Kinds of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Chats and questions about documents.
    Conversation,
    /// Coding agents.
    Agentic,
    /// Independent summaries of documents.
    Batch,
}

impl Preset {
    /// Requests per second of the source, or a similar number if it has none.
    pub const fn rate(self) -> f64 {
        match self {
            Preset::Conversation => 3.4,
            Preset::Agentic | Preset::Batch => 1.0,
        }
    }

    /// The statistics of this kind of load, all measured on the published traces that docs/traces.md names.
    pub fn model(self) -> SessionModel {
        match self {
            Preset::Conversation => conversation(),
            Preset::Agentic => agentic(),
            Preset::Batch => batch(),
        }
    }
}

/// Mooncake's conversation trace (FAST'25). Sessions are derived from its hashes: a request that hits more
/// than the system prompt's block continues the last one that ended with the hit block. 7,373 of 12,031 start
/// a session; 31, 42, 51, 59, 59 and 68 % of those with 1, 2, ... 6 turns continue. Think times are its gaps
/// between turns less 9 s of answer. The system prompt has the 882 tokens of FAST'25.
fn conversation() -> SessionModel {
    SessionModel {
        turns: Turns::new(1.63, 3.55),
        first: QuantileCurve(&[
            (0.0, 891),
            (0.05, 897),
            (0.1, 905),
            (0.25, 1_336),
            (0.5, 5_264),
            (0.75, 13_056),
            (0.9, 25_561),
            (0.95, 38_538),
            (0.99, 89_869),
            (1.0, 126_195),
        ]),
        growth: QuantileCurve(&[
            (0.0, 1),
            (0.1, 1),
            (0.25, 7),
            (0.5, 23),
            (0.75, 425),
            (0.9, 4_267),
            (0.95, 7_046),
            (0.99, 17_091),
            (1.0, 91_467),
        ]),
        output: QuantileCurve(&[
            (0.0, 1),
            (0.01, 3),
            (0.05, 10),
            (0.1, 24),
            (0.25, 156),
            (0.5, 350),
            (0.75, 472),
            (0.9, 597),
            (0.95, 698),
            (0.99, 1_120),
            (1.0, 2_000),
        ]),
        think_ms: QuantileCurve(&[
            (0.0, 1_000),
            (0.05, 21_000),
            (0.1, 33_000),
            (0.25, 57_000),
            (0.5, 114_000),
            (0.75, 255_000),
            (0.9, 474_000),
            (0.95, 609_000),
            (0.99, 1_473_000),
            (1.0, 3_021_000),
        ]),
        system_tokens: 882,
        system_prompts: 1,
        prompt_tokens_max: 126_195,
    }
}

/// 397 sessions of coding agents (callanjfox/kv-cache-tester). Turns are close to geometric (mean 65, median
/// 43). System prompt and tools have a median of 15,104 tokens, in 235 variants of unequal frequency that
/// collide as often as 118 equally frequent ones. Growth beyond the 99th percentile is left out, and contexts
/// start over at 300,000 tokens, near the 95th percentile of its prompts: the source has longer windows, and
/// compactions.
fn agentic() -> SessionModel {
    SessionModel {
        turns: Turns::new(64.9, 1e3),
        first: QuantileCurve(&[
            (0.0, 6_343),
            (0.01, 9_691),
            (0.05, 12_563),
            (0.1, 15_171),
            (0.25, 18_279),
            (0.5, 21_410),
            (0.75, 93_181),
            (0.9, 208_858),
            (0.95, 323_452),
            (0.99, 538_710),
            (1.0, 720_472),
        ]),
        growth: QuantileCurve(&[
            (0.0, 1),
            (0.1, 1),
            (0.25, 45),
            (0.5, 282),
            (0.75, 1_016),
            (0.9, 2_881),
            (0.95, 5_655),
            (0.99, 16_208),
            (1.0, 16_208),
        ]),
        output: QuantileCurve(&[
            (0.0, 1),
            (0.01, 57),
            (0.05, 88),
            (0.1, 106),
            (0.25, 140),
            (0.5, 218),
            (0.75, 432),
            (0.9, 877),
            (0.95, 1_492),
            (0.99, 3_743),
            (0.999, 7_787),
            (1.0, 18_195),
        ]),
        think_ms: QuantileCurve(&[
            (0.0, 500),
            (0.01, 1_000),
            (0.05, 3_000),
            (0.1, 4_000),
            (0.25, 5_000),
            (0.5, 10_000),
            (0.75, 37_000),
            (0.9, 181_000),
            (0.95, 480_000),
            (0.99, 2_896_000),
            (0.999, 16_873_000),
            (1.0, 77_360_000),
        ]),
        system_tokens: 15_104,
        system_prompts: 118,
        prompt_tokens_max: 300_000,
    }
}

/// The 28,257 arXiv summaries of Vidur, which share no prefix.
fn batch() -> SessionModel {
    SessionModel {
        turns: Turns::new(1.0, 2.0),
        first: QuantileCurve(&[
            (0.0, 1),
            (0.01, 73),
            (0.05, 747),
            (0.1, 1_242),
            (0.25, 1_986),
            (0.5, 2_730),
            (0.75, 3_370),
            (0.9, 3_702),
            (0.95, 3_813),
            (0.99, 3_934),
            (1.0, 4_054),
        ]),
        growth: QuantileCurve(&[(0.0, 1), (1.0, 1)]),
        output: QuantileCurve(&[
            (0.0, 5),
            (0.01, 36),
            (0.05, 60),
            (0.1, 78),
            (0.25, 115),
            (0.5, 167),
            (0.75, 242),
            (0.9, 372),
            (0.95, 737),
            (0.99, 3_273),
            (0.999, 3_845),
            (1.0, 4_056),
        ]),
        think_ms: QuantileCurve(&[(0.0, 1_000), (1.0, 1_000)]),
        system_tokens: 0,
        system_prompts: 0,
        prompt_tokens_max: 4_096,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_quantiles_and_the_mean() {
        let lengths = conversation().first;
        let mut random = Stream::new(1);
        let mut draws: Vec<u32> = (0..100_000).map(|_| lengths.draw(&mut random)).collect();
        draws.sort_unstable();
        for (p, expected) in [(0.25, 1_336.0), (0.5, 5_264.0), (0.9, 25_561.0), (0.99, 89_869.0)] {
            let found = f64::from(draws[(p * 1e5) as usize]);
            assert!((found / expected - 1.0).abs() < 0.05, "{p}: {found}");
        }
        let mean = draws.iter().map(|&draw| f64::from(draw)).sum::<f64>() / 1e5;
        assert!((mean / lengths.mean() - 1.0).abs() < 0.02, "{mean}");
        assert!(draws[0] >= 891 && draws[99_999] <= 126_195);
    }

    #[test]
    fn turns_have_their_mean_and_go_on_as_in_the_trace() {
        let turns = conversation().turns;
        for (turn, published) in [(1, 0.307), (2, 0.419), (3, 0.510), (4, 0.587)] {
            assert!((turns.go_on(turn) - published).abs() < 0.03, "{turn}: {}", turns.go_on(turn));
        }
        for turns in [turns, Turns::new(65.0, 1e3), Turns::new(1.0, 2.0)] {
            let mut alive = 1.0;
            let mean: f64 = (1..1_000_000)
                .map(|turn| {
                    let here = alive;
                    alive *= turns.go_on(turn);
                    here
                })
                .sum();
            assert!((mean / turns.mean() - 1.0).abs() < 0.01, "{mean}");
        }
    }
}
