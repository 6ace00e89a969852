//! Synthetic requests: sessions with turns, after published statistics.
//!
//! Sessions start by a renewal process ([`Arrivals`]). A session's first prompt begins with a shared system
//! prompt; each further prompt is the previous one, its answer, and some new tokens, after a think time. A
//! context that would exceed its maximum starts over, as agents do that compact theirs. Numbers and their
//! sources: [`Preset::model`].

mod arrivals;
mod model;
mod write;

pub use arrivals::Arrivals;
pub use model::{Preset, QuantileCurve, SessionModel, Turns};
pub use write::{Output, write_line};

use super::{ConversationTurn, Request, TIME_S_MAX, TOKENS_MAX, key_of, mooncake::BLOCK_TOKENS};
use arrivals::Starts;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::{Stream, bits};
use mixfleet_hal::units::Seconds;
use std::collections::BTreeMap;

/// Time per token of an answer: the median in the agentic trace (docs/reference/traces.md). Only the arrival
/// of the next turn depends on it.
const ANSWER_S_PER_TOKEN: f64 = 0.0257;

/// Mean number of sessions that pass before the first request is kept, so that the rate is steady from the
/// start.
const WARM_UP_SESSIONS: f64 = 3.0;

/// Minimum requests per second: one in two weeks.
const RATE_MIN: f64 = 1e-6;
/// Maximum requests per second, with which a trace of some hours still fits on a disk.
const RATE_MAX: f64 = 1e4;
/// Maximum requests before the first that is kept: half a minute of work.
const REQUESTS_BEFORE_MAX: f64 = 3e7;

/// Options of a generated trace.
#[derive(Clone, Copy, Debug)]
pub struct GenerateOptions {
    /// Number of requests in all.
    pub requests: u64,
    /// Requests per second in the long run.
    pub rate: f64,
    /// Seed; equal seeds give equal requests.
    pub seed: u64,
    /// Arrival process of sessions.
    pub arrivals: Arrivals,
}

impl GenerateOptions {
    /// Checks the options.
    ///
    /// # Errors
    /// When a rate or the trace's length is unrealistic.
    fn check(&self) -> Result<(), GenerateError> {
        if !(RATE_MIN..=RATE_MAX).contains(&self.rate) {
            return Err(GenerateError::Rate(self.rate));
        }
        let duration_s = self.requests as f64 / self.rate;
        if duration_s > TIME_S_MAX { Err(GenerateError::Duration(duration_s)) } else { Ok(()) }
    }

    /// A load of the same duration with fewer requests: how much of a session a trace contains depends only
    /// on its duration.
    fn pilot(self) -> Self {
        const REQUESTS: u64 = 20_000;
        let requests = self.requests.min(REQUESTS);
        GenerateOptions { requests, rate: self.rate * requests as f64 / self.requests.max(1) as f64, ..self }
    }
}

/// An error in the options.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerateError {
    /// The rate is not a positive number.
    #[error("{0:e} requests per second: the rate must lie between {RATE_MIN:e} and {RATE_MAX:e}")]
    Rate(f64),
    /// This many requests at this rate take too long.
    #[error(
        "the trace would last {0:e} s, and {TIME_S_MAX:e} s are the longest: fewer requests, or a higher rate"
    )]
    Duration(f64),
    /// Reaching the trace's start takes too long.
    #[error(
        "{0:e} requests of sessions that began before the trace would be played first, and {REQUESTS_BEFORE_MAX:e} \
         are the most: a lower rate"
    )]
    Before(f64),
    /// The hit rate is not between 0 and 1.
    #[error("a hit rate of {0}: it must lie between 0 and 1")]
    Share(f64),
    /// No number of turns gives this hit rate.
    #[error(
        "a hit rate of {target} is out of reach: in a trace of {duration_s:.0} s, sessions of {turns} turns in \
         the mean give {reached:.3}; a longer trace (more requests, a lower rate) has more of each session"
    )]
    Hits {
        /// The requested hit rate.
        target: f64,
        /// Duration of the trace.
        duration_s: f64,
        /// The number of turns that comes closest.
        turns: f64,
        /// The hit rate that it gives.
        reached: f64,
    },
}

/// Maximum mean number of turns in the search for a hit rate.
const TURNS_MAX: f64 = 1024.0;

/// Generates requests in order of time. It keeps the sessions in progress in memory, and nothing of earlier
/// ones.
pub struct Generator {
    model: SessionModel,
    options: GenerateOptions,
    starts: Starts,
    /// Time of the next session's start.
    next_start: f64,
    /// Sessions in progress, by the time of the next request, then by number.
    running: BTreeMap<(u64, u64), GeneratedSession>,
    warm_up_s: f64,
    sessions: u64,
    emitted: u64,
    next_hash_id: u64,
    /// Whether each system prompt was sent already.
    seen: Vec<bool>,
    hits: Hits,
}

/// Hits that an infinite cache would have had on the requests so far.
#[derive(Clone, Copy, Debug, Default)]
struct Hits {
    reused_tokens: u64,
    prompt_tokens: u64,
}

/// A session in progress.
struct GeneratedSession {
    number: u64,
    random: Stream,
    turn: u32,
    at: f64,
    think: Seconds,
    prompt_tokens: u32,
    output_tokens: u32,
    /// The system prompt, and the number of its blocks that the prompt starts with.
    system: u32,
    system_blocks: u32,
    /// Full blocks that no other request shares, as (first id, count).
    runs: Vec<(u64, u32)>,
    own_blocks: u32,
    /// Number of these blocks that an earlier, kept request contained too.
    known_blocks: u32,
    /// The previous request, if it was kept.
    before: Option<u64>,
}

impl Generator {
    /// A generator of `model`'s requests.
    pub fn new(model: SessionModel, options: GenerateOptions) -> Result<Self, GenerateError> {
        options.check()?;
        Self::of(model, options)
    }

    fn of(model: SessionModel, options: GenerateOptions) -> Result<Self, GenerateError> {
        let warm_up_s = WARM_UP_SESSIONS * model.session_s(ANSWER_S_PER_TOKEN);
        if warm_up_s * options.rate > REQUESTS_BEFORE_MAX {
            return Err(GenerateError::Before(warm_up_s * options.rate));
        }
        let session_rate = options.rate / model.turns.mean();
        let mut starts = Starts::new(options.arrivals, session_rate, options.seed);
        let (system_prompts, system_blocks) = (model.system_prompts, model.system_tokens / BLOCK_TOKENS);
        Ok(Generator {
            next_start: starts.next(),
            starts,
            running: BTreeMap::new(),
            warm_up_s,
            sessions: 0,
            emitted: 0,
            next_hash_id: u64::from(system_prompts) * u64::from(system_blocks),
            seen: vec![false; system_prompts as usize],
            hits: Hits::default(),
            model,
            options,
        })
    }

    /// A generator whose number of turns makes an infinite cache hit a share `target` of the tokens, to 0.001
    /// in a trace of the same duration with 20,000 requests. Longer sessions have longer prompts, so lengths
    /// follow.
    pub fn with_hit_target(
        model: SessionModel,
        options: GenerateOptions,
        target: f64,
    ) -> Result<Self, GenerateError> {
        if !(target > 0.0 && target < 1.0) {
            return Err(GenerateError::Share(target));
        }
        options.check()?;
        let pilot = options.pilot();
        let hit = |turns: f64| -> Result<f64, GenerateError> {
            let mut generator = Generator::of(model.with_turns(turns), pilot)?;
            let mut ids = Vec::new();
            while generator.advance(&mut ids).is_some() {}
            Ok(generator.hits.reused_tokens as f64 / generator.hits.prompt_tokens.max(1) as f64)
        };
        let out_of_reach = |turns, reached| {
            let duration_s = options.requests as f64 / options.rate;
            Err(GenerateError::Hits { target, duration_s, turns, reached })
        };
        let (mut low, mut reached) = (1.0f64, hit(1.0)?);
        if target < reached {
            return out_of_reach(low, reached);
        }
        let mut high = 2.0 * low;
        loop {
            let more = hit(high)?;
            if more >= target {
                break;
            }
            // Sessions that outlast the trace show few of their turns in it, so longer ones hit less again.
            if more <= reached || high >= TURNS_MAX {
                return out_of_reach(if more > reached { high } else { low }, more.max(reached));
            }
            (low, reached, high) = (high, more, 2.0 * high);
        }
        let mut turns = high;
        for _ in 0..20 {
            turns = (low + high) / 2.0;
            let found = hit(turns)?;
            if (found - target).abs() < 0.001 {
                break;
            }
            if found < target { low = turns } else { high = turns }
        }
        Generator::new(model.with_turns(turns), options)
    }

    /// The next request, with an empty chain; `hash_ids` becomes what Mooncake's format calls by that name.
    pub fn advance(&mut self, hash_ids: &mut Vec<u64>) -> Option<Request> {
        if self.emitted >= self.options.requests {
            return None;
        }
        loop {
            let start_bits = self.next_start.to_bits();
            if self.running.first_key_value().is_none_or(|((at, _), _)| start_bits < *at) {
                self.start();
                continue;
            }
            let ((_, number), mut session) = self.running.pop_first()?;
            session.output_tokens = self.model.output.draw(&mut session.random);
            // Requests before the trace begins get no ids: their blocks are new when they occur again.
            let kept = session.at >= self.warm_up_s;
            let request = kept.then(|| self.request(&mut session, hash_ids));
            if session.turn_over(&self.model) {
                self.running.insert((session.at.to_bits(), number), session);
            }
            if request.is_some() {
                return request;
            }
        }
    }

    fn start(&mut self) {
        let number = self.sessions;
        self.sessions += 1;
        let mut random = Stream::new(bits(self.options.seed, number));
        let system = match self.model.system_prompts {
            0 => 0,
            kinds => to_u32(random.below(u64::from(kinds))),
        };
        let prompt_tokens = self.model.first.draw(&mut random).min(self.model.prompt_tokens_max);
        let session = GeneratedSession {
            number,
            random,
            turn: 1,
            at: self.next_start,
            think: Seconds::ZERO,
            prompt_tokens,
            output_tokens: 0,
            system,
            system_blocks: self.model.system_tokens.min(prompt_tokens) / BLOCK_TOKENS,
            runs: Vec::new(),
            own_blocks: 0,
            known_blocks: 0,
            before: None,
        };
        self.running.insert((session.at.to_bits(), number), session);
        self.next_start = self.starts.next();
    }

    /// The request that `session` makes now.
    fn request(&mut self, session: &mut GeneratedSession, hash_ids: &mut Vec<u64>) -> Request {
        session.extend(&mut self.next_hash_id);
        self.count_hits(session);
        let system_first = u64::from(session.system) * u64::from(self.model.system_tokens / BLOCK_TOKENS);
        hash_ids.clear();
        hash_ids.extend(system_first..system_first + u64::from(session.system_blocks));
        hash_ids.extend(session.runs.iter().flat_map(|&(first, count)| first..first + u64::from(count)));
        if !session.prompt_tokens.is_multiple_of(BLOCK_TOKENS) {
            // The partial block becomes another one when the prompt grows.
            hash_ids.push(self.next_hash_id);
            self.next_hash_id += 1;
        }
        let (id, after) = (self.emitted, session.before.replace(self.emitted));
        self.emitted += 1;
        let think = if after.is_some() { session.think } else { Seconds::ZERO };
        Request {
            id,
            // The format has whole milliseconds only.
            at: Seconds(((session.at - self.warm_up_s) * 1e3).floor() / 1e3),
            prompt_tokens: session.prompt_tokens,
            output_tokens: session.output_tokens,
            chain: Vec::new(),
            session: Some(ConversationTurn { id: session.number, after, think, left: None }),
            class: None,
        }
    }

    fn count_hits(&mut self, session: &mut GeneratedSession) {
        let system_seen =
            self.seen.get_mut(session.system as usize).map(|seen| std::mem::replace(seen, true));
        let system_hit = if system_seen == Some(true) { session.system_blocks } else { 0 };
        let own_hit = session.known_blocks;
        let hit = if own_hit > 0 { session.system_blocks + own_hit } else { system_hit };
        self.hits.reused_tokens += u64::from(hit * BLOCK_TOKENS);
        self.hits.prompt_tokens += u64::from(session.prompt_tokens);
        session.known_blocks = session.own_blocks;
    }
}

impl GeneratedSession {
    /// Assigns ids to the full blocks that have none yet.
    fn extend(&mut self, next_hash_id: &mut u64) {
        let fresh = self.prompt_tokens / BLOCK_TOKENS - self.system_blocks - self.own_blocks;
        if fresh == 0 {
            return;
        }
        match self.runs.last_mut() {
            Some((first, count)) if *first + u64::from(*count) == *next_hash_id => *count += fresh,
            _ => self.runs.push((*next_hash_id, fresh)),
        }
        self.own_blocks += fresh;
        *next_hash_id += u64::from(fresh);
    }

    /// Prepares the next turn; false if the session is over.
    fn turn_over(&mut self, model: &SessionModel) -> bool {
        if self.random.next_unit() >= model.turns.go_on(self.turn) {
            return false;
        }
        self.turn += 1;
        self.think = Seconds(f64::from(model.think_ms.draw(&mut self.random)) / 1e3);
        self.at += ANSWER_S_PER_TOKEN * f64::from(self.output_tokens) + self.think.0;
        let grown = self.prompt_tokens.saturating_add(self.output_tokens);
        let grown = grown.saturating_add(model.growth.draw(&mut self.random));
        if grown <= model.prompt_tokens_max.min(TOKENS_MAX) {
            self.prompt_tokens = grown;
        } else {
            self.prompt_tokens = model.first.draw(&mut self.random).min(model.prompt_tokens_max);
            self.system_blocks = model.system_tokens.min(self.prompt_tokens) / BLOCK_TOKENS;
            self.runs.clear();
            (self.own_blocks, self.known_blocks) = (0, 0);
        }
        true
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        let mut ids = Vec::new();
        let request = self.advance(&mut ids)?;
        Some(Request { chain: ids.into_iter().map(key_of).collect(), ..request })
    }
}
