//! Handling of messages from routers and peers, and of failures while doing so.

use super::compiled::{BegunGrammar, CompiledFor};
use super::fault::{self, Fault, Outcome, Scope};
use super::messages::{FromWorker, HandOff, Job, Order, ToWorker, Transfer};
use super::receiver::ExpectedKv;
use super::shaping::Shaping;
use super::spans::WorkPhase;
use super::tiers::InstanceTiers;
use super::worker::{Active, Event, Worker};
use crate::request::Failure;
use crate::request::RouterId;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::batch::{After, RequestId, TokenIds, Urgency};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_scheduler::kv::Tier;
use mixfleet_scheduler::transfer::PrefixSource;
use std::collections::BTreeSet;

impl Worker {
    /// Ends only what a failure concerns.
    ///
    /// # Errors
    /// Failures of the whole instance.
    pub(super) fn contain(&mut self, outcome: Outcome<()>) -> Result<()> {
        let Err(Fault { scope, error }) = outcome else { return Ok(()) };
        match scope {
            Scope::Request(request) => {
                tracing::warn!(request, device = %self.steps.device.info().id, %error, "a request cannot be done");
                self.fail_request(request, fault::failure(&error))
            }
            Scope::Link(request, sender) => {
                tracing::warn!(request, %sender, %error, "no KV can come from there now");
                let attempt = self.active.get(&request).map_or(0, |active| active.attempt);
                let reason = error.to_string();
                self.report(FromWorker::Refused { request, attempt, sender, reason });
                self.cancel(request)
            }
            Scope::Instance => Err(error),
        }
    }

    /// Ends one request with an error.
    pub(super) fn fail_request(&mut self, request: RequestId, failure: Failure) -> Result<()> {
        if let Some(active) = self.active.get(&request) {
            let attempt = active.attempt;
            self.report(FromWorker::RequestFailed { request, attempt, failure });
        }
        self.cancel(request)
    }

    /// Handles a message of a coordinator or of its own process.
    pub(super) fn handle_message(&mut self, message: ToWorker) -> Result<()> {
        match message {
            ToWorker::Order(order) => match self.grammars.admit(order, &self.env) {
                Some((order, begun)) => self.carry_out_order(order, begun),
                None => Ok(()),
            },
            ToWorker::Inspect(answer) => {
                let device = self.machine.stored().into_iter().map(|hash| (Tier::Device, hash));
                let below = self.below.iter().flat_map(InstanceTiers::held);
                let _ = answer.try_send([(self.id, device.chain(below).collect())].into());
                Ok(())
            }
            ToWorker::Abandon { router } => {
                self.grammars.abandon(router);
                let all = self.active.keys().copied().chain(self.sender.requests());
                let its: BTreeSet<RequestId> = all.filter(|&id| RouterId::of(id) == router).collect();
                its.into_iter().try_for_each(|request| self.cancel(request))
            }
        }
    }

    /// Carries out an order whose grammar has been compiled since, unless it is no longer wanted.
    pub(super) fn handle_compiled(&mut self, compiled: CompiledFor) -> Result<()> {
        match self.grammars.unpark(compiled) {
            Some((order, begun)) => self.carry_out_order(order, Some(begun)),
            None => Ok(()),
        }
    }

    /// Carries out an order of a coordinator; `begun` is the grammar of its answer.
    fn carry_out_order(&mut self, order: Order, begun: Option<BegunGrammar>) -> Result<()> {
        match order {
            Order::Add { job, hand_off, pull } => {
                let checked = self.check_add(&job, hand_off.as_ref(), pull);
                if self.takes(&job, checked)? {
                    self.add(job, hand_off, pull, begun)?;
                }
            }
            Order::Reserve { job, sender } => {
                let checked = self.check_job(&job, job.length_max()).and(self.check_source(sender));
                let checked = checked.and(self.check_computes());
                if self.takes(&job, checked)? {
                    self.reserve(job, sender, begun)?;
                }
            }
            Order::Copy { job, holder } => {
                let checked = self.check_job(&job, job.length() as u64).and(self.check_source(holder));
                if self.takes(&job, checked)? {
                    self.copy(job, holder)?;
                }
            }
            Order::Lend { job, until, to } => {
                match self.check_job(&job, 0).and_then(|()| self.check_hand_off(&job, &to)) {
                    Ok(()) => self.lend(&job, until, to)?,
                    Err(error) => {
                        let Job { request, attempt, .. } = job;
                        tracing::warn!(request, %error, "prefix not lent");
                        self.sender.tell_lent(to.to, request, attempt, 0);
                        self.release_sent()?;
                    }
                }
            }
            Order::NotLent { request, attempt } => {
                if self.receiver.abandon(request, attempt) {
                    self.settle_incoming(request)?;
                }
            }
            Order::SetRole { role } => self.set_role(role),
            // its process passes that on
            Order::Ended(_) => {}
            Order::Cancel { request } => self.cancel(request)?,
        }
        Ok(())
    }

    /// Takes on a role and reports it to all routers. Whether the load calls for it is the router's decision.
    fn set_role(&mut self, role: Role) {
        let FromWorker::Up { instance, .. } = &mut self.up else { return };
        if role.computes() != instance.role.computes() {
            return tracing::warn!(device = %instance.device, ?role, "a role that the device cannot have is ignored");
        }
        if instance.role != role {
            tracing::info!(device = %instance.device, ?role, "role changed");
            instance.role = role;
            self.report(self.up.clone());
        }
    }

    /// Whether this instance takes a job, which was `checked`: an older placement of the request is
    /// cancelled, and one that is as new stays. A refusal is reported; a request with the same id that is
    /// here continues.
    fn takes(&mut self, job: &Job, checked: Result<()>) -> Result<bool> {
        let Job { request, attempt, .. } = *job;
        if let Err(error) = checked {
            tracing::warn!(request, %error, "a job is refused");
            if !self.active.contains_key(&request) {
                let failure = fault::failure(&error);
                self.report(FromWorker::RequestFailed { request, attempt, failure });
            }
            return Ok(false);
        }
        match self.active.get(&request) {
            None => Ok(true),
            Some(active) if active.attempt < attempt => self.cancel(request).map(|()| true),
            Some(_) => {
                tracing::warn!(request, "a job that is here already is ignored");
                Ok(false)
            }
        }
    }

    pub(super) fn cancel(&mut self, request: RequestId) -> Result<()> {
        self.grammars.cancel(request);
        self.remove(request);
        self.sender.forget(request);
        self.machine_step(Event::Cancel { request })
    }

    fn add(
        &mut self,
        job: Job,
        hand_off: Option<HandOff>,
        pull: Option<PrefixSource>,
        begun: Option<BegunGrammar>,
    ) -> Result<()> {
        let request = job.request;
        let after = if hand_off.is_some() { After::HandOff } else { After::Decode };
        if let Some(to) = hand_off {
            self.sender.begin(request, Transfer::HandOff, to);
            self.release_sent()?;
        }
        let source = pull.map(|source| source.capped(job.length(), self.kv.shape.page_tokens));
        let pulls = source.map_or(0, |source| source.until);
        let (urgency, text) = self.begin(job, source.map(|source| (Transfer::Prefix, source)), begun);
        self.machine_step(Event::Add { request, urgency, text, pulls, after })
    }

    fn copy(&mut self, job: Job, holder: InstanceId) -> Result<()> {
        let (request, until) = (job.request, to_u32(job.length()));
        let (urgency, text) = self.begin(job, Some((Transfer::Prefix, PrefixSource { holder, until })), None);
        self.machine_step(Event::Add { request, urgency, text, pulls: until, after: After::Keep })
    }

    fn reserve(&mut self, job: Job, holder: InstanceId, begun: Option<BegunGrammar>) -> Result<()> {
        let request = job.request;
        let source = PrefixSource { holder, until: to_u32(job.length()) };
        let (urgency, text) = self.begin(job, Some((Transfer::HandOff, source)), begun);
        self.machine_step(Event::Reserve { request, urgency, text })
    }

    /// Starts tracking a request; its tokens go to the instance machine.
    fn begin(
        &mut self,
        job: Job,
        sender: Option<(Transfer, PrefixSource)>,
        begun: Option<BegunGrammar>,
    ) -> (Urgency, TokenIds) {
        let urgency = job.urgency;
        let text = TokenIds::new(job.tokens(), job.hasher, self.limits.block_tokens);
        let Job { request, attempt, wanted, .. } = job;
        let text = text.with_forced(wanted.prompt_ids.len(), wanted.forced_ids.clone());
        let shaping = Shaping::new(&wanted, begun, self.steps.forward.config().vocab);
        let phase = WorkPhase::Prompt(self.env.now());
        let expected = sender.map(|(transfer, source)| ExpectedKv { attempt, transfer, source });
        self.active.insert(request, Active { attempt, wanted, shaping, expected, phase });
        (urgency, text)
    }
}
