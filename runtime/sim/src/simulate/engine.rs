//! One instance: the scheduler's own machine ([`mixfleet_scheduler::batch`]), with the step times of its cost
//! model.
//!
//! A run of equal decode steps is one event, of any length; a message that comes during it is handled after
//! the current step, and ends the run.

mod copying;
mod keys;
mod loading;
mod run;

use super::agenda::LentPrefix;
use super::flight::HandOffTarget;
use super::results::Reused;
use super::tiers::{ByTier, Tiers};
use super::timeline::Occupation;
use super::{InstanceSetup, Setup};
pub(super) use keys::{public, with_answer};

use copying::Copying;
use keys::Keys;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::batch::{Action, After, Event, Instance, Sampled, StepSequence, Urgency};
use mixfleet_scheduler::cost::{CostModel, KvCopy, KvCopyCost, MeasuredSteps, Prefill};
use mixfleet_scheduler::kv::{BlockHash, Tier};
use run::Run;
use std::sync::Arc;

/// A request, or a copy of a prefix, as an instance gets it.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) request: u64,
    /// The number of its placement.
    pub(super) attempt: u32,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) chain: Arc<[BlockHash]>,
    /// When it is wanted.
    pub(super) urgency: Urgency,
}

/// Consecutive gaps between tokens: `count` gaps, which change evenly from `first_s` to `last_s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gaps {
    pub(super) count: u32,
    pub(super) first_s: f64,
    pub(super) last_s: f64,
}

/// A message to an instance, which handles it between two steps.
pub(super) enum Message {
    /// Compute a prompt here; of its first `pulls` tokens, the missing ones come from elsewhere. KV that is
    /// handed off is sent to `decoder`.
    Add { job: Job, pulls: u32, after: After, decoder: Option<HandOffTarget> },
    /// KV comes or goes from now on.
    Copy(KvCopy),
    /// Make room for the KV of a prompt that is computed elsewhere.
    Reserve { job: Job },
    /// The KV of the first `tokens_valid` tokens is here, and for a hand-off also the next token, drawn at
    /// `since_s`.
    Landed { request: u64, tokens_valid: u32, since_s: Option<f64> },
    /// Another instance, which holds `held_tokens` of the prefix, pulls it. Its part on the devices is kept
    /// for the pull.
    Lend { prefix: LentPrefix, held_tokens: u32, chain: Arc<[BlockHash]> },
    /// A lent prefix has been read.
    Unlend { request: u64 },
    /// `blocks` blocks of a sequence arrived from lower tiers.
    Loaded { request: u64, blocks: u32 },
    /// Steps have this cost from the next one on.
    Cost(Arc<CostModel>),
    /// A prompt's KV was taken over elsewhere, or the request is cancelled.
    LetGo { request: u64 },
}

/// A result of an instance's work.
pub(super) enum Outcome {
    /// The computation of a prompt started, with `reused` cached tokens.
    Began { request: u64, reused: Reused },
    /// The first `tokens` tokens of a prompt are computed.
    Progress { request: u64, tokens: u32 },
    /// The first token was drawn.
    Prefilled { request: u64 },
    /// There is room for KV from elsewhere; `held_tokens` tokens are here already.
    Reserved { request: u64, attempt: u32, held_tokens: u32 },
    /// A reservation was revoked: the request is placed again.
    Revoked { request: u64 },
    /// The received part of a copy is kept.
    Kept { request: u64 },
    /// A request that was running gave its memory to others and recomputes later.
    Preempted,
    /// A step begins while which KV of a prompt is sent, as much as of `tokens` tokens in all layers.
    Sends { request: u64, tokens: f64, step_s: f64 },
    /// `blocks` blocks of a sequence are in flight from lower tiers until `until_s`.
    Loads { request: u64, attempt: u32, blocks: u32, until_s: f64 },
    /// A prefix can be sent from `ready_s` on.
    Lent { prefix: LentPrefix, ready_s: f64 },
    /// A sequence that was handed over decodes here now.
    Joined { request: u64, attempt: u32 },
    /// Each of these requests got `tokens` tokens.
    Decoded { requests: Vec<u64>, tokens: u32 },
    /// The answer is complete.
    Finished { request: u64, gaps: Vec<Gaps> },
    /// A tier holds these blocks now.
    Stored(Tier, Vec<BlockHash>),
    /// A tier no longer holds these blocks.
    Evicted(Tier, Vec<BlockHash>),
    /// The measured time of steps, if it may differ from the prediction.
    Ran(MeasuredSteps),
    /// The device worked for this time.
    Busy { prefill_s: f64, decode_s: f64 },
}

enum Plan {
    /// One step; decoding alone would take `decode_s`.
    Step { parts: Vec<StepSequence>, began_s: f64, time_s: f64, decode_s: f64, slower: f64 },
    /// A run of decode steps.
    Run(Run),
}

/// The state of a request on the instance.
#[derive(Debug, Default)]
struct Active {
    attempt: u32,
    output_tokens: u32,
    generated: u32,
    last_token_s: f64,
    gaps: Vec<Gaps>,
    /// Whether its first token was drawn.
    started: bool,
    /// Whether its prompt was started here.
    began: bool,
    /// Number of blocks loaded from lower tiers.
    loaded: ByTier,
    /// Tokens that were here when it began to wait for more.
    held_tokens: Option<u32>,
    /// The receiver of its KV, if there is one.
    decoder: Option<HandOffTarget>,
}

/// KV of the model on an instance.
#[derive(Clone, Copy)]
struct InstanceKv {
    token_bytes: f64,
    layers: u32,
    cost: KvCopyCost,
}

impl InstanceKv {
    fn leaves_s(&self, tokens: f64) -> Seconds {
        self.cost.leaves(Bytes(tokens * self.token_bytes), self.layers)
    }
}

pub(super) struct Engine {
    pool: u32,
    cost: Arc<CostModel>,
    /// Whether the time of steps may differ from the fleet machine's cost model.
    measures: bool,
    block_tokens: u32,
    machine: Instance<Keys>,
    lower: Tiers,
    kv: InstanceKv,
    copying: Copying,
    /// Messages that came during a step.
    inbox: Vec<Message>,
    at: Option<Plan>,
    plans: u64,
    /// The last plan whose end was scheduled.
    told: u64,
    actions: Vec<Action<()>>,
    /// Whether a load began since the machine was last queried.
    has_news: bool,
    /// Sequences whose load was skipped: the machine is notified that no block was loaded.
    without_load: Vec<u64>,
}

impl Engine {
    pub(super) fn new(instance: &InstanceSetup, setup: &Setup) -> Self {
        let block_tokens = instance.limits.block_tokens;
        Engine {
            pool: instance.spec.pool,
            cost: instance.spec.cost.clone(),
            measures: !setup.slowdowns.is_empty() || setup.shares(),
            block_tokens,
            machine: Instance::new(instance.limits.clone()).predicted_by(instance.spec.cost.clone()),
            lower: Tiers::new(
                &instance.tiers,
                block_tokens,
                f64::from(block_tokens) * setup.fleet.kv_bytes_per_token as f64,
                instance.limits.cache_policy,
            ),
            kv: InstanceKv {
                token_bytes: setup.fleet.kv_bytes_per_token as f64,
                layers: setup.fleet.layers,
                cost: instance.spec.kv_copies,
            },
            copying: Copying::default(),
            inbox: Vec::new(),
            at: None,
            plans: 0,
            told: 0,
            actions: Vec::new(),
            has_news: false,
            without_load: Vec::new(),
        }
    }

    pub(super) fn pool(&self) -> u32 {
        self.pool
    }

    /// Number of the current plan.
    pub(super) fn plan(&self) -> u64 {
        self.plans
    }

    /// The current work, at a time before the current plan ends.
    pub(super) fn occupation(&self, now_s: f64) -> Occupation {
        let (mut phases, blocks) = (self.machine.phases(), self.machine.load().blocks);
        let mut ahead = 0;
        let worked_s = match &self.at {
            Some(Plan::Run(run)) => {
                let (tokens, blocks) = run.since_told(&self.cost, now_s, self.block_tokens);
                phases.decoding_tokens += tokens;
                ahead = blocks;
                (0.0, now_s - run.done_s)
            }
            Some(Plan::Step { began_s, time_s, decode_s, .. }) => {
                let share = (now_s - began_s) / time_s.max(f64::MIN_POSITIVE);
                ((time_s - decode_s) * share, decode_s * share)
            }
            None => (0.0, 0.0),
        };
        let tokens = |blocks: usize| blocks as u64 * u64::from(self.block_tokens);
        let (step_s, least_step_s) = match to_u32(phases.decoding) {
            0 => (0.0, 0.0),
            sequences => {
                let step = |sequences, tokens| self.cost.decode_step_s(sequences, tokens).0;
                (step(sequences, phases.decoding_tokens), step(1, 1))
            }
        };
        let comes = |message: &&Message| matches!(message, Message::Add { .. } | Message::Reserve { .. });
        phases.queued += self.inbox.iter().filter(comes).count();
        let used_tokens = tokens(blocks.used + ahead);
        let cached_tokens = tokens(blocks.cached - ahead.saturating_sub(blocks.free).min(blocks.cached));
        Occupation { phases, used_tokens, cached_tokens, step_s, least_step_s, worked_s }
    }

    fn tell(&mut self, event: Event<Keys>) {
        self.machine.step(event, &mut self.actions);
    }

    /// Sends a message: it is handled at once if the instance is idle, else when the current step ends.
    pub(super) fn send(&mut self, now_s: f64, message: Message, outcomes: &mut Vec<Outcome>) {
        match &mut self.at {
            None => return self.handle(now_s, message, outcomes),
            Some(Plan::Run(run)) => {
                let begun = run.steps_by(&self.cost, now_s).max(run.done + 1);
                self.plans += u64::from(begun < run.steps);
                run.steps = begun;
            }
            Some(Plan::Step { .. }) => {}
        }
        self.inbox.push(message);
    }

    fn handle(&mut self, now_s: f64, message: Message, outcomes: &mut Vec<Outcome>) {
        match message {
            Message::Add { job, pulls, after, decoder } => {
                let (request, urgency, mut text) = (job.request, job.urgency, self.text(job));
                text.active.decoder = decoder;
                self.tell(Event::Add { request, urgency, text, pulls, after });
            }
            Message::Reserve { job } => {
                let (request, urgency, text) = (job.request, job.urgency, self.text(job));
                self.tell(Event::Reserve { request, urgency, text });
            }
            Message::Landed { request, tokens_valid, since_s } => {
                if let (Some(active), Some(since_s)) = (self.active(request), since_s) {
                    (active.generated, active.last_token_s, active.started) = (1, since_s, true);
                    outcomes.push(Outcome::Joined { request, attempt: active.attempt });
                }
                self.tell(Event::Landed { request, tokens_valid, next: since_s.is_some() });
            }
            Message::Lend { prefix, held_tokens, chain } => {
                self.lend(now_s, prefix, held_tokens, &chain, outcomes);
            }
            Message::Copy(copy) => self.copying.add(now_s, copy),
            Message::Unlend { request } => self.tell(Event::Unlend { request }),
            Message::Loaded { request, blocks } => self.tell(Event::Loaded { request, blocks }),
            Message::Cost(cost) => self.cost = cost,
            Message::LetGo { request } => self.tell(Event::Cancel { request }),
        }
        self.carry_out(now_s, outcomes);
    }

    /// Lends as much of a prefix as is here, to a receiver that holds `held_tokens` of it.
    fn lend(
        &mut self,
        now_s: f64,
        prefix: LentPrefix,
        held_tokens: u32,
        chain: &[BlockHash],
        outcomes: &mut Vec<Outcome>,
    ) {
        let LentPrefix { request, tokens, .. } = prefix;
        let chain = &chain[..chain.len().min((tokens / self.block_tokens) as usize)];
        let text =
            Keys::new(request, to_u32(chain.len()) * self.block_tokens, chain.into(), self.block_tokens);
        self.tell(Event::Lend { request, text });
        let Some(Action::Lent { pages, .. }) = self.actions.pop() else {
            unreachable!("requested blocks are lent")
        };
        let below = &chain[pages.len()..];
        let by_tier = self.lower.prefix(below);
        let came = by_tier.iter().sum::<usize>();
        let ready_s = self.lower.load(now_s, &below[..came], by_tier);
        let on_device = to_u32(pages.len()) * self.block_tokens;
        let tokens = on_device + to_u32(came) * self.block_tokens;
        let (sent, gathered) = (tokens.saturating_sub(held_tokens), on_device.saturating_sub(held_tokens));
        let prefix = LentPrefix { tokens: tokens.max(held_tokens), sent, gathered, ..prefix };
        outcomes.push(Outcome::Lent { prefix, ready_s });
    }

    /// End of the current plan, unless it was returned already.
    pub(super) fn ends_s(&mut self) -> Option<f64> {
        let ends_s = match self.at.as_ref()? {
            Plan::Step { began_s, time_s, .. } => began_s + time_s,
            Plan::Run(run) => run.ends_s(&self.cost),
        };
        (std::mem::replace(&mut self.told, self.plans) != self.plans).then_some(ends_s)
    }

    fn text(&self, job: Job) -> Keys {
        let mut text = Keys::new(job.request, job.prompt_tokens, job.chain, self.block_tokens);
        (text.active.attempt, text.active.output_tokens) = (job.attempt, job.output_tokens);
        text
    }

    fn active(&mut self, request: u64) -> Option<&mut Active> {
        self.machine.text_mut(request).map(|text| &mut text.active)
    }

    /// Whether the instance is idle.
    pub(super) fn is_idle(&self) -> bool {
        self.at.is_none()
    }

    /// Steps have this cost from the next one on, before which the instance is idle.
    pub(super) fn takes(&mut self, cost: Arc<CostModel>) {
        self.cost = cost;
    }

    /// The share of its time that each device of another instance that attends for this one spends on that
    /// now.
    pub(super) fn spare_share(&self) -> f64 {
        match &self.at {
            Some(Plan::Run(run)) => self.cost.spare_share(to_u32(run.parts.len()), run.tokens_done()),
            Some(Plan::Step { parts, .. }) => {
                let (_, sequences, kv_tokens) = self.shape(parts);
                self.cost.spare_share(sequences, kv_tokens)
            }
            None => 0.0,
        }
    }

    /// Starts a plan if the instance is idle and has work.
    pub(super) fn turn(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        // a load leaves the device free for other sequences
        self.has_news = true;
        while self.is_idle() && std::mem::take(&mut self.has_news) {
            self.tell(Event::Idle);
            self.carry_out(now_s, outcomes);
            for request in std::mem::take(&mut self.without_load) {
                self.tell(Event::Loaded { request, blocks: 0 });
                self.carry_out(now_s, outcomes);
            }
        }
    }

    /// Completes the current plan.
    pub(super) fn steps_end(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        match self.at.take() {
            None => {}
            Some(Plan::Run(run)) => {
                let steps = run.steps;
                self.at = Some(Plan::Run(run));
                self.advance_to(steps - 1, outcomes);
                self.ran(steps, outcomes);
                if let Some(Plan::Run(run)) = self.at.take() {
                    self.step_done(now_s, &run.parts, run.done >= run.left, outcomes);
                }
            }
            Some(Plan::Step { parts, began_s, time_s, decode_s, slower }) => {
                self.copying.end(now_s, slower, time_s);
                outcomes.push(Outcome::Busy { prefill_s: time_s - decode_s, decode_s });
                if self.measures {
                    let (parts, sequences, kv_tokens) = self.shape(&parts);
                    let time = Seconds(time_s);
                    let steps = MeasuredSteps { parts, sequences, kv_tokens, steps: 1, time };
                    self.machine.learn(&steps);
                    outcomes.push(Outcome::Ran(steps));
                }
                self.decoded(now_s, began_s, time_s, &parts, outcomes);
                self.step_done(now_s, &parts, true, outcomes);
            }
        }
        self.carry_out(now_s, outcomes);
        let mut inbox = std::mem::take(&mut self.inbox);
        for message in inbox.drain(..) {
            self.handle(now_s, message, outcomes);
        }
        self.inbox = inbox;
    }

    /// Reports the tokens of one step of decodes, and the first ones of prompts.
    fn decoded(
        &mut self,
        now_s: f64,
        began_s: f64,
        time_s: f64,
        parts: &[StepSequence],
        outcomes: &mut Vec<Outcome>,
    ) {
        let mut decoded = Vec::new();
        for part in parts.iter().filter(|part| part.sample) {
            let Some(active) = self.active(part.request) else { continue };
            if active.started {
                let gap = Gaps { count: 1, first_s: time_s, last_s: time_s };
                active.advance(now_s, began_s, gap);
                decoded.push(part.request);
            } else {
                (active.started, active.generated, active.last_token_s) = (true, 1, now_s);
                outcomes.push(Outcome::Prefilled { request: part.request });
            }
        }
        if !decoded.is_empty() {
            outcomes.push(Outcome::Decoded { requests: decoded, tokens: 1 });
        }
        for part in parts.iter().filter(|part| !part.sample) {
            let (request, tokens) = (part.request, part.start + part.tokens);
            outcomes.push(Outcome::Progress { request, tokens });
        }
    }

    /// Notifies the machine that a step is done, and which answers are complete with it; none unless
    /// `some_end`.
    fn step_done(&mut self, now_s: f64, parts: &[StepSequence], some_end: bool, outcomes: &mut Vec<Outcome>) {
        let mut ended = Vec::new();
        let sampled = parts.iter().filter(|part| part.sample).map(|&StepSequence { request, .. }| {
            let active = self.machine.text_mut(request).map(|text| &mut text.active);
            let ends = active.filter(|active| some_end && active.generated >= active.output_tokens);
            let finished = ends.is_some();
            // The machine forgets ended requests.
            ended.extend(ends.map(|active| (request, std::mem::take(&mut active.gaps))));
            Sampled { request, finished }
        });
        let sampled: Vec<Sampled> = sampled.collect();
        self.tell(Event::StepDone { sampled });
        self.carry_out(now_s, outcomes);
        for (request, gaps) in ended {
            // A handed-off request ends with `LetGo`.
            if self.machine.text(request).is_none() {
                outcomes.push(Outcome::Finished { request, gaps });
            }
        }
    }

    /// Carries out the machine's actions.
    fn carry_out(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Run(step) => self.begin(now_s, step.sequences, outcomes),
                Action::Load { request, blocks, chain } => {
                    self.load(now_s, request, blocks.start, &chain, outcomes);
                }
                Action::Admitted { request, tokens_cached } => {
                    let block_tokens = self.block_tokens;
                    let Some(active) = self.active(request) else { continue };
                    if !active.began && !active.started {
                        active.began = true;
                        let reused = active.reused(tokens_cached, block_tokens);
                        outcomes.push(Outcome::Began { request, reused });
                    }
                }
                Action::Reserved { request, tokens_cached } => {
                    let Some(active) = self.active(request) else { continue };
                    active.held_tokens = Some(tokens_cached);
                    let attempt = active.attempt;
                    outcomes.push(Outcome::Reserved { request, attempt, held_tokens: tokens_cached });
                }
                // A placement that was already lost is not lost again.
                Action::Revoked { request } if self.lets_go(request) => {}
                Action::Revoked { request } => outcomes.push(Outcome::Revoked { request }),
                Action::Kept { request } => outcomes.push(Outcome::Kept { request }),
                Action::Stored(mut hashes) => {
                    hashes.retain(keys::is_public);
                    if !hashes.is_empty() {
                        outcomes.push(Outcome::Stored(Tier::Device, hashes));
                    }
                }
                Action::Evicted(evicted) => {
                    let mut hashes: Vec<BlockHash> =
                        evicted.into_iter().map(|evicted| evicted.hash).collect();
                    let kept = self.lower.take_in(&hashes, outcomes);
                    let takes = self.kv.leaves_s(f64::from(to_u32(kept) * self.block_tokens));
                    self.copying.add(now_s, KvCopy { takes, over: Seconds::ZERO });
                    hashes.retain(keys::is_public);
                    if !hashes.is_empty() {
                        outcomes.push(Outcome::Evicted(Tier::Device, hashes));
                    }
                }
                Action::Refused { request, reason } => {
                    unreachable!("request {request} was placed where it fits: {reason}")
                }
                Action::Preempted { .. } => outcomes.push(Outcome::Preempted),
                Action::Lent { .. } => {}
            }
        }
        self.actions = actions;
    }

    /// Begins a step, with the following steps that are certain.
    fn begin(&mut self, began_s: f64, parts: Vec<StepSequence>, outcomes: &mut Vec<Outcome>) {
        self.plans += 1;
        let parts = match self.run(began_s, parts) {
            Ok(run) => return self.at = Some(Plan::Run(run)),
            Err(parts) => parts,
        };
        let (pieces, sequences, kv_tokens) = self.shape(&parts);
        let decode_s = if sequences == 0 { 0.0 } else { self.cost.decode_step_s(sequences, kv_tokens).0 };
        let computes_s = self.cost.step_s(&pieces, sequences, kv_tokens).0;
        let sends = self.sends(&parts);
        let alone_s = computes_s + sends.iter().map(|&(_, tokens)| self.kv.leaves_s(tokens).0).sum::<f64>();
        let (slower, _) = self.copying.begin(began_s, alone_s);
        let (time_s, decode_s) = (alone_s * slower, decode_s.min(computes_s) * slower);
        let told =
            sends.into_iter().map(|(request, tokens)| Outcome::Sends { request, tokens, step_s: time_s });
        outcomes.extend(told);
        self.at = Some(Plan::Step { parts, began_s, time_s, decode_s, slower });
    }

    /// The prompts of a step whose KV is sent while it runs, with the tokens of all layers that it is as much
    /// as.
    fn sends(&self, parts: &[StepSequence]) -> Vec<(u64, f64)> {
        let sent = |part: &StepSequence| {
            let to = self.machine.text(part.request)?.active.decoder.as_ref()?;
            let tokens = to.tokens_sent(&(part.start..part.start + part.tokens));
            (tokens > 0.0).then_some((part.request, tokens))
        };
        parts.iter().filter_map(sent).collect()
    }

    /// A step's arguments for the cost model: prompt chunks, decoding sequences and their tokens.
    fn shape(&self, parts: &[StepSequence]) -> (Vec<Prefill>, u32, u64) {
        let mut pieces = Vec::new();
        let (mut sequences, mut kv_tokens) = (0, 0);
        for &StepSequence { start, tokens, sample, .. } in parts {
            // A prompt's single last token counts as a decode, if the cost of decoding is known.
            let context = u64::from(start) + 1;
            if sample && tokens == 1 && self.cost.decode_step_s(1, context).0 > 0.0 {
                sequences += 1;
                kv_tokens += context;
            } else {
                pieces.push(Prefill { context: start, tokens, last: sample });
            }
        }
        (pieces, sequences, kv_tokens)
    }
}

impl Active {
    /// Adds gaps of steps from `began_s` to `now_s`; the time since the last token belongs to the first gap.
    fn advance(&mut self, now_s: f64, began_s: f64, gaps: Gaps) {
        let waited_s = (began_s - self.last_token_s).max(0.0);
        if waited_s > 0.0 {
            let first_s = gaps.first_s + waited_s;
            self.gaps.push(Gaps { count: 1, first_s, last_s: first_s });
            if gaps.count > 1 {
                self.gaps.push(Gaps { count: gaps.count - 1, ..gaps });
            }
        } else {
            self.gaps.push(gaps);
        }
        self.generated += gaps.count;
        self.last_token_s = now_s;
    }

    /// The sources of the first `tokens_cached` tokens.
    fn reused(&self, tokens_cached: u32, block_tokens: u32) -> Reused {
        let blocks = |tokens: u32| (tokens / block_tokens) as usize;
        let known = blocks(tokens_cached);
        let here = self.held_tokens.map_or(known, blocks).min(known);
        Reused::new(here.saturating_sub(self.loaded.iter().sum()), known, self.loaded)
    }
}
