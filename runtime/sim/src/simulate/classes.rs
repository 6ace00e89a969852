//! The class of a request with its objective, and conversations, whose requests wait for earlier answers.

use super::Setup;
use crate::fleet_file::{Class, ClassMembers, Promise, Slo};
use crate::trace::{ConversationTurn, Request};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::{bits, unit};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::Objective;
use mixfleet_scheduler::table::IdMap;

/// Separates these draws from others with the same seed.
const DRAW: u64 = 0xC1A5_5E5D_12A3_0B17;

/// The promise by which an answer is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Promised {
    /// TTFT and TBT within these objectives.
    Objectives(Slo),
    /// The last token by this time.
    By(f64),
}

/// A conversation in progress.
struct Conversation {
    began_s: f64,
    /// Requests that have ended, with their times.
    ended: Vec<(u64, f64)>,
    /// Requests that arrived before the answer that they follow.
    early: Vec<Request>,
}

pub(super) struct Classes<'a> {
    setup: &'a Setup,
    conversations: IdMap<Conversation>,
}

impl<'a> Classes<'a> {
    pub(super) fn new(setup: &'a Setup) -> Self {
        Classes { setup, conversations: IdMap::default() }
    }

    /// Number of the class, counted from 1; 0 if a request has none.
    fn class_of(&self, request: &Request) -> usize {
        let key = request.session.map_or(request.id, |session| !session.id);
        let drawn = unit(bits(self.setup.fleet.seed, DRAW), key);
        let mut shares = 0.0;
        let takes = |class: &Class| match class.members {
            ClassMembers::Share(share) => {
                let before = shares;
                shares += share;
                before <= drawn && drawn < shares
            }
            ClassMembers::Label(_) => request.class.as_deref().is_some_and(|label| class.takes_label(label)),
        };
        self.setup.classes.iter().position(takes).map_or(0, |at| at + 1)
    }

    /// An arriving request's class, its objective for the scheduler, and the promise by which it is judged.
    pub(super) fn promise(&mut self, request: &Request, now_s: f64) -> (u32, Objective, Promised) {
        let number = self.class_of(request);
        let slo = self.setup.slo;
        let Some(class) = number.checked_sub(1).map(|at| &self.setup.classes[at]) else {
            return (0, Objective::Fleet, Promised::Objectives(slo));
        };
        let by = |at_s: f64, requests_left| {
            (Objective::Deadline { at: Seconds(at_s), requests_left }, Promised::By(at_s))
        };
        let (objective, promised) = match class.promise {
            Promise::Interactive { ttft_s, tbt_s } => (
                Objective::Interactive { ttft_slo: Some(Seconds(ttft_s)), tbt_slo: Some(Seconds(tbt_s)) },
                Promised::Objectives(Slo { ttft_s, tbt_s, ..slo }),
            ),
            Promise::Deadline(deadline_s) => by(now_s + deadline_s, 1),
            Promise::Workflow(deadline_s) => {
                let session = request.session;
                let conversation = session.and_then(|session| self.conversations.get(session.id));
                let began_s = conversation.map_or(now_s, |conversation| conversation.began_s);
                by(began_s + deadline_s, 1 + session.and_then(|session| session.left).unwrap_or(0))
            }
        };
        (to_u32(number), objective, promised)
    }

    /// The head start of requests of a class, by its number.
    pub(super) fn head_start(&self, number: u32) -> Seconds {
        let class = (number as usize).checked_sub(1).map(|at| &self.setup.classes[at]);
        Seconds(class.map_or(0.0, |class| -class.priority))
    }

    /// When a request of the trace can arrive; none before the answer that it follows is complete, and it is
    /// kept until then.
    pub(super) fn arrives(&mut self, request: Request, now_s: f64) -> Option<(f64, Request)> {
        let Some(ConversationTurn { id, after, think, .. }) = request.session else {
            return Some((now_s, request));
        };
        if self.conversations.get(id).is_none() {
            let conversation = Conversation { began_s: now_s, ended: Vec::new(), early: Vec::new() };
            self.conversations.insert(id, conversation);
        }
        let Some((conversation, after)) = self.conversations.get_mut(id).zip(after) else {
            return Some((now_s, request));
        };
        match conversation.ended.iter().find(|(ended, _)| *ended == after) {
            Some((_, ended_s)) => Some((now_s.max(ended_s + think.0), request)),
            None => {
                conversation.early.push(request);
                None
            }
        }
    }

    /// Ends a request of a conversation; returns the requests that waited for it, with their times.
    pub(super) fn ended(
        &mut self,
        session: ConversationTurn,
        request: u64,
        now_s: f64,
    ) -> Vec<(f64, Request)> {
        let Some(conversation) = self.conversations.get_mut(session.id) else { return Vec::new() };
        conversation.ended.push((request, now_s));
        let follows = |early: &mut Request| early.session.is_some_and(|s| s.after == Some(request));
        let next: Vec<Request> = conversation.early.extract_if(.., follows).collect();
        let at = |request: &Request| now_s + request.session.map_or(0.0, |session| session.think.0);
        let next: Vec<(f64, Request)> = next.into_iter().map(|request| (at(&request), request)).collect();
        if session.left == Some(0) && conversation.early.is_empty() && next.is_empty() {
            self.conversations.remove(session.id);
        }
        next
    }
}
