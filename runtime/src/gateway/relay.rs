//! One client's request in flight: placed, sent, relayed, and placed again if an engine fails.

use super::divided::TakenKv;
use super::speed::Times;
use super::suspects::NoPlace;
use super::{Asked, EnginePlace, Gateway, RelayRequest};
use crate::request::Rejection;
use crate::trace::{SpanFact, SpanFacts};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::{
    BegunAnswer, EngineAnswer, EngineCall, EngineChunk, EngineFault, EngineFaultKind, EngineShare,
    EngineStream, EngineUsage, WholeAnswer,
};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::canary::CanaryPair;
use mixfleet_scheduler::fleet::{Event, InstanceId};
use mixfleet_scheduler::quarantine::Quarantined;
use std::sync::Arc;
use std::time::Duration;

/// Time in which nothing comes of a stream that has begun, after which it is given up.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// The same before its first token; an engine that is down is noticed by its probe.
pub(super) const QUEUE_MAX: Duration = Duration::from_secs(1800);

/// How a request begins to be answered.
pub(crate) enum RelayOpening {
    /// With a whole answer.
    Whole(WholeAnswer),
    /// With the engine's refusal: its status and document.
    Refused(u16, Vec<u8>),
    /// With the first chunk of a stream.
    Stream(Box<Passage>, EngineChunk),
}

/// Why a request is not answered.
#[derive(Debug)]
pub(crate) enum RelayError {
    /// The machine turned it away.
    Rejected(Rejection),
    /// No engine gave an answer; what the last one said.
    Failed(EngineFault),
    /// Engines that ended with it.
    Quarantined(Quarantined),
}

/// A request in progress. Dropping it cancels it, here and at its engine.
pub(crate) struct Passage {
    pub(super) gateway: Arc<Gateway>,
    pub(super) request: RequestId,
    pub(super) wanted: RelayRequest,
    /// The engine that it is placed on, to be answered there; none while it has none.
    pub(super) at: Option<usize>,
    /// Another one, while that one computes the prompt.
    pub(super) prompt_at: Option<usize>,
    /// The KV that the answer begins with, until it has begun.
    pub(super) taken: Option<TakenKv>,
    /// Whether another engine computed the prompt.
    pub(super) is_divided: bool,
    /// Why no two engines share it any more, if so.
    pub(super) undivided: Option<&'static str>,
    /// Engines that failed it.
    pub(super) avoided: Vec<usize>,
    /// Engines where only a hand-off failed: they are tried again before giving up.
    pub(super) doubted: Vec<usize>,
    /// Engines that are at fault if another one answers the request, and their failures.
    suspects: Vec<(usize, EngineFault)>,
    pub(super) due: Seconds,
    /// Predicted times: until the prompt is computed, or, once it is elsewhere, until its KV has landed; of
    /// that way of its KV; of a further token.
    pub(super) ttft: Seconds,
    pub(super) transfer: Seconds,
    pub(super) tbt: Seconds,
    /// Prompt tokens that were taken to be cached where it is computed.
    pub(super) cached: u32,
    stream: Option<Box<dyn EngineStream>>,
    /// What the client has of the answer, once it has any.
    pub(super) begun: Option<BegunAnswer>,
    adds_other: bool,
    /// Choices that have ended.
    ended: u32,
    /// Chunks with tokens of this answer.
    chunks: u32,
    pub(super) usage: Option<EngineUsage>,
    pub(super) times: Times,
    /// What it has cost, in dollars, if engines have prices.
    usd: Option<f64>,
    /// Since when it waits for an engine, if it has none.
    idle_since: Seconds,
    /// The two engines that share it, and those that would if their KV were proven.
    pub(super) canary_pairs: Vec<CanaryPair>,
}

/// Places a request and waits for the beginning of its answer.
///
/// # Errors
/// Why there is no answer; the client has no part of it then.
pub(crate) async fn relay(gateway: &Arc<Gateway>, wanted: RelayRequest) -> Result<RelayOpening, RelayError> {
    let came = gateway.env.now();
    let wanted = gateway.read_prompt(wanted).await;
    let request = gateway.next_request();
    let placed = gateway.place_apart(&Asked::first(request, &wanted)).await;
    let place = placed.map_err(|why| why.error(gateway))?;
    let mut passage = Box::new(Passage::new(gateway.clone(), request, wanted, came, place.due));
    passage.take_place(&place);
    loop {
        match passage.ask().await {
            Ok(EngineAnswer::Whole(answer)) => {
                passage.usage = answer.usage;
                passage.clear();
                passage.finish();
                return Ok(RelayOpening::Whole(answer));
            }
            Ok(EngineAnswer::Refused { status, body }) => {
                passage.note_refusal(status);
                return Ok(RelayOpening::Refused(status, body));
            }
            Ok(EngineAnswer::Stream(stream)) => {
                passage.stream = Some(stream);
                match passage.next().await {
                    Some(Ok(chunk)) => return Ok(RelayOpening::Stream(passage, chunk)),
                    Some(Err(fault)) => return Err(RelayError::Failed(fault)),
                    None => {
                        let fault = EngineFault::new(EngineFaultKind::Malformed, "its answer is empty");
                        return Err(RelayError::Failed(fault));
                    }
                }
            }
            Ok(EngineAnswer::HandedOff { .. }) => passage.place_again(not_an_answer()).await?,
            Err(fault) => passage.place_again(fault).await?,
        }
    }
}

impl Passage {
    /// A request without a place, which has none since it came.
    pub(super) fn new(
        gateway: Arc<Gateway>,
        request: RequestId,
        wanted: RelayRequest,
        idle_since: Seconds,
        due: Seconds,
    ) -> Self {
        Passage {
            gateway,
            request,
            wanted,
            at: None,
            prompt_at: None,
            taken: None,
            is_divided: false,
            undivided: None,
            avoided: Vec::new(),
            doubted: Vec::new(),
            suspects: Vec::new(),
            due,
            ttft: Seconds::ZERO,
            transfer: Seconds::ZERO,
            tbt: Seconds::ZERO,
            cached: 0,
            stream: None,
            begun: None,
            adds_other: false,
            ended: 0,
            chunks: 0,
            usage: None,
            times: Times::default(),
            usd: None,
            idle_since,
            canary_pairs: Vec::new(),
        }
    }

    /// The next chunk that the client gets, or `None` behind the last one of a complete answer.
    ///
    /// # Errors
    /// Why the answer ends before it is complete.
    pub(crate) async fn next(&mut self) -> Option<Result<EngineChunk, EngineFault>> {
        loop {
            match self.next_of_engine().await {
                Some(Ok(chunk)) => {
                    self.account(&chunk);
                    if chunk.data.is_some() {
                        return Some(Ok(chunk));
                    }
                }
                None => {
                    self.finish();
                    return None;
                }
                // Only the lengths are lost after the end of the last choice.
                Some(Err(fault)) if self.ended >= self.wanted.choices => {
                    tracing::warn!(id = %self.wanted.id, %fault, "an answer lost its trailing data");
                    self.finish();
                    return None;
                }
                Some(Err(fault)) => {
                    if let Err(fault) = self.go_on(fault).await {
                        self.leave();
                        return Some(Err(fault));
                    }
                }
            }
        }
    }

    /// Lengths, as far as they are known.
    pub(crate) fn usage(&self) -> Option<EngineUsage> {
        self.usage
    }

    async fn next_of_engine(&mut self) -> Option<Result<EngineChunk, EngineFault>> {
        let (at, gateway) = (self.at?, self.gateway.clone());
        let overdue = gateway.overdue(self.taken.as_ref());
        let stream = self.stream.as_mut()?;
        let limit = if self.times.first.is_some() { SILENCE_MAX } else { QUEUE_MAX };
        tokio::select! {
            biased;
            chunk = stream.next() => chunk,
            () = gateway.lost(at) => Some(Err(lost())),
            fault = overdue => Some(Err(fault)),
            () = gateway.env.sleep(limit) => Some(Err(silent(limit))),
        }
    }

    /// Has the answer continued by another engine.
    async fn go_on(&mut self, fault: EngineFault) -> Result<(), EngineFault> {
        self.stream = None;
        let mut fault = fault;
        loop {
            if self.adds_other {
                self.failed(&fault);
                return Err(not_continued(&fault, "it is not text alone"));
            }
            match self.place_again(fault).await {
                Ok(()) => {}
                Err(RelayError::Failed(fault)) => {
                    return Err(not_continued(&fault, "no other engine takes it"));
                }
                Err(RelayError::Rejected(rejection)) => {
                    return Err(EngineFault::new(EngineFaultKind::Busy, rejection.to_string()));
                }
                Err(RelayError::Quarantined(why)) => {
                    return Err(EngineFault::new(EngineFaultKind::Cut, why.to_string()));
                }
            }
            fault = match self.ask().await {
                Ok(EngineAnswer::Stream(stream)) => {
                    self.stream = Some(stream);
                    return Ok(());
                }
                Ok(EngineAnswer::Refused { status, .. }) => EngineFault::new(
                    EngineFaultKind::NotContinued,
                    format!("it was refused with status {status}"),
                ),
                Ok(EngineAnswer::Whole(_) | EngineAnswer::HandedOff { .. }) => {
                    EngineFault::new(EngineFaultKind::Malformed, "it does not stream")
                }
                Err(fault) => fault,
            };
        }
    }

    /// Its request to an engine.
    pub(super) fn call(&self, share: EngineShare) -> EngineCall {
        EngineCall {
            endpoint: self.wanted.endpoint,
            body: self.wanted.body.clone(),
            stream: self.wanted.stream,
            begun: self.begun.clone(),
            tokens_max: self.wanted.granted_tokens,
            trace: self.wanted.hints.trace.map(String::from),
            share,
        }
    }

    /// Sends the request to the engines of its placement.
    async fn ask(&mut self) -> Result<EngineAnswer, EngineFault> {
        let Some(at) = self.at else { return Err(lost()) };
        if let Some(prompt_at) = self.prompt_at
            && let Some(refused) = self.ask_prompt(prompt_at, at).await?
        {
            return Ok(refused);
        }
        let answer = self.ask_answer(at).await?;
        match answer {
            // the other one took the same body, without this parameter
            EngineAnswer::Refused { status, .. } if self.taken.is_some() => {
                let detail = format!("it refuses the handed-over KV with status {status}");
                Err(EngineFault::new(EngineFaultKind::NotTaken, detail))
            }
            answer => Ok(answer),
        }
    }

    /// Sends the request to the engine that answers.
    async fn ask_answer(&mut self, at: usize) -> Result<EngineAnswer, EngineFault> {
        let share = self
            .taken
            .as_ref()
            .map_or(EngineShare::Whole, |taken| EngineShare::Answer(taken.hand_off.clone()));
        let call = self.call(share);
        let (gateway, engine) = (self.gateway.clone(), self.gateway.engine(at).clone());
        let mut overdue = std::pin::pin!(gateway.overdue(self.taken.as_ref()));
        let mut asked = engine.ask(&call);
        let mut lost_now = std::pin::pin!(gateway.lost(at));
        // Of a whole answer nothing tells when the prompt is done: it is taken to be when that was predicted.
        let mut prompt_done =
            gateway.env.sleep(Duration::try_from_secs_f64(self.ttft.0).unwrap_or(QUEUE_MAX));
        let mut early = gateway.env.sleep(Duration::try_from_secs_f64(self.early().0).unwrap_or(QUEUE_MAX));
        let (mut is_waiting, mut is_early) = (!self.wanted.stream, !self.wanted.stream);
        let mut too_late = gateway.env.sleep(QUEUE_MAX);
        loop {
            tokio::select! {
                biased;
                answer = &mut asked => return answer,
                () = &mut lost_now => return Err(lost()),
                fault = &mut overdue => return Err(fault),
                () = &mut too_late => return Err(silent(QUEUE_MAX)),
                () = &mut prompt_done, if is_waiting => {
                    is_waiting = false;
                    gateway.metrics.guess_first_token(self.request);
                    self.first_token(at);
                }
                () = &mut early, if is_early => {
                    is_early = false;
                    self.survives();
                }
            }
        }
    }

    /// Places the request again, on an engine that has not failed it.
    async fn place_again(&mut self, fault: EngineFault) -> Result<(), RelayError> {
        let fault = match self.prompt_at.or(self.at) {
            Some(at) => self.gateway.clone().judged(at, fault).await,
            None => fault,
        };
        if !self.is_hand_off(&fault) {
            self.failed(&fault);
        }
        if fault.kind == EngineFaultKind::NotContinued {
            return Err(RelayError::Failed(fault));
        }
        let mut again = self.placed_again().await;
        if matches!(again, Err(NoPlace::Rejected(..))) && !self.doubted.is_empty() {
            let doubted = std::mem::take(&mut self.doubted);
            self.avoided.retain(|at| !doubted.contains(at));
            again = self.placed_again().await;
        }
        match again {
            Ok(place) => {
                self.take_place(&place);
                Ok(())
            }
            Err(NoPlace::Quarantined(why)) => Err(RelayError::Quarantined(why)),
            Err(_) if fault.kind == EngineFaultKind::Busy => {
                let after = fault.retry_after.map_or(1, |after| after.as_secs()).max(1);
                let reason = format!("every engine that could take it is busy: {fault}");
                Err(RelayError::Rejected(Rejection::Overloaded { reason, retry_after_s: after }))
            }
            Err(_) => Err(RelayError::Failed(fault)),
        }
    }

    async fn placed_again(&mut self) -> Result<EnginePlace, NoPlace> {
        let asked = Asked {
            generated: self.chunks,
            due: Some(self.due),
            avoided: &self.avoided,
            undivided: self.undivided,
            ..Asked::first(self.request, &self.wanted)
        };
        self.gateway.place_apart(&asked).await
    }

    /// Takes it from the engine that failed it.
    pub(super) fn failed(&mut self, fault: &EngineFault) {
        // while it computes the prompt, only that engine has the request
        if let Some(at) = self.prompt_at.or(self.at) {
            self.gateway.fault(at, &self.wanted.id, fault);
            self.avoided.push(at);
            if fault.kind == EngineFaultKind::Cut {
                self.note_own_end(at);
            }
            self.suspect(at, fault);
            self.count_cost();
        }
        self.leave();
    }

    /// Takes an engine's failure as its own, or holds it until another one answers.
    pub(super) fn suspect(&mut self, at: usize, fault: &EngineFault) {
        if fault.kind == EngineFaultKind::NotContinued
            || self.gateway.note_failed_try(at, self.request, fault)
        {
            return;
        }
        if self.times.came {
            self.gateway.note_failed(at, fault);
        } else {
            self.suspects.push((at, fault.clone()));
        }
    }

    /// Another mixfleet that has the request in quarantine says so with a status of 500 or more.
    fn note_refusal(&self, status: u16) {
        if let Some(at) = self.at.filter(|_| status >= 500) {
            self.note_own_end(at);
        }
    }

    /// An engine answers: it is healthy, and those that failed before it are not.
    pub(super) fn clear(&mut self) {
        self.took_over();
        if !self.times.came {
            self.survives();
        }
        for (at, fault) in std::mem::take(&mut self.suspects) {
            self.gateway.note_failed(at, &fault);
        }
        if let Some(at) = self.at.filter(|_| !self.times.came) {
            self.times.came = true;
            self.gateway.note_began(at, self.times.asked);
        }
    }

    pub(super) fn take_place(&mut self, place: &EnginePlace) {
        (self.at, self.prompt_at, self.is_divided) = (Some(place.at), place.prompt_at, false);
        (self.ttft, self.transfer, self.tbt) = (place.ttft, place.transfer, place.tbt);
        self.cached = place.cached;
        self.canary_pairs.clone_from(&place.pairs);
        let seat_is_alone = {
            let state = self.gateway.lock();
            let seat = &state.seats[place.prompt_at.unwrap_or(place.at)];
            seat.own == 1 && seat.others_seen == 0
        };
        self.times = Times { asked: self.gateway.env.now(), alone: seat_is_alone, ..Times::default() };
        self.span("queue", (self.idle_since, self.times.asked), Vec::new);
    }

    /// Reports that the prompt is done, once for each placement.
    pub(super) fn first_token(&mut self, at: usize) {
        let now = self.gateway.env.now();
        if self.times.first.replace(now).is_some() {
            return;
        }
        let (request, instance) = (self.request, InstanceId(to_u32(at)));
        let mut state = self.gateway.lock();
        let seat = &mut state.seats[at];
        seat.decoding += 1;
        self.times.alone &= seat.own == 1;
        let event = match self.is_divided {
            true => Event::TransferDone { request, instance },
            false => Event::PrefillDone { request, instance },
        };
        state.front.step(event);
        drop(state);
        self.measure_prompt(at);
    }

    pub(super) fn account(&mut self, chunk: &EngineChunk) {
        self.usage = chunk.usage.or(self.usage);
        self.adds_other |= chunk.adds_other;
        self.ended += u32::from(chunk.ends_choice);
        if chunk.data.is_some() {
            let begun = self.begun.get_or_insert_with(|| BegunAnswer {
                id: chunk.id.clone(),
                created: chunk.created.clone(),
                ..BegunAnswer::default()
            });
            begun.text.push_str(&chunk.text);
        }
        let Some(at) = self.at.filter(|_| chunk.has_token()) else { return };
        self.clear();
        self.chunks += 1;
        self.times.chunks += 1;
        let now = self.gateway.env.now();
        self.times.last = now;
        if self.times.first.is_none() {
            return self.first_token(at);
        }
        let step =
            Event::DecodeStep { instance: InstanceId(to_u32(at)), requests: vec![self.request], tokens: 1 };
        let mut state = self.gateway.lock();
        self.times.batch_sum += u64::from(state.seats[at].decoding);
        state.front.step(step);
        drop(state);
        self.measure_steps(at);
    }

    /// Reports that the answer is complete, and what it took.
    pub(super) fn finish(&mut self) {
        let Some(at) = self.at else { return };
        if let Some(usage) = self.usage {
            self.measure_all(at, &usage);
        }
        self.gateway.note_answered(at);
        self.is_cleared();
        self.count_cost();
        if let Some(usd) = self.usd {
            self.gateway.placements.cost(&self.wanted.id, usd);
        }
        if let Some(phases) = self.gateway.metrics.phases(self.request, self.gateway.env.now()) {
            let tokens = self.usage.map(|usage| usage.completion_tokens);
            self.gateway.placements.phases(&self.wanted.id, phases, tokens);
        }
        self.gateway.tell(Event::Finished { request: self.request });
        self.leave();
        self.send_canary();
    }

    /// Adds what it cost at this engine.
    pub(super) fn count_cost(&mut self) {
        let more = self.gateway.metrics.usd(self.request, self.gateway.env.now());
        self.usd = more.map(|more| self.usd.unwrap_or(0.0) + more).or(self.usd);
    }

    /// Takes it from its engine, if it has one.
    pub(super) fn leave(&mut self) {
        let asked = self.prompt_at.or(self.at);
        self.leave_prompt();
        self.taken = None;
        let Some(at) = self.at.take() else { return };
        self.gateway.quarantine().left(self.request);
        self.stream = None;
        let now = self.gateway.env.now();
        self.idle_since = now;
        self.tell_spans(asked.unwrap_or(at), now);
        let mut state = self.gateway.lock();
        let seat = &mut state.seats[at];
        seat.own -= 1;
        seat.decoding -= u32::from(self.times.first.is_some());
        Gateway::note_left(&mut state, at, now, self.request);
        // without effect if it is finished
        state.front.step(Event::Cancelled { request: self.request });
    }
}

impl Passage {
    /// Records the work done at an engine that the request leaves, for traces.
    pub(super) fn tell_spans(&self, at: usize, now: Seconds) {
        let facts = |cached: Option<u32>, tokens: Option<u32>| {
            let mut facts =
                vec![("mixfleet.instance", SpanFact::Text(self.gateway.engine(at).name().into()))];
            facts.extend(cached.map(|cached| ("mixfleet.cached_tokens", SpanFact::Count(cached.into()))));
            facts.extend(tokens.map(|tokens| ("gen_ai.usage.output_tokens", SpanFact::Count(tokens.into()))));
            facts
        };
        let (asked, first) = (self.times.asked, self.times.first);
        let before = if self.is_divided { "hand-off" } else { "prefill" };
        self.span(before, (asked, first.unwrap_or(now)), || facts(Some(self.cached), None));
        if let Some(first) = first {
            self.span("decode", (first, now), || facts(None, Some(self.times.chunks)));
        }
    }

    fn span(&self, name: &'static str, times: (Seconds, Seconds), facts: impl FnOnce() -> SpanFacts) {
        let gateway = &self.gateway;
        gateway.metrics.traces.phase(&*gateway.env, self.wanted.hints.trace, name, times, facts);
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Gateway {
    /// Completes when the engine is not up any more.
    pub(super) async fn lost(&self, at: usize) {
        let mut up = self.members[at].up.subscribe();
        let _ = up.wait_for(|up| !up).await;
    }
}

fn not_an_answer() -> EngineFault {
    EngineFault::new(EngineFaultKind::Malformed, "it answered a plain request with a KV hand-off")
}

pub(super) fn lost() -> EngineFault {
    EngineFault::new(EngineFaultKind::Cut, "it does not answer any more")
}

pub(super) fn silent(time: Duration) -> EngineFault {
    EngineFault::new(EngineFaultKind::Cut, format!("nothing came for {} s", time.as_secs()))
}

fn not_continued(fault: &EngineFault, why: &str) -> EngineFault {
    let detail = match fault.kind {
        EngineFaultKind::NotContinued => {
            format!("its engine was lost in the middle of the answer, which cannot go on elsewhere: {fault}")
        }
        _ => format!("its engine failed in the middle of the answer ({fault}), and {why}"),
    };
    EngineFault::new(EngineFaultKind::Cut, detail)
}
