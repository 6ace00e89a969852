//! Elects one of several pickers by a `Lease`: the holder renews it, and another one takes it when it has not
//! changed for its duration.
//!
//! Whether a lease has expired is judged by the time since its last observed change, so that clocks of hosts
//! need not agree.

use super::ClusterAccess;
use crate::service::EndpointPicker;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use mixfleet_hal::cast::to_i64;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::SharedEnv;
use std::time::Duration;

/// Times of an election.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTimes {
    /// Time without a renewal after which another picker may take the lease.
    pub duration: Duration,
    /// Time in which the holder must have renewed it, or stands by.
    pub deadline: Duration,
    /// Time between two attempts.
    pub retry: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        // those of Kubernetes' own components
        LeaseTimes {
            duration: Duration::from_secs(15),
            deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// The lease that a picker wants.
#[derive(Clone, Debug)]
pub struct PickerLease {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The picker's own name in it, unique among pickers.
    pub identity: String,
    /// Times of the election.
    pub times: LeaseTimes,
}

/// The lease as it was last observed.
struct Observed {
    spec: LeaseSpec,
    /// When it was first observed so.
    since: Seconds,
}

struct Election {
    leases: Api<Lease>,
    lease: PickerLease,
    env: SharedEnv,
    observed: Option<Observed>,
    /// When this picker last renewed it as its holder.
    renewed: Option<Seconds>,
}

/// Holds a lease, or tries to, forever. The picker stands by, and is not ready, while it does not hold it.
/// When `told`, it gives the lease back and returns.
pub async fn hold_lease(
    picker: EndpointPicker,
    cluster: ClusterAccess,
    env: SharedEnv,
    lease: PickerLease,
    told: impl Future<Output = ()>,
) {
    picker.0.stand_by(true);
    let leases = Api::namespaced(cluster.client, &lease.namespace);
    let mut election = Election { leases, lease, env, observed: None, renewed: None };
    let LeaseTimes { retry, deadline, .. } = election.lease.times;
    let mut is_holder = false;
    let mut told = std::pin::pin!(told);
    loop {
        let began = election.env.now();
        match tokio::time::timeout(deadline, election.attempt()).await {
            Ok(Ok(true)) => election.renewed = Some(began),
            Ok(Ok(false)) => election.renewed = None,
            Ok(Err(error)) => {
                tracing::warn!(lease = election.lease.name, %error, "the lease cannot be renewed; retrying");
            }
            Err(_) => tracing::warn!(lease = election.lease.name, "the API server does not answer; retrying"),
        }
        let now = election.env.now();
        let holds = election.renewed.is_some_and(|at| (now - at).0 < deadline.as_secs_f64());
        if holds != is_holder {
            is_holder = holds;
            tracing::info!(lease = election.lease.name, is_holder, "the lease has changed hands");
            picker.0.stand_by(!is_holder);
        }
        tokio::select! {
            () = tokio::time::sleep(retry) => {}
            () = &mut told => break,
        }
    }
    picker.0.stand_by(true);
    if is_holder && let Err(error) = election.release().await {
        tracing::warn!(%error, "the lease was not given back; another picker gets it when it expires");
    }
}

impl Election {
    /// Renews or takes the lease, if it may; returns whether this picker holds it.
    async fn attempt(&mut self) -> kube::Result<bool> {
        let Some(present) = self.leases.get_opt(&self.lease.name).await? else {
            let metadata = ObjectMeta { name: Some(self.lease.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.held_spec(None)) };
            return self.settled(self.leases.create(&PostParams::default(), &lease).await);
        };
        let spec = present.spec.clone().unwrap_or_default();
        let now = self.env.now();
        if self.observed.as_ref().is_none_or(|seen| seen.spec != spec) {
            self.observed = Some(Observed { spec: spec.clone(), since: now });
        }
        let since = self.observed.as_ref().map_or(now, |seen| seen.since);
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let duration_s = spec.lease_duration_seconds.map_or(0.0, f64::from);
        let is_own = holder == self.lease.identity;
        if !is_own && !holder.is_empty() && (now - since).0 < duration_s {
            return Ok(false);
        }
        let lease = Lease { spec: Some(self.held_spec(Some(&spec))), ..present };
        self.settled(self.leases.replace(&self.lease.name, &PostParams::default(), &lease).await)
    }

    /// Whether a write succeeded. A conflict means that another picker wrote first.
    fn settled(&mut self, written: kube::Result<Lease>) -> kube::Result<bool> {
        match written {
            Ok(lease) => {
                let spec = lease.spec.unwrap_or_default();
                self.observed = Some(Observed { spec, since: self.env.now() });
                Ok(true)
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The specification with this picker as the holder from now on.
    fn held_spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = Timestamp::from_microsecond(to_i64(self.env.unix_time().0 * 1e6)).ok().map(MicroTime);
        let is_own =
            before.is_some_and(|spec| spec.holder_identity.as_deref() == Some(&*self.lease.identity));
        let transitions = before.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            acquire_time: match before {
                Some(spec) if is_own => spec.acquire_time.clone(),
                _ => now.clone(),
            },
            holder_identity: Some(self.lease.identity.clone()),
            lease_duration_seconds: i32::try_from(self.lease.times.duration.as_secs().max(1)).ok(),
            lease_transitions: Some(if is_own || before.is_none() {
                transitions
            } else {
                transitions.saturating_add(1)
            }),
            renew_time: now,
            ..LeaseSpec::default()
        }
    }

    /// Gives the lease back.
    async fn release(&self) -> kube::Result<()> {
        let mut present = self.leases.get(&self.lease.name).await?;
        if let Some(spec) = &mut present.spec
            && spec.holder_identity.as_deref() == Some(&*self.lease.identity)
        {
            spec.holder_identity = None;
            self.leases.replace(&self.lease.name, &PostParams::default(), &present).await?;
        }
        Ok(())
    }
}
