//! Plays a trace against the scheduler's own machines. Events take place at times that the cost models
//! predict; there is no clock.
//!
//! All decisions are made by `mixfleet_scheduler::fleet`; `engine` runs the batch machine of each instance,
//! and `network` models the links between them. It uses one thread and only seeded randomness: equal inputs
//! give equal outputs, byte by byte. docs/explanation/simulator.md describes what is modelled.

mod agenda;
mod classes;
mod copies;
mod engine;
mod flight;
mod network;
mod observe;
mod occupancy;
mod quantiles;
mod results;
mod routers;
mod setup;
mod slowdown;
mod spare;
mod tiers;
mod timeline;
mod transfers;

pub use copies::Replicated;
pub use observe::{AnswerTimes, Observer, Sample};
pub use occupancy::PoolUse;
pub use quantiles::{Distribution, Quantiles};
pub use results::{ClassResult, HitBySource, Misses, PoolBasis, PoolResult, Results};
pub use setup::Choices;
pub use tiers::TierSetup;

use crate::fleet_file::{Class, PoolSlowdown, Routing, Slo};
use crate::trace::{ConversationTurn, Request, TraceError};
use agenda::{Agenda, Next};
use classes::Classes;
use copies::Copies;
use engine::{Engine, Gaps, Message, Outcome};
use flight::{Flight, HandOffTarget};
use mixfleet_hal::DType;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Ordered, Seconds};
use mixfleet_scheduler::batch::{BatchLimits, Urgency};
use mixfleet_scheduler::cost::LinkCost;
use mixfleet_scheduler::fleet::{Action, Arrival, Event, FleetConfig, Instance, InstanceId, PromptChain};
use mixfleet_scheduler::table::IdMap;
use mixfleet_scheduler::transfer::{self, KvTransfers, PrefixSource, Reporter};
use network::Network;
use occupancy::Occupancy;
use results::{Ledger, Reused};
use routers::RouterMachines;
use spare::SpareSharing;
use timeline::Timeline;
use transfers::SimulatedTransfer;

/// Largest fleet, in instances, in which all steps so far are reported before each decision. In a larger one,
/// an instance reports its decode steps when a run of them ends. Arrivals end a run every second or two, and
/// updating a thousand instances for each decision would take most of the simulation's time.
const TOLD_OF_EACH_STEP_MAX: usize = 64;

/// The dtype of all KV; the fleet file gives its size.
const KV: DType = DType::Bf16;

/// The setup of an instance.
#[derive(Clone, Debug)]
pub struct InstanceSetup {
    /// Its description for the fleet machine; a run sets its id and the dtype of its KV.
    pub spec: Instance,
    /// Limits of its batches and its KV blocks.
    pub limits: BatchLimits,
    /// The tiers below its devices.
    pub tiers: Vec<TierSetup>,
    /// Indices of the instances whose devices compute attention for a part of what it decodes.
    pub lenders: Vec<u32>,
}

/// The setup of a fleet.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Configuration of the fleet machine.
    pub fleet: FleetConfig,
    /// `max_tokens` of a request, unless its answer is longer; traces do not record it.
    pub max_tokens: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// Names of the pools.
    pub pools: Vec<String>,
    /// The source of each pool's predicted times.
    pub bases: Vec<PoolBasis>,
    /// All instances.
    pub instances: Vec<InstanceSetup>,
    /// Links between pools besides their network interfaces.
    pub pool_links: Vec<(u32, u32, LinkCost)>,
    /// Objectives by which requests without a class are judged.
    pub slo: Slo,
    /// Requests with objectives of their own.
    pub classes: Vec<Class>,
    /// Instances that become slower during the run.
    pub slowdowns: Vec<PoolSlowdown>,
    /// The routers.
    pub routers: Routing,
}

/// Runs `requests` through the fleet until the last is done, observed by `observer`.
///
/// # Errors
/// Those of the trace's reader, and [`TraceError::Late`] if the fleet is so slow that times overflow.
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
        while world.agenda.next_at().is_some_and(|next_s| next_s <= at_s) {
            world.advance();
            world.check()?;
        }
        if world.is_decided() {
            break;
        }
        world.move_to(at_s);
        world.turn_up(request);
    }
    // Copies in progress at the end of the last request are ignored.
    while world.has_requests() && world.agenda.next_at().is_some() && !world.is_decided() {
        world.advance();
        world.check()?;
    }
    world.last_sample();
    let measured = (&world.network, &world.copies, &world.occupancy);
    Ok(world.ledger.results(setup, world.now_s, measured))
}

struct World<'a> {
    setup: &'a Setup,
    now_s: f64,
    routers: RouterMachines,
    engines: Vec<Engine>,
    network: Network,
    copies: Copies,
    transfers: KvTransfers<()>,
    transferred: Vec<transfer::Action<u32, ()>>,
    flights: IdMap<Flight>,
    classes: Classes<'a>,
    /// Requests that arrive later.
    coming: IdMap<Request>,
    agenda: Agenda,
    ledger: Ledger,
    timeline: Timeline,
    occupancy: Occupancy,
    sharing: SpareSharing,
    observer: &'a mut dyn Observer,
    actions: Vec<Action>,
    outcomes: Vec<Outcome>,
}

impl<'a> World<'a> {
    /// Checks that the time and the number of samples are within their limits.
    fn check(&self) -> Result<(), TraceError> {
        TraceError::unless_late("the fleet is still at work", self.now_s)?;
        self.timeline.check()
    }

    fn new(setup: &'a Setup, observer: &'a mut dyn Observer) -> Self {
        let mut routers = RouterMachines::new(&setup.fleet, setup.routers);
        let mut actions = Vec::new();
        for (at, instance) in setup.instances.iter().enumerate() {
            let spec = Instance { id: InstanceId(to_u32(at)), kv_dtype: KV, ..instance.spec.clone() };
            routers.tell(0.0, Event::InstanceUp(spec), &mut actions);
            for &TierSetup { tier, cost, .. } in &instance.tiers {
                let up = Event::TierUp { instance: InstanceId(to_u32(at)), tier, cost };
                routers.tell(0.0, up, &mut actions);
            }
        }
        for &(from, to, cost) in &setup.pool_links {
            routers.tell(0.0, Event::PoolsJoined { from, to, cost }, &mut actions);
        }
        let mut world = World {
            setup,
            now_s: 0.0,
            routers,
            engines: setup.instances.iter().map(|instance| Engine::new(instance, setup)).collect(),
            network: Network::new(setup),
            copies: Copies::default(),
            transfers: KvTransfers::default(),
            transferred: Vec::new(),
            flights: IdMap::default(),
            classes: Classes::new(setup),
            coming: IdMap::default(),
            agenda: Agenda::default(),
            ledger: Ledger::new(setup),
            timeline: Timeline::new(observer.interval_s(), setup.pools.len()),
            occupancy: Occupancy::new(setup.pools.len()),
            sharing: SpareSharing::new(setup),
            observer,
            actions,
            outcomes: Vec::new(),
        };
        world.schedule_slowdowns();
        world.schedule_beat(1);
        world
    }

    fn has_requests(&self) -> bool {
        !self.flights.is_empty() || !self.coming.is_empty()
    }

    fn is_decided(&self) -> bool {
        self.observer.is_decided(self.ledger.missed)
    }

    fn schedule(&mut self, at_s: f64, next: Next) {
        self.agenda.schedule(self.now_s, at_s, next);
    }

    fn tell(&mut self, event: Event) {
        self.observer.told(self.now_s, &event);
        self.routers.tell(self.now_s, event, &mut self.actions);
    }

    fn advance(&mut self) {
        let Some((at_s, next)) = self.agenda.pop() else { return };
        self.move_to(at_s);
        match next {
            Next::StepsEnd { instance, plan } => {
                if self.engines[instance as usize].plan() == plan {
                    self.steps_end(instance);
                }
            }
            Next::Wake { instance } => self.turn(instance),
            Next::Landed { request, attempt } if self.is_current(request, attempt) => self.landed(request),
            Next::Lent { from, prefix, ready } => self.lent(from, prefix, ready.0),
            Next::Loaded { instance, request, attempt, blocks } if self.is_current(request, attempt) => {
                self.send(instance, Message::Loaded { request, blocks });
            }
            Next::Pulled { from, prefix } => self.pulled(from, prefix),
            Next::Reserved { instance, request, attempt, held_tokens: room } => {
                let by = Reporter { instance: InstanceId(instance), request, attempt };
                self.transfer(SimulatedTransfer::Reserved { by, room });
            }
            Next::TakenOver { request, attempt } if self.is_current(request, attempt) => {
                if let Some(prefill) = self.transfers.place(request).map(|place| place.prefill) {
                    self.send(prefill.0, Message::LetGo { request });
                }
            }
            Next::Revoked { instance, request, attempt } => {
                let by = Reporter { instance: InstanceId(instance), request, attempt };
                self.transfer(SimulatedTransfer::Revoked { by });
            }
            // Events of an earlier placement are ignored.
            Next::Landed { .. } | Next::Loaded { .. } | Next::TakenOver { .. } => {}
            Next::Beat { number } => self.beat(number),
            Next::SlowsDown { index } => self.slows_down(index),
            Next::Arrive { request } => {
                if let Some(request) = self.coming.remove(request) {
                    self.arrive(request);
                }
            }
        }
    }

    fn is_current(&self, request: u64, attempt: u32) -> bool {
        self.transfers.attempt(request) == attempt
    }

    /// Handles a request at its time in the trace.
    fn turn_up(&mut self, request: Request) {
        if let Some((at_s, request)) = self.classes.arrives(request, self.now_s) {
            if at_s > self.now_s { self.comes_at(at_s, request) } else { self.arrive(request) }
        }
    }

    fn comes_at(&mut self, at_s: f64, request: Request) {
        self.schedule(at_s, Next::Arrive { request: request.id });
        self.coming.insert(request.id, request);
    }

    /// Schedules the requests of a conversation that follow one that has ended.
    fn goes_on(&mut self, session: Option<ConversationTurn>, request: u64) {
        let Some(session) = session else { return };
        for (at_s, next) in self.classes.ended(session, request, self.now_s) {
            self.comes_at(at_s.max(next.at.0), next);
        }
    }

    fn arrive(&mut self, request: Request) {
        let (class, objective, promised) = self.classes.promise(&request, self.now_s);
        let head_start = self.classes.head_start(class);
        self.ledger.arrived(&request, class);
        self.timeline.arrived += 1;
        self.observer.arrived(self.now_s, self.ledger.all.requests);
        let Request { id, prompt_tokens, output_tokens, chain, session, .. } = request;
        let flight = Flight {
            class,
            promised,
            objective,
            session,
            prompt_tokens,
            output_tokens,
            chain: chain.into_iter().map(engine::public).collect(),
            arrived_s: self.now_s,
            held_tokens: 0,
            urgency: Urgency::due_at(Seconds::ZERO),
            head_start,
            known_tokens: 0,
            prefill_began_s: self.now_s,
            first_token_s: f64::INFINITY,
            last_token_s: f64::INFINITY,
            gaps: Vec::new(),
        };
        self.flights.insert(id, flight);
        self.ask_fleet(id, None);
    }

    /// Has a request placed, for the first time or, with its due time, again.
    fn ask_fleet(&mut self, request: u64, replay: Option<Seconds>) {
        let Some(flight) = self.flights.get(request) else { return };
        let drawn = self.transfers.tokens(request);
        let arrival = Arrival {
            request,
            prompt_tokens: flight.prompt_tokens + drawn,
            max_tokens: self.setup.max_tokens.max(flight.output_tokens) - drawn,
            chains: vec![PromptChain {
                block_tokens: self.setup.block_tokens,
                kv_dtype: KV,
                hashes: flight.chain.to_vec(),
            }],
            replay,
            class: flight.class,
            objective: flight.objective,
            head_start: flight.head_start,
            ..Arrival::default()
        };
        if self.engines.len() <= TOLD_OF_EACH_STEP_MAX {
            (0..to_u32(self.engines.len())).for_each(|instance| self.catch_up(instance));
        }
        self.tell(Event::Arrived(arrival));
        let mut copies = Vec::new();
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            self.observer.decided(self.now_s, &action);
            match action {
                Action::Place { prefill, decode, pull, urgency, explanation, .. } => {
                    if let Some(flight) = self.flights.get_mut(request) {
                        flight.urgency = urgency;
                    }
                    let pull = PrefixSource::of(pull, &explanation);
                    self.transfer(SimulatedTransfer::Placed { request, prefill, decode, pull });
                }
                Action::Reject { reason, .. } => {
                    self.ledger.rejected(&reason);
                    self.timeline.rejected += 1;
                    let session = self.flights.remove(request).and_then(|flight| flight.session);
                    self.transfer(SimulatedTransfer::Cancelled { request });
                    self.goes_on(session, request);
                }
                Action::Replicate { .. } => copies.push(action),
                // Instances do what they are given; only the fleet machine has roles.
                Action::SetRole { .. } | Action::Drop { .. } | Action::Replay { .. } => {}
            }
        }
        actions.append(&mut self.actions);
        self.actions = actions;
        copies.into_iter().for_each(|action| self.begin_copy(action));
    }

    /// Sends a message to an instance, which starts work at its turn.
    fn send(&mut self, instance: u32, message: Message) {
        self.engines[instance as usize].send(self.now_s, message, &mut self.outcomes);
        self.settle(instance);
        if self.engines[instance as usize].is_idle() {
            self.wake(instance);
        } else {
            self.schedule_end(instance);
        }
    }

    /// Schedules a turn of an instance after all events of this time, which it then handles together.
    fn wake(&mut self, instance: u32) {
        self.schedule(self.now_s, Next::Wake { instance });
    }

    /// Reports the steps that are done before a decision.
    fn catch_up(&mut self, instance: u32) {
        self.engines[instance as usize].catch_up(self.now_s, &mut self.outcomes);
        self.settle(instance);
    }

    /// Lets an instance start work; a run of steps is cut short after the current one.
    fn turn(&mut self, instance: u32) {
        self.shares(instance);
        self.engines[instance as usize].turn(self.now_s, &mut self.outcomes);
        self.schedule_end(instance);
        self.settle(instance);
        self.shared(instance);
    }

    /// Schedules the end of an instance's plan, which may be new or cut short.
    fn schedule_end(&mut self, instance: u32) {
        let engine = &mut self.engines[instance as usize];
        if let Some(ends_s) = engine.ends_s() {
            let plan = engine.plan();
            self.schedule(ends_s, Next::StepsEnd { instance, plan });
        }
    }

    fn steps_end(&mut self, instance: u32) {
        self.engines[instance as usize].steps_end(self.now_s, &mut self.outcomes);
        self.settle(instance);
        // It handles messages from other instances before its next step.
        self.wake(instance);
    }

    /// Reports the outcomes of an instance's steps to the fleet and the ledger.
    fn settle(&mut self, instance: u32) {
        let id = InstanceId(instance);
        let mut outcomes = std::mem::take(&mut self.outcomes);
        for outcome in outcomes.drain(..) {
            match outcome {
                Outcome::Began { request, reused } => self.began(instance, request, reused),
                Outcome::Stored(tier, hashes) => self.tell(Event::KvStored { instance: id, hashes, tier }),
                Outcome::Evicted(tier, hashes) => self.tell(Event::KvEvicted { instance: id, hashes, tier }),
                Outcome::Progress { request, tokens } => {
                    self.tell(Event::PrefillProgress { request, instance: id, tokens });
                }
                Outcome::Reserved { request, attempt, held_tokens } => {
                    self.schedule(self.now_s, Next::Reserved { instance, request, attempt, held_tokens });
                }
                Outcome::Revoked { request } => {
                    let attempt = self.transfers.attempt(request);
                    self.schedule(self.now_s, Next::Revoked { instance, request, attempt });
                }
                Outcome::Kept { request } => self.transfer(SimulatedTransfer::Kept { request }),
                Outcome::Preempted => self.ledger.preemptions += 1,
                Outcome::Sends { request, tokens, step_s } => {
                    let to = self.transfers.place(request).map(|place| place.decode.0);
                    to.into_iter().for_each(|to| self.comes(instance, to, tokens, step_s));
                }
                Outcome::Lent { prefix, ready_s } => {
                    let ready = Ordered(ready_s);
                    self.schedule(self.now_s, Next::Lent { from: instance, prefix, ready });
                }
                Outcome::Loads { request, attempt, blocks, until_s } => {
                    self.schedule(until_s, Next::Loaded { instance, request, attempt, blocks });
                }
                Outcome::Joined { request, attempt } => {
                    if self.is_current(request, attempt) {
                        let at = Seconds(self.now_s);
                        self.transfer(SimulatedTransfer::Joined { request, instance: id, at });
                    }
                }
                Outcome::Prefilled { request } => self.prefilled(instance, request),
                Outcome::Decoded { requests, tokens } => {
                    self.tell(Event::DecodeStep { instance: id, requests, tokens });
                }
                Outcome::Busy { prefill_s, decode_s } => {
                    self.ledger.busy(self.engines[instance as usize].pool(), prefill_s, decode_s);
                }
                Outcome::Ran(steps) => self.tell(Event::Measured { instance: id, steps }),
                Outcome::Finished { request, gaps } => self.end(instance, request, gaps),
            }
        }
        self.outcomes = outcomes;
    }

    /// Handles a prompt that has got its blocks; `reused` is the KV that it need not compute.
    fn began(&mut self, instance: u32, request: u64, reused: Reused) {
        self.ledger.began(reused);
        let drawn = self.transfers.tokens(request);
        let Some(to) = self.transfers.place(request).map(|place| place.decode.0) else { return };
        let Some(flight) = self.flights.get_mut(request) else { return };
        flight.prefill_began_s = self.now_s;
        flight.known_tokens = reused.tokens(self.setup.block_tokens);
        let (known, held, length) = (flight.known_tokens, flight.held_tokens, flight.prompt_tokens + drawn);
        self.routers.began(self.now_s, request, known);
        let (instance_id, attempt) = (InstanceId(instance), self.transfers.attempt(request));
        let by = Reporter { instance: instance_id, request, attempt };
        self.transfer(SimulatedTransfer::Admitted { by });
        if to != instance && known > held {
            let target = HandOffTarget::new(length, held, &self.setup.instances[to as usize].spec);
            let sent = target.tokens_sent(&(0..known));
            self.leaves(instance, to, sent, sent);
        }
    }

    /// Handles a computed prompt with its first token.
    fn prefilled(&mut self, instance: u32, request: u64) {
        let (now_s, index) = (self.now_s, self.transfers.tokens(request));
        let Some(decode) = self.transfers.place(request).map(|place| place.decode.0) else { return };
        let Some(flight) = self.flights.get_mut(request) else { return };
        if index == 0 {
            flight.first_token_s = now_s;
        } else {
            let gap_s = now_s - flight.last_token_s;
            flight.gaps.push(Gaps { count: 1, first_s: gap_s, last_s: gap_s });
        }
        flight.last_token_s = now_s;
        let Flight { prompt_tokens, known_tokens, held_tokens, .. } = *flight;
        let began_s = flight.prefill_began_s;
        let length = prompt_tokens + index;
        let complete = index + 1 == flight.output_tokens;
        if self.setup.fleet.drop_at_decode && decode != instance {
            self.catch_up(decode);
        }
        let attempt = self.transfers.attempt(request);
        let by = Reporter { instance: InstanceId(instance), request, attempt };
        self.transfer(SimulatedTransfer::Drawn { by, index, token: (), at: Seconds(now_s) });
        self.tell(Event::PrefillDone { request, instance: InstanceId(instance) });
        if self.actions.drain(..).any(|action| matches!(action, Action::Drop { .. })) {
            let cost = &self.setup.instances[instance as usize].spec.cost;
            self.ledger.dropped(cost.prefill_s(known_tokens, prompt_tokens - known_tokens).0);
            self.timeline.pools[self.engines[decode as usize].pool() as usize].dropped += 1;
            let session = self.flights.remove(request).and_then(|flight| flight.session);
            self.goes_on(session, request);
            self.transfer(SimulatedTransfer::Cancelled { request });
        } else if decode != instance && complete {
            // An answer of one token ends with its prefill.
            self.send(instance, Message::LetGo { request });
            self.end(instance, request, Vec::new());
        } else if decode != instance {
            let spec = &self.setup.instances[decode as usize].spec;
            let sent_tokens = spec.tokens_sent(&(held_tokens..length), length);
            let bytes = sent_tokens * self.setup.fleet.kv_bytes_per_token as f64;
            let layers = self.setup.fleet.layers;
            let landed_s = self.network.hand_off(began_s, now_s, (instance, decode), bytes, layers);
            if landed_s > now_s {
                self.schedule(landed_s, Next::Landed { request, attempt });
            } else {
                self.landed(request);
            }
        }
    }

    /// Completes an answer, whose last token `instance` drew. `gaps` are those since its latest placement.
    fn end(&mut self, instance: u32, request: u64, gaps: Vec<Gaps>) {
        let decode = self.transfers.place(request).map(|place| place.decode);
        self.transfer(SimulatedTransfer::Finished { request, instance: InstanceId(instance), knows: true });
        if let (Some(mut flight), Some(decode)) = (self.flights.remove(request), decode) {
            let mut gaps = gaps;
            if !flight.gaps.is_empty() {
                gaps.splice(..0, std::mem::take(&mut flight.gaps));
            }
            let answer = self.ledger.finished(request, &flight, self.now_s, &gaps);
            self.timeline.pools[self.engines[decode.0 as usize].pool() as usize].completed += 1;
            self.observer.finished(self.now_s, &answer);
            self.offer(request, decode, &flight);
            self.goes_on(flight.session, request);
        }
        self.tell(Event::Finished { request });
    }

    /// Handles the arrival of a prompt's KV, and of its first token, at the decode instance.
    fn landed(&mut self, request: u64) {
        let Some(flight) = self.flights.get(request) else { return };
        let Some(decode) = self.transfers.place(request).map(|place| place.decode.0) else { return };
        let tokens_valid = flight.prompt_tokens + self.transfers.tokens(request) - 1;
        let since_s = Some(flight.last_token_s);
        self.send(decode, Message::Landed { request, tokens_valid, since_s });
    }
}
