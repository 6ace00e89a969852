//! Access rules for instances: a router may send orders on its own requests, a peer messages on its own
//! transfers.
//!
//! A router sends [`Order`]s and a peer sends KV messages, each in a session that carries nothing else: the
//! rules here check the owner of each.

use super::ledger::OrderedWork;
use super::session::{Command, PeerMessage};
use crate::engine::directory::Directory;
use crate::engine::messages::Order;
use crate::mailbox::{MessageReceiver, MessageSender};
use crate::request::RouterId;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeSet;
use tokio::sync::mpsc;

/// Messages of a session that are refused before it ends: a peer that is a moment behind says one or two for
/// an instance that is gone, and no more.
const REFUSED_MAX: usize = 32;

/// Carries a session's messages to the instances of this process.
pub(super) struct Listening {
    pub(super) own: BTreeSet<InstanceId>,
    pub(super) directory: Directory,
    pub(super) refused: Counter,
}

/// A router, as far as what it says is changed and noted.
pub(super) struct RouterOrders {
    pub(super) router: RouterId,
    /// How far its clock is behind this process's.
    pub(super) clock_behind: Seconds,
    /// Receives work before the instance does.
    pub(super) given: mpsc::Sender<(InstanceId, OrderedWork)>,
}

impl Listening {
    /// Carries orders until the session ends, or has said too much that is not the router's to say.
    pub(super) async fn forward_orders(self, mut incoming: MessageReceiver<Command>, from: RouterOrders) {
        let mut refused = 0;
        while let Some(Command { instance, mut order }) = incoming.recv().await {
            order.due_later(from.clock_behind);
            let is_its = order.request().is_none_or(|request| RouterId::of(request) == from.router);
            let Some(orders) =
                self.directory.find(instance).orders.filter(|_| self.own.contains(&instance) && is_its)
            else {
                if self.refuses(instance, &mut refused) { continue } else { return }
            };
            if let Order::Ended(notice) = order {
                let _ = from.given.send((instance, OrderedWork::Ended { of: from.router, notice })).await;
                continue;
            }
            orders.room().await;
            if let Some(given) = OrderedWork::of(instance, &order) {
                let _ = from.given.send((instance, given)).await;
            }
            self.directory.order(instance, order);
        }
    }

    /// Carries what `peers` say, likewise.
    pub(super) async fn forward_kv_messages(
        self,
        mut incoming: MessageReceiver<PeerMessage>,
        peers: &BTreeSet<InstanceId>,
    ) {
        let mut refused = 0;
        while let Some(PeerMessage { instance, from, word }) = incoming.recv().await {
            let is_theirs = self.own.contains(&instance) && peers.contains(&from);
            let Some(words) = self.directory.find(instance).words.filter(|_| is_theirs) else {
                if self.refuses(instance, &mut refused) { continue } else { return }
            };
            words.room().await;
            self.directory.tell(instance, from, word);
        }
    }

    /// False: it was one too many.
    fn refuses(&self, instance: InstanceId, refused: &mut usize) -> bool {
        self.refused.inc();
        *refused += 1;
        tracing::warn!(%instance, "a message was refused: not for this process, or not the caller's to send");
        if *refused >= REFUSED_MAX {
            tracing::warn!(refused, "session ended: the other end keeps sending unauthorised messages");
        }
        *refused < REFUSED_MAX
    }
}

/// Carries messages, as `into` converts them, until their receiver leaves the directory or the session ends.
/// Then its inbox is closed, which a waiting receiver notices.
pub(super) async fn relay<M, C>(
    mut messages: MessageReceiver<M>,
    out: MessageSender<C>,
    into: impl Fn(M) -> Option<C> + Send,
) {
    loop {
        let message = tokio::select! {
            biased;
            () = out.closed() => return,
            message = messages.recv() => message,
        };
        let Some(message) = message else { return };
        out.room().await;
        if into(message).is_some_and(|message| out.send(message).is_err()) {
            return;
        }
    }
}

impl Order {
    /// The request that it is about; none for what concerns the instance.
    fn request(&self) -> Option<RequestId> {
        match self {
            Order::Add { job, .. }
            | Order::Reserve { job, .. }
            | Order::Lend { job, .. }
            | Order::Copy { job, .. } => Some(job.request),
            Order::NotLent { request, .. } | Order::Cancel { request } => Some(*request),
            Order::SetRole { .. } | Order::Ended(_) => None,
        }
    }

    /// Postpones due times in the command by `span`.
    fn due_later(&mut self, span: Seconds) {
        if let Order::Add { job, .. }
        | Order::Reserve { job, .. }
        | Order::Lend { job, .. }
        | Order::Copy { job, .. } = self
        {
            job.urgency.due += span;
            job.ready += span;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::directory::Inboxes;
    use crate::engine::messages::{FromPeer, KvMessage, PieceId, ToWorker};
    use crate::mailbox::mailbox;
    use futures_util::FutureExt;

    const OWN: InstanceId = InstanceId(3);
    const PIECE: PieceId = PieceId { layer: 0, first: 0, tokens: 1, retries: 0 };

    fn incoming<M>(messages: impl IntoIterator<Item = M>) -> MessageReceiver<M> {
        let (session, incoming) = mailbox("test", 100);
        messages.into_iter().for_each(|message| session.send(message).unwrap());
        incoming
    }

    fn listening() -> (Listening, MessageReceiver<ToWorker>, MessageReceiver<FromPeer>, Counter) {
        let (directory, refused) = (Directory::default(), Counter::default());
        let ((orders, ordered), (words, told)) = (mailbox("test", 100), mailbox("test", 100));
        directory.enter(OWN, Inboxes { orders: Some(orders), words: Some(words) });
        (Listening { own: [OWN].into(), directory, refused: refused.clone() }, ordered, told, refused)
    }

    /// What of a router's orders reaches the instance, and how many were refused.
    fn ordered(router: RouterId, orders: impl IntoIterator<Item = Order>) -> (Vec<Order>, u64) {
        let (listening, mut ordered, _, refused) = listening();
        let incoming = incoming(orders.into_iter().map(|order| Command { instance: OWN, order }));
        let from = RouterOrders { router, clock_behind: Seconds::ZERO, given: mpsc::channel(100).0 };
        listening.forward_orders(incoming, from).now_or_never().expect("nothing is waited for");
        let taken = std::iter::from_fn(|| match ordered.try_recv().ok()? {
            ToWorker::Order(order) => Some(order),
            other => panic!("{other:?}"),
        });
        (taken.collect(), refused.get())
    }

    /// The KV messages that reach `instance` in the name of `from` from a process with instance 1, and how
    /// many were refused.
    fn told(instance: InstanceId, from: InstanceId) -> (usize, u64) {
        let (request, attempt) = (0, 0);
        let words = [
            KvMessage::Lent { request, attempt, until: 0 },
            KvMessage::Credit { slot: 0 },
            KvMessage::Lost { request, attempt, piece: PIECE },
            KvMessage::HandedOver { request, attempt, next: 1 },
            KvMessage::TakenOver { request, attempt },
            KvMessage::Verdict { request, attempt, piece: PIECE, intact: false },
            KvMessage::Down,
        ];
        let (listening, _, mut told, refused) = listening();
        let incoming = incoming(words.map(|word| PeerMessage { instance, from, word }));
        let theirs = BTreeSet::from([InstanceId(1)]);
        listening.forward_kv_messages(incoming, &theirs).now_or_never().expect("nothing is waited for");
        let taken = std::iter::from_fn(|| told.try_recv().ok()).inspect(|(peer, _)| assert_eq!(*peer, from));
        (taken.count(), refused.get())
    }

    #[test]
    fn a_router_speaks_of_its_own_requests_alone() {
        let own = RouterId(7);
        let requests = [own, RouterId(0), RouterId(8)].map(RouterId::first_request);
        let orders = requests
            .into_iter()
            .flat_map(|request| [Order::Cancel { request }, Order::NotLent { request, attempt: 0 }]);
        let (told, refused) = ordered(own, orders);
        assert_eq!((told.len(), refused), (2, 4));
        assert!(told.iter().all(|m| matches!(m,
            Order::Cancel { request } | Order::NotLent { request, .. } if *request == requests[0])));
    }

    #[test]
    fn a_peer_speaks_of_its_own_transfers_alone() {
        assert_eq!(told(OWN, InstanceId(1)), (7, 0));
        assert_eq!(told(OWN, InstanceId(2)), (0, 7), "in the name of another process");
        assert_eq!(told(InstanceId(4), InstanceId(1)), (0, 7), "to an instance of another process");
    }

    #[test]
    fn what_a_peer_says_is_no_order_and_what_a_router_orders_is_no_word_of_a_peer() {
        let order = Command { instance: OWN, order: Order::Cancel { request: 1 } };
        let word = PeerMessage { instance: OWN, from: InstanceId(1), word: KvMessage::Down };
        let (order, word) = (serde_json::to_value(order).unwrap(), serde_json::to_value(word).unwrap());
        serde_json::from_value::<PeerMessage>(order.clone()).unwrap_err();
        serde_json::from_value::<Command>(word.clone()).unwrap_err();
        serde_json::from_value::<Command>(order).unwrap();
        serde_json::from_value::<PeerMessage>(word).unwrap();
    }

    #[test]
    fn who_keeps_giving_orders_that_it_may_not_loses_its_session() {
        let own = RouterId(7);
        let hostile = (0..REFUSED_MAX).map(|_| Order::Cancel { request: RouterId(0).first_request() });
        let good = [Order::Cancel { request: own.first_request() }];
        let (told, refused) = ordered(own, hostile.chain(good));
        assert!(told.is_empty() && refused == REFUSED_MAX as u64);
    }
}
