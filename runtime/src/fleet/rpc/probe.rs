//! Measures a link between two processes, over the first transport that works.

use super::super::session::Caller;
use super::client::LentRegions;
use crate::engine::measure::time_writes;
use crate::engine::{HandOffLimits, Links};
use crate::env::{SharedEnv, no_thread};
#[cfg(doc)]
use mixfleet_hal::transport::Endpoint;
use mixfleet_hal::transport::{Descriptor, RemoteAccess};
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::cost::LinkCost;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Maximum concurrent probes: each uses as much memory as a landing region.
const PROBES_MAX: usize = 8;
/// Maximum concurrent probes of one caller: one that it gave up, and the next.
const PROBES_OF_A_CALLER_MAX: usize = 2;
/// Maximum time of a probe; measuring a link of 0.1 GB/s takes a tenth of it.
pub(super) const PROBE_TIME: Duration = Duration::from_secs(30);

/// The callers that measure links to this process now. Clones share the table.
#[derive(Clone, Default)]
pub(super) struct Probes(Arc<Mutex<BTreeMap<Caller, usize>>>);

/// A measurement in progress.
pub(super) struct Probe {
    probes: Probes,
    caller: Caller,
}

impl Probes {
    /// Begins a probe; none if the limit is reached, in all or for this caller.
    pub(super) fn begin(&self, caller: Caller) -> Option<Probe> {
        let mut probes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = probes.get(&caller).copied().unwrap_or(0);
        if own >= PROBES_OF_A_CALLER_MAX || probes.values().sum::<usize>() >= PROBES_MAX {
            return None;
        }
        probes.insert(caller, own + 1);
        Some(Probe { probes: self.clone(), caller })
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let mut probes = self.probes.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = probes.get_mut(&self.caller) {
            *own -= 1;
            if *own == 0 {
                probes.remove(&self.caller);
            }
        }
    }
}

/// The transports of a process.
#[derive(Clone)]
pub struct ProbeLinks {
    /// The transports that its instances use.
    pub links: Links,
    /// Limits of KV staging: links are measured with such pieces.
    pub hand_off: HandOffLimits,
}

/// A measured link.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The first transport that worked.
    pub transport: String,
    /// The measured cost.
    pub cost: LinkCost,
    /// The connection's own description: [`Endpoint::details`].
    pub details: String,
    /// Errors of better transports that should have worked.
    pub broken: Vec<String>,
}

/// Memory that can be written to until this is dropped.
pub(super) struct LentMemory {
    pub(super) regions: Vec<Descriptor>,
    links: Links,
    env: SharedEnv,
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        let (links, regions) = (self.links.clone(), std::mem::take(&mut self.regions));
        // It may have to wait for a peer that is writing.
        let end = async move {
            for region in &regions {
                for transport in links.transports.iter().filter(|t| t.name() == region.transport) {
                    if let Err(error) = transport.deregister(region) {
                        tracing::debug!(%error, "memory for measuring was not taken back");
                    }
                }
            }
        };
        if let Err(error) = self.env.spawn_worker("link probe", Box::pin(end)) {
            tracing::warn!(%error, "memory for measuring is kept: no thread can take it back");
        }
    }
}

impl ProbeLinks {
    /// Provides memory of the size of a landing region, over every transport that can reach it.
    pub(super) fn lend(&self, env: &SharedEnv) -> Result<LentMemory> {
        let memory = (self.links.make_region)(self.hand_off.region_bytes())?;
        let mut lending = LentMemory { regions: Vec::new(), links: self.links.clone(), env: env.clone() };
        for transport in &self.links.transports {
            match transport.register(memory.clone(), RemoteAccess::Write) {
                Ok(region) => lending.regions.push(region),
                Err(error) => {
                    tracing::warn!(transport = transport.name(), %error, "cannot reach memory here")
                }
            }
        }
        if lending.regions.is_empty() {
            return Err(Error::unsupported("no transport reaches memory of this process"));
        }
        Ok(lending)
    }

    /// Measures the link by writing to a peer's memory.
    pub(crate) async fn measure(&self, env: &SharedEnv, lent: LentRegions) -> Result<Measured> {
        let (probe_links, env2) = (self.clone(), env.clone());
        let (done, measured) = oneshot::channel();
        let work = async move {
            let _ = done.send(probe_links.try_each(&env2, &lent.regions));
        };
        env.spawn_worker("link measure", Box::pin(work)).map_err(no_thread)?;
        measured.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "the link was not measured")))
    }

    fn try_each(&self, env: &SharedEnv, regions: &[Descriptor]) -> Result<Measured> {
        let mut broken = Vec::new();
        for region in regions {
            let Some(transport) = self.links.transports.iter().find(|t| t.name() == region.transport) else {
                continue;
            };
            let outbox = (self.links.make_region)(region.bytes.min(self.hand_off.region_bytes()))?;
            let measured = transport.connect(outbox.clone(), region).and_then(|mut endpoint| {
                let cost = time_writes(&|| env.now(), &mut *endpoint, &*outbox, self.hand_off)?;
                Ok((cost, endpoint.details()))
            });
            match measured {
                Ok((cost, details)) => {
                    return Ok(Measured { transport: region.transport.clone(), cost, details, broken });
                }
                // The descriptor itself says that it is not for this peer.
                Err(error) if error.kind == ErrorKind::Unsupported => {}
                Err(error) => broken.push(format!("{}: {error}", region.transport)),
            }
        }
        let detail = if broken.is_empty() { "no transport reaches it".into() } else { broken.join("; ") };
        Err(Error::new(ErrorKind::Closed, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnv;

    #[test]
    fn links_are_measured_by_so_many_at_once_and_no_caller_has_all() {
        let (env, probes) = (SeededEnv::new(1), Probes::default());
        let greedy = Caller::new(&env);
        let mut under_way: Vec<Probe> = (0..9).map_while(|_| probes.begin(greedy)).collect();
        assert_eq!(under_way.len(), PROBES_OF_A_CALLER_MAX);
        under_way.extend((0..99).filter_map(|_| probes.begin(Caller::new(&env))));
        assert_eq!(under_way.len(), PROBES_MAX);
        drop(under_way);
        assert!(probes.begin(greedy).is_some());
    }
}
