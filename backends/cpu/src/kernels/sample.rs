//! Draws a token from each row of logits; `mixfleet_hal::sample` says how.
//!
//! A worker takes a row at a time. Nothing is sorted: a row's weights are summed once, block by block, and a
//! filter's result is found among the few tokens that can matter. Loops over arrays of a fixed length are
//! vectorised by the compiler to the level's width.

use super::simd::{Simd, SimdTask};
use super::{KernelWorker, OperandSpan};
use mixfleet_hal::cast::{to_u32, to_u64, to_usize};
use mixfleet_hal::sample::{
    DRAWN_WORDS, EXP2, EXPONENT_MIN, LOG2_E, NO_TOKEN, ONE, PARAMETER_WORDS, Parameters, WHOLE, part,
    weight_of,
};
use mixfleet_hal::{DType, Error, Result};

/// Logits that are read at once.
const CHUNK: usize = 16;
/// Logits that are weighed together. The sum of this many weights is exact in f64.
const BLOCK: usize = 512;
/// The unused 32-bit value of a result.
const NAN_BITS: u32 = 0x7FC0_0000;

/// The operands and shape.
#[derive(Clone, Copy)]
pub(crate) struct SampleKernel {
    pub(crate) logits: OperandSpan,
    pub(crate) parameters: OperandSpan,
    /// Where rows' entries begin, and the entries.
    pub(crate) history: Option<[OperandSpan; 2]>,
    pub(crate) out: OperandSpan,
    pub(crate) top: Option<OperandSpan>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) entries: usize,
    pub(crate) tops: usize,
}

impl SampleKernel {
    /// Draws the rows that this worker claims.
    ///
    /// # Errors
    /// `Invalid` if a row's part of the history begins after its end.
    pub(crate) fn run(self, worker: &KernelWorker<'_>) -> Result<()> {
        let mut kept = SampleScratch::default();
        loop {
            let row = worker.claim();
            if row >= self.rows {
                return Ok(());
            }
            // SAFETY: the promise of `kernels::run`'s caller; a row is claimed by one worker.
            unsafe { worker.isa.run(RowTask { sample: self, row, kept: &mut kept }) }?;
        }
    }

    /// Returns the row's entries of the history.
    ///
    /// # Safety
    /// The operands are as `OpSig::operands` says.
    unsafe fn range(&self, row: usize) -> Result<std::ops::Range<usize>> {
        let Some([starts, _]) = self.history else { return Ok(0..0) };
        // SAFETY: there is a start for each row, and one more.
        let bounds = unsafe { [starts.u32(row), starts.u32(row + 1)] };
        let [start, end] = bounds.map(|at| (at as usize).min(self.entries));
        if start > end {
            let message = format!("sample: the history of row {row} begins at {start} and ends at {end}");
            return Err(Error::invalid(message));
        }
        Ok(start..end)
    }
}

/// A token's place in the order, best first: the lower, the better.
type Rank = u64;

#[inline(always)]
fn rank(logit: f32, id: usize) -> Rank {
    // -0 becomes 0
    let bits = (logit + 0.0).to_bits();
    let below = if bits >> 31 == 1 { bits } else { !bits & 0x7FFF_FFFF };
    u64::from(below) << 32 | id as u64
}

fn id_of(rank: Rank) -> usize {
    to_usize(rank & u64::from(u32::MAX))
}

fn logit_of(rank: Rank) -> f32 {
    let below = to_u32(rank >> 32);
    f32::from_bits(if below >> 31 == 1 { below } else { !below & 0x7FFF_FFFF })
}

/// A token that a filter may keep.
#[derive(Clone, Copy, Default)]
struct TokenCandidate {
    rank: Rank,
    weight: u64,
}

/// Memory that rows use one after the other.
#[derive(Default)]
struct SampleScratch {
    tokens: Vec<TokenCandidate>,
    /// The same tokens while they are split by weight.
    split: Vec<TokenCandidate>,
    /// Sums of the blocks' weights.
    sums: Vec<u64>,
}

/// A row of logits in memory.
#[derive(Clone, Copy)]
struct SampledLogits {
    start: *mut f32,
    cols: usize,
}

impl SampledLogits {
    /// Returns logit `id`.
    #[inline(always)]
    fn at(self, id: usize) -> f32 {
        debug_assert!(id < self.cols);
        // SAFETY: a row holds `cols` elements.
        unsafe { self.start.add(id).read_unaligned() }
    }

    #[inline(always)]
    fn set(self, id: usize, logit: f32) {
        debug_assert!(id < self.cols);
        // SAFETY: a row holds `cols` elements.
        unsafe { self.start.add(id).write_unaligned(logit) }
    }

    /// Returns `N` logits from `from` on; those past the end are -infinity.
    #[inline(always)]
    fn some<const N: usize>(self, from: usize) -> [f32; N] {
        // SAFETY: a row holds `cols` elements; the array has room for the rest of the row.
        unsafe {
            let at = self.start.add(from);
            if from + N <= self.cols {
                return at.cast::<[f32; N]>().read_unaligned();
            }
            let mut padded = [f32::NEG_INFINITY; N];
            let bytes = (self.cols - from) * size_of::<f32>();
            std::ptr::copy_nonoverlapping(at.cast::<u8>(), padded.as_mut_ptr().cast::<u8>(), bytes);
            padded
        }
    }

    /// Returns the largest logit, and whether one is NaN or +infinity.
    #[inline(always)]
    fn best(self) -> (f32, bool) {
        let (mut best, mut wrong) = ([f32::NEG_INFINITY; CHUNK], [0u32; CHUNK]);
        for from in (0..self.cols).step_by(CHUNK) {
            let x = self.some::<CHUNK>(from);
            for lane in 0..CHUNK {
                best[lane] = if x[lane] > best[lane] { x[lane] } else { best[lane] };
                wrong[lane] |= u32::from(x[lane].is_nan() | (x[lane] == f32::INFINITY));
            }
        }
        (best.into_iter().fold(f32::NEG_INFINITY, f32::max), wrong.into_iter().any(|wrong| wrong != 0))
    }

    /// Returns the first id whose logit is `wanted`.
    #[inline(always)]
    fn find(self, wanted: impl Fn(f32) -> bool) -> Option<usize> {
        for from in (0..self.cols).step_by(CHUNK) {
            let x = self.some::<CHUNK>(from);
            if x.iter().fold(false, |any, &x| any | wanted(x)) {
                return x.iter().position(|&x| wanted(x)).map(|lane| from + lane);
            }
        }
        None
    }
}

/// The weights of a row's tokens.
#[derive(Clone, Copy)]
struct TokenWeights {
    best: f32,
    scale: f32,
    /// What weighs less counts as nothing.
    least: f64,
}

impl TokenWeights {
    /// As `mixfleet_hal::sample::weight`, of a block.
    #[inline(always)]
    fn of(self, logits: &[f32; BLOCK], weights: &mut [f64; BLOCK]) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            let exponent = (logit - self.best) * self.scale;
            let whole = (exponent + 0.5).floor();
            let rest = exponent - whole;
            let [c1, c2, c3, c4, c5, c6] = EXP2;
            let power = (((((c6 * rest + c5) * rest + c4) * rest + c3) * rest + c2) * rest + c1) * rest + 1.0;
            // SAFETY: `max` gives -41 for NaN too, and no exponent is above 0.
            #[expect(clippy::manual_clamp, reason = "NaN must become a number")]
            let n: i32 = unsafe { whole.max(EXPONENT_MIN).min(0.0).to_int_unchecked() };
            let scale = f64::from_bits(u64::from((n + 1063).cast_unsigned()) << 52);
            let exact = (f64::from(power) * scale).trunc();
            *weight = if exponent > EXPONENT_MIN && exact >= self.least { exact } else { 0.0 };
        }
    }

    /// Returns the sum of a row's weights, and leaves the sums of its blocks in `sums`.
    #[inline(always)]
    fn sum(self, row: SampledLogits, sums: &mut Vec<u64>) -> u64 {
        let mut weights = [0.0; BLOCK];
        sums.clear();
        let mut total = 0;
        for from in (0..row.cols).step_by(BLOCK) {
            self.of(&row.some(from), &mut weights);
            let mut lanes = [0.0f64; CHUNK];
            for chunk in weights.as_chunks::<CHUNK>().0 {
                for lane in 0..CHUNK {
                    lanes[lane] += chunk[lane];
                }
            }
            let sum = to_u64(lanes.iter().sum::<f64>());
            sums.push(sum);
            total += sum;
        }
        total
    }

    /// Weighs the tokens of a list, and returns the sum.
    #[inline(always)]
    fn weigh(self, tokens: &mut [TokenCandidate]) -> u64 {
        let (mut logits, mut weights) = ([f32::NEG_INFINITY; BLOCK], [0.0; BLOCK]);
        let mut total = 0;
        for block in tokens.chunks_mut(BLOCK) {
            for (logit, token) in logits.iter_mut().zip(&*block) {
                *logit = logit_of(token.rank);
            }
            self.of(&logits, &mut weights);
            for (token, &weight) in block.iter_mut().zip(&weights) {
                token.weight = to_u64(weight);
                total += token.weight;
            }
        }
        total
    }
}

/// Collects the tokens whose logit is at least `least`, by id.
#[inline(always)]
fn collect(row: SampledLogits, least: f32, tokens: &mut Vec<TokenCandidate>) {
    tokens.clear();
    for from in (0..row.cols).step_by(CHUNK) {
        let x = row.some::<CHUNK>(from);
        if x.iter().fold(false, |any, &x| any | (x >= least)) {
            for (lane, &x) in x.iter().enumerate().take(row.cols - from) {
                if x >= least {
                    tokens.push(TokenCandidate { rank: rank(x, from + lane), weight: 0 });
                }
            }
        }
    }
}

/// Collects the `k` best tokens, in no order.
#[inline(always)]
fn collect_best(row: SampledLogits, k: usize, tokens: &mut Vec<TokenCandidate>) {
    if k >= row.cols {
        return collect(row, f32::NEG_INFINITY, tokens);
    }
    tokens.clear();
    // room for more than are kept, so that a selection is rare; a tie with the worst one comes too late
    let room = (2 * k).max(64) + CHUNK;
    let mut worst: Option<f32> = None;
    for from in (0..row.cols).step_by(CHUNK) {
        let x = row.some::<CHUNK>(from);
        if worst.is_some_and(|worst| !x.iter().fold(false, |any, &x| any | (x > worst))) {
            continue;
        }
        for (lane, &x) in x.iter().enumerate().take(row.cols - from) {
            if worst.is_none_or(|worst| x > worst) {
                tokens.push(TokenCandidate { rank: rank(x, from + lane), weight: 0 });
            }
        }
        if tokens.len() + CHUNK > room {
            worst = Some(logit_of(select(tokens, k)));
        }
    }
    if tokens.len() > k {
        select(tokens, k);
    }
}

/// Keeps the `k` best of more tokens, and returns the worst of them.
fn select(tokens: &mut Vec<TokenCandidate>, k: usize) -> Rank {
    let worst = tokens.select_nth_unstable_by_key(k - 1, |token| token.rank).1.rank;
    tokens.truncate(k);
    worst
}

/// Parts of the range of ranks that are summed apart.
const PARTS: usize = 256;

/// Returns the last of the shortest run of best tokens that weighs at least `target`. Each round sums the
/// weights by parts of the range of ranks, and keeps the part in which the run ends.
#[inline(always)]
fn last_of_run(tokens: &mut Vec<TokenCandidate>, target: u64) -> Rank {
    let mut missing = target;
    while tokens.len() > 32 {
        let (mut low, mut high) = (Rank::MAX, 0);
        for token in &*tokens {
            (low, high) = (low.min(token.rank), high.max(token.rank));
        }
        let bits = (Rank::BITS - (high - low).leading_zeros()).saturating_sub(PARTS.ilog2());
        let mut sums = [0u64; PARTS];
        for token in &*tokens {
            sums[to_usize((token.rank - low) >> bits) % PARTS] += token.weight;
        }
        let end = sums.iter().position(|&sum| {
            let ends = missing <= sum;
            missing -= if ends { 0 } else { sum };
            ends
        });
        let end = end.unwrap_or(PARTS - 1) as u64;
        tokens.retain(|token| (token.rank - low) >> bits == end);
    }
    tokens.sort_unstable_by_key(|token| token.rank);
    let last = tokens.iter().find(|token| {
        let ends = missing <= token.weight;
        missing -= if ends { 0 } else { token.weight };
        ends
    });
    last.or(tokens.last()).map_or(Rank::MAX, |token| token.rank)
}

struct RowTask<'a> {
    sample: SampleKernel,
    row: usize,
    kept: &'a mut SampleScratch,
}

impl SimdTask for RowTask<'_> {
    type Out = Result<()>;
    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<()> {
        let RowTask { sample, row: r, kept } = self;
        let SampleKernel { cols, tops, .. } = sample;
        let row = SampledLogits { start: sample.logits.at(DType::F32, r * cols).cast(), cols };
        let parameters = sample.parameters.at(DType::U32, r * PARAMETER_WORDS as usize);
        // SAFETY: there are parameters for each row.
        let parameters = unsafe { parameters.cast::<Parameters>().read_unaligned() };
        let (mut best, mut wrong) = row.best();
        let raw_best = best + 0.0; // -0 becomes 0

        let mut sum = 0;
        let mut listed = Vec::new();
        if parameters.logprobs & 1 == 1 {
            sum = TokenWeights { best, scale: LOG2_E, least: 0.0 }.sum(row, &mut kept.sums);
            if tops > 0 {
                collect_best(row, tops, &mut kept.tokens);
                listed.extend(kept.tokens.iter().map(|token| token.rank));
                listed.sort_unstable();
            }
        }
        // SAFETY: the promise of `kernels::run`'s caller.
        let entries = unsafe { sample.range(r)? };
        // SAFETY: as above; no other row has these entries.
        unsafe { penalise(&sample, entries.clone(), row, &parameters) };
        if !entries.is_empty() {
            (best, wrong) = row.best();
        }

        let mut drawn = [NO_TOKEN, f32::NEG_INFINITY.to_bits(), 0, 0];
        if wrong {
            let id = row.find(|x| x.is_nan() | (x == f32::INFINITY)).unwrap_or(0);
            drawn = [to_u32(id), NAN_BITS, 0, 0];
            listed.clear();
        } else if best == f32::NEG_INFINITY {
            listed.clear();
        } else {
            let id = draw(row, &parameters, best, kept);
            // SAFETY: as above.
            let raw = unsafe { before_penalties(&sample, entries, id) }.unwrap_or_else(|| row.at(id));
            let [low, high] = [sum & u64::from(u32::MAX), sum >> 32].map(to_u32);
            drawn = [to_u32(id), below(raw, raw_best), low, high];
        }
        // SAFETY: there are results for each row.
        unsafe {
            let out = sample.out.at(DType::U32, r * DRAWN_WORDS as usize);
            out.cast::<[u32; DRAWN_WORDS as usize]>().write_unaligned(drawn);
            for (i, top) in sample.top.iter().flat_map(|top| (0..tops).map(move |i| (i, top))) {
                let none = [NO_TOKEN, f32::NEG_INFINITY.to_bits()];
                let entry = listed
                    .get(i)
                    .map_or(none, |&rank| [to_u32(id_of(rank)), below(logit_of(rank), raw_best)]);
                top.at(DType::U32, (r * tops + i) * 2).cast::<[u32; 2]>().write_unaligned(entry);
            }
        }
        Ok(())
    }
}

/// Returns the bits of a logit's distance to the best one.
fn below(logit: f32, best: f32) -> u32 {
    // + 0: of equal zeros too
    (logit - best + 0.0).to_bits()
}

/// Applies the penalties of `entries` to a row, and leaves the logits as they were in their place.
///
/// # Safety
/// The operands are as `OpSig::operands` says, and no one else uses the row and the entries.
#[inline(always)]
unsafe fn penalise(
    sample: &SampleKernel,
    entries: std::ops::Range<usize>,
    row: SampledLogits,
    parameters: &Parameters,
) {
    let Some([_, history]) = sample.history else { return };
    for entry in entries {
        let word = history.at(DType::U32, 2 * entry).cast::<[u32; 2]>();
        // SAFETY: the caller's promise.
        let [id, less] = unsafe { word.read_unaligned() };
        if id as usize >= row.cols {
            continue;
        }
        let logit = row.at(id as usize);
        let factor = if logit > 0.0 { parameters.repetition_inverse } else { parameters.repetition };
        row.set(id as usize, logit * factor - f32::from_bits(less));
        // SAFETY: the caller's promise.
        unsafe { word.write_unaligned([id, logit.to_bits()]) };
    }
}

/// Returns the logit of a token before [`penalise`], if that changed it.
///
/// # Safety
/// As for [`penalise`].
unsafe fn before_penalties(sample: &SampleKernel, entries: std::ops::Range<usize>, id: usize) -> Option<f32> {
    let [_, history] = sample.history?;
    // SAFETY: the caller's promise.
    let mut words = entries.map(|entry| unsafe { [history.u32(2 * entry), history.u32(2 * entry + 1)] });
    words.find(|word| word[0] as usize == id).map(|word| f32::from_bits(word[1]))
}

/// Draws from a row whose best logit is `best`.
#[inline(always)]
fn draw(row: SampledLogits, parameters: &Parameters, best: f32, kept: &mut SampleScratch) -> usize {
    let Parameters { scale, top_k, top_p, uniform, .. } = *parameters;
    if scale == 0.0 {
        return row.find(|x| x == best).unwrap_or(0);
    }
    let least = weight_of(parameters.min_p).min(ONE);
    let weights = TokenWeights { best, scale, least: 0.0 };
    let top_k = if top_k == 0 { row.cols } else { (top_k as usize).min(row.cols) };
    if top_k == row.cols && top_p == WHOLE {
        return draw_from_all(row, TokenWeights { least: least as f64, ..weights }, uniform, &mut kept.sums);
    }
    let SampleScratch { tokens, split, sums } = kept;
    let mut last = Rank::MAX;
    if top_k < row.cols {
        collect_best(row, top_k, tokens);
        tokens.sort_unstable_by_key(|token| id_of(token.rank));
        let sum = weights.weigh(tokens);
        if top_p != WHOLE {
            split.clone_from(tokens);
            last = last_of_run(split, part(sum, top_p).max(1));
        }
    } else {
        let target = collect_run(row, weights, top_p, tokens, sums);
        split.clone_from(tokens);
        last = last_of_run(split, target);
    }
    let stays = |token: &&TokenCandidate| token.rank <= last && token.weight >= least;
    let target = part(tokens.iter().filter(stays).map(|token| token.weight).sum(), uniform);
    let mut sum = 0;
    let passes = tokens.iter().filter(stays).find(|token| {
        sum += token.weight;
        sum > target
    });
    passes.map_or(0, |token| id_of(token.rank))
}

/// Draws from all tokens that weigh something.
#[inline(always)]
fn draw_from_all(row: SampledLogits, weights: TokenWeights, uniform: u32, sums: &mut Vec<u64>) -> usize {
    let target = part(weights.sum(row, sums), uniform);
    let mut sum = 0;
    for (block, &more) in sums.iter().enumerate() {
        if sum + more <= target {
            sum += more;
            continue;
        }
        let mut each = [0.0; BLOCK];
        weights.of(&row.some(block * BLOCK), &mut each);
        let passes = each.iter().position(|&weight| {
            sum += to_u64(weight);
            sum > target
        });
        return block * BLOCK + passes.unwrap_or(0);
    }
    0
}

/// Collects the best tokens, by id, including those of `top_p`, and returns the least weight of these.
#[inline(always)]
fn collect_run(
    row: SampledLogits,
    weights: TokenWeights,
    top_p: u32,
    tokens: &mut Vec<TokenCandidate>,
    sums: &mut Vec<u64>,
) -> u64 {
    let total = weights.sum(row, sums);
    let target = part(total, top_p).max(1);
    // Tokens below this weight weigh less than all the others together, so that the run ends before them. The
    // exact sum decides, regardless of rounding in the logit.
    let lightest = (total - target) as f64 / row.cols as f64;
    let least = f64::from(weights.best) + (lightest / (2 * ONE) as f64).log2() / f64::from(weights.scale);
    collect(row, mixfleet_hal::cast::to_f32(least), tokens);
    if weights.weigh(tokens) < target {
        collect(row, f32::NEG_INFINITY, tokens);
        weights.weigh(tokens);
    }
    target
}
