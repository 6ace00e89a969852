//! Maintains a process's membership, and its view of the other members.

use super::records::{BACKOFF_MAX, BACKOFF_MIN, MemberList, Registry};
use super::store::{Change, Lease, Watch};
use super::{Charter, Member, Members, RegistryError, Seat};
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::{oneshot, watch};

/// Beats between two complete reads of the members, after which changes missed by a silent watch are known.
const BEATS_BETWEEN_ROLLS: u32 = 12;

/// A process's membership in the fleet. If it is dropped, the record ends with its lease.
pub struct Membership {
    members: watch::Receiver<Members>,
    record: watch::Sender<Member>,
    written: watch::Receiver<bool>,
    taken: Option<oneshot::Receiver<RegistryError>>,
    leave: Option<oneshot::Sender<oneshot::Sender<()>>>,
}

impl Membership {
    pub(super) fn begin(registry: Registry, charter: Charter, member: Member) -> Self {
        let (known, members) = watch::channel(Members::default());
        let (written, is_written) = watch::channel(false);
        let (record, own) = watch::channel(member);
        let (leave, leaving) = oneshot::channel();
        let (give_up, taken) = oneshot::channel();
        let env = registry.env.clone();
        let keeper = Keeper { registry, charter, own, known, written, lease: None };
        env.spawn(Box::pin(async move {
            if let Some(error) = keeper.run(leaving).await {
                let _ = give_up.send(error);
            }
        }));
        Membership { members, record, written: is_written, taken: Some(taken), leave: Some(leave) }
    }

    /// The latest known members, including this process.
    pub fn members(&self) -> watch::Receiver<Members> {
        self.members.clone()
    }

    /// Changes this process's own record.
    pub fn record(&self) -> watch::Sender<Member> {
        self.record.clone()
    }

    /// Completes when the record is in the registry for the first time: before that, another process may
    /// still be given its ids. Never completes if another process has one of them.
    pub fn joined(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut written = self.written.clone();
        async move {
            if written.wait_for(|&written| written).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Completes with the reason when another process has this one's ids, or the fleet became another model's
    /// before this process joined; it must then end before it serves. Otherwise, and from the second call on,
    /// it never completes.
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

    /// Removes the record from the registry, if etcd can be reached.
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
    written: watch::Sender<bool>,
    /// The lease of the record.
    lease: Option<Lease>,
}

/// How an attachment to etcd ended.
enum End {
    /// It was attached for a while.
    After(RegistryError),
    /// It was never attached.
    Before(RegistryError),
}

impl Keeper {
    /// Runs until this process leaves, or must leave; then returns why.
    async fn run(mut self, mut leaving: oneshot::Receiver<oneshot::Sender<()>>) -> Option<RegistryError> {
        let (mut backoff, mut said) = (BACKOFF_MIN, false);
        loop {
            let end = tokio::select! {
                biased;
                end = self.attached(said) => end,
                asked = &mut leaving => return self.leave(asked.ok()).await,
            };
            let error = match end {
                End::Before(error @ RegistryError::Taken(_))
                | End::After(error @ RegistryError::Taken(_)) => {
                    self.give_back().await;
                    return Some(error);
                }
                End::After(error) => {
                    (backoff, said) = (BACKOFF_MIN, false);
                    error
                }
                // Another charter was made before this process was a member, so it serves nothing yet.
                End::Before(error @ RegistryError::Refused(_)) if !*self.written.borrow() => {
                    return Some(error);
                }
                End::Before(error) => error,
            };
            if !said {
                tracing::warn!(%error, "etcd is lost: serving goes on with the last known fleet, joins wait");
                said = true;
            }
            tokio::select! {
                biased;
                () = self.registry.env.sleep(backoff) => {}
                asked = &mut leaving => return self.leave(asked.ok()).await,
            }
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
    }

    async fn leave(&mut self, asked: Option<oneshot::Sender<()>>) -> Option<RegistryError> {
        if let Some(asked) = asked {
            self.give_back().await;
            let _ = asked.send(());
        }
        None
    }

    /// Ends the lease, and the record with it.
    async fn give_back(&mut self) {
        if let Some(lease) = self.lease.take() {
            // etcd may be away; then the lease ends by itself.
            let _ = self.registry.in_time(self.registry.store.revoke(lease)).await;
        }
    }

    /// Maintains the record until something fails.
    async fn attached(&mut self, was_lost: bool) -> End {
        let (watching, lease) = match self.attach().await {
            Ok(parts) => parts,
            Err(error) => return End::Before(error),
        };
        self.written.send_replace(true);
        if was_lost {
            tracing::info!("etcd is reached again");
        }
        match self.stay(watching, lease).await {
            Ok(never) => match never {},
            Err(error) => End::After(error),
        }
    }

    async fn attach(&mut self) -> Result<(Box<dyn Watch>, Lease), RegistryError> {
        // An etcd that lost its data is restored from what the members know.
        self.registry.agree(&self.charter).await?;
        let own = self.own.borrow_and_update().clone();
        match (&own.seat, own.instances().map(|instance| instance.id.0).max()) {
            (_, Some(last)) => self.registry.count_past("instance", u64::from(last) + 1).await?,
            (Seat::Router { id }, _) => self.registry.count_past("router", u64::from(id.0) + 1).await?,
            (Seat::Worker { .. }, None) => {}
        }
        let lease = self.living_lease().await?;
        self.registry.claim(&own, lease).await?;
        let roll = self.registry.roll().await?;
        check_ids(&own, &roll)?;
        let (prefix, revision) = (self.registry.members_prefix(), roll.revision + 1);
        self.known.send_replace(roll.members);
        let watching = self.registry.in_time(self.registry.store.watch(prefix, revision)).await?;
        Ok((watching, lease))
    }

    /// The old lease while it lives, or else a new one. Only etcd knows whether it lives: a new lease after a
    /// lost answer would find the name taken by this process itself.
    async fn living_lease(&mut self) -> Result<Lease, RegistryError> {
        let store = self.registry.store.clone();
        if let Some(lease) = self.lease {
            if self.registry.in_time(store.keep_alive(lease)).await? {
                return Ok(lease);
            }
            tracing::info!("the lease had ended: this process is registered anew");
            self.lease = None;
        }
        let lease = self.registry.in_time(store.grant(self.registry.lease)).await?;
        self.lease = Some(lease);
        Ok(lease)
    }

    async fn stay(
        &mut self,
        mut watching: Box<dyn Watch>,
        lease: Lease,
    ) -> Result<Infallible, RegistryError> {
        let (mut beats, mut may_change) = (0, true);
        // Not restarted by other events, since frequent changes in the fleet must not starve its leases.
        let mut beat = self.registry.env.sleep(self.registry.lease / 3);
        loop {
            tokio::select! {
                biased;
                () = &mut beat => {
                    beat = self.registry.env.sleep(self.registry.lease / 3);
                    beats += 1;
                    self.beat(lease, beats % BEATS_BETWEEN_ROLLS == 0).await?;
                }
                changes = watching.next() => self.learn(changes?),
                changed = self.own.changed(), if may_change => {
                    may_change = changed.is_ok();
                    let own = self.own.borrow_and_update().clone();
                    self.registry.claim(&own, lease).await?;
                }
            }
        }
    }

    /// Keeps the lease alive, and checks that the record is still there: emptying etcd may leave the lease.
    async fn beat(&self, lease: Lease, whole_roll: bool) -> Result<(), RegistryError> {
        if !self.registry.in_time(self.registry.store.keep_alive(lease)).await? {
            return Err(RegistryError::LeaseEnded);
        }
        let own = self.own.borrow().clone();
        if !self.registry.holds(&own, lease).await? {
            return Err(RegistryError::Etcd("this process's record is gone".into()));
        }
        if whole_roll {
            let roll = self.registry.roll().await?;
            self.known.send_if_modified(|known| {
                let is_news = *known != roll.members;
                *known = roll.members;
                is_news
            });
        }
        Ok(())
    }

    fn learn(&self, changes: Vec<Change>) {
        self.known.send_modify(|members| {
            let members = Arc::make_mut(members);
            for change in changes {
                match change {
                    Change::Put { key, value } => members.extend(self.registry.member(&key, &value)),
                    Change::Gone { key } => {
                        self.registry.member_name(&key).map(|name| members.remove(&name));
                    }
                }
            }
        });
    }
}

/// Of two members with a common id the one with the younger record ends: each writes its own record before it
/// reads the other's, so that the younger sees the older.
fn check_ids(own: &Member, roll: &MemberList) -> Result<(), RegistryError> {
    let own_name = own.name();
    let since = roll.created.get(&own_name).copied().unwrap_or(i64::MAX);
    for (name, other) in roll.members.iter().filter(|(name, _)| **name != own_name) {
        if own.shares_an_id_with(other) && roll.created[name] < since {
            return Err(RegistryError::Taken(name.clone()));
        }
    }
    Ok(())
}
