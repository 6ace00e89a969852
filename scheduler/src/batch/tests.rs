//! The machine under a driver that plays the worker: it carries out steps at once.

use super::*;
use crate::kv::{Namespace, PrefixHasher};
use mixfleet_hal::DType;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use windows::{slot, windowed};

mod chunks;
pub(super) mod windows;

pub(super) const LIMITS: BatchLimits = BatchLimits {
    blocks_total: 16,
    block_tokens: 4,
    step_tokens_max: 12,
    prefill_tokens_beside_decode_max: Some(6),
    sequences_max: 6,
    spare_blocks: 1,
    lower_tiers: false,
    cache_policy: CachePolicy::Lru,
    page_devices: PageDevices::ONE,
    page_parts: PageParts::ONE,
};

/// Requests due at this time, or later, give way.
const FLEXIBLE: Seconds = Seconds(4.0);

fn hasher() -> PrefixHasher {
    let namespace = Namespace {
        model_digest: "m".into(),
        tokenizer_digest: "t".into(),
        kv_dtype: DType::F32,
        cache_salt: None,
    };
    PrefixHasher::new(b"secret", &namespace)
}

fn text(ids: Vec<u32>) -> TokenIds {
    TokenIds::new(ids, hasher(), LIMITS.block_tokens)
}

type Action = super::Action<Box<[u32]>>;

/// Plays the worker. The "model" draws `sum of all tokens so far mod 997`, once every token that it sees is
/// where the block table says.
struct Driver {
    machine: Instance<TokenIds>,
    parts: PageParts,
    /// (page, offset) -> token whose KV is there.
    memory: HashMap<(u32, u32), u32>,
    /// Prompt and output so far, and how long it may become.
    requests: BTreeMap<RequestId, (Vec<u32>, usize)>,
    handed_off: Vec<RequestId>,
    finished: Vec<RequestId>,
    preemptions: usize,
    tokens_cached: u32,
    /// Contents of blocks that were given up; served as far as the generator says.
    below: Option<(HashMap<BlockHash, Vec<u32>>, Stream)>,
    blocks_loaded: u32,
    /// Pending loads.
    loading: Vec<(RequestId, Range<u32>, Vec<BlockHash>)>,
    /// Leading tokens that the next request is to wait for.
    pulls: u32,
    /// Waiting sequences, and their cached tokens.
    pulling: BTreeMap<RequestId, u32>,
    tokens_pulled: u32,
    revoked: Vec<RequestId>,
    /// The party of the next request.
    party: PartyId,
}

impl Driver {
    fn new(limits: BatchLimits) -> Self {
        Driver {
            parts: limits.page_parts.clone(),
            machine: Instance::new(limits),
            memory: HashMap::new(),
            requests: BTreeMap::new(),
            handed_off: Vec::new(),
            finished: Vec::new(),
            preemptions: 0,
            tokens_cached: 0,
            below: None,
            blocks_loaded: 0,
            loading: Vec::new(),
            pulls: 0,
            pulling: BTreeMap::new(),
            tokens_pulled: 0,
            revoked: Vec::new(),
            party: PartyId::NONE,
        }
    }

    /// The first waiting sequence gets the KV of its first `valid` tokens, or keeps its own if that is more.
    fn land(&mut self, valid: u32) {
        let Some((request, cached)) = self.pulling.pop_first() else { return };
        let pages = self.machine.pages(request);
        let tokens = &self.requests[&request].0;
        let valid = valid.clamp(cached, tokens.len() as u32);
        for i in cached..valid {
            for part in 0..self.parts.count() {
                self.memory.insert(slot(pages, &self.parts, i, part), tokens[i as usize]);
            }
        }
        self.tokens_pulled += valid - cached;
        let event = Event::Landed { request, tokens_valid: valid, next: false };
        let mut actions = Vec::new();
        self.machine.step(event, &mut actions);
        let admitted =
            |action: &Action| matches!(action, Action::Admitted { request: r, .. } if *r == request);
        let known = self.machine.sequences.contains(request);
        assert_eq!(actions.iter().any(admitted), known, "{actions:?}");
    }

    /// Lends the KV of `tokens`; returns its pages, and their content.
    fn lend(&mut self, request: RequestId, tokens: &[u32]) -> Vec<(u32, Vec<u32>)> {
        let mut actions = Vec::new();
        self.machine.step(Event::Lend { request, text: text(tokens.to_vec()) }, &mut actions);
        let [Action::Lent { request: lent, pages }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(*lent, request);
        let blocks = tokens.chunks_exact(LIMITS.block_tokens as usize);
        let of_parts = blocks.flat_map(|block| vec![block.to_vec(); self.parts.count() as usize]);
        pages.iter().copied().zip(of_parts).collect()
    }

    /// With lower tiers that lose some blocks.
    fn tiered(limits: BatchLimits, seed: u64) -> Self {
        let below = Some((HashMap::new(), Stream::new(seed)));
        Driver { below, ..Driver::new(BatchLimits { lower_tiers: true, ..limits }) }
    }

    /// The content of a page.
    fn page(&self, page: u32) -> Vec<u32> {
        (0..LIMITS.block_tokens).map(|i| self.memory[&(page, i)]).collect()
    }

    /// Fills pages from below, up to the first block that is not there.
    fn load(&mut self, request: RequestId, of: Range<u32>, chain: &[BlockHash]) -> u32 {
        let tokens = self.machine.text(request).unwrap().of_blocks(of.clone());
        let pages = &self.machine.pages(request)[of.start as usize..of.end as usize];
        let (kept, rng) = self.below.as_mut().expect("nothing is loaded without lower tiers");
        let mut blocks = 0;
        for ((hash, &page), tokens) in chain.iter().zip(pages).zip(tokens.chunks_exact(4)) {
            let Some(content) = kept.get(hash).filter(|_| rng.below(8) > 0) else { break };
            assert_eq!(content, tokens);
            content.iter().zip(0..).for_each(|(&token, i)| _ = self.memory.insert((page, i), token));
            blocks += 1;
        }
        self.blocks_loaded += blocks;
        blocks
    }

    fn add(&mut self, request: RequestId, prompt: Vec<u32>, output: usize, after: After) {
        self.add_due(request, Seconds::ZERO, prompt, output, after);
    }

    fn add_due(&mut self, request: RequestId, due: Seconds, prompt: Vec<u32>, output: usize, after: After) {
        self.requests.insert(request, (prompt.clone(), prompt.len() + output));
        let (gives_way, party) = (due >= FLEXIBLE, self.party);
        let urgency = Urgency { gives_way, party, ..Urgency::due_at(due) };
        let pulls = self.pulls;
        let event = Event::Add { request, urgency, text: text(prompt), pulls, after };
        self.machine.step(event, &mut Vec::new());
    }

    fn forward(&mut self, part: &StepSequence) -> Option<u32> {
        let pages = self.machine.pages(part.request);
        let length = part.start + part.tokens;
        let ids = self.machine.text(part.request).unwrap().ids();
        for (which, window) in (0..).zip(self.parts.windows()) {
            for i in part.start..length {
                self.memory.insert(slot(pages, &self.parts, i, which), ids[i as usize]);
            }
            // what the first new token sees is there in every part of the layers
            let first = window.map_or(0, |window| (part.start + 1).saturating_sub(window));
            for i in first..length {
                let at = slot(pages, &self.parts, i, which);
                assert_eq!(self.memory.get(&at), Some(&ids[i as usize]), "token {i} in part {which}");
            }
        }
        part.sample.then(|| ids[..length as usize].iter().sum::<u32>() % 997)
    }

    /// Completes a third of the pending loads; steps of other sequences ran in between.
    fn complete_some_loads(&mut self, actions: &mut Vec<Action>) {
        for (request, blocks, chain) in std::mem::take(&mut self.loading) {
            if self.machine.text(request).is_none() {
                continue;
            }
            let (_, rng) = self.below.as_mut().expect("nothing is loaded without lower tiers");
            if rng.below(3) > 0 {
                self.loading.push((request, blocks, chain));
                continue;
            }
            let blocks = self.load(request, blocks, &chain);
            self.machine.step(Event::Loaded { request, blocks }, actions);
        }
    }

    /// One turn. False if there was nothing to run.
    fn turn(&mut self) -> bool {
        let mut actions = Vec::new();
        self.complete_some_loads(&mut actions);
        self.machine.step(Event::Idle, &mut actions);
        let mut ran = !self.loading.is_empty();
        for evicted in actions.iter().filter_map(|a| if let Action::Evicted(e) = a { Some(e) } else { None })
        {
            for Evicted { hash, tokens, page } in evicted {
                assert_eq!(*self.page(*page), **tokens, "the evicted content is still there");
                if let Some((kept, _)) = &mut self.below {
                    kept.insert(*hash, tokens.to_vec());
                }
            }
        }
        let mut actions: std::collections::VecDeque<Action> = actions.into();
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Run(step) => {
                    ran = true;
                    self.run(&step);
                }
                Action::Load { request, blocks, chain } => {
                    ran = true;
                    self.loading.push((request, blocks, chain));
                }
                Action::Preempted { .. } => self.preemptions += 1,
                Action::Reserved { request, tokens_cached } => {
                    self.pulling.insert(request, tokens_cached);
                }
                Action::Revoked { request } => {
                    self.pulling.remove(&request);
                    self.revoked.push(request);
                }
                Action::Admitted { tokens_cached, .. } => self.tokens_cached += tokens_cached,
                _ => {}
            }
        }
        let counts = self.machine.load().blocks;
        assert_eq!(counts.free + counts.cached + counts.used, LIMITS.blocks_total as usize);
        ran
    }

    fn run(&mut self, step: &Step) {
        let tokens: u32 = step.sequences.iter().map(|s| s.tokens).sum();
        assert!(tokens <= LIMITS.step_tokens_max, "{tokens} tokens in a step");
        let mut sampled = Vec::new();
        for part in &step.sequences {
            let Some(token) = self.forward(part) else { continue };
            let (sequence, length_max) = self.requests.get_mut(&part.request).unwrap();
            assert_eq!(token, sequence.iter().sum::<u32>() % 997, "request {} read wrong KV", part.request);
            sequence.push(token);
            let finished = sequence.len() >= *length_max;
            if finished {
                self.finished.push(part.request);
            }
            self.machine.text_mut(part.request).unwrap().push(token);
            sampled.push(Sampled { request: part.request, finished });
        }
        let before: Vec<_> = self.handed_off_now();
        self.machine.step(Event::StepDone { sampled }, &mut Vec::new());
        let after = self.handed_off_now();
        self.handed_off.extend(after.into_iter().filter(|id| !before.contains(id)));
    }

    fn handed_off_now(&self) -> Vec<RequestId> {
        self.machine.sequences.ids_where(|s| s.phase == Phase::HandedOff)
    }
}

fn prompt(rng: &mut Stream) -> Vec<u32> {
    // Few distinct prefixes, so that the cache is hit.
    let family = rng.below(3) as u32;
    let length = 1 + rng.below(24) as u32;
    let fork = rng.below(24) as u32;
    (0..length).map(|i| if i < fork { family * 10 + i } else { 100 + rng.below(3) as u32 }).collect()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one random run")]
fn every_request_ends_with_the_right_tokens_under_random_load() {
    let (mut preemptions, mut tokens_cached, mut blocks_loaded) = (0, 0, 0);
    let (mut tokens_pulled, mut revoked, mut blocks_lent) = (0, 0, 0);
    for seed in 0..200 {
        let mut rng = Stream::new(seed);
        // in every third one there are parties, and work without any
        let mut parties = (seed % 3 == 0).then(|| Stream::new(1000 + seed));
        // every other one with a lower tier for evicted blocks
        let tiered = seed % 2 == 1;
        let page_parts = windowed(seed);
        let mut driver = match tiered {
            true => Driver::tiered(LIMITS, seed),
            false => Driver::new(BatchLimits { page_parts, ..LIMITS }),
        };
        let mut cancelled = Vec::new();
        let mut lent: Vec<(u32, Vec<u32>)> = Vec::new();
        let count = 12;
        for request in 0..count {
            let prompt = prompt(&mut rng);
            let output = 1 + rng.below(30) as usize;
            let after = if rng.below(4) == 0 { After::HandOff } else { After::Decode };
            let due = Seconds(rng.below(6) as f64);
            driver.party = PartyId(parties.as_mut().map_or(0, |parties| parties.below(4)));
            driver.pulls = rng.below(2) as u32 * rng.below(prompt.len() as u64) as u32;
            driver.add_due(request, due, prompt, output, after);
            for _ in 0..rng.below(4) {
                driver.turn();
                for (page, content) in &lent {
                    assert_eq!(driver.page(*page), *content, "seed {seed}: lent pages change");
                }
                if rng.below(8) == 0 {
                    driver.land(rng.below(24) as u32);
                }
            }
            if rng.below(4) == 0 {
                lent = driver.lend(count, &self::prompt(&mut rng));
                blocks_lent += lent.len();
            } else if rng.below(3) == 0 {
                driver.machine.step(Event::Unlend { request: count }, &mut Vec::new());
                lent.clear();
            }
            if rng.below(8) == 0 {
                let victim = rng.below(request + 1);
                driver.machine.step(Event::Cancel { request: victim }, &mut Vec::new());
                driver.pulling.remove(&victim);
                cancelled.push(victim);
            }
            if rng.below(2) == 0 {
                for request in driver.handed_off_now() {
                    driver.machine.step(Event::Release { request }, &mut Vec::new());
                }
            }
        }
        driver.machine.step(Event::Cancel { request: count }, &mut Vec::new());
        for _ in 0..2000 {
            if !driver.turn() {
                driver.land(rng.below(24) as u32);
            }
            for request in driver.handed_off_now() {
                driver.machine.step(Event::Release { request }, &mut Vec::new());
            }
        }
        let load = driver.machine.load();
        assert_eq!((load.waiting, load.running, load.blocks.used), (0, 0, 0), "seed {seed}");
        for request in 0..count {
            let ends = driver.finished.iter().chain(&driver.handed_off).filter(|&&r| r == request).count();
            let ended = ends >= 1 || cancelled.contains(&request) || driver.revoked.contains(&request);
            assert!(ended, "seed {seed}: request {request} never ended");
        }
        preemptions += driver.preemptions;
        tokens_cached += driver.tokens_cached;
        blocks_loaded += driver.blocks_loaded;
        tokens_pulled += driver.tokens_pulled;
        revoked += driver.revoked.len();
    }
    assert!(
        tokens_pulled > 1000 && blocks_lent > 100,
        "hardly anything went: {tokens_pulled}, {blocks_lent}"
    );
    assert!((1..200).contains(&revoked), "{revoked} of 2400 were revoked");
    assert!(preemptions > 50, "the load never ran out of blocks: {preemptions}");
    assert!(tokens_cached > 1000, "the cache was never hit: {tokens_cached}");
    assert!(blocks_loaded > 500, "hardly anything was loaded: {blocks_loaded}");
}

#[test]
fn what_is_loaded_counts_as_cached_and_what_does_not_come_is_computed() {
    let long = |from: u32| (from..from + 40).collect::<Vec<u32>>();
    for lost in [0, 9] {
        let mut driver = Driver::tiered(LIMITS, 0);
        for from in [0, 100] {
            driver.add(u64::from(from), long(from), 1, After::Decode);
            while driver.turn() {}
        }
        let (kept, _) = driver.below.as_mut().unwrap();
        assert!(!kept.is_empty(), "two prompts of 10 blocks fit into 16");
        driver.add(1, long(0), 1, After::Decode);
        let mut actions = Vec::new();
        driver.machine.step(Event::Idle, &mut actions);
        let Some(Action::Load { request: 1, blocks, chain }) = actions.first() else { panic!("{actions:?}") };
        // the deepest blocks went first; one token is left to be computed
        assert_eq!((blocks.end, blocks.len()), (9, chain.len()));
        assert!(!actions.iter().any(|action| matches!(action, Action::Run(_))), "{actions:?}");
        let (cached, blocks) = (blocks.start, chain.len() as u32 - lost.min(chain.len() as u32));
        actions.clear();
        driver.machine.step(Event::Loaded { request: 1, blocks }, &mut actions);
        let tokens = (cached + blocks) * LIMITS.block_tokens;
        let admitted = |action: &Action| matches!(action, Action::Admitted { tokens_cached, .. } if *tokens_cached == tokens);
        assert!(actions.iter().any(admitted), "{actions:?}");
        let stored: usize =
            actions.iter().map(|a| if let Action::Stored(hashes) = a { hashes.len() } else { 0 }).sum();
        assert_eq!(stored, blocks as usize);
        actions.clear();
        driver.machine.step(Event::Idle, &mut actions);
        let Some(Action::Run(step)) = actions.last() else { panic!("{actions:?}") };
        assert_eq!(step.sequences[0].start, tokens);
    }
}

#[test]
fn a_reserved_sequence_joins_when_its_kv_has_landed_and_recomputes_what_is_missing() {
    // Lengths below, at and above a block's edge.
    for (length, valid) in [(7, 0), (7, 3), (7, 7), (8, 0), (8, 5), (8, 8), (9, 4)] {
        let mut driver = Driver::new(LIMITS);
        let prompt: Vec<u32> = (1..=length).collect();
        let next = prompt.iter().sum();
        let urgency = Urgency::due_at(Seconds::ZERO);
        let event = Event::Reserve { request: 1, urgency, text: text(prompt.clone()) };
        driver.machine.step(event, &mut Vec::new());
        let mut actions = Vec::new();
        driver.machine.step(Event::Idle, &mut actions);
        let [Action::Reserved { tokens_cached: 0, .. }] = &actions[..] else { panic!("{actions:?}") };
        let pages = driver.machine.pages(1);
        for (i, &token) in prompt.iter().enumerate().take(valid) {
            driver.memory.insert((pages[i / 4], i as u32 % 4), token);
        }
        driver.requests.insert(1, ([&prompt[..], &[next]].concat(), 16));
        driver.machine.text_mut(1).unwrap().push(next);
        let event = Event::Landed { request: 1, tokens_valid: valid as u32, next: true };
        driver.machine.step(event, &mut Vec::new());
        while driver.turn() {}
        assert_eq!(driver.finished, [1], "{valid} of {length} tokens landed");
    }
}

/// A prompt that fills a step by itself, like no other.
fn whole_step(request: RequestId) -> Vec<u32> {
    vec![1000 + request as u32; LIMITS.step_tokens_max as usize]
}

#[test]
fn prompts_run_by_when_they_are_due_and_equal_ones_as_they_came() {
    for seed in 0..50 {
        let mut rng = Stream::new(seed);
        let mut driver = Driver::new(LIMITS);
        let mut places = Vec::new();
        for request in 0..20 {
            let due = Seconds(rng.below(5) as f64);
            places.push(Place { due, request });
            driver.add_due(request, due, whole_step(request), 1, After::Decode);
        }
        while driver.turn() {}
        places.sort_unstable();
        let order: Vec<RequestId> = places.iter().map(|place| place.request).collect();
        assert_eq!(driver.finished, order, "seed {seed}");
    }
}

#[test]
fn a_request_is_overtaken_only_by_those_that_come_before_it_is_due() {
    let (patience, due_after) = (40, 3);
    // one that waits; one that has begun, and gives up its only slot to any newcomer
    for (sequences_max, patient, output, preemptions) in [(6, 2, 1, 0), (1, 0, 5, 1)] {
        let mut driver = Driver::new(BatchLimits { sequences_max, ..LIMITS });
        let mut next = 0;
        for now in 0..4 * patience {
            // three prompts for every two steps: more than the instance can ever do
            for _ in 0..1 + now % 2 {
                let due = Seconds(f64::from(if next == patient { patience } else { now + due_after }));
                let output = if next == patient { output } else { 1 };
                driver.add_due(next, due, whole_step(next), output, After::Decode);
                next += 1;
            }
            driver.turn();
        }
        assert_eq!(driver.preemptions, preemptions);
        let place = driver.finished.iter().position(|&request| request == patient);
        let before = place.expect("it had its turn");
        // those that arrived before 37, without itself; a newcomer is then due at the same time, and arrived
        // later
        assert_eq!(before, (0..patience - due_after).map(|now| 1 + now % 2).sum::<u32>() as usize - 1);
        assert!(driver.finished[before + 1..].iter().all(|&request| request > before as u64));
    }
}

/// Tokens of each sequence in the next step, which is carried out.
fn next_step(driver: &mut Driver) -> Vec<(RequestId, u32)> {
    let mut actions = Vec::new();
    driver.machine.step(Event::Idle, &mut actions);
    let preempted = actions.iter().filter(|action| matches!(action, Action::Preempted { .. }));
    driver.preemptions += preempted.count();
    let Some(Action::Run(step)) = actions.pop() else { return Vec::new() };
    driver.run(&step);
    step.sequences.iter().map(|part| (part.request, part.tokens)).collect()
}

#[test]
fn a_long_prompt_that_has_begun_pauses_while_earlier_ones_take_the_steps() {
    let mut driver = Driver::new(BatchLimits { step_tokens_max: 4, ..LIMITS });
    // ten steps
    driver.add_due(1, Seconds(600.0), (0..40).collect(), 1, After::Decode);
    assert_eq!(next_step(&mut driver), [(1, 4)]);
    driver.add_due(2, Seconds(9.0), (100..106).collect(), 1, After::HandOff);
    driver.add_due(3, Seconds(601.0), (200..203).collect(), 1, After::Decode);
    assert_eq!(next_step(&mut driver), [(2, 4)]);
    // rows that one leaves are the next one's; no token of the first is computed twice
    assert_eq!(next_step(&mut driver), [(2, 2), (1, 2)]);
    driver.add_due(4, Seconds(8.0), (300..304).collect(), 1, After::Decode);
    assert_eq!(next_step(&mut driver), [(4, 4)]);
    for _ in 0..8 {
        assert_eq!(next_step(&mut driver), [(1, 4)]);
    }
    assert_eq!(next_step(&mut driver), [(1, 2), (3, 2)]);
    assert_eq!(next_step(&mut driver), [(3, 1)]);
    assert_eq!((driver.finished, driver.preemptions), (vec![2, 4, 1, 3], 0));
}

#[test]
fn who_is_due_earlier_takes_the_place_of_the_last_and_that_one_goes_on_later() {
    let mut driver = Driver::new(LIMITS);
    for request in 0..6 {
        let due = Seconds(600.0 + request as f64);
        driver.add_due(request, due, vec![7 * request as u32; 2], 10, After::Decode);
    }
    let all: Vec<_> = (0..6).map(|request| (request, 2)).collect();
    assert_eq!(next_step(&mut driver), all);
    // due with the last of them, or after: they wait
    driver.add_due(6, Seconds(605.0), vec![50; 3], 1, After::Decode);
    driver.add_due(7, Seconds(606.0), vec![60; 3], 1, After::Decode);
    let decodes = |requests: std::ops::Range<u64>| requests.map(|request| (request, 1)).collect::<Vec<_>>();
    assert_eq!((next_step(&mut driver), driver.preemptions), (decodes(0..6), 0));
    // two that are not: the last two give way, and no more
    driver.add_due(9, Seconds(9.0), vec![70; 3], 3, After::Decode);
    driver.add_due(8, Seconds(9.0), vec![80; 3], 3, After::HandOff);
    let step = next_step(&mut driver);
    assert_eq!((step, driver.preemptions), ([decodes(0..4), vec![(8, 3), (9, 3)]].concat(), 2));
    driver.machine.step(Event::Release { request: 8 }, &mut Vec::new());
    // its place is free: 4 is there again, with its prompt and two tokens
    assert_eq!(next_step(&mut driver), [vec![(9, 1)], decodes(0..4), vec![(4, 4)]].concat());
    while driver.turn() {}
    let mut finished = driver.finished;
    finished.sort_unstable();
    assert_eq!(finished, [0, 1, 2, 3, 4, 5, 6, 7, 9]);
}

#[test]
fn who_reads_along_keeps_its_place() {
    let mut driver = Driver::new(LIMITS);
    let all: Vec<_> = (0..6).map(|request| (request, 1)).collect();
    for &(request, _) in &all {
        driver.add_due(request, Seconds(3.0), vec![7 * request as u32; 2], 10, After::Decode);
    }
    driver.turn();
    driver.add_due(6, Seconds(1.0), vec![50; 3], 1, After::Decode);
    assert_eq!((next_step(&mut driver), driver.preemptions), (all, 0));
}

#[test]
fn who_is_due_earlier_takes_the_blocks_of_as_many_as_it_needs_and_of_none_if_they_do_not_suffice() {
    let mut driver = Driver::new(BatchLimits { prefill_tokens_beside_decode_max: Some(12), ..LIMITS });
    for (request, due) in [(0, 600.0), (1, 601.0), (2, 602.0), (3, 1.0)] {
        driver.add_due(request, Seconds(due), vec![9 * request as u32; 2], 6, After::Decode);
    }
    assert_eq!(next_step(&mut driver), [(3, 2), (0, 2), (1, 2), (2, 2)]);
    // of 16 blocks each of the four has one: with one to spare, 13 need those of the last two
    driver.add_due(4, Seconds(2.0), (100..152).collect(), 1, After::Decode);
    assert_eq!(next_step(&mut driver), [(3, 1), (0, 1), (4, 10)]);
    assert_eq!(driver.preemptions, 2);
    // the one left would give one, three are wanted
    driver.add_due(5, Seconds(3.0), (200..212).collect(), 1, After::Decode);
    assert_eq!(next_step(&mut driver), [(3, 1), (0, 1), (4, 10)]);
    assert_eq!(driver.preemptions, 2);
    while driver.turn() {}
    assert_eq!(driver.finished.len(), 6);
}

#[test]
fn who_is_due_last_gives_way_and_comes_back_in_its_place() {
    let limits = BatchLimits { spare_blocks: 0, ..LIMITS };
    let mut driver = Driver::new(limits);
    // The first to come is due last. Each holds 5 blocks when it begins and needs 9 in the end; there are 16.
    for (request, due) in [(0, 9.0), (1, 2.0), (2, 1.0)] {
        let prompt = (0..18).map(|i| 100 * request as u32 + i).collect();
        driver.add_due(request, Seconds(due), prompt, 16, After::Decode);
    }
    let (mut preempted, mut admitted) = (Vec::new(), Vec::new());
    for request in 3..8 {
        driver.add_due(request, Seconds(10.0), whole_step(request), 1, After::Decode);
    }
    loop {
        let mut actions = Vec::new();
        driver.machine.step(Event::Idle, &mut actions);
        for action in &actions {
            match action {
                Action::Preempted { request } => preempted.push(*request),
                Action::Admitted { request, .. } => admitted.push(*request),
                _ => {}
            }
        }
        let Some(Action::Run(step)) = actions.pop() else { break };
        driver.run(&step);
    }
    // 3 began beside 0, and gave way to it in turn
    assert_eq!(preempted, [0, 1, 3]);
    assert_eq!(admitted, [2, 1, 0, 1, 0, 3, 3, 4, 5, 6, 7]);
    assert_eq!(driver.finished.len(), 8);
}

#[test]
fn an_earlier_request_takes_a_later_ones_reservation_when_nothing_else_runs() {
    let mut driver = Driver::new(LIMITS);
    let reserve = |request, due| Event::Reserve {
        request,
        urgency: Urgency::due_at(Seconds(due)),
        text: text(vec![0; 40]),
    };
    driver.machine.step(reserve(3, 2.0), &mut Vec::new());
    driver.machine.step(Event::Idle, &mut Vec::new());
    driver.machine.step(reserve(4, 2.0), &mut Vec::new());
    let mut actions = Vec::new();
    driver.machine.step(Event::Idle, &mut actions);
    assert!(actions.is_empty(), "a later request waits: {actions:?}");
    driver.machine.step(reserve(9, 1.0), &mut Vec::new());
    driver.machine.step(Event::Idle, &mut actions);
    // Immediately: there may be no later caller.
    let [Action::Revoked { request: 3 }, Action::Reserved { request: 9, .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
}
