//! Stays a member, and knows the others.

use super::etcd::{BACKOFF_MAX, BACKOFF_MIN, Registry};
use super::{Charter, Member, Members, RegistryError, Seat};
use etcd_client::{EventType, LeaseKeepAliveStream, LeaseKeeper, WatchOptions, WatchResponse, WatchStream};
use std::sync::Arc;
use tokio::sync::{oneshot, watch};

/// A process's place in the fleet. Dropping it leaves the record to its lease.
pub struct Membership {
    members: watch::Receiver<Members>,
    record: watch::Sender<Member>,
    taken: Option<oneshot::Receiver<RegistryError>>,
    leave: Option<oneshot::Sender<oneshot::Sender<()>>>,
}

impl Membership {
    pub(super) fn begin(registry: Registry, charter: Charter, member: Member) -> Self {
        let (known, members) = watch::channel(Members::default());
        let (record, own) = watch::channel(member);
        let (leave, leaving) = oneshot::channel();
        let (give_up, taken) = oneshot::channel();
        let env = registry.env.clone();
        let keeper = Keeper { registry, charter, own, known, lease: None, former: None };
        env.spawn(Box::pin(async move {
            if let Some(error) = keeper.run(leaving).await {
                let _ = give_up.send(error);
            }
        }));
        Membership { members, record, taken: Some(taken), leave: Some(leave) }
    }

    /// The last members that were known; this process is one.
    pub fn members(&self) -> watch::Receiver<Members> {
        self.members.clone()
    }

    /// Changes this process's own record.
    pub fn record(&self) -> watch::Sender<Member> {
        self.record.clone()
    }

    /// Completes, with why, when another process has this one's ids: it must end before it serves under them again.
    /// Pending for ever if that does not happen, and from the second call on.
    pub fn taken(&mut self) -> impl Future<Output = RegistryError> + Send + 'static {
        let taken = self.taken.take();
        async move {
            match taken {
                Some(taken) => match taken.await {
                    Ok(error) => error,
                    Err(_) => std::future::pending().await,
                },
                None => std::future::pending().await,
            }
        }
    }

    /// Takes the record out of the registry, if etcd is reached.
    pub async fn leave(mut self) {
        let (done, left) = oneshot::channel();
        if self.leave.take().is_some_and(|leave| leave.send(done).is_ok()) {
            let _ = left.await;
        }
    }
}

struct Keeper {
    registry: Registry,
    charter: Charter,
    own: watch::Receiver<Member>,
    known: watch::Sender<Members>,
    /// The one that the record is under.
    lease: Option<i64>,
    /// The one before, which may not have ended.
    former: Option<i64>,
}

/// How a time of being attached to etcd ended.
enum End {
    /// It was, for a while.
    After(RegistryError),
    /// It never was.
    Before(RegistryError),
}

impl Keeper {
    /// Until this process leaves, or must: then why.
    async fn run(mut self, mut leaving: oneshot::Receiver<oneshot::Sender<()>>) -> Option<RegistryError> {
        let (mut backoff, mut said) = (BACKOFF_MIN, false);
        loop {
            let end = tokio::select! {
                end = self.attached(said) => end,
                asked = &mut leaving => return self.leave(asked.ok()).await,
            };
            if let End::Before(error @ RegistryError::Taken(_)) = end {
                return Some(error);
            }
            let error = match end {
                End::After(error) => {
                    (backoff, said) = (BACKOFF_MIN, false);
                    error
                }
                End::Before(error) => error,
            };
            if !said {
                tracing::warn!(%error, "etcd is lost: serving goes on with the last known fleet, joins wait");
                said = true;
            }
            tokio::select! {
                () = self.registry.env.sleep(backoff) => {}
                asked = &mut leaving => return self.leave(asked.ok()).await,
            }
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
    }

    async fn leave(&mut self, asked: Option<oneshot::Sender<()>>) -> Option<RegistryError> {
        if let Some((asked, lease)) = asked.zip(self.lease) {
            // etcd may be away; then the lease ends by itself.
            let _ = self.registry.client.clone().lease_revoke(lease).await;
            let _ = asked.send(());
        }
        None
    }

    /// Until something fails.
    async fn attached(&mut self, was_lost: bool) -> End {
        let (watching, keeper, alive) = match self.attach().await {
            Ok(parts) => parts,
            Err(error) => return End::Before(error),
        };
        if was_lost {
            tracing::info!("etcd is reached again");
        }
        match self.stay(watching, keeper, alive).await {
            Ok(never) => match never {},
            Err(error) => End::After(error),
        }
    }

    async fn attach(&mut self) -> Result<(WatchStream, LeaseKeeper, LeaseKeepAliveStream), RegistryError> {
        // An etcd that lost its data is given back what all members know.
        self.registry.agree(&self.charter).await?;
        let own = self.own.borrow_and_update().clone();
        match (&own.seat, own.instances().map(|instance| instance.id.0).max()) {
            (_, Some(last)) => self.registry.count_past("instance", u64::from(last) + 1).await?,
            (Seat::Router { id }, _) => self.registry.count_past("router", u64::from(id.0) + 1).await?,
            (Seat::Worker { .. }, None) => {}
        }
        let mut client = self.registry.client.clone();
        let (keeper, alive) = match self.kept_lease().await {
            Some(kept) => kept,
            None => {
                let seconds = self.registry.lease.as_secs().max(1) as i64;
                let lease = client.lease_grant(seconds, None).await?.id();
                self.former = self.lease.replace(lease);
                if self.former.is_some() {
                    tracing::info!("the lease had ended: this process is registered anew");
                }
                client.lease_keep_alive(lease).await?
            }
        };
        self.registry.claim(&own, keeper.id(), self.former).await?;
        let (members, revision) = self.registry.members().await?;
        if let Some(other) = own.meets_its_ids_in(&members) {
            return Err(RegistryError::Taken(other));
        }
        self.known.send_replace(members);
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let watching = client.watch(self.registry.members_prefix(), Some(options)).await?;
        Ok((watching, keeper, alive))
    }

    /// The old lease, if it lives.
    async fn kept_lease(&self) -> Option<(LeaseKeeper, LeaseKeepAliveStream)> {
        self.registry.client.clone().lease_keep_alive(self.lease?).await.ok()
    }

    async fn stay(
        &mut self,
        mut watching: WatchStream,
        mut keeper: LeaseKeeper,
        mut alive: LeaseKeepAliveStream,
    ) -> Result<std::convert::Infallible, RegistryError> {
        let lost = |what: &str| RegistryError::Etcd(format!("the {what} ended"));
        let mut unanswered = 0;
        // Not begun anew by what else happens: a fleet where much changes must not starve its leases.
        let mut beat = self.registry.env.sleep(self.registry.lease / 3);
        loop {
            tokio::select! {
                () = &mut beat => {
                    beat = self.registry.env.sleep(self.registry.lease / 3);
                    if unanswered > 1 {
                        return Err(lost("connection"));
                    }
                    keeper.keep_alive().await?;
                    unanswered += 1;
                }
                answer = alive.message() => {
                    let answer = answer?.ok_or_else(|| lost("lease's stream"))?;
                    if answer.ttl() <= 0 {
                        return Err(RegistryError::LeaseEnded);
                    }
                    unanswered = 0;
                }
                response = watching.message() => {
                    let response = response?.ok_or_else(|| lost("watch"))?;
                    if response.canceled() {
                        // The events since were compacted away: attaching reads all members anew.
                        return Err(lost(&format!("watch ({})", response.cancel_reason())));
                    }
                    self.learn(&response);
                }
                changed = self.own.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let own = self.own.borrow_and_update().clone();
                    self.registry.put(&own, keeper.id()).await?;
                }
            }
        }
    }

    fn learn(&self, response: &WatchResponse) {
        self.known.send_modify(|members| {
            let members = Arc::make_mut(members);
            for (event, kv) in response.events().iter().filter_map(|event| Some((event, event.kv()?))) {
                match event.event_type() {
                    EventType::Put => members.extend(self.registry.member(kv.key(), kv.value())),
                    EventType::Delete => {
                        self.registry.member_name(kv.key()).map(|name| members.remove(&name));
                    }
                }
            }
        });
    }
}
