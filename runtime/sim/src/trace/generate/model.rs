//! Lengths, turns and think times of sessions, with the sources of their numbers.

use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::Stream;

/// Shares of a distribution at which sources state its values.
const SHARES: [f64; 12] = [0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0];

/// A distribution given by its quantile function at the shares 0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9,
/// 0.95, 0.99, 0.999 and 1; it is geometric between them. 0 stands for a value that the source does not
/// state; the first and the last are stated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantileCurve(pub [u32; 12]);

impl QuantileCurve {
    /// Draws one value, at least 1.
    pub(super) fn draw(self, random: &mut Stream) -> u32 {
        let share = random.next_unit();
        let above = self.points().position(|(p, _)| p > share).unwrap_or(usize::MAX);
        let mut around = self.points().skip(above.saturating_sub(1));
        let (Some((p0, v0)), Some((p1, v1))) = (around.next(), around.next()) else { return self.0[11] };
        to_u32((v0 * (v1 / v0).powf((share - p0) / (p1 - p0))).round())
    }

    /// The mean of the distribution.
    pub fn mean(self) -> f64 {
        let pieces = self.points().zip(self.points().skip(1)).map(|((p0, v0), (p1, v1))| {
            // The logarithmic mean is that of a geometric piece.
            let mean = if v0 == v1 { v0 } else { (v1 - v0) / (v1 / v0).ln() };
            (p1 - p0) * mean
        });
        pieces.sum()
    }

    /// The stated shares and values.
    fn points(self) -> impl Iterator<Item = (f64, f64)> {
        SHARES.into_iter().zip(self.0).filter(|(_, value)| *value > 0).map(|(p, value)| (p, value.into()))
    }
}

/// The number of turns of sessions. Each session's probability of continuing is Beta distributed over the
/// sessions, so that sessions that continued are likely to continue (beta-geometric).
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

    /// The statistics of this kind of load, all measured on published traces (docs/reference/traces.md).
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
        first: QuantileCurve([891, 0, 897, 905, 1_336, 5_264, 13_056, 25_561, 38_538, 89_869, 0, 126_195]),
        growth: QuantileCurve([1, 0, 0, 1, 7, 23, 425, 4_267, 7_046, 17_091, 0, 91_467]),
        output: QuantileCurve([1, 3, 10, 24, 156, 350, 472, 597, 698, 1_120, 0, 2_000]),
        think_ms: QuantileCurve([
            1_000, 0, 21_000, 33_000, 57_000, 114_000, 255_000, 474_000, 609_000, 1_473_000, 0, 3_021_000,
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
        first: QuantileCurve([
            6_343, 9_691, 12_563, 15_171, 18_279, 21_410, 93_181, 208_858, 323_452, 538_710, 0, 720_472,
        ]),
        growth: QuantileCurve([1, 0, 0, 1, 45, 282, 1_016, 2_881, 5_655, 16_208, 0, 16_208]),
        output: QuantileCurve([1, 57, 88, 106, 140, 218, 432, 877, 1_492, 3_743, 7_787, 18_195]),
        think_ms: QuantileCurve([
            500, 1_000, 3_000, 4_000, 5_000, 10_000, 37_000, 181_000, 480_000, 2_896_000, 16_873_000,
            77_360_000,
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
        first: QuantileCurve([1, 73, 747, 1_242, 1_986, 2_730, 3_370, 3_702, 3_813, 3_934, 0, 4_054]),
        growth: QuantileCurve([1; 12]),
        output: QuantileCurve([5, 36, 60, 78, 115, 167, 242, 372, 737, 3_273, 3_845, 4_056]),
        think_ms: QuantileCurve([1_000; 12]),
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
