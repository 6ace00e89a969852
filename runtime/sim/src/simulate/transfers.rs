//! The world as the driver of the transfer machine: it tells it what instances report, and makes messages of
//! its actions.

use super::World;
use super::agenda::{LentPrefix, Next};
use super::engine::{Job, Message};
use super::flight::HandOffTarget;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{After, Urgency};
use mixfleet_scheduler::fleet::{Event, InstanceId};
use mixfleet_scheduler::transfer::{self, Action, PrefixSource, Reporter};

/// An input of the transfer machine: room is a number of tokens, and tokens have no content.
pub(super) type SimulatedTransfer = transfer::Event<u32, ()>;

impl World<'_> {
    /// Tells the transfer machine an event, and carries out its actions.
    pub(super) fn transfer(&mut self, event: SimulatedTransfer) {
        let mut actions = std::mem::take(&mut self.transferred);
        self.transfers.step(event, &mut actions);
        actions.drain(..).for_each(|action| self.carry_out(action));
        self.transferred = actions;
    }

    fn carry_out(&mut self, action: Action<u32, ()>) {
        match action {
            Action::Add { to, hand_off, pull } => self.compute(to, hand_off, pull),
            Action::Reserve { to, .. } => {
                if let Some(job) = self.job(to) {
                    self.send(to.instance.0, Message::Reserve { job });
                    self.turn(to.instance.0);
                }
            }
            Action::Lend { to, until, receiver, room } => {
                let Some(Job { request, attempt, prompt_tokens, chain, .. }) = self.job(to) else { return };
                let tokens = if self.flights.contains(request) {
                    self.pulled_tokens(PrefixSource { holder: to.instance, until }, prompt_tokens)
                } else {
                    until
                };
                let prefix = LentPrefix { request, attempt, to: receiver.0, tokens, sent: 0, gathered: 0 };
                self.send(to.instance.0, Message::Lend { prefix, held_tokens: room, chain });
            }
            Action::NotLent { to: Reporter { instance, request, .. } } => {
                self.send(instance.0, Message::Landed { request, tokens_valid: 0, since_s: None });
            }
            Action::Copy { to, source } => {
                if let Some(job) = self.job(to) {
                    let (pulls, after) = (source.until, After::Keep);
                    self.send(to.instance.0, Message::Add { job, pulls, after, decoder: None });
                }
            }
            Action::Cancel { instance, request } => self.send(instance.0, Message::LetGo { request }),
            Action::TransferDone { request, instance } => {
                self.tell(Event::TransferDone { request, instance });
                let attempt = self.transfers.attempt(request);
                self.schedule(self.now_s, Next::TakenOver { request, attempt });
            }
            Action::Unplace { request } => self.tell(Event::Cancelled { request }),
            Action::PlaceAgain { request } => {
                let due = self.flights.get(request).map(|flight| flight.urgency.due);
                self.ask_fleet(request, due);
            }
            Action::CopyEnded { request, kept } => {
                self.copies.chains.remove(request);
                self.copies.sent.dropped += u64::from(!kept);
            }
            Action::Token { .. } | Action::Exposed { .. } => {}
            Action::OutOfTurn { .. } => unreachable!("every instance draws the next token: {action:?}"),
        }
    }

    /// A request, or a copy, as one instance gets it.
    fn job(&self, to: Reporter) -> Option<Job> {
        let Reporter { request, attempt, .. } = to;
        if let Some(flight) = self.flights.get(request) {
            return Some(flight.job(to, self.transfers.tokens(request)));
        }
        let chain = self.copies.chains.get(request)?.clone();
        let prompt_tokens = to_u32(chain.len()) * self.setup.block_tokens;
        let urgency = Urgency { gives_way: true, ..Urgency::due_at(Seconds(self.now_s)) };
        Some(Job { request, attempt, prompt_tokens, output_tokens: 0, chain, urgency })
    }

    /// Sends a prompt to its prefill instance.
    fn compute(&mut self, to: Reporter, hand_off: Option<(InstanceId, u32)>, pull: Option<PrefixSource>) {
        let Some(job) = self.job(to) else { return };
        let pulls = pull.map_or(0, |source| self.pulled_tokens(source, job.prompt_tokens));
        let after = if hand_off.is_some() { After::HandOff } else { After::Decode };
        let decoder = hand_off.map(|(decode, held_tokens)| {
            let spec = &self.setup.instances[decode.0 as usize].spec;
            HandOffTarget::new(job.prompt_tokens, held_tokens, spec)
        });
        if let (Some(flight), Some((_, held_tokens))) = (self.flights.get_mut(to.request), hand_off) {
            flight.held_tokens = held_tokens;
        }
        self.send(to.instance.0, Message::Add { job, pulls, after, decoder });
    }

    /// Number of prompt tokens that can be pulled.
    fn pulled_tokens(&self, source: PrefixSource, prompt_tokens: u32) -> u32 {
        source.capped(prompt_tokens as usize, self.setup.block_tokens).until
    }
}
