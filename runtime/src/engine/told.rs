//! What an instance is told by routers and peers, and what a failure on the way ends.

use super::fault::{self, Fault, Outcome, Scope};
use super::handoff::Outgoing;
use super::incoming::Sender;
use super::messages::{FromWorker, HandOff, Job, Source, ToWorker};
use super::tiers::Below;
use super::worker::{Active, Event, Worker};
use crate::request::Failure;
use crate::request::RouterId;
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::batch::{After, RequestId, TokenIds};
use mixfleet_scheduler::fleet::{InstanceId, Role};
use mixfleet_scheduler::kv::Tier;
use std::collections::BTreeSet;

impl Worker {
    /// Ends what a failure concerns, and nothing else. None if there was one.
    ///
    /// # Errors
    /// What concerns the whole instance.
    pub(super) fn contain<T>(&mut self, outcome: Outcome<T>) -> Result<Option<T>> {
        let Fault { scope, error } = match outcome {
            Ok(value) => return Ok(Some(value)),
            Err(fault) => fault,
        };
        match scope {
            Scope::Request(request) => {
                tracing::warn!(request, device = %self.device.info().id, %error, "a request cannot be done");
                self.fail_request(request, fault::failure(&error));
            }
            Scope::Link(request, sender) => {
                tracing::warn!(request, %sender, %error, "no KV can come from there now");
                let attempt = self.active.get(&request).map_or(0, |active| active.job.attempt);
                let reason = error.to_string();
                self.report(FromWorker::Refused { request, attempt, sender, reason });
                self.cancel(request);
            }
            Scope::Instance => return Err(error),
        }
        Ok(None)
    }

    /// Ends one request with an error.
    pub(super) fn fail_request(&mut self, request: RequestId, failure: Failure) {
        if let Some(active) = self.active.get(&request) {
            let attempt = active.job.attempt;
            self.report(FromWorker::RequestFailed { request, attempt, failure });
        }
        self.cancel(request);
    }

    pub(super) async fn handle(&mut self, message: ToWorker) -> Outcome<()> {
        match message {
            ToWorker::Add { job, hand_off, pull } => match self.check_add(&job, hand_off.as_ref(), pull) {
                Ok(()) => self.add(job, hand_off, pull),
                Err(error) => self.refuse(&job, &error),
            },
            ToWorker::Lend { job, until, to } => {
                match self.check_job(&job, 0).and_then(|()| self.check_hand_off(&job, &to)) {
                    Ok(()) => self.lend(&job, until, to),
                    Err(error) => {
                        tracing::warn!(request = job.request, %error, "a prefix is not lent");
                        let (sender, Job { request, attempt, .. }) = (self.id, job);
                        self.directory.tell(to.to, ToWorker::Lent { sender, request, attempt, until: 0 });
                    }
                }
            }
            ToWorker::Lent { sender, request, attempt, until } => {
                if let Some(incoming) = self.incoming(request, attempt) {
                    incoming.shorten(sender, until);
                    self.settle_incoming(request).await?;
                }
            }
            ToWorker::NotLent { request, attempt } => {
                if let Some(incoming) = self.incoming(request, attempt) {
                    incoming.abandon();
                    self.settle_incoming(request).await?;
                }
            }
            ToWorker::Reserve { job, sender } => {
                match self.check_job(&job, job.length_max()).and_then(|()| self.check_source(sender)) {
                    Ok(()) => self.reserve(job, sender),
                    Err(error) => self.refuse(&job, &error),
                }
            }
            ToWorker::Landed { sender, parcel } => {
                if let Some(request) = self.receive(sender, parcel)? {
                    self.settle_incoming(request).await?;
                }
            }
            ToWorker::Credit { receiver, slot } => self.courier.give_slot(receiver, slot),
            ToWorker::PeerDown { peer } => self.peer_down(peer).await?,
            ToWorker::Lost { sender, request, attempt, piece } => {
                if let Some(incoming) = self.incoming(request, attempt) {
                    incoming.lose(sender, piece);
                    self.settle_incoming(request).await?;
                }
            }
            ToWorker::HandedOver { sender, request, attempt, next } => {
                let vocabulary = self.forward.config().vocab;
                let Some(incoming) = self.incoming(request, attempt) else { return Ok(()) };
                if !incoming.hand_over(sender, next) {
                    return Ok(());
                }
                if next >= vocabulary {
                    let detail = format!("{sender} drew token {next} of a vocabulary of {vocabulary}");
                    return Err(Fault::of_request(request, Error::new(ErrorKind::Corrupt, detail)));
                }
                self.settle_incoming(request).await?;
            }
            ToWorker::Verdict { receiver, request, attempt, piece, intact } => {
                self.verdict(receiver, request, attempt, (piece, intact)).await?;
                self.settle_lent(request);
            }
            ToWorker::TakenOver { receiver, request, attempt } => {
                self.taken_over(receiver, request, attempt);
            }
            ToWorker::Settle { request } => self.settle_incoming(request).await?,
            ToWorker::SetRole { role } => self.set_role(role),
            ToWorker::Cancel { request } => self.cancel(request),
            ToWorker::Inspect(answer) => {
                let device = self.machine.stored().into_iter().map(|hash| (Tier::Device, hash));
                let below = self.below.iter().flat_map(Below::held);
                let _ = answer.try_send([(self.id, device.chain(below).collect())].into());
            }
            ToWorker::Abandon { router } => {
                let all = self.active.keys().chain(self.outgoing.keys()).copied();
                let its: BTreeSet<RequestId> = all.filter(|&id| RouterId::of(id) == router).collect();
                its.into_iter().for_each(|request| self.cancel(request));
            }
        }
        Ok(())
    }

    /// What it is told of the load is not its to judge: it does what it is given, and tells all who give.
    fn set_role(&mut self, role: Role) {
        let FromWorker::Up { instance, .. } = &mut self.up else { return };
        if instance.role != role {
            tracing::info!(device = %instance.device, ?role, "role changed");
            instance.role = role;
            self.report(self.up.clone());
        }
    }

    /// Tells who asked that this instance does not do it. A request with the same id that is here goes on.
    fn refuse(&mut self, job: &Job, error: &Error) {
        let Job { request, attempt, .. } = *job;
        tracing::warn!(request, %error, "a job is refused");
        if !self.active.contains_key(&request) {
            let failure = fault::failure(error);
            self.report(FromWorker::RequestFailed { request, attempt, failure });
        }
    }

    /// Makes way for a newer placement of a request. False if what is here is as new.
    fn supersedes(&mut self, job: &Job) -> bool {
        match self.active.get(&job.request) {
            None => true,
            Some(active) if active.job.attempt < job.attempt => {
                self.cancel(job.request);
                true
            }
            Some(_) => {
                tracing::warn!(request = job.request, "a job that is here already is ignored");
                false
            }
        }
    }

    pub(super) fn cancel(&mut self, request: RequestId) {
        self.active.remove(&request);
        self.outgoing.remove(&request);
        self.machine_step(Event::Cancel { request });
    }

    fn add(&mut self, job: Job, hand_off: Option<HandOff>, pull: Option<Source>) {
        if !self.supersedes(&job) {
            return;
        }
        let after = if hand_off.is_some() { After::HandOff } else { After::Decode };
        let Job { request, due, .. } = job;
        let (gives_way, text) = (job.gives_way(), self.text(&job));
        if let Some(to) = hand_off {
            self.begin_outgoing(request, Outgoing::new(to, Vec::new(), None));
        }
        let source = pull.map(|source| source.capped(text.ids().len(), self.staging.page_tokens));
        let pulls = source.map_or(0, |source| source.until);
        let sender = source.map(Sender::Lends);
        self.active.insert(request, Active { job, incoming: None, sender });
        self.machine_step(Event::Add { request, due, gives_way, text, pulls, after });
    }

    fn reserve(&mut self, job: Job, sender: InstanceId) {
        if !self.supersedes(&job) {
            return;
        }
        let Job { request, due, .. } = job;
        let (gives_way, text) = (job.gives_way(), self.text(&job));
        let sender = Some(Sender::HandsOff(Source { holder: sender, until: text.ids().len() as u32 }));
        self.active.insert(request, Active { job, incoming: None, sender });
        self.machine_step(Event::Reserve { request, due, gives_way, text });
    }

    fn text(&self, job: &Job) -> TokenIds {
        TokenIds::new(job.tokens(), job.hasher, self.limits.block_tokens)
    }
}
