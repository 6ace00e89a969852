//! Who may say what to an instance: a router speaks of its own requests, a peer of its own transfers.

use super::ledger::Given;
use super::session::Command;
use crate::engine::directory::Directory;
use crate::engine::messages::ToWorker;
use crate::mailbox::{MessageReceiver, MessageSender};
use crate::request::RouterId;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::InstanceId;
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeSet;
use tokio::sync::mpsc;

/// Commands of a session that are refused before it ends: a peer that is a moment behind says one or two for an
/// instance that is gone, and no more.
const REFUSED_MAX: usize = 32;

/// What takes a session's commands to the instances of this process.
pub(super) struct Listening {
    pub(super) own: BTreeSet<InstanceId>,
    pub(super) directory: Directory,
    /// How far the caller's clock is behind this process's.
    pub(super) clock_behind: Seconds,
    pub(super) refused: Counter,
    /// Told of work before the instance is.
    pub(super) given: mpsc::Sender<(InstanceId, Given)>,
}

impl Listening {
    /// Until the session ends, or has said too much that is not the other end's to say.
    pub(super) async fn carry(
        self,
        mut incoming: MessageReceiver<Command>,
        allowed: impl Fn(&ToWorker) -> bool,
    ) {
        let mut refused = 0;
        while let Some(Command { instance, mut message }) = incoming.recv().await {
            message.due_later(self.clock_behind);
            if self.own.contains(&instance) && allowed(&message) {
                self.directory.room(instance).await;
                if let Some(given) = Given::of(instance, &message) {
                    let _ = self.given.send((instance, given)).await;
                }
                self.directory.tell(instance, message);
                continue;
            }
            self.refused.inc();
            refused += 1;
            tracing::warn!(%instance, "a command was refused: not for this process, or not the caller's to give");
            if refused >= REFUSED_MAX {
                tracing::warn!(
                    refused,
                    "a session is ended: the other end keeps giving commands that it may not"
                );
                return;
            }
        }
    }
}

/// Carries messages to `instance` until it leaves the directory or the session ends. Then its inbox is closed, which
/// whoever waits for it notices. What the other end would refuse is left out: it learns that by itself.
pub(super) async fn relay(
    instance: InstanceId,
    mut messages: MessageReceiver<ToWorker>,
    out: MessageSender<Command>,
    carries: impl Fn(&ToWorker) -> bool + Send,
) {
    loop {
        let message = tokio::select! {
            biased;
            () = out.closed() => return,
            message = messages.recv() => message,
        };
        let Some(message) = message else { return };
        out.room().await;
        if carries(&message) && out.send(Command { instance, message }).is_err() {
            return;
        }
    }
}

impl ToWorker {
    /// Whatever it is about is due so much later.
    fn due_later(&mut self, span: Seconds) {
        if let ToWorker::Add { job, .. } | ToWorker::Reserve { job, .. } | ToWorker::Lend { job, .. } = self {
            job.due += span;
            job.ready += span;
        }
    }

    /// Whether `router` may say it: it is about a request of its own.
    pub(super) fn may_come_from_router(&self, router: RouterId) -> bool {
        let request = match self {
            // what it does for others it goes on with
            ToWorker::SetRole { .. } => return true,
            ToWorker::Add { job, .. } | ToWorker::Reserve { job, .. } | ToWorker::Lend { job, .. } => {
                job.request
            }
            ToWorker::NotLent { request, .. } | ToWorker::Cancel { request } => *request,
            ToWorker::Lent { .. }
            | ToWorker::Landed { .. }
            | ToWorker::Credit { .. }
            | ToWorker::Lost { .. }
            | ToWorker::HandedOver { .. }
            | ToWorker::TakenOver { .. }
            | ToWorker::Verdict { .. }
            | ToWorker::Settle { .. }
            | ToWorker::Abandon { .. }
            | ToWorker::Inspect(_)
            | ToWorker::PeerDown { .. } => return false,
        };
        RouterId::of(request) == router
    }

    /// Whether a peer with these instances may say it: one of them is the other end of the transfer that it is about.
    pub(super) fn may_come_from_peer(&self, instances: &BTreeSet<InstanceId>) -> bool {
        match self {
            ToWorker::Landed { sender, .. }
            | ToWorker::Lost { sender, .. }
            | ToWorker::Lent { sender, .. }
            | ToWorker::HandedOver { sender, .. } => instances.contains(sender),
            ToWorker::Credit { receiver, .. }
            | ToWorker::TakenOver { receiver, .. }
            | ToWorker::Verdict { receiver, .. } => instances.contains(receiver),
            ToWorker::PeerDown { peer } => instances.contains(peer),
            ToWorker::Add { .. }
            | ToWorker::Reserve { .. }
            | ToWorker::Lend { .. }
            | ToWorker::NotLent { .. }
            | ToWorker::SetRole { .. }
            | ToWorker::Settle { .. }
            | ToWorker::Cancel { .. }
            | ToWorker::Abandon { .. }
            | ToWorker::Inspect(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::messages::PieceId;
    use crate::mailbox::mailbox;
    use futures_util::FutureExt;

    const PIECE: PieceId = PieceId { layer: 0, first: 0, tokens: 1, retries: 0 };

    /// What of `messages` reaches the instance, and how many were refused.
    fn carried(
        messages: impl IntoIterator<Item = ToWorker>,
        allowed: impl Fn(&ToWorker) -> bool,
    ) -> (Vec<ToWorker>, u64) {
        let (directory, own) = (Directory::default(), InstanceId(3));
        let (inbox, mut told) = mailbox("test", 100);
        directory.enter(own, inbox);
        let (session, incoming) = mailbox("test", 100);
        for message in messages {
            session.send(Command { instance: own, message }).unwrap();
        }
        drop(session);
        let refused = Counter::default();
        let (own, clock_behind) = ([own].into(), Seconds::ZERO);
        let listening =
            Listening { own, directory, clock_behind, refused: refused.clone(), given: mpsc::channel(100).0 };
        listening.carry(incoming, allowed).now_or_never().expect("nothing is waited for");
        (std::iter::from_fn(|| told.try_recv().ok()).collect(), refused.get())
    }

    fn of_peers(peer: InstanceId, request: u64) -> Vec<ToWorker> {
        let attempt = 0;
        vec![
            ToWorker::Lent { sender: peer, request, attempt, until: 0 },
            ToWorker::Credit { receiver: peer, slot: 0 },
            ToWorker::Lost { sender: peer, request, attempt, piece: PIECE },
            ToWorker::HandedOver { sender: peer, request, attempt, next: 1 },
            ToWorker::TakenOver { receiver: peer, request, attempt },
            ToWorker::Verdict { receiver: peer, request, attempt, piece: PIECE, intact: false },
            ToWorker::PeerDown { peer },
        ]
    }

    #[test]
    fn a_router_abandons_no_router_not_even_itself() {
        let (own, other) = (RouterId(7), RouterId(0));
        let messages = [own, other].map(|router| ToWorker::Abandon { router });
        let (told, refused) = carried(messages, |m| m.may_come_from_router(own));
        assert!(told.is_empty() && refused == 2);
    }

    #[test]
    fn a_router_speaks_of_its_own_requests_alone() {
        let own = RouterId(7);
        let requests = [own, RouterId(0), RouterId(8)].map(RouterId::first_request);
        let messages = requests
            .into_iter()
            .flat_map(|request| [ToWorker::Cancel { request }, ToWorker::NotLent { request, attempt: 0 }]);
        let (told, refused) = carried(messages, |m| m.may_come_from_router(own));
        assert_eq!((told.len(), refused), (2, 4));
        assert!(told.iter().all(|m| matches!(m,
            ToWorker::Cancel { request } | ToWorker::NotLent { request, .. } if *request == requests[0])));
    }

    #[test]
    fn a_router_says_nothing_in_a_peers_name_or_a_workers_own() {
        let own = RouterId(7);
        let mut messages = of_peers(InstanceId(1), own.first_request());
        messages.push(ToWorker::Settle { request: own.first_request() });
        let count = messages.len() as u64;
        let (told, refused) = carried(messages, |m| m.may_come_from_router(own));
        assert!(told.is_empty() && refused == count);
    }

    #[test]
    fn a_peer_speaks_of_its_own_transfers_alone() {
        let theirs = BTreeSet::from([InstanceId(1)]);
        let (told, refused) = carried(of_peers(InstanceId(1), 0), |m| m.may_come_from_peer(&theirs));
        assert_eq!((told.len(), refused), (7, 0));
        let (told, refused) = carried(of_peers(InstanceId(2), 0), |m| m.may_come_from_peer(&theirs));
        assert_eq!((told.len(), refused), (0, 7));
    }

    #[test]
    fn a_peer_gives_no_commands_of_routers() {
        let theirs = BTreeSet::from([InstanceId(1)]);
        let messages = [
            ToWorker::Cancel { request: 0 },
            ToWorker::NotLent { request: 0, attempt: 0 },
            ToWorker::Abandon { router: RouterId(0) },
            ToWorker::Settle { request: 0 },
        ];
        let (told, refused) = carried(messages, |m| m.may_come_from_peer(&theirs));
        assert!(told.is_empty() && refused == 4);
    }

    #[test]
    fn who_keeps_giving_commands_that_it_may_not_loses_its_session() {
        let own = RouterId(7);
        let hostile = (0..REFUSED_MAX).map(|_| ToWorker::Abandon { router: RouterId(0) });
        let good = [ToWorker::Cancel { request: own.first_request() }];
        let (told, refused) = carried(hostile.chain(good), |m| m.may_come_from_router(own));
        assert!(told.is_empty() && refused == REFUSED_MAX as u64);
    }
}
