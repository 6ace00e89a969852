//! The store of a fleet of processes: etcd.

use super::super::rpc::Pem;
use super::RegistryError;
use super::records::Registry;
use super::store::{Change, Condition, Entry, Lease, Store, StoreAnswer, Watch};
use crate::env::SharedEnv;
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, EventType, GetOptions, KeyValue, PutOptions, Txn, TxnOp,
    WatchOptions, WatchStream,
};
use mixfleet_hal::cast::to_i64;
use std::sync::Arc;
use std::time::Duration;

/// The address of etcd and the fleet's name.
#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// URLs such as `http://host:port` or `https://host:port`.
    pub urls: Vec<String>,
    /// The fleet's name.
    pub fleet: String,
    /// Silence after which a member counts as lost, in whole seconds.
    pub lease: Duration,
    /// Certificates for https.
    pub tls: Option<Pem>,
}

impl Registry {
    /// Creates a registry without waiting for etcd.
    ///
    /// # Errors
    /// When addresses or certificates are invalid.
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
        Ok(Registry::over(env, Arc::new(Etcd(client)), &config.fleet, config.lease))
    }
}

struct Etcd(Client);

impl Etcd {
    /// A client; clones share a connection.
    fn client(&self) -> Client {
        self.0.clone()
    }
}

impl Store for Etcd {
    fn get(&self, key: String) -> StoreAnswer<'_, Option<Entry>> {
        Box::pin(async move {
            let found = self.client().get(key, None).await?;
            Ok(found.kvs().first().map(entry))
        })
    }

    fn list(&self, prefix: String) -> StoreAnswer<'_, (Vec<(String, Entry)>, i64)> {
        Box::pin(async move {
            let found = self.client().get(prefix, Some(GetOptions::new().with_prefix())).await?;
            let revision = found.header().map_or(0, |header| header.revision());
            Ok((found.kvs().iter().map(|kv| (text(kv.key()), entry(kv))).collect(), revision))
        })
    }

    fn put_if(
        &self,
        conditions: Vec<Condition>,
        key: String,
        value: Vec<u8>,
        lease: Lease,
    ) -> StoreAnswer<'_, bool> {
        Box::pin(async move {
            let conditions = conditions.into_iter().map(|condition| match condition {
                Condition::Revision(key, revision) => Compare::mod_revision(key, CompareOp::Equal, revision),
                Condition::Lease(key, lease) => Compare::lease(key, CompareOp::Equal, lease),
                // The condition applies to all keys with the prefix, if there are any.
                Condition::NoneBelow(prefix) => {
                    Compare::create_revision(prefix, CompareOp::Equal, 0).with_prefix()
                }
            });
            let put = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)));
            let txn = Txn::new().when(conditions.collect::<Vec<_>>()).and_then([put]);
            Ok(self.client().txn(txn).await?.succeeded())
        })
    }

    fn grant(&self, span: Duration) -> StoreAnswer<'_, Lease> {
        let seconds = to_i64(span.as_secs().max(1));
        Box::pin(async move { Ok(self.client().lease_grant(seconds, None).await?.id()) })
    }

    fn keep_alive(&self, lease: Lease) -> StoreAnswer<'_, bool> {
        Box::pin(async move {
            match self.client().lease_keep_alive(lease).await {
                // The stream has given the first answer, which is all that is needed.
                Ok(_kept) => Ok(true),
                Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
                Err(error) => Err(error.into()),
            }
        })
    }

    fn revoke(&self, lease: Lease) -> StoreAnswer<'_, ()> {
        Box::pin(async move { Ok(self.client().lease_revoke(lease).await.map(drop)?) })
    }

    fn watch(&self, prefix: String, revision: i64) -> StoreAnswer<'_, Box<dyn Watch>> {
        Box::pin(async move {
            let options = WatchOptions::new().with_prefix().with_start_revision(revision);
            let stream = self.client().watch(prefix, Some(options)).await?;
            Ok(Box::new(Watching(stream)) as Box<dyn Watch>)
        })
    }
}

struct Watching(WatchStream);

impl Watch for Watching {
    fn next(&mut self) -> StoreAnswer<'_, Vec<Change>> {
        Box::pin(async move {
            let response = self.0.message().await?;
            let response = response.ok_or_else(|| RegistryError::Etcd("the watch ended".into()))?;
            if response.canceled() {
                // Later events were compacted away; attaching again reads all members.
                let reason = response.cancel_reason();
                return Err(RegistryError::Etcd(format!("the watch ended ({reason})")));
            }
            let events = response.events().iter().filter_map(|event| Some((event.event_type(), event.kv()?)));
            let change = |(kind, kv): (EventType, &KeyValue)| match kind {
                EventType::Put => Change::Put { key: text(kv.key()), value: kv.value().to_vec() },
                EventType::Delete => Change::Gone { key: text(kv.key()) },
            };
            Ok(events.map(change).collect())
        })
    }
}

fn entry(kv: &KeyValue) -> Entry {
    let (created, revision) = (kv.create_revision(), kv.mod_revision());
    Entry { value: kv.value().to_vec(), created, revision, lease: kv.lease() }
}

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).into_owned()
}

impl From<etcd_client::Error> for RegistryError {
    fn from(error: etcd_client::Error) -> Self {
        let mut text = error.to_string();
        if let etcd_client::Error::GRpcStatus(status) = &error {
            text = format!("{}: {}", status.code(), status.message());
        }
        RegistryError::Etcd(text)
    }
}
