//! The coordinator as the driver of the transfer machine: it tells it what instances report, and makes orders
//! of its actions.

use super::answers::Drawn;
use super::coordinator::{Coordinator, Tracked};
use super::messages::{HandOff, Job, Lacking, Landing, Order};
use super::sender::wire_dtype;
use mixfleet_hal::DType;
use mixfleet_scheduler::batch::Urgency;
use mixfleet_scheduler::fleet::{Event, InstanceId};
use mixfleet_scheduler::transfer::{self, Action, Reporter};

/// The room of an instance for KV that another one sends.
pub(super) struct ReceiverRoom {
    pub(super) lacking: Lacking,
    pub(super) landing: Landing,
}

/// An input of the transfer machine.
pub(super) type Transferred = transfer::Event<ReceiverRoom, Drawn>;

impl Coordinator {
    /// Tells the transfer machine an event, and carries out its actions.
    pub(super) fn transfer(&mut self, event: Transferred) {
        let mut actions = Vec::new();
        self.transfers.step(event, &mut actions);
        actions.into_iter().for_each(|action| self.carry_out(action));
    }

    fn carry_out(&mut self, action: Action<ReceiverRoom, Drawn>) {
        match action {
            Action::Add { to, hand_off, pull } => {
                let Some(job) = self.job(to) else { return };
                let hand_off = match hand_off {
                    Some((receiver, room)) => match self.hand_off(to, receiver, room) {
                        None => return,
                        some => some,
                    },
                    None => None,
                };
                self.send(to.instance, Order::Add { job, hand_off, pull });
            }
            Action::Reserve { to, sender } => {
                if let Some(job) = self.job(to) {
                    self.send(to.instance, Order::Reserve { job, sender });
                }
            }
            Action::Lend { to, until, receiver, room } => {
                if let (Some(job), Some(hand_off)) = (self.job(to), self.hand_off(to, receiver, room)) {
                    self.send(to.instance, Order::Lend { job, until, to: hand_off });
                }
            }
            Action::NotLent { to: Reporter { instance, request, attempt } } => {
                self.send(instance, Order::NotLent { request, attempt });
            }
            Action::Copy { to, source } => {
                if let Some(job) = self.job(to) {
                    self.send(to.instance, Order::Copy { job, holder: source.holder });
                }
            }
            Action::Cancel { instance, request } => self.send(instance, Order::Cancel { request }),
            Action::Token { by, token } => self.append(by, token),
            Action::OutOfTurn { by, index, next } => {
                self.distrust(by, &format!("it drew token {index} of an answer with {next} tokens"));
            }
            Action::TransferDone { request, instance } => {
                self.fleet_step(Event::TransferDone { request, instance });
            }
            Action::Exposed { time } => self.metrics.kv_exposed_s.observe(time.0),
            Action::Unplace { request } => _ = self.fleet_step(Event::Cancelled { request }),
            Action::PlaceAgain { request } => self.replay(request),
            Action::CopyEnded { request, .. } => _ = self.copies.remove(&request),
        }
    }

    /// A request, or a copy, as one instance gets it.
    fn job(&self, to: Reporter) -> Option<Job> {
        let Reporter { instance, request, attempt } = to;
        let kv = self.instances.get(&instance)?.kv;
        if let Some(Tracked { wanted, generated, urgency, ready, .. }) = self.requests.get(&request) {
            let urgency = Urgency { due: self.began + urgency.due, ..*urgency };
            let (ready, hasher) = (self.began + *ready, self.hasher(wanted, kv));
            let (wanted, generated) = (wanted.clone(), generated.clone());
            return Some(Job { request, urgency, ready, attempt, wanted, generated, hasher });
        }
        let wanted = self.copies.get(&request)?;
        let now = self.began + self.env.now();
        let urgency = Urgency { gives_way: true, ..Urgency::due_at(now) };
        let (wanted, hasher) = (wanted.clone(), self.hasher(wanted, kv));
        Some(Job { request, urgency, ready: now, attempt, wanted, generated: Vec::new(), hasher })
    }

    /// A sender's description of a receiver; none if one of them is lost.
    fn hand_off(&self, sender: Reporter, to: InstanceId, room: ReceiverRoom) -> Option<HandOff> {
        let ReceiverRoom { lacking, landing } = room;
        let wire = self.wire(sender.instance, to)?;
        Some(HandOff { attempt: sender.attempt, lacking, to, landing, wire })
    }

    /// The dtype of KV from one instance to another; none if one of them is lost.
    fn wire(&self, from: InstanceId, to: InstanceId) -> Option<DType> {
        let (from, to) = (self.instances.get(&from)?, self.instances.get(&to)?);
        Some(wire_dtype(from.kv, to.kv, from.codes && to.codes))
    }

    /// Handles a closed link: requests whose KV was to be sent over it are placed again.
    pub(super) fn unlink(&mut self, from: InstanceId, to: InstanceId) {
        self.fleet_step(Event::LinkDown { from, to });
        self.transfer(Transferred::LinkDown { from, to });
    }
}
