//! The records of a fleet in its store.

use super::super::session::{ModelIdentity, PROTOCOL};
use super::keep::Membership;
use super::store::{Condition, Lease, Store, StoreAnswer};
use super::{Charter, Member, Members, RegistryError};
use crate::env::SharedEnv;
use crate::request::RouterId;
use mixfleet_hal::cast::low_u16;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The registry of a fleet. Clones share a connection.
#[derive(Clone)]
pub struct Registry {
    pub(super) env: SharedEnv,
    pub(super) store: Arc<dyn Store>,
    pub(super) prefix: String,
    pub(super) lease: Duration,
    /// Timeout of a store operation: a third of a lease, so that a second try is in time.
    pub(super) patience: Duration,
}

/// Minimum pause between two attempts to reach etcd.
pub(super) const BACKOFF_MIN: Duration = Duration::from_millis(100);
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// All members as read at one time.
pub(super) struct MemberList {
    pub(super) members: Members,
    /// The store's revision at which each record was created.
    pub(super) created: BTreeMap<String, i64>,
    /// The store's revision at that time.
    pub(super) revision: i64,
}

impl Registry {
    /// The registry of `fleet` in `store`.
    pub(super) fn over(env: &SharedEnv, store: Arc<dyn Store>, fleet: &str, lease: Duration) -> Self {
        let prefix = format!("mixfleet/{fleet}/");
        Registry { env: env.clone(), store, prefix, lease, patience: lease / 3 }
    }

    /// The store's answer, if it comes in time: a connection may stay open while nothing arrives.
    pub(super) async fn in_time<T>(&self, answer: StoreAnswer<'_, T>) -> Result<T, RegistryError> {
        tokio::select! {
            biased;
            answer = answer => answer,
            () = self.env.sleep(self.patience) => {
                Err(RegistryError::Etcd(format!("no answer for {:.1} s", self.patience.as_secs_f64())))
            }
        }
    }

    /// Repeats an operation that fails because etcd cannot be reached, without limit; the error is logged
    /// once.
    async fn patiently<'a, T>(
        &self,
        what: &str,
        ask: impl Fn() -> StoreAnswer<'a, T> + Send,
    ) -> Result<T, RegistryError> {
        let mut backoff = BACKOFF_MIN;
        loop {
            match ask().await {
                Err(RegistryError::Etcd(error)) => {
                    if backoff == BACKOFF_MIN {
                        tracing::warn!(error, "etcd cannot be reached: {what} waits");
                    }
                    self.env.sleep(backoff).await;
                    backoff = (2 * backoff).min(BACKOFF_MAX);
                }
                outcome => return outcome,
            }
        }
    }

    /// The fleet's charter for a process that serves `model`; created with `secret` if there is none, or if
    /// no member uses it. Waits for etcd.
    ///
    /// # Errors
    /// `Refused` when the members serve something else.
    pub async fn charter(&self, model: &ModelIdentity, secret: [u8; 16]) -> Result<Charter, RegistryError> {
        let own = Charter { protocol: PROTOCOL, model: model.clone(), secret };
        self.patiently("joining the fleet", || Box::pin(self.agree(&own))).await
    }

    /// The charter in force: `own`, unless there is another that fits.
    pub(super) async fn agree(&self, own: &Charter) -> Result<Charter, RegistryError> {
        let (key, members) = (format!("{}charter", self.prefix), self.members_prefix());
        loop {
            let mut conditions = Vec::new();
            let revision = match self.in_time(self.store.get(key.clone())).await? {
                None => 0,
                Some(found) => {
                    let charter: Charter = parse(&key, &found.value)?;
                    let Err(refusal) = charter.check(&own.model) else { return Ok(charter) };
                    if !self.in_time(self.store.list(members.clone())).await?.0.is_empty() {
                        return Err(refusal.into());
                    }
                    conditions.push(Condition::NoneBelow(members.clone()));
                    found.revision
                }
            };
            conditions.push(Condition::Revision(key.clone(), revision));
            if self.in_time(self.store.put_if(conditions, key.clone(), json(own), 0)).await? {
                return Ok(own.clone());
            }
        }
    }

    /// Ids for `count` instances that were never given before. Waits for etcd.
    ///
    /// # Errors
    /// `Foreign` if the counter's content is invalid, or no ids are left.
    pub async fn instance_ids(&self, count: u32) -> Result<Vec<InstanceId>, RegistryError> {
        let ask = || -> StoreAnswer<'_, u64> { Box::pin(self.count("instance", count.into())) };
        let first = self.patiently("joining the fleet", ask).await?;
        let id = |at| u32::try_from(first).ok()?.checked_add(at).map(InstanceId);
        let ids: Option<Vec<InstanceId>> = (0..count).map(id).collect();
        ids.ok_or_else(|| {
            let reason =
                format!("{count} ids from {first} on, and the last that there can be is {}", u32::MAX);
            RegistryError::Foreign { key: self.counter_key("instance"), reason }
        })
    }

    /// An id that no router has. Waits for etcd.
    ///
    /// # Errors
    /// `Foreign` if the counter's content is invalid.
    pub async fn router_id(&self) -> Result<RouterId, RegistryError> {
        self.patiently("joining the fleet", || Box::pin(self.free_router_id())).await
    }

    async fn free_router_id(&self) -> Result<RouterId, RegistryError> {
        loop {
            // After 65,536 routers ids repeat, except those in use.
            let id = RouterId(low_u16(self.count("router", 1).await?));
            let key = format!("{}router-{}", self.members_prefix(), id.0);
            if self.in_time(self.store.get(key)).await?.is_none() {
                return Ok(id);
            }
        }
    }

    /// Takes `count` numbers from a counter, and returns the first.
    async fn count(&self, name: &str, count: u64) -> Result<u64, RegistryError> {
        loop {
            let (first, revision) = self.counter(name).await?;
            if self.set_counter(name, first.saturating_add(count), revision).await? {
                return Ok(first);
            }
        }
    }

    /// Raises a counter to at least `least`: an etcd that lost its data must not give an id again.
    pub(super) async fn count_past(&self, name: &str, least: u64) -> Result<(), RegistryError> {
        loop {
            let (next, revision) = self.counter(name).await?;
            if next >= least || self.set_counter(name, least, revision).await? {
                return Ok(());
            }
        }
    }

    async fn counter(&self, name: &str) -> Result<(u64, i64), RegistryError> {
        let key = self.counter_key(name);
        match self.in_time(self.store.get(key.clone())).await? {
            None => Ok((0, 0)),
            Some(found) => Ok((parse(&key, &found.value)?, found.revision)),
        }
    }

    fn counter_key(&self, name: &str) -> String {
        format!("{}next/{name}", self.prefix)
    }

    /// Sets a counter if it still has `revision`, and returns whether it did.
    async fn set_counter(&self, name: &str, value: u64, revision: i64) -> Result<bool, RegistryError> {
        let key = self.counter_key(name);
        let unchanged = vec![Condition::Revision(key.clone(), revision)];
        self.in_time(self.store.put_if(unchanged, key, value.to_string().into_bytes(), 0)).await
    }

    /// All members now.
    ///
    /// # Errors
    /// When etcd is not reached.
    pub async fn members(&self) -> Result<Members, RegistryError> {
        Ok(self.roll().await?.members)
    }

    pub(super) async fn roll(&self) -> Result<MemberList, RegistryError> {
        let (entries, revision) = self.in_time(self.store.list(self.members_prefix())).await?;
        let (mut members, mut created) = (BTreeMap::new(), BTreeMap::new());
        for (key, entry) in &entries {
            if let Some((name, member)) = self.member(key, &entry.value) {
                created.insert(name.clone(), entry.created);
                members.insert(name, member);
            }
        }
        Ok(MemberList { members: Arc::new(members), created, revision })
    }

    /// Parses a member's record; a record of another version is skipped with a warning.
    pub(super) fn member(&self, key: &str, value: &[u8]) -> Option<(String, Member)> {
        let name = self.member_name(key)?;
        match serde_json::from_slice(value) {
            Ok(member) => Some((name, member)),
            Err(error) => {
                tracing::warn!(name, %error, "unreadable record of a member: is it of another version?");
                None
            }
        }
    }

    pub(super) fn member_name(&self, key: &str) -> Option<String> {
        Some(key.strip_prefix(&self.members_prefix())?.to_owned())
    }

    /// Writes the record under `lease`, unless another process has the name under another lease.
    pub(super) async fn claim(&self, member: &Member, lease: Lease) -> Result<(), RegistryError> {
        let key = self.key_of(member);
        for condition in [Condition::Lease(key.clone(), lease), Condition::Revision(key.clone(), 0)] {
            let put = self.store.put_if(vec![condition], key.clone(), json(member), lease);
            if self.in_time(put).await? {
                return Ok(());
            }
        }
        Err(RegistryError::Taken(member.name()))
    }

    /// Whether the record exists under `lease`.
    pub(super) async fn holds(&self, member: &Member, lease: Lease) -> Result<bool, RegistryError> {
        match self.in_time(self.store.get(self.key_of(member))).await? {
            None => Ok(false),
            Some(entry) if entry.lease == lease => Ok(true),
            Some(_) => Err(RegistryError::Taken(member.name())),
        }
    }

    fn key_of(&self, member: &Member) -> String {
        format!("{}{}", self.members_prefix(), member.name())
    }

    pub(super) fn members_prefix(&self) -> String {
        format!("{}members/", self.prefix)
    }

    /// Writes the record of a new member, and maintains it and the known members in the background.
    pub fn join(&self, charter: Charter, member: Member) -> Membership {
        Membership::begin(self.clone(), charter, member)
    }
}

fn parse<T: serde::de::DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, RegistryError> {
    serde_json::from_slice(value)
        .map_err(|error| RegistryError::Foreign { key: key.into(), reason: error.to_string() })
}

fn json(value: &impl serde::Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("records have names for keys, and finite numbers")
}
