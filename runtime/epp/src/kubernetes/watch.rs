//! Follows an `InferencePool` and its pods through the API server.

use super::ClusterAccess;
use super::members::{PoolName, PoolSpec, inference_pool};
use crate::follow::{OpenPool, PoolSwitch};
use crate::pool::{EndpointPool, PoolEndpoint};
use crate::service::EndpointPicker;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, ResourceExt};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time in which further changes are awaited before they are applied together.
const GATHER: Duration = Duration::from_millis(50);

type ObjectEvents<K> = BoxStream<'static, Result<Event<K>, watcher::Error>>;

/// The present objects of a watched list.
struct ListedObjects<K> {
    objects: BTreeMap<String, K>,
    /// Objects of a list that is not complete yet.
    relisted: BTreeMap<String, K>,
    is_complete: bool,
}

impl<K: ResourceExt> ListedObjects<K> {
    fn new() -> Self {
        ListedObjects { objects: BTreeMap::new(), relisted: BTreeMap::new(), is_complete: false }
    }

    /// Applies an event. Objects that a new list lacks have gone.
    fn take(&mut self, event: Event<K>) {
        match event {
            Event::Init => self.relisted.clear(),
            Event::InitApply(object) => drop(self.relisted.insert(object.name_any(), object)),
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.relisted);
                self.is_complete = true;
            }
            Event::Apply(object) => drop(self.objects.insert(object.name_any(), object)),
            Event::Delete(object) => drop(self.objects.remove(&object.name_any())),
        }
    }
}

/// A followed pool.
struct PoolFollower {
    client: Client,
    name: PoolName,
    switch: PoolSwitch,
    spec: Option<PoolSpec>,
    pools: ListedObjects<DynamicObject>,
    pods: ListedObjects<Pod>,
    watched_pods: Option<ObjectEvents<Pod>>,
    /// The pool that is applied.
    applied: Option<EndpointPool>,
    /// Endpoints that can be opened, and reasons already logged.
    checked: BTreeSet<PoolEndpoint>,
    reasons: BTreeSet<String>,
}

/// Follows an `InferencePool` and its pods forever. While the API server does not answer, the known pods get
/// requests.
pub async fn follow_inference_pool(
    picker: EndpointPicker,
    cluster: ClusterAccess,
    name: PoolName,
    open: OpenPool,
) {
    let pools =
        Api::<DynamicObject>::namespaced_with(cluster.client.clone(), &name.namespace, &inference_pool());
    let only = watcher::Config::default().fields(&format!("metadata.name={}", name.name));
    let mut watched = watched(pools, only);
    let mut follower = PoolFollower {
        client: cluster.client,
        name,
        switch: PoolSwitch::new(picker, open),
        spec: None,
        pools: ListedObjects::new(),
        pods: ListedObjects::new(),
        watched_pods: None,
        applied: None,
        checked: BTreeSet::new(),
        reasons: BTreeSet::new(),
    };
    loop {
        follower.next_change(&mut watched).await;
        // changes often come together, such as the pods of a deployment
        while tokio::time::timeout(GATHER, follower.next_change(&mut watched)).await.is_ok() {}
        follower.apply();
    }
}

/// The events of a list, which continues after faults.
fn watched<K>(api: Api<K>, config: watcher::Config) -> ObjectEvents<K>
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    watcher(api, config).default_backoff().boxed()
}

impl PoolFollower {
    /// Takes the next event of either list.
    async fn next_change(&mut self, pools: &mut ObjectEvents<DynamicObject>) {
        let pods = self.watched_pods.as_mut();
        let next_pod = async {
            match pods {
                Some(pods) => pods.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(event) = pools.next() => match event {
                Ok(event) => {
                    self.pools.take(event);
                    self.respecify();
                }
                Err(error) => self.failed("inferencepools", &error),
            },
            Some(event) = next_pod => match event {
                Ok(event) => self.pods.take(event),
                Err(error) => self.failed("pods", &error),
            },
        }
    }

    fn failed(&self, resource: &str, error: &watcher::Error) {
        // after 410 Gone the list is read again, as it is meant
        if matches!(error, watcher::Error::WatchError(status) if status.code == 410) {
            tracing::debug!(resource, "the watch is too old; listing again");
        } else {
            let PoolName { namespace, name } = &self.name;
            tracing::warn!(namespace, name, resource, %error, "the API server cannot be followed; retrying");
        }
    }

    /// Reads the pool's object, and follows other pods if it selects others.
    fn respecify(&mut self) {
        let object = self.pools.objects.get(&self.name.name);
        let spec = match object.map(PoolSpec::read) {
            Some(Ok(spec)) => Some(spec),
            Some(Err(why)) => {
                let PoolName { namespace, name } = &self.name;
                tracing::error!(namespace, name, why, "the InferencePool is invalid, and changes nothing");
                return;
            }
            None => None,
        };
        let selector = spec.as_ref().map(PoolSpec::selector);
        if self.spec.as_ref().map(PoolSpec::selector) != selector {
            self.pods = ListedObjects::new();
            self.watched_pods = selector.map(|selector| {
                let api = Api::<Pod>::namespaced(self.client.clone(), &self.name.namespace);
                watched(api, watcher::Config::default().labels(&selector))
            });
        }
        self.spec = spec;
    }

    /// Applies the present members.
    fn apply(&mut self) {
        let (pool, mut reasons) = match &self.spec {
            Some(_) if !self.pods.is_complete => return,
            Some(spec) => spec.members(self.pods.objects.values()),
            None if !self.pools.is_complete => return,
            None => (EndpointPool::default(), vec!["the InferencePool does not exist".to_owned()]),
        };
        let EndpointPool { endpoints, objectives } = pool;
        let (switch, checked) = (&self.switch, &self.checked);
        let usable = |endpoint: &PoolEndpoint| {
            if checked.contains(endpoint) {
                return true;
            }
            // one endpoint that cannot be opened must not keep out the others
            let alone = EndpointPool { endpoints: vec![endpoint.clone()], ..EndpointPool::default() };
            (switch.open)(&alone).map_err(|why| reasons.push(why)).is_ok()
        };
        let endpoints: Vec<PoolEndpoint> = endpoints.into_iter().filter(usable).collect();
        self.checked = endpoints.iter().cloned().collect();
        let reasons = reasons.into_iter().collect();
        for why in BTreeSet::difference(&reasons, &self.reasons) {
            tracing::warn!(why, "left out of the pool");
        }
        self.reasons = reasons;
        let pool = EndpointPool { endpoints, objectives };
        if self.applied.as_ref() != Some(&pool) {
            if let Err(why) = self.switch.apply(pool.clone()) {
                tracing::error!(why, "the pool's endpoints cannot be opened");
            }
            self.applied = Some(pool);
        }
    }
}
