//! What is asked of etcd.

use super::super::rpc::Pem;
use super::super::session::{Model, PROTOCOL, RouterId};
use super::keep::Membership;
use super::{Charter, Member, Members, RegistryError};
use crate::env::SharedEnv;
use etcd_client::{Client, Compare, CompareOp, ConnectOptions, GetOptions, PutOptions, Txn, TxnOp};
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Where etcd is, and which fleet is meant.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// `http://host:port` or `https://host:port`.
    pub urls: Vec<String>,
    /// The fleet's name.
    pub fleet: String,
    /// A member that says nothing for so long is none; whole seconds count.
    pub lease: Duration,
    /// For https.
    pub tls: Option<Pem>,
}

/// The registry of a fleet. Clones share a connection.
#[derive(Clone)]
pub struct Registry {
    pub(super) env: SharedEnv,
    pub(super) client: Client,
    pub(super) prefix: String,
    pub(super) lease: Duration,
}

/// Between two tries to reach etcd.
pub(super) const BACKOFF_MIN: Duration = Duration::from_millis(100);
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(2);

impl Registry {
    /// Does not wait for etcd to be there.
    ///
    /// # Errors
    /// For addresses or certificates that cannot be.
    pub async fn new(env: &SharedEnv, config: &RegistryConfig) -> Result<Self, RegistryError> {
        let part = config.lease / 3;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(part)
            .with_timeout(part)
            .with_keep_alive(part, part)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(pem) = config.tls.as_ref().filter(|_| config.urls.iter().any(|u| u.starts_with("https:")))
        {
            // etcd's own certificate names its host, not the fleet.
            options = options.with_tls(pem.client_of_any_host());
        }
        let client = Client::connect(&config.urls, Some(options)).await?;
        let prefix = format!("mixfleet/{}/", config.fleet);
        Ok(Registry { env: env.clone(), client, prefix, lease: config.lease })
    }

    /// Repeats what fails because etcd is not reached, for ever; says so once.
    async fn patiently<T>(
        &self,
        what: &str,
        mut ask: impl AsyncFnMut() -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let mut backoff = BACKOFF_MIN;
        loop {
            match ask().await {
                Err(RegistryError::Etcd(error)) => {
                    if backoff == BACKOFF_MIN {
                        tracing::warn!(error, "etcd is not reached: {what} waits");
                    }
                    self.env.sleep(backoff).await;
                    backoff = (2 * backoff).min(BACKOFF_MAX);
                }
                outcome => return outcome,
            }
        }
    }

    /// The fleet's charter, for who serves `model`; made with `secret` if there is none, or if nobody is left who
    /// goes by it. Waits for etcd.
    ///
    /// # Errors
    /// `Refused` when the members serve something else.
    pub async fn charter(&self, model: &Model, secret: [u8; 16]) -> Result<Charter, RegistryError> {
        let own = Charter { protocol: PROTOCOL, model: model.clone(), secret };
        self.patiently("joining the fleet", async || self.agree(&own).await).await
    }

    /// The charter that holds: `own`, unless there is another that fits.
    pub(super) async fn agree(&self, own: &Charter) -> Result<Charter, RegistryError> {
        let (key, members) = (format!("{}charter", self.prefix), self.members_prefix());
        let mut client = self.client.clone();
        loop {
            let found = client.get(key.clone(), None).await?;
            let mut conditions = Vec::new();
            let revision = match found.kvs().first() {
                None => 0,
                Some(found) => {
                    let charter: Charter = parse(&key, found.value())?;
                    let Err(refusal) = charter.check(&own.model) else { return Ok(charter) };
                    let options = Some(GetOptions::new().with_prefix().with_count_only());
                    if client.get(members.clone(), options).await?.count() > 0 {
                        return Err(refusal.into());
                    }
                    // It holds for all keys with the prefix, if there are any.
                    conditions
                        .push(Compare::create_revision(members.clone(), CompareOp::Equal, 0).with_prefix());
                    found.mod_revision()
                }
            };
            conditions.push(Compare::mod_revision(key.clone(), CompareOp::Equal, revision));
            let put = TxnOp::put(key.clone(), json(own), None);
            if client.txn(Txn::new().when(conditions).and_then([put])).await?.succeeded() {
                return Ok(own.clone());
            }
        }
    }

    /// Ids for so many instances, never given before. Waits for etcd.
    ///
    /// # Errors
    /// `Foreign` if the counter is none.
    pub async fn instance_ids(&self, count: u32) -> Result<Vec<InstanceId>, RegistryError> {
        let first = self.patiently("joining the fleet", async || self.count("instance", count.into()).await);
        let first = first.await?;
        Ok((first..first + u64::from(count)).map(|id| InstanceId(id as u32)).collect())
    }

    /// An id that no router has. Waits for etcd.
    ///
    /// # Errors
    /// `Foreign` if the counter is none.
    pub async fn router_id(&self) -> Result<RouterId, RegistryError> {
        let ask = async || {
            loop {
                // After 65,536 routers ids come again, except those that are in use.
                let id = RouterId((self.count("router", 1).await? % (1 << 16)) as u16);
                let key = format!("{}router-{}", self.members_prefix(), id.0);
                if self.client.clone().get(key, None).await?.kvs().is_empty() {
                    return Ok(id);
                }
            }
        };
        self.patiently("joining the fleet", ask).await
    }

    /// Takes `count` numbers from a counter; the first of them.
    async fn count(&self, name: &str, count: u64) -> Result<u64, RegistryError> {
        let mut client = self.client.clone();
        loop {
            let (first, revision) = self.counter(name).await?;
            if self.set_counter(&mut client, name, first + count, revision).await? {
                return Ok(first);
            }
        }
    }

    /// A counter is at least `least`: an etcd that lost its data must not give an id again.
    pub(super) async fn count_past(&self, name: &str, least: u64) -> Result<(), RegistryError> {
        let mut client = self.client.clone();
        loop {
            let (next, revision) = self.counter(name).await?;
            if next >= least || self.set_counter(&mut client, name, least, revision).await? {
                return Ok(());
            }
        }
    }

    async fn counter(&self, name: &str) -> Result<(u64, i64), RegistryError> {
        let key = format!("{}next/{name}", self.prefix);
        let found = self.client.clone().get(key.clone(), None).await?;
        match found.kvs().first() {
            None => Ok((0, 0)),
            Some(found) => Ok((parse(&key, found.value())?, found.mod_revision())),
        }
    }

    /// Whether it still had `revision`.
    async fn set_counter(
        &self,
        client: &mut Client,
        name: &str,
        value: u64,
        revision: i64,
    ) -> Result<bool, RegistryError> {
        let key = format!("{}next/{name}", self.prefix);
        let unchanged = Compare::mod_revision(key.clone(), CompareOp::Equal, revision);
        let put = TxnOp::put(key, value.to_string(), None);
        Ok(client.txn(Txn::new().when([unchanged]).and_then([put])).await?.succeeded())
    }

    /// All members now, and the revision of etcd that this is.
    ///
    /// # Errors
    /// When etcd is not reached.
    pub async fn members(&self) -> Result<(Members, i64), RegistryError> {
        let options = Some(GetOptions::new().with_prefix());
        let found = self.client.clone().get(self.members_prefix(), options).await?;
        let revision = found.header().map_or(0, |header| header.revision());
        let members = found.kvs().iter().filter_map(|kv| self.member(kv.key(), kv.value()));
        Ok((Arc::new(members.collect::<BTreeMap<_, _>>()), revision))
    }

    /// A member by its key and record; a record of another version is left out, and said.
    pub(super) fn member(&self, key: &[u8], value: &[u8]) -> Option<(String, Member)> {
        let name = self.member_name(key)?;
        match serde_json::from_slice(value) {
            Ok(member) => Some((name, member)),
            Err(error) => {
                tracing::warn!(name, %error, "a member's record is not understood: is it of another version?");
                None
            }
        }
    }

    pub(super) fn member_name(&self, key: &[u8]) -> Option<String> {
        let name = key.strip_prefix(self.members_prefix().as_bytes())?;
        Some(String::from_utf8_lossy(name).into_owned())
    }

    /// Writes the record, unless another process has the name: one whose lease is neither `lease` nor `former`.
    pub(super) async fn claim(
        &self,
        member: &Member,
        lease: i64,
        former: Option<i64>,
    ) -> Result<(), RegistryError> {
        let key = format!("{}{}", self.members_prefix(), member.name());
        let mut client = self.client.clone();
        let mut mine = vec![Compare::create_revision(key.clone(), CompareOp::Equal, 0)];
        mine.extend(
            [Some(lease), former]
                .into_iter()
                .flatten()
                .map(|id| Compare::lease(key.clone(), CompareOp::Equal, id)),
        );
        for condition in mine {
            let options = Some(PutOptions::new().with_lease(lease));
            let put = TxnOp::put(key.clone(), json(member), options);
            if client.txn(Txn::new().when([condition]).and_then([put])).await?.succeeded() {
                return Ok(());
            }
        }
        Err(RegistryError::Taken(member.name()))
    }

    pub(super) async fn put(&self, member: &Member, lease: i64) -> Result<(), RegistryError> {
        let key = format!("{}{}", self.members_prefix(), member.name());
        let options = Some(PutOptions::new().with_lease(lease));
        self.client.clone().put(key, json(member), options).await?;
        Ok(())
    }

    pub(super) fn members_prefix(&self) -> String {
        format!("{}members/", self.prefix)
    }

    /// Writes the record of a new member, and keeps it and the members known in the background.
    pub fn join(&self, charter: Charter, member: Member) -> Membership {
        Membership::begin(self.clone(), charter, member)
    }
}

fn parse<T: serde::de::DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, RegistryError> {
    serde_json::from_slice(value)
        .map_err(|error| RegistryError::Foreign { key: key.into(), reason: error.to_string() })
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records have names for keys, and finite numbers")
}
