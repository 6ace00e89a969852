//! Chunked pipeline parallelism (Mooncake, FAST'25, section 5.1): an instance whose devices form stages, each
//! with an equal share of the layers. A long prompt runs through them in chunks, several of which are in
//! flight at a time.
//!
//! Chunks that pass in order through stages with the same time c_i for chunk i are a permutation flow shop of
//! identical machines: the last chunk leaves the last stage after `sum c_i + (stages - 1) max c_i`. A hop of
//! activations to the next stage overlaps with neighbouring chunks, except for the hops of the bottleneck
//! chunk:
//!
//! ```text
//! prefill = sum c_i + (stages - 1) max (c_i + h_i)
//! ```
//!
//! with the hop h_i of chunk i. This equals the simulated flow shop as long as no hop takes longer than its
//! chunk's computation; otherwise the longer of the two counts in the sum, and the formula is an upper bound.
//!
//! Decoding sequences are divided into as many groups as there are stages. The groups follow each other
//! through the stages, each in another one: a group is back at the first stage when all others have passed it
//! and its tokens have passed all hops. Chunks of prompts go with the groups, and chunks beyond the number of
//! groups follow these. A step of all groups takes
//!
//! ```text
//! step = sum c_i + (stages - 1) max h_i
//! ```
//!
//! in which the next chunks enter while the last ones leave: only where nothing decodes does the end of a
//! prompt wait until all is out.
//!
//! The stages of this runtime drain instead (`step_tokens`): the next step begins when all is out. A step
//! then takes what a prompt of its chunks takes, and as many groups decode as let it end first, which is one
//! until sequences take longer than reading the weights again.

use super::mixture::{share, share_keys};
use super::{CostModel, LinkCost, ModelShape, Prefill};
use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Consecutive pipeline stages with equal shares of a model's layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineCost {
    /// The cost of steps if one stage had all layers.
    pub whole: CostModel,
    /// Number of stages, at least 1. Each has the same share of the layers; the work of only the first or the
    /// last counts as spread over all.
    pub stages: u32,
    /// Prompt tokens of a chunk, at least 1.
    pub chunk_tokens: u32,
    /// Bytes of a token's activations between layers.
    pub hop: LinkCost,
    /// Activations of a token between layers.
    pub bytes_per_token: f64,
    /// The most prompt tokens of a step, if the next step waits until a step is out of the last stage.
    #[serde(default)]
    pub step_tokens: Option<u32>,
}

/// How a step is cut into micro-batches, which follow each other through stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The most prompt tokens of a micro-batch, at least 1.
    pub chunk_tokens: u32,
    /// The most micro-batches over which the sequences that decode are divided, at least 1.
    pub groups: u32,
}

impl Pieces {
    /// All of a step as one.
    pub const ONE: Pieces = Pieces { chunk_tokens: u32::MAX, groups: 1 };

    /// The pieces of each micro-batch of a step whose parts have these numbers of new tokens, decodes first:
    /// numbers of parts, with ranges of their tokens.
    pub fn of(self, lengths: &[u32]) -> Vec<Vec<(usize, Range<u32>)>> {
        let decodes = lengths.iter().take_while(|tokens| **tokens == 1).count();
        let groups = (self.groups.max(1) as usize).min(decodes);
        let mut batches: Vec<Vec<(usize, Range<u32>)>> = vec![Vec::new(); groups];
        for which in 0..decodes {
            // the first ones have one more if they are not even
            batches[which * groups / decodes].push((which, 0..1));
        }
        for (at, chunk) in self.chunks(&lengths[decodes..]).into_iter().enumerate() {
            let chunk = chunk.into_iter().map(|(which, piece)| (decodes + which, piece));
            match batches.get_mut(at) {
                Some(batch) => batch.extend(chunk),
                None => batches.push(chunk.collect()),
            }
        }
        batches
    }

    /// Prompts in chunks of equal rows, across prompt boundaries.
    fn chunks(self, lengths: &[u32]) -> Vec<Vec<(usize, Range<u32>)>> {
        let (mut chunks, mut room) = (Vec::<Vec<_>>::new(), 0);
        for (which, &tokens) in lengths.iter().enumerate() {
            let mut done = 0;
            while done < tokens {
                if room == 0 {
                    chunks.push(Vec::new());
                    room = self.chunk_tokens.max(1);
                }
                let more = room.min(tokens - done);
                chunks.last_mut().expect("one has room").push((which, done..done + more));
                (done, room) = (done + more, room - more);
            }
        }
        chunks
    }
}

impl PipelineCost {
    /// Prompt tokens of a chunk, where steps have as many: enough rows to keep a device busy, and few enough
    /// to have several chunks in flight. For prompts of 32768 tokens and more, on 8 stages of A100s, H100s or
    /// L40Ss, 1024 is within 6 % of the best of 512, 1024 and 2048.
    pub const CHUNK_TOKENS: u32 = 1024;

    /// Stages of a model that send each other the activations of their rows over `network`, from the cost of
    /// steps if one stage had all layers.
    pub fn of(
        whole: CostModel,
        stages: u32,
        chunk_tokens: u32,
        (shape, network): (&ModelShape, BytesPerSecond),
    ) -> Self {
        let hop = LinkCost { seconds_per_byte: 1.0 / network.0, ..LinkCost::default() };
        let bytes_per_token = f64::from(shape.hidden) * shape.activation.size_bytes() as f64;
        PipelineCost { whole, stages, chunk_tokens, hop, bytes_per_token, step_tokens: None }
    }

    /// Time to compute a prompt's rest alone; see [`CostModel::prefill_s`].
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let step_tokens = self.step_tokens.unwrap_or(new_tokens).max(1);
        let step = |index: u32| {
            let done = index * step_tokens;
            let tokens = step_tokens.min(new_tokens - done);
            let last = done + tokens == new_tokens;
            through(
                self.stages,
                self.times(&[Prefill { context: context_before + done, tokens, last }], 0, 0, 0),
            )
        };
        (0..new_tokens.div_ceil(step_tokens)).map(step).sum()
    }

    /// Time of a step of chunks and groups of sequences; see [`CostModel::step_s`].
    pub(super) fn step_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        let stages = self.stages.max(1);
        if self.step_tokens.is_some() {
            let groups = self.groups(parts, batch, kv_tokens);
            return through(stages, self.times(parts, groups, batch, kv_tokens));
        }
        let (mut sum, mut longest) = (Seconds::ZERO, [Seconds::ZERO; 2]);
        for (stage, hop) in self.times(parts, stages, batch, kv_tokens) {
            sum += if stages > 1 { stage.max(hop) } else { stage };
            longest = [longest[0].max(hop), longest[1].max(stage + hop)];
        }
        let waits = match batch {
            0 if parts.iter().any(|part| part.last) => longest[1],
            0 => Seconds::ZERO,
            _ => longest[0],
        };
        sum + waits * f64::from(stages - 1)
    }

    /// The number of groups of sequences that a step should decode in, in which it takes the least time.
    pub(super) fn groups(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> u32 {
        let stages = self.stages.max(1);
        if self.step_tokens.is_none() {
            return stages;
        }
        let time = |groups: u32| through(stages, self.times(parts, groups, batch, kv_tokens)).0;
        (2..=stages.min(batch))
            .fold((1, time(1)), |best, groups| {
                let seconds = time(groups);
                if seconds < best.1 { (groups, seconds) } else { best }
            })
            .0
    }

    /// Time of the step's chunks, and of this many groups of sequences, in a stage and on a hop.
    fn times(
        &self,
        parts: &[Prefill],
        groups: u32,
        batch: u32,
        kv_tokens: u64,
    ) -> impl Iterator<Item = (Seconds, Seconds)> {
        let group = (share(batch, groups), share_keys(kv_tokens, batch, groups));
        let groups = if batch == 0 { 0 } else { groups as usize };
        let chunks = self.chunks(parts);
        (0..groups.max(chunks.len())).map(move |at| {
            let chunk = chunks.get(at).map_or(&[][..], |chunk| chunk);
            let (sequences, keys) = if at < groups { group } else { (0, 0) };
            let rows = chunk.iter().map(|part| part.tokens).sum::<u32>() + sequences;
            (self.stage_s(chunk, sequences, keys), self.hop_s(rows))
        })
    }

    /// The pieces of each chunk.
    fn chunks(&self, parts: &[Prefill]) -> Vec<Vec<Prefill>> {
        let lengths: Vec<u32> = parts.iter().map(|part| part.tokens).collect();
        let piece = |(which, Range { start, end }): (usize, Range<u32>)| {
            let Prefill { context, tokens, last } = parts[which];
            Prefill { context: context + start, tokens: end - start, last: last && end == tokens }
        };
        let chunks = Pieces { chunk_tokens: self.chunk_tokens, groups: 1 }.chunks(&lengths).into_iter();
        chunks.map(|chunk| chunk.into_iter().map(piece).collect()).collect()
    }

    fn stage_s(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> Seconds {
        self.whole.step_s(parts, batch, kv_tokens) * (1.0 / f64::from(self.stages.max(1)))
    }

    fn hop_s(&self, rows: u32) -> Seconds {
        self.hop.time(Bytes(f64::from(rows) * self.bytes_per_token))
    }
}

/// The time at which the last chunk is done, from the chunks' times in a stage and on a hop.
fn through(stages: u32, chunks: impl Iterator<Item = (Seconds, Seconds)>) -> Seconds {
    let (mut sum, mut longest) = (Seconds::ZERO, Seconds::ZERO);
    for (stage, hop) in chunks {
        sum += if stages > 1 { stage.max(hop) } else { stage };
        longest = longest.max(stage + hop);
    }
    sum + longest * f64::from(stages.max(1) - 1)
}

#[cfg(test)]
mod tests {
    use super::super::{Coefficients, DecodeCoefficients, PrefillCoefficients};
    use super::*;
    use proptest::prelude::*;

    /// A simulation in which every stage and every hop serves one chunk after the other.
    fn simulated(stages: u32, chunks: &[(f64, f64)]) -> f64 {
        let mut ready = vec![0.0; chunks.len()];
        for machine in 0..2 * stages - 1 {
            let mut free = 0.0f64;
            for (at, &(stage, hop)) in ready.iter_mut().zip(chunks) {
                free = free.max(*at) + if machine % 2 == 0 { stage } else { hop };
                *at = free;
            }
        }
        ready.last().copied().unwrap_or(0.0)
    }

    fn formula(stages: u32, chunks: &[(f64, f64)]) -> f64 {
        through(stages, chunks.iter().map(|&(stage, hop)| (Seconds(stage), Seconds(hop)))).0
    }

    fn cost(stages: u32, seconds_per_byte: f64) -> PipelineCost {
        let prefill_s = PrefillCoefficients { overhead: 0.0, per_token: 1e-4, per_token_squared: 1e-9 };
        let decode_s = DecodeCoefficients { base: 0.02, per_sequence: 1e-4, per_kv_token: 0.0 };
        PipelineCost {
            whole: CostModel::Coefficients(Coefficients { prefill_s, decode_s }),
            stages,
            chunk_tokens: 1000,
            hop: LinkCost { seconds_per_byte, ..LinkCost::default() },
            bytes_per_token: 1e4,
            step_tokens: None,
        }
    }

    proptest! {
        #[test]
        fn the_formula_is_the_flow_shop_while_hops_are_short(
            stages in 1u32..9,
            chunks in proptest::collection::vec((0.1..2.0, 0.0..1.0f64), 1..12),
        ) {
            let chunks: Vec<(f64, f64)> = chunks.into_iter().map(|(stage, part): (f64, f64)| (stage, stage * part)).collect();
            let (formula, simulated) = (formula(stages, &chunks), simulated(stages, &chunks));
            prop_assert!((formula - simulated).abs() < 1e-9, "{formula} {simulated}");
        }

        #[test]
        fn with_long_hops_it_is_an_upper_bound_and_at_most_twice_as_much(
            stages in 2u32..9,
            chunks in proptest::collection::vec((0.1..2.0, 0.0..4.0f64), 1..12),
        ) {
            let (formula, simulated) = (formula(stages, &chunks), simulated(stages, &chunks));
            prop_assert!(formula >= simulated - 1e-9, "{formula} {simulated}");
            prop_assert!(formula <= simulated * 2.0 + 1e-9, "{formula} {simulated}");
        }
    }

    #[test]
    fn four_stages_take_nearly_a_quarter_of_a_long_prompt_and_all_of_a_short_one() {
        let (one, four) = (cost(1, 0.0), cost(4, 0.0));
        let whole = CostModel::prefill_s(&one.whole, 0, 100_000);
        assert!((one.prefill_s(0, 100_000) / whole - 1.0).abs() < 1e-9);
        let speedup = whole / four.prefill_s(0, 100_000);
        assert!((3.7..4.0).contains(&speedup), "{speedup}");
        assert!((four.prefill_s(0, 1000) / CostModel::prefill_s(&one.whole, 0, 1000) - 1.0).abs() < 1e-9);
    }

    /// The time of a round in the long run, in which groups pass all stages and begin again, each stage
    /// serving one group after the other.
    fn round(stages: usize, stage: f64, hop: f64) -> f64 {
        let (mut free, mut at) = (vec![0.0f64; stages], vec![0.0f64; stages]);
        let rounds = 100;
        let mut ends = Vec::new();
        for _ in 0..rounds {
            // by arrival: no group overtakes another
            for ready in &mut at {
                for (number, free) in free.iter_mut().enumerate() {
                    *free = free.max(*ready) + stage;
                    *ready = *free + if number + 1 < stages { hop } else { 0.0 };
                }
            }
            ends.push(at[0]);
        }
        (ends[rounds - 1] - ends[0]) / (rounds - 1) as f64
    }

    proptest! {
        #[test]
        fn a_decode_step_is_the_round_of_its_groups(
            stages in 1u32..9, batch in 1u32..200, keys in 0u64..100_000, seconds_per_byte in 0.0..2e-8f64,
        ) {
            let cost = cost(stages, seconds_per_byte);
            let group = batch.div_ceil(stages);
            let stage = 0.02 + 1e-4 * f64::from(group);
            let (stage, hop) = (stage / f64::from(stages), f64::from(group) * 1e4 * seconds_per_byte);
            let (step, round) = (cost.step_s(&[], batch, keys).0, round(stages as usize, stage, hop));
            prop_assert!(step >= round - 1e-9, "{step} {round}");
            prop_assert!(stages > 1 && hop > stage || (step - round).abs() < 1e-9, "{step} {round}");
        }
    }

    #[test]
    fn hops_show_once_per_stage_and_a_decode_step_passes_all() {
        // 1000 tokens of 10 kB at 1 GB/s take 10 ms.
        let more = cost(4, 1e-9).prefill_s(0, 8000) - cost(4, 0.0).prefill_s(0, 8000);
        assert!((more.0 - 0.03).abs() < 1e-9, "{more:?}");
        // three of ten sequences in the largest group
        let model = CostModel::Pipeline(cost(4, 1e-9).into());
        assert!((model.decode_step_s(10, 1000).0 - (0.0203 + 3.0 * 3.0 * 1e4 * 1e-9)).abs() < 1e-9);
        assert_eq!(model.prefill_s(50, 0), Seconds::ZERO);
    }

    #[test]
    fn steps_of_a_prompt_take_what_the_prompt_takes_and_it_waits_for_its_end_alone() {
        let cost = cost(4, 1e-9);
        let piece = |context: u32, tokens: u32, last: bool| Prefill { context, tokens, last };
        let whole = cost.prefill_s(0, 8000).0;
        let step = |parts: &[Prefill]| cost.step_s(parts, 0, 0).0;
        assert!((step(&[piece(0, 8000, true)]) - whole).abs() < 1e-9);
        // the chunks of the next step follow while those of this one are in later stages
        let steps = step(&[piece(0, 3000, false)]) + step(&[piece(3000, 5000, true)]);
        assert!((steps - whole).abs() < 1e-9, "{steps} {whole}");
        // two short prompts make one chunk
        let one = step(&[piece(0, 1000, true)]);
        assert!(step(&[piece(0, 500, true), piece(0, 500, true)]) <= one);
        // a chunk takes a stage's time beside the groups, and its hops
        let beside = cost.step_s(&[piece(0, 1000, true)], 40, 1000).0;
        let alone = cost.step_s(&[], 40, 1000).0;
        assert!(beside > alone && beside < alone + 0.26 * 0.1 + 0.03, "{beside} {alone} {one}");
    }

    #[test]
    fn pieces_are_every_token_once_and_decodes_go_first_in_even_groups() {
        let of = |chunk_tokens, groups, lengths: &[u32]| Pieces { chunk_tokens, groups }.of(lengths);
        assert_eq!(of(4, 1, &[6, 3]), [vec![(0, 0..4)], vec![(0, 4..6), (1, 0..2)], vec![(1, 2..3)]]);
        let beside = of(4, 2, &[1, 1, 1, 9]);
        let expected = [vec![(0, 0..1), (1, 0..1), (3, 0..4)], vec![(2, 0..1), (3, 4..8)], vec![(3, 8..9)]];
        assert_eq!(beside, expected);
        assert_eq!(of(4, 3, &[1, 1]).len(), 2, "no group is empty");
        assert_eq!(of(4, 2, &[]), Vec::<Vec<(usize, Range<u32>)>>::new());
    }

    #[test]
    fn stages_that_drain_pay_for_it_in_every_step_and_decode_in_groups_only_where_that_is_shorter() {
        let drained = |step_tokens| PipelineCost { step_tokens, ..cost(2, 0.0) };
        let (never, one, four) = (drained(None), drained(Some(8000)), drained(Some(2000)));
        assert_eq!(one.prefill_s(0, 8000), never.prefill_s(0, 8000));
        let more = four.prefill_s(0, 8000) - one.prefill_s(0, 8000);
        assert!(more.0 > 0.0, "{more:?}");
        let last = |context, tokens| Prefill { context, tokens, last: true };
        assert_eq!(one.step_s(&[last(0, 8000)], 0, 0), one.prefill_s(0, 8000));
        // 20 ms to read the weights, 0.1 ms for each sequence
        let decode = |batch| (one.groups(&[], batch, 0), one.step_s(&[], batch, 0).0);
        let (few, many) = (decode(100), decode(1000));
        assert_eq!((few.0, many.0), (1, 2));
        assert!((few.1 - 0.03).abs() < 1e-12 && (many.1 - 1.5 * 0.07).abs() < 1e-12, "{few:?} {many:?}");
        assert_eq!(one.groups(&[], 1, 0), 1);
    }
}
