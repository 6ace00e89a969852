//! What a fleet would do with a trace: the scheduler's own machine, driven by events whose times the cost models
//! tell instead of a clock.
//!
//! Everything that decides is `mixfleet_scheduler::fleet`; what an instance does with the requests that it was given is
//! [`engine`], what the wires between them do is [`network`]. One thread, no randomness but the seeds: equal input
//! gives equal output, byte by byte. What is modelled and what is not: docs/simulator.md.

mod classes;
mod copies;
mod engine;
mod network;
mod observe;
mod quantiles;
mod results;
mod setup;
mod tiers;
mod timeline;

pub use copies::Replicated;
pub use observe::{Answer, Observer, Sample};
pub use quantiles::Quantiles;
pub use results::{ClassResult, Distribution, HitBySource, PoolResult, Results};
pub use setup::Choices;
pub use tiers::TierSetup;

use crate::fleet_file::{Class, TbtMetric};
use crate::trace::{Request, Session, TraceError};
use classes::{Classes, Promised};
use copies::{Copies, Copy};
use engine::{Engine, Gaps, Job, Outcome};
use mixfleet_hal::units::{Seconds, UsdPerHour};
use mixfleet_scheduler::cost::{CostModel, LinkCost};
use mixfleet_scheduler::fleet::{
    Action, Arrival, Event, Fleet, FleetConfig, HandOff, Instance, InstanceId, PromptChain, Pull, Role,
};
use mixfleet_scheduler::kv::CachePolicy;
use mixfleet_scheduler::table::IdMap;
use network::Network;
use results::Ledger;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use timeline::Timeline;

/// In larger fleets a decision is made with what instances told when they last began something else: newcomers interrupt a run
/// of decode steps every second or two, and to ask a thousand instances for each decision would take most of the time.
const TOLD_OF_EACH_STEP_MAX: usize = 64;

/// An instance to be simulated.
#[derive(Clone, Debug)]
pub struct InstanceSetup {
    /// Which pool it is of.
    pub pool: u32,
    /// Its device, for people.
    pub device: Arc<str>,
    /// What it may do.
    pub role: Role,
    /// What steps take on it; instances of one kind share it.
    pub cost: Arc<CostModel>,
    /// Its rent.
    pub price: Option<UsdPerHour>,
    /// KV tokens that it holds, in use or cached.
    pub cache_tokens: u64,
    /// What it holds below its devices.
    pub tiers: Vec<TierSetup>,
    /// Its network card, each direction.
    pub nic: Option<LinkCost>,
    /// New tokens of a step.
    pub step_tokens_max: u32,
    /// Sequences at a time.
    pub sequences_max: u32,
}

/// A fleet to be simulated.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The scheduler's parameters.
    pub fleet: FleetConfig,
    /// Tokens that a client allows for its answer, at least as many as it gets; traces do not tell.
    pub max_tokens: u32,
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// What goes first from an instance's cache.
    pub cache_policy: CachePolicy,
    /// Names of the pools.
    pub pools: Vec<String>,
    /// All instances.
    pub instances: Vec<InstanceSetup>,
    /// What joins pools beyond their network cards.
    pub pool_links: Vec<(u32, u32, LinkCost)>,
    /// The objectives by which requests are counted as good, where no class promises them something else.
    pub slo: Objectives,
    /// Requests with promises of their own.
    pub classes: Vec<Class>,
}

/// What a good answer is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objectives {
    /// To the first token.
    pub ttft_s: f64,
    /// Between tokens, by `metric`.
    pub tbt_s: f64,
    /// Which of a request's gaps count.
    pub metric: TbtMetric,
}

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    /// The instance's steps end, if it is still at its `plan`th.
    StepsEnd { instance: u32, plan: u64 },
    /// There may be something to begin: a prefix that was pulled, or loaded from a lower tier, is there, or a request came.
    Wake { instance: u32 },
    /// A prompt's KV has arrived where it decodes.
    Landed { request: u64 },
    /// There is room for a prompt where it decodes: whoever computes it hears of it, after those who were told things directly.
    Reserved { request: u64 },
    /// A copy ahead of demand has arrived.
    Copied { number: u64 },
    /// A request comes later than in the trace: it follows an answer that took longer.
    Arrive { request: u64 },
}

/// A time that orders.
#[derive(Clone, Copy, Debug, PartialEq)]
struct At(f64);

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A request in the fleet.
struct Flight {
    class: u32,
    promised: Promised,
    session: Option<Session>,
    prompt_tokens: u32,
    output_tokens: u32,
    prefill: u32,
    decode: u32,
    arrived_s: f64,
    /// Tokens of the prompt that its decode instance holds.
    held_tokens: u32,
    /// Where the prompt is computed, once there is room where it decodes.
    waits: Option<(u32, Job)>,
    /// Its place in the order.
    due_s: f64,
    /// When its prefill began; its layers leave from then on.
    prefill_began_s: f64,
    first_token_s: f64,
}

/// Runs `requests` through the fleet until the last is done, under the eyes of `observer`.
///
/// # Errors
/// What the trace's reader says, and [`TraceError::Late`] where the fleet is so slow that times run out.
pub fn run(
    setup: &Setup,
    requests: impl Iterator<Item = Result<Request, TraceError>>,
    observer: &mut dyn Observer,
) -> Result<Results, TraceError> {
    let mut world = World::new(setup, observer);
    for request in requests {
        let request = request?;
        let at_s = request.at.0;
        TraceError::unless_late("a request arrives", at_s)?;
        while world.next_at().is_some_and(|next_s| next_s <= at_s) {
            world.advance();
            world.check()?;
        }
        world.move_to(at_s);
        world.turn_up(request);
    }
    // a copy that is still on its way then is nobody's
    while world.has_requests() && world.next_at().is_some() {
        world.advance();
        world.check()?;
    }
    world.last_sample();
    Ok(world.ledger.results(setup, world.now_s, &world.network, &world.copies))
}

struct World<'a> {
    setup: &'a Setup,
    now_s: f64,
    fleet: Fleet,
    engines: Vec<Engine>,
    network: Network,
    copies: Copies,
    flights: IdMap<Flight>,
    classes: Classes<'a>,
    /// Requests that arrive later.
    coming: IdMap<Request>,
    agenda: BinaryHeap<Reverse<(At, u64, Next)>>,
    scheduled: u64,
    ledger: Ledger,
    timeline: Timeline,
    observer: &'a mut dyn Observer,
    actions: Vec<Action>,
    outcomes: Vec<Outcome>,
}

impl<'a> World<'a> {
    /// Whether time and the samples of it are still within bounds.
    fn check(&self) -> Result<(), TraceError> {
        TraceError::unless_late("the fleet is still at work", self.now_s)?;
        self.timeline.check()
    }

    fn new(setup: &'a Setup, observer: &'a mut dyn Observer) -> Self {
        let mut fleet = Fleet::new(setup.fleet.clone());
        let mut actions = Vec::new();
        for (at, instance) in setup.instances.iter().enumerate() {
            let spec = Instance {
                id: InstanceId(at as u32),
                device: instance.device.clone(),
                role: instance.role,
                pool: instance.pool,
                cost: instance.cost.clone(),
                price: instance.price,
                nic: instance.nic,
                kv_capacity_tokens: instance.cache_tokens,
                kv_block_tokens: setup.block_tokens,
                prefill_tokens_beside_decode_max: instance.step_tokens_max,
            };
            fleet.step(Seconds::ZERO, Event::InstanceUp(spec), &mut actions);
            for &TierSetup { tier, cost, .. } in &instance.tiers {
                let up = Event::TierUp { instance: InstanceId(at as u32), tier, cost };
                fleet.step(Seconds::ZERO, up, &mut actions);
            }
        }
        for &(from, to, cost) in &setup.pool_links {
            fleet.step(Seconds::ZERO, Event::PoolsJoined { from, to, cost }, &mut actions);
        }
        World {
            setup,
            now_s: 0.0,
            fleet,
            engines: setup.instances.iter().map(|instance| Engine::new(instance, setup)).collect(),
            network: Network::new(setup),
            copies: Copies::default(),
            flights: IdMap::default(),
            classes: Classes::new(setup),
            coming: IdMap::default(),
            agenda: BinaryHeap::new(),
            scheduled: 0,
            ledger: Ledger::new(setup),
            timeline: Timeline::new(observer.interval_s(), setup.pools.len()),
            observer,
            actions,
            outcomes: Vec::new(),
        }
    }

    fn has_requests(&self) -> bool {
        !self.flights.is_empty() || !self.coming.is_empty()
    }

    fn next_at(&self) -> Option<f64> {
        self.agenda.peek().map(|Reverse((at, ..))| at.0)
    }

    fn schedule(&mut self, at_s: f64, next: Next) {
        self.scheduled += 1;
        self.agenda.push(Reverse((At(at_s), self.scheduled, next)));
    }

    fn tell(&mut self, event: Event) {
        self.fleet.step(Seconds(self.now_s), event, &mut self.actions);
    }

    fn advance(&mut self) {
        let Some(Reverse((at, _, next))) = self.agenda.pop() else { return };
        self.move_to(at.0);
        match next {
            Next::StepsEnd { instance, plan } => {
                if self.engines[instance as usize].plan() == plan {
                    self.steps_end(instance);
                }
            }
            Next::Wake { instance } => self.turn(instance),
            Next::Landed { request } => self.landed(request),
            Next::Copied { number } => self.copied(number),
            Next::Reserved { request } => self.reserved(request),
            Next::Arrive { request } => {
                if let Some(request) = self.coming.remove(request) {
                    self.arrive(request);
                }
            }
        }
    }

    /// A request whose time in the trace has come.
    fn turn_up(&mut self, request: Request) {
        if let Some((at_s, request)) = self.classes.arrives(request, self.now_s) {
            if at_s > self.now_s { self.comes_at(at_s, request) } else { self.arrive(request) }
        }
    }

    fn comes_at(&mut self, at_s: f64, request: Request) {
        self.schedule(at_s, Next::Arrive { request: request.id });
        self.coming.insert(request.id, request);
    }

    /// A request has ended, in whatever way: whoever follows comes.
    fn goes_on(&mut self, session: Option<Session>, request: u64) {
        let Some(session) = session else { return };
        for (at_s, next) in self.classes.ended(session, request, self.now_s) {
            self.comes_at(at_s.max(next.at.0), next);
        }
    }

    fn arrive(&mut self, request: Request) {
        let (class, objective, promised) = self.classes.promise(&request, self.now_s);
        self.ledger.arrived(&request, class);
        self.timeline.arrived();
        self.observer.arrived(self.now_s, self.ledger.requests);
        let arrival = Arrival {
            request: request.id,
            prompt_tokens: request.prompt_tokens,
            max_tokens: self.setup.max_tokens.max(request.output_tokens),
            output_tokens_hint: None,
            chains: vec![PromptChain {
                block_tokens: self.setup.block_tokens,
                hashes: request.chain.clone(),
            }],
            replay: None,
            class,
            objective,
        };
        if self.engines.len() <= TOLD_OF_EACH_STEP_MAX {
            (0..self.engines.len() as u32).for_each(|instance| self.catch_up(instance));
        }
        self.tell(Event::Arrived(arrival));
        let mut copies = Vec::new();
        for action in std::mem::take(&mut self.actions) {
            self.observer.decided(self.now_s, &action);
            match action {
                Action::Place { prefill, decode, pull, due, .. } => {
                    let at = (prefill.0, decode.0);
                    self.placed(request, (class, promised), at, pull, due);
                    return copies.into_iter().for_each(|copy| self.send_copy(copy));
                }
                Action::Reject { reason, .. } => {
                    self.ledger.rejected(&reason);
                    self.timeline.rejected();
                    self.goes_on(request.session, request.id);
                }
                Action::SetRole { instance, role } => self.engines[instance.0 as usize].set_role(role),
                Action::Replicate { from, to, hashes, tokens } => {
                    copies.push(Copy { from: from.0, to: to.0, chain: hashes, tokens });
                }
                Action::Drop { .. } | Action::Replay { .. } => {}
            }
        }
    }

    fn placed(
        &mut self,
        request: Request,
        (class, promised): (u32, Promised),
        (prefill, decode): (u32, u32),
        pull: Option<Pull>,
        due: Seconds,
    ) {
        let mut ready_at_s = self.now_s;
        if let Some(Pull { from, tokens }) = pull {
            let bytes = f64::from(tokens) * self.setup.fleet.kv_bytes_per_token as f64;
            ready_at_s = self.network.send(self.now_s, self.now_s, from.0, prefill, bytes);
            self.schedule(ready_at_s, Next::Wake { instance: prefill });
        }
        let Request { id, prompt_tokens, output_tokens, chain, session, .. } = request;
        let mut flight = Flight {
            class,
            promised,
            session,
            prompt_tokens,
            output_tokens,
            prefill,
            decode,
            arrived_s: self.now_s,
            held_tokens: 0,
            waits: None,
            due_s: due.0,
            prefill_began_s: self.now_s,
            first_token_s: f64::INFINITY,
        };
        let job = Job {
            request: id,
            prompt_tokens,
            output_tokens,
            chain,
            pulled_tokens: pull.map_or(0, |pull| pull.tokens),
            ready_at_s,
            stays: prefill == decode,
            due_s: due.0,
            gives_way: promised.is_flexible(),
        };
        if self.setup.fleet.hand_off == HandOff::Reserved && !job.stays {
            self.engines[decode as usize].reserve(Job { stays: true, ..job.clone() });
            flight.waits = Some((prefill, job));
            self.flights.insert(id, flight);
            self.turn(decode);
        } else {
            self.flights.insert(id, flight);
            self.enqueue(prefill, job);
        }
    }

    fn enqueue(&mut self, instance: u32, job: Job) {
        if let Some(loaded_s) = self.engines[instance as usize].enqueue(self.now_s, job) {
            self.schedule(loaded_s, Next::Wake { instance });
        }
        self.wake(instance);
    }

    /// Lets an instance begin what it can once all that happens now has happened: it takes it in together.
    fn wake(&mut self, instance: u32) {
        self.schedule(self.now_s, Next::Wake { instance });
    }

    /// There is room for a prompt where it decodes: it can be computed.
    fn reserved(&mut self, request: u64) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        if let Some((prefill, job)) = flight.waits.take() {
            self.enqueue(prefill, job);
        }
    }

    /// Whoever decides next knows of every step that is done.
    fn catch_up(&mut self, instance: u32) {
        self.engines[instance as usize].catch_up(self.now_s, &mut self.outcomes);
        self.settle(instance);
    }

    /// Lets an instance begin what it can; steps that run are cut short after the one in progress.
    fn turn(&mut self, instance: u32) {
        let engine = &mut self.engines[instance as usize];
        if let Some(ends_at_s) = engine.turn(self.now_s, &mut self.outcomes) {
            let plan = engine.plan();
            self.schedule(ends_at_s, Next::StepsEnd { instance, plan });
        }
        self.settle(instance);
    }

    fn steps_end(&mut self, instance: u32) {
        self.engines[instance as usize].steps_end(self.now_s, &mut self.outcomes);
        self.settle(instance);
        self.turn(instance);
    }

    /// Tells the fleet, and the ledger, what an instance's steps brought.
    fn settle(&mut self, instance: u32) {
        let id = InstanceId(instance);
        let mut outcomes = std::mem::take(&mut self.outcomes);
        for outcome in outcomes.drain(..) {
            match outcome {
                Outcome::Began { request, reused } => {
                    self.ledger.began(reused);
                    if let Some(flight) = self.flights.get_mut(request) {
                        flight.prefill_began_s = self.now_s;
                    }
                }
                Outcome::Stored(tier, hashes) => self.tell(Event::KvStored { instance: id, hashes, tier }),
                Outcome::Evicted(tier, hashes) => self.tell(Event::KvEvicted { instance: id, hashes, tier }),
                Outcome::Loads { until_s } => self.schedule(until_s, Next::Wake { instance }),
                Outcome::Progress { request, tokens } => {
                    self.tell(Event::PrefillProgress { request, instance: id, tokens });
                }
                Outcome::Reserved { request, held_tokens } => {
                    if let Some(flight) = self.flights.get_mut(request) {
                        flight.held_tokens = held_tokens;
                    }
                    self.schedule(self.now_s, Next::Reserved { request });
                }
                Outcome::Joined { request } => {
                    self.tell(Event::TransferDone { request, instance: id });
                    self.taken_in(request);
                }
                Outcome::Prefilled { request } => self.prefilled(instance, request),
                Outcome::Decoded { requests, tokens } => {
                    self.tell(Event::DecodeStep { instance: id, requests, tokens });
                }
                Outcome::Busy { prefill_s, decode_s } => {
                    self.ledger.busy(self.engines[instance as usize].pool(), prefill_s, decode_s);
                }
                Outcome::Finished { request, gaps } => self.end(request, &gaps),
            }
        }
        self.outcomes = outcomes;
    }

    fn prefilled(&mut self, instance: u32, request: u64) {
        let Some(flight) = self.flights.get_mut(request) else { return };
        flight.first_token_s = self.now_s;
        let Flight { output_tokens, decode, prefill_began_s: began_s, .. } = *flight;
        let sent_tokens = flight.prompt_tokens - flight.held_tokens;
        if self.setup.fleet.drop_at_decode && decode != instance {
            self.catch_up(decode);
        }
        self.tell(Event::PrefillDone { request, instance: InstanceId(instance) });
        if self.actions.drain(..).any(|action| matches!(action, Action::Drop { .. })) {
            self.ledger.dropped(self.now_s - began_s);
            self.timeline.dropped(self.engines[decode as usize].pool());
            let session = self.flights.remove(request).and_then(|flight| flight.session);
            self.goes_on(session, request);
            self.engines[instance as usize].drop_request(request);
            self.engines[decode as usize].drop_request(request);
        } else if decode != instance && output_tokens == 1 {
            // an answer of one token ends with its prefill
            self.engines[instance as usize].drop_request(request);
            self.engines[decode as usize].drop_request(request);
            self.end(request, &[]);
        } else if decode != instance {
            let bytes = f64::from(sent_tokens) * self.setup.fleet.kv_bytes_per_token as f64;
            let layers = self.setup.fleet.layers;
            let landed_s = self.network.hand_off(began_s, self.now_s, (instance, decode), bytes, layers);
            if landed_s > self.now_s {
                self.schedule(landed_s, Next::Landed { request });
            } else {
                self.landed(request);
            }
        }
    }

    fn end(&mut self, request: u64, gaps: &[Gaps]) {
        if let Some(flight) = self.flights.remove(request) {
            let answer = self.ledger.finished(&flight, self.now_s, gaps);
            self.timeline.completed(self.engines[flight.decode as usize].pool());
            self.observer.finished(self.now_s, &answer);
            self.goes_on(flight.session, request);
        }
        self.tell(Event::Finished { request });
    }

    fn landed(&mut self, request: u64) {
        let Some(flight) = self.flights.get(request) else { return };
        let Flight { prompt_tokens, output_tokens, decode, due_s, first_token_s, promised, .. } = *flight;
        let job = Job {
            request,
            prompt_tokens,
            output_tokens,
            chain: Vec::new(),
            pulled_tokens: 0,
            ready_at_s: 0.0,
            stays: true,
            due_s,
            gives_way: promised.is_flexible(),
        };
        if self.setup.fleet.hand_off == HandOff::Streamed {
            self.tell(Event::TransferDone { request, instance: InstanceId(decode) });
        }
        self.engines[decode as usize].join(job, first_token_s);
        self.wake(decode);
        if self.setup.fleet.hand_off == HandOff::Reserved && self.engines[decode as usize].is_idle() {
            self.taken_in(request);
        }
    }

    /// The KV of a prompt is where it decodes: who computed it needs it no more.
    fn taken_in(&mut self, request: u64) {
        let Some(flight) = self.flights.get(request) else { return };
        let sender = flight.prefill;
        self.engines[sender as usize].let_go(request);
        self.wake(sender);
    }
}
